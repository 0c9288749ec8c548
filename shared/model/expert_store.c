/* expert_store.c - see expert_store.h. */
#include "shared/model/expert_store.h"

#include "shared/base/assert.h"
#include "shared/base/mem.h"

/* ---- experts ---- */

static struct expert **place_of(const struct expert_store *s, uint32_t i_sparse, uint32_t i_expert)
{
    ASSERT(i_sparse < s->n_sparse && i_expert < s->n_experts);
    return &s->at[(size_t)i_sparse * s->n_experts + i_expert];
}

/* The lock is held, or there is one thread. */
static struct expert *ref(struct expert_store *s, uint32_t i_sparse, uint32_t i_expert)
{
    struct expert **at = place_of(s, i_sparse, i_expert);
    if (!*at) {
        *at = MEM_NEW(struct expert);
        (*at)->i_layer = s->layers[i_sparse];
        (*at)->i_sparse = i_sparse;
        (*at)->i_expert = i_expert;
        s->n_held++;
    }
    (*at)->n_refs++;
    return *at;
}

struct expert *expert_store_ref(struct expert_store *s, uint32_t i_sparse, uint32_t i_expert,
                                bool *is_new)
{
    pthread_mutex_lock(&s->lock);
    struct expert *x = ref(s, i_sparse, i_expert);
    *is_new = x->n_refs == 1;
    pthread_mutex_unlock(&s->lock);
    return x;
}

/* The lock is held. Returns the expert if that was its last slot: it is out of the store then. */
static struct expert *unref(struct expert_store *s, struct expert *x)
{
    if (--x->n_refs > 0) return NULL;
    *place_of(s, x->i_sparse, x->i_expert) = NULL;
    s->n_held--;
    return x;
}

static void free_expert(struct expert *x)
{
    if (!x) return;
    if (x->w.gate_up.data) weight_release(x->packed_by, &x->w.gate_up);
    if (x->w.down.data) weight_release(x->packed_by, &x->w.down);
    mem_free(x);
}

/* ---- sets ---- */

struct model_experts *expert_set_create(const struct expert_store *s, int32_t n_local)
{
    struct model_experts *x = MEM_NEW(struct model_experts);
    const size_t n = (size_t)s->n_sparse * (size_t)n_local;
    x->n_local = n_local;
    x->n_sparse = s->n_sparse;
    x->slots = MEM_ARRAY(struct expert *, n);
    x->gate_up = MEM_ARRAY(struct weight, n);
    x->down = MEM_ARRAY(struct weight, n);
    x->jobs = MEM_ARRAY(struct matmul_args, (size_t)n_local);
    return x;
}

static size_t n_slots(const struct model_experts *x) { return x->n_sparse * (size_t)x->n_local; }

void expert_set_finish(struct model_experts *x)
{
    for (size_t i = 0; i < n_slots(x); i++) {
        x->gate_up[i] = x->slots[i]->w.gate_up;
        x->down[i] = x->slots[i]->w.down;
    }
}

void expert_set_free(struct expert_store *s, struct model_experts *x)
{
    if (!x) return;
    pthread_mutex_lock(&s->lock);
    for (size_t i = 0; i < n_slots(x); i++)
        if (x->slots[i]) x->slots[i] = unref(s, x->slots[i]);
    pthread_mutex_unlock(&s->lock);
    for (size_t i = 0; i < n_slots(x); i++) free_expert(x->slots[i]);
    mem_free(x->slots);
    mem_free(x->gate_up);
    mem_free(x->down);
    mem_free(x->jobs);
    mem_free(x);
}

const struct model_experts *expert_store_use(struct expert_store *s, const struct model_experts *x,
                                             bool with_ep)
{
    pthread_mutex_lock(&s->lock);
    if (!x && (with_ep || s->own_is_whole)) x = s->own;
    s->in_use = x;
    pthread_mutex_unlock(&s->lock);
    return x;
}

/* ---- life cycle ---- */

static void list_sparse_layers(const struct model_config *c, struct expert_store *s)
{
    s->n_sparse = model_n_sparse(c, model_n_all_layers(c));
    s->layers = MEM_ARRAY(uint32_t, s->n_sparse);
    for (uint32_t i = 0, n = 0; i < model_n_all_layers(c); i++)
        if (model_layer_is_sparse(c, i)) s->layers[n++] = i;
}

struct expert_store *expert_store_create(const struct model *m)
{
    struct expert_store *s = MEM_NEW(struct expert_store);
    const uint32_t n = m->share.n_experts;
    pthread_mutex_init(&s->taking, NULL);
    pthread_mutex_init(&s->lock, NULL);
    list_sparse_layers(&m->config, s);
    s->n_experts = m->config.moe.n_experts;
    s->own_is_whole = n == s->n_experts;
    s->at = MEM_ARRAY(struct expert *, (size_t)s->n_sparse * s->n_experts);
    s->own = expert_set_create(s, (int32_t)n);
    for (uint32_t i = 0; i < s->n_sparse; i++)
        for (uint32_t k = 0; k < n; k++)
            s->own->slots[(size_t)i * n + k] = ref(s, i, m->share.first_expert + k);
    return s;
}

void expert_store_free(struct expert_store *s)
{
    if (!s) return;
    ASSERT(s->n_sets == 0);
    expert_set_free(s, s->own);
    expert_set_free(s, s->kept);
    ASSERT(s->n_held == 0);
    if (s->kernels) kernel_ctx_free(s->kernels);
    expert_cache_close(s->cache);
    pthread_mutex_destroy(&s->taking);
    pthread_mutex_destroy(&s->lock);
    mem_free(s->layers);
    mem_free(s->at);
    mem_free(s);
}
