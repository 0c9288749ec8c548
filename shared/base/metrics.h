/* metrics.h - counters, gauges and histograms, written as Prometheus text 0.0.4.
 *
 * A registry is created at start and passed down; its metrics live as long as it does. Registering
 * the same name and labels twice returns the same metric. Labels are the text between the braces,
 * e.g. "transport=\"ipc\"", or "". Updates are single relaxed atomics: each total is exact, but
 * totals read together may be slightly apart.
 * Thread: any; registering takes a lock. */
#ifndef BATON_BASE_METRICS_H
#define BATON_BASE_METRICS_H

#include "shared/base/buf.h"

struct metrics;
struct counter;
struct gauge;
struct histogram;

struct metrics *metrics_create(void);
void metrics_free(struct metrics *m);

/* `name` includes the unit and, for counters, _total. Strings are copied. */
struct counter *metrics_counter(struct metrics *m, const char *name, const char *labels,
                                const char *help);
struct gauge *metrics_gauge(struct metrics *m, const char *name, const char *labels,
                            const char *help);
/* `bounds`: n ascending upper bounds; copied. */
struct histogram *metrics_histogram(struct metrics *m, const char *name, const char *labels,
                                    const char *help, const double *bounds, size_t n);
/* Bucket bounds in seconds, from 100 us to 10 min. */
extern const double METRICS_SECONDS[];
extern const size_t METRICS_SECONDS_N;

void counter_add(struct counter *c, uint64_t n);
uint64_t counter_value(const struct counter *c);
void gauge_set(struct gauge *g, double v);
double gauge_value(const struct gauge *g);
void histogram_observe(struct histogram *h, double v);

/* Appends all metrics in order of registration, grouped by name with one HELP and TYPE each. */
void metrics_write(struct metrics *m, struct buf *out);

#endif
