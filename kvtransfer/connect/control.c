/* control.c - the hub of control connections; see control.h for the protocol and its invariants.
 *
 * A connection goes CONNECTING → WAITING → OPEN or HANDSHAKE → OPEN, then LOST (reported, not
 * closed yet), then CLOSING: the transport has closed it, queued frames still go out, the write
 * side is shut down, and input is read and dropped, because closing a socket with unread bytes
 * resets it and loses the last frames (RFC 9293 3.10.4; Linux tcp_close). control_poll frees
 * connections only at its beginning, so that a handler may close any connection while events about
 * it are being handled.
 * Thread: transfer. */
#include "kvtransfer/connect/control.h"

#include <assert.h>
#include <errno.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "kvtransfer/connect/accept.h"
#include "kvtransfer/connect/address.h"
#include "shared/base/address/unproven.h"
#include "shared/base/clock.h"
#include "shared/base/list.h"
#include "shared/base/mem.h"

enum {
    FRAME_MAGIC = 0x4346, /* "FC" */
    ACCEPTS_PER_POLL = 16,
    CLOSING_MS = 1000,
    CLOSING_READS = 16, /* per poll, so that a peer that keeps sending does not hold the thread */
    DEADLINE_CHECK_MS = 50,
    KEEPALIVE_S = 1,        /* idle time before the first probe, and between probes */
    USER_TIMEOUT_MS = 2000, /* with keepalive: connections end 2 s after the host is gone, idle or
                             * not (tcp(7)) */
    COMPACT_BYTES = 64 * 1024
};

struct control_wire_frame {
    uint16_t magic;
    uint8_t kind, zero;
    uint32_t length;
    uint64_t after;
};
static_assert(sizeof(struct control_wire_frame) == CONTROL_HEAD_BYTES, "wire size");
static_assert(CONTROL_HEAD_BYTES + CONTROL_BODY_MAX <= CONTROL_IN_BYTES, "a whole frame fits");

enum control_state {
    CONTROL_STATE_CONNECTING,
    CONTROL_STATE_WAITING,
    CONTROL_STATE_HANDSHAKE,
    CONTROL_STATE_OPEN,
    CONTROL_STATE_LOST,
    CONTROL_STATE_CLOSING
};

struct control_conn_impl {
    struct control_conn base;
    struct list link;
    struct unproven_place place; /* an incoming one's, until its ticket was admitted */
    bool counted;                /* in hub->n_conns */
    enum control_state state;
    int fd;
    uint64_t deadline_ms;           /* CONNECTING, WAITING, HANDSHAKE, CLOSING */
    bool wants_write, shut, broken; /* broken: the socket takes no more bytes */
    struct buf out;
    size_t out_sent; /* bytes of it the kernel has taken */
    size_t in_have;
    uint8_t in[CONTROL_IN_BYTES];
};

struct control_hub {
    const struct kvt_env *env;
    const char *transport;
    int epoll_fd, listen_fd;
    uint16_t port;
    const char *ifname; /* outgoing connections leave from it; NULL: from where the
                         * kernel chooses */
    struct buf address;
    struct list conns;
    struct unproven strangers;
    uint32_t n_conns;                     /* without those that were never admitted */
    uint64_t checked_ms, accept_again_ms; /* accept_again_ms: 0 while accepting */
};

/* ---- frames ---- */

enum status control_frame_decode(const void *in, size_t n, struct control_frame *out, size_t *used)
{
    struct control_wire_frame w;
    if (n < sizeof w) return ERR_BUSY;
    memcpy(&w, in, sizeof w);
    if (w.magic != FRAME_MAGIC || w.zero || w.length > CONTROL_BODY_MAX) return ERR_FORMAT;
    if (n - sizeof w < w.length) return ERR_BUSY;
    *out = (struct control_frame){
        .kind = w.kind,
        .after = w.after,
        .body = { (const char *)in + sizeof w, w.length },
    };
    *used = sizeof w + w.length;
    return OK;
}

void control_frame_encode(struct buf *out, uint8_t kind, uint64_t after, const void *body, size_t n)
{
    struct control_wire_frame w = {
        .magic = FRAME_MAGIC, .kind = kind, .length = (uint32_t)n, .after = after
    };
    buf_add(out, &w, sizeof w);
    if (n) buf_add(out, body, n);
}

/* ---- connections ---- */

static void watch(struct control_conn_impl *c, int op)
{
    struct epoll_event e = { .events = EPOLLIN | (c->wants_write ? EPOLLOUT : 0u), .data.ptr = c };
    (void)epoll_ctl(c->base.hub->epoll_fd, op, c->fd, &e);
}

static void want_write(struct control_conn_impl *c, bool yes)
{
    if (c->wants_write == yes) return;
    c->wants_write = yes;
    watch(c, EPOLL_CTL_MOD);
}

static void unwatch(struct control_conn_impl *c)
{
    (void)epoll_ctl(c->base.hub->epoll_fd, EPOLL_CTL_DEL, c->fd, NULL);
}

static void set_options(int fd)
{
    int one = 1, seconds = KEEPALIVE_S, timeout_ms = USER_TIMEOUT_MS;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &seconds, sizeof seconds);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &seconds, sizeof seconds);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout_ms, sizeof timeout_ms);
}

static void count_conn(struct control_conn_impl *c)
{
    c->counted = true;
    c->base.hub->n_conns++;
}

static struct control_conn_impl *new_conn(struct control_hub *h, int fd, enum control_state state,
                                          void *owner)
{
    struct control_conn_impl *c = MEM_NEW(struct control_conn_impl);
    c->base = (struct control_conn){
        .hub = h,
        .incoming = state == CONTROL_STATE_HANDSHAKE,
        .owner = owner,
    };
    c->fd = fd;
    c->state = state;
    c->deadline_ms = clock_ms() + KVT_CONNECT_MS;
    c->wants_write = state == CONTROL_STATE_CONNECTING;
    set_options(fd);
    list_push(&h->conns, &c->link);
    if (!c->base.incoming) count_conn(c);
    watch(c, EPOLL_CTL_ADD);
    return c;
}

static void free_conn(struct control_conn_impl *c)
{
    list_remove(&c->link);
    unproven_leave(&c->place);
    c->base.hub->n_conns -= c->counted;
    close(c->fd);
    buf_release(&c->out);
    mem_free(c);
}

/* Writes as much as the kernel accepts. A socket that fails is `broken`; reading will say why. */
static void write_out(struct control_conn_impl *c)
{
    while (!c->broken && c->out_sent < c->out.len) {
        ssize_t n = send(c->fd, c->out.data + c->out_sent, c->out.len - c->out_sent,
                         MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
        if (n < 0) c->broken = true;
        else c->out_sent += (size_t)n;
    }
    if (c->broken || c->out_sent == c->out.len) {
        buf_clear(&c->out);
        c->out_sent = 0;
    } else if (c->out_sent >= COMPACT_BYTES) {
        buf_consume(&c->out, c->out_sent);
        c->out_sent = 0;
    }
    want_write(c, c->out.len > 0);
}

static void queue_preamble(struct control_conn_impl *c, const struct kvt_preamble *p)
{
    uint8_t bytes[KVT_PREAMBLE_BYTES];
    kvt_preamble_encode(p, bytes);
    buf_add(&c->out, bytes, sizeof bytes);
}

/* Begins to close a connection that the transport or the protocol no longer needs. */
static void begin_close(struct control_conn_impl *c)
{
    /* nothing can go out any more, or nothing has come in */
    if (c->state == CONTROL_STATE_LOST || c->state == CONTROL_STATE_CONNECTING) {
        if (c->state == CONTROL_STATE_CONNECTING) unwatch(c);
        c->broken = true;
    }
    c->state = CONTROL_STATE_CLOSING;
    c->deadline_ms = clock_ms() + CLOSING_MS;
    if (!c->broken) write_out(c);
}

/* One step of CLOSING; frees when done. */
static void step_closing(struct control_conn_impl *c, uint64_t now_ms)
{
    bool over = c->broken || now_ms > c->deadline_ms;
    if (!over && c->out.len == 0 && !c->shut) {
        c->shut = true;
        shutdown(c->fd, SHUT_WR);
    }
    for (int i = 0; !over && i < CLOSING_READS; i++) {
        ssize_t n = recv(c->fd, c->in, sizeof c->in, MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
        over = n <= 0;
    }
    if (over) free_conn(c);
}

static void emit(struct control_conn_impl *c, control_handler *on_event, void *arg,
                 struct control_event ev)
{
    ev.conn = &c->base;
    on_event(arg, &ev);
}

/* Ends a connection for a reason of this side or the network; one that was never announced ends
 * silently. */
static void lose(struct control_conn_impl *c, enum status st, const char *text,
                 control_handler *on_event, void *arg)
{
    if (c->state >= CONTROL_STATE_LOST) return;
    if (c->state == CONTROL_STATE_HANDSHAKE) {
        c->broken = true;
        begin_close(c);
        return;
    }
    unwatch(c);
    shutdown(c->fd, SHUT_RDWR);
    c->state = CONTROL_STATE_LOST;
    struct control_event ev = { .kind = CONTROL_LOST, .status = st };
    snprintf(ev.text, sizeof ev.text, "%s: %s", c->base.hub->transport, text);
    emit(c, on_event, arg, ev);
}

void control_close(struct control_conn *base) { begin_close((struct control_conn_impl *)base); }

/* ---- in ---- */

/* Handles a complete preamble. False: the connection is over. */
static bool on_preamble(struct control_conn_impl *c, control_handler *on_event, void *arg)
{
    struct kvt_preamble p;
    const struct kvt_env *env = c->base.hub->env;
    bool good = kvt_preamble_decode(c->in, KVT_PREAMBLE_BYTES, &p) == OK;
    if (c->state == CONTROL_STATE_HANDSHAKE) {
        if (!good || p.kind != KVT_PREAMBLE_TICKET) {
            lose(c, ERR_FORMAT, "", on_event, arg);
            return false;
        }
        good = c->base.hub->n_conns < env->max_peers && env->admit(env->arg, p.ticket) == OK;
        queue_preamble(c, &(struct kvt_preamble){
                              .kind = good ? KVT_PREAMBLE_WELCOME : KVT_PREAMBLE_REFUSED,
                          });
        if (!good) {
            begin_close(c);
            return false;
        }
        unproven_leave(&c->place);
        count_conn(c);
        write_out(c);
    } else if (!good || p.kind != KVT_PREAMBLE_WELCOME) {
        bool refused = good && p.kind == KVT_PREAMBLE_REFUSED;
        lose(c, refused ? ERR_UNAUTHORIZED : ERR_FORMAT,
             refused ? "the receiver refused the ticket" : "the peer does not speak this protocol",
             on_event, arg);
        return false;
    }
    c->state = CONTROL_STATE_OPEN;
    emit(c, on_event, arg, (struct control_event){ .kind = CONTROL_OPENED });
    return true;
}

/* Handles every complete frame in c->in. */
static void parse(struct control_conn_impl *c, control_handler *on_event, void *arg)
{
    size_t at = 0;
    if (c->state < CONTROL_STATE_OPEN) {
        if (c->in_have < KVT_PREAMBLE_BYTES) return;
        if (!on_preamble(c, on_event, arg)) return;
        at = KVT_PREAMBLE_BYTES;
    }
    while (c->state == CONTROL_STATE_OPEN) { /* the handler may close it */
        struct control_frame f;
        size_t used = 0;
        enum status st = control_frame_decode(c->in + at, c->in_have - at, &f, &used);
        if (st == ERR_FORMAT) lose(c, st, "malformed frame", on_event, arg);
        if (st != OK) break;
        emit(c, on_event, arg,
             (struct control_event){
                 .kind = CONTROL_FRAME, .frame = f.kind, .after = f.after, .body = f.body });
        at += used;
    }
    memmove(c->in, c->in + at, c->in_have - at);
    c->in_have -= at;
}

/* Reads once per connection and poll, so that connections share the thread; epoll reports again
 * what is left. */
static void read_in(struct control_conn_impl *c, control_handler *on_event, void *arg)
{
    ssize_t n;
    do n = recv(c->fd, c->in + c->in_have, sizeof c->in - c->in_have, MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (n <= 0) {
        lose(c, ERR_PEER_LOST, n == 0 ? "the peer closed the connection" : strerror(errno),
             on_event, arg);
        return;
    }
    c->in_have += (size_t)n;
    parse(c, on_event, arg);
}

static void on_connected(struct control_conn_impl *c, control_handler *on_event, void *arg)
{
    int code = 0;
    socklen_t n = sizeof code;
    if (getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &code, &n) != 0) code = errno;
    if (code) {
        lose(c, ERR_PEER_LOST, strerror(code), on_event, arg);
        return;
    }
    c->state = CONTROL_STATE_WAITING;
    write_out(c);
}

/* ---- the hub ---- */

/* A stranger's connection ends, since a newer one needs its place; the next poll frees it. */
static void give_way(struct control_conn_impl *c)
{
    c->broken = true;
    if (c->state == CONTROL_STATE_HANDSHAKE) begin_close(c);
}

static void accept_conns(struct control_hub *h)
{
    for (int i = 0; i < ACCEPTS_PER_POLL; i++) {
        int fd = kvt_accept(h->transport, h->epoll_fd, h->listen_fd, &h->accept_again_ms);
        if (fd < 0) return;
        struct control_conn_impl *c = new_conn(h, fd, CONTROL_STATE_HANDSHAKE, NULL);
        struct sockaddr_storage local, remote;
        control_addresses(&c->base, &local, &remote);
        struct unproven_place *gave = unproven_enter(
            &h->strangers, &c->place, unproven_source((const struct sockaddr *)&remote));
        if (gave) give_way(LIST_ENTRY(gave, struct control_conn_impl, place));
    }
}

static void check_deadlines(struct control_hub *h, uint64_t now_ms, control_handler *on_event,
                            void *arg)
{
    if (now_ms < h->checked_ms + DEADLINE_CHECK_MS) return;
    h->checked_ms = now_ms;
    LIST_FOREACH (c, &h->conns, struct control_conn_impl, link)
        if (c->state < CONTROL_STATE_OPEN && now_ms > c->deadline_ms)
            lose(c, ERR_TIMEOUT, "the peer did not answer in time", on_event, arg);
}

void control_poll(struct control_hub *h, control_handler *on_event, void *arg)
{
    uint64_t now_ms = clock_ms();
    kvt_accept_resume(h->epoll_fd, h->listen_fd, &h->accept_again_ms, now_ms);
    LIST_FOREACH (c, &h->conns, struct control_conn_impl, link)
        if (c->state == CONTROL_STATE_CLOSING) step_closing(c, now_ms);
    struct epoll_event events[16];
    int n = epoll_wait(h->epoll_fd, events, COUNT_OF(events), 0);
    for (int i = 0; i < n; i++) {
        struct control_conn_impl *c = events[i].data.ptr;
        if (!c) accept_conns(h);
        else if (c->state == CONTROL_STATE_CONNECTING) on_connected(c, on_event, arg);
        else if (c->state < CONTROL_STATE_LOST) {
            if (events[i].events & EPOLLOUT) write_out(c);
            if (events[i].events & ~(uint32_t)EPOLLOUT) read_in(c, on_event, arg);
        } else if (c->state == CONTROL_STATE_CLOSING && (events[i].events & EPOLLOUT)) write_out(c);
    }
    check_deadlines(h, now_ms, on_event, arg);
}

enum status control_open(const struct kvt_env *env, const char *transport, uint16_t port,
                         const char *ifname, struct control_hub **out, struct err *err)
{
    struct control_hub *h = MEM_NEW(struct control_hub);
    h->env = env;
    h->transport = transport;
    h->listen_fd = -1;
    list_init(&h->conns);
    unproven_init(&h->strangers, env->max_peers);
    h->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    h->ifname = ifname;
    struct kvt_listener l = {
        .host = env->listen_host,
        .advertise = env->advertise_host,
        .ifname = ifname,
        .port = port,
        .fd = -1,
        .address = &h->address,
    };
    enum status st = h->epoll_fd < 0 ? err_set(err, ERR_CONFIG, "no epoll: %s", strerror(errno))
                                     : kvt_address_serve(&l, err);
    h->listen_fd = l.fd;
    h->port = l.port;
    if (st != OK) {
        err_prefix(err, "%s: ", transport);
        control_hub_free(h);
        return st;
    }
    struct epoll_event e = { .events = EPOLLIN };
    (void)epoll_ctl(h->epoll_fd, EPOLL_CTL_ADD, h->listen_fd, &e);
    *out = h;
    return OK;
}

void control_hub_free(struct control_hub *h)
{
    if (!h) return;
    LIST_FOREACH (c, &h->conns, struct control_conn_impl, link) {
        if (c->state == CONTROL_STATE_OPEN || c->state == CONTROL_STATE_CLOSING) {
            write_out(c);
            c->deadline_ms = UINT64_MAX;
            step_closing(c, 0); /* drops the input, see above */
        }
    }
    LIST_FOREACH (c, &h->conns, struct control_conn_impl, link) free_conn(c);
    if (h->listen_fd >= 0) close(h->listen_fd);
    if (h->epoll_fd >= 0) close(h->epoll_fd);
    buf_release(&h->address);
    mem_free(h);
}

int control_wait_fd(const struct control_hub *h) { return h->epoll_fd; }
uint16_t control_port(const struct control_hub *h) { return h->port; }
struct str control_address(const struct control_hub *h) { return buf_str(&h->address); }

bool control_can_reach(struct str address)
{
    struct sockaddr_storage a;
    socklen_t n;
    return kvt_address_parse(address, &a, &n) == OK;
}

/* Starts to connect a socket. For an address of this host the kernel chooses the interface. */
static enum status begin_connect(const struct control_hub *h, struct str address,
                                 const struct sockaddr_storage *a, socklen_t n, int *out,
                                 struct err *err)
{
    int fd = socket(a->ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return err_set(err, ERR_PEER_LOST, "no socket: %s", strerror(errno));
    enum status st = kvt_address_is_local(a, n)
                         ? OK
                         : kvt_address_bind_interface(fd, h->ifname, a->ss_family, err);
    if (st == OK && connect(fd, (const struct sockaddr *)a, n) != 0 && errno != EINPROGRESS)
        st = err_set(err, ERR_PEER_LOST, "cannot connect to %.*s: %s", STR_ARG(address),
                     strerror(errno));
    if (st == OK) *out = fd;
    else close(fd);
    return st;
}

enum status control_connect(struct control_hub *h, struct str address,
                            const uint8_t ticket[KVT_TICKET_BYTES], void *owner,
                            struct control_conn **out, struct err *err)
{
    struct sockaddr_storage a;
    socklen_t n;
    if (kvt_address_parse(address, &a, &n) != OK)
        return err_set(err, ERR_FORMAT, "%s: malformed address", h->transport);
    if (h->n_conns >= h->env->max_peers)
        return err_set(err, ERR_FULL, "%s: too many connections", h->transport);
    int fd = -1;
    if (begin_connect(h, address, &a, n, &fd, err) != OK) {
        err_prefix(err, "%s: ", h->transport);
        return ERR_PEER_LOST;
    }
    struct control_conn_impl *c = new_conn(h, fd, CONTROL_STATE_CONNECTING, owner);
    struct kvt_preamble p = { .kind = KVT_PREAMBLE_TICKET };
    memcpy(p.ticket, ticket, sizeof p.ticket);
    queue_preamble(c, &p);
    *out = &c->base;
    return OK;
}

enum status control_send(struct control_conn *base, uint8_t frame, uint64_t after, const void *body,
                         size_t n)
{
    struct control_conn_impl *c = (struct control_conn_impl *)base;
    if (c->state != CONTROL_STATE_OPEN || c->broken) return ERR_PEER_LOST;
    if (n > CONTROL_BODY_MAX) return ERR_INVALID;
    if (control_queued(base) > KVT_QUEUE_LIMIT) return ERR_FULL;
    bool idle = c->out.len == 0;
    control_frame_encode(&c->out, frame, after, body, n);
    if (idle) write_out(c);
    return OK;
}

size_t control_queued(const struct control_conn *base)
{
    const struct control_conn_impl *c = (const struct control_conn_impl *)base;
    return c->out.len - c->out_sent;
}

void control_addresses(const struct control_conn *base, struct sockaddr_storage *local,
                       struct sockaddr_storage *remote)
{
    const struct control_conn_impl *c = (const struct control_conn_impl *)base;
    socklen_t n = sizeof *local, m = sizeof *remote;
    memset(local, 0, sizeof *local);
    memset(remote, 0, sizeof *remote);
    (void)getsockname(c->fd, (struct sockaddr *)local, &n);
    (void)getpeername(c->fd, (struct sockaddr *)remote, &m);
}
