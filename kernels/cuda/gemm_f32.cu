/* gemm_f32.cu - products of f32 by f32: the exact path, in plain fused multiply-adds.
 *
 * Every sum is one chain of fmas over k ascending, from +0, then + bias: the definition in kernels/kernels.h, whatever the shape of the tile.
 * Tiles of W and x lie in shared memory with k as the slow index; those of the next K elements are under way in registers meanwhile.
 * Bound by fma for many rows; for few by how much of W can be under way at a time, some way below what memory gives: it is there to compare
 * with. Thread: device; gemm_f32: engine. */
#include "kernels/cuda/gemm_call.cuh"

/* ROWS by COLUMNS of y a block, PER_ROWS by PER_COLUMNS a thread, K elements at a time. */
template <int ROWS_, int COLUMNS_, int PER_ROWS_, int PER_COLUMNS_, int K_> struct f32_tile {
    enum {
        ROWS = ROWS_, COLUMNS = COLUMNS_, PER_ROWS = PER_ROWS_, PER_COLUMNS = PER_COLUMNS_, K = K_,
        THREADS = ROWS / PER_ROWS * (COLUMNS / PER_COLUMNS), ACROSS = COLUMNS / PER_COLUMNS,
        X_LOADS = (ROWS * K + THREADS - 1) / THREADS, W_LOADS = COLUMNS * K / 4 / THREADS,
        X_PITCH = ROWS + 2, W_PITCH = COLUMNS + 2 /* lanes that store a piece of a row then meet in few banks */
    };
    static_assert(COLUMNS * K / 4 % THREADS == 0, "all threads load as much of W");
    static_assert(PER_COLUMNS % 2 == 0 && THREADS % K == 0, "pairs of columns; a thread loads one k of x");
};

template <class T> struct f32_shared {
    float x[T::K][T::X_PITCH], w[T::K][T::W_PITCH];
};

/* What a thread has under way. */
template <class T> struct f32_next {
    float  x[T::X_LOADS];
    float4 w[T::W_LOADS];
};

template <class T> struct f32_source {
    const float *x[T::X_LOADS]; /* NULL: zeros */
    const float *w[T::W_LOADS];
};

template <class T>
static __device__ __forceinline__ void find_source(f32_source<T> *s, const gemm_call &c, const gemm_rows &rows, int32_t first_column)
{
    const int tid = (int)threadIdx.x;
    for (int i = 0; i < T::X_LOADS; i++) {
        const int row = (tid + i * T::THREADS) / T::K;
        s->x[i] = row < T::ROWS && row < rows.n ? (const float *)c.x + x_row(c, rows, row) : nullptr;
    }
    const unsigned char *w = c.w + (size_t)rows.group * c.w_stride;
    for (int i = 0; i < T::W_LOADS; i++) {
        const int32_t column = first_column + (tid + i * T::THREADS) / (T::K / 4);
        s->w[i] = column < c.n_out ? (const float *)(w + (size_t)column * c.row_bytes) : nullptr;
    }
}

template <class T> static __device__ __forceinline__ void load_next(f32_next<T> *to, const f32_source<T> &s, const gemm_call &c, int32_t k)
{
    const int tid = (int)threadIdx.x;
    const int32_t k_x = k + tid % T::K, k_w = k + tid % (T::K / 4) * 4;
    for (int i = 0; i < T::X_LOADS; i++) to->x[i] = s.x[i] && k_x < c.n_in ? s.x[i][k_x] : 0.0f;
    for (int i = 0; i < T::W_LOADS; i++)
        to->w[i] = s.w[i] && k_w < c.n_in_filled ? *(const float4 *)(s.w[i] + k_w) : make_float4(0, 0, 0, 0);
}

template <class T> static __device__ __forceinline__ void store_next(f32_shared<T> *to, const f32_next<T> &from)
{
    const int tid = (int)threadIdx.x;
    for (int i = 0; i < T::X_LOADS; i++) {
        const int row = (tid + i * T::THREADS) / T::K;
        if (row < T::ROWS) to->x[tid % T::K][row] = from.x[i];
    }
    for (int i = 0; i < T::W_LOADS; i++) {
        const int column = (tid + i * T::THREADS) / (T::K / 4), k = tid % (T::K / 4) * 4;
        to->w[k][column] = from.w[i].x;
        to->w[k + 1][column] = from.w[i].y;
        to->w[k + 2][column] = from.w[i].z;
        to->w[k + 3][column] = from.w[i].w;
    }
}

template <class T> static __device__ __forceinline__ void multiply_k(float sums[T::PER_ROWS][T::PER_COLUMNS], const f32_shared<T> &in, int k)
{
    const int row = (int)threadIdx.x / T::ACROSS * T::PER_ROWS, column = (int)threadIdx.x % T::ACROSS * T::PER_COLUMNS;
    float w[T::PER_COLUMNS];
#pragma unroll
    for (int j = 0; j < T::PER_COLUMNS; j += 2) {
        const float2 two = *(const float2 *)&in.w[k][column + j];
        w[j] = two.x, w[j + 1] = two.y;
    }
#pragma unroll
    for (int i = 0; i < T::PER_ROWS; i++)
#pragma unroll
        for (int j = 0; j < T::PER_COLUMNS; j++) sums[i][j] = __fmaf_rn(w[j], in.x[k][row + i], sums[i][j]);
}

/* The last elements of k are counted: fma with zeros would make +0 of a sum that is -0. */
template <class T> static __device__ __forceinline__ void multiply(float sums[T::PER_ROWS][T::PER_COLUMNS], const f32_shared<T> &in, int32_t n_k)
{
    if (n_k >= T::K) {
#pragma unroll
        for (int k = 0; k < T::K; k++) multiply_k<T>(sums, in, k);
    } else {
        for (int k = 0; k < n_k; k++) multiply_k<T>(sums, in, k);
    }
}

template <class T> static __global__ void __launch_bounds__(T::THREADS) f32_kernel(const gemm_call c)
{
    __shared__ __align__(16) f32_shared<T> in;
    const gemm_rows rows = rows_of_tile(c, (int32_t)blockIdx.x, T::ROWS);
    if (rows.n == 0) return;
    const int32_t first_column = (int32_t)blockIdx.y * T::COLUMNS;
    f32_source<T> source;
    f32_next<T> next;
    float sums[T::PER_ROWS][T::PER_COLUMNS] = {};
    find_source<T>(&source, c, rows, first_column);
    load_next<T>(&next, source, c, 0);
    for (int32_t k = 0; k < c.n_in; k += T::K) {
        __syncthreads();
        store_next<T>(&in, next);
        __syncthreads();
        if (k + T::K < c.n_in) load_next<T>(&next, source, c, k + T::K);
        multiply<T>(sums, in, c.n_in - k);
    }
    const int32_t row = (int32_t)threadIdx.x / T::ACROSS * T::PER_ROWS, column = first_column + (int32_t)threadIdx.x % T::ACROSS * T::PER_COLUMNS;
    for (int i = 0; i < T::PER_ROWS; i++)
        for (int j = 0; j < T::PER_COLUMNS; j += 2)
            if (row + i < rows.n && column + j < c.n_columns) put_pair(c, rows, row + i, column + j, sums[i][j], sums[i][j + 1]);
}

template <class T> static cudaError_t run(cudaStream_t stream, const gemm_call &c)
{
    return launch(stream, f32_kernel<T>, dim3(n_tiles_at_most(c, T::ROWS), blocks_for((size_t)c.n_columns, T::COLUMNS)), dim3(T::THREADS), 0, c);
}

cudaError_t gemm_f32(cudaStream_t stream, const struct gemm_call *c)
{
    if (blocks_for((size_t)c->n_rows, (size_t)c->n_groups) <= 16) return run<f32_tile<8, 64, 1, 2, 32>>(stream, *c);
    return run<f32_tile<64, 64, 4, 4, 16>>(stream, *c);
}
