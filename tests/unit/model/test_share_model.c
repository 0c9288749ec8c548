/* test_share_model.c - a share of a model is loaded: what is read of the checkpoint, what is known
 * to be another rank's, memory, fingerprint, weight cache, KV layout. */
#include <dirent.h>

#include "shared/kv/kv_parts.h"
#include "tests/fixtures/checkpoint_write.h"
#include "tests/fixtures/model_rig.h"

static struct kernel_ctx *open_kernels(void)
{
    struct kernel_ctx *k;
    struct err err;
    CHECK_OK(kernel_ctx_create(kernel_options_default("ref", ACTIVATIONS_F32, 1), &k, &err));
    return k;
}

static struct model *load(struct kernel_ctx *k, const char *path, const struct model_share *share,
                          const char *cache)
{
    struct model *m;
    struct err err;
    const struct model_options o = {
        .path = path,
        .max_rows = 4,
        .max_model_len = 64,
        .kernels = k,
        .share = share,
        .weight_cache_folder = cache,
    };
    if (model_load(&o, &m, &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
    return m;
}

/* ---- bytes that are read ---- */

static bool is_any_of(const char *name, const char *const *parts, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (strstr(name, parts[i])) return true;
    return false;
}

/* How often `size` ranks together read the matrix. */
static size_t n_reads(const char *name, const struct model_config *c, size_t size)
{
    static const char *const CUT[] = { "q_proj",  "q_b_proj",      "kv_b_proj",   "o_proj",
                                       "lm_head", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj" },
                             *const KV[] = { "k_proj", "v_proj" };
    if (strstr(name, "embed_tokens")) return size + (size > 1 && c->tied); /* again as the head */
    if (is_any_of(name, KV, COUNT_OF(KV))) return size > c->n_kv_heads ? size / c->n_kv_heads : 1;
    return is_any_of(name, CUT, COUNT_OF(CUT)) ? 1 : size;
}

static size_t bytes_of_ranks(const char *name, const struct model_config *c, size_t size)
{
    struct checkpoint *s = checkpoint_read(golden(name, "model").text);
    size_t bytes = 0;
    for (size_t i = 0; i < s->n; i++) {
        unsigned long layer;
        const struct checkpoint_tensor *t = &s->t[i];
        const bool is_draft = strstr(t->name, "mtp_") ||
                              (sscanf(t->name, "model.layers.%lu.", &layer) == 1 &&
                               layer >= c->n_layers);
        if (t->n_dims == 2 && t->shape[0] > 1 && !is_draft)
            bytes += t->bytes * n_reads(t->name, c, size);
    }
    checkpoint_release(s);
    return bytes;
}

TEST(ranks_together_read_every_matrix_once_and_whole_ones_each)
{
    static const char *const NAMES[] = { "llama",     "llama_bias",  "qwen2",
                                         "qwen3_moe", "ernie_moe",   "ernie_moe_untied",
                                         "mixtral",   "deepseek_v3", "deepseek_v2_lite" };
    struct kernel_ctx *k = open_kernels();
    for (size_t i = 0; i < COUNT_OF(NAMES); i++) {
        const struct path p = golden(NAMES[i], "model");
        struct model *whole = load(k, p.text, NULL, NULL);
        for (uint32_t size = 1; size <= whole->config.n_heads; size++) {
            struct model_share s = { .tp_size = size, .n_experts = SHARE_ALL_EXPERTS };
            size_t bytes = 0;
            s.n_experts = whole->config.moe.n_experts;
            if (model_share_check(&s, &whole->config, NULL) != OK) continue;
            for (s.tp_rank = 0; s.tp_rank < size; s.tp_rank++) {
                struct model *m = load(k, p.text, &s, NULL);
                bytes += m->source_bytes;
                CHECK(m->fingerprint == whole->fingerprint);
                CHECK(size == 1 ? m->weight_bytes == whole->weight_bytes
                                : m->source_bytes < whole->source_bytes);
                model_free(m);
            }
            CHECK_EQ_INT(bytes, bytes_of_ranks(NAMES[i], &whole->config, size));
        }
        model_free(whole);
    }
    kernel_ctx_free(k);
}

/* Widths at which padding to whole pages does not count. */
TEST(the_memory_of_a_rank_is_that_of_its_share)
{
    static const char CONFIG[] =
        "{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\",\"hidden_size\":512,"
        "\"num_hidden_layers\":4,\"num_attention_heads\":8,\"num_key_value_heads\":8,"
        "\"intermediate_size\":2048,\"vocab_size\":1024,\"max_position_embeddings\":64,"
        "\"rms_norm_eps\":1e-6,\"rope_theta\":10000.0,\"hidden_act\":\"silu\","
        "\"tie_word_embeddings\":false}";
    struct kernel_ctx *k = open_kernels();
    const char *folder = test_tmpdir();
    struct model *m[2];
    struct err err;
    struct kv_layout kv[2];
    const struct model_share quarter = { .tp_rank = 3, .tp_size = 4 };
    checkpoint_put_file(folder, "config.json", str_of(CONFIG));
    for (int i = 0; i < 2; i++) {
        const struct model_options o = { .path = folder,
                                         .max_rows = 256,
                                         .dummy = true,
                                         .kernels = k,
                                         .share = i ? &quarter : NULL };
        if (model_load(&o, &m[i], &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
        model_kv_layout(m[i], 16, 8, &kv[i]);
    }
    const size_t embedding = 1024 * 512 * 2 /* bf16 */;
    CHECK_NEAR((double)(m[1]->weight_bytes - embedding),
               (double)(m[0]->weight_bytes - embedding) / 4, 0.02 * (double)m[0]->weight_bytes);
    CHECK(m[1]->buffer_bytes < m[0]->buffer_bytes);
    CHECK_EQ_INT(kv_layout_pool_bytes(&kv[1]), kv_layout_pool_bytes(&kv[0]) / 4);
    for (int i = 0; i < 2; i++) model_free(m[i]);
    kernel_ctx_free(k);
}

/* ---- experts ---- */

static enum status load_rewritten(struct checkpoint *s, const struct model_share *share,
                                  struct err *err)
{
    struct kernel_ctx *k = open_kernels();
    struct buf config = { 0 };
    struct model *m;
    const char *folder = test_tmpdir();
    CHECK_OK(file_read(golden("qwen3_moe", "model/config.json").text, 1 << 20, &config, err));
    checkpoint_write_folder(s, folder, buf_str(&config));
    const struct model_options o = { .path = folder, .max_rows = 4, .kernels = k, .share = share };
    const enum status st = model_load(&o, &m, err);
    if (st == OK) model_free(m);
    buf_release(&config);
    checkpoint_release(s);
    kernel_ctx_free(k);
    return st;
}

/* Of qwen3_moe's 8 experts this rank has 2, 3 and 4. */
static const struct model_share SOME = { .tp_size = 1, .first_expert = 2, .n_experts = 3 };

TEST(experts_of_other_ranks_are_known_and_not_read)
{
    const struct path p = golden("qwen3_moe", "model");
    struct kernel_ctx *k = open_kernels();
    struct model *whole = load(k, p.text, NULL, NULL), *m = load(k, p.text, &SOME, NULL);
    struct checkpoint *s = checkpoint_read(p.text);
    size_t others = 0;
    for (size_t i = 0; i < s->n; i++) {
        const char *at = strstr(s->t[i].name, ".experts.");
        unsigned long e;
        if (at && sscanf(at, ".experts.%lu.", &e) == 1 && (e < 2 || e > 4)) others += s->t[i].bytes;
    }
    CHECK(others > 0);
    CHECK_EQ_INT(whole->source_bytes - m->source_bytes, others);
    CHECK(m->weight_bytes < whole->weight_bytes && m->fingerprint == whole->fingerprint);
    checkpoint_release(s);
    model_free(whole);
    model_free(m);
    kernel_ctx_free(k);
}

/* What is another rank's has to be there, in its shape; what is nobody's is still refused. */
TEST(faults_in_experts_of_other_ranks_are_found)
{
    static const char NAME[] = "model.layers.2.mlp.experts.6.up_proj.weight";
    const struct path p = golden("qwen3_moe", "model");
    struct err err;
    struct checkpoint *s = checkpoint_read(p.text);
    CHECK_OK(load_rewritten(s, &SOME, &err));
    s = checkpoint_read(p.text);
    CHECK(checkpoint_find(s, NAME) != NULL);
    checkpoint_drop(checkpoint_find(s, NAME));
    CHECK_STATUS(load_rewritten(s, &SOME, &err), ERR_NOT_FOUND);
    CHECK(strstr(err.text, NAME) != NULL);
    s = checkpoint_read(p.text);
    checkpoint_find(s, NAME)->shape[0] /= 2;
    checkpoint_find(s, NAME)->bytes /= 2;
    CHECK_STATUS(load_rewritten(s, &SOME, &err), ERR_FORMAT);
    CHECK(strstr(err.text, NAME) != NULL);
    s = checkpoint_read(p.text);
    checkpoint_rename(checkpoint_find(s, NAME), "experts.6", "experts.60");
    checkpoint_add(s, NAME, "BF16", DTYPE_BF16, 2,
                   checkpoint_find(s, "model.layers.2.mlp.experts.5."
                                      "up_proj.weight")
                       ->shape);
    CHECK_STATUS(load_rewritten(s, &SOME, &err), ERR_UNSUPPORTED);
    CHECK(strstr(err.text, "experts.60.up_proj.weight has no place") != NULL);
}

/* ---- sizes ---- */

TEST(a_size_that_does_not_divide_the_heads_is_refused_before_weights_are_read)
{
    struct kernel_ctx *k = open_kernels();
    struct err err = { 0 };
    const struct model_share three = { .tp_size = 3, .n_experts = SHARE_ALL_EXPERTS };
    const struct path p = golden("qwen3", "model");
    const struct model_options o = { .path = p.text, .max_rows = 4, .kernels = k, .share = &three };
    CHECK_STATUS(model_check(&o, &err), ERR_INVALID);
    CHECK(strstr(err.text, "4 query heads and 2 KV heads of this model; these do: 1, 2, 4"));
    kernel_ctx_free(k);
}

/* Heads of 16 outputs would share blocks of 128 rows. */
TEST(heads_that_would_share_a_scale_are_refused)
{
    struct kernel_ctx *k = open_kernels();
    struct err err = { 0 };
    const struct model_share two = { .tp_size = 2, .n_experts = SHARE_ALL_EXPERTS };
    const struct path p = golden("qwen3", "model");
    const struct model_options o = {
        .path = p.text, .max_rows = 4, .kernels = k, .quantize = QUANTIZE_BLOCK_FP8, .share = &two
    };
    CHECK_STATUS(model_check(&o, &err), ERR_UNSUPPORTED);
    CHECK(strstr(err.text, "q_proj: a rank's heads, rows 0 to ") &&
          strstr(err.text, "--quantization block_wise_fp8"));
    kernel_ctx_free(k);
}

/* ---- weight cache ---- */

static size_t n_files(const char *folder, const char *suffix)
{
    size_t n = 0;
    DIR *d = opendir(folder);
    CHECK(d != NULL);
    for (const struct dirent *e; (e = readdir(d));) n += str_ends(str_of(e->d_name), suffix);
    closedir(d);
    return n;
}

/* Experts are whole on every rank that has them: all shares have one file of them. */
TEST(ranks_of_a_node_have_files_of_their_own_in_the_weight_cache)
{
    const struct path p = golden("qwen3_moe", "model");
    const char *folder = test_tmpdir();
    struct kernel_ctx *k = open_kernels();
    const struct model_share all = { .tp_size = 1, .n_experts = SHARE_ALL_EXPERTS }, ranks[] = {
        { .tp_size = 2, .n_experts = SHARE_ALL_EXPERTS },
        { .tp_rank = 1, .tp_size = 2, .n_experts = SHARE_ALL_EXPERTS },
        SOME
    };
    for (int again = 0; again < 2; again++) {
        for (size_t i = 0; i < COUNT_OF(ranks); i++) {
            struct model *m = load(k, p.text, &ranks[i], folder);
            CHECK(m->mapped_bytes > 0);
            model_free(m);
            CHECK_EQ_INT(n_files(folder, ".packed"), again ? COUNT_OF(ranks) : i + 1);
            CHECK_EQ_INT(n_files(folder, ".experts"), 1);
        }
    }
    model_free(load(k, p.text, NULL, folder));
    model_free(load(k, p.text, &all, folder));
    CHECK(n_files(folder, ".packed") == COUNT_OF(ranks) && n_files(folder, ".experts") == 1);
    kernel_ctx_free(k);
}

/* ---- KV layout ---- */

static struct kv_layout layout_of(const struct model_config *c, uint32_t rank, uint32_t size)
{
    const struct model_share s = { .tp_rank = rank, .tp_size = size };
    struct kv_layout l;
    struct err err;
    model_config_kv_layout(c, &s, DTYPE_BF16, 16, 8, &l);
    CHECK_OK(kv_layout_check(&l, &err));
    return l;
}

/* By their bytes on the wire, which have no padding. */
static void check_same_layout(const struct kv_layout *a, const struct kv_layout *b)
{
    struct buf x = { 0 }, y = { 0 };
    kv_layout_encode(a, &x);
    kv_layout_encode(b, &y);
    CHECK(x.len == y.len && memcmp(x.data, y.data, x.len) == 0);
    buf_release(&x);
    buf_release(&y);
}

TEST(kv_layouts_name_the_ranks_heads)
{
    const struct model_config c = { .n_layers = 2, .n_heads = 8, .n_kv_heads = 4, .head_dim = 32 };
    struct err err;
    uint32_t first;
    const struct kv_layout one = layout_of(&c, 0, 1);
    for (uint32_t size = 1; size <= 8; size *= 2)
        for (uint32_t r = 0; r < size; r++) {
            const struct kv_layout l = layout_of(&c, r, size);
            const struct model_share s = { .tp_rank = r, .tp_size = size };
            CHECK(l.tp_rank == r && l.tp_size == size);
            CHECK_EQ_INT(l.first_head, share_kv_heads(&s, 4).first);
            CHECK_EQ_INT(l.model_kv_heads, 4);
            const struct kv_layout same = kv_layout_of_rank(&one, r, size);
            check_same_layout(&same, &l);
            CHECK_OK(kv_layout_same_model(&one, &l, &err));
            CHECK_EQ_INT(kv_layout_common_heads(&one, &l, &first), size < 4 ? 4 / size : 1);
        }
}

/* Ranks 2 and 3 of 4 hold the second of two heads. */
TEST(a_head_on_several_ranks_has_one_number)
{
    const struct model_config c = { .n_layers = 2, .n_heads = 8, .n_kv_heads = 2, .head_dim = 32 };
    const struct kv_layout one = layout_of(&c, 0, 1), third = layout_of(&c, 2, 4);
    struct err err;
    uint32_t first;
    CHECK(third.n_kv_heads == 1 && third.first_head == 1 && third.model_kv_heads == 2);
    CHECK_OK(kv_layout_same_model(&one, &third, &err));
    CHECK_EQ_INT(kv_layout_common_heads(&one, &third, &first), 1);
    CHECK_EQ_INT(first, 1);
}

TEST(latents_are_whole_on_every_rank)
{
    const struct model_config c = { .n_layers = 2,
                                    .n_heads = 8,
                                    .n_kv_heads = 8,
                                    .mla = { .kv_lora = 64, .rope = 16, .nope = 32, .v = 32 } };
    const struct kv_layout one = layout_of(&c, 0, 1), last = layout_of(&c, 7, 8);
    struct err err;
    uint32_t first;
    CHECK_OK(kv_layout_same_model(&one, &last, &err));
    CHECK(last.tp_rank == 7 && last.n_kv_heads == 1 && last.head_dim == 80);
    CHECK_EQ_INT(kv_layout_common_heads(&one, &last, &first), 1);
}

TEST_MAIN(CASE(ranks_together_read_every_matrix_once_and_whole_ones_each),
          CASE(the_memory_of_a_rank_is_that_of_its_share),
          CASE(experts_of_other_ranks_are_known_and_not_read),
          CASE(faults_in_experts_of_other_ranks_are_found),
          CASE(a_size_that_does_not_divide_the_heads_is_refused_before_weights_are_read),
          CASE(heads_that_would_share_a_scale_are_refused),
          CASE(ranks_of_a_node_have_files_of_their_own_in_the_weight_cache),
          CASE(kv_layouts_name_the_ranks_heads), CASE(a_head_on_several_ranks_has_one_number),
          CASE(latents_are_whole_on_every_rank))
