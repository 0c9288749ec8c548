/* perf_tools.c - runs the programs that the field trusts, to measure the limit: iperf3, perftest,
 * ucx_perftest. See hardware_limits.h.
 *
 * Both sides run the same program on the device that the transport would use: iperf3 with the same
 * number of connections; ib_write_bw and ib_write_lat on the device of KVCACHE_RDMA_NICS (or the
 * first one) with a RoCE v2 GID; ucx_perftest with the UCX transports that the ucx transport may
 * use. Only their printed results are read, in the formats of iperf3 3.12 (-J), perftest 6 and
 * ucx_perftest 1.13. */
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "deploy/probe/hardware_limits.h"
#include "deploy/probe/perf_tool_env.h"
#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/json/json.h"
#include "shared/base/mem.h"

enum {
    OUTPUT_MAX = 1 << 20,
    IPERF3_BYTES_MIN = 64 << 20,     /* with fewer bytes it may print no rate */
    IPERF3_BYTES_STEADY = 256 << 20, /* with fewer, between fast hosts, the rate of its start */
    ARGS_MAX = 32,
    ARG_MAX_CHARS = 64,
    PATH_CHARS = 512,
    START_MS = 3000,
    MIB = 1 << 20
};

struct tool_command {
    char text[ARGS_MAX][ARG_MAX_CHARS];
    char *argv[ARGS_MAX + 1];
    int n;
    char path[PATH_CHARS];
};

static void add_arg(struct tool_command *c, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
static void add_arg(struct tool_command *c, const char *fmt, ...)
{
    va_list ap;
    ASSERT(c->n < ARGS_MAX);
    va_start(ap, fmt);
    vsnprintf(c->text[c->n], ARG_MAX_CHARS, fmt, ap);
    va_end(ap);
    c->argv[c->n] = c->text[c->n];
    c->argv[++c->n] = NULL;
}

const char *probe_tool_name(enum probe_tool tool)
{
    static const char *const names[PROBE_TOOL_END] = {
        [PROBE_IPERF3] = "iperf3",
        [PROBE_IB_WRITE_BW] = "ib_write_bw",
        [PROBE_IB_WRITE_LAT] = "ib_write_lat",
        [PROBE_UCX_PUT_BW] = "ucx_perftest",
        [PROBE_UCX_PUT_LAT] = "ucx_perftest",
    };
    return tool > 0 && tool < PROBE_TOOL_END ? names[tool] : "unknown";
}

static bool find_program(const char *program, char path[PATH_CHARS])
{
    struct str rest = str_of(getenv("PATH")), dir;
    while (str_split(&rest, ':', &dir)) {
        int n = snprintf(path, PATH_CHARS, "%.*s/%s", STR_ARG(dir), program);
        if (n < PATH_CHARS && access(path, X_OK) == 0) return true;
    }
    return false;
}

/* ---- which device ---- */

struct ib_device {
    char name[48];
    int port, gid; /* gid -1: not RoCE, the tool gets none */
};

static bool read_line(char *out, size_t cap, const char *fmt, const char *device, int port,
                      int index)
{
    char path[256];
    snprintf(path, sizeof path, fmt, device, port, index);
    FILE *f = fopen(path, "re");
    bool ok = f && fgets(out, (int)cap, f);
    if (f) fclose(f);
    return ok;
}

/* The first RoCE v2 entry that maps an IPv4 address, else the first RoCE v2 entry. */
static int find_gid(const char *device, int port)
{
    char line[64];
    int found = -1;
    for (int i = 0; i < 256; i++) {
        bool v2 = read_line(line, sizeof line,
                            "/sys/class/infiniband/%s/ports/%d/gid_attrs/types/%d", device, port,
                            i) &&
                  strncmp(line, "RoCE v2", 7) == 0;
        if (!v2) continue;
        if (found < 0) found = i;
        if (!read_line(line, sizeof line, "/sys/class/infiniband/%s/ports/%d/gids/%d", device, port,
                       i))
            continue;
        if (strncmp(line, "0000:0000:0000:0000:0000:ffff:", 30) == 0) return i;
    }
    return found;
}

static enum status find_device(const struct kvt_tuning *tuning, struct ib_device *d,
                               struct err *err)
{
    struct str rest = str_of(tuning->rdma.nics), first, name;
    *d = (struct ib_device){ .port = 1, .gid = -1 };
    if (str_split(&rest, ',', &first)) {
        int64_t port = 1;
        name = first;
        str_split(&first, ':', &name);
        if (first.p && str_to_i64(first, &port) != OK) port = 1;
        snprintf(d->name, sizeof d->name, "%.*s", STR_ARG(name));
        d->port = (int)port;
    } else {
        DIR *dir = opendir("/sys/class/infiniband");
        struct dirent *entry;
        while (dir && (entry = readdir(dir)))
            if (entry->d_name[0] != '.' && (!d->name[0] || strcmp(entry->d_name, d->name) < 0))
                snprintf(d->name, sizeof d->name, "%.47s", entry->d_name);
        if (dir) closedir(dir);
    }
    if (!d->name[0]) return err_set(err, ERR_NODEV, "this host has no RDMA device");
    d->gid = tuning->rdma.gid_given ? tuning->rdma.gid_index : find_gid(d->name, d->port);
    return OK;
}

/* ---- arguments ---- */

static uint64_t iterations(const struct probe_request *r, uint64_t most)
{
    uint64_t n = r->n_bytes / r->piece_bytes;
    return n < 100 ? 100 : n > most ? most : n;
}

/* `server`: NULL when this is the serving side. */
static void add_iperf3(struct tool_command *c, const struct probe_request *r, const char *host,
                       const char *server, uint16_t port)
{
    add_arg(c, "-p");
    add_arg(c, "%u", port);
    if (!server) {
        add_arg(c, "-s");
        add_arg(c, "-1");
        add_arg(c, "-B");
        add_arg(c, "%s", host);
        return;
    }
    add_arg(c, "-c");
    add_arg(c, "%s", server);
    add_arg(c, "-P");
    add_arg(c, "%u", r->connections ? r->connections : 1);
    add_arg(c, "-n");
    uint64_t least = r->n_bytes < IPERF3_BYTES_MIN ? IPERF3_BYTES_MIN : IPERF3_BYTES_STEADY;
    add_arg(c, "%" PRIu64, r->n_bytes > least ? r->n_bytes : least);
    add_arg(c, "-J");
}

static enum status add_perftest(struct tool_command *c, const struct probe_request *r,
                                const char *server, uint16_t port, const struct kvt_tuning *tuning,
                                struct err *err)
{
    struct ib_device d;
    TRY(find_device(tuning, &d, err));
    add_arg(c, "-d");
    add_arg(c, "%s", d.name);
    add_arg(c, "-i");
    add_arg(c, "%d", d.port);
    if (d.gid >= 0) {
        add_arg(c, "-x");
        add_arg(c, "%d", d.gid);
    }
    add_arg(c, "-s");
    add_arg(c, "%u", r->piece_bytes);
    add_arg(c, "-n");
    add_arg(c, "%" PRIu64, iterations(r, r->tool == PROBE_IB_WRITE_LAT ? 1000 : 1000000));
    add_arg(c, "-p");
    add_arg(c, "%u", port);
    add_arg(c, "-F");
    if (r->tool == PROBE_IB_WRITE_BW) add_arg(c, "--report_gbits");
    if (r->tool == PROBE_IB_WRITE_BW && tuning->rdma.qps_per_rail) {
        add_arg(c, "-q");
        add_arg(c, "%u", tuning->rdma.qps_per_rail);
    }
    if (server) add_arg(c, "%s", server);
    return OK;
}

static void add_ucx(struct tool_command *c, const struct probe_request *r, const char *server,
                    uint16_t port)
{
    bool latency = r->tool == PROBE_UCX_PUT_LAT;
    if (server) add_arg(c, "%s", server);
    add_arg(c, "-p");
    add_arg(c, "%u", port);
    if (!server) return;
    add_arg(c, "-t");
    add_arg(c, latency ? "ucp_put_lat" : "ucp_put_bw");
    add_arg(c, "-s");
    add_arg(c, "%u", r->piece_bytes);
    add_arg(c, "-n");
    add_arg(c, "%" PRIu64, iterations(r, latency ? 1000 : 1000000));
    add_arg(c, "-w");
    add_arg(c, "20");
}

static enum status make_command(struct tool_command *c, const struct probe_request *r,
                                const char *host, const char *server, uint16_t port,
                                const struct kvt_tuning *tuning, struct err *err)
{
    const char *name = probe_tool_name(r->tool);
    *c = (struct tool_command){ 0 };
    if (!find_program(name, c->path))
        return err_set(err, ERR_UNSUPPORTED, "%s is not installed", name);
    add_arg(c, "%s", name);
    switch (r->tool) {
    case PROBE_IPERF3: add_iperf3(c, r, host, server, port); return OK;
    case PROBE_IB_WRITE_BW:
    case PROBE_IB_WRITE_LAT: return add_perftest(c, r, server, port, tuning, err);
    case PROBE_UCX_PUT_BW:
    case PROBE_UCX_PUT_LAT: add_ucx(c, r, server, port); return OK;
    case PROBE_TOOL_END: break;
    }
    return err_set(err, ERR_INVALID, "there is no such tool");
}

/* ---- processes ---- */

/* Runs in the child between fork and exec: system calls only. */
static _Noreturn void exec_tool(const char *path, char *const *argv, char **env, int output,
                                pid_t parent)
{
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL); /* workers run with all signals blocked */
    prctl(PR_SET_PDEATHSIG, SIGKILL);      /* a server without a client ends with us */
    int null = open("/dev/null", O_RDONLY);
    if (getppid() == parent && null >= 0 && dup2(null, 0) >= 0 && dup2(output, 1) >= 0 &&
        dup2(output, 2) >= 0)
        execve(path, argv, env);
    _exit(127);
}

/* Starts the program with stdout and stderr in a pipe; *fd is its read end. */
static enum status start(const struct tool_command *c, const struct kvt_tuning *tuning, pid_t *pid,
                         int *fd, struct err *err)
{
    int pipe_fds[2];
    struct perf_tool_env settings;
    if (pipe2(pipe_fds, O_CLOEXEC) != 0)
        return err_set(err, ERR_IO, "no pipe for %s: %s", c->argv[0], strerror(errno));
    perf_tool_env_make(&settings, tuning);
    char **env = perf_tool_env_array(&settings);
    pid_t me = getpid();
    *pid = fork();
    int error = errno;
    if (*pid == 0) exec_tool(c->path, c->argv, env, pipe_fds[1], me);
    mem_free(env);
    perf_tool_env_release(&settings);
    close(pipe_fds[1]);
    *fd = pipe_fds[0];
    if (*pid > 0) return OK;
    *pid = 0;
    close(pipe_fds[0]);
    return err_set(err, ERR_IO, "%s cannot be started: %s", c->argv[0], strerror(error));
}

/* Collects output until its end or the deadline; true at the end. */
static bool read_output(int fd, uint64_t deadline_ms, struct buf *out)
{
    for (;;) {
        uint64_t now = clock_ms();
        struct pollfd p = { .fd = fd, .events = POLLIN };
        if (now >= deadline_ms || out->len > OUTPUT_MAX ||
            poll(&p, 1, (int)(deadline_ms - now)) != 1)
            return false;
        char *at = buf_reserve(out, 4096);
        ssize_t n = read(fd, at, 4095);
        if (n <= 0) return true;
        out->len += (size_t)n;
        out->data[out->len] = 0;
    }
}

static int finish(pid_t pid, bool ended)
{
    int st = 0;
    if (!ended) kill(pid, SIGKILL);
    while (waitpid(pid, &st, 0) < 0 && errno == EINTR) {}
    return WIFEXITED(st) ? WEXITSTATUS(st) : -1;
}

/* The last line that is not blank, for a sentence. */
static struct str last_line(const struct buf *out)
{
    struct str rest = buf_str(out), line, last = { "no output", 9 };
    while (rest.n && str_split(&rest, '\n', &line)) {
        line = str_trim(line);
        if (line.n > 3 && line.p[0] != '-') last = line;
    }
    return str_sub(last, 0, 160);
}

static uint16_t free_port(const char *host)
{
    struct sockaddr_storage sa = { 0 };
    struct sockaddr_in *v4 = (struct sockaddr_in *)&sa;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&sa;
    socklen_t len = sizeof sa;
    sa.ss_family = inet_pton(AF_INET6, host, &v6->sin6_addr) == 1 ? AF_INET6 : AF_INET;
    if (sa.ss_family == AF_INET) v4->sin_addr.s_addr = htonl(INADDR_ANY);
    int fd = socket(sa.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    uint16_t port = 0;
    if (fd >= 0 &&
        bind(fd, (struct sockaddr *)&sa, sa.ss_family == AF_INET ? sizeof *v4 : sizeof *v6) == 0 &&
        getsockname(fd, (struct sockaddr *)&sa, &len) == 0)
        port = ntohs(sa.ss_family == AF_INET6 ? v6->sin6_port : v4->sin_port);
    if (fd >= 0) close(fd);
    return port;
}

/* Does a process on this host listen on the port? Reads the kernel's table: a test connection would
 * be the only client that the tool accepts. */
static bool is_listening(uint16_t port)
{
    static const char *const tables[] = { "/proc/net/tcp", "/proc/net/tcp6" };
    for (size_t i = 0; i < COUNT_OF(tables); i++) {
        char line[256];
        unsigned local = 0, state = 0;
        FILE *f = fopen(tables[i], "re");
        bool found = false;
        while (f && !found && fgets(line, sizeof line, f))
            found = sscanf(line, " %*d: %*[0-9A-Fa-f]:%x %*[0-9A-Fa-f]:%*x %x", &local, &state) ==
                        2 &&
                    local == port && state == 0x0a;
        if (f) fclose(f);
        if (found) return true;
    }
    return false;
}

enum status probe_tool_server_start(struct probe_tool_server *s, const struct probe_request *r,
                                    const char *host, const struct kvt_tuning *tuning,
                                    uint16_t *port, struct err *err)
{
    struct tool_command c;
    struct buf out = { 0 };
    probe_tool_server_stop(s);
    *port = free_port(host);
    TRY(make_command(&c, r, host, NULL, *port, tuning, err));
    TRY(start(&c, tuning, &s->pid, &s->fd, err));
    for (uint64_t end = clock_ms() + START_MS; clock_ms() < end;) {
        if (is_listening(*port)) {
            buf_release(&out);
            return OK;
        }
        if (read_output(s->fd, clock_ms() + 20, &out)) break;
    }
    enum status st = err_set(err, ERR_IO, "%s does not serve: %.*s", c.argv[0],
                             STR_ARG(last_line(&out)));
    probe_tool_server_stop(s);
    buf_release(&out);
    return st;
}

void probe_tool_server_stop(struct probe_tool_server *s)
{
    struct buf rest = { 0 };
    if (s->pid <= 0) return;
    /* The server ends by itself after its one client; the rest of its output is not needed. */
    bool ended = read_output(s->fd, clock_ms() + 500, &rest);
    finish(s->pid, ended);
    close(s->fd);
    buf_release(&rest);
    *s = (struct probe_tool_server){ 0 };
}

/* ---- results ---- */

static enum status parse_iperf3(const char *output, struct probe_reply *reply, struct err *err)
{
    cJSON *doc = NULL;
    double bits = 0;
    TRY(json_parse(str_of(output), false, &doc, err));
    const cJSON *end = json_member(doc, "end"),
                *sum = end ? json_member(end, "sum_received") : NULL;
    const char *error = NULL;
    enum status st = json_get_str(doc, "error", &error, err);
    if (st == OK && error) st = err_set(err, ERR_IO, "iperf3: %.120s", error);
    if (st == OK && sum) st = json_get_f64(sum, "bits_per_second", 0, 1e15, &bits, err);
    if (st == OK && bits <= 0) st = err_set(err, ERR_FORMAT, "iperf3 printed no rate");
    cJSON_Delete(doc);
    if (st == OK) reply->n_bytes = (uint64_t)(bits / 8);
    return st;
}

/* Reads the numbers of the last line that begins with `first`; returns how many. */
static int numbers_after(const char *output, const char *first, double *v, int cap)
{
    struct str rest = str_of(output), line;
    int n = 0;
    while (rest.n && str_split(&rest, '\n', &line)) {
        line = str_trim(line);
        if (!str_starts(line, first) || line.n == strlen(first) ||
            !strchr(" \t", line.p[strlen(first)]))
            continue;
        char text[512], *at = text, *next;
        snprintf(text, sizeof text, "%.*s", STR_ARG(str_sub(line, strlen(first), 500)));
        for (n = 0; n < cap; n++, at = next) {
            v[n] = strtod(at, &next);
            if (next == at) break;
        }
    }
    return n;
}

static uint64_t ns_of(double us) { return us > 0 && us < 1e9 ? (uint64_t)(us * 1000) : 0; }

enum status probe_tool_parse(enum probe_tool tool, uint32_t piece_bytes, const char *output,
                             struct probe_reply *reply, struct err *err)
{
    double v[10] = { 0 };
    char first[16];
    snprintf(first, sizeof first, "%" PRIu32, piece_bytes);
    reply->n_ns = 0;
    reply->n_bytes = 0;
    switch (tool) {
    case PROBE_IPERF3: return parse_iperf3(output, reply, err);
    case PROBE_IB_WRITE_BW: /* iterations, peak, average Gbit/s, Mpps */
        if (numbers_after(output, first, v, 10) >= 3 && v[2] > 0 && v[2] < 1e6)
            reply->n_bytes = (uint64_t)(v[2] * 1e9 / 8);
        break;
    /* iterations; in us: min, max, typical, average, deviation, 99 %, 99.9 % */
    case PROBE_IB_WRITE_LAT:
        if (numbers_after(output, first, v, 10) < 8) break;
        reply->n_ns = 3;
        reply->ns[0] = ns_of(v[3]);
        reply->ns[1] = ns_of(v[6]);
        reply->ns[2] = ns_of(v[7]);
        break;
    case PROBE_UCX_PUT_BW: /* iterations, 50 %, average, overall us, average, overall MiB/s */
        if (numbers_after(output, "Final:", v, 10) >= 6 && v[5] > 0 && v[5] < 1e9)
            reply->n_bytes = (uint64_t)(v[5] * MIB);
        break;
    case PROBE_UCX_PUT_LAT:
        if (numbers_after(output, "Final:", v, 10) < 6) break;
        reply->n_ns = 3;
        reply->ns[0] = ns_of(v[1]);
        break;
    case PROBE_TOOL_END: break;
    }
    if (reply->n_bytes || (reply->n_ns && reply->ns[0])) return OK;
    return err_set(err, ERR_FORMAT, "%s printed no result", probe_tool_name(tool));
}

enum status probe_tool_run(const struct probe_request *r, const struct kvt_tuning *tuning,
                           struct probe_reply *reply, struct err *err)
{
    struct tool_command c;
    struct buf out = { 0 };
    pid_t pid = 0;
    int fd = -1;
    TRY(make_command(&c, r, "", r->address, r->port, tuning, err));
    TRY(start(&c, tuning, &pid, &fd, err));
    bool ended = read_output(fd, clock_ms() + PROBE_TOOL_MS, &out);
    int exit_status = finish(pid, ended);
    close(fd);
    enum status st;
    if (!ended)
        st = err_set(err, ERR_TIMEOUT, "%s did not end within %d s", c.argv[0],
                     PROBE_TOOL_MS / 1000);
    else if (exit_status != 0 && r->tool != PROBE_IPERF3)
        st = err_set(err, ERR_IO, "%s: %.*s", c.argv[0], STR_ARG(last_line(&out)));
    else st = probe_tool_parse(r->tool, r->piece_bytes, out.data ? out.data : "", reply, err);
    buf_release(&out);
    return st;
}
