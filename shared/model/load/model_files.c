/* model_files.c - tokenizer files and chat template of a folder or a GGUF.
 *
 * Thread: any. */
#include "shared/model/load/model_files.h"

#include <string.h>

#include "shared/base/json/json.h"
#include "shared/base/mem.h"
#include "shared/model/load/file_map.h"
#include "shared/model/load/gguf.h"

/* Name of the template for requests with tools, in lists, folders and keys. */
#define TOOL_TEMPLATE "tool_use"

enum { TOKENIZER_BYTES_MAX = 256 << 20, SMALL_BYTES_MAX = 16 << 20, TOKENS_MAX = 1 << 24 };

/* Appends the file FOLDER/NAME to `out`; nothing when it is absent. */
static enum status read_optional(const char *folder, const char *name, size_t limit,
                                 struct buf *out, struct err *err)
{
    struct buf path = { 0 };
    enum status st = OK;
    buf_printf(&path, "%s/%s", folder, name);
    if (file_is_regular(path.data)) st = file_read(path.data, limit, out, err);
    buf_release(&path);
    return st;
}

static enum status parse_optional(const char *folder, const char *name, cJSON **out,
                                  struct err *err)
{
    struct buf text = { 0 };
    *out = NULL;
    enum status st = read_optional(folder, name, SMALL_BYTES_MAX, &text, err);
    if (st == OK && text.len > 0) st = json_parse(buf_str(&text), false, out, err);
    if (st != OK) err_prefix(err, "%s/%s: ", folder, name);
    buf_release(&text);
    return st;
}

/* ---- folder ---- */

/* Takes the template called `name` from a list of {"name", "template"}. */
static void take_named(const cJSON *list, const char *name, struct buf *out)
{
    const cJSON *one;
    cJSON_ArrayForEach (one, list) {
        const cJSON *is = json_member(one, "name"), *text = json_member(one, "template");
        if (out->len == 0 && cJSON_IsString(is) && cJSON_IsString(text) &&
            strcmp(is->valuestring, name) == 0)
            buf_add_c(out, text->valuestring);
    }
}

/* Takes the templates from a string, or the entries "default" and "tool_use" of a list. Does
 * nothing if an earlier file had templates. */
static void take_templates(const cJSON *o, struct model_text *t)
{
    const cJSON *v = json_member(o, "chat_template");
    if (t->chat_template.len > 0) return;
    if (cJSON_IsString(v)) {
        buf_add_c(&t->chat_template, v->valuestring);
        return;
    }
    take_named(v, "default", &t->chat_template);
    take_named(v, TOOL_TEMPLATE, &t->tool_template);
}

/* "<s>" or {"content": "<s>", ...} */
static void take_text(const cJSON *o, const char *name, char **out)
{
    const cJSON *v = json_member(o, name);
    if (*out || !v) return;
    if (cJSON_IsObject(v)) v = json_member(v, "content");
    if (cJSON_IsString(v)) *out = mem_strdup(v->valuestring);
}

static void take_texts(const cJSON *o, struct model_text *t)
{
    take_text(o, "bos_token", &t->bos_text);
    take_text(o, "eos_token", &t->eos_text);
    take_text(o, "pad_token", &t->pad_text);
    take_text(o, "unk_token", &t->unk_text);
}

/* Vocabularies by preference; Mistral numbers versions. */
const struct model_text_file MODEL_TEXT_FILES[] = {
    { "config.json", false },
    { "generation_config.json", false },
    { "tokenizer.json", false },
    { "tokenizer_config.json", false },
    { "special_tokens_map.json", false },
    { "added_tokens.json", false },
    { "chat_template.json", false },
    { "chat_template.jinja", false },
    { "additional_chat_templates/" TOOL_TEMPLATE ".jinja", false },
    { "tekken.json", true },
    { "tokenizer.model", true },
    { "spm.model", true },
    { "ernie_token_100k.model", true },
    { "sentencepiece.bpe.model", true },
    { "tokenizer.model.v7", true },
    { "tokenizer.model.v3", true },
    { "tokenizer.model.v2", true },
    { "tokenizer.model.v1", true },
    { "qwen.tiktoken", true },
    { "tokenizer.tiktoken", true },
    { NULL, false },
};

static enum status load_vocabulary(const char *folder, struct model_text *t, struct err *err)
{
    for (const struct model_text_file *f = MODEL_TEXT_FILES; f->name; f++) {
        if (!f->is_vocabulary || t->tokenizer_model.len > 0) continue;
        TRY(read_optional(folder, f->name, TOKENIZER_BYTES_MAX, &t->tokenizer_model, err));
        if (t->tokenizer_model.len > 0) t->tokenizer_model_name = f->name;
    }
    TRY(read_optional(folder, "added_tokens.json", SMALL_BYTES_MAX, &t->added_tokens, err));
    return read_optional(folder, "special_tokens_map.json", SMALL_BYTES_MAX, &t->special_tokens,
                         err);
}

static enum status load_folder(const char *folder, struct model_text *t, struct err *err)
{
    cJSON *config = NULL, *specials = NULL, *template = NULL;
    TRY(read_optional(folder, "tokenizer.json", TOKENIZER_BYTES_MAX, &t->tokenizer_json, err));
    if (t->tokenizer_json.len == 0) TRY(load_vocabulary(folder, t, err));
    TRY(read_optional(folder, "tokenizer_config.json", SMALL_BYTES_MAX, &t->tokenizer_config, err));
    TRY(read_optional(folder, "chat_template.jinja", SMALL_BYTES_MAX, &t->chat_template, err));
    TRY(read_optional(folder, "additional_chat_templates/" TOOL_TEMPLATE ".jinja", SMALL_BYTES_MAX,
                      &t->tool_template, err));
    enum status st = parse_optional(folder, "tokenizer_config.json", &config, err);
    if (st == OK) st = parse_optional(folder, "special_tokens_map.json", &specials, err);
    if (st == OK) st = parse_optional(folder, "chat_template.json", &template, err);
    if (st == OK) {
        take_templates(config, t);
        take_templates(template, t);
        take_texts(config, t);
        take_texts(specials, t);
        t->add_bos = cJSON_IsTrue(json_member(config, "add_bos_token"));
        t->add_eos = cJSON_IsTrue(json_member(config, "add_eos_token"));
    }
    cJSON_Delete(config);
    cJSON_Delete(specials);
    cJSON_Delete(template);
    return st;
}

/* ---- GGUF ---- */

/* Kept until model_text_release: the mapping, and terminated copies of names in it. */
struct mapping {
    struct gguf *gguf;
    char *model, *pre;
};

static enum status copy_name(const struct gguf *g, const char *key, char **out, struct err *err)
{
    struct str s = { 0 };
    TRY(gguf_get_str(g, key, &s, err));
    if (s.p) *out = mem_strndup(s.p, s.n);
    return OK;
}

/* Takes the id under `key`, or `usual` (-1: none) when the key is absent, and the token's text. */
static enum status take_special(const struct gguf *g, const char *key, const struct model_text *t,
                                int32_t usual, int32_t *id, char **text, struct err *err)
{
    uint64_t v = usual >= 0 ? (uint64_t)usual : UINT64_MAX;
    *id = -1;
    if (t->n_tokens == 0) return OK;
    TRY(gguf_get_u64(g, key, 0, t->n_tokens - 1, &v, err));
    if (v >= t->n_tokens) return OK;
    *id = (int32_t)v;
    *text = mem_strndup(t->tokens[v].p, t->tokens[v].n);
    return OK;
}

static enum status take_scores(const struct gguf *g, struct model_text *t, struct err *err)
{
    static const char key[] = "tokenizer.ggml.scores";
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv) return OK;
    if (kv->type != GGUF_ARRAY || kv->elem != GGUF_F32 || kv->n != t->n_tokens)
        return err_field(err, ERR_FORMAT, key, "%s is not one float for each of %zu tokens", key,
                         t->n_tokens);
    t->scores = MEM_ARRAY(float, t->n_tokens);
    if (t->n_tokens) memcpy(t->scores, kv->value, t->n_tokens * sizeof *t->scores);
    return OK;
}

/* Takes add_bos and add_eos. Without the keys, SentencePiece models and the vocabularies of Llama 3
 * and tekken have a begin token. */
static enum status take_bos_rules(const struct gguf *g, struct model_text *t, struct err *err)
{
    static const char *const with_bos[] = { "llama-bpe", "llama3", "llama-v3", "tekken" };
    bool is_llama = t->gguf_model && strcmp(t->gguf_model, "llama") == 0, is_usual = is_llama;
    for (size_t i = 0; i < COUNT_OF(with_bos); i++)
        is_usual |= t->gguf_pre && strcmp(t->gguf_pre, with_bos[i]) == 0;
    t->add_bos = is_usual && t->bos >= 0;
    t->add_space_prefix = is_llama;
    TRY(gguf_get_bool(g, "tokenizer.ggml.add_bos_token", &t->add_bos, err));
    TRY(gguf_get_bool(g, "tokenizer.ggml.add_eos_token", &t->add_eos, err));
    return gguf_get_bool(g, "tokenizer.ggml.add_space_prefix", &t->add_space_prefix, err);
}

static enum status take_vocab(const struct gguf *g, struct model_text *t, struct err *err)
{
    size_t n_kinds;
    TRY(gguf_get_strs(g, "tokenizer.ggml.tokens", &t->tokens, &t->n_tokens, err));
    TRY(gguf_get_strs(g, "tokenizer.ggml.merges", &t->merges, &t->n_merges, err));
    TRY(gguf_get_i32s(g, "tokenizer.ggml.token_type", &t->kinds, &n_kinds, err));
    if (t->n_tokens > TOKENS_MAX)
        return err_set(err, ERR_FORMAT, "tokenizer.ggml.tokens: %zu tokens are not plausible",
                       t->n_tokens);
    if (t->kinds && n_kinds != t->n_tokens)
        return err_field(err, ERR_FORMAT, "tokenizer.ggml.token_type",
                         "tokenizer.ggml.token_type has %zu entries for %zu tokens", n_kinds,
                         t->n_tokens);
    TRY(take_scores(g, t, err));
    int32_t unused;
    /* SentencePiece's defaults */
    bool has_usual = t->gguf_model && strcmp(t->gguf_model, "llama") == 0;
    TRY(take_special(g, "tokenizer.ggml.bos_token_id", t, has_usual ? 1 : -1, &t->bos, &t->bos_text,
                     err));
    TRY(take_special(g, "tokenizer.ggml.eos_token_id", t, has_usual ? 2 : -1, &t->eos, &t->eos_text,
                     err));
    TRY(take_special(g, "tokenizer.ggml.padding_token_id", t, -1, &unused, &t->pad_text, err));
    return take_special(g, "tokenizer.ggml.unknown_token_id", t, has_usual ? 0 : -1, &unused,
                        &t->unk_text, err);
}

static enum status load_gguf(const char *path, struct model_text *t, struct err *err)
{
    struct mapping *m = MEM_NEW(struct mapping);
    t->mapping = m;
    TRY(gguf_open(path, &m->gguf, err));
    TRY(copy_name(m->gguf, "tokenizer.ggml.model", &m->model, err));
    TRY(copy_name(m->gguf, "tokenizer.ggml.pre", &m->pre, err));
    t->gguf_model = m->model;
    t->gguf_pre = m->pre;
    struct str template = { 0 }, with_tools = { 0 };
    TRY(gguf_get_str(m->gguf, "tokenizer.chat_template", &template, err));
    TRY(gguf_get_str(m->gguf, "tokenizer.chat_template." TOOL_TEMPLATE, &with_tools, err));
    buf_add_str(&t->chat_template, template);
    buf_add_str(&t->tool_template, with_tools);
    TRY(take_vocab(m->gguf, t, err));
    return take_bos_rules(m->gguf, t, err);
}

/* ---- both ---- */

enum status model_text_load(const char *path, struct model_text *out, struct err *err)
{
    struct model_text t = { .bos = -1, .eos = -1 };
    struct buf found = { 0 };
    TRY(model_find(path, &found, err));
    bool folder = file_is_folder(found.data);
    enum status st = folder ? load_folder(found.data, &t, err) : load_gguf(found.data, &t, err);
    if (st != OK && !folder && !strstr(err ? err->text : "", found.data))
        err_prefix(err, "%s: ", found.data);
    buf_release(&found);
    if (st != OK) {
        model_text_release(&t);
        return st;
    }
    if (!t.chat_template.data) buf_reserve(&t.chat_template, 1); /* "" rather than NULL */
    *out = t;
    return OK;
}

void model_text_release(struct model_text *t)
{
    struct mapping *m = t->mapping;
    if (m) {
        gguf_close(m->gguf);
        mem_free(m->model);
        mem_free(m->pre);
        mem_free(m);
    }
    buf_release(&t->tokenizer_json);
    buf_release(&t->tokenizer_config);
    buf_release(&t->tokenizer_model);
    buf_release(&t->added_tokens);
    buf_release(&t->special_tokens);
    buf_release(&t->chat_template);
    buf_release(&t->tool_template);
    void *owned[] = { t->scores,   t->tokens,   t->kinds,    t->merges,
                      t->bos_text, t->eos_text, t->pad_text, t->unk_text };
    for (size_t i = 0; i < COUNT_OF(owned); i++) mem_free(owned[i]);
    *t = (struct model_text){ .bos = -1, .eos = -1 };
}
