/* cm.h - queue pairs connected by librdmacm (BATON_RDMA_CM=1), for networks that want it: iWARP,
 * and fabrics that resolve addresses, partitions and priorities themselves. The control connection
 * stays, and with it tickets, keys, messages and the states of a rail (rdma.h).
 *
 *   sender                                        receiver
 *     OFFER: numbers of its queue pairs     ──▶     queue pairs in INIT, a listener on the port's address, a token of 128 random bits
 *                                           ◀──     INVITE: address, token
 *     per queue pair: address, route, CALL  ══▶     token, rail, epoch, number and device are what they should be: RTR, RTS, accepted,
 *     RTR, RTS, established                 ◀══     its window is bound. Anything else is rejected
 *     probe                                 ◀──     ACCEPT: keys
 *
 * (──▶ control connection, ══▶ connection manager.) Queue pairs are made and destroyed by queue.c as ever; an id here carries none, it only says
 * which attributes connect it. It belongs to its queue pair, and goes right after it.
 * Invariants
 *  1 A queue pair is accepted once, and only for who shows the token of its rail, which is BINDING,
 *  and says the number that its OFFER said. 2 Nothing here blocks: all that takes time is told by
 *  an event. What is not told within RDMA_SETUP_MS ends the attempt (rail.c). 3 An event is
 *  acknowledged before it is acted upon, so that ids may be destroyed by what it leads to.
 * Thread: transfer; open and close the owner's. */
#ifndef BATON_KVTRANSFER_RDMA_CM_H
#define BATON_KVTRANSFER_RDMA_CM_H

#include "kvtransfer/rdma/rdma.h"

/* t->cm, with its events among those of t->epoll_fd (data.ptr is t->cm). ERR_CONFIG: this host has
 * no rdma_cm, or this user may not open it. */
enum status rdma_cm_open(struct rdma_transport *t, struct err *err) MUST_CHECK;
void rdma_cm_close(struct rdma_transport *t); /* after the last connection; NULL t->cm:
                                               * nothing */
/* Receiver: wait for who was offered r; address, port and token go to *m. r->why. */
enum status rdma_cm_listen(struct rdma_rail *r, struct rdma_invite *m) MUST_CHECK;
/* Sender: begin to connect every queue pair of r. r->why. rdma_rail_connected for each follows, or
 * rdma_rail_break, or nothing in time. */
enum status rdma_cm_connect(struct rdma_rail *r, const struct rdma_invite *m) MUST_CHECK;
/* Take what has happened. */
void rdma_cm_process_events(struct rdma_transport *t);
/* Destroy q's id: its peer is told, if it was connected. Over a port that is down this is put off
 * until it is active again. */
void rdma_cm_release_id(struct rdma_qp *q);

void rdma_cm_tick(struct rdma_transport *t, uint64_t now_ms);

/* cm_address.c: the IP address by which the connection manager knows a port. RoCE: the GID that it
 * speaks from. InfiniBand and iWARP: an address of its network interface, IPv4 first. False: it has
 * none. */
bool rdma_cm_address(const struct rdma_port *p, const struct rdma_port_addr *mine,
                     struct sockaddr_storage *out);
/* An address of an invitation, as it is reached from port p. */
void rdma_cm_address_of(const struct rdma_port *p, const struct rdma_invite *m,
                        struct sockaddr_storage *out);

#endif
