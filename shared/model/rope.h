/* rope.h - the table of RoPE's cos and sin.
 *
 *     e_i = theta^(-2i/d), i = 0 .. d/2 - 1, when d elements are rotated
 *     LINEAR   inv_i = e_i / factor
 *     LLAMA3   e_i / factor for wavelengths 2 pi / e_i above original_max / low_freq_factor, e_i
 *              below original_max / high_freq_factor, in between a blend that is linear in
 *              original_max / wavelength
 *     YARN     inv_i = e_i (1 - r_i) + e_i / factor r_i, where r_i is a ramp from 0 to 1 between
 *              the frequencies that turn beta_fast and beta_slow times in original_max positions:
 *              i = d ln(original_max / (2 pi beta)) / (2 ln theta)
 *
 * Thread: any. */
#ifndef BATON_MODEL_ROPE_H
#define BATON_MODEL_ROPE_H

#include "shared/model/model.h"

/* Elements of a head that are rotated. */
uint32_t rope_dim(const struct model_config *c);
/* Inverse frequencies with the configuration's scaling, to out [rope_dim / 2], divided by `factors`
 * [rope_dim / 2] (llama3 scaling as GGUF stores it); NULL: not divided. */
void rope_inv_freq(const struct model_config *c, const float *factors, double *out);
/* YaRN's factor of cos and sin, and, squared, DeepSeek's of the scores: 0.1 m ln(factor) + 1 (Peng
 * et al. 2023, equation 22). */
double rope_mscale(double factor, double m);
size_t rope_table_bytes(const struct model_config *c, uint32_t n_positions);
/* Writes cos and sin of every position to [n_positions][rope_dim / 2][2]. Angles are computed in
 * double from integer positions: with large theta and positions, f32 would be wrong in its last
 * digits. */
void rope_table(const struct model_config *c, const float *factors, uint32_t n_positions,
                struct compute_pool *pool, float *to);

#endif
