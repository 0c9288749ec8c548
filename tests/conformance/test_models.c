/* test_models.c - every architecture against its reference answers, on every backend that this CPU
 * can run.
 *
 * It also tests that the logits of a row have the same bits whether its prompt was computed at
 * once, in chunks, token by token or together with other sequences. In models whose decode tokens
 * use another attention path than prompt tokens, the path depends on the token alone.
 * BATON_TEST_GGUF names a real model to test too. */
#include <stdlib.h>

#include "tests/fixtures/model_rig.h"

TEST(models_agree_with_their_reference)
{
    for (size_t b = 0; KERNEL_BACKENDS[b]; b++)
        for (size_t i = 0; is_cpu_backend(KERNEL_BACKENDS[b]) && KERNEL_BACKENDS[b]->available() &&
                           i < COUNT_OF(GOLDENS);
             i++)
            check_golden(GOLDENS[i], golden(GOLDENS[i], "model").text, KERNEL_BACKENDS[b]->name);
}

/* An emulated GPU takes a thousand times as long: with a sanitizer it runs one model, which has
 * every kind of layer but grouped queries. */
TEST(models_agree_with_their_reference_on_a_gpu)
{
    static const char *const FEW[] = { "deepseek_v3_fp8" };
    const size_t n = TEST_IS_SANITIZED ? COUNT_OF(FEW) : COUNT_OF(GOLDENS);
    if (!has_gpu())
        SKIP("no CUDA GPU, and no emulated one in this build: the models were NOT run on it");
    for (size_t i = 0; i < n; i++) {
        const char *name = TEST_IS_SANITIZED ? FEW[i] : GOLDENS[i];
        check_golden(name, golden(name, "model").text, "cuda");
    }
}

/* ---- the same bits, however the work is cut ---- */

static int32_t pseudo_prompt(int32_t *ids, int32_t n, uint32_t seed, uint32_t n_vocab)
{
    for (int32_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        ids[i] = (int32_t)((seed >> 8) % n_vocab);
    }
    return n;
}

static void check_same_bits(const struct rig *r, const float *have, const float *want, int32_t n,
                            const char *what)
{
    for (int32_t i = 0; i < n; i++)
        if (memcmp(have + (size_t)i * r->n_vocab, want + (size_t)i * r->n_vocab,
                   r->n_vocab * sizeof(float)) != 0)
            test_fail(__FILE__, __LINE__, "%s on %s: the logits of row %d differ", what,
                      r->k->backend->name, i);
}

/* The tokens of the two sequences that share the steps of run_cut. */
struct crowd {
    int32_t ids[2][MAX_LEN], pos[2];
};

/* Adds up to m tokens of sequence `o` of the crowd to the step. */
static int32_t add_crowd(struct crowd *c, int32_t o, int32_t m, struct feed *feeds, int32_t n_feeds)
{
    if (c->pos[o] + m > MAX_LEN) return n_feeds;
    feeds[n_feeds] =
        (struct feed){ .table = 1 + o, .ids = c->ids[o] + c->pos[o], .n = m, .pos = c->pos[o] };
    c->pos[o] += m;
    return n_feeds + 1;
}

/* Computes the prompt in chunks of the given sizes (repeated), alone or between two other sequences
 * in every step. */
static void run_cut(struct rig *r, const int32_t *ids, int32_t n, const int32_t *sizes,
                    size_t n_sizes, bool crowded, float *out)
{
    struct crowd crowd = { 0 };
    for (uint32_t o = 0; o < 2; o++) pseudo_prompt(crowd.ids[o], MAX_LEN, 77u + o, r->n_vocab);
    for (int32_t pos = 0, i = 0, size; pos < n; i++, pos += size) {
        struct feed feeds[3];
        int32_t n_feeds = 0;
        size = sizes[(size_t)i % n_sizes];
        if (size > n - pos) size = n - pos;
        if (crowded) n_feeds = add_crowd(&crowd, 0, 1 + i * 5 % 11, feeds, n_feeds);
        int32_t before = n_feeds ? feeds[0].n : 0;
        feeds[n_feeds++] = (struct feed){ .table = 0, .ids = ids + pos, .n = size, .pos = pos };
        if (crowded) n_feeds = add_crowd(&crowd, 1, 1 + (i * 5 + 3) % 11, feeds, n_feeds);
        feed_all(r, feeds, n_feeds, NULL);
        memcpy(out + (size_t)pos * r->n_vocab, r->logits + (size_t)before * r->n_vocab,
               (size_t)size * r->n_vocab * sizeof(float));
    }
}

static void check_cuts(struct rig *r, int32_t n)
{
    int32_t ids[MAX_LEN];
    float *whole = MEM_ARRAY(float, (size_t)n * r->n_vocab),
          *cut = MEM_ARRAY(float, (size_t)n * r->n_vocab);
    pseudo_prompt(ids, n, 5, r->n_vocab);
    feed_all(r, &(struct feed){ .table = 0, .ids = ids, .n = n }, 1, whole);
    run_cut(r, ids, n, (const int32_t[]){ 64, 7, 1, 33 }, 4, false, cut);
    check_same_bits(r, cut, whole, n, "chunked");
    run_cut(r, ids, n, (const int32_t[]){ 16 }, 1, false, cut);
    check_same_bits(r, cut, whole, n, "chunked by blocks");
    run_cut(r, ids, n, (const int32_t[]){ 1 }, 1, false, cut);
    check_same_bits(r, cut, whole, n, "token by token");
    run_cut(r, ids, n, (const int32_t[]){ 5, 1, 40 }, 3, true, cut);
    check_same_bits(r, cut, whole, n, "with other sequences");
    mem_free(whole);
    mem_free(cut);
}

TEST(logits_do_not_depend_on_the_batch)
{
    for (size_t b = 0; KERNEL_BACKENDS[b]; b++)
        for (size_t i = 0; is_cpu_backend(KERNEL_BACKENDS[b]) && KERNEL_BACKENDS[b]->available() &&
                           i < COUNT_OF(GOLDENS);
             i++) {
            struct rig r;
            rig_open(&r, golden(GOLDENS[i], "model").text, KERNEL_BACKENDS[b]->name);
            check_cuts(&r, strcmp(KERNEL_BACKENDS[b]->name, "ref") == 0 ? 90
                           : TEST_IS_SANITIZED                          ? 100
                                                                        : 230);
            rig_close(&r);
        }
}

/* Also for a GPU's two attention kernels: if rounding is allowed, which of them a row uses depends
 * on its token alone. */
TEST(logits_on_a_gpu_do_not_depend_on_the_batch)
{
    static const char *const NAMES[] = { "qwen3_moe", "deepseek_v3" };
    if (!has_gpu())
        SKIP("no CUDA GPU, and no emulated one in this build: the models were NOT run on it");
    for (size_t i = 0; i < COUNT_OF(NAMES); i++)
        for (int fast = TEST_IS_SANITIZED ? i == 0 : 0; fast < (TEST_IS_SANITIZED && i > 0 ? 1 : 2);
             fast++) { /* sanitized: each model in one */
            struct rig r;
            rig_open_as(&r, golden(NAMES[i], "model").text, "cuda",
                        fast ? ACTIVATIONS_FAST : ACTIVATIONS_F32, QUANTIZE_NONE);
            CHECK(r.m->two_attention_paths == (fast != 0));
            check_cuts(&r, TEST_IS_SANITIZED ? 14 : 70);
            rig_close(&r);
        }
}

/* ---- two forms of attention ---- */

enum { PROMPT = 70, ANSWER_MAX = 300 };

/* Computes the answer after the prompt in chunks of at most `piece` tokens, alone or in steps with
 * a prompt before it and another answer behind it. */
static void run_answer(struct rig *r, const int32_t *ids, int32_t n_answer, int32_t piece,
                       bool crowded, float *out)
{
    struct crowd crowd = { 0 };
    for (uint32_t o = 0; o < 2; o++) pseudo_prompt(crowd.ids[o], MAX_LEN, 177u + o, r->n_vocab);
    feed_all(r, &(struct feed){ .table = 0, .ids = ids, .n = PROMPT }, 1, NULL);
    for (int32_t done = 0, n; done < n_answer; done += n) {
        struct feed feeds[3];
        int32_t n_feeds = 0;
        n = n_answer - done < piece ? n_answer - done : piece;
        if (crowded) n_feeds = add_crowd(&crowd, 0, 1 + done % 7, feeds, n_feeds);
        int32_t before = n_feeds ? feeds[0].n : 0;
        feeds[n_feeds++] = (struct feed){
            .table = 0, .ids = ids + PROMPT + done, .n = n, .pos = PROMPT + done, .generated = true
        };
        if (crowded) {
            n_feeds = add_crowd(&crowd, 1, 1 + done % 5, feeds, n_feeds);
            feeds[n_feeds - 1].generated = true;
        }
        feed_all(r, feeds, n_feeds, NULL);
        memcpy(out + (size_t)done * r->n_vocab, r->logits + (size_t)before * r->n_vocab,
               (size_t)n * r->n_vocab * sizeof(float));
    }
}

static void check_close(const struct rig *r, const float *have, const float *want, int32_t n,
                        const char *what)
{
    for (size_t i = 0; i < (size_t)n * r->n_vocab; i++)
        if (!(fabs((double)have[i] - (double)want[i]) <= 2e-4))
            test_fail(__FILE__, __LINE__, "%s on %s: logit %zu is %g, expected %g", what,
                      r->k->backend->name, i, (double)have[i], (double)want[i]);
}

/* Long enough to cross a segment boundary, for models that are fast. */
static int32_t answer_length(const struct rig *r)
{
    if (strcmp(r->k->backend->name, "ref") == 0) return TEST_IS_SANITIZED ? 20 : 70;
    return !TEST_IS_SANITIZED ? ANSWER_MAX : r->m->two_attention_paths ? 200 : 20;
}

TEST(the_attention_path_follows_the_token)
{
    for (size_t b = 0; KERNEL_BACKENDS[b]; b++)
        for (size_t i = 0; is_cpu_backend(KERNEL_BACKENDS[b]) && KERNEL_BACKENDS[b]->available() &&
                           i < COUNT_OF(GOLDENS);
             i++) {
            struct rig r;
            int32_t ids[PROMPT + ANSWER_MAX];
            const bool two_paths = strncmp(GOLDENS[i], "deepseek", 8) == 0;
            /* models with one path do the same on every backend */
            if (!two_paths && (b + i) % 2 && !test_runs_all()) continue;
            rig_open(&r, golden(GOLDENS[i], "model").text, KERNEL_BACKENDS[b]->name);
            const int32_t n = answer_length(&r);
            CHECK(r.m->two_attention_paths == two_paths);
            float *one = MEM_ARRAY(float, (size_t)n *r.n_vocab),
                  *other = MEM_ARRAY(float, (size_t)ROWS_MAX *r.n_vocab);
            pseudo_prompt(ids, PROMPT + n, 11, r.n_vocab);
            run_answer(&r, ids, n, n, false, one); /* as when the answer of a migrated request is
                                                    * recomputed */
            if (r.m->two_attention_paths) {
                run_answer(&r, ids, n, 1, true, other);
                check_same_bits(&r, other, one, n, "token by token between others");
            }
            feed_all(&r, &(struct feed){ .table = 0, .ids = ids, .n = PROMPT + n }, 1, other);
            const float *prompt_path = other + (size_t)PROMPT * r.n_vocab;
            check_close(&r, one, prompt_path, n, "the two paths");
            bool same = memcmp(one, prompt_path, (size_t)n * r.n_vocab * sizeof *one) == 0;
            CHECK(same == !r.m->two_attention_paths); /* otherwise the flag is wrong */
            mem_free(one);
            mem_free(other);
            rig_close(&r);
        }
}

/* A step with more rows than are routed to experts at a time. */
TEST(long_steps)
{
    static const char *const NAMES[] = { "qwen3_moe", "ernie_moe", "deepseek_v3" };
    enum { EACH = ROWS_MAX / N_TABLES };
    for (size_t i = 0; i < COUNT_OF(NAMES); i++) {
        struct rig r;
        int32_t ids[N_TABLES][EACH];
        struct feed feeds[N_TABLES];
        rig_open(&r, golden(NAMES[i], "model").text, "auto");
        for (int t = 0; t < N_TABLES; t++) {
            pseudo_prompt(ids[t], EACH, 300u + (uint32_t)t, r.n_vocab);
            feeds[t] = (struct feed){ .table = t, .ids = ids[t], .n = EACH, .generated = t == 2 };
        }
        float *together = MEM_ARRAY(float, (size_t)ROWS_MAX *r.n_vocab);
        feed_all(&r, feeds, N_TABLES, together);
        for (int t = 0; t < N_TABLES; t++) {
            feed_all(&r, &feeds[t], 1, NULL);
            check_same_bits(&r, together + (size_t)t * EACH * r.n_vocab, r.logits, EACH,
                            "a long step");
        }
        mem_free(together);
        rig_close(&r);
    }
}

TEST(only_wanted_rows_give_logits_and_equal_the_full_ones)
{
    struct rig r;
    int32_t ids[8], pos[8] = { 0, 1, 2, 3, 4, 5, 6, 7 }, rows[2] = { 2, 7 };
    rig_open(&r, golden("llama", "model").text, "auto");
    pseudo_prompt(ids, 8, 9, r.n_vocab);
    float *full = MEM_ARRAY(float, 8 * (size_t)r.n_vocab);
    feed_all(&r, &(struct feed){ .table = 0, .ids = ids, .n = 8 }, 1, full);
    struct attn_seq seq = { .q_begin = 0, .n_q = 8, .pos_begin = 0, .block_table = r.tables[0] };
    struct model_batch b = {
        .n_rows = 8,
        .ids = ids,
        .pos = pos,
        .seqs = &seq,
        .n_seqs = 1,
        .logit_rows = rows,
        .n_logits = 2,
        .logits = r.logits,
        .kv = r.kv,
        .n_blocks = r.n_blocks,
        .block_tokens = BLOCK,
    };
    (void)model_submit(r.m, &b);
    check_same_bits(&r, r.logits, full + 2 * (size_t)r.n_vocab, 1, "row 2");
    check_same_bits(&r, r.logits + r.n_vocab, full + 7 * (size_t)r.n_vocab, 1, "row 7");
    b.n_logits = 0; /* a chunk in the middle of a prompt */
    (void)model_submit(r.m, &b);
    mem_free(full);
    rig_close(&r);
}

/* ---- the layer callback ---- */

struct watch {
    struct rig *r;
    uint32_t n_calls;
};

/* When a layer is announced, its keys are in the pool and those of the next layer are not. */
static void watch_layer(void *arg, uint32_t layer)
{
    struct watch *w = arg;
    struct kv_layout l;
    CHECK_EQ_INT(layer, w->n_calls);
    model_kv_layout(w->r->m, BLOCK, w->r->n_blocks, &l);
    const char *piece = (const char *)w->r->kv +
                        kv_layout_offset(&l, layer, (uint32_t)w->r->tables[0][0]);
    for (uint32_t run = 0; run < kv_layout_n_segments(&l); run++)
        CHECK(*(const float *)(piece + run * kv_layout_segment_stride(&l)) != 0.0f);
    if (layer + 1 < l.n_layers)
        CHECK(*(const float *)((const char *)w->r->kv +
                               kv_layout_offset(&l, layer + 1, (uint32_t)w->r->tables[0][0])) ==
              0.0f);
    w->n_calls++;
}

static void check_announced(const char *name)
{
    struct rig r;
    int32_t ids[3] = { 5, 6, 7 }, pos[3] = { 0, 1, 2 };
    rig_open(&r, golden(name, "model").text, "auto");
    struct watch w = { .r = &r };
    struct attn_seq seq = { .q_begin = 0, .n_q = 3, .pos_begin = 0, .block_table = r.tables[0] };
    struct model_batch b = {
        .n_rows = 3,
        .ids = ids,
        .pos = pos,
        .seqs = &seq,
        .n_seqs = 1,
        .kv = r.kv,
        .n_blocks = r.n_blocks,
        .block_tokens = BLOCK,
        .on_layer = watch_layer,
        .on_layer_arg = &w,
    };
    (void)model_submit(r.m, &b);
    CHECK_EQ_INT(w.n_calls, r.m->config.n_layers);
    rig_close(&r);
}

TEST(each_layer_is_announced_once_its_kv_is_complete)
{
    check_announced("llama_bias");
    check_announced("deepseek_v3");
}

/* ---- a real model ---- */

TEST(smollm2_agrees_with_its_reference)
{
    const char *path = getenv("BATON_TEST_GGUF");
    if (!path)
        SKIP("BATON_TEST_GGUF does not name SmolLM2-135M-Instruct.Q4_1.gguf: the real model is NOT "
             "tested");
    bool first = true;
    cJSON *expected[LINES_MAX];
    size_t n = read_lines(golden("smollm2", "expected.jsonl").text, expected);
    for (size_t b = 0; KERNEL_BACKENDS[b]; b++) {
        if (!KERNEL_BACKENDS[b]->available()) continue;
        struct rig r;
        rig_open(&r, path, KERNEL_BACKENDS[b]->name);
        for (size_t i = 0; i < (first ? n : 1); i++) { /* the first backend checks
                                                        * more than the others */
            char what[256];
            int32_t ids[MAX_LEN];
            int32_t n_ids = read_ids(json_member(expected[i], "prompt_ids"), ids);
            bool long_run = i == 0 || test_runs_all(); /* test_goldens.py has all tokens of all */
            snprintf(what, sizeof what, "%s on %s",
                     json_member(expected[i], "custom_id")->valuestring, KERNEL_BACKENDS[b]->name);
            feed_all(&r, &(struct feed){ .table = 0, .ids = ids, .n = n_ids }, 1, NULL);
            check_greedy(&r, 0, r.logits + (size_t)(n_ids - 1) * r.n_vocab, n_ids,
                         json_member(expected[i], "greedy"), 5e-3,
                         !first            ? 2
                         : !long_run       ? 6
                         : test_runs_all() ? 48
                                           : 24,
                         what);
        }
        rig_close(&r);
        first = false;
    }
    for (size_t i = 0; i < n; i++) cJSON_Delete(expected[i]);
}

TEST_MAIN(CASE_T(models_agree_with_their_reference, 280),
          CASE_T(models_agree_with_their_reference_on_a_gpu, 280),
          CASE_T(logits_on_a_gpu_do_not_depend_on_the_batch, 280),
          CASE_T(logits_do_not_depend_on_the_batch, 280),
          CASE_T(the_attention_path_follows_the_token, 280), CASE_T(long_steps, 120),
          CASE(only_wanted_rows_give_logits_and_equal_the_full_ones),
          CASE(each_layer_is_announced_once_its_kv_is_complete),
          CASE_T(smollm2_agrees_with_its_reference, 280))
