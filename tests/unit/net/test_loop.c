/* test_loop.c - posts from other threads, slow work, timers, orderly end. */
#include "shared/net/loop.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <unistd.h>

#include "shared/base/clock.h"
#include "shared/base/thread.h"
#include "tests/harness/test.h"

struct posting {
    struct loop *loop;
    int n_posts, seen, order_faults, n_done;
    int last[4];
};

struct post {
    struct posting *p;
    int poster, number;
};

static void on_post(void *arg)
{
    struct post *m = arg;
    if (m->number != m->p->last[m->poster] + 1) m->p->order_faults++;
    m->p->last[m->poster] = m->number;
    if (++m->p->seen == m->p->n_posts) loop_stop(m->p->loop);
}

enum { POSTS_EACH = 5000 };

struct poster {
    struct posting *p;
    int index;
    struct post posts[POSTS_EACH];
};

static void *post_many(void *arg)
{
    struct poster *o = arg;
    for (int i = 0; i < POSTS_EACH; i++) {
        o->posts[i] = (struct post){ o->p, o->index, i + 1 };
        while (loop_post(o->p->loop, on_post, &o->posts[i]) == ERR_FULL) usleep(100);
    }
    return NULL;
}

TEST(loop_keeps_the_order_of_each_poster)
{
    static struct poster posters[4];
    struct posting p = { .n_posts = 4 * POSTS_EACH };
    pthread_t t[4];
    CHECK_OK(loop_create(&p.loop, NULL));
    for (int i = 0; i < 4; i++) {
        posters[i].p = &p;
        posters[i].index = i;
        CHECK_OK(thread_start(&t[i], post_many, &posters[i]));
    }
    loop_run(p.loop);
    for (int i = 0; i < 4; i++) pthread_join(t[i], NULL);
    CHECK_EQ_INT(p.seen, 4 * POSTS_EACH);
    CHECK_EQ_INT(p.order_faults, 0);
    CHECK_STATUS(loop_post(p.loop, on_post, NULL), ERR_CANCELED);
    loop_free(p.loop);
}

static void count_post(void *arg) { ++*(int *)arg; }

TEST(loop_refuses_posts_over_the_limit_and_runs_the_rest)
{
    struct loop *l;
    int n = 0, posted = 0;
    CHECK_OK(loop_create(&l, NULL));
    enum status st;
    while ((st = loop_post(l, count_post, &n)) == OK) posted++;
    CHECK_STATUS(st, ERR_FULL);
    CHECK_EQ_INT(posted, 65536);
    loop_stop(l);
    loop_run(l);
    CHECK_EQ_INT(n, posted);
    loop_free(l);
}

struct slow {
    struct loop *loop;
    pthread_t worker;
    atomic_int worked;
    int done;
};

static void slow_work(void *arg)
{
    struct slow *s = arg;
    usleep(20000);
    atomic_fetch_add(&s->worked, 1);
}

static void slow_done(void *arg)
{
    struct slow *s = arg;
    s->done++;
}

static void slow_start(void *arg)
{
    struct slow *s = arg;
    for (int i = 0; i < 6; i++) CHECK_OK(loop_work(s->loop, slow_work, slow_done, s));
    loop_stop(s->loop);
}

TEST(loop_ends_only_after_the_slow_work_it_promised)
{
    struct slow s = { 0 };
    CHECK_OK(loop_create(&s.loop, NULL));
    CHECK_OK(loop_post(s.loop, slow_start, &s));
    loop_run(s.loop);
    CHECK_EQ_INT(atomic_load(&s.worked), 6);
    CHECK_EQ_INT(s.done, 6);
    loop_free(s.loop);
}

static void no_work(void *arg) { (void)arg; }

static void work_until_busy(void *arg)
{
    struct slow *s = arg;
    enum status st;
    int n = 0;
    while ((st = loop_work(s->loop, no_work, slow_done, s)) == OK) n++;
    CHECK_STATUS(st, ERR_BUSY);
    CHECK_EQ_INT(n, 1024);
    loop_stop(s->loop);
}

TEST(loop_bounds_slow_work)
{
    struct slow s = { 0 };
    CHECK_OK(loop_create(&s.loop, NULL));
    CHECK_OK(loop_post(s.loop, work_until_busy, &s));
    loop_run(s.loop);
    CHECK_EQ_INT(s.done, 1024);
    loop_free(s.loop);
}

struct ticking {
    struct loop *loop;
    struct loop_timer *repeat;
    int n;
    uint64_t t_start;
};

static void on_tick(void *arg)
{
    struct ticking *t = arg;
    if (++t->n < 3) return;
    loop_timer_free(t->repeat);
    CHECK(clock_ms() - t->t_start >= 30);
    loop_stop(t->loop);
}

static void start_ticking(void *arg)
{
    struct ticking *t = arg;
    t->t_start = clock_ms();
    t->repeat = loop_timer_start(t->loop, 10, 10, on_tick, t);
    /* Left to the loop to close. */
    loop_timer_start(t->loop, 100000, 0, on_tick, t);
}

TEST(loop_timers_repeat_and_may_be_freed_inside)
{
    struct ticking t = { 0 };
    CHECK_OK(loop_create(&t.loop, NULL));
    CHECK_OK(loop_post(t.loop, start_ticking, &t));
    loop_run(t.loop);
    CHECK_EQ_INT(t.n, 3);
    loop_free(t.loop);
}

static void on_signal(void *arg, int signum)
{
    struct slow *s = arg;
    s->done = signum;
    loop_stop(s->loop);
}

static void signal_self(void *arg)
{
    struct slow *s = arg;
    loop_on_signal(s->loop, on_signal, s);
    kill(getpid(), SIGTERM);
}

TEST(loop_hears_signals)
{
    struct slow s = { 0 };
    CHECK_OK(loop_create(&s.loop, NULL));
    CHECK_OK(loop_post(s.loop, signal_self, &s));
    loop_run(s.loop);
    CHECK_EQ_INT(s.done, SIGTERM);
    loop_free(s.loop);
}

static void block(void *arg)
{
    (void)arg;
    usleep(30000);
}

static void measure(void *arg)
{
    struct slow *s = arg;
    double ms = loop_take_max_delay_ms(s->loop);
    CHECK(ms >= 25);
    CHECK(ms < 5000);
    loop_stop(s->loop);
}

static void start_measure(void *arg)
{
    struct slow *s = arg;
    loop_timer_start(s->loop, 20, 0, block, NULL);
    loop_timer_start(s->loop, 120, 0, measure, s);
}

TEST(loop_measures_its_longest_turn_without_the_waiting)
{
    struct slow s = { 0 };
    CHECK_OK(loop_create(&s.loop, NULL));
    CHECK_OK(loop_post(s.loop, start_measure, &s));
    loop_run(s.loop);
    loop_free(s.loop);
}

TEST_MAIN(CASE(loop_keeps_the_order_of_each_poster),
          CASE(loop_refuses_posts_over_the_limit_and_runs_the_rest),
          CASE(loop_ends_only_after_the_slow_work_it_promised), CASE(loop_bounds_slow_work),
          CASE(loop_timers_repeat_and_may_be_freed_inside), CASE(loop_hears_signals),
          CASE(loop_measures_its_longest_turn_without_the_waiting))
