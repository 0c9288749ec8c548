/* gemm_reference.h - for tests of products on a GPU: matrices packed into the weight layouts from
 * numbers, and plain products in double.
 *
 * A reference holds the value that each stored element stands for, so the only error of a product
 * over it is that of the kernel's sums. Empty for C. Thread: the test's. */
#ifndef BATON_TESTS_CUDA_GEMM_REFERENCE_H
#define BATON_TESTS_CUDA_GEMM_REFERENCE_H

#ifdef __cplusplus
#include <vector>

#include "kernels/cuda/gemm/gemm.h"

struct reference_matrix {
    std::vector<unsigned char> bytes; /* in the layout of gemm.h */
    std::vector<double> numbers;      /* [n_out][n_in]: stored elements times their scales */
};

/* A fixed pseudo-random sequence. */
struct numbers {
    uint64_t state;
    double next(void); /* -1 .. 1 */
};

uint16_t bf16_of(float x);
float float_of_bf16(uint16_t bits);
float float_of_e4m3(uint8_t bits);
/* x rounded to f16; beyond 65504 the result is 65504, as prepare_inputs.h requires. */
uint16_t f16_of(float x);
float float_of_f16(uint16_t bits);
/* x rounded to a 16-bit type, F16 or BF16. */
uint16_t bits_of(enum dtype type, float x);
float float_of(enum dtype type, uint16_t bits);

/* Packs one group's matrix, with random elements over the whole range of the layout. */
reference_matrix reference_pack(enum gemm_weight_layout layout, bool paired, size_t n_out,
                                size_t n_in, numbers *from);

/* Column `column` of W x, and the sum of the magnitudes of its terms, which bounds the error of a
 * kernel. */
struct reference_sum {
    double value, magnitude;
};
reference_sum reference_dot(const reference_matrix &w, size_t n_in, size_t column, const double *x);

#endif
#endif
