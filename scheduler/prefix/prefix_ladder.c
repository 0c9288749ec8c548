/* prefix_ladder.c - see prefix_ladder.h. */
#include "scheduler/prefix/prefix_ladder.h"

#include "shared/base/hash/hash.h"

enum { UNIT_TOKENS = 512, UNIT_BLOCKS_MAX = 8, WORTH = 4 };

/* From how many blocks on the lengths are multiples. */
static uint32_t unit_of(uint32_t block_tokens)
{
    uint32_t unit = 1;
    while (unit < UNIT_BLOCKS_MAX && 2 * unit * (uint64_t)block_tokens <= UNIT_TOKENS) unit *= 2;
    return unit;
}

uint32_t prefix_ladder_next(uint32_t n_blocks, uint32_t block_tokens)
{
    const uint32_t unit = unit_of(block_tokens);
    if (n_blocks == 0) return 1;
    if (n_blocks < unit) return 2 * n_blocks;
    const uint32_t n_units = n_blocks / unit;
    return (n_units + (n_units + 2) / 3) * unit;
}

void prefix_ladder_make(struct prefix_ladder *l, uint64_t model, uint64_t cache_salt,
                        const int32_t *tokens, uint32_t n_tokens, uint32_t block_tokens)
{
    struct hash128 key = hash_block_seed(model, cache_salt);
    uint32_t i_block = 0, rung = 0;
    *l = (struct prefix_ladder){ .block_tokens = block_tokens, .model = model };
    if (block_tokens == 0) return;
    if (n_tokens > PREFIX_LADDER_TOKENS_MAX) n_tokens = PREFIX_LADDER_TOKENS_MAX;
    uint32_t n_blocks = n_tokens / block_tokens;
    if (n_blocks > PREFIX_LADDER_BLOCKS_MAX) n_blocks = PREFIX_LADDER_BLOCKS_MAX;
    while (l->n < PREFIX_RUNGS_MAX) {
        rung = prefix_ladder_next(rung, block_tokens);
        if (rung > n_blocks) return;
        for (; i_block < rung; i_block++)
            key = hash_block(key, tokens + (size_t)i_block * block_tokens, block_tokens);
        l->rungs[l->n++] = (struct prefix_rung){ .slot = (uint16_t)key.lo,
                                                 .tag = (uint32_t)key.hi,
                                                 .tokens = rung * block_tokens };
    }
}

uint32_t prefix_ladder_ask(const struct prefix_ladder *l, uint32_t n_tokens,
                           struct prefix_rung out[PREFIX_RUNGS_MAX])
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < l->n; i++)
        if ((uint64_t)WORTH * l->rungs[i].tokens >= n_tokens) out[n++] = l->rungs[i];
    const uint32_t most = n ? (n_tokens - 1) / l->block_tokens * l->block_tokens : 0;
    if (n && out[n - 1].tokens > most) out[n - 1].tokens = most;
    return n;
}
