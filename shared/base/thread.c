/* thread.c - the kind that each thread declared, and starting threads that leave signals to the
 * main thread. Thread: any. */
#include "shared/base/thread.h"

#include <signal.h>
#include <stdio.h>
#include <sys/resource.h>
#include <unistd.h>

#include "shared/base/mem.h"

enum {
    THREAD_NAME_MAX = 16, /* with the final 0: the kernel's limit */
    LOW_NICE = 15
};

/* THREAD_ANY, the initial value, passes every check. */
static _Thread_local enum thread_kind thread_kind;

void thread_become(enum thread_kind kind, const char *name)
{
    char cut[THREAD_NAME_MAX];
    snprintf(cut, sizeof cut, "%s", name);
    /* the main thread's name is the process's, as ps and killall show it */
    if (gettid() != getpid()) pthread_setname_np(pthread_self(), cut);
    thread_kind = kind;
}

bool thread_is(enum thread_kind kind)
{
    return kind == THREAD_ANY || thread_kind == THREAD_ANY || thread_kind == kind;
}

/* A thread that faults while it blocks the fault's signal is killed at once: no handler, of a
 * sanitizer or a debugger, could say where. */
static const int FAULTS[] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT };

enum status thread_start(pthread_t *out, void *(*fn)(void *), void *arg)
{
    sigset_t all, before;
    sigfillset(&all);
    for (size_t i = 0; i < COUNT_OF(FAULTS); i++) sigdelset(&all, FAULTS[i]);
    /* The new thread inherits the mask; meanwhile this thread takes no signal either. */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = pthread_create(out, NULL, fn, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return rc == 0 ? OK : ERR_FULL;
}

void thread_lower_priority(void)
{
    (void)setpriority(PRIO_PROCESS, (id_t)gettid(), LOW_NICE); /* of this thread alone */
}

struct low_call {
    void (*fn)(void *);
    void *arg;
};

static void *run_low(void *arg)
{
    const struct low_call *call = arg;
    thread_lower_priority(); /* it may not be raised again, so the thread ends with the call */
    call->fn(call->arg);
    return NULL;
}

void thread_run_low(void (*fn)(void *), void *arg)
{
    struct low_call call = { fn, arg };
    pthread_t thread;
    if (thread_start(&thread, run_low, &call) == OK) pthread_join(thread, NULL);
    else fn(arg);
}
