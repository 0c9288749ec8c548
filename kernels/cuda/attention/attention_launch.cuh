/* attention_launch.cuh - what attention.cu launches of the kernels that are compiled on their own.
 * Thread: engine. */
#ifndef BATON_KERNELS_CUDA_ATTENTION_ATTENTION_LAUNCH_CUH
#define BATON_KERNELS_CUDA_ATTENTION_ATTENTION_LAUNCH_CUH

#include "kernels/cuda/attention/attention_decode.cuh"
#include "kernels/cuda/attention/attention_prefill.cuh"

/* Blocks for n_units of work that they stride over, at most so many per processor: about as many as
 * run on it at a time, since those that find nothing to do in a recorded launch take their turn
 * too. max_blocks: 0, or the most. */
cudaError_t attention_grid(size_t n_units, int blocks_per_sm, int max_blocks, dim3 *grid);

/* Is the pool of a type that these kernels have? (attention_kv_append.cu) */
bool attention_supports_kv(const struct kv_layer *kv);

/* n_runs is filled in. */
cudaError_t attention_decode_launch(cudaStream_t stream, const struct attn_decode_call *c,
                                    int max_blocks);

/* Whether rows of answers of this model go through tensor cores, a group of heads at a time; as
 * attention_decode_launch. */
bool attention_decode_mma_supports(const struct attention *a);
cudaError_t attention_decode_mma_launch(cudaStream_t stream, const struct attn_decode_call *c,
                                        int max_blocks);

/* Whether prompts of this model go through tiles. */
bool attention_prefill_supports(const struct attention *a);
/* How many sets of pairs a tile of theirs has; the bits do not know. n_rows: at most, of prompts;
 * n_at_once as in struct attn_prefill_call. */
cudaError_t attention_prefill_sets(const struct attention *a, int32_t n_rows, int32_t n_at_once,
                                   int32_t *n_sets);
/* n_windows: of c->rows_per_tile rows each, at most. */
cudaError_t attention_prefill_launch(cudaStream_t stream, const struct attn_prefill_call *c,
                                     int32_t n_windows, int max_blocks);

/* Whether all rows of this model go through tensor cores by their latents; as
 * attention_decode_launch. */
bool attention_mla_decode_supports(const struct attention *a);
cudaError_t attention_mla_decode_launch(cudaStream_t stream, const struct attn_decode_call *c,
                                        int max_blocks);

#endif
