/* group.c - membership by one leader, rank 0: it knows who is there, proposes, collects what ranks
 * exchange, and tells all of a loss. Other ranks know rank 0 only.
 *
 * Rank 0 sends its own messages to itself like to any other, so that there is one way for all.
 * Thread: loop, except group_exchange and group_stop, which `lock` guards. */
#include "shared/cluster/group.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/log/log_repeats.h"
#include "shared/base/mem.h"
#include "shared/cluster/proto/node.pb-c.h"

enum { RETRY_MS = 500, EXCHANGE_MS = 30000, BLOB_MAX = 4096 };
#define EPOCH_MAX (UINT64_MAX / 2)

struct group_member {
    uint64_t node;  /* 0: not there */
    uint64_t epoch; /* its last */
    bool waits;     /* its hello came after the last proposal */
    bool has_blob;  /* of the round that is collected */
};

/* Messages of a type go both ways, and rank 0 is a rank too: this is their request number. */
enum group_way { TO_LEADER, FROM_LEADER };

/* A rank's running exchange, between the thread that makes an ep object and the loop. */
struct group_round {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t epoch; /* that is prepared; an exchange fails when it is not `lives` */
    bool lives, stopped;
    uint32_t round; /* of the epoch */
    bool is_sent, is_done;
    size_t bytes;
    uint8_t mine[BLOB_MAX];
    uint8_t *all; /* the caller's */
};

struct group {
    struct group_options o;
    enum group_state state;
    uint64_t leader; /* rank 0's incarnation; 0: no link to it */
    uint64_t epoch;  /* the last that was proposed */
    bool is_ready, is_refused;
    bool is_preparing;   /* a thread makes an ep object, ... */
    bool has_ep;         /* ... which the engine has until it says that the epoch is lost */
    uint64_t t_apart_ms; /* since when the ranks are not together */
    char terms[GROUP_TERMS_MAX];
    char why[256]; /* why the last epoch ended, or this rank was refused */
    struct loop_timer *retry;
    struct group_round round;
    /* Rank 0's: */
    struct group_member *members; /* [size] */
    uint64_t t_retry_ms;          /* no proposal before */
    uint64_t proposed;            /* epoch; `epoch` follows with the proposal's own delivery */
    uint32_t i_round;
    size_t blob_bytes;
    uint8_t *blobs; /* [size][blob_bytes] */
    struct log_repeats refusals;
    struct gauge *epoch_gauge;
    struct counter *losses;
};

static bool leads(const struct group *g) { return g->o.rank == 0; }

/* ---- sending ---- */

static void send_to(struct group *g, uint64_t node, enum frame_type type, enum group_way way,
                    const ProtobufCMessage *body)
{
    if (node == 0) return;
    if (cluster_send_proto(g->o.cluster, node, type, (uint64_t)way, 0, body) == ERR_FULL)
        cluster_disconnect(g->o.cluster, node, "it does not take the messages of its group");
}

static void send_to_leader(struct group *g, enum frame_type type, const ProtobufCMessage *body)
{
    send_to(g, g->leader, type, TO_LEADER, body);
}

static void send_to_all(struct group *g, enum frame_type type, const ProtobufCMessage *body)
{
    for (uint32_t r = 0; r < g->o.size; r++)
        send_to(g, g->members[r].node, type, FROM_LEADER, body);
}

static void say_hello(struct group *g)
{
    Baton__GroupHello m = BATON__GROUP_HELLO__INIT;
    m.rank = g->o.rank;
    m.size = g->o.size;
    m.epoch = g->epoch;
    m.terms = g->terms;
    g->state = GROUP_WAITING;
    send_to_leader(g, FRAME_GROUP_HELLO, &m.base);
}

/* ---- the exchange of this rank ---- */

static void set_epoch(struct group *g, uint64_t epoch, bool lives)
{
    struct group_round *r = &g->round;
    pthread_mutex_lock(&r->lock);
    r->epoch = epoch;
    r->lives = lives;
    r->round = 0;
    r->is_sent = r->is_done = false;
    pthread_cond_broadcast(&r->changed);
    pthread_mutex_unlock(&r->lock);
}

static void send_blob(void *arg)
{
    struct group *g = arg;
    struct group_round *r = &g->round;
    Baton__GroupBlob m = BATON__GROUP_BLOB__INIT;
    uint8_t bytes[BLOB_MAX];
    pthread_mutex_lock(&r->lock);
    const bool due = r->lives && r->is_sent && !r->is_done && !r->stopped;
    m.epoch = r->epoch;
    m.round = r->round;
    m.data = (ProtobufCBinaryData){ r->bytes, bytes };
    memcpy(bytes, r->mine, r->bytes);
    pthread_mutex_unlock(&r->lock);
    if (due) send_to_leader(g, FRAME_GROUP_BLOB, &m.base);
}

/* The bytes of all ranks are here. */
static void take_blobs(struct group *g, const Baton__GroupBlob *m)
{
    struct group_round *r = &g->round;
    pthread_mutex_lock(&r->lock);
    if (r->lives && m->epoch == r->epoch && m->round == r->round && r->is_sent && !r->is_done &&
        m->data.len == r->bytes * g->o.size) {
        memcpy(r->all, m->data.data, m->data.len);
        r->is_done = true;
        pthread_cond_broadcast(&r->changed);
    }
    pthread_mutex_unlock(&r->lock);
}

static void wait_for_blobs(struct group_round *r)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += EXCHANGE_MS / 1000;
    while (r->lives && !r->stopped && !r->is_done)
        if (pthread_cond_timedwait(&r->changed, &r->lock, &until) != 0) break;
}

enum status group_exchange(void *arg, const void *mine, size_t bytes, void *all, struct err *err)
{
    struct group *g = arg;
    struct group_round *r = &g->round;
    if (bytes > BLOB_MAX) return err_set(err, ERR_TOO_LONG, "%zu bytes for an exchange", bytes);
    pthread_mutex_lock(&r->lock);
    r->bytes = bytes;
    r->all = all;
    memcpy(r->mine, mine, bytes);
    r->is_sent = true;
    r->is_done = false;
    pthread_mutex_unlock(&r->lock);
    const enum status posted = loop_post(g->o.loop, send_blob, g);
    pthread_mutex_lock(&r->lock);
    if (posted == OK) wait_for_blobs(r);
    const bool done = r->is_done, lives = r->lives, stopped = r->stopped;
    r->is_sent = false;
    r->round++;
    pthread_mutex_unlock(&r->lock);
    if (done) return OK;
    return err_set(err, ERR_PEER_LOST, "%s",
                   stopped  ? "this rank stops"
                   : !lives ? "the group was given up meanwhile"
                            : "not all ranks came to the exchange in time");
}

void group_stop(struct group *g)
{
    struct group_round *r = &g->round;
    pthread_mutex_lock(&r->lock);
    r->stopped = true;
    pthread_cond_broadcast(&r->changed);
    pthread_mutex_unlock(&r->lock);
}

/* ---- epochs of this rank ---- */

/* May it be proposed to? */
static bool is_free(const struct group *g)
{
    return g->is_ready && g->leader && !g->is_preparing && !g->has_ep;
}

/* The epoch is over here. */
static void end_epoch(struct group *g, uint64_t epoch, const char *why)
{
    if (epoch != g->epoch || (g->state != GROUP_PREPARING && g->state != GROUP_TOGETHER)) return;
    log_warn("group lost", "epoch=%llu rank=%u why=\"%s\"", (unsigned long long)epoch, g->o.rank,
             why);
    snprintf(g->why, sizeof g->why, "%s", why);
    counter_add(g->losses, 1);
    if (g->state == GROUP_TOGETHER) g->t_apart_ms = clock_ms();
    g->state = g->leader ? GROUP_WAITING : GROUP_MEETING;
    set_epoch(g, epoch, false);
    g->o.on_lost(g->o.arg, epoch, why);
}

static void give_up(struct group *g, uint64_t epoch, const char *why)
{
    Baton__GroupLost m = BATON__GROUP_LOST__INIT;
    m.epoch = epoch;
    m.why = (char *)why; /* is only read */
    send_to_leader(g, FRAME_GROUP_LOST, &m.base);
}

static void on_propose(struct group *g, const Baton__GroupPropose *m)
{
    if (g->state != GROUP_WAITING || !is_free(g)) {
        give_up(g, m->epoch, "a rank is not done with the epoch before");
        return;
    }
    g->epoch = m->epoch;
    g->state = GROUP_PREPARING;
    g->is_preparing = true;
    gauge_set(g->epoch_gauge, (double)m->epoch);
    set_epoch(g, m->epoch, true);
    g->o.on_prepare(g->o.arg, m->epoch);
}

void group_report_lost(struct group *g, uint64_t epoch, const char *why)
{
    char text[256];
    if (epoch != g->epoch) return;
    snprintf(text, sizeof text, "%s", why); /* end_epoch writes g->why */
    g->has_ep = false;
    if (g->state != GROUP_WAITING && g->state != GROUP_MEETING) give_up(g, epoch, text);
    end_epoch(g, epoch, text);
    if (is_free(g)) say_hello(g);
}

void group_prepared(struct group *g, uint64_t epoch, enum status st, const char *why)
{
    g->is_preparing = false;
    g->has_ep = st == OK;
    if (st != OK && g->state == GROUP_PREPARING) group_report_lost(g, epoch, why);
    /* What had to wait for the thread: to be proposed again. */
    else if (g->state == GROUP_WAITING && is_free(g)) say_hello(g);
}

void group_joined(struct group *g, uint64_t epoch)
{
    if (epoch != g->epoch || g->state != GROUP_PREPARING) return;
    g->state = GROUP_TOGETHER;
    g->why[0] = 0;
    log_info("group joined", "epoch=%llu rank=%u size=%u", (unsigned long long)epoch, g->o.rank,
             g->o.size);
}

/* ---- rank 0 ---- */

static uint32_t n_waiting(const struct group *g)
{
    uint32_t n = 0;
    for (uint32_t r = 0; r < g->o.size; r++) n += g->members[r].node != 0 && g->members[r].waits;
    return n;
}

static int32_t rank_of(const struct group *g, uint64_t node)
{
    for (uint32_t r = 0; r < g->o.size; r++)
        if (g->members[r].node == node) return (int32_t)r;
    return -1;
}

static void propose(struct group *g)
{
    Baton__GroupPropose m = BATON__GROUP_PROPOSE__INIT;
    if (n_waiting(g) < g->o.size || clock_ms() < g->t_retry_ms) return;
    for (uint32_t r = 0; r < g->o.size; r++) {
        if (g->members[r].epoch > g->proposed) g->proposed = g->members[r].epoch;
        g->members[r].waits = g->members[r].has_blob = false;
    }
    m.epoch = ++g->proposed;
    g->i_round = 0;
    send_to_all(g, FRAME_GROUP_PROPOSE, &m.base);
}

static void refuse(struct group *g, uint64_t node, const char *why)
{
    Baton__GroupRefused body = BATON__GROUP_REFUSED__INIT;
    body.why = (char *)why; /* is only read */
    send_to(g, node, FRAME_GROUP_REFUSED, FROM_LEADER, &body.base);
}

static void on_hello(struct group *g, const struct cluster_message *m, const Baton__GroupHello *h)
{
    char why[2 * GROUP_TERMS_MAX + 100];
    uint32_t n_unlogged;
    if (!g->is_ready) {
        refuse(g, m->from, "rank 0 is still loading");
        return;
    }
    if (h->size != g->o.size)
        snprintf(why, sizeof why, "this is a rank of %u, and rank 0 has %u ranks", h->size,
                 g->o.size);
    else if (h->rank >= g->o.size)
        snprintf(why, sizeof why, "there is no rank %u among %u", h->rank, g->o.size);
    else if (g->members[h->rank].node && g->members[h->rank].node != m->from)
        snprintf(why, sizeof why, "there is a rank %u already; each rank needs a number of its own",
                 h->rank);
    else if (rank_of(g, m->from) >= 0 && rank_of(g, m->from) != (int32_t)h->rank)
        snprintf(why, sizeof why, "it is rank %d already", rank_of(g, m->from));
    else if (h->epoch > EPOCH_MAX)
        snprintf(why, sizeof why, "its last epoch cannot have been %llu",
                 (unsigned long long)h->epoch);
    else if (strcmp(h->terms, g->terms) != 0)
        snprintf(why, sizeof why, "rank %u has %.200s, and rank 0 has %.200s", h->rank, h->terms,
                 g->terms);
    else {
        g->members[h->rank].node = m->from;
        g->members[h->rank].waits = true;
        g->members[h->rank].epoch = h->epoch;
        propose(g);
        return;
    }
    if (log_repeats_due(&g->refusals, why, clock_ms(), &n_unlogged))
        log_warn("rank refused", "peer=%s why=\"%s\" repeats=%u", m->from_name, why, n_unlogged);
    refuse(g, m->from, why);
}

/* A rank says that the epoch is over, or was lost itself: all give it up. */
static void spread_loss(struct group *g, uint64_t epoch, const char *why)
{
    Baton__GroupLost m = BATON__GROUP_LOST__INIT;
    if (epoch != g->proposed) return;
    m.epoch = epoch;
    m.why = (char *)why;
    g->t_retry_ms = clock_ms() + g->o.retry_ms;
    send_to_all(g, FRAME_GROUP_LOST, &m.base);
}

static bool has_blobs(const struct group *g)
{
    for (uint32_t r = 0; r < g->o.size; r++)
        if (g->members[r].has_blob) return true;
    return false;
}

static void collect_blob(struct group *g, uint32_t rank, const Baton__GroupBlob *m)
{
    Baton__GroupBlob all = BATON__GROUP_BLOB__INIT;
    if (m->epoch != g->proposed || m->round != g->i_round || m->data.len > BLOB_MAX) return;
    if (g->blob_bytes != m->data.len && has_blobs(g)) {
        spread_loss(g, m->epoch, "ranks exchange different things: are they of one version?");
        return;
    }
    if (g->blob_bytes != m->data.len) {
        mem_free(g->blobs);
        g->blob_bytes = m->data.len;
        g->blobs = mem_calloc(g->o.size, g->blob_bytes ? g->blob_bytes : 1);
    }
    if (m->data.len) memcpy(g->blobs + rank * g->blob_bytes, m->data.data, m->data.len);
    g->members[rank].has_blob = true;
    for (uint32_t r = 0; r < g->o.size; r++)
        if (!g->members[r].has_blob) return;
    for (uint32_t r = 0; r < g->o.size; r++) g->members[r].has_blob = false;
    all.epoch = m->epoch;
    all.round = g->i_round++;
    all.data = (ProtobufCBinaryData){ g->o.size * g->blob_bytes, g->blobs };
    send_to_all(g, FRAME_GROUP_BLOB, &all.base);
}

static void spread_bell(struct group *g, uint64_t from, const Baton__GroupBell *m)
{
    Baton__GroupBell bell = BATON__GROUP_BELL__INIT;
    bell.epoch = m->epoch;
    bell.step = m->step;
    for (uint32_t r = 0; r < g->o.size; r++)
        if (g->members[r].node != from)
            send_to(g, g->members[r].node, FRAME_GROUP_BELL, FROM_LEADER, &bell.base);
}

/* ---- messages ---- */

/* One that rank 0 gets from a rank of its group. */
static void on_rank_message(struct group *g, uint32_t rank, const struct cluster_message *m,
                            const ProtobufCMessage *body)
{
    const Baton__GroupLost *lost = (const Baton__GroupLost *)body;
    switch (m->type) {
    case FRAME_GROUP_BLOB: collect_blob(g, rank, (const Baton__GroupBlob *)body); break;
    case FRAME_GROUP_LOST: spread_loss(g, lost->epoch, lost->why); break;
    case FRAME_GROUP_BELL: spread_bell(g, m->from, (const Baton__GroupBell *)body); break;
    default: break;
    }
}

/* It asks again, for what is wrong may be mended on the other side: a rank that ended is seen a
 * moment later. */
static void on_refused(struct group *g, const char *why)
{
    g->is_refused = true;
    if (strcmp(why, g->why) == 0) return;
    snprintf(g->why, sizeof g->why, "%s", why);
    log_warn("group not joined", "why=\"%s\"", g->why);
}

/* One that comes from rank 0. */
static void on_leader_message(struct group *g, const struct cluster_message *m,
                              const ProtobufCMessage *body)
{
    const Baton__GroupLost *lost = (const Baton__GroupLost *)body;
    const Baton__GroupBell *bell = (const Baton__GroupBell *)body;
    switch (m->type) {
    case FRAME_GROUP_REFUSED: on_refused(g, ((const Baton__GroupRefused *)body)->why); break;
    case FRAME_GROUP_PROPOSE: on_propose(g, (const Baton__GroupPropose *)body); break;
    case FRAME_GROUP_BLOB: take_blobs(g, (const Baton__GroupBlob *)body); break;
    case FRAME_GROUP_LOST:
        end_epoch(g, lost->epoch, lost->why);
        if (g->state == GROUP_WAITING && is_free(g)) say_hello(g);
        break;
    case FRAME_GROUP_BELL: g->o.on_bell(g->o.arg, bell->epoch, bell->step); break;
    default: break;
    }
}

static const ProtobufCMessageDescriptor *body_of(enum frame_type type)
{
    switch (type) {
    case FRAME_GROUP_HELLO: return &baton__group_hello__descriptor;
    case FRAME_GROUP_REFUSED: return &baton__group_refused__descriptor;
    case FRAME_GROUP_PROPOSE: return &baton__group_propose__descriptor;
    case FRAME_GROUP_BLOB: return &baton__group_blob__descriptor;
    case FRAME_GROUP_LOST: return &baton__group_lost__descriptor;
    case FRAME_GROUP_BELL: return &baton__group_bell__descriptor;
    default: return NULL;
    }
}

/* A body that does not parse ends the link: its sender is not what it says. */
static ProtobufCMessage *unpack(struct group *g, const struct cluster_message *m)
{
    ProtobufCMessage *body = protobuf_c_message_unpack(body_of(m->type), NULL, m->body.n,
                                                       (const uint8_t *)m->body.p);
    if (!body) cluster_disconnect(g->o.cluster, m->from, "a malformed message of its group");
    return body;
}

bool group_refuse(struct cluster *c, const struct cluster_message *m)
{
    Baton__GroupRefused body = BATON__GROUP_REFUSED__INIT;
    if (!body_of(m->type)) return false;
    body.why = (char *)"the node at that address is not rank 0 of a group";
    if (m->type == FRAME_GROUP_HELLO &&
        cluster_send_proto(c, m->from, FRAME_GROUP_REFUSED, FROM_LEADER, 0, &body.base) != OK)
        log_debug("rank not refused", "peer=%s", m->from_name);
    return true;
}

bool group_on_message(struct group *g, const struct cluster_message *m)
{
    if (!body_of(m->type)) return false;
    ProtobufCMessage *body = unpack(g, m);
    if (!body) return true;
    if (m->request == FROM_LEADER) {
        if (m->from == g->leader && g->is_ready) on_leader_message(g, m, body);
    } else if (!leads(g)) {
        (void)group_refuse(g->o.cluster, m);
    } else {
        const int32_t rank = rank_of(g, m->from);
        if (m->type == FRAME_GROUP_HELLO) on_hello(g, m, (const Baton__GroupHello *)body);
        else if (rank >= 0) on_rank_message(g, (uint32_t)rank, m, body);
    }
    protobuf_c_message_free_unpacked(body, NULL);
    return true;
}

void group_on_lost(struct group *g, uint64_t node, const char *why)
{
    char text[256];
    if (node == g->leader && !leads(g)) {
        g->leader = 0;
        snprintf(text, sizeof text, "rank 0 was lost: %.200s", why);
        end_epoch(g, g->epoch, text);
        g->state = GROUP_MEETING;
        return;
    }
    const int32_t rank = leads(g) ? rank_of(g, node) : -1;
    if (rank < 0) return;
    g->members[rank].node = 0;
    g->members[rank].waits = false;
    snprintf(text, sizeof text, "rank %d was lost: %.200s", rank, why);
    spread_loss(g, g->proposed, text);
}

void group_on_met(struct group *g, uint64_t node)
{
    if (leads(g) || g->leader) return;
    g->leader = node;
    g->state = GROUP_WAITING;
    if (is_free(g)) say_hello(g);
}

void group_ring(struct group *g, uint64_t epoch, uint64_t step)
{
    Baton__GroupBell m = BATON__GROUP_BELL__INIT;
    m.epoch = epoch;
    m.step = step;
    send_to_leader(g, FRAME_GROUP_BELL, &m.base);
}

void group_ready(struct group *g, const char *terms)
{
    snprintf(g->terms, sizeof g->terms, "%s", terms);
    g->is_ready = true;
    if (g->leader) say_hello(g);
}

/* ---- life ---- */

static void on_retry(void *arg)
{
    struct group *g = arg;
    if (!g->leader) cluster_meet(g->o.cluster, g->o.meet_host, g->o.meet_port);
    else if (g->is_refused && g->state == GROUP_WAITING && is_free(g)) {
        g->is_refused = false;
        say_hello(g);
    }
    if (leads(g)) propose(g);
}

struct group *group_create(const struct group_options *o)
{
    struct group *g = MEM_NEW(struct group);
    pthread_condattr_t monotonic;
    g->o = *o;
    if (!g->o.retry_ms) g->o.retry_ms = RETRY_MS;
    g->leader = leads(g) ? o->node : 0;
    g->state = leads(g) ? GROUP_WAITING : GROUP_MEETING;
    g->t_apart_ms = clock_ms();
    g->members = MEM_ARRAY(struct group_member, o->size);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&g->round.lock, NULL);
    pthread_cond_init(&g->round.changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    g->epoch_gauge = metrics_gauge(o->metrics, "baton_group_epoch", "",
                                   "The group of ranks that this one is in, by its number.");
    g->losses = metrics_counter(o->metrics, "baton_group_lost_total", "",
                                "Groups that ended because a rank was lost.");
    g->retry = loop_timer_start(o->loop, 0, g->o.retry_ms, on_retry, g);
    return g;
}

void group_free(struct group *g)
{
    if (!g) return;
    loop_timer_free(g->retry);
    pthread_mutex_destroy(&g->round.lock);
    pthread_cond_destroy(&g->round.changed);
    mem_free(g->members);
    mem_free(g->blobs);
    mem_free(g);
}

/* ---- facts ---- */

uint64_t group_apart_ms(const struct group *g)
{
    return g->state == GROUP_TOGETHER ? 0 : clock_ms() - g->t_apart_ms + 1;
}

uint64_t group_epoch(const struct group *g) { return g->epoch; }

static void describe_waiting(const struct group *g, char *why, size_t n)
{
    for (uint32_t r = 0; leads(g) && r < g->o.size; r++)
        if (!g->members[r].node) {
            snprintf(why, n, "rank %u of %u is not there%s%.160s", r, g->o.size,
                     g->why[0] ? "; " : "", g->why);
            return;
        }
    snprintf(why, n, "%s", g->why[0] ? g->why : "rank 0 waits for other ranks");
}

enum group_state group_describe(const struct group *g, char *why, size_t n)
{
    switch (g->state) {
    case GROUP_MEETING:
        snprintf(why, n, "rank 0 of the group is not reached at %s:%u", g->o.meet_host,
                 g->o.meet_port);
        break;
    case GROUP_WAITING: describe_waiting(g, why, n); break;
    case GROUP_PREPARING: snprintf(why, n, "the ranks are joining"); break;
    case GROUP_TOGETHER: snprintf(why, n, "%s", ""); break;
    }
    return g->state;
}
