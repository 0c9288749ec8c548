/* fuzz_openai.c - arbitrary bodies for the API server with a test double behind it; the first byte
 * chooses the path. Every request ends with exactly one answer. The tokenizer is made here, so that
 * no file is needed. */
#include <math.h>
#include <stdlib.h>

#include "shared/serve/serve_state.h"
#include "tests/unit/serve/fake_backend.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char TEMPLATE[] = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% "
                               "endfor %}{% if add_generation_prompt %}<a>{% endif %}";

struct api_server {
    struct loop *loop;
    struct fake_backend fake;
    struct serve *serve;
};

struct outcome {
    int n_answers;
    bool begun;
};

/* One token per byte, in the byte alphabet of GPT-2 for printable ASCII; id 3 is the end token. */
static struct tokenizer *make_tokenizer(void)
{
    static char text[128][2];
    static struct str tokens[128];
    static int32_t kinds[128];
    struct tokenizer *tok = NULL;
    struct err err = { 0 };
    for (int i = 0; i < 128; i++) {
        text[i][0] = (char)i;
        tokens[i] = (struct str){ text[i], 1 };
        kinds[i] = i == FAKE_EOS ? 3 : i > ' ' && i < 127 ? 1 : 5;
    }
    struct tokenizer_vocab v = {
        .model = "gpt2",
        .pre = "smollm",
        .tokens = tokens,
        .kinds = kinds,
        .n_tokens = 128,
        .bos = -1,
        .eos = FAKE_EOS,
    };
    if (tokenizer_from_vocab(&v, &tok, &err) != OK) abort();
    return tok;
}

static struct api_server *make_api_server(void)
{
    struct api_server *f = MEM_NEW(struct api_server);
    struct chat *chat = NULL;
    struct err err = { 0 };
    if (loop_create(&f->loop, &err) != OK ||
        chat_create(&(struct chat_source){ .template = STR(TEMPLATE) }, &chat, &err) != OK)
        abort();
    struct serve_options o = {
        .loop = f->loop,
        .backend = fake_backend_of(&f->fake, f->loop),
        .tokenizer = make_tokenizer(),
        .chat = chat,
        .metrics = metrics_create(),
        .names = { "m" },
        .n_names = 1,
        .max_model_len = 64,
        .n_vocab = 128,
        .defaults = { NAN, NAN, NAN, NAN, -1 },
        .max_n = 4,
        .max_prompts = 8,
        .reasoning = reasoning_format_find(STR("think")),
        .tools = tool_format_find(STR("mistral_v11")),
    };
    f->fake.n_answer = 6;
    for (int i = 0; i < 6; i++) f->fake.answer[i] = "answer"[i];
    if (serve_create(&o, &f->serve, &err) != OK) abort();
    return f;
}

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
