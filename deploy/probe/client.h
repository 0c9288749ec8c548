/* client.h - a connection to a probe server: dial, prove the secret, ask one step after another.
 *
 * Calls block. Underneath, one loop serves all links, so that two servers can work at the same time
 * (begin on one, ask the other, finish).
 * Life cycle: create a dialer, dial any number of servers, hang up on all, free the dialer.
 * Thread: main. */
#ifndef BATON_DEPLOY_PROBE_CLIENT_H
#define BATON_DEPLOY_PROBE_CLIENT_H

#include "deploy/probe/probe_wire.h"

enum { PROBE_DIAL_MS = 4000, PROBE_ASK_MS = 45000 };

struct probe_dialer;
struct probe_client;

/* `secret` is borrowed until probe_dialer_free; empty: none. */
enum status probe_dialer_create(struct str secret, struct probe_dialer **out,
                                struct err *err) MUST_CHECK;
void probe_dialer_free(struct probe_dialer *h);

/* Connects to `where`, "host:port" (names are looked up), and asks WHO, which completes the peer's
 * description. ERR_CONFIG: malformed; ERR_PEER_LOST: nothing, or no probe server, listens there;
 * ERR_UNAUTHORIZED: another secret; ERR_BUSY: a running node; ERR_TIMEOUT: no answer. Each with a
 * sentence. */
enum status probe_dial(struct probe_dialer *h, const char *where, struct probe_client **out,
                       struct err *err) MUST_CHECK;
void probe_hang_up(struct probe_client *c); /* NULL is fine */

/* Sends a step and waits for its reply. A reply whose status is an error becomes that error with
 * its sentence. *reply is valid in any case; the caller releases it. */
enum status probe_ask(struct probe_client *c, const struct probe_request *r,
                      struct probe_reply *reply, struct err *err) MUST_CHECK;
enum status probe_ask_begin(struct probe_client *c, const struct probe_request *r,
                            struct err *err) MUST_CHECK;
enum status probe_ask_finish(struct probe_client *c, struct probe_reply *reply,
                             struct err *err) MUST_CHECK;

/* The peer's description; constant after the dial. */
struct probe_peer {
    char where[128];
    char address[PROBE_ADDRESS_MAX]; /* numeric, of the peer's end of the link */
    char local[PROBE_ADDRESS_MAX];   /* numeric, of our end */
    char host[64], boot_id[40], version[32];
    char transports[128]; /* those of its build, separated by commas */
    uint64_t process;     /* random, one per server process */
};
const struct probe_peer *probe_peer(const struct probe_client *c);

#endif
