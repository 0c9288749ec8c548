/* test_dummy_weights.c - dummy weights: their numbers, how each kernel backend packs them, and
 * models of a configuration without weight files.
 *
 * A dummy source must be packed to the same bytes as its elements would be if they were read from a
 * file, also on a GPU, where they are never in host memory. */
#include "tests/conformance/kernel_fixture.h"
#include "tests/fixtures/model_rig.h"

#include "kernels/cpu/cpu_backend.h"
#include "kernels/weight_src.h"
#include "shared/model/config/config_hf.h"
#include "shared/model/decoder.h"
#include "shared/model/load/weights.h"

/* ---- numbers ---- */

static float dummy_at(const struct dummy_weights *m, uint64_t place)
{
    return dtype_bf16_to_f32(dummy_weight_bf16(m, place));
}

/* The numbers are nearly normal and uncorrelated, and each seed gives another sequence. */
TEST(numbers_are_spread_as_promised)
{
    enum { N = 1 << 18 };
    const struct dummy_weights m = { .seed = 42, .unit = 1 / DUMMY_WEIGHTS_STDDEV },
                               other = { .seed = 43, .unit = 1 / DUMMY_WEIGHTS_STDDEV };
    double sum = 0, squares = 0, with_next = 0, with_other = 0, with_row = 0;
    size_t n_above_two = 0;
    for (size_t i = 0; i < N; i++) {
        const double x = (double)dummy_at(&m, i);
        CHECK(fabs(x) <= 510.5 / (double)DUMMY_WEIGHTS_STDDEV);
        sum += x, squares += x * x;
        with_next += x * (double)dummy_at(&m, i + 1),
            with_row += x * (double)dummy_at(&m, i + 4096),
            with_other += x * (double)dummy_at(&other, i);
        n_above_two += fabs(x) > 2;
    }
    const double noise = 4 / sqrt((double)N); /* four deviations of a mean of N */
    CHECK_NEAR(sum / N, 0, noise);
    CHECK_NEAR(squares / N, 1, 0.01);
    CHECK_NEAR(with_next / N, 0, noise);
    CHECK_NEAR(with_row / N, 0, noise);
    CHECK_NEAR(with_other / N, 0, noise);
    CHECK_NEAR((double)n_above_two / N, 0.04, 0.01);
}

/* All nodes of one version generate the same numbers: these are version 1's, from an implementation
 * in Python. */
TEST(numbers_are_those_of_the_version)
{
    static const uint16_t WANT[] = {
        0x3eae, 0x3de1, 0x3f94, 0xbf88, 0x3cf6, 0xbfed, 0x3ffb, 0x3f91
    };
    const struct dummy_weights m = { .seed = 0x0123456789abcdefu, .at = 7, .unit = 0.01f };
    CHECK_EQ_INT(DUMMY_WEIGHTS_VERSION, 1);
    for (size_t i = 0; i < COUNT_OF(WANT); i++)
        CHECK_EQ_INT(dummy_weight_bf16(&m, i * 1000003), WANT[i]);
}

/* ---- packing ---- */

struct shape {
    enum dtype dtype;
    enum quantize quantize;
    enum weight_join join;
    size_t n_parts, n_out[2], n_in, gap /* elements between stored rows */;
    bool transposed;
};

static struct weight_src dummy_part(const struct shape *s, size_t p)
{
    const size_t across = s->transposed ? s->n_out[p] : s->n_in;
    return (struct weight_src){
        .dtype = s->dtype,
        .n_out = s->n_out[p],
        .n_in = s->n_in,
        .transposed = s->transposed,
        .row_bytes = s->gap ? (across + s->gap) * dtype_block_bytes(s->dtype) : 0,
        .dummy = { .seed = 11 + p, .at = 3 * p, .unit = 0.0007f },
    };
}

/* The elements of a dummy source written to memory in the layout that it states. */
static struct weight_src written_part(const struct weight_src *from)
{
    struct weight_src s = *from;
    const size_t size = dtype_block_bytes(s.dtype), across = s.transposed ? s.n_out : s.n_in,
                 down = s.transposed ? s.n_in : s.n_out;
    const size_t stored = s.row_bytes ? s.row_bytes / size : across;
    uint8_t *data = mem_calloc(down * stored, size);
    for (size_t r = 0; r < down; r++)
        for (size_t c = 0; c < across; c++) {
            const uint16_t bits = dummy_weight_bf16(&s.dummy, r * stored + c);
            const float wide = dtype_bf16_to_f32(bits);
            memcpy(data + (r * stored + c) * size,
                   size == 2 ? (const void *)&bits : (const void *)&wide, size);
        }
    s.data = data;
    s.dummy = (struct dummy_weights){ 0 };
    return s;
}

static uint8_t *packed_bytes(struct kernel_ctx *c, const struct weight_pack_args *a, size_t *n)
{
    struct weight w;
    struct err err;
    if (c->weight_ops->pack(c, a, &w, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s: %s", c->backend->name, err.text);
    uint8_t *bytes = mem_calloc(w.bytes, 1);
    device_download(c->device, bytes, w.data, w.bytes);
    CHECK_OK(device_fault(c->device, NULL));
    *n = w.bytes;
    weight_release(c, &w);
    return bytes;
}

static void check_packed(struct kernel_ctx *c, const struct shape *s)
{
    struct weight_src dummy[2], written[2];
    size_t n, n_written;
    for (size_t p = 0; p < s->n_parts; p++) {
        dummy[p] = dummy_part(s, p);
        written[p] = written_part(&dummy[p]);
    }
    struct weight_pack_args a = {
        .parts = dummy, .n_parts = s->n_parts, .join = s->join, .quantize = s->quantize
    };
    uint8_t *have = packed_bytes(c, &a, &n);
    a.parts = written;
    uint8_t *want = packed_bytes(c, &a, &n_written);
    CHECK_EQ_INT(n, n_written);
    for (size_t i = 0; i < n; i++)
        if (have[i] != want[i])
            test_fail(__FILE__, __LINE__,
                      "%s, %s, quantization %d, %zu x %zu: byte %zu is %d, not %d",
                      c->backend->name, dtype_name(s->dtype), (int)s->quantize, s->n_out[0],
                      s->n_in, i, have[i], want[i]);
    for (size_t p = 0; p < s->n_parts; p++) mem_free((void *)(uintptr_t)written[p].data);
    mem_free(have);
    mem_free(want);
}

static void check_all_packed(const char *isa, enum activations activations)
{
    static const enum quantize HOW[] = { QUANTIZE_NONE, QUANTIZE_WINT8, QUANTIZE_WINT4,
                                         QUANTIZE_BLOCK_FP8 };
    static const struct shape SHAPES[] = {
        { .n_parts = 1, .n_out = { 1 }, .n_in = 1 },
        { .n_parts = 1, .n_out = { 37 }, .n_in = 131 },
        { .n_parts = 1, .n_out = { 200 }, .n_in = 320, .gap = 5 },
        { .n_parts = 1, .n_out = { 130 }, .n_in = 70, .transposed = true },
        { .n_parts = 1, .n_out = { 24 }, .n_in = 260, .transposed = true, .gap = 9 },
        { .n_parts = 2, .n_out = { 128, 48 }, .n_in = 192 },
        { .n_parts = 2, .n_out = { 144, 144 }, .n_in = 96, .join = JOIN_PAIRED },
    };
    struct kernel_ctx *c;
    struct err err;
    CHECK_OK(kernel_ctx_create(kernel_options_default(isa, activations, 2), &c, &err));
    for (size_t i = 0; i < COUNT_OF(SHAPES); i++)
        for (size_t q = 0; q < COUNT_OF(HOW); q++)
            for (int wide = 0; wide < 2; wide++) {
                struct shape s = SHAPES[i];
                s.quantize = HOW[q];
                s.dtype = wide ? DTYPE_F32 : DTYPE_BF16;
                check_packed(c, &s);
            }
    kernel_ctx_free(c);
}

TEST(packed_as_if_files_held_them)
{
    check_all_packed("auto", ACTIVATIONS_FAST); /* all CPU backends pack alike */
}

TEST(packed_on_a_gpu_as_if_files_held_them)
{
    if (!has_gpu())
        SKIP("no CUDA GPU, and no emulated one in this build: dummy weights were NOT made on it");
    check_all_packed("cuda", ACTIVATIONS_FAST);
    check_all_packed("cuda", ACTIVATIONS_F32);
}

TEST(types_without_dummy_weights_are_refused)
{
    struct kernel_ctx *c;
    struct err err;
    struct weight w;
    CHECK_OK(kernel_ctx_create(kernel_options_default("ref", ACTIVATIONS_FAST, 1), &c, &err));
    const struct weight_src s = {
        .dtype = DTYPE_Q8_0, .n_out = 16, .n_in = 32, .dummy = { .seed = 1, .unit = 1 }
    };
    const struct weight_pack_args a = { .parts = &s, .n_parts = 1 };
    CHECK_STATUS(c->weight_ops->pack(c, &a, &w, &err), ERR_UNSUPPORTED);
    CHECK(strstr(err.text, "q8_0") != NULL);
    kernel_ctx_free(c);
}

/* ---- models ---- */

/* Makes a folder that has only the configuration of a golden model. */
static void copy_config(const char *from, char folder[4096])
{
    char path[4200];
    struct buf text = { 0 };
    struct err err;
    snprintf(folder, 4096, "%s", test_tmpdir());
    snprintf(path, sizeof path, "goldens/%s/model/config.json", from);
    CHECK_OK(file_read(test_data(path), 1 << 20, &text, &err));
    snprintf(path, sizeof path, "%s/config.json", folder);
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(text.data, 1, text.len, f) == text.len && fclose(f) == 0);
    buf_release(&text);
}

static void open_dummy(struct rig *r, const char *folder, const char *isa,
                       enum activations activations, enum quantize quantize)
{
    rig_open_with(r, (struct model_options){ .path = folder, .dummy = true, .quantize = quantize },
                  isa, activations);
}

enum { N_IDS = 24 };

/* The logits are finite, have about the expected spread, and differ between tokens. */
static void check_logits(struct rig *r, const char *name)
{
    int32_t ids[N_IDS];
    double squares = 0;
    for (int32_t i = 0; i < N_IDS; i++) ids[i] = (i * 37 + 5) % (int32_t)r->n_vocab;
    feed_all(r, &(struct feed){ .table = 0, .ids = ids, .n = N_IDS }, 1, NULL);
    for (size_t i = 0; i < (size_t)N_IDS * r->n_vocab; i++) {
        if (!isfinite(r->logits[i]))
            test_fail(__FILE__, __LINE__, "%s on %s: logit %zu is %g", name, r->k->backend->name, i,
                      (double)r->logits[i]);
        squares += (double)r->logits[i] * (double)r->logits[i];
    }
    const double deviation = sqrt(squares / ((double)N_IDS * r->n_vocab));
    if (!(deviation > 0.2 && deviation < 5))
        test_fail(__FILE__, __LINE__, "%s on %s: logits have a deviation of %g", name,
                  r->k->backend->name, deviation);
    CHECK(memcmp(r->logits, r->logits + r->n_vocab, r->n_vocab * sizeof(float)) != 0);
}

TEST(a_configuration_is_enough)
{
    for (size_t i = 0; i < COUNT_OF(GOLDENS); i++) {
        char folder[4096];
        struct rig r;
        uint64_t fingerprint;
        copy_config(GOLDENS[i], folder);
        open_dummy(&r, folder, "ref", ACTIVATIONS_F32, QUANTIZE_NONE);
        check_logits(&r, GOLDENS[i]);
        fingerprint = r.m->fingerprint;
        rig_close(&r);
        CHECK_EQ_INT(fingerprint >> 32, 0x44554d4d);
        rig_open(&r, golden(GOLDENS[i], "model").text, "ref");
        CHECK(r.m->fingerprint >> 32 != 0x44554d4d);
        rig_close(&r);
    }
}

/* A fingerprint depends on the model, backend, arithmetic and quantisation, and is the same on
 * every node. */
TEST(fingerprints_tell_dummies_apart)
{
    char folder[4096];
    uint64_t seen[6];
    size_t n = 0;
    struct rig r;
    copy_config("qwen3_moe", folder);
    for (int q = QUANTIZE_NONE; q <= QUANTIZE_BLOCK_FP8; q++) {
        open_dummy(&r, folder, "ref", ACTIVATIONS_FAST, (enum quantize)q);
        check_logits(&r, "qwen3_moe");
        seen[n++] = r.m->fingerprint;
        rig_close(&r);
    }
    copy_config("qwen3_moe_nonorm", folder);
    open_dummy(&r, folder, "ref", ACTIVATIONS_FAST, QUANTIZE_NONE);
    seen[n++] = r.m->fingerprint;
    rig_close(&r);
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < i; j++) CHECK(seen[i] != seen[j]);
    copy_config("qwen3_moe", folder);
    open_dummy(&r, folder, "ref", ACTIVATIONS_FAST, QUANTIZE_NONE);
    CHECK(r.m->fingerprint == seen[0]);
    rig_close(&r);
}

/* ---- experts ---- */

enum { N_EXPERTS = 16, N_SPARSE_MAX = 16, N_ROUTED = 512 };

static size_t times_used[N_SPARSE_MAX][N_EXPERTS], n_routes;
static const struct kernel_ops *counted_ops;

static void counting_router(struct kernel_ctx *c, const struct router_args *router)
{
    const struct route_args *a = &router->route;
    counted_ops->router(c, router);
    CHECK(n_routes < N_SPARSE_MAX && a->n_experts == N_EXPERTS);
    for (size_t i = 0; i < a->n_rows * (size_t)a->n_used; i++)
        times_used[n_routes][a->experts[i]]++;
    n_routes++;
}

/* Counts how often each expert is chosen for a prompt of N_ROUTED different tokens. */
static void count_experts(struct rig *r)
{
    int32_t ids[N_ROUTED];
    struct kernel_ops ops = *r->k->ops;
    for (int32_t i = 0; i < N_ROUTED; i++)
        ids[i] = (int32_t)((uint32_t)i * 2654435761u % r->n_vocab);
    memset(times_used, 0, sizeof times_used);
    n_routes = 0;
    counted_ops = r->k->ops;
    ops.router = counting_router;
    r->k->ops = &ops;
    feed_all(r, &(struct feed){ .table = 0, .ids = ids, .n = N_ROUTED }, 1, NULL);
    r->k->ops = counted_ops;
}

/* Through many layers, the outputs of attention and experts must not make all tokens alike. */
TEST(experts_are_used_alike)
{
    static const char *const CONFIGS[] = {
        "{\"architectures\":[\"Qwen3MoeForCausalLM\"],\"hidden_size\":256,\"intermediate_size\":"
        "512,\"num_hidden_layers\":16,\"num_attention_heads\":4,"
        "\"num_key_value_heads\":2,\"head_dim\":64,\"vocab_size\":2048,\"num_experts\":16,\"num_"
        "experts_per_tok\":2,\"moe_intermediate_size\":128,"
        "\"norm_topk_prob\":true}",
        "{\"architectures\":[\"Ernie4_5_MoeForCausalLM\"],\"hidden_size\":256,\"intermediate_"
        "size\":512,\"num_hidden_layers\":10,\"num_attention_heads\":4,"
        "\"num_key_value_heads\":2,\"vocab_size\":2048,\"moe_num_experts\":16,\"moe_k\":2,\"moe_"
        "intermediate_size\":128,\"moe_num_shared_experts\":2,"
        "\"moe_layer_start_index\":1}",
    };
    const double mean = 2.0 * N_ROUTED / N_EXPERTS;
    for (size_t m = 0; m < COUNT_OF(CONFIGS); m++) {
        char path[4200];
        struct rig r;
        const char *folder = test_tmpdir();
        snprintf(path, sizeof path, "%s/config.json", folder);
        FILE *f = fopen(path, "wb");
        CHECK(f && fputs(CONFIGS[m], f) >= 0 && fclose(f) == 0);
        open_dummy(&r, folder, "auto", ACTIVATIONS_FAST, QUANTIZE_NONE);
        count_experts(&r);
        CHECK_EQ_INT(n_routes, m == 0 ? 16 : 9);
        for (size_t l = 0; l < n_routes; l++)
            for (size_t e = 0; e < N_EXPERTS; e++)
                if (!((double)times_used[l][e] > mean / 3 && (double)times_used[l][e] < mean * 2))
                    test_fail(
                        __FILE__, __LINE__,
                        "model %zu, layer %zu: expert %zu has %zu of %d rows, %.0f are its share",
                        m, l, e, times_used[l][e], N_ROUTED, mean);
        rig_close(&r);
    }
}

/* CPU and GPU have the same weights, so with exact arithmetic their answers differ only by the
 * order of sums. */
TEST(a_gpu_makes_the_same_model)
{
    static const char *const NAMES[] = { "ernie_moe", "deepseek_v3" };
    if (!has_gpu())
        SKIP("no CUDA GPU, and no emulated one in this build: dummy models were NOT made on it");
    for (size_t i = 0; i < (TEST_IS_SANITIZED ? 1 : COUNT_OF(NAMES)); i++) {
        char folder[4096];
        struct rig host, gpu;
        copy_config(NAMES[i], folder);
        open_dummy(&host, folder, "ref", ACTIVATIONS_F32, QUANTIZE_NONE);
        open_dummy(&gpu, folder, "cuda", ACTIVATIONS_F32, QUANTIZE_NONE);
        check_logits(&host, NAMES[i]);
        check_logits(&gpu, NAMES[i]);
        for (size_t j = 0; j < (size_t)N_IDS * host.n_vocab; j++)
            CHECK_NEAR(gpu.logits[j], host.logits[j], 1e-3);
        rig_close(&gpu);
        for (int q = QUANTIZE_NONE; q <= QUANTIZE_BLOCK_FP8; q++) {
            open_dummy(&gpu, folder, "cuda", ACTIVATIONS_FAST, (enum quantize)q);
            check_logits(&gpu, NAMES[i]);
            rig_close(&gpu);
        }
        rig_close(&host);
    }
}

TEST(a_file_is_no_folder)
{
    struct kernel_ctx *k;
    struct model *m;
    struct err err;
    CHECK_OK(kernel_ctx_create(kernel_options_default("ref", ACTIVATIONS_F32, 1), &k, &err));
    const struct model_options o = {
        .path = test_data("configs/llama-3-8b/config.json"),
        .dummy = true,
        .max_rows = 1,
        .kernels = k,
    };
    CHECK_STATUS(model_load(&o, &m, &err), ERR_CONFIG);
    CHECK(strstr(err.text, "dummy") != NULL);
    kernel_ctx_free(k);
}

/* ---- the models that are measured ---- */

/* The bytes that a model's weights would need, by its plan and without packing. */
static size_t planned_bytes(const char *name, struct model_config *config)
{
    char path[256];
    struct err err;
    struct model m = { .max_rows = 1, .max_logits = 1, .max_len = 1 };
    snprintf(path, sizeof path, "configs/%s", name);
    CHECK_OK(
        kernel_ctx_create(kernel_options_default("ref", ACTIVATIONS_FAST, 1), &m.kernels, &err));
    if (config_hf_load(test_data(path), &m.config, &m.generation, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s", err.text);
    m.ops = model_registry_find(m.config.arch, &err);
    CHECK(m.ops != NULL);
    m.share = model_share_whole(&m.config);
    weights_create_dummy(&m.weights);
    if (decoder_plan(&m, &err) != OK) test_fail(__FILE__, __LINE__, "%s: %s", name, err.text);
    const size_t bytes = m.weight_bytes;
    *config = m.config;
    decoder_free(&m);
    weights_close(m.weights);
    kernel_ctx_free(m.kernels);
    return bytes;
}

/* Known totals of parameters and of KV bytes per token. Routers are f32, and MLA has each head's
 * expansion of keys twice, once transposed. */
TEST(shapes_of_the_measured_models)
{
    static const struct {
        const char *name;
        double parameters;
        size_t kv_bytes;
    } MODELS[] = {
        { "ernie-4.5-21b-a3b", 21.83e9, 57344 },
        { "qwen3-30b-a3b", 30.53e9, 98304 },
        { "deepseek-v2-lite", 15.71e9, 31104 },
        { "llama-3-8b", 8.03e9, 131072 },
    };
    for (size_t i = 0; i < COUNT_OF(MODELS); i++) {
        struct model_config c;
        struct kv_layout kv;
        double bytes = (double)planned_bytes(MODELS[i].name, &c), n_sparse = 0;
        for (uint32_t l = 0; l < c.n_layers; l++) n_sparse += model_layer_is_sparse(&c, l);
        bytes -= 2.0 * n_sparse * c.moe.n_experts * c.hidden;
        bytes -= 2.0 * c.n_layers * c.n_heads * c.mla.nope * c.mla.kv_lora;
        if (fabs(bytes / 2 / MODELS[i].parameters - 1) > 3e-4)
            test_fail(__FILE__, __LINE__, "%s has %.4g parameters, not %.4g", MODELS[i].name,
                      bytes / 2, MODELS[i].parameters);
        model_config_kv_layout(&c, NULL, DTYPE_BF16, 1, 1, &kv);
        CHECK_EQ_INT(kv_layout_block_bytes(&kv), MODELS[i].kv_bytes);
    }
}

TEST_MAIN(CASE(numbers_are_spread_as_promised), CASE(numbers_are_those_of_the_version),
          CASE(packed_as_if_files_held_them), CASE_T(packed_on_a_gpu_as_if_files_held_them, 300),
          CASE(types_without_dummy_weights_are_refused), CASE_T(a_configuration_is_enough, 120),
          CASE(fingerprints_tell_dummies_apart), CASE(experts_are_used_alike),
          CASE_T(a_gpu_makes_the_same_model, 300), CASE(a_file_is_no_folder),
          CASE(shapes_of_the_measured_models))
