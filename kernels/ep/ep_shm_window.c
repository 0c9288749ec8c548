/* ep_shm_window.c - the windows of backend `shm`: memory of each rank, sealed so that only its
 * owner can write it, and mapped by the others.
 *
 * Ranks tell each other process and descriptor in the handshake and open /proc/<pid>/fd/<fd>, which
 * the kernel allows to processes of the same user. A descriptor is accepted if it is a memfd of the
 * size that the layout has, sealed against shrinking (an access beyond its end would be SIGBUS
 * here), which begins with the number that its owner drew, and if that process still lives after it
 * was opened: so neither a process number that was given anew nor another pid namespace can pass
 * wrong memory. The bell, a page of rank 0, is the only memory that all ranks write. After the
 * second handshake all have mapped all, and the descriptors are closed. Memory is taken from the
 * system when it is first touched.
 * Thread: loading. */
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernels/ep/ep_shm.h"
#include "kernels/host/host_id.h"
#include "kernels/host/pages.h"
#include "shared/base/hash/hash.h"
#include "shared/base/mem.h"

/* What a rank tells the others. */
struct ep_shm_offer {
    struct host_id host;
    uint64_t nonce, bytes; /* of the window */
    int32_t pid, window_fd, bell_fd;
};
static_assert(sizeof(struct ep_shm_offer) <= EP_PAYLOAD_BYTES, "the offer's room");

static size_t window_bytes(const struct ep_shm *s) { return s->at.head_bytes + s->at.body_bytes; }

/* ---- the own window ---- */

/* The caller closes it, also on failure. */
static enum status make_memfd(const char *name, size_t bytes, int *fd, struct err *err)
{
    *fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (*fd >= 0 && ftruncate(*fd, (off_t)bytes) == 0) return OK;
    return err_set(err, ERR_NOMEM, "ep: no %zu KiB of memory to share: %s", bytes >> 10,
                   strerror(errno));
}

static enum status seal(int fd, int seals, struct err *err)
{
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | seals | F_SEAL_SEAL) == 0) return OK;
    return err_set(err, ERR_UNSUPPORTED, "ep: shared memory cannot be sealed: %s", strerror(errno));
}

static enum status map_at(char *at, size_t bytes, int protection, int fd, size_t from,
                          struct err *err)
{
    void *p = mmap(at, bytes, protection, MAP_SHARED | MAP_FIXED, fd, (off_t)from);
    if (p != MAP_FAILED) return OK;
    return err_set(err, ERR_NOMEM, "ep: %zu KiB of shared memory cannot be mapped: %s", bytes >> 10,
                   strerror(errno));
}

/* Maps a window to its places. */
static enum status map_window(struct ep_shm *s, int32_t rank, int fd, int protection,
                              struct err *err)
{
    TRY(map_at(ep_shm_head(s, rank), s->at.head_bytes, protection, fd, 0, err));
    return map_at(ep_shm_body(s, rank), s->at.body_bytes, protection, fd, s->at.head_bytes, err);
}

/* Addresses for all windows. */
static enum status reserve(struct ep_shm *s, struct err *err)
{
    const size_t size = (size_t)s->base.config.size, bytes = size * window_bytes(s);
    void *p = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return err_set(err, ERR_NOMEM, "ep: no addresses for %zu windows of %zu MiB: %s", size,
                       window_bytes(s) >> 20, strerror(errno));
    s->heads = p;
    s->bodies = s->heads + size * s->at.head_bytes;
    return OK;
}

static enum status make_bell(struct ep_shm *s, struct err *err)
{
    TRY(make_memfd("baton-ep-bell", pages_round(1), &s->bell_fd, err));
    return seal(s->bell_fd, 0, err);
}

static enum status map_bell(struct ep_shm *s, int fd, struct err *err)
{
    void *p = mmap(NULL, pages_round(1), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED)
        return err_set(err, ERR_NOMEM, "ep: the bell of the ranks cannot be mapped: %s",
                       strerror(errno));
    (void)madvise(p, pages_round(1), MADV_DONTFORK);
    s->bell = p;
    return OK;
}

static enum status make_window(struct ep_shm *s, struct err *err)
{
    const int32_t rank = s->base.config.rank;
    TRY(reserve(s, err));
    TRY(make_memfd("baton-ep", window_bytes(s), &s->window_fd, err));
    TRY(map_window(s, rank, s->window_fd, PROT_READ | PROT_WRITE, err));
    TRY(seal(s->window_fd, F_SEAL_FUTURE_WRITE, err));
    random_bytes(&s->nonce, sizeof s->nonce);
    ep_shm_sign(s, rank)->rank = rank;
    ep_shm_sign(s, rank)->nonce = s->nonce;
    if (rank != 0) return OK;
    TRY(make_bell(s, err));
    return map_bell(s, s->bell_fd, err);
}

/* ---- the others' ---- */

static enum status make_offer(const struct ep_shm *s, struct ep_shm_offer *out, struct err *err)
{
    *out = (struct ep_shm_offer){ .nonce = s->nonce,
                                  .bytes = window_bytes(s),
                                  .pid = getpid(),
                                  .window_fd = s->window_fd,
                                  .bell_fd = s->bell_fd };
    const enum status st = host_id_read(&out->host, err);
    return st == OK ? OK : err_prefix(err, "ep: ");
}

/* Why a descriptor is refused, or NULL. */
static const char *refuse_reason(int fd, size_t bytes)
{
    struct stat st;
    if (fstat(fd, &st) != 0 || st.st_size < 0 || (size_t)st.st_size != bytes)
        return "it has another size";
    const int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK)) return "it is not sealed against shrinking";
    return NULL;
}

/* Opens a descriptor of another rank's process and checks it; the caller closes it. */
static enum status open_theirs(int32_t rank, int32_t pid, int32_t theirs, size_t bytes, int flags,
                               int *fd, struct err *err)
{
    char path[48];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, theirs);
    *fd = open(path, flags | O_CLOEXEC | O_NONBLOCK); /* whatever it is: a FIFO would block */
    if (*fd < 0)
        return err_set(err, errno == ENOENT ? ERR_PEER_LOST : ERR_UNSUPPORTED,
                       "ep: the memory of rank %d cannot be opened (%s); ranks of one host run as "
                       "one user",
                       rank, strerror(errno));
    const char *reason = refuse_reason(*fd, bytes);
    if (!reason) return OK;
    close(*fd);
    return err_set(err, ERR_PEER_MISMATCH, "ep: the memory of rank %d is refused: %s", rank,
                   reason);
}

static enum status open_window(struct ep_shm *s, int32_t rank, const struct ep_shm_offer *o,
                               struct err *err)
{
    int fd;
    TRY(open_theirs(rank, o->pid, o->window_fd, window_bytes(s), O_RDONLY, &fd, err));
    enum status st = map_window(s, rank, fd, PROT_READ, err);
    close(fd);
    if (st != OK || rank != 0) return st;
    TRY(open_theirs(rank, o->pid, o->bell_fd, pages_round(1), O_RDWR, &fd, err));
    st = map_bell(s, fd, err);
    close(fd);
    return st;
}

static enum status open_rank(struct ep_shm *s, int32_t rank, const struct ep_shm_offer *mine,
                             const struct ep_shm_offer *o, struct err *err)
{
    if (o->host.boot != mine->host.boot)
        return err_set(err, ERR_UNSUPPORTED, "ep: rank %d runs on another host", rank);
    if (!host_id_same(&o->host, &mine->host))
        return err_set(err, ERR_UNSUPPORTED,
                       "ep: rank %d runs in another pid namespace (container)", rank);
    s->pidfds[rank] = (int)syscall(SYS_pidfd_open, o->pid, 0);
    if (s->pidfds[rank] < 0)
        return err_set(err, errno == ESRCH ? ERR_PEER_LOST : ERR_UNSUPPORTED,
                       "ep: the process %d of rank %d cannot be watched: %s", o->pid, rank,
                       strerror(errno));
    TRY(open_window(s, rank, o, err));
    struct pollfd p = { .fd = s->pidfds[rank], .events = POLLIN };
    if (poll(&p, 1, 0) > 0)
        return err_set(err, ERR_PEER_LOST, "ep: the process of rank %d has ended", rank);
    const struct ep_shm_sign *sign = ep_shm_sign(s, rank);
    if (sign->nonce != o->nonce || sign->rank != rank)
        return err_set(err, ERR_PEER_MISMATCH, "ep: the memory of rank %d is another's", rank);
    return OK;
}

static enum status open_ranks(struct ep_shm *s, const struct ep_shm_offer *mine,
                              const struct ep_hello *hellos, struct err *err)
{
    for (int32_t r = 0; r < s->base.config.size; r++) {
        struct ep_shm_offer o;
        if (r == s->base.config.rank) continue;
        memcpy(&o, hellos[r].payload, sizeof o);
        TRY(open_rank(s, r, mine, &o, err));
    }
    return OK;
}

static void close_fds(struct ep_shm *s)
{
    if (s->window_fd >= 0) close(s->window_fd);
    if (s->bell_fd >= 0) close(s->bell_fd);
    s->window_fd = s->bell_fd = -1;
}

enum status ep_shm_open_windows(struct ep_shm *s, struct err *err)
{
    const struct ep_config *c = &s->base.config;
    struct ep_shm_offer mine = { 0 };
    s->window_fd = s->bell_fd = -1;
    s->pidfds = MEM_ARRAY(int, (size_t)c->size);
    for (int32_t r = 0; r < c->size; r++) s->pidfds[r] = -1;
    enum status st = make_window(s, err);
    if (st == OK) st = make_offer(s, &mine, err);
    if (c->size > 1) {
        struct ep_hello *hellos = MEM_ARRAY(struct ep_hello, (size_t)c->size);
        st = ep_handshake(&s->base, st, &mine, sizeof mine, hellos, err);
        if (st == OK)
            st = ep_handshake(&s->base, open_ranks(s, &mine, hellos, err), NULL, 0, hellos, err);
        mem_free(hellos);
    }
    close_fds(s);
    /* A child does not inherit them. */
    if (st == OK) (void)madvise(s->heads, (size_t)c->size * window_bytes(s), MADV_DONTFORK);
    return st;
}

void ep_shm_close_windows(struct ep_shm *s)
{
    for (int32_t r = 0; s->pidfds && r < s->base.config.size; r++)
        if (s->pidfds[r] >= 0) close(s->pidfds[r]);
    mem_free(s->pidfds);
    if (s->bell) munmap(s->bell, pages_round(1));
    if (s->heads) munmap(s->heads, (size_t)s->base.config.size * window_bytes(s));
}
