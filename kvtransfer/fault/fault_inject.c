/* fault_inject.c - decides which fault a put, a message or a step gets: triggers first, then random
 * numbers.
 * Thread: transfer. */
#include <errno.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include "kvtransfer/fault/fault_internal.h"
#include "shared/base/log.h"

/* splitmix64 */
uint64_t fault_random(struct fault_transport *r)
{
    uint64_t z = r->random += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

void fault_count(struct fault_transport *r, enum kvt_fault_kind kind)
{
    if (r->injected[kind]) counter_add(r->injected[kind], 1);
}

static void sleep_ms(uint32_t ms)
{
    struct timespec t = { ms / 1000, (long)(ms % 1000) * 1000000 };
    while (nanosleep(&t, &t) != 0 && errno == EINTR) {}
}

struct fault_action fault_inject(struct fault_transport *r, enum kvt_fault_step step, bool leaves)
{
    struct fault_action f = { FAULT_NOTHING, 0 };
    r->passed[step]++;
    for (uint32_t i = 0; i < r->plan.n_at && f.kind == FAULT_NOTHING; i++) {
        const struct kvt_fault_trigger *t = &r->plan.at[i];
        if (r->fired[i] || t->step != step || t->nth != r->passed[step]) continue;
        r->fired[i] = true;
        f = (struct fault_action){ t->kind, t->ms };
        log_warn("kv fault injected", "transport=%s step=%s n=%u action=%s ms=%u", r->ops.name,
                 kvt_fault_step_names[step], t->nth, kvt_fault_kind_names[t->kind], t->ms);
    }
    for (int k = 0; leaves && k < FAULT_KINDS && f.kind == FAULT_NOTHING; k++) {
        if (!r->plan.ppm[k] || !kvt_fault_applies(step, (enum kvt_fault_kind)k)) continue;
        if (fault_random(r) % FAULT_PPM < r->plan.ppm[k])
            f = (struct fault_action){ (enum kvt_fault_kind)k, r->plan.ms[k] };
    }
    if (f.kind == FAULT_STALE && step == FAULT_AT_PUT && !fault_scatters(r)) f.kind = FAULT_NOTHING;
    if (f.kind != FAULT_SIGKILL && f.kind != FAULT_SIGSTOP && f.kind != FAULT_PAUSE) return f;
    fault_count(r, f.kind);
    if (f.kind == FAULT_PAUSE) sleep_ms(f.ms);
    else (void)kill(getpid(), f.kind == FAULT_SIGKILL ? SIGKILL : SIGSTOP);
    return (struct fault_action){ FAULT_NOTHING, 0 };
}

enum kvt_fault_step fault_step_of(enum kvt_message_kind kind)
{
    switch (kind) {
    case KVT_MSG_OPEN: return FAULT_AT_OPEN;
    case KVT_MSG_OPENED: return FAULT_AT_OPENED;
    case KVT_MSG_NOTE: return FAULT_AT_NOTE;
    case KVT_MSG_FINISH: return FAULT_AT_FINISH;
    case KVT_MSG_DONE: return FAULT_AT_DONE;
    case KVT_MSG_STOP: return FAULT_AT_STOP;
    case KVT_MSG_STOPPED: return FAULT_AT_STOPPED;
    default: return FAULT_AT_BYE;
    }
}

void fault_damage_message(struct fault_transport *r, struct kvt_message *m,
                          enum kvt_fault_kind kind)
{
    uint64_t bit = UINT64_C(1) << fault_random(r) % 64;
    if (kind == FAULT_STALE) m->generation--;
    if (kind == FAULT_FLIP && m->kind == KVT_MSG_NOTE) m->sums[fault_random(r) % m->n] ^= bit;
    if (kind == FAULT_FLIP && m->kind == KVT_MSG_FINISH) m->bytes ^= bit;
}
