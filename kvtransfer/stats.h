/* stats.h - the metrics of a kvt. Created before the transfer thread, updated by it; all calls accept a registry that is absent. */
#ifndef BATON_KVTRANSFER_STATS_H
#define BATON_KVTRANSFER_STATS_H

#include "shared/base/metrics.h"

enum kvt_direction { KVT_SENT_OUT, KVT_TAKEN_IN };

struct kvt_stats;

/* `m` may be NULL (then nothing is counted); kept until free. */
struct kvt_stats *kvt_stats_create(struct metrics *m);
void              kvt_stats_free(struct kvt_stats *s);
void              kvt_stats_bytes(struct kvt_stats *s, const char *transport, enum kvt_direction d, uint64_t bytes);
void              kvt_stats_done(struct kvt_stats *s, const char *transport, enum kvt_direction d, uint64_t ns);
void              kvt_stats_failed(struct kvt_stats *s, enum kvt_direction d, enum status reason);
void              kvt_stats_checksum_failed(struct kvt_stats *s);
void              kvt_stats_fence_wait(struct kvt_stats *s);
void              kvt_stats_gauges(struct kvt_stats *s, uint32_t n_sends, uint32_t n_recvs, uint32_t n_quarantined);

#endif
