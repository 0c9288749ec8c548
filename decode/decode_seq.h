/* decode_seq.h - one generation's record and its states (decode.h has the diagram). Thread: loop.
 * Owner: decode_worker. */
#ifndef BATON_DECODE_SEQ_H
#define BATON_DECODE_SEQ_H

#include "shared/base/list.h"
#include "shared/base/sampling.h"
#include "shared/cluster/cluster.h"

enum decode_seq_state {
    DECODE_SEQ_RESERVING, /* engine_reserve was posted */
    DECODE_SEQ_GRANTED,   /* blocks held and promised to a prefill node */
    DECODE_SEQ_RUNNING,   /* the engine produces tokens */
    DECODE_SEQ_CLOSING    /* no longer wanted: the engine's answer and the transfer's fence are
                           * awaited */
};

struct decode_seq {
    uint64_t id;      /* in engine and kvtransfer */
    uint64_t request; /* as the entry node calls it */
    uint32_t attempt;
    uint64_t entry; /* node to answer to */
    enum decode_seq_state state;
    bool has_kv;      /* RECEIVED */
    bool has_first;   /* PREFILL_DONE */
    bool in_engine;   /* the engine knows the id and owes an end (FINISHED or
                       * CANCELED) */
    bool in_transfer; /* kvtransfer expects it and owes FENCED or RECEIVED */
    struct token_logprobs first;
    uint32_t n_tokens; /* tokens in the reservation */
    uint32_t n_cached;
    uint32_t n_sent; /* tokens emitted */
    uint64_t kv_bytes, kv_ns, kv_link_speed;
    const char *transport; /* static string or NULL */
    struct list link;      /* decode_worker.live */
};

#endif
