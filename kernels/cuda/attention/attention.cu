/* attention.cu - lists of rows, and how a call of attention is split into launches and waves of
 * segments; attention.h is the contract.
 *
 * Scratch: counters of arrivals (attention_decode_arrive.cuh); the state of the row that continues
 * from one wave to the next, in two alternating places; (M, L) of every prompt row and head (if
 * there are few); the parts of a wave. Waves keep it small: results of segments are merged into
 * rows wave by wave, in ascending order. Thread:
 * engine. */
#include <string.h>

#include "kernels/cuda/attention/attention_launch.cuh"
#include "kernels/cuda/attention/attention_merge.cuh"
#include "kernels/cuda/attention/attention_segments.cuh"
#include "shared/base/arith.h"

/* Per 4 SMs: as many as run on them at a time; of the kernel of compute capability 9.0, which has
 * one block per SM, a few less, because parts cost as much */
enum { PREFILL_TILES_ENOUGH = 8, PREFILL_SM90_TILES_ENOUGH = 3 };
enum { MERGE_BLOCKS = 8 /* per SM */ };
/* 256 MiB: room in one pass for some thousand segments of all heads; 1,000 for 128 MLA heads */
enum { PARTS_FLOATS_MAX = 1 << 26 };
enum { ARRIVALS_MAX = 1 << 17 }; /* a fixed number: calls of any bounds find them in one place */

cudaError_t attention_grid(size_t n_units, int blocks_per_sm, int max_blocks, dim3 *grid)
{
    int device = 0, n_sms = 0;
    cudaError_t e = cudaGetDevice(&device);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, device);
    if (e != cudaSuccess) return e;
    const size_t enough = max_blocks > 0 ? (size_t)max_blocks : (size_t)(blocks_per_sm * n_sms);
    *grid = dim3((unsigned)(n_units < enough ? n_units : enough));
    return cudaSuccess;
}

/* ---- lists and room ---- */

/* Of a prompt's row. */
static size_t segments_of(size_t n_keys)
{
    return (n_keys + CUDA_ATTN_SEGMENT - 1) / CUDA_ATTN_SEGMENT;
}

/* The most segments that a row of up to n_keys keys has. */
static size_t segments_most(size_t n_keys)
{
    const size_t many = CUDA_ATTN_SEGMENTS_MANY,
                 short_ones = (n_keys + CUDA_ATTN_SEGMENT_LEAST - 1) / CUDA_ATTN_SEGMENT_LEAST;
    return max_size(segments_of(n_keys), min_size(short_ones, many));
}

/* The most segments that a row has which moves by up to n_most: they grow with its position, but
 * fewer and larger ones follow many. */
static int32_t most_segments(const struct attn_seq *seq, int32_t pos, bool is_large)
{
    int32_t most = 0;
    for (int32_t i = 0; i <= seq->n_most; i++) {
        const int32_t n = seq->is_decode && !is_large ? decode_segment(pos + i + 1)
                                                      : CUDA_ATTN_SEGMENT;
        most = max_i32(most, (pos + i) / n + 1);
    }
    return most;
}

static void number_seq(struct cuda_attn_counts *counts, const struct attn_seq *seq, int32_t i_seq,
                       bool is_large, struct cuda_attn_row *rows)
{
    for (int32_t i = 0; i < seq->n_q; i++) {
        const int32_t pos = seq->pos_begin + i,
                      n = seq->is_decode && !is_large ? decode_segment(pos + 1) : CUDA_ATTN_SEGMENT;
        const struct cuda_attn_row row = {
            seq->q_begin + i, pos, i_seq, counts->n_segments, 0, n, 0, 0
        };
        if (rows) rows[counts->n_rows] = row;
        counts->n_rows++;
        counts->n_segments += most_segments(seq, pos, is_large);
    }
    counts->n_rows_seq = max_i32(counts->n_rows_seq, seq->n_q);
    if (seq->n_q > 0)
        counts->n_keys_max = max_i32(counts->n_keys_max, seq->pos_begin + seq->n_most + seq->n_q);
    if (seq->n_q > 0 && !seq->is_decode)
        counts->n_keys_prefill = max_i32(counts->n_keys_prefill, seq->pos_begin + seq->n_q);
}

/* The number of positions from 0 on, up to n, that two sequences have in the same blocks. */
static int32_t n_in_common(const struct attn_seq *a, const struct attn_seq *b, int32_t n,
                           int32_t block_tokens)
{
    int32_t n_blocks = 0;
    while (n_blocks * block_tokens < n && a->block_table[n_blocks] == b->block_table[n_blocks])
        n_blocks++;
    return n_blocks * block_tokens < n ? n_blocks * block_tokens : n;
}

/* Finds the segments that neighbouring rows share. LIMIT: other rows are not compared. */
static void find_shared(const struct attn_seq *seqs, int32_t n_rows, int32_t block_tokens,
                        struct cuda_attn_row *rows)
{
    for (int32_t i = 1; i < n_rows; i++) {
        const struct cuda_attn_row *before = &rows[i - 1];
        const int32_t n = before->pos < rows[i].pos ? before->pos + 1 : rows[i].pos + 1;
        if (n < rows[i].per_segment || before->per_segment != rows[i].per_segment) continue;
        rows[i].shared = (before->seq == rows[i].seq
                              ? n
                              : n_in_common(&seqs[before->seq], &seqs[rows[i].seq], n,
                                            block_tokens)) /
                         rows[i].per_segment;
    }
}

/* In a step of one row per sequence each writes the key of its own position alone, and computes the
 * segment that has it alone. */
static void find_old(const struct attn_seq *seqs, int32_t n_seqs, int32_t n_rows,
                     struct cuda_attn_row *rows)
{
    for (int32_t i = 0; i < n_seqs; i++)
        if (seqs[i].n_q > 1 || (seqs[i].n_q == 1 && !seqs[i].is_decode)) return;
    for (int32_t i = 0; i < n_rows; i++) {
        const int32_t n = i > 0 ? min_i32(rows[i - 1].pos, rows[i].pos) : 0;
        rows[i].n_old = rows[i].pos;
        rows[i].shared = min_i32(rows[i].shared, n / rows[i].per_segment);
    }
}

extern "C" void attention_list_rows(struct cuda_attn_counts *counts, const struct attn_seq *seqs,
                                    int32_t n_seqs, int32_t block_tokens, bool is_large,
                                    struct cuda_attn_row *rows)
{
    memset(counts, 0, sizeof *counts);
    for (int32_t i = 0; i < n_seqs; i++)
        if (seqs[i].is_decode) number_seq(counts, &seqs[i], i, is_large, rows);
    if (rows) find_shared(seqs, counts->n_rows, block_tokens, rows);
    if (rows) find_old(seqs, n_seqs, counts->n_rows, rows);
    counts->n_decode = counts->n_rows;
    counts->n_segments_decode = counts->n_segments;
    for (int32_t i = 0; i < n_seqs; i++)
        if (!seqs[i].is_decode) number_seq(counts, &seqs[i], i, is_large, rows);
    counts->n_prefill = counts->n_rows - counts->n_decode;
}

/* Floats of the state. With less room than one segment of every row and head at a time, rows are
 * not split and need no state. */
static size_t state_floats(size_t n_rows, size_t n_heads, size_t v_dim)
{
    /* parts are aligned to 16 bytes */
    return ARRIVALS_MAX + 2 * n_heads * merge_state_floats((int)v_dim) +
           (2 * min_size(n_rows * n_heads, PARTS_FLOATS_MAX / part_floats((int)v_dim)) + 3) / 4 * 4;
}

extern "C" size_t attention_scratch_floats(size_t n_rows, size_t n_heads, size_t v_dim,
                                           size_t n_keys)
{
    const size_t per_item = n_heads * part_floats((int)v_dim),
                 items = n_rows * segments_most(n_keys);
    return state_floats(n_rows, n_heads, v_dim) + min_size(items * per_item, PARTS_FLOATS_MAX);
}

extern "C" cudaError_t attention_scratch_prepare(cudaStream_t stream, float *scratch)
{
    return cudaMemsetAsync(scratch, 0, ARRIVALS_MAX * sizeof(unsigned), stream);
}

/* The state of the row that goes on, of even and odd waves; behind both that of prompts. */
static float *state_of(const struct attention *a, int32_t parity)
{
    return a->scratch + ARRIVALS_MAX +
           (size_t)parity * (size_t)a->n_heads * merge_state_floats(a->v_dim);
}

static float *parts_of(const struct attention *a)
{
    return a->scratch +
           state_floats((size_t)a->on->bounds.n_rows, (size_t)a->n_heads, (size_t)a->v_dim);
}

/* Segments of all heads that fit the parts at a time. */
static size_t parts_capacity(const struct attention *a)
{
    return PARTS_FLOATS_MAX / ((size_t)a->n_heads * part_floats(a->v_dim));
}

/* ---- rows one by one ---- */

static cudaError_t merge_launch(cudaStream_t stream, const struct attention *a,
                                const struct merge_call &m, int32_t n_rows)
{
    dim3 grid;
    cudaError_t e = attention_grid((size_t)n_rows * (size_t)m.n_heads, MERGE_BLOCKS, a->max_blocks,
                                   &grid);
    return e == cudaSuccess ? launch(stream, merge_segments, grid, dim3(MERGE_THREADS), 0, m) : e;
}

/* Counters for blocks that merge what they compute, which saves a launch, where all of them run at
 * a time. Otherwise a launch does, with the same bits: the last of several segments of a block
 * keeps the others waiting for longer (16 rows of 32k on an H200: 0.59 of reading, against 0.82),
 * and so do the long rows of MLA. */
static unsigned *arrivals_of(const struct attention *a, int32_t n_rows, int32_t n_items)
{
    const size_t n = 2 * (size_t)n_rows + (size_t)n_items / MERGE_GROUP + 1;
    return 2 * n * (size_t)a->n_heads <= ARRIVALS_MAX &&
                   attention_decode_mma_is_one_wave(a, n_items)
               ? (unsigned *)a->scratch
               : NULL;
}

/* Whether the launch that attends appends too: of rows that do not wait for each other's keys. */
static bool appends_itself(const struct attention *a)
{
    const struct cuda_attn_counts *bounds = &a->on->bounds;
    return a->append && bounds->n_prefill == 0 && bounds->n_rows_seq <= 1 &&
           attention_decode_mma_appends(a);
}

static struct attn_decode_append append_of(const struct attention_append *a)
{
    const struct rope_args *r = a->rope;
    const struct attn_decode_append append = {
        a->k, a->v, r->heads[0].norm, r->heads[1].norm, r->cos_sin, r->norm_eps, r->interleaved
    };
    return append;
}

/* Runs decode for at most n_rows rows with n_items segments. */
static cudaError_t run_decode(cudaStream_t stream, const struct attention *a,
                              enum attn_row_kind which, int32_t n_rows, int32_t n_items)
{
    const struct attn_row_set list = attn_row_set_of(a->on, which);
    float *parts = parts_of(a);
    struct attn_decode_call c = { a->kv,      list,     a->q,
                                  a->out,     parts,    NULL,
                                  a->n_heads, a->v_dim, a->n_heads / a->kv.n_heads,
                                  n_rows,     1,        0,
                                  0,          false,    a->scale,
                                  {} };
    struct merge_call m = { list, a->out, parts, NULL, NULL, 0, a->n_heads, a->v_dim, 0, 0 };
    const int32_t wave = (int32_t)min_size(parts_capacity(a),
                                           (size_t)(a->n_at_once > 0 ? a->n_at_once : n_items));
    cudaError_t (*how)(cudaStream_t, const struct attn_decode_call *,
                       int) = attention_decode_launch;
    if (attention_mla_decode_supports(a)) how = attention_mla_decode_launch;
    else if (which == ATTN_ROWS_DECODE && attention_decode_mma_supports(a))
        how = attention_decode_mma_launch;
    if (appends_itself(a)) c.append = append_of(a->append);
    c.is_all = wave >= n_items;
    if (c.is_all && how == attention_decode_mma_launch)
        c.arrivals = arrivals_of(a, n_rows, n_items);
    for (int32_t parity = 0; m.end < n_items; parity ^= 1) {
        m.begin = c.item_begin = m.end;
        m.end = c.item_end = n_items - m.begin < wave ? n_items : m.begin + wave;
        m.before = state_of(a, parity);
        m.after = state_of(a, 1 - parity);
        cudaError_t e = how(stream, &c, a->max_blocks);
        if (e == cudaSuccess && n_items > n_rows && !c.arrivals)
            e = merge_launch(stream, a, m, n_rows);
        if (e != cudaSuccess) return e;
    }
    return cudaSuccess;
}

/* ---- prompts in tiles ---- */

static int32_t rows_per_tile(const struct attention *a, int32_t n_sets)
{
    return n_sets * PREFILL_PAIRS / (a->n_heads / a->kv.n_heads);
}

static int32_t windows_of(const struct attention *a, int32_t n_rows, int32_t n_sets)
{
    return (int32_t)blocks_for((size_t)n_rows, (size_t)rows_per_tile(a, n_sets));
}

/* Chooses how many segments run at a time, each in separate blocks; 0: not split, because there are
 * enough tiles for the GPU. */
static cudaError_t choose_split(const struct attention *a, const struct cuda_attn_counts *bounds,
                                int32_t *n_at_once)
{
    const size_t fit = parts_capacity(a) / (size_t)bounds->n_prefill,
                 n_segments = segments_of((size_t)bounds->n_keys_prefill);
    int device = 0, n_sms = 0;
    *n_at_once = 0;
    if (n_segments < 2 || fit < 2) return cudaSuccess;
    cudaError_t e = cudaGetDevice(&device);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, device);
    if (e != cudaSuccess) return e;
    const bool sm90 = attention_prefill_sm90_supports(&a->kv);
    const int enough = sm90 ? PREFILL_SM90_TILES_ENOUGH : PREFILL_TILES_ENOUGH;
    if (a->n_at_once > 0 ||
        4 * windows_of(a, bounds->n_prefill, sm90 ? PREFILL_SETS_MAX : 1) * a->kv.n_heads <
            enough * n_sms)
        *n_at_once = (int32_t)min_size(min_size(fit, n_segments),
                                       a->n_at_once > 0 ? (size_t)a->n_at_once : SIZE_MAX);
    return cudaSuccess;
}

extern "C" bool attention_leaves_bf16(const struct attention *a)
{
    const struct cuda_attn_counts *bounds = &a->on->bounds;
    int32_t wave = 0;
    return bounds->n_prefill > 0 && bounds->n_decode == 0 && attention_prefill_supports(a) &&
           attention_prefill_sm90_supports(&a->kv) &&
           choose_split(a, bounds, &wave) == cudaSuccess && wave == 0;
}

/* Whether queries are rotated into bf16, which the kernel of compute capability 9.0 would round
 * them to: half of the bytes to write and read. */
static bool rounds_queries(const struct attention *a)
{
    const struct cuda_attn_counts *bounds = &a->on->bounds;
    return bounds->n_prefill > 0 && bounds->n_decode == 0 && attention_prefill_supports(a) &&
           attention_prefill_sm90_supports(&a->kv) && attention_append_leaves_bf16(a);
}

static cudaError_t run_prefill(cudaStream_t stream, const struct attention *a)
{
    const struct cuda_attn_counts *bounds = &a->on->bounds;
    const struct attn_row_set list = attn_row_set_of(a->on, ATTN_ROWS_PREFILL);
    const int32_t n_segments = (int32_t)segments_of((size_t)bounds->n_keys_prefill);
    float *state = state_of(a, 2), *parts = parts_of(a);
    struct attn_prefill_call c = { a->kv, list, a->q, a->out,   parts,       a->n_heads,       1,
                                   0,     0,    0,    a->scale, a->out_bf16, rounds_queries(a) };
    struct merge_call m = { list,       a->out,   parts, state, state, 2 * (size_t)a->n_heads,
                            a->n_heads, a->v_dim, 0,     0 };
    int32_t wave = 0;
    cudaError_t e = choose_split(a, bounds, &wave);
    if (e == cudaSuccess) e = attention_prefill_sets(a, bounds->n_prefill, wave, &c.n_sets);
    c.rows_per_tile = rows_per_tile(a, c.n_sets);
    const int32_t n_windows = windows_of(a, bounds->n_prefill, c.n_sets);
    if (e != cudaSuccess || wave == 0)
        return e != cudaSuccess ? e
                                : attention_prefill_launch(stream, &c, n_windows, a->max_blocks);
    while (e == cudaSuccess && m.end < n_segments) {
        m.begin = c.segment_begin = m.end;
        m.end = n_segments - m.begin < wave ? n_segments : m.begin + wave;
        c.n_at_once = m.end - m.begin;
        e = attention_prefill_launch(stream, &c, n_windows, a->max_blocks);
        if (e == cudaSuccess) e = merge_launch(stream, a, m, bounds->n_prefill);
    }
    return e;
}

extern "C" cudaError_t attention_run(cudaStream_t stream, const struct attention *a)
{
    const struct cuda_attn_counts *bounds = &a->on->bounds;
    if (!attention_supports_kv(&a->kv)) return cudaErrorInvalidValue;
    if (bounds->n_rows <= 0) return cudaSuccess;
    cudaError_t e = cudaSuccess;
    if (rounds_queries(a)) e = attention_append_leaving_bf16(stream, a);
    else if (a->append && !appends_itself(a))
        e = attention_kv_append(stream, &a->kv, a->on, a->append->k, a->append->v, a->append->rope);
    if (e == cudaSuccess && !attention_prefill_supports(a))
        return run_decode(stream, a, ATTN_ROWS_ALL, bounds->n_rows, bounds->n_segments);
    if (e == cudaSuccess && bounds->n_decode > 0)
        e = run_decode(stream, a, ATTN_ROWS_DECODE, bounds->n_decode, bounds->n_segments_decode);
    return e == cudaSuccess && bounds->n_prefill > 0 ? run_prefill(stream, a) : e;
}

/* ---- capture ---- */

extern "C" void attention_capture_bounds(const struct attention *shape, int32_t n_rows,
                                         int32_t n_decode, int32_t n_prefill, int32_t n_keys,
                                         struct cuda_attn_counts *bounds)
{
    const size_t room = parts_capacity(shape), n_segments = segments_most((size_t)n_keys),
                 fit = n_prefill > 0 ? room / (size_t)n_prefill : 0;
    bounds->n_rows = n_rows;
    bounds->n_decode = n_decode;
    bounds->n_prefill = n_prefill;
    bounds->n_segments = (int32_t)min_size(room, (size_t)n_rows * n_segments);
    bounds->n_segments_decode = (int32_t)min_size(room, (size_t)n_decode * n_segments);
    bounds->n_keys_max = n_keys;
    bounds->n_rows_seq = n_prefill > 0 || shape->kv.latent ? n_rows : 1;
    /* If segments are split over blocks, `fit` of them run at a time. */
    bounds->n_keys_prefill = n_prefill > 0
                                 ? (int32_t)(fit >= 2
                                                 ? min_size((size_t)n_keys, fit * CUDA_ATTN_SEGMENT)
                                                 : (size_t)n_keys)
                                 : 0;
    /* prompts' segments are not listed per row */
    if (attention_prefill_supports(shape)) bounds->n_segments = n_rows * (int32_t)n_segments;
}

extern "C" bool attention_fits_capture(const struct cuda_attn_counts *bounds,
                                       const struct cuda_attn_counts *counts)
{
    return counts->n_rows <= bounds->n_rows && counts->n_decode <= bounds->n_decode &&
           counts->n_prefill <= bounds->n_prefill && counts->n_segments <= bounds->n_segments &&
           counts->n_segments_decode <= bounds->n_segments_decode &&
           counts->n_keys_max <= bounds->n_keys_max &&
           counts->n_keys_prefill <= bounds->n_keys_prefill &&
           counts->n_rows_seq <= bounds->n_rows_seq;
}
