/* request.h - one request at its entry node: its states, from acceptance to the last token.
 *
 *            place            credit           grant             first TOKENS
 *   PLACING ───────▶ CREDIT ───────▶ RESERVE ───────▶ PREFILL ───────▶ DECODE ──▶ ENDED
 *      │ one node does all: RUN ───────────────────────────────────────────────▶ ENDED
 *      ◀── from any: requeued (a node is busy; after a pause) or moved (a loss; the next attempt
 *          continues after the last delivered token). ATTACH is in request_attach.h. A request is
 *          first placed when its turn in line has come (admission/admit.h)
 * Invariants:
 *  1 Each token index reaches the sink exactly once and in order. A record with an index below
 *    n_out is dropped; one above it ends the attempt as a loss.
 *  2 Messages of other attempts are ignored; the nodes of an abandoned attempt get CANCEL.
 *  3 on_end is called exactly once, never from inside submit.
 *  4 A placement in the directory is released exactly once per attempt.
 * Only retry.h decides what a loss means. Owner: scheduler. Thread: loop. */
#ifndef BATON_SCHEDULER_REQUEST_H
#define BATON_SCHEDULER_REQUEST_H

#include "scheduler/admission/admission.h"
#include "scheduler/directory/directory.h"
#include "scheduler/hedge/hedge.h"
#include "scheduler/prefix/prefix_request.h"
#include "scheduler/recent.h"
#include "scheduler/retry.h"
#include "scheduler/scheduler_metrics.h"
#include "scheduler/trouble.h"
#include "scheduler/view.h"
#include "shared/base/list.h"
#include "shared/base/log/log_repeats.h"
#include "shared/base/map.h"
#include "shared/cluster/cluster.h"
#include "shared/cluster/proto/node.pb-c.h"
#include "shared/serve/backend.h"

enum {
    REQUEST_AVOID_MAX = 8,
    REQUEST_API_NAME_MAX = 129, /* 128 characters and a 0 */
    REQUEST_PAUSE_BUSY_MS = 50, /* before a refused request is placed again */
    REQUEST_NEVER_MS = 0        /* wait_until_ms of states without a limit but deadline_ms (retry.c,
                          * LOSS_STUCK) */
};

/* What the requests of an entry node share. */
struct entry {
    struct cluster *cluster; /* borrowed, as is the directory */
    struct directory *directory;
    struct view view;
    const char *topic, *join; /* of scheduler_options */
    struct trouble trouble;
    uint64_t t_trouble_ms;     /* when it was looked for last */
    const char *launcher_gone; /* trouble.h */
    bool launcher_held_view;
    const char *missing; /* trouble.h */
    enum trouble_listed listed;
    struct scheduler_metrics metrics;
    struct admission admission;
    struct recent recent;
    struct prefix_entry prefix;
    struct log_repeats requeues; /* busy nodes */
    /* of scheduler_options */
    uint32_t ttl_s, grace_ms, max_queue_ms;
    struct map by_id; /* the live requests */
    struct list live;
    uint32_t n_live;
    struct map hedges;         /* hedge/hedge.h */
    uint32_t n_seconds;        /* live requests that run beside a first one: no client's request */
    uint64_t n_pending_tokens; /* of prompts of those that wait for the directory: not paid yet */
    uint64_t no_node_since_ms; /* no node lives that could decode for anybody; 0: not now */
    struct list orphans;       /* ended requests that still wait for the directory's answer */
    bool capacity_freed;       /* a placement ended since the last tick */
    uint64_t saved_node;       /* request_place_waiting; 0: none */
    bool leaves; /* the node ends: answers that its clients may resume are not cancelled */
};

/* Looks for trouble now, once the directory has answered or failed to. */
void entry_update_trouble(struct entry *e);

struct request_node {
    uint64_t node; /* 0: none */
    char name[NODE_NAME_MAX];
    char host[NODE_NAME_MAX];
    uint16_t port;
    uint64_t model, model_bits; /* of its record: the fingerprint, view_model_bits */
    enum node_role role;        /* that it had when it was chosen */
    uint32_t n_followers;       /* its ranks besides the first; their addresses are in its record */
    bool keeps;                 /* answers whose entry node is lost */
};

struct request {
    uint64_t id;
    char name[REQUEST_API_NAME_MAX]; /* the client's x-request-id */
    enum request_state state;
    uint32_t attempt;  /* counts from 1 */
    uint32_t n_before; /* output tokens delivered by earlier attempts */
    struct entry *entry;
    struct gen_sink sink;
    /* what the client asked for */
    int32_t *tokens; /* [n_tokens] of cap_tokens: the prompt, then the delivered output */
    uint32_t n_prompt, n_tokens, cap_tokens;
    struct sampling_params sampling; /* bias and allowed are own copies */
    uint64_t cache_salt;
    bool prompt_logprobs;
    uint32_t n_prompt_lp;      /* positions delivered so far, counting from 1 */
    struct buf held, held_end; /* token records and FINISHED that overtook the prompt's logprobs */
    uint64_t deadline_ms;
    bool ends_by_client; /* deadline_ms is its client's, not --scheduler-ttl */
    struct gen_admission wanted;
    struct prefix_state prefix;
    struct gen_resume resume;
    uint64_t *asked; /* [n_asked] ATTACH: nodes that have not refused; NULL: none was asked */
    uint32_t n_asked;
    bool attached;                 /* one of them had kept the answer */
    uint64_t model;                /* of what was delivered: no other may go on; 0: nothing was */
    uint64_t told_node, told_bits; /* by sink.on_node */
    bool has_told;
    /* the current attempt */
    struct request_node prefill, decode;
    bool placed; /* a reservation of this attempt is in the directory */
    /* The directory's answer is awaited and points here: an ended request stays in entry.orphans
     * until it has come. */
    bool placing;
    struct request_node next_prefill, next_decode; /* chosen, while placing */
    /* Its prompt on the node that computes it (admission_fill); node 0: on none, or it has. */
    struct fill_prompt filled;
    bool goes_first;            /* there, by admission_goes_first when the node was chosen */
    struct placement accounted; /* what the view counts for it; request 0: nothing */
    bool waits_for_capacity;    /* PLACING: every node that could take it was full */
    enum finish_reason ends;    /* set by the answer's last token: a later loss ends it well */
    uint64_t gave_back; /* the node that handed it back last: chosen again only when all others are
                         * full; 0: none */
    struct request_node gave_kv; /* the decode node that handed it back last, with the KV of all its
                                  * tokens; the view has no node that leaves; node 0: none */
    uint64_t
        pressed_until_ns; /* its node has taken its blocks, and thinks to have computed it again
                                * by then (clock_ns); 0: it runs */
    uint32_t n_pressed;   /* times that it was handed back for want of blocks (pressure.h) */
    uint64_t avoid[REQUEST_AVOID_MAX];          /* ring: nodes that failed this request */
    uint32_t n_avoid;                           /* ever added */
    struct place_pair apart[REQUEST_AVOID_MAX]; /* the same of pairs */
    uint32_t n_apart;
    uint64_t wait_until_ms;     /* PLACING: do not place before; other states: stuck after */
    uint64_t unplaced_since_ms; /* no node could take it, not even later, since then; 0: not now */
    uint64_t full_since_ms; /* it has found all nodes full, or been refused as busy, since then; 0:
                             * not now. Ends with the first token */
    uint32_t n_moves;
    struct hedge *hedge;        /* NULL: its client wants no second attempt */
    uint64_t t_placed_ms;       /* the attempt began */
    bool is_counted;            /* as split or not, by its first attempt */
    bool canceled;              /* by the API server; the next turn of the loop ends the request */
    struct admit_request admit; /* its place in line; PLACING: it is placed when its turn comes */
    bool shed;                  /* it gave way to another; ends like one that is canceled */
    uint32_t retry_after_s;     /* of a refusal; 0: soon */
    bool takes_others;          /* likewise, as in gen_refusal */
    char retry[GEN_RETRY_MAX];
    /* the trace; clock_ns of this process */
    uint64_t t_accept, t_credit, t_first, t_last;
    struct gen_trace trace;
    struct list link; /* entry.live or .orphans */
};

/* Copies `r` and `sink`; the state is PLACING. */
struct request *request_create(struct entry *e, uint64_t id, const struct gen_request *r,
                               const struct gen_sink *sink);
void request_free(struct request *r);
/* A number that no request has. */
uint64_t request_fresh_id(const struct entry *e);
/* It is live from now on. */
void request_enter(struct entry *e, struct request *r);
/* Clients' requests that are live. */
static inline uint32_t entry_n_requests(const struct entry *e) { return e->n_live - e->n_seconds; }
/* Does what the state needs now. Call it on every tick and snapshot, and after a change. */
void request_advance(struct entry *e, struct request *r);
/* Places those that have had their turn and wait for room, if some was `freed`, until one finds
 * none. For that one the roomiest node is saved from those in line, which would take each block
 * that becomes free before there are enough for a long answer. */
void request_place_waiting(struct entry *e, bool freed);
/* Its next attempts avoid the node (0: none), ... */
void request_avoid(struct request *r, uint64_t node);
/* ... or the pair of this one, but neither node. */
void request_keep_apart(struct request *r);
/* Handles every loss: looks it up in retry.h and acts. The next attempt avoids `culprit` (0:
 * none). */
void request_on_loss(struct entry *e, struct request *r, enum request_loss loss, enum status st,
                     uint64_t culprit, const char *text);
/* Ends the request: tells the nodes, releases the placement, calls on_end and frees r. */
void request_end(struct entry *e, struct request *r, enum status st, enum finish_reason finish,
                 int32_t stop_token, const char *text);

/* The number of a role in messages (node.proto). */
static inline uint32_t request_role_number(enum node_role r) { return 1 + (uint32_t)r; }

/* ---- between the request_*.c files ---- */
static inline uint32_t request_n_out(const struct request *r) { return r->n_tokens - r->n_prompt; }
void request_set_state(struct request *r, enum request_state next);
/* Chooses nodes and asks the directory for them. ERR_BUSY: all are full; ERR_UNAVAILABLE: there is
 * none; ERR_CONFLICT: it may not be computed. It may have ended the request then. */
enum status request_place(struct entry *e, struct request *r);
/* What the client has must be computed again with the same bits: would it be, by all that is
 * known? */
bool request_may_compute(const struct entry *e, const struct request *r);
/* Ends it when it is known that it would not. True: `r` is gone. */
bool request_ends_uncomputed(struct entry *e, struct request *r);
/* All nodes are full, now. Has that been so for max_queue_ms, and the client has no token yet? One
 * that has some was accepted, and waits for its ttl. */
bool request_is_full_for_too_long(const struct entry *e, struct request *r);
void request_end_full(struct entry *e, struct request *r);
/* Is it in line while no node lives, and not for longer than grace_ms? */
bool request_waits_for_nodes(const struct entry *e, const struct request *r);
/* Ends one that is in line while no node can serve anybody. True: `r` is gone. */
bool request_ends_without_nodes(struct entry *e, struct request *r);
/* Have other nodes room for the request to its end, by what they report? Those that it would go on
 * at. */
bool request_find_room(const struct entry *e, const struct request *r,
                       struct place_result *out) MUST_CHECK;
/* Have nodes room for it now that it does not avoid? */
bool request_find_beside(const struct entry *e, const struct request *r,
                         struct place_result *out) MUST_CHECK;
/* Counts the placement in the view and at the directory, whose answer starts the attempt: on these
 * nodes, or with `prefix` maybe on others. */
void request_reserve(struct entry *e, struct request *r, const struct place_result *chosen,
                     const struct prefix_query *prefix);
/* Its prompt was computed: it does not count as one that waits any more. */
void request_note_computed(struct entry *e, struct request *r);
/* Ends the placement at the directory and in the view. */
void request_release_place(struct entry *e, struct request *r);
/* The breakers of the attempt's nodes and pair. */
static inline void request_note(struct entry *e, const struct request *r, enum breaker_event ev)
{
    const struct view_attempt a = { r->id, r->prefill.node, r->decode.node };
    view_note(&e->view, &a, ev);
}
/* Each sends a message of the attempt; false: it could not, and the loss was handled: `r` may be
 * gone. */
bool request_send_ask(struct entry *e, struct request *r);
bool request_send_run(struct entry *e, struct request *r);
bool request_send_reserve(struct entry *e, struct request *r);
bool request_send_prefill(struct entry *e, struct request *r, const Baton__Grant *grant);

#endif
