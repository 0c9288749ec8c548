/* share.h - what one rank holds of a model.
 *
 * The ranks that share one attention (tensor parallelism) are tp_size processes. Every matrix is
 * cut by outputs, never by inputs, and results are gathered, never summed, so that an answer has
 * the same bits at every size:
 *     q, k, v, q_b, kv_b   by heads; with fewer KV heads than ranks a head is on several
 *     gate, up, down, o    of a dense layer: by units of 16 outputs, or of 128 where scales are per
 *                          block; parts differ by a unit at most, and may be empty
 *     head                 by units of the vocabulary
 *     biases               with the outputs that they belong to
 *     experts              whole, on the ranks that own them (expert parallelism)
 *     all others           whole on every rank: embedding, norms, routers, q_a, kv_a, shared
 *                          experts (sparse layers gather nothing: ranks divide their rows)
 *
 * Thread: any (a value). */
#ifndef BATON_MODEL_SHARE_H
#define BATON_MODEL_SHARE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/dtype.h"
#include "shared/base/err.h"

struct model_config;

enum {
    SHARE_UNIT = 16, /* outputs of a packed panel */
    SHARE_RANKS_MAX = 256
};
#define SHARE_ALL_EXPERTS UINT32_MAX

struct model_share {
    uint32_t tp_rank, tp_size; /* 0, 1: the whole */
    /* Routed experts of this rank: [first_expert, first_expert + n_experts) in every sparse layer;
     * n_experts SHARE_ALL_EXPERTS in model_options: all, or with ep_size those of ep_rank. */
    uint32_t first_expert, n_experts;
    uint32_t ep_rank,
        ep_size; /* ranks whose rows may come to this one's experts; 0, 1: no others */
    /* As which rows travel to experts and are multiplied there: f32, bf16 or e4m3. Results come
     * back as bf16 unless it is f32. The bits are the same for every number of ranks above one. */
    enum dtype ep_rows;
};

/* Outputs, heads or columns [first, first + n). */
struct share_part {
    size_t first, n;
};

/* A cut of n outputs between all ranks, in units; `mine` is this rank's part. */
struct share_cut {
    struct share_part mine;
    size_t n, unit;
};

struct model_share model_share_whole(const struct model_config *c);
/* ERR_INVALID names the sizes that would do: tp_size must divide the query heads, and must divide
 * the KV heads or be a multiple of them, so that every rank's query heads read equally many. */
enum status model_share_check(const struct model_share *s, const struct model_config *c,
                              struct err *err) MUST_CHECK;

/* The rank's query heads of n_heads. */
struct share_part share_heads(const struct model_share *s, size_t n_heads);
/* The rank's KV heads of n_kv_heads: one, which other ranks hold too, where there are fewer of them
 * than ranks. */
struct share_part share_kv_heads(const struct model_share *s, size_t n_kv_heads);
/* The rank's outputs of n_outputs, cut between units; the last unit may be short. */
struct share_part share_units(const struct model_share *s, size_t n_outputs, size_t unit);
struct share_cut share_cut(const struct model_share *s, size_t n_outputs, size_t unit);
/* Writes where each rank's part begins, and last the end: first [tp_size + 1]. */
void share_cut_places(const struct model_share *s, const struct share_cut *cut, size_t *first);
/* Does the part of n_outputs begin and end between units? An empty one does. */
bool share_part_is_aligned(struct share_part p, size_t n_outputs, size_t unit);
/* The routed experts of rank ep_rank of ep_size, as many for each as can be. */
struct share_part share_experts(uint32_t ep_rank, uint32_t ep_size, uint32_t n_experts);
/* Each of the part's elements is `width` elements of another: of heads, their outputs. */
static inline struct share_part share_times(struct share_part p, size_t width)
{
    return (struct share_part){ p.first * width, p.n * width };
}

#endif
