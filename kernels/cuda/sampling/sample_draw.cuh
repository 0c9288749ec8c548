/* sample_draw.cuh - the mass of the entries that may be drawn, and the draw: sums in the order of
 * sampler.c, bit for bit. Thread: device, whole blocks. */
#ifndef BATON_KERNELS_CUDA_SAMPLING_SAMPLE_DRAW_CUH
#define BATON_KERNELS_CUDA_SAMPLING_SAMPLE_DRAW_CUH

#include "kernels/cuda/sampling/sample_row.cuh"

/* Chunks of a piece lie SUM_STRIDE floats apart in shared memory, so that the lanes of two chunks
 * use different banks. */
enum {
    SUM_LANES = 8,
    SUM_STRIDE = SAMPLE_CHUNK + SUM_LANES,
    SUM_TILE = SAMPLE_PIECE / SAMPLE_CHUNK * SUM_STRIDE
};

static_assert(SAMPLE_PIECE / SAMPLE_CHUNK * SUM_LANES == WARP,
              "a warp has the lanes of a piece's chunks");

struct sample_cutoff {
    float p;
    int32_t id;
};

static __device__ __forceinline__ bool is_kept(const sample_cutoff &c, float p, int32_t id)
{
    return p > c.p || (p == c.p && id <= c.id);
}

/* The cutoff of min_p. */
static __device__ __forceinline__ sample_cutoff first_cutoff(const sample_row_params &a)
{
    sample_cutoff keep = { 0x1p-126f, INT32_MAX };
    if (a.min_p > keep.p) keep.p = a.min_p < 1 ? a.min_p : 1;
    return keep;
}

/* Writes the masses of the piece's chunks, of kept p, to r.sums; v: the thread's p. Its barrier
 * orders `tile` with later code. */
static __device__ void sum_chunks(const sample_row &r, float *tile, const float v[SAMPLE_EACH],
                                  const sample_cutoff &keep)
{
    UNROLL
    for (int k = 0; k < SAMPLE_EACH; k++) {
        const int i = element_of(k), in_piece = i % SAMPLE_PIECE;
        tile[in_piece / SAMPLE_CHUNK * SUM_STRIDE + in_piece % SAMPLE_CHUNK] =
            i < r.n_vocab && is_kept(keep, v[k], i) ? v[k] : 0;
    }
    __syncthreads();
    if (threadIdx.x >= WARP) return;
    const int chunk = (int)blockIdx.x * (SAMPLE_PIECE / SAMPLE_CHUNK) +
                      (int)threadIdx.x / SUM_LANES;
    const float *lane = tile + (int)threadIdx.x / SUM_LANES * SUM_STRIDE + threadIdx.x % SUM_LANES;
    double sum = 0;
    UNROLL_BY(16)
    for (int i = 0; i < SAMPLE_CHUNK; i += SUM_LANES) sum += (double)lane[i];
    sum += __shfl_xor_sync(0xffffffffu, sum, 4);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    if (threadIdx.x % SUM_LANES == 0 && chunk < r.n_chunks) r.sums[chunk] = sum;
}

/* Sets upto[i] = mass of chunks 0 .. i, added one after the other, and returns the total. upto
 * [SAMPLE_CHUNKS_MAX] is in shared memory. */
static __device__ double sum_upto(const sample_row &r, double *upto)
{
    if ((int)threadIdx.x < r.n_chunks) upto[threadIdx.x] = __ldcg(r.sums + threadIdx.x);
    __syncthreads();
    if (threadIdx.x == 0) {
        double sum = 0;
        for (int i = 0; i < r.n_chunks; i++) upto[i] = sum += upto[i];
    }
    __syncthreads();
    return upto[r.n_chunks - 1];
}

/* rng_uniform of shared/base/rng.h with counter_hi 0: Philox4x32-10. */
static __device__ double draw_uniform(uint64_t key, uint32_t counter)
{
    unsigned c0 = counter, c1 = 0, c2 = 0, c3 = 0, k0 = (unsigned)key, k1 = (unsigned)(key >> 32);
    for (int round = 0; round < 10; round++) {
        const unsigned high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0,
                       high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return (double)(((uint64_t)c1 << 32 | c0) >> 11) * 0x1p-53;
}

struct sample_draw_smem {
    double upto[SAMPLE_CHUNKS_MAX];
    float p[SAMPLE_CHUNK];
    double sum;
    int chunk;  /* where the mass passes u */
    int32_t id; /* the last that was kept so far */
    bool found;
};

/* Continues from room->sum over one chunk, whose entries are in room->p, zero if not kept. One
 * thread, because each sum needs the previous one. */
static __device__ void draw_in_chunk(sample_draw_smem *room, int first, double u)
{
    double sum = room->sum;
    for (int i = 0; i < SAMPLE_CHUNK; i += 8) {
        float p[8], any = 0;
        UNROLL
        for (int k = 0; k < 8; k++) any = fmaxf(any, p[k] = room->p[i + k]);
        if (any == 0) continue;
        for (int k = 0; k < 8; k++) {
            if (p[k] == 0) continue;
            sum += (double)p[k];
            room->id = first + i + k;
            if (!(sum > u)) continue;
            room->found = true;
            return;
        }
    }
    room->sum = sum;
}

/* The kept entry at which the running mass passes the row's random number, given the masses of all
 * chunks. All threads get it. */
static __device__ int32_t draw_entry(sample_draw_smem *room, const sample_row &r,
                                     const sample_cutoff &keep)
{
    const double u = draw_uniform(r.params->seed, r.params->index) * sum_upto(r, room->upto);
    if (threadIdx.x == 0) room->chunk = r.n_chunks, room->found = false, room->id = r.state->id;
    __syncthreads();
    if ((int)threadIdx.x < r.n_chunks && room->upto[threadIdx.x] > u)
        atomicMin(&room->chunk, (int)threadIdx.x);
    __syncthreads();
    const int begin = room->chunk;
    if (threadIdx.x == 0) room->sum = begin > 0 ? room->upto[begin - 1] : 0;
    for (int chunk = begin; chunk < r.n_chunks; chunk++) { /* the first, unless rounding leaves u
                                                            * beyond its last entry */
        for (int at = (int)threadIdx.x; at < SAMPLE_CHUNK; at += SAMPLE_THREADS) {
            const int i = chunk * SAMPLE_CHUNK + at;
            const float p = i < r.n_vocab ? __ldcg(r.x + i) : 0;
            room->p[at] = is_kept(keep, p, i) ? p : 0;
        }
        __syncthreads();
        if (threadIdx.x == 0) draw_in_chunk(room, chunk * SAMPLE_CHUNK, u);
        __syncthreads();
        if (room->found) break;
    }
    return room->id;
}

#endif
