/* test_model_experts.c - experts that a rank takes over while it runs: they have the bytes of those
 * that are packed at load, sets share them, and a set that is dropped gives its memory back. */
#include <sys/resource.h>
#include <unistd.h>

#include "shared/model/expert_store.h"
#include "tests/fixtures/checkpoint_write.h"
#include "tests/fixtures/gguf_write.h"
#include "tests/fixtures/model_rig.h"

static const char *const MOE[] = {
    "qwen3_moe",        "qwen3_moe_nonorm",    "mixtral",     "ernie_moe",
    "ernie_moe_untied", "ernie_moe_interval",  "deepseek_v3", "deepseek_v3_fp8",
    "deepseek_v2_lite", "deepseek_v2_grouped",
};

/* ---- loading ---- */

struct source {
    const char *path;
    bool dummy;
    enum quantize quantize;
};

static struct model *load(struct kernel_ctx *k, const struct source *s, uint32_t first, uint32_t n,
                          uint32_t ep_size)
{
    struct model *m;
    struct err err;
    const struct model_share share = {
        .tp_size = 1, .first_expert = first, .n_experts = n, .ep_size = ep_size
    };
    const struct model_options o = {
        .path = s->path,
        .dummy = s->dummy,
        .quantize = s->quantize,
        .max_rows = 4,
        .max_model_len = 64,
        .kernels = k,
        .share = &share,
    };
    if (model_load(&o, &m, &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
    return m;
}

static struct kernel_ctx *open_kernels(const char *isa)
{
    struct kernel_ctx *k;
    CHECK_OK(kernel_ctx_create(kernel_options_default(isa, ACTIVATIONS_FAST, 2), &k, NULL));
    return k;
}

static struct model_experts *take(struct model *m, const int32_t *logical, int32_t n)
{
    struct model_experts *x;
    struct err err;
    if (model_experts_take(m, &(struct experts_wanted){ logical, 1, n, NULL, NULL }, &x, &err) !=
        OK)
        test_fail(__FILE__, __LINE__, "%s", err.text);
    return x;
}

/* Drops the only set and frees what it had: that is kept for the next set, which has nothing. */
static void drop_all(struct model *m, struct model_experts *x)
{
    static const int32_t NONE[] = { 0 };
    model_experts_drop(m, x);
    model_experts_drop(m, take(m, NONE, 0));
}

static size_t n_held(const struct model *m) { return m->expert_store->n_held; }

static const struct expert *expert_of(const struct model *m, uint32_t i_sparse, uint32_t i_expert)
{
    return m->expert_store->at[i_sparse * m->expert_store->n_experts + i_expert];
}

/* ---- the same bytes ---- */

/* The packed bytes, for mem_free. */
static void *bytes_of(struct kernel_ctx *k, const struct weight *w)
{
    void *bytes = mem_calloc(1, w->bytes);
    device_download(k->device, bytes, w->data, w->bytes);
    return bytes;
}

static void check_weight(struct kernel_ctx *k, const struct weight *a, const struct weight *b,
                         const char *path)
{
    CHECK(a->layout == b->layout && a->paired == b->paired);
    CHECK(a->n_out == b->n_out && a->n_in == b->n_in && a->bytes == b->bytes && a->bytes > 0);
    void *have = bytes_of(k, a), *want = bytes_of(k, b);
    if (memcmp(have, want, a->bytes) != 0)
        test_fail(__FILE__, __LINE__, "%s: an expert that was taken has other bytes", path);
    mem_free(have);
    mem_free(want);
}

/* Slot k of every layer is an expert of the whole model. */
static void check_slot(const struct model_experts *x, int32_t k, const struct model *whole,
                       int32_t i_expert, const char *path)
{
    for (uint32_t i = 0; i < x->n_sparse; i++) {
        const struct expert *want = expert_of(whole, i, (uint32_t)i_expert);
        const size_t at = i * (size_t)x->n_local + (size_t)k;
        check_weight(whole->kernels, &x->gate_up[at], &want->w.gate_up, path);
        check_weight(whole->kernels, &x->down[at], &want->w.down, path);
    }
}

/* In a sanitizer's build a sweep takes each of its values with some of the others. */
static bool is_left_out(size_t i, size_t j, size_t n)
{
    return !test_runs_long() && (i + j) % n != 0;
}

/* A rank of three, and one without experts, take all experts in another order. */
static void check_bytes(struct kernel_ctx *k, const struct source *s)
{
    struct model *whole = load(k, s, 0, SHARE_ALL_EXPERTS, 1);
    const int32_t n = (int32_t)whole->config.moe.n_experts;
    int32_t logical[KERNEL_EXPERTS_MAX];
    for (int32_t i = 0; i < n; i++) logical[i] = (i * 3 + 1) % n;
    CHECK(n > 1 && n % 3 != 0 && !whole->weights);
    for (uint32_t mine = 0; mine <= 2; mine += 2) {
        struct model *m = load(k, s, 1, mine, 3);
        struct model_experts *x = take(m, logical, n);
        CHECK_EQ_INT(n_held(m), x->n_sparse * (size_t)n);
        for (int32_t i = 0; i < n; i++) check_slot(x, i, whole, logical[i], s->path);
        model_experts_drop(m, x);
        model_free(m);
    }
    model_free(whole);
}

/* Of file i of a sweep. */
static void check_bytes_of(size_t i_file, const char *path, enum quantize quantize)
{
    static const char *const ISAS[] = { "ref", "auto", "cuda" };
    for (size_t i = 0; i < COUNT_OF(ISAS) - !has_gpu(); i++) {
        if (i < 2 && is_left_out(i, i_file, 2)) continue;
        struct kernel_ctx *k = open_kernels(ISAS[i]);
        check_bytes(k, &(struct source){ .path = path, .quantize = quantize });
        kernel_ctx_free(k);
    }
}

TEST(experts_of_every_checkpoint_have_the_bytes_of_a_load)
{
    for (size_t i = 0; i < COUNT_OF(MOE); i++)
        check_bytes_of(i, golden(MOE[i], "model").text, QUANTIZE_NONE);
}

TEST(quantised_experts_have_the_bytes_of_a_load)
{
    for (size_t i = 0; i < COUNT_OF(MOE); i++)
        for (int q = QUANTIZE_WINT8; q <= QUANTIZE_BLOCK_FP8; q++)
            if (!is_left_out(i, (size_t)q, 3))
                check_bytes_of(i + i / 3, golden(MOE[i], "model").text, (enum quantize)q);
}

TEST(dummy_experts_have_the_bytes_of_a_load)
{
    struct kernel_ctx *k = open_kernels("auto");
    const struct path p = golden("ernie_moe", "model");
    for (int q = QUANTIZE_NONE; q <= QUANTIZE_WINT4; q++)
        check_bytes(
            k, &(struct source){ .path = p.text, .dummy = true, .quantize = (enum quantize)q });
    kernel_ctx_free(k);
}

/* ---- GGUF: the experts of a layer are one tensor ---- */

enum { HIDDEN = 64, INNER = 96, N_EXPERTS = 8, N_VOCAB = 48, N_LAYERS = 2, TENSOR_F32 = 0 };

static void put(struct gguf_write *w, const char *name, uint32_t type, enum dtype dtype,
                uint64_t n_in, uint64_t n_out, uint64_t n)
{
    const size_t bytes = dtype_row_bytes(dtype, n_in) * n_out * n;
    uint8_t *data = mem_calloc(1, bytes);
    for (size_t i = 0; i < bytes; i++)
        data[i] = dtype == DTYPE_F32 ? 0 : (uint8_t)(w->n_tensors * 7 + i * 31 + i / 61);
    gguf_write_tensor(w, name, type,
                      n > 1       ? 3
                      : n_out > 1 ? 2
                                  : 1,
                      (uint64_t[]){ n_in, n_out, n }, data, bytes);
    mem_free(data);
}

static void put_layer(struct gguf_write *w, int i, uint32_t type, enum dtype dtype)
{
    static const struct {
        const char *name;
        uint64_t n_in, n_out, n;
    } OF_LAYER[] = {
        { "attn_norm", HIDDEN, 1, 1 },
        { "ffn_norm", HIDDEN, 1, 1 },
        { "attn_q_norm", 16, 1, 1 },
        { "attn_k_norm", 16, 1, 1 },
        { "ffn_gate_inp", HIDDEN, N_EXPERTS, 1 },
        { "attn_q", HIDDEN, HIDDEN, 1 },
        { "attn_k", HIDDEN, HIDDEN, 1 },
        { "attn_v", HIDDEN, HIDDEN, 1 },
        { "attn_output", HIDDEN, HIDDEN, 1 },
        { "ffn_gate_exps", HIDDEN, INNER, N_EXPERTS },
        { "ffn_up_exps", HIDDEN, INNER, N_EXPERTS },
        { "ffn_down_exps", INNER, HIDDEN, N_EXPERTS },
    };
    for (size_t k = 0; k < COUNT_OF(OF_LAYER); k++) {
        char name[64];
        const bool quantised = OF_LAYER[k].n > 1;
        checkpoint_print(name, sizeof name, "blk.%d.%s.weight", i, OF_LAYER[k].name);
        put(w, name, quantised ? type : TENSOR_F32, quantised ? dtype : DTYPE_F32, OF_LAYER[k].n_in,
            OF_LAYER[k].n_out, OF_LAYER[k].n);
    }
}

static void write_gguf(const char *path, uint32_t type, enum dtype dtype)
{
    static const struct {
        const char *key;
        uint32_t v;
    } SIZES[] = { { "block_count", N_LAYERS },      { "embedding_length", HIDDEN },
                  { "feed_forward_length", INNER }, { "attention.head_count", 4 },
                  { "attention.head_count_kv", 4 }, { "attention.key_length", 16 },
                  { "context_length", 128 },        { "expert_count", N_EXPERTS },
                  { "expert_used_count", 2 },       { "expert_feed_forward_length", INNER },
                  { "vocab_size", N_VOCAB } };
    struct gguf_write w = { 0 };
    struct buf b = { 0 };
    char key[64];
    gguf_write_text(&w, "general.architecture", "qwen3moe");
    for (size_t i = 0; i < COUNT_OF(SIZES); i++) {
        checkpoint_print(key, sizeof key, "qwen3moe.%s", SIZES[i].key);
        gguf_write_u32(&w, key, SIZES[i].v);
    }
    gguf_write_f32(&w, "qwen3moe.attention.layer_norm_rms_epsilon", 1e-6f);
    put(&w, "token_embd.weight", TENSOR_F32, DTYPE_F32, HIDDEN, N_VOCAB, 1);
    put(&w, "output.weight", TENSOR_F32, DTYPE_F32, HIDDEN, N_VOCAB, 1);
    put(&w, "output_norm.weight", TENSOR_F32, DTYPE_F32, HIDDEN, 1, 1);
    for (int i = 0; i < N_LAYERS; i++) put_layer(&w, i, type, dtype);
    gguf_write_finish(&w, &b);
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(b.data, 1, b.len, f) == b.len && fclose(f) == 0);
    buf_release(&b);
}

TEST(experts_of_gguf_files_have_the_bytes_of_a_load)
{
    static const struct {
        uint32_t type;
        enum dtype dtype;
    } TYPES[] = {
        { 1, DTYPE_F16 }, { 2, DTYPE_Q4_0 }, { 3, DTYPE_Q4_1 }, { 6, DTYPE_Q5_0 }, { 8, DTYPE_Q8_0 }
    };
    char path[4096];
    for (size_t i = 0; i < COUNT_OF(TYPES); i++) {
        checkpoint_print(path, sizeof path, "%s/%zu.gguf", test_tmpdir(), i);
        write_gguf(path, TYPES[i].type, TYPES[i].dtype);
        check_bytes_of(i, path, QUANTIZE_NONE);
    }
}

/* ---- what sets share ---- */

static const void *data_of(const struct model_experts *x, uint32_t i_sparse, int32_t slot)
{
    return x->down[i_sparse * (size_t)x->n_local + (size_t)slot].data;
}

TEST(an_expert_is_in_memory_once_and_as_long_as_a_set_has_it)
{
    static const int32_t A[] = { 2, 3, 7, 3 }, B[] = { 3, 0 }, NONE[] = { 0 };
    struct kernel_ctx *k = open_kernels("ref");
    const struct path p = golden("ernie_moe", "model");
    struct model *m = load(k, &(struct source){ .path = p.text }, 2, 3, 4);
    const size_t layers = m->expert_store->n_sparse;
    CHECK(layers == 3 && n_held(m) == 3 * layers);
    struct model_experts *a = take(m, A, 4); /* 2, 3 are the share's; 7 is new */
    CHECK_EQ_INT(n_held(m), 4 * layers);
    for (uint32_t i = 0; i < layers; i++) {
        CHECK(data_of(a, i, 0) == data_of(m->expert_store->own, i, 0));
        CHECK(data_of(a, i, 1) == data_of(m->expert_store->own, i, 1));
        CHECK(data_of(a, i, 1) == data_of(a, i, 3) && data_of(a, i, 1) != data_of(a, i, 2));
    }
    struct model_experts *b = take(m, B, 2), *none = take(m, NONE, 0);
    CHECK_EQ_INT(n_held(m), 5 * layers);
    CHECK(data_of(b, 1, 0) == data_of(a, 1, 1));
    model_experts_drop(m, a); /* the share's own set ends with it: 2, 4 and 7 go */
    CHECK(n_held(m) == 2 * layers && !m->expert_store->own);
    a = take(m, A, 4);
    CHECK(n_held(m) == 4 * layers && data_of(a, 0, 1) == data_of(b, 0, 0));
    model_experts_drop(m, a);
    model_experts_drop(m, b);
    model_experts_drop(m, NULL);
    CHECK_EQ_INT(n_held(m), 0);
    model_experts_drop(m, none);
    model_free(m);
    kernel_ctx_free(k);
}

/* On a GPU the share's own experts lie in one allocation: they stay, and are had again at once. */
TEST(experts_of_a_gpu_that_were_loaded_stay)
{
    static const int32_t A[] = { 2, 7 };
    if (!has_gpu()) SKIP("no GPU, and none is emulated");
    struct kernel_ctx *k = open_kernels("cuda");
    const struct path p = golden("ernie_moe", "model");
    struct model *m = load(k, &(struct source){ .path = p.text }, 2, 3, 4);
    const size_t layers = m->expert_store->n_sparse, before = device_allocated(k->device);
    for (int i = 0; i < 2; i++) {
        struct model_experts *x = take(m, A, 2);
        CHECK_EQ_INT(n_held(m), 4 * layers);
        CHECK(data_of(x, 1, 0) == data_of(m->expert_store->own, 1, 0));
        const size_t with = device_allocated(m->expert_store->kernels->device);
        size_t bytes = 0;
        for (uint32_t l = 0; l < layers; l++)
            bytes += x->gate_up[l * 2 + 1].bytes + x->down[l * 2 + 1].bytes;
        drop_all(m, x);
        CHECK_EQ_INT(n_held(m), 3 * layers);
        CHECK_EQ_INT(device_allocated(m->expert_store->kernels->device), with - bytes);
    }
    CHECK_EQ_INT(device_allocated(k->device), before);
    model_free(m);
    kernel_ctx_free(k);
}

/* Between two groups a rank has no set. */
TEST(a_rank_keeps_what_it_held_until_it_takes_another_set)
{
    static const int32_t A[] = { 2, 7 }, B[] = { 7, 0 };
    struct kernel_ctx *k = open_kernels("ref");
    const struct path p = golden("ernie_moe", "model");
    struct model *m = load(k, &(struct source){ .path = p.text }, 2, 1, 4);
    const size_t layers = m->expert_store->n_sparse;
    struct model_experts *x = take(m, A, 2);
    const void *const seven = data_of(x, 1, 1);
    model_experts_drop(m, x);
    CHECK(!m->expert_store->own && n_held(m) == 2 * layers);
    x = take(m, B, 2);
    CHECK(data_of(x, 1, 0) == seven && n_held(m) == 2 * layers); /* 2 went */
    model_experts_drop(m, x);
    CHECK_EQ_INT(n_held(m), 2 * layers);
    model_free(m);
    kernel_ctx_free(k);
}

/* Each layer with a map of its own. */
TEST(layers_may_have_maps_of_their_own)
{
    static const int32_t MAPS[] = { 7, 0, 1, 1, 4, 3 };
    struct kernel_ctx *k = open_kernels("auto");
    struct model_experts *x;
    const struct path p = golden("ernie_moe", "model");
    const struct source s = { .path = p.text };
    struct model *whole = load(k, &s, 0, SHARE_ALL_EXPERTS, 1), *m = load(k, &s, 0, 1, 2);
    CHECK_OK(model_experts_take(m, &(struct experts_wanted){ MAPS, 3, 2, NULL, NULL }, &x, NULL));
    CHECK_EQ_INT(n_held(m), 3 + 4); /* 0 of each layer is the share's; one is there twice */
    for (uint32_t i = 0; i < 3; i++)
        for (uint32_t slot = 0; slot < 2; slot++) {
            const uint32_t e = (uint32_t)MAPS[i * 2 + slot];
            check_weight(whole->kernels, &x->down[i * 2 + slot], &expert_of(whole, i, e)->w.down,
                         p.text);
        }
    drop_all(m, x);
    CHECK_EQ_INT(n_held(m), 0);
    model_free(m);
    model_free(whole);
    kernel_ctx_free(k);
}

/* A model that has all experts needs no set, before and after it had one. */
TEST(a_whole_model_keeps_its_experts)
{
    static const int32_t SOME[] = { 5, 1 };
    struct kernel_ctx *k = open_kernels("ref");
    const struct path p = golden("qwen3_moe", "model");
    for (uint32_t ep_size = 1; ep_size <= 2; ep_size++) {
        struct model *m = load(k, &(struct source){ .path = p.text }, 0, 8, ep_size);
        const size_t n = n_held(m);
        struct model_experts *x = take(m, SOME, 2);
        CHECK(n_held(m) == n && m->experts == m->expert_store->own);
        model_experts_drop(m, x);
        CHECK(n_held(m) == n && m->experts == m->expert_store->own && m->experts);
        model_free(m);
    }
    kernel_ctx_free(k);
}

/* ---- refusals ---- */

static void refuses(struct model *m, const int32_t *logical, int32_t n_maps, int32_t n,
                    enum status want, const char *words)
{
    struct model_experts *x = NULL;
    struct err err = { 0 };
    const size_t before = n_held(m);
    CHECK_STATUS(
        model_experts_take(m, &(struct experts_wanted){ logical, n_maps, n, NULL, NULL }, &x, &err),
        want);
    if (!strstr(err.text, words))
        test_fail(__FILE__, __LINE__, "\"%s\" does not say \"%s\"", err.text, words);
    CHECK(!x && n_held(m) == before && m->expert_store->n_sets == 0);
}

TEST(impossible_sets_are_refused_in_a_sentence)
{
    static const int32_t WRONG[] = { 1, 8 }, BELOW[] = { -1 }, OTHER[] = { 0, 7 };
    struct kernel_ctx *k = open_kernels("ref");
    const struct path p = golden("qwen3_moe", "model");
    struct model *m = load(k, &(struct source){ .path = p.text }, 0, 4, 2);
    refuses(m, WRONG, 1, 2, ERR_INVALID, "expert 8 in slot 1: the model has experts 0 to 7");
    refuses(m, BELOW, 1, 1, ERR_INVALID, "expert -1");
    refuses(m, WRONG, 3, 1, ERR_INVALID, "a placement of 3 layers");
    refuses(m, WRONG, 0, 1, ERR_INVALID, "a placement of 0 layers");
    refuses(m, WRONG, 1, KERNEL_EXPERTS_MAX + 1, ERR_INVALID, "1025 experts on one rank");
    model_free(m);
    m = load(k, &(struct source){ .path = p.text }, 0, 4, 1);
    refuses(m, OTHER, 1, 2, ERR_UNSUPPORTED, "without other ranks");
    model_free(m);
    kernel_ctx_free(k);
}

/* Goes on as often as *arg says. */
static bool counts_down(void *arg, double done)
{
    int *left = arg;
    (void)done;
    return (*left)-- > 0;
}

TEST(a_take_that_is_not_needed_any_more_ends)
{
    static const int32_t OTHERS[] = { 5, 6, 7 };
    struct kernel_ctx *k = open_kernels("ref");
    const struct path p = golden("qwen3_moe", "model");
    struct model *m = load(k, &(struct source){ .path = p.text }, 0, 4, 2);
    const size_t before = n_held(m);
    for (int after = 0; after < 3; after++) {
        struct model_experts *x = NULL;
        struct err err;
        int left = after;
        const struct experts_wanted w = { OTHERS, 1, 3, counts_down, &left };
        CHECK_STATUS(model_experts_take(m, &w, &x, &err), ERR_CANCELED);
        CHECK(!x && n_held(m) == before);
    }
    struct model_experts *x = take(m, OTHERS, 3);
    CHECK(n_held(m) > before);
    model_experts_drop(m, x);
    model_free(m);
    kernel_ctx_free(k);
}

/* ---- too little memory ---- */

/* Dummy weights of two layers with experts of 3 * 256 * `inner` bf16 elements. */
static void write_config(const char *folder, int n_experts, int inner)
{
    char config[1024];
    checkpoint_print(config, sizeof config,
                     "{\"architectures\":[\"Qwen3MoeForCausalLM\"],\"model_type\":\"qwen3_moe\","
                     "\"hidden_size\":256,\"num_hidden_layers\":2,\"num_attention_heads\":2,"
                     "\"num_key_value_heads\":2,\"head_dim\":64,\"intermediate_size\":64,"
                     "\"vocab_size\":64,\"max_position_embeddings\":64,\"rms_norm_eps\":1e-6,"
                     "\"rope_theta\":10000.0,\"hidden_act\":\"silu\",\"num_experts\":%d,"
                     "\"num_experts_per_tok\":2,\"moe_intermediate_size\":%d,"
                     "\"norm_topk_prob\":true,\"decoder_sparse_step\":1,\"mlp_only_layers\":[],"
                     "\"tie_word_embeddings\":false}",
                     n_experts, inner);
    checkpoint_put_file(folder, "config.json", str_of(config));
}

TEST(too_little_memory_is_a_sentence_before_anything_is_packed)
{
    enum { N = 1024, INNER_WIDE = 1 << 20 }; /* 1.5 GiB an expert and layer */
    int32_t logical[N];
    struct kernel_ctx *k = open_kernels("auto");
    const struct source s = { .path = test_tmpdir(), .dummy = true };
    write_config(s.path, N, INNER_WIDE);
    struct model *m = load(k, &s, 5, 0, 2);
    for (int32_t i = 0; i < N; i++) logical[i] = i;
    refuses(m, logical, 1, N, ERR_NOMEM, "2048 experts of other ranks need 3072.00 GiB here");
    refuses(m, logical, 1, N, ERR_NOMEM, "too little; lower --kv-cache-memory");
    model_experts_drop(m, take(m, logical, 0));
    model_free(m);
    kernel_ctx_free(k);
}

/* Lets the process map `room` bytes more. */
static struct rlimit limit_memory(rlim_t room)
{
    struct rlimit was, now;
    unsigned long pages;
    FILE *f = fopen("/proc/self/statm", "re");
    CHECK(f && fscanf(f, "%lu", &pages) == 1 && fclose(f) == 0);
    CHECK(getrlimit(RLIMIT_AS, &was) == 0);
    now = was;
    now.rlim_cur = pages * (rlim_t)sysconf(_SC_PAGESIZE) + room;
    CHECK(setrlimit(RLIMIT_AS, &now) == 0);
    return was;
}

/* A rank that lost its group keeps its experts, and comes back into one with others. */
TEST(what_is_kept_makes_room_for_other_experts)
{
    enum { N = 8, INNER_LARGE = 8192 /* 12 MiB an expert and layer */, ROOM = 64 << 20 };
    static const int32_t FIRST[] = { 1, 2, 3, 4 }, THEN[] = { 4, 5, 6, 7 };
    if (TEST_IS_SANITIZED) SKIP("a sanitizer reserves address space of its own");
    struct kernel_ctx *k = open_kernels("auto");
    const struct source s = { .path = test_tmpdir(), .dummy = true };
    write_config(s.path, N, INNER_LARGE);
    struct model *m = load(k, &s, 0, 1, 2);
    model_experts_drop(m, take(m, FIRST, 4));
    CHECK_EQ_INT(n_held(m), 2 * 4);
    const struct rlimit was = limit_memory(ROOM);
    struct model_experts *x = take(m, THEN, 4);
    CHECK(setrlimit(RLIMIT_AS, &was) == 0);
    CHECK_EQ_INT(n_held(m), 2 * 4);
    drop_all(m, x);
    model_free(m);
    kernel_ctx_free(k);
}

/* The third of seven experts finds no address space. */
TEST(memory_that_ends_while_packing_leaves_all_as_it_was)
{
    enum { N = 8, INNER_LARGE = 8192 /* 12 MiB an expert and layer */, ROOM = 64 << 20 };
    int32_t logical[N];
    if (TEST_IS_SANITIZED) SKIP("a sanitizer reserves address space of its own");
    struct kernel_ctx *k = open_kernels("auto");
    const struct source s = { .path = test_tmpdir(), .dummy = true };
    write_config(s.path, N, INNER_LARGE);
    struct model *m = load(k, &s, 0, 1, 2);
    for (int32_t i = 0; i < N; i++) logical[i] = i;
    model_experts_drop(m, take(m, logical + 1, 1)); /* what is made once */
    model_experts_drop(m, take(m, logical, 0));     /* nothing is kept that could make room */
    const struct rlimit was = limit_memory(ROOM);
    refuses(m, logical, 1, N, ERR_NOMEM, "memory");
    CHECK(setrlimit(RLIMIT_AS, &was) == 0);
    struct model_experts *x = take(m, logical, N);
    CHECK_EQ_INT(n_held(m), 2 * N);
    drop_all(m, x);
    CHECK_EQ_INT(n_held(m), 0);
    model_free(m);
    kernel_ctx_free(k);
}

TEST_MAIN(CASE_T(experts_of_every_checkpoint_have_the_bytes_of_a_load, 240),
          CASE_T(quantised_experts_have_the_bytes_of_a_load, 240),
          CASE_T(dummy_experts_have_the_bytes_of_a_load, 120),
          CASE_T(experts_of_gguf_files_have_the_bytes_of_a_load, 120),
          CASE(an_expert_is_in_memory_once_and_as_long_as_a_set_has_it),
          CASE(a_rank_keeps_what_it_held_until_it_takes_another_set),
          CASE(experts_of_a_gpu_that_were_loaded_stay), CASE(layers_may_have_maps_of_their_own),
          CASE(a_whole_model_keeps_its_experts), CASE(impossible_sets_are_refused_in_a_sentence),
          CASE(a_take_that_is_not_needed_any_more_ends),
          CASE(too_little_memory_is_a_sentence_before_anything_is_packed),
          CASE(what_is_kept_makes_room_for_other_experts),
          CASE(memory_that_ends_while_packing_leaves_all_as_it_was))
