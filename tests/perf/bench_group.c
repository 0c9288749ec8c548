/* bench_group.c - ranks that share the experts of a model, beside one rank that has them all.
 *
 *     bench_group MODEL [ROUNDS]     two ranks with a thread each, beside one with two threads: the
 *                                    limit, as both compute the same on the same cores. Goal: 0.9
 *     bench_group steps [ROUNDS]     a step of 64 rows by 1, 2, .. 64 ranks, in its parts
 *
 * Prompts: 8 of 128 tokens. Batch 16: 16 sequences of 32 tokens. Ranks get them in turn; their
 * steps have together as many rows as those of the one. Then the same with experts placed by load.
 * Parts of a step: meetings, one of the step and three of each layer, and bytes, what a layer's
 * exchange takes beyond them, measured by the ranks' threads alone; the fixed part is the rest:
 * what ranks compute, each its own attention included. Thread: as bench_ranks.h. */
#include "kernels/ep/balance.h"
#include "shared/model/expert_rows.h"
#include "shared/model/experts.h"
#include "tests/perf/bench_ranks.h"

enum {
    EP = 2,
    N_PROMPTS = 8,
    PROMPT = 128,
    BATCH = 16,
    N_OUT = 32,
    STEP_ROWS = 512,
    /* of the model for steps */
    ROWS = 64,
    LAYERS = 4,
    HIDDEN = 512,
    EXPERTS = 64,
    USED = 8,
    VOCAB = 2048,
    MEETINGS = 100,
    EXCHANGES = 20,
    LAYER_MEETINGS = 3
};

static struct rank_meeting meeting;
static struct bench_rank whole, ranks[MEETING_RANKS];
static int n_ranks;
static atomic_bool is_ending; /* ranks leave in turn, and those that step lose them */

static void on_group(void *arg, const struct engine_group_event *ev)
{
    const struct bench_rank *from = arg;
    if (ev->kind == ENGINE_GROUP_LOST && !atomic_load(&is_ending))
        test_fail(__FILE__, __LINE__, "%s", ev->why->text);
    if (ev->kind != ENGINE_GROUP_BELL) return;
    for (int i = 0; i < n_ranks; i++)
        if (&ranks[i] != from) engine_bell(ranks[i].engine, ev->epoch, ev->step);
}

static void open_whole(struct bench_model b, int n_threads)
{
    b.on_group = NULL;
    whole.share = (struct model_share){ .tp_size = 1, .n_experts = SHARE_ALL_EXPERTS };
    bench_open(&whole, &b, n_threads);
}

static void *make_object(void *arg)
{
    struct bench_rank *r = arg;
    r->ep = rank_experts(&r->seat, engine_model(r->engine), 0);
    return NULL;
}

static void open_ranks(const struct bench_model *b, int n)
{
    const uint32_t n_experts = engine_model(whole.engine)->config.moe.n_experts;
    n_ranks = n;
    atomic_store(&is_ending, false);
    rank_meeting_init(&meeting, (uint32_t)n);
    for (uint32_t i = 0; i < (uint32_t)n; i++) {
        ranks[i] = (struct bench_rank){ .share = rank_share(i, (uint32_t)n, 1, n_experts),
                                        .seat = { &meeting, i } };
        bench_open(&ranks[i], b, 1);
    }
    bench_on_all(ranks, n, make_object);
}

static void join(uint64_t epoch)
{
    for (int i = 0; i < n_ranks; i++)
        CHECK_OK(engine_join_group(ranks[i].engine, ranks[i].ep, ranks[i].experts, epoch));
}

static void close_ranks(void)
{
    atomic_store(&is_ending, true);
    for (int i = 0; i < n_ranks; i++) engine_stop(ranks[i].engine);
    for (int i = 0; i < n_ranks; i++) bench_close(&ranks[i]);
    rank_meeting_release(&meeting);
}

/* ---- two ranks ---- */

static void measure(struct bench_rounds *b, int n, uint32_t n_prompt, uint32_t n_out)
{
    const struct bench_time one = bench_run(&whole, 1, n, n_prompt, n_out);
    bench_take(b, one, bench_run(ranks, n_ranks, n, n_prompt, n_out));
}

static struct balance_out placed; /* by the rows of the rounds before */

/* Chooses it. What says how much there is to gain: the rows of the busier rank by the mean, over
 * all layers, which EP cannot do better than. */
static void place_by_load(void)
{
    const struct model_config *c = &engine_model(ranks[0].engine)->config;
    const int32_t n_layers = (int32_t)model_n_sparse(c, c->n_layers),
                  n_experts = (int32_t)c->moe.n_experts;
    const size_t n = (size_t)n_layers * (size_t)n_experts;
    uint64_t *load = MEM_ARRAY(uint64_t, n), *of_rank = MEM_ARRAY(uint64_t, n);
    for (int r = 0; r < EP; r++) {
        model_expert_rows(engine_model(ranks[r].engine), of_rank);
        for (size_t i = 0; i < n; i++) load[i] += of_rank[i];
    }
    struct balance_out even = balance_even(n_experts, EP, 0);
    placed = balance_eplb(load, n_layers, n_experts, EP, 1, 1, 0);
    double was = 0, is = 0;
    for (int32_t i = 0; i < n_layers; i++) { /* all have as many rows */
        was += balance_imbalance(&even, load + i * n_experts, 0) / n_layers;
        is += balance_imbalance(&placed, load, i) / n_layers;
    }
    printf("rows of the busier rank by the mean %.2f; experts placed by them %.2f\n", was, is);
    balance_release(&even);
    mem_free(load);
    mem_free(of_rank);
}

static void *make_placed_object(void *arg)
{
    struct bench_rank *r = arg;
    struct model *m = engine_model(r->engine);
    const struct ep_placement at = balance_placement(&placed);
    const int32_t first = at.first[r->seat.rank], n = at.first[r->seat.rank + 1] - first;
    int32_t *logical = MEM_ARRAY(int32_t, (size_t)(at.n_maps * n));
    for (int32_t i = 0; i < at.n_maps; i++)
        memcpy(logical + i * n, at.logical + i * at.n_physical + first,
               (size_t)n * sizeof *logical);
    r->ep = rank_experts_at(&r->seat, m, 0, &at);
    CHECK_OK(model_experts_take(m, &(struct experts_wanted){ logical, at.n_maps, n, NULL, NULL },
                                &r->experts, NULL));
    mem_free(logical);
    return NULL;
}

static void compare(int rounds)
{
    struct bench_rounds prompts = { 0 }, batch = { 0 };
    for (int i = 0; i < rounds; i++) {
        measure(&prompts, N_PROMPTS, PROMPT, 1);
        measure(&batch, BATCH, 8, N_OUT);
    }
    bench_print("prompts", "ep2", &prompts, N_PROMPTS * PROMPT);
    bench_print("batch 16", "ep2", &batch, BATCH * (N_OUT - 1));
}

static void two_ranks(const char *path, int rounds)
{
    struct bench_model model = { .path = path,
                                 .step_rows = STEP_ROWS,
                                 .max_seqs = BATCH,
                                 .n_blocks = 128,
                                 .on_group = on_group };
    open_whole(model, EP);
    model.step_rows = STEP_ROWS / EP;
    open_ranks(&model, EP);
    join(1);
    compare(rounds);
    place_by_load();
    bench_on_all(ranks, EP, make_placed_object);
    join(2);
    compare(rounds);
    close_ranks();
    balance_release(&placed);
}

/* ---- a step in its parts ---- */

static void *meet(void *arg)
{
    struct bench_rank *r = arg;
    struct engine_group_words {
        uint64_t words[ENGINE_GROUP_BYTES / 8];
    } mine = { { 1 } };
    struct engine_group_words all[MEETING_RANKS];
    const uint64_t t0 = clock_ns();
    for (int i = 0; i < MEETINGS; i++)
        CHECK_OK(ep_all_gather(r->ep, all, &mine, sizeof mine, NULL));
    r->seconds = (double)(clock_ns() - t0) * 1e-9 / MEETINGS;
    return NULL;
}

/* Exchanges of layers whose experts compute nothing: row i of all ranks chooses experts i, i + 1
 * and so on, eight apart. */
static void *exchange(void *arg)
{
    struct bench_rank *r = arg;
    const struct ep_places p = ep_places(r->ep);
    const size_t n = ROWS / (size_t)n_ranks, first = n * r->seat.rank;
    float *y = MEM_ARRAY(float, n *HIDDEN), *weights = MEM_ARRAY(float, n *USED);
    int32_t *experts = MEM_ARRAY(int32_t, n * USED);
    for (size_t i = 0; i < n * USED; i++)
        experts[i] = (int32_t)((first + i / USED + i % USED * (EXPERTS / USED)) % EXPERTS);
    const struct ep_combine_args sum = {
        .out = p.results, .weights = weights, .y = y, .add = true
    };
    CHECK(p.rows && p.results);
    const uint64_t t0 = clock_ns();
    for (int i = 0; i < EXCHANGES; i++) {
        struct ep_counts counts;
        struct ep_batch in;
        CHECK_OK(ep_plan(r->ep, &(struct ep_rows){ .experts = experts, .n = n }, &counts, NULL));
        CHECK_OK(ep_dispatch(r->ep, p.rows, HIDDEN, &in, NULL));
        CHECK_OK(ep_combine(r->ep, &sum, NULL));
    }
    r->seconds = (double)(clock_ns() - t0) * 1e-9 / EXCHANGES;
    mem_free(y);
    mem_free(weights);
    mem_free(experts);
    return NULL;
}

struct parts {
    double step, meeting, exchange; /* seconds, the least of all rounds */
};

static double all_ranks(void *(*f)(void *))
{
    bench_on_all(ranks, n_ranks, f);
    return ranks[0].seconds;
}

static void print_parts(int n, const struct parts *p)
{
    const int n_meetings = n > 1 ? 1 + LAYERS * LAYER_MEETINGS : 0;
    const double meetings = n_meetings * p->meeting,
                 bytes = LAYERS * fmax(p->exchange - LAYER_MEETINGS * p->meeting, 0),
                 moved = 2.0 * LAYERS * ROWS * USED * HIDDEN * sizeof(float) * (n - 1) / n;
    printf("%5d %9.2f %11.2f %9.2f = %2d x %6.1f us %9.2f for %3.1f MB\n", n, p->step * 1e3,
           (p->step - meetings - bytes) * 1e3, meetings * 1e3, n_meetings, p->meeting * 1e6,
           bytes * 1e3, moved * 1e-6);
    fflush(stdout);
}

static double step_of(struct bench_rank *r, int n) { return bench_run(r, n, ROWS, 8, N_OUT).step; }

static void measure_parts(const struct bench_model *b, int n, int rounds)
{
    struct parts p = { INFINITY, INFINITY, INFINITY };
    open_ranks(b, n);
    for (int i = 0; i < rounds; i++) {
        p.meeting = fmin(p.meeting, all_ranks(meet));
        p.exchange = fmin(p.exchange, all_ranks(exchange));
    }
    join(1);
    for (int i = 0; i < rounds; i++) p.step = fmin(p.step, step_of(ranks, n));
    print_parts(n, &p);
    close_ranks();
}

static void steps(int rounds)
{
    char config[640], folder[24];
    struct bench_model model = { .path = folder,
                                 .dummy = true,
                                 .step_rows = STEP_ROWS,
                                 .max_seqs = ROWS,
                                 .n_blocks = 4 * ROWS,
                                 .on_group = on_group };
    snprintf(
        config, sizeof config,
        "{\"architectures\":[\"Qwen3MoeForCausalLM\"],\"model_type\":\"qwen3_moe\","
        "\"hidden_size\":%d,\"num_hidden_layers\":%d,\"num_attention_heads\":8,\"head_dim\":64,"
        "\"num_key_value_heads\":2,\"intermediate_size\":1024,\"moe_intermediate_size\":256,"
        "\"num_experts\":%d,\"num_experts_per_tok\":%d,\"norm_topk_prob\":true,"
        "\"decoder_sparse_step\":1,\"mlp_only_layers\":[],\"vocab_size\":%d,"
        "\"max_position_embeddings\":1024,\"rms_norm_eps\":1e-6,\"rope_theta\":10000.0,"
        "\"hidden_act\":\"silu\",\"tie_word_embeddings\":false}",
        HIDDEN, LAYERS, EXPERTS, USED, VOCAB);
    bench_folder(folder, config);
    open_whole(model, 2);
    printf("ms of a step of %d rows, %d layers, %d of %d experts; one rank has two threads\n"
           "ranks      step  fixed part  meetings                     bytes\n",
           ROWS, LAYERS, USED, EXPERTS);
    struct parts one = { .step = INFINITY };
    for (int i = 0; i < rounds; i++) one.step = fmin(one.step, step_of(&whole, 1));
    print_parts(1, &one);
    for (int n = 2; n <= MEETING_RANKS; n *= 2) {
        model.step_rows = (uint32_t)(STEP_ROWS / n);
        model.max_seqs = (uint32_t)(ROWS / n);
        model.n_blocks = 4 * model.max_seqs;
        measure_parts(&model, n, rounds);
    }
    bench_folder_remove(folder);
}

int main(int argc, char **argv)
{
    const int rounds = argc > 2 ? atoi(argv[2]) : 7;
    if (argc < 2) {
        fprintf(stderr, "usage: bench_group MODEL|steps [ROUNDS]\n");
        return 2;
    }
    if (strcmp(argv[1], "steps") == 0) steps(rounds);
    else two_ranks(argv[1], rounds);
    engine_stop(whole.engine);
    bench_close(&whole);
    return 0;
}
