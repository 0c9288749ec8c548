/* bench_transfer.c - speed of KV transfers between two processes, and the machine's limits measured
 * in the same run. docs/performance.md explains the figures.
 *
 *     bench_transfer [ipc|tcp|all|how figures' names begin] [MiB per transfer, default 256]
 *                    [rounds, default 5] [copiers or connections, default 0: chosen]
 *
 * A line holds the best figure of the rounds, the best limit, their ratio, and the median over the
 * rounds of the ratio within a round. Limits
 *   ipc             memcpy of the same bytes by as many threads as copy; contiguous, and in pieces
 *                   of the figure's size that are scattered like its own
 *   iperf3          tcp over loopback, as many connections, the system's congestion control
 *   iperf3 -C reno  the same with the congestion control that our connections use there
 * The last lines give the CPU time per GB of each side, the least of the rounds. The sender is a
 * forked process; pieces are scattered at random in both pools. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "kernels/device.h"
#include "kvtransfer/kvtransfer.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

enum { LIMITS_MAX = 3, ROUNDS_MAX = 100, TRANSFERS = 4, IPERF_PORT = 46731, THREADS_MAX = 16 };

static void need(int ok, const char *what)
{
    if (ok) return;
    fprintf(stderr, "bench_transfer: %s failed\n", what);
    exit(1);
}

struct setting {
    size_t bytes;
    int rounds;
    uint32_t n; /* copiers, connections; 0: chosen */
};

/* ---- limits ---- */

/* Seconds of CPU time that this process has used. */
static double cpu_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

struct rate {
    double wall, sender_ms, receiver_ms; /* GB/s; CPU time per GB */
};

static int32_t *shuffled(uint32_t n, uint32_t seed)
{
    int32_t *t = MEM_ARRAY(int32_t, n);
    for (uint32_t i = 0; i < n; i++) t[i] = (int32_t)i;
    for (uint32_t i = n; seed && i > 1; i--) {
        seed = seed * 1664525 + 1013904223;
        uint32_t j = (uint32_t)((uint64_t)seed * i >> 32);
        int32_t swap = t[i - 1];
        t[i - 1] = t[j];
        t[j] = swap;
    }
    return t;
}

/* Pieces [first, first + n) of both tables. */
struct slice {
    char *to, *from;
    const int32_t *to_table, *from_table;
    size_t piece;
    uint32_t first, n;
};

static void *copy_slice(void *arg)
{
    const struct slice *s = arg;
    for (uint32_t i = s->first; i < s->first + s->n; i++)
        memcpy(s->to + (size_t)s->to_table[i] * s->piece,
               s->from + (size_t)s->from_table[i] * s->piece, s->piece);
    return NULL;
}

/* Copies pieces that are scattered at random on both sides, or lie one after the other. */
static struct rate memcpy_rate(size_t bytes, size_t piece, bool scattered, uint32_t n_threads)
{
    char *a = mem_aligned(4096, bytes), *b = mem_aligned(4096, bytes);
    struct slice slices[THREADS_MAX];
    pthread_t threads[THREADS_MAX];
    uint32_t n = (uint32_t)(bytes / piece / n_threads);
    int32_t *from = shuffled(n * n_threads, scattered ? 1 : 0),
            *to = shuffled(n * n_threads, scattered ? 2 : 0);
    memset(a, 1, bytes);
    memset(b, 2, bytes);
    uint64_t t = clock_ns();
    double cpu = cpu_s();
    for (int i = 0; i < TRANSFERS; i++) {
        for (uint32_t j = 0; j < n_threads; j++) {
            slices[j] = (struct slice){ b, a, to, from, piece, n * j, n };
            if (j)
                need(pthread_create(&threads[j], NULL, copy_slice, &slices[j]) == 0,
                     "pthread_create");
        }
        copy_slice(&slices[0]);
        for (uint32_t j = 1; j < n_threads; j++) pthread_join(threads[j], NULL);
    }
    double all = (double)piece * n * n_threads * TRANSFERS;
    struct rate rate = {
        .wall = all / (double)(clock_ns() - t),
        .sender_ms = (cpu_s() - cpu) * 1e12 / all,
    };
    mem_free(a);
    mem_free(b);
    mem_free(from);
    mem_free(to);
    return rate;
}

/* Bytes per second that iperf3 received; 0 if it is not installed. */
static double iperf_rate(uint32_t n_connections, const char *options)
{
    char command[256];
    snprintf(command, sizeof command,
             "iperf3 -s -1 -p %d >/dev/null 2>&1 & sleep 0.2; iperf3 -c 127.0.0.1 -p %d -P %u -t 1 "
             "%s -f k 2>/dev/null; wait",
             IPERF_PORT, IPERF_PORT, n_connections, options);
    FILE *f = popen(command, "r");
    need(f != NULL, "popen");
    char line[256];
    double kbits = 0;
    /* "[SUM] 0.00-1.00 sec 8.2 GBytes 70123456 Kbits/sec receiver"; the sum comes last */
    while (fgets(line, sizeof line, f)) {
        char *unit = strstr(line, "Kbits/sec");
        if (!unit || !strstr(line, "receiver")) continue;
        *unit = 0;
        char *number = unit;
        while (number > line && number[-1] == ' ') *--number = 0;
        number = strrchr(line, ' ');
        if (number) kbits = atof(number);
    }
    pclose(f);
    return kbits / 8e6;
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
    else if (ev->kind != KVT_PEER_LOST) {
        s->failed++;
        fprintf(stderr, "bench_transfer: event %d: %s\n", ev->kind, ev->text);
    }
}

static void wait_for(_Atomic int *counter, int value, struct seen *s)
{
    while (*counter < value) {
        need(!s->failed, "the transfer");
        nanosleep(&(struct timespec){ .tv_nsec = 20000 }, NULL);
    }
}

struct figure {
    const char *transport, *name;
    size_t piece;
    bool checksum;
    enum kvt_switch cma;
};

/* A piece holds tokens x heads x 128 x (K, V) in bf16: 512 bytes per token and head. A 7-8B model
 * with 8 KV heads has pieces of 256 KiB. */
static struct kv_layout layout_of(size_t piece, size_t bytes)
{
    struct kv_layout l = {
        .model_fingerprint = 1,
        .dtype = DTYPE_BF16,
        .block_tokens = piece >= 32768 ? 64 : 8,
        .n_layers = 16,
        .head_dim = 128,
        .tp_size = 1,
        .n_blocks = 1,
    };
    l.n_kv_heads = l.model_kv_heads = (uint32_t)(piece / 512 / l.block_tokens);
    l.n_blocks = (uint32_t)(bytes / kv_layout_block_bytes(&l));
    need(l.n_blocks >= 1 && kv_layout_piece_bytes(&l) == piece, "the layout");
    return l;
}

static struct kvt *start(const struct figure *f, const struct kv_layout *l, const struct setting *s,
                         struct device **device, struct dev_mem *mem, struct seen *seen)
{
    struct err err = { 0 };
    struct kvt *k = NULL;
    need(device_open("cpu", device, &err) == OK &&
             device_mem_alloc(*device, kv_layout_pool_bytes(l), DEVICE_MEM_SHARED, mem, &err) == OK,
         err.text);
    memset(mem->ptr, 1, kv_layout_pool_bytes(l)); /* no page faults are measured */
    struct kvt_options o = {
        .layout = *l,
        .mem = mem,
        .protocols = f->transport,
        .listen_host = "127.0.0.1",
        .checksum = f->checksum,
        .n_transfers = 4,
        .tuning = { .copiers = s->n, .tcp_connections = s->n, .cma = f->cma },
        .on_event = on_event,
        .arg = seen,
    };
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

static _Noreturn void sender(const struct figure *f, const struct kv_layout *l,
                             const struct setting *s, int in, int out)
{
    struct seen seen = { 0 };
    struct device *device;
    struct dev_mem mem;
    struct kvt *k = start(f, l, s, &device, &mem, &seen);
    struct buf b = { 0 };
    struct err err = { 0 };
    uint64_t peer;
    int32_t *table = shuffled(l->n_blocks, 1);
    kvt_hello(k, &b);
    put_all(out, &b);
    get_all(in, &b);
    need(kvt_connect(k, buf_str(&b), &peer, &err) == OK, err.text);
    wait_for(&seen.connected, 1, &seen);
    double cpu = 0;
    for (int i = 0; i <= TRANSFERS; i++) {
        if (i == 1) cpu = cpu_s();
        get_all(in, &b);
        need(kvt_send_open(k, (uint64_t)i, peer, buf_str(&b), &err) == OK, err.text);
        for (uint32_t layer = 0; layer < l->n_layers; layer++)
            need(kvt_send_ready(k, (uint64_t)i, layer, 0, l->n_blocks * l->block_tokens, table) ==
                     OK,
                 "kvt_send_ready");
        kvt_send_finish(k, (uint64_t)i);
        wait_for(&seen.sent, i + 1, &seen);
    }
    cpu = cpu_s() - cpu;
    need(write(out, &cpu, sizeof cpu) == sizeof cpu, "write");
    _exit(0);
}

/* Measures TRANSFERS transfers of all bytes, after one warm-up transfer. */
static struct rate transfer_rate(const struct figure *f, const struct setting *s)
{
    struct kv_layout l = layout_of(f->piece, s->bytes);
    int down[2], up[2];
    need(pipe(down) == 0 && pipe(up) == 0, "pipe");
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) sender(f, &l, s, down[0], up[1]);
    struct seen seen = { 0 };
    struct device *device;
    struct dev_mem mem;
    struct kvt *k = start(f, &l, s, &device, &mem, &seen);
    struct buf hello = { 0 }, b = { 0 };
    struct err err = { 0 };
    int32_t *table = shuffled(l.n_blocks, 2);
    get_all(up[0], &hello);
    need(kvt_answer(k, buf_str(&hello), &b, &err) == OK, err.text);
    put_all(down[1], &b);
    uint64_t t = 0;
    double cpu = 0, sender_cpu;
    for (int i = 0; i <= TRANSFERS; i++) {
        if (i == 1) t = clock_ns(), cpu = cpu_s();
        buf_clear(&b);
        need(kvt_expect(k, (uint64_t)i, table, l.n_blocks, 0, l.n_blocks * l.block_tokens, &b) ==
                 OK,
             "kvt_expect");
        put_all(down[1], &b);
        wait_for(&seen.received, i + 1, &seen);
    }
    double all = (double)kv_layout_pool_bytes(&l) * TRANSFERS;
    struct rate rate = {
        .wall = all / (double)(clock_ns() - t),
        .receiver_ms = (cpu_s() - cpu) * 1e12 / all,
    };
    need(read(up[0], &sender_cpu, sizeof sender_cpu) == sizeof sender_cpu, "read");
    rate.sender_ms = sender_cpu * 1e12 / all;
    waitpid(child, NULL, 0);
    kvt_free(k);
    device_mem_free(device, &mem);
    device_close(device);
    for (int i = 0; i < 2; i++) close(down[i]), close(up[i]);
    buf_release(&hello);
    buf_release(&b);
    mem_free(table);
    return rate;
}

/* ---- rounds ---- */

static double best(const double *v, int n)
{
    double b = 0;
    for (int i = 0; i < n; i++) b = v[i] > b ? v[i] : b;
    return b;
}

static int compare(const void *a, const void *b)
{
    return *(const double *)a < *(const double *)b ? -1 : *(const double *)a > *(const double *)b;
}

static double median_ratio(const double *v, const double *limit, int n)
{
    double r[ROUNDS_MAX];
    for (int i = 0; i < n; i++) r[i] = v[i] / limit[i];
    qsort(r, (size_t)n, sizeof *r, compare);
    return r[n / 2];
}

/* Keeps the least CPU times so far. */
static void keep_least(struct rate *least, struct rate r)
{
    if (least->sender_ms <= 0 || r.sender_ms < least->sender_ms) least->sender_ms = r.sender_ms;
    if (least->receiver_ms <= 0 || r.receiver_ms < least->receiver_ms)
        least->receiver_ms = r.receiver_ms;
}

/* What bounds figures: all of them, or those of one size of pieces. */
struct limit {
    const char *name;
    size_t piece; /* 0: all */
    struct rate (*measure)(const struct setting *s, const struct limit *l);
};

static void print_ratios(const struct figure *f, const double *got, const struct limit *l,
                         const double *limit, int rounds)
{
    double top = best(limit, rounds), mine = best(got, rounds);
    if (l->piece && l->piece != f->piece) return;
    if (top <= 0) {
        printf("%-44s %6.2f GB/s   limit unknown: %s is not installed\n", f->name, mine, l->name);
        return;
    }
    printf("%-44s %6.2f GB/s   limit %6.2f GB/s %-24s ratio %.3f   median of rounds %.3f\n",
           f->name, mine, top, l->name, mine / top, median_ratio(got, limit, rounds));
}

static void run(const struct figure *figures, size_t n_figures, const struct limit *limit,
                int n_limits, const struct setting *s)
{
    static double got[16][ROUNDS_MAX], limits[LIMITS_MAX][ROUNDS_MAX];
    struct rate least[16] = { 0 }, limit_least[LIMITS_MAX] = { 0 };
    for (int i = 0; i < s->rounds; i++) {
        for (int j = 0; j < n_limits; j++) {
            struct rate r = limit[j].measure(s, &limit[j]);
            limits[j][i] = r.wall;
            keep_least(&limit_least[j], r);
        }
        for (size_t j = 0; j < n_figures; j++) {
            struct rate r = transfer_rate(&figures[j], s);
            got[j][i] = r.wall;
            keep_least(&least[j], r);
        }
    }
    for (size_t j = 0; j < n_figures; j++)
        for (int k = 0; k < n_limits; k++)
            print_ratios(&figures[j], got[j], &limit[k], limits[k], s->rounds);
    for (size_t j = 0; j < n_figures; j++) {
        const struct figure *f = &figures[j];
        printf("%-44s CPU time per GB: sender %5.1f ms, receiver %5.1f ms", f->name,
               least[j].sender_ms, least[j].receiver_ms);
        for (int k = 0; k < n_limits; k++)
            if (limit_least[k].sender_ms > 0 && (!limit[k].piece || limit[k].piece == f->piece))
                printf("; %s %.1f ms, ratio of the sender's %.3f", limit[k].name,
                       limit_least[k].sender_ms, limit_least[k].sender_ms / least[j].sender_ms);
        printf("\n");
    }
}

static uint32_t ipc_threads(const struct setting *s)
{
    if (s->n) return s->n < THREADS_MAX ? s->n : THREADS_MAX;
    long cpus = sysconf(_SC_NPROCESSORS_ONLN); /* transport: of the allowed CPUs */
    return cpus <= 2 ? 1 : cpus >= 8 ? 4 : (uint32_t)cpus / 2;
}

static struct rate memcpy_limit(const struct setting *s, const struct limit *l)
{
    const size_t put = 1 << 20;
    return memcpy_rate(s->bytes, l->piece ? l->piece : put, l->piece > 0, ipc_threads(s));
}

static struct rate iperf_limit(const struct setting *s, const struct limit *l)
{
    const char *options = strchr(l->name, '-');
    return (struct rate){ .wall = iperf_rate(s->n ? s->n : 1, options ? options : "") };
}

static const struct limit MEMCPY[] = {
    { "memcpy", 0, memcpy_limit },
    { "memcpy, 64 KiB scattered", 64 << 10, memcpy_limit },
    { "memcpy, 4 KiB scattered", 4 << 10, memcpy_limit },
};

static const struct limit IPERF[] = {
    { "iperf3", 0, iperf_limit },
    { "iperf3 -C reno", 0, iperf_limit },
};

static const struct figure IPC[] = {
    { "ipc", "ipc, 1 MiB pieces, checksum off", 1 << 20, false, KVT_OFF },
    { "ipc", "ipc, 1 MiB pieces, checksum on", 1 << 20, true, KVT_OFF },
    { "ipc", "ipc, 64 KiB pieces, checksum off", 64 << 10, false, KVT_OFF },
    { "ipc", "ipc, 64 KiB pieces, checksum on", 64 << 10, true, KVT_OFF },
    { "ipc", "ipc, 4 KiB scattered, checksum off", 4 << 10, false, KVT_OFF },
    { "ipc", "ipc, 4 KiB scattered, checksum on", 4 << 10, true, KVT_OFF },
    { "ipc", "ipc by process_vm_writev, 1 MiB, checksum off", 1 << 20, false, KVT_ON },
};

static const struct figure TCP[] = {
    { "tcp", "tcp, 1 MiB pieces, checksum off", 1 << 20, false, KVT_OFF },
    { "tcp", "tcp, 1 MiB pieces, checksum on", 1 << 20, true, KVT_OFF },
    { "tcp", "tcp, 4 KiB scattered, checksum off", 4 << 10, false, KVT_OFF },
    { "tcp", "tcp, 4 KiB scattered, checksum on", 4 << 10, true, KVT_OFF },
};

/* Runs the figures whose names begin with `what`, or all. */
static bool run_named(const char *what, const struct figure *figures, size_t n_figures,
                      const struct limit *limit, int n_limits, const struct setting *s)
{
    struct figure chosen[16];
    size_t n = 0;
    for (size_t i = 0; i < n_figures; i++)
        if (strcmp(what, "all") == 0 || strncmp(figures[i].name, what, strlen(what)) == 0)
            chosen[n++] = figures[i];
    if (n) run(chosen, n, limit, n_limits, s);
    return n > 0;
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "all";
    struct setting s = {
        .bytes = (size_t)(argc > 2 ? atol(argv[2]) : 256) << 20,
        .rounds = argc > 3 ? atoi(argv[3]) : 5,
        .n = argc > 4 ? (uint32_t)atoi(argv[4]) : 0,
    };
    bool good = s.bytes >= 32 << 20 && s.rounds >= 1 && s.rounds <= ROUNDS_MAX &&
                s.n <= THREADS_MAX;
    log_set_level(LOG_ERROR);
    if (good)
        printf("%zu MiB per transfer, %d transfers a round, %d rounds; memcpy by %u threads\n",
               s.bytes >> 20, TRANSFERS, s.rounds, ipc_threads(&s));
    bool ipc = good && run_named(what, IPC, COUNT_OF(IPC), MEMCPY, COUNT_OF(MEMCPY), &s),
         tcp = good && run_named(what, TCP, COUNT_OF(TCP), IPERF, COUNT_OF(IPERF), &s);
    if (ipc || tcp) return 0;
    fprintf(stderr,
            "usage: bench_transfer [ipc|tcp|all|how figures' names begin] [MiB, at least 32] "
            "[rounds, 1 to %d] [copiers or connections, 0 to %d]\n",
            ROUNDS_MAX, THREADS_MAX);
    return 2;
}
