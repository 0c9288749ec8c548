/* meter_rig.h - entry nodes that report to one directory what their tenants use. Thread: the
 * test's. */
#ifndef BATON_TESTS_CONFORMANCE_METER_RIG_H
#define BATON_TESTS_CONFORMANCE_METER_RIG_H

#include "tests/conformance/entries_rig.h"

struct answer {
    int n_calls;
    bool inside; /* set during the asking call, in which no callback may come */
    enum status st;
    struct meter_sum sums[METER_TENANTS_MAX];
    uint32_t n, n_entries;
    uint64_t least;
};

/* ---- calls ---- */

static inline void on_sums(void *arg, enum status st, const struct meter_sums *s)
{
    struct answer *a = arg;
    CHECK(!a->inside);
    CHECK((st == OK) == (s != NULL));
    a->n_calls++;
    a->st = st;
    if (st != OK) return;
    CHECK(s->n_sums <= METER_TENANTS_MAX);
    a->n = s->n_sums;
    a->n_entries = s->n_entries;
    a->least = s->least;
    if (s->n_sums) memcpy(a->sums, s->sums, s->n_sums * sizeof *s->sums);
}

static inline enum status report_to(struct rig *r, struct directory *d,
                                    const struct meter_report *report, struct answer *a)
{
    memset(a, 0, sizeof *a);
    a->inside = true;
    enum status st = directory_meter(d, report, on_sums, a);
    a->inside = false;
    if (st != OK) return st;
    WAIT_FOR(r, a->n_calls == 1);
    for (uint32_t i = 0; a->st == OK && i < report->n_uses; i++)
        CHECK(a->n == report->n_uses && a->sums[i].tenant == report->uses[i].tenant);
    return a->st;
}

/* The entry's report of this number. */
static inline enum status send_as(struct rig *r, int entry, uint64_t number,
                                  const struct meter_use *u, uint32_t n, struct answer *a)
{
    const struct meter_report report = {
        .entry = 0xffffffffffffff00u + (uint64_t)entry, .number = number, .uses = u, .n_uses = n
    };
    return report_to(r, r->d[entry], &report, a);
}

/* One tenant's next report of an entry. */
static inline struct meter_sum tell(struct rig *r, int entry, struct meter_use u, struct answer *a)
{
    CHECK_OK(send_as(r, entry, ++r->numbers[entry], &u, 1, a));
    return a->sums[0];
}

static inline struct meter_use use(uint64_t tenant, uint32_t requests, uint64_t tokens,
                                   uint64_t cost, uint32_t n_running)
{
    return (struct meter_use){ tenant, requests, tokens, cost, n_running, 0 };
}

#endif
