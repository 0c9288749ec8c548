/* test_device.c - every device backend: zeroed memory, copies there and back, sharing, refusals;
 * copy streams: copies, events, checksums. */
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/backend.h"
#include "kernels/copy_stream.h"
#include "kernels/float_bits.h"
#include "kernels/kv_rows.h"
#include "shared/base/hash/hash.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

static struct device *open_device(const char *name)
{
    struct device *d;
    struct err err;
    enum status st = device_open(name, &d, &err);
    if (st == ERR_NODEV || (st == ERR_UNSUPPORTED && strcmp(name, "cuda") == 0)) {
        static char why[ERR_TEXT_MAX + 64];
        snprintf(why, sizeof why, "the device %s was NOT tested: %s", name, err.text);
        SKIP(why);
    }
    CHECK_OK(st);
    CHECK_EQ_STR(d->ops->name, name);
    CHECK_OK(device_fault(d, &err));
    return d;
}

static void memory_cases(const char *name)
{
    static const size_t sizes[] = { 1, 4096, 4097, 5 << 20 };
    struct device *d = open_device(name);
    for (unsigned flags = 0; flags <= DEVICE_MEM_SHARED; flags++)
        for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
            struct dev_mem m;
            struct err err;
            const size_t n = sizes[s];
            char *host = calloc(1, n + 1);
            CHECK_OK(device_mem_alloc(d, n, flags, &m, &err));
            CHECK(m.bytes >= n && (uintptr_t)m.ptr % 64 == 0);
            CHECK((m.fd >= 0) == (flags == DEVICE_MEM_SHARED && d->is_host));
            CHECK((m.kind == DEV_MEM_HOST) == d->is_host);
            memset(host, 7, n + 1);
            device_download(d, host, m.ptr, n);
            for (size_t at = 0; at < n; at++) CHECK_EQ_INT(host[at], 0);
            memset(host, 1, n);
            device_upload(d, m.ptr, host, n);
            memset(host, 2, n);
            device_download(d, host, m.ptr, n);
            device_wait(d);
            for (size_t at = 0; at < n; at++) CHECK_EQ_INT(host[at], 1);
            CHECK_EQ_INT(host[n], 7);
            device_mem_free(d, &m);
            CHECK(m.ptr == NULL && m.fd == -1);
            device_mem_free(d, &m);
            free(host);
        }
    CHECK_OK(device_fault(d, NULL));
    device_close(d);
}

/* The device's free memory shows what is allocated and freed; the host's pages count only once they
 * are touched. */
static void available_cases(const char *name)
{
    struct device *d = open_device(name);
    struct dev_mem m;
    size_t before = device_available(d);
    CHECK(before > 0);
    CHECK_OK(device_mem_alloc(d, 64 << 20, DEVICE_MEM_PRIVATE, &m, NULL));
    if (!d->is_host) CHECK(device_available(d) + (64 << 20) <= before);
    device_mem_free(d, &m);
    if (!d->is_host) CHECK_EQ_INT(device_available(d), before);
    device_close(d);
}

static void refusal_cases(const char *name)
{
    struct device *d = open_device(name);
    for (unsigned flags = 0; flags <= DEVICE_MEM_SHARED; flags++) {
        struct dev_mem m = { .fd = -1 };
        struct err err = { 0 };
        CHECK_STATUS(device_mem_alloc(d, 0, flags, &m, &err), ERR_INVALID);
        CHECK_STATUS(device_mem_alloc(d, SIZE_MAX, flags, &m, &err), ERR_NOMEM);
        CHECK_STATUS(device_mem_alloc(d, (size_t)1 << 62, flags, &m, &err), ERR_NOMEM);
        CHECK(strstr(err.text, "--num-gpu-blocks-override") != NULL);
        CHECK(m.ptr == NULL && m.fd == -1);
    }
    CHECK_OK(device_fault(d, NULL)); /* too little memory is no fault */
    device_close(d);
}

/* ---- copy streams ---- */

static struct dev_mem memory_of(struct device *d, size_t bytes, unsigned flags)
{
    struct dev_mem m;
    struct err err;
    CHECK_OK(device_mem_alloc(d, bytes, flags, &m, &err));
    return m;
}

static struct copy_stream *open_stream(struct device *d)
{
    struct copy_stream *l;
    struct err err;
    CHECK_OK(device_copy_stream(d, &l, &err));
    return l;
}

static void count_up(void *arg) { atomic_fetch_add((atomic_int *)arg, 1); }

/* Scattered runs are copied from host memory to the device, to another address there, and back: in
 * order, and with a callback at the end. */
static void stream_copy_cases(const char *name)
{
    enum { N = 4096, RUN = 96, RUNS = 20, APART = 160 };
    struct device *d = open_device(name);
    struct copy_stream *l = open_stream(d);
    struct dev_mem host = memory_of(d, 2 * N, DEVICE_MEM_HOST),
                   far = memory_of(d, 2 * N, DEVICE_MEM_PRIVATE);
    CHECK_EQ_INT(host.kind, DEV_MEM_HOST);
    char *bytes = host.ptr, *there = far.ptr;
    atomic_int told = 0;
    for (int i = 0; i < N; i++) CHECK_EQ_INT(bytes[i], 0);
    for (int i = 0; i < N; i++) bytes[i] = (char)(i * 7 + (i >> 8));
    CHECK_OK(copy_stream_wait_event(l, 0));
    CHECK_OK(copy_stream_copy(l, &(struct copy_stream_strided){
                                     .to = there,
                                     .from = bytes,
                                     .to_stride = APART,
                                     .from_stride = RUN,
                                     .bytes = RUN,
                                     .n = RUNS,
                                 }));
    CHECK_OK(copy_stream_copy(
        l, &(struct copy_stream_strided){ .to = there + N, .from = there, .bytes = N, .n = 1 }));
    CHECK_OK(copy_stream_copy(l, &(struct copy_stream_strided){
                                     .to = bytes + N, .from = there + N, .bytes = N, .n = 1 }));
    CHECK_OK(copy_stream_launch_host_fn(l, count_up, &told));
    /* nobody waits for the copy stream: it progresses by itself */
    for (int ms = 0; atomic_load(&told) == 0 && ms < 5000; ms++) usleep(1000);
    CHECK_EQ_INT(atomic_load(&told), 1);
    for (int i = 0; i < N; i++) {
        int run = i / APART, at = i % APART;
        CHECK_EQ_INT(bytes[N + i], run < RUNS && at < RUN ? bytes[run * RUN + at] : 0);
    }
    CHECK_OK(copy_stream_launch_host_fn(l, count_up, &told));
    CHECK_OK(copy_stream_synchronize(l));
    CHECK_EQ_INT(atomic_load(&told), 2);
    device_mem_free(d, &host);
    device_mem_free(d, &far);
    copy_stream_close(l);
    copy_stream_close(NULL);
    CHECK_OK(device_fault(d, NULL));
    device_close(d);
}

struct call {
    atomic_int *n_calls;
    const char *at; /* the last byte of a copy before it */
    int order, seen;
};

static void look(void *arg)
{
    struct call *c = arg;
    c->seen = *c->at;
    c->order = atomic_fetch_add(c->n_calls, 1);
}

/* Copies go on behind host functions, which still see what was copied before them, in order. */
static void stream_host_fn_cases(const char *name)
{
    enum { N = 512, CALLS = 40 };
    struct device *d = open_device(name);
    struct copy_stream *l = open_stream(d), *other = open_stream(d);
    struct dev_mem host = memory_of(d, 2 * N * CALLS, DEVICE_MEM_HOST);
    char *from = host.ptr, *to = from + N * CALLS;
    atomic_int n_calls = 0, n_others = 0;
    struct call calls[CALLS];
    for (int i = 0; i < N * CALLS; i++) from[i] = (char)(i / N + 1);
    for (int i = 0; i < CALLS; i++) {
        calls[i] = (struct call){ .n_calls = &n_calls, .at = to + N * (i + 1) - 1, .seen = -1 };
        CHECK_OK(
            copy_stream_copy(l, &(struct copy_stream_strided){
                                    .to = to + N * i, .from = from + N * i, .bytes = N, .n = 1 }));
        CHECK_OK(copy_stream_launch_host_fn(l, look, &calls[i]));
        CHECK_OK(copy_stream_launch_host_fn(other, count_up, &n_others));
    }
    CHECK_OK(copy_stream_synchronize(l));
    CHECK_EQ_INT(atomic_load(&n_calls), CALLS);
    for (int i = 0; i < CALLS; i++) {
        CHECK_EQ_INT(calls[i].order, i);
        CHECK_EQ_INT(calls[i].seen, i + 1);
    }
    copy_stream_close(other); /* waits for its functions */
    CHECK_EQ_INT(atomic_load(&n_others), CALLS);
    device_mem_free(d, &host);
    copy_stream_close(l);
    CHECK_OK(device_fault(d, NULL));
    device_close(d);
}

/* Memory between which streams gather, and what is sent to it and fetched back. */
struct gather_rig {
    struct device *d;
    struct copy_stream *l;
    struct dev_mem host, from, to;
    unsigned char *sent, *got; /* [room] */
    size_t room;
};

static void open_gather(struct gather_rig *r, const char *name, size_t room)
{
    r->d = open_device(name);
    r->l = open_stream(r->d);
    r->host = memory_of(r->d, 2 * room, DEVICE_MEM_HOST);
    r->from = memory_of(r->d, room, DEVICE_MEM_PRIVATE);
    r->to = memory_of(r->d, room, DEVICE_MEM_PRIVATE);
    r->sent = r->host.ptr, r->got = r->sent + room;
    r->room = room;
}

static void copy_all(struct gather_rig *r, void *to, const void *from)
{
    const struct copy_stream_strided all = { .to = to, .from = from, .bytes = r->room, .n = 1 };
    CHECK_OK(copy_stream_copy(r->l, &all));
}

static void close_gather(struct gather_rig *r)
{
    device_mem_free(r->d, &r->host);
    device_mem_free(r->d, &r->from);
    device_mem_free(r->d, &r->to);
    copy_stream_close(r->l);
    CHECK_OK(device_fault(r->d, NULL));
    device_close(r->d);
}

/* Many copies at once, of all lengths and alignments, or all at multiples of 16. */
static void stream_gather_many(const char *name, bool aligned)
{
    enum { N = 1700, ROOM = 4 << 20 }; /* more than one launch takes */
    struct gather_rig r;
    struct copy_stream_pair pairs[N];
    open_gather(&r, name, ROOM);
    unsigned char *sent = r.sent, *got = r.got;
    size_t at = 0, lengths[] = { 0, 1, 15, 16, 17, 48, 4096, 5000 };
    for (size_t i = 0; i < ROOM; i++) sent[i] = (unsigned char)(i * 31 + (i >> 9));
    for (int i = 0; i < N; i++) {
        size_t bytes = i == 7 ? 150000 : lengths[i % 8], shift = aligned ? 0 : (size_t)(i % 16),
               place = at + (i % 3 == 0 ? shift : 0);
        if (aligned) bytes = bytes / 16 * 16;
        pairs[i] = (struct copy_stream_pair){
            .to = (char *)r.to.ptr + place,
            .from = (char *)r.from.ptr + (ROOM - at - 160000) / 16 * 16 + (i % 5 == 0 ? shift : 0),
            .bytes = bytes
        };
        at = (place + bytes + 16) / 16 * 16;
        CHECK(at < ROOM - 320000);
    }
    copy_all(&r, r.from.ptr, sent);
    CHECK_OK(copy_stream_gather(r.l, pairs, N));
    CHECK_OK(copy_stream_gather(r.l, pairs, 0));
    copy_all(&r, got, r.to.ptr);
    CHECK_OK(copy_stream_synchronize(r.l));
    size_t next = 0; /* bytes that no copy wrote are still 0 */
    for (int i = 0; i < N; i++) {
        size_t place = (size_t)((char *)pairs[i].to - (char *)r.to.ptr),
               source = (size_t)((const char *)pairs[i].from - (char *)r.from.ptr);
        for (; next < place; next++) CHECK_EQ_INT(got[next], 0);
        CHECK(memcmp(got + place, sent + source, pairs[i].bytes) == 0);
        next = place + pairs[i].bytes;
    }
    for (; next < ROOM; next++) CHECK_EQ_INT(got[next], 0);
    close_gather(&r);
}

/* A copy of more than a walk over chunks takes at once, beside a small one. */
static void stream_gather_large(const char *name)
{
    const size_t bytes = (17 << 20) + 48, room = bytes + 4096;
    struct gather_rig r;
    open_gather(&r, name, room);
    unsigned char *sent = r.sent, *got = r.got;
    const struct copy_stream_pair pairs[] = {
        { .to = (char *)r.to.ptr + 1024, .from = r.from.ptr, .bytes = bytes },
        { .to = (char *)r.to.ptr + 16, .from = (char *)r.from.ptr + bytes, .bytes = 16 },
    };
    for (size_t i = 0; i < room; i++) sent[i] = (unsigned char)(i * 31 + (i >> 9) + (i >> 17));
    copy_all(&r, r.from.ptr, sent);
    CHECK_OK(copy_stream_gather(r.l, pairs, COUNT_OF(pairs)));
    copy_all(&r, got, r.to.ptr);
    CHECK_OK(copy_stream_synchronize(r.l));
    CHECK(memcmp(got + 1024, sent, bytes) == 0 && memcmp(got + 16, sent + bytes, 16) == 0);
    for (size_t i = 0; i < room; i++)
        if (i < 16 || (i >= 32 && i < 1024) || i >= 1024 + bytes) CHECK_EQ_INT(got[i], 0);
    close_gather(&r);
}

static void stream_gather_cases(const char *name)
{
    stream_gather_many(name, false);
    stream_gather_many(name, true);
    stream_gather_large(name);
}

/* A copy that waits for an event sees the work before the event, also after the ring of events has
 * wrapped around. */
static void stream_event_cases(const char *name)
{
    enum { N = 64 };
    struct device *d = open_device(name);
    struct copy_stream *l = open_stream(d);
    struct dev_mem host = memory_of(d, N, DEVICE_MEM_HOST),
                   far = memory_of(d, N, DEVICE_MEM_PRIVATE);
    uint64_t before = 0;
    for (int round = 1; round <= 2 * DEVICE_EVENTS_MAX + 3; round++) {
        char value[N];
        memset(value, round, N);
        device_upload(d, far.ptr, value, N);
        uint64_t event = device_record_event(d);
        CHECK(d->is_host ? event == 0 : event > before);
        if (round % 100 == 1) before = event; /* now and then an old event */
        CHECK_OK(copy_stream_wait_event(l, before));
        CHECK_OK(copy_stream_wait_event(l, event));
        CHECK_OK(copy_stream_copy(l, &(struct copy_stream_strided){
                                         .to = host.ptr, .from = far.ptr, .bytes = N, .n = 1 }));
        CHECK_OK(copy_stream_synchronize(l));
        CHECK_EQ_INT(memcmp(host.ptr, value, N), 0);
    }
    device_mem_free(d, &host);
    device_mem_free(d, &far);
    copy_stream_close(l);
    device_close(d);
}

enum { COPY_ROOM = 160000, TAIL_TO = 150000 }; /* of a piece and its tail */

/* Copies a piece's bytes in host memory, to where a copy of it in the device's lies. */
static void copy_piece(char *to, const char *from, size_t at, size_t tail_at,
                       const struct copy_stream_checksum_range *p)
{
    for (uint32_t r = 0; r < p->n_runs; r++)
        memcpy(to + r * p->stride, from + at + r * p->stride, p->run_bytes);
    for (uint32_t r = 0; r < p->tail.n_runs; r++)
        memcpy(to + TAIL_TO + r * p->tail.stride, from + tail_at + r * p->tail.stride,
               p->tail.run_bytes);
}

/* Lets the device copy pieces while it computes their checksums, one at a time; compares all that
 * it could have written. */
static void check_copies(struct device *d, struct copy_stream *l, const char *bytes,
                         const char *far, struct copy_stream_checksum_range *pieces,
                         const uint64_t *want, uint32_t n, uint64_t *sums)
{
    struct dev_mem copy = memory_of(d, COPY_ROOM, DEVICE_MEM_PRIVATE);
    char *have = malloc(COPY_ROOM), *expected = malloc(COPY_ROOM);
    for (uint32_t i = 0; i < n; i += 1 + i % 3) {
        struct copy_stream_checksum_range *p = &pieces[i];
        const size_t shift = i % 4 == 3 ? i % 16 : 0;
        memset(expected, 0x55, COPY_ROOM);
        device_upload(d, copy.ptr, expected, COPY_ROOM);
        CHECK_OK(copy_stream_wait_event(l, device_record_event(d)));
        p->to = (char *)copy.ptr + shift;
        p->tail.to = (char *)copy.ptr + shift + TAIL_TO;
        CHECK_OK(copy_stream_checksum(l, p, 1, &sums[i]));
        CHECK_OK(copy_stream_copy(
            l, &(struct copy_stream_strided){
                   .to = sums + n, .from = copy.ptr, .bytes = COPY_ROOM, .n = 1 }));
        CHECK_OK(copy_stream_synchronize(l));
        memcpy(have, sums + n, COPY_ROOM);
        copy_piece(expected + shift, bytes, (size_t)((const char *)p->at - far),
                   p->tail.n_runs ? (size_t)((const char *)p->tail.at - far) : 0, p);
        if (memcmp(have, expected, COPY_ROOM) != 0 || sums[i] != want[i])
            test_fail(__FILE__, __LINE__, "piece %u of %u runs of %u bytes is copied wrongly", i,
                      p->n_runs, p->run_bytes);
    }
    free(have);
    free(expected);
    device_mem_free(d, &copy);
}

/* Checksums of every length up to a few stripes, around whole blocks, and larger ones; of one run
 * and of several; aligned and not; copied and not. */
static void stream_checksum_cases(const char *name)
{
    enum { POOL = 300000, PIECES = 700 };
    struct device *d = open_device(name);
    struct copy_stream *l = open_stream(d);
    struct dev_mem far = memory_of(d, POOL, DEVICE_MEM_PRIVATE);
    struct dev_mem in = memory_of(d, PIECES * sizeof(struct copy_stream_checksum_range),
                                  DEVICE_MEM_HOST),
                   out = memory_of(d, PIECES * sizeof(uint64_t) + COPY_ROOM, DEVICE_MEM_HOST);
    char *bytes = malloc(POOL), *all = malloc(POOL);
    uint64_t want[PIECES], *sums = out.ptr;
    struct copy_stream_checksum_range *pieces = in.ptr;
    srand(3);
    for (int i = 0; i < POOL; i++) bytes[i] = (char)rand();
    device_upload(d, far.ptr, bytes, POOL);
    for (uint32_t i = 0; i < PIECES; i++) {
        static const uint32_t large[] = { 1023,  1024,  1025,   1087,   1088,    1089,
                                          2048,  2049,  4096,   8192,   65535,   65536,
                                          65537, 66560, 131072, 131073, 1u << 17 };
        struct copy_stream_checksum_range p = {
            .n_runs = 1,
            .run_bytes = i < 600 ? i + 1 : large[i % COUNT_OF(large)],
        };
        size_t at = i % 3 ? i % 3 * 16u : (size_t)(rand() % 64);
        if (i >= 650) { /* several runs, like the heads of a partly filled block */
            p.n_runs = 2 + i % 7;
            p.run_bytes = i % 2 ? 16u * (uint32_t)(1 + rand() % 300)
                                : (uint32_t)(1 + rand() % 5000);
            p.stride = i % 2 ? 16u * (p.run_bytes / 16 + (uint32_t)(rand() % 9))
                             : p.run_bytes + (uint32_t)(rand() % 77);
        }
        p.at = (char *)far.ptr + at;
        if (i % 5 == 1) { /* runs of another length behind those, like the scales of rows */
            p.tail = (struct copy_stream_checksum_tail){
                .n_runs = 1 + i % 4,
                .run_bytes = i % 2 ? 1 + i % 70 : 4 * (1 + i % 50),
            };
            p.tail.stride = p.tail.run_bytes + i % 9;
            p.tail.at = (char *)far.ptr + 200000 + i;
        }
        size_t n = 0;
        for (uint32_t r = 0; r < p.n_runs; r++, n += p.run_bytes)
            memcpy(all + n, bytes + at + r * p.stride, p.run_bytes);
        for (uint32_t r = 0; r < p.tail.n_runs; r++, n += p.tail.run_bytes)
            memcpy(all + n, bytes + 200000 + i + r * p.tail.stride, p.tail.run_bytes);
        want[i] = hash_64(all, n, 0);
        pieces[i] = p;
    }
    CHECK_OK(copy_stream_checksum(l, pieces, PIECES, sums));
    CHECK_OK(copy_stream_synchronize(l));
    for (uint32_t i = 0; i < PIECES; i++)
        if (sums[i] != want[i])
            test_fail(__FILE__, __LINE__,
                      "piece %u of %u runs of %u bytes: %016llx, hash_64 says %016llx", i,
                      pieces[i].n_runs, pieces[i].run_bytes, (unsigned long long)sums[i],
                      (unsigned long long)want[i]);
    check_copies(d, l, bytes, far.ptr, pieces, want, PIECES, sums);
    free(bytes);
    free(all);
    device_mem_free(d, &far);
    device_mem_free(d, &in);
    device_mem_free(d, &out);
    copy_stream_close(l);
    CHECK_OK(device_fault(d, NULL));
    device_close(d);
}

/* A random row of a type. Some rows are zeros, have large or small values, or stand for NaN (scale
 * NaN, values 0). */
static void any_row(enum dtype t, uint32_t width, int i, unsigned char *values,
                    unsigned char *scale)
{
    size_t bytes = kv_rows_bytes(t, width);
    float s = i % 9 == 4   ? float_of_bits(0x7fc00000)
              : i % 9 == 5 ? 0x1p-149f
                           : (float)(rand() % 1000 + 1) * 0x1p-12f;
    for (size_t b = 0; b < bytes; b++)
        values[b] = (unsigned char)(i % 9 == 3 || (kv_rows_scaled(t) && i % 9 == 4) ? 0 : rand());
    if (kv_rows_scaled(t)) memcpy(scale, &s, sizeof s);
    if (kv_rows_scaled(t) || i % 9 < 4) return;
    float x[KERNEL_LATENT_MAX]; /* finite numbers, for types with a scale */
    for (uint32_t k = 0; k < width; k++)
        x[k] = ldexpf((float)(rand() - RAND_MAX / 2), i % 9 == 5   ? -180
                                                      : i % 9 == 6 ? 90
                                                                   : -38 + rand() % 12);
    kv_row_store(t, x, values, NULL, width);
}

enum { CONVERT_ROOM = 1 << 20, CONVERT_HALF = CONVERT_ROOM / 2 }; /* values, then scales */

/* Converts c by the definition into `image`, which has the contents of the memory `far`. */
static void convert_by_rows(const struct copy_stream_conversion *c, const struct dev_mem *from,
                            char *from_image, const struct dev_mem *to, char *to_image)
{
    size_t from_bytes = kv_rows_bytes(c->from, c->width), to_bytes = kv_rows_bytes(c->to, c->width);
    for (uint32_t i = 0; i < c->n; i++)
        for (uint32_t g = 0; g < c->rows[i].n_groups; g++)
            for (uint32_t k = 0; k < c->rows[i].n; k++) {
                const struct copy_stream_kv_rows *r = &c->rows[i];
                size_t a = (size_t)g * r->from_stride + k, b = (size_t)g * r->to_stride + k;
                char *x = from_image + ((const char *)r->from - (char *)from->ptr) + a * from_bytes,
                     *y = to_image + ((char *)r->to - (char *)to->ptr) + b * to_bytes;
                char *x_scale = from_image + ((const char *)r->from_scales - (char *)from->ptr) +
                                4 * a,
                     *y_scale = to_image + ((char *)r->to_scales - (char *)to->ptr) + 4 * b;
                float row[KERNEL_LATENT_MAX];
                kv_row_load(c->from, x, x_scale, row, c->width);
                if (c->from != c->to) kv_row_store(c->to, row, y, y_scale, c->width);
                else
                    memcpy(y, x, to_bytes),
                        kv_rows_scaled(c->to) ? memcpy(y_scale, x_scale, 4) : NULL;
            }
}

/* Conversions of 1 to 7 rows in 1 to 3 groups, at aligned and unaligned addresses; for short rows,
 * more of them than fit one launch. */
static uint32_t convert_places(enum dtype from, enum dtype to, uint32_t width,
                               const struct dev_mem *a, const struct dev_mem *b,
                               struct copy_stream_kv_rows *out, uint32_t max)
{
    size_t from_at = 0, to_at = 0, from_row = 0, to_row = 0; /* in values, in rows of scales */
    uint32_t n = 0;
    for (; n < max; n++) {
        struct copy_stream_kv_rows r = {
            .n = 1 + n % 7,
            .n_groups = 1 + n % 3,
            .from_stride = 7 + n % 2,
            .to_stride = 1 + n % 7 + n % 4,
        };
        size_t rows = 24, odd = n % 2 ? n % 16 : 0; /* 3 groups, at most 8 rows apart */
        if (from_at + rows * kv_rows_bytes(from, width) + 16 > CONVERT_HALF ||
            to_at + 32 * kv_rows_bytes(to, width) + 16 > CONVERT_HALF)
            break;
        r.from = (char *)a->ptr + from_at + odd;
        r.to = (char *)b->ptr + to_at + odd;
        r.from_scales = (char *)a->ptr + CONVERT_HALF + 4 * from_row + odd;
        r.to_scales = (char *)b->ptr + CONVERT_HALF + 4 * to_row + odd;
        from_at += (rows * kv_rows_bytes(from, width) + 31) / 16 * 16;
        to_at += (32 * kv_rows_bytes(to, width) + 31) / 16 * 16;
        from_row += rows + 4;
        to_row += 32 + 4;
        out[n] = r;
    }
    return n;
}

/* Each type converted to each other one gives the bits of the definition, and nothing else is
 * written. */
static void stream_convert_cases(const char *name)
{
    static const enum dtype types[] = { DTYPE_F32, DTYPE_F16, DTYPE_BF16, DTYPE_I8, DTYPE_F8_E4M3 };
    static const uint32_t widths[] = { 1, 5, 24, 64, 80, 128, 200, 576, KERNEL_LATENT_MAX };
    enum { MOST = 150 };
    struct device *d = open_device(name);
    struct copy_stream *l = open_stream(d);
    struct dev_mem from = memory_of(d, CONVERT_ROOM, DEVICE_MEM_PRIVATE),
                   far = memory_of(d, CONVERT_ROOM, DEVICE_MEM_PRIVATE);
    struct dev_mem host = memory_of(d, CONVERT_ROOM, DEVICE_MEM_HOST);
    char *image = malloc(CONVERT_ROOM), *want = malloc(CONVERT_ROOM), *got = malloc(CONVERT_ROOM);
    struct copy_stream_kv_rows rows[MOST];
    srand(11);
    /* In a sanitizer's build every pair of types has a third of the widths. */
    const uint32_t step = test_runs_long() ? 1 : 3;
    for (uint32_t i = 0; i < COUNT_OF(types) * COUNT_OF(types) * COUNT_OF(widths); i += step) {
        struct copy_stream_conversion c = {
            .from = types[i % 5], .to = types[i / 5 % 5], .width = widths[i / 25], .rows = rows
        };
        struct dev_mem *to = i % 2 ? &host : &far;
        c.n = convert_places(c.from, c.to, c.width, &from, to, rows,
                             c.width < 30 ? (uint32_t)MOST : 14);
        CHECK(c.n >= 2);
        memset(image, 0, CONVERT_ROOM);
        for (uint32_t p = 0; p < c.n; p++)
            for (uint32_t r = 0; r < rows[p].n_groups * rows[p].from_stride; r++)
                any_row(c.from, c.width, (int)(p + r),
                        (unsigned char *)image + ((const char *)rows[p].from - (char *)from.ptr) +
                            r * kv_rows_bytes(c.from, c.width),
                        (unsigned char *)image +
                            ((const char *)rows[p].from_scales - (char *)from.ptr) + 4 * r);
        memset(want, 0x5a, CONVERT_ROOM);
        device_upload(d, from.ptr, image, CONVERT_ROOM);
        if (i % 2) memcpy(to->ptr, want, CONVERT_ROOM);
        else device_upload(d, to->ptr, want, CONVERT_ROOM);
        CHECK_OK(copy_stream_convert(l, &c));
        CHECK_OK(copy_stream_synchronize(l));
        convert_by_rows(&c, &from, image, to, want);
        if (i % 2) memcpy(got, to->ptr, CONVERT_ROOM);
        else device_download(d, got, to->ptr, CONVERT_ROOM);
        for (size_t b = 0; memcmp(got, want, CONVERT_ROOM) != 0 && b < CONVERT_ROOM; b++)
            if (got[b] != want[b])
                test_fail(__FILE__, __LINE__,
                          "type %d to %d, rows of %u: byte %zu is %02x, not %02x", c.from, c.to,
                          c.width, b, (uint8_t)got[b], (uint8_t)want[b]);
    }
    free(image);
    free(want);
    free(got);
    device_mem_free(d, &from);
    device_mem_free(d, &far);
    device_mem_free(d, &host);
    copy_stream_close(l);
    CHECK_OK(device_fault(d, NULL));
    device_close(d);
}

/* Bytes that are not a handle, or one of another kind of device, are refused without harm. */
static void sharing_cases(const char *name)
{
    struct device *d = open_device(name);
    struct dev_mem m = memory_of(d, 5000, DEVICE_MEM_SHARED),
                   host = memory_of(d, 5000, DEVICE_MEM_HOST);
    uint8_t handle[DEVICE_HANDLE_BYTES] = { 0 }, other[DEVICE_HANDLE_BYTES] = { 0 };
    struct err err = { 0 };
    void *p = NULL;
    CHECK_STATUS(device_mem_import(d, handle, &p, &err),
                 d->is_host ? ERR_UNSUPPORTED : ERR_PEER_LOST);
    CHECK(err.text[0] && p == NULL);
    CHECK_STATUS(device_mem_export(d, &host, handle, &err),
                 d->is_host ? ERR_UNSUPPORTED : ERR_NODEV);
    CHECK_STATUS(device_mem_export(d, &m, handle, &err), d->is_host ? ERR_UNSUPPORTED : OK);
    CHECK((memcmp(handle, other, sizeof handle) == 0) == d->is_host);
    int fd = -1;
    enum status st = device_mem_dmabuf(d, &m, &fd, &err);
    if (st == OK) CHECK(!d->is_host && fd >= 0 && close(fd) == 0);
    else CHECK(st == ERR_UNSUPPORTED && fd == -1 && strstr(err.text, "NICs"));
    CHECK_STATUS(device_mem_dmabuf(d, &host, &fd, &err), ERR_UNSUPPORTED);
    CHECK_OK(device_flush_rdma_writes(d));
    CHECK_OK(device_fault(d, NULL));
    device_mem_free(d, &m);
    /* freed */
    if (!d->is_host) CHECK_STATUS(device_mem_import(d, handle, &p, &err), ERR_PEER_LOST);
    device_mem_free(d, &host);
    CHECK_OK(device_fault(d, NULL));
    device_close(d);
}

#define DEVICE_TESTS(name)                                                                         \
    TEST(name##_memory_is_zeroed_and_holds_what_was_put_there) { memory_cases(#name); }            \
    TEST(name##_impossible_sizes_are_refused_with_a_sentence) { refusal_cases(#name); }            \
    TEST(name##_memory_that_is_available) { available_cases(#name); }                              \
    TEST(name##_copy_stream_copies_in_order) { stream_copy_cases(#name); }                         \
    TEST(name##_copy_stream_gathers) { stream_gather_cases(#name); }                               \
    TEST(name##_copy_stream_does_not_wait_for_host_functions) { stream_host_fn_cases(#name); }     \
    TEST(name##_copy_stream_waits_for_events) { stream_event_cases(#name); }                       \
    TEST(name##_copy_stream_checksums_are_the_hosts) { stream_checksum_cases(#name); }             \
    TEST(name##_copy_stream_converts_rows) { stream_convert_cases(#name); }                        \
    TEST(name##_memory_of_others) { sharing_cases(#name); }
#define DEVICE_CASES(name)                                                                         \
    CASE(name##_memory_is_zeroed_and_holds_what_was_put_there),                                    \
        CASE(name##_impossible_sizes_are_refused_with_a_sentence),                                 \
        CASE(name##_memory_that_is_available), CASE(name##_copy_stream_copies_in_order),           \
        CASE(name##_copy_stream_gathers),                                                          \
        CASE(name##_copy_stream_does_not_wait_for_host_functions),                                 \
        CASE(name##_copy_stream_waits_for_events),                                                 \
        CASE(name##_copy_stream_checksums_are_the_hosts), CASE(name##_copy_stream_converts_rows),  \
        CASE(name##_memory_of_others)

DEVICE_TESTS(cpu)
DEVICE_TESTS(cuda)

/* A GPU's memory is shared by CUDA IPC: tests/conformance/test_transport_specific.c. */
TEST(another_process_writes_into_shared_memory)
{
    struct device *d = open_device("cpu");
    struct dev_mem m;
    struct err err;
    CHECK_OK(device_mem_alloc(d, 100000, DEVICE_MEM_SHARED, &m, &err));
    pid_t child = fork();
    if (child == 0) {
        char *p = mmap(NULL, m.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, m.fd, 0);
        if (p == MAP_FAILED || ftruncate(m.fd, 0) == 0) _exit(1); /* the seal forbids it */
        p[99999] = 42;
        _exit(0);
    }
    int code;
    CHECK(waitpid(child, &code, 0) == child && code == 0);
    CHECK_EQ_INT(((volatile char *)m.ptr)[99999], 42);
    device_mem_free(d, &m);
    device_close(d);
}

TEST(unknown_devices_are_named)
{
    struct device *d = NULL;
    struct err err = { 0 };
    CHECK_STATUS(device_open("abacus", &d, &err), ERR_UNSUPPORTED);
    CHECK(strstr(err.text, "abacus") != NULL && d == NULL);
    device_close(NULL);
}

/* Only the emulated GPU can have an old compute capability. */
TEST(a_gpu_without_kernels_is_refused)
{
    struct device *d = NULL;
    struct err err = { 0 };
    char text[256];
    if (device_count("cuda") == 0) SKIP("no CUDA device, or a build without");
    CHECK_OK(device_open("cuda", &d, &err));
    device_describe(d, text, sizeof text);
    device_close(d);
    if (!strstr(text, "SIMT")) SKIP("a real GPU is what it is");
    CHECK(strstr(text, "compute capability 9.0") && strstr(text, "driver for CUDA"));
    setenv("BATON_SIMT_CC", "75", 1);
    CHECK_STATUS(device_open("cuda", &d, &err), ERR_UNSUPPORTED);
    CHECK(strstr(err.text, "compute capability 7.5") && strstr(err.text, "need 8.0"));
    setenv("BATON_SIMT_CC", "61", 1);
    CHECK_STATUS(device_open("cuda", &d, &err), ERR_UNSUPPORTED);
    CHECK(strstr(err.text, "compute capability 6.1") && strstr(err.text, "need 8.0"));
    setenv("BATON_SIMT_CC", "80", 1);
    CHECK_OK(device_open("cuda", &d, &err));
    device_close(d);
}

TEST_MAIN(DEVICE_CASES(cpu), DEVICE_CASES(cuda), CASE(another_process_writes_into_shared_memory),
          CASE(unknown_devices_are_named), CASE(a_gpu_without_kernels_is_refused))
