/* bench_transfer.c - how fast KV moves between two processes, next to what the machine can do, in the same run.
 *
 *     bench_transfer [MiB per transfer, default 256] [rounds, default 5]
 *
 * Limits: memcpy of the same bytes (for ipc), and a plain loopback socket with 1 MiB writes into reads (for tcp). Each figure is the best of
 * the rounds. The sender is a forked process, as in a cluster. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "kernels/device.h"
#include "kvtransfer/kvtransfer.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

enum { WRITE_BYTES = 1 << 20 };

static void need(int ok, const char *what)
{
    if (ok) return;
    fprintf(stderr, "bench_transfer: %s failed\n", what);
    exit(1);
}

/* A layer piece of a 7-8B model with grouped heads: 64 tokens x 8 heads x 128 x (K, V) in bf16 = 256 KiB. */
static struct kv_layout bench_layout(size_t bytes)
{
    struct kv_layout l = { .model_fingerprint = 1, .dtype = DTYPE_BF16, .block_tokens = 64, .n_layers = 16, .n_kv_heads = 8, .head_dim = 128,
                           .tp_size = 1, .n_blocks = 1 };
    l.n_blocks = (uint32_t)(bytes / kv_layout_block_bytes(&l));
    if (l.n_blocks < 1) l.n_blocks = 1;
    return l;
}

/* ---- limits ---- */

static double memcpy_rate(size_t bytes, int rounds)
{
    char *a = mem_aligned(4096, bytes), *b = mem_aligned(4096, bytes);
    double best = 0;
    memset(a, 1, bytes);
    memset(b, 2, bytes);
    for (int i = 0; i < rounds; i++) {
        uint64_t t = clock_ns();
        for (size_t at = 0; at < bytes; at += WRITE_BYTES) memcpy(b + at, a + at, bytes - at < WRITE_BYTES ? bytes - at : WRITE_BYTES);
        double rate = (double)bytes / (double)(clock_ns() - t);
        if (rate > best) best = rate;
    }
    mem_free(a);
    mem_free(b);
    return best;
}

static double socket_rate(size_t bytes, int rounds)
{
    int l = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t n = sizeof a;
    need(bind(l, (struct sockaddr *)&a, n) == 0 && listen(l, 1) == 0 && getsockname(l, (struct sockaddr *)&a, &n) == 0, "listen");
    char *memory = mem_aligned(4096, bytes);
    memset(memory, 1, bytes);
    pid_t child = fork();
    int fd = -1;
    if (child == 0) {
        fd = socket(AF_INET, SOCK_STREAM, 0);
        need(connect(fd, (struct sockaddr *)&a, n) == 0, "connect");
        for (size_t at = 0, total = bytes * (size_t)rounds; at < total;) {
            size_t from = at % bytes, len = bytes - from < WRITE_BYTES ? bytes - from : WRITE_BYTES;
            ssize_t sent = send(fd, memory + from, len, 0);
            if (sent <= 0) _exit(1);
            at += (size_t)sent;
        }
        _exit(0);
    }
    fd = accept(l, NULL, NULL);
    double best = 0;
    for (int i = 0; i < rounds; i++) {
        uint64_t t = clock_ns();
        for (size_t at = 0; at < bytes;) {
            ssize_t got = recv(fd, memory + at, bytes - at < WRITE_BYTES ? bytes - at : WRITE_BYTES, 0);
            need(got > 0, "recv");
            at += (size_t)got;
        }
        double rate = (double)bytes / (double)(clock_ns() - t);
        if (rate > best) best = rate;
    }
    close(fd);
    close(l);
    waitpid(child, NULL, 0);
    mem_free(memory);
    return best;
}

/* ---- the transfer ---- */

struct seen {
    _Atomic int connected, sent, received, failed;
};

static void on_event(void *arg, const struct kvt_event *ev)
{
    struct seen *s = arg;
    if (ev->kind == KVT_CONNECTED) s->connected++;
    else if (ev->kind == KVT_SENT) s->sent++;
    else if (ev->kind == KVT_RECEIVED) s->received++;
    else if (ev->kind != KVT_PEER_LOST) s->failed++;
}

static void wait_for(_Atomic int *counter, int value, struct seen *s)
{
    while (*counter < value) {
        need(!s->failed, "the transfer");
        nanosleep(&(struct timespec){ .tv_nsec = 20000 }, NULL);
    }
}

static struct kvt *start(const char *row, const struct kv_layout *l, bool checksum, struct dev_mem *mem, struct seen *seen)
{
    struct device *device;
    struct err err = { 0 };
    struct kvt *k = NULL;
    need(device_open("cpu", &device, &err) == OK && device_mem_alloc(device, kv_layout_pool_bytes(l), DEVICE_MEM_SHARED, mem, &err) == OK, err.text);
    memset(mem->ptr, 1, kv_layout_pool_bytes(l)); /* touched: page faults are not the subject */
    struct kvt_options o = { .layout = *l, .mem = mem, .protocols = row, .listen_host = "127.0.0.1", .checksum = checksum, .n_transfers = 4,
                             .on_event = on_event, .arg = seen };
    need(kvt_create(&o, &k, &err) == OK, err.text);
    return k;
}

static void put_all(int fd, const struct buf *b)
{
    uint32_t n = (uint32_t)b->len;
    need(write(fd, &n, sizeof n) == sizeof n && write(fd, b->data, n) == (ssize_t)n, "write");
}

static void get_all(int fd, struct buf *b)
{
    uint32_t n;
    buf_clear(b);
    need(read(fd, &n, sizeof n) == sizeof n, "read");
    char *p = buf_reserve(b, n);
    for (size_t have = 0; have < n;) {
        ssize_t got = read(fd, p + have, n - have);
        need(got > 0, "read");
        have += (size_t)got;
    }
    b->len += n;
}

static _Noreturn void sender(const char *row, const struct kv_layout *l, int rounds, int in, int out)
{
    struct seen seen = { 0 };
    struct dev_mem mem;
    struct kvt *k = start(row, l, true, &mem, &seen);
    struct buf b = { 0 };
    struct err err = { 0 };
    uint64_t peer;
    int32_t *table = MEM_ARRAY(int32_t, l->n_blocks);
    for (uint32_t i = 0; i < l->n_blocks; i++) table[i] = (int32_t)((i * 7) % l->n_blocks); /* scattered when 7 does not divide it */
    kvt_hello(k, &b);
    put_all(out, &b);
    get_all(in, &b);
    need(kvt_connect(k, buf_str(&b), &peer, &err) == OK, err.text);
    wait_for(&seen.connected, 1, &seen);
    for (int i = 0; i < rounds; i++) {
        get_all(in, &b);
        need(kvt_send_open(k, (uint64_t)i, peer, buf_str(&b), &err) == OK, err.text);
        for (uint32_t layer = 0; layer < l->n_layers; layer++)
            need(kvt_send_ready(k, (uint64_t)i, layer, 0, l->n_blocks * l->block_tokens, table) == OK, "kvt_send_ready");
        kvt_send_finish(k, (uint64_t)i);
        wait_for(&seen.sent, i + 1, &seen);
    }
    _exit(0);
}

static double transfer_rate(const char *row, size_t bytes, int rounds, bool checksum)
{
    struct kv_layout l = bench_layout(bytes);
    int down[2], up[2];
    need(pipe(down) == 0 && pipe(up) == 0, "pipe");
    pid_t child = fork();
    if (child == 0) sender(row, &l, rounds, down[0], up[1]);
    struct seen seen = { 0 };
    struct dev_mem mem;
    struct kvt *k = start(row, &l, checksum, &mem, &seen);
    struct buf hello = { 0 }, b = { 0 };
    struct err err = { 0 };
    int32_t *table = MEM_ARRAY(int32_t, l.n_blocks);
    for (uint32_t i = 0; i < l.n_blocks; i++) table[i] = (int32_t)i;
    get_all(up[0], &hello);
    need(kvt_answer(k, buf_str(&hello), &b, &err) == OK, err.text);
    put_all(down[1], &b);
    double best = 0;
    for (int i = 0; i < rounds; i++) {
        buf_clear(&b);
        need(kvt_expect(k, (uint64_t)i, table, l.n_blocks, 0, l.n_blocks * l.block_tokens, &b) == OK, "kvt_expect");
        uint64_t t = clock_ns();
        put_all(down[1], &b);
        wait_for(&seen.received, i + 1, &seen);
        double rate = (double)kv_layout_pool_bytes(&l) / (double)(clock_ns() - t);
        if (rate > best) best = rate;
    }
    waitpid(child, NULL, 0);
    kvt_free(k);
    buf_release(&hello);
    buf_release(&b);
    mem_free(table);
    return best;
}

int main(int argc, char **argv)
{
    size_t bytes = (size_t)(argc > 1 ? atol(argv[1]) : 256) << 20;
    int rounds = argc > 2 ? atoi(argv[2]) : 5;
    if (bytes == 0 || rounds < 1) {
        fprintf(stderr, "usage: bench_transfer [MiB] [rounds]\n");
        return 2;
    }
    log_set_level(LOG_ERROR);
    double copy = memcpy_rate(bytes, rounds), wire = socket_rate(bytes, rounds);
    printf("%zu MiB per transfer, best of %d\n", bytes >> 20, rounds);
    printf("memcpy, 1 thread       %6.2f GB/s\nloopback socket        %6.2f GB/s\n", copy, wire);
    for (int row = 0; row < 2; row++)
        for (int checksum = 1; checksum >= 0; checksum--) {
            const char *name = row ? "tcp" : "ipc";
            double rate = transfer_rate(name, bytes, rounds, checksum);
            printf("%s checksum %-3s       %6.2f GB/s   %5.1f %% of %s\n", name, checksum ? "on" : "off", rate, 100 * rate / (row ? wire : copy),
                   row ? "the socket" : "memcpy");
        }
    return 0;
}
