/* http_server.h - HTTP/1.1 server on the loop: strict parsing, hard limits, keep-alive, streamed
 * answers.
 *
 * The handler gets a complete request (headers and body within the limits). It answers at once or
 * later: with http_reply, or with http_stream_begin, any number of http_stream_write and
 * http_stream_end. An exchange lives until `on_end`, which is called exactly once: after the answer
 * was handed to the socket, or when the client left before (gone == true). No function may be
 * called on it afterwards. Requests of one connection are served one after the other. Thread:
 * loop. */
#ifndef BATON_NET_HTTP_HTTP_SERVER_H
#define BATON_NET_HTTP_HTTP_SERVER_H

#include "shared/base/buf.h"
#include "shared/net/http/http_bodies.h"
#include "shared/net/loop.h"

struct http_server;
struct http_exchange;

struct http_limits {
    size_t header_bytes, n_headers, url_bytes, body_bytes;
    /* Paths that begin with this take bodies of at most small_body_bytes instead; NULL: none.
     * Borrowed until the server has ended. */
    const char *small_body_paths;
    size_t small_body_bytes;
    uint32_t n_connections;
    /* Of one client address (http_clients.h); 0: no limit. More get 429. */
    uint32_t n_client_connections, n_client_requests;
    uint32_t header_timeout_ms, idle_timeout_ms, body_timeout_ms, write_stall_ms;
    size_t write_queue_bytes;   /* a client that reads slower than this is cut off */
    size_t answers_bytes;       /* of all answers that wait to be read (http_backlog.h) */
    size_t large_bodies_bytes;  /* of all large bodies in memory; half of it for the small ones */
    uint32_t body_wait_ms;      /* in all for room among them, then 429 */
    uint32_t body_contended_ms; /* instead of body_timeout_ms while others wait for room */
};
/* 16 KiB, 100, 8 KiB, 45 MiB, 10,000, no limits of a client, 10 s, 120 s, 60 s, 60 s, 8 MiB, 256
 * MiB, 96 MiB, 30 s, 5 s */
extern const struct http_limits HTTP_LIMITS_DEFAULT;

struct http_server_options {
    struct loop *loop;
    const char *host;
    uint16_t port;      /* 0: any free one */
    const char *option; /* that chose the port, for the error; NULL: none. Used in the call only */
    bool share_port;    /* with other processes that ask for the same (SO_REUSEPORT) */
    struct http_limits limits;
    void (*handler)(void *arg, struct http_exchange *x);
    void *arg;
    struct metrics *metrics; /* may be NULL */
};

/* ERR_CONFIG names host and port, and the process that has the port when it is in use. */
enum status http_server_start(const struct http_server_options *o, struct http_server **out,
                              struct err *err) MUST_CHECK;
uint16_t http_server_port(const struct http_server *s);
/* From now on each answer says Connection: close, so that clients go elsewhere. Connections are
 * still accepted, and requests handed to the handler. */
void http_server_drain(struct http_server *s);
/* Begins no new connection. For grace_ms open exchanges may finish, and what has arrived or still
 * arrives on open connections is handed to the handler, since a request must not meet a closed
 * socket; then connections are closed. Less when none is left. Frees the server, then calls `done`
 * (may be NULL) once. */
void http_server_stop(struct http_server *s, uint32_t grace_ms, void (*done)(void *arg), void *arg);
/* As http_server_stop, for a handler that serves on: after quiet_ms it ends as soon as no exchange
 * is open, and connections that nothing comes on are closed. */
void http_server_leave(struct http_server *s, uint32_t grace_ms, uint32_t quiet_ms,
                       void (*done)(void *arg), void *arg);
/* Lets a stop that has begun last grace_ms from now at most. */
void http_server_hurry(struct http_server *s, uint32_t grace_ms);

/* The request; all valid until on_end. */
const char *http_method(const struct http_exchange *x);
struct str http_path(const struct http_exchange *x); /* percent-decoded, without the query */
/* Case-insensitive; { NULL, 0 } when absent. */
struct str http_header(const struct http_exchange *x, const char *name);
struct str http_body(const struct http_exchange *x);
/* A body that left its exchange. */
struct http_taken_body {
    struct buf bytes;
    struct http_bodies *bodies; /* to which the share is returned; NULL: none */
    struct http_share share;
};
/* Moves the body out, so that its memory can go before the answer does; http_body is empty then.
 * The caller releases it, also after on_end and after the server's end. */
void http_take_body(struct http_exchange *x, struct http_taken_body *out);
void http_taken_body_release(struct http_taken_body *b);
const char *http_peer(const struct http_exchange *x); /* "127.0.0.1:4711" */
void http_on_end(struct http_exchange *x, void (*fn)(void *arg, bool gone), void *arg);

/* Extra headers are "Name: value\r\n" lines (may be NULL); the caller has validated them. Returns
 * the status that was sent: `status`, or 503 when more answers wait to be read than the server
 * keeps (http_backlog.h). */
int http_reply(struct http_exchange *x, int status, const char *content_type, const char *headers,
               struct str body);
/* Replies {"MEMBER":"why"}: the errors of calls between processes, and of other servers' routers.
 * Extra headers as above. */
void http_reply_error(struct http_exchange *x, int status, const char *headers, const char *member,
                      const char *why);
void http_stream_begin(struct http_exchange *x, int status, const char *content_type,
                       const char *headers);
/* Copies and queues bytes, sent as one chunk. ERR_CANCELED: the client is gone; ERR_FULL: it does
 * not read, or too many do not (the connection is being cut). */
enum status http_stream_write(struct http_exchange *x, struct str data) MUST_CHECK;
void http_stream_end(struct http_exchange *x);
/* Instead of the end: closes the connection, so that the client sees that the answer is not
 * complete. on_end follows. */
void http_stream_cut(struct http_exchange *x);
/* Bytes of the answer that the kernel has not taken yet. */
size_t http_stream_queue(const struct http_exchange *x);
/* Calls fn whenever the kernel has taken some of them, until the end; fn NULL: no more. */
void http_on_drain(struct http_exchange *x, void (*fn)(void *arg), void *arg);

#endif
