/* test_infer_request.c - requests of KServe's protocol as they become requests of the API server:
 * both forms, raw and typed contents, parameters, and every way to get them wrong. */
#include "shared/serve/grpc/infer_request.h"

#include <math.h>

#include "shared/base/json/json.h"
#include "shared/serve/grpc/json_scan.h"
#include "tests/unit/serve/infer_message.h"

#define NATIVE(text_) .inputs = { { .name = "IN", .datatype = "BYTES", .text = text_ } }
#define TEXT(text_)   .inputs = { { .name = "text_input", .datatype = "BYTES", .text = text_ } }

static bool has_model(const void *arg, const char *name)
{
    (void)arg;
    return strcmp(name, "model") == 0 || strcmp(name, "tiny") == 0;
}

static enum status read_bytes(struct str bytes, bool is_stream, struct infer_request *out,
                              struct err *err)
{
    const struct infer_reading r = { .message = bytes,
                                     .is_stream = is_stream,
                                     .has_model = has_model };
    *err = (struct err){ 0 };
    return infer_request_read(&r, out, err);
}

static enum status read_message(const struct message_of *m, bool is_stream,
                                struct infer_request *out, struct err *err)
{
    struct buf bytes = message_write(m);
    const enum status st = read_bytes(buf_str(&bytes), is_stream, out, err);
    buf_release(&bytes);
    return st;
}

/* It becomes this JSON. */
static void check_body(const struct message_of *m, bool is_stream, const char *body)
{
    struct infer_request r;
    struct err err;
    CHECK_OK(read_message(m, is_stream, &r, &err));
    CHECK_EQ_STR(r.body.data, body);
    cJSON *doc = NULL;
    CHECK_OK(json_parse(buf_str(&r.body), true, &doc, &err));
    cJSON_Delete(doc);
    infer_request_release(&r);
}

static void check_refused(const struct message_of *m, bool is_stream, enum status want,
                          const char *why)
{
    struct infer_request r;
    struct err err;
    const enum status st = read_message(m, is_stream, &r, &err);
    if (st != want || !strstr(err.text, why))
        test_fail(__FILE__, __LINE__, "wanted %s with \"%s\", got %s: %s", status_name(want), why,
                  status_name(st), err.text);
    infer_request_release(&r);
}

TEST(a_native_request_is_the_object_in_the_list)
{
    check_body(&(struct message_of){ NATIVE("[{\"text\":\"a\"}]") }, true, "{\"text\":\"a\"}");
    check_body(&(struct message_of){ NATIVE(" [ { \"text\" : \"a,]}\\\"\" } ] \n") }, true,
               "{\"text\" : \"a,]}\\\"\" }");
    const struct message_of typed = {
        .inputs = { { .name = "IN", .datatype = "BYTES", .text = "[{}]", .typed = true } }
    };
    check_body(&typed, true, "{}");
    const struct message_of asked = { NATIVE("[{}]"), .outputs = { "OUT" }, .version = "1" };
    check_body(&asked, true, "{}");
}

TEST(members_that_a_native_request_lacks_are_added)
{
    const struct message_of named = { NATIVE("[{\"text\":\"a\"}]"), .id = "r \"1\"" },
                            both = { NATIVE("[{\"req_id\":\"own\"}]"), .id = "other" },
                            empty = { NATIVE("[{ }]"), .id = "r1" },
                            all = { NATIVE("[{\"return_all_tokens\":false}]") };
    check_body(&named, true, "{\"req_id\":\"r \\\"1\\\"\",\"text\":\"a\"}");
    check_body(&both, true, "{\"req_id\":\"own\"}");
    check_body(&empty, true, "{\"req_id\":\"r1\"}");
    check_body(&empty, false, "{\"req_id\":\"r1\",\"return_all_tokens\":true}");
    check_body(&all, false, "{\"return_all_tokens\":false}");
}

TEST(what_is_no_list_of_one_request_is_refused)
{
    static const struct {
        const char *text, *why;
    } cases[] = {
        { "", "is no list" },
        { "{\"text\":\"a\"}", "is no list" },
        { "\"[{}]\"", "is no list" },
        { "[", "is no list" },
        { "[{}", "is no list" },
        { "[{]}", "is no list" },
        { "[{\"a\":\"]", "is no list" },
        { "[{}] x", "is no list" },
        { "[{},]", "is no list" },
        { "[,{}]", "is no list" },
        { "[{}{}]", "is no list" },
        { "[]", "query num 0 should be 1" },
        { "[ ]", "query num 0 should be 1" },
        { "[{},{}]", "query num 2 should be 1" },
        { "[{}, 1, \"x\"]", "query num 3 should be 1" },
        { "[[]]", "must hold an object" },
        { "[null]", "must hold an object" },
        { "[\"{}\"]", "must hold an object" },
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        check_refused(&(struct message_of){ NATIVE(cases[i].text) }, true, ERR_INVALID,
                      cases[i].why);
    char deep[400];
    memset(deep, '[', sizeof deep - 1);
    deep[sizeof deep - 1] = 0;
    check_refused(&(struct message_of){ NATIVE(deep) }, true, ERR_INVALID, "is no list");
}

TEST(a_text_is_a_completion)
{
    for (int typed = 0; typed < 2; typed++) { /* that it is empty is said where all prompts are */
        const struct message_of empty = {
            .inputs = { { .name = "text_input", .datatype = "BYTES", .text = "", .typed = typed } }
        };
        check_body(&empty, true, "{\"stream\":false,\"prompt\":\"\"}");
    }
    const struct message_of plain = { TEXT("say \"hi\"\n") };
    check_body(&plain, true, "{\"stream\":false,\"prompt\":\"say \\\"hi\\\"\\n\"}");
    const struct message_of streamed = {
        .inputs = { { .name = "text_input", .datatype = "BYTES", .text = "a" },
                    { .name = "streaming", .datatype = "BOOL", .flag = 2 } },
        .parameters = { { .key = "max_tokens", .number = 7 },
                        { .key = "temperature", .real = 0.5 },
                        { .key = "ignore_eos", .flag = 2 },
                        { .key = "stop", .text = "end" } },
    };
    check_body(&streamed, true,
               "{\"stream\":true,\"prompt\":\"a\",\"max_tokens\":7,\"temperature\":0.5,"
               "\"ignore_eos\":true,\"stop\":\"end\"}");
    const struct message_of typed = {
        .inputs = { { .name = "text_input", .datatype = "BYTES", .text = "a", .typed = true },
                    { .name = "stream", .datatype = "BOOL", .flag = 1, .typed = true } },
        .parameters = { { .key = "sequence_id", .number = 3 },
                        { .key = "priority", .number = 1 },
                        { .key = "max_tokens", .is_zero = true } },
    };
    check_body(&typed, false, "{\"stream\":false,\"prompt\":\"a\",\"max_tokens\":0}");
}

TEST(parameters_of_triton_are_read)
{
    const struct message_of m = {
        TEXT("a"),
        .id = "7",
        .parameters = { { .key = "triton_enable_empty_final_response", .flag = 2 },
                        { .key = "timeout", .number = 1500001 } },
        .outputs = { "finish_reason" },
    };
    struct infer_request r;
    struct err err;
    CHECK_OK(read_message(&m, true, &r, &err));
    CHECK(r.empty_final);
    CHECK_EQ_INT(r.timeout_ms, 1501);
    CHECK_EQ_INT(r.outputs, INFER_FINISH_REASON);
    CHECK_EQ_STR(r.id.data, "7");
    CHECK_EQ_STR(r.body.data, "{\"stream\":false,\"prompt\":\"a\"}");
    infer_request_release(&r);
}

TEST(what_is_wrong_is_named)
{
    static const struct {
        struct message_of m;
        bool is_stream;
        enum status st;
        const char *why;
    } cases[] = {
        { { NATIVE("[{}]"), .model = "none" }, true, ERR_NOT_FOUND, "there is no model 'none'" },
        { { NATIVE("[{}]"), .version = "2" }, true, ERR_NOT_FOUND, "version '2'" },
        { { .model = "tiny" }, true, ERR_INVALID, "has no input" },
        { { .inputs = { { .name = "X", .datatype = "BYTES", .text = "a" } } },
          true,
          ERR_INVALID,
          "no input 'X'" },
        { { .inputs = { { .name = "IN", .datatype = "BYTES", .text = "[{}]" },
                        { .name = "Y", .datatype = "BYTES", .text = "a" } } },
          true,
          ERR_INVALID,
          "no input 'Y'" },
        { { .inputs = { { .name = "streaming", .datatype = "BOOL", .flag = 2 } } },
          true,
          ERR_INVALID,
          "no input text_input" },
        { { .inputs = { { .name = "IN", .datatype = "INT32", .text = "[{}]" } } },
          true,
          ERR_INVALID,
          "must have BYTES" },
        { { .inputs = { { .name = "IN", .datatype = "BYTES", .text = "[{}]", .shape = 2 } } },
          true,
          ERR_INVALID,
          "its shape must be [1]" },
        { { .inputs = { { .name = "IN", .datatype = "BYTES", .typed = true } } },
          true,
          ERR_INVALID,
          "0 bytes_contents" },
        { { .inputs = { { .name = "text_input", .datatype = "BYTES", .text = "a" },
                        { .name = "streaming", .datatype = "BYTES", .text = "x" } } },
          true,
          ERR_INVALID,
          "must have BOOL" },
        { { .inputs = { { .name = "text_input", .datatype = "BYTES", .text = "a" },
                        { .name = "streaming", .datatype = "BOOL", .text = "x" } } },
          true,
          ERR_INVALID,
          "one element, of one byte" },
        { { .inputs = { { .name = "text_input", .datatype = "BYTES", .text = "a" },
                        { .name = "streaming", .datatype = "BOOL", .flag = 2 } } },
          false,
          ERR_INVALID,
          "needs ModelStreamInfer" },
        { { .inputs = { { .name = "text_input", .datatype = "BYTES", .text = "a" },
                        { .name = "streaming", .datatype = "BOOL", .flag = 2, .typed = true } } },
          true,
          ERR_INVALID,
          "only one of them" },
        { { NATIVE("[{}]"), .outputs = { "text_output" } }, true, ERR_INVALID, "there is OUT" },
        { { TEXT("a"), .outputs = { "OUT" } }, true, ERR_INVALID, "text_output and finish" },
        { { TEXT("a"), .parameters = { { .key = "heat", .number = 1 } } },
          true,
          ERR_INVALID,
          "no parameter 'heat'; max_tokens," },
        { { TEXT("a"),
            .parameters = { { .key = "seed", .number = 1 }, { .key = "seed", .number = 1 } } },
          true,
          ERR_INVALID,
          "seed is there twice" },
        { { .inputs = { { .name = "text_input", .datatype = "BYTES", .text = "a" },
                        { .name = "text_input", .datatype = "BYTES", .text = "b" } } },
          true,
          ERR_INVALID,
          "has 2 inputs" },
        { { TEXT("a"), .parameters = { { .key = "max_tokens", .text = "5" } } },
          true,
          ERR_INVALID,
          "must be an int64_param" },
        { { TEXT("a"), .parameters = { { .key = "temperature", .real = (double)NAN } } },
          true,
          ERR_INVALID,
          "or a finite double_param" },
        { { TEXT("a"), .parameters = { { .key = "top_p", .real = (double)INFINITY } } },
          true,
          ERR_INVALID,
          "or a finite double_param" },
        { { TEXT("a"), .parameters = { { .key = "ignore_eos", .number = 1 } } },
          true,
          ERR_INVALID,
          "must be a bool_param" },
        { { TEXT("a"), .parameters = { { .key = "stop" } } },
          true,
          ERR_INVALID,
          "must be a string_param" },
        { { TEXT("a"), .parameters = { { .key = "timeout", .number = -1 } } },
          true,
          ERR_INVALID,
          "microseconds" },
        { { TEXT("a"),
            .parameters = { { .key = "triton_enable_empty_final_response", .number = 1 } } },
          true,
          ERR_INVALID,
          "must be a bool_param" },
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        check_refused(&cases[i].m, cases[i].is_stream, cases[i].st, cases[i].why);
}

TEST(raw_contents_are_checked)
{
    static const struct {
        const char *raw;
        size_t n;
    } cases[] = { { "", 0 },
                  { "\3\0\0", 3 },
                  { "\3\0\0\0ab", 6 },
                  { "\1\0\0\0ab", 6 },
                  { "\377\377\377\377", 4 } };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        struct buf b = { 0 };
        struct infer_request r;
        struct err err;
        /* model_name, an input IN of BYTES [1], then field 7 as it is */
        buf_add(&b, "\x0a\5model\x2a\x0e\x0a\2IN\x12\5BYTES\x1a\1\1", 23);
        buf_add_char(&b, 0x3a);
        buf_add_char(&b, (char)cases[i].n);
        buf_add(&b, cases[i].raw, cases[i].n);
        CHECK_EQ_INT(read_bytes(buf_str(&b), true, &r, &err), ERR_INVALID);
        CHECK(strstr(err.text, "must have one element") != NULL);
        infer_request_release(&r);
        buf_release(&b);
    }
}

TEST(a_text_with_a_zero_byte_is_refused)
{
    static const char bytes[] = "\x0a\5model\x2a\x16\x0a\x0atext_input\x12\5BYTES\x1a\1\1"
                                "\x3a\7\3\0\0\0a\0b";
    struct infer_request r;
    struct err err;
    CHECK_EQ_INT(read_bytes((struct str){ bytes, sizeof bytes - 1 }, true, &r, &err), ERR_INVALID);
    CHECK(strstr(err.text, "zero byte") != NULL);
    infer_request_release(&r);
}

TEST(what_is_no_message_is_refused)
{
    struct infer_request r;
    struct err err;
    CHECK_EQ_INT(read_bytes(STR("\x0a\x7f short"), true, &r, &err), ERR_FORMAT);
    infer_request_release(&r);
    CHECK_EQ_INT(read_bytes(STR(""), true, &r, &err), ERR_NOT_FOUND); /* no model is named */
    infer_request_release(&r);
}

/* Two bytes on the wire may cost a hundred in memory: so many that there is an end to it. */
TEST(many_empty_fields_are_refused)
{
    static const uint8_t tags[] = { 4 << 3 | 2, 5 << 3 | 2, 6 << 3 | 2, 7 << 3 | 2, 15 << 3 | 2 };
    for (size_t k = 0; k < COUNT_OF(tags); k++) {
        struct buf b = { 0 };
        struct infer_request r;
        struct err err;
        for (int i = 0; i < 1000000; i++) {
            buf_add_char(&b, (char)tags[k]);
            buf_add_char(&b, 0);
        }
        CHECK_EQ_INT(read_bytes(buf_str(&b), true, &r, &err), ERR_FORMAT);
        infer_request_release(&r);
        buf_release(&b);
    }
}

TEST(members_of_an_object_are_found)
{
    const struct str o = STR(
        " { \"a\" : [1,{\"b\":2}] , \"b\":\"x\\\"}\",\"c\":-1.5e3,\"d\":{} } ");
    struct str k, v;
    int n = 0;
    for (size_t at = 0; json_scan_member(o, &at, &k, &v);) n++;
    CHECK_EQ_INT(n, 4);
    v = json_scan_find(o, "b");
    CHECK(str_eq_c(v, "\"x\\\"}\""));
    CHECK(str_eq_c(json_scan_find(o, "a"), "[1,{\"b\":2}]"));
    CHECK(str_eq_c(json_scan_find(o, "c"), "-1.5e3"));
    CHECK(!json_scan_find(o, "e").p);
    CHECK(!json_scan_find(STR("[{\"a\":1}]"), "a").p);
    CHECK(!json_scan_find(STR("{\"a\""), "a").p);
    CHECK(!json_scan_find(STR("{\"a\":"), "a").p);
    CHECK(!json_scan_find(STR(""), "a").p);
}

TEST_MAIN(CASE(a_native_request_is_the_object_in_the_list),
          CASE(members_that_a_native_request_lacks_are_added),
          CASE(what_is_no_list_of_one_request_is_refused), CASE(a_text_is_a_completion),
          CASE(parameters_of_triton_are_read), CASE(what_is_wrong_is_named),
          CASE(raw_contents_are_checked), CASE(a_text_with_a_zero_byte_is_refused),
          CASE(what_is_no_message_is_refused), CASE(many_empty_fields_are_refused),
          CASE(members_of_an_object_are_found))
