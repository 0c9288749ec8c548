/* copier.c - workers with a mailbox each, and one mailbox for completed jobs; see copier.h. */
#include "kvtransfer/local/copier.h"

#include <sched.h>

#include "shared/base/assert.h"
#include "shared/base/mailbox.h"
#include "shared/base/mem.h"
#include "shared/base/thread.h"

struct copier_worker {
    struct copier *copier;
    struct mailbox *mailbox;
    pthread_t thread;
    uint64_t bytes; /* of its jobs in flight; the transfer thread's */
    uint32_t n_jobs;
};

struct copier {
    struct copier_worker workers[COPIER_THREADS_MAX];
    uint32_t n_workers;
    struct mailbox *done;
    void (*run)(const struct copier_job *j);
};

uint32_t copier_choose_threads(uint32_t wanted)
{
    if (wanted) return wanted < COPIER_THREADS_MAX ? wanted : COPIER_THREADS_MAX;
    cpu_set_t allowed;
    int n = sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : 1;
    return n <= 2 ? 1 : n >= 8 ? 4 : (uint32_t)n / 2;
}

static void *work(void *arg)
{
    struct copier_worker *w = arg;
    struct copier_job j;
    thread_become(THREAD_COMPUTE, "kv-copier");
    while (mailbox_wait(w->mailbox, -1))
        while (mailbox_take(w->mailbox, &j)) {
            w->copier->run(&j);
            copier_done(w->copier, j);
        }
    return NULL;
}

enum status copier_create(uint32_t n_threads, uint32_t n_external,
                          void (*run)(const struct copier_job *j), void (*wake)(void *arg),
                          void *arg, struct copier **out, struct err *err)
{
    ASSERT(n_threads >= 1 && n_threads <= COPIER_THREADS_MAX);
    struct copier *c = MEM_NEW(struct copier);
    uint32_t n_workers = n_threads - 1;
    c->run = run;
    c->done = mailbox_create(sizeof(struct copier_job),
                             (size_t)n_workers * COPIER_JOBS_MAX + n_external + 1, wake, arg);
    for (; c->n_workers < n_workers; c->n_workers++) {
        struct copier_worker *w = &c->workers[c->n_workers];
        w->copier = c;
        w->mailbox = mailbox_create(sizeof(struct copier_job), COPIER_JOBS_MAX, NULL, NULL);
        if (thread_start(&w->thread, work, w) != OK) {
            mailbox_free(w->mailbox);
            copier_free(c);
            return err_set(
                err, ERR_NOMEM,
                "%u threads to copy KV cannot be started; a lower number of copiers needs fewer",
                n_workers);
        }
    }
    *out = c;
    return OK;
}

void copier_free(struct copier *c)
{
    if (!c) return;
    for (uint32_t i = 0; i < c->n_workers; i++) mailbox_close(c->workers[i].mailbox);
    for (uint32_t i = 0; i < c->n_workers; i++) {
        pthread_join(c->workers[i].thread, NULL);
        mailbox_free(c->workers[i].mailbox);
    }
    mailbox_free(c->done);
    mem_free(c);
}

bool copier_offer(struct copier *c, struct copier_job j)
{
    struct copier_worker *idle = NULL;
    for (uint32_t i = 0; i < c->n_workers; i++) {
        struct copier_worker *w = &c->workers[i];
        if (w->n_jobs < COPIER_JOBS_MAX && w->bytes < COPIER_QUEUED_BYTES &&
            (!idle || w->bytes < idle->bytes))
            idle = w;
    }
    if (!idle) return false;
    j.worker = (uint32_t)(idle - c->workers);
    idle->bytes += j.bytes;
    idle->n_jobs++;
    enum status st = mailbox_post(idle->mailbox, &j);
    ASSERT(st == OK); /* invariant 2 */
    return true;
}

bool copier_alone(const struct copier *c) { return c->n_workers == 0; }

bool copier_take(struct copier *c, struct copier_job *out)
{
    if (!mailbox_take(c->done, out)) return false;
    if (out->worker < c->n_workers) {
        c->workers[out->worker].bytes -= out->bytes;
        c->workers[out->worker].n_jobs--;
    }
    return true;
}

void copier_wait(struct copier *c, int timeout_ms) { (void)mailbox_wait(c->done, timeout_ms); }

void copier_done(struct copier *c, struct copier_job j)
{
    enum status st = mailbox_post(c->done, &j);
    ASSERT(st == OK); /* invariant 2 */
}
