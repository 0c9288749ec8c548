/* fault_plan.c - the text of a fault plan: parsing, writing, which action applies to which step.
 * Thread: any (values). */
#include <string.h>

#include "kvtransfer/fault/fault.h"
#include "shared/base/mem.h"

const char *const kvt_fault_kind_names[FAULT_KINDS] = {
    [FAULT_DROP] = "drop",       [FAULT_DELAY] = "delay",       [FAULT_DUPLICATE] = "duplicate",
    [FAULT_LATE] = "late",       [FAULT_TRUNCATE] = "truncate", [FAULT_FLIP] = "flip",
    [FAULT_REORDER] = "reorder", [FAULT_STALE] = "stale",       [FAULT_DISCONNECT] = "disconnect",
    [FAULT_SIGKILL] = "sigkill", [FAULT_SIGSTOP] = "sigstop",   [FAULT_PAUSE] = "pause",
};

const char *const kvt_fault_step_names[FAULT_STEPS] = {
    [FAULT_AT_CONNECT] = "connect", [FAULT_AT_UP] = "up",
    [FAULT_AT_OPEN] = "open",       [FAULT_AT_OPENED] = "opened",
    [FAULT_AT_PUT] = "put",         [FAULT_AT_PUT_DONE] = "put_done",
    [FAULT_AT_NOTE] = "note",       [FAULT_AT_FINISH] = "finish",
    [FAULT_AT_DONE] = "done",       [FAULT_AT_STOP] = "stop",
    [FAULT_AT_STOPPED] = "stopped", [FAULT_AT_BYE] = "bye",
    [FAULT_AT_FENCE] = "fence",     [FAULT_AT_DISCONNECT] = "disconnect",
};

enum { SEED_DEFAULT = 1, MS_DEFAULT = 20 };

static bool has_ms(enum kvt_fault_kind k)
{
    return k == FAULT_DELAY || k == FAULT_LATE || k == FAULT_PAUSE;
}

bool kvt_fault_applies(enum kvt_fault_step step, enum kvt_fault_kind kind)
{
    enum {
        SELF = 1u << FAULT_SIGKILL | 1u << FAULT_SIGSTOP | 1u << FAULT_PAUSE,
        END = 1u << FAULT_DISCONNECT,
        MESSAGE = 1u << FAULT_DROP | 1u << FAULT_DELAY | 1u << FAULT_DUPLICATE |
                  1u << FAULT_REORDER | END | SELF,
        STALE = 1u << FAULT_STALE,
        FLIP = 1u << FAULT_FLIP
    };
    static const unsigned fits[FAULT_STEPS] = {
        [FAULT_AT_CONNECT] = END | SELF,
        [FAULT_AT_UP] = END | SELF,
        [FAULT_AT_OPEN] = MESSAGE | STALE,
        [FAULT_AT_OPENED] = MESSAGE | STALE,
        [FAULT_AT_PUT] = MESSAGE | STALE | FLIP | 1u << FAULT_TRUNCATE | 1u << FAULT_LATE,
        [FAULT_AT_PUT_DONE] = 1u << FAULT_DROP | 1u << FAULT_DELAY | END | SELF,
        [FAULT_AT_NOTE] = MESSAGE | STALE | FLIP,
        [FAULT_AT_FINISH] = MESSAGE | STALE | FLIP,
        [FAULT_AT_DONE] = MESSAGE | STALE,
        [FAULT_AT_STOP] = MESSAGE | STALE,
        [FAULT_AT_STOPPED] = MESSAGE | STALE,
        [FAULT_AT_BYE] = MESSAGE,
        [FAULT_AT_FENCE] = 1u << FAULT_DELAY | SELF,
        [FAULT_AT_DISCONNECT] = SELF,
    };
    return fits[step] >> kind & 1;
}

/* Index of the name, or -1. */
static int find(const char *const *names, int n, struct str name)
{
    for (int i = 0; i < n; i++)
        if (str_eq_c(name, names[i])) return i;
    return -1;
}

static enum status unknown(const char *what, struct str name, const char *const *names, int n,
                           struct err *err)
{
    struct buf all = { 0 };
    for (int i = 0; i < n; i++) buf_printf(&all, "%s%s", i ? ", " : "", names[i]);
    enum status st = err_set(err, ERR_CONFIG, "BATON_KV_FAULT: '%.*s' is no %s; there are %s",
                             STR_ARG(name), what, all.data);
    buf_release(&all);
    return st;
}

/* Parses the optional ":MS" of an action; `rest` follows its last colon (p NULL: no colon). */
static enum status read_ms(enum kvt_fault_kind kind, struct str rest, uint32_t *out,
                           struct err *err)
{
    int64_t ms = MS_DEFAULT;
    if (rest.p && !has_ms(kind))
        return err_set(err, ERR_CONFIG,
                       "BATON_KV_FAULT: '%s' takes no milliseconds, and '%.*s' follows it",
                       kvt_fault_kind_names[kind], STR_ARG(rest));
    if (rest.p && (str_to_i64(rest, &ms) != OK || ms < 0 || ms > FAULT_MS_MAX))
        return err_set(err, ERR_CONFIG,
                       "BATON_KV_FAULT: '%.*s' is no number of milliseconds from 0 to %d",
                       STR_ARG(rest), FAULT_MS_MAX);
    *out = has_ms(kind) ? (uint32_t)ms : 0;
    return OK;
}

static enum status read_at(struct str value, struct kvt_fault_plan *out, struct err *err)
{
    struct str rest = value, step, nth, action;
    if (!str_split(&rest, ':', &step) || !str_split(&rest, ':', &nth) ||
        !str_split(&rest, ':', &action))
        return err_set(
            err, ERR_CONFIG,
            "BATON_KV_FAULT: 'at=%.*s' is not STEP:N:ACTION[:MS], such as put:5:disconnect",
            STR_ARG(value));
    int i_step = find(kvt_fault_step_names, FAULT_STEPS, step),
        kind = find(kvt_fault_kind_names, FAULT_KINDS, action);
    int64_t n;
    if (i_step < 0) return unknown("step", step, kvt_fault_step_names, FAULT_STEPS, err);
    if (kind < 0) return unknown("action", action, kvt_fault_kind_names, FAULT_KINDS, err);
    if (str_to_i64(nth, &n) != OK || n < 1 || n > INT32_MAX)
        return err_set(err, ERR_CONFIG, "BATON_KV_FAULT: '%.*s' in 'at=%.*s' is not a count from 1",
                       STR_ARG(nth), STR_ARG(value));
    if (!kvt_fault_applies((enum kvt_fault_step)i_step, (enum kvt_fault_kind)kind))
        return err_set(err, ERR_CONFIG, "BATON_KV_FAULT: '%s' cannot be injected at '%s'",
                       kvt_fault_kind_names[kind], kvt_fault_step_names[i_step]);
    if (out->n_at == FAULT_TRIGGERS_MAX)
        return err_set(err, ERR_CONFIG, "BATON_KV_FAULT: more than %d times 'at='",
                       FAULT_TRIGGERS_MAX);
    struct kvt_fault_trigger t = { (enum kvt_fault_step)i_step, (enum kvt_fault_kind)kind,
                                   (uint32_t)n, 0 };
    TRY(read_ms(t.kind, rest, &t.ms, err));
    out->at[out->n_at++] = t;
    return OK;
}

static enum status read_probability(enum kvt_fault_kind kind, struct str value,
                                    struct kvt_fault_plan *out, struct err *err)
{
    struct str rest = value, number;
    double p;
    if (!str_split(&rest, ':', &number) || str_to_f64(number, &p) != OK || !(p >= 0 && p <= 1))
        return err_set(err, ERR_CONFIG,
                       "BATON_KV_FAULT: '%.*s' of '%s' is not a probability from 0 to 1",
                       STR_ARG(value), kvt_fault_kind_names[kind]);
    TRY(read_ms(kind, rest, &out->ms[kind], err));
    out->ppm[kind] = (uint32_t)(p * FAULT_PPM + 0.5);
    return OK;
}

static enum status read_item(struct str item, struct kvt_fault_plan *out, struct err *err)
{
    struct str value = item, key;
    if (!str_split(&value, '=', &key) || !value.p)
        return err_set(err, ERR_CONFIG,
                       "BATON_KV_FAULT: '%.*s' is not seed=N, ACTION=PROBABILITY[:MS] or "
                       "at=STEP:N:ACTION[:MS]",
                       STR_ARG(item));
    if (str_eq_c(key, "at")) return read_at(value, out, err);
    if (str_eq_c(key, "seed")) {
        int64_t seed;
        if (str_to_i64(value, &seed) != OK || seed < 0)
            return err_set(err, ERR_CONFIG, "BATON_KV_FAULT: seed '%.*s' is not a number from 0",
                           STR_ARG(value));
        out->seed = (uint64_t)seed;
        return OK;
    }
    int kind = find(kvt_fault_kind_names, FAULT_KINDS, key);
    if (kind < 0) return unknown("action", key, kvt_fault_kind_names, FAULT_KINDS, err);
    return read_probability((enum kvt_fault_kind)kind, value, out, err);
}

enum status kvt_fault_parse(struct str text, struct kvt_fault_plan *out, struct err *err)
{
    struct kvt_fault_plan plan = { .seed = SEED_DEFAULT };
    struct str rest = text, item;
    for (int i = 0; i < FAULT_KINDS; i++)
        plan.ms[i] = has_ms((enum kvt_fault_kind)i) ? MS_DEFAULT : 0;
    while (str_split(&rest, ',', &item)) TRY(read_item(str_trim(item), &plan, err));
    *out = plan;
    return OK;
}

void kvt_fault_write(const struct kvt_fault_plan *plan, struct buf *out)
{
    buf_printf(out, "seed=%llu", (unsigned long long)plan->seed);
    for (int i = 0; i < FAULT_KINDS; i++) {
        bool ms = has_ms((enum kvt_fault_kind)i) && plan->ms[i] != MS_DEFAULT;
        if (plan->ppm[i] || ms)
            buf_printf(out, ",%s=%.6f", kvt_fault_kind_names[i], (double)plan->ppm[i] / FAULT_PPM);
        if (ms) buf_printf(out, ":%u", plan->ms[i]);
    }
    for (uint32_t i = 0; i < plan->n_at; i++) {
        const struct kvt_fault_trigger *t = &plan->at[i];
        buf_printf(out, ",at=%s:%u:%s", kvt_fault_step_names[t->step], t->nth,
                   kvt_fault_kind_names[t->kind]);
        if (has_ms(t->kind)) buf_printf(out, ":%u", t->ms);
    }
}
