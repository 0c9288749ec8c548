/* serve_rig.h - an API server over the test double, with a small tokenizer and a chat template;
 * requests go through serve_submit or sockets. The test's thread turns the loop and is both client
 * and server. */
#ifndef BATON_TESTS_UNIT_SERVE_SERVE_RIG_H
#define BATON_TESTS_UNIT_SERVE_SERVE_RIG_H

#include <arpa/inet.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "shared/base/json/json.h"
#include "shared/serve/serve_state.h"
#include "tests/harness/test.h"
#include "tests/unit/serve/fake_backend.h"

#define RIG_TEMPLATE                                                                               \
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor " \
    "%}"                                                                                           \
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

struct rig {
    struct loop *loop;
    struct tokenizer *tok;
    struct chat *chat;
    struct metrics *metrics;
    struct fake_backend fake;
    struct serve *serve;
    struct http_server *http, *admin;
    struct serve_options o;
};

/* An answer from a socket or serve_submit. */
struct answer {
    int status;
    struct buf head, body; /* of a stream: the events' data, or its lines, one per line */
    struct buf raw;        /* of a stream from a socket: the events as they came */
    cJSON *json;           /* of a whole answer, or NULL */
    bool done, begun, ended;
    uint32_t n_chunks, max_chunks; /* after max_chunks (0: never) the receiver takes no more */
};

static inline char *rig_read_file(const char *path, size_t *n)
{
    FILE *f = fopen(path, "rb");
    if (!f) SKIP("the test tokenizer is missing");
    char *text = mem_calloc(1, 1 << 20);
    *n = fread(text, 1, 1 << 20, f);
    fclose(f);
    return text;
}

static inline void rig_set_answer(struct rig *r, const char *text)
{
    struct err err = { 0 };
    int32_t *ids = NULL;
    size_t n = 0;
    CHECK_OK(tokenizer_encode(r->tok, str_of(text), false, SIZE_MAX, &ids, &n, &err));
    CHECK(n <= FAKE_ANSWER_MAX);
    memcpy(r->fake.answer, ids, n * sizeof *ids);
    r->fake.n_answer = (uint32_t)n;
    mem_free(ids);
}

static inline void rig_http(void *arg, struct http_exchange *x)
{
    serve_http(((struct rig *)arg)->serve, x);
}
static inline void rig_admin(void *arg, struct http_exchange *x)
{
    serve_http_admin(((struct rig *)arg)->serve, x);
}

static inline void rig_describe(void *arg, bool cluster, struct buf *out)
{
    (void)cluster;
    (void)arg;
    buf_add_c(out, "\"role\":\"mixed\"");
}

static inline void rig_open(struct rig *r)
{
    struct err err = { 0 };
    size_t n;
    char *json = rig_read_file(test_data("goldens/llama/model/tokenizer.json"), &n);
    *r = (struct rig){ 0 };
    CHECK_OK(tokenizer_from_json((struct str){ json, n }, STR(""), &r->tok, &err));
    mem_free(json);
    CHECK_OK(chat_create(
        &(struct chat_source){ .template = STR(RIG_TEMPLATE), .bos = "<s>", .eos = "</s>" },
        &r->chat, &err));
    CHECK_OK(loop_create(&r->loop, &err));
    r->metrics = metrics_create();
    r->o = (struct serve_options){
        .loop = r->loop,
        .backend = fake_backend_of(&r->fake, r->loop),
        .tokenizer = r->tok,
        .chat = r->chat,
        .metrics = r->metrics,
        .names = { "tiny", "org/tiny" },
        .n_names = 2,
        .max_model_len = 256,
        .n_vocab = (uint32_t)tokenizer_n_vocab(r->tok),
        .defaults = { NAN, NAN, NAN, NAN, -1 },
        .max_n = 8,
        .max_prompts = 16,
        .version = "9.9",
        .describe = rig_describe,
    };
    rig_set_answer(r, "Hello there, world");
}

static inline void rig_start(struct rig *r)
{
    struct err err = { 0 };
    struct http_server_options h = {
        .loop = r->loop,
        .host = "127.0.0.1",
        .limits = HTTP_LIMITS_DEFAULT,
        .handler = rig_http,
        .arg = r,
    };
    CHECK_OK(serve_create(&r->o, &r->serve, &err));
    CHECK_OK(http_server_start(&h, &r->http, &err));
    h.handler = rig_admin;
    CHECK_OK(http_server_start(&h, &r->admin, &err));
}

static inline void rig_turn(struct rig *r)
{
    uv_run(loop_uv(r->loop), UV_RUN_NOWAIT);
    usleep(200);
}

static inline void rig_stopped(void *arg) { ++*(int *)arg; }

static inline void rig_close(struct rig *r)
{
    int n = 0;
    http_server_stop(r->http, 0, rig_stopped, &n);
    http_server_stop(r->admin, 0, rig_stopped, &n);
    while (n < 2) rig_turn(r);
    serve_free(r->serve);
    for (int i = 0; i < 1000 && r->fake.n_live; i++) rig_turn(r);
    CHECK_EQ_INT(r->fake.n_live, 0);
    if (r->fake.tick) loop_timer_free(r->fake.tick);
    loop_free(r->loop);
    tokenizer_free(r->tok);
    chat_free(r->chat);
    metrics_free(r->metrics);
}

static inline void answer_free(struct answer *a)
{
    cJSON_Delete(a->json);
    buf_release(&a->head);
    buf_release(&a->body);
    buf_release(&a->raw);
    *a = (struct answer){ 0 };
}

/* ---- serve_submit ---- */

static inline void answer_parse(struct answer *a)
{
    struct err err = { 0 };
    if (a->body.len && json_parse(buf_str(&a->body), true, &a->json, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s in %s", err.text, a->body.data);
}

static inline void sink_reply(void *arg, int status, const char *headers, struct str body)
{
    struct answer *a = arg;
    CHECK(!a->done && !a->begun);
    a->status = status;
    a->done = true;
    buf_add_c(&a->head, headers);
    buf_add_str(&a->body, body);
    answer_parse(a);
}

static inline void sink_begin(void *arg, const char *headers)
{
    struct answer *a = arg;
    CHECK(!a->done && !a->begun);
    a->begun = true;
    a->status = 200;
    buf_add_c(&a->head, headers);
}

static inline enum status sink_chunk(void *arg, struct str id, struct str json)
{
    (void)id;
    struct answer *a = arg;
    CHECK(a->begun && !a->done);
    if (a->max_chunks && a->n_chunks == a->max_chunks) return ERR_CANCELED;
    a->n_chunks++;
    buf_add_str(&a->body, json);
    buf_add_char(&a->body, '\n');
    return OK;
}

static inline void sink_end(void *arg)
{
    struct answer *a = arg;
    CHECK(a->begun && !a->done);
    a->done = a->ended = true;
}

static inline struct serve_reply answer_sink(struct answer *a)
{
    return (struct serve_reply){ sink_reply, sink_begin, sink_chunk, sink_end, a };
}

static inline uint64_t rig_begin(struct rig *r, const char *path, struct str body, const char *name,
                                 struct answer *a)
{
    const struct serve_call call = {
        .path = path, .body = body, .request_id = name, .reply = answer_sink(a)
    };
    return serve_submit(r->serve, &call);
}

static inline struct answer rig_submit(struct rig *r, const char *path, const char *body)
{
    struct answer *a = MEM_NEW(struct answer), out;
    (void)rig_begin(r, path, str_of(body), "t-1", a);
    for (int i = 0; i < 20000 && !a->done; i++) rig_turn(r);
    CHECK(a->done);
    out = *a;
    mem_free(a);
    return out;
}

/* ---- sockets ---- */

static inline int rig_connect(struct http_server *s)
{
    struct sockaddr_in to = {
        .sin_family = AF_INET,
        .sin_port = htons(http_server_port(s)),
        .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
    };
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0);
    CHECK_OK(connect(fd, (struct sockaddr *)&to, sizeof to));
    return fd;
}

static inline void rig_send(int fd, const char *method, const char *path, const char *headers,
                            const char *body)
{
    struct buf b = { 0 };
    buf_printf(&b, "%s %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n%s", method, path,
               headers ? headers : "");
    if (body)
        buf_printf(&b, "Content-Type: application/json\r\nContent-Length: %zu\r\n", strlen(body));
    buf_printf(&b, "\r\n%s", body ? body : "");
    CHECK_EQ_INT(send(fd, b.data, b.len, 0), b.len);
    buf_release(&b);
}

/* Chunked body → bytes. */
static inline void rig_dechunk(struct buf *b)
{
    struct buf out = { 0 };
    char *p = b->data;
    for (size_t n; p && (n = strtoul(p, &p, 16)) > 0;) {
        CHECK(strncmp(p, "\r\n", 2) == 0);
        buf_add(&out, p + 2, n);
        p += 2 + n + 2;
    }
    buf_release(b);
    *b = out;
}

/* "data: X\n\n" ... → "X\n" ...; an "id: Y\n" may come before it. */
static inline void rig_events(struct buf *b)
{
    struct buf out = { 0 };
    struct str rest = buf_str(b);
    while (rest.n) {
        size_t end = str_find(rest, STR("\n\n"));
        size_t data = str_starts(rest, "id: ") ? str_find_char(rest, '\n') + 1 : 0;
        CHECK(end != SIZE_MAX && str_starts(str_sub(rest, data, SIZE_MAX), "data: "));
        buf_add_str(&out, str_sub(rest, data + 6, end - data - 6));
        buf_add_char(&out, '\n');
        rest = str_sub(rest, end + 2, SIZE_MAX);
    }
    buf_release(b);
    *b = out;
}

static inline struct answer rig_recv(struct rig *r, int fd)
{
    struct answer a = { 0 };
    struct buf all = { 0 };
    char piece[4096];
    ssize_t n = -1;
    for (int i = 0; i < 20000 && n != 0; i++) {
        rig_turn(r);
        n = recv(fd, piece, sizeof piece, MSG_DONTWAIT);
        if (n > 0) buf_add(&all, piece, (size_t)n);
        if (n < 0) CHECK(errno == EAGAIN);
    }
    close(fd);
    CHECK_EQ_INT(n, 0);
    size_t split = str_find(buf_str(&all), STR("\r\n\r\n"));
    CHECK(split != SIZE_MAX);
    buf_add(&a.head, all.data, split + 2);
    buf_add(&a.body, all.data + split + 4, all.len - split - 4);
    buf_release(&all);
    a.status = atoi(a.head.data + 9);
    if (strstr(a.head.data, "ransfer-") && strstr(a.head.data, "chunked")) rig_dechunk(&a.body);
    if (strstr(a.head.data, "x-baton-stream: lines")) {
        buf_add_str(&a.raw, buf_str(&a.body));
    } else if (strstr(a.head.data, "text/event-stream")) {
        buf_add_str(&a.raw, buf_str(&a.body));
        rig_events(&a.body);
    }
    if (strstr(a.head.data, "application/json")) answer_parse(&a);
    return a;
}

static inline struct answer rig_request(struct rig *r, const char *method, const char *path,
                                        const char *headers, const char *body)
{
    int fd = rig_connect(r->http);
    rig_send(fd, method, path, headers, body);
    return rig_recv(r, fd);
}

static inline bool answer_has_header(const struct answer *a, const char *line)
{
    return strcasestr(a->head.data, line) != NULL;
}

/* ---- reading answers ---- */

/* "choices.0.message.content" of a document, or NULL. */
static inline const cJSON *json_at(const cJSON *j, const char *path)
{
    struct str rest = str_of(path), part;
    while (j && str_split(&rest, '.', &part)) {
        char name[64];
        int64_t i;
        snprintf(name, sizeof name, "%.*s", STR_ARG(part));
        j = str_to_i64(part, &i) == OK && cJSON_IsArray(j)
                ? cJSON_GetArrayItem(j, (int)i)
                : cJSON_GetObjectItemCaseSensitive(j, name);
    }
    return j;
}

static inline const char *string_at(const cJSON *j, const char *path)
{
    const cJSON *v = json_at(j, path);
    return cJSON_IsString(v) ? v->valuestring : "(none)";
}

static inline double number_at(const cJSON *j, const char *path)
{
    const cJSON *v = json_at(j, path);
    if (!cJSON_IsNumber(v)) test_fail(__FILE__, __LINE__, "%s is not a number", path);
    return v->valuedouble;
}

/* Parses line i of a stream (cJSON_Delete), negative from the end; NULL: [DONE] or out of range. */
static inline cJSON *event_at(const struct answer *a, int i)
{
    struct str rest = buf_str(&a->body), line;
    cJSON *doc = NULL;
    struct err err = { 0 };
    int n = 0;
    for (size_t k = 0; k < a->body.len; k++) n += a->body.data[k] == '\n';
    if (i < 0) i += n;
    for (int k = 0; str_split(&rest, '\n', &line); k++)
        if (k == i && !str_eq_c(line, "[DONE]") && line.n &&
            json_parse(line, true, &doc, &err) != OK)
            test_fail(__FILE__, __LINE__, "%s", err.text);
    return doc;
}

#endif
