/* works.c - a table of works before one lane; see works.h. */
#include "kvtransfer/works.h"

#include "shared/base/assert.h"
#include "shared/base/mem.h"

struct kvt_works {
    struct kvt_works_options o;
    struct lane             *lane;
    struct dev_mem           memory; /* pieces and sums of all works */
    struct kvt_work          works[KVT_WORKS_MAX];
    struct list              begun;
    struct kvt_copy         *copies;
    uint32_t                 held;
};

enum { PIECES_BYTES = KVT_BATCH_PIECES * sizeof(struct lane_piece), SUMS_BYTES = KVT_BATCH_PIECES * sizeof(uint64_t) };

enum status kvt_works_create(const struct kvt_works_options *o, struct kvt_works **out, struct err *err)
{
    struct kvt_works *w = MEM_NEW(struct kvt_works);
    w->o = *o;
    w->memory.fd = -1;
    list_init(&w->begun);
    w->copies = MEM_ARRAY(struct kvt_copy, o->max_copies);
    enum status st = device_mem_alloc(o->device, (size_t)KVT_WORKS_MAX * (PIECES_BYTES + SUMS_BYTES), DEVICE_MEM_HOST, &w->memory, err);
    if (st == OK) st = device_lane(o->device, &w->lane, err);
    if (st != OK) {
        kvt_works_free(w);
        return st;
    }
    char *at = w->memory.ptr;
    for (uint32_t i = 0; i < KVT_WORKS_MAX; i++, at += PIECES_BYTES + SUMS_BYTES) {
        struct kvt_work *k = &w->works[i];
        k->works = w;
        k->pieces = (struct lane_piece *)(void *)at;
        k->sums = (uint64_t *)(void *)(at + PIECES_BYTES);
        list_init(&k->link);
    }
    *out = w;
    return OK;
}

void kvt_works_free(struct kvt_works *w)
{
    if (!w) return;
    lane_close(w->lane);
    device_mem_free(w->o.device, &w->memory);
    mem_free(w->copies);
    mem_free(w);
}

struct kvt_work *kvt_works_take(struct kvt_works *w)
{
    for (uint32_t i = 0; i < KVT_WORKS_MAX; i++) {
        struct kvt_work *k = &w->works[i];
        if (k->taken) continue;
        k->taken = true;
        k->given = false;
        k->stage.n = 0;
        atomic_store_explicit(&k->landed, false, memory_order_relaxed); /* nobody else knows it yet */
        return k;
    }
    return NULL;
}

static void on_landed(void *arg)
{
    struct kvt_work *k = arg;
    const struct kvt_works_options *o = &k->works->o; /* constant; *k may be taken again once it has landed */
    atomic_store_explicit(&k->landed, true, memory_order_release);
    o->notice(o->arg);
}

static enum status begin_sums(struct kvt_work *k, const struct kvt_task *t)
{
    const struct kvt_works *w = k->works;
    for (uint32_t i = 0; i < t->span.n; i++) {
        uint32_t position = t->span.first + i;
        struct kvt_strides s = kvt_plan_strides(t->view, t->span.layer, t->blocks[position], kvt_plan_tokens(t->view->layout, t->n_tokens, position));
        k->pieces[i] = (struct lane_piece){ .at = w->o.pool + s.at, .stride = s.stride, .run_bytes = (uint32_t)s.run_bytes, .n_runs = s.n_runs };
    }
    return lane_sums(w->lane, k->pieces, t->span.n, k->sums);
}

static enum status begin_copies(struct kvt_work *k, const struct kvt_task *t)
{
    const struct kvt_works *w = k->works;
    char *stage = kvt_staging_at(w->o.staging, k->stage);
    uint32_t n = kvt_plan_copies_from(0, t->view, t->blocks, t->n_tokens, t->span, w->copies);
    enum status st = OK;
    for (uint32_t i = 0; i < n && st == OK; i++) {
        char *here = stage + w->copies[i].local, *there = w->o.pool + w->copies[i].remote;
        bool fetch = t->move == KVT_TASK_FETCH;
        st = lane_copy(w->lane, &(struct lane_runs){ .to = fetch ? here : there, .from = fetch ? there : here, .bytes = w->copies[i].bytes, .n = 1 });
    }
    return st;
}

enum status kvt_work_begin(struct kvt_work *k, const struct kvt_task *t)
{
    struct kvt_works *w = k->works;
    ASSERT(k->taken && !k->given && t->span.n <= KVT_BATCH_PIECES);
    list_push(&w->begun, &k->link);
    enum status st = lane_after(w->lane, t->mark);
    if (st == OK && t->move != KVT_TASK_STAYS) st = begin_copies(k, t);
    if (st == OK && t->sums) st = begin_sums(k, t);
    return st == OK ? lane_tell(w->lane, on_landed, k) : st;
}

bool kvt_work_landed(const struct kvt_work *k) { return atomic_load_explicit(&k->landed, memory_order_acquire); }

static void free_work(struct kvt_work *k)
{
    struct kvt_works *w = k->works;
    list_remove(&k->link);
    kvt_staging_give(w->o.staging, &w->held, &k->stage);
    k->taken = false;
}

void kvt_work_give(struct kvt_work *k)
{
    if (!k) return;
    k->given = true;
    if (list_empty(&k->link) || kvt_work_landed(k)) free_work(k); /* never begun, or over */
}

void kvt_works_collect(struct kvt_works *w)
{
    if (!w) return;
    LIST_FOREACH(k, &w->begun, struct kvt_work, link)
        if (k->given && kvt_work_landed(k)) free_work(k);
}

struct kvt_work *kvt_works_oldest(struct kvt_works *w)
{
    LIST_FOREACH(k, &w->begun, struct kvt_work, link)
        if (!k->given) return k;
    return NULL;
}

enum status kvt_works_settle(struct kvt_works *w) { return lane_wait(w->lane); }

uint32_t *kvt_works_held(struct kvt_works *w) { return &w->held; }
