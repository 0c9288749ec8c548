/* simt_memory.cc - device memory in memfds, inaccessible to host code unless an operation runs.
 *
 *     guard | front slack | bytes asked for | back slack (under 256 bytes) | guard
 *
 * The start is aligned to 256 as CUDA's is, so the end cannot always touch the guard: the slack
 * holds a pattern that is compared at cudaFree, and is poisoned for the address sanitizer. New
 * memory holds 0xff. Thread: any (simt_memory.h). */
#include "tests/simt/simt_memory.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "tests/simt/simt_block.h"
#include "tests/simt/simt_device.h"
#include "tests/simt/simt_launches.h"
#include "tests/simt/simt_machine.h"
#include "tests/simt/simt_overlap.h"
#include "tests/simt/simt_sanitize.h"
#include "tests/simt/simt_stream.h"
#include "tests/simt/simt_table.h"

enum { SLACK = 0xfd };

simt_tables &simt_tables_of(void)
{
    static simt_tables *t = new simt_tables;
    return *t;
}

size_t simt_page_bytes(void)
{
    static const size_t bytes = (size_t)sysconf(_SC_PAGESIZE);
    return bytes;
}
size_t simt_round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

/* Lookups, with the state lock held. */

simt_allocation *simt_find_device(const void *p)
{
    auto i = simt_tables_of().device.upper_bound((const char *)p);
    if (i == simt_tables_of().device.begin()) return nullptr;
    simt_allocation *a = &std::prev(i)->second;
    return (const char *)p < a->p + a->bytes ? a : nullptr;
}

size_t simt_pinned_from(const void *p)
{
    for (const auto *table : { &simt_tables_of().pinned, &simt_tables_of().registered }) {
        auto i = table->upper_bound((const char *)p);
        if (i == table->begin()) continue;
        i = std::prev(i);
        if ((const char *)p < i->first + i->second)
            return (size_t)(i->first + i->second - (const char *)p);
    }
    return 0;
}

simt_place simt_memory_place(const void *p, size_t bytes)
{
    SIMT_STATE;
    const simt_allocation *a = simt_find_device(p);
    if (a) return (size_t)(a->p + a->bytes - (const char *)p) >= bytes ? SIMT_DEVICE : SIMT_BEYOND;
    size_t n = simt_pinned_from(p);
    return !n ? SIMT_PAGEABLE : n >= bytes ? SIMT_PINNED : SIMT_BEYOND;
}

bool simt_memory_is_device(const void *p)
{
    SIMT_STATE;
    return simt_find_device(p) != nullptr;
}

bool simt_memory_is_visible(const void *p)
{
    SIMT_STATE;
    return simt_find_device(p) || simt_pinned_from(p);
}

size_t simt_device_bytes(void)
{
    SIMT_STATE;
    return simt_tables_of().used;
}

/* Opening and closing. */

void simt_protect(const simt_allocation &a, int how)
{
    if (mprotect(a.data, a.data_bytes, how) != 0)
        simt_die("mprotect of device memory: %s", strerror(errno));
}

void simt_memory_open(void)
{
    SIMT_STATE;
    if (simt_tables_of().is_open) return;
    for (auto &i : simt_tables_of().device) simt_protect(i.second, PROT_READ | PROT_WRITE);
    simt_tables_of().is_open = true;
}

void simt_memory_close(void)
{
    SIMT_STATE;
    if (!simt_tables_of().is_open) return;
    for (auto &i : simt_tables_of().device) simt_protect(i.second, PROT_NONE);
    simt_tables_of().is_open = false;
    simt_overlap_closed();
}

/* Mappings. */

char *simt_map(int fd, size_t data_bytes)
{
    char *all = (char *)mmap(nullptr, data_bytes + 2 * SIMT_GUARD, PROT_NONE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) return nullptr;
    if (mmap(all + SIMT_GUARD, data_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) ==
        MAP_FAILED) {
        munmap(all, data_bytes + 2 * SIMT_GUARD);
        return nullptr;
    }
    return all + SIMT_GUARD;
}

void simt_poison_slack(const simt_allocation &a)
{
    ASAN_POISON_MEMORY_REGION(a.data, (size_t)(a.p - a.data));
    ASAN_POISON_MEMORY_REGION(a.p + a.bytes, (size_t)(a.data + a.data_bytes - (a.p + a.bytes)));
}

static void unmap(const simt_allocation &a)
{
    ASAN_UNPOISON_MEMORY_REGION(a.data, a.data_bytes);
    munmap(a.data - SIMT_GUARD, a.data_bytes + 2 * SIMT_GUARD);
    close(a.fd);
}

/* Checks the slack from `from` to `to`. */
static void check_slack_part(const simt_allocation &a, const char *from, const char *to)
{
    for (const char *q = from; q < to; q++)
        if ((unsigned char)*q != SLACK)
            simt_die("device memory of %zu bytes at %p was written at byte %td", a.bytes,
                     (void *)a.p, q - a.p);
}

static void check_slack(const simt_allocation &a)
{
    ASAN_UNPOISON_MEMORY_REGION(a.data, a.data_bytes);
    simt_protect(a, PROT_READ | PROT_WRITE);
    check_slack_part(a, a.data, a.p);
    check_slack_part(a, a.p + a.bytes, a.data + a.data_bytes);
}

/* Raises the limit of open files, which is low by default. */
static int make_memfd(uint64_t nonce)
{
    char name[40];
    snprintf(name, sizeof name, "baton-simt-%016llx", (unsigned long long)nonce);
    int fd = memfd_create(name, MFD_CLOEXEC);
    struct rlimit limit;
    if (fd < 0 && errno == EMFILE && getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        limit.rlim_cur = limit.rlim_max;
        if (setrlimit(RLIMIT_NOFILE, &limit) == 0) fd = memfd_create(name, MFD_CLOEXEC);
    }
    return fd;
}

static uint64_t make_nonce(void)
{
    uint64_t nonce = 0;
    if (getentropy(&nonce, sizeof nonce) != 0)
        nonce = (uint64_t)simt_now_ns() * 0x9e3779b97f4a7c15u;
    return nonce;
}

/* By writes to the file, so that pages that nobody uses are not mapped: every mprotect goes through
 * those that are. */
static void fill_fresh(const simt_allocation &a)
{
    /* never freed: threads may still allocate while the process ends */
    static const std::vector<char> &fresh = *new std::vector<char>(1 << 16, (char)SIMT_FRESH);
    const size_t begin = (size_t)(a.p - a.data);
    size_t done = 0;
    while (done < a.bytes && a.bytes >= fresh.size()) {
        const ssize_t n = pwrite(a.fd, fresh.data(), std::min(fresh.size(), a.bytes - done),
                                 (off_t)(begin + done));
        if (n <= 0) break;
        done += (size_t)n;
    }
    memset(a.p + done, SIMT_FRESH, a.bytes - done);
}

/* Whole pages of zeros are given back to the file for the same reason; pinned memory has none. */
void simt_memory_set(void *p, int value, size_t bytes)
{
    enum { LEAST = 1 << 16 };
    const size_t page = simt_page_bytes(), front = (page - (uintptr_t)p % page) % page;
    char *const from = (char *)p;
    if (bytes < LEAST || (unsigned char)value != 0 ||
        madvise(from + front, (bytes - front) / page * page, MADV_REMOVE) != 0) {
        memset(p, value, bytes);
        return;
    }
    const size_t back = (bytes - front) % page;
    memset(from, 0, front);
    memset(from + bytes - back, 0, back);
}

static bool make_allocation(simt_allocation *a, size_t bytes)
{
    size_t payload = simt_round_up(bytes, SIMT_ALIGNMENT);
    *a = simt_allocation();
    a->bytes = bytes;
    a->data_bytes = simt_round_up(payload, simt_page_bytes());
    a->nonce = make_nonce();
    a->fd = make_memfd(a->nonce);
    if (a->fd < 0) return false;
    if (ftruncate(a->fd, (off_t)a->data_bytes) != 0 ||
        !(a->data = simt_map(a->fd, a->data_bytes))) {
        close(a->fd);
        return false;
    }
    a->p = a->data + a->data_bytes - payload;
    memset(a->data, SLACK, (size_t)(a->p - a->data));
    if (!simt_notes_launches()) fill_fresh(*a);
    memset(a->p + bytes, SLACK, payload - bytes);
    simt_poison_slack(*a);
    return true;
}

/* CUDA's functions. */

cudaError_t cudaMalloc(void **p, size_t bytes)
{
    SIMT_ENTER();
    cudaError_t e = simt_unsafe_in_capture();
    if (e != cudaSuccess) return simt_leave(e);
    if (!p) return simt_leave(cudaErrorInvalidValue);
    *p = nullptr;
    if (!bytes) return cudaSuccess;
    {
        SIMT_STATE;
        size_t total = simt_memory_total();
        if (bytes > total || simt_round_up(bytes, SIMT_ALIGNMENT) > total - simt_tables_of().used)
            return simt_leave(cudaErrorMemoryAllocation);
        simt_tables_of().used += simt_round_up(bytes, SIMT_ALIGNMENT);
    }
    static std::once_flag once;
    std::call_once(once, simt_catch_faults);
    simt_allocation a;
    bool made = make_allocation(&a, bytes); /* without the lock, because it fills the memory */
    SIMT_STATE;
    if (!made) {
        simt_tables_of().used -= simt_round_up(bytes, SIMT_ALIGNMENT);
        return simt_leave(cudaErrorMemoryAllocation);
    }
    if (!simt_tables_of().is_open) simt_protect(a, PROT_NONE);
    simt_tables_of().device[a.p] = a;
    *p = a.p;
    return cudaSuccess;
}

/* Removes p from the table. False: no memory of that kind begins at p. */
static bool take(const void *p, bool is_imported, simt_allocation *a)
{
    SIMT_STATE;
    auto i = simt_tables_of().device.find((const char *)p);
    if (i == simt_tables_of().device.end() || i->second.is_imported != is_imported) return false;
    if (--i->second.n_opened > 0) {
        a->data = nullptr; /* still open elsewhere in this process */
        return true;
    }
    *a = i->second;
    simt_tables_of().device.erase(i);
    if (!is_imported) simt_tables_of().used -= simt_round_up(a->bytes, SIMT_ALIGNMENT);
    return true;
}

cudaError_t simt_free_device(void *p, bool is_imported)
{
    simt_execution execution;
    simt_drain_all(execution);
    simt_overlap_forget();
    simt_allocation a;
    if (!take(p, is_imported, &a)) return cudaErrorInvalidValue;
    if (a.data) {
        if (!is_imported) check_slack(a);
        unmap(a);
    }
    return simt_sticky();
}

cudaError_t cudaFree(void *p)
{
    SIMT_ENTER();
    cudaError_t e = simt_unsafe_in_capture();
    if (e == cudaSuccess && p) e = simt_free_device(p, false);
    return simt_leave(e);
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    SIMT_ENTER();
    SIMT_STATE;
    *total = simt_memory_total();
    *free_bytes = *total - simt_tables_of().used;
    return cudaSuccess;
}

void simt_memory_reset(void)
{
    simt_overlap_forget();
    simt_memory_close();
    SIMT_STATE;
    for (auto &i : simt_tables_of().device) unmap(i.second);
    for (auto &i : simt_tables_of().pinned) free(const_cast<char *>(i.first));
    simt_tables_of().device.clear();
    simt_tables_of().pinned.clear();
    simt_tables_of().registered.clear();
    simt_tables_of().used = 0;
}
