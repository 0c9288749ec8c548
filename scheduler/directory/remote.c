/* remote.c - see remote.h. */
#include "scheduler/directory/remote.h"

#include <stdio.h>

#include "shared/base/assert.h"
#include "shared/base/hash/hash.h"
#include "shared/base/mem.h"

/* In `held` while the request lives, then in `owed` or `sending`. */
struct remote_reservation {
    struct list link;
    uint64_t request, id;
    bool awaited; /* the holder's answer is not here yet */
    bool over;    /* dropped while awaited: owed when the answer comes, so that the release
                   * cannot overtake it */
};

void remote_init(struct remote *r, const struct directory_options *o, const char *backend)
{
    char labels[64];
    *r = (struct remote){ .o = *o };
    do random_bytes(&r->owner, sizeof r->owner);
    while (r->owner == 0);
    list_init(&r->owed);
    list_init(&r->sending);
    if (!o->metrics) return;
    snprintf(labels, sizeof labels, "row=\"%s\"", backend);
    r->m_up = metrics_gauge(o->metrics, "baton_directory_up", labels,
                            "1 while the holder of the directory answers.");
    r->m_owed = metrics_gauge(o->metrics, "baton_directory_owed_releases", labels,
                              "Releases that the holder has not confirmed yet.");
    r->m_failures = metrics_counter(o->metrics, "baton_directory_failures_total", labels,
                                    "Calls to the holder of the directory that failed.");
}

static void list_free(struct list *l)
{
    LIST_FOREACH (it, l, struct remote_reservation, link) mem_free(it);
}

void remote_release(struct remote *r)
{
    size_t pos = 0;
    struct str key;
    void *one;
    while (map_next(&r->held, &pos, &key, &one)) mem_free(one);
    map_release(&r->held);
    list_free(&r->owed);
    list_free(&r->sending);
}

void remote_up(struct remote *r)
{
    if (r->state == REMOTE_UP) return;
    r->state = REMOTE_UP;
    if (r->m_up) gauge_set(r->m_up, 1);
    if (r->o.on_up) r->o.on_up(r->o.arg);
}

void remote_down(struct remote *r, const char *why)
{
    if (r->m_failures) counter_add(r->m_failures, 1);
    if (r->state == REMOTE_DOWN) return;
    r->state = REMOTE_DOWN;
    if (r->m_up) gauge_set(r->m_up, 0);
    if (r->o.on_down) r->o.on_down(r->o.arg, why);
}

static void owe(struct remote *r, struct remote_reservation *one)
{
    list_push(&r->owed, &one->link);
    if (r->m_owed) gauge_set(r->m_owed, (double)(r->n_all - r->held.len));
}

static void forget(struct remote *r, struct remote_reservation *one)
{
    r->n_all--;
    mem_free(one);
}

void remote_drop(struct remote *r, uint64_t request)
{
    struct remote_reservation *one = map_get(&r->held, map_key_u64(&request));
    if (!one || one->over) return;
    if (one->awaited) {
        one->over = true;
        return;
    }
    map_del(&r->held, map_key_u64(&request));
    owe(r, one);
}

enum status remote_reserve(struct remote *r, uint64_t request, uint64_t *id)
{
    struct remote_reservation *earlier = map_get(&r->held, map_key_u64(&request));
    if (earlier && earlier->awaited) return ERR_BUSY; /* one placement at a time */
    if (r->n_all >= REMOTE_HELD_MAX) return ERR_FULL;
    struct remote_reservation *one = mem_try_calloc(1, sizeof *one);
    if (!one) return ERR_NOMEM;
    remote_drop(r, request);
    one->request = request;
    one->awaited = true;
    list_init(&one->link);
    random_bytes(&one->id, sizeof one->id);
    map_put(&r->held, map_key_u64(&request), one);
    r->n_all++;
    *id = one->id;
    return OK;
}

void remote_reserved(struct remote *r, uint64_t request, uint64_t id, enum status st,
                     uint64_t fence)
{
    struct remote_reservation *one = map_get(&r->held, map_key_u64(&request));
    ASSERT(one);
    ASSERT(one->id == id);
    one->awaited = false;
    if (st == OK && fence > r->fence) r->fence = fence;
    if (st == OK && !one->over) return;
    map_del(&r->held, map_key_u64(&request));
    if (st == ERR_BUSY || st == ERR_NOT_FOUND) forget(r, one);
    else owe(r, one);
}

size_t remote_take_owed(struct remote *r, uint64_t *ids, size_t cap)
{
    size_t n = 0;
    if (!list_empty(&r->sending)) return 0;
    while (n < cap && !list_empty(&r->owed)) {
        struct remote_reservation *one = LIST_FIRST(&r->owed, struct remote_reservation, link);
        list_remove(&one->link);
        list_push(&r->sending, &one->link);
        ids[n++] = one->id;
    }
    return n;
}

void remote_sent(struct remote *r, bool confirmed)
{
    LIST_FOREACH (one, &r->sending, struct remote_reservation, link) {
        list_remove(&one->link);
        if (confirmed) forget(r, one);
        else list_push_front(&r->owed, &one->link);
    }
    if (r->m_owed) gauge_set(r->m_owed, (double)(r->n_all - r->held.len));
}
