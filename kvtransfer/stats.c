/* stats.c - names and labels of the KV transfer metrics. All are registered at start, so that a
 * reason that never happened reads 0.
 * Thread: transfer; create and free: the creator's. */
#include "kvtransfer/stats.h"

#include "kvtransfer/transport.h"
#include "shared/base/mem.h"

enum { TRANSPORTS_MAX = 8 };

struct kvt_stats {
    struct metrics *m;
    struct {
        const char *transport;
        struct counter *bytes[2];
        struct histogram *seconds[2], *rate[2];
        struct gauge *link;
    } transports[TRANSPORTS_MAX];
    struct counter *checksum_failed, *fence_waits, *failed[2][KVT_FAILED_COUNT], *dropped[2],
        *hashed[2], *converted;
    struct gauge *in_flight[2], *quarantined;
};

static const char *const DIRECTIONS[] = {
    [KVT_DIRECTION_SEND] = "send", [KVT_DIRECTION_RECEIVE] = "receive"
};

static const char *const FAILURES[KVT_FAILED_COUNT] = {
    [KVT_FAILED_CHECKSUM] = "checksum",   [KVT_FAILED_STALE] = "stale",
    [KVT_FAILED_DUPLICATE] = "duplicate", [KVT_FAILED_REORDERED] = "reordered",
    [KVT_FAILED_TRUNCATED] = "truncated", [KVT_FAILED_FORMAT] = "format",
    [KVT_FAILED_TIMEOUT] = "timeout",     [KVT_FAILED_PEER_LOST] = "peer_lost",
    [KVT_FAILED_CANCELED] = "canceled",   [KVT_FAILED_OTHER] = "other",
};

/* From a modem to 16 links of 400 Gb/s, half a decade apart. */
static const double RATES[] = { 1e4, 3e4, 1e5, 3e5,  1e6,  3e6,  1e7,  3e7, 1e8,
                                3e8, 1e9, 3e9, 1e10, 3e10, 1e11, 3e11, 1e12 };

enum kvt_failure kvt_failure_of(enum status reason)
{
    switch (reason) {
    case ERR_CHECKSUM: return KVT_FAILED_CHECKSUM;
    case ERR_STALE: return KVT_FAILED_STALE;
    case ERR_FORMAT: return KVT_FAILED_FORMAT;
    case ERR_TIMEOUT: return KVT_FAILED_TIMEOUT;
    case ERR_PEER_LOST: return KVT_FAILED_PEER_LOST;
    case ERR_CANCELED: return KVT_FAILED_CANCELED;
    default: return KVT_FAILED_OTHER;
    }
}

static char *label(struct buf *b, const char *transport, int d)
{
    buf_clear(b);
    if (transport) buf_printf(b, "transport=\"%s\",", transport);
    buf_printf(b, "direction=\"%s\"", DIRECTIONS[d]);
    return b->data;
}

/* Metrics of one transport, for both directions. */
static void register_transport(struct kvt_stats *s, size_t i, struct buf *b)
{
    struct metrics *m = s->m;
    const char *name = s->transports[i].transport = kvt_transports[i]->name;
    for (int d = 0; d < 2; d++) {
        s->transports[i].bytes[d] = metrics_counter(
            m, "baton_kv_transfer_bytes_total", label(b, name, d), "KV bytes moved between nodes.");
        s->transports[i].seconds[d] = metrics_histogram(
            m, "baton_kv_transfer_seconds", label(b, name, d),
            "First byte to acknowledged (send) or verified (receive) of one transfer.",
            METRICS_SECONDS, METRICS_SECONDS_N);
        s->transports[i].rate[d] = metrics_histogram(
            m, "baton_kv_transfer_rate_bytes_per_second", label(b, name, d),
            "KV bytes of one transfer over the time they were in flight (send) or over its "
            "seconds (receive).",
            RATES, COUNT_OF(RATES));
    }
    buf_clear(b);
    buf_printf(b, "transport=\"%s\"", name);
    s->transports[i].link = metrics_gauge(
        m, "baton_kv_link_speed_bytes_per_second", b->data,
        "Speed of the last connection's link(s) as the hardware says; 0: not known.");
}

/* Metrics of one direction, over all transports. */
static void register_direction(struct kvt_stats *s, int d, struct buf *b)
{
    s->in_flight[d] = metrics_gauge(s->m, "baton_kv_transfers_in_flight", label(b, NULL, d),
                                    "KV transfers that have not ended.");
    s->hashed[d] = metrics_counter(s->m, "baton_kv_transfer_hashed_bytes_total", label(b, NULL, d),
                                   "KV bytes that checksums were computed of.");
    for (int f = 0; f < KVT_FAILED_COUNT; f++) {
        (void)label(b, NULL, d);
        buf_printf(b, ",reason=\"%s\"", FAILURES[f]);
        s->failed[d][f] = metrics_counter(s->m, "baton_kv_transfer_failures_total", b->data,
                                          "KV transfers that failed, by reason.");
    }
}

struct kvt_stats *kvt_stats_create(struct metrics *m)
{
    struct kvt_stats *s = MEM_NEW(struct kvt_stats);
    struct buf b = { 0 };
    s->m = m;
    if (!m) return s;
    for (size_t i = 0; kvt_transports[i] && i < TRANSPORTS_MAX; i++) register_transport(s, i, &b);
    for (int d = 0; d < 2; d++) register_direction(s, d, &b);
    buf_release(&b);
    for (int foreign = 0; foreign < 2; foreign++)
        s->dropped[foreign] = metrics_counter(
            m, "baton_kv_transfer_dropped_total",
            foreign ? "reason=\"foreign\"" : "reason=\"stale\"",
            "Messages and frames that named no live transfer of their connection.");
    s->converted = metrics_counter(m, "baton_kv_transfer_converted_bytes_total", "",
                                   "KV bytes converted for a peer of another layout.");
    s->quarantined = metrics_gauge(
        m, "baton_kv_transfers_quarantined", "",
        "Failed transfers whose writer may still write: their blocks are held.");
    s->checksum_failed = metrics_counter(m, "baton_kv_transfer_checksum_failures_total", "",
                                         "KV pieces with a wrong checksum.");
    s->fence_waits = metrics_counter(m, "baton_kv_transfer_fence_waits_total", "",
                                     "Failed transfers that had to wait for their writer's fence.");
    return s;
}

void kvt_stats_free(struct kvt_stats *s) { mem_free(s); }

static int transport_index(const struct kvt_stats *s, const char *transport)
{
    for (int i = 0; s->m && i < TRANSPORTS_MAX && s->transports[i].transport; i++)
        if (str_eq_c(str_of(transport), s->transports[i].transport)) return i;
    return -1;
}

void kvt_stats_bytes(struct kvt_stats *s, const char *transport, enum kvt_direction d,
                     uint64_t bytes)
{
    int i = transport_index(s, transport);
    if (i >= 0) counter_add(s->transports[i].bytes[d], bytes);
}

void kvt_stats_done(struct kvt_stats *s, const char *transport, enum kvt_direction d,
                    uint64_t bytes, uint64_t ns, uint64_t busy_ns)
{
    int i = transport_index(s, transport);
    if (i < 0) return;
    histogram_observe(s->transports[i].seconds[d], (double)ns * 1e-9);
    if (bytes && busy_ns)
        histogram_observe(s->transports[i].rate[d], (double)bytes * 1e9 / (double)busy_ns);
}

void kvt_stats_link(struct kvt_stats *s, const char *transport, uint64_t bytes_per_second)
{
    int i = transport_index(s, transport);
    if (i >= 0) gauge_set(s->transports[i].link, (double)bytes_per_second);
}

void kvt_stats_failed(struct kvt_stats *s, enum kvt_direction d, enum kvt_failure f)
{
    if (s->m) counter_add(s->failed[d][f], 1);
}

void kvt_stats_dropped(struct kvt_stats *s, bool foreign)
{
    if (s->m) counter_add(s->dropped[foreign], 1);
}

void kvt_stats_hashed(struct kvt_stats *s, enum kvt_direction d, uint64_t bytes)
{
    if (s->m) counter_add(s->hashed[d], bytes);
}

void kvt_stats_converted(struct kvt_stats *s, uint64_t bytes)
{
    if (s->m) counter_add(s->converted, bytes);
}

void kvt_stats_checksum_failed(struct kvt_stats *s)
{
    if (s->m) counter_add(s->checksum_failed, 1);
}

void kvt_stats_fence_wait(struct kvt_stats *s)
{
    if (s->m) counter_add(s->fence_waits, 1);
}

void kvt_stats_gauges(struct kvt_stats *s, uint32_t n_sends, uint32_t n_recvs,
                      uint32_t n_quarantined)
{
    if (!s->m) return;
    gauge_set(s->in_flight[KVT_DIRECTION_SEND], n_sends);
    gauge_set(s->in_flight[KVT_DIRECTION_RECEIVE], n_recvs);
    gauge_set(s->quarantined, n_quarantined);
}
