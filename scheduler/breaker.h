/* breaker.h - which nodes, and which pairs of a prefill and a decode node, get no requests for a
 * while because they failed: a circuit breaker for each.
 *
 *     CLOSED ── broken, or BREAKER_FAILURES failures in a row ──▶ OPEN, for a pause
 *     OPEN ── its pause is over and a request is placed there ──▶ HALF_OPEN: that request probes it
 *     HALF_OPEN ── the probe works ──▶ CLOSED
 *               ── it fails ──▶ OPEN, for twice as long, at most BREAKER_PAUSE_MAX_MS
 *               ── it ends without an answer (cancelled, say) ──▶ OPEN, due at once
 *
 * TRANSITIONS in breaker.c has every state and event. What is not in the table is CLOSED and has
 * not failed. No clock and no loop: the time is given. Owner: the entry's view. Thread: loop. */
#ifndef BATON_SCHEDULER_BREAKER_H
#define BATON_SCHEDULER_BREAKER_H

#include <stddef.h>
#include <stdint.h>

#include "shared/base/buf.h"
#include "shared/base/status.h"

enum {
    /* Kept at once. When there is no room, one that is CLOSED is thrown out (its failures are
     * forgotten), else the OPEN one whose pause ends first (it costs one request to find out
     * again); one whose probe is running never, and if all are that, the newcomer is not kept. */
    BREAKER_MAX = 128,
    BREAKER_FAILURES = 3, /* of single requests or transfers, in a row: a damaged one is no rule */
    BREAKER_PAUSE_MS = 1000,
    BREAKER_PAUSE_MAX_MS = 64000,
    BREAKER_GONE_MS = 5000, /* of a node that the directory does not list any more */
    BREAKER_WHY_MAX = 256
};

enum breaker_state { BREAKER_CLOSED, BREAKER_OPEN, BREAKER_HALF_OPEN, BREAKER_N_STATES };
enum breaker_scope { BREAKER_OF_NODE, BREAKER_OF_PAIR, BREAKER_N_SCOPES };

enum breaker_event {
    BREAKER_FAILED,   /* one request or transfer went wrong */
    BREAKER_BROKEN,   /* it cannot be used: lost, refused, or without progress for its time limit */
    BREAKER_WORKED,   /* a token came that needed it */
    BREAKER_TAKEN,    /* a request was placed there */
    BREAKER_GIVEN_UP, /* that request ended, and says nothing of it */
    BREAKER_N_EVENTS
};

/* A node, with partner 0, or the pair of a prefill node and its partner, a decode node. */
struct breaker_of {
    uint64_t node, partner;
};

struct breaker_entry {
    struct breaker_of of;
    enum breaker_state state;
    uint32_t n_failures;       /* CLOSED: in a row */
    uint32_t n_pauses;         /* since it was CLOSED */
    uint64_t until_ms;         /* OPEN: end of the pause */
    uint64_t prober;           /* HALF_OPEN: the request */
    uint64_t gone_ms;          /* since when breaker_forget misses a node of it; 0: it does not */
    char why[BREAKER_WHY_MAX]; /* of the last failure */
};

struct breaker {
    struct breaker_entry entries[BREAKER_MAX];
    size_t n;
    /* Called after each change of state; may be NULL. `e` is valid during the call. */
    void (*on_change)(void *arg, const struct breaker_entry *e);
    void *arg;
};

/* `request`: whose event it is; 0: nobody's, a lost link. While a probe is running only its own
 * failure and end count, since those of requests that were placed before say nothing new. `why`:
 * a sentence, for failures. */
void breaker_note(struct breaker *b, struct breaker_of of, enum breaker_event ev, uint64_t request,
                  uint64_t now_ms, const char *why);
/* May a request be placed there? An OPEN one whose pause is over: yes, as its probe. */
bool breaker_allows(const struct breaker_entry *e, uint64_t now_ms);
/* The entry, or NULL: it has not failed lately. */
const struct breaker_entry *breaker_find(const struct breaker *b, struct breaker_of of);
/* Is what is not `there` gone for good, and not only for the moment in which a directory that lost
 * its records is empty? *since_ms: when it was missed first; 0: it is there. */
bool breaker_is_gone(uint64_t *since_ms, bool there, uint64_t now_ms);
/* Forgets those of which a node is gone. */
void breaker_forget(struct breaker *b, bool (*is_there)(void *arg, uint64_t node), void *arg,
                    uint64_t now_ms);

enum breaker_scope breaker_scope_of(struct breaker_of of);
/* BREAKER_FAILED or BREAKER_BROKEN, by what a node says in FAILED. */
enum breaker_event breaker_event_of(enum status st);
const char *breaker_state_name(enum breaker_state s); /* "half_open": a label of metrics */
const char *breaker_scope_name(enum breaker_scope s);
/* Appends the table of transitions, for docs/recovery.md. */
void breaker_markdown(struct buf *out);

#endif
