/* promises.h - when the refused requests of one tenant are to come back: a line outside of the
 * node.
 *
 * Each refusal promises a time. Times follow each other as fast as the tenant's requests are
 * expected to be taken, so that those who come when they were told find a place: it is kept for
 * them from requests that come for the first time, in proportion to how many have come back of late
 * (n_kept). A promise that is not used lapses PROMISE_GRACE_MS after its time. When few are used,
 * times follow each other faster, so that nobody waits for those who do not come. Pure: the caller
 * gives the time. Owner: admit.h. Thread: its owner's. */
#ifndef BATON_SCHEDULER_ADMISSION_PROMISES_H
#define BATON_SCHEDULER_ADMISSION_PROMISES_H

#include <stdbool.h>
#include <stdint.h>

enum {
    PROMISE_MAX_S = 3600, /* no later time is promised: a refusal then says so long, and no more */
    PROMISE_GRACE_MS = 10000,
    PROMISE_EARLY_MS = 1000, /* who comes sooner than that has come too soon */
    PROMISE_SLOTS = 4096     /* of one second, above PROMISE_MAX_S and the grace */
};

struct promises {
    double until_ms;               /* the last time that was promised in turn; 0: none yet */
    double again_ms;               /* likewise by promises_make_again */
    uint16_t slots[PROMISE_SLOTS]; /* promises not used, by the second of their time */
    uint32_t n_open;               /* their sum, ... */
    double open_ms;                /* ... and that of the time that each was given */
    uint64_t swept_s;              /* slots before this second are 0 */
    double kept;                   /* share of the promises that were used, of late */
    uint32_t n_closed;             /* that `kept` is of */
};

void promises_init(struct promises *p);
/* Promises a time: earliest_ms, or interval_ms after the one before where that is later, or less
 * when few come back. Returns the time; 0: it would be too far off, nothing was promised. */
uint64_t promises_make(struct promises *p, uint64_t now_ms, uint64_t earliest_ms,
                       double interval_ms);
/* The same for one whose promise was not kept: it does not wait for its turn again, but for what is
 * left beside the promises made in turn. */
uint64_t promises_make_again(struct promises *p, uint64_t now_ms, uint64_t earliest_ms,
                             double interval_ms);
/* Who was promised due_ms comes. False: too soon or too late, or all promises of that second were
 * used. */
bool promises_use(struct promises *p, uint64_t now_ms, uint64_t due_ms);
/* The same for one who does not say which promise is its own: the oldest that is open. */
bool promises_use_any(struct promises *p, uint64_t now_ms);
/* How many of those promised for the time until now_ms + ahead_ms may still come, in the mean. */
double promises_n_kept(struct promises *p, uint64_t now_ms, uint64_t ahead_ms);

#endif
