/* scheduler_metrics.c - see scheduler_metrics.h. */
#include "scheduler/scheduler_metrics.h"

#include <stdio.h>

#include "scheduler/request.h"
#include "shared/base/log.h"

static struct histogram *stage(struct metrics *m, const char *name, const char *help)
{
    return metrics_histogram(m, name, "", help, METRICS_SECONDS, METRICS_SECONDS_N);
}

static void register_counters(struct scheduler_metrics *sm, struct metrics *m)
{
    sm->requests = metrics_counter(m, "baton_requests_total", "",
                                   "Requests accepted by this entry node.");
    sm->finished_stop = metrics_counter(m, "baton_request_success_total",
                                        "finished_reason=\"stop\"", "Requests that ended well.");
    sm->finished_length = metrics_counter(m, "baton_request_success_total",
                                          "finished_reason=\"length\"",
                                          "Requests that ended well.");
    sm->failed = metrics_counter(m, "baton_request_failed_total", "",
                                 "Requests that ended with an error.");
    sm->canceled = metrics_counter(m, "baton_request_canceled_total", "",
                                   "Requests that the client or a stop string ended early.");
    sm->moves = metrics_counter(m, "baton_request_moves_total", "",
                                "Attempts moved to another node after a loss.");
    sm->requeues = metrics_counter(m, "baton_request_waits_total", "",
                                   "Attempts refused as busy and placed again.");
    sm->prompt_tokens = metrics_counter(m, "baton_entry_prompt_tokens_total", "",
                                        "Prompt tokens accepted by this entry node.");
    sm->output_tokens = metrics_counter(m, "baton_entry_output_tokens_total", "",
                                        "Output tokens delivered by this entry node.");
    sm->split = metrics_counter(m, "baton_placements_total", "kind=\"split\"",
                                "Attempts started, by kind.");
    sm->local = metrics_counter(m, "baton_placements_total", "kind=\"one_node\"",
                                "Attempts started, by kind.");
}

static void register_breakers(struct scheduler_metrics *sm, struct metrics *m)
{
    char labels[64];
    for (int scope = 0; scope < BREAKER_N_SCOPES; scope++)
        for (int to = 0; to < BREAKER_N_STATES; to++) {
            snprintf(labels, sizeof labels, "scope=\"%s\",to=\"%s\"",
                     breaker_scope_name((enum breaker_scope)scope),
                     breaker_state_name((enum breaker_state)to));
            sm->breaker[scope][to] = metrics_counter(
                m, "baton_breaker_transitions_total", labels,
                "Changes of the breakers that keep requests from failing nodes and pairs of "
                "nodes.");
        }
}

static struct counter *preemptions(struct metrics *m, enum pressure_action a)
{
    char labels[32];
    snprintf(labels, sizeof labels, "action=\"%s\"", pressure_action_name(a));
    return metrics_counter(m, "baton_preemptions_total", labels,
                           "Requests whose node took their KV blocks for an older one: computed "
                           "again there, or handed back to go on elsewhere.");
}

static struct counter *resumes(struct metrics *m, const char *kind)
{
    return metrics_counter(m, "baton_resumes_total", kind,
                           "Sequences whose client came back: a node still had them, they were "
                           "computed again, or could not be.");
}

static struct counter *hedges(struct metrics *m, const char *outcome)
{
    return metrics_counter(m, "baton_hedges_total", outcome,
                           "Sequences that were due for a second attempt (x-baton-hedge-ms): which "
                           "one went on; none: no other node had room, or there was no token.");
}

void scheduler_metrics_loss(struct scheduler_metrics *m, enum request_state state,
                            enum request_loss loss, enum request_action action)
{
    struct counter **c = &m->losses[state][loss][action];
    char labels[96];
    if (!*c) {
        snprintf(labels, sizeof labels, "state=\"%s\",loss=\"%s\",action=\"%s\"",
                 request_state_name(state), request_loss_name(loss), retry_action_name(action));
        *c = metrics_counter(m->registry, "baton_request_losses_total", labels,
                             "Losses of live requests by the cell of the recovery table "
                             "(docs/recovery.md), and what was done.");
    }
    counter_add(*c, 1);
}

static void register_gauges(struct scheduler_metrics *sm, struct metrics *m)
{
    sm->live = metrics_gauge(m, "baton_requests_live", "", "Live requests of this entry node.");
    sm->placing = metrics_gauge(m, "baton_requests_placing", "",
                                "Live requests that are not placed on nodes yet.");
    sm->nodes = metrics_gauge(m, "baton_nodes_seen", "", "Nodes of this topic in the last view.");
}

static void register_stages(struct scheduler_metrics *sm, struct metrics *m)
{
    sm->place_s = stage(m, "baton_request_place_seconds", "Accepted to placed and credited.");
    sm->queue_s = stage(m, "baton_request_queue_seconds",
                        "Waiting in the computing node's engine.");
    sm->prefill_s = stage(m, "baton_request_prefill_seconds", "Computing the prompt.");
    sm->kv_s = stage(m, "baton_request_kv_transfer_seconds", "First KV byte to acknowledgement.");
    sm->kv_tail_s = stage(m, "baton_request_kv_tail_seconds",
                          "KV transfer left over after the last layer was computed.");
    sm->ttft_s = stage(m, "baton_time_to_first_token_seconds", "Accepted to first token.");
    sm->tpot_s = stage(m, "baton_time_per_output_token_seconds",
                       "Mean time per output token after the first.");
    sm->decode_s = stage(m, "baton_request_decode_seconds", "First to last token.");
    sm->e2e_s = stage(m, "baton_request_seconds", "Accepted to ended.");
}

void scheduler_metrics_register(struct scheduler_metrics *sm, struct metrics *m)
{
    sm->registry = m;
    register_counters(sm, m);
    register_breakers(sm, m);
    sm->resumes_attached = resumes(m, "kind=\"attached\"");
    sm->resumes_computed = resumes(m, "kind=\"computed\"");
    sm->resumes_refused = resumes(m, "kind=\"refused\"");
    sm->hedges[0] = hedges(m, "outcome=\"first\"");
    sm->hedges[1] = hedges(m, "outcome=\"second\"");
    sm->hedges[2] = hedges(m, "outcome=\"none\"");
    for (int a = 0; a < PRESSURE_N; a++)
        sm->preemptions[a] = preemptions(m, (enum pressure_action)a);
    register_gauges(sm, m);
    register_stages(sm, m);
}

static double seconds(uint64_t ns) { return (double)ns * 1e-9; }

static void log_end(enum log_level level, const struct request *r, const struct gen_end *end)
{
    const struct gen_trace *t = &end->trace;
    log_line(level, "request end",
             "request=%016llx api_request=%s st=%s prompt=%u output=%u prefill=%s decode=%s "
             "transport=%s kv_bytes=%llu "
             "kv_rate=%.0f kv_link=%llu cached=%u cached_host=%u cached_disk=%u cached_peer=%u "
             "decode_cached=%u expected=%u decode_expected=%u recomputed=%u "
             "moves=%u drafted=%u accepted=%u place_ms=%.1f queue_ms=%.1f prefill_ms=%.1f "
             "kv_ms=%.1f kv_busy_ms=%.1f "
             "kv_tail_ms=%.1f ttft_ms=%.1f decode_ms=%.1f",
             (unsigned long long)r->id, r->name, status_name(end->status), r->n_prompt,
             end->n_output, t->prefill_node, t->decode_node,
             t->transport[0] ? t->transport : "none", (unsigned long long)t->kv_bytes,
             gen_trace_kv_rate(t), (unsigned long long)t->kv_link_speed, t->n_cached,
             t->cache.n_host, t->cache.n_disk, t->cache.n_peer, t->n_decode_cached, t->n_expected,
             t->n_decode_expected, t->n_recomputed, t->n_moves, t->n_drafted, t->n_accepted,
             seconds(t->place_ns) * 1e3, seconds(t->queue_ns) * 1e3, seconds(t->prefill_ns) * 1e3,
             seconds(t->kv_ns) * 1e3, seconds(t->kv_busy_ns) * 1e3, seconds(t->kv_tail_ns) * 1e3,
             seconds(t->first_token_ns) * 1e3, seconds(t->decode_ns) * 1e3);
}

void scheduler_metrics_begin(const struct scheduler_metrics *m, const struct request *r)
{
    log_line(m->log_requests ? LOG_INFO : LOG_DEBUG, "request begin",
             "request=%016llx api_request=%s prompt=%u max_tokens=%u", (unsigned long long)r->id,
             r->name, r->n_prompt, r->sampling.max_tokens);
}

void scheduler_metrics_end(struct scheduler_metrics *m, const struct request *r,
                           const struct gen_end *end)
{
    const struct gen_trace *t = &end->trace;
    log_end(m->log_requests ? LOG_INFO : LOG_DEBUG, r, end);
    counter_add(m->output_tokens, end->n_output);
    if (end->status == ERR_CANCELED) counter_add(m->canceled, 1);
    else if (end->status != OK) counter_add(m->failed, 1);
    else counter_add(end->finish == FINISH_LENGTH ? m->finished_length : m->finished_stop, 1);
    if (end->status != OK) return;
    histogram_observe(m->place_s, seconds(t->place_ns));
    histogram_observe(m->queue_s, seconds(t->queue_ns));
    histogram_observe(m->prefill_s, seconds(t->prefill_ns));
    histogram_observe(m->e2e_s, seconds(t->total_ns));
    if (end->n_output) histogram_observe(m->ttft_s, seconds(t->first_token_ns));
    if (end->n_output > 1) {
        histogram_observe(m->decode_s, seconds(t->decode_ns));
        histogram_observe(m->tpot_s, seconds(t->decode_ns) / (end->n_output - 1));
    }
    if (t->transport[0]) {
        histogram_observe(m->kv_s, seconds(t->kv_ns));
        histogram_observe(m->kv_tail_s, seconds(t->kv_tail_ns));
    }
}
