/* share.c - the cuts of a model and their check. Pure functions; thread: any. */
#include "shared/model/share.h"

#include <inttypes.h>

#include "shared/base/arith.h"
#include "shared/base/buf.h"
#include "shared/model/model.h"

struct model_share model_share_whole(const struct model_config *c)
{
    return (struct model_share){ .tp_size = 1, .n_experts = c->moe.n_experts };
}

/* Latents are whole on every rank, so the KV heads of latent attention do not matter. */
static bool cuts_heads(const struct model_config *c, uint32_t size)
{
    if (size == 0 || size > SHARE_RANKS_MAX || c->n_heads % size != 0) return false;
    return model_is_latent(c) || c->n_kv_heads % size == 0 || size % c->n_kv_heads == 0;
}

static enum status refuse_size(uint32_t size, const struct model_config *c, struct err *err)
{
    struct buf b = { 0 };
    for (uint32_t n = 1; n <= c->n_heads; n++)
        if (cuts_heads(c, n)) buf_printf(&b, "%s%" PRIu32, n > 1 ? ", " : "", n);
    err_field(err, ERR_INVALID, "tensor-parallel-size",
              "--tensor-parallel-size %" PRIu32 " does not divide the %" PRIu32
              " query heads and %" PRIu32 " KV heads of this model; these do: %s",
              size, c->n_heads, c->n_kv_heads, b.data ? b.data : "none");
    buf_release(&b);
    return ERR_INVALID;
}

enum status model_share_check(const struct model_share *s, const struct model_config *c,
                              struct err *err)
{
    if (!cuts_heads(c, s->tp_size)) return refuse_size(s->tp_size, c, err);
    if (s->tp_rank >= s->tp_size)
        return err_set(err, ERR_INVALID,
                       "rank %" PRIu32 " is not one of the %" PRIu32 " ranks of a tensor-parallel "
                       "node, which count from 0",
                       s->tp_rank, s->tp_size);
    if ((uint64_t)s->first_expert + s->n_experts > c->moe.n_experts)
        return err_set(err, ERR_INVALID,
                       "%" PRIu32 " experts from expert %" PRIu32 " on are not all among the "
                       "model's %" PRIu32,
                       s->n_experts, s->first_expert, c->moe.n_experts);
    return OK;
}

struct share_part share_heads(const struct model_share *s, size_t n_heads)
{
    const size_t n = n_heads / s->tp_size;
    return (struct share_part){ s->tp_rank * n, n };
}

struct share_part share_kv_heads(const struct model_share *s, size_t n_kv_heads)
{
    const size_t n = n_kv_heads / s->tp_size;
    return (struct share_part){ s->tp_rank * n_kv_heads / s->tp_size, n ? n : 1 };
}

/* Rank r's first unit is floor(r * units / size): sizes differ by one at most. */
struct share_part share_units(const struct model_share *s, size_t n_outputs, size_t unit)
{
    const size_t units = div_up(n_outputs, unit),
                 first = min_size(s->tp_rank * units / s->tp_size * unit, n_outputs),
                 end = min_size((s->tp_rank + (size_t)1) * units / s->tp_size * unit, n_outputs);
    return (struct share_part){ first, end - first };
}

struct share_cut share_cut(const struct model_share *s, size_t n_outputs, size_t unit)
{
    return (struct share_cut){ share_units(s, n_outputs, unit), n_outputs, unit };
}

void share_cut_places(const struct model_share *s, const struct share_cut *cut, size_t *first)
{
    struct model_share each = *s;
    for (each.tp_rank = 0; each.tp_rank < s->tp_size; each.tp_rank++)
        first[each.tp_rank] = share_units(&each, cut->n, cut->unit).first;
    first[s->tp_size] = cut->n;
}

struct share_part share_experts(uint32_t ep_rank, uint32_t ep_size, uint32_t n_experts)
{
    const struct model_share s = { .tp_rank = ep_rank, .tp_size = ep_size };
    return share_units(&s, n_experts, 1);
}

bool share_part_is_aligned(struct share_part p, size_t n_outputs, size_t unit)
{
    const size_t end = p.first + p.n;
    return p.n == 0 || (p.first % unit == 0 && (end % unit == 0 || end == n_outputs));
}
