/* sample_radix_select.cuh - finds where probabilities in descending order reach a weight, without
 * sorting: radix select over the bits of floats, which are ordered like the floats, from the
 * highest digit down. One block, with a histogram in shared memory.
 *
 * Weights are counts, or masses. Mass is added exactly: the entries of a bin share their exponent,
 * so their mantissas are added as integers, in any order; bins are added in double from the largest
 * down, in a fixed order. Thread: device, whole blocks of SAMPLE_THREADS. */
#ifndef BATON_KERNELS_CUDA_SAMPLING_SAMPLE_RADIX_SELECT_CUH
#define BATON_KERNELS_CUDA_SAMPLING_SAMPLE_RADIX_SELECT_CUH

#include "kernels/cuda/sampling/sample_row.cuh"

enum { SELECT_DIGITS = 3, SELECT_BINS = 1 << 11 }; /* 11, 10 and 10 bits */

/* The entries: positive floats above `above` and not below `least`. v is aligned to 16 bytes. */
struct select_from {
    const float *v;
    int n;
    float above, least;
};

struct select_for {
    bool by_count;
    double target; /* weight of the head to find, which has at least one entry */
    bool of_total; /* target is a fraction of the weight of all */
};

struct select_border {
    float p;      /* the head's last value; 0: there are no entries */
    int n_take;   /* entries equal to p that the head has */
    int n_equal;  /* entries equal to p */
    bool reached; /* all entries together have the weight */
};

/* Mantissas of 24 bits are added in two halves, so that the sum of 2^19 fits 32 bits. */
struct sample_select_smem {
    unsigned count[SELECT_BINS], low[SELECT_BINS], high[SELECT_BINS];
    double weights[SAMPLE_WARPS];
    unsigned counts[SAMPLE_WARPS];
    int reaches, lowest; /* the highest bin that reaches the target, the lowest that is not
                          * empty */
    double before;
};

static __device__ void select_add(sample_select_smem *room, float v, const select_from &from,
                                  unsigned prefix, int shift, int width)
{
    const unsigned bits = __float_as_uint(v);
    if (!(v > from.above && v >= from.least) || bits >> (shift + width) != prefix) return;
    const unsigned bin = bits >> shift & ((1u << width) - 1),
                   mantissa = (bits & 0x7fffffu) | 0x800000u;
    atomicAdd(&room->count[bin], 1u);
    atomicAdd(&room->low[bin], mantissa & 0xfffu);
    atomicAdd(&room->high[bin], mantissa >> 12);
}

/* Makes the histogram of one digit over the entries whose higher bits are `prefix`. */
static __device__ void select_count(sample_select_smem *room, const select_from &from,
                                    unsigned prefix, int shift, int width)
{
    for (int bin = (int)threadIdx.x; bin < 1 << width; bin += SAMPLE_THREADS)
        room->count[bin] = room->low[bin] = room->high[bin] = 0;
    if (threadIdx.x == 0) room->reaches = -1, room->lowest = SELECT_BINS;
    __syncthreads();
    const int n_quads = from.n / 4;
    for (int i = (int)threadIdx.x; i < n_quads; i += SAMPLE_THREADS) {
        const float4 four = __ldcg((const float4 *)(const void *)from.v + i);
        select_add(room, four.x, from, prefix, shift, width);
        select_add(room, four.y, from, prefix, shift, width);
        select_add(room, four.z, from, prefix, shift, width);
        select_add(room, four.w, from, prefix, shift, width);
    }
    const int rest = n_quads * 4 + (int)threadIdx.x;
    if (rest < from.n) select_add(room, __ldcg(from.v + rest), from, prefix, shift, width);
    __syncthreads();
}

/* The weight of a bin; its entries' bits begin with `prefix`, which includes the bin's digit, above
 * `shift` lower ones. */
static __device__ double select_weight(const sample_select_smem *room, int bin, unsigned prefix,
                                       int shift, bool by_count)
{
    if (by_count) return room->count[bin];
    const int exponent = (int)(prefix << shift >> 23);
    return (double)((sample_key)room->high[bin] * 4096u + room->low[bin]) *
           __longlong_as_double((long long)(exponent - 150 + 1023) << 52);
}

/* Weight and number of the entries before the thread's bins, from the highest down, and of all. */
static __device__ void select_scan(sample_select_smem *room, double *weight, unsigned *count,
                                   double *all, unsigned *all_count)
{
    const int lane = (int)(threadIdx.x % WARP), warp = (int)(threadIdx.x / WARP);
    double w = *weight;
    unsigned c = *count;
    for (int step = 1; step < WARP; step *= 2) {
        const double w_before = __shfl_up_sync(0xffffffffu, w, step);
        const unsigned c_before = __shfl_up_sync(0xffffffffu, c, step);
        if (lane >= step) w += w_before, c += c_before;
    }
    if (lane == WARP - 1) room->weights[warp] = w, room->counts[warp] = c;
    *weight = __shfl_up_sync(0xffffffffu, w, 1);
    *count = __shfl_up_sync(0xffffffffu, c, 1);
    if (lane == 0) *weight = 0, *count = 0;
    __syncthreads();
    double before = 0;
    unsigned n_before = 0;
    *all = 0, *all_count = 0;
    for (int i = 0; i < SAMPLE_WARPS; i++) {
        if (i == warp) before = *all, n_before = *all_count;
        *all += room->weights[i];
        *all_count += room->counts[i];
    }
    *weight += before;
    *count += n_before;
}

struct select_step {
    double before; /* weight above the bins being searched */
    double target;
    unsigned prefix;
    bool reached;
};

/* Determines one more digit of the border. False: there are no entries. */
static __device__ bool select_digit(sample_select_smem *room, const select_for &want,
                                    select_step *at, int shift, int width, bool first)
{
    const int each = (1 << width) / SAMPLE_THREADS,
              top = (1 << width) - 1 - (int)threadIdx.x * each;
    double weight = 0, all;
    unsigned count = 0, all_count;
    for (int bin = top; bin > top - each; bin--) {
        weight += select_weight(room, bin, at->prefix << width | (unsigned)bin, shift,
                                want.by_count);
        count += room->count[bin];
    }
    select_scan(room, &weight, &count, &all, &all_count);
    if (all_count == 0) return false;
    if (first && want.of_total) at->target *= all;
    double upto = at->before + weight;
    for (int bin = top; bin > top - each; bin--) {
        if (room->count[bin] == 0) continue;
        atomicMin(&room->lowest, bin);
        upto += select_weight(room, bin, at->prefix << width | (unsigned)bin, shift, want.by_count);
        if (upto < at->target) continue;
        atomicMax(&room->reaches, bin);
        break;
    }
    __syncthreads();
    /* rounding may put the target just past the last bin of a lower digit */
    const int chosen = room->reaches >= 0 ? room->reaches : room->lowest;
    if (first) at->reached = room->reaches >= 0;
    if (chosen <= top && chosen > top - each) {
        double before = at->before + weight;
        for (int bin = top; bin > chosen; bin--)
            before += select_weight(room, bin, at->prefix << width | (unsigned)bin, shift,
                                    want.by_count);
        room->before = before;
    }
    __syncthreads();
    at->before = room->before;
    at->prefix = at->prefix << width | (unsigned)chosen;
    return true;
}

/* How many of n equal values p are needed to get from `before` to `target`: 1 to n. */
static __device__ int select_equals(double before, double target, float p, int n)
{
    const double ratio = (target - before) / (double)p;
    int take = ratio >= n ? n : ratio > 1 ? (int)ratio : 1;
    while (take > 1 && before + (take - 1) * (double)p >= target) take--;
    while (take < n && before + take * (double)p < target) take++;
    return take;
}

/* The smallest head of the entries, largest first, with at least the target weight; all of them if
 * their weight is less. Uses `room` between two barriers. */
static __device__ select_border select_head(sample_select_smem *room, const select_from &from,
                                            const select_for &want)
{
    select_step at = { 0, want.target, 0, false };
    int shift = 31;
    __syncthreads();
    for (int digit = 0; digit < SELECT_DIGITS; digit++) {
        const int width = digit == 0 ? 11 : 10;
        shift -= width;
        select_count(room, from, at.prefix, shift, width);
        if (!select_digit(room, want, &at, shift, width, digit == 0)) return { 0, 0, 0, false };
    }
    const float p = __uint_as_float(at.prefix);
    const unsigned n = room->count[at.prefix & 0x3ffu];
    __syncthreads();
    return { p, want.by_count ? (int)n : select_equals(at.before, at.target, p, (int)n), (int)n,
             at.reached };
}

/* The index of the n-th (from 1) entry of x [n_x] that equals p. */
static __device__ int32_t select_nth(sample_select_smem *room, const float *x, int n_x, float p,
                                     int n)
{
    const int each = (n_x + SAMPLE_THREADS - 1) / SAMPLE_THREADS, first = (int)threadIdx.x * each,
              end = first + each < n_x ? first + each : n_x;
    int mine = 0;
    for (int i = first; i < end; i++) mine += x[i] == p;
    room->count[threadIdx.x] = (unsigned)mine;
    __syncthreads();
    int before = 0;
    for (int t = 0; t < (int)threadIdx.x; t++) before += (int)room->count[t];
    if (before < n && before + mine >= n) {
        for (int i = first; before < n; i++)
            if (x[i] == p && ++before == n) room->reaches = i;
    }
    __syncthreads();
    return room->reaches;
}

#endif
