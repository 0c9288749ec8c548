/* config_flag.c - finds the option that a flag names, and says what may have been meant when there
 * is none. Thread: main. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "deploy/options/config_internal.h"
#include "deploy/options/near_name.h"

enum { SHORT_FLAG = 2 /* letters; such a flag has one dash */ };

static bool name_eq(struct str a, struct str b)
{
    if (a.n != b.n) return false;
    for (size_t i = 0; i < a.n; i++)
        if ((a.p[i] == '_' ? '-' : a.p[i]) != (b.p[i] == '_' ? '-' : b.p[i])) return false;
    return true;
}

static bool option_has_name(const struct option *option, struct str name, bool aliases_only)
{
    if (!aliases_only && name_eq(str_of(option->name), name)) return true;
    struct str rest = str_of(option->aliases), word;
    while (option_next_word(&rest, &word))
        if (name_eq(word, name)) return true;
    return false;
}

size_t config_find_flag(const struct config *c, struct str name, bool aliases_only,
                        const char *command)
{
    for (size_t i = 0; i < c->n_options; i++)
        if (option_applies_to(c->options[i], command) &&
            option_has_name(c->options[i], name, aliases_only))
            return i;
    return SIZE_MAX;
}

/* ---- what may have been meant ---- */

/* Searches the names and aliases of the options that the command takes. */
static struct near_search nearest(const struct config *c, struct str name)
{
    struct near_search s;
    near_begin(&s, name);
    for (size_t i = 0; i < c->n_options; i++) {
        if (!option_applies_to(c->options[i], c->command) ||
            c->options[i]->effect == EFFECT_REFUSED)
            continue;
        near_offer(&s, str_of(c->options[i]->name), i);
        struct str rest = str_of(c->options[i]->aliases), word;
        while (option_next_word(&rest, &word)) near_offer(&s, word, i);
    }
    return s;
}

/* An option that others have switched off with "no" or "disable". */
static bool say_negated(const struct config *c, struct str word, struct str name, struct err *err)
{
    static const char *const prefixes[] = { "no-", "disable-", "no_", "disable_" };
    for (size_t i = 0; i < COUNT_OF(prefixes); i++) {
        if (!str_starts(name, prefixes[i])) continue;
        struct str rest = str_sub(name, strlen(prefixes[i]), SIZE_MAX);
        size_t i_option = config_find_flag(c, rest, false, c->command);
        if (i_option == SIZE_MAX) {
            struct near_search s = nearest(c, rest);
            if (!near_found(&s).n) continue;
            i_option = s.i_found;
        }
        const struct option *option = c->options[i_option];
        if (option->type != OPT_BOOL) continue;
        (void)err_set(err, ERR_CONFIG, "there is no option %.*s; did you mean --no-%s?",
                      STR_ARG(word), option->name);
        return true;
    }
    return false;
}

static enum status say_of_other_command(const struct config *c, struct str word, struct str name,
                                        const struct option *option, struct err *err)
{
    char plural[64]; /* one node's --port, the --ports of several */
    snprintf(plural, sizeof plural, "%.60ss", option->name);
    if (config_find_flag(c, str_of(plural), false, c->command) != SIZE_MAX)
        return err_set(err, ERR_CONFIG, "%.*s is not an option of \"%s\"; did you mean --%s?",
                       STR_ARG(word), c->command, plural);
    /* A letter means something else to everybody, so its long name says what it is. */
    if (name.n <= SHORT_FLAG)
        return err_set(err, ERR_CONFIG,
                       "there is no option %.*s of \"%s\" (elsewhere it is --%s: %s); --help shows "
                       "all",
                       STR_ARG(word), c->command, option->name, option->commands);
    return err_set(err, ERR_CONFIG, "%.*s is not an option of \"%s\"; these take it: %s",
                   STR_ARG(word), c->command, option->commands);
}

/* Have options of the command the lone word `name` in theirs? */
static bool is_in_names(const struct config *c, struct str name)
{
    size_t n = 0;
    if (name.n <= SHORT_FLAG) return false;
    for (size_t i = 0; i < c->n_options; i++) {
        struct str rest = str_of(c->options[i]->name), word;
        if (c->options[i]->effect != EFFECT_WORKS || !option_applies_to(c->options[i], c->command))
            continue;
        while (str_split(&rest, '-', &word))
            if (str_eq(word, name)) n++;
    }
    return n > 0;
}

enum status config_unknown_flag(const struct config *c, struct str word, struct str name,
                                struct err *err)
{
    word = str_sub(word, 0, 80);
    size_t other = config_find_flag(c, name, false, NULL);
    if (other != SIZE_MAX && !option_applies_to(c->options[other], c->command))
        return say_of_other_command(c, word, name, c->options[other], err);
    if (say_negated(c, word, name, err)) return ERR_CONFIG;
    struct near_search s = nearest(c, name);
    struct str meant = near_found(&s);
    if (meant.n)
        return err_set(err, ERR_CONFIG, "there is no option %.*s; did you mean --%.*s?",
                       STR_ARG(word), STR_ARG(meant));
    if (is_in_names(c, name))
        return err_set(err, ERR_CONFIG, "there is no option %.*s; --help=%.*s shows those about it",
                       STR_ARG(word), STR_ARG(name));
    return err_set(err, ERR_CONFIG, "there is no option %.*s; --help shows all", STR_ARG(word));
}
