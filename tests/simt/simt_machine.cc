/* simt_machine.cc - sticky and transient errors, injected errors, the execution lock. Thread: any.
 */
#include "tests/simt/simt_machine.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <atomic>
#include <string>

#include "tests/simt/simt_block.h"
#include "tests/simt/simt_memory.h"

/* It is never destroyed, because threads may still use it when the process ends. */
struct machine {
    std::mutex state, execution;
    std::atomic<int> sticky{ cudaSuccess };
    std::mutex order; /* guards the four below */
    std::atomic<int> is_ordered{ 0 };
    cudaError_t order_error = cudaSuccess;
    std::string order_name;
    int order_after = 0;

    /* BATON_SIMT_FAIL="cudaMemcpyAsync 30 719" is simt_fail_next(719, "cudaMemcpyAsync", 30) for
     * programs that cannot call it. */
    machine()
    {
        const char *text = getenv("BATON_SIMT_FAIL");
        char name[64];
        int error;
        if (!text) return;
        if (sscanf(text, "%63s %d %d", name, &order_after, &error) != 3) {
            fprintf(stderr,
                    "simt: BATON_SIMT_FAIL is \"%s\", not a function, how many calls succeed and "
                    "an error\n",
                    text);
            abort();
        }
        order_name = name;
        order_error = (cudaError_t)error;
        is_ordered = 1;
    }
};

static machine &the(void)
{
    static machine *m = new machine;
    return *m;
}

static std::atomic<int> is_used{ 0 }, is_forked{ 0 };
static thread_local cudaError_t last_error;
static thread_local simt_role role;

std::mutex &simt_state_mutex(void) { return the().state; }
simt_role simt_role_now(void) { return role; }
void simt_set_role(simt_role r) { role = r; }
cudaError_t simt_sticky(void) { return (cudaError_t)the().sticky.load(); }
void simt_set_sticky(cudaError_t e) { the().sticky = e; }

bool simt_is_sticky(cudaError_t e)
{
    switch ((int)e) {
    case cudaErrorECCUncorrectable:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorUnknown: return true;
    default: return false;
    }
}

int64_t simt_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* A child of a process that has used CUDA cannot use it. */
static void after_fork(void) { is_forked = is_used.load(); }

void simt_fail_next(cudaError_t error, const char *function, int after)
{
    std::lock_guard<std::mutex> lock(the().order);
    the().order_error = error;
    the().order_name = function;
    the().order_after = after;
    the().is_ordered = after >= 0;
}

cudaError_t simt_due_failure(const char *name)
{
    if (!the().is_ordered) return cudaSuccess;
    std::lock_guard<std::mutex> lock(the().order);
    if (!the().is_ordered || the().order_name != name || the().order_after-- > 0)
        return cudaSuccess;
    the().is_ordered = 0;
    if (simt_is_sticky(the().order_error)) simt_set_sticky(the().order_error);
    return the().order_error;
}

cudaError_t simt_enter(const char *name)
{
    if (role == SIMT_KERNEL) simt_die("%s is called in a kernel", name);
    if (role == SIMT_HOST_FUNCTION) return simt_leave(cudaErrorNotPermitted);
    if (!is_used.exchange(1)) pthread_atfork(nullptr, nullptr, after_fork);
    if (is_forked) return simt_leave(cudaErrorInitializationError);
    cudaError_t e = simt_due_failure(name);
    if (e == cudaSuccess) e = simt_sticky();
    return simt_leave(e);
}

cudaError_t simt_leave(cudaError_t e)
{
    if (e != cudaSuccess) last_error = e;
    return e;
}

cudaError_t cudaPeekAtLastError(void)
{
    cudaError_t sticky = simt_sticky();
    return sticky != cudaSuccess ? sticky : last_error;
}

cudaError_t cudaGetLastError(void)
{
    cudaError_t e = cudaPeekAtLastError();
    last_error = cudaSuccess;
    return e;
}

const char *cudaGetErrorString(cudaError_t e)
{
    switch (e) {
#define X(name, value, text)                                                                       \
    case name: return text;
        SIMT_CUDA_ERRORS(X)
#undef X
    }
    return "unrecognized error code";
}

const char *cudaGetErrorName(cudaError_t e)
{
    switch (e) {
#define X(name, value, text)                                                                       \
    case name: return #name;
        SIMT_CUDA_ERRORS(X)
#undef X
    }
    return "unrecognized error code";
}

simt_execution::simt_execution() : held(true) { the().execution.lock(); }
simt_execution::simt_execution(std::try_to_lock_t) : held(the().execution.try_lock()) {}

simt_execution::~simt_execution()
{
    if (!held) return;
    simt_memory_close();
    the().execution.unlock();
}
