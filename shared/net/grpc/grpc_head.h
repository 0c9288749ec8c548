/* grpc_head.h - the head of a call: its header fields, what they must be, and the text that its end
 * carries back. Owner and thread: the caller's. */
#ifndef BATON_NET_GRPC_GRPC_HEAD_H
#define BATON_NET_GRPC_GRPC_HEAD_H

#include "shared/base/buf.h"
#include "shared/net/grpc/grpc_status.h"

/* { 0 } is valid and empty. */
struct grpc_fields {
    struct buf text; /* of each field: its name, 0, its value, 0 */
    uint32_t n;
    size_t list_bytes; /* as HTTP/2 counts a list of fields: 32 bytes more for each */
};

void grpc_fields_release(struct grpc_fields *f);
/* HTTP/2 allows no 0 in either. False, and nothing added: there would be more than n_max fields, or
 * more than max_bytes of them. */
bool grpc_fields_add(struct grpc_fields *f, struct str name, struct str value, uint32_t n_max,
                     size_t max_bytes);
/* The first of that name; { NULL, 0 }: there is none. Valid until fields are added. */
struct str grpc_fields_get(const struct grpc_fields *f, const char *name);

/* Why a call is not one of gRPC, or asks for what this server has not. */
struct grpc_refusal {
    int http; /* other than 200: the client speaks HTTP, but not gRPC */
    enum grpc_status st;
    const char *text;
};

enum { GRPC_NO_TIMEOUT = 0 };
/* Checks method, content type and encoding, and reads grpc-timeout, in milliseconds (at least 1).
 * False: *why says what is wrong. */
bool grpc_head_check(const struct grpc_fields *f, uint64_t *timeout_ms, struct grpc_refusal *why);
/* Appends a text as grpc-message carries it: bytes beyond printable ASCII, '%', and a space at its
 * edges as %XX. At most max_bytes of it. */
void grpc_escape(struct buf *out, struct str text, size_t max_bytes);

#endif
