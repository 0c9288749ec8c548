/* http_client.h - small HTTP/1.1 requests to other nodes (directory, status), with a deadline and a
 * limit for the answer.
 *
 * Connections are kept per host:port and reused. Thread: loop. */
#ifndef BATON_NET_HTTP_HTTP_CLIENT_H
#define BATON_NET_HTTP_HTTP_CLIENT_H

#include "shared/base/buf.h"
#include "shared/net/loop.h"

struct http_client;

struct http_client_options {
    struct loop *loop;
    size_t body_max; /* longest answer accepted */
    uint32_t n_idle; /* connections kept open */
};

struct http_client *http_client_create(const struct http_client_options *o);
/* Pending requests get cb(ERR_CANCELED) before this returns. */
void http_client_free(struct http_client *c);

/* st OK: an answer came (whatever its http status); body is valid during the call. */
typedef void http_client_fn(void *arg, enum status st, int http_status, struct str body);

/* headers: "Name: value\r\n" lines or NULL. After OK `cb` is called exactly once. */
enum status http_client_request(struct http_client *c, const char *method, const char *host,
                                uint16_t port, const char *path, const char *headers,
                                struct str body, uint32_t timeout_ms, http_client_fn *cb,
                                void *arg) MUST_CHECK;

#endif
