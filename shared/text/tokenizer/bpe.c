/* bpe.c - see bpe.h.
 *
 * Short pieces (nearly all) scan an array of ranks for the lowest. Long ones keep a linked list of
 * tokens and two queues of (rank, position): the initial pairs, radix sorted, and a heap of the
 * pairs that merging makes; entries whose token has changed are skipped. Both give the same result.
 * Long pieces are bound by memory: a node of the heap has eight children, which share a cache line,
 * and lookups are cached in a small table. The table of pairs is not a struct map: it is read for
 * every pair of every text, so its entries lie in one array.
 * Thread: merge on any, with a bpe_work of its own. */
#include "shared/text/tokenizer/bpe.h"

#include <stdbool.h>
#include <string.h>

#include "shared/base/assert.h"
#include "shared/base/mem.h"

struct bpe_pair {
    uint64_t key; /* PAIR_NONE: free */
    uint32_t rank;
    int32_t merged; /* with BPE_WATCHED */
};

struct bpe_node {
    int32_t id, merged; /* the token (-1: merged away), and the one that it and the next make */
    uint32_t rank;      /* of that pair; RANK_NONE: it does not merge */
    int32_t prev, next; /* -1: none */
};

#define PAIR_NONE UINT64_MAX
#define RANK_NONE UINT32_MAX
/* SHORT_MAX: up to this many tokens the scan is faster than the heap. */
enum { SHORT_MAX = 48, SLOTS_MIN = 16 };

static size_t pair_slot(const struct bpe *b, uint64_t key)
{
    /* Multiplicative hashing: the upper half of the product is well mixed (Knuth, vol. 3, 6.4). */
    return (size_t)((key * 0x9E3779B97F4A7C15u) >> 32) & b->mask;
}

static uint64_t pair_key(int32_t left, int32_t right)
{
    return (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
}

void bpe_init(struct bpe *b, size_t n_pairs)
{
    size_t cap = SLOTS_MIN;
    while (cap < n_pairs * 2) cap *= 2;
    *b = (struct bpe){ .mask = cap - 1, .n_max = n_pairs };
    b->pairs = MEM_ARRAY(struct bpe_pair, cap);
    for (size_t i = 0; i < cap; i++) b->pairs[i].key = PAIR_NONE;
}

void bpe_release(struct bpe *b)
{
    mem_free(b->pairs);
    *b = (struct bpe){ 0 };
}

static struct bpe_pair *find_slot(const struct bpe *b, uint64_t key)
{
    size_t at = pair_slot(b, key);
    while (b->pairs[at].key != key && b->pairs[at].key != PAIR_NONE) at = (at + 1) & b->mask;
    return &b->pairs[at];
}

void bpe_put(struct bpe *b, int32_t left, int32_t right, uint32_t rank, int32_t merged)
{
    struct bpe_pair *p = find_slot(b, pair_key(left, right));
    if (p->key == PAIR_NONE) {
        ASSERT(b->n < b->n_max);
        b->n++;
    }
    *p = (struct bpe_pair){ pair_key(left, right), rank, merged };
    size_t id = (size_t)(merged & ~BPE_WATCHED);
    if (merged & BPE_WATCHED && id >= b->n_watched) b->n_watched = id + 1;
}

static void note_origin(const struct bpe *b, struct bpe_work *w, int32_t id, uint64_t key)
{
    if (!w->origins) w->origins = MEM_ARRAY(uint64_t, b->n_watched);
    w->origins[id] = key;
}

void bpe_origin(const struct bpe_work *w, int32_t id, int32_t *left, int32_t *right)
{
    ASSERT(w->origins);
    *left = (int32_t)(w->origins[id] >> 32);
    *right = (int32_t)(uint32_t)w->origins[id];
}

/* Rank of a pair, with the token it makes; RANK_NONE when it does not merge. */
static uint32_t pair_rank(const struct bpe *b, struct bpe_work *w, int32_t left, int32_t right,
                          int32_t *merged)
{
    const struct bpe_pair *p = find_slot(b, pair_key(left, right));
    if (p->key == PAIR_NONE) return RANK_NONE;
    *merged = p->merged & ~BPE_WATCHED;
    if (p->merged & BPE_WATCHED) note_origin(b, w, *merged, p->key);
    return p->rank;
}

/* Looks pairs up in the same order as merge_long (after a merge, first the pair on the left): the
 * last lookup decides bpe_origin. */
static size_t merge_short(const struct bpe *b, int32_t *ids, size_t n, struct bpe_work *w)
{
    uint32_t rank[SHORT_MAX];
    int32_t merged[SHORT_MAX];
    for (size_t i = 0; i + 1 < n; i++) rank[i] = pair_rank(b, w, ids[i], ids[i + 1], &merged[i]);
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++)
            if (rank[i] < rank[best]) best = i;
        if (rank[best] == RANK_NONE) break;
        ids[best] = merged[best];
        size_t n_after = n - best - 2; /* tokens behind the pair */
        memmove(&ids[best + 1], &ids[best + 2], n_after * sizeof *ids);
        if (n_after > 0) {
            memmove(&rank[best + 1], &rank[best + 2], (n_after - 1) * sizeof *rank);
            memmove(&merged[best + 1], &merged[best + 2], (n_after - 1) * sizeof *merged);
        }
        n--;
        if (best > 0) rank[best - 1] = pair_rank(b, w, ids[best - 1], ids[best], &merged[best - 1]);
        if (best + 1 < n) rank[best] = pair_rank(b, w, ids[best], ids[best + 1], &merged[best]);
    }
    return n;
}

/* ---- long pieces ---- */

enum {
    ARITY = 8,
    LINE_BYTES = 64,
    RECENT_SLOTS = 1 << 13,
    DIGIT_BITS = 11,
    DIGITS = 1 << DIGIT_BITS
};

/* The children of `at` are ARITY * at + 1 and following. w->heap begins one entry before a cache
 * line, so siblings fill one line. */
static void heap_push(struct bpe_work *w, uint64_t entry)
{
    size_t at = w->n_heap++;
    while (at > 0 && w->heap[(at - 1) / ARITY] > entry) {
        w->heap[at] = w->heap[(at - 1) / ARITY];
        at = (at - 1) / ARITY;
    }
    w->heap[at] = entry;
}

static void heap_pop(struct bpe_work *w)
{
    uint64_t last = w->heap[--w->n_heap];
    size_t at = 0;
    for (;;) {
        size_t child = ARITY * at + 1, end = child + ARITY < w->n_heap ? child + ARITY : w->n_heap;
        if (child >= w->n_heap) break;
        size_t best = child;
        for (size_t i = child + 1; i < end; i++)
            if (w->heap[i] < w->heap[best]) best = i;
        if (last <= w->heap[best]) break;
        w->heap[at] = w->heap[best];
        at = best;
    }
    w->heap[at] = last;
}

/* pair_rank with a cache. Pairs that make watched tokens are always looked up, to note the
 * origin. */
static uint32_t recent_rank(const struct bpe *b, struct bpe_work *w, int32_t left, int32_t right,
                            int32_t *merged)
{
    uint64_t key = pair_key(left, right);
    struct bpe_pair *r = &w->recent[(key * 0x9E3779B97F4A7C15u) >> 51];
    if (r->key == key && !(r->merged & BPE_WATCHED)) {
        *merged = r->merged;
        return r->rank;
    }
    const struct bpe_pair *p = find_slot(b, key);
    *r = p->key == PAIR_NONE ? (struct bpe_pair){ key, RANK_NONE, 0 } : *p;
    return pair_rank(b, w, left, right, merged);
}

/* Looks up the pair that begins at `at`; returns its queue entry, PAIR_NONE when it does not
 * merge. */
static uint64_t renew_pair(const struct bpe *b, struct bpe_work *w, int32_t at)
{
    struct bpe_node *node = &w->nodes[at];
    node->rank = node->next < 0
                     ? RANK_NONE
                     : recent_rank(b, w, node->id, w->nodes[node->next].id, &node->merged);
    return node->rank == RANK_NONE ? PAIR_NONE : (uint64_t)node->rank << 32 | (uint32_t)at;
}

static void renew_queued(const struct bpe *b, struct bpe_work *w, int32_t at)
{
    uint64_t entry = renew_pair(b, w, at);
    if (entry != PAIR_NONE) heap_push(w, entry);
}

static void merge_at(const struct bpe *b, struct bpe_work *w, int32_t at)
{
    struct bpe_node *node = &w->nodes[at], *gone = &w->nodes[node->next];
    node->id = node->merged;
    node->next = gone->next;
    if (gone->next >= 0) w->nodes[gone->next].prev = at;
    gone->id = -1;
    if (node->prev >= 0) renew_queued(b, w, node->prev);
    renew_queued(b, w, at);
}

static void work_release_queues(struct bpe_work *w)
{
    mem_free(w->nodes);
    mem_free(w->first);
    if (w->heap) mem_free(w->heap - (ARITY - 1));
}

static void work_reserve(struct bpe_work *w, size_t n)
{
    w->n_heap = 0;
    if (!w->recent) {
        w->recent = MEM_ARRAY(struct bpe_pair, RECENT_SLOTS);
        for (size_t i = 0; i < RECENT_SLOTS; i++) w->recent[i].key = PAIR_NONE;
    }
    if (n <= w->cap) return;
    work_release_queues(w);
    w->nodes = MEM_ARRAY(struct bpe_node, n);
    w->first = MEM_ARRAY(uint64_t, 2 * n); /* second half: scratch for sorting */
    /* Each of the fewer than n merges queues at most two pairs. */
    w->heap = (uint64_t *)mem_aligned(LINE_BYTES, (2 * n + ARITY) * sizeof *w->heap) + ARITY - 1;
    w->cap = n;
}

/* One stable pass of a radix sort, by the digit at `shift`. */
static void radix_pass(const uint64_t *from, uint64_t *to, size_t n, unsigned shift)
{
    size_t starts[DIGITS + 1] = { 0 };
    for (size_t i = 0; i < n; i++) starts[(from[i] >> shift & (DIGITS - 1)) + 1]++;
    for (size_t d = 0; d < DIGITS; d++) starts[d + 1] += starts[d];
    for (size_t i = 0; i < n; i++) to[starts[from[i] >> shift & (DIGITS - 1)]++] = from[i];
}

/* Sorts the initial pairs by rank; they are in order of position already. Ranks have 32 bits, of
 * which files use about 20. */
static size_t queue_first(const struct bpe *b, struct bpe_work *w, size_t n)
{
    uint64_t any = 0, *from = w->first, *to = w->first + w->cap;
    size_t n_first = 0;
    for (size_t i = 0; i < n; i++) {
        uint64_t entry = renew_pair(b, w, (int32_t)i);
        if (entry == PAIR_NONE) continue;
        from[n_first++] = entry;
        any |= entry;
    }
    for (unsigned shift = 32; shift < 64 && any >> shift; shift += DIGIT_BITS) {
        radix_pass(from, to, n_first, shift);
        uint64_t *swap = from;
        from = to;
        to = swap;
    }
    if (from != w->first) memcpy(w->first, from, n_first * sizeof *from);
    return n_first;
}

static size_t merge_long(const struct bpe *b, int32_t *ids, size_t n, struct bpe_work *w)
{
    work_reserve(w, n);
    for (size_t i = 0; i < n; i++)
        w->nodes[i] = (struct bpe_node){
            .id = ids[i],
            .prev = (int32_t)i - 1,
            .next = i + 1 < n ? (int32_t)i + 1 : -1,
        };
    size_t n_first = queue_first(b, w, n), at = 0;
    while (at < n_first || w->n_heap > 0) {
        bool from_first = w->n_heap == 0 || (at < n_first && w->first[at] <= w->heap[0]);
        uint64_t entry = from_first ? w->first[at++] : w->heap[0];
        if (!from_first) heap_pop(w);
        struct bpe_node *node = &w->nodes[(uint32_t)entry];
        bool is_current = node->id != -1 && node->rank == entry >> 32;
        if (is_current) merge_at(b, w, (int32_t)(uint32_t)entry);
    }
    size_t n_left = 0;
    for (int32_t i = 0; i >= 0; i = w->nodes[i].next) ids[n_left++] = w->nodes[i].id;
    return n_left;
}

size_t bpe_merge(const struct bpe *b, int32_t *ids, size_t n, struct bpe_work *w)
{
    ASSERT(n <= INT32_MAX);
    if (n < 2 || b->n == 0) return n;
    return n <= SHORT_MAX ? merge_short(b, ids, n, w) : merge_long(b, ids, n, w);
}

void bpe_work_release(struct bpe_work *w)
{
    work_release_queues(w);
    mem_free(w->recent);
    mem_free(w->origins);
    *w = (struct bpe_work){ 0 };
}
