/* simt_case.h - the harness for C++, and what tests of tests/simt share: CUDA calls that must
 * succeed, cases that must die. Empty for C. */
#ifndef BATON_TESTS_UNIT_SIMT_SIMT_CASE_H
#define BATON_TESTS_UNIT_SIMT_SIMT_CASE_H

#ifdef __cplusplus
#include <cuda_runtime.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/simt/simt_sanitize.h"

#define _Noreturn [[noreturn]]
extern "C" {
#include "tests/harness/test.h"
}

#define GOOD(call) CHECK_STATUS(call, cudaSuccess)

template <class T> static inline T *on_device(size_t n)
{
    T *p = nullptr;
    GOOD(cudaMalloc(&p, n * sizeof(T)));
    return p;
}

template <class T> static inline T *on_device(const T *from, size_t n)
{
    T *p = on_device<T>(n);
    GOOD(cudaMemcpy(p, from, n * sizeof(T), cudaMemcpyHostToDevice));
    return p;
}

template <class T> static inline void to_host(T *to, const T *from, size_t n)
{
    GOOD(cudaMemcpy(to, from, n * sizeof(T), cudaMemcpyDeviceToHost));
}

/* f, in a child, must end the process otherwise than by leaving: a signal, or a sanitizer's report.
 * said: what it must have printed, or NULL. The caller has not used CUDA yet. */
static inline void must_end_badly(void (*f)(void), const char *said, void (*leave)(int))
{
    int ends[2];
    CHECK(pipe(ends) == 0);
    fflush(NULL);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        dup2(ends[1], 2);
        f();
        leave(0);
    }
    close(ends[1]);
    char text[8192] = "";
    size_t n = 0;
    for (ssize_t got; (got = read(ends[0], text + n, sizeof text - 1 - n)) > 0;) n += (size_t)got;
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        test_fail(__FILE__, __LINE__, "the child went on");
    if (said && !strstr(text, said))
        test_fail(__FILE__, __LINE__, "the child said not \"%s\" but \"%s\"", said, text);
}
static inline void must_die(void (*f)(void), const char *said) { must_end_badly(f, said, _exit); }

enum { FAULTS_ARE_TOLD = !SIMT_ASAN && !SIMT_TSAN, RACES_ARE_SEEN = SIMT_TSAN };
/* f has a data race: the thread sanitizer says so and makes the exit status its own. */
static inline void must_race(void (*f)(void)) { must_end_badly(f, "data race", exit); }
#endif
#endif
