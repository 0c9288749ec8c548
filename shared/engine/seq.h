/* seq.h - a sequence: its tokens, its KV blocks and its state.
 *
 *   WAITING ──admit──▶ RUNNING ──▶ (gone)        RUNNING, LOADING ── no blocks ──▶ WAITING
 *   WAITING ──admit──▶ LOADING ── loaded, or soon ──▶ RUNNING
 *   RESERVED ──activate──▶ RUNNING
 *   RUNNING, prefill_only ── done ──▶ AWAITING_RELEASE ── release ──▶ (gone)
 *   RESERVED ──cancel, unfenced──▶ QUARANTINED ── fence ──▶ (gone)
 *
 * Lengths: tokens[0..n_tokens) are known; positions [0, n_computed) have their KV in the blocks.
 * The last token sampled is known but not computed, so a decoding sequence has n_tokens ==
 * n_computed + 1. A step computes one or more pending tokens; the row of the last known token gives
 * the next token's logits. With sampling on the device, steps in flight choose n_future more tokens
 * that the host does not know yet, and positions count as computed once a step includes them.
 * Behind the known tokens may lie drafts, for one step with a row for each: those that it does not
 * choose are as if never computed. Thread: the creating one until it is posted to the engine's. */
#ifndef BATON_ENGINE_SEQ_H
#define BATON_ENGINE_SEQ_H

#include "shared/base/list.h"
#include "shared/engine/draft/draft_control.h"
#include "shared/engine/engine.h"

enum seq_state {
    SEQ_WAITING,
    SEQ_LOADING, /* holds its blocks; some of them are brought from a tier */
    SEQ_RUNNING,
    SEQ_RESERVED,
    SEQ_AWAITING_RELEASE,
    SEQ_QUARANTINED
};

/* What a peer brings. */
struct seq_fetch {
    uint64_t peer; /* of the request; 0: none */
    uint32_t n_peer_tokens, n_peer_ranks;
    bool runs;         /* nobody else may use blocks [first, first + n) */
    uint32_t first, n; /* in the sequence's blocks */
    uint32_t n_good;   /* once it does not run */
    uint64_t begin_ns;
};

/* What host memory keeps of a preempted sequence, but for what the prefix cache would. */
struct seq_swap {
    uint32_t n_tokens;   /* computed before; 0: nothing is kept */
    struct hash128 tail; /* key of the block that is not full; if there is one */
    bool is_loading;     /* the load brings it, too */
};

/* A load of which the first step uses each layer as it comes. */
struct seq_stream {
    bool runs, failed;
    bool is_first;      /* it starts with it for the first time */
    uint32_t from;      /* tokens that it had before */
    uint64_t before_ns; /* that it waited before it started */
    uint64_t step_ns;   /* that a step has waited for it */
};

struct seq {
    struct list node;     /* in the engine's waiting, loading or running list, else alone */
    uint64_t id, request; /* request: for logs */
    enum seq_state state;
    uint64_t order; /* of arrival: the largest one is the newest */
    struct sampling_params sampling;
    struct logit_bias *bias;
    uint64_t *allowed;
    bool prefill_only, goes_first;
    uint32_t most_computed; /* of the request */

    int32_t *tokens; /* [n_tokens_max] */
    uint32_t n_tokens, n_prompt, n_computed;
    uint32_t n_future;   /* tokens that steps in flight choose at least: 0 to 2 */
    uint32_t n_maybe;    /* and, of drafts that they verify, at most so many more */
    uint32_t future_row; /* logits row of the last such step that chooses the first of its tokens */
    uint32_t n_tokens_max; /* length that ends the sequence: max_tokens, the context or the pool */
    uint32_t lp_next;      /* next prompt position whose logprob is to be emitted; n_prompt: none */

    int32_t *blocks; /* [cap_blocks] */
    uint32_t n_blocks, cap_blocks;
    uint32_t n_shared;      /* leading blocks from the prefix cache: read-only */
    uint32_t n_published;   /* leading blocks offered to the prefix cache */
    struct hash128 *hashes; /* [cap_blocks] keys of full blocks; n_hashed are known */
    uint32_t n_hashed;
    struct hash128 seed;
    bool two_attention_paths; /* the model's: keys include where generated tokens begin */

    struct draft_seq *draft;      /* the drafter's; NULL: it was not asked yet */
    struct draft_rate draft_rate; /* of its drafts */
    uint32_t n_draft;             /* drafts behind the known tokens, of the step being built */
    uint32_t draft_level;         /* of these */
    int32_t draft_ids[DRAFT_TOKENS_MAX]; /* n_draft of them, with n_future: as ids of a step */
    uint32_t n_verified, n_drafted, n_accepted;
    float *hidden; /* of position hidden_at, the last that a peer computed; NULL: none, or used */
    uint32_t hidden_at;
    bool lacks_draft_kv; /* a peer without a draft layer wrote its KV */

    struct kv_load *load; /* LOADING, or RUNNING while it streams: until it is over */
    struct seq_stream stream;
    struct seq_swap swap;
    struct seq_fetch fetch;
    bool lends;                    /* it has no tokens: it holds blocks for a peer (engine_lend) */
    struct engine_cache_use cache; /* of the first start */

    bool started;                  /* left the waiting queue once */
    bool in_step;                  /* chosen for the step being built */
    bool preempted;                /* by that step; ENGINE_PREEMPTED is to come */
    uint32_t n_cached;             /* prefix cache tokens at the first start or reservation */
    uint32_t xfer_begin, xfer_end; /* positions that a peer wrote; empty when there was no peer */
    uint32_t n_recomputed;
    uint32_t n_remaining;                         /* its share of the engine's waiting_tokens */
    uint64_t t_submit_ns, t_start_ns, t_first_ns; /* 0: not yet */
    uint64_t t_told_ns;                           /* when it was logged how far a long prefill is */
    /* Of computing since the last start, after a preemption the later one: when it began, and the
     * tokens whose KV the cache had then. */
    uint64_t t_computes_ns;
    uint32_t n_taken;
};

/* Limits that seq_create checks a request against and sizes the sequence by. */
struct seq_limits {
    uint32_t n_vocab, max_len /* tokens of prompt and answer */, block_tokens;
    uint64_t model_fingerprint;
    bool two_attention_paths; /* struct model */
};

/* Checks and copies a request. ERR_TOO_LONG: the prompt leaves no room for a token (with max_tokens
 * 0: does not fit). ERR_INVALID: it is empty or an id is outside the vocabulary. ERR_NOMEM. */
enum status seq_create(const struct engine_request *r, const struct seq_limits *l,
                       struct seq **out) MUST_CHECK;
void seq_free(struct seq *s); /* must hold no blocks */

/* One that only holds blocks with these keys. ERR_NOMEM. */
enum status seq_create_lent(uint64_t id, const struct hash128 *keys, uint32_t n,
                            struct seq **out) MUST_CHECK;

uint32_t seq_n_out(const struct seq *s);     /* output tokens so far */
uint32_t seq_n_pending(const struct seq *s); /* tokens whose KV no step has computed or includes */
bool seq_wants_token(const struct seq *s);   /* room for one token behind the future ones */
bool seq_is_full(const struct seq *s);       /* no room for one token behind the known ones */
bool seq_has_work(const struct seq *s);      /* a step can compute something for it */
uint32_t seq_blocks_for(uint32_t n_tokens, uint32_t block_tokens);
/* Would it have to compute more than most_computed, even with n_coming tokens more? */
bool seq_lacks_prompt(const struct seq *s, uint32_t n_coming);

/* Lead blocks that caches may have: at most n_tokens - 1 tokens, as one must be computed, and none
 * while prompt logprobs are still to be emitted, which need the logits of all positions. Their keys
 * are in s->hashes then. */
uint32_t seq_n_cacheable(struct seq *s, uint32_t block_tokens);
/* Computes the keys of its first n_full blocks, which are full. */
void seq_hash_blocks(struct seq *s, uint32_t block_tokens, uint32_t n_full);
/* Would seq_take_blocks find enough blocks? */
bool seq_fits(struct seq *s, struct kv_pool *pool, uint32_t block_tokens, uint32_t n_blocks);
/* Returns how many blocks seq_take_blocks would not find. */
uint32_t seq_n_lacking(struct seq *s, struct kv_pool *pool, uint32_t block_tokens,
                       uint32_t n_blocks);
/* Takes blocks from the prefix cache (of seq_n_cacheable), then free ones up to `n_blocks`; all or
 * ERR_BUSY. The sequence must hold none. */
enum status seq_take_blocks(struct seq *s, struct kv_pool *pool, uint32_t block_tokens,
                            uint32_t n_blocks) MUST_CHECK;
/* Takes one more block. */
enum status seq_grow(struct seq *s, struct kv_pool *pool) MUST_CHECK;
/* Gives back those behind the block of the next position; none while a step in flight chooses
 * tokens of it, which may write there. */
void seq_trim(struct seq *s, struct kv_pool *pool, uint32_t block_tokens);
/* Gives all blocks back, last first, so that the cache evicts a prefix from its end. */
void seq_drop_blocks(struct seq *s, struct kv_pool *pool);
/* The same for a reservation that a peer may still write to: the blocks it could write go to
 * quarantine and stay in `blocks` for seq_free_quarantined_blocks. */
void seq_quarantine_blocks(struct seq *s, struct kv_pool *pool);
void seq_free_quarantined_blocks(struct seq *s, struct kv_pool *pool);
/* Offers the full blocks of known tokens to the prefix cache, of the first n_complete, which a step
 * that came to its end has computed: later ones may be in flight. */
void seq_publish_blocks(struct seq *s, struct kv_pool *pool, uint32_t block_tokens,
                        uint32_t n_complete);

#endif
