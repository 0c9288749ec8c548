/* http_scan.c - checks the raw bytes of each line before llhttp sees them (http_parse.h).
 *
 * Distributions build llhttp in its loose mode, some in a version in which a lone CR ends a header
 * line. So line ends, chunk sizes and header names are all checked here. Thread: the parser's
 * owner. */
#include "shared/net/http/http_parse.h"

#include <string.h>

enum {
    HTTP_BLANK_LINES_MAX = 2,
    HTTP_CHUNK_DIGITS_MAX = 16,
    HTTP_CHUNK_LINE_MAX = 256,
    HTTP_LINE_EXTRA = 32
};

static bool scan_is_token(unsigned char c)
{
    if ((c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) return true;
    return c != 0 && strchr("!#$%&'*+-.^_`|~", c) != NULL;
}

static int scan_request_char(struct http_parse *p, unsigned char c)
{
    struct http_scan *s = &p->scan;
    if (c <= 0x1f || c >= 0x7f)
        return http_parse_fail(p, 400, "bad_request_line",
                               "The request line contains a byte that is not printable ASCII.");
    /* HTTP_LINE_EXTRA is for the method, two spaces and the version. */
    if (s->n_line > p->limits->url_bytes + HTTP_LINE_EXTRA)
        return http_parse_fail(p, 414, "url_too_long",
                               "The URL is longer than this server accepts.");
    if (c == ' ') s->n_spaces++;
    s->tail = s->tail << 8 | c;
    return 0;
}

static int scan_field_char(struct http_parse *p, unsigned char c)
{
    struct http_scan *s = &p->scan;
    if (++s->n_block > p->limits->header_bytes)
        return http_parse_fail(p, 431, "headers_too_large",
                               "The request headers are larger than this server accepts.");
    if (s->colon) {
        if ((c < 0x20 && c != '\t') || c == 0x7f)
            return http_parse_fail(p, 400, "bad_header",
                                   "A header value contains a control character.");
        return 0;
    }
    if (s->n_line == 1 && (c == ' ' || c == '\t'))
        return http_parse_fail(p, 400, "folded_header",
                               "A header is folded over several lines, which is not accepted.");
    if (c == ':' && s->n_line > 1) s->colon = true;
    else if (!scan_is_token(c))
        return http_parse_fail(p, 400, "bad_header",
                               "A header name contains a character that is not allowed there.");
    return 0;
}

/* Chunk extensions are ignored. Their total is limited, else a small body could have endless
 * framing. */
static int scan_chunk_char(struct http_parse *p, unsigned char c)
{
    struct http_scan *s = &p->scan;
    if (c == ';') s->extension = true;
    if (s->extension) {
        bool bad = (c < 0x20 && c != '\t') || c == 0x7f || s->n_line > HTTP_CHUNK_LINE_MAX;
        if (bad || ++s->n_framing > p->limits->header_bytes)
            return http_parse_fail(p, 400, "bad_chunk",
                                   "A chunk extension is malformed or too long.");
        return 0;
    }
    bool hex = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
    if (!hex || s->n_line > HTTP_CHUNK_DIGITS_MAX)
        return http_parse_fail(p, 400, "bad_chunk",
                               "A chunk size is not a short hexadecimal number.");
    return 0;
}

static int scan_char(struct http_parse *p, unsigned char c)
{
    p->scan.n_line++;
    switch (p->scan.kind) {
    case HTTP_LINE_REQUEST: return scan_request_char(p, c);
    case HTTP_LINE_FIELD:
    case HTTP_LINE_TRAILER: return scan_field_char(p, c);
    case HTTP_LINE_CHUNK_SIZE: return scan_chunk_char(p, c);
    case HTTP_LINE_CHUNK_END: break;
    }
    return http_parse_fail(p, 400, "bad_chunk", "A chunk is longer than its size says.");
}

static int scan_request_end(struct http_parse *p)
{
    static const char v11[] = "HTTP/1.1", v10[] = "HTTP/1.0";
    struct http_scan *s = &p->scan;
    char tail[8];
    for (int i = 0; i < 8; i++) tail[i] = (char)(s->tail >> (56 - 8 * i) & 0xff);
    if (memcmp(tail, v11, 8) != 0 && memcmp(tail, v10, 8) != 0) {
        if (memcmp(tail, "HTTP/", 5) == 0)
            return http_parse_fail(p, 505, "http_version",
                                   "Only HTTP/1.1 and HTTP/1.0 are spoken here.");
        return http_parse_fail(p, 400, "bad_request_line",
                               "The request line does not end with HTTP/1.1 or HTTP/1.0.");
    }
    if (s->n_spaces != 2)
        return http_parse_fail(
            p, 400, "bad_request_line",
            "The request line is not method, URL and version with single spaces.");
    return 0;
}

/* Called at the LF of a line. After a blank header line or a chunk size, llhttp's callbacks set the
 * kind of the next line. */
static int scan_line_end(struct http_parse *p)
{
    struct http_scan *s = &p->scan;
    size_t n = s->n_line;
    bool colon = s->colon;
    s->n_line = 0;
    s->cr = s->colon = s->extension = false;
    switch (s->kind) {
    case HTTP_LINE_REQUEST:
        if (n == 0) {
            if (++s->n_blank > HTTP_BLANK_LINES_MAX)
                return http_parse_fail(p, 400, "bad_request_line",
                                       "There are empty lines before the request.");
            return 0;
        }
        s->kind = HTTP_LINE_FIELD;
        return scan_request_end(p);
    case HTTP_LINE_FIELD:
    case HTTP_LINE_TRAILER:
        s->n_block += 2;
        if (n > 0 && !colon)
            return http_parse_fail(p, 400, "bad_header", "A header line has no colon.");
        return 0;
    case HTTP_LINE_CHUNK_SIZE:
        return n > 0 ? 0 : http_parse_fail(p, 400, "bad_chunk", "A chunk size is missing.");
    case HTTP_LINE_CHUNK_END: s->kind = HTTP_LINE_CHUNK_SIZE; return 0;
    }
    return 0;
}

size_t http_scan_extension(struct http_parse *p, const char *data, size_t n)
{
    struct http_scan *s = &p->scan;
    size_t i = 0;
    if (s->kind != HTTP_LINE_CHUNK_SIZE || s->n_line == 0 || s->cr) return 0;
    while (i < n && p->state != HTTP_PARSE_FAILED && (s->extension || data[i] == ';') &&
           data[i] != '\r' && data[i] != '\n')
        scan_char(p, (unsigned char)data[i++]);
    return i;
}

size_t http_scan_line(struct http_parse *p, const char *data, size_t n)
{
    struct http_scan *s = &p->scan;
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)data[i];
        if (c == ';' && s->kind == HTTP_LINE_CHUNK_SIZE && s->n_line > 0 && !s->cr) return i;
        if (c == '\n') {
            if (!s->cr)
                http_parse_fail(p, 400, "bad_line_end",
                                "A line ends with LF alone; CRLF is required.");
            else scan_line_end(p);
            return i + 1;
        }
        if (s->cr) http_parse_fail(p, 400, "bad_line_end", "A CR is not followed by LF.");
        else if (c == '\r') s->cr = true;
        else scan_char(p, c);
        if (p->state == HTTP_PARSE_FAILED) return i + 1;
    }
    return n;
}
