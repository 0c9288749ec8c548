/* test_openai_params.c - every member of a request: which values are refused with which error, and
 * what reaches the backend. */
#include "tests/unit/serve/serve_rig.h"

static const char CHAT[] = "/v1/chat/completions", COMPLETIONS[] = "/v1/completions";
#define MESSAGES "\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]"
#define PROMPT   "\"prompt\":\"Hi\""

struct refusal {
    const char *path, *members, *param, *text; /* text: part of the message; NULL: any */
};

static void check_refusals(const struct refusal *rows, size_t n)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    for (size_t i = 0; i < n; i++) {
        char body[4096];
        bool chat = rows[i].path == CHAT;
        snprintf(body, sizeof body, "{%s,%s}", chat ? MESSAGES : PROMPT, rows[i].members);
        struct answer a = rig_submit(&r, rows[i].path, body);
        if (a.status != 400)
            test_fail(__FILE__, __LINE__, "%s: status %d, %s", rows[i].members, a.status,
                      a.body.data);
        if (strcmp(string_at(a.json, "error.param"), rows[i].param) != 0 ||
            (rows[i].text && !strstr(string_at(a.json, "error.message"), rows[i].text)))
            test_fail(__FILE__, __LINE__, "%s: %s", rows[i].members, a.body.data);
        CHECK_EQ_STR(string_at(a.json, "error.type"), "invalid_request_error");
        answer_free(&a);
    }
    CHECK_EQ_INT(r.fake.n_submitted, 0);
    rig_close(&r);
}

TEST(numbers_out_of_range_are_refused_with_their_range)
{
    static const struct refusal rows[] = {
        { CHAT, "\"temperature\":-0.1", "temperature", "from 0 to 2" },
        { CHAT, "\"temperature\":2.1", "temperature", "from 0 to 2" },
        { COMPLETIONS, "\"temperature\":1e9", "temperature", "from 0 to 2" },
        { CHAT, "\"temperature\":1e400", "temperature", NULL },
        { CHAT, "\"temperature\":\"1\"", "temperature", "number" },
        { CHAT, "\"top_p\":1.1", "top_p", "from 0 to 1" },
        { CHAT, "\"top_p\":-1", "top_p", "from 0 to 1" },
        { CHAT, "\"top_k\":-2", "top_k", "from -1 to" },
        { CHAT, "\"top_k\":1.5", "top_k", "whole" },
        { CHAT, "\"min_p\":2", "min_p", "from 0 to 1" },
        { CHAT, "\"presence_penalty\":2.5", "presence_penalty", "from -2 to 2" },
        { CHAT, "\"frequency_penalty\":-2.5", "frequency_penalty", "from -2 to 2" },
        { CHAT, "\"repetition_penalty\":0", "repetition_penalty", "from 0.01 to 100" },
        { CHAT, "\"seed\":1e30", "seed", NULL },
        { CHAT, "\"seed\":0.5", "seed", "whole" },
        { CHAT, "\"n\":0", "n", "from 1 to 8" },
        { CHAT, "\"n\":9", "n", "from 1 to 8" },
        { CHAT, "\"n\":-1", "n", "from 1 to 8" },
        { COMPLETIONS, "\"n\":2,\"best_of\":4", "best_of", "equal to n" },
        { CHAT, "\"max_tokens\":0", "max_tokens", "from 1 to" },
        { CHAT, "\"max_tokens\":-5", "max_tokens", NULL },
        { CHAT, "\"max_completion_tokens\":-5", "max_completion_tokens", NULL },
        { COMPLETIONS, "\"max_tokens\":0", "max_tokens", NULL },
        { CHAT, "\"min_tokens\":9,\"max_tokens\":8", "min_tokens", "from 0 to max_tokens" },
        { CHAT, "\"min_tokens\":-1", "min_tokens", NULL },
        { CHAT, "\"top_logprobs\":3", "top_logprobs", "logprobs is true" },
        { CHAT, "\"logprobs\":true,\"top_logprobs\":21", "top_logprobs", "from 0 to 20" },
        { CHAT, "\"logprobs\":5", "logprobs", "true or false" },
        { COMPLETIONS, "\"logprobs\":21", "logprobs", "from 0 to 20" },
        { COMPLETIONS, "\"logprobs\":-1", "logprobs", NULL },
        { COMPLETIONS, "\"prompt_logprobs\":21", "prompt_logprobs", "from 0 to 20" },
        { COMPLETIONS, "\"prompt_logprobs\":1,\"stream\":true", "prompt_logprobs", "stream" },
        { COMPLETIONS, "\"truncate_prompt_tokens\":0", "truncate_prompt_tokens", "from 1 to 256" },
        { COMPLETIONS, "\"truncate_prompt_tokens\":1000", "truncate_prompt_tokens", NULL },
    };
    check_refusals(rows, COUNT_OF(rows));
}

TEST(members_of_the_wrong_kind_are_refused)
{
    static const struct refusal rows[] = {
        { CHAT, "\"stream\":1", "stream", NULL },
        { CHAT, "\"stream_options\":{\"include_usage\":true}", "stream_options", "stream is true" },
        { CHAT, "\"stream\":true,\"stream_options\":5", "stream_options", NULL },
        { CHAT, "\"stop\":5", "stop", NULL },
        { CHAT, "\"stop\":\"\"", "stop", "empty" },
        { CHAT, "\"stop\":[\"a\",7]", "stop", NULL },
        { CHAT,
          "\"stop\":[\"1\",\"2\",\"3\",\"4\",\"5\",\"6\",\"7\",\"8\",\"9\",\"10\",\"11\",\"12\","
          "\"13\",\"14\",\"15\",\"16\",\"17\"]",
          "stop", "16" },
        { CHAT, "\"stop_token_ids\":[508]", "stop_token_ids", "from 0 to 507" },
        { CHAT, "\"stop_token_ids\":[-1]", "stop_token_ids", "from 0 to 507" },
        { CHAT, "\"stop_token_ids\":3", "stop_token_ids", NULL },
        { CHAT, "\"logit_bias\":{\"508\":1}", "logit_bias", "from 0 to 507" },
        { CHAT, "\"logit_bias\":{\"x\":1}", "logit_bias", NULL },
        { CHAT, "\"logit_bias\":{\"5\":101}", "logit_bias", "from -100 to 100" },
        { CHAT, "\"logit_bias\":{\"5\":\"1\"}", "logit_bias", NULL },
        { CHAT, "\"logit_bias\":[1]", "logit_bias", NULL },
        { CHAT, "\"ignore_eos\":\"yes\"", "ignore_eos", NULL },
        { CHAT, "\"cache_salt\":\"\"", "cache_salt", NULL },
        { CHAT, "\"model\":5", "model", NULL },
        { CHAT, "\"chat_template_kwargs\":5", "chat_template_kwargs", NULL },
        { CHAT, "\"continue_final_message\":true", "continue_final_message",
          "add_generation_prompt" },
        { CHAT, "\"echo\":true", "echo", NULL },
        { CHAT, "\"include_reasoning\":1", "include_reasoning", NULL },
        { CHAT, "\"parallel_tool_calls\":1", "parallel_tool_calls", NULL },
        { CHAT, "\"tools\":{}", "tools", "array" },
        { CHAT, "\"tools\":[5]", "tools", "tools[0]" },
        { CHAT, "\"tools\":[{\"type\":\"function\"}]", "tools", "name" },
        { CHAT, "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"\"}}]", "tools",
          "name" },
        { CHAT, "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"get weather\"}}]",
          "tools", "without blanks" },
        { CHAT, "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f[ARGS]\"}}]", "tools",
          "without blanks" },
        { CHAT, "\"tool_choice\":5", "tool_choice", "required" },
        { CHAT, "\"tool_choice\":\"always\"", "tool_choice", "required" },
        { CHAT, "\"tool_choice\":{\"type\":\"function\"}", "tool_choice", "required" },
        { CHAT, "\"tool_choice\":\"required\"", "tool_choice", "no tools" },
        { CHAT,
          "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}],\"tool_choice\":{"
          "\"function\":{\"name\":\"g\"}}",
          "tool_choice", "no such tool" },
    };
    check_refusals(rows, COUNT_OF(rows));
}

TEST(what_would_change_the_answer_and_is_not_there_is_refused_by_name)
{
    static const struct refusal rows[] = {
        { CHAT, "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}]", "tools",
          "no form of tool calls" },
        { COMPLETIONS, "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}]", "tools",
          "chat" },
        { CHAT, "\"tools\":[{\"type\":\"web_search\"}]", "tools", "functions" },
        { CHAT, "\"functions\":[{}]", "functions", NULL },
        { CHAT, "\"response_format\":{\"type\":\"json_object\"}", "response_format",
          "structured output" },
        { CHAT, "\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{}}",
          "response_format", "structured output" },
        { CHAT, "\"response_format\":\"text\"", "response_format", NULL },
        { CHAT, "\"guided_json\":{\"type\":\"object\"}", "guided_json", "structured output" },
        { COMPLETIONS, "\"guided_regex\":\"a+\"", "guided_regex", NULL },
        { COMPLETIONS, "\"guided_choice\":[\"a\"]", "guided_choice", NULL },
        { COMPLETIONS, "\"structural_tag\":\"x\"", "structural_tag", NULL },
        { CHAT, "\"chat_template\":\"{{ 1 }}\"", "chat_template", "operator" },
        { CHAT, "\"bad_words\":[\"a\"]", "bad_words", NULL },
        { CHAT, "\"allowed_token_ids\":[1]", "allowed_token_ids", NULL },
        { CHAT, "\"use_beam_search\":true", "use_beam_search", NULL },
        { CHAT, "\"modalities\":[\"audio\"]", "modalities", NULL },
        { COMPLETIONS, "\"suffix\":\"x\"", "suffix", NULL },
    };
    check_refusals(rows, COUNT_OF(rows));
}

struct bad_body {
    const char *path, *body;
    int status;
    const char *param, *code;
};

TEST(bodies_that_are_no_requests)
{
    static const struct bad_body rows[] = {
        { CHAT, "", 400, NULL, "invalid_json" },
        { CHAT, "{", 400, NULL, "invalid_json" },
        { CHAT, "[]", 400, NULL, "invalid_value" },
        { CHAT, "{\"temperature\":NaN}", 400, NULL, "invalid_json" },
        { CHAT, "{}", 400, "messages", "invalid_value" },
        { CHAT, "{\"messages\":[]}", 400, "messages", "invalid_value" },
        { CHAT, "{\"messages\":[5]}", 400, "messages", "invalid_value" },
        { CHAT, "{\"messages\":[{\"content\":\"x\"}]}", 400, "messages", "invalid_value" },
        { CHAT, "{\"messages\":[{\"role\":\"robot\",\"content\":\"x\"}]}", 400, "messages",
          "invalid_value" },
        { CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":5}]}", 400, "messages",
          "invalid_value" },
        { CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]}]}", 400,
          "messages", "unsupported_value" },
        { CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\"}]}]}", 400,
          "messages", "invalid_value" },
        { CHAT, "{\"model\":\"gpt\"," MESSAGES "}", 404, "model", "model_not_found" },
        { COMPLETIONS, "{}", 400, "prompt", "invalid_value" },
        { COMPLETIONS, "{\"prompt\":\"\"}", 400, "prompt", "invalid_value" },
        { COMPLETIONS, "{\"prompt\":[]}", 400, "prompt", "invalid_value" },
        { COMPLETIONS, "{\"prompt\":[[]]}", 400, "prompt", "invalid_value" },
        { COMPLETIONS, "{\"prompt\":5}", 400, "prompt", "invalid_value" },
        { COMPLETIONS, "{\"prompt\":[1,\"a\"]}", 400, "prompt", "invalid_value" },
        { COMPLETIONS, "{\"prompt\":[\"a\",[1]]}", 400, "prompt", "invalid_value" },
        { COMPLETIONS, "{\"prompt\":[1,508]}", 400, "prompt", "invalid_value" },
        { COMPLETIONS, "{\"prompt\":[1,-1]}", 400, "prompt", "invalid_value" },
        { COMPLETIONS, "{\"prompt\":[1.5]}", 400, "prompt", "invalid_value" },
        { COMPLETIONS, "{\"prompt\":[\"a\",\"a\",\"a\"],\"n\":8}", 400, "n", "invalid_value" },
        { COMPLETIONS, "{\"prompt\":[5],\"max_tokens\":256}", 400, "prompt",
          "context_length_exceeded" },
        { COMPLETIONS, "{\"prompt\":[5],\"max_tokens\":4000000000}", 400, "prompt",
          "context_length_exceeded" },
    };
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        struct answer a = rig_submit(&r, rows[i].path, rows[i].body);
        const char *param = rows[i].param ? rows[i].param : "(none)";
        if (a.status != rows[i].status || strcmp(string_at(a.json, "error.param"), param) != 0 ||
            strcmp(string_at(a.json, "error.code"), rows[i].code) != 0)
            test_fail(__FILE__, __LINE__, "%s: %d %s", rows[i].body, a.status, a.body.data);
        answer_free(&a);
    }
    CHECK_EQ_INT(r.fake.n_submitted, 0);
    rig_close(&r);
}

TEST(context_overflow_says_the_numbers)
{
    struct rig r;
    struct buf body = { 0 };
    rig_open(&r);
    rig_start(&r);
    buf_add_c(&body, "{\"prompt\":[5");
    for (int i = 1; i < 256; i++) buf_add_c(&body, ",5");
    buf_add_c(&body, "]}");
    struct answer a = rig_submit(&r, COMPLETIONS, body.data);
    CHECK_EQ_INT(a.status, 400);
    CHECK(strstr(string_at(a.json, "error.message"),
                 "maximum context length is 256 tokens. However, you requested 256 tokens"));
    answer_free(&a);
    a = rig_submit(&r, COMPLETIONS, "{\"prompt\":[5,6],\"max_tokens\":255}");
    CHECK(strstr(string_at(a.json, "error.message"),
                 "However, you requested 257 tokens (2 in the prompt, 255 in the completion)"));
    answer_free(&a);
    buf_clear(&body);
    buf_add_c(&body, "{\"prompt\":\"");
    for (int i = 0; i < 9000; i++) buf_add_c(&body, "q ");
    buf_add_c(&body, "\"}");
    a = rig_submit(&r, COMPLETIONS, body.data);
    CHECK(strstr(string_at(a.json, "error.message"), "you requested more than 1024 tokens"));
    CHECK_EQ_STR(string_at(a.json, "error.code"), "context_length_exceeded");
    answer_free(&a);
    buf_release(&body);
    /* Ids are not read to their end either. */
    buf_clear(&body);
    buf_add_c(&body, "{\"prompt\":[5");
    for (int i = 1; i < 1025; i++) buf_add_c(&body, ",5");
    buf_add_c(&body, " this is never read");
    a = rig_submit(&r, COMPLETIONS, body.data);
    CHECK_EQ_INT(a.status, 400);
    CHECK_EQ_STR(string_at(a.json, "error.param"), "prompt");
    CHECK(strstr(string_at(a.json, "error.message"), "you requested more than 1024 tokens"));
    answer_free(&a);
    /* Unless only their end is wanted. */
    body.len -= strlen(" this is never read");
    buf_add_c(&body, ",6,7],\"truncate_prompt_tokens\":2,\"max_tokens\":1}");
    a = rig_submit(&r, COMPLETIONS, body.data);
    CHECK_EQ_INT(a.status, 200);
    CHECK_EQ_INT(r.fake.last.n_tokens, 2);
    answer_free(&a);
    buf_release(&body);
    /* A default of max_tokens is cut to what fits. */
    a = rig_submit(&r, COMPLETIONS,
                   "{\"prompt\":[5,6,7],\"truncate_prompt_tokens\":2,\"max_tokens\":3}");
    CHECK_EQ_INT(a.status, 200);
    CHECK_EQ_INT(r.fake.last.n_tokens, 2);
    answer_free(&a);
    rig_close(&r);
}

TEST(values_reach_the_backend)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    struct answer a = rig_submit(
        &r, CHAT,
        "{" MESSAGES
        ",\"temperature\":0.5,\"top_p\":0.25,\"top_k\":7,\"min_p\":0.125,\"presence_penalty\":1,"
        "\"frequency_penalty\":-1,\"repetition_penalty\":1.5,\"seed\":42,\"max_tokens\":9,\"max_"
        "completion_tokens\":8,"
        "\"min_tokens\":2,\"ignore_eos\":true,\"stop_token_ids\":[4,5],\"logit_bias\":{\"6\":-1.5},"
        "\"bad_words_token_ids\":[7],\"cache_salt\":\"s\",\"unknown\":{\"a\":1},\"user\":\"u\","
        "\"tools\":[{}],"
        "\"tool_choice\":\"none\",\"response_format\":{\"type\":\"text\"},\"model\":\"org/tiny\"}");
    const struct sampling_params *p = &r.fake.last.sampling;
    CHECK_EQ_INT(a.status, 200);
    CHECK_NEAR(p->temperature, 0.5, 0);
    CHECK_NEAR(p->top_p, 0.25, 0);
    CHECK_NEAR(p->min_p, 0.125, 0);
    CHECK_NEAR(p->presence_penalty, 1, 0);
    CHECK_NEAR(p->frequency_penalty, -1, 0);
    CHECK_NEAR(p->repetition_penalty, 1.5, 0);
    CHECK_EQ_INT(p->top_k, 7);
    CHECK_EQ_INT(p->seed, 42);
    CHECK_EQ_INT(p->max_tokens, 8);
    CHECK_EQ_INT(p->min_tokens, 2);
    CHECK(p->ignore_eos);
    CHECK_EQ_INT(p->n_stop_ids, 2);
    CHECK_EQ_INT(p->stop_ids[1], 5);
    CHECK_EQ_INT(p->n_bias, 2);
    CHECK_EQ_INT(r.fake.last_bias[0].id, 6);
    CHECK_NEAR(r.fake.last_bias[0].bias, -1.5, 0);
    CHECK_EQ_INT(r.fake.last_bias[1].id, 7);
    CHECK(r.fake.last_bias[1].bias < -1e6f);
    CHECK(r.fake.last.cache_salt != 0);
    CHECK_EQ_INT(p->n_logprobs, -1);
    CHECK_EQ_STR(r.fake.last_name, "t-1");
    answer_free(&a);
    rig_close(&r);
}

TEST(members_of_fastdeploys_older_protocol)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    struct answer a = rig_submit(&r, COMPLETIONS, "{" PROMPT ",\"max_dec_len\":3}");
    CHECK_EQ_INT(a.status, 200);
    CHECK_EQ_INT(r.fake.last.sampling.max_tokens, 3);
    answer_free(&a);
    a = rig_submit(&r, CHAT, "{" MESSAGES ",\"max_dec_len\":0,\"response_type\":\"openai\"}");
    CHECK_EQ_INT(a.status, 400);
    CHECK_EQ_STR(string_at(a.json, "error.param"), "max_dec_len");
    answer_free(&a);
    a = rig_submit(&r, CHAT, "{\"text\":\"Hi\",\"response_type\":\"openai\"}");
    CHECK_EQ_INT(a.status, 400);
    CHECK(strstr(string_at(a.json, "error.message"), "as its response_type is openai"));
    answer_free(&a);
    rig_close(&r);
}

TEST(bodies_with_very_many_values_are_refused)
{
    struct rig r;
    struct buf body = { 0 };
    rig_open(&r);
    rig_start(&r);
    buf_add_c(&body, "{" MESSAGES ",\"x\":[1");
    for (int i = 1; i < 300000; i++) buf_add_c(&body, ",1");
    buf_add_c(&body, "]}");
    struct answer a = rig_submit(&r, CHAT, body.data);
    CHECK_EQ_INT(a.status, 400);
    CHECK(strstr(string_at(a.json, "error.message"), "more than 262144 JSON values"));
    answer_free(&a);
    buf_release(&body);
    rig_close(&r);
}

TEST(temperature_above_2_is_taken_when_the_node_allows_it)
{
    struct rig r;
    rig_open(&r);
    r.o.any_temperature = true;
    rig_start(&r);
    struct answer a = rig_submit(&r, CHAT, "{" MESSAGES ",\"temperature\":99}");
    CHECK_EQ_INT(a.status, 200);
    CHECK_NEAR(r.fake.last.sampling.temperature, 99, 0);
    answer_free(&a);
    a = rig_submit(&r, CHAT, "{" MESSAGES ",\"temperature\":101}");
    CHECK_EQ_INT(a.status, 400);
    CHECK(strstr(string_at(a.json, "error.message"), "from 0 to 100"));
    answer_free(&a);
    rig_close(&r);
}

TEST(defaults_come_from_the_model_or_openai)
{
    struct rig r;
    rig_open(&r);
    r.o.defaults = (struct serve_defaults){
        .temperature = 0.7, .top_p = 0.9, .min_p = NAN, .repetition_penalty = 1.1, .top_k = 20
    };
    rig_start(&r);
    const struct sampling_params *p = &r.fake.last.sampling;
    struct answer a = rig_submit(
        &r, COMPLETIONS,
        "{" PROMPT ",\"model\":null,\"temperature\":null,\"stop\":null,\"logprobs\":null}");
    CHECK_EQ_INT(a.status, 200);
    CHECK_NEAR(p->temperature, 0.7, 1e-6);
    CHECK_NEAR(p->top_p, 0.9, 1e-6);
    CHECK_NEAR(p->min_p, 0, 0);
    CHECK_EQ_INT(p->top_k, 20);
    CHECK_EQ_INT(p->max_tokens, 16);
    answer_free(&a);
    a = rig_submit(&r, CHAT, "{" MESSAGES ",\"model\":\"default\",\"top_k\":-1}");
    CHECK_EQ_INT(a.status, 200);
    CHECK_EQ_INT(p->top_k, 0);
    CHECK_EQ_INT(p->max_tokens, 256 - r.fake.last.n_tokens);
    answer_free(&a);
    rig_close(&r);
}

TEST(seeds_of_several_answers)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    struct answer a = rig_submit(&r, COMPLETIONS, "{\"prompt\":[\"a\",\"a\"],\"n\":2,\"seed\":10}");
    CHECK_EQ_INT(a.status, 200);
    CHECK_EQ_INT(r.fake.n_submitted, 4);
    for (int i = 0; i < 4; i++) CHECK_EQ_INT(r.fake.seeds[i], 10 + i % 2);
    answer_free(&a);
    /* Random seeds differ between all choices, also of equal prompts. */
    a = rig_submit(&r, COMPLETIONS, "{\"prompt\":[\"a\",\"a\"],\"n\":2}");
    for (int i = 5; i < 8; i++) CHECK(r.fake.seeds[i] == r.fake.seeds[4] + (uint64_t)(i - 4));
    answer_free(&a);
    rig_close(&r);
}

TEST(options_are_checked)
{
    struct rig r;
    struct err err;
    rig_open(&r);
    struct serve_options o = r.o;
    struct serve *s = NULL;
    o.n_names = 0;
    CHECK_STATUS(serve_create(&o, &s, &err), ERR_CONFIG);
    o = r.o;
    o.max_logprobs = 21;
    CHECK_STATUS(serve_create(&o, &s, &err), ERR_CONFIG);
    rig_start(&r);
    rig_close(&r);
}

TEST_MAIN(CASE(numbers_out_of_range_are_refused_with_their_range),
          CASE(members_of_the_wrong_kind_are_refused),
          CASE(what_would_change_the_answer_and_is_not_there_is_refused_by_name),
          CASE(bodies_that_are_no_requests), CASE(context_overflow_says_the_numbers),
          CASE(values_reach_the_backend), CASE(members_of_fastdeploys_older_protocol),
          CASE(bodies_with_very_many_values_are_refused),
          CASE(temperature_above_2_is_taken_when_the_node_allows_it),
          CASE(defaults_come_from_the_model_or_openai), CASE(seeds_of_several_answers),
          CASE(options_are_checked))
