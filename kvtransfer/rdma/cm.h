/* cm.h - queue pairs connected by librdmacm (BATON_RDMA_CM=1), for networks that need it: iWARP,
 * and fabrics that resolve addresses, partitions and priorities themselves. The control connection
 * keeps tickets, keys, messages and the states of a rail (rail.h).
 *
 *   sender                                        receiver
 *     OFFER: numbers of its queue pairs     ──▶   queue pairs in INIT, a listener, a 128-bit token
 *                                           ◀──   INVITE: address, token
 *     per queue pair: address, route, CALL  ══▶   checks token, rail, epoch, number, device; RTR, RTS
 *     RTR, RTS, established                 ◀══   accepted, window bound; anything else is rejected
 *     probe                                 ◀──   ACCEPT: keys
 *
 * (──▶ control connection, ══▶ connection manager.) qp.c creates and destroys the queue pairs;
 * an id only tells which attributes connect one, and is destroyed right after it.
 * Thread: transfer; open and close: the owner's. */
#ifndef BATON_KVTRANSFER_RDMA_CM_H
#define BATON_KVTRANSFER_RDMA_CM_H

#include "kvtransfer/rdma/rdma.h"

/* Invariants
 *  1 A queue pair is accepted once, and only for a request with the token of its rail, which is
 *    BINDING, and with the number that its OFFER named.
 *  2 Nothing here blocks: events report everything that takes time. An attempt that takes longer
 *    than RDMA_SETUP_MS ends (rail.c).
 *  3 An event is acknowledged before it is handled, so that handling it may destroy ids. */

/* Opens t->cm and adds its events to t->epoll_fd (data.ptr is t->cm). ERR_CONFIG: this host has no
 * rdma_cm, or this user may not open it. */
enum status rdma_cm_open(struct rdma_transport *t, struct err *err) MUST_CHECK;
void rdma_cm_close(struct rdma_transport *t); /* after the last connection; t->cm may be NULL */
/* Receiver: listens for the sender's queue pairs of r; *m gets address, port and token. On failure
 * r->why has the reason. */
enum status rdma_cm_listen(struct rdma_rail *r, struct rdma_invite *m) MUST_CHECK;
/* Sender: begins to connect every queue pair of r. On failure r->why has the reason.
 * rdma_rail_connected for each follows, or rdma_rail_break, or the deadline passes. */
enum status rdma_cm_connect(struct rdma_rail *r, const struct rdma_invite *m) MUST_CHECK;
/* Handles all events. */
void rdma_cm_process_events(struct rdma_transport *t);
/* Destroys q's id, which tells the peer if it was connected. Over a port that is down this is
 * deferred until the port is active again. */
void rdma_cm_release_id(struct rdma_qp *q);

void rdma_cm_tick(struct rdma_transport *t, uint64_t now_ms);

/* cm_address.c: the IP address by which the connection manager knows a port. RoCE: its GID.
 * InfiniBand and iWARP: an address of its network interface, IPv4 first. False: it has none. */
bool rdma_cm_address(const struct rdma_port *p, const struct rdma_port_addr *mine,
                     struct sockaddr_storage *out);
/* The address of an invitation, as port p reaches it. */
void rdma_cm_address_of(const struct rdma_port *p, const struct rdma_invite *m,
                        struct sockaddr_storage *out);

#endif
