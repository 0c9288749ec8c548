/* fault_in.c - events of the inner transport: connections, messages, completions, each forwarded,
 * changed, or delayed.
 * Thread: transfer. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "kvtransfer/fault/fault_internal.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

struct fault_conn *fault_new_conn(struct fault_transport *r, struct kvt_conn *inner)
{
    struct fault_conn *c = MEM_NEW(struct fault_conn);
    c->base = (struct kvt_conn){ .t = &r->base, .incoming = inner->incoming };
    c->transport = r;
    c->inner = inner;
    inner->peer = c;
    list_init(&c->link);
    list_init(&c->out);
    list_init(&c->in);
    list_init(&c->late);
    list_push(&r->conns, &c->link);
    return c;
}

void fault_free_conn(struct fault_conn *c)
{
    fault_free_slots(c);
    fault_free_list(&c->out);
    fault_free_list(&c->in);
    fault_free_list(&c->late);
    list_remove(&c->link);
    mem_free(c);
}

/* Queues it after what waits, or before it if that is to be overtaken. */
static void hold_in(struct fault_conn *c, struct fault_held h, uint32_t ms)
{
    struct fault_held *last = list_empty(&c->in) ? NULL
                                                 : LIST_ENTRY(c->in.prev, struct fault_held, link);
    fault_hold(&c->in, h, ms ? clock_ms() + ms : 0);
    c->n_in++;
    if (!last || !last->overtaken || h.what != HELD_MESSAGE) return;
    fault_count(c->transport, FAULT_REORDER);
    last->overtaken = false;
    last->due_ms = 0;
    list_remove(&last->link);
    list_push(&c->in, &last->link);
}

static void on_message(struct fault_conn *c, const struct kvt_message *m)
{
    struct fault_transport *r = c->transport;
    struct fault_held h = { .what = HELD_MESSAGE, .message = *m };
    struct fault_action f = fault_inject(r, fault_step_of(m->kind), false);
    switch (f.kind) {
    case FAULT_DISCONNECT: (void)fault_force_down(c); return;
    case FAULT_REORDER:
        h.overtaken = true;
        hold_in(c, h, FAULT_REORDER_MS); /* counted when something overtakes it */
        return;
    case FAULT_DROP: break;
    case FAULT_DUPLICATE:
        hold_in(c, h, 0);
        hold_in(c, h, 0);
        break;
    default:
        fault_damage_message(r, &h.message, f.kind);
        hold_in(c, h, f.kind == FAULT_DELAY ? f.ms : 0);
    }
    if (f.kind != FAULT_NOTHING) fault_count(r, f.kind);
}

static void on_put_done(struct fault_transport *r, uint64_t tag)
{
    struct fault_slot *s = &r->slots[tag % FAULT_SLOTS];
    if (!s->c) return;
    if (s->unreported) {
        s->c = NULL;
        return;
    }
    struct fault_action f = fault_inject(r, FAULT_AT_PUT_DONE, false);
    if (f.kind != FAULT_NOTHING && f.kind != FAULT_DISCONNECT) fault_count(r, f.kind);
    if (f.kind == FAULT_DROP) s->c = NULL;
    else if (f.kind == FAULT_DISCONNECT) (void)fault_force_down(s->c);
    else fault_end_slot(s, f.kind == FAULT_DELAY ? clock_ms() + f.ms : 0);
}

struct fault_events {
    struct kvt_transport_event *v;
    size_t n, cap;
};

static struct kvt_transport_event *add_event(struct fault_events *evs,
                                             enum kvt_transport_event_kind kind,
                                             struct fault_conn *c)
{
    struct kvt_transport_event *i = &evs->v[evs->n++];
    *i = (struct kvt_transport_event){ .kind = kind, .conn = &c->base };
    return i;
}

/* Handles one event of the inner transport; UP is forwarded at once. */
static void on_inner_event(struct fault_transport *r, const struct kvt_transport_event *i,
                           struct fault_events *out)
{
    struct fault_conn *c = i->conn->peer ? i->conn->peer : fault_new_conn(r, i->conn);
    if (c->detached) return;
    switch (i->kind) {
    case KVT_UP:
        if (fault_inject(r, FAULT_AT_UP, false).kind == FAULT_DISCONNECT) (void)fault_force_down(c);
        add_event(out, KVT_UP, c);
        break;
    case KVT_DOWN:
        c->inner_down = true;
        hold_in(c, (struct fault_held){ .what = HELD_DOWN, .down = *i }, 0);
        break;
    case KVT_MESSAGE: on_message(c, &i->message); break;
    case KVT_PUT_DONE: on_put_done(r, i->tag); break;
    }
}

/* Reports the connection as DOWN; the session layer will disconnect it. */
static void report_down(struct fault_events *out, struct fault_conn *c,
                        const struct kvt_transport_event *why)
{
    struct kvt_transport_event *i = add_event(out, KVT_DOWN, c);
    c->detached = true;
    i->status = why ? why->status : ERR_PEER_LOST;
    if (why) memcpy(i->text, why->text, sizeof i->text);
    else
        snprintf(i->text, sizeof i->text, "%s: disconnected by the fault plan",
                 c->transport->ops.name);
    fault_free_slots(c);
    fault_free_list(&c->in);
    fault_free_list(&c->late);
}

/* Delivers waiting events that are due. A DOWN comes after the messages before it. */
static void deliver(struct fault_events *out, struct fault_conn *c, uint64_t now)
{
    while (!list_empty(&c->in) && !c->detached && out->n < out->cap) {
        struct fault_held *h = LIST_FIRST(&c->in, struct fault_held, link);
        if (h->due_ms > now && c->n_in < FAULT_HELD_MAX) return;
        c->n_in--;
        if (h->what == HELD_DOWN) {
            struct kvt_transport_event why = h->down;
            report_down(out, c, &why);
            return;
        }
        add_event(out, KVT_MESSAGE, c)->message = h->message;
        fault_free_held(h);
    }
}

/* Reports everything that is due: completions before answers of the peer that came after them. */
static void report_due(struct fault_transport *r, struct fault_events *out, uint64_t now)
{
    for (uint32_t i = 0; i < FAULT_SLOTS && out->n < out->cap; i++) {
        struct fault_slot *s = &r->slots[i];
        if (!s->c || !s->completed || s->due_ms > now) continue;
        add_event(out, KVT_PUT_DONE, s->c)->tag = s->tag;
        s->c = NULL;
    }
    LIST_FOREACH (c, &r->conns, struct fault_conn, link) {
        if (c->force_down && !c->detached && out->n < out->cap) report_down(out, c, NULL);
        deliver(out, c, now);
    }
}

/* Polls the inner transport only after all its earlier due events were reported: bytes that it
 * scatters must follow messages that the session has seen. */
size_t fault_poll(struct kvt_transport *t, struct kvt_transport_event *v, size_t cap)
{
    struct fault_transport *r = ((struct fault_transport *)t);
    struct kvt_transport_event inner[16];
    struct fault_events out = { v, 0, cap };
    uint64_t now = clock_ms(), ticks;
    if (read(r->timer_fd, &ticks, sizeof ticks) < 0 && errno != EAGAIN)
        log_warn("kv fault timer", "errno=%d", errno);
    LIST_FOREACH (c, &r->conns, struct fault_conn, link) fault_flush_out(c, now);
    report_due(r, &out, now);
    size_t room = cap - out.n < COUNT_OF(inner) ? cap - out.n : COUNT_OF(inner);
    size_t n = room ? r->inner_ops->poll(r->inner, inner, room) : 0;
    for (size_t i = 0; i < n; i++) on_inner_event(r, &inner[i], &out);
    if (n) report_due(r, &out, now);
    fault_arm(r);
    return out.n;
}
