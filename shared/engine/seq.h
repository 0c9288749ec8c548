/* seq.h - a sequence: its tokens, its KV blocks and where it stands.
 *
 *   WAITING ──admit──▶ RUNNING ──▶ (gone)        RUNNING ── no blocks ──▶ WAITING
 *   RESERVED ──activate──▶ RUNNING               RUNNING, prefill_only ── done ──▶ HELD ── release ──▶ (gone)
 *   RESERVED ──cancel, unfenced──▶ QUARANTINED ── fence ──▶ (gone)
 *
 * Lengths: tokens[0..n_tokens) are known; positions [0, n_computed) have their KV in the blocks.
 * The last token sampled is known but not computed, so a decoding sequence has n_tokens ==
 * n_computed + 1, and a step computes the pending tokens, one or many. The row of the last known
 * token gives the logits of the next one. Where the device chooses tokens, steps run ahead of what
 * the host knows: n_future tokens behind tokens[] are chosen by steps under way, and positions
 * count as computed once a step has them. Owner: whoever created it (any thread) until it is posted
 * to the engine; the engine thread from then on. */
#ifndef BATON_ENGINE_SEQ_H
#define BATON_ENGINE_SEQ_H

#include "shared/base/list.h"
#include "shared/engine/engine.h"

enum seq_state { SEQ_WAITING, SEQ_RUNNING, SEQ_RESERVED, SEQ_HELD, SEQ_QUARANTINED };

struct seq {
    struct list node; /* in the engine's waiting or running list, else alone */
    uint64_t id;
    enum seq_state state;
    uint64_t order; /* of arrival: the largest one is the newest */
    struct sampling_params sampling;
    struct logit_bias *bias;
    uint64_t *allowed;
    bool prefill_only;

    int32_t *tokens; /* [n_limit] */
    uint32_t n_tokens, n_prompt, n_computed;
    uint32_t n_future;   /* tokens that steps under way choose: 0 to 2 */
    uint32_t future_row; /* of the last such step's rows of logits: which one chooses it */
    uint32_t n_limit;    /* tokens that end the sequence: max_tokens, the context or the pool */
    uint32_t lp_next;    /* next prompt position whose logprob is owed; n_prompt: none */

    int32_t *blocks; /* [cap_blocks] */
    uint32_t n_blocks, cap_blocks;
    uint32_t n_shared;      /* leading blocks taken from the prefix cache: nobody may write
                             * them */
    uint32_t n_published;   /* leading blocks offered to the prefix cache */
    struct hash128 *hashes; /* [cap_blocks] of full blocks; n_hashed are known */
    uint32_t n_hashed;
    struct hash128 seed;
    bool two_attention_paths; /* the model's: names of blocks say which tokens were
                               * generated */

    bool started;                  /* left the waiting queue once */
    bool in_step;                  /* chosen for the step being built */
    uint32_t n_cached;             /* tokens found in the prefix cache at the first start or at the
                                    * reservation */
    uint32_t xfer_begin, xfer_end; /* positions that a peer wrote; empty when none did */
    uint32_t n_recomputed;
    uint32_t n_remaining;                         /* what it adds to the engine's waiting_tokens */
    uint64_t t_submit_ns, t_start_ns, t_first_ns; /* 0: not yet */
};

/* What a sequence is checked against and sized by. */
struct seq_limits {
    uint32_t n_vocab, max_len /* tokens of prompt and answer */, block_tokens;
    uint64_t model_fingerprint;
    bool two_attention_paths; /* struct model */
};

/* Copy and check a request. ERR_TOO_LONG: no room for one token more (for none with max_tokens 0);
 * ERR_INVALID: empty, an id outside the vocabulary; ERR_NOMEM. */
enum status seq_create(const struct engine_request *r, const struct seq_limits *l,
                       struct seq **out) MUST_CHECK;
void seq_free(struct seq *s); /* holds no blocks any more */

uint32_t seq_n_out(const struct seq *s);     /* output tokens so far */
uint32_t seq_n_pending(const struct seq *s); /* tokens whose KV is neither in the blocks nor on
                                              * its way there */
bool seq_wants_token(const struct seq *s);   /* the limit leaves room for one more behind those
                                              * under way */
bool seq_is_full(const struct seq *s);       /* it does not for one behind those known */
bool seq_has_work(const struct seq *s);      /* a step can compute something of it */
uint32_t seq_blocks_for(uint32_t n_tokens, uint32_t block_tokens);

/* Would seq_take_blocks find enough? */
bool seq_fits(struct seq *s, struct kv_pool *pool, uint32_t block_tokens, uint32_t n_blocks);
/* Take what the prefix cache has (at most n_tokens - 1 tokens, as one must be computed), then
 * blocks up to `n_blocks`; all or ERR_BUSY. The sequence holds none before. */
enum status seq_take_blocks(struct seq *s, struct kv_pool *pool, uint32_t block_tokens,
                            uint32_t n_blocks) MUST_CHECK;
/* One block more. */
enum status seq_grow(struct seq *s, struct kv_pool *pool) MUST_CHECK;
/* Give all blocks back, last first, so that the cache evicts a prefix from its end. */
void seq_drop_blocks(struct seq *s, struct kv_pool *pool);
/* The same for a reservation whose writer may not have stopped: what it could write goes to
 * quarantine, and stays in `blocks` for seq_fence_blocks. */
void seq_quarantine_blocks(struct seq *s, struct kv_pool *pool);
void seq_fence_blocks(struct seq *s, struct kv_pool *pool);
/* Offer the full blocks whose tokens are computed and known to the prefix cache. */
void seq_publish_blocks(struct seq *s, struct kv_pool *pool, uint32_t block_tokens);

#endif
