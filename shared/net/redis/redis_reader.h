/* redis_reader.h - hiredis' parser of replies, with bounds: a reply has at most 8 MiB, and an array
 * in it 1,048,576 elements, since a count of a few bytes would else make a large allocation.
 * Thread: the owner's. */
#ifndef BATON_NET_REDIS_REDIS_READER_H
#define BATON_NET_REDIS_REDIS_READER_H

#include <hiredis/hiredis.h>
#include <stdbool.h>

#include "shared/base/err.h"

enum { REDIS_REPLY_MAX = 8 << 20, REDIS_ELEMENTS_MAX = 1 << 20 };

struct redis_reader {
    redisReader *hiredis;
    redisReplyObjectFunctions fn;                        /* hiredis' own, but for arrays */
    void *(*array_fn)(const redisReadTask *task, int n); /* hiredis' own */
    size_t n_unparsed;                                   /* bytes since the last complete reply */
    bool too_many;                                       /* an array had too many elements */
};

/* The struct must not move while it is in use. */
enum status redis_reader_init(struct redis_reader *r, struct err *err) MUST_CHECK;
void redis_reader_release(struct redis_reader *r);
/* Takes n received bytes; then call redis_reader_next until it returns no reply. */
enum status redis_reader_feed(struct redis_reader *r, const char *bytes, size_t n,
                              struct err *err) MUST_CHECK;
/* Takes the next complete reply, NULL when there is none yet; the caller frees it with
 * freeReplyObject. ERR_TOO_LONG, ERR_FORMAT: the connection cannot be read any further. */
enum status redis_reader_next(struct redis_reader *r, redisReply **out, struct err *err) MUST_CHECK;

#endif
