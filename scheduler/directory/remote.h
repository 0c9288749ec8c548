/* remote.h - shared by the backends whose state is in another process (http, redis): whether the
 * server answers, which reservations this entry node has there, and which releases are pending.
 *
 * Each attempt gets a random id for its reservation, so that a release can never hit a later
 * reservation of the same request, and a reservation whose answer was lost can be taken back.
 * Releases stay pending until the server has confirmed them, one batch in flight at a time, so that
 * load does not stay counted after the server was away. That a prompt was computed goes with them;
 * when that gets lost its tokens count until the release. The reservations of an entry node that
 * died end with its `owner` lease, which its calls renew: those that it makes each second, and the
 * first placement. At most DIRECTORY_REMOTE_RESERVATIONS_MAX are held or pending. Thread: loop. */
#ifndef BATON_SCHEDULER_DIRECTORY_REMOTE_H
#define BATON_SCHEDULER_DIRECTORY_REMOTE_H

#include "scheduler/directory/wire.h"
#include "shared/base/list.h"
#include "shared/base/log/log_repeats.h"
#include "shared/base/map.h"

enum {
    DIRECTORY_REMOTE_RESERVATIONS_MAX = 1 << 16,
    DIRECTORY_REMOTE_TIMEOUT_MS = 1000,
    /* After which a server that does not know the reports of meter.h is asked again. */
    DIRECTORY_REMOTE_METER_AGAIN_MS = 10000
};

/* The operation that a call asks for. */
enum directory_op {
    DIRECTORY_OP_PUBLISH,
    DIRECTORY_OP_LEAVE,
    DIRECTORY_OP_SNAPSHOT,
    DIRECTORY_OP_RESERVE,
    DIRECTORY_OP_RELEASE,
    DIRECTORY_OP_METER
};

enum directory_remote_state {
    DIRECTORY_REMOTE_UNKNOWN,
    DIRECTORY_REMOTE_UP,
    DIRECTORY_REMOTE_DOWN
};

struct directory_remote {
    struct directory_options o; /* strings are not used */
    enum directory_remote_state state;
    char why[ERR_TEXT_MAX];  /* while DOWN */
    uint64_t owner;          /* random: this entry node's name at the server */
    uint64_t fence;          /* the highest seen */
    struct map reservations; /* by request */
    struct list pending_releases, inflight_releases, pending_computed;
    bool in_flight; /* a batch is */
    size_t n_all;   /* held, pending and in flight */
    struct gauge *m_up, *m_pending_releases;
    struct counter *m_failures;
    struct log_repeats refused_records;
    uint64_t meter_from_ms; /* no report is sent before */
};

void directory_remote_init(struct directory_remote *r, const struct directory_options *o,
                           const char *backend);
void directory_remote_release(struct directory_remote *r);
/* Gives this entry node a new name at the server: what it held under the old one ends there with
 * that one's lease. */
void directory_remote_choose_owner(struct directory_remote *r);
/* The server answered, or did not. Calls on_up or on_down once per change of the state or of the
 * reason; these may close the directory. */
void directory_remote_up(struct directory_remote *r);
void directory_remote_down(struct directory_remote *r, const char *why);
/* Why the server is down; NULL when it is not, or was never asked. */
const char *directory_remote_why_down(const struct directory_remote *r);

/* A record of a snapshot is left out: warns, and counts while it comes back each second. `node` is
 * how the server names it, "" when not known. */
void directory_remote_refuse_record(struct directory_remote *r, struct str node, const char *why);

/* Registers a new reservation of `request` and returns its id at the server. ERR_FULL at the
 * bound. */
enum status directory_remote_reserve(struct directory_remote *r, uint64_t request,
                                     uint64_t *id) MUST_CHECK;
/* The server's answer to a reservation. After anything but OK, ERR_BUSY or ERR_NOT_FOUND it is
 * unknown whether the load was counted, so a release becomes pending. */
void directory_remote_on_reserved(struct directory_remote *r, uint64_t request, uint64_t id,
                                  enum status st, uint64_t fence);
/* `request` is over: its release becomes pending. */
void directory_remote_drop(struct directory_remote *r, uint64_t request);
/* The prompt of `request` was computed. */
void directory_remote_computed(struct directory_remote *r, uint64_t request);
/* What is told in one call. */
struct directory_remote_batch {
    uint64_t released[DIRECTORY_RELEASE_MAX], computed[DIRECTORY_RELEASE_MAX];
    size_t n_released, n_computed;
};
/* Takes the next batch; false: there is none, or one is in flight. The caller reports the outcome
 * to directory_remote_on_released. */
bool directory_remote_take_batch(struct directory_remote *r, struct directory_remote_batch *out);
void directory_remote_on_released(struct directory_remote *r, bool confirmed);

/* May a report (meter.h) be sent now? ERR_UNAVAILABLE: the server is down. ERR_UNSUPPORTED: it did
 * not know the call when it was asked last. */
enum status directory_remote_may_meter(const struct directory_remote *r) MUST_CHECK;
/* The server's answer to a report. Returns what the caller is told: OK, ERR_FULL, ERR_UNSUPPORTED
 * or ERR_UNAVAILABLE. */
enum status directory_remote_on_metered(struct directory_remote *r, enum status st);
/* Returns the sums of a report's tenants, still 0 (mem_free); NULL when memory ran out. */
struct meter_sum *directory_remote_meter_room(const struct meter_report *r);

#endif
