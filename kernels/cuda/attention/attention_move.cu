/* attention_move.cu - moves the rows of an uploaded list, once it is known how many drafts before
 * them are right, and numbers them anew as attention_list_rows does (kernel_move, attention.h).
 *
 * One block: rows have up to some hundred segments, whose numbers are a running sum. Kernels that
 * read a list before they wait (launch_target.cuh) are never the next ones in the stream: they
 * start when this one has completed. Thread: engine. */
#include "kernels/cuda/attention/attention_segments.cuh"

enum { THREADS = 256 };

static __device__ __forceinline__ int32_t move_of(const attention_move_call &c, int i)
{
    const int32_t i_move = c.rows[i].n_old;
    if (i_move == 0) return 0;
    const uint32_t *by = c.moves[i_move - 1].by;
    return (by[0] ? c.accepted[by[0] - 1] : 0) + (by[1] ? c.accepted[by[1] - 1] : 0);
}

static __device__ __forceinline__ int32_t keys_of(const attention_move_call &c, int i, int32_t pos)
{
    return i < c.n_decode && !c.is_large ? decode_segment(pos + 1) : (int32_t)CUDA_ATTN_SEGMENT;
}

/* The segments that a decode row shares with the one before it. Of another sequence only those that
 * both shared before they moved. */
static __device__ int32_t shared_of(const attention_move_call &c, int i, int32_t pos, int32_t keys)
{
    const cuda_attn_row *row = &c.rows[i], *before = &c.rows[i - 1];
    const int32_t both = before->pos < pos ? before->pos : pos;
    int32_t n = both + 1;
    if (keys_of(c, i - 1, before->pos) != keys || n < keys) return 0;
    if (before->seq != row->seq && row->shared * row->per_segment < n)
        n = row->shared * row->per_segment;
    if (c.is_alone && both < n) n = both;
    return n / keys;
}

/* The sum of `mine` of all threads before this one; *all: of all. Has barriers. */
static __device__ int32_t sum_before(int32_t mine, int32_t *all)
{
    __shared__ int32_t sums[THREADS];
    const int i = (int)threadIdx.x;
    sums[i] = mine;
    for (int step = 1; step < THREADS; step *= 2) {
        __syncthreads();
        const int32_t before = i >= step ? sums[i - step] : 0;
        __syncthreads();
        sums[i] += before;
    }
    __syncthreads();
    *all = sums[THREADS - 1];
    const int32_t before = sums[i] - mine;
    __syncthreads();
    return before;
}

/* Renumbers rows [begin, begin + THREADS), of which the first has `segment` segments before it.
 * Returns those of all of them. */
static __device__ int32_t number_rows(const attention_move_call &c, int begin, int32_t segment)
{
    const int i = begin + (int)threadIdx.x;
    const bool is_row = i < c.n_rows;
    const int32_t pos = is_row ? c.rows[i].pos : 0, keys = is_row ? keys_of(c, i, pos) : 1,
                  shared = is_row && i > 0 && i < c.n_decode ? shared_of(c, i, pos, keys) : 0;
    int32_t all;
    const int32_t before = sum_before(is_row ? pos / keys + 1 : 0, &all); /* all have read theirs */
    if (!is_row) return all;
    c.rows[i].per_segment = keys;
    c.rows[i].shared = shared;
    c.rows[i].segment = segment + before;
    c.rows[i].n_old = c.is_alone ? pos : 0;
    atomicMax(&c.counts->n_keys_max, pos + 1);
    if (i == c.n_decode - 1) c.counts->n_segments_decode = segment + before + pos / keys + 1;
    return all;
}

static __global__ void __launch_bounds__(THREADS) move_kernel(const attention_move_call c)
{
    grid_dependency_sync();
    for (int i = (int)threadIdx.x; i < c.n_rows; i += THREADS) c.rows[i].pos += move_of(c, i);
    if (threadIdx.x == 0) c.counts->n_keys_max = 0;
    __syncthreads();
    int32_t n_segments = 0;
    for (int begin = 0; begin < c.n_rows; begin += THREADS)
        n_segments += number_rows(c, begin, n_segments);
    if (threadIdx.x == 0) c.counts->n_segments = n_segments;
}

extern "C" cudaError_t attention_move_rows(cudaStream_t stream, const struct attention_move_call *c)
{
    return launch(stream, move_kernel, dim3(1), dim3(THREADS), 0, *c);
}
