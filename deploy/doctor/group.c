/* group.c - checks the ranks that share experts, before they start: do their numbers agree with
 * each other and with the model, is rank 0's address reachable, is there memory to share.
 * Thread: main. */
#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "deploy/doctor/doctor.h"
#include "deploy/launch/launch_plan.h"
#include "deploy/launch/ranks_model.h"
#include "deploy/node/node_balance.h"
#include "deploy/node/node_model.h"
#include "shared/model/load/model_files.h"

enum { CONNECT_MS = 1500 };

static const double MIB = 1 << 20;

/* ---- sizes ---- */

static void check_cpus(struct doctor *d, const struct ranks *r)
{
    const long n = sysconf(_SC_NPROCESSORS_ONLN);
    const uint32_t processes = ranks_n_processes(r);
    if (r->kind != RANKS_PARENT || n <= 0 || processes <= (uint32_t)n) return;
    doctor_fix(doctor_add(d, "ranks", DOCTOR_WARN,
                          "%u ranks on %ld CPUs: they take turns, and each step waits for all",
                          processes, n),
               "start at most %ld ranks on this host", n);
}

static void check_copies(struct doctor *d, const struct ranks *r, const struct model_config *m)
{
    struct node_balance_options balance;
    struct err err = { 0 };
    if (node_balance_read(d->c, &balance, &err) != OK) return; /* doctor_check_options says it */
    const uint64_t n = (uint64_t)balance.n_redundant, most = ranks_copies_max(r, m);
    if (n > most)
        doctor_fix(doctor_add(d, "copies", DOCTOR_WARN,
                              "%llu copies of %u experts for %u ranks: more than one of each on "
                              "every rank",
                              (unsigned long long)n, m->moe.n_experts, r->size * r->tp.size),
                   "give --num-redundant-experts %llu or less", (unsigned long long)most);
}

/* The model's experts and heads can be divided. */
static void check_model(struct doctor *d, const struct ranks *r, const struct model_config *m)
{
    const struct model_share share = { .tp_size = r->tp.size };
    const uint32_t n_ranks = r->size * r->tp.size;
    struct err err = { 0 };
    if (r->experts && m->moe.n_experts == 0)
        doctor_add(d, "experts", DOCTOR_OK,
                   "the model has none to share: each of the %u nodes computes alone, and they "
                   "share the requests",
                   r->size);
    else if (r->experts && m->moe.n_experts < n_ranks)
        doctor_fix(doctor_add(d, "experts", DOCTOR_WARN, "%u experts for %u ranks: some have none",
                              m->moe.n_experts, n_ranks),
                   "give --data-parallel-size %u or less",
                   m->moe.n_experts > r->tp.size ? m->moe.n_experts / r->tp.size : 1);
    else if (r->experts)
        doctor_add(d, "experts", DOCTOR_OK, "%u for %u ranks, %zu on each at most",
                   m->moe.n_experts, n_ranks, share_experts(0, n_ranks, m->moe.n_experts).n);
    if (r->experts && m->moe.n_experts) check_copies(d, r, m);
    if (model_share_check(&share, m, &err) != OK)
        doctor_fix(doctor_add(d, "heads", DOCTOR_FAIL, "%s", err.text), "give one of these sizes");
}

/* ---- rank 0 ---- */

/* Connects, or binds; 0 or the errno. */
static int try_address(const char *host, uint16_t port, bool here)
{
    char service[8];
    struct addrinfo hints = { .ai_flags = AI_NUMERICSERV, .ai_socktype = SOCK_STREAM }, *ai = NULL;
    int one = 1, error = 0;
    socklen_t len = sizeof error;
    snprintf(service, sizeof service, "%u", port);
    if (getaddrinfo(host, service, &hints, &ai) != 0) return EADDRNOTAVAIL;
    int fd = socket(ai->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) error = errno;
    else if (here) {
        if (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) != 0 ||
            bind(fd, ai->ai_addr, ai->ai_addrlen) != 0)
            error = errno;
    } else if (connect(fd, ai->ai_addr, ai->ai_addrlen) != 0) {
        struct pollfd p = { .fd = fd, .events = POLLOUT };
        if (errno != EINPROGRESS) error = errno;
        else if (poll(&p, 1, CONNECT_MS) != 1) error = ETIMEDOUT;
        else if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &len) != 0) error = errno;
    }
    if (fd >= 0) close(fd);
    freeaddrinfo(ai);
    return error;
}

static void check_meeting(struct doctor *d, const struct ranks *r)
{
    char at[HOST_PORT_TEXT_MAX];
    const bool here = r->rank == 0;
    const int error = r->port ? try_address(r->host, r->port, here) : 0;
    host_port_text(r->host, r->port, at);
    if (r->port == 0) doctor_add(d, "rank 0", DOCTOR_OK, "listens at %s, any free port", r->host);
    else if (error == 0)
        doctor_add(d, "rank 0", DOCTOR_OK, here ? "can listen at %s" : "is reached at %s", at);
    else if (here)
        doctor_fix(
            doctor_add(d, "rank 0", DOCTOR_FAIL, "cannot listen at %s: %s", at, strerror(error)),
            error == EADDRINUSE
                ? "choose another --data-parallel-rpc-port"
                : "--data-parallel-address must be an address of this host, where rank 0 is");
    else
        doctor_fix(doctor_add(d, "rank 0", error == ECONNREFUSED ? DOCTOR_WARN : DOCTOR_FAIL,
                              "is not reached at %s: %s", at, strerror(error)),
                   error == ECONNREFUSED
                       ? "the ranks wait for it: start the host of rank 0 as well"
                       : "--data-parallel-address must be an address of rank 0's host, and no "
                         "firewall between");
}

/* ---- shared memory ---- */

/* Bytes of a rank's window at most: rows that leave, and a place for each row that may come, twice
 * as many as when choices are even (ffn_moe.c), with the numbers that say whose it is. */
static uint64_t window_bytes(const struct config *c, const struct ranks *r,
                             const struct model_config *m)
{
    const uint64_t rows = (uint64_t)config_int(c, "max-num-batched-tokens"),
                   even = 2 * rows * m->moe.n_used,
                   one_each = (uint64_t)r->size * r->tp.size * m->moe.n_used,
                   places = even > one_each ? even : one_each;
    return (rows + places) * m->hidden * sizeof(float) + 4 * places * sizeof(int32_t);
}

/* Ranks of this host: of one that others start beside, all that it was told of. */
static uint32_t ranks_here(const struct ranks *r)
{
    if (r->kind != RANKS_ONE) return ranks_n_processes(r);
    return (r->n_local ? r->n_local : r->size) * r->tp.size;
}

/* A window is a memfd: no room in /dev/shm, but memory, and a file to the limit of their size.
 * While the next group is made a rank has two. */
static void check_windows(struct doctor *d, const struct ranks *r, const struct model_config *m)
{
    uint64_t cgroup;
    const uint64_t one = window_bytes(d->c, r, m), all = 2 * one * ranks_here(r),
                   room = doctor_free_memory(&cgroup);
    struct rlimit file;
    if (getrlimit(RLIMIT_FSIZE, &file) == 0 && file.rlim_cur < one)
        doctor_fix(doctor_add(d, "windows", DOCTOR_FAIL,
                              "a rank shares up to %.1f MiB with the others, and a file of this "
                              "process may have %.1f MiB",
                              (double)one / MIB, (double)file.rlim_cur / MIB),
                   "ulimit -f unlimited (LimitFSIZE=infinity in a systemd unit)");
    else if (all > room)
        doctor_fix(doctor_add(d, "windows", DOCTOR_FAIL,
                              "%u ranks share up to %.0f MiB each, and twice that when one is "
                              "lost or comes back; %.0f MiB may be used",
                              ranks_here(r), (double)one / MIB, (double)room / MIB),
                   "lower --max-num-batched-tokens");
    else
        doctor_add(d, "windows", DOCTOR_OK,
                   "a rank shares up to %.1f MiB with the others, by memfd, which takes no room in "
                   "/dev/shm",
                   (double)one / MIB);
}

/* ---- the whole ---- */

static bool read_model(const struct config *c, struct model_config *m)
{
    const char *name = config_string(c, "model");
    struct model_generation generation;
    struct err err = { 0 };
    struct buf path = { 0 };
    bool ok = name && model_find(name, &path, &err) == OK &&
              node_model_config(path.data, m, &generation, &err) == OK;
    buf_release(&path);
    return ok; /* doctor_check_model says what is wrong */
}

void doctor_check_group(struct doctor *d)
{
    struct ranks r;
    struct err err = { 0 };
    if (ranks_read(d->c, launch_plan_n_nodes(d->c), &r, &err) != OK) {
        doctor_fix(doctor_add(d, "ranks", DOCTOR_FAIL, "%s", err.text),
                   "docs/parallelism.md shows which options belong together");
        return;
    }
    struct model_config *m = MEM_NEW(struct model_config);
    const bool has_model = read_model(d->c, m);
    if (has_model) check_model(d, &r, m);
    if (r.kind != RANKS_NONE) {
        if (r.kind == RANKS_ONE)
            doctor_add(d, "ranks", DOCTOR_OK, "this is rank %u of %u", r.rank, r.size);
        else
            doctor_add(d, "ranks", DOCTOR_OK, "%u to %u of %u are started here, %u processes",
                       r.rank, r.rank + r.n_started - 1, r.size, ranks_n_processes(&r));
        check_cpus(d, &r);
        if (r.experts) check_meeting(d, &r);
        if (has_model && m->moe.n_experts) check_windows(d, &r, m);
    }
    mem_free(m);
}
