/* relay.c - see relay.h. Thread: loop. */
#include "deploy/router/relay.h"

#include <stdio.h>

#include "scheduler/directory/wire.h"
#include "shared/base/mem.h"
#include "shared/net/http/http_client.h"

enum { ANSWER_MAX = DIRECTORY_ANSWER_MAX, IDLE_CONNECTIONS = 16, ANSWER_MS = 5000 };

struct relay {
    struct http_client *client;
    uint16_t port;
};

struct relay_call {
    struct http_exchange *x; /* NULL: the client has left */
};

static void refuse(struct http_exchange *x, const char *why)
{
    http_reply_error(x, 503, "Retry-After: 1\r\n", "error", why);
}

static void on_end(void *arg, bool gone)
{
    struct relay_call *c = arg;
    (void)gone;
    c->x = NULL;
}

static void on_answer(void *arg, enum status st, int http_status, struct str body)
{
    struct relay_call *c = arg;
    struct http_exchange *x = c->x;
    const char *type = x && str_eq_c(http_path(x), "/metrics")
                           ? "text/plain; version=0.0.4; charset=utf-8"
                           : "application/json";
    if (x) http_on_end(x, NULL, NULL);
    mem_free(c);
    if (!x) return;
    if (st == OK) http_reply(x, http_status, type, NULL, body);
    else refuse(x, "the process that holds this router's view does not answer");
}

bool relay_takes(struct str path)
{
    static const char *const PATHS[] = { "/metrics", "/instances/add", "/instances/remove",
                                         "/register" };
    for (size_t i = 0; i < COUNT_OF(PATHS); i++)
        if (str_eq_c(path, PATHS[i])) return true;
    return false;
}

void relay_pass(struct relay *r, struct http_exchange *x)
{
    struct buf path = { 0 }, headers = { 0 };
    const struct str key = http_header(x, "authorization");
    struct relay_call *c = MEM_NEW(struct relay_call);
    c->x = x;
    buf_add_str(&path, http_path(x));
    buf_add_c(&headers, "Content-Type: application/json\r\n");
    if (key.n) buf_printf(&headers, "Authorization: %.*s\r\n", STR_ARG(key));
    const enum status st = http_client_request(r->client, http_method(x), "127.0.0.1", r->port,
                                               path.data, headers.data, http_body(x), ANSWER_MS,
                                               on_answer, c);
    if (st == OK) {
        http_on_end(x, on_end, c);
    } else {
        mem_free(c);
        refuse(x, "too many calls wait for the process that holds this router's view");
    }
    buf_release(&path);
    buf_release(&headers);
}

struct relay *relay_create(struct loop *loop, uint16_t port)
{
    const struct http_client_options o = { .loop = loop,
                                           .body_max = ANSWER_MAX,
                                           .n_idle = IDLE_CONNECTIONS };
    struct relay *r = MEM_NEW(struct relay);
    r->port = port;
    r->client = http_client_create(&o);
    return r;
}

void relay_free(struct relay *r)
{
    if (!r) return;
    http_client_free(r->client);
    mem_free(r);
}
