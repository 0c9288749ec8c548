/* engine_speed.h - how fast an engine computes: prompt tokens per second, and the time of a step
 * that decodes.
 *
 * Both are means over the last steps that held such rows, whatever else was in them, weighted by
 * e^(-busy time since / ENGINE_SPEED_MS): busy time is that of such steps, so an engine that idles
 * does not become slow, and after ten seconds of steps with another speed the old one weighs less
 * than a hundredth. A step that held few prompt rows because there were no more says nothing of
 * what a backlog would take (its fixed part is spread over few tokens), so prompt rows count when a
 * step was full: it left some for later, or held at least half of the rows that a step may have. A
 * value without pointers; { 0 } has measured nothing. Thread: its owner's. */
#ifndef BATON_ENGINE_ENGINE_SPEED_H
#define BATON_ENGINE_ENGINE_SPEED_H

#include <stdbool.h>
#include <stdint.h>

enum {
    ENGINE_SPEED_MS = 2000,
    ENGINE_SPEED_STEPS_MIN = 3, /* fewer are no measurement: the first step is often a slow one */
};

struct engine_speed_mean {
    double amount, seconds; /* of tokens or steps; both weighted */
    uint32_t n;             /* steps, up to ENGINE_SPEED_STEPS_MIN */
};

struct engine_speed {
    struct engine_speed_mean prefill, decode;
};

/* A step that lasted `seconds`. */
struct engine_speed_step {
    uint64_t prompt_rows, decode_rows;
    bool is_full; /* of prompt rows */
    double seconds;
};

void engine_speed_count(struct engine_speed *s, const struct engine_speed_step *step);
/* Prompt tokens per second, and microseconds of a step; 0: not measured, else at least 1. */
uint32_t engine_speed_prefill_per_s(const struct engine_speed *s);
uint32_t engine_speed_step_us(const struct engine_speed *s);

#endif
