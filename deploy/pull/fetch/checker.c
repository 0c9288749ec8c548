/* checker.c - see checker.h. */
#include "deploy/pull/fetch/checker.h"

#include <string.h>
#include <unistd.h>

#include "shared/base/assert.h"
#include "shared/base/mailbox.h"
#include "shared/base/thread.h"

/* Each part has at most one job of each kind, and few parts are open (fetch.h). */
enum { JOBS_MAX = 256, THREADS_MAX = 4 };

struct worker {
    struct checker *c;
    struct mailbox *jobs; /* of the thread */
    pthread_t thread;
};

struct checker {
    struct worker workers[THREADS_MAX];
    uint32_t n_workers;
    struct mailbox *results; /* of main */
    atomic_bool stop;
};

/* ---- a thread ---- */

static void run(struct checker *c, struct check_job *job)
{
    struct check_result r = { .part = job->part, .kind = job->kind };
    if (job->kind == CHECK_HASH) r.st = part_hash(job->part, job->to, &c->stop, &r.err);
    else r.st = part_settle(job->part, str_of(job->journal), &r.err);
    mem_free(job->journal);
    enum status st = mailbox_post(c->results, &r);
    ASSERT(st == OK); /* it has room for the results of all jobs */
}

static void *work(void *arg)
{
    struct worker *w = arg;
    struct check_job job;
    thread_become(THREAD_ANY, "pull checker");
    while (mailbox_wait(w->jobs, -1))
        while (mailbox_take(w->jobs, &job)) run(w->c, &job);
    return NULL;
}

/* ---- main ---- */

static uint32_t n_threads(void)
{
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : n > THREADS_MAX ? THREADS_MAX : (uint32_t)n;
}

struct checker *checker_create(void (*wake)(void *arg), void *arg)
{
    struct checker *c = MEM_NEW(struct checker);
    c->results = mailbox_create(sizeof(struct check_result), JOBS_MAX, wake, arg);
    for (; c->n_workers < n_threads(); c->n_workers++) {
        struct worker *w = &c->workers[c->n_workers];
        w->c = c;
        w->jobs = mailbox_create(sizeof(struct check_job), JOBS_MAX, NULL, NULL);
        if (thread_start(&w->thread, work, w) == OK) continue;
        mailbox_free(w->jobs);
        break;
    }
    if (c->n_workers) return c;
    mailbox_free(c->results);
    mem_free(c);
    return NULL;
}

void checker_post(struct checker *c, struct check_job *job)
{
    bool *busy = job->kind == CHECK_HASH ? &job->part->hashing : &job->part->settling;
    ASSERT(!*busy);
    *busy = true;
    /* The same thread for all jobs of a part: they stay in order. */
    const size_t i = ((uintptr_t)job->part / sizeof(struct part)) % c->n_workers;
    enum status st = mailbox_post(c->workers[i].jobs, job);
    ASSERT(st == OK);
}

bool checker_take(struct checker *c, struct check_result *out)
{
    if (!mailbox_take(c->results, out)) return false;
    if (out->kind == CHECK_HASH) out->part->hashing = false;
    else out->part->settling = false;
    return true;
}

void checker_wait(struct checker *c) { (void)mailbox_wait(c->results, -1); }

void checker_free(struct checker *c)
{
    if (!c) return;
    atomic_store(&c->stop, true);
    for (uint32_t i = 0; i < c->n_workers; i++) mailbox_close(c->workers[i].jobs);
    for (uint32_t i = 0; i < c->n_workers; i++) {
        pthread_join(c->workers[i].thread, NULL);
        mailbox_free(c->workers[i].jobs);
    }
    mailbox_free(c->results);
    mem_free(c);
}
