/* tier_rate.c - see tier_rate.h. Thread: engine. */
#include "shared/kv/tier/tier_rate.h"

#include <math.h>

#include "shared/base/assert.h"

/* A measurement counts as much as all before it together after a few; without any, half of the
 * difference to the expectation is left after half a minute. */
static const double NEWEST_WEIGHT = 0.3, HALF_LIFE_S = 30;
/* Many may be given up together, so that counts once: beyond LATE_MOST times the expectation, which
 * takes a few minutes to forget, it makes nothing worse. */
static const double LATE_FACTOR = 10, LATE_MOST = 100;

void tier_rate_init(struct tier_rate *r, double first_s, double bytes_per_s, uint64_t block_bytes)
{
    *r = (struct tier_rate){ .expected_first_s = first_s,
                             .expected_block_s = (double)block_bytes / bytes_per_s };
    r->first_s = r->expected_first_s;
    r->block_s = r->expected_block_s;
}

void tier_rate_begin(struct tier_rate *r, uint32_t n) { r->n_waiting += n; }

/* Moves towards the expectation for the time in which nothing was measured. */
static void relax(struct tier_rate *r, uint64_t now_ns)
{
    if (r->t_ns == 0 || now_ns <= r->t_ns) return;
    const double keep = exp2(-(double)(now_ns - r->t_ns) * 1e-9 / HALF_LIFE_S);
    r->first_s = r->expected_first_s + (r->first_s - r->expected_first_s) * keep;
    r->block_s = r->expected_block_s + (r->block_s - r->expected_block_s) * keep;
    r->t_ns = now_ns;
}

void tier_rate_end(struct tier_rate *r, uint32_t n, double seconds, uint64_t now_ns)
{
    ASSERT(r->n_waiting >= n);
    r->n_waiting -= n;
    if (!(seconds > 0) || n == 0) return;
    relax(r, now_ns);
    r->t_ns = now_ns;
    /* What both explain together is split as they are. */
    const double predicted = r->first_s + r->block_s * n,
                 factor = 1 + NEWEST_WEIGHT * (seconds / predicted - 1);
    r->first_s *= factor;
    r->block_s *= factor;
}

static double later(double s, double expected_s)
{
    const double most = LATE_MOST * expected_s, late = LATE_FACTOR * s;
    return s > most ? s : late < most ? late : most;
}

void tier_rate_late(struct tier_rate *r, uint64_t now_ns)
{
    relax(r, now_ns);
    r->t_ns = now_ns;
    r->first_s = later(r->first_s, r->expected_first_s);
    r->block_s = later(r->block_s, r->expected_block_s);
}

double tier_rate_seconds(struct tier_rate *r, uint32_t n, uint64_t now_ns)
{
    relax(r, now_ns);
    return r->first_s + r->block_s * ((double)n + r->n_waiting);
}
