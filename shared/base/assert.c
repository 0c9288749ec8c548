/* assert.c - ends the process after a bug of ours: prints what failed, where, and the stack.
 * Thread: any. */
#include "shared/base/assert.h"

#include <execinfo.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "shared/base/log.h"

enum { STACK_DEPTH_MAX = 64 };

_Noreturn void assert_fail(const char *expr, const char *file, int line, const char *func)
{
    char text[512];
    int n = snprintf(text, sizeof text, "assertion failed: %s at %s:%d in %s\n", expr, file, line,
                     func);
    if (n >= (int)sizeof text) n = (int)sizeof text - 1;
    /* Write the sentence first and without allocating: the heap may be what is broken. */
    if (n > 0) log_last_words(text, (size_t)n);
    void *frames[STACK_DEPTH_MAX];
    backtrace_symbols_fd(frames, backtrace(frames, STACK_DEPTH_MAX), STDERR_FILENO);
    abort();
}
