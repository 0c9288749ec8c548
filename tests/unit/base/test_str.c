/* test_str.c - borrowed text. */
#include <string.h>

#include "shared/base/str.h"
#include "tests/harness/test.h"

TEST(str_compares)
{
    CHECK(str_eq(STR("abc"), str_of("abc")));
    CHECK(!str_eq(STR("abc"), STR("abd")));
    CHECK(!str_eq(STR("abc"), STR("ab")));
    CHECK(str_eq(str_of(NULL), STR("")));
    CHECK(str_eq((struct str){ NULL, 0 }, STR("")));
    CHECK(str_eq_c(STR("x"), "x"));
    CHECK(str_starts(STR("--port"), "--") && !str_starts(STR("-"), "--") &&
          str_starts(STR(""), ""));
    CHECK(str_ends(STR("a.json"), ".json") && !str_ends(STR("json"), ".json"));
}

TEST(str_finds)
{
    CHECK_EQ_INT(str_find_char(STR("a=b=c"), '='), 1);
    CHECK(str_find_char(STR("abc"), 'x') == SIZE_MAX);
    CHECK(str_find_char((struct str){ NULL, 0 }, 'x') == SIZE_MAX);
    CHECK_EQ_INT(str_find(STR("hello world"), STR("wor")), 6);
    CHECK(str_find(STR("wo"), STR("wor")) == SIZE_MAX);
    CHECK_EQ_INT(str_find(STR("x"), STR("")), 0);
}

TEST(str_sub_is_clamped)
{
    CHECK(str_eq_c(str_sub(STR("hello"), 1, 3), "ell"));
    CHECK(str_eq_c(str_sub(STR("hello"), 3, SIZE_MAX), "lo"));
    CHECK_EQ_INT(str_sub(STR("hello"), 9, 1).n, 0);
    CHECK(str_eq_c(str_trim(STR(" \t a b\r\n")), "a b"));
    CHECK_EQ_INT(str_trim(STR("  ")).n, 0);
}

TEST(str_split_yields_every_part)
{
    struct str rest = STR("a,,b,"), item;
    const char *want[] = { "a", "", "b", "" };
    int n = 0;
    while (str_split(&rest, ',', &item)) {
        CHECK(n < 4);
        CHECK(str_eq_c(item, want[n++]));
    }
    CHECK_EQ_INT(n, 4);
    rest = STR("");
    CHECK(str_split(&rest, ',', &item) && item.n == 0);
    CHECK(!str_split(&rest, ',', &item));
}

TEST(str_to_i64_takes_whole_strings_only)
{
    int64_t v = 42;
    CHECK_OK(str_to_i64(STR("-9223372036854775808"), &v));
    CHECK(v == INT64_MIN);
    CHECK_OK(str_to_i64(STR("9223372036854775807"), &v));
    CHECK(v == INT64_MAX);
    CHECK_OK(str_to_i64(STR("+7"), &v));
    CHECK_EQ_INT(v, 7);
    const char *bad[] = { "",
                          "-",
                          "+",
                          " 1",
                          "1 ",
                          "1x",
                          "0x10",
                          "1.0",
                          "9223372036854775808",
                          "-9223372036854775809",
                          "--1" };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        if (str_to_i64(str_of(bad[i]), &v) != ERR_FORMAT)
            test_fail(__FILE__, __LINE__, "\"%s\" was taken", bad[i]);
        CHECK_EQ_INT(v, 7);
    }
}

TEST(str_to_f64_takes_whole_strings_only)
{
    double v = 1;
    CHECK_OK(str_to_f64(STR("-1.5e3"), &v));
    CHECK_NEAR(v, -1500, 0);
    CHECK_OK(str_to_f64((struct str){ "0.25xyz", 4 }, &v));
    CHECK_NEAR(v, 0.25, 0);
    const char *bad[] = { "", "nan", "inf", "0x1p3", " 1", "1 ", "1e999", "e5", "1e", "." };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        if (str_to_f64(str_of(bad[i]), &v) != ERR_FORMAT)
            test_fail(__FILE__, __LINE__, "\"%s\" was taken", bad[i]);
    CHECK_STATUS(str_to_f64((struct str){ "1\0", 2 }, &v), ERR_FORMAT);
}

TEST(str_to_hex_takes_whole_strings_only)
{
    uint64_t v = 42;
    CHECK_OK(str_to_hex(STR("0123456789abcdef"), &v));
    CHECK(v == UINT64_C(0x0123456789abcdef));
    CHECK_OK(str_to_hex(STR("f"), &v));
    CHECK_EQ_INT(v, 15);
    const char *bad[] = { "", "F", "0x1", " 1", "1 ", "-1", "g", "00123456789abcdef" };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        if (str_to_hex(str_of(bad[i]), &v) != ERR_FORMAT)
            test_fail(__FILE__, __LINE__, "\"%s\" was taken", bad[i]);
        CHECK_EQ_INT(v, 15);
    }
    CHECK_STATUS(str_to_hex((struct str){ "1\0", 2 }, &v), ERR_FORMAT);
}

TEST_MAIN(CASE(str_compares), CASE(str_finds), CASE(str_sub_is_clamped),
          CASE(str_split_yields_every_part), CASE(str_to_i64_takes_whole_strings_only),
          CASE(str_to_f64_takes_whole_strings_only), CASE(str_to_hex_takes_whole_strings_only))
