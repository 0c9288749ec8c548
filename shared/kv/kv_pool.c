/* kv_pool.c - block states as two intrusive lists, a reference count and a map of published blocks.
 *
 * FREE blocks are in `free`, CACHED ones in `idle` (oldest first: the front is evicted next); HELD
 * and QUARANTINE ones are in neither. `published` maps a chained hash to the one block that holds
 * those tokens; only HELD and CACHED blocks are published.
 * Invariants, checked by kv_pool_verify:
 *   (1) n_free + n_held + n_cached + n_quarantine == n_blocks
 *   (2) ref > 0 exactly for HELD
 *   (3) CACHED blocks are published
 *   (4) `published` and blocks point at each other
 * Thread: engine. */
#include "shared/kv/kv_pool.h"

#include "shared/base/assert.h"
#include "shared/base/list.h"
#include "shared/base/map.h"
#include "shared/base/mem.h"

enum kv_pool_block_state { BLOCK_FREE, BLOCK_HELD, BLOCK_CACHED, BLOCK_QUARANTINE, BLOCK_STATES };

struct kv_pool_block {
    struct list node; /* in `free` or `idle`, else alone */
    enum kv_pool_block_state state;
    uint32_t ref;
    bool published;
    struct hash128 hash; /* if published */
};

struct kv_pool {
    struct kv_pool_block *blocks;
    uint32_t n_blocks, block_tokens;
    uint32_t n_in[BLOCK_STATES];
    bool prefix_cache;
    struct list free, idle;
    struct map published; /* hash128 → struct kv_pool_block */
    uint64_t prefix_queries, prefix_hits, evictions;
};

static struct str hash_key(const struct hash128 *h)
{
    return (struct str){ (const char *)h, sizeof *h };
}

struct kv_pool *kv_pool_create(uint32_t n_blocks, uint32_t block_tokens, bool prefix_cache)
{
    struct kv_pool *p = MEM_NEW(struct kv_pool);
    p->blocks = MEM_ARRAY(struct kv_pool_block, n_blocks);
    p->n_blocks = n_blocks;
    p->block_tokens = block_tokens;
    p->prefix_cache = prefix_cache;
    p->n_in[BLOCK_FREE] = n_blocks;
    list_init(&p->free);
    list_init(&p->idle);
    for (uint32_t i = 0; i < n_blocks; i++) list_push(&p->free, &p->blocks[i].node);
    return p;
}

void kv_pool_destroy(struct kv_pool *p)
{
    if (!p) return;
    map_release(&p->published);
    mem_free(p->blocks);
    mem_free(p);
}

uint32_t kv_pool_available(const struct kv_pool *p)
{
    return p->n_in[BLOCK_FREE] + p->n_in[BLOCK_CACHED];
}

static struct kv_pool_block *block_at(const struct kv_pool *p, int32_t block)
{
    ASSERT(block >= 0);
    ASSERT((uint32_t)block < p->n_blocks);
    return &p->blocks[block];
}

static int32_t block_index(const struct kv_pool *p, const struct kv_pool_block *b)
{
    return (int32_t)(b - p->blocks);
}

/* The only function that changes a state. Moves the block to the list of its new state. */
static void block_move(struct kv_pool *p, struct kv_pool_block *b, enum kv_pool_block_state to)
{
    list_remove(&b->node);
    p->n_in[b->state]--;
    p->n_in[to]++;
    b->state = to;
    if (to == BLOCK_FREE) list_push(&p->free, &b->node);
    if (to == BLOCK_CACHED) list_push(&p->idle, &b->node);
}

static void block_unpublish(struct kv_pool *p, struct kv_pool_block *b)
{
    if (!b->published) return;
    void *was = map_del(&p->published, hash_key(&b->hash));
    ASSERT(was == b);
    b->published = false;
}

enum status kv_pool_alloc(struct kv_pool *p, uint32_t n, int32_t *out)
{
    if (n > kv_pool_available(p)) return ERR_BUSY;
    for (uint32_t i = 0; i < n; i++) {
        struct kv_pool_block *b;
        if (!list_empty(&p->free)) {
            b = LIST_FIRST(&p->free, struct kv_pool_block, node);
        } else {
            b = LIST_FIRST(&p->idle, struct kv_pool_block, node);
            block_unpublish(p, b);
            p->evictions++;
        }
        ASSERT(b->ref == 0);
        block_move(p, b, BLOCK_HELD);
        b->ref = 1;
        out[i] = block_index(p, b);
    }
    return OK;
}

void kv_pool_unref(struct kv_pool *p, int32_t block)
{
    struct kv_pool_block *b = block_at(p, block);
    ASSERT(b->state == BLOCK_HELD);
    if (--b->ref == 0) block_move(p, b, b->published ? BLOCK_CACHED : BLOCK_FREE);
}

void kv_pool_quarantine(struct kv_pool *p, int32_t block)
{
    struct kv_pool_block *b = block_at(p, block);
    ASSERT(b->state == BLOCK_HELD);
    ASSERT(b->ref == 1);
    block_unpublish(p, b);
    b->ref = 0;
    block_move(p, b, BLOCK_QUARANTINE);
}

void kv_pool_free_quarantined(struct kv_pool *p, int32_t block)
{
    struct kv_pool_block *b = block_at(p, block);
    ASSERT(b->state == BLOCK_QUARANTINE);
    block_move(p, b, BLOCK_FREE);
}

uint32_t kv_pool_peek(const struct kv_pool *p, const struct hash128 *hashes, uint32_t n,
                      uint32_t *n_idle)
{
    uint32_t found = 0, idle = 0;
    for (const struct kv_pool_block *b;
         p->prefix_cache && found < n && (b = map_get(&p->published, hash_key(&hashes[found])));
         found++)
        idle += b->state == BLOCK_CACHED;
    if (n_idle) *n_idle = idle;
    return found;
}

static void take_ref(struct kv_pool *p, struct kv_pool_block *b)
{
    if (b->state == BLOCK_CACHED) block_move(p, b, BLOCK_HELD);
    ASSERT(b->state == BLOCK_HELD);
    b->ref++;
}

void kv_pool_ref(struct kv_pool *p, int32_t block)
{
    struct kv_pool_block *b = block_at(p, block);
    ASSERT(b->state == BLOCK_HELD);
    b->ref++;
}

int32_t kv_pool_hold(struct kv_pool *p, struct hash128 hash)
{
    struct kv_pool_block *b = map_get(&p->published, hash_key(&hash));
    if (!b) return -1;
    take_ref(p, b);
    return block_index(p, b);
}

uint32_t kv_pool_match(struct kv_pool *p, const struct hash128 *hashes, uint32_t n, int32_t *out)
{
    if (!p->prefix_cache) return 0;
    uint32_t found = 0;
    for (; found < n; found++) {
        struct kv_pool_block *b = map_get(&p->published, hash_key(&hashes[found]));
        if (!b) break;
        take_ref(p, b);
        out[found] = block_index(p, b);
    }
    p->prefix_queries += (uint64_t)n * p->block_tokens;
    p->prefix_hits += (uint64_t)found * p->block_tokens;
    return found;
}

void kv_pool_publish(struct kv_pool *p, int32_t block, struct hash128 hash)
{
    struct kv_pool_block *b = block_at(p, block);
    ASSERT(b->state == BLOCK_HELD);
    if (!p->prefix_cache) return;
    if (b->published) {
        ASSERT(hash128_eq(b->hash, hash));
        return;
    }
    if (map_get(&p->published, hash_key(&hash))) return;
    b->hash = hash;
    b->published = true;
    void *was = map_put(&p->published, hash_key(&hash), b);
    ASSERT(was == NULL);
}

void kv_pool_get_stats(const struct kv_pool *p, struct kv_pool_stats *out)
{
    *out = (struct kv_pool_stats){
        .n_blocks = p->n_blocks,
        .n_free = p->n_in[BLOCK_FREE],
        .n_held = p->n_in[BLOCK_HELD],
        .n_cached = p->n_in[BLOCK_CACHED],
        .n_quarantine = p->n_in[BLOCK_QUARANTINE],
        .prefix_queries = p->prefix_queries,
        .prefix_hits = p->prefix_hits,
        .evictions = p->evictions,
    };
}

static uint32_t verify_list(const struct list *head, enum kv_pool_block_state state)
{
    uint32_t n = 0;
    for (const struct list *l = head->next; l != head; l = l->next) {
        ASSERT(l->next->prev == l);
        ASSERT(LIST_ENTRY(l, struct kv_pool_block, node)->state == state);
        n++;
    }
    return n;
}

void kv_pool_verify(const struct kv_pool *p)
{
    uint32_t count[BLOCK_STATES] = { 0 }, n_published = 0;
    for (uint32_t i = 0; i < p->n_blocks; i++) {
        const struct kv_pool_block *b = &p->blocks[i];
        ASSERT(b->state < BLOCK_STATES);
        count[b->state]++;
        ASSERT((b->ref > 0) == (b->state == BLOCK_HELD));
        if (b->state == BLOCK_CACHED) ASSERT(b->published);
        if (b->published) {
            n_published++;
            ASSERT(b->state == BLOCK_HELD || b->state == BLOCK_CACHED);
            ASSERT(map_get(&p->published, hash_key(&b->hash)) == b);
        }
    }
    ASSERT(p->published.len == n_published);
    for (int s = 0; s < BLOCK_STATES; s++) ASSERT(count[s] == p->n_in[s]);
    ASSERT(verify_list(&p->free, BLOCK_FREE) == p->n_in[BLOCK_FREE]);
    ASSERT(verify_list(&p->idle, BLOCK_CACHED) == p->n_in[BLOCK_CACHED]);
}
