/* ep_shm_window.c - the windows of backend `shm` (kernels/host/window.h): how ranks make their own
 * and map those of the others.
 *
 * Ranks tell each other what to open in the handshake. A window is believed if it begins with its
 * owner's nonce and that process still lives after it was opened. The bell, a page of rank 0, is
 * the only memory that all ranks write. After the second handshake all have mapped all, and the
 * descriptors are closed. Thread: loading. */
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
#include "kernels/host/pages.h"
#include "kernels/host/window.h"
#include "shared/base/hash/hash.h"
#include "shared/base/mem.h"

/* What a rank tells the others. */
struct ep_shm_offer {
    struct window_offer window;
    int32_t bell_fd;
};
static_assert(sizeof(struct ep_shm_offer) <= EP_PAYLOAD_BYTES, "the offer's room");

static size_t window_bytes(const struct ep_shm *s) { return s->at.head_bytes + s->at.body_bytes; }

/* ---- the own window ---- */

/* Maps a window to its places. */
static enum status map_window(struct ep_shm *s, int32_t rank, int fd, int protection,
                              struct err *err)
{
    TRY(window_map(ep_shm_head(s, rank), s->at.head_bytes, protection, fd, 0, err));
    return window_map(ep_shm_body(s, rank), s->at.body_bytes, protection, fd, s->at.head_bytes,
                      err);
}

/* Addresses for all windows. */
static enum status reserve(struct ep_shm *s, struct err *err)
{
    const size_t size = (size_t)s->base.config.size;
    TRY(window_reserve(size * window_bytes(s), &s->heads, err));
    s->bodies = s->heads + size * s->at.head_bytes;
    return OK;
}

static enum status make_bell(struct ep_shm *s, struct err *err)
{
    TRY(window_make("baton-ep-bell", pages_round(1), &s->bell_fd, err));
    return window_seal(s->bell_fd, 0, err);
}

static enum status map_bell(struct ep_shm *s, int fd, struct err *err)
{
    void *p = mmap(NULL, pages_round(1), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED)
        return err_set(err, ERR_NOMEM, "the bell of the ranks cannot be mapped: %s",
                       strerror(errno));
    (void)madvise(p, pages_round(1), MADV_DONTFORK);
    s->bell = p;
    return OK;
}

static enum status make_window(struct ep_shm *s, struct err *err)
{
    const int32_t rank = s->base.config.rank;
    TRY(reserve(s, err));
    TRY(window_make("baton-ep", window_bytes(s), &s->window_fd, err));
    TRY(map_window(s, rank, s->window_fd, PROT_READ | PROT_WRITE, err));
    TRY(window_seal(s->window_fd, F_SEAL_FUTURE_WRITE, err));
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
    *out = (struct ep_shm_offer){
        .window = { .nonce = s->nonce,
                    .bytes = window_bytes(s),
                    .pid = getpid(),
                    .fd = s->window_fd },
        .bell_fd = s->bell_fd,
    };
    return host_id_read(&out->window.host, err);
}

static enum status open_theirs(int32_t rank, const struct ep_shm_offer *o, int32_t theirs,
                               size_t bytes, int flags, int *fd, struct err *err)
{
    char what[24];
    snprintf(what, sizeof what, "rank %d", rank);
    return window_open(what, &o->window, theirs, bytes, flags, fd, err);
}

static enum status open_window(struct ep_shm *s, int32_t rank, const struct ep_shm_offer *o,
                               struct err *err)
{
    int fd;
    TRY(open_theirs(rank, o, o->window.fd, window_bytes(s), O_RDONLY, &fd, err));
    enum status st = map_window(s, rank, fd, PROT_READ, err);
    close(fd);
    if (st != OK || rank != 0) return st;
    TRY(open_theirs(rank, o, o->bell_fd, pages_round(1), O_RDWR, &fd, err));
    st = map_bell(s, fd, err);
    close(fd);
    return st;
}

static enum status open_rank(struct ep_shm *s, int32_t rank, const struct ep_shm_offer *mine,
                             const struct ep_shm_offer *o, struct err *err)
{
    if (o->window.host.boot != mine->window.host.boot)
        return err_set(err, ERR_UNSUPPORTED, "rank %d runs on another host", rank);
    if (!host_id_same(&o->window.host, &mine->window.host))
        return err_set(err, ERR_UNSUPPORTED, "rank %d runs in another pid namespace (container)",
                       rank);
    s->pidfds[rank] = (int)syscall(SYS_pidfd_open, o->window.pid, 0);
    if (s->pidfds[rank] < 0)
        return err_set(err, errno == ESRCH ? ERR_PEER_LOST : ERR_UNSUPPORTED,
                       "the process %d of rank %d cannot be watched: %s", o->window.pid, rank,
                       strerror(errno));
    TRY(open_window(s, rank, o, err));
    struct pollfd p = { .fd = s->pidfds[rank], .events = POLLIN };
    if (poll(&p, 1, 0) > 0)
        return err_set(err, ERR_PEER_LOST, "the process of rank %d has ended", rank);
    const struct ep_shm_sign *sign = ep_shm_sign(s, rank);
    if (sign->nonce != o->window.nonce || sign->rank != rank)
        return err_set(err, ERR_PEER_MISMATCH, "the memory of rank %d is another's", rank);
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

/* ep_handshake names the ep object itself. */
static enum status named(enum status st, struct err *err)
{
    if (st != OK && err) (void)err_prefix(err, "ep: ");
    return st;
}

enum status ep_shm_open_windows(struct ep_shm *s, struct err *err)
{
    const struct ep_config *c = &s->base.config;
    struct ep_shm_offer mine = { 0 };
    s->window_fd = s->bell_fd = -1;
    s->pidfds = MEM_ARRAY(int, (size_t)c->size);
    for (int32_t r = 0; r < c->size; r++) s->pidfds[r] = -1;
    enum status st = named(make_window(s, err), err);
    if (st == OK) st = named(make_offer(s, &mine, err), err);
    if (c->size > 1) {
        struct ep_hello *hellos = MEM_ARRAY(struct ep_hello, (size_t)c->size);
        st = ep_handshake(&s->base, st, &mine, sizeof mine, hellos, err);
        if (st == OK)
            st = ep_handshake(&s->base, named(open_ranks(s, &mine, hellos, err), err), NULL, 0,
                              hellos, err);
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
