/* admit_sim.h - a cluster in simulated time before scheduler/admission/admit.h: nodes that compute
 * prompts one after the other, places in which answers are generated, and clients that come back
 * when they are told. Everything follows from the seed. Included by one test program each. */
#ifndef BATON_TESTS_UNIT_SCHEDULER_ADMIT_SIM_H
#define BATON_TESTS_UNIT_SCHEDULER_ADMIT_SIM_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "scheduler/admission/admit.h"
#include "scheduler/admission/fill.h"
#include "shared/base/mem.h"
#include "shared/base/rng.h"
#include "tests/harness/test.h"

enum {
    SIM_NODES = 3,
    SIM_NODE_PER_S = 4000, /* prompt tokens of a node */
    SIM_PROMPT = 200,      /* tokens, in the mean */
    SIM_OUTPUT = 60,       /* likewise */
    SIM_STEP_MS = 20,      /* between two tokens of an answer */
    SIM_PLACES = 90,       /* answers at once */
    SIM_LIVE_MAX = 2048,
    SIM_BACK_MAX = 1 << 20, /* clients that wait to come back */
    SIM_TENANTS_MAX = 4,
    SIM_START = 1000000 /* ms */
};

enum sim_state { SIM_FREE, SIM_WAITS, SIM_PROMPTS, SIM_ANSWERS };

struct sim_request {
    struct admit_request admit; /* first */
    enum sim_state state;
    struct gen_admission wanted;
    uint32_t n_prompt, n_output, n_out;
    int node;
    uint64_t t_came, t_computed, t_next;
};

struct sim_client { /* that was told to come back */
    uint64_t due_ms;
    struct gen_admission wanted;
    uint32_t n_prompt, n_output;
    uint32_t n_tries;
};

struct sim_tenant {
    double per_s; /* new requests */
    uint32_t ttft_ms;
    uint32_t deadline_ms;
    double honest; /* share of the refused that come back */
    bool tells;    /* ... with x-baton-retry */
    uint64_t n_new, n_taken, n_ended, n_late, n_refused, n_back, n_back_taken, n_shed;
    uint64_t tokens;                      /* of ended answers and their prompts, in time */
    uint64_t n_ttft, ttft_over, ttft[64]; /* by 100 ms */
    uint32_t told_max_s;                  /* the longest Retry-After */
};

struct sim {
    struct admit *a;
    struct tenants tenants;
    struct sim_tenant t[SIM_TENANTS_MAX];
    uint64_t now;
    uint64_t seed, n_drawn;
    struct sim_request *live; /* [SIM_LIVE_MAX], of which the first n_used were ever used */
    uint32_t n_used, n_live;
    double leave_per_s; /* of live requests, how many clients leave */
    uint32_t n_places;  /* taken */
    struct fill fill;
    uint64_t node_free_ms[SIM_NODES]; /* when its last prompt will be computed */
    struct sim_client *back;          /* a heap by due_ms */
    size_t n_back;
    uint32_t max_live;
    uint64_t n_begun, n_ended; /* of all, for the checks */
    uint64_t busy_ms;          /* of nodes that computed */
    double slower;             /* nodes take longer than they publish */
};

static void sim_open(struct sim *s, const char *keys, uint32_t max_queue_ms, uint64_t seed)
{
    struct err err = { 0 };
    *s = (struct sim){ .now = SIM_START, .max_live = SIM_LIVE_MAX - 64, .slower = 1 };
    tenants_init(&s->tenants);
    if (keys && tenants_parse(&s->tenants, str_of(keys), "keys", &err) != OK)
        test_fail(__FILE__, __LINE__, "%s", err.text);
    CHECK(s->tenants.n <= SIM_TENANTS_MAX);
    const struct admit_options o = { &s->tenants, max_queue_ms };
    s->a = admit_create(&o);
    const struct admit_speed speed = { .prompts_per_s = SIM_NODES * SIM_NODE_PER_S,
                                       .one_prompts_per_s = SIM_NODE_PER_S,
                                       .outputs_per_s = SIM_PLACES * 1000.0 / SIM_STEP_MS,
                                       .n_places = SIM_PLACES };
    admit_set_speed(s->a, &speed);
    s->seed = seed;
    s->live = MEM_ARRAY(struct sim_request, SIM_LIVE_MAX);
    s->back = MEM_ARRAY(struct sim_client, SIM_BACK_MAX);
    for (int i = 0; i < SIM_TENANTS_MAX; i++) {
        s->t[i].honest = 1;
        s->t[i].tells = true;
    }
}

static void sim_close(struct sim *s)
{
    admit_free(s->a);
    tenants_release(&s->tenants);
    fill_release(&s->fill);
    mem_free(s->live);
    mem_free(s->back);
}

/* Requests a second that the nodes can compute. */
__attribute__((unused)) static double sim_capacity(void)
{
    double prompts = (double)SIM_NODES * SIM_NODE_PER_S / SIM_PROMPT,
           answers = SIM_PLACES * 1000.0 / (SIM_OUTPUT * SIM_STEP_MS);
    return prompts < answers ? prompts : answers;
}

static double uniform(struct sim *s) { return rng_uniform(s->seed, 0, s->n_drawn++); }

/* ---- clients that come back ---- */

static void back_push(struct sim *s, struct sim_client c)
{
    CHECK(s->n_back < SIM_BACK_MAX);
    size_t i = s->n_back++;
    for (; i && s->back[(i - 1) / 2].due_ms > c.due_ms; i = (i - 1) / 2)
        s->back[i] = s->back[(i - 1) / 2];
    s->back[i] = c;
}

static struct sim_client back_pop(struct sim *s)
{
    struct sim_client first = s->back[0], last = s->back[--s->n_back];
    size_t i = 0;
    for (size_t k = 1; k < s->n_back; k = 2 * i + 1) {
        if (k + 1 < s->n_back && s->back[k + 1].due_ms < s->back[k].due_ms) k++;
        if (s->back[k].due_ms >= last.due_ms) break;
        s->back[i] = s->back[k];
        i = k;
    }
    s->back[i] = last;
    return first;
}

/* ---- requests ---- */

static struct sim_request *free_slot(struct sim *s)
{
    s->n_live++;
    for (uint32_t i = 0; i < SIM_LIVE_MAX; i++) {
        if (s->live[i].state != SIM_FREE) continue;
        if (i >= s->n_used) s->n_used = i + 1;
        return &s->live[i];
    }
    test_fail(__FILE__, __LINE__, "the simulation has too many live requests");
}

static void come_back(struct sim *s, struct sim_client c, uint32_t after_s, const char *retry)
{
    struct sim_tenant *t = &s->t[c.wanted.tenant];
    t->n_refused++;
    CHECK(after_s >= 1 && after_s <= 3600);
    if (after_s > t->told_max_s) t->told_max_s = after_s;
    if (uniform(s) >= t->honest) return;
    snprintf(c.wanted.retry, sizeof c.wanted.retry, "%s", t->tells ? retry : "");
    c.due_ms = s->now + (uint64_t)after_s * 1000 + (uint64_t)(uniform(s) * 50);
    c.n_tries++;
    back_push(s, c);
}

static void end(struct sim *s, struct sim_request *r)
{
    admit_leave(s->a, &r->admit, s->now);
    r->state = SIM_FREE;
    s->n_live--;
    s->n_ended++;
}

static void refuse_waiting(struct sim *s, struct sim_request *r, uint64_t *count)
{
    struct sim_client c = { .wanted = r->wanted, .n_prompt = r->n_prompt, .n_output = r->n_output };
    uint32_t after_s;
    char retry[GEN_RETRY_MAX];
    (*count)++;
    admit_refuse_late(s->a, &r->admit, s->now, &after_s, retry);
    end(s, r);
    come_back(s, c, after_s, retry);
}

static void come(struct sim *s, struct sim_client c)
{
    struct sim_tenant *t = &s->t[c.wanted.tenant];
    struct admit_ask q = { .wanted = c.wanted,
                           .n_prompt = c.n_prompt,
                           .max_output = 4 * SIM_OUTPUT };
    struct admit_verdict v;
    q.n_held = s->n_live;
    q.n_max = s->max_live;
    if (c.wanted.deadline_ms) q.deadline_ms = s->now + c.wanted.deadline_ms;
    admit_ask(s->a, &q, s->now, &v);
    if (c.n_tries == 1) {
        t->n_back++;
        t->n_back_taken += v.taken;
    }
    if (!v.taken) {
        CHECK(v.why.err.code < OK && v.why.err.text[0]);
        CHECK(!strchr(v.why.err.text, '\n'));
        come_back(s, c, v.why.retry_after_s, v.why.retry);
        return;
    }
    if (v.shed) refuse_waiting(s, (struct sim_request *)v.shed, &s->t[v.shed->tenant].n_shed);
    struct sim_request *r = free_slot(s);
    *r = (struct sim_request){ .state = SIM_WAITS,
                               .wanted = c.wanted,
                               .n_prompt = c.n_prompt,
                               .n_output = c.n_output,
                               .t_came = s->now };
    t->n_taken++;
    s->n_begun++;
    admit_push(s->a, &r->admit, &q, s->now);
}

static void come_new(struct sim *s, uint32_t tenant)
{
    struct sim_client c = { .wanted = { .tenant = tenant,
                                        .ttft_ms = s->t[tenant].ttft_ms,
                                        .deadline_ms = s->t[tenant].deadline_ms } };
    c.n_prompt = (uint32_t)(SIM_PROMPT * (0.5 + uniform(s)));
    c.n_output = 1 + (uint32_t)(SIM_OUTPUT * (0.5 + uniform(s)));
    s->t[tenant].n_new++;
    come(s, c);
}

/* ---- nodes ---- */

static bool is_enough(const struct sim *s, uint64_t node)
{
    uint64_t nodes[SIM_NODES];
    size_t n = fill_enough(&s->fill, s->now, nodes, SIM_NODES);
    for (size_t i = 0; i < n; i++)
        if (nodes[i] == node) return true;
    return false;
}

static int best_node(const struct sim *s)
{
    int best = -1;
    for (int i = 0; i < SIM_NODES; i++)
        if (!is_enough(s, (uint64_t)i + 1) &&
            (best < 0 || s->node_free_ms[i] < s->node_free_ms[best]))
            best = i;
    return best;
}

static struct fill_prompt prompt_of(const struct sim_request *r)
{
    return (struct fill_prompt){ .node = (uint64_t)r->node + 1,
                                 .tokens = r->n_prompt,
                                 .per_s = SIM_NODE_PER_S,
                                 .step_ms = SIM_STEP_MS,
                                 .n_entries = 1 };
}

static void place(struct sim *s)
{
    struct admit_request *next;
    while ((next = admit_next(s->a)) && s->n_places < SIM_PLACES) {
        struct sim_request *r = (struct sim_request *)next;
        int node = best_node(s);
        if (node < 0) return;
        uint64_t begin = s->node_free_ms[node] > s->now ? s->node_free_ms[node] : s->now,
                 takes = (uint64_t)(r->n_prompt * 1000.0 / SIM_NODE_PER_S * s->slower);
        CHECK_EQ_INT(r->state, SIM_WAITS);
        admit_take(s->a, next, s->now);
        s->busy_ms += takes;
        s->n_places++;
        r->state = SIM_PROMPTS;
        r->node = node;
        const struct fill_prompt p = prompt_of(r);
        fill_add(&s->fill, &p, s->now);
        r->t_computed = s->node_free_ms[node] = begin + takes;
    }
}

static void note_ttft(struct sim *s, struct sim_request *r)
{
    struct sim_tenant *t = &s->t[r->wanted.tenant];
    uint64_t ms = s->now - r->t_came;
    size_t i = (size_t)(ms / 100);
    t->n_ttft++;
    t->ttft[i < 63 ? i : 63]++;
    t->ttft_over += r->wanted.ttft_ms && ms > r->wanted.ttft_ms;
}

static void answer(struct sim *s, struct sim_request *r)
{
    admit_started(s->a, &r->admit, s->now);
    admit_charge(s->a, &r->admit, s->now);
    r->t_next = s->now + SIM_STEP_MS;
    if (++r->n_out < r->n_output) return;
    s->t[r->wanted.tenant].n_ended++;
    s->t[r->wanted.tenant].tokens += r->n_prompt + r->n_out;
    s->n_places--;
    end(s, r);
}

/* The client leaves, wherever its request is. */
static void leave(struct sim *s, struct sim_request *r)
{
    const struct fill_prompt p = prompt_of(r);
    if (r->state == SIM_PROMPTS) fill_remove(&s->fill, &p, false, s->now);
    if (r->state != SIM_WAITS) s->n_places--;
    end(s, r);
}

static void step_request(struct sim *s, struct sim_request *r)
{
    enum admit_reason why;
    if (s->leave_per_s > 0 && uniform(s) < s->leave_per_s / 1000) {
        leave(s, r);
        return;
    }
    if (r->state == SIM_WAITS && admit_is_late(s->a, &r->admit, s->now, &why))
        refuse_waiting(s, r, &s->t[r->wanted.tenant].n_late);
    if (r->state == SIM_PROMPTS && s->now >= r->t_computed) {
        const struct fill_prompt p = prompt_of(r);
        fill_remove(&s->fill, &p, true, s->now);
        r->state = SIM_ANSWERS;
        note_ttft(s, r);
        answer(s, r);
    } else if (r->state == SIM_ANSWERS && s->now >= r->t_next) {
        answer(s, r);
    }
}

/* ---- time ---- */

static void check_sums(struct sim *s)
{
    uint32_t waiting = 0, of_all = 0;
    for (uint32_t i = 0; i < s->n_used; i++) {
        waiting += s->live[i].state == SIM_WAITS;
        CHECK((s->live[i].state == SIM_WAITS) == (s->live[i].admit.state == ADMIT_WAITING));
    }
    CHECK_EQ_INT(admit_n_waiting(s->a), waiting);
    for (uint32_t i = 0; i < s->tenants.n; i++) {
        struct admit_numbers n;
        admit_numbers(s->a, i, s->now, &n);
        of_all += n.n_waiting + n.n_running;
    }
    CHECK_EQ_INT(of_all, s->n_live);
    CHECK_EQ_INT(s->n_begun - s->n_ended, s->n_live); /* none is lost */
}

static void sim_run(struct sim *s, uint32_t seconds)
{
    uint64_t until = s->now + (uint64_t)seconds * 1000;
    for (; s->now < until; s->now++) {
        for (uint32_t i = 0; i < s->tenants.n; i++)
            if (uniform(s) < s->t[i].per_s / 1000) come_new(s, i);
        while (s->n_back && s->back[0].due_ms <= s->now) come(s, back_pop(s));
        for (uint32_t i = 0; i < s->n_used; i++)
            if (s->live[i].state != SIM_FREE) step_request(s, &s->live[i]);
        place(s);
        if (s->now % 1000 == 0) check_sums(s);
    }
}

static double p99_ms(const struct sim_tenant *t)
{
    uint64_t n = 0, least = t->n_ttft - t->n_ttft / 100;
    for (size_t i = 0; i < 64; i++)
        if ((n += t->ttft[i]) >= least) return (double)(i + 1) * 100;
    return 6400;
}

__attribute__((unused)) static void sim_print(const struct sim *s, uint32_t seconds)
{
    for (uint32_t i = 0; i < s->tenants.n; i++) {
        const struct sim_tenant *t = &s->t[i];
        printf(
            "%-8s new %llu taken %llu ended %llu (%.1f/s) refused %llu back %llu taken %.3f late "
            "%llu shed %llu over %llu p99 %.0f ms tokens/s %.0f told %u s at most\n",
            s->tenants.list[i].name, (unsigned long long)t->n_new, (unsigned long long)t->n_taken,
            (unsigned long long)t->n_ended, (double)t->n_ended / seconds,
            (unsigned long long)t->n_refused, (unsigned long long)t->n_back,
            t->n_back ? (double)t->n_back_taken / (double)t->n_back : 0,
            (unsigned long long)t->n_late, (unsigned long long)t->n_shed,
            (unsigned long long)t->ttft_over, p99_ms(t), (double)t->tokens / seconds,
            t->told_max_s);
    }
}

#endif
