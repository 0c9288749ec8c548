/* test_share.c - the cuts of a model between ranks, and the matrices they cut: the parts of a matrix
 * in a file are the rows of the whole, in every type and layout of files, and their gathered
 * products are the whole's, bit for bit, on every CPU backend. */
#include "shared/model/share.h"

#include "kernels/quantize.h"
#include "kernels/weight_src.h"
#include "shared/base/arith.h"
#include "tests/conformance/kernel_fixture.h"
#include "tests/fixtures/checkpoint_write.h"
#include "tests/fixtures/gguf_write.h"

static const uint32_t SIZES[] = { 1, 2, 3, 4, 8 };

static struct model_share rank_of(uint32_t rank, uint32_t size)
{
    return (struct model_share){ .tp_rank = rank, .tp_size = size };
}

/* ---- cuts ---- */

static void check_cut(size_t n, size_t unit, uint32_t size)
{
    size_t end = 0, least = SIZE_MAX, most = 0, first[SHARE_RANKS_MAX + 1];
    const struct model_share any = rank_of(0, size);
    const struct share_cut cut = share_cut(&any, n, unit);
    share_cut_places(&any, &cut, first);
    for (uint32_t r = 0; r < size; r++) {
        const struct model_share s = rank_of(r, size);
        const struct share_part p = share_units(&s, n, unit);
        const size_t units = div_up(p.n, unit);
        CHECK_EQ_INT(p.first, end);
        CHECK_EQ_INT(p.first, first[r]);
        CHECK(share_part_is_aligned(p, n, unit));
        end = p.first + p.n;
        if (units < least) least = units;
        if (units > most) most = units;
    }
    CHECK_EQ_INT(end, n);
    CHECK_EQ_INT(first[size], n);
    CHECK(most - least <= 1);
}

TEST(parts_cover_all_outputs_once_and_differ_by_a_unit_at_most)
{
    static const size_t N[] = { 1, 15, 16, 17, 88, 200, 512, 2560, 128256 };
    for (size_t i = 0; i < COUNT_OF(N); i++)
        for (uint32_t size = 1; size <= SHARE_RANKS_MAX; size++)
            for (int f8 = 0; f8 < 2; f8++) check_cut(N[i], f8 ? F8_BLOCK : SHARE_UNIT, size);
}

/* Every query head finds its KV head on its rank, at the place that attention computes. */
static void check_heads(size_t n_heads, size_t n_kv_heads, uint32_t size)
{
    for (uint32_t r = 0; r < size; r++) {
        const struct model_share s = rank_of(r, size);
        const struct share_part q = share_heads(&s, n_heads), kv = share_kv_heads(&s, n_kv_heads);
        CHECK_EQ_INT(q.n, n_heads / size);
        CHECK_EQ_INT(q.first, r * q.n);
        CHECK_EQ_INT(q.n % kv.n, 0);
        for (size_t i = 0; i < q.n; i++)
            CHECK_EQ_INT(kv.first + i / (q.n / kv.n), (q.first + i) / (n_heads / n_kv_heads));
    }
}

TEST(query_heads_are_with_their_kv_heads)
{
    for (size_t n_kv = 1; n_kv <= 32; n_kv++)
        for (size_t group = 1; group <= 16; group++) {
            const struct model_config c = { .n_heads = (uint32_t)(n_kv * group),
                                            .n_kv_heads = (uint32_t)n_kv };
            for (uint32_t size = 1; size <= c.n_heads; size++) {
                const struct model_share s = rank_of(0, size);
                if (model_share_check(&s, &c, NULL) == OK) check_heads(c.n_heads, n_kv, size);
            }
        }
}

static void refuses(struct model_share s, const struct model_config *c, const char *words)
{
    struct err err = { 0 };
    CHECK_STATUS(model_share_check(&s, c, &err), ERR_INVALID);
    if (!strstr(err.text, words))
        test_fail(__FILE__, __LINE__, "\"%s\" does not say \"%s\"", err.text, words);
}

TEST(a_size_that_does_not_divide_the_heads_is_refused_with_those_that_do)
{
    const struct model_config smollm = { .n_heads = 9, .n_kv_heads = 3 },
                              ernie = { .n_heads = 6, .n_kv_heads = 2, .moe = { .n_experts = 8 } },
                              latent = { .n_heads = 128,
                                         .n_kv_heads = 128,
                                         .mla = { .kv_lora = 512 } };
    refuses(rank_of(0, 2), &smollm,
            "9 query heads and 3 KV heads of this model; these do: 1, 3, 9");
    refuses(rank_of(0, 0), &smollm, "these do: 1, 3, 9");
    refuses(rank_of(0, 3), &ernie, "these do: 1, 2, 6"); /* rank 1 would read two of two KV heads */
    refuses(rank_of(0, 96), &latent, "these do: 1, 2, 4, 8, 16, 32, 64, 128");
    refuses(rank_of(3, 3), &smollm, "rank 3 is not one of the 3 ranks");
    refuses((struct model_share){ .tp_size = 1, .first_expert = 6, .n_experts = 3 }, &ernie,
            "3 experts from expert 6 on are not all among the model's 8");
}

/* ---- matrices in files ---- */

enum { N_OUT = 296 /* 18.5 units of 16; blocks of 128, 128 and 40 */, N_IN = 256, N_STACK = 3 };

struct stored {
    const char *name; /* of the type, as safetensors files have it */
    enum dtype dtype;
    uint32_t gguf; /* the type's number in GGUF files */
};

static const struct stored FOLDER_TYPES[] = {
    { "F32", DTYPE_F32, 0 },
    { "F16", DTYPE_F16, 0 },
    { "BF16", DTYPE_BF16, 0 },
    { "F8_E4M3", DTYPE_F8_E4M3, 0 },
};
static const struct stored GGUF_TYPES[] = {
    { "q4_0", DTYPE_Q4_0, 2 },  { "q4_1", DTYPE_Q4_1, 3 },      { "q5_0", DTYPE_Q5_0, 6 },
    { "q5_1", DTYPE_Q5_1, 7 },  { "q8_0", DTYPE_Q8_0, 8 },      { "q2_k", DTYPE_Q2_K, 10 },
    { "q3_k", DTYPE_Q3_K, 11 }, { "q4_k", DTYPE_Q4_K, 12 },     { "q5_k", DTYPE_Q5_K, 13 },
    { "q6_k", DTYPE_Q6_K, 14 }, { "iq4_nl", DTYPE_IQ4_NL, 20 }, { "iq4_xs", DTYPE_IQ4_XS, 23 },
};

static void fill_random(enum dtype t, uint8_t *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i += dtype_block_bytes(t)) random_block(t, data + i);
}

static void add_matrix(struct checkpoint *s, const char *name, const struct stored *t,
                       uint32_t n_dims, const uint64_t *shape)
{
    struct checkpoint_tensor *m = checkpoint_add(s, name, t->name, t->dtype, n_dims, shape);
    uint64_t scales[3] = { shape[0] };
    char scale_name[160];
    fill_random(t->dtype, m->data, m->bytes);
    if (t->dtype != DTYPE_F8_E4M3) return;
    for (uint32_t d = n_dims - 2; d < n_dims; d++) scales[d] = div_up(shape[d], F8_BLOCK);
    checkpoint_print(scale_name, sizeof scale_name, "%s_scale_inv", name);
    m = checkpoint_add(s, scale_name, "F32", DTYPE_F32, n_dims, scales);
    for (size_t i = 0; i < m->bytes / sizeof(float); i++)
        ((float *)m->data)[i] = 0.01f + fabsf(random_float(0.01f));
}

/* A folder with gate and up of layer i in FOLDER_TYPES[i]: as tensors of their own, together (each
 * padded to whole blocks, so that up begins with one), and in a stack of experts. */
static struct weights *open_folder(bool paddle)
{
    struct checkpoint *s = MEM_NEW(struct checkpoint);
    char folder[4096], name[160];
    struct weights *w;
    struct err err;
    const char *model = paddle ? "ernie." : "model.";
    checkpoint_print(name, sizeof name, "%sembed_tokens.weight", model);
    add_matrix(s, name, &FOLDER_TYPES[0], 2, (uint64_t[]){ 4, 4 });
    for (size_t i = 0; i < COUNT_OF(FOLDER_TYPES) - paddle; i++) { /* f8 is never transposed */
        static const char *const LEAVES[] = { "gate_proj", "up_proj" };
        for (size_t l = 0; l < COUNT_OF(LEAVES); l++) {
            checkpoint_print(name, sizeof name, "%slayers.%zu.mlp.%s.weight", model, i, LEAVES[l]);
            add_matrix(s, name, &FOLDER_TYPES[i], 2,
                       paddle ? (uint64_t[]){ N_IN, N_OUT } : (uint64_t[]){ N_OUT, N_IN });
        }
        const uint64_t joint = 2 * round_up(N_OUT, F8_BLOCK);
        checkpoint_print(name, sizeof name, "%slayers.%zu.joint.%s.weight", model, i,
                         paddle ? "up_gate_proj" : "gate_up_proj");
        add_matrix(s, name, &FOLDER_TYPES[i], 2,
                   paddle ? (uint64_t[]){ N_IN, joint } : (uint64_t[]){ joint, N_IN });
        if (paddle) continue;
        checkpoint_print(name, sizeof name, "%slayers.%zu.experts.gate_up_proj", model, i);
        add_matrix(s, name, &FOLDER_TYPES[i], 3, (uint64_t[]){ N_STACK, joint, N_IN });
    }
    checkpoint_print(folder, sizeof folder, "%s/%s", test_tmpdir(), paddle ? "paddle" : "folder");
    checkpoint_write_folder(s, folder, str_of("{}"));
    checkpoint_release(s);
    if (weights_open(folder, &w, &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
    return w;
}

/* A GGUF file with gate and up of layer i in GGUF_TYPES[i], and a stack of experts. */
static struct weights *open_gguf(void)
{
    struct gguf_write f = { 0 };
    struct buf b = { 0 };
    struct weights *w;
    struct err err;
    char path[4096];
    gguf_write_text(&f, "general.architecture", "llama");
    for (size_t i = 0; i < COUNT_OF(GGUF_TYPES); i++) {
        static const char *const NAMES[] = { "ffn_gate", "ffn_up", "ffn_gate_exps" };
        const struct stored *t = &GGUF_TYPES[i];
        const size_t bytes = N_STACK * N_OUT * dtype_row_bytes(t->dtype, N_IN);
        uint8_t *data = mem_calloc(bytes, 1);
        for (size_t l = 0; l < COUNT_OF(NAMES); l++) {
            char name[64];
            fill_random(t->dtype, data, bytes);
            snprintf(name, sizeof name, "blk.%zu.%s.weight", i, NAMES[l]);
            gguf_write_tensor(&f, name, t->gguf, l == 2 ? 3 : 2,
                              (uint64_t[]){ N_IN, N_OUT, N_STACK }, data,
                              l == 2 ? bytes : bytes / N_STACK);
        }
        mem_free(data);
    }
    gguf_write_finish(&f, &b);
    const char *folder = test_tmpdir();
    checkpoint_put_file(folder, "m.gguf", buf_str(&b));
    buf_release(&b);
    snprintf(path, sizeof path, "%s/m.gguf", folder);
    if (weights_open(path, &w, &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
    return w;
}

static struct weight_src lookup(struct weights *w, const struct matrix_spec *spec)
{
    struct weight_src src;
    struct err err;
    if (weights_matrix(w, spec, &src, &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
    return src;
}

static size_t unit_of(const struct weight_src *s, enum quantize quantize)
{
    return s->dtype == DTYPE_F8_E4M3 || quantize == QUANTIZE_BLOCK_FP8 ? F8_BLOCK : SHARE_UNIT;
}

static void read_rows(const struct weight_src *s, float *to)
{
    for (size_t i = 0; i < s->n_out; i += WEIGHT_BLOCK_ROWS)
        weight_src_rows_f32(s, i, min_size(WEIGHT_BLOCK_ROWS, s->n_out - i), to + i * s->n_in);
}

/* ---- parts of files ---- */

static void check_parts(struct weights *w, struct matrix_spec spec, const char *what)
{
    struct weight_src whole = lookup(w, &spec);
    float *want = MEM_ARRAY(float, spec.n_out *spec.n_in),
          *have = MEM_ARRAY(float, spec.n_out *spec.n_in);
    read_rows(&whole, want);
    for (size_t i = 0; i < COUNT_OF(SIZES); i++) {
        memset(have, 0xff, spec.n_out * spec.n_in * sizeof *have);
        for (uint32_t r = 0; r < SIZES[i]; r++) {
            const struct model_share s = rank_of(r, SIZES[i]);
            const struct share_part part = share_units(&s, spec.n_out,
                                                       unit_of(&whole, QUANTIZE_NONE));
            spec.part = &part;
            struct weight_src mine = lookup(w, &spec);
            CHECK_EQ_INT(mine.n_out, part.n);
            read_rows(&mine, have + part.first * spec.n_in);
            mem_free((void *)mine.scales);
        }
        check_bits(have, want, spec.n_out * spec.n_in, what, i, spec.first);
    }
    mem_free((void *)whole.scales);
    mem_free(want);
    mem_free(have);
}

static void check_layer(struct weights *w, size_t i, const char *folder, uint32_t n_experts)
{
    char prefix[160];
    const size_t joint = round_up(N_OUT, F8_BLOCK);
    snprintf(prefix, sizeof prefix, "model.layers.%zu.%s", i, folder);
    struct matrix_spec spec = {
        .prefix = prefix,
        .leaf = "up_proj",
        .whole = "gate_up_proj",
        .n_out = N_OUT,
        .n_in = N_IN,
        .total = 2 * joint,
        .n_experts = n_experts,
    };
    if (w->gguf && n_experts) spec.leaf = "gate_proj";
    for (uint32_t e = 0; e < (n_experts ? n_experts : 1); e++)
        for (spec.first = 0; spec.first <= joint; spec.first += joint) {
            spec.i_expert = e;
            check_parts(w, spec, prefix);
        }
}

TEST(parts_of_a_folder_are_rows_of_the_whole)
{
    struct weights *w = open_folder(false);
    for (size_t i = 0; i < COUNT_OF(FOLDER_TYPES); i++) {
        check_layer(w, i, "mlp.", 0);
        check_layer(w, i, "joint.", 0);
        check_layer(w, i, "experts.", N_STACK);
    }
    weights_close(w);
}

TEST(parts_of_transposed_matrices_are_columns_of_the_whole)
{
    struct weights *w = open_folder(true);
    CHECK(w->names.kind == TENSOR_NAMES_PADDLE);
    for (size_t i = 0; i + 1 < COUNT_OF(FOLDER_TYPES); i++) {
        check_layer(w, i, "mlp.", 0);
        check_layer(w, i, "joint.", 0);
    }
    weights_close(w);
}

TEST(parts_of_gguf_files_are_rows_of_the_whole)
{
    struct weights *w = open_gguf();
    for (size_t i = 0; i < COUNT_OF(GGUF_TYPES); i++) {
        check_layer(w, i, "mlp.", 0);
        check_layer(w, i, "mlp.experts.", N_STACK);
    }
    weights_close(w);
}

TEST(parts_of_dummy_weights_are_rows_of_the_whole)
{
    struct weights *w;
    weights_create_dummy(&w);
    w->n_layers = 2;
    check_layer(w, 1, "mlp.", 0);
    check_layer(w, 1, "mlp.experts.", N_STACK);
    weights_close(w);
}

/* A scale of a block cannot be in two parts. */
TEST(a_cut_inside_a_block_of_scales_is_refused)
{
    struct weights *w = open_folder(false);
    struct weight_src src;
    struct err err;
    static const struct share_part BAD[] = { { 64, 128 }, { 0, 64 }, { 128, 64 } },
                                   GOOD[] = { { 0, 128 }, { 128, 168 }, { 256, 40 }, { 64, 0 } };
    struct matrix_spec spec = {
        .prefix = "model.layers.3.mlp.", .leaf = "up_proj", .n_out = N_OUT, .n_in = N_IN
    };
    for (size_t i = 0; i < COUNT_OF(BAD); i++) {
        spec.part = &BAD[i];
        CHECK_STATUS(weights_matrix(w, &spec, &src, &err), ERR_UNSUPPORTED);
        CHECK(strstr(err.text, "model.layers.3.mlp.up_proj.weight_scale_inv") &&
              strstr(err.text, "lower --tensor-parallel-size"));
    }
    for (size_t i = 0; i < COUNT_OF(GOOD); i++) {
        spec.part = &GOOD[i];
        src = lookup(w, &spec);
        mem_free((void *)src.scales);
    }
    weights_close(w);
}

/* The shape in the file is the whole's, and so is the one in a complaint, also for who reads nothing. */
TEST(shapes_are_checked_on_the_whole)
{
    static const struct share_part NONE = { 0, 0 }, SOME = { 16, 32 };
    struct weights *w = open_folder(false);
    struct weight_src src;
    struct err err;
    for (int i = 0; i < 2; i++) {
        const struct matrix_spec spec = {
            .prefix = "model.layers.0.mlp.",
            .leaf = "up_proj",
            .n_out = 32,
            .n_in = N_IN,
            .part = i ? &SOME : &NONE,
        };
        CHECK_STATUS(weights_matrix(w, &spec, &src, &err), ERR_FORMAT);
        CHECK(strstr(err.text, "has shape [296, 256], the configuration asks for [32, 256]"));
    }
    weights_close(w);
}

/* ---- products ---- */

enum { ROWS_MAX = TEST_IS_SANITIZED ? 3 : 40 };

struct product {
    struct kernel_ctx *k;
    struct weights *w;
    struct matrix_spec specs[2]; /* the second: of up, with JOIN_PAIRED */
    enum weight_join join;
    enum quantize quantize;
    const float *x; /* [ROWS_MAX, N_IN] */
};

/* Adds the outputs of a part to their columns of y [n_rows, N_OUT]. */
static void multiply(struct product *p, struct share_part part, size_t n_rows, float *y)
{
    const size_t n = p->join == JOIN_PAIRED ? 2 : 1;
    struct weight_src src[2];
    struct weight packed;
    struct err err;
    for (size_t i = 0; i < n; i++) {
        p->specs[i].part = &part;
        src[i] = lookup(p->w, &p->specs[i]);
        p->specs[i].part = NULL;
    }
    const struct weight_pack_args a = {
        .parts = src, .n_parts = n, .join = p->join, .quantize = p->quantize
    };
    if (part.n > 0) {
        if (p->k->weight_ops->pack(p->k, &a, &packed, &err) != OK)
            test_fail(__FILE__, __LINE__, "%s", err.text);
        const struct matmul_args args = {
            .w = &packed,
            .x = p->x,
            .x_stride = N_IN,
            .n_rows = n_rows,
            .y = y + part.first,
            .y_stride = N_OUT,
            .epilogue = n == 2 ? MATMUL_SILU_MUL : MATMUL_ADD,
        };
        p->k->ops->matmul(p->k, &args, 1);
        weight_release(p->k, &packed);
    }
    for (size_t i = 0; i < n; i++) mem_free((void *)src[i].scales);
}

static void check_product(struct product *p, const float *before, size_t n_rows, const char *what)
{
    const size_t n = n_rows * N_OUT;
    float *want = MEM_ARRAY(float, n), *have = MEM_ARRAY(float, n);
    struct weight_src whole = lookup(p->w, &p->specs[0]);
    mem_free((void *)whole.scales);
    memcpy(want, before, n * sizeof *want);
    multiply(p, (struct share_part){ 0, N_OUT }, n_rows, want);
    for (size_t i = 0; i < COUNT_OF(SIZES); i++) {
        memcpy(have, before, n * sizeof *have);
        for (uint32_t r = 0; r < SIZES[i]; r++) {
            const struct model_share s = rank_of(r, SIZES[i]);
            multiply(p, share_units(&s, N_OUT, unit_of(&whole, p->quantize)), n_rows, have);
        }
        check_bits(have, want, n, what, SIZES[i], n_rows);
    }
    mem_free(want);
    mem_free(have);
}

static void check_type(struct product *p, const struct stored *t, size_t layer, const float *before,
                       enum quantize quantize)
{
    char prefix[64], what[96];
    snprintf(prefix, sizeof prefix, "model.layers.%zu.mlp.", layer);
    for (int paired = 0; paired < 2; paired++) {
        p->specs[0] = (struct matrix_spec){
            .prefix = prefix, .leaf = "gate_proj", .n_out = N_OUT, .n_in = N_IN
        };
        p->specs[1] = p->specs[0];
        p->specs[1].leaf = "up_proj";
        p->join = paired ? JOIN_PAIRED : JOIN_STACKED;
        p->quantize = quantize;
        snprintf(what, sizeof what, "%s as %s, %s", t->name, quantize_name(quantize),
                 paired ? "gate and up" : "one matrix");
        for (size_t n_rows = 1; n_rows <= ROWS_MAX; n_rows = n_rows == 1 ? 3 : n_rows * 13 + 1)
            check_product(p, before, n_rows, what);
    }
}

static void products_of(const char *isa)
{
    struct weights *folder = open_folder(false), *gguf = open_gguf();
    float *x = random_floats((size_t)ROWS_MAX * N_IN, 1),
          *before = random_floats((size_t)ROWS_MAX * N_OUT, 1);
    for (int fast = 0; fast < 2; fast++) {
        struct product p = { .k = open_backend(isa, fast ? ACTIVATIONS_FAST : ACTIVATIONS_F32, 2),
                             .w = folder,
                             .x = x };
        for (size_t i = 0; i < COUNT_OF(FOLDER_TYPES); i++)
            for (int q = QUANTIZE_NONE; q <= QUANTIZE_BLOCK_FP8; q++)
                if (q == QUANTIZE_NONE || FOLDER_TYPES[i].dtype != DTYPE_F8_E4M3)
                    check_type(&p, &FOLDER_TYPES[i], i, before, (enum quantize)q);
        p.w = gguf;
        for (size_t i = 0; i < COUNT_OF(GGUF_TYPES); i++)
            check_type(&p, &GGUF_TYPES[i], i, before, QUANTIZE_NONE);
        kernel_ctx_free(p.k);
    }
    mem_free(x);
    mem_free(before);
    weights_close(folder);
    weights_close(gguf);
}

#define PRODUCTS(name, isa)                                                                        \
    TEST(gathered_products_are_the_wholes_##name) { products_of(isa); }
EVERY_CPU_BACKEND(PRODUCTS)
#define PRODUCTS_CASE(name) CASE_T(gathered_products_are_the_wholes_##name, 240)

TEST_MAIN(CASE(parts_cover_all_outputs_once_and_differ_by_a_unit_at_most),
          CASE(query_heads_are_with_their_kv_heads),
          CASE(a_size_that_does_not_divide_the_heads_is_refused_with_those_that_do),
          CASE(parts_of_a_folder_are_rows_of_the_whole),
          CASE(parts_of_transposed_matrices_are_columns_of_the_whole),
          CASE(parts_of_gguf_files_are_rows_of_the_whole),
          CASE(parts_of_dummy_weights_are_rows_of_the_whole),
          CASE(a_cut_inside_a_block_of_scales_is_refused), CASE(shapes_are_checked_on_the_whole),
          EVERY_CPU_BACKEND_CASES(PRODUCTS_CASE))
