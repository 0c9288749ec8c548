/* attention_calls.cuh - what attention.cu launches of the kernels that are compiled on their own. Thread: engine. */
#ifndef BATON_KERNELS_CUDA_ATTENTION_CALLS_CUH
#define BATON_KERNELS_CUDA_ATTENTION_CALLS_CUH

#include "kernels/cuda/attention_rows.cuh"
#include "kernels/cuda/attention_tiles.cuh"

/* n_items of (row, segment) from c->item_begin on; n_runs is filled in. */
cudaError_t attention_rows_launch(cudaStream_t stream, const struct rows_call *c, int n_items);

/* Whether prompts of this model go through tiles. */
bool        attention_tiles_fit(const struct attention *a);
cudaError_t attention_tiles_launch(cudaStream_t stream, const struct tiles_call *c);

/* Whether all rows of this model go through tensor cores by their latents; as attention_rows_launch. */
bool        attention_latents_fit(const struct attention *a);
cudaError_t attention_latents_launch(cudaStream_t stream, const struct rows_call *c, int n_items);

#endif
