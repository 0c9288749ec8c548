/* memcpy_bandwidth.c - measures memcpy with several threads on memory like a KV pool's. See
 * hardware_limits.h. */
#include <pthread.h>
#include <string.h>

#include "deploy/probe/hardware_limits.h"
#include "shared/base/clock.h"
#include "shared/base/thread.h"

enum { CALL_BYTES = 1 << 20 };

struct copy_thread {
    pthread_t thread;
    pthread_barrier_t *barrier;
    const char *from;
    char *to;
    size_t n;
};

static void copy_all(const struct copy_thread *c)
{
    for (size_t at = 0; at < c->n; at += CALL_BYTES)
        memcpy(c->to + at, c->from + at, c->n - at < CALL_BYTES ? c->n - at : CALL_BYTES);
}

static void *copy_thread_main(void *arg)
{
    struct copy_thread *c = arg;
    pthread_barrier_wait(c->barrier);
    copy_all(c);
    pthread_barrier_wait(c->barrier);
    return NULL;
}

void probe_copy_release(struct probe_copy *c)
{
    if (c->from.ptr) device_mem_free(c->device, &c->from);
    if (c->to.ptr) device_mem_free(c->device, &c->to);
    if (c->device) device_close(c->device);
    *c = (struct probe_copy){ 0 };
}

static enum status make_areas(struct probe_copy *c, uint64_t n_bytes, struct err *err)
{
    if (c->from.ptr && c->from.bytes >= n_bytes) return OK;
    probe_copy_release(c);
    TRY(device_open("cpu", &c->device, err));
    enum status st = device_mem_alloc(c->device, n_bytes, DEVICE_MEM_SHARED, &c->from, err);
    if (st == OK) st = device_mem_alloc(c->device, n_bytes, DEVICE_MEM_SHARED, &c->to, err);
    if (st == OK) {
        memset(c->from.ptr, 1, n_bytes);
        memset(c->to.ptr, 2, n_bytes);
    } else {
        probe_copy_release(c);
    }
    return st;
}

enum status probe_copy_run(struct probe_copy *c, uint64_t n_bytes, uint32_t n_threads, uint64_t *ns,
                           struct err *err)
{
    struct copy_thread threads[PROBE_THREADS_MAX];
    pthread_barrier_t barrier;
    if (n_bytes > PROBE_POOL_MAX) return err_set(err, ERR_TOO_LONG, "a copy of more than 1 GiB");
    if (n_threads < 1) n_threads = 1;
    TRY(make_areas(c, n_bytes, err));
    pthread_barrier_init(&barrier, NULL, n_threads);
    size_t share = (size_t)n_bytes / n_threads;
    for (uint32_t i = 0; i < n_threads; i++) {
        size_t n = i + 1 == n_threads ? (size_t)n_bytes - share * i : share;
        threads[i] = (struct copy_thread){
            .barrier = &barrier,
            .from = (const char *)c->from.ptr + share * i,
            .to = (char *)c->to.ptr + share * i,
            .n = n,
        };
    }
    /* Every thread must start: the others would wait at the barrier for a missing one. */
    for (uint32_t i = 1; i < n_threads; i++) {
        enum status st = thread_start(&threads[i].thread, copy_thread_main, &threads[i]);
        ASSERT(st == OK);
    }
    pthread_barrier_wait(&barrier);
    uint64_t t = clock_ns();
    copy_all(&threads[0]);
    pthread_barrier_wait(&barrier);
    *ns = clock_ns() - t;
    for (uint32_t i = 1; i < n_threads; i++) pthread_join(threads[i].thread, NULL);
    pthread_barrier_destroy(&barrier);
    return OK;
}
