/* ep_kernels.h - kernels of the GPU backends: sort, send, wait, return, sum.
 *
 * A *window* is memory that several ranks use: one allocation per rank with the same layout
 * everywhere (struct ep_layout, described there). In `direct` calls (peer) kernels write into the
 * windows of all ranks and signal by flags; in others (nccl) they write into `out_rows` and
 * `out_back` of this rank, which the host sends, and nothing waits. docs/kernels.md says why one
 * window is enough.
 * Thread: engine. Calls enqueue work on the stream and return. */
#ifndef BATON_KERNELS_EP_EP_KERNELS_H
#define BATON_KERNELS_EP_EP_KERNELS_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/ep/ep.h"

#ifdef __cplusplus
extern "C" {
#endif

enum ep_flag { EP_FLAG_ROWS, EP_FLAG_BACK, EP_FLAG_SHARED, EP_FLAGS };
enum ep_fault {
    EP_FAULT_NONE,
    EP_FAULT_LOST /* a rank gave no sign of life */,
    EP_FAULT_EXPERT /* a rank was given an expert that does not exist */,
    EP_FAULT_ABORTED /* ep_abort was called on the rank while it waited */
};
enum { EP_FLAG_BYTES = 128 };

/* Offsets in a window, and sizes of a row in transit (ep_backend.h). The parts of a window:
 *   fault     a word: 0, or EP_FAULT_* << 16 | rank + 1; other ranks write it too, so that all end
 *             with the same cause
 *   flags     [EP_FLAGS][size] words, each on a separate 128 bytes, written by the rank of the
 *             second index
 *   counts    [size][n_physical] int32: rows by sending rank and expert
 *   rows      [size][pair_slots] received rows by sending rank; packed contiguously if the host
 *             knows how many
 *   back      [pair_slots] returned results; not direct and not packed [size][pair_slots]
 *   shared    [2][size][collective_bytes]; not direct [size] parts of a sum */
struct ep_layout {
    size_t fault, flags, counts, rows, back, shared, bytes;
    size_t row_bytes, scales_at, tail_at, back_bytes,
        shared_bytes /* of one rank, a multiple of 16 */;
    size_t pair_slots;
};

/* A kernel's arguments. Pointers are this GPU's memory, except other ranks' windows. */
struct ep_call {
    struct ep_layout at;
    int32_t rank, size, n_used, hidden, n_logical, n_physical, first_local, n_local, n_rows, map;
    enum dtype send, back;
    bool direct, packed;
    unsigned long long timeout_ns;
    unsigned char *window[EP_PEERS_MAX]; /* direct: of every rank; otherwise [0] is this
                                          * rank's */
    unsigned char *own;                  /* this rank's window */
    unsigned char *out_rows, *out_back;  /* not direct: rows and results to send */
    unsigned *host_fault;                /* pinned: the host reads it */
    const unsigned *host_abort;          /* pinned: the host writes it, see ep_abort */
    unsigned *epochs, *done;             /* [EP_FLAGS]; blocks that have finished */
    const int32_t *first, *copies, *physical, *owner; /* of struct ep; owner [n_physical]: the
                                                       * rank */
    const int32_t *logical; /* [n_maps, n_physical] of struct ep_placement */
    const int32_t *experts; /* [n_rows, n_used] logical ones */
    const int32_t *n_real;  /* of struct ep_rows, as first_row */
    int32_t first_row;
    unsigned long long *n_chosen, *n_load;    /* of struct ep_rows, and of struct ep_config */
    int32_t *chosen, *rows, *index, *back_at; /* [n_rows n_used]: physical expert; of
                                                       * moe_sort_rows; which result of `back` */
    int32_t *begin;                           /* [n_physical + 1]: slots of this rank's rows by
                                   * physical expert */
    int32_t *recv_begin, *x_rows;             /* of struct ep_batch */
};

/* Computes chosen, rows, index, begin. */
cudaError_t ep_run_sort(cudaStream_t s, const struct ep_call *c);
/* Writes this rank's counts into its own window. Not direct. */
cudaError_t ep_run_counts(cudaStream_t s, const struct ep_call *c);
/* Sends rows to their owners, or into out_rows; direct: counts and flags too. */
cudaError_t ep_run_send(cudaStream_t s, const struct ep_call *c, const float *x, size_t x_stride);
/* Computes recv_begin and x_rows from counts. Direct: first waits for all rows. */
cudaError_t ep_run_index(cudaStream_t s, const struct ep_call *c);
/* Returns the results of all slots, at most n_slots, to where their rows came from, or into
 * out_back. */
cudaError_t ep_run_return(cudaStream_t s, const struct ep_call *c, const float *out,
                          size_t n_slots);
/* Computes y. Direct: first waits for all results. */
cudaError_t ep_run_sum(cudaStream_t s, const struct ep_call *c, const struct ep_combine_args *a);

/* Direct: waits in the stream until all ranks have signalled. Not direct: does nothing. */
cudaError_t ep_run_wait(cudaStream_t s, const struct ep_call *c, enum ep_flag kind);

/* Direct: `all` [size][bytes] becomes what the ranks give as `mine`. */
cudaError_t ep_run_all_gather(cudaStream_t s, const struct ep_call *c, void *all, const void *mine,
                              size_t bytes);
/* Direct: x becomes the sum of all ranks' x. */
cudaError_t ep_run_all_reduce(cudaStream_t s, const struct ep_call *c, void *x, size_t n,
                              enum dtype dtype);
/* Direct: as ep_gather_columns. */
cudaError_t ep_run_gather_columns(cudaStream_t s, const struct ep_call *c,
                                  const struct ep_columns *a);
/* Adds up parts [size][part_bytes], without waiting. */
cudaError_t ep_run_add_parts(cudaStream_t s, const struct ep_call *c, const void *parts,
                             size_t part_bytes, void *x, size_t n, enum dtype dtype);

#ifdef __cplusplus
}
#endif
#endif
