/* ep_dispatch.cu - dispatch: chooses slot and rank of each row, sends the rows, and sorts the
 * received ones by expert.
 *
 * Slots are sorted by physical expert, so the slots of one rank are contiguous, and a slot's index
 * among them is its index at the receiver. A block sends one (row, choice); the write to the other
 * GPU dominates the time. Thread: device. */
#include "kernels/cuda/moe/moe_sort.cuh"
#include "kernels/ep/ep_rows.cuh"
#include "kernels/ep/ep_signals.cuh"

enum { PLACE_THREADS = 256, SEND_THREADS = 128, INDEX_THREADS = 1024 };

/* ---- plan ---- */

/* The physical expert that takes choice i, below n_rows * n_used, and whether the row is real: what
 * padding rows chose was never computed. */
struct placed_choice {
    int32_t expert;
    bool is_real;
};
static __device__ __forceinline__ placed_choice place_choice(const ep_call &c, int i)
{
    const bool is_real = i < real_rows(c) * c.n_used;
    int e = is_real ? c.experts[i] : 0;
    if (e < 0 || e >= c.n_logical) {
        raise_fault(c, EP_FAULT_EXPERT, c.rank);
        e = 0;
    }
    if (is_real && c.n_chosen) atomicAdd(c.n_chosen + e, 1ull);
    const int32_t *copies = c.copies + (size_t)c.map * ((size_t)c.n_logical + 1) + e,
                  *physical = c.physical + (size_t)c.map * (size_t)c.n_physical + copies[0];
    const int32_t x = physical[(i / c.n_used + c.rank) % (copies[1] - copies[0])];
    c.chosen[i] = x;
    return placed_choice{ x, is_real };
}

static __global__ void __launch_bounds__(PLACE_THREADS) place_kernel(ep_call c)
{
    grid_dependency_sync();
    const int i = (int)(blockIdx.x * PLACE_THREADS + threadIdx.x);
    if (i < c.n_rows * c.n_used) (void)place_choice(c, i);
}

/* Few choices are placed by the block that sorts them. */
static __global__ void __launch_bounds__(ONE_BLOCK_CHOICES)
    place_and_sort_kernel(ep_call c, moe_sort_args a)
{
    grid_dependency_sync();
    const int i = (int)threadIdx.x;
    const placed_choice p = i < a.n ? place_choice(c, i) : placed_choice{ -1, false };
    sort_one_block(a, p.is_real ? p.expert : -1);
}

cudaError_t ep_run_sort(cudaStream_t s, const struct ep_call *c)
{
    const moe_sort_args sort = { c->chosen,
                                 c->rows,
                                 c->index,
                                 c->begin,
                                 c->n_physical,
                                 c->n_used,
                                 c->n_rows * c->n_used,
                                 c->n_real,
                                 c->first_row,
                                 NULL };
    if (sort.n <= ONE_BLOCK_CHOICES)
        return launch(s, place_and_sort_kernel, dim3(1), dim3(sort_one_block_threads(sort)),
                      sort_one_block_shared(sort), *c, sort);
    const cudaError_t e = launch(s, place_kernel, dim3(blocks_for((size_t)sort.n, PLACE_THREADS)),
                                 dim3(PLACE_THREADS), 0, *c);
    return e == cudaSuccess ? moe_sort_run(s, sort) : e;
}

static __global__ void counts_kernel(ep_call c)
{
    grid_dependency_sync();
    int32_t *counts = (int32_t *)(void *)(c.own + c.at.counts) + (size_t)c.rank * c.n_physical;
    for (int p = (int)threadIdx.x; p < c.n_physical; p += PLACE_THREADS)
        counts[p] = c.begin[p + 1] - c.begin[p];
}

cudaError_t ep_run_counts(cudaStream_t s, const struct ep_call *c)
{
    return launch(s, counts_kernel, dim3(1), dim3(PLACE_THREADS), 0, *c);
}

/* ---- send ---- */

/* Writes one row in its transit format; called by the whole block, where a warp takes 128 elements
 * at a time. */
static __device__ void write_row(const ep_call &c, const float *x, unsigned char *to)
{
    const size_t n = (size_t)c.hidden, filled = (n + 63) / 64 * 64, lane = threadIdx.x % WARP;
    for (size_t g = threadIdx.x / WARP * (size_t)EP_SCALE_STEP; g < filled;
         g += SEND_THREADS / WARP * EP_SCALE_STEP) {
        const size_t k = g + lane * EP_QUAD;
        const float4 v = quad_from(x, k, n);
        const float scale = c.send == DTYPE_F8_E4M3 ? warp_scale(v) : 1.0f;
        if (c.send == DTYPE_F8_E4M3 && lane == 0 && g < n)
            ((float *)(void *)(to + c.at.scales_at))[g / EP_SCALE_STEP] = scale;
        if (k >= filled) continue;
        if (c.send == DTYPE_F32) ((float4 *)(void *)to)[k / EP_QUAD] = v;
        else if (c.send == DTYPE_BF16)
            ((uint2 *)(void *)to)[k / EP_QUAD] = make_uint2(pack_bf16(v.x, v.y),
                                                            pack_bf16(v.z, v.w));
        else ((unsigned *)(void *)to)[k / EP_QUAD] = quad_to_e4m3(v, scale);
    }
}

static __device__ void send_one(const ep_call &c, const float *x, size_t x_stride, int i)
{
    const int slot = c.index[i], to_rank = c.owner[c.chosen[i]];
    const size_t at = (size_t)(slot - c.begin[c.first[to_rank]]),
                 place = c.packed ? (size_t)slot : (size_t)to_rank * c.at.pair_slots + at;
    unsigned char *to = c.direct ? c.window[to_rank] + c.at.rows +
                                       ((size_t)c.rank * c.at.pair_slots + at) * c.at.row_bytes
                                 : c.out_rows + place * c.at.row_bytes;
    write_row(c, x + (size_t)(i / c.n_used) * x_stride, to);
    if (threadIdx.x != 0) return;
    *(int2 *)(void *)(to + c.at.tail_at) = make_int2(c.rank, i);
    c.back_at[i] = c.direct ? i : (int32_t)place;
}

/* Writes how many rows went to each expert; called by the whole last block. */
static __device__ void write_counts(const ep_call &c)
{
    for (int p = (int)threadIdx.x; p < c.n_physical; p += SEND_THREADS)
        ((int32_t *)(void *)(c.window[c.owner[p]] +
                             c.at.counts))[(size_t)c.rank * c.n_physical + p] = c.begin[p + 1] -
                                                                                c.begin[p];
}

static __global__ void __launch_bounds__(SEND_THREADS)
    send_kernel(ep_call c, const float *x, size_t x_stride)
{
    grid_dependency_sync();
    if (block_has_fault(c)) return;
    if ((int)blockIdx.x < real_rows(c) * c.n_used) send_one(c, x, x_stride, (int)blockIdx.x);
    if (!c.direct || !is_last_block(c)) return;
    write_counts(c);
    signal_all(c, EP_FLAG_ROWS);
}

cudaError_t ep_run_send(cudaStream_t s, const struct ep_call *c, const float *x, size_t x_stride)
{
    const int n = c->n_rows * c->n_used; /* without rows there is one block, which signals that */
    return launch(s, send_kernel, dim3((unsigned)(n > 0 ? n : 1)), dim3(SEND_THREADS), 0, *c, x,
                  x_stride);
}

/* ---- index ---- */

/* Exclusive scan of v [n] with the scratch `room` [n]; returns the one of the two that has the
 * result. Called by the whole block. */
static __device__ int *exclusive_scan(int *v, int *room, int n)
{
    for (int i = (int)threadIdx.x; i < n; i += INDEX_THREADS) room[i] = i > 0 ? v[i - 1] : 0;
    __syncthreads();
    for (int step = 1; step < n; step *= 2) {
        for (int i = (int)threadIdx.x; i < n; i += INDEX_THREADS)
            v[i] = room[i] + (i >= step ? room[i - step] : 0);
        __syncthreads();
        int *other = v;
        v = room;
        room = other;
    }
    return room;
}

/* Adds what came to ep_config.load; its sums are begin, [n_local + 1]. */
static __device__ void count_load(const ep_call &c, const int *by_expert)
{
    const int32_t *logical = c.logical + (size_t)c.map * c.n_physical + c.first_local,
                  *own = (const int32_t *)(const void *)(c.own + c.at.counts) +
                         (size_t)c.rank * c.n_physical + c.first_local;
    for (int e = (int)threadIdx.x; e < c.n_local; e += INDEX_THREADS) {
        const int n = by_expert[(e + 1) * c.size] - by_expert[e * c.size];
        if (n) atomicAdd(c.n_load + logical[e], (unsigned long long)n);
        if (own[e]) atomicAdd(c.n_load + c.n_logical, (unsigned long long)own[e]);
    }
}

/* Runs as one block. A pair is (sending rank, local expert). Shared memory: three times
 * [n_pairs + 1]. */
static __global__ void __launch_bounds__(INDEX_THREADS) index_kernel(ep_call c)
{
    grid_dependency_sync();
    const int n = c.size * c.n_local, size = c.size, n_local = c.n_local;
    int *by_rank = (int *)(void *)shared_memory(), *by_expert = by_rank + n + 1,
        *room = by_expert + n + 1;
    const int32_t *counts = (const int32_t *)(const void *)(c.own + c.at.counts) + c.first_local;
    if (c.direct && !wait_for_all(c, EP_FLAG_ROWS)) {
        for (int e = (int)threadIdx.x; e <= n_local; e += INDEX_THREADS) c.recv_begin[e] = 0;
        return;
    }
    for (int i = (int)threadIdx.x; i <= n; i += INDEX_THREADS) {
        by_rank[i] = i < n ? counts[(size_t)(i / n_local) * c.n_physical + i % n_local] : 0;
        by_expert[i] = i < n ? counts[(size_t)(i % size) * c.n_physical + i / size] : 0;
    }
    __syncthreads();
    int *a = exclusive_scan(by_rank, room, n + 1);
    int *spare = a == by_rank ? room : by_rank;
    int *b = exclusive_scan(by_expert, spare, n + 1);
    for (int e = (int)threadIdx.x; e <= n_local; e += INDEX_THREADS)
        c.recv_begin[e] = n_local ? b[e * size] : 0;
    if (c.n_load) count_load(c, b);
    for (int pair = (int)threadIdx.x / WARP; pair < n; pair += INDEX_THREADS / WARP) {
        const int r = pair / n_local, e = pair % n_local, many = a[pair + 1] - a[pair],
                  slot = b[e * size + r];
        const int from = c.packed ? a[pair]
                                  : (int)((size_t)r * c.at.pair_slots) + a[pair] - a[r * n_local];
        for (int i = (int)(threadIdx.x % WARP); i < many; i += WARP) c.x_rows[slot + i] = from + i;
    }
}

cudaError_t ep_run_index(cudaStream_t s, const struct ep_call *c)
{
    const size_t shared = 3 * sizeof(int) * ((size_t)c->size * (size_t)c->n_local + 1);
    return launch(s, index_kernel, dim3(1), dim3(INDEX_THREADS), shared, *c);
}
