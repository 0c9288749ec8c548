/* test_models.c - every architecture against its reference answers, on every kernel row this CPU has.
 *
 * The golden answers (tests/data/goldens) were computed in float32 by the reference implementation. Beside agreement with
 * them, the rule of the design is held: a row's logits are the same bits whether its prompt came whole, in chunks, token by
 * token or together with other sequences. The same weights rewritten as GGUF (rows reordered, rope factors as a tensor)
 * must give the same answers. A real model is taken from BATON_TEST_GGUF. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "shared/base/json.h"
#include "shared/base/mem.h"
#include "shared/model/file_map.h"
#include "shared/model/layers.h"
#include "shared/model/model.h"
#include "shared/model/weights.h"
#include "tests/fixtures/gguf_write.h"
#include "tests/harness/test.h"

enum { BLOCK = 16, MAX_LEN = 768, TABLE = MAX_LEN / BLOCK, N_TABLES = 4, ROWS_MAX = 640, LINES_MAX = 64 };

static const char *const TINY[] = { "llama", "llama_bias" };

/* A model with a KV pool and block tables made by hand: sequence s has every N_TABLES-th block, backwards. */
struct rig {
    struct kernel_ctx *k;
    struct model      *m;
    float             *kv, *logits;
    uint32_t           n_blocks, n_vocab;
    int32_t            tables[N_TABLES][TABLE];
};

static void rig_open(struct rig *r, const char *path, const char *isa)
{
    struct err err;
    memset(r, 0, sizeof *r);
    if (kernel_ctx_create(isa, ACTIVATIONS_F32, 2, &r->k, &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
    struct model_options o = { .path = path, .max_rows = ROWS_MAX, .max_model_len = MAX_LEN, .kernels = r->k };
    if (model_load(&o, &r->m, &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
    struct kv_layout l;
    r->n_blocks = TABLE * N_TABLES;
    r->n_vocab = r->m->config.n_vocab;
    model_kv_layout(r->m, BLOCK, r->n_blocks, &l);
    CHECK_OK(kv_layout_check(&l, &err));
    r->kv = mem_aligned(4096, kv_layout_pool_bytes(&l));
    r->logits = MEM_ARRAY(float, (size_t)ROWS_MAX * r->n_vocab);
    for (int32_t s = 0; s < N_TABLES; s++)
        for (int32_t i = 0; i < TABLE; i++) r->tables[s][i] = (TABLE - 1 - i) * N_TABLES + s;
}

static void rig_close(struct rig *r)
{
    mem_free(r->kv);
    mem_free(r->logits);
    model_free(r->m);
    kernel_ctx_free(r->k);
}

/* Some tokens of one sequence in a step. */
struct feed {
    int            table;
    const int32_t *ids;
    int32_t        n, pos;
};

/* One step; the logits of all rows go to r->logits, or to `out` when given. */
static void feed_all(struct rig *r, const struct feed *feeds, int32_t n_feeds, float *out)
{
    int32_t         ids[ROWS_MAX], pos[ROWS_MAX], rows[ROWS_MAX], n = 0;
    struct attn_seq seqs[N_TABLES];
    for (int32_t f = 0; f < n_feeds; f++) {
        seqs[f] = (struct attn_seq){ .q_begin = n, .n_q = feeds[f].n, .pos_begin = feeds[f].pos, .block_table = r->tables[feeds[f].table] };
        for (int32_t i = 0; i < feeds[f].n; i++, n++) {
            ids[n] = feeds[f].ids[i];
            pos[n] = feeds[f].pos + i;
            rows[n] = n;
        }
    }
    struct model_batch b = { .n_rows = n, .ids = ids, .pos = pos, .seqs = seqs, .n_seqs = n_feeds, .logit_rows = rows, .n_logits = n,
                             .logits = out ? out : r->logits, .kv = r->kv, .n_blocks = r->n_blocks, .block_tokens = BLOCK };
    model_forward(r->m, &b);
}

static double logprob(const struct rig *r, const float *row, int32_t id)
{
    double sum = 0, max = -1e30;
    for (uint32_t i = 0; i < r->n_vocab; i++) max = fmax(max, (double)row[i]);
    for (uint32_t i = 0; i < r->n_vocab; i++) sum += exp((double)row[i] - max);
    return (double)row[id] - max - log(sum);
}

static int32_t argmax(const struct rig *r, const float *row)
{
    int32_t best = 0;
    for (uint32_t i = 1; i < r->n_vocab; i++)
        if (row[i] > row[best]) best = (int32_t)i;
    return best;
}

/* ---- golden files ------------------------------------------------------------------------------------------------ */

static size_t read_lines(const char *path, cJSON *out[LINES_MAX])
{
    struct buf text = { 0 };
    struct err err;
    if (file_read(path, 64 << 20, &text, &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
    struct str rest = buf_str(&text), line;
    size_t     n = 0;
    while (str_split(&rest, '\n', &line)) {
        if (line.n == 0) continue;
        CHECK(n < LINES_MAX);
        if (json_parse(line, false, &out[n++], &err) != OK) test_fail(__FILE__, __LINE__, "%s: %s", path, err.text);
    }
    buf_release(&text);
    return n;
}

static int32_t read_ids(const cJSON *array, int32_t *ids)
{
    int32_t      n = 0;
    const cJSON *v;
    cJSON_ArrayForEach(v, array)
    {
        CHECK(n < MAX_LEN);
        ids[n++] = v->valueint;
    }
    return n;
}

static void check_top(const struct rig *r, const float *row, const cJSON *top, double tolerance, const char *what)
{
    const cJSON *pair;
    cJSON_ArrayForEach(pair, top)
    {
        double want = cJSON_GetArrayItem(pair, 1)->valuedouble, have = logprob(r, row, cJSON_GetArrayItem(pair, 0)->valueint);
        if (!(fabs(want - have) <= tolerance))
            test_fail(__FILE__, __LINE__, "%s: logprob of %d is %.6f, expected %.6f", what, cJSON_GetArrayItem(pair, 0)->valueint, have, want);
    }
}

/* Continue from `row` (after `n` tokens) through the expected greedy tokens, one step each. */
static void check_greedy(struct rig *r, int table, const float *row, int32_t n, const cJSON *greedy, double tolerance, int max_steps,
                         const char *what)
{
    const cJSON *g;
    int          steps = 0;
    cJSON_ArrayForEach(g, greedy)
    {
        if (steps++ == max_steps) return;
        int32_t want = json_member(g, "id")->valueint, have = argmax(r, row);
        if (want != have) test_fail(__FILE__, __LINE__, "%s: greedy token %d is %d, expected %d", what, steps, have, want);
        check_top(r, row, json_member(g, "top"), tolerance, what);
        feed_all(r, &(struct feed){ table, &want, 1, n++ }, 1, NULL);
        row = r->logits;
    }
}

static void check_prompt(const struct rig *r, const int32_t *ids, int32_t n, const cJSON *expected, const char *what)
{
    const cJSON *lp = json_member(expected, "prompt_logprobs"), *top = json_member(expected, "prompt_top");
    CHECK_EQ_INT(cJSON_GetArraySize(lp), n);
    CHECK_EQ_INT(cJSON_GetArraySize(top), n);
    for (int32_t i = 0; i < n; i++) {
        if (i > 0) {
            double want = cJSON_GetArrayItem(lp, i)->valuedouble, have = logprob(r, r->logits + (size_t)(i - 1) * r->n_vocab, ids[i]);
            if (!(fabs(want - have) <= 1e-3)) test_fail(__FILE__, __LINE__, "%s: prompt logprob %d is %.6f, expected %.6f", what, i, have, want);
        }
        check_top(r, r->logits + (size_t)i * r->n_vocab, cJSON_GetArrayItem(top, i), 1e-3, what);
    }
}

struct path {
    char text[4096];
};

static struct path golden(const char *name, const char *file)
{
    struct path p;
    char        relative[256];
    snprintf(relative, sizeof relative, "goldens/%s/%s", name, file);
    snprintf(p.text, sizeof p.text, "%s", test_data(relative));
    return p;
}

static void check_golden(const char *name, const char *model_path, const char *isa)
{
    struct rig r;
    cJSON     *requests[LINES_MAX], *expected[LINES_MAX];
    size_t     n = read_lines(golden(name, "requests.jsonl").text, requests);
    CHECK_EQ_INT(read_lines(golden(name, "expected.jsonl").text, expected), n);
    rig_open(&r, model_path, isa);
    for (size_t i = 0; i < n; i++) {
        char    what[256];
        int32_t ids[MAX_LEN], n_ids = read_ids(json_member(json_member(requests[i], "body"), "prompt"), ids);
        snprintf(what, sizeof what, "%s on %s", json_member(requests[i], "custom_id")->valuestring, isa);
        feed_all(&r, &(struct feed){ (int)i % N_TABLES, ids, n_ids, 0 }, 1, NULL);
        check_prompt(&r, ids, n_ids, expected[i], what);
        check_greedy(&r, (int)i % N_TABLES, r.logits + (size_t)(n_ids - 1) * r.n_vocab, n_ids, json_member(expected[i], "greedy"), 1e-3, 1000, what);
        cJSON_Delete(requests[i]);
        cJSON_Delete(expected[i]);
    }
    rig_close(&r);
}

TEST(models_agree_with_their_reference)
{
    for (size_t row = 0; KERNEL_ROWS[row]; row++)
        for (size_t i = 0; KERNEL_ROWS[row]->available() && i < COUNT_OF(TINY); i++)
            check_golden(TINY[i], golden(TINY[i], "model").text, KERNEL_ROWS[row]->name);
}

/* ---- the same weights as GGUF ------------------------------------------------------------------------------------ */

/* What the GGUF converter does to q and k of this architecture: the two halves of a head are interleaved. */
static void interleave_rows(const struct weights_tensor *t, size_t head_dim, uint8_t *out)
{
    size_t rows = (size_t)t->shape[0], row = t->bytes / rows, half = head_dim / 2;
    for (size_t i = 0; i < rows; i++) {
        size_t head = i / head_dim, j = i % head_dim;
        size_t to = head * head_dim + (j < half ? 2 * j : 2 * (j - half) + 1);
        memcpy(out + to * row, t->data + i * row, row);
    }
}

static const char *gguf_part(struct str name, uint32_t *layer)
{
    static const char *const PARTS[][2] = {
        { "input_layernorm", "attn_norm" }, { "post_attention_layernorm", "ffn_norm" }, { "q_proj", "attn_q" }, { "k_proj", "attn_k" },
        { "v_proj", "attn_v" }, { "o_proj", "attn_output" }, { "gate_proj", "ffn_gate" }, { "up_proj", "ffn_up" }, { "down_proj", "ffn_down" },
    };
    struct str part;
    if (!str_starts(name, "model.layers.")) return NULL;
    *layer = (uint32_t)(name.p[13] - '0');
    for (size_t i = 0; i < COUNT_OF(PARTS); i++) {
        part = str_of(PARTS[i][0]);
        if (str_find(name, part) != SIZE_MAX) return PARTS[i][1];
    }
    return NULL;
}

static void copy_tensor(struct gguf_write *w, const struct weights_tensor *t, const struct model_config *c)
{
    char        name[128];
    uint32_t    layer = 0;
    const char *part = gguf_part(t->name, &layer);
    uint64_t    ne[2] = { t->shape[t->n_dims - 1], t->shape[0] };
    if (part) snprintf(name, sizeof name, "blk.%u.%s.%s", layer, part, str_ends(t->name, ".bias") ? "bias" : "weight");
    else snprintf(name, sizeof name, "%s", str_eq_c(t->name, "lm_head.weight") ? "output.weight" : str_eq_c(t->name, "model.norm.weight") ? "output_norm.weight" : "token_embd.weight");
    uint8_t *data = mem_dup(t->data, t->bytes);
    if (part && (strcmp(part, "attn_q") == 0 || strcmp(part, "attn_k") == 0)) interleave_rows(t, c->head_dim, data);
    if (t->n_dims == 1) { /* vectors are f32 in GGUF files */
        float *f = MEM_ARRAY(float, ne[0]);
        dtype_to_f32((enum dtype)t->dtype, data, f, ne[0]);
        gguf_write_tensor(w, name, 0, 1, ne, f, ne[0] * 4);
        mem_free(f);
    } else {
        gguf_write_tensor(w, name, 30, 2, ne, data, t->bytes);
    }
    mem_free(data);
}

static void write_config(struct gguf_write *w, const struct model_config *c)
{
    gguf_write_text(w, "general.architecture", "llama");
    gguf_write_u32(w, "llama.block_count", c->n_layers);
    gguf_write_u32(w, "llama.embedding_length", c->hidden);
    gguf_write_u32(w, "llama.feed_forward_length", c->intermediate);
    gguf_write_u32(w, "llama.attention.head_count", c->n_heads);
    gguf_write_u32(w, "llama.attention.head_count_kv", c->n_kv_heads);
    gguf_write_u32(w, "llama.context_length", c->max_position);
    gguf_write_f32(w, "llama.rope.freq_base", (float)c->rope_theta);
    gguf_write_f32(w, "llama.attention.layer_norm_rms_epsilon", c->rms_eps);
}

/* llama3 scaling as factors: how much each frequency was divided. */
static void write_factors(struct gguf_write *w, const struct model_config *c)
{
    double              scaled[KERNEL_HEAD_DIM_MAX], plain[KERNEL_HEAD_DIM_MAX];
    float               factors[KERNEL_HEAD_DIM_MAX];
    struct model_config none = *c;
    none.rope.kind = ROPE_PLAIN;
    rope_inv_freq(c, NULL, scaled);
    rope_inv_freq(&none, NULL, plain);
    for (uint32_t i = 0; i < c->head_dim / 2; i++) factors[i] = (float)(plain[i] / scaled[i]);
    gguf_write_tensor(w, "rope_freqs.weight", 0, 1, (uint64_t[]){ c->head_dim / 2 }, factors, c->head_dim / 2 * 4);
}

TEST(same_weights_as_gguf_give_the_same_answers)
{
    for (size_t i = 0; i < COUNT_OF(TINY); i++) {
        struct rig        r;
        struct weights   *from;
        struct err        err;
        struct gguf_write w = { 0 };
        struct buf        file = { 0 };
        char              path[4096];
        rig_open(&r, golden(TINY[i], "model").text, "ref");
        CHECK_OK(weights_open(golden(TINY[i], "model").text, &from, &err));
        write_config(&w, &r.m->config);
        for (size_t t = 0; t < from->n_tensors; t++) copy_tensor(&w, &from->tensors[t], &r.m->config);
        write_factors(&w, &r.m->config);
        gguf_write_finish(&w, &file);
        weights_close(from);
        rig_close(&r);
        snprintf(path, sizeof path, "%s/%s.gguf", test_tmpdir(), TINY[i]);
        FILE *f = fopen(path, "wb");
        CHECK(f && fwrite(file.data, 1, file.len, f) == file.len && fclose(f) == 0);
        buf_release(&file);
        check_golden(TINY[i], path, "auto");
    }
}

/* ---- the same bits, however the work is cut ---------------------------------------------------------------------- */

static int32_t pseudo_prompt(int32_t *ids, int32_t n, uint32_t seed, uint32_t n_vocab)
{
    for (int32_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        ids[i] = (int32_t)((seed >> 8) % n_vocab);
    }
    return n;
}

static void check_same_bits(const struct rig *r, const float *have, const float *want, int32_t n, const char *what)
{
    for (int32_t i = 0; i < n; i++)
        if (memcmp(have + (size_t)i * r->n_vocab, want + (size_t)i * r->n_vocab, r->n_vocab * sizeof(float)) != 0)
            test_fail(__FILE__, __LINE__, "%s on %s: the logits of row %d differ", what, r->k->ops->name, i);
}

/* Tokens of the two sequences that share the steps of run_cut. */
struct crowd {
    int32_t ids[2][MAX_LEN], pos[2];
};

/* Up to m tokens of crowd member `o` into the step. */
static int32_t add_crowd(struct crowd *c, int32_t o, int32_t m, struct feed *feeds, int32_t n_feeds)
{
    if (c->pos[o] + m > MAX_LEN) return n_feeds;
    feeds[n_feeds] = (struct feed){ 1 + o, c->ids[o] + c->pos[o], m, c->pos[o] };
    c->pos[o] += m;
    return n_feeds + 1;
}

/* The prompt cut into pieces of the given sizes (repeated), alone or between two other sequences in every step. */
static void run_cut(struct rig *r, const int32_t *ids, int32_t n, const int32_t *sizes, size_t n_sizes, bool crowded, float *out)
{
    struct crowd crowd = { 0 };
    for (uint32_t o = 0; o < 2; o++) pseudo_prompt(crowd.ids[o], MAX_LEN, 77u + o, r->n_vocab);
    for (int32_t pos = 0, i = 0, size; pos < n; i++, pos += size) {
        struct feed feeds[3];
        int32_t     n_feeds = 0;
        size = sizes[(size_t)i % n_sizes];
        if (size > n - pos) size = n - pos;
        if (crowded) n_feeds = add_crowd(&crowd, 0, 1 + i * 5 % 11, feeds, n_feeds);
        int32_t before = n_feeds ? feeds[0].n : 0;
        feeds[n_feeds++] = (struct feed){ 0, ids + pos, size, pos };
        if (crowded) n_feeds = add_crowd(&crowd, 1, 1 + (i * 5 + 3) % 11, feeds, n_feeds);
        feed_all(r, feeds, n_feeds, NULL);
        memcpy(out + (size_t)pos * r->n_vocab, r->logits + (size_t)before * r->n_vocab, (size_t)size * r->n_vocab * sizeof(float));
    }
}

TEST(logits_do_not_depend_on_the_batch)
{
    for (size_t row = 0; KERNEL_ROWS[row]; row++) {
        for (size_t i = 0; KERNEL_ROWS[row]->available() && i < COUNT_OF(TINY); i++) {
            struct rig r;
            int32_t    ids[MAX_LEN], n = 230;
            rig_open(&r, golden(TINY[i], "model").text, KERNEL_ROWS[row]->name);
            pseudo_prompt(ids, n, 5, r.n_vocab);
            float *whole = MEM_ARRAY(float, (size_t)n * r.n_vocab), *cut = MEM_ARRAY(float, (size_t)n * r.n_vocab);
            feed_all(&r, &(struct feed){ 0, ids, n, 0 }, 1, whole);
            run_cut(&r, ids, n, (const int32_t[]){ 64, 7, 1, 33 }, 4, false, cut);
            check_same_bits(&r, cut, whole, n, "chunked");
            run_cut(&r, ids, n, (const int32_t[]){ 16 }, 1, false, cut);
            check_same_bits(&r, cut, whole, n, "chunked by blocks");
            run_cut(&r, ids, n, (const int32_t[]){ 1 }, 1, false, cut);
            check_same_bits(&r, cut, whole, n, "token by token");
            run_cut(&r, ids, n, (const int32_t[]){ 5, 1, 40 }, 3, true, cut);
            check_same_bits(&r, cut, whole, n, "with other sequences");
            mem_free(whole);
            mem_free(cut);
            rig_close(&r);
        }
    }
}

TEST(only_wanted_rows_give_logits_and_equal_the_full_ones)
{
    struct rig r;
    int32_t    ids[8], pos[8] = { 0, 1, 2, 3, 4, 5, 6, 7 }, rows[2] = { 2, 7 };
    rig_open(&r, golden("llama", "model").text, "auto");
    pseudo_prompt(ids, 8, 9, r.n_vocab);
    float *full = MEM_ARRAY(float, 8 * (size_t)r.n_vocab);
    feed_all(&r, &(struct feed){ 0, ids, 8, 0 }, 1, full);
    struct attn_seq    seq = { .q_begin = 0, .n_q = 8, .pos_begin = 0, .block_table = r.tables[0] };
    struct model_batch b = { .n_rows = 8, .ids = ids, .pos = pos, .seqs = &seq, .n_seqs = 1, .logit_rows = rows, .n_logits = 2,
                             .logits = r.logits, .kv = r.kv, .n_blocks = r.n_blocks, .block_tokens = BLOCK };
    model_forward(r.m, &b);
    check_same_bits(&r, r.logits, full + 2 * (size_t)r.n_vocab, 1, "row 2");
    check_same_bits(&r, r.logits + r.n_vocab, full + 7 * (size_t)r.n_vocab, 1, "row 7");
    b.n_logits = 0; /* a chunk in the middle of a prompt */
    model_forward(r.m, &b);
    mem_free(full);
    rig_close(&r);
}

/* ---- the layer callback ------------------------------------------------------------------------------------------ */

struct watch {
    struct rig *r;
    uint32_t    n_calls;
};

/* When a layer is announced its keys are in the pool and those of the next layer are not yet. */
static void watch_layer(void *arg, uint32_t layer)
{
    struct watch    *w = arg;
    struct kv_layout l;
    CHECK_EQ_INT(layer, w->n_calls);
    model_kv_layout(w->r->m, BLOCK, w->r->n_blocks, &l);
    const char *piece = (const char *)w->r->kv + kv_layout_offset(&l, layer, (uint32_t)w->r->tables[0][0]);
    for (uint32_t run = 0; run < kv_layout_n_runs(&l); run++) CHECK(*(const float *)(piece + run * kv_layout_run_stride(&l)) != 0.0f);
    if (layer + 1 < l.n_layers)
        CHECK(*(const float *)((const char *)w->r->kv + kv_layout_offset(&l, layer + 1, (uint32_t)w->r->tables[0][0])) == 0.0f);
    w->n_calls++;
}

TEST(each_layer_is_announced_once_its_kv_is_complete)
{
    struct rig r;
    int32_t    ids[3] = { 5, 6, 7 }, pos[3] = { 0, 1, 2 };
    rig_open(&r, golden("llama_bias", "model").text, "auto");
    struct watch       w = { .r = &r };
    struct attn_seq    seq = { .q_begin = 0, .n_q = 3, .pos_begin = 0, .block_table = r.tables[0] };
    struct model_batch b = { .n_rows = 3, .ids = ids, .pos = pos, .seqs = &seq, .n_seqs = 1, .kv = r.kv, .n_blocks = r.n_blocks,
                             .block_tokens = BLOCK, .on_layer = watch_layer, .on_layer_arg = &w };
    model_forward(r.m, &b);
    CHECK_EQ_INT(w.n_calls, r.m->config.n_layers);
    rig_close(&r);
}

/* ---- a real model ------------------------------------------------------------------------------------------------ */

TEST(smollm2_agrees_with_its_reference)
{
    const char *path = getenv("BATON_TEST_GGUF");
    if (!path) SKIP("BATON_TEST_GGUF does not name SmolLM2-135M-Instruct.Q4_1.gguf: the real model is NOT tested");
    bool   first = true;
    cJSON *expected[LINES_MAX];
    size_t n = read_lines(golden("smollm2", "expected.jsonl").text, expected);
    for (size_t row = 0; KERNEL_ROWS[row]; row++) {
        if (!KERNEL_ROWS[row]->available()) continue;
        struct rig r;
        rig_open(&r, path, KERNEL_ROWS[row]->name);
        for (size_t i = 0; i < (first ? n : 1); i++) { /* the fastest row checks more than the others */
            char    what[256];
            int32_t ids[MAX_LEN];
            int32_t n_ids = read_ids(json_member(expected[i], "prompt_ids"), ids);
            snprintf(what, sizeof what, "%s on %s", json_member(expected[i], "custom_id")->valuestring, KERNEL_ROWS[row]->name);
            feed_all(&r, &(struct feed){ 0, ids, n_ids, 0 }, 1, NULL);
            check_greedy(&r, 0, r.logits + (size_t)(n_ids - 1) * r.n_vocab, n_ids, json_member(expected[i], "greedy"), 5e-3, first ? 48 : 2, what);
        }
        rig_close(&r);
        first = false;
    }
    for (size_t i = 0; i < n; i++) cJSON_Delete(expected[i]);
}

TEST_MAIN(CASE_T(models_agree_with_their_reference, 240), CASE_T(same_weights_as_gguf_give_the_same_answers, 120),
          CASE_T(logits_do_not_depend_on_the_batch, 240), CASE(only_wanted_rows_give_logits_and_equal_the_full_ones),
          CASE(each_layer_is_announced_once_its_kv_is_complete), CASE_T(smollm2_agrees_with_its_reference, 280))
