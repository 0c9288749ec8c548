/* moe_route.cu - routes the rows of prompts, a warp a row; moe_sort.cu sorts them. Few rows are
 * moe_router.cu's. Thread: device; moe_route: engine. */
#include "kernels/cuda/moe/moe_route.h"

#include "kernels/cuda/moe/moe_route_row.cuh"
#include "kernels/cuda/moe/moe_sort.cuh"

enum { ROUTE_WARPS = 8 };

/* SORT_ROWS rows. Shared memory: the warps' memory, choices, counts. */
template <int PER_LANE>
static __global__ void __launch_bounds__(ROUTE_WARPS *WARP, PER_LANE > 4 ? 2 : 4)
    route_kernel(const __grid_constant__ route_args a, const __grid_constant__ moe_sort_args sort)
{
    grid_dependency_sync();
    float *rooms = (float *)(void *)shared_memory();
    int32_t *chosen = (int32_t *)(void *)(rooms + ROUTE_WARPS * route_floats(a));
    const size_t warp = threadIdx.x / WARP, first = (size_t)blockIdx.x * SORT_ROWS;
#pragma unroll 1
    for (size_t i = warp; i < SORT_ROWS && first + i < a.n_rows; i += ROUTE_WARPS)
        route_row<PER_LANE>(a, first + i, rooms + warp * route_floats(a),
                            chosen + i * (size_t)a.n_used);
    __syncthreads();
    if (sort.scratch) count_choices(sort, chosen, chosen + SORT_ROWS * a.n_used);
}

template <int PER_LANE>
static cudaError_t run(cudaStream_t s, const route_args &a, const moe_sort_args &sort)
{
    const size_t ints = (size_t)SORT_ROWS * (size_t)a.n_used + (size_t)a.n_experts,
                 shared = ROUTE_WARPS * route_floats(a) * sizeof(float) + ints * sizeof(int32_t);
    return launch(s, route_kernel<PER_LANE>, dim3(blocks_for(a.n_rows, SORT_ROWS)),
                  dim3(ROUTE_WARPS * WARP), shared, a, sort);
}

cudaError_t moe_route(cudaStream_t s, const struct route_args *a, const int32_t *n_real_rows)
{
    if (a->n_rows == 0) return cudaSuccess;
    const moe_sort_args sort = sort_of_route(*a, n_real_rows);
    cudaError_t e = a->n_experts <= 4 * WARP   ? run<4>(s, *a, sort)
                    : a->n_experts <= 8 * WARP ? run<8>(s, *a, sort)
                                               : run<KERNEL_EXPERTS_MAX / WARP>(s, *a, sort);
    return e == cudaSuccess && a->rows ? moe_sort_run(s, sort) : e;
}
