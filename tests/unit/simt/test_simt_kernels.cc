/* test_simt_kernels.cc - device code on tests/simt: threads, barriers, warps, tensor-core products,
 * cp.async, and the mistakes they show. */
#include "tests/unit/simt/simt_case.h"

enum { N = 1000 };

__global__ void add(const float *a, const float *b, float *c, int n)
{
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) c[i] = a[i] + b[i];
}

TEST(simt_adds_vectors_of_odd_sizes)
{
    float a[N], b[N], c[N];
    for (int i = 0; i < N; i++) a[i] = (float)i, b[i] = 0.5f * (float)i;
    for (int n : { 1, 31, 33, 127, 999 }) {
        float *da = on_device(a, (size_t)n), *db = on_device(b, (size_t)n),
              *dc = on_device<float>((size_t)n);
        GOOD(simt_launch(nullptr, add, dim3((unsigned)(n + 63) / 64), dim3(64), 0, da, db, dc, n));
        to_host(c, dc, (size_t)n);
        for (int i = 0; i < n; i++) CHECK(c[i] == 1.5f * (float)i);
        GOOD(cudaFree(da));
        GOOD(cudaFree(db));
        GOOD(cudaFree(dc));
    }
    CHECK_EQ_INT(simt_device_bytes(), 0);
}

__global__ void where(uint3 *out)
{
    unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    out[block * blockDim.x * blockDim.y * blockDim.z + thread] = make_uint3(
        threadIdx.x + 100 * blockIdx.x, threadIdx.y + 100 * blockIdx.y,
        threadIdx.z + 100 * blockIdx.z);
}

TEST(simt_numbers_threads_in_three_dimensions)
{
    static uint3 out[2 * 3 * 2 * 5 * 4 * 3];
    size_t n = sizeof out / sizeof out[0];
    uint3 *d = on_device<uint3>(n);
    GOOD(simt_launch(nullptr, where, dim3(2, 3, 2), dim3(5, 4, 3), 0, d));
    to_host(out, d, n);
    size_t i = 0;
    for (unsigned bz = 0; bz < 2; bz++)
        for (unsigned by = 0; by < 3; by++)
            for (unsigned bx = 0; bx < 2; bx++)
                for (unsigned z = 0; z < 3; z++)
                    for (unsigned y = 0; y < 4; y++)
                        for (unsigned x = 0; x < 5; x++, i++)
                            CHECK(out[i].x == x + 100 * bx && out[i].y == y + 100 * by &&
                                  out[i].z == z + 100 * bz);
    GOOD(cudaFree(d));
}

__global__ void sum_block(const float *in, float *out, int n)
{
    __shared__ float part[32];
    float s = 0;
    for (int i = (int)threadIdx.x; i < n; i += (int)blockDim.x) s += in[i];
    for (int d = 16; d; d /= 2) s += __shfl_xor_sync(0xffffffffu, s, d);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = s;
    __syncthreads();
    if (threadIdx.x < 32) {
        s = threadIdx.x < blockDim.x / 32 ? part[threadIdx.x] : 0;
        for (int d = 16; d; d /= 2) s += __shfl_down_sync(0xffffffffu, s, (unsigned)d);
        if (threadIdx.x == 0) *out = s;
    }
}

TEST(simt_reduces_a_block_by_shuffles_and_shared_memory)
{
    float in[N], sum = 0;
    for (int i = 0; i < N; i++) in[i] = (float)(i % 17);
    for (int i = 0; i < N; i++) sum += in[i];
    float *d = on_device(in, N), *out = on_device<float>(1), got = 0;
    for (unsigned threads : { 32u, 256u, 1024u }) {
        GOOD(simt_launch(nullptr, sum_block, dim3(1), dim3(threads), 0, d, out, N));
        to_host(&got, out, 1);
        CHECK(got == sum);
    }
    GOOD(cudaFree(d));
    GOOD(cudaFree(out));
}

template <bool BARRIER> __global__ void tree(float *out)
{
    __shared__ float s[256];
    s[threadIdx.x] = 1;
    __syncthreads();
    for (unsigned d = 128; d; d /= 2) {
        if (threadIdx.x < d) s[threadIdx.x] += s[threadIdx.x + d];
        if (BARRIER) __syncthreads();
    }
    if (threadIdx.x == 0) out[blockIdx.x] = s[0];
}

/* Blocks whose sum is right. */
template <bool BARRIER> static int n_right_trees(void)
{
    float out[6];
    float *d = on_device<float>(6);
    GOOD(simt_launch(nullptr, tree<BARRIER>, dim3(6), dim3(256), 0, d));
    to_host(out, d, 6);
    GOOD(cudaFree(d));
    int n = 0;
    for (float sum : out) n += sum == 256;
    return n;
}

TEST(simt_shows_a_missing_barrier)
{
    if (RACES_ARE_SEEN) must_race([] { n_right_trees<false>(); });
    CHECK_EQ_INT(n_right_trees<true>(), 6);
    if (!RACES_ARE_SEEN) CHECK(n_right_trees<false>() < 6);
}

__global__ void chain(int *p) { p[blockIdx.x + 1] = p[blockIdx.x] + 1; }

TEST(simt_shows_a_kernel_that_counts_on_the_order_of_blocks)
{
    int out[9], n_wrong = 0;
    int *d = on_device<int>(9);
    for (int run = 0; run < 2; run++) {
        GOOD(cudaMemset(d, 0, sizeof out));
        GOOD(simt_launch(nullptr, chain, dim3(8), dim3(1), 0, d));
        to_host(out, d, 9);
        n_wrong += out[8] != 8;
    }
    CHECK_EQ_INT(n_wrong, 1);
    GOOD(cudaFree(d));
}

__global__ void neighbours(int *out)
{
    __shared__ int s[64];
    s[threadIdx.x] = (int)threadIdx.x; /* no barrier: the neighbour may not have written */
    out[2 * threadIdx.x] = s[(threadIdx.x + 1) % 64];
    out[2 * threadIdx.x + 1] = s[(threadIdx.x + 63) % 64];
    __syncthreads();
    s[threadIdx.x] = -1;
}

static int n_wrong_neighbours(void)
{
    int out[128], n = 0;
    int *d = on_device<int>(128);
    for (int run = 0; run < 2; run++)
        GOOD(simt_launch(nullptr, neighbours, dim3(1), dim3(64), 0, d));
    to_host(out, d, 128);
    GOOD(cudaFree(d));
    for (int i = 0; i < 64; i++)
        n += (out[2 * i] != (i + 1) % 64) + (out[2 * i + 1] != (i + 63) % 64);
    return n;
}

TEST(simt_shows_neighbours_that_did_not_wait)
{
    if (RACES_ARE_SEEN) must_race([] { n_wrong_neighbours(); });
    else CHECK(n_wrong_neighbours() > 0);
}

/* A shuffle orders no memory, __syncwarp does. */
template <bool SYNC> __global__ void turn_warp(int *out)
{
    __shared__ int s[32];
    int lane = (int)threadIdx.x;
    s[lane] = __shfl_xor_sync(0xffffffffu, lane, 1);
    if (SYNC) __syncwarp();
    else __shfl_sync(0xffffffffu, lane, 0);
    out[lane] = s[31 - lane];
}

template <bool SYNC> static void run_turn_warp(void)
{
    int out[32];
    int *d = on_device<int>(32);
    for (int run = 0; run < 2; run++)
        GOOD(simt_launch(nullptr, turn_warp<SYNC>, dim3(2), dim3(32), 0, d));
    to_host(out, d, 32);
    for (int lane = 0; lane < 32; lane++) CHECK_EQ_INT(out[lane], (31 - lane) ^ 1);
    GOOD(cudaFree(d));
}

TEST(simt_orders_memory_by_syncwarp_and_not_by_shuffles)
{
    if (RACES_ARE_SEEN) must_race(run_turn_warp<false>);
    run_turn_warp<true>();
}

__global__ void warp_functions(unsigned *out)
{
    unsigned lane = threadIdx.x, all = 0xffffffffu;
    unsigned *o = out + 16 * lane;
    o[0] = __shfl_sync(all, lane, 5);
    o[1] = __shfl_up_sync(all, lane, 3);
    o[2] = __shfl_down_sync(all, lane, 3, 8);
    o[3] = __shfl_xor_sync(all, lane, 16);
    o[4] = __ballot_sync(all, lane % 3 == 0);
    o[5] = (unsigned)__any_sync(all, lane == 31) << 1 | (unsigned)__all_sync(all, lane < 31);
    o[6] = __match_any_sync(all, lane / 8);
    o[7] = __reduce_add_sync(all, lane);
    o[8] = (unsigned)__reduce_min_sync(all, (int)lane - 7);
    o[9] = __reduce_max_sync(all, lane);
    unsigned half = lane < 16 ? 0xffffu : 0xffff0000u; /* two collectives at a time in one warp */
    o[10] = lane < 16 ? __shfl_sync(half, lane, 7) : __reduce_add_sync(half, 1u);
    o[11] = (unsigned)__shfl_sync(all, (double)lane, 9);
    o[12] = __activemask() >> lane & 1;
    int same = 0;
    o[13] = __match_all_sync(all, 4.5f, &same);
    o[14] = (unsigned)same;
    __syncwarp();
    o[15] = __shfl_sync(all, lane, (int)lane + 1, 4);
}

TEST(simt_moves_values_between_lanes)
{
    static unsigned out[32 * 16];
    unsigned *d = on_device<unsigned>(32 * 16);
    GOOD(simt_launch(nullptr, warp_functions, dim3(1), dim3(32), 0, d));
    to_host(out, d, 32 * 16);
    for (unsigned lane = 0; lane < 32; lane++) {
        const unsigned *o = out + 16 * lane;
        CHECK_EQ_INT(o[0], 5);
        CHECK_EQ_INT(o[1], lane >= 3 ? lane - 3 : lane);
        CHECK_EQ_INT(o[2], lane % 8 + 3 < 8 ? lane + 3 : lane);
        CHECK_EQ_INT(o[3], lane ^ 16);
        CHECK_EQ_INT(o[4], 0x49249249u);
        CHECK_EQ_INT(o[5], 2);
        CHECK_EQ_INT(o[6], 0xffu << lane / 8 * 8);
        CHECK_EQ_INT(o[7], 496);
        CHECK_EQ_INT((int)o[8], -7);
        CHECK_EQ_INT(o[9], 31);
        CHECK_EQ_INT(o[10], lane < 16 ? 7 : 16);
        CHECK_EQ_INT(o[11], 9);
        CHECK_EQ_INT(o[12], 1);
        CHECK_EQ_INT(o[13], 0xffffffffu);
        CHECK_EQ_INT(o[14], 1);
        CHECK_EQ_INT(o[15], lane / 4 * 4 + (lane + 1) % 4);
    }
    GOOD(cudaFree(d));
}

__global__ void barriers(int *out)
{
    int t = (int)threadIdx.x;
    if (t >= 90) return; /* counts as arrived */
    out[4 * t] = __syncthreads_count(t % 2);
    out[4 * t + 1] = __syncthreads_and(t < 90) << 1 | __syncthreads_and(t < 89);
    out[4 * t + 2] = __syncthreads_or(t == 4) << 1 | __syncthreads_or(t == 95);
    if (t < 64) simt_barrier_sync(3, 64);
    __syncthreads();
    out[4 * t + 3] = t;
}

TEST(simt_counts_at_barriers_those_that_returned)
{
    int out[360];
    int *d = on_device<int>(360);
    GOOD(simt_launch(nullptr, barriers, dim3(1), dim3(96), 0, d));
    to_host(out, d, 360);
    for (int t = 0; t < 90; t++)
        CHECK(out[4 * t] == 45 && out[4 * t + 1] == 2 && out[4 * t + 2] == 2 &&
              out[4 * t + 3] == t);
    GOOD(cudaFree(d));
}

/* One warp makes, the other uses: bar.arrive and bar.sync. */
__global__ void hand_over(int *out)
{
    __shared__ int box[32];
    int lane = (int)threadIdx.x % 32;
    for (int round = 0; round < 5; round++)
        if (threadIdx.x < 32) {
            if (round) simt_barrier_sync(2, 64);
            box[lane] = 100 * round + lane;
            simt_barrier_arrive(1, 64);
        } else {
            simt_barrier_sync(1, 64);
            out[32 * round + lane] = box[31 - lane];
            if (round < 4) simt_barrier_arrive(2, 64);
        }
}

TEST(simt_hands_over_at_numbered_barriers)
{
    int out[160];
    int *d = on_device<int>(160);
    GOOD(simt_launch(nullptr, hand_over, dim3(1), dim3(64), 0, d));
    to_host(out, d, 160);
    for (int i = 0; i < 160; i++) CHECK_EQ_INT(out[i], 100 * (i / 32) + 31 - i % 32);
    GOOD(cudaFree(d));
}

__global__ void atomics(int *sum, unsigned *most, float *floats, unsigned long long *wide)
{
    atomicAdd(sum, (int)threadIdx.x);
    atomicMax(most, threadIdx.x);
    atomicAdd(floats, 0.5f);
    if (atomicAdd(wide, 1ull) == gridDim.x * blockDim.x - 1) atomicExch(wide, 77ull);
}

TEST(simt_counts_atomically_over_blocks)
{
    char *d = on_device<char>(32);
    GOOD(cudaMemset(d, 0, 32));
    GOOD(simt_launch(nullptr, atomics, dim3(3), dim3(100), 0, (int *)d, (unsigned *)(d + 4),
                     (float *)(d + 8), (unsigned long long *)(d + 16)));
    struct {
        int sum;
        unsigned most;
        float floats;
        unsigned long long wide;
    } h;
    to_host((char *)&h, d, sizeof h);
    CHECK(h.sum == 3 * 4950 && h.most == 99 && h.floats == 150 && h.wide == 77);
    GOOD(cudaFree(d));
}

__global__ void garbage(unsigned *out, int n)
{
    const unsigned *s = (const unsigned *)simt_dynamic_shared();
    for (int i = (int)threadIdx.x; i < n; i += (int)blockDim.x) out[i] = s[i];
    __syncthreads();
    ((unsigned *)simt_dynamic_shared())[threadIdx.x] = 0;
}

TEST(simt_begins_blocks_with_garbage_in_shared_memory)
{
    unsigned out[64];
    unsigned *d = on_device<unsigned>(64);
    for (int run = 0; run < 2; run++) {
        GOOD(simt_launch(nullptr, garbage, dim3(2), dim3(64), 256, d, 64));
        to_host(out, d, 64);
        for (unsigned w : out)
            CHECK(isnan(__uint_as_float(w)) && isnan(simt_f16_to_float((uint16_t)w)) &&
                  isnan(simt_bf16_to_float((uint16_t)w)) &&
                  isnan(simt_e4m3_to_float((uint8_t)(w >> 24))));
    }
    GOOD(cudaFree(d));
}

/* D = A B + C for one tile, fed by ldmatrix where elements have 16 bits. A [16][k], B [k][8] as
 * given, B^T in memory for k-major feeds. */
enum mma_kind { BF16, F16, TF32, E4M3, E5M2, S8 };

__global__ void one_mma_16(const uint16_t *a, const uint16_t *b, const float *c, float *d,
                           int is_bf16)
{
    uint16_t *sa = (uint16_t *)simt_dynamic_shared(), *sb = sa + 256;
    int lane = (int)threadIdx.x, g = lane / 4, t = lane % 4;
    for (int i = lane; i < 256; i += 32) sa[i] = a[i];
    for (int i = lane; i < 128; i += 32) sb[i] = b[i];
    __syncwarp();
    unsigned fa[4], fb[2];
    simt_ldmatrix_x4(fa, sa + lane % 16 * 16 + lane / 16 * 8);
    simt_ldmatrix_x2_trans(fb, sb + lane % 16 * 8);
    float acc[4] = { c[g * 8 + 2 * t], c[g * 8 + 2 * t + 1], c[(g + 8) * 8 + 2 * t],
                     c[(g + 8) * 8 + 2 * t + 1] };
    if (is_bf16) simt_mma_bf16_m16n8k16(acc, fa, fb, acc);
    else simt_mma_f16_m16n8k16(acc, fa, fb, acc);
    for (int r = 0; r < 4; r++) d[(g + r / 2 * 8) * 8 + 2 * t + r % 2] = acc[r];
}

static float small_number(int i) { return (float)((i * 37 + 11) % 23 - 11) * 0.25f; }

static void check_product(const float *a, const float *b, const float *c, const float *d, int k)
{
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 8; j++) {
            float sum = c[i * 8 + j];
            for (int l = 0; l < k; l++) sum += a[i * k + l] * b[l * 8 + j];
            CHECK_NEAR(d[i * 8 + j], sum, 1e-4);
        }
}

TEST(simt_multiplies_16_bit_tiles_from_ldmatrix)
{
    for (int is_bf16 = 0; is_bf16 < 2; is_bf16++) {
        float a[256], b[128], c[128], d[128];
        uint16_t ha[256], hb[128];
        for (int i = 0; i < 256; i++)
            a[i] = small_number(i),
            ha[i] = is_bf16 ? simt_float_to_bf16(a[i]) : simt_float_to_f16(a[i]);
        for (int i = 0; i < 128; i++)
            b[i] = small_number(3 * i + 1),
            hb[i] = is_bf16 ? simt_float_to_bf16(b[i]) : simt_float_to_f16(b[i]);
        for (int i = 0; i < 128; i++) c[i] = (float)i;
        uint16_t *da = on_device(ha, 256), *db = on_device(hb, 128);
        float *dc = on_device(c, 128), *dd = on_device<float>(128);
        GOOD(simt_launch(nullptr, one_mma_16, dim3(1), dim3(32), 768, da, db, dc, dd, is_bf16));
        to_host(d, dd, 128);
        check_product(a, b, c, d, 16);
        GOOD(cudaFree(da));
        GOOD(cudaFree(db));
        GOOD(cudaFree(dc));
        GOOD(cudaFree(dd));
    }
}

/* Registers filled by PTX's tables, spelled per element. */
__global__ void one_mma_tf32(const float *a, const float *b, float *d)
{
    int lane = (int)threadIdx.x, g = lane / 4, t = lane % 4;
    unsigned fa[4] = { __float_as_uint(a[g * 8 + t]), __float_as_uint(a[(g + 8) * 8 + t]),
                       __float_as_uint(a[g * 8 + t + 4]), __float_as_uint(a[(g + 8) * 8 + t + 4]) };
    unsigned fb[2] = { __float_as_uint(b[t * 8 + g]), __float_as_uint(b[(t + 4) * 8 + g]) };
    for (unsigned &r : fa) r |= 0x1fff; /* ignored */
    float zero[4] = { 0, 0, 0, 0 }, acc[4];
    simt_mma_tf32_m16n8k8(acc, fa, fb, zero);
    for (int r = 0; r < 4; r++) d[(g + r / 2 * 8) * 8 + 2 * t + r % 2] = acc[r];
}

TEST(simt_multiplies_tf32_tiles)
{
    float a[128], b[64], d[128], c[128] = { 0 };
    for (int i = 0; i < 128; i++) a[i] = small_number(i);
    for (int i = 0; i < 64; i++) b[i] = small_number(5 * i + 2);
    float *da = on_device(a, 128), *db = on_device(b, 64), *dd = on_device<float>(128);
    GOOD(simt_launch(nullptr, one_mma_tf32, dim3(1), dim3(32), 0, da, db, dd));
    to_host(d, dd, 128);
    check_product(a, b, c, d, 8);
    GOOD(cudaFree(da));
    GOOD(cudaFree(db));
    GOOD(cudaFree(dd));
}

__global__ void one_mma_8(const uint8_t *a, const uint8_t *b, float *d, int kind)
{
    int lane = (int)threadIdx.x, g = lane / 4, t = lane % 4;
    unsigned fa[4] = { 0, 0, 0, 0 }, fb[2] = { 0, 0 };
    for (int i = 0; i < 16; i++) {
        int row = g + (i / 4 % 2) * 8, k = 4 * t + i % 4 + (i / 8) * 16;
        fa[i / 4] |= (unsigned)a[row * 32 + k] << (8 * (i % 4));
    }
    for (int i = 0; i < 8; i++)
        fb[i / 4] |= (unsigned)b[(4 * t + i % 4 + i / 4 * 16) * 8 + g] << (8 * (i % 4));
    float zero[4] = { 0, 0, 0, 0 }, acc[4];
    int izero[4] = { 0, 0, 0, 0 }, iacc[4];
    if (kind == E4M3) simt_mma_e4m3_m16n8k32(acc, fa, fb, zero);
    if (kind == E5M2) simt_mma_e5m2_m16n8k32(acc, fa, fb, zero);
    if (kind == S8) simt_mma_s8_m16n8k32(iacc, fa, fb, izero);
    for (int r = 0; r < 4; r++)
        d[(g + r / 2 * 8) * 8 + 2 * t + r % 2] = kind == S8 ? (float)iacc[r] : acc[r];
}

TEST(simt_multiplies_8_bit_tiles)
{
    for (int kind : { E4M3, E5M2, S8 }) {
        static float a[512], b[256], d[128], c[128];
        uint8_t ba[512], bb[256];
        for (int i = 0; i < 512; i++)
            ba[i] = (uint8_t)((i * 73 + i * i / 7) % 120 + (i % 2 ? 128 : 0));
        for (int i = 0; i < 256; i++) bb[i] = (uint8_t)((i * 29 + i * i / 5) % 120);
        for (int i = 0; i < 512; i++)
            a[i] = kind == E4M3   ? simt_e4m3_to_float(ba[i])
                   : kind == E5M2 ? simt_e5m2_to_float(ba[i])
                                  : (float)(int8_t)ba[i];
        for (int i = 0; i < 256; i++)
            b[i] = kind == E4M3   ? simt_e4m3_to_float(bb[i])
                   : kind == E5M2 ? simt_e5m2_to_float(bb[i])
                                  : (float)(int8_t)bb[i];
        uint8_t *da = on_device(ba, 512), *db = on_device(bb, 256);
        float *dd = on_device<float>(128);
        GOOD(simt_launch(nullptr, one_mma_8, dim3(1), dim3(32), 0, da, db, dd, kind));
        to_host(d, dd, 128);
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < 8; j++) {
                double sum = c[i * 8 + j], size = 1;
                for (int l = 0; l < 32; l++)
                    sum += (double)a[i * 32 + l] * b[l * 8 + j],
                        size += fabs((double)a[i * 32 + l] * b[l * 8 + j]);
                CHECK_NEAR(d[i * 8 + j], sum, 1e-6 * size);
            }
        GOOD(cudaFree(da));
        GOOD(cudaFree(db));
        GOOD(cudaFree(dd));
    }
}

/* Three stages in flight. WAITS: whether the thread waits for what it reads. */
template <bool WAITS> __global__ void pipeline(const float *in, float *out, int n_tiles)
{
    float *s = (float *)simt_dynamic_shared();
    int t = (int)threadIdx.x;
    for (int stage = 0; stage < 2; stage++) {
        if (stage < n_tiles)
            simt_cp_async(s + stage * 128 + 4 * t, in + stage * 128 + 4 * t, 16, 16);
        simt_cp_async_commit();
    }
    float sum = 0;
    for (int tile = 0; tile < n_tiles; tile++) {
        if (WAITS) simt_cp_async_wait(1);
        __syncthreads();
        sum += s[tile % 3 * 128 + 127 - t];
        int next = tile + 2;
        if (next < n_tiles)
            simt_cp_async(s + next % 3 * 128 + 4 * t, in + next * 128 + 4 * t, 16,
                          next == n_tiles - 1 ? 8 : 16);
        simt_cp_async_commit();
    }
    simt_cp_async_wait_all();
    out[t] = sum;
}

static float pipe_in[7 * 128], pipe_out[32];

template <bool WAITS> static void run_pipeline(void)
{
    for (int i = 0; i < 7 * 128; i++) pipe_in[i] = (float)(i % 100);
    float *in = on_device(pipe_in, 7 * 128), *out = on_device<float>(32);
    GOOD(simt_launch(nullptr, pipeline<WAITS>, dim3(1), dim3(32), 3 * 512, in, out, 7));
    to_host(pipe_out, out, 32);
    GOOD(cudaFree(in));
    GOOD(cudaFree(out));
}

TEST(simt_copies_asynchronously_when_waited_for)
{
    if (RACES_ARE_SEEN) must_race(run_pipeline<false>);
    run_pipeline<true>();
    for (int t = 0; t < 32; t++) {
        float sum = 0;
        for (int tile = 0; tile < 7; tile++)
            sum += tile == 6 && (127 - t) % 4 >= 2 ? 0 : pipe_in[tile * 128 + 127 - t];
        CHECK(pipe_out[t] == sum);
    }
    if (RACES_ARE_SEEN) return;
    run_pipeline<false>();
    for (float sum : pipe_out) CHECK(isnan(sum));
}

/* Of two groups the second is still to come. */
__global__ void two_groups(const float *in, float *out)
{
    float *s = (float *)simt_dynamic_shared();
    for (int i = 0; i < 2; i++) {
        simt_cp_async(s + i, in + i, 4, 4);
        simt_cp_async_commit();
    }
    simt_cp_async_wait(1);
    out[0] = s[0], out[1] = s[1];
    simt_cp_async_wait(0);
    out[2] = s[1];
}

TEST(simt_copies_no_group_before_it_is_waited_for)
{
    float in[2] = { 1, 2 }, out[3];
    float *din = on_device(in, 2), *dout = on_device<float>(3);
    GOOD(simt_launch(nullptr, two_groups, dim3(1), dim3(1), 8, din, dout));
    to_host(out, dout, 3);
    CHECK(out[0] == 1 && isnan(out[1]) && out[2] == 2);
    GOOD(cudaFree(din));
    GOOD(cudaFree(dout));
}

TEST(simt_converts_small_numbers)
{
    CHECK(simt_float_to_f16(1.0f) == 0x3c00 && simt_float_to_f16(65504.0f) == 0x7bff);
    CHECK(simt_float_to_f16(65520.0f) == 0x7c00 && simt_float_to_f16(0x1p-24f) == 1);
    CHECK(simt_float_to_f16(-0.0f) == 0x8000 && simt_float_to_f16(2049.0f) == 0x6800 &&
          simt_float_to_f16(0x1p-25f) == 0 && simt_float_to_f16(0x1.8p-25f) == 1);
    CHECK(simt_float_to_e4m3(448.0f) == 0x7e && simt_float_to_e4m3(1e9f) == 0x7e &&
          simt_float_to_e4m3(-1.0f) == 0xb8 && simt_float_to_e4m3(0x1p-9f) == 1);
    CHECK(simt_float_to_e5m2(57344.0f) == 0x7b && simt_float_to_e5m2(1.75f) == 0x3f &&
          simt_float_to_e4m3(NAN) == 0x7f && isnan(simt_e5m2_to_float(0x7f)));
    CHECK(simt_float_to_bf16(1.00390625f) == 0x3f80 && simt_float_to_bf16(1.01171875f) == 0x3f82);
    CHECK(simt_float_to_tf32(__uint_as_float(0x3f801000u)) == 0x3f802000u);
    for (unsigned i = 0; i < 0x10000; i++) {
        float f = simt_f16_to_float((uint16_t)i);
        CHECK(isnan(f) || simt_float_to_f16(f) == i);
        CHECK(i > 0xff || isnan(simt_e4m3_to_float((uint8_t)i)) ||
              simt_float_to_e4m3(simt_e4m3_to_float((uint8_t)i)) == i);
        float e5 = simt_e5m2_to_float((uint8_t)i);
        CHECK(i > 0xff || isnan(e5) || isinf(e5) || simt_float_to_e5m2(e5) == i);
    }
}

/* Mistakes that end the process. */

__global__ void lanes_apart(void)
{
    if (threadIdx.x < 16) __shfl_sync(0xffffffffu, 1, 0);
    else __syncthreads();
}
__global__ void lane_gone(void)
{
    if (threadIdx.x == 9) return;
    __syncthreads();
    __shfl_sync(0xffffffffu, 1, 0);
}
__global__ void reads_outside_mask(void)
{
    if (threadIdx.x < 16) __shfl_sync(0xffffu, 1, 20);
}
__global__ void leaves_copies(const float *in)
{
    simt_cp_async(simt_dynamic_shared(), in, 16, 16);
    simt_cp_async_commit();
}
__global__ void past_shared(void) { ((char *)simt_dynamic_shared())[100 + threadIdx.x] = 0; }
__global__ void past_memory(float *p, int i) { p[i] = 1; }
__global__ void prefetches(const char *p, int from, unsigned n) { simt_prefetch(p + from, n); }
__global__ void calls_cuda(void) { cudaDeviceSynchronize(); }

template <class K, class... A> static void run_alone(K kernel, size_t shared, A... a)
{
    GOOD(simt_launch(nullptr, kernel, dim3(1), dim3(64), shared, a...));
    cudaDeviceSynchronize();
}

TEST(simt_ends_a_block_that_cannot_go_on)
{
    must_die([] { run_alone(lanes_apart, 0); },
             "48 wait at the block's barrier, 0 at a numbered barrier, 16 at a warp collective (in "
             "warp 0 __shfl_sync");
}
TEST(simt_ends_a_collective_without_one_of_its_lanes)
{
    must_die([] { run_alone(lane_gone, 0); },
             "names lanes that returned or do not exist (00000200)");
}
TEST(simt_ends_a_shuffle_from_outside_its_mask)
{
    must_die([] { run_alone(reads_outside_mask, 0); }, "not in the mask");
}
TEST(simt_ends_a_thread_that_leaves_copies)
{
    must_die([] { run_alone(leaves_copies, 16, on_device<float>(4)); },
             "had not waited for 1 of its cp.async");
}
TEST(simt_ends_writes_behind_shared_memory)
{
    must_die([] { run_alone(past_shared, 100); }, nullptr);
}
TEST(simt_ends_kernels_that_call_cuda)
{
    must_die([] { run_alone(calls_cuda, 0); }, "cudaDeviceSynchronize is called in a kernel");
}
TEST(simt_ends_accesses_behind_device_memory)
{
    must_die([] { run_alone(past_memory, 0, on_device<float>(1024), 1024); },
             FAULTS_ARE_TOLD ? "0 bytes behind the 4096 bytes" : nullptr);
    must_die([] { run_alone(past_memory, 0, on_device<float>(1024), -1); }, nullptr);
    must_die(
        [] { /* into the slack: seen at once or when freed */
             float *p = on_device<float>(3);
             run_alone(past_memory, 0, p, 3);
             cudaFree(p);
        },
        nullptr);
}

TEST(simt_ends_prefetches_of_what_is_not_there)
{
    must_die([] { run_alone(prefetches, 0, on_device<char>(4096), 8, 16); }, "not aligned");
    must_die([] { run_alone(prefetches, 0, on_device<char>(4096), 0, 24); }, "not aligned");
    /* The thread sanitizer would take its reads for a kernel's, so there it touches nothing. */
    if (!SIMT_TSAN)
        must_die([] { run_alone(prefetches, 0, on_device<char>(4096), 16, 4096); }, nullptr);
    if (FAULTS_ARE_TOLD)
        must_die(
            [] {
                alignas(16) static char host[16];
                run_alone(prefetches, 0, host, 0, 16);
            },
            "no memory of the device");
    run_alone(prefetches, 0, on_device<char>(4096), 16, 4080);
}

TEST_MAIN(CASE(simt_adds_vectors_of_odd_sizes), CASE(simt_numbers_threads_in_three_dimensions),
          CASE(simt_reduces_a_block_by_shuffles_and_shared_memory),
          CASE(simt_shows_a_missing_barrier),
          CASE(simt_shows_a_kernel_that_counts_on_the_order_of_blocks),
          CASE(simt_shows_neighbours_that_did_not_wait),
          CASE(simt_orders_memory_by_syncwarp_and_not_by_shuffles),
          CASE(simt_moves_values_between_lanes), CASE(simt_counts_at_barriers_those_that_returned),
          CASE(simt_hands_over_at_numbered_barriers), CASE(simt_counts_atomically_over_blocks),
          CASE(simt_begins_blocks_with_garbage_in_shared_memory),
          CASE(simt_multiplies_16_bit_tiles_from_ldmatrix), CASE(simt_multiplies_tf32_tiles),
          CASE(simt_multiplies_8_bit_tiles), CASE(simt_copies_asynchronously_when_waited_for),
          CASE(simt_copies_no_group_before_it_is_waited_for), CASE(simt_converts_small_numbers),
          CASE(simt_ends_a_block_that_cannot_go_on),
          CASE(simt_ends_a_collective_without_one_of_its_lanes),
          CASE(simt_ends_a_shuffle_from_outside_its_mask),
          CASE(simt_ends_a_thread_that_leaves_copies), CASE(simt_ends_writes_behind_shared_memory),
          CASE(simt_ends_kernels_that_call_cuda), CASE(simt_ends_accesses_behind_device_memory),
          CASE(simt_ends_prefetches_of_what_is_not_there))
