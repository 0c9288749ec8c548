/* test_control.c - control connections over real sockets: two hubs in one process, polled by hand,
 * and raw sockets that misbehave. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "kvtransfer/connect/address.h"
#include "kvtransfer/connect/control.h"
#include "shared/base/clock.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

enum { SEEN_MAX = 20000 };

struct seen {
    enum control_event_kind kind;
    struct control_conn *conn;
    uint8_t frame;
    uint64_t after;
    size_t n;
    uint8_t first, last; /* of the body */
    enum status status;
    char text[120];
};

struct side {
    struct kvt_env env;
    struct control_hub *hub;
    uint8_t ticket[KVT_TICKET_BYTES]; /* valid once */
    bool used;
    int n_admits;
    bool close_on_frame;
    struct seen seen[SEEN_MAX];
    size_t n;
};

static enum status admit(void *arg, const uint8_t ticket[KVT_TICKET_BYTES])
{
    struct side *s = arg;
    s->n_admits++;
    if (s->used || memcmp(ticket, s->ticket, KVT_TICKET_BYTES) != 0) return ERR_UNAUTHORIZED;
    s->used = true;
    return OK;
}

static struct side *side_on(const char *ifname, uint32_t max_peers)
{
    struct side *s = calloc(1, sizeof *s);
    struct err err = { 0 };
    memset(s->ticket, 0x5a, sizeof s->ticket);
    s->env = (struct kvt_env){
        .listen_host = "127.0.0.1", .max_peers = max_peers, .arg = s, .admit = admit
    };
    if (control_open(&s->env, "test", 0, ifname, &s->hub, &err) != OK)
        test_fail(__FILE__, __LINE__, "control_open: %s", err.text);
    return s;
}

static struct side *side_start(void) { return side_on(NULL, 16); }

static void side_stop(struct side *s)
{
    control_hub_free(s->hub);
    free(s);
}

static void on_event(void *arg, const struct control_event *ev)
{
    struct side *s = arg;
    CHECK(s->n < SEEN_MAX);
    struct seen *e = &s->seen[s->n++];
    *e = (struct seen){
        .kind = ev->kind,
        .conn = ev->conn,
        .frame = ev->frame,
        .after = ev->after,
        .n = ev->body.n,
        .status = ev->status,
    };
    if (ev->kind == CONTROL_FRAME && ev->body.n) {
        e->first = (uint8_t)ev->body.p[0];
        e->last = (uint8_t)ev->body.p[ev->body.n - 1];
    }
    memcpy(e->text, ev->text, sizeof e->text);
    if (s->close_on_frame && ev->kind == CONTROL_FRAME) control_close(ev->conn);
}

static void poll_once(struct side *a, struct side *b)
{
    if (a) control_poll(a->hub, on_event, a);
    if (b) control_poll(b->hub, on_event, b);
    usleep(200);
}

/* Polls both until `s` has seen n events. */
static void until(struct side *s, size_t n, struct side *other)
{
    for (uint64_t end = clock_ms() + 10000; s->n < n;) {
        if (clock_ms() > end)
            test_fail(__FILE__, __LINE__, "%zu events seen, expected %zu", s->n, n);
        poll_once(s, other);
    }
}

static void settle(struct side *a, struct side *b, uint64_t ms)
{
    for (uint64_t end = clock_ms() + ms; clock_ms() < end;) poll_once(a, b);
}

static struct control_conn *dial(struct side *from, struct side *to, const uint8_t *ticket)
{
    struct control_conn *c = NULL;
    struct err err = { 0 };
    if (control_connect(from->hub, control_address(to->hub), ticket, from, &c, &err) != OK)
        test_fail(__FILE__, __LINE__, "control_connect: %s", err.text);
    CHECK(!c->incoming && c->owner == from);
    return c;
}

/* Connects both sides until they are OPEN; *in gets the receiver's end. */
static struct control_conn *pair(struct side *from, struct side *to, struct control_conn **in)
{
    struct control_conn *c = dial(from, to, to->ticket);
    until(to, to->n + 1, from);
    until(from, from->n + (from->n == 0), to);
    const struct seen *e = &to->seen[to->n - 1];
    CHECK(e->kind == CONTROL_OPENED && e->conn->incoming && e->conn->owner == NULL);
    CHECK(from->seen[from->n - 1].kind == CONTROL_OPENED && from->seen[from->n - 1].conn == c);
    *in = e->conn;
    return c;
}

static int raw(struct side *to)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in a = {
        .sin_family = AF_INET,
        .sin_port = htons(control_port(to->hub)),
        .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
    };
    CHECK_OK(connect(fd, (struct sockaddr *)&a, sizeof a));
    return fd;
}

static void raw_preamble(int fd, enum kvt_preamble_kind kind, const uint8_t *ticket)
{
    struct kvt_preamble p = { .kind = kind };
    uint8_t bytes[KVT_PREAMBLE_BYTES];
    if (ticket) memcpy(p.ticket, ticket, sizeof p.ticket);
    kvt_preamble_encode(&p, bytes);
    CHECK(send(fd, bytes, sizeof bytes, MSG_NOSIGNAL) == sizeof bytes);
}

/* Reads the hub's answer until it closes (*closed) or is silent for `ms`; returns the number of
 * bytes. */
static size_t raw_read(int fd, struct side *s, uint8_t *out, size_t cap, uint64_t ms, bool *closed)
{
    size_t have = 0;
    *closed = false;
    for (uint64_t end = clock_ms() + ms; clock_ms() < end && !*closed;) {
        poll_once(s, NULL);
        ssize_t n = recv(fd, out + have, cap - have, MSG_DONTWAIT);
        if (n == 0 || (n < 0 && errno != EAGAIN)) *closed = true;
        if (n > 0) have += (size_t)n;
    }
    return have;
}

static size_t open_fds(void)
{
    size_t n = 0;
    for (int fd = 0; fd < 1024; fd++) n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

TEST(control_opens_and_passes_frames_in_order)
{
    struct side *a = side_start(), *b = side_start();
    struct control_conn *in, *out = pair(a, b, &in);
    struct sockaddr_storage local, remote;
    control_addresses(out, &local, &remote);
    CHECK_EQ_INT(ntohs(((struct sockaddr_in *)&remote)->sin_port), control_port(b->hub));
    static uint8_t body[CONTROL_BODY_MAX];
    for (int i = 0; i < 3000; i++) {
        size_t n = (size_t)(i * 7) % 700;
        if (i % 100 == 0) n = CONTROL_BODY_MAX;
        memset(body, i & 0xff, n);
        CHECK_OK(control_send(out, (uint8_t)(i % 250), (uint64_t)i << 33, body, n));
        CHECK_OK(control_send(in, 9, (uint64_t)i, body, n % 50));
        if (i % 64 == 0) poll_once(a, b);
    }
    until(b, 3001, a);
    until(a, 3001, b);
    for (int i = 0; i < 3000; i++) {
        const struct seen *e = &b->seen[i + 1], *f = &a->seen[i + 1];
        size_t n = i % 100 == 0 ? CONTROL_BODY_MAX : (size_t)(i * 7) % 700;
        CHECK(e->kind == CONTROL_FRAME && e->conn == in && f->kind == CONTROL_FRAME &&
              f->conn == out);
        CHECK_EQ_INT(e->frame, i % 250);
        CHECK(e->after == (uint64_t)i << 33 && f->after == (uint64_t)i);
        CHECK_EQ_INT(e->n, n);
        CHECK_EQ_INT(f->n, n % 50);
        if (n) CHECK(e->first == (i & 0xff) && e->last == (i & 0xff));
    }
    CHECK_EQ_INT(control_queued(out), 0);
    side_stop(a);
    side_stop(b);
}

TEST(control_wrong_and_used_tickets_are_refused)
{
    struct side *a = side_start(), *b = side_start();
    uint8_t wrong[KVT_TICKET_BYTES] = { 1 };
    dial(a, b, wrong);
    until(a, 1, b);
    CHECK(a->seen[0].kind == CONTROL_LOST);
    CHECK_STATUS(a->seen[0].status, ERR_UNAUTHORIZED);
    CHECK(strstr(a->seen[0].text, "test: ") && strstr(a->seen[0].text, "ticket"));
    control_close(a->seen[0].conn);
    a->n = 0;
    struct control_conn *in, *out = pair(a, b, &in);
    dial(a, b, b->ticket); /* used before */
    until(a, 2, b);
    CHECK(a->seen[1].kind == CONTROL_LOST && a->seen[1].conn != out);
    CHECK_STATUS(a->seen[1].status, ERR_UNAUTHORIZED);
    CHECK_EQ_INT(b->n, 1); /* the refused ones caused no event */
    CHECK_OK(control_send(out, 1, 0, "x", 1));
    until(b, 2, a);
    side_stop(a);
    side_stop(b);
}

TEST(control_bodies_and_queues_have_limits)
{
    struct side *a = side_start(), *b = side_start();
    struct control_conn *in, *out = pair(a, b, &in);
    static uint8_t body[CONTROL_BODY_MAX + 1];
    CHECK_STATUS(control_send(out, 1, 0, body, sizeof body), ERR_INVALID);
    enum status st;
    size_t taken = 0;
    /* b does not read */
    while ((st = control_send(out, 1, taken, body, CONTROL_BODY_MAX)) == OK && taken < 10000)
        taken++;
    CHECK_STATUS(st, ERR_FULL);
    CHECK(control_queued(out) > KVT_QUEUE_LIMIT &&
          control_queued(out) <= KVT_QUEUE_LIMIT + CONTROL_HEAD_BYTES + CONTROL_BODY_MAX);
    until(b, 1 + taken, a); /* no accepted frame is lost */
    for (size_t i = 0; i < taken; i++)
        CHECK(b->seen[1 + i].after == i && b->seen[1 + i].n == CONTROL_BODY_MAX);
    CHECK_OK(control_send(out, 1, 0, NULL, 0));
    until(b, 2 + taken, a);
    CHECK_EQ_INT(b->seen[1 + taken].n, 0);
    side_stop(a);
    side_stop(b);
}

/* Frames sent right before closing still arrive, even if the closing side has unread bytes. */
TEST(control_closing_lets_the_last_frames_out)
{
    struct side *a = side_start(), *b = side_start();
    for (int round = 0; round < 50; round++) {
        b->used = false;
        a->n = b->n = 0;
        struct control_conn *in, *out = pair(a, b, &in);
        static uint8_t body[CONTROL_BODY_MAX];
        for (int i = 0; i < 60; i++) CHECK_OK(control_send(in, 2, 0, body, sizeof body));
        for (int i = 0; i < 60; i++) CHECK_OK(control_send(out, 3, (uint64_t)i, body, sizeof body));
        control_close(out);
        until(b, 62, a);
        CHECK(b->seen[60].kind == CONTROL_FRAME && b->seen[60].after == 59);
        CHECK(b->seen[61].kind == CONTROL_LOST && b->seen[61].conn == in);
        CHECK_STATUS(b->seen[61].status, ERR_PEER_LOST);
        CHECK_STATUS(control_send(in, 2, 0, body, 1), ERR_PEER_LOST);
        CHECK_EQ_INT(a->n, 1); /* the closed one causes no further event */
        control_close(in);
    }
    settle(a, b, 50);
    CHECK_EQ_INT(b->n, 62);
    side_stop(a);
    side_stop(b);
}

TEST(control_handler_may_close_its_own_connection)
{
    struct side *a = side_start(), *b = side_start();
    b->close_on_frame = true;
    struct control_conn *in, *out = pair(a, b, &in);
    for (int i = 0; i < 10; i++) CHECK_OK(control_send(out, 1, 0, "abc", 3));
    until(a, 2, b);
    CHECK(a->seen[1].kind == CONTROL_LOST);
    CHECK_EQ_INT(b->n, 2); /* OPENED and the first frame */
    side_stop(a);
    side_stop(b);
}

TEST(control_peer_that_goes_is_lost_once)
{
    struct side *a = side_start(), *b = side_start();
    struct control_conn *in, *out = pair(a, b, &in);
    side_stop(b);
    until(a, 2, NULL);
    CHECK(a->seen[1].kind == CONTROL_LOST && a->seen[1].conn == out);
    settle(a, NULL, 50);
    CHECK_EQ_INT(a->n, 2);
    control_close(out);
    struct side *c = side_start(); /* b's port has no listener any more */
    b = side_start();
    struct buf address = { 0 };
    buf_add_str(&address, control_address(b->hub));
    side_stop(b);
    struct err err = { 0 };
    enum status st = control_connect(c->hub, buf_str(&address), c->ticket, NULL, &out, &err);
    if (st == OK) until(c, 1, NULL);
    CHECK_STATUS(st == OK ? c->seen[0].status : st, ERR_PEER_LOST);
    CHECK(strstr(st == OK ? c->seen[0].text : err.text, "refused"));
    buf_release(&address);
    side_stop(a);
    side_stop(c);
}

TEST(control_malformed_frames_end_the_connection)
{
    struct side *s = side_start();
    static const struct {
        uint8_t at, value;
    } wrong[] = { { 0, 0 }, { 1, 0xff }, { 3, 1 }, { 5, 0x11 }, { 6, 1 }, { 7, 0x80 } };
    for (size_t i = 0; i < COUNT_OF(wrong); i++) {
        int fd = raw(s);
        uint8_t answer[64];
        bool closed;
        s->used = false;
        s->n = 0;
        raw_preamble(fd, KVT_PREAMBLE_TICKET, s->ticket);
        until(s, 1, NULL);
        CHECK(s->seen[0].kind == CONTROL_OPENED);
        struct buf frames = { 0 };
        control_frame_encode(&frames, 7, 11, "good", 4);
        control_frame_encode(&frames, 8, 12, "bad", 3);
        frames.data[20 + wrong[i].at] = (char)wrong[i].value;
        for (size_t at = 0; at < frames.len; at++) { /* byte by byte: frames cut at every place */
            CHECK(send(fd, frames.data + at, 1, MSG_NOSIGNAL) == 1);
            poll_once(s, NULL);
            if (s->n == 3) break;
        }
        until(s, 3, NULL);
        CHECK(s->seen[1].kind == CONTROL_FRAME && s->seen[1].frame == 7 && s->seen[1].after == 11 &&
              s->seen[1].n == 4);
        CHECK(s->seen[2].kind == CONTROL_LOST);
        CHECK_STATUS(s->seen[2].status, ERR_FORMAT);
        control_close(s->seen[2].conn);
        CHECK_EQ_INT(raw_read(fd, s, answer, sizeof answer, 3000, &closed), KVT_PREAMBLE_BYTES);
        CHECK(closed);
        close(fd);
        buf_release(&frames);
    }
    side_stop(s);
}

TEST(control_bad_greetings_end_silently)
{
    struct side *s = side_start();
    uint8_t answer[64], junk[KVT_PREAMBLE_BYTES];
    bool closed;
    size_t before = open_fds();
    for (int i = 0; i < 20; i++) {
        int fd = raw(s);
        memset(junk, i * 13, sizeof junk);
        CHECK(send(fd, junk, sizeof junk, MSG_NOSIGNAL) == sizeof junk);
        CHECK_EQ_INT(raw_read(fd, s, answer, sizeof answer, 3000, &closed), 0);
        CHECK(closed);
        close(fd);
    }
    CHECK_EQ_INT(s->n_admits, 0);
    int fd = raw(s); /* well formed, but not from the connecting side */
    raw_preamble(fd, KVT_PREAMBLE_WELCOME, NULL);
    CHECK_EQ_INT(raw_read(fd, s, answer, sizeof answer, 3000, &closed), 0);
    CHECK(closed);
    close(fd);
    fd = raw(s); /* sends half of a preamble and closes */
    CHECK(send(fd, junk, 10, MSG_NOSIGNAL) == 10);
    close(fd);
    settle(s, NULL, 50);
    CHECK_EQ_INT(s->n, 0);
    CHECK_EQ_INT(open_fds(), before);
    side_stop(s);
}

TEST(control_silent_peers_meet_a_deadline)
{
    struct side *s = side_start();
    int quiet = raw(s);
    /* a listener that accepts and stays silent, seen by the connecting side */
    int l = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t n = sizeof a;
    CHECK_OK(bind(l, (struct sockaddr *)&a, n));
    CHECK_OK(listen(l, 1));
    CHECK_OK(getsockname(l, (struct sockaddr *)&a, &n));
    char address[32];
    snprintf(address, sizeof address, "127.0.0.1 %u", ntohs(a.sin_port));
    struct control_conn *c;
    struct err err;
    CHECK_OK(control_connect(s->hub, str_of(address), s->ticket, NULL, &c, &err));
    uint8_t answer[64];
    bool closed;
    CHECK_EQ_INT(raw_read(quiet, s, answer, sizeof answer, 10000, &closed), 0);
    CHECK(closed);
    until(s, 1, NULL);
    CHECK(s->seen[0].kind == CONTROL_LOST && s->seen[0].conn == c);
    CHECK_STATUS(s->seen[0].status, ERR_TIMEOUT);
    CHECK_STATUS(control_send(c, 1, 0, "x", 1), ERR_PEER_LOST);
    close(quiet);
    close(l);
    side_stop(s);
}

/* The listener's answer is no WELCOME. */
TEST(control_listener_that_speaks_something_else)
{
    struct side *s = side_start();
    int l = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t n = sizeof a;
    CHECK_OK(bind(l, (struct sockaddr *)&a, n));
    CHECK_OK(listen(l, 1));
    CHECK_OK(getsockname(l, (struct sockaddr *)&a, &n));
    char address[32];
    snprintf(address, sizeof address, "127.0.0.1 %u", ntohs(a.sin_port));
    struct control_conn *c;
    struct err err;
    CHECK_OK(control_connect(s->hub, str_of(address), s->ticket, NULL, &c, &err));
    int fd = accept(l, NULL, NULL);
    CHECK(send(fd, "HTTP/1.1 400 Bad Request\r\n\r\nxxxx", 32, MSG_NOSIGNAL) == 32);
    until(s, 1, NULL);
    CHECK_STATUS(s->seen[0].status, ERR_FORMAT);
    close(fd);
    close(l);
    side_stop(s);
}

TEST(control_full_descriptor_table_pauses_accepting)
{
    struct side *a = side_start(), *b = side_start();
    int waiting = raw(b); /* in the backlog */
    struct rlimit old, tight;
    CHECK_OK(getrlimit(RLIMIT_NOFILE, &old));
    int top = dup(0);
    tight = (struct rlimit){ (rlim_t)top, old.rlim_max }; /* all below `top` are in use */
    close(top);
    for (int fd = 3; fd < top; fd++)
        if (fcntl(fd, F_GETFD) < 0) CHECK(dup2(0, fd) == fd);
    CHECK_OK(setrlimit(RLIMIT_NOFILE, &tight));
    CHECK(dup(0) < 0 && errno == EMFILE);
    /* after EMFILE its descriptor is not readable, so that a waiting thread sleeps */
    control_poll(b->hub, on_event, b);
    struct epoll_event e;
    CHECK_EQ_INT(epoll_wait(control_wait_fd(b->hub), &e, 1, 20), 0);
    settle(b, NULL, 300);
    CHECK_EQ_INT(b->n, 0);
    CHECK_OK(setrlimit(RLIMIT_NOFILE, &old));
    raw_preamble(waiting, KVT_PREAMBLE_TICKET, b->ticket);
    until(b, 1, a); /* it is accepted later */
    CHECK(b->seen[0].kind == CONTROL_OPENED);
    close(waiting);
    side_stop(a);
    side_stop(b);
}

TEST(control_connections_have_a_limit)
{
    struct side *a = side_start(), *b = side_on(NULL, 2);
    int fds[3];
    uint8_t answer[64];
    bool closed;
    for (int i = 0; i < 3; i++) {
        fds[i] = raw(b);
        raw_preamble(fds[i], KVT_PREAMBLE_TICKET, b->ticket);
        b->used = false;
        settle(b, NULL, 20);
    }
    CHECK_EQ_INT(b->n, 2);
    CHECK_EQ_INT(b->n_admits, 2); /* the third one's ticket is not looked at */
    CHECK_EQ_INT(raw_read(fds[2], b, answer, sizeof answer, 2000, &closed), KVT_PREAMBLE_BYTES);
    struct kvt_preamble p;
    CHECK_OK(kvt_preamble_decode(answer, KVT_PREAMBLE_BYTES, &p));
    CHECK_EQ_INT(p.kind, KVT_PREAMBLE_REFUSED);
    CHECK(closed);
    struct control_conn *c;
    struct err err = { 0 };
    CHECK_STATUS(control_connect(b->hub, control_address(a->hub), a->ticket, NULL, &c, &err),
                 ERR_FULL);
    for (int i = 0; i < 3; i++) close(fds[i]);
    until(b, 4, NULL); /* both are LOST */
    control_close(b->seen[2].conn);
    control_close(b->seen[3].conn);
    settle(b, NULL, 20);
    b->used = false;
    struct control_conn *in;
    pair(a, b, &in);
    side_stop(a);
    side_stop(b);
}

TEST(control_half_open_connections_keep_no_peer_out)
{
    enum { STRANGERS = 12 };
    struct side *a = side_start(), *b = side_on(NULL, 4);
    int fds[STRANGERS], n_open = 0;
    char byte;
    for (int i = 0; i < STRANGERS; i++) {
        fds[i] = raw(b);
        settle(b, NULL, 5);
    }
    for (int i = 0; i < STRANGERS; i++) n_open += recv(fds[i], &byte, 1, MSG_DONTWAIT) < 0;
    CHECK(n_open > 0 && n_open <= 4);
    struct control_conn *in;
    uint64_t t = clock_ms();
    pair(a, b, &in);
    CHECK(clock_ms() - t < 1000); /* the strangers' deadline is later */
    (void)dial(b, a, a->ticket);  /* they take no place of outgoing connections either */
    for (int i = 0; i < STRANGERS; i++) close(fds[i]);
    side_stop(a);
    side_stop(b);
}

TEST(control_interface_by_name)
{
    struct side *s = side_on("lo", 4), *t = side_start();
    CHECK(str_starts(control_address(s->hub), "127.0.0.1 "));
    struct control_conn *in;
    pair(s, t, &in);
    struct sockaddr_storage local, remote;
    control_addresses(in, &local, &remote);
    CHECK_EQ_INT(((struct sockaddr_in *)&remote)->sin_addr.s_addr, htonl(INADDR_LOOPBACK));
    struct err err = { 0 };
    struct control_hub *h = NULL;
    CHECK_STATUS(control_open(&s->env, "test", 0, "nosuch0", &h, &err), ERR_CONFIG);
    CHECK(strstr(err.text, "nosuch0") && strstr(err.text, "KVCACHE_SOCKET_IFNAME"));
    CHECK_STATUS(control_open(&s->env, "test", control_port(s->hub), NULL, &h, &err), ERR_CONFIG);
    CHECK(strstr(err.text, "another port option of this node has the same port"));
    side_stop(s);
    side_stop(t);
}

/* Finds the first interface other than lo with an IPv4 address; false: none. */
static bool far_interface(char name[IF_NAMESIZE])
{
    struct ifaddrs *list = NULL;
    bool found = false;
    CHECK_EQ_INT(getifaddrs(&list), 0);
    for (struct ifaddrs *i = list; i && !found; i = i->ifa_next)
        if (i->ifa_addr && i->ifa_addr->sa_family == AF_INET && strcmp(i->ifa_name, "lo") != 0) {
            snprintf(name, IF_NAMESIZE, "%s", i->ifa_name);
            found = true;
        }
    freeifaddrs(list);
    return found;
}

/* Like the nodes of a launcher: any address is listened on, loopback is advertised. */
TEST(control_interface_is_where_peers_are_told_to_come)
{
    char name[IF_NAMESIZE];
    if (!far_interface(name)) SKIP("this host has no interface with an IPv4 address but lo");
    struct buf address = { 0 };
    struct err err = { 0 };
    struct control_hub *h = NULL;
    struct kvt_env env = {
        .listen_host = "0.0.0.0",
        .advertise_host = "127.0.0.1",
        .max_peers = 1,
    };
    CHECK_OK(kvt_address_of_interface(name, &address, &err));
    CHECK_OK(control_open(&env, "test", 0, name, &h, &err));
    CHECK(str_starts(control_address(h), address.data));
    control_hub_free(h);
    env.advertise_host = "198.51.100.77"; /* no address of this host, as behind NAT */
    CHECK_OK(control_open(&env, "test", 0, name, &h, &err));
    CHECK(str_starts(control_address(h), "198.51.100.77 "));
    control_hub_free(h);
    buf_release(&address);
}

TEST(control_interface_opens_no_port_beyond_the_address_asked_for)
{
    char name[IF_NAMESIZE];
    if (!far_interface(name)) SKIP("this host has no interface with an IPv4 address but lo");
    struct side *s = side_on(name, 4);
    CHECK(str_starts(control_address(s->hub), "127.0.0.1 "));
    side_stop(s);
}

TEST(control_addresses_are_numeric)
{
    CHECK(control_can_reach(STR("127.0.0.1 80")) && control_can_reach(STR("::1 80")));
    static const char *const bad[] = {
        "", "127.0.0.1", "127.0.0.1 0", "127.0.0.1 65536", "localhost 80", "127.0.0.1 80 "
    };
    for (size_t i = 0; i < COUNT_OF(bad); i++) CHECK(!control_can_reach(str_of(bad[i])));
}

/* A host that vanished stays silent; socket options make the kernel detect this within 3 s. The
 * test can only check that the options are set. */
TEST(control_connections_are_kept_alive)
{
    struct side *a = side_start(), *b = side_start();
    struct control_conn *in;
    pair(a, b, &in);
    int n_checked = 0;
    for (int fd = 0; fd < 256; fd++) { /* only two sockets have a peer */
        int on = 0, idle = 0, interval = 0, timeout_ms = 0;
        struct sockaddr_in peer;
        socklen_t n = sizeof peer;
        if (getpeername(fd, (struct sockaddr *)&peer, &n) != 0 || peer.sin_family != AF_INET)
            continue;
        n = sizeof(int);
        CHECK_OK(getsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, &n));
        CHECK_OK(getsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, &n));
        CHECK_OK(getsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, &n));
        CHECK_OK(getsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout_ms, &n));
        CHECK(on && timeout_ms > 0 && timeout_ms < 3000);
        CHECK((idle + interval) * 1000 <= 3000);
        n_checked++;
    }
    CHECK_EQ_INT(n_checked, 2);
    side_stop(a);
    side_stop(b);
}

TEST_MAIN(
    CASE(control_opens_and_passes_frames_in_order),
    CASE(control_wrong_and_used_tickets_are_refused), CASE(control_bodies_and_queues_have_limits),
    CASE(control_closing_lets_the_last_frames_out),
    CASE(control_handler_may_close_its_own_connection), CASE(control_peer_that_goes_is_lost_once),
    CASE(control_malformed_frames_end_the_connection), CASE(control_bad_greetings_end_silently),
    CASE(control_silent_peers_meet_a_deadline), CASE(control_listener_that_speaks_something_else),
    CASE(control_full_descriptor_table_pauses_accepting), CASE(control_connections_have_a_limit),
    CASE(control_half_open_connections_keep_no_peer_out), CASE(control_interface_by_name),
    CASE(control_interface_is_where_peers_are_told_to_come),
    CASE(control_interface_opens_no_port_beyond_the_address_asked_for),
    CASE(control_addresses_are_numeric), CASE(control_connections_are_kept_alive))
