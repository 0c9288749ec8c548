/* pressure.c - see pressure.h. */
#include "scheduler/pressure/pressure.h"

#include "shared/base/assert.h"

enum pressure_action pressure_choose(const struct pressure *p)
{
    if (!p->has_room || p->there_tokens_per_s == 0 || p->n_handed_back >= PRESSURE_HAND_BACKS_MAX)
        return PRESSURE_RECOMPUTE;
    const double there_us = PRESSURE_PLACE_US +
                            (double)p->there_tokens * 1e6 / (double)p->there_tokens_per_s;
    return there_us < (double)p->here_us ? PRESSURE_HAND_BACK : PRESSURE_RECOMPUTE;
}

const char *pressure_action_name(enum pressure_action a)
{
    static const char *const names[PRESSURE_N] = { "recompute", "hand_back" };
    ASSERT(a < PRESSURE_N);
    return names[a];
}
