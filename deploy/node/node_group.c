/* node_group.c - a node that is a rank of a group: what its membership (shared/cluster/group.h) and
 * its engine (shared/engine/engine.h) tell each other.
 *
 *     group proposes an epoch ──▶ a worker takes the experts and makes the ep object
 *                             ──▶ engine_join_group, group_prepared
 *     engine has met them     ──▶ group_joined
 *     group lost an epoch     ──▶ engine_abort_group
 *     engine rings            ──▶ group_ring       ──▶ engine_bell on the other ranks
 *     engine lost its group   ──▶ group_report_lost
 *
 * The node becomes ready when its engine first steps with all ranks. All ranks of a node of several
 * (node_ranks.c) are ranks of the group, next to each other.
 * Thread: loop, except where it is said otherwise. */
#include <stdio.h>

#include "deploy/node/node_internal.h"
#include "deploy/node/node_placement.h"
#include "deploy/node/node_traffic.h"
#include "shared/base/arith.h"
#include "shared/base/log.h"
#include "shared/model/experts.h"

/* ---- an epoch's experts and ep object ---- */

/* How long a rank may give no sign while all connect: little at first, for a connection that was
 * begun before the network had come back may hang in UCX, and the next epoch makes new ones. All
 * ranks of an epoch give each other the same time. */
enum { CONNECT_MS = 1000, CONNECT_MAX_MS = 10000 };

static int32_t connect_ms(const struct group_roster *next)
{
    int32_t ms = CONNECT_MS;
    for (uint32_t i = 0; i < next->n_failures && ms < CONNECT_MAX_MS; i++) ms *= 2;
    return min_i32(ms, CONNECT_MAX_MS);
}

/* Made by a worker, taken by the loop. */
struct node_epoch {
    struct node *node;
    struct group_roster roster; /* a copy */
    uint32_t me;
    struct ep *ep;
    struct model_experts *experts;
    enum status st;
    struct err err;
};

/* Does the group still want what is made for this epoch? Thread: a worker. */
static bool is_wanted(void *arg)
{
    const struct node_epoch *w = arg;
    return group_prepares(w->node->group, w->roster.epoch);
}

static enum status make_ep(struct node_epoch *w, const struct ep_placement *p)
{
    struct node *n = w->node;
    struct ep_config c = node_ep_config(n, n->group, w->me, w->roster.n);
    c.collective_bytes = ENGINE_GROUP_BYTES;
    engine_ep_needs(n->engine, &c);
    c.placement = *p;
    c.connect_ms = connect_ms(&w->roster);
    c.is_wanted = is_wanted;
    c.is_wanted_arg = w;
    TRY(node_ep_create(n, &c, &w->ep, &w->err));
    log_info("rows reach the experts of other ranks", "backend=%s ranks=%d near=%d", c.backend,
             c.size, w->ep->n_near);
    return OK;
}

static bool goes_on(void *arg, double done)
{
    (void)done;
    return is_wanted(arg);
}

/* This rank's experts of each map, one map after the other: [n_maps, n_local]. */
static enum status take_experts(struct node_epoch *w, const struct ep_placement *p)
{
    const int32_t first = p->first[w->me], n = p->first[w->me + 1] - first;
    int32_t *mine = MEM_ARRAY(int32_t, (size_t)p->n_maps * (size_t)n + 1);
    for (int32_t map = 0; map < p->n_maps; map++)
        for (int32_t i = 0; i < n; i++)
            mine[map * n + i] = p->logical[map * p->n_physical + first + i];
    const struct experts_wanted wanted = { mine, p->n_maps, n, goes_on, w };
    enum status st = model_experts_take(engine_model(w->node->engine), &wanted, &w->experts,
                                        &w->err);
    mem_free(mine);
    return st;
}

static int32_t n_experts(const struct node *n)
{
    return (int32_t)engine_model(n->engine)->config.moe.n_experts;
}

/* Thread: a worker. */
static void prepare(void *arg)
{
    struct node_epoch *w = arg;
    struct balance_out b;
    w->st = node_placement_read(&w->roster, n_experts(w->node), &b, &w->err);
    if (w->st != OK) return;
    const struct ep_placement p = balance_placement(&b);
    w->st = take_experts(w, &p);
    if (w->st == OK) w->st = group_reach(w->node->group, &w->roster, w->me, &w->err);
    if (w->st == OK) w->st = make_ep(w, &p);
    balance_release(&b);
}

static void free_epoch(struct node_epoch *w)
{
    group_roster_clear(&w->roster);
    mem_free(w);
}

static void on_epoch_made(void *arg)
{
    struct node_epoch *w = arg;
    struct node *n = w->node;
    const uint64_t epoch = w->roster.epoch;
    n->prepares = false;
    if (w->st == OK && n->state == NODE_STOPPING) w->st = ERR_CANCELED;
    if (w->st == OK) w->st = engine_join_group(n->engine, w->ep, w->experts, epoch);
    if (w->st != OK) {
        ep_discard(w->ep);
        model_experts_drop(engine_model(n->engine), w->experts);
    }
    if (n->group) group_prepared(n->group, epoch, w->st, w->err.text);
    free_epoch(w);
    node_stop_goes_on(n);
}

static void on_prepare(void *arg, const struct group_roster *next, uint32_t me)
{
    struct node *n = arg;
    struct node_epoch *w = MEM_NEW(struct node_epoch);
    w->node = n;
    w->me = me;
    group_roster_copy(&w->roster, next);
    n->prepares = true;
    if (loop_work(n->loop, prepare, on_epoch_made, w) == OK) return;
    n->prepares = false;
    free_epoch(w);
    group_prepared(n->group, next->epoch, ERR_BUSY, "its worker threads are busy");
}

static void place(void *arg, struct group_roster *next, const struct group_roster *before)
{
    const struct node *n = arg;
    const struct node_placement_want want = {
        .size = n->o.group.size,
        .n_experts = n_experts(n),
        .n_redundant = n->o.balance.n_redundant,
        .load = node_balance_load(n->balance),
        .best = node_balance_best(n->balance),
    };
    node_placement_choose(next, before, &want);
}

/* ---- what the group says ---- */

static void on_leave(void *arg, uint64_t epoch)
{
    struct node *n = arg;
    if (!n->engine || engine_join_group(n->engine, NULL, NULL, epoch) != OK)
        group_has_left(n->group, epoch);
}

static void on_left(void *arg)
{
    struct node *n = arg;
    if (n->ranks.group) node_ranks_left_experts(n);
    else n->has_left = true;
}

static void on_epoch_lost(void *arg, uint64_t epoch, const char *why)
{
    struct node *n = arg;
    (void)why; /* the group has logged it */
    if (n->engine) engine_abort_group(n->engine, epoch);
}

static void on_load(void *arg, uint32_t rank, struct str load)
{
    struct node *n = arg;
    if (n->balance) node_balance_on_load(n->balance, rank, load);
}

static void on_bell(void *arg, uint64_t epoch, uint64_t step)
{
    struct node *n = arg;
    if (n->engine) engine_bell(n->engine, epoch, step);
}

/* ---- what the engine says ---- */

struct engine_word {
    struct node *node;
    struct engine_group_event ev;
    struct err why;
};

static void on_engine_word(void *arg)
{
    struct engine_word *w = arg;
    struct node *n = w->node;
    if (n->group && n->state != NODE_STOPPING) {
        switch (w->ev.kind) {
        case ENGINE_GROUP_BELL: group_ring(n->group, w->ev.epoch, w->ev.step); break;
        case ENGINE_GROUP_LOST: group_report_lost(n->group, w->ev.epoch, w->why.text); break;
        case ENGINE_GROUP_JOINED:
            group_joined(n->group, w->ev.epoch);
            if (n->state == NODE_LOADING) node_become_ready(n);
            break;
        case ENGINE_GROUP_LEFT: group_has_left(n->group, w->ev.epoch); break;
        }
    }
    mem_free(w);
}

/* Thread: engine. */
void node_group_of_engine(void *arg, const struct engine_group_event *ev)
{
    struct node *n = arg;
    struct engine_word *w = MEM_NEW(struct engine_word);
    *w = (struct engine_word){ .node = n, .ev = *ev };
    if (ev->why) w->why = *ev->why;
    w->ev.why = NULL;
    if (loop_post(n->loop, on_engine_word, w) == OK) return;
    log_error("loop does not take events of the group", "kind=%d", (int)ev->kind);
    mem_free(w);
}

/* ---- life ---- */

/* What starts a rank that is not there: a parent here does for its own, and another host's for
 * those from the number on that it was given. */
static void name_start(const struct node *n, struct group_options *o)
{
    const bool has_parent = launcher_watch_has_launcher();
    if (o->size == o->node_size) return; /* they are processes of one node (node_ranks.c) */
    o->rank_option = has_parent ? "--data-parallel-start-rank" : "--data-parallel-rank";
    if (!has_parent) return;
    o->own_first = n->o.group.first;
    o->n_own = n->o.group.n_local;
}

void node_group_start(struct node *n)
{
    struct group_options o = {
        .loop = n->loop,
        .cluster = n->cluster,
        .metrics = n->metrics,
        .node = n->id,
        .rank = n->o.group.rank,
        .size = n->o.group.size,
        .node_size = n->o.tp.size,
        .host = n->o.advertise_host,
        .meet_host = n->o.group.host,
        .meet_port = n->o.group.port,
        .place = place,
        .on_prepare = on_prepare,
        .on_leave = on_leave,
        .on_left = on_left,
        .on_load = on_load,
        .on_lost = on_epoch_lost,
        .on_bell = on_bell,
        .arg = n,
    };
    name_start(n, &o);
    if (o.size > 1) n->group = group_create(&o);
}

bool node_group_awaits(struct node *n)
{
    char terms[GROUP_TERMS_MAX];
    if (!n->group) return false;
    if (n_experts(n) == 0) {
        if (!n->ranks.group)
            log_info("no group",
                     "why=\"the model has no experts to share: each rank computes alone\"");
        node_group_free(n);
        return false;
    }
    const char *way = n->o.group.backend;
    snprintf(terms, sizeof terms,
             "model %016llx, %s, at most %u rows per step, %u ranks per node%s%s",
             (unsigned long long)engine_kv_layout(n->engine)->model_fingerprint, n->precision,
             n->o.max_batched_tokens, node_is_several(n) ? n->o.tp.size : 1,
             way ? ", rows by " : "", way ? way : "");
    n->balance = node_balance_create(n);
    n->traffic = node_traffic_create(n);
    group_ready(n->group, terms);
    return true;
}

void node_group_stop(struct node *n)
{
    if (n->group) group_stop(n->group);
    if (n->ranks.group) group_stop(n->ranks.group);
}

static void free_group(void *group) { group_free(group); }

/* What the worker posted may still have to run, and finds the group there. */
void node_group_free(struct node *n)
{
    struct group *g = n->group;
    node_balance_free(n->balance);
    node_traffic_free(n->traffic);
    n->balance = NULL;
    n->traffic = NULL;
    n->group = NULL;
    if (!g) return;
    group_stop(g);
    if (loop_post(n->loop, free_group, g) != OK) group_free(g);
}
