/* test_native_requests.c - FastDeploy's native form: which bodies are of it, its members with their
 * ranges and defaults, and its errors. */
#include "shared/serve/native/native.h"
#include "tests/unit/serve/serve_rig.h"

static const char CHAT[] = "/v1/chat/completions", COMPLETIONS[] = "/v1/completions";

/* The same from the parsed body and from its text. */
static bool is_native(const char *body)
{
    struct err err = { 0 };
    struct str ignored;
    cJSON *doc = NULL;
    CHECK_OK(json_parse(str_of(body), false, &doc, &err));
    const bool is = native_is(doc);
    cJSON_Delete(doc);
    if (native_seems(str_of(body), &ignored) != is)
        test_fail(__FILE__, __LINE__, "%s: its text tells otherwise", body);
    return is;
}

TEST(bodies_are_told_by_their_members)
{
    static const char *const native[] = {
        "{\"text\":\"x\"}",
        "{\"input_ids\":[1]}",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"\\\"} \\\\\"}],\"req_id\":\"a\"}",
        "{ \"messages\" : [ ] ,\n\"max_dec_len\" : 64 }",
        "{\"messages\":[],\"min_dec_len\":1}",
        "{\"messages\":[],\"topp\":0.5}",
        "{\"messages\":[],\"penalty_score\":1}",
        "{\"messages\":[],\"frequency_score\":0}",
        "{\"messages\":[],\"presence_score\":0}",
        "{\"messages\":[],\"return_usage\":false}",
        "{\"messages\":[],\"return_all_tokens\":false}",
        "{\"messages\":[],\"response_type\":\"FastDeploy\"}",
        "{\"prompt\":\"x\",\"text\":\"x\"}",
    };
    static const char *const others[] = {
        "{}",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"text\",\"req_id\":\"x\"}],\"x\":{\"topp\":"
        "1}}",
        "{\"messages\":[],\"temperature\":1,\"max_tokens\":4,\"top_p\":1,\"stream\":true}",
        "{\"messages\":[],\"text\":null,\"req_id\":null}",
        "{\"messages\":[],\"req_id\":\"a\",\"response_type\":\"openai\"}",
        "{\"text\":\"x\",\"response_type\":\"OpenAI\"}",
        "{\"messages\":[],\"response_type\":\"text\"}",
        "{\"prompt\":\"x\",\"req_id\":\"a\",\"max_dec_len\":4}",
    };
    for (size_t i = 0; i < COUNT_OF(native); i++)
        if (!is_native(native[i])) test_fail(__FILE__, __LINE__, "%s", native[i]);
    for (size_t i = 0; i < COUNT_OF(others); i++)
        if (is_native(others[i])) test_fail(__FILE__, __LINE__, "%s", others[i]);
}

TEST(what_is_no_json_is_looked_at_as_far_as_it_goes)
{
    static const struct {
        const char *body, *req_id;
        bool is_native;
    } cases[] = {
        { "{\"req_id\":\"a-1\",\"text\":", "a-1", true },
        { "{\"req_id\":\"a\\n\",\"text\":\"half", "", true },
        { "{\"messages\":[{\"a\":[1,{\"b\":\"]}\"}]}],\"req_id\":\"z\"} more", "z", true },
        { "{\"messages\":[{\"a\":[1,{", "", false },
        { "{\"messages\":\"half\\", "", false },
        { "{\"messages\"", "", false },
        { "{\"messages\":", "", false },
        { "{,\"text\":1}", "", false },
        { "[{\"text\":\"x\"}]", "", false },
        { "{", "", false },
        { "", "", false },
        { "\"", "", false },
    };
    struct str id;
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        if (native_seems(str_of(cases[i].body), &id) != cases[i].is_native ||
            !str_eq_c(id, cases[i].req_id))
            test_fail(__FILE__, __LINE__, "%s", cases[i].body);
    }
    CHECK(!native_seems((struct str){ NULL, 0 }, &id));
    char nul[] = "{\0\"text\":1}";
    CHECK(!native_seems((struct str){ nul, sizeof nul - 1 }, &id));
}

struct refusal {
    const char *members; /* beside the text, if they have none of their own */
    const char *text;    /* part of error_msg, which names the member */
    int status;          /* 0: 400 */
};

static void check_error(const struct answer *a, int status, const char *text)
{
    if (a->status != status || number_at(a->json, "error_code") != status ||
        !strstr(string_at(a->json, "error_msg"), text))
        test_fail(__FILE__, __LINE__, "not %d with %s: %d %s", status, text, a->status,
                  a->body.data);
    CHECK_EQ_INT(cJSON_GetArraySize(a->json), 5);
    CHECK_EQ_STR(string_at(a->json, "version"), BATON_VERSION);
    CHECK(number_at(a->json, "timestamp") > 1.7e9);
}

TEST(what_is_out_of_range_is_refused_with_member_and_value)
{
    static const struct refusal rows[] = {
        { "\"topp\":1.5", "topp is 1.5, but must be from 0 to 1", 0 },
        { "\"topp\":-1", "topp is -1", 0 },
        { "\"top_p\":2", "top_p is 2, but must be from 0 to 1", 0 },
        { "\"topp\":1,\"top_p\":1", "topp and top_p are the same", 0 },
        { "\"temperature\":-1", "temperature is -1, but must be from 0 to 100", 0 },
        { "\"temperature\":\"hot\"", "temperature is \"hot\", but must be a number", 0 },
        { "\"penalty_score\":0", "penalty_score is 0, but must be from 0.01 to 100", 0 },
        { "\"frequency_score\":101", "frequency_score is 101, but must be from -100 to 100", 0 },
        { "\"presence_score\":-101", "presence_score is -101", 0 },
        { "\"max_dec_len\":0", "max_dec_len is 0, but must be from 1 to", 0 },
        { "\"seq_len\":-1", "seq_len is -1", 0 },
        { "\"max_tokens\":1.5", "max_tokens is 1.5, but must be a whole number", 0 },
        { "\"min_dec_len\":0", "min_dec_len is 0, but must be from 1 to", 0 },
        { "\"min_dec_len\":9,\"max_dec_len\":8",
          "min_dec_len is 9, but must be from 1 to max_dec_len, which is 8", 0 },
        { "\"max_dec_len\":1000", "max_dec_len is 1000, but after the", 0 },
        { "\"min_dec_len\":1000", "min_dec_len is 1000, but after the", 0 },
        { "\"infer_seed\":0.5", "infer_seed is 0.5, but must be a whole number", 0 },
        { "\"seed\":1,\"infer_seed\":1", "infer_seed and seed are the same", 0 },
        { "\"eos_token_ids\":[1,2]", "eos_token_ids has 2 ids, but at most 1 is possible", 0 },
        { "\"eos_token_ids\":[-1]", "eos_token_ids has -1, but must be a token id from 0 to", 0 },
        { "\"eos_token_ids\":\"2\"", "eos_token_ids has \"2\", but must be a token id", 0 },
        { "\"stop_sequences\":[\"\"]", "stop_sequences must not contain an empty string", 0 },
        { "\"stop_sequences\":5", "stop_sequences is 5, but must be a string or an array", 0 },
        { "\"stream\":\"yes\"", "stream is \"yes\", but must be true or false", 0 },
        { "\"return_all_tokens\":1", "return_all_tokens is 1, but must be true or false", 0 },
        { "\"return_usage\":\"\"", "return_usage is \"\", but must be true or false", 0 },
        { "\"benchmark\":3", "benchmark is 3, but must be true or false", 0 },
        { "\"timeout\":0", "timeout is 0, but must be from 1 to 86400", 0 },
        { "\"timeout\":\"5\"", "timeout is \"5\", but must be a whole number", 0 },
        { "\"enable_text_truncate\":2", "enable_text_truncate is 2, but must be from 0 to 1", 0 },
        { "\"response_type\":\"xml\"", "response_type is 'xml', but must be fastdeploy or", 0 },
        { "\"req_id\":7", "req_id is 7, but must be a string", 0 },
        { "\"req_id\":\"\"", "req_id has 0 bytes, but must have 1 to 256", 0 },
        { "\"model\":\"other\"", "`other` does not exist", 404 },
        { "\"messages\":[]", "the request has text and messages", 0 },
        { "\"system\":5", "system is 5, but must be a string", 0 },
        { "\"n\":2", "n is of OpenAI's API", 0 },
        { "\"stop\":\"x\"", "has stop_sequences for it", 0 },
        { "\"frequency_penalty\":1", "has frequency_score for it", 0 },
        { "\"repetition_penalty\":2", "has penalty_score for it", 0 },
        { "\"guided_json\":{\"a\":1}", "guided_json", 0 },
        { "\"tools\":[{\"type\":\"function\"}]", "tools is of OpenAI's API", 0 },
        { "\"priority\":0.5", "priority is 0.5, but must be a whole number", 0 },
    };
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        char body[512];
        snprintf(body, sizeof body, "{\"text\":\"Hi\",%s}", rows[i].members);
        struct answer a = rig_submit(&r, CHAT, body);
        check_error(&a, rows[i].status ? rows[i].status : 400, rows[i].text);
        answer_free(&a);
    }
    CHECK_EQ_INT(r.fake.n_submitted, 0);
    rig_close(&r);
}

TEST(prompts_that_cannot_be_are_refused)
{
    static const struct refusal rows[] = {
        { "\"req_id\":\"a\"", "neither text nor messages nor input_ids", 0 },
        { "\"text\":\"\"", "text must not be empty", 0 },
        { "\"text\":5", "text is 5, but must be a string", 0 },
        { "\"input_ids\":[]", "input_ids must not be empty", 0 },
        { "\"input_ids\":[1,-2]", "input_ids[1] is -2", 0 },
        { "\"input_ids\":[1],\"text\":\"x\"", "the request has text and input_ids", 0 },
        { "\"input_ids\":[1],\"system\":\"x\"", "system can only be used with messages", 0 },
        { "\"req_id\":\"a\",\"messages\":[]",
          "messages is empty, but must be an array of at least one", 0 },
        { "\"req_id\":\"a\",\"messages\":{}", "messages is an object, but must be an array", 0 },
        { "\"req_id\":\"a\",\"messages\":[{\"role\":\"user\"}]", "messages[0] has no content", 0 },
        { "\"req_id\":\"a\",\"messages\":[{\"role\":\"x\",\"content\":\"y\"}]",
          "messages[0] has the role 'x'", 0 },
        { "\"system\":\"s\",\"topp\":1,\"messages\":[{\"role\":\"system\",\"content\":\"y\"}]",
          "give only one of them", 0 },
    };
    struct rig r;
    struct buf body = { 0 };
    rig_open(&r);
    rig_start(&r);
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        buf_clear(&body);
        buf_printf(&body, "{%s}", rows[i].members);
        struct answer a = rig_submit(&r, CHAT, body.data);
        check_error(&a, 400, rows[i].text);
        answer_free(&a);
    }
    /* Longer than the context of 256: as many as it has, more than are read. */
    for (int n = 256; n < 4000; n *= 10) {
        char text[80];
        buf_clear(&body);
        buf_add_c(&body, "{\"input_ids\":[5");
        for (int i = 1; i < n; i++) buf_add_c(&body, ",5");
        buf_add_c(&body, "]}");
        struct answer a = rig_submit(&r, CHAT, body.data);
        snprintf(text, sizeof text, "input_ids has %s tokens, but this server takes at most 256",
                 n == 256 ? "256" : "more than 1024");
        check_error(&a, 400, text);
        CHECK(strstr(string_at(a.json, "error_msg"), "MAX_SEQ_LEN"));
        answer_free(&a);
    }
    buf_release(&body);
    CHECK_EQ_INT(r.fake.n_submitted, 0);
    rig_close(&r);
}

TEST(members_reach_the_backend_under_all_their_names)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    const struct gen_request *g = &r.fake.last;
    const struct sampling_params *s = &g->sampling;
    struct answer a = rig_submit(&r, COMPLETIONS, "{\"text\":\"Hi\"}");
    CHECK_EQ_INT(a.status, 200);
    CHECK(s->top_p == 0.7f && s->temperature == 0.95f && s->repetition_penalty == 1);
    CHECK(s->frequency_penalty == 0 && s->presence_penalty == 0 && s->min_p == 0 && s->top_k == 0);
    CHECK_EQ_INT(s->min_tokens, 1);
    CHECK_EQ_INT(s->max_tokens, 256 - g->n_tokens);
    answer_free(&a);
    a = rig_submit(&r, CHAT,
                   "{\"text\":\"Hi\",\"top_p\":0.5,\"temperature\":0,\"penalty_score\":1.5,"
                   "\"frequency_score\":3,\"presence_score\":-4,\"seq_len\":9,\"max_tokens\":11,"
                   "\"min_dec_len\":2,\"eos_token_ids\":7,\"seed\":-5,\"top_k\":40,\"min_p\":0.1,"
                   "\"priority\":-3,\"ignore_eos\":true,\"cache_salt\":\"s\"}");
    CHECK_EQ_INT(a.status, 200);
    CHECK(s->top_p == 0.5f && s->temperature == 0 && s->repetition_penalty == 1.5f);
    CHECK(s->frequency_penalty == 3 && s->presence_penalty == -4 && s->min_p == 0.1f);
    CHECK_EQ_INT(s->max_tokens, 9);
    CHECK_EQ_INT(s->min_tokens, 2);
    CHECK_EQ_INT(s->n_stop_ids, 1);
    CHECK_EQ_INT(s->stop_ids[0], 7);
    CHECK_EQ_INT(s->seed, (uint64_t)-5);
    CHECK_EQ_INT(s->top_k, 40);
    CHECK_EQ_INT(g->admission.priority, -3);
    CHECK(s->ignore_eos && g->cache_salt != 0);
    CHECK_EQ_INT(number_at(a.json, "infer_seed"), -5);
    answer_free(&a);
    a = rig_submit(&r, CHAT,
                   "{\"text\":\"Hi\",\"max_dec_len\":8,\"seq_len\":9,\"eos_token_ids\":[null]}");
    CHECK_EQ_INT(s->max_tokens, 8);
    CHECK_EQ_INT(s->n_stop_ids, 0);
    answer_free(&a);
    rig_close(&r);
}

TEST(an_answer_has_at_most_max_dec_len_tokens_in_either_form)
{
    struct rig r;
    rig_open(&r);
    r.o.max_dec_len = 20;
    rig_start(&r);
    const struct sampling_params *s = &r.fake.last.sampling;
    static const struct {
        const char *path, *body, *member;
    } refused[] = {
        { CHAT, "{\"text\":\"Hi\",\"max_dec_len\":21}", "max_dec_len is 21" },
        { CHAT, "{\"text\":\"Hi\",\"max_tokens\":21}", "max_tokens is 21" },
        { CHAT, "{\"text\":\"Hi\",\"min_dec_len\":21}", "min_dec_len is 21" },
        { COMPLETIONS, "{\"prompt\":\"Hi\",\"max_tokens\":21}", "max_tokens is 21" },
        { CHAT,
          "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"max_completion_tokens\":99}",
          "max_completion_tokens is 99" },
        { COMPLETIONS, "{\"prompt\":\"Hi\",\"max_tokens\":20,\"min_tokens\":21}",
          "min_tokens is 21" },
    };
    for (size_t i = 0; i < COUNT_OF(refused); i++) {
        struct answer a = rig_submit(&r, refused[i].path, refused[i].body);
        CHECK_EQ_INT(a.status, 400);
        CHECK(strstr(a.body.data, refused[i].member) && strstr(a.body.data, "at most 20 tokens"));
        answer_free(&a);
    }
    static const char *const taken[] = {
        "{\"text\":\"Hi\"}",
        "{\"text\":\"Hi\",\"max_dec_len\":20}",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}",
    };
    for (size_t i = 0; i < COUNT_OF(taken); i++) {
        struct answer a = rig_submit(&r, CHAT, taken[i]);
        CHECK_EQ_INT(a.status, 200);
        CHECK_EQ_INT(s->max_tokens, 20);
        answer_free(&a);
    }
    rig_close(&r);
}

TEST(errors_that_come_before_the_body_is_read_are_in_its_form)
{
    static const char body[] = "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],"
                               "\"req_id\":\"mine\",\"max_dec_len\":4}";
    struct tenants tenants;
    struct err err = { 0 };
    struct rig r;
    rig_open(&r);
    tenants_init(&tenants);
    CHECK_OK(tenants_add_key(&tenants, "k", &err));
    r.o.tenants = &tenants;
    rig_start(&r);
    static const struct {
        const char *headers, *body, *text;
        int status;
    } cases[] = {
        { "", body, "a valid API key is needed", 401 },
        { "Authorization: Bearer k\r\nContent-Encoding: gzip\r\n", body, "compressed", 415 },
        { "Authorization: Bearer k\r\nx-baton-ttft-ms: soon\r\n", body, "x-baton-ttft-ms", 400 },
        { "Authorization: Bearer k\r\nx-baton-resume: 1\r\n", body, "x-baton-resume", 400 },
        { "Authorization: Bearer k\r\n", "{\"req_id\":\"mine\",\"text\":\"x\"", "byte", 400 },
        { "Authorization: Bearer k\r\nx-request-id: mine\r\n", "{\"text\":\"x\",}", "byte", 400 },
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        struct answer a = rig_request(&r, "POST", CHAT, cases[i].headers, cases[i].body);
        check_error(&a, cases[i].status, cases[i].text);
        CHECK_EQ_STR(string_at(a.json, "req_id"), "mine");
        answer_free(&a);
    }
    struct answer a = rig_request(&r, "POST", CHAT,
                                  "x-baton-ttft-ms: soon\r\n"
                                  "Authorization: Bearer k\r\n",
                                  "{}");
    CHECK_EQ_INT(a.status, 400);
    CHECK_EQ_STR(string_at(a.json, "error.param"), "x-baton-ttft-ms");
    answer_free(&a);
    serve_shut_down(r.serve);
    a = rig_request(&r, "POST", CHAT, "Authorization: Bearer k\r\n", body);
    check_error(&a, 503, "shutting down");
    answer_free(&a);
    rig_close(&r);
    tenants_release(&tenants);
}

TEST(a_full_server_says_when_to_come_again)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    r.fake.refuse = ERR_FULL;
    r.fake.retry_after_s = 3;
    struct answer a = rig_request(&r, "POST", CHAT, "", "{\"text\":\"x\",\"stream\":true}");
    check_error(&a, 429, "the fake refuses on purpose");
    CHECK(answer_has_header(&a, "Retry-After: 3\r\n"));
    answer_free(&a);
    rig_close(&r);
}

TEST_MAIN(CASE(bodies_are_told_by_their_members),
          CASE(what_is_no_json_is_looked_at_as_far_as_it_goes),
          CASE(what_is_out_of_range_is_refused_with_member_and_value),
          CASE(prompts_that_cannot_be_are_refused),
          CASE(members_reach_the_backend_under_all_their_names),
          CASE(an_answer_has_at_most_max_dec_len_tokens_in_either_form),
          CASE(errors_that_come_before_the_body_is_read_are_in_its_form),
          CASE(a_full_server_says_when_to_come_again))
