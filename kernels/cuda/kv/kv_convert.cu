/* kv_convert.cu - converts rows of KV from one type to another, ROWS_AT_ONCE groups per launch.
 *
 * A warp converts a row, CODES elements per lane. A row that gets a scale is read twice, the second
 * time from a cache: first for its largest magnitude, compared as integers. Loads and stores are
 * vectorised if a row begins at a multiple of CODES elements, otherwise byte by byte. The list is
 * passed in the launch's arguments, so nothing must be kept until it has run. Bound by memory.
 * Thread: device. */
#include "kernels/cuda/kv/kv_codec.cuh"
#include "kernels/cuda/kv/kv_convert.h"
#include "kernels/cuda/launch.cuh"

/* groups per launch; blocks per group: a larger group loops */
static const uint32_t ROWS_AT_ONCE = 80, BLOCKS_AT_ONCE = 512;
enum { ROW_THREADS = 256, ROW_WARPS = ROW_THREADS / WARP, CODES = 4, SCALE_BYTES = 4 };

struct converted_call {
    unsigned from, to, width;
    struct copy_stream_kv_rows rows[ROWS_AT_ONCE];
};
static_assert(sizeof(struct converted_call) <= 4096, "what a launch's arguments may take");

/* One row: its source, its destination, and their scales. */
struct converted_row {
    const unsigned char *from, *from_scale;
    unsigned char *to, *to_scale;
};

/* ---- codes in memory ---- */

static __device__ __forceinline__ bool is_whole(const void *p, int bytes, int n)
{
    return n == CODES && (uintptr_t)p % (CODES * bytes) == 0;
}

/* Loads n elements of `bytes` bytes (at most CODES; the others are 0). */
static __device__ __forceinline__ void load_codes(unsigned code[CODES], const unsigned char *p,
                                                  int bytes, int n)
{
    if (!is_whole(p, bytes, n)) {
        UNROLL for (int i = 0; i < CODES; i++)
        {
            code[i] = 0;
            for (int b = 0; i < n && b < bytes; b++) code[i] |= (unsigned)p[i * bytes + b] << 8 * b;
        }
    } else if (bytes == 4) {
        const uint4 v = *(const uint4 *)p;
        code[0] = v.x, code[1] = v.y, code[2] = v.z, code[3] = v.w;
    } else if (bytes == 2) {
        const uint2 v = *(const uint2 *)p;
        code[0] = v.x & 0xffff, code[1] = v.x >> 16, code[2] = v.y & 0xffff, code[3] = v.y >> 16;
    } else {
        const unsigned v = *(const unsigned *)p;
        UNROLL for (int i = 0; i < CODES; i++) code[i] = v >> 8 * i & 0xff;
    }
}

static __device__ __forceinline__ void store_codes(unsigned char *p, const unsigned code[CODES],
                                                   int bytes, int n)
{
    if (!is_whole(p, bytes, n)) {
        UNROLL for (int i = 0; i < CODES; i++) for (int b = 0; i < n && b < bytes; b++)
            p[i * bytes + b] = (unsigned char)(code[i] >> 8 * b);
    } else if (bytes == 4) {
        *(uint4 *)p = make_uint4(code[0], code[1], code[2], code[3]);
    } else if (bytes == 2) {
        *(uint2 *)p = make_uint2(code[0] | code[1] << 16, code[2] | code[3] << 16);
    } else {
        *(unsigned *)p = code[0] | code[1] << 8 | code[2] << 16 | code[3] << 24;
    }
}

static __device__ __forceinline__ int n_codes(unsigned width, unsigned at)
{
    return width - at < CODES ? (int)(width - at) : (int)CODES;
}

/* ---- rows ---- */

static __device__ __forceinline__ void copy_row(const converted_call &c, const converted_row &r)
{
    const unsigned lane = threadIdx.x % WARP;
    const int bytes = kv_code_bytes(c.from);
    for (unsigned i = lane * CODES; i < c.width; i += WARP * CODES) {
        unsigned code[CODES];
        load_codes(code, r.from + i * bytes, bytes, n_codes(c.width, i));
        store_codes(r.to + i * bytes, code, bytes, n_codes(c.width, i));
    }
    if (kv_is_scaled(c.to) && lane < SCALE_BYTES) r.to_scale[lane] = r.from_scale[lane];
}

static __device__ __forceinline__ float load_scale(const converted_call &c, const converted_row &r)
{
    unsigned bits = 0;
    for (int b = 0; kv_is_scaled(c.from) && b < SCALE_BYTES; b++)
        bits |= (unsigned)r.from_scale[b] << 8 * b;
    return __uint_as_float(bits);
}

/* The row's largest magnitude, as bits, in every lane. */
static __device__ __forceinline__ unsigned largest_of(const converted_call &c,
                                                      const converted_row &r, float scale)
{
    const int bytes = kv_code_bytes(c.from);
    unsigned top = 0;
    for (unsigned i = threadIdx.x % WARP * CODES; i < c.width; i += WARP * CODES) {
        unsigned code[CODES];
        const int n = n_codes(c.width, i);
        load_codes(code, r.from + i * bytes, bytes, n);
        UNROLL for (int k = 0; k < CODES; k++)
        {
            const unsigned magnitude =
                k < n ? __float_as_uint(kv_from_code(c.from, code[k], scale)) & 0x7fffffff : 0;
            top = magnitude > top ? magnitude : top;
        }
    }
    return __reduce_max_sync(0xffffffffu, top);
}

static __device__ __forceinline__ void convert_row(const converted_call &c, const converted_row &r)
{
    const unsigned lane = threadIdx.x % WARP;
    const int from_bytes = kv_code_bytes(c.from), to_bytes = kv_code_bytes(c.to);
    const float from_scale = load_scale(c, r),
                to_scale = kv_is_scaled(c.to) ? kv_scale_of(c.to, largest_of(c, r, from_scale))
                                              : 0.0f;
    if (kv_is_scaled(c.to) && lane < SCALE_BYTES)
        r.to_scale[lane] = (unsigned char)(__float_as_uint(to_scale) >> 8 * lane);
    for (unsigned i = lane * CODES; i < c.width; i += WARP * CODES) {
        unsigned code[CODES];
        const int n = n_codes(c.width, i);
        load_codes(code, r.from + i * from_bytes, from_bytes, n);
        UNROLL for (int k = 0; k < CODES; k++)
            code[k] = kv_to_code(c.to, kv_from_code(c.from, code[k], from_scale), to_scale);
        store_codes(r.to + i * to_bytes, code, to_bytes, n);
    }
}

/* Block (x, y): the x-th ROW_WARPS rows of group y, and every grid width after them. */
static __global__ void __launch_bounds__(ROW_THREADS) convert_kernel(const converted_call c)
{
    grid_dependency_sync();
    const copy_stream_kv_rows p = c.rows[blockIdx.y];
    const size_t from_bytes = (size_t)c.width * kv_code_bytes(c.from),
                 to_bytes = (size_t)c.width * kv_code_bytes(c.to);
    for (unsigned i = blockIdx.x * ROW_WARPS + threadIdx.x / WARP; i < p.n * p.n_groups;
         i += gridDim.x * ROW_WARPS) {
        const size_t from = (size_t)(i / p.n) * p.from_stride + i % p.n,
                     to = (size_t)(i / p.n) * p.to_stride + i % p.n;
        const converted_row r = { (const unsigned char *)p.from + from * from_bytes,
                                  (const unsigned char *)p.from_scales + from * SCALE_BYTES,
                                  (unsigned char *)p.to + to * to_bytes,
                                  (unsigned char *)p.to_scales + to * SCALE_BYTES };
        if (c.from == c.to) copy_row(c, r);
        else convert_row(c, r);
    }
}

extern "C" cudaError_t kv_convert_run(cudaStream_t stream,
                                      const struct copy_stream_conversion *conversion)
{
    cudaError_t e = cudaSuccess;
    for (uint32_t done = 0, part; done < conversion->n && e == cudaSuccess; done += part) {
        converted_call c;
        uint32_t most = 0;
        c.from = conversion->from;
        c.to = conversion->to;
        c.width = conversion->width;
        part = conversion->n - done < ROWS_AT_ONCE ? conversion->n - done : ROWS_AT_ONCE;
        for (uint32_t i = 0; i < part; i++) {
            c.rows[i] = conversion->rows[done + i];
            const uint32_t n = c.rows[i].n * c.rows[i].n_groups;
            if (n > most) most = n;
        }
        const uint32_t blocks = blocks_for(most, ROW_WARPS);
        if (most > 0)
            e = launch(stream, convert_kernel,
                       dim3(blocks < BLOCKS_AT_ONCE ? blocks : BLOCKS_AT_ONCE, part),
                       dim3(ROW_THREADS), 0, c);
    }
    return e;
}
