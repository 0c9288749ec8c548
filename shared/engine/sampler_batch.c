/* sampler_batch.c - rows over threads.
 *
 * Thread: engine (create, run, free), pool (rows). */
#include "shared/engine/sampler_batch.h"

#include "shared/base/mem.h"

struct sampler_batch {
    struct kernel_ctx *kernels;
    /* The context with a pool of one thread: a row that is on a compute thread stays there. All
     * threads share it, without kernel_ctx_reserve: only for argmax and exp_terms, which use no
     * scratch. */
    struct kernel_ctx alone;
    struct sampler *single; /* for a row that uses all threads */
    struct sampler **side;  /* [threads of the pool]; scratch takes memory only once it is used */
};

enum status sampler_batch_create(uint32_t n_vocab, struct kernel_ctx *kernels,
                                 struct sampler_batch **out, struct err *err)
{
    struct compute_pool *one;
    const int n_threads = compute_pool_threads(kernels->pool);
    TRY(compute_pool_create(1, &one, err));
    struct sampler_batch *b = MEM_NEW(struct sampler_batch);
    b->kernels = kernels;
    b->alone = *kernels;
    b->alone.pool = one;
    b->single = sampler_create(n_vocab, kernels);
    b->side = MEM_ARRAY(struct sampler *, (size_t)n_threads);
    for (int i = 0; i < n_threads; i++) b->side[i] = sampler_create(n_vocab, &b->alone);
    *out = b;
    return OK;
}

void sampler_batch_free(struct sampler_batch *b)
{
    if (!b) return;
    for (int i = 0; i < compute_pool_threads(b->kernels->pool); i++) sampler_free(b->side[i]);
    sampler_free(b->single);
    compute_pool_free(b->alone.pool);
    mem_free(b->side);
    mem_free(b);
}

static void run_row(struct sampler *s, struct sampler_row *r)
{
    if (r->score < 0) (void)sampler_sample(s, &r->in, &r->out);
    else sampler_logprobs(s, r->in.logits, r->in.lse, r->score, r->in.params->n_logprobs, &r->out);
}

struct sampler_batch_job {
    const struct sampler_batch *b;
    struct sampler_row *rows;
};

static void run_item(void *arg, int index, int thread)
{
    const struct sampler_batch_job *j = arg;
    run_row(j->b->side[thread], &j->rows[index]);
}

void sampler_batch_run(struct sampler_batch *b, struct sampler_row *rows, size_t n)
{
    struct sampler_batch_job j = { b, rows };
    if (n == 1) run_row(b->single, rows);
    else compute_pool_run(b->kernels->pool, (int)n, run_item, &j);
}
