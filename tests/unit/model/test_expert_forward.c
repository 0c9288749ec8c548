/* test_expert_forward.c - steps of ranks that share experts, and of tensor-parallel nodes whose ranks
 * do: every rank has the logits of one rank that has the whole model, bit for bit, and together they
 * have counted the same rows.
 *
 * Ranks are threads here; their rows travel through the backend `shm` of ep.h. Each node answers
 * other prompts, of other lengths, and is idle in some steps. */
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "shared/base/metrics.h"
#include "tests/fixtures/model_rig.h"
#include "tests/fixtures/rank_meeting.h"

enum {
    NODES_MAX = 4,
    RANKS = 8,
    N_IDS = TEST_IS_SANITIZED ? 12 : 40,
    N_STEPS = TEST_IS_SANITIZED ? 5 : 7,
    STEP_ROWS = N_IDS + 8
};

/* ---- what a node is asked ---- */

/* Fills in the sequences of a node's step; returns how many. Node 1 is idle in step 3, and node 2
 * in the first. */
static int32_t feeds_of(uint32_t node, int step, struct feed *out, int32_t *ids)
{
    const int32_t half = N_IDS / 2 - (int32_t)node, first = (int32_t)node * 3;
    for (int32_t i = 0; i < 2 * N_IDS; i++) ids[i] = (7 + first + (31 + (int32_t)node) * i) % 251;
    if ((node == 1 && step == 3) || (node == 2 && step == 0)) return 0;
    if (step == 0 || (node == 2 && step == 1)) {
        out[0] = (struct feed){ .table = 1, .ids = ids, .n = half };
        return 1;
    }
    if (step == 1 || (node == 2 && step == 2)) {
        out[0] = (struct feed){ .table = 1, .ids = ids + half, .n = N_IDS - half, .pos = half };
        out[1] = (struct feed){ .table = 2, .ids = ids + 3, .n = 7 };
        return 2;
    }
    out[0] = (struct feed){
        .table = 1, .ids = ids + N_IDS + step, .n = 1, .pos = N_IDS + step - 2, .generated = true
    };
    if (node == 1 && step > 3) out[0].pos--;
    if (node == 2) out[0].pos--;
    return 1;
}

static uint32_t rows_of(uint32_t node, int step)
{
    struct feed feeds[2];
    int32_t ids[2 * N_IDS], rows = 0;
    const int32_t n = feeds_of(node, step, feeds, ids);
    for (int32_t i = 0; i < n; i++) rows += feeds[i].n;
    return (uint32_t)rows;
}

/* The logits of all rows of all steps, of which there are *n; steps of a group are told how many
 * rows its busiest rank routes. */
static float *answer(struct rig *r, uint32_t node, uint32_t n_nodes, size_t *n)
{
    const size_t v = r->n_vocab;
    float *out = MEM_ARRAY(float, (size_t)N_STEPS *STEP_ROWS *v);
    *n = 0;
    for (int step = 0; step < N_STEPS; step++) {
        struct feed feeds[2];
        int32_t ids[2 * N_IDS];
        const int32_t n_feeds = feeds_of(node, step, feeds, ids);
        r->group_rows = n_nodes > 0 ? 0 : rows_of(node, step);
        for (uint32_t other = 0; n_nodes > 0 && other < n_nodes; other++) {
            const uint32_t rows = (uint32_t)model_routed_rows_max(r->m, rows_of(other, step));
            if (rows > r->group_rows) r->group_rows = rows;
        }
        if (n_feeds == 0 && n_nodes == 0) continue;
        feed_all(r, feeds, n_feeds, out + *n * v);
        *n += rows_of(node, step);
    }
    *n *= v;
    return out;
}

/* ---- ranks ---- */

struct group {
    uint32_t n_nodes, tp, n_experts;
    bool narrow; /* ranks have room for a row each: pieces are halved again and again */
    struct model_options o;
    const char *isa;
    enum activations activations;
    struct rank_meeting all, node[NODES_MAX];
    size_t n_logits[RANKS];
    float *logits[RANKS];
    uint64_t *chosen[RANKS]; /* model_expert_rows */
    uint64_t *load[RANKS];   /* model_expert_load */
    uint64_t computed[RANKS], sent[RANKS], received[RANKS];
};

struct rank {
    struct group *g;
    uint32_t rank, node, tp_rank;
    pthread_t thread;
};

static size_t n_chosen(const struct model_config *c)
{
    return (size_t)model_n_sparse(c, c->n_layers) * c->moe.n_experts;
}

static uint64_t *read_chosen(const struct model *m)
{
    uint64_t *chosen = MEM_ARRAY(uint64_t, n_chosen(&m->config));
    model_expert_rows(m, chosen);
    return chosen;
}

static uint64_t sum_of(const uint64_t *v, size_t n)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < n; i++) sum += v[i];
    return sum;
}

/* Another thread that reads while the engine's counts. */
struct reader {
    const struct model *m;
    atomic_bool ends;
    pthread_t thread;
};

static void *read_on(void *arg)
{
    struct reader *r = arg;
    uint64_t last = 0;
    while (!atomic_load(&r->ends)) {
        uint64_t *chosen = read_chosen(r->m);
        const uint64_t sum = sum_of(chosen, n_chosen(&r->m->config));
        CHECK(sum >= last);
        last = sum;
        mem_free(chosen);
        usleep(1000);
    }
    return NULL;
}

static void take_counts(struct group *g, uint32_t rank, const struct model *m, struct metrics *r)
{
    g->chosen[rank] = read_chosen(m);
    g->load[rank] = MEM_ARRAY(uint64_t, m->config.moe.n_experts);
    model_expert_load(m, g->load[rank]);
    CHECK_EQ_INT(sum_of(g->load[rank], m->config.moe.n_experts), model_computed_rows(m));
    g->computed[rank] = counter_value(metrics_counter(r, "baton_moe_rows_total", "", ""));
    g->sent[rank] = counter_value(metrics_counter(r, "baton_ep_rows_sent_total", "", ""));
    g->received[rank] = counter_value(metrics_counter(r, "baton_ep_rows_received_total", "", ""));
}

static void *run_rank(void *arg)
{
    struct rank *r = arg;
    struct group *g = r->g;
    const uint32_t size = g->n_nodes * g->tp;
    const struct model_share share = rank_share(r->rank, size, g->tp, g->n_experts);
    const struct model_gather by = { .columns = rank_gather };
    struct rank_seat in_group = { &g->all, r->rank }, in_node = { &g->node[r->node], r->tp_rank };
    struct model_options o = g->o;
    struct rig rig;
    o.share = &share;
    o.gather = &by;
    rig_open_with(&rig, o, g->isa, g->activations);
    struct ep *of_node = g->tp > 1 ? rank_gather_object(&in_node, rig.k) : NULL,
              *of_all = rank_experts(&in_group, rig.m,
                                     g->narrow ? size * rig.m->config.moe.n_used : 0);
    rig.m->gather.arg = of_node;
    struct metrics *metrics = metrics_create();
    struct reader reader = { .m = rig.m };
    model_count_rows_on(rig.m, metrics);
    CHECK_OK(pthread_create(&reader.thread, NULL, read_on, &reader));
    model_set_ep(rig.m, of_all, NULL);
    g->logits[r->rank] = answer(&rig, r->node, g->n_nodes, &g->n_logits[r->rank]);
    CHECK_OK(rig.m->exchange_fault.code);
    atomic_store(&reader.ends, true);
    pthread_join(reader.thread, NULL);
    take_counts(g, r->rank, rig.m, metrics);
    ep_free(of_all);
    ep_free(of_node);
    rig_close(&rig);
    metrics_free(metrics);
    return NULL;
}

static void run_group(struct group *g)
{
    struct rank ranks[RANKS];
    const uint32_t size = g->n_nodes * g->tp;
    CHECK(size <= RANKS);
    rank_meeting_init(&g->all, size);
    for (uint32_t i = 0; i < g->n_nodes; i++) rank_meeting_init(&g->node[i], g->tp);
    for (uint32_t i = 0; i < size; i++) {
        ranks[i] = (struct rank){ .g = g, .rank = i, .node = i / g->tp, .tp_rank = i % g->tp };
        CHECK_OK(pthread_create(&ranks[i].thread, NULL, run_rank, &ranks[i]));
    }
    for (uint32_t i = 0; i < size; i++) pthread_join(ranks[i].thread, NULL);
    for (uint32_t i = 0; i < g->n_nodes; i++) rank_meeting_release(&g->node[i]);
    rank_meeting_release(&g->all);
}

/* ---- comparison ---- */

/* The answers of each node by a rank that has the whole. */
struct whole {
    float *logits[NODES_MAX];
    size_t n[NODES_MAX];
    uint64_t *chosen[NODES_MAX]; /* of a group of one rank */
    struct model_config config;
};

/* The rows that a rank with the whole model counts, which it does as a group of one. */
static uint64_t *count_alone(struct rig *r, uint32_t node)
{
    struct rank_meeting one;
    struct rank_seat seat = { &one, 0 };
    size_t n;
    uint64_t *chosen = read_chosen(r->m);
    CHECK_EQ_INT(sum_of(chosen, n_chosen(&r->m->config)), 0); /* without a group nothing is */
    mem_free(chosen);
    rank_meeting_init(&one, 1);
    struct ep *ep = rank_experts(&seat, r->m, 0);
    model_set_ep(r->m, ep, NULL);
    mem_free(answer(r, node, 0, &n));
    model_set_ep(r->m, NULL, NULL);
    ep_free(ep);
    rank_meeting_release(&one);
    return read_chosen(r->m);
}

static void answer_alone(struct whole *w, const struct group *g)
{
    for (uint32_t node = 0; node < NODES_MAX; node++) {
        struct rig r;
        rig_open_with(&r, g->o, g->isa, g->activations);
        w->logits[node] = answer(&r, node, 0, &w->n[node]);
        w->chosen[node] = count_alone(&r, node);
        w->config = r.m->config;
        rig_close(&r);
    }
}

/* What rows chose is what their experts computed, wherever they are. */
static void check_load(const struct group *g, const struct model_config *c)
{
    const uint32_t n_sparse = model_n_sparse(c, c->n_layers), n = c->moe.n_experts;
    for (uint32_t e = 0; e < n; e++) {
        uint64_t chosen = 0, load = 0;
        for (uint32_t r = 0; r < g->n_nodes * g->tp; r++) {
            for (uint32_t layer = 0; layer < n_sparse; layer++)
                chosen += g->chosen[r][layer * n + e];
            load += g->load[r][e];
        }
        CHECK_EQ_INT(load, chosen);
    }
    for (uint32_t r = 0; r < g->n_nodes * g->tp; r++)
        CHECK_EQ_INT(sum_of(g->load[r], n), g->computed[r]);
}

/* A node's ranks have counted its rows as one rank does, and what one sends another receives. */
static void check_counts(const struct whole *w, const struct group *g)
{
    const size_t n = n_chosen(&w->config);
    const uint32_t size = g->n_nodes * g->tp;
    for (uint32_t node = 0; node < g->n_nodes; node++)
        for (size_t i = 0; i < n; i++) {
            uint64_t chosen = 0;
            for (uint32_t r = node * g->tp; r < (node + 1) * g->tp; r++) chosen += g->chosen[r][i];
            CHECK_EQ_INT(chosen, w->chosen[node][i]);
        }
    check_load(g, &w->config);
    for (uint32_t r = 0; r < size; r++)
        CHECK_EQ_INT(sum_of(g->chosen[r], n) - g->sent[r] + g->received[r], g->computed[r]);
    CHECK_EQ_INT(sum_of(g->sent, size), sum_of(g->received, size));
    CHECK(sum_of(g->computed, size) > 0 && (size == 1) == (sum_of(g->sent, size) == 0));
}

static void check_group(const struct whole *w, struct group *g)
{
    const struct model_share s = { .tp_size = g->tp };
    if (model_share_check(&s, &w->config, NULL) != OK) return;
    g->n_experts = w->config.moe.n_experts;
    run_group(g);
    check_counts(w, g);
    for (uint32_t i = 0; i < g->n_nodes * g->tp; i++) {
        const uint32_t node = i / g->tp;
        CHECK_EQ_INT(g->n_logits[i], w->n[node]);
        if (memcmp(g->logits[i], w->logits[node], w->n[node] * sizeof(float)) != 0)
            test_fail(__FILE__, __LINE__, "%s on %s, %u nodes of %u: logits of rank %u differ",
                      g->o.path, g->isa, g->n_nodes, g->tp, i);
        mem_free(g->logits[i]);
        mem_free(g->chosen[i]);
        mem_free(g->load[i]);
    }
}

static const struct {
    uint32_t n_nodes, tp;
} SIZES[] = { { 1, 1 }, { 2, 1 }, { 3, 1 }, { 4, 1 }, { 1, 2 },
              { 2, 2 }, { 3, 2 }, { 1, 4 }, { 2, 4 } };

static void check_sizes(struct model_options o, const char *isa, enum activations activations,
                        bool narrow)
{
    struct group *g = MEM_NEW(struct group);
    struct whole w;
    g->o = o;
    g->isa = isa;
    g->activations = activations;
    g->narrow = narrow;
    answer_alone(&w, g);
    for (size_t i = 0; i < COUNT_OF(SIZES); i++) {
        g->n_nodes = SIZES[i].n_nodes;
        g->tp = SIZES[i].tp;
        check_group(&w, g);
    }
    for (uint32_t node = 0; node < NODES_MAX; node++) {
        mem_free(w.logits[node]);
        mem_free(w.chosen[node]);
    }
    mem_free(g);
}

static void check_shares_of(const char *name)
{
    const struct path p = golden(name, "model");
    const struct model_options o = { .path = p.text };
    check_sizes(o, "ref", ACTIVATIONS_F32, false);
    check_sizes(o, "auto", ACTIVATIONS_F32, false);
    check_sizes(o, "auto", ACTIVATIONS_FAST, true);
}

TEST(ranks_of_ernie_moe_have_the_logits_of_one) { check_shares_of("ernie_moe"); }
TEST(ranks_of_qwen3_moe_have_the_logits_of_one) { check_shares_of("qwen3_moe"); }
TEST(ranks_of_mixtral_have_the_logits_of_one) { check_shares_of("mixtral"); }
TEST(ranks_of_deepseek_v2_grouped_have_the_logits_of_one)
{
    check_shares_of("deepseek_v2_grouped");
}
TEST(ranks_of_deepseek_v3_have_the_logits_of_one) { check_shares_of("deepseek_v3"); }

TEST(ranks_that_quantise_have_the_logits_of_one)
{
    const struct path p = golden("ernie_moe_untied", "model");
    check_sizes((struct model_options){ .path = p.text, .quantize = QUANTIZE_WINT8 }, "auto",
                ACTIVATIONS_FAST, false);
    check_sizes((struct model_options){ .path = p.text, .quantize = QUANTIZE_WINT4 }, "auto",
                ACTIVATIONS_FAST, true);
}

TEST_MAIN(CASE_T(ranks_of_ernie_moe_have_the_logits_of_one, 240),
          CASE_T(ranks_of_qwen3_moe_have_the_logits_of_one, 240),
          CASE_T(ranks_of_mixtral_have_the_logits_of_one, 240),
          CASE_T(ranks_of_deepseek_v2_grouped_have_the_logits_of_one, 240),
          CASE_T(ranks_of_deepseek_v3_have_the_logits_of_one, 240),
          CASE_T(ranks_that_quantise_have_the_logits_of_one, 240))
