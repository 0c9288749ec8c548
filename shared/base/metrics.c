/* metrics.c - the registry of metrics and its Prometheus text.
 *
 * A family (one name: HELP and TYPE) holds series (one set of labels each). Registering takes the
 * lock; an update is an atomic on the series itself and takes none. Families and series are only
 * appended, so a returned pointer stays valid until metrics_free. All atomics are relaxed: no other
 * memory access is ordered by them.
 * Thread: any. */
#include "shared/base/metrics.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "shared/base/assert.h"
#include "shared/base/json/json.h"
#include "shared/base/list.h"
#include "shared/base/map.h"
#include "shared/base/mem.h"

enum metric_type { METRIC_COUNTER, METRIC_GAUGE, METRIC_HISTOGRAM };

struct counter {
    _Atomic uint64_t value;
};

struct gauge {
    _Atomic uint64_t bits; /* of a double */
};

struct histogram {
    const double *bounds;
    size_t n;
    _Atomic uint64_t *buckets; /* [n + 1], not cumulative; the last one is above all bounds */
    _Atomic uint64_t sum_bits; /* of a double */
};

struct metric_series {
    struct list in_family;
    char *labels;
    union {
        struct counter counter;
        struct gauge gauge;
        struct histogram histogram;
    };
};

struct metric_family {
    struct list in_registry;
    char *name, *help;
    enum metric_type type;
    double *bounds;
    size_t n_bounds;
    struct list series;
    struct map by_labels;
};

struct metrics {
    pthread_mutex_t lock;
    struct list families;
    struct map by_name;
};

const double METRICS_SECONDS[] = { 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01,
                                   0.025,  0.05,    0.1,    0.25,  0.5,    1,     2.5,
                                   5,      10,      30,     60,    120,    300,   600 };
const size_t METRICS_SECONDS_N = COUNT_OF(METRICS_SECONDS);

static uint64_t bits_of(double v)
{
    uint64_t bits;
    memcpy(&bits, &v, sizeof bits);
    return bits;
}

static double double_of(uint64_t bits)
{
    double v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

struct metrics *metrics_create(void)
{
    struct metrics *m = MEM_NEW(struct metrics);
    pthread_mutex_init(&m->lock, NULL);
    list_init(&m->families);
    return m;
}

static void family_free(struct metric_family *f)
{
    LIST_FOREACH (s, &f->series, struct metric_series, in_family) {
        if (f->type == METRIC_HISTOGRAM) mem_free((void *)s->histogram.buckets);
        mem_free(s->labels);
        mem_free(s);
    }
    map_release(&f->by_labels);
    mem_free(f->bounds);
    mem_free(f->name);
    mem_free(f->help);
    mem_free(f);
}

void metrics_free(struct metrics *m)
{
    if (!m) return;
    LIST_FOREACH (f, &m->families, struct metric_family, in_registry) family_free(f);
    map_release(&m->by_name);
    pthread_mutex_destroy(&m->lock);
    mem_free(m);
}

/* Lock held. Asserts: the same name with another type or other bounds is our own bug. */
static struct metric_family *family_get(struct metrics *m, enum metric_type type, const char *name,
                                        const char *help, const double *bounds, size_t n)
{
    struct metric_family *f = map_get(&m->by_name, str_of(name));
    if (f) {
        ASSERT(f->type == type);
        ASSERT(f->n_bounds == n && (n == 0 || memcmp(f->bounds, bounds, n * sizeof *bounds) == 0));
        return f;
    }
    for (size_t i = 1; i < n; i++) ASSERT(bounds[i - 1] < bounds[i]);
    f = MEM_NEW(struct metric_family);
    f->name = mem_strdup(name);
    f->help = mem_strdup(help);
    f->type = type;
    f->bounds = mem_dup(bounds, n * sizeof *bounds);
    f->n_bounds = n;
    list_init(&f->series);
    list_push(&m->families, &f->in_registry);
    map_put(&m->by_name, str_of(name), f);
    return f;
}

static struct metric_series *series_get(struct metrics *m, enum metric_type type, const char *name,
                                        const char *labels, const char *help, const double *bounds,
                                        size_t n)
{
    pthread_mutex_lock(&m->lock);
    struct metric_family *f = family_get(m, type, name, help, bounds, n);
    struct metric_series *s = map_get(&f->by_labels, str_of(labels));
    if (!s) {
        s = MEM_NEW(struct metric_series);
        s->labels = mem_strdup(labels);
        if (type == METRIC_HISTOGRAM) {
            s->histogram.bounds = f->bounds;
            s->histogram.n = n;
            s->histogram.buckets = mem_calloc(n + 1, sizeof *s->histogram.buckets);
        }
        list_push(&f->series, &s->in_family);
        map_put(&f->by_labels, str_of(labels), s);
    }
    pthread_mutex_unlock(&m->lock);
    return s;
}

struct counter *metrics_counter(struct metrics *m, const char *name, const char *labels,
                                const char *help)
{
    return &series_get(m, METRIC_COUNTER, name, labels, help, NULL, 0)->counter;
}

struct gauge *metrics_gauge(struct metrics *m, const char *name, const char *labels,
                            const char *help)
{
    return &series_get(m, METRIC_GAUGE, name, labels, help, NULL, 0)->gauge;
}

struct histogram *metrics_histogram(struct metrics *m, const char *name, const char *labels,
                                    const char *help, const double *bounds, size_t n)
{
    return &series_get(m, METRIC_HISTOGRAM, name, labels, help, bounds, n)->histogram;
}

void counter_add(struct counter *c, uint64_t n)
{
    atomic_fetch_add_explicit(&c->value, n, memory_order_relaxed);
}

uint64_t counter_value(const struct counter *c)
{
    return atomic_load_explicit(&c->value, memory_order_relaxed);
}

void gauge_set(struct gauge *g, double v)
{
    atomic_store_explicit(&g->bits, bits_of(v), memory_order_relaxed);
}

double gauge_value(const struct gauge *g)
{
    return double_of(atomic_load_explicit(&g->bits, memory_order_relaxed));
}

void histogram_observe(struct histogram *h, double v)
{
    if (isnan(v)) return; /* NaN fits no bucket and would spoil the sum for good */
    size_t i = 0;
    while (i < h->n && v > h->bounds[i]) i++;
    atomic_fetch_add_explicit(&h->buckets[i], 1, memory_order_relaxed);
    uint64_t old = atomic_load_explicit(&h->sum_bits, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(&h->sum_bits, &old, bits_of(double_of(old) + v),
                                                  memory_order_relaxed, memory_order_relaxed)) {}
}

static void write_number(struct buf *out, double v)
{
    if (isfinite(v)) json_add_f64(out, v);
    else buf_add_c(out, isnan(v) ? "NaN" : v > 0 ? "+Inf" : "-Inf");
}

/* Appends name{labels}, with an optional suffix to the name. */
static void write_name(const struct metric_family *f, const struct metric_series *s,
                       const char *suffix, struct buf *out)
{
    buf_printf(out, "%s%s", f->name, suffix);
    if (*s->labels) buf_printf(out, "{%s}", s->labels);
    buf_add_char(out, ' ');
}

static void write_bucket(const struct metric_family *f, const struct metric_series *s, double bound,
                         uint64_t count, struct buf *out)
{
    buf_printf(out, "%s_bucket{%s%sle=\"", f->name, s->labels, *s->labels ? "," : "");
    write_number(out, bound);
    buf_printf(out, "\"} %llu\n", (unsigned long long)count);
}

static void write_histogram(const struct metric_family *f, const struct metric_series *s,
                            struct buf *out)
{
    const struct histogram *h = &s->histogram;
    uint64_t count = 0;
    for (size_t i = 0; i <= h->n; i++) {
        count += atomic_load_explicit(&h->buckets[i], memory_order_relaxed);
        write_bucket(f, s, i < h->n ? h->bounds[i] : INFINITY, count, out);
    }
    write_name(f, s, "_sum", out);
    write_number(out, double_of(atomic_load_explicit(&h->sum_bits, memory_order_relaxed)));
    buf_add_char(out, '\n');
    /* Computed from the buckets: _count equals the +Inf bucket even while others observe. */
    write_name(f, s, "_count", out);
    buf_printf(out, "%llu\n", (unsigned long long)count);
}

static void write_head(const struct metric_family *f, struct buf *out)
{
    static const char *const types[] = { "counter", "gauge", "histogram" };
    buf_printf(out, "# HELP %s ", f->name);
    for (const char *c = f->help; *c; c++) {
        if (*c == '\\') buf_add_c(out, "\\\\");
        else if (*c == '\n') buf_add_c(out, "\\n");
        else buf_add_char(out, *c);
    }
    buf_printf(out, "\n# TYPE %s %s\n", f->name, types[f->type]);
}

static void write_series(const struct metric_family *f, const struct metric_series *s,
                         struct buf *out)
{
    if (f->type == METRIC_HISTOGRAM) {
        write_histogram(f, s, out);
        return;
    }
    write_name(f, s, "", out);
    if (f->type == METRIC_COUNTER)
        buf_printf(out, "%llu", (unsigned long long)counter_value(&s->counter));
    else write_number(out, gauge_value(&s->gauge));
    buf_add_char(out, '\n');
}

void metrics_write(struct metrics *m, struct buf *out)
{
    pthread_mutex_lock(&m->lock);
    LIST_FOREACH (f, &m->families, struct metric_family, in_registry) {
        write_head(f, out);
        LIST_FOREACH (s, &f->series, struct metric_series, in_family) write_series(f, s, out);
    }
    pthread_mutex_unlock(&m->lock);
}
