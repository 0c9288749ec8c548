/* node_tiers.c - see node_tiers.h. */
#include "deploy/tiers/node_tiers.h"

#include <stdatomic.h>

#include "deploy/tiers/tier_message.h"
#include "shared/base/assert.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

struct node_tiers {
    struct node_tiers_options o;
    struct tier_ranks *ranks;       /* of rank 0, else NULL */
    struct tier_follower *follower; /* of the others, once it is there */
    bool stopped;
    atomic_bool is_lost; /* it has been said. Relaxed: it stands alone */
};

/* A message on its way from the engine's or the tiers' thread to the loop. */
struct tier_post {
    struct node_tiers *tiers;
    enum frame_type type;
    uint64_t id;
    struct buf body;
};

static void send_to(const struct node_tiers *t, uint32_t rank, const struct tier_post *p)
{
    const uint64_t node = t->o.ranks[rank].node;
    const enum status st = cluster_send(t->o.cluster, node, p->type, p->id, 0, buf_str(&p->body));
    /* One that is lost ends the node by itself. */
    if (st != OK && st != ERR_PEER_LOST)
        cluster_disconnect(t->o.cluster, node, "a message of its KV tiers cannot be sent");
}

static void send_posted(void *arg)
{
    struct tier_post *p = arg;
    const struct node_tiers *t = p->tiers;
    const uint32_t first = t->o.rank == 0 ? 1 : 0, end = t->o.rank == 0 ? t->o.size : 1;
    for (uint32_t r = first; r < end && !t->stopped; r++) send_to(t, r, p);
    buf_release(&p->body);
    mem_free(p);
}

/* Takes the body. */
static void post(struct node_tiers *t, enum frame_type type, uint64_t id, struct buf body)
{
    struct tier_post *p = MEM_NEW(struct tier_post);
    *p = (struct tier_post){ .tiers = t, .type = type, .id = id, .body = body };
    const enum status st = loop_post(t->o.loop, send_posted, p);
    if (st == OK) return;
    buf_release(&p->body);
    mem_free(p);
    if (st == ERR_CANCELED) return; /* the node ends */
    if (atomic_exchange_explicit(&t->is_lost, true, memory_order_relaxed)) return;
    log_error("loop does not take messages of KV tiers", "rank=%u", t->o.rank);
    t->o.on_lost(t->o.arg);
}

/* Thread: engine. */
static void send_command(void *tiers, const struct tier_command *c)
{
    struct buf body = { 0 };
    tier_message_write(c, &body);
    post(tiers, FRAME_KV_TIER, c->id, body);
}

void node_tiers_answer(void *tiers, const struct tier_answer *a)
{
    struct buf body = { 0 };
    tier_message_write_answer(a, &body);
    post(tiers, FRAME_KV_TIER_DONE, a->id, body);
}

/* Thread: engine. */
static void on_silent(void *tiers)
{
    struct node_tiers *t = tiers;
    if (!atomic_exchange_explicit(&t->is_lost, true, memory_order_relaxed)) t->o.on_lost(t->o.arg);
}

/* ---- messages ---- */

static void on_command(struct node_tiers *t, const struct cluster_message *m)
{
    struct tier_message in;
    if (!t->follower || m->from != t->o.ranks[0].node) {
        log_warn("kv tier command not taken", "from=%s", m->from_name);
        return;
    }
    enum status st = ERR_INVALID;
    if (tier_message_read(m->request, m->body, &in)) {
        st = tier_follow_command(t->follower, &in.c);
        tier_message_release(&in);
    }
    if (st != OK)
        cluster_disconnect(t->o.cluster, m->from,
                           st == ERR_FULL ? "it sends more commands to KV tiers than there are"
                                          : "it sends a malformed command to KV tiers");
}

static void on_done(struct node_tiers *t, const struct cluster_message *m)
{
    struct tier_answer a;
    uint32_t rank = 1;
    while (rank < t->o.size && t->o.ranks[rank].node != m->from) rank++;
    if (!t->ranks || rank == t->o.size) {
        log_warn("kv tier answer not taken", "from=%s", m->from_name);
        return;
    }
    if (!tier_message_read_answer(m->request, m->body, &a) ||
        tier_ranks_answer(t->ranks, rank - 1, &a) != OK)
        cluster_disconnect(t->o.cluster, m->from, "its KV tiers answer what nobody asked");
}

bool node_tiers_on_message(struct node_tiers *t, const struct cluster_message *m)
{
    switch (m->type) {
    case FRAME_KV_TIER: on_command(t, m); return true;
    case FRAME_KV_TIER_DONE: on_done(t, m); return true;
    default: return false;
    }
}

/* ---- life ---- */

struct node_tiers *node_tiers_create(const struct node_tiers_options *o)
{
    struct node_tiers *t = MEM_NEW(struct node_tiers);
    const struct tier_ranks_options r = {
        .n_followers = o->size - 1,
        .send = send_command,
        .on_silent = on_silent,
        .arg = t,
    };
    t->o = *o;
    if (o->rank == 0) t->ranks = tier_ranks_create(&r);
    return t;
}

struct tier_ranks *node_tiers_ranks(struct node_tiers *t) { return t->ranks; }

void node_tiers_follow(struct node_tiers *t, struct tier_follower *f)
{
    ASSERT(!t->follower || t->follower == f);
    t->follower = f;
}

void node_tiers_stop(struct node_tiers *t)
{
    t->stopped = true;
    if (t->ranks) tier_ranks_abort(t->ranks);
}

void node_tiers_end(struct node_tiers *t)
{
    tier_follow_free(t->follower);
    t->follower = NULL;
}

static void free_tiers(void *arg)
{
    struct node_tiers *t = arg;
    tier_ranks_free(t->ranks);
    mem_free(t);
}

void node_tiers_free(struct node_tiers *t)
{
    if (!t) return;
    t->stopped = true;
    if (loop_post(t->o.loop, free_tiers, t) != OK) free_tiers(t);
}
