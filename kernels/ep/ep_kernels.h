/* ep_kernels.h - kernels of ep.h's rows on cards: sorting rows out, sending, waiting, returning,
 * adding up.
 *
 * Memory that several ranks use is a *window*, one allocation of each rank with the same layout
 * everywhere (struct ep_layout):
 *
 *     fault     a word: 0, or EP_FAULT_* << 16 | rank + 1; the others write here too, so that all
 *               end by the same cause
 *     flags     [EP_FLAGS][size] words, each on 128 bytes of its own, written by the rank that the
 *               second index names
 *     counts    [size][n_physical] int32: rows by sending rank and expert
 *     rows      [size][pair_slots] rows that arrived, by sending rank; packed one after the other
 *               where the host knows how many
 *     back      [pair_slots] results that came back; not direct and not packed [size][pair_slots]
 *     shared    [2][size][collective_bytes]; not direct [size] parts of a sum
 *
 * In `direct` calls kernels write into the windows of all ranks and tell by flags; in others (nccl)
 * they write into `out_rows` and `out_back` of this rank, which the host sends, and nobody waits.
 *
 * Flags count operations (epochs), kept on the card so that a recorded call can run again. That one
 * window is enough: a rank sends rows of the next call only after it has got all results of this
 * one, which their owners sent after they had read its rows; and results of the next only after it
 * has got rows that their sender sent when it had added up the last. all_reduce and all_gather have
 * no answer to wait for and take the two halves of `shared` in turn: who is two ahead has seen
 * everybody begin the one between, and so end the first. Calls put work on the stream and return.
 * Thread: engine. */
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
    EP_FAULT_LOST /* a rank gave no sign */,
    EP_FAULT_EXPERT /* a rank was given an expert that does not exist */
};
enum { EP_FLAG_BYTES = 128 };

/* Offsets in a window; sizes of a row as it travels (ep_backend.h). */
struct ep_layout {
    size_t fault, flags, counts, rows, back, shared, bytes;
    size_t row_bytes, scales_at, tail_at, back_bytes,
        shared_bytes /* of one rank, a multiple of 16 */;
    size_t pair_slots;
};

/* What a kernel gets. Pointers are to this card's memory but for the other ranks' windows. */
struct ep_call {
    struct ep_layout at;
    int32_t rank, size, n_used, hidden, n_logical, n_physical, first_local, n_local, n_rows;
    enum dtype send, back;
    bool direct, packed;
    unsigned long long timeout_ns;
    unsigned char *window[EP_PEERS_MAX]; /* direct: of every rank; otherwise [0] is this
                                          * rank's */
    unsigned char *own;                  /* this rank's window */
    unsigned char *out_rows, *out_back;  /* not direct: rows and results to send */
    unsigned *host_fault;                /* pinned: where the host looks */
    unsigned *epochs, *done;             /* [EP_FLAGS]; blocks that have ended */
    const int32_t *first, *copies, *physical, *owner; /* of ep_placement; owner [n_physical]:
                                                       * the rank */
    const int32_t *experts;                           /* [n_rows, n_used] logical ones */
    int32_t *chosen, *rows, *index, *back_at;         /* [n_rows n_used]: physical expert; of
                                                       * moe_sort_rows; which result of `back` */
    int32_t *begin;               /* [n_physical + 1]: slots of this rank's rows by
                                   * physical expert */
    int32_t *recv_begin, *x_rows; /* of struct ep_batch */
};

/* chosen, rows, index, begin. */
cudaError_t ep_run_sort(cudaStream_t s, const struct ep_call *c);
/* This rank's counts into own counts. Not direct. */
cudaError_t ep_run_counts(cudaStream_t s, const struct ep_call *c);
/* Rows to their owners, or into out_rows; direct: counts and flags too. */
cudaError_t ep_run_send(cudaStream_t s, const struct ep_call *c, const float *x, size_t x_stride);
/* Direct: waits for all rows. recv_begin and x_rows from counts. */
cudaError_t ep_run_index(cudaStream_t s, const struct ep_call *c);
/* Results of all slots, n_slots of them at most, to where their rows came from, or into
 * out_back. */
cudaError_t ep_run_return(cudaStream_t s, const struct ep_call *c, const float *out,
                          size_t n_slots);
/* Direct: waits for all results. y. */
cudaError_t ep_run_sum(cudaStream_t s, const struct ep_call *c, const struct ep_combine_args *a);

/* Direct: waits in the stream until all ranks have told. Not direct: nothing. */
cudaError_t ep_run_wait(cudaStream_t s, const struct ep_call *c, enum ep_flag kind);

/* Direct: `bytes` of this rank to all ranks' shared. */
cudaError_t ep_run_share(cudaStream_t s, const struct ep_call *c, const void *mine, size_t bytes);
/* Direct: waits, and takes what all shared. */
cudaError_t ep_run_gather(cudaStream_t s, const struct ep_call *c, void *all, size_t bytes);
/* Direct: waits, and adds up. Not direct: adds up parts [size][part_bytes], nothing is waited
 * for. */
cudaError_t ep_run_reduce(cudaStream_t s, const struct ep_call *c, const void *parts,
                          size_t part_bytes, void *x, size_t n, enum dtype dtype);

#ifdef __cplusplus
}
#endif
#endif
