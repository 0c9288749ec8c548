/* bench_tp.c - a tensor-parallel node of two ranks with a thread each, beside one rank with two
 * threads: the limit, since both compute the same on the same cores. Goal: at least 0.9 of it.
 *
 *     bench_tp [ROUNDS]      default: 7
 *
 * The model is dense, has 16 heads and dummy weights. Rounds of both alternate, and the best one
 * counts, as others may be using the machine. Prompts: 8 of 128 tokens, one token each. Batch 16:
 * 16 sequences of 32 tokens each. Gathers: those of a step alone, by threads that compute nothing.
 * Thread: each engine has its own; events arrive by an atomic count. */
#include "tests/perf/bench_ranks.h"

enum {
    TP = 2,
    N_PROMPTS = 8,
    PROMPT = 128,
    BATCH = 16,
    N_OUT = 32,
    LAYERS = 6,
    HIDDEN = 2048,
    HEADS = 16,
    INTERMEDIATE = 5632,
    VOCAB = 16384,
    STEP_ROWS = 512,
    GATHER_STEPS = 20
};

static struct bench_rank whole, ranks[TP];
static struct rank_meeting meeting;
static char folder[24];

static void make_folder(void)
{
    char config[512];
    snprintf(config, sizeof config,
             "{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\","
             "\"hidden_size\":%d,\"num_hidden_layers\":%d,\"num_attention_heads\":%d,"
             "\"num_key_value_heads\":%d,\"intermediate_size\":%d,\"vocab_size\":%d,"
             "\"max_position_embeddings\":1024,\"rms_norm_eps\":1e-6,\"rope_theta\":10000.0,"
             "\"hidden_act\":\"silu\",\"tie_word_embeddings\":false}",
             HIDDEN, LAYERS, HEADS, HEADS / 2, INTERMEDIATE, VOCAB);
    bench_folder(folder, config);
}

static void on_node_bell(void *arg, uint64_t step)
{
    for (int i = 0; i < TP; i++)
        if (&ranks[i] != arg) engine_node_bell(ranks[i].engine, step);
}

static void *make_object(void *arg)
{
    struct bench_rank *r = arg;
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

/* ---- measuring ---- */

/* The gathers of a step's layers and head, of r->rows rows. */
static void *gather_steps(void *arg)
{
    static const size_t WIDTHS[] = { HIDDEN, HIDDEN, INTERMEDIATE, HIDDEN };
    struct bench_rank *r = arg;
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
        bench_on_all(ranks, TP, gather_steps);
        if (ranks[0].seconds < best) best = ranks[0].seconds;
    }
    return best;
}

static void measure(struct bench_rounds *b, int n, uint32_t n_prompt, uint32_t n_out)
{
    const struct bench_time one = bench_run(&whole, 1, n, n_prompt, n_out);
    bench_take(b, one, bench_run(ranks, 1, n, n_prompt, n_out));
}

static void print(const char *what, const struct bench_rounds *b, double tokens, double n_steps,
                  double gather)
{
    bench_print(what, "tp2", b, tokens);
    printf("          a step %.2f ms, of one rank %.2f, gathers alone %.2f\n",
           bench_best(b->ranks, b->n).wall * 1e3 / n_steps,
           bench_best(b->whole, b->n).wall * 1e3 / n_steps, gather * 1e3);
}

int main(int argc, char **argv)
{
    const int rounds = argc > 1 ? atoi(argv[1]) : 7;
    const struct bench_model model = { .path = folder,
                                       .dummy = true,
                                       .step_rows = STEP_ROWS,
                                       .max_seqs = BATCH,
                                       .n_blocks = 256,
                                       .on_node_bell = on_node_bell };
    struct bench_rounds prompts = { 0 }, batch = { 0 };
    make_folder();
    rank_meeting_init(&meeting, TP);
    whole.share = (struct model_share){ .tp_size = 1, .n_experts = SHARE_ALL_EXPERTS };
    bench_open(&whole, &model, TP);
    for (uint32_t i = 0; i < TP; i++) {
        ranks[i].share =
            (struct model_share){ .tp_rank = i, .tp_size = TP, .n_experts = SHARE_ALL_EXPERTS };
        ranks[i].seat = (struct rank_seat){ &meeting, i };
        bench_open(&ranks[i], &model, 1);
    }
    bench_on_all(ranks, TP, make_object);
    const double of_rows = gathers(STEP_ROWS, rounds), of_batch = gathers(BATCH, rounds);
    for (int i = 0; i < TP; i++) CHECK_OK(engine_set_node(ranks[i].engine, ranks[i].ep));
    for (int i = 0; i < rounds; i++) {
        measure(&prompts, N_PROMPTS, PROMPT, 1);
        measure(&batch, BATCH, 8, N_OUT);
    }
    print("prompts", &prompts, N_PROMPTS * PROMPT, (double)N_PROMPTS * PROMPT / STEP_ROWS, of_rows);
    print("batch 16", &batch, BATCH * (N_OUT - 1), N_OUT - 1, of_batch);
    for (int i = 0; i < TP; i++) engine_stop(ranks[i].engine);
    bench_close(&whole);
    for (int i = 0; i < TP; i++) bench_close(&ranks[i]);
    rank_meeting_release(&meeting);
    bench_folder_remove(folder);
    return 0;
}
