/* tier_worker.c - see tier_worker.h: two mailboxes of pointers, and a lock for what is being
 * written. */
#include "shared/kv/tier/tier_worker.h"

#include <stdatomic.h>

#include "shared/base/assert.h"
#include "shared/base/mailbox.h"
#include "shared/base/mem.h"
#include "shared/base/thread.h"

struct tier_worker {
    struct tier_worker_options o;
    struct mailbox *given, *ran; /* of struct tier_job * */
    pthread_t thread;
    bool joined;
    _Atomic bool stops; /* relaxed: it only tells to hurry */
    uint32_t n_jobs;    /* given and not taken; engine */
    pthread_mutex_t lock;
    pthread_cond_t left;
    const struct tier_job *writes; /* between enter and leave; under the lock */
};

static void *worker_main(void *arg)
{
    struct tier_worker *w = arg;
    struct tier_job *j;
    thread_become(THREAD_ANY, w->o.name);
    if (w->o.is_low) thread_lower_priority();
    while (!tier_worker_is_stopping(w)) {
        if (!mailbox_take(w->given, &j)) {
            if (!mailbox_wait(w->given, -1)) break; /* closed */
            continue;
        }
        j->run(j, w, w->o.arg);
        enum status st = mailbox_post(w->ran, &j);
        ASSERT(st == OK); /* it has room for all */
    }
    return NULL;
}

enum status tier_worker_create(const struct tier_worker_options *o, struct tier_worker **out,
                               struct err *err)
{
    struct tier_worker *w = MEM_NEW(struct tier_worker);
    w->o = *o;
    w->given = mailbox_create(sizeof(struct tier_job *), o->max_jobs, NULL, NULL);
    w->ran = mailbox_create(sizeof(struct tier_job *), o->max_jobs, o->wake, o->wake_arg);
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->left, NULL);
    enum status st = thread_start(&w->thread, worker_main, w);
    if (st != OK) {
        w->joined = true;
        tier_worker_free(w);
        return err_set(err, st, "the thread %s could not be started", o->name);
    }
    *out = w;
    return OK;
}

bool tier_worker_has_room(const struct tier_worker *w) { return w->n_jobs < w->o.max_jobs; }

enum status tier_worker_give(struct tier_worker *w, struct tier_job *j)
{
    if (!tier_worker_has_room(w)) return ERR_BUSY;
    TRY(mailbox_post(w->given, &j));
    w->n_jobs++;
    return OK;
}

struct tier_job *tier_worker_take(struct tier_worker *w)
{
    struct tier_job *j;
    if (!mailbox_take(w->ran, &j) && !(w->joined && mailbox_take(w->given, &j))) return NULL;
    w->n_jobs--;
    return j;
}

void tier_worker_cancel(struct tier_worker *w, struct tier_job *j)
{
    pthread_mutex_lock(&w->lock);
    j->canceled = true;
    while (w->writes == j) pthread_cond_wait(&w->left, &w->lock);
    pthread_mutex_unlock(&w->lock);
}

void tier_worker_stop(struct tier_worker *w)
{
    if (w->joined) return;
    atomic_store_explicit(&w->stops, true, memory_order_relaxed);
    mailbox_close(w->given);
    pthread_join(w->thread, NULL);
    w->joined = true;
}

void tier_worker_free(struct tier_worker *w)
{
    if (!w) return;
    tier_worker_stop(w);
    ASSERT(w->n_jobs == 0);
    mailbox_free(w->given);
    mailbox_free(w->ran);
    pthread_mutex_destroy(&w->lock);
    pthread_cond_destroy(&w->left);
    mem_free(w);
}

/* ---- the worker's thread ---- */

bool tier_worker_enter(struct tier_worker *w, struct tier_job *j)
{
    pthread_mutex_lock(&w->lock);
    const bool may = !j->canceled;
    if (may) w->writes = j;
    pthread_mutex_unlock(&w->lock);
    return may;
}

void tier_worker_leave(struct tier_worker *w, struct tier_job *j)
{
    pthread_mutex_lock(&w->lock);
    ASSERT(w->writes == j);
    w->writes = NULL;
    pthread_cond_signal(&w->left);
    pthread_mutex_unlock(&w->lock);
}

bool tier_worker_is_stopping(struct tier_worker *w)
{
    return atomic_load_explicit(&w->stops, memory_order_relaxed);
}
