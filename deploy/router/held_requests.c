/* held_requests.c - see held_requests.h. Thread: loop. */
#include "deploy/router/held_requests.h"

#include <string.h>

#include "shared/base/assert.h"
#include "shared/base/list.h"
#include "shared/base/mem.h"
#include "shared/serve/auth.h"
#include "shared/serve/serve.h"

struct held_requests {
    struct held_options o;
    struct list list; /* the oldest is the first */
    size_t n;
};

struct held {
    struct list link;
    struct held_requests *all;
    struct http_exchange *x;
    struct loop_timer *timer;
};

static void held_end(struct held *r)
{
    list_remove(&r->link);
    r->all->n--;
    loop_timer_free(r->timer);
    mem_free(r);
}

static void on_end(void *arg, bool gone)
{
    (void)gone; /* its client is: nobody else ends it while it waits */
    held_end(arg);
}

static void on_answer(void *arg)
{
    const struct held *r = arg;
    const struct held_requests *h = r->all;
    struct http_exchange *x = r->x;
    http_on_end(x, NULL, NULL);
    held_end(arg);
    h->o.answer(h->o.arg, x);
}

/* Who wants an answer by a time is better told at once. */
static bool wants_it_by_a_time(const struct http_exchange *x)
{
    return http_header(x, "x-baton-ttft-ms").p || http_header(x, "x-baton-deadline-ms").p;
}

bool held_take(struct held_requests *h, struct http_exchange *x)
{
    if (strcmp(http_method(x), "POST") != 0 || !serve_generating_path(http_path(x))) return false;
    if (h->n >= HELD_MAX || wants_it_by_a_time(x)) return false;
    if (!auth_tenant(h->o.tenants, http_header(x, "authorization"), NULL)) return false;
    struct held *r = MEM_NEW(struct held);
    *r = (struct held){ .all = h, .x = x };
    r->timer = loop_timer_start(h->o.loop, h->o.wait_ms, 0, on_answer, r);
    list_push(&h->list, &r->link);
    h->n++;
    http_on_end(x, on_end, r);
    return true;
}

void held_release(struct held_requests *h)
{
    while (!list_empty(&h->list)) on_answer(LIST_FIRST(&h->list, struct held, link));
}

struct held_requests *held_create(const struct held_options *o)
{
    struct held_requests *h = MEM_NEW(struct held_requests);
    h->o = *o;
    list_init(&h->list);
    return h;
}

void held_free(struct held_requests *h)
{
    if (!h) return;
    ASSERT(list_empty(&h->list));
    mem_free(h);
}
