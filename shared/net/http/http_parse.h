/* http_parse.h - parses one HTTP/1.1 request, without a socket.
 *
 * Two parsers see every byte. The scanner (http_scan.c) is strict about lines: only CRLF ends a
 * line, no folded lines, no control characters, no white space before a colon, sizes and counts
 * within the limits, exact chunk framing. What it accepts goes to llhttp; http_head.c then checks
 * the finished head (one Host, one framing, ...). A request that two servers could read differently
 * is refused and its connection closed.
 *
 *     IDLE ──first byte──▶ HEAD ──blank line──▶ BODY ──last byte──▶ DONE ──http_parse_next──▶ IDLE
 *       any state ──fault──▶ FAILED (nothing more is read; `fault` has the answer)
 *
 * Life cycle: init, feed until DONE or FAILED, next, ..., release. Thread: the owner's. */
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

/* The kind of the line being scanned. */
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
    size_t n_framing;  /* bytes of chunk extensions so far */
    uint32_t n_blank;  /* empty lines before the request line */
    uint32_t n_spaces; /* in the request line */
    uint64_t tail;     /* last eight bytes of the request line */
    bool cr, colon, extension;
};

struct http_field {
    size_t name, n_name, value, n_value; /* offsets in http_parse.text */
};

struct http_parse {
    const struct http_limits *limits; /* borrowed */
    enum http_parse_state state;
    struct http_fault fault;
    llhttp_t llhttp;
    struct http_scan scan;
    struct buf text; /* URL, then names and values */
    struct buf path; /* decoded */
    struct buf body;
    size_t body_max; /* of this request: its path may have a limit of its own */
    size_t n_url;
    struct http_field *fields;
    size_t n_fields, fields_cap, n_trailers;
    bool in_value, keep_alive, is_http10, wants_continue;
};

void http_parse_init(struct http_parse *p, const struct http_limits *limits);
void http_parse_release(struct http_parse *p);
/* Forgets the request and prepares for the next one of the same connection. */
void http_parse_next(struct http_parse *p);
/* Parses `data` and returns the bytes used: fewer than n only in DONE (the rest is the next
 * request) and FAILED. */
size_t http_parse_feed(struct http_parse *p, const char *data, size_t n);
/* Returns the value of a header, trimmed; { NULL, 0 } when absent. */
struct str http_parse_header(const struct http_parse *p, const char *name);

/* ---- for http_parse.c, http_scan.c and http_head.c ---- */

/* Sets the fault. Returns the value with which an llhttp callback stops llhttp. */
int http_parse_fail(struct http_parse *p, int status, const char *code, const char *message);
/* Scans up to the end of the line or of the data; returns the bytes accepted, or sets a fault. */
size_t http_scan_line(struct http_parse *p, const char *data, size_t n);
/* Skips the extension of a chunk size: nobody uses one, and llhttp 8.1 refuses a second one.
 * Returns the bytes skipped. */
size_t http_scan_extension(struct http_parse *p, const char *data, size_t n);
/* Checks the finished head and decodes the URL; 0 or http_parse_fail. */
int http_parse_check_head(struct http_parse *p);

#endif
