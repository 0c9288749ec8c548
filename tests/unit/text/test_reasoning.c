/* test_reasoning.c - splits reasoning from the answer: whole texts, every cut in two, and every
 * state that a prompt may leave. */
#include "shared/text/output/reasoning.h"

#include "shared/base/mem.h"
#include "tests/harness/test.h"

#include <string.h>

static const struct {
    const char *format;
    enum reasoning_state from;
    const char *text, *want; /* reasoning|answer */
} EXAMPLES[] = {
    { "think", REASONING_START, "<think>\nSo.\n\nHm. </think>\n\nParis.\n", "So.\n\nHm.|Paris.\n" },
    { "think", REASONING_START, "\n <think>a</think>b", "a|b" },
    { "think", REASONING_START, "Paris. <think>no</think>", "|Paris. <think>no</think>" },
    { "think", REASONING_START, "  Paris", "|  Paris" },
    { "think", REASONING_START, "<thin", "|<thin" },
    { "think", REASONING_START, " ", "| " },
    { "think", REASONING_START, "<think>\n\n</think>\n\nParis", "|Paris" },
    { "think", REASONING_START, "<think>never done\n</thin", "never done\n</thin|" },
    { "think", REASONING_START, "<think>a < b </b> <think> c</think> <think>d",
      "a < b </b> <think> c|<think>d" },
    { "think", REASONING_START, "", "|" },
    { "think", REASONING_LEAD, "\nSo.\n</think>\nParis", "So.|Paris" },
    { "think", REASONING_LEAD, "So é", "So é|" },
    { "think", REASONING_INSIDE, " and then</think>", " and then|" },
    { "think", REASONING_AFTER, "\n\nParis </think>", "|Paris </think>" },
    { "think", REASONING_REST, " more", "| more" },
    { "ernie", REASONING_LEAD, "\nSo.\n</think>\n\n<response>\nParis.\n\nYes.\n</response>\n",
      "So.|Paris.\n\nYes." },
    { "ernie", REASONING_LEAD, "So.\n</think>\n\n\n<tool_call>\n{}\n</tool_call>\n",
      "So.|<tool_call>\n{}\n</tool_call>\n" },
    { "ernie", REASONING_START, "<think>a</think><response>b</response> c", "a|bc" },
    { "ernie", REASONING_START, "<response>\nb</response>", "|b" },
    { "ernie", REASONING_START, "\n<res", "|\n<res" },
    { "ernie", REASONING_START, "plain\n", "|plain\n" },
    { "ernie", REASONING_AFTER, "<response>\nunfinished\n</resp", "|unfinished\n</resp" },
    { "ernie", REASONING_AFTER, "\n<respond", "|<respond" },
};

static void split(const struct reasoning_format *f, enum reasoning_state from, struct str text,
                  size_t a, size_t b, bool bytes, struct buf *out)
{
    struct reasoning r;
    struct buf answer = { 0 };
    reasoning_init(&r, f, from);
    if (bytes) {
        for (size_t i = 0; i < text.n; i++) reasoning_push(&r, str_sub(text, i, 1), out, &answer);
    } else {
        reasoning_push(&r, str_sub(text, 0, a), out, &answer);
        reasoning_push(&r, str_sub(text, a, b - a), out, &answer);
        reasoning_push(&r, str_sub(text, b, SIZE_MAX), out, &answer);
    }
    reasoning_finish(&r, out, &answer);
    reasoning_release(&r);
    buf_add_char(out, '|');
    buf_add_str(out, buf_str(&answer));
    buf_release(&answer);
}

static void check(size_t i, size_t a, size_t b, bool bytes)
{
    struct buf out = { 0 };
    split(reasoning_format_find(str_of(EXAMPLES[i].format)), EXAMPLES[i].from,
          str_of(EXAMPLES[i].text), a, b, bytes, &out);
    if (strcmp(out.data, EXAMPLES[i].want) != 0)
        test_fail(__FILE__, __LINE__, "%s from %d cut at %zu, %zu: %s\n  gives %s\n  wants %s",
                  EXAMPLES[i].format, EXAMPLES[i].from, a, b, EXAMPLES[i].text, out.data,
                  EXAMPLES[i].want);
    buf_release(&out);
}

TEST(reasoning_and_answers_are_split)
{
    for (size_t i = 0; i < COUNT_OF(EXAMPLES); i++) check(i, 0, 0, false);
}

TEST(pieces_do_not_matter)
{
    for (size_t i = 0; i < COUNT_OF(EXAMPLES); i++) {
        size_t n = strlen(EXAMPLES[i].text);
        for (size_t a = 0; a <= n; a++)
            for (size_t b = a; b <= n; b++) check(i, a, b, false);
        check(i, 0, 0, true);
    }
}

/* Text that is certain is emitted at once. */
TEST(reasoning_is_not_held_back)
{
    struct reasoning r;
    struct buf reasoning = { 0 }, answer = { 0 };
    reasoning_init(&r, reasoning_format_find(STR("qwen3")), REASONING_START);
    reasoning_push(&r, STR("<think>\nSo"), &reasoning, &answer);
    CHECK_EQ_STR(reasoning.data, "So");
    CHECK(reasoning_is_inside(&r));
    reasoning_push(&r, STR(" it <"), &reasoning, &answer);
    CHECK_EQ_STR(reasoning.data, "So it");
    reasoning_push(&r, STR("x"), &reasoning, &answer);
    CHECK_EQ_STR(reasoning.data, "So it <x");
    reasoning_push(&r, STR("</think>A"), &reasoning, &answer);
    CHECK(!reasoning_is_inside(&r));
    CHECK_EQ_STR(answer.data, "A");
    reasoning_release(&r);
    buf_release(&reasoning);
    buf_release(&answer);
}

TEST(prompts_say_where_the_answer_begins)
{
    const struct reasoning_format *f = reasoning_format_find(STR("deepseek_r1"));
    CHECK(f != NULL);
    CHECK_EQ_INT(reasoning_state_after(f, STR("<|im_start|>assistant\n")), REASONING_START);
    CHECK_EQ_INT(reasoning_state_after(f, STR("<|im_start|>assistant\n<think>\n")), REASONING_LEAD);
    CHECK_EQ_INT(reasoning_state_after(f, STR("<|im_start|>assistant\n<think>\n\n</think>\n\n")),
                 REASONING_AFTER);
    CHECK_EQ_INT(reasoning_state_after(f, STR("")), REASONING_START);
    CHECK_EQ_INT(reasoning_state_within(f, STR("<think>\nSo")), REASONING_INSIDE);
    CHECK_EQ_INT(reasoning_state_within(f, STR("<think>\nSo</think>")), REASONING_AFTER);
    CHECK_EQ_INT(reasoning_state_within(f, STR("The answer")), REASONING_REST);
    CHECK_EQ_INT(reasoning_state_within(f, STR("")), REASONING_START);
}

TEST(formats_by_name_and_by_template)
{
    CHECK_EQ_STR(reasoning_format_find(STR("ernie-x1"))->name, "ernie");
    CHECK_EQ_STR(reasoning_format_find(STR("deepseek"))->name, "think");
    CHECK(!reasoning_format_find(STR("gpt-oss")));
    CHECK(!reasoning_format_of_template(STR("{{ m.content }}")));
    CHECK_EQ_STR(reasoning_format_of_template(STR("{% if '</think>' in content %}"))->name,
                 "think");
    CHECK_EQ_STR(
        reasoning_format_of_template(STR("<global_setting>\nthink_mode=True\n<think>"))->name,
        "ernie");
}

TEST_MAIN(CASE(reasoning_and_answers_are_split), CASE(pieces_do_not_matter),
          CASE(reasoning_is_not_held_back), CASE(prompts_say_where_the_answer_begins),
          CASE(formats_by_name_and_by_template))
