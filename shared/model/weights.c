/* weights.c - one view over GGUF and safetensors tensors. */
#include "shared/model/weights.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "shared/base/hash.h"

enum { NAME_BYTES_MAX = 256, SAMPLE_BYTES = 4096 };

/* Parts of names: Hugging Face on the left, GGUF on the right. */
static const char *const GLOBAL_NAMES[][2] = {
    { "model.embed_tokens.weight", "token_embd.weight" },
    { "model.norm.weight", "output_norm.weight" },
    { "lm_head.weight", "output.weight" },
    { "lm_head.bias", "output.bias" },
    { "rope_freqs.weight", "rope_freqs.weight" },
};
static const char *const LAYER_NAMES[][2] = {
    { "input_layernorm", "attn_norm" },     { "post_attention_layernorm", "ffn_norm" }, { "self_attn.q_proj", "attn_q" },
    { "self_attn.k_proj", "attn_k" },       { "self_attn.v_proj", "attn_v" },           { "self_attn.o_proj", "attn_output" },
    { "self_attn.q_norm", "attn_q_norm" },  { "self_attn.k_norm", "attn_k_norm" },      { "mlp.gate_proj", "ffn_gate" },
    { "mlp.up_proj", "ffn_up" },            { "mlp.down_proj", "ffn_down" },
};

/* ---- names ------------------------------------------------------------------------------------------------------- */

/* "model.layers.<n>.<part>.<weight|bias>" → "blk.<n>.<part>.<weight|bias>"; an untranslatable name becomes "". */
static void gguf_name(const char *name, char out[NAME_BYTES_MAX])
{
    out[0] = 0;
    for (size_t i = 0; i < COUNT_OF(GLOBAL_NAMES); i++)
        if (strcmp(name, GLOBAL_NAMES[i][0]) == 0) {
            snprintf(out, NAME_BYTES_MAX, "%s", GLOBAL_NAMES[i][1]);
            return;
        }
    static const char PREFIX[] = "model.layers.";
    if (strncmp(name, PREFIX, sizeof PREFIX - 1) != 0) return;
    const char *number = name + sizeof PREFIX - 1, *part = strchr(number, '.');
    if (!part) return;
    const char *kind = strrchr(++part, '.');
    if (!kind) return;
    for (size_t i = 0; i < COUNT_OF(LAYER_NAMES); i++)
        if (strlen(LAYER_NAMES[i][0]) == (size_t)(kind - part) && strncmp(part, LAYER_NAMES[i][0], (size_t)(kind - part)) == 0)
            snprintf(out, NAME_BYTES_MAX, "blk.%.*s.%s%s", (int)(part - 1 - number), number, LAYER_NAMES[i][1], kind);
}

static void file_name(const struct weights *w, const char *name, char out[NAME_BYTES_MAX])
{
    if (w->gguf) {
        gguf_name(name, out);
        return;
    }
    if (w->drop_model && strncmp(name, "model.", 6) == 0) name += 6;
    snprintf(out, NAME_BYTES_MAX, "%s%s", w->prefix, name);
}

/* Which spelling of the embedding's name does the folder use? All other names follow it. */
static void find_prefix(struct weights *w)
{
    static const char *const PREFIXES[] = { "", "language_model." };
    w->prefix = "";
    for (size_t i = 0; i < COUNT_OF(PREFIXES); i++)
        for (int drop = 0; drop < 2; drop++) {
            char name[NAME_BYTES_MAX];
            snprintf(name, sizeof name, "%s%s", PREFIXES[i], drop ? "embed_tokens.weight" : "model.embed_tokens.weight");
            if (!map_get(&w->by_name, str_of(name))) continue;
            w->prefix = PREFIXES[i];
            w->drop_model = drop != 0;
            return;
        }
}

/* ---- open -------------------------------------------------------------------------------------------------------- */

static int by_name(const void *a, const void *b)
{
    const struct weights_tensor *x = a, *y = b;
    size_t n = x->name.n < y->name.n ? x->name.n : y->name.n;
    int    order = memcmp(x->name.p, y->name.p, n);
    return order ? order : (x->name.n > y->name.n) - (x->name.n < y->name.n);
}

static void list_gguf(struct weights *w)
{
    w->n_tensors = w->gguf->n_tensors;
    w->tensors = MEM_ARRAY(struct weights_tensor, w->n_tensors);
    for (size_t i = 0; i < w->n_tensors; i++) {
        const struct gguf_tensor *from = &w->gguf->tensors[i];
        struct weights_tensor    *to = &w->tensors[i];
        *to = (struct weights_tensor){ .name = from->name, .type_name = from->type_name, .dtype = from->dtype, .n_dims = from->n_dims,
                                       .data = from->data, .bytes = from->bytes };
        for (uint32_t d = 0; d < from->n_dims; d++) to->shape[d] = from->ne[from->n_dims - 1 - d];
    }
}

static void list_safetensors(struct weights *w)
{
    w->n_tensors = w->set.n_tensors;
    w->tensors = MEM_ARRAY(struct weights_tensor, w->n_tensors);
    for (size_t i = 0; i < w->n_tensors; i++) {
        const struct safetensors_tensor *from = w->set.tensors[i];
        struct weights_tensor           *to = &w->tensors[i];
        *to = (struct weights_tensor){ .name = str_of(from->name), .type_name = from->type_name, .dtype = from->dtype,
                                       .n_dims = from->n_dims, .data = from->data, .bytes = from->bytes };
        memcpy(to->shape, from->shape, sizeof from->shape);
    }
}

enum status weights_open(const char *path, struct weights **out, struct err *err)
{
    struct weights *w = MEM_NEW(struct weights);
    enum status     st = file_is_folder(path) ? safetensors_set_open(path, &w->set, err) : gguf_open(path, &w->gguf, err);
    if (st != OK) {
        mem_free(w);
        return st;
    }
    if (w->gguf) list_gguf(w);
    else list_safetensors(w);
    if (w->n_tensors > 0) qsort(w->tensors, w->n_tensors, sizeof *w->tensors, by_name);
    for (size_t i = 0; i < w->n_tensors; i++) {
        map_put(&w->by_name, w->tensors[i].name, &w->tensors[i]);
        w->total_bytes += w->tensors[i].bytes;
    }
    find_prefix(w);
    *out = w;
    return OK;
}

void weights_close(struct weights *w)
{
    if (!w) return;
    map_release(&w->by_name);
    mem_free(w->tensors);
    safetensors_set_close(&w->set);
    gguf_close(w->gguf);
    mem_free(w);
}

/* ---- taking ------------------------------------------------------------------------------------------------------ */

static struct weights_tensor *find(const struct weights *w, const char *name)
{
    char in_file[NAME_BYTES_MAX];
    file_name(w, name, in_file);
    return map_get(&w->by_name, str_of(in_file));
}

bool weights_has(const struct weights *w, const char *name) { return find(w, name) != NULL; }

const struct weights_tensor *weights_take(struct weights *w, const char *name)
{
    struct weights_tensor *t = find(w, name);
    if (!t || t->used) return t;
    t->used = true;
    w->used_bytes += t->bytes;
    if (w->progress) w->progress(w->progress_arg, (double)w->used_bytes / (double)(w->total_bytes ? w->total_bytes : 1));
    return t;
}

static void shape_text(const uint64_t *shape, uint32_t n_dims, char *out, size_t cap)
{
    size_t at = 0;
    for (uint32_t d = 0; d < n_dims && at < cap; d++)
        at += (size_t)snprintf(out + at, cap - at, "%s%" PRIu64, d ? ", " : "", shape[d]);
}

static enum status take_shaped(struct weights *w, const char *name, const uint64_t *shape, uint32_t n_dims, const struct weights_tensor **out,
                               struct err *err)
{
    const struct weights_tensor *t = weights_take(w, name);
    char in_file[NAME_BYTES_MAX], want[128] = "", have[128] = "";
    file_name(w, name, in_file);
    if (!t) return err_field(err, ERR_NOT_FOUND, in_file, "tensor %s is missing", in_file);
    if (t->n_dims != n_dims || memcmp(t->shape, shape, n_dims * sizeof *shape) != 0) {
        shape_text(shape, n_dims, want, sizeof want);
        shape_text(t->shape, t->n_dims, have, sizeof have);
        return err_field(err, ERR_FORMAT, in_file, "tensor %s has shape [%s], the configuration asks for [%s]", in_file, have, want);
    }
    if (t->dtype < 0)
        return err_field(err, ERR_UNSUPPORTED, in_file, "tensor %s is of type %s, which is not supported (F32, F16, BF16, Q8_0 and Q4_1 are)",
                         in_file, t->type_name);
    *out = t;
    return OK;
}

enum status weights_matrix(struct weights *w, const char *name, size_t n_out, size_t n_in, struct weight_src *out, struct err *err)
{
    const struct weights_tensor *t;
    TRY(take_shaped(w, name, (uint64_t[]){ n_out, n_in }, 2, &t, err));
    *out = (struct weight_src){ .dtype = (enum dtype)t->dtype, .data = t->data, .n_out = n_out, .n_in = n_in };
    return OK;
}

enum status weights_vector(struct weights *w, const char *name, size_t n, float **out, struct err *err)
{
    const struct weights_tensor *t;
    TRY(take_shaped(w, name, (uint64_t[]){ n }, 1, &t, err));
    float *v = mem_aligned(64, n * sizeof *v);
    dtype_to_f32((enum dtype)t->dtype, t->data, v, n);
    *out = v;
    return OK;
}

/* Old exports carry the rope frequencies and the causal mask as tensors; both are computed here. */
static bool is_recomputable(struct str name)
{
    return str_ends(name, "rotary_emb.inv_freq") || str_ends(name, "attn.bias.causal_mask") || str_ends(name, "attn_rot_embd.weight") ||
           str_ends(name, "self_attn.masked_bias");
}

enum status weights_check_all_used(const struct weights *w, struct err *err)
{
    for (size_t i = 0; i < w->n_tensors; i++) {
        const struct weights_tensor *t = &w->tensors[i];
        if (t->used || is_recomputable(t->name)) continue;
        return err_set(err, ERR_UNSUPPORTED, "tensor %.*s has no place in this architecture: the file is another kind of model than its configuration says",
                       (int)(t->name.n < 128 ? t->name.n : 128), t->name.p);
    }
    return OK;
}

/* ---- fingerprint ------------------------------------------------------------------------------------------------- */

/* Three pieces of each tensor: enough to tell fine-tunes apart without reading the whole file. */
static uint64_t sample(const struct weights_tensor *t, uint64_t seed)
{
    size_t n = t->bytes < SAMPLE_BYTES ? t->bytes : SAMPLE_BYTES;
    if (n == 0) return seed;
    seed = hash_64(t->data, n, seed);
    seed = hash_64(t->data + (t->bytes - n) / 2, n, seed);
    return hash_64(t->data + t->bytes - n, n, seed);
}

uint64_t weights_fingerprint(const struct weights *w, uint64_t seed)
{
    for (size_t i = 0; i < w->n_tensors; i++) {
        const struct weights_tensor *t = &w->tensors[i];
        seed = hash_64(t->name.p, t->name.n, seed);
        seed = hash_64(t->type_name, strlen(t->type_name), seed);
        for (uint32_t d = 0; d < t->n_dims; d++) {
            uint8_t le[8];
            for (unsigned b = 0; b < 8; b++) le[b] = (uint8_t)(t->shape[d] >> (8 * b));
            seed = hash_64(le, sizeof le, seed);
        }
        seed = sample(t, seed);
    }
    return seed;
}
