/* kv_checksum.cu - XXH3_64bits of pieces of KV, a thread block for each; it copies them meanwhile
 * if they say where to, so that a push with checksums reads the sender's memory once.
 *
 * In the XXH3 specification (github.com/Cyan4973/xxHash, doc/xxhash_spec.md) a long input is blocks
 * of 16 stripes of 64 bytes, and 8 accumulators of 64 bits. What a block adds to the accumulators
 * does not depend on them. So all warps but the first compute these sums, each of AHEAD blocks
 * whose loads are in flight together. Meanwhile 8 threads of the first add the sums of the tile
 * before to the accumulators one after the other, with the scramble after each block: some 40
 * cycles per KiB, which no number of threads shortens. Inputs of at most 240 bytes have separate
 * formulas: one thread. Many pieces are bound by memory, few by these steps. Thread: device;
 * kv_checksum_run: one per stream. */
#include "kernels/cuda/kv/kv_checksum.h"
#include "kernels/cuda/launch.cuh"

enum {
    SUM_THREADS = 352,
    SUM_WARPS = SUM_THREADS / WARP - 1, /* all but the one that accumulates */
    SUM_BLOCKS = 2, /* of a multiprocessor: one reads where the other begins and ends pieces */
    AHEAD = 4,
    SUM_TILE = SUM_WARPS * AHEAD, /* blocks whose sums are computed before they are accumulated */
    STRIPE = 64,
    STRIPES = 16, /* of a block */
    SUM_BLOCK = STRIPE * STRIPES,
    LANES = 8, /* accumulators */
    SHORT_MAX = 240
};

#define PRIME32_1 0x9E3779B1u
#define PRIME32_2 0x85EBCA77u
#define PRIME32_3 0xC2B2AE3Du
#define PRIME64_1 0x9E3779B185EBCA87u
#define PRIME64_2 0xC2B2AE3D27D4EB4Fu
#define PRIME64_3 0x165667B19E3779F9u
#define PRIME64_4 0x85EBCA77C2B2AE63u
#define PRIME64_5 0x27D4EB2F165667C5u
#define PRIME_MX1 0x165667919E3779F9u
#define PRIME_MX2 0x9FB21C651E98DF25u

/* The default secret as little-endian words. */
static __device__ const uint64_t SECRET[24] = {
    0xbe4ba423396cfeb8u, 0x1cad21f72c81017cu, 0xdb979083e96dd4deu, 0x1f67b3b7a4a44072u,
    0x78e5c0cc4ee679cbu, 0x2172ffcc7dd05a82u, 0x8e2443f7744608b8u, 0x4c263a81e69035e0u,
    0xcb00c391bb52283cu, 0xa32e531b8b65d088u, 0x4ef90da297486471u, 0xd8acdea946ef1938u,
    0x3f349ce33f76faa8u, 0x1d4f0bc7c7bbdcf9u, 0x3159b4cd4be0518au, 0x647378d9c97e9fc8u,
    0xc3ebd33483acc5eau, 0xeb6313faffa081c5u, 0x49daf0b751dd0d17u, 0x9e68d429265516d3u,
    0xfca1477d58be162bu, 0xce31d07ad1b8f88fu, 0x280416958f3acb45u, 0x7e404bbbcafbd7afu,
};

/* 64 bits of the secret, from byte `at` on. */
static __device__ __forceinline__ uint64_t secret_at(unsigned at)
{
    const unsigned word = at / 8, bits = at % 8 * 8;
    return bits ? SECRET[word] >> bits | SECRET[word + 1] << (64 - bits) : SECRET[word];
}

/* ---- reading: a piece is runs, one behind the other, and then those of its tail ---- */

static __device__ __forceinline__ unsigned first_bytes(const struct copy_stream_checksum_range &p)
{
    return p.run_bytes * p.n_runs;
}

/* Where byte `at` of a piece lies behind the address of its first part, or of its tail. */
static __device__ __forceinline__ size_t first_offset(const struct copy_stream_checksum_range &p,
                                                      unsigned at)
{
    return p.n_runs == 1 ? at : at / p.run_bytes * p.stride + at % p.run_bytes;
}
static __device__ __forceinline__ size_t tail_offset(const struct copy_stream_checksum_range &p,
                                                     unsigned at)
{
    at -= first_bytes(p);
    return at / p.tail.run_bytes * p.tail.stride + at % p.tail.run_bytes;
}

static __device__ __forceinline__ const unsigned char *piece_at(
    const struct copy_stream_checksum_range &p, unsigned at)
{
    return at < first_bytes(p) ? (const unsigned char *)p.at + first_offset(p, at)
                               : (const unsigned char *)p.tail.at + tail_offset(p, at);
}
static __device__ __forceinline__ unsigned char *piece_to(
    const struct copy_stream_checksum_range &p, unsigned at)
{
    return at < first_bytes(p) ? (unsigned char *)p.to + first_offset(p, at)
                               : (unsigned char *)p.tail.to + tail_offset(p, at);
}

/* Copies bytes [begin, end) of a piece, if it says where to. */
static __device__ void copy_bytes(const struct copy_stream_checksum_range &p, unsigned begin,
                                  unsigned end)
{
    UNROLL_BY(1)
    for (unsigned i = begin + threadIdx.x; p.to && i < end; i += SUM_THREADS)
        *piece_to(p, i) = *piece_at(p, i);
}

static __device__ uint64_t read_bytes(const struct copy_stream_checksum_range &p, unsigned at,
                                      unsigned n)
{
    uint64_t v = 0;
    UNROLL_BY(1)
    for (unsigned i = 0; i < n; i++) v |= (uint64_t)*piece_at(p, at + i) << 8 * i;
    return v;
}
static __device__ __forceinline__ uint64_t read_64(const struct copy_stream_checksum_range &p,
                                                   unsigned at)
{
    return read_bytes(p, at, 8);
}

struct alignas(16) word_pair {
    uint64_t x, y;
};

/* Reads 16 bytes; below `n_aligned` they are contiguous and aligned. */
static __device__ __forceinline__ word_pair read_pair(const struct copy_stream_checksum_range &p,
                                                      unsigned at, unsigned n_aligned)
{
    return at + 16 <= n_aligned ? *(const word_pair *)piece_at(p, at)
                                : word_pair{ read_64(p, at), read_64(p, at + 8) };
}

static __device__ __forceinline__ unsigned aligned_bytes(const struct copy_stream_checksum_range &p)
{
    const bool aligned = ((uintptr_t)p.at | (uintptr_t)p.to) % 16 == 0 &&
                         (p.n_runs == 1 || (p.run_bytes % 16 == 0 && p.stride % 16 == 0));
    return aligned ? first_bytes(p) : 0;
}

/* ---- mixing ---- */

static __device__ __forceinline__ uint64_t fold_64(uint64_t a, uint64_t b)
{
    return a * b ^ __umul64hi(a, b);
}
static __device__ __forceinline__ uint64_t low_by_high(uint64_t v)
{
    return (v & 0xffffffffu) * (v >> 32);
}
static __device__ __forceinline__ uint64_t rotate(uint64_t v, int n)
{
    return v << n | v >> (64 - n);
}

static __device__ __forceinline__ uint64_t avalanche(uint64_t h)
{
    h = (h ^ h >> 37) * PRIME_MX1;
    return h ^ h >> 32;
}

static __device__ __forceinline__ uint64_t avalanche_old(uint64_t h)
{
    h = (h ^ h >> 33) * PRIME64_2;
    h = (h ^ h >> 29) * PRIME64_3;
    return h ^ h >> 32;
}

/* ---- short inputs ---- */

static __device__ uint64_t sum_to_16(const struct copy_stream_checksum_range &p, unsigned n)
{
    if (n > 8) {
        const uint64_t low = read_64(p, 0) ^ secret_at(24) ^ secret_at(32),
                       high = read_64(p, n - 8) ^ secret_at(40) ^ secret_at(48);
        uint64_t swapped = 0;
        for (int i = 0; i < 8; i++) swapped |= (low >> 8 * i & 0xff) << (56 - 8 * i);
        return avalanche(n + swapped + high + fold_64(low, high));
    }
    if (n >= 4) {
        uint64_t h = (read_bytes(p, n - 4, 4) + (read_bytes(p, 0, 4) << 32)) ^ secret_at(8) ^
                     secret_at(16);
        h = (h ^ rotate(h, 49) ^ rotate(h, 24)) * PRIME_MX2;
        h = (h ^ ((h >> 35) + n)) * PRIME_MX2;
        return h ^ h >> 28;
    }
    const uint64_t all = read_bytes(p, 0, 1) << 16 | read_bytes(p, n >> 1, 1) << 24 |
                         read_bytes(p, n - 1, 1) | (uint64_t)n << 8;
    return avalanche_old(all ^ ((secret_at(0) ^ secret_at(4)) & 0xffffffffu));
}

static __device__ uint64_t mix_16(const struct copy_stream_checksum_range &p, unsigned at,
                                  unsigned secret)
{
    return fold_64(read_64(p, at) ^ secret_at(secret), read_64(p, at + 8) ^ secret_at(secret + 8));
}

static __device__ uint64_t sum_to_240(const struct copy_stream_checksum_range &p, unsigned n)
{
    uint64_t h = n * PRIME64_1;
    if (n <= 128) { /* from both ends inwards */
        for (unsigned i = 0; i < 4 && (i == 0 || n > 32 * i); i++)
            h += mix_16(p, 16 * i, 32 * i) + mix_16(p, n - 16 * (i + 1), 32 * i + 16);
        return avalanche(h);
    }
    for (unsigned i = 0; i < 8; i++) h += mix_16(p, 16 * i, 16 * i);
    h = avalanche(h);
    for (unsigned i = 8; i < n / 16; i++) h += mix_16(p, 16 * i, 16 * (i - 8) + 3);
    return avalanche(h + mix_16(p, n - 16, 119));
}

/* ---- long inputs ---- */

static __device__ __forceinline__ uint64_t accumulator_begin(unsigned lane)
{
    switch (lane) {
    case 0: return PRIME32_3;
    case 1: return PRIME64_1;
    case 2: return PRIME64_2;
    case 3: return PRIME64_3;
    case 4: return PRIME64_4;
    case 5: return PRIME32_2;
    case 6: return PRIME64_5;
    default: return PRIME32_1;
    }
}

/* A thread's part of a block: 16 bytes of stripes i and i + 8. */
struct block_part {
    word_pair v[2];
};

/* One warp reads a block: 4 threads per stripe, 2 accumulators per thread. All stripes, aligned and
 * not in the tail. ONE_RUN: contiguous. */
template <bool ONE_RUN>
static __device__ __forceinline__ block_part read_part(const struct copy_stream_checksum_range &p,
                                                       unsigned at)
{
    at += threadIdx.x % WARP * 16;
    const unsigned next = at + 8 * STRIPE;
    const char *base = (const char *)p.at;
    if (ONE_RUN) return { *(const word_pair *)(base + at), *(const word_pair *)(base + next) };
    return { *(const word_pair *)piece_at(p, at), *(const word_pair *)piece_at(p, next) };
}

/* The same of stripes below n, of any kind; the rest is zero and not used. */
static __device__ __forceinline__ block_part read_rest(const struct copy_stream_checksum_range &p,
                                                       unsigned at, unsigned n, unsigned n_aligned)
{
    const unsigned thread = threadIdx.x % WARP;
    block_part part = {};
    UNROLL
    for (unsigned i = 0; i < 2; i++)
        if (thread / 4 + 8 * i < n)
            part.v[i] = read_pair(p, at + thread * 16 + 8 * i * STRIPE, n_aligned);
    return part;
}

/* Copies what read_part has read. */
template <bool ONE_RUN>
static __device__ __forceinline__ void write_part(const struct copy_stream_checksum_range &p,
                                                  unsigned at, const block_part &part)
{
    at += threadIdx.x % WARP * 16;
    const unsigned next = at + 8 * STRIPE;
    char *base = (char *)p.to;
    if (ONE_RUN) *(word_pair *)(base + at) = part.v[0], *(word_pair *)(base + next) = part.v[1];
    else *(word_pair *)piece_to(p, at) = part.v[0], *(word_pair *)piece_to(p, next) = part.v[1];
}

/* Copies what read_rest has read. */
static __device__ __forceinline__ void write_rest(const struct copy_stream_checksum_range &p,
                                                  unsigned at, unsigned n, unsigned n_aligned,
                                                  const block_part &part)
{
    const unsigned thread = threadIdx.x % WARP;
    UNROLL
    for (unsigned i = 0; i < 2; i++) {
        const unsigned byte = at + thread * 16 + 8 * i * STRIPE;
        if (thread / 4 + 8 * i >= n) continue;
        if (byte + 16 <= n_aligned) {
            *(word_pair *)piece_to(p, byte) = part.v[i];
            continue;
        }
        UNROLL_BY(1)
        for (unsigned k = 0; k < 16; k++)
            *piece_to(p,
                      byte + k) = (unsigned char)((k < 8 ? part.v[i].x : part.v[i].y) >> k % 8 * 8);
    }
}

/* What stripes 0 .. n - 1 add to the accumulators. The same warp. */
static __device__ __forceinline__ void part_adds(const block_part &part, unsigned n, uint64_t *out)
{
    const unsigned thread = threadIdx.x % WARP, pair = thread % 4 * 2;
    uint64_t even = 0, odd = 0;
    UNROLL
    for (unsigned i = 0; i < 2; i++) {
        const unsigned stripe = thread / 4 + 8 * i;
        if (stripe >= n) continue;
        const word_pair v = part.v[i];
        even += v.y + low_by_high(v.x ^ SECRET[stripe + pair]);
        odd += v.x + low_by_high(v.y ^ SECRET[stripe + pair + 1]);
    }
    UNROLL
    for (int other = 4; other < WARP; other *= 2) {
        even += __shfl_xor_sync(0xffffffffu, even, other);
        odd += __shfl_xor_sync(0xffffffffu, odd, other);
    }
    if (thread < 4) {
        out[pair] = even;
        out[pair + 1] = odd;
    }
}

/* A piece of more than SHORT_MAX bytes. */
struct long_piece {
    const struct copy_stream_checksum_range &p; /* in shared memory: registers are few */
    unsigned n_aligned;
    unsigned n_full, n_last; /* blocks with a scramble; stripes after them */
};

/* Writes the sums of the blocks of a tile that are this warp's. */
template <bool ONE_RUN>
static __device__ __forceinline__ void full_tile_adds(const long_piece &l, unsigned first,
                                                      uint64_t (*adds)[LANES])
{
    block_part parts[AHEAD];
    UNROLL for (unsigned i = 0; i < AHEAD; i++)
        parts[i] = read_part<ONE_RUN>(l.p, (first + i) * SUM_BLOCK);
    if (l.p.to)
        UNROLL for (unsigned i = 0; i < AHEAD; i++)
            write_part<ONE_RUN>(l.p, (first + i) * SUM_BLOCK, parts[i]);
    UNROLL for (unsigned i = 0; i < AHEAD; i++) part_adds(parts[i], STRIPES, adds[i]);
}

static __device__ __forceinline__ void tile_adds(const long_piece &l, unsigned tile,
                                                 uint64_t (*adds)[LANES])
{
    const unsigned begin = (threadIdx.x / WARP - 1) * AHEAD, first = tile * SUM_TILE + begin,
                   end = first + AHEAD;
    if (end <= l.n_full && end * SUM_BLOCK <= l.n_aligned) {
        if (l.p.n_runs == 1) full_tile_adds<true>(l, first, adds + begin);
        else full_tile_adds<false>(l, first, adds + begin);
        return;
    }
    UNROLL_BY(1)
    for (unsigned b = first; b < end && b <= l.n_full; b++) {
        const unsigned n = b < l.n_full ? (unsigned)STRIPES : l.n_last;
        const block_part part = read_rest(l.p, b * SUM_BLOCK, n, l.n_aligned);
        if (l.p.to) write_rest(l.p, b * SUM_BLOCK, n, l.n_aligned, part);
        part_adds(part, n, adds[begin + b - first]);
    }
}

/* Adds the sums of a tile to one of the accumulators. */
static __device__ __forceinline__ uint64_t accumulate(const long_piece &l, unsigned first,
                                                      const uint64_t (*adds)[LANES],
                                                      uint64_t accumulator)
{
    const unsigned thread = threadIdx.x;
    const uint64_t secret = SECRET[16 + thread];
    const unsigned end = first + SUM_TILE < l.n_full ? first + SUM_TILE : l.n_full;
    for (unsigned b = first; b < end; b++) {
        accumulator += adds[b - first][thread];
        accumulator = (accumulator ^ accumulator >> 47 ^ secret) * PRIME32_1;
    }
    return l.n_full < first + SUM_TILE ? accumulator + adds[l.n_full - first][thread] : accumulator;
}

static __device__ __forceinline__ uint64_t finish(const uint64_t *accumulators, unsigned n)
{
    uint64_t h = n * PRIME64_1;
    for (unsigned i = 0; i < LANES; i += 2)
        h += fold_64(accumulators[i] ^ secret_at(11 + 8 * i),
                     accumulators[i + 1] ^ secret_at(19 + 8 * i));
    return avalanche(h);
}

/* The block's: `sum` of piece p, which is copied. */
static __device__ __forceinline__ void sum_piece(const struct copy_stream_checksum_range &p,
                                                 uint64_t (*adds)[SUM_TILE][LANES], uint64_t *sum)
{
    const unsigned n = first_bytes(p) + p.tail.run_bytes * p.tail.n_runs, thread = threadIdx.x;
    if (n <= SHORT_MAX) {
        if (thread == 0) *sum = n <= 16 ? sum_to_16(p, n) : sum_to_240(p, n);
        copy_bytes(p, 0, n);
        return;
    }
    const long_piece l = { p, aligned_bytes(p), (n - 1) / SUM_BLOCK, (n - 1) % SUM_BLOCK / STRIPE };
    uint64_t accumulator = accumulator_begin(thread);
    for (unsigned tile = 0; tile <= l.n_full / SUM_TILE + 1; tile++) {
        if (thread >= WARP && tile * SUM_TILE <= l.n_full) tile_adds(l, tile, adds[tile % 2]);
        if (thread < LANES && tile > 0)
            accumulator = accumulate(l, (tile - 1) * SUM_TILE, adds[(tile - 1) % 2], accumulator);
        __syncthreads();
    }
    copy_bytes(p, l.n_full * SUM_BLOCK + l.n_last * STRIPE, n);
    if (thread < LANES) /* the last 64 bytes again, wherever they begin */
        adds[0][0][thread] = accumulator + read_64(p, n - STRIPE + 8 * (thread ^ 1)) +
                             low_by_high(read_64(p, n - STRIPE + 8 * thread) ^
                                         secret_at(121 + 8 * thread));
    __syncthreads();
    if (thread == 0) *sum = finish(adds[0][0], n);
}

enum { PIECE_WORDS = sizeof(struct copy_stream_checksum_range) / sizeof(uint64_t) };

/* Block i: pieces i, i + gridDim.x ... The next one's description comes over PCIe meanwhile. */
static __global__ void __launch_bounds__(SUM_THREADS, SUM_BLOCKS)
    kv_checksum_kernel(const struct copy_stream_checksum_range *pieces, unsigned n, uint64_t *sums)
{
    grid_dependency_sync();
    __shared__ uint64_t adds[2][SUM_TILE][LANES], words[2][PIECE_WORDS];
    const unsigned word = threadIdx.x - LANES; /* threads that do not accumulate fetch */
    if (word < PIECE_WORDS) words[0][word] = ((const uint64_t *)&pieces[blockIdx.x])[word];
    __syncthreads();
    for (unsigned i = blockIdx.x, turn = 0; i < n; i += gridDim.x, turn ^= 1) {
        const bool fetches = word < PIECE_WORDS && i + gridDim.x < n;
        const uint64_t next = fetches ? ((const uint64_t *)&pieces[i + gridDim.x])[word] : 0;
        sum_piece(*(const struct copy_stream_checksum_range *)words[turn], adds, &sums[i]);
        if (fetches) words[turn ^ 1][word] = next;
        __syncthreads();
    }
}

cudaError_t kv_checksum_run(cudaStream_t stream, const struct copy_stream_checksum_range *pieces,
                            uint32_t n, uint64_t *sums, int n_multiprocessors)
{
    const uint32_t most = (uint32_t)(n_multiprocessors * SUM_BLOCKS);
    if (n == 0) return cudaSuccess;
    return launch(stream, kv_checksum_kernel, dim3(n < most ? n : most), dim3(SUM_THREADS), 0,
                  pieces, n, sums);
}
