/* frame.h - the bytes between nodes: a fixed 32-byte little-endian header, then the body.
 *
 *   0  u32 magic "BTN1"      4  u16 version     6  u16 type
 *   8  u32 body length      12  u32 attempt    16  u64 request id
 *  24  u64 incarnation of the node that the sender means to reach (0 only in LINK_HELLO)
 *
 * Bodies are protobuf (proto/node.proto), except TOKENS: a sequence of token records. Token record:
 * u32 bytes of this record, u32 index, i32 id, i32 rank, f32 logprob, u32 n_top, u32 attempt, u32
 * ends, u64 request id, then n_top times { i32 id, f32 logprob }. Everything is checked before use;
 * a malformed frame ends the connection. Thread: any (pure functions). */
#ifndef BATON_CLUSTER_FRAME_H
#define BATON_CLUSTER_FRAME_H

#include "shared/base/buf.h"
#include "shared/base/err.h"
#include "shared/base/sampling.h"

enum {
    FRAME_HEADER_BYTES = 32,
    FRAME_VERSION = 2,
    FRAME_BODY_MAX = 16 << 20,
    TOKEN_RECORD_BYTES = 40
};
#define FRAME_MAGIC 0x314e5442u /* "BTN1" little endian */

enum frame_type {
    FRAME_LINK_HELLO = 1,
    FRAME_LINK_PROOF = 2,
    FRAME_LINK_READY = 3,
    FRAME_PING = 4,
    FRAME_ASK_CREDIT = 10,
    FRAME_CREDIT,
    FRAME_RESERVE,
    FRAME_GRANT,
    FRAME_PREFILL,
    FRAME_PREFILL_DONE,
    FRAME_PREFILL_REPORT,
    FRAME_PROMPT_LOGPROBS,
    FRAME_RUN,
    FRAME_TOKENS,
    FRAME_FINISHED,
    FRAME_FAILED,
    FRAME_CANCEL,
    FRAME_KVT_HELLO,
    FRAME_KVT_ANSWER,
    FRAME_PROBE,
    FRAME_PROBE_REPLY,
    FRAME_GROUP_HELLO,
    FRAME_GROUP_REFUSED,
    FRAME_GROUP_LEAD,
    FRAME_GROUP_PROPOSE,
    FRAME_GROUP_BLOB,
    FRAME_GROUP_LOST,
    FRAME_GROUP_BELL,
    FRAME_GROUP_LOAD,
    FRAME_KV_EXPECT,
    FRAME_KV_GRANTS,
    FRAME_KV_SEND,
    FRAME_KV_OPENED,
    FRAME_KV_FINISH,
    FRAME_KV_CANCEL,
    FRAME_KV_EVENT,
    FRAME_ATTACH,
    FRAME_ATTACHED,
    FRAME_DETACHED,
    FRAME_PREEMPTED,
    FRAME_FETCH,
    FRAME_FETCH_REFUSED,
    FRAME_KV_TIER,
    FRAME_KV_TIER_DONE,
    FRAME_TYPE_END
};

struct frame_header {
    uint16_t type;
    uint32_t length;
    uint32_t attempt;
    uint64_t request;
    uint64_t incarnation;
};

const char *frame_type_name(unsigned type);
void frame_header_encode(const struct frame_header *h, uint8_t out[FRAME_HEADER_BYTES]);
/* Checks magic, version (ERR_PEER_MISMATCH), type (ERR_FORMAT) and length (ERR_TOO_LONG). */
enum status frame_header_decode(const uint8_t in[FRAME_HEADER_BYTES], struct frame_header *h,
                                struct err *err) MUST_CHECK;

void token_record_add(struct buf *out, uint64_t request, uint32_t attempt, uint32_t index,
                      const struct token_logprobs *t);
/* Takes one record off the front of *rest. ERR_NOT_FOUND at the end, ERR_FORMAT when malformed. */
enum status token_record_next(struct str *rest, uint64_t *request, uint32_t *attempt,
                              uint32_t *index, struct token_logprobs *t) MUST_CHECK;

#endif
