/* server.c - see server.h. Thread: loop. */
#include "scheduler/directory/server.h"

#include "scheduler/directory/handler.h"
#include "scheduler/directory/wire.h"
#include "shared/base/mem.h"
#include "shared/net/http/http_server.h"

enum { STOP_GRACE_MS = 300 /* in which calls that are on their way get their 503 */ };

struct directory_server {
    struct directory_handler *handler;
    struct http_server *http;
    uint16_t port;
    void (*done)(void *arg);
    void *done_arg;
};

static void on_request(void *arg, struct http_exchange *x)
{
    const struct directory_server *s = arg;
    directory_handler_serve(s->handler, x);
}

enum status directory_server_start(struct loop *loop, struct directory *local, const char *host,
                                   uint16_t port, struct str secret, struct directory_server **out,
                                   struct err *err)
{
    struct directory_server *s = MEM_NEW(struct directory_server);
    struct http_server_options o = {
        .loop = loop,
        .host = host,
        .port = port,
        .option = "--engine-worker-queue-port",
        .limits = HTTP_LIMITS_DEFAULT,
        .handler = on_request,
        .arg = s,
    };
    o.limits.body_bytes = DIRECTORY_BODY_MAX;
    o.limits.write_queue_bytes = 2 * DIRECTORY_ANSWER_MAX;
    s->handler = directory_handler_create(local, secret);
    enum status st = http_server_start(&o, &s->http, err);
    if (st != OK) {
        directory_handler_free(s->handler);
        mem_free(s);
        return st;
    }
    s->port = http_server_port(s->http);
    *out = s;
    return OK;
}

uint16_t directory_server_port(const struct directory_server *s) { return s->port; }

static void on_stopped(void *arg)
{
    struct directory_server *s = arg;
    void (*done)(void *arg) = s->done;
    void *done_arg = s->done_arg;
    directory_handler_free(s->handler);
    mem_free(s);
    if (done) done(done_arg);
}

void directory_server_stop(struct directory_server *s, void (*done)(void *arg), void *arg)
{
    directory_handler_close(s->handler);
    s->done = done;
    s->done_arg = arg;
    http_server_stop(s->http, STOP_GRACE_MS, on_stopped, s);
}
