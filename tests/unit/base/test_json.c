/* test_json.c - strict parsing, typed members, writing. */
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "shared/base/json/json_packed.h"
#include "shared/base/mem.h"
#include "shared/base/rng.h"
#include "tests/harness/test.h"

static cJSON *parse(const char *text)
{
    cJSON *doc = NULL;
    struct err err;
    if (json_parse(str_of(text), true, &doc, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s: %s", text, err.text);
    return doc;
}

TEST(json_parse_takes_valid_documents)
{
    const char *good[] = { "null",
                           " 1 ",
                           "-0.5e-3",
                           "\"\"",
                           "[]",
                           "{}",
                           "[[],{}]",
                           "{\"a\":{\"b\":[1,2,{\"c\":null}]}}",
                           "\"\\u00e9\\ud83d\\ude00\\n\\/\"",
                           "[true,false,null]\n",
                           "\"\xF0\x9F\x98\x80\"",
                           "\"\x7f\"",
                           "{\"a\":{\"a\":1},\"b\":{\"a\":2}}" };
    for (size_t i = 0; i < COUNT_OF(good); i++) cJSON_Delete(parse(good[i]));
}

TEST(json_parse_refuses_invalid_documents_with_the_offset)
{
    static const struct {
        const char *text;
        int at;
    } bad[] = {
        { "", 0 },
        { "  ", 2 },
        { "nul", 0 },
        { "01", 0 },
        { "-", 0 },
        { "1.", 0 },
        { ".5", 0 },
        { "1e", 0 },
        { "+1", 0 },
        { "[1,]", 3 },
        { "[1 2]", 3 },
        { "[", 1 },
        { "{\"a\"}", 4 },
        { "{\"a\":}", 5 },
        { "{a:1}", 1 },
        { "{\"a\":1,}", 7 },
        { "[1]]", 3 },
        { "1 2", 2 },
        { "[}", 1 },
        { "{]", 1 },
        { "\"abc", 0 },
        { "\"\\x\"", 1 },
        { "\"\\u12g4\"", 1 },
        { "\"\\ud800\"", 1 },
        { "\"\\ud800\\u0041\"", 1 },
        { "\"\\udc00\"", 1 },
        { "\"\\u0000\"", 1 },
        { "\"a\tb\"", 2 },
        { "\"\xff\"", 1 },
        { "\"\xC0\x80\"", 1 },
        { "\"\xED\xA0\x80\"", 1 },
        { "\"\xE2\x82\"", 1 },
        { "\"\xF4\x90\x80\x80\"", 1 },
        { "{\"a\":1,\"a\":2}", 7 },
        { "{\"a\":1,\"\\u0061\":2}", 7 },
        { "NaN", 0 },
        { "\xEF\xBB\xBF{}", 0 },
        { "'a'", 0 },
        { "[1,2", 4 },
        { "{\"a\":1", 6 },
        { "\"\\", 1 },
        { "/* */ 1", 0 },
    };
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        cJSON *doc = NULL;
        struct err err = { 0 };
        char want[64];
        if (json_parse(str_of(bad[i].text), true, &doc, &err) != ERR_FORMAT || doc)
            test_fail(__FILE__, __LINE__, "%s was taken", bad[i].text);
        snprintf(want, sizeof want, "malformed JSON at byte %d: ", bad[i].at);
        if (strncmp(err.text, want, strlen(want)) != 0)
            test_fail(__FILE__, __LINE__, "%s gave: %s", bad[i].text, err.text);
    }
}

TEST(json_parse_limits_depth_and_reads_only_its_bytes)
{
    char text[2 * JSON_DEPTH_MAX + 4];
    cJSON *doc = NULL;
    for (int depth = JSON_DEPTH_MAX; depth <= JSON_DEPTH_MAX + 1; depth++) {
        memset(text, '[', (size_t)depth);
        memset(text + depth, ']', (size_t)depth);
        struct str s = { text, 2 * (size_t)depth };
        enum status st = json_parse(s, false, &doc, NULL);
        CHECK_EQ_INT(st, depth <= JSON_DEPTH_MAX ? OK : ERR_FORMAT);
    }
    cJSON_Delete(doc);
    char *exact = mem_dup("[12]", 4); /* no 0 after it: a sanitizer sees one byte too many */
    CHECK_OK(json_parse((struct str){ exact, 4 }, true, &doc, NULL));
    cJSON_Delete(doc);
    CHECK_STATUS(json_parse((struct str){ exact, 3 }, true, &doc, NULL), ERR_FORMAT);
    mem_free(exact);
    CHECK_STATUS(json_parse((struct str){ "1\0", 2 }, true, &doc, NULL), ERR_FORMAT);
    CHECK_STATUS(json_parse((struct str){ NULL, 0 }, true, &doc, NULL), ERR_FORMAT);
    CHECK_OK(json_parse(STR("{\"a\":1,\"a\":2}"), false, &doc, NULL));
    cJSON_Delete(doc);
}

/* ---- packed arrays ---- */

static const struct json_limits LIMITS = { .packed_names = { "ids", "more" },
                                           .n_values = 12,
                                           .n_ints = 4 };

/* Parses and compares what was packed, written as "value,value;value;" in the order of the tree's
 * arrays; then the tree that is left. */
static void check_packed(const char *text, const struct json_limits *limits, const char *packed,
                         const char *tree)
{
    struct buf in = { 0 }, got = { 0 };
    struct json_packed p = { 0 };
    struct err err = { 0 };
    cJSON *doc = NULL;
    buf_add_c(&in, text);
    if (json_parse_packed(&in, limits, &doc, &p, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s: %s", text, err.text);
    for (size_t i = 0; i < p.n_arrays; i++) {
        const cJSON *array = p.arrays[i].array;
        int32_t *v = NULL;
        size_t n = 0;
        CHECK(json_packed_has(&p, array));
        CHECK(json_packed_take(&p, array, &v, &n));
        CHECK(!json_packed_take(&p, array, &v, &n));
        for (size_t k = 0; k < n; k++) buf_printf(&got, k ? ",%d" : "%d", v[k]);
        buf_add_char(&got, ';');
        mem_free(v);
    }
    char *left = cJSON_PrintUnformatted(doc);
    CHECK_EQ_STR(got.data ? got.data : "", packed);
    CHECK_EQ_STR(left, tree);
    cJSON_free(left);
    cJSON_Delete(doc);
    json_packed_release(&p);
    buf_release(&in);
    buf_release(&got);
}

TEST(json_packed_takes_arrays_of_integers_out)
{
    static const struct {
        const char *text, *packed, *tree;
    } rows[] = {
        { "{\"ids\":[1,-2, 2147483647]}", "1,-2,2147483647;", "{\"ids\":[]}" },
        { "{\"ids\": [ [1] , [ 2,3 ] ,[]]}", "1;2,3;", "{\"ids\":[[],[],[]]}" },
        { "{\"more\":[[],[7]],\"ids\":[9]}", "7;9;", "{\"more\":[[],[]],\"ids\":[]}" },
        { "{\"i\\u0064s\":[4]}", "4;", "{\"ids\":[]}" },
        /* Other values and places stay in the tree. */
        { "{\"ids\":[1,2.5]}", "", "{\"ids\":[1,2.5]}" },
        { "{\"ids\":[1,2e0,3]}", "", "{\"ids\":[1,2,3]}" },
        { "{\"ids\":[2147483648]}", "", "{\"ids\":[2147483648]}" },
        { "{\"ids\":[1,\"a\",[2]]}", "2;", "{\"ids\":[1,\"a\",[]]}" },
        { "{\"ids\":[[[1]],[2]]}", "2;", "{\"ids\":[[[1]],[]]}" },
        { "{\"ids\":{\"ids\":[1]}}", "", "{\"ids\":{\"ids\":[1]}}" },
        { "{\"x\":[1,2],\"y\":{\"ids\":[3]}}", "", "{\"x\":[1,2],\"y\":{\"ids\":[3]}}" },
        { "{\"ids\":[1],\"ids\":[2]}", "1;", "{\"ids\":[],\"ids\":[2]}" },
        { "[1,2]", "", "[1,2]" },
        { "7", "", "7" },
    };
    for (size_t i = 0; i < COUNT_OF(rows); i++)
        check_packed(rows[i].text, &LIMITS, rows[i].packed, rows[i].tree);
}

TEST(json_packed_keeps_the_end_of_a_long_array)
{
    struct json_limits last = LIMITS;
    last.keep_last = true;
    check_packed("{\"ids\":[1,2,3,4]}", &last, "1,2,3,4;", "{\"ids\":[]}");
    check_packed("{\"ids\":[1,2,3,4,5]}", &last, "2,3,4,5;", "{\"ids\":[]}");
    check_packed("{\"ids\":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]}", &last, "14,15,16,17;",
                 "{\"ids\":[]}");
}

TEST(json_packed_stops_at_its_limits)
{
    static const struct {
        const char *text, *field, *why;
        enum status st;
    } rows[] = {
        { "{\"ids\":[1,2,3,4,5,6 this is never read", "ids", "more than 4 integers", ERR_TOO_LONG },
        { "{\"x\":[1,2,3,4,5,6,7,8,9,10,11,12 nor this", "", "more than 12 JSON values",
          ERR_INVALID },
        { "[[],[],[],[],[],[],[],[],[],[],[],[] ...", "", "more than 12 JSON values", ERR_INVALID },
        /* Integers that turn out to belong to the tree count there. */
        { "{\"a\":[1,2,3,4,5,6],\"ids\":[1,2,3,\"\",", "", "more than 12", ERR_INVALID },
        { "{\"ids\":[1,2", "", "malformed JSON at byte 11", ERR_FORMAT },
    };
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        struct buf in = { 0 };
        struct json_packed p = { 0 };
        struct err err = { 0 };
        cJSON *doc = NULL;
        buf_add_c(&in, rows[i].text);
        CHECK_EQ_INT(json_parse_packed(&in, &LIMITS, &doc, &p, &err), rows[i].st);
        CHECK_EQ_STR(err.field, rows[i].field);
        if (!strstr(err.text, rows[i].why))
            test_fail(__FILE__, __LINE__, "%s: %s", rows[i].text, err.text);
        json_packed_release(&p);
        buf_release(&in);
    }
}

/* A stranger chooses the numbers of members and of packed arrays: the parse takes their sum, not
 * their product, which would be a minute here. */
TEST(json_packed_reads_many_arrays_beside_many_members_at_once)
{
    enum { MANY = 60000 };
    const struct json_limits limits = { .packed_names = { "ids" },
                                        .n_values = 4 * MANY,
                                        .n_ints = 4 };
    struct buf in = { 0 };
    struct json_packed p = { 0 };
    struct err err = { 0 };
    struct timespec begin, end;
    cJSON *doc = NULL;
    buf_add_char(&in, '{');
    for (int i = 0; i < MANY; i++) buf_add_c(&in, "\"a\":0,");
    buf_add_c(&in, "\"ids\":[");
    for (int i = 0; i < MANY; i++) buf_add_c(&in, i ? ",[1]" : "[1]");
    buf_add_c(&in, "]}");
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &begin);
    CHECK_OK(json_parse_packed(&in, &limits, &doc, &p, &err));
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &end);
    CHECK(end.tv_sec - begin.tv_sec < 3);
    CHECK_EQ_INT(p.n_arrays, MANY);
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(doc, "ids"), *array;
    size_t i = 0;
    cJSON_ArrayForEach (array, list) CHECK(p.arrays[i++].array == array);
    cJSON_Delete(doc);
    json_packed_release(&p);
    buf_release(&in);
}

TEST(json_get_checks_type_and_range)
{
    cJSON *doc = parse("{\"i\":5,\"f\":1.5,\"s\":\"x\",\"b\":true,\"n\":null,\"whole\":3.0,"
                       "\"huge\":1e300,\"inf\":1e999}");
    struct err err = { 0 };
    int64_t i = -7;
    double f = -7;
    bool b = false;
    const char *s = "unset";
    CHECK_OK(json_get_i64(doc, "none", 0, 9, &i, &err));
    CHECK_OK(json_get_i64(doc, "n", 0, 9, &i, &err));
    CHECK_EQ_INT(i, -7);
    CHECK_OK(json_get_i64(doc, "i", 5, 5, &i, &err));
    CHECK_EQ_INT(i, 5);
    CHECK_OK(json_get_i64(doc, "whole", INT64_MIN, INT64_MAX, &i, &err));
    CHECK_EQ_INT(i, 3);
    CHECK_STATUS(json_get_i64(doc, "f", 0, 9, &i, &err), ERR_INVALID);
    CHECK_EQ_STR(err.field, "f");
    CHECK_EQ_STR(err.text, "f is 1.5, but must be a whole number");
    CHECK_STATUS(json_get_i64(doc, "s", 0, 9, &i, &err), ERR_INVALID);
    CHECK_STATUS(json_get_i64(doc, "i", 6, 9, &i, &err), ERR_INVALID);
    CHECK_EQ_STR(err.text, "i is 5, but must be from 6 to 9");
    CHECK_STATUS(json_get_i64(doc, "huge", INT64_MIN, INT64_MAX, &i, &err), ERR_INVALID);
    CHECK_STATUS(json_get_i64(doc, "inf", INT64_MIN, INT64_MAX, &i, &err), ERR_INVALID);
    CHECK_OK(json_get_f64(doc, "f", 0, 2, &f, &err));
    CHECK_NEAR(f, 1.5, 0);
    CHECK_STATUS(json_get_f64(doc, "f", 2, 3, &f, &err), ERR_INVALID);
    CHECK_STATUS(json_get_f64(doc, "inf", -INFINITY, INFINITY, &f, &err), ERR_INVALID);
    CHECK_OK(json_get_bool(doc, "b", &b, &err));
    CHECK(b);
    CHECK_STATUS(json_get_bool(doc, "i", &b, &err), ERR_INVALID);
    CHECK_OK(json_get_str(doc, "n", &s, &err));
    CHECK_EQ_STR(s, "unset");
    CHECK_OK(json_get_str(doc, "s", &s, &err));
    CHECK_EQ_STR(s, "x");
    CHECK_STATUS(json_get_str(doc, "b", &s, &err), ERR_INVALID);
    CHECK(json_member(doc, "n") == NULL && json_member(doc, "I") == NULL &&
          json_member(doc, "i") != NULL);
    cJSON_Delete(doc);
}

static const char *as_string(struct buf *b, struct str s)
{
    buf_clear(b);
    json_add_string(b, s);
    return b->data;
}

TEST(json_add_string_escapes_and_repairs)
{
    struct buf b = { 0 };
    CHECK_EQ_STR(as_string(&b, STR("")), "\"\"");
    CHECK_EQ_STR(as_string(&b, (struct str){ NULL, 0 }), "\"\"");
    CHECK_EQ_STR(as_string(&b, STR("a\"b\\c/\n\t\x01\x7f")),
                 "\"a\\\"b\\\\c/\\n\\t\\u0001\\u007f\"");
    CHECK_EQ_STR(as_string(&b, (struct str){ "a\0b", 3 }), "\"a\\u0000b\"");
    CHECK_EQ_STR(as_string(&b, STR("h\xC3\xA9\xF0\x9F\x98\x80")), "\"h\xC3\xA9\xF0\x9F\x98\x80\"");
    CHECK_EQ_STR(as_string(&b, STR("x\xE2\x82")), "\"x\xEF\xBF\xBD\xEF\xBF\xBD\"");
    CHECK_EQ_STR(as_string(&b, STR("\xff"
                                   "a")),
                 "\"\xEF\xBF\xBD"
                 "a\"");
    buf_release(&b);
}

TEST(json_numbers_read_back_equal)
{
    struct buf b = { 0 };
    for (uint64_t i = 0; i < 50000; i++) {
        uint32_t w[4];
        float f;
        double d;
        rng_philox(3, 0, i, w);
        memcpy(&f, w, sizeof f);
        memcpy(&d, w + 2, sizeof d);
        buf_clear(&b);
        json_add_f32(&b, f);
        if (isfinite(f) && f >= -9999) CHECK(strtof(b.data, NULL) == f);
        else CHECK_EQ_STR(b.data, isnan(f) || f > 0 ? "null" : "-9999");
        buf_clear(&b);
        json_add_f64(&b, d);
        if (isfinite(d)) CHECK(strtod(b.data, NULL) == d);
        else CHECK_EQ_STR(b.data, "null");
    }
    buf_release(&b);
}

TEST(json_numbers_are_short)
{
    struct buf b = { 0 };
    json_add_f64(&b, 0.1);
    buf_add_char(&b, ' ');
    json_add_f64(&b, 1e15);
    buf_add_char(&b, ' ');
    json_add_f64(&b, 1.0 / 3);
    buf_add_char(&b, ' ');
    json_add_f64(&b, -0.0);
    buf_add_char(&b, ' ');
    json_add_f32(&b, 0.1f);
    buf_add_char(&b, ' ');
    json_add_f32(&b, -INFINITY);
    buf_add_char(&b, ' ');
    json_add_f32(&b, NAN);
    CHECK_EQ_STR(b.data, "0.1 1e+15 0.3333333333333333 -0 0.1 -9999 null");
    buf_release(&b);
}

static void check_shown(const char *value, const char *want)
{
    cJSON *doc = cJSON_Parse(value);
    char shown[JSON_SHOWN_MAX];
    CHECK(doc);
    CHECK_EQ_STR(json_show(doc, shown), want);
    cJSON_Delete(doc);
}

/* What is of no use to a terminal or a log is escaped, and a long one cut between characters. */
TEST(a_value_is_shown_harmless_and_short)
{
    check_shown("\"hot\"", "\"hot\"");
    check_shown("\"\"", "\"\"");
    check_shown("\"a\\u001b[2J\\n\"", "\"a\\u001b[2J\\n\"");
    check_shown("\"12345678901234567890\"", "\"12345678901234567890\"");
    check_shown("\"123456789012345678901\"", "\"12345678901234567890\"...");
    check_shown("\"1234567890123456789\xC3\xA9\"", "\"1234567890123456789\"...");
    check_shown("\"\\u0001\\u0001\\u0001\\u0001\\u0001\\u0001\\u0001\\u0001\\u0001\\u0001"
                "\\u0001\\u0001\\u0001\\u0001\\u0001\\u0001\\u0001\\u0001\\u0001\\u0001x\"",
                "\"\\u0001\\u0001\\u0001\\u0001\\u0001\\u0001\\u0001\\u0001\\u0001\\u0001"
                "\\u0001\\u0001\\u0001\\u0001\\u0001\\u0001\\u0001\\u0001\\u0001\\u0001\"...");
    check_shown("1.5", "1.5");
    check_shown("[1]", "a list");
    check_shown("{}", "an object");
    check_shown("true", "true");
    check_shown("null", "null");
}

TEST_MAIN(CASE(json_parse_takes_valid_documents),
          CASE(json_parse_refuses_invalid_documents_with_the_offset),
          CASE(json_parse_limits_depth_and_reads_only_its_bytes),
          CASE(json_packed_takes_arrays_of_integers_out),
          CASE(json_packed_keeps_the_end_of_a_long_array), CASE(json_packed_stops_at_its_limits),
          CASE(json_packed_reads_many_arrays_beside_many_members_at_once),
          CASE(json_get_checks_type_and_range), CASE(json_add_string_escapes_and_repairs),
          CASE(json_numbers_read_back_equal), CASE(json_numbers_are_short),
          CASE(a_value_is_shown_harmless_and_short))
