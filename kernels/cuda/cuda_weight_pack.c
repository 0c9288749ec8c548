/* cuda_weight_pack.c - packs checkpoint matrices into the layouts of gemm.h: on the host by the
 * compute pool, in pieces of some rows, which are uploaded while the next are packed
 * (weight_upload.h). The op pack returns before the last of them has arrived.
 *
 * FAST: bf16 stays BF16, f16 F16, f8 F8, f32 F32 (routers), GGUF's block types become BF16, and
 * --quantization selects W8, W4 or F8 by the rules of quantize.h. F32 arithmetic: every element
 * becomes the f32 that its format means. Dummy weights are computed on the GPU (fill_dummy.h). Life
 * cycle: struct weight. Thread: loading, compute pool. */
#include <string.h>

#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/fill_dummy.h"
#include "kernels/cuda/gemm/gemm.h"
#include "kernels/quantize.h"
#include "kernels/weight_src.h"
#include "shared/base/arith.h"
#include "shared/base/mem.h"

/* ---- plan ---- */

static enum gemm_weight_layout layout_of(enum dtype t, enum quantize q,
                                         enum activations activations)
{
    const bool unquantised = t == DTYPE_F32 || t == DTYPE_F16 || t == DTYPE_BF16;
    if (activations == ACTIVATIONS_F32) return GEMM_F32;
    if (t == DTYPE_F8_E4M3) return GEMM_F8;
    if (unquantised && q == QUANTIZE_WINT8) return GEMM_W8;
    if (unquantised && q == QUANTIZE_WINT4) return GEMM_W4;
    if (unquantised && q == QUANTIZE_BLOCK_FP8) return GEMM_F8;
    if (t == DTYPE_F16) return GEMM_F16;
    return t == DTYPE_F32 ? GEMM_F32 : GEMM_BF16;
}

enum status cuda_weight_plan(const struct kernel_ctx *c, const struct weight_pack_args *a,
                             struct weight *out, struct err *err)
{
    struct weight w;
    TRY(weight_src_check(a, &w, err));
    w.layout = layout_of(a->parts[0].dtype, a->quantize, c->options.activations);
    for (size_t i = 0; w.layout == GEMM_F8 && !w.paired && i + 1 < a->n_parts; i++)
        if (a->parts[i].n_out % F8_BLOCK != 0)
            return err_set(err, ERR_UNSUPPORTED,
                           "a part of %zu rows with scales per %d cannot have another behind it",
                           a->parts[i].n_out, F8_BLOCK);
    w.bytes = gemm_matrix_bytes(w.layout, w.paired, w.n_out, w.n_in);
    *out = w;
    return OK;
}

/* ---- pack ---- */

struct cuda_pack_job {
    const struct weight_pack_args *a;
    const struct weight *w;
    uint8_t *rows; /* of the piece: the matrix's rows from row0 on */
    size_t row0, unit0;
    float *scales; /* of the whole matrix */
    float *f32;    /* [threads][scratch_of] */
    uint8_t *q;
    size_t row_bytes, f8_blocks;
};

/* Rows row0 .. row0 + n of a part. */
struct cuda_pack_block {
    const struct weight_src *src;
    size_t part, first; /* rows of earlier parts */
    size_t row0, n;
    float *f32;
    uint8_t *q;
};

/* Elements of scratch per thread. */
static size_t scratch_of(const struct weight *w)
{
    return round_up(WEIGHT_BLOCK_ROWS * w->n_in, WEIGHT_BLOCK_ROWS * F8_BLOCK);
}

/* The row of the matrix that is row i of the block. */
static size_t row_of(const struct cuda_pack_job *p, const struct cuda_pack_block *b, size_t i)
{
    return p->w->paired ? 2 * (b->row0 + i) + b->part : b->first + b->row0 + i;
}

static uint8_t *at(const struct cuda_pack_job *p, const struct cuda_pack_block *b, size_t i)
{
    return p->rows + (row_of(p, b, i) - p->row0) * p->row_bytes;
}

/* The scales of the block's 128 rows; a paired matrix has gate's blocks, then up's. */
static float *f8_scales(const struct cuda_pack_job *p, const struct cuda_pack_block *b)
{
    const size_t blocks_of_part = (b->src->n_out + F8_BLOCK - 1) / F8_BLOCK;
    const size_t i = p->w->paired ? b->part * blocks_of_part + b->row0 / F8_BLOCK
                                  : (b->first + b->row0) / F8_BLOCK;
    return p->scales + i * p->f8_blocks;
}

static void write_f32(const struct cuda_pack_job *p, const struct cuda_pack_block *b)
{
    for (size_t i = 0; i < b->n; i++)
        memcpy(at(p, b, i), b->f32 + i * p->w->n_in, p->w->n_in * sizeof(float));
}

static void write_bf16(const struct cuda_pack_job *p, const struct cuda_pack_block *b)
{
    for (size_t i = 0; i < b->n; i++) {
        uint16_t *to = (uint16_t *)(void *)at(p, b, i);
        for (size_t k = 0; k < p->w->n_in; k++)
            to[k] = dtype_f32_to_bf16(b->f32[i * p->w->n_in + k]);
    }
}

static void write_f16(const struct cuda_pack_job *p, const struct cuda_pack_block *b)
{
    for (size_t i = 0; i < b->n; i++) {
        uint16_t *to = (uint16_t *)(void *)at(p, b, i);
        for (size_t k = 0; k < p->w->n_in; k++)
            to[k] = dtype_f32_to_f16(b->f32[i * p->w->n_in + k]);
    }
}

static void write_w8(const struct cuda_pack_job *p, const struct cuda_pack_block *b)
{
    for (size_t i = 0; i < b->n; i++)
        p->scales[row_of(p, b, i)] = quantize_channel(b->f32 + i * p->w->n_in, p->w->n_in, 127,
                                                      (int8_t *)at(p, b, i));
}

static void write_w4(const struct cuda_pack_job *p, const struct cuda_pack_block *b)
{
    for (size_t i = 0; i < b->n; i++) {
        uint8_t *to = at(p, b, i);
        p->scales[row_of(p, b, i)] = quantize_channel(b->f32 + i * p->w->n_in, p->w->n_in, 7,
                                                      (int8_t *)b->q);
        memset(to, 0x88, p->row_bytes); /* zeros */
        for (size_t k = 0; k < p->w->n_in; k++) {
            const unsigned nibble = (unsigned)((int8_t)b->q[k] + 8);
            to[k / 2] = (uint8_t)(k % 2 ? (to[k / 2] & 0x0f) | nibble << 4
                                        : (to[k / 2] & 0xf0) | nibble);
        }
    }
}

/* Quantises 128 columns at a time. */
static void write_f8(const struct cuda_pack_job *p, const struct cuda_pack_block *b)
{
    const size_t n_in = p->w->n_in;
    float *scales = f8_scales(p, b);
    for (size_t k = 0; k < n_in; k += F8_BLOCK) {
        const size_t n_k = min_size(F8_BLOCK, n_in - k);
        scales[k / F8_BLOCK] = quantize_f8_block(b->f32 + k, n_in, b->n, n_k, b->q, F8_BLOCK);
        for (size_t i = 0; i < b->n; i++) memcpy(at(p, b, i) + k, b->q + i * F8_BLOCK, n_k);
    }
}

/* Copies 16-bit rows whose order is already right. */
static void copy_16(const struct cuda_pack_job *p, const struct cuda_pack_block *b)
{
    const size_t n_in = p->w->n_in,
                 stride = b->src->row_bytes ? b->src->row_bytes : n_in * sizeof(uint16_t);
    for (size_t i = 0; i < b->n; i++)
        memcpy(at(p, b, i), (const char *)b->src->data + (b->row0 + i) * stride,
               n_in * sizeof(uint16_t));
}

/* Copies an f8 source. */
static void copy_f8(const struct cuda_pack_job *p, const struct cuda_pack_block *b)
{
    const struct weight_src *s = b->src;
    const size_t n_in = p->w->n_in, stride = s->row_bytes    ? s->row_bytes
                                             : s->transposed ? s->n_out
                                                             : n_in;
    const uint8_t *from = s->data;
    float *scales = f8_scales(p, b);
    for (size_t k = 0; k < p->f8_blocks; k++)
        scales[k] = s->scales ? s->scales[b->row0 / F8_BLOCK * p->f8_blocks + k] : 1;
    for (size_t i = 0; i < b->n; i++) {
        const size_t row = b->row0 + i;
        if (!s->transposed) memcpy(at(p, b, i), from + row * stride, n_in);
        else
            for (size_t k = 0; k < n_in; k++) at(p, b, i)[k] = from[k * stride + row];
    }
}

/* F32 arithmetic of a quantised matrix: replaces each value by the value of its quantised form. */
static void round_to_quantised(const struct cuda_pack_job *p, const struct cuda_pack_block *b)
{
    const size_t n_in = p->w->n_in;
    const int limit = p->a->quantize == QUANTIZE_WINT8 ? 127 : 7;
    if (p->a->quantize == QUANTIZE_BLOCK_FP8) {
        for (size_t k = 0; k < n_in; k += F8_BLOCK) {
            const size_t n_k = min_size(F8_BLOCK, n_in - k);
            const float scale = quantize_f8_block(b->f32 + k, n_in, b->n, n_k, b->q, F8_BLOCK);
            for (size_t i = 0; i < b->n; i++)
                for (size_t j = 0; j < n_k; j++)
                    b->f32[i * n_in + k + j] = dtype_f8_e4m3_to_f32(b->q[i * F8_BLOCK + j]) * scale;
        }
        return;
    }
    for (size_t i = 0; i < b->n; i++) {
        float *row = b->f32 + i * n_in;
        const float scale = quantize_channel(row, n_in, limit, (int8_t *)b->q);
        for (size_t k = 0; k < n_in; k++) row[k] = (float)(int8_t)b->q[k] * scale;
    }
}

static void (*const WRITE[GEMM_WEIGHT_LAYOUTS])(const struct cuda_pack_job *,
                                                const struct cuda_pack_block *) = {
    [GEMM_F32] = write_f32, [GEMM_BF16] = write_bf16, [GEMM_F16] = write_f16,
    [GEMM_W8] = write_w8,   [GEMM_W4] = write_w4,     [GEMM_F8] = write_f8,
};

static size_t blocks_of(const struct weight_src *s)
{
    return (s->n_out + WEIGHT_BLOCK_ROWS - 1) / WEIGHT_BLOCK_ROWS;
}

/* Zeros the padding of rows, for elements of whole bytes. */
static void zero_padding(const struct cuda_pack_job *p, const struct cuda_pack_block *b)
{
    static const unsigned char bytes[GEMM_WEIGHT_LAYOUTS] = {
        [GEMM_F32] = 4, [GEMM_BF16] = 2, [GEMM_F16] = 2, [GEMM_W8] = 1, [GEMM_F8] = 1
    };
    const size_t used = p->w->n_in * bytes[p->w->layout];
    for (size_t i = 0; used > 0 && used < p->row_bytes && i < b->n; i++)
        memset(at(p, b, i) + used, 0, p->row_bytes - used);
}

static void write_block(const struct cuda_pack_job *p, const struct cuda_pack_block *b)
{
    const enum dtype t = b->src->dtype;
    const bool unquantised = t == DTYPE_F32 || t == DTYPE_F16 || t == DTYPE_BF16;
    if (p->w->layout == GEMM_F8 && t == DTYPE_F8_E4M3) {
        copy_f8(p, b);
        return;
    }
    const bool as_stored = (p->w->layout == GEMM_BF16 && t == DTYPE_BF16) ||
                           (p->w->layout == GEMM_F16 && t == DTYPE_F16);
    if (as_stored && !b->src->transposed && !weight_src_is_dummy(b->src)) {
        copy_16(p, b);
        return;
    }
    weight_src_rows_f32(b->src, b->row0, b->n, b->f32);
    if (p->w->layout == GEMM_F32 && p->a->quantize != QUANTIZE_NONE && unquantised)
        round_to_quantised(p, b);
    WRITE[p->w->layout](p, b);
}

/* ---- units: neighbouring rows of the matrix ---- */

/* A unit is a block of a part, or of a pair the same block of both. */
static size_t units_of(const struct weight_pack_args *a)
{
    size_t n = 0;
    for (size_t i = 0; i < (a->join == JOIN_PAIRED ? 1 : a->n_parts); i++)
        n += blocks_of(&a->parts[i]);
    return n;
}

/* The matrix's first row of unit u; past the last unit the number of rows. */
static size_t unit_begin(const struct cuda_pack_job *p, size_t u)
{
    const struct weight_src *s = p->a->parts;
    size_t first = 0;
    if (p->w->paired) return min_size(2 * u * WEIGHT_BLOCK_ROWS, p->w->n_out);
    for (; first < p->w->n_out && u >= blocks_of(s); s++) {
        u -= blocks_of(s);
        first += s->n_out;
    }
    return first + u * WEIGHT_BLOCK_ROWS;
}

/* Work items of a block: an expert's matrix has a dozen blocks, too few to keep sixteen threads
 * busy. Rows that share a scale stay together. */
static size_t items_of_block(const struct cuda_pack_job *p)
{
    return p->w->layout == GEMM_F8 || p->a->quantize == QUANTIZE_BLOCK_FP8 ? 1 : 4;
}

static size_t items_of_unit(const struct cuda_pack_job *p)
{
    return (p->w->paired ? 2 : 1) * items_of_block(p);
}

static void pack_item(void *arg, int index, int thread)
{
    const struct cuda_pack_job *p = arg;
    const size_t room = scratch_of(p->w), n_items = items_of_block(p),
                 item = (size_t)index % n_items, rows = WEIGHT_BLOCK_ROWS / n_items;
    struct cuda_pack_block b = {
        .src = p->a->parts,
        .f32 = p->f32 + (size_t)thread * room,
        .q = p->q + (size_t)thread * room,
    };
    size_t i = p->unit0 + (size_t)index / items_of_unit(p);
    if (p->w->paired) {
        b.part = (size_t)index / n_items % 2;
        b.src += b.part;
    }
    for (; i >= blocks_of(b.src); b.src++, b.part++) {
        i -= blocks_of(b.src);
        b.first += b.src->n_out;
    }
    b.row0 = i * WEIGHT_BLOCK_ROWS + item * rows;
    if (b.row0 >= b.src->n_out) return;
    b.n = min_size(rows, b.src->n_out - b.row0);
    write_block(p, &b);
    zero_padding(p, &b);
}

/* ---- pieces ---- */

/* Packs and uploads as many units from unit0 on as a buffer holds, at least one. Returns the next
 * unit. */
static size_t upload_piece(struct cuda_ctx *c, struct cuda_pack_job *p, char *to)
{
    const size_t n = units_of(p->a);
    size_t end = p->unit0 + 1;
    p->row0 = unit_begin(p, p->unit0);
    while (end < n &&
           (unit_begin(p, end + 1) - p->row0) * p->row_bytes <= WEIGHT_UPLOAD_BUFFER_BYTES)
        end++;
    const size_t bytes = (unit_begin(p, end) - p->row0) * p->row_bytes, n_units = end - p->unit0;
    p->rows = weight_upload_reserve(c, bytes);
    if (!p->rows) return n;
    compute_pool_run(c->base.pool, (int)(n_units * items_of_unit(p)), pack_item, p);
    weight_upload_copy(c, to + p->row0 * p->row_bytes, p->rows, bytes);
    return end;
}

static void upload_scales(struct cuda_ctx *c, const struct cuda_pack_job *p, char *to, size_t bytes)
{
    void *room = weight_upload_reserve(c, bytes);
    if (!room) return;
    memcpy(room, p->scales, bytes);
    weight_upload_copy(c, to, room, bytes);
}

static enum status pack_and_upload(struct kernel_ctx *base, const struct weight_pack_args *a,
                                   const struct weight *w, char *to, struct err *err)
{
    struct cuda_ctx *c = cuda_ctx_of(base);
    const size_t scales_at = gemm_scales_at((enum gemm_weight_layout)w->layout, w->n_out, w->n_in),
                 scale_bytes = w->bytes - scales_at;
    struct cuda_pack_job p = {
        .a = a,
        .w = w,
        .row_bytes = gemm_row_bytes((enum gemm_weight_layout)w->layout, w->n_in),
        .f8_blocks = (w->n_in + F8_BLOCK - 1) / F8_BLOCK,
    };
    p.scales = mem_try_calloc(1, scale_bytes ? scale_bytes : 1);
    if (!p.scales ||
        !weight_upload_scratch(c, (size_t)compute_pool_threads(base->pool) * scratch_of(w))) {
        mem_free(p.scales);
        return err_set(err, ERR_NOMEM, "no host memory to pack a matrix of %zu MiB",
                       w->bytes >> 20);
    }
    p.f32 = c->upload.f32;
    p.q = c->upload.q;
    for (const size_t n = units_of(a); p.unit0 < n;) p.unit0 = upload_piece(c, &p, to);
    if (scale_bytes > 0) upload_scales(c, &p, to + scales_at, scale_bytes);
    mem_free(p.scales);
    weight_upload_stream_wait(c);
    return device_fault(base->device, err);
}

/* ---- dummy weights ---- */

/* Whether dummy weights are computed on the GPU: all except quantised ones in F32 arithmetic, which
 * only tests use. */
static bool can_fill_dummy(const struct weight_pack_args *a, const struct weight *w)
{
    for (size_t i = 0; i < a->n_parts; i++)
        if (!weight_src_is_dummy(&a->parts[i])) return false;
    return w->layout != GEMM_F32 || a->quantize == QUANTIZE_NONE;
}

/* Computes dummy weights on the GPU; padding of rows and scales is zero. */
static enum status fill_dummy_weight(struct kernel_ctx *base, const struct weight_pack_args *a,
                                     const struct weight *w, char *to, struct err *err)
{
    struct cuda_device *d = cuda_ctx_of(base)->device;
    const enum gemm_weight_layout layout = (enum gemm_weight_layout)w->layout;
    const size_t f8_blocks = (w->n_in + F8_BLOCK - 1) / F8_BLOCK;
    size_t first = 0, block = 0;
    bool good = cuda_check(d, cudaMemsetAsync(to, 0, w->bytes, d->stream), "clearing a weight");
    for (size_t i = 0; i < a->n_parts && good; i++) {
        const struct weight_src *s = &a->parts[i];
        float *scales = (float *)(void *)(to + gemm_scales_at(layout, w->n_out, w->n_in));
        struct fill_dummy f = {
            .layout = layout,
            .rows = to,
            .row_bytes = gemm_row_bytes(layout, w->n_in),
            .scales = scales,
            .first = w->paired ? i : first,
            .row_interval = w->paired ? 2 : 1,
            .n_rows = s->n_out,
            .n_in = s->n_in,
            .from = s->dummy,
        };
        if (layout == GEMM_F8) f.scales += block * f8_blocks;
        weight_src_strides(s, &f.row_step, &f.k_step);
        good = cuda_check(d, fill_dummy_run(d->stream, &f), "filling a dummy weight");
        first += s->n_out;
        block += blocks_of(s);
    }
    return device_fault(base->device, err);
}

enum status cuda_weight_pack(struct kernel_ctx *c, const struct weight_pack_args *a,
                             struct weight *out, struct err *err)
{
    struct weight w;
    TRY(cuda_weight_plan(c, a, &w, err));
    struct dev_mem mem = { .ptr = weight_arena_take(a->arena, w.bytes) };
    w.borrowed = mem.ptr != NULL;
    if (!w.borrowed) TRY(device_mem_alloc(c->device, w.bytes, DEVICE_MEM_PRIVATE, &mem, err));
    enum status st = can_fill_dummy(a, &w) ? fill_dummy_weight(c, a, &w, mem.ptr, err)
                                           : pack_and_upload(c, a, &w, mem.ptr, err);
    if (st != OK) {
        if (!w.borrowed) device_mem_free(c->device, &mem);
        return st;
    }
    w.data = mem.ptr;
    *out = w;
    return OK;
}

enum status cuda_weight_arena_create(struct kernel_ctx *c, size_t bytes, struct weight_arena *out,
                                     struct err *err)
{
    *out = (struct weight_arena){ 0 };
    if (bytes == 0) return OK;
    TRY(device_mem_alloc(c->device, bytes, DEVICE_MEM_PRIVATE, &out->mem, err));
    out->at = out->mem.ptr;
    out->left = bytes;
    return OK;
}

void cuda_weight_arena_free(struct kernel_ctx *c, struct weight_arena *a)
{
    device_mem_free(c->device, &a->mem);
    *a = (struct weight_arena){ 0 };
}

void cuda_weight_release(struct kernel_ctx *c, struct weight *w)
{
    struct dev_mem mem = { .ptr = w->data, .bytes = w->bytes, .fd = -1, .kind = DEV_MEM_CUDA };
    device_mem_free(c->device, &mem);
}
