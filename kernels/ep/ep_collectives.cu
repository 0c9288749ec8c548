/* ep_collectives.cu - all_gather, all_reduce as the sum of what was gathered, in ascending order of
 * ranks, and gather_columns.
 *
 * Every rank writes its part to every other rank, which takes one trip and is the fastest for few
 * bytes. LIMIT: each rank writes size - 1 times its bytes, while a sum in two trips would write
 * about twice its bytes; for the sums of long prompts use `nccl`. Thread: device. */
#include "kernels/ep/ep_signals.cuh"

enum { COLLECT_THREADS = 256, COLLECT_BLOCKS_MAX = 256, COLUMN_BLOCKS_MAX = 64 };
/* Of so few bytes of all ranks one block shares its own, waits, and takes them, in one launch. More
 * blocks could not: one that waits for those of another rank may keep the SM that they need. */
enum { ALONE_THREADS = 1024, ALONE_BYTES_MAX = 64 * 1024 };

static_assert((int)COLLECT_BLOCKS_MAX <= (int)WAITING_BLOCKS_MAX, "blocks wait by themselves");

static __global__ void wait_kernel(ep_call c, int kind)
{
    grid_dependency_sync();
    (void)wait_for_all(c, kind);
}

cudaError_t ep_run_wait(cudaStream_t s, const struct ep_call *c, enum ep_flag kind)
{
    return c->direct ? launch(s, wait_kernel, dim3(1), dim3(WARP), 0, *c, kind) : cudaSuccess;
}

static unsigned collect_blocks(size_t n)
{
    const unsigned blocks = blocks_for(n, COLLECT_THREADS);
    if (blocks > COLLECT_BLOCKS_MAX) return COLLECT_BLOCKS_MAX;
    return blocks > 0 ? blocks : 1;
}

/* Copies with the whole grid, 16 bytes at a time if both are aligned to 16. */
static __device__ void copy_bytes(unsigned char *to, const unsigned char *from, size_t bytes)
{
    const size_t me = blockIdx.x * (size_t)blockDim.x + threadIdx.x,
                 all = gridDim.x * (size_t)blockDim.x;
    const size_t quads = ((uintptr_t)to | (uintptr_t)from) % 16 == 0 ? bytes / 16 : 0;
    for (size_t i = me; i < quads; i += all)
        ((uint4 *)(void *)to)[i] = ((const uint4 *)(const void *)from)[i];
    for (size_t i = quads * 16 + me; i < bytes; i += all) to[i] = from[i];
}

/* Returns the address of rank `from`'s part in rank `to`'s window. */
static __device__ __forceinline__ unsigned char *shared_part(const ep_call &c, unsigned epoch,
                                                             int to, int from)
{
    return c.window[to] + c.at.shared + ((size_t)(epoch & 1u) * c.size + from) * c.at.shared_bytes;
}

/* Writes to all ranks, with the whole grid; each begins with another receiver, so that they do not
 * all write to rank 0 first. */
static __device__ void share(const ep_call &c, const unsigned char *mine, size_t bytes)
{
    const unsigned epoch = c.epochs[EP_FLAG_SHARED] + 1;
    for (int i = 0; i < c.size; i++)
        copy_bytes(shared_part(c, epoch, (c.rank + i) % c.size, c.rank), mine, bytes);
}

static __global__ void __launch_bounds__(COLLECT_THREADS)
    share_kernel(ep_call c, const unsigned char *mine, size_t bytes)
{
    grid_dependency_sync();
    if (block_has_fault(c)) return;
    share(c, mine, bytes);
    if (is_last_block(c)) signal_all(c, EP_FLAG_SHARED);
}

static cudaError_t run_share(cudaStream_t s, const struct ep_call *c, const void *mine,
                             size_t bytes)
{
    return launch(s, share_kernel, dim3(collect_blocks(bytes / 16)), dim3(COLLECT_THREADS), 0, *c,
                  (const unsigned char *)mine, bytes);
}

/* Called by the only block of a grid, after its writes: whether all ranks have written. */
static __device__ bool meet_all(const ep_call &c)
{
    signal_all(c, EP_FLAG_SHARED);
    __syncthreads(); /* the epoch is another one */
    return wait_for_all(c, EP_FLAG_SHARED);
}

static bool is_for_one_block(const struct ep_call *c, size_t bytes_of_rank)
{
    return bytes_of_rank * (size_t)c->size <= ALONE_BYTES_MAX;
}

/* ---- gather ---- */

static __device__ void take(const ep_call &c, unsigned char *all, size_t bytes)
{
    const unsigned epoch = c.epochs[EP_FLAG_SHARED];
    for (int r = 0; r < c.size; r++)
        copy_bytes(all + (size_t)r * bytes, shared_part(c, epoch, c.rank, r), bytes);
}

static __global__ void __launch_bounds__(COLLECT_THREADS)
    take_kernel(ep_call c, unsigned char *all, size_t bytes)
{
    grid_dependency_sync();
    if (have_all_come(c, EP_FLAG_SHARED, true)) take(c, all, bytes);
}

static __global__ void __launch_bounds__(ALONE_THREADS, 1)
    gather_kernel(ep_call c, unsigned char *all, const unsigned char *mine, size_t bytes)
{
    grid_dependency_sync();
    if (block_has_fault(c)) return;
    share(c, mine, bytes);
    if (meet_all(c)) take(c, all, bytes);
}

cudaError_t ep_run_all_gather(cudaStream_t s, const struct ep_call *c, void *all, const void *mine,
                              size_t bytes)
{
    if (is_for_one_block(c, bytes))
        return launch(s, gather_kernel, dim3(1), dim3(ALONE_THREADS), 0, *c, (unsigned char *)all,
                      (const unsigned char *)mine, bytes);
    const cudaError_t e = run_share(s, c, mine, bytes);
    return e != cudaSuccess ? e
                            : launch(s, take_kernel, dim3(collect_blocks(bytes / 16)),
                                     dim3(COLLECT_THREADS), 0, *c, (unsigned char *)all, bytes);
}

/* ---- sums ---- */

/* Adds the parts of all ranks, `step` bytes apart, in ascending order. */
template <bool IS_F32>
static __device__ void add_up(const ep_call &c, const unsigned char *parts, size_t step, void *x,
                              size_t n)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += gridDim.x * (size_t)blockDim.x) {
        float sum = 0;
        for (int r = 0; r < c.size; r++) {
            const void *from = parts + (size_t)r * step;
            const float v = IS_F32 ? ((const float *)from)[i]
                                   : bf16_to_float(((const uint16_t *)from)[i]);
            sum = r == 0 ? v : sum + v;
        }
        if (IS_F32) ((float *)x)[i] = sum;
        else ((uint16_t *)x)[i] = float_to_bf16(sum);
    }
}

template <bool IS_F32>
static __device__ __forceinline__ void add_shared(const ep_call &c, void *x, size_t n)
{
    add_up<IS_F32>(c, shared_part(c, c.epochs[EP_FLAG_SHARED], c.rank, 0), c.at.shared_bytes, x, n);
}

template <bool IS_F32>
static __global__ void __launch_bounds__(COLLECT_THREADS)
    add_shared_kernel(ep_call c, void *x, size_t n)
{
    grid_dependency_sync();
    if (have_all_come(c, EP_FLAG_SHARED, true)) add_shared<IS_F32>(c, x, n);
}

template <bool IS_F32>
static __global__ void __launch_bounds__(ALONE_THREADS, 1)
    reduce_kernel(ep_call c, void *x, size_t n)
{
    grid_dependency_sync();
    if (block_has_fault(c)) return;
    share(c, (const unsigned char *)x, n * (IS_F32 ? sizeof(float) : sizeof(uint16_t)));
    if (meet_all(c)) add_shared<IS_F32>(c, x, n);
}

template <bool IS_F32>
static __global__ void __launch_bounds__(COLLECT_THREADS)
    add_parts_kernel(ep_call c, const unsigned char *parts, size_t part_bytes, void *x, size_t n)
{
    grid_dependency_sync();
    if (!block_has_fault(c)) add_up<IS_F32>(c, parts, part_bytes, x, n);
}

template <bool IS_F32>
static cudaError_t run_all_reduce(cudaStream_t s, const struct ep_call *c, void *x, size_t n)
{
    const size_t bytes = n * (IS_F32 ? sizeof(float) : sizeof(uint16_t));
    if (is_for_one_block(c, bytes))
        return launch(s, reduce_kernel<IS_F32>, dim3(1), dim3(ALONE_THREADS), 0, *c, x, n);
    const cudaError_t e = run_share(s, c, x, bytes);
    return e != cudaSuccess ? e
                            : launch(s, add_shared_kernel<IS_F32>, dim3(collect_blocks(n)),
                                     dim3(COLLECT_THREADS), 0, *c, x, n);
}

cudaError_t ep_run_all_reduce(cudaStream_t s, const struct ep_call *c, void *x, size_t n,
                              enum dtype dtype)
{
    return dtype == DTYPE_F32 ? run_all_reduce<true>(s, c, x, n)
                              : run_all_reduce<false>(s, c, x, n);
}

cudaError_t ep_run_add_parts(cudaStream_t s, const struct ep_call *c, const void *parts,
                             size_t part_bytes, void *x, size_t n, enum dtype dtype)
{
    return launch(s, dtype == DTYPE_F32 ? add_parts_kernel<true> : add_parts_kernel<false>,
                  dim3(collect_blocks(n)), dim3(COLLECT_THREADS), 0, *c,
                  (const unsigned char *)parts, part_bytes, x, n);
}

/* ---- columns ---- */

/* Where the columns of ep_gather_columns begin, by rank, and the rows. */
struct ep_columns_call {
    size_t first[EP_PEERS_MAX + 1], n_rows, mine_stride, y_stride;
    const float *mine;
    float *y;
};

template <class T>
static __device__ __forceinline__ void copy_rows(T *to, size_t to_stride, const T *from,
                                                 size_t from_stride, size_t width, size_t n_rows)
{
    for (size_t row = blockIdx.y; row < n_rows; row += gridDim.y)
        for (size_t k = blockIdx.x * (size_t)blockDim.x + threadIdx.x; k < width;
             k += gridDim.x * (size_t)blockDim.x)
            to[row * to_stride + k] = from[row * from_stride + k];
}

/* Copies a matrix with the whole grid, 16 bytes at a time if all its rows are aligned to 16. */
static __device__ void copy_matrix(float *to, size_t to_stride, const float *from,
                                   size_t from_stride, size_t width, size_t n_rows)
{
    const size_t quad = sizeof(float4) / sizeof(float);
    if (((uintptr_t)to | (uintptr_t)from | (to_stride | from_stride | width) * sizeof *to) %
            sizeof(float4) !=
        0)
        copy_rows(to, to_stride, from, from_stride, width, n_rows);
    else
        copy_rows((float4 *)(void *)to, to_stride / quad, (const float4 *)(const void *)from,
                  from_stride / quad, width / quad, n_rows);
}

static dim3 column_blocks(size_t width, size_t n_rows)
{
    const unsigned wide = blocks_for(width / 4, COLLECT_THREADS);
    return dim3(wide < 1                   ? 1
                : wide > COLUMN_BLOCKS_MAX ? (unsigned)COLUMN_BLOCKS_MAX
                                           : wide,
                n_rows > COLUMN_BLOCKS_MAX ? (unsigned)COLUMN_BLOCKS_MAX : (unsigned)n_rows);
}

/* A rank's columns lie in the windows one row after another. */
static __device__ void share_columns(const ep_call &c, const ep_columns_call &a)
{
    const unsigned epoch = c.epochs[EP_FLAG_SHARED] + 1;
    const size_t width = a.first[c.rank + 1] - a.first[c.rank];
    for (int i = 0; i < c.size; i++)
        copy_matrix((float *)(void *)shared_part(c, epoch, (c.rank + i) % c.size, c.rank), width,
                    a.mine, a.mine_stride, width, a.n_rows);
}

static __device__ void take_columns(const ep_call &c, const ep_columns_call &a)
{
    const unsigned epoch = c.epochs[EP_FLAG_SHARED];
    for (int r = 0; r < c.size; r++) {
        const size_t width = a.first[r + 1] - a.first[r];
        copy_matrix(a.y + a.first[r], a.y_stride,
                    (const float *)(const void *)shared_part(c, epoch, c.rank, r), width, width,
                    a.n_rows);
    }
}

static __global__ void __launch_bounds__(COLLECT_THREADS)
    share_columns_kernel(ep_call c, ep_columns_call a)
{
    grid_dependency_sync();
    if (block_has_fault(c)) return;
    share_columns(c, a);
    if (is_last_block(c)) signal_all(c, EP_FLAG_SHARED);
}

static __global__ void __launch_bounds__(COLLECT_THREADS)
    take_columns_kernel(ep_call c, ep_columns_call a, bool waits)
{
    grid_dependency_sync();
    if (have_all_come(c, EP_FLAG_SHARED, waits)) take_columns(c, a);
}

static __global__ void __launch_bounds__(ALONE_THREADS, 1)
    columns_kernel(ep_call c, ep_columns_call a)
{
    grid_dependency_sync();
    if (block_has_fault(c)) return;
    share_columns(c, a);
    if (meet_all(c)) take_columns(c, a);
}

static ep_columns_call columns_call_of(const struct ep_call *c, const struct ep_columns *a)
{
    ep_columns_call call = {};
    for (int r = 0; r <= c->size; r++) call.first[r] = a->first[r];
    call.n_rows = a->n_rows, call.mine = a->mine, call.mine_stride = a->mine_stride;
    call.y = a->y, call.y_stride = a->y_stride;
    return call;
}

/* In two launches, or three of many blocks. */
static cudaError_t run_columns(cudaStream_t s, const struct ep_call *c, const ep_columns_call &a,
                               size_t widest)
{
    const dim3 blocks = column_blocks(widest, a.n_rows);
    const bool waits = waits_itself(*c, (size_t)blocks.x * blocks.y);
    cudaError_t e = launch(s, share_columns_kernel,
                           column_blocks(a.first[c->rank + 1] - a.first[c->rank], a.n_rows),
                           dim3(COLLECT_THREADS), 0, *c, a);
    if (e == cudaSuccess && !waits) e = ep_run_wait(s, c, EP_FLAG_SHARED);
    return e != cudaSuccess
               ? e
               : launch(s, take_columns_kernel, blocks, dim3(COLLECT_THREADS), 0, *c, a, waits);
}

cudaError_t ep_run_gather_columns(cudaStream_t s, const struct ep_call *c,
                                  const struct ep_columns *a)
{
    const ep_columns_call call = columns_call_of(c, a);
    size_t widest = 0;
    for (int r = 0; r < c->size; r++)
        if (call.first[r + 1] - call.first[r] > widest) widest = call.first[r + 1] - call.first[r];
    if (is_for_one_block(c, widest * call.n_rows * sizeof(float)))
        return launch(s, columns_kernel, dim3(1), dim3(ALONE_THREADS), 0, *c, call);
    return run_columns(s, c, call, widest);
}
