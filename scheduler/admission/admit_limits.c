/* admit_limits.c - what a tenant used of its limits: here, and by what the directory told last at
 * all entry nodes. */
#include "scheduler/admission/admit_state.h"

enum {
    MS = 1000,
    FRESH_MS = 3000 /* an older sum is of what was then */
};

void admit_count_usage(struct admit_tenant *t, uint64_t now_ms, uint32_t requests, uint64_t tokens)
{
    uint64_t second = now_ms / MS;
    size_t i = second % USAGE_SLOTS;
    if (t->usage.slots[i].second != second) {
        t->usage.slots[i].second = second;
        t->usage.slots[i].requests = 0;
        t->usage.slots[i].tokens = 0;
    }
    t->usage.slots[i].requests += requests;
    t->usage.slots[i].tokens += tokens;
}

static bool is_recent(const struct admit_usage *u, size_t i, uint64_t now_ms)
{
    return u->slots[i].second + USAGE_SLOTS > now_ms / MS && u->slots[i].second <= now_ms / MS;
}

static void sum_up(const struct admit_usage *u, uint64_t now_ms, uint64_t *requests,
                   uint64_t *tokens)
{
    *requests = *tokens = 0;
    for (size_t i = 0; i < USAGE_SLOTS; i++) {
        if (!is_recent(u, i, now_ms)) continue;
        *requests += u->slots[i].requests;
        *tokens += u->slots[i].tokens;
    }
}

static uint64_t share_of(uint64_t limit, uint32_t n_entries)
{
    return limit ? (limit + n_entries - 1) / n_entries : 0;
}

static void raise_to(uint64_t *v, uint64_t least)
{
    if (*v < least) *v = least;
}

/* Among how many entry nodes the limits are divided. Each node is one, so one that has not heard of
 * any takes as many as there are nodes. */
static uint32_t n_shares(const struct admit *a)
{
    if (!a->directory_away) return 1;
    return a->n_entries || !a->speed.n_nodes ? admit_n_entries(a) : a->speed.n_nodes;
}

void admit_budget(const struct admit *a, const struct admit_tenant *t, uint64_t now_ms,
                  struct admit_budget *out)
{
    const struct admit_untold *u = &t->untold, *w = &t->telling;
    uint32_t n_entries = n_shares(a);
    *out = (struct admit_budget){ .requests = share_of(t->t->requests_per_minute, n_entries),
                                  .tokens = share_of(t->t->tokens_per_minute, n_entries),
                                  .concurrent = share_of(t->t->concurrent, n_entries) };
    sum_up(&t->usage, now_ms, &out->used_requests, &out->used_tokens);
    out->n_concurrent = t->n_running + admit_n_not_running(t);
    if (a->directory_away || !t->t_heard_ms || now_ms > t->t_heard_ms + FRESH_MS) return;
    raise_to(&out->used_requests, (uint64_t)t->sum.requests + u->requests + w->requests);
    raise_to(&out->used_tokens, t->sum.tokens + u->tokens + w->tokens);
    /* Of the sum, what this entry node told of itself is known better here. */
    uint64_t told = (uint64_t)t->told_running + t->told_waiting,
             all = (uint64_t)t->sum.n_running + t->sum.n_waiting;
    out->n_concurrent += all > told ? all - told : 0;
}

/* By the seconds in which this entry node admitted: others are taken to have done the same. */
uint64_t admit_room_after_ms(const struct admit_tenant *t, uint64_t now_ms, bool tokens,
                             uint64_t used, uint64_t excess)
{
    uint64_t own[2], past = 0;
    sum_up(&t->usage, now_ms, &own[0], &own[1]);
    double scale = own[tokens] ? (double)used / (double)own[tokens] : 0;
    uint64_t now_s = now_ms / MS, first = now_s >= USAGE_SLOTS ? now_s - USAGE_SLOTS + 1 : 0;
    for (uint64_t s = first; s <= now_s && scale > 0; s++) {
        size_t i = s % USAGE_SLOTS;
        if (t->usage.slots[i].second != s) continue;
        past += tokens ? t->usage.slots[i].tokens : t->usage.slots[i].requests;
        /* The directory's seconds begin at other times. */
        if ((double)past * scale >= (double)excess) return (s + USAGE_SLOTS + 1) * MS - now_ms;
    }
    return METER_WINDOW_MS;
}

static uint32_t reset_s(const struct admit_tenant *t, uint64_t now_ms, bool tokens, uint64_t used)
{
    uint64_t ms = used ? admit_room_after_ms(t, now_ms, tokens, used, used) : 0;
    return (uint32_t)((ms + MS - 1) / MS);
}

static uint64_t left_of(uint64_t limit, uint64_t used) { return limit > used ? limit - used : 0; }

void admit_limits(struct admit *a, uint32_t tenant, uint64_t now_ms, struct gen_limits *out)
{
    const struct admit_tenant *t = &a->tenants[tenant];
    struct admit_budget b;
    *out = (struct gen_limits){ .requests = t->t->requests_per_minute,
                                .tokens = t->t->tokens_per_minute };
    if (!out->requests && !out->tokens) return;
    admit_budget(a, t, now_ms, &b);
    out->requests_left = left_of(b.requests, b.used_requests);
    out->tokens_left = left_of(b.tokens, b.used_tokens);
    out->requests_reset_s = reset_s(t, now_ms, false, b.used_requests);
    out->tokens_reset_s = reset_s(t, now_ms, true, b.used_tokens);
}
