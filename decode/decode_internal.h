/* decode_internal.h - the decode worker itself and what its files do for each other; only its
 * tests include it too. Thread: loop. */
#ifndef BATON_DECODE_DECODE_INTERNAL_H
#define BATON_DECODE_DECODE_INTERNAL_H

#include "decode/decode.h"
#include "decode/decode_parking.h"
#include "decode/decode_seq.h"
#include "decode/kv_fetch.h"
#include "decode/token_batcher.h"
#include "shared/base/log/log_repeats.h"
#include "shared/base/map.h"
#include "shared/cluster/request_table.h"

struct decode_worker {
    struct decode_options o;
    struct decode_ranks ranks;
    bool broken;    /* a follower was lost: the node takes nothing any more */
    bool leaves;    /* decode_set_leaving: nor does one that shuts down, ... */
    uint64_t stays; /* ... but from this entry node */
    bool settles;
    uint32_t role; /* 0: RESERVE for any is taken */
    struct loop_timer *sweep;
    struct map by_id;                /* engine id -> sequence */
    struct request_table by_request; /* until the sequence is CLOSING */
    struct list live;
    uint32_t n_live;
    uint64_t next_id;
    struct token_batcher batcher;
    struct decode_parking parking;
    struct kv_fetches fetches;
    struct counter *received_bytes, *received, *failed, *canceled;
    struct log_repeats refusals; /* of reservations, for want of room */
};

static inline struct request_key decode_key_of(const struct decode_seq *seq)
{
    return (struct request_key){ seq->request, seq->entry, seq->attempt };
}

/* Cancels a sequence in the engine and in kvtransfer, and forgets it once both have answered. */
void decode_close(struct decode_worker *w, struct decode_seq *seq);
/* Frees the record once neither the engine nor kvtransfer refers to it. */
void decode_drop_if_over(struct decode_worker *w, struct decode_seq *seq);

#endif
