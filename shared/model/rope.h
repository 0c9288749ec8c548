/* rope.h - the table of rotary angles.
 *
 *     e_i = theta^(-2i/d), d elements are rotated, i = 0 .. d/2 - 1
 *     LINEAR   inv_i = e_i / factor
 *     LLAMA3   wavelengths 2 pi / e_i above original_max / low_freq_factor are divided by the
 *              factor, those below original_max / high_freq_factor kept, between them the two
 *              blended linearly in original_max / wavelength
 *     YARN     inv_i = e_i (1 - r_i) + e_i / factor r_i, r_i a ramp from 0 to 1 between the
 *              frequencies that turn beta_fast and beta_slow times over original_max positions: i =
 *              d ln(original_max / (2 pi beta)) / (2 ln theta)
 * Thread: load on any. */
#ifndef BATON_MODEL_ROPE_H
#define BATON_MODEL_ROPE_H

#include "shared/model/model.h"

/* Elements of a head that are rotated. */
uint32_t rope_dim(const struct model_config *c);
/* Inverse frequencies with the configuration's scaling: out [rope_dim / 2]. `factors` [rope_dim /
 * 2] divide them (llama3 scaling as GGUF stores it); NULL: none. */
void rope_inv_freq(const struct model_config *c, const float *factors, double *out);
/* YaRN's factor of cos and sin, and, squared, DeepSeek's of the scores: 0.1 m ln(factor) + 1 (Peng
 * et al. 2023, equation 22). */
double rope_mscale(double factor, double m);
size_t rope_table_bytes(const struct model_config *c, uint32_t n_positions);
/* cos and sin of every position, to [n_positions][rope_dim / 2][2]. Angles are computed in double
 * from integer positions: with large theta and positions anything less is wrong in the last digits
 * of f32. */
void rope_table(const struct model_config *c, const float *factors, uint32_t n_positions,
                struct compute_pool *pool, float *to);

#endif
