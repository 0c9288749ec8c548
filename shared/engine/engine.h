/* engine.h - tokens in, tokens out: the engine thread, its batches, its KV blocks.
 *
 * The engine owns the model, the KV pool's counters and the step loop on a thread of its own.
 * Everyone else talks to it by commands (posted to its mailbox, never blocking) and hears from it
 * through one callback, `on_event`, called on the engine thread, which must only pass the event on
 * (a mailbox of the loop). It knows no network and no text.
 *
 * A sequence is one of:
 *   FULL     prefill here, decode here                       engine_submit
 *   PREFILL  compute the prompt's KV and the first token, then stop; each layer of each chunk is
 *            announced through `on_kv_ready` so that its bytes can leave while the next layer
 *            computes engine_submit (prefill_only)
 *   DECODE   blocks reserved first (engine_reserve); a peer writes the KV into them;
 *            engine_activate starts decoding
 *
 *   reserve:  RESERVED ── activate ──▶ RUNNING ── tokens ──▶ FINISHED
 *                  └──── cancel ──▶ blocks back (or quarantined until engine_fence)
 *   submit:   WAITING ─▶ PREFILLING ─▶ RUNNING ─▶ FINISHED      RUNNING ─ no blocks ─▶ WAITING (recompute)
 *
 * A row's arithmetic never depends on the rest of the batch; sampling depends only on (seed, index
 * of the token). When blocks run out the newest running sequence is preempted: its blocks are
 * freed, it goes back to WAITING and its prompt plus its tokens so far are computed again, which
 * gives the same bits. */
#ifndef BATON_ENGINE_ENGINE_H
#define BATON_ENGINE_ENGINE_H

#include "shared/base/metrics.h"
#include "shared/engine/sampler.h"
#include "shared/kv/kv_pool.h"
#include "shared/model/model.h"

struct engine;
struct engine_event;

struct engine_options {
    struct model *model; /* taken: freed by engine_free */
    uint32_t block_tokens;
    uint32_t n_blocks;
    uint32_t max_seqs;           /* sequences in one step */
    uint32_t max_batched_tokens; /* rows in one step */
    uint32_t max_waiting;        /* sequences waiting; more is ERR_FULL */
    bool prefix_cache;
    bool eager;              /* launch every step's kernels one by one: no recorded
                              * steps */
    struct metrics *metrics; /* borrowed */
    /* engine thread; must copy what it keeps and return at once */
    void (*on_event)(void *arg, const struct engine_event *ev);
    /* PREFILL sequences: `layer` of tokens [begin, end) of sequence `id` is in the pool when the
     * engine's device has come to `event` (device_record_event; 0: it is there). engine thread.
     * `blocks` is the sequence's block table, valid during the call; blocks stay held until the
     * sequence is released. Per layer the ranges follow each other from 0 to n_tokens; what the
     * prefix cache had comes first, right after STARTED. May be NULL. */
    void (*on_kv_ready)(void *arg, uint64_t id, uint32_t layer, uint32_t begin, uint32_t end,
                        const int32_t *blocks, uint64_t event);
    /* The device failed and computes nothing more: the engine has stopped. engine thread. May be
     * NULL on the processor, which does not fail. */
    void (*on_fault)(void *arg, const struct err *err);
    void *arg;
};

/* Everything about one sequence. Copied by engine_submit / engine_reserve. */
struct engine_request {
    uint64_t id;           /* chosen by the caller, unique among live sequences */
    const int32_t *tokens; /* [n_tokens] prompt, then answer tokens already given out
                            * (a moved request) */
    uint32_t n_tokens;
    uint32_t n_prompt; /* of n_tokens; the rest counts as output for penalties,
                        * indices and limits */
    struct sampling_params sampling;
    uint64_t cache_salt; /* prefix blocks are shared only between equal salts; 0:
                          * none */
    bool prefill_only;
    bool want_prompt_logprobs; /* per prompt token, with sampling.n_logprobs
                                * best */
};

enum engine_event_kind {
    ENGINE_TOKEN,          /* one more token of a sequence */
    ENGINE_PROMPT_LOGPROB, /* logprob of one prompt token (index 1 .. n_prompt-1), in order, before
                            * the first TOKEN */
    ENGINE_RESERVED,       /* answer to engine_reserve: blocks are held */
    ENGINE_STARTED,        /* a submitted sequence left the waiting queue for the first time */
    ENGINE_FINISHED,       /* exactly one per sequence unless it was canceled; the sequence holds no
                            * blocks, except prefill_only ones, which hold theirs until
                            * engine_release */
    ENGINE_CANCELED,       /* answer to engine_cancel: exactly one per cancel of a live sequence;
                            * nothing follows */
};

struct engine_event {
    enum engine_event_kind kind;
    uint64_t id;
    enum status status;        /* RESERVED, FINISHED: OK or why not (ERR_BUSY: no blocks,
                                * ERR_TOO_LONG ...) */
    enum finish_reason finish; /* FINISHED */
    int32_t stop_token;        /* FINISH_STOP: the token that ended it (it was sent as a
                                * TOKEN); else -1 */
    uint32_t index;            /* TOKEN: 0-based among output tokens; PROMPT_LOGPROB:
                                * prompt position */
    struct token_logprobs lp;  /* TOKEN, PROMPT_LOGPROB; lp.id is always set, logprobs
                                * when asked for */
    uint32_t n_cached;         /* RESERVED, FINISHED, STARTED: prompt tokens found in the
                                * prefix cache */
    uint32_t n_blocks;         /* RESERVED: blocks for the whole prompt */
    const int32_t *blocks;     /* RESERVED: [n_blocks], valid during the callback; the
                                * first n_cached/block_tokens already hold their KV and
                                * must not be written */
    uint64_t queue_ns, prefill_ns, decode_ns; /* FINISHED: time in each stage; for a
                                               * reservation queue_ns ends with
                                               * engine_activate and prefill_ns is
                                               * 0 */
    uint32_t n_recomputed; /* FINISHED: prompt positions computed here although they
                            * had been transferred */
};

/* Sequences of attention in a step at most: a sequence's prompt tokens and its generated ones count
 * as two. */
static inline uint32_t engine_max_attn_seqs(uint32_t max_seqs) { return 2 * max_seqs; }
enum { ENGINE_LOGITS_MIN = 256 };
/* Rows of a step whose logits can be wanted at most: model_options.max_logits. */
static inline uint32_t engine_max_logits(uint32_t max_seqs)
{
    return max_seqs > ENGINE_LOGITS_MIN ? max_seqs : ENGINE_LOGITS_MIN;
}

/* `out` runs at once. On failure the model stays the caller's. */
enum status engine_create(const struct engine_options *o, struct engine **out,
                          struct err *err) MUST_CHECK;
/* Stop after the running step and join the thread: no callback comes any more, commands fail with
 * ERR_CANCELED, the KV pool's memory stays. Whoever else touches that memory (kvtransfer) is
 * stopped after this and before engine_free. */
void engine_stop(struct engine *e);
/* engine_stop unless it was called, then end every sequence silently and free everything. */
void engine_free(struct engine *e);

/* Commands: any thread, never block. ERR_FULL: too many waiting. ERR_TOO_LONG: more tokens than the
 * context or the pool holds. */
enum status engine_submit(struct engine *e, const struct engine_request *r) MUST_CHECK;
/* Hold blocks for the prompt (prefix cache first); ENGINE_RESERVED follows. Nothing waits: no
 * blocks is ERR_BUSY at once. */
enum status engine_reserve(struct engine *e, const struct engine_request *r) MUST_CHECK;
/* The KV of every prompt token is in the reserved blocks; `first` is output token number n_tokens -
 * n_prompt, sampled by the prefill node (it is emitted as a TOKEN by this engine as well, with the
 * logprobs given). Decoding goes on after it. */
enum status engine_activate(struct engine *e, uint64_t id,
                            const struct token_logprobs *first) MUST_CHECK;
/* End a sequence. fenced: no peer can write to its blocks any more (always true for FULL and
 * PREFILL, and after engine_activate). Otherwise its blocks go to quarantine until
 * engine_fence(id); the id stays in use until then. Unknown ids are ignored (no event). */
enum status engine_cancel(struct engine *e, uint64_t id, bool fenced) MUST_CHECK;
/* A peer's writes to the blocks of canceled sequence `id` are over: quarantine → free. */
enum status engine_fence(struct engine *e, uint64_t id) MUST_CHECK;
/* A finished prefill_only sequence's KV has left: its blocks may be reused (or stay in the prefix
 * cache). Every finished prefill_only sequence needs this (or engine_cancel), with max_tokens 0
 * too. */
enum status engine_release(struct engine *e, uint64_t id) MUST_CHECK;

/* Facts and load; any thread (atomics). */
struct engine_stats {
    uint32_t n_running, n_waiting, n_reserved;
    uint32_t n_blocks, n_blocks_free; /* free: free or evictable */
    uint64_t n_steps;                 /* what leases carry as progress: changes with every slice of
                                       * every kernel, so that a long prefill chunk on a slow
                                       * machine does not look like a hang */
    uint64_t waiting_tokens;          /* prompt tokens not yet computed */
    bool has_work;
};
void engine_get_stats(const struct engine *e, struct engine_stats *out);
const struct kv_layout *engine_kv_layout(const struct engine *e);
/* The pool's memory, for registration with kvtransfer. */
const struct dev_mem *engine_kv_memory(const struct engine *e);
/* The device it computes on, whose memory that is; the model's. */
struct device *engine_device(const struct engine *e);

#endif
