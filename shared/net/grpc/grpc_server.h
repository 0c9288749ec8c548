/* grpc_server.h - gRPC over HTTP/2 without TLS on the loop: clients begin with HTTP/2 at once
 * ("prior knowledge"), as gRPC's libraries do with an insecure channel.
 *
 * A method gets a call: `begin` with its headers, then `message` for each whole message (without
 * `streams` exactly one, when the client has sent all), `half_close` when no more follow. The
 * handler answers with any number of grpc_send and one grpc_finish, at once or later. A call lives
 * until `on_end`, which is called exactly once, and never from inside a grpc_* function: after the
 * end of the answer was handed to the socket, or when the client left, its time was over, or the
 * call broke a limit (gone == true). No function may be called on it afterwards.
 *
 * All is bounded: streams, headers, messages (which share memory as http_bodies.h says), answers
 * that are not read, and frames that only cost (pings, settings, resets). Messages are not
 * compressed. Thread: loop. */
#ifndef BATON_NET_GRPC_GRPC_SERVER_H
#define BATON_NET_GRPC_GRPC_SERVER_H

#include "shared/base/metrics.h"
#include "shared/net/grpc/grpc_status.h"
#include "shared/net/http/http_server.h"
#include "shared/net/loop.h"

struct grpc_server;
struct grpc_call;

struct grpc_limits {
    size_t header_bytes;    /* of a call, as HTTP/2 counts them */
    uint32_t n_headers;     /* likewise */
    size_t message_bytes;   /* of one message of a client */
    uint32_t n_connections; /* a further one is closed */
    /* Of one client address (http_clients.h); 0: no limit. */
    uint32_t n_client_connections, n_client_requests;
    uint32_t n_calls;     /* of one connection at once */
    uint32_t n_calls_all; /* of all; further ones are refused */
    uint32_t n_requests;  /* of one call at once (grpc_admit); then its messages wait */
    uint32_t begin_timeout_ms, idle_timeout_ms, message_timeout_ms, write_stall_ms;
    size_t call_queue_bytes;   /* a call whose client reads slower than this is cut off */
    size_t answers_bytes;      /* of all answers that wait to be read; one alone is always sent */
    size_t large_bodies_bytes; /* of all large messages; as much may wait to be parsed */
    uint32_t body_wait_ms;     /* for room among them */
    /* Frames of a connection that only cost may come this fast, with as many at once as `burst`;
     * each answer of the server allows for one more. Then streams that the client ends itself, or
     * begins beyond n_calls. */
    uint32_t control_burst, control_per_s, reset_burst, reset_per_s;
};
/* 16 KiB, 100, 45 MiB, 10,000, no limits of a client, 512, 32,768, 1,024, 10 s, 300 s, 60 s, 60 s,
 * 8 MiB, 256 MiB, 96 MiB, 30 s, 256 and 32 per second, 1,024 and 128 per second */
extern const struct grpc_limits GRPC_LIMITS_DEFAULT;

struct grpc_method {
    const char *path; /* "/package.Service/Method" */
    bool streams;     /* more than one message may come */
    /* The head is there. NULL: nothing is to be done yet. */
    void (*begin)(void *arg, struct grpc_call *c);
    /* `message` is valid in the call only. */
    void (*message)(void *arg, struct grpc_call *c, struct str message);
    void (*half_close)(void *arg, struct grpc_call *c); /* only with `streams` */
};

struct grpc_server_options {
    struct loop *loop;
    const char *host;
    uint16_t port;                     /* 0: any free one */
    const char *option;                /* as in http_server_options */
    bool share_port;                   /* likewise */
    struct grpc_limits limits;         /* 0: the default */
    const struct grpc_method *methods; /* borrowed; the last one's path is NULL */
    void *arg;                         /* of the methods */
    struct metrics *metrics;           /* may be NULL */
};

/* ERR_CONFIG names host and port, and the process that has the port when it is in use. */
enum status grpc_server_start(const struct grpc_server_options *o, struct grpc_server **out,
                              struct err *err) MUST_CHECK;
uint16_t grpc_server_port(const struct grpc_server *s);
/* From now on each connection is told, once it has had an answer, to send new calls elsewhere.
 * Connections are still accepted, and calls handed to the methods. */
void grpc_server_drain(struct grpc_server *s);
/* Begins no new connection. For grace_ms what is admitted may finish, and calls that arrive are
 * handed to the methods; streams on which nothing runs end as unavailable. Then, or as soon as
 * nothing runs, connections are closed so that clients know which calls were not looked at. Frees
 * the server, then calls `done` (may be NULL) once. */
void grpc_server_stop(struct grpc_server *s, uint32_t grace_ms, void (*done)(void *arg), void *arg);
/* Lets a stop that has begun last grace_ms from now at most. */
void grpc_server_hurry(struct grpc_server *s, uint32_t grace_ms);

/* The call; all valid until on_end. */
const char *grpc_peer(const struct grpc_call *c); /* "127.0.0.1:4711" */
/* A header by its name in lower case; { NULL, 0 } when absent. Only inside `begin`. */
struct str grpc_header(const struct grpc_call *c, const char *name);
/* When the client's time is over, in clock_ms; 0: it set none. */
uint64_t grpc_deadline_ms(const struct grpc_call *c);
void grpc_on_end(struct grpc_call *c, void (*fn)(void *arg, bool gone), void *arg);
/* What grpc_on_end was given; NULL before. */
void *grpc_on_end_arg(const struct grpc_call *c);
/* Moves the message out, inside `message`, so that what it counts for among all bodies goes along
 * with it (http_server.h). The caller releases it, also after on_end. */
void grpc_take_message(struct grpc_call *c, struct http_taken_body *out);

/* Counts a request of this call, until grpc_done, or the end of the call. False: its client address
 * has as many as it may. */
bool grpc_admit(struct grpc_call *c);
void grpc_done(struct grpc_call *c);
/* Copies and queues a message. ERR_CANCELED: the client is gone; ERR_FULL: it does not read, or too
 * many do not, and the call is being cut. */
enum status grpc_send(struct grpc_call *c, struct str message) MUST_CHECK;
/* Ends the answer; text may be NULL. Only on_end follows. */
void grpc_finish(struct grpc_call *c, enum grpc_status st, const char *text);
/* Bytes of the answer that have not been handed to the socket. */
size_t grpc_queue(const struct grpc_call *c);

#endif
