/* scheduler_metrics.h - what an entry node counts and times about its requests.
 *
 * Thread: loop. */
#ifndef BATON_SCHEDULER_SCHEDULER_METRICS_H
#define BATON_SCHEDULER_SCHEDULER_METRICS_H

#include "scheduler/breaker.h"
#include "scheduler/pressure/pressure.h"
#include "scheduler/retry.h"
#include "shared/base/metrics.h"
#include "shared/serve/backend.h"

struct scheduler_metrics {
    struct metrics *registry; /* borrowed */
    struct counter *requests, *finished_stop, *finished_length, *failed, *canceled, *moves,
        *requeues;
    struct counter *resumes_attached, *resumes_computed, *resumes_refused;
    struct counter *prompt_tokens, *output_tokens;
    struct counter *split, *local; /* attempts */
    uint64_t n_split, n_one_node;  /* requests, by their first attempt */
    struct gauge *live, *placing, *nodes;
    struct histogram *place_s, *queue_s, *prefill_s, *ttft_s, *tpot_s, *decode_s, *e2e_s, *kv_s,
        *kv_tail_s;
    /* The cells that were taken; registered when they first are. */
    struct counter *losses[REQUEST_N_STATES][REQUEST_N_LOSSES][ACTION_N];
    struct counter *preemptions[PRESSURE_N];
    struct counter *hedges[3]; /* who went on: the first, the second, neither */
    struct counter *breaker[BREAKER_N_SCOPES][BREAKER_N_STATES];
    bool log_requests; /* of scheduler_options */
};

void scheduler_metrics_register(struct scheduler_metrics *sm, struct metrics *m);
/* A request has lost something: baton_request_losses_total{state,loss,action}. */
void scheduler_metrics_loss(struct scheduler_metrics *m, enum request_state state,
                            enum request_loss loss, enum request_action action);
/* Log a request's number in the cluster beside the client's x-request-id when it begins and when it
 * ends: at level info with log_requests, else debug. The end is counted, too. */
struct request;
void scheduler_metrics_begin(const struct scheduler_metrics *m, const struct request *r);
void scheduler_metrics_end(struct scheduler_metrics *m, const struct request *r,
                           const struct gen_end *end);

#endif
