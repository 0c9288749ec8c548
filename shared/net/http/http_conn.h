/* http_conn.h - private header of the HTTP server: one connection and the exchange it serves.
 *
 *     READING ──request complete──▶ SERVING ──answer flushed──▶ READING        (kept alive)
 *        │                             │ └────answer flushed──▶ LINGER         (connection: close)
 *        │ fault, deadline             │ client gone, write error, too slow: on_end(gone) and
 *        └──▶ LINGER ──EOF, 2 s──▶ CLOSING ◀──────────────────┘
 *
 * LINGER has sent its FIN and discards what still arrives: closing with unread bytes would make the
 * kernel send a reset, which can destroy the answer before the client has read it. Invariants: 1.
 * on_end and the handler are called only from http_conn_advance and http_conn_lost, never from
 * inside an http_* call of the handler; on_drain only when a write has ended. 2. A connection is
 * freed in the close callback of its last handle. Thread: loop. */
#ifndef BATON_NET_HTTP_HTTP_CONN_H
#define BATON_NET_HTTP_HTTP_CONN_H

#include "shared/base/list.h"
#include "shared/base/metrics.h"
#include "shared/net/http/http_backlog.h"
#include "shared/net/http/http_clients.h"
#include "shared/net/http/http_parse.h"
#include "shared/net/listener.h"

enum http_conn_state { HTTP_CONN_READING, HTTP_CONN_SERVING, HTTP_CONN_LINGER, HTTP_CONN_CLOSING };

struct http_exchange {
    struct http_conn *conn;
    void (*on_end)(void *arg, bool gone);
    void *on_end_arg;
    void (*on_drain)(void *arg);
    void *on_drain_arg;
    bool open;     /* the handler has it and on_end was not called */
    bool begun;    /* the head of the answer was written */
    bool complete; /* so was its end */
    bool chunked;
    bool bodiless; /* HEAD, 204, 304 */
};

struct http_conn {
    struct list link, ready_link; /* of the server's conns and ready lists */
    struct http_server *server;
    enum http_conn_state state;
    uv_tcp_t tcp;
    uv_timer_t timer;
    uv_poll_t hangup;   /* on a duplicate of the socket, active while reading is paused */
    int hangup_fd;      /* -1: none yet */
    uint32_t n_handles; /* not yet closed */
    struct http_parse parse;
    struct buf in;              /* received, not yet parsed */
    struct buf next, in_flight; /* answer bytes: not yet given to libuv, given */
    struct http_backlog_share held;
    uv_write_t write;
    uv_shutdown_t shutdown;
    bool writing, reading, broken, keep_alive, continued, eof, advancing;
    uint32_t n_requests;
    uint64_t t_phase;        /* uv_now when the current wait (idle, head, body, linger) began */
    uint64_t t_progress;     /* uv_now when the kernel last took queued bytes, as far as seen */
    uint64_t taken_seen;     /* how many it had taken then */
    struct http_place place; /* of the body; waiting for room, the connection does not read */
    uint64_t t_wait;         /* uv_now when it began to wait for room */
    uint64_t waited_ms;      /* for room, before */
    struct http_exchange x;
    struct http_client_entry *client; /* NULL: the address is not known */
    char peer[64];
};

struct http_server {
    struct http_server_options o;
    char *host;
    struct listener listener;
    uv_idle_t idle; /* runs while ready is not empty */
    uv_timer_t grace, trim;
    struct list conns, ready;
    uint32_t n_conns, n_handles;
    uint32_t n_open;  /* exchanges that handlers have */
    size_t burst;     /* most bytes held since memory was last given back; 0: few */
    uint32_t n_quiet; /* looks since the burst seems to be over */
    struct http_bodies *bodies;
    struct http_backlog backlog;
    struct map clients;       /* address → struct http_client_entry */
    struct http_turn unknown; /* of connections without an address */
    bool draining, stopping;
    /* of the stop (http_stop.c), with uv_now times; t_stop 0: not seen yet */
    uint32_t grace_ms, quiet_ms;
    uint64_t t_stop, grace_until, linger_until; /* linger_until 0: in GRACE */
    void (*done)(void *arg);
    void *done_arg;
    struct gauge *m_conns;
    struct counter *m_requests, *m_refused, *m_turned_away, *m_slow, *m_gone;
    char read_buf[65536]; /* shared: each read is consumed before the next one */
};

/* http_conn.c */
/* Takes an accepted connection; a full server answers 503. */
void http_conn_open(struct http_server *s, int fd);
void http_conn_advance(struct http_conn *c);       /* makes all progress possible now */
void http_conn_lost(struct http_conn *c);          /* ends the exchange as gone and closes */
bool http_conn_is_idle(const struct http_conn *c); /* no request has begun */
/* Sends a FIN after the queued bytes and waits for the client's. */
void http_conn_linger(struct http_conn *c);
/* http_read.c */
void http_conn_resume(struct http_conn *c);
/* Stops reading, so that TCP holds the client back; still notices that it leaves. */
void http_conn_pause(struct http_conn *c);
/* http_write.c */
enum status http_conn_write(struct http_conn *c, const struct str *parts, size_t n_parts,
                            bool bounded) MUST_CHECK;
size_t http_conn_queue(const struct http_conn *c); /* answer bytes that the kernel has not taken */
/* Of all that were ever queued, those that it has; grows only when the client makes room. */
uint64_t http_conn_taken(const struct http_conn *c);
/* Ends the connection as lost in the next turn of the loop. */
void http_conn_break(struct http_conn *c);
/* Answers with a JSON error, for requests that no handler sees. */
void http_conn_refuse(struct http_conn *c, const struct http_fault *f);
/* http_server.c */
void http_conn_wake(struct http_conn *c); /* advances it in the next turn of the loop */
void http_server_conn_freed(struct http_server *s);
void http_server_close_listener(struct http_server *s);
void http_server_close_handles(struct http_server *s); /* the listener too; frees it in the end */
/* http_trim.c: looks whether a burst has begun; after more bytes are held. */
void http_trim_note(struct http_server *s);

#endif
