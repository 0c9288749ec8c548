/* test_gpu_jobs.c - GPU jobs of transfers: checksums, copies and conversions of pieces equal those
 * of the CPU; jobs and stages are released, and not too early. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kvtransfer/convert.h"
#include "kvtransfer/gpu_jobs.h"
#include "shared/base/hash/hash.h"
#include "tests/fixtures/kvt_bytes.h"
#include "tests/harness/test.h"

enum { BLOCKS = 12, TOKENS = 7 * 16 + 5 };

struct rig {
    struct device *device;
    struct kv_layout layout;
    struct dev_mem pool;
    char *image; /* the pool's bytes */
    struct kvt_staging *staging;
    struct kvt_gpu_jobs *jobs;
    atomic_int noticed;
};

static void notice(void *arg) { atomic_fetch_add(&((struct rig *)arg)->noticed, 1); }

static void rig_open_as(struct rig *r, const char *name, uint32_t dtype)
{
    struct err err = { 0 };
    if (device_count(name) == 0) SKIP("no GPU: jobs of a GPU are NOT tested");
    *r = (struct rig){ .layout = { .dtype = dtype,
                                   .block_tokens = 16,
                                   .n_layers = 2,
                                   .n_kv_heads = 3,
                                   .model_kv_heads = 3,
                                   .head_dim = 24,
                                   .tp_size = 1,
                                   .n_blocks = BLOCKS, }, };
    CHECK_OK(device_open(name, &r->device, &err));
    CHECK_OK(device_mem_alloc(r->device, kv_layout_pool_bytes(&r->layout), DEVICE_MEM_SHARED,
                              &r->pool, &err));
    CHECK_OK(kvt_staging_create(r->device, 8 * KVT_STAGING_CHUNK, &r->staging, &err));
    CHECK(kvt_staging_device_mem(r->staging) == NULL);
    CHECK_OK(kvt_staging_add_device(r->staging, &err));
    CHECK_EQ_INT(kvt_staging_device_mem(r->staging)->bytes >= kvt_staging_mem(r->staging)->bytes,
                 1);
    r->image = malloc(kv_layout_pool_bytes(&r->layout));
    srand(4);
    for (size_t i = 0; i < kv_layout_pool_bytes(&r->layout); i++) r->image[i] = (char)rand();
    device_upload(r->device, r->pool.ptr, r->image, kv_layout_pool_bytes(&r->layout));
    struct kvt_gpu_jobs_options o = {
        .device = r->device,
        .pool = r->pool.ptr,
        .staging = r->staging,
        .max_copies = kvt_plan_max_copies(&r->layout),
        .on_done = notice,
        .arg = r,
    };
    CHECK_OK(kvt_gpu_jobs_create(&o, &r->jobs, &err));
}

static void rig_open(struct rig *r, const char *name) { rig_open_as(r, name, DTYPE_BF16); }

static void rig_close(struct rig *r)
{
    kvt_gpu_jobs_free(r->jobs);
    kvt_staging_free(r->staging);
    device_mem_free(r->device, &r->pool);
    device_close(r->device);
    free(r->image);
}

static const int32_t TABLE[8] = { 3, 1, 11, 0, 7, 5, 2, 9 };

/* Checksums of all heads and of one in the middle, of full blocks and of a partly filled last
 * one. */
static void checksums_of(const char *name, uint32_t dtype)
{
    struct rig r;
    rig_open_as(&r, name, dtype);
    struct kvt_head_slice views[] = { head_slice_all(&r.layout), { &r.layout, 1, 1 } };
    void *scratch = malloc(kv_layout_piece_bytes(&r.layout));
    for (int v = 0; v < 2; v++)
        for (uint32_t layer = 0; layer < 2; layer++) {
            struct kvt_gpu_job *k = kvt_gpu_jobs_acquire(r.jobs);
            struct kvt_gpu_job_params t = {
                .slice = &views[v],
                .blocks = TABLE,
                .n_tokens = TOKENS,
                .range = { layer, 2, 6 },
                .sums = true,
            };
            CHECK_OK(kvt_gpu_job_begin(k, &t));
            CHECK_OK(kvt_gpu_jobs_synchronize(r.jobs));
            CHECK(kvt_gpu_job_is_done(k) && kvt_gpu_jobs_oldest(r.jobs) == k);
            for (uint32_t i = 0; i < 6; i++)
                CHECK(k->sums[i] == kvt_plan_checksum(&views[v], r.image, layer, TABLE[2 + i],
                                                      kvt_plan_tokens(&r.layout, TOKENS, 2 + i),
                                                      scratch));
            kvt_gpu_job_release(k);
            CHECK(kvt_gpu_jobs_oldest(r.jobs) == NULL);
        }
    CHECK_EQ_INT(atomic_load(&r.noticed), 4);
    free(scratch);
    rig_close(&r);
}

static void checksums_case(const char *name)
{
    checksums_of(name, DTYPE_BF16);
    checksums_of(name, DTYPE_I8);
}

/* Converted pieces equal the CPU's, in the device half of the stage and, once fetched, in the host
 * half; the checksums are of those bytes. */
static void conversion_of(const char *name, uint32_t from, uint32_t to, uint32_t block_tokens)
{
    struct rig r;
    rig_open_as(&r, name, from);
    struct kv_layout l = r.layout;
    l.dtype = to;
    l.block_tokens = block_tokens;
    uint32_t n_last = kvt_plan_n_blocks(&l, TOKENS);
    struct kvt_head_slice src = { &r.layout, 1, 2 }, dst = { &l, 0, 2 };
    struct kvt_block_range range = { 1, n_last / 3, n_last - n_last / 3 };
    size_t bytes = kvt_plan_range_bytes(&dst, TOKENS, range), at = 0;
    char *want = malloc(bytes), *got = malloc(bytes);
    for (uint32_t i = 0; i < range.n;
         at += kvt_head_slice_bytes(&dst, kvt_plan_tokens(&l, TOKENS, range.first + i)), i++)
        kvt_convert_piece(&src, r.image, TABLE, &dst, TOKENS, 1, range.first + i, want + at);
    for (int fetch = 0; fetch < 2; fetch++) {
        struct kvt_gpu_job *k = kvt_gpu_jobs_acquire(r.jobs);
        CHECK(kvt_staging_acquire(r.staging, bytes, true, kvt_gpu_jobs_held(r.jobs), &k->stage));
        struct kvt_gpu_job_params t = {
            .slice = &src,
            .blocks = TABLE,
            .n_tokens = TOKENS,
            .range = range,
            .sums = true,
            .copy = fetch ? KVT_GPU_COPY_D2H : KVT_GPU_COPY_NONE,
            .convert_to = &dst,
        };
        CHECK_OK(kvt_gpu_job_begin(k, &t));
        CHECK_OK(kvt_gpu_jobs_synchronize(r.jobs));
        device_download(r.device, got, kvt_staging_device_at(r.staging, k->stage), bytes);
        CHECK(memcmp(got, want, bytes) == 0);
        CHECK((memcmp(kvt_staging_at(r.staging, k->stage), want, bytes) == 0) == (fetch == 1));
        at = 0;
        for (uint32_t i = 0; i < range.n; i++) {
            size_t n = kvt_head_slice_bytes(&dst, kvt_plan_tokens(&l, TOKENS, range.first + i));
            CHECK(k->sums[i] == hash_64(want + at, n, 0));
            at += n;
        }
        CHECK_EQ_INT(at, bytes);
        kvt_gpu_job_release(k);
    }
    free(want);
    free(got);
    rig_close(&r);
}

static void conversion_case(const char *name)
{
    conversion_of(name, DTYPE_BF16, DTYPE_BF16, 7);
    conversion_of(name, DTYPE_BF16, DTYPE_F32, 64);
    /* more pieces than one call of the copy stream takes */
    conversion_of(name, DTYPE_BF16, DTYPE_BF16, 1);
    conversion_of(name, DTYPE_I8, DTYPE_I8, 5);
}

/* Fetched bytes are those of the block range, piece after piece; stored in other blocks they are
 * the same, and no other byte has changed. */
static void copies_case(const char *name)
{
    struct rig r;
    rig_open(&r, name);
    static const int32_t other[8] = { 4, 6, 8, 10, 4, 6, 8, 10 };
    struct kvt_head_slice slice = { &r.layout, 1, 2 };
    struct kvt_block_range range = { 1, 4, 4 };
    struct kvt_copy copies[64];
    uint64_t n_bytes = kvt_plan_range_bytes(&slice, TOKENS, range);
    uint32_t held = 0, n = kvt_plan_copies_from(0, &slice, TABLE, TOKENS, range, copies);
    struct kvt_stage stage;
    CHECK(n <= 64 && kvt_staging_acquire(r.staging, n_bytes, true, &held, &stage));
    for (int step = 0; step < 2; step++) {
        struct kvt_gpu_job *k = kvt_gpu_jobs_acquire(r.jobs);
        k->stage = stage;
        struct kvt_gpu_job_params t = {
            .slice = &slice,
            .blocks = step ? other : TABLE,
            .n_tokens = TOKENS,
            .range = range,
            .copy = step ? KVT_GPU_COPY_H2D : KVT_GPU_COPY_D2H,
        };
        CHECK_OK(kvt_gpu_job_begin(k, &t));
        CHECK_OK(kvt_gpu_jobs_synchronize(r.jobs));
        const char *made = kvt_staging_at(r.staging, stage);
        for (uint32_t i = 0; i < n; i++)
            CHECK(memcmp(made + copies[i].local, r.image + copies[i].remote, copies[i].bytes) == 0);
        k->stage.n = 0;
        kvt_gpu_job_release(k);
    }
    struct kvt_copy back[64];
    CHECK_EQ_INT(kvt_plan_copies_from(0, &slice, other, TOKENS, range, back), n);
    char *want = r.image, *now = malloc(kv_layout_pool_bytes(&r.layout)),
         *made = kvt_staging_at(r.staging, stage);
    for (uint32_t i = 0; i < n; i++)
        memcpy(want + back[i].remote, made + back[i].local, back[i].bytes);
    device_download(r.device, now, r.pool.ptr, kv_layout_pool_bytes(&r.layout));
    CHECK(memcmp(now, want, kv_layout_pool_bytes(&r.layout)) == 0);
    free(now);
    kvt_staging_release(r.staging, &held, &stage);
    rig_close(&r);
}

TEST(checksums_on_the_cpu) { checksums_case("cpu"); }
TEST(checksums_on_the_gpu) { checksums_case("cuda"); }
TEST(conversions_on_the_cpu) { conversion_case("cpu"); }
TEST(conversions_on_the_gpu) { conversion_case("cuda"); }
TEST(copies_on_the_cpu) { copies_case("cpu"); }
TEST(copies_on_the_gpu) { copies_case("cuda"); }

/* A job that is released early keeps its stage until the GPU has finished with it; then both are
 * free. */
TEST(a_job_released_early_keeps_its_stage)
{
    struct rig r;
    rig_open(&r, "cuda");
    struct kvt_head_slice all = head_slice_all(&r.layout);
    uint32_t free_before = staging_n_free(r.staging);
    struct kvt_gpu_job *k = kvt_gpu_jobs_acquire(r.jobs);
    CHECK(kvt_staging_acquire(r.staging, 6000, true, kvt_gpu_jobs_held(r.jobs), &k->stage));
    struct kvt_gpu_job_params t = {
        .slice = &all,
        .blocks = TABLE,
        .n_tokens = TOKENS,
        .range = { 0, 0, 2 },
        .copy = KVT_GPU_COPY_D2H,
    };
    CHECK_OK(kvt_gpu_job_begin(k, &t));
    bool early = !kvt_gpu_job_is_done(k);
    kvt_gpu_job_release(k);
    if (early)
        CHECK(staging_n_free(r.staging) < free_before && kvt_gpu_jobs_oldest(r.jobs) == NULL);
    CHECK_OK(kvt_gpu_jobs_synchronize(r.jobs));
    kvt_gpu_jobs_collect(r.jobs);
    CHECK_EQ_INT(staging_n_free(r.staging), free_before);
    CHECK_EQ_INT(*kvt_gpu_jobs_held(r.jobs), 0);
    rig_close(&r);
}

TEST(jobs_are_bounded)
{
    struct rig r;
    struct kvt_gpu_job *taken[KVT_GPU_JOBS_MAX];
    rig_open(&r, "cpu");
    for (int i = 0; i < KVT_GPU_JOBS_MAX; i++)
        CHECK((taken[i] = kvt_gpu_jobs_acquire(r.jobs)) != NULL);
    CHECK(kvt_gpu_jobs_acquire(r.jobs) == NULL);
    kvt_gpu_job_release(taken[5]); /* never begun */
    kvt_gpu_job_release(NULL);
    CHECK(kvt_gpu_jobs_acquire(r.jobs) == taken[5]);
    CHECK(kvt_gpu_jobs_acquire(r.jobs) == NULL);
    rig_close(&r);
}

TEST_MAIN(CASE(checksums_on_the_cpu), CASE(checksums_on_the_gpu), CASE(conversions_on_the_cpu),
          CASE(conversions_on_the_gpu), CASE(copies_on_the_cpu), CASE(copies_on_the_gpu),
          CASE(a_job_released_early_keeps_its_stage), CASE(jobs_are_bounded))
