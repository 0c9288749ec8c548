/* simt_machine.h - the emulated GPU as a whole: its locks, its error, which thread executes, and
 * how every function of CUDA's interface begins and ends.
 *
 * Two locks. The execution lock is held by the thread that runs the operations of streams. The
 * state lock guards tables and queues; it is held briefly, never while an operation runs. A thread
 * that needs both takes the execution lock first. */
#ifndef BATON_TESTS_SIMT_SIMT_MACHINE_H
#define BATON_TESTS_SIMT_SIMT_MACHINE_H

#ifdef __cplusplus
#include <stdint.h>

#include <map>
#include <memory>
#include <mutex>

#include "tests/simt/include/simt.h"

std::mutex &simt_state_mutex(void);
#define SIMT_STATE std::lock_guard<std::mutex> state_lock(simt_state_mutex())

/* Called first in every function, with its name. An error must be returned at once. */
cudaError_t simt_enter(const char *name);
#define SIMT_ENTER()                                                                               \
    do {                                                                                           \
        cudaError_t e_ = simt_enter(__func__);                                                     \
        if (e_ != cudaSuccess) return e_;                                                          \
    } while (0)
/* Called last in every function: keeps e for cudaGetLastError, and returns it. */
cudaError_t simt_leave(cudaError_t e);

/* The error injected by simt_fail_next, if it is for this name and due now; else cudaSuccess. */
cudaError_t simt_due_failure(const char *name);
/* The sticky error, which has destroyed the context, or cudaSuccess. */
cudaError_t simt_sticky(void);
void simt_set_sticky(cudaError_t e);
bool simt_is_sticky(cudaError_t e);

/* What the calling thread runs: calls to CUDA are forbidden in kernels and host functions. */
enum simt_role { SIMT_NOTHING, SIMT_KERNEL, SIMT_HOST_FUNCTION };
simt_role simt_role_now(void);
void simt_set_role(simt_role role);

/* Holds the execution lock for a scope. Device memory that was opened is closed at its end. */
class simt_execution {
  public:
    simt_execution();
    explicit simt_execution(std::try_to_lock_t);
    ~simt_execution();
    simt_execution(const simt_execution &) = delete;
    simt_execution &operator=(const simt_execution &) = delete;
    bool is_held() const { return held; }

  private:
    bool held;
};

int64_t simt_now_ns(void);

/* Handles are numbers that are no address and are never reused. State lock. */
template <class Handle, class T> class simt_handles {
  public:
    Handle add(std::shared_ptr<T> object)
    {
        Handle h = (Handle)(next += 16);
        objects[h] = std::move(object);
        return h;
    }
    std::shared_ptr<T> find(Handle h) const
    {
        auto i = objects.find(h);
        return i == objects.end() ? nullptr : i->second;
    }
    bool remove(Handle h) { return objects.erase(h) != 0; }
    void clear() { objects.clear(); }
    const std::map<Handle, std::shared_ptr<T>> &all() const { return objects; }

  private:
    std::map<Handle, std::shared_ptr<T>> objects;
    uintptr_t next = 0x1000;
};
#endif
#endif
