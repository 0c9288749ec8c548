/* node_internal.h - the node itself and what its files do for each other; nobody else includes it.
 *
 * node.c starts the parts, node_events.c brings events to the loop, node_describe.c says what the
 * node is, node_stop.c takes the parts down. Thread: loop, unless a function says otherwise. */
#ifndef BATON_DEPLOY_NODE_NODE_INTERNAL_H
#define BATON_DEPLOY_NODE_NODE_INTERNAL_H

#include <stdatomic.h>

#include "decode/decode.h"
#include "decode/decode_follow.h"
#include "deploy/launch/launcher_watch.h"
#include "deploy/node/node.h"
#include "deploy/node/node_model.h"
#include "deploy/node/node_ports.h"
#include "deploy/service/health_port.h"
#include "deploy/service/service_gauges.h"
#include "deploy/text/text_server.h"
#include "deploy/tiers/node_tiers.h"
#include "prefill/prefill.h"
#include "prefill/prefill_follow.h"
#include "scheduler/directory/handler.h"
#include "scheduler/directory/server.h"
#include "scheduler/passer.h"
#include "scheduler/scheduler.h"
#include "shared/base/address/host_port.h"
#include "shared/base/mailbox.h"
#include "shared/cluster/group.h"
#include "shared/kv/kv_parts.h"
#include "shared/serve/grpc/kserve.h"

/* Tell the sequences and transfers of the two workers apart. */
#define DECODE_IDS  (UINT64_C(1) << 56)
#define PREFILL_IDS (UINT64_C(2) << 56)

enum node_state { NODE_LOADING, NODE_READY, NODE_DRAINING, NODE_STOPPING };

struct node {
    struct node_options o;
    enum node_state state;
    uint64_t id;
    char name[NODE_NAME_MAX];
    struct loop *loop;
    struct metrics *metrics;
    struct http_server *http, *admin;
    struct kserve *grpc;          /* NULL: none, or it has stopped */
    struct health_port *health;   /* NULL: none */
    struct service_gauges gauges; /* with a metrics port */
    struct node_model model;      /* its weights move into the engine */
    struct {
        struct engine *engine;
        struct kvt *kvt;
        struct tier_follower *tiers; /* of a rank above 0 with tiers */
    } loaded; /* made by the worker that loads; the loop takes them when that is done */
    struct err load_err;
    enum status load_st;
    atomic_bool stop_loading;
    struct node_ports ports;
    struct engine *engine;
    struct mailbox *events;
    struct kvt *kvt;
    char precision[NODE_NAME_MAX], kv_by[KV_BY_MAX]; /* of its record */
    uint64_t kv_host;
    bool can_be_joined;
    char join[HOST_PORT_TEXT_MAX + 256]; /* trouble.h */
    struct cluster *cluster;
    struct group *group;          /* NULL: it steps alone */
    struct node_balance *balance; /* NULL: experts stay where they are */
    struct node_traffic *traffic; /* with group, once its engine is there */
    bool prepares; /* a worker makes the next group's ep object with the engine's memory */
    bool leaves;   /* it has no requests left, and wants to leave the group; ... */
    bool has_left; /* ... and no group needs this rank any more */
    struct {
        struct group *group;                   /* NULL: the node is this process alone */
        bool is_loaded;                        /* this process has its weights */
        bool is_one;                           /* its engines have met */
        uint64_t lost_epoch;                   /* the last that a rank was lost in */
        struct group_member all[KV_RANKS_MAX]; /* by rank; of one alone this process */
        uint64_t leave_epoch;                  /* in which all leave */
        atomic_bool is_lost; /* a rank is gone, and lost_why says which: written once */
        char lost_why[GROUP_WHY_MAX];
        struct decode_follower *decode; /* of a rank above 0, in place of the two workers */
        struct prefill_follower *prefill;
        struct node_tiers *tiers; /* NULL: no memories are behind the KV pools */
    } ranks;                      /* that share the attention of this node */
    atomic_bool ends;             /* a lost rank is no failure any more */
    struct {
        bool loaded, ranks_ready;
        uint64_t model; /* fingerprint of its ranks' model */
        void (*on_failed)(void *arg);
        void *failed_arg;
        void (*on_drained)(void *arg);
        void *drained_arg;
        char why[GROUP_WHY_MAX + 32]; /* a rank is not ready; "": nobody has said so */
    } front;                          /* with o.no_engine */
    struct node_router *router;       /* with o.is_router, else NULL */
    struct text_server text_server;
    struct directory *directory;
    struct directory_server *directory_server;
    struct decode_worker *decode;
    struct prefill_worker *prefill;
    struct scheduler *scheduler;
    struct passer *passer; /* NULL: with --no-pass-requests, of a router, and without HTTP */
    struct serve *serve;
    struct loop_timer *drain, *stopper;
    struct loop_timer *settle;       /* NULL: its role is settled (node_role.c) */
    struct role_call *role_call;     /* NULL: no change is being looked at once more (likewise) */
    struct launcher_watch *launcher; /* NULL: none started this node */
    uint64_t t_start_ms, t_drain_ms, t_leave_ms;
    uint64_t t_listed_ms; /* a router asked for its record then; 0: none has */
    uint64_t t_others_ms; /* ... and said that other nodes decode too; ... */
    uint64_t t_alone_ms;  /* ... or that none does */
    /* while DRAINING: */
    bool handed_back;          /* what it computed */
    bool door_closed;          /* its HTTP and gRPC servers take no new connections */
    uint64_t t_lends_until_ms; /* nodes that go on with what it computed may fetch the KV */
    uint64_t t_fence_ms;       /* its time was over then; 0: not yet */
    int exit_status, n_signals;
    void (*on_ready)(void *arg);
    void *on_ready_arg;
    void (*on_signal)(void *arg);
    void *on_signal_arg;
    struct gauge *loop_delay, *ready_gauge;
};

/* ---- node_events.c ---- */

/* Makes and frees the mailbox through which events of the engine and of KV transfer come. */
void node_events_create(struct node *n);
void node_events_free(struct node *n);
/* Callbacks of the engine and of KV transfer. Thread: engine; transfer. */
void node_events_of_engine(void *arg, const struct engine_event *e);
void node_events_of_kvt(void *arg, const struct kvt_event *e);
/* Thread: engine. */
void node_events_kv_ready(void *arg, uint64_t id, uint32_t layer, uint32_t begin, uint32_t end,
                          const int32_t *blocks, uint64_t event);

/* ---- node_group.c ---- */

/* Before the model is loaded: other ranks may come already. */
void node_group_start(struct node *n);
/* The engine is there. True: it waits for other ranks, and node_become_ready follows; false: it
 * computes alone. */
bool node_group_awaits(struct node *n);
/* Ends the wait for other ranks. */
void node_group_stop(struct node *n);
/* After the engine has ended, before the cluster does. */
void node_group_free(struct node *n);
/* engine_options.on_group. Thread: engine. */
void node_group_of_engine(void *arg, const struct engine_group_event *ev);

/* ---- node_ep.c ---- */

/* What the ep objects of both kinds of groups have in common; the engine is there. Thread: a
 * worker. */
struct ep_config node_ep_config(const struct node *n, struct group *g, uint32_t rank,
                                uint32_t size);
/* Creates the object of ranks that share experts, for which they choose a backend together, by
 * c->exchange. Changes c. Thread: a worker. */
enum status node_ep_create(const struct node *n, struct ep_config *c, struct ep **out,
                           struct err *err) MUST_CHECK;
/* Creates the object of ranks on GPUs, and one for their words, whose backend c has chosen. Changes
 * c. Thread: a worker. */
enum status node_ep_create_on_gpu(const struct node *n, struct ep_config *c, size_t words_bytes,
                                  struct ep **out, struct err *err) MUST_CHECK;

/* ---- node_ranks.c: with --tensor-parallel-size ---- */

bool node_is_several(const struct node *n);
/* Is it a rank above 0 of such a node? */
bool node_follows(const struct node *n);
/* Before the model is loaded: the other ranks may come already. */
void node_ranks_start(struct node *n);
/* The weights are there; node_become_ready follows when all ranks are one node. */
void node_ranks_loaded(struct node *n);
/* A signal came: no new requests; a rank that follows leaves with the first. */
void node_ranks_drain(struct node *n);
/* Were the other ranks of the node not told to end? Then they are not waited for. */
bool node_ranks_go_on(const struct node *n);
/* No group of the experts has this rank any more. */
void node_ranks_left_experts(struct node *n);
/* After the engine has ended, before the cluster does. */
void node_ranks_free(struct node *n);
/* engine_options.on_node_bell. Thread: engine. */
void node_ranks_of_engine(void *arg, uint64_t step);

/* ---- node_front.c: with o.no_engine ---- */

/* Reads all files but the weights. Thread: a worker. */
void node_front_load(struct node *n);
/* The files are there: ready, or once the ranks are. */
void node_front_loaded(struct node *n);

/* ---- node_grpc.c: with --grpc-port; the others do nothing without it ---- */

enum status node_grpc_start(struct node *n, struct err *err) MUST_CHECK;
void node_grpc_drain(struct node *n);
/* Takes no new connections; node_stop_goes_on follows when nothing is left, after grace_ms at the
 * latest. Again: in grace_ms from now, if that is sooner. */
void node_grpc_stop(struct node *n, uint32_t grace_ms);

/* ---- node_mount.c ---- */

/* Answers an exchange of nodes, not of clients; false: it is not one. */
bool node_mount_http(struct node *n, struct http_exchange *x);
/* A router that lists this node asked for its record just now. */
bool node_is_listed(const struct node *n);
/* And each router that does knows another node that decodes. */
bool node_is_listed_with_others(const struct node *n);
/* Both, for scheduler_options.listed. */
enum trouble_listed node_listed(void *node);

/* ---- node_role.c ---- */

/* The workers are there: they take what is placed on a node of this role. */
void node_role_start(struct node *n);
/* Before the workers end. */
void node_role_stop(struct node *n);
/* Answers POST /cluster/v1/role, at once or within a second. The caller's secret is checked. */
void node_role_answer(struct node *n, struct http_exchange *x);

/* ---- node_router.c: with o.is_router; the others do nothing without it ---- */

/* The directory is there: the view is served and listed nodes are asked. */
enum status node_router_start(struct node *n, struct err *err) MUST_CHECK;
/* In place of node_begin_loading. */
void node_router_begin(struct node *n);
/* The text is loaded; or could not be: true: another one is sought, false: the start has failed. */
void node_router_loaded(struct node *n);
bool node_router_failed(struct node *n);
/* Answer an exchange at the view (DIRECTORY_PATH), or at one of the paths of instances.h; false: it
 * is not one. */
bool node_router_view(struct node *n, struct http_exchange *x);
bool node_router_http(struct node *n, struct http_exchange *x);
/* Appends members of /cluster. */
void node_router_describe(const struct node *n, struct buf *out);
/* What is missing while it is not ready. */
const char *node_router_why(struct node *n);
/* The stop begins: nothing is sought, and the view answers 503; no exchange is left; the loop has
 * ended. */
void node_router_stop(struct node *n);
void node_router_end(struct node *n);
void node_router_free(struct node *n);

/* ---- node.c ---- */

void node_begin_loading(void *node);
/* Lowers --swap-space to what this host has free for the rank. Thread: a worker. */
void node_limit_host_tier(struct node *n);
/* Makes the engine and kvt of a model that is loaded. Thread: a worker. */
enum status node_start_engine(struct node *n, struct err *err) MUST_CHECK;
/* Ends the start with the sentence of load_err. */
void node_fail_start(struct node *n);
/* Appends why there is no API server: a sentence. */
void node_say_why(struct node *n, struct buf *out);
/* Answers a request of the API's port: as the API does, or why there is none yet or any more. */
void node_serve_or_say_why(void *node, struct http_exchange *x);
/* The engine can step: the node takes work. */
void node_become_ready(struct node *n);

/* ---- node_describe.c ---- */

/* Fills in the record of this node, for the directory. */
void node_describe_record(void *arg, struct node_record *me);
/* Appends members of /version, or of /cluster. */
void node_describe_json(void *arg, bool cluster, struct buf *out);
/* Writes the options with which another node is started to join this one's topic (trouble.h). */
void node_describe_join(struct node *n);
void node_describe_ready(struct node *n);
/* Answers GET /cluster while the node loads, or waits for other ranks: `why` says for what. */
void node_describe_loading(struct node *n, const char *why, struct http_exchange *x);

/* Opens the health port, if there is to be one; `like`: how the API's server was started. */
enum status node_probes_start(struct node *n, const struct http_server_options *like,
                              struct err *err) MUST_CHECK;
void node_probes_stop(struct node *n);
/* Somebody asks for /metrics. */
void node_probes_scrape(struct node *n);

/* ---- node_stop.c ---- */

/* A part that the stop waits for has ended. */
void node_stop_goes_on(struct node *n);
/* Appends the member "draining" of GET /cluster while the node finishes what it has, with a comma
 * before it. */
void node_stop_describe(const struct node *n, struct buf *out);
/* A callback of loop_on_signal. */
void node_stop_on_signal(void *arg, int signum);

#endif
