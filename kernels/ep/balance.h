/* balance.h - which rank holds which experts: pure functions that choose placements for ep.h.
 *
 *     balance_even   before anything is known of the load
 *     balance_eplb   for a load that was counted
 *     balance_keep   after ranks were lost: what the others hold stays where it is
 *
 * The load of a rank is that of its experts, where an expert's copies share its load alike. The
 * same arguments give the same placement everywhere: no clock, no chance, ties go to the lower
 * number. Thread: any. */
#ifndef BATON_KERNELS_EP_BALANCE_H
#define BATON_KERNELS_EP_BALANCE_H

#include "kernels/ep/ep.h"

/* A placement with arrays of its own, as ep_placement explains them; balance_release frees them. */
struct balance_out {
    int32_t n_maps, n_ranks, n_logical, n_physical;
    int32_t *first;   /* [n_ranks + 1] */
    int32_t *logical; /* [n_maps, n_physical] */
};

void balance_release(struct balance_out *b);

/* Borrows b's arrays. */
static inline struct ep_placement balance_placement(const struct balance_out *b)
{
    return (struct ep_placement){ .n_logical = b->n_logical,
                                  .n_physical = b->n_physical,
                                  .first = b->first,
                                  .n_maps = b->n_maps,
                                  .logical = b->logical };
}

/* One map: experts in order, rank r's first is floor(r * n_logical / n_ranks); ranks have equal
 * numbers of slots, to one. Redundant slots are copies, whose numbers are equal to one too, never
 * on the rank of the original or of another copy while there is another way. */
struct balance_out balance_even(int32_t n_logical, int32_t n_ranks, int32_t n_redundant);

/* The EPLB algorithm: load [n_maps, n_logical], rows of each expert. Hosts have equal numbers of
 * ranks in order, groups equal numbers of experts in order. Where hosts divide groups, and ranks,
 * each host gets whole groups (hierarchical); otherwise n_hosts and n_groups mean nothing
 * (global). */
struct balance_out balance_eplb(const uint64_t *load, int32_t n_maps, int32_t n_logical,
                                int32_t n_ranks, int32_t n_hosts, int32_t n_groups,
                                int32_t n_redundant);

/* was [n_ranks]: which rank of the old placement a rank is, -1: a newcomer. Each keeps what it held
 * there, in its first slots; experts that nobody holds go to the ranks with the least load, then
 * the fewest slots. A rank has the same number of slots in all maps: where it needs fewer, it has
 * copies of the experts with the most load. load [n_maps, n_logical]; NULL: unknown. */
struct balance_out balance_keep(const struct balance_out *old, int32_t n_ranks, const int32_t *was,
                                const uint64_t *load);

/* The largest of the ranks' loads in a map, divided by their mean; 1 without load. load [n_maps,
 * n_logical]. */
double balance_imbalance(const struct balance_out *b, const uint64_t *load, int32_t map);

/* What makes placements shares: part i's beginning where n things are in `parts` parts, as large as
 * each other to one; and an empty placement of these sizes. */
static inline int32_t balance_first(int32_t i, int32_t n, int32_t parts)
{
    return (int32_t)((int64_t)i * n / parts);
}
struct balance_out balance_make(int32_t n_maps, int32_t n_ranks, int32_t n_logical,
                                int32_t n_physical);

#endif
