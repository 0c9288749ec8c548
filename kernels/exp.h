/* exp.h - e^x in f32, operation by operation, as every backend computes it.
 *
 * x = n ln2 + r with n an integer and |r| <= ln2/2; e^r = 1 + r + r^2 (c2 + c3 r + ... + c6 r^4),
 * coefficients from a Remez fit of the relative error (3.2e-9 before rounding); the result is
 * within 1.5 ulp. Below EXP_MIN (the smallest normal f32) the result is 0, above EXP_MAX that of
 * EXP_MAX; NaN stays NaN. n is found by adding 1.5 * 2^23, which leaves it in the low bits of the
 * sum; those, shifted into the exponent field, are 2^n. Thread: any. */
#ifndef BATON_KERNELS_EXP_H
#define BATON_KERNELS_EXP_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define EXP_MIN    (-0x1.5d589ep+6f) /* -87.33653 */
#define EXP_MAX    88.0f
#define EXP_LOG2E  1.44269502f
#define EXP_ROUND  12582912.0f
#define EXP_LN2_HI 0x1.62e43p-1f
#define EXP_LN2_LO (-0x1.05c61p-29f)
#define EXP_C2     0x1.fffffcp-2f
#define EXP_C3     0x1.55548cp-3f
#define EXP_C4     0x1.555858p-5f
#define EXP_C5     0x1.123dep-7f
#define EXP_C6     0x1.6ac6b2p-10f

static inline float exp_ref(float x)
{
    if (x < EXP_MIN) return 0;
    if (x > EXP_MAX) x = EXP_MAX;
    float t = fmaf(x, EXP_LOG2E, EXP_ROUND), n = t - EXP_ROUND;
    float r = fmaf(n, -EXP_LN2_LO, fmaf(n, -EXP_LN2_HI, x));
    float p = fmaf(fmaf(fmaf(fmaf(EXP_C6, r, EXP_C5), r, EXP_C4), r, EXP_C3), r, EXP_C2);
    float e = fmaf(r * r, p, r) + 1.0f, scale;
    uint32_t bits;
    memcpy(&bits, &t, sizeof bits);
    bits = (bits << 23) + 0x3f800000u;
    memcpy(&scale, &bits, sizeof scale);
    return e * scale;
}

#endif
