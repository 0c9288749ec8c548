/* experts.c - takes and drops sets of experts.
 *
 * Taking is a load in small: what the store lacks is packed (expert_pack.c) by a kernel context of
 * its own, whose one thread is the caller's, so that the engine keeps the compute pool.
 * Experts that are being packed are in the store already: only takes add any, one at a time.
 * Thread: experts.h. */
#include "shared/model/experts.h"

#include <inttypes.h>

#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/model/expert_store.h"

/* A running take. */
struct take {
    struct model *m;
    struct expert_store *store;
    struct model_experts *set;
    const struct experts_wanted *wanted;
    struct expert **missing; /* [n_missing] which the store lacked */
    size_t n_missing, n_mapped;
    size_t bytes; /* that the others take, packed */
    struct err *err;
};

/* ---- what is asked for ---- */

static enum status check_size(const struct expert_store *s, int32_t n_maps, int32_t n_local,
                              struct err *err)
{
    if (n_local < 0 || n_local > KERNEL_EXPERTS_MAX)
        return err_field(err, ERR_INVALID, "n_local",
                         "%" PRId32 " experts on one rank: there can be 0 to %d", n_local,
                         KERNEL_EXPERTS_MAX);
    if (n_maps == 1 || (n_maps > 0 && (uint32_t)n_maps == s->n_sparse)) return OK;
    return err_field(err, ERR_INVALID, "n_maps",
                     "a placement of %" PRId32 " layers: the model has %" PRIu32
                     " layers with experts, which have a map each or all the same",
                     n_maps, s->n_sparse);
}

static enum status check_experts(const struct expert_store *s, const int32_t *logical, size_t n,
                                 struct err *err)
{
    for (size_t i = 0; i < n; i++)
        if (logical[i] < 0 || (uint32_t)logical[i] >= s->n_experts)
            return err_field(err, ERR_INVALID, "logical",
                             "expert %" PRId32 " in slot %zu: the model has experts 0 to %" PRId64,
                             logical[i], i, (int64_t)s->n_experts - 1);
    return OK;
}

/* ---- binding ---- */

/* Fills the set's slots; the experts that the store lacked are t->missing. */
static void fill_slots(struct take *t)
{
    struct model_experts *x = t->set;
    const size_t n_local = (size_t)x->n_local;
    t->missing = MEM_ARRAY(struct expert *, x->n_sparse * n_local);
    for (uint32_t i = 0; i < x->n_sparse; i++) {
        const int32_t *map = t->wanted->logical + (t->wanted->n_maps > 1 ? i * n_local : 0);
        for (size_t k = 0; k < n_local; k++) {
            bool is_new;
            struct expert *e = expert_store_ref(t->store, i, (uint32_t)map[k], &is_new);
            x->slots[i * n_local + k] = e;
            if (is_new) t->missing[t->n_missing++] = e;
        }
    }
}

/* The context that packs; its ops never compute. */
static enum status make_kernels(struct take *t)
{
    struct kernel_options o = t->m->kernels->options;
    if (t->store->kernels) return OK;
    o.backend = t->m->kernels->backend->name;
    o.n_threads = 1;
    return kernel_ctx_create(o, &t->store->kernels, t->err);
}

static double gib(uint64_t bytes) { return (double)bytes / (1 << 30); }

static enum status check_memory(const struct take *t)
{
    const uint64_t have = device_available(t->m->kernels->device);
    if (t->bytes <= have) return OK;
    return err_set(t->err, ERR_NOMEM,
                   "%zu experts of other ranks need %.2f GiB here and %.2f GiB are available, "
                   "%.2f too little; lower --kv-cache-memory, give --quantization, or start "
                   "another rank",
                   t->n_missing - t->n_mapped, gib(t->bytes), gib(have), gib(t->bytes - have));
}

static size_t count_mapped(const struct take *t)
{
    size_t n = 0;
    for (size_t i = 0; i < t->n_missing; i++) n += t->missing[i]->is_mapped;
    return n;
}

static enum status add_missing(struct take *t)
{
    if (t->n_missing == 0) return OK;
    if (!t->m->weights)
        return err_set(t->err, ERR_UNSUPPORTED,
                       "this rank was loaded without other ranks and can take no experts over");
    TRY(make_kernels(t));
    struct expert_pack p = { .m = t->m,
                             .kernels = t->store->kernels,
                             .experts = t->missing,
                             .n = t->n_missing,
                             .progress = t->wanted->go_on,
                             .progress_arg = t->wanted->go_on_arg };
    enum status st = expert_pack_plan(&p, t->err);
    t->bytes = p.bytes;
    t->n_mapped = count_mapped(t);
    if (st == OK) st = check_memory(t);
    if (st == OK) st = expert_pack_run(&p, t->err);
    t->n_mapped = count_mapped(t);
    expert_pack_release(&p);
    weights_unload_pages(t->m->weights);
    return st;
}

/* ---- take and drop ---- */

/* Takes the kept set out of the store. */
static struct model_experts *take_kept(struct expert_store *s)
{
    pthread_mutex_lock(&s->lock);
    struct model_experts *kept = s->kept;
    s->kept = NULL;
    pthread_mutex_unlock(&s->lock);
    return kept;
}

/* `kept`: a set that is given up once the new one has what it shares with it; NULL: none. */
static enum status make_set(struct take *t, struct model_experts *kept)
{
    t->set = expert_set_create(t->store, t->wanted->n_local);
    t->n_missing = t->n_mapped = t->bytes = 0;
    fill_slots(t);
    expert_set_free(t->store, kept);
    enum status st = add_missing(t);
    if (st == OK) expert_set_finish(t->set);
    else expert_set_free(t->store, t->set);
    mem_free(t->missing);
    return st;
}

/* What is kept of an earlier set makes room for one that finds too little. */
static enum status make_set_or_room(struct take *t)
{
    const enum status st = make_set(t, NULL);
    struct model_experts *kept = st == ERR_NOMEM ? take_kept(t->store) : NULL;
    return kept ? make_set(t, kept) : st;
}

/* Counts a set that was taken. What was kept for it has served. */
static void count_set(struct expert_store *s)
{
    pthread_mutex_lock(&s->lock);
    s->n_sets++;
    pthread_mutex_unlock(&s->lock);
    expert_set_free(s, take_kept(s));
}

enum status model_experts_take(struct model *m, const struct experts_wanted *w,
                               struct model_experts **out, struct err *err)
{
    struct err ignored;
    struct take t = { .m = m, .store = m->expert_store, .wanted = w, .err = err ? err : &ignored };
    const uint64_t t0_ms = clock_ms();
    TRY(check_size(t.store, w->n_maps, w->n_local, t.err));
    TRY(check_experts(t.store, w->logical, (size_t)w->n_maps * (size_t)w->n_local, t.err));
    pthread_mutex_lock(&t.store->taking);
    enum status st = make_set_or_room(&t);
    pthread_mutex_unlock(&t.store->taking);
    if (st != OK) return st;
    count_set(t.store);
    log_info("experts taken",
             "slots=%" PRId32 " layers=%" PRIu32
             " new=%zu from_cache=%zu packed_mib=%.1f after_ms=%" PRIu64,
             w->n_local, t.set->n_sparse, t.n_missing, t.n_mapped, (double)t.bytes / (1 << 20),
             clock_ms() - t0_ms);
    *out = t.set;
    return OK;
}

/* Can the share's own set go? No step needs it any more, and its experts can be had again. LIMIT:
 * on a GPU they lie in one allocation, which stays until the model ends, and so they stay. */
static bool own_can_go(const struct model *m)
{
    const struct expert_store *s = m->expert_store;
    return m->share.ep_size > 1 && m->kernels->device->is_host && !s->own_is_whole &&
           s->in_use != s->own;
}

void model_experts_drop(struct model *m, struct model_experts *x)
{
    struct expert_store *s = m->expert_store;
    struct model_experts *own = NULL;
    if (!x) return;
    pthread_mutex_lock(&s->lock);
    ASSERT(s->in_use != x && s->n_sets > 0);
    if (own_can_go(m)) {
        own = s->own;
        s->own = NULL;
    }
    if (--s->n_sets == 0) {
        ASSERT(!s->kept);
        s->kept = x;
        x = NULL;
    }
    pthread_mutex_unlock(&s->lock);
    expert_set_free(s, own);
    expert_set_free(s, x);
}
