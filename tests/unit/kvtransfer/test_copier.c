/* test_copier.c - copy implementations against memcpy and hash_64, and copiers: every job is
 * returned exactly once, whichever thread ran it, and its bytes are right. */
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "kvtransfer/local/copier.h"
#include "kvtransfer/local/copy.h"
#include "shared/base/hash/hash.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

enum { ROOM = 72 * 1024, EDGE = 128 };

static char *source(void)
{
    static char from[ROOM];
    static bool filled;
    for (size_t i = 0; !filled && i < ROOM; i++) from[i] = (char)(i * 2654435761u >> 11);
    filled = true;
    return from;
}

static void check_copy(const struct copy_impl *impl, size_t to_at, size_t from_at, size_t n)
{
    static char to[ROOM] __attribute__((aligned(64)));
    const struct copy_run run = { to + EDGE + to_at, source() + from_at, n };
    uint64_t sum = 0;
    for (int hashes = 0; hashes < 2; hashes++) {
        memset(to, 0x5a, EDGE + to_at + n + EDGE);
        if (hashes) impl->copy_and_hash(&run, 1, &sum);
        else impl->copy(&run, 1);
        if (memcmp(run.to, run.from, n) != 0)
            test_fail(__FILE__, __LINE__, "%s: %zu bytes from %zu to %zu differ", impl->name, n,
                      from_at, to_at);
        for (size_t i = 0; i < EDGE + to_at; i++) CHECK_EQ_INT(to[i], 0x5a);
        for (size_t i = 0; i < EDGE; i++) CHECK_EQ_INT(run.to[n + i], 0x5a);
    }
    if (sum != hash_64(run.from, n, 0))
        test_fail(__FILE__, __LINE__, "%s: the sum of %zu bytes from %zu to %zu differs",
                  impl->name, n, from_at, to_at);
}

/* Every length up to past two blocks of XXH3, whole lines and odd addresses on both sides. */
static void check_lengths(const struct copy_impl *impl)
{
    enum { TWO_BLOCKS = 2 * 1024 };
    for (size_t n = 0; n <= TWO_BLOCKS + 70; n++) {
        check_copy(impl, 0, 0, n);
        check_copy(impl, 1 + n % 63, 1 + n * 7 % 63, n);
    }
}

/* Several runs of different lengths at once, some too short to be fetched ahead of time; a bit that
 * flips in one changes the sum of that one only. */
static void check_runs(const struct copy_impl *impl)
{
    static const size_t lengths[] = { 4096, 1, 0, 4096, 300, 9000, 64, 5000, 17, 8192, 240, 241 };
    static char to[ROOM];
    struct copy_run runs[COUNT_OF(lengths)];
    uint64_t sums[COUNT_OF(lengths)], flipped[COUNT_OF(lengths)];
    size_t at = 3, n_runs = COUNT_OF(lengths);
    for (size_t i = 0; i < n_runs; at += lengths[i++] + 5)
        runs[i] = (struct copy_run){ to + at, source() + at * 3 % 30000, lengths[i] };
    impl->copy_and_hash(runs, n_runs, sums);
    for (size_t i = 0; i < n_runs; i++) {
        CHECK(memcmp(runs[i].to, runs[i].from, runs[i].n) == 0);
        CHECK(sums[i] == hash_64(runs[i].from, runs[i].n, 0));
    }
    for (size_t i = 0; i < n_runs; i++) {
        size_t bit = runs[i].n * 8 * (i + 1) / (n_runs + 1);
        struct copy_run changed = { to + at, runs[i].to, runs[i].n };
        runs[i].to[bit / 8] = (char)(runs[i].to[bit / 8] ^ 1 << bit % 8);
        impl->copy_and_hash(&changed, 1, &flipped[i]);
        CHECK((flipped[i] == sums[i]) == (runs[i].n == 0));
    }
}

static void check_all(const struct copy_impl *impl)
{
    static const size_t large[] = { 4096, 16384, 16385, 32767, 65536, 65600 + 63 };
    if (!impl->runs_here()) SKIP("this CPU has not the instruction set of the copy");
    for (size_t to = 0; to < 66; to += 1 + to % 3)
        for (size_t n = 0; n < 700; n += 1 + n / 16) check_copy(impl, to, (to * 7 + n) % 65, n);
    for (size_t i = 0; i < COUNT_OF(large); i++)
        for (size_t to = 0; to < 64; to += 7)
            for (size_t from = 0; from < 64; from += 13) check_copy(impl, to, from, large[i]);
    check_lengths(impl);
    check_runs(impl);
}

TEST(copy_plain) { check_all(&copy_plain); }
#if defined(__x86_64__)
TEST(copy_avx2) { check_all(&copy_avx2); }
TEST(copy_avx512) { check_all(&copy_avx512); }
#else
TEST(copy_avx2) { SKIP("x86-64 only"); }
TEST(copy_avx512) { SKIP("x86-64 only"); }
#endif

TEST(copy_choice_runs_here)
{
    const struct copy_impl *impl = copy_choose();
    CHECK(impl->runs_here());
    char a[100000], b[100000];
    for (size_t i = 0; i < sizeof a; i++) a[i] = (char)(i * 31);
    for (size_t n = 1; n <= sizeof a; n = n * 3 + 1) {
        memset(b, 0, sizeof b);
        impl->copy(&(struct copy_run){ b, a, n }, 1);
        CHECK(memcmp(a, b, n) == 0);
    }
}

/* ---- copiers ---- */

struct book {
    _Atomic uint32_t n_run;
    _Atomic uint32_t gate; /* 1: workers wait */
    char *to, *from;
};

static void run(const struct copier_job *j)
{
    struct book *b = j->put;
    while (atomic_load(&b->gate)) sched_yield();
    memcpy(b->to + j->skip, b->from + j->skip, j->bytes);
    atomic_fetch_add(&b->n_run, 1);
}

static void count_wake(void *arg) { atomic_fetch_add((_Atomic uint32_t *)arg, 1); }

TEST(copier_jobs_come_back_once)
{
    enum { N = 2000, BYTES = 1000 };
    struct book b = { .to = calloc(N, BYTES), .from = malloc(N * BYTES) };
    struct copier *c;
    struct err err;
    _Atomic uint32_t n_wakes = 0;
    for (size_t i = 0; i < N * BYTES; i++) b.from[i] = (char)(i * 13 >> 3);
    CHECK_OK(copier_create(4, 0, run, count_wake, &n_wakes, &c, &err));
    uint32_t offered = 0, self = 0, back = 0;
    static uint8_t seen[N];
    struct copier_job j;
    for (uint32_t i = 0; i < N; i++) {
        struct copier_job job = {
            .put = &b, .i_copy = i, .skip = (uint64_t)i * BYTES, .bytes = BYTES
        };
        if (copier_offer(c, job)) offered++;
        else run(&job), self++;
        while (copier_take(c, &j)) seen[j.i_copy]++, back++;
    }
    while (back < offered) {
        copier_wait(c, 100);
        while (copier_take(c, &j)) seen[j.i_copy]++, back++;
    }
    CHECK_EQ_INT(atomic_load(&b.n_run), N);
    CHECK_EQ_INT(offered + self, N);
    for (uint32_t i = 0; i < N; i++) CHECK(seen[i] <= 1);
    CHECK(memcmp(b.to, b.from, N * BYTES) == 0);
    CHECK(!offered || atomic_load(&n_wakes) > 0);
    copier_free(c);
    free(b.to);
    free(b.from);
}

/* Workers that make no progress accept at most COPIER_QUEUED_BYTES bytes and COPIER_JOBS_MAX
 * jobs. */
TEST(copier_queues_are_bounded)
{
    struct book b = { .to = malloc(8 * COPIER_CHUNK), .from = calloc(8, COPIER_CHUNK), .gate = 1 };
    struct copier *c;
    struct err err;
    struct copier_job j = { .put = &b, .bytes = COPIER_CHUNK }, out;
    CHECK_OK(copier_create(3, 0, run, NULL, NULL, &c, &err));
    uint32_t n = 0, back = 0;
    for (; copier_offer(c, j); j.skip += COPIER_CHUNK) CHECK(++n < 8);
    CHECK_EQ_INT(n, 2 * COPIER_QUEUED_BYTES / COPIER_CHUNK);
    CHECK(!copier_take(c, &out));
    atomic_store(&b.gate, 0);
    for (; back < n; copier_wait(c, 100))
        while (copier_take(c, &out)) back++;
    atomic_store(&b.gate, 1);
    j.bytes = 1;
    for (n = back = 0, j.skip = 0; copier_offer(c, j); j.skip++) CHECK(++n < 1000);
    CHECK_EQ_INT(n, 2 * COPIER_JOBS_MAX);
    atomic_store(&b.gate, 0);
    for (; back < n; copier_wait(c, 100))
        while (copier_take(c, &out)) back++;
    copier_free(c);
    free(b.to);
    free(b.from);
}

/* Without workers no job is accepted; jobs that another thread ran are still returned. */
TEST(copier_alone)
{
    struct copier *c;
    struct err err;
    struct copier_job j = { .worker = COPIER_EXTERNAL, .bytes = 77 }, out;
    CHECK_OK(copier_create(1, 2, run, NULL, NULL, &c, &err));
    CHECK(!copier_offer(c, j));
    copier_done(c, j);
    copier_done(c, j);
    CHECK(copier_take(c, &out) && out.bytes == 77);
    CHECK(copier_take(c, &out) && !copier_take(c, &out));
    copier_free(c);
}

TEST(copier_number_of_threads)
{
    CHECK_EQ_INT(copier_choose_threads(3), 3);
    CHECK_EQ_INT(copier_choose_threads(99), COPIER_THREADS_MAX);
    CHECK(copier_choose_threads(0) >= 1 && copier_choose_threads(0) <= 4);
    cpu_set_t one;
    CHECK_OK(sched_getaffinity(0, sizeof one, &one));
    int cpu = 0;
    while (!CPU_ISSET(cpu, &one)) cpu++;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    CHECK_OK(sched_setaffinity(0, sizeof one, &one));
    CHECK_EQ_INT(copier_choose_threads(0), 1);
}

TEST_MAIN(CASE(copy_plain), CASE(copy_avx2), CASE(copy_avx512), CASE(copy_choice_runs_here),
          CASE(copier_jobs_come_back_once), CASE(copier_queues_are_bounded), CASE(copier_alone),
          CASE(copier_number_of_threads))
