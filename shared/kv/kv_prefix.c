/* kv_prefix.c - see kv_prefix.h. Thread: any. */
#include "shared/kv/kv_prefix.h"

static void put_u64le(uint8_t *p, uint64_t v)
{
    for (int i = 0; i < 8; i++) p[i] = (uint8_t)(v >> (8 * i));
}

void kv_prefix_hashes(struct hash128 seed, const int32_t *tokens, uint32_t block_tokens,
                      uint32_t first, uint32_t end, struct hash128 *out)
{
    kv_prefix_hashes_generated(seed, tokens, block_tokens, UINT32_MAX, first, end, out);
}

/* Hashes `name` and where the generated tokens of its block begin: 24 little-endian bytes. */
static struct hash128 mark_generated(struct hash128 name, uint32_t first)
{
    uint8_t bytes[24];
    put_u64le(bytes, name.lo);
    put_u64le(bytes + 8, name.hi);
    put_u64le(bytes + 16, first);
    return hash_128(bytes, sizeof bytes);
}

void kv_prefix_hashes_generated(struct hash128 seed, const int32_t *tokens, uint32_t block_tokens,
                                uint32_t n_prompt, uint32_t first, uint32_t end,
                                struct hash128 *out)
{
    for (uint32_t i = first; i < end; i++) {
        uint32_t begin = i * block_tokens;
        out[i] = hash_block(i ? out[i - 1] : seed, tokens + (size_t)begin, block_tokens);
        if (begin + block_tokens > n_prompt)
            out[i] = mark_generated(out[i], n_prompt > begin ? n_prompt - begin : 0);
    }
}
