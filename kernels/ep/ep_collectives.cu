/* ep_collectives.cu - all_gather, all_reduce as the sum of what was gathered, in ascending order of
 * ranks, and gather_columns.
 *
 * Every rank writes its part to every other rank, which takes one trip and is the fastest for few
 * bytes. LIMIT: each rank writes size - 1 times its bytes, while a sum in two trips would write
 * about twice its bytes; for the sums of long prompts use `nccl`. Thread: device. */
#include "kernels/ep/ep_signals.cuh"

enum { COLLECT_THREADS = 256, COLLECT_BLOCKS_MAX = 256 };

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
    const size_t me = blockIdx.x * (size_t)COLLECT_THREADS + threadIdx.x,
                 all = gridDim.x * (size_t)COLLECT_THREADS;
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

static __global__ void __launch_bounds__(COLLECT_THREADS)
    share_kernel(ep_call c, const unsigned char *mine, size_t bytes)
{
    grid_dependency_sync();
    if (block_has_fault(c)) return;
    const unsigned epoch = c.epochs[EP_FLAG_SHARED] + 1;
    /* each rank begins with another receiver, so that they do not all write to rank 0 first */
    for (int i = 0; i < c.size; i++)
        copy_bytes(shared_part(c, epoch, (c.rank + i) % c.size, c.rank), mine, bytes);
    if (is_last_block(c)) signal_all(c, EP_FLAG_SHARED);
}

cudaError_t ep_run_share(cudaStream_t s, const struct ep_call *c, const void *mine, size_t bytes)
{
    return launch(s, share_kernel, dim3(collect_blocks(bytes / 16)), dim3(COLLECT_THREADS), 0, *c,
                  (const unsigned char *)mine, bytes);
}

static __global__ void __launch_bounds__(COLLECT_THREADS)
    take_kernel(ep_call c, unsigned char *all, size_t bytes)
{
    grid_dependency_sync();
    if (!have_all_come(c, EP_FLAG_SHARED, c.direct)) return;
    for (int r = 0; r < c.size; r++)
        copy_bytes(all + (size_t)r * bytes, shared_part(c, c.epochs[EP_FLAG_SHARED], c.rank, r),
                   bytes);
}

cudaError_t ep_run_gather(cudaStream_t s, const struct ep_call *c, void *all, size_t bytes)
{
    return launch(s, take_kernel, dim3(collect_blocks(bytes / 16)), dim3(COLLECT_THREADS), 0, *c,
                  (unsigned char *)all, bytes);
}

struct ep_parts {
    const unsigned char *at; /* NULL: in the window */
    size_t bytes;
};

template <bool IS_F32>
static __global__ void __launch_bounds__(COLLECT_THREADS)
    add_kernel(ep_call c, ep_parts p, void *x, size_t n)
{
    grid_dependency_sync();
    if (!have_all_come(c, EP_FLAG_SHARED, c.direct)) return;
    const unsigned char *first = p.at ? p.at : shared_part(c, c.epochs[EP_FLAG_SHARED], c.rank, 0);
    const size_t step = p.at ? p.bytes : c.at.shared_bytes;
    for (size_t i = blockIdx.x * (size_t)COLLECT_THREADS + threadIdx.x; i < n;
         i += gridDim.x * (size_t)COLLECT_THREADS) {
        float sum = 0;
        for (int r = 0; r < c.size; r++) {
            const void *from = first + (size_t)r * step;
            const float v = IS_F32 ? ((const float *)from)[i]
                                   : bf16_to_float(((const uint16_t *)from)[i]);
            sum = r == 0 ? v : sum + v;
        }
        if (IS_F32) ((float *)x)[i] = sum;
        else ((uint16_t *)x)[i] = float_to_bf16(sum);
    }
}

cudaError_t ep_run_reduce(cudaStream_t s, const struct ep_call *c, const void *parts_at,
                          size_t part_bytes, void *x, size_t n, enum dtype dtype)
{
    const ep_parts p = { (const unsigned char *)parts_at, part_bytes };
    if (dtype == DTYPE_F32)
        return launch(s, add_kernel<true>, dim3(collect_blocks(n)), dim3(COLLECT_THREADS), 0, *c, p,
                      x, n);
    return launch(s, add_kernel<false>, dim3(collect_blocks(n)), dim3(COLLECT_THREADS), 0, *c, p, x,
                  n);
}

/* ---- columns ---- */

enum { COLUMN_BLOCKS_MAX = 64 };

/* Where the columns of ep_gather_columns begin, by rank. */
struct ep_column_places {
    size_t first[EP_PEERS_MAX + 1];
};

template <class T>
static __device__ __forceinline__ void copy_rows(T *to, size_t to_stride, const T *from,
                                                 size_t from_stride, size_t width, size_t n_rows)
{
    for (size_t row = blockIdx.y; row < n_rows; row += gridDim.y)
        for (size_t k = blockIdx.x * (size_t)COLLECT_THREADS + threadIdx.x; k < width;
             k += gridDim.x * (size_t)COLLECT_THREADS)
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
static __global__ void __launch_bounds__(COLLECT_THREADS)
    share_columns_kernel(ep_call c, const float *mine, size_t stride, size_t width, size_t n_rows)
{
    grid_dependency_sync();
    if (block_has_fault(c)) return;
    const unsigned epoch = c.epochs[EP_FLAG_SHARED] + 1;
    for (int i = 0; i < c.size; i++)
        copy_matrix((float *)(void *)shared_part(c, epoch, (c.rank + i) % c.size, c.rank), width,
                    mine, stride, width, n_rows);
    if (is_last_block(c)) signal_all(c, EP_FLAG_SHARED);
}

cudaError_t ep_run_share_columns(cudaStream_t s, const struct ep_call *c,
                                 const struct ep_columns *a)
{
    const size_t width = a->first[c->rank + 1] - a->first[c->rank];
    return launch(s, share_columns_kernel, column_blocks(width, a->n_rows), dim3(COLLECT_THREADS),
                  0, *c, a->mine, a->mine_stride, width, a->n_rows);
}

static __global__ void __launch_bounds__(COLLECT_THREADS)
    take_columns_kernel(ep_call c, ep_column_places at, float *y, size_t stride, size_t n_rows,
                        bool waits)
{
    grid_dependency_sync();
    if (!have_all_come(c, EP_FLAG_SHARED, waits)) return;
    const unsigned epoch = c.epochs[EP_FLAG_SHARED];
    for (int r = 0; r < c.size; r++) {
        const size_t width = at.first[r + 1] - at.first[r];
        copy_matrix(y + at.first[r], stride,
                    (const float *)(const void *)shared_part(c, epoch, c.rank, r), width, width,
                    n_rows);
    }
}

cudaError_t ep_run_gather_columns(cudaStream_t s, const struct ep_call *c,
                                  const struct ep_columns *a)
{
    ep_column_places at;
    size_t widest = 0;
    for (int r = 0; r <= c->size; r++) at.first[r] = a->first[r];
    for (int r = 0; r < c->size; r++)
        if (at.first[r + 1] - at.first[r] > widest) widest = at.first[r + 1] - at.first[r];
    const dim3 blocks = column_blocks(widest, a->n_rows);
    const bool waits = waits_itself(*c, (size_t)blocks.x * blocks.y);
    const cudaError_t e = waits ? cudaSuccess : ep_run_wait(s, c, EP_FLAG_SHARED);
    return e != cudaSuccess ? e
                            : launch(s, take_columns_kernel, blocks, dim3(COLLECT_THREADS), 0, *c,
                                     at, a->y, a->y_stride, a->n_rows, waits);
}
