/* test_node_model.c - how many KV blocks a node takes by default. */
#include "deploy/node/node_model.h"

#include <stdlib.h>
#include <string.h>

#include "deploy/options/option_table.h"
#include "kernels/host/host_memory.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

static struct kernel_ctx kernels = { .options.activations = ACTIVATIONS_F32 };
static struct model m = {
    .share = { .tp_size = 1 },
    .config = { .n_layers = 2, .n_heads = 2, .n_kv_heads = 1, .head_dim = 16 },
    .kernels = &kernels
};
static struct err err;

static void open_device(void)
{
    /* until the program ends */
    if (!kernels.device) CHECK_OK(device_open("cpu", &kernels.device, &err));
}

/* Page cache counts as available: files that the host has read do not shrink the pool. */
TEST(default_is_a_share_of_available_memory)
{
    open_device();
    struct node_options o = { .max_model_len = 1 << 14, .block_tokens = 64, .max_seqs = 4096 };
    struct kv_layout l;
    uint32_t n = 0;
    model_kv_layout(&m, o.block_tokens, 1, &l);
    double want = (double)host_memory_available() / 5;
    if (want >
        (double)o.max_seqs * o.max_model_len / o.block_tokens * (double)kv_layout_block_bytes(&l))
        SKIP("this host has more memory than the largest pool takes");
    CHECK_OK(node_model_blocks(&m, NULL, &o, &n, &err));
    double have = (double)n * (double)kv_layout_block_bytes(&l);
    CHECK(have > want * 0.7 && have < want * 1.3); /* other processes allocate and free meanwhile */
}

TEST(ranks_of_a_host_divide_the_default)
{
    open_device();
    struct node_options o = { .max_model_len = 64, .block_tokens = 64, .max_seqs = 1 << 30 };
    uint32_t alone = 0, of_four = 0;
    CHECK_OK(node_model_blocks(&m, NULL, &o, &alone, &err));
    o.n_host_ranks = 4;
    CHECK_OK(node_model_blocks(&m, NULL, &o, &of_four, &err));
    CHECK(of_four > alone * 0.17 && of_four < alone * 0.33);
    o.kv_bytes = 64 << 20; /* each has what is given */
    CHECK_OK(node_model_blocks(&m, NULL, &o, &of_four, &err));
    o.n_host_ranks = 1;
    CHECK_OK(node_model_blocks(&m, NULL, &o, &alone, &err));
    CHECK_EQ_INT(of_four, alone);
}

/* Weights that are mapped from a copy do not count as available: the kernel would drop them for the
 * pool and read them again at every step. */
TEST(mapped_weights_are_not_available)
{
    open_device();
    struct node_options o = { .max_model_len = 64, .block_tokens = 64, .max_seqs = 1 << 30 };
    struct model mapped = m;
    uint32_t n = 0, n_mapped = 0;
    CHECK_OK(node_model_blocks(&m, NULL, &o, &n, &err));
    mapped.mapped_bytes = host_memory_available() / 2;
    CHECK_OK(node_model_blocks(&mapped, NULL, &o, &n_mapped, &err));
    CHECK(n_mapped > n * 0.3 && n_mapped < n * 0.7);
    mapped.mapped_bytes = 0; /* it is no longer available then */
    CHECK_OK(node_model_blocks(&mapped, NULL, &o, &n_mapped, &err));
    CHECK(n_mapped > n * 0.8);
    mapped.mapped_bytes = SIZE_MAX;
    CHECK_STATUS(node_model_blocks(&mapped, NULL, &o, &n_mapped, &err), ERR_CONFIG);
    CHECK(strstr(err.text, "room for 0"));
}

TEST(what_is_asked_for_is_taken)
{
    open_device();
    struct node_options o = {
        .max_model_len = 1024, .block_tokens = 64, .max_seqs = 4, .kv_bytes = 32 << 10
    };
    struct kv_layout l;
    uint32_t n = 0;
    model_kv_layout(&m, o.block_tokens, 1, &l);
    CHECK_EQ_INT(kv_layout_block_bytes(&l), 16 << 10);
    /* 2 blocks; a context needs 16 */
    CHECK_STATUS(node_model_blocks(&m, NULL, &o, &n, &err), ERR_CONFIG);
    CHECK(strstr(err.text, "room for 2"));
    o.kv_bytes = 20 * (16 << 10);
    CHECK_OK(node_model_blocks(&m, NULL, &o, &n, &err));
    CHECK_EQ_INT(n, 20);
    o.kv_bytes = 1000 * (16 << 10);
    CHECK_OK(node_model_blocks(&m, NULL, &o, &n, &err));
    CHECK_EQ_INT(n, 1000); /* more than four contexts can use: the rest keeps prefixes */
    o.n_blocks = 100;
    CHECK_OK(node_model_blocks(&m, NULL, &o, &n, &err));
    CHECK_EQ_INT(n, 100);
    o.n_blocks = UINT32_MAX; /* 64 TiB */
    CHECK_STATUS(node_model_blocks(&m, NULL, &o, &n, &err), ERR_CONFIG);
    CHECK_EQ_STR(err.field, "num-gpu-blocks-override");
    CHECK(strstr(err.text, "--num-gpu-blocks-override: 4294967295 KV blocks are 65536.0 GiB"));
    o.n_blocks = 0;
    o.kv_bytes = (uint64_t)1 << 50;
    CHECK_STATUS(node_model_blocks(&m, NULL, &o, &n, &err), ERR_CONFIG);
    CHECK_EQ_STR(err.field, "kv-cache-memory");
    CHECK(strstr(err.text, "--kv-cache-memory 1048576.0 is in GiB"));
}

/* 64 values per row of 2 bytes each, or of one byte plus a scale of 4: 128 against 68. */
TEST(half_the_bytes_are_nearly_twice_the_blocks)
{
    open_device();
    struct kernel_ctx narrow = kernels;
    struct model heads = {
        .share = { .tp_size = 1 },
        .config = { .n_layers = 2, .n_heads = 2, .n_kv_heads = 2, .head_dim = 64 },
        .kernels = &narrow
    };
    struct node_options o = {
        .max_model_len = 64, .block_tokens = 64, .max_seqs = 4, .kv_bytes = (uint64_t)128 << 20
    };
    uint32_t n = 0, n_bf16 = 0;
    narrow.options.kv = DTYPE_BF16;
    CHECK_OK(node_model_blocks(&heads, NULL, &o, &n_bf16, &err));
    CHECK_EQ_INT(n_bf16, 2048);
    narrow.options.kv = DTYPE_I8;
    CHECK_OK(node_model_blocks(&heads, NULL, &o, &n, &err));
    CHECK_EQ_INT(n, (128 << 20) / (2 * 2 * 2 * 64 * 68));
    CHECK((double)n > 1.88 * n_bf16);
    narrow.options.kv = DTYPE_F8_E4M3;
    uint32_t n_e4m3 = 0;
    CHECK_OK(node_model_blocks(&heads, NULL, &o, &n_e4m3, &err));
    CHECK_EQ_INT(n_e4m3, n);
    narrow.options.kv = DTYPE_F16;
    CHECK_OK(node_model_blocks(&heads, NULL, &o, &n, &err));
    CHECK_EQ_INT(n, n_bf16);
}

/* ---- --kv-cache-dtype ---- */

static enum status read_kv(const char *type, const char *activations, enum dtype *out)
{
    struct config *c = config_create(OPTIONS, "serve");
    char *argv[] = { "--kv-cache-dtype", (char *)type, "--activations", (char *)activations };
    enum activations a;
    int none = 0;
    CHECK_OK(config_load_args(c, type ? 4 : 2, type ? argv : argv + 2, NULL, &none, &err));
    enum status st = node_options_arithmetic(c, &a, out, &err);
    CHECK_EQ_INT(a, strcmp(activations, "f32") == 0 ? ACTIVATIONS_F32 : ACTIVATIONS_FAST);
    config_free(c);
    return st;
}

static void check_spellings(const char *const *names, enum dtype want)
{
    for (; *names; names++) {
        enum dtype t = DTYPE_COUNT;
        CHECK_OK(read_kv(*names, "auto", &t));
        CHECK_EQ_INT(t, want);
    }
}

TEST(types_of_the_kv_cache_as_people_spell_them)
{
    static const char *const others[] = { "fp8_e5m2", "fp8_inc", "int4", "fp4_e2m1",
                                          "turbo",    "INT8",    "q8_0" };
    enum dtype t;
    check_spellings((const char *const[]){ "auto", "", "bfloat16", "bf16", NULL }, DTYPE_BF16);
    check_spellings((const char *const[]){ "float16", "f16", "fp16", "half", NULL }, DTYPE_F16);
    check_spellings((const char *const[]){ "float32", "f32", "fp32", NULL }, DTYPE_F32);
    check_spellings((const char *const[]){ "int8", NULL }, DTYPE_I8);
    check_spellings(
        (const char *const[]){ "fp8", "fp8_e4m3", "f8_e4m3", "e4m3", "float8_e4m3fn", NULL },
        DTYPE_F8_E4M3);
    CHECK_OK(read_kv(NULL, "auto", &t));
    CHECK_EQ_INT(t, DTYPE_BF16);
    CHECK_OK(read_kv("auto", "f32", &t));
    CHECK_EQ_INT(t, DTYPE_F32);
    CHECK_OK(read_kv("int8", "f32", &t));
    CHECK_EQ_INT(t, DTYPE_I8);
    for (size_t i = 0; i < COUNT_OF(others); i++) {
        CHECK(read_kv(others[i], "auto", &t) != OK);
        CHECK_EQ_STR(err.field, "kv-cache-dtype");
        CHECK(strstr(err.text, others[i]) && strstr(err.text, "int8, fp8 (which is fp8_e4m3)"));
    }
}

TEST(the_variable_gives_the_type_too)
{
    struct config *c = config_create(OPTIONS, "serve");
    enum activations a;
    enum dtype t;
    int none = 0;
    char *argv[] = { NULL };
    CHECK_EQ_INT(setenv("BATON_KV_CACHE_DTYPE", "int8", 1), 0);
    CHECK_OK(config_load_env(c, &err));
    CHECK_OK(config_load_args(c, 0, argv, NULL, &none, &err));
    CHECK_OK(node_options_arithmetic(c, &a, &t, &err));
    CHECK_EQ_INT(t, DTYPE_I8);
    config_free(c);
}

/* ---- a GPU, of which the node takes a share ---- */

static struct {
    size_t total, available, taken;
} gpu;

static size_t gpu_available(struct device *d) { return (void)d, gpu.available; }
static size_t gpu_total(struct device *d) { return (void)d, gpu.total; }
static size_t gpu_taken(struct device *d) { return (void)d, gpu.taken; }

TEST(a_gpu_gives_what_its_share_leaves)
{
    static const struct device_ops ops = {
        .name = "a GPU", .available = gpu_available, .total = gpu_total, .allocated = gpu_taken
    };
    struct device d = { .ops = &ops };
    struct kernel_ctx k = { .options.activations = ACTIVATIONS_F32, .device = &d };
    struct model on_gpu = m;
    struct node_options o = {
        .max_model_len = 1024, .block_tokens = 64, .max_seqs = 1, .gpu_share = 0.9
    };
    const size_t block = 16 << 10;
    uint32_t n = 0;
    on_gpu.kernels = &k;
    gpu.total = 1000 * block;
    gpu.taken = 300 * block; /* allocated by weights and steps */
    gpu.available = 700 * block;
    CHECK_OK(node_model_blocks(&on_gpu, NULL, &o, &n, &err));
    CHECK_EQ_INT(n, 600); /* more than one context can use: the rest keeps prefixes */
    o.gpu_share = 0.5;    /* two nodes on one GPU, whichever starts first */
    CHECK_OK(node_model_blocks(&on_gpu, NULL, &o, &n, &err));
    CHECK_EQ_INT(n, 200);
    gpu.available = 200 * block;
    CHECK_OK(node_model_blocks(&on_gpu, NULL, &o, &n, &err));
    CHECK_EQ_INT(n, 100); /* other processes hold more than their share */
    gpu.available = 700 * block;
    o.gpu_share = 0.3;
    CHECK_STATUS(node_model_blocks(&on_gpu, NULL, &o, &n, &err), ERR_CONFIG);
    CHECK(strstr(err.text, "room for 0") && strstr(err.text, "--gpu-memory-utilization"));
    o.n_blocks = 700;
    CHECK_OK(node_model_blocks(&on_gpu, NULL, &o, &n, &err));
    CHECK_EQ_INT(n, 700);
    o.n_blocks = 701;
    CHECK_STATUS(node_model_blocks(&on_gpu, NULL, &o, &n, &err), ERR_CONFIG);
}

TEST_MAIN(CASE(default_is_a_share_of_available_memory), CASE(ranks_of_a_host_divide_the_default),
          CASE(mapped_weights_are_not_available), CASE(what_is_asked_for_is_taken),
          CASE(half_the_bytes_are_nearly_twice_the_blocks),
          CASE(types_of_the_kv_cache_as_people_spell_them), CASE(the_variable_gives_the_type_too),
          CASE(a_gpu_gives_what_its_share_leaves))
