/* test_simt_cluster.cc - clusters of blocks on tests/simt: a tile that two blocks load half each for
 * both and multiply, and every way of handing it over wrongly. */
#include "tests/unit/simt/simt_case.h"

enum {
    WARPGROUP = 128,
    THREADS = 2 * WARPGROUP, /* the first multiplies; a thread of the other loads */
    BLOCKS = 2,
    N = 16, /* rows of a tile */
    HALF = N / BLOCKS,
    BOX = HALF * SIMT_BOX_BYTES,
    STAGES = 2,
    TURNS = 7,
    K = TURNS * 64,
    A_BYTES = 64 * 128,
    B_BYTES = N * 128,
    BARRIERS_AT = A_BYTES + STAGES * B_BYTES,
    SHARED = BARRIERS_AT + 2 * STAGES * 8
};
enum mistake {
    NONE,
    NO_ARRIVE, /* at the other block's barrier */
    OWN_MASK,  /* copies go to one block only */
    OWN_EMPTY, /* the other block's readers are not waited for */
    NO_SYNC,   /* of the cluster before the first copy */
    NO_END,    /* and behind the last */
    NO_INIT_FENCE,
    HALF_EXPECTED, /* of the bytes */
    NO_WAIT,       /* before the products */
    NO_BLOCK       /* a mask of more blocks than there are */
};

static __device__ uint64_t descriptor(const void *at)
{
    return (uint64_t)(simt_shared_address(at) >> 4) | (uint64_t)1 << 16 |
           (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

static __device__ void wait_for(uint64_t *barrier, unsigned parity)
{
    while (!simt_mbarrier_try_wait_parity(barrier, parity)) {}
}

struct place {
    char *a, *b;
    uint64_t *full, *empty;
};

static __device__ void begin(const place &p, mistake m)
{
    for (int i = (int)threadIdx.x; i < A_BYTES / 2; i += THREADS) ((uint16_t *)p.a)[i] = 0x3f80;
    simt_fence_proxy_async();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            simt_mbarrier_init(p.full + i, 1);
            simt_mbarrier_init(p.empty + i, m == OWN_EMPTY ? 4 : 4 * BLOCKS);
        }
        if (m != NO_INIT_FENCE) simt_fence_mbarrier_init();
    }
    __syncthreads();
    if (m != NO_SYNC) simt_cluster_sync();
}

static __device__ void bring(const place &p, const simt_tensor_map &map, int group, mistake m)
{
    const int rank = (int)simt_cluster_rank();
    for (int i = 0; i < TURNS; i++) {
        const int at = i % STAGES;
        wait_for(p.empty + at, (unsigned)(i / STAGES & 1) ^ 1);
        simt_mbarrier_expect(p.full + at, m == HALF_EXPECTED ? BOX : B_BYTES);
        simt_bulk_copy(&map, p.b + at * B_BYTES + rank * BOX, p.full + at, i * SIMT_BOX_BYTES,
                       rank * HALF, group,
                       m == OWN_MASK   ? 1u << rank
                       : m == NO_BLOCK ? 7
                                       : 3);
    }
}

static __device__ void release(uint64_t *empty, mistake m)
{
    const unsigned lane = threadIdx.x % 32, own = simt_cluster_rank();
    __syncwarp();
    if (lane < BLOCKS && !((m == NO_ARRIVE || m == OWN_EMPTY) && lane != own))
        simt_mbarrier_arrive_at(empty, lane);
}

static __device__ void multiply(const place &p, float *d, mistake m)
{
    for (int i = 0; i < TURNS; i++) {
        const int at = i % STAGES;
        if (m != NO_WAIT) wait_for(p.full + at, (unsigned)(i / STAGES & 1));
        __syncwarp();
        simt_wgmma_fence();
        for (int k = 0; k < 4; k++)
            simt_wgmma_bf16(d, N, descriptor(p.a) + (uint64_t)(2 * k),
                            descriptor(p.b + at * B_BYTES) + (uint64_t)(2 * k), i + k > 0);
        simt_wgmma_commit();
        simt_wgmma_wait(0);
        release(p.empty + at, m);
    }
}

/* y [blocks][N]: the sums of each of N rows of w, by each block. */
__global__ void both(float *y, const simt_tensor_map map, int group, mistake m)
{
    char *s = (char *)simt_dynamic_shared();
    const place p = { s, s + A_BYTES, (uint64_t *)(s + BARRIERS_AT),
                      (uint64_t *)(s + BARRIERS_AT) + STAGES };
    begin(p, m);
    if (threadIdx.x == WARPGROUP) bring(p, map, group, m);
    if (threadIdx.x < WARPGROUP) {
        float d[N / 2];
        multiply(p, d, m);
        for (int j = 0; threadIdx.x < 4 && j < N / 8; j++)
            for (int i = 0; i < 2; i++)
                y[blockIdx.x * N + (unsigned)(8 * j + i) + 2 * threadIdx.x] = d[4 * j + i];
    }
    if (m != NO_END) simt_cluster_sync();
}

/* Groups of fewer rows than a tile has: the rest are zeros. */
static void run_both(mistake m, unsigned n_clusters = 3, int n_launches = 2)
{
    enum { GROUPS = 2, ROWS = N - 3 };
    static uint16_t w[GROUPS][ROWS][K];
    for (int g = 0; g < GROUPS; g++)
        for (int row = 0; row < ROWS; row++)
            for (int k = 0; k < K; k++)
                w[g][row][k] = simt_float_to_bf16((float)((k * 7 + row * 3 + g) % 13 - 6));
    const uint16_t *at = on_device(&w[0][0][0], sizeof w / 2);
    std::vector<float> y(n_clusters * BLOCKS * N);
    float *to = on_device<float>(y.size());
    simt_tensor_map map;
    CHECK(simt_tensor_map_rows(&map, at, K * 2, ROWS, sizeof w[0], GROUPS, HALF));
    for (int i = 0; i < n_launches; i++) {
        GOOD(simt_launch_clusters(nullptr, both, dim3(n_clusters * BLOCKS), dim3(THREADS), SHARED,
                                  BLOCKS, false, to, map, i % GROUPS, m));
        to_host(y.data(), to, y.size());
        for (size_t j = 0; j < y.size(); j++) {
            double want = 0;
            for (int k = 0; j % N < ROWS && k < K; k++)
                want += (double)simt_bf16_to_float(w[i % GROUPS][j % N][k]);
            CHECK_NEAR((double)y[j], want, 0);
        }
    }
}

TEST(simt_blocks_of_a_cluster_share_a_tile) { run_both(NONE); }
TEST(simt_ends_a_cluster_in_which_nobody_releases)
{
    must_die([] { run_both(NO_ARRIVE); }, "sleep and nobody comes to wake them");
}
TEST(simt_ends_a_cluster_with_a_mask_of_too_few)
{
    must_die([] { run_both(OWN_MASK); }, "sleep and nobody comes to wake them");
}
TEST(simt_ends_a_cluster_with_a_mask_of_too_many)
{
    must_die([] { run_both(NO_BLOCK); }, "mask 7 of a cluster of 2");
}
TEST(simt_ends_copies_over_what_another_block_reads)
{
    must_die([] { run_both(OWN_EMPTY); }, "is still to come");
}
TEST(simt_ends_copies_to_blocks_that_have_not_begun)
{
    must_die([] { run_both(NO_SYNC); }, "there is no mbarrier at");
}
TEST(simt_ends_arrivals_at_blocks_that_have_ended)
{
    must_die([] { run_both(NO_END); }, "of the cluster has ended");
}
TEST(simt_ends_copies_to_barriers_that_were_not_fenced)
{
    must_die([] { run_both(NO_INIT_FENCE); }, "without a fence.mbarrier_init");
}
TEST(simt_ends_a_cluster_that_expects_too_few_bytes)
{
    must_die([] { run_both(HALF_EXPECTED); }, NULL);
}
TEST(simt_ends_products_of_what_was_not_waited_for)
{
    must_die([] { run_both(NO_WAIT); }, "is still to come");
}
TEST(simt_refuses_clusters_that_do_not_fill_the_grid)
{
    simt_tensor_map map = {};
    CHECK_STATUS(simt_launch_clusters(nullptr, both, dim3(3), dim3(THREADS), SHARED, BLOCKS, false,
                                      (float *)nullptr, map, 0, NONE),
                 cudaErrorInvalidConfiguration);
    CHECK(!simt_tensor_map_rows(&map, (char *)nullptr + 8, 128, 1, 128, 1, 1));
    CHECK(!simt_tensor_map_rows(&map, nullptr, 120, 1, 128, 1, 1));
    CHECK(!simt_tensor_map_rows(&map, nullptr, 128, 1, 128, 1, 257));
    CHECK(!simt_tensor_map_rows(&map, nullptr, 128, 1, (size_t)-128, 2, 1));
}

TEST_MAIN(CASE(simt_blocks_of_a_cluster_share_a_tile),
          CASE(simt_ends_a_cluster_in_which_nobody_releases),
          CASE(simt_ends_a_cluster_with_a_mask_of_too_few),
          CASE(simt_ends_a_cluster_with_a_mask_of_too_many),
          CASE(simt_ends_copies_over_what_another_block_reads),
          CASE(simt_ends_copies_to_blocks_that_have_not_begun),
          CASE(simt_ends_arrivals_at_blocks_that_have_ended),
          CASE(simt_ends_copies_to_barriers_that_were_not_fenced),
          CASE(simt_ends_a_cluster_that_expects_too_few_bytes),
          CASE(simt_ends_products_of_what_was_not_waited_for),
          CASE(simt_refuses_clusters_that_do_not_fill_the_grid))
