/* cpu_route.c - routes each token to experts: scores, groups, the k best, their weights.
 *
 * The same plain C for every CPU backend (a router is a few hundred numbers per token), so that all
 * backends choose the same experts. Formulas: kernels.h, struct route_args. Exponentials are libm's
 * in f64, rounded once: near-ties between experts are decided as exactly as f32 logits allow.
 * Thread: engine, compute pool. */
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu_backend.h"
#include "shared/base/assert.h"

enum { ROWS_PER_ITEM = 8 };

struct route_scores {
    float p[KERNEL_EXPERTS_MAX];      /* scores, from which weights are computed */
    float choice[KERNEL_EXPERTS_MAX]; /* scores + bias, which are compared */
};

static void softmax(const float *logits, size_t n, float *p)
{
    double value[KERNEL_EXPERTS_MAX], sum = 0;
    float max = logits[0];
    for (size_t e = 1; e < n; e++) max = logits[e] > max ? logits[e] : max;
    for (size_t e = 0; e < n; e++) sum += value[e] = exp((double)logits[e] - (double)max);
    for (size_t e = 0; e < n; e++) p[e] = (float)(value[e] / sum);
}

static void sigmoid(const float *logits, size_t n, float *p)
{
    for (size_t e = 0; e < n; e++) p[e] = (float)(1.0 / (1.0 + exp(-(double)logits[e])));
}

/* Index of the largest value, the first of equal ones; NaN counts as the smallest, so there is
 * always a result. */
static size_t first_best(const float *v, size_t n)
{
    size_t best = 0;
    for (size_t i = 1; i < n; i++)
        if (v[i] > v[best] || (isnan(v[best]) && !isnan(v[i]))) best = i;
    return best;
}

static float group_score(const struct route_args *a, const float *choice, size_t n)
{
    float first = -INFINITY, second = -INFINITY;
    for (size_t i = 0; i < n; i++) {
        if (choice[i] > first) {
            second = first;
            first = choice[i];
        } else if (choice[i] > second) {
            second = choice[i];
        }
    }
    return a->group_score == GROUP_TOP2_SUM && n > 1 ? first + second : first;
}

/* Excludes experts of groups that are not among the best. */
static void mask_groups(const struct route_args *a, float *choice)
{
    size_t n_groups = (size_t)a->n_groups, size = (size_t)a->n_experts / n_groups;
    float score[KERNEL_EXPERTS_MAX];
    bool keep[KERNEL_EXPERTS_MAX] = { false };
    for (size_t g = 0; g < n_groups; g++) score[g] = group_score(a, choice + g * size, size);
    for (int32_t i = 0; i < a->topk_groups; i++) {
        size_t g = first_best(score, n_groups);
        keep[g] = true;
        score[g] = NAN;
    }
    for (size_t g = 0; g < n_groups; g++)
        for (size_t e = 0; e < size && !keep[g]; e++) choice[g * size + e] = NAN;
}

static void normalise(const struct route_args *a, float *weights)
{
    float sum = 0;
    for (int32_t j = 0; j < a->n_used; j++) sum += weights[j];
    float by = a->norm == NORM_MAX   ? fmaxf(sum, a->norm_min)
               : a->norm == NORM_SUM ? sum + a->norm_min
                                     : 1;
    for (int32_t j = 0; j < a->n_used; j++) weights[j] = weights[j] / by * a->scale;
}

static void route_row(const struct route_args *a, size_t i)
{
    struct route_scores r;
    const size_t n = (size_t)a->n_experts;
    int32_t *experts = a->experts + i * (size_t)a->n_used;
    float *weights = a->weights + i * (size_t)a->n_used;
    if (a->score == ROUTE_SOFTMAX) softmax(a->logits + i * n, n, r.p);
    else sigmoid(a->logits + i * n, n, r.p);
    for (size_t e = 0; e < n; e++) r.choice[e] = a->bias ? r.p[e] + a->bias[e] : r.p[e];
    if (a->n_groups > 1) mask_groups(a, r.choice);
    for (int32_t j = 0; j < a->n_used; j++) {
        size_t best = first_best(r.choice, n);
        experts[j] = (int32_t)best;
        weights[j] = r.p[best];
        r.choice[best] = NAN;
    }
    normalise(a, weights);
}

static void route_item(void *arg, int index, int thread)
{
    (void)thread;
    const struct route_args *a = arg;
    for (size_t i = (size_t)index * ROWS_PER_ITEM;
         i < (size_t)(index + 1) * ROWS_PER_ITEM && i < a->n_rows; i++)
        route_row(a, i);
}

void cpu_route(struct kernel_ctx *c, const struct route_args *a)
{
    ASSERT(a->n_experts >= 1 && a->n_experts <= KERNEL_EXPERTS_MAX && a->n_used >= 1 &&
           a->n_used <= a->n_experts);
    ASSERT(a->n_groups >= 1 && a->n_experts % a->n_groups == 0 && a->topk_groups >= 1 &&
           a->topk_groups <= a->n_groups);
    struct route_args copy = *a;
    compute_pool_run(c->pool, (int)((a->n_rows + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM), route_item,
                     &copy);
}

void cpu_router(struct kernel_ctx *c, const struct router_args *a)
{
    const struct matmul_args logits = router_matmul(a);
    const size_t n = a->w->n_in;
    cpu_rms_norm(c, a->h, n, a->x, n, a->norm, a->route.n_rows, n, a->eps);
    cpu_matmul(c, &logits, 1); /* [rows, E] */
    cpu_route(c, &a->route);
}
