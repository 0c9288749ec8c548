/* gemm_ring.cuh - W through a ring of shared memory, for the kernels of decode steps.
 *
 * Blocks stay for several tiles, and their loads of W are ahead of the sums, across tiles and, for
 * the first ones, from before the previous kernel's end. A warp copies by cp.async what it
 * multiplies itself, whole lines of memory at a time, so that it waits for nobody else. A unit is
 * what a warp copies at a time: 64 k of 16 rows of W in 16 bits, 128 k of fewer. Thread: device. */
#ifndef BATON_KERNELS_CUDA_GEMM_GEMM_RING_CUH
#define BATON_KERNELS_CUDA_GEMM_GEMM_RING_CUH

#include <type_traits>

#include "kernels/cuda/gemm/gemm_device.cuh"
#include "kernels/cuda/gemm/gemm_skinny.cuh"

enum { RING_THREADS = SKINNY_THREADS, RING_WARPS = SKINNY_WARPS, RING_ROWS = 8 /* of x */ };

/* Units of a block's ring: 64 KiB in flight. */
template <enum gemm_weight_layout F> struct ring_usual {
    enum { DEPTH = F == GEMM_W4 ? 9 : 5 };
};

/* Per layout: loads of 16 bytes per row and unit. One slot of DEPTH_ is being multiplied. */
template <enum gemm_weight_layout F, int DEPTH_ = ring_usual<F>::DEPTH> struct ring_shape {
    enum {
        ELEMENTS = gemm_stored<F>::PER_16_BYTES,
        ROW_LOADS = F == GEMM_W4 ? 1 : 2,
        LOADS = 2 * ROW_LOADS, /* a thread has two rows */
        K = ROW_LOADS * 4 * ELEMENTS,
        PER_SPAN = SKINNY_SPAN / K,
        UNIT_BYTES = ROW_LOADS * 64, /* of a row of W */
        SPAN_BYTES = PER_SPAN * UNIT_BYTES,
        DEPTH = DEPTH_,
        BYTES = DEPTH * LOADS * 16 * RING_THREADS,
        ALL_BYTES = BYTES + (F == GEMM_F8 ? DEPTH * 4 * RING_THREADS : 0) /* with scales */
    };
};

/* What a warp reads of a tile. A lane copies 16 bytes of ROWS rows: of the first unit those at
 * copied[]. It multiplies those of rows that begin at w[] for it. F8's scale is of both. The units
 * of a span follow each other, spans are JUMP apart. */
struct ring_run {
    const unsigned char *copied[4], *w[2];
    const float *f8_scale;
    int32_t n_units;
};

/* Lanes that copy a row's bytes of a unit, and rows of one cp.async. */
template <enum gemm_weight_layout F> struct ring_lanes {
    enum { OF_ROW = ring_shape<F>::UNIT_BYTES / 16, ROWS = WARP / OF_ROW };
};

/* Sets where a lane reads the rows of a tile from number `row` on, of which `last` is the matrix's
 * last. w: the first row's first byte of the run. */
template <enum gemm_weight_layout F>
static __device__ __forceinline__ void ring_set_rows(ring_run *r, const unsigned char *w,
                                                     int32_t row, int32_t last, size_t row_bytes)
{
    typedef ring_lanes<F> lanes;
    const int32_t lane = (int32_t)threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < ring_shape<F>::LOADS; i++)
        r->copied[i] = w + lane % lanes::OF_ROW * 16 +
                       (size_t)min(row + i * lanes::ROWS + lane / lanes::OF_ROW, last) * row_bytes;
    r->w[0] = w + lane % 4 * 16 + (size_t)min(row + lane / 4, last) * row_bytes;
    r->w[1] = w + lane % 4 * 16 + (size_t)min(row + lane / 4 + 8, last) * row_bytes;
}

/* The place of a unit behind the first, in units of consecutive k. */
template <enum gemm_weight_layout F, int JUMP>
static __device__ __forceinline__ int32_t ring_place(int32_t unit)
{
    enum { PER_SPAN = ring_shape<F>::PER_SPAN };
    return unit / PER_SPAN * (JUMP * PER_SPAN) + unit % PER_SPAN;
}

/* A warp's bytes of a slot begin here; every 4 KiB are those of another cp.async. */
template <enum gemm_weight_layout F>
static __device__ __forceinline__ unsigned char *ring_slot(unsigned char *ring, int slot)
{
    return ring +
           (slot * (ring_shape<F>::LOADS * RING_THREADS) + (int)threadIdx.x / WARP * WARP) * 16;
}
enum { RING_LOAD_BYTES = (int)RING_THREADS * 16 };

/* Where a lane's 16 bytes go of each cp.async, and where it finds those of its first row and its
 * first piece. The second half of a line comes first in odd rows: eight lanes, which read two rows,
 * meet in no bank. */
template <enum gemm_weight_layout F> static __device__ __forceinline__ int ring_to()
{
    const int lane = (int)threadIdx.x % WARP;
    if (ring_shape<F>::ROW_LOADS == 1) return lane * 16;
    return lane / 8 * 128 + (lane % 8 ^ lane / 8 % 2 * 4) * 16;
}
template <enum gemm_weight_layout F> static __device__ __forceinline__ int ring_from()
{
    const int lane = (int)threadIdx.x % WARP;
    if (ring_shape<F>::ROW_LOADS == 1) return lane * 16;
    return lane / 16 * RING_LOAD_BYTES + lane / 4 % 4 * 128 + (lane % 4 ^ lane / 4 % 2 * 4) * 16;
}

template <enum gemm_weight_layout F, int DEPTH>
static __device__ __forceinline__ float *ring_scale(unsigned char *ring, int slot)
{
    return (float *)(void *)(ring + ring_shape<F, DEPTH>::BYTES) + slot * RING_THREADS +
           threadIdx.x;
}

/* Units from one of the warp to its next. */
template <enum gemm_weight_layout F, int JUMP>
static __device__ __forceinline__ int32_t ring_next(int32_t unit)
{
    enum { PER_SPAN = ring_shape<F>::PER_SPAN };
    return PER_SPAN > 1 && (unit + 1) % PER_SPAN ? 1 : (JUMP - 1) * PER_SPAN + 1;
}

/* The rows of W of a tile that the warp reads from span `span` on. Rows that a lane multiplies have
 * one block of F8's scales: they are 8 apart, from a multiple of 16 on, and both belong to gate or
 * to up. */
template <enum gemm_weight_layout F>
static __device__ __forceinline__ ring_run ring_run_of(const gemm_call &c, int32_t group,
                                                       int32_t tile, int32_t span, int32_t n_spans)
{
    const int32_t row = tile * SKINNY_W_ROWS, last = c.n_out - 1;
    ring_run r = {};
    ring_set_rows<F>(&r,
                     c.w + (size_t)group * c.w_stride + (size_t)span * ring_shape<F>::SPAN_BYTES,
                     row, last, c.row_bytes);
    r.n_units = n_spans * ring_shape<F>::PER_SPAN;
    if (F == GEMM_F8)
        r.f8_scale = f8_scales(c, group, min(row + (int32_t)threadIdx.x % WARP / 4, last)) + span;
    return r;
}

/* ---- copying ahead ---- */

/* The copies of a warp through its jobs, 0 to JOBS.end; run_of(job) is what it reads. */
struct ring_feed {
    ring_run run;
    int32_t job, unit, slot;
};

/* Starts copying the next unit, if there is one; always one group of cp.async. */
template <enum gemm_weight_layout F, int JUMP, int DEPTH, class JOBS>
static __device__ __forceinline__ void ring_copy(ring_feed *f, const JOBS &jobs,
                                                 unsigned char *ring)
{
    typedef ring_shape<F, DEPTH> shape;
    while (f->unit == f->run.n_units && f->job < jobs.end) {
        f->job++;
        f->unit = 0, f->run.n_units = 0;
        if (f->job < jobs.end) f->run = jobs.run_of(f->job);
    }
    if (f->unit < f->run.n_units) {
        const int32_t step = ring_next<F, JUMP>(f->unit++);
        unsigned char *slot = ring_slot<F>(ring, f->slot) + ring_to<F>();
#pragma unroll
        for (int i = 0; i < shape::LOADS; i++) {
            copy_async_16(slot + i * RING_LOAD_BYTES, f->run.copied[i], 16);
            f->run.copied[i] += step * (int32_t)shape::UNIT_BYTES;
        }
        if (F == GEMM_F8) {
            copy_async_4(ring_scale<F, DEPTH>(ring, f->slot), f->run.f8_scale, 4);
            f->run.f8_scale += step;
        }
    }
    copy_async_commit();
    f->slot = f->slot + 1 == shape::DEPTH ? 0 : f->slot + 1;
}

/* All but one slot, which the first ring_copy of the sums takes. */
template <enum gemm_weight_layout F, int JUMP, int DEPTH = ring_usual<F>::DEPTH, class JOBS>
static __device__ __forceinline__ ring_feed ring_fill(const JOBS &jobs, unsigned char *ring)
{
    ring_feed f = {};
    f.job = -1;
#pragma unroll 1
    for (int i = 0; i + 1 < DEPTH; i++) ring_copy<F, JUMP, DEPTH>(&f, jobs, ring);
    return f;
}

/* ---- sums ---- */

/* seen: F8, both rows' bytes so far; more than 0x7f if one was NaN. */
struct ring_sums {
    float v[4];
    unsigned seen;
};

/* Adds a unit's products with the lane's elements of x. */
template <enum gemm_weight_layout F, int DEPTH>
static __device__ __forceinline__ void ring_multiply(ring_sums *sums, unsigned char *ring, int slot,
                                                     const uint16_t *x)
{
    typedef ring_shape<F> shape;
    float of_span[4] = {};
    float *to = F == GEMM_F8 ? of_span : sums->v;
    enum { HIGH = SKINNY_W_ROWS / 2 / ring_lanes<F>::ROWS * RING_LOAD_BYTES };
    uint4 w[shape::LOADS];
#pragma unroll
    for (int i = 0; i < shape::LOADS; i++)
        w[i] = *(const uint4 *)(const void *)(ring_slot<F>(ring, slot) +
                                              (ring_from<F>() ^ i / 2 * 64) + i % 2 * HIGH);
#pragma unroll
    for (int part = 0; part < shape::ROW_LOADS; part++) {
        const unsigned low[4] = { w[2 * part].x, w[2 * part].y, w[2 * part].z, w[2 * part].w },
                       high[4] = { w[2 * part + 1].x, w[2 * part + 1].y, w[2 * part + 1].z,
                                   w[2 * part + 1].w };
#pragma unroll
        for (int e = 0; e < shape::ELEMENTS / 8; e++) {
            unsigned a[2][4];
            skinny_upconvert<F>(a[0], low + e * gemm_stored<F>::WORDS_PER_8, &sums->seen);
            skinny_upconvert<F>(a[1], high + e * gemm_stored<F>::WORDS_PER_8, &sums->seen);
            const uint4 b = *(const uint4 *)(x + part * 4 * shape::ELEMENTS + 8 * e);
            const unsigned first[4] = { a[0][0], a[1][0], a[0][1], a[1][1] },
                           second[4] = { a[0][2], a[1][2], a[0][3], a[1][3] };
            const unsigned b_first[2] = { b.x, b.y }, b_second[2] = { b.z, b.w };
            mma_of<F>(to, first, b_first);
            mma_of<F>(to, second, b_second);
        }
    }
    if (F != GEMM_F8) return;
    const float scale = *ring_scale<F, DEPTH>(ring, slot);
    for (int i = 0; i < 4; i++) sums->v[i] = __fmaf_rn(of_span[i], scale, sums->v[i]);
}

/* F8: one NaN weight makes every sum of its row NaN. `seen` says only that the warp met one; rescan
 * to find the row, since valid weights hold none. */
template <enum gemm_weight_layout F, int JUMP>
static __device__ __forceinline__ void ring_restore_nan(ring_sums *sums, const ring_run &run)
{
    if (F != GEMM_F8 || !__any_sync(0xffffffffu, (sums->seen & 0x80808080u) != 0)) return;
    unsigned nan[2] = { 0, 0 };
#pragma unroll 1
    for (int32_t load = 0; load < run.n_units * ring_shape<F>::ROW_LOADS; load++)
        for (int i = 0; i < 2; i++) {
            const int32_t at = ring_place<F, JUMP>(load / ring_shape<F>::ROW_LOADS) *
                                   ring_shape<F>::ROW_LOADS +
                               load % ring_shape<F>::ROW_LOADS;
            const uint4 w = *(const uint4 *)(run.w[i] + (size_t)at * 64);
            nan[i] |= nan_e4m3(w.x) | nan_e4m3(w.y) | nan_e4m3(w.z) | nan_e4m3(w.w);
        }
    for (int i = 0; i < 2; i++) {
        nan[i] |= __shfl_xor_sync(0xffffffffu, nan[i], 1);
        nan[i] |= __shfl_xor_sync(0xffffffffu, nan[i], 2);
        if (nan[i]) sums->v[2 * i] = sums->v[2 * i + 1] = __uint_as_float(0x7fc00000u);
    }
}

/* The sums of a job, from the ring and a row of x in shared memory, from the run's first k on. */
template <enum gemm_weight_layout F, int JUMP, int DEPTH = ring_usual<F>::DEPTH, class JOBS>
static __device__ __forceinline__ ring_sums ring_sum(ring_feed *f, int *slot, const JOBS &jobs,
                                                     int32_t n_units, unsigned char *ring,
                                                     const uint16_t *x)
{
    typedef ring_shape<F, DEPTH> shape;
    ring_sums sums = {};
#pragma unroll 1
    for (int32_t unit = 0; unit < n_units; unit++) {
        copy_async_wait<shape::DEPTH - 2>();
        __syncwarp(); /* the unit is there for all lanes, and none reads the one before it */
        ring_copy<F, JUMP, DEPTH>(f, jobs, ring);
        ring_multiply<F, DEPTH>(&sums, ring, *slot, x);
        x += ring_next<F, JUMP>(unit) * (int32_t)shape::K;
        *slot = *slot + 1 == shape::DEPTH ? 0 : *slot + 1;
    }
    return sums;
}

/* Four elements of x in the 16 bits that are multiplied. */
template <enum gemm_weight_layout F>
static __device__ __forceinline__ void store_rounded(uint16_t *to, const float4 &x)
{
    *(uint2 *)(void *)to = F == GEMM_F16 ? make_uint2(pack_f16(x.x, x.y), pack_f16(x.z, x.w))
                                         : make_uint2(pack_bf16(x.x, x.y), pack_bf16(x.z, x.w));
}

/* ---- groups ---- */

enum { RING_TILES_MAX = 128 /* of rows of x, and so their number at most */ };

/* Tiles of at most RING_ROWS rows, through all groups. */
struct ring_tiles {
    gemm_rows of[RING_TILES_MAX];
    int32_t n;
};

/* By one warp, into shared memory. `begin` is read past L1, because this may be called before
 * grid_dependency_sync(). */
static __device__ __forceinline__ void ring_find_tiles(const gemm_call &c, ring_tiles *to)
{
    const int32_t lane = (int32_t)threadIdx.x % WARP;
    int32_t n = 0;
    for (int32_t first = 0; first < c.n_groups; first += WARP * GROUPS_PER_LANE) {
        const int32_t group = first + lane * GROUPS_PER_LANE;
        const gemm_begins begins = begins_of_lane<true>(c, group);
        int32_t mine = 0;
        for (int i = 0; i < GROUPS_PER_LANE; i++)
            mine += (rows_between<true>(c, group + i, begins.of[i], begins.of[i + 1]).n +
                     RING_ROWS - 1) /
                    RING_ROWS;
        int32_t up_to = mine;
        for (int step = 1; step < WARP; step *= 2) {
            const int32_t before = __shfl_up_sync(0xffffffffu, up_to, (unsigned)step);
            if (lane >= step) up_to += before;
        }
        int32_t at = n + up_to - mine;
        for (int i = 0; i < GROUPS_PER_LANE; i++) {
            const gemm_rows r = rows_between<true>(c, group + i, begins.of[i], begins.of[i + 1]);
            for (int32_t skip = 0; skip < r.n && at < RING_TILES_MAX; skip += RING_ROWS)
                to->of[at++] = gemm_rows{ r.group, r.begin + skip,
                                          min(r.n - skip, (int32_t)RING_ROWS) };
        }
        n += __shfl_sync(0xffffffffu, up_to, WARP - 1);
    }
    if (lane == 0) to->n = min(n, (int32_t)RING_TILES_MAX);
}

/* ---- the host ---- */

static inline size_t ring_bytes(enum gemm_weight_layout layout)
{
    static_assert((int)ring_shape<GEMM_W8>::ALL_BYTES == (int)ring_shape<GEMM_BF16>::ALL_BYTES &&
                      (int)ring_shape<GEMM_F16>::ALL_BYTES == (int)ring_shape<GEMM_BF16>::ALL_BYTES,
                  "one of them stands for all");
    return layout == GEMM_F8   ? (size_t)ring_shape<GEMM_F8>::ALL_BYTES
           : layout == GEMM_W4 ? (size_t)ring_shape<GEMM_W4>::ALL_BYTES
                               : (size_t)ring_shape<GEMM_BF16>::ALL_BYTES;
}

/* run(F), where F::value is the layout: what all kernels with a ring are compiled for. */
template <class RUN>
static inline cudaError_t ring_run_layout(enum gemm_weight_layout layout, RUN run)
{
    switch (layout) {
    case GEMM_BF16: return run(std::integral_constant<enum gemm_weight_layout, GEMM_BF16>());
    case GEMM_F16: return run(std::integral_constant<enum gemm_weight_layout, GEMM_F16>());
    case GEMM_W8: return run(std::integral_constant<enum gemm_weight_layout, GEMM_W8>());
    case GEMM_W4: return run(std::integral_constant<enum gemm_weight_layout, GEMM_W4>());
    case GEMM_F8: return run(std::integral_constant<enum gemm_weight_layout, GEMM_F8>());
    default: return cudaErrorInvalidValue;
    }
}

/* Blocks for n_jobs: as many as run at a time, two per SM if their shared memory fits. */
static inline unsigned ring_grid(size_t n_jobs, size_t shared)
{
    const gemm_device &device = gemm_this_device();
    const size_t enough = (size_t)device.n_sms * (2 * shared <= device.shared_of_sm ? 2 : 1);
    return (unsigned)(n_jobs < enough ? n_jobs : enough);
}

#endif
