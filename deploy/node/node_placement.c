/* node_placement.c - placements chosen, packed and read. The bytes, u32 little endian: n_physical,
 * n_maps, first [n + 1], logical [n_maps, n_physical]. Pure; thread: any. */
#include "deploy/node/node_placement.h"

#include <string.h>

#include "shared/base/mem.h"

enum { WORD = 4, HEAD_WORDS = 2, PHYSICAL_MAX = 1 << 16, MAPS_MAX = 1 << 12 };

/* ---- read ---- */

static uint32_t word(struct str bytes, size_t i)
{
    uint32_t v = 0;
    for (size_t b = WORD; b-- > 0;) v = v << 8 | (uint8_t)bytes.p[i * WORD + b];
    return v;
}

/* Do the ranks' experts follow each other, from the first place to the last? Whoever believed
 * others would make arrays of what lies between two of them. */
static bool are_places(const int32_t *first, uint32_t n_ranks, uint32_t n_physical)
{
    for (uint32_t r = 0; r < n_ranks; r++)
        if (first[r + 1] < first[r]) return false;
    return first[0] == 0 && (uint32_t)first[n_ranks] == n_physical;
}

/* Copies words; false: one is not below `limit`. */
static bool take(struct str bytes, size_t at, size_t n, uint32_t limit, int32_t *out)
{
    for (size_t i = 0; i < n; i++) {
        const uint32_t v = word(bytes, at + i);
        if (v >= limit) return false;
        out[i] = (int32_t)v;
    }
    return true;
}

enum status node_placement_read(const struct group_roster *r, int32_t n_experts,
                                struct balance_out *out, struct err *err)
{
    const struct str bytes = buf_str(&r->placement);
    *out = (struct balance_out){ 0 };
    if (bytes.n < HEAD_WORDS * WORD || bytes.n % WORD != 0)
        return err_set(err, ERR_FORMAT, "a placement of experts has %zu bytes", bytes.n);
    const uint32_t n_physical = word(bytes, 0), n_maps = word(bytes, 1);
    const size_t n_first = (size_t)r->n + 1;
    if (n_physical > PHYSICAL_MAX || n_maps < 1 || n_maps > MAPS_MAX ||
        bytes.n / WORD != HEAD_WORDS + n_first + (size_t)n_maps * n_physical)
        return err_set(err, ERR_FORMAT,
                       "a placement of %u experts in %u maps for %u ranks has %zu bytes",
                       n_physical, n_maps, r->n, bytes.n);
    out->first = MEM_ARRAY(int32_t, n_first);
    out->logical = MEM_ARRAY(int32_t, (size_t)n_maps * n_physical + 1);
    if (!take(bytes, HEAD_WORDS, n_first, n_physical + 1, out->first) ||
        !are_places(out->first, r->n, n_physical)) {
        balance_release(out);
        return err_set(err, ERR_FORMAT, "a placement's ranks do not have %u experts in order",
                       n_physical);
    }
    if (!take(bytes, HEAD_WORDS + n_first, (size_t)n_maps * n_physical, (uint32_t)n_experts,
              out->logical)) {
        balance_release(out);
        return err_set(err, ERR_FORMAT, "a placement names experts that the model has not");
    }
    out->n_maps = (int32_t)n_maps;
    out->n_ranks = (int32_t)r->n;
    out->n_logical = n_experts;
    out->n_physical = (int32_t)n_physical;
    return OK;
}

/* ---- choose ---- */

static void pack(const struct balance_out *b, struct buf *out)
{
    buf_add_u32le(out, (uint32_t)b->n_physical);
    buf_add_u32le(out, (uint32_t)b->n_maps);
    for (int32_t r = 0; r <= b->n_ranks; r++) buf_add_u32le(out, (uint32_t)b->first[r]);
    for (int32_t x = 0; x < b->n_maps * b->n_physical; x++)
        buf_add_u32le(out, (uint32_t)b->logical[x]);
}

/* Which member of `before` each member of `next` was. False: one is new. */
static bool find_members(const struct group_roster *next, const struct group_roster *before,
                         int32_t *was)
{
    for (uint32_t i = 0; i < next->n; i++) {
        was[i] = group_roster_find(before, next->members[i].rank);
        if (was[i] < 0 || before->members[was[i]].node != next->members[i].node) return false;
    }
    return true;
}

/* Each rank keeps what it has. False: there is nothing to keep. */
static bool keep(struct group_roster *next, const struct group_roster *before, int32_t n_experts,
                 const uint64_t *load)
{
    struct balance_out old;
    struct err err;
    int32_t was[GROUP_RANKS_MAX];
    if (before->n == 0 || !find_members(next, before, was) ||
        node_placement_read(before, n_experts, &old, &err) != OK)
        return false;
    /* One map is of all layers, and the load is of each. */
    struct balance_out kept = balance_keep(&old, (int32_t)next->n, was,
                                           old.n_maps > 1 ? load : NULL);
    pack(&kept, &next->placement);
    balance_release(&kept);
    balance_release(&old);
    return true;
}

void node_placement_choose(struct group_roster *next, const struct group_roster *before,
                           const struct node_placement_want *w)
{
    const int32_t n = (int32_t)next->n;
    if (next->n < w->size && keep(next, before, w->n_experts, w->load)) return;
    if (w->best && w->best->n_ranks == n) {
        pack(w->best, &next->placement);
        return;
    }
    struct balance_out b = balance_even(w->n_experts, n, w->n_redundant);
    pack(&b, &next->placement);
    balance_release(&b);
}
