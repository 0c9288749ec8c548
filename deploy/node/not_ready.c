/* not_ready.c - see not_ready.h. Thread: loop. */
#include "deploy/node/not_ready.h"

#include <string.h>

#include "shared/base/mem.h"
#include "shared/serve/auth.h"
#include "shared/serve/serve_state.h"

void not_ready_reply(struct http_exchange *x, const char *why)
{
    struct buf body = { 0 };
    struct str path = http_path(x);
    char name[REQUEST_NAME_MAX + 1];
    if (str_eq_c(path, "/live") || str_eq_c(path, "/livez")) {
        http_reply(x, 200, "application/json", NULL, STR("{\"status\":\"ok\"}"));
        return;
    }
    if (serve_seems_native(path, http_body(x))) {
        serve_choose_name(x, name);
        serve_native_error_json(&body, ERR_UNAVAILABLE, why, http_body(x), name);
    } else {
        serve_error_json(&body, ERR_UNAVAILABLE, why, NULL);
    }
    http_reply(x, 503, "application/json", "Retry-After: 1\r\n", buf_str(&body));
    buf_release(&body);
}

/* A request that is passed, or for which a node is being sought. */
struct passed {
    struct passer *passer;
    struct http_exchange *x;
    void *pass;
    void (*otherwise)(void *arg, struct http_exchange *x);
    void *arg;
};

static void on_end(void *arg, bool gone)
{
    struct passed *p = arg;
    (void)gone;
    if (p->pass) passer_cancel(p->passer, p->pass);
    mem_free(p);
}

static void on_done(void *arg, bool taken, int status)
{
    struct passed *p = arg, was = *p;
    (void)status;
    p->pass = NULL;
    if (taken) return; /* on_end follows */
    http_on_end(p->x, NULL, NULL);
    mem_free(p);
    was.otherwise(was.arg, was.x);
}

bool not_ready_asks_cluster(const struct http_exchange *x, const struct tenants *tenants)
{
    return strcmp(http_method(x), "GET") == 0 && str_eq_c(http_path(x), "/cluster") &&
           auth_tenant(tenants, http_header(x, "authorization"), NULL);
}

bool not_ready_pass(const struct not_ready_pass *o, struct http_exchange *x)
{
    const char *path = serve_generating_path(http_path(x));
    char name[REQUEST_NAME_MAX + 1];
    if (!o->passer || !path || !auth_tenant(o->tenants, http_header(x, "authorization"), NULL))
        return false;
    struct passed *p = MEM_NEW(struct passed);
    *p = (struct passed){ .passer = o->passer, .x = x, .otherwise = o->otherwise, .arg = o->arg };
    serve_choose_name(x, name);
    struct serve_pass r = { .x = x, .path = path, .name = name, .done = on_done, .arg = p };
    p->pass = passer_start(o->passer, PASS_WHILE_LOADING, &r);
    if (!p->pass) {
        mem_free(p);
        return false;
    }
    http_on_end(x, on_end, p);
    return true;
}
