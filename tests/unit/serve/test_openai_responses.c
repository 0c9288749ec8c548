/* test_openai_responses.c - whole answers: format, text, finish reasons, logprobs, echo, lists of
 * prompts, tokenize. */
#include "tests/unit/serve/serve_rig.h"

static const char CHAT[] = "/v1/chat/completions", COMPLETIONS[] = "/v1/completions";
#define MESSAGES "\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]"

static struct answer ask(struct rig *r, const char *path, const char *body)
{
    struct answer a = rig_submit(r, path, body);
    if (a.status != 200) test_fail(__FILE__, __LINE__, "%s: %d %s", body, a.status, a.body.data);
    return a;
}

TEST(chat_answer)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    struct answer a = ask(&r, CHAT,
                          "{" MESSAGES ",\"return_token_ids\":true,\"return_trace\":true}");
    CHECK_EQ_STR(string_at(a.json, "object"), "chat.completion");
    CHECK_EQ_STR(string_at(a.json, "id"), "chatcmpl-t-1");
    CHECK_EQ_STR(string_at(a.json, "model"), "tiny");
    CHECK_EQ_STR(string_at(a.json, "choices.0.message.role"), "assistant");
    CHECK_EQ_STR(string_at(a.json, "choices.0.message.content"), "Hello there, world");
    CHECK_EQ_STR(string_at(a.json, "choices.0.finish_reason"), "stop");
    CHECK(cJSON_IsNull(json_at(a.json, "choices.0.stop_reason")));
    CHECK(cJSON_IsNull(json_at(a.json, "choices.0.logprobs")));
    CHECK_EQ_INT(number_at(a.json, "usage.prompt_tokens"), r.fake.last.n_tokens);
    CHECK_EQ_INT(number_at(a.json, "usage.completion_tokens"), r.fake.n_answer + 1);
    CHECK_EQ_INT(number_at(a.json, "usage.prompt_tokens_details.cached_tokens"), 1);
    CHECK_EQ_INT(cJSON_GetArraySize(json_at(a.json, "choices.0.token_ids")), r.fake.n_answer + 1);
    CHECK_EQ_INT(cJSON_GetArraySize(json_at(a.json, "choices.0.prompt_token_ids")),
                 r.fake.last.n_tokens);
    CHECK_EQ_INT(cJSON_GetArraySize(json_at(a.json, "prompt_token_ids")), r.fake.last.n_tokens);
    CHECK_EQ_INT(number_at(a.json, "prompt_token_ids.0"), 2);
    CHECK_EQ_STR(string_at(a.json, "baton.prefill_node"), "p0");
    CHECK_EQ_STR(string_at(a.json, "baton.transport"), "mem");
    CHECK_NEAR(number_at(a.json, "baton.total_ms"), 1.5, 1e-9);
    CHECK_EQ_INT(number_at(a.json, "baton.kv_bytes"), 4096);
    CHECK_NEAR(number_at(a.json, "baton.kv_bytes_per_second"), 4096 / 2e-6, 1);
    CHECK_NEAR(number_at(a.json, "baton.kv_busy_ms"), 0.002, 1e-9);
    CHECK_NEAR(number_at(a.json, "baton.kv_link_bytes_per_second"), 5e10, 1);
    CHECK(answer_has_header(&a, "x-request-id: t-1\r\n"));
    answer_free(&a);
    a = ask(&r, CHAT, "{" MESSAGES ",\"n\":3}");
    CHECK_EQ_INT(cJSON_GetArraySize(json_at(a.json, "choices")), 3);
    CHECK_EQ_INT(number_at(a.json, "choices.2.index"), 2);
    CHECK_EQ_INT(number_at(a.json, "usage.completion_tokens"), 3 * (r.fake.n_answer + 1));
    CHECK(!json_at(a.json, "baton") && !json_at(a.json, "prompt_token_ids"));
    answer_free(&a);
    rig_close(&r);
}

TEST(message_types_are_accepted)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    struct answer a = ask(&r, "/tokenize",
                          "{\"messages\":[{\"role\":\"developer\",\"content\":\"Be\"},{\"role\":"
                          "\"user\",\"name\":null,\"content\":[{\"type\":\"text\","
                          "\"text\":\"Hi\"}]},{\"role\":\"assistant\",\"content\":\"Yes\"}],\"add_"
                          "generation_prompt\":false,\"return_token_strs\":true}");
    struct buf body = { 0 };
    char *tokens = cJSON_PrintUnformatted(json_at(a.json, "tokens"));
    CHECK_EQ_INT(number_at(a.json, "count"), cJSON_GetArraySize(json_at(a.json, "tokens")));
    CHECK_EQ_INT(number_at(a.json, "max_model_len"), 256);
    CHECK_EQ_STR(string_at(a.json, "token_strs.0"), "<|im_start|>");
    buf_printf(&body, "{\"tokens\":%s}", tokens);
    cJSON_free(tokens);
    answer_free(&a);
    a = ask(&r, "/detokenize", body.data);
    CHECK_EQ_STR(string_at(a.json, "prompt"),
                 "<|im_start|>system\nBe<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>"
                 "assistant\nYes<|im_end|>\n");
    answer_free(&a);
    buf_release(&body);
    a = ask(&r, "/v1/tokenize", "{\"prompt\":\"Hi\"}");
    CHECK(number_at(a.json, "count") >= 1);
    answer_free(&a);
    a = rig_submit(&r, "/detokenize", "{\"tokens\":[-1]}");
    CHECK_EQ_INT(a.status, 400);
    answer_free(&a);
    rig_close(&r);
}

TEST(completions_of_every_prompt_type)
{
    static const struct {
        const char *prompt;
        int n;
    } rows[] = {
        { "\"Hi\"", 1 }, { "[5,6,7]", 1 }, { "[\"a\",\"b\",\"c\"]", 3 }, { "[[5],[6,7]]", 2 }
    };
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        char body[256];
        snprintf(body, sizeof body, "{\"prompt\":%s,\"n\":2,\"max_tokens\":50}", rows[i].prompt);
        struct answer a = ask(&r, COMPLETIONS, body);
        CHECK_EQ_STR(string_at(a.json, "object"), "text_completion");
        CHECK_EQ_INT(cJSON_GetArraySize(json_at(a.json, "choices")), rows[i].n * 2);
        CHECK_EQ_STR(string_at(a.json, "choices.1.text"), "Hello there, world");
        CHECK_EQ_INT(number_at(a.json, "choices.1.index"), 1);
        answer_free(&a);
    }
    rig_close(&r);
}

TEST(length_stop_string_and_stop_id)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    struct answer a = ask(&r, COMPLETIONS, "{\"prompt\":\"x\",\"max_tokens\":1}");
    CHECK_EQ_STR(string_at(a.json, "choices.0.finish_reason"), "length");
    answer_free(&a);
    a = ask(&r, COMPLETIONS, "{\"prompt\":\"x\",\"max_tokens\":50,\"stop\":[\"zz\",\"ere, w\"]}");
    CHECK_EQ_STR(string_at(a.json, "choices.0.text"), "Hello th");
    CHECK_EQ_STR(string_at(a.json, "choices.0.finish_reason"), "stop");
    CHECK_EQ_STR(string_at(a.json, "choices.0.stop_reason"), "ere, w");
    CHECK_EQ_INT(r.fake.n_canceled, 1);
    answer_free(&a);
    a = ask(&r, COMPLETIONS,
            "{\"prompt\":\"x\",\"max_tokens\":50,\"stop\":\"ere, "
            "w\",\"include_stop_str_in_output\":true}");
    CHECK_EQ_STR(string_at(a.json, "choices.0.text"), "Hello there, w");
    answer_free(&a);
    /* A stop string that comes before min_tokens does not count. */
    char body[256];
    snprintf(body, sizeof body,
             "{\"prompt\":\"x\",\"max_tokens\":50,\"stop\":\"Hel\",\"min_tokens\":%u}",
             r.fake.n_answer);
    a = ask(&r, COMPLETIONS, body);
    CHECK_EQ_STR(string_at(a.json, "choices.0.text"), "Hello there, world");
    answer_free(&a);
    int32_t stop = r.fake.answer[1];
    snprintf(body, sizeof body, "{\"prompt\":\"x\",\"max_tokens\":50,\"stop_token_ids\":[%d]}",
             stop);
    a = ask(&r, COMPLETIONS, body);
    CHECK_EQ_INT(number_at(a.json, "choices.0.stop_reason"), stop);
    struct buf first = { 0 };
    tokenizer_decode(r.tok, r.fake.answer, 1, true, &first);
    /* The stop token's text is left out. */
    CHECK_EQ_STR(string_at(a.json, "choices.0.text"), first.data);
    CHECK_EQ_INT(number_at(a.json, "usage.completion_tokens"), 2);
    answer_free(&a);
    buf_release(&first);
    a = ask(&r, COMPLETIONS, "{\"prompt\":\"x\",\"max_tokens\":50,\"skip_special_tokens\":false}");
    /* So is the end token's. */
    CHECK_EQ_STR(string_at(a.json, "choices.0.text"), "Hello there, world");
    answer_free(&a);
    rig_close(&r);
}

/* Checks that the value of `token` in its dictionary is written with the same digits. */
static void check_same_number(const cJSON *logprobs, int i)
{
    const char *token = cJSON_GetArrayItem(json_at(logprobs, "tokens"), i)->valuestring;
    const cJSON *own = cJSON_GetObjectItemCaseSensitive(
        cJSON_GetArrayItem(json_at(logprobs, "top_logprobs"), i), token);
    CHECK(own != NULL);
    CHECK(own->valuedouble ==
          cJSON_GetArrayItem(json_at(logprobs, "token_logprobs"), i)->valuedouble);
}

TEST(echo_with_logprobs_covers_prompt_and_answer)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    struct answer a = ask(&r, COMPLETIONS,
                          "{\"prompt\":[43,72,79],\"echo\":true,\"logprobs\":3,\"max_tokens\":2,"
                          "\"return_token_ids\":true}");
    const cJSON *lp = json_at(a.json, "choices.0.logprobs");
    CHECK_EQ_INT(cJSON_GetArraySize(json_at(lp, "tokens")), 5);
    CHECK_EQ_INT(cJSON_GetArraySize(json_at(lp, "token_logprobs")), 5);
    CHECK(cJSON_IsNull(json_at(lp, "token_logprobs.0")) &&
          cJSON_IsNull(json_at(lp, "top_logprobs.0")));
    for (int i = 1; i < 5; i++) check_same_number(lp, i);
    CHECK_EQ_INT(cJSON_GetArraySize(json_at(lp, "top_logprobs.1")), 3);
    CHECK_EQ_STR(string_at(lp, "tokens.0"), "H");
    CHECK_EQ_INT(number_at(lp, "text_offset.1"), 1);
    CHECK(strncmp(string_at(a.json, "choices.0.text"), "Hel", 3) == 0);
    CHECK(strlen(string_at(a.json, "choices.0.text")) > 3);
    CHECK_EQ_INT(number_at(lp, "text_offset.3"), 3);
    CHECK_EQ_INT(cJSON_GetArraySize(json_at(a.json, "choices.0.prompt_token_ids")), 3);
    answer_free(&a);
    a = ask(&r, COMPLETIONS,
            "{\"prompt\":\"Hello\",\"echo\":true,\"max_tokens\":0,\"logprobs\":0}");
    CHECK_EQ_STR(string_at(a.json, "choices.0.text"), "Hello");
    CHECK_EQ_STR(string_at(a.json, "choices.0.finish_reason"), "length");
    CHECK_EQ_INT(cJSON_GetArraySize(json_at(a.json, "choices.0.logprobs.tokens")),
                 r.fake.last.n_tokens);
    CHECK_EQ_INT(number_at(a.json, "usage.completion_tokens"), 0);
    answer_free(&a);
    a = ask(&r, COMPLETIONS,
            "{\"prompt\":[[43,72],[79,79]],\"echo\":true,\"max_tokens\":1,\"logprobs\":1,\"n\":2,"
            "\"return_tokens_as_token_ids\":true}");
    CHECK_EQ_STR(string_at(a.json, "choices.3.logprobs.tokens.1"), "token_id:79");
    CHECK_NEAR(number_at(a.json, "choices.3.logprobs.top_logprobs.1.token_id:79"), -0.2, 1e-6);
    answer_free(&a);
    rig_close(&r);
}

TEST(chat_logprobs_and_prompt_logprobs)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    struct answer a = ask(
        &r, CHAT, "{" MESSAGES ",\"logprobs\":true,\"top_logprobs\":2,\"prompt_logprobs\":1}");
    CHECK_EQ_INT(cJSON_GetArraySize(json_at(a.json, "choices.0.logprobs.content")),
                 r.fake.n_answer + 1);
    CHECK_NEAR(number_at(a.json, "choices.0.logprobs.content.0.logprob"), -0.1, 1e-6);
    CHECK_EQ_INT(cJSON_GetArraySize(json_at(a.json, "choices.0.logprobs.content.0.top_logprobs")),
                 2);
    CHECK_EQ_STR(string_at(a.json, "choices.0.logprobs.content.0.top_logprobs.0.token"),
                 string_at(a.json, "choices.0.logprobs.content.0.token"));
    CHECK(cJSON_IsArray(json_at(a.json, "choices.0.logprobs.content.0.bytes")));
    CHECK_EQ_INT(cJSON_GetArraySize(json_at(a.json, "prompt_logprobs")), r.fake.last.n_tokens);
    CHECK(cJSON_IsNull(json_at(a.json, "prompt_logprobs.0")));
    CHECK_EQ_INT(cJSON_GetArraySize(json_at(a.json, "prompt_logprobs.1")), 1);
    CHECK_EQ_INT(number_at(json_at(a.json, "prompt_logprobs.1")->child, "rank"), 1);
    answer_free(&a);
    a = ask(&r, CHAT, "{" MESSAGES ",\"logprobs\":true}");
    CHECK(cJSON_IsArray(json_at(a.json, "choices.0.logprobs.content.0.top_logprobs")));
    CHECK_EQ_INT(cJSON_GetArraySize(json_at(a.json, "choices.0.logprobs.content.0.top_logprobs")),
                 0);
    answer_free(&a);
    rig_close(&r);
}

TEST(tokens_with_the_same_text_have_different_keys)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    /* Ids 160 to 163 are single bytes that are not characters: all show as U+FFFD. */
    r.fake.answer[0] = 160;
    r.fake.n_answer = 1;
    struct answer a = ask(&r, COMPLETIONS, "{\"prompt\":\"x\",\"max_tokens\":1,\"logprobs\":4}");
    const cJSON *lp = json_at(a.json, "choices.0.logprobs");
    CHECK_EQ_INT(cJSON_GetArraySize(json_at(lp, "top_logprobs.0")), 4);
    CHECK_EQ_STR(string_at(lp, "tokens.0"), "\xEF\xBF\xBD");
    check_same_number(lp, 0);
    answer_free(&a);
    rig_close(&r);
}

TEST(more_prompts_than_the_backend_takes_at_once)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    r.fake.max_live = 2;
    struct answer a = ask(&r, COMPLETIONS,
                          "{\"prompt\":[[4],[5],[6],[7],[8],[9],[10]],\"max_tokens\":3}");
    CHECK_EQ_INT(cJSON_GetArraySize(json_at(a.json, "choices")), 7);
    answer_free(&a);
    rig_close(&r);
}

/* A request that has some answers waits for a full backend; a new one is refused. */
TEST(request_in_flight_waits_for_capacity)
{
    struct rig r;
    struct buf body = { 0 };
    struct answer a = { 0 };
    enum { N = 140 /* more than COMPLETION_WINDOW */ };
    rig_open(&r);
    r.o.max_prompts = N;
    rig_start(&r);
    buf_add_c(&body, "{\"max_tokens\":2,\"prompt\":[[5]");
    for (int i = 1; i < N; i++) buf_add_c(&body, ",[5]");
    buf_add_c(&body, "]}");
    (void)rig_begin(&r, COMPLETIONS, buf_str(&body), NULL, &a);
    for (int i = 0; i < 20000 && !r.fake.n_live; i++) rig_turn(&r);
    CHECK_EQ_INT(r.fake.n_submitted, 128);
    r.fake.refuse = ERR_FULL;
    for (int i = 0; i < 20000 && r.fake.n_live; i++) rig_turn(&r);
    for (int i = 0; i < 50; i++) rig_turn(&r);
    CHECK(!a.done);
    r.fake.refuse = OK;
    for (int i = 0; i < 20000 && !a.done; i++) rig_turn(&r);
    CHECK_EQ_INT(a.status, 200);
    CHECK_EQ_INT(cJSON_GetArraySize(json_at(a.json, "choices")), N);
    buf_release(&body);
    answer_free(&a);
    rig_close(&r);
}

/* The backend took all, and then had no room for some: those come again. */
TEST(request_in_flight_waits_for_sequences_that_were_late)
{
    static const char body[] =
        "{\"prompt\":[[4],[5],[6]],\"n\":2,\"max_tokens\":3,\"temperature\":0%s}";
    struct rig r;
    char text[200];
    rig_open(&r);
    rig_start(&r);
    for (int stream = 0; stream < 2; stream++) {
        uint32_t before = r.fake.n_submitted;
        r.fake.n_late = 7; /* some of them twice */
        r.fake.retry_after_s = 1;
        snprintf(text, sizeof text, body, stream ? ",\"stream\":true" : "");
        struct answer a = ask(&r, COMPLETIONS, text);
        CHECK_EQ_INT(a.status, 200);
        CHECK_EQ_INT(r.fake.n_late, 0);
        CHECK_EQ_INT(r.fake.n_submitted - before, 6 + 7);
        CHECK_EQ_INT(r.fake.all_prompts, 6);
        if (!stream) CHECK_EQ_INT(cJSON_GetArraySize(json_at(a.json, "choices")), 6);
        if (!stream) CHECK_EQ_STR(string_at(a.json, "choices.5.finish_reason"), "length");
        else CHECK(!strstr(a.body.data, "error"));
        answer_free(&a);
    }
    r.fake.first_waits = 4; /* the client has events of another one by then */
    struct answer begun = rig_submit(&r, CHAT, "{" MESSAGES ",\"n\":2,\"stream\":true}");
    CHECK_EQ_INT(begun.status, 200);
    CHECK(r.fake.first_waits == 0 && !strstr(begun.body.data, "error"));
    CHECK(str_ends(buf_str(&begun.body), "[DONE]\n"));
    answer_free(&begun);
    r.fake.fail = ERR_BUSY; /* nothing of the request goes on */
    r.fake.fail_after = 0;
    struct answer a = rig_submit(&r, CHAT, "{" MESSAGES ",\"n\":2}");
    CHECK_EQ_INT(a.status, 429);
    answer_free(&a);
    rig_close(&r);
}

/* Turns the loop until the backend is there, and then for a while. */
static void check_stays_at(struct rig *r, uint32_t n_submitted, uint32_t n_live)
{
    const struct fake_backend *f = &r->fake;
    for (int i = 0; i < 20000 && (f->n_submitted != n_submitted || f->n_live != n_live); i++)
        rig_turn(r);
    for (int i = 0; i < 100; i++) rig_turn(r);
    CHECK_EQ_INT(f->n_submitted, n_submitted);
    CHECK_EQ_INT(f->n_live, n_live);
}

/* A backend that takes it and refuses it afterwards, over and over, is not asked in each turn of
 * the loop: neither beside another sequence nor when that one has ended. */
TEST(a_sequence_that_was_late_comes_again_as_it_was_told)
{
    struct rig r;
    struct answer a = { 0 };
    rig_open(&r);
    rig_start(&r);
    r.fake.n_late = 1000;
    r.fake.retry_after_s = 1;
    (void)rig_begin(&r, COMPLETIONS,
                    STR("{\"prompt\":\"x\",\"n\":2,\"max_tokens\":200,\"ignore_eos\":true}"), NULL,
                    &a);
    check_stays_at(&r, 2, 1);
    check_stays_at(&r, 3, 0); /* the end of the other one may have made room */
    r.fake.n_late = 0;
    for (int i = 0; i < 20000 && !a.done; i++) rig_turn(&r);
    CHECK_EQ_INT(a.status, 200);
    CHECK_EQ_INT(r.fake.n_submitted, 4);
    answer_free(&a);
    rig_close(&r);
}

TEST(failures_of_the_backend)
{
    static const struct {
        enum status st;
        int http;
    } rows[] = { { ERR_FULL, 429 },    { ERR_UNAVAILABLE, 503 }, { ERR_PEER_LOST, 502 },
                 { ERR_TIMEOUT, 504 }, { ERR_TOO_LONG, 400 },    { ERR_CANCELED, 503 } };
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        r.fake.refuse = rows[i].st;
        struct answer a = rig_submit(&r, CHAT, "{" MESSAGES "}");
        CHECK_EQ_INT(a.status, rows[i].http);
        CHECK_EQ_STR(string_at(a.json, "error.message"), "the fake refuses on purpose");
        if (a.status == 429 || a.status == 503) CHECK(answer_has_header(&a, "Retry-After: 1\r\n"));
        answer_free(&a);
        r.fake.refuse = OK;
        r.fake.fail = rows[i].st;
        r.fake.fail_after = 2;
        a = rig_submit(&r, CHAT, "{" MESSAGES ",\"n\":2}");
        CHECK_EQ_INT(a.status, rows[i].http);
        CHECK_EQ_STR(string_at(a.json, "error.message"), "the fake failed on purpose");
        if (rows[i].st == ERR_FULL)
            CHECK(answer_has_header(&a, "Retry-After: 7\r\n") &&
                  answer_has_header(&a, "retry-after-ms: 7000\r\n"));
        answer_free(&a);
        r.fake.fail = OK;
    }
    rig_close(&r);
}

TEST(model_without_template)
{
    struct rig r;
    rig_open(&r);
    r.o.chat = NULL;
    rig_start(&r);
    struct answer a = rig_submit(&r, CHAT, "{" MESSAGES "}");
    CHECK_EQ_INT(a.status, 400);
    CHECK(strstr(string_at(a.json, "error.message"), "no chat template"));
    answer_free(&a);
    rig_close(&r);
}

TEST_MAIN(CASE(chat_answer), CASE(message_types_are_accepted),
          CASE(completions_of_every_prompt_type), CASE(length_stop_string_and_stop_id),
          CASE(echo_with_logprobs_covers_prompt_and_answer),
          CASE(chat_logprobs_and_prompt_logprobs),
          CASE(tokens_with_the_same_text_have_different_keys),
          CASE(more_prompts_than_the_backend_takes_at_once),
          CASE(request_in_flight_waits_for_capacity),
          CASE(request_in_flight_waits_for_sequences_that_were_late),
          CASE(a_sequence_that_was_late_comes_again_as_it_was_told), CASE(failures_of_the_backend),
          CASE(model_without_template))
