/* simt_fiber.cc - switches stacks: a few instructions on x86-64 and aarch64, swapcontext elsewhere.
 *
 * A switch pushes the callee-saved registers, stores the stack pointer and loads the other one.
 * simt_tsan.h says what the thread sanitizer is told. */
#include "tests/simt/simt_fiber.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/simt/simt_sanitize.h"

#ifdef SIMT_RACES
static const unsigned TSAN_FLAGS = __tsan_switch_to_fiber_no_sync;
#elif SIMT_TSAN
static const unsigned TSAN_FLAGS = 0;
#endif

/* A frame is larger under a sanitizer. Only pages that are used cost memory. */
static const size_t STACK_BYTES = SIMT_ASAN || SIMT_TSAN ? 512 << 10 : 128 << 10;

/* The host thread's side of the switch; only one block runs at a time. */
static struct {
    void *stack_pointer;
    const void *stack;
    size_t stack_bytes;
    void *fake_stack;
    void *tsan;
} host;

#if defined(__x86_64__)
/* simt_switch(save: rdi, load: rsi) */
__asm__(R"(
.text
.type simt_switch, @function
simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size simt_switch, .-simt_switch
.type simt_fiber_begin, @function
simt_fiber_begin:
    movq %r12, %rdi
    call *%r13
    ud2
.size simt_fiber_begin, .-simt_fiber_begin
)");
extern "C" void simt_fiber_begin(void);

static void *first_stack_pointer(char *top, void (*run)(void *), void *arg)
{
    void **sp = (void **)top;
    *--sp = nullptr; /* alignment: the call in simt_fiber_begin finds a multiple of 16 */
    *--sp = nullptr;
    *--sp = (void *)simt_fiber_begin;
    *--sp = nullptr;     /* rbp: ends a walk along frame pointers */
    *--sp = nullptr;     /* rbx */
    *--sp = arg;         /* r12 */
    *--sp = (void *)run; /* r13 */
    *--sp = nullptr;     /* r14 */
    *--sp = nullptr;     /* r15 */
    return sp;
}
#define SIMT_OWN_SWITCH 1
#elif defined(__aarch64__)
/* simt_switch(save: x0, load: x1) */
__asm__(R"(
.text
.type simt_switch, %function
simt_switch:
    stp x29, x30, [sp, #-160]!
    stp x19, x20, [sp, #16]
    stp x21, x22, [sp, #32]
    stp x23, x24, [sp, #48]
    stp x25, x26, [sp, #64]
    stp x27, x28, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #16]
    ldp x21, x22, [sp, #32]
    ldp x23, x24, [sp, #48]
    ldp x25, x26, [sp, #64]
    ldp x27, x28, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    ldp x29, x30, [sp], #160
    ret
.size simt_switch, .-simt_switch
.type simt_fiber_begin, %function
simt_fiber_begin:
    mov x0, x19
    blr x20
    brk #0
.size simt_fiber_begin, .-simt_fiber_begin
)");
extern "C" void simt_fiber_begin(void);

static void *first_stack_pointer(char *top, void (*run)(void *), void *arg)
{
    void **sp = (void **)top - 20;
    memset(sp, 0, 160);
    sp[1] = (void *)simt_fiber_begin; /* x30 */
    sp[2] = arg;                      /* x19 */
    sp[3] = (void *)run;              /* x20 */
    return sp;
}
#define SIMT_OWN_SWITCH 1
#else
#include <stdint.h>
#include <ucontext.h>
#define SIMT_OWN_SWITCH 0

static void begin_context(unsigned run_hi, unsigned run_lo, unsigned arg_hi, unsigned arg_lo)
{
    ((void (*)(void *))(uintptr_t)((uint64_t)run_hi << 32 | run_lo))(
        (void *)(uintptr_t)((uint64_t)arg_hi << 32 | arg_lo));
}

static void *first_stack_pointer(char *top, void (*run)(void *), void *arg)
{
    ucontext_t *c = (ucontext_t *)calloc(1, sizeof *c);
    getcontext(c);
    c->uc_stack.ss_sp = top - STACK_BYTES;
    c->uc_stack.ss_size = STACK_BYTES;
    uint64_t r = (uint64_t)(uintptr_t)run, a = (uint64_t)(uintptr_t)arg;
    makecontext(c, (void (*)())begin_context, 4, (unsigned)(r >> 32), (unsigned)r,
                (unsigned)(a >> 32), (unsigned)a);
    return c;
}

static void simt_switch(void **save, void *load)
{
    if (!*save) *save = calloc(1, sizeof(ucontext_t));
    swapcontext((ucontext_t *)*save, (ucontext_t *)load);
}
#endif
#if SIMT_OWN_SWITCH
extern "C" void simt_switch(void **save, void *load);
#endif

/* The first function on a new stack. */
static void begin(void *arg)
{
    struct simt_fiber *fiber = (struct simt_fiber *)arg;
#if SIMT_ASAN
    __sanitizer_finish_switch_fiber(nullptr, &host.stack, &host.stack_bytes);
#endif
    fiber->run(fiber->arg);
    fputs("simt: a fiber's function returned\n", stderr);
    abort();
}

void simt_fiber_init(struct simt_fiber *fiber, void (*run)(void *), void *arg)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *map = (char *)mmap(nullptr, STACK_BYTES + page, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED || mprotect(map, page, PROT_NONE) != 0) {
        fputs("simt: no memory for the stack of a thread\n", stderr);
        abort();
    }
    memset(fiber, 0, sizeof *fiber);
    fiber->stack = map + page;
    fiber->stack_bytes = STACK_BYTES;
    fiber->run = run;
    fiber->arg = arg;
    fiber->stack_pointer = first_stack_pointer(fiber->stack + STACK_BYTES, begin, fiber);
#if SIMT_TSAN
    fiber->tsan = __tsan_create_fiber(0);
#endif
}

void simt_fiber_resume(struct simt_fiber *fiber)
{
#if SIMT_TSAN
    host.tsan = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(fiber->tsan, TSAN_FLAGS);
#endif
#if SIMT_ASAN
    __sanitizer_start_switch_fiber(&host.fake_stack, fiber->stack, fiber->stack_bytes);
#endif
    simt_switch(&host.stack_pointer, fiber->stack_pointer);
#if SIMT_ASAN
    __sanitizer_finish_switch_fiber(host.fake_stack, nullptr, nullptr);
#endif
}

void simt_fiber_suspend(struct simt_fiber *fiber)
{
#if SIMT_TSAN
    __tsan_switch_to_fiber(host.tsan, TSAN_FLAGS);
#endif
#if SIMT_ASAN
    __sanitizer_start_switch_fiber(&fiber->fake_stack, host.stack, host.stack_bytes);
#endif
    simt_switch(&fiber->stack_pointer, host.stack_pointer);
#if SIMT_ASAN
    __sanitizer_finish_switch_fiber(fiber->fake_stack, &host.stack, &host.stack_bytes);
#endif
}
