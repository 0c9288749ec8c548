/* map.c - open addressing with linear probing; a power of two of slots, at most three quarters
 * used.
 *
 * A slot is empty (value NULL), deleted (value DELETED, key NULL) or live. Lookups stop at the
 * first empty slot, so deleted slots stay until the table is rebuilt. Keys may come from clients:
 * the hash is seeded per process, so that nobody outside can choose keys that collide.
 * Thread: the map's owner. */
#include "shared/base/map.h"

#include <stdatomic.h>
#include <string.h>

#include "shared/base/assert.h"
#include "shared/base/hash/hash.h"
#include "shared/base/mem.h"

enum { MAP_CAP_MIN = 16 };

struct map_slot {
    char *key;
    size_t key_len;
    uint64_t hash;
    void *value;
};

static char deleted_sentinel;
#define DELETED ((void *)&deleted_sentinel)

/* The process's seed; 0 until first use. Two threads may both draw one: the first store wins. */
static uint64_t map_seed(void)
{
    static _Atomic uint64_t seed;
    uint64_t s = atomic_load_explicit(&seed, memory_order_relaxed);
    if (s) return s;
    uint64_t drawn = 0, none = 0;
    random_bytes(&drawn, sizeof drawn);
    drawn |= 1;
    return atomic_compare_exchange_strong(&seed, &none, drawn) ? drawn : none;
}

static bool is_live(const struct map_slot *s) { return s->value && s->value != DELETED; }

/* The live slot of `key`, or NULL; *free_slot (may be NULL) is the slot for a new entry. */
static struct map_slot *map_find(const struct map *m, struct str key, uint64_t hash,
                                 struct map_slot **free_slot)
{
    struct map_slot *reuse = NULL;
    for (size_t i = hash & (m->cap - 1);; i = (i + 1) & (m->cap - 1)) {
        struct map_slot *s = &m->slots[i];
        if (!s->value) {
            if (free_slot) *free_slot = reuse ? reuse : s;
            return NULL;
        }
        if (s->value == DELETED) {
            if (!reuse) reuse = s;
        } else if (s->hash == hash && s->key_len == key.n &&
                   (key.n == 0 || memcmp(s->key, key.p, key.n) == 0)) {
            return s;
        }
    }
}

/* Moves to a table with room for one more entry; of the same size when deleted slots filled the old
 * one. */
static void map_rebuild(struct map *m)
{
    size_t cap = MAP_CAP_MIN;
    while ((m->len + 1) * 2 > cap) cap *= 2;
    struct map_slot *old = m->slots;
    size_t old_cap = m->cap;
    m->slots = MEM_ARRAY(struct map_slot, cap);
    m->cap = cap;
    m->tombs = 0;
    for (size_t i = 0; i < old_cap; i++) {
        if (!is_live(&old[i])) continue;
        size_t at = old[i].hash & (cap - 1);
        while (m->slots[at].value) at = (at + 1) & (cap - 1);
        m->slots[at] = old[i];
    }
    mem_free(old);
}

void map_release(struct map *m)
{
    for (size_t i = 0; i < m->cap; i++)
        if (is_live(&m->slots[i])) mem_free(m->slots[i].key);
    mem_free(m->slots);
    *m = (struct map){ 0 };
}

void *map_get(const struct map *m, struct str key)
{
    if (m->len == 0) return NULL;
    struct map_slot *s = map_find(m, key, hash_64(key.p, key.n, map_seed()), NULL);
    return s ? s->value : NULL;
}

void *map_put(struct map *m, struct str key, void *value)
{
    ASSERT(value);
    if ((m->len + m->tombs + 1) * 4 > m->cap * 3) map_rebuild(m);
    uint64_t hash = hash_64(key.p, key.n, map_seed());
    struct map_slot *at = NULL, *s = map_find(m, key, hash, &at);
    if (s) {
        void *previous = s->value;
        s->value = value;
        return previous;
    }
    if (at->value == DELETED) m->tombs--;
    *at = (struct map_slot){ mem_strndup(key.p, key.n), key.n, hash, value };
    m->len++;
    return NULL;
}

void *map_del(struct map *m, struct str key)
{
    if (m->len == 0) return NULL;
    struct map_slot *s = map_find(m, key, hash_64(key.p, key.n, map_seed()), NULL);
    if (!s) return NULL;
    void *value = s->value;
    mem_free(s->key);
    *s = (struct map_slot){ .value = DELETED };
    m->len--;
    m->tombs++;
    return value;
}

bool map_next(const struct map *m, size_t *pos, struct str *key, void **value)
{
    while (*pos < m->cap) {
        const struct map_slot *s = &m->slots[(*pos)++];
        if (!is_live(s)) continue;
        *key = (struct str){ s->key, s->key_len };
        *value = s->value;
        return true;
    }
    return false;
}
