/* test_unproven.c - who gives a place up for whom. */
#include <arpa/inet.h>

#include "shared/base/address/unproven.h"
#include "tests/harness/test.h"

TEST(unproven_the_oldest_of_the_source_with_most_gives_way)
{
    enum { N = 8 };
    struct unproven u;
    struct unproven_place p[N] = { 0 }, flood = { 0 }, peer = { 0 }, other = { 0 };
    unproven_init(&u, N);
    CHECK_EQ_INT(u.n_max_per_source, 4);
    /* source 1: p0 p2 p4, source 2: p1 p3, sources 3, 4, 5: p5 p6 p7 */
    const uint64_t sources[N] = { 1, 2, 1, 2, 1, 3, 4, 5 };
    for (int i = 0; i < N; i++) CHECK(unproven_enter(&u, &p[i], sources[i]) == NULL);
    CHECK(unproven_enter(&u, &peer, 9) == &p[0]);
    CHECK(p[0].of == NULL && u.n == N);
    CHECK(unproven_enter(&u, &flood, 5) == &p[1]); /* 1 and 2 have two each; p2, p3 stay */
    CHECK(unproven_enter(&u, &other, 6) == &p[2]); /* of 1, the first to have two; 5 has two too */
    unproven_leave(&peer);
    unproven_leave(&peer); /* harmless */
    CHECK_EQ_INT(u.n, N - 1);
    CHECK(unproven_enter(&u, &peer, 9) == NULL);
}

TEST(unproven_a_source_has_at_most_half_of_the_places)
{
    struct unproven u;
    struct unproven_place p[UNPROVEN_MAX] = { 0 }, peer = { 0 };
    unproven_init(&u, 100000);
    CHECK_EQ_INT(u.n_max, UNPROVEN_MAX);
    for (int i = 0; i < UNPROVEN_MAX; i++) {
        struct unproven_place *gave = unproven_enter(&u, &p[i], 7);
        CHECK(gave == (i < UNPROVEN_MAX / 2 ? NULL : &p[i - UNPROVEN_MAX / 2]));
    }
    CHECK_EQ_INT(u.n, UNPROVEN_MAX / 2);
    CHECK(unproven_enter(&u, &peer, 8) == NULL);
}

/* Sources that differ only in high bits, and a full table of counts. */
TEST(unproven_every_source_is_counted)
{
    struct unproven u;
    struct unproven_place p[UNPROVEN_MAX] = { 0 }, peer = { 0 };
    unproven_init(&u, UNPROVEN_MAX);
    for (uint64_t i = 0; i < UNPROVEN_MAX; i++)
        CHECK(unproven_enter(&u, &p[i], (i == UNPROVEN_MAX - 1 ? 300 : i) << 40) == NULL);
    CHECK(unproven_enter(&u, &peer, 1) == &p[300]);
    unproven_init(&u, 1);
    CHECK(unproven_enter(&u, &p[0], 1) == NULL);
    CHECK(unproven_enter(&u, &p[1], 2) == &p[0]);
}

static uint64_t source_of(const char *text, uint16_t port)
{
    struct sockaddr_in v4 = { .sin_family = AF_INET, .sin_port = htons(port) };
    struct sockaddr_in6 v6 = { .sin6_family = AF_INET6, .sin6_port = htons(port) };
    if (inet_pton(AF_INET, text, &v4.sin_addr) == 1)
        return unproven_source((const struct sockaddr *)&v4);
    CHECK_EQ_INT(inet_pton(AF_INET6, text, &v6.sin6_addr), 1);
    return unproven_source((const struct sockaddr *)&v6);
}

TEST(unproven_a_source_is_a_host)
{
    CHECK(source_of("10.0.0.1", 5) == source_of("10.0.0.1", 6));
    CHECK(source_of("10.0.0.1", 5) != source_of("10.0.0.2", 5));
    CHECK(source_of("::ffff:10.0.0.1", 5) == source_of("10.0.0.1", 5));
    CHECK(source_of("2001:db8::1", 5) == source_of("2001:db8::dead:beef", 5));
    CHECK(source_of("2001:db8::1", 5) != source_of("2001:db8:0:1::1", 5));
}

TEST_MAIN(CASE(unproven_the_oldest_of_the_source_with_most_gives_way),
          CASE(unproven_a_source_has_at_most_half_of_the_places),
          CASE(unproven_every_source_is_counted), CASE(unproven_a_source_is_a_host))
