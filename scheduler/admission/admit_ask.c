/* admit_ask.c - the verdict on a request that comes: its tenant's limits, then how long the line
 * takes, then whether the entry node has room.
 *
 * In overload more are refused than come for the first time, and each refusal names a time. So that
 * this is no lie, those who come back then (x-baton-retry) go before those who come for the first
 * time: these are taken only as far as the line has room beside what was promised; or while it is
 * so short, less than LOW of what a request may wait, that it might run dry. While the line's speed
 * is not known well (admit_sureness), its time counts the less. */
#include <math.h>
#include <stdio.h>

#include "scheduler/admission/admit_state.h"

enum {
    MS = 1000,
    LOW = 4,        /* a line below 1/LOW of the longest wait takes everybody */
    SPARE_PART = 8, /* LONGER leaves so small a part of the line to those that were not promised */
    SOON_MS = 1000, /* promises that count against a limit per minute */
    SHOWN_MS_MAX = 32
};

/* Waits are expected this much longer than computed, and promises this much slower: an
 * estimate that is right in the mean is wrong half of the time. */
static const double LONGER = 1.15;

struct asked {
    struct admit *a;
    struct admit_tenant *t;
    const struct admit_ask *q;
    uint64_t now_ms;
    bool returns; /* it was promised to be taken now */
    struct admit_verdict *out;
};

/* ---- refusals ---- */

/* When it is to come again: not before earliest_ms. */
struct promise {
    uint64_t earliest_ms;
    double interval_ms; /* between two such requests of its tenant */
    double again_ms;    /* likewise, between those whose promise was not kept */
};

static void write_retry(struct admit *a, const struct admit_tenant *t, uint64_t now_ms,
                        uint64_t due_ms, uint32_t *after_s, char retry[GEN_RETRY_MAX])
{
    *after_s = due_ms ? (uint32_t)((due_ms - now_ms + MS - 1) / MS) : PROMISE_MAX_S;
    if (*after_s == 0) *after_s = 1;
    if (due_ms) retry_text_write(&a->retry_secret, t->t->id, due_ms, a->n_retries++, retry);
}

static void promise(struct asked *k, struct promise p)
{
    struct gen_refusal *why = &k->out->why;
    uint64_t due;
    if (k->q->wanted.follows) { /* the request it belongs to waits here */
        why->retry_after_s = 1;
        return;
    }
    if (k->returns)
        due = promises_make_again(&k->t->promises, k->now_ms, p.earliest_ms, p.again_ms);
    else due = promises_make(&k->t->promises, k->now_ms, p.earliest_ms, p.interval_ms);
    write_retry(k->a, k->t, k->now_ms, due, &why->retry_after_s, why->retry);
}

/* What counts against a limit of its tenant. */
struct counted {
    uint64_t used, limit;
    uint64_t promised; /* of what is left, to those refused before, who come first; 0: there is
                        * nothing left in any case */
};

static bool refuse_limit(struct asked *k, enum admit_reason reason, struct promise p,
                         struct counted c)
{
    static const char *const whats[] = { [ADMIT_REQUESTS] = "requests in the last minute",
                                         [ADMIT_TOKENS] = "tokens in the last minute",
                                         [ADMIT_CONCURRENT] = "requests waiting or running" };
    char promised[128] = "";
    promise(k, p);
    k->out->reason = reason;
    if (c.promised)
        snprintf(promised, sizeof promised,
                 ", beside %llu kept for those that were told to come back now (x-baton-retry)",
                 (unsigned long long)c.promised);
    (void)err_set(&k->out->why.err, ERR_FULL,
                  "the limit of tenant %s is reached: %s is %llu, and it has %llu %s%s; try again "
                  "in %u s",
                  k->t->t->name, admit_reason_name(reason), (unsigned long long)c.limit,
                  (unsigned long long)c.used, whats[reason], promised, k->out->why.retry_after_s);
    return false;
}

/* ---- limits ---- */

/* Half of one is none: a tenant whose clients never say that they come back loses no place to
 * itself for long. */
static uint64_t n_promised(struct asked *k)
{
    if (k->returns) return 0;
    return (uint64_t)ceil(promises_n_kept(&k->t->promises, k->now_ms, SOON_MS) - 0.5);
}

static bool check_requests(struct asked *k, const struct admit_budget *b)
{
    if (!b->requests || k->q->wanted.follows) return true;
    const uint64_t promised = n_promised(k);
    if (b->used_requests + promised + 1 <= b->requests) return true;
    uint64_t excess = b->used_requests + 1 > b->requests ? b->used_requests + 1 - b->requests : 0;
    uint64_t after = excess ? admit_room_after_ms(k->t, k->now_ms, false, b->used_requests, excess)
                            : 0;
    double interval = (double)METER_WINDOW_MS / (double)b->requests;
    const struct promise p = { k->now_ms + after, interval, interval };
    return refuse_limit(
        k, ADMIT_REQUESTS, p,
        (struct counted){ b->used_requests, k->t->t->requests_per_minute, excess ? 0 : promised });
}

/* Of all its prompts: those that follow are taken then. One that comes back is here by itself,
 * since others of its API request may have been kept. */
static uint64_t tokens_asked(const struct asked *k)
{
    const struct admit_ask *q = k->q;
    if (q->comes_back) return q->n_prompt;
    if (q->wanted.follows) return 0;
    return q->wanted.all_prompts > q->n_prompt ? q->wanted.all_prompts : q->n_prompt;
}

static bool refuse_too_long(struct asked *k, uint64_t n)
{
    k->out->reason = ADMIT_TOKENS;
    (void)err_set(
        &k->out->why.err, ERR_TOO_LONG,
        "%s %llu tokens, but tenant %s may use %llu in a minute (tokens_per_minute)",
        n > k->q->n_prompt ? "the prompts of all choices have together" : "the prompt has",
        (unsigned long long)n, k->t->t->name, (unsigned long long)k->t->t->tokens_per_minute);
    return false;
}

static bool check_tokens(struct asked *k, const struct admit_budget *b)
{
    uint64_t n = tokens_asked(k), limit = k->t->t->tokens_per_minute;
    if (!b->tokens || !n) return true;
    if (n > limit) return refuse_too_long(k, n);
    const uint64_t promised = n_promised(k) * n;
    if (b->used_tokens == 0 || b->used_tokens + promised + n <= b->tokens) return true;
    uint64_t excess = b->used_tokens + n > b->tokens ? b->used_tokens + n - b->tokens : 0;
    if (excess > b->used_tokens) excess = b->used_tokens;
    uint64_t after = excess ? admit_room_after_ms(k->t, k->now_ms, true, b->used_tokens, excess)
                            : 0;
    double interval = (double)n * METER_WINDOW_MS / (double)b->tokens;
    const struct promise p = { k->now_ms + after, interval, interval };
    return refuse_limit(k, ADMIT_TOKENS, p,
                        (struct counted){ b->used_tokens, limit, excess ? 0 : promised });
}

static bool check_concurrent(struct asked *k, const struct admit_budget *b)
{
    if (!b->concurrent || b->n_concurrent < b->concurrent) return true;
    const double interval = k->t->end_interval_ms > 0 ? k->t->end_interval_ms : MS;
    const struct promise p = { k->now_ms + (uint64_t)interval, interval, interval };
    return refuse_limit(k, ADMIT_CONCURRENT, p,
                        (struct counted){ b->n_concurrent, k->t->t->concurrent, 0 });
}

static bool check_limits(struct asked *k)
{
    const struct tenant *t = k->t->t;
    struct admit_budget b;
    if (!t->requests_per_minute && !t->tokens_per_minute && !t->concurrent) return true;
    admit_budget(k->a, k->t, k->now_ms, &b);
    return check_requests(k, &b) && check_tokens(k, &b) && check_concurrent(k, &b);
}

/* ---- the line ---- */

/* How long it may wait in line, and what says so. */
static double longest_wait_ms(const struct asked *k, enum admit_reason *by)
{
    const struct admit_ask *q = k->q;
    double longest = k->a->o.max_queue_ms, start = admit_start_ms(k->a, q->n_prompt);
    *by = ADMIT_WAIT;
    if (q->wanted.ttft_ms && q->wanted.ttft_ms - start < longest) {
        longest = q->wanted.ttft_ms - start;
        *by = ADMIT_TTFT;
    }
    double left = q->deadline_ms > k->now_ms ? (double)(q->deadline_ms - k->now_ms) : 0;
    if (q->deadline_ms && left - start < longest) {
        longest = left - start;
        *by = ADMIT_DEADLINE;
    }
    return longest;
}

static const char *show_ms(double ms, char out[SHOWN_MS_MAX])
{
    if (ms < MS) snprintf(out, SHOWN_MS_MAX, "%.0f ms", ceil(ms));
    else snprintf(out, SHOWN_MS_MAX, "%.1f s", ms / MS);
    return out;
}

const char *admit_deadline_text(const struct gen_admission *w, const char **field,
                                char out[ADMIT_DEADLINE_MAX])
{
    static const char *const fields[] = { [GEN_DEADLINE_HEADER] = "x-baton-deadline-ms",
                                          [GEN_DEADLINE_GRPC] = "grpc-timeout",
                                          [GEN_DEADLINE_PARAMETER] = "timeout" };
    static const char *const texts[] = {
        [GEN_DEADLINE_HEADER] = "x-baton-deadline-ms is %u",
        [GEN_DEADLINE_GRPC] = "grpc-timeout left %u ms for this request",
        [GEN_DEADLINE_PARAMETER] = "parameter timeout is %u ms",
    };
    *field = fields[w->deadline_by];
    snprintf(out, ADMIT_DEADLINE_MAX, texts[w->deadline_by], w->deadline_ms);
    return out;
}

static void say_deadline(struct asked *k, const char *first)
{
    char text[ADMIT_DEADLINE_MAX];
    const char *field, *deadline = admit_deadline_text(&k->q->wanted, &field, text);
    (void)err_field(&k->out->why.err, ERR_BUSY, field,
                    "%s, but not even the first token would come before about %s; try again in "
                    "%u s",
                    deadline, first, k->out->why.retry_after_s);
}

static void say_wait(struct asked *k, enum admit_reason by, double wait_ms)
{
    struct gen_refusal *why = &k->out->why;
    char text[SHOWN_MS_MAX];
    const char *first = show_ms(wait_ms + admit_start_ms(k->a, k->q->n_prompt), text);
    if (by == ADMIT_WAIT)
        (void)err_set(&why->err, ERR_BUSY,
                      "the line before this request takes about %.1f s, with what those refused "
                      "before were promised, but --max-queue-time is %.1f s; try again in %u s",
                      wait_ms / MS, (double)k->a->o.max_queue_ms / MS, why->retry_after_s);
    else if (by == ADMIT_TTFT)
        (void)err_field(&why->err, ERR_BUSY, "x-baton-ttft-ms",
                        "x-baton-ttft-ms is %u, but the first token would come after about %s, "
                        "with what those refused before were promised; try again in %u s",
                        k->q->wanted.ttft_ms, first, why->retry_after_s);
    else say_deadline(k, first);
}

/* With those before it who were promised to be taken by then, and may still come. */
static double wait_with_promised(struct asked *k, double ahead_ms, double work)
{
    double extra = promises_n_kept(&k->t->promises, k->now_ms, (uint64_t)ahead_ms) * work;
    return admit_wait_ms(k->a, k->t, k->q->wanted.priority, extra) * LONGER;
}

/* A place in line, not before wait_ms have passed. */
static struct promise line_promise(const struct asked *k, double work, double wait_ms)
{
    double interval = admit_interval_ms(k->a, k->t, work) * LONGER;
    return (struct promise){ .earliest_ms = k->now_ms + (uint64_t)(wait_ms > 0 ? wait_ms : 0),
                             .interval_ms = interval * admit_doubt(k->a),
                             .again_ms = interval * SPARE_PART };
}

/* It would be late even if nobody was before it, by what starts took. Only first tokens tell
 * whether they still do: one request is let through when there was none for a while. */
static bool shows_start(struct asked *k)
{
    struct admit *a = k->a;
    if (!a->t_refused_ms) a->t_refused_ms = k->now_ms;
    if (k->now_ms < a->t_refused_ms + ADMIT_SILENCE_MS) return false;
    a->t_refused_ms = k->now_ms;
    return true;
}

static bool check_wait(struct asked *k)
{
    enum admit_reason by;
    const int32_t priority = k->q->wanted.priority;
    double longest = longest_wait_ms(k, &by), own, low = longest / LOW,
           work = admit_work_of(k->t, k->q->n_prompt, k->q->max_output);
    bool is_first = admit_work_ahead(k->a, k->t, priority, 0, &own) <= 0,
         counts_promised = !k->returns && !k->q->wanted.follows;
    double wait = admit_wait_ms(k->a, k->t, priority, 0) * LONGER, sure = admit_sureness(k->a);
    if (longest >= 0 && (is_first || wait * sure <= low)) return true;
    if (longest < 0 && is_first && shows_start(k)) return true;
    if (longest >= 0 && counts_promised) wait = wait_with_promised(k, longest, work);
    if (longest >= 0 && wait * sure <= longest) return true;
    double until = wait_with_promised(k, 0, work) - (low > 0 ? low : 0);
    const struct promise p = line_promise(k, work, until);
    promise(k, p);
    k->out->reason = by;
    say_wait(k, by, wait);
    return false;
}

/* ---- room ---- */

/* Of the lowest class in which somebody waits, up to `own`'s, the tenant with most requests in line
 * for its weight, the new one counted: it may be the only one. */
static struct admit_tenant *longest_line(struct admit *a, const struct admit_tenant *own)
{
    struct admit_tenant *longest = NULL;
    double most = 0;
    for (uint32_t i = 0; i < a->n; i++) {
        struct admit_tenant *t = &a->tenants[i];
        double n = (double)t->n_waiting + (t == own), line = n / t->t->weight;
        if (n <= 0 || t->t->class_ > own->t->class_) continue;
        bool lower = !longest || t->t->class_ < longest->t->class_;
        if (!lower && (t->t->class_ > longest->t->class_ || line < most)) continue;
        if (!lower && line <= most && t != own) continue;
        longest = t;
        most = line;
    }
    return longest;
}

/* Places that those have who were told to come now: as many as wait in line at most, so that the
 * nodes are kept busy when they do not come. */
static uint32_t n_places_kept(struct asked *k)
{
    const uint64_t n = k->q->wanted.follows ? 0 : n_promised(k);
    return n < k->a->n_waiting ? (uint32_t)n : k->a->n_waiting;
}

/* A place is free when one of those that run has ended, not only when the line is empty; but who
 * comes then must be able to wait for its turn. */
static bool refuse_full(struct asked *k, uint32_t n_kept)
{
    enum admit_reason by;
    const double work = admit_work_of(k->t, k->q->n_prompt, k->q->max_output),
                 wait = admit_wait_ms(k->a, k->t, k->q->wanted.priority, 0) * LONGER;
    promise(k,
            line_promise(k, work,
                         fmax(admit_end_ms(k->a, work) * LONGER, wait - longest_wait_ms(k, &by))));
    k->out->reason = ADMIT_FULL;
    if (n_kept)
        (void)err_set(&k->out->why.err, ERR_FULL,
                      "this entry node holds %u requests of %u that it may (--max-concurrency), "
                      "beside %u that it keeps room for, since they were told to come back now "
                      "(x-baton-retry); try again in %u s",
                      k->q->n_held, k->q->n_max, n_kept, k->out->why.retry_after_s);
    else
        (void)err_set(&k->out->why.err, ERR_FULL,
                      "this entry node holds as many requests as it may, %u (--max-concurrency); "
                      "try again in %u s",
                      k->q->n_max, k->out->why.retry_after_s);
    return false;
}

/* Without room the newest that waits of the lowest class gives way, which is the request itself
 * unless it goes before another. */
static bool check_room(struct asked *k)
{
    const struct admit_ask *q = k->q;
    const uint32_t n_kept = q->n_max ? n_places_kept(k) : 0;
    if (!q->n_max || (uint64_t)q->n_held + n_kept < q->n_max) return true;
    if (q->n_held < q->n_max) return refuse_full(k, n_kept);
    struct admit_tenant *t = longest_line(k->a, k->t);
    struct admit_request *last = t->n_waiting ? LIST_ENTRY(t->line.prev, struct admit_request, link)
                                              : NULL;
    if (last && (t != k->t || k->q->wanted.priority < last->priority)) {
        k->out->shed = last;
        return true;
    }
    return refuse_full(k, 0);
}

/* ---- */

static bool uses_promise(struct asked *k)
{
    const struct gen_admission *w = &k->q->wanted;
    uint64_t due;
    if (w->follows) return false;
    if (retry_text_read(&k->a->retry_secret, k->t->t->id, str_of(w->retry), &due))
        return promises_use(&k->t->promises, k->now_ms, due);
    return w->is_retry && promises_use_any(&k->t->promises, k->now_ms);
}

void admit_ask(struct admit *a, const struct admit_ask *q, uint64_t now_ms,
               struct admit_verdict *out)
{
    struct asked k = {
        .a = a, .t = &a->tenants[q->wanted.tenant], .q = q, .now_ms = now_ms, .out = out
    };
    *out = (struct admit_verdict){ 0 };
    admit_flow_to(a, now_ms);
    k.t->t_asked_ms = now_ms;
    k.returns = uses_promise(&k);
    out->taken = check_limits(&k) && (q->comes_back || (check_wait(&k) && check_room(&k)));
    out->why.takes_others = !out->taken && admit_reason_is_own(out->reason);
    out->was_promised = k.returns;
}

/* It has no place in line to be promised: the answers of nodes are awaited for a moment only. */
bool admit_may_expect(struct admit *a, uint32_t tenant, uint64_t now_ms, struct admit_verdict *out)
{
    struct admit_tenant *t = &a->tenants[tenant];
    *out = (struct admit_verdict){ .taken = true };
    t->t_asked_ms = now_ms;
    if (!t->t->concurrent || t->n_expected < t->t->concurrent) return true;
    *out = (struct admit_verdict){ .reason = ADMIT_CONCURRENT };
    out->why.retry_after_s = 1;
    out->why.takes_others = true;
    (void)err_set(
        &out->why.err, ERR_FULL,
        "the limit of tenant %s is reached: concurrent is %u, and it has %u requests that "
        "look for kept answers; try again in 1 s",
        t->t->name, t->t->concurrent, t->n_expected);
    return false;
}

bool admit_has_tokens(struct admit *a, uint32_t tenant, uint64_t n_tokens, uint64_t now_ms)
{
    struct admit_tenant *t = &a->tenants[tenant];
    struct admit_budget b;
    if (!t->t->tokens_per_minute) return true;
    admit_budget(a, t, now_ms, &b);
    double n = 1 + promises_n_kept(&t->promises, now_ms, SOON_MS);
    return (double)b.used_tokens + n * (double)n_tokens <= (double)b.tokens;
}

bool admit_is_late(const struct admit *a, const struct admit_request *r, uint64_t now_ms,
                   enum admit_reason *reason)
{
    uint64_t waited = r->wants_ttft ? now_ms - r->t_pushed_ms : admit_waited_ms(a, r, now_ms);
    if (r->state != ADMIT_WAITING || waited < r->late_ms - r->t_pushed_ms) return false;
    *reason = r->wants_ttft ? ADMIT_TTFT : ADMIT_WAIT;
    return true;
}

void admit_refuse_late(struct admit *a, const struct admit_request *r, uint64_t now_ms,
                       uint32_t *retry_after_s, char retry[GEN_RETRY_MAX])
{
    struct admit_tenant *t = &a->tenants[r->tenant];
    *retry_after_s = 1;
    retry[0] = 0;
    if (r->follows) return; /* the request it belongs to waits here */
    double interval = admit_interval_ms(a, t, (double)r->work) * LONGER * SPARE_PART;
    uint64_t earliest = now_ms + (uint64_t)admit_wait_ms(a, t, r->priority, 0);
    uint64_t due = promises_make_again(&t->promises, now_ms, earliest, interval);
    write_retry(a, t, now_ms, due, retry_after_s, retry);
}
