/* passer.h - passes whole requests to another entry node while this node loads its model, holds as
 * many requests as it may, or is shutting down.
 *
 * The target is the least loaded node of the topic that takes requests: not draining, of this
 * node's model, not full by its record, not suspected. One that refuses, or dies before the client
 * has a byte of its answer, is followed by one more; then the caller answers itself. While this
 * node does not know its own model yet, and the other nodes of the topic have several, a request
 * goes to a node that serves the model it names. A request that was passed to this node
 * (HTTP_PASS_HEADER) is not passed again. A node that is silent while it computes is asked for
 * /live, and is lost when that fails.
 * Owner: the node. Thread: loop. */
#ifndef BATON_SCHEDULER_PASSER_H
#define BATON_SCHEDULER_PASSER_H

#include "scheduler/directory/directory.h"
#include "shared/base/metrics.h"
#include "shared/serve/serve.h"

struct passer;
struct view;

enum pass_reason { PASS_WHILE_LOADING, PASS_WHEN_FULL, PASS_WHILE_DRAINING };

struct passer_options {
    struct loop *loop; /* borrowed until passer_free, as is the directory */
    struct directory *directory;
    struct metrics *metrics;
    const char *name, *host; /* of this node, as in its record; copied. host NULL: unknown */
    struct str secret; /* of the cluster; node_record_is_proven says which nodes get requests */
    uint32_t ttl_s;    /* an answer that has not begun by then is given up */
    bool unsplit;      /* nodes of any role serve whole requests (view.h) */
    bool log_requests;
    /* How long a node may be silent before it is asked for /live, and how long that may take: 1 s
     * and 2 s when 0. */
    uint32_t silent_ms, live_ms;
    uint32_t snapshot_ms; /* an older view of the nodes is renewed first; 1 s when 0 */
    /* How long a request waits for another node that takes it, while this one is loading: when the
     * directory has answered, and when it has not yet. */
    uint32_t wait_ms, wait_first_ms;
};

struct passer *passer_create(const struct passer_options *o);
/* After the HTTP servers and the directory: no request is left. */
void passer_free(struct passer *p);
/* This node has loaded its model (the fingerprint of its record). */
void passer_set_model(struct passer *p, uint64_t model);
/* From now on the nodes are those of `v`, which has checked their records already, and the
 * directory is not asked any more. `v` lives until passer_free. */
void passer_use_view(struct passer *p, const struct view *v);
/* From now on passer_when_full's requests are passed since this node is shutting down. */
void passer_set_draining(struct passer *p);
/* Requests being passed, or for which a node is sought. */
uint32_t passer_n_live(const struct passer *p);
/* Requests that another node took; they have ended. */
uint64_t passer_n_taken(const struct passer *p);

/* Ends all passes as if the other nodes had been lost, and passes nothing any more. */
void passer_stop(struct passer *p);

/* As serve_passer's functions, which this gives for PASS_WHEN_FULL. */
void *passer_start(struct passer *p, enum pass_reason reason, const struct serve_pass *r);
void passer_cancel(struct passer *p, void *pass);
struct serve_passer passer_when_full(struct passer *p);

#endif
