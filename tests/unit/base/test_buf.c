/* test_buf.c - the byte buffer. */
#include <string.h>

#include "shared/base/buf.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

TEST(buf_empty_is_valid)
{
    struct buf b = { 0 };
    CHECK(str_eq(buf_str(&b), STR("")));
    buf_clear(&b);
    buf_consume(&b, 0);
    char *text = buf_take(&b);
    CHECK_EQ_STR(text, "");
    mem_free(text);
    buf_release(&b);
}

TEST(buf_stays_terminated)
{
    struct buf b = { 0 };
    for (int i = 0; i < 1000; i++) {
        buf_add_char(&b, 'x');
        CHECK(b.data[b.len] == 0);
    }
    CHECK_EQ_INT(b.len, 1000);
    memset(buf_reserve(&b, 5000), 'y', 5000);
    b.len += 5000;
    CHECK(b.data[b.len] == 0);
    buf_consume(&b, 999);
    CHECK(b.data[0] == 'x' && b.data[1] == 'y' && b.len == 5001 && b.data[b.len] == 0);
    buf_clear(&b);
    CHECK_EQ_STR(b.data, "");
    buf_release(&b);
}

TEST(buf_printf_grows)
{
    struct buf b = { 0 };
    char big[500];
    memset(big, 'z', sizeof big);
    for (int i = 0; i < 20; i++) buf_printf(&b, "%d:%.*s;", i, i * 20, big);
    CHECK_EQ_INT(b.len, 20 * 2 + 10 + 2 * 10 + 20 * (19 * 20 / 2));
    CHECK(str_ends(buf_str(&b), "z;"));
    buf_release(&b);
}

TEST(buf_integers_are_little_endian)
{
    struct buf b = { 0 };
    buf_add_u32le(&b, 0x03040506);
    buf_add_u64le(&b, 0x0708090a0b0c0d0eull);
    CHECK_EQ_INT(b.len, 12);
    CHECK(memcmp(b.data, "\x06\x05\x04\x03\x0e\x0d\x0c\x0b\x0a\x09\x08\x07", 12) == 0);
    buf_release(&b);
}

TEST(buf_take_hands_over)
{
    struct buf b = { 0 };
    buf_add_c(&b, "ab");
    buf_add_str(&b, STR("cd"));
    buf_add(&b, NULL, 0);
    char *text = buf_take(&b);
    CHECK_EQ_STR(text, "abcd");
    CHECK(b.data == NULL && b.len == 0 && b.cap == 0);
    mem_free(text);
}

TEST_MAIN(CASE(buf_empty_is_valid), CASE(buf_stays_terminated), CASE(buf_printf_grows),
          CASE(buf_integers_are_little_endian), CASE(buf_take_hands_over))
