/* http_answer.h - parses one HTTP/1.1 answer of another node piece by piece, without a socket, and
 * keeps of its head what may be passed on to a client.
 *
 * on_head is called once, for the final answer (interim ones are skipped); then on_body for each
 * piece of the body. An answer must say where it ends (Content-Length or chunks), since the end of
 * the connection may as well be the death of the peer. Life cycle: init, feed until `complete` or
 * an error, release. Thread: the owner's. */
#ifndef BATON_NET_HTTP_HTTP_ANSWER_H
#define BATON_NET_HTTP_HTTP_ANSWER_H

#include <llhttp.h>

#include "shared/base/buf.h"

enum { HTTP_ANSWER_HEAD_MAX = 65536 };

struct http_answer {
    llhttp_t llhttp;
    int status;
    struct buf type;    /* of the content; empty: not given */
    struct buf headers; /* "Name: value\r\n" lines that are valid on another connection */
    uint64_t length;    /* of the body; UINT64_MAX: not known before its end */
    bool complete;
    /* Not OK stops the parser, which then returns that status; may be NULL. */
    enum status (*on_head)(void *arg);
    enum status (*on_body)(void *arg, struct str piece);
    void *arg;
    /* of the parser */
    struct buf name, value; /* the header being read */
    size_t n_head;
    uint64_t n_body;
    bool has_head;
    enum status st;
};

void http_answer_init(struct http_answer *a);
void http_answer_release(struct http_answer *a);
/* ERR_IO: malformed, or without an end of its own. ERR_TOO_LONG: its head. Bytes after the answer
 * are ignored. */
enum status http_answer_feed(struct http_answer *a, const char *data, size_t n) MUST_CHECK;

#endif
