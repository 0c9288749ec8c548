/* stats.h - the metrics of a kvt. Created before the transfer thread, updated by it; all calls
 * accept a registry that is absent.
 *
 *   baton_kv_transfer_bytes_total{transport,direction} KV bytes moved
 *   baton_kv_transfer_seconds{transport,direction} first byte to acknowledged (send) or verified
 *   (receive) baton_kv_transfer_rate_bytes_per_second{transport,direction} the rate of each
 *   transfer: send: over the time in which bytes were under
 *                                                                  way, the figure to hold against
 *                                                                  the link; receive: over its
 *                                                                  seconds, the waiting for compute
 *                                                                  included
 *   baton_kv_link_speed_bytes_per_second{transport} what the hardware says of the last connection's
 *   link(s); 0: not known baton_kv_transfer_failures_total{direction,reason} transfers that failed;
 *   reason: kvt_failure_name below baton_kv_transfer_dropped_total{reason} messages and frames that
 *   named no live transfer of their connection:
 *                                                                  stale (that generation is over),
 *                                                                  foreign (another connection's)
 *   baton_kv_transfer_hashed_bytes_total{direction} KV bytes a checksum was made of: 0 with
 *   --kv-checksum off on either side
 *   baton_kv_transfer_converted_bytes_total                        KV bytes made in staging memory
 *                                                                  for a peer of another layout
 *   baton_kv_transfer_checksum_failures_total, _fence_waits_total,
 *   baton_kv_transfers_in_flight{direction}, _quarantined */
#ifndef BATON_KVTRANSFER_STATS_H
#define BATON_KVTRANSFER_STATS_H

#include <stdbool.h>

#include "shared/base/metrics.h"
#include "shared/base/status.h"

enum kvt_direction { KVT_DIRECTION_SEND, KVT_DIRECTION_RECEIVE };

/* What a transfer died of. */
enum kvt_failure {
    KVT_FAILED_CHECKSUM,  /* bytes in place are not the bytes that were sent */
    KVT_FAILED_STALE,     /* send: the grant was of an earlier generation, used, or another's (a
                           * receiver counts those as dropped) */
    KVT_FAILED_DUPLICATE, /* a piece was pushed or announced a second time */
    KVT_FAILED_REORDERED, /* a piece came before its predecessor */
    KVT_FAILED_TRUNCATED, /* announced or finished with bytes missing */
    KVT_FAILED_FORMAT,    /* a message or grant that makes no sense */
    KVT_FAILED_TIMEOUT,   /* nothing moved for stall_ms, or not over after deadline_ms */
    KVT_FAILED_PEER_LOST, /* the connection ended */
    KVT_FAILED_CANCELED,  /* by a caller on either side */
    KVT_FAILED_OTHER,     /* the caller's mistake, no memory, and the like: the log says what */
    KVT_FAILED_COUNT
};

struct kvt_stats;

/* `m` may be NULL (then nothing is counted); kept until free. */
struct kvt_stats *kvt_stats_create(struct metrics *m);
void kvt_stats_free(struct kvt_stats *s);
const char *kvt_failure_name(enum kvt_failure f);    /* the label: "checksum", "stale", ... */
enum kvt_failure kvt_failure_of(enum status reason); /* for those that are known by status
                                                      * alone */
void kvt_stats_bytes(struct kvt_stats *s, const char *transport, enum kvt_direction d,
                     uint64_t bytes);
void kvt_stats_done(struct kvt_stats *s, const char *transport, enum kvt_direction d,
                    uint64_t bytes, uint64_t ns, uint64_t busy_ns);
void kvt_stats_link(struct kvt_stats *s, const char *transport, uint64_t bytes_per_second);
void kvt_stats_failed(struct kvt_stats *s, enum kvt_direction d, enum kvt_failure f);
void kvt_stats_dropped(struct kvt_stats *s, bool foreign);
void kvt_stats_hashed(struct kvt_stats *s, enum kvt_direction d, uint64_t bytes);
void kvt_stats_converted(struct kvt_stats *s, uint64_t bytes);
void kvt_stats_checksum_failed(struct kvt_stats *s);
void kvt_stats_fence_wait(struct kvt_stats *s);
void kvt_stats_gauges(struct kvt_stats *s, uint32_t n_sends, uint32_t n_recvs,
                      uint32_t n_quarantined);

#endif
