/* test_draft_mtp.c - the model's own draft layer: it drafts what the reference drafts, whatever it
 * drafts the answers are the same, and right drafts save steps. */
#include <stdlib.h>

#include "shared/base/json/json.h"
#include "tests/unit/engine/engine_pair.h"
#include "tests/unit/engine/knowing_model.h"

enum { N_MIXED = 12, N_DRAFTS = 3, GREEDY_MAX = 64 };

static const char *const MODELS[] = { "deepseek_v3", "ernie_moe" };

static struct draft_config config_of(uint32_t n_tokens)
{
    return (
        struct draft_config){ .ops = &drafter_mtp_ops, .n_tokens = n_tokens, .verify_all = true };
}

/* ---- the reference's drafts ---- */

/* What was proposed behind each token of the one sequence that runs. */
static struct {
    struct drafter_ops ops;
    uint32_t n_prompt, n[GREEDY_MAX];
    int32_t drafts[GREEDY_MAX][DRAFT_TOKENS_MAX];
} the_record;

static void propose_and_record(struct drafter *d, struct draft_request *requests, uint32_t n)
{
    drafter_mtp_ops.propose(d, requests, n);
    CHECK_EQ_INT(n, 1);
    const uint32_t i = requests->n_tokens - the_record.n_prompt - 1;
    CHECK(i < GREEDY_MAX);
    the_record.n[i] = requests->n;
    memcpy(the_record.drafts[i], requests->drafts, requests->n * sizeof(int32_t));
}

static struct draft_config recording_config(void)
{
    struct draft_config c = config_of(N_DRAFTS);
    the_record.ops = drafter_mtp_ops;
    the_record.ops.propose = propose_and_record;
    c.ops = &the_record.ops;
    return c;
}

static cJSON *read_lines(const char *model, const char *name)
{
    char path[128], *line = NULL;
    size_t cap = 0;
    cJSON *all = cJSON_CreateArray(), *doc;
    snprintf(path, sizeof path, "goldens/%s/%s", model, name);
    FILE *f = fopen(test_data(path), "r");
    if (!f) SKIP("the golden's folder under tests/data is not there");
    for (ssize_t n; (n = getline(&line, &cap, f)) > 0; cJSON_AddItemToArray(all, doc))
        CHECK_OK(json_parse((struct str){ line, (size_t)n }, false, &doc, NULL));
    free(line);
    fclose(f);
    return all;
}

static int32_t int_at(const cJSON *list, uint32_t i)
{
    return (int32_t)cJSON_GetArrayItem(list, (int)i)->valuedouble;
}

static struct engine_request request_of(const cJSON *line, uint32_t n_out)
{
    static int32_t tokens[RIG_TOKENS_MAX];
    const cJSON *prompt = json_member(json_member(line, "body"), "prompt");
    struct engine_request q = rig_request(1, 1, 1, n_out);
    q.n_tokens = q.n_prompt = (uint32_t)cJSON_GetArraySize(prompt);
    q.tokens = tokens;
    for (uint32_t i = 0; i < q.n_tokens; i++) tokens[i] = int_at(prompt, i);
    return q;
}

/* Drafts behind the i-th token, until the reference had nearly equal logits: then either is right,
 * and what follows differs. Returns how many were compared. */
static uint32_t check_drafts(const cJSON *want, uint32_t i)
{
    const cJSON *drafts = cJSON_GetArrayItem(json_member(want, "drafts"), (int)i),
                *gaps = cJSON_GetArrayItem(json_member(want, "gaps"), (int)i);
    uint32_t k = 0;
    for (; k < the_record.n[i] && cJSON_GetArrayItem(gaps, (int)k)->valuedouble > 1e-4; k++)
        CHECK_EQ_INT(the_record.drafts[i][k], int_at(drafts, k));
    return k;
}

/* What was compared; of the first drafts, those that were right here and at the reference. */
struct compared {
    uint32_t n_drafts, n_first, n_right, n_right_there;
};

static void compare(struct compared *c, const cJSON *want, const struct answer *a, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        const cJSON *there = cJSON_GetArrayItem(json_member(want, "drafts"), (int)i);
        c->n_drafts += check_drafts(want, i);
        c->n_first += the_record.n[i] > 0;
        c->n_right_there += the_record.n[i] > 0 && int_at(there, 0) == a->out[i + 1].id;
        c->n_right += the_record.n[i] > 0 && the_record.drafts[i][0] == a->out[i + 1].id;
    }
}

/* An engine, or two that share the work. */
struct referenced {
    struct rig *alone;
    struct pair *pair;
    const char *says;
};

static struct answer *run_recorded(const struct referenced *on, const struct engine_request *q)
{
    memset(the_record.n, 0, sizeof the_record.n);
    the_record.n_prompt = q->n_prompt;
    if (on->alone) return rig_run(on->alone, q, 1);
    struct answer *a = MEM_NEW(struct answer);
    a->id = q->id;
    pair_start(on->pair, *q);
    rig_gather(&on->pair->decode, a, 1);
    return a;
}

static void check_reference(const char *model, struct referenced on)
{
    cJSON *requests = read_lines(model, "requests.jsonl"), *want = read_lines(model, "mtp.jsonl");
    struct compared c = { 0 };
    for (int line = 0; line < cJSON_GetArraySize(requests); line++) {
        const cJSON *expected = cJSON_GetArrayItem(want, line);
        const uint32_t n = (uint32_t)cJSON_GetArraySize(json_member(expected, "drafts"));
        const struct engine_request q = request_of(cJSON_GetArrayItem(requests, line), n + 1);
        struct answer *a = run_recorded(&on, &q);
        if (n > 0) CHECK_EQ_INT(the_record.n[0], N_DRAFTS); /* behind the first token, too */
        compare(&c, expected, a, n);
        mem_free(a);
    }
    printf("%s, %s: %u drafts as the reference's; of %u first ones %u accepted, of the reference's "
           "%u\n",
           model, on.says, c.n_drafts, c.n_first, c.n_right, c.n_right_there);
    CHECK(c.n_drafts > 300);
    CHECK_EQ_INT(c.n_right, c.n_right_there);
    cJSON_Delete(requests);
    cJSON_Delete(want);
}

static struct rig_options layer_options(const char *model, const struct draft_config *c)
{
    return (struct rig_options){
        .model = model, .draft = c, .draft_layer = true, .no_prefix_cache = true
    };
}

/* Prompts whole, and in chunks: the layer sees the same. */
static void check_reference_alone(const char *model, uint32_t max_batched_tokens)
{
    const struct draft_config c = recording_config();
    struct rig_options o = layer_options(model, &c);
    char says[64];
    struct rig r;
    o.max_batched_tokens = max_batched_tokens;
    snprintf(says, sizeof says, "steps of %u rows", max_batched_tokens);
    rig_open(&r, o);
    check_reference(model, (struct referenced){ .alone = &r, .says = says });
    rig_close(&r);
}

/* The layer's KV of the prompt and the hidden state behind it arrive with the model's KV. */
static void check_reference_split(const char *model)
{
    static struct pair p;
    const struct draft_config plain = config_of(N_DRAFTS), c = recording_config();
    struct rig_options prefill = layer_options(model, &plain);
    prefill.max_batched_tokens = 24;
    pair_open(&p, prefill, layer_options(model, &c));
    check_reference(model, (struct referenced){ .pair = &p, .says = "prompts computed elsewhere" });
    pair_close(&p);
}

TEST(drafts_are_the_references)
{
    for (size_t i = 0; i < COUNT_OF(MODELS); i++) {
        check_reference_alone(MODELS[i], 2048);
        check_reference_alone(MODELS[i], 24);
        check_reference_split(MODELS[i]);
    }
}

/* ---- the same answers ---- */

static void mixed_requests(struct engine_request *reqs)
{
    static const uint32_t lengths[N_MIXED] = { 1, 2, 15, 16, 17, 31, 33, 48, 64, 65, 100, 150 };
    for (uint32_t i = 0; i < N_MIXED; i++) {
        reqs[i] = rig_request(1 + i, lengths[i], 1000 + i, 30);
        reqs[i].want_prompt_logprobs = i % 5 == 0;
        if (i % 2 == 0) continue;
        reqs[i].sampling.temperature = 0.9f;
        reqs[i].sampling.top_p = 0.95f;
        reqs[i].sampling.repetition_penalty = 1.1f;
    }
}

static struct answer *answers_without(struct rig_options o, const struct engine_request *reqs)
{
    struct rig r;
    rig_open(&r, (struct rig_options){ .model = o.model,
                                       .path = o.path,
                                       .activations = o.activations,
                                       .no_prefix_cache = true });
    struct answer *want = rig_run(&r, reqs, N_MIXED);
    rig_close(&r);
    return want;
}

static void check_mixed(struct rig_options o, uint32_t n_drafts)
{
    const struct draft_config c = config_of(n_drafts);
    struct engine_request reqs[N_MIXED];
    struct rig r;
    mixed_requests(reqs);
    struct answer *want = answers_without(o, reqs);
    o.draft = &c;
    o.draft_layer = true;
    rig_open(&r, o);
    for (int round = 0; round < 2; round++) { /* the second finds the prompts in the cache */
        struct answer *got = rig_run(&r, reqs, N_MIXED);
        for (uint32_t i = 0; i < N_MIXED; i++) check_same(&want[i], &got[i]);
        mem_free(got);
    }
    CHECK(rig_count(&r, "baton_spec_decode_num_draft_tokens_total") > 0);
    rig_await_free_blocks(&r, o.n_blocks ? o.n_blocks : RIG_BLOCKS_MAX);
    rig_close(&r);
    mem_free(want);
}

TEST(whatever_the_layer_drafts_answers_are_the_same)
{
    for (size_t i = 0; i < COUNT_OF(MODELS); i++) {
        struct rig_options o = { .model = MODELS[i] };
        const uint32_t step = test_runs_long() ? 1 : DRAFT_TOKENS_MAX - 1;
        for (uint32_t n = 1; n <= DRAFT_TOKENS_MAX; n += step) check_mixed(o, n);
        o.max_batched_tokens = 16; /* chunks, of prompts and of passes */
        check_mixed(o, 2);
        o.max_batched_tokens = 256;
        o.max_seqs = 2;
        if (test_runs_long()) check_mixed(o, 4);
        o.max_seqs = 64;
        o.n_blocks = 14; /* preemption */
        if (test_runs_long()) check_mixed(o, 3);
        o.no_prefix_cache = true;
        check_mixed(o, 8);
        o = (struct rig_options){ .model = MODELS[i], .activations = ACTIVATIONS_FAST };
        check_mixed(o, 3);
    }
}

/* ---- prefill here, decode there ---- */

/* Bits of who has the layer. */
enum { AT_PREFILL = 1, AT_DECODE = 2 };

static void check_split(const char *model, uint32_t who, struct rig_options prefill,
                        struct rig_options decode)
{
    static struct pair p;
    const struct draft_config c = config_of(N_DRAFTS);
    struct engine_request reqs[N_MIXED];
    mixed_requests(reqs);
    prefill.model = decode.model = model;
    struct answer *want = answers_without(prefill, reqs);
    if (who & AT_PREFILL) prefill.draft = &c, prefill.draft_layer = true;
    if (who & AT_DECODE) decode.draft = &c, decode.draft_layer = true;
    pair_open(&p, prefill, decode);
    for (int round = 0; round < 2; round++) /* the second finds prompts in the caches */
        for (uint32_t i = 0; i < N_MIXED; i++) {
            struct answer *got = MEM_NEW(struct answer);
            got->id = reqs[i].id;
            reqs[i].want_prompt_logprobs = false; /* not of prompts that are computed elsewhere */
            pair_start(&p, reqs[i]);
            rig_gather(&p.decode, got, 1);
            check_same(&want[i], got);
            CHECK(who == (AT_PREFILL | AT_DECODE) ? got->end.n_drafted > 0
                                                  : got->end.n_drafted == 0);
            mem_free(got);
        }
    rig_await_free_blocks(&p.prefill, prefill.n_blocks ? prefill.n_blocks : RIG_BLOCKS_MAX);
    rig_await_free_blocks(&p.decode, decode.n_blocks ? decode.n_blocks : RIG_BLOCKS_MAX);
    pair_close(&p);
    mem_free(want);
}

TEST(split_over_two_engines_gives_the_same)
{
    for (size_t i = 0; i < COUNT_OF(MODELS); i++)
        for (uint32_t who = AT_PREFILL; who <= (AT_PREFILL | AT_DECODE); who++) {
            if (test_runs_long() || who == (AT_PREFILL | AT_DECODE))
                check_split(MODELS[i], who, (struct rig_options){ .max_batched_tokens = 2048 },
                            (struct rig_options){ 0 });
            check_split(MODELS[i], who, (struct rig_options){ .max_batched_tokens = 10 },
                        (struct rig_options){ .no_prefix_cache = true, .n_blocks = 14 });
        }
}

/* ---- a layer that is right ---- */

TEST(right_drafts_of_the_layer_save_steps)
{
    enum { OUT = 41 };
    const char *path = knowing_model(0);
    for (uint32_t n = 1; n <= DRAFT_TOKENS_MAX; n++) {
        const struct draft_config c = config_of(n);
        struct engine_request q = rig_request(1, 20, 5, OUT);
        struct rig r;
        rig_open(&r, (struct rig_options){ .path = path, .draft = &c, .draft_layer = true });
        struct answer *got = rig_run(&r, &q, 1);
        const uint32_t n_steps = (OUT - 1 + n) / (n + 1);
        rig_await_steps(&r, 1 + n_steps);
        CHECK_EQ_INT(got->end.n_accepted, OUT - 1 - n_steps);
        rig_close(&r);
        mem_free(got);
    }
    check_mixed((struct rig_options){ .path = path }, 4);
    check_mixed((struct rig_options){ .path = path, .n_blocks = 14 }, 8);
}

/* ---- what is there ---- */

TEST(a_model_without_the_layer_is_refused)
{
    struct err err = { 0 };
    struct model *m;
    struct kernel_ctx *k;
    CHECK_OK(kernel_ctx_create(kernel_options_default("auto", ACTIVATIONS_F32, 1), &k, &err));
    const struct model_options o = {
        .path = test_data("goldens/llama/model"), .max_rows = 16, .kernels = k, .draft_layer = true
    };
    CHECK_STATUS(model_load(&o, &m, &err), ERR_CONFIG);
    CHECK_EQ_STR(err.field, "method");
    CHECK(strstr(err.text, "has no draft layer") != NULL);
    kernel_ctx_free(k);
}

TEST(the_layer_has_kv_of_its_own)
{
    const struct draft_config c = config_of(1);
    struct rig with, without;
    rig_open(&with, (struct rig_options){ .model = "ernie_moe", .draft = &c, .draft_layer = true });
    rig_open(&without, (struct rig_options){ .model = "ernie_moe" });
    const struct kv_layout *a = engine_kv_layout(with.engine),
                           *b = engine_kv_layout(without.engine);
    CHECK_EQ_INT(a->n_layers, b->n_layers + 1);
    CHECK_EQ_INT(a->n_draft_layers, 1);
    CHECK(a->model_fingerprint == b->model_fingerprint); /* both can exchange the model's KV */
    CHECK_OK(kv_layout_same_model(a, b, NULL));
    CHECK_EQ_INT(kv_layout_common_layers(a, b), b->n_layers);
    rig_close(&with);
    rig_close(&without);
}

TEST_MAIN(CASE_T(drafts_are_the_references, 120),
          CASE_T(whatever_the_layer_drafts_answers_are_the_same, 240),
          CASE_T(split_over_two_engines_gives_the_same, 120),
          CASE_T(right_drafts_of_the_layer_save_steps, 120),
          CASE(a_model_without_the_layer_is_refused), CASE(the_layer_has_kv_of_its_own))
