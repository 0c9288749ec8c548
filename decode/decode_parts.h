/* decode_parts.h - the KV transfers of one sequence, or of the blocks that one fetches
 * (kv_fetch.h): a part for each pair of ranks of the sending node and this one that share heads
 * (shared/kv/kv_parts.h).
 *
 * The leader expects its own parts and asks each follower for the grants of its parts. A part is
 * open until RECEIVED or FENCED: then no write can reach its blocks any more. The blocks have the
 * same numbers on all ranks, so they go back when no part of any rank is open.
 * Thread: loop. Owner: decode_seq or kv_fetch. */
#ifndef BATON_DECODE_DECODE_PARTS_H
#define BATON_DECODE_DECODE_PARTS_H

#include "kvtransfer/kvtransfer.h"
#include "shared/base/mem.h"
#include "shared/cluster/group.h"
#include "shared/cluster/proto/node.pb-c.h"
#include "shared/kv/kv_parts.h"

/* This node's ranks, borrowed from decode_worker. */
struct decode_ranks {
    struct kvt *kvt;
    struct cluster *cluster;
    struct kv_layout layout;               /* of the leader's pool */
    struct group_member all[KV_RANKS_MAX]; /* by rank; all[0] is this process */
    uint32_t n;
};

/* Where the KV will come. The blocks have the same numbers on all ranks. */
struct decode_room {
    const int32_t *blocks; /* [n_blocks], borrowed for the call */
    uint32_t n_blocks;
    uint32_t n_skip; /* of them hold their KV already */
    uint32_t n_tokens;
};

struct decode_parts {
    struct kv_parts plan;
    struct str grants[KV_PARTS_MAX]; /* in `arena`; n 0: not here yet */
    struct arena arena;              /* released with the grants, once those are on their way */
    uint32_t open, received;         /* bit i: part i */
    uint64_t bytes, ns, link_speed;  /* bytes of all parts; the other two of the slowest */
    const char *transport;           /* of the slowest part; static */
};

void decode_parts_init(struct decode_parts *p);
void decode_parts_release(struct decode_parts *p);
/* Makes the grants of this rank, and asks the followers for theirs. `n_senders`: ranks of the
 * sending node. After a failure, too, the open parts must be cancelled. */
enum status decode_parts_expect(struct decode_parts *p, const struct decode_ranks *ranks,
                                uint64_t id, uint64_t spread, uint32_t n_senders,
                                const struct decode_room *room, struct err *err) MUST_CHECK;
/* A follower's grants came. ERR_FORMAT: not as many as were asked for. */
enum status decode_parts_take_grants(struct decode_parts *p, const struct decode_ranks *ranks,
                                     const struct cluster_message *m) MUST_CHECK;
bool decode_parts_are_granted(const struct decode_parts *p);
/* The [p->plan.n] parts of a message, in the arena of `p`. */
Baton__KvPart **decode_parts_write(struct decode_parts *p);
/* Cancels what is open: FENCED follows for each of it. */
void decode_parts_cancel(struct decode_parts *p, const struct decode_ranks *ranks, uint64_t id);
/* Bits of the parts that a rank receives. */
uint32_t decode_parts_of_rank(const struct decode_parts *p, uint32_t rank);
/* Notes an event of one part; false: that part is not open, so it is an echo. */
bool decode_parts_on_kvt(struct decode_parts *p, const struct kvt_event *ev);
/* A follower is lost, and with it its pool: its parts are over. False: none was open. */
bool decode_parts_on_lost(struct decode_parts *p, uint32_t rank);
bool decode_parts_are_received(const struct decode_parts *p);
/* The rank above 0 whose process this is; 0: none. */
uint32_t decode_ranks_find(const struct decode_ranks *ranks, uint64_t process);

#endif
