/* admission_metrics.c - see admission_metrics.h. */
#include "scheduler/admission/admission_metrics.h"

#include <stdio.h>

#include "shared/base/mem.h"

static void register_tenant(struct admission_metrics *m, uint32_t i, const char *name)
{
    char labels[TENANT_NAME_MAX + 48];
    struct metrics *r = m->registry;
    snprintf(labels, sizeof labels, "tenant=\"%s\",taken=\"yes\"", name);
    m->tenants[i].requests = metrics_counter(r, "baton_tenant_requests_total", labels,
                                             "Sequences that came, by tenant, and whether they "
                                             "were taken into the line.");
    snprintf(labels, sizeof labels, "tenant=\"%s\",taken=\"no\"", name);
    m->tenants[i].refused = metrics_counter(r, "baton_tenant_requests_total", labels, "");
    snprintf(labels, sizeof labels, "tenant=\"%s\",kind=\"prompt\"", name);
    m->tenants[i].prompt_tokens = metrics_counter(r, "baton_tenant_tokens_total", labels,
                                                  "Tokens that tenants were served here.");
    snprintf(labels, sizeof labels, "tenant=\"%s\",kind=\"output\"", name);
    m->tenants[i].output_tokens = metrics_counter(r, "baton_tenant_tokens_total", labels, "");
    snprintf(labels, sizeof labels, "tenant=\"%s\"", name);
    m->tenants[i].waiting = metrics_gauge(r, "baton_tenant_waiting", labels,
                                          "Sequences of a tenant in the line of this entry node.");
    m->tenants[i].running = metrics_gauge(r, "baton_tenant_running", labels,
                                          "Sequences of a tenant that were taken from the line "
                                          "and have not ended.");
}

void admission_metrics_register(struct admission_metrics *m, struct metrics *registry,
                                const struct tenants *tenants)
{
    char labels[64];
    m->registry = registry;
    for (int i = 0; i < ADMIT_N_REASONS; i++) {
        snprintf(labels, sizeof labels, "reason=\"%s\"", admit_reason_name((enum admit_reason)i));
        m->refused[i] = metrics_counter(registry, "baton_requests_rejected_total", labels,
                                        "Sequences refused by admission (docs/admission.md).");
    }
    for (int i = 0; i < 2; i++)
        m->returned[i] = metrics_counter(registry, "baton_admission_returns_total",
                                         i ? "taken=\"yes\"" : "taken=\"no\"",
                                         "Requests that came again when a refusal had told them "
                                         "to.");
    m->wait_s = metrics_histogram(registry, "baton_admission_wait_seconds", "",
                                  "From a request's arrival in the line to its turn.",
                                  METRICS_SECONDS, METRICS_SECONDS_N);
    m->tenants = mem_calloc(tenants->n, sizeof *m->tenants);
    for (uint32_t i = 0; i < tenants->n; i++) register_tenant(m, i, tenants->list[i].name);
}

void admission_metrics_verdict(struct admission_metrics *m, const struct admit_verdict *v,
                               uint32_t tenant)
{
    counter_add(v->taken ? m->tenants[tenant].requests : m->tenants[tenant].refused, 1);
    if (!v->taken) counter_add(m->refused[v->reason], 1);
    if (v->was_promised) counter_add(m->returned[v->taken], 1);
}

void admission_metrics_late(struct admission_metrics *m, enum admit_reason reason, uint32_t tenant)
{
    counter_add(m->refused[reason], 1);
    counter_add(m->tenants[tenant].refused, 1);
}

void admission_metrics_update(struct admission_metrics *m, struct admit *a, uint64_t now_ms)
{
    for (uint32_t i = 0; i < admit_tenants(a)->n; i++) {
        struct admit_numbers n;
        admit_numbers(a, i, now_ms, &n);
        gauge_set(m->tenants[i].waiting, n.n_waiting);
        gauge_set(m->tenants[i].running, n.n_running);
        counter_add(m->tenants[i].prompt_tokens, n.n_prompt_tokens - m->tenants[i].n_prompt_tokens);
        counter_add(m->tenants[i].output_tokens, n.n_output_tokens - m->tenants[i].n_output_tokens);
        m->tenants[i].n_prompt_tokens = n.n_prompt_tokens;
        m->tenants[i].n_output_tokens = n.n_output_tokens;
    }
}
