/* redis_stream.h - one connection to a server that speaks Redis' protocol (Redis itself, or a
 * sentinel): name, TCP, TLS where it is asked for, and replies out of the bytes. What is said on
 * it, and how long an answer may take, is its owner's business. Thread: loop. */
#ifndef BATON_NET_REDIS_REDIS_STREAM_H
#define BATON_NET_REDIS_REDIS_STREAM_H

#include <hiredis/hiredis.h>

#include "shared/net/loop.h"
#include "shared/net/tls.h"

struct redis_stream;

struct redis_stream_options {
    struct loop *loop;
    const char *host; /* a name or an address; copied */
    uint16_t port;
    struct tls_client *tls;     /* NULL: plain; not used after the close */
    void (*on_open)(void *arg); /* connected, and with TLS the server is verified */
    void (*on_reply)(void *arg, const redisReply *reply);
    /* It is over: once, and no callback follows. The owner closes the stream, here or later. st:
     * ERR_PEER_LOST, the connection; ERR_PEER_REFUSED, TLS; else what came is no reply, or too
     * long. */
    void (*on_lost)(void *arg, enum status st, const char *why);
    void *arg;
};

/* Begins to connect. After an error no callback is called; its codes are those of on_lost. */
enum status redis_stream_open(const struct redis_stream_options *o, struct redis_stream **out,
                              struct err *err) MUST_CHECK;
/* No callback is called any more. Allowed inside every callback; NULL is. */
void redis_stream_close(struct redis_stream *s);
/* Sends n bytes, in order; only after on_open. A failure is reported by on_lost, not from inside
 * this call. */
void redis_stream_write(struct redis_stream *s, const char *bytes, size_t n);
/* Is the server still to answer the TLS handshake? */
bool redis_stream_in_handshake(const struct redis_stream *s);
/* "TLSv1.3", or NULL when the connection is plain or not open. */
const char *redis_stream_tls_version(const struct redis_stream *s);

/* Appends one command in Redis' protocol. argv_len NULL: the words end in a 0. */
void redis_encode(struct buf *out, int argc, const char *const *argv, const size_t *argv_len);
/* One word of it; a command is "*<words>\r\n" and its words. */
void redis_encode_word(struct buf *out, const char *p, size_t n);

#endif
