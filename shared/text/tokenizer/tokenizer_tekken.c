/* tokenizer_tekken.c - reads tekken.json, Mistral's form of a tiktoken vocabulary, which holds the
 * pattern and puts special tokens first.
 *
 * Token id = rank + number of special tokens. Only the first ranks are used, up to the size of the
 * vocabulary. Special tokens without a name are <SPECIAL_n>. Files older than version 11 may leave
 * out the names, which are then those of version 7.
 * Thread: the builder's. */
#include <stdio.h>
#include <string.h>

#include "shared/text/base64.h"
#include "shared/text/tokenizer/tokenizer_internal.h"

enum { SPECIALS_MAX = 1 << 16 };

static const char *const old_specials[] = {
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
};

static enum status malformed(struct err *err, const char *part, const char *what)
{
    return err_field(err, ERR_FORMAT, part, "%s: %s", part, what);
}

struct tekken {
    struct tokenizer *t;
    int64_t n_vocab, n_specials;
    const char *pattern, *version;
};

static enum status read_settings(struct tekken *k, const cJSON *file, struct err *err)
{
    const cJSON *c = json_member(file, "config");
    k->version = "";
    TRY(json_get_i64(c, "default_vocab_size", 1, TOKENIZER_IDS_MAX, &k->n_vocab, err));
    TRY(json_get_i64(c, "default_num_special_tokens", 0, SPECIALS_MAX, &k->n_specials, err));
    TRY(json_get_str(c, "pattern", &k->pattern, err));
    TRY(json_get_str(c, "version", &k->version, err));
    if (!k->pattern || k->n_vocab <= k->n_specials)
        return malformed(err, "config",
                         "a pattern, or room for tokens behind the special ones, is missing");
    return OK;
}

/* ---- special tokens ---- */

static enum status put_special(struct tekken *k, int64_t id, const char *name, bool is_control,
                               struct err *err)
{
    if (id < 0 || id >= k->n_specials || !name)
        return malformed(err, "special_tokens", "a rank or a name is missing or out of range");
    return tokenizer_put_added(k->t, (int32_t)id, str_of(name), is_control, false, 0, err);
}

static enum status read_specials(struct tekken *k, const cJSON *list, struct err *err)
{
    const cJSON *each;
    cJSON_ArrayForEach (each, list) {
        int64_t rank = -1;
        const char *name = NULL;
        bool is_control = true;
        TRY(json_get_i64(each, "rank", 0, TOKENIZER_IDS_MAX - 1, &rank, err));
        TRY(json_get_str(each, "token_str", &name, err));
        TRY(json_get_bool(each, "is_control", &is_control, err));
        TRY(put_special(k, rank, name, is_control, err));
    }
    return OK;
}

static enum status put_specials(struct tekken *k, const cJSON *file, struct err *err)
{
    static const char *const old[] = { "", "v1", "v2", "v3", "v7" };
    const cJSON *list = json_member(file, "special_tokens");
    bool is_old = false;
    for (size_t i = 0; i < COUNT_OF(old); i++) is_old |= strcmp(k->version, old[i]) == 0;
    if (!list && !is_old)
        return malformed(err, "special_tokens",
                         "they are missing, which only files up to version 7 may");
    TRY(read_specials(k, list, err));
    for (size_t i = 0; !list && i < COUNT_OF(old_specials) && (int64_t)i < k->n_specials; i++)
        TRY(put_special(k, (int64_t)i, old_specials[i], true, err));
    for (int64_t i = 0; i < k->n_specials; i++) {
        char name[32];
        if ((size_t)i < k->t->n_tokens && k->t->tokens[i].used) continue;
        snprintf(name, sizeof name, "<SPECIAL_%d>", (int)i);
        TRY(put_special(k, i, name, true, err));
    }
    return OK;
}

/* ---- ranks ---- */

static enum status read_rank(const cJSON *j, size_t want, struct buf *bytes, struct err *err)
{
    int64_t rank = -1;
    const char *text = NULL;
    TRY(json_get_i64(j, "rank", 0, TOKENIZER_IDS_MAX, &rank, err));
    TRY(json_get_str(j, "token_bytes", &text, err));
    if (rank != (int64_t)want)
        return err_field(err, ERR_FORMAT, "vocab", "vocab: the rank %zu was expected", want);
    return text && base64_decode(str_of(text), bytes)
               ? OK
               : malformed(err, "vocab", "token_bytes is not base64");
}

static enum status put_ranks(struct tekken *k, const cJSON *vocab, struct err *err)
{
    size_t n_ranks = (size_t)(k->n_vocab - k->n_specials), n = 0;
    struct buf bytes = { 0 };
    size_t *ends = MEM_ARRAY(size_t, n_ranks);
    struct str *all = MEM_ARRAY(struct str, n_ranks);
    enum status st = OK;
    const cJSON *each = cJSON_IsArray(vocab) ? vocab->child : NULL;
    for (; each && n < n_ranks && st == OK; each = each->next) {
        st = read_rank(each, n, &bytes, err);
        ends[n++] = bytes.len;
    }
    if (st == OK && n < n_ranks)
        st = malformed(err, "vocab",
                       "there are fewer tokens than the size of the vocabulary needs");
    for (size_t i = 0; i < n && st == OK; i++)
        all[i] = (struct str){ bytes.data + (i ? ends[i - 1] : 0),
                               ends[i] - (i ? ends[i - 1] : 0) };
    if (st == OK) st = tokenizer_fill_ranks(k->t, all, n, (int32_t)k->n_specials, err);
    buf_release(&bytes);
    mem_free(ends);
    mem_free(all);
    return st;
}

static enum status fill(struct tekken *k, const cJSON *file, struct err *err)
{
    TRY(read_settings(k, file, err));
    TRY(put_ranks(k, json_member(file, "vocab"), err));
    TRY(put_specials(k, file, err));
    k->t->bos = tokenizer_find(k->t, STR("<s>"));
    k->t->eos = tokenizer_find(k->t, STR("</s>"));
    if (k->t->bos >= 0) TRY(tokenizer_affix_add(&k->t->prefix, k->t->bos, err));
    return pre_tokenizer_add_split(&k->t->pre_tokenizer, str_of(k->pattern), PRE_TOKENIZER_ISOLATED,
                                   false, err);
}

/* Copies the file with '?' for \u0000, which the JSON parser refuses. It occurs where the file
 * shows its tokens as text, which is not read. */
static void without_nul(struct str file, struct buf *out)
{
    static const char nul[] = "\\u0000";
    buf_reserve(out, file.n);
    for (size_t at = 0; at < file.n;) {
        bool is_escape = file.p[at] == '\\',
             is_nul = is_escape && str_starts(str_sub(file, at, sizeof nul - 1), nul);
        if (is_nul) buf_add_char(out, '?');
        else buf_add_str(out, str_sub(file, at, is_escape ? 2 : 1));
        at += is_nul ? sizeof nul - 1 : is_escape ? 2 : 1;
    }
}

enum status tokenizer_fill_tekken(struct tokenizer *t, struct str file, struct err *err)
{
    struct tekken k = { .t = t };
    cJSON *j = NULL;
    struct buf text = { 0 };
    without_nul(file, &text);
    enum status st = json_parse(buf_str(&text), false, &j, err);
    buf_release(&text);
    if (st == OK) st = fill(&k, j, err);
    cJSON_Delete(j);
    return st;
}
