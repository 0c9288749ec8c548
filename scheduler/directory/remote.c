/* remote.c - see remote.h. */
#include "scheduler/directory/remote.h"

#include <stdio.h>
#include <string.h>

#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/hash/hash.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

/* In `reservations` while the request lives, then in `pending_releases` or `inflight_releases`. */
struct directory_remote_reservation {
    struct list link;
    struct list computed; /* in `pending_computed`, or in none */
    uint64_t request, id;
    bool awaited; /* the server's answer has not come */
    /* Dropped while awaited: the release becomes pending when the answer comes, so that it cannot
     * overtake the reservation. */
    bool over;
};

void directory_remote_choose_owner(struct directory_remote *r)
{
    do random_bytes(&r->owner, sizeof r->owner);
    while (r->owner == 0);
}

void directory_remote_init(struct directory_remote *r, const struct directory_options *o,
                           const char *backend)
{
    char labels[64];
    *r = (struct directory_remote){ .o = *o };
    directory_remote_choose_owner(r);
    list_init(&r->pending_releases);
    list_init(&r->inflight_releases);
    list_init(&r->pending_computed);
    if (!o->metrics) return;
    snprintf(labels, sizeof labels, "row=\"%s\"", backend);
    r->m_up = metrics_gauge(o->metrics, "baton_directory_up", labels,
                            "1 while the directory server answers.");
    r->m_pending_releases = metrics_gauge(o->metrics, "baton_directory_owed_releases", labels,
                                          "Releases that the directory server has not confirmed.");
    r->m_failures = metrics_counter(o->metrics, "baton_directory_failures_total", labels,
                                    "Calls to the directory server that failed.");
}

static void list_free(struct list *l)
{
    LIST_FOREACH (it, l, struct directory_remote_reservation, link) mem_free(it);
}

void directory_remote_release(struct directory_remote *r)
{
    size_t pos = 0;
    struct str key;
    void *one;
    while (map_next(&r->reservations, &pos, &key, &one)) mem_free(one);
    map_release(&r->reservations);
    list_free(&r->pending_releases);
    list_free(&r->inflight_releases);
}

void directory_remote_up(struct directory_remote *r)
{
    if (r->state == DIRECTORY_REMOTE_UP) return;
    r->state = DIRECTORY_REMOTE_UP;
    if (r->m_up) gauge_set(r->m_up, 1);
    if (r->o.on_up) r->o.on_up(r->o.arg);
}

void directory_remote_down(struct directory_remote *r, const char *why)
{
    if (r->m_failures) counter_add(r->m_failures, 1);
    if (r->state == DIRECTORY_REMOTE_DOWN && strcmp(r->why, why) == 0) return;
    r->state = DIRECTORY_REMOTE_DOWN;
    snprintf(r->why, sizeof r->why, "%s", why);
    if (r->m_up) gauge_set(r->m_up, 0);
    if (r->o.on_down) r->o.on_down(r->o.arg, r->why);
}

const char *directory_remote_why_down(const struct directory_remote *r)
{
    return r->state == DIRECTORY_REMOTE_DOWN ? r->why : NULL;
}

void directory_remote_refuse_record(struct directory_remote *r, struct str node, const char *why)
{
    char text[ERR_TEXT_MAX];
    uint32_t n_unlogged;
    snprintf(text, sizeof text, "%.*s %s", (int)(node.n < 32 ? node.n : 32), node.p, why);
    if (log_repeats_due(&r->refused_records, text, clock_ms(), &n_unlogged))
        log_warn("node record refused", "node=%.*s why=\"%s\" repeats=%u",
                 (int)(node.n < 32 ? node.n : 32), node.p, why, n_unlogged);
}

static void queue_release(struct directory_remote *r, struct directory_remote_reservation *one)
{
    list_remove(&one->computed); /* its tokens go with it */
    list_push(&r->pending_releases, &one->link);
    if (r->m_pending_releases)
        gauge_set(r->m_pending_releases, (double)(r->n_all - r->reservations.len));
}

static void forget(struct directory_remote *r, struct directory_remote_reservation *one)
{
    r->n_all--;
    list_remove(&one->computed);
    mem_free(one);
}

void directory_remote_drop(struct directory_remote *r, uint64_t request)
{
    struct directory_remote_reservation *one = map_get(&r->reservations, map_key_u64(&request));
    if (!one || one->over) return;
    if (one->awaited) {
        one->over = true;
        return;
    }
    map_del(&r->reservations, map_key_u64(&request));
    queue_release(r, one);
}

enum status directory_remote_reserve(struct directory_remote *r, uint64_t request, uint64_t *id)
{
    struct directory_remote_reservation *earlier = map_get(&r->reservations, map_key_u64(&request));
    if (earlier && earlier->awaited) return ERR_BUSY; /* one placement at a time */
    if (r->n_all >= DIRECTORY_REMOTE_RESERVATIONS_MAX) return ERR_FULL;
    struct directory_remote_reservation *one = mem_try_calloc(1, sizeof *one);
    if (!one) return ERR_NOMEM;
    directory_remote_drop(r, request);
    one->request = request;
    one->awaited = true;
    list_init(&one->link);
    list_init(&one->computed);
    random_bytes(&one->id, sizeof one->id);
    map_put(&r->reservations, map_key_u64(&request), one);
    r->n_all++;
    *id = one->id;
    return OK;
}

void directory_remote_on_reserved(struct directory_remote *r, uint64_t request, uint64_t id,
                                  enum status st, uint64_t fence)
{
    struct directory_remote_reservation *one = map_get(&r->reservations, map_key_u64(&request));
    ASSERT(one);
    ASSERT(one->id == id);
    one->awaited = false;
    if (st == OK && fence > r->fence) r->fence = fence;
    if (st == OK && !one->over) return;
    map_del(&r->reservations, map_key_u64(&request));
    if (st == ERR_BUSY || st == ERR_NOT_FOUND) forget(r, one);
    else queue_release(r, one);
}

void directory_remote_computed(struct directory_remote *r, uint64_t request)
{
    struct directory_remote_reservation *one = map_get(&r->reservations, map_key_u64(&request));
    if (!one || one->awaited || one->over) return;
    list_remove(&one->computed);
    list_push(&r->pending_computed, &one->computed);
}

static size_t take_computed(struct directory_remote *r, uint64_t *ids)
{
    size_t n = 0;
    while (n < DIRECTORY_RELEASE_MAX && !list_empty(&r->pending_computed)) {
        struct directory_remote_reservation *one = LIST_FIRST(
            &r->pending_computed, struct directory_remote_reservation, computed);
        list_remove(&one->computed);
        ids[n++] = one->id;
    }
    return n;
}

static size_t take_releases(struct directory_remote *r, uint64_t *ids)
{
    size_t n = 0;
    while (n < DIRECTORY_RELEASE_MAX && !list_empty(&r->pending_releases)) {
        struct directory_remote_reservation *one = LIST_FIRST(
            &r->pending_releases, struct directory_remote_reservation, link);
        list_remove(&one->link);
        list_push(&r->inflight_releases, &one->link);
        ids[n++] = one->id;
    }
    return n;
}

bool directory_remote_take_batch(struct directory_remote *r, struct directory_remote_batch *out)
{
    if (r->in_flight) return false;
    out->n_released = take_releases(r, out->released);
    out->n_computed = take_computed(r, out->computed);
    r->in_flight = out->n_released + out->n_computed > 0;
    return r->in_flight;
}

void directory_remote_on_released(struct directory_remote *r, bool confirmed)
{
    r->in_flight = false;
    LIST_FOREACH (one, &r->inflight_releases, struct directory_remote_reservation, link) {
        list_remove(&one->link);
        if (confirmed) forget(r, one);
        else list_push_front(&r->pending_releases, &one->link);
    }
    if (r->m_pending_releases)
        gauge_set(r->m_pending_releases, (double)(r->n_all - r->reservations.len));
}

enum status directory_remote_may_meter(const struct directory_remote *r)
{
    if (r->state == DIRECTORY_REMOTE_DOWN) return ERR_UNAVAILABLE;
    return clock_ms() < r->meter_from_ms ? ERR_UNSUPPORTED : OK;
}

enum status directory_remote_on_metered(struct directory_remote *r, enum status st)
{
    if (st == OK || st == ERR_FULL) return st;
    if (st != ERR_UNSUPPORTED && st != ERR_INVALID) return ERR_UNAVAILABLE;
    r->meter_from_ms = clock_ms() + DIRECTORY_REMOTE_METER_AGAIN_MS;
    return ERR_UNSUPPORTED;
}

struct meter_sum *directory_remote_meter_room(const struct meter_report *r)
{
    struct meter_sum *room = mem_try_calloc(r->n_uses, sizeof *room);
    for (uint32_t i = 0; room && i < r->n_uses; i++) room[i].tenant = r->uses[i].tenant;
    return room;
}
