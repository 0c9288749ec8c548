/* seq.c - makes a sequence of a request; takes and returns its KV blocks.
 *
 * Thread: as seq.h. */
#include "shared/engine/seq.h"

#include <string.h>

#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/mem.h"
#include "shared/kv/kv_prefix.h"

uint32_t seq_n_out(const struct seq *s) { return s->n_tokens - s->n_prompt; }

uint32_t seq_n_pending(const struct seq *s) { return s->n_tokens + s->n_future - s->n_computed; }

bool seq_wants_token(const struct seq *s) { return s->n_tokens + s->n_future < s->n_tokens_max; }

bool seq_is_full(const struct seq *s) { return s->n_tokens >= s->n_tokens_max; }

bool seq_has_work(const struct seq *s)
{
    /* its last token is not computed */
    return seq_n_pending(s) > 0 && (s->n_future == 0 || seq_wants_token(s));
}

bool seq_lacks_prompt(const struct seq *s, uint32_t n_coming)
{
    const uint64_t n = (uint64_t)s->n_computed + n_coming + s->most_computed;
    return s->most_computed > 0 && s->n_tokens > n;
}

uint32_t seq_blocks_for(uint32_t n_tokens, uint32_t block_tokens)
{
    return n_tokens / block_tokens + (n_tokens % block_tokens != 0);
}

static enum status check_request(const struct engine_request *r, const struct seq_limits *l)
{
    const struct sampling_params *p = &r->sampling;
    if (!r->tokens || r->n_prompt == 0 || r->n_prompt > r->n_tokens) return ERR_INVALID;
    if (p->n_stop_ids > SAMPLER_STOP_IDS_MAX || p->n_bias > SAMPLER_BIAS_MAX ||
        p->n_logprobs > SAMPLER_LOGPROBS_MAX)
        return ERR_INVALID;
    if (r->n_tokens > l->max_len) return ERR_TOO_LONG;
    if (r->n_tokens == l->max_len && p->max_tokens > r->n_tokens - r->n_prompt) return ERR_TOO_LONG;
    for (uint32_t i = 0; i < r->n_tokens; i++)
        if (r->tokens[i] < 0 || (uint32_t)r->tokens[i] >= l->n_vocab) return ERR_INVALID;
    return OK;
}

/* Copies the parts of the parameters that are behind pointers. */
static enum status copy_sampling(struct seq *s, const struct sampling_params *p, uint32_t n_vocab)
{
    s->sampling = *p;
    s->sampling.bias = NULL;
    s->sampling.allowed = NULL;
    if (p->n_bias) {
        s->bias = mem_try_calloc(p->n_bias, sizeof *s->bias);
        if (!s->bias) return ERR_NOMEM;
        memcpy(s->bias, p->bias, p->n_bias * sizeof *s->bias);
        s->sampling.bias = s->bias;
    }
    if (p->allowed) {
        size_t n_words = ((size_t)n_vocab + 63) / 64;
        s->allowed = mem_try_calloc(n_words, sizeof *s->allowed);
        if (!s->allowed) return ERR_NOMEM;
        memcpy(s->allowed, p->allowed, n_words * sizeof *s->allowed);
        s->sampling.allowed = s->allowed;
    }
    return OK;
}

/* Allocates for the longest that the sequence can become, so that steps do not allocate. */
static enum status size_tables(struct seq *s, uint32_t block_tokens)
{
    s->cap_blocks = seq_blocks_for(s->n_tokens_max, block_tokens);
    s->tokens = mem_try_calloc(s->n_tokens_max, sizeof *s->tokens);
    s->blocks = mem_try_calloc(s->cap_blocks, sizeof *s->blocks);
    s->hashes = mem_try_calloc(s->cap_blocks, sizeof *s->hashes);
    return s->tokens && s->blocks && s->hashes ? OK : ERR_NOMEM;
}

enum status seq_create(const struct engine_request *r, const struct seq_limits *l, struct seq **out)
{
    TRY(check_request(r, l));
    struct seq *s = mem_try_calloc(1, sizeof *s);
    if (!s) return ERR_NOMEM;
    list_init(&s->node);
    uint64_t end = (uint64_t)r->n_prompt + r->sampling.max_tokens;
    s->n_tokens_max = end < l->max_len ? (uint32_t)end : l->max_len;
    if (s->n_tokens_max < r->n_tokens)
        s->n_tokens_max = r->n_tokens; /* a moved request that already has all
                                   * its tokens */
    enum status st = copy_sampling(s, &r->sampling, l->n_vocab);
    if (st == OK) st = size_tables(s, l->block_tokens);
    if (st != OK) {
        seq_free(s);
        return st;
    }
    memcpy(s->tokens, r->tokens, r->n_tokens * sizeof *s->tokens);
    s->id = r->id;
    s->request = r->request;
    s->n_tokens = r->n_tokens;
    s->n_prompt = r->n_prompt;
    s->prefill_only = r->prefill_only;
    s->goes_first = r->goes_first;
    s->most_computed = r->most_computed;
    s->lp_next = r->want_prompt_logprobs ? 1 : r->n_prompt;
    s->fetch.peer = r->peer;
    s->fetch.n_peer_tokens = r->n_peer_tokens;
    s->fetch.n_peer_ranks = r->n_peer_ranks;
    s->seed = hash_block_seed(l->model_fingerprint, r->cache_salt);
    s->two_attention_paths = l->two_attention_paths;
    s->t_submit_ns = clock_ns();
    *out = s;
    return OK;
}

enum status seq_create_lent(uint64_t id, const struct hash128 *keys, uint32_t n, struct seq **out)
{
    struct seq *s = mem_try_calloc(1, sizeof *s);
    if (!s) return ERR_NOMEM;
    list_init(&s->node);
    s->id = id;
    s->lends = true;
    s->cap_blocks = n;
    s->blocks = mem_try_calloc(n, sizeof *s->blocks);
    s->hashes = mem_try_calloc(n, sizeof *s->hashes);
    if (!s->blocks || !s->hashes) {
        seq_free(s);
        return ERR_NOMEM;
    }
    memcpy(s->hashes, keys, n * sizeof *keys);
    s->n_hashed = n;
    *out = s;
    return OK;
}

void seq_free(struct seq *s)
{
    if (!s) return;
    ASSERT(s->n_blocks == 0);
    mem_free(s->bias);
    mem_free(s->allowed);
    mem_free(s->tokens);
    mem_free(s->blocks);
    mem_free(s->hashes);
    mem_free(s->hidden);
    mem_free(s);
}

void seq_hash_blocks(struct seq *s, uint32_t block_tokens, uint32_t n_full)
{
    if (n_full <= s->n_hashed) return;
    if (s->two_attention_paths)
        kv_prefix_hashes_generated(s->seed, s->tokens, block_tokens, s->n_prompt, s->n_hashed,
                                   n_full, s->hashes);
    else kv_prefix_hashes(s->seed, s->tokens, block_tokens, s->n_hashed, n_full, s->hashes);
    s->n_hashed = n_full;
}

uint32_t seq_n_cacheable(struct seq *s, uint32_t block_tokens)
{
    const uint32_t n = s->lp_next < s->n_prompt ? 0 : (s->n_tokens - 1) / block_tokens;
    seq_hash_blocks(s, block_tokens, n);
    return n;
}

uint32_t seq_n_lacking(struct seq *s, struct kv_pool *pool, uint32_t block_tokens,
                       uint32_t n_blocks)
{
    const uint32_t n_ask = seq_n_cacheable(s, block_tokens);
    uint32_t n_idle, n_found = kv_pool_peek(pool, s->hashes, n_ask, &n_idle);
    const uint32_t need = n_blocks - n_found, available = kv_pool_available(pool) - n_idle;
    return need > available ? need - available : 0;
}

bool seq_fits(struct seq *s, struct kv_pool *pool, uint32_t block_tokens, uint32_t n_blocks)
{
    return seq_n_lacking(s, pool, block_tokens, n_blocks) == 0;
}

enum status seq_take_blocks(struct seq *s, struct kv_pool *pool, uint32_t block_tokens,
                            uint32_t n_blocks)
{
    ASSERT(s->n_blocks == 0 && s->n_computed == 0);
    ASSERT(n_blocks <= s->cap_blocks);
    const uint32_t n_ask = seq_n_cacheable(s, block_tokens);
    /* Checked first, so that a sequence that waits for blocks changes no statistics and no eviction
     * order. */
    if (!seq_fits(s, pool, block_tokens, n_blocks)) return ERR_BUSY;
    uint32_t n_hit = kv_pool_match(pool, s->hashes, n_ask, s->blocks);
    if (kv_pool_alloc(pool, n_blocks - n_hit, s->blocks + n_hit) != OK) {
        while (n_hit > 0) kv_pool_unref(pool, s->blocks[--n_hit]);
        return ERR_BUSY;
    }
    s->n_blocks = n_blocks;
    s->n_shared = s->n_published = n_hit;
    s->n_computed = n_hit * block_tokens;
    return OK;
}

enum status seq_grow(struct seq *s, struct kv_pool *pool)
{
    ASSERT(s->n_blocks < s->cap_blocks);
    TRY(kv_pool_alloc(pool, 1, s->blocks + s->n_blocks));
    s->n_blocks++;
    return OK;
}

void seq_trim(struct seq *s, struct kv_pool *pool, uint32_t block_tokens)
{
    const uint32_t need = s->n_computed / block_tokens + 1;
    if (s->n_future > 0) return;
    while (s->n_blocks > need) kv_pool_unref(pool, s->blocks[--s->n_blocks]);
}

void seq_drop_blocks(struct seq *s, struct kv_pool *pool)
{
    while (s->n_blocks > 0) kv_pool_unref(pool, s->blocks[--s->n_blocks]);
    s->n_shared = s->n_published = s->n_computed = 0;
}

void seq_quarantine_blocks(struct seq *s, struct kv_pool *pool)
{
    for (uint32_t i = 0; i < s->n_shared; i++) kv_pool_unref(pool, s->blocks[i]);
    for (uint32_t i = s->n_shared; i < s->n_blocks; i++) kv_pool_quarantine(pool, s->blocks[i]);
}

void seq_free_quarantined_blocks(struct seq *s, struct kv_pool *pool)
{
    for (uint32_t i = s->n_shared; i < s->n_blocks; i++)
        kv_pool_free_quarantined(pool, s->blocks[i]);
    s->n_blocks = s->n_shared = 0;
}

void seq_publish_blocks(struct seq *s, struct kv_pool *pool, uint32_t block_tokens,
                        uint32_t n_complete)
{
    const uint32_t n_full = (n_complete < s->n_tokens ? n_complete : s->n_tokens) / block_tokens;
    ASSERT(n_complete <= s->n_computed);
    seq_hash_blocks(s, block_tokens, n_full);
    for (; s->n_published < n_full; s->n_published++)
        kv_pool_publish(pool, s->blocks[s->n_published], s->hashes[s->n_published]);
}
