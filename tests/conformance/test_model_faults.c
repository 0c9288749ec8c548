/* test_model_faults.c - a checkpoint with a tensor missing, misshapen, of a wrong type or too many
 * is refused by the tensor's name, for every architecture and every kind of tensor, before anything
 * is packed. */
#include "tests/fixtures/checkpoint_write.h"
#include "tests/fixtures/model_rig.h"

static const char *const NAMES[] = {
    "llama_bias",  "qwen2",
    "qwen3",       "qwen3_moe",
    "mixtral",     "ernie",
    "ernie_moe",   "ernie_moe_untied",
    "deepseek_v3", "deepseek_v2_lite",
};

/* The part of a tensor that the loader does not use: the draft model's. */
static bool is_draft(const char *name, uint32_t n_layers)
{
    uint32_t layer = 0;
    return strstr(name, "mtp_") ||
           (sscanf(name, "model.layers.%u.", &layer) == 1 && layer >= n_layers);
}

/* Of many experts the first and one more; in a sanitizer's build, of many layers the first and the
 * last. */
static bool is_sample(const char *name, uint32_t n_layers)
{
    const char *experts = strstr(name, "experts.");
    uint32_t layer = 0;
    (void)sscanf(name, "model.layers.%u.", &layer);
    if (!test_runs_long() && layer > 0 && layer + 1 < n_layers) return false;
    return !experts || strstr(name, "shared") || strstr(name, "experts.0.") ||
           strstr(name, "experts.3.");
}

struct fault {
    struct path folder;
    struct buf config;
    struct kernel_ctx *k;
    bool progressed; /* weights began to be packed */
    bool stop;       /* on_progress ends the load */
};

static bool on_progress(void *arg, double done)
{
    struct fault *f = arg;
    (void)done;
    f->progressed = true;
    return !f->stop;
}

static enum status load(struct fault *f, const struct checkpoint *s, struct err *err)
{
    struct model *m = NULL;
    checkpoint_write_folder(s, f->folder.text, buf_str(&f->config));
    struct model_options o = {
        .path = f->folder.text,
        .max_rows = 8,
        .max_model_len = 64,
        .kernels = f->k,
        .progress = on_progress,
        .progress_arg = f,
    };
    f->progressed = false;
    *err = (struct err){ 0 };
    enum status st = model_load(&o, &m, err);
    if (st == OK) model_free(m);
    return st;
}

static void refuses(struct fault *f, const struct checkpoint *s, enum status want, const char *name,
                    const char *what)
{
    struct err err;
    enum status st = load(f, s, &err);
    if (st != want || !strstr(err.text, name) || f->progressed)
        test_fail(__FILE__, __LINE__, "%s %s: status %d%s: %s", name, what, (int)st,
                  f->progressed ? ", after packing began" : "", err.text);
}

static void check_tensor(struct fault *f, struct checkpoint *s, size_t i)
{
    struct checkpoint_tensor *t = &s->t[i], saved = *t;
    checkpoint_drop(t);
    refuses(f, s, ERR_NOT_FOUND, saved.name, "missing");
    *t = saved;
    t->shape[t->n_dims - 1]--; /* one column less, in shape and in bytes */
    t->bytes = (t->n_dims == 2 ? t->shape[0] : 1) * t->shape[t->n_dims - 1] *
               dtype_block_bytes(t->dtype);
    refuses(f, s, ERR_FORMAT, saved.name, "misshapen");
    *t = saved;
    checkpoint_print(t->type, sizeof t->type, t->dtype == DTYPE_F32 ? "I32" : "I16");
    refuses(f, s, ERR_UNSUPPORTED, saved.name, "of integers");
    *t = saved;
}

static void check_folder(const char *name)
{
    struct fault f = { 0 };
    struct err err;
    struct checkpoint *s = checkpoint_read(golden(name, "model").text);
    struct rig r;
    rig_open(&r, golden(name, "model").text, "auto");
    const uint32_t n_layers = r.m->config.n_layers;
    f.k = r.k;
    checkpoint_print(f.folder.text, sizeof f.folder.text, "%s", test_tmpdir());
    CHECK_OK(file_read(golden(name, "model/config.json").text, 1 << 20, &f.config, &err));
    CHECK_OK(load(&f, s, &err));
    CHECK(f.progressed);
    for (size_t i = 0, n = s->n; i < n; i++)
        if (!is_draft(s->t[i].name, n_layers) && is_sample(s->t[i].name, n_layers))
            check_tensor(&f, s, i);
    struct checkpoint_tensor *extra = checkpoint_add(
        s, "model.layers.0.self_attn.unheard_of.weight", "F32", DTYPE_F32, 1, (uint64_t[]){ 4 });
    refuses(&f, s, ERR_UNSUPPORTED, extra->name, "more than the architecture has");
    checkpoint_drop(extra);
    for (size_t i = 0; i < s->n; i++) /* what is never used may be missing */
        if (is_draft(s->t[i].name, n_layers)) checkpoint_drop(&s->t[i]);
    CHECK_OK(load(&f, s, &err));
    checkpoint_release(s);
    buf_release(&f.config);
    rig_close(&r);
}

TEST(every_fault_names_the_tensor)
{
    for (size_t i = 0; i < COUNT_OF(NAMES); i++) check_folder(NAMES[i]);
}

/* f8 without its scales, and with scales of another shape. */
TEST(f8_scales)
{
    struct fault f = { 0 };
    struct err err;
    struct checkpoint *s = checkpoint_read(golden("qwen2", "model").text);
    struct checkpoint_tensor *t = checkpoint_find(s, "model.layers.1.mlp.down_proj.weight");
    CHECK_OK(kernel_ctx_create(kernel_options_default("auto", ACTIVATIONS_F32, 1), &f.k, &err));
    checkpoint_print(f.folder.text, sizeof f.folder.text, "%s", test_tmpdir());
    CHECK_OK(file_read(golden("qwen2", "model/config.json").text, 1 << 20, &f.config, &err));
    t->dtype = DTYPE_F8_E4M3;
    t->bytes /= 2;
    checkpoint_print(t->type, sizeof t->type, "F8_E4M3");
    refuses(&f, s, ERR_NOT_FOUND, "model.layers.1.mlp.down_proj.weight_scale_inv", "missing");
    checkpoint_add(s, "model.layers.1.mlp.down_proj.weight_scale_inv", "F32", DTYPE_F32, 2,
                   (uint64_t[]){ 2, 1 });
    refuses(&f, s, ERR_FORMAT, "model.layers.1.mlp.down_proj.weight_scale_inv", "misshapen");
    s->t[s->n - 1].shape[0] = 1;
    s->t[s->n - 1].bytes = 4;
    CHECK_OK(load(&f, s, &err));
    checkpoint_release(s);
    buf_release(&f.config);
    kernel_ctx_free(f.k);
}

TEST(load_that_is_stopped)
{
    struct fault f = { .stop = true };
    struct err err;
    struct checkpoint *s = checkpoint_read(golden("qwen2", "model").text);
    CHECK_OK(kernel_ctx_create(kernel_options_default("auto", ACTIVATIONS_F32, 1), &f.k, &err));
    checkpoint_print(f.folder.text, sizeof f.folder.text, "%s", test_tmpdir());
    CHECK_OK(file_read(golden("qwen2", "model/config.json").text, 1 << 20, &f.config, &err));
    CHECK_STATUS(load(&f, s, &err), ERR_CANCELED);
    CHECK(strstr(err.text, "loading the model was stopped"));
    f.stop = false;
    CHECK_OK(load(&f, s, &err));
    checkpoint_release(s);
    buf_release(&f.config);
    kernel_ctx_free(f.k);
}

/* A window is an attention of its own, unless every context fits in it. */
TEST(windows)
{
    struct fault f = { 0 };
    struct err err;
    struct buf plain = { 0 };
    struct checkpoint *s = checkpoint_read(golden("mixtral", "model").text);
    CHECK_OK(kernel_ctx_create(kernel_options_default("auto", ACTIVATIONS_F32, 1), &f.k, &err));
    checkpoint_print(f.folder.text, sizeof f.folder.text, "%s", test_tmpdir());
    CHECK_OK(file_read(golden("mixtral", "model/config.json").text, 1 << 20, &plain, &err));
    size_t at = str_find(buf_str(&plain), STR("\"sliding_window\": null"));
    CHECK(at != SIZE_MAX);
    buf_printf(&f.config, "%.*s\"sliding_window\": 63%s", (int)at, plain.data,
               plain.data + at + strlen("\"sliding_window\": null"));
    CHECK_STATUS(load(&f, s, &err), ERR_UNSUPPORTED); /* contexts of 64 are asked for */
    CHECK_EQ_STR(err.field, "sliding_window");
    CHECK(strstr(err.text, "--max-model-len 63"));
    f.config.data[at + strlen("\"sliding_window\": 6")] = '4';
    CHECK_OK(load(&f, s, &err));
    checkpoint_release(s);
    buf_release(&f.config);
    buf_release(&plain);
    kernel_ctx_free(f.k);
}

/* Packing fails for want of memory: the sentence has the matrix and how much there was not. */
TEST(memory_that_packing_lacks)
{
    struct err err = { 0 };
    struct kernel_ctx *k;
    struct model *m = NULL;
    int n_named = 0;
    CHECK_OK(kernel_ctx_create(kernel_options_default("auto", ACTIVATIONS_F32, 1), &k, &err));
    struct path folder = golden("qwen2", "model");
    struct model_options o = {
        .path = folder.text,
        .max_rows = 8,
        .max_model_len = 64,
        .quantize = QUANTIZE_WINT8,
        .kernels = k,
    };
    for (long nth = 1; nth <= 40; nth++) {
        mem_fail_nth(nth);
        enum status st = model_load(&o, &m, &err);
        mem_fail_nth(0);
        if (st == OK) {
            model_free(m);
            break;
        }
        CHECK_STATUS(st, ERR_NOMEM);
        n_named += strstr(err.text, "model.layers.") &&
                   strstr(err.text, "_proj cannot be packed: no memory for ") != NULL;
    }
    CHECK(n_named > 0);
    kernel_ctx_free(k);
}

TEST_MAIN(CASE_T(every_fault_names_the_tensor, 240), CASE(f8_scales), CASE(load_that_is_stopped),
          CASE(windows), CASE(memory_that_packing_lacks))
