/* move_rows.cu - see move_rows.h. Thread: engine. */
#include "kernels/cuda/inputs/move_rows.h"

#include "kernels/cuda/launch.cuh"

enum { THREADS = 128 };

static __device__ __forceinline__ int32_t number_of(const move_rows_call &c, uint32_t i)
{
    return i ? c.accepted[i - 1] : 0;
}

static __device__ void move_one(const move_rows_call &c, const kernel_move &m)
{
    const int32_t by = number_of(c, m.by[0]) + number_of(c, m.by[1]);
    for (int32_t i = m.row; i < m.row + m.n_rows; i++) c.pos[i] += by;
    if (m.id) c.ids[m.row] -= number_of(c, m.id); /* -1 - i */
    if (m.from) c.from_rows[m.row] += number_of(c, m.from);
    if (m.logit_by) c.logit_rows[m.logit] += number_of(c, m.logit_by);
}

static __global__ void __launch_bounds__(THREADS) move_kernel(const move_rows_call c)
{
    grid_dependency_sync();
    const int i = (int)(blockIdx.x * THREADS + threadIdx.x);
    if (i < c.n_moves) move_one(c, c.moves[i]);
    if (i >= c.n_logits || !c.row_params) return;
    sample_row_params &p = c.row_params[i];
    const int32_t by = number_of(c, p.after);
    p.index += (uint32_t)by;
    if (p.n_chosen > 0) p.n_chosen += (uint32_t)by;
}

extern "C" cudaError_t move_rows(cudaStream_t stream, const struct move_rows_call *c)
{
    const int32_t n = c->n_moves > c->n_logits ? c->n_moves : c->n_logits;
    return n > 0 ? launch(stream, move_kernel, dim3(blocks_for((size_t)n, THREADS)), dim3(THREADS),
                          0, *c)
                 : cudaSuccess;
}
