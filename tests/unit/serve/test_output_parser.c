/* test_output_parser.c - chat answers with reasoning and tool calls: whole and streamed, every
 * finish reason, every tool_choice. */
#include "tests/unit/serve/serve_rig.h"

static const char CHAT[] = "/v1/chat/completions";
#define MESSAGES "\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]"
#define TOOLS                                                                                      \
    "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"add\",\"parameters\":{\"type\":"   \
    "\"object\",\"properties\":{\"a\":{\"type\":\"integer\"}}}}},"                                 \
    "{\"type\":\"function\",\"function\":{\"name\":\"look\"}}]"
#define ONE_TOOL "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"look\"}}]"
#define CALL_ADD                                                                                   \
    "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1, \"b\": "                           \
    "\"\xC3\xA9\"}}\n</tool_call>"
#define CALL_LOOK  "<tool_call>\n{\"name\": \"look\", \"arguments\": {}}\n</tool_call>"
#define CALL_OTHER "<tool_call>\n{\"name\": \"other\", \"arguments\": {}}\n</tool_call>"
/* A template that shows the tools, and opens the reasoning when asked to. */
#define TEMPLATE                                                                                   \
    "{% if tools %}T{% for t in tools %}:{{ t.function.name }}{% endfor %}{% endif %}{% for m in " \
    "messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"                                         \
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson "    \
    "}}]{% endfor %}<|im_end|>\n{% endfor %}"                                                      \
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% "    \
    "endif %}{% endif %}"

static void open_rig(struct rig *r, const char *answer)
{
    struct err err = { 0 };
    rig_open(r);
    chat_free(r->chat);
    CHECK_OK(
        chat_create(&(struct chat_source){ .template = STR(TEMPLATE), .bos = "<s>", .eos = "</s>" },
                    &r->chat, &err));
    r->o.chat = r->chat;
    r->o.max_model_len = 1024;
    r->o.reasoning = reasoning_format_find(STR("think"));
    r->o.tools = tool_format_find(STR("hermes"));
    rig_set_answer(r, answer);
    rig_start(r);
}

static struct answer ask(struct rig *r, const char *members)
{
    struct buf body = { 0 };
    buf_printf(&body, "{" MESSAGES "%s%s}", members[0] ? "," : "", members);
    struct answer a = rig_submit(r, CHAT, body.data);
    if (a.status != 200)
        test_fail(__FILE__, __LINE__, "%s: %d %s", body.data, a.status, a.body.data);
    buf_release(&body);
    return a;
}

/* ---- a message as one text: content|reasoning|name(arguments)...|finish_reason ---- */

static void add_string(const cJSON *v, struct buf *out)
{
    buf_add_c(out, cJSON_IsString(v) ? v->valuestring : cJSON_IsNull(v) ? "null" : "-");
}

static void show_whole(const cJSON *choice, struct buf *out)
{
    const cJSON *m = json_at(choice, "message"), *call;
    add_string(cJSON_GetObjectItem(m, "content"), out);
    buf_add_char(out, '|');
    add_string(cJSON_GetObjectItem(m, "reasoning_content"), out);
    buf_add_char(out, '|');
    CHECK(!json_member(m, "reasoning_content") ||
          strcmp(string_at(m, "reasoning_content"), string_at(m, "reasoning")) == 0);
    cJSON_ArrayForEach (call, json_member(m, "tool_calls")) {
        CHECK_EQ_STR(string_at(call, "type"), "function");
        CHECK(str_starts(str_of(string_at(call, "id")), "call_") &&
              strlen(string_at(call, "id")) == 29);
        buf_printf(out, "%s(%s)", string_at(call, "function.name"),
                   string_at(call, "function.arguments"));
    }
    buf_printf(out, "|%s", string_at(choice, "finish_reason"));
}

struct gathered {
    bool content_set, reasoning_set;
    struct buf content, reasoning, calls[4];
    int n_calls;
    char finish[16];
};

static void gather_call(const cJSON *c, struct gathered *g)
{
    int i = (int)number_at(c, "index");
    CHECK(i <= g->n_calls && i < 4);
    if (i == g->n_calls) {
        CHECK(json_member(c, "id") && strcmp(string_at(c, "type"), "function") == 0);
        buf_printf(&g->calls[g->n_calls++], "%s(", string_at(c, "function.name"));
    } else {
        CHECK(!json_member(c, "id") && !json_at(c, "function.name"));
        CHECK_EQ_INT(i, g->n_calls - 1);
    }
    buf_add_c(&g->calls[i], string_at(c, "function.arguments"));
}

/* Joins the chunks of choice `index` as a client does. */
static void show_stream(const struct answer *a, int index, struct buf *out)
{
    struct gathered g = { 0 };
    cJSON *e;
    for (int i = 0; (e = event_at(a, i)) != NULL; i++) {
        const cJSON *choice = json_at(e, "choices.0"), *d = json_at(choice, "delta"), *call;
        if (choice && number_at(choice, "index") == index) {
            if (cJSON_IsString(json_at(d, "content")))
                g.content_set = true, buf_add_c(&g.content, string_at(d, "content"));
            if (cJSON_IsString(json_at(d, "reasoning_content")))
                g.reasoning_set = true, buf_add_c(&g.reasoning, string_at(d, "reasoning_content"));
            cJSON_ArrayForEach (call, json_member(d, "tool_calls")) gather_call(call, &g);
            if (json_member(choice, "finish_reason"))
                snprintf(g.finish, sizeof g.finish, "%s", string_at(choice, "finish_reason"));
        }
        cJSON_Delete(e);
    }
    buf_add_c(out, !g.content_set ? "null" : g.content.data ? g.content.data : "");
    buf_printf(out, "|%s|", g.reasoning_set ? g.reasoning.data : "-");
    for (int i = 0; i < g.n_calls; i++) buf_printf(out, "%s)", g.calls[i].data);
    buf_printf(out, "|%s", g.finish);
    buf_release(&g.content);
    buf_release(&g.reasoning);
    for (int i = 0; i < 4; i++) buf_release(&g.calls[i]);
}

static void check_both(struct rig *r, const char *members, const char *want)
{
    struct buf got = { 0 }, with = { 0 };
    struct answer a = ask(r, members);
    show_whole(json_at(a.json, "choices.0"), &got);
    CHECK_EQ_STR(got.data, want);
    answer_free(&a);
    buf_clear(&got);
    buf_printf(&with, "\"stream\":true%s%s", members[0] ? "," : "", members);
    a = ask(r, with.data);
    show_stream(&a, 0, &got);
    CHECK_EQ_STR(got.data, want);
    answer_free(&a);
    buf_release(&got);
    buf_release(&with);
}

struct parse_case {
    const char *answer, *members, *want;
};

TEST(answers_are_parsed)
{
    static const struct parse_case rows[] = {
        { "Hello there", "", "Hello there|-||stop" },
        { "<think>\nHm.\n\nYes.\n</think>\n\nHello", "", "Hello|Hm.\n\nYes.||stop" },
        { "<think>\nHm.\n</think>\n\nHello", "\"include_reasoning\":false", "Hello|-||stop" },
        { "Hm.\n</think>\n\nHello", "\"chat_template_kwargs\":{\"enable_thinking\":true}",
          "Hello|Hm.||stop" },
        { "Hm.\n</think>\n\nHello", "\"enable_thinking\":true", "Hello|Hm.||stop" },
        { "Hm.\n</think>\n\nHello", "\"enable_thinking\":false", "Hm.\n</think>\n\nHello|-||stop" },
        { "<think>\nHm", "", "null|Hm||stop" },
        { CALL_ADD, TOOLS, "null|-|add({\"a\": 1, \"b\": \"\xC3\xA9\"})|tool_calls" },
        { "I add.\n" CALL_ADD "\n" CALL_LOOK, TOOLS,
          "I add.|-|add({\"a\": 1, \"b\": \"\xC3\xA9\"})look({})|tool_calls" },
        { "<think>\nHm.\n</think>\n\n" CALL_LOOK, TOOLS, "null|Hm.|look({})|tool_calls" },
        { CALL_ADD "\n" CALL_LOOK, TOOLS ",\"parallel_tool_calls\":false",
          "null|-|add({\"a\": 1, \"b\": \"\xC3\xA9\"})|tool_calls" },
        { CALL_LOOK, TOOLS ",\"tool_choice\":\"none\"", CALL_LOOK "|-||stop" },
        { CALL_LOOK, "", CALL_LOOK "|-||stop" },
        { "<tool_call>{\"name\": 5}</tool_call>", TOOLS,
          "<tool_call>{\"name\": 5}</tool_call>|-||stop" },
        { "A <tool_call>", TOOLS, "A <tool_call>|-||stop" },
        /* A name that is not in tools is no call, whatever tool_choice demands. */
        { CALL_OTHER, TOOLS, CALL_OTHER "|-||stop" },
        { CALL_LOOK "\n" CALL_OTHER, TOOLS, CALL_OTHER "|-|look({})|tool_calls" },
        { CALL_OTHER "\n" CALL_LOOK, TOOLS ",\"parallel_tool_calls\":false",
          CALL_OTHER "|-|look({})|tool_calls" },
        { "other\", \"arguments\": {}}\n</tool_call>", TOOLS ",\"tool_choice\":\"required\"",
          CALL_OTHER "|-||stop" },
        { "other\", \"arguments\": {}}\n</tool_call>\n" CALL_LOOK,
          TOOLS ",\"tool_choice\":\"required\"", CALL_OTHER "|-|look({})|tool_calls" },
        /* Where only one function can be called, its name is in the prompt. */
        { " {\"a\": 2}}\n</tool_call>", ONE_TOOL ",\"tool_choice\":\"required\"",
          "null|-|look({\"a\": 2})|tool_calls" },
        { " {\"a\": 2}}\n</tool_call>",
          TOOLS ",\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"add\"}}",
          "null|-|add({\"a\": 2})|tool_calls" },
        { " {\"a\": 2}}\n</tool_call>" CALL_LOOK,
          TOOLS ",\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"add\"}},\"enable_"
                "thinking\":true",
          "null|-|add({\"a\": 2})|tool_calls" },
        { "look\", \"arguments\": {}}\n</tool_call>\n" CALL_LOOK,
          TOOLS ",\"tool_choice\":\"required\"", "null|-|look({})look({})|tool_calls" },
        { "nothing", TOOLS ",\"tool_choice\":\"required\",\"stop\":\"hing\"",
          "<tool_call>\n{\"name\": \"not|-||stop" },
        { "<think>\nHm.\n</think>\n\nHello there", "\"stop\":\" th\"", "Hello|Hm.||stop" },
        { "<think>\nHm there", "\"stop\":\" th\"", "null|Hm||stop" },
    };
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        struct rig r;
        open_rig(&r, rows[i].answer);
        check_both(&r, rows[i].members, rows[i].want);
        rig_close(&r);
    }
}

/* A tool call cut by max_tokens is still returned as a call. */
TEST(length_ends_calls_and_reasoning)
{
    struct rig r;
    open_rig(&r, CALL_ADD);
    struct buf members = { 0 };
    uint32_t n = 0;
    for (struct buf b = { 0 };; n++) { /* up to the quote after "b": */
        tokenizer_decode(r.tok, r.fake.answer, n, false, &b);
        bool enough = strstr(b.data ? b.data : "", "\"b\": ") != NULL;
        buf_release(&b);
        if (enough) break;
    }
    buf_printf(&members, TOOLS ",\"max_tokens\":%u", n);
    struct answer a = ask(&r, members.data);
    CHECK_EQ_STR(string_at(a.json, "choices.0.finish_reason"), "length");
    CHECK_EQ_STR(string_at(a.json, "choices.0.message.tool_calls.0.function.name"), "add");
    CHECK(str_starts(str_of(string_at(a.json, "choices.0.message.tool_calls.0.function.arguments")),
                     "{\"a\": 1, \"b\":"));
    CHECK(cJSON_IsNull(json_at(a.json, "choices.0.message.content")));
    answer_free(&a);
    buf_release(&members);
    rig_close(&r);
}

TEST(a_broken_call_is_text)
{
    static const char broken[] =
        "<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": oops}}</tool_call>";
    struct rig r;
    struct buf text = { 0 };
    open_rig(&r, broken);
    struct answer a = ask(&r, TOOLS);
    CHECK_EQ_STR(string_at(a.json, "choices.0.message.content"), broken);
    CHECK(!json_at(a.json, "choices.0.message.tool_calls"));
    CHECK_EQ_STR(string_at(a.json, "choices.0.finish_reason"), "stop");
    answer_free(&a);
    /* A stream has announced the call already; there it is text as well. */
    a = ask(&r, TOOLS ",\"stream\":true");
    show_stream(&a, 0, &text);
    CHECK(str_starts(buf_str(&text), broken) && str_ends(buf_str(&text), "|stop"));
    answer_free(&a);
    buf_release(&text);
    rig_close(&r);
}

TEST(reasoning_tokens_are_counted_and_logprobs_stay_whole)
{
    struct rig r;
    struct answer a;
    int32_t *ids = NULL;
    size_t n = 0;
    struct err err = { 0 };
    open_rig(&r, "<think>Hm.</think>Yes");
    CHECK_OK(tokenizer_encode(r.tok, STR("<think>Hm.</think>"), false, SIZE_MAX, &ids, &n, &err));
    mem_free(ids);
    a = ask(&r, "\"logprobs\":true,\"top_logprobs\":1,\"return_token_ids\":true,\"n\":2");
    double n_reasoning = number_at(a.json, "usage.completion_tokens_details.reasoning_tokens");
    /* A token may cross the end of a tag. */
    CHECK(n_reasoning >= 2 * (double)n && n_reasoning <= 2 * ((double)n + 1));
    CHECK_EQ_INT(number_at(a.json, "usage.completion_tokens"), 2 * (r.fake.n_answer + 1));
    CHECK_EQ_INT(cJSON_GetArraySize(json_at(a.json, "choices.1.logprobs.content")),
                 r.fake.n_answer + 1);
    CHECK_EQ_INT(cJSON_GetArraySize(json_at(a.json, "choices.1.token_ids")), r.fake.n_answer + 1);
    CHECK_EQ_STR(string_at(a.json, "choices.1.message.reasoning"), "Hm.");
    answer_free(&a);
    /* A stream sends each token's logprob at once, although its text may be held back. */
    a = ask(&r, "\"logprobs\":true,\"stream\":true,\"stream_options\":{\"include_usage\":true}");
    int n_logprobs = 0, i = 0;
    for (cJSON *e; (e = event_at(&a, i)) != NULL; i++) {
        n_logprobs += cJSON_GetArraySize(json_at(e, "choices.0.logprobs.content"));
        cJSON_Delete(e);
    }
    CHECK_EQ_INT(n_logprobs, r.fake.n_answer + 1);
    cJSON *usage = event_at(&a, -2);
    CHECK_EQ_INT(number_at(usage, "usage.completion_tokens_details.reasoning_tokens"),
                 n_reasoning / 2);
    cJSON_Delete(usage);
    answer_free(&a);
    a = ask(&r, "\"max_tokens\":3");
    CHECK_EQ_INT(number_at(a.json, "usage.completion_tokens_details.reasoning_tokens"),
                 n > 3 ? 0 : 3);
    answer_free(&a);
    a = ask(&r, "\"max_tokens\":3,\"enable_thinking\":true");
    CHECK_EQ_INT(number_at(a.json, "usage.completion_tokens_details.reasoning_tokens"), 3);
    answer_free(&a);
    rig_close(&r);
}

TEST(several_answers_of_a_stream_keep_apart)
{
    struct rig r;
    open_rig(&r, "<think>Hm.</think>So " CALL_ADD CALL_LOOK);
    struct answer a = ask(&r, TOOLS ",\"stream\":true,\"n\":3");
    for (int i = 0; i < 3; i++) {
        struct buf text = { 0 };
        show_stream(&a, i, &text);
        CHECK_EQ_STR(text.data, "So|Hm.|add({\"a\": 1, \"b\": \"\xC3\xA9\"})look({})|tool_calls");
        buf_release(&text);
    }
    answer_free(&a);
    a = ask(&r, TOOLS ",\"n\":3");
    for (int i = 0; i < 3; i++)
        for (int k = 0; k < i; k++) {
            char x[64], y[64];
            snprintf(x, sizeof x, "choices.%d.message.tool_calls.0.id", i);
            snprintf(y, sizeof y, "choices.%d.message.tool_calls.0.id", k);
            CHECK(strcmp(string_at(a.json, x), string_at(a.json, y)) != 0);
        }
    answer_free(&a);
    rig_close(&r);
}

/* Tags that are special tokens reach the parsers, but not the client. */
TEST(special_tokens_that_are_tags)
{
    struct tool_format special = *tool_format_find(STR("hermes"));
    struct rig r;
    special.open[0] = special.markers[0] = STR("<|im_start|>");
    rig_open(&r);
    r.o.tools = &special;
    rig_set_answer(&r, "Look <|im_start|>{\"name\": \"look\"}");
    rig_start(&r);
    check_both(&r, TOOLS, "Look|-|look({})|tool_calls");
    check_both(&r, "", "Look {\"name\": \"look\"}|-||stop");
    rig_close(&r);
}

/* The prompt that the model gets. */
static void check_prompt(struct rig *r, const char *members, const char *want)
{
    struct buf body = { 0 };
    buf_printf(&body, "{%s}", members);
    struct answer a = rig_submit(r, "/tokenize", body.data);
    if (a.status != 200) test_fail(__FILE__, __LINE__, "%s: %s", members, a.body.data);
    char *tokens = cJSON_PrintUnformatted(json_at(a.json, "tokens"));
    buf_clear(&body);
    buf_printf(&body, "{\"tokens\":%s}", tokens);
    cJSON_free(tokens);
    answer_free(&a);
    a = rig_submit(r, "/detokenize", body.data);
    CHECK_EQ_STR(string_at(a.json, "prompt"), want);
    answer_free(&a);
    buf_release(&body);
}

TEST(prompts_show_tools_and_begun_calls)
{
    struct rig r;
    open_rig(&r, "x");
    check_prompt(&r, MESSAGES "," TOOLS,
                 "T:add:look<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
    check_prompt(&r, MESSAGES "," TOOLS ",\"tool_choice\":\"none\"",
                 "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
    check_prompt(&r, MESSAGES "," TOOLS ",\"tool_choice\":\"required\"",
                 "T:add:look<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<tool_call>\n{"
                 "\"name\": \"");
    check_prompt(&r, MESSAGES "," ONE_TOOL ",\"tool_choice\":\"required\"",
                 "T:look<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<tool_call>\n{"
                 "\"name\": \"look\", \"arguments\":");
    check_prompt(&r,
                 MESSAGES "," TOOLS ",\"enable_thinking\":true,\"tool_choice\":{\"type\":"
                          "\"function\",\"function\":{\"name\":\"look\"}}",
                 "T:add:look<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n</"
                 "think>\n\n<tool_call>\n{\"name\": \"look\", \"arguments\":");
    check_prompt(
        &r,
        "\"messages\":[{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"id\":\"1\","
        "\"type\":\"function\",\"function\":{\"name\":\"add\",\"arguments\":"
        "\"{\\\"a\\\": "
        "1}\"}}]},{\"role\":\"tool\",\"tool_call_id\":\"1\",\"content\":\"2\"}],\"add_generation_"
        "prompt\":false",
        "<|im_start|>assistant\n[add {\"a\": 1}]<|im_end|>\n<|im_start|>tool\n2<|im_end|>\n");
    rig_close(&r);
}

TEST(demands_that_cannot_be_met_are_refused)
{
    struct rig r;
    open_rig(&r, "x");
    struct answer a = rig_submit(&r, CHAT,
                                 "{" MESSAGES "," TOOLS
                                 ",\"tool_choice\":\"required\",\"add_generation_prompt\":false}");
    CHECK_EQ_INT(a.status, 400);
    CHECK_EQ_STR(string_at(a.json, "error.param"), "tool_choice");
    answer_free(&a);
    a = rig_submit(&r, CHAT,
                   "{" MESSAGES "," TOOLS ",\"tool_choice\":\"required\",\"chat_template_kwargs\":{"
                   "\"add_generation_prompt\":false}}");
    CHECK_EQ_INT(a.status, 400);
    CHECK_EQ_STR(string_at(a.json, "error.param"), "tool_choice");
    answer_free(&a);
    a = rig_submit(&r, CHAT,
                   "{" MESSAGES ",\"prompt_token_ids\":[5,6]," TOOLS
                   ",\"tool_choice\":\"required\"}");
    CHECK_EQ_INT(a.status, 400);
    CHECK_EQ_STR(string_at(a.json, "error.param"), "tool_choice");
    answer_free(&a);
    a = rig_submit(&r, CHAT,
                   "{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{\"id\":\"1\"}]}]}");
    CHECK_EQ_INT(a.status, 400);
    CHECK(strstr(string_at(a.json, "error.message"), "messages[0]"));
    answer_free(&a);
    rig_close(&r);
}

/* A message to be continued, and a prompt of ids, determine whether the answer begins inside the
 * reasoning. */
TEST(answers_that_go_on)
{
    struct rig r;
    struct buf body = { 0 };
    struct err err = { 0 };
    int32_t *ids = NULL;
    size_t n = 0;
    open_rig(&r, " more.</think>\nHello");
    struct answer a = rig_submit(
        &r, CHAT,
        "{\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"},{\"role\":"
        "\"assistant\",\"content\":\"<think>\\nHm,\"}],"
        "\"add_generation_prompt\":false,\"continue_final_message\":true}");
    CHECK_EQ_STR(string_at(a.json, "choices.0.message.reasoning_content"), " more.");
    CHECK_EQ_STR(string_at(a.json, "choices.0.message.content"), "Hello");
    answer_free(&a);
    CHECK_OK(tokenizer_encode(r.tok, STR("<|im_start|>assistant\n<think>\n"), false, SIZE_MAX, &ids,
                              &n, &err));
    buf_add_c(&body, "{\"prompt_token_ids\":[");
    for (size_t i = 0; i < n; i++) buf_printf(&body, i ? ",%d" : "%d", ids[i]);
    buf_add_c(&body, "]}");
    mem_free(ids);
    a = rig_submit(&r, CHAT, body.data);
    CHECK_EQ_STR(string_at(a.json, "choices.0.message.reasoning_content"), "more.");
    answer_free(&a);
    buf_release(&body);
    rig_close(&r);
}

/* Clients take a stream's first event for the first token, whatever it contains, and expect a role
 * in it. */
TEST(first_event_comes_with_the_first_token)
{
    struct rig r;
    open_rig(&r, CALL_LOOK);
    struct answer a = ask(&r, TOOLS ",\"stream\":true");
    cJSON *first = event_at(&a, 0);
    CHECK_EQ_STR(string_at(first, "choices.0.delta.role"), "assistant");
    CHECK(cJSON_IsNull(json_at(first, "choices.0.delta.content")));
    cJSON_Delete(first);
    CHECK(str_ends(buf_str(&a.body), "\n[DONE]\n"));
    answer_free(&a);
    rig_close(&r);
}

TEST_MAIN(CASE(answers_are_parsed), CASE(length_ends_calls_and_reasoning),
          CASE(a_broken_call_is_text), CASE(reasoning_tokens_are_counted_and_logprobs_stay_whole),
          CASE(several_answers_of_a_stream_keep_apart), CASE(special_tokens_that_are_tags),
          CASE(prompts_show_tools_and_begun_calls), CASE(demands_that_cannot_be_met_are_refused),
          CASE(answers_that_go_on), CASE(first_event_comes_with_the_first_token))
