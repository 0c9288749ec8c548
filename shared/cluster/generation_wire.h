/* generation_wire.h - converts a generation request (tokens and sampling parameters) to its
 * protobuf message, and back with every bound checked. Thread: any. */
#ifndef BATON_CLUSTER_GENERATION_WIRE_H
#define BATON_CLUSTER_GENERATION_WIRE_H

#include "shared/base/hash/hash.h"
#include "shared/base/mem.h"
#include "shared/cluster/frame.h"
#include "shared/cluster/proto/node.pb-c.h"

enum { GENERATION_TOKENS_MAX = 2 << 20, RESUME_KEY_BYTES = 16 };

struct generation_wire {
    const int32_t *tokens;
    uint32_t n_tokens, n_prompt;
    struct sampling_params sampling;
    uint64_t cache_salt;
    bool prompt_logprobs;
    bool has_resume_key; /* the decode node keeps the answer for a client that comes back */
    struct hash128 resume_key;
    bool hears_preempted; /* the sender knows PREEMPTED */
};

/* Builds the message in `arena`, which must live until the message is packed. */
Baton__Generation *generation_wire_encode(const struct generation_wire *g, struct arena *arena);
/* Everything that *out points to is in `arena`. ERR_FORMAT names the field. */
enum status generation_wire_decode(const Baton__Generation *m, struct arena *arena,
                                   struct generation_wire *out, struct err *err) MUST_CHECK;

/* Reads a resume key of a message. False: it does not have RESUME_KEY_BYTES. */
bool generation_wire_read_key(ProtobufCBinaryData bytes, struct hash128 *out);
/* Points at *key, which must live until the message is packed. */
ProtobufCBinaryData generation_wire_key_bytes(const struct hash128 *key);

#endif
