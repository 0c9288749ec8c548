/* sample.h - logits to tokens on the card: the same token that shared/engine/sampler.c chooses from
 * the same logits.
 *
 * The host writes what each row asks for into device memory (sample_encoder.h makes it of a
 * request's parameters), the card chooses, and the next step's embedding reads `ids`. What is
 * computed is sampler.h's, which is the definition: masses that a draw goes by are added in its
 * order, so a draw gives its token bit for bit. Two sums round in ways of their own: the mass at
 * top_p's border is added exactly up to the last few bits (the host's order is its quickselect's),
 * so a border that lies within some 1e-15 of top_p may fall one entry apart; and the log of
 * log-sum-exp is the card's, which errs by one bit of a double more than the host's before it is
 * rounded to f32. Neither depends on the other rows.
 *
 * The launches, their grids and arguments follow from the fields of sample_call alone: a graph that
 * recorded them can be replayed with other asks. Life cycle: none; scratch is the caller's. Thread:
 * engine. Calls put work on the stream and return; they do not wait and do not allocate. */
#ifndef BATON_KERNELS_CUDA_SAMPLING_SAMPLE_H
#define BATON_KERNELS_CUDA_SAMPLING_SAMPLE_H

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#include "shared/base/sampling.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { SAMPLE_VOCAB_MAX = 1 << 19, SAMPLE_ROWS_MAX = 65535 };

/* What rows may ask for beyond the largest logit, after edits and mask, which every row may. Each
 * costs a launch or more. */
enum sample_work {
    SAMPLE_DRAW = 1,        /* temperature >= 1e-5 */
    SAMPLE_CUT = 2,         /* a draw among fewer: 0 < top_k < n_vocab, or top_p < 1. Only with
                             * SAMPLE_DRAW */
    SAMPLE_LOGPROBS = 4,    /* n_logprobs >= 0, or score >= 0 */
    SAMPLE_FUTURE_TOKEN = 8 /* future_token < 0 */
};

/* One row's wishes, in device memory. */
struct sample_row_params {
    uint64_t seed;
    uint32_t index; /* the draw is rng_uniform(seed, 0, index) */
    float temperature, min_p, top_p;
    float repetition, frequency, presence; /* of edits that penalise, and of the future token */
    int32_t future_token; /* < 0: the token that ids[-1 - future_token] held before the
                           * call is one more occurrence for penalties; 0: there is
                           * none */
    int32_t top_k;
    int32_t edits, n_edits; /* its own among the call's edits: from `edits` on */
    int32_t allowed;        /* where its mask begins among the call's words, as
                             * sampling_params.allowed; -1: all tokens are */
    int32_t n_logprobs;     /* -1: none */
    int32_t score;          /* >= 0: nothing is chosen; logprobs of this token of the vocabulary */
};

/* A change of one logit: -inf if forbidden; then x += bias; then, if penalised, x = x > 0 ? x /
 * repetition : x * repetition, x -= frequency * count, and with a count above 0 x -= presence. A
 * row's are sorted by id; several of one id are done one after the other, and a future token counts
 * in the last. Those of ids outside of the vocabulary do nothing. */
struct sample_edit {
    int32_t id;
    float bias;
    uint32_t count; /* of penalised ones: how often it is in the output */
    uint8_t forbid, penalise;
};

/* All pointers are to device memory. Logits are not changed. */
struct sample_call {
    const float *logits;
    size_t stride;              /* floats from row to row */
    int32_t n_vocab;            /* 1 to SAMPLE_VOCAB_MAX */
    int32_t n_rows;             /* the most, which grids are made for; at most
                                 * SAMPLE_ROWS_MAX */
    unsigned work;              /* enum sample_work; a row that asks for more is a bug, which
                                 * ends the kernel with a trap */
    const int32_t *n_real_rows; /* how many rows, the first ones, are asked: nothing of
                                 * the others is read or written. NULL: all */
    const struct sample_row_params *row_params; /* [n_rows] */
    const struct sample_edit *edits;
    const uint64_t *allowed;
    struct token_logprobs *results; /* [n_rows], as sampler_sample and sampler_logprobs leave
                                     * them */
    int32_t *ids;                   /* [n_rows]: the tokens chosen; of rows that are scored left
                                     * alone. What future_token names is read before */
    void *scratch;                  /* aligned to 256 bytes */
};

/* Scratch must be zero before the first call of all (device_mem_alloc's memory is); what calls
 * leave there is what the next needs, if it is of the same n_vocab, whatever its n_rows. */
size_t sample_scratch_bytes(size_t n_rows, size_t n_vocab);
/* cudaErrorInvalidValue: n_vocab or n_rows is out of bounds. */
cudaError_t sample_run(cudaStream_t stream, const struct sample_call *call);

#ifdef __cplusplus
}
#endif
#endif
