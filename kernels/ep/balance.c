/* balance.c - placements by number, and those after ranks were lost or came: there nothing moves
 * that is held. How many slots a rank gains is the same in all maps, and all together are as many
 * as the map needs in which the most experts have nobody: memory grows by what was lost and no
 * more. Thread: any. */
#include "kernels/ep/balance.h"
#include "shared/base/assert.h"
#include "shared/base/mem.h"

void balance_release(struct balance_out *b)
{
    mem_free(b->first);
    mem_free(b->logical);
    *b = (struct balance_out){ 0 };
}

struct balance_out balance_make(int32_t n_maps, int32_t n_ranks, int32_t n_logical,
                                int32_t n_physical)
{
    ASSERT(n_maps > 0 && n_ranks > 0 && n_logical > 0 && n_physical >= n_logical);
    return (
        struct balance_out){ .n_maps = n_maps,
                             .n_ranks = n_ranks,
                             .n_logical = n_logical,
                             .n_physical = n_physical,
                             .first = MEM_ARRAY(int32_t, (size_t)n_ranks + 1),
                             .logical = MEM_ARRAY(int32_t, (size_t)n_maps * (size_t)n_physical) };
}

/* ---- how good it is ---- */

double balance_imbalance(const struct balance_out *b, const uint64_t *load, int32_t map)
{
    const int32_t *logical = b->logical + (size_t)map * (size_t)b->n_physical;
    const uint64_t *of_map = load + (size_t)map * (size_t)b->n_logical;
    int32_t *copies = MEM_ARRAY(int32_t, (size_t)b->n_logical);
    double most = 0, all = 0;
    for (int32_t x = 0; x < b->n_physical; x++) copies[logical[x]]++;
    for (int32_t r = 0; r < b->n_ranks; r++) {
        double of_rank = 0;
        for (int32_t x = b->first[r]; x < b->first[r + 1]; x++)
            of_rank += (double)of_map[logical[x]] / copies[logical[x]];
        most = of_rank > most ? of_rank : most;
        all += of_rank;
    }
    mem_free(copies);
    return all > 0 ? most * b->n_ranks / all : 1;
}

/* ---- by number ---- */

/* The expert for a redundant slot of a rank: one that it has not, of those the one with the fewest
 * copies, of those the first from `from` on. */
static int32_t choose_redundant(const bool *has, const int32_t *copies, int32_t n, int32_t from)
{
    int32_t best = from;
    for (int32_t i = 1; i < n; i++) {
        const int32_t e = (from + i) % n;
        if (has[e] != has[best] ? has[best] : copies[e] < copies[best]) best = e;
    }
    return best;
}

/* The rank with the fewest slots of counts [n]. */
static int32_t fewest(const int32_t *counts, int32_t n)
{
    int32_t best = 0;
    for (int32_t r = 1; r < n; r++)
        if (counts[r] < counts[best]) best = r;
    return best;
}

struct balance_out balance_even(int32_t n_logical, int32_t n_ranks, int32_t n_redundant)
{
    struct balance_out b = balance_make(1, n_ranks, n_logical, n_logical + n_redundant);
    const size_t n = (size_t)n_logical, most = (size_t)b.n_physical;
    int32_t *copies = MEM_ARRAY(int32_t, n), *counts = MEM_ARRAY(int32_t, (size_t)n_ranks),
            *slots = MEM_ARRAY(int32_t, (size_t)n_ranks * most);
    bool *has = MEM_ARRAY(bool, (size_t)n_ranks *n);
    for (int32_t r = 0; r < n_ranks; r++)
        for (int32_t e = balance_first(r, n_logical, n_ranks);
             e < balance_first(r + 1, n_logical, n_ranks); e++) {
            slots[(size_t)r * most + (size_t)counts[r]++] = e;
            has[(size_t)r * n + (size_t)e] = true;
        }
    for (int32_t i = 0; i < n_redundant; i++) {
        const int32_t r = fewest(counts, n_ranks),
                      from = balance_first(r + 1, n_logical, n_ranks) % n_logical,
                      e = choose_redundant(has + (size_t)r * n, copies, n_logical, from);
        slots[(size_t)r * most + (size_t)counts[r]++] = e;
        has[(size_t)r * n + (size_t)e] = true;
        copies[e]++;
    }
    for (int32_t r = 0; r < n_ranks; r++) {
        b.first[r + 1] = b.first[r] + counts[r];
        for (int32_t i = 0; i < counts[r]; i++)
            b.logical[b.first[r] + i] = slots[(size_t)r * most + (size_t)i];
    }
    mem_free(copies);
    mem_free(counts);
    mem_free(slots);
    mem_free(has);
    return b;
}

/* ---- after a loss ---- */

struct keep {
    const struct balance_out *old;
    struct balance_out *b;
    const int32_t *was;
    const uint64_t *load; /* [n_maps, n_logical] or NULL */
    int32_t *copies;      /* [n_logical]: in the running map */
    int32_t *n_slots;     /* [n_ranks]: in use, in the running map */
    double *rows;         /* [n_ranks]: of experts, in the running map or in all of them */
};

static double load_of(const struct keep *k, int32_t map, int32_t e)
{
    return k->load ? (double)k->load[(size_t)map * (size_t)k->old->n_logical + (size_t)e] : 0;
}

static const int32_t *old_map(const struct keep *k, int32_t map)
{
    return k->old->logical + (size_t)map * (size_t)k->old->n_physical;
}

/* Slots that a rank held. */
static int32_t n_kept(const struct keep *k, int32_t rank)
{
    const int32_t w = k->was[rank];
    return w < 0 ? 0 : k->old->first[w + 1] - k->old->first[w];
}

/* Counts the copies that remain of each expert; returns how many have none. */
static int32_t count_copies(const struct keep *k, int32_t map)
{
    int32_t n = 0;
    for (int32_t e = 0; e < k->old->n_logical; e++) k->copies[e] = 0;
    for (int32_t r = 0; r < k->b->n_ranks; r++)
        for (int32_t i = 0; i < n_kept(k, r); i++)
            k->copies[old_map(k, map)[k->old->first[k->was[r]] + i]]++;
    for (int32_t e = 0; e < k->old->n_logical; e++) n += k->copies[e] == 0;
    return n;
}

/* Adds a rank's load of what it kept to k->rows. */
static void add_rows(const struct keep *k, int32_t map)
{
    for (int32_t r = 0; r < k->b->n_ranks; r++)
        for (int32_t i = 0; i < n_kept(k, r); i++) {
            const int32_t e = old_map(k, map)[k->old->first[k->was[r]] + i];
            k->rows[r] += load_of(k, map, e) / k->copies[e];
        }
}

/* The rank with the least load, then the fewest slots, of those with room; `room` NULL: all. */
static int32_t lightest(const struct keep *k, const int32_t *first)
{
    int32_t best = -1;
    for (int32_t r = 0; r < k->b->n_ranks; r++) {
        if (first && k->n_slots[r] >= first[r + 1] - first[r]) continue;
        if (best < 0 || k->rows[r] < k->rows[best] ||
            (k->rows[r] == k->rows[best] && k->n_slots[r] < k->n_slots[best]))
            best = r;
    }
    ASSERT(best >= 0);
    return best;
}

static void reset_ranks(const struct keep *k)
{
    for (int32_t r = 0; r < k->b->n_ranks; r++) {
        k->n_slots[r] = n_kept(k, r);
        k->rows[r] = 0;
    }
}

/* Sets b->first: what each rank kept, and the new slots, by the load of all maps. */
static void choose_slots(const struct keep *k)
{
    int32_t n_new = 0;
    double orphans = 0;
    reset_ranks(k);
    for (int32_t m = 0; m < k->old->n_maps; m++) {
        const int32_t n = count_copies(k, m);
        n_new = n > n_new ? n : n_new;
        add_rows(k, m);
        for (int32_t e = 0; e < k->old->n_logical; e++)
            if (k->copies[e] == 0) orphans += load_of(k, m, e);
    }
    for (int32_t i = 0; i < n_new; i++) {
        const int32_t r = lightest(k, NULL);
        k->n_slots[r]++;
        k->rows[r] += orphans / n_new;
    }
    for (int32_t r = 0; r < k->b->n_ranks; r++) k->b->first[r + 1] = k->b->first[r] + k->n_slots[r];
    k->b->n_physical = k->b->first[k->b->n_ranks];
}

/* The expert without a copy that has the most load; -1: all have one. */
static int32_t heaviest_orphan(const struct keep *k, int32_t map)
{
    int32_t best = -1;
    for (int32_t e = 0; e < k->old->n_logical; e++)
        if (k->copies[e] == 0 && (best < 0 || load_of(k, map, e) > load_of(k, map, best))) best = e;
    return best;
}

static bool holds(const int32_t *slots, int32_t n, int32_t e)
{
    for (int32_t i = 0; i < n; i++)
        if (slots[i] == e) return true;
    return false;
}

/* For a slot that is left: an expert that the rank has not, of those the one with the most load per
 * copy, then the fewest copies. */
static int32_t choose_copied(const struct keep *k, int32_t map, const int32_t *slots, int32_t n)
{
    int32_t best = 0;
    for (int32_t e = 1; e < k->old->n_logical; e++) {
        const bool has_e = holds(slots, n, e), has_best = holds(slots, n, best);
        const double a = load_of(k, map, e) / k->copies[e],
                     b = load_of(k, map, best) / k->copies[best];
        if (has_e != has_best ? has_best : a != b ? a > b : k->copies[e] < k->copies[best])
            best = e;
    }
    return best;
}

static void fill_map(const struct keep *k, int32_t map)
{
    int32_t *logical = k->b->logical + (size_t)map * (size_t)k->b->n_physical;
    const int32_t *first = k->b->first;
    reset_ranks(k);
    count_copies(k, map);
    add_rows(k, map);
    for (int32_t r = 0; r < k->b->n_ranks; r++)
        for (int32_t i = 0; i < n_kept(k, r); i++)
            logical[first[r] + i] = old_map(k, map)[k->old->first[k->was[r]] + i];
    for (int32_t e; (e = heaviest_orphan(k, map)) >= 0;) {
        const int32_t r = lightest(k, first);
        logical[first[r] + k->n_slots[r]++] = e;
        k->rows[r] += load_of(k, map, e);
        k->copies[e] = 1;
    }
    for (int32_t r = 0; r < k->b->n_ranks; r++)
        for (int32_t *slots = logical + first[r]; k->n_slots[r] < first[r + 1] - first[r];) {
            const int32_t e = choose_copied(k, map, slots, k->n_slots[r]);
            slots[k->n_slots[r]++] = e;
            k->copies[e]++;
        }
}

struct balance_out balance_keep(const struct balance_out *old, int32_t n_ranks, const int32_t *was,
                                const uint64_t *load)
{
    struct balance_out b = { .n_maps = old->n_maps,
                             .n_ranks = n_ranks,
                             .n_logical = old->n_logical,
                             .first = MEM_ARRAY(int32_t, (size_t)n_ranks + 1) };
    const struct keep k = { .old = old,
                            .b = &b,
                            .was = was,
                            .load = load,
                            .copies = MEM_ARRAY(int32_t, (size_t)old->n_logical),
                            .n_slots = MEM_ARRAY(int32_t, (size_t)n_ranks),
                            .rows = MEM_ARRAY(double, (size_t)n_ranks) };
    for (int32_t r = 0; r < n_ranks; r++) ASSERT(was[r] >= -1 && was[r] < old->n_ranks);
    choose_slots(&k);
    b.logical = MEM_ARRAY(int32_t, (size_t)b.n_maps * (size_t)b.n_physical);
    for (int32_t m = 0; m < b.n_maps; m++) fill_map(&k, m);
    mem_free(k.copies);
    mem_free(k.n_slots);
    mem_free(k.rows);
    return b;
}
