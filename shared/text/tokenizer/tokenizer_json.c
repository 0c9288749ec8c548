/* tokenizer_json.c - reads tokenizer.json and tokenizer_config.json into a tokenizer.
 *
 * tokenizer.json is a pipeline of components with a "type" each. The read_* functions dispatch on
 * the types that are implemented; all others are refused by name, since leaving one out would
 * silently give other tokens. Nested sequences of components have a limit on their depth.
 * tokenizer_config.json is read by tokenizer_config.c.
 * Thread: the builder's. */
#include <stdlib.h>
#include <string.h>

#include "shared/base/json/json.h"
#include "shared/text/tokenizer/tokenizer_internal.h"

enum { SEQUENCE_DEPTH_MAX = 4 };

static enum status unsupported(struct err *err, const char *part, const char *type)
{
    return err_field(err, ERR_UNSUPPORTED, part,
                     "tokenizer.json: %s of type \"%.100s\" is not supported", part, type);
}

static enum status malformed(struct err *err, const char *part, const char *what)
{
    return err_field(err, ERR_FORMAT, part, "tokenizer.json: %s: %s", part, what);
}

/* Gets the type of a component; "" when it has none. */
static enum status type_of(const cJSON *j, const char *part, const char **type, struct err *err)
{
    *type = "";
    if (!cJSON_IsObject(j)) return malformed(err, part, "an object is expected");
    return json_get_str(j, "type", type, err);
}

/* Gets a pattern: {"String": s} or {"Regex": s}. */
static enum status pattern_of(const cJSON *j, const char *part, struct str *out, bool *is_regex,
                              struct err *err)
{
    const cJSON *p = json_member(j, "pattern");
    const char *literal = NULL, *regex = NULL;
    TRY(json_get_str(p, "String", &literal, err));
    TRY(json_get_str(p, "Regex", &regex, err));
    if (!literal == !regex) return malformed(err, part, "a pattern must be a String or a Regex");
    *out = str_of(literal ? literal : regex);
    *is_regex = regex != NULL;
    return OK;
}

static enum status add_step(struct normalizer *z, const char *part, enum normalizer_kind kind,
                            struct str from, struct str to, struct err *err)
{
    return normalizer_add(z, kind, from, to) == OK
               ? OK
               : malformed(err, part, "too many steps, or too long a replacement");
}

/* Reads a Replace of a normalizer or decoder. */
static enum status read_replace(const cJSON *j, const char *part, struct normalizer *z,
                                struct err *err)
{
    struct str from;
    bool is_regex;
    const char *to = "";
    TRY(pattern_of(j, part, &from, &is_regex, err));
    TRY(json_get_str(j, "content", &to, err));
    if (is_regex) return unsupported(err, part, "Replace with a Regex");
    if (from.n == 0) return malformed(err, part, "an empty string cannot be replaced");
    return add_step(z, part, NORMALIZER_REPLACE, from, str_of(to), err);
}

/* ---- normalizer ---- */

static enum status read_normalizer(struct tokenizer *t, const cJSON *j, int depth, struct err *err)
{
    static const char part[] = "normalizer";
    static const struct {
        const char *name;
        enum normalizer_kind kind;
    } forms[] = { { "NFC", NORMALIZER_NFC },
                  { "NFD", NORMALIZER_NFD },
                  { "NFKC", NORMALIZER_NFKC },
                  { "NFKD", NORMALIZER_NFKD } };
    const char *type, *prepend = "";
    if (!j || cJSON_IsNull(j)) return OK;
    TRY(type_of(j, part, &type, err));
    for (size_t i = 0; i < COUNT_OF(forms); i++)
        if (strcmp(type, forms[i].name) == 0)
            return add_step(&t->normalizer, part, forms[i].kind, STR(""), STR(""), err);
    if (strcmp(type, "Replace") == 0) return read_replace(j, part, &t->normalizer, err);
    if (strcmp(type, "Prepend") == 0) {
        TRY(json_get_str(j, "prepend", &prepend, err));
        return add_step(&t->normalizer, part, NORMALIZER_PREPEND, STR(""), str_of(prepend), err);
    }
    if (strcmp(type, "Sequence") != 0) return unsupported(err, part, type);
    if (depth == SEQUENCE_DEPTH_MAX) return malformed(err, part, "sequences are nested too deeply");
    const cJSON *each;
    cJSON_ArrayForEach (each, json_member(j, "normalizers"))
        TRY(read_normalizer(t, each, depth + 1, err));
    return OK;
}

/* ---- pre_tokenizer ---- */

static const char pre_tokenizer_part[] = "pre_tokenizer";

static enum status read_split(struct tokenizer *t, const cJSON *j, struct err *err)
{
    static const char *const names[] = {
        [PRE_TOKENIZER_ISOLATED] = "Isolated",
        [PRE_TOKENIZER_REMOVED] = "Removed",
        [PRE_TOKENIZER_MERGED_WITH_PREVIOUS] = "MergedWithPrevious",
        [PRE_TOKENIZER_MERGED_WITH_NEXT] = "MergedWithNext",
        [PRE_TOKENIZER_CONTIGUOUS] = "Contiguous",
    };
    struct str pattern;
    bool is_regex, invert = false;
    const char *behavior = "";
    TRY(pattern_of(j, pre_tokenizer_part, &pattern, &is_regex, err));
    TRY(json_get_str(j, "behavior", &behavior, err));
    TRY(json_get_bool(j, "invert", &invert, err));
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        if (strcmp(behavior, names[i]) != 0) continue;
        enum pre_tokenizer_behavior b = (enum pre_tokenizer_behavior)i;
        return is_regex
                   ? pre_tokenizer_add_split(&t->pre_tokenizer, pattern, b, invert, err)
                   : pre_tokenizer_add_split_literal(&t->pre_tokenizer, pattern, b, invert, err);
    }
    return err_field(err, ERR_UNSUPPORTED, "behavior",
                     "tokenizer.json: Split with behavior \"%.64s\" is not supported", behavior);
}

static enum status read_byte_level(struct tokenizer *t, const cJSON *j, struct err *err)
{
    bool prefix = true, use_regex = true; /* the format's defaults */
    TRY(json_get_bool(j, "add_prefix_space", &prefix, err));
    TRY(json_get_bool(j, "use_regex", &use_regex, err));
    t->byte_level = true;
    if (prefix) TRY(pre_tokenizer_add_prefix_space(&t->pre_tokenizer, err));
    return use_regex ? pre_tokenizer_add_split(&t->pre_tokenizer, STR(PRE_TOKENIZER_GPT2),
                                               PRE_TOKENIZER_ISOLATED, false, err)
                     : OK;
}

static enum status read_metaspace(struct tokenizer *t, const cJSON *j, struct err *err)
{
    const char *replacement = "\xE2\x96\x81", *scheme = NULL;
    bool split = true, add_prefix = true;
    TRY(json_get_str(j, "replacement", &replacement, err));
    TRY(json_get_str(j, "prepend_scheme", &scheme, err));
    TRY(json_get_bool(j, "add_prefix_space", &add_prefix, err)); /* older form of prepend_scheme */
    TRY(json_get_bool(j, "split", &split, err));
    if (!scheme) scheme = add_prefix ? "always" : "never";
    enum pre_tokenizer_prepend prepend = strcmp(scheme, "always") == 0  ? PRE_TOKENIZER_ALWAYS
                                         : strcmp(scheme, "first") == 0 ? PRE_TOKENIZER_FIRST
                                                                        : PRE_TOKENIZER_NEVER;
    if (strlen(replacement) > NORMALIZER_INSERT_MAX)
        return malformed(err, pre_tokenizer_part, "the replacement for spaces is too long");
    return pre_tokenizer_add_metaspace(&t->pre_tokenizer, str_of(replacement), prepend, split, err);
}

static enum status read_digits(struct tokenizer *t, const cJSON *j, struct err *err)
{
    bool individual = false;
    TRY(json_get_bool(j, "individual_digits", &individual, err));
    return pre_tokenizer_add_split(&t->pre_tokenizer, STR("\\p{N}"),
                                   individual ? PRE_TOKENIZER_ISOLATED : PRE_TOKENIZER_CONTIGUOUS,
                                   false, err);
}

static enum status read_pre_tokenizer(struct tokenizer *t, const cJSON *j, int depth,
                                      struct err *err)
{
    const char *type;
    if (!j || cJSON_IsNull(j)) return OK;
    TRY(type_of(j, pre_tokenizer_part, &type, err));
    /* ByteLevel converts text to its alphabet, which later components would see. */
    if (t->byte_level)
        return malformed(err, pre_tokenizer_part, "ByteLevel must be the last of a sequence");
    if (strcmp(type, "Split") == 0) return read_split(t, j, err);
    if (strcmp(type, "ByteLevel") == 0) return read_byte_level(t, j, err);
    if (strcmp(type, "Digits") == 0) return read_digits(t, j, err);
    if (strcmp(type, "Metaspace") == 0) return read_metaspace(t, j, err);
    if (strcmp(type, "Sequence") != 0) return unsupported(err, pre_tokenizer_part, type);
    if (depth == SEQUENCE_DEPTH_MAX)
        return malformed(err, pre_tokenizer_part, "sequences are nested too deeply");
    const cJSON *each;
    cJSON_ArrayForEach (each, json_member(j, "pretokenizers"))
        TRY(read_pre_tokenizer(t, each, depth + 1, err));
    return OK;
}

/* ---- decoder ---- */

static enum status read_strip(struct tokenizer *t, const cJSON *j, struct err *err)
{
    const char *content = "";
    int64_t start = 0, stop = 0;
    TRY(json_get_str(j, "content", &content, err));
    TRY(json_get_i64(j, "start", 0, 64, &start, err));
    TRY(json_get_i64(j, "stop", 0, 64, &stop, err));
    if (strcmp(content, " ") != 0 || stop != 0)
        return unsupported(err, "decoder", "Strip of anything but spaces in front");
    t->strip_start = (size_t)start;
    return OK;
}

static enum status read_decoder(struct tokenizer *t, const cJSON *j, int depth, struct err *err)
{
    static const char part[] = "decoder";
    const char *type, *scheme = "always", *replacement = "\xE2\x96\x81";
    if (!j || cJSON_IsNull(j)) return OK;
    TRY(type_of(j, part, &type, err));
    if (strcmp(type, "ByteLevel") == 0)
        return t->byte_level
                   ? OK
                   : unsupported(err, part, "ByteLevel without a ByteLevel pre_tokenizer");
    if (strcmp(type, "Fuse") == 0) return OK; /* texts of tokens are always joined */
    if (strcmp(type, "Replace") == 0) return read_replace(j, part, &t->decoder, err);
    if (strcmp(type, "Strip") == 0) return read_strip(t, j, err);
    if (strcmp(type, "ByteFallback") == 0) {
        t->decode_bytes = true;
        return OK;
    }
    if (strcmp(type, "Metaspace") == 0) {
        TRY(json_get_str(j, "prepend_scheme", &scheme, err));
        TRY(json_get_str(j, "replacement", &replacement, err));
        t->strip_first = strcmp(scheme, "never") != 0;
        if (t->strip_first) t->strip_start = SIZE_MAX;
        if (!replacement[0]) return malformed(err, part, "an empty string cannot be replaced");
        return add_step(&t->decoder, part, NORMALIZER_REPLACE, str_of(replacement), STR(" "), err);
    }
    if (strcmp(type, "Sequence") != 0) return unsupported(err, part, type);
    if (depth == SEQUENCE_DEPTH_MAX) return malformed(err, part, "sequences are nested too deeply");
    const cJSON *each;
    cJSON_ArrayForEach (each, json_member(j, "decoders"))
        TRY(read_decoder(t, each, depth + 1, err));
    return OK;
}

/* ---- model ---- */

static enum status read_vocab(struct tokenizer *t, const cJSON *vocab, struct err *err)
{
    if (!cJSON_IsObject(vocab))
        return malformed(err, "model.vocab", "an object of tokens and ids is expected");
    const cJSON *each;
    cJSON_ArrayForEach (each, vocab) {
        double id = cJSON_IsNumber(each) ? each->valuedouble : -1;
        if (!(id >= 0 && id < TOKENIZER_IDS_MAX) || id != (double)(int32_t)id)
            return err_field(
                err, ERR_FORMAT, "model.vocab",
                "tokenizer.json: the id of token \"%.64s\" is not a whole number below %d",
                each->string, TOKENIZER_IDS_MAX);
        tokenizer_put_token(t, (int32_t)id, str_of(each->string), TOKEN_NORMAL);
    }
    return OK;
}

/* Gets the halves of a merge: "left right" or ["left", "right"]. */
static enum status merge_parts(const cJSON *j, struct str *left, struct str *right, struct err *err)
{
    if (cJSON_IsString(j)) return tokenizer_split_merge(str_of(j->valuestring), left, right, err);
    const cJSON *a = cJSON_IsArray(j) ? j->child : NULL, *b = a ? a->next : NULL;
    if (!cJSON_IsString(a) || !cJSON_IsString(b) || b->next)
        return malformed(err, "model.merges", "a merge must be two strings");
    *left = str_of(a->valuestring);
    *right = str_of(b->valuestring);
    return OK;
}

static enum status read_merges(struct tokenizer *t, const cJSON *merges, struct err *err)
{
    struct buf scratch = { 0 };
    struct str left, right;
    uint32_t rank = 0;
    enum status st = OK;
    const cJSON *each;
    if (!cJSON_IsArray(merges)) return malformed(err, "model.merges", "an array is expected");
    bpe_init(&t->bpe, (size_t)cJSON_GetArraySize(merges));
    cJSON_ArrayForEach (each, merges) {
        st = merge_parts(each, &left, &right, err);
        if (st == OK) st = tokenizer_put_merge(t, left, right, rank++, &scratch, err);
        if (st != OK) break;
    }
    buf_release(&scratch);
    return st;
}

static enum status read_bpe_options(struct tokenizer *t, const cJSON *m, struct err *err)
{
    const char *prefix = "", *suffix = "", *unk = NULL;
    double dropout = 0;
    TRY(json_get_str(m, "continuing_subword_prefix", &prefix, err));
    TRY(json_get_str(m, "end_of_word_suffix", &suffix, err));
    TRY(json_get_str(m, "unk_token", &unk, err));
    TRY(json_get_f64(m, "dropout", 0, 1, &dropout, err));
    TRY(json_get_bool(m, "fuse_unk", &t->fuse_unk, err));
    TRY(json_get_bool(m, "byte_fallback", &t->byte_fallback, err));
    TRY(json_get_bool(m, "ignore_merges", &t->ignore_merges, err));
    if (prefix[0] || suffix[0] || dropout > 0)
        return unsupported(err, "model",
                           "BPE with continuing_subword_prefix, end_of_word_suffix or dropout");
    if (unk) t->unk = tokenizer_find(t, str_of(unk));
    return OK;
}

static enum status read_model(struct tokenizer *t, const cJSON *m, struct err *err)
{
    const char *type;
    TRY(type_of(m, "model", &type, err));
    /* old files have no type */
    bool is_bpe = strcmp(type, "BPE") == 0 || (!type[0] && json_member(m, "merges"));
    if (!is_bpe) return unsupported(err, "model", type);
    TRY(read_vocab(t, json_member(m, "vocab"), err));
    TRY(read_merges(t, json_member(m, "merges"), err));
    return read_bpe_options(t, m, err);
}

/* ---- added_tokens ---- */

static enum status read_added_tokens(struct tokenizer *t, const cJSON *list, struct err *err)
{
    const cJSON *each;
    cJSON_ArrayForEach (each, list) {
        int64_t id = -1;
        if (!cJSON_IsObject(each)) return malformed(err, "added_tokens", "an object is expected");
        TRY(json_get_i64(each, "id", 0, TOKENIZER_IDS_MAX - 1, &id, err));
        if (id < 0) return malformed(err, "added_tokens", "an id is missing");
        TRY(tokenizer_config_put_added(t, each, id, err));
    }
    return OK;
}

/* ---- post_processor ---- */

/* Adds the ids listed under the name of a template's SpecialToken. */
static enum status read_template_token(struct tokenizer *t, const cJSON *post, const char *name,
                                       struct tokenizer_affix *to, struct err *err)
{
    const cJSON *entry = json_member(json_member(post, "special_tokens"), name);
    const cJSON *each;
    if (!entry)
        return malformed(err, "post_processor", "a special token of the template has no entry");
    cJSON_ArrayForEach (each, json_member(entry, "ids")) {
        double id = cJSON_IsNumber(each) ? each->valuedouble : -1;
        if (!(id >= 0 && id < (double)tokenizer_n_vocab(t)))
            return malformed(err, "post_processor", "an id is outside the vocabulary");
        TRY(tokenizer_affix_add(to, (int32_t)id, err));
    }
    return OK;
}

static enum status read_template(struct tokenizer *t, const cJSON *post, struct err *err)
{
    bool behind = false;
    const cJSON *each;
    cJSON_ArrayForEach (each, json_member(post, "single")) {
        const char *name = NULL;
        if (json_member(each, "Sequence")) {
            behind = true;
            continue;
        }
        TRY(json_get_str(json_member(each, "SpecialToken"), "id", &name, err));
        if (!name) return malformed(err, "post_processor", "the template has an unknown member");
        TRY(read_template_token(t, post, name, behind ? &t->suffix : &t->prefix, err));
    }
    return OK;
}

static enum status read_post(struct tokenizer *t, const cJSON *j, int depth, struct err *err)
{
    static const char part[] = "post_processor";
    const char *type;
    if (!j || cJSON_IsNull(j)) return OK;
    TRY(type_of(j, part, &type, err));
    if (strcmp(type, "ByteLevel") == 0) return OK; /* changes offsets only */
    if (strcmp(type, "TemplateProcessing") == 0) return read_template(t, j, err);
    if (strcmp(type, "Sequence") != 0) return unsupported(err, part, type);
    if (depth == SEQUENCE_DEPTH_MAX) return malformed(err, part, "sequences are nested too deeply");
    const cJSON *each;
    cJSON_ArrayForEach (each, json_member(j, "processors")) TRY(read_post(t, each, depth + 1, err));
    return OK;
}

/* ---- both files ---- */

static enum status fill_from_json(struct tokenizer *t, const cJSON *j, const cJSON *config,
                                  struct err *err)
{
    if (!cJSON_IsObject(j))
        return err_set(err, ERR_FORMAT, "tokenizer.json: an object is expected");
    TRY(read_model(t, json_member(j, "model"), err));
    TRY(read_added_tokens(t, json_member(j, "added_tokens"), err));
    TRY(tokenizer_config_added_tokens(t, config, false, err));
    TRY(read_normalizer(t, json_member(j, "normalizer"), 0, err));
    TRY(read_pre_tokenizer(t, json_member(j, "pre_tokenizer"), 0, err));
    TRY(read_decoder(t, json_member(j, "decoder"), 0, err));
    TRY(read_post(t, json_member(j, "post_processor"), 0, err));
    TRY(tokenizer_config_bos_eos(t, config, err));
    return tokenizer_finish(t, err);
}

enum status tokenizer_from_json(struct str tokenizer_json, struct str config_json,
                                struct tokenizer **out, struct err *err)
{
    cJSON *j = NULL, *config = NULL;
    struct tokenizer *t = tokenizer_new();
    enum status st = json_parse(tokenizer_json, false, &j, err);
    if (st != OK) err_prefix(err, "tokenizer.json: ");
    if (st == OK && config_json.n > 0) {
        st = json_parse(config_json, false, &config, err);
        if (st != OK) err_prefix(err, "tokenizer_config.json: ");
    }
    if (st == OK) st = fill_from_json(t, j, config, err);
    cJSON_Delete(j);
    cJSON_Delete(config);
    if (st == OK) *out = t;
    else tokenizer_free(t);
    return st;
}
