/* tokenizer_files.c - builds a tokenizer from the files of a model folder.
 *
 * tokenizer.json is complete and has precedence. The other formats are recognised by their first
 * bytes, since tokenizer.model may be SentencePiece's or tiktoken's.
 * Thread: the builder's. */
#include <string.h>

#include "shared/text/tokenizer/tokenizer_internal.h"

struct documents {
    cJSON *config, *added, *specials;
};

static enum status parse(struct str text, const char *name, cJSON **out, struct err *err)
{
    if (text.n == 0) return OK;
    return json_parse(text, false, out, err) == OK ? OK : err_prefix(err, "%s: ", name);
}

/* Applies the defaults of the tokenizer class, which no file holds. */
static enum status spm_defaults(struct tokenizer *t, const cJSON *config, struct err *err)
{
    const char *class = "";
    bool legacy = true;
    TRY(json_get_str(config, "tokenizer_class", &class, err));
    TRY(json_get_bool(config, "legacy", &legacy, err));
    t->spm.prefix_first_only = !legacy;
    bool adds_bos = strncmp(class, "Ernie", 5) != 0;
    if (t->spm.dummy_prefix)
        TRY(json_get_bool(config, "add_prefix_space", &t->spm.dummy_prefix, err));
    return adds_bos && t->bos >= 0 && !json_member(config, "add_bos_token")
               ? tokenizer_affix_add(&t->prefix, t->bos, err)
               : OK;
}

static enum status fill_spm_file(struct tokenizer *t, struct str file, const struct documents *d,
                                 struct err *err)
{
    TRY(tokenizer_fill_sentencepiece(t, file, err));
    TRY(tokenizer_config_added_tokens(t, d->config, true, err));
    TRY(tokenizer_config_special_tokens(t, d->config, d->added, d->specials, err));
    /* SentencePiece does not normalise added tokens: they are cut out of the raw text. */
    for (size_t i = 0; i < t->n_tokens; i++) t->tokens[i].normalized = false;
    TRY(spm_defaults(t, d->config, err));
    return OK;
}

static enum status fill(struct tokenizer *t, const struct tokenizer_files *f, struct err *err)
{
    struct documents d = { 0 };
    enum status st = parse(f->config, "tokenizer_config.json", &d.config, err);
    if (st == OK) st = parse(f->added, "added_tokens.json", &d.added, err);
    if (st == OK) st = parse(f->specials, "special_tokens_map.json", &d.specials, err);
    if (st == OK) {
        struct str front = str_trim(str_sub(f->model, 0, 64));
        if (str_starts(front, "{")) st = tokenizer_fill_tekken(t, f->model, err);
        else if (tokenizer_is_tiktoken(f->model))
            st = tokenizer_fill_tiktoken(t, f->model, d.config, err);
        else st = fill_spm_file(t, f->model, &d, err);
        if (st == OK) st = tokenizer_config_bos_eos(t, d.config, err);
        if (st == OK) st = tokenizer_finish(t, err);
        if (st != OK && f->model_name) err_prefix(err, "%s: ", f->model_name);
    }
    cJSON_Delete(d.config);
    cJSON_Delete(d.added);
    cJSON_Delete(d.specials);
    return st;
}

enum status tokenizer_from_files(const struct tokenizer_files *files, struct tokenizer **out,
                                 struct err *err)
{
    if (files->json.n > 0) return tokenizer_from_json(files->json, files->config, out, err);
    if (files->model.n == 0)
        return err_set(err, ERR_NOT_FOUND,
                       "the model has no tokenizer: tokenizer.json, tokenizer.model, tekken.json "
                       "or a tiktoken file is expected next to its weights");
    struct tokenizer *t = tokenizer_new();
    enum status st = fill(t, files, err);
    if (st == OK) *out = t;
    else tokenizer_free(t);
    return st;
}
