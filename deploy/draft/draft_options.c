/* draft_options.c - see draft_options.h. Thread: main, at start. */
#include "deploy/draft/draft_options.h"

#include <strings.h>

#include "shared/base/json/json.h"
#include "shared/base/mem.h"

/* SGLang's algorithms, as methods of --speculative-config. EAGLE on a model with a draft layer of
 * its own is that layer. */
static const struct {
    const char *algorithm, *method;
    bool with_model; /* with --speculative-draft-model-path */
} ALGORITHMS[] = {
    { "NGRAM", "ngram", false },
    { "NEXTN", "mtp", false },
    { "EAGLE", "mtp", false },
    { "STANDALONE", "draft", true },
};

static enum status unknown_algorithm(const char *algorithm, struct err *err)
{
    struct buf all = { 0 };
    for (size_t i = 0; i < COUNT_OF(ALGORITHMS); i++)
        buf_printf(&all, "%s%s", i ? ", " : "", ALGORITHMS[i].algorithm);
    enum status st = err_field(err, ERR_CONFIG, "speculative-algorithm",
                               "--speculative-algorithm %.40s is not built; %s are", algorithm,
                               all.data);
    buf_release(&all);
    return st;
}

/* algorithm NULL: a model alone, as llama.cpp's -md. */
static enum status method_of(const char *algorithm, const char *model, const char **out,
                             struct err *err)
{
    *out = "draft";
    if (!algorithm) return OK;
    for (size_t i = 0; i < COUNT_OF(ALGORITHMS); i++) {
        if (strcasecmp(ALGORITHMS[i].algorithm, algorithm) != 0) continue;
        *out = ALGORITHMS[i].method;
        if (ALGORITHMS[i].with_model == (model != NULL)) return OK;
        return err_field(err, ERR_CONFIG, "speculative-draft-model-path",
                         ALGORITHMS[i].with_model
                             ? "--speculative-algorithm %s needs --speculative-draft-model-path"
                             : "--speculative-algorithm %s takes no --speculative-draft-model-path "
                               "here: it drafts from the request or with the model's own layer",
                         algorithm);
    }
    return unknown_algorithm(algorithm, err);
}

static void add_steps(const struct config *c, struct buf *json, struct buf *notes)
{
    if (!config_is_set(c, "speculative-num-steps")) return;
    int64_t n = config_int(c, "speculative-num-steps");
    if (n > DRAFT_TOKENS_MAX)
        buf_printf(notes, "note: %s %d: a step verifies at most %d drafts of a sequence\n",
                   config_source_text(c, "speculative-num-steps"), (int)n, DRAFT_TOKENS_MAX);
    if (n > DRAFT_TOKENS_MAX) n = DRAFT_TOKENS_MAX;
    buf_printf(json, ",\"num_speculative_tokens\":%d", (int)n);
}

/* The same as a configuration in JSON. */
static enum status translate(const struct config *c, struct buf *json, struct buf *notes,
                             struct err *err)
{
    const char *algorithm = config_string(c, "speculative-algorithm"),
               *model = config_string(c, "speculative-draft-model-path"), *method;
    TRY(method_of(algorithm, model, &method, err));
    buf_printf(json, "{\"method\":\"%s\"", method);
    add_steps(c, json, notes);
    if (model) buf_add_c(json, ",\"model\":");
    if (model) json_add_string(json, str_of(model));
    buf_add_char(json, '}');
    return OK;
}

/* The option that says it in other words than JSON; NULL: none. */
static const char *other_option(const struct config *c)
{
    return config_string(c, "speculative-algorithm")          ? "speculative-algorithm"
           : config_string(c, "speculative-draft-model-path") ? "speculative-draft-model-path"
                                                              : NULL;
}

enum status draft_options_read(const struct config *c, struct draft_config *out, struct buf *notes,
                               struct err *err)
{
    const char *json = config_string(c, "speculative-config"), *other = other_option(c);
    struct buf translated = { 0 };
    *out = (struct draft_config){ 0 };
    if (!other && config_is_set(c, "speculative-num-steps"))
        buf_printf(notes, "note: %s has no effect: %s\n",
                   config_source_text(c, "speculative-num-steps"),
                   json ? "--speculative-config has num_speculative_tokens"
                        : "it needs --speculative-algorithm or --speculative-draft-model-path");
    if (!json && !other) return OK;
    if (json && other)
        return err_field(err, ERR_CONFIG, other,
                         "--speculative-config and --%s say the same; give one", other);
    enum status st = other ? translate(c, &translated, notes, err) : OK;
    if (st == OK)
        st = draft_config_parse(json ? str_of(json) : buf_str(&translated), out, notes, err);
    if (st != OK && json) {
        err_prefix(err, "--speculative-config: ");
        st = ERR_CONFIG;
    }
    buf_release(&translated);
    return st;
}

const char *draft_options_source(const struct config *c)
{
    const char *other = other_option(c);
    return config_source_text(c, other ? other : "speculative-config");
}

enum status draft_options_set_model(struct config *c, const char *path, struct err *err)
{
    const char *json = config_string(c, "speculative-config");
    cJSON *doc = NULL;
    if (!json) return config_set(c, "speculative-draft-model-path", path, err);
    TRY(json_parse(str_of(json), false, &doc, err));
    cJSON_DeleteItemFromObjectCaseSensitive(doc, "model");
    cJSON_AddStringToObject(doc, "model", path);
    char *text = cJSON_PrintUnformatted(doc);
    cJSON_Delete(doc);
    if (!text) return err_set(err, ERR_NOMEM, "not enough memory for --speculative-config");
    const enum status st = config_set(c, "speculative-config", text, err);
    cJSON_free(text);
    return st;
}
