/* probe/server.c - see probe/server.h. */
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

struct visitor {
    struct list link;
    struct agent *agent;
    struct link *connection; /* NULL: gone; freed when its step has ended */
    bool busy;
    uint64_t t_asked_ms, i_request;
    struct probe_session session;
    struct probe_request request;
    struct probe_reply reply;
};

struct agent {
    struct agent_options o;
    struct loop *loop;
    struct link_host host;
    uv_tcp_t *listener;
    struct list links, visitors;
    struct loop_timer *tick, *kick;
    uint16_t port;
};

/* ---- visitors ---- */

static void free_visitor(void *arg)
{
    struct visitor *v = arg;
    probe_session_release(&v->session);
    mem_free(v);
}

static void forget_visitor(void *arg) { (void)arg; }

/* Closing an end waits for its transfer thread: a worker does it. */
static void release_visitor(struct visitor *v)
{
    struct agent *a = v->agent;
    list_remove(&v->link);
    if (loop_work(a->loop, free_visitor, forget_visitor, v) != OK) free_visitor(v);
}

static struct visitor *find_visitor(struct agent *a, const struct link *l)
{
    LIST_FOREACH(v, &a->visitors, struct visitor, link)
    if (v->connection == l) return v;
    return NULL;
}

/* This host's address as the peer of the connection used it. */
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
    struct agent *a = arg;
    struct visitor *v = MEM_NEW(struct visitor);
    char host[PROBE_ADDRESS_MAX];
    local_address(l, host, sizeof host);
    v->agent = a;
    v->connection = l;
    v->t_asked_ms = clock_ms();
    probe_session_init(&v->session, &a->o.tuning, a->o.secret.n == 0, host);
    list_push(&a->visitors, &v->link);
}

/* ---- steps ---- */

static void do_request(void *arg)
{
    struct visitor *v = arg;
    probe_session_do(&v->session, &v->request, &v->reply);
}

static void send_reply(struct visitor *v)
{
    struct buf body = { 0 };
    probe_reply_encode(&v->reply, &body);
    struct frame_header h = {
        .type = FRAME_PROBE_REPLY,
        .length = (uint32_t)body.len,
        .request = v->i_request,
        .incarnation = v->connection->node,
    };
    if (body.len > FRAME_BODY_MAX || link_send(v->connection, &h, buf_str(&body)) != OK)
        link_fail(v->connection, "a reply of %zu bytes could not be sent", body.len);
    buf_release(&body);
}

static void on_done(void *arg)
{
    struct visitor *v = arg;
    v->busy = false;
    v->t_asked_ms = clock_ms();
    if (v->connection) send_reply(v);
    probe_request_release(&v->request);
    probe_reply_release(&v->reply);
    if (!v->connection) release_visitor(v);
}

static void on_frame(void *arg, struct link *l, const struct frame_header *h, struct str body)
{
    struct agent *a = arg;
    struct visitor *v = find_visitor(a, l);
    struct err err = { 0 };
    if (!v || h->type != FRAME_PROBE) {
        link_fail(l, "an agent takes probe messages only, not %s", frame_type_name(h->type));
        return;
    }
    if (v->busy) {
        link_fail(l, "a second step before the first has ended");
        return;
    }
    memset(&v->reply, 0, sizeof v->reply);
    v->i_request = h->request;
    v->busy = true;
    enum status st = probe_request_decode(body, &v->request, &err);
    if (st == OK) st = loop_work(a->loop, do_request, on_done, v);
    if (st == OK) return;
    v->reply.status = st;
    snprintf(v->reply.text, sizeof v->reply.text, "%.*s", PROBE_TEXT_MAX - 1,
             err.text[0] ? err.text : status_text(st));
    on_done(v);
}

/* ---- links ---- */

static void bury_dead(void *arg)
{
    struct agent *a = arg;
    loop_timer_free(a->kick);
    a->kick = NULL;
    LIST_FOREACH(l, &a->links, struct link, link)
    {
        if (!l->dead) continue;
        struct visitor *v = find_visitor(a, l);
        if (v) v->connection = NULL;
        if (v && !v->busy) release_visitor(v);
        if (l->state != LINK_UP)
            log_warn("probe connection refused", "peer=%s why=\"%s\"", l->name[0] ? l->name : "?",
                     l->why);
        link_close(l);
    }
}

static void on_dead(void *arg, struct link *l)
{
    struct agent *a = arg;
    (void)l;
    if (!a->kick) a->kick = loop_timer_start(a->loop, 0, 0, bury_dead, a);
}

static void on_tick(void *arg)
{
    struct agent *a = arg;
    uint64_t now = clock_ms();
    LIST_FOREACH(l, &a->links, struct link, link)
    {
        struct visitor *v = find_visitor(a, l);
        if (l->dead) continue;
        if (l->state != LINK_UP && now > l->t_start_ms + LINK_HANDSHAKE_MS)
            link_fail(l, "no handshake within %d ms", LINK_HANDSHAKE_MS);
        else if (v && !v->busy && now > v->t_asked_ms + AGENT_IDLE_MS)
            link_fail(l, "nothing asked for %d s", AGENT_IDLE_MS / 1000);
    }
}

static void on_connection(uv_stream_t *listener, int st)
{
    struct agent *a = listener->data;
    size_t n = 0;
    if (st < 0) return;
    LIST_FOREACH(other, &a->links, struct link, link) n++;
    struct link *l = link_accept(&a->host, listener);
    list_push(&a->links, &l->link);
    if (n >= AGENT_VISITORS_MAX)
        link_fail(l, "%d visitors are here, the limit", AGENT_VISITORS_MAX);
    if (l->dead) on_dead(a, l);
}

/* ---- life ---- */

static void on_listener_closed(uv_handle_t *h) { mem_free(h); }

static enum status start_listening(struct agent *a, struct err *err)
{
    struct sockaddr_storage sa;
    int len = sizeof sa;
    a->listener = MEM_NEW(uv_tcp_t);
    uv_tcp_init(loop_uv(a->loop), a->listener);
    a->listener->data = a;
    int st = uv_ip4_addr(a->o.host, a->o.port, (struct sockaddr_in *)&sa);
    if (st < 0) st = uv_ip6_addr(a->o.host, a->o.port, (struct sockaddr_in6 *)&sa);
    if (st == 0) st = uv_tcp_bind(a->listener, (const struct sockaddr *)&sa, 0);
    if (st == 0) st = uv_listen((uv_stream_t *)a->listener, BACKLOG, on_connection);
    if (st == 0) st = uv_tcp_getsockname(a->listener, (struct sockaddr *)&sa, &len);
    if (st < 0)
        return err_set(err, ERR_CONFIG, "cannot listen on %s:%u: %s", a->o.host, a->o.port,
                       uv_strerror(st));
    a->port = ntohs(sa.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&sa)->sin6_port
                                             : ((struct sockaddr_in *)&sa)->sin_port);
    return OK;
}

static bool is_loopback(const char *host)
{
    return strncmp(host, "127.", 4) == 0 || str_eq_c(str_of(host), "::1");
}

enum status agent_create(const struct agent_options *o, struct agent **out, struct err *err)
{
    if (o->secret.n == 0 && !is_loopback(o->host))
        return err_set(err, ERR_CONFIG,
                       "without a cluster secret (BATON_CLUSTER_SECRET) an agent listens on "
                       "loopback only, not on %s",
                       o->host);
    struct agent *a = MEM_NEW(struct agent);
    a->o = *o;
    list_init(&a->links);
    list_init(&a->visitors);
    enum status st = loop_create(&a->loop, err);
    if (st != OK) {
        mem_free(a);
        return st;
    }
    uint64_t self = 0;
    while (self == 0) random_bytes(&self, sizeof self);
    a->host = (struct link_host){
        .loop = a->loop,
        .self = self,
        .name = "agent",
        .secret = o->secret,
        .queue_bytes = QUEUE_BYTES,
        .on_up = on_up,
        .on_frame = on_frame,
        .on_dead = on_dead,
        .arg = a,
    };
    st = start_listening(a, err);
    if (st == OK) *out = a;
    else agent_free(a);
    return st;
}

uint16_t agent_port(const struct agent *a) { return a->port; }

/* The loop waits for steps that are being done; one that waits for a peer that is gone is cut off
 * by the alarm. */
static void on_signal(void *arg, int signum)
{
    struct agent *a = arg;
    bool busy = false;
    (void)signum;
    LIST_FOREACH(v, &a->visitors, struct visitor, link) busy |= v->busy;
    if (busy) alarm(STOP_S);
    loop_stop(a->loop);
}

void agent_run(struct agent *a)
{
    a->tick = loop_timer_start(a->loop, TICK_MS, TICK_MS, on_tick, a);
    loop_on_signal(a->loop, on_signal, a);
    loop_run(a->loop);
}

void agent_free(struct agent *a)
{
    if (!a) return;
    LIST_FOREACH(v, &a->visitors, struct visitor, link)
    {
        list_remove(&v->link);
        free_visitor(v);
    }
    LIST_FOREACH(l, &a->links, struct link, link) link_close(l);
    if (a->listener) uv_close((uv_handle_t *)a->listener, on_listener_closed);
    loop_free(a->loop);
    mem_free(a);
}

/* ---- in a process of its own ---- */

static _Noreturn void child_main(const struct agent_options *o, int pipe_fd)
{
    struct agent *a = NULL;
    struct err err = { 0 };
    struct {
        uint16_t port;
        char text[ERR_TEXT_MAX];
    } said = { 0 };
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    enum status st = agent_create(o, &a, &err);
    if (st == OK) said.port = agent_port(a);
    snprintf(said.text, sizeof said.text, "%s", err.text);
    bool told = write(pipe_fd, &said, sizeof said) == sizeof said;
    close(pipe_fd);
    if (st == OK && told) agent_run(a);
    agent_free(a);
    _exit(0);
}

enum status agent_fork(const struct agent_options *o, int *pid, uint16_t *port, struct err *err)
{
    struct {
        uint16_t port;
        char text[ERR_TEXT_MAX];
    } said = { 0 };
    int fds[2];
    if (pipe2(fds, O_CLOEXEC) != 0) return err_set(err, ERR_IO, "no pipe: %s", strerror(errno));
    *pid = fork();
    if (*pid == 0) {
        close(fds[0]);
        child_main(o, fds[1]);
    }
    close(fds[1]);
    ssize_t n = *pid > 0 ? read(fds[0], &said, sizeof said) : -1;
    close(fds[0]);
    if (*pid < 0) return err_set(err, ERR_IO, "no process for the other side: %s", strerror(errno));
    if (n == sizeof said && said.port) {
        *port = said.port;
        return OK;
    }
    agent_child_end(*pid);
    return err_set(err, ERR_CONFIG, "the other side did not start: %s", said.text);
}

void agent_child_end(int pid)
{
    if (pid <= 0) return;
    kill(pid, SIGTERM);
    while (waitpid(pid, NULL, 0) < 0 && errno == EINTR) {}
}
