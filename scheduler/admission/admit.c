/* admit.c - see admit.h: the line and its order. */
#include "scheduler/admission/admit_state.h"

#include <math.h>

#include "shared/base/assert.h"
#include "shared/base/hash/hash.h"
#include "shared/base/mem.h"

enum {
    MEAN_OF = 16 /* requests over which means go, about */
};

const char *admit_reason_name(enum admit_reason r)
{
    static const char *const names[] = { "full",
                                         "requests_per_minute",
                                         "tokens_per_minute",
                                         "concurrent",
                                         "wait",
                                         "ttft",
                                         "deadline",
                                         "shed" };
    return r < ADMIT_N_REASONS ? names[r] : "?";
}

bool admit_reason_is_own(enum admit_reason r)
{
    return r == ADMIT_REQUESTS || r == ADMIT_TOKENS || r == ADMIT_CONCURRENT || r == ADMIT_TTFT ||
           r == ADMIT_DEADLINE;
}

/* ---- life ---- */

struct admit *admit_create(const struct admit_options *o)
{
    struct admit *a = MEM_NEW(struct admit);
    a->o = *o;
    a->n = o->tenants->n;
    a->tenants = MEM_ARRAY(struct admit_tenant, a->n);
    for (uint32_t i = 0; i < a->n; i++) {
        struct admit_tenant *t = &a->tenants[i];
        t->t = &o->tenants->list[i];
        list_init(&t->line);
        t->token_cost = ADMIT_COST / t->t->weight;
        promises_init(&t->promises);
    }
    a->prompt_part = 1;
    random_bytes(a->retry_secret.bytes, sizeof a->retry_secret.bytes);
    return a;
}

void admit_free(struct admit *a)
{
    if (!a) return;
    mem_free(a->tenants);
    mem_free(a);
}

const struct tenants *admit_tenants(const struct admit *a) { return a->o.tenants; }

uint32_t admit_n_waiting(const struct admit *a) { return a->n_waiting; }

/* ---- the order ---- */

uint64_t admit_standing(const struct admit *a, const struct admit_tenant *t)
{
    uint64_t own = t->served + t->lift, floor = a->virtual_time[t->t->class_];
    return t->n_waiting || own > floor ? own : floor;
}

static bool is_before(const struct admit_request *r, const struct admit_request *other)
{
    if (r->priority != other->priority) return r->priority < other->priority;
    return r->number < other->number;
}

static struct admit_request *first_of(const struct admit_tenant *t)
{
    return LIST_FIRST(&t->line, struct admit_request, link);
}

static bool goes_first(const struct admit_tenant *t, const struct admit_tenant *other, double most)
{
    uint64_t own = t->served + t->lift, others = other->served + other->lift;
    if (t->t->class_ != other->t->class_) return t->t->class_ > other->t->class_;
    const bool is_behind = admit_is_behind(t, most);
    if (is_behind != admit_is_behind(other, most)) return is_behind;
    if (own != others) return own < others;
    return is_before(first_of(t), first_of(other));
}

struct admit_request *admit_next(struct admit *a)
{
    const struct admit_tenant *best = NULL;
    if (a->n_waiting == 0) return NULL;
    const double most = admit_most_taken(a);
    for (uint32_t i = 0; i < a->n; i++)
        if (a->tenants[i].n_waiting && (!best || goes_first(&a->tenants[i], best, most)))
            best = &a->tenants[i];
    return first_of(best);
}

void admit_set_speed(struct admit *a, const struct admit_speed *s) { a->speed = *s; }

static uint64_t outages_ms(const struct admit *a, uint64_t now_ms)
{
    return a->outages_ms + (a->is_outage ? now_ms - a->t_outage_ms : 0);
}

void admit_set_outage(struct admit *a, bool is_outage, uint64_t now_ms)
{
    admit_flow_to(a, now_ms);
    a->outages_ms = outages_ms(a, now_ms);
    a->t_outage_ms = now_ms;
    a->is_outage = is_outage;
}

uint64_t admit_waited_ms(const struct admit *a, const struct admit_request *r, uint64_t now_ms)
{
    return now_ms - r->t_pushed_ms - (outages_ms(a, now_ms) - r->outages_ms);
}

/* ---- the line ---- */

/* From the end, since nearly all have the same priority. */
static void insert(struct admit_tenant *t, struct admit_request *r)
{
    struct list *at = t->line.prev;
    while (at != &t->line && is_before(r, LIST_ENTRY(at, struct admit_request, link)))
        at = at->prev;
    list_insert_after(at, &r->link);
}

static void set_late(const struct admit *a, struct admit_request *r, const struct admit_ask *q,
                     uint64_t now_ms)
{
    r->late_ms = now_ms + a->o.max_queue_ms;
    if (!q->wanted.ttft_ms) return;
    uint64_t own = (uint64_t)admit_prompt_ms(a, r->n_prompt), most = q->wanted.ttft_ms;
    if (own >= most) own = 0; /* it was taken to show whether that is so */
    uint64_t latest = now_ms + most - own;
    r->wants_ttft = latest < r->late_ms;
    if (r->wants_ttft) r->late_ms = latest;
}

static void count_request(struct admit_tenant *t, struct admit_request *r,
                          const struct admit_ask *q, uint64_t now_ms)
{
    if (r->counted) return;
    r->counted = true;
    admit_count_usage(t, now_ms, q->wanted.follows ? 0 : 1, 0);
    t->untold.requests += !q->wanted.follows;
}

/* One that comes back is counted when it is pushed: what a node has kept was counted before. */
void admit_expect(struct admit *a, struct admit_request *r, const struct admit_ask *q,
                  uint64_t now_ms)
{
    struct admit_tenant *t = &a->tenants[q->wanted.tenant];
    ASSERT(r->state == ADMIT_UNKNOWN);
    *r = (struct admit_request){ .state = ADMIT_EXPECTED, .tenant = q->wanted.tenant };
    list_init(&r->link);
    t->n_expected++;
    t->t_asked_ms = now_ms;
    if (!q->comes_back) count_request(t, r, q, now_ms);
}

/* Whether it was counted. */
static bool end_expected(struct admit_tenant *t, const struct admit_request *r)
{
    ASSERT(r->state == ADMIT_UNKNOWN || r->state == ADMIT_EXPECTED);
    t->n_expected -= r->state == ADMIT_EXPECTED;
    return r->state == ADMIT_EXPECTED && r->counted;
}

void admit_push(struct admit *a, struct admit_request *r, const struct admit_ask *q,
                uint64_t now_ms)
{
    struct admit_tenant *t = &a->tenants[q->wanted.tenant];
    const bool counted = end_expected(t, r);
    admit_flow_to(a, now_ms);
    *r = (struct admit_request){ .state = ADMIT_WAITING,
                                 .counted = counted,
                                 .tenant = q->wanted.tenant,
                                 .priority = q->wanted.priority,
                                 .n_prompt = q->n_prompt,
                                 .number = ++a->n_pushed,
                                 .t_pushed_ms = now_ms,
                                 .outages_ms = outages_ms(a, now_ms),
                                 .follows = q->wanted.follows };
    r->work = (uint64_t)admit_work_of(t, q->n_prompt, q->max_output);
    set_late(a, r, q, now_ms);
    if (t->n_waiting == 0) t->lift += admit_standing(a, t) - (t->served + t->lift);
    list_init(&r->link);
    insert(t, r);
    t->n_waiting++;
    t->waiting_work += r->work;
    t->waiting_prompts += r->n_prompt;
    a->n_waiting++;
    count_request(t, r, q, now_ms);
}

static void leave_line(struct admit *a, struct admit_tenant *t, struct admit_request *r)
{
    list_remove(&r->link);
    t->n_waiting--;
    t->waiting_work -= r->work;
    t->waiting_prompts -= r->n_prompt;
    a->n_waiting--;
}

/* ---- what they get ---- */

static void charge(struct admit_tenant *t, uint64_t n_tokens, uint64_t now_ms)
{
    t->served += n_tokens * t->token_cost;
    t->untold.cost += n_tokens * t->token_cost;
    t->untold.tokens += n_tokens;
    admit_count_usage(t, now_ms, 0, n_tokens);
}

void admit_take(struct admit *a, struct admit_request *r, uint64_t now_ms)
{
    struct admit_tenant *t = &a->tenants[r->tenant];
    ASSERT(r->state == ADMIT_WAITING);
    admit_flow_to(a, now_ms);
    a->virtual_time[t->t->class_] = t->served + t->lift;
    leave_line(a, t, r);
    admit_flow_take(a, t, r);
    r->state = ADMIT_RUNNING;
    r->t_taken_ms = now_ms;
    t->n_running++;
    t->n_prompt_tokens += r->n_prompt;
    charge(t, r->n_prompt, now_ms);
}

void admit_adopt(struct admit *a, struct admit_request *r, uint32_t tenant, uint64_t now_ms)
{
    (void)end_expected(&a->tenants[tenant], r);
    *r = (struct admit_request){ .state = ADMIT_RUNNING, .tenant = tenant, .t_taken_ms = now_ms };
    r->started = true; /* it is no measure of how long that takes */
    list_init(&r->link);
    a->tenants[tenant].n_running++;
}

/* The mean, and the mean distance from it: TCP's estimate of a round trip, for a start. */
static void measure_start(struct admit *a, double ms)
{
    a->start_dev_ms += (fabs(ms - a->start_ms) - a->start_dev_ms) / MEAN_OF;
    a->start_ms += (ms - a->start_ms) / MEAN_OF;
}

/* After a silence what is known is old: a better start is believed at once. */
static void measure_anew(struct admit *a, double ms)
{
    if (ms >= a->start_ms) return;
    a->start_ms = ms;
    a->start_dev_ms = ms / 2;
}

void admit_started(struct admit *a, struct admit_request *r, uint64_t now_ms)
{
    if (r->state != ADMIT_RUNNING || r->started) return;
    r->started = true;
    double took = (double)(now_ms - r->t_taken_ms), prompt = admit_prompt_ms(a, r->n_prompt),
           ms = took > prompt ? took - prompt : 0;
    bool is_old = now_ms >= a->t_started_ms + ADMIT_SILENCE_MS;
    if (is_old) measure_anew(a, ms);
    measure_start(a, ms);
    if (is_old && took < prompt) a->prompt_part *= took / prompt;
    else a->prompt_part += (1 - a->prompt_part) / MEAN_OF;
    a->t_started_ms = now_ms;
    a->t_refused_ms = 0;
}

void admit_charge(struct admit *a, struct admit_request *r, uint64_t now_ms)
{
    if (r->state == ADMIT_UNKNOWN) return;
    r->n_output++;
    a->tenants[r->tenant].n_output_tokens++;
    charge(&a->tenants[r->tenant], 1, now_ms);
}

void admit_charge_again(struct admit *a, const struct admit_request *r, uint64_t now_ms)
{
    if (r->state == ADMIT_UNKNOWN) return;
    a->tenants[r->tenant].n_prompt_tokens += r->n_prompt;
    charge(&a->tenants[r->tenant], r->n_prompt, now_ms);
}

void admit_hand_over(struct admit_request *from, struct admit_request *to)
{
    ASSERT(from->state != ADMIT_WAITING);
    ASSERT(to->state == ADMIT_UNKNOWN);
    *to = *from;
    list_init(&to->link);
    from->state = ADMIT_UNKNOWN;
}

/* Time in which nothing of it ran is not between two ends. */
static void note_end(struct admit_tenant *t, const struct admit_request *r, uint64_t now_ms)
{
    uint64_t begin = r->t_taken_ms > t->t_end_ms ? r->t_taken_ms : t->t_end_ms;
    double interval = (double)(now_ms - begin);
    if (t->t_end_ms)
        t->end_interval_ms += (interval - t->end_interval_ms) /
                              (t->end_interval_ms > 0 ? MEAN_OF : 1);
    t->t_end_ms = now_ms;
    if (r->n_output)
        t->mean_output += (r->n_output - t->mean_output) / (t->mean_output > 0 ? MEAN_OF : 1);
}

void admit_leave(struct admit *a, struct admit_request *r, uint64_t now_ms)
{
    struct admit_tenant *t = &a->tenants[r->tenant];
    if (r->state == ADMIT_UNKNOWN) return;
    admit_flow_to(a, now_ms);
    if (r->state == ADMIT_EXPECTED) t->n_expected--;
    else if (r->state == ADMIT_WAITING) leave_line(a, t, r);
    else {
        t->n_running--;
        note_end(t, r, now_ms);
    }
    r->state = ADMIT_UNKNOWN;
}

/* ---- for people and metrics ---- */

void admit_numbers(struct admit *a, uint32_t tenant, uint64_t now_ms, struct admit_numbers *out)
{
    const struct admit_tenant *t = &a->tenants[tenant];
    admit_flow_to(a, now_ms);
    *out = (struct admit_numbers){ .n_waiting = admit_n_not_running(t),
                                   .n_running = t->n_running,
                                   .n_prompt_tokens = t->n_prompt_tokens,
                                   .n_output_tokens = t->n_output_tokens,
                                   .wait_ms = admit_wait_ms(a, t, 0, 0) };
}
