/* local.h - what the transports within one host share: SOCK_SEQPACKET connections over abstract
 * unix sockets, and writers that copy.
 *
 * The receiver listens under a random name that vanishes with its process. A writer connects,
 * presents its ticket, and gets WELCOME with access to the receiver's pool. From then on put()
 * copies into that pool and messages are packets. The transfer thread copies together with a
 * bounded number of copiers (copier.h): a put is split into jobs and is done when its last job is;
 * a message waits in `out` until all earlier puts are done, a NOTE for its own and those before.
 *
 *   incoming  HANDSHAKE ─ ticket good ─▶ UP ─ end of file, bad packet, fence() ─▶ DOWN
 *             DOWN ─ BYE, or the process ended ─▶ fenced
 *   outgoing  WAITING ─ WELCOME ─▶ UP ─ end of file ─▶ DOWN ─ disconnect: BYE, close
 * Thread: transfer; `move` of a copy method also on copiers, which do not change the connection. */
#ifndef BATON_KVTRANSFER_LOCAL_LOCAL_H
#define BATON_KVTRANSFER_LOCAL_LOCAL_H

#include <stdatomic.h>

#include "kvtransfer/local/copier.h"
#include "kvtransfer/local/copy.h"
#include "kvtransfer/transport.h"
#include "shared/base/address/unproven.h"
#include "shared/base/list.h"

enum {
    LOCAL_BOOT_CHARS = 36,
    LOCAL_NAME_CHARS = 32,
    LOCAL_ADDRESS_CHARS = LOCAL_BOOT_CHARS + LOCAL_NAME_CHARS,
    LOCAL_DONE_MAX = 256, /* puts of all connections whose PUT_DONE was not reported yet */
    LOCAL_PUTS_MAX = 8    /* of one connection with jobs in flight */
};

enum local_state { LOCAL_HANDSHAKE, LOCAL_WAITING, LOCAL_UP, LOCAL_DOWN };

struct local_transport;

/* Invariants
 *  1 A writer unmaps (or forgets) the pool before it sends BYE, and sends BYE before it closes:
 *    after BYE it cannot write.
 *  2 End of file alone proves nothing, because a descriptor can be closed while the mapping stays.
 *    Without BYE the fence is the end of the process, seen through the pidfd that was taken when it
 *    connected, before its ticket was checked.
 *  3 No copier works for a connection that is DOWN or being disconnected: the transfer thread first
 *    waits for its jobs in flight (at most twice COPIER_QUEUED_BYTES bytes each). So 1 holds for
 *    every thread. */

/* A put that is not complete. */
struct local_put {
    struct local_conn *conn;
    uint64_t tag, generation, event; /* event: kvt_put's */
    uint32_t session, layer, first;  /* of the first piece */
    uint32_t n_copies, n_jobs;       /* jobs in flight */
    bool submitted;                  /* every byte is copied or in a job */
    _Atomic bool abandoned;  /* relaxed: makes copiers stop early; their jobs' return proves it */
    _Atomic bool failed;     /* relaxed: a copier could not write; read after its job's return */
    struct kvt_copy *copies; /* env->max_copies */
    struct kvt_put_sums on_device; /* kvt_put's */
    uint64_t bytes;
    uint64_t piece_bytes; /* of pieces whose checksums are wanted; 0: none are */
    /* Of pieces that one job has copied; each is written by the thread that runs that job, and read
     * after its return. */
    struct kvt_sums sums;
    struct kvt_sums *known; /* kvt_put's, until local_put returns */
};

struct local_conn {
    struct kvt_conn base;
    struct local_transport *lt;
    struct list link;
    struct unproven_place place; /* an incoming one's, until its ticket was admitted */
    bool counted;                /* in lt->n_conns */
    enum local_state state;
    int fd, pidfd;
    int32_t pid;                            /* of the other end, in this process's namespace */
    const struct local_copy_method *method; /* outgoing, while attached */
    /* Outgoing, while attached: the receiver's pool, an address that `method` understands. */
    char *remote;
    size_t remote_bytes, need_bytes; /* need: the pool bytes of their layout */
    uint64_t deadline_ms;            /* HANDSHAKE, WAITING */
    struct local_put *puts;          /* outgoing, LOCAL_PUTS_MAX; NULL until a put has jobs */
    uint64_t n_put, n_completed;     /* puts accepted; complete without a gap */
    uint32_t n_jobs;
    const char *broken; /* why the receiver's memory cannot be written; NULL: it can */
    void *method_state; /* the method's, from attach to detach */
    struct buf out;     /* packets that wait for a put or for room: local_packet, bytes */
    bool wants_write;
    bool bye_received, ended, detached; /* detached: the session layer got DOWN */
    /* Incoming: the writer has raw addresses (CMA) or GPU memory, so it must be gone before the
     * pool is freed. */
    bool must_drain;
    bool closing; /* outgoing, disconnected: BYE waits for socket room */
};

struct local_packet {
    uint64_t after; /* n_completed that must be reached */
    uint64_t bytes;
};

/* How a connection's writer reaches the receiver's pool; attach chooses. */
struct local_copy_method {
    const char *name;
    /* Begins the whole put: counts its jobs in p->n_jobs and c->n_jobs; the copier returns each.
     * False: the receiver's memory cannot be written any more. */
    bool (*begin)(struct local_conn *c, struct local_put *p);
    /* Runs one job of local_begin_jobs: copies its bytes, and stores the checksums of pieces in
     * p->sums if it has to read the bytes anyway. False as for begin. Transfer thread and
     * copiers. */
    bool (*move)(struct local_conn *c, struct local_put *p, const struct copier_job *j);
    /* Waits for jobs that a GPU runs; copiers' jobs are waited for by their return. False: the GPU
     * has failed, and no job will return. */
    bool (*wait)(struct local_conn *c);
    /* No job is in flight. Afterwards this process cannot write there. */
    void (*detach)(struct local_conn *c);
};

/* How writers get access to a pool: the difference between transports mem and ipc. */
struct local_address_method {
    const char *prefix; /* of the abstract name */
    bool same_process;  /* both ends must be this process */
    /* Receiver: the WELCOME's value and descriptor (-1: none; stays the caller's). */
    void (*offer)(const struct local_transport *t, uint64_t *value, int *fd);
    /* Writer: fills method, remote and remote_bytes; neither closes nor keeps `fd` (-1: none). */
    enum status (*attach)(struct local_conn *c, uint64_t value, int fd, char *text,
                          size_t text_max);
};

struct local_transport {
    struct kvt_transport base;
    const struct kvt_env *env;
    const struct local_address_method *address_method;
    int epoll_fd, listen_fd;
    /* boot id of this host, then the name */
    char address[LOCAL_ADDRESS_CHARS + 1];
    struct list conns;
    struct unproven strangers; /* by process */
    uint32_t n_conns;          /* without those that were never admitted */
    uint64_t checked_ms;       /* when deadlines were last checked */
    uint64_t accept_again_ms;  /* 0, or when the listener is watched again */
    struct {
        struct kvt_conn *conn;
        uint64_t tag;
    } done[LOCAL_DONE_MAX];
    uint32_t n_done, n_unfinished; /* puts whose PUT_DONE is due; puts not complete */
    struct copier *copier;
    int wake_fd;  /* readable when copiers have finished jobs */
    int offer_fd; /* made for offers, or -1 */
    const struct copy_impl *copy;
    uint32_t n_broken; /* connections with `broken` whose DOWN was not reported yet */
};

/* The ops that both transports share; each transport's own `open` calls local_open. */
enum status local_open(const struct kvt_env *env, const struct kvt_transport_ops *ops,
                       const struct local_address_method *method, struct kvt_transport **out,
                       struct err *err) MUST_CHECK;
void local_close(struct kvt_transport *t);
int local_wait_fd(struct kvt_transport *t);
uint16_t local_port(struct kvt_transport *t);
void local_export_address(const struct kvt_transport *t, struct buf *out);
bool local_can_reach(struct kvt_transport *t, struct str address);
enum status local_connect(struct kvt_transport *t, struct str address,
                          const struct kv_layout *theirs, const uint8_t ticket[KVT_TICKET_BYTES],
                          struct kvt_conn **out, struct err *err);
enum status local_put(struct kvt_conn *c, const struct kvt_put *p);
void local_abandon(struct kvt_conn *c, uint32_t session, uint64_t generation);
enum status local_notify(struct kvt_conn *c, const struct kvt_message *m);
enum status local_flush(struct kvt_transport *t);
enum status local_fence(struct kvt_conn *c);
size_t local_poll(struct kvt_transport *t, struct kvt_transport_event *out, size_t cap);
uint64_t local_link_speed(const struct kvt_conn *c);
void local_disconnect(struct kvt_conn *c);

/* local_put.c: puts and what waits behind them. */
/* `begin` of methods that copy with the CPU: splits the put into jobs for the copiers, and copies
 * here what no copier takes. */
bool local_begin_jobs(struct local_conn *c, struct local_put *p);
bool local_wait_none(struct local_conn *c); /* `wait` of those methods: true at once */
bool local_move_mapped(struct local_conn *c, struct local_put *p, const struct copier_job *j);
void local_run_job(const struct copier_job *j); /* on copiers */
void local_collect(struct local_transport *t);  /* takes completed jobs, sends what waited */
void local_quiesce(struct local_conn *c);       /* abandons its puts, waits for its jobs */
void local_write_out(struct local_conn *c);     /* sends due packets for which there is room */
void local_watch(struct local_transport *t, int op, int fd, void *who, uint32_t events);
enum status local_send_packet(int fd, const void *p, size_t n);

#define LOCAL_OPS                                                                                  \
    .close = local_close, .wait_fd = local_wait_fd, .port = local_port,                            \
    .export_address = local_export_address, .can_reach = local_can_reach,                          \
    .connect = local_connect, .put = local_put, .abandon = local_abandon, .notify = local_notify,  \
    .flush = local_flush, .fence = local_fence, .poll = local_poll,                                \
    .link_speed = local_link_speed, .disconnect = local_disconnect

#endif
