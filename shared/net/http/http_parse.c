/* http_parse.c - see http_parse.h: llhttp's callbacks, and http_parse_feed. */
#include "shared/net/http/http_parse.h"

#include <string.h>
#include <strings.h>

#include "shared/base/mem.h"

int http_parse_fail(struct http_parse *p, int status, const char *code, const char *message)
{
    if (p->state != HTTP_PARSE_FAILED) p->fault = (struct http_fault){ status, code, message };
    p->state = HTTP_PARSE_FAILED;
    return HPE_USER;
}

static int parse_on_url(llhttp_t *h, const char *at, size_t n)
{
    struct http_parse *p = h->data;
    if (n > p->limits->url_bytes - p->n_url)
        return http_parse_fail(p, 414, "url_too_long",
                               "The URL is longer than this server accepts.");
    buf_add(&p->text, at, n);
    p->n_url += n;
    return 0;
}

/* Trailers are counted, checked and dropped, since nobody uses them. */
static int parse_new_field(struct http_parse *p)
{
    if (p->n_fields + p->n_trailers >= p->limits->n_headers)
        return http_parse_fail(p, 431, "too_many_headers",
                               "The request has more headers than this server accepts.");
    if (p->n_fields == p->fields_cap) {
        p->fields_cap = p->fields_cap ? p->fields_cap * 2 : 16;
        p->fields = mem_realloc(p->fields, p->fields_cap, sizeof *p->fields);
    }
    p->fields[p->n_fields++] = (struct http_field){ .name = p->text.len };
    p->in_value = false;
    return 0;
}

static int parse_on_field(llhttp_t *h, const char *at, size_t n)
{
    struct http_parse *p = h->data;
    if (p->in_value || p->n_fields == 0) {
        int rc = parse_new_field(p);
        if (rc != 0) return rc;
    }
    struct http_field *f = &p->fields[p->n_fields - 1];
    buf_add(&p->text, at, n);
    f->n_name += n;
    return 0;
}

static int parse_on_value(llhttp_t *h, const char *at, size_t n)
{
    struct http_parse *p = h->data;
    if (p->n_fields == 0) return http_parse_fail(p, 400, "bad_header", "A header has no name.");
    struct http_field *f = &p->fields[p->n_fields - 1];
    if (!p->in_value) f->value = p->text.len;
    p->in_value = true;
    buf_add(&p->text, at, n);
    f->n_value += n;
    return 0;
}

static int parse_on_value_complete(llhttp_t *h)
{
    struct http_parse *p = h->data;
    if (p->n_fields == 0) return 0;
    struct http_field *f = &p->fields[p->n_fields - 1];
    if (!p->in_value) f->value = p->text.len; /* an empty value has no span */
    p->in_value = true;
    if (p->scan.kind != HTTP_LINE_TRAILER) return 0;
    static const char *const forbidden[] = { "authorization",
                                             "connection",
                                             "content-encoding",
                                             "content-length",
                                             "content-type",
                                             "cookie",
                                             "expect",
                                             "host",
                                             "te",
                                             "trailer",
                                             "transfer-encoding",
                                             "upgrade" };
    struct str name = { p->text.data + f->name, f->n_name };
    for (size_t i = 0; i < COUNT_OF(forbidden); i++)
        if (name.n == strlen(forbidden[i]) && strncasecmp(name.p, forbidden[i], name.n) == 0)
            return http_parse_fail(p, 400, "bad_trailer",
                                   "A trailer carries a field that is not allowed after the body.");
    p->n_fields--;
    p->n_trailers++;
    return 0;
}

static int parse_on_headers_complete(llhttp_t *h)
{
    struct http_parse *p = h->data;
    /* A server may ignore an Upgrade header. */
    h->upgrade = 0;
    p->keep_alive = llhttp_should_keep_alive(h) != 0;
    int rc = http_parse_check_head(p);
    if (rc != 0) return rc;
    p->state = HTTP_PARSE_BODY;
    if (h->flags & F_CHUNKED) p->scan.kind = HTTP_LINE_CHUNK_SIZE;
    else p->scan.n_raw = h->content_length;
    return 0;
}

static int parse_on_chunk(llhttp_t *h)
{
    struct http_parse *p = h->data;
    if (h->content_length > p->body_max - p->body.len)
        return http_parse_fail(p, 413, "body_too_large",
                               "The request body is larger than this server accepts.");
    p->scan.n_raw = h->content_length;
    p->scan.kind = h->content_length == 0 ? HTTP_LINE_TRAILER : HTTP_LINE_CHUNK_END;
    return 0;
}

static int parse_on_body(llhttp_t *h, const char *at, size_t n)
{
    struct http_parse *p = h->data;
    if (n > p->body_max - p->body.len)
        return http_parse_fail(p, 413, "body_too_large",
                               "The request body is larger than this server accepts.");
    buf_add(&p->body, at, n);
    return 0;
}

static int parse_on_complete(llhttp_t *h)
{
    struct http_parse *p = h->data;
    p->state = HTTP_PARSE_DONE;
    return HPE_PAUSED;
}

static const llhttp_settings_t PARSE_SETTINGS = {
    .on_url = parse_on_url,
    .on_header_field = parse_on_field,
    .on_header_value = parse_on_value,
    .on_header_value_complete = parse_on_value_complete,
    .on_headers_complete = parse_on_headers_complete,
    .on_chunk_header = parse_on_chunk,
    .on_body = parse_on_body,
    .on_message_complete = parse_on_complete,
};

void http_parse_init(struct http_parse *p, const struct http_limits *limits)
{
    memset(p, 0, sizeof *p);
    p->limits = limits;
    http_parse_next(p);
}

void http_parse_release(struct http_parse *p)
{
    buf_release(&p->text);
    buf_release(&p->path);
    buf_release(&p->body);
    mem_free(p->fields);
    p->fields = NULL;
}

void http_parse_next(struct http_parse *p)
{
    enum { KEEP_BYTES = 4096 }; /* an idle connection does not keep the memory of its last body */
    if (p->body.cap > KEEP_BYTES) buf_release(&p->body);
    buf_clear(&p->text);
    buf_clear(&p->path);
    buf_clear(&p->body);
    p->state = HTTP_PARSE_IDLE;
    p->fault = (struct http_fault){ 0 };
    p->scan = (struct http_scan){ 0 };
    p->n_url = p->n_fields = p->n_trailers = 0;
    p->in_value = p->keep_alive = p->is_http10 = p->wants_continue = false;
    llhttp_init(&p->llhttp, HTTP_REQUEST, &PARSE_SETTINGS);
    p->llhttp.data = p;
}

static void parse_map_error(struct http_parse *p, llhttp_errno_t e)
{
    switch (e) {
    case HPE_INVALID_METHOD:
        http_parse_fail(p, 501, "method_unknown",
                        "The request method is not one that this server knows.");
        break;
    case HPE_INVALID_URL: http_parse_fail(p, 400, "bad_url", "The URL is malformed."); break;
    case HPE_INVALID_CONTENT_LENGTH:
    case HPE_UNEXPECTED_CONTENT_LENGTH:
        http_parse_fail(
            p, 400, "bad_content_length",
            "Content-Length is malformed, repeated, or given together with Transfer-Encoding.");
        break;
    case HPE_INVALID_TRANSFER_ENCODING:
        http_parse_fail(p, 400, "bad_transfer_encoding",
                        "Transfer-Encoding is malformed or given together with Content-Length.");
        break;
    case HPE_INVALID_VERSION:
    case HPE_PAUSED_H2_UPGRADE:
        http_parse_fail(p, 505, "http_version", "Only HTTP/1.1 and HTTP/1.0 are spoken here.");
        break;
    default: http_parse_fail(p, 400, "bad_request", "The request is not well-formed HTTP/1.1.");
    }
}

size_t http_parse_feed(struct http_parse *p, const char *data, size_t n)
{
    size_t used = 0;
    while (used < n && p->state < HTTP_PARSE_DONE) {
        size_t piece = n - used;
        if (p->scan.n_raw > 0) {
            if (piece > p->scan.n_raw) piece = (size_t)p->scan.n_raw;
            p->scan.n_raw -= piece;
        } else {
            used += http_scan_extension(p, data + used, piece);
            piece = p->state == HTTP_PARSE_FAILED ? 0 : http_scan_line(p, data + used, n - used);
            if (p->state == HTTP_PARSE_FAILED) break;
            if (piece == 0) continue;
        }
        bool begun = p->scan.n_line > 0 || p->scan.kind != HTTP_LINE_REQUEST;
        if (p->state == HTTP_PARSE_IDLE && begun) p->state = HTTP_PARSE_HEAD;
        llhttp_errno_t e = llhttp_execute(&p->llhttp, data + used, piece);
        used += piece;
        if (e != HPE_OK && p->state != HTTP_PARSE_DONE) parse_map_error(p, e);
    }
    return used;
}

struct str http_parse_header(const struct http_parse *p, const char *name)
{
    size_t n = strlen(name);
    for (size_t i = 0; i < p->n_fields; i++) {
        const struct http_field *f = &p->fields[i];
        if (f->n_name == n && strncasecmp(p->text.data + f->name, name, n) == 0)
            return str_trim((struct str){ p->text.data + f->value, f->n_value });
    }
    return (struct str){ NULL, 0 };
}
