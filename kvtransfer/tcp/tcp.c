/* tcp.c - transport tcp, between any two hosts: sendmsg sends KV straight from the sender's pool,
 * and the receiver reads it straight into the granted blocks.
 *
 * This file has the transport, connections with their links, and poll. tcp_out.c sends, tcp_in.c
 * receives; tcp.h has the protocol and its invariants.
 * Thread: transfer. */
#include "kvtransfer/tcp/tcp.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "kvtransfer/connect/accept.h"
#include "kvtransfer/connect/address.h"
#include "kvtransfer/transports.h"
#include "shared/base/clock.h"
#include "shared/base/hash/hash.h"
#include "shared/base/mem.h"

enum {
    ACCEPTS_PER_POLL = 16,
    DEADLINE_CHECK_MS = 50,
    /* Unacknowledged bytes older than this end the connection, because a host that is gone sends
     * nothing. */
    USER_TIMEOUT_MS = 5000,
    /* Links per peer on another host: one core and one stream cannot fill a fast NIC. */
    LINKS_REMOTE = 4
};

/* ---- links ---- */

void tcp_watch(struct tcp_link *l, uint32_t events)
{
    if (l->events == events) return;
    l->events = events;
    struct epoll_event e = { .events = events, .data.ptr = l };
    (void)epoll_ctl(l->tt->epoll_fd, EPOLL_CTL_MOD, l->fd, &e);
}

static void set_options(struct tcp_link *l, bool same_host)
{
    int one = 1, seconds = 1, probes = 3, timeout_ms = USER_TIMEOUT_MS;
    (void)setsockopt(l->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    (void)setsockopt(l->fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
    (void)setsockopt(l->fd, IPPROTO_TCP, TCP_KEEPIDLE, &seconds, sizeof seconds);
    (void)setsockopt(l->fd, IPPROTO_TCP, TCP_KEEPINTVL, &seconds, sizeof seconds);
    (void)setsockopt(l->fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
    (void)setsockopt(l->fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout_ms, sizeof timeout_ms);
    /* Inside a host no packet is lost, and a congestion control that paces (bbr) halves the rate.
     * This must come before connect. */
    if (same_host) (void)setsockopt(l->fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
}

static struct tcp_link *new_link(struct tcp_transport *t, struct tcp_conn *c, uint32_t index,
                                 int fd)
{
    struct tcp_link *l = MEM_NEW(struct tcp_link);
    l->tt = t;
    l->conn = c;
    l->index = index;
    l->fd = fd;
    l->state = c ? TCP_CONNECTING : TCP_HANDSHAKE;
    l->deadline_ms = clock_ms() + KVT_CONNECT_MS;
    l->events = EPOLLIN | (c ? EPOLLOUT : 0u);
    set_options(l, c && c->same_host);
    struct epoll_event e = { .events = l->events, .data.ptr = l };
    (void)epoll_ctl(t->epoll_fd, EPOLL_CTL_ADD, fd, &e);
    if (c) c->links[index] = l;
    return l;
}

void tcp_link_free(struct tcp_link *l)
{
    unproven_leave(&l->place);
    close(l->fd);
    buf_release(&l->queue);
    mem_free(l);
}

/* Resets the link, which drops what MSG_ZEROCOPY left pinned in the send queue: no source is read
 * afterwards. */
static void abort_link(struct tcp_link *l)
{
    (void)epoll_ctl(l->tt->epoll_fd, EPOLL_CTL_DEL, l->fd, NULL);
    struct sockaddr nobody = { .sa_family = AF_UNSPEC };
    if (l->zc_sent != l->zc_done && connect(l->fd, &nobody, sizeof nobody) == 0) return;
    shutdown(l->fd, SHUT_RDWR);
}

/* Opens a socket and starts to connect it to the receiver. */
static enum status dial(struct tcp_conn *c, uint32_t index, const uint8_t ticket[KVT_TICKET_BYTES],
                        struct err *err)
{
    struct sockaddr_storage a;
    socklen_t n;
    if (kvt_address_parse(buf_str(&c->address), &a, &n) != OK)
        return err_set(err, ERR_FORMAT, "tcp: malformed address");
    c->same_host = kvt_address_is_local(&a, n);
    int fd = socket(a.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return err_set(err, ERR_PEER_LOST, "tcp: no socket: %s", strerror(errno));
    struct tcp_link *l = new_link(c->tt, c, index, fd);
    enum status st = c->same_host ? OK
                                  : kvt_address_bind_interface(fd, c->tt->env->tuning.socket_ifname,
                                                               a.ss_family, err);
    if (st != OK) {
        err_prefix(err, "tcp: ");
        return st;
    }
    if (connect(fd, (struct sockaddr *)&a, n) != 0 && errno != EINPROGRESS)
        return err_set(err, ERR_PEER_LOST, "tcp: cannot connect to %.*s: %s",
                       STR_ARG(buf_str(&c->address)), strerror(errno));
    struct kvt_preamble p = { .kind = KVT_PREAMBLE_TICKET };
    memcpy(p.ticket, ticket, sizeof p.ticket);
    tcp_queue_preamble(l, &p);
    return OK;
}

/* ---- connections ---- */

static struct tcp_conn *new_conn(struct tcp_transport *t, bool incoming,
                                 const uint8_t ticket[KVT_TICKET_BYTES])
{
    struct tcp_conn *c = MEM_NEW(struct tcp_conn);
    c->base.t = &t->base;
    c->base.incoming = incoming;
    c->tt = t;
    c->n_links = 1;
    c->deadline_ms = clock_ms() + KVT_CONNECT_MS;
    memcpy(c->ticket, ticket, sizeof c->ticket);
    list_push(&t->conns, &c->link);
    t->n_conns++;
    return c;
}

/* Forgets completions that nobody will ask for. */
static void forget_done(struct tcp_conn *c)
{
    struct tcp_transport *t = c->tt;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < t->n_done; i++)
        if (t->done[i].conn != &c->base) t->done[kept++] = t->done[i];
    t->n_done = kept;
}

static void tcp_disconnect(struct kvt_conn *base)
{
    struct tcp_conn *c = (struct tcp_conn *)base;
    struct tcp_transport *t = c->tt;
    forget_done(c);
    t->n_unfinished -= (uint32_t)(c->n_put - c->n_completed);
    if (c->backlog) t->n_backlog--;
    list_remove(&c->link);
    t->n_conns--;
    for (uint32_t i = 0; i < TCP_LINKS_MAX; i++) {
        if (!c->links[i]) continue;
        if (c->links[i]->zc_sent != c->links[i]->zc_done) abort_link(c->links[i]);
        tcp_link_free(c->links[i]);
    }
    for (uint32_t i = 0; i < TCP_PUTS_MAX; i++) mem_free(c->puts[i].copies);
    buf_release(&c->address);
    mem_free(c);
}

/* Derives the ticket of link i from the first link's. */
static void join_ticket(const struct tcp_conn *c, uint32_t i, uint8_t out[KVT_TICKET_BYTES])
{
    uint8_t digest[32], label[8] = { 't', 'c', 'p', ' ', 'l', 'i', 'n', (uint8_t)i };
    hmac_sha256(c->ticket, sizeof c->ticket, label, sizeof label, digest);
    memcpy(out, digest, KVT_TICKET_BYTES);
}

enum status tcp_make_links(struct tcp_conn *c, uint32_t n, struct err *err)
{
    c->n_links = n;
    for (uint32_t i = 1; i < n; i++) {
        uint8_t ticket[KVT_TICKET_BYTES];
        join_ticket(c, i, ticket);
        TRY(dial(c, i, ticket, err));
    }
    return OK;
}

static enum status tcp_connect(struct kvt_transport *base, struct str address,
                               const struct kv_layout *theirs,
                               const uint8_t ticket[KVT_TICKET_BYTES], struct kvt_conn **out,
                               struct err *err)
{
    struct tcp_transport *t = (struct tcp_transport *)base;
    (void)theirs;
    if (t->n_conns >= t->env->max_peers) return err_set(err, ERR_FULL, "tcp: too many connections");
    struct tcp_conn *c = new_conn(t, false, ticket);
    buf_add_str(&c->address, address);
    enum status st = dial(c, 0, ticket, err);
    if (st != OK) {
        tcp_disconnect(&c->base);
        return st;
    }
    *out = &c->base;
    return OK;
}

/* Sockets per peer: the operator's number; otherwise one within a host, where more would share the
 * same cores, and LINKS_REMOTE elsewhere. */
static uint32_t choose_links(const struct tcp_conn *c)
{
    uint32_t wanted = c->tt->env->tuning.tcp_connections;
    if (wanted) return wanted < TCP_LINKS_MAX ? wanted : TCP_LINKS_MAX;
    return c->same_host ? 1 : LINKS_REMOTE;
}

static void adopt(struct tcp_conn *c, struct tcp_link *l, uint32_t index)
{
    unproven_leave(&l->place);
    l->conn = c;
    l->index = index;
    c->links[index] = l;
}

struct tcp_conn *tcp_admit(struct tcp_link *l, const uint8_t ticket[KVT_TICKET_BYTES])
{
    struct tcp_transport *t = l->tt;
    LIST_FOREACH (c, &t->conns, struct tcp_conn, link) {
        for (uint32_t i = 1; c->base.incoming && c->state == TCP_ASSEMBLING && i < c->n_links;
             i++) {
            uint8_t expected[KVT_TICKET_BYTES];
            if (c->links[i]) continue;
            join_ticket(c, i, expected);
            if (!equal_constant_time(expected, ticket, sizeof expected)) continue;
            adopt(c, l, i);
            return c;
        }
    }
    if (t->n_conns >= t->env->max_peers || t->env->admit(t->env->arg, ticket) != OK) return NULL;
    struct tcp_conn *c = new_conn(t, true, ticket);
    c->same_host = kvt_address_same_host(l->fd);
    c->n_links = choose_links(c);
    adopt(c, l, 0);
    return c;
}

void tcp_link_is_up(struct tcp_events *evs, struct tcp_link *l)
{
    struct tcp_conn *c = l->conn;
    l->state = TCP_LINK_UP;
    if (c->base.incoming && l->index) tcp_watch(l, (l->events & ~(uint32_t)EPOLLIN) | EPOLLRDHUP);
    if (!c->base.incoming && l->tt->env->tuning.zerocopy == KVT_ON) {
        int one = 1;
        l->zerocopy = setsockopt(l->fd, SOL_SOCKET, SO_ZEROCOPY, &one, sizeof one) == 0;
    }
    if (++c->n_links_up < c->n_links) return;
    c->state = TCP_IS_UP;
    c->link_speed = c->same_host ? 0 : kvt_address_link_speed(c->links[0]->fd);
    tcp_add_event(evs, KVT_UP, c);
}

/* ---- events ---- */

struct kvt_transport_event *tcp_add_event(struct tcp_events *evs,
                                          enum kvt_transport_event_kind kind, struct tcp_conn *c)
{
    struct kvt_transport_event *i = &evs->v[evs->n++];
    i->kind = kind;
    i->conn = &c->base;
    i->status = OK;
    i->text[0] = 0;
    return i;
}

void tcp_go_down(struct tcp_events *evs, struct tcp_conn *c, enum status st, const char *text)
{
    if (c->state == TCP_IS_DOWN) return;
    if (c->state == TCP_ASSEMBLING && c->base.incoming) { /* never announced */
        c->detached = c->must_reap = true;
        c->tt->n_to_reap++;
    }
    c->state = TCP_IS_DOWN;
    for (uint32_t i = 0; i < TCP_LINKS_MAX; i++)
        if (c->links[i]) abort_link(c->links[i]);
    forget_done(c); /* DOWN stands for them, and after it the session layer frees the connection */
    if (c->detached) return;
    struct kvt_transport_event *i = tcp_add_event(evs, KVT_DOWN, c);
    i->status = st;
    snprintf(i->text, sizeof i->text, "%s%s", strncmp(text, "tcp:", 4) == 0 ? "" : "tcp: ", text);
}

static enum status tcp_fence(struct kvt_conn *base)
{
    struct tcp_conn *c = (struct tcp_conn *)base;
    struct tcp_events none = { 0 };
    c->detached = true;
    tcp_go_down(&none, c, OK, "");
    return OK;
}

static void on_connected(struct tcp_events *evs, struct tcp_link *l)
{
    int code = 0;
    socklen_t n = sizeof code;
    if (evs->n == evs->cap) return; /* the next poll finds it again */
    if (getsockopt(l->fd, SOL_SOCKET, SO_ERROR, &code, &n) != 0 || code) {
        tcp_go_down(evs, l->conn, ERR_PEER_LOST, strerror(code));
        return;
    }
    l->state = TCP_WAITING;
    (void)tcp_write_out(l);
}

/* Not inside the loop over events: a link that gives its place up may be among the later ones. */
static void accept_links(struct tcp_transport *t)
{
    for (int i = 0; i < ACCEPTS_PER_POLL; i++) {
        int fd = kvt_accept("tcp", t->epoll_fd, t->listen_fd, &t->accept_again_ms);
        if (fd < 0) return;
        struct tcp_link *l = new_link(t, NULL, 0, fd);
        struct sockaddr_storage a = { .ss_family = AF_UNSPEC };
        socklen_t n = sizeof a;
        (void)getpeername(fd, (struct sockaddr *)&a, &n);
        struct unproven_place *gave = unproven_enter(&t->strangers, &l->place,
                                                     unproven_source((struct sockaddr *)&a));
        if (gave) tcp_link_free(LIST_ENTRY(gave, struct tcp_link, place));
    }
}

static void check_deadlines(struct tcp_transport *t, struct tcp_events *evs)
{
    uint64_t now = clock_ms();
    kvt_accept_resume(t->epoll_fd, t->listen_fd, &t->accept_again_ms, now);
    if (now < t->checked_ms + DEADLINE_CHECK_MS) return;
    t->checked_ms = now;
    LIST_FOREACH (l, &t->strangers.places, struct tcp_link, place.link)
        if (now > l->deadline_ms) tcp_link_free(l);
    LIST_FOREACH (c, &t->conns, struct tcp_conn, link)
        if (c->state == TCP_ASSEMBLING && now > c->deadline_ms && evs->n < evs->cap)
            tcp_go_down(evs, c, ERR_TIMEOUT, "the peer did not answer in time");
}

/* Frees ended connections; not inside the loop over events, because later ones may name their
 * links. */
static void reap_conns(struct tcp_transport *t)
{
    LIST_FOREACH (c, &t->conns, struct tcp_conn, link)
        if (c->must_reap) tcp_disconnect(&c->base);
    t->n_to_reap = 0;
}

/* Handles bytes that were read ahead and had to wait. */
static void resume_reading(struct tcp_transport *t, struct tcp_events *evs)
{
    LIST_FOREACH (c, &t->conns, struct tcp_conn, link) {
        if (!c->backlog) continue;
        c->backlog = false;
        t->n_backlog--;
        if (c->state != TCP_IS_DOWN) tcp_read_in(evs, c->links[0]);
    }
}

static void on_event(struct tcp_events *evs, struct tcp_link *l, uint32_t events)
{
    struct tcp_conn *c = l->conn;
    if (c && c->state == TCP_IS_DOWN) return; /* another link ended it in this poll */
    if (l->state == TCP_CONNECTING) {
        on_connected(evs, l);
        return;
    }
    if ((events & EPOLLERR) && l->zc_sent != l->zc_done) tcp_read_zerocopy_completions(l);
    bool ended = events & (EPOLLHUP | EPOLLRDHUP), reads = l->events & EPOLLIN;
    int code = 0;
    socklen_t n = sizeof code;
    if (!reads && (events & EPOLLERR))
        ended |= getsockopt(l->fd, SOL_SOCKET, SO_ERROR, &code, &n) != 0 || code;
    if (!reads && ended) {
        if (evs->n < evs->cap)
            tcp_go_down(evs, c, ERR_PEER_LOST,
                        code ? strerror(code) : "the peer closed the connection");
        return;
    }
    /* Reads first: the next poll reports a put that completes below, before any answer to it can be
     * read. */
    bool writes = (events & EPOLLOUT) && l->state != TCP_HANDSHAKE;
    if (!(events & ~(uint32_t)EPOLLOUT)) {
        (void)tcp_write_out(l);
        return;
    }
    if (!writes) {
        tcp_read_in(evs, l);
        return;
    }
    tcp_read_in(evs, l);
    if (c->state != TCP_IS_DOWN) (void)tcp_write_out(l);
}

static void report_done(struct tcp_transport *t, struct tcp_events *evs)
{
    while (t->n_done && evs->n < evs->cap) {
        t->n_done--;
        tcp_add_event(evs, KVT_PUT_DONE, (struct tcp_conn *)t->done[t->n_done].conn)->tag =
            t->done[t->n_done].tag;
    }
}

static size_t tcp_poll(struct kvt_transport *base, struct kvt_transport_event *out, size_t cap)
{
    struct tcp_transport *t = (struct tcp_transport *)base;
    struct tcp_events evs = { out, 0, cap };
    report_done(t, &evs);
    if (evs.n) return evs.n; /* sessions get completions before the peer's answers */
    struct epoll_event events[16];
    bool accepts = false;
    int n = epoll_wait(t->epoll_fd, events, COUNT_OF(events), 0);
    for (int i = 0; i < n; i++) {
        if (events[i].data.ptr) on_event(&evs, events[i].data.ptr, events[i].events);
        else accepts = true;
    }
    if (accepts) accept_links(t);
    report_done(t, &evs); /* for messages that came early */
    if (t->n_backlog) resume_reading(t, &evs);
    check_deadlines(t, &evs);
    if (t->n_to_reap) reap_conns(t);
    return evs.n;
}

/* ---- the transport ---- */

static void tcp_close(struct kvt_transport *base)
{
    struct tcp_transport *t = (struct tcp_transport *)base;
    LIST_FOREACH (c, &t->conns, struct tcp_conn, link) tcp_disconnect(&c->base);
    LIST_FOREACH (l, &t->strangers.places, struct tcp_link, place.link) tcp_link_free(l);
    if (t->listen_fd >= 0) close(t->listen_fd);
    if (t->epoll_fd >= 0) close(t->epoll_fd);
    buf_release(&t->address);
    mem_free(t->done);
    mem_free(t->discard_buf);
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
    unproven_init(&t->strangers, env->max_peers);
    t->done = MEM_ARRAY(struct tcp_done, (size_t)env->max_peers * TCP_PUTS_MAX);
    t->discard_buf = mem_calloc(1, TCP_DISCARD_BYTES);
    t->zeros = mem_calloc(1, TCP_DISCARD_BYTES);
    t->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    enum status st = t->epoll_fd < 0 ? err_set(err, ERR_CONFIG, "no epoll: %s", strerror(errno))
                                     : OK;
    struct kvt_listener l = {
        .host = env->listen_host,
        .advertise = env->advertise_host,
        .ifname = env->tuning.socket_ifname,
        .port = env->port,
        .port_option = "--cache-queue-port",
        .fd = -1,
        .address = &t->address,
    };
    if (st == OK) st = kvt_address_serve(&l, err);
    t->listen_fd = l.fd;
    t->port = l.port;
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
static uint64_t tcp_link_speed(const struct kvt_conn *c)
{
    return ((const struct tcp_conn *)c)->link_speed;
}
static uint16_t tcp_port(struct kvt_transport *t) { return ((struct tcp_transport *)t)->port; }
static enum status tcp_flush(struct kvt_transport *t)
{
    (void)t;
    return OK;
}

static void tcp_export_address(const struct kvt_transport *t, struct buf *out)
{
    buf_add_str(out, buf_str(&((const struct tcp_transport *)t)->address));
}

static bool tcp_can_reach(struct kvt_transport *t, struct str address)
{
    struct sockaddr_storage a;
    socklen_t n;
    (void)t;
    return kvt_address_parse(address, &a, &n) == OK;
}

const struct kvt_transport_ops kvt_tcp_ops = {
    .name = "tcp",
    .caps = KVT_CAP_RECEIVER_SCATTERS,
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
    .poll = tcp_poll,
    .link_speed = tcp_link_speed,
    .disconnect = tcp_disconnect,
};
