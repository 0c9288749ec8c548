/* regex_translate.c - see regex_translate.h.
 *
 * One pass over the pattern, which knows escapes and bracketed classes only: PCRE2 checks the
 * syntax.
 * Thread: any. */
#include "shared/text/tokenizer/regex_translate.h"

#include <string.h>

#include "shared/base/mem.h"

/* Characters that versions 15.0 to 16.0 of the Unicode Character Database added to 14.0, by general
 * category. */
static const struct unicode_range {
    char category[3];
    uint32_t first, last;
} newer_ranges[] = {
    { "Lu", 0x1C89, 0x1C89 },   { "Lu", 0xA7CB, 0xA7CC },   { "Lu", 0xA7DA, 0xA7DA },
    { "Lu", 0xA7DC, 0xA7DC },   { "Lu", 0x10D50, 0x10D65 }, { "Ll", 0x1C8A, 0x1C8A },
    { "Ll", 0xA7CD, 0xA7CD },   { "Ll", 0xA7DB, 0xA7DB },   { "Ll", 0x10D70, 0x10D85 },
    { "Ll", 0x1DF25, 0x1DF2A }, { "Lm", 0x10D4E, 0x10D4E }, { "Lm", 0x10D6F, 0x10D6F },
    { "Lm", 0x16D40, 0x16D42 }, { "Lm", 0x16D6B, 0x16D6C }, { "Lm", 0x1E030, 0x1E06D },
    { "Lm", 0x1E4EB, 0x1E4EB }, { "Lo", 0x105C0, 0x105F3 }, { "Lo", 0x10D4A, 0x10D4D },
    { "Lo", 0x10D4F, 0x10D4F }, { "Lo", 0x10EC2, 0x10EC4 }, { "Lo", 0x1123F, 0x11240 },
    { "Lo", 0x11380, 0x11389 }, { "Lo", 0x1138B, 0x1138B }, { "Lo", 0x1138E, 0x1138E },
    { "Lo", 0x11390, 0x113B5 }, { "Lo", 0x113B7, 0x113B7 }, { "Lo", 0x113D1, 0x113D1 },
    { "Lo", 0x113D3, 0x113D3 }, { "Lo", 0x11BC0, 0x11BE0 }, { "Lo", 0x11F02, 0x11F02 },
    { "Lo", 0x11F04, 0x11F10 }, { "Lo", 0x11F12, 0x11F33 }, { "Lo", 0x1342F, 0x1342F },
    { "Lo", 0x13441, 0x13446 }, { "Lo", 0x13460, 0x143FA }, { "Lo", 0x16100, 0x1611D },
    { "Lo", 0x16D43, 0x16D6A }, { "Lo", 0x18CFF, 0x18CFF }, { "Lo", 0x1B132, 0x1B132 },
    { "Lo", 0x1B155, 0x1B155 }, { "Lo", 0x1E4D0, 0x1E4EA }, { "Lo", 0x1E5D0, 0x1E5ED },
    { "Lo", 0x1E5F0, 0x1E5F0 }, { "Lo", 0x2B739, 0x2B739 }, { "Lo", 0x2EBF0, 0x2EE5D },
    { "Lo", 0x31350, 0x323AF }, { "Mn", 0x0897, 0x0897 },   { "Mn", 0x0ECE, 0x0ECE },
    { "Mn", 0x10D69, 0x10D6D }, { "Mn", 0x10EFC, 0x10EFF }, { "Mn", 0x11241, 0x11241 },
    { "Mn", 0x113BB, 0x113C0 }, { "Mn", 0x113CE, 0x113CE }, { "Mn", 0x113D0, 0x113D0 },
    { "Mn", 0x113D2, 0x113D2 }, { "Mn", 0x113E1, 0x113E2 }, { "Mn", 0x11F00, 0x11F01 },
    { "Mn", 0x11F36, 0x11F3A }, { "Mn", 0x11F40, 0x11F40 }, { "Mn", 0x11F42, 0x11F42 },
    { "Mn", 0x11F5A, 0x11F5A }, { "Mn", 0x13440, 0x13440 }, { "Mn", 0x13447, 0x13455 },
    { "Mn", 0x1611E, 0x16129 }, { "Mn", 0x1612D, 0x1612F }, { "Mn", 0x1E08F, 0x1E08F },
    { "Mn", 0x1E4EC, 0x1E4EF }, { "Mn", 0x1E5EE, 0x1E5EF }, { "Mc", 0x0CF3, 0x0CF3 },
    { "Mc", 0x113B8, 0x113BA }, { "Mc", 0x113C2, 0x113C2 }, { "Mc", 0x113C5, 0x113C5 },
    { "Mc", 0x113C7, 0x113CA }, { "Mc", 0x113CC, 0x113CD }, { "Mc", 0x113CF, 0x113CF },
    { "Mc", 0x11F03, 0x11F03 }, { "Mc", 0x11F34, 0x11F35 }, { "Mc", 0x11F3E, 0x11F3F },
    { "Mc", 0x11F41, 0x11F41 }, { "Mc", 0x1612A, 0x1612C }, { "Nd", 0x10D40, 0x10D49 },
    { "Nd", 0x116D0, 0x116E3 }, { "Nd", 0x11BF0, 0x11BF9 }, { "Nd", 0x11F50, 0x11F59 },
    { "Nd", 0x16130, 0x16139 }, { "Nd", 0x16D70, 0x16D79 }, { "Nd", 0x1CCF0, 0x1CCF9 },
    { "Nd", 0x1E4F0, 0x1E4F9 }, { "Nd", 0x1E5F1, 0x1E5FA }, { "No", 0x1D2C0, 0x1D2D3 },
    { "Pd", 0x10D6E, 0x10D6E }, { "Po", 0x1B4E, 0x1B4F },   { "Po", 0x1B7F, 0x1B7F },
    { "Po", 0x113D4, 0x113D5 }, { "Po", 0x113D7, 0x113D8 }, { "Po", 0x11B00, 0x11B09 },
    { "Po", 0x11BE1, 0x11BE1 }, { "Po", 0x11F43, 0x11F4F }, { "Po", 0x16D6D, 0x16D6F },
    { "Po", 0x1E5FF, 0x1E5FF }, { "Sm", 0x10D8E, 0x10D8F }, { "So", 0x2427, 0x2429 },
    { "So", 0x2FFC, 0x2FFF },   { "So", 0x31E4, 0x31E5 },   { "So", 0x31EF, 0x31EF },
    { "So", 0x1CC00, 0x1CCEF }, { "So", 0x1CD00, 0x1CEB3 }, { "So", 0x1F6DC, 0x1F6DC },
    { "So", 0x1F774, 0x1F776 }, { "So", 0x1F77B, 0x1F77F }, { "So", 0x1F7D9, 0x1F7D9 },
    { "So", 0x1F8B2, 0x1F8BB }, { "So", 0x1F8C0, 0x1F8C1 }, { "So", 0x1FA75, 0x1FA77 },
    { "So", 0x1FA87, 0x1FA89 }, { "So", 0x1FA8F, 0x1FA8F }, { "So", 0x1FAAD, 0x1FAAF },
    { "So", 0x1FABB, 0x1FABF }, { "So", 0x1FAC6, 0x1FAC6 }, { "So", 0x1FACE, 0x1FACF },
    { "So", 0x1FADA, 0x1FADC }, { "So", 0x1FADF, 0x1FADF }, { "So", 0x1FAE8, 0x1FAE9 },
    { "So", 0x1FAF7, 0x1FAF8 }, { "So", 0x1FBCB, 0x1FBEF },
};

/* Escapes that PCRE2 reads differently, or that Oniguruma does not have. */
static const char refused_escapes[] = "bBhHvVKGCRXQEN";

struct translation {
    struct str in;
    size_t at;
    struct buf *out;
    bool in_class;
    struct err *err;
};

/* Is the range of category `name`? One letter stands for all categories that begin with it. */
static bool is_of(const struct unicode_range *f, struct str name)
{
    return name.n >= 1 && name.n <= 2 && memcmp(f->category, name.p, name.n) == 0;
}

/* Appends the newer ranges of category `name` as members of a class; false when there are none. */
static bool add_newer_ranges(struct str name, struct buf *out)
{
    bool any = false;
    for (size_t i = 0; i < COUNT_OF(newer_ranges); i++) {
        if (!is_of(&newer_ranges[i], name)) continue;
        any = true;
        if (!out) return true;
        buf_printf(out, "\\x{%X}-\\x{%X}", newer_ranges[i].first, newer_ranges[i].last);
    }
    return any;
}

/* Reads the name in "\pL", "\p{L}" or "\p{^L}"; t->at is behind the p. */
static enum status property_name(struct translation *t, struct str *name, bool *negated)
{
    struct str rest = str_sub(t->in, t->at, SIZE_MAX);
    if (rest.n == 0 || (rest.p[0] == '{' && str_find_char(rest, '}') == SIZE_MAX))
        return err_set(
            t->err, ERR_UNSUPPORTED,
            "the pre-tokenizer's pattern cannot be used: a property without a name (at byte %zu)",
            t->at);
    size_t close = rest.p[0] == '{' ? str_find_char(rest, '}') : 0;
    *name = close ? str_sub(rest, 1, close - 1) : str_sub(rest, 0, 1);
    t->at += close + 1;
    if (str_starts(*name, "^")) {
        *name = str_sub(*name, 1, SIZE_MAX);
        *negated = !*negated;
    }
    return OK;
}

/* Appends a property, with the newer characters of a category. */
static enum status put_property(struct translation *t, struct str name, bool negated)
{
    bool grows = add_newer_ranges(name, NULL);
    if (grows && negated && t->in_class)
        return err_set(t->err, ERR_UNSUPPORTED,
                       "the pre-tokenizer's pattern cannot be used: \\P{%.*s} inside brackets",
                       STR_ARG(name));
    bool brackets = grows && !t->in_class;
    if (brackets) buf_add_c(t->out, negated ? "[^" : "[");
    buf_printf(t->out, "\\%c{%.*s}", negated && !brackets ? 'P' : 'p', STR_ARG(name));
    if (grows) add_newer_ranges(name, t->out);
    if (brackets) buf_add_char(t->out, ']');
    return OK;
}

/* Appends Oniguruma's \w; PCRE2's differs from version to version. */
static enum status put_word(struct translation *t, bool negated)
{
    static const char *const parts[] = { "L", "M", "Nd", "Pc", "Alphabetic" };
    if (negated && t->in_class)
        return err_set(t->err, ERR_UNSUPPORTED,
                       "the pre-tokenizer's pattern cannot be used: \\W inside brackets");
    bool was = t->in_class;
    if (!was) buf_add_c(t->out, negated ? "[^" : "[");
    t->in_class = true;
    for (size_t i = 0; i < COUNT_OF(parts); i++) (void)put_property(t, str_of(parts[i]), false);
    /* superscript digits and fractions of Latin-1, but no others */
    buf_add_c(t->out, "\\x{B2}\\x{B3}\\x{B9}\\x{BC}-\\x{BE}");
    t->in_class = was;
    if (!was) buf_add_char(t->out, ']');
    return OK;
}

static enum status put_escape(struct translation *t, char c)
{
    struct str name;
    bool negated = c == 'P';
    t->at += 2;
    switch (c) {
    case 'p':
    case 'P': TRY(property_name(t, &name, &negated)); return put_property(t, name, negated);
    case 's': return put_property(t, STR("White_Space"), false); /* PCRE2's own \s adds U+180E */
    case 'S': return put_property(t, STR("White_Space"), true);
    case 'd': return put_property(t, STR("Nd"), false);
    case 'D': return put_property(t, STR("Nd"), true);
    case 'w':
    case 'W': return put_word(t, c == 'W');
    default: break;
    }
    if (strchr(refused_escapes, c) && !(c == 'b' && t->in_class))
        return err_set(t->err, ERR_UNSUPPORTED,
                       "the pre-tokenizer's pattern cannot be used: \\%c is not supported", c);
    buf_add_char(t->out, '\\');
    buf_add_char(t->out, c);
    return OK;
}

/* Translates one character inside brackets that is not an escape. */
static enum status put_class_char(struct translation *t, size_t opened)
{
    char c = t->in.p[t->at], next = t->at + 1 < t->in.n ? t->in.p[t->at + 1] : 0;
    if (c == '[' && next != ':')
        return err_set(
            t->err, ERR_UNSUPPORTED,
            "the pre-tokenizer's pattern cannot be used: brackets inside brackets (at byte %zu)",
            t->at);
    if (c == '&' && next == '&')
        return err_set(
            t->err, ERR_UNSUPPORTED,
            "the pre-tokenizer's pattern cannot be used: && inside brackets (at byte %zu)", t->at);
    size_t posix = c == '[' ? str_find(str_sub(t->in, t->at, SIZE_MAX), STR(":]")) : SIZE_MAX;
    size_t n = posix == SIZE_MAX ? 1 : posix + 2;
    if (c == ']' && t->at > opened) t->in_class = false;
    buf_add(t->out, t->in.p + t->at, n);
    t->at += n;
    return OK;
}

enum status regex_translate(struct str regex, struct buf *out, struct err *err)
{
    struct translation t = { .in = regex, .out = out, .err = err };
    size_t opened = 0; /* position of the first member of the class, which may be a ']' */
    while (t.at < regex.n) {
        char c = regex.p[t.at], next = t.at + 1 < regex.n ? regex.p[t.at + 1] : 0;
        if (c == '\\' && t.at + 1 < regex.n) {
            TRY(put_escape(&t, next));
        } else if (t.in_class) {
            TRY(put_class_char(&t, opened));
        } else {
            buf_add_char(out, c);
            t.at++;
            t.in_class = c == '[';
            opened = t.at + (next == '^');
            if (t.in_class && next == '^') buf_add_char(out, regex.p[t.at++]);
        }
    }
    return OK;
}
