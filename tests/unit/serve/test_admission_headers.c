/* test_admission_headers.c - what a client says of when it wants its answer, and what it is told:
 * tenant, priority and limits on their way to the backend, refusals on their way back. */
#include "tests/unit/serve/serve_rig.h"

#include "shared/base/clock.h"

static const char PATH[] = "/v1/completions", BODY[] = "{\"prompt\":\"x\",\"max_tokens\":1}";

TEST(what_is_wanted_reaches_the_backend)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    uint64_t before = clock_ms();
    struct answer a = rig_request(
        &r, "POST", PATH,
        "x-baton-ttft-ms: 1500\r\nx-baton-deadline-ms: 60000\r\n"
        "x-baton-hedge-ms: 60000\r\nx-baton-retry: 1a2b.3.c\r\nx-stainless-retry-count: 2\r\n",
        "{\"prompt\":\"x\",\"max_tokens\":1,\"priority\":-7}");
    CHECK_EQ_INT(a.status, 200);
    const struct gen_admission *w = &r.fake.last.admission;
    CHECK(w->ttft_ms == 1500 && w->deadline_ms == 60000 && w->priority == -7);
    CHECK_EQ_INT(w->hedge_ms, 60000);
    CHECK(w->is_retry && !w->follows && w->tenant == 0);
    CHECK_EQ_STR(w->retry, "1a2b.3.c");
    CHECK(r.fake.last.deadline_ms >= before + 60000 &&
          r.fake.last.deadline_ms <= clock_ms() + 60000);
    answer_free(&a);
    a = rig_request(&r, "POST", PATH, "x-stainless-retry-count: 0\r\n", BODY);
    CHECK(w->ttft_ms == 0 && w->hedge_ms == 0 && w->priority == 0 && !w->is_retry && !w->retry[0]);
    CHECK_EQ_INT(r.fake.last.deadline_ms, 0);
    answer_free(&a);
    a = rig_request(&r, "POST", PATH, NULL, "{\"prompt\":\"x\",\"max_tokens\":1,\"n\":3}");
    CHECK(w->follows); /* the last of three is not the first */
    answer_free(&a);
    rig_close(&r);
}

TEST(what_cannot_be_wanted_is_refused_by_name)
{
    static const struct {
        const char *header, *body, *param, *says;
    } rows[] = {
        { "x-baton-ttft-ms: soon\r\n", BODY, "x-baton-ttft-ms", "'soon', but must be a whole" },
        { "x-baton-ttft-ms: 0\r\n", BODY, "x-baton-ttft-ms", "from 1 to 86400000" },
        { "x-baton-deadline-ms: 1.5\r\n", BODY, "x-baton-deadline-ms", "'1.5'" },
        { "x-baton-deadline-ms: -3\r\n", BODY, "x-baton-deadline-ms", "'-3'" },
        { "x-baton-hedge-ms: fast\r\n", BODY, "x-baton-hedge-ms", "'fast', but must be a whole" },
        { "x-baton-hedge-ms: 0\r\n", BODY, "x-baton-hedge-ms", "from 1 to 60000" },
        { "x-baton-hedge-ms: 60001\r\n", BODY, "x-baton-hedge-ms", "'60001'" },
        { "", "{\"prompt\":\"x\",\"priority\":\"high\"}", "priority", "priority" },
        { "", "{\"prompt\":\"x\",\"priority\":1e12}", "priority", "2147483647" },
    };
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        struct answer a = rig_request(&r, "POST", PATH, rows[i].header, rows[i].body);
        CHECK_EQ_INT(a.status, 400);
        CHECK_EQ_STR(string_at(a.json, "error.param"), rows[i].param);
        CHECK(strstr(string_at(a.json, "error.message"), rows[i].says));
        answer_free(&a);
    }
    CHECK_EQ_INT(r.fake.n_submitted, 0);
    rig_close(&r);
}

TEST(keys_are_tenants)
{
    struct tenants t;
    struct rig r;
    tenants_init(&t);
    CHECK_OK(tenants_parse(&t, STR("a key-a\nb key-b\nb key-b2\n"), "keys", NULL));
    rig_open(&r);
    r.o.tenants = &t;
    rig_start(&r);
    static const struct {
        const char *header;
        uint32_t tenant;
    } rows[] = { { "Authorization: Bearer key-a\r\n", 1 },
                 { "Authorization: Bearer key-b\r\n", 2 },
                 { "Authorization: Bearer key-b2\r\n", 2 } };
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        struct answer a = rig_request(&r, "POST", PATH, rows[i].header, BODY);
        CHECK_EQ_INT(a.status, 200);
        CHECK_EQ_INT(r.fake.last.admission.tenant, rows[i].tenant);
        CHECK_EQ_INT(r.fake.limits_of, rows[i].tenant);
        CHECK(!answer_has_header(&a, "x-ratelimit-")); /* it has no limits */
        answer_free(&a);
    }
    struct answer a = rig_request(&r, "POST", PATH, "Authorization: Bearer key\r\n", BODY);
    CHECK_EQ_INT(a.status, 401);
    answer_free(&a);
    rig_close(&r);
    tenants_release(&t);
}

TEST(answers_say_what_is_left_of_the_limits)
{
    static const char *const bodies[] = { BODY,
                                          "{\"prompt\":\"x\",\"max_tokens\":1,\"stream\":true}" };
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    r.fake.limits = (struct gen_limits){ .requests = 60,
                                         .requests_left = 59,
                                         .requests_reset_s = 12,
                                         .tokens = 5000,
                                         .tokens_left = 0,
                                         .tokens_reset_s = 60 };
    for (size_t i = 0; i < 3; i++) {
        r.fake.refuse = i == 2 ? ERR_FULL : OK;
        struct answer a = rig_request(&r, "POST", PATH, NULL, bodies[i % 2]);
        CHECK_EQ_INT(a.status, i == 2 ? 429 : 200);
        CHECK(answer_has_header(&a, "x-ratelimit-limit-requests: 60\r\n"));
        CHECK(answer_has_header(&a, "x-ratelimit-remaining-requests: 59\r\n"));
        CHECK(answer_has_header(&a, "x-ratelimit-reset-requests: 12s\r\n"));
        CHECK(answer_has_header(&a, "x-ratelimit-limit-tokens: 5000\r\n"));
        CHECK(answer_has_header(&a, "x-ratelimit-remaining-tokens: 0\r\n"));
        CHECK(answer_has_header(&a, "x-ratelimit-reset-tokens: 60s\r\n"));
        answer_free(&a);
    }
    rig_close(&r);
}

TEST(refusals_say_when_to_come_again)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    r.fake.refuse = ERR_BUSY;
    r.fake.retry_after_s = 17;
    r.fake.retry = "abc.1.def";
    r.fake.takes_others = true;
    struct answer a = rig_request(&r, "POST", PATH, NULL, BODY);
    CHECK_EQ_INT(a.status, 429);
    CHECK_EQ_STR(string_at(a.json, "error.code"), "rate_limit_exceeded");
    CHECK(answer_has_header(&a, "Retry-After: 17\r\nretry-after-ms: 17000\r\n"));
    CHECK(answer_has_header(&a, "x-baton-retry: abc.1.def\r\n"));
    CHECK(!answer_has_header(&a, "x-should-retry"));
    CHECK(answer_has_header(&a, "x-baton-has-room: 1\r\n")); /* for others than this client */
    answer_free(&a);
    r.fake.retry_after_s = 81; /* of which OpenAI's libraries would make half a second */
    a = rig_request(&r, "POST", PATH, NULL, BODY);
    CHECK(answer_has_header(&a, "Retry-After: 81\r\nretry-after-ms: 60000\r\n"));
    answer_free(&a);
    r.fake.takes_others = false; /* the line is too long for anybody, ... */
    a = rig_request(&r, "POST", PATH, NULL, BODY);
    CHECK_EQ_INT(a.status, 429);
    CHECK(!answer_has_header(&a, "x-baton-has-room"));
    answer_free(&a);
    r.fake.refuse = OK;
    for (int own = 0; own < 2; own++) { /* ... likewise of one that has waited */
        r.fake.takes_others = own;
        r.fake.fail = ERR_BUSY;
        a = rig_request(&r, "POST", PATH, NULL, BODY);
        CHECK_EQ_INT(a.status, 429);
        CHECK(answer_has_header(&a, "x-baton-has-room: 1\r\n") == own);
        answer_free(&a);
    }
    r.fake.refuse = ERR_TIMEOUT; /* to ask again as before would end as before */
    a = rig_request(&r, "POST", PATH, NULL, BODY);
    CHECK_EQ_INT(a.status, 504);
    CHECK(answer_has_header(&a, "x-should-retry: false\r\n"));
    CHECK(!answer_has_header(&a, "Retry-After"));
    answer_free(&a);
    rig_close(&r);
}

TEST_MAIN(CASE(what_is_wanted_reaches_the_backend), CASE(what_cannot_be_wanted_is_refused_by_name),
          CASE(keys_are_tenants), CASE(answers_say_what_is_left_of_the_limits),
          CASE(refusals_say_when_to_come_again))
