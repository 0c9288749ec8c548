/* progress.c - the transfer thread's loop and its connections; see progress.h.
 * Thread: transfer, except start and stop. */
#include "kvtransfer/progress.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/base/thread.h"

enum {
    TICK_MS = 50,
    /* A tick that comes so late shows that this process was stopped: what it missed meanwhile is
     * not its peers' fault. Less than KVT_QUIET_MIN_MS. */
    STOPPED_MS = 400,
    COMMANDS_PER_ITERATION = 256
};

/* ---- connections ---- */

void kvt_route_free(struct kvt_route *r)
{
    if (!r) return;
    for (uint32_t i = 0; i < r->n; i++) buf_release(&r->addresses[i]);
    mem_free(r);
}

static void free_peer(struct kvt_peer *p)
{
    list_remove(&p->link);
    kvt_route_free(p->route);
    mem_free(p);
}

/* Ends an outgoing peer: first its connection, so that no source is read when its sends end. */
static void end_outgoing(struct kvt *k, struct kvt_peer *p, enum status st, const char *text)
{
    struct kvt_event ev = {
        .kind = KVT_PEER_LOST,
        .peer = p->handle,
        .status = st,
        .transport = p->ops ? p->ops->name : "",
    };
    snprintf(ev.text, sizeof ev.text, "%s", text);
    p->lost = true;
    if (p->conn) p->ops->disconnect(p->conn);
    p->conn = NULL;
    kvt_send_peer_lost(&k->core, p, st == ERR_CANCELED ? st : ERR_PEER_LOST, ev.text);
    /* the slot may be claimed again */
    atomic_store_explicit(&k->handles[p->handle % KVT_PEERS_MAX], 0, memory_order_release);
    free_peer(p);
    kvt_core_event(&k->core, ev);
}

static void connect_next(struct kvt *k, struct kvt_peer *p)
{
    struct kvt_route *r = p->route;
    while (r->next < r->n) {
        uint32_t i = r->next++;
        struct kvt_open_transport *transport = r->transports[i];
        struct str address = buf_str(&r->addresses[i]);
        struct err err = { 0 };
        if (!transport->ops->can_reach(transport->t, address)) {
            r->status = ERR_PEER_LOST;
            snprintf(r->why, sizeof r->why, "%s does not reach the peer from this host",
                     transport->ops->name);
        } else if ((r->status = transport->ops->connect(transport->t, address, &p->layout,
                                                        r->ticket, &p->conn, &err)) == OK) {
            p->ops = transport->ops;
            p->conn->peer = p;
            return;
        } else {
            snprintf(r->why, sizeof r->why, "%.150s", err.text);
        }
        if (r->next < r->n)
            log_warn("kv transport not used", "peer=%016llx why=\"%s\" next=%s",
                     (unsigned long long)p->handle, r->why, r->transports[r->next]->ops->name);
    }
    char why[160];
    snprintf(why, sizeof why, "%s", r->why);
    log_warn("kv peer not reached", "peer=%016llx st=%s why=\"%s\"", (unsigned long long)p->handle,
             status_name(r->status), why);
    end_outgoing(k, p, r->status, why);
}

static void on_up(struct kvt *k, struct kvt_conn *c)
{
    struct kvt_peer *p = c->peer;
    if (c->incoming) {
        p = MEM_NEW(struct kvt_peer);
        kvt_peer_init(p);
        p->conn = c;
        p->ops = c->t->ops;
        c->peer = p;
        list_push(&k->peers, &p->link);
    }
    p->up = true;
    if (c->incoming) log_info("kv peer connected", "direction=receive transport=%s", p->ops->name);
    else
        log_info("kv peer connected", "direction=send transport=%s peer=%016llx", p->ops->name,
                 (unsigned long long)p->handle);
    uint64_t speed = p->ops->link_speed(c);
    kvt_stats_link(k->core.stats, p->ops->name, speed);
    if (c->incoming) return;
    kvt_core_event(&k->core, (struct kvt_event){
                                 .kind = KVT_CONNECTED,
                                 .peer = p->handle,
                                 .transport = p->ops->name,
                                 .link_speed = speed,
                             });
}

static void lose_incoming(struct kvt *k, struct kvt_peer *p, enum status st, const char *text)
{
    if (p->lost) return;
    p->lost = true;
    (void)st; /* whatever ended the connection, to its transfers the sender is gone */
    kvt_recv_peer_lost(&k->core, p, ERR_PEER_LOST, text);
}

static void on_down(struct kvt *k, struct kvt_transport_event *i)
{
    struct kvt_peer *p = i->conn->peer;
    if (i->conn->incoming) {
        log_info("kv peer lost", "direction=receive transport=%s st=%s why=\"%s\"", p->ops->name,
                 status_name(i->status), i->text);
        lose_incoming(k, p, i->status, i->text);
    } else if (p->up) {
        log_info("kv peer lost", "direction=send peer=%016llx st=%s why=\"%s\"",
                 (unsigned long long)p->handle, status_name(i->status), i->text);
        end_outgoing(k, p, i->status, i->text);
    } else {
        p->ops->disconnect(p->conn);
        p->conn = NULL;
        p->route->status = i->status;
        snprintf(p->route->why, sizeof p->route->why, "%s", i->text);
        if (p->route->next < p->route->n)
            log_warn("kv transport not used", "peer=%016llx why=\"%s\" next=%s",
                     (unsigned long long)p->handle, i->text,
                     p->route->transports[p->route->next]->ops->name);
        connect_next(k, p);
    }
}

static void on_message(struct kvt *k, struct kvt_peer *p, const struct kvt_message *m)
{
    if (p->lost) return;
    switch (m->kind) {
    case KVT_MSG_OPEN:
    case KVT_MSG_NOTE:
    case KVT_MSG_FINISH:
    case KVT_MSG_STOPPED:
    case KVT_MSG_BYE:
        if (p->conn->incoming) kvt_recv_message(&k->core, p, m);
        else p->must_close = true;
        break;
    case KVT_MSG_OPENED:
    case KVT_MSG_DONE:
    case KVT_MSG_STOP:
        if (!p->conn->incoming) kvt_send_message(&k->core, p, m);
        else p->must_close = true;
        break;
    default: p->must_close = true; /* transports consume DATA themselves */
    }
}

static bool poll_transports(struct kvt *k)
{
    bool any = false;
    for (uint32_t transport = 0; transport < k->n_transports; transport++) {
        size_t n = k->transports[transport].ops->poll(k->transports[transport].t,
                                                      k->transport_events, KVT_TRANSPORT_EVENTS);
        for (size_t i = 0; i < n; i++) {
            struct kvt_transport_event *in = &k->transport_events[i];
            switch (in->kind) {
            case KVT_UP: on_up(k, in->conn); break;
            case KVT_DOWN: on_down(k, in); break;
            case KVT_MESSAGE: on_message(k, in->conn->peer, &in->message); break;
            case KVT_PUT_DONE: kvt_send_put_done(&k->core, in->conn->peer, in->tag); break;
            }
        }
        any = any || n;
    }
    return any;
}

/* Closes connections that are marked for close, and reaps ended ones that are fenced. Not called
 * inside poll_transports, because later events of the batch may name them. */
static void sweep_peers(struct kvt *k)
{
    LIST_FOREACH (p, &k->peers, struct kvt_peer, link) {
        if (p->must_close && !p->lost) {
            log_warn("kv peer dropped",
                     "peer=%016llx transport=%s why=\"it broke the protocol, or answers nothing\"",
                     (unsigned long long)p->handle, p->ops->name);
            if (!p->conn->incoming) {
                end_outgoing(k, p, ERR_PEER_LOST,
                             "the receiver broke the protocol, or answers nothing");
                continue;
            }
            lose_incoming(k, p, ERR_PEER_LOST, "the sender broke the protocol or stopped reading");
        }
        if (!p->lost || !p->conn->incoming) continue;
        enum status fence = p->ops->fence(p->conn);
        if (fence != OK && !list_empty(&p->recvs)) continue;
        kvt_recv_peer_fenced(&k->core, p);
        p->ops->disconnect(p->conn);
        free_peer(p);
    }
}

/* ---- commands ---- */

static struct kvt_peer *find_peer(struct kvt *k, uint64_t handle)
{
    LIST_FOREACH (p, &k->peers, struct kvt_peer, link)
        if (p->handle == handle) return p;
    return NULL;
}

static void do_connect(struct kvt *k, struct kvt_peer *p)
{
    list_push(&k->peers, &p->link);
    connect_next(k, p);
}

static void do_command(struct kvt *k, const struct kvt_command *cmd)
{
    struct kvt_ready *ready = cmd->p;
    struct kvt_send *send = cmd->p;
    struct kvt_peer *peer;
    switch (cmd->kind) {
    case KVT_DO_CONNECT: do_connect(k, cmd->p); break;
    case KVT_DO_DISCONNECT:
        if ((peer = find_peer(k, cmd->id)) != NULL)
            end_outgoing(k, peer, ERR_CANCELED, "disconnected by this node");
        break;
    case KVT_DO_EXPECT_CANCEL: kvt_recv_cancel(&k->core, cmd->id); break;
    case KVT_DO_OPEN: kvt_send_begin(&k->core, send, find_peer(k, send->peer_handle)); break;
    case KVT_DO_READY:
        kvt_send_add(
            &k->core, ready->id,
            &(struct kvt_token_range){ ready->layer, ready->begin, ready->end, ready->event },
            ready->blocks);
        mem_free(ready);
        break;
    case KVT_DO_FINISH: kvt_send_end(&k->core, cmd->id, cmd->stamp, cmd->awaits_rest); break;
    case KVT_DO_SEND_CANCEL: kvt_send_cancel_of(&k->core, cmd->id); break;
    }
}

/* Takes the commands that found the mailbox full, in their order. */
static void take_overflow(struct kvt *k)
{
    if (k->overflow_due) return;
    /* acquire: see post_always. Everything that its callers posted before is in the mailbox, or was
     * taken out already. */
    struct kvt_overflow *newest = atomic_exchange_explicit(&k->overflow, NULL,
                                                           memory_order_acquire);
    while (newest) {
        struct kvt_overflow *next = newest->next;
        newest->next = k->overflow_due;
        k->overflow_due = newest;
        newest = next;
    }
    k->n_before = mailbox_len(k->mailbox);
}

static void run_overflow(struct kvt *k)
{
    while (k->overflow_due) {
        struct kvt_overflow *overflow = k->overflow_due;
        k->overflow_due = overflow->next;
        do_command(k, &overflow->cmd);
        mem_free(overflow);
    }
}

static bool do_commands(struct kvt *k)
{
    struct kvt_command cmd;
    take_overflow(k);
    for (int i = 0; i < COMMANDS_PER_ITERATION; i++) {
        if (k->n_before == 0) run_overflow(k);
        if (!mailbox_take(k->mailbox, &cmd)) return false;
        do_command(k, &cmd);
        if (k->n_before) k->n_before--;
    }
    return true;
}

static void drop_overflow(struct kvt *k)
{
    take_overflow(k);
    for (struct kvt_overflow *overflow; (overflow = k->overflow_due) != NULL; take_overflow(k)) {
        k->overflow_due = overflow->next;
        mem_free(overflow); /* ends and cancels carry nothing */
    }
}

static void drop_commands(struct kvt *k)
{
    struct kvt_command cmd;
    drop_overflow(k);
    while (mailbox_take(k->mailbox, &cmd)) {
        if (cmd.kind == KVT_DO_CONNECT) free_peer(cmd.p);
        else if (cmd.kind == KVT_DO_OPEN) kvt_send_free(&k->core, cmd.p);
        else mem_free(cmd.p);
    }
}

/* ---- the loop ---- */

static void tick(struct kvt *k)
{
    uint64_t now = clock_ms(), since = now - k->ticked_ms;
    if (since < TICK_MS) return;
    k->ticked_ms = now;
    kvt_tickets_tick(&k->tickets, now);
    kvt_recv_tick(&k->core, now);
    LIST_FOREACH (p, &k->peers, struct kvt_peer, link)
        if (since >= STOPPED_MS) kvt_send_wait_again(p, now);
        else kvt_send_tick(&k->core, p, now);
}

static void wait(struct kvt *k, bool more)
{
    struct epoll_event events[KVT_TRANSPORTS_MAX + 1];
    int n = epoll_wait(k->epoll_fd, events, COUNT_OF(events), more ? 0 : TICK_MS);
    for (int i = 0; i < n; i++) {
        uint64_t count;
        /* another wake-up has read it */
        if (events[i].data.fd == k->wake_fd && read(k->wake_fd, &count, sizeof count) < 0) continue;
    }
}

/* Driver functions and libraries (device_flush_rdma_writes, UCX) need the GPU's context to be
 * current on this thread; any call of the CUDA runtime makes it so. */
static void bind_device_context(struct kvt *k)
{
    if (k->core.recv_jobs && kvt_gpu_jobs_synchronize(k->core.recv_jobs) != OK)
        log_error("kv transfer has no device", "why=\"it has failed\"");
}

static void *run(void *arg)
{
    struct kvt *k = arg;
    bool more = false;
    thread_become(THREAD_TRANSFER, "transfer");
    bind_device_context(k);
    while (!atomic_load_explicit(&k->stopping, memory_order_acquire)) {
        wait(k, more);
        more = do_commands(k);
        more |= poll_transports(k);
        kvt_gpu_jobs_collect(k->core.send_jobs);
        if (k->core.recv_jobs) kvt_recv_collect(&k->core);
        sweep_peers(k);
        LIST_FOREACH (p, &k->peers, struct kvt_peer, link) more |= kvt_send_pump(&k->core, p);
        tick(k);
    }
    return NULL;
}

void kvt_progress_wake(void *arg)
{
    struct kvt *k = arg;
    uint64_t one = 1;
    while (write(k->wake_fd, &one, sizeof one) < 0 && errno == EINTR) {}
}

enum status kvt_progress_start(struct kvt *k, struct err *err)
{
    list_init(&k->peers);
    k->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    k->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (k->wake_fd < 0 || k->epoll_fd < 0)
        return err_set(err, ERR_INTERNAL, "no event descriptors for the transfer thread: %s",
                       strerror(errno));
    k->mailbox = mailbox_create(sizeof(struct kvt_command), KVT_COMMANDS_HARD, kvt_progress_wake,
                                k);
    for (uint32_t i = 0; i <= k->n_transports; i++) {
        struct epoll_event e = { .events = EPOLLIN };
        e.data.fd = i < k->n_transports ? k->transports[i].ops->wait_fd(k->transports[i].t)
                                        : k->wake_fd;
        if (epoll_ctl(k->epoll_fd, EPOLL_CTL_ADD, e.data.fd, &e) != 0)
            return err_set(err, ERR_INTERNAL, "the transfer thread cannot wait: %s",
                           strerror(errno));
    }
    if (thread_start(&k->thread, run, k) != OK)
        return err_set(err, ERR_INTERNAL, "the transfer thread cannot be started");
    k->started = true;
    return OK;
}

void kvt_progress_stop(struct kvt *k)
{
    if (k->started) {
        atomic_store_explicit(&k->stopping, true, memory_order_release);
        kvt_progress_wake(k);
        pthread_join(k->thread, NULL);
    }
    if (k->mailbox) {
        mailbox_close(k->mailbox);
        drop_commands(k);
        mailbox_free(k->mailbox);
    }
    /* Jobs write to the descriptor closed below. A failed device runs none. */
    if (k->core.send_jobs) (void)!kvt_gpu_jobs_synchronize(k->core.send_jobs);
    if (k->core.recv_jobs) (void)!kvt_gpu_jobs_synchronize(k->core.recv_jobs);
    if (k->wake_fd >= 0) close(k->wake_fd);
    if (k->epoll_fd >= 0) close(k->epoll_fd);
    LIST_FOREACH (p, &k->peers, struct kvt_peer, link) {
        list_remove(&p->sends); /* the core frees sessions */
        list_remove(&p->recvs);
        free_peer(p);
    }
}

/* ---- callbacks of the transports ---- */

enum status kvt_progress_admit(void *arg, const uint8_t ticket[KVT_TICKET_BYTES])
{
    struct kvt *k = arg;
    enum status st = kvt_tickets_take(&k->tickets, clock_ms(), ticket);
    if (st != OK)
        log_warn("kv connection refused", "why=\"its ticket is unknown, used or expired\"");
    return st;
}

int kvt_progress_scatter(void *arg, struct kvt_conn *c, const struct kvt_message *head,
                         uint64_t offset, struct iovec *iov, int cap)
{
    return kvt_recv_scatter(&((struct kvt *)arg)->core, c->peer, head, offset, iov, cap);
}

void kvt_progress_scattered(void *arg, struct kvt_conn *c, const struct kvt_message *head,
                            uint64_t bytes)
{
    kvt_recv_scattered(&((struct kvt *)arg)->core, c->peer, head, bytes);
}
