/* node_placement.c - placements chosen, packed and read. The bytes, u32 little endian: n_physical,
 * n_maps, first [n + 1], logical [n_maps, n_physical]. Pure; thread: any. */
#include "deploy/node/node_placement.h"

#include <string.h>

#include "shared/base/mem.h"
#include "shared/model/share.h"

enum { WORD = 4, HEAD_WORDS = 2, PHYSICAL_MAX = 1 << 16, MAPS_MAX = 1 << 12 };

/* ---- choose ---- */

void node_placement_choose(struct group_roster *next, const struct group_roster *before,
                           uint32_t size, int32_t n_experts, int32_t n_redundant)
{
    (void)before, (void)size, (void)n_redundant;
    buf_add_u32le(&next->placement, (uint32_t)n_experts);
    buf_add_u32le(&next->placement, 1);
    for (uint32_t i = 0; i < next->n; i++)
        buf_add_u32le(&next->placement,
                      (uint32_t)share_experts(i, next->n, (uint32_t)n_experts).first);
    buf_add_u32le(&next->placement, (uint32_t)n_experts);
    for (int32_t x = 0; x < n_experts; x++) buf_add_u32le(&next->placement, (uint32_t)x);
}

/* ---- read ---- */

static uint32_t word(struct str bytes, size_t i)
{
    uint32_t v = 0;
    for (size_t b = WORD; b-- > 0;) v = v << 8 | (uint8_t)bytes.p[i * WORD + b];
    return v;
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
                                struct node_placement *out, struct err *err)
{
    const struct str bytes = buf_str(&r->placement);
    *out = (struct node_placement){ 0 };
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
        !take(bytes, HEAD_WORDS + n_first, (size_t)n_maps * n_physical, (uint32_t)n_experts,
              out->logical)) {
        node_placement_release(out);
        return err_set(err, ERR_FORMAT, "a placement names experts that the model has not");
    }
    out->p = (struct ep_placement){
        .n_logical = n_experts,
        .n_physical = (int32_t)n_physical,
        .first = out->first,
        .n_maps = (int32_t)n_maps,
        .logical = out->logical,
    };
    return OK;
}

void node_placement_release(struct node_placement *p)
{
    mem_free(p->first);
    mem_free(p->logical);
    *p = (struct node_placement){ 0 };
}
