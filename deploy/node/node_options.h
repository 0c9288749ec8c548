/* node_options.h - the options of one node after configuration: plain values, checked, with
 * defaults filled in.
 *
 * node_options_read makes them from a config; node_options_print shows where each value came from.
 * Strings are borrowed from the config or live in `arena`.
 * Thread: main, at start. */
#ifndef BATON_DEPLOY_NODE_NODE_OPTIONS_H
#define BATON_DEPLOY_NODE_NODE_OPTIONS_H

#include "deploy/draft/draft_options.h"
#include "deploy/node/node_balance.h"
#include "deploy/router/addresses.h"
#include "kernels/backend.h"
#include "kvtransfer/tuning.h"
#include "scheduler/directory/directory.h"
#include "shared/base/mem.h"
#include "shared/cluster/group.h"
#include "shared/engine/engine_fault.h"
#include "shared/engine/pace.h"
#include "shared/kv/tier/kv_store.h"
#include "shared/net/http/http_server.h"
#include "shared/serve/tenants.h"

enum {
    NODE_NAMES_MAX = 16,
    NODE_KV_SHARE = 5 /* default KV pool: one fifth of the available memory */
};

struct node_options {
    struct arena arena;
    /* model */
    const char *model; /* as given */
    char *model_path;  /* where it was found */
    const char *names[NODE_NAMES_MAX];
    size_t n_names;
    const char *chat_template;                  /* file or NULL */
    const char *reasoning_parser, *tool_parser; /* "auto", "none" or a format's name */
    bool any_temperature;                       /* --allow-temperature-above-2 */
    bool last_item_alone;                       /* --disable-streaming */
    uint32_t max_dec_len;                       /* 0: no limit */
    /* engine */
    const char *device; /* "cpu" or "cuda" */
    const char *cpu_isa;
    enum activations activations;
    enum dtype kv_dtype; /* of the KV pool; --kv-cache-dtype auto follows `activations` */
    enum quantize quantize;
    bool dummy;                /* --load-format dummy */
    const char *weights_cache; /* folder or NULL */
    int n_threads;
    uint32_t n_host_ranks; /* that share this host's CPUs and memory, this one included */
    double gpu_share;      /* of the GPU's memory, for everything: --gpu-memory-utilization */
    bool eager, deterministic;
    uint32_t max_model_len;
    bool max_model_len_given;        /* false: the model's own limit may lower it */
    uint32_t block_tokens, n_blocks; /* n_blocks 0: from kv_bytes */
    const char *n_blocks_by;         /* what gave them: a flag or a variable */
    uint64_t kv_bytes; /* 0: 1/NODE_KV_SHARE of what is free after the load, for all ranks */
    uint32_t max_seqs, max_batched_tokens, max_waiting;
    bool prefix_cache;
    struct kv_store_options tiers; /* --swap-space, --kv-cache-dir, ..: behind the KV pool */
    const char *pace_file;         /* --pace or NULL, and what is in it */
    struct pace_curve pace;
    struct draft_config draft;
    const char *fault_text; /* BATON_ENGINE_FAULT or NULL, and what it says */
    struct engine_fault_plan fault;
    /* API server */
    const char *host;
    uint16_t port, metrics_port; /* port 0 with `http` false: no HTTP at all */
    uint16_t grpc_port;          /* 0: none */
    uint16_t health_port;        /* --health-port; 0: none */
    uint32_t hang_ms;            /* without progress, then that port says that the engine hangs */
    bool http; /* it serves clients; else requests come from the process that it follows */
    bool api;  /* with http: the API's port is open; else clients have gRPC alone (--port -1) */
    bool no_engine; /* the entry node of ranks that are processes of their own (node_front.c) */
    bool is_router; /* of nodes that register with it, or that it lists; no_engine too */
    struct addresses listed; /* of a router */
    struct {
        uint16_t port;      /* its own, on this host, where the others of its router reach it */
        uint16_t hub;       /* of the process that holds what they share; 0: it is the only one */
    } worker;               /* of a router of several processes, which share `port` */
    struct tenants tenants; /* --api-key and --api-keys-file */
    struct http_limits http_limits;
    uint32_t max_requests;
    uint32_t shutdown_s;
    bool log_requests;
    bool pass_requests; /* to other nodes, while this one loads or is full */
    /* cluster */
    enum node_role role;
    const char *topic;
    struct str secret;
    bool own_secret;          /* made for the processes that this one starts: no other can join */
    const char *cluster_host; /* node-to-node ports listen here; loopback without a secret */
    char *advertise_host;     /* how peers reach it */
    uint16_t cluster_port;    /* --pd-comm-port, 0: any */
    uint16_t kv_port;         /* --cache-queue-port, 0: any */
    const char *protocols;    /* --cache-transfer-protocol, those in this build */
    bool protocols_named;     /* the option was given */
    bool kv_checksum;
    struct kvt_tuning tuning; /* --rdma-comm-ports and the variables of kvt_tuning_names */
    struct {
        uint32_t size, rank;     /* ranks that share the experts; size 0: none */
        uint32_t first, n_local; /* those of this host; n_local 0: it was not told */
        const char *host;        /* where rank 0 listens */
        uint16_t port;
        uint64_t domain;     /* a hash of --memory-domain; 0: not given */
        enum dtype rows;     /* --ep-row-type */
        const char *backend; /* of ep.h, NULL: by whether the ranks are on one host */
    } group; /* --data-parallel-size with --enable-expert-parallel, else the ranks of the node */
    struct {
        uint32_t size, rank; /* ranks that share the attention; size 0 or 1: this one alone */
        const char *host;    /* where the first listens */
        uint16_t port;
    } tp;                                /* --tensor-parallel-size and a rank */
    struct node_balance_options balance; /* of a group */
    /* directory */
    const char *directory;      /* "local", "http", "redis" */
    const char *directory_host; /* http: the directory server */
    uint16_t directory_port;
    bool serves_directory; /* local: others register on control_port */
    uint16_t control_port; /* --engine-worker-queue-port */
    struct redis_server redis;
    uint32_t ttl_s;
    uint32_t grace_ms, max_queue_ms, resume_ms;
    bool unsplit;     /* --scheduler-name global */
    struct buf notes; /* lines about options that have no effect here */
};

/* Reads and checks all options. Contradictions and unusable values are ERR_CONFIG with the option's
 * name. The caller releases `out` in any case. */
enum status node_options_read(const struct config *c, struct node_options *out,
                              struct err *err) MUST_CHECK;
/* Sets the log's level and, with --log-dir, its file there. */
enum status node_options_log(const struct config *c, const char *file_name,
                             struct err *err) MUST_CHECK;
void node_options_release(struct node_options *o);
/* Prints what was noted of options that have no effect here. */
void node_options_print_notes(const struct node_options *o);
/* As node_options_read, but a missing --model is no error. The caller releases `out` in any
 * case. */
enum status node_options_check_read(const struct config *c, struct node_options *out,
                                    struct err *err) MUST_CHECK;
/* Prints a warning for each option of Redis that the command line gives in vain where the cluster
 * view is not in Redis; for the topic only if other nodes cannot join. */
void node_options_warn_alone(const struct config *c, bool others_join);
/* Does --scheduler-name put the cluster view into Redis? */
bool node_options_in_redis(const struct config *c);
/* Appends where the model is on this host (model_files.h). One that is not, and whose name
 * docs/compatibility.md lists as refused, is refused with the page's sentence. */
enum status node_options_find_model(const char *model, struct buf *path,
                                    struct err *err) MUST_CHECK;
/* The cluster secret, from --cluster-secret-file or else BATON_CLUSTER_SECRET; empty when neither
 * is set. The text lives in `arena` or in the environment. */
enum status node_options_secret(const struct config *c, struct arena *arena, struct str *out,
                                struct err *err) MUST_CHECK;
/* Reads --activations and --kv-cache-dtype. kernel_kv_check decides what a given model allows. */
enum status node_options_arithmetic(const struct config *c, enum activations *activations,
                                    enum dtype *kv, struct err *err) MUST_CHECK;
/* Reads the transport settings from the environment variables of kvt_tuning_names. Strings are
 * borrowed from the environment. */
enum status node_options_tuning(struct kvt_tuning *t, struct err *err) MUST_CHECK;
/* Appends what it means that there is no cluster secret, or a short one; nothing otherwise. */
void node_options_print_secret(struct str secret, struct buf *out);
/* Appends the start page: role, topic, ports, peers and limits, each with its source. */
void node_options_print(const struct node_options *o, const struct config *c, struct buf *out);

#endif
