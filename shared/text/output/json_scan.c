/* json_scan.c - see json_scan.h. Thread: its owner's. */
#include "shared/text/output/json_scan.h"

#include <string.h>

#include "shared/base/json/json.h"

/* States within a number; it may end in those from N_ZERO on. */
enum { N_MINUS, N_DOT, N_E, N_E_SIGN, N_ZERO, N_INT, N_FRACTION, N_EXPONENT };

static bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }
static bool is_digit(char c) { return c >= '0' && c <= '9'; }

static enum json_scan_result set_mode(struct json_scan *s, enum json_scan_mode mode)
{
    s->mode = mode;
    return JSON_SCAN_MORE;
}

static enum json_scan_result open_level(struct json_scan *s, bool object)
{
    if (s->depth == JSON_DEPTH_MAX) return JSON_SCAN_BAD;
    uint64_t bit = UINT64_C(1) << s->depth++;
    s->objects = object ? s->objects | bit : s->objects & ~bit;
    return set_mode(s, object ? SCAN_KEY_OR_END : SCAN_VALUE_OR_END);
}

static bool in_object(const struct json_scan *s) { return s->objects >> (s->depth - 1) & 1; }

static enum json_scan_result close_level(struct json_scan *s, char c)
{
    if (in_object(s) != (c == '}')) return JSON_SCAN_BAD;
    s->depth--;
    if (s->depth > 0) return set_mode(s, SCAN_AFTER);
    s->mode = SCAN_CLOSED;
    return JSON_SCAN_DONE;
}

static enum json_scan_result begin_string(struct json_scan *s, bool is_key)
{
    s->is_key = is_key;
    return set_mode(s, SCAN_STRING);
}

static enum json_scan_result begin_value(struct json_scan *s, char c)
{
    static const char *const words[] = { "true", "false", "null" };
    if (c == '{' || c == '[') return open_level(s, c == '{');
    if (c == '"') return begin_string(s, false);
    if (c == '-' || is_digit(c)) {
        s->number = c == '-' ? N_MINUS : c == '0' ? N_ZERO : N_INT;
        return set_mode(s, SCAN_NUMBER);
    }
    for (int i = 0; i < 3; i++) {
        if (words[i][0] != c) continue;
        s->word = words[i] + 1;
        return set_mode(s, SCAN_WORD);
    }
    return JSON_SCAN_BAD;
}

static enum json_scan_result after_value(struct json_scan *s, char c)
{
    s->mode = SCAN_AFTER;
    if (is_blank(c)) return JSON_SCAN_MORE;
    if (c == ',') return set_mode(s, in_object(s) ? SCAN_KEY : SCAN_VALUE);
    return c == '}' || c == ']' ? close_level(s, c) : JSON_SCAN_BAD;
}

static enum json_scan_result in_string(struct json_scan *s, char c)
{
    if (c == '"') return set_mode(s, s->is_key ? SCAN_COLON : SCAN_AFTER);
    if (c == '\\') return set_mode(s, SCAN_ESCAPE);
    return (unsigned char)c < ' ' ? JSON_SCAN_BAD : JSON_SCAN_MORE;
}

static enum json_scan_result in_escape(struct json_scan *s, char c)
{
    if (c == 'u') {
        s->n_hex = 0;
        return set_mode(s, SCAN_HEX);
    }
    return c && strchr("\"\\/bfnrt", c) ? set_mode(s, SCAN_STRING) : JSON_SCAN_BAD;
}

static enum json_scan_result in_hex(struct json_scan *s, char c)
{
    if (!is_digit(c) && !(c >= 'a' && c <= 'f') && !(c >= 'A' && c <= 'F')) return JSON_SCAN_BAD;
    return ++s->n_hex == 4 ? set_mode(s, SCAN_STRING) : JSON_SCAN_MORE;
}

static int next_in_number(int at, char c)
{
    bool digit = is_digit(c);
    switch (at) {
    case N_MINUS: return c == '0' ? N_ZERO : digit ? N_INT : -1;
    case N_DOT: return digit ? N_FRACTION : -1;
    case N_E: return digit ? N_EXPONENT : c == '+' || c == '-' ? N_E_SIGN : -1;
    case N_E_SIGN: return digit ? N_EXPONENT : -1;
    case N_INT:
        if (digit) return N_INT;
        /* fall through */
    case N_ZERO: return c == '.' ? N_DOT : c == 'e' || c == 'E' ? N_E : -1;
    case N_FRACTION: return digit ? N_FRACTION : c == 'e' || c == 'E' ? N_E : -1;
    default: return digit ? N_EXPONENT : -1;
    }
}

static enum json_scan_result in_number(struct json_scan *s, char c)
{
    int next = next_in_number(s->number, c);
    if (next < 0) return s->number >= N_ZERO ? after_value(s, c) : JSON_SCAN_BAD;
    s->number = (uint8_t)next;
    return JSON_SCAN_MORE;
}

static enum json_scan_result in_word(struct json_scan *s, char c)
{
    if (*s->word != c) return JSON_SCAN_BAD;
    return *++s->word ? JSON_SCAN_MORE : set_mode(s, SCAN_AFTER);
}

enum json_scan_result json_scan_byte(struct json_scan *s, char c)
{
    switch (s->mode) {
    case SCAN_STRING: return in_string(s, c);
    case SCAN_ESCAPE: return in_escape(s, c);
    case SCAN_HEX: return in_hex(s, c);
    case SCAN_NUMBER: return in_number(s, c);
    case SCAN_WORD: return in_word(s, c);
    case SCAN_AFTER: return after_value(s, c);
    case SCAN_CLOSED: return JSON_SCAN_BAD;
    default: break;
    }
    if (is_blank(c)) return JSON_SCAN_MORE;
    switch (s->mode) {
    case SCAN_ROOT: return c == '{' ? open_level(s, true) : JSON_SCAN_BAD;
    case SCAN_COLON: return c == ':' ? set_mode(s, SCAN_VALUE) : JSON_SCAN_BAD;
    case SCAN_KEY: return c == '"' ? begin_string(s, true) : JSON_SCAN_BAD;
    case SCAN_KEY_OR_END:
        return c == '"' ? begin_string(s, true) : c == '}' ? close_level(s, c) : JSON_SCAN_BAD;
    case SCAN_VALUE_OR_END: return c == ']' ? close_level(s, c) : begin_value(s, c);
    default: return begin_value(s, c);
    }
}
