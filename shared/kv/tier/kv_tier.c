/* kv_tier.c - what all tiers have in common. Thread: engine. */
#include "shared/kv/tier/kv_tier.h"

uint32_t kv_tier_find(struct kv_tier *t, const struct hash128 *keys, uint32_t n)
{
    uint32_t found = 0;
    while (found < n && t->ops->has(t, &keys[found])) found++;
    return found;
}
