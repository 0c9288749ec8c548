/* tile_model.h - the AMX tile instructions in plain C, for CPUs without AMX: included before a
 * source that uses the intrinsics, it replaces them (tests/CMakeLists.txt). It aborts where the CPU
 * faults: no configuration, or shapes that do not match. The operations follow Intel's manuals,
 * except that denormals are kept, which the CPU flushes to zero. */
#ifndef BATON_TESTS_HARNESS_TILE_MODEL_H
#define BATON_TESTS_HARNESS_TILE_MODEL_H

#include <immintrin.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct tile_model {
    uint8_t tile[8][16][64];
    uint8_t config[64];
    bool on;
};
extern _Thread_local struct tile_model tile_model;

static inline int model_rows(int t) { return tile_model.config[48 + t]; }
static inline int model_row_bytes(int t)
{
    return tile_model.config[16 + 2 * t] | tile_model.config[17 + 2 * t] << 8;
}

static inline void model_need(bool fits)
{
    if (!tile_model.on || !fits) abort();
}

static inline void model_config(const void *config)
{
    memcpy(tile_model.config, config, sizeof tile_model.config);
    memset(tile_model.tile, 0, sizeof tile_model.tile);
    tile_model.on = true;
    model_need(tile_model.config[0] == 1);
    for (int t = 0; t < 8; t++) model_need(model_rows(t) <= 16 && model_row_bytes(t) <= 64);
}

static inline void model_load(int t, const void *from, size_t stride)
{
    model_need(model_rows(t) > 0);
    memset(tile_model.tile[t], 0, sizeof tile_model.tile[t]);
    for (int r = 0; r < model_rows(t); r++)
        memcpy(tile_model.tile[t][r], (const char *)from + (size_t)r * stride,
               (size_t)model_row_bytes(t));
}

static inline void model_store(int t, void *to, size_t stride)
{
    model_need(model_rows(t) > 0);
    for (int r = 0; r < model_rows(t); r++)
        memcpy((char *)to + (size_t)r * stride, tile_model.tile[t][r], (size_t)model_row_bytes(t));
}

static inline void model_zero(int t)
{
    model_need(model_rows(t) > 0);
    memset(tile_model.tile[t], 0, sizeof tile_model.tile[t]);
}

static inline void model_need_product(int c, int a, int b)
{
    model_need(model_rows(c) == model_rows(a) && model_row_bytes(a) == 4 * model_rows(b) &&
               model_row_bytes(c) == model_row_bytes(b));
}

/* c += a (signed bytes) * b (unsigned bytes) */
static inline void model_dpbsud(int c, int a, int b)
{
    model_need_product(c, a, b);
    for (int m = 0; m < model_rows(c); m++)
        for (int n = 0; n < model_row_bytes(c) / 4; n++) {
            int32_t sum;
            memcpy(&sum, &tile_model.tile[c][m][4 * n], sizeof sum);
            for (int k = 0; k < model_row_bytes(a); k++)
                sum += (int8_t)tile_model.tile[a][m][k] * tile_model.tile[b][k / 4][4 * n + k % 4];
            memcpy(&tile_model.tile[c][m][4 * n], &sum, sizeof sum);
        }
}

static inline float model_bf16(const uint8_t *p)
{
    uint32_t bits = (uint32_t)p[0] << 16 | (uint32_t)p[1] << 24;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* c += a * b of bf16; even and odd k are accumulated separately */
static inline void model_dpbf16ps(int c, int a, int b)
{
    model_need_product(c, a, b);
    for (int m = 0; m < model_rows(c); m++)
        for (int n = 0; n < model_row_bytes(c) / 4; n++) {
            float part[2] = { 0, 0 }, sum;
            for (int k = 0; k < model_row_bytes(a) / 2; k++)
                part[k % 2] = fmaf(model_bf16(&tile_model.tile[a][m][2 * k]),
                                   model_bf16(&tile_model.tile[b][k / 2][4 * n + k % 2 * 2]),
                                   part[k % 2]);
            memcpy(&sum, &tile_model.tile[c][m][4 * n], sizeof sum);
            sum += part[0] + part[1];
            memcpy(&tile_model.tile[c][m][4 * n], &sum, sizeof sum);
        }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbsud
#undef _tile_dpbf16ps
#define _tile_loadconfig(config)     model_config(config)
#define _tile_release()              ((void)(tile_model.on = false))
#define _tile_loadd(t, from, stride) model_load(t, from, stride)
#define _tile_stored(t, to, stride)  model_store(t, to, stride)
#define _tile_zero(t)                model_zero(t)
#define _tile_dpbsud(c, a, b)        model_dpbsud(c, a, b)
#define _tile_dpbf16ps(c, a, b)      model_dpbf16ps(c, a, b)

#endif
