/* grpc_conn.h - private header of the gRPC server: its connections and their calls.
 *
 *     connection: OPEN ──the session has ended──▶ LINGER ──EOF, 2 s──▶ CLOSING
 *                   └──────client gone, write error, too slow──────────▶┘
 *     call:   HEAD ──▶ RUNNING ──grpc_finish──▶ FINISHED ──flushed──▶ gone from its stream
 *               └──refused─────────────────────────▲  (a reset leads there from any state)
 *
 * LINGER has sent its FIN and discards what still arrives, as in http_conn.h. Invariants: 1.
 * nghttp2 sends only in grpc_conn_advance, which runs at the top of a turn of the loop, so no
 * handler runs inside a send, and no stream ends inside a grpc_* function. 2. A call is freed when
 * its stream closes, or with its connection. 3. What a call's client has sent and nobody has parsed
 * is at most its stream's window, since only parsed bytes make room in it. The connection's window
 * is always open: a call that waits must not hold up another one. 4. A connection is freed in the
 * close callback of its last handle. Thread: loop. */
#ifndef BATON_NET_GRPC_GRPC_CONN_H
#define BATON_NET_GRPC_GRPC_CONN_H

#include <nghttp2/nghttp2.h>

#include "shared/base/list.h"
#include "shared/net/grpc/grpc_head.h"
#include "shared/net/grpc/grpc_message.h"
#include "shared/net/grpc/grpc_server.h"
#include "shared/net/http/http_clients.h"
#include "shared/net/listener.h"

/* Lets n_burst through at once, and per_s of them each second. */
struct grpc_rate {
    uint64_t n_milli; /* thousandths that are left */
    uint64_t t_ms;
};

enum grpc_call_state { GRPC_CALL_HEAD, GRPC_CALL_RUNNING, GRPC_CALL_FINISHED };

struct grpc_call {
    struct list link; /* of the connection's calls */
    struct grpc_conn *conn;
    int32_t stream;
    enum grpc_call_state state;
    const struct grpc_method *method; /* NULL: it was refused */
    struct grpc_fields fields;
    bool fields_too_large;
    bool has_handler; /* `begin` was called, on_end was not */
    void (*on_end)(void *arg, bool gone);
    void *on_end_arg;
    uint64_t t_start_ns;
    uint64_t deadline_ms; /* uv_now; UINT64_MAX: none */
    uint64_t deadline_clock_ms;
    /* what comes */
    struct buf in;     /* received, not yet parsed */
    size_t n_unparsed; /* bytes of it, and of a message that waits for room */
    struct grpc_reader reader;
    struct http_place place;
    uint64_t t_input;     /* uv_now when the message, or the wait for it, began */
    uint64_t t_wait;      /* uv_now when it began to wait for room */
    bool half_closed;     /* the client sends no more */
    bool half_close_seen; /* and the method knows */
    uint32_t n_requests;  /* admitted, not done */
    /* what goes */
    bool begun;    /* its headers were submitted */
    bool deferred; /* nghttp2 waits for grpc_send */
    bool broken;   /* it is being reset */
    struct buf out;
    size_t n_sent;            /* bytes of `out` that nghttp2 has taken */
    struct list backlog_link; /* of the server's backlog, while it has bytes to send */
    uint64_t t_progress;      /* uv_now when nghttp2 last took some, or the queue began */
    enum grpc_status st;
    struct buf text; /* grpc-message, escaped */
};

enum grpc_conn_state { GRPC_CONN_OPEN, GRPC_CONN_LINGER, GRPC_CONN_CLOSING };

struct grpc_conn {
    struct list link, ready_link; /* of the server's conns and ready lists */
    struct grpc_server *server;
    enum grpc_conn_state state;
    uv_tcp_t tcp;
    uv_timer_t timer;
    uint32_t n_handles; /* not yet closed */
    nghttp2_session *session;
    struct list calls;
    uint32_t n_calls, n_calls_ever;
    size_t n_unparsed;          /* bytes of all of them that wait to be parsed */
    struct buf next, in_flight; /* bytes for the socket: not yet given to libuv, given */
    uv_write_t write;
    uv_shutdown_t shutdown;
    bool is_http2, settled; /* it speaks that; its settings came */
    bool notified;          /* it was told to send new calls elsewhere */
    bool terminated;        /* ... and of the last call that was looked at */
    bool flooded;           /* nothing more is read from it */
    bool has_news;          /* calls are to be looked at: they may read on, or are broken */
    bool writing, broken, advancing, sending, shut;
    char first[8]; /* the first bytes, while they may be those of HTTP/2 */
    uint32_t n_first;
    uint64_t t_phase;    /* uv_now when it began, became idle, or lingered */
    uint64_t t_progress; /* uv_now when the kernel last took queued bytes */
    uint64_t t_due;      /* of the timer; UINT64_MAX: it does not run */
    struct grpc_rate control, resets;
    struct http_client_entry *client; /* NULL: the address is not known */
    char peer[64];
};

struct grpc_server {
    struct grpc_server_options o;
    char *host;
    struct listener listener;
    uv_idle_t idle; /* runs while ready is not empty */
    uv_timer_t grace;
    nghttp2_session_callbacks *callbacks;
    nghttp2_option *option;
    struct list conns, ready;
    uint32_t n_conns, n_handles;
    uint32_t n_calls;  /* of all connections, likewise ... */
    size_t n_unparsed; /* ... the bytes that wait to be parsed */
    struct http_bodies *bodies;
    struct map clients;
    struct http_turn unknown;
    struct list backlog; /* calls with bytes to send, those without progress for longest first */
    size_t n_backlog;    /* their bytes */
    bool draining, stopping;
    uint32_t grace_ms;
    uint64_t t_stop, grace_until, linger_until; /* uv_now; 0: not yet */
    void (*done)(void *arg);
    void *done_arg;
    size_t n_methods;         /* of o.methods */
    struct counter **m_calls; /* [n_methods + 1][GRPC_N_STATUSES], made when first counted */
    struct gauge *m_conns, *m_backlog;
    struct counter *m_turned_away, *m_slow, *m_flood, *m_gone;
    char read_buf[65536]; /* shared: each read is consumed before the next one */
};

/* grpc_server.c */
void grpc_conn_wake(struct grpc_conn *c); /* advances it in the next turn of the loop */
void grpc_server_conn_freed(struct grpc_server *s);
/* Counts an ended call. */
void grpc_server_count(struct grpc_server *s, const struct grpc_method *m, enum grpc_status st);

/* grpc_conn.c */
void grpc_conn_open(struct grpc_server *s, int fd);
void grpc_conn_advance(struct grpc_conn *c); /* makes all progress possible now */
void grpc_conn_lost(struct grpc_conn *c);    /* ends its calls as gone and closes */
/* The connection must be looked at, at this time (uv_now) at the latest. */
void grpc_conn_due(struct grpc_conn *c, uint64_t at);
/* No further calls; it closes when those that run have ended. */
void grpc_conn_terminate(struct grpc_conn *c, uint32_t error);
/* Tells the client to send new calls elsewhere; those that run, or are on their way, are served. */
void grpc_conn_notify(struct grpc_conn *c);
uint64_t grpc_conn_now(const struct grpc_conn *c);

/* grpc_write.c: takes what the session has to send, and sends it. */
void grpc_conn_flush(struct grpc_conn *c);
/* Sends bytes of its own, before there is a session. */
void grpc_conn_write_plain(struct grpc_conn *c, struct str bytes);
static inline bool grpc_conn_has_output(const struct grpc_conn *c)
{
    return c->writing || c->next.len > 0;
}

/* grpc_session.c: what nghttp2 calls. */
enum status grpc_session_setup(struct grpc_server *s) MUST_CHECK;
enum status grpc_session_create(struct grpc_conn *c) MUST_CHECK;

/* grpc_call.c: a call from its head to its end. */
struct grpc_call *grpc_call_create(struct grpc_conn *c, int32_t stream);
void grpc_call_begin(struct grpc_call *c); /* its head is whole */
void grpc_call_receive(struct grpc_call *c, struct str bytes);
void grpc_call_half_close(struct grpc_call *c); /* the client sends no more */
void grpc_call_read_on(struct grpc_call *c);    /* parses what waited, if it may */
/* Ends the handler's part as gone, and the call with this status after what it has sent. Not inside
 * a handler. */
void grpc_call_abort(struct grpc_call *c, enum grpc_status st, const char *text);
void grpc_call_free(struct grpc_call *c, bool gone); /* its stream is closed */
/* Does what is due; returns when to look again (uv_now). */
uint64_t grpc_call_look(struct grpc_call *c, uint64_t now);
/* grpc_answer.c: resets the stream; nothing of the answer is sent any more. */
void grpc_call_reset(struct grpc_call *c, uint32_t error);
/* Sends the end that st and text say. */
void grpc_call_submit_end(struct grpc_call *c);
void grpc_call_set_status(struct grpc_call *c, enum grpc_status st, const char *text);
/* Ends it with an answer of HTTP, whose body is empty. */
void grpc_call_refuse_http(struct grpc_call *c, int http);
void grpc_backlog_leave(struct grpc_call *c);

#endif
