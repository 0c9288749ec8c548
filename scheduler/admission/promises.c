/* promises.c - see promises.h. */
#include "scheduler/admission/promises.h"

#include <math.h>

enum {
    MS = 1000,
    LOOK_AHEAD_MS_MAX = 120 * MS, /* of promises_n_kept: seconds that it adds up */
    KEPT_MEMORY = 32,             /* promises over which `kept` is a mean, about; fewer at first */
    ROOM_FOR = 4                  /* times as many as come back: who comes finds a place, and a
                                   * line that is full once stays so */
};

static uint16_t *slot(struct promises *p, uint64_t second)
{
    return &p->slots[second % PROMISE_SLOTS];
}

/* kept: 1 or 0. */
static void close_one(struct promises *p, uint64_t second, double kept)
{
    if (p->n_closed < KEPT_MEMORY - 1) p->n_closed++;
    p->kept += (kept - p->kept) / (1 + p->n_closed); /* as if one more had been kept before */
    p->open_ms -= p->open_ms / p->n_open;
    p->n_open--;
    (*slot(p, second))--;
}

/* Empties the slots of lapsed promises. */
static void sweep(struct promises *p, uint64_t now_ms)
{
    uint64_t now_s = now_ms / MS,
             open_s = now_s > PROMISE_GRACE_MS / MS ? now_s - PROMISE_GRACE_MS / MS : 0;
    if (open_s > p->swept_s + PROMISE_SLOTS) p->swept_s = open_s - PROMISE_SLOTS;
    for (; p->swept_s < open_s; p->swept_s++)
        while (*slot(p, p->swept_s)) close_one(p, p->swept_s, 0);
}

void promises_init(struct promises *p) { *p = (struct promises){ .kept = 1 }; }

static bool add(struct promises *p, uint64_t now_ms, uint64_t due_ms)
{
    if (due_ms > now_ms + (uint64_t)PROMISE_MAX_S * MS) return false;
    uint16_t *n = slot(p, due_ms / MS);
    if (*n == UINT16_MAX) return false;
    (*n)++;
    p->n_open++;
    return true;
}

/* The next time after *last, which is of no matter when it is long ago. When few come back it is
 * sooner: times have less between them, and are no later than those take, with room to spare, who
 * may still come. */
static uint64_t make(struct promises *p, double *last, uint64_t now_ms, uint64_t earliest_ms,
                     double interval_ms)
{
    sweep(p, now_ms);
    double earliest = (double)earliest_ms, part = fmin(p->kept * ROOM_FOR, 1), due = *last;
    if (part < 1) due = fmin(due, earliest + p->open_ms * part);
    due = fmax(due + interval_ms * part, earliest);
    if (due > (double)now_ms + (double)PROMISE_MAX_S * MS || !add(p, now_ms, (uint64_t)due))
        return 0;
    p->open_ms += interval_ms;
    *last = due;
    return (uint64_t)due;
}

uint64_t promises_make(struct promises *p, uint64_t now_ms, uint64_t earliest_ms,
                       double interval_ms)
{
    return make(p, &p->until_ms, now_ms, earliest_ms, interval_ms);
}

uint64_t promises_make_again(struct promises *p, uint64_t now_ms, uint64_t earliest_ms,
                             double interval_ms)
{
    return make(p, &p->again_ms, now_ms, earliest_ms, interval_ms);
}

static bool use(struct promises *p, uint64_t second)
{
    if (*slot(p, second) == 0) return false;
    close_one(p, second, 1);
    return true;
}

bool promises_use(struct promises *p, uint64_t now_ms, uint64_t due_ms)
{
    sweep(p, now_ms);
    if (now_ms + PROMISE_EARLY_MS < due_ms || now_ms > due_ms + PROMISE_GRACE_MS) return false;
    return use(p, due_ms / MS);
}

bool promises_use_any(struct promises *p, uint64_t now_ms)
{
    sweep(p, now_ms);
    for (uint64_t s = p->swept_s; s <= (now_ms + PROMISE_EARLY_MS) / MS; s++)
        if (use(p, s)) return true;
    return false;
}

double promises_n_kept(struct promises *p, uint64_t now_ms, uint64_t ahead_ms)
{
    uint64_t n = 0;
    sweep(p, now_ms);
    if (ahead_ms > LOOK_AHEAD_MS_MAX) ahead_ms = LOOK_AHEAD_MS_MAX;
    for (uint64_t s = p->swept_s; s <= (now_ms + ahead_ms) / MS; s++) n += *slot(p, s);
    return (double)n * p->kept;
}
