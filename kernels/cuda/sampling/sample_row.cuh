/* sample_row.cuh - a row of the sampler: the layout of its scratch, how its blocks share it, its
 * elements and their order.
 *
 * A row is split into pieces of SAMPLE_PIECE logits, one block each (grid: pieces x rows). A phase
 * is one kernel: its blocks process their pieces and update the row's state by integer atomics,
 * whose order does not matter; the block that finishes last continues alone with what concerns the
 * whole row, and resets the counters, which saves a launch. Thread: device. */
#ifndef BATON_KERNELS_CUDA_SAMPLING_SAMPLE_ROW_CUH
#define BATON_KERNELS_CUDA_SAMPLING_SAMPLE_ROW_CUH

#include "kernels/cuda/dtype_convert.cuh"
#include "kernels/cuda/sampling/sample.h"
#include "kernels/exp.h"

enum {
    SAMPLE_THREADS = 512,
    SAMPLE_WARPS = SAMPLE_THREADS / WARP,
    SAMPLE_EACH = 8 /* logits of a thread, by fours */
};
enum {
    SAMPLE_PIECE = SAMPLE_THREADS * SAMPLE_EACH,
    SAMPLE_PART = SAMPLE_PIECE / SAMPLE_WARPS /* logits of a warp */
};
enum {
    SAMPLE_CHUNK = 1024,
    SAMPLE_CHUNKS_MAX = SAMPLE_VOCAB_MAX /
                        SAMPLE_CHUNK /* SUM_CHUNK of sampler.c and LSE_CHUNK of cpu_backend.h */
};
enum {
    SAMPLE_LIST = 16384 /* candidates in a list; if there are more, the whole row is searched */
};

static_assert((int)SAMPLE_CHUNKS_MAX <= (int)SAMPLE_THREADS, "a thread has a chunk's sum");
static_assert((int)SAMPLE_VOCAB_MAX / SAMPLE_PIECE * (int)SAMPLER_LOGPROBS_MAX <= (int)SAMPLE_PIECE,
              "the best of all pieces fit a block");

typedef unsigned long long sample_key; /* larger: a larger logit, or of equals a smaller id; 0:
                                        * nothing */

struct sample_row_state {
    /* Counters: zero between phases. */
    sample_key best;
    unsigned raw_max;  /* of the unchanged logits, as ordered_bits */
    unsigned n_done;   /* blocks */
    unsigned n_kept;   /* entries of at least min_p */
    unsigned n_listed; /* candidates, including those without room */
    unsigned n_reach;  /* logits not below the token's */
    /* Results of a phase's last block for later phases. */
    int32_t id; /* the token, once it is chosen */
    int32_t n_future, future[SAMPLE_FUTURE_MAX];
    bool draws;    /* it is drawn */
    bool cuts;     /* by top_k or top_p */
    bool by_count; /* top_k is one of the reasons */
    float max, max_raw;
    float above; /* what the cut depends on is larger */
    float cut_p; /* struct cutoff of sampler.c */
    int32_t cut_id;
    double total; /* mass of all of at least min_p */
};

/* Offsets in a row's scratch, which depend only on n_vocab: calls with other n_rows find the same
 * states. Each part is aligned for float4. */
struct sample_row_layout {
    size_t sums, tops, maxima, list, x, bytes;
};

static __host__ __device__ inline size_t row_part(size_t n, size_t size)
{
    return (n * size + 15) / 16 * 16;
}

static __host__ __device__ inline sample_row_layout sample_row_layout_of(size_t n_vocab)
{
    const size_t n_pieces = (n_vocab + SAMPLE_PIECE - 1) / SAMPLE_PIECE,
                 n_chunks = (n_vocab + SAMPLE_CHUNK - 1) / SAMPLE_CHUNK;
    sample_row_layout at;
    at.sums = row_part(1, sizeof(sample_row_state));
    at.tops = at.sums + row_part(n_chunks, sizeof(double));
    at.maxima = at.tops + row_part(n_pieces * SAMPLER_LOGPROBS_MAX, sizeof(sample_key));
    at.list = at.maxima + row_part(n_pieces * SAMPLE_WARPS, sizeof(float));
    at.x = at.list + row_part(n_vocab < SAMPLE_LIST ? n_vocab : (size_t)SAMPLE_LIST, sizeof(float));
    at.bytes = (at.x + n_vocab * sizeof(float) + 255) / 256 * 256;
    return at;
}

/* A block's row. */
struct sample_row {
    const sample_row_params *params;
    sample_row_state *state;
    const float *logits;
    float *x;         /* [n_vocab] logits after mask and edits, if any; then p */
    double *sums;     /* [chunks] */
    sample_key *tops; /* [pieces][SAMPLER_LOGPROBS_MAX] */
    float *maxima;    /* [pieces * SAMPLE_WARPS] largest p of each warp's part */
    float *list;      /* [SAMPLE_LIST] candidates, in no order */
    int n_vocab, n_chunks;
    bool changed; /* x is not the logits */
};

static __device__ __forceinline__ bool has_future(const sample_row_params &a)
{
    return a.n_chosen + a.n_drafts > 0;
}

/* Sets up *r. False: the row is not real. */
static __device__ bool open_row(const sample_call &call, sample_row *r)
{
    const size_t row = blockIdx.y;
    if ((int)row >= (call.n_real_rows ? *call.n_real_rows : call.n_rows)) return false;
    const sample_row_layout at = sample_row_layout_of((size_t)call.n_vocab);
    unsigned char *scratch = (unsigned char *)call.scratch + row * at.bytes;
    r->params = call.row_params + row;
    r->state = (sample_row_state *)(void *)scratch;
    r->logits = call.logits + row * call.stride;
    r->sums = (double *)(void *)(scratch + at.sums);
    r->tops = (sample_key *)(void *)(scratch + at.tops);
    r->maxima = (float *)(void *)(scratch + at.maxima);
    r->list = (float *)(void *)(scratch + at.list);
    r->x = (float *)(void *)(scratch + at.x);
    r->n_vocab = call.n_vocab;
    r->n_chunks = (call.n_vocab + SAMPLE_CHUNK - 1) / SAMPLE_CHUNK;
    r->changed = r->params->score < 0 &&
                 (r->params->n_edits > 0 || r->params->allowed >= 0 || has_future(*r->params));
    return true;
}

static __device__ __forceinline__ bool wants_logprobs(const sample_row_params &a)
{
    return a.score >= 0 || a.n_logprobs >= 0;
}
static __device__ __forceinline__ bool is_greedy(const sample_row_params &a)
{
    return !(a.temperature >= 1e-5f);
}
static __device__ __forceinline__ bool counts_top(const sample_row_params &a, int n_vocab)
{
    return a.top_k > 0 && a.top_k < n_vocab;
}

/* Called by the whole block at the end of its piece. True in the row's last block, which sees what
 * the others wrote (past L1: __ldcg). */
static __device__ bool is_last_of_row(const sample_row &r)
{
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(&r.state->n_done, 1u) == gridDim.x - 1;
        if (last) r.state->n_done = 0;
    }
    __syncthreads();
    if (last) __threadfence();
    return last;
}

/* The row's index of a thread's k-th element: float4s that are adjacent in a warp. */
static __device__ __forceinline__ int element_of(int k)
{
    return (int)blockIdx.x * SAMPLE_PIECE + k / 4 * SAMPLE_THREADS * 4 + (int)threadIdx.x * 4 +
           k % 4;
}

/* Loads the thread's elements; NaN past the row's end. */
static __device__ void load_elements(float v[SAMPLE_EACH], const float *x, int n)
{
    const bool aligned = (uintptr_t)x % sizeof(float4) == 0;
    UNROLL
    for (int k = 0; k < SAMPLE_EACH; k += 4) {
        const int i = element_of(k);
        if (aligned && i + 4 <= n) {
            const float4 four = *(const float4 *)(const void *)(x + i);
            v[k] = four.x, v[k + 1] = four.y, v[k + 2] = four.z, v[k + 3] = four.w;
        } else {
            UNROLL
            for (int j = k; j < k + 4; j++) v[j] = i + j - k < n ? x[i + j - k] : NAN;
        }
    }
}

static __device__ void store_elements(float *x, const float v[SAMPLE_EACH], int n)
{
    UNROLL
    for (int k = 0; k < SAMPLE_EACH; k += 4) { /* x is of the scratch: aligned */
        const int i = element_of(k);
        if (i + 4 <= n) {
            *(float4 *)(void *)(x + i) = make_float4(v[k], v[k + 1], v[k + 2], v[k + 3]);
        } else {
            UNROLL
            for (int j = k; j < k + 4; j++)
                if (i + j - k < n) x[i + j - k] = v[j];
        }
    }
}

/* Larger for a larger number, the same for both zeros; never 0. Not of NaN. */
static __device__ __forceinline__ unsigned ordered_bits(float v)
{
    const unsigned bits = v == 0 ? 0 : __float_as_uint(v);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
static __device__ __forceinline__ float of_ordered_bits(unsigned bits)
{
    return __uint_as_float(bits & 0x80000000u ? bits & 0x7fffffffu : ~bits);
}

static __device__ __forceinline__ sample_key key_of(float v, int id)
{
    return isnan(v) ? 0 : (sample_key)ordered_bits(v) << 32 | (0xffffffffu - (unsigned)id);
}
static __device__ __forceinline__ int32_t id_of(sample_key key)
{
    return (int32_t)(0xffffffffu - (unsigned)key);
}
static __device__ __forceinline__ float value_of(sample_key key)
{
    return of_ordered_bits((unsigned)(key >> 32));
}

static __device__ __forceinline__ sample_key warp_best_key(sample_key key)
{
    const unsigned high = __reduce_max_sync(0xffffffffu, (unsigned)(key >> 32));
    return (sample_key)high << 32 |
           __reduce_max_sync(0xffffffffu, (unsigned)(key >> 32) == high ? (unsigned)key : 0u);
}

/* e^x of kernels/exp.h, operation by operation, with the same bits. Nothing here may be fused
 * differently. */
static __device__ __forceinline__ float exp_as_host(float x)
{
    if (x < EXP_MIN) return 0;
    if (x > EXP_MAX) x = EXP_MAX;
    const float t = __fmaf_rn(x, EXP_LOG2E, EXP_ROUND), n = __fsub_rn(t, EXP_ROUND);
    const float r = __fmaf_rn(n, -EXP_LN2_LO, __fmaf_rn(n, -EXP_LN2_HI, x));
    float p = __fmaf_rn(EXP_C6, r, EXP_C5);
    p = __fmaf_rn(p, r, EXP_C4);
    p = __fmaf_rn(p, r, EXP_C3);
    p = __fmaf_rn(p, r, EXP_C2);
    const float e = __fadd_rn(__fmaf_rn(__fmul_rn(r, r), p, r), 1.0f);
    return __fmul_rn(e, __uint_as_float((__float_as_uint(t) << 23) + 0x3f800000u));
}

#endif
