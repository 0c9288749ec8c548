/* simt_sm90.h - instructions of compute capability 9.0: barriers in shared memory, products of a
 * warpgroup, the fence of the async proxy.
 *
 * Part of simt.h. All functions are for kernels; misuse ends the process with a sentence. Sources:
 * PTX ISA, mbarrier, wgmma, "proxies". */
#ifndef BATON_TESTS_SIMT_INCLUDE_SIMT_SM90_H
#define BATON_TESTS_SIMT_INCLUDE_SIMT_SM90_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* An mbarrier of 8 aligned bytes in dynamic shared memory. A phase ends when `count` threads have
 * arrived, and the next one expects as many. try_wait.parity returns whether the phase of this
 * parity, the current or the previous one, has ended. If not, other threads have run meanwhile. */
void simt_mbarrier_init(void *barrier, unsigned count);
void simt_mbarrier_arrive(void *barrier);
bool simt_mbarrier_try_wait_parity(void *barrier, unsigned parity);

/* cp.async.mbarrier.arrive.noinc: arrives once the thread's copies so far, for which it then does
 * not wait itself, have completed. */
void simt_cp_async_mbarrier_arrive_noinc(void *barrier);

/* The address in dynamic shared memory as instructions use it. */
unsigned simt_shared_address(const void *shared);

/* fence.proxy.async: from here on wgmma can read what this thread's cp.async wrote, if the thread
 * has waited for it; and this thread's wgmma what cp.async that arrived at barriers wrote. */
void simt_fence_proxy_async(void);
/* setmaxnreg of the current warpgroup. The block ends the process if all together ask for more
 * than it was launched with. */
void simt_set_registers(unsigned n);

/* wgmma.mma_async m64nNk16 (bf16, f16) and m64nNk32 (e4m3), D (f32) = A B + (scale_d ? D : 0), both
 * operands in shared memory, k contiguous. Called by the four warps of an aligned warpgroup; warp w
 * of it has rows 16w .. 16w + 15. With g = lane / 4 and t = lane % 4 a lane has of D
 *   d[4j] (g, 8j + 2t)   d[4j + 1] (g, 8j + 2t + 1)   d[4j + 2], d[4j + 3] the same of row g + 8
 * A descriptor: bits 0-13 address / 16, 16-29 leading offset / 16, 32-45 stride offset / 16, 49-51
 * base offset, 62-63 swizzle; the 128-byte swizzle (1) is built: rows of 128 bytes, eight of them
 * an atom at a multiple of 1,024, atoms stride offset apart, and in each row bits 4-6 of the
 * address are exchanged by bits 7-9. The product takes place when its group is waited for, no
 * earlier; d holds NaNs until then. */
void simt_wgmma_fence(void);
void simt_wgmma_bf16(float *d, int n, uint64_t a, uint64_t b, int scale_d);
void simt_wgmma_f16(float *d, int n, uint64_t a, uint64_t b, int scale_d);
void simt_wgmma_e4m3(float *d, int n, uint64_t a, uint64_t b, int scale_d);
/* m64nNk16 with A in registers and B with n contiguous (imm-trans-b is 1). Of a warp's 16 rows a lane
 * has, low half first,
 *   a[0] (g, 2t), (g, 2t + 1)   a[1] the same of row g + 8   a[2], a[3] the same of k + 8
 * and row k of B has 64 columns in 128 bytes; eight rows are an atom, swizzled as above, the next
 * eight stride offset on, the next 64 columns leading offset on. */
void simt_wgmma_rows_bf16(float *d, int n, const unsigned *a, uint64_t b, int scale_d);
void simt_wgmma_commit(void);
void simt_wgmma_wait(int n_groups_left);

#ifdef __cplusplus
}
#endif
#endif
