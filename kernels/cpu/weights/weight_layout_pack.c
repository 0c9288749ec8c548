/* weight_layout_pack.c - packs checkpoint matrices into panels, once per matrix at load time.
 *
 * weight_layout_plan.c has checked the parts. The pool takes items of a few neighbouring panels of
 * one part. Each kind of source has a packer (struct weight_packer); all of them interleave 16 rows
 * into words, a tile at a time, so that the source is read once and only the result is as large as
 * the matrix. Lanes past n_out and k past n_in stay zero. Quantising needs a whole row (wint8,
 * wint4) or 128 rows by 128 k (block_wise_fp8), which are dequantised to f32 in scratch. Types of
 * less than 16 bits are packed as they are, whatever `quantize` says.
 * Thread: loading (weight_layout_pack), compute pool (the packers). */
#include <string.h>

#include "kernels/cpu/weights/weight_layout_offsets.h"
#include "kernels/cpu/weights/weight_layout_transpose.h"
#include "kernels/dtype_blocks.h"
#include "kernels/host/pages.h"
#include "kernels/quantize.h"
#include "kernels/weight_src.h"
#include "shared/base/arith.h"
#include "shared/base/mem.h"

enum {
    TRANSPOSE_K = 128 /* k of a transposed source that are transposed at a time */,
    ITEM_PANELS = F8_BLOCK / PANEL,
    CHANNEL_PANELS = 2
};

struct pack_job;

/* Panels panel0 .. panel0 + n_panels of one part, which hold n_rows rows from row0 on. */
struct pack_item {
    const struct pack_job *job;
    const struct weight_src *src;
    size_t i_part, panel0, n_panels, row0, n_rows;
    uint8_t *transposed; /* scratch: rows of a transposed or dummy source */
    float *f32;          /* ... as f32 */
    uint8_t *q;          /* ... quantised */
};

struct weight_packer {
    void (*run)(const struct pack_item *item);
    size_t panels, panels_transposed; /* of an item */
};

struct pack_job {
    const struct weight_pack_args *a;
    struct weight *out;
    const struct weight_packer *packer;
    size_t n_in, size /* of an element or block */, panel_bytes, panels_per_item;
    uint8_t *scratch;
    size_t transposed_bytes, f32_bytes, q_bytes;
};

static size_t panels_of(const struct weight_src *s) { return (s->n_out + PANEL - 1) / PANEL; }

static uint8_t *panel_of(const struct pack_item *item, size_t i)
{
    const struct weight_pack_args *a = item->job->a;
    size_t at = item->panel0 + i;
    if (a->join == JOIN_PAIRED) at = 2 * at + item->i_part;
    else
        for (size_t p = 0; p < item->i_part; p++) at += panels_of(&a->parts[p]);
    return (uint8_t *)item->job->out->data + at * item->job->panel_bytes;
}

/* Rows that panel i of the item has. */
static size_t lanes_in(const struct pack_item *item, size_t i)
{
    return min_size(PANEL, item->n_rows - i * PANEL);
}

/* Whether rows must be copied to scratch first, some k at a time. */
static bool needs_staging(const struct weight_src *s)
{
    return s->transposed || weight_src_is_dummy(s);
}

struct pack_rows {
    const uint8_t *at;
    size_t stride;
};

static struct pack_rows dummy_rows(const struct pack_item *item, size_t k0, size_t n_k)
{
    const size_t stride = n_k * item->job->size;
    for (size_t i = 0; i < item->n_rows; i++)
        weight_src_dummy_row(item->src, item->row0 + i, k0, n_k, item->transposed + i * stride);
    return (struct pack_rows){ item->transposed, stride };
}

/* The item's rows at k0 .. k0 + n_k, of a source of a scalar type. */
static struct pack_rows pack_rows_of(const struct pack_item *item, size_t k0, size_t n_k)
{
    const struct weight_src *s = item->src;
    if (weight_src_is_dummy(s)) return dummy_rows(item, k0, n_k);
    size_t size = item->job->size, across = s->transposed ? s->n_out : s->n_in,
           stride = s->row_bytes ? s->row_bytes : across * size;
    const uint8_t *data = s->data;
    if (!s->transposed) return (struct pack_rows){ data + item->row0 * stride + k0 * size, stride };
    weight_layout_transpose(item->transposed, n_k * size, data + k0 * stride + item->row0 * size,
                            stride, item->n_rows, n_k, size);
    return (struct pack_rows){ item->transposed, n_k * size };
}

/* ---- scalar types as they are ---- */

static void copy_f8_scales(const struct pack_item *item)
{
    size_t n_in = item->job->n_in, n = (n_in + F8_BLOCK - 1) / F8_BLOCK;
    const char *from = (const char *)item->src->scales;
    for (size_t i = 0; i < item->n_panels; i++) {
        float *to = (float *)(panel_of(item, i) + weight_layout_tail_at(LAYOUT_F8, n_in));
        for (size_t b = 0; b < n; b++) to[b] = 1;
        if (from)
            memcpy(to, from + (item->row0 + i * PANEL) / F8_BLOCK * n * sizeof *to, n * sizeof *to);
    }
}

static void pack_words(const struct pack_item *item)
{
    size_t n_in = item->job->n_in, size = item->job->size,
           step = needs_staging(item->src) ? TRANSPOSE_K : n_in;
    for (size_t k = 0; k < n_in; k += step) {
        size_t n_k = min_size(step, n_in - k);
        struct pack_rows rows = pack_rows_of(item, k, n_k);
        for (size_t i = 0; i < item->n_panels; i++) {
            uint32_t *words = (uint32_t *)panel_of(item, i) + k * size / sizeof *words * PANEL;
            weight_layout_interleave_rows(words, rows.at + i * PANEL * rows.stride, rows.stride,
                                          lanes_in(item, i), n_k * size);
        }
    }
    if (item->src->dtype == DTYPE_F8_E4M3) copy_f8_scales(item);
}

/* ---- block types of GGUF ---- */

/* Packs bytes below 16 into nibbles in place: of each eight, the first four become low and the
 * others high halves. */
static void pack_nibbles(uint8_t *q, size_t n)
{
    for (size_t i = 0; i < n; i += 8) {
        uint64_t eight;
        memcpy(&eight, q + i, sizeof eight);
        uint32_t four = (uint32_t)(eight | eight >> 28);
        memcpy(q + i / 2, &four, sizeof four);
    }
}

/* Writes scales; groups of 32 take those of their first half, because both halves have the same. */
static void write_scales(uint8_t *block, const struct weight_layout_offsets *at, size_t group,
                         const struct dtype_unpacked_block *ints, size_t n_lanes)
{
    size_t step = group / DTYPE_GROUP;
    uint16_t *d = (uint16_t *)(block + at->d), *m = (uint16_t *)(block + at->m);
    for (size_t i = 0; i < n_lanes; i++) d[i] = ints[i].d;
    if (at->m)
        for (size_t i = 0; i < n_lanes; i++) m[i] = ints[i].m;
    if (!at->scale) return;
    for (size_t i = 0; i < n_lanes; i++)
        for (size_t g = 0; g < DTYPE_GROUPS / step; g++) {
            block[at->scale + g * PANEL + i] = (uint8_t)ints[i].scale[g * step];
            block[at->min + g * PANEL + i] = (uint8_t)ints[i].min[g * step];
        }
}

static void pack_blocks(const struct pack_item *item)
{
    const struct weight_src *s = item->src;
    const struct dtype_blocks *type = dtype_blocks_of(s->dtype);
    const struct weight_layout_offsets *at = &LAYOUT_OFFSETS[item->job->out->layout];
    struct dtype_unpacked_block ints[PANEL];
    size_t bytes = item->job->size,
           stride = s->row_bytes ? s->row_bytes : dtype_row_bytes(s->dtype, s->n_in);
    const struct weight_layout_info *layout = weight_layout_info(item->job->out->layout);
    bool nibbles = layout->bits == 4;
    size_t group = (size_t)layout->group;
    memset(ints, 0, sizeof ints); /* lanes past the last row */
    const uint8_t *from = (const uint8_t *)s->data + item->row0 * stride;
    uint8_t *to = panel_of(item, 0);
    for (size_t k = 0; k < s->n_in; k += at->k, from += bytes, to += at->bytes) {
        for (size_t i = 0; i < item->n_rows; i++) {
            type->unpack(&ints[i], from + i * stride);
            if (nibbles) pack_nibbles(ints[i].q, at->k);
        }
        weight_layout_interleave_rows((uint32_t *)(to + at->q), ints[0].q, sizeof *ints, PANEL,
                                      nibbles ? at->k / 2 : at->k);
        write_scales(to, at, group, ints, item->n_rows);
    }
}

/* ---- wint8 and wint4: per output channel ---- */

static void pack_channels(const struct pack_item *item)
{
    int layout = item->job->out->layout, limit = layout == LAYOUT_W8 ? 127 : 7,
        zero = weight_layout_info(layout)->zero;
    size_t n_in = item->job->n_in, n_padded = (n_in + BLOCK_K - 1) / BLOCK_K * BLOCK_K;
    struct pack_rows rows = pack_rows_of(item, 0, n_in);
    for (size_t i = 0; i < item->n_panels; i++) {
        uint8_t *panel = panel_of(item, i);
        float *scale = (float *)(panel + weight_layout_tail_at(layout, n_in));
        size_t n_lanes = lanes_in(item, i);
        for (size_t j = 0; j < n_lanes; j++) {
            uint8_t *q = item->q + j * n_padded; /* zero from n_in on */
            dtype_to_f32(item->src->dtype, rows.at + (i * PANEL + j) * rows.stride, item->f32,
                         n_in);
            scale[j] = quantize_channel(item->f32, n_in, limit, (int8_t *)q);
            for (size_t k = 0; k < n_in; k++) q[k] = (uint8_t)(q[k] + zero);
            if (layout == LAYOUT_W4) pack_nibbles(q, n_padded);
        }
        weight_layout_interleave_rows((uint32_t *)panel, item->q, n_padded, n_lanes,
                                      layout == LAYOUT_W4 ? n_padded / 2 : n_padded);
    }
}

/* ---- block_wise_fp8: per 128 rows by 128 k's ---- */

static void pack_f8_blocks(const struct pack_item *item)
{
    size_t n_in = item->job->n_in;
    for (size_t k = 0; k < n_in; k += F8_BLOCK) {
        size_t n_k = min_size(F8_BLOCK, n_in - k);
        struct pack_rows rows = pack_rows_of(item, k, n_k);
        for (size_t i = 0; i < item->n_rows; i++)
            dtype_to_f32(item->src->dtype, rows.at + i * rows.stride, item->f32 + i * F8_BLOCK,
                         n_k);
        float scale = quantize_f8_block(item->f32, F8_BLOCK, item->n_rows, n_k, item->q, F8_BLOCK);
        for (size_t i = 0; i < item->n_panels; i++) {
            uint8_t *panel = panel_of(item, i);
            weight_layout_interleave_rows((uint32_t *)panel + k / 4 * PANEL,
                                          item->q + i * PANEL * F8_BLOCK, F8_BLOCK,
                                          lanes_in(item, i), n_k);
            ((float *)(panel + weight_layout_tail_at(LAYOUT_F8, n_in)))[k / F8_BLOCK] = scale;
        }
    }
}

/* ---- the work as a whole ---- */

static const struct weight_packer WORDS = { pack_words, 1, ITEM_PANELS },
                                  BLOCKS = { pack_blocks, 1, 1 },
                                  CHANNELS = { pack_channels, 1,
                                               CHANNEL_PANELS /* a cache line of bf16 */ },
                                  F8_BLOCKS = { pack_f8_blocks, ITEM_PANELS, ITEM_PANELS };

static const struct weight_packer *packer_of(enum dtype t, int layout)
{
    if (dtype_blocks_of(t)) return &BLOCKS;
    if (layout == LAYOUT_W8 || layout == LAYOUT_W4) return &CHANNELS;
    return layout == LAYOUT_F8 && t != DTYPE_F8_E4M3 ? &F8_BLOCKS : &WORDS;
}

static size_t items_of(const struct pack_job *job, const struct weight_src *s)
{
    return (panels_of(s) + job->panels_per_item - 1) / job->panels_per_item;
}

static void run_item(void *arg, int index, int thread)
{
    const struct pack_job *job = arg;
    struct pack_item item = { .job = job };
    size_t at = (size_t)index;
    if (job->a->join == JOIN_PAIRED) { /* in order of the panels that are written, as products read
                                        * them */
        item.i_part = at % 2;
        at /= 2;
    }
    while (at >= items_of(job, &job->a->parts[item.i_part]))
        at -= items_of(job, &job->a->parts[item.i_part++]);
    item.src = &job->a->parts[item.i_part];
    item.panel0 = at * job->panels_per_item;
    item.n_panels = min_size(job->panels_per_item, panels_of(item.src) - item.panel0);
    item.row0 = item.panel0 * PANEL;
    item.n_rows = min_size(item.n_panels * PANEL, item.src->n_out - item.row0);
    if (job->scratch) {
        item.transposed = job->scratch +
                          (size_t)thread * (job->transposed_bytes + job->f32_bytes + job->q_bytes);
        item.f32 = (float *)(item.transposed + job->transposed_bytes);
        item.q = item.transposed + job->transposed_bytes + job->f32_bytes;
    }
    job->packer->run(&item);
}

/* Scratch for one thread, each piece a whole number of cache lines. */
static void plan_scratch(struct pack_job *job, bool staged)
{
    size_t n_in = (job->n_in + 63) / 64 * 64, rows = job->panels_per_item * PANEL;
    if (job->packer == &CHANNELS) {
        job->transposed_bytes = staged ? rows * n_in * job->size : 0;
        job->f32_bytes = n_in * sizeof(float);
        job->q_bytes = PANEL * n_in;
    } else {
        job->transposed_bytes = staged ? rows * TRANSPOSE_K * job->size : 0;
        job->f32_bytes = job->packer == &F8_BLOCKS ? F8_BLOCK * F8_BLOCK * sizeof(float) : 0;
        job->q_bytes = job->packer == &F8_BLOCKS ? F8_BLOCK * F8_BLOCK : 0;
    }
}

static enum status no_memory(size_t bytes, struct err *err)
{
    return err_set(err, ERR_NOMEM, "no memory for %zu bytes", bytes);
}

enum status weight_layout_pack(struct kernel_ctx *c, const struct weight_pack_args *a,
                               struct weight *out, struct err *err)
{
    struct weight w;
    struct pack_job job = { .a = a, .out = &w };
    size_t n_items = 0;
    TRY(weight_layout_plan(c, a, &w, err));
    const struct weight_src *first = &a->parts[0];
    job.n_in = first->n_in;
    job.size = dtype_block_bytes(first->dtype);
    job.panel_bytes = weight_layout_panel_bytes(w.layout, w.n_in);
    job.packer = packer_of(first->dtype, w.layout);
    job.panels_per_item = first->transposed ? job.packer->panels_transposed : job.packer->panels;
    w.data = weight_arena_take(a->arena, w.bytes);
    if (!w.data) w.data = pages_map(w.bytes);
    if (!w.data) return no_memory(w.bytes, err);
    plan_scratch(&job, needs_staging(first));
    size_t scratch_bytes = job.transposed_bytes + job.f32_bytes + job.q_bytes;
    job.scratch = scratch_bytes
                      ? mem_try_calloc((size_t)compute_pool_threads(c->pool), scratch_bytes)
                      : NULL;
    if (scratch_bytes && !job.scratch) {
        weight_layout_release(c, &w);
        return no_memory(scratch_bytes * (size_t)compute_pool_threads(c->pool), err);
    }
    for (size_t i = 0; i < a->n_parts; i++) n_items += items_of(&job, &a->parts[i]);
    compute_pool_run(c->pool, (int)n_items, run_item, &job);
    mem_free(job.scratch);
    *out = w;
    return OK;
}
