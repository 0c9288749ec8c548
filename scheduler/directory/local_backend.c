/* local_backend.c - the ops of the `local` backend: what local.c does at once is answered in the
 * next turn of the loop, as the other backends answer later. At most CALLS_MAX answers are due.
 * Thread: loop. */
#include <stdio.h>

#include "scheduler/directory/backends.h"
#include "scheduler/directory/local_state.h"
#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

enum { CALLS_MAX = 1 << 16, OWN_PROCESS = 0 };

/* An answer to be given in the next turn of the loop. All functions NULL: on_up. */
struct directory_local_call {
    struct list link;
    directory_snapshot_fn *snapshot;
    directory_reserve_fn *reserve;
    directory_meter_fn *meter;
    void *arg;
    enum status st;
    struct directory_placed placed;
    struct meter_sums sums;
    struct meter_sum *room; /* of sums */
};

static struct directory_local *self_of(struct directory *d)
{
    ASSERT(directory_is_local(d));
    return (struct directory_local *)d;
}

bool directory_is_local(const struct directory *d) { return d->ops == &directory_local_ops; }

/* ---- answers ---- */

static void call_free(struct directory_local_call *c)
{
    mem_free(c->room);
    mem_free(c);
}

static void directory_local_free(struct directory_local *d)
{
    LIST_FOREACH (c, &d->calls, struct directory_local_call, link) call_free(c);
    directory_local_drop_all(d);
    loop_timer_free(d->wake);
    mem_free(d);
}

static void answer(struct directory_local *d, const struct directory_local_call *c)
{
    if (c->reserve) {
        c->reserve(c->arg, c->st, c->st == OK ? &c->placed : NULL);
    } else if (c->snapshot) {
        struct directory_snapshot s;
        struct node_record *nodes = directory_local_view(&d->base, d->topic, &s.n, s.topics);
        s.nodes = nodes;
        c->snapshot(c->arg, OK, &s);
        mem_free(nodes);
    } else if (c->meter) {
        c->meter(c->arg, c->st, c->st == OK ? &c->sums : NULL);
    } else if (d->o.on_up) {
        d->o.on_up(d->o.arg);
    }
}

/* Calls made inside callbacks are answered in the next turn, so that a callback that asks again
 * does not block the loop. */
static void on_wake(void *arg)
{
    struct directory_local *d = arg;
    loop_timer_free(d->wake);
    d->wake = NULL;
    d->answering = true;
    for (size_t n = d->n_calls; n > 0 && !d->closed; n--) {
        struct directory_local_call *c = LIST_FIRST(&d->calls, struct directory_local_call, link);
        list_remove(&c->link);
        d->n_calls--;
        answer(d, c);
        call_free(c);
    }
    d->answering = false;
    if (d->closed) directory_local_free(d);
}

static enum status queue_answer(struct directory_local *d, struct directory_local_call call)
{
    if (d->n_calls >= CALLS_MAX) return ERR_FULL;
    struct directory_local_call *c = mem_try_calloc(1, sizeof *c);
    if (!c) return ERR_NOMEM;
    *c = call;
    list_push(&d->calls, &c->link);
    d->n_calls++;
    if (!d->wake) d->wake = loop_timer_start(d->o.loop, 0, 0, on_wake, d);
    return OK;
}

/* ---- backend ---- */

static enum status directory_local_open(const struct directory_options *o, struct directory **out,
                                        struct err *err)
{
    struct directory_local *d = MEM_NEW(struct directory_local);
    d->base.ops = &directory_local_ops;
    d->o = *o;
    snprintf(d->topic, sizeof d->topic, "%s", o->topic);
    list_init(&d->by_lease);
    list_init(&d->by_end);
    list_init(&d->owners_by_lease);
    list_init(&d->calls);
    if (o->metrics) {
        d->m_nodes = metrics_gauge(o->metrics, "baton_directory_nodes", "",
                                   "Live nodes of all topics in the directory of this process.");
        d->m_reservations = metrics_gauge(o->metrics, "baton_directory_reservations", "",
                                          "Placements counted in the directory of this process.");
    }
    if (queue_answer(d, (struct directory_local_call){ 0 }) != OK) {
        directory_local_free(d);
        return err_set(err, ERR_NOMEM, "not enough memory for a directory");
    }
    *out = &d->base;
    return OK;
}

static void directory_local_close(struct directory *base)
{
    struct directory_local *d = self_of(base);
    d->closed = true;
    if (!d->answering) directory_local_free(d);
}

static void directory_local_publish_own(struct directory *base, const struct node_record *me)
{
    enum status st = directory_local_publish(base, me);
    (void)st; /* logged there; the next renewal tries again */
}

static enum status directory_local_snapshot(struct directory *base, directory_snapshot_fn *cb,
                                            void *arg)
{
    return queue_answer(self_of(base), (struct directory_local_call){ .snapshot = cb, .arg = arg });
}

static enum status directory_local_reserve_own(struct directory *base, const struct placement *p,
                                               directory_reserve_fn *cb, void *arg)
{
    struct directory_local_call call = { .reserve = cb, .arg = arg };
    call.st = directory_local_reserve(base, p, OWN_PROCESS, &call.placed);
    if (call.st == ERR_FULL) return ERR_FULL;
    enum status st = queue_answer(self_of(base), call);
    if (st != OK && call.st == OK) directory_local_release(base, p->request);
    return st;
}

static void log_refused(struct directory_local *d, const char *why)
{
    uint32_t n_unlogged;
    if (log_repeats_due(&d->refused_reports, why, clock_ms(), &n_unlogged))
        log_warn("meter report refused", "topic=%s why=\"%s\" repeats=%u", d->topic, why,
                 n_unlogged);
}

static enum status directory_local_meter_own(struct directory *base, const struct meter_report *r,
                                             directory_meter_fn *cb, void *arg)
{
    struct directory_local *d = self_of(base);
    struct directory_local_call call = { .meter = cb, .arg = arg };
    struct err err;
    if (d->n_calls >= CALLS_MAX) return ERR_FULL;
    call.room = mem_try_calloc(r->n_uses, sizeof *call.room);
    if (!call.room) return ERR_NOMEM;
    call.st = directory_local_meter(base, d->topic, r, call.room, &call.sums, &err);
    if (call.st != OK) log_refused(d, err.text);
    enum status st = queue_answer(d, call);
    if (st != OK) mem_free(call.room); /* it was counted; under its number it counts once */
    return st;
}

/* The state is in this process. */
static const char *directory_local_why_down(const struct directory *base)
{
    (void)base;
    return NULL;
}

const struct directory_ops directory_local_ops = {
    .name = "local",
    .open = directory_local_open,
    .close = directory_local_close,
    .publish = directory_local_publish_own,
    .leave = directory_local_leave,
    .snapshot = directory_local_snapshot,
    .reserve = directory_local_reserve_own,
    .computed = directory_local_computed,
    .release = directory_local_release,
    .meter = directory_local_meter_own,
    .why_down = directory_local_why_down,
};
