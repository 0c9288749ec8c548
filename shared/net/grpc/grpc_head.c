/* grpc_head.c - see grpc_head.h. Thread: the caller's. */
#include "shared/net/grpc/grpc_head.h"

#include <string.h>

enum { FIELD_EXTRA_BYTES = 32, TIMEOUT_DIGITS_MAX = 8 };

void grpc_fields_release(struct grpc_fields *f) { buf_release(&f->text); }

bool grpc_fields_add(struct grpc_fields *f, struct str name, struct str value, uint32_t n_max,
                     size_t max_bytes)
{
    const size_t bytes = name.n + value.n + FIELD_EXTRA_BYTES;
    if (f->n >= n_max || bytes > max_bytes - f->list_bytes) return false;
    buf_add_str(&f->text, name);
    buf_add_char(&f->text, 0);
    buf_add_str(&f->text, value);
    buf_add_char(&f->text, 0);
    f->n++;
    f->list_bytes += bytes;
    return true;
}

struct str grpc_fields_get(const struct grpc_fields *f, const char *name)
{
    const char *p = f->text.data;
    for (uint32_t i = 0; i < f->n; i++) {
        const char *value = p + strlen(p) + 1;
        if (strcmp(p, name) == 0) return str_of(value);
        p = value + strlen(value) + 1;
    }
    return (struct str){ NULL, 0 };
}

/* ---- what a head must be ---- */

/* Returns whether it is application/grpc, or that of protobuf messages. */
static bool is_grpc(struct str type)
{
    static const char base[] = "application/grpc";
    if (!str_starts(type, base)) return false;
    const struct str rest = str_sub(type, sizeof base - 1, SIZE_MAX);
    return rest.n == 0 || rest.p[0] == ';' || str_eq_c(rest, "+proto") ||
           str_starts(rest, "+proto;");
}

/* 1 to 8 digits and a unit; less than a millisecond counts as one. */
static bool read_timeout(struct str text, uint64_t *ms)
{
    static const struct {
        char unit;
        uint64_t ns;
    } UNITS[] = { { 'H', 3600000000000 }, { 'M', 60000000000 }, { 'S', 1000000000 },
                  { 'm', 1000000 },       { 'u', 1000 },        { 'n', 1 } };
    uint64_t n = 0, ns = 0;
    if (text.n < 2 || text.n > TIMEOUT_DIGITS_MAX + 1) return false;
    for (size_t i = 0; i + 1 < text.n; i++) {
        if (text.p[i] < '0' || text.p[i] > '9') return false;
        n = n * 10 + (uint64_t)(text.p[i] - '0');
    }
    for (size_t i = 0; i < sizeof UNITS / sizeof *UNITS; i++)
        if (UNITS[i].unit == text.p[text.n - 1]) ns = UNITS[i].ns;
    if (ns == 0) return false;
    const uint64_t ms_of_unit = ns / 1000000;
    *ms = ms_of_unit ? n * ms_of_unit : n * ns / 1000000;
    if (*ms == 0) *ms = 1;
    return true;
}

bool grpc_head_check(const struct grpc_fields *f, uint64_t *timeout_ms, struct grpc_refusal *why)
{
    static const struct grpc_refusal
        other_method = { 405, GRPC_INTERNAL, "gRPC calls are sent with POST" },
        other_type = { 415, GRPC_INTERNAL,
                       "the content type must be application/grpc or application/grpc+proto" },
        encoded = { 200, GRPC_UNIMPLEMENTED,
                    "messages must not be compressed: send grpc-encoding: identity, or none" },
        bad_timeout = { 200, GRPC_INVALID_ARGUMENT,
                        "grpc-timeout must be 1 to 8 digits and one of H, M, S, m, u, n" };
    const struct str encoding = grpc_fields_get(f, "grpc-encoding"),
                     timeout = grpc_fields_get(f, "grpc-timeout");
    *timeout_ms = GRPC_NO_TIMEOUT;
    if (!str_eq_c(grpc_fields_get(f, ":method"), "POST")) *why = other_method;
    else if (!is_grpc(grpc_fields_get(f, "content-type"))) *why = other_type;
    else if (encoding.n && !str_eq_c(encoding, "identity")) *why = encoded;
    else if (timeout.p && !read_timeout(timeout, timeout_ms)) *why = bad_timeout;
    else return true;
    return false;
}

void grpc_escape(struct buf *out, struct str text, size_t max_bytes)
{
    for (size_t i = 0; i < text.n && i < max_bytes; i++) {
        const char c = text.p[i];
        const bool is_edge = i == 0 || i + 1 == text.n || i + 1 == max_bytes;
        if (c > (is_edge ? ' ' : ' ' - 1) && c <= '~' && c != '%') buf_add_char(out, c);
        else buf_printf(out, "%%%02X", (unsigned)(unsigned char)c);
    }
}
