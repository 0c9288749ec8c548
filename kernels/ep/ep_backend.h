/* ep_backend.h - what the backends of ep.h share on the host: sizes of rows in transit, the base
 * object, the handshake with other ranks. Thread: as ep.h. */
#ifndef BATON_KERNELS_EP_EP_BACKEND_H
#define BATON_KERNELS_EP_EP_BACKEND_H

#include "kernels/ep/ep.h"

/* A row in transit: elements, zeros, scales, then its origin, padded to a multiple of 128 bytes. */
struct ep_row_layout {
    size_t row_bytes, scales_at /* 0: none */, tail_at; /* a multiple of 8; tail: int32 sending
                                                         * rank, int32 row * n_used + choice */
    size_t back_bytes;                                  /* of a returned result, a multiple of
                                                         * 16 */
};

struct ep_row_layout ep_row_layout_of(const struct ep_config *c);
/* Bytes of a row without its origin, a multiple of 128. Sets *scales_at, 0: none. */
size_t ep_row_bytes(const struct ep_config *c, size_t *scales_at);

/* Whether the ranks' experts are 0 to n_physical - 1 in order, and every map has every expert. */
enum status ep_placement_check(const struct ep_placement *p, int32_t size,
                               struct err *err) MUST_CHECK;
/* Experts of the rank that has most. */
size_t ep_most_local(const struct ep_placement *p, int32_t size);
/* Replaces the arrays of e->config.placement, which have been checked, by copies, and makes
 * e->copies and e->physical. */
void ep_placement_own(struct ep *e);
void ep_placement_release(struct ep *e);

/* The physical experts that take this rank's rows in the running plan: experts, chosen [n_rows,
 * n_used]. Returns where `experts` has one that there is not; -1: nowhere. */
int64_t ep_choose_copies(const struct ep *e, const int32_t *experts, int32_t *chosen);

/* Initialises e with a copy of `c` and its arrays. */
void ep_init(struct ep *e, const struct ep_ops *ops, const struct ep_config *c);
void ep_release(struct ep *e);

/* Rows that one rank can send to another, and that one rank can receive. */
size_t ep_pair_slots(const struct ep_config *c);
size_t ep_max_slots(const struct ep_config *c);

enum { EP_PAYLOAD_BYTES = 128 };

/* What ranks exchange in the handshake. */
struct ep_hello {
    int32_t status, rank;
    uint64_t config_hash; /* hash of the configuration */
    unsigned char payload[EP_PAYLOAD_BYTES];
};

/* Handshake of all ranks: each reports its status and a payload (NULL: none). hellos [size]. OK if
 * all are OK and their configurations agree; a `mine` that is not OK is returned with err as it
 * is. */
enum status ep_handshake(struct ep *e, enum status mine, const void *payload, size_t bytes,
                         struct ep_hello *hellos, struct err *err) MUST_CHECK;

/* Whether ep_abort was called. Any thread. */
bool ep_is_aborted(const struct ep *e);
/* For backends that read nothing in place, and for those whose calls never wait or look at
 * ep_is_aborted while they do. */
struct ep_places ep_no_places(const struct ep *e);
/* For backends that return nothing before ep_combine_end. */
enum status ep_return_nothing(struct ep *e, const struct ep_combine_args *a,
                              struct err *err) MUST_CHECK;
/* For backends on the CPU, whose calls say themselves what they found. */
enum status ep_found_nothing(struct ep *e, struct err *err) MUST_CHECK;
void ep_abort_nothing(struct ep *e);

extern const struct ep_ops ep_self_ops, ep_shm_ops;
/* In builds with UCX. */
extern const struct ep_ops ep_ucx_ops;

/* In builds with GPU kernels. */
extern const struct ep_ops ep_cuda_self_ops, ep_peer_ops;
/* In builds that also have NCCL's header. */
extern const struct ep_ops ep_nccl_ops;
int ep_nccl_find(void);

#endif
