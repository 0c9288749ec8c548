/* kvt_fixture.h - nodes, pools and event logs for tests of the KV transfer. Included by one test
 * program each. */
#ifndef BATON_TESTS_CONFORMANCE_KVT_FIXTURE_H
#define BATON_TESTS_CONFORMANCE_KVT_FIXTURE_H

#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "kernels/device.h"
#include "kvtransfer/kvtransfer.h"
#include "kvtransfer/plan.h"
#include "shared/base/clock.h"
#include "shared/base/mem.h"
#include "shared/base/metrics.h"
#include "tests/fixtures/kvt_bytes.h"
#include "tests/harness/test.h"

enum { EVENTS_MAX = 4096, PEERS_MAX = 64 };

struct node {
    struct kvt *kvt;
    struct device *device;
    struct dev_mem mem;
    char *image; /* the pool's bytes: the pool itself, or a copy (node_push, node_pull) */
    struct kv_layout layout;
    pthread_mutex_t lock;
    struct kvt_event events[EVENTS_MAX];
    size_t n_events;
    struct kvt_event
        connected[PEERS_MAX]; /* by peer % PEERS_MAX: the last CONNECTED or PEER_LOST */
};

static inline void node_on_event(void *arg, const struct kvt_event *ev)
{
    struct node *n = arg;
    pthread_mutex_lock(&n->lock);
    if (n->n_events < EVENTS_MAX) n->events[n->n_events++] = *ev;
    if (ev->kind == KVT_CONNECTED || ev->kind == KVT_PEER_LOST)
        n->connected[ev->peer % PEERS_MAX] = *ev;
    pthread_mutex_unlock(&n->lock);
}

static inline struct kv_layout small_layout(uint32_t n_blocks)
{
    return (struct kv_layout){
        .model_fingerprint = 7,
        .dtype = DTYPE_BF16,
        .block_tokens = 16,
        .n_layers = 4,
        .n_kv_heads = 2,
        .model_kv_heads = 2,
        .head_dim = 32,
        .tp_size = 1,
        .n_blocks = n_blocks,
    };
}

struct node_options {
    struct kv_layout layout;
    const char *protocols;
    uint16_t port;
    uint32_t stall_ms;
    uint32_t deadline_ms;
    bool no_checksum, lossy;
    struct metrics *metrics;
    const char *fault;  /* fault plan; NULL: BATON_KV_FAULT, so that any test can run with faults */
    const char *device; /* of the pool; NULL: as BATON_TEST_KV_DEVICES says */
    void (*opened)(struct device *d); /* called before the device is used; may be NULL */
};

/* Skips the case unless this build has the transport and this host the hardware. On a host with an
 * RDMA device, a transport that cannot use it is a failure. */
static inline void need_transport(const char *transport)
{
    const struct kvt_transport_ops *ops;
    if (kvt_transport_find(str_of(transport), &ops, NULL) != OK)
        SKIP("built without the library of that transport: it is NOT tested");
    if (strcmp(transport, "rdma") != 0 && strcmp(transport, "ucx") != 0) return;
    DIR *d = opendir("/sys/class/infiniband");
    int n = 0;
    for (const struct dirent *e; d && (e = readdir(d)) != NULL;) n += e->d_name[0] != '.';
    if (d) closedir(d);
    /* The transport uses UCX's own tcp only when UCX_TLS is set; UCX 1.13 aborts when a peer
     * vanishes in the middle of its puts. */
    if (!n && strcmp(transport, "ucx") == 0 && getenv("UCX_TLS")) return;
    if (!n) SKIP("this host has no RDMA device: rdma and ucx are NOT tested");
}

/* Reads the tuning from BATON_* and KVCACHE_* variables, so that every test here can run with
 * several connections, with copiers, or with faults. */
static inline struct kvt_tuning tuning_of_environment(const char *fault)
{
    struct kvt_tuning t = { 0 };
    struct err err = { 0 };
    bool known;
    for (const struct kvt_tuning_name *n = kvt_tuning_names; n->name; n++)
        if (getenv(n->name) && kvt_tuning_set(&t, n->name, getenv(n->name), &known, &err) != OK)
            test_fail(__FILE__, __LINE__, "%s", err.text);
    if (fault) t.fault = fault;
    return t;
}

/* BATON_TEST_KV_DEVICES names the devices of the nodes' pools in the order in which the nodes
 * start, repeated when the list ends: "cuda", "cuda,cpu". Within one process only tcp reaches such
 * pools, so the cases of other transports are skipped. */
/* Set by cases whose nodes are separate processes, before this process uses the GPU. */
static bool nodes_are_apart;

static inline const char *device_of_next_node(const char *protocols)
{
    static int n_nodes;
    const char *list = getenv("BATON_TEST_KV_DEVICES");
    if (!list) return "cpu";
    if (strcmp(protocols, "tcp") != 0 && !(nodes_are_apart && strcmp(protocols, "ipc") == 0))
        SKIP("BATON_TEST_KV_DEVICES: in one process pools on a GPU are reached by tcp alone");
    if (device_count("cuda") == 0) SKIP("no GPU: KV between pools in GPU memory is NOT tested");
    int n_items = strchr(list, ',') ? 2 : 1;
    const char *item = n_nodes++ % n_items ? strchr(list, ',') + 1 : list;
    return strncmp(item, "cuda", 4) == 0 ? "cuda" : "cpu";
}

/* node_push copies the test's image into the pool, node_pull copies the pool into the image. */
static inline void node_push(struct node *n)
{
    if (n->image != n->mem.ptr)
        device_upload(n->device, n->mem.ptr, n->image, kv_layout_pool_bytes(&n->layout));
}
static inline void node_pull(struct node *n)
{
    if (n->image != n->mem.ptr)
        device_download(n->device, n->image, n->mem.ptr, kv_layout_pool_bytes(&n->layout));
}

static inline void pool_set(struct node *n, int byte)
{
    memset(n->image, byte, kv_layout_pool_bytes(&n->layout));
    node_push(n);
}

static inline void pool_is(struct node *n, int byte)
{
    node_pull(n);
    for (size_t i = 0; i < kv_layout_pool_bytes(&n->layout); i++)
        CHECK_EQ_INT((uint8_t)n->image[i], byte);
}

static inline struct node *node_start(struct node_options o)
{
    struct node *n = calloc(1, sizeof *n);
    struct err err = { 0 };
    pthread_mutex_init(&n->lock, NULL);
    n->layout = o.layout;
    CHECK_OK(device_open(o.device ? o.device : device_of_next_node(o.protocols), &n->device, &err));
    if (o.opened) o.opened(n->device);
    CHECK_OK(device_mem_alloc(n->device, kv_layout_pool_bytes(&o.layout), DEVICE_MEM_SHARED,
                              &n->mem, &err));
    n->image = n->device->is_host ? n->mem.ptr : calloc(1, n->mem.bytes);
    struct kvt_options ko = {
        .layout = o.layout,
        .mem = &n->mem,
        .device = n->device,
        .protocols = o.protocols,
        .listen_host = "127.0.0.1",
        .port = o.port,
        .checksum = !o.no_checksum,
        .n_transfers = 64,
        .stall_ms = o.stall_ms,
        .metrics = o.metrics,
        .tuning = tuning_of_environment(o.fault),
        .on_event = node_on_event,
        .arg = n,
    };
    /* these transports have listeners of their own */
    if (strcmp(o.protocols, "rdma") == 0) ko.tuning.rdma.port = o.port;
    if (strcmp(o.protocols, "ucx") == 0) ko.tuning.ucx_port = o.port;
    ko.deadline_ms = o.deadline_ms;
    ko.tuning.lossy |= o.lossy;
    if (kvt_create(&ko, &n->kvt, &err) != OK)
        test_fail(__FILE__, __LINE__, "kvt_create: %s", err.text);
    return n;
}

/* Second half of node_stop, after kvt_free: frees the pool. */
static inline void node_gone(struct node *n)
{
    if (n->image != n->mem.ptr) free(n->image);
    device_mem_free(n->device, &n->mem);
    device_close(n->device);
    free(n);
}

static inline void node_stop(struct node *n)
{
    kvt_free(n->kvt);
    node_gone(n);
}

static inline size_t node_count(struct node *n, enum kvt_event_kind kind, uint64_t id)
{
    size_t count = 0;
    pthread_mutex_lock(&n->lock);
    for (size_t i = 0; i < n->n_events; i++) {
        uint64_t who = kvt_event_is_of_peer(kind) ? n->events[i].peer : n->events[i].id;
        count += n->events[i].kind == kind && who == id;
    }
    pthread_mutex_unlock(&n->lock);
    return count;
}

static inline void pause_ms(long ms)
{
    struct timespec t = { ms / 1000, ms % 1000 * 1000000 };
    nanosleep(&t, NULL);
}

/* The transport that the peer is connected by now, or NULL. */
static inline const char *node_transport(struct node *n, uint64_t peer)
{
    pthread_mutex_lock(&n->lock);
    const struct kvt_event ev = n->connected[peer % PEERS_MAX];
    pthread_mutex_unlock(&n->lock);
    return ev.peer == peer && ev.kind == KVT_CONNECTED && ev.transport ? ev.transport : NULL;
}

/* Waits for the first event of that kind and id; the test fails if none comes in timeout_ms. */
static inline struct kvt_event node_wait(struct node *n, enum kvt_event_kind kind, uint64_t id,
                                         int timeout_ms)
{
    for (uint64_t end = clock_ms() + (uint64_t)timeout_ms;;) {
        pthread_mutex_lock(&n->lock);
        for (size_t i = 0; i < n->n_events; i++) {
            uint64_t who = kvt_event_is_of_peer(kind) ? n->events[i].peer : n->events[i].id;
            if (n->events[i].kind != kind || who != id) continue;
            struct kvt_event ev = n->events[i];
            pthread_mutex_unlock(&n->lock);
            return ev;
        }
        struct kvt_event last = n->n_events ? n->events[n->n_events - 1] : (struct kvt_event){ 0 };
        pthread_mutex_unlock(&n->lock);
        if (clock_ms() > end)
            test_fail(__FILE__, __LINE__,
                      "no event %d of %llu; last was %d of %llu, status %d, '%s'", kind,
                      (unsigned long long)id, last.kind, (unsigned long long)last.id, last.status,
                      last.text);
        pause_ms(1);
    }
}

/* Handshake over the (simulated) control plane; returns the peer handle after CONNECTED. */
static inline uint64_t node_connect(struct node *from, struct node *to)
{
    struct buf hello = { 0 }, answer = { 0 };
    struct err err = { 0 };
    uint64_t peer = 0;
    kvt_hello(from->kvt, &hello);
    if (kvt_answer(to->kvt, buf_str(&hello), &answer, &err) != OK)
        test_fail(__FILE__, __LINE__, "kvt_answer: %s", err.text);
    if (kvt_connect(from->kvt, buf_str(&answer), &peer, &err) != OK)
        test_fail(__FILE__, __LINE__, "kvt_connect: %s", err.text);
    buf_release(&hello);
    buf_release(&answer);
    node_wait(from, KVT_CONNECTED, peer, 5000);
    return peer;
}

/* pipe_put and pipe_take pass byte strings between two processes of a test. */
static inline void pipe_put(int fd, const struct buf *b)
{
    uint32_t n = (uint32_t)b->len;
    CHECK(write(fd, &n, sizeof n) == sizeof n && write(fd, b->data, n) == (ssize_t)n);
}

static inline void pipe_take(int fd, struct buf *b)
{
    uint32_t n;
    buf_clear(b);
    CHECK(read(fd, &n, sizeof n) == sizeof n);
    char *p = buf_reserve(b, n);
    for (size_t have = 0; have < n;) {
        ssize_t got = read(fd, p + have, n - have);
        CHECK(got > 0);
        have += (size_t)got;
    }
    b->len += n;
}

/* Fills `out` with n different block numbers in random order. */
static inline void random_table(uint32_t n_blocks, uint32_t n, int32_t *out)
{
    int32_t *all = malloc(sizeof *all * n_blocks);
    for (uint32_t i = 0; i < n_blocks; i++) all[i] = (int32_t)i;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t j = i + (uint32_t)rand() % (n_blocks - i);
        int32_t swap = all[i];
        all[i] = all[j];
        all[j] = swap;
        out[i] = all[i];
    }
    free(all);
}

/* The byte that transfer `seed` has at byte `i` of its piece (layer, position). */
static inline uint8_t pattern(uint64_t seed, uint32_t layer, uint32_t position, size_t i)
{
    return (uint8_t)((seed * 131 + layer * 17 + position * 7 + i * 3 + (i >> 8)) & 0xff);
}

static inline char *piece_of(struct node *n, uint32_t layer, int32_t block)
{
    return n->image + kv_layout_offset(&n->layout, layer, (uint32_t)block);
}

/* Expected bytes of a piece: the pattern in its first n_valid tokens, `other` everywhere else. */
static inline void expect_piece(const struct kv_layout *l, uint64_t seed, uint32_t layer,
                                uint32_t position, uint32_t n_valid, uint8_t other, uint8_t *out)
{
    size_t stride = kv_layout_segment_stride(l), valid = stride / l->block_tokens * n_valid,
           n = kv_layout_piece_bytes(l);
    uint8_t first = pattern(seed, layer, position, 0);
    memset(out, other, n);
    for (size_t run = 0; run < n; run += stride)
        for (size_t i = run; i < run + valid && i < n; i++)
            out[i] = (uint8_t)(first + i * 3 + (i >> 8));
}

/* Copies one piece of the test's image into the pool. */
static inline void piece_push(struct node *n, uint32_t layer, int32_t block)
{
    size_t at = kv_layout_offset(&n->layout, layer, (uint32_t)block);
    if (n->image != n->mem.ptr)
        device_upload(n->device, (char *)n->mem.ptr + at, n->image + at,
                      kv_layout_piece_bytes(&n->layout));
}

static inline void fill_layer(struct node *n, uint64_t seed, uint32_t layer, const int32_t *blocks,
                              uint32_t first, uint32_t end)
{
    for (uint32_t b = first; b < end; b++) {
        expect_piece(&n->layout, seed, layer, b, n->layout.block_tokens, 0,
                     (uint8_t *)piece_of(n, layer, blocks[b]));
        piece_push(n, layer, blocks[b]);
    }
}

/* Checks that blocks [first, n_used) of the table hold the pattern in their valid bytes and `other`
 * everywhere else. */
static inline void check_blocks_hold(struct node *n, uint64_t seed, const int32_t *blocks,
                                     uint32_t first, uint32_t n_tokens, uint8_t other)
{
    size_t n_bytes = kv_layout_piece_bytes(&n->layout);
    uint8_t *want = malloc(n_bytes);
    node_pull(n);
    for (uint32_t layer = 0; layer < n->layout.n_layers; layer++)
        for (uint32_t b = first; b < kvt_plan_n_blocks(&n->layout, n_tokens); b++) {
            const uint8_t *p = (const uint8_t *)piece_of(n, layer, blocks[b]);
            expect_piece(&n->layout, seed, layer, b, kvt_plan_tokens(&n->layout, n_tokens, b),
                         other, want);
            if (memcmp(p, want, n_bytes) == 0) continue;
            for (size_t i = 0; i < n_bytes; i++)
                if (p[i] != want[i])
                    test_fail(__FILE__, __LINE__,
                              "layer %u position %u byte %zu is %u, expected %u", layer, b, i, p[i],
                              want[i]);
        }
    free(want);
}

#endif
