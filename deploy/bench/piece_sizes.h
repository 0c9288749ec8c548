/* piece_sizes.h - piece sizes as a person writes them. Thread: any (pure functions). */
#ifndef BATON_DEPLOY_BENCH_PIECE_SIZES_H
#define BATON_DEPLOY_BENCH_PIECE_SIZES_H

#include "shared/base/buf.h"
#include "shared/base/err.h"

enum { BENCH_SIZES_MAX = 64 };

struct bench_sizes {
    uint32_t v[BENCH_SIZES_MAX];
    size_t n;
};

/* Parses "4096", "4k", "1.5m", "4KiB": bytes, units of 1024. ERR_CONFIG. */
enum status bench_size_parse(struct str s, uint32_t *out, struct err *err) MUST_CHECK;
/* Adds one item of a list: a size, or a range "4k..4m" (".." may be the character U+2026). A range
 * goes up by factors of four and includes its end; "4k..4m*2" goes up by factors of two. Every size
 * is within PROBE_PIECE_MIN..PROBE_PIECE_MAX and has a KV layout. */
enum status bench_sizes_add(struct bench_sizes *sizes, struct str item, struct err *err) MUST_CHECK;
/* Appends the shortest exact form: "4k", "1m", "1536". */
void bench_size_format(uint64_t bytes, struct buf *out);

#endif
