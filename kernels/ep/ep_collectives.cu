/* ep_collectives.cu - all_gather, and all_reduce as the sum of what was gathered, in ascending
 * order of ranks.
 *
 * Every rank writes its part to every other rank, which takes one trip and is the fastest for few
 * bytes. LIMIT: each rank writes size - 1 times its bytes, while a sum in two trips would write
 * about twice its bytes; for the sums of long prompts use `nccl`. Thread: device. */
#include "kernels/ep/ep_signals.cuh"

enum { COLLECT_THREADS = 256, COLLECT_BLOCKS_MAX = 256 };

/* One block waits, so that the other SMs are free for other streams. */
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
    if (block_has_fault(c)) return;
    for (int r = 0; r < c.size; r++)
        copy_bytes(all + (size_t)r * bytes, shared_part(c, c.epochs[EP_FLAG_SHARED], c.rank, r),
                   bytes);
}

cudaError_t ep_run_gather(cudaStream_t s, const struct ep_call *c, void *all, size_t bytes)
{
    const cudaError_t e = ep_run_wait(s, c, EP_FLAG_SHARED);
    return e != cudaSuccess ? e
                            : launch(s, take_kernel, dim3(collect_blocks(bytes / 16)),
                                     dim3(COLLECT_THREADS), 0, *c, (unsigned char *)all, bytes);
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
    if (block_has_fault(c)) return;
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
    const cudaError_t e = ep_run_wait(s, c, EP_FLAG_SHARED);
    if (e != cudaSuccess) return e;
    if (dtype == DTYPE_F32)
        return launch(s, add_kernel<true>, dim3(collect_blocks(n)), dim3(COLLECT_THREADS), 0, *c, p,
                      x, n);
    return launch(s, add_kernel<false>, dim3(collect_blocks(n)), dim3(COLLECT_THREADS), 0, *c, p, x,
                  n);
}
