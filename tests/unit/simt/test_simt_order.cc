/* test_simt_order.cc - orders that only a GPU of compute capability 9.0 needs, on tests/simt: stores
 * that wgmma reads, and phases of barriers in shared memory. */
#include "tests/unit/simt/simt_case.h"

enum { WARPGROUP = 128, N = 8, A_BYTES = 64 * 128, B_BYTES = N * 128 };
enum mistake { NONE, NO_FENCE, NO_SECOND_FENCE, NO_FLIP };

static __device__ uint64_t descriptor(const void *at)
{
    return (uint64_t)(simt_shared_address(at) >> 4) | (uint64_t)1 << 16 |
           (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

/* y [64][N] = A B, two times, with operands of bf16 ones and then twos, by ordinary stores. */
__global__ void stored(float *y, mistake m)
{
    char *s = (char *)simt_dynamic_shared();
    uint16_t *operands = (uint16_t *)s;
    float d[N / 2];
    for (int turn = 0; turn < 2; turn++) {
        for (int i = (int)threadIdx.x; i < (A_BYTES + B_BYTES) / 2; i += WARPGROUP)
            operands[i] = turn ? 0x4000 : 0x3f80;
        if (m != NO_FENCE && !(turn && m == NO_SECOND_FENCE)) simt_fence_proxy_async();
        __syncthreads();
        simt_wgmma_fence();
        simt_wgmma_bf16(d, N, descriptor(s), descriptor(s + A_BYTES), 0);
        simt_wgmma_commit();
        simt_wgmma_wait(0);
        __syncthreads();
    }
    if (threadIdx.x == 0) y[0] = d[0];
}

static void run_stored(mistake m)
{
    float y, *at = on_device<float>(1);
    GOOD(simt_launch(nullptr, stored, dim3(1), dim3(WARPGROUP), A_BYTES + B_BYTES, at, m));
    to_host(&y, at, 1);
    CHECK_NEAR((double)y, 16 * 4.0, 0);
}

TEST(simt_multiplies_what_was_stored_and_fenced) { run_stored(NONE); }
TEST(simt_ends_products_of_unfenced_stores)
{
    must_die([] { run_stored(NO_FENCE); }, "which threads stored with no fence.proxy.async");
}
TEST(simt_ends_products_of_stores_after_the_fence)
{
    must_die([] { run_stored(NO_SECOND_FENCE); }, "which threads stored with no fence.proxy.async");
}

/* Thread 0 hands 4 numbers to thread 32, one by one. */
__global__ void hand_over(int *out, mistake m)
{
    char *s = (char *)simt_dynamic_shared();
    uint64_t *full = (uint64_t *)s, *empty = full + 1;
    volatile int *place = (int *)(s + 16);
    if (threadIdx.x == 0) simt_mbarrier_init(full, 1), simt_mbarrier_init(empty, 1);
    __syncthreads();
    if (threadIdx.x % 32) return;
    for (unsigned i = 0; i < 4; i++) {
        if (threadIdx.x == 0) {
            while (!simt_mbarrier_try_wait_parity(empty, (i & 1) ^ 1)) {}
            *place = 10 + (int)i;
            simt_mbarrier_arrive(full);
        } else {
            while (!simt_mbarrier_try_wait_parity(full, m == NO_FLIP ? 0 : i & 1)) {}
            out[i] = *place;
            simt_mbarrier_arrive(empty);
        }
    }
}

static void run_hand_over(mistake m)
{
    int got[4], *out = on_device<int>(4);
    GOOD(simt_launch(nullptr, hand_over, dim3(1), dim3(64), 32, out, m));
    to_host(got, out, 4);
    for (int i = 0; i < 4; i++) CHECK_EQ_INT(got[i], 10 + i);
}

TEST(simt_hands_over_phase_by_phase) { run_hand_over(NONE); }
/* The phase before lets it pass again: it takes a number twice. */
TEST(simt_shows_that_a_parity_was_not_flipped)
{
    must_die([] { run_hand_over(NO_FLIP); }, NULL);
}

TEST_MAIN(CASE(simt_multiplies_what_was_stored_and_fenced),
          CASE(simt_ends_products_of_unfenced_stores),
          CASE(simt_ends_products_of_stores_after_the_fence), CASE(simt_hands_over_phase_by_phase),
          CASE(simt_shows_that_a_parity_was_not_flipped))
