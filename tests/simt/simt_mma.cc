/* simt_mma.cc - tensor-core products and ldmatrix, by the layouts in simt.h.
 *
 * The lane that arrives last gathers both matrices from the fragments of all lanes, multiplies in
 * double and gives every lane its four results. Products of two elements are exact in double; a sum
 * of at most 32 of them is nearly exact. Thread: simt_block.h. */
#include <string.h>

#include <type_traits>

#include "tests/simt/include/cuda_runtime.h"
#include "tests/simt/simt_block.h"
#include "tests/simt/simt_sanitize.h"
#include "tests/simt/simt_tsan.h"

static const unsigned WHOLE_WARP = 0xffffffffu;

struct mma_call : simt_warp_call {
    unsigned a[4], b[2]; /* copies: a sanitizer sees the kernel's fragments read once */
    const void *c;
    void *d;
};

struct ldmatrix_call : simt_warp_call {
    unsigned *r;
    const void *row;
};

/* How a register holds N elements; at() returns the i-th. */
struct in_bf16 {
    enum { N = 2 };
    static float at(unsigned reg, int i) { return __uint_as_float(reg >> (16 * i) << 16); }
};
struct in_f16 {
    enum { N = 2 };
    static float at(unsigned reg, int i) { return simt_f16_to_float((uint16_t)(reg >> (16 * i))); }
};
struct in_tf32 {
    enum { N = 1 };
    static float at(unsigned reg, int) { return __uint_as_float(reg & ~0x1fffu); }
};
struct in_e4m3 {
    enum { N = 4 };
    static float at(unsigned reg, int i) { return simt_e4m3_to_float((uint8_t)(reg >> (8 * i))); }
};
struct in_e5m2 {
    enum { N = 4 };
    static float at(unsigned reg, int i) { return simt_e5m2_to_float((uint8_t)(reg >> (8 * i))); }
};
struct in_s8 {
    enum { N = 4 };
    static float at(unsigned reg, int i) { return (float)(int8_t)(reg >> (8 * i)); }
};

/* A, B and their product as plain matrices; k is 8 times the elements of a register. */
struct operands {
    double a[16][32], b[32][8], d[16][8];
};

/* These two touch no memory of a kernel, and sanitizers make them several times as slow. */
template <class In> SIMT_UNCHECKED static void gather(operands *m, simt_warp_call *const lanes[32])
{
    const int half = 4 * In::N;
    for (int lane = 0; lane < 32; lane++) {
        const mma_call *call = static_cast<const mma_call *>(lanes[lane]);
        int g = lane / 4, t = lane % 4;
        for (int i = 0; i < In::N; i++) {
            for (int r = 0; r < 4; r++)
                m->a[g + 8 * (r % 2)][half * (r / 2) + In::N * t + i] = (double)In::at(call->a[r],
                                                                                       i);
            for (int r = 0; r < 2; r++)
                m->b[half * r + In::N * t + i][g] = (double)In::at(call->b[r], i);
        }
    }
}

SIMT_UNCHECKED static void multiply(operands *m, int k)
{
    memset(m->d, 0, sizeof m->d);
    for (int row = 0; row < 16; row++)
        for (int i = 0; i < k; i++)
            for (int column = 0; column < 8; column++)
                m->d[row][column] += m->a[row][i] * m->b[i][column];
}

template <class In, class T> static void perform(simt_warp_call *const lanes[32], unsigned)
{
    operands m;
    gather<In>(&m, lanes);
    multiply(&m, 8 * In::N);
    for (int lane = 0; lane < 32; lane++) {
        mma_call *call = static_cast<mma_call *>(lanes[lane]);
        T c[4], d[4];
        memcpy(c, call->c, sizeof c);
        for (int r = 0; r < 4; r++) {
            double sum = m.d[lane / 4 + 8 * (r / 2)][2 * (lane % 4) + r % 2];
            if constexpr (std::is_integral_v<T>) d[r] = (T)((unsigned)c[r] + (unsigned)(int)sum);
            else d[r] = (T)((double)c[r] + sum);
        }
        memcpy(call->d, d, sizeof d);
    }
}

/* d may be c: a lane's results are written after its c was read. */
static void mma(const char *what, void (*how)(simt_warp_call *const[32], unsigned), void *d,
                const unsigned *a, const unsigned *b, const void *c)
{
    mma_call call;
    call.what = what, call.mask = WHOLE_WARP, call.variant = 0, call.perform = how;
    memcpy(call.a, a, sizeof call.a), memcpy(call.b, b, sizeof call.b);
    call.c = c, call.d = d;
    simt_warp_collect(&call);
}

void simt_mma_bf16_m16n8k16(float d[4], const unsigned a[4], const unsigned b[2], const float c[4])
{
    mma("mma bf16", perform<in_bf16, float>, d, a, b, c);
}
void simt_mma_f16_m16n8k16(float d[4], const unsigned a[4], const unsigned b[2], const float c[4])
{
    mma("mma f16", perform<in_f16, float>, d, a, b, c);
}
void simt_mma_tf32_m16n8k8(float d[4], const unsigned a[4], const unsigned b[2], const float c[4])
{
    mma("mma tf32", perform<in_tf32, float>, d, a, b, c);
}
void simt_mma_e4m3_m16n8k32(float d[4], const unsigned a[4], const unsigned b[2], const float c[4])
{
    mma("mma e4m3", perform<in_e4m3, float>, d, a, b, c);
}
void simt_mma_e5m2_m16n8k32(float d[4], const unsigned a[4], const unsigned b[2], const float c[4])
{
    mma("mma e5m2", perform<in_e5m2, float>, d, a, b, c);
}
void simt_mma_s8_m16n8k32(int d[4], const unsigned a[4], const unsigned b[2], const int c[4])
{
    mma("mma s8", perform<in_s8, int>, d, a, b, c);
}

/* variant: matrices, and bit 3 for .trans */
static void perform_ldmatrix(simt_warp_call *const lanes[32], unsigned)
{
    int n = lanes[0]->variant & 7, trans = lanes[0]->variant >> 3;
    uint16_t rows[4][8][8];
    for (int i = 0; i < 8 * n; i++)
        memcpy(rows[i / 8][i % 8], static_cast<const ldmatrix_call *>(lanes[i])->row, 16);
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < n; i++) {
            int g = lane / 4, t = 2 * (lane % 4);
            unsigned lo = trans ? rows[i][t][g] : rows[i][g][t],
                     hi = trans ? rows[i][t + 1][g] : rows[i][g][t + 1];
            static_cast<const ldmatrix_call *>(lanes[lane])->r[i] = lo | hi << 16;
        }
}

static void ldmatrix(unsigned *r, const void *row, int n, bool trans)
{
    if (simt_lane() < 8 * n && (uintptr_t)row % 16)
        simt_die("ldmatrix: the row at %p is not aligned to 16 bytes", row);
    if (simt_lane() < 8 * n) simt_tsan_read_16(row);
    ldmatrix_call call;
    call.what = "ldmatrix", call.mask = WHOLE_WARP, call.variant = n | trans << 3,
    call.perform = perform_ldmatrix;
    call.r = r, call.row = row;
    simt_warp_collect(&call);
}

void simt_ldmatrix_x1(unsigned r[1], const void *row) { ldmatrix(r, row, 1, false); }
void simt_ldmatrix_x2(unsigned r[2], const void *row) { ldmatrix(r, row, 2, false); }
void simt_ldmatrix_x4(unsigned r[4], const void *row) { ldmatrix(r, row, 4, false); }
void simt_ldmatrix_x1_trans(unsigned r[1], const void *row) { ldmatrix(r, row, 1, true); }
void simt_ldmatrix_x2_trans(unsigned r[2], const void *row) { ldmatrix(r, row, 2, true); }
void simt_ldmatrix_x4_trans(unsigned r[4], const void *row) { ldmatrix(r, row, 4, true); }
