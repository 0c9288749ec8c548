/* gpu_ops.h - a row of kernels.h whose slots are counted and timed: it stands before a context's own row and calls it.
 *
 * A step is run many times with the same work, and its slots are called in the same order each time, so a call has a number. The first run counts
 * (struct card_call: bytes and operations from the slot's arguments; what only the card knows, which experts are used, is fetched). Then windows
 * of calls are timed, a window per run: before its first call the card is kept busy, so that the host has queued the whole window when the card
 * comes to it, and there is an event after every call. So a time is the card's alone, from the end of one call to the end of the next: about a
 * microsecond of it is the event's. The rest of each run goes untimed. Steps of long calls are one window: there the host is ahead anyway.
 * Life cycle: put, remove. Thread: main. */
#ifndef BATON_TESTS_GPU_BENCH_GPU_OPS_H
#define BATON_TESTS_GPU_BENCH_GPU_OPS_H

#include "tests/gpu/bench/gpu.h"

enum { CARD_WHAT_BYTES = 112, CARD_WINDOW = 64 /* of short calls */, CARD_WINDOW_MAX = 2048, CARD_AHEAD_MAX = 64 };

/* One call of a slot in a step. */
struct card_call {
    const char *slot;
    char        what[CARD_WHAT_BYTES]; /* shapes */
    double      must;                  /* bytes that no implementation goes without: weights, and keys and values */
    double      bytes;                 /* these, and inputs and outputs, each once */
    double      flops;
    double      us;                    /* median of the rounds; 0: not timed */
};

struct card_slots;

struct card_slots *card_slots_put(struct kernel_ctx *c, const struct card_sizes *sizes);
/* The context has its own row again. */
void               card_slots_remove(struct card_slots *s);

/* `run` runs one step. Counts it and times all of its calls, `window` of them per run. */
void               card_slots_measure(struct card_slots *s, int rounds, size_t window, void (*run)(void *arg), void *arg);
/* What was measured last; good until the next. */
const struct card_call *card_slots_calls(const struct card_slots *s, size_t *n);
/* Runs it once more: seconds of the card from the first call's begin to the last call's end. After card_slots_measure of the same step. */
double card_slots_busy(struct card_slots *s, void (*run)(void *arg), void *arg);
/* Steps that are submitted one ahead of what is fetched: the card's time is marked where each begins - its first slot, or its recording's launch - and
 * ends. card_slots_follow says how many will follow; card_slots_followed, once all were fetched, the medians: seconds of a step, and seconds from
 * the end of one to the beginning of the next. */
void card_slots_follow(struct card_slots *s, int n_steps);
void card_slots_followed(struct card_slots *s, double *busy, double *gap);

/* A table of what was measured: calls of equal shape together, the longest first. */
void card_slots_say(const struct card_slots *s, const char *of, const struct card_limits *l);

#endif
