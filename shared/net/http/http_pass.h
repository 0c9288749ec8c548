/* http_pass.h - passes one request of a client to another node's HTTP port, and its answer back.
 *
 * The request goes as it came: the path, the body (not copied), the API key, the x-request-id and
 * what else means something to the API (of the times by which an answer is wanted what is left);
 * with `x-baton-passed`, so that no node passes it again, and with the name that both nodes log.
 *
 * A streamed answer comes back by whole events or lines, any other piece by piece; while the client
 * does not read, neither does this. A short whole answer is held until it is complete. A refusal,
 * or no answer, is not passed back: the caller tries another node or answers itself.
 *
 *     start ──▶ connect ──▶ send ──▶ head ──▶ body ──▶ done(PASS_ANSWERED)
 *                  └──────────┴────────┴─ done(PASS_NOT_TAKEN,  └──▶ done(PASS_BROKEN)
 *                                              REFUSED or FULL)
 *
 * `done` is called once, never from inside start, not after cancel. Thread: loop. */
#ifndef BATON_NET_HTTP_HTTP_PASS_H
#define BATON_NET_HTTP_HTTP_PASS_H

#include "shared/net/http/http_server.h"

#define HTTP_PASS_HEADER "x-baton-passed"
/* The name under which the passing node logs a request that has no x-request-id of its own. It is
 * not sent as that header, since a name in the body would have to give way to it. */
#define HTTP_PASS_NAME_HEADER "x-baton-passed-name"

/* Of a 429: it is of this request alone (a limit of its tenant, a time by which it wants its
 * answer), and the node takes others. */
#define HTTP_PASS_HAS_ROOM_HEADER "x-baton-has-room"

struct http_pass;

enum http_pass_end {
    PASS_ANSWERED,   /* the exchange has its answer */
    PASS_BROKEN,     /* it has the beginning of one, and was ended: with an error event, or cut */
    PASS_NOT_TAKEN,  /* nothing was sent to the client: the node is lost, ... */
    PASS_REFUSED,    /* ... or refuses this request, which a third one may take, ... */
    PASS_FULL,       /* ... or all */
    PASS_CLIENT_GONE /* the client does not take the answer; on_end of the exchange follows */
};

struct http_pass_options {
    struct loop *loop;
    struct http_exchange *x; /* its handler has it; on_end must call http_pass_cancel */
    const char *host, *path; /* copied; the path without a query */
    uint16_t port;
    uint64_t t_start_ns; /* clock_ns, when the request came to this node */
    const char *from;    /* this node's name, for HTTP_PASS_HEADER */
    const char *name;    /* the request's, for HTTP_PASS_NAME_HEADER; NULL: none */
    /* One line of JSON each, kept until done: ends a stream, of events or of lines (sse.h), whose
     * node is gone. */
    struct str broken_event, broken_line;
    bool last;                      /* no other node is left to ask: 404 is the answer */
    uint32_t connect_ms, answer_ms; /* limits until connected, and until the answer begins */
    /* status: of the answer; 0: there was none. */
    void (*done)(void *arg, enum http_pass_end end, int status);
    void *arg;
};

/* ERR_PEER_LOST: not even a connection could be begun. */
enum status http_pass_start(const struct http_pass_options *o, struct http_pass **out) MUST_CHECK;
/* The client left, or the caller gives up: closes the connection to the other node, which stops the
 * work there. */
void http_pass_cancel(struct http_pass *p);
/* The other node was found dead: as if its connection had closed. */
void http_pass_peer_lost(struct http_pass *p);
/* Milliseconds since the other node last sent something. */
uint64_t http_pass_silent_ms(const struct http_pass *p);

#endif
