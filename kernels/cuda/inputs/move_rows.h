/* move_rows.h - moves the rows of an uploaded step, once it is known how many drafts before them
 * are right: tokens, positions, rows of logits, and sampling's parameters. attention_move_rows does
 * the same for lists.
 *
 * All pointers are device memory. Thread: engine. The call enqueues work on the stream; it neither
 * waits nor allocates. */
#ifndef BATON_KERNELS_CUDA_INPUTS_MOVE_ROWS_H
#define BATON_KERNELS_CUDA_INPUTS_MOVE_ROWS_H

#include <cuda_runtime_api.h>

#include "kernels/cuda/sampling/sample.h"
#include "kernels/step.h"

#ifdef __cplusplus
extern "C" {
#endif

struct move_rows_call {
    const struct kernel_move *moves; /* [n_moves] */
    int32_t n_moves, n_logits;
    const int32_t *accepted; /* the numbers that moves name */
    int32_t *ids, *pos, *from_rows, *logit_rows;
    struct sample_row_params *row_params; /* [n_logits]; NULL: the host samples */
};

/* Moves the rows, and what they sample with, by the numbers of c->accepted that c->moves name. No
 * row is of two moves. n_moves: 1 .. kernel_limits.max_seqs. Fails only as a launch does. */
cudaError_t move_rows(cudaStream_t stream, const struct move_rows_call *c);

#ifdef __cplusplus
}
#endif
#endif
