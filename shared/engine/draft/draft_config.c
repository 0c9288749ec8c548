/* draft_config.c - see draft_config.h. Thread: any. */
#include "shared/engine/draft/draft_config.h"

#include <string.h>

#include "kernels/host_math.h"
#include "kernels/step.h"
#include "shared/base/json/json.h"
#include "shared/base/mem.h"
#include "shared/base/sampling.h"
#include "shared/model/model.h"

enum { LOOKUP_MIN = 2, LOOKUP_MAX = 16 };

/* What a method is called here and elsewhere. */
struct method {
    const char *name;
    const struct drafter_ops *ops; /* NULL: without drafts, or refused */
    uint32_t n_tokens;             /* default */
    const char *refused;           /* why */
    const char *note;              /* why it drafts nothing */
};

#define NO_HEADS                                                                                   \
    "drafts by heads that were trained for the purpose, which are not built: ngram and suffix "    \
    "need no weights"

/* The first name of a drafter is its own. */
static const struct method METHODS[] = {
    { .name = "ngram", .ops = &drafter_ngram_ops, .n_tokens = DRAFT_TOKENS_MAX },
    { .name = "ngram_match", .ops = &drafter_ngram_ops, .n_tokens = DRAFT_TOKENS_MAX },
    { .name = "ngram_gpu", .ops = &drafter_ngram_ops, .n_tokens = DRAFT_TOKENS_MAX },
    { .name = "suffix", .ops = &drafter_suffix_ops, .n_tokens = DRAFT_TOKENS_MAX },
    { .name = "mtp", .ops = &drafter_mtp_ops, .n_tokens = 1 },
    { .name = "deepseek_mtp", .ops = &drafter_mtp_ops, .n_tokens = 1 },
    { .name = "ernie_mtp", .ops = &drafter_mtp_ops, .n_tokens = 1 },
    { .name = "draft", .ops = &drafter_model_ops, .n_tokens = 4 },
    { .name = "draft_model", .ops = &drafter_model_ops, .n_tokens = 4 },
    { .name = "naive", .n_tokens = 1, .note = "it drafts nothing" },
    { .name = "eagle", .refused = NO_HEADS },
    { .name = "eagle3", .refused = NO_HEADS },
    { .name = "medusa", .refused = NO_HEADS },
    { .name = "mlp_speculator", .refused = NO_HEADS },
};

/* Members without effect, and why. */
static const struct {
    const char *name, *why;
} IGNORED[] = {
    { "disable_by_batch_size", "the number of drafts follows what they cost and yield" },
    { "speculative_disable_by_batch_size",
      "the number of drafts follows what they cost and yield" },
    { "verify_strategy",
      "a draft is accepted when it is the token that would be chosen without it" },
    { "accept_policy", "a draft is accepted when it is the token that would be chosen without it" },
    { "acceptance_method",
      "a draft is accepted when it is the token that would be chosen without it" },
    { "draft_sample_method", "drafts are the tokens that a drafter thinks likeliest" },
    { "rejection_sample_method",
      "a draft is accepted when it is the token that would be chosen without it" },
    { "mtp_strategy", "one method drafts all tokens of a step" },
    { "num_model_steps", "num_speculative_tokens says how often the layer is applied" },
    { "num_gpu_block_expand_ratio", "the draft layer's KV is a layer of the pool" },
    { "num_extra_cache_layer", "the draft layer's KV is a layer of the pool" },
    { "benchmark_mode", "\"adaptive\": false verifies every draft" },
    { "draft_tensor_parallel_size",
      "a draft layer is shared as the model's are, a small model computes in each process" },
    { "quantization", "what drafts is quantised as --quantization says" },
    { "max_model_len", "--max-model-len is for both" },
    { "revision", "a model is taken as it is on this host" },
    { "code_revision", "no code of a model is run" },
    { "disable_logprobs", "log-probabilities are those without drafts" },
    { "disable_log_stats", "what is drafted and accepted is always counted" },
    { "disable_padded_drafter_batch", "batches are not padded" },
    { "parallel_drafting", "a draft begins with the one before it" },
    { "enforce_eager", "--enforce-eager is for all steps" },
    { "suffix_decoding_max_tree_depth", "there is no tree: the positions of an index are counted" },
    { "suffix_decoding_max_cached_requests", "a request is drafted from its own tokens" },
    { "suffix_decoding_max_spec_factor", "num_speculative_tokens bounds drafts" },
    { "suffix_decoding_min_token_prob", "a draft needs a fifth of the votes" },
};

static const char *const KNOWN[] = {
    "method",
    "num_speculative_tokens",
    "model",
    "prompt_lookup_max",
    "prompt_lookup_min",
    "max_ngram_size",
    "min_ngram_size",
    "adaptive",
};

/* ---- methods ---- */

enum status drafter_create_plain(const struct draft_config *c, struct engine *e,
                                 struct drafter **out, struct err *err)
{
    (void)e, (void)err;
    *out = MEM_NEW(struct drafter);
    (*out)->config = *c;
    return OK;
}

void drafter_free_plain(struct drafter *d) { mem_free(d); }

struct sample_request drafter_greedy(const int32_t *tokens, uint32_t kept_at)
{
    static const struct sampling_params GREEDY = {
        .top_p = 1, .repetition_penalty = 1, .max_tokens = 1, .n_logprobs = -1
    };
    return (struct sample_request){
        .params = &GREEDY,
        .tokens = tokens,
        .n_tokens = 1,
        .n_prompt = 1,
        .score = -1,
        .kept_at = (int32_t)kept_at,
    };
}

void drafter_choose_on_host(const struct model *m, const float *logits, uint32_t n,
                            struct token_logprobs *chosen)
{
    const size_t n_vocab = m->config.n_vocab;
    for (uint32_t i = 0; i < n; i++) {
        const int32_t id = host_argmax(kernel_host(m->kernels), logits + i * n_vocab, n_vocab);
        chosen[i].id = id < 0 ? 0 : id;
    }
}

void drafter_observe_nothing(struct drafter *d, const struct batch *b,
                             const struct token_logprobs *chosen)
{
    (void)d, (void)b, (void)chosen;
}

bool drafter_submit_nothing(struct drafter *d, const struct batch *b)
{
    (void)d;
    (void)b;
    return false;
}

const struct drafter_ops *drafter_at(uint32_t i)
{
    for (size_t k = 0; k < COUNT_OF(METHODS); k++)
        if (METHODS[k].ops && strcmp(METHODS[k].name, METHODS[k].ops->name) == 0 && i-- == 0)
            return METHODS[k].ops;
    return NULL;
}

static enum status unknown_method(const char *name, struct err *err)
{
    struct buf all = { 0 };
    for (uint32_t i = 0; drafter_at(i); i++)
        buf_printf(&all, "%s%s", i ? ", " : "", drafter_at(i)->name);
    enum status st = err_field(err, ERR_CONFIG, "method", "method '%.40s' is not known; %s are",
                               name, all.data);
    buf_release(&all);
    return st;
}

static enum status read_method(const cJSON *doc, const struct method **out, struct err *err)
{
    const char *name = NULL;
    TRY(json_get_str(doc, "method", &name, err));
    if (!name)
        return err_field(err, ERR_CONFIG, "method",
                         "method is missing; \"ngram\" needs no weights");
    for (size_t i = 0; i < COUNT_OF(METHODS); i++) {
        if (strcmp(METHODS[i].name, name) != 0) continue;
        *out = &METHODS[i];
        if (!METHODS[i].refused) return OK;
        return err_field(err, ERR_CONFIG, "method", "method '%s' %s", name, METHODS[i].refused);
    }
    return unknown_method(name, err);
}

/* ---- members ---- */

static bool is_known(const char *name)
{
    for (size_t i = 0; i < COUNT_OF(KNOWN); i++)
        if (strcmp(KNOWN[i], name) == 0) return true;
    return false;
}

static bool is_ignored(const char *name, struct buf *notes)
{
    for (size_t i = 0; i < COUNT_OF(IGNORED); i++) {
        if (strcmp(IGNORED[i].name, name) != 0) continue;
        buf_printf(notes, "note: --speculative-config %s has no effect: %s\n", name,
                   IGNORED[i].why);
        return true;
    }
    return false;
}

static enum status check_members(const cJSON *doc, struct buf *notes, struct err *err)
{
    const cJSON *m;
    cJSON_ArrayForEach (m, doc) {
        if (is_known(m->string) || is_ignored(m->string, notes)) continue;
        struct buf all = { 0 };
        for (size_t i = 0; i < COUNT_OF(KNOWN); i++)
            buf_printf(&all, "%s%s", i ? ", " : "", KNOWN[i]);
        enum status st = err_field(err, ERR_CONFIG, m->string,
                                   "there is no member '%.64s'; its members are %s", m->string,
                                   all.data);
        buf_release(&all);
        return st;
    }
    return OK;
}

/* A member by either of its names. */
static enum status read_number(const cJSON *doc, const char *name, const char *other, int64_t most,
                               int64_t *out, struct err *err)
{
    TRY(json_get_i64(doc, name, 1, most, out, err));
    return other ? json_get_i64(doc, other, 1, most, out, err) : OK;
}

static enum status read_lookup(const cJSON *doc, struct draft_config *c, struct err *err)
{
    int64_t least = 0, most = 0;
    TRY(read_number(doc, "prompt_lookup_min", "min_ngram_size", DRAFT_LOOKUP_MAX, &least, err));
    TRY(read_number(doc, "prompt_lookup_max", "max_ngram_size", DRAFT_LOOKUP_MAX, &most, err));
    if (least == 0) least = most > 0 && most < LOOKUP_MIN ? most : LOOKUP_MIN;
    if (most == 0) most = least > LOOKUP_MAX ? least : LOOKUP_MAX;
    if (least > most)
        return err_field(err, ERR_CONFIG, "prompt_lookup_min",
                         "prompt_lookup_min is %d, but must be at most prompt_lookup_max, %d",
                         (int)least, (int)most);
    c->lookup_min = (uint32_t)least;
    c->lookup_max = (uint32_t)most;
    return OK;
}

static enum status read_model(const cJSON *doc, struct draft_config *c, struct err *err)
{
    const char *model = "";
    TRY(json_get_str(doc, "model", &model, err));
    if (strlen(model) >= DRAFT_MODEL_MAX)
        return err_field(err, ERR_CONFIG, "model", "model is a path of over %d characters",
                         DRAFT_MODEL_MAX - 1);
    memcpy(c->model, model, strlen(model) + 1);
    return OK;
}

/* Says which members are of other methods, so that nobody waits for what they would do. */
static void drop_other_methods(const cJSON *doc, struct draft_config *c, struct buf *notes)
{
    static const char *const LOOKUP[] = { "prompt_lookup_min", "prompt_lookup_max",
                                          "min_ngram_size", "max_ngram_size" };
    const bool looks_up = c->ops == &drafter_ngram_ops || c->ops == &drafter_suffix_ops,
               has_model = c->ops == &drafter_mtp_ops || c->ops == &drafter_model_ops;
    for (size_t i = 0; i < COUNT_OF(LOOKUP) && !looks_up; i++)
        if (cJSON_GetObjectItemCaseSensitive(doc, LOOKUP[i]))
            buf_printf(notes,
                       "note: --speculative-config %s has no effect: it is of ngram and suffix\n",
                       LOOKUP[i]);
    for (size_t i = 1; i < COUNT_OF(LOOKUP) && c->ops == &drafter_suffix_ops; i += 2)
        if (cJSON_GetObjectItemCaseSensitive(doc, LOOKUP[i]))
            buf_printf(notes, "note: --speculative-config %s has no effect: it is of ngram\n",
                       LOOKUP[i]);
    if (!c->model[0] || has_model) return;
    buf_add_c(notes, "note: --speculative-config model has no effect: it is of draft and mtp\n");
    c->model[0] = 0;
}

static enum status read_members(const cJSON *doc, struct draft_config *c, struct buf *notes,
                                struct err *err)
{
    const struct method *m = NULL;
    int64_t n_tokens = 0;
    if (!cJSON_IsObject(doc))
        return err_set(err, ERR_CONFIG, "it is not a JSON object, such as {\"method\": \"ngram\"}");
    TRY(check_members(doc, notes, err));
    TRY(read_method(doc, &m, err));
    TRY(json_get_i64(doc, "num_speculative_tokens", 1, DRAFT_TOKENS_MAX, &n_tokens, err));
    if (m->note)
        buf_printf(notes, "note: --speculative-config method %s has no effect: %s\n", m->name,
                   m->note);
    c->ops = m->ops;
    c->n_tokens = n_tokens ? (uint32_t)n_tokens : m->n_tokens;
    TRY(read_model(doc, c, err));
    bool adaptive = true;
    TRY(json_get_bool(doc, "adaptive", &adaptive, err));
    c->verify_all = !adaptive;
    if (c->ops == &drafter_model_ops && !c->model[0])
        return err_field(err, ERR_CONFIG, "model",
                         "method draft needs \"model\": a small model of the same vocabulary");
    TRY(read_lookup(doc, c, err));
    drop_other_methods(doc, c, notes);
    return OK;
}

enum status draft_config_parse(struct str text, struct draft_config *out, struct buf *notes,
                               struct err *err)
{
    struct draft_config c = { 0 };
    cJSON *doc = NULL;
    enum status st = json_parse(text, true, &doc, err);
    if (st == OK) st = read_members(doc, &c, notes, err);
    if (st == OK) *out = c;
    cJSON_Delete(doc);
    return st;
}
