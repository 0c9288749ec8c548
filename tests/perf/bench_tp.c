/* bench_tp.c - a tensor-parallel node of two ranks with a thread each, beside one rank with two
 * threads: the limit, since both compute the same on the same cores.
 *
 *     bench_tp [ROUNDS]      default: 7
 *
 * The model is dense, has 16 heads and dummy weights. Rounds of both alternate, and the best one
 * counts, as others may be using the machine. Prompts: 8 of 256 tokens, one token each. Batch 16:
 * 16 sequences of 64 tokens each. Gathers: those of a step alone, by threads that compute nothing.
 * Thread: each engine has its own; events arrive by an atomic count. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "shared/base/clock.h"
#include "shared/base/mem.h"
#include "shared/engine/engine.h"
#include "tests/fixtures/rank_meeting.h"

enum {
    TP = 2,
    N_PROMPTS = 8,
    PROMPT = 256,
    BATCH = 16,
    N_OUT = 64,
    LAYERS = 6,
    HIDDEN = 2048,
    HEADS = 16,
    INTERMEDIATE = 5632,
    VOCAB = 16384,
    STEP_ROWS = 512,
    GATHER_STEPS = 50
};

struct rank {
    struct kernel_ctx *kernels;
    struct engine *engine;
    struct metrics *metrics;
    struct model_share share;
    struct rank_seat seat;
    struct ep *ep;
    pthread_t thread;
    size_t rows; /* of gather_steps */
    double seconds;
};

static struct rank whole, ranks[TP];
static struct rank_meeting meeting;
static char folder[] = "/tmp/bench_tp_XXXXXX";
static atomic_int n_finished;
static atomic_ullong first_ns; /* when the first token came */

static void write_config(void)
{
    char path[64];
    if (!mkdtemp(folder)) test_fail(__FILE__, __LINE__, "no folder for the model's configuration");
    snprintf(path, sizeof path, "%s/config.json", folder);
    FILE *f = fopen(path, "w");
    CHECK(f != NULL);
    fprintf(f,
            "{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\","
            "\"hidden_size\":%d,\"num_hidden_layers\":%d,\"num_attention_heads\":%d,"
            "\"num_key_value_heads\":%d,\"intermediate_size\":%d,\"vocab_size\":%d,"
            "\"max_position_embeddings\":1024,\"rms_norm_eps\":1e-6,\"rope_theta\":10000.0,"
            "\"hidden_act\":\"silu\",\"tie_word_embeddings\":false}",
            HIDDEN, LAYERS, HEADS, HEADS / 2, INTERMEDIATE, VOCAB);
    CHECK(fclose(f) == 0);
}

static void on_event(void *arg, const struct engine_event *ev)
{
    unsigned long long none = 0;
    (void)arg;
    if (ev->kind == ENGINE_TOKEN) atomic_compare_exchange_strong(&first_ns, &none, clock_ns());
    if (ev->kind == ENGINE_FINISHED) atomic_fetch_add(&n_finished, 1);
}

static void on_fault(void *arg, const struct err *err)
{
    (void)arg;
    test_fail(__FILE__, __LINE__, "%s", err->text);
}

static void on_node_bell(void *arg, uint64_t step)
{
    for (int i = 0; i < TP; i++)
        if (&ranks[i] != arg) engine_node_bell(ranks[i].engine, step);
}

static void open_rank(struct rank *r, int n_threads)
{
    struct err err = { 0 };
    struct model *m;
    CHECK_OK(kernel_ctx_create(kernel_options_default("auto", ACTIVATIONS_FAST, n_threads),
                               &r->kernels, &err));
    const struct model_options mo = { .path = folder,
                                      .dummy = true,
                                      .max_rows = STEP_ROWS,
                                      .max_logits = engine_max_logits(BATCH),
                                      .kernels = r->kernels,
                                      .share = &r->share };
    if (model_load(&mo, &m, &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
    r->metrics = metrics_create();
    const struct engine_options eo = { .model = m,
                                       .block_tokens = 64,
                                       .n_blocks = 256,
                                       .max_seqs = BATCH,
                                       .max_batched_tokens = STEP_ROWS,
                                       .max_waiting = 64,
                                       .metrics = r->metrics,
                                       .on_event = on_event,
                                       .on_fault = on_fault,
                                       .on_node_bell = on_node_bell,
                                       .follows = r->share.tp_rank > 0,
                                       .arg = r };
    if (engine_create(&eo, &r->engine, &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
}

static void *make_object(void *arg)
{
    struct rank *r = arg;
    struct ep_config c = { .backend = "shm",
                           .device = r->kernels->device,
                           .rank = (int32_t)r->seat.rank,
                           .size = TP,
                           .timeout_ms = RANK_WAIT_MS,
                           .exchange = rank_exchange,
                           .exchange_arg = &r->seat };
    engine_node_needs(r->engine, &c);
    c.progress = NULL;
    CHECK_OK(ep_create(&c, &r->ep, NULL));
    return NULL;
}

static void on_both(void *(*f)(void *))
{
    for (int i = 0; i < TP; i++) CHECK(pthread_create(&ranks[i].thread, NULL, f, &ranks[i]) == 0);
    for (int i = 0; i < TP; i++) CHECK(pthread_join(ranks[i].thread, NULL) == 0);
}

/* ---- measuring ---- */

/* Runs n sequences; returns the seconds from the first token, or if there is one each, from the
 * beginning, to the last. */
static double run(struct engine *e, int n, uint32_t n_prompt, uint32_t n_out)
{
    int32_t tokens[PROMPT];
    atomic_store(&n_finished, 0);
    atomic_store(&first_ns, 0);
    const uint64_t begin_ns = clock_ns();
    for (int i = 0; i < n; i++) {
        for (uint32_t t = 0; t < n_prompt; t++) tokens[t] = (int32_t)(i * 131 + t * 7919) % VOCAB;
        const struct engine_request q = {
            .id = (uint64_t)i + 1,
            .tokens = tokens,
            .n_tokens = n_prompt,
            .n_prompt = n_prompt,
            .sampling = { .top_p = 1,
                          .repetition_penalty = 1,
                          .max_tokens = n_out,
                          .ignore_eos = true,
                          .n_logprobs = -1 },
        };
        CHECK_OK(engine_submit(e, &q));
    }
    while (atomic_load(&n_finished) < n) usleep(200);
    const uint64_t from = n_out > 1 ? atomic_load(&first_ns) : begin_ns;
    return (double)(clock_ns() - from) * 1e-9;
}

/* The gathers of a step's layers and head, of r->rows rows. */
static void *gather_steps(void *arg)
{
    static const size_t WIDTHS[] = { HIDDEN, HIDDEN, INTERMEDIATE, HIDDEN };
    struct rank *r = arg;
    float *y = MEM_ARRAY(float, r->rows *INTERMEDIATE + (size_t)BATCH * VOCAB);
    const uint64_t t0 = clock_ns();
    for (int i = 0; i < GATHER_STEPS * LAYERS; i++)
        for (int j = 0; j < 4; j++) {
            const size_t w = WIDTHS[j], first[TP + 1] = { 0, w / 2, w };
            CHECK_OK(
                ep_gather_columns(r->ep, y, w, y + first[r->seat.rank], w, r->rows, first, NULL));
        }
    for (int i = 0; i < GATHER_STEPS; i++) {
        const size_t first[TP + 1] = { 0, VOCAB / 2, VOCAB }, n = r->rows < BATCH ? r->rows : BATCH;
        CHECK_OK(
            ep_gather_columns(r->ep, y, VOCAB, y + first[r->seat.rank], VOCAB, n, first, NULL));
    }
    r->seconds = (double)(clock_ns() - t0) * 1e-9 / GATHER_STEPS;
    mem_free(y);
    return NULL;
}

static double gathers(size_t rows, int rounds)
{
    double best = 1e9;
    for (int i = 0; i < rounds; i++) {
        for (int r = 0; r < TP; r++) ranks[r].rows = rows;
        on_both(gather_steps);
        if (ranks[0].seconds < best) best = ranks[0].seconds;
    }
    return best;
}

struct best {
    double whole, node; /* seconds */
};

static void measure(struct best *b, int n, uint32_t n_prompt, uint32_t n_out)
{
    const double one = run(whole.engine, n, n_prompt, n_out),
                 two = run(ranks[0].engine, n, n_prompt, n_out);
    if (b->whole == 0 || one < b->whole) b->whole = one;
    if (b->node == 0 || two < b->node) b->node = two;
}

static void print(const char *what, const struct best *b, double tokens, double n_steps,
                  double gather)
{
    const double steps_ms = b->node * 1e3 / n_steps, of_one_ms = b->whole * 1e3 / n_steps;
    printf(
        "%-9s tp2 %8.1f tokens/s   one rank %8.1f tokens/s   ratio %.3f   a step %.2f ms, of one "
        "rank %.2f, gathers alone %.2f\n",
        what, tokens / b->node, tokens / b->whole, b->whole / b->node, steps_ms, of_one_ms,
        gather * 1e3);
}

int main(int argc, char **argv)
{
    const int rounds = argc > 1 ? atoi(argv[1]) : 7;
    struct best prompts = { 0 }, batch = { 0 };
    write_config();
    rank_meeting_init(&meeting, TP);
    whole.share = (struct model_share){ .tp_size = 1, .n_experts = SHARE_ALL_EXPERTS };
    open_rank(&whole, TP);
    for (uint32_t i = 0; i < TP; i++) {
        ranks[i].share =
            (struct model_share){ .tp_rank = i, .tp_size = TP, .n_experts = SHARE_ALL_EXPERTS };
        ranks[i].seat = (struct rank_seat){ &meeting, i };
        open_rank(&ranks[i], 1);
    }
    on_both(make_object);
    const double of_rows = gathers(STEP_ROWS, rounds), of_batch = gathers(BATCH, rounds);
    for (int i = 0; i < TP; i++) CHECK_OK(engine_set_node(ranks[i].engine, ranks[i].ep));
    for (int i = 0; i < rounds; i++) {
        measure(&prompts, N_PROMPTS, PROMPT, 1);
        measure(&batch, BATCH, 8, N_OUT);
    }
    print("prompts", &prompts, N_PROMPTS * PROMPT, (double)N_PROMPTS * PROMPT / STEP_ROWS, of_rows);
    print("batch 16", &batch, BATCH * (N_OUT - 1), N_OUT - 1, of_batch);
    for (int i = 0; i < TP; i++) engine_stop(ranks[i].engine);
    struct rank *all[] = { &whole, &ranks[0], &ranks[1] };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        engine_free(all[i]->engine);
        kernel_ctx_free(all[i]->kernels);
        metrics_free(all[i]->metrics);
    }
    rank_meeting_release(&meeting);
    return 0;
}
