/* test_checkpoint_layouts.c - the same weights give the same bits in every layout in which
 * checkpoints store them.
 *
 * The golden checkpoints (one tensor per matrix, [out, in], bf16) are rewritten: in PaddlePaddle's
 * layout, with the experts of a layer in one tensor, with other prefixes, with several types at
 * once, in f16, and as f8 with block scales beside the same numbers in f32. A checkpoint that is
 * quantised while it is loaded must equal one that has the quantised numbers in f32. */
#include "kernels/float_bits.h"
#include "kernels/quantize.h"
#include "tests/fixtures/checkpoint_write.h"
#include "tests/fixtures/model_rig.h"

/* ---- rewriting ---- */

static struct str config_of(const char *name, struct buf *b)
{
    struct err err;
    buf_clear(b);
    if (file_read(golden(name, "model/config.json").text, 1 << 20, b, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s", err.text);
    return buf_str(b);
}

/* [rows, columns] → [columns, rows] */
static void transpose(struct checkpoint_tensor *t)
{
    size_t rows = t->shape[0], columns = t->shape[1], element = dtype_block_bytes(t->dtype);
    uint8_t *to = mem_calloc(1, t->bytes);
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < columns; c++)
            memcpy(to + (c * rows + r) * element, t->data + (r * columns + c) * element, element);
    mem_free(t->data);
    t->data = to;
    t->shape[0] = columns;
    t->shape[1] = rows;
}

/* Concatenates the rows of "<stem><part>.weight" into "<stem><whole>.weight". */
static void join(struct checkpoint *s, const char *stem, const char *const *parts, size_t n,
                 const char *whole)
{
    struct checkpoint_tensor *from[3];
    uint64_t shape[2] = { 0, 0 };
    char name[160];
    for (size_t i = 0; i < n; i++) {
        checkpoint_print(name, sizeof name, "%s%s.weight", stem, parts[i]);
        from[i] = checkpoint_find(s, name);
        CHECK(from[i] != NULL);
        shape[0] += from[i]->shape[0];
        shape[1] = from[i]->shape[1];
    }
    checkpoint_print(name, sizeof name, "%s%s.weight", stem, whole);
    struct checkpoint_tensor *to = checkpoint_add(s, name, from[0]->type, from[0]->dtype, 2, shape);
    uint8_t *at = to->data;
    for (size_t i = 0; i < n; at += from[i]->bytes, i++) {
        memcpy(at, from[i]->data, from[i]->bytes);
        checkpoint_drop(from[i]);
    }
}

static void to_paddle(struct checkpoint *s, bool u16)
{
    static const char *const QKV[] = { "q_proj", "k_proj", "v_proj" }, *const GATE_UP[] = {
        "gate_proj", "up_proj"
    };
    char stem[160];
    for (size_t i = 0, n = s->n; i < n; i++) {
        checkpoint_print(stem, sizeof stem, "%s", s->t[i].name);
        if (checkpoint_ends(&s->t[i], "q_proj.weight")) {
            stem[strlen(stem) - strlen("q_proj.weight")] = 0;
            join(s, stem, QKV, 3, "qkv_proj");
        } else if (checkpoint_ends(&s->t[i], "gate_proj.weight")) {
            stem[strlen(stem) - strlen("gate_proj.weight")] = 0;
            join(s, stem, GATE_UP, 2, "up_gate_proj");
        }
    }
    for (size_t i = 0; i < s->n; i++) {
        struct checkpoint_tensor *t = &s->t[i];
        bool matrix = t->name[0] && t->n_dims == 2 && !strstr(t->name, "embed_tokens") &&
                      !strstr(t->name, "correction_bias");
        if (matrix) transpose(t);
        if (u16 && t->dtype == DTYPE_BF16) checkpoint_print(t->type, sizeof t->type, "U16");
        if (str_starts(str_of(t->name), "model.")) checkpoint_rename(t, "model.", "ernie.");
    }
}

/* "<stem>experts.<i>.gate_proj.weight" .. → "<stem>experts.gate_up_proj" [E, 2 I, H] and
 * "<stem>experts.down_proj" [E, H, I] */
static void fuse_layer(struct checkpoint *s, const char *stem)
{
    struct checkpoint_tensor *gate_up = NULL, *down = NULL, *part[3];
    static const char *const PARTS[] = { "gate_proj", "up_proj", "down_proj" };
    char name[200];
    uint64_t n = 0;
    do
        checkpoint_print(name, sizeof name, "%s%llu.gate_proj.weight", stem,
                         (unsigned long long)n++);
    while (checkpoint_find(s, name));
    n--;
    for (uint64_t i = 0; i < n; i++) {
        for (size_t p = 0; p < 3; p++) {
            checkpoint_print(name, sizeof name, "%s%llu.%s.weight", stem, (unsigned long long)i,
                             PARTS[p]);
            part[p] = checkpoint_find(s, name);
            CHECK(part[p] != NULL);
        }
        if (i == 0) {
            char whole[200];
            checkpoint_print(whole, sizeof whole, "%sgate_up_proj", stem);
            gate_up = checkpoint_add(s, whole, part[0]->type, part[0]->dtype, 3,
                                     (uint64_t[]){ n, 2 * part[0]->shape[0], part[0]->shape[1] });
            checkpoint_print(whole, sizeof whole, "%sdown_proj", stem);
            down = checkpoint_add(s, whole, part[2]->type, part[2]->dtype, 3,
                                  (uint64_t[]){ n, part[2]->shape[0], part[2]->shape[1] });
        }
        memcpy(gate_up->data + i * (part[0]->bytes + part[1]->bytes), part[0]->data,
               part[0]->bytes);
        memcpy(gate_up->data + i * (part[0]->bytes + part[1]->bytes) + part[0]->bytes,
               part[1]->data, part[1]->bytes);
        memcpy(down->data + i * part[2]->bytes, part[2]->data, part[2]->bytes);
        for (size_t p = 0; p < 3; p++) checkpoint_drop(part[p]);
    }
}

static void fuse_experts(struct checkpoint *s)
{
    char stem[160];
    for (size_t i = 0, n = s->n; i < n; i++) { /* Mixtral's names first */
        if (!strstr(s->t[i].name, "block_sparse_moe")) continue;
        checkpoint_rename(&s->t[i], "block_sparse_moe", "mlp");
        checkpoint_rename(&s->t[i], ".w1.", ".gate_proj.");
        checkpoint_rename(&s->t[i], ".w2.", ".down_proj.");
        checkpoint_rename(&s->t[i], ".w3.", ".up_proj.");
    }
    for (size_t i = 0, n = s->n; i < n; i++) {
        char *at = strstr(s->t[i].name, "experts.0.gate_proj");
        if (!at || strstr(s->t[i].name, "shared")) continue;
        checkpoint_print(stem, sizeof stem, "%.*sexperts.", (int)(at - s->t[i].name), s->t[i].name);
        fuse_layer(s, stem);
    }
}

static void add_prefix(struct checkpoint *s, const char *prefix, bool drop_model)
{
    for (size_t i = 0; i < s->n; i++) {
        char name[160];
        bool inside = str_starts(str_of(s->t[i].name), "model.");
        checkpoint_print(name, sizeof name, "%s%s", prefix,
                         inside && drop_model ? s->t[i].name + 6 : s->t[i].name);
        checkpoint_print(s->t[i].name, sizeof s->t[i].name, "%s", name);
    }
}

/* Stores every third tensor in f32, so that matrices that are packed together have different
 * types. */
static void mix_types(struct checkpoint *s)
{
    for (size_t i = 0; i < s->n; i += 3) checkpoint_make_f32(&s->t[i], checkpoint_values(&s->t[i]));
}

/* ---- comparing ---- */

/* the emulated GPU is slow */
enum { N_IDS = TEST_IS_SANITIZED ? 12 : 40, N_ANSWER = TEST_IS_SANITIZED ? 2 : 5 };

/* The logits of a prompt and of some tokens after it. */
static float *answers_as(const char *path, const char *isa, enum activations activations,
                         enum quantize quantize, struct rig *r)
{
    int32_t ids[N_IDS + N_ANSWER];
    rig_open_as(r, path, isa, activations, quantize);
    float *out = MEM_ARRAY(float, (N_IDS + N_ANSWER) * (size_t)r->n_vocab);
    for (int32_t i = 0; i < N_IDS + N_ANSWER; i++) ids[i] = (7 + 31 * i) % (int32_t)r->n_vocab;
    feed_all(r, &(struct feed){ .table = 1, .ids = ids, .n = N_IDS }, 1, out);
    feed_all(r,
             &(struct feed){
                 .table = 1, .ids = ids + N_IDS, .n = N_ANSWER, .pos = N_IDS, .generated = true },
             1, out + N_IDS * (size_t)r->n_vocab);
    return out;
}

static float *answers(const char *path, const char *isa, enum quantize quantize, struct rig *r)
{
    return answers_as(path, isa, ACTIVATIONS_F32, quantize, r);
}

/* Backends of the CPU load by the same code, and ref computes slowly: it is left to --all where
 * there is another. */
static bool is_left_out(const struct kernel_backend *b)
{
    size_t first = 0;
    while (!KERNEL_BACKENDS[first]->available()) first++;
    return strcmp(b->name, "ref") == 0 && b != KERNEL_BACKENDS[first] && !test_runs_all();
}

static void check_same(const char *want_path, const char *path, enum quantize quantize,
                       const char *what)
{
    for (size_t k = 0; KERNEL_BACKENDS[k]; k++) {
        if (!KERNEL_BACKENDS[k]->available() || is_left_out(KERNEL_BACKENDS[k])) continue;
        struct rig a, b;
        float *want = answers(want_path, KERNEL_BACKENDS[k]->name, QUANTIZE_NONE, &a),
              *have = answers(path, KERNEL_BACKENDS[k]->name, quantize, &b);
        if (memcmp(want, have, (N_IDS + N_ANSWER) * (size_t)a.n_vocab * sizeof *want) != 0)
            test_fail(__FILE__, __LINE__, "%s: the logits on %s differ", what,
                      KERNEL_BACKENDS[k]->name);
        mem_free(want);
        mem_free(have);
        rig_close(&a);
        rig_close(&b);
    }
}

static struct path other(const char *name, const char *what)
{
    struct path p;
    checkpoint_print(p.text, sizeof p.text, "%s/%s-%s", test_tmpdir(), name, what);
    return p;
}

static void check_rewritten(const char *name, struct checkpoint *s, const char *what)
{
    struct buf b = { 0 };
    struct path p = other(name, what);
    checkpoint_write_folder(s, p.text, config_of(name, &b));
    check_same(golden(name, "model").text, p.text, QUANTIZE_NONE, p.text);
    checkpoint_release(s);
    buf_release(&b);
}

TEST(paddle_layout)
{
    static const char *const NAMES[] = { "ernie", "ernie_moe", "ernie_moe_untied",
                                         "ernie_moe_interval" };
    for (size_t i = 0; i < COUNT_OF(NAMES); i++)
        for (int u16 = 0; u16 < 2; u16++) {
            struct checkpoint *s = checkpoint_read(golden(NAMES[i], "model").text);
            to_paddle(s, u16 != 0);
            check_rewritten(NAMES[i], s, u16 ? "paddle-u16" : "paddle");
        }
}

TEST(fused_experts)
{
    static const char *const NAMES[] = { "qwen3_moe", "mixtral", "ernie_moe",
                                         "deepseek_v2_grouped" };
    for (size_t i = 0; i < COUNT_OF(NAMES); i++) {
        struct checkpoint *s = checkpoint_read(golden(NAMES[i], "model").text);
        fuse_experts(s);
        check_rewritten(NAMES[i], s, "fused");
    }
}

TEST(prefixes)
{
    static const struct {
        const char *prefix;
        bool drop_model;
    } SPELLINGS[] = { { "", true }, { "language_model.", false }, { "language_model.", true } };
    for (size_t i = 0; i < COUNT_OF(SPELLINGS); i++) {
        struct checkpoint *s = checkpoint_read(golden("ernie_moe", "model").text);
        for (size_t t = 0; t < s->n; t++)
            if (strstr(s->t[t].name, "mtp_")) checkpoint_drop(&s->t[t]);
        add_prefix(s, SPELLINGS[i].prefix, SPELLINGS[i].drop_model);
        for (size_t t = 0; t < s->n; t++)
            if (strcmp(s->t[t].name, SPELLINGS[i].prefix) == 0) checkpoint_drop(&s->t[t]);
        check_rewritten("ernie_moe", s, SPELLINGS[i].drop_model ? "dropped" : "added");
    }
}

TEST(several_types_in_one_model)
{
    static const char *const NAMES[] = { "llama_bias", "qwen3_moe", "mixtral", "ernie_moe",
                                         "deepseek_v3" };
    for (size_t i = 0; i < COUNT_OF(NAMES); i++) {
        struct checkpoint *s = checkpoint_read(golden(NAMES[i], "model").text);
        mix_types(s);
        check_rewritten(NAMES[i], s, "mixed");
    }
}

/* ---- f16 ---- */

/* Stores the tensor in f16; `meant` gets the rounded numbers. */
static void to_f16(struct checkpoint_tensor *t, struct checkpoint_tensor *meant)
{
    const size_t n = t->bytes / dtype_block_bytes(t->dtype);
    float *v = checkpoint_values(t);
    uint16_t *half = MEM_ARRAY(uint16_t, n);
    for (size_t i = 0; i < n; i++) v[i] = float_from_f16(half[i] = dtype_f32_to_f16(v[i]));
    checkpoint_make_f32(meant, v);
    mem_free(t->data);
    t->data = (uint8_t *)half;
    t->bytes = n * sizeof *half;
    t->dtype = DTYPE_F16;
    checkpoint_print(t->type, sizeof t->type, "F16");
}

/* The root mean square of the changes that FAST arithmetic on a GPU makes to the logits. */
static double gpu_error(const char *path)
{
    struct rig exact, fast;
    float *want = answers_as(path, "cuda", ACTIVATIONS_F32, QUANTIZE_NONE, &exact);
    float *have = answers_as(path, "cuda", ACTIVATIONS_FAST, QUANTIZE_NONE, &fast);
    double squares = 0;
    const size_t n = (N_IDS + N_ANSWER) * (size_t)exact.n_vocab;
    for (size_t i = 0; i < n; i++)
        squares += ((double)have[i] - (double)want[i]) * ((double)have[i] - (double)want[i]);
    mem_free(want);
    mem_free(have);
    rig_close(&exact);
    rig_close(&fast);
    return sqrt(squares / (double)n);
}

/* Dense layers, experts, and the products of MLA's heads. On a GPU matrices in f16 stay f16, and
 * their inputs are rounded to f16, so the answers are nearer to the exact ones than in bf16.
 * Attention rounds the same in both. */
TEST(f16_folders)
{
    static const char *const NAMES[] = { "llama_bias", "qwen3_moe", "deepseek_v2_lite" };
    for (size_t i = 0; i < COUNT_OF(NAMES); i++) {
        struct buf b = { 0 };
        struct path f16 = other(NAMES[i], "f16"), meant = other(NAMES[i], "f16-meant");
        struct checkpoint *s = checkpoint_read(golden(NAMES[i], "model").text),
                          *m = checkpoint_read(golden(NAMES[i], "model").text);
        for (size_t t = 0; t < s->n; t++) to_f16(&s->t[t], &m->t[t]);
        checkpoint_write_folder(s, f16.text, config_of(NAMES[i], &b));
        checkpoint_write_folder(m, meant.text, config_of(NAMES[i], &b));
        check_same(meant.text, f16.text, QUANTIZE_NONE, f16.text);
        if (has_gpu()) {
            const double of_f16 = gpu_error(f16.text),
                         of_bf16 = gpu_error(golden(NAMES[i], "model").text);
            if (!(of_f16 < 0.75 * of_bf16))
                test_fail(__FILE__, __LINE__, "%s: f16 is %g off, bf16 %g", NAMES[i], of_f16,
                          of_bf16);
        }
        checkpoint_release(s);
        checkpoint_release(m);
        buf_release(&b);
    }
}

/* ---- f8 ---- */

static bool is_f8_matrix(const struct checkpoint_tensor *t)
{
    static const char *const KEPT[] = { "embed_tokens", "lm_head", "norm",
                                        "mlp.gate.",    "eh_proj", "shared_head" };
    for (size_t i = 0; i < COUNT_OF(KEPT); i++)
        if (strstr(t->name, KEPT[i])) return false;
    return t->n_dims == 2 && checkpoint_ends(t, ".weight");
}

/* Scales that are not powers of two, and a partial block at both edges. */
static void to_f8(struct checkpoint *f8, struct checkpoint *meant, size_t i)
{
    struct checkpoint_tensor *t = &f8->t[i];
    const size_t rows = t->shape[0], columns = t->shape[1],
                 across = (columns + F8_BLOCK - 1) / F8_BLOCK,
                 down = (rows + F8_BLOCK - 1) / F8_BLOCK;
    float *v = checkpoint_values(t);
    uint8_t *q = mem_calloc(rows, columns);
    char name[200];
    checkpoint_print(name, sizeof name, "%s_scale_inv", t->name);
    struct checkpoint_tensor *scales = checkpoint_add(f8, name, "F32", DTYPE_F32, 2,
                                                      (uint64_t[]){ down, across });
    float *scale = (float *)scales->data;
    for (size_t b = 0; b < down * across; b++) scale[b] = 0.003f + 0.0001f * (float)b;
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < columns; c++) {
            float s = scale[r / F8_BLOCK * across + c / F8_BLOCK];
            q[r * columns + c] = float_to_f8(v[r * columns + c] / s);
            v[r * columns + c] = dtype_f8_e4m3_to_f32(q[r * columns + c]) * s;
        }
    checkpoint_make_f32(&meant->t[i], v);
    mem_free(t->data);
    t->data = q;
    t->bytes = rows * columns;
    t->dtype = DTYPE_F8_E4M3;
    checkpoint_print(t->type, sizeof t->type, "F8_E4M3");
}

/* The configuration with one more member after the opening brace. */
static struct str with_member(struct str config, const char *member, struct buf *b)
{
    buf_clear(b);
    buf_printf(b, "{%s,%.*s", member, (int)(config.n - 1), config.p + 1);
    return buf_str(b);
}

static const char F8_CONFIG[] =
    "\"quantization_config\":{\"quant_method\":\"fp8\",\"fmt\":\"e4m3\",\"weight_block_size\":[128,"
    "128],\"activation_scheme\":\"dynamic\"}";

TEST(f8_with_block_scales)
{
    static const char *const NAMES[] = { "deepseek_v3", "deepseek_v2_lite", "qwen3_moe" };
    for (size_t i = 0; i < COUNT_OF(NAMES); i++) {
        struct buf a = { 0 }, b = { 0 };
        struct path f8 = other(NAMES[i], "f8"), meant = other(NAMES[i], "meant");
        struct checkpoint *s = checkpoint_read(golden(NAMES[i], "model").text),
                          *m = checkpoint_read(golden(NAMES[i], "model").text);
        for (size_t t = 0, n = s->n; t < n; t++)
            if (is_f8_matrix(&s->t[t])) to_f8(s, m, t);
        struct str config = config_of(NAMES[i], &a);
        checkpoint_write_folder(s, f8.text, with_member(config, F8_CONFIG, &b));
        checkpoint_write_folder(m, meant.text, config);
        check_same(meant.text, f8.text, QUANTIZE_NONE, f8.text);
        checkpoint_release(s);
        checkpoint_release(m);
        buf_release(&a);
        buf_release(&b);
    }
}

/* ---- --quantization ---- */

/* Is the tensor quantised? Those of attention, feed-forward blocks and experts are; embedding,
 * head, norms, routers and MLA's kv_b are not. */
static bool is_quantised(const struct checkpoint_tensor *t)
{
    return is_f8_matrix(t) && !strstr(t->name, "moe.gate.") && !strstr(t->name, "kv_b_proj");
}

static void quantise(struct checkpoint_tensor *t, enum quantize how)
{
    const size_t rows = t->shape[0], columns = t->shape[1], side = F8_BLOCK;
    float *v = checkpoint_values(t);
    int8_t *q = MEM_ARRAY(int8_t, columns);
    uint8_t *f8 = MEM_ARRAY(uint8_t, side * side);
    for (size_t r = 0; r < rows && how != QUANTIZE_BLOCK_FP8; r++) {
        float scale = quantize_channel(v + r * columns, columns, how == QUANTIZE_WINT8 ? 127 : 7,
                                       q);
        for (size_t c = 0; c < columns; c++) v[r * columns + c] = (float)q[c] * scale;
    }
    for (size_t r = 0; r < rows && how == QUANTIZE_BLOCK_FP8; r += side)
        for (size_t c = 0; c < columns; c += side) {
            size_t n_rows = rows - r < side ? rows - r : side,
                   n = columns - c < side ? columns - c : side;
            float *block = v + r * columns + c,
                  scale = quantize_f8_block(block, columns, n_rows, n, f8, side);
            for (size_t i = 0; i < n_rows; i++)
                for (size_t j = 0; j < n; j++)
                    block[i * columns + j] = dtype_f8_e4m3_to_f32(f8[i * side + j]) * scale;
        }
    mem_free(q);
    mem_free(f8);
    checkpoint_make_f32(t, v);
}

/* For ERNIE with experts wint4 means wint4 for routed experts and wint8 for the rest. */
static enum quantize quantize_meant(const char *family, const char *tensor, enum quantize asked)
{
    bool rest = strcmp(family, "ernie_moe") == 0 && !strstr(tensor, ".experts.");
    return asked == QUANTIZE_WINT4 && rest ? QUANTIZE_WINT8 : asked;
}

TEST(what_is_quantised_while_loading)
{
    static const char *const NAMES[] = { "llama_bias", "qwen2",       "qwen3_moe",       "mixtral",
                                         "ernie_moe",  "deepseek_v3", "deepseek_v2_lite" };
    static const enum quantize QUANTIZATIONS[] = { QUANTIZE_WINT8, QUANTIZE_WINT4,
                                                   QUANTIZE_BLOCK_FP8 };
    static const char *const FOLDERS[] = { "wint8", "wint4", "block_wise_fp8" };
    for (size_t i = 0; i < COUNT_OF(NAMES); i++)
        for (size_t f = 0; f < COUNT_OF(QUANTIZATIONS); f++) {
            struct buf b = { 0 };
            struct path meant = other(NAMES[i], FOLDERS[f]);
            struct checkpoint *s = checkpoint_read(golden(NAMES[i], "model").text);
            for (size_t t = 0; t < s->n; t++)
                if (is_quantised(&s->t[t]))
                    quantise(&s->t[t], quantize_meant(NAMES[i], s->t[t].name, QUANTIZATIONS[f]));
            checkpoint_write_folder(s, meant.text, config_of(NAMES[i], &b));
            check_same(meant.text, golden(NAMES[i], "model").text, QUANTIZATIONS[f], meant.text);
            checkpoint_release(s);
            buf_release(&b);
        }
}

TEST_MAIN(CASE_T(paddle_layout, 120), CASE_T(fused_experts, 120), CASE(prefixes),
          CASE_T(several_types_in_one_model, 120), CASE_T(f16_folders, 240),
          CASE_T(f8_with_block_scales, 120), CASE_T(what_is_quantised_while_loading, 240))
