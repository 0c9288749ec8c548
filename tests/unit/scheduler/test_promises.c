/* test_promises.c - what admission stands on: times that are promised, the text that shows one, and
 * which nodes have enough to do. */
#include "scheduler/admission/promises.h"

#include <string.h>

#include "scheduler/admission/fill.h"
#include "scheduler/admission/retry_text.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

enum { NOW = 5000000 };

/* ---- promises ---- */

TEST(promises_follow_each_other)
{
    struct promises *p = MEM_NEW(struct promises);
    promises_init(p);
    uint64_t a = promises_make(p, NOW, NOW + 2500, 2000), b = promises_make(p, NOW, NOW, 2000);
    CHECK(a == NOW + 2500 && b == NOW + 4500);
    CHECK_NEAR(promises_n_kept(p, NOW, 3000), 1, 0);
    CHECK_NEAR(promises_n_kept(p, NOW, 5000), 2, 0);
    CHECK(!promises_use(p, NOW, a)); /* too soon */
    CHECK(promises_use(p, a, a));
    CHECK(!promises_use(p, a, a));                                   /* there was one */
    CHECK(!promises_use_any(p, a));                                  /* too soon for b, ... */
    CHECK(promises_use_any(p, b - 1000) && !promises_use_any(p, b)); /* ... and not */
    uint64_t far = 0, last = 0;
    while ((far = promises_make(p, NOW, NOW, 60000))) last = far;
    CHECK(last <= NOW + PROMISE_MAX_S * 1000 && last > NOW + (PROMISE_MAX_S - 61) * 1000);
    mem_free(p);
}

/* The fewer come back, the less is kept for them, and the sooner are others told to come. */
TEST(promises_that_lapse_are_kept_less)
{
    struct promises *p = MEM_NEW(struct promises);
    uint64_t now = NOW;
    promises_init(p);
    for (int i = 0; i < 200; i++, now += 1000) (void)promises_make(p, now, now, 100);
    now += 2 * PROMISE_GRACE_MS;
    CHECK_NEAR(promises_n_kept(p, now, 1000), 0, 0);
    for (int i = 0; i < 10; i++) (void)promises_make(p, now, now + 5000, 1);
    CHECK(promises_n_kept(p, now, 10000) < 1);
    for (int i = 0; i < 100; i++) CHECK(promises_make(p, now, now, 1000) < now + 2000);
    mem_free(p);
}

TEST(a_retry_text_is_of_its_tenant_and_node)
{
    const struct retry_secret s = { { 1, 2, 3 } }, other = { { 9 } };
    char text[GEN_RETRY_MAX], bad[GEN_RETRY_MAX];
    uint64_t due = 0;
    retry_text_write(&s, 77, 123456789, 42, text);
    CHECK(retry_text_read(&s, 77, str_of(text), &due) && due == 123456789);
    CHECK(!retry_text_read(&s, 78, str_of(text), &due));
    CHECK(!retry_text_read(&other, 77, str_of(text), &due));
    for (size_t i = 0; text[i]; i++) {
        memcpy(bad, text, sizeof bad);
        bad[i] = bad[i] == '1' ? '2' : '1';
        CHECK(!retry_text_read(&s, 77, str_of(bad), &due));
    }
    CHECK(!retry_text_read(&s, 77, str_of(""), &due));
    CHECK(!retry_text_read(&s, 77, str_of("1.2"), &due));
}

/* ---- what nodes need ---- */

static void add_prompt(struct fill *f, uint64_t node, uint32_t tokens, uint32_t per_s, uint32_t n)
{
    fill_add(f, &(struct fill_prompt){ node, tokens, per_s, 30, n, false }, NOW);
}

static void remove_prompt(struct fill *f, uint64_t node, uint32_t tokens, uint64_t now)
{
    fill_remove(f, &(struct fill_prompt){ .node = node, .tokens = tokens }, true, now);
}

/* 70 ms ahead: the way to it, and a step of 30 ms. */
TEST(a_node_has_enough_while_it_is_busy_until_the_next_would_come)
{
    struct fill f = { 0 };
    uint64_t out[4];
    CHECK_EQ_INT(fill_enough(&f, NOW, out, 4), 0);
    add_prompt(&f, 7, 50, 1000, 1);
    CHECK_EQ_INT(fill_enough(&f, NOW, out, 4), 0);
    add_prompt(&f, 7, 50, 1000, 1);
    CHECK(fill_enough(&f, NOW, out, 4) == 1 && out[0] == 7);
    CHECK_EQ_INT(fill_enough(&f, NOW + 30, out, 4), 1);
    CHECK_EQ_INT(fill_enough(&f, NOW + 31, out, 4), 0); /* it computes */
    CHECK(fill_next_ms(&f, NOW) == 31 && fill_next_ms(&f, NOW + 31) == 0);
    remove_prompt(&f, 7, 50, NOW + 10); /* sooner than expected: 50 ms are left */
    CHECK_EQ_INT(fill_enough(&f, NOW + 10, out, 4), 0);
    add_prompt(&f, 8, 8, 1000, 10); /* ten entry nodes: 7 ms are this one's */
    CHECK_EQ_INT(fill_enough(&f, NOW, out, 4), 1);
    add_prompt(&f, 9, FILL_TOKENS - 1, 0, 1); /* of unknown speed */
    CHECK_EQ_INT(fill_enough(&f, NOW, out, 4), 1);
    add_prompt(&f, 9, 1, 0, 1);
    CHECK_EQ_INT(fill_enough(&f, NOW, out, 4), 2);
    CHECK_EQ_INT(fill_enough(&f, NOW, out, 1), 1);
    remove_prompt(&f, 7, 50, NOW + 10);
    remove_prompt(&f, 7, 50, NOW + 10); /* is not there */
    CHECK(f.n == 3 && f.nodes[0].n == 0 && f.nodes[1].n == 1 && f.nodes[2].n == 2);
    fill_release(&f);
}

TEST(nodes_with_a_prompt_that_goes_first_are_told_apart)
{
    struct fill f = { 0 };
    const struct fill_prompt first = { 8, 50, 1000, 30, 1, true };
    uint64_t out[4];
    add_prompt(&f, 7, 500, 1000, 1);
    add_prompt(&f, 8, 500, 1000, 1);
    CHECK_EQ_INT(fill_first(&f, out, 4), 0);
    fill_add(&f, &first, NOW);
    fill_add(&f, &first, NOW);
    CHECK(fill_first(&f, out, 4) == 1 && out[0] == 8);
    CHECK_EQ_INT(fill_first(&f, out, 0), 0);
    remove_prompt(&f, 8, 500, NOW);
    fill_remove(&f, &first, false, NOW);
    CHECK_EQ_INT(fill_first(&f, out, 4), 1);
    fill_remove(&f, &first, true, NOW);
    CHECK_EQ_INT(fill_first(&f, out, 4), 0);
    fill_release(&f);
}

/* Of a node that publishes none: from how long its prompts took here. */
TEST(the_speed_of_a_node_is_seen)
{
    struct fill f = { 0 };
    uint64_t now = NOW, out[1];
    add_prompt(&f, 7, FILL_SEEN, 0, 1); /* a backlog */
    now += FILL_LEAD_MS + 30;
    for (int i = 0; i < 40; i++) { /* 100 tokens each 50 ms, the next always on its way */
        add_prompt(&f, 7, 100, 0, 1);
        now += 50;
        remove_prompt(&f, 7, 100, now);
    }
    CHECK_NEAR(fill_seen_per_s(&f, 7), 2000, 100);
    CHECK_NEAR(fill_seen_per_s(&f, 8), 0, 0);
    remove_prompt(&f, 7, FILL_SEEN, now);
    const double seen = fill_seen_per_s(&f, 7);
    CHECK(seen >= 2000);
    add_prompt(&f, 7, 150, 0, 1);
    fill_add(&f, &(struct fill_prompt){ 7, 50, 0, 30, 1, false }, now);
    CHECK_EQ_INT(fill_enough(&f, now, out, 1), 1);
    CHECK_EQ_INT(fill_enough(&f, now + 100, out, 1), 0);
    fill_release(&f);
}

/* A step that takes a fifth of a second whatever is in it: short prompts, one by one or a few at
 * once, would make it seem a slow node, which then got no more of them at once. */
TEST(a_node_without_a_backlog_shows_no_speed)
{
    struct fill f = { 0 };
    uint64_t now = NOW, out[1];
    for (int i = 0; i < 40; i++) {
        for (int k = 0; k <= i % 8; k++) add_prompt(&f, 7, 6, 0, 1);
        now += 200;
        for (int k = 0; k <= i % 8; k++) remove_prompt(&f, 7, 6, now);
    }
    CHECK_NEAR(fill_seen_per_s(&f, 7), 0, 0);
    for (int k = 0; k < 32; k++) add_prompt(&f, 7, 6, 0, 1);
    CHECK_EQ_INT(fill_enough(&f, now, out, 1), 0);
    fill_release(&f);
}

TEST_MAIN(CASE(promises_follow_each_other), CASE(promises_that_lapse_are_kept_less),
          CASE(a_retry_text_is_of_its_tenant_and_node),
          CASE(a_node_has_enough_while_it_is_busy_until_the_next_would_come),
          CASE(nodes_with_a_prompt_that_goes_first_are_told_apart),
          CASE(the_speed_of_a_node_is_seen), CASE(a_node_without_a_backlog_shows_no_speed))
