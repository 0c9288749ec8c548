/* tier_index.c - states of slots, the map of keys, and the array of slots that may be evicted.
 *
 * `leaves` has the STORED slots without pins that no STORED slot of the index follows, in no order:
 * a slot knows its place there, so it leaves in constant time. A block that is stored before the
 * one that it follows (which was lost, or dropped) follows nothing here.
 * Thread: the owner's. */
#include "shared/kv/tier/tier_index.h"

#include "shared/base/assert.h"
#include "shared/base/map.h"
#include "shared/base/mem.h"
#include "shared/base/rng.h"

enum {
    SAMPLES = 16, /* looked at for each eviction */
    /* With 4,096 tokens before it, in blocks of 64, attention takes about as long as the rest of a
     * block's computing, for usual shapes. Only the order of evictions depends on it. */
    DEPTH_OF_TWICE_THE_COST = 64,
    SLOTS_AT_FIRST = 64,
    NONE = -1
};

enum tier_slot_state { SLOT_FREE, SLOT_FILLING, SLOT_STORED, SLOT_DROPPED, SLOT_REMOVED };

struct tier_slot {
    struct tier_block block;
    enum tier_slot_state state; /* DROPPED: free once its last pin has gone */
    bool is_unwanted;           /* FILLING: it was dropped */
    uint32_t n_pins;
    uint32_t n_followers;         /* STORED slots whose `parent` it is */
    int32_t parent;               /* slot of the block before; NONE */
    int32_t leaf;                 /* its place in `leaves`; NONE */
    int32_t next_free, prev_free; /* NONE: the last, the first */
    uint64_t used_ns;
};

struct tier_index {
    struct tier_slot *slots;
    uint32_t *leaves;    /* [cap] */
    uint32_t n_all, cap; /* n_all: with those taken out */
    uint32_t n_removed, n_stored, n_leaves;
    int32_t free;      /* the first of a list by next_free; NONE */
    struct map by_key; /* hash128 → 1 + the slot that is STORED or FILLING with it */
    uint64_t n_evicted, n_draws;
    void (*on_evicted)(void *arg, const struct hash128 *key); /* NULL: nobody asks */
    void *evicted_arg;
};

struct tier_index *tier_index_create(void)
{
    struct tier_index *x = MEM_NEW(struct tier_index);
    x->free = NONE;
    return x;
}

void tier_index_on_evicted(struct tier_index *x, void (*fn)(void *arg, const struct hash128 *key),
                           void *arg)
{
    x->on_evicted = fn;
    x->evicted_arg = arg;
}

void tier_index_free(struct tier_index *x)
{
    if (!x) return;
    map_release(&x->by_key);
    mem_free(x->slots);
    mem_free(x->leaves);
    mem_free(x);
}

static struct tier_slot *at(const struct tier_index *x, uint32_t slot)
{
    ASSERT(slot < x->n_all);
    return &x->slots[slot];
}

static uint32_t number_of(const struct tier_index *x, const struct tier_slot *s)
{
    return (uint32_t)(s - x->slots);
}

static struct str key_of(const struct hash128 *h)
{
    return (struct str){ (const char *)h, sizeof *h };
}

/* The slot that is STORED or FILLING with this key, or NULL. */
static struct tier_slot *with_key(const struct tier_index *x, const struct hash128 *key)
{
    const uintptr_t n = (uintptr_t)map_get(&x->by_key, key_of(key));
    return n ? at(x, (uint32_t)(n - 1)) : NULL;
}

/* ---- slots ---- */

static void push_free(struct tier_index *x, struct tier_slot *s)
{
    s->state = SLOT_FREE;
    s->next_free = x->free;
    s->prev_free = NONE;
    if (x->free != NONE) at(x, (uint32_t)x->free)->prev_free = (int32_t)number_of(x, s);
    x->free = (int32_t)number_of(x, s);
}

static void unlink_free(struct tier_index *x, struct tier_slot *s)
{
    if (s->prev_free == NONE) x->free = s->next_free;
    else at(x, (uint32_t)s->prev_free)->next_free = s->next_free;
    if (s->next_free != NONE) at(x, (uint32_t)s->next_free)->prev_free = s->prev_free;
}

uint32_t tier_index_add_slots(struct tier_index *x, uint32_t n)
{
    const uint32_t first = x->n_all;
    ASSERT(n <= INT32_MAX - first);
    if (first + n > x->cap) {
        uint32_t cap = x->cap ? x->cap : SLOTS_AT_FIRST;
        while (cap < first + n) cap = cap > INT32_MAX / 2 ? INT32_MAX : 2 * cap;
        x->slots = mem_realloc(x->slots, cap, sizeof *x->slots);
        x->leaves = mem_realloc(x->leaves, cap, sizeof *x->leaves);
        x->cap = cap;
    }
    x->n_all += n;
    for (uint32_t i = n; i-- > 0;) { /* the first of them is taken first */
        x->slots[first + i] = (struct tier_slot){ .parent = NONE, .leaf = NONE };
        push_free(x, &x->slots[first + i]);
    }
    return first;
}

bool tier_index_are_idle(const struct tier_index *x, uint32_t first, uint32_t n)
{
    for (uint32_t i = first; i < first + n; i++) {
        const struct tier_slot *s = at(x, i);
        if (s->n_pins > 0 || s->state == SLOT_FILLING) return false;
    }
    return true;
}

uint32_t tier_index_n_slots(const struct tier_index *x) { return x->n_all - x->n_removed; }

uint32_t tier_index_n_stored(const struct tier_index *x) { return x->n_stored; }

uint64_t tier_index_n_evicted(const struct tier_index *x) { return x->n_evicted; }

/* ---- what may be evicted ---- */

static bool is_leaf(const struct tier_slot *s)
{
    return s->state == SLOT_STORED && s->n_pins == 0 && s->n_followers == 0;
}

/* To be called whenever one of its three conditions may have changed. */
static void update_leaf(struct tier_index *x, struct tier_slot *s)
{
    const bool is = is_leaf(s);
    if (is == (s->leaf != NONE)) return;
    if (is) {
        s->leaf = (int32_t)x->n_leaves;
        x->leaves[x->n_leaves++] = number_of(x, s);
        return;
    }
    const uint32_t last = x->leaves[--x->n_leaves];
    x->leaves[s->leaf] = last;
    at(x, last)->leaf = s->leaf;
    s->leaf = NONE;
}

static void link_parent(struct tier_index *x, struct tier_slot *s)
{
    struct tier_slot *p = s->block.depth ? with_key(x, &s->block.parent) : NULL;
    if (!p || p == s || p->state != SLOT_STORED) return;
    s->parent = (int32_t)number_of(x, p);
    p->n_followers++;
    update_leaf(x, p);
}

static void unlink_parent(struct tier_index *x, struct tier_slot *s)
{
    if (s->parent == NONE) return;
    struct tier_slot *p = at(x, (uint32_t)s->parent);
    s->parent = NONE;
    ASSERT(p->n_followers > 0);
    p->n_followers--;
    update_leaf(x, p);
}

/* Those that follow a slot that goes follow nothing any more. Only a drop meets some, and it is
 * rare: of a block whose bytes went bad. */
static void leave_followers(struct tier_index *x, struct tier_slot *s)
{
    const int32_t n = (int32_t)number_of(x, s);
    for (uint32_t i = 0; s->n_followers > 0; i++) {
        if (at(x, i)->parent != n) continue;
        at(x, i)->parent = NONE;
        s->n_followers--;
    }
}

/* Takes a STORED slot out of map, chain and leaves. */
static void forget(struct tier_index *x, struct tier_slot *s)
{
    ASSERT(s->state == SLOT_STORED);
    leave_followers(x, s);
    unlink_parent(x, s);
    void *was = map_del(&x->by_key, key_of(&s->block.key));
    ASSERT((uintptr_t)was == number_of(x, s) + 1u);
    s->state = SLOT_DROPPED;
    update_leaf(x, s);
    x->n_stored--;
    if (s->n_pins == 0) push_free(x, s);
}

/* How much is gained by its eviction, per byte: the time that it was not used for what it would
 * cost. */
static double worth_evicting(const struct tier_slot *s, uint64_t now_ns)
{
    const double unused = now_ns > s->used_ns ? (double)(now_ns - s->used_ns) : 0,
                 cost = 1 + (double)s->block.depth / DEPTH_OF_TWICE_THE_COST;
    return unused / cost;
}

/* Not the block that `b` follows: without it b could not be used. */
static struct tier_slot *choose_victim(struct tier_index *x, const struct tier_block *b,
                                       uint64_t now_ns)
{
    const struct tier_slot *before = b->depth ? with_key(x, &b->parent) : NULL;
    struct tier_slot *best = NULL;
    double most = -1;
    const uint32_t n = x->n_leaves < SAMPLES ? x->n_leaves : SAMPLES;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t place = i; /* few: all of them */
        if (x->n_leaves > SAMPLES)
            place = (uint32_t)(rng_uniform(0, 0, x->n_draws++) * x->n_leaves);
        struct tier_slot *s = at(x, x->leaves[place]);
        const double worth = worth_evicting(s, now_ns);
        if (s != before && worth > most) most = worth, best = s;
    }
    return best;
}

/* ---- the life of a block ---- */

int32_t tier_index_find(const struct tier_index *x, struct hash128 key)
{
    const struct tier_slot *s = with_key(x, &key);
    return s && s->state == SLOT_STORED ? (int32_t)number_of(x, s) : NONE;
}

bool tier_index_has(const struct tier_index *x, struct hash128 key)
{
    return with_key(x, &key) != NULL;
}

void tier_index_touch(struct tier_index *x, uint32_t slot, uint64_t now_ns)
{
    at(x, slot)->used_ns = now_ns;
}

static void fill(struct tier_index *x, struct tier_slot *s, const struct tier_block *b,
                 uint64_t used_ns)
{
    ASSERT(s->state == SLOT_FREE);
    s->block = *b;
    s->state = SLOT_FILLING;
    s->is_unwanted = false;
    s->used_ns = used_ns;
    void *was = map_put(&x->by_key, key_of(&b->key), (void *)(uintptr_t)(number_of(x, s) + 1u));
    ASSERT(was == NULL);
}

int32_t tier_index_take(struct tier_index *x, const struct tier_block *b, bool evict,
                        uint64_t now_ns)
{
    if (with_key(x, &b->key)) return NONE;
    if (x->free == NONE) {
        struct tier_slot *victim = evict ? choose_victim(x, b, now_ns) : NULL;
        if (!victim) return NONE;
        forget(x, victim);
        x->n_evicted++;
        if (x->on_evicted) x->on_evicted(x->evicted_arg, &victim->block.key);
    }
    struct tier_slot *s = at(x, (uint32_t)x->free);
    unlink_free(x, s);
    fill(x, s, b, now_ns);
    return (int32_t)number_of(x, s);
}

void tier_index_abandon(struct tier_index *x, uint32_t slot)
{
    struct tier_slot *s = at(x, slot);
    ASSERT(s->state == SLOT_FILLING && s->n_pins == 0);
    map_del(&x->by_key, key_of(&s->block.key));
    push_free(x, s);
}

bool tier_index_commit(struct tier_index *x, uint32_t slot)
{
    struct tier_slot *s = at(x, slot);
    ASSERT(s->state == SLOT_FILLING);
    if (s->is_unwanted) {
        tier_index_abandon(x, slot);
        return false;
    }
    s->state = SLOT_STORED;
    x->n_stored++;
    link_parent(x, s);
    update_leaf(x, s);
    return true;
}

bool tier_index_adopt(struct tier_index *x, uint32_t slot, const struct tier_block *b,
                      uint64_t used_ns)
{
    struct tier_slot *s = at(x, slot);
    if (with_key(x, &b->key)) return false;
    unlink_free(x, s);
    fill(x, s, b, used_ns);
    return tier_index_commit(x, slot);
}

void tier_index_drop(struct tier_index *x, struct hash128 key)
{
    struct tier_slot *s = with_key(x, &key);
    if (s && s->state == SLOT_STORED) forget(x, s);
    else if (s) s->is_unwanted = true;
}

void tier_index_remove_slots(struct tier_index *x, uint32_t first, uint32_t n)
{
    for (uint32_t i = first; i < first + n; i++) {
        struct tier_slot *s = at(x, i);
        if (s->state == SLOT_STORED) forget(x, s);
        ASSERT(s->state == SLOT_FREE);
        unlink_free(x, s);
        s->state = SLOT_REMOVED;
    }
    x->n_removed += n;
}

void tier_index_return_slots(struct tier_index *x, uint32_t first, uint32_t n)
{
    for (uint32_t i = n; i-- > 0;) {
        struct tier_slot *s = at(x, first + i);
        ASSERT(s->state == SLOT_REMOVED);
        *s = (struct tier_slot){ .parent = NONE, .leaf = NONE };
        push_free(x, s);
    }
    x->n_removed -= n;
}

void tier_index_pin(struct tier_index *x, uint32_t slot)
{
    struct tier_slot *s = at(x, slot);
    ASSERT(s->state == SLOT_STORED);
    s->n_pins++;
    update_leaf(x, s);
}

void tier_index_unpin(struct tier_index *x, uint32_t slot)
{
    struct tier_slot *s = at(x, slot);
    ASSERT(s->n_pins > 0);
    s->n_pins--;
    if (s->state == SLOT_DROPPED && s->n_pins == 0) push_free(x, s);
    update_leaf(x, s);
}

const struct tier_block *tier_index_block(const struct tier_index *x, uint32_t slot)
{
    return &at(x, slot)->block;
}

/* ---- for tests ---- */

static void verify_slot(const struct tier_index *x, const struct tier_slot *s,
                        const uint32_t *n_followers)
{
    const uint32_t n = number_of(x, s);
    const bool is_known = s->state == SLOT_STORED || s->state == SLOT_FILLING;
    if (is_known) ASSERT(with_key(x, &s->block.key) == s);
    ASSERT((s->leaf != NONE) == is_leaf(s));
    if (s->leaf != NONE) ASSERT(x->leaves[s->leaf] == n);
    if (s->parent != NONE) ASSERT(at(x, (uint32_t)s->parent)->state == SLOT_STORED);
    ASSERT(s->n_followers == n_followers[n]);
    if (s->state == SLOT_DROPPED) ASSERT(s->n_pins > 0);
}

void tier_index_verify(const struct tier_index *x)
{
    uint32_t n_in[SLOT_REMOVED + 1] = { 0 }, n_leaves = 0, n_free = 0;
    uint32_t *n_followers = MEM_ARRAY(uint32_t, x->n_all + 1u);
    for (uint32_t i = 0; i < x->n_all; i++)
        if (x->slots[i].parent != NONE) n_followers[x->slots[i].parent]++;
    for (uint32_t i = 0; i < x->n_all; i++) {
        verify_slot(x, &x->slots[i], n_followers);
        n_in[x->slots[i].state]++;
        n_leaves += x->slots[i].leaf != NONE;
    }
    for (int32_t i = x->free; i != NONE; i = x->slots[i].next_free) n_free++;
    ASSERT(n_free == n_in[SLOT_FREE]);
    ASSERT(n_leaves == x->n_leaves);
    ASSERT(x->n_stored == n_in[SLOT_STORED]);
    ASSERT(x->n_removed == n_in[SLOT_REMOVED]);
    ASSERT(x->by_key.len == n_in[SLOT_STORED] + n_in[SLOT_FILLING]);
    mem_free(n_followers);
}
