/* test.c - runs test cases, each in its own process group with a time limit.
 *
 * The parent makes a private directory per case before the fork, and removes it and kills what the
 * case left running however the case ends. A case that passes leaves by exit(), so that leak checks
 * of sanitizers count. With --jobs each case writes into a file, which is printed when it has
 * ended. */
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

enum { TIMEOUT_DEFAULT_S = 60, EXIT_SKIP = 77, PATH_LEN = 512, JOBS_MAX = 16 };

#ifdef __SANITIZE_THREAD__
/* A case may fork with threads running: they end with the case, and the child makes its own. */
const char *__tsan_default_options(void);
const char *__tsan_default_options(void) { return "die_after_fork=0"; }
#endif

/* Each test file is a program with a harness of its own, so its state is global. */
static char case_dir[PATH_LEN];
static int n_case_dirs;

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
    if (mkdir(path, 0700) != 0)
        test_fail(__FILE__, __LINE__, "cannot make %s: %s", path, strerror(errno));
    return path;
}

bool test_runs_long(void) { return !TEST_IS_SANITIZED || getenv("BATON_TEST_ALL") != NULL; }
bool test_runs_all(void) { return !TEST_IS_SANITIZED && getenv("BATON_TEST_ALL") != NULL; }

static bool make_case_dir(char dir[PATH_LEN])
{
    const char *tmp = getenv("TMPDIR");
    int n = snprintf(dir, PATH_LEN, "%s/baton-test-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    return n > 0 && n < PATH_LEN && mkdtemp(dir);
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st;
    (void)type;
    (void)ftw;
    return remove(path);
}

/* A running case. */
struct running {
    const struct test_case *c; /* NULL: a free entry */
    pid_t pid;
    double begin_s;
    char dir[PATH_LEN];
    FILE *output; /* NULL: the program's own output */
};

struct totals {
    int n_passed, n_failed, n_skipped;
};

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static _Noreturn void run_child(const struct running *r, const sigset_t *mask, pid_t parent)
{
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    if (r->output &&
        (dup2(fileno(r->output), STDOUT_FILENO) < 0 || dup2(fileno(r->output), STDERR_FILENO) < 0))
        _exit(1);
    memcpy(case_dir, r->dir, sizeof case_dir);
    sigprocmask(SIG_SETMASK, mask, NULL);
    r->c->run();
    fflush(NULL);
    exit(0);
}

/* Starts a case; false, after printing why, when it could not be started. */
static bool start_case(struct running *r, const struct test_case *c, bool alone,
                       const sigset_t *mask)
{
    pid_t parent = getpid();
    *r = (struct running){ .begin_s = now_s() };
    if (!make_case_dir(r->dir)) {
        printf("FAIL %s (cannot make a directory like %s)\n", c->name, r->dir);
        return false;
    }
    if (!alone && !(r->output = tmpfile())) {
        printf("FAIL %s (no file for its output: %s)\n", c->name, strerror(errno));
        rmdir(r->dir);
        return false;
    }
    r->c = c;
    fflush(NULL);
    r->pid = fork();
    if (r->pid == 0) run_child(r, mask, parent);
    if (r->pid < 0) test_fail(__FILE__, __LINE__, "%s: fork: %s", c->name, strerror(errno));
    setpgid(r->pid, r->pid); /* the child does so too: either may be first */
    return true;
}

static void print_output(FILE *f)
{
    char piece[4096];
    size_t n;
    rewind(f);
    while ((n = fread(piece, 1, sizeof piece, f)) > 0) fwrite(piece, 1, n, stdout);
    fclose(f);
}

/* Reports a case that has ended with `status`, or was killed at its time limit. */
static void end_case(struct running *r, int status, bool in_time, struct totals *t)
{
    const char *name = r->c->name;
    double took_s = now_s() - r->begin_s;
    bool passed = in_time && WIFEXITED(status) && WEXITSTATUS(status) == 0;
    bool skipped = in_time && WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SKIP;
    kill(-r->pid, SIGKILL);
    if (r->output) print_output(r->output);
    if (passed) printf("ok %s (%.1f s)\n", name, took_s);
    else if (skipped) printf("SKIP %s\n", name);
    else if (!in_time) printf("FAIL %s (not done after %.0f s)\n", name, took_s);
    else if (WIFSIGNALED(status))
        printf("FAIL %s (signal %d, %s)\n", name, WTERMSIG(status), strsignal(WTERMSIG(status)));
    else printf("FAIL %s (exit status %d)\n", name, WEXITSTATUS(status));
    fflush(stdout);
    nftw(r->dir, remove_one, 16, FTW_DEPTH | FTW_PHYS | FTW_MOUNT);
    t->n_passed += passed;
    t->n_skipped += skipped;
    t->n_failed += !passed && !skipped;
    r->c = NULL;
}

/* Ends the cases that have exited or exceeded their time; true when there was one. */
static bool reap(struct running *running, size_t n, struct totals *t)
{
    bool any = false;
    for (size_t i = 0; i < n; i++) {
        struct running *r = &running[i];
        int status = 0;
        if (!r->c) continue;
        bool in_time = now_s() - r->begin_s <
                       (r->c->timeout_s > 0 ? r->c->timeout_s : TIMEOUT_DEFAULT_S);
        if (waitpid(r->pid, &status, WNOHANG) != r->pid) {
            if (in_time) continue;
            kill(-r->pid, SIGKILL);
            kill(r->pid, SIGKILL);
            waitpid(r->pid, &status, 0);
        } else {
            in_time = true;
        }
        end_case(r, status, in_time, t);
        any = true;
    }
    return any;
}

static bool is_wanted(const char *name, int argc, char **argv)
{
    bool any = argc == 0;
    for (int i = 0; i < argc; i++) any = any || strcmp(argv[i], name) == 0;
    return any;
}

static bool names_known(const struct test_case *cases, size_t n, int argc, char **argv)
{
    for (int i = 0; i < argc; i++) {
        bool found = false;
        for (size_t k = 0; k < n; k++) found = found || strcmp(cases[k].name, argv[i]) == 0;
        if (found) continue;
        fprintf(stderr, "no test case \"%s\"; --list shows them\n", argv[i]);
        return false;
    }
    return true;
}

/* Runs the selected cases, at most n_jobs at a time. SIGCHLD is blocked and taken here. */
static struct totals run_cases(const struct test_case *cases, size_t n, size_t n_jobs, int argc,
                               char **argv)
{
    struct running running[JOBS_MAX] = { 0 };
    struct totals t = { 0 };
    size_t next = 0;
    sigset_t chld, before;
    sigemptyset(&chld);
    sigaddset(&chld, SIGCHLD);
    sigprocmask(SIG_BLOCK, &chld, &before);
    for (bool busy = true; busy;) {
        busy = false;
        for (size_t i = 0; i < n_jobs; i++) {
            for (; !running[i].c && next < n; next++)
                if (is_wanted(cases[next].name, argc, argv) &&
                    !start_case(&running[i], &cases[next], n_jobs == 1, &before))
                    t.n_failed++;
            busy = busy || running[i].c;
        }
        /* A short timeout: a SIGCHLD merged with an earlier one costs at most this delay. */
        const struct timespec nap = { 0, 100000000 };
        if (busy && !reap(running, n_jobs, &t)) sigtimedwait(&chld, NULL, &nap);
    }
    sigprocmask(SIG_SETMASK, &before, NULL);
    return t;
}

int test_main(const struct test_case *cases, size_t n, int argc, char **argv)
{
    size_t n_jobs = 1;
    if (argc == 2 && strcmp(argv[1], "--list") == 0) {
        for (size_t i = 0; i < n; i++) printf("%s\n", cases[i].name);
        return 0;
    }
    argc--, argv++;
    if (argc >= 2 && strcmp(argv[0], "--jobs") == 0) {
        n_jobs = strtoul(argv[1], NULL, 10);
        argc -= 2, argv += 2;
    }
    if (n_jobs < 1 || n_jobs > JOBS_MAX) {
        fprintf(stderr, "--jobs takes 1 to %d\n", JOBS_MAX);
        return 2;
    }
    if (!names_known(cases, n, argc, argv)) return 2;
    struct totals t = run_cases(cases, n, n_jobs, argc, argv);
    printf("%d passed, %d failed, %d skipped\n", t.n_passed, t.n_failed, t.n_skipped);
    return t.n_failed != 0;
}
