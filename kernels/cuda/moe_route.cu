/* moe_route.cu - routes tokens to experts.
 *
 * A warp has a row. The cost is the launch: one block does everything for the few rows of a decode
 * step; with more rows there is a launch for routing and one or two for sorting. Thread: device;
 * moe_route: engine. */
#include "kernels/cuda/moe_route.h"

#include "kernels/cuda/moe_route_row.cuh"
#include "kernels/cuda/moe_sort.cuh"

enum { ROUTE_WARPS = 8 };
enum {
    ONE_BLOCK_ROWS = 32, /* if one block does everything */
    ONE_BLOCK_WARPS_MIN = 8,
    ONE_BLOCK_WARPS = 16
};

/* SORT_ROWS rows. Shared memory: the warps' memory, choices, counts. */
static __global__ void __launch_bounds__(ROUTE_WARPS *WARP, 2)
    route_kernel(route_args a, moe_sort_args sort)
{
    grid_dependency_sync();
    float *rooms = (float *)(void *)shared_memory();
    int32_t *chosen = (int32_t *)(void *)(rooms + ROUTE_WARPS * route_floats(a));
    const size_t warp = threadIdx.x / WARP, first = (size_t)blockIdx.x * SORT_ROWS;
    for (size_t i = warp; i < SORT_ROWS && first + i < a.n_rows; i += ROUTE_WARPS)
        route_row(a, first + i, rooms + warp * route_floats(a), chosen + i * (size_t)a.n_used);
    __syncthreads();
    if (sort.scratch) count_choices(sort, chosen, chosen + SORT_ROWS * a.n_used);
}

/* All rows. Shared memory: the warps' memory, choices, counts. */
static __global__ void __launch_bounds__(ONE_BLOCK_WARPS *WARP)
    route_one_block_kernel(route_args a, moe_sort_args sort)
{
    grid_dependency_sync();
    float *rooms = (float *)(void *)shared_memory();
    const size_t warp = threadIdx.x / WARP, n_warps = blockDim.x / WARP;
    int32_t *chosen = (int32_t *)(void *)(rooms + n_warps * route_floats(a));
    for (size_t row = warp; row < a.n_rows; row += n_warps)
        route_row(a, row, rooms + warp * route_floats(a), chosen + row * (size_t)a.n_used);
    __syncthreads();
    sort_one_block(sort, chosen + a.n_rows * (size_t)a.n_used);
}

cudaError_t moe_route(cudaStream_t s, const struct route_args *a, const int32_t *n_real_rows)
{
    if (a->n_rows == 0) return cudaSuccess;
    moe_sort_args sort = sort_of_route(*a, n_real_rows);
    const size_t counts = sizeof(int32_t) * ((size_t)a->n_experts + 1),
                 room = sizeof(float) * route_floats(*a),
                 chosen = sizeof(int32_t) * (size_t)a->n_used;
    const size_t warps = a->n_rows > ONE_BLOCK_WARPS_MIN ? (size_t)ONE_BLOCK_WARPS
                                                         : (size_t)ONE_BLOCK_WARPS_MIN;
    const size_t alone = warps * room + a->n_rows * chosen + counts;
    if (a->rows && a->n_rows <= ONE_BLOCK_ROWS && alone <= ROUTE_SHARED_MAX)
        return launch(s, route_one_block_kernel, dim3(1), dim3((unsigned)(warps * WARP)), alone, *a,
                      sort);
    cudaError_t e = launch(s, route_kernel, dim3(blocks_for(a->n_rows, SORT_ROWS)),
                           dim3(ROUTE_WARPS * WARP),
                           ROUTE_WARPS * room + SORT_ROWS * chosen + counts, *a, sort);
    return e == cudaSuccess && a->rows ? moe_sort_run(s, sort) : e;
}
