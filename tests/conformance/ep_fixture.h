/* ep_fixture.h - the ranks of an expert-parallel group as processes or threads, their inputs, and
 * the results by ep.h's definition.
 *
 * A case forks its ranks before anything uses CUDA. They synchronise through shared memory. All
 * data of a rank is generated from seeds that every rank knows, so each can check what it received
 * from the others. Thread: one per rank. */
#ifndef BATON_TESTS_CONFORMANCE_EP_FIXTURE_H
#define BATON_TESTS_CONFORMANCE_EP_FIXTURE_H

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "kernels/ep/ep.h"
#include "kernels/float_bits.h"
#include "shared/base/hash/hash.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

enum {
    RANKS = 64,
    ROUNDS = 32,
    BLOB = 256,
    HIDDEN_MAX = 400,
    USED_MAX = 8,
    NO_GPU = 77,
    /* Deadlines that no case waits for. Ranks that share a GPU begin one after the other, and run
     * in turns. */
    MEET_MS = 50000,
    LINK_MS = 50000
};

/* ---- ranks ---- */

struct meeting {
    atomic_int arrived[ROUNDS];
    unsigned char blobs[ROUNDS][RANKS][BLOB];
};

struct world {
    struct meeting *meeting; /* in memory shared by all ranks */
    int rank, size, round;
};

static inline long long now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (long long)t.tv_sec * 1000000000 + t.tv_nsec;
}
static inline long long now_ms(void) { return now_ns() / 1000000; }

static inline enum status world_exchange(void *arg, const void *mine, size_t bytes, void *all,
                                         struct err *err)
{
    struct world *w = arg;
    const long long until = now_ms() + MEET_MS;
    const int round = w->round++;
    CHECK(round < ROUNDS && bytes <= BLOB);
    memcpy(w->meeting->blobs[round][w->rank], mine, bytes);
    atomic_fetch_add(&w->meeting->arrived[round], 1);
    while (atomic_load(&w->meeting->arrived[round]) < w->size) {
        if (now_ms() > until) return err_set(err, ERR_PEER_LOST, "not all ranks came");
        usleep(200);
    }
    for (int r = 0; r < w->size; r++)
        memcpy((char *)all + (size_t)r * bytes, w->meeting->blobs[round][r], bytes);
    return OK;
}

/* Runs `rank` in one process for each of `size` ranks. Those in `may_die` are expected to be
 * killed. Skips the case if a rank has nothing to run on. */
static inline void run_ranks(int size, void (*rank)(struct world *w), unsigned may_die,
                             const char *what)
{
    pid_t pids[RANKS];
    bool lacks = false;
    struct meeting *m = mmap(NULL, sizeof *m, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                             -1, 0);
    CHECK(m != MAP_FAILED);
    for (int r = 0; r < size; r++) {
        pids[r] = fork();
        CHECK(pids[r] >= 0);
        if (pids[r] > 0) continue;
        struct world w = { .meeting = m, .rank = r, .size = size };
        rank(&w);
        exit(0);
    }
    for (int r = 0; r < size; r++) {
        int status;
        CHECK(waitpid(pids[r], &status, 0) == pids[r]);
        if (may_die >> r & 1) {
            lacks = lacks || (WIFEXITED(status) && WEXITSTATUS(status) == NO_GPU);
            continue;
        }
        lacks = lacks || (WIFEXITED(status) && WEXITSTATUS(status) == NO_GPU);
        if (!WIFEXITED(status) || (WEXITSTATUS(status) != 0 && WEXITSTATUS(status) != NO_GPU))
            test_fail(__FILE__, __LINE__, "rank %d of %d ended with %x", r, size, (unsigned)status);
    }
    munmap(m, sizeof *m);
    if (lacks) SKIP(what);
}

struct rank_thread {
    struct world w;
    void (*rank)(struct world *w);
    pthread_t thread;
};

static inline void *rank_thread_main(void *arg)
{
    struct rank_thread *t = arg;
    t->rank(&t->w);
    return NULL;
}

/* The same with a thread for each rank, for ThreadSanitizer. Only for backends on the CPU. */
static inline void run_ranks_as_threads(int size, void (*rank)(struct world *w))
{
    static struct rank_thread threads[RANKS];
    struct meeting *m = mem_calloc(1, sizeof *m);
    for (int r = 0; r < size; r++) {
        threads[r] = (struct rank_thread){ { m, r, size, 0 }, rank, 0 };
        CHECK(pthread_create(&threads[r].thread, NULL, rank_thread_main, &threads[r]) == 0);
    }
    for (int r = 0; r < size; r++) CHECK(pthread_join(threads[r].thread, NULL) == 0);
    mem_free(m);
}

#ifdef BATON_EMULATED_GPU
static inline int n_gpus(void) { return 1; }
#else
/* Counts the GPUs without calling CUDA, which reads its environment at the first call. */
static inline int n_gpus(void)
{
    char path[40];
    for (int n = 0; n < RANKS; n++) {
        snprintf(path, sizeof path, "/dev/nvidia%d", n);
        if (access(path, F_OK) != 0) return n;
    }
    return RANKS;
}
#endif

/* The device of the rank, which ends if there is none. Each rank has its own GPU if there are
 * enough; otherwise all have the first. */
static inline struct device *rank_device(const char *name, const struct world *w)
{
    struct device *d;
    char own[12];
    snprintf(own, sizeof own, "%d", w->rank);
    if (w->size > 1 && n_gpus() >= w->size) setenv("CUDA_VISIBLE_DEVICES", own, 1);
    const enum status st = device_open(name, &d, NULL);
    if (st == ERR_NODEV || st == ERR_UNSUPPORTED) _exit(NO_GPU);
    CHECK_OK(st);
    return d;
}

/* ---- memory of the device ---- */

static inline void *to_device(struct device *d, const void *from, size_t bytes, struct dev_mem *m)
{
    CHECK_OK(device_mem_alloc(d, bytes ? bytes : 1, DEVICE_MEM_PRIVATE, m, NULL));
    if (from && bytes) device_upload(d, m->ptr, from, bytes);
    return m->ptr;
}

static inline void *from_device(struct device *d, const void *at, size_t bytes)
{
    void *host = mem_calloc(bytes ? bytes : 1, 1);
    device_download(d, host, at, bytes);
    return host;
}

/* ---- what rows are ---- */

struct shape {
    struct ep_config c; /* without rank, device and exchange */
    int call;           /* the number of the call: each has other numbers and other row counts */
    bool add;
};

static inline uint64_t draw(uint64_t what, uint64_t a, uint64_t b, uint64_t c)
{
    const uint64_t v[] = { what, a, b, c };
    return hash_64(v, sizeof v, 1);
}
static inline float draw_float(uint64_t what, uint64_t a, uint64_t b, uint64_t c)
{
    return (float)((int64_t)(draw(what, a, b, c) >> 40) - (1 << 23)) * 0x1p-22f;
}

/* The number of rows of a rank: for some none, for some the maximum. */
static inline size_t rows_of(const struct shape *s, int rank)
{
    const size_t max = (size_t)s->c.max_rows,
                 n = draw(1, (uint64_t)rank, (uint64_t)s->call, max) % (max + 2);
    return (rank + s->call) % 3 == 2 ? 0 : n > max ? max : n;
}

/* The seed of a row, which depends on its rank. The row's choices of experts are drawn from it. */
static inline uint64_t row_seed(const struct shape *s, int rank, size_t row)
{
    return ((uint64_t)s->call << 40) + ((uint64_t)rank << 20) + row;
}

static inline void row_x(const struct shape *s, int rank, size_t row, float *x)
{
    const uint64_t seed = row_seed(s, rank, row);
    const float by = ldexpf(1, (int)(seed % 7) - 3);
    for (int k = 0; k < s->c.hidden; k++)
        x[k] = k % 11 == 10 ? 0 : draw_float(2, seed, (uint64_t)k, 0) * by;
    /* a scale group of zeros */
    for (int k = 128; row % 4 == 1 && k < 256 && k < s->c.hidden; k++) x[k] = 0;
}

static inline void row_experts(const struct shape *s, int rank, size_t row, int32_t *experts)
{
    const int32_t n = s->c.placement.n_logical;
    for (int j = 0; j < s->c.n_used; j++) {
        bool taken = true;
        for (uint64_t t = 0; taken; t++) {
            experts[j] = (int32_t)(draw(3, row_seed(s, rank, row), (uint64_t)j, t) % (uint64_t)n);
            /* many rows choose the first experts */
            if (row % 5 == 4 && t < (uint64_t)n) experts[j] = (int32_t)t;
            taken = false;
            for (int i = 0; i < j; i++) taken = taken || experts[i] == experts[j];
        }
    }
}

/* The map of a call: all in turn. */
static inline int32_t map_of(const struct shape *s)
{
    const int32_t n = s->c.placement.n_maps;
    return n > 1 ? s->call % n : 0;
}

static inline int32_t logical_of(const struct shape *s, int32_t physical)
{
    const struct ep_placement *p = &s->c.placement;
    return p->logical ? p->logical[map_of(s) * p->n_physical + physical] : physical;
}

/* By the definition: of the expert's copies, ascending, number (row + rank) % number of copies. */
static inline int32_t physical_of(const struct shape *s, int rank, size_t row, int32_t expert)
{
    const struct ep_placement *p = &s->c.placement;
    size_t n = 0;
    for (int32_t x = 0; x < p->n_physical; x++) n += logical_of(s, x) == expert;
    size_t left = (row + (size_t)rank) % n;
    for (int32_t x = 0;; x++)
        if (logical_of(s, x) == expert && left-- == 0) return x;
}

static inline float as_sent(float x, enum dtype t, float scale)
{
    if (t == DTYPE_BF16) return dtype_bf16_to_f32(dtype_f32_to_bf16(x));
    if (t == DTYPE_F8_E4M3) return dtype_f8_e4m3_to_f32(float_to_f8(x / scale)) * scale;
    return x;
}

/* A row as its receiver reads it, after rounding to the dispatch type. */
static inline void row_sent(const struct shape *s, const float *x, float *got)
{
    for (int g = 0; g < s->c.hidden; g += EP_SCALE_STEP) {
        float top = 0;
        for (int k = g; k < g + EP_SCALE_STEP && k < s->c.hidden; k++)
            top = fmaxf(top, fabsf(x[k]));
        for (int k = g; k < g + EP_SCALE_STEP && k < s->c.hidden; k++)
            got[k] = as_sent(x[k], s->c.send, top > 0 ? top / 448.0f : 1.0f);
    }
}

/* A stand-in for an expert. */
static inline void expert_of(int32_t expert, const float *x, int hidden, float *out)
{
    for (int k = 0; k < hidden; k++)
        out[k] = x[k] * (1.0f + (float)expert * 0.375f) + x[(k + 1) % hidden] * 0.3f;
}

static inline float row_weight(const struct shape *s, int rank, size_t row, int j)
{
    return draw_float(4, row_seed(s, rank, row), (uint64_t)j, 0);
}
static inline float row_before(const struct shape *s, int rank, size_t row, int k)
{
    return draw_float(5, row_seed(s, rank, row), (uint64_t)k, 0);
}

/* Row `row` of y by the definition. */
static inline void row_y(const struct shape *s, int rank, size_t row, float *y)
{
    float x[HIDDEN_MAX], sent[HIDDEN_MAX], out[HIDDEN_MAX];
    int32_t experts[USED_MAX];
    row_x(s, rank, row, x);
    row_sent(s, x, sent);
    row_experts(s, rank, row, experts);
    for (int k = 0; k < s->c.hidden; k++) y[k] = s->add ? row_before(s, rank, row, k) : 0;
    for (int j = 0; j < s->c.n_used; j++) {
        expert_of(experts[j], sent, s->c.hidden, out);
        for (int k = 0; k < s->c.hidden; k++)
            y[k] = fmaf(row_weight(s, rank, row, j), as_sent(out[k], s->c.back, 1), y[k]);
    }
}

#endif
