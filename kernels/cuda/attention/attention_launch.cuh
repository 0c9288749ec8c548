/* attention_launch.cuh - the launch functions of the kernels that attention.cu uses and that are
 * compiled in files of their own. Thread: engine. */
#ifndef BATON_KERNELS_CUDA_ATTENTION_ATTENTION_LAUNCH_CUH
#define BATON_KERNELS_CUDA_ATTENTION_ATTENTION_LAUNCH_CUH

#include "kernels/cuda/attention/attention_decode.cuh"
#include "kernels/cuda/attention/attention_prefill.cuh"

/* The grid for n_units of work that blocks stride over. It has at most blocks_per_sm blocks per SM,
 * about as many as run there at a time, because in a captured graph blocks without work cost time
 * too. max_blocks: 0, or the maximum. */
cudaError_t attention_grid(size_t n_units, int blocks_per_sm, int max_blocks, dim3 *grid);

/* Do these kernels support the type of the pool? (attention_kv_append.cu) */
bool attention_supports_kv(const struct kv_layer *kv);
/* Whether a->append can leave rotated queries in bf16, from where each head of q begins; and with
 * that. */
bool attention_append_leaves_bf16(const struct attention *a);
cudaError_t attention_append_leaving_bf16(cudaStream_t stream, const struct attention *a);
/* Are the second heads of r the keys as they are appended? */
bool attention_rotates_keys(const struct rope_args *r, const struct kv_layer *kv, const float *k);

/* Launches decode attention. n_runs is filled in here. */
cudaError_t attention_decode_launch(cudaStream_t stream, const struct attn_decode_call *c,
                                    int max_blocks);

/* Whether decode rows of this model can use tensor cores, with a group of heads at a time. The
 * launch is otherwise like attention_decode_launch. */
bool attention_decode_mma_supports(const struct attention *a);
/* Whether the blocks of n_items segments of decode rows all run at a time. */
bool attention_decode_mma_is_one_wave(const struct attention *a, int32_t n_items);
/* Whether such a launch does what a->append says; rows must be the only ones of their
 * sequences. */
bool attention_decode_mma_appends(const struct attention *a);
cudaError_t attention_decode_mma_launch(cudaStream_t stream, const struct attn_decode_call *c,
                                        int max_blocks);

/* Whether prompts of this model can use the tiled kernel. */
bool attention_prefill_supports(const struct attention *a);
/* How many sets of pairs a tile of theirs has; the bits do not know. n_rows: at most, of prompts;
 * n_at_once as in struct attn_prefill_call. */
cudaError_t attention_prefill_sets(const struct attention *a, int32_t n_rows, int32_t n_at_once,
                                   int32_t *n_sets);
/* n_windows: of c->rows_per_tile rows each, at most. */
cudaError_t attention_prefill_launch(cudaStream_t stream, const struct attn_prefill_call *c,
                                     int32_t n_windows, int max_blocks);

/* Whether attention_prefill_launch takes the kernel of compute capability 9.0: its tiles are of two
 * sets, one block runs on an SM, and its bits are others. */
bool attention_prefill_sm90_supports(const struct kv_layer *kv);
cudaError_t attention_prefill_sm90_launch(cudaStream_t stream, const struct attn_prefill_call *c,
                                          dim3 grid);

/* Whether all rows of this model go through tensor cores by their latents; as
 * attention_decode_launch. */
bool attention_mla_decode_supports(const struct attention *a);
cudaError_t attention_mla_decode_launch(cudaStream_t stream, const struct attn_decode_call *c,
                                        int max_blocks);

#endif
