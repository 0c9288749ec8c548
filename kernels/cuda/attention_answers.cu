/* attention_answers.cu - whether a model's answer rows take attention_answers.cuh's kernels, and which. Thread: engine. */
#include "kernels/cuda/attention_calls.cuh"
#include "kernels/cuda/attention_answers.cuh"

bool attention_answers_fit(const struct attention *a)
{
    return attention_tiles_fit(a) && a->kv.dtype == DTYPE_BF16 && a->n_heads / a->kv.n_heads >= ANSWER_HEADS_LEAST;
}

template <int DIM> static cudaError_t launch_answers(cudaStream_t stream, struct rows_call c, int max_blocks)
{
    dim3 grid;
    c.n_runs = (c.n_heads / c.kv.n_heads + ANSWER_HEADS - 1) / ANSWER_HEADS;
    cudaError_t e = attention_grid((size_t)(c.item_end - c.item_begin) * (size_t)(c.kv.n_heads * c.n_runs), ANSWER_BLOCKS, max_blocks, &grid);
    return e == cudaSuccess ? launch(stream, attend_answers<DIM>, grid, dim3(ANSWER_THREADS), answer_shape<DIM>::BYTES, c) : e;
}

cudaError_t attention_answers_launch(cudaStream_t stream, const struct rows_call *c, int max_blocks)
{
    return c->kv.head_dim == 64 ? launch_answers<64>(stream, *c, max_blocks) : launch_answers<128>(stream, *c, max_blocks);
}
