/* gpu_ranks.h - engines on a GPU that share a model, each a process: the objects through which they
 * exchange, made as deploy/node makes them, and their bells. Thread: the test's, but for what
 * listens. */
#ifndef BATON_TESTS_UNIT_ENGINE_GPU_RANKS_H
#define BATON_TESTS_UNIT_ENGINE_GPU_RANKS_H

#include "kernels/backend.h"
#include "tests/conformance/ep_fixture.h"
#include "tests/fixtures/rank_meeting.h"
#include "tests/unit/engine/engine_rig.h"

enum { GPU_RANKS_MAX = 4 };
static const char WHY_NOT[] = "no CUDA device, or a build without";

/* In memory of all ranks: the latest bell of each. */
struct bells {
    _Atomic uint64_t of_group[GPU_RANKS_MAX]; /* epoch << 32 | step */
    _Atomic uint64_t of_node[GPU_RANKS_MAX];  /* step + 1 */
    atomic_bool moved; /* the first rank has lost the group with a prompt's layers */
};

/* Ranks of one world are nodes of tp each, one after the other. */
struct rank {
    struct rig rig; /* first: the callbacks' arg */
    struct world *w;
    struct world node; /* in which the ranks of its node meet */
    struct bells *bells;
    int tp;
    struct model_share share;
    uint64_t epoch;
    pthread_t listener;
    atomic_bool ends;
    atomic_int n_lost, n_faults;
    struct err fault;
};

/* What all ranks of a test share. */
struct rank_memory {
    struct bells bells;
    struct meeting nodes[GPU_RANKS_MAX];
};

static struct rank_memory *the_memory;
static enum dtype the_rows; /* as what rows travel */

static inline void on_group(void *arg, const struct engine_group_event *ev)
{
    struct rank *r = arg;
    if (ev->kind == ENGINE_GROUP_LOST) atomic_fetch_add(&r->n_lost, 1);
    if (ev->kind == ENGINE_GROUP_BELL)
        atomic_store(&r->bells->of_group[r->w->rank], ev->epoch << 32 | ev->step);
}

static inline void on_node_bell(void *arg, uint64_t step)
{
    struct rank *r = arg;
    atomic_store(&r->bells->of_node[r->w->rank], step + 1);
}

static inline void on_rank_fault(void *arg, const struct err *err)
{
    struct rank *r = arg;
    r->fault = *err;
    CHECK_EQ_INT(atomic_fetch_add(&r->n_faults, 1), 0);
}

/* Passes bells of the others on. */
static inline void *listen_for_bells(void *arg)
{
    struct rank *r = arg;
    uint64_t heard[GPU_RANKS_MAX] = { 0 }, heard_node[GPU_RANKS_MAX] = { 0 };
    for (; !atomic_load(&r->ends); usleep(500))
        for (int i = 0; i < r->w->size; i++) {
            const uint64_t bell = atomic_load(&r->bells->of_group[i]),
                           node = atomic_load(&r->bells->of_node[i]);
            const bool is_other = i != r->w->rank, is_near = i / r->tp == r->w->rank / r->tp;
            if (is_other && bell != heard[i])
                engine_bell(r->rig.engine, bell >> 32, (uint32_t)bell);
            if (is_other && is_near && node != heard_node[i])
                engine_node_bell(r->rig.engine, node - 1);
            heard[i] = bell;
            heard_node[i] = node;
        }
    return NULL;
}

static inline struct ep_config words_of(const struct rank *r, struct world *w)
{
    return (struct ep_config){
        .backend = "shm",
        .device = kernel_host(r->rig.model->kernels)->device,
        .rank = w->rank,
        .size = w->size,
        .send = DTYPE_F32,
        .back = DTYPE_F32,
        .collective_bytes = EP_WORDS_BYTES,
        .timeout_ms = RIG_WAIT_MS,
        .exchange = world_exchange,
        .exchange_arg = w,
    };
}

/* By which rows reach experts. */
static inline struct ep *make_ep(struct rank *r)
{
    const struct model *m = r->rig.model;
    const uint32_t size = (uint32_t)r->w->size, n = m->config.moe.n_experts;
    const struct ep_config words = words_of(r, r->w);
    struct ep_config c = words;
    int32_t first[GPU_RANKS_MAX + 1];
    struct ep *e;
    for (uint32_t i = 0; i < size; i++) first[i] = (int32_t)share_experts(i, size, n).first;
    first[size] = (int32_t)n;
    engine_ep_needs(r->rig.engine, &c);
    c.backend = "peer";
    c.device = m->kernels->device;
    c.placement = (struct ep_placement){ .n_logical = first[size],
                                         .n_physical = first[size],
                                         .first = first };
    CHECK_OK(ep_create(&words, &c.words, NULL));
    CHECK_OK(ep_create(&c, &e, NULL));
    return e;
}

/* By which a node gathers. */
static inline struct ep *make_node_ep(struct rank *r)
{
    struct ep_config words = words_of(r, &r->node), c = words;
    struct ep *e;
    words.collective_bytes = engine_node_needs(r->rig.engine, &c);
    c.backend = "peer";
    c.device = r->rig.model->kernels->device;
    CHECK_OK(ep_create(&words, &c.words, NULL));
    CHECK_OK(ep_create(&c, &e, NULL));
    return e;
}

static inline void join(struct rank *r)
{
    r->epoch++;
    CHECK_OK(engine_join_group(r->rig.engine, make_ep(r), NULL, r->epoch));
}

/* A rank of w, in a node of tp. n_experts 0: the ranks of the world have none to share. */
static inline void open_rank(struct rank *r, struct world *w, int tp, struct rig_options o,
                             uint32_t n_experts)
{
    const int node = w->rank / tp;
    *r = (struct rank){ .w = w, .bells = &the_memory->bells, .tp = tp };
    r->node = (struct world){ &the_memory->nodes[node], w->rank % tp, tp, 0 };
    r->share = rank_share((uint32_t)w->rank, (uint32_t)w->size, (uint32_t)tp, n_experts);
    r->share.ep_rows = the_rows;
    o.share = &r->share;
    o.on_group = n_experts ? on_group : NULL;
    if (tp > 1) {
        o.on_node_bell = on_node_bell;
        o.on_fault = on_rank_fault;
    }
    rig_open(&r->rig, o);
    CHECK(pthread_create(&r->listener, NULL, listen_for_bells, r) == 0);
    if (tp > 1) CHECK_OK(engine_set_node(r->rig.engine, make_node_ep(r)));
    if (n_experts) join(r);
}

/* All ranks are here. */
static inline void await_all(struct rank *r)
{
    const int done = 0;
    int all[GPU_RANKS_MAX];
    CHECK_OK(world_exchange(r->w, &done, sizeof done, all, NULL));
}

/* All ranks are through: one that ended earlier would be lost for the others. */
static inline void close_rank(struct rank *r)
{
    await_all(r);
    atomic_store(&r->ends, true);
    pthread_join(r->listener, NULL);
    rig_close(&r->rig);
}

static inline bool await_count(atomic_int *n, int want, int wait_ms)
{
    for (int ms = 0; ms < wait_ms && atomic_load(n) < want; ms++) usleep(1000);
    return atomic_load(n) >= want;
}

static inline void need_gpu(void)
{
    if (device_count("cuda") == 0) _exit(NO_GPU);
}

static inline void run_gpu_ranks(int size, void (*rank)(struct world *w))
{
    the_memory = mmap(NULL, sizeof *the_memory, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                      -1, 0);
    CHECK(the_memory != MAP_FAILED);
    run_ranks(size, rank, 0, WHY_NOT);
    munmap(the_memory, sizeof *the_memory);
}

#endif
