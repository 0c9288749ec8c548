/* local.h - what the transports of one host share: SOCK_SEQPACKET connections over abstract unix sockets, writers by memcpy.
 *
 * The receiver listens under a random name that vanishes with its process. A writer connects, presents its ticket, and gets WELCOME with
 * what it needs to see the receiver's pool; from then on put() is memcpy into that pool and messages are packets.
 *
 *   incoming  GREETING ── ticket good ──▶ UP ── end of file, malformed packet, fence() ──▶ DOWN ── BYE | process ended: fenced
 *   outgoing  WAITING ── WELCOME ──▶ UP ── end of file ──▶ DOWN ── disconnect: BYE (when it fits), close
 *
 * Invariants
 *  1 A writer unmaps (or forgets) the pool before it says BYE, and says BYE before it closes: after BYE nothing of it can land.
 *  2 End of file alone proves nothing (a descriptor can be closed while the mapping stays): without BYE the fence is the end of the
 *    process, seen through the pidfd taken when it connected, before its ticket was looked at.
 * Thread: transfer. */
#ifndef BATON_KVTRANSFER_LOCAL_H
#define BATON_KVTRANSFER_LOCAL_H

#include "kvtransfer/transport.h"
#include "shared/base/list.h"

enum { LOCAL_BOOT_CHARS = 36, LOCAL_NAME_CHARS = 32, LOCAL_ADDRESS_CHARS = LOCAL_BOOT_CHARS + LOCAL_NAME_CHARS, LOCAL_DONE_MAX = 256 };

enum local_state { LOCAL_GREETING, LOCAL_WAITING, LOCAL_UP, LOCAL_DOWN };

struct local_conn {
    struct kvt_conn         base;
    struct local_transport *lt;
    struct list             link;
    enum local_state        state;
    int                     fd, pidfd;
    char                   *remote;       /* outgoing: the receiver's pool as seen here */
    size_t                  remote_bytes, need_bytes; /* need: what their layout says */
    uint64_t                deadline_ms;  /* GREETING, WAITING */
    struct buf              out;          /* packets that did not fit: u16 length, bytes */
    bool                    said_bye, ended, silent; /* silent: DOWN is known to the session layer */
    bool                    leaving;      /* outgoing, disconnected: BYE waits for room in the receiver's socket */
};

/* How a pool becomes visible to a writer: the difference between the rows. */
struct local_kind {
    const char *prefix;       /* of the abstract name */
    bool        same_process; /* both ends must be this process */
    bool        drain;        /* closing waits for writers to say BYE (their writes go to our addresses) */
    /* Receiver: the WELCOME's value and descriptor (-1: none; stays the caller's). */
    void        (*offer)(const struct kvt_env *env, uint64_t *value, int *fd);
    /* Writer: fill remote and remote_bytes; closes or keeps nothing of `fd` (-1: none came). */
    enum status (*attach)(struct local_conn *c, uint64_t value, int fd, char *text, size_t text_max);
    void        (*detach)(struct local_conn *c);
};

struct local_transport {
    struct kvt_transport     base;
    const struct kvt_env    *env;
    const struct local_kind *kind;
    int                      epoll_fd, listen_fd;
    char                     address[LOCAL_ADDRESS_CHARS + 1]; /* boot id of this host, then the name */
    struct list              conns;
    uint32_t                 n_conns;
    uint64_t                 checked_ms; /* when deadlines were last looked at */
    struct { struct kvt_conn *conn; uint64_t tag; } done[LOCAL_DONE_MAX];
    uint32_t                 n_done;
};

/* The slots of both rows; open is called by each row's own. */
enum status local_open(const struct kvt_env *env, const struct kvt_transport_ops *ops, const struct local_kind *kind,
                       struct kvt_transport **out, struct err *err) MUST_CHECK;
void        local_close(struct kvt_transport *t);
int         local_wait_fd(struct kvt_transport *t);
uint16_t    local_port(struct kvt_transport *t);
void        local_export_address(const struct kvt_transport *t, struct buf *out);
bool        local_can_reach(struct kvt_transport *t, struct str address);
enum status local_connect(struct kvt_transport *t, struct str address, const struct kv_layout *theirs,
                          const uint8_t ticket[KVT_TICKET_BYTES], struct kvt_conn **out, struct err *err);
enum status local_put(struct kvt_conn *c, const struct kvt_put *p);
void        local_abandon(struct kvt_conn *c, uint32_t session, uint64_t generation);
enum status local_notify(struct kvt_conn *c, const struct kvt_message *m);
enum status local_flush(struct kvt_transport *t);
enum status local_fence(struct kvt_conn *c);
size_t      local_poll(struct kvt_transport *t, struct kvt_incident *out, size_t cap);
uint64_t    local_link_speed(const struct kvt_conn *c);
void        local_disconnect(struct kvt_conn *c);

#define LOCAL_SLOTS                                                                                                              \
    .close = local_close, .wait_fd = local_wait_fd, .port = local_port, .export_address = local_export_address,                  \
    .can_reach = local_can_reach, .connect = local_connect, .put = local_put, .abandon = local_abandon, .notify = local_notify,  \
    .flush = local_flush, .fence = local_fence, .poll = local_poll, .link_speed = local_link_speed,                              \
    .disconnect = local_disconnect

#endif
