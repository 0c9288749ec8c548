/* fault_out.c - outgoing puts and messages: dropped, damaged, repeated, or delayed.
 * Thread: transfer. */
#include <string.h>
#include <sys/timerfd.h>

#include "kvtransfer/fault/fault_internal.h"
#include "shared/base/clock.h"
#include "shared/base/mem.h"

enum { FLIP_BYTES = 64 };

/* ---- slots and their windows ---- */

/* A free slot for a put of c, or NULL. */
static struct fault_slot *acquire_slot(struct fault_conn *c, uint64_t tag, bool unreported)
{
    for (uint32_t i = 0; i < FAULT_SLOTS; i++) {
        if (c->transport->slots[i].c) continue;
        c->transport->slots[i] =
            (struct fault_slot){ .c = c, .tag = tag, .unreported = unreported };
        return &c->transport->slots[i];
    }
    return NULL;
}

static uint32_t number_of(const struct fault_transport *r, const struct fault_slot *s)
{
    return (uint32_t)(s - r->slots);
}

static uint64_t window_of(const struct fault_transport *r, const struct fault_slot *s)
{
    return r->memory.bytes - (uint64_t)(FAULT_SLOTS - number_of(r, s)) * FAULT_WINDOW;
}

void fault_end_slot(struct fault_slot *s, uint64_t due_ms)
{
    s->completed = true;
    s->due_ms = due_ms;
}

void fault_free_slots(struct fault_conn *c)
{
    for (uint32_t i = 0; i < FAULT_SLOTS; i++)
        if (c->transport->slots[i].c == c) c->transport->slots[i].c = NULL;
}

/* ---- waiting ---- */

void fault_free_held(struct fault_held *h)
{
    list_remove(&h->link);
    mem_free(h);
}

void fault_free_list(struct list *l)
{
    LIST_FOREACH (h, l, struct fault_held, link) fault_free_held(h);
}

struct fault_held *fault_hold(struct list *l, struct fault_held what, uint64_t due_ms)
{
    uint32_t n = what.what == HELD_PUT ? what.put.n_copies : 0;
    struct fault_held *h = mem_calloc(1, sizeof *h + n * sizeof(struct kvt_copy));
    *h = what;
    h->due_ms = due_ms;
    if (n) {
        memcpy(h + 1, what.put.copies, n * sizeof(struct kvt_copy));
        h->put.copies = (struct kvt_copy *)(void *)(h + 1);
    }
    list_init(&h->link);
    list_push(l, &h->link);
    return h;
}

static uint64_t sooner(uint64_t at, const struct list *l)
{
    if (list_empty(l)) return at;
    uint64_t due = LIST_FIRST(l, struct fault_held, link)->due_ms;
    return due < at ? due : at;
}

void fault_arm(struct fault_transport *r)
{
    uint64_t at = UINT64_MAX, now = clock_ms();
    for (uint32_t i = 0; i < FAULT_SLOTS; i++)
        if (r->slots[i].c && r->slots[i].completed && r->slots[i].due_ms < at)
            at = r->slots[i].due_ms;
    LIST_FOREACH (c, &r->conns, struct fault_conn, link) {
        at = sooner(sooner(sooner(at, &c->out), &c->in), &c->late);
        if (c->force_down && !c->detached) at = now;
    }
    uint64_t in = at > now ? at - now : 0;
    struct itimerspec t = { .it_value = { (time_t)(in / 1000), (long)(in % 1000) * 1000000 } };
    if (in == 0) t.it_value.tv_nsec = 1;
    if (at == UINT64_MAX) t.it_value = (struct timespec){ 0 };
    (void)timerfd_settime(r->timer_fd, 0, &t, NULL);
}

/* ---- out ---- */

static enum status forward(struct fault_conn *c, struct fault_held *h)
{
    const struct kvt_transport_ops *ops = c->transport->inner_ops;
    if (c->inner_down) return ERR_PEER_LOST;
    return h->what == HELD_PUT ? ops->put(c->inner, &h->put) : ops->notify(c->inner, &h->message);
}

void fault_flush_out(struct fault_conn *c, uint64_t now)
{
    while (!list_empty(&c->out)) {
        struct fault_held *h = LIST_FIRST(&c->out, struct fault_held, link);
        if (h->due_ms > now) return;
        if (forward(c, h) == ERR_BUSY) {
            h->due_ms = now + 1;
            return;
        }
        c->n_out--;
        fault_free_held(h);
    }
    while (!list_empty(&c->late)) {
        struct fault_held *h = LIST_FIRST(&c->late, struct fault_held, link);
        if (h->due_ms > now) return;
        if (forward(c, h) == ERR_BUSY) {
            h->due_ms = now + 1;
            return;
        }
        fault_free_held(h);
    }
}

/* Passes it to the inner transport, after what waits. ERR_BUSY: not accepted; with `must` a put or
 * NOTE waits instead. */
static enum status pass_on(struct fault_conn *c, struct fault_held *h, bool must)
{
    struct fault_held *first = list_empty(&c->out) ? NULL
                                                   : LIST_FIRST(&c->out, struct fault_held, link);
    bool overtakes = first && first->overtaken && first->link.next == &c->out;
    bool can_refuse = h->what == HELD_PUT || h->message.kind == KVT_MSG_NOTE;
    if (first && !overtakes && c->n_out >= FAULT_HELD_MAX)
        return can_refuse ? ERR_BUSY : forward(c, h);
    if (!first || overtakes) {
        enum status st = forward(c, h);
        if (st == ERR_BUSY && can_refuse && !must) return st;
        if (st == OK && overtakes) {
            fault_count(c->transport, FAULT_REORDER);
            first->overtaken = false;
            first->due_ms = 0;
            fault_flush_out(c, clock_ms());
        }
        if (st != ERR_BUSY) return st;
    }
    fault_hold(&c->out, *h, 0);
    c->n_out++;
    return OK;
}

static void hold_out(struct fault_conn *c, struct fault_held *h, uint32_t ms, bool overtaken)
{
    h->overtaken = overtaken;
    fault_hold(&c->out, *h, clock_ms() + ms);
    c->n_out++;
}

/* Keeps the first `keep` bytes of the copies; returns how many copies are left. */
static uint32_t truncate_copies(struct kvt_copy *copies, uint32_t n, uint64_t keep)
{
    for (uint32_t i = 0; i < n; i++) {
        if (copies[i].bytes >= keep) {
            copies[i].bytes = keep;
            return i + (keep > 0);
        }
        keep -= copies[i].bytes;
    }
    return n;
}

/* Replaces a few bytes of one copy with a damaged image. */
static uint32_t flip_bit(struct fault_transport *r, const struct fault_slot *s,
                         struct kvt_copy *copies, uint32_t n, uint64_t total)
{
    uint64_t at = fault_random(r) % total;
    uint32_t i = 0;
    while (at >= copies[i].bytes) at -= copies[i++].bytes;
    struct kvt_copy whole = copies[i];
    uint64_t bytes = whole.bytes - at < FLIP_BYTES ? whole.bytes - at : FLIP_BYTES;
    uint64_t window = window_of(r, s);
    char *image = (char *)r->memory.ptr + window;
    memcpy(image, kvt_source(&r->env, whole.local + at), bytes);
    image[0] = (char)(image[0] ^ 1 << fault_random(r) % 8);
    struct kvt_copy parts[3] = { { whole.local, whole.remote, at },
                                 { KVT_STAGING + window, whole.remote + at, bytes },
                                 { whole.local + at + bytes, whole.remote + at + bytes,
                                   whole.bytes - at - bytes } };
    memmove(copies + i + 3, copies + i + 1, (n - i - 1) * sizeof *copies);
    uint32_t to = i;
    for (int k = 0; k < 3; k++)
        if (parts[k].bytes) copies[to++] = parts[k];
    memmove(copies + to, copies + i + 3, (n - i - 1) * sizeof *copies);
    return to + n - i - 1;
}

/* Saves the first bytes of the put, to write them again later. */
static void prepare_late(struct fault_conn *c, const struct kvt_put *p, uint32_t ms)
{
    struct fault_transport *r = c->transport;
    struct fault_slot *s = acquire_slot(c, p->tag, true);
    if (!s) return;
    struct fault_held h = { .what = HELD_PUT, .put = *p };
    uint64_t window = window_of(r, s);
    struct kvt_copy *copies = mem_dup(p->copies, p->n_copies * sizeof *copies);
    h.put.copies = copies;
    h.put.tag = number_of(r, s);
    if (h.put.head.bytes > FAULT_WINDOW) h.put.head.bytes = FAULT_WINDOW;
    h.put.n_copies = truncate_copies(copies, p->n_copies, h.put.head.bytes);
    for (uint32_t i = 0; i < h.put.n_copies; i++) {
        memcpy((char *)r->memory.ptr + window, kvt_source(&r->env, copies[i].local),
               copies[i].bytes);
        copies[i].local = KVT_STAGING + window;
        window += copies[i].bytes;
    }
    fault_hold(&c->late, h, clock_ms() + ms);
    mem_free(copies);
    fault_count(r, FAULT_LATE);
}

/* Removes the last bytes of a put. A put of one byte stays whole. */
static enum status put_truncated(struct fault_conn *c, struct fault_held *h)
{
    struct fault_transport *r = c->transport;
    struct kvt_put *p = &h->put;
    if (p->head.bytes < 2) return pass_on(c, h, true);
    fault_count(r, FAULT_TRUNCATE);
    p->n_copies = truncate_copies(r->copies, p->n_copies,
                                  1 + fault_random(r) % (p->head.bytes - 1));
    for (uint32_t i = 0; fault_scatters(r) && i < p->n_copies; i++)
        p->head.bytes = (i ? p->head.bytes : 0) + r->copies[i].bytes;
    return pass_on(c, h, true);
}

/* Puts the same bytes twice, if a slot is free for the repetition. */
static enum status put_twice(struct fault_conn *c, const struct fault_slot *s, struct fault_held *h)
{
    struct fault_slot *again = acquire_slot(c, s->tag, true);
    TRY(pass_on(c, h, true));
    if (!again) return OK;
    h->put.tag = number_of(c->transport, again);
    fault_count(c->transport, FAULT_DUPLICATE);
    return pass_on(c, h, true);
}

/* Injects the fault into the put, whose copies are r->copies. */
static enum status put_with(struct fault_conn *c, struct fault_slot *s, struct kvt_put *p,
                            struct fault_action f)
{
    struct fault_transport *r = c->transport;
    struct fault_held h = { .what = HELD_PUT, .put = *p };
    const struct kvt_put late = {
        .head = p->head, .copies = p->copies, .n_copies = p->n_copies, .tag = s->tag
    };
    switch (f.kind) {
    case FAULT_DROP: fault_end_slot(s, 0); break;
    case FAULT_DELAY: hold_out(c, &h, f.ms, false); break;
    /* counted when something overtakes it */
    case FAULT_REORDER: hold_out(c, &h, FAULT_REORDER_MS, true); return OK;
    case FAULT_LATE: prepare_late(c, &late, f.ms); return pass_on(c, &h, true);
    case FAULT_DUPLICATE: return put_twice(c, s, &h);
    case FAULT_TRUNCATE: return put_truncated(c, &h);
    case FAULT_FLIP:
        h.put.n_copies = flip_bit(r, s, r->copies, p->n_copies, p->head.bytes);
        fault_count(r, f.kind);
        return pass_on(c, &h, true);
    case FAULT_STALE:
        h.put.head.generation--;
        fault_count(r, f.kind);
        return pass_on(c, &h, true);
    default: return pass_on(c, &h, false);
    }
    fault_count(r, f.kind);
    return OK;
}

enum status fault_force_down(struct fault_conn *c)
{
    fault_count(c->transport, FAULT_DISCONNECT);
    c->force_down = true;
    fault_arm(c->transport);
    return ERR_PEER_LOST;
}

enum status fault_put(struct kvt_conn *base, const struct kvt_put *p)
{
    struct fault_conn *c = (struct fault_conn *)base;
    struct fault_transport *r = c->transport;
    if (c->inner_down || c->force_down || c->detached) return ERR_PEER_LOST;
    if (c->n_out >= FAULT_HELD_MAX) return ERR_BUSY;
    struct fault_slot *s = acquire_slot(c, p->tag, false);
    if (!s) return ERR_BUSY;
    uint64_t random = r->random;
    uint32_t passed = r->passed[FAULT_AT_PUT];
    struct fault_action f = fault_inject(r, FAULT_AT_PUT, true);
    if (f.kind == FAULT_DISCONNECT) {
        s->c = NULL;
        return fault_force_down(c);
    }
    struct kvt_put mine = *p;
    memcpy(r->copies, p->copies, p->n_copies * sizeof *r->copies);
    for (uint32_t i = 0; i < p->n_copies; i++) /* the inner transport reads our image of staging */
        if (p->copies[i].local >= KVT_STAGING)
            memcpy((char *)r->memory.ptr + (p->copies[i].local - KVT_STAGING),
                   kvt_source(r->outer, p->copies[i].local), p->copies[i].bytes);
    mine.copies = r->copies;
    mine.sums = NULL; /* they are of the bytes that the session means, before a fault changes any */
    mine.tag = number_of(r, s);
    enum status st = put_with(c, s, &mine, f);
    if (st != OK) s->c = NULL;
    if (st == ERR_BUSY) { /* the session will put it again, so it does not count as a step */
        r->random = random;
        r->passed[FAULT_AT_PUT] = passed;
    }
    fault_arm(r);
    return st;
}

static enum status notify_with(struct fault_conn *c, struct fault_held *h, struct fault_action f)
{
    switch (f.kind) {
    case FAULT_DROP: break;
    case FAULT_DELAY: hold_out(c, h, f.ms, false); break;
    case FAULT_REORDER: hold_out(c, h, FAULT_REORDER_MS, true); return OK;
    case FAULT_DUPLICATE:
        fault_count(c->transport, f.kind);
        TRY(pass_on(c, h, true));
        return pass_on(c, h, true);
    case FAULT_FLIP:
    case FAULT_STALE:
        fault_damage_message(c->transport, &h->message, f.kind);
        fault_count(c->transport, f.kind);
        return pass_on(c, h, true);
    default: return pass_on(c, h, false);
    }
    fault_count(c->transport, f.kind);
    return OK;
}

enum status fault_notify(struct kvt_conn *base, const struct kvt_message *m)
{
    struct fault_conn *c = (struct fault_conn *)base;
    struct fault_transport *r = c->transport;
    enum kvt_fault_step step = fault_step_of(m->kind);
    if (c->inner_down || c->force_down || c->detached) return ERR_PEER_LOST;
    if (m->kind == KVT_MSG_NOTE && c->n_out >= FAULT_HELD_MAX) return ERR_BUSY;
    uint64_t random = r->random;
    uint32_t passed = r->passed[step];
    struct fault_action f = fault_inject(r, step, true);
    if (f.kind == FAULT_DISCONNECT) return fault_force_down(c);
    struct fault_held h = { .what = HELD_MESSAGE, .message = *m };
    enum status st = notify_with(c, &h, f);
    if (st == ERR_BUSY) {
        r->random = random;
        r->passed[step] = passed;
    }
    fault_arm(r);
    return st;
}
