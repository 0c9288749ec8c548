/* directory.h - the membership service: which nodes are alive and how loaded they are. Backends:
 * local, http, redis.
 *
 * A directory holds soft state only: a record per node, kept alive by renewing (a node that stops
 * is gone lease_ms later, by the holder's own clock), and reservations (load is counted when a
 * request is placed, both nodes in one atomic step). All of it can be rebuilt: nodes publish every
 * renew_ms, entries keep their last snapshot, and losing the holder loses no request.
 *
 *   publish   renew my record, with my present load; the first one announces me
 *   snapshot  every live node of my topic (and the names of other topics, for the message to a
 *             lonely node)
 *   reserve   count `tokens` on the prefill node and one sequence of `blocks` on the decode node,
 *             if both are alive and still have room; returns a fencing number that grows with every
 *             reservation
 *   release   take that back; a reservation not released or renewed is dropped after ttl_ms
 *   leave     remove my record now
 * Callbacks are called exactly once, never from inside the call, on the loop; after close none is
 * called any more. Thread: loop. */
#ifndef BATON_SCHEDULER_DIRECTORY_DIRECTORY_H
#define BATON_SCHEDULER_DIRECTORY_DIRECTORY_H

#include "shared/base/buf.h"
#include "shared/base/err.h"
#include "shared/base/metrics.h"
#include "shared/net/loop.h"

enum node_role { ROLE_MIXED, ROLE_PREFILL, ROLE_DECODE };
enum { DIRECTORY_NODES_MAX = 4096, DIRECTORY_TOPICS_MAX = 16, NODE_NAME_MAX = 64 };

struct node_record {
    uint64_t node; /* incarnation id */
    char name[NODE_NAME_MAX];
    char topic[NODE_NAME_MAX];
    enum node_role role;
    char host[NODE_NAME_MAX]; /* where its cluster port listens, as peers reach it */
    uint16_t cluster_port, http_port;
    uint64_t model; /* fingerprint; only equal ones are paired */
    uint32_t max_seqs, n_blocks, block_tokens, max_model_len;
    bool draining;
    /* load, as the node itself sees it */
    uint32_t n_running, n_waiting, n_blocks_free;
    uint64_t waiting_tokens;
    uint64_t progress; /* the engine's progress counter */
    bool has_work;
    /* filled by the directory in snapshots: load placed but not yet released */
    uint64_t placed_tokens;
    uint32_t placed_seqs, placed_blocks;
};

struct directory_snapshot {
    const struct node_record *nodes; /* [n], valid during the callback */
    size_t n;
    char topics[512]; /* "default (1 mixed), test (1 prefill, 0 decode)": every
                       * topic and its roles */
};

struct placement {
    uint64_t request; /* unique */
    uint64_t prefill; /* 0: the decode node does all of it */
    uint64_t decode;
    uint32_t tokens; /* prompt tokens to compute */
    uint32_t blocks; /* KV blocks the decode node will need */
    uint32_t ttl_ms;
};

struct directory;

typedef void directory_snapshot_fn(void *arg, enum status st, const struct directory_snapshot *s);
/* st: OK; ERR_BUSY (one of them is full), ERR_NOT_FOUND (one of them is gone), ERR_UNAVAILABLE (the
 * holder cannot be reached). */
typedef void directory_reserve_fn(void *arg, enum status st, uint64_t fence);

struct directory_options {
    struct loop *loop;
    const char *topic;
    uint32_t renew_ms, lease_ms; /* 700 and 2,400 when 0 */
    struct metrics *metrics;
    /* local */
    /* http: the holder */
    const char *http_host;
    uint16_t http_port;
    struct str secret; /* cluster secret, proves membership to the holder */
    /* redis */
    const char *redis_host, *redis_password;
    uint16_t redis_port;
    int redis_db;
    /* the holder came back or was first reached: publish again soon */
    void (*on_up)(void *arg);
    void (*on_down)(void *arg, const char *why);
    void *arg;
};

struct directory_ops {
    const char *name;
    enum status (*open)(const struct directory_options *o, struct directory **out, struct err *err);
    void (*close)(struct directory *d);
    void (*publish)(struct directory *d, const struct node_record *me);
    void (*leave)(struct directory *d, uint64_t node);
    enum status (*snapshot)(struct directory *d, directory_snapshot_fn *cb, void *arg);
    enum status (*reserve)(struct directory *d, const struct placement *p, directory_reserve_fn *cb,
                           void *arg);
    void (*release)(struct directory *d, uint64_t request);
};

struct directory {
    const struct directory_ops *ops; /* first member of every row's struct */
};

extern const struct directory_ops *const DIRECTORY_BACKENDS[]; /* NULL-ended: local, http, redis */

enum status directory_open(const char *backend, const struct directory_options *o,
                           struct directory **out, struct err *err) MUST_CHECK;
void directory_close(struct directory *d);
void directory_publish(struct directory *d, const struct node_record *me);
void directory_leave(struct directory *d, uint64_t node);
enum status directory_snapshot(struct directory *d, directory_snapshot_fn *cb,
                               void *arg) MUST_CHECK;
enum status directory_reserve(struct directory *d, const struct placement *p,
                              directory_reserve_fn *cb, void *arg) MUST_CHECK;
void directory_release(struct directory *d, uint64_t request);

const char *node_role_name(enum node_role r);
/* JSON object of a record, and back with every bound checked (http and redis rows, /cluster). */
void node_record_write(const struct node_record *r, struct buf *out);
enum status node_record_read(struct str json, struct node_record *out, struct err *err) MUST_CHECK;

#endif
