/* json_check.c - checks a JSON text against RFC 8259 in one pass, byte by byte.
 *
 * cJSON is lenient (leading zeros, control characters, invalid UTF-8) and says little about where
 * it stopped. This pass is strict, bounds the depth without recursion and reports the offset; cJSON
 * accepts every text that passes.
 * LIMIT: strings with \u0000 and numbers of more than 63 characters are refused, since cJSON would
 * silently cut both.
 * Thread: the caller's. */
#include "shared/base/json/json_check.h"

#include <string.h>

#include "shared/base/json/json.h"
#include "shared/base/map.h"

enum { NUMBER_CHARS_MAX = 63 };

struct json_check_scan {
    struct str text;
    size_t at;
    size_t depth;
    bool unique_keys;
    bool is_object[JSON_DEPTH_MAX];
    struct map keys[JSON_DEPTH_MAX]; /* keys of the open objects, when unique_keys */
    struct buf key;
    const struct json_events *events; /* or NULL */
    struct err *err;
};

static enum status scan_fail(struct json_check_scan *s, size_t at, const char *what)
{
    return err_set(s->err, ERR_FORMAT, "malformed JSON at byte %zu: %s", at, what);
}

static int peek(const struct json_check_scan *s)
{
    return s->at < s->text.n ? (unsigned char)s->text.p[s->at] : -1;
}

static bool is_digit(int c) { return c >= '0' && c <= '9'; }

static void skip_blanks(struct json_check_scan *s)
{
    for (int c = peek(s); c == ' ' || c == '\t' || c == '\n' || c == '\r'; c = peek(s)) s->at++;
}

size_t json_utf8_len(struct str s)
{
    if (s.n == 0) return 0;
    const unsigned char *p = (const unsigned char *)s.p;
    if (p[0] < 0x80) return 1;
    size_t n = p[0] >= 0xC2 && p[0] <= 0xDF   ? 2
               : (p[0] & 0xF0) == 0xE0        ? 3
               : p[0] >= 0xF0 && p[0] <= 0xF4 ? 4
                                              : 0;
    if (n == 0 || s.n < n) return 0;
    for (size_t i = 1; i < n; i++)
        if ((p[i] & 0xC0) != 0x80) return 0;
    bool overlong = (p[0] == 0xE0 && p[1] < 0xA0) || (p[0] == 0xF0 && p[1] < 0x90);
    bool surrogate = p[0] == 0xED && p[1] >= 0xA0, beyond = p[0] == 0xF4 && p[1] >= 0x90;
    return overlong || surrogate || beyond ? 0 : n;
}

/* The four digits of a \u escape, or -1. */
static int32_t scan_hex4(struct json_check_scan *s)
{
    int32_t v = 0;
    for (int i = 0; i < 4; i++, s->at++) {
        int c = peek(s), lower = c | 0x20;
        if (is_digit(c)) v = v * 16 + (c - '0');
        else if (lower >= 'a' && lower <= 'f') v = v * 16 + (lower - 'a' + 10);
        else return -1;
    }
    return v;
}

static void add_utf8(struct buf *b, uint32_t c)
{
    if (c < 0x80) {
        buf_add_char(b, (char)c);
    } else if (c < 0x800) {
        buf_add_char(b, (char)(0xC0 | c >> 6));
        buf_add_char(b, (char)(0x80 | (c & 0x3F)));
    } else {
        if (c < 0x10000) {
            buf_add_char(b, (char)(0xE0 | c >> 12));
        } else {
            buf_add_char(b, (char)(0xF0 | c >> 18));
            buf_add_char(b, (char)(0x80 | (c >> 12 & 0x3F)));
        }
        buf_add_char(b, (char)(0x80 | (c >> 6 & 0x3F)));
        buf_add_char(b, (char)(0x80 | (c & 0x3F)));
    }
}

/* Reads an escape, starting at its 'u'; surrogates must come in pairs. */
static enum status scan_unicode(struct json_check_scan *s, struct buf *out)
{
    size_t start = s->at - 1;
    s->at++;
    int32_t c = scan_hex4(s);
    if (c < 0) return scan_fail(s, start, "\\u needs four hexadecimal digits");
    if (c == 0) return scan_fail(s, start, "\\u0000 is not supported in strings");
    if (c >= 0xD800 && c <= 0xDFFF) {
        bool pair = c < 0xDC00 && peek(s) == '\\' && s->at + 1 < s->text.n &&
                    s->text.p[s->at + 1] == 'u';
        if (pair) s->at += 2;
        int32_t low = pair ? scan_hex4(s) : -1;
        if (low < 0xDC00 || low > 0xDFFF) return scan_fail(s, start, "half of a surrogate pair");
        c = 0x10000 + ((c - 0xD800) << 10) + (low - 0xDC00);
    }
    if (out) add_utf8(out, (uint32_t)c);
    return OK;
}

static enum status scan_escape(struct json_check_scan *s, struct buf *out)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    s->at++;
    int c = peek(s);
    if (c == 'u') return scan_unicode(s, out);
    const char *known = c > 0 ? strchr(from, c) : NULL;
    if (!known) return scan_fail(s, s->at - 1, "unknown escape in a string");
    if (out) buf_add_char(out, to[known - from]);
    s->at++;
    return OK;
}

/* Reads a string, starting at its opening quote; `out` (may be NULL) gets its characters. */
static enum status scan_string(struct json_check_scan *s, struct buf *out)
{
    size_t start = s->at++;
    for (;;) {
        int c = peek(s);
        if (c < 0) return scan_fail(s, start, "this string has no end");
        if (c == '"') break;
        if (c < ' ') return scan_fail(s, s->at, "control character in a string");
        if (c == '\\') {
            TRY(scan_escape(s, out));
            continue;
        }
        size_t n = c < 0x80 ? 1 : json_utf8_len(str_sub(s->text, s->at, SIZE_MAX));
        if (n == 0) return scan_fail(s, s->at, "invalid UTF-8");
        if (out) buf_add(out, s->text.p + s->at, n);
        s->at += n;
    }
    s->at++;
    return OK;
}

static bool scan_digits(struct json_check_scan *s)
{
    size_t start = s->at;
    while (is_digit(peek(s))) s->at++;
    return s->at > start;
}

static enum status scan_number(struct json_check_scan *s)
{
    size_t start = s->at;
    if (peek(s) == '-') s->at++;
    bool zero = peek(s) == '0', good = scan_digits(s);
    size_t int_len = s->at - start - (s->text.p[start] == '-');
    if (zero && int_len > 1) return scan_fail(s, start, "a number must not begin with 0");
    if (good && peek(s) == '.') {
        s->at++;
        good = scan_digits(s);
    }
    if (good && (peek(s) == 'e' || peek(s) == 'E')) {
        s->at++;
        if (peek(s) == '+' || peek(s) == '-') s->at++;
        good = scan_digits(s);
    }
    if (!good) return scan_fail(s, start, "unfinished number");
    return s->at - start > NUMBER_CHARS_MAX
               ? scan_fail(s, start, "a number of more than 63 characters")
               : OK;
}

static enum status scan_word(struct json_check_scan *s)
{
    static const char *const words[] = { "true", "false", "null" };
    for (size_t i = 0; i < 3; i++) {
        if (!str_starts(str_sub(s->text, s->at, SIZE_MAX), words[i])) continue;
        s->at += strlen(words[i]);
        return OK;
    }
    return scan_fail(
        s, s->at, peek(s) < 0 ? "the text ends where a value is expected" : "a value is expected");
}

/* Reads a member's name and the colon. */
static enum status scan_key(struct json_check_scan *s)
{
    size_t start = s->at;
    if (peek(s) != '"') return scan_fail(s, s->at, "a member name in quotes is expected");
    buf_clear(&s->key);
    TRY(scan_string(s, s->unique_keys || s->events ? &s->key : NULL));
    if (s->events) s->events->name(s->events->arg, s->depth, buf_str(&s->key));
    if (s->unique_keys && map_put(&s->keys[s->depth - 1], buf_str(&s->key), s))
        return scan_fail(s, start, "this member name is given twice");
    skip_blanks(s);
    if (peek(s) != ':') return scan_fail(s, s->at, "':' is expected");
    s->at++;
    skip_blanks(s);
    return OK;
}

static void scan_close(struct json_check_scan *s)
{
    s->depth--;
    map_release(&s->keys[s->depth]);
}

/* Reports the value that began at `start`. */
static enum status scan_report(const struct json_check_scan *s, size_t start)
{
    struct str text = str_sub(s->text, start, s->at > start ? s->at - start : 1);
    return s->events ? s->events->value(s->events->arg, s->depth, text) : OK;
}

/* Leaves the container whose bracket is at the current position. */
static void scan_leave(struct json_check_scan *s)
{
    scan_close(s);
    if (s->events) s->events->close(s->events->arg, s->depth, s->text.p + s->at);
    s->at++;
}

/* Enters the array or object at the current position; *closed: it is empty and already closed. */
static enum status scan_open(struct json_check_scan *s, bool *closed)
{
    if (s->depth == JSON_DEPTH_MAX) return scan_fail(s, s->at, "nested deeper than 64 levels");
    TRY(scan_report(s, s->at));
    bool object = peek(s) == '{';
    s->is_object[s->depth++] = object;
    s->at++;
    skip_blanks(s);
    *closed = peek(s) == (object ? '}' : ']');
    if (*closed) {
        scan_leave(s);
        return OK;
    }
    return object ? scan_key(s) : OK;
}

/* After a value: close the containers that end here, or pass the comma before the next value.
 * *more: a value follows. */
static enum status scan_after(struct json_check_scan *s, bool *more)
{
    while (s->depth > 0) {
        skip_blanks(s);
        bool object = s->is_object[s->depth - 1];
        int c = peek(s);
        if (c == ',') {
            s->at++;
            skip_blanks(s);
            *more = true;
            return object ? scan_key(s) : OK;
        }
        if (c != (object ? '}' : ']'))
            return scan_fail(s, s->at,
                             object ? "',' or '}' is expected" : "',' or ']' is expected");
        scan_leave(s);
    }
    *more = false;
    return OK;
}

static enum status scan_scalar(struct json_check_scan *s)
{
    size_t start = s->at;
    int c = peek(s);
    if (c == '"') TRY(scan_string(s, NULL));
    else if (c == '-' || is_digit(c)) TRY(scan_number(s));
    else TRY(scan_word(s));
    return scan_report(s, start);
}

static enum status scan_document(struct json_check_scan *s)
{
    bool more = true;
    skip_blanks(s);
    while (more) {
        int c = peek(s);
        bool complete = true;
        if (c == '{' || c == '[') TRY(scan_open(s, &complete));
        else TRY(scan_scalar(s));
        if (complete) TRY(scan_after(s, &more));
    }
    skip_blanks(s);
    return s->at < s->text.n ? scan_fail(s, s->at, "something follows the value") : OK;
}

enum status json_check(struct str text, bool unique_keys, const struct json_events *events,
                       struct err *err)
{
    struct json_check_scan s = {
        .text = text, .unique_keys = unique_keys, .events = events, .err = err
    };
    enum status st = scan_document(&s);
    while (s.depth > 0) scan_close(&s);
    buf_release(&s.key);
    return st;
}
