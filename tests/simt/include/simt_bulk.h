/* simt_bulk.h - clusters of blocks, and the copies of boxes of a tensor to shared memory that may go
 * to several blocks of one (cp.async.bulk.tensor, .multicast::cluster).
 *
 * Part of simt.h; in a kernel, but for simt_tensor_map_rows. Misuse ends the process with a
 * sentence. Sources: PTX ISA, barrier.cluster, mapa, mbarrier, cp.async.bulk.tensor. */
#ifndef BATON_TESTS_SIMT_INCLUDE_SIMT_BULK_H
#define BATON_TESTS_SIMT_INCLUDE_SIMT_BULK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

unsigned simt_cluster_rank(void);
/* barrier.cluster, arrive and wait, of all threads of the cluster that have not returned. */
void simt_cluster_sync(void);
/* fence.mbarrier_init: without it after simt_mbarrier_init, and a simt_cluster_sync, no other block
 * may arrive at the barrier. */
void simt_fence_mbarrier_init(void);
/* mbarrier.arrive at what block `rank` has at this address of its own. That block must not have
 * ended. */
void simt_mbarrier_arrive_at(void *barrier, unsigned rank);
/* mbarrier.arrive.expect_tx: the phase also waits for so many bytes, which may have come before. */
void simt_mbarrier_expect(void *barrier, unsigned bytes);

/* Bytes [n_groups][n_rows][row_bytes] from `base` on, groups and rows some bytes apart, of which
 * boxes of 128 bytes of `box_rows` rows of a group are copied. False where the driver would refuse
 * it: what is not aligned to 16, 2^40 bytes or more from a group to the next, no or more than 256
 * rows of a box. Thread: any. */
struct simt_tensor_map {
    const char *base;
    size_t row_bytes, group_stride;
    int n_rows, n_groups, box_rows;
    unsigned magic;
};
bool simt_tensor_map_rows(struct simt_tensor_map *map, const void *base, size_t row_bytes,
                          int n_rows, size_t group_stride, int n_groups, int box_rows);
enum { SIMT_BOX_BYTES = 128 /* of a row */ };

/* Copies the box that begins at byte `byte` of row `row` of group `group`: its rows lie behind each
 * other, with the 128-byte swizzle (simt_sm90.h); what lies outside of the tensor is zero. mask: the
 * blocks of the cluster to whose shared memory it is copied, to the same place of each; 0: this one,
 * which needs no cluster. The targets hold garbage, until somebody has waited at the barrier in the
 * same place of their block, which gets the bytes. wgmma of a thread that has waited there may read
 * them, without a fence. */
void simt_bulk_copy(const struct simt_tensor_map *map, void *to, void *barrier, int byte, int row,
                    int group, unsigned mask);

#ifdef __cplusplus
}
#endif
#endif
