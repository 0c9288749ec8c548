/* admit_state.h - struct admit, for scheduler/admission alone.
 *
 * admit.c has the line and its order, admit_ask.c the verdicts, admit_wait.c how long the line
 * takes, admit_limits.c what a tenant used, admit_meter.c what the directory is told. Thread:
 * loop. */
#ifndef BATON_SCHEDULER_ADMISSION_ADMIT_STATE_H
#define BATON_SCHEDULER_ADMISSION_ADMIT_STATE_H

#include "scheduler/admission/admit.h"
#include "scheduler/admission/promises.h"
#include "scheduler/admission/retry_text.h"

enum {
    USAGE_SLOTS = METER_WINDOW_MS / METER_SLOT_MS,
    FLOW_SLOTS = 10,        /* seconds by which the line's speed is measured */
    ADMIT_SILENCE_MS = 2000 /* without a first token: then what a start takes is old */
};

/* What this entry node admitted of a tenant in the last minute. */
struct admit_usage {
    struct {
        uint64_t second;
        uint32_t requests;
        uint64_t tokens;
    } slots[USAGE_SLOTS];
};

/* What was used and not told yet. */
struct admit_untold {
    uint32_t requests;
    uint64_t tokens, cost;
};

struct admit_tenant {
    const struct tenant *t;
    struct list line; /* of admit_request.link */
    uint32_t n_waiting, n_running, n_expected;
    uint64_t waiting_work, waiting_prompts; /* tokens */
    uint64_t token_cost;                    /* ADMIT_COST / weight */
    uint64_t served;                        /* over all entry nodes, as far as is known here */
    uint64_t lift; /* added to it here: what it did not use while nothing of it waited */
    struct admit_untold untold, telling; /* telling: in the report that is not answered */
    struct meter_sum sum;                /* as last heard, ... */
    uint64_t t_heard_ms;                 /* ... then; 0: never */
    uint32_t told_running, told_waiting;
    uint64_t t_asked_ms; /* a request of it came */
    struct admit_usage usage;
    struct promises promises;
    double mean_output;     /* tokens of an answer; 0: not known */
    double taken;           /* work taken from its line of late, decaying */
    double end_interval_ms; /* between the ends of its requests; 0: not known */
    uint64_t t_end_ms;
    uint64_t n_prompt_tokens, n_output_tokens; /* ever */
};

struct admit {
    struct admit_options o;
    struct admit_tenant *tenants; /* [n] as in o.tenants */
    uint32_t n, n_waiting;
    uint64_t n_pushed;
    /* Start tag of the last request taken of each class: where a line begins that was empty. */
    uint64_t virtual_time[TENANT_N_CLASSES];
    struct {
        uint64_t second;
        double work;      /* tokens taken from the line, ... */
        uint32_t n_taken; /* ... of so many requests that had waited */
        uint32_t busy_ms; /* in which somebody waited */
    } flow[FLOW_SLOTS];
    uint64_t t_flow_ms, t_forget_ms;
    bool is_outage;                   /* since t_outage_ms: nothing is measured */
    uint64_t t_outage_ms, outages_ms; /* outages_ms: of all that are over */
    double taken;                     /* sum of the tenants' */
    struct admit_speed speed;
    double start_ms, start_dev_ms; /* from placement to the first token, but for the prompt */
    double prompt_part;    /* of what prompts take by the published speed, what they took of late */
    uint64_t t_started_ms; /* the last first token */
    uint64_t t_refused_ms; /* since when requests are refused for what a start takes, while no first
                            * token came; 0: they are not */
    /* the directory */
    uint64_t report_number;
    bool telling, directory_away;
    uint64_t t_report_ms;
    uint32_t n_entries; /* 0: not heard yet */
    struct retry_secret retry_secret;
    uint32_t n_retries; /* given out */
};

/* ---- admit.c ---- */
/* That wait, for their turn or for the answers of nodes. */
static inline uint32_t admit_n_not_running(const struct admit_tenant *t)
{
    return t->n_waiting + t->n_expected;
}
/* Where the tenant stands in the order: less is sooner. */
uint64_t admit_standing(const struct admit *a, const struct admit_tenant *t);

/* ---- admit_limits.c ---- */
void admit_count_usage(struct admit_tenant *t, uint64_t now_ms, uint32_t requests, uint64_t tokens);
/* What counts against the limits now: of all entry nodes, or of this one against its share. */
struct admit_budget {
    uint64_t requests, tokens, concurrent;             /* limits; 0: none */
    uint64_t used_requests, used_tokens, n_concurrent; /* of them */
};
void admit_budget(const struct admit *a, const struct admit_tenant *t, uint64_t now_ms,
                  struct admit_budget *out);
/* Milliseconds until so much of the last minute's use is older than that; `tokens`: of tokens, not
 * requests. */
uint64_t admit_room_after_ms(const struct admit_tenant *t, uint64_t now_ms, bool tokens,
                             uint64_t used, uint64_t excess);

/* ---- admit_wait.c ---- */
/* Brings the measures of the line's speed up to now; before anything changes. */
void admit_flow_to(struct admit *a, uint64_t now_ms);
/* Tokens of late for each weight of the tenant that had most. */
double admit_most_taken(const struct admit *a);
/* Had the tenant clearly less than that, and has it little in line? */
bool admit_is_behind(const struct admit_tenant *t, double most);
void admit_flow_take(struct admit *a, struct admit_tenant *t, const struct admit_request *r);
/* Tokens of the line before a request of this priority; *own: of its tenant's line alone. */
double admit_work_ahead(const struct admit *a, const struct admit_tenant *t, int32_t priority,
                        double extra, double *own);
/* Milliseconds until a request that comes now, with so much extra work of its tenant before it,
 * would be taken from the line. */
double admit_wait_ms(const struct admit *a, const struct admit_tenant *t, int32_t priority,
                     double extra);
/* Milliseconds until one of those that run has ended, if each is of so much work: all that the
 * nodes have places for may have begun at once. */
double admit_end_ms(const struct admit *a, double work);
/* Milliseconds that the tenant's share of the line takes for so much work. */
double admit_interval_ms(const struct admit *a, const struct admit_tenant *t, double work);
/* How much of admit_wait_ms is more than a guess, 0 to 1: all of it after some seconds of waiting
 * in which several requests were taken that were no shorter than those that wait; else as much as
 * the nodes' published speeds bear out.
 * Nobody is refused for a guess. */
double admit_sureness(const struct admit *a);
/* By how much longer promises are to be, as the line's speed is not known for long: 1 to 2. An
 * error in them lasts as long as they reach. */
double admit_doubt(const struct admit *a);
double admit_work_of(const struct admit_tenant *t, uint32_t n_prompt, uint32_t max_output);
/* Milliseconds from placement to the first token: with the usual disturbance, or at least. */
double admit_start_ms(const struct admit *a, uint32_t n_prompt);
double admit_prompt_ms(const struct admit *a, uint32_t n_prompt);

#endif
