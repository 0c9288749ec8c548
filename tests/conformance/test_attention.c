/* test_attention.c - attention and kv_append of every CPU backend against their definition.
 *
 * The bound is zero: each backend gives the bits of ref, however the tokens are divided into chunks
 * and batches, for every block size and number of threads, split over segments or not. ref itself
 * is compared with the formulas in f64. The pool is NaN wherever nothing was written, so that
 * reading a wrong key is found. A backend that computes scores as bf16 products under FAST is
 * compared there with the formulas for rounded queries, and with its own bits. A backend that this
 * CPU cannot run is skipped by name. */
#include <float.h>

#include "kernels/cpu/attention/attention.h"
#include "tests/conformance/kernel_fixture.h"

enum { N_SEQS = 3 };

enum attention_path { GQA, MLA_ABSORBED, MLA_NAIVE };

struct shape {
    enum attention_path path;
    enum dtype dtype;                        /* of the pool */
    size_t n_heads, n_kv, dim, block_tokens; /* dim: elements of a cached key */
    size_t rank, nope, v_up; /* MLA. rank: the elements of a cached key that are its latent; nope,
                              * v_up, on the naive path: elements of an expanded key and value */
};

struct world { /* a pool and the sequences in it, with their queries, keys and values */
    struct shape s;
    size_t n_seqs, n_tokens[N_SEQS], pool_bytes, q_dim, v_dim;
    int32_t *table[N_SEQS];
    float *q[N_SEQS], *k[N_SEQS], *v[N_SEQS], *want[N_SEQS];
    void *pool;
    float scale;
    bool rounded;               /* queries are rounded to bf16 first */
    struct matrix *k_up, *v_up; /* [n_heads] */
};

static size_t div_up(size_t n, size_t by) { return (n + by - 1) / by; }

/* Assigns blocks in scattered order, in a pool of exactly the size needed. */
static void lay_out(struct world *w, size_t block_tokens)
{
    size_t n_blocks = 0, next = 0, step;
    w->s.block_tokens = block_tokens;
    for (size_t s = 0; s < w->n_seqs; s++) n_blocks += div_up(w->n_tokens[s], block_tokens);
    step = n_blocks % 7 == 0 ? 1 : 7; /* prime to n_blocks */
    for (size_t s = 0; s < w->n_seqs; s++) {
        size_t n = div_up(w->n_tokens[s], block_tokens);
        mem_free(w->table[s]);
        w->table[s] = MEM_ARRAY(int32_t, n);
        for (size_t b = 0; b < n; b++) w->table[s][b] = (int32_t)(next++ * step % n_blocks);
    }
    w->pool_bytes = n_blocks * w->s.n_kv * (w->s.path == GQA ? 2 : 1) * block_tokens *
                    dtype_row_bytes(w->s.dtype, w->s.dim);
    mem_free(w->pool);
    w->pool = mem_calloc(w->pool_bytes, 1);
}

static struct world make_world(struct shape s, size_t n_seqs, const size_t n_tokens[N_SEQS])
{
    struct world w = {
        .s = s, .n_seqs = n_seqs, .q_dim = s.dim, .v_dim = s.path == GQA ? s.dim : s.rank
    };
    if (s.path == MLA_NAIVE) {
        w.q_dim = s.nope + s.dim - s.rank;
        w.v_dim = s.v_up;
        w.k_up = MEM_ARRAY(struct matrix, s.n_heads);
        w.v_up = MEM_ARRAY(struct matrix, s.n_heads);
        for (size_t h = 0; h < s.n_heads; h++) {
            w.k_up[h] = make_matrix(h % 2 ? DTYPE_BF16 : DTYPE_F32, s.nope, s.rank);
            w.v_up[h] = make_matrix(h % 2 ? DTYPE_BF16 : DTYPE_F32, s.v_up, s.rank);
        }
    }
    w.scale = 1 / sqrtf((float)w.q_dim);
    for (size_t i = 0; i < n_seqs; i++) {
        size_t n = w.n_tokens[i] = n_tokens[i];
        w.q[i] = random_floats(n * s.n_heads * w.q_dim, s.path == MLA_NAIVE ? 20 : 2);
        w.k[i] = random_floats(n * s.n_kv * s.dim, 2);
        w.v[i] = random_floats(n * s.n_kv * s.dim, 2);
        w.want[i] = MEM_ARRAY(float, n *s.n_heads *w.v_dim);
    }
    lay_out(&w, s.block_tokens);
    return w;
}

static void free_world(struct world *w)
{
    for (size_t s = 0; s < w->n_seqs; s++)
        mem_free(w->table[s]), mem_free(w->q[s]), mem_free(w->k[s]), mem_free(w->v[s]),
            mem_free(w->want[s]);
    for (size_t h = 0; h < w->s.n_heads && w->k_up; h++)
        free_matrix(&w->k_up[h]), free_matrix(&w->v_up[h]);
    mem_free(w->k_up), mem_free(w->v_up), mem_free(w->pool);
}

struct packed {
    struct weight *k_up, *v_up;
};

static struct packed pack(struct kernel_ctx *c, const struct world *w)
{
    struct packed p = { 0 };
    if (w->s.path != MLA_NAIVE) return p;
    p.k_up = MEM_ARRAY(struct weight, w->s.n_heads);
    p.v_up = MEM_ARRAY(struct weight, w->s.n_heads);
    for (size_t h = 0; h < w->s.n_heads; h++) {
        p.k_up[h] = pack_one(c, &w->k_up[h]);
        p.v_up[h] = pack_one(c, &w->v_up[h]);
    }
    return p;
}

static void unpack(struct kernel_ctx *c, struct packed *p, size_t n)
{
    for (size_t h = 0; h < n && p->k_up; h++)
        weight_release(c, &p->k_up[h]), weight_release(c, &p->v_up[h]);
    mem_free(p->k_up), mem_free(p->v_up);
}

static struct kv_layer layer_of(const struct world *w)
{
    return (struct kv_layer){
        .data = w->pool,
        .dtype = w->s.dtype,
        .latent = w->s.path != GQA,
        .n_heads = (int32_t)w->s.n_kv,
        .head_dim = (int32_t)w->s.dim,
        .block_tokens = (int32_t)w->s.block_tokens,
    };
}

/* Computes `count` tokens of each sequence from `begin` on in one step and returns their output
 * rows. */
static float *step(struct kernel_ctx *c, struct world *w, const struct packed *up,
                   const size_t begin[N_SEQS], const size_t count[N_SEQS])
{
    struct attn_seq seqs[N_SEQS];
    size_t n_rows = 0, q_row = w->s.n_heads * w->q_dim, kv_row = w->s.n_kv * w->s.dim,
           out_row = w->s.n_heads * w->v_dim;
    for (size_t s = 0; s < w->n_seqs; s++) n_rows += count[s];
    float *q = MEM_ARRAY(float, n_rows *q_row), *out = MEM_ARRAY(float, n_rows *out_row);
    float *k = MEM_ARRAY(float, n_rows *kv_row), *v = MEM_ARRAY(float, n_rows *kv_row);
    size_t row = 0;
    for (size_t s = 0; s < w->n_seqs; row += count[s++]) {
        seqs[s] = (struct attn_seq){
            .q_begin = (int32_t)row,
            .n_q = (int32_t)count[s],
            .pos_begin = (int32_t)begin[s],
            .block_table = w->table[s],
        };
        memcpy(q + row * q_row, w->q[s] + begin[s] * q_row, count[s] * q_row * sizeof *q);
        memcpy(k + row * kv_row, w->k[s] + begin[s] * kv_row, count[s] * kv_row * sizeof *k);
        memcpy(v + row * kv_row, w->v[s] + begin[s] * kv_row, count[s] * kv_row * sizeof *v);
    }
    for (size_t i = 0; i < n_rows * out_row; i++) out[i] = NAN;
    struct kv_append_args append = {
        .k = k,
        .v = w->s.path == GQA ? v : NULL,
        .kv = layer_of(w),
        .on = { seqs, (int32_t)w->n_seqs },
    };
    struct attn_args attn = {
        .q = q,
        .out = out,
        .kv = layer_of(w),
        .on = { seqs, (int32_t)w->n_seqs },
        .n_heads = (int32_t)w->s.n_heads,
        .v_dim = (int32_t)w->v_dim,
        .scale = w->scale,
        .k_up = up->k_up,
        .v_up = up->v_up,
    };
    c->ops->kv_append(c, &append);
    c->ops->attention(c, &attn);
    mem_free(q), mem_free(k), mem_free(v);
    return out;
}

/* Computes all tokens in steps of at most `chunk` per sequence, each step a batch of all sequences
 * that are not finished. */
static void run_world(struct kernel_ctx *c, struct world *w, size_t chunk, float *out[N_SEQS])
{
    size_t begin[N_SEQS] = { 0 }, count[N_SEQS], left = 1, out_row = w->s.n_heads * w->v_dim;
    struct packed up = pack(c, w);
    memset(w->pool, 0xff, w->pool_bytes); /* NaN in both types, to find reads of what was never
                                           * written */
    for (;;) {
        left = 0;
        for (size_t s = 0; s < w->n_seqs; s++) {
            count[s] = w->n_tokens[s] - begin[s] < chunk ? w->n_tokens[s] - begin[s] : chunk;
            left += count[s];
        }
        if (left == 0) break;
        float *rows = step(c, w, &up, begin, count);
        for (size_t s = 0, row = 0; s < w->n_seqs; row += count[s++]) {
            memcpy(out[s] + begin[s] * out_row, rows + row * out_row,
                   count[s] * out_row * sizeof *rows);
            begin[s] += count[s];
        }
        mem_free(rows);
    }
    unpack(c, &up, w->s.n_heads);
}

static void check_run(struct kernel_ctx *c, struct world *w, size_t chunk, const char *what)
{
    float *out[N_SEQS];
    for (size_t s = 0; s < w->n_seqs; s++)
        out[s] = MEM_ARRAY(float, w->n_tokens[s] * w->s.n_heads * w->v_dim);
    run_world(c, w, chunk, out);
    for (size_t s = 0; s < w->n_seqs; s++) {
        check_bits(out[s], w->want[s], w->n_tokens[s] * w->s.n_heads * w->v_dim, what, w->s.dim,
                   chunk);
        mem_free(out[s]);
    }
}

/* ---- the formulas, in f64 ---- */

static double cached(const struct world *w, float x)
{
    return (double)(w->s.dtype == DTYPE_BF16 ? dtype_bf16_to_f32(dtype_f32_to_bf16(x)) : x);
}

static double project(const struct world *w, const struct matrix *m, size_t row,
                      const float *latent)
{
    double sum = 0;
    for (size_t i = 0; i < w->s.rank; i++)
        sum += (double)m->wide[row * w->s.rank + i] * cached(w, latent[i]);
    return sum;
}

/* Elements of key and value of position j of sequence s for query head h. */
static double key_element(const struct world *w, size_t s, size_t h, size_t j, size_t d)
{
    size_t head = w->s.path == GQA ? h / (w->s.n_heads / w->s.n_kv) : 0;
    const float *k = w->k[s] + (j * w->s.n_kv + head) * w->s.dim;
    if (w->s.path != MLA_NAIVE) return cached(w, k[d]);
    return d < w->s.nope ? project(w, &w->k_up[h], d, k) : cached(w, k[w->s.rank + d - w->s.nope]);
}

static double value_element(const struct world *w, size_t s, size_t h, size_t j, size_t d)
{
    if (w->s.path == GQA)
        return cached(w, w->v[s][(j * w->s.n_kv + h / (w->s.n_heads / w->s.n_kv)) * w->s.dim + d]);
    const float *k = w->k[s] + j * w->s.dim;
    return w->s.path == MLA_NAIVE ? project(w, &w->v_up[h], d, k) : cached(w, k[d]);
}

/* Checks every `every`-th position against the formulas. */
static void check_against_softmax(const struct world *w, size_t every)
{
    for (size_t s = 0; s < w->n_seqs; s++)
        for (size_t p = w->n_tokens[s] - 1; p < w->n_tokens[s]; p -= every)
            for (size_t h = 0; h < w->s.n_heads; h++) {
                const float *q = w->q[s] + (p * w->s.n_heads + h) * w->q_dim;
                double sum = 0, out[KERNEL_LATENT_MAX] = { 0 };
                for (size_t j = 0; j <= p; j++) {
                    double dot = 0;
                    for (size_t d = 0; d < w->q_dim; d++)
                        dot += (double)(w->rounded ? dtype_bf16_to_f32(dtype_f32_to_bf16(q[d]))
                                                   : q[d]) *
                               key_element(w, s, h, j, d);
                    double e = exp(dot * (double)w->scale);
                    sum += e;
                    for (size_t d = 0; d < w->v_dim; d++)
                        out[d] += e * value_element(w, s, h, j, d);
                }
                for (size_t d = 0; d < w->v_dim; d++)
                    CHECK_NEAR(w->want[s][(p * w->s.n_heads + h) * w->v_dim + d], out[d] / sum,
                               2e-5);
            }
}

/* ---- cases ---- */

static const struct shape SHAPES[] = {
    { GQA, DTYPE_F32, 9, 3, 64, 64, 0, 0, 0 },
    { GQA, DTYPE_BF16, 9, 3, 64, 64, 0, 0, 0 },
    { GQA, DTYPE_F32, 4, 1, 24, 16, 0, 0, 0 },
    { GQA, DTYPE_BF16, 2, 2, 128, 64, 0, 0, 0 },
    { GQA, DTYPE_BF16, 6, 2, 16, 5, 0, 0, 0 },
    { GQA, DTYPE_F32, 3, 1, 20, 1, 0, 0, 0 },
    { GQA, DTYPE_F32, 2, 1, 80, 33, 0, 0, 0 },
    { GQA, DTYPE_BF16, 1, 1, 256, 16, 0, 0, 0 },
    { GQA, DTYPE_F32, 8, 1, 8, 256, 0, 0, 0 },
    { GQA, DTYPE_F32, 5, 1, 1, 7, 0, 0, 0 },
    { GQA, DTYPE_BF16, 5, 5, 1, 7, 0, 0, 0 },
    { GQA, DTYPE_BF16, 14, 2, 33, 100, 0, 0, 0 },
    { GQA, DTYPE_F32, 7, 7, 47, 12, 0, 0, 0 },
    { GQA, DTYPE_BF16, 4, 2, 199, 64, 0, 0, 0 },
    { MLA_ABSORBED, DTYPE_F32, 5, 1, 40, 64, 32, 0, 0 },
    { MLA_ABSORBED, DTYPE_BF16, 3, 1, 27, 10, 20, 0, 0 },
    { MLA_ABSORBED, DTYPE_BF16, 4, 1, 576, 64, 512, 0, 0 },
    { MLA_ABSORBED, DTYPE_F32, 2, 1, 1024, 3, 1000, 0, 0 },
    { MLA_NAIVE, DTYPE_F32, 3, 1, 40, 64, 32, 16, 24 },
    { MLA_NAIVE, DTYPE_BF16, 2, 1, 27, 10, 20, 5, 9 },
    { MLA_NAIVE, DTYPE_BF16, 2, 1, 336, 64, 320, 48, 33 },
    { MLA_NAIVE, DTYPE_F32, 1, 1, 192, 64, 128, 192, 256 }, /* the largest heads */
};

/* Chunk sizes and numbers of threads. Each chunk size runs with one number of threads, because the
 * division into chunks is the same code for every backend; with --all the fast ones run all
 * pairs. */
static void rows_cases(const char *isa)
{
    static const size_t chunks[] = { 1, 7, 64, 10000 };
    const bool is_ref = strcmp(isa, "ref") == 0, some = is_ref || !test_runs_all();
    for (size_t i = 0; i < COUNT_OF(SHAPES); i++) {
        const size_t n_tokens[N_SEQS] = { 1, SHAPES[i].block_tokens + 3, 330 };
        struct kernel_ctx *ref = open_backend("ref", ACTIVATIONS_F32, 1);
        struct world w = make_world(SHAPES[i], N_SEQS, n_tokens);
        run_world(ref, &w, 10000, w.want);
        if (is_ref) check_against_softmax(&w, 29); /* the others are compared with ref */
        kernel_ctx_free(ref);
        for (int n_threads = 1; n_threads <= 3; n_threads++) {
            struct kernel_ctx *c = open_backend(isa, ACTIVATIONS_F32, n_threads);
            /* ref's whole prompt is what it is compared with */
            for (size_t k = is_ref ? 1 : 0; k < COUNT_OF(chunks) - is_ref; k++)
                if (!some || k % 3 + 1 == (size_t)n_threads)
                    check_run(c, &w, chunks[k], "attention");
            kernel_ctx_free(c);
        }
        free_world(&w);
    }
}

/* The same tokens with other block sizes. */
static void block_cases(const char *isa)
{
    static const struct shape shapes[] = { { GQA, DTYPE_BF16, 3, 1, 18, 64, 0, 0, 0 },
                                           { MLA_ABSORBED, DTYPE_F32, 3, 1, 18, 64, 12, 0, 0 } };
    static const size_t sizes[] = { 1, 5, 16, 33, 63, 65, 100, 128, 256 },
                        n_tokens[N_SEQS] = { 64, 200, 520 };
    struct kernel_ctx *c = open_backend(isa, ACTIVATIONS_FAST, 2);
    for (size_t i = 0; i < COUNT_OF(shapes); i++) {
        struct world w = make_world(shapes[i], N_SEQS, n_tokens);
        run_world(c, &w, 10000, w.want);
        for (size_t k = 0; k < COUNT_OF(sizes); k++) {
            lay_out(&w, sizes[k]);
            check_run(c, &w, 111, "blocks");
        }
        free_world(&w);
    }
    kernel_ctx_free(c);
}

/* One long sequence: its segments are split over threads, in several rounds if there are many
 * pairs, and merged to the same bits. */
static void segment_cases(const char *isa)
{
    static const struct shape shapes[] = { { GQA, DTYPE_BF16, 7, 1, 192, 64, 0, 0, 0 },
                                           { GQA, DTYPE_F32, 4, 2, 16, 32, 0, 0, 0 },
                                           { MLA_ABSORBED, DTYPE_BF16, 16, 1, 72, 64, 64, 0, 0 },
                                           { MLA_NAIVE, DTYPE_F32, 1, 1, 24, 64, 16, 16, 200 } };
    static const size_t n_tokens[N_SEQS] = { 2100, 1030, 3 }, chunks[] = { 1050, 96, 255 };
    for (size_t i = 0; i < COUNT_OF(shapes); i++) {
        if (strcmp(isa, "ref") == 0 && i != 1)
            continue; /* the split is the same for every backend, and
                       * ref takes minutes for the large ones */
        struct kernel_ctx *one = open_backend(isa, ACTIVATIONS_F32, 1);
        struct world w = make_world(shapes[i], i % 2 ? N_SEQS : 1, n_tokens);
        run_world(one, &w, 10000, w.want);
        check_against_softmax(&w, 700);
        check_run(one, &w, 96, "segments on one thread");
        kernel_ctx_free(one);
        for (int n_threads = 2; n_threads <= 17; n_threads += 15) {
            struct kernel_ctx *c = open_backend(isa, ACTIVATIONS_F32, n_threads);
            for (size_t k = 0; k < COUNT_OF(chunks); k++)
                if (test_runs_all() || (k == 0) == (n_threads == 2))
                    check_run(c, &w, chunks[k], "segments");
            kernel_ctx_free(c);
        }
        free_world(&w);
    }
}

/* ---- bf16 products ---- */

enum { PRODUCT_ROWS = 13, PRODUCT_DIM_MAX = 576 };

struct bf16_products { /* PRODUCT_ROWS queries and ATTN_TILE keys of dim elements, all bf16 and
                        * padded to whole pairs */
    size_t dim, q_stride;
    uint16_t *q, *k, *packed; /* packed: the keys without gaps */
    const char *at[ATTN_TILE];
};

/* Numbers of all magnitudes, including some whose products are subnormal. */
static struct bf16_products make_bf16_products(const struct bf16_microkernels *kernels, size_t dim)
{
    struct bf16_products c = { .dim = dim, .q_stride = act_bf16_stride(dim) };
    c.q = MEM_ARRAY(uint16_t, PRODUCT_ROWS * c.q_stride);
    c.k = mem_calloc(ATTN_TILE * c.q_stride, sizeof *c.k);
    c.packed = MEM_ARRAY(uint16_t, ATTN_TILE * dim);
    for (size_t i = 0; i < PRODUCT_ROWS; i++) {
        float *q = random_floats(dim, i % 4 == 3 ? 0x1p-66f : 2);
        kernels->round_bf16(c.q + i * c.q_stride, q, dim);
        mem_free(q);
    }
    for (size_t j = 0; j < ATTN_TILE; j++) {
        for (size_t d = 0; d < dim; d++)
            c.packed[j * dim + d] = dtype_f32_to_bf16(random_float(j % 3 == 2 ? 0x1p-66f : 2));
        memcpy(c.k + j * c.q_stride, c.packed + j * dim, dim * sizeof *c.k);
        c.at[j] = (const char *)(c.packed + j * dim);
    }
    return c;
}

/* The order in which the CPU adds the two products of a pair, and what it does with subnormal ones,
 * is not specified. */
static void check_bf16_product(const struct bf16_products *c, size_t i, size_t j, float got)
{
    double want = 0, size = 0;
    for (size_t d = 0; d < c->dim; d++) {
        double product = (double)dtype_bf16_to_f32(c->k[j * c->q_stride + d]) *
                         (double)dtype_bf16_to_f32(c->q[i * c->q_stride + d]);
        want += product;
        size += fabs(product);
    }
    CHECK_NEAR(got, want, size * 0x1p-20 + (double)c->dim * (double)FLT_MIN);
}

/* Any number of rows gives the same bits, which are sums in f32 of products of bf16. */
static void check_bf16_products(const struct bf16_microkernels *kernels)
{
    static const size_t dims[] = { 1, 2, 31, 32, 33, 64, 80, 199, 256, PRODUCT_DIM_MAX },
                        n_keys[] = { 1, 15, 16, 17, 33, 48, 63, 64 };
    for (size_t n = 0; n < COUNT_OF(dims) * COUNT_OF(n_keys); n++) {
        struct bf16_products c = make_bf16_products(kernels, dims[n % COUNT_OF(dims)]);
        size_t keys = n_keys[n / COUNT_OF(dims)];
        struct kv_row_ptrs rows = { c.at, 0 };
        uint32_t *packed_keys = MEM_ARRAY(uint32_t, ATTN_TILE * div_up(c.dim, 2));
        float all[PRODUCT_ROWS * ATTN_TILE], some[PRODUCT_ROWS * ATTN_TILE];
        for (size_t j = keys; j < ATTN_TILE; j++) c.at[j] = NULL;
        kernels->load_keys_bf16(packed_keys, &rows, keys, c.dim);
        kernels->scores_bf16(all, c.q, c.q_stride, PRODUCT_ROWS, packed_keys, div_up(keys, PANEL),
                             c.dim);
        for (size_t i = 0; i < PRODUCT_ROWS; i++)
            for (size_t j = 0; j < keys; j++) check_bf16_product(&c, i, j, all[i * ATTN_TILE + j]);
        for (size_t n_rows = 1; n_rows <= PRODUCT_ROWS; n_rows++) {
            kernels->scores_bf16(some, c.q, c.q_stride, n_rows, packed_keys, div_up(keys, PANEL),
                                 c.dim);
            for (size_t i = 0; i < n_rows; i++)
                check_bits(some + i * ATTN_TILE, all + i * ATTN_TILE, keys, "many", c.dim, n_rows);
            if (n_rows > ATTN_SKINNY_PAIRS) continue;
            kernels->scores_skinny_bf16(some, c.q, c.q_stride, n_rows, &rows, &rows, keys, c.dim);
            for (size_t i = 0; i < n_rows; i++)
                check_bits(some + i * ATTN_TILE, all + i * ATTN_TILE, keys, "few", c.dim, n_rows);
        }
        mem_free(c.q), mem_free(c.k), mem_free(c.packed), mem_free(packed_keys);
    }
}

/* A pool of bf16 under FAST: backends without bf16 products give the bits of F32, the others what
 * the head of this file says. */
static void check_fast(const char *isa, const struct shape *s, size_t n_seqs,
                       const size_t *n_tokens, const size_t *chunks, size_t n_chunks)
{
    struct kernel_ctx *one = open_backend(isa, ACTIVATIONS_FAST, 1);
    struct world w = make_world(*s, n_seqs, n_tokens);
    w.rounded = cpu_has_bf16_products(one) && s->path != MLA_NAIVE;
    run_world(one, &w, 10000, w.want);
    kernel_ctx_free(one);
    if (w.rounded) check_against_softmax(&w, n_tokens[0] > 1000 ? 700 : 29);
    for (int n_threads = 1; n_threads <= 3 && w.rounded; n_threads++) {
        struct kernel_ctx *c = open_backend(isa, ACTIVATIONS_FAST, n_threads);
        for (size_t k = 0; k < n_chunks; k++)
            if (test_runs_all() || k % 3 + 1 == (size_t)n_threads)
                check_run(c, &w, chunks[k], "bf16 products");
        kernel_ctx_free(c);
    }
    if (!w.rounded) {
        struct kernel_ctx *c = open_backend(isa, ACTIVATIONS_F32, 2);
        check_run(c, &w, 100, "as in f32");
        kernel_ctx_free(c);
    }
    free_world(&w);
}

static void fast_cases(const char *isa)
{
    static const size_t chunks[] = { 1, 7, 64, 100 }, long_chunks[] = { 1050, 96, 255 },
                        n_long[N_SEQS] = { 2100, 1030, 3 };
    static const struct shape long_heads = { GQA, DTYPE_BF16, 7, 1, 64, 64, 0, 0, 0 },
                              long_latents = { MLA_ABSORBED, DTYPE_BF16, 16, 1, 72, 64, 64, 0, 0 };
    struct kernel_ctx *c = open_backend(isa, ACTIVATIONS_FAST, 1);
    bool products = cpu_has_bf16_products(c), is_ref = strcmp(isa, "ref") == 0;
    if (products) check_bf16_products(cpu_microkernels_of(c)->bf16);
    kernel_ctx_free(c);
    for (size_t i = 0; i < COUNT_OF(SHAPES); i++) {
        const size_t n_tokens[N_SEQS] = { 1, SHAPES[i].block_tokens + 3, is_ref ? 70 : 330 };
        if (SHAPES[i].dtype == DTYPE_BF16)
            check_fast(isa, &SHAPES[i], N_SEQS, n_tokens, chunks, COUNT_OF(chunks));
    }
    if (!products) return;
    check_fast(isa, &long_heads, 1, n_long, long_chunks, COUNT_OF(long_chunks));
    check_fast(isa, &long_latents, N_SEQS, n_long, long_chunks, COUNT_OF(long_chunks));
}

/* The absorbed path is the naive one with k_up applied to the query, and v_up after the sum. */
static void paths_agree(const char *isa)
{
    static const size_t n_tokens[N_SEQS] = { 300 };
    struct shape s = { MLA_NAIVE, DTYPE_BF16, 3, 1, 80, 64, 64, 32, 24 };
    struct kernel_ctx *c = open_backend(isa, ACTIVATIONS_F32, 2);
    struct world w = make_world(s, 1, n_tokens), a;
    run_world(c, &w, 10000, w.want);
    s.path = MLA_ABSORBED;
    a = make_world(s, 1, n_tokens);
    a.scale = w.scale;
    memcpy(a.k[0], w.k[0], n_tokens[0] * s.dim * sizeof(float));
    for (size_t i = 0; i < n_tokens[0] * s.n_heads; i++) {
        const float *q = w.q[0] + i * w.q_dim;
        for (size_t d = 0; d < s.rank; d++) {
            double sum = 0;
            for (size_t r = 0; r < s.nope; r++)
                sum += (double)w.k_up[i % s.n_heads].wide[r * s.rank + d] * (double)q[r];
            a.q[0][i * s.dim + d] = (float)sum;
        }
        memcpy(a.q[0] + i * s.dim + s.rank, q + s.nope, (s.dim - s.rank) * sizeof *q);
    }
    run_world(c, &a, 10000, a.want);
    for (size_t i = 0; i < n_tokens[0] * s.n_heads; i++)
        for (size_t r = 0; r < s.v_up; r++) {
            double sum = 0;
            for (size_t d = 0; d < s.rank; d++)
                sum += (double)w.v_up[i % s.n_heads].wide[r * s.rank + d] *
                       (double)a.want[0][i * s.rank + d];
            CHECK_NEAR(w.want[0][i * s.v_up + r], sum, 1e-5);
        }
    free_world(&w);
    free_world(&a);
    kernel_ctx_free(c);
}

/* Keys and values of later positions are NaN, which must not affect the rows before them. */
static void later_positions_stay_apart(const char *isa, enum activations activations, enum dtype t,
                                       size_t chunk)
{
    static const size_t n_tokens[N_SEQS] = { 150 };
    const struct shape s = { GQA, t, 6, 2, 32, 64, 0, 0, 0 };
    enum { BROKEN = 77 };
    struct kernel_ctx *c = open_backend(isa, activations, 2);
    struct world w = make_world(s, 1, n_tokens);
    size_t out_row = s.n_heads * s.dim, n = n_tokens[0] * out_row;
    float *out = MEM_ARRAY(float, n);
    run_world(c, &w, chunk, w.want);
    for (size_t i = BROKEN * s.n_kv * s.dim; i < n_tokens[0] * s.n_kv * s.dim; i++)
        w.k[0][i] = NAN, w.v[0][i] = i % 2 ? NAN : INFINITY;
    run_world(c, &w, chunk, (float *[N_SEQS]){ out });
    check_bits(out, w.want[0], BROKEN * out_row, "rows before a NaN", chunk, (size_t)t);
    for (size_t i = BROKEN * out_row; i < n; i++) CHECK(isnan(out[i]));
    mem_free(out);
    free_world(&w);
    kernel_ctx_free(c);
}

/* kv_append stores the right bytes: it rounds to nearest even, and a NaN stays a NaN. */
static void append_stores(const char *isa)
{
    enum { HEADS_N = 2, DIM = 3, BLOCK = 4, ROWS = 6 };
    static const float odd[] = { 1.00390625f, 1.01171875f, -1.00390625f, 3.4e38f,
                                 1e-40f,      INFINITY,    NAN,          -0.0f };
    static const uint16_t round[] = {
        0x3f80, 0x3f82, 0xbf80, 0x7f80, 0x0001, 0x7f80, 0x7fc0, 0x8000
    };
    struct kernel_ctx *c = open_backend(isa, ACTIVATIONS_FAST, 2);
    float k[ROWS * HEADS_N * DIM], v[ROWS * HEADS_N * DIM];
    uint16_t pool[3 * HEADS_N * 2 * BLOCK * DIM];
    int32_t table[] = { 2, 0 };
    struct attn_seq seq = { .n_q = ROWS, .pos_begin = 1, .block_table = table };
    struct kv_append_args a = { .k = k,
                                .v = v,
                                .kv = { .data = pool,
                                        .dtype = DTYPE_BF16,
                                        .n_heads = HEADS_N,
                                        .head_dim = DIM,
                                        .block_tokens = BLOCK, },
                                .on = { &seq, 1 }, };
    for (size_t i = 0; i < COUNT_OF(k); i++) k[i] = odd[i % COUNT_OF(odd)], v[i] = (float)i;
    memset(pool, 0x11, sizeof pool);
    c->ops->kv_append(c, &a);
    size_t n_written = 0;
    for (size_t row = 0; row < ROWS; row++)
        for (size_t h = 0; h < HEADS_N; h++)
            for (size_t d = 0; d < DIM; d++, n_written += 2) {
                size_t i = (row * HEADS_N + h) * DIM + d, pos = row + 1;
                size_t at = (((size_t)table[pos / BLOCK] * HEADS_N + h) * 2 * BLOCK + pos % BLOCK) *
                                DIM +
                            d;
                CHECK_EQ_INT(pool[at], round[i % COUNT_OF(round)]);
                CHECK(dtype_bf16_to_f32(pool[at + BLOCK * DIM]) == (float)i);
            }
    for (size_t i = 0; i < COUNT_OF(pool); i++) n_written += pool[i] == 0x1111;
    CHECK_EQ_INT(n_written, COUNT_OF(pool));
    kernel_ctx_free(c);
}

/* More sequences than the work table holds in one pass, each with one token. */
static void many_sequences(const char *isa)
{
    enum { N = 5000, DIM = 8 };
    struct kernel_ctx *c = open_backend(isa, ACTIVATIONS_F32, 2);
    struct attn_seq *seqs = MEM_ARRAY(struct attn_seq, N);
    float *q = random_floats(N * DIM, 1), *v = random_floats(N * DIM, 1),
          *out = MEM_ARRAY(float, N *DIM);
    float *pool = MEM_ARRAY(float, N * 2 * DIM);
    int32_t *blocks = MEM_ARRAY(int32_t, N);
    for (int32_t i = 0; i < N; i++) {
        blocks[i] = i;
        seqs[i] = (struct attn_seq){
            .q_begin = i, .n_q = i % 10 == 3 ? 0 : 1, .pos_begin = 0, .block_table = &blocks[i]
        };
    }
    struct kv_layer kv = {
        .data = pool, .dtype = DTYPE_F32, .n_heads = 1, .head_dim = DIM, .block_tokens = 1
    };
    struct kv_append_args append = { .k = q, .v = v, .kv = kv, .on = { seqs, N } };
    struct attn_args attn = {
        .q = q, .out = out, .kv = kv, .on = { seqs, N }, .n_heads = 1, .v_dim = DIM, .scale = 1
    };
    c->ops->kv_append(c, &append);
    c->ops->attention(c, &attn);
    for (size_t i = 0; i < N; i++) /* one key: its weight is 1 */
        for (size_t d = 0; d < DIM; d++)
            CHECK(out[i * DIM + d] == (i % 10 == 3 ? 0 : v[i * DIM + d]));
    mem_free(q), mem_free(v), mem_free(out), mem_free(pool), mem_free(blocks), mem_free(seqs);
    kernel_ctx_free(c);
}

#define BACKEND_TESTS(name, isa)                                                                   \
    TEST(name##_rows) { rows_cases(isa); }                                                         \
    TEST(name##_block_sizes) { block_cases(isa); }                                                 \
    TEST(name##_segments) { segment_cases(isa); }                                                  \
    TEST(name##_fast) { fast_cases(isa); }                                                         \
    TEST(name##_paths_agree) { paths_agree(isa); }                                                 \
    TEST(name##_later_positions)                                                                   \
    {                                                                                              \
        later_positions_stay_apart(isa, ACTIVATIONS_F32, DTYPE_F32, 150);                          \
        later_positions_stay_apart(isa, ACTIVATIONS_FAST, DTYPE_BF16, 150);                        \
        later_positions_stay_apart(isa, ACTIVATIONS_FAST, DTYPE_BF16, 1);                          \
    }                                                                                              \
    TEST(name##_append) { append_stores(isa); }                                                    \
    TEST(name##_many_sequences) { many_sequences(isa); }
#define BACKEND_CASES(name)                                                                        \
    CASE_T(name##_rows, 240), CASE(name##_block_sizes), CASE_T(name##_segments, 240),              \
        CASE_T(name##_fast, 240), CASE(name##_paths_agree), CASE(name##_later_positions),          \
        CASE(name##_append), CASE(name##_many_sequences)

EVERY_CPU_BACKEND(BACKEND_TESTS)

TEST_MAIN(EVERY_CPU_BACKEND_CASES(BACKEND_CASES))
