/* test_recent.c - tokens per second and the last failures. */
#include "scheduler/recent.h"

#include <string.h>

#include "tests/harness/test.h"

TEST(rate_is_the_mean_of_whole_seconds)
{
    struct recent r = { 0 };
    uint64_t t0 = 5000000;
    CHECK_NEAR(recent_tokens_per_s(&r, t0), 0, 0);
    for (int s = 0; s < 30; s++)
        for (int i = 0; i < 20; i++)
            recent_add_token(&r, t0 + (uint64_t)s * 1000 + (uint64_t)i * 40);
    CHECK_NEAR(recent_tokens_per_s(&r, t0 + 29999), 20, 0);
    CHECK_NEAR(recent_tokens_per_s(&r, t0 + 30000), 20, 0);
    CHECK_NEAR(recent_tokens_per_s(&r, t0 + 35000), 10, 0); /* nothing came for five seconds */
    CHECK_NEAR(recent_tokens_per_s(&r, t0 + 40000), 0, 0);
    CHECK_NEAR(recent_tokens_per_s(&r, t0 + 4000000), 0, 0);
    recent_add_token(&r, t0 + 4000000); /* old seconds do not come back */
    CHECK_NEAR(recent_tokens_per_s(&r, t0 + 4001000), 0.1, 1e-9);
}

TEST(last_failures_newest_first)
{
    struct recent r = { 0 };
    struct buf b = { 0 };
    recent_write_failures(&r, 0, &b);
    CHECK_EQ_STR(b.data, "[]");
    static const char *const texts[] = { "a", "b", "b", "c", "d", "e" };
    for (int i = 0; i < 6; i++)
        recent_add_failure(&r, (uint64_t)i * 1000 + 1, ERR_UNAVAILABLE, texts[i]);
    buf_clear(&b);
    recent_write_failures(&r, 10001, &b);
    CHECK(strstr(b.data, "[{\"ago_s\":5,\"status\":"));
    const char *e = strstr(b.data, "\"e\""), *d = strstr(b.data, "\"d\""),
               *c = strstr(b.data, "\"c\""), *last = strstr(b.data, "\"b\"");
    CHECK(e && d && c && last && e < d && d < c && c < last);
    CHECK(!strstr(b.data, "\"a\"") && !strstr(last + 1, "\"b\""));
    buf_release(&b);
}

TEST_MAIN(CASE(rate_is_the_mean_of_whole_seconds), CASE(last_failures_newest_first))
