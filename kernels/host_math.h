/* host_math.h - arithmetic over one row of logits in host memory, for sampling on the CPU.
 *
 * The functions use the CPU backend's kernels and its compute pool; `c` is kernel_host() of the
 * model's context. All CPU backends give the same bits.
 * Thread: engine. */
#ifndef BATON_KERNELS_HOST_MATH_H
#define BATON_KERNELS_HOST_MATH_H

#include <stddef.h>
#include <stdint.h>

struct kernel_ctx;

#ifdef __cplusplus
extern "C" {
#endif

/* lse[i] = log(sum_j exp(x[i][j])) of x [n_rows, n], rows x_stride floats apart, summed in a fixed
 * order. */
void host_log_sum_exp(struct kernel_ctx *c, float *lse, const float *x, size_t x_stride,
                      size_t n_rows, size_t n);
/* Index of the largest of x [n], the first of equals; -1 when none is above -inf. A NaN never
 * is. */
int32_t host_argmax(struct kernel_ctx *c, const float *x, size_t n);
/* p[i] = exp((min(x[i], FLT_MAX) - max) * by) by the polynomial of kernels/exp.h; 0 for NaN. p may
 * be x. */
void host_exp_terms(struct kernel_ctx *c, float *p, const float *x, size_t n, float max, float by);

#ifdef __cplusplus
}
#endif

#endif
