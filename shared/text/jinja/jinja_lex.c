/* jinja_lex.c - template source to tokens, with the white space rules of trim_blocks and
 * lstrip_blocks.
 *
 * Each text between tags is one TOK_DATA. White space around {% %} and {# #}: one newline right
 * after the tag is dropped, and so are blanks before it when it comes first on its line. `-` inside
 * a delimiter strips all white space on that side, `+` switches the rule off on that side. For
 * {{ }} only `-` has an effect.
 * Brackets are counted, so that "}}" inside a dict literal does not end the tag.
 * Thread: any; the state lives in one call. */
#include "shared/text/jinja/jinja_ast.h"
#include "shared/text/utf8.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct lexer {
    struct str src;
    size_t at;
    int line;
    struct arena *arena;
    struct jinja_token *tokens;
    size_t n, cap;
    char open[JINJA_DEPTH_MAX]; /* closing characters of the open brackets */
    int n_open;
    struct err *err;
};

static const char *const TOKEN_NAMES[] = {
    [TOK_EOF] = "the end of the template",
    [TOK_DATA] = "text",
    [TOK_VAR_BEGIN] = "'{{'",
    [TOK_VAR_END] = "'}}'",
    [TOK_BLOCK_BEGIN] = "'{%'",
    [TOK_BLOCK_END] = "'%}'",
    [TOK_NAME] = "a name",
    [TOK_STRING] = "a string",
    [TOK_INT] = "a number",
    [TOK_FLOAT] = "a number",
    [TOK_ADD] = "'+'",
    [TOK_SUB] = "'-'",
    [TOK_MUL] = "'*'",
    [TOK_DIV] = "'/'",
    [TOK_FLOORDIV] = "'//'",
    [TOK_MOD] = "'%'",
    [TOK_POW] = "'**'",
    [TOK_TILDE] = "'~'",
    [TOK_EQ] = "'=='",
    [TOK_NE] = "'!='",
    [TOK_LT] = "'<'",
    [TOK_LE] = "'<='",
    [TOK_GT] = "'>'",
    [TOK_GE] = "'>='",
    [TOK_IN] = "'in'",
    [TOK_NOT_IN] = "'not in'",
    [TOK_LPAREN] = "'('",
    [TOK_RPAREN] = "')'",
    [TOK_LBRACKET] = "'['",
    [TOK_RBRACKET] = "']'",
    [TOK_LBRACE] = "'{'",
    [TOK_RBRACE] = "'}'",
    [TOK_COMMA] = "','",
    [TOK_COLON] = "':'",
    [TOK_DOT] = "'.'",
    [TOK_PIPE] = "'|'",
    [TOK_ASSIGN] = "'='",
};

const char *jinja_tok_name(enum jinja_tok kind) { return TOKEN_NAMES[kind]; }

static enum status lex_fail(const struct lexer *x, const char *what)
{
    return err_set(x->err, ERR_FORMAT, "chat template line %d: %s", x->line, what);
}

static bool lex_looking_at(const struct lexer *x, const char *s)
{
    return str_starts(str_sub(x->src, x->at, SIZE_MAX), s);
}

static void lex_add(struct lexer *x, enum jinja_tok kind, struct str text)
{
    if (x->n == x->cap) {
        x->cap = x->cap ? x->cap * 2 : 64;
        x->tokens = mem_realloc(x->tokens, x->cap, sizeof *x->tokens);
    }
    x->tokens[x->n++] = (struct jinja_token){ .kind = kind, .line = x->line, .text = text };
}

/* Steps over n bytes, counting lines. */
static void lex_skip(struct lexer *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (x->src.p[x->at + i] == '\n') x->line++;
    x->at += n;
}

static void lex_skip_space(struct lexer *x)
{
    int32_t cp;
    while (x->at < x->src.n) {
        size_t n = jinja_utf8_next(x->src, x->at, &cp);
        if (!jinja_is_space(cp)) return;
        lex_skip(x, n);
    }
}

/* ---- text between tags ---- */

/* Strips the end of `text`, after which a tag opens whose delimiter is followed by `sign`. */
static struct str lex_strip_before(struct str text, bool line_start, bool is_var, char sign)
{
    if (sign == '-') return jinja_strip(text, NULL, false, true);
    if (sign == '+' || is_var) return text;
    size_t from = text.n;
    while (from > 0 && text.p[from - 1] != '\n') from--;
    if (from == 0 && !line_start) return text;
    struct str tail = { text.p + from, text.n - from };
    return jinja_strip(tail, NULL, true, false).n == 0 ? (struct str){ text.p, from } : text;
}

/* After a closing delimiter: `-` skips all white space, else a block skips one newline. */
static void lex_strip_after(struct lexer *x, bool is_var, char sign)
{
    if (sign == '-') lex_skip_space(x);
    else if (!is_var && sign != '+' && x->at < x->src.n && x->src.p[x->at] == '\n') lex_skip(x, 1);
}

/* After "{#": skip to the matching "#}". */
static enum status lex_comment(struct lexer *x)
{
    size_t end = str_find(str_sub(x->src, x->at, SIZE_MAX), STR("#}"));
    if (end == SIZE_MAX) return lex_fail(x, "a comment has no '#}'");
    char sign = end > 0 ? x->src.p[x->at + end - 1] : 0;
    lex_skip(x, end + 2);
    lex_strip_after(x, false, sign);
    return OK;
}

/* Is there a tag {% word %} at `from`? Sets the signs inside its delimiters and its length. */
static bool lex_is_tag(const struct lexer *x, size_t from, const char *word, char *before,
                       char *after, size_t *len)
{
    struct str s = str_sub(x->src, from, SIZE_MAX);
    if (!str_starts(s, "{%")) return false;
    size_t i = 2;
    *before = *after = 0;
    if (i < s.n && (s.p[i] == '-' || s.p[i] == '+')) *before = s.p[i++];
    while (i < s.n && strchr(" \t\n", s.p[i])) i++;
    if (!str_starts(str_sub(s, i, SIZE_MAX), word)) return false;
    i += strlen(word);
    while (i < s.n && strchr(" \t\n", s.p[i])) i++;
    if (i < s.n && (s.p[i] == '-' || s.p[i] == '+')) *after = s.p[i++];
    if (!str_starts(str_sub(s, i, SIZE_MAX), "%}")) return false;
    *len = i + 2;
    return true;
}

/* After "{% raw %}": add everything up to "{% endraw %}" as text. */
static enum status lex_raw(struct lexer *x, char sign)
{
    if (sign == '-') lex_skip_space(x);
    size_t start = x->at;
    for (size_t i = start; i < x->src.n; i++) {
        char before, after;
        size_t len;
        if (x->src.p[i] != '{' || !lex_is_tag(x, i, "endraw", &before, &after, &len)) continue;
        bool line_start = start == 0 || x->src.p[start - 1] == '\n';
        struct str text = lex_strip_before((struct str){ x->src.p + start, i - start }, line_start,
                                           false, before);
        if (text.n) lex_add(x, TOK_DATA, text);
        lex_skip(x, i - start + len);
        lex_strip_after(x, false, after);
        return OK;
    }
    return lex_fail(x, "'raw' has no 'endraw'");
}

/* Position of the next "{{", "{%" or "{#", or the end. */
static size_t lex_find_tag(const struct lexer *x)
{
    for (size_t i = x->at; i + 1 < x->src.n; i++)
        if (x->src.p[i] == '{' && strchr("{%#", x->src.p[i + 1]) && x->src.p[i + 1]) return i;
    return x->src.n;
}

/* Reads text up to the next tag, and the tag's opening. *opened is TOK_EOF when it was a comment or
 * raw text instead. */
static enum status lex_text(struct lexer *x, enum jinja_tok *opened)
{
    bool line_start = x->at == 0 || x->src.p[x->at - 1] == '\n';
    size_t tag = lex_find_tag(x);
    struct str text = { x->src.p + x->at, tag - x->at };
    *opened = TOK_EOF;
    if (tag == x->src.n) {
        if (text.n) lex_add(x, TOK_DATA, text);
        lex_skip(x, text.n);
        return OK;
    }
    char kind = x->src.p[tag + 1];
    char sign = tag + 2 < x->src.n ? x->src.p[tag + 2] : 0;
    if (sign != '-' && sign != '+') sign = 0;
    struct str kept = lex_strip_before(text, line_start, kind == '{', sign);
    if (kept.n) lex_add(x, TOK_DATA, kept);
    lex_skip(x, text.n);
    char before, after;
    size_t len;
    if (kind == '%' && lex_is_tag(x, x->at, "raw", &before, &after, &len)) {
        lex_skip(x, len);
        return lex_raw(x, after);
    }
    lex_skip(x, sign ? 3 : 2);
    if (kind == '#') return lex_comment(x);
    *opened = kind == '{' ? TOK_VAR_BEGIN : TOK_BLOCK_BEGIN;
    lex_add(x, *opened, STR("{"));
    return OK;
}

/* ---- inside tags ---- */

static bool lex_is_name_byte(char c, bool first)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
           (unsigned char)c >= 0x80 || (!first && c >= '0' && c <= '9');
}

static int lex_hex(char c)
{
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

static void lex_add_cp(struct buf *b, uint32_t cp)
{
    char u[UTF8_CHAR_MAX];
    if (cp > 0x10FFFF || (cp >= 0xD800 && cp < 0xE000)) cp = UTF8_REPLACEMENT;
    buf_add(b, u, utf8_put((int32_t)cp, u));
}

/* Decodes one escape of a string literal; s[*i] is the character after the backslash. Unknown
 * escapes stay as they are. */
static enum status lex_escape(const struct lexer *x, struct str s, size_t *i, struct buf *b)
{
    static const char from[] = "ntr\\'\"abfv", to[] = "\n\t\r\\'\"\a\b\f\v";
    char c = s.p[(*i)++];
    const char *known = c ? strchr(from, c) : NULL;
    if (c == '\n') return OK;
    if (known) {
        buf_add_char(b, to[known - from]);
        return OK;
    }
    int digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    uint32_t cp = 0;
    if (digits) {
        for (int k = 0; k < digits; k++, (*i)++) {
            int h = *i < s.n ? lex_hex(s.p[*i]) : -1;
            if (h < 0) return lex_fail(x, "a string has a broken \\x, \\u or \\U escape");
            cp = cp << 4 | (uint32_t)h;
        }
        lex_add_cp(b, cp);
    } else if (c >= '0' && c <= '7') {
        cp = (uint32_t)(c - '0');
        for (int k = 0; k < 2 && *i < s.n && s.p[*i] >= '0' && s.p[*i] <= '7'; k++)
            cp = cp * 8 + (uint32_t)(s.p[(*i)++] - '0');
        lex_add_cp(b, cp);
    } else {
        buf_add_char(b, '\\');
        buf_add_char(b, c);
    }
    return OK;
}

static enum status lex_string(struct lexer *x)
{
    char quote = x->src.p[x->at];
    size_t end = x->at + 1;
    bool escapes = false;
    while (end < x->src.n && x->src.p[end] != quote) {
        if (x->src.p[end] == '\\') escapes = true, end++;
        end++;
    }
    if (end >= x->src.n) return lex_fail(x, "a string literal is not closed");
    struct str raw = { x->src.p + x->at + 1, end - x->at - 1 };
    struct buf b = { 0 };
    enum status st = OK;
    for (size_t i = 0; escapes && i < raw.n && st == OK;) {
        char c = raw.p[i++];
        if (c == '\\') st = lex_escape(x, raw, &i, &b);
        else buf_add_char(&b, c);
    }
    if (st == OK)
        lex_add(x, TOK_STRING,
                escapes
                    ? (struct str){ arena_strndup(x->arena, b.data ? b.data : "", b.len), b.len }
                    : raw);
    buf_release(&b);
    lex_skip(x, end + 1 - x->at);
    return st;
}

static size_t lex_digits(const struct lexer *x, size_t at)
{
    while (at < x->src.n && ((x->src.p[at] >= '0' && x->src.p[at] <= '9') || x->src.p[at] == '_'))
        at++;
    return at;
}

/* Reads a decimal integer or float, or 0x, 0o or 0b; '_' between digits is skipped. */
static enum status lex_number(struct lexer *x)
{
    size_t start = x->at, end = start, after;
    bool is_float = false;
    int base = 10;
    char second = start + 1 < x->src.n ? (char)(x->src.p[start + 1] | 0x20) : 0;
    if (x->src.p[start] == '0' && (second == 'x' || second == 'o' || second == 'b')) {
        base = second == 'x' ? 16 : second == 'o' ? 8 : 2;
        start += 2;
        for (end = start; end < x->src.n && (lex_hex(x->src.p[end]) >= 0 || x->src.p[end] == '_');)
            end++;
    } else {
        end = lex_digits(x, start);
        if (end + 1 < x->src.n && x->src.p[end] == '.' && x->src.p[end + 1] >= '0' &&
            x->src.p[end + 1] <= '9')
            end = lex_digits(x, end + 1), is_float = true;
        if (end < x->src.n && (x->src.p[end] | 0x20) == 'e') {
            after = end + 1;
            if (after < x->src.n && (x->src.p[after] == '+' || x->src.p[after] == '-')) after++;
            size_t stop = lex_digits(x, after);
            if (stop > after) end = stop, is_float = true;
        }
    }
    char text[72];
    size_t n = 0;
    for (size_t i = start; i < end && n < sizeof text - 1; i++)
        if (x->src.p[i] != '_') text[n++] = x->src.p[i];
    text[n] = 0;
    char *stop = text;
    errno = 0;
    lex_add(x, is_float ? TOK_FLOAT : TOK_INT, (struct str){ x->src.p + x->at, end - x->at });
    x->tokens[x->n - 1].value = is_float ? jv_float(strtod(text, &stop))
                                         : jv_int(strtoll(text, &stop, base));
    if (n == 0 || *stop || n >= sizeof text - 1 || (!is_float && errno))
        return lex_fail(x, "a number is malformed or too large");
    x->at = end;
    return OK;
}

/* Tracks brackets; false when a closing one does not match. */
static bool lex_balance(struct lexer *x, char c)
{
    const char *pair = strchr("()[]{}", c);
    if (!pair) return true;
    if (c == '(' || c == '[' || c == '{') {
        if (x->n_open == JINJA_DEPTH_MAX) return false;
        x->open[x->n_open++] = pair[1];
        return true;
    }
    return x->n_open > 0 && x->open[--x->n_open] == c;
}

static enum status lex_operator(struct lexer *x)
{
    static const struct {
        const char text[3];
        enum jinja_tok kind;
    } ops[] = {
        { "//", TOK_FLOORDIV }, { "**", TOK_POW },     { "==", TOK_EQ },    { "!=", TOK_NE },
        { "<=", TOK_LE },       { ">=", TOK_GE },      { "+", TOK_ADD },    { "-", TOK_SUB },
        { "*", TOK_MUL },       { "/", TOK_DIV },      { "%", TOK_MOD },    { "~", TOK_TILDE },
        { "<", TOK_LT },        { ">", TOK_GT },       { "(", TOK_LPAREN }, { ")", TOK_RPAREN },
        { "[", TOK_LBRACKET },  { "]", TOK_RBRACKET }, { "{", TOK_LBRACE }, { "}", TOK_RBRACE },
        { ",", TOK_COMMA },     { ":", TOK_COLON },    { ".", TOK_DOT },    { "|", TOK_PIPE },
        { "=", TOK_ASSIGN },
    };
    for (size_t i = 0; i < COUNT_OF(ops); i++) {
        if (!lex_looking_at(x, ops[i].text)) continue;
        if (!lex_balance(x, ops[i].text[0]))
            return lex_fail(x, "brackets do not match, or are nested too deeply");
        lex_add(x, ops[i].kind, str_of(ops[i].text));
        x->at += strlen(ops[i].text);
        return OK;
    }
    return err_set(x->err, ERR_FORMAT, "chat template line %d: unexpected character '%c' in a tag",
                   x->line, x->src.p[x->at] > ' ' ? x->src.p[x->at] : '?');
}

/* Length of the closing delimiter of the open tag, with its sign; 0 when it is not here. */
static size_t lex_at_close(const struct lexer *x, bool is_var, char *sign)
{
    *sign = x->src.p[x->at];
    if (is_var) return lex_looking_at(x, "-}}") ? 3 : lex_looking_at(x, "}}") ? 2 : 0;
    return lex_looking_at(x, "-%}") || lex_looking_at(x, "+%}") ? 3
           : lex_looking_at(x, "%}")                            ? 2
                                                                : 0;
}

static enum status lex_tag(struct lexer *x, bool is_var)
{
    x->n_open = 0;
    for (;;) {
        lex_skip_space(x);
        if (x->at == x->src.n) return lex_fail(x, is_var ? "'{{' has no '}}'" : "'{%' has no '%}'");
        char sign, c = x->src.p[x->at];
        size_t n = x->n_open ? 0 : lex_at_close(x, is_var, &sign);
        if (n) {
            lex_add(x, is_var ? TOK_VAR_END : TOK_BLOCK_END, STR("}"));
            x->at += n;
            lex_strip_after(x, is_var, sign);
            return OK;
        }
        if (lex_is_name_byte(c, true)) {
            size_t end = x->at + 1;
            while (end < x->src.n && lex_is_name_byte(x->src.p[end], false)) end++;
            lex_add(x, TOK_NAME, (struct str){ x->src.p + x->at, end - x->at });
            x->at = end;
        } else if (c >= '0' && c <= '9') {
            TRY(lex_number(x));
        } else if (c == '\'' || c == '"') {
            TRY(lex_string(x));
        } else {
            TRY(lex_operator(x));
        }
    }
}

enum status jinja_lex(struct str source, struct arena *arena, struct jinja_token **tokens,
                      struct err *err)
{
    struct lexer x = { .src = source, .line = 1, .arena = arena, .err = err };
    enum status st = OK;
    while (st == OK && x.at < x.src.n) {
        enum jinja_tok opened;
        st = lex_text(&x, &opened);
        if (st == OK && opened != TOK_EOF) st = lex_tag(&x, opened == TOK_VAR_BEGIN);
    }
    lex_add(&x, TOK_EOF, STR(""));
    if (st != OK) {
        mem_free(x.tokens);
        return st;
    }
    *tokens = x.tokens;
    return OK;
}
