/* decode_seq.h - the record of one sequence and its states (decode.h has the diagram). Thread:
 * loop. Owner: decode_worker. */
#ifndef BATON_DECODE_SEQ_H
#define BATON_DECODE_SEQ_H

#include "decode/decode_parts.h"
#include "shared/base/list.h"
#include "shared/base/sampling.h"
#include "shared/cluster/cluster.h"

enum decode_seq_state {
    DECODE_SEQ_RESERVING, /* engine_reserve was posted */
    DECODE_SEQ_GRANTING,  /* blocks held; followers are asked for their grants */
    DECODE_SEQ_GRANTED,   /* blocks promised to a prefill node */
    DECODE_SEQ_RUNNING,   /* the engine produces tokens, or has ended and they are still sent */
    DECODE_SEQ_PARKED,    /* the same without an entry node (decode_parking.h) */
    DECODE_SEQ_SENT,      /* all is sent; its entry node may be lost, and nobody knows it yet */
    DECODE_SEQ_CLOSING    /* ended: waits for the engine's answer and the transfer's fence */
};

struct decode_kept;

struct decode_seq {
    uint64_t id;      /* in engine and kvtransfer */
    uint64_t request; /* the entry node's id */
    uint32_t attempt;
    uint64_t entry; /* node to answer to */
    enum decode_seq_state state;
    bool has_first;       /* PREFILL_DONE */
    bool hears_preempted; /* its entry node knows PREEMPTED */
    bool in_engine;       /* FINISHED or CANCELED will come from the engine */
    bool of_old_role;     /* its node had another role when it came */
    struct decode_parts parts;
    struct token_logprobs first;
    float *hidden; /* [n_hidden] of PREFILL_DONE, owned; NULL: none */
    uint32_t n_hidden;
    uint32_t n_tokens;  /* tokens in the reservation */
    uint32_t n_senders; /* ranks of the prefill node */
    uint32_t n_cached;
    uint32_t n_sent;          /* tokens emitted */
    uint32_t n_sweeps;        /* GRANTED: for so many it has its KV, but no first token */
    struct decode_kept *kept; /* NULL: its entry node's end is its end */
    struct list link;         /* decode_worker.live */
};

#endif
