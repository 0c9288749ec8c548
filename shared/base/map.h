/* map.h - a hash map from byte strings (copied) to pointers (not owned): open addressing, grows by
 * doubling.
 *
 * { 0 } is a valid empty map. Keys of fixed size (u64, hashes) are passed as their bytes.
 * Thread: its owner's. */
#ifndef BATON_BASE_MAP_H
#define BATON_BASE_MAP_H

#include "shared/base/str.h"

struct map {
    struct map_slot *slots;
    size_t cap, len, tombs;
};

void map_release(struct map *m); /* frees the keys and the table, not the values */
void *map_get(const struct map *m, struct str key);
/* Inserts or replaces; returns the previous value or NULL. `value` must not be NULL. */
void *map_put(struct map *m, struct str key, void *value);
/* Removes; returns the value or NULL. */
void *map_del(struct map *m, struct str key);
/* Iterates in no particular order: start with *pos = 0; false at the end. Meanwhile the map must
 * not change, except that the entry just returned may be deleted. */
bool map_next(const struct map *m, size_t *pos, struct str *key, void **value);

static inline struct str map_key_u64(const uint64_t *v)
{
    return (struct str){ (const char *)v, sizeof *v };
}

#endif
