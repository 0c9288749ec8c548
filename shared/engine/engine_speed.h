/* engine_speed.h - how fast an engine computes: prompt tokens per second, the time of a step that
 * decodes, and how many rows fill a step. A step that gives sequences several tokens
 * (draft/draft.h) counts as as many.
 *
 * The first two are means over the last steps that held such rows, whatever else was in them,
 * weighted by e^(-busy time since / ENGINE_SPEED_MS): busy time is that of such steps, so an idle
 * engine does not become slow, and after ten seconds of steps with another speed the old one weighs
 * less than a hundredth. Prompt rows count when a step was full (filled, or with at least half of
 * the rows that it may have): one with few rows because there were no more says nothing of a
 * backlog. Rows fill a step when what it takes whatever it holds (reading the weights, say) is a
 * small part of it: more prompts in it then make each wait longer for its first token, and none
 * sooner. A value without pointers; { 0 } has measured nothing. Thread: its owner's. */
#ifndef BATON_ENGINE_ENGINE_SPEED_H
#define BATON_ENGINE_ENGINE_SPEED_H

#include <stdbool.h>
#include <stdint.h>

enum {
    ENGINE_SPEED_MS = 2000,
    ENGINE_SPEED_STEPS_MIN = 3,   /* fewer are no measurement: the first step is often a slow one */
    ENGINE_SPEED_LINE_STEPS = 64, /* over which the line goes, about */
    ENGINE_SPEED_FILL_TIMES = 31, /* what a step takes without rows is 1/32 of a filled one */
    ENGINE_SPEED_FILL_MIN = 64    /* rows: a tile of most kernels, whatever was measured */
};

struct engine_speed_mean {
    double amount, seconds; /* of tokens or steps; both weighted */
    uint32_t n;             /* steps, up to ENGINE_SPEED_STEPS_MIN */
};

/* The time of steps by their rows, as a line: sums over steps, which fade. */
struct engine_speed_line {
    double n, rows, rows_2, seconds, rows_seconds;
};

struct engine_speed {
    struct engine_speed_mean prefill, decode;
    struct engine_speed_line line; /* of steps with prompt rows */
    uint32_t fill_rows;            /* by the line when it last had one; 0: never */
};

/* A step that lasted `seconds`. */
struct engine_speed_step {
    uint64_t prompt_rows, decode_rows;
    bool is_full;  /* of prompt rows */
    double tokens; /* that a decoding sequence got, on average */
    double seconds;
};

void engine_speed_count(struct engine_speed *s, const struct engine_speed_step *step);
/* Prompt tokens per second, and microseconds of a step for each token of a sequence; 0: not
 * measured, else at least 1. */
uint32_t engine_speed_prefill_per_s(const struct engine_speed *s);
uint32_t engine_speed_step_us(const struct engine_speed *s);
/* Rows that fill a step; 0: not measured. */
uint32_t engine_speed_fill_rows(const struct engine_speed *s);

#endif
