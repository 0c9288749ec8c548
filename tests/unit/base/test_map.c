/* test_map.c - the hash map, against a plain array as the model. */
#include <stdio.h>
#include <string.h>

#include "shared/base/list.h"
#include "shared/base/map.h"
#include "shared/base/rng.h"
#include "tests/harness/test.h"

TEST(map_empty_is_valid)
{
    struct map m = { 0 };
    struct str key;
    void *value;
    size_t pos = 0;
    CHECK(map_get(&m, STR("x")) == NULL);
    CHECK(map_del(&m, STR("x")) == NULL);
    CHECK(!map_next(&m, &pos, &key, &value));
    map_release(&m);
}

TEST(map_put_replaces)
{
    struct map m = { 0 };
    int a, b;
    char key[] = "key";
    CHECK(map_put(&m, str_of(key), &a) == NULL);
    key[0] = 'x'; /* the map has its own copy */
    CHECK(map_get(&m, STR("key")) == &a);
    CHECK(map_put(&m, STR("key"), &b) == &a);
    CHECK_EQ_INT(m.len, 1);
    CHECK(map_put(&m, STR(""), &a) == NULL);
    CHECK(map_get(&m, STR("")) == &a);
    CHECK(map_put(&m, (struct str){ "a\0b", 3 }, &a) == NULL);
    CHECK(map_get(&m, STR("a")) == NULL);
    CHECK(map_del(&m, STR("key")) == &b);
    CHECK(map_get(&m, STR("key")) == NULL);
    map_release(&m);
}

TEST(map_agrees_with_a_plain_array)
{
    enum { KEYS = 300, STEPS = 60000 };
    static char values[KEYS][2];
    void *model[KEYS] = { 0 };
    struct map m = { 0 };
    for (uint64_t step = 0; step < STEPS; step++) {
        uint32_t r[4];
        rng_philox(1, 0, step, r);
        uint64_t k = r[0] % KEYS;
        void *value = &values[k][r[1] & 1];
        switch (r[2] % 3) {
        case 0:
            CHECK(map_put(&m, map_key_u64(&k), value) == model[k]);
            model[k] = value;
            break;
        case 1:
            CHECK(map_del(&m, map_key_u64(&k)) == model[k]);
            model[k] = NULL;
            break;
        default: CHECK(map_get(&m, map_key_u64(&k)) == model[k]);
        }
    }
    size_t live = 0;
    for (int i = 0; i < KEYS; i++) live += model[i] != NULL;
    CHECK_EQ_INT(m.len, live);
    CHECK(m.cap <= 2048); /* deleting again and again does not make it grow */
    map_release(&m);
}

TEST(map_walk_sees_each_once_and_may_delete)
{
    struct map m = { 0 };
    enum { N = 1000 };
    static int seen[N];
    for (int i = 0; i < N; i++) {
        char key[16];
        snprintf(key, sizeof key, "%d", i);
        map_put(&m, str_of(key), &seen[i]);
    }
    size_t pos = 0;
    struct str key;
    void *value;
    while (map_next(&m, &pos, &key, &value)) {
        ++*(int *)value;
        CHECK(map_del(&m, key) == value);
    }
    for (int i = 0; i < N; i++) CHECK_EQ_INT(seen[i], 1);
    CHECK_EQ_INT(m.len, 0);
    map_release(&m);
}

struct entry {
    int n;
    struct list link;
};

TEST(list_keeps_order_and_allows_removal)
{
    struct list head;
    struct entry e[5];
    list_init(&head);
    CHECK(list_empty(&head));
    for (int i = 0; i < 5; i++) {
        e[i].n = i;
        list_push(&head, &e[i].link);
    }
    int next = 0;
    LIST_FOREACH (it, &head, struct entry, link) {
        CHECK_EQ_INT(it->n, next++);
        if (it->n % 2) list_remove(&it->link);
    }
    CHECK_EQ_INT(next, 5);
    list_remove(&e[1].link); /* twice is harmless */
    list_push_front(&head, &e[3].link);
    CHECK_EQ_INT(LIST_FIRST(&head, struct entry, link)->n, 3);
    int n = 0;
    LIST_FOREACH (it, &head, struct entry, link) n += it->n;
    CHECK_EQ_INT(n, 3 + 0 + 2 + 4);
}

TEST_MAIN(CASE(map_empty_is_valid), CASE(map_put_replaces), CASE(map_agrees_with_a_plain_array),
          CASE(map_walk_sees_each_once_and_may_delete), CASE(list_keeps_order_and_allows_removal))
