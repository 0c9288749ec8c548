/* group_lead.c - the rank that leads: who is there, which group comes next, what all exchange, and
 * what happens when two lead.
 *
 *     all ranks there, for the first time      ──▶ a group of all
 *     a rank of the group is lost, or drains   ──▶ a group of the others
 *     a rank comes (back)                      ──▶ a group with it
 *     all drain and none has work              ──▶ no group
 *
 * A group that steps goes on until all have the next. Thread: loop. */
#include <stdio.h>
#include <string.h>

#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/cluster/group_internal.h"

enum {
    BACKOFF_MAX_MS = 10000,
    LOOK_AGAIN_MS = 1000,
    LATE_MS = 10000,
    REFUSED_MS = 3000, /* since then a rank that was refused has asked again, if it is there */
    TRIES = 3,         /* of a rank that cannot prepare, before the others go on without it ... */
    SHUT_RETRIES = 25, /* ... for as many pauses between tries, twice as long after each more */
    SHUT_MAX_MS = 60000
};
#define EPOCH_MAX (UINT64_MAX / 2)
/* Two leaders that were apart are less apart than this: their epochs grow by one each try. */
#define EPOCHS_AHEAD_MAX ((uint64_t)1 << 32)

#define EACH_SEAT(s, g)                                                                            \
    for (struct group_seat *s = (g)->lead.seats; s < (g)->lead.seats + (g)->o.size; s++)

static struct group_seat *seat_of(const struct group *g, uint64_t node)
{
    EACH_SEAT(s, g) if (node && s->at.node == node) return s;
    return NULL;
}

static void send_to_all(struct group *g, enum frame_type type, const ProtobufCMessage *body)
{
    EACH_SEAT(s, g) group_send(g, s->at.node, type, FROM_LEADER, body);
}

bool group_lead_has(const struct group *g, uint32_t rank)
{
    return g->lead.seats[rank].at.node != 0;
}

bool group_lead_misses(const struct group *g)
{
    EACH_SEAT(s, g) if (!s->at.node) return true;
    return false;
}

bool group_lead_has_shut_out(const struct group *g, uint32_t rank)
{
    const struct group_seat *s = &g->lead.seats[rank];
    return s->at.node && clock_ms() < s->t_shut_ms;
}

const char *group_lead_refusal(const struct group *g)
{
    const struct group_lead *l = &g->lead;
    return group_leads(g) && clock_ms() < l->t_refusal_ms + REFUSED_MS ? l->refusal : "";
}

static void spread_loss(struct group *g, uint64_t epoch, const char *why, bool failed);

/* ---- what comes next ---- */

/* May be in the next group: with all ranks of its node. */
static bool may_stay(const struct group *g, const struct group_seat *s, uint64_t now_ms)
{
    const uint32_t n = g->o.node_size, first = s->at.rank / n * n;
    for (uint32_t r = first; r < first + n && r < g->o.size; r++) {
        const struct group_seat *its = &g->lead.seats[r];
        if (!its->at.node || its->leaves || now_ms < its->t_shut_ms) return false;
    }
    return true;
}

struct attendance {
    uint32_t n_stay, n_leave, n_busy; /* leave: still in a group; busy: cannot be proposed to */
    bool all_drain, has_expected, was_joined;
    bool is_as_before; /* the ranks that stay step in the last group, and nobody else */
};

/* Says for each seat whether it stays. */
static struct attendance count(struct group *g)
{
    struct attendance a = { .all_drain = true, .is_as_before = g->lead.before.epoch != 0 };
    const uint64_t now_ms = clock_ms();
    EACH_SEAT(s, g)
    {
        const bool leaves = s->at.node && s->leaves && s->running;
        const bool stay = s->stays = may_stay(g, s, now_ms);
        a.n_stay += stay;
        a.n_leave += leaves;
        a.n_busy += (stay || (s->at.node && s->running)) && !s->is_free;
        a.all_drain &= !s->at.node || s->drains;
        a.has_expected |= s->is_expected;
        a.was_joined |= s->joined != 0;
        const bool was = group_roster_find(&g->lead.before, s->at.rank) >= 0;
        if (stay != was || leaves || (was && s->running != g->lead.before.epoch))
            a.is_as_before = false;
    }
    return a;
}

/* Is a group due, and can it be proposed now? */
static bool is_due(const struct group *g, const struct attendance *a)
{
    const struct group_lead *l = &g->lead;
    if (l->next.epoch || a->n_busy || clock_ms() < l->t_retry_ms) return false;
    if (a->n_stay == 0) return a->n_leave > 0;
    if (g->o.kind == GROUP_OF_NODE && a->n_stay < g->o.size) return false;
    if (!a->was_joined && !l->before.epoch) return a->n_stay == g->o.size;
    if (a->has_expected && clock_ms() < l->t_grace_ms) return false;
    /* Whoever still has requests needs the experts of those that wait to leave. */
    if (a->n_leave > 0 && (a->all_drain || clock_ms() < l->t_leave_ms)) return false;
    return !a->is_as_before || l->renews;
}

/* A member of the last group that this leader never heard of would be waited for in its steps. */
static void give_up_without_the_lost(struct group *g)
{
    const struct group_roster *before = &g->lead.before;
    for (uint32_t i = 0; i < before->n; i++) {
        if (g->lead.seats[before->members[i].rank].at.node) continue;
        spread_loss(g, before->epoch, "a rank did not come to the new leader", false);
        return;
    }
}

/* Does the rank step in a group that this leader did not make? */
static bool is_of_another_group(const struct group *g, const struct group_seat *s)
{
    const struct group_lead *l = &g->lead;
    if (!s->at.node || !s->running) return false;
    return (s->running != l->before.epoch || group_roster_find(&l->before, s->at.rank) < 0) &&
           (s->running != l->next.epoch || group_roster_find(&l->next, s->at.rank) < 0);
}

/* Do both step in one group that this leader did not make? */
static bool step_together(const struct group *g, const struct group_seat *a,
                          const struct group_seat *b)
{
    return a->running == b->running && is_of_another_group(g, a) && is_of_another_group(g, b);
}

/* Others of such a group may be among the ranks that are not here, and be waited for in its steps:
 * it is given up. Epochs of two leaders may have one number, so only these ranks are told; their
 * hellos say when they are done. */
static bool part_from_the_absent(struct group *g)
{
    Baton__GroupLost m = BATON__GROUP_LOST__INIT;
    bool told = false;
    if (!group_lead_misses(g)) return false;
    m.why = (char *)"another rank leads, and not all of the group came to it"; /* is only read */
    EACH_SEAT(s, g)
    {
        if (!is_of_another_group(g, s)) continue;
        m.epoch = s->running;
        s->is_free = false;
        told = true;
        group_send(g, s->at.node, FRAME_GROUP_LOST, FROM_LEADER, &m.base);
    }
    return told;
}

/* Why the group of `next`'s members is not the one before. */
static enum group_reason reason_of(const struct group *g, const struct group_roster *next,
                                   bool renews)
{
    const struct group_roster *before = &g->lead.before;
    bool left = false, came = false;
    for (uint32_t i = 0; i < before->n; i++) {
        const struct group_seat *s = &g->lead.seats[before->members[i].rank];
        if (group_roster_has_node(next, before->members[i].node)) continue;
        if (!s->at.node || !s->leaves) return GROUP_LOSS;
        left = true;
    }
    for (uint32_t i = 0; i < next->n; i++)
        came |= !group_roster_has_node(before, next->members[i].node);
    if (left) return GROUP_DRAIN;
    if (!came) return renews ? GROUP_REBALANCE : GROUP_LOSS;
    return before->epoch ? GROUP_RETURN : GROUP_START;
}

/* A group that this leader did not make goes on while it is left out. */
static bool is_left_alone(const struct group *g, const struct group_seat *s)
{
    if (s->stays || !is_of_another_group(g, s) || clock_ms() >= s->t_shut_ms) return false;
    EACH_SEAT(other, g)
    if (other->stays && step_together(g, s, other)) return false;
    return true;
}

static void propose(struct group *g)
{
    struct group_lead *l = &g->lead;
    const struct attendance a = count(g);
    if (!is_due(g, &a) || part_from_the_absent(g)) return;
    const bool renews = l->renews;
    l->renews = false;
    l->i_round = 0;
    l->next.epoch = ++l->epoch;
    l->next.n_failures = l->n_failures;
    l->next.members = MEM_ARRAY(struct group_member, a.n_stay ? a.n_stay : 1);
    give_up_without_the_lost(g);
    EACH_SEAT(s, g)
    {
        s->is_expected = s->has_blob = false;
        if (s->stays) l->next.members[l->next.n++] = s->at;
    }
    l->next.reason = reason_of(g, &l->next, renews);
    if (l->next.n > 0 && g->o.place) g->o.place(g->o.arg, &l->next, &l->before);
    EACH_SEAT(s, g)
    {
        if (!s->stays && (!s->at.node || !s->running || is_left_alone(g, s))) continue;
        s->is_free = false;
        group_roster_send(g, &l->next, s->at.node);
    }
}

/* Have all members joined the group that was proposed? Of one without members: has everybody left
 * the one before? */
static bool is_joined(const struct group *g)
{
    const struct group_roster *next = &g->lead.next;
    EACH_SEAT(s, g)
    {
        const bool in = group_roster_find(next, s->at.rank) >= 0;
        if (in && s->running != next->epoch) return false;
        if (next->n == 0 && s->at.node && s->running) return false;
    }
    return true;
}

static void take_stock(struct group *g)
{
    struct group_lead *l = &g->lead;
    if (l->next.epoch && is_joined(g)) {
        l->n_failures = 0;
        group_roster_move(&l->before, &l->next);
        EACH_SEAT(s, g)
        if (group_roster_find(&l->before, s->at.rank) >= 0) s->n_failures = 0;
    }
    propose(g);
}

void group_renew(struct group *g)
{
    if (!group_leads(g)) return;
    g->lead.renews = true;
    propose(g);
}

/* ---- losses ---- */

/* The epoch is given up by all that have it. */
static void spread_loss(struct group *g, uint64_t epoch, const char *why, bool failed)
{
    struct group_lead *l = &g->lead;
    Baton__GroupLost m = BATON__GROUP_LOST__INIT;
    m.epoch = epoch;
    m.why = (char *)why; /* is only read */
    send_to_all(g, FRAME_GROUP_LOST, &m.base);
    /* Their engines give it up first, and their hellos say when. */
    EACH_SEAT(s, g)
    {
        if (s->running == epoch) s->is_free = false;
    }
    if (epoch != l->next.epoch) return;
    group_roster_clear(&l->next);
    if (!failed) return;
    uint64_t wait = (uint64_t)g->o.retry_ms << (l->n_failures < 8 ? l->n_failures : 8);
    if (wait > BACKOFF_MAX_MS) wait = BACKOFF_MAX_MS;
    l->n_failures++;
    l->t_retry_ms = clock_ms() + wait;
}

/* Other ranks are there than before: what failed may work now. */
static void has_changed(struct group *g)
{
    g->lead.n_failures = 0;
    g->lead.t_retry_ms = 0;
}

static void expect(struct group *g, struct group_seat *s)
{
    s->is_expected = true;
    g->lead.t_grace_ms = clock_ms() + g->o.grace_ms;
}

/* Most ranks at once: it may be this one that was cut off, so they are given a moment to answer
 * before it goes on alone. */
static void expect_if_most_are_gone(struct group *g)
{
    const struct group_roster *before = &g->lead.before;
    uint32_t n = 0;
    for (uint32_t i = 0; i < before->n; i++)
        n += g->lead.seats[before->members[i].rank].at.node != 0;
    if (2 * n >= before->n) return;
    for (uint32_t i = 0; i < before->n; i++) {
        struct group_seat *s = &g->lead.seats[before->members[i].rank];
        if (!s->at.node && !s->is_expected) expect(g, s);
    }
}

/* It was told who leads, and cannot be reached: nobody waits for it. */
static void expect_no_more(struct group *g, uint64_t node)
{
    EACH_SEAT(s, g)
    {
        if (!s->is_expected || s->was != node) continue;
        s->is_expected = false;
        propose(g);
    }
}

void group_lead_on_lost(struct group *g, uint64_t node, const char *why)
{
    struct group_lead *l = &g->lead;
    struct group_seat *s = seat_of(g, node);
    char text[256];
    if (!s) {
        expect_no_more(g, node);
        return;
    }
    snprintf(text, sizeof text, "rank %u was lost: %.200s", s->at.rank, why);
    const uint64_t running = s->running;
    const bool in_next = l->next.epoch && (group_roster_find(&l->next, s->at.rank) >= 0);
    *s = (struct group_seat){ .at = s->at, .joined = s->joined };
    s->at.node = 0;
    if (in_next) spread_loss(g, l->next.epoch, text, false);
    if (running) spread_loss(g, running, text, false);
    has_changed(g);
    expect_if_most_are_gone(g);
    take_stock(g);
}

/* ---- ranks that come ---- */

/* The last bell. One that comes late does no harm. */
static void send_bell(struct group *g, const struct group_seat *to)
{
    Baton__GroupBell bell = BATON__GROUP_BELL__INIT;
    bell.epoch = g->lead.bell.epoch;
    bell.step = g->lead.bell.step;
    group_send(g, to->at.node, FRAME_GROUP_BELL, FROM_LEADER, &bell.base);
}

/* The next epoch is above the highest that anybody spoke of: one that is far above would leave no
 * number for the epochs to come. */
static bool is_possible_epoch(const struct group *g, uint64_t epoch)
{
    return epoch <= EPOCH_MAX &&
           (epoch <= g->lead.epoch || epoch - g->lead.epoch <= EPOCHS_AHEAD_MAX);
}

/* Why the rank does not belong; "": it does. */
static void check_hello(const struct group *g, uint64_t from, const Baton__GroupHello *h, char *why,
                        size_t n)
{
    const struct group_seat *its = seat_of(g, from);
    why[0] = 0;
    if (h->size != g->o.size)
        snprintf(why, n, "this is a rank of %u, and rank %u has %u ranks", h->size, g->o.rank,
                 g->o.size);
    else if (h->rank >= g->o.size)
        snprintf(why, n, "there is no rank %u among %u", h->rank, g->o.size);
    else if (g->lead.seats[h->rank].at.node && g->lead.seats[h->rank].at.node != from)
        snprintf(why, n, "there is a rank %u already; each rank needs a number of its own",
                 h->rank);
    else if (its && its->at.rank != h->rank)
        snprintf(why, n, "it is rank %u already", its->at.rank);
    else if (!is_possible_epoch(g, h->epoch) || h->joined > h->epoch || h->running > h->epoch)
        snprintf(why, n, "its last epoch cannot have been %llu", (unsigned long long)h->epoch);
    else if (strcmp(h->name, g->name) != 0)
        snprintf(why, n, "rank %u meets the others at %.80s, and rank %u at %.80s", h->rank,
                 h->name, g->o.rank, g->name);
    else if (strcmp(h->terms, g->terms) != 0)
        snprintf(why, n, "rank %u has %.255s, and rank %u has %.255s", h->rank, h->terms, g->o.rank,
                 g->terms);
    else if (h->port == 0 || h->port > UINT16_MAX || strlen(h->host) >= GROUP_HOST_MAX)
        snprintf(why, n, "its address %.80s:%u cannot be one", h->host, h->port);
}

/* Does a member of the next group say that it has it no more? It does so in silence when it was
 * told that the epoch is lost, maybe by a leader that is gone. */
static bool has_given_up_next(const struct group *g, const Baton__GroupHello *h)
{
    const struct group_roster *next = &g->lead.next;
    return next->epoch && group_roster_find(next, h->rank) >= 0 && h->is_free &&
           h->epoch >= next->epoch && h->running != next->epoch;
}

static void take_hello(struct group *g, struct group_seat *s, uint64_t from,
                       const Baton__GroupHello *h)
{
    if (s->at.node != from) {
        has_changed(g);
        s->n_failures = 0;
        s->t_shut_ms = 0;
        s->told = 0;
    }
    if (h->leaves && !s->leaves) g->lead.t_leave_ms = clock_ms() + g->o.retry_ms;
    s->at.node = from;
    snprintf(s->at.host, sizeof s->at.host, "%s", h->host);
    s->at.port = (uint16_t)h->port;
    s->joined = h->joined;
    s->running = h->running;
    s->is_free = h->is_free;
    s->drains = h->drains;
    s->leaves = h->leaves;
    s->is_expected = false;
    if (h->epoch > g->lead.epoch) g->lead.epoch = h->epoch;
}

static void on_hello(struct group *g, const struct cluster_message *m, const Baton__GroupHello *h)
{
    struct group_lead *l = &g->lead;
    char why[GROUP_WHY_MAX], loading[48];
    uint32_t n_unlogged;
    if (!g->is_ready) {
        snprintf(loading, sizeof loading, "rank %u is still loading", g->o.rank);
        group_refuse_rank(g, m->from, loading, NULL);
        return;
    }
    check_hello(g, m->from, h, why, sizeof why);
    if (why[0]) {
        snprintf(l->refusal, sizeof l->refusal, "%s", why);
        l->t_refusal_ms = clock_ms();
        if (log_repeats_due(&g->refusals, why, clock_ms(), &n_unlogged))
            log_warn("rank refused", "peer=%s why=\"%s\" repeats=%u", m->from_name, why,
                     n_unlogged);
        group_refuse_rank(g, m->from, why, NULL);
        return;
    }
    struct group_seat *s = &l->seats[h->rank];
    const bool is_new = s->at.node != m->from;
    take_hello(g, s, m->from, h);
    if (l->bell.epoch && h->running == l->bell.epoch) send_bell(g, s);
    if (has_given_up_next(g, h)) {
        spread_loss(g, l->next.epoch, "a rank has given it up", true);
        return;
    }
    /* A rank of a group that this one does not know: others of it will come, too. */
    if ((h->joined && !l->before.epoch && !l->t_grace_ms) || (is_new && is_of_another_group(g, s)))
        EACH_SEAT(other, g) if (!other->at.node) expect(g, other);
    take_stock(g);
}

/* ---- what ranks tell each other through the leader ---- */

static bool has_blobs(const struct group *g)
{
    EACH_SEAT(s, g) if (s->has_blob) return true;
    return false;
}

static void collect_blob(struct group *g, struct group_seat *from, const Baton__GroupBlob *m)
{
    struct group_lead *l = &g->lead;
    Baton__GroupBlob all = BATON__GROUP_BLOB__INIT;
    const int32_t member = group_roster_find(&l->next, from->at.rank);
    if (m->epoch != l->next.epoch || member < 0 || m->round != l->i_round ||
        m->data.len > GROUP_BLOB_MAX)
        return;
    if (l->blob_bytes != m->data.len && has_blobs(g)) {
        spread_loss(g, m->epoch, "ranks exchange different things: are they of one version?", true);
        return;
    }
    if (!has_blobs(g)) {
        l->t_round_ms = clock_ms();
        l->is_late_told = false;
        mem_free(l->blobs);
        l->blob_bytes = m->data.len;
        l->blobs = mem_calloc(l->next.n, l->blob_bytes ? l->blob_bytes : 1);
    }
    if (m->data.len) memcpy(l->blobs + (size_t)member * l->blob_bytes, m->data.data, m->data.len);
    from->has_blob = true;
    for (uint32_t i = 0; i < l->next.n; i++)
        if (!l->seats[l->next.members[i].rank].has_blob) return;
    EACH_SEAT(s, g) s->has_blob = false;
    all.epoch = m->epoch;
    all.round = l->i_round++;
    all.data = (ProtobufCBinaryData){ l->next.n * l->blob_bytes, l->blobs };
    for (uint32_t i = 0; i < l->next.n; i++)
        group_send(g, l->next.members[i].node, FRAME_GROUP_BLOB, FROM_LEADER, &all.base);
}

static void spread_bell(struct group *g, uint64_t from, const Baton__GroupBell *m)
{
    g->lead.bell = (struct group_bell){ m->epoch, m->step };
    EACH_SEAT(s, g)
    {
        const bool has_epoch = s->running == m->epoch ||
                               (g->lead.next.epoch == m->epoch &&
                                group_roster_find(&g->lead.next, s->at.rank) >= 0);
        if (s->at.node != from && has_epoch) send_bell(g, s);
    }
}

/* How long a rank is left out, at most SHUT_MAX_MS. nth: newcomers that are left out together are
 * tried again one after the other. */
static uint64_t shut_pause_ms(const struct group *g, uint32_t n_more, uint32_t nth)
{
    const uint64_t most = SHUT_MAX_MS / 2,
                   first = (uint64_t)g->o.retry_ms * SHUT_RETRIES << (n_more < 8 ? n_more : 8);
    const uint64_t pause = first < most ? first : most, room = (SHUT_MAX_MS - pause) / g->o.size;
    return pause + (nth - 1) * (pause < room ? pause : room);
}

static void charge(struct group *g, struct group_seat *s, uint32_t nth, const char *why)
{
    if (++s->n_failures < TRIES) return;
    const uint64_t pause = shut_pause_ms(g, s->n_failures - TRIES, nth);
    s->t_shut_ms = clock_ms() + pause;
    log_warn("group goes on without a rank that cannot join",
             "rank=%u tries=%u again_in_ms=%llu why=\"%.200s\"", s->at.rank, s->n_failures,
             (unsigned long long)pause, why);
}

/* An epoch could not be made: a rank that is not in the group of now must not keep others out of
 * the next. One that says so itself is meant; where an old member says it, all newcomers are.
 * Newcomers who step together are left out, and tried again, together: each of them alone would end
 * the group of the others. */
static void note_failure(struct group *g, const struct group_seat *from,
                         const Baton__GroupLost *lost)
{
    const struct group_lead *l = &g->lead;
    const struct group_seat *counted[GROUP_RANKS_MAX];
    uint32_t n = 0;
    if (!l->next.epoch || lost->epoch != l->next.epoch || l->before.epoch == 0) return;
    const bool is_own = !group_roster_has_node(&l->before, from->at.node);
    EACH_SEAT(s, g)
    {
        uint32_t i = 0;
        if (!s->at.node || group_roster_has_node(&l->before, s->at.node) ||
            !group_roster_has_node(&l->next, s->at.node) ||
            (is_own && s != from && !step_together(g, s, from)))
            continue;
        while (i < n && !step_together(g, s, counted[i])) i++;
        if (i < n) s->n_failures = counted[i]->n_failures - 1; /* counted already */
        else counted[n++] = s;
        charge(g, s, i + 1, lost->why);
    }
}

void group_lead_on_message(struct group *g, const struct cluster_message *m,
                           const ProtobufCMessage *body)
{
    const Baton__GroupLost *lost = (const Baton__GroupLost *)body;
    const Baton__GroupLoad *load = (const Baton__GroupLoad *)body;
    struct group_seat *s = seat_of(g, m->from);
    if (m->type == FRAME_GROUP_HELLO) on_hello(g, m, (const Baton__GroupHello *)body);
    if (!s) return;
    switch (m->type) {
    case FRAME_GROUP_BLOB: collect_blob(g, s, (const Baton__GroupBlob *)body); break;
    case FRAME_GROUP_LOST:
        if (lost->epoch == 0) break; /* ranks without a group are not told to leave it */
        if (lost->epoch == s->running && is_of_another_group(g, s)) break; /* not one of here */
        note_failure(g, s, lost);
        spread_loss(g, lost->epoch, lost->why, true);
        break;
    case FRAME_GROUP_BELL: spread_bell(g, m->from, (const Baton__GroupBell *)body); break;
    case FRAME_GROUP_LOAD:
        if (g->o.on_load)
            g->o.on_load(g->o.arg, s->at.rank,
                         (struct str){ (const char *)load->load.data, load->load.len });
        break;
    default: break;
    }
}

/* ---- two that lead ---- */

static uint32_t n_running(const struct group *g)
{
    uint32_t n = 0;
    EACH_SEAT(s, g) n += s->at.node && s->running;
    return n;
}

void group_lead_tell(struct group *g, uint64_t node)
{
    Baton__GroupLead m = BATON__GROUP_LEAD__INIT;
    Baton__GroupMember me;
    struct group_member at = { .rank = g->o.rank, .node = g->o.node };
    snprintf(at.host, sizeof at.host, "%s", g->o.host);
    at.port = cluster_port(g->o.cluster);
    group_member_pack(&me, &at);
    m.name = g->name;
    m.me = &me;
    m.n_running = n_running(g);
    group_send(g, node, FRAME_GROUP_LEAD, FROM_LEADER, &m.base);
}

/* The one that more ranks step under goes on leading, of equals the lower rank; one that still
 * loads never does. */
void group_lead_on_lead(struct group *g, const struct group_member *other, uint32_t n_theirs)
{
    const uint32_t n_mine = n_running(g);
    if (!g->is_ready || n_theirs > n_mine || (n_theirs == n_mine && other->rank < g->o.rank))
        group_lead_end(g, other);
    else group_lead_tell(g, other->node);
}

void group_lead_on_met(struct group *g, uint64_t node)
{
    struct group_seat *s = &g->lead.seats[g->lead.i_met];
    if (seat_of(g, node)) return;
    s->met = node;
    s->t_look_ms = clock_ms() + LOOK_AGAIN_MS;
    group_lead_tell(g, node);
}

/* Tries the last address of one rank that is not there, for rank 0 where all meet: it may have come
 * back, or lead the other half. */
static void look_for_one(struct group *g)
{
    struct group_lead *l = &g->lead;
    for (uint32_t n = 0; n < g->o.size; n++) {
        l->i_look = (l->i_look + 1) % g->o.size;
        const struct group_seat *s = &l->seats[l->i_look];
        if (l->i_look == g->o.rank || s->at.node || clock_ms() < s->t_look_ms) continue;
        if (s->met && cluster_is_linked(g->o.cluster, s->met)) continue;
        const bool meets = l->i_look == 0; /* whatever it says of itself */
        const char *host = meets ? g->o.meet_host : s->at.host;
        const uint16_t port = meets ? g->o.meet_port : s->at.port;
        if (port == 0) continue;
        if (cluster_meet(g->o.cluster, g->o.kind, host, port)) l->i_met = l->i_look;
        return;
    }
}

/* Others wait in an exchange for a rank that still reads experts, or hangs. */
static void tell_who_is_late(struct group *g)
{
    struct group_lead *l = &g->lead;
    if (!l->next.epoch || l->is_late_told || !has_blobs(g) || clock_ms() - l->t_round_ms < LATE_MS)
        return;
    l->is_late_told = true;
    for (uint32_t i = 0; i < l->next.n; i++)
        if (!l->seats[l->next.members[i].rank].has_blob)
            log_warn("rank keeps the others waiting", "rank=%u epoch=%llu after_ms=%d",
                     l->next.members[i].rank, (unsigned long long)l->next.epoch, LATE_MS);
}

void group_lead_tick(struct group *g)
{
    propose(g);
    tell_who_is_late(g);
    look_for_one(g);
}

/* ---- life ---- */

static void clear(struct group *g)
{
    struct group_lead *l = &g->lead;
    group_roster_clear(&l->before);
    group_roster_clear(&l->next);
    EACH_SEAT(s, g)
    {
        *s = (struct group_seat){ .at = s->at };
        s->at.node = 0;
    }
    mem_free(l->blobs);
    l->blobs = NULL;
    l->blob_bytes = 0;
    l->t_grace_ms = l->t_retry_ms = l->t_refusal_ms = 0;
    l->n_failures = 0;
    l->renews = false;
}

void group_lead_begin(struct group *g)
{
    const struct group_roster *last = g->given || g->preparing ? &g->next : &g->now;
    struct group_member me = { .rank = g->o.rank, .node = g->o.node };
    clear(g);
    group_roster_copy(&g->lead.before, &g->now);
    if (g->given && !g->is_next_lost) group_roster_copy(&g->lead.next, &g->next);
    g->lead.epoch = g->epoch;
    for (uint32_t i = 0; i < last->n; i++) {
        const struct group_member *m = &last->members[i];
        struct group_seat *s = &g->lead.seats[m->rank];
        if (m->rank == g->o.rank) continue;
        s->at = *m;
        s->was = m->node;
        s->at.node = 0;
        if (g->is_gone[m->rank]) continue;
        expect(g, s);
        cluster_learn(g->o.cluster, m->node, m->host, m->port);
    }
    group_follow(g, &me);
    for (uint32_t i = 0; i < last->n; i++)
        if (g->lead.seats[last->members[i].rank].is_expected)
            group_lead_tell(g, last->members[i].node);
    if (last->n) log_info("rank leads the group", "rank=%u of=%u", g->o.rank, g->o.size);
}

void group_lead_end(struct group *g, const struct group_member *leader)
{
    static const char why[] = "another rank leads the group";
    const uint64_t next = g->lead.next.epoch;
    if (next) spread_loss(g, next, why, false);
    if (next) group_end_epoch(g, next, why); /* its own message will not be its leader's */
    EACH_SEAT(s, g)
    if (s->at.node && s->at.node != g->o.node) group_refuse_rank(g, s->at.node, why, leader);
    clear(g);
    group_follow(g, leader);
}

void group_lead_release(struct group *g)
{
    clear(g);
    mem_free(g->lead.seats);
}
