/* engine_metrics.c - the engine's metrics and the load that other threads read.
 *
 * Thread: engine (engine_set_remaining also before a sequence is posted). */
#include <stdio.h>

#include "shared/engine/engine_state.h"

/* The order of these calls is the order of /metrics. */
static void init_steps(struct engine_metrics *m, struct metrics *r)
{
    m->steps = metrics_counter(r, "baton_engine_steps_total", "", "Steps of the engine.");
    m->ahead = metrics_counter(r, "baton_engine_steps_ahead_total", "",
                               "Steps submitted to the GPU while the previous one was running.");
    m->graph_steps = metrics_counter(r, "baton_engine_steps_recorded_total", "",
                                     "Steps computed by replaying a CUDA graph.");
    m->host_sampled = metrics_counter(r, "baton_engine_steps_host_sampled_total", "",
                                      "Steps on a GPU whose tokens were sampled on the host.");
    m->abandoned = metrics_counter(r, "baton_engine_steps_abandoned_total", "",
                                   "Steps given up, and computed again, because a rank of their "
                                   "group was lost.");
    m->paced = metrics_gauge(r, "baton_engine_paced", "",
                             "1 when steps last what --pace says: no time of this node is then "
                             "one of this machine.");
    m->paced_late = metrics_counter(r, "baton_engine_paced_late_steps_total", "",
                                    "Steps that took longer than --pace says.");
    m->preemptions = metrics_counter(r, "baton_engine_preemptions_total", "",
                                     "Sequences that lost their KV blocks to an older sequence.");
    m->swaps = metrics_counter(r, "baton_engine_swaps_total", "",
                               "Preempted sequences whose KV went on from host memory.");
}

static void init_tokens(struct engine_metrics *m, struct metrics *r)
{
    m->prompt_tokens = metrics_counter(
        r, "baton_prompt_tokens_total", "",
        "Prompt tokens of sequences started here, cached ones included.");
    m->generated = metrics_counter(r, "baton_generation_tokens_total", "",
                                   "Output tokens emitted.");
    m->recomputed = metrics_counter(
        r, "baton_engine_recomputed_tokens_total", "",
        "Positions computed here although a peer had transferred them.");
    m->queried = metrics_counter(r, "baton_prefix_cache_query_tokens_total", "",
                                 "Tokens looked up in the prefix cache.");
    m->hit = metrics_counter(r, "baton_prefix_cache_hit_tokens_total", "",
                             "Tokens found in the prefix cache.");
    m->evicted = metrics_counter(r, "baton_kv_evictions_total", "",
                                 "Cached KV blocks given to another sequence.");
}

/* Named as vLLM's, but for passes. */
static void init_drafts(struct engine_metrics *m, struct metrics *r)
{
    char at[32];
    m->passes = metrics_counter(r, "baton_engine_draft_passes_total", "",
                                "Passes of the model's draft layer.");
    m->graph_passes = metrics_counter(r, "baton_engine_draft_passes_recorded_total", "",
                                      "Passes of the draft layer computed by replaying a CUDA "
                                      "graph.");
    m->drafts = metrics_counter(r, "baton_spec_decode_num_drafts_total", "",
                                "Times that drafts of a sequence were verified.");
    m->draft_tokens = metrics_counter(r, "baton_spec_decode_num_draft_tokens_total", "",
                                      "Draft tokens verified.");
    m->accepted = metrics_counter(r, "baton_spec_decode_num_accepted_tokens_total", "",
                                  "Draft tokens that were right.");
    for (int i = 0; i < DRAFT_TOKENS_MAX; i++) {
        snprintf(at, sizeof at, "position=\"%d\"", i);
        m->accepted_at[i] = metrics_counter(r,
                                            "baton_spec_decode_num_accepted_tokens_per_pos_total",
                                            at, "Draft tokens that were right, by their place.");
    }
    m->accepted_length = metrics_gauge(r, "baton_spec_decode_mean_accepted_length", "",
                                       "Tokens that a verification of drafts yielded, on average "
                                       "since the start.");
}

static struct gauge *blocks_gauge(struct metrics *r, const char *labels)
{
    return metrics_gauge(r, "baton_kv_blocks", labels, "KV blocks by state.");
}

void engine_metrics_init(struct engine_metrics *m, struct metrics *r, bool has_drafts)
{
    *m = (struct engine_metrics){ 0 };
    init_steps(m, r);
    init_tokens(m, r);
    if (has_drafts) init_drafts(m, r);
    m->running = metrics_gauge(r, "baton_engine_running", "", "Sequences being computed.");
    m->loading = metrics_gauge(r, "baton_engine_loading", "",
                               "Sequences that wait for KV blocks from a tier behind the pool.");
    m->waiting = metrics_gauge(r, "baton_engine_waiting", "", "Sequences waiting to start.");
    m->reserved = metrics_gauge(r, "baton_engine_reserved", "",
                                "Sequences whose KV is being written by a peer.");
    m->free = blocks_gauge(r, "state=\"free\"");
    m->held = blocks_gauge(r, "state=\"held\"");
    m->cached = blocks_gauge(r, "state=\"cached\"");
    m->quarantine = blocks_gauge(r, "state=\"quarantine\"");
    m->prefill_per_s = metrics_gauge(r, "baton_engine_prefill_tokens_per_second", "",
                                     "Prompt tokens per second of the last steps that were full of "
                                     "them; 0: none was.");
    m->decode_step = metrics_gauge(
        r, "baton_engine_decode_step_seconds", "",
        "Mean time of the last steps that decoded, per token that they gave "
        "a sequence; 0: none did.");
    m->step_seconds = metrics_histogram(r, "baton_engine_step_seconds", "",
                                        "Time of one step of the engine.", METRICS_SECONDS,
                                        METRICS_SECONDS_N);
}

static void add_growth(struct counter *c, uint64_t *last, uint64_t now)
{
    counter_add(c, now - *last);
    *last = now;
}

void engine_update_metrics(struct engine *e)
{
    struct engine_metrics *m = &e->metrics;
    struct kv_pool_stats k;
    kv_pool_get_stats(e->pool, &k);
    model_look_at_rows(e->opt.model);
    if (e->store) kv_store_update_metrics(e->store);
    atomic_store_explicit(&e->load.n_running, e->n_running + e->n_loading, memory_order_relaxed);
    atomic_store_explicit(&e->load.n_reserved, e->n_reserved, memory_order_relaxed);
    atomic_store_explicit(&e->load.n_blocks_free, k.n_free + k.n_cached, memory_order_relaxed);
    gauge_set(m->running, e->n_running);
    gauge_set(m->loading, e->n_loading);
    gauge_set(m->reserved, e->n_reserved);
    gauge_set(m->waiting, atomic_load_explicit(&e->load.n_waiting, memory_order_relaxed));
    gauge_set(m->free, k.n_free);
    gauge_set(m->held, k.n_held);
    gauge_set(m->cached, k.n_cached);
    gauge_set(m->quarantine, k.n_quarantine);
    add_growth(m->queried, &m->last_queried, k.prefix_queries);
    add_growth(m->hit, &m->last_hit, k.prefix_hits);
    add_growth(m->evicted, &m->last_evicted, k.evictions);
}

void engine_count_speed(struct engine *e, const struct attn_seq *seqs, uint32_t n_seqs,
                        const struct inflight_step *f, uint64_t ns)
{
    const struct pace_load l = pace_load_of(seqs, n_seqs);
    const struct engine_speed_step step = { .prompt_rows = l.prompt_rows,
                                            .decode_rows = l.decode_rows,
                                            .is_full = f->is_full,
                                            .tokens = f->n_choosers
                                                          ? (double)f->n_taken / f->n_choosers
                                                          : 1,
                                            .seconds = (double)ns * 1e-9 };
    engine_speed_count(&e->speed, &step);
    const uint32_t prefill_per_s = engine_speed_prefill_per_s(&e->speed),
                   step_us = engine_speed_step_us(&e->speed);
    atomic_store_explicit(&e->load.prefill_per_s, prefill_per_s, memory_order_relaxed);
    atomic_store_explicit(&e->load.step_us, step_us, memory_order_relaxed);
    gauge_set(e->metrics.prefill_per_s, prefill_per_s);
    gauge_set(e->metrics.decode_step, step_us * 1e-6);
}

void engine_set_remaining(struct engine *e, struct seq *s, uint32_t n)
{
    /* Unsigned wrap-around makes one addition serve both directions. */
    atomic_fetch_add_explicit(&e->load.waiting_tokens, (uint64_t)n - (uint64_t)s->n_remaining,
                              memory_order_relaxed);
    s->n_remaining = n;
}
