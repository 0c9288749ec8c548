/* redis_reserve.h - the query of a placement as the script of a placement reads it (scripts.h): in
 * binary, of which a script reads several numbers with one call. Thread: any. */
#ifndef BATON_SCHEDULER_DIRECTORY_REDIS_REDIS_RESERVE_H
#define BATON_SCHEDULER_DIRECTORY_REDIS_REDIS_RESERVE_H

#include "scheduler/prefix/prefix_text.h"

enum { REDIS_QUERY_LISTS = 4 /* rungs, compute, decode, drops */ };

struct redis_query {
    struct str lists[REDIS_QUERY_LISTS]; /* in `bytes` */
    char slots[PREFIX_RUNGS_MAX][2];
    uint32_t n_slots;
    struct buf bytes; /* buf_release */
};

/* q NULL: there is none. */
void redis_query_write(const struct prefix_query *q, struct redis_query *out);

#endif
