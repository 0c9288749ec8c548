/* attention_tile_loop.c - one run of queries over the tiles of one segment: online softmax, tile
 * after tile.
 *
 * For each tile of ATTN_TILE positions: scores of all pairs (keys as panels whose lanes are
 * positions), then per pair the weights exp(score - max), then P*V (panels whose lanes are
 * elements). Tiles are counted from position 0 whatever the size of KV blocks, so a tile may gather
 * from several blocks or be a part of one. A pair's sums include only keys that it attends to, so
 * nothing of a later position, not even a NaN, reaches it. With bf16 scores the queries are rounded
 * once, at the beginning. Naive MLA: a tile's keys and values are first computed from its latents,
 * in f32, in the order of the GEMM. Pools of f16, int8 and e4m3: a tile is first dequantised to f32
 * (kv_rows.h).
 * Thread: engine, compute pool. */
#include <math.h>
#include <string.h>

#include "kernels/cpu/attention/attention.h"
#include "kernels/kv_rows.h"
#include "shared/base/arith.h"

static size_t padded(size_t n) { return (n + PANEL - 1) / PANEL * PANEL; }

static bool is_naive(const struct attn_args *a) { return a->k_up != NULL; }

/* The micro-kernels read these types in place. */
static bool is_read_in_place(enum dtype t) { return t == DTYPE_F32 || t == DTYPE_BF16; }

struct kv_block_offsets attention_kv_block_offsets(const struct kv_layer *kv)
{
    struct kv_block_offsets p = {
        .row = kv_rows_bytes(kv->dtype, (size_t)kv->head_dim),
        .scale = kv_rows_scaled(kv->dtype) ? sizeof(float) : 0,
    };
    size_t n_rows = (size_t)kv->n_heads * (kv->latent ? 1 : 2) * (size_t)kv->block_tokens;
    p.scales = n_rows * p.row;
    p.block = p.scales + n_rows * p.scale;
    return p;
}

int32_t attention_pairs_max(const struct attn_args *a)
{
    if (is_naive(a)) return ATTN_NAIVE_ROWS;
    return a->kv.head_dim > ATTN_LONG_KEY ? ATTN_LATENT_PAIRS : ATTN_PAIRS;
}

/* ---- scratch ---- */

enum {                                                 /* floats, each a multiple of 16 */
       EXPANDED_ROW = KERNEL_HEAD_DIM_MAX + 2 * PANEL, /* nope and rope, each filled up */
       STATE_FLOATS = 3 * ATTN_NAIVE_ROWS + ATTN_STEP * ATTN_TILE,
       LATENT_FLOATS = ATTN_LATENT_PAIRS * KERNEL_LATENT_MAX * 2 +
                       ATTN_TILE * KERNEL_LATENT_MAX * 2,
       UPCONVERTED_FLOATS = 2 * ATTN_TILE * KERNEL_HEAD_DIM_MAX,
       HEADS_FLOATS = ATTN_PAIRS * KERNEL_HEAD_DIM_MAX * 2 + ATTN_TILE * KERNEL_HEAD_DIM_MAX * 2 +
                      UPCONVERTED_FLOATS,
       NAIVE_FLOATS = ATTN_NAIVE_ROWS * KERNEL_HEAD_DIM_MAX +
                      ATTN_TILE * (KERNEL_HEAD_DIM_MAX * 2 + KERNEL_LATENT_MAX + EXPANDED_ROW) +
                      GEMM_K * PANEL
};
_Static_assert(
    ATTN_HEADS_PER_ITEM *ATTN_SKINNY_PAIRS *(2 * KERNEL_HEAD_DIM_MAX + ATTN_TILE + 3 * PANEL) +
            UPCONVERTED_FLOATS <=
        HEADS_FLOATS,
    "heads with few pairs share a dequantised tile, so they need no more than one with many");
_Static_assert((int)HEADS_FLOATS <= (int)LATENT_FLOATS,
               "latents need the most of the paths that do not expand");

size_t attention_scratch_bytes(void)
{
    size_t most = (size_t)LATENT_FLOATS > (size_t)NAIVE_FLOATS ? (size_t)LATENT_FLOATS
                                                               : (size_t)NAIVE_FLOATS;
    return (STATE_FLOATS + most) * sizeof(float);
}

static float *take(float **p, size_t n)
{
    float *at = *p;
    *p += padded(n);
    return at;
}

static const float *query(const struct attn_tile_loop *w, int32_t i)
{
    int32_t row = w->seq->q_begin + (w->pair_begin + i) / w->group;
    return w->a->q +
           ((size_t)row * (size_t)w->a->n_heads + (size_t)attention_query_head(w, i)) * w->q_dim;
}

/* Gathers queries with a constant stride; those that have one already stay in place. */
static void gather_queries(struct attn_tile_loop *w, float **scratch)
{
    if (w->group == 1 || w->group == w->a->n_heads) {
        w->q = query(w, 0);
        w->q_stride = w->group == 1 ? (size_t)w->a->n_heads * w->q_dim : w->q_dim;
        return;
    }
    float *q = take(scratch, (size_t)w->n_pairs * w->q_dim);
    for (int32_t i = 0; i < w->n_pairs; i++)
        memcpy(q + (size_t)i * w->q_dim, query(w, i), w->q_dim * sizeof *q);
    w->q = q;
    w->q_stride = w->q_dim;
}

static void round_queries(struct attn_tile_loop *w, float **scratch)
{
    w->q_stride = act_bf16_stride(w->q_dim);
    uint16_t *q = (uint16_t *)take(scratch, (size_t)w->n_pairs * w->q_stride / 2);
    for (int32_t i = 0; i < w->n_pairs; i++)
        w->kernels->bf16->round_bf16(q + (size_t)i * w->q_stride, query(w, i), w->q_dim);
    w->q_bf16 = q;
}

/* Whether keys and values are used straight from the pool. */
static bool is_skinny(const struct attn_tile_loop *w, int32_t n_pairs)
{
    return n_pairs <= ATTN_SKINNY_PAIRS && !is_naive(w->a);
}

void *attention_tile_loop_init(struct attn_tile_loop *w, void *scratch)
{
    const struct attn_args *a = w->a;
    float *p = scratch;
    size_t n = (size_t)w->n_pairs, dim = (size_t)a->kv.head_dim;
    w->q_dim = is_naive(a) ? a->k_up[w->head].n_out + dim - a->k_up[w->head].n_in : dim;
    w->v_stride = padded((size_t)a->v_dim);
    w->n_keys = attention_pair_pos(w, w->n_pairs - 1) + 1;
    w->offsets = attention_kv_block_offsets(&a->kv);
    w->v_offset = a->kv.latent ? 0 : w->offsets.row * (size_t)a->kv.block_tokens;
    w->max = take(&p, n), w->sum = take(&p, n), w->rescale = take(&p, n);
    w->scores = take(&p, min_size(n, ATTN_STEP) * ATTN_TILE);
    if (!is_skinny(w, w->n_pairs)) {
        w->keys = take(&p, w->q_dim * ATTN_TILE);
        w->values = take(&p, w->v_stride * ATTN_TILE);
    }
    w->o = take(&p, n * w->v_stride);
    if (is_naive(a)) {
        w->latent = take(&p, ATTN_TILE * dim);
        w->rows = take(&p, ATTN_TILE * EXPANDED_ROW);
        w->w_panel = take(&p, GEMM_K * PANEL);
    } else if (!is_read_in_place(a->kv.dtype) && !w->upconverted) {
        w->upconverted = take(&p, 2 * ATTN_TILE * dim);
    }
    if (w->use_bf16_scores) round_queries(w, &p);
    else gather_queries(w, &p);
    return p;
}

/* ---- a tile's keys and values ---- */

/* Addresses of n keys from position `begin` on. */
static void find_rows(const struct attn_tile_loop *w, const char *rows[ATTN_TILE], int32_t begin,
                      int32_t n)
{
    const struct kv_layer *kv = &w->a->kv;
    int32_t block = begin / kv->block_tokens, slot = begin % kv->block_tokens;
    size_t parts = kv->latent ? 1 : 2, head = kv->latent ? 0 : (size_t)w->head;
    for (int32_t j = 0; j < n; block++, slot = 0) {
        const char *row = (const char *)kv->data +
                          (size_t)w->seq->block_table[block] * w->offsets.block;
        row += (head * parts * (size_t)kv->block_tokens + (size_t)slot) * w->offsets.row;
        for (int32_t n_here = min_i32(n - j, kv->block_tokens - slot); n_here > 0;
             n_here--, row += w->offsets.row)
            rows[j++] = row;
    }
}

enum { PREFETCH_PER_STEP = 16 };

/* A tile's rows in the pool, and those of the next tile, which are prefetched meanwhile: they are
 * too short for the hardware prefetcher. */
struct attn_kv_tile {
    const char *at[ATTN_TILE], *next_at[ATTN_TILE];
    struct kv_row_ptrs keys, values, next;
    enum dtype dtype; /* of keys and values */
    int32_t begin, n_keys, n_next;
};

/* Prefetches keys [from, to) of the next tile. */
static void prefetch_next(const struct attn_tile_loop *w, const struct attn_kv_tile *t,
                          int32_t from, int32_t to)
{
    for (int32_t j = from; j < to && j < t->n_next; j++)
        for (size_t at = 0; at < w->offsets.row; at += CACHE_LINE) {
            __builtin_prefetch(t->next_at[j] + at);
            if (w->v_offset) __builtin_prefetch(t->next_at[j] + w->v_offset + at);
        }
}

/* Dequantises key and value of a position to rows of f32. */
static void upconvert_row(const struct attn_tile_loop *w, size_t pos, float *key, float *value)
{
    const struct kv_layer *kv = &w->a->kv;
    const struct kv_block_offsets *p = &w->offsets;
    size_t dim = (size_t)kv->head_dim, tokens = (size_t)kv->block_tokens,
           i = 2 * (size_t)w->head * tokens + pos % tokens;
    const char *block = (const char *)kv->data +
                        (size_t)w->seq->block_table[pos / tokens] * p->block,
               *scales = block + p->scales;
    kv_row_load(kv->dtype, block + i * p->row, scales + i * p->scale, key, dim);
    i += tokens;
    kv_row_load(kv->dtype, block + i * p->row, scales + i * p->scale, value, dim);
}

/* Replaces the tile by its dequantised copy, which is cached: nothing needs prefetching. */
static void upconvert_tile(const struct attn_tile_loop *w, struct attn_kv_tile *t)
{
    size_t dim = (size_t)w->a->kv.head_dim;
    for (int32_t j = 0; j < t->n_keys; j++) {
        float *key = w->upconverted + (size_t)j * dim;
        prefetch_next(w, t, j, j + 1);
        upconvert_row(w, (size_t)(t->begin + j), key, key + ATTN_TILE * dim);
        t->at[j] = (const char *)key;
    }
    memcpy(t->next_at, t->at, (size_t)t->n_keys * sizeof *t->at);
    t->values.offset = ATTN_TILE * dim * sizeof(float);
    t->dtype = DTYPE_F32;
    t->n_next = 0;
}

static void find_tile(const struct attn_tile_loop *w, struct attn_kv_tile *t, int32_t begin,
                      int32_t n_keys, const struct attn_tile_loop *next, int32_t next_begin)
{
    *t = (struct attn_kv_tile){
        .dtype = w->a->kv.dtype,
        .begin = begin,
        .n_keys = n_keys,
        .n_next = next_begin < w->n_keys ? min_i32(ATTN_TILE, w->n_keys - next_begin) : 0,
    };
    find_rows(w, t->at, begin, n_keys);
    find_rows(next, t->next_at, next_begin, t->n_next);
    /* there is always an address to prefetch */
    for (int32_t j = t->n_next; j < n_keys; j++) t->next_at[j] = t->at[j];
    t->keys = (struct kv_row_ptrs){ t->at, 0 };
    t->values = (struct kv_row_ptrs){ t->at, w->v_offset };
    t->next = (struct kv_row_ptrs){ t->next_at, 0 };
    if (w->upconverted) upconvert_tile(w, t);
}

static const float ONES[ATTN_TILE] = { [0 ... ATTN_TILE - 1] = 1 };

/* y [n_keys], EXPANDED_ROW floats apart = m times the first n_in elements of each latent. */
static void expand(const struct attn_tile_loop *w, float *y, const struct weight *m, size_t n_keys)
{
    size_t dim = (size_t)w->a->kv.head_dim;
    for (size_t p = 0; p < panel_count(m); p++)
        for (size_t k0 = 0; k0 < m->n_in; k0 += GEMM_K) {
            size_t n_k = min_size(GEMM_K, m->n_in - k0);
            const float *panel = w->w_panel;
            if (m->layout == LAYOUT_F32)
                panel = (const float *)panel_at(m, p,
                                                weight_layout_panel_bytes(LAYOUT_F32, m->n_in)) +
                        k0 * PANEL;
            else w->kernels->gemm->dequantize(w->w_panel, m, p, k0, n_k);
            w->kernels->attention->fma_tile(y + p * PANEL, EXPANDED_ROW, w->latent + k0, dim,
                                            n_keys, panel, 0, 1, n_k, k0 > 0 ? ONES : NULL);
        }
}

static void expand_tile(const struct attn_tile_loop *w, const char *const *rows, size_t n_keys)
{
    const struct attn_args *a = w->a;
    const struct weight *k_up = &a->k_up[w->head], *v_up = &a->v_up[w->head];
    const char *expanded[ATTN_TILE];
    size_t dim = (size_t)a->kv.head_dim, rank = k_up->n_in;
    for (size_t j = 0; j < n_keys; j++) {
        dtype_to_f32(a->kv.dtype, rows[j], w->latent + j * dim, dim);
        expanded[j] = (const char *)(w->rows + j * EXPANDED_ROW);
    }
    expand(w, w->rows, k_up, n_keys);
    for (size_t j = 0; j < n_keys; j++) /* over the padding lanes of the last panel */
        memcpy(w->rows + j * EXPANDED_ROW + k_up->n_out, w->latent + j * dim + rank,
               (dim - rank) * sizeof(float));
    w->kernels->attention->load_keys(w->keys, &(struct kv_row_ptrs){ expanded, 0 }, DTYPE_F32,
                                     n_keys, w->q_dim);
    expand(w, w->rows, v_up, n_keys);
    w->kernels->attention->load_values(w->values, &(struct kv_row_ptrs){ expanded, 0 }, DTYPE_F32,
                                       n_keys, v_up->n_out);
}

static void load_tile(const struct attn_tile_loop *w, const struct attn_kv_tile *t)
{
    const struct kv_layer *kv = &w->a->kv;
    if (is_naive(w->a)) {
        expand_tile(w, t->at, (size_t)t->n_keys);
        return;
    }
    if (w->use_bf16_scores)
        w->kernels->bf16->load_keys_bf16(w->keys, &t->keys, (size_t)t->n_keys,
                                         (size_t)kv->head_dim);
    else
        w->kernels->attention->load_keys(w->keys, &t->keys, t->dtype, (size_t)t->n_keys,
                                         (size_t)kv->head_dim);
    w->kernels->attention->load_values(w->values, &t->values, t->dtype, (size_t)t->n_keys,
                                       (size_t)w->a->v_dim);
}

/* ---- pairs ---- */

/* Softmax and P*V of pairs [i, i + n), which all attend to n_keys of the tile. */
static void add_pairs(const struct attn_tile_loop *w, const struct attn_kv_tile *t, bool skinny,
                      int32_t i, int32_t n, float *scores, int32_t n_keys)
{
    const struct attn_args *a = w->a;
    float *o = w->o + (size_t)i * w->v_stride;
    /* a segment's sums begin with 0 */
    const float *rescale = t->begin % CPU_ATTN_SEGMENT == 0 ? NULL : w->rescale + i;
    w->kernels->attention->online_softmax(scores, (size_t)n, (size_t)n_keys, a->scale, w->max + i,
                                          w->sum + i, w->rescale + i);
    if (skinny)
        w->kernels->attention->accumulate_v_skinny(o, w->v_stride, scores, (size_t)n, &t->values,
                                                   &t->next, t->dtype, (size_t)n_keys,
                                                   (size_t)a->v_dim, rescale);
    else
        w->kernels->attention->fma_tile(o, w->v_stride, scores, ATTN_TILE, (size_t)n, w->values,
                                        ATTN_TILE * PANEL, w->v_stride / PANEL, (size_t)n_keys,
                                        rescale);
}

/* Adds the tile to pairs [low, high), whose scores are computed; pairs with equally many keys go
 * together. */
static void add_tile(const struct attn_tile_loop *w, const struct attn_kv_tile *t, bool skinny,
                     int32_t low, int32_t high)
{
    for (int32_t i = low, n; i < high; i += n) {
        int32_t seen = attention_pair_pos(w, i) + 1 - t->begin;
        n = high - i;
        if (seen < t->n_keys) n = min_i32(n, w->group - (w->pair_begin + i) % w->group);
        add_pairs(w, t, skinny, i, n, w->scores + (i - low) * ATTN_TILE, min_i32(seen, t->n_keys));
    }
}

/* The first pair that attends to position `pos`. */
static int32_t first_pair(const struct attn_tile_loop *w, int32_t pos)
{
    int32_t rows = pos - w->seq->pos_begin;
    if (rows <= 0) return 0;
    int64_t pair = (int64_t)rows * w->group - w->pair_begin;
    return pair < 0 ? 0 : pair < w->n_pairs ? (int32_t)pair : w->n_pairs;
}

/* Scores of few pairs, [low, n_pairs), from keys in the pool. */
static void score_skinny(const struct attn_tile_loop *w, const struct attn_kv_tile *t, int32_t low)
{
    size_t n = (size_t)(w->n_pairs - low), at = (size_t)low * w->q_stride;
    if (w->use_bf16_scores)
        w->kernels->bf16->scores_skinny_bf16(w->scores, w->q_bf16 + at, w->q_stride, n, &t->keys,
                                             &t->values, (size_t)t->n_keys, w->q_dim);
    else
        w->kernels->attention->scores_skinny(w->scores, w->q + at, w->q_stride, n, &t->keys,
                                             &t->values, t->dtype, (size_t)t->n_keys, w->q_dim);
}

/* Scores of pairs [low, high), from the keys that load_tile has arranged. */
static void score_tile(const struct attn_tile_loop *w, const struct attn_kv_tile *t, int32_t low,
                       int32_t high)
{
    size_t n = (size_t)(high - low), at = (size_t)low * w->q_stride,
           n_panels = padded((size_t)t->n_keys) / PANEL;
    if (w->use_bf16_scores)
        w->kernels->bf16->scores_bf16(w->scores, w->q_bf16 + at, w->q_stride, n, w->keys, n_panels,
                                      w->q_dim);
    else
        w->kernels->attention->fma_tile(w->scores, ATTN_TILE, w->q + at, w->q_stride, n, w->keys,
                                        w->q_dim * PANEL, n_panels, w->q_dim, NULL);
}

static void attend_tile(const struct attn_tile_loop *w, const struct attn_kv_tile *t)
{
    int32_t low = first_pair(w, t->begin), high;
    if (is_skinny(w, w->n_pairs - low)) {
        score_skinny(w, t, low);
        add_tile(w, t, true, low, w->n_pairs);
        return;
    }
    load_tile(w, t);
    for (int32_t prefetched = 0; low < w->n_pairs; low = high, prefetched += PREFETCH_PER_STEP) {
        high = min_i32(w->n_pairs, low + ATTN_STEP);
        score_tile(w, t, low, high);
        prefetch_next(w, t, prefetched, prefetched + PREFETCH_PER_STEP);
        add_tile(w, t, false, low, high);
    }
}

int32_t attention_tile_loop_segment(struct attn_tile_loop *w, int32_t n_heads, int32_t segment)
{
    int32_t begin = segment * CPU_ATTN_SEGMENT, end = min_i32(w->n_keys, begin + CPU_ATTN_SEGMENT),
            first = first_pair(w, begin);
    for (int32_t h = 0; h < n_heads; h++)
        for (int32_t i = first; i < w->n_pairs; i++) {
            w[h].max[i] = -INFINITY;
            w[h].sum[i] = 0;
        }
    for (; begin < end; begin += ATTN_TILE)
        for (int32_t h = 0; h < n_heads; h++) {
            struct attn_kv_tile t;
            bool last = h + 1 == n_heads;
            find_tile(&w[h], &t, begin, min_i32(ATTN_TILE, end - begin), last ? w : &w[h + 1],
                      last ? begin + ATTN_TILE : begin);
            attend_tile(&w[h], &t);
        }
    return first;
}
