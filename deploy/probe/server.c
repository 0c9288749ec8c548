/* server.c - see server.h. */
#include "deploy/probe/server.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "deploy/probe/session.h"
#include "shared/base/clock.h"
#include "shared/base/hash/hash.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/cluster/link.h"

enum { TICK_MS = 500, QUEUE_BYTES = 64 << 20, BACKLOG = 32, STOP_S = 2 };

struct server_client {
    struct list link;
    struct probe_server *server;
    struct link *connection; /* NULL: gone; the client is freed when its step has ended */
    bool busy;
    uint64_t t_asked_ms, i_request;
    struct probe_session session;
    struct probe_request request;
    struct probe_reply reply;
};

struct probe_server {
    struct probe_server_options o;
    struct loop *loop;
    struct link_options link_options;
    uv_tcp_t *listener;
    struct list links, clients;
    struct loop_timer *tick, *reap;
    uint16_t port;
};

/* ---- clients ---- */

static void free_client(void *arg)
{
    struct server_client *c = arg;
    probe_session_release(&c->session);
    mem_free(c);
}

static void on_client_freed(void *arg) { (void)arg; }

/* Releases on a worker: closing an endpoint waits for its transfer thread. */
static void release_client(struct server_client *c)
{
    struct probe_server *s = c->server;
    list_remove(&c->link);
    if (loop_work(s->loop, free_client, on_client_freed, c) != OK) free_client(c);
}

static struct server_client *find_client(struct probe_server *s, const struct link *l)
{
    LIST_FOREACH (c, &s->clients, struct server_client, link)
        if (c->connection == l) return c;
    return NULL;
}

/* The address of this host that the peer of the connection used. */
static void local_address(const struct link *l, char *out, size_t cap)
{
    struct sockaddr_storage sa;
    int len = sizeof sa, st = uv_tcp_getsockname(&l->tcp, (struct sockaddr *)&sa, &len);
    if (st == 0)
        st = sa.ss_family == AF_INET6 ? uv_ip6_name((struct sockaddr_in6 *)&sa, out, cap)
                                      : uv_ip4_name((struct sockaddr_in *)&sa, out, cap);
    if (st != 0) snprintf(out, cap, "127.0.0.1");
}

static void on_up(void *arg, struct link *l)
{
    struct probe_server *s = arg;
    struct server_client *c = MEM_NEW(struct server_client);
    char host[PROBE_ADDRESS_MAX];
    local_address(l, host, sizeof host);
    c->server = s;
    c->connection = l;
    c->t_asked_ms = clock_ms();
    probe_session_init(&c->session, &s->o.tuning, s->o.secret.n == 0, host);
    list_push(&s->clients, &c->link);
}

/* ---- steps ---- */

static void do_request(void *arg)
{
    struct server_client *c = arg;
    probe_session_do(&c->session, &c->request, &c->reply);
}

static void send_reply(struct server_client *c)
{
    struct buf body = { 0 };
    probe_reply_encode(&c->reply, &body);
    struct frame_header h = {
        .type = FRAME_PROBE_REPLY,
        .length = (uint32_t)body.len,
        .request = c->i_request,
        .incarnation = c->connection->node,
    };
    if (body.len > FRAME_BODY_MAX || link_send(c->connection, &h, buf_str(&body)) != OK)
        link_fail(c->connection, "a reply of %zu bytes could not be sent", body.len);
    buf_release(&body);
}

static void on_done(void *arg)
{
    struct server_client *c = arg;
    c->busy = false;
    c->t_asked_ms = clock_ms();
    if (c->connection) send_reply(c);
    probe_request_release(&c->request);
    probe_reply_release(&c->reply);
    if (!c->connection) release_client(c);
}

static void on_frame(void *arg, struct link *l, const struct frame_header *h, struct str body)
{
    struct probe_server *s = arg;
    struct server_client *c = find_client(s, l);
    struct err err = { 0 };
    if (!c || h->type != FRAME_PROBE) {
        link_fail(l, "a probe server takes probe messages only, not %s", frame_type_name(h->type));
        return;
    }
    if (c->busy) {
        link_fail(l, "a second step before the first has ended");
        return;
    }
    memset(&c->reply, 0, sizeof c->reply);
    c->i_request = h->request;
    c->busy = true;
    enum status st = probe_request_decode(body, &c->request, &err);
    if (st == OK) st = loop_work(s->loop, do_request, on_done, c);
    if (st == OK) return;
    c->reply.status = st;
    snprintf(c->reply.text, sizeof c->reply.text, "%.*s", PROBE_TEXT_MAX - 1,
             err.text[0] ? err.text : status_text(st));
    on_done(c);
}

/* ---- links ---- */

static void reap_dead(void *arg)
{
    struct probe_server *s = arg;
    loop_timer_free(s->reap);
    s->reap = NULL;
    LIST_FOREACH (l, &s->links, struct link, link) {
        if (!l->dead) continue;
        struct server_client *c = find_client(s, l);
        if (c) c->connection = NULL;
        if (c && !c->busy) release_client(c);
        if (l->state != LINK_UP)
            log_warn("probe connection refused", "peer=%s why=\"%s\"", l->name[0] ? l->name : "?",
                     l->why);
        link_close(l);
    }
}

static void on_dead(void *arg, struct link *l)
{
    struct probe_server *s = arg;
    (void)l;
    if (!s->reap) s->reap = loop_timer_start(s->loop, 0, 0, reap_dead, s);
}

static void on_tick(void *arg)
{
    struct probe_server *s = arg;
    uint64_t now = clock_ms();
    LIST_FOREACH (l, &s->links, struct link, link) {
        struct server_client *c = find_client(s, l);
        if (l->dead) continue;
        if (l->state != LINK_UP && now > l->t_start_ms + LINK_HANDSHAKE_MS)
            link_fail(l, "no handshake within %d ms", LINK_HANDSHAKE_MS);
        else if (c && !c->busy && now > c->t_asked_ms + PROBE_SERVER_IDLE_MS)
            link_fail(l, "nothing asked for %d s", PROBE_SERVER_IDLE_MS / 1000);
    }
}

static void on_connection(uv_stream_t *listener, int st)
{
    struct probe_server *s = listener->data;
    size_t n = 0;
    if (st < 0) return;
    LIST_FOREACH (other, &s->links, struct link, link) n++;
    struct link *l = link_accept(&s->link_options, listener);
    list_push(&s->links, &l->link);
    if (n >= PROBE_SERVER_CLIENTS_MAX)
        link_fail(l, "%d clients are connected, the limit", PROBE_SERVER_CLIENTS_MAX);
    if (l->dead) on_dead(s, l);
}

/* ---- life ---- */

static void on_listener_closed(uv_handle_t *h) { mem_free(h); }

static enum status start_listening(struct probe_server *s, struct err *err)
{
    struct sockaddr_storage sa;
    int len = sizeof sa;
    s->listener = MEM_NEW(uv_tcp_t);
    uv_tcp_init(loop_uv(s->loop), s->listener);
    s->listener->data = s;
    int st = uv_ip4_addr(s->o.host, s->o.port, (struct sockaddr_in *)&sa);
    if (st < 0) st = uv_ip6_addr(s->o.host, s->o.port, (struct sockaddr_in6 *)&sa);
    if (st == 0) st = uv_tcp_bind(s->listener, (const struct sockaddr *)&sa, 0);
    if (st == 0) st = uv_listen((uv_stream_t *)s->listener, BACKLOG, on_connection);
    if (st == 0) st = uv_tcp_getsockname(s->listener, (struct sockaddr *)&sa, &len);
    if (st < 0)
        return err_set(err, ERR_CONFIG, "cannot listen on %s:%u: %s", s->o.host, s->o.port,
                       uv_strerror(st));
    s->port = ntohs(sa.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&sa)->sin6_port
                                             : ((struct sockaddr_in *)&sa)->sin_port);
    return OK;
}

static bool is_loopback(const char *host)
{
    return strncmp(host, "127.", 4) == 0 || str_eq_c(str_of(host), "::1");
}

enum status probe_server_create(const struct probe_server_options *o, struct probe_server **out,
                                struct err *err)
{
    if (o->secret.n == 0 && !is_loopback(o->host))
        return err_set(err, ERR_CONFIG,
                       "without a cluster secret (BATON_CLUSTER_SECRET) a probe server listens on "
                       "loopback only, not on %s",
                       o->host);
    struct probe_server *s = MEM_NEW(struct probe_server);
    s->o = *o;
    list_init(&s->links);
    list_init(&s->clients);
    enum status st = loop_create(&s->loop, err);
    if (st != OK) {
        mem_free(s);
        return st;
    }
    uint64_t self = 0;
    while (self == 0) random_bytes(&self, sizeof self);
    s->link_options = (struct link_options){
        .loop = s->loop,
        .self = self,
        .name = "probe server",
        .secret = o->secret,
        .queue_bytes = QUEUE_BYTES,
        .on_up = on_up,
        .on_frame = on_frame,
        .on_dead = on_dead,
        .arg = s,
    };
    st = start_listening(s, err);
    if (st == OK) *out = s;
    else probe_server_free(s);
    return st;
}

uint16_t probe_server_port(const struct probe_server *s) { return s->port; }

/* Before it ends the loop waits for running steps; the alarm ends the process when a step waits for
 * a lost peer. */
static void on_signal(void *arg, int signum)
{
    struct probe_server *s = arg;
    bool busy = false;
    (void)signum;
    LIST_FOREACH (c, &s->clients, struct server_client, link) busy |= c->busy;
    if (busy) alarm(STOP_S);
    loop_stop(s->loop);
}

void probe_server_run(struct probe_server *s)
{
    s->tick = loop_timer_start(s->loop, TICK_MS, TICK_MS, on_tick, s);
    loop_on_signal(s->loop, on_signal, s);
    loop_run(s->loop);
}

void probe_server_free(struct probe_server *s)
{
    if (!s) return;
    LIST_FOREACH (c, &s->clients, struct server_client, link) {
        list_remove(&c->link);
        free_client(c);
    }
    LIST_FOREACH (l, &s->links, struct link, link) link_close(l);
    if (s->listener) uv_close((uv_handle_t *)s->listener, on_listener_closed);
    loop_free(s->loop);
    mem_free(s);
}

/* ---- in a child process ---- */

static _Noreturn void child_main(const struct probe_server_options *o, int pipe_fd)
{
    struct probe_server *s = NULL;
    struct err err = { 0 };
    struct {
        uint16_t port;
        char text[ERR_TEXT_MAX];
    } report = { 0 };
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    enum status st = probe_server_create(o, &s, &err);
    if (st == OK) report.port = probe_server_port(s);
    snprintf(report.text, sizeof report.text, "%s", err.text);
    bool reported = write(pipe_fd, &report, sizeof report) == sizeof report;
    close(pipe_fd);
    if (st == OK && reported) probe_server_run(s);
    probe_server_free(s);
    _exit(0);
}

enum status probe_server_fork(const struct probe_server_options *o, int *pid, uint16_t *port,
                              struct err *err)
{
    struct {
        uint16_t port;
        char text[ERR_TEXT_MAX];
    } report = { 0 };
    int fds[2];
    if (pipe2(fds, O_CLOEXEC) != 0) return err_set(err, ERR_IO, "no pipe: %s", strerror(errno));
    *pid = fork();
    if (*pid == 0) {
        close(fds[0]);
        child_main(o, fds[1]);
    }
    close(fds[1]);
    ssize_t n = *pid > 0 ? read(fds[0], &report, sizeof report) : -1;
    close(fds[0]);
    if (*pid < 0) return err_set(err, ERR_IO, "no process for the other side: %s", strerror(errno));
    if (n == sizeof report && report.port) {
        *port = report.port;
        return OK;
    }
    probe_server_child_stop(*pid);
    return err_set(err, ERR_CONFIG, "the other side did not start: %s", report.text);
}

void probe_server_child_stop(int pid)
{
    if (pid <= 0) return;
    kill(pid, SIGTERM);
    while (waitpid(pid, NULL, 0) < 0 && errno == EINTR) {}
}
