/* request_attach.h - the first state of a request whose client comes back: a node may have kept the
 * answer (decode/decode_parking.h) and go on with it here.
 *
 *   ATTACH ─ ATTACH to the node of the client's handle, or to all ─▶ ATTACHED ─▶ DECODE
 *      └ every one refused or was lost, or ATTACH_MS passed ─▶ PLACING: it is computed again, by the
 *        limits of its tenant and in line, like a new one
 *
 * All nodes are asked for a request that names none: its client has no token of it yet, or
 * repeats it without a handle. Each function may end and free the request. Owner: scheduler.
 * Thread: loop. */
#ifndef BATON_SCHEDULER_REQUEST_ATTACH_H
#define BATON_SCHEDULER_REQUEST_ATTACH_H

#include "scheduler/request.h"

enum {
    ATTACH_MS = 500,        /* until the node that the client names is seen and has answered */
    ATTACH_ASK_MS = 100,    /* where all are asked: also a request that nobody has waits so long */
    ATTACH_ONLY_MS = 10000, /* more where it cannot be computed again, or that is not known: as
                             * long as answers are kept by default */
    /* LIMIT: in topics of more decode nodes, nobody is asked. Links to all exist only in small ones
     * (view.h). */
    ATTACH_ASKED_MAX = 32
};

/* Does the request begin with ATTACH? */
bool request_attach_is_wanted(const struct gen_resume *g);
void request_attach_advance(struct entry *e, struct request *r);
/* A message of this attempt from any node, in this state. */
void request_attach_on_message(struct entry *e, struct request *r, const struct cluster_message *m);
void request_attach_on_lost(struct entry *e, struct request *r, uint64_t node);
/* Nobody shall go on with the request: those that were asked get CANCEL; not from a node that
 * leaves, since it would end what they have kept for the client. */
void request_attach_abandon(struct entry *e, struct request *r);

#endif
