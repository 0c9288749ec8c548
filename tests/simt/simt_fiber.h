/* simt_fiber.h - stacks for the threads of a block, and the switch between one of them and the host
 * thread that runs the block.
 *
 * A fiber calls its function once, and the function must not return. The sanitizers are told of
 * every switch. Thread: the one that holds the machine's lock (simt_machine.h); a fiber may go on
 * in another host thread than before. */
#ifndef BATON_TESTS_SIMT_SIMT_FIBER_H
#define BATON_TESTS_SIMT_SIMT_FIBER_H

#include <stddef.h>

struct simt_fiber {
    void *stack_pointer; /* while it is suspended */
    char *stack;         /* lowest byte, above a guard page */
    size_t stack_bytes;
    void (*run)(void *arg);
    void *arg;
    void *tsan;       /* the thread sanitizer's name for it */
    void *fake_stack; /* the address sanitizer's, while it is suspended */
};

/* Creates a fiber, which calls run(arg) at the first simt_fiber_resume. It lives as long as the
 * process. */
void simt_fiber_init(struct simt_fiber *fiber, void (*run)(void *), void *arg);
/* Called on the host thread: runs the fiber until it calls simt_fiber_suspend. */
void simt_fiber_resume(struct simt_fiber *fiber);
/* Called on the fiber: returns to the host thread. */
void simt_fiber_suspend(struct simt_fiber *fiber);

#endif
