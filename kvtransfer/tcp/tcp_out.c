/* tcp_out.c - sends messages, headers, and the slices of puts straight from the pool; handles
 * MSG_ZEROCOPY completions. See tcp.h.
 *
 * A link's stream is its queue with a gap per slice. One sendmsg covers as many queued bytes and
 * slices as fit into an iovec.
 * Thread: transfer. */
#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>

#include <linux/errqueue.h> /* needs struct timespec */

#include "kvtransfer/tcp/tcp.h"
#include "shared/base/mem.h"

static struct tcp_put *put_at(struct tcp_conn *c, uint64_t seq)
{
    return &c->puts[seq % TCP_PUTS_MAX];
}

/* The first put from `seq` on that has a slice on this link, or n_put. */
static uint64_t next_put(const struct tcp_link *l, uint64_t seq)
{
    const struct tcp_conn *c = l->conn;
    if (c && seq < c->n_completed) /* puts without a slice here came and went */
        seq = c->n_completed;
    while (c && seq < c->n_put && c->puts[seq % TCP_PUTS_MAX].n_slices <= l->index) seq++;
    return seq;
}

/* ---- gathering ---- */

static int slice_iov(const struct tcp_transport *t, const struct tcp_put *p,
                     const struct tcp_slice *s, struct iovec *iov, int cap)
{
    int n = 0;
    uint64_t left = s->left, skip = s->copy_sent;
    for (uint32_t i = s->i_copy; left && n < cap; i++, n++, skip = 0) {
        uint64_t bytes = p->abandoned ? TCP_DISCARD_BYTES : p->copies[i].bytes - skip;
        if (bytes > left) bytes = left;
        iov[n] = (struct iovec){ p->abandoned ? (char *)t->zeros
                                              : kvt_source(t->env, p->copies[i].local) + skip,
                                 bytes };
        left -= bytes;
    }
    return n;
}

/* Gathers the next bytes of the stream. *zerocopy: only a slice, which may be sent without a
 * copy. */
static int gather(struct tcp_link *l, struct iovec *iov, bool *zerocopy)
{
    int n = 0;
    size_t at = l->queue_sent;
    *zerocopy = false;
    for (uint64_t seq = next_put(l, l->put_seq);; seq = next_put(l, seq + 1)) {
        struct tcp_conn *c = l->conn;
        struct tcp_put *p = c && seq < c->n_put ? put_at(c, seq) : NULL;
        struct tcp_slice *s = p ? &p->slices[l->index] : NULL;
        size_t end = s ? (size_t)(s->at - l->queue_base) : l->queue.len;
        bool pins = s && l->zerocopy && !p->abandoned && s->left >= TCP_ZEROCOPY_MIN &&
                    l->zc_sent - l->zc_done < TCP_ZEROCOPY_CALLS;
        if (end > at) iov[n++] = (struct iovec){ l->queue.data + at, end - at };
        at = end;
        if (!s || n >= TCP_IOV_MAX - 1 || (pins && n)) return n;
        *zerocopy = pins;
        int more = slice_iov(c->tt, p, s, iov + n, TCP_IOV_MAX - 1 - n);
        uint64_t bytes = 0;
        for (int i = 0; i < more; i++) bytes += iov[n + i].iov_len;
        n += more;
        if (pins || bytes < s->left) return n;
    }
}

/* ---- accounting ---- */

static void advance_slice(const struct tcp_put *p, struct tcp_slice *s, uint64_t bytes)
{
    s->left -= bytes;
    while (!p->abandoned && bytes) {
        uint64_t left = p->copies[s->i_copy].bytes - s->copy_sent,
                 now = bytes < left ? bytes : left;
        s->copy_sent += now;
        bytes -= now;
        if (now == left) {
            s->i_copy++;
            s->copy_sent = 0;
        }
    }
}

/* Completes puts whose slices are all sent and released. */
static void finish_puts(struct tcp_conn *c)
{
    for (; c->n_completed < c->n_put; c->n_completed++) {
        struct tcp_put *p = put_at(c, c->n_completed);
        for (uint32_t i = 0; i < p->n_slices; i++)
            if (p->slices[i].left || (int32_t)(c->links[i]->zc_done - p->slices[i].zc_until) < 0)
                return;
        c->tt->n_unfinished--;
        c->tt->done[c->tt->n_done++] = (struct tcp_done){ &c->base, p->tag };
    }
}

static void account_sent(struct tcp_link *l, uint64_t sent, bool zerocopy)
{
    struct tcp_conn *c = l->conn;
    if (zerocopy) l->zc_sent++;
    for (;;) {
        l->put_seq = next_put(l, l->put_seq);
        struct tcp_put *p = c && l->put_seq < c->n_put ? put_at(c, l->put_seq) : NULL;
        struct tcp_slice *s = p ? &p->slices[l->index] : NULL;
        size_t small = (s ? (size_t)(s->at - l->queue_base) : l->queue.len) - l->queue_sent;
        size_t of_queue = sent < small ? (size_t)sent : small;
        l->queue_sent += of_queue;
        sent -= of_queue;
        if (!s || of_queue < small) break;
        uint64_t of_slice = sent < s->left ? sent : s->left;
        advance_slice(p, s, of_slice);
        sent -= of_slice;
        if (zerocopy && of_slice) s->zc_until = l->zc_sent;
        if (s->left) break;
        l->put_seq++;
    }
    if (l->queue_sent == l->queue.len) {
        l->queue_base += l->queue.len;
        l->queue_sent = 0;
        buf_clear(&l->queue);
    }
    if (c) finish_puts(c);
}

/* ---- sending ---- */

static bool has_more(const struct tcp_link *l)
{
    return l->queue_sent < l->queue.len || (l->conn && next_put(l, l->put_seq) < l->conn->n_put);
}

enum status tcp_write_out(struct tcp_link *l)
{
    bool full = false;
    for (uint64_t total = 0; total < TCP_BYTES_PER_POLL && !full;) {
        struct iovec iov[TCP_IOV_MAX];
        bool zerocopy;
        int n = gather(l, iov, &zerocopy);
        if (n == 0) break;
        struct msghdr m = { .msg_iov = iov, .msg_iovlen = (size_t)n };
        ssize_t sent = sendmsg(l->fd, &m,
                               MSG_NOSIGNAL | MSG_DONTWAIT | (zerocopy ? MSG_ZEROCOPY : 0));
        if (sent < 0 && errno == ENOBUFS &&
            zerocopy) { /* no memory for completions: copy this one */
            zerocopy = false;
            sent = sendmsg(l->fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
        }
        if (sent < 0 && errno == EINTR) continue;
        full = sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
        if (sent < 0 && !full) {
            /* not every error ends the socket; reading now finds an end of file */
            shutdown(l->fd, SHUT_RDWR);
            return ERR_PEER_LOST;
        }
        if (!full) account_sent(l, (uint64_t)sent, zerocopy);
        total += full ? 0 : (uint64_t)sent;
    }
    tcp_watch(l, has_more(l) ? l->events | EPOLLOUT : l->events & ~(uint32_t)EPOLLOUT);
    return OK;
}

/* Completions may come out of order after a retransmission (Linux,
 * Documentation/networking/msg_zerocopy.rst, "Notification Parsing"). A call counts when all
 * earlier ones do, so that no source below zc_done is read any more. */
void tcp_zerocopy_completed(struct tcp_link *l, uint32_t first, uint32_t last)
{
    for (uint32_t i = first; i - l->zc_done < TCP_ZEROCOPY_CALLS && (int32_t)(last - i) >= 0; i++)
        l->zc_early[i % TCP_ZEROCOPY_CALLS / 64] |= UINT64_C(1) << i % 64;
    for (uint64_t *word; l->zc_done != l->zc_sent; l->zc_done++) {
        word = &l->zc_early[l->zc_done % TCP_ZEROCOPY_CALLS / 64];
        if (!(*word >> l->zc_done % 64 & 1)) return;
        *word &= ~(UINT64_C(1) << l->zc_done % 64);
    }
}

/* One completion covers the calls [ee_info, ee_data]. */
void tcp_read_zerocopy_completions(struct tcp_link *l)
{
    for (;;) {
        union {
            struct cmsghdr align;
            char bytes[256];
        } control;
        struct msghdr m = { .msg_control = control.bytes, .msg_controllen = sizeof control.bytes };
        if (recvmsg(l->fd, &m, MSG_ERRQUEUE | MSG_DONTWAIT) < 0) break;
        for (struct cmsghdr *h = CMSG_FIRSTHDR(&m); h; h = CMSG_NXTHDR(&m, h)) {
            struct sock_extended_err e;
            memcpy(&e, CMSG_DATA(h), sizeof e);
            if (e.ee_errno != 0 || e.ee_origin != SO_EE_ORIGIN_ZEROCOPY) continue;
            tcp_zerocopy_completed(l, e.ee_info, e.ee_data);
        }
    }
    if (l->conn) finish_puts(l->conn);
}

void tcp_queue_preamble(struct tcp_link *l, const struct kvt_preamble *p)
{
    uint8_t bytes[KVT_PREAMBLE_BYTES];
    kvt_preamble_encode(p, bytes);
    buf_add(&l->queue, bytes, sizeof bytes);
}

/* ---- what sessions ask for ---- */

/* Sets up the slices of the links, each at its byte of the put. */
static void make_slices(struct tcp_conn *c, struct tcp_put *p, uint64_t bytes)
{
    uint32_t i_copy = 0;
    uint64_t before = 0; /* bytes of the copies before i_copy */
    for (uint32_t i = 0; i < p->n_slices; i++) {
        uint64_t begin = tcp_slice_begin(bytes, p->n_slices, i);
        while (before + p->copies[i_copy].bytes <= begin) before += p->copies[i_copy++].bytes;
        struct tcp_link *l = c->links[i];
        p->slices[i] = (struct tcp_slice){
            .at = l->queue_base + l->queue.len,
            .left = tcp_slice_begin(bytes, p->n_slices, i + 1) - begin,
            .i_copy = i_copy,
            .copy_sent = begin - before,
            .zc_until = l->zc_done,
        };
    }
}

enum status tcp_put(struct kvt_conn *base, const struct kvt_put *p)
{
    struct tcp_conn *c = (struct tcp_conn *)base;
    struct tcp_transport *t = c->tt;
    if (c->state != TCP_IS_UP) return ERR_PEER_LOST;
    struct tcp_link *first = c->links[0];
    if (c->n_put - c->n_completed == TCP_PUTS_MAX || first->queue.len > KVT_QUEUE_BYTES)
        return ERR_BUSY;
    if (t->n_done + t->n_unfinished >= t->env->max_peers * (uint32_t)TCP_PUTS_MAX) return ERR_BUSY;
    struct tcp_put *slot = put_at(c, c->n_put);
    if (!slot->copies) slot->copies = MEM_ARRAY(struct kvt_copy, t->env->max_copies);
    memcpy(slot->copies, p->copies, sizeof *p->copies * p->n_copies);
    uint8_t head[KVT_MESSAGE_MAX];
    buf_add(&first->queue, head, kvt_message_encode(&p->head, head));
    slot->tag = p->tag;
    slot->session = p->head.session;
    slot->generation = p->head.generation;
    slot->n_copies = p->n_copies;
    slot->n_slices = tcp_n_slices(p->head.bytes, c->n_links);
    slot->abandoned = false;
    make_slices(c, slot, p->head.bytes);
    c->n_put++;
    t->n_unfinished++;
    /* Sends at once: the receiver reads while the checksums of this put are computed. */
    for (uint32_t i = 0; i < slot->n_slices; i++) (void)tcp_write_out(c->links[i]);
    return OK;
}

/* The stream must carry the bytes that its headers announce, so zeros replace the source. The
 * session has ended on both sides. */
void tcp_abandon(struct kvt_conn *base, uint32_t session, uint64_t generation)
{
    struct tcp_conn *c = (struct tcp_conn *)base;
    for (uint64_t seq = c->n_completed; seq < c->n_put; seq++) {
        struct tcp_put *p = put_at(c, seq);
        if (p->session == session && p->generation == generation) p->abandoned = true;
    }
}

enum status tcp_notify(struct kvt_conn *base, const struct kvt_message *m)
{
    struct tcp_conn *c = (struct tcp_conn *)base;
    if (c->state != TCP_IS_UP) return ERR_PEER_LOST;
    struct tcp_link *first = c->links[0];
    if (m->kind == KVT_MSG_NOTE && first->queue.len > KVT_QUEUE_BYTES) return ERR_BUSY;
    if (first->queue.len > KVT_QUEUE_LIMIT) return ERR_FULL;
    uint8_t bytes[KVT_MESSAGE_MAX];
    buf_add(&first->queue, bytes, kvt_message_encode(m, bytes));
    if (next_put(first, first->put_seq) == c->n_put) (void)tcp_write_out(first);
    else tcp_watch(first, first->events | EPOLLOUT);
    return OK;
}
