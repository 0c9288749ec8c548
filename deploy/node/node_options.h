/* node_options.h - what a node is told, after configuration: plain values, checked, with defaults
 * filled in. node_options_read turns a config into this and prints where each value came from.
 * Strings are borrowed from the config or live in `arena`. Thread: main, at start. */
#ifndef BATON_DEPLOY_NODE_NODE_OPTIONS_H
#define BATON_DEPLOY_NODE_NODE_OPTIONS_H

#include "deploy/options/config.h"
#include "kernels/backend.h"
#include "kvtransfer/tuning.h"
#include "scheduler/directory/directory.h"
#include "shared/base/mem.h"

enum {
    NODE_NAMES_MAX = 16,
    NODE_KEYS_MAX = 64,
    NODE_KV_SHARE = 5 /* the default pool: a fifth of available memory */
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
    /* engine */
    const char *device; /* "cpu" or "cuda" */
    const char *cpu_isa;
    enum activations activations;
    enum dtype kv_dtype; /* of the KV pool; of --kv-cache-dtype auto what suits the
                          * activations */
    enum quantize quantize;
    bool dummy;                /* weights are made up: --load-format dummy */
    const char *weights_cache; /* folder or NULL */
    int n_threads;
    double gpu_share; /* of the card's memory that this node may take in all:
                       * --gpu-memory-utilization */
    bool eager, deterministic;
    uint32_t max_model_len;
    bool max_model_len_given;        /* else a smaller limit of the model's own is fine */
    uint32_t block_tokens, n_blocks; /* n_blocks 0: from kv_bytes */
    uint64_t kv_bytes;               /* 0: one NODE_KV_SHARE-th of what is available once the
                                      * weights are loaded */
    uint32_t max_seqs, max_batched_tokens, max_waiting;
    bool prefix_cache;
    /* faces */
    const char *host;
    uint16_t port, metrics_port; /* port 0 with `http` false: no HTTP at all */
    bool http;
    const char *api_keys[NODE_KEYS_MAX];
    size_t n_api_keys;
    uint32_t max_requests;
    uint32_t shutdown_s;
    /* cluster */
    enum node_role role;
    const char *topic;
    struct str secret;
    const char *cluster_host; /* listen address of node-to-node ports: loopback unless
                               * there is a secret */
    char *advertise_host;     /* how peers reach it */
    uint16_t cluster_port;    /* --pd-comm-port, 0: any */
    uint16_t kv_port;         /* --cache-queue-port, 0: any */
    const char *protocols;    /* --cache-transfer-protocol, rows that are built */
    bool protocols_named;     /* it was given */
    bool kv_checksum;
    struct kvt_tuning tuning; /* --rdma-comm-ports, KVCACHE_* and BATON_* variables of
                               * kvt_tuning_names */
    /* directory */
    const char *directory;      /* "local", "http", "redis" */
    const char *directory_host; /* http: the holder */
    uint16_t directory_port;
    bool serves_directory; /* local: others register on control_port */
    uint16_t control_port; /* --engine-worker-queue-port */
    const char *redis_host, *redis_password;
    uint16_t redis_port;
    int redis_db;
    uint32_t ttl_s;
    uint32_t grace_ms;
};

/* Contradictions and unusable values are ERR_CONFIG with the option's name. The caller releases it
 * in any case. */
enum status node_options_read(const struct config *c, struct node_options *out,
                              struct err *err) MUST_CHECK;
void node_options_release(struct node_options *o);
/* As node_options_read, without opening a log file; a missing --model is no error. The caller
 * releases `out` in any case. */
enum status node_options_check_read(const struct config *c, struct node_options *out,
                                    struct err *err) MUST_CHECK;
/* The cluster secret, from --cluster-secret-file or else BATON_CLUSTER_SECRET; empty when there is
 * none. Lives in `arena` or the environment. */
enum status node_options_secret(const struct config *c, struct arena *arena, struct str *out,
                                struct err *err) MUST_CHECK;
/* The arithmetic and the type of the KV cache: --activations and --kv-cache-dtype. What a model
 * allows is kernel_kv_check's. */
enum status node_options_arithmetic(const struct config *c, enum activations *activations,
                                    enum dtype *kv, struct err *err) MUST_CHECK;
/* What the environment says about the transports, by the names of kvt_tuning_names. Strings are
 * those of the environment. */
enum status node_options_tuning(struct kvt_tuning *t, struct err *err) MUST_CHECK;
/* The start page: role, topic, ports, peers, limits, each with its source. */
void node_options_print(const struct node_options *o, const struct config *c, struct buf *out);

#endif
