/* simt_fault.cc - says which rule an invalid access to device memory, or by a kernel, has broken.
 * The sanitizers say it themselves. Thread: the one that faults, in its signal handler; the process
 * is about to end. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "tests/simt/simt_block.h"
#include "tests/simt/simt_machine.h"
#include "tests/simt/simt_overlap.h"
#include "tests/simt/simt_sanitize.h"
#include "tests/simt/simt_table.h"

static void tell_fault(int sig, siginfo_t *info, void *context)
{
    if (simt_overlap_fault(info->si_addr, context)) return;
    const char *at = (const char *)info->si_addr;
    char text[300], who[100];
    signal(sig, SIG_DFL); /* the access happens again when this returns */
    if (!simt_state_mutex().try_lock()) return;
    bool in_kernel = simt_describe_thread(who, sizeof who);
    if (!in_kernel) snprintf(who, sizeof who, "ordinary code");
    int n = 0;
    for (auto &i : simt_tables_of().device) {
        const simt_allocation &a = i.second;
        if (at < a.data - SIMT_GUARD || at >= a.data + a.data_bytes + SIMT_GUARD) continue;
        if (at < a.p)
            n = snprintf(text, sizeof text,
                         "simt: %s touched %td bytes before the %zu bytes at %p\n", who, a.p - at,
                         a.bytes, (void *)a.p);
        else if (at >= a.p + a.bytes)
            n = snprintf(text, sizeof text,
                         "simt: %s touched %td bytes behind the %zu bytes at %p\n", who,
                         at - (a.p + a.bytes), a.bytes, (void *)a.p);
        else
            n = snprintf(text, sizeof text,
                         "simt: %s touched device memory, byte %td of %zu at %p\n", who, at - a.p,
                         a.bytes, (void *)a.p);
    }
    if (!n && in_kernel)
        n = snprintf(text, sizeof text, "simt: %s touched %p, where no memory is\n", who,
                     (const void *)at);
    if (n > 0 && write(2, text, (size_t)n) < 0) abort();
    simt_state_mutex().unlock();
}

void simt_catch_faults(void)
{
    struct sigaction old, mine = {};
    if (SIMT_ASAN || SIMT_TSAN || sigaction(SIGSEGV, nullptr, &old) != 0 ||
        old.sa_handler != SIG_DFL)
        return;
    mine.sa_sigaction = tell_fault;
    mine.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &mine, nullptr);
}
