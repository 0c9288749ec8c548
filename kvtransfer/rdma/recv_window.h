/* recv_window.h - which puts of a connection are complete: a window of sequence numbers, and the
 * 32-bit immediates that carry them.
 *
 * The sender numbers its puts 0, 1, 2, ... and never has more than RDMA_WINDOW beyond what the
 * receiver has reported. Each put's last work request carries the low 32 bits of its number; queue
 * pairs overtake each other, so numbers arrive in any order. Invariants:
 *  1 Every number below `completed` is complete; bit (number % RDMA_WINDOW) is set for complete
 *    ones above it. `completed` itself is not complete.
 *  2 A number is set once: a repeated one, or one outside [completed, completed + RDMA_WINDOW), is
 *    the peer's mistake and changes nothing.
 * Thread: its owner's (a value). */
#ifndef BATON_KVTRANSFER_RDMA_RECV_WINDOW_H
#define BATON_KVTRANSFER_RDMA_RECV_WINDOW_H

#include <stdbool.h>
#include <stdint.h>

#include "shared/base/status.h"

enum { RDMA_WINDOW = 256 };

struct rdma_recv_window {
    uint64_t completed;
    uint64_t bits[RDMA_WINDOW / 64];
};

/* ERR_FORMAT: invariant 2. */
enum status rdma_recv_window_set(struct rdma_recv_window *l, uint32_t immediate) MUST_CHECK;
/* Whether this put is complete; numbers beyond the window are not. */
bool rdma_recv_window_has(const struct rdma_recv_window *l, uint64_t number);
/* Whether setting bits can produce this value: the bit of `completed` is clear. */
bool rdma_recv_window_is_valid(const struct rdma_recv_window *l);

#endif
