/* bench_kv_table.c - prints the results of `baton bench kv`: a table for people, or JSON. See
 * bench_kv.h. Thread: main. */
#include <inttypes.h>
#include <stdio.h>

#include "deploy/bench/bench_kv.h"
#include "shared/base/json/json.h"

enum { GIGA = 1000000000 };

void bench_kv_head(const struct bench_kv *b, struct buf *out)
{
    buf_printf(out,
               "KV transfers between two processes, %s blocks, checksum %s, best of %u rounds, "
               "each round after one of the limit\n",
               b->contiguous ? "contiguous" : "scattered", b->checksum ? "on" : "off", b->rounds);
    buf_printf(out,
               "latency: one piece, opened at the sender to acknowledged by the receiver, %u "
               "transfers; CPU: both processes\n\n",
               b->samples);
    buf_printf(out, "%-9s %6s %8s %8s  %-22s %6s %9s %9s %9s %9s %9s\n", "transport", "piece",
               "GB/s", "Gbit/s", "limit GB/s", "ratio", "p50 us", "p90 us", "p99 us", "p99.9 us",
               "CPU s/GB");
}

static void add_limit(const struct bench_cell *cell, struct buf *out)
{
    char text[64];
    if (cell->best_limit > 0) {
        snprintf(text, sizeof text, "%.2f %s", cell->best_limit / GIGA, cell->limit_name);
        buf_printf(out, "  %-22s %5.1f%%", text, 100 * cell->best_rate / cell->best_limit);
    } else {
        buf_printf(out, "  %-22s %6s", "not measured", "-");
    }
}

void bench_kv_row(const struct bench_cell *cell, struct buf *out)
{
    struct buf piece = { 0 };
    bench_size_format(cell->piece_bytes, &piece);
    buf_printf(out, "%-9s %6s", cell->transport, piece.data);
    buf_release(&piece);
    if (cell->error[0]) {
        buf_printf(out, " not measured: %s\n", cell->error);
        return;
    }
    buf_printf(out, " %8.2f %8.1f", cell->best_rate / GIGA, cell->best_rate * 8 / GIGA);
    add_limit(cell, out);
    if (cell->n_samples)
        buf_printf(out, " %9.1f %9.1f %9.1f %9.1f", cell->p50_us, cell->p90_us, cell->p99_us,
                   cell->p999_us);
    else buf_printf(out, " %9s %9s %9s %9s", "-", "-", "-", "-");
    buf_printf(out, " %9.2f\n", cell->cpu_s_per_gb);
    if (cell->limit_error[0]) buf_printf(out, "%-16s limit: %s\n", "", cell->limit_error);
    if (cell->limit_p50_us > 0)
        buf_printf(out, "%-16s limit: one way, p50 %.1f us, p99 %.1f us\n", "", cell->limit_p50_us,
                   cell->limit_p99_us);
}

/* ---- JSON ---- */

static void add_number(struct buf *out, const char *name, double v)
{
    buf_printf(out, ",\"%s\":", name);
    json_add_f64(out, v);
}

static void add_text(struct buf *out, const char *name, const char *text)
{
    buf_printf(out, ",\"%s\":", name);
    if (text && *text) json_add_string(out, str_of(text));
    else buf_add_c(out, "null");
}

static void add_rounds(struct buf *out, const char *name, const double *v, uint32_t n)
{
    buf_printf(out, ",\"%s\":[", name);
    for (uint32_t i = 0; i < n; i++) {
        if (i) buf_add_char(out, ',');
        json_add_f64(out, v[i]);
    }
    buf_add_char(out, ']');
}

static void add_cell(const struct bench_cell *c, struct buf *out)
{
    buf_printf(out, "{\"piece_bytes\":%" PRIu32 ",\"blocks\":%" PRIu32 ",\"layers\":%" PRIu32,
               c->piece_bytes, c->n_blocks, c->n_layers);
    add_text(out, "to", c->to);
    add_text(out, "transport", c->transport);
    add_text(out, "error", c->error);
    if (!c->error[0]) {
        add_number(out, "bytes_per_round", (double)c->round_bytes);
        add_number(out, "bytes_per_second", c->best_rate);
        add_number(out, "gbit_per_second", c->best_rate * 8 / GIGA);
        add_rounds(out, "rounds", c->rate, c->n_rounds);
        add_text(out, "limit_name", c->limit_name);
        add_text(out, "limit_error", c->limit_error);
        add_number(out, "limit_bytes_per_second", c->best_limit);
        add_rounds(out, "limit_rounds", c->limit, c->best_limit > 0 ? c->n_rounds : 0);
        buf_add_c(out, ",\"ratio\":");
        if (c->best_limit > 0) json_add_f64(out, c->best_rate / c->best_limit);
        else buf_add_c(out, "null");
        buf_printf(out, ",\"latency_us\":{\"n\":%" PRIu32, c->n_samples);
        add_number(out, "p50", c->p50_us);
        add_number(out, "p90", c->p90_us);
        add_number(out, "p99", c->p99_us);
        add_number(out, "p99.9", c->p999_us);
        add_number(out, "limit_p50", c->limit_p50_us);
        add_number(out, "limit_p99", c->limit_p99_us);
        buf_add_char(out, '}');
        add_number(out, "cpu_seconds_per_gb", c->cpu_s_per_gb);
        add_number(out, "link_bytes_per_second", (double)c->link_speed);
    }
    buf_add_char(out, '}');
}

void bench_kv_json(const struct bench_kv *b, const struct bench_cell *cells, size_t n,
                   struct buf *out)
{
    buf_printf(out,
               "{\"checksum\":%s,\"contiguous\":%s,\"n_rounds\":%u,\"copiers\":%u,\"connections\":%"
               "u,\"cells\":[",
               b->checksum ? "true" : "false", b->contiguous ? "true" : "false", b->rounds,
               b->copiers, b->connections);
    for (size_t i = 0; i < n; i++) {
        if (i) buf_add_char(out, ',');
        add_cell(&cells[i], out);
    }
    buf_add_c(out, "]}\n");
}
