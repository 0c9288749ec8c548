/* moe_route.cu - routes the rows of prompts, a warp a row; moe_sort.cu sorts them. Few rows are
 * moe_router.cu's. Thread: device; moe_route: engine. */
#include "kernels/cuda/moe/moe_route.h"

#include "kernels/cuda/moe/moe_route_few.cuh"

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

/* A row by a warp, in registers. */
static __device__ __forceinline__ void route_row_of_few(const route_args &a, few_experts *f,
                                                        size_t row, int32_t *chosen)
{
    const int lane = (int)(threadIdx.x % WARP);
    const few_row r = few_route(a, f, FEW_SCORES | FEW_CHOICE | FEW_WEIGHT);
    if (lane >= a.n_used) return;
    chosen[lane] = r.expert;
    a.experts[row * (size_t)a.n_used + (size_t)lane] = r.expert;
    a.weights[row * (size_t)a.n_used + (size_t)lane] = r.weight;
}

/* The same of models that moe_route_few.cuh takes; a warp loads its next row before it routes one.
 * Shared memory: choices, counts. */
static __global__ void __launch_bounds__(ROUTE_WARPS *WARP, 4)
    route_kernel_of_few(const __grid_constant__ route_args a,
                        const __grid_constant__ moe_sort_args sort)
{
    grid_dependency_sync();
    int32_t *chosen = (int32_t *)(void *)shared_memory();
    const size_t first = (size_t)blockIdx.x * SORT_ROWS;
    const moe_sort_args all = {}; /* padding rows are routed, too */
    size_t i = threadIdx.x / WARP;
    few_experts next;
    few_load(a, all, first + i, first + i < a.n_rows, &next);
#pragma unroll 1
    for (; i < SORT_ROWS && first + i < a.n_rows; i += ROUTE_WARPS) {
        few_experts now = next;
        const size_t then = first + i + ROUTE_WARPS;
        few_load(a, all, then, i + ROUTE_WARPS < SORT_ROWS && then < a.n_rows, &next);
        route_row_of_few(a, &now, first + i, chosen + i * (size_t)a.n_used);
    }
    __syncthreads();
    if (sort.scratch) count_choices(sort, chosen, chosen + SORT_ROWS * a.n_used);
}

static cudaError_t run_of_few(cudaStream_t s, const route_args &a, const moe_sort_args &sort)
{
    const size_t ints = (size_t)SORT_ROWS * (size_t)a.n_used + (size_t)a.n_experts;
    return launch(s, route_kernel_of_few, dim3(blocks_for(a.n_rows, SORT_ROWS)),
                  dim3(ROUTE_WARPS * WARP), ints * sizeof(int32_t), a, sort);
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
    cudaError_t e = is_route_of_few(*a)        ? run_of_few(s, *a, sort)
                    : a->n_experts <= 4 * WARP ? run<4>(s, *a, sort)
                    : a->n_experts <= 8 * WARP ? run<8>(s, *a, sort)
                                               : run<KERNEL_EXPERTS_MAX / WARP>(s, *a, sort);
    return e == cudaSuccess && a->rows ? moe_sort_run(s, sort) : e;
}
