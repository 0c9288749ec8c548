/* answer.h - the answers of a worker that an entry node waits for.
 *
 * An answer that does not fit into the queue takes the link down, so that the entry node does not
 * wait for ever. Thread: loop. */
#ifndef BATON_CLUSTER_ANSWER_H
#define BATON_CLUSTER_ANSWER_H

#include "shared/cluster/cluster.h"
#include "shared/cluster/proto/node.pb-c.h"

/* Whose fault a failed attempt is, by the node that reports it; a number of Failed. */
enum failed_blame {
    BLAME_UNSAID,      /* a peer that does not tell: by the status, the node that reports */
    BLAME_NOBODY,      /* of the nodes; or the request's own, by the status */
    BLAME_NODE,        /* the node that reports */
    BLAME_PAIR,        /* neither node by itself: they cannot exchange KV or messages */
    BLAME_HANDED_BACK, /* nobody: the node is well, but has no blocks (ERR_FULL), leaves, has
                        * another role now or not the prompt's KV that it was chosen for
                        * (ERR_BUSY), and gives the request back with what was delivered of it */
    BLAME_N
};

void answer_send(struct cluster *c, uint64_t entry, enum frame_type type, uint64_t request,
                 uint32_t attempt, const ProtobufCMessage *body);
struct failure {
    enum status st;
    enum failed_blame blame;
    const char *text; /* a sentence for the client; borrowed */
};
/* Whose fault it is that the engine does not take a request, or ends it: this node's, or nobody's:
 * it is full, or the request cannot be served. */
enum failed_blame failed_blame_of_engine(enum status st);
/* What a KV transfer that failed with this status means: it is never the request's fault; this
 * node's if its GPU has failed, else the pair's: ERR_BUSY if its connection is doubted
 * (prefill/kv_route.h), ERR_FULL if one of the two has no place for another. `text` is borrowed;
 * "": the event had none. */
struct failure failure_of_transfer(enum status st, const char *text);
/* A node that is said to have the KV of the first n_tokens of a prompt. */
struct kv_kept {
    uint64_t node; /* its first rank; 0: none is */
    uint32_t n_tokens, n_ranks;
};
/* Reads it, and the cluster learns its address. Of a malformed one node is 0. */
struct kv_kept kv_kept_learn(struct cluster *c, const Baton__KvKept *kept);
/* The attempt failed on this node. */
void answer_send_failed(struct cluster *c, uint64_t entry, uint64_t request, uint32_t attempt,
                        const struct failure *f);
/* It is handed back: this node has only n_cached tokens of its prompt, and would have to compute
 * more than the entry node allows (Run.most_computed). */
void answer_send_lacking(struct cluster *c, uint64_t entry, uint64_t request, uint32_t attempt,
                         uint32_t n_cached, const char *text);

#endif
