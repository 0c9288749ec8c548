/* redis_server.h - which Redis is meant, and how it is reached: one server, or the master that
 * sentinels name; in the clear or over TLS; as which user. Strings and lists are borrowed.
 * Thread: any. */
#ifndef BATON_NET_REDIS_REDIS_SERVER_H
#define BATON_NET_REDIS_REDIS_SERVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shared/base/address/host_port.h"

enum { REDIS_SENTINELS_MAX = 16, REDIS_SERVER_TEXT_MAX = 256 };

struct redis_address {
    char host[HOST_TEXT_MAX]; /* a name or an address, without brackets */
    uint16_t port;
};

struct redis_server {
    /* one server; not looked at when there are sentinels */
    const char *host;
    uint16_t port;
    /* or the master of this name, as these say */
    const struct redis_address *sentinels;
    size_t n_sentinels; /* at most REDIS_SENTINELS_MAX; 0: host and port */
    const char *master;
    const char *sentinel_username, *sentinel_password; /* NULL or "": none */

    int db;
    const char *username, *password;         /* NULL or "": none; a user needs a password */
    bool tls;                                /* to Redis and to the sentinels */
    const char *tls_ca, *tls_cert, *tls_key; /* files, as tls_client_options takes them */
};

/* Writes "10.0.0.1:6379", or "the master m of the sentinels a:1,b:2"; many are cut. Returns
 * `out`. */
const char *redis_server_text(const struct redis_server *s, char out[REDIS_SERVER_TEXT_MAX]);

#endif
