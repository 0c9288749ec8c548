/* engine_speed.c - see engine_speed.h. */
#include "shared/engine/engine_speed.h"

#include <math.h>

enum { SPEED_MAX = 1 << 30 }; /* what a node's record may say */

static void add(struct engine_speed_mean *m, double amount, double seconds)
{
    const double weight = exp(-seconds * 1e3 / ENGINE_SPEED_MS);
    m->amount = m->amount * weight + amount;
    m->seconds = m->seconds * weight + seconds;
    if (m->n < ENGINE_SPEED_STEPS_MIN) m->n++;
}

/* Steps of about the same rows show no line: their standard deviation, of the mean. */
static const double SPREAD_MIN = 0.1;

static void draw_line(struct engine_speed *s, double rows, double seconds)
{
    struct engine_speed_line *l = &s->line;
    const double stays = 1 - 1.0 / ENGINE_SPEED_LINE_STEPS;
    l->n = l->n * stays + 1;
    l->rows = l->rows * stays + rows;
    l->rows_2 = l->rows_2 * stays + rows * rows;
    l->seconds = l->seconds * stays + seconds;
    l->rows_seconds = l->rows_seconds * stays + rows * seconds;
    const double mean = l->rows / l->n, variance = l->rows_2 / l->n - mean * mean;
    if (l->n < ENGINE_SPEED_STEPS_MIN || variance < SPREAD_MIN * mean * SPREAD_MIN * mean) return;
    const double row = (l->rows_seconds / l->n - mean * l->seconds / l->n) / variance,
                 fixed = l->seconds / l->n - row * mean;
    double fill = SPEED_MAX; /* rows that take no time */
    if (row > 0) fill = fmax(fixed, 0) / row * ENGINE_SPEED_FILL_TIMES;
    s->fill_rows = (uint32_t)fmin(fmax(fill, ENGINE_SPEED_FILL_MIN), SPEED_MAX);
}

void engine_speed_count(struct engine_speed *s, const struct engine_speed_step *step)
{
    if (!(step->seconds > 0)) return;
    if (step->prompt_rows > 0 && step->is_full)
        add(&s->prefill, (double)step->prompt_rows, step->seconds);
    if (step->prompt_rows > 0)
        draw_line(s, (double)(step->prompt_rows + step->decode_rows), step->seconds);
    if (step->decode_rows > 0) add(&s->decode, step->tokens, step->seconds);
}

static uint32_t whole(const struct engine_speed_mean *m, double v)
{
    if (m->n < ENGINE_SPEED_STEPS_MIN) return 0;
    return v < 1 ? 1 : v > SPEED_MAX ? SPEED_MAX : (uint32_t)(v + 0.5);
}

uint32_t engine_speed_prefill_per_s(const struct engine_speed *s)
{
    return whole(&s->prefill, s->prefill.amount / s->prefill.seconds);
}

uint32_t engine_speed_step_us(const struct engine_speed *s)
{
    return whole(&s->decode, s->decode.seconds / s->decode.amount * 1e6);
}

uint32_t engine_speed_fill_rows(const struct engine_speed *s) { return s->fill_rows; }
