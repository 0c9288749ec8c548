/* recv_window.c - see recv_window.h. */
#include "kvtransfer/rdma/recv_window.h"

static uint64_t bit_of(uint64_t number) { return UINT64_C(1) << (number % 64); }
static uint32_t word_of(uint64_t number) { return (uint32_t)(number % RDMA_WINDOW / 64); }

enum status rdma_recv_window_set(struct rdma_recv_window *l, uint32_t immediate)
{
    uint32_t ahead = immediate - (uint32_t)l->completed; /* modulo 2^32: RDMA_WINDOW is far
                                                          * smaller */
    if (ahead >= RDMA_WINDOW) return ERR_FORMAT;
    uint64_t number = l->completed + ahead;
    if (l->bits[word_of(number)] & bit_of(number)) return ERR_FORMAT;
    l->bits[word_of(number)] |= bit_of(number);
    while (l->bits[word_of(l->completed)] & bit_of(l->completed)) {
        l->bits[word_of(l->completed)] &= ~bit_of(l->completed);
        l->completed++;
    }
    return OK;
}

bool rdma_recv_window_has(const struct rdma_recv_window *l, uint64_t number)
{
    if (number < l->completed) return true;
    return number - l->completed < RDMA_WINDOW && (l->bits[word_of(number)] & bit_of(number));
}

bool rdma_recv_window_is_valid(const struct rdma_recv_window *l)
{
    return !(l->bits[word_of(l->completed)] & bit_of(l->completed));
}
