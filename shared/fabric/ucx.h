/* ucx.h - messages between processes of several hosts over UCX: a header and bytes, sent without
 * blocking, into memory that the receiver names.
 *
 * A *fabric* is a UCP worker with an endpoint to each of up to FABRIC_PEERS_MAX peers, which the
 * owner numbers. Messages arrive in a buffer of UCX and are copied to the place that the receiver's
 * `place` has named; so none is written anywhere else, and none after fabric_close. Those of one
 * peer arrive in the order in which they were sent. Shared memory is not used.
 *
 * A peer that vanishes is told by `lost`, once: when its connection ends, or a send to it fails. A
 * stopped or unreachable one is not noticed here: owners have deadlines.
 * LIMIT: UCX parses addresses and packets, and its tcp also executes puts that nobody here sends:
 * whoever reaches the worker's port is trusted. Over InfiniBand each message is copied once more
 * than by rendezvous.
 * LIMIT: a peer that vanishes while UCX 1.13 connects to it (milliseconds) can end this process.
 * Thread: one at a time, which owner is the owner's business; callbacks come in its calls. */
#ifndef BATON_FABRIC_UCX_H
#define BATON_FABRIC_UCX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shared/base/err.h"
#include "shared/base/status.h"

enum {
    FABRIC_PEERS_MAX = 256,
    FABRIC_HEADER_MAX = 64,
    FABRIC_PARTS_MAX = 16,       /* of one message */
    FABRIC_WINDOW = 16,          /* sends to one peer that are not complete */
    FABRIC_PIECE_MAX = 56 << 10, /* of a message: fits into one buffer of UCX's tcp */
    FABRIC_ADDRESS_MAX = 16 << 10
};

struct fabric_events {
    /* Where a message of n bytes is to be written, or NULL: it is dropped. The header is as long as
     * it was sent, at most FABRIC_HEADER_MAX; whatever came is passed on. */
    void *(*place)(void *arg, const void *header, size_t header_bytes, size_t n);
    /* The message lies at its place. Also for n 0, if `place` was not NULL. */
    void (*received)(void *arg, const void *header, size_t header_bytes, size_t n);
    void (*lost)(void *arg, uint32_t peer, const char *why);
    /* Writes n bytes from byte `at` on of what the data of a part is sent as. `to` is aligned to
     * nothing. NULL: no part needs it. */
    void (*convert)(void *arg, void *to, const void *data, size_t at, size_t n);
    void *arg;
};

struct fabric;

/* tls: UCX transports as in UCX_TLS; NULL: that variable's, or tcp. ERR_NODEV: there is
 * no device for them. */
enum status fabric_open(const char *tls, uint32_t n_peers, const struct fabric_events *events,
                        struct fabric **out, struct err *err) MUST_CHECK;
/* Ends every connection and frees. What was sent gets up to flush_ms to leave this process. Never
 * inside a callback. NULL is accepted. */
void fabric_close(struct fabric *f, uint64_t flush_ms);
/* For the peers; borrowed until fabric_close. At most FABRIC_ADDRESS_MAX bytes. */
const void *fabric_address(const struct fabric *f, size_t *bytes);
/* Begins to connect; sends may follow at once. The address is one of fabric_address. ERR_IO. */
enum status fabric_connect(struct fabric *f, uint32_t peer, const void *address,
                           struct err *err) MUST_CHECK;

/* Bytes of a message, which lie apart here and together at the receiver's place: n from byte `at`
 * on of what data is sent as, itself or what `convert` makes of it. */
struct fabric_part {
    const void *data;
    size_t at, n;
    bool converts;
};

/* Sends a message of n_parts parts, together at most FABRIC_PIECE_MAX bytes, to a connected peer.
 * The header and the list are copied; the data stays as it is until the send is complete, and
 * `convert` may be called until then, in calls of the fabric.
 * ERR_BUSY: FABRIC_WINDOW sends are not: progress and try again. ERR_PEER_LOST. */
enum status fabric_send(struct fabric *f, uint32_t peer, const void *header, size_t header_bytes,
                        const struct fabric_part *parts, size_t n_parts) MUST_CHECK;
/* Sends to a peer that are not complete; 0 if it is lost. */
size_t fabric_n_sending(const struct fabric *f, uint32_t peer);
/* Ends the connection to a peer, as if it were lost but without a word of `lost`: what has not left
 * is not read again. */
void fabric_drop(struct fabric *f, uint32_t peer);
/* Does what there is to do, up to a limit; false: there was nothing. */
bool fabric_progress(struct fabric *f);
/* True: fabric_fd becomes readable when there is something to do. False: there is already. */
bool fabric_arm(struct fabric *f);
int fabric_fd(const struct fabric *f);

/* Silences UCX's own log, unless the operator set its level: this program reports every failure
 * that matters from its status. Any thread, before a context is created. */
void fabric_keep_ucx_quiet(void);

#endif
