/* cpu_features.c - cpuid, and xgetbv for what depends on the operating system.
 *
 * A CPU with AVX-512 under a system that does not save zmm registers must not run that backend:
 * XCR0 says which register states are saved on a context switch. Bit numbers are those of the Intel
 * and AMD manuals. Thread: any. */
#include "kernels/cpu/cpu_features.h"

#include <cpuid.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernels/backend.h"
#include "shared/base/mem.h"

enum { XCR0_YMM = 0x6, XCR0_ZMM = 0xe6, XCR0_AMX = 0x60000 };
/* Linux enables the 8 KiB of tile registers on request (Documentation/arch/x86/xstate.rst). */
enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_TILES = 18 };

static uint32_t read_xcr0(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

static bool bit(uint32_t word, int n) { return (word >> n & 1) != 0; }

void cpu_features_read(struct cpu_features *out)
{
    uint32_t a, b, c, d;
    memset(out, 0, sizeof *out);
    /* 27: OSXSAVE, xgetbv may be used */
    if (!__get_cpuid(1, &a, &b, &c, &d) || !bit(c, 27)) return;
    uint32_t xcr0 = read_xcr0();
    bool ymm = (xcr0 & XCR0_YMM) == XCR0_YMM && bit(c, 28);
    bool zmm = ymm && (xcr0 & XCR0_ZMM) == XCR0_ZMM;
    out->fma = ymm && bit(c, 12);
    out->f16c = ymm && bit(c, 29);
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    out->avx2 = ymm && bit(b, 5);
    out->avx512f = zmm && bit(b, 16);
    out->avx512dq = zmm && bit(b, 17);
    out->avx512bw = zmm && bit(b, 30);
    out->avx512vl = zmm && bit(b, 31);
    out->avx512_vnni = zmm && bit(c, 11);
    bool tiles = zmm && (xcr0 & XCR0_AMX) == XCR0_AMX && bit(d, 24);
    out->amx_tile = tiles;
    out->amx_bf16 = tiles && bit(d, 22);
    out->amx_int8 = tiles && bit(d, 25);
    if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) out->avx512_bf16 = zmm && bit(a, 5);
}

bool cpu_supports_avx2(void)
{
    struct cpu_features f;
    cpu_features_read(&f);
    return f.avx2 && f.fma && f.f16c;
}

bool cpu_supports_avx512(void)
{
    struct cpu_features f;
    cpu_features_read(&f);
    return cpu_supports_avx2() && f.avx512f && f.avx512bw && f.avx512vl && f.avx512dq;
}

bool cpu_supports_vnni(void)
{
    struct cpu_features f;
    cpu_features_read(&f);
    return cpu_supports_avx512() && f.avx512_vnni;
}

bool cpu_supports_bf16(void)
{
    struct cpu_features f;
    cpu_features_read(&f);
    return cpu_supports_vnni() && f.avx512_bf16;
}

bool cpu_supports_amx(void)
{
    struct cpu_features f;
    cpu_features_read(&f);
    return cpu_supports_bf16() && f.amx_int8 && f.amx_bf16 &&
           syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_TILES) == 0;
}

void kernel_cpu_features(char *out, size_t cap)
{
    struct cpu_features f;
    cpu_features_read(&f);
    const struct {
        bool has;
        const char *name;
    } names[] = {
        { f.avx2, "avx2" },
        { f.fma, "fma" },
        { f.f16c, "f16c" },
        { f.avx512f, "avx512f" },
        { f.avx512bw, "avx512bw" },
        { f.avx512vl, "avx512vl" },
        { f.avx512dq, "avx512dq" },
        { f.avx512_vnni, "avx512_vnni" },
        { f.avx512_bf16, "avx512_bf16" },
        { f.amx_tile, "amx_tile" },
        { f.amx_int8, "amx_int8" },
        { f.amx_bf16, "amx_bf16" },
    };
    size_t len = 0;
    if (cap == 0) return;
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        size_t n = strlen(names[i].name);
        if (!names[i].has || len + n + 2 > cap) continue;
        if (len) out[len++] = ' ';
        memcpy(out + len, names[i].name, n);
        len += n;
    }
    out[len] = 0;
}
