/* test.h - the test harness: each case runs in its own process with a time limit.
 *
 *     TEST(buf_empty_is_valid) { ... CHECK_EQ_INT(b.len, 3); }
 *     TEST_MAIN(buf_empty_is_valid, ...)
 *
 * Checks print both values and end the case. SKIP says what is missing; a skipped case does not
 * count as passed. The last line printed is "N passed, N failed, N skipped". Arguments: names of
 * the cases to run; --list shows the names; --jobs N, as the first, runs N cases at a time, for
 * programs that mostly wait. */
#ifndef BATON_TESTS_HARNESS_TEST_H
#define BATON_TESTS_HARNESS_TEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct test_case {
    const char *name;
    void (*run)(void);
    int timeout_s; /* 0: 60 */
};

int test_main(const struct test_case *cases, size_t n, int argc, char **argv);
_Noreturn void test_fail(const char *file, int line, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
_Noreturn void test_skip(const char *file, int line, const char *why);
/* Absolute path of tests/data/NAME (BATON_TEST_DATA, or the source tree's); valid until the next
 * call. */
const char *test_data(const char *name);
/* A fresh directory under TMPDIR, removed when the case ends. */
const char *test_tmpdir(void);

/* Whether a case runs whole, which takes most of a minute under a sanitizer: without one, or with
 * tests/run.sh --all. Otherwise it is left out, or has fewer rounds, sizes and combinations. */
bool test_runs_long(void);
/* Whether a sweep takes every combination of its values (tests/run.sh --all sets BATON_TEST_ALL)
 * rather than each value with some of the others. False under a sanitizer. */
bool test_runs_all(void);

/* Under a sanitizer a sweep may take fewer values: accesses repeat where the code is the same. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { TEST_IS_SANITIZED = 1 };
#else
enum { TEST_IS_SANITIZED = 0 };
#endif

#define TEST(name) static void test_##name(void)
#define CASE(name)                                                                                 \
    {                                                                                              \
#name, test_##name, 0                                                                      \
    }
#define CASE_T(name, seconds)                                                                      \
    {                                                                                              \
#name, test_##name, seconds                                                                \
    }
#define TEST_MAIN(...)                                                                             \
    int main(int argc, char **argv)                                                                \
    {                                                                                              \
        static const struct test_case cases[] = { __VA_ARGS__ };                                   \
        return test_main(cases, sizeof cases / sizeof cases[0], argc, argv);                       \
    }

#define SKIP(why) test_skip(__FILE__, __LINE__, why)
#define CHECK(cond)                                                                                \
    do {                                                                                           \
        if (!(cond)) test_fail(__FILE__, __LINE__, "%s is false", #cond);                          \
    } while (0)
#define CHECK_EQ_INT(a, b)                                                                         \
    do {                                                                                           \
        long long a_ = (long long)(a), b_ = (long long)(b);                                        \
        if (a_ != b_) test_fail(__FILE__, __LINE__, "%s is %lld, %s is %lld", #a, a_, #b, b_);     \
    } while (0)
#define CHECK_EQ_STR(a, b)                                                                         \
    do {                                                                                           \
        const char *a_ = (a), *b_ = (b);                                                           \
        extern int strcmp(const char *, const char *);                                             \
        if (!a_ || !b_ || strcmp(a_, b_) != 0)                                                     \
            test_fail(__FILE__, __LINE__, "%s is \"%s\", expected \"%s\"", #a, a_ ? a_ : "(null)", \
                      b_ ? b_ : "(null)");                                                         \
    } while (0)
#define CHECK_NEAR(a, b, tol)                                                                      \
    do {                                                                                           \
        double a_ = (double)(a), b_ = (double)(b), t_ = (tol);                                     \
        if (!(a_ - b_ <= t_ && b_ - a_ <= t_))                                                     \
            test_fail(__FILE__, __LINE__, "%s is %.9g, %s is %.9g", #a, a_, #b, b_);               \
    } while (0)
#define CHECK_OK(expr)                                                                             \
    do {                                                                                           \
        int st_ = (int)(expr);                                                                     \
        if (st_ != 0) test_fail(__FILE__, __LINE__, "%s returned %d", #expr, st_);                 \
    } while (0)
#define CHECK_STATUS(expr, want)                                                                   \
    do {                                                                                           \
        int st_ = (int)(expr), w_ = (int)(want);                                                   \
        if (st_ != w_) test_fail(__FILE__, __LINE__, "%s returned %d, not %s", #expr, st_, #want); \
    } while (0)

#endif
