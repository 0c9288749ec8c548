/* kvt_peer.c - one node's KV transfer as a process driven by lines; kill_rounds.py kills, stops and
 * inspects it. Usage: kvt_peer PROTOCOLS [FAULT_PLAN]. It ends with its input or its parent.
 *
 * Each command on stdin is answered by one line "ok ..." or "error ..."; lines
 * "event KIND ID STATUS TEXT" come in between.
 *     hello | answer HEX | connect HEX | disconnect PEER
 *     expect ID TOKENS BLOCK...        -> ok GRANT-HEX
 *     send ID PEER GRANT-HEX TOKENS UPTO BLOCK...   fill the blocks with ID's pattern, push tokens
 *                                      0..UPTO, finish if UPTO = TOKENS
 *     cancel ID | unsend ID
 *     canary BLOCK...                  fill them with the canary
 *     canaries BLOCK...                -> ok, or error: the first block with another byte
 *     holds ID TOKENS BLOCK...         -> ok, or error: ID's pattern in every valid byte
 *     state                            -> ok fds=N send=N receive=N quarantined=N
 * Threads: main reads and answers; the transfer thread prints events (a lock keeps lines whole). */
#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#include "kernels/device.h"
#include "kvtransfer/kvtransfer.h"
#include "kvtransfer/plan.h"
#include "shared/base/mem.h"
#include "shared/base/metrics.h"

enum { BLOCKS = 96, TOKENS_PER_BLOCK = 16, CANARY = 0xee, WORDS_MAX = 128, STALL_MS = 20000 };

struct peer {
    struct kvt *kvt;
    struct device *device;
    struct dev_mem mem;
    struct kv_layout layout;
    struct metrics *metrics;
    pthread_mutex_t lock; /* of stdout */
};

static const char *const KINDS[] = {
    [KVT_CONNECTED] = "connected",    [KVT_PEER_LOST] = "peer_lost",
    [KVT_RECEIVED] = "received",      [KVT_RECEIVE_FAILED] = "receive_failed",
    [KVT_FENCED] = "fenced",          [KVT_SENT] = "sent",
    [KVT_SEND_FAILED] = "send_failed"
};

static void on_event(void *arg, const struct kvt_event *ev)
{
    struct peer *p = arg;
    bool of_peer = kvt_event_is_of_peer(ev->kind);
    pthread_mutex_lock(&p->lock);
    printf("event %s %llu %s %s\n", KINDS[ev->kind],
           (unsigned long long)(of_peer ? ev->peer : ev->id), status_name(ev->status), ev->text);
    fflush(stdout);
    pthread_mutex_unlock(&p->lock);
}

static void answer(struct peer *p, const char *line)
{
    pthread_mutex_lock(&p->lock);
    printf("%s\n", line);
    fflush(stdout);
    pthread_mutex_unlock(&p->lock);
}

static void answer_hex(struct peer *p, struct buf *bytes)
{
    struct buf line = { 0 };
    buf_printf(&line, "ok ");
    for (size_t i = 0; i < bytes->len; i++) buf_printf(&line, "%02x", (uint8_t)bytes->data[i]);
    answer(p, line.data);
    buf_release(&line);
    buf_release(bytes);
}

static void answer_error(struct peer *p, const char *what)
{
    struct buf line = { 0 };
    buf_printf(&line, "error %s", what);
    answer(p, line.data);
    buf_release(&line);
}

/* ---- the pool ---- */

static uint8_t *piece(const struct peer *p, uint32_t layer, int32_t block)
{
    return (uint8_t *)p->mem.ptr + kv_layout_offset(&p->layout, layer, (uint32_t)block);
}

static uint8_t pattern(uint64_t id, uint32_t layer, uint32_t position, size_t i)
{
    return (uint8_t)(id * 131 + layer * 17 + position * 7 + i * 3 + (i >> 8));
}

/* The thread sanitizer would check every byte of the next functions. One thread calls them, and the
 * driver waits for them. */
#define UNWATCHED __attribute__((no_sanitize("thread")))

UNWATCHED static void fill_piece(uint8_t *to, size_t n, uint64_t id, uint32_t layer, uint32_t block)
{
    for (size_t i = 0; i < n; i++) to[i] = pattern(id, layer, block, i);
}

/* Not memset, which the sanitizer checks: this thread learns through another process that a page is
 * not read any more. */
UNWATCHED static void fill_canary(volatile uint8_t *to, size_t n)
{
    for (size_t i = 0; i < n; i++) to[i] = CANARY;
}

/* Whether the first `valid` of each `stride` bytes hold the pattern. */
UNWATCHED static bool piece_holds(const uint8_t *piece, size_t n, size_t stride, size_t valid,
                                  uint64_t id, uint32_t layer, uint32_t block)
{
    for (size_t run = 0; run < n; run += stride)
        for (size_t i = run; i < run + valid; i++)
            if (piece[i] != pattern(id, layer, block, i)) return false;
    return true;
}

static void fill(struct peer *p, uint64_t id, const int32_t *blocks, uint32_t n)
{
    for (uint32_t layer = 0; layer < p->layout.n_layers; layer++)
        for (uint32_t b = 0; b < n; b++)
            fill_piece(piece(p, layer, blocks[b]), kv_layout_piece_bytes(&p->layout), id, layer, b);
}

static void check_holds(struct peer *p, uint64_t id, uint32_t n_tokens, const int32_t *blocks,
                        uint32_t n)
{
    size_t bytes = kv_layout_piece_bytes(&p->layout), stride = kv_layout_segment_stride(&p->layout);
    for (uint32_t layer = 0; layer < p->layout.n_layers; layer++)
        for (uint32_t b = 0; b < n; b++) {
            size_t valid = stride / p->layout.block_tokens *
                           kvt_plan_tokens(&p->layout, n_tokens, b);
            if (piece_holds(piece(p, layer, blocks[b]), bytes, stride, valid, id, layer, b))
                continue;
            answer_error(p, "a received block does not hold what was sent");
            return;
        }
    answer(p, "ok");
}

/* The index of the first byte that is no canary, or n. */
UNWATCHED static size_t first_written(const uint8_t *piece, size_t n)
{
    size_t i = 0;
    while (i < n && piece[i] == CANARY) i++;
    return i;
}

static void check_canaries(struct peer *p, const int32_t *blocks, uint32_t n)
{
    char line[80];
    size_t bytes = kv_layout_piece_bytes(&p->layout);
    for (uint32_t layer = 0; layer < p->layout.n_layers; layer++)
        for (uint32_t b = 0; b < n; b++) {
            size_t i = first_written(piece(p, layer, blocks[b]), bytes);
            if (i == bytes) continue;
            snprintf(line, sizeof line, "block %d was written in layer %u at byte %zu", blocks[b],
                     layer, i);
            answer_error(p, line);
            return;
        }
    answer(p, "ok");
}

/* ---- commands ---- */

static uint32_t numbers(char **words, int n, int32_t *out)
{
    for (int i = 0; i < n; i++) {
        out[i] = atoi(words[i]);
        if (out[i] < 0 || out[i] >= BLOCKS) exit(2);
    }
    return (uint32_t)(n > 0 ? n : 0);
}

static struct buf from_hex(const char *text)
{
    struct buf b = { 0 };
    for (unsigned byte; text[0] && text[1] && sscanf(text, "%2x", &byte) == 1; text += 2)
        buf_add_char(&b, (char)byte);
    return b;
}

static void do_send(struct peer *p, char **w, int n)
{
    int32_t blocks[WORDS_MAX];
    uint64_t id = strtoull(w[1], NULL, 10), to = strtoull(w[2], NULL, 10);
    uint32_t n_tokens = (uint32_t)atoi(w[4]), upto = (uint32_t)atoi(w[5]),
             n_blocks = numbers(w + 6, n - 6, blocks);
    struct buf grant = from_hex(w[3]);
    struct err err = { 0 };
    fill(p, id, blocks, n_blocks);
    enum status st = kvt_send_open(p->kvt, id, to, buf_str(&grant), &err);
    for (uint32_t layer = 0; st == OK && layer < p->layout.n_layers; layer++)
        st = kvt_send_ready(p->kvt, id, layer, 0, upto, blocks);
    if (st == OK && upto == n_tokens) kvt_send_finish(p->kvt, id);
    buf_release(&grant);
    if (st == OK) answer(p, "ok");
    else answer_error(p, err.text);
}

static void do_expect(struct peer *p, char **w, int n)
{
    int32_t blocks[WORDS_MAX];
    struct buf grant = { 0 };
    uint32_t n_blocks = numbers(w + 3, n - 3, blocks);
    enum status st = kvt_expect(p->kvt, strtoull(w[1], NULL, 10), blocks, n_blocks, 0,
                                (uint32_t)atoi(w[2]), &grant);
    if (st == OK) answer_hex(p, &grant);
    else answer_error(p, status_name(st));
}

static void do_connect(struct peer *p, const char *hex)
{
    struct buf theirs = from_hex(hex);
    struct err err = { 0 };
    uint64_t peer;
    char line[40];
    enum status st = kvt_connect(p->kvt, buf_str(&theirs), &peer, &err);
    snprintf(line, sizeof line, "ok %llu", (unsigned long long)peer);
    buf_release(&theirs);
    if (st == OK) answer(p, line);
    else answer_error(p, err.text);
}

static void do_answer(struct peer *p, const char *hex)
{
    struct buf hello = from_hex(hex), out = { 0 };
    struct err err = { 0 };
    if (kvt_answer(p->kvt, buf_str(&hello), &out, &err) == OK) answer_hex(p, &out);
    else answer_error(p, err.text);
    buf_release(&hello);
}

static void do_state(struct peer *p)
{
    char line[120];
    int n_fds = 0;
    DIR *d = opendir("/proc/self/fd");
    while (d && readdir(d)) n_fds++;
    if (d) closedir(d);
    double send = gauge_value(
        metrics_gauge(p->metrics, "baton_kv_transfers_in_flight", "direction=\"send\"", ""));
    double receive = gauge_value(
        metrics_gauge(p->metrics, "baton_kv_transfers_in_flight", "direction=\"receive\"", ""));
    double quarantined = gauge_value(
        metrics_gauge(p->metrics, "baton_kv_transfers_quarantined", "", ""));
    snprintf(line, sizeof line, "ok fds=%d send=%.0f receive=%.0f quarantined=%.0f", n_fds, send,
             receive, quarantined);
    answer(p, line);
}

static void do_line(struct peer *p, char **w, int n)
{
    int32_t blocks[WORDS_MAX];
    struct buf out = { 0 };
    uint64_t id = n > 1 ? strtoull(w[1], NULL, 10) : 0;
    if (strcmp(w[0], "hello") == 0) {
        kvt_hello(p->kvt, &out);
        answer_hex(p, &out);
    } else if (strcmp(w[0], "answer") == 0 && n == 2) do_answer(p, w[1]);
    else if (strcmp(w[0], "connect") == 0 && n == 2) do_connect(p, w[1]);
    else if (strcmp(w[0], "expect") == 0 && n > 2) do_expect(p, w, n);
    else if (strcmp(w[0], "send") == 0 && n > 5) do_send(p, w, n);
    else if (strcmp(w[0], "holds") == 0 && n > 2)
        check_holds(p, id, (uint32_t)atoi(w[2]), blocks, numbers(w + 3, n - 3, blocks));
    else if (strcmp(w[0], "canaries") == 0)
        check_canaries(p, blocks, numbers(w + 1, n - 1, blocks));
    else if (strcmp(w[0], "state") == 0) do_state(p);
    else {
        if (strcmp(w[0], "disconnect") == 0) kvt_disconnect(p->kvt, id);
        else if (strcmp(w[0], "cancel") == 0) kvt_expect_cancel(p->kvt, id);
        else if (strcmp(w[0], "unsend") == 0) kvt_send_cancel(p->kvt, id);
        else if (strcmp(w[0], "canary") == 0) {
            uint32_t n_blocks = numbers(w + 1, n - 1, blocks);
            for (uint32_t layer = 0; layer < p->layout.n_layers; layer++)
                for (uint32_t b = 0; b < n_blocks; b++)
                    fill_canary(piece(p, layer, blocks[b]), kv_layout_piece_bytes(&p->layout));
        } else {
            answer_error(p, "no such command");
            return;
        }
        answer(p, "ok");
    }
}

int main(int argc, char **argv)
{
    static char line[65536];
    struct peer p = { .layout = { .model_fingerprint = 9,
                                  .dtype = DTYPE_BF16,
                                  .block_tokens = TOKENS_PER_BLOCK,
                                  .n_layers = 4,
                                  .n_kv_heads = 2,
                                  .model_kv_heads = 2,
                                  .head_dim = 64,
                                  .tp_size = 1,
                                  .n_blocks = BLOCKS, }, };
    struct err err = { 0 };
    if (argc < 2) return 2;
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    pthread_mutex_init(&p.lock, NULL);
    p.metrics = metrics_create();
    if (device_open("cpu", &p.device, &err) != OK ||
        device_mem_alloc(p.device, kv_layout_pool_bytes(&p.layout), DEVICE_MEM_SHARED, &p.mem,
                         &err) != OK)
        return 2;
    memset(p.mem.ptr, CANARY, kv_layout_pool_bytes(&p.layout));
    struct kvt_options o = {
        .layout = p.layout,
        .mem = &p.mem,
        .protocols = argv[1],
        .listen_host = "127.0.0.1",
        .checksum = true,
        .n_transfers = 16,
        .stall_ms = STALL_MS,
        .tuning = { .fault = argc > 2 ? argv[2] : NULL },
        .metrics = p.metrics,
        .on_event = on_event,
        .arg = &p,
    };
    const char *host = getenv("KVT_PEER_HOST");
    if (host) o.listen_host = host;
    if (kvt_create(&o, &p.kvt, &err) != OK) {
        printf("error %s\n", err.text);
        return 1;
    }
    answer(&p, "ok ready");
    while (fgets(line, sizeof line, stdin)) {
        char *words[WORDS_MAX], *rest = line;
        int n = 0;
        for (char *w; n < WORDS_MAX && (w = strsep(&rest, " \n")) != NULL;)
            if (*w) words[n++] = w;
        if (n) do_line(&p, words, n);
    }
    kvt_free(p.kvt);
    device_mem_free(p.device, &p.mem);
    device_close(p.device);
    metrics_free(p.metrics);
    return 0;
}
