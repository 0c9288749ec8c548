/* test_simt_sm90.cc - what compute capability 9.0 has, on tests/simt: barriers in memory, products
 * of a warpgroup, and the mistakes they show. */
#include <math.h>

#include "tests/unit/simt/simt_case.h"

enum { WARPGROUP = 128, K_BYTES = 128, A_BYTES = 64 * K_BYTES };

/* ---- barriers ---- */

/* The first half of the threads hands numbers to the second through two places. */
__global__ void hand_over(int *out, int n, unsigned full_count)
{
    char *s = (char *)simt_dynamic_shared();
    uint64_t *full = (uint64_t *)s, *empty = full + 2;
    int *places = (int *)(s + 64), half = (int)blockDim.x / 2, t = (int)threadIdx.x % half;
    if (threadIdx.x == 0)
        for (int i = 0; i < 2; i++)
            simt_mbarrier_init(full + i, full_count), simt_mbarrier_init(empty + i, (unsigned)half);
    __syncthreads();
    for (int i = 0; i < n; i++) {
        const unsigned parity = (unsigned)i / 2 & 1;
        int *place = places + i % 2 * half;
        if ((int)threadIdx.x < half) {
            while (!simt_mbarrier_try_wait_parity(empty + i % 2, parity ^ 1)) {}
            place[t] = 1000 * i + t;
            simt_mbarrier_arrive(full + i % 2);
        } else {
            while (!simt_mbarrier_try_wait_parity(full + i % 2, parity)) {}
            out[i * half + t] = place[half - 1 - t];
            simt_mbarrier_arrive(empty + i % 2);
        }
    }
}

static void run_hand_over(int n, unsigned full_count, int *to)
{
    int *out = on_device<int>((size_t)n * 64);
    GOOD(simt_launch(nullptr, hand_over, dim3(1), dim3(128), 64 + 2 * 64 * 4, out, n, full_count));
    to_host(to, out, (size_t)n * 64);
    GOOD(cudaFree(out));
}

TEST(simt_hands_over_at_barriers_in_memory)
{
    static int out[7 * 64];
    run_hand_over(7, 64, out);
    for (int i = 0; i < 7; i++)
        for (int t = 0; t < 64; t++) CHECK_EQ_INT(out[i * 64 + t], 1000 * i + 63 - t);
}
TEST(simt_ends_a_wait_for_too_many)
{
    must_die(
        [] {
            static int out[64];
            run_hand_over(1, 65, out);
        },
        "nobody comes to wake them");
}

__global__ void overwritten_barrier(void)
{
    uint64_t *b = (uint64_t *)simt_dynamic_shared();
    simt_mbarrier_init(b, 2);
    *b = 0;
    simt_mbarrier_arrive(b);
}
TEST(simt_ends_an_arrival_where_no_barrier_is)
{
    must_die(
        [] {
            GOOD(simt_launch(nullptr, overwritten_barrier, dim3(1), dim3(1), 16));
            cudaDeviceSynchronize();
        },
        "there is no mbarrier");
}

/* ---- products ---- */

enum kind { BF16, F16, E4M3 };
enum mistake {
    NONE,
    NO_PROXY_FENCE,
    NO_COPY_WAIT,
    NO_FENCE,
    NO_WAIT,
    TOUCHED,
    OTHER_STRIDE,
    OTHER_SWIZZLE,
    LATE_K,
    WARP_MISSING,
    LEFT,
    OVERWRITTEN
};

static __device__ uint64_t descriptor(const void *at, unsigned stride, unsigned swizzle)
{
    return (uint64_t)(simt_shared_address(at) >> 4) | (uint64_t)1 << 16 |
           (uint64_t)(stride >> 4) << 32 | (uint64_t)swizzle << 62;
}

/* Rows of 128 bytes into the swizzled places, by cp.async. */
static __device__ void bring(char *to, const char *from, int n_rows)
{
    for (int i = (int)threadIdx.x; i < n_rows * 8; i += (int)blockDim.x)
        simt_cp_async(to + i / 8 * K_BYTES + ((i % 8) ^ (i / 8 % 8)) * 16, from + i * 16, 16, 16);
}

/* y [64][n] = 2 A B: a stage twice over, as two groups; then + y of the first. */
template <int N, kind K> __global__ void product(const char *a, const char *b, float *y, mistake m)
{
    char *s = (char *)simt_dynamic_shared();
    bring(s, a, 64);
    bring(s + A_BYTES, b, N);
    simt_cp_async_commit();
    if (m != NO_COPY_WAIT) simt_cp_async_wait(0);
    if (m != NO_PROXY_FENCE) simt_fence_proxy_async();
    __syncthreads();
    float d[N / 2];
    const unsigned swizzle = m == OTHER_SWIZZLE ? 2 : 1, stride = m == OTHER_STRIDE ? 2048 : 1024;
    const uint64_t of_a = descriptor(s, 1024, swizzle),
                   of_b = descriptor(s + A_BYTES, stride, swizzle);
    if (m != NO_FENCE) simt_wgmma_fence();
    for (int twice = 0; twice < 2; twice++) {
        for (int k = 0; k < 4; k++) {
            if (m == WARP_MISSING && threadIdx.x / 32 == 2 && twice && k == 3) continue;
            const uint64_t on = (uint64_t)(2 * k + (m == LATE_K ? 1 : 0));
            (K == E4M3  ? simt_wgmma_e4m3
             : K == F16 ? simt_wgmma_f16
                        : simt_wgmma_bf16)(d, N, of_a + on, of_b + on, twice || k);
        }
        if (m == TOUCHED && threadIdx.x == 77) d[3] = 0;
        simt_wgmma_commit();
        simt_wgmma_wait(1);
    }
    if (m == OVERWRITTEN) bring(s, a, 64);
    if (m != NO_WAIT && m != LEFT) simt_wgmma_wait(0);
    const int lane = (int)threadIdx.x % 32, row = (int)threadIdx.x / 32 * 16 + lane / 4;
    for (int i = 0; i < N / 2 && m != LEFT; i++)
        y[(row + i / 2 % 2 * 8) * N + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
    if (m != LEFT) simt_wgmma_wait(0);
    simt_cp_async_wait_all();
}

static unsigned char a_bytes[A_BYTES], b_bytes[256 * K_BYTES];
static float y_got[64 * 256];

template <int N, kind K> static void run_product(mistake m)
{
    unsigned state = 7;
    for (size_t i = 0; i < sizeof a_bytes + sizeof b_bytes; i++) {
        state = state * 1664525 + 1013904223;
        unsigned char v = (unsigned char)(state >> 24);
        if (K == E4M3 && (v & 127) == 127) v ^= 1;
        if (K != E4M3 && i % 2) v = (unsigned char)((v & 0x80) | 0x3f); /* about 1 */
        (i < sizeof a_bytes ? a_bytes[i] : b_bytes[i - sizeof a_bytes]) = v;
    }
    char *a = on_device((const char *)a_bytes, sizeof a_bytes),
         *b = on_device((const char *)b_bytes, (size_t)N * K_BYTES);
    float *y = on_device<float>((size_t)64 * N);
    GOOD(simt_launch(nullptr, product<N, K>, dim3(1), dim3(WARPGROUP),
                     (size_t)(A_BYTES + N * K_BYTES), a, b, y, m));
    to_host(y_got, y, (size_t)64 * N);
    GOOD(cudaFree(a));
    GOOD(cudaFree(b));
    GOOD(cudaFree(y));
}

/* One warpgroup brings, by copies that arrive at a barrier, and another multiplies: y = A B. */
__global__ void product_of_arrivals(const char *a, const char *b, float *y, bool fences)
{
    char *s = (char *)simt_dynamic_shared();
    uint64_t *full = (uint64_t *)(s + A_BYTES + 128 * K_BYTES);
    if (threadIdx.x == 0) simt_mbarrier_init(full, WARPGROUP);
    __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        for (int i = (int)threadIdx.x; i < (64 + 128) * 8; i += WARPGROUP)
            simt_cp_async(s + i / 8 * K_BYTES + ((i % 8) ^ (i / 8 % 8)) * 16,
                          i < 64 * 8 ? a + i * 16 : b + (i - 64 * 8) * 16, 16, 16);
        simt_cp_async_mbarrier_arrive_noinc(full);
        return;
    }
    if (!fences) simt_fence_proxy_async(); /* too early */
    while (!simt_mbarrier_try_wait_parity(full, 0)) {}
    if (fences) simt_fence_proxy_async();
    float d[64];
    simt_wgmma_fence();
    for (int k = 0; k < 4; k++)
        simt_wgmma_bf16(d, 128, descriptor(s, 1024, 1) + (uint64_t)(2 * k),
                        descriptor(s + A_BYTES, 1024, 1) + (uint64_t)(2 * k), k);
    simt_wgmma_commit();
    simt_wgmma_wait(0);
    const int lane = (int)threadIdx.x % 32, row = (int)threadIdx.x / 32 % 4 * 16 + lane / 4;
    for (int i = 0; i < 64; i++)
        y[(row + i / 2 % 2 * 8) * 128 + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
}

static void run_arrivals(bool fences)
{
    run_product<128, BF16>(NONE); /* fills the operands */
    char *a = on_device((const char *)a_bytes, sizeof a_bytes),
         *b = on_device((const char *)b_bytes, (size_t)128 * K_BYTES);
    float *y = on_device<float>((size_t)64 * 128);
    GOOD(simt_launch(nullptr, product_of_arrivals, dim3(1), dim3(2 * WARPGROUP),
                     (size_t)(A_BYTES + 128 * K_BYTES + 8), a, b, y, fences));
    static float got[64 * 128];
    to_host(got, y, (size_t)64 * 128);
    for (int i = 0; i < 64 * 128; i++) CHECK_NEAR((double)(2 * got[i]), (double)y_got[i], 1e-3);
    GOOD(cudaFree(a));
    GOOD(cudaFree(b));
    GOOD(cudaFree(y));
}

template <kind K> static double element(const unsigned char *row, int k)
{
    if (K == E4M3) return (double)simt_e4m3_to_float(row[k]);
    const uint16_t bits = (uint16_t)(row[2 * k] | row[2 * k + 1] << 8);
    return (double)(K == F16 ? simt_f16_to_float(bits) : simt_bf16_to_float(bits));
}

template <int N, kind K> static void check_product(void)
{
    run_product<N, K>(NONE);
    for (int row = 0; row < 64; row++)
        for (int column = 0; column < N; column++) {
            double sum = 0, size = 0;
            for (int k = 0; k < (K == E4M3 ? 128 : 64); k++) {
                const double term = element<K>(a_bytes + row * K_BYTES, k) *
                                    element<K>(b_bytes + column * K_BYTES, k);
                sum += 2 * term, size += fabs(term);
            }
            CHECK_NEAR((double)y_got[row * N + column], sum, 1e-6 * size);
        }
}

TEST(simt_multiplies_by_a_warpgroup)
{
    check_product<256, BF16>();
    check_product<128, BF16>();
    check_product<8, BF16>();
    check_product<256, F16>();
    check_product<128, F16>();
    check_product<128, E4M3>();
}

/* What was not waited for is NaN; so is what a cp.async took away too early. */
TEST(simt_copies_arrive_at_a_barrier_by_themselves) { run_arrivals(true); }
TEST(simt_ends_products_of_arrivals_before_a_fence)
{
    must_die([] { run_arrivals(false); }, "no fence.proxy.async of the reader after it");
}
TEST(simt_multiplies_no_earlier_than_waited_for)
{
    run_product<128, BF16>(NO_WAIT);
    for (float v : { y_got[0], y_got[5], y_got[64 * 128 - 1] }) CHECK(isnan(v));
}
TEST(simt_ends_products_of_what_is_being_overwritten)
{
    must_die([] { run_product<128, BF16>(OVERWRITTEN); }, "has not waited");
}
TEST(simt_ends_products_of_unfenced_copies)
{
    must_die([] { run_product<128, BF16>(NO_PROXY_FENCE); }, "with no fence.proxy.async after it");
}
TEST(simt_ends_products_of_copies_in_flight)
{
    must_die([] { run_product<128, BF16>(NO_COPY_WAIT); }, "has not waited");
}
TEST(simt_ends_products_without_a_fence)
{
    must_die([] { run_product<128, BF16>(NO_FENCE); }, "without a wgmma.fence");
}
TEST(simt_ends_products_whose_sums_were_touched)
{
    must_die([] { run_product<128, BF16>(TOUCHED); }, "accumulator 3 was touched");
}
TEST(simt_ends_products_of_a_swizzle_that_is_not_built)
{
    must_die([] { run_product<128, BF16>(OTHER_SWIZZLE); }, "swizzle 2");
}
TEST(simt_ends_products_beyond_shared_memory)
{
    must_die([] { run_product<128, BF16>(OTHER_STRIDE); }, "bytes at shared address");
}
TEST(simt_ends_products_beyond_a_row)
{
    must_die([] { run_product<128, BF16>(LATE_K); }, "goes on behind its 128 bytes");
}
TEST(simt_ends_products_that_a_warp_leaves_out)
{
    must_die([] { run_product<128, BF16>(WARP_MISSING); },
             "did 7 wgmma and another of its warpgroup 8");
}
TEST(simt_ends_a_thread_that_leaves_products)
{
    must_die([] { run_product<128, BF16>(LEFT); }, "had not waited for 4 of its wgmma");
}

/* ---- setmaxnreg ---- */

/* A producer and two consumers, of 168 registers a thread when they are launched. */
__global__ void share_registers(unsigned producer, unsigned consumer)
{
    simt_set_registers(threadIdx.x < WARPGROUP ? producer : consumer);
}
static void run_registers(unsigned producer, unsigned consumer)
{
    GOOD(
        simt_launch(nullptr, share_registers, dim3(1), dim3(3 * WARPGROUP), 0, producer, consumer));
    GOOD(cudaDeviceSynchronize());
}

TEST(simt_takes_registers_that_others_gave_up) { run_registers(40, 232); }
TEST(simt_ends_a_wait_for_registers_that_there_are_not)
{
    must_die([] { run_registers(48, 232); }, "they would wait forever");
}

/* ---- products with A in registers and rows of B by k ---- */

enum { ROWS_K = 32 };

/* y [64][N] = A [64][ROWS_K] B [ROWS_K][N], both in bf16. `next`: bytes from 64 columns of B to the
 * next, `late` bytes are added to its address. */
template <int N>
__global__ void rows_product(const uint16_t *a, const uint16_t *b, float *y, unsigned next,
                             unsigned late)
{
    uint16_t *s = (uint16_t *)simt_dynamic_shared();
    for (int i = (int)threadIdx.x; i < ROWS_K * N; i += WARPGROUP) {
        const int k = i / N, n = i % N;
        s[n / 64 * ROWS_K * 64 + k * 64 + ((n % 64 / 8) ^ (k % 8)) * 8 + n % 8] = b[i];
    }
    simt_fence_proxy_async();
    __syncthreads();
    const int lane = (int)threadIdx.x % 32, row = (int)threadIdx.x / 32 * 16 + lane / 4;
    float d[N / 2];
    simt_wgmma_fence();
    for (int step = 0; step < ROWS_K / 16; step++) {
        unsigned of_a[4];
        for (int i = 0; i < 4; i++) {
            const uint16_t *at = a + (row + i % 2 * 8) * ROWS_K + step * 16 + i / 2 * 8 +
                                 lane % 4 * 2;
            of_a[i] = at[0] | (unsigned)at[1] << 16;
        }
        const uint64_t of_b = (uint64_t)((simt_shared_address(s) + late) >> 4) +
                              (uint64_t)(step * 128) + ((uint64_t)(next >> 4) << 16) +
                              ((uint64_t)(1024 >> 4) << 32) + ((uint64_t)1 << 62);
        simt_wgmma_rows_bf16(d, N, of_a, of_b, step > 0);
        for (unsigned &x : of_a) x = 0; /* the product has taken them */
    }
    simt_wgmma_commit();
    simt_wgmma_wait(0);
    for (int i = 0; i < N / 2; i++)
        y[(row + i / 2 % 2 * 8) * N + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
}

template <int N> static void run_rows_product(unsigned next, unsigned late)
{
    static uint16_t a[64 * ROWS_K], b[ROWS_K * N];
    for (int i = 0; i < 64 * ROWS_K; i++) a[i] = simt_float_to_bf16((float)(i * 37 % 101 - 50));
    for (int i = 0; i < ROWS_K * N; i++) b[i] = simt_float_to_bf16((float)(i * 53 % 127 - 63));
    uint16_t *of_a = on_device((const uint16_t *)a, (size_t)(64 * ROWS_K)),
             *of_b = on_device((const uint16_t *)b, (size_t)(ROWS_K * N));
    float *y = on_device<float>((size_t)64 * N);
    GOOD(simt_launch(nullptr, rows_product<N>, dim3(1), dim3(WARPGROUP),
                     (size_t)(ROWS_K * N * 2 + 1024), of_a, of_b, y, next, late));
    to_host(y_got, y, (size_t)64 * N);
    for (int row = 0; row < 64; row++)
        for (int n = 0; n < N; n++) {
            int sum = 0;
            for (int k = 0; k < ROWS_K; k++)
                sum += ((row * ROWS_K + k) * 37 % 101 - 50) * ((k * N + n) * 53 % 127 - 63);
            CHECK_EQ_INT((int)y_got[row * N + n], sum);
        }
    GOOD(cudaFree(of_a));
    GOOD(cudaFree(of_b));
    GOOD(cudaFree(y));
}

TEST(simt_multiplies_registers_by_rows)
{
    run_rows_product<128>(ROWS_K * 128, 0);
    run_rows_product<64>(16, 0);
}
TEST(simt_ends_products_by_rows_that_overlap)
{
    must_die([] { run_rows_product<128>(16, 0); }, "16 bytes from 64 columns of B to the next");
}
TEST(simt_ends_products_by_rows_that_begin_late)
{
    must_die([] { run_rows_product<64>(16, 128); }, "atoms of 8");
}

TEST_MAIN(CASE(simt_hands_over_at_barriers_in_memory), CASE(simt_ends_a_wait_for_too_many),
          CASE(simt_ends_an_arrival_where_no_barrier_is), CASE(simt_multiplies_by_a_warpgroup),
          CASE(simt_takes_registers_that_others_gave_up),
          CASE(simt_ends_a_wait_for_registers_that_there_are_not),
          CASE(simt_copies_arrive_at_a_barrier_by_themselves),
          CASE(simt_ends_products_of_arrivals_before_a_fence),
          CASE(simt_multiplies_no_earlier_than_waited_for),
          CASE(simt_ends_products_of_what_is_being_overwritten),
          CASE(simt_ends_products_of_unfenced_copies), CASE(simt_ends_products_of_copies_in_flight),
          CASE(simt_ends_products_without_a_fence),
          CASE(simt_ends_products_whose_sums_were_touched),
          CASE(simt_ends_products_of_a_swizzle_that_is_not_built),
          CASE(simt_ends_products_beyond_shared_memory), CASE(simt_ends_products_beyond_a_row),
          CASE(simt_ends_products_that_a_warp_leaves_out),
          CASE(simt_ends_a_thread_that_leaves_products), CASE(simt_multiplies_registers_by_rows),
          CASE(simt_ends_products_by_rows_that_overlap),
          CASE(simt_ends_products_by_rows_that_begin_late))
