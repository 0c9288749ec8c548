/* stats.h - the metrics of a kvt. kvt_stats_create registers them before the transfer thread
 * starts; that thread updates them. Every function accepts NULL, for a kvt without a registry.
 * docs/kv-transfer.md lists the metrics; stats.c has their help texts. */
#ifndef BATON_KVTRANSFER_STATS_H
#define BATON_KVTRANSFER_STATS_H

#include <stdbool.h>

#include "shared/base/metrics.h"
#include "shared/base/status.h"

enum kvt_direction { KVT_DIRECTION_SEND, KVT_DIRECTION_RECEIVE };

/* Why a transfer failed. */
enum kvt_failure {
    KVT_FAILED_CHECKSUM, /* bytes in place are not the bytes that were sent */
    /* Send: the grant was of an earlier generation, used, or another sender's (a receiver counts
     * those as dropped). */
    KVT_FAILED_STALE,
    KVT_FAILED_DUPLICATE, /* a piece was pushed or announced a second time */
    KVT_FAILED_REORDERED, /* a piece came before its predecessor */
    KVT_FAILED_TRUNCATED, /* announced or finished with bytes missing */
    KVT_FAILED_FORMAT,    /* a message or grant that makes no sense */
    KVT_FAILED_TIMEOUT,   /* nothing moved for stall_ms, or not over after deadline_ms */
    KVT_FAILED_PEER_LOST, /* the connection ended */
    KVT_FAILED_CANCELED,  /* by a caller on either side */
    KVT_FAILED_OTHER,     /* a caller's mistake, no memory, and so on: the log says what */
    KVT_FAILED_COUNT
};

struct kvt_stats;

/* `m` may be NULL, then nothing is counted; otherwise it must outlive the result. */
struct kvt_stats *kvt_stats_create(struct metrics *m);
void kvt_stats_free(struct kvt_stats *s);
/* The failure that a status stands for, if nothing more is known. */
enum kvt_failure kvt_failure_of(enum status reason);
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
