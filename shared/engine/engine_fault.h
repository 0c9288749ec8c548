/* engine_fault.h - faults of the engine thread that tests inject: a step that hangs, steps that are
 * slow. docs/pace.md describes the text; the variable BATON_ENGINE_FAULT gives it to a node.
 *
 *     hang@STEP        step STEP does not end before the engine is stopped
 *     hang@STEP:MS     it takes MS milliseconds longer
 *     slow@STEP:FACTOR from step STEP on each takes FACTOR times as long as it would
 *
 * Several are joined by commas. Steps count from 1, those that the engine computed. While a step
 * hangs nothing of the engine makes progress, and its other threads live: so looks a device or a
 * driver that does not come back. A slow step makes progress. Thread: any (values). */
#ifndef BATON_ENGINE_ENGINE_FAULT_H
#define BATON_ENGINE_ENGINE_FAULT_H

#include "shared/base/err.h"
#include "shared/base/str.h"

enum {
    ENGINE_FAULTS_MAX = 8,
    ENGINE_FAULT_MS_MAX = 600000,
    ENGINE_FAULT_FACTOR_MAX = 1000,
    ENGINE_FAULT_FOREVER = -1
};

/* A step that hangs, for hang_ms or ENGINE_FAULT_FOREVER; or, with a factor, the first slow one. */
struct engine_fault_at {
    int64_t step;
    int64_t hang_ms;
    double factor; /* 0: it hangs */
};

struct engine_fault_plan {
    struct engine_fault_at at[ENGINE_FAULTS_MAX];
    uint32_t n;
};

/* Parses a plan. ERR_CONFIG names the item at fault and what would be right. */
enum status engine_fault_parse(struct str text, struct engine_fault_plan *out,
                               struct err *err) MUST_CHECK;
/* How much longer step number `step` takes: the factor of the last item that has begun, or 1. */
double engine_fault_factor(const struct engine_fault_plan *p, uint64_t step);
/* Milliseconds for which the step hangs, 0 or ENGINE_FAULT_FOREVER. */
int64_t engine_fault_hang_ms(const struct engine_fault_plan *p, uint64_t step);

#endif
