/* admit.h - which request is placed next, which waits, and which is refused (docs/admission.md).
 *
 *     ask ──▶ push ──▶ WAITING ── next, take ──▶ RUNNING ── leave
 *      └ refused          └ leave: placed too late, shed, canceled
 *     expect ──▶ EXPECTED ── adopt ──▶ RUNNING: a node had kept its answer. Else it is pushed
 *
 * Requests wait in a line of their tenant, by priority, then by arrival. The next one is of the
 * highest class in which any waits; there, of the tenant that was served least for its weight
 * (directory/meter.h), of equals by priority, then by arrival. A tenant whose line was empty does
 * not save up what it did not use. Placement takes no more than keeps the nodes busy (fill.h).
 * Invariants: 1. A request is in one line, or running, or unknown here. 2. Tenants of one class
 * that have requests waiting get tokens in proportion to their weights. 3. Nothing here waits for
 * the directory: while it is away this entry node gives its share. Pure: the caller gives the time;
 * nothing is allocated after admit_create. Owner: the scheduler. Thread: loop. */
#ifndef BATON_SCHEDULER_ADMISSION_ADMIT_H
#define BATON_SCHEDULER_ADMISSION_ADMIT_H

#include "scheduler/directory/meter.h"
#include "shared/base/list.h"
#include "shared/serve/backend.h"
#include "shared/serve/tenants.h"

/* What a token costs a tenant of weight 1: so much that weights up to TENANT_WEIGHT_MAX divide it
 * with an error below 0.4 %. */
enum { ADMIT_COST = 1 << 18 };

struct admit;

enum admit_state {
    ADMIT_UNKNOWN,
    ADMIT_EXPECTED, /* counted against its tenant's limits, and in no line */
    ADMIT_WAITING,
    ADMIT_RUNNING
};

/* A member of the request. */
struct admit_request {
    struct list link; /* in the line of its tenant */
    enum admit_state state;
    uint32_t tenant;
    int32_t priority;
    uint32_t n_prompt, n_output; /* tokens; n_output: so far */
    uint64_t number;             /* of its arrival */
    uint64_t work;               /* tokens expected of it, prompt and output */
    uint64_t t_pushed_ms, t_taken_ms;
    uint64_t late_ms;    /* of no use if it is still waiting then: ... */
    bool wants_ttft;     /* ... its first token would come too late; else --max-queue-time */
    uint64_t outages_ms; /* how long outages had lasted in all when it was pushed */
    bool follows;        /* as in gen_admission */
    bool started;        /* its first token has come */
    bool counted;        /* in requests_per_minute, unless it follows */
};

/* Why a request was refused, as metrics have it. */
enum admit_reason {
    ADMIT_FULL,       /* the entry node holds as many as it may */
    ADMIT_REQUESTS,   /* requests_per_minute, ... */
    ADMIT_TOKENS,     /* ... tokens_per_minute, ... */
    ADMIT_CONCURRENT, /* ... concurrent */
    ADMIT_WAIT,       /* it would wait longer than --max-queue-time, ... */
    ADMIT_TTFT,       /* ... than its x-baton-ttft-ms, ... */
    ADMIT_DEADLINE,   /* ... than its x-baton-deadline-ms */
    ADMIT_SHED,       /* it gave way to one of a higher class, or of a tenant with a shorter line */
    ADMIT_N_REASONS
};
const char *admit_reason_name(enum admit_reason r);
/* Is it of that request alone, so that others may be taken? */
bool admit_reason_is_own(enum admit_reason r);

/* The field that gives the request's deadline, and (returned) what it says, for people. */
enum { ADMIT_DEADLINE_MAX = 64 };
const char *admit_deadline_text(const struct gen_admission *w, const char **field,
                                char out[ADMIT_DEADLINE_MAX]);

struct admit_options {
    const struct tenants *tenants; /* borrowed until admit_free */
    uint32_t max_queue_ms;
};

struct admit *admit_create(const struct admit_options *o);
void admit_free(struct admit *a);

/* What the nodes publish; 0: not known. */
struct admit_speed {
    double prompts_per_s;     /* prompt tokens, of all nodes that compute prompts together, ... */
    double one_prompts_per_s; /* ... and of one of them */
    double outputs_per_s;     /* output tokens of all that generate, with all places taken: ... */
    uint32_t n_places;        /* ... so many answers at once */
    uint32_t n_nodes;
    bool is_guess; /* a node has not measured itself yet: of it, what was seen here */
};
void admit_set_speed(struct admit *a, const struct admit_speed *s);
/* No node lives that could serve anybody, or (false) one does again. Meanwhile the line stands,
 * which is no measure of its speed. */
void admit_set_outage(struct admit *a, bool is_outage, uint64_t now_ms);

/* ---- a request comes ---- */

struct admit_ask {
    struct gen_admission wanted;
    uint32_t n_prompt, max_output; /* tokens */
    uint64_t deadline_ms;          /* clock; 0: none */
    uint32_t n_held, n_max;        /* so many requests the entry node holds, and may; 0: no limit.
                                    * When it has no room one that waits must give way */
    bool comes_back; /* admitted before, its client says: its tenant's limits decide alone, and it
                      * waits in line however long that is */
};

struct admit_verdict {
    bool taken;
    bool was_promised;          /* it came as an earlier refusal told its client */
    enum admit_reason reason;   /* not taken, ... */
    struct gen_refusal why;     /* ... with the status in why.err */
    struct admit_request *shed; /* taken, without room: who gives way */
};

/* A request that is taken must be pushed, in the same turn of the loop. */
void admit_ask(struct admit *a, const struct admit_ask *q, uint64_t now_ms,
               struct admit_verdict *out);
/* May one more request of the tenant look for a kept answer? No more had kept ones than may run at
 * once. False: fills in the refusal. */
bool admit_may_expect(struct admit *a, uint32_t tenant, uint64_t now_ms, struct admit_verdict *out);
/* Nodes are asked whether one has kept its answer. */
void admit_expect(struct admit *a, struct admit_request *r, const struct admit_ask *q,
                  uint64_t now_ms);
/* Into the line. `r` is unknown, or expected. */
void admit_push(struct admit *a, struct admit_request *r, const struct admit_ask *q,
                uint64_t now_ms);
/* Runs without having waited: a node goes on with what another entry node began. */
void admit_adopt(struct admit *a, struct admit_request *r, uint32_t tenant, uint64_t now_ms);

/* ---- the order ---- */

/* Whose turn it is; NULL: nobody waits. */
struct admit_request *admit_next(struct admit *a);
/* Has its tenant had so much less than its share of late, and so little in line, that its prompts
 * may overtake those of others that nodes have not begun? */
bool admit_goes_first(struct admit *a, const struct admit_request *r, uint64_t now_ms);
/* It is placed now. */
void admit_take(struct admit *a, struct admit_request *r, uint64_t now_ms);
void admit_started(struct admit *a, struct admit_request *r, uint64_t now_ms);
/* An output token was delivered. */
void admit_charge(struct admit *a, struct admit_request *r, uint64_t now_ms);
/* Have the tenant's limits room for a prompt that is no request, beside what was promised? */
bool admit_has_tokens(struct admit *a, uint32_t tenant, uint64_t n_tokens, uint64_t now_ms);
/* Its prompt is computed once more, elsewhere. */
void admit_charge_again(struct admit *a, const struct admit_request *r, uint64_t now_ms);
/* What `from` is here, `to` is from now on; `from` runs, or is unknown, and `to` is unknown. */
void admit_hand_over(struct admit_request *from, struct admit_request *to);
/* It ended, or is not wanted any more. Nothing where it is unknown. */
void admit_leave(struct admit *a, struct admit_request *r, uint64_t now_ms);
/* How long it has waited for nodes that live. */
uint64_t admit_waited_ms(const struct admit *a, const struct admit_request *r, uint64_t now_ms);
/* Has it waited for so long that it may not begin any more? Fills in why. */
bool admit_is_late(const struct admit *a, const struct admit_request *r, uint64_t now_ms,
                   enum admit_reason *reason);
/* A refusal of one that waited: when to come again. */
void admit_refuse_late(struct admit *a, const struct admit_request *r, uint64_t now_ms,
                       uint32_t *retry_after_s, char retry[GEN_RETRY_MAX]);

/* ---- other entry nodes, by the directory ---- */

/* Is there anything to tell, and time to? */
bool admit_has_report(const struct admit *a, uint64_t now_ms);
/* Fills in the next report, or again the one that was not answered. Returns how many tenants it
 * has. */
uint32_t admit_report(struct admit *a, uint64_t now_ms, struct meter_use out[METER_TENANTS_MAX],
                      uint64_t *number);
/* st OK: `sums` is the answer to it; else the directory is away. */
void admit_on_sums(struct admit *a, enum status st, const struct meter_sums *sums, uint64_t now_ms);
/* Entry nodes that share the nodes with this one, itself included, as last heard. */
uint32_t admit_n_entries(const struct admit *a);

/* ---- for people and metrics ---- */

struct admit_numbers {
    uint32_t n_waiting, n_running;
    uint64_t n_prompt_tokens, n_output_tokens; /* ever */
    double wait_ms;                            /* that a new request is expected to wait; 0: none */
};
void admit_numbers(struct admit *a, uint32_t tenant, uint64_t now_ms, struct admit_numbers *out);
void admit_limits(struct admit *a, uint32_t tenant, uint64_t now_ms, struct gen_limits *out);
const struct tenants *admit_tenants(const struct admit *a);
uint32_t admit_n_waiting(const struct admit *a);

#endif
