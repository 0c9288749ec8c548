/* recv_window.h - which puts of a connection have landed: a window of sequence numbers, and the
 * 32-bit immediates that name them.
 *
 * The sender numbers its puts 0, 1, 2, ... and never has more than RDMA_WINDOW of them beyond what
 * the receiver has reported. Each put's last work request carries the low 32 bits of its number;
 * queue pairs overtake each other, so numbers arrive in any order. Invariants
 *  1 Every number below `upto` has landed; bit (number % RDMA_WINDOW) is set for those at or above
 *  it that have. `upto` itself has not. 2 A number is marked once: a second time, or outside [upto,
 *  upto + RDMA_WINDOW), is the peer's mistake and changes nothing.
 * Thread: its owner's (a value). */
#ifndef BATON_KVTRANSFER_RDMA_RECV_WINDOW_H
#define BATON_KVTRANSFER_RDMA_RECV_WINDOW_H

#include <stdbool.h>
#include <stdint.h>

#include "shared/base/status.h"

enum { RDMA_WINDOW = 256 };

struct rdma_landing {
    uint64_t upto;
    uint64_t bits[RDMA_WINDOW / 64];
};

/* ERR_FORMAT: invariant 2. */
enum status rdma_landing_mark(struct rdma_landing *l, uint32_t immediate) MUST_CHECK;
/* Has this put landed? Numbers beyond the window have not. */
bool rdma_landing_has(const struct rdma_landing *l, uint64_t number);
/* Is the value one that marking can produce: the bit of `upto` is clear? */
bool rdma_landing_is_valid(const struct rdma_landing *l);

#endif
