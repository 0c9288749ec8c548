/* redis_reserve.h - the query of a placement, and what nodes say of themselves for it, as the
 * script of a placement reads them (scripts.h): in binary, of which a script reads several numbers
 * with one call. Thread: any. */
#ifndef BATON_SCHEDULER_DIRECTORY_REDIS_REDIS_RESERVE_H
#define BATON_SCHEDULER_DIRECTORY_REDIS_REDIS_RESERVE_H

#include "scheduler/directory/directory.h"

enum { REDIS_QUERY_LISTS = 5 /* rungs, terms, uses, avoid, drops */ };

struct redis_query {
    struct str lists[REDIS_QUERY_LISTS]; /* in `bytes` */
    char slots[PREFIX_RUNGS_MAX][2];
    uint32_t n_slots;
    struct buf bytes; /* buf_release */
};

/* q NULL: there is none. */
void redis_query_write(const struct prefix_query *q, struct redis_query *out);
/* Appends a node's bid, big endian: kind (8), ns, seqs, waiting (4 each), grouped (1), max_seqs
 * and n_blocks (4 each). */
void redis_bid_write(const struct node_record *r, struct buf *out);

#endif
