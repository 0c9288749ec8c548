/* simt_vectors.h - CUDA's small vectors: dim3, int2, float4, ... with their sizes and alignments,
 * and make_*. Empty for C. */
#ifndef BATON_TESTS_SIMT_SIMT_VECTORS_H
#define BATON_TESTS_SIMT_SIMT_VECTORS_H

#ifdef __cplusplus
struct uint3 {
    unsigned x, y, z;
};

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
    constexpr operator uint3() const { return { x, y, z }; }
};

/* SIMT_VECTORS(name, element): name1 to name4; two and four elements are aligned to their size, up
 * to 16 bytes. */
#define SIMT_VECTORS(n, T)                                                                         \
    struct n##1 { T x; };                                                                          \
    struct alignas(2 * sizeof(T)) n##2 { T x, y; };                                                \
    struct alignas(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) n##4 { T x, y, z, w; };                \
    static inline constexpr n##1 make_##n##1(T x) { return { x }; }                                \
    static inline constexpr n##2 make_##n##2(T x, T y) { return { x, y }; }                        \
    static inline constexpr n##4 make_##n##4(T x, T y, T z, T w) { return { x, y, z, w }; }
#define SIMT_VECTOR3(n, T)                                                                         \
    struct n##3 { T x, y, z; };                                                                    \
    static inline constexpr n##3 make_##n##3(T x, T y, T z) { return { x, y, z }; }

SIMT_VECTORS(char, signed char)
SIMT_VECTORS(uchar, unsigned char)
SIMT_VECTORS(short, short)
SIMT_VECTORS(ushort, unsigned short)
SIMT_VECTORS(int, int)
SIMT_VECTORS(uint, unsigned)
SIMT_VECTORS(longlong, long long)
SIMT_VECTORS(ulonglong, unsigned long long)
SIMT_VECTORS(float, float)
SIMT_VECTORS(double, double)
SIMT_VECTOR3(char, signed char)
SIMT_VECTOR3(uchar, unsigned char)
SIMT_VECTOR3(short, short)
SIMT_VECTOR3(ushort, unsigned short)
SIMT_VECTOR3(int, int)
SIMT_VECTOR3(float, float)
SIMT_VECTOR3(double, double)
static inline constexpr uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return { x, y, z }; }
#undef SIMT_VECTORS
#undef SIMT_VECTOR3
#endif
#endif
