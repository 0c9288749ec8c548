/* tokenizer_config.c - reads the files next to a vocabulary: tokenizer_config.json,
 * added_tokens.json, special_tokens_map.json.
 *
 * They name BOS and EOS, say whether these are put around a text (which overrules the vocabulary's
 * own file), and add tokens.
 * Thread: the builder's. */
#include <stdlib.h>
#include <string.h>

#include "shared/text/tokenizer/tokenizer_internal.h"

/* ---- added tokens ---- */

enum status tokenizer_config_put_added(struct tokenizer *t, const cJSON *j, int64_t id,
                                       struct err *err)
{
    const char *content = "";
    bool special = false, single_word = false, lstrip = false, rstrip = false;
    TRY(json_get_str(j, "content", &content, err));
    TRY(json_get_bool(j, "special", &special, err));
    bool normalized = !special; /* the format's default */
    TRY(json_get_bool(j, "normalized", &normalized, err));
    TRY(json_get_bool(j, "single_word", &single_word, err));
    TRY(json_get_bool(j, "lstrip", &lstrip, err));
    TRY(json_get_bool(j, "rstrip", &rstrip, err));
    int flags = (single_word ? ADDED_TOKEN_SINGLE_WORD : 0) | (lstrip ? ADDED_TOKEN_LSTRIP : 0) |
                (rstrip ? ADDED_TOKEN_RSTRIP : 0);
    return tokenizer_put_added(t, (int32_t)id, str_of(content), special, normalized, flags, err);
}

/* Member names are ids. */
enum status tokenizer_config_added_tokens(struct tokenizer *t, const cJSON *config, bool overrule,
                                          struct err *err)
{
    const cJSON *each;
    cJSON_ArrayForEach (each, json_member(config, "added_tokens_decoder")) {
        int64_t id = -1;
        if (!each->string || str_to_i64(str_of(each->string), &id) != OK || id < 0 ||
            id >= TOKENIZER_IDS_MAX)
            return err_field(err, ERR_FORMAT, "added_tokens_decoder",
                             "tokenizer_config.json: added_tokens_decoder names no token id");
        if (!overrule && (size_t)id < tokenizer_n_vocab(t) && t->tokens[id].is_added) continue;
        TRY(tokenizer_config_put_added(t, each, id, err));
    }
    return OK;
}

/* Puts an added token with the next free id. */
static enum status put_new(struct tokenizer *t, struct str content, bool special, struct err *err)
{
    if (tokenizer_n_vocab(t) >= TOKENIZER_IDS_MAX)
        return err_set(err, ERR_FORMAT, "the vocabulary has more than %d tokens",
                       TOKENIZER_IDS_MAX);
    return tokenizer_put_added(t, (int32_t)tokenizer_n_vocab(t), content, special, false, 0, err);
}

/* Puts a token that is named as special: searched in texts, left out of answers. Keeps the flags
 * that other files gave it. */
static enum status put_special(struct tokenizer *t, const cJSON *j, struct err *err)
{
    const char *content = cJSON_IsString(j) ? j->valuestring : NULL;
    if (cJSON_IsObject(j)) TRY(json_get_str(j, "content", &content, err));
    if (!content || !content[0]) return OK;
    int32_t id = tokenizer_find(t, str_of(content));
    if (id >= 0 && t->tokens[id].is_added) return OK;
    return id < 0 ? put_new(t, str_of(content), true, err)
                  : tokenizer_put_added(t, id, str_of(content), true, false, 0, err);
}

/* Puts all special tokens, in the order in which new ids are assigned. */
static enum status put_specials(struct tokenizer *t, const cJSON *names, struct err *err)
{
    static const char *const members[] = { "bos_token", "eos_token", "unk_token", "sep_token",
                                           "pad_token", "cls_token", "mask_token" };
    const cJSON *each;
    for (size_t i = 0; i < COUNT_OF(members); i++)
        TRY(put_special(t, json_member(names, members[i]), err));
    const cJSON *more = json_member(names, "additional_special_tokens");
    if (!cJSON_IsArray(more)) return OK;
    cJSON_ArrayForEach (each, more) TRY(put_special(t, each, err));
    return OK;
}

enum status tokenizer_config_special_tokens(struct tokenizer *t, const cJSON *config,
                                            const cJSON *added, const cJSON *specials,
                                            struct err *err)
{
    const cJSON *each;
    cJSON_ArrayForEach (each, added) {
        double id = cJSON_IsNumber(each) && each->string ? each->valuedouble : -1;
        if (!(id >= 0 && id < TOKENIZER_IDS_MAX) || id != (double)(int32_t)id)
            return err_field(err, ERR_FORMAT, "added_tokens",
                             "added_tokens.json: the id of a token is not a whole number below %d",
                             TOKENIZER_IDS_MAX);
        if ((size_t)id < tokenizer_n_vocab(t) && t->tokens[(size_t)id].is_added) continue;
        TRY(tokenizer_put_added(t, (int32_t)id, str_of(each->string), false, false, 0, err));
    }
    TRY(put_specials(t, specials, err));
    return put_specials(t, config, err);
}

/* ---- BOS and EOS ---- */

enum status tokenizer_affix_add(struct tokenizer_affix *a, int32_t id, struct err *err)
{
    if (a->n == TOKENIZER_AFFIX_MAX)
        return err_set(err, ERR_FORMAT,
                       "tokenizer.json: post_processor: too many tokens around a text");
    a->ids[a->n++] = id;
    return OK;
}

/* Reads a token that is given as its text or as an object with "content". */
static enum status read_token_id(const struct tokenizer *t, const cJSON *config, const char *name,
                                 int32_t *id, struct err *err)
{
    const cJSON *v = json_member(config, name);
    const char *content = NULL;
    if (!v) return OK;
    if (cJSON_IsObject(v)) TRY(json_get_str(v, "content", &content, err));
    else TRY(json_get_str(config, name, &content, err));
    if (content) *id = tokenizer_find(t, str_of(content));
    return OK;
}

/* Applies add_bos_token or add_eos_token, which overrule the post-processor when present. */
static enum status apply_add_flag(const cJSON *config, const char *name, int32_t id, bool in_front,
                                  struct tokenizer_affix *a, struct err *err)
{
    bool add = false;
    if (!json_member(config, name)) return OK;
    TRY(json_get_bool(config, name, &add, err));
    if (add && id < 0)
        return err_field(err, ERR_FORMAT, name,
                         "tokenizer_config.json: %s is true, but there is no such token", name);
    bool is_there = a->n > 0 && a->ids[in_front ? 0 : a->n - 1] == id;
    if (add == is_there) return OK;
    if (!add) {
        a->n--;
        if (in_front) memmove(a->ids, a->ids + 1, a->n * sizeof a->ids[0]);
        return OK;
    }
    TRY(tokenizer_affix_add(a, id, err));
    if (in_front) {
        memmove(a->ids + 1, a->ids, (a->n - 1) * sizeof a->ids[0]);
        a->ids[0] = id;
    }
    return OK;
}

enum status tokenizer_config_bos_eos(struct tokenizer *t, const cJSON *config, struct err *err)
{
    TRY(read_token_id(t, config, "bos_token", &t->bos, err));
    TRY(read_token_id(t, config, "eos_token", &t->eos, err));
    TRY(apply_add_flag(config, "add_bos_token", t->bos, true, &t->prefix, err));
    return apply_add_flag(config, "add_eos_token", t->eos, false, &t->suffix, err);
}
