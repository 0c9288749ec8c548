/* config.c - reads values for the option table from the environment and the command line.
 *
 * Every value is checked when it is given, and errors name the flag or variable. Values are kept as
 * text (lists as items); the getters convert text that was checked before. An empty environment
 * variable counts as absent. In names '_' equals '-'. A later flag replaces an earlier one, but a
 * repeated list grows.
 * Thread: loop, at start; read-only afterwards. */
#include "deploy/options/config.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "deploy/options/config_internal.h"
#include "deploy/options/config_spelling.h"
#include "deploy/service/foreign_value.h"
#include "shared/base/assert.h"
#include "shared/base/mem.h"

enum { ITEMS_MAX = 4096 };

/* Where a value comes from; the parser uses it in its sentences. */
struct value_origin {
    enum option_source source;
    const char *given_as; /* as the user wrote it */
};

bool option_next_word(struct str *rest, struct str *word)
{
    while (str_split(rest, ' ', word))
        if (word->n) return true;
    return false;
}

bool option_applies_to(const struct option *option, const char *command)
{
    if (!option->commands || !command) return true;
    struct str rest = str_of(option->commands), word;
    while (option_next_word(&rest, &word))
        if (str_eq_c(word, command)) return true;
    return false;
}

/* ---- storing ---- */

static void value_clear(struct option_value *v)
{
    for (size_t i = 0; i < v->n_items; i++) mem_free(v->items[i]);
    mem_free(v->items);
    mem_free(v->text);
    mem_free(v->given_as);
    *v = (struct option_value){ 0 };
}

static enum status add_item(struct option_value *v, const struct option *option, struct str item,
                            struct err *err)
{
    if (v->n_items == ITEMS_MAX)
        return err_field(err, ERR_CONFIG, option->name, "--%s has more than %d items", option->name,
                         ITEMS_MAX);
    v->items = mem_realloc(v->items, v->n_items + 1, sizeof *v->items);
    v->items[v->n_items++] = mem_strndup(item.p, item.n);
    return OK;
}

static bool is_list_of_ports(const struct option *option)
{
    return str_ends(str_of(option->name), "ports") || str_ends(str_of(option->name), "port");
}

static enum status add_items(struct option_value *v, const struct option *option, struct str text,
                             struct err *err)
{
    struct str item;
    int64_t port, last;
    char number[8];
    while (str_split(&text, ',', &item)) {
        item = str_trim(item);
        if (!item.n) continue;
        if (!is_list_of_ports(option) || !spelling_port_range(item, &port, &last)) {
            TRY(add_item(v, option, item, err));
            continue;
        }
        for (; port <= last; port++) {
            snprintf(number, sizeof number, "%d", (int)port);
            TRY(add_item(v, option, str_of(number), err));
        }
    }
    return OK;
}

/* Checks and stores. `grow`: append to a list that the same source has begun. */
static enum status store(struct config *c, size_t i_option, struct value_origin from,
                         const char *value, bool grow, struct err *err)
{
    const struct option *option = c->options[i_option];
    struct option_value *v = &c->values[i_option];
    char number[SPELLING_NUMBER_MAX];
    bool flag;
    if (option->type == OPT_INT && spelling_number(value, number)) value = number;
    if (from.source != SOURCE_ENV && option_takes_word(option, value) &&
        !option_parse_bool(str_of(value), &flag))
        value = "true";
    TRY(option_check_value(option, from.given_as, value, err));
    if (option->effect == EFFECT_REFUSED && from.source != SOURCE_DEFAULT &&
        !option_is_neutral(option, value))
        return option_refuse_value(option, from.given_as, value, err);
    if (option->type != OPT_LIST || !grow || v->source != from.source) value_clear(v);
    v->source = from.source;
    mem_free(v->given_as);
    v->given_as = from.given_as ? mem_strdup(from.given_as) : NULL;
    if (option->type == OPT_LIST) return add_items(v, option, str_of(value), err);
    v->text = mem_strdup(value);
    return OK;
}

const struct option *option_at(const struct option *const *table, size_t i)
{
    for (; *table; table++)
        for (const struct option *option = *table; option->name; option++)
            if (!i--) return option;
    return NULL;
}

struct config *config_create(const struct option *const *table, const char *command)
{
    struct config *c = MEM_NEW(struct config);
    c->command = command;
    while (option_at(table, c->n_options)) c->n_options++;
    arena_init(&c->words);
    c->options = MEM_ARRAY(const struct option *, c->n_options);
    c->values = MEM_ARRAY(struct option_value, c->n_options);
    for (size_t i = 0; i < c->n_options; i++) {
        struct value_origin from = { SOURCE_DEFAULT, NULL };
        c->options[i] = option_at(table, i);
        if (!c->options[i]->def) continue;
        /* A default that its own table entry refuses is a mistake in the table. */
        enum status st = store(c, i, from, c->options[i]->def, false, NULL);
        ASSERT(st == OK);
    }
    return c;
}

void config_free(struct config *c)
{
    if (!c) return;
    for (size_t i = 0; i < c->n_options; i++) value_clear(&c->values[i]);
    mem_free(c->values);
    mem_free(c->options);
    arena_release(&c->words);
    mem_free(c);
}

void config_as_service(struct config *c)
{
    c->service = true;
    for (size_t i = 0; i < c->n_options; i++) {
        struct value_origin from = { SOURCE_DEFAULT, "start_server's default" };
        if (!c->options[i]->service_def) continue;
        enum status st = store(c, i, from, c->options[i]->service_def, false, NULL);
        ASSERT(st == OK); /* as in config_create */
    }
}

bool config_is_service(const struct config *c) { return c->service; }

/* *given: the variable says something about the option. */
static enum status load_variable(struct config *c, size_t i_option, const char *name, bool *given,
                                 struct err *err)
{
    struct value_origin from = { SOURCE_ENV, name };
    struct buf meant = { 0 };
    const char *value = getenv(name);
    *given = value && *value;
    if (!*given) return OK;
    if (spelling_is_of_service(str_of(name), str_of(value)))
        return err_field(err, ERR_CONFIG, c->options[i_option]->name,
                         "%s is \"%.80s\", as Kubernetes sets it for a Service of that name: call "
                         "the Service otherwise, or give the pod enableServiceLinks: false",
                         name, value);
    enum status st = foreign_value(name, value, &meant, err);
    *given = meant.len > 0;
    if (st == OK && *given) st = store(c, i_option, from, meant.data, false, err);
    buf_release(&meant);
    return st;
}

/* The first variable of a list that says something. */
static enum status load_first(struct config *c, size_t i_option, const char *names, bool *given,
                              struct err *err)
{
    struct str rest = str_of(names), word;
    while (!*given && option_next_word(&rest, &word)) {
        char *name = mem_strndup(word.p, word.n);
        enum status st = load_variable(c, i_option, name, given, err);
        mem_free(name);
        if (st != OK) return st;
    }
    return OK;
}

enum status config_load_env(struct config *c, struct err *err)
{
    for (size_t i = 0; i < c->n_options; i++) {
        const struct option *option = c->options[i];
        bool given = false;
        if (!option_applies_to(option, c->command) || c->values[i].source == SOURCE_ARGS) continue;
        TRY(load_first(c, i, option->env, &given, err));
        if (c->service) TRY(load_first(c, i, option->service_env, &given, err));
    }
    return OK;
}

/* ---- the command line ---- */

/* Is this word a flag rather than a value? "-", "-1" and "-.5" are values. */
static bool looks_like_flag(const char *word)
{
    return word[0] == '-' && word[1] && !isdigit((unsigned char)word[1]) && word[1] != '.';
}

struct arg_cursor {
    int argc, i; /* i: index of the next word */
    char **argv;
};

static enum status take_list(struct config *c, size_t i_option, struct value_origin from,
                             struct arg_cursor *a, struct err *err)
{
    bool any = false;
    for (; a->i < a->argc && a->argv[a->i][0] != '-'; a->i++, any = true)
        TRY(store(c, i_option, from, a->argv[a->i], true, err));
    if (any) return OK;
    return err_field(err, ERR_CONFIG, c->options[i_option]->name, "%s needs a value",
                     from.given_as);
}

/* Stores the value of the flag just read. `value` is NULL unless it was written with '='. */
static enum status take_value(struct config *c, size_t i_option, const char *flag,
                              const char *value, struct arg_cursor *a, struct err *err)
{
    const struct option *option = c->options[i_option];
    struct value_origin from = { SOURCE_ARGS, flag };
    if (value) return store(c, i_option, from, value, true, err);
    /* "--kv-checksum off": a boolean word is the flag's value */
    if (option->type == OPT_BOOL && a->i < a->argc && option_takes_word(option, a->argv[a->i]))
        return store(c, i_option, from, a->argv[a->i++], false, err);
    if (option->type == OPT_BOOL) return store(c, i_option, from, "true", false, err);
    if (option->type == OPT_LIST) return take_list(c, i_option, from, a, err);
    if (a->i == a->argc || looks_like_flag(a->argv[a->i]))
        return err_field(err, ERR_CONFIG, option->name, "%s needs a value", flag);
    return store(c, i_option, from, a->argv[a->i++], false, err);
}

static enum status take_flag(struct config *c, const char *word, struct arg_cursor *a,
                             struct err *err)
{
    bool one_dash = word[1] != '-';
    size_t n_dashes = one_dash ? 1 : 2, n = strcspn(word, "=");
    const char *value = word[n] ? word + n + 1 : NULL;
    struct str name = { word + n_dashes, n > n_dashes ? n - n_dashes : 0 };
    size_t i_option = config_find_flag(c, name, one_dash, c->command);
    bool negated = false;
    if (i_option == SIZE_MAX && !one_dash && (str_starts(name, "no-") || str_starts(name, "no_"))) {
        i_option = config_find_flag(c, str_sub(name, 3, SIZE_MAX), false, c->command);
        negated = i_option != SIZE_MAX && c->options[i_option]->type == OPT_BOOL;
        if (!negated) i_option = SIZE_MAX;
    }
    if (i_option == SIZE_MAX) return config_unknown_flag(c, (struct str){ word, n }, name, err);
    char *flag = mem_strndup(word, n);
    enum status st;
    if (negated && value)
        st = err_field(err, ERR_CONFIG, c->options[i_option]->name, "%s takes no value", flag);
    else st = take_value(c, i_option, flag, negated ? "false" : value, a, err);
    mem_free(flag);
    return st;
}

/* A command that takes no such word may have an option for it. */
static enum status refuse_word(const struct config *c, const char *word, struct err *err)
{
    const bool is_number = word[0] && !word[strspn(word, "0123456789")];
    const char *meant = is_number ? "port" : strchr(word, ':') ? "url" : "";
    if (config_find_flag(c, str_of(meant), false, c->command) == SIZE_MAX)
        return err_set(err, ERR_CONFIG, "unexpected word \"%.80s\"", word);
    return err_set(err, ERR_CONFIG, "unexpected word \"%.80s\"; did you mean --%s %.80s?", word,
                   meant, word);
}

enum status config_load_args(struct config *c, int argc, char **argv, const char **positional,
                             int *n, struct err *err)
{
    argv = spelling_split_words(&c->words, &argc, argv);
    struct arg_cursor a = { argc, 0, argv };
    int n_found = 0, limit = n ? *n : 0;
    bool flags_end = false;
    while (a.i < argc) {
        const char *word = argv[a.i++];
        TRY(spelling_check_word(word, err));
        if (!flags_end && strcmp(word, "--") == 0) {
            flags_end = true;
        } else if (!flags_end && looks_like_flag(word)) {
            TRY(take_flag(c, word, &a, err));
        } else {
            if (n_found == limit) return refuse_word(c, word, err);
            positional[n_found++] = word;
        }
    }
    if (n) *n = n_found;
    return OK;
}

/* ---- reading ---- */

static size_t option_index(const struct config *c, const char *name)
{
    size_t found = SIZE_MAX;
    /* A name may have one entry per command; the entry of another command gives its default. */
    for (size_t i = 0; i < c->n_options; i++) {
        if (strcmp(c->options[i]->name, name) != 0) continue;
        if (option_applies_to(c->options[i], c->command)) return i;
        if (found == SIZE_MAX) found = i;
    }
    ASSERT(found != SIZE_MAX);
    return found;
}

enum status config_set_from(struct config *c, const char *name, const char *value, const char *from,
                            struct err *err)
{
    struct value_origin origin = { SOURCE_ARGS, from };
    return store(c, option_index(c, name), origin, value, false, err);
}

enum status config_set(struct config *c, const char *name, const char *value, struct err *err)
{
    struct buf flag = { 0 };
    buf_printf(&flag, "--%s", name);
    enum status st = config_set_from(c, name, value, flag.data, err);
    buf_release(&flag);
    return st;
}

void config_forget(struct config *c, const char *name)
{
    const size_t i = option_index(c, name);
    const struct option *option = c->options[i];
    const char *def = c->service && option->service_def ? option->service_def : option->def;
    struct value_origin from = { SOURCE_DEFAULT, NULL };
    value_clear(&c->values[i]);
    if (!def) return;
    enum status st = store(c, i, from, def, false, NULL);
    ASSERT(st == OK); /* as in config_create */
}

static void unset_all(const char *names)
{
    struct str rest = str_of(names), word;
    while (option_next_word(&rest, &word)) {
        char *name = mem_strndup(word.p, word.n);
        unsetenv(name);
        mem_free(name);
    }
}

void config_unset_env(const struct config *c, const char *name)
{
    const struct option *option = c->options[option_index(c, name)];
    unset_all(option->env);
    unset_all(option->service_env);
}

bool config_is_set(const struct config *c, const char *name)
{
    return config_source(c, name) != SOURCE_DEFAULT;
}

enum option_source config_source(const struct config *c, const char *name)
{
    return c->values[option_index(c, name)].source;
}

const char *config_source_text(const struct config *c, const char *name)
{
    const char *given_as = c->values[option_index(c, name)].given_as;
    return given_as ? given_as : "default";
}

static const char *text_of(const struct config *c, const char *name, enum option_type type)
{
    size_t i = option_index(c, name);
    ASSERT(c->options[i]->type == type);
    return c->values[i].text;
}

bool config_bool(const struct config *c, const char *name)
{
    const char *text = text_of(c, name, OPT_BOOL);
    bool v = false;
    if (!text) return v;
    bool parsed = option_parse_bool(str_of(text), &v);
    ASSERT(parsed);
    return v;
}

int64_t config_int(const struct config *c, const char *name)
{
    const char *text = text_of(c, name, OPT_INT);
    int64_t v = 0;
    if (!text) return v;
    enum status st = str_to_i64(str_of(text), &v);
    ASSERT(st == OK);
    return v;
}

double config_float(const struct config *c, const char *name)
{
    const char *text = text_of(c, name, OPT_FLOAT);
    double v = 0;
    if (!text) return v;
    enum status st = str_to_f64(str_of(text), &v);
    ASSERT(st == OK);
    return v;
}

const char *config_string(const struct config *c, const char *name)
{
    size_t i = option_index(c, name);
    enum option_type type = c->options[i]->type;
    ASSERT(type == OPT_STRING || type == OPT_ENUM || type == OPT_JSON);
    return c->values[i].text;
}

const char *config_list(const struct config *c, const char *name, size_t i, size_t *n)
{
    size_t i_option = option_index(c, name);
    ASSERT(c->options[i_option]->type == OPT_LIST);
    const struct option_value *v = &c->values[i_option];
    if (n) *n = v->n_items;
    return i < v->n_items ? v->items[i] : NULL;
}

static bool has_effect(const struct config *c, size_t i_option)
{
    const struct option *option = c->options[i_option];
    if (!option->works_with) return option->effect != EFFECT_ACCEPTED;
    /* what asks for nothing gets it */
    const char *text = c->values[i_option].text;
    if (text && option->def && strcmp(text, option->def) == 0) return true;
    const size_t i = option_index(c, option->works_with);
    if (c->options[i]->type == OPT_BOOL && !config_bool(c, option->works_with)) return false;
    return c->values[i].source != SOURCE_DEFAULT || (c->service && c->options[i]->service_def);
}

void config_notes(const struct config *c, void (*emit)(void *arg, const char *sentence), void *arg)
{
    struct buf b = { 0 };
    for (size_t i = 0; i < c->n_options; i++) {
        const struct option *option = c->options[i];
        if (option->effect == EFFECT_REFUSED || c->values[i].source == SOURCE_DEFAULT ||
            has_effect(c, i))
            continue;
        buf_clear(&b);
        buf_printf(&b, "%s: %s", c->values[i].given_as,
                   option->note ? option->note : "accepted, has no effect here");
        emit(arg, b.data);
    }
    buf_release(&b);
}
