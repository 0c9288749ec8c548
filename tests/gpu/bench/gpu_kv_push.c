/* gpu_kv_push.c - KV from the pool of one process to the pool of another on the same GPU, over CUDA
 * IPC as nodes do it, beside cudaMemcpy from device memory to device memory in the same rounds.
 *
 * The sender is a process forked before this one has used CUDA. Blocks are those of Qwen3-30B-A3B,
 * scattered in both pools. A transfer is measured from the grant to the message that everything has
 * arrived. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "kvtransfer/kvtransfer.h"
#include "shared/base/clock.h"
#include "shared/base/mem.h"
#include "tests/gpu/bench/gpu.h"
#include "tests/gpu/bench/gpu_kernels.h"

enum { TRANSFERS = 8, STALL_S = 60 };

struct side {
    struct kv_layout layout;
    struct device *device;
    struct dev_mem pool;
    struct kvt *kvt;
    int32_t *table;
    bool checksum; /* computed on the sender's GPU, verified on the receiver's */
    int in, out;
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
    while (*counter < value) {
        gpu_need(!s->failed && clock_ms() < end, "a transfer failed or stood still", NULL);
        nanosleep(&(struct timespec){ .tv_nsec = 5000 }, NULL);
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
                           .n_blocks = tiny ? 4 : 512,
                           /* 32k tokens, 3 GiB */ };
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

static _Noreturn void sender(struct side *s, bool tiny)
{
    struct buf b = { 0 };
    struct err err;
    uint64_t peer;
    start(s, tiny, 5);
    kvt_hello(s->kvt, &b);
    put(s, &b);
    get(s, &b);
    gpu_need(kvt_connect(s->kvt, buf_str(&b), &peer, &err) == OK, "connecting", err.text);
    wait_for(s, &s->connected, 1);
    for (int i = 0; i <= TRANSFERS; i++) {
        get(s, &b);
        gpu_need(kvt_send_open(s->kvt, (uint64_t)i, peer, buf_str(&b), &err) == OK,
                 "opening a transfer", err.text);
        for (uint32_t layer = 0; layer < s->layout.n_layers; layer++)
            gpu_need(kvt_send_ready(s->kvt, (uint64_t)i, layer, 0,
                                    s->layout.n_blocks * s->layout.block_tokens, s->table) == OK,
                     "sending a layer", NULL);
        kvt_send_finish(s->kvt, (uint64_t)i);
        wait_for(s, &s->sent, i + 1);
    }
    get(s, &b); /* the receiver has checked everything */
    _exit(0);
}

/* Bytes per second from the grant to the message that everything has arrived. */
static double receive(struct side *s, int i)
{
    struct buf grant = { 0 };
    const uint64_t begin = clock_ns();
    gpu_need(kvt_expect(s->kvt, (uint64_t)i, s->table, s->layout.n_blocks, 0,
                        s->layout.n_blocks * s->layout.block_tokens, &grant) == OK,
             "a grant", NULL);
    put(s, &grant);
    wait_for(s, &s->received, i + 1);
    const double seconds = (double)(clock_ns() - begin) * 1e-9;
    buf_release(&grant);
    return (double)kv_layout_pool_bytes(&s->layout) / seconds;
}

/* Copies the same bytes from a pool of this process, timed by the host like the transfer. */
static double copy(const struct side *s, const void *from)
{
    const size_t bytes = kv_layout_pool_bytes(&s->layout);
    const uint64_t begin = clock_ns();
    gpu_cuda(cudaMemcpy(s->pool.ptr, from, bytes, cudaMemcpyDeviceToDevice), "copying");
    gpu_cuda(cudaDeviceSynchronize(), "copying");
    return (double)bytes / ((double)(clock_ns() - begin) * 1e-9);
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

static void receiver(struct side *s, bool tiny, pid_t child)
{
    double pushed[TRANSFERS], copied[TRANSFERS];
    struct buf hello = { 0 }, answer = { 0 };
    struct err err;
    void *other = NULL;
    int status;
    start(s, tiny, 3);
    gpu_cuda(cudaMalloc(&other, kv_layout_pool_bytes(&s->layout)), "getting memory");
    get(s, &hello);
    gpu_need(kvt_answer(s->kvt, buf_str(&hello), &answer, &err) == OK, "answering", err.text);
    put(s, &answer);
    receive(s, 0); /* warms up */
    check(s);
    copy(s, other);
    for (int i = 0; i < TRANSFERS; i++) {
        copied[i] = copy(s, other);
        pushed[i] = receive(s, i + 1);
    }
    put(s, &answer);
    gpu_need(waitpid(child, &status, 0) == child && status == 0, "the sender failed", NULL);
    char name[96];
    snprintf(name, sizeof name, "push over CUDA IPC, pieces of %zu bytes, %zu MiB, checksums %s",
             kv_layout_piece_bytes(&s->layout), kv_layout_pool_bytes(&s->layout) >> 20,
             s->checksum ? "on" : "off");
    gpu_print_figure(&(struct gpu_figure){
        .name = name,
        .value = gpu_median(pushed, TRANSFERS) * 1e-9,
        .unit = "GB/s",
        .limit = gpu_median(copied, TRANSFERS) * 1e-9,
        .limit_is = "cudaMemcpy device to device of the same bytes, in turns",
        .wanted = s->checksum ? 0 : 0.95,
    });
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
