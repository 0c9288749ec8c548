/* test_kv_faults.c - thousands of transfers over every transport while a fault plan damages 1 % of
 * the puts and messages.
 *
 * What must hold for every kind of fault
 *   - a transfer that ends with RECEIVED has every byte right; one without a fault is RECEIVED
 *   - every id ends exactly once on both sides
 *   - a block whose transfer has ended (RECEIVED or FENCED) is never written again, and a block
 *     that was never granted is never written
 *   - flip, truncate and stale change what decode would read: every transfer with such a fault
 *     fails, and the metrics count as many failures as damaged transfers
 * Transports that this build or this host lacks are skipped by name. BATON_FAULT_TRANSFERS sets the
 * number of transfers per plan. */
#include "kvtransfer/fault/fault.h"
#include "kvtransfer/transport.h"
#include "tests/conformance/kvt_fixture.h"

enum {
    POOL_BLOCKS = 64,
    GUARD = 8 /* the first blocks are never granted */,
    MOST_BLOCKS = 6,
    TRANSFERS_AT_ONCE = 8,
    STALL_MS = 700 /* longer than a busy machine keeps a process from the CPU */,
    CANARY = 0xee
};

static uint32_t n_transfers(void)
{
    const char *n = getenv("BATON_FAULT_TRANSFERS");
    return n ? (uint32_t)atoi(n) : 250;
}

struct side {
    struct node *node;
    struct metrics *metrics;
};

struct rig {
    const char *transport;
    struct side from, to;
    uint64_t peer, next_id;
    uint32_t n_received, n_failed, n_damaged, n_reconnects;
};

static struct side side_start(const char *transport, const char *plan)
{
    struct side s = { .metrics = metrics_create() };
    s.node = node_start((struct node_options){
        .layout = small_layout(POOL_BLOCKS),
        .protocols = transport,
        .stall_ms = STALL_MS,
        .metrics = s.metrics,
        .fault = plan,
    });
    return s;
}

static void side_stop(struct side s)
{
    node_stop(s.node);
    metrics_free(s.metrics);
}

/* Sum of the metric's values whose labels contain `label`. */
static double total(struct metrics *m, const char *name, const char *label)
{
    struct buf text = { 0 };
    metrics_write(m, &text);
    struct str rest = buf_str(&text), line;
    double sum = 0;
    while (str_split(&rest, '\n', &line)) {
        double v;
        size_t space = line.n;
        while (space && line.p[space - 1] != ' ') space--;
        if (!str_starts(line, name) || str_find(line, str_of(label)) == SIZE_MAX) continue;
        CHECK_OK(str_to_f64(str_sub(line, space, line.n), &v));
        sum += v;
    }
    buf_release(&text);
    return sum;
}

static uint64_t injected(const struct rig *b)
{
    return (uint64_t)(total(b->from.metrics, "baton_kv_fault_injected_total", "") +
                      total(b->to.metrics, "baton_kv_fault_injected_total", ""));
}

static void clear_events(struct node *n)
{
    pthread_mutex_lock(&n->lock);
    n->n_events = 0;
    pthread_mutex_unlock(&n->lock);
}

/* Waits for one of two events; true: the first. */
static bool either(struct node *n, enum kvt_event_kind a, enum kvt_event_kind b, uint64_t id)
{
    for (uint64_t end = clock_ms() + 20000; clock_ms() < end; pause_ms(0)) {
        if (node_count(n, a, id)) return true;
        if (node_count(n, b, id)) return false;
    }
    test_fail(__FILE__, __LINE__, "transfer %llu does not end", (unsigned long long)id);
}

static void fill_canary(struct node *n, const int32_t *blocks, uint32_t n_blocks)
{
    for (uint32_t layer = 0; layer < n->layout.n_layers; layer++)
        for (uint32_t i = 0; i < n_blocks; i++) {
            memset(piece_of(n, layer, blocks[i]), CANARY, kv_layout_piece_bytes(&n->layout));
            piece_push(n, layer, blocks[i]);
        }
}

/* Checks that every block whose bit in `live` is clear holds the canary. */
static void check_canaries(struct node *n, uint64_t live)
{
    size_t n_bytes = kv_layout_piece_bytes(&n->layout);
    uint8_t *canary = malloc(n_bytes);
    memset(canary, CANARY, n_bytes);
    node_pull(n);
    for (uint32_t layer = 0; layer < n->layout.n_layers; layer++)
        for (int32_t b = 0; b < POOL_BLOCKS; b++) {
            const uint8_t *p = (const uint8_t *)piece_of(n, layer, b);
            if (live >> b & 1 || memcmp(p, canary, n_bytes) == 0) continue;
            for (size_t i = 0; i < n_bytes; i++)
                if (p[i] != CANARY)
                    test_fail(
                        __FILE__, __LINE__,
                        "block %d of layer %u, which nobody may write, was written at byte %zu", b,
                        layer, i);
        }
    free(canary);
}

struct transfer {
    uint64_t id;
    uint32_t n_tokens, n_used;
    int32_t src[MOST_BLOCKS], dst[MOST_BLOCKS];
};

static void transfer_begin(struct rig *b, struct transfer *l, const int32_t *blocks)
{
    struct node *from = b->from.node, *to = b->to.node;
    struct buf grant = { 0 };
    struct err err = { 0 };
    *l = (struct transfer){
        .id = ++b->next_id,
        .n_tokens = 1 + (uint32_t)rand() % (MOST_BLOCKS * 16),
    };
    l->n_used = kvt_plan_n_blocks(&to->layout, l->n_tokens);
    memcpy(l->dst, blocks, l->n_used * sizeof l->dst[0]);
    memcpy(l->src, blocks, l->n_used * sizeof l->src[0]);
    for (uint32_t layer = 0; layer < from->layout.n_layers; layer++)
        fill_layer(from, l->id, layer, l->src, 0, l->n_used);
    CHECK_OK(kvt_expect(to->kvt, l->id, l->dst, l->n_used, 0, l->n_tokens, &grant));
    CHECK_OK(kvt_send_open(from->kvt, l->id, b->peer, buf_str(&grant), &err));
    buf_release(&grant);
    uint32_t chunk = 1 + (uint32_t)rand() % l->n_tokens;
    for (uint32_t begin = 0; begin < l->n_tokens; begin += chunk)
        for (uint32_t layer = 0; layer < from->layout.n_layers; layer++)
            CHECK_OK(kvt_send_ready(from->kvt, l->id, layer, begin,
                                    begin + chunk < l->n_tokens ? begin + chunk : l->n_tokens,
                                    l->src));
    kvt_send_finish(from->kvt, l->id);
}

/* Waits for both ends of the transfer, then fills its blocks with the canary. True: RECEIVED; every
 * byte was checked. */
static bool transfer_end(struct rig *b, struct transfer *l)
{
    struct node *from = b->from.node, *to = b->to.node;
    (void)either(from, KVT_SENT, KVT_SEND_FAILED, l->id);
    bool received = either(to, KVT_RECEIVED, KVT_RECEIVE_FAILED, l->id);
    if (received) check_blocks_hold(to, l->id, l->dst, 0, l->n_tokens, CANARY);
    else node_wait(to, KVT_FENCED, l->id, 20000);
    CHECK_EQ_INT(node_count(to, KVT_RECEIVED, l->id) + node_count(to, KVT_RECEIVE_FAILED, l->id),
                 1);
    CHECK_EQ_INT(node_count(to, KVT_FENCED, l->id), !received);
    CHECK_EQ_INT(node_count(from, KVT_SENT, l->id) + node_count(from, KVT_SEND_FAILED, l->id), 1);
    /* an unverified transfer is never acknowledged */
    CHECK(received || node_count(from, KVT_SENT, l->id) == 0);
    fill_canary(to, l->dst, l->n_used);
    b->n_received += received;
    b->n_failed += !received;
    return received;
}

/* Makes one transfer at a time, so that the test knows which ones had a fault. `damages`: the fault
 * changes what decode would read. */
static void one_by_one(struct rig *b, bool damages)
{
    int32_t blocks[MOST_BLOCKS];
    for (uint32_t i = 0; i < n_transfers(); i++) {
        struct transfer l;
        uint64_t before = injected(b);
        random_table(POOL_BLOCKS - GUARD, MOST_BLOCKS, blocks);
        for (int k = 0; k < MOST_BLOCKS; k++) blocks[k] += GUARD;
        transfer_begin(b, &l, blocks);
        bool received = transfer_end(b, &l), hit = injected(b) > before;
        b->n_damaged += hit;
        if (!hit && !received)
            test_fail(__FILE__, __LINE__, "transfer %llu failed though no fault was injected",
                      (unsigned long long)l.id);
        if (hit && received && damages)
            test_fail(__FILE__, __LINE__, "transfer %llu was damaged and nobody noticed",
                      (unsigned long long)l.id);
        check_canaries(b->to.node, 0);
        clear_events(b->from.node);
        clear_events(b->to.node);
    }
}

static struct rig rig_start(const char *transport, const char *sender, const char *receiver)
{
    need_transport(transport);
    srand(31);
    struct rig b = {
        .transport = transport,
        .from = side_start(transport, sender),
        .to = side_start(transport, receiver),
    };
    int32_t all[POOL_BLOCKS];
    for (int i = 0; i < POOL_BLOCKS; i++) all[i] = i;
    fill_canary(b.to.node, all, POOL_BLOCKS);
    b.peer = node_connect(b.from.node, b.to.node);
    return b;
}

static void rig_stop(struct rig *b, const char *what)
{
    double sent = total(b->to.metrics, "baton_kv_transfer_failures_total", "direction=\"receive\"");
    printf("  %-4s %-10s %u transfers: %u received, %u failed, %llu faults in %u of them, %u "
           "connections\n",
           b->transport, what, b->n_received + b->n_failed, b->n_received, b->n_failed,
           (unsigned long long)injected(b), b->n_damaged, b->n_reconnects + 1);
    CHECK_EQ_INT((long long)sent, b->n_failed); /* each is counted exactly once */
    /* the gauge is set once per tick */
    for (uint64_t end = clock_ms() + 5000;
         total(b->to.metrics, "baton_kv_transfers_quarantined", "") > 0; pause_ms(10))
        CHECK(clock_ms() < end);
    side_stop(b->from);
    side_stop(b->to);
}

static void damage(const char *transport, const char *kind, bool detected)
{
    char plan[40];
    snprintf(plan, sizeof plan, "seed=11,%s=0.01", kind);
    struct rig b = rig_start(transport, plan, NULL);
    one_by_one(&b, detected);
    CHECK(b.n_damaged >= n_transfers() / 100);
    if (detected) CHECK_EQ_INT(b.n_failed, b.n_damaged);
    if (strcmp(kind, "flip") == 0)
        CHECK(total(b.to.metrics, "baton_kv_transfer_failures_total", "reason=\"checksum\"") >
              0.5 * b.n_failed);
    rig_stop(&b, kind);
}

/* All faults on both sides, with many transfers at a time and lost connections. Late writes only
 * where the receiver scatters: one-sided transports promise that there are none, and nothing could
 * detect them. */
static void everything(const char *transport)
{
    const struct kvt_transport_ops *ops = NULL;
    char plan[220];
    need_transport(transport);
    CHECK_OK(kvt_transport_find(str_of(transport), &ops, NULL));
    snprintf(plan, sizeof plan,
             "seed=5,drop=0.002,delay=0.01:2,duplicate=0.01,truncate=0.01,flip=0.01,stale=0.003,"
             "disconnect=0.0005%s%s",
             ops->caps & KVT_CAP_SAME_PROCESS ? "" : ",reorder=0.01",
             ops->caps & KVT_CAP_RECEIVER_SCATTERS ? ",late=0.01:3" : "");
    struct rig b = rig_start(
        transport, plan,
        "seed=6,drop=0.002,delay=0.01:2,duplicate=0.01,reorder=0.01,stale=0.002,disconnect=0.0005");
    for (uint32_t i = 0; i < n_transfers() / TRANSFERS_AT_ONCE; i++) {
        struct transfer transfers[TRANSFERS_AT_ONCE];
        int32_t blocks[TRANSFERS_AT_ONCE * MOST_BLOCKS];
        uint64_t live = 0;
        random_table(POOL_BLOCKS - GUARD, TRANSFERS_AT_ONCE * MOST_BLOCKS, blocks);
        for (int k = 0; k < TRANSFERS_AT_ONCE * MOST_BLOCKS; k++) blocks[k] += GUARD;
        if (!node_transport(b.from.node, b.peer)) {
            b.peer = node_connect(b.from.node, b.to.node);
            b.n_reconnects++;
        }
        for (int k = 0; k < TRANSFERS_AT_ONCE; k++)
            transfer_begin(&b, &transfers[k], blocks + k * MOST_BLOCKS);
        for (int k = 0; k < TRANSFERS_AT_ONCE * MOST_BLOCKS; k++) live |= UINT64_C(1) << blocks[k];
        check_canaries(b.to.node, live);
        for (int k = 0; k < TRANSFERS_AT_ONCE; k++) (void)transfer_end(&b, &transfers[k]);
        check_canaries(b.to.node, 0);
        clear_events(b.from.node);
        clear_events(b.to.node);
    }
    CHECK(b.n_failed > 0 && b.n_received > b.n_failed);
    rig_stop(&b, "everything");
}

/* The receiver ends the connection while its writer is writing: the writer notices, stops, and the
 * blocks are returned. */
static void dropped_writer(const char *transport)
{
    struct rig b = rig_start(transport, NULL,
                             "at=note:3:disconnect,at=opened:2:disconnect,at=open:3:disconnect");
    for (int i = 0; i < 4; i++) {
        struct transfer l;
        int32_t blocks[MOST_BLOCKS] = { 10, 11, 12, 13, 14, 15 };
        if (i) b.peer = node_connect(b.from.node, b.to.node);
        transfer_begin(&b, &l, blocks);
        CHECK_EQ_INT(transfer_end(&b, &l), i == 3);
        if (i < 3) node_wait(b.from.node, KVT_PEER_LOST, b.peer, 5000);
        check_canaries(b.to.node, 0);
        clear_events(b.from.node);
        clear_events(b.to.node);
    }
    rig_stop(&b, "dropped");
}

#define TRANSPORT(transport)                                                                       \
    TEST(flips_are_noticed_##transport) { damage(#transport, "flip", true); }                      \
    TEST(truncation_is_noticed_##transport) { damage(#transport, "truncate", true); }              \
    TEST(stale_generations_are_noticed_##transport) { damage(#transport, "stale", true); }         \
    TEST(drops_are_noticed_##transport) { damage(#transport, "drop", true); }                      \
    TEST(duplicates_do_no_harm_##transport) { damage(#transport, "duplicate", false); }            \
    TEST(everything_at_once_##transport) { everything(#transport); }                               \
    TEST(a_dropped_writer_stops_##transport) { dropped_writer(#transport); }

/* Not mem: a NOTE that overtakes its write would be a data race within this process. */
TEST(reordering_does_no_harm_ipc) { damage("ipc", "reorder", false); }
TEST(reordering_does_no_harm_tcp) { damage("tcp", "reorder", false); }
TEST(reordering_does_no_harm_rdma) { damage("rdma", "reorder", false); }
TEST(reordering_does_no_harm_ucx) { damage("ucx", "reorder", false); }

TRANSPORT(mem)
TRANSPORT(ipc)
TRANSPORT(tcp)
TRANSPORT(rdma)
TRANSPORT(ucx)

#define CASES(transport)                                                                           \
    CASE_T(flips_are_noticed_##transport, 250), CASE_T(truncation_is_noticed_##transport, 250),    \
        CASE_T(stale_generations_are_noticed_##transport, 250),                                    \
        CASE_T(drops_are_noticed_##transport, 250),                                                \
        CASE_T(duplicates_do_no_harm_##transport, 250),                                            \
        CASE_T(everything_at_once_##transport, 250), CASE(a_dropped_writer_stops_##transport)

TEST_MAIN(CASES(mem), CASES(ipc), CASES(tcp), CASES(rdma), CASES(ucx),
          CASE_T(reordering_does_no_harm_ipc, 250), CASE_T(reordering_does_no_harm_tcp, 250),
          CASE_T(reordering_does_no_harm_rdma, 250), CASE_T(reordering_does_no_harm_ucx, 250))
