/* Pre-tokenisers: where texts are cut. Pieces are shown joined by '|'. */
#include "shared/text/tokenizer/pre_tokenizer.h"

#include <string.h>

#include "shared/base/mem.h"
#include "tests/harness/test.h"

static void show(const struct pretok *p, struct str text, bool is_start, struct buf *out)
{
    struct pretok_pieces w = { 0 };
    struct err err = { 0 };
    buf_clear(out);
    buf_add_str(&w.text, text);
    CHECK_OK(pretok_run(p, is_start, &w, &err));
    for (size_t i = 0; i < w.n; i++) {
        if (i) buf_add_char(out, '|');
        buf_add(out, w.text.data + w.spans[i].at, w.spans[i].n);
    }
    pretok_pieces_release(&w);
}

#define CHECK_PIECES(p, text, want)                       \
    do {                                                  \
        struct buf shown_ = { 0 };                        \
        show((p), str_of(text), true, &shown_);           \
        CHECK_EQ_STR(shown_.data ? shown_.data : "", want); \
        buf_release(&shown_);                             \
    } while (0)

static struct pretok preset(const char *name)
{
    struct pretok p = { 0 };
    struct err err = { 0 };
    const struct pretok_preset *found = pretok_preset_find(name);
    CHECK(found);
    CHECK_OK(pretok_add_preset(&p, found, &err));
    return p;
}

static struct pretok split(const char *regex, enum pretok_behavior behavior, bool invert)
{
    struct pretok p = { 0 };
    struct err err = { 0 };
    CHECK_OK(pretok_add_split(&p, str_of(regex), behavior, invert, &err));
    return p;
}

TEST(pretok_llama3_cuts_words_contractions_and_numbers)
{
    struct pretok p = preset("llama-bpe");
    CHECK_PIECES(&p, "Hello, world!", "Hello|,| world|!");
    CHECK_PIECES(&p, "I'll don't WE'VE it's", "I|'ll| don|'t| WE|'VE| it|'s");
    CHECK_PIECES(&p, "Tab 12345", "Tab| |123|45");
    CHECK_PIECES(&p, "for(int i=0;i<10;i++){ x+=i; }", "for|(int| i|=|0|;i|<|10|;i|++){| x|+=|i|;| }");
    CHECK_PIECES(&p, "a_b foo_bar", "a|_b| foo|_bar");
    CHECK_PIECES(&p, "", "");
    pretok_release(&p);
}

TEST(pretok_white_space_gives_its_last_character_to_the_next_word)
{
    struct pretok p = preset("llama3");
    CHECK_PIECES(&p, "  multiple   spaces\n\n\tTab", " | multiple|  | spaces|\n\n|\tTab");
    CHECK_PIECES(&p, "a   ", "a|   ");
    CHECK_PIECES(&p, "a  \n  b", "a|  \n| | b");
    CHECK_PIECES(&p, "\r\n\r\n a  b", "\r\n\r\n| a| | b");
    CHECK_PIECES(&p, "x\n \n y", "x|\n \n| y");
    CHECK_PIECES(&p, "b\u00a0c \u3000 7", "b|\u00a0c| \u3000| |7");
    /* U+180E is no white space, U+0085 is. */
    CHECK_PIECES(&p, "1\u180e\u180e", "1|\u180e\u180e");
    CHECK_PIECES(&p, "1\xC2\x85\xC2\x85", "1|\xC2\x85\xC2\x85");
    pretok_release(&p);
}

TEST(pretok_qwen2_cuts_every_digit)
{
    struct pretok p = preset("qwen2");
    CHECK_PIECES(&p, "Hello world! 123", "Hello| world|!| |1|2|3");
    CHECK_PIECES(&p, "\uff11\u0663 \u00bd", "\uff11|\u0663| |\u00bd");
    CHECK_PIECES(&p, "\u4f60\u597d\uff0c\u4e16\u754c\uff01ERNIE 4.5", "\u4f60\u597d|\uff0c\u4e16\u754c|\uff01ERNIE| |4|.|5");
    pretok_release(&p);
}

TEST(pretok_gpt2_and_smollm_differ_in_digits)
{
    struct pretok gpt2 = preset("gpt-2"), smollm = preset("smollm");
    CHECK_PIECES(&gpt2, "Hello world! 123", "Hello| world|!| 123");
    CHECK_PIECES(&smollm, "Hello world! 123", "Hello| world|!| |1|2|3");
    CHECK_PIECES(&gpt2, "WE'VE it's", "WE|'|VE| it|'s");
    CHECK_PIECES(&smollm, "  multiple   spaces", " | multiple|  | spaces");
    pretok_release(&gpt2);
    pretok_release(&smollm);
}

TEST(pretok_deepseek_cuts_in_three_turns)
{
    struct pretok p = preset("deepseek-v3");
    CHECK_PIECES(&p, "Hello world! 1234", "Hello| world|!| |123|4");
    CHECK_PIECES(&p, "\u4f60\u597d\uff0c\u4e16\u754c\uff01ERNIE", "\u4f60\u597d|\uff0c|\u4e16\u754c|\uff01|ERNIE");
    CHECK_PIECES(&p, "x+=i; a\u0301b", "x|+=|i|;| a\u0301b");
    CHECK_PIECES(&p, "foo_bar.baz", "foo|_bar|.baz");
    pretok_release(&p);
}

TEST(pretok_behaviors_place_the_matches)
{
    static const struct {
        enum pretok_behavior behavior;
        const char          *want, *inverted;
    } rows[] = {
        { PRETOK_ISOLATED, "the|-|final|-|-|countdown", "the|-|final|-|-|countdown" },
        { PRETOK_REMOVED, "the|final|countdown", "-|-|-" },
        { PRETOK_MERGED_WITH_PREVIOUS, "the-|final-|-|countdown", "the|-final|-|-countdown" },
        { PRETOK_MERGED_WITH_NEXT, "the|-final|-|-countdown", "the-|final-|-|countdown" },
        { PRETOK_CONTIGUOUS, "the|-|final|--|countdown", "the|-|final|--|countdown" },
    };
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        struct pretok p = split("-", rows[i].behavior, false), q = split("-", rows[i].behavior, true);
        CHECK_PIECES(&p, "the-final--countdown", rows[i].want);
        CHECK_PIECES(&q, "the-final--countdown", rows[i].inverted);
        pretok_release(&p);
        pretok_release(&q);
    }
}

TEST(pretok_literal_patterns_are_no_expressions)
{
    struct pretok p = { 0 };
    struct err err = { 0 };
    CHECK_OK(pretok_add_split_literal(&p, STR(".*"), PRETOK_ISOLATED, false, &err));
    CHECK_PIECES(&p, "a.*b.c", "a|.*|b.c");
    CHECK_STATUS(pretok_add_split_literal(&p, STR(""), PRETOK_ISOLATED, false, &err), ERR_FORMAT);
    pretok_release(&p);
}

TEST(pretok_metaspace_marks_spaces)
{
    struct pretok p = { 0 }, q = { 0 };
    struct err err = { 0 };
    struct buf b = { 0 };
    CHECK_OK(pretok_add_metaspace(&p, STR("_"), PRETOK_FIRST, true, &err));
    CHECK_PIECES(&p, "a b  c", "_a|_b|_|_c");
    CHECK_PIECES(&p, " a", "_a");
    show(&p, STR("a b"), false, &b);
    CHECK_EQ_STR(b.data, "a|_b");
    buf_release(&b);
    CHECK_OK(pretok_add_metaspace(&q, STR("_"), PRETOK_NEVER, false, &err));
    CHECK_PIECES(&q, "a b", "a_b");
    CHECK_STATUS(pretok_add_prefix_space(&q, &err), ERR_UNSUPPORTED);
    pretok_release(&p);
    pretok_release(&q);
}

TEST(pretok_prefix_space_goes_before_words)
{
    struct pretok p = { 0 };
    struct err err = { 0 };
    CHECK_OK(pretok_add_prefix_space(&p, &err));
    CHECK_OK(pretok_add_split(&p, STR(PRETOK_GPT2), PRETOK_ISOLATED, false, &err));
    CHECK_PIECES(&p, "Hello you", " Hello| you");
    CHECK_PIECES(&p, " Hello", " Hello");
    pretok_release(&p);
}

TEST(pretok_bad_patterns_are_refused_with_the_reason)
{
    struct pretok p = { 0 };
    struct err err = { 0 };
    CHECK_STATUS(pretok_add_split(&p, STR("a("), PRETOK_ISOLATED, false, &err), ERR_UNSUPPORTED);
    CHECK(strstr(err.text, "parenthesis") != NULL);
    for (int i = 0; i < PRETOK_STAGES_MAX; i++) CHECK_OK(pretok_add_split(&p, STR("a"), PRETOK_ISOLATED, false, &err));
    CHECK_STATUS(pretok_add_split(&p, STR("a"), PRETOK_ISOLATED, false, &err), ERR_UNSUPPORTED);
    CHECK(pretok_preset_find("no-such") == NULL);
    CHECK(pretok_preset_find(NULL) == NULL);
    pretok_release(&p);
}

TEST(pretok_matching_has_a_limit)
{
    struct pretok p = split("(a+)+$b", PRETOK_ISOLATED, false);
    struct pretok_pieces w = { 0 };
    struct err err = { 0 };
    for (int i = 0; i < 64; i++) buf_add_char(&w.text, 'a');
    enum status st = pretok_run(&p, true, &w, &err);
    CHECK(st == OK || st == ERR_INVALID);
    pretok_pieces_release(&w);
    pretok_release(&p);
}

TEST(pretok_long_runs_take_linear_time)
{
    static const char *const units[] = { " ", "a", "1", ".", "\n", " a", "'", "\u00a0", "\u4e16", "\r\n ", "Aa", "aA", "A", "A\u4e16", "\u0301", "'s", " .",
                                         "\U0001F642" };
    static const char *const names[] = { "llama3", "qwen2", "gpt-2", "deepseek-v3", "tekken", "deepseek-llm", "deepseek-coder", "default", "smollm" };
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        struct pretok p = preset(names[i]);
        for (size_t u = 0; u < COUNT_OF(units); u++) {
            struct pretok_pieces w = { 0 };
            struct err err = { 0 };
            while (w.text.len < 1u << 20) buf_add_c(&w.text, units[u]);
            CHECK_OK(pretok_run(&p, true, &w, &err)); /* quadratic work would run into the case's time limit */
            size_t at = 0;
            for (size_t k = 0; k < w.n; at += w.spans[k++].n) CHECK(w.spans[k].at == at);
            CHECK(at == w.text.len);
            pretok_pieces_release(&w);
        }
        pretok_release(&p);
    }
}

TEST_MAIN(CASE(pretok_llama3_cuts_words_contractions_and_numbers), CASE(pretok_white_space_gives_its_last_character_to_the_next_word),
          CASE(pretok_qwen2_cuts_every_digit), CASE(pretok_gpt2_and_smollm_differ_in_digits), CASE(pretok_deepseek_cuts_in_three_turns),
          CASE(pretok_behaviors_place_the_matches), CASE(pretok_literal_patterns_are_no_expressions), CASE(pretok_metaspace_marks_spaces),
          CASE(pretok_prefix_space_goes_before_words), CASE(pretok_bad_patterns_are_refused_with_the_reason),
          CASE(pretok_matching_has_a_limit), CASE_T(pretok_long_runs_take_linear_time, 240))
