/* test_pre_tokenizer.c - where pre-tokenizers cut texts. Pieces are shown joined by '|'. */
#include "shared/text/tokenizer/pre_tokenizer.h"

#include <string.h>

#include "shared/base/mem.h"
#include "tests/harness/test.h"

static void show(const struct pre_tokenizer *p, struct str text, bool is_start, struct buf *out)
{
    struct pre_tokenizer_pieces w = { 0 };
    struct err err = { 0 };
    buf_clear(out);
    buf_add_str(&w.text, text);
    CHECK_OK(pre_tokenizer_run(p, is_start, &w, &err));
    for (size_t i = 0; i < w.n; i++) {
        if (i) buf_add_char(out, '|');
        buf_add(out, w.text.data + w.spans[i].at, w.spans[i].n);
    }
    pre_tokenizer_pieces_release(&w);
}

#define CHECK_PIECES(p, text, want)                                                                \
    do {                                                                                           \
        struct buf shown_ = { 0 };                                                                 \
        show((p), str_of(text), true, &shown_);                                                    \
        CHECK_EQ_STR(shown_.data ? shown_.data : "", want);                                        \
        buf_release(&shown_);                                                                      \
    } while (0)

static struct pre_tokenizer preset(const char *name)
{
    struct pre_tokenizer p = { 0 };
    struct err err = { 0 };
    const struct pre_tokenizer_preset *found = pre_tokenizer_preset_find(name);
    CHECK(found);
    CHECK_OK(pre_tokenizer_add_preset(&p, found, &err));
    return p;
}

static struct pre_tokenizer split(const char *regex, enum pre_tokenizer_behavior behavior,
                                  bool invert)
{
    struct pre_tokenizer p = { 0 };
    struct err err = { 0 };
    CHECK_OK(pre_tokenizer_add_split(&p, str_of(regex), behavior, invert, &err));
    return p;
}

TEST(pre_tokenizer_llama3_cuts_words_contractions_and_numbers)
{
    struct pre_tokenizer p = preset("llama-bpe");
    CHECK_PIECES(&p, "Hello, world!", "Hello|,| world|!");
    CHECK_PIECES(&p, "I'll don't WE'VE it's", "I|'ll| don|'t| WE|'VE| it|'s");
    CHECK_PIECES(&p, "Tab 12345", "Tab| |123|45");
    CHECK_PIECES(&p, "for(int i=0;i<10;i++){ x+=i; }",
                 "for|(int| i|=|0|;i|<|10|;i|++){| x|+=|i|;| }");
    CHECK_PIECES(&p, "a_b foo_bar", "a|_b| foo|_bar");
    CHECK_PIECES(&p, "", "");
    pre_tokenizer_release(&p);
}

TEST(pre_tokenizer_white_space_gives_its_last_character_to_the_next_word)
{
    struct pre_tokenizer p = preset("llama3");
    CHECK_PIECES(&p, "  multiple   spaces\n\n\tTab", " | multiple|  | spaces|\n\n|\tTab");
    CHECK_PIECES(&p, "a   ", "a|   ");
    CHECK_PIECES(&p, "a  \n  b", "a|  \n| | b");
    CHECK_PIECES(&p, "\r\n\r\n a  b", "\r\n\r\n| a| | b");
    CHECK_PIECES(&p, "x\n \n y", "x|\n \n| y");
    CHECK_PIECES(&p, "b\u00a0c \u3000 7", "b|\u00a0c| \u3000| |7");
    /* U+180E is not white space, U+0085 is. */
    CHECK_PIECES(&p, "1\u180e\u180e", "1|\u180e\u180e");
    CHECK_PIECES(&p, "1\xC2\x85\xC2\x85", "1|\xC2\x85\xC2\x85");
    pre_tokenizer_release(&p);
}

TEST(pre_tokenizer_qwen2_cuts_every_digit)
{
    struct pre_tokenizer p = preset("qwen2");
    CHECK_PIECES(&p, "Hello world! 123", "Hello| world|!| |1|2|3");
    CHECK_PIECES(&p, "\uff11\u0663 \u00bd", "\uff11|\u0663| |\u00bd");
    CHECK_PIECES(&p, "\u4f60\u597d\uff0c\u4e16\u754c\uff01ERNIE 4.5",
                 "\u4f60\u597d|\uff0c\u4e16\u754c|\uff01ERNIE| |4|.|5");
    pre_tokenizer_release(&p);
}

TEST(pre_tokenizer_gpt2_and_smollm_differ_in_digits)
{
    struct pre_tokenizer gpt2 = preset("gpt-2"), smollm = preset("smollm");
    CHECK_PIECES(&gpt2, "Hello world! 123", "Hello| world|!| 123");
    CHECK_PIECES(&smollm, "Hello world! 123", "Hello| world|!| |1|2|3");
    CHECK_PIECES(&gpt2, "WE'VE it's", "WE|'|VE| it|'s");
    CHECK_PIECES(&smollm, "  multiple   spaces", " | multiple|  | spaces");
    pre_tokenizer_release(&gpt2);
    pre_tokenizer_release(&smollm);
}

TEST(pre_tokenizer_deepseek_cuts_in_three_turns)
{
    struct pre_tokenizer p = preset("deepseek-v3");
    CHECK_PIECES(&p, "Hello world! 1234", "Hello| world|!| |123|4");
    CHECK_PIECES(&p, "\u4f60\u597d\uff0c\u4e16\u754c\uff01ERNIE",
                 "\u4f60\u597d|\uff0c|\u4e16\u754c|\uff01|ERNIE");
    CHECK_PIECES(&p, "x+=i; a\u0301b", "x|+=|i|;| a\u0301b");
    CHECK_PIECES(&p, "foo_bar.baz", "foo|_bar|.baz");
    pre_tokenizer_release(&p);
}

TEST(pre_tokenizer_behaviors_place_the_matches)
{
    static const struct {
        enum pre_tokenizer_behavior behavior;
        const char *want, *inverted;
    } rows[] = {
        { PRE_TOKENIZER_ISOLATED, "the|-|final|-|-|countdown", "the|-|final|-|-|countdown" },
        { PRE_TOKENIZER_REMOVED, "the|final|countdown", "-|-|-" },
        { PRE_TOKENIZER_MERGED_WITH_PREVIOUS, "the-|final-|-|countdown",
          "the|-final|-|-countdown" },
        { PRE_TOKENIZER_MERGED_WITH_NEXT, "the|-final|-|-countdown", "the-|final-|-|countdown" },
        { PRE_TOKENIZER_CONTIGUOUS, "the|-|final|--|countdown", "the|-|final|--|countdown" },
    };
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        struct pre_tokenizer p = split("-", rows[i].behavior, false),
                             q = split("-", rows[i].behavior, true);
        CHECK_PIECES(&p, "the-final--countdown", rows[i].want);
        CHECK_PIECES(&q, "the-final--countdown", rows[i].inverted);
        pre_tokenizer_release(&p);
        pre_tokenizer_release(&q);
    }
}

TEST(pre_tokenizer_literal_patterns_are_no_expressions)
{
    struct pre_tokenizer p = { 0 };
    struct err err = { 0 };
    CHECK_OK(pre_tokenizer_add_split_literal(&p, STR(".*"), PRE_TOKENIZER_ISOLATED, false, &err));
    CHECK_PIECES(&p, "a.*b.c", "a|.*|b.c");
    CHECK_STATUS(pre_tokenizer_add_split_literal(&p, STR(""), PRE_TOKENIZER_ISOLATED, false, &err),
                 ERR_FORMAT);
    pre_tokenizer_release(&p);
}

TEST(pre_tokenizer_metaspace_marks_spaces)
{
    struct pre_tokenizer p = { 0 }, q = { 0 };
    struct err err = { 0 };
    struct buf b = { 0 };
    CHECK_OK(pre_tokenizer_add_metaspace(&p, STR("_"), PRE_TOKENIZER_FIRST, true, &err));
    CHECK_PIECES(&p, "a b  c", "_a|_b|_|_c");
    CHECK_PIECES(&p, " a", "_a");
    show(&p, STR("a b"), false, &b);
    CHECK_EQ_STR(b.data, "a|_b");
    buf_release(&b);
    CHECK_OK(pre_tokenizer_add_metaspace(&q, STR("_"), PRE_TOKENIZER_NEVER, false, &err));
    CHECK_PIECES(&q, "a b", "a_b");
    CHECK_STATUS(pre_tokenizer_add_prefix_space(&q, &err), ERR_UNSUPPORTED);
    pre_tokenizer_release(&p);
    pre_tokenizer_release(&q);
}

TEST(pre_tokenizer_prefix_space_goes_before_words)
{
    struct pre_tokenizer p = { 0 };
    struct err err = { 0 };
    CHECK_OK(pre_tokenizer_add_prefix_space(&p, &err));
    CHECK_OK(
        pre_tokenizer_add_split(&p, STR(PRE_TOKENIZER_GPT2), PRE_TOKENIZER_ISOLATED, false, &err));
    CHECK_PIECES(&p, "Hello you", " Hello| you");
    CHECK_PIECES(&p, " Hello", " Hello");
    pre_tokenizer_release(&p);
}

TEST(pre_tokenizer_bad_patterns_are_refused_with_the_reason)
{
    struct pre_tokenizer p = { 0 };
    struct err err = { 0 };
    CHECK_STATUS(pre_tokenizer_add_split(&p, STR("a("), PRE_TOKENIZER_ISOLATED, false, &err),
                 ERR_UNSUPPORTED);
    CHECK(strstr(err.text, "parenthesis") != NULL);
    for (int i = 0; i < PRE_TOKENIZER_STAGES_MAX; i++)
        CHECK_OK(pre_tokenizer_add_split(&p, STR("a"), PRE_TOKENIZER_ISOLATED, false, &err));
    CHECK_STATUS(pre_tokenizer_add_split(&p, STR("a"), PRE_TOKENIZER_ISOLATED, false, &err),
                 ERR_UNSUPPORTED);
    CHECK(pre_tokenizer_preset_find("no-such") == NULL);
    CHECK(pre_tokenizer_preset_find(NULL) == NULL);
    pre_tokenizer_release(&p);
}

TEST(pre_tokenizer_matching_has_a_limit)
{
    struct pre_tokenizer p = split("(a+)+$b", PRE_TOKENIZER_ISOLATED, false);
    struct pre_tokenizer_pieces w = { 0 };
    struct err err = { 0 };
    for (int i = 0; i < 64; i++) buf_add_char(&w.text, 'a');
    enum status st = pre_tokenizer_run(&p, true, &w, &err);
    CHECK(st == OK || st == ERR_INVALID);
    pre_tokenizer_pieces_release(&w);
    pre_tokenizer_release(&p);
}

TEST(pre_tokenizer_long_runs_take_linear_time)
{
    static const char *const units[] = { " ", "a",       "1",      ".",     "\n", " a",
                                         "'", "\u00a0",  "\u4e16", "\r\n ", "Aa", "aA",
                                         "A", "A\u4e16", "\u0301", "'s",    " .", "\U0001F642" };
    static const char *const names[] = { "llama3",         "qwen2",   "gpt-2",
                                         "deepseek-v3",    "tekken",  "deepseek-llm",
                                         "deepseek-coder", "default", "smollm" };
    const size_t bytes = test_runs_long() ? 1u << 20 : 1u << 17;
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        struct pre_tokenizer p = preset(names[i]);
        for (size_t u = 0; u < COUNT_OF(units); u++) {
            struct pre_tokenizer_pieces w = { 0 };
            struct err err = { 0 };
            while (w.text.len < bytes) buf_add_c(&w.text, units[u]);
            /* Quadratic work would exceed the time limit of the case. */
            CHECK_OK(pre_tokenizer_run(&p, true, &w, &err));
            size_t at = 0;
            for (size_t k = 0; k < w.n; at += w.spans[k++].n) CHECK(w.spans[k].at == at);
            CHECK(at == w.text.len);
            pre_tokenizer_pieces_release(&w);
        }
        pre_tokenizer_release(&p);
    }
}

TEST_MAIN(CASE(pre_tokenizer_llama3_cuts_words_contractions_and_numbers),
          CASE(pre_tokenizer_white_space_gives_its_last_character_to_the_next_word),
          CASE(pre_tokenizer_qwen2_cuts_every_digit),
          CASE(pre_tokenizer_gpt2_and_smollm_differ_in_digits),
          CASE(pre_tokenizer_deepseek_cuts_in_three_turns),
          CASE(pre_tokenizer_behaviors_place_the_matches),
          CASE(pre_tokenizer_literal_patterns_are_no_expressions),
          CASE(pre_tokenizer_metaspace_marks_spaces),
          CASE(pre_tokenizer_prefix_space_goes_before_words),
          CASE(pre_tokenizer_bad_patterns_are_refused_with_the_reason),
          CASE(pre_tokenizer_matching_has_a_limit),
          CASE_T(pre_tokenizer_long_runs_take_linear_time, 240))
