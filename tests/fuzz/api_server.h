/* api_server.h - an API server over the test double for fuzzing its requests. The tokenizer is made
 * here, so that no file is needed. */
#ifndef BATON_TESTS_FUZZ_API_SERVER_H
#define BATON_TESTS_FUZZ_API_SERVER_H

#include <math.h>
#include <stdlib.h>

#include "shared/serve/serve_state.h"
#include "tests/unit/serve/fake_backend.h"

#define API_TEMPLATE                                                                               \
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% "                                \
    "endfor %}{% if add_generation_prompt %}<a>{% endif %}"

struct api_server {
    struct loop *loop;
    struct fake_backend fake;
    struct serve *serve;
};

/* One token per byte, in the byte alphabet of GPT-2 for printable ASCII; id 3 is the end token. */
static inline struct tokenizer *make_tokenizer(void)
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

static inline struct api_server *make_api_server(void)
{
    struct api_server *f = MEM_NEW(struct api_server);
    struct chat *chat = NULL;
    struct err err = { 0 };
    if (loop_create(&f->loop, &err) != OK ||
        chat_create(&(struct chat_source){ .template = STR(API_TEMPLATE) }, &chat, &err) != OK)
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

#endif
