/* node_group.c - a node that is a rank of a group: what its membership (shared/cluster/group.h) and
 * its engine (shared/engine/engine.h) tell each other.
 *
 *     group proposes an epoch ──▶ a worker makes the ep object ──▶ engine_join_group, group_prepared
 *     group lost an epoch     ──▶ engine_abort_group
 *     engine rings            ──▶ group_ring       ──▶ engine_bell on the other ranks
 *     engine lost its group   ──▶ group_report_lost
 *
 * The node becomes ready when its engine first steps with all ranks.
 * LIMIT: experts are divided evenly and stay where they are; ranks are of one host.
 * Thread: loop, except where it is said otherwise. */
#include <stdio.h>

#include "deploy/node/node_internal.h"
#include "shared/base/log.h"

/* How long a rank waits in an exchange before it gives the group up. Links tell of a lost rank much
 * earlier: this is for a mistake in which all wait. */
enum { STEP_WAIT_MS = 300000 };

/* ---- an epoch's ep object ---- */

static enum status make_ep(struct node *n, struct ep **out, struct err *err)
{
    const uint32_t size = n->o.group.size;
    int32_t first[GROUP_RANKS_MAX + 1];
    struct ep_config c = {
        .backend = "shm",
        .device = engine_device(n->engine),
        .rank = (int32_t)n->o.group.rank,
        .size = (int32_t)size,
        .placement.first = first,
        .send = DTYPE_F32,
        .back = DTYPE_F32,
        .collective_bytes = ENGINE_GROUP_BYTES,
        .timeout_ms = STEP_WAIT_MS,
        .exchange = group_exchange,
        .exchange_arg = n->group,
    };
    engine_ep_needs(n->engine, &c);
    c.placement.n_physical = c.placement.n_logical;
    for (uint32_t r = 0; r < size; r++)
        first[r] = (int32_t)share_experts(r, size, (uint32_t)c.placement.n_logical).first;
    first[size] = c.placement.n_logical;
    return ep_create(&c, out, err);
}

/* Thread: a worker. */
static void prepare(void *arg)
{
    struct node *n = arg;
    n->next_ep.st = make_ep(n, &n->next_ep.ep, &n->next_ep.err);
}

static void on_ep_made(void *arg)
{
    struct node *n = arg;
    struct ep *ep = n->next_ep.ep;
    enum status st = n->next_ep.st;
    n->next_ep.ep = NULL;
    n->next_ep.runs = false;
    if (st == OK && n->state == NODE_STOPPING) st = ERR_CANCELED;
    if (st == OK) st = engine_join_group(n->engine, ep, n->next_ep.epoch);
    if (st != OK) ep_discard(ep);
    if (n->group) group_prepared(n->group, n->next_ep.epoch, st, n->next_ep.err.text);
    node_stop_goes_on(n);
}

static void on_prepare(void *arg, uint64_t epoch)
{
    struct node *n = arg;
    n->next_ep.epoch = epoch;
    n->next_ep.runs = true;
    n->next_ep.err = (struct err){ 0 };
    if (loop_work(n->loop, prepare, on_ep_made, n) == OK) return;
    n->next_ep.runs = false;
    group_prepared(n->group, epoch, ERR_BUSY, "its worker threads are busy");
}

static void on_epoch_lost(void *arg, uint64_t epoch, const char *why)
{
    struct node *n = arg;
    (void)why; /* the group has logged it */
    if (n->engine) engine_abort_group(n->engine, epoch);
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
        case ENGINE_GROUP_LEFT: break;
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

void node_group_start(struct node *n)
{
    const struct group_options o = {
        .loop = n->loop,
        .cluster = n->cluster,
        .metrics = n->metrics,
        .node = n->id,
        .rank = n->o.group.rank,
        .size = n->o.group.size,
        .meet_host = n->o.group.host,
        .meet_port = n->o.group.port,
        .on_prepare = on_prepare,
        .on_lost = on_epoch_lost,
        .on_bell = on_bell,
        .arg = n,
    };
    if (o.size > 1) n->group = group_create(&o);
}

bool node_group_awaits(struct node *n)
{
    char terms[GROUP_TERMS_MAX];
    if (!n->group) return false;
    if (engine_n_experts(n->engine) == 0) {
        log_info("no group", "why=\"the model has no experts to share: each rank computes alone\"");
        node_group_free(n);
        return false;
    }
    snprintf(terms, sizeof terms, "model %016llx, %s, at most %u rows per step",
             (unsigned long long)engine_kv_layout(n->engine)->model_fingerprint, n->precision,
             n->o.max_batched_tokens);
    group_ready(n->group, terms);
    return true;
}

void node_group_stop(struct node *n)
{
    if (n->group) group_stop(n->group);
}

static void free_group(void *group) { group_free(group); }

/* What the worker posted may still have to run, and finds the group there. */
void node_group_free(struct node *n)
{
    struct group *g = n->group;
    n->group = NULL;
    if (!g) return;
    group_stop(g);
    if (loop_post(n->loop, free_group, g) != OK) group_free(g);
}
