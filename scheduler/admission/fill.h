/* fill.h - how long each node that computes prompts will be busy with those of this entry node, and
 * whether that is enough for now.
 *
 * A node computes prompts in the order in which they came, so what waits there has its order for
 * good. The line of the entry node (admit.h) holds back what a node does not need to stay busy: a
 * node has enough when the next prompt would come before it has computed those it has, by its
 * measured speed. A prompt is on its way for about lead_ms: the directory, a start credit, and a
 * step of the decode node, which gives its blocks between two. A prompt counts from the choice of
 * its node to its first token. Owner: the entry. Thread: loop. */
#ifndef BATON_SCHEDULER_ADMISSION_FILL_H
#define BATON_SCHEDULER_ADMISSION_FILL_H

#include <stddef.h>
#include <stdint.h>

enum {
    FILL_LEAD_MS = 50,  /* but for the decode node's step */
    FILL_TOKENS = 8192, /* enough of a node whose speed is not known */
};

struct fill_node {
    uint64_t node, tokens;
    uint32_t n, per_s;
    double free_ms; /* when it will have computed them */
    double enough_ms;
};

struct fill {
    struct fill_node *nodes; /* [n] those with prompts */
    size_t n, cap;
};

struct fill_prompt {
    uint64_t node;
    uint32_t tokens;
    uint32_t per_s; /* prompt tokens per second of the node; 0: not known */
    uint32_t step_ms;
    uint32_t n_entries; /* that share the node's time */
};

void fill_release(struct fill *f);
void fill_add(struct fill *f, const struct fill_prompt *p, uint64_t now_ms);
void fill_remove(struct fill *f, uint64_t node, uint32_t tokens, uint64_t now_ms);
/* The nodes that have enough: at most `cap` of them. Returns how many. */
size_t fill_enough(const struct fill *f, uint64_t now_ms, uint64_t *out, size_t cap);

#endif
