/* fault.c - the wrapper row: what it holds back, damages, repeats, and how it stays in step with the row inside. Meaning: fault.h.
 *
 *   session layer ── put, notify ──▶ befall() ──▶ inner row, or c->out (waiting) ──▶ inner row
 *   inner row ── poll ──▶ befall() ──▶ c->in (waiting or due) ──▶ session layer
 *
 * Every put given to the inner row has a slot, whose number is the inner tag; a slot knows the session's tag, or that nobody asks for it.
 * Sources the inner row may read: the pool, and `memory`, which is the outer staging's image followed by one window per slot with a few
 * damaged or late bytes. Thread: transfer; open and close: as of the row. */
#include "kvtransfer/fault.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include "shared/base/clock.h"
#include "shared/base/list.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

enum { SLOTS = 512, WINDOW = FAULT_LATE_BYTES, FLIP_BYTES = 64, EXTRA_COPIES = 2 };

struct fault_slot {
    struct fault_conn *c;      /* NULL: free */
    uint64_t           tag, due_ms;
    bool               silent; /* a repetition: the session layer does not know it */
    bool               over;   /* PUT_DONE is to be told at due_ms */
};

/* Something that waits: a put or message on its way out, a message or the end of the connection on its way in. */
struct fault_held {
    struct list         link;
    uint64_t            due_ms;
    enum { HELD_MESSAGE, HELD_PUT, HELD_DOWN } what;
    bool                overtaken; /* waits for the next thing to pass it; then due */
    struct kvt_message  message;
    struct kvt_incident down;
    struct kvt_put      put;       /* copies follow this struct */
    uint32_t            slot;
};

struct fault_conn {
    struct kvt_conn   base;
    struct fault_row *row;
    struct kvt_conn  *inner;
    struct list       link, out, in;
    struct list       late;        /* puts to be repeated, by time */
    uint32_t          n_out, n_in;
    bool              gone;        /* the inner row said DOWN */
    bool              doomed;      /* `disconnect`: DOWN is to be told */
    bool              silent;      /* DOWN was told, or fence asked: nothing more is */
    uint64_t          fence_ms;    /* fence answers ERR_BUSY until then */
};

struct fault_row {
    struct kvt_transport            base;
    struct kvt_transport_ops        ops; /* this row's: the slots below under the inner row's name and capabilities */
    const struct kvt_transport_ops *inner_ops;
    struct kvt_transport           *inner;
    const struct kvt_env           *outer;
    struct kvt_env                  env; /* the inner row's */
    struct dev_mem                  memory;
    struct kvt_fault_plan           plan;
    uint64_t                        random;
    uint32_t                        passed[FAULT_STEPS];
    bool                            fired[FAULT_TRIGGERS_MAX];
    struct counter                 *injected[FAULT_KINDS];
    struct list                     conns;
    struct fault_slot               slots[SLOTS];
    struct kvt_copy                *copies; /* of the put being made */
    int                             epoll_fd, timer_fd;
};

static struct fault_row *row_of(struct kvt_transport *t) { return (struct fault_row *)t; }
static struct fault_conn *conn_of(struct kvt_conn *c) { return (struct fault_conn *)c; }
static bool places(const struct fault_row *r) { return r->ops.caps & KVT_CAP_RECEIVER_PLACES; }

/* ---- chance ---- */

/* splitmix64 */
static uint64_t draw(struct fault_row *r)
{
    uint64_t z = r->random += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static void count(struct fault_row *r, enum kvt_fault_kind kind)
{
    if (r->injected[kind]) counter_add(r->injected[kind], 1);
}

static void sleep_ms(uint32_t ms)
{
    struct timespec t = { ms / 1000, (long)(ms % 1000) * 1000000 };
    while (nanosleep(&t, &t) != 0 && errno == EINTR) {}
}

struct fate {
    enum kvt_fault_kind kind; /* or FAULT_NOTHING */
    uint32_t            ms;
};

/* What befalls the thing that passes `step`; `leaves`: a put or message of this process, which probabilities are for. What this process
 * does to itself is done here; the rest is the caller's. */
static struct fate befall(struct fault_row *r, enum kvt_fault_step step, bool leaves)
{
    struct fate f = { FAULT_NOTHING, 0 };
    r->passed[step]++;
    for (uint32_t i = 0; i < r->plan.n_at && f.kind == FAULT_NOTHING; i++) {
        const struct kvt_fault_trigger *t = &r->plan.at[i];
        if (r->fired[i] || t->step != step || t->nth != r->passed[step]) continue;
        r->fired[i] = true;
        f = (struct fate){ t->kind, t->ms };
        log_warn("kv fault injected", "transport=%s step=%s n=%u action=%s ms=%u", r->ops.name, kvt_fault_step_names[step], t->nth,
                 kvt_fault_kind_names[t->kind], t->ms);
    }
    for (int k = 0; leaves && k < FAULT_KINDS && f.kind == FAULT_NOTHING; k++) {
        if (!r->plan.parts[k] || !kvt_fault_fits(step, (enum kvt_fault_kind)k)) continue;
        if (draw(r) % FAULT_PARTS < r->plan.parts[k]) f = (struct fate){ (enum kvt_fault_kind)k, r->plan.ms[k] };
    }
    if (f.kind == FAULT_STALE && step == FAULT_AT_PUT && !places(r)) f.kind = FAULT_NOTHING;
    if (f.kind != FAULT_SIGKILL && f.kind != FAULT_SIGSTOP && f.kind != FAULT_PAUSE) return f;
    count(r, f.kind);
    if (f.kind == FAULT_PAUSE) sleep_ms(f.ms);
    else (void)kill(getpid(), f.kind == FAULT_SIGKILL ? SIGKILL : SIGSTOP);
    return (struct fate){ FAULT_NOTHING, 0 };
}

static enum kvt_fault_step step_of(enum kvt_message_kind kind)
{
    switch (kind) {
    case KVT_MSG_OPEN: return FAULT_AT_OPEN;
    case KVT_MSG_OPENED: return FAULT_AT_OPENED;
    case KVT_MSG_NOTE: return FAULT_AT_NOTE;
    case KVT_MSG_FINISH: return FAULT_AT_FINISH;
    case KVT_MSG_DONE: return FAULT_AT_DONE;
    case KVT_MSG_STOP: return FAULT_AT_STOP;
    case KVT_MSG_STOPPED: return FAULT_AT_STOPPED;
    default: return FAULT_AT_BYE;
    }
}

static void damage_message(struct fault_row *r, struct kvt_message *m, enum kvt_fault_kind kind)
{
    uint64_t bit = UINT64_C(1) << draw(r) % 64;
    if (kind == FAULT_STALE) m->generation--;
    if (kind == FAULT_FLIP && m->kind == KVT_MSG_NOTE) m->sums[draw(r) % m->n] ^= bit;
    if (kind == FAULT_FLIP && m->kind == KVT_MSG_FINISH) m->bytes ^= bit;
}

/* ---- slots and their windows ---- */

static struct fault_slot *take_slot(struct fault_conn *c, uint64_t tag, bool silent)
{
    for (uint32_t i = 0; i < SLOTS; i++) {
        if (c->row->slots[i].c) continue;
        c->row->slots[i] = (struct fault_slot){ .c = c, .tag = tag, .silent = silent };
        return &c->row->slots[i];
    }
    return NULL;
}

static uint32_t number_of(const struct fault_row *r, const struct fault_slot *s) { return (uint32_t)(s - r->slots); }

static uint64_t window_of(const struct fault_row *r, const struct fault_slot *s)
{
    return r->memory.bytes - (uint64_t)(SLOTS - number_of(r, s)) * WINDOW;
}

/* PUT_DONE will be told without the inner row having said so. */
static void end_slot(struct fault_slot *s, uint64_t due_ms)
{
    s->over = true;
    s->due_ms = due_ms;
}

/* ---- waiting ---- */

static void free_held(struct fault_held *h)
{
    list_remove(&h->link);
    mem_free(h);
}

static void free_list(struct list *l)
{
    LIST_FOREACH(h, l, struct fault_held, link) free_held(h);
}

static struct fault_held *hold(struct list *l, struct fault_held what, uint64_t due_ms)
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

/* Wake the transfer thread when the next waiting thing is due. */
static void arm(struct fault_row *r)
{
    uint64_t at = UINT64_MAX, now = clock_ms();
    for (uint32_t i = 0; i < SLOTS; i++)
        if (r->slots[i].c && r->slots[i].over && r->slots[i].due_ms < at) at = r->slots[i].due_ms;
    LIST_FOREACH(c, &r->conns, struct fault_conn, link) {
        at = sooner(sooner(sooner(at, &c->out), &c->in), &c->late);
        if (c->doomed && !c->silent) at = now;
    }
    uint64_t in = at > now ? at - now : 0;
    struct itimerspec t = { .it_value = { (time_t)(in / 1000), (long)(in % 1000) * 1000000 } };
    if (in == 0) t.it_value.tv_nsec = 1;
    if (at == UINT64_MAX) t.it_value = (struct timespec){ 0 };
    (void)timerfd_settime(r->timer_fd, 0, &t, NULL);
}

/* ---- out ---- */

static enum status give(struct fault_conn *c, struct fault_held *h)
{
    const struct kvt_transport_ops *ops = c->row->inner_ops;
    if (c->gone) return ERR_PEER_LOST;
    return h->what == HELD_PUT ? ops->put(c->inner, &h->put) : ops->notify(c->inner, &h->message);
}

/* What waits on its way out and is due, in order. */
static void flush_out(struct fault_conn *c, uint64_t now)
{
    while (!list_empty(&c->out)) {
        struct fault_held *h = LIST_FIRST(&c->out, struct fault_held, link);
        if (h->due_ms > now) return;
        if (give(c, h) == ERR_BUSY) {
            h->due_ms = now + 1;
            return;
        }
        c->n_out--;
        free_held(h);
    }
    while (!list_empty(&c->late)) {
        struct fault_held *h = LIST_FIRST(&c->late, struct fault_held, link);
        if (h->due_ms > now) return;
        if (give(c, h) == ERR_BUSY) {
            h->due_ms = now + 1;
            return;
        }
        free_held(h);
    }
}

/* Give it to the inner row, behind what waits. ERR_BUSY: not taken; a put or NOTE with `must` waits instead. */
static enum status pass_on(struct fault_conn *c, struct fault_held *h, bool must)
{
    struct fault_held *first = list_empty(&c->out) ? NULL : LIST_FIRST(&c->out, struct fault_held, link);
    bool overtakes = first && first->overtaken && first->link.next == &c->out;
    bool can_refuse = h->what == HELD_PUT || h->message.kind == KVT_MSG_NOTE;
    if (first && !overtakes && c->n_out >= FAULT_HELD_MAX) return can_refuse ? ERR_BUSY : give(c, h);
    if (!first || overtakes) {
        enum status st = give(c, h);
        if (st == ERR_BUSY && can_refuse && !must) return st;
        if (st == OK && overtakes) {
            count(c->row, FAULT_REORDER);
            first->overtaken = false;
            first->due_ms = 0;
            flush_out(c, clock_ms());
        }
        if (st != ERR_BUSY) return st;
    }
    hold(&c->out, *h, 0);
    c->n_out++;
    return OK;
}

static void hold_out(struct fault_conn *c, struct fault_held *h, uint32_t ms, bool overtaken)
{
    h->overtaken = overtaken;
    hold(&c->out, *h, clock_ms() + ms);
    c->n_out++;
}

/* The first `keep` bytes of the copies; returns how many copies that leaves. */
static uint32_t cut(struct kvt_copy *copies, uint32_t n, uint64_t keep)
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

/* Replace a few bytes of one copy by a damaged image of them. */
static uint32_t flip_bit(struct fault_row *r, const struct fault_slot *s, struct kvt_copy *copies, uint32_t n, uint64_t total)
{
    uint64_t at = draw(r) % total;
    uint32_t i = 0;
    while (at >= copies[i].bytes) at -= copies[i++].bytes;
    struct kvt_copy whole = copies[i];
    uint64_t bytes = whole.bytes - at < FLIP_BYTES ? whole.bytes - at : FLIP_BYTES;
    uint64_t window = window_of(r, s);
    char *image = (char *)r->memory.ptr + window;
    memcpy(image, kvt_source(&r->env, whole.local + at), bytes);
    image[0] = (char)(image[0] ^ 1 << draw(r) % 8);
    struct kvt_copy parts[3] = { { whole.local, whole.remote, at },
                                 { KVT_STAGING + window, whole.remote + at, bytes },
                                 { whole.local + at + bytes, whole.remote + at + bytes, whole.bytes - at - bytes } };
    memmove(copies + i + 3, copies + i + 1, (n - i - 1) * sizeof *copies);
    uint32_t to = i;
    for (int k = 0; k < 3; k++)
        if (parts[k].bytes) copies[to++] = parts[k];
    memmove(copies + to, copies + i + 3, (n - i - 1) * sizeof *copies);
    return to + n - i - 1;
}

/* Keep the first bytes of the put for a repetition of its own. */
static void prepare_late(struct fault_conn *c, const struct kvt_put *p, uint32_t ms)
{
    struct fault_row *r = c->row;
    struct fault_slot *s = take_slot(c, p->tag, true);
    if (!s) return;
    struct fault_held h = { .what = HELD_PUT, .put = *p };
    uint64_t window = window_of(r, s);
    struct kvt_copy *copies = mem_dup(p->copies, p->n_copies * sizeof *copies);
    h.put.copies = copies;
    h.put.tag = number_of(r, s);
    if (h.put.head.bytes > WINDOW) h.put.head.bytes = WINDOW;
    h.put.n_copies = cut(copies, p->n_copies, h.put.head.bytes);
    for (uint32_t i = 0; i < h.put.n_copies; i++) {
        memcpy((char *)r->memory.ptr + window, kvt_source(&r->env, copies[i].local), copies[i].bytes);
        copies[i].local = KVT_STAGING + window;
        window += copies[i].bytes;
    }
    hold(&c->late, h, clock_ms() + ms);
    mem_free(copies);
    count(r, FAULT_LATE);
}

/* Do to the put what befell it; its copies are r->copies. */
static enum status put_with(struct fault_conn *c, struct fault_slot *s, struct kvt_put *p, struct fate f)
{
    struct fault_row *r = c->row;
    struct fault_held h = { .what = HELD_PUT, .put = *p };
    struct fault_slot *again;
    switch (f.kind) {
    case FAULT_DROP: end_slot(s, 0); break;
    case FAULT_DELAY: hold_out(c, &h, f.ms, false); break;
    case FAULT_REORDER: hold_out(c, &h, FAULT_REORDER_MS, true); return OK; /* counted when something overtakes it */
    case FAULT_LATE:
        prepare_late(c, &(struct kvt_put){ .head = p->head, .copies = p->copies, .n_copies = p->n_copies, .tag = s->tag }, f.ms);
        return pass_on(c, &h, true);
    case FAULT_DUPLICATE:
        again = take_slot(c, s->tag, true);
        TRY(pass_on(c, &h, true));
        if (!again) return OK;
        h.put.tag = number_of(r, again);
        count(r, f.kind);
        return pass_on(c, &h, true);
    case FAULT_TRUNCATE:
        if (p->head.bytes < 2) return pass_on(c, &h, true);
        count(r, f.kind);
        h.put.n_copies = cut(r->copies, p->n_copies, 1 + draw(r) % (p->head.bytes - 1));
        for (uint32_t i = 0; places(r) && i < h.put.n_copies; i++) h.put.head.bytes = (i ? h.put.head.bytes : 0) + r->copies[i].bytes;
        return pass_on(c, &h, true);
    case FAULT_FLIP:
        h.put.n_copies = flip_bit(r, s, r->copies, p->n_copies, p->head.bytes);
        count(r, f.kind);
        return pass_on(c, &h, true);
    case FAULT_STALE:
        h.put.head.generation--;
        count(r, f.kind);
        return pass_on(c, &h, true);
    default: return pass_on(c, &h, false);
    }
    count(r, f.kind);
    return OK;
}

static enum status doom(struct fault_conn *c)
{
    count(c->row, FAULT_DISCONNECT);
    c->doomed = true;
    arm(c->row);
    return ERR_PEER_LOST;
}

static enum status fault_put(struct kvt_conn *base, const struct kvt_put *p)
{
    struct fault_conn *c = conn_of(base);
    struct fault_row *r = c->row;
    if (c->gone || c->doomed || c->silent) return ERR_PEER_LOST;
    if (c->n_out >= FAULT_HELD_MAX) return ERR_BUSY;
    struct fault_slot *s = take_slot(c, p->tag, false);
    if (!s) return ERR_BUSY;
    uint64_t random = r->random;
    uint32_t passed = r->passed[FAULT_AT_PUT];
    struct fate f = befall(r, FAULT_AT_PUT, true);
    if (f.kind == FAULT_DISCONNECT) {
        s->c = NULL;
        return doom(c);
    }
    struct kvt_put mine = *p;
    memcpy(r->copies, p->copies, p->n_copies * sizeof *r->copies);
    for (uint32_t i = 0; i < p->n_copies; i++) /* the inner row reads staging through our image of it */
        if (p->copies[i].local >= KVT_STAGING)
            memcpy((char *)r->memory.ptr + (p->copies[i].local - KVT_STAGING), kvt_source(r->outer, p->copies[i].local), p->copies[i].bytes);
    mine.copies = r->copies;
    mine.tag = number_of(r, s);
    enum status st = put_with(c, s, &mine, f);
    if (st != OK) s->c = NULL;
    if (st == ERR_BUSY) { /* it will be offered again: it has not passed yet */
        r->random = random;
        r->passed[FAULT_AT_PUT] = passed;
    }
    arm(r);
    return st;
}

static enum status notify_with(struct fault_conn *c, struct fault_held *h, struct fate f)
{
    switch (f.kind) {
    case FAULT_DROP: break;
    case FAULT_DELAY: hold_out(c, h, f.ms, false); break;
    case FAULT_REORDER: hold_out(c, h, FAULT_REORDER_MS, true); return OK;
    case FAULT_DUPLICATE:
        count(c->row, f.kind);
        TRY(pass_on(c, h, true));
        return pass_on(c, h, true);
    case FAULT_FLIP:
    case FAULT_STALE:
        damage_message(c->row, &h->message, f.kind);
        count(c->row, f.kind);
        return pass_on(c, h, true);
    default: return pass_on(c, h, false);
    }
    count(c->row, f.kind);
    return OK;
}

static enum status fault_notify(struct kvt_conn *base, const struct kvt_message *m)
{
    struct fault_conn *c = conn_of(base);
    struct fault_row *r = c->row;
    enum kvt_fault_step step = step_of(m->kind);
    if (c->gone || c->doomed || c->silent) return ERR_PEER_LOST;
    if (m->kind == KVT_MSG_NOTE && c->n_out >= FAULT_HELD_MAX) return ERR_BUSY;
    uint64_t random = r->random;
    uint32_t passed = r->passed[step];
    struct fate f = befall(r, step, true);
    if (f.kind == FAULT_DISCONNECT) return doom(c);
    struct fault_held h = { .what = HELD_MESSAGE, .message = *m };
    enum status st = notify_with(c, &h, f);
    if (st == ERR_BUSY) {
        r->random = random;
        r->passed[step] = passed;
    }
    arm(r);
    return st;
}

/* ---- in ---- */

static struct fault_conn *new_conn(struct fault_row *r, struct kvt_conn *inner)
{
    struct fault_conn *c = MEM_NEW(struct fault_conn);
    c->base = (struct kvt_conn){ .t = &r->base, .incoming = inner->incoming };
    c->row = r;
    c->inner = inner;
    inner->peer = c;
    list_init(&c->link);
    list_init(&c->out);
    list_init(&c->in);
    list_init(&c->late);
    list_push(&r->conns, &c->link);
    return c;
}

static void free_slots(struct fault_conn *c)
{
    for (uint32_t i = 0; i < SLOTS; i++)
        if (c->row->slots[i].c == c) c->row->slots[i].c = NULL;
}

static void free_conn(struct fault_conn *c)
{
    free_slots(c);
    free_list(&c->out);
    free_list(&c->in);
    free_list(&c->late);
    list_remove(&c->link);
    mem_free(c);
}

/* Behind what waits already, or before it when that is to be overtaken. */
static void hold_in(struct fault_conn *c, struct fault_held h, uint32_t ms)
{
    struct fault_held *last = list_empty(&c->in) ? NULL : LIST_ENTRY(c->in.prev, struct fault_held, link);
    hold(&c->in, h, ms ? clock_ms() + ms : 0);
    c->n_in++;
    if (!last || !last->overtaken || h.what != HELD_MESSAGE) return;
    count(c->row, FAULT_REORDER);
    last->overtaken = false;
    last->due_ms = 0;
    list_remove(&last->link);
    list_push(&c->in, &last->link);
}

static void on_message(struct fault_conn *c, const struct kvt_message *m)
{
    struct fault_row *r = c->row;
    struct fault_held h = { .what = HELD_MESSAGE, .message = *m };
    struct fate f = befall(r, step_of(m->kind), false);
    switch (f.kind) {
    case FAULT_DISCONNECT: (void)doom(c); return;
    case FAULT_REORDER:
        h.overtaken = true;
        hold_in(c, h, FAULT_REORDER_MS); /* counted when something overtakes it */
        return;
    case FAULT_DROP: break;
    case FAULT_DUPLICATE: hold_in(c, h, 0); hold_in(c, h, 0); break;
    default:
        damage_message(r, &h.message, f.kind);
        hold_in(c, h, f.kind == FAULT_DELAY ? f.ms : 0);
    }
    if (f.kind != FAULT_NOTHING) count(r, f.kind);
}

static void on_put_done(struct fault_row *r, uint64_t tag)
{
    struct fault_slot *s = &r->slots[tag % SLOTS];
    if (!s->c) return;
    if (s->silent) {
        s->c = NULL;
        return;
    }
    struct fate f = befall(r, FAULT_AT_PUT_DONE, false);
    if (f.kind != FAULT_NOTHING && f.kind != FAULT_DISCONNECT) count(r, f.kind);
    if (f.kind == FAULT_DROP) s->c = NULL;
    else if (f.kind == FAULT_DISCONNECT) (void)doom(s->c);
    else end_slot(s, f.kind == FAULT_DELAY ? clock_ms() + f.ms : 0);
}

struct incidents {
    struct kvt_incident *v;
    size_t               n, cap;
};

static struct kvt_incident *add(struct incidents *in, enum kvt_incident_kind kind, struct fault_conn *c)
{
    struct kvt_incident *i = &in->v[in->n++];
    *i = (struct kvt_incident){ .kind = kind, .conn = &c->base };
    return i;
}

/* One incident of the inner row, in place of which one may go out at once (UP). */
static void take(struct fault_row *r, const struct kvt_incident *i, struct incidents *out)
{
    struct fault_conn *c = i->conn->peer ? i->conn->peer : new_conn(r, i->conn);
    if (c->silent) return;
    switch (i->kind) {
    case KVT_UP:
        if (befall(r, FAULT_AT_UP, false).kind == FAULT_DISCONNECT) (void)doom(c);
        add(out, KVT_UP, c);
        break;
    case KVT_DOWN:
        c->gone = true;
        hold_in(c, (struct fault_held){ .what = HELD_DOWN, .down = *i }, 0);
        break;
    case KVT_MESSAGE: on_message(c, &i->message); break;
    case KVT_PUT_DONE: on_put_done(r, i->tag); break;
    }
}

/* The connection ends for the session layer, which will disconnect it. */
static void tell_down(struct incidents *out, struct fault_conn *c, const struct kvt_incident *why)
{
    struct kvt_incident *i = add(out, KVT_DOWN, c);
    c->silent = true;
    i->status = why ? why->status : ERR_PEER_LOST;
    if (why) memcpy(i->text, why->text, sizeof i->text);
    else snprintf(i->text, sizeof i->text, "%s: disconnected by the fault plan", c->row->ops.name);
    free_slots(c);
    free_list(&c->in);
    free_list(&c->late);
}

/* What waited on its way in and is due. A DOWN is behind the messages that came before it. */
static void deliver(struct incidents *out, struct fault_conn *c, uint64_t now)
{
    while (!list_empty(&c->in) && !c->silent && out->n < out->cap) {
        struct fault_held *h = LIST_FIRST(&c->in, struct fault_held, link);
        if (h->due_ms > now && c->n_in < FAULT_HELD_MAX) return;
        c->n_in--;
        if (h->what == HELD_DOWN) {
            struct kvt_incident why = h->down;
            tell_down(out, c, &why);
            return;
        }
        add(out, KVT_MESSAGE, c)->message = h->message;
        free_held(h);
    }
}

/* All that may be told now: completions before the answers of the peer that came after them. */
static void tell(struct fault_row *r, struct incidents *out, uint64_t now)
{
    for (uint32_t i = 0; i < SLOTS && out->n < out->cap; i++) {
        struct fault_slot *s = &r->slots[i];
        if (!s->c || !s->over || s->due_ms > now) continue;
        add(out, KVT_PUT_DONE, s->c)->tag = s->tag;
        s->c = NULL;
    }
    LIST_FOREACH(c, &r->conns, struct fault_conn, link) {
        if (c->doomed && !c->silent && out->n < out->cap) tell_down(out, c, NULL);
        deliver(out, c, now);
    }
}

/* The inner row is polled only when everything it told before and that is due has gone out: bytes that it places follow messages that
 * the session has seen. */
static size_t fault_poll(struct kvt_transport *t, struct kvt_incident *v, size_t cap)
{
    struct fault_row *r = row_of(t);
    struct kvt_incident inner[16];
    struct incidents out = { v, 0, cap };
    uint64_t now = clock_ms(), ticks;
    if (read(r->timer_fd, &ticks, sizeof ticks) < 0 && errno != EAGAIN) log_warn("kv fault timer", "errno=%d", errno);
    LIST_FOREACH(c, &r->conns, struct fault_conn, link) flush_out(c, now);
    tell(r, &out, now);
    size_t room = cap - out.n < COUNT_OF(inner) ? cap - out.n : COUNT_OF(inner);
    size_t n = room ? r->inner_ops->poll(r->inner, inner, room) : 0;
    for (size_t i = 0; i < n; i++) take(r, &inner[i], &out);
    if (n) tell(r, &out, now);
    arm(r);
    return out.n;
}

/* ---- the inner row's questions ---- */

static enum status admit(void *arg, const uint8_t ticket[KVT_TICKET_BYTES])
{
    struct fault_row *r = arg;
    return r->outer->admit(r->outer->arg, ticket);
}

static int place(void *arg, struct kvt_conn *inner, const struct kvt_message *head, uint64_t offset, struct iovec *iov, int cap)
{
    struct fault_row *r = arg;
    struct fault_conn *c = inner->peer;
    if (!c || c->silent || c->doomed) return 0;
    return r->outer->place(r->outer->arg, &c->base, head, offset, iov, cap);
}

static void placed(void *arg, struct kvt_conn *inner, const struct kvt_message *head, uint64_t bytes)
{
    struct fault_row *r = arg;
    struct fault_conn *c = inner->peer;
    if (!c || c->silent || c->doomed) return;
    if (bytes == head->bytes && befall(r, FAULT_AT_PUT, false).kind == FAULT_DISCONNECT) (void)doom(c);
    else r->outer->placed(r->outer->arg, &c->base, head, bytes);
}

/* ---- the other slots ---- */

static int fault_wait_fd(struct kvt_transport *t) { return row_of(t)->epoll_fd; }
static uint16_t fault_port(struct kvt_transport *t) { return row_of(t)->inner_ops->port(row_of(t)->inner); }
static enum status fault_flush(struct kvt_transport *t) { return row_of(t)->inner_ops->flush(row_of(t)->inner); }
static bool fault_can_reach(struct kvt_transport *t, struct str address) { return row_of(t)->inner_ops->can_reach(row_of(t)->inner, address); }

static void fault_export_address(const struct kvt_transport *t, struct buf *out)
{
    const struct fault_row *r = (const struct fault_row *)t;
    r->inner_ops->export_address(r->inner, out);
}

static uint64_t fault_link_speed(const struct kvt_conn *base)
{
    const struct fault_conn *c = (const struct fault_conn *)base;
    return c->row->inner_ops->link_speed(c->inner);
}

static enum status fault_connect(struct kvt_transport *t, struct str address, const struct kv_layout *theirs,
                                 const uint8_t ticket[KVT_TICKET_BYTES], struct kvt_conn **out, struct err *err)
{
    struct fault_row *r = row_of(t);
    struct kvt_conn *inner = NULL;
    if (befall(r, FAULT_AT_CONNECT, false).kind == FAULT_DISCONNECT) {
        count(r, FAULT_DISCONNECT);
        return err_set(err, ERR_PEER_LOST, "%s: not connected, as the fault plan says", r->ops.name);
    }
    TRY(r->inner_ops->connect(r->inner, address, theirs, ticket, &inner, err));
    *out = &new_conn(r, inner)->base;
    return OK;
}

static void fault_abandon(struct kvt_conn *base, uint32_t session, uint64_t generation)
{
    struct fault_conn *c = conn_of(base);
    if (!c->gone) c->row->inner_ops->abandon(c->inner, session, generation);
}

static enum status fault_fence(struct kvt_conn *base)
{
    struct fault_conn *c = conn_of(base);
    struct fate f = befall(c->row, FAULT_AT_FENCE, false);
    c->silent = true;
    if (f.kind == FAULT_DELAY) {
        count(c->row, f.kind);
        c->fence_ms = clock_ms() + f.ms;
    }
    enum status st = c->row->inner_ops->fence(c->inner);
    return clock_ms() < c->fence_ms ? ERR_BUSY : st;
}

static void fault_disconnect(struct kvt_conn *base)
{
    struct fault_conn *c = conn_of(base);
    struct fault_row *r = c->row;
    (void)befall(r, FAULT_AT_DISCONNECT, false);
    c->inner->peer = NULL;
    r->inner_ops->disconnect(c->inner);
    free_conn(c);
}

static void fault_close(struct kvt_transport *t)
{
    struct fault_row *r = row_of(t);
    LIST_FOREACH(c, &r->conns, struct fault_conn, link) fault_disconnect(&c->base);
    if (r->inner) r->inner_ops->close(r->inner);
    if (r->epoll_fd >= 0) close(r->epoll_fd);
    if (r->timer_fd >= 0) close(r->timer_fd);
    mem_free(r->memory.ptr);
    mem_free(r->copies);
    mem_free(r);
}

/* ---- opening ---- */

static const struct kvt_transport_ops SLOT_TABLE = {
    .close = fault_close, .wait_fd = fault_wait_fd, .port = fault_port, .export_address = fault_export_address, .can_reach = fault_can_reach,
    .connect = fault_connect, .put = fault_put, .abandon = fault_abandon, .notify = fault_notify, .flush = fault_flush,
    .fence = fault_fence, .poll = fault_poll, .link_speed = fault_link_speed, .disconnect = fault_disconnect,
};

static void register_counters(struct fault_row *r, struct metrics *m)
{
    struct buf labels = { 0 };
    for (int k = 0; m && k < FAULT_KINDS; k++) {
        buf_clear(&labels);
        buf_printf(&labels, "transport=\"%s\",kind=\"%s\"", r->ops.name, kvt_fault_kind_names[k]);
        r->injected[k] = metrics_counter(m, "baton_kv_fault_injected_total", labels.data, "Faults injected into KV transfers by the fault plan.");
    }
    buf_release(&labels);
}

/* Sources of our own: an image of the staging memory, then the windows. */
static void make_memory(struct fault_row *r)
{
    enum { PAGE = 4096 };
    size_t staging = r->outer->staging ? r->outer->staging->bytes : 0;
    staging = (staging + PAGE - 1) / PAGE * PAGE;
    r->memory = (struct dev_mem){ .bytes = staging + (size_t)SLOTS * WINDOW, .fd = -1 };
    r->memory.ptr = mem_aligned(PAGE, r->memory.bytes);
    r->copies = MEM_ARRAY(struct kvt_copy, r->outer->max_copies + EXTRA_COPIES);
}

static enum status open_inner(struct fault_row *r, struct err *err)
{
    r->env = *r->outer;
    r->env.staging = &r->memory;
    r->env.max_copies += EXTRA_COPIES;
    r->env.arg = r;
    r->env.admit = admit;
    r->env.place = place;
    r->env.placed = placed;
    TRY(r->inner_ops->open(&r->env, &r->inner, err));
    r->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    r->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    struct epoll_event e = { .events = EPOLLIN };
    if (r->epoll_fd < 0 || r->timer_fd < 0 || epoll_ctl(r->epoll_fd, EPOLL_CTL_ADD, r->timer_fd, &e) != 0 ||
        epoll_ctl(r->epoll_fd, EPOLL_CTL_ADD, r->inner_ops->wait_fd(r->inner), &e) != 0)
        return err_set(err, ERR_INTERNAL, "no event descriptors for the fault plan: %s", strerror(errno));
    return OK;
}

enum status kvt_fault_open(const struct kvt_transport_ops *inner, const struct kvt_env *env, const char *text, struct metrics *m,
                           struct kvt_transport **out, struct err *err)
{
    struct kvt_fault_plan plan;
    TRY(kvt_fault_parse(str_of(text), &plan, err));
    struct fault_row *r = MEM_NEW(struct fault_row);
    r->ops = SLOT_TABLE;
    r->ops.name = inner->name;
    r->ops.caps = inner->caps;
    r->base.ops = &r->ops;
    r->inner_ops = inner;
    r->outer = env;
    r->plan = plan;
    r->random = plan.seed;
    r->epoll_fd = r->timer_fd = -1;
    list_init(&r->conns);
    make_memory(r);
    enum status st = open_inner(r, err);
    if (st != OK) {
        fault_close(&r->base);
        return st;
    }
    register_counters(r, m);
    struct buf said = { 0 };
    kvt_fault_write(&plan, &said);
    log_warn("KV FAULTS ARE BEING INJECTED ON PURPOSE", "transport=%s plan=\"%s\"", inner->name, said.data);
    buf_release(&said);
    *out = &r->base;
    return OK;
}
