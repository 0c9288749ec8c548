/* compatibility.c - see compatibility.h. */
#include "deploy/options/compatibility.h"

#include <stdlib.h>
#include <string.h>

#include "deploy/options/option_table.h"
#include "shared/base/assert.h"

extern char **environ;

/* Is `word` in a list separated by spaces? */
static bool has_word(const char *list, const char *word)
{
    struct str rest = str_of(list), item;
    while (str_split(&rest, ' ', &item))
        if (item.n && str_eq_c(item, word)) return true;
    return false;
}

static const struct option *option_of_flag(const char *name)
{
    const struct option *o;
    for (size_t i = 0; (o = option_at(OPTIONS, i)); i++)
        if (strcmp(o->name, name) == 0 || has_word(o->aliases, name)) return o;
    return NULL;
}

static const struct option *option_of_env(const char *name)
{
    const struct option *o;
    for (size_t i = 0; (o = option_at(OPTIONS, i)); i++)
        if (has_word(o->env, name)) return o;
    return NULL;
}

bool compatibility_resolve(const struct compat_entry *entry, enum option_effect *effect,
                           const char **sentence)
{
    *effect = entry->effect;
    *sentence = entry->sentence;
    if (entry->sentence) return true;
    const struct option *o = entry->kind == COMPAT_FLAG ? option_of_flag(entry->name + strlen("--"))
                                                        : option_of_env(entry->name);
    if (!o) return false;
    *effect = o->effect;
    *sentence = o->effect == EFFECT_WORKS || !o->note ? o->help : o->note;
    return true;
}

/* ---- the page ---- */

static const char *effect_word(enum option_effect effect)
{
    return effect == EFFECT_WORKS      ? "works"
           : effect == EFFECT_ACCEPTED ? "accepted without effect"
                                       : "refused";
}

/* Adds text to a table cell: '|' would end the cell, '<' could begin a tag. */
static void add_cell(struct buf *out, const char *text)
{
    for (const char *c = text; *c; c++) {
        if (*c == '|') buf_add_c(out, "\\|");
        else if (*c == '<') buf_add_c(out, "&lt;");
        else buf_add_char(out, *c);
    }
}

static void add_entry(const struct compat_entry *entry, struct buf *out)
{
    enum option_effect effect;
    const char *sentence;
    bool resolved = compatibility_resolve(entry, &effect, &sentence);
    ASSERT(resolved);
    buf_printf(out, "| `%s`", entry->name);
    if (entry->owner) buf_printf(out, " of %s", entry->owner);
    buf_printf(out, " | %s | %s | ", *entry->seeds ? entry->seeds : "-", effect_word(effect));
    add_cell(out, sentence);
    buf_add_c(out, " |\n");
}

void compatibility_markdown(struct buf *out)
{
    static const char *const headings[COMPAT_N_KINDS] = { [COMPAT_COMMAND] = "Commands",
                                                          [COMPAT_FLAG] = "Flags",
                                                          [COMPAT_ENV] = "Environment variables",
                                                          [COMPAT_VALUE] = "Values and models" };
    buf_add_c(out, "# Compatibility\n\n"
                   "What becomes of every command, flag, environment variable and value in five\n"
                   "documents that our users have in hand: 000 FastDeploy, data parallel service;\n"
                   "001 the same page, older; 002 vLLM-Ascend, distributed data parallel with\n"
                   "large-scale expert parallelism; 003 FastDeploy, ERNIE-4.5-21B-A3B; 004\n"
                   "PaddleNLP, static-graph deployment. A flag without a document (-) is frequent\n"
                   "with llama.cpp's server, vLLM or SGLang; docs/configuration.md has more.\n\n"
                   "* **works**: does what the document says.\n"
                   "* **accepted without effect**: changes no answer here; a node says so once\n"
                   "  when it starts.\n"
                   "* **refused**: cannot be honoured; a flag or value stops the start with its\n"
                   "  sentence, a command has no counterpart.\n\n"
                   "A variable of start_server alone has a name that other programs have as well:\n"
                   "only what `start_server` starts reads it, `serve` by itself says so and does\n"
                   "not (docs/start_server.md).\n\n"
                   "This page is printed by `baton docs compatibility`; a test holds it against\n"
                   "the documents and the program.\n");
    for (int kind = 0; kind < COMPAT_N_KINDS; kind++) {
        buf_printf(
            out, "\n## %s\n\n| Name | Documents | Effect | What Baton does |\n|---|---|---|---|\n",
            headings[kind]);
        for (const struct compat_entry *entry = COMPATIBILITY; entry->name; entry++)
            if ((int)entry->kind == kind) add_entry(entry, out);
    }
}

const struct compat_entry *compatibility_value(const char *name)
{
    for (const struct compat_entry *entry = COMPATIBILITY; entry->name; entry++)
        if (entry->kind == COMPAT_VALUE && strcmp(entry->name, name) == 0) return entry;
    return NULL;
}

/* ---- at start ---- */

/* The entry of a variable: its own, or its family's. */
static const struct compat_entry *entry_of_env(struct str name)
{
    const struct compat_entry *family = NULL;
    for (const struct compat_entry *entry = COMPATIBILITY; entry->name; entry++) {
        if (entry->kind != COMPAT_ENV) continue;
        struct str pattern = str_of(entry->name);
        if (str_eq(pattern, name)) return entry;
        if (str_ends(pattern, "*") && name.n >= pattern.n &&
            memcmp(name.p, pattern.p, pattern.n - 1) == 0)
            family = entry;
    }
    return family;
}

static void note_of(struct str name, bool is_service, struct buf *out)
{
    enum option_effect effect;
    const char *sentence;
    const struct compat_entry *entry = entry_of_env(name);
    buf_add_str(out, name);
    if (entry && !entry->quiet && compatibility_resolve(entry, &effect, &sentence) &&
        (effect != EFFECT_WORKS || (entry->start_only && !is_service)) && !option_of_env(out->data))
        buf_printf(out, ": %s", sentence);
    else buf_clear(out); /* no note; or an option reads this variable, though not its family */
}

void compatibility_env_notes(bool is_service, void (*emit)(void *arg, const char *sentence),
                             void *arg)
{
    struct buf note = { 0 };
    for (char **e = environ; e && *e; e++) {
        size_t n = strcspn(*e, "=");
        if (!(*e)[n] || !(*e)[n + 1]) continue; /* empty counts as absent */
        buf_clear(&note);
        note_of((struct str){ *e, n }, is_service, &note);
        if (note.len) emit(arg, note.data);
    }
    buf_release(&note);
}
