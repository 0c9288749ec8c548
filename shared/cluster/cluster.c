/* cluster.c - see cluster.h: peers by incarnation, their links, the queue to oneself, liveness. */
#include "shared/cluster/cluster.h"

#include <protobuf-c/protobuf-c.h>
#include <stdio.h>
#include <string.h>

#include "shared/base/address/port.h"
#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/log/log_repeats.h"
#include "shared/base/map.h"
#include "shared/base/mem.h"
#include "shared/base/thread.h"
#include "shared/cluster/link.h"
#include "shared/cluster/proto/node.pb-c.h"

enum {
    PING_MS = 500,
    CHECK_MS = 100, /* between two looks at the links and at the engine's progress */
    MEET_MS = 500,  /* of cluster_meet, until a further call may give a connection up */
    DEFAULT_LOST_MS = 2500,
    DEFAULT_QUEUE = 64 << 20,
    DEFAULT_FORGET_MS = 60000,
    PEER_HOST_MAX = 64,
    BACKLOG = 512
};

struct peer {
    uint64_t node;
    char host[PEER_HOST_MAX];
    uint16_t port; /* 0: it connected to us, its address is not known */
    uint64_t t_learned_ms;
    struct link *link;   /* used for sending; NULL: none yet */
    struct list pending; /* messages waiting for the link to come up */
    size_t pending_bytes;
};

struct queued_message {
    struct frame_header h;
    struct list link;
    size_t n;
    char bytes[];
};

struct cluster {
    struct cluster_options o;
    struct link_options link_options;
    char name[LINK_NAME_MAX];
    struct buf secret;
    uv_tcp_t *listener;
    uint16_t port;
    struct map peers; /* node -> struct peer */
    struct list links;
    struct unproven strangers; /* accepted links that are not up */
    struct list to_self;       /* struct queued_message */
    struct loop_timer *check, *wake;
    uint64_t t_check_ms, t_ping_ms;
    uint64_t progress, t_progress_ms; /* of this node's engine: its counter, and when it moved */
    bool has_work;
    struct counter *sent, *received, *lost, *refused;
    struct gauge *links_up;
    struct log_repeats refusals, losses;
};

static void wake(struct cluster *c);

/* ---- peers ---- */

static struct peer *find_peer(const struct cluster *c, uint64_t node)
{
    return map_get(&c->peers, map_key_u64(&node));
}

static struct peer *get_peer(struct cluster *c, uint64_t node)
{
    struct peer *p = find_peer(c, node);
    if (p) return p;
    p = MEM_NEW(struct peer);
    p->node = node;
    list_init(&p->pending);
    map_put(&c->peers, map_key_u64(&p->node), p);
    return p;
}

static void free_peer(struct peer *p)
{
    LIST_FOREACH (q, &p->pending, struct queued_message, link) mem_free(q);
    mem_free(p);
}

void cluster_learn(struct cluster *c, uint64_t node, const char *host, uint16_t port)
{
    if (node == c->o.node || node == 0) return;
    struct peer *p = get_peer(c, node);
    snprintf(p->host, sizeof p->host, "%s", host);
    p->port = port;
    p->t_learned_ms = clock_ms();
}

/* Forgets peers that nobody mentioned for forget_ms. Every restart of a node makes a new peer, so
 * they would add up. */
static void forget_old(struct cluster *c, uint64_t now)
{
    size_t pos = 0;
    struct str key;
    void *value;
    while (map_next(&c->peers, &pos, &key, &value)) {
        struct peer *p = value;
        if (p->link || now - p->t_learned_ms <= c->o.forget_ms) continue;
        map_del(&c->peers, map_key_u64(&p->node));
        free_peer(p);
    }
}

bool cluster_knows(const struct cluster *c, uint64_t node)
{
    return node == c->o.node || find_peer(c, node) != NULL;
}

/* ---- link events ---- */

/* Messages to the peer go this way from now on, those first that waited for a link. */
static void use_link(struct peer *p, struct link *l)
{
    p->link = l;
    LIST_FOREACH (q, &p->pending, struct queued_message, link) {
        list_remove(&q->link);
        if (link_send(l, &q->h, (struct str){ q->bytes, q->n }) != OK)
            link_fail(l, "messages did not fit in the queue");
        mem_free(q);
    }
    p->pending_bytes = 0;
}

static void on_link_up(void *arg, struct link *l)
{
    struct cluster *c = arg;
    struct peer *p = get_peer(c, l->node);
    log_info("link up", "peer=%s side=%s", l->name, l->dialed ? "dialed" : "accepted");
    /* When both sides have dialed, the first link that is up is used for sending. */
    if (!p->link || p->link == l || p->link->state != LINK_UP) use_link(p, l);
    if (l->meets && c->o.on_met) c->o.on_met(c->o.arg, l->purpose, l->node);
}

static void on_link_frame(void *arg, struct link *l, const struct frame_header *h, struct str body)
{
    struct cluster *c = arg;
    struct cluster_message m = { l->node,    l->name,    (enum frame_type)h->type,
                                 h->request, h->attempt, body };
    counter_add(c->received, 1);
    c->o.on_message(c->o.arg, &m);
}

static void on_link_dead(void *arg, struct link *l)
{
    (void)l;
    wake(arg);
}

static const char *name_of(const struct link *dead)
{
    return dead->name[0] ? dead->name : dead->address[0] ? dead->address : "?";
}

/* Before it has proven itself a peer may give itself another name each time, so its address says
 * whether it was logged already. */
static void log_dead(struct log_repeats *repeats, const char *event, const struct link *dead)
{
    char what[sizeof dead->address + sizeof dead->why + 4];
    uint32_t n_unlogged;
    /* Nothing is wrong when a node ends in order, or a probe goes, whatever secret it has. Its line
     * hides nobody else's. */
    const bool is_well = dead->leaves || strcmp(dead->name, LINK_PROBE_NAME) == 0;
    enum log_level level = is_well ? LOG_INFO : LOG_WARN;
    if (dead->proved) snprintf(what, sizeof what, "%d %s: %s", level, name_of(dead), dead->why);
    else snprintf(what, sizeof what, "%d %s: %s", level, dead->address, dead->reason);
    if (log_repeats_due(repeats, what, clock_ms(), &n_unlogged))
        log_line(level, event, "peer=%s address=%s why=\"%s\" repeats=%u", name_of(dead),
                 dead->address, dead->why, n_unlogged);
}

/* Somebody came and went without a word, to see whether this host answers (group_reach). */
static bool was_a_knock(const struct link *dead)
{
    return !dead->dialed && dead->state == LINK_HELLO && dead->has_ended && dead->in.len == 0;
}

/* Closes a dead link. Its peer is lost, unless the link never came up and the peer has another
 * one. */
static void reap(struct cluster *c, struct link *dead)
{
    struct peer *p = dead->node ? find_peer(c, dead->node) : NULL;
    bool was_ours = p && p->link == dead;
    bool spare = p && p->link && p->link != dead && dead->state != LINK_UP;
    uint64_t node = dead->node;
    bool counts = p && !spare && (was_ours || dead->state == LINK_UP);
    char why[sizeof dead->why];
    if (!counts) {
        const bool knocked = was_a_knock(dead);
        if (dead->state != LINK_UP && !dead->meets && !knocked) counter_add(c->refused, 1);
        if (!knocked) log_dead(&c->refusals, "link refused", dead);
        link_close(dead);
        return;
    }
    log_dead(&c->losses, "peer lost", dead);
    snprintf(why, sizeof why, "%s", dead->why);
    map_del(&c->peers, map_key_u64(&node));
    free_peer(p);
    LIST_FOREACH (l, &c->links, struct link, link)
        if (l->node == node) link_close(l);
    counter_add(c->lost, 1);
    c->o.on_lost(c->o.arg, node, why);
}

static void deliver_to_self(struct cluster *c)
{
    struct list batch;
    if (list_empty(&c->to_self)) return;
    /* Only what is queued now: what handlers send to this node is delivered in the next turn. */
    batch = c->to_self;
    batch.next->prev = batch.prev->next = &batch;
    list_init(&c->to_self);
    while (!list_empty(&batch)) {
        struct queued_message *q = LIST_FIRST(&batch, struct queued_message, link);
        struct cluster_message m = { c->o.node,    c->name,      (enum frame_type)q->h.type,
                                     q->h.request, q->h.attempt, { q->bytes, q->n } };
        list_remove(&q->link);
        c->o.on_message(c->o.arg, &m);
        mem_free(q);
    }
}

static void on_wake(void *arg)
{
    struct cluster *c = arg;
    struct link *dead;
    loop_timer_free(c->wake);
    c->wake = NULL;
    deliver_to_self(c);
    do { /* start over each time, since reap may close other links */
        dead = NULL;
        LIST_FOREACH (l, &c->links, struct link, link) {
            if (!l->dead) continue;
            dead = l;
            break;
        }
        if (dead) reap(c, dead);
    } while (dead);
}

/* Messages to oneself and dead links are handled in the next turn of the loop, never deep inside a
 * caller. */
static void wake(struct cluster *c)
{
    if (!c->wake) c->wake = loop_timer_start(c->o.loop, 0, 0, on_wake, c);
}

/* ---- sending ---- */

static struct queued_message *make_queued(const struct frame_header *h, struct str body)
{
    struct queued_message *q = mem_calloc(1, sizeof *q + body.n + 1);
    q->h = *h;
    q->n = body.n;
    if (body.n) memcpy(q->bytes, body.p, body.n);
    list_init(&q->link);
    return q;
}

/* False: its address is not known. */
static bool dial(struct cluster *c, struct peer *p)
{
    if (p->link) return true;
    if (!p->port) return false;
    p->link = link_dial(&c->link_options, p->node, p->host, p->port);
    list_push(&c->links, &p->link->link);
    if (p->link->dead) wake(c);
    return true;
}

void cluster_dial(struct cluster *c, uint64_t node)
{
    struct peer *p = find_peer(c, node);
    if (p) (void)dial(c, p);
}

bool cluster_meet(struct cluster *c, uint32_t purpose, const char *host, uint16_t port)
{
    LIST_FOREACH (l, &c->links, struct link, link) {
        if (!l->meets || l->purpose != purpose || l->dead || l->state == LINK_UP) continue;
        if (l->state != LINK_CONNECTING || clock_ms() <= l->t_start_ms + MEET_MS) return false;
        link_fail(l, "no connection within %d ms", MEET_MS);
    }
    struct link *l = link_dial(&c->link_options, 0, host, port);
    l->meets = true;
    l->purpose = purpose;
    list_push(&c->links, &l->link);
    if (l->dead) wake(c);
    return true;
}

bool cluster_is_linked(const struct cluster *c, uint64_t node)
{
    const struct peer *p = find_peer(c, node);
    return node == c->o.node || (p && p->link && p->link->state == LINK_UP && !p->link->dead);
}

static enum status send_pending(struct cluster *c, struct peer *p, const struct frame_header *h,
                                struct str body)
{
    if (!dial(c, p)) return ERR_PEER_LOST;
    if (p->pending_bytes + FRAME_HEADER_BYTES + body.n > c->o.queue_bytes) return ERR_FULL;
    p->pending_bytes += FRAME_HEADER_BYTES + body.n;
    list_push(&p->pending, &make_queued(h, body)->link);
    return OK;
}

enum status cluster_send(struct cluster *c, uint64_t node, enum frame_type type, uint64_t request,
                         uint32_t attempt, struct str body)
{
    struct frame_header h = { (uint16_t)type, (uint32_t)body.n, attempt, request, node };
    ASSERT_THREAD(THREAD_LOOP);
    if (body.n > FRAME_BODY_MAX) return ERR_TOO_LONG;
    counter_add(c->sent, 1);
    if (node == c->o.node) {
        list_push(&c->to_self, &make_queued(&h, body)->link);
        wake(c);
        return OK;
    }
    struct peer *p = find_peer(c, node);
    if (!p) return ERR_PEER_LOST;
    if (!p->link || p->link->state != LINK_UP) return send_pending(c, p, &h, body);
    return link_send(p->link, &h, body);
}

void cluster_disconnect(struct cluster *c, uint64_t node, const char *why)
{
    LIST_FOREACH (l, &c->links, struct link, link)
        if (l->node == node) link_fail(l, "%s", why);
}

enum status cluster_send_proto(struct cluster *c, uint64_t node, enum frame_type type,
                               uint64_t request, uint32_t attempt, const ProtobufCMessage *body)
{
    size_t n = protobuf_c_message_get_packed_size(body);
    struct buf b = { 0 };
    protobuf_c_message_pack(body, (uint8_t *)buf_reserve(&b, n));
    enum status st = cluster_send(c, node, type, request, attempt, (struct str){ b.data, n });
    buf_release(&b);
    return st;
}

/* ---- liveness ---- */

/* Looks whether the engine has moved since the last look. Returns whether it goes on after it stood
 * still for so long that peers should hear it at once. */
static bool note_progress(struct cluster *c, uint64_t now)
{
    uint64_t progress = 0;
    bool has_work = false, was_still = now - c->t_progress_ms > c->o.lost_ms / 2;
    if (c->o.progress) c->o.progress(c->o.arg, &progress, &has_work);
    const bool moves = !has_work || !c->has_work || progress != c->progress;
    if (moves) c->t_progress_ms = now;
    c->progress = progress;
    c->has_work = has_work;
    return moves && was_still;
}

static void send_ping(struct cluster *c, struct link *l, uint64_t now, bool leaves)
{
    uint8_t bytes[64];
    Baton__Ping m = BATON__PING__INIT;
    m.progress = c->progress;
    m.has_work = c->has_work;
    m.still_ms = now - c->t_progress_ms;
    m.leaves = leaves;
    size_t n = baton__ping__pack(&m, bytes);
    struct frame_header h = { .type = FRAME_PING, .length = (uint32_t)n, .incarnation = l->node };
    enum status st = link_send(l, &h, (struct str){ (const char *)bytes, n });
    (void)st; /* the checks of this timer notice a full queue or a dead link */
}

static void check_link(struct cluster *c, struct link *l, uint64_t now)
{
    if (l->state == LINK_CONNECTING && now > l->t_start_ms + LINK_CONNECT_MS) {
        /* The kernel waits twice as long before each further try: a network that is back is found
         * sooner by a new connection. */
        link_fail(l, "no connection within %d ms", LINK_CONNECT_MS);
    } else if (l->state != LINK_UP) {
        if (now > l->t_start_ms + LINK_HANDSHAKE_MS)
            link_fail(l, "no handshake within %d ms", LINK_HANDSHAKE_MS);
    } else if (now > l->t_heard_ms + c->o.lost_ms) {
        link_fail(l, "nothing heard for %u ms", c->o.lost_ms);
    } else if (l->has_work && now > l->t_progress_ms + c->o.lost_ms + CHECK_MS) {
        /* one look later: that it moved just in time may be on its way */
        link_fail(l, "its engine has work and made no progress for %u ms", c->o.lost_ms);
    }
}

/* Moves time `t` forward by the time for which this process was stopped, but not past now. */
static uint64_t shifted(uint64_t t, uint64_t since, uint64_t now)
{
    return now - t > since ? t + since : now;
}

/* This process was stopped for `since`: what peers sent meanwhile is still unread. */
static void leave_out(struct cluster *c, uint64_t since, uint64_t now)
{
    c->t_progress_ms = shifted(c->t_progress_ms, since, now);
    LIST_FOREACH (l, &c->links, struct link, link) {
        if (l->dead) continue;
        l->t_heard_ms = shifted(l->t_heard_ms, since, now);
        l->t_progress_ms = shifted(l->t_progress_ms, since, now);
        l->t_start_ms = shifted(l->t_start_ms, since, now);
    }
}

static void send_pings(struct cluster *c, uint64_t now)
{
    uint32_t n_up = 0;
    c->t_ping_ms = now;
    LIST_FOREACH (l, &c->links, struct link, link) {
        if (l->dead || l->state != LINK_UP) continue;
        n_up++;
        send_ping(c, l, now, false);
    }
    gauge_set(c->links_up, n_up);
}

static void on_check_timer(void *arg)
{
    struct cluster *c = arg;
    const uint64_t now = clock_ms(), since = now - c->t_check_ms;
    c->t_check_ms = now;
    if (since > c->o.lost_ms / 2) leave_out(c, since, now);
    const bool goes_on = note_progress(c, now);
    LIST_FOREACH (l, &c->links, struct link, link)
        if (!l->dead) check_link(c, l, now);
    if (!goes_on && now - c->t_ping_ms < PING_MS - CHECK_MS / 2) return;
    send_pings(c, now);
    forget_old(c, now);
}

/* ---- life ---- */

static void on_connection(uv_stream_t *listener, int st)
{
    struct cluster *c = listener->data;
    if (st < 0) return;
    struct link *l = link_accept(&c->link_options, listener);
    list_push(&c->links, &l->link);
    if (l->dead) return; /* on_dead came */
    struct unproven_place *gave = unproven_enter(&c->strangers, &l->place, l->source);
    if (!gave) return;
    struct link *stranger = LIST_ENTRY(gave, struct link, place);
    link_fail(stranger, "its handshake was not finished when newer connections needed its place");
    reap(c, stranger); /* at once: libuv accepts all that wait before the next turn */
}

static void on_listener_closed(uv_handle_t *h) { mem_free(h); }

static enum status start_listening(struct cluster *c, struct err *err)
{
    struct sockaddr_storage sa;
    int len = sizeof sa;
    c->listener = MEM_NEW(uv_tcp_t);
    uv_tcp_init(loop_uv(c->o.loop), c->listener);
    c->listener->data = c;
    int st = uv_ip4_addr(c->o.listen_host, c->o.port, (struct sockaddr_in *)&sa);
    if (st < 0) st = uv_ip6_addr(c->o.listen_host, c->o.port, (struct sockaddr_in6 *)&sa);
    if (st == 0) st = uv_tcp_bind(c->listener, (const struct sockaddr *)&sa, 0);
    if (st == 0) st = uv_listen((uv_stream_t *)c->listener, BACKLOG, on_connection);
    if (st == 0) st = uv_tcp_getsockname(c->listener, (struct sockaddr *)&sa, &len);
    if (st < 0) return port_fail(-st, c->o.listen_host, c->o.port, "--pd-comm-port", err);
    c->port = ntohs(sa.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&sa)->sin6_port
                                             : ((struct sockaddr_in *)&sa)->sin_port);
    return OK;
}

static void register_metrics(struct cluster *c, struct metrics *m)
{
    c->sent = metrics_counter(m, "baton_cluster_messages_total", "direction=\"out\"",
                              "Messages between nodes.");
    c->received = metrics_counter(m, "baton_cluster_messages_total", "direction=\"in\"",
                                  "Messages between nodes.");
    c->lost = metrics_counter(m, "baton_cluster_peers_lost_total", "",
                              "Peers whose link was lost.");
    c->refused = metrics_counter(m, "baton_cluster_links_refused_total", "",
                                 "Connections that did not pass the handshake.");
    c->links_up = metrics_gauge(m, "baton_cluster_links", "", "Links that are up.");
}

enum status cluster_create(const struct cluster_options *o, struct cluster **out, struct err *err)
{
    struct cluster *c = MEM_NEW(struct cluster);
    ASSERT(o->node != 0);
    c->o = *o;
    if (!c->o.lost_ms) c->o.lost_ms = DEFAULT_LOST_MS;
    if (!c->o.queue_bytes) c->o.queue_bytes = DEFAULT_QUEUE;
    if (!c->o.forget_ms) c->o.forget_ms = DEFAULT_FORGET_MS;
    snprintf(c->name, sizeof c->name, "%s", o->name);
    buf_add_str(&c->secret, o->secret);
    list_init(&c->links);
    unproven_init(&c->strangers, UNPROVEN_MAX);
    list_init(&c->to_self);
    c->link_options = (struct link_options){
        .loop = o->loop,
        .self = o->node,
        .name = c->name,
        .secret = buf_str(&c->secret),
        .queue_bytes = c->o.queue_bytes,
        .on_up = on_link_up,
        .on_frame = on_link_frame,
        .on_dead = on_link_dead,
        .arg = c,
    };
    register_metrics(c, o->metrics);
    enum status st = start_listening(c, err);
    if (st != OK) {
        cluster_free(c);
        return st;
    }
    c->t_check_ms = c->t_ping_ms = c->t_progress_ms = clock_ms();
    c->check = loop_timer_start(o->loop, CHECK_MS, CHECK_MS, on_check_timer, c);
    *out = c;
    return OK;
}

uint16_t cluster_port(const struct cluster *c) { return c->port; }

void cluster_free(struct cluster *c)
{
    if (!c) return;
    if (c->check) loop_timer_free(c->check);
    LIST_FOREACH (l, &c->links, struct link, link) {
        if (l->state == LINK_UP && !l->dead) send_ping(c, l, clock_ms(), true);
        link_close(l);
    }
    if (c->wake) loop_timer_free(c->wake);
    LIST_FOREACH (q, &c->to_self, struct queued_message, link) mem_free(q);
    size_t pos = 0;
    struct str key;
    void *peer;
    while (map_next(&c->peers, &pos, &key, &peer)) free_peer(peer);
    map_release(&c->peers);
    if (c->listener) uv_close((uv_handle_t *)c->listener, on_listener_closed);
    /* The close callbacks free the links and touch nothing else. */
    buf_release(&c->secret);
    mem_free(c);
}
