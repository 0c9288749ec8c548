/* test_device.c - every row of the device table: zeroed memory, copies there and back, sharing, refusals. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/device.h"
#include "tests/harness/test.h"

static struct device *open_device(const char *name)
{
    struct device *d;
    struct err     err;
    enum status    st = device_open(name, &d, &err);
    if (st == ERR_NODEV || (st == ERR_UNSUPPORTED && strcmp(name, "cuda") == 0)) {
        static char why[ERR_TEXT_MAX + 64];
        snprintf(why, sizeof why, "the device %s was NOT tested: %s", name, err.text);
        SKIP(why);
    }
    CHECK_OK(st);
    CHECK_EQ_STR(d->ops->name, name);
    CHECK_OK(device_fault(d, &err));
    return d;
}

static void memory_cases(const char *name)
{
    static const size_t sizes[] = { 1, 4096, 4097, 5 << 20 };
    struct device      *d = open_device(name);
    for (unsigned flags = 0; flags <= DEVICE_MEM_SHARED; flags++)
        for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
            struct dev_mem m;
            struct err     err;
            const size_t   n = sizes[s];
            char          *host = calloc(1, n + 1);
            CHECK_OK(device_mem_alloc(d, n, flags, &m, &err));
            CHECK(m.bytes >= n && (uintptr_t)m.ptr % 64 == 0);
            CHECK((m.fd >= 0) == (flags == DEVICE_MEM_SHARED && d->is_host));
            CHECK((m.kind == DEV_MEM_HOST) == d->is_host);
            memset(host, 7, n + 1);
            device_download(d, host, m.ptr, n);
            for (size_t at = 0; at < n; at++) CHECK_EQ_INT(host[at], 0);
            memset(host, 1, n);
            device_upload(d, m.ptr, host, n);
            memset(host, 2, n);
            device_download(d, host, m.ptr, n);
            device_wait(d);
            for (size_t at = 0; at < n; at++) CHECK_EQ_INT(host[at], 1);
            CHECK_EQ_INT(host[n], 7);
            device_mem_free(d, &m);
            CHECK(m.ptr == NULL && m.fd == -1);
            device_mem_free(d, &m);
            free(host);
        }
    CHECK_OK(device_fault(d, NULL));
    device_close(d);
}

/* What an allocation takes and gives back is seen; the processor's pages come only when they are touched. */
static void available_cases(const char *name)
{
    struct device *d = open_device(name);
    struct dev_mem m;
    size_t         before = device_available(d);
    CHECK(before > 0);
    CHECK_OK(device_mem_alloc(d, 64 << 20, DEVICE_MEM_PRIVATE, &m, NULL));
    if (!d->is_host) CHECK(device_available(d) + (64 << 20) <= before);
    device_mem_free(d, &m);
    if (!d->is_host) CHECK_EQ_INT(device_available(d), before);
    device_close(d);
}

static void refusal_cases(const char *name)
{
    struct device *d = open_device(name);
    for (unsigned flags = 0; flags <= DEVICE_MEM_SHARED; flags++) {
        struct dev_mem m = { .fd = -1 };
        struct err     err = { 0 };
        CHECK_STATUS(device_mem_alloc(d, 0, flags, &m, &err), ERR_INVALID);
        CHECK_STATUS(device_mem_alloc(d, SIZE_MAX, flags, &m, &err), ERR_NOMEM);
        CHECK_STATUS(device_mem_alloc(d, (size_t)1 << 62, flags, &m, &err), ERR_NOMEM);
        CHECK(strstr(err.text, "--num-gpu-blocks-override") != NULL);
        CHECK(m.ptr == NULL && m.fd == -1);
    }
    CHECK_OK(device_fault(d, NULL)); /* too little memory is no fault */
    device_close(d);
}

#define DEVICE_TESTS(name)                                                                            \
    TEST(name##_memory_is_zeroed_and_holds_what_was_put_there) { memory_cases(#name); }               \
    TEST(name##_impossible_sizes_are_refused_with_a_sentence) { refusal_cases(#name); }               \
    TEST(name##_memory_that_is_available) { available_cases(#name); }
#define DEVICE_CASES(name)                                                                                               \
    CASE(name##_memory_is_zeroed_and_holds_what_was_put_there), CASE(name##_impossible_sizes_are_refused_with_a_sentence), \
        CASE(name##_memory_that_is_available)

DEVICE_TESTS(cpu)
DEVICE_TESTS(cuda)

/* A GPU's memory is shared by CUDA IPC: tests/conformance/test_transport_ways.c. */
TEST(another_process_writes_into_shared_memory)
{
    struct device *d = open_device("cpu");
    struct dev_mem m;
    struct err     err;
    CHECK_OK(device_mem_alloc(d, 100000, DEVICE_MEM_SHARED, &m, &err));
    pid_t child = fork();
    if (child == 0) {
        char *p = mmap(NULL, m.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, m.fd, 0);
        if (p == MAP_FAILED || ftruncate(m.fd, 0) == 0) _exit(1); /* the size is sealed */
        p[99999] = 42;
        _exit(0);
    }
    int code;
    CHECK(waitpid(child, &code, 0) == child && code == 0);
    CHECK_EQ_INT(((volatile char *)m.ptr)[99999], 42);
    device_mem_free(d, &m);
    device_close(d);
}

TEST(unknown_devices_are_named)
{
    struct device *d = NULL;
    struct err     err = { 0 };
    CHECK_STATUS(device_open("abacus", &d, &err), ERR_UNSUPPORTED);
    CHECK(strstr(err.text, "abacus") != NULL && d == NULL);
    device_close(NULL);
}

TEST_MAIN(DEVICE_CASES(cpu), DEVICE_CASES(cuda), CASE(another_process_writes_into_shared_memory), CASE(unknown_devices_are_named))
