/* http_clients.h - counts connections, requests and bodies by client address, for the limits of
 * http_limits and the turns of http_bodies.h. An IPv6 client is its /64 network, since one customer
 * usually has a whole one. An entry lives as long as one of its connections. Owner: the server.
 * Thread: loop. */
#ifndef BATON_NET_HTTP_HTTP_CLIENTS_H
#define BATON_NET_HTTP_HTTP_CLIENTS_H

#include <sys/socket.h>

#include "shared/base/map.h"
#include "shared/net/http/http_bodies.h"

struct http_client_entry {
    uint32_t n_conns, n_requests;
    struct http_turn turn; /* of its request bodies */
    uint8_t n_key;
    char key[16]; /* address bytes */
};

/* Counts a connection of `address` and returns its client's entry. */
struct http_client_entry *http_clients_enter(struct map *clients,
                                             const struct sockaddr_storage *address);
void http_clients_leave(struct map *clients, struct http_client_entry *e);

#endif
