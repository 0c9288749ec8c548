/* local.c - connections within one host: tickets, packets, the ends of writers. Diagram and
 * invariants: local.h.
 * Thread: transfer. */
#include "kvtransfer/local/local.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "kvtransfer/connect/accept.h"
#include "shared/base/clock.h"
#include "shared/base/hash/hash.h"
#include "shared/base/mem.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* Linux 6.5; older kernels answer ENOPROTOOPT */
#endif

enum {
    ACCEPTS_PER_POLL = 16,
    PACKETS_PER_POLL = 64,
    BYE_WAIT_MS = 50,
    DRAIN_MS = 1000,
    DEADLINE_CHECK_MS = 50
};

static struct local_transport *transport(struct kvt_transport *t)
{
    return (struct local_transport *)t;
}
static struct local_conn *connection(struct kvt_conn *c) { return (struct local_conn *)c; }

/* ---- epoll: the low bit of the pointer marks a connection's pidfd; NULL is the listener, the
 * transport itself its copiers ---- */

void local_watch(struct local_transport *t, int op, int fd, void *who, uint32_t events)
{
    struct epoll_event e = { .events = events, .data.ptr = who };
    (void)epoll_ctl(t->epoll_fd, op, fd, &e); /* ENOMEM: the connection's deadlines end it */
}

static void watch_process(struct local_conn *c)
{
    if (c->pidfd >= 0) local_watch(c->lt, EPOLL_CTL_ADD, c->pidfd, (char *)c + 1, EPOLLIN);
}

/* ---- life ---- */

static enum status read_boot_id(char out[LOCAL_BOOT_CHARS + 1])
{
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, out, LOCAL_BOOT_CHARS);
    if (fd >= 0) close(fd);
    if (n != LOCAL_BOOT_CHARS) return ERR_IO;
    out[LOCAL_BOOT_CHARS] = 0;
    return OK;
}

static socklen_t socket_name(const struct local_address_method *method, const char *name,
                             struct sockaddr_un *out)
{
    memset(out, 0, sizeof *out);
    out->sun_family = AF_UNIX;
    int n = snprintf(out->sun_path + 1, sizeof out->sun_path - 1, "%s%.*s", method->prefix,
                     LOCAL_NAME_CHARS, name);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

static enum status listen_local(struct local_transport *t, struct err *err)
{
    uint8_t random[LOCAL_NAME_CHARS / 2];
    if (read_boot_id(t->address) != OK)
        return err_set(
            err, ERR_NODEV,
            "/proc/sys/kernel/random/boot_id cannot be read, so hosts cannot be told apart");
    random_bytes(random, sizeof random);
    for (size_t i = 0; i < sizeof random; i++)
        snprintf(t->address + LOCAL_BOOT_CHARS + 2 * i, 3, "%02x", random[i]);
    struct sockaddr_un name;
    socklen_t n = socket_name(t->address_method, t->address + LOCAL_BOOT_CHARS, &name);
    t->listen_fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (t->listen_fd < 0 || bind(t->listen_fd, (struct sockaddr *)&name, n) != 0 ||
        listen(t->listen_fd, 64) != 0)
        return err_set(err, ERR_CONFIG, "no unix socket to receive KV on: %s", strerror(errno));
    local_watch(t, EPOLL_CTL_ADD, t->listen_fd, NULL, EPOLLIN);
    return OK;
}

/* On a copier. */
static void wake(void *arg)
{
    const struct local_transport *t = arg;
    uint64_t one = 1;
    while (write(t->wake_fd, &one, sizeof one) < 0 && errno == EINTR) {}
}

enum status local_open(const struct kvt_env *env, const struct kvt_transport_ops *ops,
                       const struct local_address_method *method, struct kvt_transport **out,
                       struct err *err)
{
    struct local_transport *t = MEM_NEW(struct local_transport);
    t->base.ops = ops;
    t->env = env;
    t->address_method = method;
    t->listen_fd = t->offer_fd = -1;
    t->copy = copy_choose();
    list_init(&t->conns);
    unproven_init(&t->strangers, env->max_peers);
    t->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    t->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    enum status st = t->epoll_fd < 0 || t->wake_fd < 0
                         ? err_set(err, ERR_CONFIG, "no epoll: %s", strerror(errno))
                         : listen_local(t, err);
    if (st == OK)
        st = copier_create(copier_choose_threads(env->tuning.copiers), LOCAL_DONE_MAX,
                           local_run_job, wake, t, &t->copier, err);
    if (st != OK) {
        local_close(&t->base);
        return st;
    }
    local_watch(t, EPOLL_CTL_ADD, t->wake_fd, t, EPOLLIN);
    *out = &t->base;
    return OK;
}

static void count_conn(struct local_conn *c)
{
    c->counted = true;
    c->lt->n_conns++;
}

static struct local_conn *new_conn(struct local_transport *t, int fd, bool incoming)
{
    struct local_conn *c = MEM_NEW(struct local_conn);
    c->base.t = &t->base;
    c->base.incoming = incoming;
    c->lt = t;
    c->fd = fd;
    c->pidfd = -1;
    c->state = incoming ? LOCAL_HANDSHAKE : LOCAL_WAITING;
    c->deadline_ms = clock_ms() + KVT_CONNECT_MS;
    list_push(&t->conns, &c->link);
    if (!incoming) count_conn(c);
    local_watch(t, EPOLL_CTL_ADD, fd, c, EPOLLIN);
    return c;
}

/* Forgets completions that nobody will ask for. */
static void forget_done(struct local_conn *c)
{
    struct local_transport *t = c->lt;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < t->n_done; i++)
        if (t->done[i].conn != &c->base) t->done[kept++] = t->done[i];
    t->n_done = kept;
}

static void forget_broken(struct local_conn *c)
{
    if (c->broken) c->lt->n_broken--;
    c->broken = NULL;
}

static void free_conn(struct local_conn *c)
{
    struct local_transport *t = c->lt;
    local_quiesce(c);
    forget_done(c);
    list_remove(&c->link);
    unproven_leave(&c->place);
    t->n_conns -= c->counted;
    forget_broken(c);
    if (c->remote) c->method->detach(c);
    for (uint32_t i = 0; c->puts && i < LOCAL_PUTS_MAX; i++) mem_free(c->puts[i].copies);
    mem_free(c->puts);
    close(c->fd);
    if (c->pidfd >= 0) close(c->pidfd);
    buf_release(&c->out);
    mem_free(c);
}

enum status local_send_packet(int fd, const void *p, size_t n)
{
    for (;;) {
        ssize_t sent = send(fd, p, n, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent == (ssize_t)n) return OK;
        if (sent >= 0) return ERR_IO; /* a packet is never cut */
        if (errno == EINTR) continue;
        return errno == EAGAIN || errno == EWOULDBLOCK ? ERR_BUSY : ERR_PEER_LOST;
    }
}

static enum status send_bye(struct local_conn *c)
{
    uint8_t bytes[KVT_MESSAGE_MAX];
    size_t n = kvt_message_encode(&(struct kvt_message){ .kind = KVT_MSG_BYE }, bytes);
    return local_send_packet(c->fd, bytes, n);
}

/* A receiver that does not read now (stopped, or far behind) still gets BYE later: without it the
 * blocks that we wrote would stay in its quarantine as long as this process lives. */
void local_disconnect(struct kvt_conn *base)
{
    struct local_conn *c = connection(base);
    enum status said = OK;
    local_quiesce(c);
    if (!base->incoming && c->remote) {
        c->method->detach(c); /* before BYE: invariant 1 */
        c->remote = NULL;
        said = send_bye(c);
    }
    if (said != ERR_BUSY) {
        free_conn(c);
        return;
    }
    forget_done(c);
    forget_broken(c);
    base->peer = NULL;
    c->state = LOCAL_DOWN;
    c->detached = c->closing = true;
    local_watch(c->lt, EPOLL_CTL_DEL, c->fd, NULL, 0); /* no longer watched after an end of file */
    local_watch(c->lt, EPOLL_CTL_ADD, c->fd, c, EPOLLOUT);
}

/* Sends BYE when the receiver's socket has room again, or gives up if it is gone. */
static void continue_closing(struct local_conn *c)
{
    if (send_bye(c) != ERR_BUSY) free_conn(c);
}

/* At the end of this transport, whose process may live on: gives slow receivers a moment. */
static void finish_closing(struct local_conn *c)
{
    struct pollfd p = { .fd = c->fd, .events = POLLOUT };
    if (poll(&p, 1, BYE_WAIT_MS) == 1) (void)send_bye(c);
    free_conn(c);
}

/* Waits until writers that were given an address have left the pool, before its owner frees it: a
 * later write would change whatever the process keeps there next. (A mapping has its own reference.
 * CUDA does not define a write into memory that its owner has freed.) LIMIT: it waits DRAIN_MS for
 * a writer that is stopped in the middle of a call; this process is expected to end soon after. */
static void drain_writers(struct local_transport *t)
{
    uint64_t deadline = clock_ms() + DRAIN_MS;
    LIST_FOREACH (c, &t->conns, struct local_conn, link) {
        if (!c->must_drain || c->bye_received) continue;
        shutdown(c->fd, SHUT_WR);
        for (uint64_t now; (now = clock_ms()) < deadline;) {
            struct pollfd p = { .fd = c->fd, .events = POLLIN };
            uint8_t bytes[KVT_MESSAGE_MAX];
            if (poll(&p, 1, (int)(deadline - now)) != 1) continue;
            ssize_t n = recv(c->fd, bytes, sizeof bytes, MSG_DONTWAIT);
            if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) break;
        }
    }
}

void local_close(struct kvt_transport *base)
{
    struct local_transport *t = transport(base);
    if (t->listen_fd >= 0) close(t->listen_fd);
    LIST_FOREACH (c, &t->conns, struct local_conn, link)
        if (!c->base.incoming && !c->closing) local_disconnect(&c->base);
    LIST_FOREACH (c, &t->conns, struct local_conn, link)
        if (c->closing) finish_closing(c);
    drain_writers(t);
    LIST_FOREACH (c, &t->conns, struct local_conn, link) free_conn(c);
    copier_free(t->copier);
    if (t->offer_fd >= 0) close(t->offer_fd);
    if (t->wake_fd >= 0) close(t->wake_fd);
    if (t->epoll_fd >= 0) close(t->epoll_fd);
    mem_free(t);
}

int local_wait_fd(struct kvt_transport *t) { return transport(t)->epoll_fd; }
uint64_t local_link_speed(const struct kvt_conn *c)
{
    (void)c;
    return 0;
}
uint16_t local_port(struct kvt_transport *t)
{
    (void)t;
    return 0;
}
enum status local_flush(struct kvt_transport *t)
{
    (void)t;
    return OK;
}

/* ---- reaching ---- */

void local_export_address(const struct kvt_transport *t, struct buf *out)
{
    buf_add(out, ((const struct local_transport *)t)->address, LOCAL_ADDRESS_CHARS);
}

bool local_can_reach(struct kvt_transport *t, struct str address)
{
    return address.n == LOCAL_ADDRESS_CHARS &&
           memcmp(address.p, transport(t)->address, LOCAL_BOOT_CHARS) == 0;
}

/* Identifies the other end's process. ERR_UNSUPPORTED: it cannot be watched (another pid
 * namespace); ERR_FULL: no descriptor is free to watch it. */
static enum status identify(const struct local_address_method *method, int fd, int32_t *pid,
                            int *pidfd)
{
    struct ucred who;
    socklen_t n = sizeof who;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &n) != 0 || who.pid <= 0)
        return ERR_UNSUPPORTED;
    if (method->same_process && who.pid != getpid()) return ERR_UNSUPPORTED;
    *pid = who.pid;
    n = sizeof *pidfd;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERPIDFD, pidfd, &n) == 0) return OK;
    *pidfd = (int)syscall(SYS_pidfd_open, who.pid, 0);
    if (*pidfd >= 0) return OK;
    return errno == EMFILE || errno == ENFILE ? ERR_FULL : ERR_UNSUPPORTED;
}

/* Opens a socket that is connected to the receiver at `address`. */
static enum status connect_socket(const struct local_transport *t, struct str address, int *out,
                                  struct err *err)
{
    struct sockaddr_un name;
    socklen_t n = socket_name(t->address_method, address.p + LOCAL_BOOT_CHARS, &name);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&name, n) != 0) {
        int code = errno;
        if (fd >= 0) close(fd);
        return err_set(err, ERR_PEER_LOST,
                       "%s: no such receiver on this host (%s): it ended, or lives in another "
                       "network namespace",
                       t->base.ops->name, strerror(code));
    }
    *out = fd;
    return OK;
}

/* Identifies the receiver's process and presents the ticket to it. */
static enum status present_ticket(const struct local_transport *t, int fd,
                                  const uint8_t ticket[KVT_TICKET_BYTES], int32_t *pid, int *pidfd,
                                  struct err *err)
{
    const char *name = t->base.ops->name;
    uint8_t preamble[KVT_PREAMBLE_BYTES];
    struct kvt_preamble p = { .kind = KVT_PREAMBLE_TICKET };
    memcpy(p.ticket, ticket, sizeof p.ticket);
    kvt_preamble_encode(&p, preamble);
    enum status st = identify(t->address_method, fd, pid, pidfd);
    if (st == ERR_FULL)
        return err_set(err, st, "%s: no free file descriptor: raise the limit of open files", name);
    if (st != OK)
        return err_set(err, st, "%s: the receiver's process is not visible from here", name);
    if (local_send_packet(fd, preamble, sizeof preamble) != OK)
        return err_set(err, ERR_PEER_LOST, "%s: the receiver closed the connection", name);
    return OK;
}

enum status local_connect(struct kvt_transport *base, struct str address,
                          const struct kv_layout *theirs, const uint8_t ticket[KVT_TICKET_BYTES],
                          struct kvt_conn **out, struct err *err)
{
    struct local_transport *t = transport(base);
    int fd = -1, pidfd = -1;
    int32_t pid = 0;
    if (!local_can_reach(base, address))
        return err_set(err, ERR_PEER_LOST, "%s: the peer is on another host", base->ops->name);
    if (t->n_conns >= t->env->max_peers)
        return err_set(err, ERR_FULL, "%s: too many connections", base->ops->name);
    TRY(connect_socket(t, address, &fd, err));
    enum status st = present_ticket(t, fd, ticket, &pid, &pidfd, err);
    if (st != OK) {
        close(fd);
        if (pidfd >= 0) close(pidfd);
        return st;
    }
    struct local_conn *c = new_conn(t, fd, false);
    c->pid = pid;
    c->pidfd = pidfd;
    c->need_bytes = kv_layout_pool_bytes(theirs);
    *out = &c->base;
    return OK;
}

/* Not inside the loop over events: one that gives its place up may be among the later ones. */
static void accept_conns(struct local_transport *t)
{
    for (int i = 0; i < ACCEPTS_PER_POLL; i++) {
        int fd = kvt_accept(t->base.ops->name, t->epoll_fd, t->listen_fd, &t->accept_again_ms),
            pidfd = -1;
        int32_t pid = 0;
        if (fd < 0) return;
        if (identify(t->address_method, fd, &pid, &pidfd) != OK) {
            close(fd);
            continue;
        }
        struct local_conn *c = new_conn(t, fd, true);
        c->pid = pid;
        c->pidfd = pidfd;
        struct unproven_place *gave = unproven_enter(&t->strangers, &c->place, (uint64_t)pid);
        if (gave) free_conn(LIST_ENTRY(gave, struct local_conn, place));
    }
}

/* ---- events ---- */

struct local_events {
    struct kvt_transport_event *v;
    size_t n, cap;
};

static struct kvt_transport_event *add_event(struct local_events *evs,
                                             enum kvt_transport_event_kind kind,
                                             struct local_conn *c)
{
    struct kvt_transport_event *i = &evs->v[evs->n++];
    i->kind = kind;
    i->conn = &c->base;
    i->status = OK;
    i->text[0] = 0;
    return i;
}

/* Ends a connection; one in HANDSHAKE was never announced and ends without an event. */
static void go_down(struct local_events *evs, struct local_conn *c, enum status st,
                    const char *text)
{
    if (c->state == LOCAL_HANDSHAKE) {
        free_conn(c);
        return;
    }
    c->state = LOCAL_DOWN;
    local_quiesce(c); /* invariant 3 */
    if (c->base.incoming)
        shutdown(c->fd, SHUT_WR); /* the writer reads end of file, stops, and sends BYE */
    if (c->detached) return;
    c->detached = true;
    forget_broken(c);
    struct kvt_transport_event *i = add_event(evs, KVT_DOWN, c);
    i->status = st;
    snprintf(i->text, sizeof i->text, "%s: %s", c->base.t->ops->name, text);
}

static void on_ticket(struct local_events *evs, struct local_conn *c, const uint8_t *bytes,
                      ssize_t n)
{
    struct kvt_preamble p, reply = { .kind = KVT_PREAMBLE_REFUSED };
    const struct kvt_env *env = c->lt->env;
    bool welcome = n >= 0 && kvt_preamble_decode(bytes, (size_t)n, &p) == OK &&
                   p.kind == KVT_PREAMBLE_TICKET && c->lt->n_conns < env->max_peers &&
                   env->admit(env->arg, p.ticket) == OK;
    int fd = -1;
    if (welcome) {
        reply.kind = KVT_PREAMBLE_WELCOME;
        c->lt->address_method->offer(c->lt, &reply.value, &fd);
        c->must_drain = fd < 0 || fd == c->lt->offer_fd;
    }
    uint8_t out[KVT_PREAMBLE_BYTES];
    kvt_preamble_encode(&reply, out);
    struct iovec iov = { out, sizeof out };
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = { 0 };
    struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1 };
    if (fd >= 0) {
        m.msg_control = control.bytes;
        m.msg_controllen = sizeof control.bytes;
        struct cmsghdr *h = CMSG_FIRSTHDR(&m);
        h->cmsg_level = SOL_SOCKET;
        h->cmsg_type = SCM_RIGHTS;
        h->cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(h), &fd, sizeof fd);
    }
    if (sendmsg(c->fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT) != (ssize_t)sizeof out || !welcome) {
        free_conn(c);
        return;
    }
    unproven_leave(&c->place);
    count_conn(c);
    c->state = LOCAL_UP;
    add_event(evs, KVT_UP, c);
}

static void on_welcome(struct local_events *evs, struct local_conn *c, const uint8_t *bytes,
                       ssize_t n, int fd)
{
    struct kvt_preamble p;
    char text[100] = "malformed reply";
    enum status st = ERR_FORMAT;
    if (kvt_preamble_decode(bytes, (size_t)n, &p) != OK || p.kind == KVT_PREAMBLE_TICKET) {
        if (fd >= 0) close(fd);
    } else if (p.kind == KVT_PREAMBLE_REFUSED) {
        if (fd >= 0) close(fd);
        st = ERR_UNAUTHORIZED;
        snprintf(text, sizeof text, "the receiver refused the ticket");
    } else {
        st = c->lt->address_method->attach(c, p.value, fd, text, sizeof text);
    }
    if (st != OK) {
        go_down(evs, c, st, text);
        return;
    }
    c->state = LOCAL_UP;
    add_event(evs, KVT_UP, c);
}

/* recv, with a descriptor that may be attached. -1 with EMFILE: one came, and this process has no
 * descriptor free. */
static ssize_t receive(int fd, uint8_t *out, size_t max, int *passed)
{
    struct iovec iov = { out, max };
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct msghdr m = {
        .msg_iov = &iov,
        .msg_iovlen = 1,
        .msg_control = control.bytes,
        .msg_controllen = sizeof control.bytes,
    };
    ssize_t n = recvmsg(fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    *passed = -1;
    struct cmsghdr *h = n >= 0 ? CMSG_FIRSTHDR(&m) : NULL;
    if (h && h->cmsg_level == SOL_SOCKET && h->cmsg_type == SCM_RIGHTS &&
        h->cmsg_len == CMSG_LEN(sizeof *passed))
        memcpy(passed, CMSG_DATA(h), sizeof *passed);
    if (n >= 0 && *passed < 0 && (m.msg_flags & MSG_CTRUNC)) {
        errno = EMFILE;
        return -1;
    }
    return n;
}

static void on_packet(struct local_events *evs, struct local_conn *c, const uint8_t *bytes,
                      ssize_t n)
{
    struct kvt_message m;
    if (kvt_message_decode(bytes, (size_t)n, &m) != OK || m.kind == KVT_MSG_DATA) {
        go_down(evs, c, ERR_FORMAT, "malformed message");
        return;
    }
    if (m.kind == KVT_MSG_BYE) c->bye_received = true;
    if (c->state == LOCAL_UP && !c->detached) add_event(evs, KVT_MESSAGE, c)->message = m;
}

/* Handles end of file or an error: nothing more is read; from now on the process is watched. */
static void on_end(struct local_events *evs, struct local_conn *c)
{
    if (c->state != LOCAL_HANDSHAKE) {
        local_watch(c->lt, EPOLL_CTL_DEL, c->fd, NULL, 0);
        if (c->base.incoming && !c->bye_received) watch_process(c);
    }
    go_down(evs, c, ERR_PEER_LOST, "the peer closed the connection");
}

static void read_conn(struct local_events *evs, struct local_conn *c)
{
    for (int i = 0; i < PACKETS_PER_POLL && evs->n < evs->cap; i++) {
        uint8_t bytes[KVT_MESSAGE_MAX];
        int fd;
        ssize_t n = receive(c->fd, bytes, sizeof bytes, &fd);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
        /* The other end closed with unread packets of ours. The kernel reports it once, before the
         * packets that the other end had sent, BYE among them. */
        if (n < 0 && errno == ECONNRESET) continue;
        /* Without its descriptor the WELCOME would look like one by address. */
        if (n < 0 && errno == EMFILE && c->state == LOCAL_WAITING) {
            go_down(
                evs, c, ERR_FULL,
                "no free file descriptor for the receiver's memory: raise the limit of open files");
            return;
        }
        if (n > 0 && c->state == LOCAL_WAITING) {
            on_welcome(evs, c, bytes, n, fd);
            continue;
        }
        if (fd >= 0) close(fd); /* nobody else sends one */
        if (n <= 0) {
            on_end(evs, c);
            return;
        }
        if (c->state == LOCAL_HANDSHAKE) {
            on_ticket(evs, c, bytes, n);
            return; /* c may be gone */
        }
        on_packet(evs, c, bytes, n);
    }
}

/* Ends connections whose copier found the receiver's memory gone, before their sockets tell. */
static void end_broken(struct local_transport *t, struct local_events *evs)
{
    LIST_FOREACH (c, &t->conns, struct local_conn, link)
        if (c->broken && evs->n < evs->cap) go_down(evs, c, ERR_PEER_LOST, c->broken);
}

static void check_deadlines(struct local_transport *t, struct local_events *evs)
{
    uint64_t now = clock_ms();
    kvt_accept_resume(t->epoll_fd, t->listen_fd, &t->accept_again_ms, now);
    if (now < t->checked_ms + DEADLINE_CHECK_MS) return;
    t->checked_ms = now;
    LIST_FOREACH (c, &t->conns, struct local_conn, link) {
        if (c->state > LOCAL_WAITING || now <= c->deadline_ms || evs->n == evs->cap) continue;
        go_down(evs, c, ERR_TIMEOUT, "the peer did not answer in time");
    }
}

size_t local_poll(struct kvt_transport *base, struct kvt_transport_event *out, size_t cap)
{
    struct local_transport *t = transport(base);
    struct local_events evs = { out, 0, cap };
    local_collect(t);
    while (t->n_done && evs.n < cap) {
        t->n_done--;
        add_event(&evs, KVT_PUT_DONE, connection(t->done[t->n_done].conn))->tag =
            t->done[t->n_done].tag;
    }
    bool accepts = false;
    struct epoll_event events[16];
    int n = epoll_wait(t->epoll_fd, events, COUNT_OF(events), 0);
    for (int i = 0; i < n; i++) {
        uintptr_t who = (uintptr_t)events[i].data.ptr;
        struct local_conn *c = (struct local_conn *)(who & ~(uintptr_t)1);
        if (!who) {
            accepts = true;
        } else if (who == (uintptr_t)t) {
            uint64_t count;
            while (read(t->wake_fd, &count, sizeof count) < 0 && errno == EINTR) {}
        } else if (who & 1) {
            local_watch(t, EPOLL_CTL_DEL, c->pidfd, NULL, 0);
            c->ended = true;
        } else if (c->closing) {
            continue_closing(c);
        } else {
            if (events[i].events & EPOLLOUT) local_write_out(c);
            if (events[i].events & ~(uint32_t)EPOLLOUT) read_conn(&evs, c);
        }
    }
    if (accepts) accept_conns(t);
    if (t->n_broken) end_broken(t, &evs);
    check_deadlines(t, &evs);
    return evs.n;
}

enum status local_fence(struct kvt_conn *base)
{
    struct local_conn *c = connection(base);
    c->detached = true;
    if (c->state != LOCAL_DOWN) {
        c->state = LOCAL_DOWN;
        shutdown(c->fd, SHUT_WR);
    }
    return !base->incoming || c->bye_received || c->ended ? OK : ERR_BUSY;
}
