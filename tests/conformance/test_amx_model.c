/* test_amx_model.c - the micro-kernels of the amx backend on CPUs without AMX: amx_int8.c and
 * amx_bf16.c are compiled into this program with the tile instructions in plain C
 * (tests/harness/tile_model.h) and replace those in the library. This does not test the CPU's own
 * rounding and speed: on a CPU with AMX, test_matmul runs the backend itself. */
#include "kernels/cpu/cpu_backend.h"
#include "tests/conformance/kernel_fixture.h"
#include "tests/harness/tile_model.h"

_Thread_local struct tile_model tile_model;

/* A context of the amx backend, which this CPU need not support, except that its vector code needs
 * the instructions of the avx512-bf16 backend. */
static struct kernel_ctx *open_amx(void)
{
    struct kernel_ctx *c = open_backend("avx512-bf16", ACTIVATIONS_FAST, 2);
    c->backend = &cpu_backend_amx.base;
    return c;
}

static float *product(struct kernel_ctx *c, const struct weight *w, const float *x, size_t n_rows)
{
    float *y = MEM_ARRAY(float, n_rows * w->n_out);
    CHECK_OK(kernel_ctx_reserve(c, n_rows, w->n_in));
    c->ops->matmul(
        c,
        &(struct matmul_args){
            .w = w, .x = x, .x_stride = w->n_in, .n_rows = n_rows, .y = y, .y_stride = w->n_out },
        1);
    CHECK(!tile_model.on);
    return y;
}

static const size_t ROWS[] = { 1, 3, 8, 9, 16, 17, 35, 100 };

TEST(integers_have_the_bits_of_ref)
{
    static const enum dtype TYPES[] = { DTYPE_Q8_0, DTYPE_Q4_0, DTYPE_Q4_1, DTYPE_Q5_1,
                                        DTYPE_Q4_K, DTYPE_Q5_K, DTYPE_Q6_K, DTYPE_IQ4_XS };
    struct kernel_ctx *c = open_amx(), *ref = open_backend("ref", ACTIVATIONS_FAST, 1);
    for (size_t t = 0; t < COUNT_OF(TYPES); t++) {
        struct matrix m = make_matrix(TYPES[t], 70, 512);
        struct weight w = pack_one(c, &m);
        float *x = random_floats(100 * 512, 2), *want = product(ref, &w, x, 100);
        for (size_t i = 0; i < COUNT_OF(ROWS); i++) {
            float *got = product(c, &w, x, ROWS[i]);
            check_bits(got, want, ROWS[i] * 70, dtype_name(TYPES[t]), ROWS[i], 512);
            mem_free(got);
        }
        weight_release(c, &w);
        free_matrix(&m);
        mem_free(x), mem_free(want);
    }
    kernel_ctx_free(c);
    kernel_ctx_free(ref);
}

/* The error of rounding x to bf16 is 2^-9 of each product; that of the sums is far smaller. */
static void check_bf16(const struct matrix *m, const float *x, const float *y, size_t n_rows)
{
    size_t n_in = m->src.n_in, n_out = m->src.n_out;
    for (size_t i = 0; i < n_rows * n_out; i++) {
        double sum = 0, size = 0;
        for (size_t k = 0; k < n_in; k++) {
            double p = (double)m->wide[i % n_out * n_in + k] * (double)x[i / n_out * n_in + k];
            sum += p;
            size += fabs(p);
        }
        if (!(fabs((double)y[i] - sum) <= size * 0x1p-8))
            test_fail(__FILE__, __LINE__, "%s, n_in %zu: element %zu is %.9g, not %.9g",
                      dtype_name(m->src.dtype), n_in, i, (double)y[i], sum);
    }
}

TEST(bf16_rows_do_not_depend_on_their_neighbours)
{
    static const enum dtype TYPES[] = { DTYPE_BF16, DTYPE_F8_E4M3 };
    static const size_t SIZES[][2] = {
        { 33, 1 }, { 5, 7 }, { 48, 257 }, { 129, 300 }, { 20, 544 }
    };
    struct kernel_ctx *c = open_amx();
    for (size_t t = 0; t < COUNT_OF(TYPES); t++)
        for (size_t s = 0; s < COUNT_OF(SIZES); s++) {
            struct matrix m = make_matrix(TYPES[t], SIZES[s][0], SIZES[s][1]);
            struct weight w = pack_one(c, &m);
            float *x = random_floats(100 * w.n_in, 2), *want = product(c, &w, x, 100);
            check_bf16(&m, x, want, 100);
            for (size_t i = 0; i < COUNT_OF(ROWS); i++) {
                float *got = product(c, &w, x + (100 - ROWS[i]) * w.n_in, ROWS[i]);
                check_bits(got, want + (100 - ROWS[i]) * w.n_out, ROWS[i] * w.n_out,
                           dtype_name(TYPES[t]), ROWS[i], w.n_in);
                mem_free(got);
            }
            weight_release(c, &w);
            free_matrix(&m);
            mem_free(x), mem_free(want);
        }
    kernel_ctx_free(c);
}

TEST_MAIN(CASE(integers_have_the_bits_of_ref), CASE(bf16_rows_do_not_depend_on_their_neighbours))
