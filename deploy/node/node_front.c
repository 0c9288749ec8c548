/* node_front.c - a node without an engine: the entry node before ranks that are processes of their
 * own (deploy/cli/serve_ranks.c starts them).
 *
 * It has the tokenizer, the chat template and the API, and places requests on the ranks as any
 * entry node does; it publishes no record, since nothing can be placed on it. It is ready when it
 * has read its files and its ranks have all been ready once. Thread: loop, except load. */
#include <stdio.h>
#include <string.h>

#include "deploy/node/node_internal.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"

enum { DRAIN_POLL_MS = 50 };

/* Thread: a worker. */
void node_front_load(struct node *n)
{
    struct node_options *o = &n->o;
    n->load_st = node_model_load_text(&n->model, o, &n->load_err);
    if (n->load_st != OK) return;
    const uint32_t most = n->model.max_position;
    if (o->max_model_len_given && o->max_model_len > most)
        n->load_st = err_field(&n->load_err, ERR_CONFIG, "max-model-len",
                               "--max-model-len %u is more than the %u positions of this model",
                               o->max_model_len, most);
    else if (o->max_model_len > most) o->max_model_len = most;
}

static void become_ready(struct node *n)
{
    if (n->state != NODE_LOADING || !n->front.loaded || !n->front.ranks_ready) return;
    node_become_ready(n);
}

void node_front_loaded(struct node *n)
{
    n->front.loaded = true;
    become_ready(n);
}

void node_ranks_ready(struct node *n, uint64_t model)
{
    n->front.ranks_ready = true;
    n->front.model = model;
    become_ready(n);
}

void node_ranks_wait(struct node *n, uint16_t port, const char *why)
{
    n->front.why[0] = 0;
    if (why[0]) snprintf(n->front.why, sizeof n->front.why, "; that of port %u: %s", port, why);
}

void node_start(struct node *n, void (*on_failed)(void *arg), void *arg)
{
    n->front.on_failed = on_failed;
    n->front.failed_arg = arg;
    node_begin_loading(n);
}

static void on_drain_poll(void *arg)
{
    struct node *n = arg;
    const uint32_t live = scheduler_n_live(n->scheduler) +
                          (n->passer ? passer_n_live(n->passer) : 0);
    if (live && clock_ms() - n->t_drain_ms < (uint64_t)n->o.shutdown_s * 1000) return;
    if (live) log_warn("stopping with work left", "live=%u", live);
    loop_timer_free(n->drain);
    n->drain = NULL;
    n->front.on_drained(n->front.drained_arg);
}

void node_drain(struct node *n, void (*on_drained)(void *arg), void *arg)
{
    n->front.on_drained = on_drained;
    n->front.drained_arg = arg;
    n->state = NODE_DRAINING;
    n->t_drain_ms = clock_ms();
    gauge_set(n->ready_gauge, 0);
    scheduler_drain(n->scheduler, false); /* its ranks are to end as well */
    if (n->passer) passer_set_draining(n->passer);
    if (n->http) http_server_drain(n->http);
    node_grpc_drain(n);
    n->drain = loop_timer_start(n->loop, 0, DRAIN_POLL_MS, on_drain_poll, n);
}

bool node_is_ready(const struct node *n) { return n->state == NODE_READY; }
