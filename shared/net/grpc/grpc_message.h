/* grpc_message.h - the messages in the bytes of a call: five bytes of head, a flag and the length
 * (big endian), then so many bytes. Knows nothing of HTTP/2. Owner and thread: the caller's. */
#ifndef BATON_NET_GRPC_GRPC_MESSAGE_H
#define BATON_NET_GRPC_GRPC_MESSAGE_H

#include "shared/base/buf.h"

enum { GRPC_HEAD_BYTES = 5 };

/* { .max_bytes = N } is a valid reader before its first message. */
struct grpc_reader {
    size_t max_bytes; /* of a message */
    uint8_t head[GRPC_HEAD_BYTES];
    uint32_t n_head;   /* bytes of it that have come */
    struct buf buf;    /* of the message, what has come */
    uint32_t n_length; /* bytes of the whole message, once its head is whole */
};

enum grpc_read {
    GRPC_READ_MORE,    /* all bytes are used up, and the message is not whole */
    GRPC_READ_WHOLE,   /* it is in `buf` */
    GRPC_READ_LONG,    /* it would have more than max_bytes; the reader is of no more use */
    GRPC_READ_ENCODED, /* its flag says that it is compressed, or is none; likewise */
};

void grpc_reader_release(struct grpc_reader *r);
/* Takes bytes off the front of *in, no more than one message has. Memory grows with what came, not
 * with what was announced. */
enum grpc_read grpc_reader_feed(struct grpc_reader *r, struct str *in);
/* Forgets the whole message, and its memory. */
void grpc_reader_next(struct grpc_reader *r);
/* Is it between two messages? */
static inline bool grpc_reader_is_between(const struct grpc_reader *r) { return r->n_head == 0; }

/* Appends a message. */
void grpc_message_add(struct buf *out, struct str message);

#endif
