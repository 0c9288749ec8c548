/* remote.h - what the rows with a holder elsewhere (http, redis) share: is it reached, which
 * reservations does this entry hold there, which releases does it still owe.
 *
 * A reservation is named at the holder by a random id of its own, made here per attempt: a release
 * that overtakes or is overtaken by the next reservation of the same request cannot touch it, and
 * one whose answer was lost can still be taken back. Releases are owed until the holder has
 * confirmed them, in batches, one on its way at a time: a holder that was away for a while does not
 * keep load for ever. What an entry that died holds there ends with its `owner` lease, which every
 * call renews. Bound: REMOTE_HELD_MAX reservations held and owed. Thread: loop. */
#ifndef BATON_SCHEDULER_DIRECTORY_REMOTE_H
#define BATON_SCHEDULER_DIRECTORY_REMOTE_H

#include "scheduler/directory/directory.h"
#include "shared/base/list.h"
#include "shared/base/map.h"

enum { REMOTE_HELD_MAX = 1 << 16, REMOTE_TIMEOUT_MS = 1000 };

enum remote_state { REMOTE_UNKNOWN, REMOTE_UP, REMOTE_DOWN };

struct remote {
    struct directory_options o; /* strings are not used */
    enum remote_state state;
    uint64_t owner;  /* this entry, as the holder knows it */
    uint64_t fence;  /* the highest seen */
    struct map held; /* by request */
    struct list owed, sending;
    size_t n_all; /* held, owed and being sent */
    struct gauge *m_up, *m_owed;
    struct counter *m_failures;
};

void remote_init(struct remote *r, const struct directory_options *o, const char *backend);
void remote_release(struct remote *r);
/* The holder answered, or did not: on_up and on_down once per change. They may close the
 * directory. */
void remote_up(struct remote *r);
void remote_down(struct remote *r, const char *why);

/* A new reservation of `request`: its id at the holder. ERR_FULL at the bound. */
enum status remote_reserve(struct remote *r, uint64_t request, uint64_t *id) MUST_CHECK;
/* The holder's answer to it. Anything but OK, ERR_BUSY, ERR_NOT_FOUND leaves open whether it was
 * counted: it is owed a release. */
void remote_reserved(struct remote *r, uint64_t request, uint64_t id, enum status st,
                     uint64_t fence);
/* `request` is over. */
void remote_drop(struct remote *r, uint64_t request);
/* The next batch of owed releases; 0 when there is none or one is on its way. Answered by
 * remote_sent. */
size_t remote_take_owed(struct remote *r, uint64_t *ids, size_t cap);
void remote_sent(struct remote *r, bool confirmed);

#endif
