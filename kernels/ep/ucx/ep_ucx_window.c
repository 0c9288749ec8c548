/* ep_ucx_window.c - memory that the ranks of one host share (kernels/host/window.h).
 *
 * A window is a rank's rows, then its results, origins and sign. The rows of all ranks are
 * neighbours in this process, those of far ranks in memory of its own, which messages are written
 * to: so x_rows of an ep_batch names rows of every rank. A rank that cannot be read, because it is
 * on another host, of another user or in another pid namespace, is a far one: nothing but speed
 * depends on it. Whether a rank reads another one is told to all.
 * Thread: loading. */
#include <assert.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/ep/ucx/ep_ucx.h"
#include "kernels/host/pages.h"
#include "shared/base/arith.h"
#include "shared/base/hash/hash.h"
#include "shared/base/mem.h"

enum { ALIGN = 64 };

/* At the end of a window. */
struct sign {
    uint64_t nonce;
    int32_t rank;
};

/* ---- sizes ---- */

void ep_ucx_lay_out_window(struct ep_ucx *u)
{
    const struct ep_config *c = &u->base.config;
    struct ep_ucx_window *w = &u->window;
    w->rows_bytes = round_up((size_t)c->max_rows * u->row_bytes, pages_common(u->row_bytes));
    w->rows_stride = w->rows_bytes / u->row_bytes;
    w->results = 0;
    w->origins = round_up(ep_max_slots(c) * (size_t)c->hidden * sizeof(float), ALIGN);
    w->sign = round_up(w->origins + ep_most_local(&c->placement, c->size) * (size_t)c->size *
                                        sizeof(int32_t),
                       ALIGN);
    w->tail_bytes = pages_round(w->sign + sizeof(struct sign));
}

static size_t window_bytes(const struct ep_ucx_window *w) { return w->rows_bytes + w->tail_bytes; }

/* ---- the own window ---- */

static enum status check_sizes(const struct ep_ucx *u, struct err *err)
{
    const struct ep_config *c = &u->base.config;
    if (u->window.rows_stride > (size_t)INT32_MAX / (size_t)c->size)
        return err_set(err, ERR_INVALID, "ep: %zu rows of each of %d ranks are too many",
                       u->window.rows_stride, c->size);
    return OK;
}

static struct sign *sign_of(const struct ep_ucx *u, int32_t rank)
{
    return (struct sign *)(void *)(u->tails[rank] + u->window.sign);
}

static enum status map_rank(struct ep_ucx *u, int32_t rank, int fd, int protection, struct err *err)
{
    const struct ep_ucx_window *w = &u->window;
    char *rows = u->rows + (size_t)rank * w->rows_bytes;
    TRY(window_reserve(w->tail_bytes, &u->tails[rank], err));
    TRY(window_map(u->tails[rank], w->tail_bytes, protection, fd, w->rows_bytes, err));
    TRY(window_map(rows, w->rows_bytes, protection, fd, 0, err));
    (void)madvise(rows, w->rows_bytes, MADV_DONTFORK); /* a child does not inherit them */
    (void)madvise(u->tails[rank], w->tail_bytes, MADV_DONTFORK);
    return OK;
}

enum status ep_ucx_open_window(struct ep_ucx *u, struct err *err)
{
    const struct ep_config *c = &u->base.config;
    struct ep_ucx_window *w = &u->window;
    TRY(check_sizes(u, err));
    TRY(window_reserve((size_t)c->size * w->rows_bytes, &u->rows, err));
    TRY(window_make("baton-ep", window_bytes(w), &w->fd, err));
    TRY(map_rank(u, c->rank, w->fd, PROT_READ | PROT_WRITE, err));
    TRY(window_seal(w->fd, F_SEAL_FUTURE_WRITE, err));
    *sign_of(u, c->rank) = (struct sign){ u->nonce, c->rank };
    u->origin = (int32_t *)(void *)(u->tails[c->rank] + w->origins);
    return OK;
}

struct ep_ucx_window_offer ep_ucx_offer_window(const struct ep_ucx *u)
{
    return (struct ep_ucx_window_offer){ .domain = u->base.config.domain,
                                         .window = { .host = host_id_or_alone(),
                                                     .nonce = u->nonce,
                                                     .bytes = window_bytes(&u->window),
                                                     .pid = getpid(),
                                                     .fd = u->window.fd } };
}

/* ---- the others' ---- */

static void unmap_tail(struct ep_ucx *u, int32_t rank)
{
    if (u->tails[rank]) munmap(u->tails[rank], u->window.tail_bytes);
    u->tails[rank] = NULL;
}

/* Maps the window of another rank. False: it is not there to be read. */
static bool read_rank(struct ep_ucx *u, int32_t rank, const struct ep_ucx_window_offer *mine,
                      const struct ep_ucx_window_offer *o)
{
    char what[24];
    int fd;
    if (o->domain != mine->domain || !host_id_same(&o->window.host, &mine->window.host))
        return false;
    snprintf(what, sizeof what, "rank %d", rank);
    if (window_open(what, &o->window, o->window.fd, window_bytes(&u->window), O_RDONLY, &fd,
                    NULL) != OK)
        return false;
    const enum status st = map_rank(u, rank, fd, PROT_READ, NULL);
    close(fd);
    const bool is_theirs = st == OK && sign_of(u, rank)->nonce == o->window.nonce &&
                           sign_of(u, rank)->rank == rank;
    if (!is_theirs) unmap_tail(u, rank);
    return is_theirs;
}

/* Memory of this process for the rows that a rank sends. */
static enum status receive_rank(struct ep_ucx *u, int32_t rank, struct err *err)
{
    void *at = u->rows + (size_t)rank * u->window.rows_bytes;
    void *p = mmap(at, u->window.rows_bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    if (p != MAP_FAILED) return OK;
    return err_set(err, ERR_NOMEM, "ep: no %zu MiB of memory for the rows of rank %d",
                   u->window.rows_bytes >> 20, rank);
}

enum status ep_ucx_open_others(struct ep_ucx *u, const struct ep_ucx_window_offer *offers,
                               struct ep_ucx_readers *out, struct err *err)
{
    const struct ep_config *c = &u->base.config;
    for (int32_t r = 0; r < c->size; r++) {
        if (r == c->rank) continue;
        if (read_rank(u, r, &offers[c->rank], &offers[r])) {
            out->bits[r / 8] |= (uint8_t)(1 << r % 8);
            u->base.n_near++;
        } else TRY(receive_rank(u, r, err));
    }
    return OK;
}

void ep_ucx_note_reader(struct ep_ucx *u, int32_t rank, const struct ep_ucx_readers *theirs)
{
    const int32_t me = u->base.config.rank;
    u->reads_mine[rank] = theirs->bits[me / 8] >> me % 8 & 1;
    u->is_read = u->is_read || u->reads_mine[rank];
}

void ep_ucx_close_fd(struct ep_ucx *u)
{
    if (u->window.fd >= 0) close(u->window.fd);
    u->window.fd = -1;
}

void ep_ucx_close_windows(struct ep_ucx *u)
{
    const struct ep_config *c = &u->base.config;
    for (int32_t r = 0; u->tails && r < c->size; r++) unmap_tail(u, r);
    mem_free(u->tails);
    if (u->rows) munmap(u->rows, (size_t)c->size * u->window.rows_bytes);
    ep_ucx_close_fd(u);
}
