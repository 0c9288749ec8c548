/* cpu_sample.c - the two host functions that read a whole vocabulary for one token.
 * Thread: engine, compute pool. */
#include <math.h>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/host_math.h"
#include "shared/base/arith.h"

enum { ARGMAX_CHUNK = 4096, TERMS_PER_ITEM = 32768 };

/* Finds the chunk with the first largest value, then its index in there. */
int32_t host_argmax(struct kernel_ctx *c, const float *x, size_t n)
{
    const struct elementwise_microkernels *kernels = cpu_microkernels_of(c)->elementwise;
    float best = -INFINITY;
    size_t at = n;
    for (size_t i = 0; i < n; i += ARGMAX_CHUNK) {
        float max = kernels->max(x + i, min_size(ARGMAX_CHUNK, n - i));
        if (!(max > best)) continue;
        best = max;
        at = i;
    }
    if (at == n) return -1;
    while (x[at] != best) at++;
    return (int32_t)at;
}

struct exp_terms_job {
    const struct elementwise_microkernels *kernels;
    float *p;
    const float *x;
    size_t n;
    float max, by;
};

static void terms_item(void *arg, int index, int thread)
{
    (void)thread;
    const struct exp_terms_job *j = arg;
    size_t at = (size_t)index * TERMS_PER_ITEM;
    j->kernels->exp_terms(j->p + at, j->x + at, min_size(TERMS_PER_ITEM, j->n - at), j->max, j->by);
}

void host_exp_terms(struct kernel_ctx *c, float *p, const float *x, size_t n, float max, float by)
{
    struct exp_terms_job job = {
        .kernels = cpu_microkernels_of(c)->elementwise, .p = p, .x = x, .n = n, .max = max, .by = by
    };
    compute_pool_run(c->pool, (int)((n + TERMS_PER_ITEM - 1) / TERMS_PER_ITEM), terms_item, &job);
}
