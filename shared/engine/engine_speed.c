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

void engine_speed_count(struct engine_speed *s, const struct engine_speed_step *step)
{
    if (!(step->seconds > 0)) return;
    if (step->prompt_rows > 0 && step->is_full)
        add(&s->prefill, (double)step->prompt_rows, step->seconds);
    if (step->decode_rows > 0) add(&s->decode, 1, step->seconds);
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
