/* expert_rows.c - see expert_rows.h. Numbers are relaxed atomics that only the engine writes, so it
 * needs no read-modify-write. A GPU has the same since its model was loaded: they are copied as a
 * whole, next to the steps, which go on counting meanwhile. */
#include "shared/model/expert_rows.h"

#include <stdatomic.h>

#include "kernels/copy_stream.h"
#include "shared/base/clock.h"
#include "shared/base/mem.h"
#include "shared/base/metrics.h"
#include "shared/model/model.h"

enum { LOOK_MS = 50 };

/* The numbers of a GPU: [n_sparse, n_experts] chosen, then load [n_experts] of struct ep_config,
 * and how many of them were rows of this rank. */
struct gpu_rows {
    struct device *device; /* NULL: the CPU counts */
    struct copy_stream *stream;
    struct dev_mem counts, copy; /* in the GPU's memory, and of the host */
    size_t n;
    uint64_t asked_ms;
    bool is_asked;          /* a copy was asked for, and not taken */
    _Atomic bool is_copied; /* by a thread of the driver */
};

struct expert_rows {
    uint32_t n_sparse, n_experts;
    _Atomic uint64_t *chosen;                   /* [n_sparse, n_experts] */
    _Atomic uint64_t *load, n_computed;         /* [n_experts]: of n_computed */
    struct counter *computed, *sent, *received; /* NULL: not registered */
    struct gpu_rows gpu;
};

struct expert_rows *expert_rows_create(const struct model *m)
{
    const uint32_t n_sparse = model_n_sparse(&m->config, model_n_all_layers(&m->config));
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
    if (r->gpu.stream) copy_stream_close(r->gpu.stream);
    if (r->gpu.counts.ptr) device_mem_free(r->gpu.device, &r->gpu.counts);
    if (r->gpu.copy.ptr) device_mem_free(r->gpu.device, &r->gpu.copy);
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

/* ---- on a GPU ---- */

enum status expert_rows_place(struct expert_rows *r, const struct model *m, struct err *err)
{
    struct device *d = m->kernels->device;
    if (!r || d->is_host || m->share.ep_size < 2) return OK;
    struct gpu_rows *g = &r->gpu;
    g->device = d;
    g->n = ((size_t)r->n_sparse + 1) * r->n_experts + 1;
    TRY(device_mem_alloc(d, g->n * sizeof(uint64_t), DEVICE_MEM_PRIVATE, &g->counts, err));
    TRY(device_mem_alloc(d, g->n * sizeof(uint64_t), DEVICE_MEM_HOST, &g->copy, err));
    return device_copy_stream(d, &g->stream, err);
}

uint64_t *expert_rows_chosen_at(const struct expert_rows *r, uint32_t i_sparse)
{
    uint64_t *counts = r->gpu.counts.ptr;
    return counts ? counts + (size_t)i_sparse * r->n_experts : NULL;
}

uint64_t *expert_rows_load_at(const struct expert_rows *r)
{
    return expert_rows_chosen_at(r, r->n_sparse);
}

static void set(_Atomic uint64_t *to, const uint64_t *from, size_t n)
{
    for (size_t i = 0; i < n; i++) atomic_store_explicit(&to[i], from[i], memory_order_relaxed);
}

static uint64_t sum_of(const uint64_t *v, size_t n)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < n; i++) sum += v[i];
    return sum;
}

static void grow_to(struct counter *c, uint64_t n)
{
    const uint64_t has = counter_value(c);
    if (n > has) counter_add(c, n - has);
}

/* A copy is of several moments, some milliseconds apart: what was chosen may be ahead of what was
 * computed, or behind. */
static void take_copy(struct expert_rows *r)
{
    const uint64_t *chosen = r->gpu.copy.ptr, *load = chosen + (size_t)r->n_sparse * r->n_experts;
    const uint64_t n_chosen = sum_of(chosen, (size_t)r->n_sparse * r->n_experts),
                   n_load = sum_of(load, r->n_experts), n_own = load[r->n_experts];
    set(r->chosen, chosen, (size_t)r->n_sparse * r->n_experts);
    set(r->load, load, r->n_experts);
    set(&r->n_computed, &n_load, 1);
    if (!r->computed) return;
    grow_to(r->computed, n_load);
    grow_to(r->sent, n_chosen > n_own ? n_chosen - n_own : 0);
    grow_to(r->received, n_load > n_own ? n_load - n_own : 0);
}

static void note_copied(void *arg)
{
    atomic_store_explicit((_Atomic bool *)arg, true, memory_order_release);
}

/* A device that failed copies nothing any more. */
static void ask_for_copy(struct gpu_rows *g)
{
    const struct copy_stream_strided all = {
        .to = g->copy.ptr, .from = g->counts.ptr, .bytes = g->n * sizeof(uint64_t), .n = 1
    };
    atomic_store_explicit(&g->is_copied, false, memory_order_relaxed);
    g->asked_ms = clock_ms();
    g->is_asked = copy_stream_copy(g->stream, &all) == OK &&
                  copy_stream_launch_host_fn(g->stream, note_copied, &g->is_copied) == OK;
}

void model_look_at_rows(const struct model *m)
{
    struct expert_rows *r = m->expert_rows;
    if (!r || !r->gpu.stream) return;
    struct gpu_rows *g = &r->gpu;
    if (g->is_asked && !atomic_load_explicit(&g->is_copied, memory_order_acquire)) return;
    if (g->is_asked) take_copy(r);
    g->is_asked = false;
    if (m->ep && clock_ms() >= g->asked_ms + LOOK_MS) ask_for_copy(g);
}

/* ---- any thread ---- */

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
