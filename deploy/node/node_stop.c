/* node_stop.c - the end of a node: what signals do, and its parts taken down in order.
 *
 *     READY ──signal──▶ DRAINING ───────────▶ DRAINING, its door closed ──▶ STOPPING ──▶ loop_stop
 *                          what it had when       what came since
 *                          the signal came ends   has ended
 *
 * DRAINING: it is out of the directory and computes nothing new, but is an entry node for requests
 * that come. When its time is over their streams end with an error, and it waits a moment more for
 * transfers that other nodes still read. A signal before READY, a second one and node_stop lead to
 * STOPPING at once. Thread: loop. */
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include "deploy/node/end_by_force.h"
#include "deploy/node/node_internal.h"
#include "shared/base/arith.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"

/* A signal ends the node within a second, so 200 ms are left for the kernel, which takes back the
 * memory of a large model. */
enum {
    DRAIN_POLL_MS = 50,
    END_MS = 500,   /* for an orderly end after a signal, */
    GRACE_MS = 300, /* beside what HTTP connections get to take their last answers */
    /* How long transfers that run get when the time is over: KV that does not move ends a transfer
     * within as long (KVT_MOVE_MS). */
    FENCE_MS = 3000,
    /* How long a node that has handed sequences back stays for those that fetch their KV; at most a
     * quarter of its time. */
    LEND_MS = 2000
};

static void finish_rest(struct node *n)
{
    node_router_end(n);
    directory_close(n->directory);
    n->directory = NULL;
    passer_free(n->passer);
    n->passer = NULL;
    scheduler_free(n->scheduler);
    n->scheduler = NULL;
    launcher_watch_free(n->launcher);
    n->launcher = NULL;
    node_group_free(n);
    node_ranks_free(n);
    cluster_free(n->cluster);
    n->cluster = NULL;
    loop_stop(n->loop);
}

/* Goes on when what stops by itself has stopped: the servers, and the worker that makes an ep
 * object with the engine's memory. */
static void finish_stop(struct node *n)
{
    if (n->http || n->admin || n->health || n->grpc || n->directory_server || n->prepares) return;
    if (n->scheduler) scheduler_stop(n->scheduler);
    serve_free(n->serve);
    n->serve = NULL;
    mailbox_close(n->events); /* a thread that waits for room in it continues */
    if (n->ranks.tiers) node_tiers_stop(n->ranks.tiers);
    /* Stop in the order of the work: the engine feeds kvtransfer, which reads the engine's pool. */
    if (n->engine) engine_stop(n->engine);
    kvt_free(n->kvt);
    n->kvt = NULL;
    if (n->ranks.tiers) node_tiers_end(n->ranks.tiers);
    engine_free(n->engine);
    n->engine = NULL;
    decode_free(n->decode);
    n->decode = NULL;
    prefill_free(n->prefill);
    n->prefill = NULL;
    decode_follow_free(n->ranks.decode);
    prefill_follow_free(n->ranks.prefill);
    n->ranks.decode = NULL;
    n->ranks.prefill = NULL;
    finish_rest(n);
}

/* While DRAINING the poll looks on. */
static void http_stopped(void *arg)
{
    struct node *n = arg;
    n->http = NULL;
    if (n->state == NODE_STOPPING && !n->stopper) finish_stop(n);
}

static void admin_stopped(void *arg)
{
    struct node *n = arg;
    n->admin = NULL;
    finish_stop(n);
}

static void directory_stopped(void *arg)
{
    struct node *n = arg;
    n->directory_server = NULL;
    finish_stop(n);
}

void node_stop_goes_on(struct node *n)
{
    if (n->state == NODE_STOPPING && !n->stopper) finish_stop(n);
}

/* The servers say goodbye at the same time. */
static void begin_stop(void *arg)
{
    struct node *n = arg;
    struct http_server *http = n->http, *admin = n->admin;
    struct directory_server *directory_server = n->directory_server;
    loop_timer_free(n->stopper);
    loop_timer_free(n->drain); /* it uses parts that are freed below */
    n->stopper = n->drain = NULL;
    node_role_stop(n);
    node_router_stop(n);
    if ((http || n->grpc) && n->serve) serve_shut_down(n->serve);
    if (n->passer) passer_stop(n->passer);
    const bool has_servers = http || admin || n->health || n->grpc || directory_server;
    node_probes_stop(n);
    if (!has_servers) finish_stop(n);
    node_grpc_stop(n, GRACE_MS);
    if (http && n->door_closed) http_server_hurry(http, GRACE_MS);
    else if (http) http_server_stop(http, GRACE_MS, http_stopped, n);
    if (admin) http_server_stop(admin, 0, admin_stopped, n);
    if (directory_server) directory_server_stop(directory_server, directory_stopped, n);
}

/* The caller may run inside a part that is about to be freed, so the stop starts with the next turn
 * of the loop. */
void node_stop(struct node *n, int exit_status)
{
    if (n->state == NODE_STOPPING) return;
    n->state = NODE_STOPPING;
    n->exit_status = exit_status;
    if (n->n_signals) end_by_force_after(GRACE_MS + END_MS, exit_status);
    atomic_store(&n->stop_loading, true);
    atomic_store(&n->ends, true);
    node_group_stop(n);
    n->stopper = loop_timer_start(n->loop, 0, 0, begin_stop, n);
}

/* ---- draining ---- */

/* What is parked may never be asked for, and can be computed again: it is not waited for. */
static uint32_t n_decoding(const struct node *n)
{
    return decode_n_live(n->decode) - decode_n_parked(n->decode);
}

static uint32_t n_computing(const struct node *n)
{
    return n->o.no_engine ? 0 : n_decoding(n) + prefill_n_live(n->prefill);
}

static uint32_t n_passing(const struct node *n) { return n->passer ? passer_n_live(n->passer) : 0; }

void node_stop_describe(const struct node *n, struct buf *out)
{
    if (n->state != NODE_DRAINING) return;
    const uint64_t since = clock_ms() - n->t_drain_ms, time = (uint64_t)n->o.shutdown_s * 1000;
    buf_printf(out,
               ",\"draining\":{\"since_s\":%llu,\"left_s\":%llu,\"requests\":%u,\"computing\":%u}",
               (unsigned long long)since / 1000,
               (unsigned long long)(time > since ? time - since + 999 : 0) / 1000,
               scheduler_n_requests(n->scheduler) + n_passing(n), n_computing(n));
}

/* A node that is only listed sees no other itself; the router that lists it does. */
static bool others_can_take(const struct node *n)
{
    return scheduler_sees_others(n->scheduler, n->id) || node_is_listed_with_others(n);
}

/* Others take what is new, if there are any that can. What clients asked this node itself for stays
 * where it sees no other. */
static void leave_work_to_others(struct node *n)
{
    if (n->o.no_engine) return;
    const bool others = others_can_take(n);
    decode_set_leaving(n->decode, others, scheduler_sees_others(n->scheduler, n->id) ? 0 : n->id);
    prefill_set_leaving(n->prefill, others);
}

/* When half of the time is over, other nodes get what is left, if there are any that can take it:
 * what cannot be finished here in time should not be lost with this node. */
static void hand_back_if_due(struct node *n)
{
    uint64_t since = clock_ms() - n->t_drain_ms;
    if (n->o.no_engine || n->handed_back || since < (uint64_t)n->o.shutdown_s * 500) return;
    if (!others_can_take(n)) return;
    n->handed_back = true;
    if (n_decoding(n) > 0)
        n->t_lends_until_ms = clock_ms() + min_size(LEND_MS, (size_t)n->o.shutdown_s * 250);
    log_info("work handed back", "sequences=%u prompts=%u", n_decoding(n),
             prefill_n_live(n->prefill));
    decode_hand_back(n->decode);
    prefill_hand_back(n->prefill);
}

/* Clients that connect now are refused, and go elsewhere; those that are connected already are
 * served, until nothing more comes. */
static void close_door(struct node *n, uint64_t left_ms)
{
    if (n->door_closed) return;
    n->door_closed = true;
    if (n->http) http_server_leave(n->http, (uint32_t)left_ms, GRACE_MS, http_stopped, n);
    node_grpc_stop(n, (uint32_t)left_ms);
}

/* Can the other ranks do without this one? They are asked once nothing is left here. */
static bool has_left_group(struct node *n)
{
    struct group *g = n->ranks.group ? n->ranks.group : n->group;
    if (!g) return true;
    if (!n->leaves) {
        n->t_leave_ms = clock_ms();
        group_leave(g);
    }
    n->leaves = true;
    return n->has_left || node_ranks_go_on(n);
}

/* The time is over. Own streams end now; what other nodes read from this one is cut only when it
 * does not come to its end. True: nothing is waited for any more. */
static bool is_fenced(struct node *n)
{
    const bool reads = !n->o.no_engine && prefill_n_live(n->prefill) > 0;
    if (!n->t_fence_ms) {
        n->t_fence_ms = clock_ms();
        log_warn("stopping with work left", "live=%u transfers=%u",
                 scheduler_n_live(n->scheduler) + n_passing(n) + n_computing(n),
                 reads ? prefill_n_live(n->prefill) : 0);
        if (reads) {
            if ((n->http || n->grpc) && n->serve) serve_shut_down(n->serve);
            prefill_hand_back(n->prefill);
        }
    }
    return !reads || clock_ms() - n->t_fence_ms >= FENCE_MS;
}

static void on_drain_poll(void *arg)
{
    struct node *n = arg;
    const uint64_t since = clock_ms() - n->t_drain_ms, time = (uint64_t)n->o.shutdown_s * 1000;
    leave_work_to_others(n);
    const uint32_t old = scheduler_n_old(n->scheduler) + n_passing(n) + n_computing(n),
                   all = scheduler_n_live(n->scheduler) + n_passing(n) + n_computing(n);
    if (since >= time && all) {
        if (is_fenced(n)) node_stop(n, 0);
        return;
    }
    if (since < time && (old || clock_ms() < n->t_lends_until_ms)) {
        hand_back_if_due(n);
        return;
    }
    if (since < time) {
        close_door(n, time - since);
        if (n->http || n->grpc || all || !has_left_group(n)) return;
    }
    node_stop(n, 0);
}

/* A pipe that nobody reads holds up whoever logs next, so nothing could be finished in order. */
static bool is_log_stuck(void)
{
    struct pollfd p = { .fd = STDERR_FILENO, .events = POLLOUT };
    return poll(&p, 1, 0) == 0;
}

void node_stop_on_signal(void *arg, int signum)
{
    struct node *n = arg;
    /* A router that waits for its first node is as it should be. */
    const bool was_ready = n->state == NODE_READY || n->state == NODE_DRAINING || n->router,
               at_once = n->state != NODE_READY || ++n->n_signals > 1 || is_log_stuck();
    const bool serves = n->http || n->grpc || node_follows(n);
    const int exit_status = serves && was_ready ? 0 : 130;
    /* Before anything that may hang, as the log does when nobody reads it. A stop may have begun by
     * itself. What serves nobody has no requests to finish. */
    if (at_once || !serves) end_by_force_after(GRACE_MS + END_MS, exit_status);
    log_info("signal", "signal=%s", signum == SIGINT ? "SIGINT" : "SIGTERM");
    if (at_once) {
        node_stop(n, exit_status);
        return;
    }
    if (n->on_signal) {
        n->on_signal(n->on_signal_arg);
        return;
    }
    n->state = NODE_DRAINING;
    n->t_drain_ms = clock_ms();
    gauge_set(n->ready_gauge, 0);
    if (n->group) group_drain(n->group);
    if (n->ranks.group) node_ranks_drain(n);
    if (node_follows(n)) return;
    scheduler_drain(n->scheduler, true);
    leave_work_to_others(n);
    if (n->passer) passer_set_draining(n->passer);
    if (n->http) http_server_drain(n->http);
    node_grpc_drain(n);
    n->drain = loop_timer_start(n->loop, 0, DRAIN_POLL_MS, on_drain_poll, n);
}
