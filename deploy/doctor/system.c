/* system.c - checks what the operating system must provide: open files, memfd, local sockets, the
 * clock. Thread: main. */
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "deploy/doctor/doctor.h"
#include "shared/net/open_files.h"

enum { FILES_MIN = 64, PROBE_BYTES = 1 << 16 };

/* A node raises the soft limit itself. */
static void check_files(struct doctor *d)
{
    const uint64_t allowed = open_files_limit(),
                   wanted = open_files_wanted((uint64_t)config_int(d->c, "max-connections"));
    if (allowed >= wanted) {
        doctor_add(d, "open files", DOCTOR_OK, "%llu allowed, %llu wanted",
                   (unsigned long long)allowed, (unsigned long long)wanted);
        return;
    }
    struct doctor_line *line = doctor_add(d, "open files",
                                          allowed < FILES_MIN ? DOCTOR_FAIL : DOCTOR_WARN,
                                          "%llu allowed, %llu wanted for --max-connections",
                                          (unsigned long long)allowed, (unsigned long long)wanted);
    doctor_fix(line, "ulimit -Hn %llu, or lower --max-connections", (unsigned long long)wanted);
}

/* The steps with which ipc shares the KV cache: a memfd, sealed against shrinking, mapped. */
static void check_memfd(struct doctor *d)
{
    const char *step = "memfd_create";
    void *p = MAP_FAILED;
    int fd = memfd_create("baton-doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    bool ok = fd >= 0;
    if (ok) ok = (step = "ftruncate", ftruncate(fd, PROBE_BYTES) == 0);
    if (ok) ok = (step = "F_ADD_SEALS", fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    if (ok)
        ok = (step = "mmap", (p = mmap(NULL, PROBE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
                                       0)) != MAP_FAILED);
    int error = errno;
    if (ok) doctor_add(d, "shared memory", DOCTOR_OK, "memfd works; it needs no room in /dev/shm");
    else
        doctor_fix(doctor_add(d, "shared memory", DOCTOR_FAIL,
                              "%s: %s; ipc cannot share the KV cache", step, strerror(error)),
                   "use --cache-transfer-protocol tcp");
    if (p != MAP_FAILED) munmap(p, PROBE_BYTES);
    if (fd >= 0) close(fd);
}

/* ipc peers meet at a local socket in the abstract name space and hold a pidfd of each other. */
static void check_local_sockets(struct doctor *d)
{
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    int n = snprintf(a.sun_path + 1, sizeof a.sun_path - 1, "baton-doctor-%ld", (long)getpid());
    socklen_t len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
    const char *step = "socket";
    int pidfd = -1, fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    bool ok = fd >= 0;
    if (ok) ok = (step = "bind", bind(fd, (struct sockaddr *)&a, len) == 0);
    if (ok) ok = (step = "listen", listen(fd, 1) == 0);
    if (ok) ok = (step = "pidfd_open", (pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0)) >= 0);
    int error = errno;
    if (ok) doctor_add(d, "local sockets", DOCTOR_OK, "bound and listening; pidfd works");
    else
        doctor_fix(doctor_add(d, "local sockets", DOCTOR_FAIL, "%s: %s; ipc cannot reach its peers",
                              step, strerror(error)),
                   "use --cache-transfer-protocol tcp, or a kernel from 5.3 on without a filter "
                   "for this call");
    if (pidfd >= 0) close(pidfd);
    if (fd >= 0) close(fd);
}

static void check_clock(struct doctor *d)
{
    enum { READS = 10000, SLOW_NS = 1000, YEAR_2024 = 1704067200 };
    struct timespec a, b;
    char source[64] = "unknown";
    FILE *f = fopen("/sys/devices/system/clocksource/clocksource0/current_clocksource", "r");
    if (f && fgets(source, sizeof source, f)) source[strcspn(source, "\n")] = 0;
    if (f) fclose(f);
    clock_gettime(CLOCK_MONOTONIC, &a);
    for (int i = 0; i < READS; i++) clock_gettime(CLOCK_MONOTONIC, &b);
    double ns = ((double)(b.tv_sec - a.tv_sec) * 1e9 + (double)(b.tv_nsec - a.tv_nsec)) / READS;
    struct doctor_line *line = doctor_add(d, "clock", ns > SLOW_NS ? DOCTOR_WARN : DOCTOR_OK,
                                          "source %s, %.0f ns per reading", source, ns);
    if (ns > SLOW_NS)
        doctor_fix(line,
                   "the clock is read for every token; choose tsc or kvm-clock as clock source");
    if (time(NULL) < YEAR_2024)
        doctor_fix(doctor_add(d, "date", DOCTOR_WARN, "the date of this host is before 2024"),
                   "set it; only logs and the \"created\" fields of answers use it");
}

void doctor_check_system(struct doctor *d)
{
    check_files(d);
    check_memfd(d);
    check_local_sockets(d);
    check_clock(d);
}
