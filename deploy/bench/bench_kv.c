/* bench_kv.c - measures the cells of `baton bench kv`; see bench_kv.h. */
#include "deploy/bench/bench_kv.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "shared/base/mem.h"

/* Bytes per round without --blocks: more than the last-level caches of a core hold. */
enum { BULK_BYTES = 128 << 20, BULK_LAYERS = 8, BATCH = 128, WARM_UP = 20 };

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double bench_percentile(double *values, size_t n, double q)
{
    qsort(values, n, sizeof *values, by_value);
    size_t rank = (size_t)ceil(q * (double)n);
    return values[rank < 1 ? 0 : rank > n ? n - 1 : rank - 1];
}

static void choose_shape(const struct bench_kv *b, struct bench_cell *cell)
{
    uint32_t per_layer = BULK_BYTES / BULK_LAYERS / cell->piece_bytes;
    cell->n_layers = BULK_LAYERS;
    cell->n_blocks = b->n_blocks ? b->n_blocks : per_layer ? per_layer : 1;
    /* Large pieces or many blocks get fewer layers, so that the pool stays within its limit. */
    while (cell->n_layers > 1 &&
           (uint64_t)cell->piece_bytes * cell->n_blocks * cell->n_layers > PROBE_POOL_MAX)
        cell->n_layers /= 2;
    cell->round_bytes = (uint64_t)cell->piece_bytes * cell->n_blocks * cell->n_layers;
}

static struct measurement make_measurement(const struct bench_kv *b, const struct bench_cell *cell,
                                           struct probe_client *sender,
                                           struct probe_client *receiver)
{
    struct measurement p = {
        .sender = sender,
        .receiver = receiver,
        .piece_bytes = cell->piece_bytes,
        .n_layers = cell->n_layers,
        .n_blocks = cell->n_blocks,
        .copiers = b->copiers,
        .connections = b->connections,
        .checksum = b->checksum,
        .contiguous = b->contiguous,
    };
    snprintf(p.transport, sizeof p.transport, "%s", cell->transport);
    /* the address of this host towards the peer */
    if (cell->to[0]) p.sender_address = probe_peer(receiver)->local;
    return p;
}

static void measure_limit(struct measurement *p, struct bench_cell *cell, uint32_t i)
{
    struct err err = { 0 };
    double rate = 0;
    if (cell->limit_error[0]) return; /* do not ask again for a tool that is not installed */
    if (measurement_limit(p, cell->round_bytes, &rate, &cell->limit_name, &err) != OK) {
        snprintf(cell->limit_error, sizeof cell->limit_error, "%.*s", PROBE_TEXT_MAX - 1, err.text);
        return;
    }
    cell->limit[i] = rate;
    if (rate > cell->best_limit) cell->best_limit = rate;
}

/* Measures rounds, each the limit and then the transfer. Caches hold the data of whatever ran
 * before, so a warm-up of one eighth precedes each transfer and is not counted. memcpy and
 * ucx_perftest warm up the same way; the other tools run so long that their start does not
 * count. */
static enum status measure_bulk(const struct bench_kv *b, struct measurement *p,
                                struct bench_cell *cell, struct err *err)
{
    struct measurement_round *r = MEM_NEW(struct measurement_round);
    uint64_t cpu_ns = 0, n_bytes = 0;
    enum status st = OK;
    for (uint32_t i = 0; st == OK && i < b->rounds; i++) {
        measure_limit(p, cell, i);
        st = measurement_run(p, 1, (cell->n_blocks + 7) / 8, r, err);
        if (st == OK) st = measurement_run(p, 1, cell->n_blocks, r, err);
        if (st != OK) break;
        cell->rate[i] = r->total_ns ? (double)r->n_bytes * 1e9 / (double)r->total_ns : 0;
        if (cell->rate[i] > cell->best_rate) cell->best_rate = cell->rate[i];
        cpu_ns += r->cpu_ns;
        n_bytes += r->n_bytes;
        cell->n_rounds = i + 1;
    }
    /* ns per byte equals s per GB */
    if (n_bytes) cell->cpu_s_per_gb = (double)cpu_ns / (double)n_bytes;
    mem_free(r);
    return st;
}

static enum status measure_latency(const struct bench_kv *b, struct measurement *p,
                                   struct bench_cell *cell, struct err *err)
{
    struct measurement_round *r = MEM_NEW(struct measurement_round);
    double *us = MEM_ARRAY(double, b->samples);
    uint32_t have = 0;
    enum status st = measurement_run(p, WARM_UP, 1, r, err);
    while (st == OK && have < b->samples) {
        st = measurement_run(p, b->samples - have < BATCH ? b->samples - have : BATCH, 1, r, err);
        for (uint32_t i = 0; st == OK && i < r->n; i++) us[have++] = (double)r->ns[i] / 1e3;
    }
    if (st == OK) {
        cell->n_samples = have;
        cell->p50_us = bench_percentile(us, have, 0.5);
        cell->p90_us = bench_percentile(us, have, 0.9);
        cell->p99_us = bench_percentile(us, have, 0.99);
        cell->p999_us = bench_percentile(us, have, 0.999);
    }
    mem_free(us);
    mem_free(r);
    return st;
}

static void measure_limit_latency(struct measurement *p, struct bench_cell *cell)
{
    uint64_t ns[3] = { 0 };
    const char *what = NULL;
    /* no such tool, or not installed: the row shows none */
    if (measurement_limit_latency(p, ns, &what, NULL) != OK) return;
    cell->limit_p50_us = (double)ns[0] / 1e3;
    cell->limit_p99_us = (double)ns[1] / 1e3;
}

static enum status measure(const struct bench_kv *b, struct bench_cell *cell,
                           struct probe_client *sender, struct probe_client *receiver,
                           struct err *err)
{
    struct measurement p = make_measurement(b, cell, sender, receiver);
    TRY(measurement_begin(&p, err));
    cell->link_speed = p.link_speed;
    enum status st = measure_bulk(b, &p, cell, err);
    measurement_end(&p);
    if (st != OK || b->samples == 0) return st;
    p.n_layers = p.n_blocks = 1;
    TRY(measurement_begin(&p, err));
    st = measure_latency(b, &p, cell, err);
    measurement_end(&p);
    if (st == OK) measure_limit_latency(&p, cell);
    return st;
}

void bench_kv_cell(const struct bench_kv *b, struct probe_client *sender,
                   struct probe_client *receiver, const char *transport, uint32_t piece_bytes,
                   struct bench_cell *cell)
{
    struct err err = { 0 };
    char to[sizeof cell->to];
    memcpy(to, cell->to, sizeof to);
    *cell = (struct bench_cell){ .piece_bytes = piece_bytes };
    memcpy(cell->to, to, sizeof to);
    snprintf(cell->transport, sizeof cell->transport, "%s", transport);
    choose_shape(b, cell);
    if (measure(b, cell, sender, receiver, &err) != OK)
        snprintf(cell->error, sizeof cell->error, "%.*s", PROBE_TEXT_MAX - 1, err.text);
}
