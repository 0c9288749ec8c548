/* block_wait.h - for how many steps a sequence that lost its KV blocks has to wait for others: an
 * estimate from what the running ones may still generate.
 *
 * Each running sequence takes a token per step and ends with its longest answer, so it is an upper
 * bound: one that stops before that gives its blocks back sooner. Thread: any (pure). */
#ifndef BATON_ENGINE_BLOCK_WAIT_H
#define BATON_ENGINE_BLOCK_WAIT_H

#include <stddef.h>
#include <stdint.h>

/* A running sequence. */
struct block_holder {
    uint32_t n_blocks; /* that it holds */
    uint32_t n_left;   /* tokens that it may still generate */
};

/* Steps until `need` blocks are free, of which n_free are now; while they run the holders take one
 * block more for each block_tokens steps. When not even the end of all gives as many: the steps
 * until then. Sorts h[n] by n_left. */
uint32_t block_wait_steps(struct block_holder *h, size_t n, uint32_t n_free, uint32_t need,
                          uint32_t block_tokens);

#endif
