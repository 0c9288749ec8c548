/* http_parse.h - one HTTP/1.1 request out of bytes, without a socket. Not for answers
 * (http_client.c reads those).
 *
 * Two readers look at every byte. The scanner (http_scan.c) holds the line discipline: CRLF and
 * nothing else ends a line, no folded lines, no control characters, no white space before a colon,
 * sizes and counts within the limits, chunk framing exact. What it lets through goes to llhttp,
 * which takes the request apart; the checks of the finished head (one Host, one framing, ...)
 * follow. A request that two servers could read differently is refused and its connection closed.
 *
 *     IDLE ──first byte──▶ HEAD ──blank line──▶ BODY ──last byte──▶ DONE ──http_parse_next──▶ IDLE
 *       any state ──fault──▶ FAILED (fault says status, code and sentence of the answer; nothing more is read)
 *
 * Life cycle: init, feed until DONE or FAILED, next, ..., release. Thread: its owner's. */
#ifndef BATON_NET_HTTP_HTTP_PARSE_H
#define BATON_NET_HTTP_HTTP_PARSE_H

#include <llhttp.h>

#include "shared/base/buf.h"
#include "shared/net/http/http_server.h"

enum http_parse_state {
    HTTP_PARSE_IDLE,
    HTTP_PARSE_HEAD,
    HTTP_PARSE_BODY,
    HTTP_PARSE_DONE,
    HTTP_PARSE_FAILED
};

struct http_fault {
    int status;
    const char *code;    /* machine-readable, for the "code" member */
    const char *message; /* one sentence */
};

/* What the line being scanned is. */
enum http_line {
    HTTP_LINE_REQUEST,
    HTTP_LINE_FIELD,
    HTTP_LINE_CHUNK_SIZE,
    HTTP_LINE_CHUNK_END,
    HTTP_LINE_TRAILER
};

struct http_scan {
    enum http_line kind;
    uint64_t n_raw;    /* payload bytes before the next line starts */
    size_t n_line;     /* bytes of this line so far */
    size_t n_block;    /* bytes of the header block and trailers so far */
    size_t n_framing;  /* bytes of chunk-size lines beyond their digits so far */
    uint32_t n_blank;  /* empty lines before the request line */
    uint32_t n_spaces; /* in the request line */
    uint64_t tail;     /* last eight bytes of the request line */
    bool cr, colon, extension;
};

struct http_field {
    size_t name, n_name, value, n_value; /* places in http_parse.text */
};

struct http_parse {
    const struct http_limits *limits; /* kept */
    enum http_parse_state state;
    struct http_fault fault;
    llhttp_t llhttp;
    struct http_scan scan;
    struct buf text; /* URL, then names and values */
    struct buf path; /* decoded */
    struct buf body;
    size_t n_url;
    struct http_field *fields;
    size_t n_fields, fields_cap, n_trailers;
    bool in_value, keep_alive, is_http10, wants_continue;
};

void http_parse_init(struct http_parse *p, const struct http_limits *limits);
void http_parse_release(struct http_parse *p);
/* Forget the request and get ready for the next one of the same connection. */
void http_parse_next(struct http_parse *p);
/* Read from `data`; returns the bytes used. Fewer than n only in DONE (the rest is the next
 * request) and FAILED. */
size_t http_parse_feed(struct http_parse *p, const char *data, size_t n);
/* Value of a header, trimmed; { NULL, 0 } when absent. */
struct str http_parse_header(const struct http_parse *p, const char *name);

/* Of the two source files only. Set the fault; the value is what llhttp callbacks return to
 * stop. */
int http_parse_fail(struct http_parse *p, int status, const char *code, const char *message);
/* Scan up to the end of the line or of the data; returns the bytes that are in order and sets a
 * fault otherwise. */
size_t http_scan_line(struct http_parse *p, const char *data, size_t n);
/* Skip the extension of a chunk size: nothing here reads one, and llhttp 8.1 refuses a second one.
 * Returns the bytes passed over. */
size_t http_scan_extension(struct http_parse *p, const char *data, size_t n);
/* Check the finished head and decode the URL; 0 or http_parse_fail. */
int http_parse_check_head(struct http_parse *p);

#endif
