/* fuzz_http.c - arbitrary bytes for the HTTP request parser.
 *
 * The first byte chooses the size of the pieces. The other bytes are parsed once whole and once in
 * pieces; both must agree on every request and on whether the stream is refused. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "shared/base/hash/hash.h"
#include "shared/net/http/http_parse.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const struct http_limits LIMITS = {
    .header_bytes = 2048,
    .n_headers = 16,
    .url_bytes = 256,
    .body_bytes = 4096,
    .small_body_paths = "/small/",
    .small_body_bytes = 8,
};

struct reading {
    uint64_t digest; /* of all complete requests */
    int n_requests;
    bool refused;
};

static void reading_add(struct reading *r, struct str s)
{
    r->digest = hash_64(s.p, s.n, r->digest * 31 + s.n);
}

static void reading_request(struct reading *r, const struct http_parse *p)
{
    r->n_requests++;
    reading_add(r, buf_str(&p->path));
    reading_add(r, buf_str(&p->body));
    for (size_t i = 0; i < p->n_fields; i++) {
        reading_add(r, (struct str){ p->text.data + p->fields[i].name, p->fields[i].n_name });
        reading_add(r, (struct str){ p->text.data + p->fields[i].value, p->fields[i].n_value });
    }
    reading_add(r, http_parse_header(p, "Host"));
    if (str_starts(buf_str(&p->path), LIMITS.small_body_paths) &&
        p->body.len > LIMITS.small_body_bytes)
        abort();
    if (p->body.len > LIMITS.body_bytes || p->n_fields > LIMITS.n_headers ||
        p->n_url > LIMITS.url_bytes)
        abort();
    if (memchr(p->path.data, 0, p->path.len)) abort();
}

static struct reading read_all(const uint8_t *data, size_t size, size_t piece)
{
    struct reading r = { 0 };
    struct http_parse p;
    http_parse_init(&p, &LIMITS);
    for (size_t at = 0; at < size && !r.refused;) {
        size_t n = size - at < piece ? size - at : piece;
        size_t used = http_parse_feed(&p, (const char *)data + at, n);
        at += used;
        if (p.state == HTTP_PARSE_DONE) {
            reading_request(&r, &p);
            http_parse_next(&p);
        } else if (p.state == HTTP_PARSE_FAILED) {
            if (p.fault.status < 400 || !p.fault.code || !p.fault.message) abort();
            r.refused = true;
        } else if (used != n) {
            abort(); /* bytes may be left only after a complete request or an error */
        }
    }
    http_parse_release(&p);
    return r;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 1) return 0;
    struct reading whole = read_all(data + 1, size - 1, SIZE_MAX);
    struct reading parts = read_all(data + 1, size - 1, (size_t)data[0] % 23 + 1);
    if (whole.refused != parts.refused || whole.n_requests != parts.n_requests ||
        whole.digest != parts.digest)
        abort();
    return 0;
}
