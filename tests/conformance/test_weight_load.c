/* test_weight_load.c - loading weights from files: prefetched, packed in parts, copied to the device while
 * the next part is packed.
 *
 * test_models checks that models are loaded correctly, but its matrices are small; here they are
 * many, and larger than the buffers. On an emulated GPU copies run as late as they may, so that
 * writing to a buffer too early is found. */
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "kernels/quantize.h"
#include "shared/model/load/file_map.h"
#include "shared/model/load/read_ahead.h"
#include "tests/conformance/kernel_fixture.h"
#include "tests/fixtures/model_rig.h"
#ifdef BATON_EMULATED_GPU
#include <simt.h>
#endif

/* ---- reading ahead ---- */

static long minor_faults(void)
{
    struct rusage u;
    CHECK(getrusage(RUSAGE_SELF, &u) == 0);
    return u.ru_minflt;
}

static void map_sample(size_t bytes, struct file_map *map)
{
    char path[4200];
    struct err err;
    snprintf(path, sizeof path, "%s/sample", test_tmpdir());
    uint8_t *data = mem_calloc(bytes, 1);
    for (size_t i = 0; i < bytes; i++) data[i] = (uint8_t)(i * 2654435761u >> 24);
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(data, 1, bytes, f) == bytes && fclose(f) == 0);
    mem_free(data);
    CHECK_OK(file_map_open(path, map, &err));
}

/* Ranges at odd addresses, one of them empty. Touching an awaited range causes no page faults. */
TEST(prefetched_ranges_are_in_memory)
{
    enum { BYTES = 40 << 20 };
    struct file_map map;
    volatile uint8_t sum = 0;
    map_sample(BYTES, &map);
    const bool can_populate = madvise((void *)(uintptr_t)map.data, 4096,
                                      22 /* MADV_POPULATE_READ */) == 0;
    const struct read_ahead_range pieces[] = { { map.data + 12345, 20 << 20 },
                                               { NULL, 77 },
                                               { map.data, 1 },
                                               { map.data + (30 << 20) + 1, (10 << 20) - 1 } };
    struct read_ahead *r = read_ahead_start(pieces, COUNT_OF(pieces));
    CHECK(r != NULL);
    for (size_t i = 0; i < COUNT_OF(pieces); i++) {
        read_ahead_await(r, i);
        const long before = minor_faults();
        for (size_t at = 0; pieces[i].data && at < pieces[i].bytes; at += 4096)
            sum = (uint8_t)(sum + ((const uint8_t *)pieces[i].data)[at]);
        /* a sanitizer touches other memory too */
        if (can_populate && !TEST_IS_SANITIZED && minor_faults() - before > 20)
            test_fail(__FILE__, __LINE__, "piece %zu: %ld faults", i, minor_faults() - before);
    }
    read_ahead_await(r, COUNT_OF(pieces)); /* past the last range */
    read_ahead_stop(r);
    file_map_close(&map);
    if (!can_populate)
        SKIP("this kernel cannot populate pages: that they were there was NOT looked at");
}

/* More ranges than may be read ahead. The owner awaits all of them, or stops early. */
TEST(readers_stay_near_their_owner)
{
    enum { N = 1000 };
    struct file_map map;
    struct read_ahead_range pieces[N];
    map_sample(N * 100, &map);
    for (size_t i = 0; i < N; i++) pieces[i] = (struct read_ahead_range){ map.data + i * 100, 100 };
    struct read_ahead *r = read_ahead_start(pieces, N);
    CHECK(r != NULL);
    for (size_t i = 0; i < N; i++) read_ahead_await(r, i);
    read_ahead_stop(r);
    r = read_ahead_start(pieces, N);
    CHECK(r != NULL);
    read_ahead_await(r, 3);
    read_ahead_stop(r);
    CHECK(read_ahead_start(pieces, 0) == NULL);
    read_ahead_await(NULL, 0);
    read_ahead_stop(NULL);
    file_map_close(&map);
}

/* ---- pieces of a matrix ---- */

static struct kernel_ctx *open_gpu(enum activations activations)
{
    struct kernel_ctx *c;
    struct err err;
    if (!has_gpu()) SKIP("no CUDA GPU, and no emulated one in this build: NOT run on it");
    if (kernel_ctx_create(kernel_options_default("cuda", activations, 2), &c, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s", err.text);
    return c;
}

static void end_weights(struct kernel_ctx *c)
{
    struct weight_times times;
    struct err err;
    if (c->weight_ops->finish(c, &times, &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
}

static uint8_t *fetch_weight(struct kernel_ctx *c, const struct weight *w)
{
    uint8_t *bytes = mem_calloc(w->bytes, 1);
    device_download(c->device, bytes, w->data, w->bytes);
    CHECK_OK(device_fault(c->device, NULL));
    return bytes;
}

static uint16_t *random_bf16(size_t n)
{
    uint16_t *v = MEM_ARRAY(uint16_t, n);
    for (size_t i = 0; i < n; i++) v[i] = dtype_f32_to_bf16(random_float(1));
    return v;
}

enum { N_IN = 128, WIDE = 70000 };

/* 17 MiB of bf16, not converted: device rows are source rows, alternating for a pair. */
TEST(a_matrix_larger_than_a_buffer)
{
    struct kernel_ctx *c = open_gpu(ACTIVATIONS_FAST);
    uint16_t *v = random_bf16((size_t)WIDE * N_IN);
    for (int paired = 0; paired < 2; paired++) {
        const size_t n_out = paired ? WIDE / 2 : WIDE;
        struct weight_src parts[2] = {
            { .dtype = DTYPE_BF16, .data = v, .n_out = n_out, .n_in = N_IN }
        };
        parts[1] = parts[0];
        parts[1].data = v + n_out * N_IN;
        const struct weight_pack_args a = {
            .parts = parts,
            .n_parts = paired ? 2 : 1,
            .join = paired ? JOIN_PAIRED : JOIN_STACKED,
        };
        struct weight w;
        CHECK_OK(c->weight_ops->pack(c, &a, &w, NULL));
        uint8_t *have = fetch_weight(c, &w);
        for (size_t i = 0; i < WIDE; i++) {
            const uint16_t *want = v + (paired ? i / 2 + i % 2 * n_out : i) * N_IN;
            if (memcmp(have + i * N_IN * 2, want, N_IN * 2) != 0)
                test_fail(__FILE__, __LINE__, "%s: row %zu differs", paired ? "pair" : "matrix", i);
        }
        mem_free(have);
        weight_release(c, &w);
    }
    end_weights(c);
    mem_free(v);
    kernel_ctx_free(c);
}

/* Two parts in wint8, 17 MiB, with scales that belong to all parts. */
TEST(scales_of_all_pieces)
{
    enum { FIRST = 64016, REST = 76000 };
    struct kernel_ctx *c = open_gpu(ACTIVATIONS_FAST);
    uint16_t *v = random_bf16((size_t)(FIRST + REST) * N_IN);
    const struct weight_src parts[] = {
        { .dtype = DTYPE_BF16, .data = v, .n_out = FIRST, .n_in = N_IN },
        { .dtype = DTYPE_BF16, .data = v + (size_t)FIRST * N_IN, .n_out = REST, .n_in = N_IN }
    };
    const struct weight_pack_args a = { .parts = parts, .n_parts = 2, .quantize = QUANTIZE_WINT8 };
    struct weight w;
    CHECK_OK(c->weight_ops->pack(c, &a, &w, NULL));
    uint8_t *have = fetch_weight(c, &w);
    const float *scales =
        (const float *)(const void *)(have + ((size_t)(FIRST + REST) * N_IN + 255) / 256 * 256);
    for (size_t i = 0; i < FIRST + REST; i++) {
        float wide[N_IN];
        int8_t q[N_IN];
        dtype_to_f32(DTYPE_BF16, v + i * N_IN, wide, N_IN);
        const float scale = quantize_channel(wide, N_IN, 127, q);
        if (memcmp(have + i * N_IN, q, N_IN) != 0 || scale != scales[i])
            test_fail(__FILE__, __LINE__, "row %zu differs", i);
    }
    end_weights(c);
    mem_free(have);
    mem_free(v);
    weight_release(c, &w);
    kernel_ctx_free(c);
}

/* Uses every buffer twice, with each matrix in memory of the caller, and checks all of them at the
 * end. A second model gets new buffers. */
TEST(many_matrices_before_the_first_is_used)
{
    enum { N = 60, ROWS = 4000 };
    struct kernel_ctx *c = open_gpu(ACTIVATIONS_FAST);
    struct weight w[N];
    uint16_t *v[N];
    for (int model = 0; model < 2; model++) {
        for (size_t i = 0; i < N; i++) {
            v[i] = random_bf16((size_t)ROWS * 2 * N_IN);
            const struct weight_src s = {
                .dtype = DTYPE_BF16, .data = v[i], .n_out = ROWS, .n_in = 2 * N_IN
            };
            const struct weight_pack_args a = { .parts = &s, .n_parts = 1 };
            CHECK_OK(c->weight_ops->pack(c, &a, &w[i], NULL));
        }
        if (model == 0) end_weights(c);
        for (size_t i = 0; i < N; i++) {
            uint8_t *have = fetch_weight(c, &w[i]);
            if (memcmp(have, v[i], (size_t)ROWS * 2 * N_IN * 2) != 0)
                test_fail(__FILE__, __LINE__, "matrix %zu differs", i);
            mem_free(have);
            mem_free(v[i]);
            weight_release(c, &w[i]);
        }
    }
    kernel_ctx_free(c); /* frees the second model's buffers too, whose end was not announced */
}

/* ---- failures ---- */

#ifdef BATON_EMULATED_GPU
/* Loads while the call fails after `after` successful ones. False: there were not that many. */
static bool load_fails(const char *call, cudaError_t e, int after)
{
    struct kernel_ctx *k;
    struct model *m;
    struct err err = { 0 };
    CHECK_OK(kernel_ctx_create(kernel_options_default("cuda", ACTIVATIONS_FAST, 2), &k, &err));
    const struct model_options o = {
        .path = golden("deepseek_v3_fp8", "model").text,
        .max_rows = 8,
        .max_model_len = 64,
        .quantize = QUANTIZE_WINT8,
        .kernels = k,
    };
    simt_fail_next(e, call, after);
    const enum status st = model_load(&o, &m, &err);
    simt_fail_next(e, call, -1);
    if (st == OK) model_free(m);
    else if (st != ERR_NODEV || !strstr(err.text, "the GPU failed in"))
        test_fail(__FILE__, __LINE__, "%s %d: status %d: %s", call, after, (int)st, err.text);
    kernel_ctx_free(k);
    if (st != OK) CHECK_EQ_INT(cudaDeviceReset(), cudaSuccess);
    return st != OK;
}

TEST(failures_on_the_way_end_the_load)
{
    static const char *const CALLS[] = { "cudaMallocHost", "cudaStreamWaitEvent", "cudaEventRecord",
                                         "cudaMemcpyAsync" };
    for (size_t i = 0; i < COUNT_OF(CALLS); i++) {
        CHECK(load_fails(CALLS[i], cudaErrorInvalidValue, 0));
        /* one buffer is enough for this model */
        CHECK(i == 0 || load_fails(CALLS[i], cudaErrorInvalidValue, 40));
    }
    CHECK(load_fails("cudaMemcpyAsync", cudaErrorIllegalAddress, 7));
    CHECK(!load_fails("cudaMemcpyAsync", cudaErrorInvalidValue, 1000000));
}
#else
TEST(failures_on_the_way_end_the_load)
{
    SKIP("no emulated GPU in this build, and a real one fails when it likes: NOT run");
}
#endif

TEST_MAIN(CASE(prefetched_ranges_are_in_memory), CASE(readers_stay_near_their_owner),
          CASE(a_matrix_larger_than_a_buffer), CASE(scales_of_all_pieces),
          CASE(many_matrices_before_the_first_is_used),
          CASE_T(failures_on_the_way_end_the_load, 120))
