/* client.c - see client.h. */
#include "deploy/probe/client.h"

#include <netdb.h>
#include <stdio.h>
#include <string.h>

#include "shared/base/address/host_port.h"
#include "shared/base/clock.h"
#include "shared/base/hash/hash.h"
#include "shared/base/mem.h"
#include "shared/cluster/link.h"

enum { QUEUE_BYTES = 64 << 20 };

struct probe_dialer {
    struct loop *loop;
    struct link_options link_options;
    struct list links, clients;
};

struct probe_client {
    struct probe_dialer *h;
    struct list link;
    struct link *connection;
    struct probe_peer peer;
    uint64_t i_request;
    bool up, waiting, answered, expired;
    uint64_t limit_ms; /* request number of the step in flight */
    struct buf reply;  /* body of the reply */
};

/* ---- link events ---- */

static struct probe_client *find_client(struct probe_dialer *h, const struct link *l)
{
    LIST_FOREACH (c, &h->clients, struct probe_client, link)
        if (c->connection == l) return c;
    return NULL;
}

static void on_up(void *arg, struct link *l)
{
    struct probe_client *c = find_client(arg, l);
    if (c) c->up = true;
}

static void on_frame(void *arg, struct link *l, const struct frame_header *h, struct str body)
{
    struct probe_client *c = find_client(arg, l);
    /* A running node also pings and may send other frames; ignore what was not asked for. */
    if (!c || h->type != FRAME_PROBE_REPLY || !c->waiting || h->request != c->i_request) return;
    buf_clear(&c->reply);
    buf_add_str(&c->reply, body);
    c->waiting = false;
    c->answered = true;
}

/* The link closes when its client hangs up; until then `dead` and `why` are read from it. */
static void on_dead(void *arg, struct link *l)
{
    (void)arg;
    (void)l;
}

/* ---- life ---- */

enum status probe_dialer_create(struct str secret, struct probe_dialer **out, struct err *err)
{
    struct probe_dialer *h = MEM_NEW(struct probe_dialer);
    enum status st = loop_create(&h->loop, err);
    if (st != OK) {
        mem_free(h);
        return st;
    }
    uint64_t self = 0;
    while (self == 0) random_bytes(&self, sizeof self);
    list_init(&h->links);
    list_init(&h->clients);
    h->link_options = (struct link_options){
        .loop = h->loop,
        .self = self,
        .name = LINK_PROBE_NAME,
        .secret = secret,
        .queue_bytes = QUEUE_BYTES,
        .on_up = on_up,
        .on_frame = on_frame,
        .on_dead = on_dead,
        .arg = h,
    };
    *out = h;
    return OK;
}

void probe_dialer_free(struct probe_dialer *h)
{
    if (!h) return;
    loop_free(h->loop);
    mem_free(h);
}

const struct probe_peer *probe_peer(const struct probe_client *c) { return &c->peer; }

/* ---- waiting ---- */

static void on_expired(void *arg)
{
    struct probe_client *c = arg;
    c->expired = true;
}

/* Runs the loop until *flag is set, the link dies or the time is up. */
static void wait_for(struct probe_client *c, const bool *flag, uint64_t limit_ms)
{
    c->expired = false;
    struct loop_timer *t = loop_timer_start(c->h->loop, limit_ms, 0, on_expired, c);
    while (!*flag && !c->connection->dead && !c->expired) uv_run(loop_uv(c->h->loop), UV_RUN_ONCE);
    loop_timer_free(t);
}

/* ---- dialing ---- */

static enum status look_up(const char *where, char *address, size_t cap, uint16_t *port,
                           struct err *err)
{
    char host[HOST_TEXT_MAX];
    struct addrinfo hints = { .ai_socktype = SOCK_STREAM }, *ai = NULL;
    if (!host_port_parse(where, host, port) || !host[0] || *port == 0)
        return err_set(err, ERR_CONFIG, "'%.100s' is not host:port", where);
    int rc = getaddrinfo(host, NULL, &hints, &ai);
    if (rc != 0)
        return err_set(err, ERR_PEER_LOST, "the host '%s' is not known: %s", host,
                       gai_strerror(rc));
    rc = getnameinfo(ai->ai_addr, ai->ai_addrlen, address, (socklen_t)cap, NULL, 0, NI_NUMERICHOST);
    freeaddrinfo(ai);
    if (rc != 0)
        return err_set(err, ERR_PEER_LOST, "the host '%s' has no address that can be used: %s",
                       host, gai_strerror(rc));
    return OK;
}

static enum status why_not_up(const struct probe_client *c, struct err *err)
{
    const char *where = c->peer.where, *why = c->connection->why;
    if (!c->connection->dead)
        return err_set(err, ERR_TIMEOUT, "%s takes connections but does not answer within %d s",
                       where, PROBE_DIAL_MS / 1000);
    if (strstr(why, "another cluster secret"))
        return err_set(err, ERR_UNAUTHORIZED, "%s has another cluster secret than this host",
                       where);
    if (strncmp(why, "connect", 7) == 0) return err_set(err, ERR_PEER_LOST, "%s: %s", where, why);
    return err_set(err, ERR_PEER_REFUSED, "%s is no probe server and no node's cluster port: %s",
                   where, why);
}

static void local_address(const struct link *l, char *out, size_t cap)
{
    struct sockaddr_storage sa;
    int len = sizeof sa, st = uv_tcp_getsockname(&l->tcp, (struct sockaddr *)&sa, &len);
    if (st == 0)
        st = sa.ss_family == AF_INET6 ? uv_ip6_name((struct sockaddr_in6 *)&sa, out, cap)
                                      : uv_ip4_name((struct sockaddr_in *)&sa, out, cap);
    if (st != 0) out[0] = 0;
}

static enum status ask_who(struct probe_client *c, struct err *err)
{
    struct probe_request r = { .step = PROBE_WHO };
    struct probe_reply *reply = MEM_NEW(struct probe_reply);
    enum status st = probe_ask(c, &r, reply, err);
    if (st == OK) {
        snprintf(c->peer.host, sizeof c->peer.host, "%s", reply->host);
        snprintf(c->peer.boot_id, sizeof c->peer.boot_id, "%s", reply->boot_id);
        snprintf(c->peer.version, sizeof c->peer.version, "%s", reply->version);
        snprintf(c->peer.transports, sizeof c->peer.transports, "%.*s",
                 STR_ARG(buf_str(&reply->data)));
    } else if (reply->status == ERR_PEER_REFUSED) {
        st = err_set(err, ERR_BUSY, "%s is %s", c->peer.where, reply->text);
    } else if (c->connection->dead) {
        st = err_set(err, ERR_PEER_REFUSED, "%s is '%s', which is no probe server: %s",
                     c->peer.where, c->connection->name, c->connection->why);
    }
    probe_reply_release(reply);
    mem_free(reply);
    return st;
}

enum status probe_dial(struct probe_dialer *h, const char *where, struct probe_client **out,
                       struct err *err)
{
    char address[PROBE_ADDRESS_MAX];
    uint16_t port = 0;
    TRY(look_up(where, address, sizeof address, &port, err));
    struct probe_client *c = MEM_NEW(struct probe_client);
    c->h = h;
    snprintf(c->peer.where, sizeof c->peer.where, "%s", where);
    snprintf(c->peer.address, sizeof c->peer.address, "%s", address);
    c->connection = link_dial(&h->link_options, 0, address, port);
    list_push(&h->links, &c->connection->link);
    list_push(&h->clients, &c->link);
    wait_for(c, &c->up, PROBE_DIAL_MS);
    enum status st = c->up ? OK : why_not_up(c, err);
    if (st == OK) {
        local_address(c->connection, c->peer.local, sizeof c->peer.local);
        c->peer.process = c->connection->node;
        st = ask_who(c, err);
    }
    if (st == OK) *out = c;
    else probe_hang_up(c);
    return st;
}

void probe_hang_up(struct probe_client *c)
{
    if (!c) return;
    list_remove(&c->link);
    link_close(c->connection);
    buf_release(&c->reply);
    mem_free(c);
}

/* ---- asking ---- */

/* Time limits, longer than the step itself may take at the server. */
static uint64_t limit_of(enum probe_step step)
{
    if (step >= PROBE_STREAM) return PROBE_ASK_MS; /* COPY, STREAM, DRAIN and tools */
    return step == PROBE_SEND || step == PROBE_TAKE ? PROBE_ASK_MS / 2 : PROBE_ASK_MS / 4;
}

enum status probe_ask_begin(struct probe_client *c, const struct probe_request *r, struct err *err)
{
    struct buf body = { 0 };
    probe_request_encode(r, &body);
    struct frame_header h = {
        .type = FRAME_PROBE,
        .length = (uint32_t)body.len,
        .request = ++c->i_request,
        .incarnation = c->connection->node,
    };
    enum status st = body.len > FRAME_BODY_MAX ? ERR_TOO_LONG
                                               : link_send(c->connection, &h, buf_str(&body));
    buf_release(&body);
    c->answered = false;
    c->waiting = st == OK;
    c->limit_ms = limit_of(r->step);
    if (st == OK) return OK;
    return err_set(err, st, "%s: the step %s cannot be sent: %s", c->peer.where,
                   probe_step_name(r->step),
                   c->connection->why[0] ? c->connection->why : status_text(st));
}

enum status probe_ask_finish(struct probe_client *c, struct probe_reply *reply, struct err *err)
{
    memset(reply, 0, sizeof *reply);
    wait_for(c, &c->answered, c->limit_ms);
    if (!c->answered && c->connection->dead)
        return err_set(err, ERR_PEER_LOST, "%s: %s", c->peer.where, c->connection->why);
    if (!c->answered) {
        /* close the link: a late reply would not fit the next step */
        link_fail(c->connection, "it did not answer within %d s", (int)(c->limit_ms / 1000));
        return err_set(err, ERR_TIMEOUT, "%s: %s", c->peer.where, c->connection->why);
    }
    TRY(probe_reply_decode(buf_str(&c->reply), reply, err));
    return reply->status == OK ? OK : err_set(err, reply->status, "%s", reply->text);
}

enum status probe_ask(struct probe_client *c, const struct probe_request *r,
                      struct probe_reply *reply, struct err *err)
{
    memset(reply, 0, sizeof *reply);
    TRY(probe_ask_begin(c, r, err));
    return probe_ask_finish(c, reply, err);
}
