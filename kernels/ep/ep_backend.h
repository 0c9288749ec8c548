/* ep_backend.h - what the rows of ep.h share on the host: sizes of rows on their way, the base
 * object, meeting the other ranks. Thread: as ep.h. */
#ifndef BATON_KERNELS_EP_EP_BACKEND_H
#define BATON_KERNELS_EP_EP_BACKEND_H

#include "kernels/ep/ep.h"

/* A row as it travels: elements, zeros, scales, then where it came from, filled up to a multiple of
 * 128 bytes. */
struct ep_row_layout {
    size_t row_bytes, scales_at /* 0: none */, tail_at; /* a multiple of 8; tail: int32 sending
                                                         * rank, int32 row * n_used + choice */
    size_t back_bytes;                                  /* of a result on its way back, a multiple
                                                         * of 16 */
};

struct ep_row_layout ep_row_layout_of(const struct ep_config *c);

/* `c` copied with its arrays into e. */
void ep_init(struct ep *e, const struct ep_ops *ops, const struct ep_config *c);
void ep_release(struct ep *e);

/* Rows that one rank can send to another, and that one rank can get. */
size_t ep_pair_slots(const struct ep_config *c);
size_t ep_max_slots(const struct ep_config *c);

enum { EP_PAYLOAD_BYTES = 128 };

/* What ranks tell each other when they meet. */
struct ep_hello {
    int32_t status, rank;
    uint64_t config_hash; /* hash of the configuration */
    unsigned char payload[EP_PAYLOAD_BYTES];
};

/* Meets all ranks: each tells how it fared so far and gives a payload (NULL: none). hellos [size].
 * OK when all are well and agree; `mine` not OK comes back as it is, with what err holds. */
enum status ep_handshake(struct ep *e, enum status mine, const void *payload, size_t bytes,
                         struct ep_hello *hellos, struct err *err) MUST_CHECK;

extern const struct ep_ops ep_self_ops;

/* Where the build has kernels for cards. */
extern const struct ep_ops ep_cuda_self_ops, ep_peer_ops;
/* And where it has NCCL's header. */
extern const struct ep_ops ep_nccl_ops;
int ep_nccl_find(void);

#endif
