/* service_start.c - see service_start.h. */
#include "deploy/service/service_start.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "deploy/service/ready_pipe.h"
#include "shared/base/clock.h"
#include "shared/base/mem.h"

enum { SAY_MS = 30000, TAIL_BYTES = 4096, ARGS_MAX = 1024 };

static const char WHO[] = "start_server";

/* A start that is waited for. */
struct start {
    const struct service_start *o;
    char console[PATH_MAX];
    int console_fd, read_fd, write_fd, signal_fd; /* -1: not open */
    sigset_t mask;                                /* as it was */
    pid_t pid;
};

static int fail(const char *what)
{
    fprintf(stderr, "%s: %s: %s\n", WHO, what, strerror(errno));
    return 1;
}

/* ---- the service's process ---- */

/* Open MPI binds what it starts to a core; what mpirun itself may use is meant. */
static void take_cpus(void)
{
    cpu_set_t all;
    if (getenv("OMPI_COMM_WORLD_RANK") && sched_getaffinity(getppid(), sizeof all, &all) == 0)
        (void)sched_setaffinity(0, sizeof all, &all);
}

static void inherit(int fd, const char *variable)
{
    char number[16];
    fcntl(fd, F_SETFD, 0);
    if (!variable) return;
    snprintf(number, sizeof number, "%d", fd);
    setenv(variable, number, 1);
}

static void become_service(const struct start *s)
{
    char file[PATH_MAX], *args[ARGS_MAX] = { "baton", "serve" };
    const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    const ssize_t n = readlink("/proc/self/exe", file, sizeof file - 1);
    if (n <= 0 || setsid() < 0) _exit(127);
    file[n] = 0;
    dup2(null, STDIN_FILENO);
    dup2(s->console_fd, STDOUT_FILENO);
    dup2(s->console_fd, STDERR_FILENO);
    inherit(s->o->file->fd, NULL);
    inherit(s->write_fd, READY_PIPE_VARIABLE);
    for (int i = 0; i < s->o->n_words; i++) args[i + 2] = s->o->words[i];
    signal(SIGINT, SIG_DFL); /* a shell's background jobs ignore it */
    sigprocmask(SIG_SETMASK, &s->mask, NULL);
    execv(file, args);
    _exit(127);
}

/* ---- waiting ---- */

static void print_tail(const struct start *s)
{
    char text[TAIL_BYTES];
    struct stat st;
    const int fd = open(s->console, O_RDONLY | O_CLOEXEC);
    if (fd >= 0 && fstat(fd, &st) == 0) {
        const off_t from = st.st_size > TAIL_BYTES ? st.st_size - TAIL_BYTES : 0;
        const ssize_t n = pread(fd, text, sizeof text, from);
        if (n > 0) fprintf(stderr, "%.*s", (int)n, text);
    }
    if (fd >= 0) close(fd);
}

static int ended(struct start *s)
{
    int status = 0;
    (void)waitpid(s->pid, &status, 0);
    print_tail(s);
    fprintf(stderr, "%s: the service did not start (%s %d); its output is in %s\n", WHO,
            WIFSIGNALED(status) ? "signal" : "status",
            WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status), s->console);
    return 1;
}

static int interrupted(struct start *s)
{
    kill(s->pid, SIGTERM);
    (void)waitpid(s->pid, NULL, 0);
    fprintf(stderr, "%s: stopped before the service was ready\n", WHO);
    return 130;
}

/* -1: it goes on starting. */
static int take_stage(struct start *s)
{
    char stage;
    const ssize_t n = read(s->read_fd, &stage, 1);
    if (n < 0) return errno == EINTR ? -1 : ended(s);
    if (n == 0) return ended(s);
    return stage == READY_SERVES || !s->o->until_ready ? 0 : -1;
}

static int wait_for_service(struct start *s)
{
    struct pollfd p[2] = { { s->read_fd, POLLIN, 0 }, { s->signal_fd, POLLIN, 0 } };
    const uint64_t t0_ms = clock_ms();
    for (;;) {
        const int n = poll(p, COUNT_OF(p), SAY_MS);
        if (n < 0 && errno != EINTR) return fail("poll");
        if (n == 0)
            fprintf(stderr, "%s: the service is being started, %llu s; %s/ says how far it is\n",
                    WHO, (unsigned long long)(clock_ms() - t0_ms) / 1000, s->o->log_dir);
        if (n > 0 && p[1].revents) return interrupted(s);
        const int status = n > 0 && p[0].revents ? take_stage(s) : -1;
        if (status >= 0) return status;
    }
}

/* ---- the whole ---- */

static bool make_folders(const char *path)
{
    char part[PATH_MAX];
    for (size_t n = 1; path[n - 1]; n++) {
        if (path[n] && path[n] != '/') continue;
        snprintf(part, sizeof part, "%.*s", (int)n, path);
        if (mkdir(part, 0777) != 0 && errno != EEXIST) return false;
    }
    return true;
}

static int open_all(struct start *s)
{
    int ends[2];
    sigset_t ending;
    if (!make_folders(s->o->log_dir)) return fail(s->o->log_dir);
    snprintf(s->console, sizeof s->console, "%s/console.log", s->o->log_dir);
    s->console_fd = open(s->console, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0666);
    if (s->console_fd < 0) return fail(s->console);
    if (pipe2(ends, O_CLOEXEC) != 0) return fail("pipe");
    s->read_fd = ends[0];
    s->write_fd = ends[1];
    sigemptyset(&ending);
    sigaddset(&ending, SIGINT);
    sigaddset(&ending, SIGTERM);
    sigprocmask(SIG_BLOCK, &ending, &s->mask);
    s->signal_fd = signalfd(-1, &ending, SFD_CLOEXEC);
    return s->signal_fd < 0 ? fail("signalfd") : 0;
}

static void close_all(struct start *s)
{
    const int fds[] = { s->console_fd, s->read_fd, s->write_fd, s->signal_fd };
    for (size_t i = 0; i < COUNT_OF(fds); i++)
        if (fds[i] >= 0) close(fds[i]);
}

static void write_info(const struct start *s)
{
    struct run_info info = { .pid = s->pid, .start = run_process_start(s->pid) };
    struct err err = { 0 };
    if (!realpath(s->o->log_dir, info.log)) info.log[0] = 0;
    if (run_file_write(s->o->file, &info, &err) != OK)
        fprintf(stderr, "%s: %s; stop_server will not find the service\n", WHO, err.text);
}

int service_start(const struct service_start *o)
{
    struct start s = { .o = o, .console_fd = -1, .read_fd = -1, .write_fd = -1, .signal_fd = -1 };
    if (o->n_words > ARGS_MAX - 3) {
        fprintf(stderr, "%s: more than %d words\n", WHO, ARGS_MAX - 3);
        return 2;
    }
    int status = open_all(&s);
    if (status == 0) {
        take_cpus();
        s.pid = fork();
        if (s.pid == 0) become_service(&s);
        status = s.pid < 0 ? fail("fork") : -1;
    }
    if (status < 0) {
        close(s.write_fd);
        s.write_fd = -1;
        write_info(&s);
        status = wait_for_service(&s);
    }
    if (status == 0)
        fprintf(stderr, "%s: the service %s (process %d); its log is in %s, stop_server ends it\n",
                WHO, o->until_ready ? "is ready" : "was started, and waits for the other hosts",
                (int)s.pid, o->log_dir);
    close_all(&s);
    return status;
}
