/* test_answer_size.c - whole answers are bounded: refused before anything is computed when they are
 * certain to be too long, and ended when they become so. */
#include "tests/unit/serve/serve_rig.h"

#define CHAT        "/v1/chat/completions"
#define COMPLETIONS "/v1/completions"
#define MESSAGES    "\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]"

/* {"prompt":[[405,405,..],..]MORE} with n_prompts prompts of n_tokens tokens. */
static struct answer ask_ids(struct rig *r, int n_prompts, int n_tokens, const char *more)
{
    struct buf body = { 0 };
    buf_add_c(&body, "{\"prompt\":[");
    for (int i = 0; i < n_prompts; i++) {
        buf_add_c(&body, i ? ",[405" : "[405");
        for (int k = 1; k < n_tokens; k++) buf_add_c(&body, ",405");
        buf_add_char(&body, ']');
    }
    buf_printf(&body, "]%s}", more);
    struct answer a = rig_submit(r, COMPLETIONS, body.data);
    buf_release(&body);
    return a;
}

static void check_refused(struct answer *a, const char *param, const char *text)
{
    if (a->status != 400 || strcmp(string_at(a->json, "error.param"), param) != 0 ||
        !strstr(string_at(a->json, "error.message"), text))
        test_fail(__FILE__, __LINE__, "wanted 400, %s and \"%s\", got %d %.400s", param, text,
                  a->status, a->body.data);
    answer_free(a);
}

/* 0.8 MB of request, 560 MiB of answer. */
TEST(prompt_logprobs_of_many_prompts_are_refused)
{
    struct rig r;
    rig_open(&r);
    r.o.max_prompts = 2048;
    rig_start(&r);
    struct answer a = ask_ids(&r, 2048, 196, ",\"max_tokens\":1,\"prompt_logprobs\":20");
    check_refused(
        &a, "prompt_logprobs",
        "(401408 tokens of 2048 prompts with n = 1, and 21 logprobs of each), but at most "
        "64 MiB are possible");
    CHECK_EQ_INT(r.fake.n_submitted, 0);
    rig_close(&r);
}

TEST(answers_that_are_certain_to_be_too_long_are_refused)
{
    static const struct {
        const char *more, *param;
    } rows[] = {
        { ",\"max_tokens\":1,\"prompt_logprobs\":20", "prompt_logprobs" },
        { ",\"max_tokens\":1,\"prompt_logprobs\":3,\"n\":8", "prompt_logprobs" },
        { ",\"max_tokens\":1,\"echo\":true,\"logprobs\":20,\"n\":4", "logprobs" },
        { ",\"stream\":true,\"echo\":true,\"logprobs\":20,\"n\":4", "logprobs" },
        { ",\"max_tokens\":100,\"ignore_eos\":true,\"logprobs\":20,\"n\":4", "logprobs" },
        { ",\"max_tokens\":100,\"min_tokens\":100,\"logprobs\":20,\"n\":4", "logprobs" },
    };
    struct rig r;
    rig_open(&r);
    r.o.max_answer = 100000;
    rig_start(&r);
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        struct answer a = ask_ids(&r, 1, 100, rows[i].more);
        check_refused(&a, rows[i].param, "but at most 100000 bytes are possible");
    }
    CHECK_EQ_INT(r.fake.n_submitted, 0);
    /* A limit of tokens that the model may end before is not certain. */
    struct answer a = ask_ids(&r, 1, 100, ",\"max_tokens\":100,\"logprobs\":20,\"n\":4");
    CHECK_EQ_INT(a.status, 200);
    CHECK(a.body.len < 100000);
    answer_free(&a);
    a = ask_ids(&r, 1, 100, ",\"max_tokens\":1,\"prompt_logprobs\":5");
    CHECK_EQ_INT(a.status, 200);
    CHECK(a.body.len < 100000 && a.body.len > 20000);
    answer_free(&a);
    rig_close(&r);
}

TEST(estimates_are_near_the_lengths_of_real_answers)
{
    static const char *const rows[] = {
        ",\"max_tokens\":1,\"prompt_logprobs\":20",
        ",\"max_tokens\":1,\"echo\":true,\"logprobs\":20",
        ",\"max_tokens\":1,\"return_token_ids\":true,\"n\":4",
    };
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        struct rig r;
        rig_open(&r);
        rig_start(&r);
        struct answer a = ask_ids(&r, 4, 200, rows[i]);
        CHECK_EQ_INT(a.status, 200);
        size_t n = a.body.len;
        answer_free(&a);
        rig_close(&r);
        rig_open(&r);
        r.o.max_answer = n / 2;
        rig_start(&r);
        a = ask_ids(&r, 4, 200, rows[i]);
        if (a.status != 400) test_fail(__FILE__, __LINE__, "%s: %zu bytes were taken", rows[i], n);
        answer_free(&a);
        rig_close(&r);
        rig_open(&r);
        r.o.max_answer = n * 2;
        rig_start(&r);
        a = ask_ids(&r, 4, 200, rows[i]);
        if (a.status != 200) test_fail(__FILE__, __LINE__, "%zu bytes: %s", n, a.body.data);
        answer_free(&a);
        rig_close(&r);
    }
}

TEST(an_answer_that_becomes_too_long_ends_with_its_work)
{
    struct rig r;
    rig_open(&r);
    r.o.max_answer = 100000;
    rig_start(&r);
    r.fake.n_answer = 10;
    struct answer a = rig_submit(&r, CHAT,
                                 "{" MESSAGES ",\"ignore_eos\":true,\"logprobs\":true,"
                                 "\"top_logprobs\":20,\"n\":2}");
    check_refused(&a, "top_logprobs", "but at most 100000 bytes are possible");
    for (int i = 0; i < 1000 && r.fake.n_live; i++) rig_turn(&r);
    CHECK_EQ_INT(r.fake.n_live, 0);
    CHECK_EQ_INT(r.fake.n_canceled, 2);
    /* A stream holds no more than a chunk. */
    a = rig_submit(&r, CHAT,
                   "{" MESSAGES ",\"ignore_eos\":true,\"logprobs\":true,\"top_logprobs\":20,"
                   "\"stream\":true}");
    CHECK(a.ended && a.body.len > 200000);
    answer_free(&a);
    rig_close(&r);
    rig_open(&r);
    r.o.max_answer = 400;
    rig_start(&r);
    r.fake.n_answer = 10;
    a = rig_submit(&r, CHAT, "{" MESSAGES ",\"ignore_eos\":true}");
    check_refused(&a, "max_tokens", "but at most 400 bytes are possible");
    rig_close(&r);
}

TEST(long_answers_in_the_making_are_bounded_together)
{
    enum { N = 9 };
    static const char body[] = "{\"prompt\":[5,5,5,5,5,5,5,5,5,5],\"max_tokens\":1,"
                               "\"prompt_logprobs\":20}"; /* 14,700 bytes and the spellings */
    struct rig r;
    struct answer a[N] = { 0 };
    rig_open(&r);
    r.o.max_answer = 16000;
    rig_start(&r);
    r.fake.hold = true;
    for (int i = 0; i < N; i++) {
        (void)rig_begin(&r, COMPLETIONS, STR(body), NULL, &a[i]);
        for (int k = 0; k < 20000 && r.fake.n_submitted <= (unsigned)i && !a[i].done; k++)
            rig_turn(&r);
    }
    CHECK_EQ_INT(r.fake.n_submitted, N - 1);
    CHECK_EQ_INT(a[N - 1].status, 429);
    CHECK(answer_has_header(&a[N - 1], "Retry-After: 1\r\n"));
    struct answer small = { 0 };
    (void)rig_begin(&r, COMPLETIONS, STR("{\"prompt\":\"x\"}"), NULL, &small);
    r.fake.hold = false;
    for (int k = 0; k < 20000 && (r.fake.n_live || !small.done); k++) rig_turn(&r);
    CHECK_EQ_INT(small.status, 200);
    answer_free(&small);
    for (int i = 0; i < N - 1; i++) CHECK_EQ_INT(a[i].status, 200);
    for (int i = 0; i < N; i++) answer_free(&a[i]);
    small = rig_submit(&r, COMPLETIONS, body);
    CHECK_EQ_INT(small.status, 200);
    answer_free(&small);
    rig_close(&r);
}

TEST(texts_and_ids_are_bounded)
{
    struct rig r;
    struct buf body = { 0 };
    rig_open(&r);
    r.o.max_answer = 3000;
    rig_start(&r);
    buf_add_c(&body, "{\"tokens\":[40");
    for (int i = 1; i < 4000; i++) buf_add_c(&body, ",40");
    buf_add_c(&body, "]}");
    struct answer a = rig_submit(&r, "/detokenize", body.data);
    check_refused(&a, "tokens", "but at most 3000 bytes are possible");
    a = rig_submit(&r, "/detokenize", "{\"tokens\":[40,41,42]}");
    CHECK_EQ_INT(a.status, 200);
    answer_free(&a);
    buf_clear(&body);
    buf_add_c(&body, "{\"return_token_strs\":true,\"prompt\":\"");
    for (int i = 0; i < 400; i++) buf_add_c(&body, "x ");
    buf_add_c(&body, "\"}");
    a = rig_submit(&r, "/tokenize", body.data);
    check_refused(&a, "return_token_strs", "but at most 3000 bytes are possible");
    buf_release(&body);
    rig_close(&r);
}

TEST_MAIN(CASE(prompt_logprobs_of_many_prompts_are_refused),
          CASE(answers_that_are_certain_to_be_too_long_are_refused),
          CASE(estimates_are_near_the_lengths_of_real_answers),
          CASE(an_answer_that_becomes_too_long_ends_with_its_work),
          CASE(long_answers_in_the_making_are_bounded_together), CASE(texts_and_ids_are_bounded))
