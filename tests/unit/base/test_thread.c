/* test_thread.c - threads, clocks, mailboxes and metrics: what several threads share. */
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mailbox.h"
#include "shared/base/metrics.h"
#include "shared/base/thread.h"
#include "tests/harness/test.h"

static void *become_engine(void *arg)
{
    char name[16];
    sigset_t mask;
    thread_become(THREAD_ENGINE, "engine-with-a-long-name");
    pthread_getname_np(pthread_self(), name, sizeof name);
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    bool *good = arg;
    *good = thread_is(THREAD_ENGINE) && !thread_is(THREAD_LOOP) && thread_is(THREAD_ANY) &&
            strcmp(name, "engine-with-a-l") == 0 && sigismember(&mask, SIGTERM) == 1 &&
            sigismember(&mask, SIGSEGV) == 0;
    return NULL;
}

TEST(thread_knows_what_it_is)
{
    pthread_t t;
    bool good = false;
    CHECK(thread_is(THREAD_LOOP) && thread_is(THREAD_ENGINE)); /* this thread declared no kind */
    CHECK_OK(thread_start(&t, become_engine, &good));
    pthread_join(t, NULL);
    CHECK(good);
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    CHECK_EQ_INT(sigismember(&mask, SIGTERM), 0);
}

TEST(clock_moves_forward)
{
    uint64_t a = clock_ns(), ms = clock_ms();
    usleep(2000);
    CHECK(clock_ns() - a >= 2000000);
    CHECK(clock_ms() > ms);
    CHECK(clock_unix_s() > 1700000000);
}

static void count_wake(void *arg) { atomic_fetch_add((atomic_int *)arg, 1); }

TEST(mailbox_keeps_order_and_limits)
{
    atomic_int wakes = 0;
    struct mailbox *m = mailbox_create(sizeof(int), 3, count_wake, &wakes);
    int v = 0;
    CHECK(!mailbox_take(m, &v));
    CHECK(!mailbox_wait(m, 0));
    for (int round = 0; round < 5; round++) { /* several times around the ring */
        for (int i = 0; i < 3; i++) CHECK_OK(mailbox_post(m, &i));
        int more = 9;
        CHECK_STATUS(mailbox_post(m, &more), ERR_FULL);
        CHECK_EQ_INT(mailbox_len(m), 3);
        for (int i = 0; i < 3; i++) CHECK(mailbox_take(m, &v) && v == i);
    }
    CHECK_EQ_INT(atomic_load(&wakes), 5);
    v = 4;
    CHECK_OK(mailbox_post(m, &v));
    mailbox_close(m);
    CHECK_STATUS(mailbox_post(m, &v), ERR_CANCELED);
    CHECK(mailbox_wait(m, -1));
    CHECK(mailbox_take(m, &v) && v == 4);
    CHECK(!mailbox_wait(m, -1));
    mailbox_free(m);
    mailbox_free(NULL);
}

TEST(mailbox_wait_times_out)
{
    struct mailbox *m = mailbox_create(1, 1, NULL, NULL);
    uint64_t start = clock_ms();
    CHECK(!mailbox_wait(m, 30));
    CHECK(clock_ms() - start >= 29);
    mailbox_free(m);
}

enum { POSTERS = 4, MESSAGES = 20000 };

struct poster {
    struct mailbox *box;
    uint32_t id;
};

static void *post_all(void *arg)
{
    struct poster *p = arg;
    for (uint32_t i = 0; i < MESSAGES;) {
        uint64_t message = (uint64_t)p->id << 32 | i;
        if (mailbox_post(p->box, &message) == OK) i++;
        else usleep(10);
    }
    return NULL;
}

TEST(mailbox_many_posters_one_owner)
{
    struct mailbox *m = mailbox_create(sizeof(uint64_t), 64, NULL, NULL);
    pthread_t threads[POSTERS];
    struct poster posters[POSTERS];
    uint32_t next[POSTERS] = { 0 };
    for (uint32_t i = 0; i < POSTERS; i++) {
        posters[i] = (struct poster){ m, i };
        CHECK_OK(thread_start(&threads[i], post_all, &posters[i]));
    }
    for (int left = POSTERS * MESSAGES; left > 0;) {
        uint64_t message;
        CHECK(mailbox_wait(m, 20000));
        while (mailbox_take(m, &message)) {
            uint32_t id = (uint32_t)(message >> 32);
            CHECK(id < POSTERS);
            CHECK_EQ_INT((uint32_t)message, next[id]++);
            left--;
        }
    }
    for (int i = 0; i < POSTERS; i++) pthread_join(threads[i], NULL);
    CHECK_EQ_INT(mailbox_len(m), 0);
    mailbox_free(m);
}

static void *close_later(void *arg)
{
    usleep(20000);
    mailbox_close(arg);
    return NULL;
}

TEST(mailbox_close_wakes_the_owner)
{
    struct mailbox *m = mailbox_create(8, 2, NULL, NULL);
    pthread_t t;
    CHECK_OK(thread_start(&t, close_later, m));
    CHECK(!mailbox_wait(m, -1));
    pthread_join(t, NULL);
    mailbox_free(m);
}

TEST(metrics_text)
{
    static const double bounds[] = { 0.5, 1, 2.5 };
    struct metrics *m = metrics_create();
    struct counter *a = metrics_counter(m, "x_total", "kind=\"a\"", "Things,\nin \\ all.");
    metrics_gauge(m, "depth", "", "Queue depth.");
    struct counter *b = metrics_counter(m, "x_total", "kind=\"b\"", "ignored");
    struct histogram *h = metrics_histogram(m, "t_seconds", "t=\"ipc\"", "Time.", bounds, 3);
    CHECK(metrics_counter(m, "x_total", "kind=\"a\"", "") == a && a != b);
    counter_add(a, 2);
    counter_add(a, 3);
    CHECK_EQ_INT(counter_value(a), 5);
    struct gauge *g = metrics_gauge(m, "depth", "", "");
    gauge_set(g, -0.25);
    CHECK_NEAR(gauge_value(g), -0.25, 0);
    histogram_observe(h, 0.5);
    histogram_observe(h, 0.75);
    histogram_observe(h, 100);
    histogram_observe(h, NAN);
    struct buf out = { 0 };
    metrics_write(m, &out);
    CHECK_EQ_STR(
        out.data,
        "# HELP x_total Things,\\nin \\\\ all.\n# TYPE x_total counter\nx_total{kind=\"a\"} "
        "5\nx_total{kind=\"b\"} 0\n"
        "# HELP depth Queue depth.\n# TYPE depth gauge\ndepth -0.25\n"
        "# HELP t_seconds Time.\n# TYPE t_seconds histogram\n"
        "t_seconds_bucket{t=\"ipc\",le=\"0.5\"} 1\nt_seconds_bucket{t=\"ipc\",le=\"1\"} 2\n"
        "t_seconds_bucket{t=\"ipc\",le=\"2.5\"} 2\nt_seconds_bucket{t=\"ipc\",le=\"+Inf\"} 3\n"
        "t_seconds_sum{t=\"ipc\"} 101.25\nt_seconds_count{t=\"ipc\"} 3\n");
    buf_release(&out);
    metrics_free(m);
}

static void *update_metrics(void *arg)
{
    struct counter *c = metrics_counter(arg, "n_total", "", "N.");
    struct histogram *h = metrics_histogram(arg, "h_seconds", "", "H.", METRICS_SECONDS,
                                            METRICS_SECONDS_N);
    for (int i = 0; i < 20000; i++) {
        counter_add(c, 1);
        histogram_observe(h, 0.5);
    }
    return NULL;
}

TEST(metrics_updates_are_not_lost)
{
    struct metrics *m = metrics_create();
    pthread_t threads[4];
    struct buf out = { 0 };
    for (int i = 0; i < 4; i++) CHECK_OK(thread_start(&threads[i], update_metrics, m));
    for (int i = 0; i < 20; i++) metrics_write(m, &out);
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    buf_clear(&out);
    metrics_write(m, &out);
    CHECK(strstr(out.data, "\nn_total 80000\n"));
    CHECK(strstr(out.data, "\nh_seconds_sum 40000\n"));
    CHECK(strstr(out.data, "\nh_seconds_count 80000\n"));
    buf_release(&out);
    metrics_free(m);
}

static void *log_some(void *arg)
{
    for (int i = 0; i < 50; i++) log_warn("thread test", "i=%d of=%p", i, arg);
    return NULL;
}

TEST(log_from_many_threads)
{
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) CHECK_OK(thread_start(&threads[i], log_some, NULL));
    log_set_name("x");
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
}

static void look_at_priority(void *arg) { *(int *)arg = getpriority(PRIO_PROCESS, (id_t)gettid()); }

TEST(low_priority_is_of_the_call_alone)
{
    int before = getpriority(PRIO_PROCESS, (id_t)gettid()), during = before, after = 0;
    thread_run_low(look_at_priority, &during);
    look_at_priority(&after);
    CHECK(during > before || before >= 15);
    CHECK_EQ_INT(after, before);
}

TEST_MAIN(CASE(thread_knows_what_it_is), CASE(clock_moves_forward),
          CASE(mailbox_keeps_order_and_limits), CASE(mailbox_wait_times_out),
          CASE(mailbox_many_posters_one_owner), CASE(mailbox_close_wakes_the_owner),
          CASE(metrics_text), CASE(metrics_updates_are_not_lost), CASE(log_from_many_threads),
          CASE(low_priority_is_of_the_call_alone))
