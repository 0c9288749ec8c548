/* test_jinja.c - the template language: every construct, white space control, scopes, errors with
 * their line, and limits. tests/fixtures/jinja_compare.py compares thousands of templates with
 * Python's implementation. */
#include "shared/text/jinja/jinja.h"

#include "shared/base/mem.h"
#include "tests/harness/test.h"

#include <string.h>

enum { NOW = 1721995200 }; /* 2024-07-26 12:00:00 UTC */

static const char VARS[] =
    "{\"s\": \"Hello\", \"i\": 7, \"f\": 2.5, \"yes\": true, \"no\": false, \"nil\": null, \"l\": "
    "[3, 1, 2], \"d\": {\"b\": 1, \"a\": [2]},"
    " \"m\": [{\"role\": \"system\", \"content\": \"S\"}, {\"role\": \"user\", \"content\": \" U "
    "\"}, {\"role\": \"assistant\", \"content\": \"A\"}]}";

static enum status render(const char *source, struct buf *out, struct err *err)
{
    struct jinja *t = NULL;
    cJSON *vars = NULL;
    CHECK_OK(json_parse(str_of(VARS), false, &vars, err));
    enum status st = jinja_parse(str_of(source), &t, err);
    if (st == OK) st = jinja_render(t, vars, NOW, out, err);
    jinja_free(t);
    cJSON_Delete(vars);
    return st;
}

struct example {
    const char *source, *want;
};

static void check_all(const struct example *e, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        struct buf out = { 0 };
        struct err err = { 0 };
        if (render(e[i].source, &out, &err) != OK)
            test_fail(__FILE__, __LINE__, "%s: %s", e[i].source, err.text);
        const char *got = out.data ? out.data : "";
        if (strcmp(got, e[i].want) != 0)
            test_fail(__FILE__, __LINE__, "%s gives \"%s\", expected \"%s\"", e[i].source, got,
                      e[i].want);
        buf_release(&out);
    }
}

#define CHECK_ALL(examples) check_all(examples, COUNT_OF(examples))

TEST(jinja_applies_precedence)
{
    static const struct example e[] = {
        { "{{ 1 + 2 * 3 }}", "7" },
        { "{{ (1 + 2) * 3 }}", "9" },
        { "{{ 'a' + ' x ' | trim + 'b' }}", "axb" },
        { "{{ not q is defined }}", "True" },
        { "{{ 'a' ~ 1 ~ none ~ true ~ q }}", "a1NoneTrue" },
        { "{{ 1 ~ 2 + 3 ~ 4 }}", "1234" },
        { "{{ 2 ** 3 ** 2 }}", "64" },
        { "{{ -2 | abs }} {{ 7 // 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 7 / 2 }}", "2 3 -4 2 3.5" },
        { "{{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }} {{ 2 in l }} {{ 'z' not in d }}",
          "True False True True" },
        { "{{ yes and 'x' or 'y' }}{{ no and 'x' or 'y' }}{{ '' or 0 }}", "xy0" },
        { "{{ 'a' if no else 'b' if no else 'c' }}{{ 'x' if no }}", "c" },
        { "{{ 'a' 'b' }}", "ab" },
    };
    CHECK_ALL(e);
}

TEST(jinja_prints_values_as_python_does)
{
    static const struct example e[] = {
        { "{{ none }} {{ true }} {{ 1.0 }} {{ 1e16 }} {{ 0.1 + 0.2 }} {{ 1e-5 }}",
          "None True 1.0 1e+16 0.30000000000000004 1e-05" },
        { "{{ [1, 'a', none, \"it's\"] }} {{ (1,) }} {{ {'a': 1} }}",
          "[1, 'a', None, \"it's\"] (1,) {'a': 1}" },
        { "{{ ['\\n\\x01\xc3\xa9'] }}", "['\\n\\x01\xc3\xa9']" },
        { "{{ d }} {{ f }} {{ i }}", "{'b': 1, 'a': [2]} 2.5 7" },
        { "[{{ nosuch }}{{ m[9] }}{{ d.nosuch }}{{ nil.x }}]", "[]" },
    };
    CHECK_ALL(e);
}

TEST(jinja_finds_members)
{
    static const struct example e[] = {
        { "{{ m[0].role }}{{ m[-1]['role'] }}{{ m.0.content }}", "systemassistantS" },
        { "{{ l[1:] }}{{ l[::-1] }}{{ s[1:3] }}{{ s[-1] }}{{ 'h\xc3\xa9llo'[1] }}",
          "[1, 2][2, 1, 3]elo\xc3\xa9" },
        { "{% for k, v in d.items() %}{{ k }}{{ v }}{% endfor %}{{ d.get('x', 9) }}{{ d.keys() | "
          "list }}",
          "b1a[2]9['b', 'a']" },
        { "{{ s.upper() }}{{ s.split('l') }}{{ s.startswith('He') }}{{ 'xax'.strip('x') }}{{ "
          "'a</t>b'.split('</t>')[-1] }}",
          "HELLO['He', '', 'o']Trueab" },
        { "{{ '\\n a\\n'.lstrip('\\n').rstrip('\\n') }}|{{ s.replace('l', 'L', 1) }}|{{ "
          "s.find('l') }}|{{ ','.join(['a', 'b']) }}",
          " a|HeLlo|2|a,b" },
        { "{% set x = [1] %}{% set q = x.append(2) %}{{ x }}{{ x.pop() }}{{ x }}", "[1, 2]2[1]" },
    };
    CHECK_ALL(e);
}

TEST(jinja_controls_white_space)
{
    static const struct example e[] = {
        { "a\n  {% if yes %}\n  b\n  {% endif %}\nc\n", "a\n  b\nc" },
        { "a {%- if yes -%} b {%- endif -%} c", "abc" },
        { "  {%+ if yes %}x{% endif +%}\ny", "  x\ny" },
        { "  {{ 1 }}\n\n{{ 2 }}\n", "  1\n\n2" },
        { "  {{- 1 -}}  \n x", "1x" },
        { "x {% if yes %} y {% endif %}", "x  y " },
        { "  {# c #}\nx{#- c -#}  y", "xy" },
        { "a\r\nb\rc\n", "a\nb\nc" },
        { "{% raw %}{{ x }}{% endraw %}", "{{ x }}" },
        { "{{ '}}' }}{{ {'a': {'b': 1}}['a']['b'] }}", "}}1" },
    };
    CHECK_ALL(e);
}

TEST(jinja_runs_loops)
{
    static const struct example e[] = {
        { "{% for x in l %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ "
          "loop.length }};{% endfor %}",
          "10TrueFalse3;21FalseFalse3;32FalseTrue3;" },
        { "{% for x in l %}{{ loop.previtem if loop.previtem is defined else '-' }}{{ "
          "loop.nextitem }};{% endfor %}",
          "-1;32;1;" },
        { "{% for x in l if x > 1 %}{{ x }}{{ loop.length }} {% endfor %}", "32 22 " },
        { "{% for x in [] %}x{% else %}none{% endfor %}{% for x in nosuch %}x{% else %}none{% "
          "endfor %}",
          "nonenone" },
        { "{% for x in l %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% endfor %}{% for x in "
          "l %}{{ x }}{% break %}{% endfor %}",
          "323" },
        { "{% for a, (b, c) in [(1, (2, 3))] %}{{ a }}{{ b }}{{ c }}{% endfor %}{% for x in "
          "range(3) %}{{ loop.cycle('a', 'b') }}{% endfor %}",
          "123aba" },
        { "{% for c in 'h\xc3\xa9' %}{{ c }}.{% endfor %}{% for k in d %}{{ k }}{% endfor %}",
          "h.\xc3\xa9.ba" },
    };
    CHECK_ALL(e);
}

TEST(jinja_keeps_scopes_apart)
{
    static const struct example e[] = {
        { "{% set x = 1 %}{% for a in l %}{{ x }}{% set x = 2 %}{{ x }}{% endfor %}{{ x }}",
          "1212121" },
        { "{% if yes %}{% set x = 3 %}{% endif %}{{ x }}", "3" },
        { "{% set ns = namespace(n=0) %}{% for a in l %}{% set ns.n = ns.n + a %}{% endfor %}{{ "
          "ns.n }}",
          "6" },
        { "{% set a, b = 1, 2 %}{{ b }}{{ a }}{% set x %} q{{ a }} {% endset %}[{{ x }}]{% set y | "
          "trim | upper %} q {% endset %}[{{ y }}]",
          "21[ q1 ][Q]" },
        { "{% macro f(a, b='B', c=a) %}<{{ a }}{{ b }}{{ c }}>{% endmacro %}{{ f(1) }}{{ f(1, c=3) "
          "}}{{ f() }}",
          "<1B1><1B3><B>" },
        { "{% macro f(n) %}{% if n > 0 %}{{ n }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(5) }}",
          "54321" },
        { "{% macro f() %}{{ later }}{% endmacro %}{{ f() }}{% set later = 1 %}{{ f() }}", "1" },
        { "{% generation %}a{% set q = 1 %}{% endgeneration %}{{ q is defined }}", "aFalse" },
    };
    CHECK_ALL(e);
}

TEST(jinja_has_the_filters)
{
    static const struct example e[] = {
        { "{{ ' a ' | trim }}{{ l | length }}{{ s | upper }}{{ s | lower }}{{ 'ab cd' | title }}{{ "
          "'aB' | capitalize }}",
          "a3HELLOhelloAb CdAb" },
        { "{{ d | tojson }}{{ [1.5, none, true, 'a\"<\xc3\xa9'] | tojson }}",
          "{\"b\": 1, \"a\": [2]}[1.5, null, true, \"a\\\"<\xc3\xa9\"]" },
        { "{{ d | tojson(indent=2) }}", "{\n  \"b\": 1,\n  \"a\": [\n    2\n  ]\n}" },
        { "{{ d | tojson(separators=(',', ':')) }}{{ '\xc3\xa9' | tojson(ensure_ascii=true) }}",
          "{\"b\":1,\"a\":[2]}\"\\u00e9\"" },
        { "{{ m | selectattr('role', 'equalto', 'user') | map(attribute='content') | join }}{{ m | "
          "map(attribute='role') | reject('equalto', 'user') | list }}",
          " U ['system', 'assistant']" },
        { "{{ l | sort }}{{ l | first }}{{ l | last }}{{ l | reverse | list }}{{ [1, 1, 2] | "
          "unique | list }}{{ l | join(', ') }}",
          "[1, 2, 3]32[2, 1, 3][1, 2]3, 1, 2" },
        { "{{ nosuch | default('D') }}{{ '' | d('E', true) }}{{ '3' | int + 1 }}{{ '2.5' | float "
          "}}{{ 3.7 | int }}{{ 2.567 | round(2) }}{{ -3 | abs }}",
          "DE42.532.573" },
        { "{{ d | items | list }}{{ d | dictsort }}{{ 'a\nb' | indent(2) }}{{ s | replace('l', "
          "'L') }}{{ '[1]' | from_json }}{{ 5 | string ~ 'x' }}{{ '<' | safe }}",
          "[('b', 1), ('a', [2])][('a', [2]), ('b', 1)]a\n  bHeLLo[1]5x<" },
    };
    CHECK_ALL(e);
}

TEST(jinja_has_the_tests)
{
    static const struct example e[] = {
        { "{{ s is string }}{{ i is number }}{{ d is mapping }}{{ l is iterable }}{{ l is sequence "
          "}}{{ nil is none }}{{ nil is not none }}",
          "TrueTrueTrueTrueTrueTrueFalse" },
        { "{{ q is undefined }}{{ yes is true }}{{ no is false }}{{ 3 is odd }}{{ 4 is even }}{{ 9 "
          "is divisibleby 3 }}{{ 1 is eq 1 }}{{ 1 is in l }}",
          "TrueTrueTrueTrueTrueTrueTrueTrue" },
        { "{{ l is string }}{{ s is mapping }}{{ yes is boolean }}{{ i is integer }}{{ f is float "
          "}}",
          "FalseFalseTrueTrueTrue" },
        { "{{ strftime_now('%d %b %Y') }}", "26 Jul 2024" },
    };
    CHECK_ALL(e);
}

struct failure {
    const char *source;
    enum status want;
    const char *text; /* part of the message */
};

TEST(jinja_names_the_line_of_an_error)
{
    static const struct failure e[] = {
        { "a\nb{{ 1 + }}", ERR_FORMAT, "line 2: expected an expression, found '}}'" },
        { "{% if x %}\n\n{% endfor %}", ERR_FORMAT, "line 3" },
        { "{% if x %}", ERR_FORMAT, "expected elif, found the end" },
        { "\n\n{{ 'abc }}", ERR_FORMAT, "line 3: a string literal is not closed" },
        { "{# x", ERR_FORMAT, "a comment has no '#}'" },
        { "{{ x | frobnicate }}", ERR_UNSUPPORTED, "the filter 'frobnicate'" },
        { "{{ x is frobnicated }}", ERR_UNSUPPORTED, "the test 'frobnicated'" },
        { "\n{% include 'x' %}", ERR_UNSUPPORTED, "line 2: the tag 'include'" },
        { "{% frob %}", ERR_FORMAT, "expected a tag name" },
        { "{% break %}", ERR_FORMAT, "outside a loop" },
        { "{{ f(*x) }}", ERR_UNSUPPORTED, "*args" },
        { "\n{{ 'a' + 1 }}", ERR_FORMAT, "line 2: '+' cannot take a string and a int" },
        { "{{ nosuch.x }}", ERR_FORMAT, "'nosuch' is undefined" },
        { "{{ nosuch() }}", ERR_FORMAT, "'nosuch' is undefined" },
        { "{{ 1 / 0 }}", ERR_FORMAT, "division by zero" },
        { "{{ 9223372036854775807 + 1 }}", ERR_FORMAT, "too large" },
        { "{{ nosuch | tojson }}", ERR_FORMAT, "undefined" },
        { "{% set x = {} %}{% set x.a = 1 %}", ERR_FORMAT, "not a namespace" },
        { "{% for x in 5 %}{% endfor %}", ERR_FORMAT, "cannot be iterated" },
        { "{{ s | replace('a') }}", ERR_FORMAT, "replace needs the argument 'new'" },
    };
    for (size_t i = 0; i < COUNT_OF(e); i++) {
        struct buf out = { 0 };
        struct err err = { 0 };
        enum status st = render(e[i].source, &out, &err);
        if (st != e[i].want || !strstr(err.text, e[i].text))
            test_fail(__FILE__, __LINE__, "%s gives %s \"%s\"", e[i].source, status_name(st),
                      err.text);
        buf_release(&out);
    }
}

TEST(jinja_passes_on_what_the_template_raises)
{
    struct buf out = { 0 };
    struct err err = { 0 };
    CHECK_STATUS(render("\n{{ raise_exception('roles must ' ~ 'alternate') }}", &out, &err),
                 ERR_INVALID);
    CHECK_EQ_STR(err.text, "roles must alternate");
    buf_release(&out);
}

/* Repeats `unit` n times between `before` and `after`. */
static char *repeated(const char *before, const char *unit, size_t n, const char *after)
{
    struct buf b = { 0 };
    buf_add_c(&b, before);
    for (size_t i = 0; i < n; i++) buf_add_c(&b, unit);
    buf_add_c(&b, after);
    return buf_take(&b);
}

static void check_refused(char *source, enum status want)
{
    struct buf out = { 0 };
    struct err err = { 0 };
    enum status st = render(source, &out, &err);
    if (st != want)
        test_fail(__FILE__, __LINE__, "%.60s... gives %s \"%s\", not %s", source, status_name(st),
                  err.text, status_name(want));
    buf_release(&out);
    mem_free(source);
}

TEST(jinja_bounds_nesting)
{
    check_refused(repeated("{{ ", "(", 100000, "1"), ERR_FORMAT);
    check_refused(repeated("{{ ", "[", 127, " }}"), ERR_FORMAT);
    check_refused(repeated("{{ ", "- ", 100000, "1 }}"), ERR_TOO_LONG);
    check_refused(repeated("", "{% if 1 %}", 10000, ""), ERR_TOO_LONG);
    check_refused(repeated("{{ 1", " if 1 else 1", 10000, " }}"), ERR_TOO_LONG);
    check_refused(mem_strdup("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"), ERR_TOO_LONG);
    check_refused(mem_strdup("{% set x = [] %}{% set q = x.append(x) %}{{ x }}"), ERR_TOO_LONG);
    check_refused(mem_strdup("{% set x = [] %}{% set q = x.append(x) %}{{ x | tojson }}"),
                  ERR_TOO_LONG);
    check_refused(
        mem_strdup("{% set x = [] %}{% set y = [x] %}{% set q = x.append(y) %}{{ x == y }}"),
        ERR_TOO_LONG);
}

TEST(jinja_takes_long_flat_templates)
{
    struct buf out = { 0 };
    char *sum = repeated("{{ 0", " + 1", 20000, " }}"),
         *nots = repeated("{{ ", "not ", 20001, "1 }}"),
         *elifs = repeated("{% if no %}", "{% elif no %}", 5000, "{% else %}x{% endif %}");
    CHECK_OK(render(sum, &out, NULL));
    CHECK_OK(render(nots, &out, NULL));
    CHECK_OK(render(elifs, &out, NULL));
    CHECK_EQ_STR(out.data, "20000Falsex");
    mem_free(sum);
    mem_free(nots);
    mem_free(elifs);
    buf_release(&out);
}

TEST(jinja_bounds_work_and_memory)
{
    check_refused(
        mem_strdup(
            "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"),
        ERR_TOO_LONG);
    check_refused(mem_strdup("{{ 'x' * 1000000000 }}"), ERR_TOO_LONG);
    check_refused(mem_strdup("{{ [1] * 1000000000 }}"), ERR_TOO_LONG);
    check_refused(mem_strdup("{% set ns = namespace(x='ab') %}{% for i in range(64) %}{% set ns.x "
                             "= ns.x + ns.x %}{% endfor %}"),
                  ERR_TOO_LONG);
    check_refused(mem_strdup("{% set ns = namespace(x=[1]) %}{% for i in range(64) %}{% set ns.x = "
                             "[ns.x, ns.x] %}{% endfor %}{{ ns.x }}"),
                  ERR_TOO_LONG);
    check_refused(
        mem_strdup("{% set x = 'y' * 1000000 %}{% for i in range(1000) %}{{ x }}{% endfor %}"),
        ERR_TOO_LONG);
    check_refused(mem_strdup("{% set x = 'y' * 60000 %}{{ x.replace('y', x) }}"), ERR_TOO_LONG);
    check_refused(mem_strdup("{{ range(1000000) }}"), ERR_TOO_LONG);
}

TEST_MAIN(CASE(jinja_applies_precedence), CASE(jinja_prints_values_as_python_does),
          CASE(jinja_finds_members), CASE(jinja_controls_white_space), CASE(jinja_runs_loops),
          CASE(jinja_keeps_scopes_apart), CASE(jinja_has_the_filters), CASE(jinja_has_the_tests),
          CASE(jinja_names_the_line_of_an_error), CASE(jinja_passes_on_what_the_template_raises),
          CASE(jinja_bounds_nesting), CASE(jinja_takes_long_flat_templates),
          CASE_T(jinja_bounds_work_and_memory, 280))
