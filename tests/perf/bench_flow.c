/* bench_flow.c - continuous transfers between two processes, and the bytes that arrive in each
 * tenth of a second, to watch what a disturbance of a link or a process does.
 *
 *     bench_flow PROTOCOL SECONDS [sender's devices] [receiver's devices]
 *     devices: as in KVCACHE_RDMA_NICS, for ucx as in UCX_NET_DEVICES; BATON_RDMA_CM=1 works too
 *
 * Two transfers of 1 MiB are always in flight. The sender writes a pattern of (transfer, block,
 * position) into its blocks, and the receiver compares every byte. A failed transfer is counted and
 * its blocks are reused once they are fenced; a lost connection is made again. One line per tenth
 * of a second: milliseconds since the first grant, bytes verified, transfers failed so far. Exit
 * status 1: a byte was wrong, or nothing arrived. This process receives, its child sends; they
 * exchange hello, answer and grants over a socket pair.
 * Thread: the transfer thread only writes its events into a pipe; the main thread does the rest. */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/device.h"
#include "kvtransfer/kvtransfer.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

enum {
    SLOTS = 2,
    BLOCKS = 64,
    MESSAGE_MAX = 64 * 1024,
    SAMPLE_MS = 100,
    RETRY_MS = 20,
    STALL_MS = 5000
};
/* UP: the sender is connected; FAILED: it could not send, or its send failed */
enum kind { HELLO, ANSWER, UP, GRANT, FAILED };

struct message {
    enum kind kind;
    uint64_t id;
};

struct side {
    const char *protocol;
    struct device *device;
    struct dev_mem mem;
    struct kv_layout layout;
    struct kvt *kvt;
    int events[2], wire;
};

static void need(int ok, const char *what)
{
    if (ok) return;
    fprintf(stderr, "bench_flow: %s\n", what);
    exit(2);
}

/* 64 blocks of 1 MiB in all: 4 layers x 4 KiB. */
static struct kv_layout flow_layout(void)
{
    return (struct kv_layout){
        .model_fingerprint = 1,
        .dtype = DTYPE_BF16,
        .block_tokens = 8,
        .n_layers = 4,
        .n_kv_heads = 1,
        .model_kv_heads = 1,
        .head_dim = 128,
        .tp_size = 1,
        .n_blocks = SLOTS * BLOCKS,
    };
}

static void on_event(void *arg, const struct kvt_event *ev)
{
    struct side *s = arg;
    /* less than PIPE_BUF, so atomic */
    if (write(s->events[1], ev, sizeof *ev) != (ssize_t)sizeof *ev) _exit(2);
}

static void side_open(struct side *s, const char *nics)
{
    struct err err = { 0 };
    struct kvt_options o = { .protocols = s->protocol,
                             .listen_host = "127.0.0.1",
                             .checksum = true,
                             .n_transfers = SLOTS * 2,
                             .stall_ms = STALL_MS,
                             .tuning = { .rdma = { .nics = nics,
                                                   .rdma_cm = getenv("BATON_RDMA_CM") != NULL, }, },
                             .on_event = on_event,
                             .arg = s, };
    if (nics && strcmp(s->protocol, "ucx") == 0) setenv("UCX_NET_DEVICES", nics, 1);
    s->layout = flow_layout();
    need(pipe(s->events) == 0, "no pipe");
    need(device_open("cpu", &s->device, &err) == OK &&
             device_mem_alloc(s->device, kv_layout_pool_bytes(&s->layout), DEVICE_MEM_SHARED,
                              &s->mem, &err) == OK,
         err.text);
    o.layout = s->layout;
    o.mem = &s->mem;
    need(kvt_create(&o, &s->kvt, &err) == OK, err.text);
}

static void send_message(const struct side *s, enum kind kind, uint64_t id, struct str body)
{
    char text[MESSAGE_MAX];
    struct message m = { kind, id };
    need(body.n <= sizeof text - sizeof m, "a message is too long");
    memcpy(text, &m, sizeof m);
    if (body.n) memcpy(text + sizeof m, body.p, body.n);
    /* the other side has ended */
    if (send(s->wire, text, sizeof m + body.n, MSG_NOSIGNAL) < 0) exit(0);
}

/* False when the other side has ended. *body points into text. */
static bool receive_message(const struct side *s, char text[MESSAGE_MAX], struct message *m,
                            struct str *body)
{
    ssize_t n = recv(s->wire, text, MESSAGE_MAX, 0);
    if (n < (ssize_t)sizeof *m) return false;
    memcpy(m, text, sizeof *m);
    *body = (struct str){ text + sizeof *m, (size_t)n - sizeof *m };
    return true;
}

static void next_event(const struct side *s, struct kvt_event *ev)
{
    need(read(s->events[0], ev, sizeof *ev) == (ssize_t)sizeof *ev, "no event");
}

/* ---- the pattern ---- */

static void table_of(int slot, int32_t table[BLOCKS])
{
    /* scattered: 37 and 64 have no common factor */
    for (int i = 0; i < BLOCKS; i++) table[i] = slot * BLOCKS + (i * 37) % BLOCKS;
}

static uint64_t word_of(uint64_t id, uint32_t layer, uint32_t block, uint64_t at)
{
    return (id * UINT64_C(0x9e3779b97f4a7c15) ^ ((uint64_t)layer << 32 | block)) *
               UINT64_C(0xbf58476d1ce4e5b9) +
           at;
}

static uint64_t *piece(const struct side *s, uint32_t layer, int32_t block)
{
    return (uint64_t *)((char *)s->mem.ptr + kv_layout_offset(&s->layout, layer, (uint32_t)block));
}

/* Writes the pattern of transfer `id`, or with `check` counts the words that differ from it. */
static uint64_t pattern(const struct side *s, uint64_t id, const int32_t table[BLOCKS], bool check)
{
    uint64_t wrong = 0, words = kv_layout_piece_bytes(&s->layout) / sizeof(uint64_t);
    for (uint32_t layer = 0; layer < s->layout.n_layers; layer++)
        for (uint32_t b = 0; b < BLOCKS; b++) {
            uint64_t *p = piece(s, layer, table[b]);
            for (uint64_t i = 0; i < words; i++) {
                if (check) wrong += p[i] != word_of(id, layer, b, i);
                else p[i] = word_of(id, layer, b, i);
            }
        }
    return wrong;
}

/* ---- sender ---- */

struct sender {
    struct side side;
    uint64_t peer;
    bool up, asked;
};

static void sender_connect(struct sender *s)
{
    struct buf hello = { 0 };
    kvt_hello(s->side.kvt, &hello);
    send_message(&s->side, HELLO, 0, buf_str(&hello));
    buf_release(&hello);
    s->asked = true;
}

static void sender_send(struct sender *s, uint64_t id, struct str grant)
{
    struct side *d = &s->side;
    int32_t table[BLOCKS];
    struct err err = { 0 };
    table_of((int)(id % SLOTS), table);
    pattern(d, id, table, false);
    enum status st = s->up ? kvt_send_open(d->kvt, id, s->peer, grant, &err) : ERR_PEER_LOST;
    if (st != OK) {
        send_message(d, FAILED, id, (struct str){ 0 });
        return;
    }
    for (uint32_t layer = 0; st == OK && layer < d->layout.n_layers; layer++)
        st = kvt_send_ready(d->kvt, id, layer, 0, BLOCKS * d->layout.block_tokens, table);
    kvt_send_finish(d->kvt, id); /* SENT or SEND_FAILED follows in any case */
}

static void sender_event(struct sender *s, const struct kvt_event *ev)
{
    if (ev->kind == KVT_CONNECTED) {
        s->up = true;
        send_message(&s->side, UP, 0, (struct str){ 0 });
    } else if (ev->kind == KVT_SEND_FAILED)
        send_message(&s->side, FAILED, ev->id, (struct str){ 0 });
    else if (ev->kind == KVT_PEER_LOST) {
        fprintf(stderr, "bench_flow: the sender's connection ended: %s\n", ev->text);
        s->up = s->asked = false;
    }
}

static void sender_message(struct sender *s, const struct message *m, struct str body)
{
    struct err err = { 0 };
    if (m->kind == GRANT) sender_send(s, m->id, body);
    else if (m->kind == ANSWER &&
             (body.n == 0 || kvt_connect(s->side.kvt, body, &s->peer, &err) != OK)) {
        if (body.n) fprintf(stderr, "bench_flow: no connection: %s\n", err.text);
        s->asked = false;
    }
}

static _Noreturn void sender_run(const char *protocol, const char *nics, int wire)
{
    static char text[MESSAGE_MAX];
    struct sender s = { .side = { .protocol = protocol, .wire = wire } };
    struct message m;
    struct str body;
    struct kvt_event ev;
    side_open(&s.side, nics);
    for (;;) {
        if (!s.asked) sender_connect(&s);
        struct pollfd p[] = { { .fd = wire, .events = POLLIN },
                              { .fd = s.side.events[0], .events = POLLIN } };
        poll(p, 2, -1);
        if (p[1].revents) {
            next_event(&s.side, &ev);
            sender_event(&s, &ev);
            if (!s.up && !s.asked) usleep(RETRY_MS * 1000);
        }
        if (p[0].revents) {
            if (!receive_message(&s.side, text, &m, &body)) _exit(0);
            sender_message(&s, &m, body);
        }
    }
}

/* ---- receiver ---- */

enum slot_state { FREE, OPEN, FENCING };

struct receiver {
    struct side side;
    enum slot_state state[SLOTS];
    uint64_t id[SLOTS], again_ms[SLOTS]; /* not before */
    uint64_t next, arrived, bytes, failed, wrong;
    bool connected;
    char last_failure[160];
};

static void receiver_grant(struct receiver *r, int slot)
{
    struct buf grant = { 0 };
    int32_t table[BLOCKS];
    uint64_t id = r->next++ * SLOTS + (uint64_t)slot;
    table_of(slot, table);
    enum status st = kvt_expect(r->side.kvt, id, table, BLOCKS, 0,
                                BLOCKS * r->side.layout.block_tokens, &grant);
    if (st == OK) {
        r->state[slot] = OPEN;
        r->id[slot] = id;
        send_message(&r->side, GRANT, id, buf_str(&grant));
    } else r->again_ms[slot] = clock_ms() + RETRY_MS;
    buf_release(&grant);
}

static void receiver_event(struct receiver *r, const struct kvt_event *ev)
{
    int slot = (int)(ev->id % SLOTS);
    int32_t table[BLOCKS];
    if (kvt_event_is_of_peer(ev->kind) || r->id[slot] != ev->id || r->state[slot] == FREE) return;
    if (ev->kind == KVT_RECEIVED) {
        table_of(slot, table);
        r->wrong += pattern(&r->side, ev->id, table, true);
        r->bytes += kv_layout_pool_bytes(&r->side.layout) / SLOTS;
        r->arrived++;
        r->state[slot] = FREE;
    } else if (ev->kind == KVT_RECEIVE_FAILED) {
        r->failed += r->state[slot] == OPEN;
        snprintf(r->last_failure, sizeof r->last_failure, "%s", ev->text);
        r->state[slot] = FENCING;
    } else if (ev->kind == KVT_FENCED) {
        r->state[slot] = FREE;
        r->again_ms[slot] = clock_ms() + RETRY_MS;
    }
}

static bool receiver_message(struct receiver *r)
{
    static char text[MESSAGE_MAX];
    struct message m;
    struct str body;
    struct buf answer = { 0 };
    struct err err = { 0 };
    if (!receive_message(&r->side, text, &m, &body)) return false;
    int slot = (int)(m.id % SLOTS);
    if (m.kind == HELLO) {
        if (kvt_answer(r->side.kvt, body, &answer, &err) != OK)
            fprintf(stderr, "bench_flow: refused: %s\n", err.text);
        send_message(&r->side, ANSWER, 0, buf_str(&answer));
        buf_release(&answer);
        r->connected = false;
    } else if (m.kind == UP) r->connected = true;
    else if (m.kind == FAILED && r->id[slot] == m.id && r->state[slot] == OPEN) {
        r->failed++;
        r->state[slot] = FENCING;
        kvt_expect_cancel(r->side.kvt, m.id);
    }
    return true;
}

static bool receiver_step(struct receiver *r, uint64_t until_ms)
{
    struct kvt_event ev;
    uint64_t now = clock_ms(), wake = until_ms;
    for (int i = 0; r->connected && i < SLOTS; i++) {
        if (r->state[i] != FREE) continue;
        if (r->again_ms[i] <= now) receiver_grant(r, i);
        else if (r->again_ms[i] < wake) wake = r->again_ms[i];
    }
    struct pollfd p[] = { { .fd = r->side.wire, .events = POLLIN },
                          { .fd = r->side.events[0], .events = POLLIN } };
    poll(p, 2, wake > now ? (int)(wake - now) : 0);
    if (p[1].revents) {
        next_event(&r->side, &ev);
        receiver_event(r, &ev);
    }
    return !p[0].revents || receiver_message(r);
}

static int receiver_run(struct receiver *r, double seconds)
{
    uint64_t start = 0, sample = clock_ms() + SAMPLE_MS, seen = 0;
    bool there = true;
    while (there && (!start || clock_ms() - start < (uint64_t)(seconds * 1000))) {
        there = receiver_step(r, sample);
        if (!start && r->arrived) start = clock_ms();
        if (clock_ms() < sample) continue;
        if (start)
            printf("%7llu ms %9llu bytes %4llu failed\n", (unsigned long long)(clock_ms() - start),
                   (unsigned long long)(r->bytes - seen), (unsigned long long)r->failed);
        fflush(stdout);
        seen = r->bytes;
        sample = clock_ms() + SAMPLE_MS;
    }
    if (r->last_failure[0]) printf("last failure: %s\n", r->last_failure);
    printf("%s: %llu transfers received, %llu bytes, %llu failed, %llu words wrong%s\n",
           r->side.protocol, (unsigned long long)r->arrived, (unsigned long long)r->bytes,
           (unsigned long long)r->failed, (unsigned long long)r->wrong,
           there ? "" : "; the sender ended");
    return r->wrong || !r->arrived || !there;
}

int main(int argc, char **argv)
{
    int wire[2];
    double seconds = argc > 2 ? atof(argv[2]) : 0;
    if (argc < 3 || argc > 5 || seconds <= 0) {
        fprintf(stderr,
                "usage: bench_flow PROTOCOL SECONDS [sender's devices] [receiver's devices]\n");
        return 2;
    }
    if (!getenv("BATON_LOG_LEVEL")) log_set_level(LOG_ERROR);
    need(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, wire) == 0, "no socket pair");
    pid_t child = fork();
    need(child >= 0, "no child");
    if (child == 0) {
        close(wire[1]);
        sender_run(argv[1], argc > 3 ? argv[3] : NULL, wire[0]);
    }
    close(wire[0]);
    struct receiver r = { .side = { .protocol = argv[1], .wire = wire[1] } };
    side_open(&r.side, argc > 4 ? argv[4] : NULL);
    int rc = receiver_run(&r, seconds);
    kvt_free(r.side.kvt);
    close(wire[1]); /* makes the sender end */
    waitpid(child, NULL, 0);
    device_mem_free(r.side.device, &r.side.mem);
    device_close(r.side.device);
    return rc;
}
