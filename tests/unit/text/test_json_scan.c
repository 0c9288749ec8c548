/* test_json_scan.c - json_scan against json_parse: equal verdicts on good, bad and random texts. */
#include "shared/text/output/json_scan.h"

#include "shared/base/json/json.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

#include <stdio.h>
#include <string.h>

static bool scans(struct str s)
{
    struct json_scan scan = { 0 };
    for (size_t i = 0; i < s.n; i++) {
        enum json_scan_result r = json_scan_byte(&scan, s.p[i]);
        if (r == JSON_SCAN_BAD) return false;
        if (r == JSON_SCAN_DONE) return str_trim(str_sub(s, i + 1, SIZE_MAX)).n == 0;
    }
    return false;
}

static bool parses(struct str s)
{
    cJSON *doc = NULL;
    bool good = json_parse(s, false, &doc, NULL) == OK && cJSON_IsObject(doc);
    cJSON_Delete(doc);
    return good;
}

TEST(json_scan_judges_as_the_parser_does)
{
    static const char *const texts[] = {
        "{}",
        " {\n} ",
        "{\"a\":1}",
        "{\"a\":-0.5e+10,\"b\":[true,false,null,\"\\u00e9\\n\",{}],\"c\":{\"d\":[]}}",
        "[]",
        "1",
        "",
        "{",
        "}",
        "{\"a\"}",
        "{\"a\":}",
        "{\"a\":1,}",
        "{,}",
        "{\"a\":01}",
        "{\"a\":1.}",
        "{\"a\":.5}",
        "{\"a\":1e}",
        "{\"a\":-}",
        "{\"a\":+1}",
        "{\"a\":tru}",
        "{\"a\":truee}",
        "{\"a\":nul",
        "{\"a\":\"\n\"}",
        "{\"a\":\"\\x\"}",
        "{\"a\":\"\\u12g4\"}",
        "{\"a\":[1 2]}",
        "{\"a\":[1,]}",
        "{\"a\":1]}",
        "{\"a\":{]}",
        "{'a':1}",
        "{a:1}",
        "{\"a\" : 1 , \"b\" : 2}",
        "{\"a\":1}}",
        "{\"a\":1} x",
        "{\"a\":0}",
        "{\"a\":0e1}",
    };
    for (size_t i = 0; i < COUNT_OF(texts); i++)
        if (scans(str_of(texts[i])) != parses(str_of(texts[i])))
            test_fail(__FILE__, __LINE__, "%s: scan says %d", texts[i], scans(str_of(texts[i])));
}

TEST(json_scan_judges_random_texts_as_the_parser_does)
{
    static const char letters[] = "{}[],:\"\"\\ue10-.+ntrufalse \n0{\"a\":";
    uint64_t seed = 7;
    int good = 0;
    for (int round = 0; round < 400000; round++) {
        char text[24];
        size_t n = 0;
        if (round & 1) n = (size_t)snprintf(text, sizeof text, "{\"a\":");
        while (n < 6 + (size_t)round % 12) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            text[n++] = letters[(seed >> 33) % (sizeof letters - 1)];
        }
        if (round & 1) text[n++] = '}';
        struct str s = { text, n };
        bool want = parses(s);
        good += want;
        if (scans(s) != want)
            test_fail(__FILE__, __LINE__, "%.*s: scan says %d", STR_ARG(s), !want);
    }
    CHECK(good > 100);
}

TEST(json_scan_bounds_depth)
{
    char deep[2 * JSON_DEPTH_MAX + 64] = "{\"a\":";
    struct json_scan scan = { 0 };
    size_t n = strlen(deep);
    memset(deep + n, '[', JSON_DEPTH_MAX);
    for (size_t i = 0; i < n + JSON_DEPTH_MAX - 1; i++)
        CHECK_EQ_INT(json_scan_byte(&scan, deep[i]), JSON_SCAN_MORE);
    CHECK_EQ_INT(json_scan_byte(&scan, '['), JSON_SCAN_BAD);
}

TEST_MAIN(CASE(json_scan_judges_as_the_parser_does),
          CASE(json_scan_judges_random_texts_as_the_parser_does), CASE(json_scan_bounds_depth))
