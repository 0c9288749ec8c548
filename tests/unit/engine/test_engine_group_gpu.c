/* test_engine_group_gpu.c - engines that share experts on a GPU, each a process: steps are captured
 * and scheduled one step ahead, and every request has the tokens and the bits of one engine that has
 * the whole model, also when the group is lost with steps in flight. */
#include "shared/base/clock.h"
#include "tests/unit/engine/gpu_ranks.h"

enum { SIZE = 2, N_REQUESTS = 4, N_OUT = 16, N_OUT_FEW = 10, N_LOSSES = 4 };
enum { N_OUT_FAST = 200, FAST_MS = 500 }; /* enough steps to lose, where they take no time */

static const char *the_model;
static bool a_host_samples; /* in the first rank's steps that have its first request */

static struct rig_options options(void)
{
    return (struct rig_options){ .isa = "cuda",
                                 .model = the_model,
                                 .max_batched_tokens = 12,
                                 .max_seqs = 4,
                                 .sampling_edit_bytes = a_host_samples };
}

enum { MOVED = 50 }; /* id of a prompt whose KV goes to a peer */

/* The group is lost while the prompt's layers leave. */
static void lose_on_kv(void *arg, uint64_t id, uint32_t layer, uint32_t begin, uint32_t end,
                       const int32_t *blocks, uint64_t event)
{
    struct rank *r = arg;
    (void)layer, (void)begin, (void)end, (void)blocks, (void)event;
    CHECK_EQ_INT(id, MOVED);
    engine_abort_group(r->rig.engine, 1);
}

static void open_this(struct rank *r, struct world *w, uint32_t n_experts)
{
    struct rig_options o = options();
    o.on_kv_ready = lose_on_kv;
    open_rank(r, w, 1, o, n_experts);
}

/* ---- requests ---- */

/* The first rank has most; the other is through early and has no rows from then on. */
static uint32_t make_requests(int rank, uint32_t n_out, struct engine_request *reqs)
{
    static const uint32_t lengths[N_REQUESTS] = { 21, 3, 16, 9 };
    static const struct logit_bias nothing = { 0, 0 };
    const uint32_t n = rank == 0 ? 3 : 1;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t k = rank == 0 ? i : 3;
        reqs[i] = rig_request(1 + k, lengths[k], 700 + k, rank == 0 ? n_out : n_out / 3);
        if (k == 0 && a_host_samples) { /* there is no room for what changes nothing */
            reqs[i].sampling.bias = &nothing;
            reqs[i].sampling.n_bias = 1;
            reqs[i].sampling.max_tokens = N_OUT / 2;
        }
        if (k % 2 == 0) continue;
        reqs[i].sampling.temperature = 0.9f;
        if (!a_host_samples) reqs[i].sampling.repetition_penalty = 1.1f; /* takes room, too */
    }
    return n;
}

/* took_ns: for the answers alone. */
static struct answer *answers_alone(const struct engine_request *reqs, uint32_t n,
                                    uint32_t *n_experts, uint64_t *took_ns)
{
    struct rig r;
    rig_open(&r, options());
    const uint64_t begin = clock_ns();
    struct answer *want = rig_run(&r, reqs, n);
    *took_ns = clock_ns() - begin;
    *n_experts = r.model->config.moe.n_experts;
    rig_close(&r);
    return want;
}

static void check_answers(const struct answer *got, const struct answer *want, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        CHECK_OK(got[i].end.status);
        check_same(&got[i], &want[i]);
    }
}

/* ---- tests ---- */

static void rank_ahead(struct world *w)
{
    struct engine_request reqs[N_REQUESTS];
    uint32_t n_experts;
    uint64_t took_ns;
    struct rank r;
    need_gpu();
    const uint32_t n = make_requests(w->rank, N_OUT, reqs);
    struct answer *want = answers_alone(reqs, n, &n_experts, &took_ns);
    open_this(&r, w, n_experts);
    struct answer *got = rig_run(&r.rig, reqs, n);
    check_answers(got, want, n);
    CHECK_EQ_INT(atomic_load(&r.n_lost), 0);
    CHECK(rig_count(&r.rig, "baton_engine_steps_ahead_total") > 0);
    CHECK(rig_count(&r.rig, "baton_engine_steps_recorded_total") > 0);
    CHECK((rig_count(&r.rig, "baton_engine_steps_host_sampled_total") > 0) ==
          (a_host_samples && w->rank == 0));
    close_rank(&r);
    mem_free(want);
    mem_free(got);
}

static bool await_losses(struct rank *r, int want, int wait_ms)
{
    return await_count(&r->n_lost, want, wait_ms);
}

/* Waits for some steps of the group, which go on. */
static void await_steps(struct rank *r)
{
    const uint64_t enough = rig_count(&r->rig, "baton_engine_steps_total") + 3;
    for (int ms = 0; rig_count(&r->rig, "baton_engine_steps_total") < enough; ms++) {
        if (ms == RIG_WAIT_MS) test_fail(__FILE__, __LINE__, "the group does not step");
        usleep(1000);
    }
}

/* The ranks give the group up one after the other in the middle of steps, and go on in the next. */
static void rank_lost(struct world *w)
{
    const int n_losses = test_runs_long() ? N_LOSSES : SIZE; /* each rank is first at least once */
    struct engine_request reqs[N_REQUESTS];
    uint32_t n_experts;
    uint64_t took_ns;
    struct rank r;
    need_gpu();
    uint32_t n = make_requests(w->rank, test_runs_long() ? N_OUT : N_OUT_FEW, reqs);
    struct answer *want = answers_alone(reqs, n, &n_experts, &took_ns),
                  *got = MEM_ARRAY(struct answer, n);
    if (took_ns < FAST_MS * 1000000ull) {
        mem_free(want);
        n = make_requests(w->rank, N_OUT_FAST, reqs);
        want = answers_alone(reqs, n, &n_experts, &took_ns);
    }
    open_this(&r, w, n_experts);
    for (uint32_t i = 0; i < n; i++) {
        got[i].id = reqs[i].id;
        CHECK_OK(engine_submit(r.rig.engine, &reqs[i]));
    }
    for (int round = 1; round <= n_losses; round++) {
        await_steps(&r);
        if (w->rank != round % SIZE) (void)await_losses(&r, round, 300);
        engine_abort_group(r.rig.engine, r.epoch);
        CHECK(await_losses(&r, round, RIG_WAIT_MS));
        join(&r);
    }
    rig_gather(&r.rig, got, n);
    check_answers(got, want, n);
    const uint64_t abandoned = rig_count(&r.rig, "baton_engine_steps_abandoned_total");
    printf("    rank %d: %llu steps of %d groups given up\n", w->rank,
           (unsigned long long)abandoned, n_losses);
    CHECK(abandoned > 0 && abandoned <= 2 * (uint64_t)n_losses);
    rig_await_free_blocks(&r.rig, RIG_BLOCKS_MAX);
    for (uint32_t i = 0; i < n; i++) reqs[i].id += 100; /* of blocks that were published */
    struct answer *again = rig_run(&r.rig, reqs, n);
    check_answers(again, want, n);
    close_rank(&r);
    mem_free(want);
    mem_free(got);
    mem_free(again);
}

/* A prompt of which layers have left ends, and other rows of its step are computed again. */
static void rank_of_moved_prompt(struct world *w)
{
    struct engine_request reqs[N_REQUESTS + 1];
    uint32_t n_experts;
    uint64_t took_ns;
    struct rank r;
    need_gpu();
    const uint32_t n = make_requests(w->rank, N_OUT, reqs), n_all = w->rank == 0 ? n + 1 : n;
    struct answer *want = answers_alone(reqs, n, &n_experts, &took_ns),
                  *got = MEM_ARRAY(struct answer, n_all);
    open_this(&r, w, n_experts);
    reqs[n] = rig_request(MOVED, 7, 800, 1);
    reqs[n].prefill_only = true;
    for (uint32_t i = 0; i < n_all; i++) {
        got[i].id = reqs[i].id;
        CHECK_OK(engine_submit(r.rig.engine, &reqs[i]));
    }
    while (w->rank > 0 && !atomic_load(&r.bells->moved)) usleep(1000);
    if (w->rank > 0) engine_abort_group(r.rig.engine, r.epoch);
    CHECK(await_losses(&r, 1, RIG_WAIT_MS));
    atomic_store(&r.bells->moved, true);
    join(&r);
    rig_gather(&r.rig, got, n_all);
    check_answers(got, want, n);
    if (w->rank == 0) CHECK_STATUS(got[n].end.status, ERR_PEER_LOST);
    if (w->rank == 0) CHECK_OK(engine_release(r.rig.engine, MOVED));
    rig_await_free_blocks(&r.rig, RIG_BLOCKS_MAX);
    close_rank(&r);
    mem_free(want);
    mem_free(got);
}

static struct answer *of_two; /* the first rank's answers of two ranks, in memory of all */

/* Rows that travel as less than f32 give answers near those of one rank, and the same for every
 * number of ranks above one. */
static void rank_of_narrow_rows(struct world *w)
{
    struct engine_request reqs[N_REQUESTS];
    uint32_t n_experts;
    uint64_t took_ns;
    struct rank r;
    need_gpu();
    const uint32_t n = make_requests(w->rank, TEST_IS_SANITIZED ? 4 : N_OUT_FEW, reqs);
    struct answer *alone = answers_alone(reqs, n, &n_experts, &took_ns);
    open_this(&r, w, n_experts);
    struct answer *got = rig_run(&r.rig, reqs, n);
    for (uint32_t i = 0; i < n; i++) {
        CHECK_OK(got[i].end.status);
        if (reqs[i].sampling.temperature == 0)
            CHECK_NEAR(got[i].out[0].logprob, alone[i].out[0].logprob, 0.25);
    }
    CHECK(rig_count(&r.rig, "baton_engine_steps_recorded_total") > 0);
    if (w->rank == 0 && w->size == SIZE) memcpy(of_two, got, n * sizeof *got);
    if (w->rank == 0 && w->size > SIZE) check_answers(got, of_two, n);
    close_rank(&r);
    mem_free(alone);
    mem_free(got);
}

static void run(const char *model, void (*rank)(struct world *w))
{
    the_model = model;
    run_gpu_ranks(SIZE, rank);
}

static void run_long(const char *model, void (*rank)(struct world *w))
{
    if (!test_runs_long()) SKIP("takes long under a sanitizer; tests/run.sh --all runs it");
    run(model, rank);
}

TEST(ranks_step_ahead_by_captured_steps) { run_long("ernie_moe", rank_ahead); }
static void run_narrow(enum dtype rows)
{
    the_rows = rows;
    of_two = mmap(NULL, N_REQUESTS * sizeof *of_two, PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(of_two != MAP_FAILED);
    run("ernie_moe", rank_of_narrow_rows);
    run_gpu_ranks(SIZE + 1, rank_of_narrow_rows);
    munmap(of_two, N_REQUESTS * sizeof *of_two);
}

TEST(ranks_whose_rows_travel_as_bf16)
{
    if (!test_runs_long()) SKIP("takes long under a sanitizer; tests/run.sh --all runs it");
    run_narrow(DTYPE_BF16);
}
TEST(ranks_whose_rows_travel_as_e4m3) { run_narrow(DTYPE_F8_E4M3); }
TEST(ranks_with_latents_step_ahead) { run_long("deepseek_v3", rank_ahead); }
TEST(ranks_of_which_a_host_samples)
{
    a_host_samples = true;
    run_long("ernie_moe", rank_ahead);
}
TEST(a_group_is_lost_with_a_prompt_whose_layers_leave)
{
    run_long("ernie_moe", rank_of_moved_prompt);
}
TEST(a_group_is_lost_with_steps_in_flight) { run("ernie_moe", rank_lost); }

TEST_MAIN(CASE_T(ranks_step_ahead_by_captured_steps, 300),
          CASE_T(ranks_whose_rows_travel_as_bf16, 300),
          CASE_T(ranks_whose_rows_travel_as_e4m3, 300), CASE_T(ranks_with_latents_step_ahead, 120),
          CASE_T(ranks_of_which_a_host_samples, 300),
          CASE_T(a_group_is_lost_with_a_prompt_whose_layers_leave, 300),
          CASE_T(a_group_is_lost_with_steps_in_flight, 300))
