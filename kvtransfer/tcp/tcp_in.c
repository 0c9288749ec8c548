/* tcp_in.c - receives preambles, messages, and payload straight to where env->scatter says. See
 * tcp.h.
 *
 * Every read asks env->scatter again, so that a session that has just ended gets no further byte.
 * On the first link the end of a payload is read together with the small bytes after it, which wait
 * in `in`.
 * Thread: transfer. */
#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "kvtransfer/tcp/tcp.h"

/* ---- payload ---- */

static void begin_frame(struct tcp_conn *c, const struct kvt_message *m)
{
    c->frame = *m;
    c->in_frame = true;
    c->dropping = false;
    c->slices_left = tcp_n_slices(m->bytes, c->n_links);
    for (uint32_t i = 0; i < c->slices_left; i++) {
        struct tcp_link *l = c->links[i];
        l->slice_left = tcp_slice_begin(m->bytes, c->slices_left, i + 1) -
                        tcp_slice_begin(m->bytes, c->slices_left, i);
        if (i) tcp_watch(l, l->events | EPOLLIN);
    }
}

/* Handles the end of this link's slice; the link then waits for the others. */
static void end_slice(struct tcp_link *l)
{
    struct tcp_conn *c = l->conn;
    if (--c->slices_left) {
        tcp_watch(l, l->events & ~(uint32_t)EPOLLIN);
        return;
    }
    c->in_frame = false;
    if (l->index) tcp_watch(l, l->events & ~(uint32_t)EPOLLIN);
    /* what it read ahead is in the backlog */
    tcp_watch(c->links[0], c->links[0]->events | EPOLLIN);
}

/* Bytes of the frame that are in place from its begin without a gap. */
static uint64_t contiguous(const struct tcp_conn *c)
{
    if (!c->in_frame) return c->frame.bytes;
    uint32_t n = tcp_n_slices(c->frame.bytes, c->n_links);
    uint64_t end = 0;
    for (uint32_t i = 0; i < n; i++) {
        end = tcp_slice_begin(c->frame.bytes, n, i + 1) - c->links[i]->slice_left;
        if (c->links[i]->slice_left) break;
    }
    return end;
}

static void account_payload(struct tcp_link *l, uint64_t bytes)
{
    struct tcp_conn *c = l->conn;
    const struct kvt_env *env = c->tt->env;
    l->slice_left -= bytes;
    if (l->slice_left == 0) end_slice(l);
    if (!c->dropping) env->scattered(env->arg, &c->base, &c->frame, contiguous(c));
}

/* Where the remaining bytes of this link's slice go; their number in *bytes. */
static int slice_target(struct tcp_link *l, struct iovec *iov, int cap, uint64_t *bytes)
{
    struct tcp_conn *c = l->conn;
    const struct kvt_env *env = c->tt->env;
    uint32_t n_slices = tcp_n_slices(c->frame.bytes, c->n_links);
    uint64_t offset = tcp_slice_begin(c->frame.bytes, n_slices, l->index + 1) - l->slice_left;
    int n = c->dropping ? 0 : env->scatter(env->arg, &c->base, &c->frame, offset, iov, cap);
    *bytes = 0;
    if (n == 0) {
        c->dropping = true;
        iov[0] = (struct iovec){ c->tt->discard_buf, TCP_DISCARD_BYTES };
        n = 1;
    }
    for (int i = 0; i < n; i++) {
        if (iov[i].iov_len > l->slice_left - *bytes) iov[i].iov_len = l->slice_left - *bytes;
        *bytes += iov[i].iov_len;
        if (*bytes == l->slice_left) return i + 1;
    }
    return n;
}

/* Scatters payload that was read ahead together with small bytes. */
static void scatter_read_ahead(struct tcp_link *l)
{
    struct iovec iov[TCP_IOV_MAX];
    uint64_t bytes, done = 0;
    int n = slice_target(l, iov, TCP_IOV_MAX, &bytes);
    for (int i = 0; i < n && l->in_at < l->in_have; i++) {
        size_t have = l->in_have - l->in_at, part = iov[i].iov_len < have ? iov[i].iov_len : have;
        memcpy(iov[i].iov_base, l->in + l->in_at, part);
        l->in_at += part;
        done += part;
    }
    account_payload(l, done);
}

/* Returns the bytes read, 0 at end of file, -1 with errno. */
static ssize_t read_slice(struct tcp_link *l)
{
    struct iovec iov[TCP_IOV_MAX];
    uint64_t bytes;
    int n = slice_target(l, iov, TCP_IOV_MAX - 1, &bytes);
    if (l->index == 0 && bytes == l->slice_left) iov[n++] = (struct iovec){ l->in, sizeof l->in };
    ssize_t got = readv(l->fd, iov, n);
    if (got <= 0) return got;
    uint64_t payload = (uint64_t)got < bytes ? (uint64_t)got : bytes;
    l->in_at = 0;
    l->in_have = (size_t)((uint64_t)got - payload);
    account_payload(l, payload);
    return got;
}

/* ---- preambles and messages ---- */

/* Handles a complete preamble. False: the link has ended (and is freed if it has no connection). */
static bool on_preamble(struct tcp_events *evs, struct tcp_link *l)
{
    struct kvt_preamble p;
    struct err err = { 0 };
    bool good = kvt_preamble_decode(l->in + l->in_at, KVT_PREAMBLE_BYTES, &p) == OK;
    l->in_at += KVT_PREAMBLE_BYTES;
    if (l->state == TCP_HANDSHAKE) {
        struct tcp_conn *c = good && p.kind == KVT_PREAMBLE_TICKET ? tcp_admit(l, p.ticket) : NULL;
        tcp_queue_preamble(l, &(struct kvt_preamble){
                                  .kind = c ? KVT_PREAMBLE_WELCOME : KVT_PREAMBLE_REFUSED,
                                  .value = c ? c->n_links : 0,
                              });
        bool sent = tcp_write_out(l) == OK;
        if (c && sent) {
            tcp_link_is_up(evs, l);
            return true;
        }
        if (c) tcp_go_down(evs, c, ERR_PEER_LOST, "the sender left");
        else tcp_link_free(l);
        return false;
    }
    struct tcp_conn *c = l->conn;
    if (!good || p.kind != KVT_PREAMBLE_WELCOME || p.value < 1 || p.value > TCP_LINKS_MAX) {
        bool refused = good && p.kind == KVT_PREAMBLE_REFUSED;
        tcp_go_down(evs, c, refused ? ERR_UNAUTHORIZED : ERR_FORMAT,
                    refused ? "the receiver refused the ticket"
                            : "the peer does not speak this protocol");
        return false;
    }
    if (l->index == 0 && tcp_make_links(c, (uint32_t)p.value, &err) != OK) {
        tcp_go_down(evs, c, err.code, err.text);
        return false;
    }
    tcp_link_is_up(evs, l);
    return true;
}

/* Whether DONE must wait: the receiver has the whole transfer, but the kernel has not released the
 * source yet, and sessions must get PUT_DONE first. */
static bool comes_early(const struct tcp_conn *c, const struct kvt_message *m)
{
    if (m->kind != KVT_MSG_DONE || c->base.incoming) return false;
    for (uint64_t seq = c->n_completed; seq < c->n_put; seq++) {
        const struct tcp_put *p = &c->puts[seq % TCP_PUTS_MAX];
        if (p->session == m->session && p->generation == m->generation) return true;
    }
    return c->tt->n_done > 0;
}

/* Handles one message in `in`. False: it is not complete, must wait (*wait), or the connection has
 * ended. */
static bool parse_message(struct tcp_events *evs, struct tcp_link *l, bool *wait)
{
    size_t have = l->in_have - l->in_at;
    struct tcp_conn *c = l->conn;
    struct kvt_message m;
    if (have < KVT_MESSAGE_BYTES) return false;
    const uint8_t *p = l->in + l->in_at;
    if (kvt_message_decode_head(p, &m) != OK || (m.kind == KVT_MSG_DATA && !c->base.incoming)) {
        tcp_go_down(evs, c, ERR_FORMAT, "malformed message");
        return false;
    }
    size_t tail = kvt_message_tail(&m);
    if (have < KVT_MESSAGE_BYTES + tail) return false;
    if (comes_early(c, &m)) {
        *wait = true;
        return false;
    }
    memcpy(m.sums, p + KVT_MESSAGE_BYTES, tail);
    l->in_at += KVT_MESSAGE_BYTES + tail;
    if (m.kind == KVT_MSG_DATA) begin_frame(c, &m);
    else tcp_add_event(evs, KVT_MESSAGE, c)->message = m;
    return true;
}

/* Remembers that `in` holds bytes that no event of the socket will report. */
static void keep_backlog(struct tcp_conn *c)
{
    if (!c->backlog) c->tt->n_backlog++;
    c->backlog = true;
}

/* Handles the bytes in `in`. False: the link has ended. *wait: nothing may be read before the next
 * poll. */
static bool use_bytes(struct tcp_events *evs, struct tcp_link *l, bool *wait)
{
    *wait = false;
    while (l->in_at < l->in_have && !*wait) {
        struct tcp_conn *c = l->conn;
        if (l->state != TCP_LINK_UP) {
            if (l->in_have - l->in_at < KVT_PREAMBLE_BYTES) break;
            if (evs->n == evs->cap) *wait = true;
            else if (!on_preamble(evs, l)) return false;
        } else if (c->state == TCP_ASSEMBLING || (c->in_frame && (l->slice_left == 0 || evs->n)) ||
                   evs->n == evs->cap) {
            /* for other links, or for sessions to see the messages before this payload */
            *wait = true;
        } else if (c->in_frame) {
            scatter_read_ahead(l);
        } else if (!parse_message(evs, l, wait)) {
            if (c->state == TCP_IS_DOWN) return false;
            break;
        }
    }
    if (*wait && l->conn && l->index == 0) keep_backlog(l->conn);
    if (l->in_at == l->in_have) {
        l->in_at = l->in_have = 0;
    } else if (l->in_at && l->in_have == sizeof l->in) {
        memmove(l->in, l->in + l->in_at, l->in_have - l->in_at);
        l->in_have -= l->in_at;
        l->in_at = 0;
    }
    return true;
}

/* Reads small bytes: of a preamble no more than its size, because a slice may follow. */
static ssize_t read_small(struct tcp_link *l)
{
    size_t room = sizeof l->in - l->in_have;
    if (l->state != TCP_LINK_UP) room = KVT_PREAMBLE_BYTES - l->in_have;
    ssize_t got = recv(l->fd, l->in + l->in_have, room, MSG_DONTWAIT);
    if (got > 0) l->in_have += (size_t)got;
    return got;
}

static void lose(struct tcp_events *evs, struct tcp_link *l, enum status st, const char *text)
{
    if (l->conn) tcp_go_down(evs, l->conn, st, text);
    else tcp_link_free(l);
}

void tcp_read_in(struct tcp_events *evs, struct tcp_link *l)
{
    for (uint64_t total = 0; total < TCP_BYTES_PER_POLL && evs->n < evs->cap;) {
        bool wait;
        /* full: an end of file needs room for its DOWN */
        if (!use_bytes(evs, l, &wait) || wait || evs->n == evs->cap) return;
        struct tcp_conn *c = l->conn;
        bool up = l->state == TCP_LINK_UP, payload = up && c->in_frame && l->slice_left;
        if (payload && evs->n) return; /* messages in `in` come before the payload after them */
        /* nothing to read here before other links progress */
        if (up && !payload && c->base.incoming && (l->index || c->in_frame)) return;
        ssize_t got = payload ? read_slice(l) : read_small(l);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
        if (got <= 0) {
            lose(evs, l, ERR_PEER_LOST,
                 got == 0 ? "the peer closed the connection" : strerror(errno));
            return;
        }
        if (up && l->index && !c->base.incoming) {
            lose(evs, l, ERR_FORMAT, "unexpected bytes from the receiver");
            return;
        }
        total += (uint64_t)got;
    }
}
