/* panel.c - packing of checkpoint matrices into panels, and reading them back.
 *
 * Packing happens once per matrix at load time, one panel per work item. F16 becomes F32 (exact); every other type keeps
 * its precision and size. Life cycle: panel_pack maps the memory, weight_release unmaps it. Thread: engine, pool. */
#include "kernels/cpu/panel.h"

#include <string.h>

#include "kernels/cpu/pages.h"
#include "shared/base/assert.h"

enum { K_TILE = 64 }; /* elements of a row converted at a time */

struct pack_job {
    const struct weight_src *src;
    struct weight           *out;
    size_t                   src_row_bytes, bytes_per_panel;
};

size_t panel_bytes(enum dtype t, size_t n_in)
{
    switch (t) {
    case DTYPE_F32: return n_in * PANEL * sizeof(float);
    case DTYPE_BF16: return (n_in + 1) / 2 * PANEL * sizeof(uint32_t);
    case DTYPE_Q8_0: return n_in / DTYPE_BLOCK * sizeof(struct panel_q8_0);
    case DTYPE_Q4_1: return n_in / DTYPE_BLOCK * sizeof(struct panel_q4_1);
    case DTYPE_F16:
    case DTYPE_COUNT: break;
    }
    return 0;
}

static void pack_f32(const struct pack_job *job, const char *row, size_t lane, float *panel)
{
    float  tile[K_TILE];
    size_t n_in = job->src->n_in;
    for (size_t k0 = 0; k0 < n_in; k0 += K_TILE) {
        size_t n = n_in - k0 < K_TILE ? n_in - k0 : K_TILE;
        dtype_to_f32(job->src->dtype, row + dtype_row_bytes(job->src->dtype, k0), tile, n);
        for (size_t k = 0; k < n; k++) panel[(k0 + k) * PANEL + lane] = tile[k];
    }
}

static void pack_bf16(const struct pack_job *job, const char *row, size_t lane, uint32_t *panel)
{
    for (size_t k = 0; k < job->src->n_in; k++) {
        uint16_t h;
        memcpy(&h, row + 2 * k, sizeof h);
        panel[k / 2 * PANEL + lane] |= (uint32_t)h << 16 * (k % 2);
    }
}

static void pack_q8_0(const struct pack_job *job, const char *row, size_t lane, struct panel_q8_0 *panel)
{
    for (size_t b = 0; b < job->src->n_in / DTYPE_BLOCK; b++) {
        const char *block = row + b * dtype_block_bytes(DTYPE_Q8_0);
        memcpy(&panel[b].d[lane], block, sizeof panel[b].d[lane]);
        for (int k = 0; k < DTYPE_BLOCK; k++) panel[b].q[k][lane] = (int8_t)block[2 + k];
    }
}

static void pack_q4_1(const struct pack_job *job, const char *row, size_t lane, struct panel_q4_1 *panel)
{
    for (size_t b = 0; b < job->src->n_in / DTYPE_BLOCK; b++) {
        const char *block = row + b * dtype_block_bytes(DTYPE_Q4_1);
        memcpy(&panel[b].d[lane], block, sizeof panel[b].d[lane]);
        memcpy(&panel[b].m[lane], block + 2, sizeof panel[b].m[lane]);
        for (int k = 0; k < DTYPE_BLOCK; k++) {
            uint8_t pair = (uint8_t)block[4 + k % 16];
            panel[b].q[k / 8][lane] |= (uint32_t)(k < 16 ? pair & 15 : pair >> 4) << 4 * (k % 8);
        }
    }
}

static void pack_panel(void *arg, int index, int thread)
{
    (void)thread;
    const struct pack_job *job = arg;
    char *panel = (char *)job->out->data + (size_t)index * job->bytes_per_panel;
    for (size_t lane = 0; lane < PANEL; lane++) {
        size_t row_index = (size_t)index * PANEL + lane;
        if (row_index >= job->src->n_out) break; /* the mapping is zero already */
        const char *row = (const char *)job->src->data + row_index * job->src_row_bytes;
        switch (job->out->dtype) {
        case DTYPE_F32: pack_f32(job, row, lane, (float *)panel); break;
        case DTYPE_BF16: pack_bf16(job, row, lane, (uint32_t *)panel); break;
        case DTYPE_Q8_0: pack_q8_0(job, row, lane, (struct panel_q8_0 *)panel); break;
        case DTYPE_Q4_1: pack_q4_1(job, row, lane, (struct panel_q4_1 *)panel); break;
        case DTYPE_F16:
        case DTYPE_COUNT: break;
        }
    }
}

enum status panel_pack(struct kernel_ctx *c, const struct weight_src *src, struct weight *out)
{
    if (src->dtype < 0 || src->dtype >= DTYPE_COUNT) return ERR_UNSUPPORTED;
    if (src->n_out == 0 || src->n_in == 0 || src->n_in % dtype_block(src->dtype) != 0) return ERR_INVALID;
    if (src->n_out > INT32_MAX || src->n_in > INT32_MAX) return ERR_TOO_LONG;
    struct weight w = { .dtype = src->dtype == DTYPE_F16 ? DTYPE_F32 : src->dtype, .n_out = src->n_out, .n_in = src->n_in };
    struct pack_job job = { .src = src, .out = &w };
    job.src_row_bytes = dtype_row_bytes(src->dtype, src->n_in);
    job.bytes_per_panel = panel_bytes(w.dtype, w.n_in);
    size_t total;
    if (__builtin_mul_overflow(panel_count(&w), job.bytes_per_panel, &total)) return ERR_TOO_LONG;
    w.bytes = pages_round(total);
    w.data = w.bytes ? pages_map(w.bytes) : NULL;
    if (!w.data) return ERR_NOMEM;
    compute_pool_run(c->pool, (int)panel_count(&w), pack_panel, &job);
    *out = w;
    return OK;
}

void weight_release(struct weight *w)
{
    if (!w || !w->data) return;
    pages_unmap(w->data, w->bytes);
    *w = (struct weight){ 0 };
}

float panel_weight(const struct weight *w, size_t i_panel, size_t k, size_t lane)
{
    const void *panel = panel_at(w, i_panel, panel_bytes(w->dtype, w->n_in));
    size_t      b = k / DTYPE_BLOCK, i = k % DTYPE_BLOCK;
    switch (w->dtype) {
    case DTYPE_F32: return ((const float *)panel)[k * PANEL + lane];
    case DTYPE_BF16: return dtype_bf16_to_f32((uint16_t)(((const uint32_t *)panel)[k / 2 * PANEL + lane] >> 16 * (k % 2)));
    case DTYPE_Q8_0: {
        const struct panel_q8_0 *p = (const struct panel_q8_0 *)panel + b;
        return dtype_f16_to_f32(p->d[lane]) * (float)p->q[i][lane];
    }
    case DTYPE_Q4_1: {
        /* d*q is exact, so this sum has the one rounding of fmaf(d, q, m). */
        const struct panel_q4_1 *p = (const struct panel_q4_1 *)panel + b;
        float q = (float)(p->q[i / 8][lane] >> 4 * (i % 8) & 15);
        return dtype_f16_to_f32(p->d[lane]) * q + dtype_f16_to_f32(p->m[lane]);
    }
    case DTYPE_F16:
    case DTYPE_COUNT: break;
    }
    return 0;
}

void weight_row(const struct weight *w, size_t row, float *dst)
{
    ASSERT(row < w->n_out);
    for (size_t k = 0; k < w->n_in; k++) dst[k] = panel_weight(w, row / PANEL, k, row % PANEL);
}
