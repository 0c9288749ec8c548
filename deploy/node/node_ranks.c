/* node_ranks.c - a node of several ranks, each a process with a part of every matrix
 * (--tensor-parallel-size): how they become one node, and end as one.
 *
 *     weights loaded ─▶ all meet (shared/cluster/group.h) ─▶ equally many KV blocks, and as many in
 *     host memory behind them, the engine
 *     ─▶ the workers of those that follow ─▶ the ep object of the node ─▶ engine_set_node
 *     ─▶ [the group that shares the experts] ─▶ ready
 *
 * The first rank leads: it has the port, the requests and the scheduler. The others follow it with
 * an engine, a kvt and the follower's sides of the two workers. Whoever loses another ends, and a
 * supervisor starts the node again. A signal goes to all: the first ends its requests, then all
 * leave together, the group of the experts first. LIMIT: the ranks of a node are on one host.
 * Thread: loop, except where it is said otherwise. */
#include <stdio.h>

#include "deploy/node/node_internal.h"
#include "kvtransfer/kvtransfer.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/kv/kv_parts.h"
#include "shared/kv/tier/block_copy.h"

enum {
    DRAIN_POLL_MS = 50,
    OTHERS_MS = 1000 /* in which the ranks of a node that was told to end all say so */
};

bool node_is_several(const struct node *n) { return n->o.tp.size > 1; }

bool node_follows(const struct node *n) { return node_is_several(n) && n->o.tp.rank > 0; }

/* ---- the engine and its ep object ---- */

/* Made by a worker, taken by the loop. */
struct node_whole {
    struct node *node;
    uint64_t epoch;
    struct ep *ep;
    enum status st;
    struct err err;
};

static enum dtype tier_dtype(const struct node *n, const struct kv_layout *pool)
{
    return n->o.tiers.rounds ? n->o.tiers.slot_dtype : (enum dtype)pool->dtype;
}

/* A block has the same number on all ranks, so the rank with the least memory decides. An engine
 * that was made for an earlier try keeps its blocks. */
static enum status agree_on_blocks(struct node *n, struct err *err)
{
    uint32_t all[KV_RANKS_MAX], least = n->o.n_blocks;
    TRY(group_exchange(n->ranks.group, &least, sizeof least, all, err));
    for (uint32_t r = 0; r < n->o.tp.size; r++)
        if (all[r] < least) least = all[r];
    if (n->loaded.engine && least != n->o.n_blocks)
        return err_set(err, ERR_CONFIG,
                       "a rank of this node has room for %u KV blocks, and the others have %u",
                       least, n->o.n_blocks);
    n->o.n_blocks = least;
    return OK;
}

/* Slots of --swap-space: the first rank decides what is kept there, so all have as many. One that
 * has an engine already keeps those that it has. */
static enum status agree_on_tiers(struct node *n, struct err *err)
{
    uint32_t all[KV_RANKS_MAX];
    struct kv_layout pool, slot;
    if (!n->ranks.tiers) return OK;
    const bool has_engine = n->loaded.engine != NULL;
    if (!has_engine) node_limit_host_tier(n);
    if (has_engine) pool = *engine_kv_layout(n->loaded.engine);
    else model_kv_layout(n->model.weights, n->o.block_tokens, n->o.n_blocks, &pool);
    TRY(kv_slot_layout(&pool, tier_dtype(n, &pool), &slot, err));
    const uint64_t slots = n->o.tiers.host_bytes / kv_slot_bytes(&slot);
    uint32_t least = slots > INT32_MAX ? INT32_MAX : (uint32_t)slots;
    TRY(group_exchange(n->ranks.group, &least, sizeof least, all, err));
    for (uint32_t r = 0; r < n->o.tp.size; r++)
        if (all[r] < least) least = all[r];
    if (n->o.tiers.host_bytes && least == 0)
        log_warn("no swap space", "why=\"a rank of this node has no room for a KV block\"");
    if (!has_engine) n->o.tiers.host_bytes = least * kv_slot_bytes(&slot);
    return OK;
}

/* Memories behind the pool of a rank that follows; its engine does not know them. */
static enum status make_tiers(struct node *n, struct err *err)
{
    const struct engine *e = n->loaded.engine;
    const struct kv_layout *pool = engine_kv_layout(e);
    const struct tier_follow_options f = {
        .layout = *pool,
        .device = engine_device(e),
        .pool = engine_kv_memory(e)->ptr,
        .slot_dtype = tier_dtype(n, pool),
        .host_bytes = n->o.tiers.host_bytes,
        .disk = n->o.tiers.disk,
        .answer = node_tiers_answer,
        .arg = n->ranks.tiers,
    };
    if (!n->ranks.tiers || !node_follows(n) || n->loaded.tiers) return OK;
    return tier_follow_create(&f, &n->loaded.tiers, err);
}

/* Thread: a worker. */
static void make_ep(void *arg)
{
    struct node_whole *w = arg;
    struct node *n = w->node;
    struct ep_config c = node_ep_config(n, n->ranks.group, n->o.tp.rank, n->o.tp.size);
    const size_t words = engine_node_needs(n->engine, &c);
    w->st = c.device->is_host ? ep_create(&c, &w->ep, &w->err)
                              : node_ep_create_on_gpu(n, &c, words, &w->ep, &w->err);
}

/* Thread: a worker. */
static void make_engine(void *arg)
{
    struct node_whole *w = arg;
    struct node *n = w->node;
    w->st = agree_on_blocks(n, &w->err);
    if (w->st == OK) w->st = agree_on_tiers(n, &w->err);
    if (w->st == OK && !n->loaded.engine) w->st = node_start_engine(n, &w->err);
    if (w->st == OK) w->st = make_tiers(n, &w->err);
}

/* ---- one node ---- */

/* Of a first try they may follow a leader that is gone; nothing was received or sent then. */
static void start_followers(struct node *n)
{
    decode_follow_free(n->ranks.decode);
    prefill_follow_free(n->ranks.prefill);
    const struct decode_follow_options d = {
        .kvt = n->kvt,
        .layout = *engine_kv_layout(n->engine),
        .cluster = n->cluster,
        .leader = n->ranks.all[0].node,
    };
    const struct prefill_follow_options p = {
        .loop = n->loop,
        .kvt = n->kvt,
        .layout = d.layout,
        .cluster = n->cluster,
        .leader = d.leader,
    };
    n->ranks.decode = decode_follow_create(&d);
    n->ranks.prefill = prefill_follow_create(&p);
}

/* All ranks have one ep object: they are one node. */
static void become_one(struct node *n, uint64_t epoch)
{
    n->ranks.is_one = true;
    group_joined(n->ranks.group, epoch);
    if (!node_group_awaits(n)) node_become_ready(n);
}

static void fail(struct node *n, const struct err *why)
{
    n->load_err = *why;
    node_fail_start(n);
}

static bool may_be_tried_again(enum status st)
{
    return st == ERR_PEER_LOST || st == ERR_CANCELED || st == ERR_BUSY;
}

static void on_whole(void *arg)
{
    struct node_whole *w = arg;
    struct node *n = w->node;
    n->prepares = false;
    if (w->st == OK && n->state == NODE_STOPPING) w->st = ERR_CANCELED;
    if (w->epoch == n->ranks.lost_epoch) w->st = ERR_PEER_LOST; /* whatever came of that */
    if (w->st == OK) w->st = engine_set_node(n->engine, w->ep);
    if (w->st != OK) ep_discard(w->ep);
    if (n->ranks.group) group_prepared(n->ranks.group, w->epoch, w->st, w->err.text);
    if (w->st == OK) become_one(n, w->epoch);
    else if (!may_be_tried_again(w->st)) fail(n, &w->err);
    mem_free(w);
    node_stop_goes_on(n);
}

/* The first rank ends its part of ep_create when all have begun theirs, so those that follow are
 * there when it sends them something. */
static void on_engine_made(void *arg)
{
    struct node_whole *w = arg;
    struct node *n = w->node;
    n->engine = n->loaded.engine;
    n->kvt = n->loaded.kvt;
    if (n->loaded.tiers) node_tiers_follow(n->ranks.tiers, n->loaded.tiers);
    if (w->st == OK && node_follows(n)) start_followers(n);
    if (w->st == OK && loop_work(n->loop, make_ep, on_whole, w) == OK) return;
    if (w->st == OK) w->st = ERR_BUSY;
    on_whole(w);
}

/* A node has all of its ranks. */
static void note_members(struct node *n, const struct group_roster *r)
{
    for (uint32_t i = 0; i < r->n; i++) {
        const struct group_member *m = &r->members[i];
        n->ranks.all[i] = *m;
        if (m->node != n->id) cluster_learn(n->cluster, m->node, m->host, m->port);
    }
}

static void on_prepare(void *arg, const struct group_roster *next, uint32_t me)
{
    struct node *n = arg;
    struct node_whole *w = MEM_NEW(struct node_whole);
    (void)me; /* the rank: a node has all of them */
    w->node = n;
    w->epoch = next->epoch;
    note_members(n, next);
    n->prepares = true;
    if (loop_work(n->loop, make_engine, on_engine_made, w) == OK) return;
    n->prepares = false;
    mem_free(w);
    group_prepared(n->ranks.group, next->epoch, ERR_BUSY, "its worker threads are busy");
}

/* ---- the end ---- */

/* A rank is gone without which the others can do nothing. */
static void on_lost(void *arg, uint64_t epoch, const char *why)
{
    struct node *n = arg;
    n->ranks.lost_epoch = epoch;
    if (!n->ranks.is_one) return;
    if (!atomic_load(&n->ranks.is_lost))
        snprintf(n->ranks.lost_why, sizeof n->ranks.lost_why, "%s", why);
    atomic_store(&n->ranks.is_lost, true); /* after the text, which on_fault reads */
    if (n->state == NODE_DRAINING) node_stop(n, 0);
    /* It takes no step any more: the lost rank may still write to blocks that are given back now.
     * on_fault ends the process, unless it ends in order. */
    if (n->engine) engine_abort_node(n->engine);
    if (n->ranks.tiers) node_tiers_stop(n->ranks.tiers); /* the engine may wait for an answer */
}

/* All ranks of the node leave: the group of the experts while they can still step. */
static void on_leave(void *arg, uint64_t epoch)
{
    struct node *n = arg;
    n->ranks.leave_epoch = epoch;
    if (n->group) group_leave(n->group);
    else group_has_left(n->ranks.group, epoch);
}

static void on_left(void *arg)
{
    struct node *n = arg;
    n->has_left = true;
    if (node_follows(n)) node_stop(n, 0);
}

void node_ranks_left_experts(struct node *n)
{
    group_has_left(n->ranks.group, n->ranks.leave_epoch);
}

bool node_ranks_go_on(const struct node *n)
{
    return n->ranks.group && !n->ranks.leave_epoch && clock_ms() - n->t_leave_ms > OTHERS_MS;
}

static void on_drain_poll(void *arg)
{
    struct node *n = arg;
    if (clock_ms() - n->t_drain_ms < (uint64_t)n->o.shutdown_s * 1000) return;
    if (n->ranks.decode)
        log_warn("stopping with work left", "received=%u sent=%u",
                 decode_follow_n_live(n->ranks.decode), prefill_follow_n_live(n->ranks.prefill));
    node_stop(n, 0);
}

void node_ranks_drain(struct node *n)
{
    atomic_store(&n->ends, true);
    group_drain(n->ranks.group);
    if (!node_follows(n)) return;
    group_leave(n->ranks.group); /* with the first, when that has no requests left */
    n->drain = loop_timer_start(n->loop, DRAIN_POLL_MS, DRAIN_POLL_MS, on_drain_poll, n);
}

/* ---- life ---- */

static void on_bell(void *arg, uint64_t epoch, uint64_t step)
{
    struct node *n = arg;
    (void)epoch;
    if (n->engine) engine_node_bell(n->engine, step);
}

struct node_bell {
    struct node *node;
    uint64_t step;
};

static void pass_bell(void *arg)
{
    struct node_bell *b = arg;
    struct group *g = b->node->ranks.group;
    if (g && b->node->state != NODE_STOPPING) group_ring(g, group_now(g)->epoch, b->step);
    mem_free(b);
}

/* Thread: engine. */
void node_ranks_of_engine(void *arg, uint64_t step)
{
    struct node *n = arg;
    struct node_bell *b = MEM_NEW(struct node_bell);
    *b = (struct node_bell){ n, step };
    if (loop_post(n->loop, pass_bell, b) == OK) return;
    log_error("loop does not take bells of the node", "step=%llu", (unsigned long long)step);
    mem_free(b);
}

/* Thread: engine, or that of the tiers. */
static void on_tiers_lost(void *arg)
{
    struct node *n = arg;
    engine_abort_node(n->engine);
}

static void start_tiers(struct node *n)
{
    const struct node_tiers_options o = {
        .loop = n->loop,
        .cluster = n->cluster,
        .ranks = n->ranks.all,
        .rank = n->o.tp.rank,
        .size = n->o.tp.size,
        .on_lost = on_tiers_lost,
        .arg = n,
    };
    if (n->o.tiers.host_bytes || n->o.tiers.disk.folder) n->ranks.tiers = node_tiers_create(&o);
}

void node_ranks_start(struct node *n)
{
    const struct group_options o = {
        .kind = GROUP_OF_NODE,
        .loop = n->loop,
        .cluster = n->cluster,
        .metrics = n->metrics,
        .node = n->id,
        .rank = n->o.tp.rank,
        .size = n->o.tp.size,
        .host = n->o.advertise_host,
        .meet_host = n->o.tp.host,
        .meet_port = n->o.tp.port,
        .rank_option = launcher_watch_has_launcher() ? NULL : "--tensor-parallel-rank",
        .on_prepare = on_prepare,
        .on_leave = on_leave,
        .on_left = on_left,
        .on_lost = on_lost,
        .on_bell = on_bell,
        .arg = n,
    };
    if (!node_is_several(n)) return;
    start_tiers(n);
    n->ranks.group = group_create(&o);
}

void node_ranks_loaded(struct node *n)
{
    char terms[GROUP_TERMS_MAX];
    struct kv_layout l;
    model_kv_layout(n->model.weights, n->o.block_tokens, 1, &l);
    const struct kv_store_options *t = &n->o.tiers;
    snprintf(
        terms, sizeof terms,
        "model %016llx, %s, KV %s in blocks of %u, %u tokens of context, %u sequences, %u rows "
        "per step, %s%s%s%s%s",
        (unsigned long long)l.model_fingerprint, n->precision, kv_dtype_name(l.dtype),
        n->o.block_tokens, n->o.max_model_len, n->o.max_seqs, n->o.max_batched_tokens,
        node_role_name(n->o.role), t->host_bytes ? ", swap space" : "",
        t->disk.folder ? ", KV on disk" : "", n->ranks.tiers ? " as " : "",
        n->ranks.tiers ? kv_dtype_name(tier_dtype(n, &l)) : "");
    n->ranks.is_loaded = true;
    group_ready(n->ranks.group, terms);
}

static void free_group(void *group) { group_free(group); }

/* As with node_group_free. */
void node_ranks_free(struct node *n)
{
    struct group *g = n->ranks.group;
    n->ranks.group = NULL;
    node_tiers_free(n->ranks.tiers);
    n->ranks.tiers = NULL;
    if (!g) return;
    group_stop(g);
    if (loop_post(n->loop, free_group, g) != OK) group_free(g);
}
