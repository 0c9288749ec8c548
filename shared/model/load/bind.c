/* bind.c - binding: checks, adds up and packs.
 *
 * Thread: the loading one; copies are converted on the compute pool. */
#include "shared/model/load/bind.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "kernels/weight_src.h"
#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/mem.h"
#include "shared/model/model_ops.h"

enum { LINE = 64 };

/* ---- plain copies ---- */

struct copy_job {
    const struct weight_src *src;
    enum dtype type;
    void *to;
};

static void copy_row(void *arg, int row, int thread)
{
    const struct copy_job *j = arg;
    const size_t n = j->src->n_in;
    (void)thread;
    if (j->type == DTYPE_F32) {
        weight_src_rows_f32(j->src, (size_t)row, 1, (float *)j->to + (size_t)row * n);
        return;
    }
    float *wide = MEM_ARRAY(float, n);
    uint16_t *to = (uint16_t *)j->to + (size_t)row * n;
    weight_src_rows_f32(j->src, (size_t)row, 1, wide);
    for (size_t k = 0; k < n; k++) to[k] = dtype_f32_to_bf16(wide[k]);
    mem_free(wide);
}

void *bind_plain_copy(struct kernel_ctx *k, const struct weight_src *src, enum dtype type)
{
    struct copy_job j = {
        .src = src,
        .type = type,
        .to = mem_try_calloc(src->n_out, dtype_row_bytes(type, src->n_in)),
    };
    if (j.to) compute_pool_run(k->pool, (int)src->n_out, copy_row, &j);
    return j.to;
}

/* ---- sources ---- */

/* The bytes of the file that hold the matrix. LIMIT: of a part of a transposed matrix these are one
 * range of rows, with the columns of other parts between its own; they are read ahead with it. */
static struct read_ahead_range range_of(const struct weight_src *s)
{
    const size_t across = dtype_row_bytes(s->dtype, s->transposed ? s->n_out : s->n_in),
                 down = s->transposed ? s->n_in : s->n_out;
    if (s->n_out == 0) return (struct read_ahead_range){ 0 };
    return (struct read_ahead_range){
        .data = s->data, .bytes = (down - 1) * (s->row_bytes ? s->row_bytes : across) + across
    };
}

/* Is a list of n entries, which grows by doubling, full? */
static bool is_full(size_t n) { return (n & (n - 1)) == 0; }

static void add_source(struct binder *b, const struct weight_src *s)
{
    const struct read_ahead_range range = range_of(s);
    if (!b->packing) {
        if (is_full(b->n_sources))
            b->sources = mem_realloc(b->sources, b->n_sources ? 2 * b->n_sources : 1,
                                     sizeof *b->sources);
        b->sources[b->n_sources] = range;
    } else {
        read_ahead_await(b->ahead, b->n_sources);
    }
    b->n_sources++;
    b->source_bytes += s->data ? s->n_out * dtype_row_bytes(s->dtype, s->n_in) : 0;
}

static enum quantize quantize_of(const struct binder *b, enum bind_as as, enum dtype type)
{
    bool unquantised = type == DTYPE_F32 || type == DTYPE_F16 || type == DTYPE_BF16;
    if (!unquantised || (as != BIND_QUANTIZED && as != BIND_EXPERT)) return QUANTIZE_NONE;
    bool wide = as == BIND_QUANTIZED && b->m->ops->wint4_experts_only &&
                b->m->quantize == QUANTIZE_WINT4;
    return wide ? QUANTIZE_WINT8 : b->m->quantize;
}

/* Do blocks of rows share scales, in the file or once packed? */
static bool has_blocks(const struct binder *b, int dtype, enum bind_as as)
{
    return dtype == DTYPE_F8_E4M3 ||
           (dtype >= 0 && quantize_of(b, as, (enum dtype)dtype) == QUANTIZE_BLOCK_FP8);
}

size_t bind_unit(const struct binder *b, const struct matrix_spec *spec, enum bind_as as)
{
    const int dtype = weights_matrix_dtype(b->m->weights, spec);
    return has_blocks(b, dtype, as) ? F8_BLOCK : SHARE_UNIT;
}

enum status bind_lookup(struct binder *b, const struct matrix_spec *spec, struct weight_src *out)
{
    TRY(weights_matrix(b->m->weights, spec, out, b->err));
    add_source(b, out);
    return OK;
}

/* ---- the end ---- */

enum status bind_end(struct binder *b, enum status st, struct bind_times *t)
{
    struct kernel_ctx *k = b->kernels;
    struct weight_times times = { 0 };
    const uint64_t t0 = clock_ns();
    const enum status ended = k->weight_ops->finish(k, &times, st == OK ? b->err : NULL);
    t->end_ns += clock_ns() - t0;
    t->pack_ns += b->pack_ns;
    t->read_wait_ns += read_ahead_wait_ns(b->ahead);
    t->copy_wait_ns += times.copy_wait_ns;
    read_ahead_stop(b->ahead);
    b->ahead = NULL;
    return st == OK ? ended : st;
}

/* ---- weights ---- */

enum status bind_stopped(struct err *err)
{
    return err_set(err, ERR_CANCELED, "loading the model was stopped");
}

static void add_to_plan(struct binder *b, const struct weight *w)
{
    if (is_full(b->n_plan))
        b->plan = mem_realloc(b->plan, b->n_plan ? 2 * b->n_plan : 1, sizeof *b->plan);
    b->plan[b->n_plan++] = *w;
}

static enum status take_or_pack(struct binder *b, struct weight_pack_args a,
                                const struct weight *plan, struct weight *to)
{
    struct kernel_ctx *k = b->kernels;
    struct weight_cache *cache = b->is_expert ? NULL : b->cache;
    if (cache && weight_cache_is_ready(cache)) {
        weight_cache_take(cache, to);
        /* both passes bind in the same order */
        ASSERT(to->layout == plan->layout && to->n_out == plan->n_out && to->n_in == plan->n_in);
        return OK;
    }
    a.arena = b->weight_arena;
    const uint64_t t0 = clock_ns();
    TRY(k->weight_ops->pack(k, &a, to, b->err));
    b->pack_ns += clock_ns() - t0;
    if (cache) weight_cache_put(cache, to);
    return OK;
}

static enum status pack(struct binder *b, const struct weight_pack_args *a, const char *what,
                        struct weight *to)
{
    struct weight plan;
    enum status st = b->kernels->weight_ops->plan(b->kernels, a, &plan, b->err);
    if (st == OK && b->packing) st = take_or_pack(b, *a, &plan, to);
    if (st != OK) return err_prefix(b->err, "%s cannot be packed: ", what);
    b->weight_bytes += plan.bytes;
    b->last_plan = plan;
    if (!b->packing && !b->is_expert) add_to_plan(b, &plan);
    else if (b->progress &&
             !b->progress(b->progress_arg, (double)b->weight_bytes /
                                               (double)(b->weight_total ? b->weight_total : 1)))
        return bind_stopped(b->err);
    return OK;
}

/* Packs n parts as one matrix. Parts of different types are converted to f32 first. */
static enum status pack_as(struct binder *b, struct weight_src *src, size_t n,
                           enum weight_join join, enum bind_as as, const char *what,
                           struct weight *to)
{
    void *copies[2] = { NULL, NULL };
    bool to_f32 = as == BIND_F32;
    for (size_t i = 1; i < n; i++) to_f32 = to_f32 || src[i].dtype != src[0].dtype;
    for (size_t i = 0; i < n && to_f32; i++) {
        if (weight_src_is_dummy(&src[i])) { /* dummy weights: the same numbers in another type */
            ASSERT(src[i].row_bytes == 0);
            src[i].dtype = DTYPE_F32;
            continue;
        }
        if (b->converting && !(copies[i] = bind_plain_copy(b->kernels, &src[i], DTYPE_F32))) {
            mem_free(copies[0]);
            return err_set(b->err, ERR_NOMEM, "no memory to convert %s (%zu x %zu)", what,
                           src[i].n_out, src[i].n_in);
        }
        src[i] = (struct weight_src){
            .dtype = DTYPE_F32, .data = copies[i], .n_out = src[i].n_out, .n_in = src[i].n_in
        };
    }
    const struct weight_pack_args a = {
        .parts = src, .n_parts = n, .join = join, .quantize = quantize_of(b, as, src[0].dtype)
    };
    enum status st = pack(b, &a, what, to);
    for (size_t i = 0; i < n; i++) mem_free(copies[i]);
    return st;
}

/* The matrix's name for messages, without a file format's suffix. */
static const char *name_of(const struct matrix_spec *spec, char out[TENSOR_NAME_BYTES_MAX])
{
    if (spec->n_experts > 0)
        snprintf(out, TENSOR_NAME_BYTES_MAX, "%s%s of expert %" PRIu32, spec->prefix, spec->leaf,
                 spec->i_expert);
    else snprintf(out, TENSOR_NAME_BYTES_MAX, "%s%s", spec->prefix, spec->leaf);
    return out;
}

/* A part that is quantised in blocks while it is packed has the whole's blocks. */
static enum status check_blocks(struct binder *b, const struct matrix_spec *spec, enum dtype dtype,
                                enum bind_as as)
{
    char name[TENSOR_NAME_BYTES_MAX];
    const struct share_part part = matrix_part(spec);
    if (!has_blocks(b, (int)dtype, as) || share_part_is_aligned(part, spec->n_out, F8_BLOCK))
        return OK;
    return err_set(b->err, ERR_UNSUPPORTED,
                   "%s: a rank's heads, rows %zu to %zu, begin or end in the middle of a block of "
                   "128 rows that --quantization block_wise_fp8 gives one scale; lower "
                   "--tensor-parallel-size or take another --quantization",
                   name_of(spec, name), part.first, part.first + part.n);
}

enum status bind_matrix(struct binder *b, const struct matrix_spec *spec, enum bind_as as,
                        struct weight *to)
{
    struct weight_src src;
    TRY(bind_lookup(b, spec, &src));
    void *scales = (void *)src.scales;
    char what[TENSOR_NAME_BYTES_MAX];
    enum status st = check_blocks(b, spec, src.dtype, as);
    if (st == OK && src.n_out > 0)
        st = pack_as(b, &src, 1, JOIN_STACKED, as, name_of(spec, what), to);
    mem_free(scales);
    return st;
}

enum status bind_pair(struct binder *b, const struct matrix_spec *gate,
                      const struct matrix_spec *up, enum bind_as as, struct weight *to)
{
    struct weight_src src[2];
    TRY(bind_lookup(b, gate, &src[0]));
    void *scales[2] = { (void *)src[0].scales, NULL };
    char what[TENSOR_NAME_BYTES_MAX];
    enum status st = bind_lookup(b, up, &src[1]);
    if (st == OK) scales[1] = (void *)src[1].scales;
    if (st == OK && src[0].n_out > 0)
        st = pack_as(b, src, 2, JOIN_PAIRED, as, name_of(gate, what), to);
    mem_free(scales[0]);
    mem_free(scales[1]);
    return st;
}

enum status bind_source(struct binder *b, const struct weight_src *src, const char *what,
                        struct weight *to)
{
    struct weight_src copy = *src;
    return pack_as(b, &copy, 1, JOIN_STACKED, BIND_AS_STORED, what, to);
}

/* Takes the next `bytes` of the arena; the first pass only counts them. */
static void *take(struct bind_arena *arena, size_t bytes)
{
    char *at = arena->at ? arena->at + arena->bytes : NULL;
    arena->bytes += (bytes + LINE - 1) / LINE * LINE;
    return at;
}

static enum status bind_vectors(struct binder *b, const char *prefix, const char *const *names,
                                size_t n_names, size_t n, struct share_part part, float **to)
{
    float *all = take(&b->vectors, n_names * part.n * sizeof **to);
    for (size_t i = 0; i < n_names; i++) {
        char full[TENSOR_NAME_BYTES_MAX];
        float *v;
        snprintf(full, sizeof full, "%s%s", prefix, names[i]);
        TRY(weights_vector(b->m->weights, full, n, &v, b->err));
        if (b->packing && part.n > 0)
            device_upload(b->kernels->device, all + i * part.n, v + part.first, part.n * sizeof *v);
        mem_free(v);
    }
    if (b->packing) *to = all;
    return OK;
}

enum status bind_vector(struct binder *b, const char *prefix, const char *name, size_t n,
                        float **to)
{
    return bind_vector_part(b, prefix, name, n, (struct share_part){ 0, n }, to);
}

enum status bind_vector_part(struct binder *b, const char *prefix, const char *name, size_t n,
                             struct share_part part, float **to)
{
    return bind_vectors(b, prefix, &name, 1, n, part, to);
}

enum status bind_vector_pair(struct binder *b, const char *prefix, const char *first,
                             const char *second, size_t n, struct share_part part, float **to)
{
    return bind_vectors(b, prefix, (const char *const[]){ first, second }, 2, n, part, to);
}

enum status bind_vector_if_present(struct binder *b, const char *prefix, const char *name, size_t n,
                                   struct share_part part, float **to)
{
    char full[TENSOR_NAME_BYTES_MAX];
    snprintf(full, sizeof full, "%s%s", prefix, name);
    return weights_find(b->m->weights, full) ? bind_vector_part(b, prefix, name, n, part, to) : OK;
}

/* ---- buffers ---- */

void bind_floats(struct binder *b, size_t n_rows, size_t width, float **to)
{
    float *p = take(&b->buffers, n_rows * width * sizeof *p);
    if (b->packing) *to = p;
}

void bind_ints(struct binder *b, size_t n_rows, size_t width, int32_t **to)
{
    int32_t *p = take(&b->buffers, n_rows * width * sizeof *p);
    if (b->packing) *to = p;
}

void *bind_host(struct binder *b, size_t n, size_t element) { return take(&b->host, n * element); }

void bind_reserve(struct binder *b, size_t n_rows, size_t n_in)
{
    n_in = (n_in + 31) / 32 * 32; /* rows of rounded inputs are padded to 32 */
    if (n_rows * n_in <= b->rounded_rows * b->rounded_in) return;
    b->rounded_rows = n_rows;
    b->rounded_in = n_in;
}
