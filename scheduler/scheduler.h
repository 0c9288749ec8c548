/* scheduler.h - the entry side of a node: takes requests, places them, follows them to their end.
 *
 * It implements serve_backend and owns the live requests (request.h) and the view of the other
 * nodes (view.h). It is not a process: every node has one, so a client may send its request to any
 * node. Life cycle: create (starts timers), scheduler_backend for the API server, stop (live
 * requests end with ERR_CANCELED), then the directory is closed, then free. Thread: loop. */
#ifndef BATON_SCHEDULER_SCHEDULER_H
#define BATON_SCHEDULER_SCHEDULER_H

#include "scheduler/directory/directory.h"
#include "scheduler/trouble.h"
#include "shared/base/metrics.h"
#include "shared/cluster/cluster.h"
#include "shared/serve/backend.h"

struct scheduler;

struct scheduler_options {
    struct loop *loop; /* all borrowed until scheduler_free */
    struct cluster *cluster;
    struct directory *directory;
    struct metrics *metrics;
    const struct tenants *tenants; /* borrowed; NULL: one */
    uint32_t max_requests;         /* live at once; then those that wait give way, or 429 */
    uint32_t ttl_s;                /* a request older than this is ended */
    uint32_t grace_ms;     /* how long a request that no node can take waits for one, before 503 */
    uint32_t max_queue_ms; /* how long one waits in line, as expected and in fact; else 429 */
    bool log_requests;     /* each one's end at level info, else debug */
    const char *topic;
    struct str secret;      /* of the cluster; n 0: none */
    const char *join;       /* trouble.h */
    bool unsplit;           /* requests are never split (view.h) */
    uint64_t model;         /* of a router: requests go to nodes of this model; 0: any */
    uint64_t text;          /* of a router without a model: to nodes of this vocabulary (view.h) */
    const char *model_name; /* of a router: what its text is of, for sentences */
    /* Fills in this node's own record, published every RENEW_MS. NULL: a router, which has no
     * engine and publishes nothing. */
    void (*describe)(void *arg, struct node_record *me);
    /* Is this node listed by a router now? */
    enum trouble_listed (*listed)(void *arg);
    void *arg;
};

struct scheduler *scheduler_create(const struct scheduler_options *o);
/* Appends members of GET /cluster: what this entry node's requests did, and the last failures. */
void scheduler_describe(struct scheduler *s, struct buf *json_members);
void scheduler_stop(struct scheduler *s);
void scheduler_free(struct scheduler *s);
struct serve_backend scheduler_backend(struct scheduler *s);

/* Returns whether the message is of a kind that the scheduler handles. */
bool scheduler_on_message(struct scheduler *s, const struct cluster_message *m);
void scheduler_on_lost(struct scheduler *s, uint64_t node, const char *why);
/* Publishes what changed (role, draining) now instead of at the next renewal. */
void scheduler_publish(struct scheduler *s);
/* Asks for a snapshot of the nodes soon instead of at its usual time. */
void scheduler_refresh(struct scheduler *s);
/* The launcher that started this node is gone (trouble.h); `what_it_means` is kept. */
void scheduler_launcher_gone(struct scheduler *s, const char *what_it_means, bool held_view);
/* Nodes that are meant to be in a router's view and are not (trouble.h); `why` is a sentence, valid
 * until the next call. NULL: none is known of. */
void scheduler_missing(struct scheduler *s, const char *why);
/* The node shuts down: leaves the directory. Live requests go on, and nothing is placed on this
 * node any more unless no other one can decode. New requests are taken, if `enters`, while
 * others can decode, or could grace_ms ago; else they are refused. */
void scheduler_drain(struct scheduler *s, bool enters);
uint32_t scheduler_n_live(const struct scheduler *s);
/* Those of clients: without second attempts (hedge/hedge.h). */
uint32_t scheduler_n_requests(const struct scheduler *s);
/* Of those, the ones that were there when scheduler_drain was called. */
uint32_t scheduler_n_old(const struct scheduler *s);
/* Can a node other than this one take work that ends in an answer, as far as is known here? */
bool scheduler_sees_others(const struct scheduler *s, uint64_t me);
/* Valid until scheduler_free. */
const struct view *scheduler_view(const struct scheduler *s);

#endif
