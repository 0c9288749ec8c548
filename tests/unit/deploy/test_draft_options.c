/* test_draft_options.c - what each spelling of speculative decoding comes to, and what is said about
 * one that is wrong. */
#include "deploy/draft/draft_options.h"

#include <string.h>

#include "deploy/options/option_table.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

enum { WORDS_MAX = 8 };

struct reading {
    struct draft_config config;
    struct buf notes;
    struct err err;
    enum status status;
};

static struct reading read_args(const char *const *words)
{
    struct reading r = { 0 };
    char *argv[WORDS_MAX];
    int argc = 0, none = 0;
    for (; words[argc]; argc++) argv[argc] = (char *)(uintptr_t)words[argc];
    struct config *c = config_create(OPTIONS, "serve");
    r.status = config_load_args(c, argc, argv, NULL, &none, &r.err);
    if (r.status == OK) r.status = draft_options_read(c, &r.config, &r.notes, &r.err);
    config_free(c);
    return r;
}

/* ---- JSON ---- */

struct accepted {
    const char *json, *drafter; /* drafter "": nothing drafts */
    uint32_t n_tokens, lookup_min, lookup_max;
    const char *model, *note; /* NULL: none */
};

static const struct accepted ACCEPTED[] = {
    { "{\"method\":\"ngram\"}", "ngram", 8, 2, 16, NULL, NULL },
    { "{\"method\":\"ngram\",\"num_speculative_tokens\":4,\"prompt_lookup_max\":5,"
      "\"prompt_lookup_min\":3}",
      "ngram", 4, 3, 5, NULL, NULL },
    { "{\"method\":\"ngram_match\",\"max_ngram_size\":5,\"min_ngram_size\":2}", "ngram", 8, 2, 5,
      NULL, NULL },
    { "{\"method\":\"ngram\",\"prompt_lookup_max\":1}", "ngram", 8, 1, 1, NULL, NULL },
    { "{\"method\":\"ngram\",\"prompt_lookup_min\":20}", "ngram", 8, 20, 20, NULL, NULL },
    { "{\"method\":\"suffix\",\"suffix_decoding_max_tree_depth\":24}", "suffix", 8, 2, 16, NULL,
      "suffix_decoding_max_tree_depth has no effect" },
    { "{\"method\":\"deepseek_mtp\",\"num_speculative_tokens\":1}", "mtp", 1, 2, 16, NULL, NULL },
    { "{\"method\":\"ernie_mtp\",\"num_speculative_tokens\":3}", "mtp", 3, 2, 16, NULL, NULL },
    { "{\"method\":\"mtp\",\"num_speculative_tokens\":1,\"model\":\"/m/mtp\"}", "mtp", 1, 2, 16,
      "/m/mtp", NULL },
    { "{\"method\":\"draft_model\",\"model\":\"/small\"}", "draft", 4, 2, 16, "/small", NULL },
    { "{\"method\":\"naive\"}", "", 1, 2, 16, NULL, "naive has no effect" },
    { "{\"method\":\"ngram\",\"acceptance_method\":\"typical_acceptance_sampler\"}", "ngram", 8, 2,
      16, NULL, "acceptance_method has no effect" },
    { "{\"method\":\"draft_model\",\"model\":\"/small\",\"draft_tensor_parallel_size\":1}", "draft",
      4, 2, 16, "/small", "draft_tensor_parallel_size has no effect" },
    { "{\"method\":\"mtp\",\"num_model_steps\":2,\"mtp_strategy\":\"with_ngram\"}", "mtp", 1, 2, 16,
      NULL, "mtp_strategy has no effect" },
    { "{\"method\":\"mtp\",\"max_ngram_size\":5}", "mtp", 1, 2, 5, NULL,
      "max_ngram_size has no effect: it is of ngram and suffix" },
    { "{\"method\":\"ngram\",\"model\":\"/small\"}", "ngram", 8, 2, 16, NULL,
      "model has no effect: it is of draft and mtp" },
};

TEST(all_drafts_are_verified_if_asked)
{
    static const struct {
        const char *json;
        bool verify_all;
    } cases[] = { { "{\"method\":\"mtp\"}", false },
                  { "{\"method\":\"mtp\",\"adaptive\":true}", false },
                  { "{\"method\":\"mtp\",\"adaptive\":false}", true } };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        struct reading r = read_args(
            (const char *[]){ "--speculative-config", cases[i].json, NULL });
        CHECK_OK(r.status);
        CHECK_EQ_INT(r.config.verify_all, cases[i].verify_all);
        buf_release(&r.notes);
    }
}

static void check_config(const struct reading *r, const struct accepted *want, const char *text)
{
    if (r->status != OK) test_fail(__FILE__, __LINE__, "%s: %s", text, r->err.text);
    CHECK_EQ_STR(r->config.ops ? r->config.ops->name : "", want->drafter);
    CHECK_EQ_INT(r->config.n_tokens, want->n_tokens);
    CHECK_EQ_INT(r->config.lookup_min, want->lookup_min);
    CHECK_EQ_INT(r->config.lookup_max, want->lookup_max);
    CHECK_EQ_STR(r->config.model, want->model ? want->model : "");
    if (!want->note) CHECK_EQ_INT(r->notes.len, 0);
    else if (!r->notes.len || !strstr(r->notes.data, want->note))
        test_fail(__FILE__, __LINE__, "%s notes %s", text,
                  r->notes.len ? r->notes.data : "nothing");
}

TEST(members_of_vllm_and_fastdeploy_are_read)
{
    for (size_t i = 0; i < COUNT_OF(ACCEPTED); i++) {
        const struct accepted *a = &ACCEPTED[i];
        struct reading r = read_args((const char *[]){ "--speculative-config", a->json, NULL });
        check_config(&r, a, a->json);
        buf_release(&r.notes);
    }
}

struct refused {
    const char *json, *field, *says; /* field NULL: the JSON is at fault */
};

static const struct refused REFUSED[] = {
    { "{", NULL, "must be JSON: malformed JSON at byte 1" },
    { "[]", NULL, "not a JSON object, such as {\"method\": \"ngram\"}" },
    { "{}", "method", "method is missing" },
    { "{\"num_speculative_tokens\":2}", "method", "method is missing" },
    { "{\"method\":7}", "method", "method" },
    { "{\"method\":\"ngram\",\"adaptive\":1}", "adaptive", "adaptive" },
    { "{\"method\":\"lookahead\"}", "method",
      "method 'lookahead' is not known; ngram, suffix, mtp, draft are" },
    { "{\"method\":\"eagle3\"}", "method", "heads that were trained for the purpose" },
    { "{\"method\":\"medusa\"}", "method", "not built" },
    { "{\"method\":\"ngram\",\"num_speculative_tokens\":0}", "num_speculative_tokens", "1" },
    { "{\"method\":\"ngram\",\"num_speculative_tokens\":9}", "num_speculative_tokens", "8" },
    { "{\"method\":\"ngram\",\"num_speculative_tokens\":2.5}", "num_speculative_tokens", "" },
    { "{\"method\":\"ngram\",\"num_speculative_tokens\":\"4\"}", "num_speculative_tokens", "" },
    { "{\"method\":\"ngram\",\"prompt_lookup_max\":33}", "prompt_lookup_max", "32" },
    { "{\"method\":\"ngram\",\"prompt_lookup_min\":5,\"prompt_lookup_max\":4}", "prompt_lookup_min",
      "prompt_lookup_min is 5, but must be at most prompt_lookup_max, 4" },
    { "{\"method\":\"ngram\",\"num_speculativ_tokens\":4}", "num_speculativ_tokens",
      "its members are method, num_speculative_tokens" },
    { "{\"method\":\"draft\"}", "model", "a small model of the same vocabulary" },
    { "{\"method\":\"draft\",\"model\":\"\"}", "model", "a small model of the same vocabulary" },
    { "{\"method\":\"draft\",\"model\":3}", "model", "" },
};

TEST(errors_name_the_member_and_what_would_be_right)
{
    for (size_t i = 0; i < COUNT_OF(REFUSED); i++) {
        const struct refused *w = &REFUSED[i];
        struct reading r = read_args((const char *[]){ "--speculative-config", w->json, NULL });
        if (r.status != ERR_CONFIG || !strstr(r.err.text, w->says) ||
            !strstr(r.err.text, "--speculative-config"))
            test_fail(__FILE__, __LINE__, "%s: %d, %s", w->json, r.status, r.err.text);
        if (w->field) CHECK_EQ_STR(r.err.field, w->field);
        buf_release(&r.notes);
    }
}

/* ---- SGLang's and llama.cpp's words ---- */

struct spelling {
    const char *words[WORDS_MAX];
    struct accepted means;
};

static const struct spelling SPELLINGS[] = {
    { { "--speculative-algorithm", "NGRAM" }, { NULL, "ngram", 8, 2, 16, NULL, NULL } },
    { { "--speculative-algorithm", "ngram", "--speculative-num-draft-tokens", "3" },
      { NULL, "ngram", 3, 2, 16, NULL, NULL } },
    { { "--speculative-algorithm", "NEXTN", "--speculative-num-steps", "2" },
      { NULL, "mtp", 2, 2, 16, NULL, NULL } },
    { { "--speculative-algorithm", "EAGLE" }, { NULL, "mtp", 1, 2, 16, NULL, NULL } },
    { { "--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", "/s \"1\"" },
      { NULL, "draft", 4, 2, 16, "/s \"1\"", NULL } },
    { { "-md", "/s.gguf" }, { NULL, "draft", 4, 2, 16, "/s.gguf", NULL } },
    { { "-md", "/s.gguf", "--draft-max", "16" },
      { NULL, "draft", 8, 2, 16, "/s.gguf", "at most 8 drafts" } },
    { { "--speculative-num-steps", "3" },
      { NULL, "", 0, 0, 0, NULL,
        "--speculative-num-steps has no effect: it needs --speculative-algorithm" } },
    { { "--draft-max", "3", "--speculative-config", "{\"method\":\"ngram\"}" },
      { NULL, "ngram", 8, 2, 16, NULL,
        "has no effect: --speculative-config has num_speculative_tokens" } },
    { { "--port", "1" }, { NULL, "", 0, 0, 0, NULL, NULL } },
};

TEST(other_servers_words_say_the_same)
{
    for (size_t i = 0; i < COUNT_OF(SPELLINGS); i++) {
        struct reading r = read_args(SPELLINGS[i].words);
        check_config(&r, &SPELLINGS[i].means, SPELLINGS[i].words[1]);
        buf_release(&r.notes);
    }
}

static void check_refused(const char *const *words, const char *field, const char *says)
{
    struct reading r = read_args(words);
    if (r.status == OK || !strstr(r.err.text, says))
        test_fail(__FILE__, __LINE__, "%s %s: %d, %s", words[0], words[1], r.status, r.err.text);
    CHECK_EQ_STR(r.err.field, field);
    buf_release(&r.notes);
}

TEST(words_that_contradict_each_other_are_refused)
{
    check_refused((const char *[]){ "--speculative-algorithm", "EAGLE3", NULL },
                  "speculative-algorithm", "NGRAM, NEXTN, EAGLE, STANDALONE are");
    check_refused((const char *[]){ "--speculative-algorithm", "STANDALONE", NULL },
                  "speculative-draft-model-path", "needs --speculative-draft-model-path");
    check_refused((const char *[]){ "--speculative-algorithm", "EAGLE",
                                    "--speculative-draft-model-path", "/heads", NULL },
                  "speculative-draft-model-path", "the model's own layer");
    check_refused((const char *[]){ "--speculative-config", "{\"method\":\"ngram\"}",
                                    "--speculative-algorithm", "NGRAM", NULL },
                  "speculative-algorithm", "give one");
}

TEST_MAIN(CASE(members_of_vllm_and_fastdeploy_are_read), CASE(all_drafts_are_verified_if_asked),
          CASE(errors_name_the_member_and_what_would_be_right),
          CASE(other_servers_words_say_the_same),
          CASE(words_that_contradict_each_other_are_refused))
