/* gpu_async_steps.c - steps submitted one ahead of the tokens that are fetched. */
#include "tests/gpu/bench/gpu_async_steps.h"

#include "shared/base/clock.h"
#include "shared/base/mem.h"

struct ahead {
    struct model *m;
    struct model_batch *b;
    int32_t *known, *chosen; /* ids of the first step, and ids that stand for the tokens sampled
                              * by the previous step */
    struct sample_request *wants;
    struct token_logprobs *results;
    struct sampling_params params;
};

static void open_ahead(struct ahead *a, struct model *m, struct model_batch *b)
{
    const size_t n = (size_t)b->n_rows;
    gpu_need(b->n_logits == b->n_rows, "a decode step has logits of every row", NULL);
    *a = (struct ahead){ .m = m,
                         .b = b,
                         .known = mem_dup(b->ids, n * sizeof *b->ids),
                         .chosen = MEM_ARRAY(int32_t, n),
                         .wants = MEM_ARRAY(struct sample_request, n),
                         .results = MEM_ARRAY(struct token_logprobs, n),
                         .params = { .temperature = 0,
                                     .top_p = 1,
                                     .repetition_penalty = 1,
                                     .max_tokens = UINT32_MAX,
                                     .ignore_eos = true,
                                     .n_logprobs = -1, }, };
    for (size_t i = 0; i < n; i++) {
        a->chosen[i] = -1 - (int32_t)i;
        a->wants[i] = (struct sample_request){
            .params = &a->params,
            .tokens = a->known + i,
            .n_tokens = 1,
            .n_prompt = 1,
            .score = -1,
            .kept_at = (int32_t)i,
        };
    }
}

static void close_ahead(struct ahead *a)
{
    mem_free(a->known), mem_free(a->chosen), mem_free(a->wants), mem_free(a->results);
}

static bool submit(struct ahead *a, int i)
{
    for (int32_t k = 0; k < a->b->n_rows; k++) { /* each as if it followed the first step, so that
                                                  * no list of tokens grows */
        a->wants[k].n_out = i > 0;
        a->wants[k].future = (struct sample_future){ .n_chosen = i > 0, .first_chosen = k };
    }
    a->b->ids = i == 0 ? a->known : a->chosen;
    a->b->sample_requests = a->wants;
    a->b->parity = i & 1;
    return model_submit(a->m, a->b);
}

static void fetch(struct ahead *a, int i)
{
    struct err err;
    model_fetch(a->m, i & 1, a->results, (uint32_t)a->b->n_rows);
    gpu_need(device_fault(a->m->kernels->device, &err) == OK, err.text, NULL);
    for (int32_t k = 0; k < a->b->n_rows; k++)
        gpu_need(a->results[k].id >= 0 && (uint32_t)a->results[k].id < a->m->config.n_vocab,
                 "a token that was chosen is none of the vocabulary", NULL);
}

bool gpu_async_steps_run(struct gpu_ops *ops, struct model *m, struct model_batch *b, int n_steps,
                         struct gpu_async_steps *out)
{
    struct ahead a;
    open_ahead(&a, m, b);
    if (!submit(&a, 0)) {
        close_ahead(&a);
        return false;
    }
    fetch(&a, 0); /* the first step of a kind may allocate */
    gpu_ops_follow(ops, n_steps);
    const uint64_t begin = clock_ns();
    gpu_need(submit(&a, 1), "the GPU chose tokens once and then no more", NULL);
    for (int i = 2; i <= n_steps; i++) {
        gpu_need(submit(&a, i), "the GPU chose tokens once and then no more", NULL);
        fetch(&a, i - 1);
    }
    fetch(&a, n_steps);
    out->wall = (double)(clock_ns() - begin) * 1e-9 / n_steps;
    gpu_ops_followed(ops, &out->busy, &out->gap);
    close_ahead(&a);
    return true;
}
