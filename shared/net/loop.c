/* loop.c - see loop.h.
 *
 * Posts go through a mailbox whose wake-up is uv_async_send. Stopping closes the mailbox, runs what
 * was posted before, waits for slow work that is still on a worker (its `done` is always called),
 * then closes timers, signals and the delay probe. The wake-up handle stays until loop_free, since
 * another thread may be between its post and its wake-up. Thread: see loop.h. */
#include "shared/net/loop.h"

#include <signal.h>
#include <stdatomic.h>

#include "shared/base/list.h"
#include "shared/base/log.h"
#include "shared/base/mailbox.h"
#include "shared/base/mem.h"
#include "shared/base/thread.h"

enum { LOOP_POSTS_MAX = 65536, LOOP_WORK_MAX = 1024 };

struct loop_post_item {
    void (*fn)(void *arg);
    void *arg;
};

struct loop {
    uv_loop_t uv;
    uv_async_t wake;
    uv_prepare_t probe;     /* once per turn, for the longest delay */
    uv_signal_t signals[2]; /* SIGINT, SIGTERM */
    bool has_signals;
    void (*on_signal)(void *arg, int signum);
    void *signal_arg;
    struct mailbox *posts;
    struct list timers;
    uint32_t n_work;
    uint32_t n_closing; /* handles of the loop itself that are being closed */
    uint64_t turn_ns, turn_idle_ns, delay_ns;
    bool ended;
    /* Relaxed: the mailbox orders it with posts, uv_async_send with the loop. */
    atomic_bool stopping;
};

struct loop_timer {
    uv_timer_t uv; /* first: the close callback frees through it */
    struct list link;
    struct loop *loop;
    void (*fn)(void *arg);
    void *arg;
};

struct loop_work_item {
    uv_work_t uv;
    struct loop *loop;
    void (*work)(void *arg);
    void (*done)(void *arg);
    void *arg;
};

static void loop_wake(void *arg)
{
    struct loop *l = arg;
    uv_async_send(&l->wake);
}

/* Runs at most n posts per turn, so that a function that posts itself again does not block the
 * loop. */
static void loop_run_posts(struct loop *l, size_t n)
{
    struct loop_post_item item;
    while (n-- > 0 && mailbox_take(l->posts, &item)) item.fn(item.arg);
    if (mailbox_len(l->posts) > 0) uv_async_send(&l->wake);
}

static void loop_on_wake(uv_async_t *wake)
{
    struct loop *l = wake->data;
    loop_run_posts(l, mailbox_len(l->posts));
    if (atomic_load_explicit(&l->stopping, memory_order_relaxed)) uv_stop(&l->uv);
}

/* A turn is the time between two polls; waiting inside the poll does not count as delay. */
static void loop_on_turn(uv_prepare_t *probe)
{
    struct loop *l = probe->data;
    uint64_t now = uv_hrtime(), idle = uv_metrics_idle_time(&l->uv);
    uint64_t turn = now - l->turn_ns, waited = idle - l->turn_idle_ns;
    uint64_t busy = turn > waited ? turn - waited : 0;
    if (l->turn_ns != 0 && busy > l->delay_ns) l->delay_ns = busy;
    l->turn_ns = now;
    l->turn_idle_ns = idle;
}

enum status loop_create(struct loop **out, struct err *err)
{
    struct loop *l = MEM_NEW(struct loop);
    int rc = uv_loop_init(&l->uv);
    if (rc != 0) {
        mem_free(l);
        return err_set(err, ERR_NOMEM, "cannot make the event loop: %s", uv_strerror(rc));
    }
    rc = uv_async_init(&l->uv, &l->wake, loop_on_wake);
    if (rc != 0) {
        uv_loop_close(&l->uv);
        mem_free(l);
        return err_set(err, ERR_NOMEM, "cannot make the wake-up of the event loop: %s",
                       uv_strerror(rc));
    }
    /* A write to a closed socket must fail, not end the process. */
    signal(SIGPIPE, SIG_IGN);
    uv_loop_configure(&l->uv, UV_METRICS_IDLE_TIME);
    l->wake.data = l;
    uv_prepare_init(&l->uv, &l->probe);
    l->probe.data = l;
    uv_prepare_start(&l->probe, loop_on_turn);
    uv_unref((uv_handle_t *)&l->probe);
    list_init(&l->timers);
    l->posts = mailbox_create(sizeof(struct loop_post_item), LOOP_POSTS_MAX, loop_wake, l);
    *out = l;
    return OK;
}

static void loop_on_own_closed(uv_handle_t *h)
{
    struct loop *l = h->data;
    l->n_closing--;
}

static void loop_close_own(struct loop *l, uv_handle_t *h)
{
    h->data = l;
    l->n_closing++;
    uv_close(h, loop_on_own_closed);
}

/* Completes the posts accepted before the stop and the slow work, then closes the loop's own
 * handles. */
static void loop_end(struct loop *l)
{
    if (l->ended) return;
    l->ended = true;
    mailbox_close(l->posts);
    while (mailbox_len(l->posts) > 0) loop_run_posts(l, mailbox_len(l->posts));
    while (l->n_work > 0) uv_run(&l->uv, UV_RUN_ONCE);
    LIST_FOREACH (t, &l->timers, struct loop_timer, link) loop_timer_free(t);
    loop_close_own(l, (uv_handle_t *)&l->probe);
    for (size_t i = 0; l->has_signals && i < COUNT_OF(l->signals); i++)
        loop_close_own(l, (uv_handle_t *)&l->signals[i]);
    while (l->n_closing > 0) uv_run(&l->uv, UV_RUN_NOWAIT);
}

static void loop_check_foreign(uv_handle_t *h, void *arg)
{
    struct loop *l = arg;
    if (uv_is_closing(h)) return;
    log_error("loop freed with an open handle", "type=%s", uv_handle_type_name(h->type));
    ASSERT(h->loop != &l->uv);
}

void loop_free(struct loop *l)
{
    if (!l) return;
    loop_end(l);
    loop_close_own(l, (uv_handle_t *)&l->wake);
    uv_walk(&l->uv, loop_check_foreign, l);
    /* Let closes finish that owners began after loop_run returned. */
    uv_run(&l->uv, UV_RUN_DEFAULT);
    int rc = uv_loop_close(&l->uv);
    ASSERT(rc == 0);
    mailbox_free(l->posts);
    mem_free(l);
}

void loop_run(struct loop *l)
{
    thread_become(THREAD_LOOP, "loop");
    while (!atomic_load_explicit(&l->stopping, memory_order_relaxed))
        uv_run(&l->uv, UV_RUN_DEFAULT);
    loop_end(l);
}

void loop_stop(struct loop *l)
{
    atomic_store_explicit(&l->stopping, true, memory_order_relaxed);
    mailbox_close(l->posts);
    uv_async_send(&l->wake);
}

uv_loop_t *loop_uv(struct loop *l) { return &l->uv; }

enum status loop_post(struct loop *l, void (*fn)(void *arg), void *arg)
{
    struct loop_post_item item = { fn, arg };
    return mailbox_post(l->posts, &item);
}

static void loop_work_run(uv_work_t *uv)
{
    struct loop_work_item *w = uv->data;
    w->work(w->arg);
}

static void loop_work_done(uv_work_t *uv, int rc)
{
    struct loop_work_item *w = uv->data;
    ASSERT(rc == 0); /* nothing cancels it */
    w->loop->n_work--;
    if (w->done) w->done(w->arg);
    mem_free(w);
}

enum status loop_work(struct loop *l, void (*work)(void *arg), void (*done)(void *arg), void *arg)
{
    ASSERT_THREAD(THREAD_LOOP);
    if (l->n_work >= LOOP_WORK_MAX) return ERR_BUSY;
    struct loop_work_item *w = mem_try_calloc(1, sizeof *w);
    if (!w) return ERR_NOMEM;
    *w = (struct loop_work_item){ .loop = l, .work = work, .done = done, .arg = arg };
    w->uv.data = w;
    if (uv_queue_work(&l->uv, &w->uv, loop_work_run, loop_work_done) != 0) {
        mem_free(w);
        return ERR_INTERNAL;
    }
    l->n_work++;
    return OK;
}

static void loop_on_timer(uv_timer_t *uv)
{
    struct loop_timer *t = (struct loop_timer *)uv;
    t->fn(t->arg);
}

struct loop_timer *loop_timer_start(struct loop *l, uint64_t delay_ms, uint64_t repeat_ms,
                                    void (*fn)(void *arg), void *arg)
{
    ASSERT_THREAD(THREAD_LOOP);
    struct loop_timer *t = MEM_NEW(struct loop_timer);
    t->loop = l;
    t->fn = fn;
    t->arg = arg;
    uv_timer_init(&l->uv, &t->uv);
    list_push(&l->timers, &t->link);
    uv_update_time(&l->uv); /* the delay begins now, not at the start of this turn */
    uv_timer_start(&t->uv, loop_on_timer, delay_ms, repeat_ms);
    return t;
}

static void loop_on_timer_closed(uv_handle_t *h) { mem_free(h); }

void loop_timer_free(struct loop_timer *t)
{
    if (!t) return;
    ASSERT_THREAD(THREAD_LOOP);
    list_remove(&t->link);
    uv_close((uv_handle_t *)&t->uv, loop_on_timer_closed);
}

static void loop_on_uv_signal(uv_signal_t *s, int signum)
{
    struct loop *l = s->data;
    if (l->on_signal) l->on_signal(l->signal_arg, signum);
}

void loop_on_signal(struct loop *l, void (*fn)(void *arg, int signum), void *arg)
{
    static const int numbers[] = { SIGINT, SIGTERM };
    ASSERT_THREAD(THREAD_LOOP);
    l->on_signal = fn;
    l->signal_arg = arg;
    if (l->has_signals) return;
    l->has_signals = true;
    for (size_t i = 0; i < COUNT_OF(numbers); i++) {
        uv_signal_init(&l->uv, &l->signals[i]);
        l->signals[i].data = l;
        uv_signal_start(&l->signals[i], loop_on_uv_signal, numbers[i]);
        uv_unref((uv_handle_t *)&l->signals[i]);
    }
}

double loop_take_max_delay_ms(struct loop *l)
{
    ASSERT_THREAD(THREAD_LOOP);
    double ms = (double)l->delay_ns / 1e6;
    l->delay_ns = 0;
    return ms;
}
