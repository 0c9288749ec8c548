/* tcp.c - any two hosts: KV bytes leave by sendmsg straight from the sender's pool and are read straight into the granted blocks.
 *
 *   outgoing  CONNECTING ── connected: ticket ──▶ WAITING ── WELCOME ──▶ UP ──▶ DOWN
 *   incoming  GREETING ── ticket good: WELCOME ──▶ UP ──▶ DOWN
 *
 * The stream after the preambles is messages (wire.h); DATA is followed by its payload. Out: `queue` holds the small bytes; a put is a gap
 * in it at `at`, filled from the pool. In: a head, its tail, or a payload, for which env->place is asked again before every read, so
 * that a session that has just ended gets no further byte.
 * Fence: this thread alone writes to the pool on behalf of the peer, so not reading any more is proof. Thread: transfer. */
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "kvtransfer/rows.h"
#include "kvtransfer/tcp_address.h"
#include "shared/base/clock.h"
#include "shared/base/list.h"
#include "shared/base/mem.h"

enum {
    PUTS_MAX = 3,              /* per connection: one leaving, the next ready behind it, one being noted */
    TURN_BYTES = 4 << 20,      /* read or written per connection and poll, so that connections share the thread */
    TRASH_BYTES = 64 * 1024,   /* where bytes of dead sessions go; zeros of abandoned puts come from a second one */
    ACCEPTS_PER_POLL = 16,
    DEADLINE_CHECK_MS = 50,
    USER_TIMEOUT_MS = 5000     /* unacknowledged bytes older than this end the connection: a host that vanished says nothing */
};

enum tcp_state { TCP_CONNECTING, TCP_WAITING, TCP_GREETING, TCP_IS_UP, TCP_IS_DOWN };

struct tcp_put {
    uint64_t         at, bytes, sent, tag, generation;
    uint32_t         session, n_copies, i_copy; /* i_copy: first copy not sent completely */
    uint64_t         copy_sent;                 /* of it */
    bool             abandoned;
    struct kvt_copy *copies;
};

struct tcp_conn {
    struct kvt_conn       base;
    struct tcp_transport *tt;
    struct list           link;
    enum tcp_state        state;
    int                   fd;
    uint64_t              deadline_ms;
    bool                  wants_write, silent;
    /* out */
    struct buf            queue;
    uint64_t              queue_base; /* stream position of queue.data[0], payloads not counted */
    size_t                queue_sent;
    struct tcp_put        puts[PUTS_MAX];
    uint32_t              put_head, n_puts;
    /* in */
    uint8_t               in[KVT_MESSAGE_MAX];
    size_t                in_have, in_need;
    bool                  in_payload, dropping;
    struct kvt_message    frame; /* in_payload: its head */
    uint64_t              frame_have;
};

struct tcp_transport {
    struct kvt_transport  base;
    const struct kvt_env *env;
    int                   epoll_fd, listen_fd;
    uint16_t              port;
    struct buf            address;
    struct list           conns;
    uint32_t              n_conns;
    uint64_t              checked_ms;
    struct tcp_done { struct kvt_conn *conn; uint64_t tag; } *done;
    uint32_t              n_done; /* at most PUTS_MAX per connection */
    uint8_t              *trash, *zeros;
};

struct incidents {
    struct kvt_incident *v;
    size_t               n, cap;
};

/* ---- life ---- */

static void watch(struct tcp_conn *c, int op)
{
    struct epoll_event e = { .events = EPOLLIN | (c->wants_write ? EPOLLOUT : 0u), .data.ptr = c };
    (void)epoll_ctl(c->tt->epoll_fd, op, c->fd, &e);
}

static void want_write(struct tcp_conn *c, bool yes)
{
    if (c->wants_write == yes) return;
    c->wants_write = yes;
    watch(c, EPOLL_CTL_MOD);
}

static void set_options(int fd)
{
    int one = 1, seconds = 1, probes = 3, timeout_ms = USER_TIMEOUT_MS;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &seconds, sizeof seconds);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &seconds, sizeof seconds);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout_ms, sizeof timeout_ms);
}

static struct tcp_conn *new_conn(struct tcp_transport *t, int fd, enum tcp_state state)
{
    struct tcp_conn *c = MEM_NEW(struct tcp_conn);
    c->base.t = &t->base;
    c->base.incoming = state == TCP_GREETING;
    c->tt = t;
    c->fd = fd;
    c->state = state;
    c->in_need = KVT_PREAMBLE_BYTES;
    c->deadline_ms = clock_ms() + KVT_CONNECT_MS;
    c->wants_write = state == TCP_CONNECTING;
    set_options(fd);
    list_push(&t->conns, &c->link);
    t->n_conns++;
    watch(c, EPOLL_CTL_ADD);
    return c;
}

static void tcp_disconnect(struct kvt_conn *base)
{
    struct tcp_conn *c = (struct tcp_conn *)base;
    struct tcp_transport *t = c->tt;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < t->n_done; i++)
        if (t->done[i].conn != base) t->done[kept++] = t->done[i];
    t->n_done = kept;
    list_remove(&c->link);
    t->n_conns--;
    close(c->fd);
    for (uint32_t i = 0; i < PUTS_MAX; i++) mem_free(c->puts[i].copies);
    buf_release(&c->queue);
    mem_free(c);
}

static void tcp_close(struct kvt_transport *base)
{
    struct tcp_transport *t = (struct tcp_transport *)base;
    LIST_FOREACH(c, &t->conns, struct tcp_conn, link) tcp_disconnect(&c->base);
    if (t->listen_fd >= 0) close(t->listen_fd);
    if (t->epoll_fd >= 0) close(t->epoll_fd);
    buf_release(&t->address);
    mem_free(t->done);
    mem_free(t->trash);
    mem_free(t->zeros);
    mem_free(t);
}

static enum status tcp_open(const struct kvt_env *env, struct kvt_transport **out, struct err *err)
{
    struct tcp_transport *t = MEM_NEW(struct tcp_transport);
    t->base.ops = &kvt_tcp_ops;
    t->env = env;
    t->listen_fd = -1;
    list_init(&t->conns);
    t->done = MEM_ARRAY(struct tcp_done, (size_t)env->max_peers * PUTS_MAX);
    t->trash = mem_calloc(1, TRASH_BYTES);
    t->zeros = mem_calloc(1, TRASH_BYTES);
    t->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    enum status st = t->epoll_fd < 0 ? err_set(err, ERR_CONFIG, "no epoll: %s", strerror(errno)) : OK;
    if (st == OK) st = tcp_address_listen(env->listen_host, env->port, &t->listen_fd, &t->port, err);
    if (st == OK) st = tcp_address_advertise(env->advertise_host, env->listen_host, t->port, &t->address, err);
    if (st != OK) {
        tcp_close(&t->base);
        return st;
    }
    struct epoll_event e = { .events = EPOLLIN };
    (void)epoll_ctl(t->epoll_fd, EPOLL_CTL_ADD, t->listen_fd, &e);
    *out = &t->base;
    return OK;
}

static int tcp_wait_fd(struct kvt_transport *t) { return ((struct tcp_transport *)t)->epoll_fd; }
static uint64_t tcp_link_speed(const struct kvt_conn *c) { (void)c; return 0; }
static uint16_t tcp_port(struct kvt_transport *t) { return ((struct tcp_transport *)t)->port; }
static enum status tcp_flush(struct kvt_transport *t) { (void)t; return OK; }

static void tcp_export_address(const struct kvt_transport *t, struct buf *out)
{
    buf_add_str(out, buf_str(&((const struct tcp_transport *)t)->address));
}

static bool tcp_can_reach(struct kvt_transport *t, struct str address)
{
    struct sockaddr_storage a;
    socklen_t n;
    (void)t;
    return tcp_address_parse(address, &a, &n) == OK;
}

static void queue_preamble(struct tcp_conn *c, const struct kvt_preamble *p)
{
    uint8_t bytes[KVT_PREAMBLE_BYTES];
    kvt_preamble_encode(p, bytes);
    buf_add(&c->queue, bytes, sizeof bytes);
}

static enum status tcp_connect(struct kvt_transport *base, struct str address, const struct kv_layout *theirs,
                               const uint8_t ticket[KVT_TICKET_BYTES], struct kvt_conn **out, struct err *err)
{
    struct tcp_transport *t = (struct tcp_transport *)base;
    struct sockaddr_storage a;
    socklen_t n;
    (void)theirs;
    if (tcp_address_parse(address, &a, &n) != OK) return err_set(err, ERR_FORMAT, "tcp: malformed address");
    if (t->n_conns >= t->env->max_peers) return err_set(err, ERR_FULL, "tcp: too many connections");
    int fd = socket(a.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || (connect(fd, (struct sockaddr *)&a, n) != 0 && errno != EINPROGRESS)) {
        int code = errno;
        if (fd >= 0) close(fd);
        return err_set(err, ERR_PEER_LOST, "tcp: cannot connect to %.*s: %s", STR_ARG(address), strerror(code));
    }
    struct tcp_conn *c = new_conn(t, fd, TCP_CONNECTING);
    struct kvt_preamble p = { .kind = KVT_PREAMBLE_TICKET };
    memcpy(p.ticket, ticket, sizeof p.ticket);
    queue_preamble(c, &p);
    *out = &c->base;
    return OK;
}

static void accept_conns(struct tcp_transport *t)
{
    for (int i = 0; i < ACCEPTS_PER_POLL; i++) {
        int fd = accept4(t->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0) return;
        if (t->n_conns >= t->env->max_peers) close(fd);
        else new_conn(t, fd, TCP_GREETING);
    }
}

/* ---- incidents ---- */

static struct kvt_incident *add(struct incidents *in, enum kvt_incident_kind kind, struct tcp_conn *c)
{
    struct kvt_incident *i = &in->v[in->n++];
    i->kind = kind;
    i->conn = &c->base;
    i->status = OK;
    i->text[0] = 0;
    return i;
}

/* End the connection; one that was never announced is freed here. Nothing is read or written afterwards. */
static void go_down(struct incidents *in, struct tcp_conn *c, enum status st, const char *text)
{
    if (c->state == TCP_GREETING) {
        tcp_disconnect(&c->base);
        return;
    }
    if (c->state == TCP_IS_DOWN) return;
    c->state = TCP_IS_DOWN;
    (void)epoll_ctl(c->tt->epoll_fd, EPOLL_CTL_DEL, c->fd, NULL);
    shutdown(c->fd, SHUT_RDWR);
    if (c->silent) return;
    struct kvt_incident *i = add(in, KVT_DOWN, c);
    i->status = st;
    snprintf(i->text, sizeof i->text, "tcp: %s", text);
}

/* ---- out ---- */

static int put_iov(const struct tcp_transport *t, const struct tcp_put *p, struct iovec *iov, int cap)
{
    int n = 0;
    if (p->abandoned) {
        for (uint64_t left = p->bytes - p->sent; left && n < cap; n++) {
            uint64_t bytes = left < TRASH_BYTES ? left : TRASH_BYTES;
            iov[n] = (struct iovec){ t->zeros, bytes };
            left -= bytes;
        }
        return n;
    }
    uint64_t skip = p->copy_sent;
    for (uint32_t i = p->i_copy; i < p->n_copies && n < cap; i++, n++, skip = 0)
        iov[n] = (struct iovec){ kvt_source(t->env, p->copies[i].local) + skip, p->copies[i].bytes - skip };
    return n;
}

static void put_advance(struct tcp_put *p, uint64_t bytes)
{
    p->sent += bytes;
    while (!p->abandoned && bytes) {
        uint64_t left = p->copies[p->i_copy].bytes - p->copy_sent;
        uint64_t now = bytes < left ? bytes : left;
        p->copy_sent += now;
        bytes -= now;
        if (p->copy_sent == p->copies[p->i_copy].bytes) {
            p->i_copy++;
            p->copy_sent = 0;
        }
    }
}

static void account_sent(struct tcp_conn *c, uint64_t sent, size_t small)
{
    struct tcp_transport *t = c->tt;
    uint64_t of_queue = sent < small ? sent : small;
    c->queue_sent += of_queue;
    if (sent > small) put_advance(&c->puts[c->put_head], sent - small);
    struct tcp_put *p = &c->puts[c->put_head];
    if (c->n_puts && p->sent == p->bytes) {
        t->done[t->n_done++] = (struct tcp_done){ &c->base, p->tag };
        c->put_head = (c->put_head + 1) % PUTS_MAX;
        c->n_puts--;
    }
    if (c->queue_sent == c->queue.len) {
        c->queue_base += c->queue.len;
        c->queue_sent = 0;
        buf_clear(&c->queue);
    }
}

/* Send as much as the socket takes. ERR_PEER_LOST: reading will tell. */
static enum status write_out(struct tcp_conn *c)
{
    for (uint64_t turn = 0; turn < TURN_BYTES;) {
        struct iovec iov[KVT_IOV_MAX];
        const struct tcp_put *p = c->n_puts ? &c->puts[c->put_head] : NULL;
        size_t end = p ? (size_t)(p->at - c->queue_base) : c->queue.len;
        size_t small = end - c->queue_sent;
        int n = 0;
        if (small) iov[n++] = (struct iovec){ c->queue.data + c->queue_sent, small };
        if (p) n += put_iov(c->tt, p, iov + n, KVT_IOV_MAX - n);
        if (n == 0) break;
        struct msghdr m = { .msg_iov = iov, .msg_iovlen = (size_t)n };
        ssize_t sent = sendmsg(c->fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
        if (sent < 0) return ERR_PEER_LOST;
        account_sent(c, (uint64_t)sent, small);
        turn += (uint64_t)sent;
    }
    want_write(c, c->n_puts || c->queue_sent < c->queue.len);
    return OK;
}

static enum status tcp_put(struct kvt_conn *base, const struct kvt_put *p)
{
    struct tcp_conn *c = (struct tcp_conn *)base;
    if (c->state != TCP_IS_UP) return ERR_PEER_LOST;
    if (c->n_puts == PUTS_MAX || c->queue.len > KVT_QUEUE_BYTES || c->tt->n_done + PUTS_MAX > c->tt->env->max_peers * (uint32_t)PUTS_MAX) return ERR_BUSY;
    struct tcp_put *slot = &c->puts[(c->put_head + c->n_puts) % PUTS_MAX];
    struct kvt_copy *copies = slot->copies;
    if (!copies) copies = MEM_ARRAY(struct kvt_copy, c->tt->env->max_copies);
    memcpy(copies, p->copies, sizeof *copies * p->n_copies);
    uint8_t head[KVT_MESSAGE_MAX];
    buf_add(&c->queue, head, kvt_message_encode(&p->head, head));
    *slot = (struct tcp_put){ .at = c->queue_base + c->queue.len, .bytes = p->head.bytes, .tag = p->tag, .session = p->head.session,
                              .generation = p->head.generation, .copies = copies, .n_copies = p->n_copies };
    c->n_puts++;
    (void)write_out(c); /* at once: the receiver reads while the checksums of this put are made */
    return OK;
}

static void tcp_abandon(struct kvt_conn *base, uint32_t session, uint64_t generation)
{
    struct tcp_conn *c = (struct tcp_conn *)base;
    /* The stream needs the bytes that its heads announce: zeros take the place of the source. The session is over on both sides. */
    for (uint32_t i = 0; i < c->n_puts; i++) {
        struct tcp_put *p = &c->puts[(c->put_head + i) % PUTS_MAX];
        if (p->session == session && p->generation == generation) p->abandoned = true;
    }
}

static enum status tcp_notify(struct kvt_conn *base, const struct kvt_message *m)
{
    struct tcp_conn *c = (struct tcp_conn *)base;
    if (c->state != TCP_IS_UP) return ERR_PEER_LOST;
    if (m->kind == KVT_MSG_NOTE && c->queue.len > KVT_QUEUE_BYTES) return ERR_BUSY;
    if (c->queue.len > KVT_QUEUE_LIMIT) return ERR_FULL;
    uint8_t bytes[KVT_MESSAGE_MAX];
    buf_add(&c->queue, bytes, kvt_message_encode(m, bytes));
    if (c->n_puts == 0) (void)write_out(c);
    else want_write(c, true);
    return OK;
}

static enum status tcp_fence(struct kvt_conn *base)
{
    struct tcp_conn *c = (struct tcp_conn *)base;
    struct incidents none = { 0 };
    c->silent = true;
    go_down(&none, c, OK, "");
    return OK;
}

/* ---- in ---- */

/* Read payload straight to where it belongs, or nowhere. Bytes read, 0 at end of file, -1 with errno. */
static ssize_t read_payload(struct tcp_conn *c)
{
    const struct kvt_env *env = c->tt->env;
    struct iovec iov[KVT_IOV_MAX];
    int n = c->dropping ? 0 : env->place(env->arg, &c->base, &c->frame, c->frame_have, iov, KVT_IOV_MAX);
    uint64_t left = c->frame.bytes - c->frame_have;
    if (n == 0) {
        c->dropping = true;
        iov[0] = (struct iovec){ c->tt->trash, left < TRASH_BYTES ? left : TRASH_BYTES };
        n = 1;
    }
    ssize_t got = readv(c->fd, iov, n);
    if (got <= 0) return got;
    c->frame_have += (uint64_t)got;
    if (!c->dropping) env->placed(env->arg, &c->base, &c->frame, c->frame_have);
    if (c->frame_have == c->frame.bytes) {
        c->in_payload = c->dropping = false;
        c->in_have = 0;
        c->in_need = KVT_MESSAGE_BYTES;
    }
    return got;
}

/* A preamble is complete. False: the connection is over (and may be freed). */
static bool on_preamble(struct incidents *in, struct tcp_conn *c)
{
    struct kvt_preamble p;
    bool good = kvt_preamble_decode(c->in, KVT_PREAMBLE_BYTES, &p) == OK;
    c->in_have = 0;
    c->in_need = KVT_MESSAGE_BYTES;
    if (c->state == TCP_GREETING) {
        const struct kvt_env *env = c->tt->env;
        good = good && p.kind == KVT_PREAMBLE_TICKET && env->admit(env->arg, p.ticket) == OK;
        queue_preamble(c, &(struct kvt_preamble){ .kind = good ? KVT_PREAMBLE_WELCOME : KVT_PREAMBLE_REFUSED });
        if (write_out(c) != OK) good = false;
        if (!good) {
            go_down(in, c, ERR_UNAUTHORIZED, "refused");
            return false;
        }
    } else if (!good || p.kind != KVT_PREAMBLE_WELCOME) {
        bool refused = good && p.kind == KVT_PREAMBLE_REFUSED;
        go_down(in, c, refused ? ERR_UNAUTHORIZED : ERR_FORMAT, refused ? "the receiver refused the ticket" : "the peer does not speak this protocol");
        return false;
    }
    c->state = TCP_IS_UP;
    add(in, KVT_UP, c);
    return true;
}

/* A head, or a head with its tail, is complete. False: the connection is over. */
static bool on_bytes(struct incidents *in, struct tcp_conn *c)
{
    if (c->state != TCP_IS_UP) return on_preamble(in, c);
    struct kvt_message m;
    if (kvt_message_decode_head(c->in, &m) != OK || (m.kind == KVT_MSG_DATA && !c->base.incoming)) {
        go_down(in, c, ERR_FORMAT, "malformed message");
        return false;
    }
    c->in_need = KVT_MESSAGE_BYTES + kvt_message_tail(&m);
    if (c->in_have < c->in_need) return true;
    c->in_have = 0;
    c->in_need = KVT_MESSAGE_BYTES;
    if (m.kind == KVT_MSG_DATA) {
        c->frame = m;
        c->frame_have = 0;
        c->in_payload = true;
        return true;
    }
    memcpy(m.sums, c->in + KVT_MESSAGE_BYTES, kvt_message_tail(&m));
    add(in, KVT_MESSAGE, c)->message = m;
    return true;
}

static void read_in(struct incidents *in, struct tcp_conn *c)
{
    for (uint64_t turn = 0; turn < TURN_BYTES && in->n < in->cap;) {
        bool payload = c->in_payload;
        /* Messages that wait in `in` come before the payload behind them: sessions see both in order. */
        if (payload && in->n) return;
        ssize_t got = payload ? read_payload(c) : recv(c->fd, c->in + c->in_have, c->in_need - c->in_have, MSG_DONTWAIT);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
        if (got <= 0) {
            go_down(in, c, ERR_PEER_LOST, got == 0 ? "the peer closed the connection" : strerror(errno));
            return;
        }
        turn += (uint64_t)got;
        if (payload) continue;
        c->in_have += (size_t)got;
        if (c->in_have == c->in_need && !on_bytes(in, c)) return;
    }
}

static void on_connected(struct incidents *in, struct tcp_conn *c)
{
    int code = 0;
    socklen_t n = sizeof code;
    if (in->n == in->cap) return; /* the next poll finds it again */
    if (getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &code, &n) != 0 || code) {
        go_down(in, c, ERR_PEER_LOST, strerror(code));
        return;
    }
    c->state = TCP_WAITING;
    (void)write_out(c);
}

static void check_deadlines(struct tcp_transport *t, struct incidents *in)
{
    uint64_t now = clock_ms();
    if (now < t->checked_ms + DEADLINE_CHECK_MS) return;
    t->checked_ms = now;
    LIST_FOREACH(c, &t->conns, struct tcp_conn, link) {
        if (c->state >= TCP_IS_UP || now <= c->deadline_ms || in->n == in->cap) continue;
        go_down(in, c, ERR_TIMEOUT, "the peer did not answer in time");
    }
}

static size_t tcp_poll(struct kvt_transport *base, struct kvt_incident *out, size_t cap)
{
    struct tcp_transport *t = (struct tcp_transport *)base;
    struct incidents in = { out, 0, cap };
    while (t->n_done && in.n < cap) {
        t->n_done--;
        add(&in, KVT_PUT_DONE, (struct tcp_conn *)t->done[t->n_done].conn)->tag = t->done[t->n_done].tag;
    }
    if (in.n) return in.n; /* completions reach the sessions before any answer of the peer does */
    struct epoll_event events[16];
    int n = epoll_wait(t->epoll_fd, events, COUNT_OF(events), 0);
    for (int i = 0; i < n; i++) {
        struct tcp_conn *c = events[i].data.ptr;
        if (!c) accept_conns(t);
        else if (c->state == TCP_CONNECTING) on_connected(&in, c);
        else {
            /* Reading first: a put that completes below is told by the next poll, before any answer to it can be read. */
            bool writes = (events[i].events & EPOLLOUT) && c->state != TCP_GREETING;
            if (events[i].events & ~(uint32_t)EPOLLOUT) read_in(&in, c);
            if (writes && c->state != TCP_IS_DOWN) (void)write_out(c);
        }
    }
    check_deadlines(t, &in);
    return in.n;
}

const struct kvt_transport_ops kvt_tcp_ops = {
    .name = "tcp",
    .caps = KVT_CAP_RECEIVER_PLACES,
    .open = tcp_open,
    .close = tcp_close,
    .wait_fd = tcp_wait_fd,
    .port = tcp_port,
    .export_address = tcp_export_address,
    .can_reach = tcp_can_reach,
    .connect = tcp_connect,
    .put = tcp_put,
    .abandon = tcp_abandon,
    .notify = tcp_notify,
    .flush = tcp_flush,
    .fence = tcp_fence,
    .poll = tcp_poll, .link_speed = tcp_link_speed,
    .disconnect = tcp_disconnect,
};
