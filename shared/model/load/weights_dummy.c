/* weights_dummy.c - dummy weights: every requested tensor exists, in the requested shape.
 *
 * Matrices are bf16 with a deviation of 1 / sqrt(n_in), so that a product is about as large as its
 * input; norms are 1, biases are small. What layers add to the hidden state is damped, except in
 * the last FFN. Without that, attention's means would make all tokens alike after a few layers and
 * send them to the same experts. So a hidden state is mostly its token's embedding, tokens spread
 * over all experts, and the last FFN turns it into another token, with logits near 0 and a
 * deviation near 1. A tensor's seed is the hash of its name, and a part of a matrix begins at its
 * place in the whole, so a weight has the same value whatever is quantised, split or loaded around
 * it. Thread: loading. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "kernels/weight_src.h"
#include "shared/base/hash/hash.h"
#include "shared/model/load/weights.h"

static const float DAMPING = 1.0f / 8; /* relative to a row of the embedding */
static const float BIAS_DEVIATION = 1.0f / 64,
                   SELECTION_DEVIATION = 1.0f / 4096 /* experts' scores are some hundredths */;
static const uint64_t DUMMY_TAG = 0x44554d4d00000000u; /* "DUMM" */

static struct dummy_weights dummy_of(const char *name, float deviation)
{
    return (struct dummy_weights){
        .seed = hash_64(name, strlen(name), DUMMY_WEIGHTS_VERSION),
        .unit = deviation / DUMMY_WEIGHTS_STDDEV,
    };
}

void weights_create_dummy(struct weights **out)
{
    struct weights *w = MEM_NEW(struct weights);
    w->dummy = true;
    *out = w;
}

/* Is the output added to the residual stream (o_proj, down_proj), except in the last layer? */
static bool is_damped(const struct weights *w, const struct matrix_spec *spec)
{
    unsigned long layer;
    if (strcmp(spec->leaf, "o_proj") == 0) return true;
    return strcmp(spec->leaf, "down_proj") == 0 &&
           sscanf(spec->prefix, "model.layers.%lu.", &layer) == 1 && layer + 1 < w->n_layers;
}

static float deviation_of(const struct weights *w, const struct matrix_spec *spec)
{
    const float usual = 1 / sqrtf((float)spec->n_in);
    return is_damped(w, spec) ? usual * DAMPING / sqrtf((float)spec->n_out) : usual;
}

void weights_dummy_matrix(const struct weights *w, const struct matrix_spec *spec,
                          struct weight_src *out)
{
    char name[TENSOR_NAME_BYTES_MAX];
    if (spec->n_experts > 0)
        snprintf(name, sizeof name, "%s%" PRIu32 ".%s", spec->prefix, spec->i_expert, spec->leaf);
    else snprintf(name, sizeof name, "%s%s", spec->prefix, spec->leaf);
    const struct share_part part = matrix_part(spec);
    *out = (struct weight_src){
        .dtype = DTYPE_BF16,
        .n_out = part.n,
        .n_in = spec->n_in,
        .dummy = dummy_of(name, deviation_of(w, spec)),
    };
    out->dummy.at = part.first * spec->n_in;
}

void weights_dummy_vector(const char *name, size_t n, float **out)
{
    const bool norm = str_ends(str_of(name), "norm.weight");
    float *v = mem_aligned(64, n * sizeof *v);
    const float deviation = str_ends(str_of(name), "e_score_correction_bias") ? SELECTION_DEVIATION
                                                                              : BIAS_DEVIATION;
    const struct weight_src bias = {
        .dtype = DTYPE_F32, .n_out = 1, .n_in = n, .dummy = dummy_of(name, deviation)
    };
    if (!norm) weight_src_dummy_row(&bias, 0, 0, n, v);
    for (size_t i = 0; norm && i < n; i++) v[i] = 1;
    *out = v;
}

uint64_t weights_dummy_fingerprint(uint64_t seed)
{
    const uint32_t version = DUMMY_WEIGHTS_VERSION;
    return DUMMY_TAG | (hash_64(&version, sizeof version, seed) & UINT32_MAX);
}
