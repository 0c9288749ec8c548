/* gemm_reference.h - for tests of products on the card: matrices packed into the forms from
 * numbers, and plain products in double.
 *
 * A reference holds what each stored element means, so that a product over it errs by the kernel's
 * sums alone. Empty for C. Thread: the test's. */
#ifndef BATON_TESTS_CUDA_GEMM_REFERENCE_H
#define BATON_TESTS_CUDA_GEMM_REFERENCE_H

#ifdef __cplusplus
#include <vector>

#include "kernels/cuda/gemm/gemm.h"

struct reference_matrix {
    std::vector<unsigned char> bytes; /* as gemm.h lays it out */
    std::vector<double> numbers;      /* [n_out][n_in]: what a stored element means, its scale
                                       * included */
};

/* Numbers of a fixed sequence. */
struct numbers {
    uint64_t state;
    double next(void); /* -1 .. 1 */
};

uint16_t bf16_of(float x);
float float_of_bf16(uint16_t bits);
float float_of_e4m3(uint8_t bits);
/* Of numbers beyond 65504 that one, as prepare_inputs.h says. */
uint16_t f16_of(float x);
float float_of_f16(uint16_t bits);
/* A number of a 16-bit type, F16 or BF16. */
uint16_t bits_of(enum dtype type, float x);
float float_of(enum dtype type, uint16_t bits);

/* One group's matrix, of random elements over the layout's whole range. */
reference_matrix reference_pack(enum gemm_weight_layout layout, bool paired, size_t n_out,
                                size_t n_in, numbers *from);

/* Column `column` of W x, and the sum of its terms' magnitudes, by which a kernel may err. */
struct reference_sum {
    double value, magnitude;
};
reference_sum reference_dot(const reference_matrix &w, size_t n_in, size_t column, const double *x);

#endif
#endif
