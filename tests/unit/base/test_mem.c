/* test_mem.c - allocation and arenas. */
#include <stdint.h>
#include <string.h>

#include "shared/base/mem.h"
#include "tests/harness/test.h"

TEST(mem_is_zeroed_and_never_null)
{
    char *p = mem_calloc(100, 7);
    for (int i = 0; i < 700; i++) CHECK(p[i] == 0);
    mem_free(p);
    void *none = mem_calloc(0, 8);
    CHECK(none);
    none = mem_realloc(none, 0, 0);
    CHECK(none);
    mem_free(none);
    mem_free(NULL);
}

TEST(mem_copies)
{
    char *a = mem_strdup("abc"), *b = mem_strndup("abcdef", 2), *c = mem_dup("xyz", 3),
         *d = mem_strndup(NULL, 0);
    CHECK_EQ_STR(a, "abc");
    CHECK_EQ_STR(b, "ab");
    CHECK(memcmp(c, "xyz", 3) == 0);
    CHECK_EQ_STR(d, "");
    mem_free(a);
    mem_free(b);
    mem_free(c);
    mem_free(d);
}

TEST(mem_try_fails_when_told_and_when_too_large)
{
    void *too_large = mem_try_calloc(SIZE_MAX / 2, 4);
    CHECK(too_large == NULL);
    mem_fail_nth(2);
    void *first = mem_try_calloc(1, 8), *second = mem_try_calloc(1, 8),
         *third = mem_try_calloc(1, 8);
    CHECK(first != NULL);
    CHECK(second == NULL);
    CHECK(third != NULL);
    mem_fail_nth(1);
    mem_fail_nth(0);
    void *fourth = mem_try_calloc(1, 8);
    CHECK(fourth != NULL);
    mem_free(first);
    mem_free(third);
    mem_free(fourth);
}

TEST(mem_aligned_is_aligned_and_zeroed)
{
    for (size_t align = 1; align <= 4096; align *= 2) {
        unsigned char *p = mem_aligned(align, 100);
        CHECK((uintptr_t)p % align == 0);
        for (int i = 0; i < 100; i++) CHECK(p[i] == 0);
        mem_free(p);
    }
}

TEST(arena_pieces_do_not_overlap)
{
    struct arena a;
    arena_init(&a);
    enum { N = 2000 };
    unsigned char *pieces[N];
    for (int i = 0; i < N; i++) {
        size_t size = (size_t)i % 300 + (i % 97 == 0 ? 100000 : 0);
        pieces[i] = arena_alloc(&a, size);
        CHECK((uintptr_t)pieces[i] % 16 == 0);
        for (size_t k = 0; k < size; k++) CHECK(pieces[i][k] == 0);
        memset(pieces[i], i & 0xff, size);
    }
    for (int i = 0; i < N; i++) {
        size_t size = (size_t)i % 300 + (i % 97 == 0 ? 100000 : 0);
        for (size_t k = 0; k < size; k++) CHECK(pieces[i][k] == (i & 0xff));
    }
    CHECK_EQ_STR(arena_strndup(&a, "hello", 4), "hell");
    CHECK(a.used > 100000);
    arena_release(&a);
    CHECK(a.head == NULL && a.used == 0);
    CHECK(ARENA_ARRAY(&a, int, 10) != NULL);
    arena_release(&a);
}

TEST_MAIN(CASE(mem_is_zeroed_and_never_null), CASE(mem_copies),
          CASE(mem_try_fails_when_told_and_when_too_large), CASE(mem_aligned_is_aligned_and_zeroed),
          CASE(arena_pieces_do_not_overlap))
