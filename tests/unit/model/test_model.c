/* test_model.c - loading: every way in which weights can disagree with a configuration, the limits,
 * the fingerprint. */
#include "shared/model/model.h"

#include <stdio.h>
#include <string.h>

#include "shared/base/mem.h"
#include "tests/fixtures/gguf_write.h"
#include "tests/harness/test.h"

enum { HIDDEN = 32, VOCAB = 8, INNER = 64, HEADS = 2, LAYERS = 1 };

/* How the written sample differs from a good one. */
struct twist {
    const char *leave_out, *wrong_shape, *wrong_type; /* tensor names */
    const char *extra;
    uint32_t window, default_len; /* 0: none */
    uint32_t byte;                /* added to every weight byte of the embedding */
};

static void tensor(struct gguf_write *w, const struct twist *t, const char *name, uint32_t n_dims,
                   uint64_t n_in, uint64_t n_out)
{
    static uint8_t zeros[VOCAB * INNER * HIDDEN * 4], changed[VOCAB * HIDDEN * 4];
    const uint8_t *data = zeros;
    uint64_t ne[2] = { n_in, n_out };
    if (t->leave_out && strcmp(t->leave_out, name) == 0) return;
    if (t->wrong_shape && strcmp(t->wrong_shape, name) == 0) ne[0] += 32;
    uint32_t type = t->wrong_type && strcmp(t->wrong_type, name) == 0 ? 24 : 0; /* I8 */
    size_t bytes = ne[0] * ne[1] * (type == 24 ? 1 : 4);
    if (strcmp(name, "token_embd.weight") == 0) {
        memset(changed, (int)t->byte, sizeof changed);
        if (bytes <= sizeof changed) data = changed;
    }
    gguf_write_tensor(w, name, type, n_dims, ne, data, bytes);
}

static void write_sample(const char *path, const struct twist *t)
{
    struct gguf_write w = { 0 };
    struct buf b = { 0 };
    gguf_write_text(&w, "general.architecture", "llama");
    gguf_write_u32(&w, "llama.block_count", LAYERS);
    gguf_write_u32(&w, "llama.embedding_length", HIDDEN);
    gguf_write_u32(&w, "llama.feed_forward_length", INNER);
    gguf_write_u32(&w, "llama.attention.head_count", HEADS);
    gguf_write_u32(&w, "llama.context_length", 128);
    gguf_write_f32(&w, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    if (t->window) gguf_write_u32(&w, "llama.attention.sliding_window", t->window);
    tensor(&w, t, "token_embd.weight", 2, HIDDEN, VOCAB);
    tensor(&w, t, "output_norm.weight", 1, HIDDEN, 1);
    tensor(&w, t, "blk.0.attn_norm.weight", 1, HIDDEN, 1);
    tensor(&w, t, "blk.0.ffn_norm.weight", 1, HIDDEN, 1);
    tensor(&w, t, "blk.0.attn_q.weight", 2, HIDDEN, HIDDEN);
    tensor(&w, t, "blk.0.attn_k.weight", 2, HIDDEN, HIDDEN);
    tensor(&w, t, "blk.0.attn_v.weight", 2, HIDDEN, HIDDEN);
    tensor(&w, t, "blk.0.attn_output.weight", 2, HIDDEN, HIDDEN);
    tensor(&w, t, "blk.0.ffn_gate.weight", 2, HIDDEN, INNER);
    tensor(&w, t, "blk.0.ffn_up.weight", 2, HIDDEN, INNER);
    tensor(&w, t, "blk.0.ffn_down.weight", 2, INNER, HIDDEN);
    if (t->extra) tensor(&w, t, t->extra, 1, HIDDEN, 1);
    gguf_write_finish(&w, &b);
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(b.data, 1, b.len, f) == b.len && fclose(f) == 0);
    buf_release(&b);
}

/* Of a model of 128 positions. */
static uint32_t length_of(const struct twist *t, uint32_t asked)
{
    uint32_t n = asked ? asked : t->default_len && t->default_len < 128 ? t->default_len : 128;
    return !asked && t->window && t->window < n ? t->window : n;
}

static enum status load(const struct twist *t, const char *isa, uint32_t max_len,
                        uint64_t *fingerprint, struct err *err)
{
    char path[4096];
    struct kernel_ctx *k;
    struct model *m;
    snprintf(path, sizeof path, "%s/m.gguf", test_tmpdir());
    write_sample(path, t);
    CHECK_OK(kernel_ctx_create(kernel_options_default(isa, ACTIVATIONS_F32, 1), &k, err));
    struct model_options o = {
        .path = path,
        .max_rows = 4,
        .max_model_len = max_len,
        .default_len = t->default_len,
        .kernels = k,
    };
    enum status st = model_load(&o, &m, err);
    if (st == OK) {
        CHECK(m->weights == NULL && m->weight_bytes > 0 && m->max_len == length_of(t, max_len));
        CHECK(m->rope_bytes == (size_t)m->max_len * (HIDDEN / HEADS) * sizeof(float));
        if (fingerprint) *fingerprint = m->fingerprint;
        model_free(m);
    }
    kernel_ctx_free(k);
    return st;
}

static void refuses(struct twist t, enum status want, const char *words)
{
    struct err err = { 0 };
    CHECK_STATUS(load(&t, "ref", 0, NULL, &err), want);
    if (!strstr(err.text, words))
        test_fail(__FILE__, __LINE__, "\"%s\" does not say \"%s\"", err.text, words);
}

TEST(faults_name_the_tensor)
{
    struct err err;
    CHECK_OK(load(&(struct twist){ 0 }, "ref", 0, NULL, &err));
    refuses((struct twist){ .leave_out = "blk.0.ffn_down.weight" }, ERR_NOT_FOUND,
            "tensor blk.0.ffn_down.weight is missing");
    refuses((struct twist){ .leave_out = "output_norm.weight" }, ERR_NOT_FOUND,
            "tensor output_norm.weight is missing");
    refuses((struct twist){ .wrong_shape = "blk.0.attn_k.weight" }, ERR_FORMAT,
            "tensor blk.0.attn_k.weight has shape [32, 64]");
    refuses((struct twist){ .wrong_shape = "blk.0.ffn_norm.weight" }, ERR_FORMAT,
            "tensor blk.0.ffn_norm.weight has shape");
    refuses((struct twist){ .wrong_type = "blk.0.ffn_up.weight" }, ERR_UNSUPPORTED, "of type I8");
    refuses((struct twist){ .extra = "blk.0.attn_q_norm.weight" }, ERR_UNSUPPORTED,
            "blk.0.attn_q_norm.weight");
    refuses((struct twist){ .extra = "rope_freqs.weight" }, ERR_FORMAT, "rope_freqs.weight");
}

TEST(length_is_bounded_by_the_model)
{
    struct err err;
    CHECK_OK(load(&(struct twist){ 0 }, "ref", 100, NULL, &err));
    CHECK_STATUS(load(&(struct twist){ 0 }, "ref", 129, NULL, &err), ERR_CONFIG);
    CHECK(strstr(err.text, "129") && strstr(err.text, "128"));
}

/* Without max_model_len the length may be less than the model's; with it, it is never less. */
TEST(usual_length)
{
    struct err err;
    CHECK_OK(load(&(struct twist){ .default_len = 40 }, "ref", 0, NULL, &err));
    CHECK_OK(load(&(struct twist){ .default_len = 40 }, "ref", 100, NULL, &err));
    CHECK_OK(load(&(struct twist){ .default_len = 4000 }, "ref", 0, NULL, &err));
    CHECK_OK(load(&(struct twist){ .default_len = 40, .window = 64 }, "ref", 0, NULL, &err));
    CHECK_OK(load(&(struct twist){ .default_len = 100, .window = 64 }, "ref", 0, NULL, &err));
    CHECK_STATUS(load(&(struct twist){ .default_len = 40, .window = 64 }, "ref", 65, NULL, &err),
                 ERR_UNSUPPORTED);
    CHECK_STATUS(load(&(struct twist){ .window = 64 }, "ref", 0, NULL, &err), ERR_UNSUPPORTED);
}

TEST(fingerprint_tells_models_apart)
{
    struct err err;
    uint64_t a = 0, same = 0, other = 0, shorter = 0;
    CHECK_OK(load(&(struct twist){ 0 }, "ref", 0, &a, &err));
    CHECK_OK(load(&(struct twist){ 0 }, "ref", 0, &same, &err));
    CHECK_OK(load(&(struct twist){ .byte = 1 }, "ref", 0, &other, &err));
    CHECK_OK(load(&(struct twist){ 0 }, "ref", 64, &shorter, &err));
    CHECK(a == same && a != other && a == shorter);
    for (size_t i = 0; KERNEL_BACKENDS[i]; i++) {
        uint64_t row = 0;
        if (!KERNEL_BACKENDS[i]->available() || strcmp(KERNEL_BACKENDS[i]->name, "ref") == 0)
            continue;
        CHECK_OK(load(&(struct twist){ 0 }, KERNEL_BACKENDS[i]->name, 0, &row, &err));
        CHECK(row != a);
    }
}

TEST(layout_is_that_of_the_configuration)
{
    struct model_config c = { .n_layers = 30, .n_heads = 9, .n_kv_heads = 3, .head_dim = 64 };
    struct kv_layout l;
    struct err err;
    model_config_kv_layout(&c, NULL, DTYPE_F32, 64, 100, &l);
    CHECK_OK(kv_layout_check(&l, &err));
    CHECK(l.n_layers == 30 && l.n_kv_heads == 3 && l.n_blocks == 100 && l.dtype == DTYPE_F32);
    CHECK_EQ_INT(kv_layout_token_bytes(&l), 1536);
    model_config_kv_layout(&c, NULL, DTYPE_BF16, 64, 100, &l);
    CHECK_EQ_INT(kv_layout_token_bytes(&l), 768);
}

/* DeepSeek-V3: 576 values per token and layer, whatever the number of heads. */
TEST(latent_layout)
{
    struct model_config c = {
        .n_layers = 61,
        .n_heads = 128,
        .n_kv_heads = 128,
        .head_dim = 192,
        .mla = { .q_lora = 1536, .kv_lora = 512, .nope = 128, .rope = 64, .v = 128 }
    };
    struct kv_layout l;
    struct err err;
    model_config_kv_layout(&c, NULL, DTYPE_BF16, 64, 10, &l);
    CHECK_OK(kv_layout_check(&l, &err));
    CHECK(l.n_kv_heads == 1 && l.head_dim == 576);
    CHECK_EQ_INT(kv_layout_token_bytes(&l) * l.n_layers, 70272);
}

TEST(more_than_the_host_has_is_refused_in_a_sentence)
{
    struct err err;
    struct kernel_ctx *k;
    struct model *m;
    char path[4096];
    snprintf(path, sizeof path, "%s/m.gguf", test_tmpdir());
    write_sample(path, &(struct twist){ 0 });
    CHECK_OK(kernel_ctx_create(kernel_options_default("ref", ACTIVATIONS_F32, 1), &k, &err));
    struct model_options o = { .path = path, .max_rows = UINT32_MAX, .kernels = k };
    CHECK_STATUS(model_load(&o, &m, &err), ERR_NOMEM);
    CHECK(strstr(err.text, "GiB are available") && strstr(err.text, "--max-num-batched-tokens"));
    kernel_ctx_free(k);
}

TEST_MAIN(CASE(faults_name_the_tensor), CASE(length_is_bounded_by_the_model), CASE(usual_length),
          CASE(fingerprint_tells_models_apart), CASE(layout_is_that_of_the_configuration),
          CASE(latent_layout), CASE(more_than_the_host_has_is_refused_in_a_sentence))
