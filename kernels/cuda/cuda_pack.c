/* cuda_pack.c - checkpoint matrices to the forms of gemm.h: made on the host by the pool, 128 rows of a part at a time, then sent.
 *
 * FAST: bf16 and f16 become BF16, as do GGUF's block types, f8 stays F8, f32 stays F32 (routers), and what --quantization asks for W8, W4 or F8
 * by the rules of quantize.h. F32 arithmetic: every element the f32 that its format means. Weights that are made up are made on the card (fill.h).
 * Life cycle: struct weight.
 * LIMIT: a matrix is whole in host memory before it is sent. Thread: loading thread, pool. */
#include <string.h>

#include "kernels/cpu/sizes.h"
#include "kernels/cuda/cuda_row.h"
#include "kernels/cuda/fill.h"
#include "kernels/cuda/gemm.h"
#include "kernels/quantize.h"
#include "kernels/weight_parts.h"
#include "shared/base/mem.h"

/* ---- plan -------------------------------------------------------------------------------------------------------- */

static enum gemm_form form_of(enum dtype t, enum quantize q, enum activations activations)
{
    const bool plain = t == DTYPE_F32 || t == DTYPE_F16 || t == DTYPE_BF16;
    if (activations == ACTIVATIONS_F32) return GEMM_F32;
    if (t == DTYPE_F8_E4M3) return GEMM_F8;
    if (plain && q == QUANTIZE_WINT8) return GEMM_W8;
    if (plain && q == QUANTIZE_WINT4) return GEMM_W4;
    if (plain && q == QUANTIZE_BLOCK_FP8) return GEMM_F8;
    return t == DTYPE_F32 ? GEMM_F32 : GEMM_BF16;
}

enum status cuda_weight_plan(const struct kernel_ctx *c, const struct weight_pack_args *a, struct weight *out, struct err *err)
{
    struct weight w;
    TRY(weight_parts_check(a, &w, err));
    w.form = form_of(a->parts[0].dtype, a->quantize, c->activations);
    for (size_t i = 0; w.form == GEMM_F8 && !w.paired && i + 1 < a->n_parts; i++)
        if (a->parts[i].n_out % F8_BLOCK != 0)
            return err_set(err, ERR_UNSUPPORTED, "a part of %zu rows with scales per %d cannot have another behind it", a->parts[i].n_out, F8_BLOCK);
    w.bytes = gemm_matrix_bytes(w.form, w.paired, w.n_out, w.n_in);
    *out = w;
    return OK;
}

/* ---- pack -------------------------------------------------------------------------------------------------------- */

struct pack {
    const struct weight_pack_args *a;
    const struct weight           *w;
    uint8_t                       *image;  /* [w->bytes] */
    float                         *scales; /* in it */
    float                         *wide;   /* [threads][WEIGHT_BLOCK_ROWS, n_in] */
    uint8_t                       *q;      /* [threads][WEIGHT_BLOCK_ROWS, n_in] */
    size_t                         row_bytes, f8_blocks;
};

/* Rows row0 .. row0 + n of a part. */
struct block {
    const struct weight_src *src;
    size_t                   part, first; /* rows of the parts before it */
    size_t                   row0, n;
    float                   *wide;
    uint8_t                 *q;
};

/* Which row of the matrix is row i of the block. */
static size_t row_of(const struct pack *p, const struct block *b, size_t i)
{
    return p->w->paired ? 2 * (b->row0 + i) + b->part : b->first + b->row0 + i;
}

static uint8_t *at(const struct pack *p, const struct block *b, size_t i) { return p->image + row_of(p, b, i) * p->row_bytes; }

/* Of the block's 128 rows: a paired matrix has gate's blocks, then up's. */
static float *f8_scales(const struct pack *p, const struct block *b)
{
    const size_t blocks_of_part = (b->src->n_out + F8_BLOCK - 1) / F8_BLOCK;
    const size_t i = p->w->paired ? b->part * blocks_of_part + b->row0 / F8_BLOCK : (b->first + b->row0) / F8_BLOCK;
    return p->scales + i * p->f8_blocks;
}

static void write_f32(const struct pack *p, const struct block *b)
{
    for (size_t i = 0; i < b->n; i++) memcpy(at(p, b, i), b->wide + i * p->w->n_in, p->w->n_in * sizeof(float));
}

static void write_bf16(const struct pack *p, const struct block *b)
{
    for (size_t i = 0; i < b->n; i++) {
        uint16_t *to = (uint16_t *)(void *)at(p, b, i);
        for (size_t k = 0; k < p->w->n_in; k++) to[k] = dtype_f32_to_bf16(b->wide[i * p->w->n_in + k]);
    }
}

static void write_w8(const struct pack *p, const struct block *b)
{
    for (size_t i = 0; i < b->n; i++)
        p->scales[row_of(p, b, i)] = quantize_channel(b->wide + i * p->w->n_in, p->w->n_in, 127, (int8_t *)at(p, b, i));
}

static void write_w4(const struct pack *p, const struct block *b)
{
    for (size_t i = 0; i < b->n; i++) {
        uint8_t *to = at(p, b, i);
        p->scales[row_of(p, b, i)] = quantize_channel(b->wide + i * p->w->n_in, p->w->n_in, 7, (int8_t *)b->q);
        memset(to, 0x88, p->row_bytes); /* zeros */
        for (size_t k = 0; k < p->w->n_in; k++) {
            const unsigned nibble = (unsigned)((int8_t)b->q[k] + 8);
            to[k / 2] = (uint8_t)(k % 2 ? (to[k / 2] & 0x0f) | nibble << 4 : (to[k / 2] & 0xf0) | nibble);
        }
    }
}

/* 128 columns at a time. */
static void write_f8(const struct pack *p, const struct block *b)
{
    const size_t n_in = p->w->n_in;
    float       *scales = f8_scales(p, b);
    for (size_t k = 0; k < n_in; k += F8_BLOCK) {
        const size_t n_k = min_size(F8_BLOCK, n_in - k);
        scales[k / F8_BLOCK] = quantize_f8_block(b->wide + k, n_in, b->n, n_k, b->q, F8_BLOCK);
        for (size_t i = 0; i < b->n; i++) memcpy(at(p, b, i) + k, b->q + i * F8_BLOCK, n_k);
    }
}

/* An f8 source as it is. */
static void copy_f8(const struct pack *p, const struct block *b)
{
    const struct weight_src *s = b->src;
    const size_t n_in = p->w->n_in, stride = s->row_bytes ? s->row_bytes : s->transposed ? s->n_out : n_in;
    const uint8_t *from = s->data;
    float         *scales = f8_scales(p, b);
    for (size_t k = 0; k < p->f8_blocks; k++) scales[k] = s->scales ? s->scales[b->row0 / F8_BLOCK * p->f8_blocks + k] : 1;
    for (size_t i = 0; i < b->n; i++) {
        const size_t row = b->row0 + i;
        if (!s->transposed) memcpy(at(p, b, i), from + row * stride, n_in);
        else
            for (size_t k = 0; k < n_in; k++) at(p, b, i)[k] = from[k * stride + row];
    }
}

/* F32 arithmetic of a matrix that is to be quantised: what it then means. */
static void round_to_quantised(const struct pack *p, const struct block *b)
{
    const size_t n_in = p->w->n_in;
    const int    limit = p->a->quantize == QUANTIZE_WINT8 ? 127 : 7;
    if (p->a->quantize == QUANTIZE_BLOCK_FP8) {
        for (size_t k = 0; k < n_in; k += F8_BLOCK) {
            const size_t n_k = min_size(F8_BLOCK, n_in - k);
            const float  scale = quantize_f8_block(b->wide + k, n_in, b->n, n_k, b->q, F8_BLOCK);
            for (size_t i = 0; i < b->n; i++)
                for (size_t j = 0; j < n_k; j++) b->wide[i * n_in + k + j] = dtype_f8_e4m3_to_f32(b->q[i * F8_BLOCK + j]) * scale;
        }
        return;
    }
    for (size_t i = 0; i < b->n; i++) {
        float      *row = b->wide + i * n_in;
        const float scale = quantize_channel(row, n_in, limit, (int8_t *)b->q);
        for (size_t k = 0; k < n_in; k++) row[k] = (float)(int8_t)b->q[k] * scale;
    }
}

static void (*const WRITE[GEMM_FORMS])(const struct pack *, const struct block *) = {
    [GEMM_F32] = write_f32, [GEMM_BF16] = write_bf16, [GEMM_W8] = write_w8, [GEMM_W4] = write_w4, [GEMM_F8] = write_f8,
};

static size_t blocks_of(const struct weight_src *s) { return (s->n_out + WEIGHT_BLOCK_ROWS - 1) / WEIGHT_BLOCK_ROWS; }

static void pack_block(void *arg, int index, int thread)
{
    const struct pack *p = arg;
    const size_t       room = WEIGHT_BLOCK_ROWS * p->w->n_in;
    struct block b = { .src = p->a->parts, .wide = p->wide + (size_t)thread * room, .q = p->q + (size_t)thread * round_up(room, WEIGHT_BLOCK_ROWS * F8_BLOCK) };
    size_t i = (size_t)index;
    for (; i >= blocks_of(b.src); b.src++, b.part++) {
        i -= blocks_of(b.src);
        b.first += b.src->n_out;
    }
    b.row0 = i * WEIGHT_BLOCK_ROWS;
    b.n = min_size(WEIGHT_BLOCK_ROWS, b.src->n_out - b.row0);
    if (p->w->form == GEMM_F8 && b.src->dtype == DTYPE_F8_E4M3) {
        copy_f8(p, &b);
        return;
    }
    const enum dtype t = b.src->dtype;
    weight_rows_f32(b.src, b.row0, b.n, b.wide);
    if (p->w->form == GEMM_F32 && p->a->quantize != QUANTIZE_NONE && (t == DTYPE_F32 || t == DTYPE_F16 || t == DTYPE_BF16)) round_to_quantised(p, &b);
    WRITE[p->w->form](p, &b);
}

/* Everything in host memory, zeroed: what rows are filled up with. */
static bool get_room(struct pack *p, size_t n_threads)
{
    const size_t block = WEIGHT_BLOCK_ROWS * p->w->n_in;
    p->image = mem_try_calloc(1, p->w->bytes);
    p->wide = mem_try_calloc(n_threads * block, sizeof *p->wide);
    p->q = mem_try_calloc(n_threads, round_up(block, WEIGHT_BLOCK_ROWS * F8_BLOCK));
    return p->image && p->wide && p->q;
}

static void free_room(struct pack *p)
{
    mem_free(p->image);
    mem_free(p->wide);
    mem_free(p->q);
}

static enum status pack_image(struct kernel_ctx *c, struct pack *p, struct err *err)
{
    size_t n_blocks = 0;
    if (!get_room(p, (size_t)compute_pool_threads(c->pool))) return err_set(err, ERR_NOMEM, "no host memory for a matrix of %zu MiB", p->w->bytes >> 20);
    p->row_bytes = gemm_row_bytes((enum gemm_form)p->w->form, p->w->n_in);
    p->scales = (float *)(void *)(p->image + gemm_scales_at((enum gemm_form)p->w->form, p->w->n_out, p->w->n_in));
    p->f8_blocks = (p->w->n_in + F8_BLOCK - 1) / F8_BLOCK;
    for (size_t i = 0; i < p->a->n_parts; i++) n_blocks += blocks_of(&p->a->parts[i]);
    compute_pool_run(c->pool, (int)n_blocks, pack_block, p);
    return OK;
}

static enum status pack_and_send(struct kernel_ctx *c, const struct weight_pack_args *a, const struct weight *w, void *to, struct err *err)
{
    struct pack p = { .a = a, .w = w };
    enum status st = pack_image(c, &p, err);
    if (st == OK) {
        device_upload(c->device, to, p.image, w->bytes);
        st = device_fault(c->device, err);
    }
    free_room(&p);
    return st;
}

/* ---- made-up weights --------------------------------------------------------------------------------------------- */

/* Made on the card; but for what is quantised in F32 arithmetic, which tests alone ask for. */
static bool can_fill(const struct weight_pack_args *a, const struct weight *w)
{
    for (size_t i = 0; i < a->n_parts; i++)
        if (!weight_is_made_up(&a->parts[i])) return false;
    return w->form != GEMM_F32 || a->quantize == QUANTIZE_NONE;
}

/* What rows and scales are filled up with is zero. */
static enum status fill(struct kernel_ctx *base, const struct weight_pack_args *a, const struct weight *w, char *to, struct err *err)
{
    struct cuda_device *d = cuda_ctx_of(base)->device;
    const enum gemm_form form = (enum gemm_form)w->form;
    const size_t f8_blocks = (w->n_in + F8_BLOCK - 1) / F8_BLOCK;
    size_t       first = 0, block = 0;
    bool         good = cuda_check(d, cudaMemsetAsync(to, 0, w->bytes, d->stream), "clearing a weight");
    for (size_t i = 0; i < a->n_parts && good; i++) {
        const struct weight_src *s = &a->parts[i];
        float      *scales = (float *)(void *)(to + gemm_scales_at(form, w->n_out, w->n_in));
        struct fill f = { .form = form, .rows = to, .row_bytes = gemm_row_bytes(form, w->n_in), .scales = scales, .first = w->paired ? i : first,
                          .every = w->paired ? 2 : 1, .n_rows = s->n_out, .n_in = s->n_in, .from = s->made_up };
        if (form == GEMM_F8) f.scales += block * f8_blocks;
        weight_steps(s, &f.row_step, &f.k_step);
        good = cuda_check(d, fill_run(d->stream, &f), "making up a weight");
        first += s->n_out;
        block += blocks_of(s);
    }
    return device_fault(base->device, err);
}

enum status cuda_weight_pack(struct kernel_ctx *c, const struct weight_pack_args *a, struct weight *out, struct err *err)
{
    struct weight  w;
    struct dev_mem mem = { .ptr = a->to };
    TRY(cuda_weight_plan(c, a, &w, err));
    enum status st = a->to ? OK : device_mem_alloc(c->device, w.bytes, DEVICE_MEM_PRIVATE, &mem, err);
    if (st == OK) st = can_fill(a, &w) ? fill(c, a, &w, mem.ptr, err) : pack_and_send(c, a, &w, mem.ptr, err);
    if (st != OK) {
        if (!a->to) device_mem_free(c->device, &mem);
        return st;
    }
    w.data = mem.ptr;
    w.borrowed = a->to != NULL;
    *out = w;
    return OK;
}

void cuda_weight_release(struct kernel_ctx *c, struct weight *w)
{
    struct dev_mem mem = { .ptr = w->data, .bytes = w->bytes, .fd = -1, .kind = DEV_MEM_CUDA };
    device_mem_free(c->device, &mem);
}
