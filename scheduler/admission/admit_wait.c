/* admit_wait.c - how long the line takes.
 *
 * Its speed is what was taken from it in the last seconds in which somebody waited; before that is
 * known, what the nodes publish. Work is counted in tokens, prompt and answer as expected. A
 * request waits for the lines of higher classes, for what its own tenant has before it, and for
 * what the other tenants of its class are served meanwhile, which is as much in relation to their
 * weights (the fluid model of fair queueing: Parekh and Gallager, 1993). Tenants go on sending, so
 * a tenant's line is no faster than its share, but for what others do not use. */
#include <math.h>

#include "scheduler/admission/admit_state.h"

enum {
    MS = 1000,
    BUSY_MS_MIN = 1000,      /* of waiting, before the line's own speed counts, ... */
    WAITED_MS = 10,          /* in line, to count in that */
    BUSY_MS_SURE = 8000,     /* ... and before it is sure, ... */
    TAKEN_SURE = 8,          /* ... with so many requests taken */
    TAKEN_MEMORY_MS = 10000, /* of which tenants were served, ... */
    FORGET_MS = 100,         /* ... brought up to now so often */
    WAITING_FEW = 2,         /* requests in line of a tenant that asks for less than its share */
    TAKEN_MIN = 1,           /* tokens for each weight: what is less was long ago */
    OUTPUT_UNKNOWN = 128     /* tokens, before a tenant has had answers */
};

/* However much the others use, some of it is left in the end. */
static const double PART_MIN = 0.001;
/* Requests this much longer than those that were measured are still like them. */
static const double LONGER_IS_LIKE = 1.25;
/* Of what the one had that had most, each for its weight: tenants that all have requests waiting
 * differ by less. */
static const double BEHIND = 2.0 / 3;

/* ---- measures ---- */

void admit_flow_to(struct admit *a, uint64_t now_ms)
{
    uint64_t second = now_ms / MS, passed = a->t_flow_ms ? now_ms - a->t_flow_ms : 0;
    size_t i = second % FLOW_SLOTS;
    if (a->flow[i].second != second) {
        a->flow[i].second = second;
        a->flow[i].work = 0;
        a->flow[i].n_taken = 0;
        a->flow[i].busy_ms = 0;
    }
    if (a->n_waiting && !a->is_outage) a->flow[i].busy_ms += (uint32_t)passed;
    a->t_flow_ms = now_ms;
    if (now_ms < a->t_forget_ms + FORGET_MS) return;
    double stays = exp(-(double)(now_ms - a->t_forget_ms) / TAKEN_MEMORY_MS);
    a->taken *= stays;
    for (uint32_t k = 0; k < a->n; k++) a->tenants[k].taken *= stays;
    a->t_forget_ms = now_ms;
}

/* One that only passed through an empty line says nothing of how fast a full one is. */
void admit_flow_take(struct admit *a, struct admit_tenant *t, const struct admit_request *r)
{
    double work = (double)r->work;
    if (a->t_flow_ms - r->t_pushed_ms >= WAITED_MS && !a->is_outage) {
        a->flow[a->t_flow_ms / MS % FLOW_SLOTS].work += work;
        a->flow[a->t_flow_ms / MS % FLOW_SLOTS].n_taken++;
    }
    a->taken += work;
    t->taken += work;
}

/* What tenants had of late is compared, not what they were served in all: one whose line was empty
 * does not save that up, so that says nothing of who is behind. */
double admit_most_taken(const struct admit *a)
{
    double most = 0;
    for (uint32_t i = 0; i < a->n; i++)
        most = fmax(most, a->tenants[i].taken / a->tenants[i].t->weight);
    return most;
}

/* One that comes with many at once has its turns like the others: else theirs would wait for all of
 * them. */
bool admit_is_behind(const struct admit_tenant *t, double most)
{
    if (t->n_waiting > WAITING_FEW || most < TAKEN_MIN) return false;
    return t->taken / t->t->weight < BEHIND * most;
}

bool admit_goes_first(struct admit *a, const struct admit_request *r, uint64_t now_ms)
{
    admit_flow_to(a, now_ms);
    return admit_is_behind(&a->tenants[r->tenant], admit_most_taken(a));
}

static bool is_recent(const struct admit *a, size_t i)
{
    return a->flow[i].second + FLOW_SLOTS > a->t_flow_ms / MS;
}

/* What was taken from the line in the last seconds. */
struct flow {
    double work;    /* tokens, ... */
    double n_taken; /* ... of so many requests, ... */
    double busy_ms; /* ... while somebody waited for so long */
};

static struct flow sum_up(const struct admit *a)
{
    struct flow f = { 0 };
    for (size_t i = 0; i < FLOW_SLOTS; i++) {
        if (!is_recent(a, i)) continue;
        f.work += a->flow[i].work;
        f.n_taken += a->flow[i].n_taken;
        f.busy_ms += a->flow[i].busy_ms;
    }
    return f;
}

/* The line's tokens per millisecond by what the nodes publish: prompts, or places for answers,
 * whichever is scarcer; 0: not known. */
static double published_speed(const struct admit *a)
{
    double prompts = 0, work = 0, per_ms = 0;
    for (uint32_t i = 0; i < a->n; i++) {
        prompts += (double)a->tenants[i].waiting_prompts;
        work += (double)a->tenants[i].waiting_work;
    }
    double outputs = work - prompts, share = 1.0 / MS / admit_n_entries(a);
    if (prompts > 0) per_ms = a->speed.prompts_per_s * share * work / prompts;
    if (outputs <= 0 || a->speed.outputs_per_s <= 0) return per_ms;
    double by_places = a->speed.outputs_per_s * share * work / outputs;
    return per_ms > 0 && per_ms < by_places ? per_ms : by_places;
}

static uint32_t n_running(const struct admit *a)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < a->n; i++) n += a->tenants[i].n_running;
    return n;
}

/* Nobody was taken for so long. What runs may have begun at once, and then ends at once: only when
 * it should be over, by what the nodes publish, they are slower than that. */
static double speed_while_all_wait(const struct admit *a, double published, double busy_ms)
{
    double work = 0;
    for (uint32_t i = 0; i < a->n; i++) work += (double)a->tenants[i].waiting_work;
    if (!n_running(a) || !a->n_waiting) return published / 2;
    return fmin(published, work / a->n_waiting * n_running(a) / busy_ms);
}

/* Tokens per millisecond; 0: not known. */
static double speed_of_line(const struct admit *a)
{
    const struct flow f = sum_up(a);
    if (f.busy_ms < BUSY_MS_MIN) return published_speed(a);
    if (f.work > 0) return f.work / f.busy_ms;
    return speed_while_all_wait(a, published_speed(a), f.busy_ms);
}

/* For how much of what makes the speed sure somebody has waited, 0 to 1. */
static double part_waited(const struct flow *f) { return fmin(f->busy_ms / BUSY_MS_SURE, 1); }

double admit_doubt(const struct admit *a)
{
    const struct flow f = sum_up(a);
    return 2 - part_waited(&f);
}

/* A request takes time beside that of its tokens, so the speed of short ones says too little of
 * long ones: as if each took as long as one that was measured, at worst. 1: they are alike. */
static double likeness(const struct admit *a, const struct flow *f)
{
    double n = 0, work = 0;
    for (uint32_t i = 0; i < a->n; i++) {
        n += a->tenants[i].n_waiting;
        work += (double)a->tenants[i].waiting_work;
    }
    if (work <= 0 || f->n_taken <= 0) return 1;
    return fmin(LONGER_IS_LIKE * (f->work / f->n_taken) / (work / n), 1);
}

double admit_sureness(const struct admit *a)
{
    const struct flow f = sum_up(a);
    const double sure = part_waited(&f) * fmin(f.n_taken / TAKEN_SURE, 1) * likeness(a, &f),
                 published = a->speed.is_guess ? 0 : published_speed(a);
    return sure + (1 - sure) * (published > 0 ? fmin(speed_of_line(a) / published, 1) : 0);
}

double admit_work_of(const struct admit_tenant *t, uint32_t n_prompt, uint32_t max_output)
{
    double output = t->mean_output > 0 ? t->mean_output : OUTPUT_UNKNOWN;
    return n_prompt + (output < max_output ? output : max_output);
}

double admit_prompt_ms(const struct admit *a, uint32_t n_prompt)
{
    double per_s = a->speed.one_prompts_per_s;
    return per_s > 0 ? n_prompt * (double)MS / per_s * a->prompt_part : 0;
}

double admit_start_ms(const struct admit *a, uint32_t n_prompt)
{
    return admit_prompt_ms(a, n_prompt) + a->start_ms + 2 * a->start_dev_ms;
}

/* ---- shares ---- */

/* The part of the line's speed that the tenant's line has: of what higher classes, and tenants that
 * get all they ask for, leave of it, the share by weight among those that wait. */
static double part_of(const struct admit *a, const struct admit_tenant *t)
{
    double weights = t->t->weight, left = 1;
    for (uint32_t i = 0; i < a->n; i++) {
        const struct admit_tenant *o = &a->tenants[i];
        if (o == t || o->t->class_ < t->t->class_) continue;
        if (o->n_waiting && o->t->class_ == t->t->class_) weights += o->t->weight;
        else if (a->taken > 0) left -= o->taken / a->taken;
    }
    double part = left * t->t->weight / weights;
    return part > PART_MIN ? part : PART_MIN;
}

/* Its share by weight of all that have something here: as long as it is not known what they use, it
 * may be all that they are due. */
static double share_of_present(const struct admit *a, const struct admit_tenant *t)
{
    double weights = t->t->weight;
    for (uint32_t i = 0; i < a->n; i++) {
        const struct admit_tenant *o = &a->tenants[i];
        if (o != t && o->t->class_ >= t->t->class_ && (o->n_waiting || o->n_running))
            weights += o->t->weight;
    }
    return t->t->weight / weights;
}

/* Of the tenant's own line: what is before a request of this priority. */
static double own_work_ahead(const struct admit_tenant *t, int32_t priority)
{
    double work = (double)t->waiting_work;
    for (struct list *at = t->line.prev; at != &t->line; at = at->prev) {
        const struct admit_request *r = LIST_ENTRY(at, struct admit_request, link);
        if (r->priority <= priority) break;
        work -= (double)r->work;
    }
    return work;
}

double admit_work_ahead(const struct admit *a, const struct admit_tenant *t, int32_t priority,
                        double extra, double *own)
{
    *own = own_work_ahead(t, priority) + extra;
    double all = *own, turn = (double)admit_standing(a, t) + *own * (double)t->token_cost;
    for (uint32_t i = 0; i < a->n; i++) {
        const struct admit_tenant *o = &a->tenants[i];
        if (o == t || !o->n_waiting || o->t->class_ < t->t->class_) continue;
        double lag = (turn - (double)admit_standing(a, o)) / (double)o->token_cost,
               work = (double)o->waiting_work;
        all += o->t->class_ > t->t->class_ || lag > work ? work : lag > 0 ? lag : 0;
    }
    return all;
}

double admit_wait_ms(const struct admit *a, const struct admit_tenant *t, int32_t priority,
                     double extra)
{
    double own, all = admit_work_ahead(a, t, priority, extra, &own), speed = speed_of_line(a);
    if (all <= 0 || speed <= 0) return 0;
    double shared = all / speed, alone = own / (speed * part_of(a, t));
    return shared > alone ? shared : alone;
}

double admit_end_ms(const struct admit *a, double work)
{
    double speed = speed_of_line(a), n = a->n_waiting + n_running(a), n_places = n_running(a);
    if (a->speed.n_places) n_places = (double)a->speed.n_places / admit_n_entries(a);
    return speed > 0 ? fmax(fmin(n, n_places), 1) * work / speed : MS;
}

double admit_interval_ms(const struct admit *a, const struct admit_tenant *t, double work)
{
    double speed = speed_of_line(a), part = part_of(a, t), least = share_of_present(a, t);
    if (admit_doubt(a) > 1 && least < part) part = least;
    return speed > 0 ? work / (speed * part) : MS;
}
