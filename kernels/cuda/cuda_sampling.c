/* cuda_sampling.c - sampling on the GPU: a step's sampling requests are uploaded with it, the
 * kernels of sample.h run after its head, and the results go to pinned memory, where cuda_fetch
 * waits for them. Two result buffers alternate: a step can be fetched while the next one runs. The
 * ids are kept on the GPU, for the embedding of the next step and of the passes behind this one
 * (struct kernel_step). Of passes only the ids are fetched. Thread: engine. */
#include "kernels/cuda/cuda_backend.h"

#include <string.h>

#include "kernels/cuda/sampling/sample_encoder.h"
#include "shared/base/assert.h"
#include "shared/base/mem.h"

/* ---- room ---- */

/* Where results of a parity arrive. */
static bool make_fetched(struct cuda_ctx *c, int parity, size_t n, size_t n_kept)
{
    struct cuda_sampling *s = &c->sampling;
    cudaEvent_t *const events[] = { &s->ready[parity], &s->passes_ready[parity] };
    for (size_t i = 0; i < COUNT_OF(events); i++)
        if (!cuda_check(c->device, cudaEventCreateWithFlags(events[i], cudaEventDisableTiming),
                        "making an event"))
            return false;
    return cuda_check(c->device,
                      cudaMallocHost((void **)&s->fetched[parity], n * sizeof *s->fetched[0]),
                      "getting pinned memory") &&
           cuda_check(c->device,
                      cudaMallocHost((void **)&s->passes_fetched[parity],
                                     n_kept * sizeof *s->passes_fetched[0]),
                      "getting pinned memory");
}

enum status cuda_sampling_prepare(struct cuda_ctx *c, struct err *err)
{
    struct cuda_sampling *s = &c->sampling;
    const size_t n = c->limits.max_logits, n_kept = n * (1 + c->limits.n_passes);
    struct device *d = c->base.device;
    if (s->n_rows == n && s->n_vocab == c->limits.n_vocab && s->n_kept == n_kept) return OK;
    cuda_sampling_release(c); /* scratch depends on the vocabulary */
    /* the host samples */
    if (c->limits.n_vocab > SAMPLE_VOCAB_MAX || n > SAMPLE_ROWS_MAX) return OK;
    s->encoder = sample_encoder_create(c->limits.n_vocab);
    s->room = c->base.options.sampling_edit_bytes ? c->base.options.sampling_edit_bytes
                                                  : n * CUDA_EDITS_PER_LOGITS;
    TRY(device_mem_alloc(d, n * sizeof(struct token_logprobs), DEVICE_MEM_PRIVATE, &s->results,
                         err));
    TRY(device_mem_alloc(d, n_kept * sizeof(int32_t), DEVICE_MEM_PRIVATE, &s->kept, err));
    TRY(device_mem_alloc(d, 2 * n * sizeof(int32_t), DEVICE_MEM_PRIVATE, &s->accepted, err));
    TRY(device_mem_alloc(d, sample_scratch_bytes(n, c->limits.n_vocab), DEVICE_MEM_PRIVATE,
                         &s->scratch, err));
    for (int i = 0; i < 2; i++)
        if (!make_fetched(c, i, n, n_kept)) return device_fault(c->base.device, err);
    s->n_rows = n;
    s->n_kept = n_kept;
    s->n_vocab = c->limits.n_vocab;
    return OK;
}

void cuda_sampling_release(struct cuda_ctx *c)
{
    struct cuda_sampling *s = &c->sampling;
    struct dev_mem *all[] = { &s->results, &s->kept, &s->accepted, &s->scratch };
    for (size_t i = 0; i < COUNT_OF(all); i++) device_mem_free(c->base.device, all[i]);
    for (int i = 0; i < 2; i++) {
        if (s->fetched[i])
            (void)cuda_check(c->device, cudaFreeHost(s->fetched[i]), "freeing pinned memory");
        if (s->passes_fetched[i])
            (void)cuda_check(c->device, cudaFreeHost(s->passes_fetched[i]),
                             "freeing pinned memory");
        if (s->ready[i])
            (void)cuda_check(c->device, cudaEventDestroy(s->ready[i]), "ending an event");
        if (s->passes_ready[i])
            (void)cuda_check(c->device, cudaEventDestroy(s->passes_ready[i]), "ending an event");
    }
    sample_encoder_free(s->encoder);
    *s = (struct cuda_sampling){ 0 };
}

/* ---- asking ---- */

/* A buffer for edits and masks, used from `used` on; offsets are in elements from the tables'
 * begin. */
struct cuda_edits_buffer {
    char *begin;
    size_t used, bytes;
};

/* Appends n elements of `size`, aligned to their size. Returns the offset; SIZE_MAX: no room. */
static size_t add(struct cuda_edits_buffer *r, const void *from, size_t n, size_t size)
{
    const size_t first = (r->used + size - 1) / size, end = (first + n) * size;
    if (end > r->bytes) return SIZE_MAX;
    memcpy(r->begin + first * size, from, n * size);
    r->used = end;
    return first;
}

static bool write_row_params(struct cuda_sampling *s, const struct sample_request *w,
                             struct cuda_edits_buffer *room, struct sample_row_params *to)
{
    struct sample_encoded encoded;
    sample_encoder_encode(s->encoder, w, &encoded);
    if (encoded.params.n_edits > 0) {
        const size_t at = add(room, encoded.edits, (size_t)encoded.params.n_edits,
                              sizeof *encoded.edits);
        if (at == SIZE_MAX) return false;
        encoded.params.edits = (int32_t)at;
    }
    if (encoded.n_words > 0) {
        const size_t at = add(room, encoded.allowed, encoded.n_words, sizeof *encoded.allowed);
        if (at == SIZE_MAX) return false;
        encoded.params.allowed = (int32_t)at;
    }
    s->work |= encoded.work;
    *to = encoded.params;
    return true;
}

bool cuda_sampling_write(struct cuda_ctx *c, const struct sample_request *wants, int32_t n,
                         size_t n_bytes, const struct cuda_step_host *to)
{
    struct cuda_step_upload *st = &c->upload_step;
    const size_t begin = (size_t)(to->variable - st->host);
    struct cuda_edits_buffer room = {
        .begin = to->variable,
        .used = st->used - begin,
        .bytes = st->used - begin + n_bytes,
    };
    if (!wants || !c->sampling.scratch.ptr) return false;
    for (int32_t i = 0; i < n; i++)
        ASSERT(wants[i].kept_at >= 0 && (size_t)wants[i].kept_at < c->sampling.n_kept);
    ASSERT(begin + room.bytes <= st->bytes);
    c->sampling.work = 0;
    for (int32_t i = 0; i < n; i++)
        if (!write_row_params(&c->sampling, &wants[i], &room, &to->row_params[i])) return false;
    st->used = begin + room.used;
    return true;
}

/* ---- choosing ---- */

/* Counts which drafts are right, if the step has some. */
static bool verify_drafts(struct cuda_ctx *c, size_t n)
{
    const struct cuda_sampling *s = &c->sampling;
    const struct sample_verify_call call = {
        .row_params = c->upload_step.row_params,
        .n_rows = (int32_t)n,
        .ids = c->upload_step.ids,
        .logit_rows = c->upload_step.logit_rows,
        .kept = s->kept.ptr,
        .accepted = (int32_t *)s->accepted.ptr + (size_t)c->step.parity * s->n_rows,
    };
    return !(s->work & SAMPLE_VERIFY) ||
           cuda_check(c->device, sample_verify(c->device->stream, &call), "verifying drafts");
}

/* Copies the results to where cuda_fetch or cuda_fetch_passes waits for them. */
static void send_results(struct cuda_ctx *c, size_t n)
{
    struct cuda_sampling *s = &c->sampling;
    const bool is_pass = c->step.program != KERNEL_STEP;
    const int parity = c->step.parity;
    const int32_t first = c->step.first_kept;
    if (is_pass) n = (size_t)c->step.n_kept;
    ASSERT(!is_pass || (size_t)first + n <= s->n_kept);
    void *to = is_pass ? (void *)(s->passes_fetched[parity] + first) : s->fetched[parity];
    const void *from = is_pass ? (const int32_t *)s->kept.ptr + first : s->results.ptr;
    const size_t size = is_pass ? sizeof(int32_t) : sizeof(struct token_logprobs);
    if (n > 0 &&
        !cuda_check(c->device,
                    cudaMemcpyAsync(to, from, n * size, cudaMemcpyDeviceToHost, c->device->stream),
                    "fetching tokens"))
        return;
    (void)cuda_check(
        c->device,
        cudaEventRecord(is_pass ? s->passes_ready[parity] : s->ready[parity], c->device->stream),
        "fetching tokens");
}

void cuda_sample(struct kernel_ctx *base, const float *logits, size_t n_vocab)
{
    struct cuda_ctx *c = cuda_ctx_of(base);
    struct cuda_sampling *s = &c->sampling;
    const size_t n = (size_t)c->step.n_logits;
    const struct sample_call call = {
        .logits = logits,
        .stride = n_vocab,
        .n_vocab = (int32_t)n_vocab,
        .n_rows = (int32_t)n,
        .work = s->work,
        .row_params = c->upload_step.row_params,
        .edits = (const void *)c->upload_step.variable,
        .allowed = (const void *)c->upload_step.variable,
        .results = s->results.ptr,
        .kept = s->kept.ptr,
        .scratch = s->scratch.ptr,
    };
    if (n > 0 && !cuda_check(c->device, sample_run(c->device->stream, &call), "choosing tokens"))
        return;
    if (verify_drafts(c, n)) send_results(c, n);
}

bool cuda_is_sampled(struct kernel_ctx *base, int parity)
{
    struct cuda_ctx *c = cuda_ctx_of(base);
    return device_fault(base->device, NULL) != OK ||
           (cudaEventQuery(c->sampling.ready[parity]) != cudaErrorNotReady &&
            cudaEventQuery(c->sampling.passes_ready[parity]) != cudaErrorNotReady);
}

void cuda_fetch(struct kernel_ctx *base, int parity, struct token_logprobs *out, size_t n)
{
    struct cuda_ctx *c = cuda_ctx_of(base);
    if (!cuda_check(c->device, cudaEventSynchronize(c->sampling.ready[parity]), "a step")) return;
    if (n > 0) memcpy(out, c->sampling.fetched[parity], n * sizeof *out);
}

const int32_t *cuda_fetch_passes(struct kernel_ctx *base, int parity)
{
    struct cuda_ctx *c = cuda_ctx_of(base);
    (void)cuda_check(c->device, cudaEventSynchronize(c->sampling.passes_ready[parity]), "a pass");
    return c->sampling.passes_fetched[parity];
}
