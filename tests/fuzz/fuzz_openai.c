/* fuzz_openai.c - arbitrary bodies for the API server with a test double behind it; the first byte
 * chooses the path. Every request ends with exactly one answer. */
#include "tests/fuzz/api_server.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct outcome {
    int n_answers;
    bool begun;
};

static void on_reply(void *arg, int status, const char *headers, struct str body)
{
    struct outcome *o = arg;
    (void)headers;
    if (o->n_answers++ || o->begun || status < 200 || body.n == 0) abort();
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
    (void)id;
    if (!o->begun || o->n_answers || json.n == 0) abort();
    return OK;
}

static void on_end(void *arg)
{
    struct outcome *o = arg;
    if (!o->begun || o->n_answers++) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const paths[] = { "/v1/chat/completions", "/v1/completions", "/tokenize",
                                         "/detokenize" };
    static struct api_server *api;
    struct outcome o = { 0 };
    if (!api) api = make_api_server();
    if (size == 0) return 0;
    const struct serve_call call = {
        .path = paths[data[0] % 4],
        .body = { (const char *)data + 1, size - 1 },
        .reply = { on_reply, on_begin, on_chunk, on_end, &o },
    };
    (void)serve_submit(api->serve, &call);
    while (api->serve->requests.len) uv_run(loop_uv(api->loop), UV_RUN_ONCE);
    if (o.n_answers != 1) abort();
    return 0;
}
