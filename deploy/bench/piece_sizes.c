/* piece_sizes.c - see piece_sizes.h. */
#include "deploy/bench/piece_sizes.h"

#include <ctype.h>
#include <inttypes.h>
#include <math.h>

#include "deploy/probe/endpoint.h"

static bool unit_of(struct str s, double *factor)
{
    static const struct {
        const char *name;
        double factor;
    } units[] = {
        { "", 1 },       { "b", 1 },       { "k", 1024 },     { "kb", 1024 },
        { "kib", 1024 }, { "m", 1048576 }, { "mb", 1048576 }, { "mib", 1048576 },
    };
    char lower[4] = { 0 };
    if (s.n > 3) return false;
    for (size_t i = 0; i < s.n; i++) lower[i] = (char)tolower((unsigned char)s.p[i]);
    for (size_t i = 0; i < sizeof units / sizeof units[0]; i++)
        if (str_eq_c(str_of(lower), units[i].name)) {
            *factor = units[i].factor;
            return true;
        }
    return false;
}

enum status bench_size_parse(struct str s, uint32_t *out, struct err *err)
{
    size_t digits = 0;
    double number = 0, factor = 1;
    s = str_trim(s);
    while (digits < s.n && (isdigit((unsigned char)s.p[digits]) || s.p[digits] == '.')) digits++;
    bool ok = digits > 0 && str_to_f64(str_sub(s, 0, digits), &number) == OK &&
              unit_of(str_trim(str_sub(s, digits, s.n)), &factor);
    number *= factor;
    if (!ok || number != floor(number) || number < PROBE_PIECE_MIN || number > PROBE_PIECE_MAX)
        return err_set(err, ERR_CONFIG, "'%.*s' is not a size from 1k to 64m, such as 4k or 1m",
                       STR_ARG(str_sub(s, 0, 40)));
    *out = (uint32_t)number;
    return OK;
}

static enum status add_size(struct bench_sizes *sizes, uint32_t bytes, struct err *err)
{
    struct kv_layout layout;
    for (size_t i = 0; i < sizes->n; i++)
        if (sizes->v[i] == bytes) return OK;
    if (sizes->n == BENCH_SIZES_MAX)
        return err_set(err, ERR_CONFIG, "more than %d piece sizes", BENCH_SIZES_MAX);
    TRY(probe_layout(bytes, 1, 1, &layout, err));
    sizes->v[sizes->n++] = bytes;
    return OK;
}

static enum status add_range(struct bench_sizes *sizes, struct str first, struct str last,
                             struct err *err)
{
    uint32_t from, to;
    int64_t factor = 4;
    size_t star = str_find_char(last, '*');
    if (star != SIZE_MAX && (str_to_i64(str_trim(str_sub(last, star + 1, last.n)), &factor) != OK ||
                             factor < 2 || factor > 1024))
        return err_set(err, ERR_CONFIG, "'%.*s' is not a step of a range from 2 to 1024",
                       STR_ARG(str_sub(last, star, 40)));
    TRY(bench_size_parse(first, &from, err));
    TRY(bench_size_parse(star == SIZE_MAX ? last : str_sub(last, 0, star), &to, err));
    if (from > to)
        return err_set(err, ERR_CONFIG,
                       "the range %.*s..%.*s goes down; give the smaller size first",
                       STR_ARG(first), STR_ARG(last));
    for (uint64_t v = from; v < to; v *= (uint64_t)factor) TRY(add_size(sizes, (uint32_t)v, err));
    return add_size(sizes, to, err);
}

enum status bench_sizes_add(struct bench_sizes *sizes, struct str item, struct err *err)
{
    static const struct str dots[] = { { "..", 2 }, { "\xe2\x80\xa6", 3 } };
    uint32_t one;
    for (size_t i = 0; i < 2; i++) {
        size_t at = str_find(item, dots[i]);
        if (at != SIZE_MAX)
            return add_range(sizes, str_trim(str_sub(item, 0, at)),
                             str_trim(str_sub(item, at + dots[i].n, item.n)), err);
    }
    TRY(bench_size_parse(item, &one, err));
    return add_size(sizes, one, err);
}

void bench_size_format(uint64_t bytes, struct buf *out)
{
    if (bytes && bytes % 1048576 == 0) buf_printf(out, "%" PRIu64 "m", bytes / 1048576);
    else if (bytes && bytes % 1024 == 0) buf_printf(out, "%" PRIu64 "k", bytes / 1024);
    else buf_printf(out, "%" PRIu64, bytes);
}
