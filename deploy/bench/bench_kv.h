/* bench_kv.h - `baton bench kv`: measures each transport at each piece size and its hardware limit
 * in alternating rounds, and prints the table.
 *
 * One cell is (transport, piece size).
 * Bulk: one transfer of n_blocks blocks in n_layers layers per round, each after a round of the
 * limit; a warm-up transfer of one eighth is not counted. The best round of each is compared.
 * Latency: `samples` transfers of one piece, one after the other.
 * Thread: main. */
#ifndef BATON_DEPLOY_BENCH_BENCH_KV_H
#define BATON_DEPLOY_BENCH_BENCH_KV_H

#include "deploy/bench/piece_sizes.h"
#include "deploy/probe/measurement.h"

enum { BENCH_ROUNDS_MAX = 100, BENCH_SAMPLES_MAX = 100000, BENCH_TRANSPORTS_MAX = 8 };

struct bench_kv {
    char transports[BENCH_TRANSPORTS_MAX][PROBE_NAME_MAX];
    size_t n_transports;
    struct bench_sizes sizes;
    uint32_t n_blocks; /* per layer; 0: enough for BENCH_BULK_BYTES */
    uint32_t rounds, samples, copiers, connections;
    bool checksum, contiguous;
};

struct bench_cell {
    char to[128]; /* the receiver: "" for a process of this host */
    char transport[PROBE_NAME_MAX];
    uint32_t piece_bytes, n_blocks, n_layers;
    uint64_t round_bytes;
    char error[PROBE_TEXT_MAX]; /* "": measured */
    char limit_error[PROBE_TEXT_MAX];
    const char *limit_name; /* static; NULL: no limit was tried */
    uint32_t n_rounds;
    double rate[BENCH_ROUNDS_MAX], limit[BENCH_ROUNDS_MAX]; /* bytes per second, by round */
    double best_rate, best_limit;
    double p50_us, p90_us, p99_us, p999_us;
    uint32_t n_samples;
    double limit_p50_us, limit_p99_us; /* of the trusted tool, one way; 0: none */
    double cpu_s_per_gb;
    uint64_t link_speed;
};

/* Measures one cell between two probe servers. A failure goes to cell->error. */
void bench_kv_cell(const struct bench_kv *b, struct probe_client *sender,
                   struct probe_client *receiver, const char *transport, uint32_t piece_bytes,
                   struct bench_cell *cell);
/* Sorts `values` and returns their q-quantile by nearest rank; n is at least 1. */
double bench_percentile(double *values, size_t n, double q);

/* Appends the lines above the rows of the table. */
void bench_kv_head(const struct bench_kv *b, struct buf *out);
/* Appends one row of the table. */
void bench_kv_row(const struct bench_cell *cell, struct buf *out);
void bench_kv_json(const struct bench_kv *b, const struct bench_cell *cells, size_t n,
                   struct buf *out);

#endif
