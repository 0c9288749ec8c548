/* test_model_kv.c - models whose KV cache has another type than their arithmetic: how far the
 * results are from those with f32, for which bounds were measured, and that they do not depend on
 * how a prompt is divided into chunks, on the rest of the batch, or on the kernel backend.
 *
 * The models are small ones of random weights with a head of 16 to 64 elements; docs/performance.md
 * has the perplexity of a real one. */
#include <stdlib.h>

#include "kernels/kv_rows.h"
#include "tests/fixtures/model_rig.h"

enum { LINES_USED = 6, STEPS = 24 };

/* Largest difference of a logit: twice what was measured, on models without experts and on
 * mixtures, where a token may go to another expert. */
struct bound {
    enum dtype type;
    double dense, mixture;
};

static const struct bound BOUNDS[] = {
    { DTYPE_F16, 0.005, 0.02 },   /* 0.0024, 0.0082 */
    { DTYPE_BF16, 0.05, 0.25 },   /* 0.025, 0.11 */
    { DTYPE_I8, 0.13, 1.7 },      /* 0.063, 0.82 */
    { DTYPE_F8_E4M3, 0.55, 1.7 }, /* 0.26, 0.83 */
};

static const struct {
    const char *name;
    bool mixture;
} HEADS[] = {
    { "llama", false }, { "llama_bias", false }, { "qwen2", false },  { "qwen3", false },
    { "ernie", false }, { "qwen3_moe", true },   { "mixtral", true }, { "ernie_moe", true },
};

struct prompts {
    int32_t ids[LINES_USED][MAX_LEN], n[LINES_USED];
    size_t n_prompts;
};

static void read_prompts(const char *name, struct prompts *p)
{
    cJSON *requests[LINES_MAX];
    size_t n = read_lines(golden(name, "requests.jsonl").text, requests);
    p->n_prompts = n < LINES_USED ? n : LINES_USED;
    for (size_t i = 0; i < n; i++) {
        if (i < LINES_USED)
            p->n[i] = read_ids(json_member(json_member(requests[i], "body"), "prompt"), p->ids[i]);
        cJSON_Delete(requests[i]);
    }
}

static float *whole(struct rig *r, const int32_t *ids, int32_t n)
{
    float *out = MEM_ARRAY(float, (size_t)n * r->n_vocab);
    feed_all(r, &(struct feed){ 0, ids, n, 0, false }, 1, out);
    return out;
}

static double largest_apart(const float *a, const float *b, size_t n)
{
    double most = 0;
    for (size_t i = 0; i < n; i++) {
        CHECK(isfinite(a[i]) && isfinite(b[i]));
        most = fmax(most, fabs((double)a[i] - (double)b[i]));
    }
    return most;
}

/* The logits of a prompt, and the greedy tokens after it. */
struct exact_answer {
    float *logits;
    int32_t ids[STEPS];
};

static struct exact_answer answer_to(struct rig *r, const int32_t *prompt, int32_t n)
{
    struct exact_answer a = { .logits = whole(r, prompt, n) };
    const float *row = a.logits + (size_t)(n - 1) * r->n_vocab;
    for (int i = 0; i < STEPS; i++) {
        a.ids[i] = argmax(r, row);
        feed_all(r, &(struct feed){ 0, &a.ids[i], 1, n + i, true }, 1, NULL);
        row = r->logits;
    }
    return a;
}

/* The first of STEPS greedy tokens that is another one, or STEPS. */
static int first_other(struct rig *r, const struct exact_answer *want, const float *row, int32_t n)
{
    for (int i = 0; i < STEPS; i++) {
        if (argmax(r, row) != want->ids[i]) return i;
        feed_all(r, &(struct feed){ 0, &want->ids[i], 1, n + i, true }, 1, NULL);
        row = r->logits;
    }
    return STEPS;
}

static void open_golden(struct rig *r, const char *name, const char *isa,
                        enum activations activations, enum dtype t)
{
    struct path path = golden(name, "model");
    rig_open_kv(r, (struct model_options){ .path = path.text }, isa, activations, t);
}

static void check_apart(const char *name, enum dtype t, double bound)
{
    struct rig exact, r;
    struct prompts p;
    double most = 0;
    int first = STEPS;
    read_prompts(name, &p);
    open_golden(&exact, name, "auto", ACTIVATIONS_F32, DTYPE_F32);
    open_golden(&r, name, "auto", ACTIVATIONS_F32, t);
    for (size_t i = 0; i < p.n_prompts; i++) {
        struct exact_answer want = answer_to(&exact, p.ids[i], p.n[i]);
        float *have = whole(&r, p.ids[i], p.n[i]);
        size_t last = (size_t)(p.n[i] - 1) * r.n_vocab;
        most = fmax(most, largest_apart(have, want.logits, (size_t)p.n[i] * r.n_vocab));
        int other = first_other(&r, &want, have + last, p.n[i]);
        first = other < first ? other : first;
        mem_free(want.logits), mem_free(have);
    }
    printf("%s over %s: largest difference of a logit %.2g, first other greedy token %d%s\n", name,
           kv_rows_name(t), most, first, first == STEPS ? " (none)" : "");
    CHECK(most > 0 && most <= bound);
    rig_close(&exact);
    rig_close(&r);
}

TEST(logits_stay_near_those_over_f32)
{
    for (size_t i = 0; i < COUNT_OF(HEADS); i++)
        for (size_t t = 0; t < COUNT_OF(BOUNDS); t++)
            check_apart(HEADS[i].name, BOUNDS[t].type,
                        HEADS[i].mixture ? BOUNDS[t].mixture : BOUNDS[t].dense);
}

/* ---- the same bits, however the work is cut ---- */

static void check_cut(struct rig *r, const int32_t *ids, int32_t n, int32_t piece,
                      const float *want)
{
    const int32_t crowd_ids[] = { 5, 6, 7 };
    float *rows = MEM_ARRAY(float, (size_t)(piece + 3) * r->n_vocab);
    for (int32_t at = 0; at < n; at += piece) {
        int32_t here = n - at < piece ? n - at : piece;
        const struct feed feeds[] = { { 1, ids + at, here, at, false },
                                      { 2, crowd_ids, 3, 3 * (at / piece), false } };
        feed_all(r, feeds, 2, rows);
        if (memcmp(rows, want + (size_t)at * r->n_vocab,
                   (size_t)here * r->n_vocab * sizeof *rows) != 0)
            test_fail(__FILE__, __LINE__,
                      "pieces of %d tokens: other logits at positions from %d on", piece, at);
    }
    mem_free(rows);
}

TEST(logits_depend_on_neither_cuts_nor_neighbours_nor_the_backend)
{
    static const enum dtype types[] = { DTYPE_F16, DTYPE_I8, DTYPE_F8_E4M3 };
    for (size_t t = 0; t < COUNT_OF(types); t++) {
        float *want = NULL;
        int32_t ids[200];
        for (int32_t i = 0; i < 200; i++) ids[i] = 4 + i * 37 % 500;
        for (size_t b = 0; KERNEL_BACKENDS[b]; b++) {
            struct rig r;
            if (!is_cpu_backend(KERNEL_BACKENDS[b]) || !KERNEL_BACKENDS[b]->available()) continue;
            open_golden(&r, "qwen3", KERNEL_BACKENDS[b]->name, ACTIVATIONS_F32, types[t]);
            CHECK(r.n_vocab >= 504);
            if (!want) want = whole(&r, ids, 200);
            check_cut(&r, ids, 200, 200, want);
            if (strcmp(KERNEL_BACKENDS[b]->name, "ref") != 0) check_cut(&r, ids, 200, 1, want);
            check_cut(&r, ids, 200, 47, want);
            rig_close(&r);
        }
        mem_free(want);
    }
}

/* ---- what cannot be ---- */

TEST(latents_are_refused_before_anything_is_packed)
{
    static const enum dtype types[] = { DTYPE_F16, DTYPE_I8, DTYPE_F8_E4M3, DTYPE_F32 };
    struct path path = golden("deepseek_v2_lite", "model");
    for (size_t i = 0; i < COUNT_OF(types); i++) {
        struct kernel_ctx *k;
        struct model *m = NULL;
        struct err err;
        struct kernel_options ko = kernel_options_default("auto", ACTIVATIONS_FAST, 1);
        ko.kv = types[i];
        CHECK_OK(kernel_ctx_create(ko, &k, &err));
        const struct model_options o = { .path = path.text, .max_rows = 8, .kernels = k };
        CHECK_STATUS(model_load(&o, &m, &err), ERR_UNSUPPORTED);
        CHECK(m == NULL);
        CHECK_EQ_STR(err.field, "kv-cache-dtype");
        CHECK(strstr(err.text, "latents (MLA), which can only be held as bf16") &&
              strstr(err.text, kv_rows_name(types[i])));
        kernel_ctx_free(k);
    }
}

/* ---- a real model ---- */

/* Twice the largest difference that was measured over 10 prompts, of logits between -20 and 30;
 * greedy tokens before the first other one, of STEPS. */
static const struct {
    enum dtype type;
    double apart, same;
} REAL[] = {
    { DTYPE_BF16, 0.8, 23 },   /* 0.40, 24 */
    { DTYPE_F16, 0.1, 23 },    /* 0.051, 24 */
    { DTYPE_I8, 3.6, 16 },     /* 1.8, 21.7 */
    { DTYPE_F8_E4M3, 11, 12 }, /* 5.5, 18.3 */
};

TEST(smollm2_over_other_types)
{
    const char *path = getenv("BATON_TEST_GGUF");
    if (!path)
        SKIP("BATON_TEST_GGUF does not name SmolLM2-135M-Instruct.Q4_1.gguf: the real model is NOT "
             "tested");
    cJSON *expected[LINES_MAX];
    const size_t n_lines = read_lines(golden("smollm2", "expected.jsonl").text, expected),
                 most_used = test_runs_all() ? LINES_USED : LINES_USED / 2,
                 n = n_lines < most_used ? n_lines : most_used;
    struct exact_answer want[LINES_USED];
    int32_t ids[LINES_USED][MAX_LEN], n_ids[LINES_USED];
    struct rig exact;
    rig_open_kv(&exact, (struct model_options){ .path = path }, "auto", ACTIVATIONS_F32, DTYPE_F32);
    for (size_t i = 0; i < n; i++) {
        n_ids[i] = read_ids(json_member(expected[i], "prompt_ids"), ids[i]);
        want[i] = answer_to(&exact, ids[i], n_ids[i]);
    }
    rig_close(&exact);
    for (size_t t = 0; t < COUNT_OF(REAL); t++) {
        struct rig r;
        double most = 0;
        int first = STEPS, total = 0;
        rig_open_kv(&r, (struct model_options){ .path = path }, "auto", ACTIVATIONS_F32,
                    REAL[t].type);
        for (size_t i = 0; i < n; i++) {
            float *have = whole(&r, ids[i], n_ids[i]);
            size_t last = (size_t)(n_ids[i] - 1) * r.n_vocab;
            most = fmax(most, largest_apart(have, want[i].logits, (size_t)n_ids[i] * r.n_vocab));
            int other = first_other(&r, &want[i], have + last, n_ids[i]);
            first = other < first ? other : first;
            total += other;
            mem_free(have);
        }
        printf("SmolLM2 over %s: largest difference of a logit %.2g; greedy tokens until the first "
               "other one: %d at least, %.1f of %d in the mean of %zu prompts\n",
               kv_rows_name(REAL[t].type), most, first, (double)total / (double)n, STEPS, n);
        CHECK(most > 0 && most <= REAL[t].apart && (double)total >= REAL[t].same * (double)n);
        rig_close(&r);
    }
    for (size_t i = 0; i < n; i++) mem_free(want[i].logits);
    for (size_t i = 0; i < n_lines; i++) cJSON_Delete(expected[i]);
}

TEST_MAIN(CASE_T(logits_stay_near_those_over_f32, 280),
          CASE_T(logits_depend_on_neither_cuts_nor_neighbours_nor_the_backend, 280),
          CASE(latents_are_refused_before_anything_is_packed),
          CASE_T(smollm2_over_other_types, 280))
