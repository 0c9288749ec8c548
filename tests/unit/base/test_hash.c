/* test_hash.c - hashes and random numbers against published vectors. */
#include <string.h>

#define XXH_STATIC_LINKING_ONLY
#include <xxhash.h>

#include "shared/base/hash/hash.h"
#include "shared/base/hash/hash_isa.h"
#include "shared/base/rng.h"
#include "tests/harness/test.h"

static void check_hex(const uint8_t *got, const char *want)
{
    char hex[65];
    for (int i = 0; i < 32; i++) {
        hex[2 * i] = "0123456789abcdef"[got[i] >> 4];
        hex[2 * i + 1] = "0123456789abcdef"[got[i] & 15];
    }
    hex[64] = 0;
    CHECK_EQ_STR(hex, want);
}

TEST(hash_xxh3_of_nothing)
{
    CHECK(hash_64("", 0, 0) == 0x2D06800538D394C2u);
    struct hash128 h = hash_128("", 0);
    CHECK(h.hi == 0x99AA06D3014798D8u && h.lo == 0x6001C324468D497Fu);
    CHECK(hash_64("abc", 3, 0) != hash_64("abc", 3, 1));
}

static void check_same_as_library(uint64_t (*hash)(const void *, size_t, uint64_t))
{
    static uint8_t bytes[40000];
    for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (uint8_t)(i * 2654435761u >> 13);
    for (size_t n = 0; n < 3000; n += n < 300 ? 1 : 37)
        for (size_t at = 0; at < 3; at++) {
            CHECK(hash(bytes + at, n, 0) == XXH3_64bits_withSeed(bytes + at, n, 0));
            CHECK(hash(bytes + at, n, 99) == XXH3_64bits_withSeed(bytes + at, n, 99));
        }
    for (size_t n = sizeof bytes - 70; n <= sizeof bytes; n++)
        CHECK(hash(bytes, n, 0) == XXH3_64bits_withSeed(bytes, n, 0));
}

TEST(hash_is_that_of_the_library) { check_same_as_library(hash_64); }

TEST(hash_avx2_is_that_of_the_library)
{
#if HASH_ISA
    if (!__builtin_cpu_supports("avx2")) SKIP("this CPU has no AVX2");
    check_same_as_library(hash_64_avx2);
#else
    SKIP("x86-64 only");
#endif
}

TEST(hash_avx512_is_that_of_the_library)
{
#if HASH_ISA
    if (!__builtin_cpu_supports("avx512f")) SKIP("this CPU has no AVX-512");
    check_same_as_library(hash_64_avx512);
#else
    SKIP("x86-64 only");
#endif
}

typedef void each_fn(const void *const *inputs, size_t n_inputs, size_t n, uint64_t *out);

/* Groups of every size, every length up to past two blocks of XXH3, odd addresses; a bit that flips
 * changes the value of its own input only. */
static void check_each(each_fn *each)
{
    enum { INPUTS = 11, LENGTH_MAX = 2 * 1024 + 70 };
    static uint8_t bytes[INPUTS * 200 + LENGTH_MAX];
    const void *inputs[INPUTS];
    uint64_t out[INPUTS + 1];
    for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (uint8_t)(i * 2654435761u >> 13);
    for (size_t i = 0; i < INPUTS; i++) inputs[i] = bytes + (i * 5 % INPUTS) * 199;
    for (size_t n = 0; n <= LENGTH_MAX; n++) {
        size_t n_inputs = n % (INPUTS + 1);
        out[n_inputs] = 77;
        each(inputs, n_inputs, n, out);
        CHECK(out[n_inputs] == 77);
        for (size_t i = 0; i < n_inputs; i++)
            CHECK(out[i] == XXH3_64bits_withSeed(inputs[i], n, 0));
    }
    uint64_t before[INPUTS];
    static uint8_t apart[INPUTS][4096];
    for (size_t i = 0; i < INPUTS; i++) inputs[i] = memset(apart[i], (int)i, sizeof apart[i]);
    each(inputs, INPUTS, sizeof apart[0], before);
    for (size_t i = 0; i < INPUTS; i++) {
        apart[i][i * 409] ^= 16;
        each(inputs, INPUTS, sizeof apart[0], out);
        for (size_t j = 0; j < INPUTS; j++) CHECK((out[j] == before[j]) == (i != j));
        apart[i][i * 409] ^= 16;
    }
}

TEST(hash_of_each_is_that_of_one)
{
    check_each(hash_64_each);
#if HASH_ISA
    if (__builtin_cpu_supports("avx2")) check_each(hash_64_each_avx2);
    if (__builtin_cpu_supports("avx512f")) check_each(hash_64_each_avx512);
#endif
}

TEST(hash_block_is_the_hash_of_parent_then_tokens)
{
    struct hash128 parent = hash_128("seed", 4);
    int32_t tokens[128];
    for (int i = 0; i < 128; i++) tokens[i] = i * 37 - 5;
    for (size_t n = 0; n <= 128; n += 16) {
        unsigned char joined[16 + sizeof tokens];
        memcpy(joined, &parent.lo, 8);
        memcpy(joined + 8, &parent.hi, 8);
        memcpy(joined + 16, tokens, n * 4);
        CHECK(hash128_eq(hash_block(parent, tokens, n), hash_128(joined, 16 + n * 4)));
    }
    struct hash128 other = { parent.lo, parent.hi + 1 };
    CHECK(!hash128_eq(hash_block(parent, tokens, 64), hash_block(other, tokens, 64)));
}

TEST(hash_sha256_and_hmac_vectors)
{
    uint8_t out[32], key[20];
    sha256("abc", 3, out); /* FIPS 180-4 */
    check_hex(out, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    memset(key, 0x0b, sizeof key); /* RFC 4231, test cases 1 and 2 */
    hmac_sha256(key, sizeof key, "Hi There", 8, out);
    check_hex(out, "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
    hmac_sha256("Jefe", 4, "what do ya want for nothing?", 28, out);
    check_hex(out, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    hmac_sha256(NULL, 0, NULL, 0, out);
    check_hex(out, "b613679a0814d9ec772f95d778c35fc5ff1697c493715653c6c712144292c5ad");
}

TEST(hash_constant_time_compare_and_random_bytes)
{
    CHECK(equal_constant_time("abcd", "abcd", 4));
    CHECK(!equal_constant_time("abcd", "abce", 4));
    CHECK(equal_constant_time(NULL, NULL, 0));
    uint8_t a[600] = { 0 }, b[600] = { 0 };
    random_bytes(a, sizeof a);
    random_bytes(b, sizeof b);
    CHECK(memcmp(a, b, sizeof a) != 0);
}

static void check_philox(uint64_t key, uint64_t hi, uint64_t lo, uint32_t w0, uint32_t w1,
                         uint32_t w2, uint32_t w3)
{
    uint32_t out[4];
    rng_philox(key, hi, lo, out);
    CHECK(out[0] == w0 && out[1] == w1 && out[2] == w2 && out[3] == w3);
}

TEST(rng_philox_known_answers)
{
    check_philox(0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8);
    check_philox(UINT64_MAX, UINT64_MAX, UINT64_MAX, 0x408f276d, 0x41c83b0e, 0xa20bc7c6,
                 0x6d5451fd);
    check_philox(0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88, 0xd16cfe09, 0x94fdcceb,
                 0x5001e420, 0x24126ea1);
}

TEST(rng_uniform_is_in_range_and_even)
{
    double sum = 0, sum_squares = 0;
    int n = 100000;
    for (int i = 0; i < n; i++) {
        double u = rng_uniform(7, 1, (uint64_t)i);
        CHECK(u >= 0 && u < 1);
        sum += u;
        sum_squares += u * u;
    }
    CHECK_NEAR(sum / n, 0.5, 0.005);
    CHECK_NEAR(sum_squares / n, 1.0 / 3, 0.005);
    CHECK(rng_uniform(7, 1, 3) == rng_uniform(7, 1, 3));
}

TEST_MAIN(CASE(hash_xxh3_of_nothing), CASE(hash_is_that_of_the_library),
          CASE(hash_avx2_is_that_of_the_library), CASE(hash_avx512_is_that_of_the_library),
          CASE(hash_of_each_is_that_of_one), CASE(hash_block_is_the_hash_of_parent_then_tokens),
          CASE(hash_sha256_and_hmac_vectors), CASE(hash_constant_time_compare_and_random_bytes),
          CASE(rng_philox_known_answers), CASE(rng_uniform_is_in_range_and_even))
