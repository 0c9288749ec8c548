/* fill.h - how long each node that computes prompts will be busy with those of this entry node, and
 * whether that is enough for now.
 *
 * A node computes prompts in the order in which they came, so what waits there has its order for
 * good. The line of the entry node (admit.h) holds back what a node does not need to stay busy: a
 * node has enough when the next prompt would come before it has computed those it has, by the speed
 * that it publishes, or that was seen here as long as it publishes none. A prompt is on its way for
 * about lead_ms: the directory, a start credit, and a step of the decode node, which gives its
 * blocks between two. A prompt counts from the choice of its node to its first token. Owner: the
 * entry. Thread: loop. */
#ifndef BATON_SCHEDULER_ADMISSION_FILL_H
#define BATON_SCHEDULER_ADMISSION_FILL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    FILL_LEAD_MS = 40,    /* but for the decode node's step */
    FILL_TOKENS = 8192,   /* enough of a node whose speed is not known */
    FILL_SEEN = 2048,     /* tokens there, before what a node computes says how fast it is */
    FILL_NODES_KEPT = 256 /* above that, those without prompts are forgotten */
};

struct fill_node {
    uint64_t node, tokens;
    uint32_t n;       /* prompts; 0: what was seen of it is kept */
    uint32_t n_first; /* of them those that go first */
    double per_s, lead_ms, enough_ms;
    double free_ms; /* when it will have computed them */
    /* It has had FILL_SEEN tokens since t_busy_ms, and has computed done_tokens; so its speed is
     * seen. One with less to do takes a step for a short prompt, which is no measure. */
    uint64_t t_busy_ms;
    double done_tokens, seen_per_s;
};

struct fill {
    struct fill_node *nodes; /* [n] */
    size_t n, cap;
};

struct fill_prompt {
    uint64_t node;
    uint32_t tokens;
    uint32_t per_s; /* prompt tokens per second that the node publishes; 0: none */
    uint32_t step_ms;
    uint32_t n_entries; /* that share the node's time */
    bool goes_first;    /* before others there */
};

void fill_release(struct fill *f);
void fill_add(struct fill *f, const struct fill_prompt *p, uint64_t now_ms);
/* p: as it was added; of it node, tokens and goes_first count. computed: its first token has come;
 * else it went elsewhere. */
void fill_remove(struct fill *f, const struct fill_prompt *p, bool computed, uint64_t now_ms);
/* The nodes that have enough: at most `cap` of them. Returns how many. */
size_t fill_enough(const struct fill *f, uint64_t now_ms, uint64_t *out, size_t cap);
/* The nodes that have a prompt that goes first, as fill_enough. */
size_t fill_first(const struct fill *f, uint64_t *out, size_t cap);
/* Milliseconds until the first of the nodes that have enough has not; 0: none has, or it is not
 * known. */
uint32_t fill_next_ms(const struct fill *f, uint64_t now_ms);
/* Prompt tokens per second, as seen here; 0: not yet. */
double fill_seen_per_s(const struct fill *f, uint64_t node);

#endif
