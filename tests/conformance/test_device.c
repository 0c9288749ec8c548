/* test_device.c - every row of the device table: zeroed memory, sharing, refusals. */
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/device.h"
#include "tests/harness/test.h"

static const char *const DEVICES[] = { "cpu" };
enum { N_DEVICES = sizeof DEVICES / sizeof DEVICES[0] };

static struct device *open_device(int i)
{
    struct device *d;
    struct err     err;
    CHECK_OK(device_open(DEVICES[i], &d, &err));
    CHECK_EQ_STR(d->ops->name, DEVICES[i]);
    return d;
}

TEST(memory_is_zeroed_and_at_least_as_large_as_asked)
{
    static const size_t sizes[] = { 1, 4096, 4097, 5 << 20 };
    for (int i = 0; i < N_DEVICES; i++) {
        struct device *d = open_device(i);
        for (unsigned flags = 0; flags <= DEVICE_MEM_SHARED; flags++)
            for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
                struct dev_mem m;
                struct err     err;
                CHECK_OK(device_mem_alloc(d, sizes[s], flags, &m, &err));
                CHECK(m.bytes >= sizes[s] && (uintptr_t)m.ptr % 64 == 0);
                CHECK((m.fd >= 0) == (flags == DEVICE_MEM_SHARED));
                for (size_t at = 0; at < m.bytes; at += 512) CHECK_EQ_INT(((char *)m.ptr)[at], 0);
                memset(m.ptr, 1, m.bytes);
                device_mem_free(d, &m);
                CHECK(m.ptr == NULL && m.fd == -1);
                device_mem_free(d, &m);
            }
        device_close(d);
    }
}

TEST(another_process_writes_into_shared_memory)
{
    for (int i = 0; i < N_DEVICES; i++) {
        struct device *d = open_device(i);
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
}

TEST(impossible_sizes_are_refused_with_a_sentence)
{
    for (int i = 0; i < N_DEVICES; i++) {
        struct device *d = open_device(i);
        for (unsigned flags = 0; flags <= DEVICE_MEM_SHARED; flags++) {
            struct dev_mem m = { .fd = -1 };
            struct err     err = { 0 };
            CHECK_STATUS(device_mem_alloc(d, 0, flags, &m, &err), ERR_INVALID);
            CHECK_STATUS(device_mem_alloc(d, SIZE_MAX, flags, &m, &err), ERR_NOMEM);
            CHECK_STATUS(device_mem_alloc(d, (size_t)1 << 62, flags, &m, &err), ERR_NOMEM);
            CHECK(strstr(err.text, "--num-gpu-blocks-override") != NULL);
            CHECK(m.ptr == NULL && m.fd == -1);
        }
        device_close(d);
    }
}

TEST(unknown_devices_are_named)
{
    struct device *d = NULL;
    struct err     err = { 0 };
    CHECK_STATUS(device_open("abacus", &d, &err), ERR_UNSUPPORTED);
    CHECK(strstr(err.text, "abacus") != NULL && d == NULL);
    device_close(NULL);
}

TEST_MAIN(CASE(memory_is_zeroed_and_at_least_as_large_as_asked), CASE(another_process_writes_into_shared_memory),
          CASE(impossible_sizes_are_refused_with_a_sentence), CASE(unknown_devices_are_named))
