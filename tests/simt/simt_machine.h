/* simt_machine.h - the fake card as a whole: its locks, its error, who executes, and how every
 * function of CUDA's interface begins and ends.
 *
 * Two locks. Execution: held by the one thread that runs what streams hold. State: tables and
 * queues, held for moments, never while something runs. Whoever takes both takes execution
 * first. */
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

/* First in every function: not 0 is an error to return at once. name is the function's. */
cudaError_t simt_enter(const char *name);
#define SIMT_ENTER()                                                                               \
    do {                                                                                           \
        cudaError_t e_ = simt_enter(__func__);                                                     \
        if (e_ != cudaSuccess) return e_;                                                          \
    } while (0)
/* Last: notes e for cudaGetLastError. */
cudaError_t simt_leave(cudaError_t e);

/* The order of simt_fail_next, if it is for this name and due now; else cudaSuccess. */
cudaError_t simt_due_failure(const char *name);
/* The error that has destroyed the context, or cudaSuccess. */
cudaError_t simt_sticky(void);
void simt_set_sticky(cudaError_t e);
bool simt_is_sticky(cudaError_t e);

/* What the calling thread is doing, of which calls to CUDA are forbidden. */
enum simt_role { SIMT_NOTHING, SIMT_KERNEL, SIMT_HOST_FUNCTION };
simt_role simt_role_now(void);
void simt_set_role(simt_role role);

/* The execution lock for a scope. Device memory, once opened, is closed at the end of it. */
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

/* Handles are numbers that no memory has and that do not come again. State lock. */
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
