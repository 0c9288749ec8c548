/* gpu_kv_push.c - KV from the pool of one process to the pool of another on the same GPU, over CUDA
 * IPC as nodes do it, beside cudaMemcpy from device memory to device memory in the same rounds.
 *
 * The sender is a process forked before this one has used CUDA. Blocks are those of Qwen3-30B-A3B,
 * scattered in both pools. A transfer is measured from the grant to the message that everything has
 * arrived. Its fixed cost, a transfer that moves nothing, is a figure of its own: 12 GiB take some
 * 6 ms, 3 GiB 1.5 ms. What the copies alone take, without messages, is another. */
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "kernels/copy_stream.h"
#include "kvtransfer/kvtransfer.h"
#include "shared/base/clock.h"
#include "shared/base/mem.h"
#include "tests/gpu/bench/gpu.h"
#include "tests/gpu/bench/gpu_copies.h"
#include "tests/gpu/bench/gpu_kernels.h"

enum { ROUNDS = 8, STALL_S = 60 };

struct side {
    struct kv_layout layout;
    struct device *device;
    struct dev_mem pool;
    struct kvt *kvt;
    int32_t *table;
    bool checksum; /* computed on the sender's GPU, verified on the receiver's */
    int in, out;
    int n_expected;
    _Atomic int connected, sent, received, failed;
};

static void on_event(void *arg, const struct kvt_event *ev)
{
    struct side *s = arg;
    if (ev->kind == KVT_CONNECTED) s->connected++;
    else if (ev->kind == KVT_SENT) s->sent++;
    else if (ev->kind == KVT_RECEIVED) s->received++;
    else if (ev->kind != KVT_PEER_LOST) {
        fprintf(stderr, "bench_gpu: event %d: %s\n", ev->kind, ev->text);
        s->failed++;
    }
}

static void wait_for(const struct side *s, const _Atomic int *counter, int value)
{
    const uint64_t end = clock_ms() + STALL_S * 1000;
    while (*counter < value) { /* a sleep would be 50 us late */
        gpu_need(!s->failed && clock_ms() < end, "a transfer failed or stood still", NULL);
        sched_yield();
    }
}

/* Sends a message to the other side: its length, then its bytes. */
static void put(const struct side *s, const struct buf *b)
{
    const uint32_t n = (uint32_t)b->len;
    gpu_need(write(s->out, &n, sizeof n) == sizeof n && write(s->out, b->data, n) == (ssize_t)n,
             "the other process is gone", NULL);
}

static void get(const struct side *s, struct buf *b)
{
    uint32_t n;
    buf_clear(b);
    gpu_need(read(s->in, &n, sizeof n) == sizeof n, "the other process is gone", NULL);
    char *p = buf_reserve(b, n);
    for (size_t have = 0; have < n;) {
        const ssize_t more = read(s->in, p + have, n - have);
        gpu_need(more > 0, "the other process is gone", NULL);
        have += (size_t)more;
    }
    b->len += n;
}

static struct kv_layout layout_of(bool tiny)
{
    struct kv_layout l = { .model_fingerprint = 1,
                           .dtype = DTYPE_BF16,
                           .block_tokens = 64,
                           .n_layers = tiny ? 2 : 48,
                           .n_kv_heads = 4,
                           .model_kv_heads = 4,
                           .head_dim = 128,
                           .tp_size = 1,
                           .n_blocks = tiny ? 4 : 2048,
                           /* 128k tokens, 12 GiB */ };
    if (tiny) l.n_kv_heads = l.model_kv_heads = 1, l.head_dim = 64;
    return l;
}

static int32_t *scattered(uint32_t n, uint32_t by)
{
    int32_t *t = MEM_ARRAY(int32_t, n);
    /* n is a power of two, by is odd */
    for (uint32_t i = 0; i < n; i++) t[i] = (int32_t)(i * by % n);
    return t;
}

static void start(struct side *s, bool tiny, uint32_t by)
{
    struct err err;
    s->layout = layout_of(tiny);
    s->table = scattered(s->layout.n_blocks, by);
    const size_t bytes = kv_layout_pool_bytes(&s->layout);
    gpu_need(device_open("cuda", &s->device, &err) == OK &&
                 device_mem_alloc(s->device, bytes, DEVICE_MEM_SHARED, &s->pool, &err) == OK,
             "the pool", err.text);
    gpu_cuda(gpu_fill_bf16(NULL, s->pool.ptr, bytes / 2, by), "filling the pool");
    gpu_cuda(cudaDeviceSynchronize(), "filling the pool");
    struct kvt_options o = {
        .layout = s->layout,
        .mem = &s->pool,
        .device = s->device,
        .protocols = "ipc",
        .listen_host = "127.0.0.1",
        .n_transfers = 4,
        .checksum = s->checksum,
        .on_event = on_event,
        .arg = s,
    };
    gpu_need(kvt_create(&o, &s->kvt, &err) == OK, "the KV transfer", err.text);
}

/* Sends the first n_tokens of each layer. */
static void send(struct side *s, uint64_t id, uint64_t peer, struct str grant, uint32_t n_tokens)
{
    struct err err;
    gpu_need(kvt_send_open(s->kvt, id, peer, grant, &err) == OK, "opening a transfer", err.text);
    for (uint32_t layer = 0; layer < s->layout.n_layers; layer++)
        gpu_need(kvt_send_ready(s->kvt, id, layer, 0, n_tokens, s->table) == OK, "sending a layer",
                 NULL);
    kvt_send_finish(s->kvt, id);
}

/* CPU seconds of the threads other than this one, which spins: of the transfer and the driver. */
static double cpu_of_others(void)
{
    struct timespec all, mine;
    gpu_need(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &all) == 0 &&
                 clock_gettime(CLOCK_THREAD_CPUTIME_ID, &mine) == 0,
             "a clock", NULL);
    return (double)(all.tv_sec - mine.tv_sec) + (double)(all.tv_nsec - mine.tv_nsec) * 1e-9;
}

static _Noreturn void end_sender(double cpu, double bytes)
{
    gpu_print_figure(&(struct gpu_figure){
        .name = "CPU time of the sender's transfer thread and driver for each GiB",
        .value = cpu * 1e6 / bytes * (double)(1 << 30),
        .unit = "us",
    });
    fflush(stdout);
    _exit(0);
}

/* Sends what the other side asks for: a number of tokens, 0 at the end, and a grant. */
static _Noreturn void sender(struct side *s, bool tiny)
{
    struct buf b = { 0 };
    struct err err;
    uint64_t peer;
    double cpu = 0, bytes = 0;
    start(s, tiny, 5);
    kvt_hello(s->kvt, &b);
    put(s, &b);
    get(s, &b);
    gpu_need(kvt_connect(s->kvt, buf_str(&b), &peer, &err) == OK, "connecting", err.text);
    wait_for(s, &s->connected, 1);
    for (int i = 0;; i++) {
        uint32_t n_tokens;
        get(s, &b);
        gpu_need(b.len == sizeof n_tokens, "a number of tokens", NULL);
        memcpy(&n_tokens, b.data, sizeof n_tokens);
        if (n_tokens == 0) end_sender(cpu, bytes);
        get(s, &b);
        const double begin = cpu_of_others();
        send(s, (uint64_t)i, peer, buf_str(&b), n_tokens);
        wait_for(s, &s->sent, i + 1);
        if (n_tokens < s->layout.n_blocks * s->layout.block_tokens) continue;
        cpu += cpu_of_others() - begin;
        bytes += (double)kv_layout_pool_bytes(&s->layout);
    }
}

static void ask(const struct side *s, uint32_t n_tokens)
{
    struct buf b = { 0 };
    buf_add(&b, &n_tokens, sizeof n_tokens);
    put(s, &b);
    buf_release(&b);
}

/* Seconds from the grant of n_blocks to the message that everything has arrived; the first n_skip
 * are not sent. */
static double receive(struct side *s, uint32_t n_blocks, uint32_t n_skip)
{
    const uint32_t n_tokens = n_blocks * s->layout.block_tokens;
    struct buf grant = { 0 };
    const uint64_t begin = clock_ns();
    gpu_need(kvt_expect(s->kvt, (uint64_t)s->n_expected++, s->table, n_blocks, n_skip, n_tokens,
                        &grant) == OK,
             "a grant", NULL);
    ask(s, n_tokens);
    put(s, &grant);
    wait_for(s, &s->received, s->n_expected);
    const double seconds = (double)(clock_ns() - begin) * 1e-9;
    buf_release(&grant);
    return seconds;
}

static size_t bytes_of(const struct side *s, uint32_t n_blocks)
{
    return kv_layout_piece_bytes(&s->layout) * s->layout.n_layers * n_blocks;
}

/* Copies as many bytes from a pool of this process, timed by the host like the transfer. */
static double copy(const struct side *s, const void *from, uint32_t n_blocks)
{
    const uint64_t begin = clock_ns();
    gpu_cuda(cudaMemcpy(s->pool.ptr, from, bytes_of(s, n_blocks), cudaMemcpyDeviceToDevice),
             "copying");
    gpu_cuda(cudaDeviceSynchronize(), "copying");
    return (double)(clock_ns() - begin) * 1e-9;
}

/* Two streams in turn, each with the copies of a put. `shape`: of gpu_copies.h; -1: what nodes
 * use. */
struct gather {
    struct copy_stream *streams[2];
    cudaStream_t plain[2];
    int shape, n_multiprocessors;
    uint32_t n_parts;
};

static void gather_part(struct gather *g, const struct copy_stream_pair *pairs, uint32_t n)
{
    const uint32_t i = g->n_parts++ % 2;
    if (g->shape < 0) gpu_need(copy_stream_gather(g->streams[i], pairs, n) == OK, "copies", NULL);
    else gpu_cuda(gpu_copies_run(g->shape, g->plain[i], pairs, n, g->n_multiprocessors), "copies");
}

/* The same copies as a transfer's, in as large parts and on as many streams, without the rest. */
static double gather(const struct side *s, const char *from, uint32_t n_blocks, struct gather *g)
{
    const size_t piece = kv_layout_piece_bytes(&s->layout);
    static struct copy_stream_pair pairs[GPU_COPIES_MAX];
    uint32_t n = 0;
    const uint64_t begin = clock_ns();
    for (uint32_t layer = 0; layer < s->layout.n_layers; layer++)
        for (uint32_t i = 0; i < n_blocks; i++) {
            pairs[n++] = (struct copy_stream_pair){
                .to = (char *)s->pool.ptr +
                      kv_layout_offset(&s->layout, layer, (uint32_t)s->table[i]),
                .from = from + kv_layout_offset(&s->layout, layer, n_blocks - 1 - i),
                .bytes = piece,
            };
            if (n < GPU_COPIES_MAX && i + 1 < n_blocks) continue;
            gather_part(g, pairs, n);
            n = 0;
        }
    gpu_cuda(cudaDeviceSynchronize(), "copies");
    return (double)(clock_ns() - begin) * 1e-9;
}

static void gather_init(const struct side *s, struct gather *g)
{
    struct err err;
    *g = (struct gather){ .shape = -1 };
    gpu_cuda(cudaDeviceGetAttribute(&g->n_multiprocessors, cudaDevAttrMultiProcessorCount, 0),
             "a GPU");
    for (int i = 0; i < 2; i++) {
        gpu_need(device_copy_stream(s->device, &g->streams[i], &err) == OK, "a stream", err.text);
        gpu_cuda(cudaStreamCreateWithFlags(&g->plain[i], cudaStreamNonBlocking), "a stream");
    }
}

static void gather_release(struct gather *g)
{
    for (int i = 0; i < 2; i++) {
        copy_stream_close(g->streams[i]);
        gpu_cuda(cudaStreamDestroy(g->plain[i]), "a stream");
    }
}

/* Checks that gather has copied. */
static void check_gathered(const struct side *s, const char *from, uint32_t n_blocks)
{
    const size_t piece = kv_layout_piece_bytes(&s->layout);
    char *want = mem_calloc(piece, 1), *have = mem_calloc(piece, 1);
    for (uint32_t layer = 0; layer < s->layout.n_layers; layer += s->layout.n_layers - 1)
        for (uint32_t i = 0; i<n_blocks; i += n_blocks> 4 ? n_blocks / 4 : 1) {
            const size_t at = kv_layout_offset(&s->layout, layer, n_blocks - 1 - i),
                         to = kv_layout_offset(&s->layout, layer, (uint32_t)s->table[i]);
            gpu_cuda(cudaMemcpy(want, from + at, piece, cudaMemcpyDeviceToHost), "a copy");
            gpu_cuda(cudaMemcpy(have, (char *)s->pool.ptr + to, piece, cudaMemcpyDeviceToHost),
                     "a copy");
            gpu_need(memcmp(want, have, piece) == 0, "copies differ from their sources", NULL);
        }
    mem_free(want), mem_free(have);
}

/* Pieces with checksums, as the sender's GPU copies them or the receiver's reads them. */
struct summed {
    struct dev_mem memory;
    struct copy_stream_checksum_range *pieces;
    uint64_t *sums;
    uint32_t n;
};

static void summed_init(const struct side *s, const char *from, uint32_t n_blocks, bool copied,
                        struct summed *m)
{
    struct err err;
    m->n = 0;
    gpu_need(device_mem_alloc(s->device,
                              (size_t)s->layout.n_layers * n_blocks *
                                  (sizeof *m->pieces + sizeof *m->sums),
                              DEVICE_MEM_HOST, &m->memory, &err) == OK,
             "memory", err.text);
    m->pieces = m->memory.ptr;
    for (uint32_t layer = 0; layer < s->layout.n_layers; layer++)
        for (uint32_t i = 0; i < n_blocks; i++) {
            char *to = (char *)s->pool.ptr +
                       kv_layout_offset(&s->layout, layer, (uint32_t)s->table[i]);
            m->pieces[m->n++] = (struct copy_stream_checksum_range){
                .at = from + kv_layout_offset(&s->layout, layer, n_blocks - 1 - i),
                .to = copied ? to : NULL,
                .run_bytes = (uint32_t)kv_layout_piece_bytes(&s->layout),
                .n_runs = 1,
            };
        }
    m->sums = (uint64_t *)(m->pieces + m->n);
}

/* In as large parts as puts have, on as many streams. */
static double run_summed(const struct summed *m, struct gather *g)
{
    const uint64_t begin = clock_ns();
    for (uint32_t i = 0, n; i < m->n; i += n) {
        n = m->n - i < GPU_COPIES_MAX ? m->n - i : (uint32_t)GPU_COPIES_MAX;
        gpu_need(
            copy_stream_checksum(g->streams[g->n_parts++ % 2], m->pieces + i, n, m->sums + i) == OK,
            "checksums", NULL);
    }
    gpu_cuda(cudaDeviceSynchronize(), "checksums");
    return (double)(clock_ns() - begin) * 1e-9;
}

/* Checks that the sender's numbers are in this side's blocks. */
static void check(const struct side *s)
{
    const size_t bytes = kv_layout_pool_bytes(&s->layout),
                 piece = kv_layout_piece_bytes(&s->layout);
    char *want = mem_calloc(piece, 1), *have = mem_calloc(piece, 1);
    int32_t *from = scattered(s->layout.n_blocks, 5);
    void *sent = NULL;
    gpu_cuda(cudaMalloc(&sent, bytes), "getting memory");
    gpu_cuda(gpu_fill_bf16(NULL, sent, bytes / 2, 5), "filling memory");
    for (uint32_t layer = 0; layer < s->layout.n_layers; layer += s->layout.n_layers - 1)
        for (uint32_t i = 0; i < s->layout.n_blocks; i += s->layout.n_blocks / 4) {
            gpu_cuda(
                cudaMemcpy(want,
                           (char *)sent + kv_layout_offset(&s->layout, layer, (uint32_t)from[i]),
                           piece, cudaMemcpyDeviceToHost),
                "a copy");
            gpu_cuda(cudaMemcpy(have,
                                (char *)s->pool.ptr +
                                    kv_layout_offset(&s->layout, layer, (uint32_t)s->table[i]),
                                piece, cudaMemcpyDeviceToHost),
                     "a copy");
            gpu_need(memcmp(want, have, piece) == 0, "what arrived is not what was sent", NULL);
        }
    gpu_cuda(cudaFree(sent), "freeing memory");
    mem_free(want), mem_free(have), mem_free(from);
}

/* Seconds, a round each. */
struct times {
    double pushed[ROUNDS], copied[ROUNDS], gathered[ROUNDS];
};

static void measure(struct side *s, uint32_t n_blocks, const void *other, struct gather *g,
                    struct times *t)
{
    gather(s, other, n_blocks, g); /* warms up */
    for (int i = 0; i < ROUNDS; i++) {
        copy(s, other, 1); /* two processes take turns on a GPU, which is this one's now */
        t->copied[i] = copy(s, other, n_blocks);
        t->gathered[i] = gather(s, other, n_blocks, g);
        receive(s, 1, 0); /* now it is the sender's, as a node's own GPU is always */
        t->pushed[i] = receive(s, n_blocks, 0);
    }
}

static void print_rate(const struct side *s, uint32_t n_blocks, struct times *t, double wanted)
{
    const double bytes = (double)bytes_of(s, n_blocks),
                 copied = bytes / gpu_median(t->copied, ROUNDS) * 1e-9;
    char name[112];
    struct gpu_figure f = {
        .name = name,
        .value = bytes / gpu_median(t->pushed, ROUNDS) * 1e-9,
        .unit = "GB/s",
        .limit = copied,
        .limit_is = "cudaMemcpy device to device of the same bytes, in turns",
        .wanted = wanted,
    };
    snprintf(name, sizeof name, "push over CUDA IPC, pieces of %zu bytes, %zu MiB, checksums %s",
             kv_layout_piece_bytes(&s->layout), bytes_of(s, n_blocks) >> 20,
             s->checksum ? "on" : "off");
    gpu_print_figure(&f);
    if (s->checksum) return;
    snprintf(name, sizeof name, "its copies alone, %zu MiB", bytes_of(s, n_blocks) >> 20);
    f.value = bytes / gpu_median(t->gathered, ROUNDS) * 1e-9;
    f.wanted = 0;
    gpu_print_figure(&f);
}

static void print_latency(struct side *s, const char *name, uint32_t n_skip)
{
    double seconds[4 * ROUNDS];
    for (int i = 0; i < 4 * ROUNDS; i++) seconds[i] = receive(s, 1, n_skip);
    gpu_print_figure(&(struct gpu_figure){
        .name = name, .value = gpu_median(seconds, 4 * ROUNDS) * 1e6, .unit = "us" });
}

/* The copy kernel in other shapes. */
static void print_shapes(struct side *s, uint32_t n_blocks, const void *other, struct gather *g)
{
    const double bytes = (double)bytes_of(s, n_blocks);
    for (g->shape = 0; g->shape < gpu_copies_n_shapes(); g->shape++) {
        double gathered[ROUNDS], copied[ROUNDS];
        char name[96] = "copies: ";
        gpu_copies_name(g->shape, name + strlen(name), sizeof name - strlen(name));
        gather(s, other, n_blocks, g); /* warms up */
        check_gathered(s, other, n_blocks);
        for (int i = 0; i < ROUNDS; i++) {
            copied[i] = copy(s, other, n_blocks);
            gathered[i] = gather(s, other, n_blocks, g);
        }
        gpu_print_figure(&(struct gpu_figure){
            .name = name,
            .value = bytes / gpu_median(gathered, ROUNDS) * 1e-9,
            .unit = "GB/s",
            .limit = bytes / gpu_median(copied, ROUNDS) * 1e-9,
            .limit_is = "cudaMemcpy device to device of the same bytes, in turns",
        });
    }
    g->shape = -1;
}

/* What one GPU does with checksums, without messages. */
static void print_summed(struct side *s, uint32_t n_blocks, const void *other, struct gather *g)
{
    const double bytes = (double)bytes_of(s, n_blocks);
    for (int copied = 0; copied < 2; copied++) {
        double seconds[ROUNDS];
        struct summed m;
        summed_init(s, other, n_blocks, copied, &m);
        run_summed(&m, g); /* warms up */
        if (copied) check_gathered(s, other, n_blocks);
        for (int i = 0; i < ROUNDS; i++) seconds[i] = run_summed(&m, g);
        device_mem_free(s->device, &m.memory);
        gpu_print_figure(&(struct gpu_figure){
            .name = copied ? "copies with checksums, as the sender makes them"
                           : "checksums, as the receiver checks them",
            .value = bytes / gpu_median(seconds, ROUNDS) * 1e-9,
            .unit = "GB/s",
        });
    }
}

static void figures(struct side *s, const void *other)
{
    const uint32_t all = s->layout.n_blocks;
    struct gather g;
    struct times t;
    gather_init(s, &g);
    measure(s, all, other, &g, &t);
    print_rate(s, all, &t, s->checksum ? 0 : 0.95);
    measure(s, all / 4, other, &g, &t);
    print_rate(s, all / 4, &t, 0);
    print_latency(s, "a transfer that moves nothing", 1);
    print_latency(s, "a transfer of one block of every layer", 0);
    if (s->checksum) print_summed(s, all / 4, other, &g);
    else print_shapes(s, all / 4, other, &g);
    gather_release(&g);
}

static void receiver(struct side *s, bool tiny, pid_t child)
{
    struct buf hello = { 0 }, answer = { 0 };
    struct err err;
    void *other = NULL;
    int status;
    start(s, tiny, 3);
    get(s, &hello);
    gpu_need(kvt_answer(s->kvt, buf_str(&hello), &answer, &err) == OK, "answering", err.text);
    put(s, &answer);
    receive(s, s->layout.n_blocks, 0); /* warms up */
    check(s);
    gpu_cuda(cudaMalloc(&other, kv_layout_pool_bytes(&s->layout)), "getting memory");
    gpu_cuda(gpu_fill_bf16(NULL, other, kv_layout_pool_bytes(&s->layout) / 2, 7), "filling memory");
    gpu_cuda(cudaDeviceSynchronize(), "filling memory");
    figures(s, other);
    ask(s, 0);
    gpu_need(waitpid(child, &status, 0) == child && status == 0, "the sender failed", NULL);
    gpu_cuda(cudaFree(other), "freeing memory");
    kvt_free(s->kvt);
    device_mem_free(s->device, &s->pool);
    device_close(s->device);
    buf_release(&hello);
    buf_release(&answer);
    mem_free(s->table);
}

int gpu_kv_push_main(const struct gpu_sizes *sizes, bool checksum)
{
    struct side s = { .checksum = checksum };
    int down[2], up[2];
    gpu_need(pipe(down) == 0 && pipe(up) == 0, "a pipe", NULL);
    const pid_t child = fork();
    gpu_need(child >= 0, "fork failed", NULL);
    s.in = child == 0 ? down[0] : up[0];
    s.out = child == 0 ? up[1] : down[1];
    close(child == 0 ? down[1] : up[1]); /* so that each notices when the other ends */
    close(child == 0 ? up[0] : down[0]);
    if (child == 0) sender(&s, sizes->tiny);
    receiver(&s, sizes->tiny, child);
    return 0;
}
