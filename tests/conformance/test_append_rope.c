/* test_append_rope.c - kv_append with RoPE gives the bytes in the pool and the queries that RoPE
 * followed by kv_append gives, and attention that appends first what attention after kv_append
 * gives, for every backend and every type of KV cache that it supports. */
#include "kernels/kv_rows.h"
#include "tests/conformance/kernel_ops_on_device.h"

enum {
    ROWS = 13,
    ROWS_MANY = 130 /* kernels of a GPU for prompts */,
    POSITIONS = 140,
    Q_HEADS = 8,
    KV_HEADS = 2,
    BLOCK = 16,
    TABLE = 9,
    BLOCKS = 2 * TABLE
};

struct world {
    int32_t tables[2][TABLE], pos[ROWS_MANY];
    struct attn_seq seqs[2];
    float *q, *k, *v, *norm, *cos_sin;
    size_t dim, n_rows, pool_bytes;
};

/* A decode row at position 20, then prompt rows from position 3 on. */
static struct world make_world(size_t dim, size_t n_rows)
{
    struct world w = { .dim = dim, .n_rows = n_rows };
    for (int i = 0; i < BLOCKS; i++) w.tables[i % 2][i / 2] = (i * 7 + 5) % BLOCKS;
    w.seqs[0] = (struct attn_seq){ .q_begin = 0, .n_q = 1, .pos_begin = 20, .is_decode = true };
    w.seqs[1] = (struct attn_seq){ .q_begin = 1, .n_q = (int32_t)n_rows - 1, .pos_begin = 3 };
    for (int i = 0; i < (int)n_rows; i++) w.pos[i] = i == 0 ? 20 : 2 + i;
    w.q = random_floats(n_rows * Q_HEADS * dim, 2);
    w.k = random_floats(n_rows * KV_HEADS * dim, 2);
    w.v = random_floats(n_rows * KV_HEADS * dim, 2);
    w.norm = random_floats(dim, 1);
    w.cos_sin = random_floats(POSITIONS * dim, 1);
    w.pool_bytes = (size_t)BLOCKS * KV_HEADS * 2 * BLOCK * (dim * sizeof(float) + sizeof(float));
    return w;
}

static void free_world(struct world *w)
{
    mem_free(w->q), mem_free(w->k), mem_free(w->v), mem_free(w->norm), mem_free(w->cos_sin);
}

/* Of q and k, of which both have norms or none. */
static struct rope_args rope_of(const struct world *w, float *q, float *k, bool norms,
                                bool interleaved)
{
    const size_t dim = w->dim;
    const float *norm = norms ? w->norm : NULL;
    return (struct rope_args){
        .heads = { { q, Q_HEADS * dim, Q_HEADS, dim, norm },
                   { k, KV_HEADS * dim, KV_HEADS, dim, norm } },
        .n_heads = 2,
        .n_rows = w->n_rows,
        .rot_dim = dim / 2 * 2,
        .cos_sin = w->cos_sin,
        .pos = w->pos,
        .interleaved = interleaved,
        .norm_eps = 1e-5f,
    };
}

static void check(struct kernel_ctx *c, enum dtype type, size_t dim, size_t n_rows, int way)
{
    const bool norms = way & 1, interleaved = way & 2;
    struct world w = make_world(dim, n_rows);
    float *q[2], *k[2];
    char *pools[2];
    for (int i = 0; i < 2; i++) {
        q[i] = mem_dup(w.q, n_rows * Q_HEADS * dim * sizeof(float)),
        k[i] = mem_dup(w.k, n_rows * KV_HEADS * dim * sizeof(float));
        pools[i] = mem_calloc(1, w.pool_bytes);
        for (int s = 0; s < 2; s++) w.seqs[s].block_table = w.tables[s];
        const struct rope_args rope = rope_of(&w, q[i], k[i], norms, interleaved);
        struct kv_append_args append = { .k = k[i],
                                         .v = w.v,
                                         .on = { .seqs = w.seqs, .n_seqs = 2 },
                                         .rope = i ? &rope : NULL,
                                         .kv = { .dtype = type,
                                                 .n_heads = KV_HEADS,
                                                 .head_dim = (int32_t)dim,
                                                 .block_tokens = BLOCK,
                                                 .data = pools[i], }, };
        if (!i) on_rope(c, &rope, POSITIONS);
        if (i) on_append_rotated(c, &append, NULL, false, POSITIONS, pools[i], w.pool_bytes);
        else on_attention(c, &append, NULL, pools[i], w.pool_bytes);
    }
    check_bits(q[1], q[0], n_rows * Q_HEADS * dim, "queries", dim, (size_t)type);
    CHECK(memcmp(pools[0], pools[1], w.pool_bytes) == 0);
    bool written = false;
    for (size_t i = 0; i < w.pool_bytes; i++) written |= pools[0][i] != 0;
    CHECK(written);
    for (int i = 0; i < 2; i++) mem_free(q[i]), mem_free(k[i]), mem_free(pools[i]);
    free_world(&w);
}

/* Of a step of one row per sequence (is_alone), or of one with a prompt. */
static void check_attention(struct kernel_ctx *c, enum dtype type, size_t dim, bool is_alone,
                            bool interleaved)
{
    struct world w = make_world(dim, ROWS);
    float *out[2];
    char *pools[2];
    if (is_alone) w.seqs[1] = (struct attn_seq){ .q_begin = 1, .n_q = 1, .is_decode = true };
    for (int s = 0; s < 2; s++) w.seqs[s].block_table = w.tables[s];
    for (int i = 0; i < 2; i++) {
        float *q = mem_dup(w.q, ROWS * Q_HEADS * dim * sizeof(float)),
              *k = mem_dup(w.k, ROWS * KV_HEADS * dim * sizeof(float));
        out[i] = mem_calloc(ROWS * Q_HEADS * dim, sizeof(float));
        pools[i] = mem_calloc(1, w.pool_bytes);
        const struct rope_args rope = rope_of(&w, q, k, !interleaved, interleaved);
        const struct kv_append_args append = { .k = k,
                                               .v = w.v,
                                               .on = { .seqs = w.seqs, .n_seqs = 2 },
                                               .rope = &rope,
                                               .kv = { .dtype = type,
                                                       .n_heads = KV_HEADS,
                                                       .head_dim = (int32_t)dim,
                                                       .block_tokens = BLOCK,
                                                       .data = pools[i], }, };
        const struct attn_args attend = { .q = q,
                                          .out = out[i],
                                          .kv = append.kv,
                                          .on = append.on,
                                          .n_heads = Q_HEADS,
                                          .v_dim = (int32_t)dim,
                                          .scale = 0.2f };
        on_append_rotated(c, &append, &attend, i, POSITIONS, pools[i], w.pool_bytes);
        mem_free(q), mem_free(k);
    }
    check_bits(out[1], out[0], ROWS * Q_HEADS * dim, "outputs", dim, (size_t)type);
    CHECK(memcmp(pools[0], pools[1], w.pool_bytes) == 0);
    for (int i = 0; i < 2; i++) mem_free(out[i]), mem_free(pools[i]);
    free_world(&w);
}

static void append_cases(const char *isa)
{
    static const enum dtype TYPES[] = { DTYPE_F32, DTYPE_BF16, DTYPE_F16, DTYPE_I8, DTYPE_F8_E4M3 };
    static const size_t DIMS[] = { 64, 128, 20, 18 };
    struct kernel_ctx *c = open_backend(isa, ACTIVATIONS_F32, 2);
    for (size_t t = 0; t < COUNT_OF(TYPES); t++)
        for (size_t d = 0; d < COUNT_OF(DIMS); d++)
            for (int way = 0; way < 4; way++) {
                /* in a sanitizer's build each type has every way, and each way some sizes */
                if (!test_runs_long() && (t + d + (size_t)way) % 2) continue;
                check(c, TYPES[t], DIMS[d], ROWS, way);
                if (DIMS[d] == 128) check(c, TYPES[t], DIMS[d], ROWS_MANY, way);
            }
    kernel_ctx_free(c);
}

static void attention_cases(const char *isa)
{
    static const enum dtype TYPES[] = { DTYPE_F32, DTYPE_BF16, DTYPE_F16, DTYPE_I8, DTYPE_F8_E4M3 };
    for (size_t t = 0; t < COUNT_OF(TYPES); t++) {
        struct kernel_ctx *c = open_backend(
            isa, TYPES[t] == DTYPE_F32 ? ACTIVATIONS_F32 : ACTIVATIONS_FAST, 2);
        for (int way = 0; way < 4; way++)
            check_attention(c, TYPES[t], t % 2 ? 128 : 64, way & 1, way & 2);
        kernel_ctx_free(c);
    }
}

#define BACKEND_TESTS(name, isa)                                                                   \
    TEST(name##_append_after_rope) { append_cases(isa); }                                          \
    TEST(name##_attention_that_appends) { attention_cases(isa); }
#define BACKEND_CASES(name) CASE(name##_append_after_rope), CASE(name##_attention_that_appends)
EVERY_BACKEND(BACKEND_TESTS)
TEST_MAIN(EVERY_BACKEND_CASES(BACKEND_CASES))
