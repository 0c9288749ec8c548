/* engine_fault.c - see engine_fault.h. Thread: any (values). */
#include "shared/engine/engine_fault.h"

#include <stdint.h>

static enum status no_number(struct str item, struct str part, const char *right, struct err *err)
{
    return err_set(err, ERR_CONFIG, "BATON_ENGINE_FAULT: '%.*s' in '%.*s' is not %s", STR_ARG(part),
                   STR_ARG(item), right);
}

/* Reads what follows the step's colon. */
static enum status read_amount(struct str item, struct str amount, bool slow,
                               struct engine_fault_at *out, struct err *err)
{
    if (slow) {
        if (!amount.p || str_to_f64(amount, &out->factor) != OK ||
            !(out->factor >= 1 && out->factor <= ENGINE_FAULT_FACTOR_MAX))
            return no_number(item, amount, "a factor from 1 to 1000", err);
        return OK;
    }
    out->hang_ms = ENGINE_FAULT_FOREVER;
    if (amount.p && (str_to_i64(amount, &out->hang_ms) != OK || out->hang_ms < 1 ||
                     out->hang_ms > ENGINE_FAULT_MS_MAX))
        return no_number(item, amount, "a number of milliseconds from 1 to 600000", err);
    return OK;
}

static enum status read_item(struct str item, struct engine_fault_plan *p, struct err *err)
{
    struct str rest = item, name, step;
    struct engine_fault_at at = { 0 };
    const bool parts = str_split(&rest, '@', &name) && str_split(&rest, ':', &step);
    const bool slow = parts && str_eq_c(name, "slow");
    if (!parts || (!slow && !str_eq_c(name, "hang")))
        return err_set(err, ERR_CONFIG,
                       "BATON_ENGINE_FAULT: '%.*s' is not hang@STEP, hang@STEP:MS or "
                       "slow@STEP:FACTOR",
                       STR_ARG(item));
    if (str_to_i64(step, &at.step) != OK || at.step < 1)
        return no_number(item, step, "a step, counted from 1", err);
    TRY(read_amount(item, rest, slow, &at, err));
    if (p->n == ENGINE_FAULTS_MAX)
        return err_set(err, ERR_CONFIG, "BATON_ENGINE_FAULT: more than %d faults",
                       ENGINE_FAULTS_MAX);
    p->at[p->n++] = at;
    return OK;
}

enum status engine_fault_parse(struct str text, struct engine_fault_plan *out, struct err *err)
{
    struct engine_fault_plan plan = { 0 };
    struct str rest = text, item;
    while (str_split(&rest, ',', &item)) TRY(read_item(str_trim(item), &plan, err));
    *out = plan;
    return OK;
}

double engine_fault_factor(const struct engine_fault_plan *p, uint64_t step)
{
    double factor = 1;
    int64_t begun = 0;
    for (uint32_t i = 0; i < p->n; i++) {
        const struct engine_fault_at *at = &p->at[i];
        if (at->factor == 0 || (uint64_t)at->step > step || at->step < begun) continue;
        begun = at->step;
        factor = at->factor;
    }
    return factor;
}

int64_t engine_fault_hang_ms(const struct engine_fault_plan *p, uint64_t step)
{
    for (uint32_t i = 0; i < p->n; i++)
        if (p->at[i].factor == 0 && (uint64_t)p->at[i].step == step) return p->at[i].hang_ms;
    return 0;
}
