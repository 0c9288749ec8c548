/* sample_encoder.h - a request's parameters and tokens in the form that the GPU's sampler
 * (sample.h) takes. Runs on the host; calls nothing of CUDA.
 *
 * Masks, biases, min_tokens and penalties become edits: at most one per token of the vocabulary,
 * and one more for each further bias of the same token. The result lies in the encoder's memory
 * until the next row: the caller copies it to memory that the GPU reads, or samples on the host if
 * there is no room.
 *
 *     sample_encoder_encode(m, &request, &row);
 *     row.params.edits = offset of row.edits among the call's edits;
 *     if (row.n_words) row.params.allowed = offset of row.allowed among the call's words
 *
 * Life cycle: one for all rows, create .. free. Thread: engine, one row at a time. */
#ifndef BATON_KERNELS_CUDA_SAMPLING_SAMPLE_ENCODER_H
#define BATON_KERNELS_CUDA_SAMPLING_SAMPLE_ENCODER_H

#include "kernels/cuda/sampling/sample.h"
#include "kernels/step.h"

#ifdef __cplusplus
extern "C" {
#endif

struct sample_encoded {
    struct sample_row_params params; /* `edits` is 0; `allowed` is 0, or -1 without a mask */
    const struct sample_edit *edits; /* [params.n_edits] */
    const uint64_t *allowed;
    size_t n_words; /* of allowed; 0: no mask */
    unsigned work;  /* enum sample_work that the call must have */
};

struct sample_encoder;

struct sample_encoder *sample_encoder_create(uint32_t n_vocab);
void sample_encoder_free(struct sample_encoder *m);
/* `want` is borrowed for the call, except params->allowed, which out->allowed points to. n_bias is
 * at most SAMPLER_BIAS_MAX. */
void sample_encoder_encode(struct sample_encoder *m, const struct sample_request *want,
                           struct sample_encoded *out);

#ifdef __cplusplus
}
#endif
#endif
