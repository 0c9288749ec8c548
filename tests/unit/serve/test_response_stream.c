/* test_response_stream.c - streamed answers: order and format of the events, whole characters,
 * errors, receivers that leave. */
#include "tests/unit/serve/serve_rig.h"

static const char CHAT[] = "/v1/chat/completions", COMPLETIONS[] = "/v1/completions";
#define MESSAGES "\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]"

static bool ends_with_done(const struct answer *a)
{
    return str_ends(buf_str(&a->body), "\n[DONE]\n") &&
           !strstr(strstr(a->body.data, "[DONE]") + 1, "[DONE]");
}

/* Joins string member `path` of all events. */
static void join(const struct answer *a, const char *path, struct buf *out)
{
    for (int i = 0;; i++) {
        cJSON *e = event_at(a, i);
        if (!e) return;
        const cJSON *v = json_at(e, path);
        if (cJSON_IsString(v)) buf_add_c(out, v->valuestring);
        cJSON_Delete(e);
    }
}

TEST(chat_stream)
{
    struct rig r;
    struct buf text = { 0 };
    rig_open(&r);
    rig_start(&r);
    struct answer a = rig_submit(&r, CHAT,
                                 "{" MESSAGES ",\"stream\":true,\"return_token_ids\":true}");
    CHECK(a.begun && a.ended && ends_with_done(&a));
    /* One chunk per token, also of the end token, then the finish and [DONE]. */
    CHECK_EQ_INT(a.n_chunks, r.fake.n_answer + 1 + 1 + 1);
    cJSON *first = event_at(&a, 0), *second = event_at(&a, 1), *last = event_at(&a, -2);
    CHECK_EQ_STR(string_at(first, "object"), "chat.completion.chunk");
    CHECK_EQ_STR(string_at(first, "choices.0.delta.role"), "assistant");
    CHECK(string_at(first, "choices.0.delta.content")[0] != 0);
    CHECK(cJSON_IsNull(json_at(first, "choices.0.finish_reason")));
    CHECK(cJSON_IsArray(json_at(first, "prompt_token_ids")) &&
          cJSON_IsArray(json_at(first, "choices.0.prompt_token_ids")));
    CHECK_EQ_INT(cJSON_GetArraySize(json_at(first, "choices.0.token_ids")), 1);
    CHECK(!json_at(second, "choices.0.delta.role") && !json_at(second, "prompt_token_ids"));
    CHECK_EQ_STR(string_at(last, "choices.0.finish_reason"), "stop");
    CHECK(!json_at(first, "usage") && !json_at(last, "usage"));
    CHECK_EQ_STR(string_at(first, "id"), string_at(last, "id"));
    join(&a, "choices.0.delta.content", &text);
    CHECK_EQ_STR(text.data, "Hello there, world");
    cJSON_Delete(first);
    cJSON_Delete(second);
    cJSON_Delete(last);
    buf_release(&text);
    answer_free(&a);
    rig_close(&r);
}

TEST(usage_and_trace_in_the_last_event)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    struct answer a = rig_submit(
        &r, CHAT,
        "{" MESSAGES
        ",\"stream\":true,\"stream_options\":{\"include_usage\":true},\"return_trace\":true}");
    cJSON *e = event_at(&a, -2), *finish = event_at(&a, -3);
    CHECK_EQ_INT(cJSON_GetArraySize(json_at(e, "choices")), 0);
    CHECK_EQ_INT(number_at(e, "usage.completion_tokens"), r.fake.n_answer + 1);
    CHECK_EQ_STR(string_at(e, "baton.decode_node"), "d0");
    CHECK(!json_at(finish, "baton") && !json_at(finish, "usage"));
    cJSON_Delete(e);
    cJSON_Delete(finish);
    answer_free(&a);
    a = rig_submit(&r, CHAT,
                   "{" MESSAGES ",\"stream\":true,\"stream_options\":{\"include_usage\":true,"
                   "\"continuous_usage_stats\":true}}");
    e = event_at(&a, 0);
    CHECK_EQ_INT(number_at(e, "usage.completion_tokens"), 1);
    cJSON_Delete(e);
    answer_free(&a);
    a = rig_submit(&r, CHAT, "{" MESSAGES ",\"stream\":true,\"return_trace\":true,\"n\":2}");
    e = event_at(&a, -2);
    CHECK_EQ_INT(cJSON_GetArraySize(json_at(e, "baton.choices")), 2);
    CHECK_EQ_STR(string_at(e, "choices.0.finish_reason"), "stop");
    cJSON_Delete(e);
    answer_free(&a);
    rig_close(&r);
}

TEST(characters_are_never_split)
{
    struct rig r;
    struct buf text = { 0 };
    rig_open(&r);
    rig_start(&r);
    rig_set_answer(&r, "a\xE2\x82\xAC\xF0\x9F\x98\x80z");
    CHECK(r.fake.n_answer >= 8); /* byte tokens */
    struct answer a = rig_submit(&r, COMPLETIONS,
                                 "{\"prompt\":\"x\",\"stream\":true,\"max_tokens\":50}");
    join(&a, "choices.0.text", &text);
    CHECK_EQ_STR(text.data, "a\xE2\x82\xAC\xF0\x9F\x98\x80z");
    CHECK(!strstr(a.body.data, "\xEF\xBF\xBD"));
    answer_free(&a);
    buf_clear(&text);
    /* The answer ends inside a character. */
    a = rig_submit(&r, COMPLETIONS, "{\"prompt\":\"x\",\"stream\":true,\"max_tokens\":3}");
    join(&a, "choices.0.text", &text);
    CHECK_EQ_STR(text.data, "a\xEF\xBF\xBD");
    buf_release(&text);
    answer_free(&a);
    rig_close(&r);
}

TEST(stop_string_over_several_tokens)
{
    struct rig r;
    struct buf text = { 0 };
    rig_open(&r);
    rig_start(&r);
    struct answer a = rig_submit(
        &r, COMPLETIONS,
        "{\"prompt\":\"x\",\"stream\":true,\"max_tokens\":50,\"stop\":[\"there, wo\"]}");
    join(&a, "choices.0.text", &text);
    CHECK_EQ_STR(text.data, "Hello ");
    cJSON *e = event_at(&a, -2);
    CHECK_EQ_STR(string_at(e, "choices.0.stop_reason"), "there, wo");
    CHECK_EQ_INT(r.fake.n_canceled, 1);
    CHECK(ends_with_done(&a));
    cJSON_Delete(e);
    buf_release(&text);
    answer_free(&a);
    rig_close(&r);
}

TEST(echo_and_logprobs_in_chunks)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    struct answer a = rig_submit(
        &r, COMPLETIONS,
        "{\"prompt\":[43,72,79],\"stream\":true,\"echo\":true,\"logprobs\":1,\"max_tokens\":2}");
    cJSON *first = event_at(&a, 0), *second = event_at(&a, 1), *finish = event_at(&a, 2);
    CHECK(strncmp(string_at(first, "choices.0.text"), "Hel", 3) == 0);
    CHECK_EQ_INT(cJSON_GetArraySize(json_at(first, "choices.0.logprobs.tokens")), 4);
    CHECK(cJSON_IsNull(json_at(first, "choices.0.logprobs.token_logprobs.0")));
    CHECK_EQ_INT(cJSON_GetArraySize(json_at(second, "choices.0.logprobs.tokens")), 1);
    CHECK(number_at(second, "choices.0.logprobs.text_offset.0") > 3);
    CHECK_EQ_STR(string_at(finish, "choices.0.finish_reason"), "length");
    CHECK(cJSON_IsNull(json_at(finish, "choices.0.logprobs")));
    cJSON_Delete(first);
    cJSON_Delete(second);
    cJSON_Delete(finish);
    answer_free(&a);
    a = rig_submit(&r, COMPLETIONS,
                   "{\"prompt\":\"Hel\",\"stream\":true,\"echo\":true,\"max_tokens\":0}");
    first = event_at(&a, 0);
    CHECK_EQ_STR(string_at(first, "choices.0.text"), "Hel");
    CHECK_EQ_STR(string_at(first, "choices.0.finish_reason"), "length");
    cJSON_Delete(first);
    answer_free(&a);
    rig_close(&r);
}

TEST(errors_before_and_after_the_first_token)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    r.fake.fail = ERR_UNAVAILABLE;
    struct answer a = rig_submit(&r, CHAT, "{" MESSAGES ",\"stream\":true}");
    CHECK_EQ_INT(a.status, 503);
    CHECK(!a.begun && answer_has_header(&a, "Retry-After: 7"));
    answer_free(&a);
    r.fake.fail_after = 2;
    a = rig_submit(&r, CHAT, "{" MESSAGES ",\"stream\":true}");
    CHECK(a.begun && ends_with_done(&a));
    cJSON *e = event_at(&a, -2);
    CHECK_EQ_STR(string_at(e, "error.message"), "the fake failed on purpose");
    CHECK_EQ_INT(a.n_chunks, 4);
    cJSON_Delete(e);
    answer_free(&a);
    rig_close(&r);
}

TEST(receiver_that_takes_no_more_stops_the_work)
{
    struct rig r;
    struct answer a = { .max_chunks = 2 };
    rig_open(&r);
    rig_start(&r);
    CHECK(rig_begin(&r, CHAT, STR("{" MESSAGES ",\"stream\":true,\"n\":4}"), NULL, &a) != 0);
    for (int i = 0; i < 20000 && r.serve->requests.len; i++) rig_turn(&r);
    CHECK_EQ_INT(r.serve->requests.len, 0);
    CHECK(!a.done);
    CHECK_EQ_INT(r.fake.n_live, 0);
    CHECK_EQ_INT(r.fake.n_canceled, 4);
    answer_free(&a);
    rig_close(&r);
}

TEST(cancel_at_any_time)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    for (int turns = 0; turns < 40; turns++) {
        struct answer a = { 0 };
        uint64_t call = rig_begin(
            &r, COMPLETIONS,
            STR("{\"prompt\":[\"a\",\"b\"],\"n\":2,\"max_tokens\":50,\"logprobs\":2}"), NULL, &a);
        for (int i = 0; i < turns; i++) rig_turn(&r);
        serve_cancel(r.serve, call);
        bool was_done = a.done;
        for (int i = 0; i < 20000 && r.serve->requests.len; i++) rig_turn(&r);
        CHECK_EQ_INT(r.serve->requests.len, 0);
        CHECK(a.done == was_done);
        CHECK_EQ_INT(r.fake.n_live, 0);
        serve_cancel(r.serve, call);
        answer_free(&a);
    }
    rig_close(&r);
}

TEST(close_with_requests_in_flight)
{
    struct rig r;
    struct answer a = { 0 }, b = { 0 };
    rig_open(&r);
    rig_start(&r);
    r.fake.hold = true;
    CHECK(rig_begin(&r, CHAT, STR("{" MESSAGES "}"), NULL, &a) != 0);
    for (int i = 0; i < 2000 && !r.fake.n_live; i++) rig_turn(&r);
    CHECK(rig_begin(&r, CHAT, STR("{" MESSAGES "}"), NULL, &b) != 0);
    rig_close(&r);
    CHECK(!a.done && !b.done);
}

TEST_MAIN(CASE(chat_stream), CASE(usage_and_trace_in_the_last_event),
          CASE(characters_are_never_split), CASE(stop_string_over_several_tokens),
          CASE(echo_and_logprobs_in_chunks), CASE(errors_before_and_after_the_first_token),
          CASE(receiver_that_takes_no_more_stops_the_work), CASE(cancel_at_any_time),
          CASE(close_with_requests_in_flight))
