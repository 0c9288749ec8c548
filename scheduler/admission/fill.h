/* fill.h - how many prompts this entry node has at each node that computes them, and whether those
 * are enough for now.
 *
 * A node computes prompts in the order in which they came, so what waits there has its order for
 * good. The line of the entry node (admit.h) holds back what a node does not need to stay busy: a
 * node has enough when it has two prompts and FILL_MS of work, by its measured speed, shared by
 * the entry nodes. A prompt counts from the choice of its node to its first token. Owner: the
 * entry. Thread: loop. */
#ifndef BATON_SCHEDULER_ADMISSION_FILL_H
#define BATON_SCHEDULER_ADMISSION_FILL_H

#include <stddef.h>
#include <stdint.h>

enum {
    FILL_MS = 150,
    FILL_PROMPTS = 2,
    FILL_TOKENS = 8192 /* in place of FILL_MS where the speed is not known */
};

struct fill_node {
    uint64_t node, tokens;
    uint32_t n;
    uint64_t enough_tokens;
};

struct fill {
    struct fill_node *nodes; /* [n] those with prompts */
    size_t n, cap;
};

void fill_release(struct fill *f);
/* Counts a prompt at a node that computes tokens_per_s (0: not known), 1/n_entries of whose time is
 * this entry node's. */
void fill_add(struct fill *f, uint64_t node, uint32_t tokens, uint32_t tokens_per_s,
              uint32_t n_entries);
void fill_remove(struct fill *f, uint64_t node, uint32_t tokens);
/* The nodes that have enough: at most `cap` of them. Returns how many. */
size_t fill_enough(const struct fill *f, uint64_t *out, size_t cap);

#endif
