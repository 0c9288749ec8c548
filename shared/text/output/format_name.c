/* format_name.c - see format_name.h. Thread: any. */
#include "shared/text/output/format_name.h"

static char next_letter(struct str *s)
{
    while (s->n > 0) {
        char c = s->p[0];
        *s = str_sub(*s, 1, SIZE_MAX);
        if (c != '-' && c != '_' && c != '.') return c;
    }
    return 0;
}

static bool same(struct str a, struct str b)
{
    for (;;) {
        char x = next_letter(&a), y = next_letter(&b);
        if (x != y) return false;
        if (!x) return true;
    }
}

bool format_is_named(struct str given, const char *name, const char *aliases)
{
    struct str rest = str_of(aliases), one;
    if (same(given, str_of(name))) return true;
    while (str_split(&rest, ' ', &one))
        if (one.n && same(given, one)) return true;
    return false;
}

bool format_is_auto_or_none(struct str given)
{
    return str_eq_c(given, "auto") || str_eq_c(given, "none");
}
