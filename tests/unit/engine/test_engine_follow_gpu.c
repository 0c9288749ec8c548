/* test_engine_follow_gpu.c - nodes of several ranks on a GPU, each rank a process: steps are
 * captured, and requests have the tokens of one engine that has the whole model, with
 * log-probabilities within the bound of test_models (there a product is summed in another order). */
#include <math.h>

#include "tests/unit/engine/gpu_ranks.h"

enum { N_REQUESTS = 4, N_OUT = 8, N_OUT_FEW = 4 };
static const double BOUND = 1e-3;

static const char *the_model;
static uint32_t n_experts; /* of the model */
static bool a_host_samples;

static struct rig_options options(void)
{
    return (struct rig_options){ .isa = "cuda",
                                 .model = the_model,
                                 .activations = ACTIVATIONS_F32,
                                 .max_batched_tokens = 12,
                                 .max_seqs = 4,
                                 .sampling_edit_bytes = a_host_samples };
}

/* ---- requests ---- */

static void make_requests(struct engine_request *reqs)
{
    static const uint32_t lengths[N_REQUESTS] = { 21, 3, 16, 9 };
    static const struct logit_bias nothing = { 0, 0 };
    const uint32_t n_out = test_runs_long() ? N_OUT : N_OUT_FEW;
    for (uint32_t i = 0; i < N_REQUESTS; i++) {
        reqs[i] = rig_request(1 + i, lengths[i], 700 + i, i == 1 ? n_out / 2 : n_out);
        reqs[i].want_prompt_logprobs = i == 3;
        if (i > 0 || !a_host_samples) continue; /* there is no room for what changes nothing */
        reqs[i].sampling.bias = &nothing;
        reqs[i].sampling.n_bias = 1;
    }
}

static struct answer *answers_alone(const struct engine_request *reqs)
{
    struct rig r;
    rig_open(&r, options());
    struct answer *want = rig_run(&r, reqs, N_REQUESTS);
    CHECK_EQ_INT(r.model->config.moe.n_experts, n_experts);
    rig_close(&r);
    return want;
}

static double difference(float a, float b) { return fabs((double)a - (double)b); }

static void check_answer(const struct answer *got, const struct answer *want, double *worst)
{
    CHECK_OK(got->end.status);
    CHECK_EQ_INT(got->n_out, want->n_out);
    CHECK_EQ_INT(got->n_scored, want->n_scored);
    for (uint32_t i = 0; i < got->n_out; i++) {
        CHECK_EQ_INT(got->out[i].id, want->out[i].id);
        *worst = fmax(*worst, difference(got->out[i].logprob, want->out[i].logprob));
    }
    for (uint32_t i = 0; i < got->n_scored; i++)
        *worst = fmax(*worst, difference(got->scored[i], want->scored[i]));
    CHECK(*worst <= BOUND);
}

static void check_answers(const struct answer *got, const struct answer *want)
{
    double worst = 0;
    for (uint32_t i = 0; i < N_REQUESTS; i++) check_answer(&got[i], &want[i], &worst);
    printf("    %s: log-probabilities differ by %.1e at most\n", the_model, worst);
}

/* ---- tests ---- */

static uint64_t n_recorded(struct rank *r)
{
    return rig_count(&r->rig, "baton_engine_steps_recorded_total");
}

/* The first rank of each node has all requests; those that follow do as many steps. */
static void serve(struct world *w, int tp)
{
    struct engine_request reqs[N_REQUESTS];
    struct answer *want = NULL, *got = NULL;
    struct rank r;
    need_gpu();
    make_requests(reqs);
    if (w->rank % tp == 0) want = answers_alone(reqs);
    open_rank(&r, w, tp, options(), n_experts);
    if (r.node.rank == 0) {
        got = rig_run(&r.rig, reqs, N_REQUESTS);
        check_answers(got, want);
    }
    await_all(&r);
    CHECK(n_recorded(&r) > 0);
    CHECK_EQ_INT(rig_count(&r.rig, "baton_engine_steps_ahead_total"), 0);
    CHECK((rig_count(&r.rig, "baton_engine_steps_host_sampled_total") > 0) ==
          (a_host_samples && r.node.rank == 0));
    CHECK_EQ_INT(atomic_load(&r.n_faults) + atomic_load(&r.n_lost), 0);
    close_rank(&r);
    mem_free(want);
    mem_free(got);
}

static void rank_of_one_node(struct world *w) { serve(w, w->size); }
static void rank_of_two_nodes(struct world *w) { serve(w, 2); }

static void run(const char *model, uint32_t experts, int size, void (*rank)(struct world *w))
{
    the_model = model;
    n_experts = experts;
    run_gpu_ranks(size, rank);
}

static void run_long(const char *model, uint32_t experts, int size, void (*rank)(struct world *w))
{
    if (!test_runs_long()) SKIP("takes long under a sanitizer; tests/run.sh --all runs it");
    run(model, experts, size, rank);
}

TEST(two_ranks_of_llama_answer_as_one) { run("llama", 0, 2, rank_of_one_node); }
TEST(two_ranks_of_qwen3_moe_answer_as_one) { run_long("qwen3_moe", 8, 2, rank_of_one_node); }
TEST(two_ranks_with_latents_answer_as_one) { run_long("deepseek_v3", 16, 2, rank_of_one_node); }
TEST(four_ranks_of_which_a_host_samples)
{
    a_host_samples = true;
    run("qwen3", 0, 4, rank_of_one_node);
}
TEST(two_nodes_of_two_ranks_share_experts) { run_long("ernie_moe", 8, 4, rank_of_two_nodes); }

/* One that follows gives the node up in the middle of a step. */
static void rank_of_lost_node(struct world *w)
{
    struct engine_request reqs[N_REQUESTS];
    struct rank r;
    need_gpu();
    make_requests(reqs);
    open_rank(&r, w, 2, options(), n_experts);
    for (uint32_t i = 0; w->rank == 0 && i < N_REQUESTS; i++)
        CHECK_OK(engine_submit(r.rig.engine, &reqs[i]));
    for (int ms = 0; w->rank == 1 && rig_count(&r.rig, "baton_engine_steps_total") < 3; ms++) {
        if (ms == RIG_WAIT_MS) test_fail(__FILE__, __LINE__, "the node does not step");
        usleep(1000);
    }
    if (w->rank == 1) engine_abort_node(r.rig.engine);
    CHECK(await_count(&r.n_faults, 1, RIG_WAIT_MS));
    CHECK(r.fault.code == ERR_PEER_LOST || r.fault.code == ERR_CANCELED);
    close_rank(&r);
}

TEST(a_node_is_lost_with_one_of_its_ranks) { run("qwen3_moe", 8, 2, rank_of_lost_node); }

TEST_MAIN(CASE_T(two_ranks_of_llama_answer_as_one, 120),
          CASE_T(two_ranks_of_qwen3_moe_answer_as_one, 120),
          CASE_T(two_ranks_with_latents_answer_as_one, 120),
          CASE_T(four_ranks_of_which_a_host_samples, 120),
          CASE_T(two_nodes_of_two_ranks_share_experts, 120),
          CASE_T(a_node_is_lost_with_one_of_its_ranks, 120))
