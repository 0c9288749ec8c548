/* metrics.h - counters, gauges and histograms, written as Prometheus text 0.0.4.
 *
 * A registry is created at start and passed down. Registering twice with the same name and labels
 * returns the same metric. Updates are single relaxed atomics: totals may be read slightly apart,
 * each is exact. Metrics live as long as their registry. Labels are given as the text between the
 * braces, e.g. "transport=\"ipc\"", or "". Thread: registering on any thread (a lock inside),
 * updating on any. */
#ifndef BATON_BASE_METRICS_H
#define BATON_BASE_METRICS_H

#include "shared/base/buf.h"

struct metrics;
struct counter;
struct gauge;
struct histogram;

struct metrics *metrics_create(void);
void metrics_free(struct metrics *m);

/* `name` with unit and, for counters, _total. `labels` may be "". Strings are copied. */
struct counter *metrics_counter(struct metrics *m, const char *name, const char *labels,
                                const char *help);
struct gauge *metrics_gauge(struct metrics *m, const char *name, const char *labels,
                            const char *help);
/* `bounds`: n ascending upper bounds; copied. */
struct histogram *metrics_histogram(struct metrics *m, const char *name, const char *labels,
                                    const char *help, const double *bounds, size_t n);
/* Bucket bounds in seconds that fit stages from 100 us to 10 min. */
extern const double METRICS_SECONDS[];
extern const size_t METRICS_SECONDS_N;

void counter_add(struct counter *c, uint64_t n);
uint64_t counter_value(const struct counter *c);
void gauge_set(struct gauge *g, double v);
double gauge_value(const struct gauge *g);
void histogram_observe(struct histogram *h, double v);

/* All metrics, grouped by name with HELP and TYPE once, in order of registration. */
void metrics_write(struct metrics *m, struct buf *out);

#endif
