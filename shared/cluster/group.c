/* group.c - a rank in its group: the epochs that it goes through, and whom it follows.
 *
 * An epoch is prepared by a thread, then the engine has it, then the engine has met the others in
 * it; meanwhile the engine steps in the one before. What this rank says of itself is one message,
 * the hello, sent at every change. Thread: loop. */
#include "shared/cluster/group.h"

#include <stdio.h>
#include <string.h>

#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/cluster/group_internal.h"

enum { RETRY_MS = 200, GRACE_MS = 1000, FORGIVE_MS = 1000, REFER_MS = 10, MORE_TRIED = 8 };

bool group_leads(const struct group *g) { return g->leader.node == g->o.node; }

bool group_is_free(const struct group *g)
{
    return g->is_ready && !g->preparing && !g->given && !g->is_told_left &&
           !(g->running && g->is_now_lost);
}

void group_say_hello(struct group *g)
{
    Baton__GroupHello m = BATON__GROUP_HELLO__INIT;
    if (!g->is_ready || !g->leader.node) return;
    m.rank = g->o.rank;
    m.size = g->o.size;
    m.name = g->name;
    m.terms = g->terms;
    m.epoch = g->epoch;
    m.joined = g->now.epoch;
    m.running = g->running;
    m.is_free = group_is_free(g);
    m.drains = g->drains;
    m.leaves = g->leaves;
    m.host = (char *)g->o.host; /* is only read */
    m.port = cluster_port(g->o.cluster);
    group_send(g, g->leader.node, FRAME_GROUP_HELLO, TO_LEADER, &m.base);
}

/* ---- epochs ---- */

static void say_lost(struct group *g, uint64_t epoch, const char *why)
{
    Baton__GroupLost m = BATON__GROUP_LOST__INIT;
    m.epoch = epoch;
    m.why = (char *)why; /* is only read */
    group_send(g, g->leader.node, FRAME_GROUP_LOST, TO_LEADER, &m.base);
}

/* After every change of the epochs. */
static void tell_change(struct group *g)
{
    group_say_hello(g);
    if (!g->leaves || g->is_told_left || g->preparing || g->given || g->running) return;
    g->is_told_left = true;
    g->o.on_left(g->o.arg);
}

static void log_end(struct group *g, uint64_t epoch, const char *why)
{
    uint32_t n_unlogged;
    snprintf(g->why, sizeof g->why, "%s", why);
    if (log_repeats_due(&g->endings, g->why, clock_ms(), &n_unlogged))
        log_warn("group lost", "epoch=%llu rank=%u why=\"%s\" repeats=%u",
                 (unsigned long long)epoch, g->o.rank, g->why, n_unlogged);
}

void group_end_epoch(struct group *g, uint64_t epoch, const char *why)
{
    const bool is_next = epoch && (epoch == g->preparing || epoch == g->given);
    char text[GROUP_WHY_MAX];
    if (!is_next && (!epoch || epoch != g->running)) return;
    bool *lost = is_next ? &g->is_next_lost : &g->is_now_lost;
    if (*lost) return;
    *lost = true;
    snprintf(text, sizeof text, "%s", why); /* it may be g->why */
    log_end(g, epoch, text);
    if (!is_next) counter_add(g->losses, 1);
    if (epoch == g->preparing) group_round_set(g, epoch, 0, false);
    g->o.on_lost(g->o.arg, epoch, text);
}

static bool can_take(const struct group *g, const Baton__GroupPropose *m, struct group_roster *next)
{
    return group_is_free(g) && m->epoch > g->running && m->epoch > g->now.epoch &&
           group_roster_unpack(next, m, g->o.size);
}

static void on_propose(struct group *g, const Baton__GroupPropose *m)
{
    struct group_roster next = { 0 };
    if (m->epoch > g->epoch) g->epoch = m->epoch;
    if (!can_take(g, m, &next)) {
        group_roster_clear(&next);
        say_lost(g, m->epoch, "a rank is not done with the epoch before");
        return;
    }
    group_roster_move(&g->next, &next);
    g->is_next_lost = false;
    for (uint32_t i = 0; i < g->next.n; i++)
        if (g->next.members[i].node == g->leader.node) g->leader = g->next.members[i];
    const int32_t me = group_roster_find(&g->next, g->o.rank);
    if (me < 0) {
        g->given = m->epoch;
        g->o.on_leave(g->o.arg, m->epoch);
        return;
    }
    g->preparing = m->epoch;
    group_round_set(g, m->epoch, g->next.n, true);
    g->o.on_prepare(g->o.arg, &g->next, (uint32_t)me);
}

void group_prepared(struct group *g, uint64_t epoch, enum status st, const char *why)
{
    if (epoch != g->preparing) return;
    g->preparing = 0;
    if (st == OK) g->given = epoch;
    else if (!g->is_next_lost) {
        log_end(g, epoch, why);
        say_lost(g, epoch, g->why);
    }
    tell_change(g);
}

void group_joined(struct group *g, uint64_t epoch)
{
    if (epoch != g->given) return;
    g->given = 0;
    g->running = epoch;
    g->is_now_lost = g->is_next_lost;
    g->t_apart_ms = 0;
    g->why[0] = 0;
    memset(g->is_gone, 0, g->o.size * sizeof *g->is_gone);
    group_roster_move(&g->now, &g->next);
    gauge_set(g->epoch_gauge, (double)epoch);
    gauge_set(g->size_gauge, g->now.n);
    counter_add(g->epochs[g->now.reason], 1);
    log_info("group joined", "epoch=%llu rank=%u ranks=%u of=%u reason=%s",
             (unsigned long long)epoch, g->o.rank, g->now.n, g->o.size,
             group_reason_name(g->now.reason));
    tell_change(g);
}

static void be_apart(struct group *g)
{
    g->running = 0;
    gauge_set(g->size_gauge, 0);
    if (!g->t_apart_ms) g->t_apart_ms = clock_ms();
}

void group_has_left(struct group *g, uint64_t epoch)
{
    if (epoch != g->given) return;
    g->given = 0;
    be_apart(g);
    tell_change(g);
}

void group_report_lost(struct group *g, uint64_t epoch, const char *why)
{
    const bool is_next = epoch == g->given;
    if (!epoch || (!is_next && epoch != g->running)) return;
    if (is_next ? !g->is_next_lost : !g->is_now_lost) {
        log_end(g, epoch, why);
        say_lost(g, epoch, g->why);
        if (!is_next) counter_add(g->losses, 1);
    }
    if (is_next) g->given = 0;
    else be_apart(g);
    tell_change(g);
}

/* A leader that ends may not have passed it on, so each new one gets it as well. */
static void say_bell(struct group *g)
{
    Baton__GroupBell m = BATON__GROUP_BELL__INIT;
    m.epoch = g->rung.epoch;
    m.step = g->rung.step;
    group_send(g, g->leader.node, FRAME_GROUP_BELL, TO_LEADER, &m.base);
}

void group_drain(struct group *g)
{
    g->drains = true;
    group_say_hello(g);
}

void group_leave(struct group *g)
{
    g->drains = g->leaves = true;
    tell_change(g);
}

void group_ring(struct group *g, uint64_t epoch, uint64_t step)
{
    g->rung = (struct group_bell){ epoch, step };
    say_bell(g);
}

void group_report_load(struct group *g, struct str load)
{
    Baton__GroupLoad m = BATON__GROUP_LOAD__INIT;
    m.load = (ProtobufCBinaryData){ load.n, (uint8_t *)load.p }; /* is only read */
    group_send(g, g->leader.node, FRAME_GROUP_LOAD, TO_LEADER, &m.base);
}

void group_ready(struct group *g, const char *terms)
{
    snprintf(g->terms, sizeof g->terms, "%s", terms);
    g->is_ready = true;
    group_say_hello(g);
}

/* ---- whom it follows ---- */

void group_follow(struct group *g, const struct group_member *leader)
{
    g->leader = *leader;
    g->is_refused = false;
    if (leader->port && leader->node != g->o.node)
        cluster_learn(g->o.cluster, leader->node, leader->host, leader->port);
    group_say_hello(g);
    if (g->rung.epoch && g->rung.epoch == g->running) say_bell(g);
}

static const struct group_roster *last_roster(const struct group *g)
{
    return g->given || g->preparing ? &g->next : &g->now;
}

/* The lowest rank that is left of the last group leads, and the others go there. */
static void find_next_leader(struct group *g)
{
    const struct group_roster *r = last_roster(g);
    g->leader = (struct group_member){ 0 };
    for (uint32_t i = 0; i < r->n; i++) {
        if (g->is_gone[r->members[i].rank]) continue;
        if (r->members[i].rank == g->o.rank) group_lead_begin(g);
        else group_follow(g, &r->members[i]);
        return;
    }
    if (g->o.rank == 0) group_lead_begin(g);
}

/* A node is lost whole: the rest of it ends, or is frozen and was what the first was lost for. */
static void mark_node_gone(struct group *g, uint32_t rank)
{
    const uint32_t n = g->o.node_size, first = rank / n * n;
    for (uint32_t r = first; r < first + n && r < g->o.size; r++) g->is_gone[r] = true;
}

/* The rank that should lead does not answer at once. Maybe nobody on its host can be reached, or
 * nobody at all: the others are tried meanwhile, a few more each time, until one answers that would
 * lead. */
static void try_others(struct group *g)
{
    const struct group_roster *r = last_roster(g);
    const uint32_t most = g->n_tried;
    g->n_tried += MORE_TRIED;
    for (uint32_t i = 0, n = 0; i < r->n && n < most; i++) {
        const struct group_member *m = &r->members[i];
        if (g->is_gone[m->rank] || m->rank == g->o.rank) continue;
        if (cluster_is_linked(g->o.cluster, m->node)) {
            if (m->rank < g->o.rank) return;
            continue;
        }
        cluster_learn(g->o.cluster, m->node, m->host, m->port);
        cluster_dial(g->o.cluster, m->node);
        n++;
    }
}

/* Is it one that was tried, and not reached? */
static void on_other_lost(struct group *g, uint64_t node)
{
    const struct group_roster *r = last_roster(g);
    if (!g->leader.node || cluster_is_linked(g->o.cluster, g->leader.node)) return;
    for (uint32_t i = 0; i < r->n; i++)
        if (r->members[i].node == node) mark_node_gone(g, r->members[i].rank);
}

static bool is_gone(const struct group *g, const struct group_member *m)
{
    return m->rank < g->o.size && g->is_gone[m->rank] &&
           group_roster_has_node(last_roster(g), m->node);
}

static void on_leader_lost(struct group *g, const char *why)
{
    char text[256];
    const uint64_t node = g->leader.node;
    if (g->leader.rank < g->o.size)
        snprintf(text, sizeof text, "rank %u, which led, was lost: %.180s", g->leader.rank, why);
    else snprintf(text, sizeof text, "the rank that led was lost: %.180s", why);
    g->last_leader = node;
    g->t_forgive_ms = clock_ms() + FORGIVE_MS;
    g->n_tried = 0;
    if (g->leader.rank < g->o.size) mark_node_gone(g, g->leader.rank);
    group_end_epoch(g, g->preparing, text); /* what is exchanged went through it */
    if (group_roster_has_node(&g->next, node)) group_end_epoch(g, g->given, text);
    if (group_roster_has_node(&g->now, node)) group_end_epoch(g, g->running, text);
    find_next_leader(g);
}

/* It asks again, for what is wrong may be mended on the other side: a rank that ended is seen a
 * moment later. */
static void on_refused(struct group *g, uint64_t from, const Baton__GroupRefused *m)
{
    struct group_member other;
    char why[sizeof g->why];
    uint32_t n_unlogged;
    const bool has_other = group_member_unpack(&other, m->leader, g->o.size) &&
                           other.node != g->o.node;
    if (group_leads(g) && from != g->o.node) {
        if (!has_other) return;
        cluster_learn(g->o.cluster, other.node, other.host, other.port);
        group_lead_tell(g, other.node); /* one of the two will follow the other */
        return;
    }
    if (from != g->leader.node) return;
    if (has_other && !is_gone(g, &other) &&
        (other.node != g->last_leader || clock_ms() > g->t_forgive_ms) &&
        clock_ms() >= g->t_referred_ms + REFER_MS) {
        g->t_referred_ms = clock_ms();
        group_follow(g, &other);
        return;
    }
    g->is_refused = true;
    snprintf(why, sizeof why, "%s", m->why);
    if (has_other || strcmp(why, g->why) == 0) return;
    memcpy(g->why, why, sizeof why);
    if (log_repeats_due(&g->refusals, why, clock_ms(), &n_unlogged))
        log_warn("group not joined", "why=\"%s\" repeats=%u", why, n_unlogged);
}

/* A rank says that it leads. */
static void on_lead(struct group *g, uint64_t from, const Baton__GroupLead *m)
{
    struct group_member other;
    if (strcmp(m->name, g->name) != 0 || !group_member_unpack(&other, m->me, g->o.size) ||
        other.node != from || other.rank == g->o.rank) {
        group_refuse_rank(g, from, "this rank is of another group", NULL);
        return;
    }
    memset(g->is_gone, 0, g->o.size * sizeof *g->is_gone);
    if (group_leads(g)) group_lead_on_lead(g, &other, m->n_running);
    else if (g->leader.node != from && cluster_is_linked(g->o.cluster, g->leader.node))
        group_refuse_rank(g, from, "another rank leads", &g->leader);
    else group_follow(g, &other);
}

void group_refuse_rank(struct group *g, uint64_t node, const char *why,
                       const struct group_member *leader)
{
    Baton__GroupRefused body = BATON__GROUP_REFUSED__INIT;
    Baton__GroupMember other;
    body.why = (char *)why; /* is only read */
    if (leader && leader->node) {
        group_member_pack(&other, leader);
        body.leader = &other;
    }
    group_send(g, node, FRAME_GROUP_REFUSED, FROM_LEADER, &body.base);
}

void group_on_met(struct group *g, uint64_t node)
{
    if (group_leads(g)) {
        group_lead_on_met(g, node);
        return;
    }
    if (g->leader.node) return;
    const struct group_member met = { .rank = g->o.size, .node = node };
    group_follow(g, &met);
}

void group_on_lost(struct group *g, uint64_t node, const char *why)
{
    if (group_leads(g)) group_lead_on_lost(g, node, why);
    else if (node == g->leader.node) on_leader_lost(g, why);
    else on_other_lost(g, node);
}

/* ---- messages ---- */

/* One that comes from the leader. */
static void on_leader_message(struct group *g, const struct cluster_message *m,
                              const ProtobufCMessage *body)
{
    const Baton__GroupLost *lost = (const Baton__GroupLost *)body;
    const Baton__GroupBell *bell = (const Baton__GroupBell *)body;
    switch (m->type) {
    case FRAME_GROUP_PROPOSE: on_propose(g, (const Baton__GroupPropose *)body); break;
    case FRAME_GROUP_BLOB: group_round_take(g, (const Baton__GroupBlob *)body); break;
    case FRAME_GROUP_LOST:
        if (lost->epoch) group_end_epoch(g, lost->epoch, lost->why);
        else group_waits_take(g, lost->why);
        break;
    case FRAME_GROUP_BELL: g->o.on_bell(g->o.arg, bell->epoch, bell->step); break;
    default: break;
    }
}

bool group_refuse(struct cluster *c, const struct cluster_message *m)
{
    Baton__GroupRefused body = BATON__GROUP_REFUSED__INIT;
    if (!group_body_of(m->type)) return false;
    body.why = (char *)"the node at that address is in no group";
    if ((m->type == FRAME_GROUP_HELLO || m->type == FRAME_GROUP_LEAD) &&
        cluster_send_proto(c, m->from, FRAME_GROUP_REFUSED, FROM_LEADER, m->attempt, &body.base) !=
            OK)
        log_debug("rank not refused", "peer=%s", m->from_name);
    return true;
}

/* The rank that this one follows follows it: nobody leads. The lower of the two does. */
static void on_circle(struct group *g)
{
    if (g->o.rank < g->leader.rank) group_lead_begin(g);
}

static void take(struct group *g, const struct cluster_message *m, const ProtobufCMessage *body)
{
    if (m->type == FRAME_GROUP_REFUSED) on_refused(g, m->from, (const Baton__GroupRefused *)body);
    else if (m->type == FRAME_GROUP_LEAD) on_lead(g, m->from, (const Baton__GroupLead *)body);
    else if (m->request == FROM_LEADER) {
        if (m->from == g->leader.node && g->is_ready) on_leader_message(g, m, body);
    } else if (group_leads(g)) group_lead_on_message(g, m, body);
    else if (m->type == FRAME_GROUP_HELLO && m->from == g->leader.node) on_circle(g);
    else if (m->type == FRAME_GROUP_HELLO)
        group_refuse_rank(g, m->from, "this rank does not lead, and looks for the one that does",
                          g->leader.rank < g->o.size ? &g->leader : NULL);
}

/* A body that does not parse ends the link: its sender is not what it says. */
bool group_on_message(struct group *g, const struct cluster_message *m)
{
    const ProtobufCMessageDescriptor *type = group_body_of(m->type);
    if (!type || m->attempt != (uint32_t)g->o.kind) return false;
    ProtobufCMessage *body = protobuf_c_message_unpack(type, NULL, m->body.n,
                                                       (const uint8_t *)m->body.p);
    if (!body) {
        cluster_disconnect(g->o.cluster, m->from, "a malformed message of its group");
        return true;
    }
    take(g, m, body);
    protobuf_c_message_free_unpacked(body, NULL);
    return true;
}

/* ---- life ---- */

static void on_retry(void *arg)
{
    struct group *g = arg;
    if (g->round.stopped) return; /* what it would use may be gone; this thread wrote it */
    group_waits_tick(g);
    if (group_leads(g)) group_lead_tick(g);
    else if (!g->leader.node) {
        memset(g->is_gone, 0, g->o.size * sizeof *g->is_gone);
        if (g->o.rank == 0) group_lead_begin(g);
        else cluster_meet(g->o.cluster, g->o.kind, g->o.meet_host, g->o.meet_port);
    } else if (!cluster_is_linked(g->o.cluster, g->leader.node)) {
        try_others(g);
    } else if (g->is_refused) {
        g->is_refused = false;
        group_say_hello(g);
    }
}

static void count_epochs(struct group *g, const char *of)
{
    char labels[64];
    for (enum group_reason r = 0; r < GROUP_REASONS; r++) {
        snprintf(labels, sizeof labels, "%s,reason=\"%s\"", of, group_reason_name(r));
        g->epochs[r] = metrics_counter(g->o.metrics, "baton_group_epochs_total", labels,
                                       "Groups that this rank joined, by why there was a new one.");
    }
}

static void create_metrics(struct group *g)
{
    static const char *const OF[] = {
        [GROUP_OF_EXPERTS] = "of=\"experts\"", [GROUP_OF_NODE] = "of=\"node\""
    };
    struct metrics *m = g->o.metrics;
    const char *of = OF[g->o.kind];
    g->epoch_gauge = metrics_gauge(m, "baton_group_epoch", of,
                                   "The group of ranks that this one is in, by its number.");
    g->size_gauge = metrics_gauge(m, "baton_group_ranks", of,
                                  "Ranks of the group that this one steps in; 0: it is in none.");
    g->losses = metrics_counter(m, "baton_group_lost_total", of,
                                "Groups that ended because a rank was lost.");
    count_epochs(g, of);
}

struct group *group_create(const struct group_options *o)
{
    struct group *g = MEM_NEW(struct group);
    ASSERT(o->size >= 1 && o->size <= GROUP_RANKS_MAX && o->rank < o->size);
    g->o = *o;
    if (!g->o.retry_ms) g->o.retry_ms = RETRY_MS;
    if (!g->o.grace_ms) g->o.grace_ms = GRACE_MS;
    if (!g->o.node_size) g->o.node_size = 1;
    snprintf(g->name, sizeof g->name, "%.*s:%u", GROUP_HOST_MAX - 1, o->meet_host, o->meet_port);
    g->t_apart_ms = clock_ms();
    g->is_gone = MEM_ARRAY(bool, o->size);
    g->lead.seats = MEM_ARRAY(struct group_seat, o->size);
    for (uint32_t r = 0; r < o->size; r++) g->lead.seats[r].at.rank = r;
    group_round_init(&g->round);
    create_metrics(g);
    g->retry = loop_timer_start(o->loop, 0, g->o.retry_ms, on_retry, g);
    if (o->rank == 0) group_lead_begin(g);
    return g;
}

void group_free(struct group *g)
{
    if (!g) return;
    loop_timer_free(g->retry);
    group_round_release(&g->round);
    group_lead_release(g);
    group_roster_clear(&g->next);
    group_roster_clear(&g->now);
    mem_free(g->is_gone);
    mem_free(g);
}

/* ---- facts ---- */

uint64_t group_apart_ms(const struct group *g)
{
    return g->t_apart_ms ? clock_ms() - g->t_apart_ms + 1 : 0;
}

bool group_is_whole(const struct group *g) { return g->running && g->now.n == g->o.size; }

const char *group_reason_name(enum group_reason r)
{
    static const char *const NAMES[GROUP_REASONS] = {
        [GROUP_START] = "start", [GROUP_LOSS] = "loss",           [GROUP_RETURN] = "return",
        [GROUP_DRAIN] = "drain", [GROUP_REBALANCE] = "rebalance",
    };
    return NAMES[r];
}

const struct group_roster *group_now(const struct group *g) { return &g->now; }
