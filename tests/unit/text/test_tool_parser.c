/* test_tool_parser.c - every format of tool calls: the calls are found, the result does not depend
 * on the pieces in which the text comes, and nothing is lost when the text is malformed or cut. A
 * new entry in tool_formats.c needs examples here. */
#include "shared/text/output/tool_parser.h"

#include "shared/base/hash/hash.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

#include <string.h>

#define D_CALLS     "<｜tool▁calls▁begin｜>"
#define D_CALLS_END "<｜tool▁calls▁end｜>"
#define D_CALL      "<｜tool▁call▁begin｜>"
#define D_CALL_END  "<｜tool▁call▁end｜>"
#define D_SEP       "<｜tool▁sep｜>"

static const char TOOLS[] =
    "[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{\"type\":\"object\","
    "\"properties\":{\"s\":{\"type\":\"string\"},\"i\":{\"type\":"
    "\"integer\"},\"b\":{\"type\":\"boolean\"},\"o\":{\"type\":\"object\"},\"n\":{\"anyOf\":[{"
    "\"type\":\"integer\"},{\"type\":\"null\"}]},\"u\":{\"type\":"
    "[\"integer\",\"string\"]}}}}},{\"type\":\"function\",\"function\":{\"name\":\"get_weather\"}},"
    "{\"type\":\"function\",\"function\":{\"name\":\"g\"}}]";

struct example {
    const char *format, *text;
    /* text|name(arguments) name(arguments) ...; ! before the name: broken, ~: incomplete */
    const char *want;
    bool cut;
};

static const struct example EXAMPLES[] = {
    /* hermes */
    { "hermes", "Just text.\nTwo lines. \n", "Just text.\nTwo lines. \n|", false },
    { "hermes", "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>",
      "|f({\"x\": 1})", false },
    { "hermes", "Let me see.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>\n",
      "Let me see.|f({})", false },
    { "hermes",
      "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"s\": "
      "\"a\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"q\": [1, "
      "{\"k\": \"}\"}]}}\n</tool_call>",
      "|f({\"s\": \"a\"}) get_weather({\"q\": [1, {\"k\": \"}\"}]})", false },
    { "hermes",
      "a <tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call> b "
      "<tool_call>{\"name\":\"g\",\"arguments\":{}}</tool_call> c",
      "a b c|f({}) g({})", false },
    { "hermes",
      "<tool_call>{\"arguments\": {\"x\": \"</tool_call>\"}, \"name\": \"f\"}</tool_call>",
      "|f({\"x\": \"</tool_call>\"})", false },
    { "hermes", "<tool_call>{\"name\": \"f\"}</tool_call>", "|f({})", false },
    { "hermes", "<tool_call>{\"name\": \"f\", \"arguments\": null, \"why\": [1]}", "|f({})",
      false },
    { "hermes",
      "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"x\\\": \\\"\\u00e9\\\"}\"}</tool_call>",
      "|f({\"x\": \"é\"})", false },
    { "hermes", "<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": 1e}}</tool_call>",
      "<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": 1e}}</tool_call>|!f({\"x\": 1e)",
      false },
    { "hermes", "<tool_call>{\"name\": \"\", \"arguments\": {}}</tool_call>",
      "<tool_call>{\"name\": \"\", \"arguments\": {}}</tool_call>|", false },
    { "hermes", "<tool_call>{\"nam\": \"f\"}</tool_call>",
      "<tool_call>{\"nam\": \"f\"}</tool_call>|", false },
    { "hermes", "<tool_call>{'name': 'f'}</tool_call> <tool_call>{\"name\": \"g\"}</tool_call>",
      "<tool_call>{'name': 'f'}</tool_call>|g({})", false },
    { "hermes", "x <tool_call> <tool_call>{\"name\": \"g\"}</tool_call>", "x <tool_call> |g({})",
      false },
    { "hermes", "x <tool_call>", "x <tool_call>|", false },
    { "hermes", "x <tool_call>", "x <tool_call>|", true },
    { "hermes", "x <tool_ca", "x <tool_ca|", false },
    { "hermes", "<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": \"ab",
      "<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": \"ab|!f({\"x\": \"ab)", false },
    { "hermes", "<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": \"ab", "|~f({\"x\": \"ab)",
      true },
    { "hermes", "<tool_call>{\"name\": \"f", "<tool_call>{\"name\": \"f|", true },
    { "hermes", "ü <tool_call>{\"name\": \"f\", \"arguments\": {\"ü\": \"漢字\"}}</tool_call> é",
      "ü é|f({\"ü\": \"漢字\"})", false },
    { "hermes", "1 < 2 <tool 3 </tool_call> 4", "1 < 2 <tool 3 </tool_call> 4|", false },
    { "hermes", "<tool_call>{\"name\": \"nope\", \"arguments\": {\"x\": 1}}</tool_call>",
      "<tool_call>{\"name\": \"nope\", \"arguments\": {\"x\": 1}}</tool_call>|", false },
    { "hermes", "<tool_call>{\"arguments\": {\"x\": 1}, \"name\": \"F\"}</tool_call>",
      "<tool_call>{\"arguments\": {\"x\": 1}, \"name\": \"F\"}</tool_call>|", false },
    { "hermes",
      "<tool_call>{\"name\": \"ff\"}</tool_call>\n<tool_call>{\"name\": \"f\"}</tool_call>",
      "<tool_call>{\"name\": \"ff\"}</tool_call>|f({})", false },
    { "hermes",
      "<tool_call>{\"name\": \"f\"}</tool_call>\n<tool_call>{\"name\": \"get_\"}</tool_call>",
      "<tool_call>{\"name\": \"get_\"}</tool_call>|f({})", false },
    { "hermes", "<tool_call>{\"name\": \"nope\", \"argum",
      "<tool_call>{\"name\": \"nope\", \"argum|", true },
    { "ernie", "\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>\n",
      "|f({\"x\": 1})", false },
    { "ernie", "Hi", "Hi|", false },
    { "ernie", "<tool_call>\n{\"name\": \"nope\"}\n</tool_call>",
      "<tool_call>\n{\"name\": \"nope\"}\n</tool_call>|", false },
    /* qwen3_coder */
    { "qwen3_coder", "Hello.\n", "Hello.\n|", false },
    { "qwen3_coder",
      "I will.\n<tool_call>\n<function=f>\n<parameter=s>\nline 1\n  \"line\" "
      "2\n\n</parameter>\n<parameter=i>\n12\n</parameter>\n<parameter=b>\nTrue\n</parameter>\n</"
      "function>\n</tool_call>\n",
      "I will.|f({\"s\": \"line 1\\n  \\\"line\\\" 2\\n\", \"i\": 12, \"b\": true})", false },
    { "qwen3_coder",
      "<tool_call>\n<function=f>\n<parameter=o>\n{\"a\": [1, "
      "2]}\n</parameter>\n<parameter=n>\nNone\n</parameter>\n<parameter=u>\n7\n</"
      "parameter>\n<parameter=zz>\n1\n</parameter>\n</function>\n</tool_call>",
      "|f({\"o\": {\"a\": [1, 2]}, \"n\": null, \"u\": \"7\", \"zz\": \"1\"})", false },
    { "qwen3_coder", "<function=f>\n</function>", "|f({})", false },
    { "qwen3_coder", "<tool_call>\n<function=nope>\n<parameter=s>\na\n</parameter>\n</function>",
      "<tool_call>\n<function=nope>\n<parameter=s>\na\n</parameter>\n</function>|", false },
    { "qwen3_coder",
      "<tool_call><function=f></function></tool_call><tool_call><function=g><parameter=a>1</"
      "parameter></function></tool_call>",
      "|f({}) g({\"a\": \"1\"})", false },
    { "qwen3_coder",
      "<tool_call>\n<function=f>\n<parameter=i>\nmany\n</parameter>\n<parameter=s>\na</param "
      "b\n</parameter>",
      "|f({\"i\": \"many\", \"s\": \"a</param b\"})", false },
    { "qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\nabc", "|~f({\"s\": \"abc)", true },
    { "qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\nabc",
      "<tool_call>\n<function=f>\n<parameter=s>\nabc|!f({\"s\": \"abc)", false },
    { "qwen3_coder", "<tool_call>\nno call\n</tool_call>", "<tool_call>\nno call\n</tool_call>|",
      false },
    { "qwen3_coder", "<tool_call>\n<function=>\n</function>",
      "<tool_call>\n<function=>\n</function>|", false },
    { "qwen3_coder", "<tool_call>\n<function=f>\nstray\n</function>",
      "<tool_call>\n<function=f>\nstray\n</function>|!f({)", false },
    /* deepseek */
    { "deepseek_v3", "Plain.", "Plain.|", false },
    { "deepseek_v3",
      D_CALLS D_CALL "function" D_SEP "f\n```json\n{\"x\": \"a```b\"}\n```" D_CALL_END "\n" D_CALL
                     "function" D_SEP "g\n```json\n{}\n```" D_CALL_END D_CALLS_END,
      "|f({\"x\": \"a```b\"}) g({})", false },
    { "deepseek_v3", "Look. " D_CALL "function" D_SEP "f\n```json\n{\"x\": 1}",
      "Look.|f({\"x\": 1})", false },
    { "deepseek_v3", D_CALLS D_CALL "f" D_SEP "{\"x\": 1}" D_CALL_END D_CALLS_END, "|f({\"x\": 1})",
      false },
    { "deepseek_v3", D_CALLS "nothing" D_CALLS_END, D_CALLS "nothing" D_CALLS_END "|", false },
    { "deepseek_v3",
      D_CALLS D_CALL "function" D_SEP "nope\n```json\n{}\n```" D_CALL_END D_CALLS_END,
      D_CALLS D_CALL "function" D_SEP "nope\n```json\n{}\n```" D_CALL_END D_CALLS_END "|", false },
    { "deepseek_v3",
      D_CALLS D_CALL "function" D_SEP "f\n```json\n{x: 1}\n```" D_CALL_END D_CALLS_END,
      D_CALLS D_CALL "function" D_SEP "f\n```json\n{x: 1}\n```" D_CALL_END D_CALLS_END "|!f({)",
      false },
    { "deepseek_v3", D_CALLS D_CALL "function" D_SEP "f\n```json\n{\"x\": [1", "|~f({\"x\": [1)",
      true },
    { "deepseek_v31",
      D_CALLS D_CALL "f" D_SEP "{\"x\": 1}" D_CALL_END D_CALL "g" D_SEP "{}" D_CALL_END D_CALLS_END,
      "|f({\"x\": 1}) g({})", false },
    { "deepseek_v31", "A" D_CALLS D_CALL "f" D_SEP "[1]" D_CALL_END D_CALLS_END,
      "A" D_CALLS D_CALL "f" D_SEP "[1]" D_CALL_END D_CALLS_END "|", false },
    { "deepseek_v31", "B", "B|", false },
    { "deepseek_v31",
      D_CALLS D_CALL "f" D_SEP "{}" D_CALL_END D_CALL "nope" D_SEP "{}" D_CALL_END D_CALLS_END,
      D_CALL_END D_CALL "nope" D_SEP "{}" D_CALL_END D_CALLS_END "|f({})", false },
    /* llama */
    { "llama3_json", "The weather is fine {really}.", "The weather is fine {really}.|", false },
    { "llama3_json", "{\"name\": \"f\", \"parameters\": {\"x\": 1}}", "|f({\"x\": 1})", false },
    { "llama3_json",
      "\n\n{\"type\": \"function\", \"name\": \"f\", \"parameters\": {\"x\": 1}}; {\"name\": "
      "\"get_weather\", \"arguments\": {}}\n",
      "|f({\"x\": 1}) get_weather({})", false },
    { "llama3_json",
      "{\"name\": \"f\", \"parameters\": {}}\n{\"name\": \"f\", \"parameters\": {\"i\": 2}}",
      "|f({}) f({\"i\": 2})", false },
    { "llama3_json", "<|python_tag|>{\"name\": \"other\", \"parameters\": {\"x\": 1}}",
      "<|python_tag|>{\"name\": \"other\", \"parameters\": {\"x\": 1}}|", false },
    { "llama3_json", "<|python_tag|>brave.call(query=\"x\")",
      "<|python_tag|>brave.call(query=\"x\")|", false },
    { "llama3_json", "{\"name\": \"Paris\", \"parameters\": {}}",
      "{\"name\": \"Paris\", \"parameters\": {}}|", false },
    { "llama3_json", " {\"city\": \"Paris\"}", " {\"city\": \"Paris\"}|", false },
    { "llama3_json", "{\"name\": \"f\", \"parameters\": {\"x\": \"y", "|~f({\"x\": \"y)", true },
    { "llama3_json", "{\"name\": \"f\", \"parameters\": {}} and more", "and more|f({})", false },
    /* mistral */
    { "mistral", "Bonjour.", "Bonjour.|", false },
    { "mistral",
      "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"x\": 1}}, {\"name\": \"g\", \"arguments\": "
      "{}, \"id\": \"abcdefghi\"}]",
      "|f({\"x\": 1}) g({})", false },
    { "mistral", "Hm. [TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"x\": 1}}]",
      "Hm.|f({\"x\": 1})", false },
    { "mistral", "[TOOL_CALLS]f{\"x\": 1}", "|f({\"x\": 1})", false },
    { "mistral", "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"x\": 1}", "|~f({\"x\": 1})",
      true },
    { "mistral", "[TOOL_CALLS] none", "[TOOL_CALLS] none|", false },
    { "mistral", "[TOOL_CALLS][{\"name\": \"f\"}, {\"name\": \"nope\", \"arguments\": {}}]",
      ", {\"name\": \"nope\", \"arguments\": {}}]|f({})", false },
    { "mistral_v11", "[TOOL_CALLS]f[ARGS]{\"x\": 1}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}",
      "|f({\"x\": 1}) g({})", false },
    { "mistral_v11", "Voilà[TOOL_CALLS]two words[ARGS]{}", "Voilà[TOOL_CALLS]two words[ARGS]{}|",
      false },
    { "mistral_v11", "x", "x|", false },
    { "mistral_v11", "[TOOL_CALLS]nope[ARGS]{\"x\": 1}", "[TOOL_CALLS]nope[ARGS]{\"x\": 1}|",
      false },
};

static cJSON *tools(void)
{
    cJSON *t = NULL;
    CHECK_OK(json_parse(STR(TOOLS), false, &t, NULL));
    return t;
}

static const struct tool_format *format(const char *name)
{
    const struct tool_format *f = tool_format_find(str_of(name));
    if (!f) test_fail(__FILE__, __LINE__, "no format %s", name);
    return f;
}

static void show(const struct tool_parser *p, struct buf *text)
{
    buf_add_char(text, '|');
    for (uint32_t i = 0; i < p->n_calls; i++) {
        const struct tool_call *c = &p->calls[i];
        if (i) buf_add_char(text, ' ');
        if (c->broken) buf_add_char(text, '!');
        else if (!c->complete) buf_add_char(text, '~');
        buf_add_str(text, buf_str(&c->name));
        buf_add_char(text, '(');
        buf_add_str(text, buf_str(&c->arguments));
        buf_add_char(text, ')');
    }
}

/* Parses `text` in pieces that end at the offsets `ends`. */
static void parse(const struct tool_format *f, const cJSON *t, struct str text, const size_t *ends,
                  size_t n, bool cut, struct buf *out)
{
    struct tool_parser p;
    size_t from = 0;
    tool_parser_init(&p, f, t, 0);
    for (size_t i = 0; i < n; i++) {
        tool_parser_push(&p, str_sub(text, from, ends[i] - from), out);
        from = ends[i];
    }
    tool_parser_push(&p, str_sub(text, from, SIZE_MAX), out);
    tool_parser_finish(&p, cut, out);
    show(&p, out);
    tool_parser_release(&p);
}

static void check(const struct example *e, const cJSON *t, const size_t *ends, size_t n)
{
    struct buf out = { 0 };
    parse(format(e->format), t, str_of(e->text), ends, n, e->cut, &out);
    if (strcmp(out.data, e->want) != 0)
        test_fail(__FILE__, __LINE__, "%s, %zu cuts, first at %zu: %s\n  gives %s\n  wants %s",
                  e->format, n, n ? ends[0] : 0, e->text, out.data, e->want);
    buf_release(&out);
}

TEST(tool_formats_find_calls)
{
    cJSON *t = tools();
    for (size_t i = 0; i < COUNT_OF(EXAMPLES); i++) check(&EXAMPLES[i], t, NULL, 0);
    cJSON_Delete(t);
}

TEST(tool_formats_do_not_depend_on_pieces)
{
    cJSON *t = tools();
    size_t ends[1024];
    for (size_t i = 0; i < COUNT_OF(EXAMPLES); i++) {
        size_t n = strlen(EXAMPLES[i].text);
        CHECK(n < COUNT_OF(ends));
        for (size_t at = 0; at <= n; at++) check(&EXAMPLES[i], t, &at, 1);
        for (size_t at = 0; at < n; at++) ends[at] = at + 1;
        check(&EXAMPLES[i], t, ends, n);
        for (size_t a = 0; a + 1 < n; a += 3)
            for (size_t b = a + 1; b < n; b += 7) check(&EXAMPLES[i], t, (size_t[]){ a, b }, 2);
    }
    cJSON_Delete(t);
}

TEST(tool_formats_have_examples)
{
    for (size_t i = 0; tool_format_at(i); i++) {
        int n = 0;
        for (size_t k = 0; k < COUNT_OF(EXAMPLES); k++)
            n += strcmp(EXAMPLES[k].format, tool_format_at(i)->name) == 0;
        if (n < 2) test_fail(__FILE__, __LINE__, "%s has %d examples", tool_format_at(i)->name, n);
    }
}

/* While text comes, names and arguments only grow. */
TEST(tool_calls_only_grow)
{
    cJSON *t = tools();
    for (size_t i = 0; i < COUNT_OF(EXAMPLES); i++) {
        struct tool_parser p;
        struct buf text = { 0 }, before = { 0 };
        uint32_t n = 0;
        tool_parser_init(&p, format(EXAMPLES[i].format), t, 0);
        for (const char *c = EXAMPLES[i].text; *c; c++) {
            tool_parser_push(&p, (struct str){ c, 1 }, &text);
            uint32_t named = 0;
            while (named < p.n_calls && p.calls[named].named) named++;
            CHECK(named >= n);
            if (named == n && n > 0)
                CHECK(
                    str_starts(buf_str(&p.calls[n - 1].arguments), before.data ? before.data : ""));
            n = named;
            buf_clear(&before);
            if (n) buf_add_str(&before, buf_str(&p.calls[n - 1].arguments));
        }
        tool_parser_release(&p);
        buf_release(&text);
        buf_release(&before);
    }
    cJSON_Delete(t);
}

/* Random mixtures of pieces of the examples: one push and byte by byte give the same. */
TEST(tool_formats_on_random_text)
{
    static const char *const words[] = { "<tool_call>",
                                         "</tool_call>",
                                         "{\"name\": \"f\", ",
                                         "\"arguments\": ",
                                         "{\"x\": 1}",
                                         "}",
                                         "{",
                                         "\n",
                                         " ",
                                         "[TOOL_CALLS]",
                                         "[",
                                         "]",
                                         ",",
                                         "[ARGS]",
                                         "[CALL_ID]",
                                         D_CALLS,
                                         D_CALL,
                                         D_SEP,
                                         D_CALL_END,
                                         D_CALLS_END,
                                         "function",
                                         "f",
                                         "```json",
                                         "```",
                                         "<|python_tag|>",
                                         ";",
                                         "\"parameters\": ",
                                         "<function=",
                                         "f>",
                                         "</function>",
                                         "<parameter=",
                                         "s>",
                                         "i>",
                                         "</parameter>",
                                         "é",
                                         "\"",
                                         "\\",
                                         "text",
                                         "{\"name\": \"f\", \"arguments\": {}}",
                                         "12",
                                         ":" };
    cJSON *t = tools();
    static size_t ends[4096];
    for (size_t i = 0; i < COUNT_OF(ends); i++) ends[i] = i + 1;
    uint64_t seed = 1;
    for (int round = 0; round < 4000; round++) {
        const struct tool_format *f = tool_format_at((size_t)round % 8);
        struct buf text = { 0 }, whole = { 0 }, bytes = { 0 };
        bool cut = round & 8;
        if (round & 16) buf_add_str(&text, f->open[0]);
        for (int k = 0; k < 14; k++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            buf_add_c(&text, words[(seed >> 33) % COUNT_OF(words)]);
        }
        parse(f, t, buf_str(&text), NULL, 0, cut, &whole);
        parse(f, t, buf_str(&text), ends, text.len, cut, &bytes);
        if (strcmp(whole.data, bytes.data) != 0)
            test_fail(__FILE__, __LINE__, "%s cut %d: %s\n  whole %s\n  bytes %s", f->name, cut,
                      text.data, whole.data, bytes.data);
        buf_release(&text);
        buf_release(&whole);
        buf_release(&bytes);
    }
    cJSON_Delete(t);
}

TEST(one_call_is_kept_when_no_more_are_wanted)
{
    struct tool_parser p;
    struct buf text = { 0 };
    tool_parser_init(&p, format("hermes"), NULL, 1);
    tool_parser_push(&p, STR("<tool_call>{\"name\": \"f\"}</tool_call>"), &text);
    CHECK(!p.full);
    tool_parser_push(&p, STR("<tool_call>{\"name\": \"g\"}</tool_call> more"), &text);
    CHECK(p.full);
    tool_parser_push(&p, STR("x"), &text);
    tool_parser_finish(&p, false, &text);
    CHECK_EQ_INT(p.n_calls, 1);
    CHECK_EQ_INT(text.len, 0);
    tool_parser_release(&p);
    buf_release(&text);
}

/* The beginning that a format writes, continued as a model would, is parsed as a call. */
TEST(begun_calls_are_read)
{
    static const struct {
        const char *format, *rest_named, *rest;
    } rows[] = {
        { "hermes", " {\"x\": 1}}", "f\", \"arguments\": {\"x\": 1}}" },
        { "ernie", " {\"x\": 1}}", "f\", \"arguments\": {\"x\": 1}}" },
        { "qwen3_coder", "<parameter=i>\n1\n</parameter></function>",
          "f>\n<parameter=i>\n1\n</parameter></function>" },
        { "deepseek_v3", "{\"x\": 1}\n```", "f\n```json\n{\"x\": 1}\n```" },
        { "deepseek_v31", "{\"x\": 1}", "f" D_SEP "{\"x\": 1}" },
        { "llama3_json", " {\"x\": 1}}", "f\", \"parameters\": {\"x\": 1}}" },
        { "mistral", " {\"x\": 1}}]", "f\", \"arguments\": {\"x\": 1}}]" },
        { "mistral_v11", "{\"x\": 1}", "f[ARGS]{\"x\": 1}" },
    };
    cJSON *t = tools();
    for (size_t i = 0; i < COUNT_OF(rows) * 2; i++) {
        const struct tool_format *f = format(rows[i / 2].format);
        struct buf begin = { 0 }, out = { 0 };
        f->begin(i % 2 ? (struct str){ NULL, 0 } : STR("f"), &begin);
        buf_add_c(&begin, i % 2 ? rows[i / 2].rest : rows[i / 2].rest_named);
        parse(f, t, buf_str(&begin), NULL, 0, false, &out);
        const char *want = strcmp(f->name, "qwen3_coder") == 0 ? "|f({\"i\": 1})"
                                                               : "|f({\"x\": 1})";
        if (strcmp(out.data, want) != 0)
            test_fail(__FILE__, __LINE__, "%s: %s gives %s", f->name, begin.data, out.data);
        buf_release(&begin);
        buf_release(&out);
    }
    CHECK_EQ_INT(COUNT_OF(rows), 8);
    cJSON_Delete(t);
}

TEST(formats_by_name_and_by_template)
{
    static const struct {
        const char *template, *want;
    } rows[] = {
        { "{% for m in messages %}{{ m.content }}{% endfor %}", NULL },
        { "<tool_call>\n{\"name\": ...}\n</tool_call>", "hermes" },
        { "<tool_call>\n<function=example>\n<parameter=a>", "qwen3_coder" },
        { "<tool_call>{{ name }}<arg_key>", NULL },
        { "<global_setting>\nthink_mode=True <tool_call>", "ernie" },
        { D_SEP "{{ name }}\n```json", "deepseek_v3" },
        { D_SEP "{{ arguments }}", "deepseek_v31" },
        { "<|start_header_id|>", NULL },
        { "<|start_header_id|>{% if tools %}functools[...]", NULL },
        { "<|start_header_id|>{% if tools %}<function=f>{...}</function>", NULL },
        { "<|start_header_id|>{% if tools %}{\"name\": n, \"parameters\": p}", "llama3_json" },
        { "[AVAILABLE_TOOLS] [TOOL_CALLS] [", "mistral" },
        { "[AVAILABLE_TOOLS][TOOL_CALLS]f[ARGS]", "mistral_v11" },
    };
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        const struct tool_format *f = tool_format_of_template(str_of(rows[i].template));
        if (!rows[i].want) CHECK(!f);
        else CHECK_EQ_STR(f ? f->name : "none", rows[i].want);
    }
    CHECK_EQ_STR(format("deepseek-v3.1")->name, "deepseek_v31");
    CHECK_EQ_STR(format("ernie-x1")->name, "ernie");
    CHECK_EQ_STR(format("ernie_x1")->name, "ernie");
    CHECK_EQ_STR(format("qwen3")->name, "hermes");
    CHECK(!tool_format_find(STR("nosuch")) && !tool_format_find(STR("")));
}

TEST_MAIN(CASE(tool_formats_find_calls), CASE(tool_formats_do_not_depend_on_pieces),
          CASE(tool_formats_have_examples), CASE(tool_calls_only_grow),
          CASE(tool_formats_on_random_text), CASE(one_call_is_kept_when_no_more_are_wanted),
          CASE(begun_calls_are_read), CASE(formats_by_name_and_by_template))
