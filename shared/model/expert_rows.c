/* expert_rows.c - see expert_rows.h. Numbers are relaxed atomics that only the engine writes, so it
 * needs no read-modify-write. */
#include "shared/model/expert_rows.h"

#include <stdatomic.h>

#include "shared/base/mem.h"
#include "shared/base/metrics.h"
#include "shared/model/model.h"

struct expert_rows {
    uint32_t n_sparse, n_experts;
    _Atomic uint64_t *chosen;                   /* [n_sparse, n_experts] */
    _Atomic uint64_t *load, n_computed;         /* [n_experts]: of n_computed */
    struct counter *computed, *sent, *received; /* NULL: not registered */
};

struct expert_rows *expert_rows_create(const struct model *m)
{
    const uint32_t n_sparse = model_n_sparse(&m->config, m->config.n_layers);
    if (n_sparse == 0) return NULL;
    struct expert_rows *r = MEM_NEW(struct expert_rows);
    r->n_sparse = n_sparse;
    r->n_experts = m->config.moe.n_experts;
    r->chosen = MEM_ARRAY(_Atomic uint64_t, (size_t)n_sparse * r->n_experts);
    r->load = MEM_ARRAY(_Atomic uint64_t, r->n_experts);
    return r;
}

void expert_rows_free(struct expert_rows *r)
{
    if (!r) return;
    mem_free(r->chosen);
    mem_free(r->load);
    mem_free(r);
}

static void grow(_Atomic uint64_t *of, uint64_t n)
{
    atomic_store_explicit(of, atomic_load_explicit(of, memory_order_relaxed) + n,
                          memory_order_relaxed);
}

static void add_load(struct expert_rows *r, const struct ep *ep, const int32_t *by_expert)
{
    const struct ep_placement *p = &ep->config.placement;
    const int32_t *mine = p->logical + ep->map * p->n_physical + p->first[ep->config.rank];
    for (int32_t i = 0; i < ep->n_local; i++) grow(&r->load[mine[i]], (uint64_t)by_expert[i]);
}

void expert_rows_add(struct expert_rows *r, uint32_t i_sparse, const int32_t *experts, size_t n,
                     const struct ep *ep, const struct ep_counts *counts)
{
    _Atomic uint64_t *chosen = r->chosen + (size_t)i_sparse * r->n_experts;
    for (size_t i = 0; i < n; i++) grow(&chosen[experts[i]], 1);
    grow(&r->n_computed, counts->n_slots);
    if (counts->by_expert) add_load(r, ep, counts->by_expert);
    if (!r->computed) return;
    counter_add(r->computed, counts->n_slots);
    counter_add(r->sent, n - counts->n_own);
    counter_add(r->received, counts->n_slots - counts->n_own);
}

void model_expert_rows(const struct model *m, uint64_t *out)
{
    const struct expert_rows *r = m->expert_rows;
    for (size_t i = 0; r && i < (size_t)r->n_sparse * r->n_experts; i++)
        out[i] = atomic_load_explicit(&r->chosen[i], memory_order_relaxed);
}

uint64_t model_computed_rows(const struct model *m)
{
    const struct expert_rows *r = m->expert_rows;
    return r ? atomic_load_explicit(&r->n_computed, memory_order_relaxed) : 0;
}

void model_expert_load(const struct model *m, uint64_t *out)
{
    const struct expert_rows *r = m->expert_rows;
    for (uint32_t i = 0; r && i < r->n_experts; i++)
        out[i] = atomic_load_explicit(&r->load[i], memory_order_relaxed);
}

void model_count_rows_on(struct model *m, struct metrics *registry)
{
    struct expert_rows *r = m->expert_rows;
    if (!r) return;
    r->computed = metrics_counter(registry, "baton_moe_rows_total", "",
                                  "Rows computed by this rank's experts, for all ranks; a row "
                                  "counts once for each expert that it chose.");
    r->sent = metrics_counter(registry, "baton_ep_rows_sent_total", "",
                              "Rows of this rank that experts of other ranks computed.");
    r->received = metrics_counter(registry, "baton_ep_rows_received_total", "",
                                  "Rows of other ranks that this rank's experts computed.");
}
