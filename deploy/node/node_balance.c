/* node_balance.c - reports, and the leader's choice. A report is u32 little endian [sparse layers,
 * experts]: rows since the last one. Thread: loop. */
#include "deploy/node/node_balance.h"

#include <string.h>

#include "deploy/node/node_internal.h"
#include "deploy/node/node_placement.h"
#include "shared/base/json/json.h"
#include "shared/base/log.h"
#include "shared/model/expert_rows.h"

enum { LOOK_MS = 50, WORD = 4, STEPS = 3000, REDUNDANT_MAX = 1024 };

/* A change reads experts and takes memory for a while, so it has to be worth something. */
static const double ENOUGH = 1.05;

struct balance_job;

struct node_balance {
    struct node *node;
    int32_t n_layers, n_experts;
    uint64_t n_steps;       /* at the last report */
    uint64_t *now, *before; /* rows of this rank, since the start; of the last report */
    /* The leader's: */
    bool *has_reported; /* [size] since the last choice */
    uint64_t *sum;      /* of their reports */
    uint64_t *load;     /* of the last choice */
    bool has_load;
    struct balance_out best; /* for it, with all ranks; first NULL: not computed */
    struct balance_job *job; /* that a worker has; NULL: none */
    struct loop_timer *timer;
    struct gauge *imbalance;
};

static size_t n_counts(const struct node_balance *b)
{
    return (size_t)b->n_layers * (size_t)b->n_experts;
}

/* ---- options ---- */

/* Of vLLM's JSON. */
static enum status check_members(const cJSON *doc, struct err *err)
{
    static const char *const KNOWN[] = { "window_size", "step_interval", "num_redundant_experts",
                                         "log_balancedness" };
    const cJSON *v;
    if (!cJSON_IsObject(doc))
        return err_field(err, ERR_CONFIG, "eplb-config", "it is not a JSON object");
    cJSON_ArrayForEach (v, doc) {
        bool known = false;
        for (size_t i = 0; i < COUNT_OF(KNOWN); i++) known |= strcmp(v->string, KNOWN[i]) == 0;
        if (!known)
            return err_field(err, ERR_CONFIG, "eplb-config",
                             "there is no member '%.80s'; window_size, step_interval, "
                             "num_redundant_experts and log_balancedness are known",
                             v->string);
    }
    return OK;
}

static enum status read_members(const cJSON *doc, struct node_balance_options *o, struct err *err)
{
    int64_t steps = o->step_interval, n_redundant = o->n_redundant, window;
    TRY(check_members(doc, err));
    TRY(json_get_i64(doc, "step_interval", 1, UINT32_MAX, &steps, err));
    /* Rows count since the last report: a window of step_interval steps. */
    TRY(json_get_i64(doc, "window_size", 1, UINT32_MAX, &window, err));
    TRY(json_get_i64(doc, "num_redundant_experts", 0, REDUNDANT_MAX, &n_redundant, err));
    TRY(json_get_bool(doc, "log_balancedness", &o->logs, err));
    o->step_interval = (uint32_t)steps;
    o->n_redundant = (int32_t)n_redundant;
    return OK;
}

enum status node_balance_read(const struct config *c, struct node_balance_options *out,
                              struct err *err)
{
    const char *json = config_string(c, "eplb-config");
    cJSON *doc = NULL;
    *out = (struct node_balance_options){
        .enabled = config_bool(c, "enable-eplb"),
        .step_interval = STEPS,
        .n_redundant = (int32_t)config_int(c, "num-redundant-experts"),
    };
    if (!json) return OK;
    enum status st = json_parse(str_of(json), false, &doc, err);
    if (st == OK) st = read_members(doc, out, err);
    cJSON_Delete(doc);
    return st == OK ? OK : err_prefix(err, "--eplb-config: ");
}

enum status node_balance_check_copies(uint32_t n_experts, uint32_t n_copies, struct err *err)
{
    if (n_experts + n_copies <= KERNEL_EXPERTS_MAX) return OK;
    return err_field(err, ERR_CONFIG, "num-redundant-experts",
                     "--num-redundant-experts %u and the model's %u experts are more than the %d "
                     "that can be placed",
                     n_copies, n_experts, KERNEL_EXPERTS_MAX);
}

/* ---- reports ---- */

static void report(struct node_balance *b)
{
    struct buf out = { 0 };
    model_expert_rows(engine_model(b->node->engine), b->now);
    for (size_t i = 0; i < n_counts(b); i++) {
        const uint64_t rows = b->now[i] - b->before[i];
        buf_add_u32le(&out, rows > UINT32_MAX ? UINT32_MAX : (uint32_t)rows);
    }
    memcpy(b->before, b->now, n_counts(b) * sizeof *b->now);
    group_report_load(b->node->group, buf_str(&out));
    buf_release(&out);
}

static void on_look(void *arg)
{
    struct node_balance *b = arg;
    struct engine_stats st;
    if (!b->node->engine || !b->node->group) return;
    engine_get_stats(b->node->engine, &st);
    if (st.n_steps - b->n_steps < b->node->o.balance.step_interval) return;
    b->n_steps = st.n_steps;
    report(b);
}

/* ---- the choice ---- */

/* What a worker computes from the reports of all: for many layers and ranks it takes longer than
 * the loop may be held up. */
struct balance_job {
    struct node_balance *owner; /* of the loop; NULL: it is gone */
    uint64_t *load;             /* [n_layers, n_experts] */
    int32_t n_layers, n_experts, size, n_groups, n_redundant;
    struct group_roster now;
    struct balance_out best;
    double has, could; /* imbalances */
};

/* Of all layers together, each by its rows. */
static double imbalance_of(const struct balance_job *j, const struct balance_out *p)
{
    double all = 0, weighted = 0;
    for (int32_t layer = 0; layer < j->n_layers; layer++) {
        double rows = 0;
        for (int32_t e = 0; e < j->n_experts; e++)
            rows += (double)j->load[(size_t)layer * (size_t)j->n_experts + (size_t)e];
        /* The function adds the map's own place among the loads: with one map, that of layer 0. */
        const int32_t map = p->n_maps > 1 ? layer : 0;
        weighted += rows * balance_imbalance(
                               p, j->load + (size_t)(layer - map) * (size_t)j->n_experts, map);
        all += rows;
    }
    return all > 0 ? weighted / all : 1;
}

/* The imbalance of the group's placement; of one that cannot be read: 1. */
static double imbalance_now(const struct balance_job *j)
{
    struct balance_out p;
    struct err err;
    if (node_placement_read(&j->now, j->n_experts, &p, &err) != OK) return 1;
    const double has = imbalance_of(j, &p);
    balance_release(&p);
    return has;
}

/* Hosts with equally many ranks, one host's after the other's; 1 where it is not so. */
static int32_t hosts_of(const struct group_roster *r)
{
    uint32_t run = 1;
    while (run < r->n && strcmp(r->members[run].host, r->members[0].host) == 0) run++;
    for (uint32_t i = 0; i < r->n; i++)
        for (uint32_t k = 0; k < r->n; k++) {
            const bool same = strcmp(r->members[i].host, r->members[k].host) == 0;
            if (same != (i / run == k / run)) return 1;
        }
    return r->n % run == 0 ? (int32_t)(r->n / run) : 1;
}

/* The best placement of all ranks, for the time when all are there. Thread: a worker. */
static void find_best(void *arg)
{
    struct balance_job *j = arg;
    const bool is_whole = (int32_t)j->now.n == j->size;
    j->has = imbalance_now(j);
    j->best = balance_eplb(j->load, j->n_layers, j->n_experts, j->size,
                           is_whole ? hosts_of(&j->now) : 1, j->n_groups, j->n_redundant);
    j->could = is_whole ? imbalance_of(j, &j->best) : j->has;
}

static void free_job(struct balance_job *j)
{
    group_roster_clear(&j->now);
    balance_release(&j->best);
    mem_free(j->load);
    mem_free(j);
}

static void on_best(void *arg)
{
    struct balance_job *j = arg;
    struct node_balance *b = j->owner;
    if (!b) {
        free_job(j);
        return;
    }
    b->job = NULL;
    gauge_set(b->imbalance, j->has);
    memcpy(b->load, j->load, n_counts(b) * sizeof *b->load);
    b->has_load = true;
    balance_release(&b->best);
    b->best = j->best;
    j->best = (struct balance_out){ 0 };
    const bool is_worth_it = j->has > j->could * ENOUGH;
    if (is_worth_it && b->node->o.balance.logs)
        log_info("experts are placed anew", "imbalance=%.2f becomes=%.2f", j->has, j->could);
    free_job(j);
    if (is_worth_it && b->node->group) group_renew(b->node->group);
}

/* All ranks have reported. */
static void choose(struct node_balance *b)
{
    struct balance_job *j = MEM_NEW(struct balance_job);
    *j = (struct balance_job){
        .owner = b,
        .load = MEM_ARRAY(uint64_t, n_counts(b)),
        .n_layers = b->n_layers,
        .n_experts = b->n_experts,
        .size = (int32_t)b->node->o.group.size,
        .n_groups = (int32_t)engine_model(b->node->engine)->config.moe.n_groups,
        .n_redundant = b->node->o.balance.n_redundant,
    };
    memcpy(j->load, b->sum, n_counts(b) * sizeof *b->sum);
    group_roster_copy(&j->now, group_now(b->node->group));
    if (loop_work(b->node->loop, find_best, on_best, j) != OK) {
        free_job(j); /* with the next report */
        return;
    }
    b->job = j;
    memset(b->sum, 0, n_counts(b) * sizeof *b->sum);
    memset(b->has_reported, 0, b->node->o.group.size * sizeof *b->has_reported);
}

void node_balance_on_load(struct node_balance *b, uint32_t rank, struct str load)
{
    const struct group_roster *now = group_now(b->node->group);
    if (load.n != n_counts(b) * WORD) {
        log_warn("load not taken", "rank=%u bytes=%zu want=%zu", rank, load.n, n_counts(b) * WORD);
        return;
    }
    for (size_t i = 0; i < n_counts(b); i++) {
        const uint8_t *p = (const uint8_t *)load.p + i * WORD;
        b->sum[i] += (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 |
                     (uint32_t)p[3] << 24;
    }
    b->has_reported[rank] = true;
    for (uint32_t i = 0; i < now->n; i++)
        if (!b->has_reported[now->members[i].rank]) return;
    if (now->n && !b->job) choose(b);
}

const uint64_t *node_balance_load(const struct node_balance *b)
{
    return b && b->has_load ? b->load : NULL;
}

const struct balance_out *node_balance_best(const struct node_balance *b)
{
    return b && b->best.first ? &b->best : NULL;
}

/* ---- life ---- */

struct node_balance *node_balance_create(struct node *n)
{
    const struct model_config *c = &engine_model(n->engine)->config;
    if (!n->o.balance.enabled) return NULL;
    struct node_balance *b = MEM_NEW(struct node_balance);
    b->node = n;
    b->n_layers = (int32_t)model_n_sparse(c, model_n_all_layers(c));
    b->n_experts = (int32_t)c->moe.n_experts;
    b->now = MEM_ARRAY(uint64_t, n_counts(b));
    b->before = MEM_ARRAY(uint64_t, n_counts(b));
    b->sum = MEM_ARRAY(uint64_t, n_counts(b));
    b->load = MEM_ARRAY(uint64_t, n_counts(b));
    b->has_reported = MEM_ARRAY(bool, n->o.group.size);
    b->imbalance = metrics_gauge(n->metrics, "baton_expert_imbalance", "",
                                 "Rows of the busiest rank of the group by the mean, as the rank "
                                 "that leads last counted them.");
    b->timer = loop_timer_start(n->loop, LOOK_MS, LOOK_MS, on_look, b);
    return b;
}

void node_balance_free(struct node_balance *b)
{
    if (!b) return;
    if (b->job) b->job->owner = NULL;
    loop_timer_free(b->timer);
    balance_release(&b->best);
    mem_free(b->now);
    mem_free(b->before);
    mem_free(b->sum);
    mem_free(b->load);
    mem_free(b->has_reported);
    mem_free(b);
}
