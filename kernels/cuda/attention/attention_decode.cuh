/* attention_decode.cuh - decode attention (split-KV): one segment of one query row, for all query
 * heads of a KV head (HEADS at a time). For few rows, long contexts, any shape.
 *
 * Work items are (row, segment) of the list, in the order of struct cuda_attn_row.segment, times
 * runs of heads. Results of rows with one segment are final; others go to `parts` for
 * attention_merge.cuh. Bound by reading K and V once; latent pools with many heads by arithmetic.
 * docs/kernels.md has the phases. Thread: device. */
#ifndef BATON_KERNELS_CUDA_ATTENTION_ATTENTION_DECODE_CUH
#define BATON_KERNELS_CUDA_ATTENTION_ATTENTION_DECODE_CUH

#include "kernels/cuda/attention/attention_paged_kv.cuh"

enum {
    ATTN_DECODE_THREADS = 256,
    ATTN_DECODE_WARPS = ATTN_DECODE_THREADS / WARP,
    KEYS = 4,
    ATTN_DECODE_BLOCKS = 4 /* per SM */
};

/* For a kernel that appends the keys and values of the list's rows, each the only one of its
 * sequence: heads before their norm and rotation, which takes all elements of a head. */
struct attn_decode_append {
    const float *k, *v; /* [rows, kv heads, head_dim]; k NULL: the pool has them, q is rotated */
    const float *q_norm, *k_norm; /* [head_dim]; both NULL: none */
    const float *cos_sin;         /* as in struct rope_args */
    float norm_eps;
    bool interleaved;
};

struct attn_decode_call {
    struct kv_layer kv;
    struct attn_row_set list;
    const float *q;
    float *out, *parts;
    unsigned *arrivals; /* zeros; NULL: the blocks do not merge */
    int32_t n_heads, v_dim;
    int32_t group;                /* query heads of a KV head */
    int32_t n_rows;               /* at most */
    int32_t n_runs;               /* of HEADS query heads per kv head */
    int32_t item_begin, item_end; /* the wave's of (row, segment), as far as there
                                   * are */
    bool is_all;                  /* one wave is all: there is room for the parts of
                                   * any of its rows */
    float scale;
    struct attn_decode_append append;
};

/* What a block works on, the same in all threads. */
struct attn_decode_block {
    struct cuda_attn_row row;
    int list_row, item, of_item;    /* of_item: the item's kv_head and run */
    int kv_head, head, n_heads;     /* query heads head .. head + n_heads */
    int segment, first_key, n_keys; /* of the segment; the position of its first key */
    int chunks, v_chunks, v_stride; /* of a key, of a value, and that rounded up to a
                                     * power of two */
};

/* The block's shared memory. Queries lie as [head][first or second half of a chunk][chunk][4]:
 * lanes read 16 bytes each, side by side. */
struct attn_decode_shared {
    size_t *offsets; /* [CUDA_ATTN_SEGMENT] */
    float *q;        /* [HEADS][chunks * CHUNK] */
    float *p;        /* [HEADS][CUDA_ATTN_SEGMENT] scores, then weights */
    float *sums;     /* [ATTN_DECODE_THREADS][CHUNK] */
    float *m, *l;    /* [HEADS] */
    float *scales;   /* [k, v][CUDA_ATTN_SEGMENT], of types that have them */
};

template <enum dtype T>
static __host__ __device__ __forceinline__ size_t attn_decode_shared_bytes(int heads, int dim)
{
    const size_t chunks = (size_t)(dim + CHUNK - 1) / CHUNK, h = (size_t)heads,
                 n_scales = kv_traits<T>::SCALED ? 2 * CUDA_ATTN_SEGMENT : 0;
    return CUDA_ATTN_SEGMENT * sizeof(size_t) + (h * chunks * CHUNK + h * CUDA_ATTN_SEGMENT +
                                                 ATTN_DECODE_THREADS * CHUNK + 2 * h + n_scales) *
                                                    sizeof(float);
}

static __device__ __forceinline__ struct attn_decode_shared attn_decode_shared_of(int heads,
                                                                                  int chunks)
{
    struct attn_decode_shared s;
    s.offsets = (size_t *)shared_memory();
    s.q = (float *)(s.offsets + CUDA_ATTN_SEGMENT);
    s.p = s.q + heads * chunks * CHUNK;
    s.sums = s.p + heads * CUDA_ATTN_SEGMENT;
    s.m = s.sums + ATTN_DECODE_THREADS * CHUNK;
    s.l = s.m + heads;
    s.scales = s.l + heads;
    return s;
}

/* The row with rows[i].segment <= item < rows[i + 1].segment, by a whole warp: 32 places are looked
 * at in one step. */
static __device__ __forceinline__ int row_of_item(const struct cuda_attn_row *rows, int n_rows,
                                                  int item)
{
    int low = 0, high = n_rows;
    while (high - low > 1) {
        const int step = (high - low + WARP - 1) / WARP,
                  at = low + (int)(threadIdx.x % WARP) * step;
        const int n = __popc(__ballot_sync(0xffffffffu, at < high && rows[at].segment <= item));
        low += (n - 1) * step;
        high = min(high, low + step);
    }
    return low;
}

/* Blocks' worth of work that the wave has. */
static __device__ __forceinline__ int attn_decode_n_units(const struct attn_decode_call &c)
{
    return (min(c.item_end, attn_row_set_segments(c.list)) - c.item_begin) * c.kv.n_heads *
           c.n_runs;
}

/* The item of a unit. */
static __device__ __forceinline__ int attn_decode_item(const struct attn_decode_call &c, int unit)
{
    return c.item_begin + unit / (c.kv.n_heads * c.n_runs);
}

/* A unit whose row is the list's list_row-th. */
static __device__ __forceinline__ struct attn_decode_block attn_decode_block_in(
    const struct attn_decode_call &c, int heads, int unit, int list_row,
    const struct cuda_attn_row &row)
{
    struct attn_decode_block b;
    b.item = attn_decode_item(c, unit);
    const int per_item = c.kv.n_heads * c.n_runs, at = unit - (b.item - c.item_begin) * per_item;
    b.list_row = list_row;
    b.row = row;
    b.of_item = at;
    b.kv_head = c.n_runs == 1 ? at : at / c.n_runs;
    b.head = b.kv_head * c.group + (at - b.kv_head * c.n_runs) * heads;
    b.n_heads = min(heads, (b.kv_head + 1) * c.group - b.head);
    b.segment = b.item - b.row.segment;
    b.first_key = b.segment * b.row.per_segment;
    b.n_keys = min(b.row.per_segment, b.row.pos + 1 - b.first_key);
    b.chunks = (c.kv.head_dim + CHUNK - 1) / CHUNK;
    b.v_chunks = (c.v_dim + CHUNK - 1) / CHUNK;
    for (b.v_stride = 1; b.v_stride < b.v_chunks;) b.v_stride *= 2;
    return b;
}

static __device__ __forceinline__ struct attn_decode_block attn_decode_block_of(
    const struct attn_decode_call &c, int heads, int unit)
{
    const int at = row_of_item(c.list.rows, attn_row_set_n(c.list), attn_decode_item(c, unit));
    return attn_decode_block_in(c, heads, unit, at, c.list.rows[at]);
}

template <enum dtype T, int HEADS>
static __device__ __forceinline__ void attn_decode_prepare(const struct attn_decode_call &c,
                                                           const struct attn_decode_block &b,
                                                           const struct attn_decode_shared &s)
{
    const int tid = (int)threadIdx.x, dim = c.kv.head_dim, padded = b.chunks * CHUNK;
    const int32_t *table = c.list.tables + b.row.table;
    const float *q = c.q + ((size_t)b.row.row * (size_t)c.n_heads + (size_t)b.head) * (size_t)dim;
    for (int j = tid; j < b.n_keys; j += ATTN_DECODE_THREADS) {
        s.offsets[j] = kv_key_offset<T>(c.kv, table, b.first_key + j, b.kv_head);
        if constexpr (kv_traits<T>::SCALED) {
            const struct kv_paged_row r = kv_key_row(c.kv, table, b.first_key + j, b.kv_head);
            const char *scale = (const char *)c.kv.data + kv_scale_offset<T>(c.kv, r);
            s.scales[j] = load_scale(scale);
            s.scales[CUDA_ATTN_SEGMENT + j] = load_scale(scale +
                                                         (size_t)c.kv.block_tokens * sizeof(float));
        }
    }
    for (int i = tid; i < HEADS * padded; i += ATTN_DECODE_THREADS) {
        const int h = i / padded, d = i % padded;
        s.q[((h * 2 + d / 4 % 2) * b.chunks + d / CHUNK) * 4 + d % 4] =
            h < b.n_heads && d < dim ? q[(size_t)h * (size_t)dim + (size_t)d] : 0.0f;
    }
}

/* Sums of N values over LANES lanes. In every step a lane hands the half of its values that its
 * partner keeps: afterwards a lane has N / LANES of them (or one, that N / LANES lanes share), from
 * the returned index on. */
template <int N, int LANES> static __device__ __forceinline__ int warp_reduce_scatter(float v[N])
{
    const int lane = (int)(threadIdx.x % WARP);
    int first = 0, n = N;
    UNROLL for (int step = LANES / 2; step > 0; step /= 2)
    {
        const bool upper = (lane & step) != 0;
        n /= 2;
        if (n > 0) {
            UNROLL for (int i = 0; i < N / 2; i++) if (i < n)
            {
                const float keep = upper ? v[i + n] : v[i], give = upper ? v[i] : v[i + n];
                v[i] = keep + __shfl_xor_sync(0xffffffffu, give, step);
            }
            first += upper ? n : 0;
        } else v[0] += __shfl_xor_sync(0xffffffffu, v[0], step);
    }
    return first;
}

/* One chunk of the lane's keys, zeros past the segment's last. */
template <enum dtype T, int LANES, bool WHOLE>
static __device__ __forceinline__ void attn_decode_load_k(const struct attn_decode_call &c,
                                                          const struct attn_decode_block &b,
                                                          const struct attn_decode_shared &s,
                                                          int first_key, int chunk,
                                                          float k[KEYS][CHUNK])
{
    const char *pool = (const char *)c.kv.data;
    UNROLL for (int i = 0; i < KEYS; i++)
    {
        const int j = first_key + i * (WARP / LANES);
        if (j < b.n_keys) load_chunk<T, WHOLE>(k[i], pool + s.offsets[j], chunk, c.kv.head_dim);
        else {
            UNROLL for (int d = 0; d < CHUNK; d++) k[i][d] = 0;
        }
    }
}

template <enum dtype T, int LANES, int HEADS, bool WHOLE>
static __device__ __forceinline__ void attn_decode_scores(const struct attn_decode_call &c,
                                                          const struct attn_decode_block &b,
                                                          const struct attn_decode_shared &s)
{
    constexpr int SIDE = WARP / LANES, PER_WARP = SIDE * KEYS, N = KEYS * HEADS,
                  LEFT = N > LANES ? N / LANES : 1;
    const int lane = (int)(threadIdx.x % WARP), warp = (int)(threadIdx.x / WARP);
    for (int base = warp * PER_WARP; base < b.n_keys; base += ATTN_DECODE_WARPS * PER_WARP) {
        const int first_key = base + lane / LANES;
        float acc[N];
        UNROLL for (int i = 0; i < N; i++) acc[i] = 0;
        for (int chunk = lane % LANES; chunk < b.chunks; chunk += LANES) {
            float k[KEYS][CHUNK];
            attn_decode_load_k<T, LANES, WHOLE>(c, b, s, first_key, chunk, k);
            UNROLL for (int h = 0; h < HEADS; h++)
            {
                const float4 *low = (const float4 *)s.q + h * 2 * b.chunks + chunk, x = low[0],
                             y = low[b.chunks];
                const float q[CHUNK] = { x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w };
                UNROLL for (int i = 0; i < KEYS; i++) UNROLL for (int d = 0; d < CHUNK; d++)
                    acc[i * HEADS + h] = fmaf(k[i][d], q[d], acc[i * HEADS + h]);
            }
        }
        const int first = warp_reduce_scatter<N, LANES>(acc);
        constexpr int SHARING = N < LANES ? LANES / N : 1;
        UNROLL for (int i = 0; i < LEFT; i++)
        {
            const int j = first_key + (first + i) / HEADS * SIDE;
            if (lane % SHARING == 0 && j < b.n_keys)
                s.p[(first + i) % HEADS * CUDA_ATTN_SEGMENT + j] = kv_traits<T>::SCALED
                                                                       ? acc[i] * s.scales[j]
                                                                       : acc[i];
        }
    }
}

/* Scores become weights, with zeros up to a whole four of keys. What is summed up is the weights
 * without the scales of values. */
template <enum dtype T, int HEADS>
static __device__ __forceinline__ void attn_decode_softmax(const struct attn_decode_call &c,
                                                           const struct attn_decode_block &b,
                                                           const struct attn_decode_shared &s)
{
    unsigned thread = threadIdx.x;
    compute_here(&thread); /* the scores leave no registers for what is computed from it */
    const int lane = (int)(thread % WARP), h = (int)(thread / WARP),
              n_padded = (b.n_keys + KEYS - 1) / KEYS * KEYS;
    if (h >= HEADS) return;
    float *p = s.p + h * CUDA_ATTN_SEGMENT, top = -INFINITY, sum = 0;
    for (int j = lane; j < b.n_keys; j += WARP) top = fmaxf(top, p[j]);
    const float m = warp_max(top) * c.scale; /* rounding keeps the order */
    for (int j = lane; j < n_padded; j += WARP) {
        const float weight = j < b.n_keys ? expf(fmaf(p[j], c.scale, -m)) : 0.0f;
        p[j] = kv_traits<T>::SCALED && j < b.n_keys ? weight * s.scales[CUDA_ATTN_SEGMENT + j]
                                                    : weight;
        sum += weight;
    }
    sum = warp_sum(sum);
    if (lane == 0) s.m[h] = m, s.l[h] = sum;
}

template <enum dtype T, int HEADS, bool WHOLE>
static __device__ __forceinline__ void attn_decode_accumulate_v(const struct attn_decode_call &c,
                                                                const struct attn_decode_block &b,
                                                                const struct attn_decode_shared &s,
                                                                float acc[HEADS][CHUNK])
{
    const int chunk = (int)threadIdx.x % b.v_stride, groups = ATTN_DECODE_THREADS / b.v_stride;
    const char *values = (const char *)c.kv.data + kv_value_offset<T>(c.kv);
    UNROLL for (int h = 0; h < HEADS; h++) UNROLL for (int d = 0; d < CHUNK; d++) acc[h][d] = 0;
    if (chunk >= b.v_chunks) return;
    for (int j = (int)threadIdx.x / b.v_stride * KEYS; j < b.n_keys; j += groups * KEYS) {
        float v[KEYS][CHUNK];
        UNROLL for (int i = 0; i < KEYS; i++)
        {
            if (j + i < b.n_keys)
                load_chunk<T, WHOLE>(v[i], values + s.offsets[j + i], chunk, c.v_dim);
            else {
                UNROLL for (int d = 0; d < CHUNK; d++) v[i][d] = 0;
            }
        }
        UNROLL for (int h = 0; h < HEADS; h++)
        {
            const float4 p = *(const float4 *)(s.p + h * CUDA_ATTN_SEGMENT + j);
            const float weight[KEYS] = { p.x, p.y, p.z, p.w };
            UNROLL for (int i = 0; i < KEYS; i++) UNROLL for (int d = 0; d < CHUNK; d++)
                acc[h][d] = fmaf(weight[i], v[i][d], acc[h][d]);
        }
    }
}

/* Groups of threads become one, head by head, and the result goes where it belongs. */
template <int HEADS>
static __device__ __forceinline__ void attn_decode_finish(const struct attn_decode_call &c,
                                                          const struct attn_decode_block &b,
                                                          const struct attn_decode_shared &s,
                                                          float acc[HEADS][CHUNK])
{
    const int tid = (int)threadIdx.x, groups = ATTN_DECODE_THREADS / b.v_stride;
    const bool whole = b.row.pos < b.row.per_segment;
    UNROLL for (int h = 0; h < HEADS; h++)
    {
        if (h >= b.n_heads) return;
        float4 *mine = (float4 *)(s.sums + tid * CHUNK);
        mine[0] = make_float4(acc[h][0], acc[h][1], acc[h][2], acc[h][3]);
        mine[1] = make_float4(acc[h][4], acc[h][5], acc[h][6], acc[h][7]);
        __syncthreads();
        const size_t n_heads = (size_t)c.n_heads, head = (size_t)(b.head + h);
        float *out = c.out + ((size_t)b.row.row * n_heads + head) * (size_t)c.v_dim;
        float *part = c.parts +
                      ((size_t)(b.item - c.item_begin) * n_heads + head) * part_floats(c.v_dim);
        for (int d = tid; d < c.v_dim; d += ATTN_DECODE_THREADS) {
            float sum = s.sums[d];
            for (int g = 1; g < groups; g++) sum += s.sums[g * b.v_stride * CHUNK + d];
            if (whole) out[d] = __fmul_rn(sum, 1.0f / s.l[h]);
            else part[PART_HEAD + d] = sum;
        }
        if (!whole && tid == 0) part[0] = s.m[h], part[1] = s.l[h];
        __syncthreads();
    }
}

template <enum dtype T, int LANES, int HEADS, bool WHOLE>
static __global__ void __launch_bounds__(ATTN_DECODE_THREADS, HEADS == 1 ? 3 : 2)
    attn_decode_kernel(const struct attn_decode_call c)
{
    grid_dependency_sync();
    for (int unit = (int)blockIdx.x; unit < attn_decode_n_units(c); unit += (int)gridDim.x) {
        const struct attn_decode_block b = attn_decode_block_of(c, HEADS, unit);
        const struct attn_decode_shared s = attn_decode_shared_of(HEADS, b.chunks);
        float acc[HEADS][CHUNK];
        attn_decode_prepare<T, HEADS>(c, b, s);
        __syncthreads();
        attn_decode_scores<T, LANES, HEADS, WHOLE>(c, b, s);
        __syncthreads();
        attn_decode_softmax<T, HEADS>(c, b, s);
        __syncthreads();
        attn_decode_accumulate_v<T, HEADS, WHOLE>(c, b, s, acc);
        attn_decode_finish<HEADS>(c, b, s, acc); /* ends with a barrier */
    }
}

#endif
