/* near_name.c - see near_name.h. Thread: any. */
#include "deploy/options/near_name.h"

#include <ctype.h>
#include <stdint.h>
#include <string.h>

enum {
    COST_WORDS = 8, /* nearness by words comes after any by letters */
    SHORTENED_MIN = 3,
    LONE_WORD_MIN = 5
};

/* Copies a name in the form in which names are compared; 0: it is too long. */
static size_t fold(struct str name, char out[NEAR_NAME_MAX])
{
    if (name.n > NEAR_NAME_MAX) return 0;
    for (size_t i = 0; i < name.n; i++)
        out[i] = name.p[i] == '_' ? '-' : (char)tolower((unsigned char)name.p[i]);
    return name.n;
}

static size_t min_of(size_t a, size_t b) { return a < b ? a : b; }

/* Letters to add, to remove, to change or to swap with their neighbour (Damerau and Levenshtein,
 * optimal string alignment). */
static size_t n_slips(struct str a, struct str b)
{
    size_t rows[3][NEAR_NAME_MAX + 1], *before = rows[0], *last = rows[1], *row = rows[2];
    for (size_t j = 0; j <= b.n; j++) row[j] = j;
    for (size_t i = 1; i <= a.n; i++) {
        size_t *oldest = before;
        before = last;
        last = row;
        row = oldest;
        row[0] = i;
        for (size_t j = 1; j <= b.n; j++) {
            row[j] = min_of(last[j - 1] + (a.p[i - 1] != b.p[j - 1]),
                            min_of(last[j], row[j - 1]) + 1);
            if (i > 1 && j > 1 && a.p[i - 1] == b.p[j - 2] && a.p[i - 2] == b.p[j - 1])
                row[j] = min_of(row[j], before[j - 2] + 1);
        }
    }
    return row[b.n];
}

static bool near_by_letters(struct str typed, struct str name, size_t *cost)
{
    size_t n = min_of(typed.n, name.n);
    if (typed.n < 4 && name.n < 4) return false; /* any such names are near to each other */
    size_t most = n < 6 || typed.p[0] != name.p[0] ? 1 : n < 11 ? 2 : 3;
    *cost = n_slips(typed, name);
    return *cost <= most;
}

/* Is one word the other, or its beginning ("len", "length")? */
static bool same_word(struct str a, struct str b)
{
    size_t n = min_of(a.n, b.n);
    return (a.n == b.n || n >= SHORTENED_MIN) && memcmp(a.p, b.p, n) == 0;
}

/* A name has a word more for each that was not typed. */
static bool near_by_words(struct str typed, struct str name, size_t *cost)
{
    struct str word, want;
    bool more = str_split(&typed, '-', &want), lone = more && !typed.p;
    *cost = COST_WORDS;
    if (lone && want.n < LONE_WORD_MIN) return false;
    while (str_split(&name, '-', &word)) {
        bool longer = lone && want.n > word.n; /* "password" is not "pass" */
        if (more && want.n && !longer && same_word(want, word))
            more = str_split(&typed, '-', &want);
        else ++*cost;
    }
    return !more;
}

void near_begin(struct near_search *s, struct str typed)
{
    *s = (struct near_search){ .cost = SIZE_MAX };
    s->n_typed = fold(typed, s->typed);
}

void near_offer(struct near_search *s, struct str name, size_t i)
{
    char folded[NEAR_NAME_MAX];
    struct str typed = { s->typed, s->n_typed }, known = { folded, fold(name, folded) };
    size_t cost;
    if (!typed.n || !known.n) return;
    if (!near_by_letters(typed, known, &cost) && !near_by_words(typed, known, &cost)) return;
    if (cost > s->cost || (cost == s->cost && s->found.n && s->i_found == i)) return;
    s->found = cost < s->cost ? name : (struct str){ NULL, 0 };
    s->cost = cost;
    s->i_found = i;
}

struct str near_found(const struct near_search *s) { return s->found; }
