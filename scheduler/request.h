/* request.h - one request at its entry node: its states, from acceptance to the last token.
 *
 *            place            credit           grant             first TOKENS
 *   PLACING ───────▶ CREDIT ───────▶ RESERVE ───────▶ PREFILL ───────▶ DECODE ──▶ ENDED
 *      │ one node does all: RUN ───────────────────────────────────────────────▶ ENDED
 *      ◀── from any: WAIT (busy, after a pause), MOVE (loss: next attempt, from the last token)
 *
 * Invariants:
 *  1 Each token index reaches the sink exactly once and in order. An attempt's records below n_out
 *    are dropped; one above it ends the attempt as a loss.
 *  2 Messages of other attempts are ignored; nodes of an abandoned attempt get CANCEL.
 *  3 on_end is called exactly once, never from inside submit.
 *  4 A placement in the directory is released exactly once per attempt.
 * retry.h alone decides what a loss means. Owner: scheduler. Thread: loop. */
#ifndef BATON_SCHEDULER_REQUEST_H
#define BATON_SCHEDULER_REQUEST_H

#include "scheduler/directory/directory.h"
#include "scheduler/retry.h"
#include "scheduler/scheduler_metrics.h"
#include "scheduler/view.h"
#include "shared/base/hash/hash.h"
#include "shared/base/list.h"
#include "shared/base/map.h"
#include "shared/cluster/cluster.h"
#include "shared/cluster/proto/node.pb-c.h"
#include "shared/serve/backend.h"

enum {
    REQUEST_AVOID_MAX = 8,
    REQUEST_NEVER_MS = 0 /* wait_until_ms of states without a limit: computing and decoding take as
                          * long as they take, dead and frozen nodes are noticed by their links */
};

/* What the requests of an entry node share. */
struct entry {
    struct cluster *cluster; /* borrowed, as is the directory */
    struct directory *directory;
    struct view view;
    struct scheduler_metrics metrics;
    uint32_t ttl_s, grace_ms, block_tokens; /* of scheduler_options */
    struct map by_id;                       /* the live requests */
    struct list live;
    uint32_t n_live;
    struct list orphans; /* ended requests whose placing answer is still awaited */
    bool capacity_freed; /* a placement ended since the last tick */
};

struct request_node {
    uint64_t node; /* 0: none */
    char name[NODE_NAME_MAX];
    char host[NODE_NAME_MAX];
    uint16_t port;
};

struct request {
    uint64_t id;
    char name[64]; /* the client's x-request-id */
    enum request_state state;
    uint32_t attempt;  /* counts from 1 */
    uint32_t n_before; /* output tokens delivered by earlier attempts */
    struct entry *entry;
    struct gen_sink sink;
    /* what was asked */
    int32_t *tokens; /* prompt, then delivered output; [n_tokens] of
                      * cap_tokens */
    uint32_t n_prompt, n_tokens, cap_tokens;
    struct sampling_params sampling; /* bias and allowed are own copies */
    uint64_t cache_salt;
    bool prompt_logprobs;
    uint32_t n_prompt_lp;      /* positions delivered so far, counting from 1 */
    struct buf held, held_end; /* token records and FINISHED that overtook the prompt's
                                * logprobs on another link */
    uint64_t deadline_ms;
    struct hash128 first_block;
    /* where it is */
    struct request_node prefill, decode;
    bool placed;  /* a reservation of this attempt is in the directory */
    bool placing; /* the directory's answer is awaited: it points here, so
                   * an ended request stays (entry.orphans) until it
                   * came */
    struct request_node next_prefill, next_decode; /* chosen, while placing */
    struct placement accounted; /* what the entry's own view counts for it; request 0:
                                 * nothing */
    bool waits_for_capacity;    /* PLACING: every node that could take it was full */
    enum finish_reason ends;    /* the last delivered token said that it is the last: a
                                 * loss after it changes nothing */
    uint64_t avoid[REQUEST_AVOID_MAX];
    uint32_t n_avoid;
    uint64_t wait_until_ms; /* PLACING: not before; others: this attempt is stuck
                             * after */
    uint64_t unplaced_since_ms;
    uint32_t n_moves;
    bool canceled; /* by the face; acted on by the next turn of the loop */
    /* the trace; clock_ns of this process */
    uint64_t t_accept, t_credit, t_first, t_last;
    struct gen_trace trace;
    struct list link; /* entry.live or .orphans */
};

/* Copy what was asked; the state is PLACING. */
struct request *request_create(struct entry *e, uint64_t id, const struct gen_request *r,
                               const struct gen_sink *sink);
void request_free(struct request *r);
/* Do what the state calls for now (timer, new snapshot, after any change). */
void request_advance(struct entry *e, struct request *r);
/* Room came free: place it if full nodes are what it waits for. False when they still are full. */
bool request_place_if_waiting(struct entry *e, struct request *r);
/* The one way down: look the loss up in retry.h and act. `culprit` (0: none) is avoided by the next
 * attempt. */
void request_on_loss(struct entry *e, struct request *r, enum request_loss loss, enum status st,
                     uint64_t culprit, const char *text);
/* Uses of r end here: tells nodes, releases the placement, calls on_end, frees. */
void request_end(struct entry *e, struct request *r, enum status st, enum finish_reason finish,
                 int32_t stop_token, const char *text);

/* For request_messages.c. */
static inline uint32_t request_n_out(const struct request *r) { return r->n_tokens - r->n_prompt; }
void request_set_state(struct request *r, enum request_state next);
bool request_send_reserve(struct entry *e, struct request *r);
bool request_send_prefill(struct entry *e, struct request *r, const Baton__Grant *grant);

#endif
