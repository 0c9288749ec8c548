/* admit_meter.c - what the directory is told of the tenants, and what it tells (directory/meter.h).
 *
 * One report at a time. It has the tenants of which something changed or runs, and those with
 * limits of which requests come, since other entry nodes may have admitted some. One that is not
 * answered is sent again, with the same number and the same use. */
#include "scheduler/admission/admit_state.h"

enum {
    SOON_MS = 20,   /* between reports, when a tenant with limits has used them, ... */
    ASK_MS = 100,   /* ... when requests of one came in the last ASKED_MS, ... */
    USUAL_MS = 250, /* ... when other tenants used anything, ... */
    KEEP_MS = 1000, /* ... and when nothing changed but something runs: METER_LEASE_MS */
    ASKED_MS = 3000,
    AWAY_MS = 500 /* before the next try, when the directory is away */
};

static bool has_limits(const struct admit_tenant *t)
{
    return t->t->requests_per_minute || t->t->tokens_per_minute || t->t->concurrent;
}

static bool is_changed(const struct admit_tenant *t)
{
    return t->untold.requests || t->untold.tokens || t->untold.cost ||
           t->n_running != t->told_running || admit_n_not_running(t) != t->told_waiting;
}

static bool asks(const struct admit_tenant *t, uint64_t now_ms)
{
    return has_limits(t) && t->t_asked_ms && now_ms < t->t_asked_ms + ASKED_MS;
}

bool admit_has_report(const struct admit *a, uint64_t now_ms)
{
    uint64_t since = now_ms - a->t_report_ms;
    bool changed = false, soon = false, keeps = false, asked = false;
    if (a->directory_away) return since >= AWAY_MS;
    if (since < SOON_MS) return false;
    for (uint32_t i = 0; i < a->n; i++) {
        const struct admit_tenant *t = &a->tenants[i];
        changed |= is_changed(t);
        soon |= has_limits(t) && is_changed(t);
        keeps |= t->n_running || admit_n_not_running(t);
        asked |= asks(t, now_ms);
    }
    return soon || (asked && since >= ASK_MS) || (changed && since >= USUAL_MS) ||
           (keeps && since >= KEEP_MS);
}

static bool is_told(const struct admit_tenant *t, uint64_t now_ms)
{
    const struct admit_untold *w = &t->telling;
    return is_changed(t) || asks(t, now_ms) || t->n_running || admit_n_not_running(t) ||
           w->requests || w->tokens || w->cost;
}

uint32_t admit_report(struct admit *a, uint64_t now_ms, struct meter_use out[METER_TENANTS_MAX],
                      uint64_t *number)
{
    uint32_t n = 0;
    bool again = a->telling;
    if (!again) a->report_number++;
    a->telling = true;
    a->t_report_ms = now_ms;
    *number = a->report_number;
    for (uint32_t i = 0; i < a->n; i++) {
        struct admit_tenant *t = &a->tenants[i];
        if (!is_told(t, now_ms)) continue;
        if (!again) {
            t->telling = t->untold;
            t->untold = (struct admit_untold){ 0 };
        }
        t->told_running = t->n_running;
        t->told_waiting = admit_n_not_running(t);
        out[n++] = (struct meter_use){ .tenant = t->t->id,
                                       .requests = t->telling.requests,
                                       .tokens = t->telling.tokens,
                                       .cost = t->telling.cost,
                                       .n_running = t->n_running,
                                       .n_waiting = admit_n_not_running(t) };
    }
    return n;
}

static struct admit_tenant *find(const struct admit *a, uint64_t id)
{
    for (uint32_t i = 0; i < a->n; i++)
        if (a->tenants[i].t->id == id) return &a->tenants[i];
    return NULL;
}

/* What others were served counts here as well. A tenant that was lifted there need not be lifted
 * twice. */
static void take_sum(struct admit_tenant *t, const struct meter_sum *sum, uint64_t now_ms)
{
    uint64_t now = sum->served + t->untold.cost;
    if (now > t->served) {
        uint64_t gained = now - t->served;
        t->lift = t->lift > gained ? t->lift - gained : 0;
    }
    t->served = now;
    t->sum = *sum;
    t->t_heard_ms = now_ms;
}

/* The directory lost its counters, or lowered them: what is known here is of another scale. */
static bool is_lower(const struct admit *a, const struct meter_sums *sums)
{
    for (uint32_t i = 0; i < sums->n_sums; i++) {
        const struct admit_tenant *t = find(a, sums->sums[i].tenant);
        if (t && sums->sums[i].served + t->untold.cost < t->served) return true;
    }
    return false;
}

/* Whoever is not in this answer is lifted to `least` when it comes, there and here. */
static void begin_anew(struct admit *a, uint64_t least)
{
    for (uint32_t i = 0; i < a->n; i++) {
        a->tenants[i].served = a->tenants[i].untold.cost;
        a->tenants[i].lift = 0;
    }
    for (size_t i = 0; i < TENANT_N_CLASSES; i++) a->virtual_time[i] = least;
}

void admit_on_sums(struct admit *a, enum status st, const struct meter_sums *sums, uint64_t now_ms)
{
    a->directory_away = st != OK;
    if (st != OK) return;
    a->telling = false;
    a->n_entries = sums->n_entries;
    if (is_lower(a, sums)) begin_anew(a, sums->least);
    for (uint32_t i = 0; i < sums->n_sums; i++) {
        struct admit_tenant *t = find(a, sums->sums[i].tenant);
        if (t) take_sum(t, &sums->sums[i], now_ms);
    }
    for (uint32_t i = 0; i < a->n; i++) a->tenants[i].telling = (struct admit_untold){ 0 };
}

uint32_t admit_n_entries(const struct admit *a) { return a->n_entries ? a->n_entries : 1; }
