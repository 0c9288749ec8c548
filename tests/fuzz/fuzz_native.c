/* fuzz_native.c - arbitrary bodies in FastDeploy's native form; the first byte chooses the path.
 * Every request ends with exactly one answer, all that is sent is JSON, errors say so in the form
 * of the request, and what tells the form from the text agrees with what tells it from the tree. */
#include "shared/serve/native/native.h"
#include "tests/fuzz/api_server.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct outcome {
    int n_answers;
    bool begun, is_native;
};

static cJSON *parse(struct str json)
{
    struct err err = { 0 };
    cJSON *doc = NULL;
    if (json_parse(json, true, &doc, &err) != OK || !cJSON_IsObject(doc)) abort();
    return doc;
}

static bool is_error(const cJSON *doc)
{
    const char *text = cJSON_GetStringValue(json_member(doc, "error_msg"));
    const cJSON *code = json_member(doc, "error_code");
    return text && text[0] && cJSON_IsNumber(code) && code->valuedouble >= 400;
}

static void on_reply(void *arg, int status, const char *headers, struct str body)
{
    struct outcome *o = arg;
    cJSON *doc = parse(body);
    (void)headers;
    if (o->n_answers++ || o->begun || status < 200) abort();
    if (o->is_native && is_error(doc) != (status >= 400)) abort();
    cJSON_Delete(doc);
}

static void on_begin(void *arg, const char *headers)
{
    struct outcome *o = arg;
    (void)headers;
    if (o->n_answers || o->begun) abort();
    o->begun = true;
}

static enum status on_chunk(void *arg, struct str id, struct str json)
{
    struct outcome *o = arg;
    if (!o->begun || o->n_answers || id.n) abort();
    if (o->is_native) cJSON_Delete(parse(json));
    return OK;
}

static void on_end(void *arg)
{
    struct outcome *o = arg;
    if (!o->begun || o->n_answers++) abort();
}

/* Is it of the native form by both? A name that is written with escapes is not known from the text. */
static bool check_form(struct str body)
{
    struct err err = { 0 };
    struct str ignored;
    cJSON *doc = NULL;
    const bool seems = native_seems(body, &ignored);
    if (json_parse(body, false, &doc, &err) != OK) return seems;
    const bool is = cJSON_IsObject(doc) && native_is(doc);
    cJSON_Delete(doc);
    const bool is_plain = body.n < NATIVE_LOOK_BYTES && str_find_char(body, '\\') == SIZE_MAX;
    if (is_plain && is != seems) abort();
    return is && seems;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const paths[] = { "/v1/chat/completions", "/v1/completions",
                                         SERVE_NATIVE_PATH };
    static struct api_server *api;
    struct outcome o = { 0 };
    if (!api) api = make_api_server();
    if (size == 0) return 0;
    const struct serve_call call = {
        .path = paths[data[0] % COUNT_OF(paths)],
        .body = { (const char *)data + 1, size - 1 },
        .reply = { on_reply, on_begin, on_chunk, on_end, &o },
    };
    o.is_native = check_form(call.body) || call.path == paths[2];
    (void)serve_submit(api->serve, &call);
    while (api->serve->requests.len) uv_run(loop_uv(api->loop), UV_RUN_ONCE);
    if (o.n_answers != 1 || api->serve->native_ids.len) abort();
    return 0;
}
