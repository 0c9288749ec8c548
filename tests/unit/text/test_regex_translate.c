/* test_regex_translate.c - patterns of tokenizer files rewritten for PCRE2. What they match is
 * tested by test_pre_tokenizer.c and tests/text/tokenizer_oracle.py. */
#include "shared/text/tokenizer/regex_translate.h"

#include <string.h>

#include "shared/base/mem.h"
#include "shared/text/tokenizer/pre_tokenizer.h"
#include "tests/harness/test.h"

static void check(const char *regex, const char *want)
{
    struct buf out = { 0 };
    struct err err = { 0 };
    if (regex_translate(str_of(regex), &out, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s: %s", regex, err.text);
    CHECK_EQ_STR(out.data, want);
    buf_release(&out);
}

TEST(regex_leaves_alone_what_all_read_alike)
{
    static const char *const same[] = { "a|b+?(?i:'s)", "[^\\r\\n\\-]", "[]a]",     "[^]a]",
                                        "\\[a\\]",      "[[:alpha:]x]", "\\p{Han}", "(?!x)$",
                                        "[a-z&]",       "\\x{4E00}" };
    for (size_t i = 0; i < COUNT_OF(same); i++) check(same[i], same[i]);
}

TEST(regex_white_space_is_the_property)
{
    check("\\s+(?!\\S)", "\\p{White_Space}+(?!\\P{White_Space})");
    check("[^\\s\\S]", "[^\\p{White_Space}\\P{White_Space}]");
}

TEST(regex_categories_grow)
{
    check("\\p{Sm}", "[\\p{Sm}\\x{10D8E}-\\x{10D8F}]");
    check("\\P{Sm}+", "[^\\p{Sm}\\x{10D8E}-\\x{10D8F}]+");
    check("[x\\p{Sm}y]", "[x\\p{Sm}\\x{10D8E}-\\x{10D8F}y]");
    check("\\p{^Sm}", "[^\\p{Sm}\\x{10D8E}-\\x{10D8F}]");
    check("\\pZ\\p{Zs}", "\\p{Z}\\p{Zs}");
}

TEST(regex_refuses_what_others_read_differently)
{
    static const char *const bad[] = { "\\bx",     "\\h",   "\\R", "\\Qa",  "[a[b]]", "[a&&b]",
                                       "[\\P{L}]", "[\\W]", "\\p", "\\p{L", "\\K" };
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        struct buf out = { 0 };
        struct err err = { 0 };
        if (regex_translate(str_of(bad[i]), &out, &err) != ERR_UNSUPPORTED)
            test_fail(__FILE__, __LINE__, "%s was taken", bad[i]);
        CHECK(strstr(err.text, "pattern") != NULL);
        buf_release(&out);
    }
}

static size_t n_pieces(const char *regex, const char *text)
{
    struct pre_tokenizer p = { 0 };
    struct pre_tokenizer_pieces w = { 0 };
    struct err err = { 0 };
    CHECK_OK(pre_tokenizer_add_split(&p, str_of(regex), PRE_TOKENIZER_ISOLATED, false, &err));
    buf_add_c(&w.text, text);
    CHECK_OK(pre_tokenizer_run(&p, true, &w, &err));
    size_t n = w.n;
    pre_tokenizer_pieces_release(&w);
    pre_tokenizer_release(&p);
    return n;
}

/* A heart of Unicode 15 is a symbol and a digit of Unicode 16 a number, in every version of
 * PCRE2. */
TEST(regex_knows_the_newer_characters)
{
    CHECK_EQ_INT(n_pieces(" ?\\p{S}+", "a \U0001FA77"), 2);
    CHECK_EQ_INT(n_pieces("\\p{N}{1,3}", "\U00010D40\U00010D41\U00010D42\U00010D43"), 2);
    CHECK_EQ_INT(n_pieces("\\w+", "a\U00010D4A\u0301_9\u2160\u00bd\u24b6-"), 2);
}

TEST_MAIN(CASE(regex_leaves_alone_what_all_read_alike), CASE(regex_white_space_is_the_property),
          CASE(regex_categories_grow), CASE(regex_refuses_what_others_read_differently),
          CASE(regex_knows_the_newer_characters))
