/* fuzz_pace.c - arbitrary text as the curve of a paced engine: it is refused with a sentence, or
 * every step, however large, lasts between nothing and the longest time that there is; and as a
 * plan of engine faults. */
#include <stdint.h>
#include <string.h>

#include "shared/base/assert.h"
#include "shared/engine/engine_fault.h"
#include "shared/engine/pace.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void try_curve(struct str text)
{
    static const uint64_t SIZES[] = { 0, 1, 2, 7, 64, 8192, UINT32_MAX };
    struct pace_curve c, again;
    struct err err = { 0 };
    if (pace_parse(text, &c, &err) != OK) {
        ASSERT(err.text[0] != 0);
        return;
    }
    ASSERT(pace_parse(text, &again, NULL) == OK && memcmp(&c, &again, sizeof c) == 0);
    for (size_t i = 0; i < sizeof SIZES / sizeof *SIZES; i++)
        for (size_t k = 0; k < sizeof SIZES / sizeof *SIZES; k++) {
            const struct pace_load l = { .prompt_rows = SIZES[i],
                                         .prompt_context = SIZES[i] * SIZES[k],
                                         .decode_rows = SIZES[k],
                                         .decode_context = SIZES[i] * SIZES[k] };
            const double us = pace_step_us(&c, &l);
            ASSERT(us >= 0 && us <= PACE_US_MAX);
        }
}

static void try_faults(struct str text)
{
    struct engine_fault_plan p;
    struct err err = { 0 };
    if (engine_fault_parse(text, &p, &err) != OK) {
        ASSERT(err.text[0] != 0);
        return;
    }
    ASSERT(p.n >= 1 && p.n <= ENGINE_FAULTS_MAX);
    for (uint32_t i = 0; i < p.n; i++) {
        const uint64_t step = (uint64_t)p.at[i].step;
        const double factor = engine_fault_factor(&p, step);
        const int64_t ms = engine_fault_hang_ms(&p, step);
        ASSERT(factor >= 1 && factor <= ENGINE_FAULT_FACTOR_MAX);
        ASSERT(ms >= ENGINE_FAULT_FOREVER && ms <= ENGINE_FAULT_MS_MAX);
        ASSERT(p.at[i].factor != 0 || ms != 0);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const struct str text = { (const char *)data, size };
    try_curve(text);
    try_faults(text);
    return 0;
}
