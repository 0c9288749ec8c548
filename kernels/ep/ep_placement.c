/* ep_placement.c - the placement of experts: its check, and the copies of each logical expert.
 * Thread: loading. */
#include "kernels/backend.h"
#include "kernels/ep/ep_backend.h"
#include "shared/base/arith.h"
#include "shared/base/mem.h"

/* ---- check ---- */

static enum status check_ranks(const struct ep_placement *p, int32_t size, struct err *err)
{
    if (p->n_logical < 0 || p->n_physical < 1 || p->n_physical > KERNEL_EXPERTS_MAX || !p->first)
        return err_set(err, ERR_INVALID, "ep: %d experts in %d places (at most %d)", p->n_logical,
                       p->n_physical, KERNEL_EXPERTS_MAX);
    if (p->first[0] != 0 || p->first[size] != p->n_physical)
        return err_set(err, ERR_INVALID, "ep: the ranks' experts are %d to %d, not 0 to %d",
                       p->first[0], p->first[size] - 1, p->n_physical - 1);
    for (int32_t r = 0; r < size; r++)
        if (p->first[r + 1] < p->first[r])
            return err_set(err, ERR_INVALID, "ep: the experts of rank %d end before they begin", r);
    return OK;
}

static enum status check_map(const struct ep_placement *p, int32_t map, struct err *err)
{
    const int32_t *logical = p->logical + (size_t)map * (size_t)p->n_physical;
    bool has[KERNEL_EXPERTS_MAX] = { false };
    for (int32_t x = 0; x < p->n_physical; x++) {
        if (logical[x] < 0 || logical[x] >= p->n_logical)
            return err_set(err, ERR_INVALID,
                           "ep: place %d of map %d has expert %d, not one of 0 "
                           "to %d",
                           x, map, logical[x], p->n_logical - 1);
        has[logical[x]] = true;
    }
    for (int32_t i = 0; i < p->n_logical; i++)
        if (!has[i])
            return err_set(err, ERR_INVALID, "ep: expert %d has no place in map %d", i, map);
    return OK;
}

enum status ep_placement_check(const struct ep_placement *p, int32_t size, struct err *err)
{
    TRY(check_ranks(p, size, err));
    if (p->n_maps < 0 || p->n_maps > EP_MAPS_MAX)
        return err_set(err, ERR_INVALID, "ep: %d maps of experts (at most %d)", p->n_maps,
                       EP_MAPS_MAX);
    if (p->n_physical < p->n_logical)
        return err_set(err, ERR_INVALID, "ep: %d experts have %d places", p->n_logical,
                       p->n_physical);
    if (p->logical) {
        for (int32_t i = 0; i < max_i32(p->n_maps, 1); i++) TRY(check_map(p, i, err));
        return OK;
    }
    if (p->n_physical != p->n_logical || p->n_maps > 1)
        return err_set(err, ERR_INVALID,
                       "ep: nothing says which of %d experts are in %d places of "
                       "%d maps",
                       p->n_logical, p->n_physical, p->n_maps);
    return OK;
}

/* ---- the object's own ---- */

static int32_t *identity(int32_t n)
{
    int32_t *v = MEM_ARRAY(int32_t, (size_t)n);
    for (int32_t i = 0; i < n; i++) v[i] = i;
    return v;
}

/* Counts, sums up, and places in ascending order; copies[e] is the next place of e meanwhile. */
static void list_copies(const struct ep_placement *p, const int32_t *logical, int32_t *copies,
                        int32_t *physical)
{
    for (int32_t x = 0; x < p->n_physical; x++) copies[logical[x] + 1]++;
    for (int32_t i = 0; i < p->n_logical; i++) copies[i + 1] += copies[i];
    for (int32_t x = 0; x < p->n_physical; x++) physical[copies[logical[x]]++] = x;
    for (int32_t i = p->n_logical; i > 0; i--) copies[i] = copies[i - 1];
    copies[0] = 0;
}

void ep_placement_own(struct ep *e)
{
    struct ep_placement *p = &e->config.placement;
    p->n_maps = max_i32(p->n_maps, 1);
    const size_t n = (size_t)p->n_maps, n_logical = (size_t)p->n_logical,
                 n_physical = (size_t)p->n_physical;
    p->first = mem_dup(p->first, sizeof *p->first * ((size_t)e->config.size + 1));
    p->logical = p->logical ? mem_dup(p->logical, sizeof *p->logical * n * n_physical)
                            : identity(p->n_physical);
    e->copies = MEM_ARRAY(int32_t, n * (n_logical + 1));
    e->physical = MEM_ARRAY(int32_t, n * n_physical);
    for (size_t i = 0; i < n; i++)
        list_copies(p, p->logical + i * n_physical, e->copies + i * (n_logical + 1),
                    e->physical + i * n_physical);
}

int64_t ep_choose_copies(const struct ep *e, const int32_t *experts, int32_t *chosen)
{
    const struct ep_placement *p = &e->config.placement;
    const int32_t *copies = e->copies + (size_t)e->map * ((size_t)p->n_logical + 1),
                  *physical = e->physical + (size_t)e->map * (size_t)p->n_physical;
    const size_t used = (size_t)e->config.n_used, n = e->n_rows * used;
    for (size_t i = 0; i < n; i++) {
        if (experts[i] < 0 || experts[i] >= p->n_logical) return (int64_t)i;
        const int32_t *c = copies + experts[i];
        const size_t turn = i / used + (size_t)e->config.rank;
        chosen[i] = physical[(size_t)c[0] + turn % (size_t)(c[1] - c[0])];
    }
    return -1;
}

void ep_placement_release(struct ep *e)
{
    mem_free((void *)e->config.placement.first);
    mem_free((void *)e->config.placement.logical);
    mem_free(e->copies);
    mem_free(e->physical);
}

size_t ep_most_local(const struct ep_placement *p, int32_t size)
{
    int32_t most = 0;
    for (int32_t r = 0; r < size; r++) most = max_i32(most, p->first[r + 1] - p->first[r]);
    return (size_t)most;
}
