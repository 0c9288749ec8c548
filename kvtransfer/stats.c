/* stats.c - names and labels of the KV transfer metrics. Registering twice is cheap and gives the same metric (metrics.h), so the
 * rare ones are looked up when they happen; bytes are kept per transport. Thread: transfer; create and free: the creator's. */
#include "kvtransfer/stats.h"

#include "kvtransfer/transport.h"
#include "shared/base/mem.h"

enum { ROWS = 8 };

struct kvt_stats {
    struct metrics *m;
    struct {
        const char       *transport;
        struct counter   *bytes[2];
        struct histogram *seconds[2];
    } rows[ROWS];
    struct counter *checksum_failed, *fence_waits;
    struct gauge   *in_flight[2], *quarantined;
};

static const char *const DIRECTIONS[] = { [KVT_SENT_OUT] = "send", [KVT_TAKEN_IN] = "receive" };

static char *label(struct buf *b, const char *transport, int d)
{
    buf_clear(b);
    if (transport) buf_printf(b, "transport=\"%s\",", transport);
    buf_printf(b, "direction=\"%s\"", DIRECTIONS[d]);
    return b->data;
}

struct kvt_stats *kvt_stats_create(struct metrics *m)
{
    struct kvt_stats *s = MEM_NEW(struct kvt_stats);
    struct buf b = { 0 };
    s->m = m;
    if (!m) return s;
    for (size_t i = 0; kvt_transports[i] && i < ROWS; i++) {
        const char *name = s->rows[i].transport = kvt_transports[i]->name;
        for (int d = 0; d < 2; d++) {
            s->rows[i].bytes[d] = metrics_counter(m, "baton_kv_transfer_bytes_total", label(&b, name, d), "KV bytes moved between nodes.");
            s->rows[i].seconds[d] = metrics_histogram(m, "baton_kv_transfer_seconds", label(&b, name, d),
                                                      "First byte to acknowledged (send) or verified (receive) of one transfer.",
                                                      METRICS_SECONDS, METRICS_SECONDS_N);
        }
    }
    for (int d = 0; d < 2; d++)
        s->in_flight[d] = metrics_gauge(m, "baton_kv_transfers_in_flight", label(&b, NULL, d), "KV transfers that have not ended.");
    s->quarantined = metrics_gauge(m, "baton_kv_transfers_quarantined", "", "Failed transfers whose writer may still write: their blocks are held.");
    s->checksum_failed = metrics_counter(m, "baton_kv_transfer_checksum_failures_total", "", "KV pieces whose checksum disagreed.");
    s->fence_waits = metrics_counter(m, "baton_kv_transfer_fence_waits_total", "", "Failed transfers that had to wait for their writer's fence.");
    buf_release(&b);
    return s;
}

void kvt_stats_free(struct kvt_stats *s) { mem_free(s); }

static int row_of(const struct kvt_stats *s, const char *transport)
{
    for (int i = 0; s->m && i < ROWS && s->rows[i].transport; i++)
        if (str_eq_c(str_of(transport), s->rows[i].transport)) return i;
    return -1;
}

void kvt_stats_bytes(struct kvt_stats *s, const char *transport, enum kvt_direction d, uint64_t bytes)
{
    int i = row_of(s, transport);
    if (i >= 0) counter_add(s->rows[i].bytes[d], bytes);
}

void kvt_stats_done(struct kvt_stats *s, const char *transport, enum kvt_direction d, uint64_t ns)
{
    int i = row_of(s, transport);
    if (i >= 0) histogram_observe(s->rows[i].seconds[d], (double)ns * 1e-9);
}

void kvt_stats_failed(struct kvt_stats *s, enum kvt_direction d, enum status reason)
{
    if (!s->m) return;
    struct buf b = { 0 };
    buf_printf(&b, "direction=\"%s\",reason=\"%s\"", DIRECTIONS[d], status_name(reason));
    counter_add(metrics_counter(s->m, "baton_kv_transfer_failures_total", b.data, "KV transfers that failed, by reason."), 1);
    buf_release(&b);
}

void kvt_stats_checksum_failed(struct kvt_stats *s)
{
    if (s->m) counter_add(s->checksum_failed, 1);
}

void kvt_stats_fence_wait(struct kvt_stats *s)
{
    if (s->m) counter_add(s->fence_waits, 1);
}

void kvt_stats_gauges(struct kvt_stats *s, uint32_t n_sends, uint32_t n_recvs, uint32_t n_quarantined)
{
    if (!s->m) return;
    gauge_set(s->in_flight[KVT_SENT_OUT], n_sends);
    gauge_set(s->in_flight[KVT_TAKEN_IN], n_recvs);
    gauge_set(s->quarantined, n_quarantined);
}
