/* balance_eplb.c - placements of experts by their load.
 *
 * EPLB as DeepSeek describes it (README of github.com/deepseek-ai/EPLB): groups of experts are
 * packed onto hosts, an expert with the highest load per copy gets the next copy, and copies are
 * packed onto ranks, the heaviest first, each to the lightest that has room. Here more is tried
 * afterwards as long as it helps: two experts of the most loaded rank and another are exchanged,
 * and a copy of one becomes one of another. Copies of an expert are kept on different ranks, so
 * that the loss of a rank costs fewer experts. Thread: any. */
#include <string.h>

#include "kernels/ep/balance.h"
#include "shared/base/assert.h"
#include "shared/base/mem.h"

/* ---- packing ---- */

/* Things of some weight and kind for bins, each of which takes a given number of things: together
 * as many as there are. Things of one kind go to different bins where that is possible. */
struct packing {
    int32_t n, n_bins, n_kinds;
    double *weight;      /* [n], descending */
    int32_t *kind, *bin; /* [n]; bin is the result */
    int32_t *room;       /* [n_bins]: how many more it takes */
    double *total;       /* [n_bins] */
    int32_t *held;       /* [n_bins, n_kinds]: how many */
};

static struct packing make_packing(int32_t n_most, int32_t n_bins, int32_t n_kinds)
{
    const size_t n = (size_t)n_most, bins = (size_t)n_bins;
    return (struct packing){ .n_bins = n_bins,
                             .n_kinds = n_kinds,
                             .weight = MEM_ARRAY(double, n),
                             .kind = MEM_ARRAY(int32_t, n),
                             .bin = MEM_ARRAY(int32_t, n),
                             .room = MEM_ARRAY(int32_t, bins),
                             .total = MEM_ARRAY(double, bins),
                             .held = MEM_ARRAY(int32_t, bins * (size_t)n_kinds) };
}

static void packing_reset(struct packing *p)
{
    p->n = 0;
    memset(p->total, 0, (size_t)p->n_bins * sizeof *p->total);
    memset(p->held, 0, (size_t)p->n_bins * (size_t)p->n_kinds * sizeof *p->held);
}

static void packing_release(struct packing *p)
{
    mem_free(p->weight);
    mem_free(p->kind);
    mem_free(p->bin);
    mem_free(p->room);
    mem_free(p->total);
    mem_free(p->held);
}

static int32_t *held(const struct packing *p, int32_t bin, int32_t kind)
{
    return &p->held[(size_t)bin * (size_t)p->n_kinds + (size_t)kind];
}

/* Inserts a thing into the descending order; equal ones stay in the order of their coming. */
static void add(struct packing *p, double weight, int32_t kind)
{
    int32_t at = p->n++;
    for (; at > 0 && p->weight[at - 1] < weight; at--) {
        p->weight[at] = p->weight[at - 1];
        p->kind[at] = p->kind[at - 1];
    }
    p->weight[at] = weight;
    p->kind[at] = kind;
}

static void move(struct packing *p, int32_t i, int32_t from, int32_t to)
{
    if (from >= 0) {
        p->total[from] -= p->weight[i];
        --*held(p, from, p->kind[i]);
    }
    p->total[to] += p->weight[i];
    ++*held(p, to, p->kind[i]);
    p->bin[i] = to;
}

/* Of the bins with room: one without this kind, of those the lightest, of those the one with the
 * most room. */
static int32_t choose_bin(const struct packing *p, int32_t kind)
{
    int32_t best = -1;
    for (int32_t b = 0; b < p->n_bins; b++) {
        if (p->room[b] == 0) continue;
        if (best < 0) {
            best = b;
            continue;
        }
        const bool has = *held(p, b, kind) > 0, best_has = *held(p, best, kind) > 0;
        if (has != best_has                 ? best_has
            : p->total[b] != p->total[best] ? p->total[b] < p->total[best]
                                            : p->room[b] > p->room[best])
            best = b;
    }
    ASSERT(best >= 0);
    return best;
}

/* Whether exchanging things i and j puts two of a kind into one bin that were not. */
static bool doubles(const struct packing *p, int32_t i, int32_t j)
{
    return *held(p, p->bin[j], p->kind[i]) > 0 || *held(p, p->bin[i], p->kind[j]) > 0;
}

/* Less than this part of a sum is not its rounding error. */
static const double NO_ERROR = 1 - 1e-9;
/* The heaviest bin of the mean with which nothing costly is tried. */
static const double GOOD_ENOUGH = 1.02;

static int32_t heaviest(const struct packing *p)
{
    int32_t top = 0;
    for (int32_t b = 1; b < p->n_bins; b++)
        if (p->total[b] > p->total[top]) top = b;
    return top;
}

/* Exchanges the pair of which one is in the heaviest bin that makes the heavier of both bins
 * lightest; `apart`: without putting two of a kind together. False: none makes it lighter. */
static bool exchange_best(struct packing *p, bool apart)
{
    int32_t best_i = -1, best_j = -1;
    const int32_t top = heaviest(p);
    double best = p->total[top] * NO_ERROR;
    for (int32_t i = 0; i < p->n; i++) {
        for (int32_t j = 0; p->bin[i] == top && j < p->n; j++) {
            const double by = p->weight[i] - p->weight[j];
            const double a = p->total[top] - by, b = p->total[p->bin[j]] + by,
                         heavier = a > b ? a : b;
            if (p->bin[j] == top || heavier >= best || (apart && doubles(p, i, j))) continue;
            best = heavier;
            best_i = i;
            best_j = j;
        }
    }
    if (best_i < 0) return false;
    const int32_t other = p->bin[best_j];
    move(p, best_i, top, other);
    move(p, best_j, other, top);
    return true;
}

static void pack(struct packing *p)
{
    double mean = 0;
    for (int32_t i = 0; i < p->n; i++) {
        const int32_t to = choose_bin(p, p->kind[i]);
        move(p, i, -1, to);
        p->room[to]--;
        mean += p->weight[i] / p->n_bins;
    }
    int32_t left = 4 * p->n;
    while (left > 0 && exchange_best(p, true)) left--;
    while (left > 0 && p->total[heaviest(p)] > mean * GOOD_ENOUGH && exchange_best(p, false))
        left--;
}

/* ---- EPLB ---- */

struct layer {
    const struct balance_out *b;
    const uint64_t *load; /* [n_logical] */
    int32_t *logical;     /* [n_physical]: the result */
    int32_t n_hosts, n_groups;
    int32_t *host, *copies; /* [n_logical] */
};

/* A host's part of a layer. */
struct host {
    int32_t number;
    const int32_t *first; /* [ranks + 1] */
    struct packing best, trial;
    double good_enough; /* the heaviest rank's load with which nothing more is tried */
    int32_t tries_left;
};

enum { TRIES = 256 };

static void choose_hosts(const struct layer *l)
{
    const int32_t per_group = l->b->n_logical / l->n_groups;
    struct packing p = make_packing(l->n_groups, l->n_hosts, l->n_groups);
    for (int32_t h = 0; h < l->n_hosts; h++) p.room[h] = l->n_groups / l->n_hosts;
    for (int32_t g = 0; g < l->n_groups; g++) {
        double sum = 0;
        for (int32_t i = 0; i < per_group; i++) sum += (double)l->load[g * per_group + i];
        add(&p, sum, g);
    }
    pack(&p);
    for (int32_t g = 0; g < l->n_groups; g++)
        for (int32_t i = 0; i < per_group; i++) l->host[p.kind[g] * per_group + i] = p.bin[g];
    packing_release(&p);
}

static double load_per_copy(const struct layer *l, int32_t e)
{
    return (double)l->load[e] / l->copies[e];
}

/* Whether a slot of the host is better used for a copy of a than of b: of what is not on all its
 * ranks, that with the most load per copy, then the fewest copies; else of what disturbs least. */
static bool is_better_copied(const struct layer *l, int32_t n_ranks, int32_t a, int32_t b)
{
    const bool a_is_full = l->copies[a] >= n_ranks, b_is_full = l->copies[b] >= n_ranks;
    const double of_a = load_per_copy(l, a), of_b = load_per_copy(l, b);
    if (a_is_full != b_is_full) return b_is_full;
    if (of_a != of_b) return a_is_full ? of_a < of_b : of_a > of_b;
    return l->copies[a] < l->copies[b];
}

static int32_t choose_copied(const struct layer *l, int32_t host, int32_t n_ranks)
{
    int32_t best = -1;
    for (int32_t e = 0; e < l->b->n_logical; e++) {
        if (l->host[e] != host) continue;
        if (best < 0 || is_better_copied(l, n_ranks, e, best)) best = e;
    }
    ASSERT(best >= 0);
    return best;
}

/* Writes each bin's kinds, ascending, to its rank's slots. */
static void write_slots(const struct packing *p, const int32_t *first, int32_t *logical)
{
    for (int32_t r = 0; r < p->n_bins; r++) {
        int32_t at = first[r];
        for (int32_t e = 0; e < p->n_kinds; e++)
            for (int32_t i = 0; i < *held(p, r, e); i++) logical[at++] = e;
        ASSERT(at == first[r + 1]);
    }
}

/* Packs the host's copies; returns the load of its heaviest rank. */
static double pack_host(const struct layer *l, const struct host *h, struct packing *p)
{
    packing_reset(p);
    for (int32_t r = 0; r < p->n_bins; r++) p->room[r] = h->first[r + 1] - h->first[r];
    for (int32_t e = 0; e < l->b->n_logical; e++)
        for (int32_t i = 0; l->host[e] == h->number && i < l->copies[e]; i++)
            add(p, load_per_copy(l, e), e);
    pack(p);
    return p->total[heaviest(p)];
}

/* Tries a copy of b for one of a: whether that packs better than *largest. */
static bool try_instead(const struct layer *l, struct host *h, int32_t a, int32_t b,
                        double *largest)
{
    if (l->host[b] != h->number || a == b) return false;
    l->copies[a]--;
    l->copies[b]++;
    h->tries_left--;
    const double got = pack_host(l, h, &h->trial);
    if (got < *largest * NO_ERROR) {
        const struct packing t = h->best;
        h->best = h->trial;
        h->trial = t;
        *largest = got;
        return true;
    }
    l->copies[a]++;
    l->copies[b]--;
    return false;
}

/* One pass through all pairs; false: nothing was better. */
static bool try_others(const struct layer *l, struct host *h, double *largest)
{
    bool better = false;
    for (int32_t a = 0; a < l->b->n_logical; a++)
        for (int32_t b = 0; b < l->b->n_logical; b++)
            if (l->host[a] == h->number && l->copies[a] > 1 && h->tries_left > 0 &&
                *largest > h->good_enough)
                better = try_instead(l, h, a, b, largest) || better;
    return better;
}

static void fill_host(const struct layer *l, int32_t number)
{
    const int32_t n_ranks = l->b->n_ranks / l->n_hosts,
                  *first = l->b->first + (size_t)number * (size_t)n_ranks;
    const int32_t n_slots = first[n_ranks] - first[0];
    struct host h = { .number = number,
                      .first = first,
                      .tries_left = TRIES,
                      .best = make_packing(n_slots, n_ranks, l->b->n_logical),
                      .trial = make_packing(n_slots, n_ranks, l->b->n_logical) };
    int32_t spare = n_slots;
    for (int32_t e = 0; e < l->b->n_logical; e++) {
        if (l->host[e] != number) continue;
        l->copies[e] = 1;
        spare--;
        h.good_enough += (double)l->load[e] / n_ranks * GOOD_ENOUGH;
    }
    for (; spare > 0; spare--) l->copies[choose_copied(l, number, n_ranks)]++;
    double largest = pack_host(l, &h, &h.best);
    while (try_others(l, &h, &largest)) {}
    write_slots(&h.best, first, l->logical);
    packing_release(&h.best);
    packing_release(&h.trial);
}

struct balance_out balance_eplb(const uint64_t *load, int32_t n_maps, int32_t n_logical,
                                int32_t n_ranks, int32_t n_hosts, int32_t n_groups,
                                int32_t n_redundant)
{
    struct balance_out b = balance_make(n_maps, n_ranks, n_logical, n_logical + n_redundant);
    const bool by_host = n_hosts > 0 && n_groups > 0 && n_ranks % n_hosts == 0 &&
                         n_groups % n_hosts == 0 && n_logical % n_groups == 0;
    struct layer l = { .b = &b,
                       .n_hosts = by_host ? n_hosts : 1,
                       .n_groups = by_host ? n_groups : 1,
                       .host = MEM_ARRAY(int32_t, (size_t)n_logical),
                       .copies = MEM_ARRAY(int32_t, (size_t)n_logical) };
    for (int32_t r = 0; r <= n_ranks; r++) b.first[r] = balance_first(r, b.n_physical, n_ranks);
    for (int32_t m = 0; m < n_maps; m++) {
        l.load = load + (size_t)m * (size_t)n_logical;
        l.logical = b.logical + (size_t)m * (size_t)b.n_physical;
        choose_hosts(&l);
        for (int32_t h = 0; h < l.n_hosts; h++) fill_host(&l, h);
    }
    mem_free(l.host);
    mem_free(l.copies);
    return b;
}
