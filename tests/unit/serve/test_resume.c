/* test_resume.c - handles, and streams that are resumed after each of their events: the events before
 * and after are the undisturbed stream, byte for byte. */
#include "shared/serve/completion_request.h"
#include "tests/unit/serve/serve_rig.h"

static const char CHAT[] = "/v1/chat/completions", COMPLETIONS[] = "/v1/completions";
#define MESSAGES   "\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]"
#define WANTED     "x-baton-resume: 1\r\nx-request-id: one\r\n"
#define EVENTS_MAX 200

/* ---- handles ---- */

TEST(handle_round_trip)
{
    static const char *const texts[] = {
        "1;a;0;0000000000000000;0@-",
        "1;a.b_c-D9;1764170000;0123456789abcdef;12@fedcba9876543210",
        "1;x;999999999999;ffffffffffffffff;4294967295f0.4294967295;u",
        "1;x;1;00000000000000ff;1@-,2f3.4,5@00000000000000ff,0f0.0",
        "1;x;1;00000000000000ff;1@-;m00000000000000b1",
        "1;x;1;00000000000000ff;1@-,2f3.4;mfedcba9876543210;u",
        "1;x;1;00000000000000ff;1@-,1@-,1@-,1@-,1@-,1@-,1@-,1@-,1@-,1@-,1@-,1@-,1@-,1@-,1@-,1@-;u",
    };
    for (size_t i = 0; i < COUNT_OF(texts); i++) {
        struct resume_handle h;
        struct err err = { 0 };
        struct buf again = { 0 };
        CHECK_OK(resume_handle_read(str_of(texts[i]), &h, &err));
        resume_handle_write(&h, &again);
        CHECK_EQ_STR(again.data, texts[i]);
        buf_release(&again);
    }
}

TEST(handle_has_its_parts)
{
    struct resume_handle h;
    CHECK_OK(resume_handle_read(STR("1;na-me;1764170000;00000000000000a1;"
                                    "12@00000000000000b2,30f4.5,7@-;m00000000000000c3;u"),
                                &h, NULL));
    CHECK_EQ_STR(h.name, "na-me");
    CHECK_EQ_INT(h.created, 1764170000);
    CHECK_EQ_INT(h.digest, 0xa1);
    CHECK_EQ_INT(h.n_choices, 3);
    CHECK(h.choices[0].n_tokens == 12 && h.choices[0].node == 0xb2 && !h.choices[0].finished);
    CHECK(h.choices[1].n_tokens == 30 && h.choices[1].finished && !h.choices[1].node);
    CHECK(h.choices[1].n_reasoning == 4 && h.choices[1].n_cached == 5);
    CHECK(h.choices[2].n_tokens == 7 && !h.choices[2].node && !h.choices[2].finished);
    CHECK(h.usage_sent && h.model_bits == 0xc3);
}

TEST(handle_that_is_none_is_refused)
{
    static const char *const texts[] = {
        "",
        "1",
        "42",
        "1;a;0;0000000000000000",
        "1;a;0;0000000000000000;",
        "1;a;0;0000000000000000;0@-;",
        "1;a;0;0000000000000000;0@-;v",
        "1;a;0;0000000000000000;0@-;u;u",
        "1;a;0;0000000000000000;0@-;m",
        "1;a;0;0000000000000000;0@-;m0000000000000000",
        "1;a;0;0000000000000000;0@-;m00000000000000B1",
        "1;a;0;0000000000000000;0@-;m00000000000000b1;",
        "1;a;0;0000000000000000;0@-;m00000000000000b1;v",
        "1;a;0;0000000000000000;0@-;m00000000000000b1;m00000000000000b1",
        "1;a;0;0000000000000000;0@-;u;m00000000000000b1",
        "1;a;0;0000000000000000;0@-,",
        "1;a;0;0000000000000000;,0@-",
        "2;a;0;0000000000000000;0@-",
        "1;;0;0000000000000000;0@-",
        "1;a b;0;0000000000000000;0@-",
        "1;a;00;0000000000000000;0@-",
        "1;a;-1;0000000000000000;0@-",
        "1;a;+1;0000000000000000;0@-",
        "1;a;1000000000000;0000000000000000;0@-",
        "1;a;0;000000000000000;0@-",
        "1;a;0;00000000000000000;0@-",
        "1;a;0;000000000000000G;0@-",
        "1;a;0;000000000000000A;0@-",
        "1;a;0;0000000000000000;@-",
        "1;a;0;0000000000000000;01@-",
        "1;a;0;0000000000000000;4294967296@-",
        "1;a;0;0000000000000000;0@",
        "1;a;0;0000000000000000;0@0000000000000000",
        "1;a;0;0000000000000000;0@--",
        "1;a;0;0000000000000000;0",
        "1;a;0;0000000000000000;0f",
        "1;a;0;0000000000000000;0f1",
        "1;a;0;0000000000000000;0f1.",
        "1;a;0;0000000000000000;0f.1",
        "1;a;0;0000000000000000;0f1.2.3",
        "1;a;0;0000000000000000;0f1.2@-",
        "1;a;0;0000000000000000;0@-,0@-,0@-,0@-,0@-,0@-,0@-,0@-,0@-,0@-,0@-,0@-,0@-,0@-,0@-,0@-,0@"
        "-",
    };
    for (size_t i = 0; i < COUNT_OF(texts); i++) {
        struct resume_handle h = { .n_choices = 77 };
        struct err err = { 0 };
        enum status st = resume_handle_read(str_of(texts[i]), &h, &err);
        if (st != ERR_INVALID) test_fail(__FILE__, __LINE__, "%s was taken", texts[i]);
        CHECK_EQ_STR(err.field, "Last-Event-ID");
        CHECK(strstr(err.text, "1;NAME;CREATED;DIGEST;TOKENS@NODE") != NULL);
        CHECK_EQ_INT(h.n_choices, 77); /* outputs only on success */
    }
    struct buf long_name = { 0 };
    struct resume_handle h;
    buf_add_c(&long_name, "1;");
    for (int i = 0; i < 129; i++) buf_add_char(&long_name, 'a');
    buf_add_c(&long_name, ";0;0000000000000000;0@-");
    CHECK_STATUS(resume_handle_read(buf_str(&long_name), &h, NULL), ERR_INVALID);
    buf_release(&long_name);
}

/* ---- streams ---- */

/* The events of a stream with their ids, [DONE] being the last. */
struct events {
    struct answer a;
    struct str all[EVENTS_MAX], id[EVENTS_MAX]; /* all: with the id; id.n 0: it has none */
    int n;
};

static void split_events(struct events *e)
{
    struct str rest = buf_str(&e->a.raw);
    e->n = 0;
    while (rest.n) {
        size_t end = str_find(rest, STR("\n\n"));
        CHECK(end != SIZE_MAX && e->n < EVENTS_MAX);
        struct str one = str_sub(rest, 0, end + 2);
        e->all[e->n] = one;
        e->id[e->n] = (struct str){ 0 };
        if (str_starts(one, "id: ")) e->id[e->n] = str_sub(one, 4, str_find_char(one, '\n') - 4);
        e->n++;
        rest = str_sub(rest, end + 2, SIZE_MAX);
    }
}

static struct events *stream(struct rig *r, const char *path, const char *headers, struct str last,
                             const char *body)
{
    struct events *e = MEM_NEW(struct events);
    struct buf h = { 0 };
    buf_add_c(&h, headers);
    if (last.n) buf_printf(&h, "Last-Event-ID: %.*s\r\n", STR_ARG(last));
    e->a = rig_request(r, "POST", path, h.data, body);
    buf_release(&h);
    if (e->a.status == 200) split_events(e);
    return e;
}

static void events_free(struct events *e)
{
    answer_free(&e->a);
    mem_free(e);
}

static void open_rig(struct rig *r, const char *answer)
{
    rig_open(r);
    r->o.max_model_len = 1024;
    r->o.max_n = 32;
    r->o.reasoning = reasoning_format_find(STR("think"));
    r->o.tools = tool_format_find(STR("hermes"));
    if (answer) rig_set_answer(r, answer);
    r->fake.node = 0xabc;
    r->fake.model_bits = 0xb1;
    rig_start(r);
}

static void check_has_ids(const struct events *e)
{
    CHECK(e->n >= 2);
    for (int i = 0; i < e->n; i++) {
        bool done = str_eq_c(e->all[i], "data: [DONE]\n\n");
        CHECK((e->id[i].n == 0) == done && done == (i + 1 == e->n));
    }
}

/* One choice: everything after event i is the rest. */
static void check_every_cut(struct rig *r, const char *path, const char *body)
{
    struct events *whole = stream(r, path, WANTED, (struct str){ 0 }, body);
    if (whole->a.status != 200) test_fail(__FILE__, __LINE__, "%s", whole->a.body.data);
    check_has_ids(whole);
    for (int i = 0; i + 1 < whole->n; i++) {
        struct events *rest = stream(r, path, "", whole->id[i], body);
        CHECK_EQ_INT(rest->a.status, 200);
        CHECK_EQ_INT(rest->n, whole->n - i - 1);
        for (int k = 0; k < rest->n; k++)
            if (!str_eq(rest->all[k], whole->all[i + 1 + k]))
                test_fail(__FILE__, __LINE__, "after %.*s\n%.*s is not\n%.*s",
                          STR_ARG(whole->id[i]), STR_ARG(rest->all[k]),
                          STR_ARG(whole->all[i + 1 + k]));
        events_free(rest);
    }
    events_free(whole);
}

TEST(resumed_after_every_event)
{
    static const struct {
        const char *path, *answer, *body;
    } rows[] = {
        { COMPLETIONS, "Hello there, world", "{\"prompt\":\"x\",\"stream\":true}" },
        { COMPLETIONS, "Hello there, world",
          "{\"prompt\":[43,72,79],\"stream\":true,\"echo\":true,\"logprobs\":2,\"max_tokens\":9,"
          "\"return_token_ids\":true}" },
        { COMPLETIONS, "Hello there, world",
          "{\"prompt\":\"x\",\"stream\":true,\"stop\":[\"there, wo\"],\"max_tokens\":50,"
          "\"stream_options\":{\"include_usage\":true}}" },
        { COMPLETIONS, "a\xE2\x82\xAC\xF0\x9F\x98\x80z", "{\"prompt\":\"x\",\"stream\":true}" },
        { COMPLETIONS, "Hello",
          "{\"prompt\":\"x\",\"stream\":true,\"max_tokens\":0,\"echo\":true}" },
        { CHAT, "Hello there, world",
          "{" MESSAGES ",\"stream\":true,\"logprobs\":true,\"top_logprobs\":3,\"stream_options\":{"
          "\"include_usage\":true,\"continuous_usage_stats\":true}}" },
        { CHAT, "<think>\nLet me see.\n</think>\n\nYes.",
          "{" MESSAGES ",\"stream\":true,\"stream_options\":{\"include_usage\":true}}" },
        { CHAT,
          "I call <tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>"
          "<tool_call>\n{\"name\": \"look\", \"arguments\": {}}\n</tool_call>",
          "{" MESSAGES ",\"stream\":true,\"max_tokens\":200,\"tools\":[{\"type\":\"function\","
          "\"function\":{\"name\":\"add\"}},{\"type\":\"function\",\"function\":{\"name\":\"look\"}"
          "}]}" },
    };
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        struct rig r;
        open_rig(&r, rows[i].answer);
        if (rows[i].path == COMPLETIONS) r.fake.node = 0; /* a node that keeps nothing */
        check_every_cut(&r, rows[i].path, rows[i].body);
        rig_close(&r);
    }
}

/* Several choices come in any order; what comes of each is the rest of it. */
TEST(resumed_with_several_choices)
{
    struct rig r;
    struct buf want = { 0 }, got = { 0 };
    static const char body[] = "{" MESSAGES ",\"stream\":true,\"n\":3,\"stream_options\":{"
                               "\"include_usage\":true}}";
    open_rig(&r, "Hello there, world");
    struct events *whole = stream(&r, CHAT, WANTED, (struct str){ 0 }, body);
    check_has_ids(whole);
    for (int i = 0; i + 1 < whole->n; i += 5) {
        struct events *rest = stream(&r, CHAT, "", whole->id[i], body);
        CHECK_EQ_INT(rest->n, whole->n - i - 1);
        for (int choice = -1; choice < 3; choice++) { /* -1: the usage and [DONE] */
            char index[32];
            snprintf(index, sizeof index, "{\"index\":%d,", choice);
            buf_clear(&want);
            buf_clear(&got);
            for (int k = 0; k < whole->n; k++) {
                struct str data = str_sub(whole->all[k], whole->id[k].n ? whole->id[k].n + 5 : 0,
                                          SIZE_MAX);
                bool of = choice < 0 ? str_find(data, STR("{\"index\":")) == SIZE_MAX
                                     : str_find(data, str_of(index)) != SIZE_MAX;
                if (of) buf_add_str(&want, data);
                if (of && k <= i) buf_add_str(&got, data);
            }
            for (int k = 0; k < rest->n; k++) {
                struct str data = str_sub(rest->all[k], rest->id[k].n ? rest->id[k].n + 5 : 0,
                                          SIZE_MAX);
                bool of = choice < 0 ? str_find(data, STR("{\"index\":")) == SIZE_MAX
                                     : str_find(data, str_of(index)) != SIZE_MAX;
                if (of) buf_add_str(&got, data);
            }
            CHECK_EQ_STR(got.data, want.data);
        }
        events_free(rest);
    }
    buf_release(&want);
    buf_release(&got);
    events_free(whole);
    rig_close(&r);
}

TEST(complete_answer_is_not_computed_again)
{
    struct rig r;
    static const char body[] = "{" MESSAGES ",\"stream\":true,\"stream_options\":{"
                               "\"include_usage\":true}}";
    open_rig(&r, "<think>\nSo.\n</think>\n\nYes.");
    struct events *whole = stream(&r, CHAT, WANTED, (struct str){ 0 }, body);
    uint32_t n = r.fake.n_submitted;
    /* After the finish: the usage, of what the handle says. After the usage: [DONE] alone. */
    for (int left = 2; left > 0; left--) {
        struct events *rest = stream(&r, CHAT, "", whole->id[whole->n - 1 - left], body);
        CHECK_EQ_INT(rest->n, left);
        CHECK(str_eq(rest->all[0], whole->all[whole->n - left]));
        events_free(rest);
    }
    CHECK_EQ_INT(r.fake.n_submitted, n);
    events_free(whole);
    rig_close(&r);
}

/* A template that shows the time shows that of the answer, however late its client comes back. */
TEST(time_in_the_prompt_stays)
{
    struct rig r;
    struct err err = { 0 };
    static const char template[] = "{{ strftime_now('%H:%M:%S') }}{{ messages[0].content }}";
    rig_open(&r);
    chat_free(r.chat);
    CHECK_OK(chat_create(&(struct chat_source){ .template = STR(template), .bos = "", .eos = "" },
                         &r.chat, &err));
    r.o.chat = r.chat;
    rig_start(&r);
    struct events *whole = stream(&r, CHAT, WANTED, (struct str){ 0 },
                                  "{" MESSAGES ",\"stream\":true}");
    usleep(1100 * 1000);
    struct events *rest = stream(&r, CHAT, "", whole->id[0], "{" MESSAGES ",\"stream\":true}");
    CHECK_EQ_INT(rest->a.status, 200);
    CHECK_EQ_INT(rest->n, whole->n - 1);
    events_free(rest);
    events_free(whole);
    rig_close(&r);
}

/* Not a byte is other without the header, whatever the name. */
TEST(streams_without_the_header_have_no_ids)
{
    struct rig r;
    struct buf want = { 0 };
    static const char body[] = "{" MESSAGES ",\"stream\":true,\"stream_options\":{"
                               "\"include_usage\":true}}";
    open_rig(&r, "<think>\nSo.\n</think>\n\nYes.");
    struct events *with = stream(&r, CHAT, WANTED, (struct str){ 0 }, body),
                  *without = stream(&r, CHAT, "x-request-id: one\r\nx-baton-resume: 0\r\n",
                                    (struct str){ 0 }, body);
    for (int i = 0; i < with->n; i++)
        buf_add_str(&want, str_sub(with->all[i], with->id[i].n ? with->id[i].n + 5 : 0, SIZE_MAX));
    /* They may have begun in different seconds. */
    char *a = strstr(want.data, "\"created\":"), *b = strstr(without->a.raw.data, "\"created\":");
    if (strncmp(a, b, 20) == 0) CHECK_EQ_STR(without->a.raw.data, want.data);
    else CHECK_EQ_INT(without->a.raw.len, want.len);
    CHECK(!r.fake.last.resume.wanted);
    CHECK(strstr(without->a.raw.data, "id: ") == NULL);
    buf_release(&want);
    events_free(with);
    events_free(without);
    rig_close(&r);
}

/* ---- refusals ---- */

static void check_refused(struct rig *r, const char *path, const char *headers, struct str last,
                          const char *body, const char *param, const char *says)
{
    struct events *e = stream(r, path, headers, last, body);
    CHECK_EQ_INT(e->a.status, 400);
    CHECK_EQ_STR(string_at(e->a.json, "error.param"), param);
    if (!strstr(string_at(e->a.json, "error.message"), says))
        test_fail(__FILE__, __LINE__, "%s: %s", says, string_at(e->a.json, "error.message"));
    events_free(e);
}

TEST(what_does_not_fit_the_handle_is_refused)
{
    struct rig r;
    static const char body[] = "{" MESSAGES ",\"stream\":true}";
    open_rig(&r, NULL);
    struct events *whole = stream(&r, CHAT, WANTED, (struct str){ 0 }, body);
    struct str id = whole->id[1];
    uint32_t n = r.fake.n_submitted;
    check_refused(&r, CHAT, "", STR("17"), body, "Last-Event-ID", "'17'");
    check_refused(&r, CHAT, "", id, "{" MESSAGES "}", "Last-Event-ID", "x-request-id");
    check_refused(&r, CHAT, "", id, "{" MESSAGES ",\"stream\":true,\"n\":2}", "Last-Event-ID",
                  "another request");
    check_refused(&r, CHAT, "", id, "{" MESSAGES ",\"stream\":true,\"top_p\":0.5}", "Last-Event-ID",
                  "another request");
    check_refused(&r, COMPLETIONS, "", id, "{\"prompt\":\"Hi\",\"stream\":true}", "Last-Event-ID",
                  "another request");
    check_refused(&r, COMPLETIONS, WANTED, (struct str){ 0 },
                  "{\"prompt\":[\"a\",\"b\",\"c\"],\"n\":6,\"stream\":true}", "x-baton-resume",
                  "18 choices");
    CHECK_EQ_INT(r.fake.n_submitted, n);
    /* What a client says that wants to resume is never passed over in silence. */
    check_refused(&r, CHAT, "x-baton-resume: true\r\n", (struct str){ 0 }, body, "x-baton-resume",
                  "x-baton-resume is 'true', but must be 1");
    check_refused(&r, CHAT, "x-baton-resume: 1\r\nx-request-id: my name\r\n", (struct str){ 0 },
                  "{" MESSAGES "}", "x-request-id", "x-request-id is 'my name'");
    CHECK_EQ_INT(r.fake.n_submitted, n);
    struct events *named = stream(&r, CHAT, "x-baton-resume: 1\r\nx-request-id: my name\r\n",
                                  (struct str){ 0 }, "{" MESSAGES ",\"request_id\":\"r\"}");
    CHECK_EQ_INT(named->a.status, 200);
    events_free(named);
    /* Paths without events, and an empty id, have nothing to resume. */
    struct events *e = stream(&r, "/tokenize", "Last-Event-ID: 17\r\n", (struct str){ 0 },
                              "{\"prompt\":\"a\"}");
    CHECK_EQ_INT(e->a.status, 200);
    events_free(e);
    e = stream(&r, CHAT, "Last-Event-ID:\r\n", (struct str){ 0 }, body);
    CHECK_EQ_INT(e->a.status, 200);
    CHECK(strstr(e->a.raw.data, "id: ") == NULL);
    events_free(e);
    events_free(whole);
    rig_close(&r);
}

/* ---- what the backend is told ---- */

static struct gen_resume told(struct rig *r, const char *headers, const char *body)
{
    struct events *e = stream(r, CHAT, headers, (struct str){ 0 }, body);
    CHECK_EQ_INT(e->a.status, 200);
    events_free(e);
    return r->fake.last.resume;
}

#define ALICE "Authorization: Bearer alice\r\n"

TEST(keys_are_of_one_request_and_one_client)
{
    struct rig r;
    static const char body[] = "{" MESSAGES "}", other[] = "{" MESSAGES ",\"top_p\":0.5}";
    open_rig(&r, NULL);
    struct gen_resume a = told(&r, WANTED ALICE, body);
    CHECK(a.wanted && a.asks_all && !a.returns);
    CHECK(hash128_eq(told(&r, WANTED ALICE, body).key, a.key));
    CHECK(!hash128_eq(told(&r, WANTED, body).key, a.key));
    CHECK(!hash128_eq(told(&r, WANTED "Authorization: Bearer bob\r\n", body).key, a.key));
    CHECK(!hash128_eq(told(&r, WANTED ALICE, other).key, a.key));
    CHECK(
        !hash128_eq(told(&r, "x-baton-resume: 1\r\nx-request-id: two\r\n" ALICE, body).key, a.key));
    /* A request that its client could not repeat by name, or whose handle will say where it is. */
    CHECK(!told(&r, "x-baton-resume: 1\r\n", body).asks_all);
    CHECK(!told(&r, WANTED, "{" MESSAGES ",\"stream\":true}").asks_all);
    CHECK(told(&r, "x-baton-resume: 1\r\n", "{" MESSAGES ",\"request_id\":\"r\"}").asks_all);
    CHECK(!told(&r, "", body).wanted);
    rig_close(&r);
}

TEST(handle_tells_the_backend_what_the_client_has)
{
    struct rig r;
    static const char body[] = "{" MESSAGES ",\"stream\":true}";
    open_rig(&r, NULL);
    struct events *whole = stream(&r, CHAT, WANTED ALICE, (struct str){ 0 }, body);
    struct hash128 key = r.fake.last.resume.key;
    struct events *rest = stream(&r, CHAT, ALICE, whole->id[2], body);
    struct gen_resume g = r.fake.last.resume;
    CHECK(g.wanted && g.returns && !g.asks_all && hash128_eq(g.key, key));
    CHECK_EQ_INT(g.node, 0xabc);
    CHECK_EQ_INT(g.n_delivered, 3);
    CHECK_EQ_INT(g.model_bits, 0xb1);
    CHECK_EQ_STR(r.fake.last_name, "one");
    CHECK(answer_has_header(&rest->a, "x-request-id: one"));
    events_free(rest);
    events_free(whole);
    rig_close(&r);
}

static void check_goes_on(struct rig *r, const struct events *whole, const char *headers,
                          const char *body)
{
    struct events *rest = stream(r, CHAT, headers, whole->id[2], body);
    CHECK_EQ_INT(rest->a.status, 200);
    CHECK_EQ_INT(rest->n, whole->n - 3);
    for (int i = 0; i < rest->n; i++) CHECK(str_eq(rest->all[i], whole->all[i + 3]));
    events_free(rest);
}

/* Not every client has x-request-id in its hands: a proxy makes one for each connection, and one
 * that cannot be a name never was that of the request. The handle's name counts. */
TEST(x_request_id_does_not_count_beside_a_handle)
{
    struct rig r;
    struct buf long_name = { 0 };
    static const char body[] = "{" MESSAGES ",\"stream\":true}",
                      slash[] = "x-request-id: trace:abc/1\r\n";
    open_rig(&r, "Hello there, world");
    struct events *whole = stream(&r, CHAT, WANTED, (struct str){ 0 }, body);
    buf_add_c(&long_name, "x-request-id: ");
    for (int i = 0; i < 129; i++) buf_add_char(&long_name, 'a');
    buf_add_c(&long_name, "\r\n");
    check_goes_on(&r, whole, "x-request-id: two\r\n", body);
    CHECK_EQ_STR(r.fake.last_name, "one");
    check_goes_on(&r, whole, slash, body);
    check_goes_on(&r, whole, long_name.data, body);
    events_free(whole);
    whole = stream(&r, CHAT, "x-request-id: trace:abc/1\r\nx-baton-resume: 1\r\n",
                   (struct str){ 0 }, body);
    check_goes_on(&r, whole, slash, body);
    events_free(whole);
    buf_release(&long_name);
    rig_close(&r);
}

/* With another's handle: another body is refused, and another API key finds nothing. */
TEST(handle_of_another_gives_nothing)
{
    struct rig r;
    static const char body[] = "{" MESSAGES ",\"stream\":true}";
    open_rig(&r, NULL);
    struct events *whole = stream(&r, CHAT, WANTED ALICE, (struct str){ 0 }, body);
    const struct hash128 key = r.fake.last.resume.key;
    const uint32_t n = r.fake.n_submitted;
    check_refused(&r, CHAT, "x-request-id: two\r\n" ALICE, whole->id[2],
                  "{" MESSAGES ",\"stream\":true,\"seed\":1}", "Last-Event-ID", "another request");
    CHECK_EQ_INT(r.fake.n_submitted, n);
    struct events *bobs = stream(&r, CHAT, "x-request-id: one\r\nAuthorization: Bearer bob\r\n",
                                 whole->id[2], body);
    CHECK_EQ_INT(bobs->a.status, 200);
    CHECK(!hash128_eq(r.fake.last.resume.key, key));
    events_free(bobs);
    events_free(whole);
    rig_close(&r);
}

/* The first and the last handle of a stream. */
static void check_handles(struct rig *r, const char *body, uint64_t first, uint64_t last)
{
    struct events *e = stream(r, COMPLETIONS, WANTED, (struct str){ 0 }, body);
    struct resume_handle h;
    CHECK(e->n > 4);
    CHECK_OK(resume_handle_read(e->id[0], &h, NULL));
    CHECK_EQ_INT(h.model_bits, first);
    CHECK_OK(resume_handle_read(e->id[e->n - 2], &h, NULL));
    CHECK_EQ_INT(h.model_bits, last);
    events_free(e);
}

/* A handle names the model of what would have to be computed again, if it is one. */
TEST(handle_names_the_model)
{
    struct rig r;
    static const char two[] = "{\"prompt\":\"x\",\"stream\":true,\"n\":2}";
    open_rig(&r, "Hello there, world");
    check_handles(&r, "{\"prompt\":\"x\",\"stream\":true}", 0xb1, 0); /* all of it was sent */
    check_handles(&r, two, 0xb1, 0);
    r.fake.models_differ = true;
    struct events *e = stream(&r, COMPLETIONS, WANTED, (struct str){ 0 }, two);
    struct resume_handle h;
    CHECK_OK(resume_handle_read(e->id[e->n / 2], &h, NULL));
    CHECK(h.choices[0].n_tokens && h.choices[1].n_tokens);
    CHECK_EQ_INT(h.model_bits, 0);
    events_free(e);
    rig_close(&r);
}

TEST(seed_is_made_from_the_name)
{
    struct rig r;
    static const char body[] = "{" MESSAGES "}";
    static const char *const headers[] = { "x-request-id: one\r\n", "x-request-id: one\r\n",
                                           "x-request-id: two\r\n", "", "" };
    uint64_t seeds[COUNT_OF(headers)];
    open_rig(&r, NULL);
    for (size_t i = 0; i < COUNT_OF(headers); i++) {
        told(&r, headers[i], body);
        seeds[i] = r.fake.last.sampling.seed;
    }
    CHECK(seeds[0] == seeds[1]);
    CHECK(seeds[0] != seeds[2] && seeds[0] != seeds[3] && seeds[3] != seeds[4]);
    told(&r, "", "{" MESSAGES ",\"request_id\":\"one\"}");
    CHECK(r.fake.last.sampling.seed == seeds[0]);
    told(&r, "x-request-id: one\r\n", "{" MESSAGES ",\"seed\":5}");
    CHECK_EQ_INT(r.fake.last.sampling.seed, 5);
    rig_close(&r);
}

/* A failure is no event of the answer: the client goes on from the one before. */
TEST(error_has_no_id)
{
    struct rig r;
    static const char body[] = "{" MESSAGES ",\"stream\":true}";
    open_rig(&r, "Hello there, world");
    r.fake.fail = ERR_UNAVAILABLE;
    r.fake.fail_after = 3;
    struct events *e = stream(&r, CHAT, WANTED, (struct str){ 0 }, body);
    CHECK_EQ_INT(e->n, 5);
    CHECK(e->id[2].n && !e->id[3].n && !e->id[4].n);
    CHECK(str_find(e->all[3], STR("\"error\"")) != SIZE_MAX);
    r.fake.fail = OK;
    struct events *whole = stream(&r, CHAT, WANTED, (struct str){ 0 }, body),
                  *rest = stream(&r, CHAT, "", e->id[2], body);
    CHECK_EQ_INT(rest->n, whole->n - 3);
    events_free(e);
    events_free(whole);
    events_free(rest);
    rig_close(&r);
}

TEST_MAIN(CASE(handle_round_trip), CASE(handle_has_its_parts), CASE(handle_that_is_none_is_refused),
          CASE(resumed_after_every_event), CASE(resumed_with_several_choices),
          CASE(complete_answer_is_not_computed_again), CASE(time_in_the_prompt_stays),
          CASE(streams_without_the_header_have_no_ids),
          CASE(what_does_not_fit_the_handle_is_refused),
          CASE(keys_are_of_one_request_and_one_client),
          CASE(handle_tells_the_backend_what_the_client_has),
          CASE(x_request_id_does_not_count_beside_a_handle), CASE(handle_of_another_gives_nothing),
          CASE(handle_names_the_model), CASE(seed_is_made_from_the_name), CASE(error_has_no_id))
