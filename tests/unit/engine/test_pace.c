/* test_pace.c - curves of paced engines (pace.h): their text, the time of a step, and that the
 * committed curve of an H200 says what was measured there. */
#include "shared/engine/pace.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "shared/base/json/json.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

static struct pace_curve parsed(const char *text)
{
    struct pace_curve c;
    struct err err = { 0 };
    if (pace_parse(str_of(text), &c, &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
    return c;
}

static void check_us(const struct pace_curve *c, struct pace_load l, double want)
{
    const double us = pace_step_us(c, &l);
    if (fabs(us - want) > 1e-6 * want + 1e-9)
        test_fail(__FILE__, __LINE__, "the step lasts %.9g us, not %.9g", us, want);
}

/* A step of decoding sequences alone. */
static struct pace_load decodes(uint64_t rows, uint64_t context)
{
    return (struct pace_load){ .decode_rows = rows, .decode_context = rows * context };
}

/* ---- the time of a step ---- */

TEST(a_step_costs_its_parts)
{
    struct pace_curve c = parsed("{\"fixed_us\":100,\"prompt\":{\"row_us\":3,\"context_us\":50},"
                                 "\"decode\":{\"row_us\":7,\"context_us\":20}}");
    check_us(&c, (struct pace_load){ 0 }, 100);
    check_us(&c, (struct pace_load){ .prompt_rows = 10, .prompt_context = 2000 }, 100 + 30 + 100);
    check_us(&c, decodes(4, 500), 100 + 28 + 40);
    check_us(
        &c,
        (struct pace_load){
            .prompt_rows = 10, .prompt_context = 2000, .decode_rows = 4, .decode_context = 2000 },
        100 + 30 + 100 + 28 + 40);
    c = parsed("{\"prompt\":{\"row_us\":600000000},\"decode\":{}}");
    check_us(&c, decodes(1, 1), 0);
    check_us(&c, (struct pace_load){ .prompt_rows = 2 }, PACE_US_MAX);
}

/* Sums of what rows attend to: a row at position p attends to p + 1 positions. */
TEST(rows_and_positions_are_those_of_the_sequences)
{
    const struct attn_seq seqs[] = {
        { .n_q = 3, .pos_begin = 0 },                     /* 1 + 2 + 3 */
        { .n_q = 2, .pos_begin = 10 },                    /* 11 + 12 */
        { .n_q = 1, .pos_begin = 99, .is_decode = true }, /* 100 */
        { .n_q = 2, .pos_begin = 5, .is_decode = true },  /* 6 + 7 */
    };
    struct pace_load l = pace_load_of(seqs, 4);
    CHECK_EQ_INT(l.prompt_rows, 5);
    CHECK_EQ_INT(l.prompt_context, 29);
    CHECK_EQ_INT(l.decode_rows, 3);
    CHECK_EQ_INT(l.decode_context, 113);
    l = pace_load_of(NULL, 0);
    CHECK_EQ_INT(l.prompt_rows + l.decode_rows, 0);
}

/* Between points everything is linear, beyond them the formula goes on from the nearest. */
TEST(points_are_interpolated)
{
    const struct pace_curve c = parsed(
        "{\"fixed_us\":1000,\"prompt\":{\"row_us\":1},\"decode\":{\"row_us\":10,"
        "\"context_us\":100,\"points\":[[2,100,2000],[2,300,2600],[6,200,4000]]}}");
    check_us(&c, decodes(2, 100), 2000);
    check_us(&c, decodes(2, 300), 2600);
    check_us(&c, decodes(2, 200), 2300);
    check_us(&c, decodes(6, 200), 4000);
    check_us(&c, decodes(4, 200), (2300 + 4000) / 2.0);
    check_us(&c, decodes(3, 200), 2300 + (4000 - 2300) / 4.0);
    /* 100 positions less or more, of 2 rows, at 100 us per 1000: 20 us */
    check_us(&c, decodes(2, 50), 2000 - 10);
    check_us(&c, decodes(2, 400), 2600 + 20);
    check_us(&c, decodes(6, 700), 4000 + 6 * 500 / 1000.0 * 100);
    /* one row less: 10 us and its 200 positions; one more likewise */
    check_us(&c, decodes(1, 200), 2300 - 10 - 20);
    check_us(&c, decodes(7, 200), 4000 + 10 + 20);
    /* rows of prompts do not ask the points of others */
    check_us(&c, (struct pace_load){ .prompt_rows = 5, .prompt_context = 15 }, 1005);
}

/* ---- the text ---- */

TEST(errors_name_the_member_and_what_is_right)
{
    static const struct {
        const char *text, *field, *says;
    } bad[] = {
        { "[]", "", "must be an object" },
        { "{", "", "" },
        { "{\"prompt\":{},\"decode\":{},\"prompt\":{}}", "", "" },
        { "{\"decode\":{}}", "prompt", "prompt is missing" },
        { "{\"prompt\":{}}", "decode", "decode is missing" },
        { "{\"prompt\":3,\"decode\":{}}", "prompt", "must be an object" },
        { "{\"fixed\":1,\"prompt\":{},\"decode\":{}}", "fixed", "about, fixed_us, prompt, decode" },
        { "{\"prompt\":{\"us\":1},\"decode\":{}}", "us", "row_us, context_us, points" },
        { "{\"fixed_us\":-1,\"prompt\":{},\"decode\":{}}", "fixed_us", "from 0 to 600000000" },
        { "{\"fixed_us\":\"1\",\"prompt\":{},\"decode\":{}}", "fixed_us", "must be a number" },
        { "{\"prompt\":{\"row_us\":7e8},\"decode\":{}}", "row_us", "prompt.row_us is 7" },
        { "{\"prompt\":{},\"decode\":{\"context_us\":[]}}", "context_us", "decode.context_us" },
        { "{\"about\":5,\"prompt\":{},\"decode\":{}}", "about", "must be a string" },
        { "{\"prompt\":{\"points\":1},\"decode\":{}}", "points", "prompt.points must be a list" },
        { "{\"prompt\":{\"points\":[[1,2]]},\"decode\":{}}", "points", "prompt.points[0] must be" },
        { "{\"prompt\":{\"points\":[[1,2,\"\"]]},\"decode\":{}}", "points", "us must be a number" },
        { "{\"prompt\":{\"points\":[[0,2,3]]},\"decode\":{}}", "points", "rows is 0" },
        { "{\"prompt\":{\"points\":[[1,0,3]]},\"decode\":{}}", "points", "context is 0" },
        { "{\"prompt\":{},\"decode\":{\"points\":[[2,9,3],[2,9,4]]}}", "points",
          "decode.points[1]: (rows, context) is (2, 9)" },
        { "{\"prompt\":{},\"decode\":{\"points\":[[2,9,3],[1,10,4]]}}", "points", "(1, 10)" },
    };
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        struct pace_curve c = { .fixed_us = 5 };
        struct err err = { 0 };
        CHECK(pace_parse(str_of(bad[i].text), &c, &err) != OK);
        if (strcmp(err.field, bad[i].field) != 0 || !strstr(err.text, bad[i].says) || !err.text[0])
            test_fail(__FILE__, __LINE__, "%s: field '%s', '%s'", bad[i].text, err.field, err.text);
        CHECK(c.fixed_us == 5); /* untouched */
    }
}

TEST(too_much_is_refused)
{
    struct pace_curve c;
    struct err err = { 0 };
    struct buf b = { 0 };
    buf_add_c(&b, "{\"prompt\":{},\"decode\":{\"points\":[");
    for (int i = 0; i <= PACE_POINTS_MAX; i++) buf_printf(&b, "%s[%d,1,1]", i ? "," : "", i + 1);
    buf_add_c(&b, "]}}");
    CHECK_STATUS(pace_parse(buf_str(&b), &c, &err), ERR_INVALID);
    CHECK(strstr(err.text, "more than 64 points") != NULL);
    buf_clear(&b);
    buf_add_c(&b, "{\"about\":\"");
    for (int i = 0; i < PACE_ABOUT_MAX; i++) buf_add_char(&b, 'x');
    buf_add_c(&b, "\",\"prompt\":{},\"decode\":{}}");
    CHECK_STATUS(pace_parse(buf_str(&b), &c, &err), ERR_INVALID);
    CHECK_EQ_STR(err.field, "about");
    buf_release(&b);
}

TEST(a_file_that_is_none_is_named)
{
    char path[4096];
    struct pace_curve c;
    struct err err = { 0 };
    CHECK_STATUS(pace_read("/nonexistent/curve.json", &c, &err), ERR_IO);
    CHECK(strstr(err.text, "/nonexistent/curve.json cannot be read") != NULL);
    snprintf(path, sizeof path, "%s/curve.json", test_tmpdir());
    FILE *f = fopen(path, "wb");
    CHECK(f && fputs("{\"prompt\":{}}", f) >= 0 && fclose(f) == 0);
    CHECK_STATUS(pace_read(path, &c, &err), ERR_INVALID);
    CHECK(strstr(err.text, "curve.json: decode is missing") != NULL);
    f = fopen(path, "wb");
    CHECK(f != NULL);
    for (int i = 0; i <= PACE_FILE_MAX; i++) fputc(' ', f);
    CHECK(fclose(f) == 0);
    CHECK_STATUS(pace_read(path, &c, &err), ERR_TOO_LONG);
}

/* ---- the committed curves ---- */

static struct pace_curve committed(const char *name)
{
    struct pace_curve c;
    struct err err = { 0 };
    if (pace_read(test_data(name), &c, &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
    return c;
}

TEST(the_quick_curve_takes_milliseconds)
{
    const struct pace_curve c = committed("pace/quick.json");
    check_us(&c, decodes(1, 10), 4000);
    CHECK(c.about[0] != 0);
}

static cJSON *measured(void)
{
    struct buf b = { 0 };
    char part[4096];
    cJSON *doc;
    struct err err = { 0 };
    FILE *f = fopen(test_data("gpu/h200.json"), "rb");
    if (!f) SKIP("tests/data/gpu/h200.json is not there");
    for (size_t n; (n = fread(part, 1, sizeof part, f)) > 0;) buf_add(&b, part, n);
    fclose(f);
    if (json_parse(buf_str(&b), false, &doc, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s", err.text);
    buf_release(&b);
    return doc;
}

/* Is it "MODEL, WHAT of ROWS...: tokens per second" of the curve's model? */
static bool is_speed(const char *name, const char *what, unsigned *rows, unsigned *context)
{
    const char *at = strstr(name, ", ");
    static const char MODEL[] = "ERNIE-4.5-21B-A3B bf16";
    char format[64];
    if (!at || (size_t)(at - name) != strlen(MODEL) || strncmp(name, MODEL, strlen(MODEL)) != 0 ||
        !strstr(name, ": tokens per second"))
        return false;
    snprintf(format, sizeof format, ", %s", what);
    return sscanf(at, format, rows, context) == 2 || (strstr(what, "tokens") && *rows > 0);
}

/* The curve's time of every step of that model which was measured, within one in a hundred. */
TEST(the_curve_of_an_h200_is_what_was_measured)
{
    const struct pace_curve c = committed("pace/h200_ernie_21b.json");
    cJSON *doc = measured();
    const cJSON *stage, *result;
    int n_steps = 0;
    cJSON_ArrayForEach (stage, json_member(doc, "stages"))
        cJSON_ArrayForEach (result, json_member(stage, "results")) {
            const cJSON *name = json_member(result, "name"), *value = json_member(result, "value");
            unsigned rows = 0, context = 0;
            struct pace_load l = { 0 };
            if (!cJSON_IsString(name) || !cJSON_IsNumber(value)) continue;
            if (is_speed(name->valuestring, "decode of %u at %u", &rows, &context)) {
                l = decodes(rows, context);
            } else if (is_speed(name->valuestring, "prefill of %u tokens", &rows, &context)) {
                const struct attn_seq whole = { .n_q = (int32_t)rows };
                l = pace_load_of(&whole, 1);
            } else {
                continue;
            }
            const double us = rows * 1e6 / value->valuedouble, said = pace_step_us(&c, &l);
            if (fabs(said - us) > 0.01 * us)
                test_fail(__FILE__, __LINE__, "%s: a step of %.0f us, and the curve says %.0f",
                          name->valuestring, us, said);
            n_steps++;
        }
    CHECK_EQ_INT(n_steps, 9);
    cJSON_Delete(doc);
}

TEST_MAIN(CASE(a_step_costs_its_parts), CASE(rows_and_positions_are_those_of_the_sequences),
          CASE(points_are_interpolated), CASE(errors_name_the_member_and_what_is_right),
          CASE(too_much_is_refused), CASE(a_file_that_is_none_is_named),
          CASE(the_quick_curve_takes_milliseconds), CASE(the_curve_of_an_h200_is_what_was_measured))
