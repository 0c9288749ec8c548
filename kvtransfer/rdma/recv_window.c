/* recv_window.c - see recv_window.h. */
#include "kvtransfer/rdma/recv_window.h"

static uint64_t bit_of(uint64_t number) { return UINT64_C(1) << (number % 64); }
static uint32_t word_of(uint64_t number) { return (uint32_t)(number % RDMA_WINDOW / 64); }

enum status rdma_landing_mark(struct rdma_landing *l, uint32_t immediate)
{
    uint32_t ahead = immediate - (uint32_t)l->upto; /* modulo 2^32: RDMA_WINDOW is far smaller */
    if (ahead >= RDMA_WINDOW) return ERR_FORMAT;
    uint64_t number = l->upto + ahead;
    if (l->bits[word_of(number)] & bit_of(number)) return ERR_FORMAT;
    l->bits[word_of(number)] |= bit_of(number);
    while (l->bits[word_of(l->upto)] & bit_of(l->upto)) {
        l->bits[word_of(l->upto)] &= ~bit_of(l->upto);
        l->upto++;
    }
    return OK;
}

bool rdma_landing_has(const struct rdma_landing *l, uint64_t number)
{
    if (number < l->upto) return true;
    return number - l->upto < RDMA_WINDOW && (l->bits[word_of(number)] & bit_of(number));
}

bool rdma_landing_is_valid(const struct rdma_landing *l)
{
    return !(l->bits[word_of(l->upto)] & bit_of(l->upto));
}
