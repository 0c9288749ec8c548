/* test_native_answers.c - FastDeploy's native form: items, whole answers, and what becomes of a
 * request on its way. */
#include "tests/unit/serve/serve_rig.h"

static const char CHAT[] = "/v1/chat/completions", COMPLETIONS[] = "/v1/completions";

static int n_lines(const struct answer *a)
{
    int n = 0;
    for (size_t k = 0; k < a->body.len; k++) n += a->body.data[k] == '\n';
    return n;
}

static int n_ids(const cJSON *item, const char *name)
{
    return cJSON_GetArraySize(json_at(item, name));
}

/* Checks that the items are those of one answer, in order, and returns the last one. */
static cJSON *check_items(const struct answer *a, const char *text, int n_tokens, bool http)
{
    struct buf all = { 0 };
    int last_idx = -1, n_all = 0, n = n_lines(a);
    cJSON *item = NULL;
    for (int i = 0; i < n; i++) {
        cJSON_Delete(item);
        item = event_at(a, i);
        CHECK_EQ_INT(number_at(item, "is_end"), i == n - 1);
        CHECK(number_at(item, "send_idx") > last_idx);
        last_idx = (int)number_at(item, "send_idx");
        n_all += n_ids(item, "token_ids");
        buf_add_c(&all, string_at(item, "token"));
        CHECK(number_at(item, "inference_time_cost") >= 0);
        CHECK((json_at(item, "tokens_all") != NULL) == (i == n - 1));
        CHECK((json_at(item, "error_msg") != NULL) == http);
        CHECK((json_at(item, "error_code") != NULL) == http);
    }
    CHECK_EQ_STR(all.data, text);
    CHECK_EQ_STR(string_at(item, "tokens_all"), text);
    CHECK_EQ_INT(number_at(item, "tokens_all_num"), n_tokens);
    CHECK_EQ_INT(last_idx, n_tokens - 1);
    CHECK_EQ_INT(n_ids(item, "tokens_all_ids"), n_all);
    buf_release(&all);
    return item;
}

TEST(a_stream_is_a_line_for_each_token_and_the_whole_at_its_end)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    struct answer a = rig_request(&r, "POST", CHAT, "",
                                  "{\"text\":\"Hello, how are you?\",\"req_id\":\"a b\","
                                  "\"max_dec_len\":64,\"stream\":true,\"return_usage\":true}");
    CHECK_EQ_INT(a.status, 200);
    CHECK(answer_has_header(&a, "Content-Type: text/event-stream"));
    CHECK(answer_has_header(&a, "x-baton-stream: lines\r\n"));
    CHECK(answer_has_header(&a, "x-request-id: req-")); /* no blank can be in a header */
    CHECK(!strstr(a.body.data, "data:") && !strstr(a.body.data, "[DONE]"));
    const int n = (int)r.fake.n_answer + 1; /* with the end token */
    CHECK_EQ_INT(n_lines(&a), n);
    cJSON *item = check_items(&a, "Hello there, world", n, true);
    CHECK_EQ_STR(string_at(item, "req_id"), "a b");
    CHECK_EQ_INT(number_at(item, "usage.completion_tokens"), n);
    CHECK_EQ_INT(number_at(item, "usage.prompt_tokens"), r.fake.last.n_tokens);
    CHECK_EQ_INT(n_ids(item, "token_ids"), 0);
    CHECK_EQ_INT(n_ids(item, "tokens_all_ids"), n - 1);
    CHECK_EQ_STR(string_at(item, "error_msg"), "");
    CHECK_EQ_INT(number_at(item, "error_code"), 0);
    cJSON_Delete(item);
    answer_free(&a);
    rig_close(&r);
}

/* The token that reaches the limit is in the last item, so that each has one of its own. */
TEST(an_answer_that_is_cut_ends_with_its_last_token)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    struct answer a = rig_request(&r, "POST", CHAT, "",
                                  "{\"text\":\"x\",\"max_dec_len\":2,\"stream\":true}");
    CHECK_EQ_INT(n_lines(&a), 2);
    cJSON *first = event_at(&a, 0), *last = event_at(&a, 1);
    CHECK_EQ_INT(n_ids(first, "token_ids"), 1);
    CHECK_EQ_INT(n_ids(last, "token_ids"), 1);
    CHECK_EQ_INT(number_at(last, "send_idx"), 1);
    CHECK_EQ_INT(number_at(last, "tokens_all_num"), 2);
    CHECK(!json_at(last, "usage"));
    cJSON_Delete(first);
    cJSON_Delete(last);
    answer_free(&a);
    rig_close(&r);
}

TEST(a_whole_answer_has_the_result_under_both_names)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    struct answer a = rig_request(&r, "POST", COMPLETIONS, "",
                                  "{\"text\":\"x\",\"req_id\":\"q\",\"return_usage\":true,"
                                  "\"benchmark\":true,\"return_trace\":true}");
    CHECK_EQ_INT(a.status, 200);
    CHECK(answer_has_header(&a, "x-request-id: q\r\n"));
    CHECK_EQ_STR(string_at(a.json, "result"), "Hello there, world");
    CHECK_EQ_STR(string_at(a.json, "tokens_all"), "Hello there, world");
    CHECK_EQ_STR(string_at(a.json, "token"), "Hello there, world");
    CHECK_EQ_INT(number_at(a.json, "is_end"), 1);
    CHECK_EQ_INT(number_at(a.json, "usage.completion_tokens"), r.fake.n_answer + 1);
    CHECK_EQ_INT(n_ids(a.json, "tokens_all_ids"), (int)r.fake.n_answer);
    CHECK_EQ_STR(string_at(a.json, "baton.decode_node"), "d0");
    static const char *const times[] = { "http_received_time",   "preprocess_start_time",
                                         "preprocess_end_time",  "schedule_start_time",
                                         "inference_start_time", "inference_current_step_time" };
    for (size_t i = 0; i < COUNT_OF(times); i++) {
        const char *t = string_at(a.json, times[i]);
        CHECK(strlen(t) == 26 && t[4] == '-' && t[10] == ' ' && t[19] == '.');
        if (i) CHECK(strcmp(string_at(a.json, times[i - 1]), t) <= 0);
    }
    answer_free(&a);
    rig_close(&r);
}

TEST(return_all_tokens_leaves_one_item)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    struct answer a = rig_request(&r, "POST", CHAT, "",
                                  "{\"text\":\"x\",\"return_all_tokens\":true,\"stream\":true}");
    CHECK_EQ_INT(n_lines(&a), 1);
    cJSON *item = check_items(&a, "Hello there, world", (int)r.fake.n_answer + 1, true);
    CHECK(cJSON_IsTrue(json_at(item, "return_all_tokens")));
    CHECK_EQ_INT(n_ids(item, "token_ids"), (int)r.fake.n_answer);
    cJSON_Delete(item);
    answer_free(&a);
    rig_close(&r);
}

/* A caller that does not come over HTTP takes items without the members that its clients would take
 * for an error. */
TEST(the_native_path_gives_items_alone)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    struct answer a = rig_submit(&r, SERVE_NATIVE_PATH,
                                 "{\"text\":\"x\",\"benchmark\":true,\"stream\":false}");
    CHECK(a.ended);
    cJSON *item = check_items(&a, "Hello there, world", (int)r.fake.n_answer + 1, false);
    CHECK_EQ_STR(string_at(item, "req_id"), "t-1"); /* the caller's name */
    CHECK(json_at(item, "schedule_start_time") && !json_at(item, "http_received_time"));
    cJSON_Delete(item);
    answer_free(&a);
    a = rig_submit(&r, SERVE_NATIVE_PATH, "{\"req_id\":\"z\"}"); /* native whatever it has */
    CHECK_EQ_INT(a.status, 400);
    CHECK_EQ_INT(number_at(a.json, "error_code"), 400);
    CHECK_EQ_STR(string_at(a.json, "req_id"), "z");
    answer_free(&a);
    a = rig_request(&r, "POST", SERVE_NATIVE_PATH, "", "{\"text\":\"x\"}");
    CHECK_EQ_INT(a.status, 404);
    answer_free(&a);
    struct answer b = { 0 };
    const struct serve_call call = {
        .path = SERVE_NATIVE_PATH,
        .body = STR("{\"text\":\"x\"}"),
        .tenant = 0,
        .deadline_ms = 60000,
        .reply = answer_sink(&b),
    };
    CHECK(serve_submit(r.serve, &call) != 0);
    for (int i = 0; i < 20000 && !b.done; i++) rig_turn(&r);
    CHECK_EQ_INT(r.fake.last.admission.deadline_ms, 60000);
    CHECK(r.fake.last.deadline_ms > 0);
    answer_free(&b);
    rig_close(&r);
}

TEST(a_text_is_a_message_of_chat_and_the_prompt_of_completions)
{
    struct rig r;
    struct err err = { 0 };
    rig_open(&r);
    rig_start(&r);
    static const struct {
        const char *path, *body, *prompt;
    } cases[] = {
        { COMPLETIONS, "{\"text\":\"Hi you\"}", "Hi you" },
        { CHAT, "{\"text\":\"Hi you\"}",
          "<|im_start|>user\nHi you<|im_end|>\n<|im_start|>assistant\n" },
        { CHAT, "{\"text\":\"Hi\",\"system\":\"Be short\"}",
          "<|im_start|>system\nBe short<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
          "<|im_start|>assistant\n" },
        { COMPLETIONS, "{\"topp\":1,\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]}",
          "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n" },
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        int32_t *ids = NULL;
        size_t n = 0;
        CHECK_OK(
            tokenizer_encode(r.tok, str_of(cases[i].prompt), i == 0, SIZE_MAX, &ids, &n, &err));
        struct answer a = rig_submit(&r, cases[i].path, cases[i].body);
        CHECK_EQ_INT(a.status, 200);
        if (r.fake.last.n_tokens != n)
            test_fail(__FILE__, __LINE__, "%s: %u tokens, not %zu", cases[i].body,
                      r.fake.last.n_tokens, n);
        answer_free(&a);
        mem_free(ids);
    }
    rig_close(&r);
}

/* Truncation keeps the beginning, and leaves room for the answer. */
TEST(a_long_text_is_cut_only_when_that_is_asked_for)
{
    struct rig r;
    struct buf body = { 0 };
    rig_open(&r);
    rig_start(&r);
    for (int cut = 0; cut < 3; cut++) {
        buf_clear(&body);
        buf_add_c(&body, "{\"input_ids\":[7");
        for (int i = 1; i < 300; i++) buf_printf(&body, ",%d", i < 200 ? 7 : 8);
        buf_printf(&body, "],\"enable_text_truncate\":%s%s}", cut ? "1" : "0",
                   cut == 2 ? "" : ",\"max_dec_len\":56");
        struct answer a = rig_submit(&r, CHAT, body.data);
        CHECK_EQ_INT(a.status, cut ? 200 : 400);
        if (cut) CHECK_EQ_INT(r.fake.last.n_tokens, cut == 1 ? 200 : 128);
        answer_free(&a);
    }
    buf_release(&body);
    rig_close(&r);
}

/* Templates that let only user and assistant alternate get the document's "system" in the middle as
 * the assistant's turn that it is; nothing else is bent. */
TEST(a_system_in_the_middle_is_a_turn_where_the_template_needs_that)
{
    static const char strict[] =
        "{% for m in messages %}{% if m['role'] != ['user', 'assistant'][loop.index0 % 2] %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['role'] }}:{{ m['content'] "
        "}};"
        "{% endfor %}";
    struct rig r;
    struct err err = { 0 };
    rig_open(&r);
    chat_free(r.chat);
    CHECK_OK(chat_create(&(struct chat_source){ .template = STR(strict) }, &r.chat, &err));
    r.o.chat = r.chat;
    rig_start(&r);
    static const struct {
        const char *role;
        int status;
    } cases[] = { { "system", 200 }, { "assistant", 200 }, { "user", 400 } };
    uint32_t n_tokens = 0;
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char body[256];
        snprintf(body, sizeof body,
                 "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"},"
                 "{\"role\":\"%s\",\"content\":\"b\"},"
                 "{\"role\":\"user\",\"content\":\"c\"}],\"topp\":1}",
                 cases[i].role);
        struct answer a = rig_submit(&r, CHAT, body);
        CHECK_EQ_INT(a.status, cases[i].status);
        if (a.status == 400) CHECK(strstr(string_at(a.json, "error_msg"), "roles must alternate"));
        if (i == 1) CHECK_EQ_INT(r.fake.last.n_tokens, n_tokens);
        n_tokens = r.fake.last.n_tokens;
        answer_free(&a);
    }
    rig_close(&r);
}

TEST(stop_strings_and_end_tokens_end_it)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    struct answer a = rig_request(&r, "POST", CHAT, "",
                                  "{\"text\":\"x\",\"stop_sequences\":[\", w\"],\"stream\":true}");
    cJSON *item = event_at(&a, -1);
    CHECK_EQ_STR(string_at(item, "tokens_all"), "Hello there");
    CHECK_EQ_INT(number_at(item, "is_end"), 1);
    cJSON_Delete(item);
    answer_free(&a);
    char body[128];
    snprintf(body, sizeof body, "{\"text\":\"x\",\"eos_token_ids\":[%d],\"stream\":true}",
             r.fake.answer[1]);
    a = rig_request(&r, "POST", CHAT, "", body);
    CHECK_EQ_INT(n_lines(&a), 2);
    item = event_at(&a, -1);
    CHECK_EQ_INT(n_ids(item, "tokens_all_ids"), 1);
    CHECK_EQ_INT(number_at(item, "tokens_all_num"), 2);
    CHECK_EQ_INT(n_ids(item, "token_ids"), 0);
    cJSON_Delete(item);
    answer_free(&a);
    rig_close(&r);
}

/* Also in the first token, which min_dec_len 1 asks for; with more it is not over that soon. */
TEST(a_stop_string_may_end_the_first_token)
{
    static const char *const bodies[][2] = {
        { "{\"text\":\"x\",\"stop_sequences\":[\"He\"]}", "" },
        { "{\"text\":\"x\",\"stop_sequences\":[\"He\"],\"min_dec_len\":2}", "Hello there, world" },
    };
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    for (size_t i = 0; i < COUNT_OF(bodies); i++) {
        struct answer a = rig_request(&r, "POST", CHAT, "", bodies[i][0]);
        CHECK_EQ_STR(string_at(a.json, "tokens_all"), bodies[i][1]);
        answer_free(&a);
    }
    rig_close(&r);
}

/* The seed is a function of the name, and can be given back. */
TEST(the_seed_is_shown_and_can_be_given_back)
{
    struct rig r;
    char body[128];
    rig_open(&r);
    rig_start(&r);
    struct answer a = rig_submit(&r, CHAT, "{\"text\":\"x\",\"req_id\":\"other\"}");
    const double seed = number_at(a.json, "infer_seed");
    CHECK(seed >= 0 && seed < 9007199254740992.0);
    CHECK(r.fake.seeds[0] == (uint64_t)seed);
    answer_free(&a);
    snprintf(body, sizeof body, "{\"text\":\"x\",\"infer_seed\":%.0f}", seed);
    a = rig_submit(&r, CHAT, body);
    CHECK(r.fake.seeds[1] == r.fake.seeds[0]);
    answer_free(&a);
    a = rig_request(&r, "POST", CHAT, "", "{\"text\":\"x\",\"req_id\":\"b\"}");
    answer_free(&a);
    a = rig_request(&r, "POST", CHAT, "", "{\"text\":\"x\",\"req_id\":\"b\"}");
    answer_free(&a);
    a = rig_request(&r, "POST", CHAT, "", "{\"text\":\"x\"}");
    answer_free(&a);
    CHECK(r.fake.seeds[2] == r.fake.seeds[3] && r.fake.seeds[4] != r.fake.seeds[3]);
    rig_close(&r);
}

TEST(no_two_requests_have_one_req_id_at_once)
{
    static const char body[] = "{\"text\":\"x\",\"req_id\":\"one\",\"stream\":true}";
    struct rig r;
    struct answer a = { 0 };
    rig_open(&r);
    rig_start(&r);
    r.fake.hold = true;
    uint64_t id = rig_begin(&r, CHAT, STR(body), NULL, &a);
    for (int i = 0; i < 2000 && !r.fake.n_live; i++) rig_turn(&r);
    struct answer b = rig_submit(&r, CHAT, body);
    CHECK_EQ_INT(b.status, 409);
    CHECK(strstr(string_at(b.json, "error_msg"), "req_id is 'one', which another request"));
    CHECK_EQ_INT(number_at(b.json, "error_code"), 409);
    answer_free(&b);
    serve_cancel(r.serve, id); /* its client left */
    r.fake.hold = false;
    for (int i = 0; i < 2; i++) { /* one after the other they may */
        b = rig_request(&r, "POST", CHAT, "", body);
        CHECK_EQ_INT(b.status, 200);
        answer_free(&b);
    }
    CHECK(!a.done);
    answer_free(&a);
    rig_close(&r);
}

TEST(a_request_that_hears_nothing_ends_when_it_says)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    r.fake.hold = true;
    struct answer a = rig_request(&r, "POST", CHAT, "", "{\"text\":\"x\",\"timeout\":1}");
    CHECK_EQ_INT(a.status, 504);
    CHECK_EQ_INT(number_at(a.json, "error_code"), 504);
    CHECK(strstr(string_at(a.json, "error_msg"), "timeout is 1, and no token came"));
    answer_free(&a);
    for (int i = 0; i < 1000 && r.fake.n_live; i++) rig_turn(&r);
    CHECK_EQ_INT(r.fake.n_canceled, 1);
    rig_close(&r);
}

TEST(what_fails_in_the_middle_ends_with_an_error_line)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    r.fake.fail = ERR_PEER_LOST;
    r.fake.fail_after = 2;
    struct answer a = rig_request(&r, "POST", CHAT, "",
                                  "{\"text\":\"x\",\"req_id\":\"n\",\"stream\":true}");
    CHECK_EQ_INT(a.status, 200);
    CHECK_EQ_INT(n_lines(&a), 3);
    cJSON *item = event_at(&a, -1);
    CHECK_EQ_STR(string_at(item, "error_msg"), "the fake failed on purpose");
    CHECK_EQ_INT(number_at(item, "error_code"), 502);
    CHECK_EQ_STR(string_at(item, "req_id"), "n");
    CHECK(!json_at(item, "token"));
    cJSON_Delete(item);
    answer_free(&a);
    rig_close(&r);
}

TEST(a_receiver_that_takes_no_more_stops_the_work)
{
    struct rig r;
    struct answer a = { .max_chunks = 2 };
    rig_open(&r);
    rig_start(&r);
    CHECK(rig_begin(&r, SERVE_NATIVE_PATH, STR("{\"text\":\"x\"}"), NULL, &a) != 0);
    for (int i = 0; i < 20000 && r.serve->requests.len; i++) rig_turn(&r);
    CHECK_EQ_INT(r.serve->requests.len, 0);
    CHECK(!a.done);
    CHECK_EQ_INT(r.fake.n_canceled, 1);
    answer_free(&a);
    rig_close(&r);
}

TEST_MAIN(CASE(a_stream_is_a_line_for_each_token_and_the_whole_at_its_end),
          CASE(an_answer_that_is_cut_ends_with_its_last_token),
          CASE(a_whole_answer_has_the_result_under_both_names),
          CASE(return_all_tokens_leaves_one_item), CASE(the_native_path_gives_items_alone),
          CASE(a_text_is_a_message_of_chat_and_the_prompt_of_completions),
          CASE(a_long_text_is_cut_only_when_that_is_asked_for),
          CASE(a_system_in_the_middle_is_a_turn_where_the_template_needs_that),
          CASE(stop_strings_and_end_tokens_end_it), CASE(a_stop_string_may_end_the_first_token),
          CASE(the_seed_is_shown_and_can_be_given_back),
          CASE(no_two_requests_have_one_req_id_at_once),
          CASE(a_request_that_hears_nothing_ends_when_it_says),
          CASE(what_fails_in_the_middle_ends_with_an_error_line),
          CASE(a_receiver_that_takes_no_more_stops_the_work))
