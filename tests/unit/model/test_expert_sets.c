/* test_expert_sets.c - steps of ranks whose experts change: whatever each holds, every rank has the
 * logits of one that has the whole model, bit for bit.
 *
 * Ranks are threads, as in test_expert_forward.c. While a rank steps with one set, another thread
 * takes the next and drops the one before. */
#include <pthread.h>

#include "shared/model/expert_store.h"
#include "tests/fixtures/model_rig.h"
#include "tests/fixtures/rank_meeting.h"

enum {
    RANKS = 3,
    EPOCHS = 6,
    STEPS = 2 /* of an epoch */,
    N_IDS = 24,
    ROWS = N_IDS + EPOCHS * STEPS
};

/* ---- what a rank is asked: a prompt in the first step, then a token each ---- */

static uint32_t rows_of(uint32_t rank, int step) { return step == 0 ? N_IDS - rank * 5 : 1; }

/* The logits of the step's rows, at `out`. */
static float *step_of(struct rig *r, uint32_t rank, int step, float *out)
{
    const int32_t n = (int32_t)rows_of(rank, step), prompt = (int32_t)rows_of(rank, 0);
    int32_t ids[ROWS];
    for (int32_t i = 0; i < ROWS; i++)
        ids[i] = (11 + 5 * (int32_t)rank + (29 + 2 * (int32_t)rank) * i) % 251;
    const int32_t at = step == 0 ? 0 : prompt + step - 1;
    feed_all(
        r, &(struct feed){ .table = 1, .ids = ids + at, .n = n, .pos = at, .generated = step > 0 },
        1, out);
    return out + (size_t)n * r->n_vocab;
}

static float *logits_of(uint32_t n_vocab) { return MEM_ARRAY(float, (size_t)ROWS *n_vocab); }

/* ---- placements ---- */

/* The physical experts of an epoch; rank r has first[r] .. first[r + 1] - 1, maybe none. The first
 * epoch's are the shares that were loaded. In later ones every layer has a map of its own, and there
 * may be copies. */
struct placement {
    size_t n_logical, n_physical, n_maps;
    int32_t first[RANKS + 1];
};

static struct placement placement_of(uint32_t epoch, const struct model_config *c)
{
    const size_t e = c->moe.n_experts, n = e + (epoch + 1) % 3;
    const size_t ends[EPOCHS][RANKS - 1] = {
        { 0, 1 }, { 0, 0 }, { n - 1, n }, { n / 2, n / 2 + 1 }, { 1, n }, { n / 3, n - n / 3 },
    };
    struct placement p = { .n_logical = e,
                           .n_physical = epoch ? n : e,
                           .n_maps = epoch ? model_n_sparse(c, c->n_layers) : 1 };
    for (int r = 1; r < RANKS; r++) p.first[r] = (int32_t)ends[epoch][r - 1];
    p.first[RANKS] = (int32_t)p.n_physical;
    return p;
}

static int32_t logical_of(const struct placement *p, uint32_t epoch, size_t map, size_t physical)
{
    return (int32_t)((physical + map * 2 + epoch * (epoch + map)) % p->n_logical);
}

static struct ep *group_of(struct rank_seat *seat, const struct model *m, uint32_t epoch)
{
    const struct placement p = placement_of(epoch, &m->config);
    int32_t *logical = MEM_ARRAY(int32_t, p.n_maps * p.n_physical);
    struct ep *e;
    struct ep_config c = {
        .backend = "shm",
        .device = m->kernels->device,
        .rank = (int32_t)seat->rank,
        .size = RANKS,
        .send = DTYPE_F32,
        .back = DTYPE_F32,
        .collective_bytes = 4096,
        .timeout_ms = RANK_WAIT_MS,
        .exchange = rank_exchange,
        .exchange_arg = seat,
    };
    for (size_t map = 0; map < p.n_maps; map++)
        for (size_t i = 0; i < p.n_physical; i++)
            logical[map * p.n_physical + i] = logical_of(&p, epoch, map, i);
    model_ep_needs(m, &c);
    c.placement.n_physical = (int32_t)p.n_physical;
    c.placement.n_maps = (int32_t)p.n_maps;
    c.placement.first = p.first;
    c.placement.logical = logical;
    CHECK_OK(ep_create(&c, &e, NULL));
    mem_free(logical);
    return e;
}

/* ---- ranks ---- */

struct group {
    struct model_options o;
    const char *isa;
    enum activations activations;
    struct rank_meeting all;
    struct model_config config;
    float *logits[RANKS];
};

struct rank {
    struct group *g;
    uint32_t rank;
    pthread_t thread, taker;
    struct rig rig;
    uint32_t next_epoch;
    struct model_experts *before, *now, *next;
};

/* The thread beside the engine's. */
static void *take_next(void *arg)
{
    struct rank *r = arg;
    struct err err;
    int32_t logical[KERNEL_EXPERTS_MAX];
    const struct placement p = placement_of(r->next_epoch, &r->rig.m->config);
    const int32_t first = p.first[r->rank], n = p.first[r->rank + 1] - first;
    for (size_t map = 0, at = 0; map < p.n_maps; map++)
        for (int32_t i = 0; i < n; i++)
            logical[at++] = logical_of(&p, r->next_epoch, map, (size_t)(first + i));
    if (model_experts_take(r->rig.m,
                           &(struct experts_wanted){ logical, (int32_t)p.n_maps, n, NULL, NULL },
                           &r->next, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s", err.text);
    model_experts_drop(r->rig.m, r->before);
    return NULL;
}

/* Steps with r->now while the set of the next epoch is taken. */
static float *run_epoch(struct rank *r, uint32_t epoch, float *out)
{
    const bool is_last = epoch + 1 == EPOCHS;
    r->next_epoch = epoch + 1;
    if (!is_last) CHECK_OK(pthread_create(&r->taker, NULL, take_next, r));
    for (int i = 0; i < STEPS; i++) {
        const int step = (int)epoch * STEPS + i;
        r->rig.group_rows = rows_of(0, step);
        out = step_of(&r->rig, r->rank, step, out);
        CHECK_OK(r->rig.m->exchange_fault.code);
    }
    if (is_last) return out;
    pthread_join(r->taker, NULL);
    r->before = r->now;
    r->now = r->next;
    return out;
}

static void *run_rank(void *arg)
{
    struct rank *r = arg;
    struct group *g = r->g;
    const struct placement p = placement_of(0, &g->config);
    const struct model_share share = {
        .tp_size = 1,
        .first_expert = (uint32_t)p.first[r->rank],
        .n_experts = (uint32_t)(p.first[r->rank + 1] - p.first[r->rank]),
        .ep_size = RANKS,
    };
    struct rank_seat seat = { &g->all, r->rank };
    struct model_options o = g->o;
    struct ep *ep = NULL;
    o.share = &share;
    rig_open_with(&r->rig, o, g->isa, g->activations);
    float *out = g->logits[r->rank] = logits_of(r->rig.n_vocab);
    for (uint32_t epoch = 0; epoch < EPOCHS; epoch++) {
        struct ep *was = ep;
        ep = group_of(&seat, r->rig.m, epoch);
        model_set_ep(r->rig.m, ep, r->now); /* at first none: the share's own */
        ep_free(was);
        out = run_epoch(r, epoch, out);
    }
    model_set_ep(r->rig.m, NULL, NULL);
    ep_free(ep);
    model_experts_drop(r->rig.m, r->before);
    model_experts_drop(r->rig.m, r->now);
    CHECK_OK(model_experts_take(r->rig.m, &(struct experts_wanted){ .n_maps = 1 }, &r->now, NULL));
    model_experts_drop(r->rig.m, r->now);
    CHECK_EQ_INT(r->rig.m->expert_store->n_held, 0);
    rig_close(&r->rig);
    return NULL;
}

/* ---- comparison ---- */

static void check_alone(const struct group *g, uint32_t rank)
{
    struct rig r;
    rig_open_with(&r, g->o, g->isa, g->activations);
    float *want = logits_of(r.n_vocab), *end = want;
    for (int step = 0; step < EPOCHS * STEPS; step++) end = step_of(&r, rank, step, end);
    if (memcmp(want, g->logits[rank], (size_t)(end - want) * sizeof *want) != 0)
        test_fail(__FILE__, __LINE__, "%s on %s: logits of rank %u differ", g->o.path, g->isa,
                  rank);
    mem_free(want);
    mem_free(g->logits[rank]);
    rig_close(&r);
}

static void read_config(struct group *g)
{
    struct rig r;
    rig_open_with(&r, g->o, g->isa, g->activations);
    g->config = r.m->config;
    rig_close(&r);
}

static void check_sets_as(const char *name, const char *isa, enum activations activations,
                          enum quantize quantize)
{
    const struct path p = golden(name, "model");
    struct group g = { .o = { .path = p.text, .quantize = quantize },
                       .isa = isa,
                       .activations = activations };
    struct rank *ranks = MEM_ARRAY(struct rank, RANKS);
    read_config(&g);
    rank_meeting_init(&g.all, RANKS);
    for (uint32_t i = 0; i < RANKS; i++) {
        ranks[i].g = &g;
        ranks[i].rank = i;
        CHECK_OK(pthread_create(&ranks[i].thread, NULL, run_rank, &ranks[i]));
    }
    for (uint32_t i = 0; i < RANKS; i++) pthread_join(ranks[i].thread, NULL);
    rank_meeting_release(&g.all);
    for (uint32_t i = 0; i < RANKS; i++) check_alone(&g, i);
    mem_free(ranks);
}

static void check_sets(const char *name)
{
    check_sets_as(name, "ref", ACTIVATIONS_F32, QUANTIZE_NONE);
    check_sets_as(name, "auto", ACTIVATIONS_FAST, QUANTIZE_NONE);
}

TEST(sets_of_ernie_moe_change_between_steps) { check_sets("ernie_moe"); }
TEST(sets_of_qwen3_moe_change_between_steps) { check_sets("qwen3_moe"); }
TEST(sets_of_mixtral_change_between_steps) { check_sets("mixtral"); }
TEST(sets_of_deepseek_v3_change_between_steps) { check_sets("deepseek_v3"); }

TEST(sets_of_quantised_experts_change_between_steps)
{
    check_sets_as("ernie_moe_untied", "auto", ACTIVATIONS_FAST, QUANTIZE_WINT8);
    check_sets_as("ernie_moe_untied", "auto", ACTIVATIONS_FAST, QUANTIZE_WINT4);
    check_sets_as("deepseek_v3_fp8", "auto", ACTIVATIONS_FAST, QUANTIZE_NONE);
}

TEST_MAIN(CASE_T(sets_of_ernie_moe_change_between_steps, 240),
          CASE_T(sets_of_qwen3_moe_change_between_steps, 240),
          CASE_T(sets_of_mixtral_change_between_steps, 240),
          CASE_T(sets_of_deepseek_v3_change_between_steps, 240),
          CASE_T(sets_of_quantised_experts_change_between_steps, 240))
