/* client.h - asking an agent: dial, prove the secret, one step after another.
 *
 * The caller blocks; underneath one loop serves all links, so that two agents can work at the same
 * time (begin on one, ask the other, end). Life cycle: host_create, dial any number, host_free
 * after all were closed. Thread: main. */
#ifndef BATON_DEPLOY_PROBE_CLIENT_H
#define BATON_DEPLOY_PROBE_CLIENT_H

#include "deploy/probe/probe_wire.h"

enum { PROBE_DIAL_MS = 4000, PROBE_ASK_MS = 45000 };

struct probe_dialer;
struct probe_client;

/* `secret` is borrowed until free; empty: none. */
enum status probe_dialer_create(struct str secret, struct probe_dialer **out,
                                struct err *err) MUST_CHECK;
void probe_dialer_free(struct probe_dialer *h);

/* `where` is "host:port" (names are looked up). ERR_CONFIG: not that; ERR_PEER_LOST: nobody there,
 * or no agent; ERR_UNAUTHORIZED: another secret; ERR_TIMEOUT: it does not answer. Each with a
 * sentence. Asks WHO, so that what is known of the peer is complete. */
enum status probe_dial(struct probe_dialer *h, const char *where, struct probe_client **out,
                       struct err *err) MUST_CHECK;
void probe_hang_up(struct probe_client *c); /* NULL is fine */

/* Send a step and wait for its reply; a reply with a status is that error with its sentence. *reply
 * (released by the caller) is valid in any case. */
enum status probe_ask(struct probe_client *c, const struct probe_request *r,
                      struct probe_reply *reply, struct err *err) MUST_CHECK;
enum status probe_ask_begin(struct probe_client *c, const struct probe_request *r,
                            struct err *err) MUST_CHECK;
enum status probe_ask_finish(struct probe_client *c, struct probe_reply *reply,
                             struct err *err) MUST_CHECK;

/* What is known of the peer: constant after dial. */
struct probe_peer {
    char where[128];
    char address[PROBE_ADDRESS_MAX]; /* numeric, of its end of the link */
    char local[PROBE_ADDRESS_MAX];   /* of ours */
    char host[64], boot_id[40], version[32];
    char transports[128]; /* built in there, comma list */
    uint64_t process;     /* random, of the agent's process */
};
const struct probe_peer *probe_peer(const struct probe_client *c);

#endif
