/* remote.h - what the rows with a holder elsewhere (http, redis) share: is it reached, which
 * reservations does this entry hold there, which releases does it still owe.
 *
 * A reservation is named at the holder by a random id of its own, made here per attempt: a release
 * that overtakes or is overtaken by the next reservation of the same request cannot touch it, and
 * one whose answer was lost can still be taken back. Releases are owed until the holder has
 * confirmed them, in batches, one on its way at a time: a holder that was away for a while does not
 * keep load for ever. What an entry that died holds there ends with its `owner` lease, which every
 * call renews. Bound: DIRECTORY_REMOTE_RESERVATIONS_MAX reservations held and owed. Thread:
 * loop. */
#ifndef BATON_SCHEDULER_DIRECTORY_REMOTE_H
#define BATON_SCHEDULER_DIRECTORY_REMOTE_H

#include "scheduler/directory/directory.h"
#include "shared/base/list.h"
#include "shared/base/map.h"

enum { DIRECTORY_REMOTE_RESERVATIONS_MAX = 1 << 16, DIRECTORY_REMOTE_TIMEOUT_MS = 1000 };

/* What an answer of the holder is to. */
enum directory_op {
    DIRECTORY_OP_PUBLISH,
    DIRECTORY_OP_LEAVE,
    DIRECTORY_OP_SNAPSHOT,
    DIRECTORY_OP_RESERVE,
    DIRECTORY_OP_RELEASE
};

enum directory_remote_state {
    DIRECTORY_REMOTE_UNKNOWN,
    DIRECTORY_REMOTE_UP,
    DIRECTORY_REMOTE_DOWN
};

struct directory_remote {
    struct directory_options o; /* strings are not used */
    enum directory_remote_state state;
    uint64_t owner;          /* this entry, as the holder knows it */
    uint64_t fence;          /* the highest seen */
    struct map reservations; /* by request */
    struct list pending_releases, inflight_releases;
    size_t n_all; /* held, owed and being sent */
    struct gauge *m_up, *m_pending_releases;
    struct counter *m_failures;
};

void directory_remote_init(struct directory_remote *r, const struct directory_options *o,
                           const char *backend);
void directory_remote_release(struct directory_remote *r);
/* The holder answered, or did not: on_up and on_down once per change. They may close the
 * directory. */
void directory_remote_up(struct directory_remote *r);
void directory_remote_down(struct directory_remote *r, const char *why);

/* A new reservation of `request`: its id at the holder. ERR_FULL at the bound. */
enum status directory_remote_reserve(struct directory_remote *r, uint64_t request,
                                     uint64_t *id) MUST_CHECK;
/* The holder's answer to it. Anything but OK, ERR_BUSY, ERR_NOT_FOUND leaves open whether it was
 * counted: it is owed a release. */
void directory_remote_on_reserved(struct directory_remote *r, uint64_t request, uint64_t id,
                                  enum status st, uint64_t fence);
/* `request` is over. */
void directory_remote_drop(struct directory_remote *r, uint64_t request);
/* The next batch of owed releases; 0 when there is none or one is on its way. Answered by
 * directory_remote_on_released. */
size_t directory_remote_take_releases(struct directory_remote *r, uint64_t *ids, size_t cap);
void directory_remote_on_released(struct directory_remote *r, bool confirmed);

#endif
