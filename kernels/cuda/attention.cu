/* attention.cu - appending to the pool, and how a call of attention is split into waves of segments; attention.h is the contract.
 *
 * Scratch: (M, L) of the row that goes on from one wave to the next, in two places that take turns, then (M, L) of every prompt row and head
 * (where they are few), then the parts of a wave. Waves make it small: results of segments are merged into rows wave by wave, in ascending
 * order. Thread: engine. */
#include "kernels/cuda/attention_calls.cuh"
#include "kernels/cuda/attention_merge.cuh"

enum { APPEND_THREADS = 128, SIDE = 4 };
enum { TILES_ENOUGH = 2 /* per processor: as many as run on it at a time */ };
enum { PARTS_FLOATS_MAX = 1 << 24 }; /* 64 MiB: some thousand segments of all heads, more blocks than a card has room for */

/* ---- appending ---- */

struct append_call {
    struct kv_layer        kv;
    const struct cuda_seq *seqs;
    const struct cuda_row *rows;
    const int32_t         *tables;
    const float           *k, *v;
};

static __device__ __forceinline__ void store_4(uint16_t *to, float4 x) { *(uint2 *)to = make_uint2(pack_bf16(x.x, x.y), pack_bf16(x.z, x.w)); }
static __device__ __forceinline__ void store_4(float *to, float4 x) { *(float4 *)to = x; }
static __device__ __forceinline__ void store_1(uint16_t *to, float x) { *to = float_to_bf16(x); }
static __device__ __forceinline__ void store_1(float *to, float x) { *to = x; }

/* One block per row: its keys and values into the pool. Bound by writing them. */
template <class T, bool BY_4> static __global__ void __launch_bounds__(APPEND_THREADS) append_rows(const struct append_call c)
{
    const struct cuda_row row = c.rows[blockIdx.x];
    const int32_t        *table = c.tables + c.seqs[row.seq].table;
    const int             dim = c.kv.head_dim, n = c.kv.n_heads * dim, step = BY_4 ? SIDE : 1;
    for (int part = 0; part < (c.kv.latent ? 1 : 2); part++) {
        const float *from = (part ? c.v : c.k) + (size_t)row.row * (size_t)n;
        for (int i = (int)threadIdx.x * step; i < n; i += APPEND_THREADS * step) {
            char *to = (char *)c.kv.data + key_place(c.kv, table, row.pos, i / dim) + (size_t)part * value_part(c.kv);
            if (BY_4) store_4((T *)to + i % dim, *(const float4 *)(from + i));
            else store_1((T *)to + i % dim, from[i]);
        }
    }
}

extern "C" cudaError_t attention_append(cudaStream_t stream, const struct kv_layer *kv, const struct cuda_list *on, const float *k, const float *v)
{
    const struct append_call c = { *kv, on->seqs, on->rows, on->tables, k, v };
    const dim3               grid((unsigned)on->n_rows), block(APPEND_THREADS);
    const bool               by_4 = kv->head_dim % SIDE == 0;
    if (on->n_rows <= 0) return cudaSuccess;
    void (*const kernel)(struct append_call) = kv->dtype == DTYPE_F32 ? (by_4 ? append_rows<float, true> : append_rows<float, false>)
                                                                      : (by_4 ? append_rows<uint16_t, true> : append_rows<uint16_t, false>);
    return launch(stream, kernel, grid, block, 0, c);
}

/* ---- lists and room ---- */

static size_t segments_of(size_t n_keys) { return (n_keys + ATTENTION_SEGMENT - 1) / ATTENTION_SEGMENT; }

static void number_seq(struct cuda_list *list, const struct attn_seq *seq, int32_t i_seq, struct cuda_row *rows)
{
    for (int32_t i = 0; i < seq->n_q; i++) {
        const int32_t pos = seq->pos_begin + i;
        const struct cuda_row row = { seq->q_begin + i, pos, i_seq, list->n_segments };
        rows[list->n_rows++] = row;
        list->n_segments += pos / ATTENTION_SEGMENT + 1;
    }
    if (seq->n_q > list->n_q_max) list->n_q_max = seq->n_q;
    if (seq->n_q > 0 && seq->pos_begin + seq->n_q > list->n_keys_max) list->n_keys_max = seq->pos_begin + seq->n_q;
}

extern "C" void attention_list_rows(struct cuda_list *list, const struct attn_seq *seqs, int32_t n_seqs, struct cuda_row *rows)
{
    list->n_seqs = n_seqs;
    list->n_rows = list->n_q_max = list->n_keys_max = list->n_segments = 0;
    for (int32_t i = 0; i < n_seqs; i++)
        if (seqs[i].generated) number_seq(list, &seqs[i], i, rows);
    list->n_generated = list->n_rows;
    list->n_segments_generated = list->n_segments;
    for (int32_t i = 0; i < n_seqs; i++)
        if (!seqs[i].generated) number_seq(list, &seqs[i], i, rows);
}

static size_t min_size(size_t a, size_t b) { return a < b ? a : b; }

/* One segment of every row and head at a time at least: otherwise rows are not spread over blocks, and need no state. */
static size_t state_floats(size_t n_rows, size_t n_heads, size_t v_dim)
{
    return 4 * n_heads + 2 * min_size(n_rows * n_heads, PARTS_FLOATS_MAX / part_floats((int)v_dim));
}

extern "C" size_t attention_scratch_floats(size_t n_rows, size_t n_heads, size_t v_dim, size_t n_keys)
{
    const size_t per_item = n_heads * part_floats((int)v_dim), items = n_rows * segments_of(n_keys);
    return state_floats(n_rows, n_heads, v_dim) + min_size(items * per_item, PARTS_FLOATS_MAX);
}

static float *parts_of(const struct attention *a) { return a->scratch + state_floats((size_t)a->on->n_rows, (size_t)a->n_heads, (size_t)a->v_dim); }

/* ---- rows one by one ---- */

static cudaError_t merge_launch(cudaStream_t stream, const struct merge_call &m)
{
    const unsigned per_row = blocks_for((size_t)m.n_heads, MERGE_WARPS);
    return launch(stream, merge_segments, dim3((unsigned)m.n_rows * per_row), dim3(MERGE_WARPS * WARP), 0, m);
}

static cudaError_t run_rows(cudaStream_t stream, const struct attention *a, int32_t n_rows, int32_t n_items)
{
    const struct cuda_list *on = a->on;
    float       *parts = parts_of(a);
    const size_t room = PARTS_FLOATS_MAX / ((size_t)a->n_heads * part_floats(a->v_dim));
    struct rows_call  c = { a->kv, on->seqs, on->rows, on->tables, a->q, a->out, parts, n_rows, a->n_heads, a->v_dim, 1, 0, a->scale };
    struct merge_call m = { on->rows, a->out, parts, NULL, NULL, 0, n_rows, a->n_heads, a->v_dim, true, 0, 0 };
    const int32_t wave = (int32_t)min_size(room, (size_t)(a->n_at_once > 0 ? a->n_at_once : n_items));
    const bool    by_latents = attention_latents_fit(a);
    for (int32_t turn = 0; m.end < n_items; turn ^= 1) {
        m.begin = c.item_begin = m.end;
        m.end = n_items - m.begin < wave ? n_items : m.begin + wave;
        m.before = a->scratch + 2 * a->n_heads * turn;
        m.after = a->scratch + 2 * a->n_heads * (1 - turn);
        cudaError_t e = by_latents ? attention_latents_launch(stream, &c, m.end - m.begin) : attention_rows_launch(stream, &c, m.end - m.begin);
        if (e == cudaSuccess && n_items > n_rows) e = merge_launch(stream, m);
        if (e != cudaSuccess) return e;
    }
    return cudaSuccess;
}

/* ---- prompts in tiles ---- */

/* Segments at a time, each in blocks of its own; 0: as many tiles as the card has room for without. */
static cudaError_t choose_spread(const struct attention *a, int32_t n_rows, int32_t n_tiles, int32_t n_segments, int32_t *n_at_once)
{
    const size_t fit = PARTS_FLOATS_MAX / ((size_t)n_rows * (size_t)a->n_heads * part_floats(a->v_dim));
    int device = 0, n_processors = 0;
    *n_at_once = 0;
    if (n_segments < 2 || fit == 0) return cudaSuccess;
    cudaError_t e = cudaGetDevice(&device);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&n_processors, cudaDevAttrMultiProcessorCount, device);
    if (e != cudaSuccess) return e;
    if (a->n_at_once > 0 || n_tiles < TILES_ENOUGH * n_processors)
        *n_at_once = (int32_t)min_size(min_size(fit, (size_t)n_segments), a->n_at_once > 0 ? (size_t)a->n_at_once : SIZE_MAX);
    return cudaSuccess;
}

static cudaError_t run_tiles(cudaStream_t stream, const struct attention *a)
{
    const struct cuda_list *on = a->on;
    const struct cuda_row  *rows = on->rows + on->n_generated;
    const int32_t n_rows = on->n_rows - on->n_generated, n_segments = (int32_t)segments_of((size_t)on->n_keys_max);
    const int32_t per_tile = TILE_PAIRS / (a->n_heads / a->kv.n_heads), n_windows = (n_rows + per_tile - 1) / per_tile;
    float *state = a->scratch + 4 * a->n_heads, *parts = parts_of(a);
    struct tiles_call c = { a->kv, on->seqs, rows, on->tables, a->q, a->out, parts, n_rows, a->n_heads, per_tile, n_windows, 0, 0, a->scale };
    struct merge_call m = { rows, a->out, parts, state, state, 2 * (size_t)a->n_heads, n_rows, a->n_heads, a->v_dim, false, 0, 0 };
    int32_t wave;
    cudaError_t e = choose_spread(a, n_rows, n_windows * a->kv.n_heads, n_segments, &wave);
    if (e != cudaSuccess || wave == 0) return e != cudaSuccess ? e : attention_tiles_launch(stream, &c);
    while (e == cudaSuccess && m.end < n_segments) {
        m.begin = c.segment_begin = m.end;
        m.end = n_segments - m.begin < wave ? n_segments : m.begin + wave;
        c.n_at_once = m.end - m.begin;
        e = attention_tiles_launch(stream, &c);
        if (e == cudaSuccess) e = merge_launch(stream, m);
    }
    return e;
}

extern "C" cudaError_t attention_run(cudaStream_t stream, const struct attention *a)
{
    const struct cuda_list *on = a->on;
    if (on->n_rows <= 0) return cudaSuccess;
    if (!attention_tiles_fit(a)) return run_rows(stream, a, on->n_rows, on->n_segments);
    cudaError_t e = on->n_generated > 0 ? run_rows(stream, a, on->n_generated, on->n_segments_generated) : cudaSuccess;
    return e == cudaSuccess && on->n_generated < on->n_rows ? run_tiles(stream, a) : e;
}
