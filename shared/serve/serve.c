/* serve.c - see serve.h: the life of the API server, and its requests by id. Thread: loop. */
#include "shared/serve/serve.h"

#include <stdio.h>
#include <string.h>

#include "shared/base/clock.h"
#include "shared/base/hash/hash.h"
#include "shared/base/mem.h"
#include "shared/base/sampling.h"
#include "shared/base/thread.h"
#include "shared/net/http/http_pass.h"
#include "shared/serve/completion_request.h"
#include "shared/serve/routes.h"

enum {
    DEFAULT_MAX_N = 128,
    DEFAULT_MAX_PROMPTS = 2048,
    DEFAULT_MAX_LOGPROBS = 20,
    DEFAULT_MAX_ANSWER = 64 << 20
};

static enum status check_options(const struct serve_options *o, struct err *err)
{
    if (!o->loop || !o->tokenizer || !o->metrics || !o->backend.submit || !o->backend.cancel ||
        !o->backend.stats || !o->backend.nodes)
        return err_set(err, ERR_CONFIG,
                       "the API server needs a loop, a tokenizer, metrics and a backend");
    if (o->n_names == 0 || o->n_names > SERVE_NAMES_MAX)
        return err_field(err, ERR_CONFIG, "served-model-name",
                         "%zu served model names, but 1 to %d are possible", o->n_names,
                         SERVE_NAMES_MAX);
    if (o->max_logprobs > SAMPLER_LOGPROBS_MAX)
        return err_field(err, ERR_CONFIG, "max-logprobs",
                         "max-logprobs is %u, but at most %d are possible", o->max_logprobs,
                         SAMPLER_LOGPROBS_MAX);
    if (o->max_model_len == 0 || o->n_vocab == 0)
        return err_set(err, ERR_CONFIG, "the context length and the vocabulary must not be empty");
    return OK;
}

static void add_parser_token(struct serve *s, struct str tag)
{
    int32_t id = tag.n ? tokenizer_find(s->o.tokenizer, tag) : -1;
    if (id >= 0 && tokenizer_is_special(s->o.tokenizer, id))
        s->parser_tokens[s->n_parser_tokens++] = id;
}

static void find_parser_tokens(struct serve *s)
{
    const struct reasoning_format *r = s->o.reasoning;
    if (r) {
        add_parser_token(s, r->open);
        add_parser_token(s, r->close);
        add_parser_token(s, r->answer_open);
        add_parser_token(s, r->answer_close);
    }
    s->n_reasoning_parser_tokens = s->n_parser_tokens;
    for (size_t i = 0; s->o.tools && i < TOOL_MARKERS_MAX; i++)
        add_parser_token(s, s->o.tools->markers[i]);
}

enum status serve_create(const struct serve_options *o, struct serve **out, struct err *err)
{
    TRY(check_options(o, err));
    struct serve *s = MEM_NEW(struct serve);
    s->o = *o;
    s->n_refs = 1;
    list_init(&s->low_waiting);
    s->created = clock_unix_s();
    s->max_n = o->max_n ? o->max_n : DEFAULT_MAX_N;
    s->max_prompts = o->max_prompts ? o->max_prompts : DEFAULT_MAX_PROMPTS;
    s->max_answer = o->max_answer ? o->max_answer : DEFAULT_MAX_ANSWER;
    s->max_logprobs = o->max_logprobs ? o->max_logprobs : DEFAULT_MAX_LOGPROBS;
    for (size_t i = 0; i < o->n_names; i++) s->o.names[i] = s->names[i] = mem_strdup(o->names[i]);
    tenants_init(&s->open);
    s->tenants = o->tenants ? o->tenants : &s->open;
    s->o.version = mem_strdup(o->version ? o->version : "");
    find_parser_tokens(s);
    routes_register(s);
    *out = s;
    return OK;
}

void serve_ref(struct serve *s) { s->n_refs++; }

void serve_unref(struct serve *s)
{
    if (--s->n_refs > 0) return;
    for (size_t i = 0; i < s->o.n_names; i++) mem_free(s->names[i]);
    map_release(&s->requests);
    map_release(&s->native_ids);
    tenants_release(&s->open);
    mem_free(s->route_metrics);
    mem_free((void *)s->o.version);
    mem_free(s);
}

void serve_shut_down(struct serve *s)
{
    ASSERT_THREAD(THREAD_LOOP);
    size_t pos = 0;
    struct str key;
    void *request;
    s->closed = true;
    while (map_next(&s->requests, &pos, &key, &request)) completion_shut_down(request);
}

void serve_free(struct serve *s)
{
    if (!s) return;
    ASSERT_THREAD(THREAD_LOOP);
    size_t pos = 0;
    struct str key;
    void *request;
    s->closed = true;
    while (map_next(&s->requests, &pos, &key, &request)) completion_cancel(request);
    serve_unref(s);
}

bool serve_has_model(const struct serve *s, const char *name)
{
    for (size_t i = 0; i < s->o.n_names; i++)
        if (strcmp(s->names[i], name) == 0) return true;
    return strcmp(name, "default") == 0;
}

void serve_make_name(char out[REQUEST_NAME_MAX + 1])
{
    uint8_t bytes[12];
    random_bytes(bytes, sizeof bytes);
    for (size_t i = 0; i < sizeof bytes; i++) snprintf(out + 2 * i, 3, "%02x", bytes[i]);
}

bool serve_name_is_good(struct str name)
{
    if (name.n == 0 || name.n > REQUEST_NAME_MAX) return false;
    for (size_t i = 0; i < name.n; i++) {
        char c = name.p[i];
        bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
        if (!letter && c != '.' && c != '_' && c != '-') return false;
    }
    return true;
}

void serve_choose_name(const struct http_exchange *x, char out[REQUEST_NAME_MAX + 1])
{
    struct str own = http_header(x, "x-request-id"), given = http_header(x, HTTP_PASS_NAME_HEADER);
    if (serve_name_is_good(own)) snprintf(out, REQUEST_NAME_MAX + 1, "%.*s", STR_ARG(own));
    else if (http_header(x, HTTP_PASS_HEADER).p && serve_name_is_good(given))
        snprintf(out, REQUEST_NAME_MAX + 1, "%.*s", STR_ARG(given));
    else serve_make_name(out);
}

uint64_t serve_submit(struct serve *s, const struct serve_call *call)
{
    ASSERT_THREAD(THREAD_LOOP);
    struct completion_options o = {
        .endpoint = routes_endpoint(call->path),
        .path = call->path,
        .name = call->request_id,
        .admission = { .tenant = call->tenant,
                       .deadline_ms = call->deadline_ms,
                       .deadline_by = call->deadline_by },
        .deadline_ms = call->deadline_ms ? clock_ms() + call->deadline_ms : 0,
        .reply = call->reply,
    };
    if (call->taken) {
        o.body = *call->taken;
        *call->taken = (struct http_taken_body){ .bodies = NULL };
    } else {
        buf_add_str(&o.body.bytes, call->body);
    }
    return completion_start(s, &o);
}

void serve_cancel(struct serve *s, uint64_t id)
{
    ASSERT_THREAD(THREAD_LOOP);
    struct completion_request *c = map_get(&s->requests, map_key_u64(&id));
    if (c) completion_cancel(c);
}
