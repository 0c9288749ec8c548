/* wire.h - every byte that two kvt exchange: fixed little-endian structs and their strict decoding.
 *
 *     hello     sender → receiver, through the control plane: the sender and its layout
 *     answer    receiver → that sender only: layout, one-time ticket, addresses of the transports
 *     grant     receiver → sender: session, generation, heads, blocks
 *     preamble  the first bytes of a data connection: the ticket, and the reply to it
 *     message   all later bytes: 32, then n checksums (NOTE) or KV data (DATA, stream transports)
 *
 * Invariants: decoding reads no byte outside its input and accepts exactly what encoding produces:
 * known magic and version, zero padding, no trailing byte. A decoded value is in the range that its
 * comment gives; session.c checks whether it fits the session.
 * Thread: any (values). */
#ifndef BATON_KVTRANSFER_WIRE_H
#define BATON_KVTRANSFER_WIRE_H

#include "shared/base/buf.h"
#include "shared/base/err.h"
#include "shared/kv/kv_layout.h"

enum {
    KVT_VERSION = 6,
    KVT_TICKET_BYTES = 16,
    /* Pieces of one put, of which a CPU or NIC touches every byte: 1 MiB of 4 KiB pieces; its NOTE
     * stays below 4 KiB. */
    KVT_BATCH_PIECES = 256,
    /* Pieces of one put between GPUs and its NOTE: 128 MiB of 128 KiB pieces. */
    KVT_PUT_PIECES = 1024,
    KVT_MESSAGE_BYTES = 32,
    KVT_MESSAGE_MAX = KVT_MESSAGE_BYTES + 8 * KVT_PUT_PIECES,
    KVT_PREAMBLE_BYTES = 32,
    KVT_ADDRESS_MAX = 1024,
    KVT_TRANSPORTS_MAX = 8,
    KVT_NAME_MAX = 15,
    KVT_BLOCK_TOKENS_MAX = 65536,
    KVT_GRANT_BLOCKS_MAX = 1 << 20, /* 64 M tokens in 64-token blocks: above any context length */
    /* Bits of `bytes` of OPEN: every NOTE of this transfer carries checksums; it is without the
     * receiver's draft layer, which the sender does not have. */
    KVT_OPEN_SUMS = 1,
    KVT_OPEN_NO_DRAFT = 2
};

struct kvt_hello_msg {
    struct kv_layout layout;
    uint8_t node[16]; /* random id of this kvt: an answer is valid for one sender only */
    bool checksum;    /* the sender is willing to compute checksums */
    bool lossy;       /* the sender accepts a less precise element type */
};

struct kvt_answer_transport {
    char name[KVT_NAME_MAX + 1];
    struct str address; /* borrowed from the input */
};

struct kvt_answer_msg {
    struct kv_layout layout;
    uint8_t node[16]; /* of the hello that is answered */
    bool checksum;    /* both sides want checksums */
    bool lossy;       /* at least one side accepts a less precise element type */
    uint8_t ticket[KVT_TICKET_BYTES];
    uint32_t n_transports; /* 1..KVT_TRANSPORTS_MAX */
    struct kvt_answer_transport transports[KVT_TRANSPORTS_MAX];
};

struct kvt_grant_msg {
    uint32_t session;
    uint64_t generation;
    uint32_t n_blocks, n_skip, n_tokens; /* n_skip <= n_blocks <= KVT_GRANT_BLOCKS_MAX */
    uint32_t first_head, n_heads;        /* of the whole model; n_heads >= 1 */
    uint32_t block_tokens;               /* of the receiver's blocks, 1..KVT_BLOCK_TOKENS_MAX */
    const uint8_t *blocks;               /* n_blocks int32, borrowed; kvt_grant_block reads one */
};

enum kvt_preamble_kind { KVT_PREAMBLE_TICKET = 1, KVT_PREAMBLE_WELCOME, KVT_PREAMBLE_REFUSED };

struct kvt_preamble {
    enum kvt_preamble_kind kind;
    uint8_t ticket[KVT_TICKET_BYTES]; /* TICKET; zero otherwise */
    uint64_t value;                   /* WELCOME: the transport's own (pool bytes); otherwise 0 */
};

enum kvt_message_kind {
    KVT_MSG_OPEN = 1, /* sender: may I write into this grant? */
    KVT_MSG_OPENED,   /* receiver: yes, over this connection */
    /* sender: `bytes` of pieces [first, first + n) of `layer` follow (stream transports only) */
    KVT_MSG_DATA,
    /* sender: pieces [first, first + n) of `layer` and of more_layers after it are in place;
     * checksums */
    KVT_MSG_NOTE,
    KVT_MSG_FINISH, /* sender: that was all; `bytes` in total */
    KVT_MSG_DONE,   /* receiver: verified; the source may be reused */
    KVT_MSG_STOP,   /* receiver: stop writing, for `status` */
    /* sender: nothing of this session will be written any more (answer to STOP, or the sender's own
     * end) */
    KVT_MSG_STOPPED,
    KVT_MSG_BYE, /* sender: nothing at all will be written over this connection any more */
    KVT_MSG_KIND_END
};

struct kvt_message {
    enum kvt_message_kind kind;
    enum status status; /* STOP, STOPPED: why; OK otherwise */
    uint32_t session;
    uint64_t generation;
    uint32_t layer, more_layers, first; /* more_layers: NOTE only */
    /* DATA: 1..KVT_BATCH_PIECES pieces; NOTE: 1..KVT_PUT_PIECES in all layers together, n of each;
     * 0 otherwise */
    uint32_t n;
    /* DATA: of the payload, at least 1; FINISH: in total; NOTE: of the checksums, 8 for each piece
     * or 0 if the transfer has none; OPEN: its bits; 0 otherwise. */
    uint64_t bytes;
    uint64_t sums[KVT_PUT_PIECES]; /* NOTE: of its pieces, layer by layer */
};

/* Pieces of a DATA or NOTE. */
static inline uint32_t kvt_message_pieces(const struct kvt_message *m)
{
    return m->n * (m->more_layers + 1);
}

void kvt_hello_encode(const struct kvt_hello_msg *m, struct buf *out);
enum status kvt_hello_decode(struct str in, struct kvt_hello_msg *out, struct err *err) MUST_CHECK;
void kvt_answer_encode(const struct kvt_answer_msg *m, struct buf *out);
enum status kvt_answer_decode(struct str in, struct kvt_answer_msg *out,
                              struct err *err) MUST_CHECK;
/* `blocks` in host byte order; m->blocks is not read. */
void kvt_grant_encode(const struct kvt_grant_msg *m, const int32_t *blocks, struct buf *out);
enum status kvt_grant_decode(struct str in, struct kvt_grant_msg *out, struct err *err) MUST_CHECK;
int32_t kvt_grant_block(const struct kvt_grant_msg *m, uint32_t i);
void kvt_preamble_encode(const struct kvt_preamble *m, uint8_t out[KVT_PREAMBLE_BYTES]);
enum status kvt_preamble_decode(const void *in, size_t n, struct kvt_preamble *out) MUST_CHECK;
/* Bytes written: KVT_MESSAGE_BYTES, and the checksums of a NOTE. */
size_t kvt_message_encode(const struct kvt_message *m, uint8_t out[KVT_MESSAGE_MAX]);
/* Decodes the fixed part of a message; out->sums stays as it is. ERR_FORMAT. */
enum status kvt_message_decode_head(const void *in, struct kvt_message *out) MUST_CHECK;
/* Bytes that follow the head in the same message: checksums of a NOTE. */
size_t kvt_message_tail(const struct kvt_message *m);
/* Decodes head and tail, exactly `n` bytes. */
enum status kvt_message_decode(const void *in, size_t n, struct kvt_message *out) MUST_CHECK;

#endif
