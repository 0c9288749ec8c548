/* test_engine_group_gpu.c - engines that share experts on a GPU, each a process: steps are captured
 * and scheduled one step ahead, and every request has the tokens and the bits of one engine that has
 * the whole model, also when the group is lost with steps in flight. */
#include "kernels/backend.h"
#include "tests/conformance/ep_fixture.h"
#include "tests/fixtures/rank_meeting.h"
#include "tests/unit/engine/engine_rig.h"

enum { SIZE = 2, N_REQUESTS = 4, N_OUT = 16, N_LOSSES = 4 };
static const char WHY[] = "no CUDA device, or a build without";

/* ---- a rank ---- */

struct rank {
    struct rig rig; /* first: the callbacks' arg */
    struct world *w;
    struct bells *bells;
    struct model_share share;
    uint64_t epoch;
    pthread_t listener;
    atomic_bool ends;
    atomic_int n_lost;
};

/* In memory of all ranks. */
struct bells {
    _Atomic uint64_t of[SIZE]; /* the latest of each: epoch << 32 | step */
    atomic_bool moved;         /* the first rank has lost the group with a prompt's layers */
};

static const char *the_model;
static bool a_host_samples; /* in the first rank's steps that have its first request */
static struct bells *the_bells;

static void on_group(void *arg, const struct engine_group_event *ev)
{
    struct rank *r = arg;
    if (ev->kind == ENGINE_GROUP_LOST) atomic_fetch_add(&r->n_lost, 1);
    if (ev->kind == ENGINE_GROUP_BELL)
        atomic_store(&r->bells->of[r->w->rank], ev->epoch << 32 | ev->step);
}

/* Passes bells of the others on. */
static void *listen_for_bells(void *arg)
{
    struct rank *r = arg;
    uint64_t heard[SIZE] = { 0 };
    for (; !atomic_load(&r->ends); usleep(500))
        for (int i = 0; i < SIZE; i++) {
            const uint64_t bell = atomic_load(&r->bells->of[i]);
            if (i == r->w->rank || bell == heard[i]) continue;
            heard[i] = bell;
            engine_bell(r->rig.engine, bell >> 32, bell & UINT32_MAX);
        }
    return NULL;
}

/* As deploy/node makes it: rows go from GPU to GPU, words from host to host. */
static struct ep *make_ep(struct rank *r)
{
    const struct model *m = r->rig.model;
    int32_t first[SIZE + 1];
    struct ep *e;
    struct ep_config words = {
        .backend = "shm",
        .device = kernel_host(m->kernels)->device,
        .rank = r->w->rank,
        .size = SIZE,
        .send = DTYPE_F32,
        .back = DTYPE_F32,
        .collective_bytes = EP_WORDS_BYTES,
        .timeout_ms = RIG_WAIT_MS,
        .exchange = world_exchange,
        .exchange_arg = r->w,
    };
    struct ep_config c = words;
    for (uint32_t i = 0; i <= SIZE; i++)
        first[i] =
            (int32_t)share_experts(i < SIZE ? i : SIZE - 1, SIZE, m->config.moe.n_experts).first;
    first[SIZE] = (int32_t)m->config.moe.n_experts;
    engine_ep_needs(r->rig.engine, &c);
    c.backend = "peer";
    c.device = m->kernels->device;
    c.placement = (struct ep_placement){ .n_logical = first[SIZE],
                                         .n_physical = first[SIZE],
                                         .first = first };
    CHECK_OK(ep_create(&words, &c.words, NULL));
    CHECK_OK(ep_create(&c, &e, NULL));
    return e;
}

static void join(struct rank *r)
{
    r->epoch++;
    CHECK_OK(engine_join_group(r->rig.engine, make_ep(r), NULL, r->epoch));
}

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

static void open_rank(struct rank *r, struct world *w, uint32_t n_experts)
{
    struct rig_options o = options();
    o.on_kv_ready = lose_on_kv;
    *r = (struct rank){ .w = w, .bells = the_bells };
    r->share = rank_share((uint32_t)w->rank, SIZE, 1, n_experts);
    o.share = &r->share;
    o.on_group = on_group;
    rig_open(&r->rig, o);
    CHECK(pthread_create(&r->listener, NULL, listen_for_bells, r) == 0);
    join(r);
}

/* Both ranks are through with the group: one that ended earlier would be lost for the other. */
static void close_rank(struct rank *r)
{
    const int done = 0;
    int all[SIZE];
    CHECK_OK(world_exchange(r->w, &done, sizeof done, all, NULL));
    atomic_store(&r->ends, true);
    pthread_join(r->listener, NULL);
    rig_close(&r->rig);
}

/* ---- requests ---- */

/* The first rank has most; the other is through early and has no rows from then on. */
static uint32_t make_requests(int rank, struct engine_request *reqs)
{
    static const uint32_t lengths[N_REQUESTS] = { 21, 3, 16, 9 };
    static const struct logit_bias nothing = { 0, 0 };
    const uint32_t n = rank == 0 ? 3 : 1;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t k = rank == 0 ? i : 3;
        reqs[i] = rig_request(1 + k, lengths[k], 700 + k, rank == 0 ? N_OUT : N_OUT / 3);
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

static struct answer *answers_alone(const struct engine_request *reqs, uint32_t n,
                                    uint32_t *n_experts)
{
    struct rig r;
    rig_open(&r, options());
    struct answer *want = rig_run(&r, reqs, n);
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

static void need_gpu(void)
{
    if (device_count("cuda") == 0) _exit(NO_GPU);
}

/* ---- tests ---- */

static void rank_ahead(struct world *w)
{
    struct engine_request reqs[N_REQUESTS];
    uint32_t n_experts;
    struct rank r;
    need_gpu();
    const uint32_t n = make_requests(w->rank, reqs);
    struct answer *want = answers_alone(reqs, n, &n_experts);
    open_rank(&r, w, n_experts);
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

static bool await_losses(const struct rank *r, int want, int wait_ms)
{
    for (int ms = 0; ms < wait_ms && atomic_load(&r->n_lost) < want; ms++) usleep(1000);
    return atomic_load(&r->n_lost) >= want;
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
    struct engine_request reqs[N_REQUESTS];
    uint32_t n_experts;
    struct rank r;
    need_gpu();
    const uint32_t n = make_requests(w->rank, reqs);
    struct answer *want = answers_alone(reqs, n, &n_experts), *got = MEM_ARRAY(struct answer, n);
    open_rank(&r, w, n_experts);
    for (uint32_t i = 0; i < n; i++) {
        got[i].id = reqs[i].id;
        CHECK_OK(engine_submit(r.rig.engine, &reqs[i]));
    }
    for (int round = 1; round <= N_LOSSES; round++) {
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
           (unsigned long long)abandoned, N_LOSSES);
    CHECK(abandoned > 0 && abandoned <= 2 * N_LOSSES);
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
    struct rank r;
    need_gpu();
    const uint32_t n = make_requests(w->rank, reqs), n_all = w->rank == 0 ? n + 1 : n;
    struct answer *want = answers_alone(reqs, n, &n_experts),
                  *got = MEM_ARRAY(struct answer, n_all);
    open_rank(&r, w, n_experts);
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

static void run(const char *model, void (*rank)(struct world *w))
{
    the_model = model;
    the_bells = mmap(NULL, sizeof *the_bells, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                     -1, 0);
    CHECK(the_bells != MAP_FAILED);
    run_ranks(SIZE, rank, 0, WHY);
    munmap(the_bells, sizeof *the_bells);
}

TEST(ranks_step_ahead_by_captured_steps) { run("ernie_moe", rank_ahead); }
TEST(ranks_with_latents_step_ahead) { run("deepseek_v3", rank_ahead); }
TEST(ranks_of_which_a_host_samples)
{
    a_host_samples = true;
    run("ernie_moe", rank_ahead);
}
TEST(a_group_is_lost_with_a_prompt_whose_layers_leave) { run("ernie_moe", rank_of_moved_prompt); }
TEST(a_group_is_lost_with_steps_in_flight) { run("ernie_moe", rank_lost); }

TEST_MAIN(CASE_T(ranks_step_ahead_by_captured_steps, 120),
          CASE_T(ranks_with_latents_step_ahead, 120), CASE_T(ranks_of_which_a_host_samples, 120),
          CASE_T(a_group_is_lost_with_a_prompt_whose_layers_leave, 120),
          CASE_T(a_group_is_lost_with_steps_in_flight, 120))
