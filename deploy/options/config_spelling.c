/* config_spelling.c - see config_spelling.h. Thread: main. */
#include "deploy/options/config_spelling.h"

#include <ctype.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "shared/base/mem.h"

bool spelling_number(const char *text, char out[SPELLING_NUMBER_MAX])
{
    static const struct {
        char suffix;
        double factor;
    } SUFFIXES[] = { { 'k', 1e3 },    { 'm', 1e6 },    { 'g', 1e9 },
                     { 'K', 0x1p10 }, { 'M', 0x1p20 }, { 'G', 0x1p30 } };
    size_t n = strlen(text);
    double v;
    if (n < 2 || text[0] < '0' || text[0] > '9' ||
        str_to_f64((struct str){ text, n - 1 }, &v) != OK)
        return false;
    for (size_t i = 0; i < COUNT_OF(SUFFIXES); i++) {
        if (text[n - 1] != SUFFIXES[i].suffix) continue;
        v *= SUFFIXES[i].factor;
        if (v != floor(v) || v > 0x1p53) return false;
        snprintf(out, SPELLING_NUMBER_MAX, "%.0f", v);
        return true;
    }
    return false;
}

bool spelling_port_range(struct str text, int64_t *first, int64_t *last)
{
    size_t dash = str_find_char(text, '-');
    return dash != SIZE_MAX && dash > 0 && str_to_i64(str_sub(text, 0, dash), first) == OK &&
           str_to_i64(str_sub(text, dash + 1, SIZE_MAX), last) == OK && *first >= 1 &&
           *last <= UINT16_MAX && *first <= *last;
}

#define NO_BREAK_SPACE "\xC2\xA0"

/* "2--decoder-hosts": a shell joins two lines where no blank stands before the backslash. Returns
 * where the flag begins; NULL: it is not that. */
static const char *flag_behind_number(const char *word)
{
    const char *end = word + strspn(word, "0123456789");
    return end > word && end[0] == '-' && end[1] == '-' && islower((unsigned char)end[2]) ? end
                                                                                          : NULL;
}

/* "--port<nbsp>80", "8<nbsp>--rank"; not a value like "--prompt=a<nbsp>b". */
static bool holds_flags(const char *word)
{
    if (flag_behind_number(word)) return true;
    const char *blank = strstr(word, NO_BREAK_SPACE);
    if (!blank || strcspn(word, "=") < (size_t)(blank - word)) return false;
    return word[0] == '-' || strstr(word, NO_BREAK_SPACE "--");
}

static int split_word(struct arena *arena, const char *word, char **out)
{
    int n = 0;
    const char *flag = flag_behind_number(word);
    if (flag) out[n++] = arena_strndup(arena, word, (size_t)(flag - word));
    if (flag) word = flag;
    for (const char *end; *word; word = end) {
        end = strstr(word, NO_BREAK_SPACE);
        if (!end) end = word + strlen(word);
        if (end > word) out[n++] = arena_strndup(arena, word, (size_t)(end - word));
        if (*end) end += strlen(NO_BREAK_SPACE);
    }
    return n;
}

char **spelling_split_words(struct arena *arena, int *argc, char **argv)
{
    size_t most = 0;
    bool any = false;
    for (int i = 0; i < *argc; i++) {
        any |= holds_flags(argv[i]);
        most += 2 + strlen(argv[i]) / strlen(NO_BREAK_SPACE);
    }
    if (!any) return argv;
    char **out = ARENA_ARRAY(arena, char *, most);
    int n = 0;
    for (int i = 0; i < *argc; i++) {
        if (holds_flags(argv[i])) n += split_word(arena, argv[i], out + n);
        else out[n++] = argv[i];
    }
    *argc = n;
    return out;
}

enum status spelling_check_word(const char *word, struct err *err)
{
    static const char *const DASHES[] = { "\xE2\x80\x93", "\xE2\x80\x94", "\xE2\x88\x92" };
    if (word[0] && word[strspn(word, " \t")] == 0)
        return err_set(err, ERR_CONFIG,
                       "a word of blanks alone: most likely a blank stands behind a backslash at "
                       "the end of a line, so that the shell ended the command there");
    for (size_t i = 0; i < COUNT_OF(DASHES); i++) {
        const char *rest = word;
        while (str_starts(str_of(rest), DASHES[i])) rest += strlen(DASHES[i]);
        if (rest == word) continue;
        rest += strspn(rest, "-");
        return err_set(err, ERR_CONFIG,
                       "\"%.80s\" begins with a long dash, which editors put for two hyphens; "
                       "write --%.80s",
                       word, rest);
    }
    return OK;
}

/* Of a Service `baton` these are BATON_SERVICE_HOST, BATON_SERVICE_PORT, .._PORT_HTTP, BATON_PORT
 * (an URL) and BATON_PORT_8000_TCP, .._TCP_ADDR and so on. */
bool spelling_is_of_service(struct str name, struct str value)
{
    if (str_ends(name, "_SERVICE_HOST") || str_find(name, STR("_SERVICE_PORT")) != SIZE_MAX)
        return true;
    size_t at = str_find(name, STR("_PORT"));
    if (at == SIZE_MAX) return false;
    struct str after = str_sub(name, at + strlen("_PORT"), SIZE_MAX);
    if (!after.n)
        return str_starts(value, "tcp://") || str_starts(value, "udp://") ||
               str_starts(value, "sctp://");
    return after.n > 1 && after.p[0] == '_' && after.p[1] >= '0' && after.p[1] <= '9';
}
