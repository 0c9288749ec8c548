/* http_head.c - checks a finished request head and decodes its URL. Part of http_parse.h.
 *
 * Headers that decide where a request ends or which host it is for must be given exactly once.
 * Thread: the parser's owner. */
#include <string.h>
#include <strings.h>

#include "shared/base/mem.h"
#include "shared/net/http/http_parse.h"

static struct str head_value(const struct http_parse *p, size_t i)
{
    const struct http_field *f = &p->fields[i];
    return str_trim((struct str){ p->text.data + f->value, f->n_value });
}

static size_t head_count(const struct http_parse *p, const char *name, struct str *value)
{
    size_t n = 0, n_name = strlen(name);
    for (size_t i = 0; i < p->n_fields; i++) {
        const struct http_field *f = &p->fields[i];
        if (f->n_name != n_name || strncasecmp(p->text.data + f->name, name, n_name) != 0) continue;
        if (n++ == 0) *value = head_value(p, i);
    }
    return n;
}

static bool head_is(struct str s, const char *word)
{
    return s.n == strlen(word) && strncasecmp(s.p, word, s.n) == 0;
}

/* Accepts the characters of a reg-name, IPv4 or [IPv6] address with an optional port. */
static bool head_is_authority(struct str s)
{
    for (size_t i = 0; i < s.n; i++) {
        char c = s.p[i];
        bool alnum = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
        if (!alnum && !strchr("-._~%!$&'()*+,;=:[]", c)) return false;
    }
    return true;
}

static int head_check_host(struct http_parse *p, struct str *host)
{
    size_t n = head_count(p, "host", host);
    if (n > 1)
        return http_parse_fail(p, 400, "bad_host", "The Host header is given more than once.");
    if (n == 0 && !p->is_http10)
        return http_parse_fail(p, 400, "bad_host", "The Host header is missing.");
    if (n == 1 && !head_is_authority(*host))
        return http_parse_fail(p, 400, "bad_host", "The Host header is malformed.");
    return 0;
}

static int head_check_coding(struct http_parse *p, struct str coding, size_t n_codings)
{
    if (p->is_http10)
        return http_parse_fail(p, 400, "bad_transfer_encoding",
                               "Transfer-Encoding is not part of HTTP/1.0.");
    if (n_codings > 1)
        return http_parse_fail(p, 400, "bad_transfer_encoding",
                               "Transfer-Encoding is given more than once.");
    if (!head_is(coding, "chunked"))
        return http_parse_fail(p, 501, "transfer_encoding_unknown",
                               "The only Transfer-Encoding accepted is chunked.");
    if (!(p->llhttp.flags & F_CHUNKED))
        return http_parse_fail(p, 400, "bad_transfer_encoding", "Transfer-Encoding is malformed.");
    return 0;
}

static int head_check_length(struct http_parse *p, struct str length)
{
    /* More than 19 digits could be an overflow; llhttp has parsed the value. */
    if (length.n == 0 || length.n > 19)
        return http_parse_fail(p, 400, "bad_content_length", "Content-Length is not a number.");
    for (size_t i = 0; i < length.n; i++)
        if (length.p[i] < '0' || length.p[i] > '9')
            return http_parse_fail(p, 400, "bad_content_length", "Content-Length is not a number.");
    if (p->llhttp.content_length > p->limits->body_bytes)
        return http_parse_fail(p, 413, "body_too_large",
                               "The request body is larger than this server accepts.");
    return 0;
}

/* Checks the headers that tell how long the body is. */
static int head_check_framing(struct http_parse *p)
{
    struct str coding, length, type;
    size_t n_codings = head_count(p, "transfer-encoding", &coding),
           n_lengths = head_count(p, "content-length", &length);
    if (n_lengths > 1)
        return http_parse_fail(p, 400, "bad_content_length",
                               "Content-Length is given more than once.");
    if (n_lengths == 1 && n_codings > 0)
        return http_parse_fail(p, 400, "bad_framing",
                               "Content-Length and Transfer-Encoding are both given.");
    if (n_codings > 0) return head_check_coding(p, coding, n_codings);
    if (n_lengths == 1) return head_check_length(p, length);
    /* Without a length there is no body. But a client that gives a Content-Type meant to send
     * one. */
    uint8_t m = p->llhttp.method;
    if ((m == HTTP_POST || m == HTTP_PUT || m == HTTP_PATCH) &&
        head_count(p, "content-type", &type) > 0)
        return http_parse_fail(
            p, 411, "length_required",
            "The request names a Content-Type but neither Content-Length nor chunked encoding.");
    return 0;
}

static int head_check_once(struct http_parse *p)
{
    static const char *const once[] = { "authorization", "content-type", "content-encoding",
                                        "expect" };
    struct str value;
    for (size_t i = 0; i < COUNT_OF(once); i++)
        if (head_count(p, once[i], &value) > 1)
            return http_parse_fail(p, 400, "repeated_header",
                                   "A header that may be given once is repeated.");
    if (head_count(p, "expect", &value) == 1) {
        if (!head_is(value, "100-continue"))
            return http_parse_fail(p, 417, "expectation_unknown",
                                   "The only Expect accepted is 100-continue.");
        p->wants_continue = !p->is_http10;
    }
    return 0;
}

static int head_check_method(struct http_parse *p)
{
    switch (p->llhttp.method) {
    case HTTP_GET:
    case HTTP_HEAD:
    case HTTP_POST:
    case HTTP_PUT:
    case HTTP_PATCH:
    case HTTP_DELETE:
    case HTTP_OPTIONS: return 0;
    case HTTP_CONNECT:
    case HTTP_TRACE:
        return http_parse_fail(p, 405, "method_not_allowed",
                               "CONNECT and TRACE are not allowed here.");
    default:
        return http_parse_fail(p, 501, "method_unknown",
                               "The request method is not one that this server knows.");
    }
}

static int head_hex(char c)
{
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

static int head_decode_path(struct http_parse *p, struct str raw)
{
    for (size_t i = 0; i < raw.n; i++) {
        char c = raw.p[i];
        if (c == '%') {
            int hi = i + 2 < raw.n ? head_hex(raw.p[i + 1]) : -1,
                lo = hi >= 0 ? head_hex(raw.p[i + 2]) : -1;
            if (lo < 0 || (hi == 0 && lo == 0))
                return http_parse_fail(p, 400, "bad_url",
                                       "The URL contains a malformed percent escape.");
            c = (char)(hi << 4 | lo);
            i += 2;
        }
        buf_add_char(&p->path, c);
    }
    return 0;
}

/* Accepts the origin-form, the absolute-form with the authority of the Host, and "*" of OPTIONS. */
static int head_check_url(struct http_parse *p, struct str host)
{
    struct str url = { p->text.data, p->n_url };
    if (str_find_char(url, '#') != SIZE_MAX)
        return http_parse_fail(p, 400, "bad_url", "The URL contains a fragment.");
    if (str_eq_c(url, "*") && p->llhttp.method == HTTP_OPTIONS) {
        buf_add_char(&p->path, '*');
        return 0;
    }
    if (url.n >= 7 && strncasecmp(url.p, "http://", 7) == 0) {
        url = str_sub(url, 7, url.n - 7);
        size_t end = 0;
        while (end < url.n && url.p[end] != '/' && url.p[end] != '?') end++;
        if (end != host.n || host.n == 0 || strncasecmp(url.p, host.p, end) != 0)
            return http_parse_fail(p, 400, "bad_host",
                                   "The authority of the URL is not that of the Host header.");
        url = str_sub(url, end, url.n - end);
        if (url.n == 0 || url.p[0] == '?') buf_add_char(&p->path, '/');
    } else if (url.n == 0 || url.p[0] != '/') {
        return http_parse_fail(p, 400, "bad_url", "The URL does not begin with a slash.");
    }
    size_t mark = str_find_char(url, '?');
    struct str raw = mark == SIZE_MAX ? url : str_sub(url, 0, mark);
    return head_decode_path(p, raw);
}

/* The limit of a path that has its own; the length was held against the server's before. */
static int head_check_path_limit(struct http_parse *p)
{
    const struct http_limits *l = p->limits;
    const bool is_small = l->small_body_paths && str_starts(buf_str(&p->path), l->small_body_paths);
    p->body_max = is_small ? l->small_body_bytes : l->body_bytes;
    if (p->llhttp.flags & F_CHUNKED || p->llhttp.content_length <= p->body_max) return 0;
    return http_parse_fail(p, 413, "body_too_large",
                           "The request body is larger than this path accepts.");
}

int http_parse_check_head(struct http_parse *p)
{
    struct str host = { 0 };
    int rc = 0;
    p->is_http10 = p->llhttp.http_major == 1 && p->llhttp.http_minor == 0;
    if ((rc = head_check_method(p)) != 0) return rc;
    if ((rc = head_check_host(p, &host)) != 0) return rc;
    if ((rc = head_check_once(p)) != 0) return rc;
    if ((rc = head_check_framing(p)) != 0) return rc;
    if ((rc = head_check_url(p, host)) != 0) return rc;
    return head_check_path_limit(p);
}
