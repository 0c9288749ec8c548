/* decode_parking.h - keeps sequences for clients that come back after their entry node was lost.
 *
 * A sequence whose request has a resume key keeps all of its token records. When its entry node is
 * lost it is PARKED instead of closed and goes on computing; its end is kept, too. ATTACH with the
 * key gives it to another entry node, which gets the records from the first, a few in each turn of
 * the loop. A sequence that still has its entry node is taken from it, which is told (DETACHED).
 * One that has ended stays for DECODE_SENT_MS: if its entry node was lost before the answer got
 * there, that is known by then, and it is parked. Bounded: by the window of time, DECODE_PARKED_MAX
 * sequences, as many that were sent, and DECODE_RECORDS_MAX bytes of records of all. What exceeds
 * them is closed as any other sequence, and counted, unless it was sent.
 * Owner: decode_worker. Thread: loop. */
#ifndef BATON_DECODE_DECODE_PARKING_H
#define BATON_DECODE_DECODE_PARKING_H

#include "shared/base/hash/hash.h"
#include "shared/base/map.h"
#include "shared/base/metrics.h"
#include "shared/cluster/cluster.h"
#include "shared/cluster/generation_wire.h"
#include "shared/net/loop.h"

struct decode_worker;
struct decode_seq;

enum {
    DECODE_PARKED_MAX = 1024,
    DECODE_RECORDS_MAX = 256 << 20,
    DECODE_SENT_MS = 4000 /* a lost node is noticed within 3 s */
};

struct decode_parking {
    uint32_t window_ms, sent_ms, parked_max; /* window 0: nothing is kept */
    size_t records_max;
    struct map by_key;                            /* resume key -> the sequence that has it last */
    size_t n_bytes;                               /* of all records */
    uint32_t n_parked, n_sent, n_ended, n_behind; /* ended: the engine has no more of them */
    struct loop_timer *timer;                     /* NULL: nothing is parked, sent or behind */
    struct gauge *m_parked, *m_bytes;
    struct counter *m_attached, *m_expired, *m_refused;
};

/* What a sequence keeps. Its key is in by_key, unless a later sequence has it there. */
struct decode_kept {
    struct hash128 key;
    int32_t *given; /* [n_given] output tokens of before this sequence */
    uint32_t n_given;
    struct buf records;   /* of output tokens n_given .. */
    size_t n_sent;        /* bytes of them that the entry node has, while behind */
    bool behind;          /* attached: the entry node does not have all records yet */
    struct buf end;       /* FINISHED, once the engine has ended it */
    uint64_t t_parked_ms; /* or sent */
};

/* parked_max, records_max: DECODE_PARKED_MAX and DECODE_RECORDS_MAX, in tests less. */
void decode_parking_init(struct decode_worker *w, uint32_t parked_max, size_t records_max);
void decode_parking_release(struct decode_worker *w);

/* The sequence begins: keeps its tokens if its request asks for it. */
void decode_parking_begin(struct decode_worker *w, struct decode_seq *seq,
                          const struct generation_wire *g);
/* Adds a token. False: it must not be sent now, since nobody gets it or others come before it. */
bool decode_parking_add(struct decode_worker *w, struct decode_seq *seq, uint32_t index,
                        const struct token_logprobs *t);
/* The engine has ended the sequence. True: m must not be sent now, as in decode_parking_add. */
bool decode_parking_keep_end(struct decode_worker *w, struct decode_seq *seq,
                             const Baton__Finished *m);
/* Its end was sent. False: the sequence must be dropped. */
bool decode_parking_stay(struct decode_worker *w, struct decode_seq *seq);
/* The entry node was lost. False: the sequence must be closed. */
bool decode_parking_park(struct decode_worker *w, struct decode_seq *seq);
/* The sequence is closed, or its record is about to be freed. */
void decode_parking_end(struct decode_worker *w, struct decode_seq *seq);
/* Answers ATTACH. */
void decode_parking_on_attach(struct decode_worker *w, const struct cluster_message *m);

#endif
