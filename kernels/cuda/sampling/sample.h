/* sample.h - sampling on the GPU: the same token that shared/engine/sampler.c chooses from the same
 * logits, which is the definition.
 *
 * The host writes each row's parameters into device memory (sample_encoder.h), the GPU samples, and
 * the next step's embedding reads `kept`. Masses that decide a draw are added in the sampler's
 * order, so the token is the same bit for bit. Two sums round differently: the mass at top_p's
 * border is exact up to the last bits (the host's order is its quickselect's), so a border within
 * about 1e-15 of top_p may fall one entry apart; and log-sum-exp's logarithm errs by one bit of a
 * double more than the host's before it is rounded to f32. Neither depends on the other rows.
 * Launches, grids and arguments follow from sample_call alone, so a captured graph can be replayed
 * with other parameters.
 * Thread: engine. Calls enqueue work on the stream; they neither wait nor allocate. */
#ifndef BATON_KERNELS_CUDA_SAMPLING_SAMPLE_H
#define BATON_KERNELS_CUDA_SAMPLING_SAMPLE_H

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/step.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { SAMPLE_VOCAB_MAX = 1 << 19, SAMPLE_ROWS_MAX = 65535 };

/* What rows may need in addition to edits, mask and the largest logit. Each costs at least one
 * launch. */
enum sample_work {
    SAMPLE_DRAW = 1,     /* temperature >= 1e-5 */
    SAMPLE_CUT = 2,      /* with SAMPLE_DRAW: 0 < top_k < n_vocab, or top_p < 1 */
    SAMPLE_LOGPROBS = 4, /* n_logprobs >= 0, or score >= 0 */
    SAMPLE_FUTURE = 8,   /* n_chosen or n_drafts > 0 */
    SAMPLE_VERIFY = 16   /* n_verify > 0, for sample_verify */
};

/* One row's parameters, in device memory. */
struct sample_row_params {
    uint64_t seed;
    uint32_t index;      /* the draw is rng_uniform(seed, 0, index) */
    uint32_t min_tokens; /* edits forbid only with an index below it */
    float temperature, min_p, top_p;
    float repetition, frequency, presence; /* for edits that penalise, and future tokens */
    /* Future tokens are more occurrences for penalties: what kept[first_chosen ..] held before the
     * call, and kept[first_draft], [first_draft + draft_stride] ..; SAMPLE_FUTURE_MAX at most.
     * `after`, which move_rows resolves: index and n_chosen are larger by a number
     * (kernel_move). */
    uint32_t n_chosen, n_drafts, after;
    int32_t first_chosen, first_draft, draft_stride;
    int32_t top_k;
    int32_t edits, n_edits; /* its edits are [edits, edits + n_edits) of the call's */
    int32_t allowed;        /* offset of its mask among the call's words, as
                             * sampling_params.allowed; -1: all tokens are allowed */
    int32_t n_logprobs;     /* -1: none */
    int32_t score;          /* >= 0: no sampling, only logprobs of this token of the vocabulary */
    int32_t kept_at;        /* the token is written to kept[kept_at], unless there is a score */
    int32_t n_verify;       /* rows behind it that are of drafts (sample_verify) */
};

/* A change of one logit: -inf if forbidden; then x += bias; then, if penalised, x = x > 0 ? x /
 * repetition : x * repetition, x -= frequency * count, and with a count above 0 x -= presence. A
 * row's edits are sorted by id; several of one id apply one after the other, and future tokens
 * count in the last. Ids outside of the vocabulary have no effect. */
struct sample_edit {
    int32_t id;
    float bias;
    uint32_t count; /* if penalised: occurrences in the output */
    uint8_t forbid, penalise;
};

/* All pointers are device memory. Logits are not changed. */
struct sample_call {
    const float *logits;
    size_t stride;              /* floats from row to row */
    int32_t n_vocab;            /* 1 to SAMPLE_VOCAB_MAX */
    int32_t n_rows;             /* the grid's rows, at most SAMPLE_ROWS_MAX */
    unsigned work;              /* enum sample_work; a row that needs more is a bug, which ends the
                                 * kernel with a trap */
    const int32_t *n_real_rows; /* only the first so many rows are read or written; NULL: all */
    const struct sample_row_params *row_params; /* [n_rows] */
    const struct sample_edit *edits;
    const uint64_t *allowed;
    struct token_logprobs *results; /* [n_rows], as sampler_sample and sampler_logprobs fill them */
    int32_t *kept;                  /* future tokens are read before tokens are written */
    void *scratch;                  /* aligned to 256 bytes */
};

/* Which of a step's drafts are right, once its tokens are chosen. All pointers are of the
 * device. */
struct sample_verify_call {
    const struct sample_row_params *row_params; /* [n_rows]; tokens are kept at the rows' numbers */
    int32_t n_rows;
    const int32_t *ids,
        *logit_rows; /* of the step; a row's draft is the id of its row, or that kept
                                      * token (kernel_step.ids) */
    const int32_t *kept;
    int32_t *accepted; /* [n_rows] out: how many of its n_verify drafts are the tokens chosen */
};
cudaError_t sample_verify(cudaStream_t stream, const struct sample_verify_call *call);

/* Scratch must be zero before the first call (device_mem_alloc's memory is). Calls with the same
 * n_vocab may reuse it, whatever their n_rows. */
size_t sample_scratch_bytes(size_t n_rows, size_t n_vocab);
/* cudaErrorInvalidValue: n_vocab or n_rows is out of bounds. */
cudaError_t sample_run(cudaStream_t stream, const struct sample_call *call);

#ifdef __cplusplus
}
#endif
#endif
