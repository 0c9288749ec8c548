/* config_help.c - what people read about the option table: --help and the tables of
 * docs/configuration.md. Thread: any. */
#include "deploy/options/config.h"
#include "deploy/options/config_internal.h"

#include <ctype.h>
#include <string.h>

#include "deploy/options/near_name.h"

enum { HELP_WIDTH = 100, HELP_INDENT = 8 };

static const char *type_word(enum option_type type)
{
    switch (type) {
    case OPT_BOOL: return "true or false";
    case OPT_INT: return "whole number";
    case OPT_FLOAT: return "number";
    case OPT_STRING: return "text";
    case OPT_ENUM: return "choice";
    case OPT_LIST: return "list";
    case OPT_JSON: return "JSON";
    }
    return "";
}

static void add_dashed(struct buf *out, struct str name)
{
    buf_add_c(out, name.n <= 2 ? "-" : "--");
    buf_add_str(out, name);
}

static void add_words(struct buf *out, const char *words, const char *quote)
{
    struct str rest = str_of(words), word;
    for (bool first = true; option_next_word(&rest, &word); first = false)
        buf_printf(out, "%s%s%.*s%s", first ? "" : ", ", quote, STR_ARG(word), quote);
}

/* The first option of a group starts it: groups appear in the order of the table. */
static bool begins_group(const struct option *const *table, size_t i_option,
                         bool (*shown)(const struct option *option, const void *arg),
                         const void *arg)
{
    const char *group = option_at(table, i_option)->group;
    for (size_t i = 0; i < i_option; i++) {
        const struct option *option = option_at(table, i);
        if (shown(option, arg) && strcmp(option->group, group) == 0) return false;
    }
    return true;
}

/* People write "max model len", "max_model_len" and "max-model-len". */
static int folded(char c) { return c == ' ' || c == '_' ? '-' : tolower((unsigned char)c); }

static bool begins_with(const char *text, struct str word)
{
    size_t i = 0;
    while (i < word.n && text[i] && folded(text[i]) == folded(word.p[i])) i++;
    return i == word.n;
}

static bool has_word(const char *text, struct str word)
{
    for (; text && *text; text++)
        if (begins_with(text, word)) return true;
    return false;
}

static bool is_named(const struct option *option, struct str word)
{
    struct str rest = str_of(option->aliases), alias;
    if (strlen(option->name) == word.n && begins_with(option->name, word)) return true;
    while (option_next_word(&rest, &alias))
        if (alias.n == word.n && begins_with(alias.p, word)) return true;
    return false;
}

/* What an option must have of the word. All in turn: the option somebody names comes before those
 * that mention it. */
enum about { ABOUT_NAMED, ABOUT_NAME, ABOUT_HELP, ABOUT_ANY };

struct shown {
    const struct config_help_options *o;
    struct str word;
    enum about about;
};

static enum about about_word(const struct option *option, struct str word)
{
    if (is_named(option, word)) return ABOUT_NAMED;
    if (has_word(option->name, word) || has_word(option->aliases, word) ||
        has_word(option->env, word) || has_word(option->service_env, word))
        return ABOUT_NAME;
    return has_word(option->help, word) ? ABOUT_HELP : ABOUT_ANY;
}

/* Ranks are what people look for first, so --help also says which of their options have no effect.
 * */
static bool shown_in_help(const struct option *option, const void *arg)
{
    const struct shown *s = arg;
    if (s->about != ABOUT_ANY && about_word(option, s->word) != s->about) return false;
    return option_applies_to(option, s->o->command) &&
           (s->o->all || option->effect == EFFECT_WORKS ||
            strcmp(option->group, "Parallelism") == 0);
}

static bool shown_in_docs(const struct option *option, const void *arg)
{
    (void)option;
    (void)arg;
    return true;
}

static void add_placeholder(const struct option *option, struct buf *out)
{
    switch (option->type) {
    case OPT_BOOL: break;
    case OPT_INT: buf_add_c(out, " N"); break;
    case OPT_FLOAT: buf_add_c(out, " X"); break;
    case OPT_STRING: buf_add_c(out, " TEXT"); break;
    case OPT_ENUM: buf_printf(out, " %s", option->choices); break;
    case OPT_LIST: buf_add_c(out, " A,B,..."); break;
    case OPT_JSON: buf_add_c(out, " JSON"); break;
    }
}

/* Appends the words of `text`, indented, with line breaks before HELP_WIDTH. */
static void add_wrapped(struct buf *out, struct str text)
{
    struct str word;
    size_t column = HELP_WIDTH;
    while (option_next_word(&text, &word)) {
        if (column + 1 + word.n > HELP_WIDTH) {
            buf_printf(out, "%s%*s", out->len && out->data[out->len - 1] != '\n' ? "\n" : "",
                       HELP_INDENT, "");
            column = HELP_INDENT;
        } else {
            buf_add_char(out, ' ');
            column++;
        }
        buf_add_str(out, word);
        column += word.n;
    }
    buf_add_char(out, '\n');
}

static void add_variables(struct buf *out, const char *heading, const char *names)
{
    if (!names) return;
    buf_add_c(out, heading);
    add_words(out, names, "");
    buf_add_char(out, '.');
}

static void add_help_option(const struct option *option, struct buf *out)
{
    buf_printf(out, "  --%s", option->name);
    struct str rest = str_of(option->aliases), word;
    while (option_next_word(&rest, &word)) {
        buf_add_c(out, ", ");
        add_dashed(out, word);
    }
    add_placeholder(option, out);
    buf_add_char(out, '\n');
    struct buf text = { 0 };
    buf_add_c(&text, option->help);
    if (option->effect == EFFECT_ACCEPTED)
        buf_printf(&text, " Accepted: %s", option->note ? option->note : "has no effect here.");
    if (option->effect == EFFECT_REFUSED)
        buf_printf(&text, " Refused: %s", option->note ? option->note : "not supported.");
    if (option_has_range(option))
        buf_printf(&text, " From %.15g to %.15g.", option->min, option->max);
    if (option->def) buf_printf(&text, " Default: %s.", *option->def ? option->def : "empty");
    add_variables(&text, " Environment: ", option->env);
    add_variables(&text, " Of start_server: ", option->service_env);
    add_wrapped(out, buf_str(&text));
    buf_release(&text);
}

static void add_options(const struct option *const *table, const struct shown *s, struct buf *out)
{
    const struct option *first, *option;
    for (size_t i = 0; (first = option_at(table, i)); i++) {
        if (!shown_in_help(first, s) || !begins_group(table, i, shown_in_help, s)) continue;
        buf_printf(out, "\n%s\n", first->group);
        for (size_t j = i; (option = option_at(table, j)); j++)
            if (shown_in_help(option, s) && strcmp(option->group, first->group) == 0)
                add_help_option(option, out);
    }
}

void config_help(const struct option *const *table, const struct config_help_options *o,
                 struct buf *out)
{
    if (o->intro) buf_add_c(out, o->intro);
    struct shown s = { .o = o, .word = str_of(o->word), .about = ABOUT_ANY };
    bool dashed = str_starts(s.word, "-");
    while (str_starts(s.word, "-")) s.word = str_sub(s.word, 1, SIZE_MAX);
    if (!s.word.n) {
        add_options(table, &s, out);
        return;
    }
    size_t before = out->len;
    for (s.about = ABOUT_NAMED; s.about < ABOUT_ANY; s.about++) {
        add_options(table, &s, out);
        /* "-c" is that option; its letter is in the name of nearly every other. */
        if (s.about == ABOUT_NAMED && out->len > before && (dashed || s.word.n <= 2)) return;
    }
}

struct str config_help_near(const struct option *const *table, const char *command,
                            const char *typed)
{
    struct near_search s;
    const struct option *o;
    near_begin(&s, str_of(typed + strspn(typed, "-")));
    for (size_t i = 0; (o = option_at(table, i)); i++) {
        struct str rest = str_of(o->aliases), alias;
        if (!option_applies_to(o, command)) continue;
        near_offer(&s, str_of(o->name), i);
        while (option_next_word(&rest, &alias)) near_offer(&s, alias, i);
    }
    return near_found(&s);
}

/* Adds text to a table cell: '|' would end the cell, a line break the row, '<' could begin a tag.
 * */
static void add_cell(struct buf *out, const char *text)
{
    for (const char *c = text; c && *c; c++) {
        if (*c == '|') buf_add_c(out, "\\|");
        else if (*c == '<') buf_add_c(out, "&lt;");
        else buf_add_char(out, *c == '\n' ? ' ' : *c);
    }
}

static void add_type_cell(const struct option *option, struct buf *out)
{
    if (option->type == OPT_ENUM) {
        struct str rest = str_of(option->choices), word;
        for (bool first = true; str_split(&rest, '|', &word); first = false)
            buf_printf(out, "%s`%.*s`", first ? "" : ", ", STR_ARG(word));
        return;
    }
    buf_add_c(out, type_word(option->type));
    if (option_has_range(option)) buf_printf(out, ", %.15g to %.15g", option->min, option->max);
}

static void add_effect_cell(const struct option *option, struct buf *out)
{
    if (option->effect == EFFECT_WORKS) {
        buf_add_c(out, "works");
        return;
    }
    buf_add_c(out, option->effect == EFFECT_ACCEPTED ? "accepted" : "refused");
    if (option->neutral) {
        struct str rest = str_of(option->neutral), word;
        for (bool first = true; str_split(&rest, '|', &word); first = false)
            buf_printf(out, "%s`%.*s`", first ? " unless " : " or ", STR_ARG(word));
    }
    if (option->note) {
        buf_add_c(out, ": ");
        add_cell(out, option->note);
    }
}

static void add_default(const char *def, struct buf *out)
{
    if (!def) return;
    buf_add_c(out, *def ? "`" : "empty");
    add_cell(out, def);
    if (*def) buf_add_char(out, '`');
}

static void add_markdown_row(const struct option *option, struct buf *out)
{
    buf_printf(out, "| `--%s` | ", option->name);
    struct str rest = str_of(option->aliases), word;
    for (bool first = true; option_next_word(&rest, &word); first = false) {
        buf_add_c(out, first ? "`" : ", `");
        add_dashed(out, word);
        buf_add_char(out, '`');
    }
    buf_add_c(out, " | ");
    add_words(out, option->env, "`");
    if (option->service_env) {
        buf_add_c(out, option->env ? "; of start_server " : "of start_server ");
        add_words(out, option->service_env, "`");
    }
    buf_add_c(out, " | ");
    add_type_cell(option, out);
    buf_add_c(out, " | ");
    add_default(option->def, out);
    if (option->service_def) {
        buf_add_c(out, option->def ? "; of start_server " : "of start_server ");
        add_default(option->service_def, out);
    }
    buf_add_c(out, " | ");
    add_cell(out, option->help);
    if (option->commands) {
        buf_add_c(out, " Commands: ");
        add_words(out, option->commands, "`");
        buf_add_char(out, '.');
    }
    buf_add_c(out, " | ");
    add_effect_cell(option, out);
    buf_add_c(out, " |\n");
}

void config_markdown(const struct option *const *table, struct buf *out)
{
    const struct option *first, *option;
    for (size_t i = 0; (first = option_at(table, i)); i++) {
        if (!begins_group(table, i, shown_in_docs, NULL)) continue;
        buf_printf(out, "%s## %s\n\n", i == 0 ? "" : "\n", first->group);
        buf_add_c(out, "| Option | Aliases | Environment | Type and range | Default | What it does "
                       "| Effect |\n"
                       "|---|---|---|---|---|---|---|\n");
        for (size_t j = i; (option = option_at(table, j)); j++)
            if (strcmp(option->group, first->group) == 0) add_markdown_row(option, out);
    }
}

/* ---- which variables of other systems gave what, on the start page ---- */

/* BATON_ variables and flags are the options' own names: the lines about the options say enough. */
static bool is_foreign(const struct option_value *v)
{
    return v->source != SOURCE_DEFAULT && v->given_as && v->given_as[0] != '-' &&
           !strchr(v->given_as, ' ') && strncmp(v->given_as, "BATON_", strlen("BATON_")) != 0;
}

static void add_value(const struct option *option, const struct option_value *v, struct buf *out)
{
    if (option->secret) return;
    if (option->type != OPT_LIST) buf_printf(out, " %.200s", v->text);
    for (size_t i = 0; i < v->n_items; i++) buf_printf(out, "%s%.200s", i ? "," : " ", v->items[i]);
}

void config_print_variables(const struct config *c, struct buf *out)
{
    bool any = false;
    for (size_t i = 0; i < c->n_options; i++) {
        const struct option *option = c->options[i];
        const struct option_value *v = &c->values[i];
        if (!is_foreign(v) || option->effect != EFFECT_WORKS ||
            !option_applies_to(option, c->command))
            continue;
        buf_printf(out, "  %-12s %s is --%s", any ? "" : "variables", v->given_as, option->name);
        add_value(option, v, out);
        buf_add_char(out, '\n');
        any = true;
    }
}
