/* breaker.c - see breaker.h. */
#include "scheduler/breaker.h"

#include <stdio.h>

#include "shared/base/assert.h"

/* What a transition does besides the change of state. */
enum effect {
    STAYS, /* nothing at all */
    COUNT, /* one failure more; BREAKER_FAILURES of them are as if it were broken */
    PAUSE, /* begins a pause, each twice as long as the one before */
    PROBE, /* the request becomes the probe, if the pause is over; else it changes nothing */
    DUE,   /* the pause is over: the next request probes */
    FORGET /* its failures, and the entry with them */
};

struct transition {
    enum breaker_state to;
    enum effect effect;
};

#define C BREAKER_CLOSED
#define O BREAKER_OPEN
#define H BREAKER_HALF_OPEN

/* clang-format off */
static const struct transition TRANSITIONS[BREAKER_N_STATES][BREAKER_N_EVENTS] = {
    /*         failed        broken        worked         taken         given up */
    [C] = { { C, COUNT }, { O, PAUSE }, { C, FORGET }, { C, STAYS }, { C, STAYS } },
    /* One trouble fails all requests that wait for it: those after the first say nothing new. One
     * of them that works after all shows that the trouble is over. */
    [O] = { { O, STAYS }, { O, STAYS }, { C, FORGET }, { H, PROBE }, { O, STAYS } },
    /* Taken: by a request that has no other node; the probe stays the one that began first. */
    [H] = { { O, PAUSE }, { O, PAUSE }, { C, FORGET }, { H, STAYS }, { O, DUE } },
};
/* clang-format on */

#undef C
#undef O
#undef H

const char *breaker_state_name(enum breaker_state s)
{
    static const char *const names[BREAKER_N_STATES] = { "closed", "open", "half_open" };
    ASSERT(s < BREAKER_N_STATES);
    return names[s];
}

const char *breaker_scope_name(enum breaker_scope s)
{
    static const char *const names[BREAKER_N_SCOPES] = { "node", "pair" };
    ASSERT(s < BREAKER_N_SCOPES);
    return names[s];
}

enum breaker_scope breaker_scope_of(struct breaker_of of)
{
    return of.partner ? BREAKER_OF_PAIR : BREAKER_OF_NODE;
}

enum breaker_event breaker_event_of(enum status st)
{
    bool broken = st == ERR_PEER_LOST || st == ERR_PEER_REFUSED || st == ERR_PEER_MISMATCH ||
                  st == ERR_TIMEOUT || status_class_of(st) == CLASS_FATAL;
    return broken ? BREAKER_BROKEN : BREAKER_FAILED;
}

/* ---- entries ---- */

static struct breaker_entry *find(struct breaker *b, struct breaker_of of)
{
    for (size_t i = 0; i < b->n; i++)
        if (b->entries[i].of.node == of.node && b->entries[i].of.partner == of.partner)
            return &b->entries[i];
    return NULL;
}

const struct breaker_entry *breaker_find(const struct breaker *b, struct breaker_of of)
{
    return find((struct breaker *)b, of);
}

static void drop(struct breaker *b, struct breaker_entry *e) { *e = b->entries[--b->n]; }

/* The one that is given up first; NULL: every probe is running. */
static struct breaker_entry *find_least(struct breaker *b)
{
    struct breaker_entry *least = NULL;
    for (size_t i = 0; i < b->n; i++) {
        struct breaker_entry *e = &b->entries[i];
        if (e->state == BREAKER_CLOSED) return e;
        if (e->state == BREAKER_OPEN && (!least || e->until_ms < least->until_ms)) least = e;
    }
    return least;
}

static struct breaker_entry *add(struct breaker *b, struct breaker_of of)
{
    if (b->n == BREAKER_MAX) {
        struct breaker_entry *least = find_least(b);
        if (!least) return NULL;
        drop(b, least);
    }
    struct breaker_entry *e = &b->entries[b->n++];
    *e = (struct breaker_entry){ .of = of };
    return e;
}

bool breaker_is_gone(uint64_t *since_ms, bool there, uint64_t now_ms)
{
    if (there) *since_ms = 0;
    else if (!*since_ms) *since_ms = now_ms;
    return !there && now_ms - *since_ms >= BREAKER_GONE_MS;
}

void breaker_forget(struct breaker *b, bool (*is_there)(void *arg, uint64_t node), void *arg,
                    uint64_t now_ms)
{
    for (size_t i = 0; i < b->n;) {
        struct breaker_entry *e = &b->entries[i];
        const bool there = is_there(arg, e->of.node) &&
                           (!e->of.partner || is_there(arg, e->of.partner));
        if (breaker_is_gone(&e->gone_ms, there, now_ms)) drop(b, e);
        else i++;
    }
}

/* ---- transitions ---- */

static uint64_t pause_of(uint32_t n_pauses)
{
    uint64_t ms = BREAKER_PAUSE_MS;
    for (uint32_t i = 0; i < n_pauses && ms < BREAKER_PAUSE_MAX_MS; i++) ms *= 2;
    return ms < BREAKER_PAUSE_MAX_MS ? ms : BREAKER_PAUSE_MAX_MS;
}

/* Does it say nothing new: while a probe is running, the failure or the end of another
 * request? */
static bool is_of_others(const struct breaker_entry *e, enum breaker_event ev, uint64_t request)
{
    bool ends = ev == BREAKER_FAILED || ev == BREAKER_BROKEN || ev == BREAKER_GIVEN_UP;
    return e->state == BREAKER_HALF_OPEN && ends && request && request != e->prober;
}

static void change(struct breaker *b, struct breaker_entry *e, struct transition t,
                   uint64_t request, uint64_t now_ms)
{
    enum breaker_state before = e->state;
    e->state = t.to;
    switch (t.effect) {
    case PAUSE:
        e->until_ms = now_ms + pause_of(e->n_pauses++);
        e->n_failures = 0;
        break;
    case PROBE: e->prober = request; break;
    case DUE: e->until_ms = now_ms; break;
    case STAYS:
    case COUNT:
    case FORGET: break;
    }
    if (e->state != before && b->on_change) b->on_change(b->arg, e);
    if (t.effect == FORGET) drop(b, e);
}

void breaker_note(struct breaker *b, struct breaker_of of, enum breaker_event ev, uint64_t request,
                  uint64_t now_ms, const char *why)
{
    struct breaker_entry *e = find(b, of);
    bool fails = ev == BREAKER_FAILED || ev == BREAKER_BROKEN;
    if (!e && (!fails || !(e = add(b, of)))) return;
    if (is_of_others(e, ev, request)) return;
    struct transition t = TRANSITIONS[e->state][ev];
    if (t.effect == COUNT && ++e->n_failures >= BREAKER_FAILURES)
        t = TRANSITIONS[e->state][BREAKER_BROKEN];
    if (t.effect == PROBE && now_ms < e->until_ms) return;
    if (fails && (t.effect == PAUSE || t.effect == COUNT))
        snprintf(e->why, sizeof e->why, "%s", why ? why : "");
    change(b, e, t, request, now_ms);
}

bool breaker_allows(const struct breaker_entry *e, uint64_t now_ms)
{
    return !e || e->state == BREAKER_CLOSED || (e->state == BREAKER_OPEN && now_ms >= e->until_ms);
}

/* ---- the page ---- */

static void write_cell(const struct transition *t, struct buf *out)
{
    static const char *const effects[] = { [STAYS] = "",         [COUNT] = ", counted",
                                           [PAUSE] = ", pause",  [PROBE] = " if its pause is over",
                                           [DUE] = ", no pause", [FORGET] = "" };
    if (t->effect == STAYS) buf_add_c(out, " - |");
    else buf_printf(out, " %s%s |", breaker_state_name(t->to), effects[t->effect]);
}

void breaker_markdown(struct buf *out)
{
    buf_add_c(out, "| state | failed | broken | worked | taken | given up |\n"
                   "|---|---|---|---|---|---|\n");
    for (int s = 0; s < BREAKER_N_STATES; s++) {
        buf_printf(out, "| %s |", breaker_state_name((enum breaker_state)s));
        for (int ev = 0; ev < BREAKER_N_EVENTS; ev++) write_cell(&TRANSITIONS[s][ev], out);
        buf_add_c(out, "\n");
    }
}
