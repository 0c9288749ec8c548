/* admission.c - see admission.h. */
#include "scheduler/admission/admission.h"

#include <stdio.h>

#include "scheduler/admission/admission_metrics.h"
#include "scheduler/request.h"
#include "shared/base/clock.h"
#include "shared/base/json/json.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

enum { GAUGES_MS = 1000 };

/* ---- life ---- */

void admission_start(struct admission *d, const struct admission_options *o)
{
    const struct tenants *tenants = o->tenants;
    if (!tenants) {
        tenants_init(&d->open);
        tenants = &d->open;
    }
    const struct admit_options a = { .tenants = tenants, .max_queue_ms = o->max_queue_ms };
    d->admit = admit_create(&a);
    d->directory = o->directory;
    do random_bytes(&d->entry, sizeof d->entry);
    while (!d->entry);
    admission_metrics_register(&d->metrics, o->metrics, tenants);
}

void admission_stop(struct admission *d)
{
    admit_free(d->admit);
    fill_release(&d->fill);
    tenants_release(&d->open);
    mem_free(d->metrics.tenants);
    d->admit = NULL;
}

/* ---- the directory ---- */

static void on_sums(void *arg, enum status st, const struct meter_sums *sums)
{
    struct admission *d = arg;
    d->reporting = false;
    admit_on_sums(d->admit, st, sums, clock_ms());
}

static void report(struct admission *d, uint64_t now)
{
    struct meter_use uses[METER_TENANTS_MAX];
    struct meter_report r = { .entry = d->entry, .uses = uses };
    if (d->reporting || !admit_has_report(d->admit, now)) return;
    r.n_uses = admit_report(d->admit, now, uses, &r.number);
    d->reporting = directory_meter(d->directory, &r, on_sums, d) == OK;
    if (!d->reporting) admit_on_sums(d->admit, ERR_UNAVAILABLE, NULL, now);
}

void admission_tick(struct entry *e)
{
    struct admission *d = &e->admission;
    uint64_t now = clock_ms();
    report(d, now);
    if (now - d->t_gauges_ms < GAUGES_MS) return;
    d->t_gauges_ms = now;
    admission_metrics_update(&d->metrics, d->admit, now);
}

/* ---- the nodes ---- */

/* Prompt tokens per second of a node; 0: not known, or it computes none for others. */
static double prompts_per_s(const struct admission *d, const struct view *v,
                            const struct node_record *n)
{
    if (n->role == ROLE_DECODE && !v->unsplit) return 0;
    return n->prefill_tokens_per_s ? n->prefill_tokens_per_s : fill_seen_per_s(&d->fill, n->node);
}

void admission_on_view(struct admission *d, const struct view *v)
{
    struct admit_speed s = { 0 };
    uint32_t n_prefill = 0;
    for (size_t i = 0; i < v->n_nodes; i++) {
        const struct node_record *node = &v->nodes[i];
        if (node->draining || (v->model && node->model != v->model)) continue;
        double per_s = prompts_per_s(d, v, node);
        s.n_nodes++;
        s.prompts_per_s += per_s;
        s.is_guess = s.is_guess || (per_s > 0 && !node->prefill_tokens_per_s);
        n_prefill += per_s > 0;
        if (node->role == ROLE_PREFILL && !v->unsplit) continue;
        s.n_places += node->max_seqs;
        if (node->step_us) s.outputs_per_s += node->max_seqs * 1e6 / node->step_us;
    }
    if (n_prefill) s.one_prompts_per_s = s.prompts_per_s / n_prefill;
    admit_set_speed(d->admit, &s);
}

static void unfill(struct entry *e, struct request *r, bool computed)
{
    fill_remove(&e->admission.fill, &r->filled, computed, clock_ms());
    r->filled.node = 0;
}

void admission_fill(struct entry *e, struct request *r, const struct node_record *computes,
                    uint32_t tokens, uint32_t step_us)
{
    if (r->filled.node) unfill(e, r, false);
    r->filled = (struct fill_prompt){ .node = computes->node,
                                      .tokens = tokens,
                                      .per_s = computes->prefill_tokens_per_s,
                                      .step_ms = step_us / 1000,
                                      .n_entries = admit_n_entries(e->admission.admit),
                                      .goes_first = r->goes_first };
    fill_add(&e->admission.fill, &r->filled, clock_ms());
}

void admission_unfill(struct entry *e, struct request *r, bool computed)
{
    if (!r->filled.node) return;
    unfill(e, r, computed);
    if (admit_n_waiting(e->admission.admit)) e->view.events.on_capacity(e->view.events.arg);
}

/* ---- requests come ---- */

static struct admit_ask ask_of(const struct request *r)
{
    return (struct admit_ask){ .wanted = r->wanted,
                               .n_prompt = r->n_prompt,
                               .max_output = r->sampling.max_tokens,
                               .deadline_ms = r->deadline_ms,
                               .comes_back = r->resume.returns };
}

static struct request *request_of(struct admit_request *r)
{
    return LIST_ENTRY(r, struct request, admit);
}

/* One that waits ends, so that another may come; in the next turn of the loop, since sink functions
 * must not run inside submit. */
static void shed(struct entry *e, struct request *r)
{
    admission_set_retry(e, r);
    admit_leave(e->admission.admit, &r->admit, clock_ms());
    r->shed = true;
}

static enum status refuse_too_late(const struct gen_request *g, struct gen_refusal *why)
{
    char text[ADMIT_DEADLINE_MAX];
    const char *field, *deadline = admit_deadline_text(&g->admission, &field, text);
    return err_field(&why->err, ERR_TIMEOUT, field,
                     "%s, and that time was over before the request could begin", deadline);
}

enum status admission_ask(struct entry *e, const struct gen_request *g, uint32_t n_max,
                          struct gen_refusal *why)
{
    struct admission *d = &e->admission;
    const struct admit_ask q = { .wanted = g->admission,
                                 .n_prompt = g->n_tokens,
                                 .max_output = g->sampling.max_tokens,
                                 .deadline_ms = g->deadline_ms,
                                 .n_held = entry_n_requests(e),
                                 .n_max = n_max };
    struct admit_verdict v;
    uint64_t now = clock_ms();
    if (g->deadline_ms && now >= g->deadline_ms) return refuse_too_late(g, why);
    admit_ask(d->admit, &q, now, &v);
    admission_metrics_verdict(&d->metrics, &v, g->admission.tenant);
    if (v.taken && v.shed) shed(e, request_of(v.shed));
    if (v.taken) return OK;
    *why = v.why;
    return why->err.code;
}

enum status admission_ask_kept(struct entry *e, const struct gen_request *g,
                               struct gen_refusal *why)
{
    struct admission *d = &e->admission;
    struct admit_verdict v;
    if (admit_may_expect(d->admit, g->admission.tenant, clock_ms(), &v)) return OK;
    admission_metrics_verdict(&d->metrics, &v, g->admission.tenant);
    *why = v.why;
    return why->err.code;
}

void admission_push(struct entry *e, struct request *r)
{
    const struct admit_ask q = ask_of(r);
    struct admit *a = e->admission.admit;
    bool is_new = r->admit.state == ADMIT_UNKNOWN, asks = r->state == REQUEST_ATTACH;
    if (r->shed || (!is_new && r->admit.state != ADMIT_EXPECTED)) return;
    if (!asks) admit_push(a, &r->admit, &q, clock_ms());
    else if (is_new) admit_expect(a, &r->admit, &q, clock_ms());
}

void admission_adopt(struct entry *e, struct request *r)
{
    admit_adopt(e->admission.admit, &r->admit, r->wanted.tenant, clock_ms());
}

bool admission_refuses_to_compute(struct entry *e, struct request *r)
{
    struct admission *d = &e->admission;
    const struct admit_ask q = ask_of(r);
    struct admit_verdict v;
    uint64_t now = clock_ms();
    if (!r->resume.returns) return false;  /* it was asked when it came */
    admit_leave(d->admit, &r->admit, now); /* it does not count against itself */
    admit_ask(d->admit, &q, now, &v);
    admission_metrics_verdict(&d->metrics, &v, r->wanted.tenant);
    if (v.taken) return false;
    r->retry_after_s = v.why.retry_after_s;
    r->takes_others = v.why.takes_others;
    snprintf(r->retry, sizeof r->retry, "%s", v.why.retry);
    request_end(e, r, v.why.err.code, FINISH_ERROR, -1, v.why.err.text);
    return true;
}

bool admission_is_waiting(const struct request *r) { return r->admit.state == ADMIT_WAITING; }

bool admission_goes_first(struct entry *e, const struct request *r)
{
    return admit_goes_first(e->admission.admit, &r->admit, clock_ms());
}

/* ---- and go ---- */

void admission_take(struct entry *e, struct request *r)
{
    uint64_t now = clock_ms();
    if (r->admit.state != ADMIT_WAITING) return;
    histogram_observe(e->admission.metrics.wait_s, (double)(now - r->admit.t_pushed_ms) * 1e-3);
    admit_take(e->admission.admit, &r->admit, now);
}

void admission_place_line(struct entry *e)
{
    struct admit_request *next, *last = NULL;
    while ((next = admit_next(e->admission.admit)) && next != last) { /* it stays: no node lives */
        last = next;
        if (request_place(e, request_of(next)) == ERR_BUSY) return;
    }
}

uint32_t admission_next_ms(const struct entry *e)
{
    const struct admission *d = &e->admission;
    return admit_n_waiting(d->admit) ? fill_next_ms(&d->fill, clock_ms()) : 0;
}

void admission_leave(struct entry *e, struct request *r)
{
    admit_leave(e->admission.admit, &r->admit, clock_ms());
}

void admission_set_retry(struct entry *e, struct request *r)
{
    admit_refuse_late(e->admission.admit, &r->admit, clock_ms(), &r->retry_after_s, r->retry);
}

static void end_late(struct entry *e, struct request *r, enum admit_reason reason)
{
    char text[ERR_TEXT_MAX];
    const uint64_t now = clock_ms();
    uint64_t waited_ms = reason == ADMIT_WAIT ? admit_waited_ms(e->admission.admit, &r->admit, now)
                                              : now - r->admit.t_pushed_ms;
    const double waited_s = (double)waited_ms * 1e-3;
    if (!r->shed) admission_set_retry(e, r);
    r->takes_others = admit_reason_is_own(reason);
    admission_metrics_late(&e->admission.metrics, reason, r->wanted.tenant);
    if (reason == ADMIT_TTFT)
        snprintf(text, sizeof text,
                 "x-baton-ttft-ms is %u, which cannot be met any more after %.1f s in line; try "
                 "again in %u s",
                 r->wanted.ttft_ms, waited_s, r->retry_after_s);
    else if (reason == ADMIT_WAIT)
        snprintf(text, sizeof text,
                 "every node that could serve this request has been full for %.1f s; try again in "
                 "%u s",
                 waited_s, r->retry_after_s);
    else
        snprintf(text, sizeof text,
                 "this node holds as many requests as it may (--max-concurrency), and this one "
                 "gave way to another; try again in %u s",
                 r->retry_after_s);
    request_end(e, r, reason == ADMIT_SHED ? ERR_FULL : ERR_BUSY, FINISH_ERROR, -1, text);
}

bool admission_ends(struct entry *e, struct request *r)
{
    enum admit_reason reason = ADMIT_SHED;
    const bool is_late = r->shed ||
                         admit_is_late(e->admission.admit, &r->admit, clock_ms(), &reason);
    /* It waits for a node, not for its turn: --placement-timeout says for how long. */
    if (request_waits_for_nodes(e, r) && (!is_late || reason == ADMIT_WAIT)) return false;
    if (request_ends_without_nodes(e, r)) return true;
    if (is_late) end_late(e, r, reason);
    return is_late;
}

void admission_on_token(struct entry *e, struct request *r, uint32_t index)
{
    uint64_t now = r->t_last / 1000000;
    bool is_old = r->attached && index < r->resume.n_delivered;
    admit_started(e->admission.admit, &r->admit, now);
    if (!is_old) admit_charge(e->admission.admit, &r->admit, now);
}

/* ---- a second attempt ---- */

bool admission_has_room_again(struct entry *e, const struct request *r)
{
    struct admit *a = e->admission.admit;
    uint64_t n = e->n_pending_tokens + r->n_prompt; /* of all tenants: they are paid in a moment */
    return !admit_n_waiting(a) && admit_has_tokens(a, r->wanted.tenant, n, clock_ms());
}

void admission_charge_again(struct entry *e, const struct request *r)
{
    admit_charge_again(e->admission.admit, &r->admit, clock_ms());
}

void admission_hand_over(struct request *from, struct request *to)
{
    admit_hand_over(&from->admit, &to->admit);
}

/* ---- for people ---- */

void admission_describe(struct entry *e, struct buf *out)
{
    struct admission *d = &e->admission;
    const struct tenants *tenants = admit_tenants(d->admit);
    buf_add_c(out, ",\"tenants\":[");
    for (uint32_t i = 0; i < tenants->n; i++) {
        const struct tenant *t = &tenants->list[i];
        struct admit_numbers n;
        admit_numbers(d->admit, i, clock_ms(), &n);
        buf_printf(out, "%s{\"name\":", i ? "," : "");
        json_add_string(out, str_of(t->name));
        buf_printf(out,
                   ",\"class\":\"%s\",\"weight\":%u,\"waiting\":%u,\"running\":%u,"
                   "\"prompt_tokens\":%llu,\"output_tokens\":%llu,\"wait_s\":%.2f}",
                   tenant_class_name(t->class_), t->weight, n.n_waiting, n.n_running,
                   (unsigned long long)n.n_prompt_tokens, (unsigned long long)n.n_output_tokens,
                   n.wait_ms * 1e-3);
    }
    buf_add_c(out, "]");
}
