/* promises.c - see promises.h. */
#include "scheduler/admission/promises.h"

enum {
    MS = 1000,
    LOOK_AHEAD_MS_MAX = 120 * MS, /* of promises_n_kept: seconds that it adds up */
    KEPT_MEMORY = 32              /* promises over which `kept` is a mean, about */
};

static uint16_t *slot(struct promises *p, uint64_t second)
{
    return &p->slots[second % PROMISE_SLOTS];
}

static void note_kept(struct promises *p, double one) { p->kept += (one - p->kept) / KEPT_MEMORY; }

/* Empties the slots of lapsed promises. */
static void sweep(struct promises *p, uint64_t now_ms)
{
    uint64_t now_s = now_ms / MS,
             open_s = now_s > PROMISE_GRACE_MS / MS ? now_s - PROMISE_GRACE_MS / MS : 0;
    if (open_s > p->swept_s + PROMISE_SLOTS) p->swept_s = open_s - PROMISE_SLOTS;
    for (; p->swept_s < open_s; p->swept_s++) {
        for (uint16_t n = *slot(p, p->swept_s); n; n--) note_kept(p, 0);
        *slot(p, p->swept_s) = 0;
    }
}

void promises_init(struct promises *p) { *p = (struct promises){ .kept = 1 }; }

static bool add(struct promises *p, uint64_t now_ms, uint64_t due_ms)
{
    sweep(p, now_ms);
    if (due_ms > now_ms + (uint64_t)PROMISE_MAX_S * MS) return false;
    uint16_t *n = slot(p, due_ms / MS);
    if (*n == UINT16_MAX) return false;
    (*n)++;
    return true;
}

/* The next time after *last. */
static uint64_t make(struct promises *p, double *last, uint64_t now_ms, uint64_t earliest_ms,
                     double interval_ms)
{
    double due = (*last > (double)earliest_ms ? *last : (double)earliest_ms) + interval_ms;
    if (due > (double)now_ms + (double)PROMISE_MAX_S * MS || !add(p, now_ms, (uint64_t)due))
        return 0;
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
    (*slot(p, second))--;
    note_kept(p, 1);
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
    for (uint64_t s = p->swept_s; s <= now_ms / MS; s++)
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
