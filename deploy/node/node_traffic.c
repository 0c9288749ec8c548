/* node_traffic.c - see node_traffic.h. Every rank hears in each step what all others did
 * (shared/engine/engine_ranks.c), so that any of them can be asked for the whole group. */
#include "deploy/node/node_traffic.h"

#include <stdio.h>
#include <string.h>

#include "deploy/node/node_internal.h"
#include "shared/base/clock.h"
#include "shared/model/expert_rows.h"

enum {
    LOOK_MS = 1000,
    /* A rank has series for the experts that it computed, so a group has about as many as there
     * are experts. With more of them, the imbalance has to do. */
    EXPERT_SERIES_MAX = 256,
    WORTH_SAYING_PERCENT = 1 /* of the time; less is not called waiting for a rank */
};

struct rank_rate {
    double rows_per_s, waits; /* waits: part of the time */
};

struct node_traffic {
    struct node *node;
    uint32_t size, rank, n_experts;
    struct loop_timer *timer;
    uint64_t t_ms;                  /* of the last look */
    struct engine_rank *now, *last; /* [size] */
    struct rank_rate *rates;        /* [size] */
    double imbalance;               /* of the last look with rows; 0: none yet */
    int32_t waits_for;              /* the rank that this one waited for most; -1: for nobody */
    uint64_t *load, *last_load;     /* [n_experts] */
    struct counter **by_expert;     /* [n_experts]; NULL: no rows yet */
    struct counter **late;          /* [size]; NULL: not waited for yet */
    struct counter *waited, *sent, *received;
    uint64_t last_sent, last_received;
    struct gauge *imbalance_gauge;
};

/* ---- counting ---- */

static void grow(struct counter *c, uint64_t *last, uint64_t now)
{
    counter_add(c, now - *last);
    *last = now;
}

static struct counter *rank_counter(struct node_traffic *t, uint32_t rank)
{
    char labels[32];
    snprintf(labels, sizeof labels, "rank=\"%u\"", rank);
    return metrics_counter(t->node->metrics, "baton_group_late_microseconds_total", labels,
                           "Time that this rank waited for the rank that the others of a step did "
                           "not have to wait for, by that rank.");
}

static struct counter *expert_counter(struct node_traffic *t, uint32_t expert)
{
    char labels[32];
    snprintf(labels, sizeof labels, "expert=\"%u\"", expert);
    return metrics_counter(t->node->metrics, "baton_expert_rows_total", labels,
                           "Rows that this rank's copy of the expert computed, in all layers.");
}

/* Series begin with their first row. */
static void count_experts(struct node_traffic *t)
{
    if (t->n_experts > EXPERT_SERIES_MAX) return;
    model_expert_load(engine_model(t->node->engine), t->load);
    for (uint32_t e = 0; e < t->n_experts; e++) {
        if (t->load[e] == t->last_load[e]) continue;
        if (!t->by_expert[e]) t->by_expert[e] = expert_counter(t, e);
        grow(t->by_expert[e], &t->last_load[e], t->load[e]);
    }
}

static void count_waits(struct node_traffic *t)
{
    counter_add(t->waited, t->now[t->rank].wait_us - t->last[t->rank].wait_us);
    for (uint32_t r = 0; r < t->size; r++) {
        const uint64_t late = t->now[r].late_us - t->last[r].late_us;
        if (late == 0) continue;
        if (!t->late[r]) t->late[r] = rank_counter(t, r);
        counter_add(t->late[r], late);
    }
}

/* ---- rates ---- */

/* The busiest rank's rows by the mean of the group's. */
static void find_imbalance(struct node_traffic *t)
{
    const uint32_t n = group_now(t->node->group)->n;
    uint64_t most = 0, all = 0;
    for (uint32_t r = 0; r < t->size; r++) {
        const uint64_t rows = t->now[r].rows - t->last[r].rows;
        all += rows;
        if (rows > most) most = rows;
    }
    if (all == 0) return;
    t->imbalance = (double)most * n / (double)all;
    gauge_set(t->imbalance_gauge, t->imbalance);
}

static void find_rates(struct node_traffic *t, uint64_t ms)
{
    uint64_t most = ms * 1000 * WORTH_SAYING_PERCENT / 100;
    t->waits_for = -1;
    for (uint32_t r = 0; r < t->size; r++) {
        const uint64_t late = t->now[r].late_us - t->last[r].late_us;
        t->rates[r] = (struct rank_rate){
            .rows_per_s = (double)(t->now[r].rows - t->last[r].rows) * 1e3 / (double)ms,
            .waits = (double)(t->now[r].wait_us - t->last[r].wait_us) * 1e-3 / (double)ms,
        };
        if (t->rates[r].waits > 1) t->rates[r].waits = 1; /* words come a step late */
        if (late < most) continue;
        most = late;
        t->waits_for = (int32_t)r;
    }
}

static void on_look(void *arg)
{
    struct node_traffic *t = arg;
    struct engine_stats st;
    const uint64_t now = clock_ms();
    if (!t->node->engine || !t->node->group || now == t->t_ms) return;
    engine_get_ranks(t->node->engine, t->size, t->now);
    engine_get_stats(t->node->engine, &st);
    grow(t->sent, &t->last_sent, st.sent);
    grow(t->received, &t->last_received, st.received);
    count_experts(t);
    count_waits(t);
    find_imbalance(t);
    find_rates(t, now - t->t_ms);
    memcpy(t->last, t->now, t->size * sizeof *t->last);
    t->t_ms = now;
}

/* ---- telling ---- */

static void describe_rate(const struct rank_rate *r, struct buf *out)
{
    buf_printf(out, "\"rows_per_s\":%.1f,\"waits\":%.3f", r->rows_per_s, r->waits);
}

void node_traffic_describe(const struct node_traffic *t, struct buf *out)
{
    struct engine_stats st;
    engine_get_stats(t->node->engine, &st);
    buf_printf(out, ",\"backend\":\"%s\",", st.ep_backend ? st.ep_backend : "");
    describe_rate(&t->rates[t->rank], out);
    if (t->waits_for >= 0) buf_printf(out, ",\"waits_for\":%d", t->waits_for);
    else buf_add_c(out, ",\"waits_for\":null");
    buf_printf(out, ",\"imbalance\":%.3f,\"ranks\":[", t->imbalance);
    for (uint32_t r = 0; r < t->size; r++) {
        buf_printf(out, "%s{\"rank\":%u,", r ? "," : "", r);
        describe_rate(&t->rates[r], out);
        buf_add_char(out, '}');
    }
    buf_add_char(out, ']');
}

/* ---- life ---- */

static struct counter *bytes_counter(struct metrics *m, const char *labels)
{
    return metrics_counter(m, "baton_ep_bytes_total", labels,
                           "Bytes of rows and results from and to other ranks; in shared memory "
                           "those that are read in place.");
}

static void create_metrics(struct node_traffic *t, struct metrics *m)
{
    t->waited = metrics_counter(m, "baton_group_wait_microseconds_total", "",
                                "Time that this rank waited for others in steps of its group.");
    t->sent = bytes_counter(m, "direction=\"sent\"");
    t->received = bytes_counter(m, "direction=\"received\"");
    t->imbalance_gauge = metrics_gauge(m, "baton_group_imbalance", "",
                                       "Rows that the experts of the group's busiest rank "
                                       "computed, by the mean of all ranks, in the last second "
                                       "with rows.");
}

struct node_traffic *node_traffic_create(struct node *n)
{
    struct node_traffic *t = MEM_NEW(struct node_traffic);
    t->node = n;
    t->size = n->o.group.size;
    t->rank = n->o.group.rank;
    t->n_experts = engine_model(n->engine)->config.moe.n_experts;
    t->t_ms = clock_ms();
    t->waits_for = -1;
    t->now = MEM_ARRAY(struct engine_rank, t->size);
    t->last = MEM_ARRAY(struct engine_rank, t->size);
    t->rates = MEM_ARRAY(struct rank_rate, t->size);
    t->load = MEM_ARRAY(uint64_t, t->n_experts);
    t->last_load = MEM_ARRAY(uint64_t, t->n_experts);
    t->by_expert = MEM_ARRAY(struct counter *, t->n_experts);
    t->late = MEM_ARRAY(struct counter *, t->size);
    create_metrics(t, n->metrics);
    t->timer = loop_timer_start(n->loop, LOOK_MS, LOOK_MS, on_look, t);
    return t;
}

void node_traffic_free(struct node_traffic *t)
{
    if (!t) return;
    loop_timer_free(t->timer);
    mem_free(t->now);
    mem_free(t->last);
    mem_free(t->rates);
    mem_free(t->load);
    mem_free(t->last_load);
    mem_free(t->by_expert);
    mem_free(t->late);
    mem_free(t);
}
