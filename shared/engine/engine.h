/* engine.h - tokens in, tokens out: the engine thread, its batches, its KV blocks.
 *
 * The engine thread owns the model, the KV pool's counters and the step loop. Other threads post
 * commands to its mailbox, which never block, and get events through `on_event`.
 *   reserve:  RESERVED ── activate ──▶ RUNNING ── tokens ──▶ FINISHED
 *                  └──── cancel ──▶ blocks back (or quarantined until engine_free_quarantined)
 *   submit:   WAITING ─▶ RUNNING (prompt, then tokens) ─▶ FINISHED
 *             WAITING ─▶ LOADING (blocks of the prompt from the tiers) ─▶ RUNNING
 *             RUNNING ─ no blocks ─▶ WAITING (recompute)
 *
 * With drafts a step may yield several tokens of a sequence (draft/draft.h), the same as without.
 * Batch invariance: a row's arithmetic does not depend on the other rows of the batch, and sampling
 * depends only on (seed, index of the token). When blocks run out, the newest running sequence is
 * preempted: its blocks are freed, it goes back to WAITING and its prompt and tokens so far are
 * computed again, which gives the same bits. */
#ifndef BATON_ENGINE_ENGINE_H
#define BATON_ENGINE_ENGINE_H

#include "shared/base/metrics.h"
#include "shared/engine/draft/draft.h"
#include "shared/engine/engine_fault.h"
#include "shared/engine/pace.h"
#include "shared/engine/sampler.h"
#include "shared/kv/kv_pool.h"
#include "shared/kv/tier/kv_store.h"
#include "shared/model/model.h"

/* A sequence is one of:
 *   FULL     engine_submit: prefill and decode run here.
 *   PREFILL  engine_submit with prefill_only: the engine computes the prompt's KV and the first
 *            token, then stops. `on_kv_ready` announces each layer of each chunk, so that its bytes
 *            can leave while the next layer computes.
 *   DECODE   engine_reserve holds blocks, a peer writes the KV into them, engine_activate starts
 *            decoding. */
struct engine;
struct engine_event;
struct engine_group_event;

struct engine_options {
    struct model *model; /* taken: freed by engine_free */
    uint32_t block_tokens;
    uint32_t n_blocks;
    uint32_t max_seqs;           /* sequences in one step */
    uint32_t max_batched_tokens; /* rows in one step */
    uint32_t max_waiting;        /* sequences waiting; more is ERR_FULL */
    bool prefix_cache;
    uint32_t tell_prefill_ms; /* how often a long prefill says how far it is; 0: every 10 s */
    bool eager;               /* launch every kernel one by one: no captured graphs */
    const struct kv_store_options *tiers; /* memories behind the pool; NULL: none. Copied */
    const struct pace_curve *pace; /* a step lasts what this says; NULL: what it takes. Copied */
    const struct engine_fault_plan *fault; /* for tests; NULL: none. Copied */
    const struct draft_config *draft;      /* speculative decoding; NULL: none. Copied; its
                                            * draft_model stays the caller's */
    struct metrics *metrics;               /* borrowed */
    /* Called on the engine thread. It must copy what it keeps and return at once, for example by
     * posting the event to a loop's mailbox. */
    void (*on_event)(void *arg, const struct engine_event *ev);
    /* PREFILL sequences: the KV of `layer` for tokens [begin, end) of sequence `id` is in the pool
     * once the engine's device has reached `event` (device_record_event; 0: it is there already).
     * Called on the engine thread. `blocks` is the sequence's block table, valid during the call;
     * blocks stay held until the sequence is released. Per layer the ranges follow each other from
     * 0 to n_tokens; the range from the prefix cache comes first, right after STARTED. May be
     * NULL. */
    void (*on_kv_ready)(void *arg, uint64_t id, uint32_t layer, uint32_t begin, uint32_t end,
                        const int32_t *blocks, uint64_t event);
    /* The device failed, or another rank of the node was lost, and the engine has stopped. Called
     * on the engine thread. May be NULL on the CPU, which does not fail, of an engine without a
     * node. */
    void (*on_fault)(void *arg, const struct err *err);
    /* The engine is a rank of a group: it steps only in one that it has joined (below). Called on
     * the engine thread, and must return at once. NULL: it steps alone. */
    void (*on_group)(void *arg, const struct engine_group_event *ev);
    /* Of a rank of a tensor-parallel node (below): the other ranks may sleep, call
     * engine_node_bell(step) on them. Called on the engine thread, and must return at once. */
    void (*on_node_bell)(void *arg, uint64_t step);
    bool follows; /* a rank above 0 of a tensor-parallel node */
    void *arg;
};

/* ---- steps of a group: ranks that share the experts of a model (engine_group.c) ----
 * All ranks of a group take every step together, some without rows. When nobody has rows, all sleep
 * until one has: it rings, and its owner passes the bell on to the other ranks' engine_bell. Groups
 * follow each other by epoch; a new one takes over between two steps, or after the old one was
 * lost. Then what the aborted step had computed is computed again. */
enum engine_group_event_kind {
    ENGINE_GROUP_BELL,   /* others may sleep: call engine_bell(epoch, step) on them */
    ENGINE_GROUP_JOINED, /* the engine has met all ranks of `epoch`, and steps with them */
    ENGINE_GROUP_LEFT,   /* as asked; no step until it joins another */
    ENGINE_GROUP_LOST,   /* an exchange failed, why says what; no step until it joins another.
                          * Comes for an epoch that was not joined, too: its ep object is freed */
};
struct engine_group_event {
    enum engine_group_event_kind kind;
    uint64_t epoch, step;
    const struct err *why; /* LOST; valid during the call */
};
/* Of ep_config.collective_bytes, what the agreement on a step takes. */
enum { ENGINE_GROUP_BYTES = 56 };

/* ---- a node of several ranks: they share one attention, by heads (engine_follow.c) ----
 * The first rank leads: its engine has the requests, the pool's counters, the prefix cache and the
 * sampler. The others follow: they compute the steps that it plans, on their shares of the model,
 * and announce the layers of their shares (on_kv_ready, with the leader's ids and block numbers);
 * they take no requests. All ranks need the same limits and n_blocks. Nobody waits for a plan while
 * there is nothing to do: then all sleep, and are rung by the rank that begins (on_node_bell). With
 * a group as well, followers are ranks of it like their leader, and are given it in the same way
 * (engine_join_group, engine_bell, engine_abort_group). A group that is lost in a step is lost for
 * the whole node: no rank keeps what the step computed. A node whose ranks do not all go on is lost
 * as a whole: on every rank on_fault follows, and the engine has to be freed. */

/* Everything about one sequence. Copied by engine_submit / engine_reserve. */
struct engine_request {
    uint64_t id;      /* chosen by the caller, unique among live sequences */
    uint64_t request; /* its number in the cluster, for logs; 0: none */
    const int32_t
        *tokens; /* [n_tokens] prompt, then tokens emitted before the request moved here */
    uint32_t n_tokens;
    uint32_t n_prompt; /* tokens behind these count as output for penalties, indices and limits */
    struct sampling_params sampling;
    uint64_t cache_salt; /* prefix blocks are shared only between equal salts; 0: none */
    bool prefill_only;
    bool goes_first;           /* before those that wait and do not, but for preempted ones */
    bool want_prompt_logprobs; /* per prompt token, with the sampling.n_logprobs best */
    /* If caches and peer have so little of its tokens that more than this would have to be
     * computed before it can start, it ends instead: FINISHED with ERR_NOT_FOUND. 0: any number. */
    uint32_t most_computed;
    /* A peer that is said to have the KV of the first n_peer_tokens; 0: none is. Its blocks are
     * fetched (FETCH) if that is expected to be sooner than computing them. */
    uint64_t peer;
    uint32_t n_peer_tokens;
    uint32_t n_peer_ranks; /* only handed on, with FETCH */
};

enum engine_event_kind {
    ENGINE_TOKEN,          /* one more token of a sequence */
    ENGINE_PROMPT_LOGPROB, /* logprob of one prompt token (index 1 .. n_prompt-1), in order, before
                            * the first TOKEN */
    ENGINE_RESERVED,       /* answer to engine_reserve: blocks are held */
    ENGINE_PREEMPTED, /* an older sequence has taken its blocks: it waits for others, and will be
                            * computed again; it may be canceled meanwhile */
    ENGINE_STARTED,   /* a submitted sequence left the waiting queue for the first time */
    ENGINE_FINISHED,  /* exactly one per sequence unless it was canceled; the sequence holds no
                            * blocks, except prefill_only ones, which hold theirs until
                            * engine_release */
    /* Blocks of a sequence wait for their KV from its peer: engine_fetched has to follow. With
     * FETCH_OFF nobody needs it any more; until engine_fetched they stay as they are. */
    ENGINE_FETCH,
    ENGINE_FETCH_OFF,
    ENGINE_LENT,     /* answer to engine_lend: n_blocks lead blocks of those named are held */
    ENGINE_CANCELED, /* answer to engine_cancel: exactly one per cancel of a live sequence;
                            * nothing follows */
};

/* Where the prompt's cached tokens came from, if not all were in the pool: of the first start. */
struct engine_cache_use {
    uint32_t n_from[KV_TIER_KINDS]; /* tokens */
    uint64_t load_ns;               /* that the sequence waited for them */
    /* What was expected of bringing them and of computing them; both also when that was chosen.
     * 0: no tier had any, or it was not measured yet. */
    uint32_t load_us, compute_us;
};

struct engine_event {
    enum engine_event_kind kind;
    uint64_t id;
    enum status status;        /* RESERVED, FINISHED: OK, ERR_BUSY (no blocks), ERR_TOO_LONG, ...
                                * FINISHED: ERR_NOT_FOUND (engine_request.most_computed) */
    enum finish_reason finish; /* FINISHED */
    int32_t stop_token;        /* FINISH_STOP: the token that ended it, sent as a TOKEN; else -1 */
    uint32_t index;            /* TOKEN: 0-based output index; PROMPT_LOGPROB: prompt position */
    struct token_logprobs lp;  /* TOKEN, PROMPT_LOGPROB: lp.id always, logprobs when asked for */
    uint32_t n_cached; /* RESERVED, STARTED, FINISHED: prompt tokens from the prefix cache */
    struct engine_cache_use cache; /* STARTED, FINISHED: of n_cached */
    uint32_t n_blocks;             /* RESERVED: blocks for the whole prompt. FETCH, LENT */
    const struct hash128 *keys;    /* FETCH: [n_blocks] of the blocks, valid during the callback */
    uint64_t peer;                 /* FETCH, its ranks, and how long at most it is worth waiting */
    uint32_t n_peer_ranks, patience_ms;
    /* RESERVED, FETCH, LENT: [n_blocks], valid during the callback. Of RESERVED the first
     * n_cached / block_tokens of them hold their KV already and must not be written. */
    const int32_t *blocks;
    /* FINISHED: time in each stage. For a reservation queue_ns ends with engine_activate and
     * prefill_ns is 0. */
    uint64_t queue_ns, prefill_ns, decode_ns;
    uint32_t n_tokens;   /* PREEMPTED: to be computed again, if the prefix cache has none of them */
    uint32_t wait_steps; /* PREEMPTED: until there are blocks for it, at most (block_wait.h) */
    uint32_t n_recomputed; /* FINISHED: transferred prompt positions computed again here */
    /* FINISHED: times that drafts were verified here, these drafts, and those that were right. */
    uint32_t n_verified, n_drafted, n_accepted;
    /* TOKEN of a prefill_only sequence, with a draft layer: the hidden state [n_hidden] of the last
     * prompt token, for engine_activate. Valid during the callback; NULL: none. */
    const float *hidden;
    uint32_t n_hidden;
};

/* Upper bound of attention sequences in a step: the prompt tokens and the generated tokens of a
 * sequence count as two. */
static inline uint32_t engine_max_attn_seqs(uint32_t max_seqs) { return 2 * max_seqs; }
enum { ENGINE_LOGITS_MIN = 256 };
/* Upper bound of the rows of a step that need logits: model_options.max_logits. */
static inline uint32_t engine_max_logits(uint32_t max_seqs)
{
    return max_seqs > ENGINE_LOGITS_MIN ? max_seqs : ENGINE_LOGITS_MIN;
}

/* Creates an engine and starts its thread. On failure the caller still owns the model. */
enum status engine_create(const struct engine_options *o, struct engine **out,
                          struct err *err) MUST_CHECK;
/* Stops after the step in flight and joins the thread: callbacks end, commands fail with
 * ERR_CANCELED, the KV pool's memory stays. Stop other users of that memory (kvtransfer) after this
 * and before engine_free. */
void engine_stop(struct engine *e);
/* Calls engine_stop if need be, ends every sequence without events and frees everything. */
void engine_free(struct engine *e);

/* Commands: any thread, never block. ERR_FULL: too many waiting. ERR_TOO_LONG: more tokens than the
 * context or the pool holds. */
enum status engine_submit(struct engine *e, const struct engine_request *r) MUST_CHECK;
/* Holds blocks for the prompt (prefix cache first). ENGINE_RESERVED answers without waiting: its
 * status is ERR_BUSY when there are no blocks. */
enum status engine_reserve(struct engine *e, const struct engine_request *r) MUST_CHECK;
/* The KV of every prompt token is in the reserved blocks; `first` is output token number n_tokens -
 * n_prompt, sampled by the prefill node (it is emitted as a TOKEN by this engine as well, with the
 * logprobs given). Decoding goes on after it. hidden [n_hidden] is what the TOKEN came with there
 * (copied); NULL: the sender has no draft layer, and the sequence gets no drafts of one. */
enum status engine_activate(struct engine *e, uint64_t id, const struct token_logprobs *first,
                            const float *hidden, uint32_t n_hidden) MUST_CHECK;
/* Ends a sequence. fenced: no peer can write to its blocks any more (always true for FULL and
 * PREFILL, and after engine_activate). Otherwise its blocks go to quarantine until
 * engine_free_quarantined(id); the id stays in use until then. Unknown ids are ignored (no event).
 * */
enum status engine_cancel(struct engine *e, uint64_t id, bool fenced) MUST_CHECK;
/* Asks the engine to free the quarantined blocks of canceled sequence `id`: no peer can write to
 * them any more. */
enum status engine_free_quarantined(struct engine *e, uint64_t id) MUST_CHECK;
/* Releases the blocks of a finished prefill_only sequence once its KV is sent (the prefix cache
 * may keep them). Every finished prefill_only sequence needs this or engine_cancel, also with
 * max_tokens 0. */
enum status engine_release(struct engine *e, uint64_t id) MUST_CHECK;

/* The fetch of a sequence is over: the first n_good of its blocks hold what their keys say, and
 * nobody writes to any of them any more. */
enum status engine_fetched(struct engine *e, uint64_t id, uint32_t n_good) MUST_CHECK;
/* The fetch of a sequence brings nothing any more, but a peer that hangs may still write: the
 * sequence goes on with other blocks if there are as many. Those that the peer may write to stay in
 * quarantine until engine_fetched, which has to follow. May be called again; of a sequence that has
 * gone on it does nothing. */
enum status engine_fetch_hangs(struct engine *e, uint64_t id) MUST_CHECK;
/* Holds the blocks with these keys, from the first on as many as pool and tiers have, for a peer to
 * read: ENGINE_LENT answers, once they are in the pool. Until engine_release or engine_cancel. */
enum status engine_lend(struct engine *e, uint64_t id, const struct hash128 *keys,
                        uint32_t n) MUST_CHECK;

/* Takes over `ep`, and the experts that its placement gives this rank (model_experts_take of
 * engine_model; NULL: those of the model's share), as the group of `epoch`: at once if the engine
 * is in none, otherwise between two steps, once every rank of the group that it is in was given one
 * of this epoch. `ep` NULL: it leaves then. Takes both unless it fails. LOST, not JOINED, comes for
 * an epoch that is not later than the last. Any thread. */
enum status engine_join_group(struct engine *e, struct ep *ep, struct model_experts *experts,
                              uint64_t epoch) MUST_CHECK;
/* A rank of the group begins this step. Bells of steps that are over, or of other epochs, do
 * nothing. Any thread. */
void engine_bell(struct engine *e, uint64_t epoch, uint64_t step);
/* The group of `epoch` has lost a rank: ends its running exchange here and on the other ranks, at
 * once; LOST follows, also if the engine joins it only later, and for a group that waits for the
 * one before, which goes on. Other epochs: nothing. Any thread. */
void engine_abort_group(struct engine *e, uint64_t epoch);

/* Of the ep object of the node's ranks, mode, collective_bytes and progress, with n_logical 0; the
 * other members are left as they are. Returns the collective_bytes of its words, which a GPU's
 * needs. */
size_t engine_node_needs(const struct engine *e, struct ep_config *c);
/* Takes over the ep object of the node's ranks unless it fails. Once, before the first step. Any
 * thread. */
enum status engine_set_node(struct engine *e, struct ep *ep) MUST_CHECK;
/* A rank of the node begins this step. Late bells do nothing. Any thread. */
void engine_node_bell(struct engine *e, uint64_t step);
/* A rank of the node was lost: ends the running step here and on the other ranks that take part in
 * it, at once; on_fault follows, also if all sleep. Any thread. */
void engine_abort_node(struct engine *e);

/* Facts and load; any thread (atomics). */
struct engine_stats {
    uint32_t n_running, n_waiting, n_reserved; /* running: or loading */
    uint32_t n_blocks, n_blocks_free;          /* free: free or evictable */
    uint64_t progress; /* published with the lease; advances with every slice of a
                                       * kernel, so that a long prefill chunk on a slow machine does
                                       * not look like a hang */
    uint64_t n_steps;
    const char *ep_backend;  /* of the group that it steps in; NULL: of none */
    uint64_t sent, received; /* bytes of rows and results, by the groups it was in (ep_traffic) */
    uint64_t waiting_tokens; /* prompt tokens not yet computed */
    /* As measured of late, 0: not yet (engine_speed.h). Tokens of prompts per second, as a backlog
     * of them gets; microseconds of a step that decodes. */
    uint32_t prefill_tokens_per_s, step_us;
    bool has_work;
};
void engine_get_stats(const struct engine *e, struct engine_stats *out);
/* A rank of the group, while this one was in it too; all grow. */
struct engine_rank {
    uint64_t rows;    /* that its experts computed, for all ranks */
    uint64_t wait_us; /* that it waited for the others */
    uint64_t late_us; /* that this rank waited for it: how much longer than it did, in the steps in
                       * which it waited least, since the others waited for it */
};
/* out [n], ranks 0 .. n - 1, of an engine with on_group. Any thread. */
void engine_get_ranks(const struct engine *e, uint32_t n, struct engine_rank *out);
const struct kv_layout *engine_kv_layout(const struct engine *e);
/* model_ep_needs, and routed experts, of the engine's model. */
void engine_ep_needs(const struct engine *e, struct ep_config *c);
/* For what may be asked of it while it steps: its configuration, and experts.h. */
struct model *engine_model(const struct engine *e);
/* The pool's memory, for registration with kvtransfer. */
const struct dev_mem *engine_kv_memory(const struct engine *e);
/* The device that the engine computes on and that the KV memory belongs to. The model owns it. */
struct device *engine_device(const struct engine *e);

#endif
