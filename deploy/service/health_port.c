/* health_port.c - see health_port.h. */
#include "deploy/service/health_port.h"

#include <string.h>

#include "shared/base/clock.h"
#include "shared/base/mem.h"

enum { LOOK_MS = 250, PAUSE_MS = 1000 };

struct health_port {
    struct health_port_options o;
    struct http_server *server;
    struct loop_timer *look;
    struct health_watch watch;
    void (*done)(void *arg);
    void *done_arg;
};

/* An engine that hangs lets nodes be given up before the interval is over, so `takes` does not
 * count while it stands still. */
enum health_state health_watch_look(struct health_watch *w, const struct health_facts *f,
                                    uint64_t now_ms, uint32_t hang_ms)
{
    if (!w->t_ms || !f->has_work || f->progress != w->progress)
        *w = (struct health_watch){ f->progress, now_ms };
    const uint64_t still_ms = now_ms - w->t_ms;
    if (!f->ready) return HEALTH_NOT_READY;
    if (f->has_work && still_ms >= hang_ms) return HEALTH_ENGINE_HANGS;
    if (f->takes || (f->has_work && still_ms >= PAUSE_MS)) return HEALTH_OK;
    return f->behind ? HEALTH_ENGINE_DOWN : HEALTH_NOT_READY;
}

const char *health_text(enum health_state s)
{
    static const char *const texts[] = { [HEALTH_OK] = "",
                                         [HEALTH_NOT_READY] = "server is not ready",
                                         [HEALTH_ENGINE_DOWN] = "infer engine is down",
                                         [HEALTH_ENGINE_HANGS] = "infer engine hangs" };
    return texts[s];
}

static enum health_state look(struct health_port *h)
{
    struct health_facts f = { 0 };
    h->o.look(h->o.arg, &f);
    return health_watch_look(&h->watch, &f, clock_ms(), h->o.hang_ms);
}

static void on_look(void *arg) { (void)look(arg); }

static void answer_state(struct http_exchange *x, enum health_state state)
{
    struct buf body = { 0 };
    if (state == HEALTH_OK) {
        http_reply(x, 200, "application/json", NULL, STR(""));
        return;
    }
    buf_printf(&body, "{\"error_code\":%d,\"error_msg\":\"%s\"}", (int)state, health_text(state));
    http_reply(x, 500, "application/json", NULL, buf_str(&body));
    buf_release(&body);
}

static void on_http(void *arg, struct http_exchange *x)
{
    struct str path = http_path(x);
    const char *method = http_method(x);
    if (!str_eq_c(path, "/v2/health/live") && !str_eq_c(path, "/v2/health/ready"))
        http_reply_error(x, 404, NULL, "error",
                         "this port has /v2/health/live and /v2/health/ready alone");
    else if (strcmp(method, "GET") != 0 && strcmp(method, "HEAD") != 0)
        http_reply_error(x, 405, "Allow: GET, HEAD\r\n", "error", "only GET is answered here");
    else answer_state(x, look(arg));
}

enum status health_port_start(const struct health_port_options *o, struct health_port **out,
                              struct err *err)
{
    struct health_port *h = MEM_NEW(struct health_port);
    struct http_server_options s = o->like;
    s.port = o->port;
    s.option = o->option;
    s.share_port = false;
    s.handler = on_http;
    s.arg = h;
    s.metrics = NULL;
    h->o = *o;
    const enum status st = http_server_start(&s, &h->server, err);
    if (st != OK) {
        mem_free(h);
        return st;
    }
    h->look = loop_timer_start(o->loop, LOOK_MS, LOOK_MS, on_look, h);
    *out = h;
    return OK;
}

static void on_stopped(void *arg)
{
    struct health_port *h = arg, was = *h;
    mem_free(h);
    was.done(was.done_arg);
}

void health_port_stop(struct health_port *h, void (*done)(void *arg), void *arg)
{
    h->done = done;
    h->done_arg = arg;
    loop_timer_free(h->look);
    http_server_stop(h->server, 0, on_stopped, h);
}
