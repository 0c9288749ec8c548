/* test.c - runs test cases, each in its own process group with a time limit.
 *
 * The parent makes a private directory per case before the fork and removes it afterwards, however the case ended; what
 * the case left running is killed. A case that passes leaves by exit(), so that leak checks of sanitizers count. */
#include "tests/harness/test.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { TIMEOUT_DEFAULT_S = 60, EXIT_SKIP = 77, PATH_LEN = 512 };

/* The harness is a program of its own per test file: its state is global. */
static char case_dir[PATH_LEN];
static int  n_case_dirs;

_Noreturn void test_fail(const char *file, int line, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    printf("    %s:%d: ", file, line);
    vprintf(fmt, ap);
    putchar('\n');
    va_end(ap);
    fflush(NULL);
    _exit(1);
}

_Noreturn void test_skip(const char *file, int line, const char *why)
{
    printf("    %s:%d: SKIPPED, NOT TESTED: %s\n", file, line, why);
    fflush(NULL);
    _exit(EXIT_SKIP);
}

const char *test_data(const char *name)
{
    static char path[PATH_MAX];
    const char *root = getenv("BATON_TEST_DATA");
    snprintf(path, sizeof path, "%s/%s", root && *root ? root : BATON_TEST_DATA, name);
    return path;
}

const char *test_tmpdir(void)
{
    static char path[PATH_LEN + 16];
    snprintf(path, sizeof path, "%s/%d", case_dir, n_case_dirs++);
    if (mkdir(path, 0700) != 0) test_fail(__FILE__, __LINE__, "cannot make %s: %s", path, strerror(errno));
    return path;
}

static bool make_case_dir(void)
{
    const char *tmp = getenv("TMPDIR");
    int n = snprintf(case_dir, sizeof case_dir, "%s/baton-test-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    return n > 0 && (size_t)n < sizeof case_dir && mkdtemp(case_dir);
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st;
    (void)type;
    (void)ftw;
    return remove(path);
}

static _Noreturn void run_child(const struct test_case *c, const sigset_t *mask, pid_t parent)
{
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    sigprocmask(SIG_SETMASK, mask, NULL);
    c->run();
    fflush(NULL);
    exit(0);
}

/* Wait for `pid` until the deadline; false when it had to be killed. SIGCHLD is blocked and taken here. */
static bool wait_child(pid_t pid, int timeout_s, int *status)
{
    struct timespec now, end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    end.tv_sec += timeout_s;
    sigset_t chld;
    sigemptyset(&chld);
    sigaddset(&chld, SIGCHLD);
    while (waitpid(pid, status, WNOHANG) != pid) {
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (now.tv_sec > end.tv_sec || (now.tv_sec == end.tv_sec && now.tv_nsec >= end.tv_nsec)) {
            kill(-pid, SIGKILL);
            kill(pid, SIGKILL);
            waitpid(pid, status, 0);
            return false;
        }
        /* Short naps: a signal that was merged with an earlier one costs at most one of them. */
        struct timespec nap = { 0, 100000000 };
        sigtimedwait(&chld, NULL, &nap);
    }
    return true;
}

/* Run one case; returns its exit status: 0 passed, EXIT_SKIP skipped, anything else failed. */
static int run_case(const struct test_case *c)
{
    if (!make_case_dir()) {
        printf("FAIL %s (cannot make a directory like %s)\n", c->name, case_dir);
        return 1;
    }
    sigset_t chld, before;
    sigemptyset(&chld);
    sigaddset(&chld, SIGCHLD);
    sigprocmask(SIG_BLOCK, &chld, &before);
    fflush(NULL);
    int status = 0, timeout_s = c->timeout_s > 0 ? c->timeout_s : TIMEOUT_DEFAULT_S, result = 1;
    pid_t parent = getpid(), pid = fork();
    if (pid == 0) run_child(c, &before, parent);
    if (pid < 0) {
        printf("FAIL %s (fork: %s)\n", c->name, strerror(errno));
        goto done;
    }
    setpgid(pid, pid); /* also done by the child: whoever comes first */
    bool in_time = wait_child(pid, timeout_s, &status);
    kill(-pid, SIGKILL);
    result = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
    if (!in_time) {
        result = 1;
        printf("FAIL %s (not done after %d s)\n", c->name, timeout_s);
    } else if (WIFSIGNALED(status)) {
        printf("FAIL %s (signal %d, %s)\n", c->name, WTERMSIG(status), strsignal(WTERMSIG(status)));
    } else if (result == 0) {
        printf("ok %s\n", c->name);
    } else if (result == EXIT_SKIP) {
        printf("SKIP %s\n", c->name);
    } else {
        printf("FAIL %s (exit status %d)\n", c->name, result);
    }
done:
    fflush(stdout);
    sigprocmask(SIG_SETMASK, &before, NULL);
    nftw(case_dir, remove_one, 16, FTW_DEPTH | FTW_PHYS | FTW_MOUNT);
    return result;
}

static bool is_wanted(const char *name, int argc, char **argv)
{
    bool any = argc <= 1;
    for (int i = 1; i < argc; i++) any = any || strcmp(argv[i], name) == 0;
    return any;
}

static bool names_known(const struct test_case *cases, size_t n, int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        bool found = false;
        for (size_t k = 0; k < n; k++) found = found || strcmp(cases[k].name, argv[i]) == 0;
        if (found) continue;
        fprintf(stderr, "no test case \"%s\"; --list shows them\n", argv[i]);
        return false;
    }
    return true;
}

int test_main(const struct test_case *cases, size_t n, int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "--list") == 0) {
        for (size_t i = 0; i < n; i++) printf("%s\n", cases[i].name);
        return 0;
    }
    if (!names_known(cases, n, argc, argv)) return 2;
    int n_passed = 0, n_failed = 0, n_skipped = 0;
    for (size_t i = 0; i < n; i++) {
        if (!is_wanted(cases[i].name, argc, argv)) continue;
        int result = run_case(&cases[i]);
        if (result == 0) n_passed++;
        else if (result == EXIT_SKIP) n_skipped++;
        else n_failed++;
    }
    printf("%d passed, %d failed, %d skipped\n", n_passed, n_failed, n_skipped);
    return n_failed != 0;
}
