/* weights.c - one view over GGUF and safetensors tensors. Thread: loading. */
#include "shared/model/load/weights.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "shared/base/hash/hash.h"

enum { SAMPLE_BYTES = 4096 };

/* ---- open ---- */

/* Finds how the folder spells names, by its spelling of the embedding's name. */
static void find_spelling(struct weights *w)
{
    static const struct tensor_names SPELLINGS[] = {
        { TENSOR_NAMES_HF, "", false, NULL },
        { TENSOR_NAMES_HF, "", true, NULL },
        { TENSOR_NAMES_HF, "language_model.", false, NULL },
        { TENSOR_NAMES_HF, "language_model.", true, NULL },
        { TENSOR_NAMES_HF, "model.language_model.", true, NULL },
        { TENSOR_NAMES_PADDLE, "", false, NULL },
    };
    w->names = w->gguf ? (struct tensor_names){ .kind = TENSOR_NAMES_GGUF } : SPELLINGS[0];
    for (size_t i = 0; !w->gguf && i < COUNT_OF(SPELLINGS); i++) {
        char name[TENSOR_NAME_BYTES_MAX];
        tensor_names_in_file(&SPELLINGS[i], "model.embed_tokens.weight", name);
        if (!map_get(&w->by_name, str_of(name))) continue;
        w->names = SPELLINGS[i];
        return;
    }
}

static int by_name(const void *a, const void *b)
{
    const struct weights_tensor *x = a, *y = b;
    size_t n = x->name.n < y->name.n ? x->name.n : y->name.n;
    int order = memcmp(x->name.p, y->name.p, n);
    return order ? order : (x->name.n > y->name.n) - (x->name.n < y->name.n);
}

static void list_gguf(struct weights *w)
{
    w->n_tensors = w->gguf->n_tensors;
    w->tensors = MEM_ARRAY(struct weights_tensor, w->n_tensors);
    for (size_t i = 0; i < w->n_tensors; i++) {
        const struct gguf_tensor *from = &w->gguf->tensors[i];
        struct weights_tensor *to = &w->tensors[i];
        *to = (struct weights_tensor){
            .name = from->name,
            .type_name = from->type_name,
            .dtype = from->dtype,
            .n_dims = from->n_dims,
            .data = from->data,
            .bytes = from->bytes,
        };
        for (uint32_t d = 0; d < from->n_dims; d++) to->shape[d] = from->ne[from->n_dims - 1 - d];
    }
}

static void list_safetensors(struct weights *w)
{
    w->n_tensors = w->set.n_tensors;
    w->tensors = MEM_ARRAY(struct weights_tensor, w->n_tensors);
    for (size_t i = 0; i < w->n_tensors; i++) {
        const struct safetensors_tensor *from = w->set.tensors[i];
        struct weights_tensor *to = &w->tensors[i];
        *to = (struct weights_tensor){
            .name = str_of(from->name),
            .type_name = from->type_name,
            .dtype = from->dtype,
            .n_dims = from->n_dims,
            .data = from->data,
            .bytes = from->bytes,
        };
        memcpy(to->shape, from->shape, sizeof from->shape);
    }
}

/* Older PaddlePaddle files call bf16 "U16". */
static void mark_bf16(struct weights *w)
{
    for (size_t i = 0; i < w->n_tensors; i++)
        if (strcmp(w->tensors[i].type_name, "U16") == 0) w->tensors[i].dtype = DTYPE_BF16;
}

enum status weights_open(const char *path, struct weights **out, struct err *err)
{
    struct weights *w = MEM_NEW(struct weights);
    enum status st = file_is_folder(path) ? safetensors_set_open(path, &w->set, err)
                                          : gguf_open(path, &w->gguf, err);
    if (st != OK) {
        mem_free(w);
        return st;
    }
    if (w->gguf) list_gguf(w);
    else list_safetensors(w);
    if (w->n_tensors > 0) qsort(w->tensors, w->n_tensors, sizeof *w->tensors, by_name);
    for (size_t i = 0; i < w->n_tensors; i++)
        map_put(&w->by_name, w->tensors[i].name, &w->tensors[i]);
    find_spelling(w);
    if (w->names.kind == TENSOR_NAMES_PADDLE) mark_bf16(w);
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

void weights_unload_pages(const struct weights *w)
{
    if (w->gguf) file_map_unload(&w->gguf->file);
    for (size_t i = 0; w->gguf && i < w->gguf->n_others; i++)
        file_map_unload(&w->gguf->others[i]->file);
    for (size_t i = 0; i < w->set.n_files; i++) file_map_unload(&w->set.files[i]->file);
}

/* ---- use ---- */

static struct weights_tensor *find(const struct weights *w, const struct tensor_names *names,
                                   const char *name)
{
    char in_file[TENSOR_NAME_BYTES_MAX];
    tensor_names_in_file(names, name, in_file);
    return in_file[0] ? map_get(&w->by_name, str_of(in_file)) : NULL;
}

/* Tries the family's alias first, then Hugging Face's usual name: newer transformers save some
 * families' tensors under it. */
const struct weights_tensor *weights_find(const struct weights *w, const char *name)
{
    struct tensor_names plain = w->names;
    plain.aliases = NULL;
    const struct weights_tensor *t = find(w, &w->names, name);
    return t || !w->names.aliases ? t : find(w, &plain, name);
}

const struct weights_tensor *weights_take(struct weights *w, const char *name)
{
    /* an element of w->tensors, which is not const */
    struct weights_tensor *t = (struct weights_tensor *)weights_find(w, name);
    if (t) t->used = true;
    return t;
}

/* Old exports have the rope frequencies and the causal mask as tensors; Baton computes both. */
static bool is_recomputable(struct str name)
{
    return str_ends(name, "rotary_emb.inv_freq") || str_ends(name, "attn.bias.causal_mask") ||
           str_ends(name, "attn_rot_embd.weight") || str_ends(name, "self_attn.masked_bias");
}

enum status weights_check_all_used(const struct weights *w, const struct model_ops *ops,
                                   const struct model_config *c, struct err *err)
{
    for (size_t i = 0; i < w->n_tensors; i++) {
        const struct weights_tensor *t = &w->tensors[i];
        if (t->used || is_recomputable(t->name) || ops->is_draft(c, t->name)) continue;
        return err_set(err, ERR_UNSUPPORTED,
                       "tensor %.*s has no place in this architecture: the file is another kind of "
                       "model than its configuration says",
                       (int)(t->name.n < 128 ? t->name.n : 128), t->name.p);
    }
    return OK;
}

/* ---- fingerprint ---- */

/* Hashes three parts of the tensor: enough to tell fine-tunes apart without reading the file. */
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
    if (w->dummy) return weights_dummy_fingerprint(seed);
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

static uint64_t file_state(const struct file_map *f, uint64_t seed)
{
    const uint64_t state[2] = { f->bytes, f->changed_ns };
    return hash_64(state, sizeof state, seed);
}

uint64_t weights_files_state(const struct weights *w)
{
    uint64_t h = w->gguf ? file_state(&w->gguf->file, 0) : 0;
    for (size_t i = 0; w->gguf && i < w->gguf->n_others; i++)
        h = file_state(&w->gguf->others[i]->file, h);
    for (size_t i = 0; i < w->set.n_files; i++) h = file_state(&w->set.files[i]->file, h);
    return h;
}
