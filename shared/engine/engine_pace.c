/* engine_pace.c - makes a step last: as long as a curve says (pace.h), or as a fault that a test
 * injects (engine_fault.h).
 *
 * It waits when the step has been computed and before anybody hears of its tokens, so that its
 * sequences, and commands that arrive meanwhile, wait as for a long step. A long step counts
 * progress with every slice of a kernel, a waiting one with every slice of its wait; one that hangs
 * counts none. A stop ends any wait within a slice, sooner than a real step would end. LIMIT: KV of
 * a prompt leaves when it is computed, thus early in the step, so that sending it always overlaps.
 * Thread: engine. */
#include <errno.h>
#include <time.h>

#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/engine/engine_state.h"

enum { NS_PER_MS = 1000000, NS_PER_S = 1000000000 };
static const uint64_t SLICE_NS = 20 * NS_PER_MS;

static bool is_stopped(const struct engine *e)
{
    return atomic_load_explicit(&e->stop, memory_order_acquire);
}

static void sleep_until(uint64_t ns)
{
    const struct timespec t = { (time_t)(ns / NS_PER_S), (long)(ns % NS_PER_S) };
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR) {}
}

/* Waits until `end_ns` or the engine's stop. */
static void wait_in_slices(struct engine *e, uint64_t end_ns, bool counts_progress)
{
    for (uint64_t now = clock_ns(); now < end_ns && !is_stopped(e); now = clock_ns()) {
        sleep_until(end_ns - now > SLICE_NS ? now + SLICE_NS : end_ns);
        if (counts_progress)
            atomic_fetch_add_explicit(&e->load.n_progress, 1, memory_order_relaxed);
    }
}

/* When a step that has taken until now ends by the curve and the slowness of the plan. */
static uint64_t end_of_step(struct engine *e, uint64_t begin_ns, const struct attn_seq *seqs,
                            uint32_t n_seqs, uint64_t now)
{
    uint64_t ns = now - begin_ns;
    if (e->opt.pace) {
        const struct pace_load l = pace_load_of(seqs, n_seqs);
        const uint64_t paced = (uint64_t)(pace_step_us(&e->pace, &l) * 1e3);
        if (paced < ns) counter_add(e->metrics.paced_late, 1);
        else ns = paced;
    }
    return begin_ns + (uint64_t)((double)ns * engine_fault_factor(&e->fault, e->n_paced));
}

static void hang(struct engine *e, int64_t ms)
{
    log_warn("engine hangs", "step=%llu ms=%lld why=\"BATON_ENGINE_FAULT\"",
             (unsigned long long)e->n_paced, (long long)ms);
    wait_in_slices(
        e, ms == ENGINE_FAULT_FOREVER ? UINT64_MAX : clock_ns() + (uint64_t)ms * NS_PER_MS, false);
}

void engine_pace_step(struct engine *e, uint64_t begin_ns, const struct attn_seq *seqs,
                      uint32_t n_seqs)
{
    if (!e->opt.pace && !e->opt.fault) return;
    e->n_paced++;
    const uint64_t now = clock_ns();
    wait_in_slices(e, end_of_step(e, begin_ns, seqs, n_seqs, now), true);
    const int64_t ms = engine_fault_hang_ms(&e->fault, e->n_paced);
    if (ms != 0) hang(e, ms);
}
