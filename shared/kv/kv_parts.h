/* kv_parts.h - who sends which heads, between two nodes of different tensor-parallel size.
 *
 * A part is what one rank of the sender writes into one rank of the receiver: heads that lie side
 * by side. Each head of each receiving rank is in exactly one part, so the bytes of all parts are
 * those of the receiver's pools. A head that several sending ranks hold comes from the one that
 * sends the least so far. A latent, which all hold, comes from one rank for all of the receiver.
 * `spread`, a number of the request, chooses it, and the first of equal ranks.
 * Thread: any (no state). */
#ifndef BATON_KV_KV_PARTS_H
#define BATON_KV_KV_PARTS_H

#include "shared/kv/kv_layout.h"

/* Ranks of n and m make at most n + m parts where heads are cut evenly. */
enum { KV_RANKS_MAX = 16, KV_PARTS_MAX = 2 * KV_RANKS_MAX };

/* Ids of what moves in parts are multiples of KV_PARTS_MAX; part i has the id that is i more. */
static inline uint64_t kv_parts_id(uint64_t serial) { return serial * KV_PARTS_MAX; }
static inline uint64_t kv_part_owner(uint64_t id) { return id & ~(uint64_t)(KV_PARTS_MAX - 1); }
static inline uint32_t kv_part_index(uint64_t id) { return (uint32_t)id & (KV_PARTS_MAX - 1); }

struct kv_part {
    uint32_t sender, receiver;    /* ranks */
    uint32_t first_head, n_heads; /* of the whole model */
};

struct kv_parts {
    uint32_t n;
    struct kv_part part[KV_PARTS_MAX]; /* by receiver, then by head */
};

/* The layout of `rank` of `size` of the model that `l` is of: heads as shared/model/share.h cuts
 * them. */
struct kv_layout kv_layout_of_rank(const struct kv_layout *l, uint32_t rank, uint32_t size);

/* Equal for nodes whose blocks have the same bytes for the same tokens, however many ranks each
 * has: of one rank it is kv_layout_hash. */
uint64_t kv_layout_hash_of_model(const struct kv_layout *l);

/* Layouts of both nodes by rank. ERR_INVALID: more ranks than KV_RANKS_MAX; ERR_PEER_MISMATCH: no
 * sender holds a head, or the parts are too many. */
enum status kv_parts_plan(const struct kv_layout *senders, uint32_t n_senders,
                          const struct kv_layout *receivers, uint32_t n_receivers, uint64_t spread,
                          struct kv_parts *out, struct err *err) MUST_CHECK;

#endif
