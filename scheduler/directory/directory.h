/* directory.h - the membership service: which nodes are alive and how loaded they are.
 *
 * Backends: `local` keeps the state in this process; `http` asks the directory server (server.h) in
 * another process; `redis` asks a Redis server. The state is soft and can be rebuilt:
 *  - a record per node. A node that stops renewing it is gone lease_ms later, by the clock of the
 *    process that keeps the state.
 *  - reservations: when a request is placed, one atomic step counts its tokens on the prefill node,
 *    until they are computed, and one sequence with its blocks on the decode node, until the
 *    attempt ends or ttl_ms is over; maybe on nodes that have more of the prompt (prefix.h).
 *  - what the tenants of a topic use, summed over its entry nodes (meter.h).
 * Losing the server loses no request: nodes publish again, entry nodes keep their last snapshot.
 *
 * Each callback is called exactly once, on the loop, never from inside the call; after close none
 * is called. Thread: loop. */
#ifndef BATON_SCHEDULER_DIRECTORY_DIRECTORY_H
#define BATON_SCHEDULER_DIRECTORY_DIRECTORY_H

#include "scheduler/directory/meter.h"
#include "scheduler/prefix/prefix_text.h"
#include "shared/base/buf.h"
#include "shared/base/err.h"
#include "shared/base/metrics.h"
#include "shared/net/loop.h"
#include "shared/net/redis/redis_server.h"

enum node_role { ROLE_MIXED, ROLE_PREFILL, ROLE_DECODE };
enum {
    DIRECTORY_NODES_MAX = 4096,
    DIRECTORY_TOPICS_MAX = 16,
    NODE_NAME_MAX = 64,
    KV_TYPE_MAX = 16,
    KV_BY_MAX = 48,
    RECORD_SERVED_MAX = 16,    /* names that a node serves its model under */
    RECORD_FOLLOWERS_MAX = 15, /* ranks of a node besides its first */
    RECORD_PROOF_MAX = 33,     /* 32 hex digits and a 0 */
    RECORD_GROUP_MAX = 80,
    /* Bytes of a record as text. One whose names are as long as they may be has about 3,600. */
    RECORD_TEXT_MAX = 4096
};

/* A process of a node, as peers reach its cluster port. */
struct node_rank {
    uint64_t process; /* incarnation id */
    char host[NODE_NAME_MAX];
    uint16_t port;
};

/* The group whose ranks share the experts of one model, as a rank of it sees it. */
struct node_group {
    char name[RECORD_GROUP_MAX]; /* the same on all of its ranks; "": the node is in none */
    uint32_t rank, size;         /* of a node of several ranks, its first */
    uint64_t epoch;              /* load: the group that it was in last; 0: none yet */
    bool is_whole;               /* load: it steps now, in a group of all `size` ranks */
};

struct node_record {
    uint64_t node; /* incarnation id */
    char name[NODE_NAME_MAX];
    char topic[NODE_NAME_MAX];
    enum node_role role;
    char host[NODE_NAME_MAX]; /* where its cluster port listens, as peers reach it */
    uint16_t cluster_port, http_port;
    /* Its ranks above 0, if it is of several: the node itself is the first and leads. */
    struct node_rank followers[RECORD_FOLLOWERS_MAX];
    uint32_t n_followers;
    struct node_group group;
    uint64_t model; /* fingerprint; only equal ones are paired */
    uint64_t text;  /* a hash of its vocabulary; 0: not known. Entry nodes need the same */
    char model_name[NODE_NAME_MAX], precision[NODE_NAME_MAX]; /* for people */
    uint64_t served[RECORD_SERVED_MAX]; /* node_record_set_served: hashes of its served names */
    uint32_t n_served;
    /* Element type of its KV, "" when not known; kv_lossy: it exchanges KV with less precise types
     * too. Only nodes that can exchange KV are paired (place.c). */
    char kv_type[KV_TYPE_MAX];
    bool kv_lossy;
    char kv_by[KV_BY_MAX]; /* its KV transports between hosts, "rdma,tcp" */
    uint64_t kv_host; /* nodes with the same one use ipc; 0: none. kv_by empty too: not known */
    uint32_t max_seqs, n_blocks, block_tokens, max_model_len;
    uint32_t max_requests; /* that it follows as their entry; 0: unknown */
    uint32_t resume_ms; /* how long it keeps an answer whose entry node was lost; 0: not at all */
    bool prefix_cache;  /* it keeps KV blocks for prompts that begin alike; earlier versions do not
                         * say so, and are chosen by load alone */
    bool deterministic; /* it computes the same tokens again for the same request */
    /* All above as its node wrote it, members that are not known here included: proof is of these
     * bytes. Borrowed from whoever read the record; n 0: it was not read, but filled in here. */
    struct str identity;
    char proof[RECORD_PROOF_MAX]; /* node_record_prove; "" without a cluster secret */
    bool draining;
    /* load as the node itself reports it */
    uint32_t n_running, n_waiting, n_blocks_free, n_requests;
    uint64_t waiting_tokens;
    /* Measured: prompt tokens per second, microseconds of a step that decodes; 0: not yet. */
    uint32_t prefill_tokens_per_s, step_us;
    uint64_t progress; /* the engine's progress counter */
    bool has_work;
    /* filled in by the directory in snapshots: load placed and not yet released */
    uint64_t placed_tokens;
    uint32_t placed_seqs, placed_blocks;
    /* filled in by the view: prompt tokens that wait there although none was placed */
    uint64_t unplaced_tokens;
    bool is_lost; /* filled in by the view of an entry node, which has lost its link (view.h) */
};

/* Is `node` among the n nodes? */
static inline bool nodes_have(const uint64_t *nodes, size_t n, uint64_t node)
{
    for (size_t i = 0; i < n; i++)
        if (nodes[i] == node) return true;
    return false;
}

struct directory_snapshot {
    const struct node_record *nodes; /* [n], valid during the callback, as are their identities */
    size_t n;
    /* All topics and their roles: "default (1 mixed), test (1 prefill, 0 decode)". */
    char topics[512];
};

struct placement {
    uint64_t request; /* unique */
    uint64_t prefill; /* 0: the decode node does all of it */
    uint64_t decode;
    uint32_t tokens; /* prompt tokens to compute */
    uint32_t blocks; /* KV blocks the decode node will need */
    uint32_t ttl_ms;
    /* Borrowed during the call; NULL: the nodes above and no others. Its choice is the nodes above,
     * its n_tokens is `tokens`. */
    const struct prefix_query *prefix;
};

/* A placement as it was counted: with `prefix` maybe on other nodes, and for fewer tokens. */
struct directory_placed {
    uint64_t fence; /* grows with every reservation */
    struct prefix_placed on;
};

struct directory;

typedef void directory_snapshot_fn(void *arg, enum status st, const struct directory_snapshot *s);
/* st: OK; ERR_BUSY (a node is full), ERR_NOT_FOUND (a node is gone), ERR_UNAVAILABLE (the directory
 * server cannot be reached): then placed is NULL. */
typedef void directory_reserve_fn(void *arg, enum status st, const struct directory_placed *placed);
/* st: OK; else sums is NULL, and what the report told is to be told again: under its number if it
 * was ERR_UNAVAILABLE (the directory server cannot be reached, or did not answer), since it may
 * have been counted. ERR_FULL: the topic counts no more tenants or entry nodes (the log has the
 * sentence). ERR_UNSUPPORTED: the directory server is of an earlier version; it is asked again
 * after ten seconds. */
typedef void directory_meter_fn(void *arg, enum status st, const struct meter_sums *sums);

struct directory_options {
    struct loop *loop;
    const char *topic;
    uint32_t renew_ms, lease_ms; /* 700 and 2,400 when 0 */
    struct metrics *metrics;
    /* http: the directory server */
    const char *http_host;
    uint16_t http_port;
    struct str secret;         /* cluster secret, proves membership to the directory server */
    struct redis_server redis; /* redis */
    /* The directory server came back or was first reached: publish again soon. */
    void (*on_up)(void *arg);
    /* It does not answer, or refuses this node; again when the reason changes. `why` is a sentence
     * that names the server. */
    void (*on_down)(void *arg, const char *why);
    void *arg;
};

/* A backend; the wrappers below have the contracts. */
struct directory_ops {
    const char *name;
    enum status (*open)(const struct directory_options *o, struct directory **out, struct err *err);
    void (*close)(struct directory *d);
    void (*publish)(struct directory *d, const struct node_record *me);
    void (*leave)(struct directory *d, uint64_t node);
    enum status (*snapshot)(struct directory *d, directory_snapshot_fn *cb, void *arg);
    enum status (*reserve)(struct directory *d, const struct placement *p, directory_reserve_fn *cb,
                           void *arg);
    void (*computed)(struct directory *d, uint64_t request);
    void (*release)(struct directory *d, uint64_t request);
    enum status (*meter)(struct directory *d, const struct meter_report *r, directory_meter_fn *cb,
                         void *arg);
    const char *(*why_down)(const struct directory *d);
};

struct directory {
    const struct directory_ops *ops; /* first member of every backend's struct */
};

extern const struct directory_ops *const DIRECTORY_BACKENDS[]; /* NULL-ended: local, http, redis */

enum status directory_open(const char *backend, const struct directory_options *o,
                           struct directory **out, struct err *err) MUST_CHECK;
void directory_close(struct directory *d);
/* Renews this node's record with its present load; the first call announces the node. */
void directory_publish(struct directory *d, const struct node_record *me);
/* Removes the node's record now. */
void directory_leave(struct directory *d, uint64_t node);
/* Asks for all live nodes of this topic, and the names of other topics. */
enum status directory_snapshot(struct directory *d, directory_snapshot_fn *cb,
                               void *arg) MUST_CHECK;
/* Counts p->tokens on the prefill node and one sequence of p->blocks on the decode node, if both
 * are alive and have capacity; with p->prefix on those that prefix_pick takes, less what they
 * should have. */
enum status directory_reserve(struct directory *d, const struct placement *p,
                              directory_reserve_fn *cb, void *arg) MUST_CHECK;
/* The prompt of a request was computed: its tokens do not count any more. */
void directory_computed(struct directory *d, uint64_t request);
/* Takes the reservation of a request back. */
void directory_release(struct directory *d, uint64_t request);
/* Tells what this topic's tenants used at one entry node, and asks for the sums over all of them
 * (meter.h has the rules). Of one entry node one report at a time: the next call follows the
 * callback, with the same number unless it said OK. Besides the callback's errors ERR_NOMEM, and
 * ERR_FULL when too many answers are due. */
enum status directory_meter(struct directory *d, const struct meter_report *r,
                            directory_meter_fn *cb, void *arg) MUST_CHECK;

/* Returns the sentence of on_down; NULL while the directory answers, and before its first answer.
 * Valid until the next turn of the loop. */
const char *directory_why_down(const struct directory *d);

const char *node_role_name(enum node_role r);
/* The role of this name; false: there is none, and *out is as it was. */
bool node_role_from_name(const char *name, enum node_role *out);
/* Writes a record as a JSON object, and reads it with every bound checked (http and redis
 * backends). room: json.n bytes, to which the identity is copied. ERR_TOO_LONG: more than
 * RECORD_TEXT_MAX bytes, which are not looked at. */
void node_record_write(const struct node_record *r, struct buf *out);
enum status node_record_read(struct str json, char *room, struct node_record *out,
                             struct err *err) MUST_CHECK;
/* Writes all known members side by side and without the proof, for people (GET /cluster). */
void node_record_show(const struct node_record *r, struct buf *out);
/* Appends the bytes that the proof is of. */
void node_record_add_identity(const struct node_record *r, struct buf *out);
/* The names under which the node serves its model. A record has their hashes, since names have no
 * bound; one that collides costs a client a 404. Names after RECORD_SERVED_MAX are left out. */
void node_record_set_served(struct node_record *r, const char *const *names, size_t n);
bool node_record_serves(const struct node_record *r, struct str name);
/* What the prefix table is told of the node. */
struct prefix_bid node_record_bid(const struct node_record *r);
/* The kind of a node like this one, of that role and in a group that has all of its ranks or lacks
 * some: the same for nodes with the same model, size of blocks, longest request and KV exchange. */
uint64_t node_record_kind(const struct node_record *r, enum node_role role, bool is_whole);
/* Whoever can write to the directory, or stands on the way to it, must not bring in nodes of their
 * own: requests, prompts and API keys go where a record says. A record is therefore proven with the
 * cluster secret: an HMAC of its identity's bytes, its addresses included. Without a secret nothing
 * is written, and only records of this host are taken: their address is a
 * loopback one, or own_host, as which this node is known to others ("": unknown). */
void node_record_prove(struct node_record *r, struct str secret);
bool node_record_is_proven(const struct node_record *r, struct str secret, const char *own_host);

#endif
