/* test_detokenizer.c - streaming text: characters and stop strings that come in parts. The
 * vocabulary is the 256 bytes and a control token. */
#include "shared/text/output/detokenizer.h"

#include <string.h>

#include "shared/base/mem.h"
#include "shared/text/tokenizer/tokenizer_internal.h"
#include "shared/text/utf8.h"
#include "tests/harness/test.h"

enum { CONTROL = 256, USER = 257, N_TOKENS = 258 };

/* Ids 0 .. 255 are the bytes. */
static struct tokenizer *make_bytes(void)
{
    struct str tokens[N_TOKENS];
    int32_t kinds[N_TOKENS];
    char spelled[256][UTF8_CHAR_MAX];
    for (int i = 0; i < 256; i++) {
        tokens[i] = (struct str){ spelled[i],
                                  utf8_put(byte_level_encode((unsigned char)i), spelled[i]) };
        kinds[i] = 1;
    }
    tokens[CONTROL] = STR("<end>");
    kinds[CONTROL] = 3;
    tokens[USER] = STR("<think>\u00e9");
    kinds[USER] = 4;
    struct tokenizer_vocab v = {
        .model = "gpt2",
        .pre = "gpt-2",
        .tokens = tokens,
        .kinds = kinds,
        .n_tokens = N_TOKENS,
        .bos = -1,
        .eos = CONTROL,
    };
    struct tokenizer *t = NULL;
    struct err err = { 0 };
    CHECK_OK(tokenizer_from_vocab(&v, &t, &err));
    return t;
}

/* Pushes every byte of `text`; adds a '|' after each push that emitted something. */
static void stream(struct detokenizer *d, struct str text, struct buf *out)
{
    buf_clear(out);
    for (size_t i = 0; i < text.n; i++) {
        size_t before = out->len;
        (void)detokenizer_push(d, (unsigned char)text.p[i], out);
        if (out->len > before) buf_add_char(out, '|');
    }
    detokenizer_finish(d, out);
    buf_add_char(out, '.');
}

static void check_stream(const struct str *stops, size_t n_stops, bool include, struct str text,
                         const char *want, int stopped)
{
    struct tokenizer *t = make_bytes();
    struct detokenizer d;
    struct buf out = { 0 };
    detokenizer_init(&d, t, true, stops, n_stops, include);
    stream(&d, text, &out);
    CHECK_EQ_STR(out.data, want);
    CHECK_EQ_INT(d.stop_index, stopped);
    detokenizer_release(&d);
    buf_release(&out);
    tokenizer_free(t);
}

TEST(detok_holds_back_unfinished_characters)
{
    check_stream(NULL, 0, false, STR("a\u00e9\u4e16\U0001F642!"), "a|\u00e9|\u4e16|\U0001F642|!|.",
                 -1);
}

TEST(detok_replaces_invalid_bytes_at_once)
{
    check_stream(NULL, 0, false,
                 STR("\xff"
                     "a"),
                 "\uFFFD|a|.", -1);
    check_stream(NULL, 0, false,
                 STR("\xe4\xb8"
                     "a"),
                 "\uFFFD"
                 "a|.",
                 -1);
    check_stream(NULL, 0, false, STR("\xc3\xc3\xa9"), "\uFFFD|\u00e9|.", -1);
    check_stream(NULL, 0, false, STR("\xe0\x80"), "\uFFFD\uFFFD|.", -1);
    check_stream(NULL, 0, false, STR("\xed\xa0\x80"), "\uFFFD\uFFFD|\uFFFD|.", -1);
}

TEST(detok_finish_replaces_what_was_cut)
{
    check_stream(NULL, 0, false, STR("a\xf0\x9f\x99"), "a|\uFFFD.", -1);
}

TEST(detok_stops_before_the_stop_string)
{
    struct str stops[] = { STR("STOP"), STR("\n\n") };
    check_stream(stops, 2, false, STR("one STOP two"), "o|n|e| |.", 0);
    check_stream(stops, 2, true, STR("one STOP two"), "o|n|e| |STOP|.", 0);
    check_stream(stops, 2, false, STR("a\nb\n\nc"), "a|\nb|.", 1);
    check_stream(stops, 2, false, STR("a STO"), "a| |STO.", -1);
    check_stream(stops, 2, false, STR("STSTOP"), "ST|.", 0);
}

TEST(detok_stop_that_is_complete_first_counts)
{
    struct str stops[] = { STR("abcdef"), STR("cd"), STR("bcd") };
    check_stream(stops, 1, false, STR("xabcdefy"), "x|.", 0);
    check_stream(stops, 2, false, STR("xabcdefy"), "x|ab|.", 1);
    check_stream(stops, 3, false, STR("xabcdefy"), "x|a|.", 2);
    struct str empty[] = { STR(""), STR("c") };
    check_stream(empty, 2, false, STR("abc"), "a|b|.", 1);
}

TEST(detok_stop_of_several_bytes_per_character)
{
    struct str stops[] = { STR("\u3002\u3002") };
    check_stream(stops, 1, false, STR("\u4e16\u3002\u754c\u3002\u3002x"), "\u4e16|\u3002\u754c|.",
                 0);
}

TEST(detok_finish_looks_for_stops_too)
{
    struct str stops[] = { STR("\uFFFD") };
    check_stream(stops, 1, false, STR("a\xc3"), "a|.", 0);
}

TEST(detok_control_tokens_are_shown_only_when_asked)
{
    struct tokenizer *t = make_bytes();
    for (int skip = 0; skip < 2; skip++) {
        struct detokenizer d;
        struct buf out = { 0 };
        detokenizer_init(&d, t, skip, NULL, 0, false);
        CHECK(!detokenizer_push(&d, 'a', &out));
        CHECK(!detokenizer_push(&d, CONTROL, &out));
        CHECK(!detokenizer_push(&d, USER, &out));
        CHECK(!detokenizer_push(&d, -1, &out));
        CHECK(!detokenizer_push(&d, 1 << 30, &out));
        detokenizer_finish(&d, &out);
        CHECK_EQ_STR(out.data, skip ? "a<think>\u00e9" : "a<end><think>\u00e9");
        detokenizer_release(&d);
        buf_release(&out);
    }
    tokenizer_free(t);
}

TEST(detok_push_says_when_it_stopped)
{
    struct tokenizer *t = make_bytes();
    struct str stops[] = { STR("</think>"), STR("k>") };
    struct detokenizer d;
    struct buf out = { 0 };
    detokenizer_init(&d, t, true, stops, 2, false);
    CHECK(!detokenizer_push(&d, 'a', &out));
    CHECK(detokenizer_push(&d, USER, &out));
    CHECK_EQ_INT(d.stop_index, 1);
    CHECK_EQ_STR(out.data, "a<thin");
    CHECK(!detokenizer_push(&d, 'b', &out));
    detokenizer_finish(&d, &out);
    CHECK_EQ_STR(out.data, "a<thin");
    detokenizer_release(&d);
    buf_release(&out);
    tokenizer_free(t);
}

/* Random bytes: streaming equals decoding everything and cutting at the stop that ends first. */
TEST(detok_equals_decoding_everything)
{
    static const char alphabet[] = "ab\xc3\xa9\xe4\xb8\x96\xf0\x9f\x99\x82\xff";
    struct tokenizer *t = make_bytes();
    struct str stops[] = { STR("aba"), STR("bb"), STR("\u4e16"), STR("a\u00e9") };
    uint64_t seed = 3;
    for (int round = 0; round < 3000; round++) {
        int32_t ids[24];
        struct buf all = { 0 }, out = { 0 };
        struct detokenizer d;
        size_t n_stops = round % 5u;
        for (size_t i = 0; i < COUNT_OF(ids); i++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            ids[i] = (unsigned char)alphabet[(seed >> 33) % (sizeof alphabet - 1)];
        }
        tokenizer_decode(t, ids, COUNT_OF(ids), true, &all);
        size_t cut = all.len, first_end = SIZE_MAX;
        for (size_t s = 0; s < n_stops; s++) {
            size_t at = str_find(buf_str(&all), stops[s]),
                   end = at == SIZE_MAX ? SIZE_MAX : at + stops[s].n;
            if (end > first_end || end == SIZE_MAX || (end == first_end && at > cut)) continue;
            first_end = end;
            cut = at;
        }
        detokenizer_init(&d, t, true, stops, n_stops, false);
        for (size_t i = 0; i < COUNT_OF(ids); i++) (void)detokenizer_push(&d, ids[i], &out);
        detokenizer_finish(&d, &out);
        CHECK_EQ_INT(out.len, cut);
        CHECK(cut == 0 || memcmp(out.data, all.data, cut) == 0);
        detokenizer_release(&d);
        buf_release(&all);
        buf_release(&out);
    }
    tokenizer_free(t);
}

TEST(utf8_unfinished_counts_only_beginnings)
{
    CHECK_EQ_INT(utf8_unfinished(STR("")), 0);
    CHECK_EQ_INT(utf8_unfinished(STR("a\xc3")), 1);
    CHECK_EQ_INT(utf8_unfinished(STR("\xf0\x9f\x99")), 3);
    CHECK_EQ_INT(utf8_unfinished(STR("\xf0\x9f\x99\x82")), 0);
    CHECK_EQ_INT(utf8_unfinished(STR("\xe0\x80")), 0);
    CHECK_EQ_INT(utf8_unfinished(STR("\xf5")), 0);
    CHECK_EQ_INT(utf8_unfinished(STR("\x80")), 0);
}

TEST(utf8_put_and_next_agree)
{
    for (int32_t cp = 0; cp < 0x110000; cp++) {
        if (cp >= 0xD800 && cp < 0xE000) continue;
        char c[UTF8_CHAR_MAX];
        int32_t back = -2;
        size_t n = utf8_put(cp, c);
        CHECK(utf8_next((struct str){ c, n }, 0, &back) == n && back == cp);
    }
}

TEST_MAIN(CASE(detok_holds_back_unfinished_characters), CASE(detok_replaces_invalid_bytes_at_once),
          CASE(detok_finish_replaces_what_was_cut), CASE(detok_stops_before_the_stop_string),
          CASE(detok_stop_that_is_complete_first_counts),
          CASE(detok_stop_of_several_bytes_per_character), CASE(detok_finish_looks_for_stops_too),
          CASE(detok_control_tokens_are_shown_only_when_asked),
          CASE(detok_push_says_when_it_stopped), CASE(detok_equals_decoding_everything),
          CASE(utf8_unfinished_counts_only_beginnings), CASE(utf8_put_and_next_agree))
