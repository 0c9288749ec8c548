/* block_wait.c - see block_wait.h. */
#include "shared/engine/block_wait.h"

#include <stdlib.h>

static int by_left(const void *a, const void *b)
{
    const struct block_holder *x = a, *y = b;
    return (x->n_left > y->n_left) - (x->n_left < y->n_left);
}

uint32_t block_wait_steps(struct block_holder *h, size_t n, uint32_t n_free, uint32_t need,
                          uint32_t block_tokens)
{
    uint64_t given = n_free;
    if (n_free >= need || n == 0) return 0;
    qsort(h, n, sizeof *h, by_left);
    for (size_t i = 0; i < n; i++) {
        /* What those that run on have taken by then; what ended ones took has come back, too. */
        const uint64_t taken = (uint64_t)(n - i - 1) * h[i].n_left / block_tokens;
        given += h[i].n_blocks;
        if (given >= need + taken) return h[i].n_left;
    }
    return h[n - 1].n_left;
}
