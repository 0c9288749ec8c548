/* config.c - reads values for the option table from the environment and the command line.
 *
 * Every value is checked when it is given, with the flag or variable in the sentence, and kept as
 * text (lists as their items); the getters convert text that is known to be good. An empty
 * environment variable counts as absent. In names '_' equals '-'. A later flag replaces an earlier
 * one, except that a repeated list grows. Thread: loop, at start; read-only afterwards. */
#include "deploy/options/config.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "deploy/options/config_internal.h"
#include "shared/base/assert.h"
#include "shared/base/json/json.h"
#include "shared/base/mem.h"

enum { ITEMS_MAX = 4096 };

struct value {
    enum option_source source;
    char *given_as; /* "--port" or "BATON_PORT"; NULL: the default */
    char *text;     /* NULL: not set; not used by lists */
    char **items;   /* OPT_LIST */
    size_t n_items;
};

struct config {
    const struct option *table;
    const char *command;
    size_t n_rows;
    struct value *values; /* [n_rows] */
};

/* Where a value comes from, for the parser and its sentences. */
struct origin {
    enum option_source source;
    const char *given_as; /* as the person wrote it */
};

bool row_word(struct str *rest, struct str *word)
{
    while (str_split(rest, ' ', word))
        if (word->n) return true;
    return false;
}

bool row_takes(const struct option *row, const char *command)
{
    if (!row->commands || !command) return true;
    struct str rest = str_of(row->commands), word;
    while (row_word(&rest, &word))
        if (str_eq_c(word, command)) return true;
    return false;
}

bool row_has_range(const struct option *row)
{
    return (row->type == OPT_INT || row->type == OPT_FLOAT) && (row->min != 0 || row->max != 0);
}

/* ---- checking one value ---- */

static bool parse_bool(struct str s, bool *out)
{
    static const char *const words[][2] = {
        { "true", "false" }, { "1", "0" }, { "yes", "no" }, { "on", "off" }
    };
    for (size_t i = 0; i < COUNT_OF(words); i++)
        for (int no = 0; no < 2; no++)
            if (s.n == strlen(words[i][no]) && strncasecmp(s.p, words[i][no], s.n) == 0) {
                *out = !no;
                return true;
            }
    return false;
}

static bool in_choices(const char *choices, struct str value)
{
    struct str rest = str_of(choices), word;
    while (str_split(&rest, '|', &word))
        if (str_eq(word, value)) return true;
    return false;
}

static enum status check_number(const struct option *row, const char *given_as, const char *value,
                                struct err *err)
{
    const char *kind = row->type == OPT_INT ? "a whole number" : "a number";
    int64_t i = 0;
    double v = 0;
    enum status st = row->type == OPT_INT ? str_to_i64(str_of(value), &i)
                                          : str_to_f64(str_of(value), &v);
    if (row->type == OPT_INT) v = (double)i;
    if (st == OK && (!row_has_range(row) || (v >= row->min && v <= row->max))) return OK;
    if (row_has_range(row))
        return err_field(err, ERR_CONFIG, row->name,
                         "%s is \"%.80s\", but must be %s from %.15g to %.15g", given_as, value,
                         kind, row->min, row->max);
    return err_field(err, ERR_CONFIG, row->name, "%s is \"%.80s\", but must be %s", given_as, value,
                     kind);
}

/* "a, b or c" */
static void add_choices(struct buf *b, const char *choices)
{
    struct str rest = str_of(choices), word;
    for (bool first = true; str_split(&rest, '|', &word); first = false) {
        if (!first) buf_add_c(b, rest.p ? ", " : " or ");
        buf_add_str(b, word);
    }
}

static enum status check_enum(const struct option *row, const char *given_as, const char *value,
                              struct err *err)
{
    if (in_choices(row->choices, str_of(value))) return OK;
    struct buf choices = { 0 };
    add_choices(&choices, row->choices);
    enum status st = err_field(err, ERR_CONFIG, row->name, "%s is \"%.80s\", but must be %s",
                               given_as, value, buf_str(&choices).p);
    buf_release(&choices);
    return st;
}

static enum status check_json(const struct option *row, const char *given_as, const char *value,
                              struct err *err)
{
    cJSON *doc = NULL;
    struct err cause = { 0 };
    if (json_parse(str_of(value), false, &doc, &cause) != OK)
        return err_field(err, ERR_CONFIG, row->name, "%s is \"%.80s\", but must be JSON: %s",
                         given_as, value, cause.text);
    cJSON_Delete(doc);
    return OK;
}

static enum status check_value(const struct option *row, const char *given_as, const char *value,
                               struct err *err)
{
    bool flag;
    switch (row->type) {
    case OPT_BOOL:
        if (parse_bool(str_of(value), &flag)) return OK;
        return err_field(err, ERR_CONFIG, row->name, "%s is \"%.80s\", but must be true or false",
                         given_as, value);
    case OPT_INT:
    case OPT_FLOAT: return check_number(row, given_as, value, err);
    case OPT_ENUM: return check_enum(row, given_as, value, err);
    case OPT_JSON: return check_json(row, given_as, value, err);
    case OPT_LIST:
        /* Not as if it was not given: an unset shell variable would open a server that was to ask
         * for a key. */
        if (value[strspn(value, ", \t")]) return OK;
        return err_field(err, ERR_CONFIG, row->name, "%s is \"%.80s\", which names nothing",
                         given_as, value);
    case OPT_STRING: break;
    }
    return OK;
}

/* Does the checked `value` of a refused option ask for nothing? "1" is neutral where "1.0" or
 * "true" is. */
static bool is_neutral(const struct option *row, const char *value)
{
    if (!row->neutral) return false;
    bool flag, neutral_flag;
    double v, neutral_v;
    if (row->type == OPT_BOOL)
        return parse_bool(str_of(value), &flag) &&
               parse_bool(str_of(row->neutral), &neutral_flag) && flag == neutral_flag;
    if (row->type == OPT_INT || row->type == OPT_FLOAT)
        return str_to_f64(str_of(value), &v) == OK &&
               str_to_f64(str_of(row->neutral), &neutral_v) == OK && v == neutral_v;
    return strcmp(value, row->neutral) == 0;
}

/* ---- storing ---- */

static void value_clear(struct value *v)
{
    for (size_t i = 0; i < v->n_items; i++) mem_free(v->items[i]);
    mem_free(v->items);
    mem_free(v->text);
    mem_free(v->given_as);
    *v = (struct value){ 0 };
}

static enum status add_items(struct value *v, const struct option *row, struct str text,
                             struct err *err)
{
    struct str item;
    while (str_split(&text, ',', &item)) {
        item = str_trim(item);
        if (!item.n) continue;
        if (v->n_items == ITEMS_MAX)
            return err_field(err, ERR_CONFIG, row->name, "--%s has more than %d items", row->name,
                             ITEMS_MAX);
        v->items = mem_realloc(v->items, v->n_items + 1, sizeof *v->items);
        v->items[v->n_items++] = mem_strndup(item.p, item.n);
    }
    return OK;
}

/* Check and keep. `grow`: add to a list that the same source has begun. */
static enum status store(struct config *c, size_t i_row, struct origin from, const char *value,
                         bool grow, struct err *err)
{
    const struct option *row = &c->table[i_row];
    struct value *v = &c->values[i_row];
    TRY(check_value(row, from.given_as, value, err));
    if (row->effect == EFFECT_REFUSED && from.source != SOURCE_DEFAULT && !is_neutral(row, value))
        return err_field(err, ERR_CONFIG, row->name, "%s: %s", from.given_as,
                         row->note ? row->note : "not supported");
    if (row->type != OPT_LIST || !grow || v->source != from.source) value_clear(v);
    v->source = from.source;
    mem_free(v->given_as);
    v->given_as = from.given_as ? mem_strdup(from.given_as) : NULL;
    if (row->type == OPT_LIST) return add_items(v, row, str_of(value), err);
    v->text = mem_strdup(value);
    return OK;
}

struct config *config_create(const struct option *table, const char *command)
{
    struct config *c = MEM_NEW(struct config);
    c->table = table;
    c->command = command;
    while (table[c->n_rows].name) c->n_rows++;
    c->values = MEM_ARRAY(struct value, c->n_rows);
    for (size_t i = 0; i < c->n_rows; i++) {
        struct origin from = { SOURCE_DEFAULT, NULL };
        /* A default that its own row would refuse is a mistake in the table. */
        if (table[i].def) ASSERT(store(c, i, from, table[i].def, false, NULL) == OK);
    }
    return c;
}

void config_free(struct config *c)
{
    if (!c) return;
    for (size_t i = 0; i < c->n_rows; i++) value_clear(&c->values[i]);
    mem_free(c->values);
    mem_free(c);
}

enum status config_load_env(struct config *c, struct err *err)
{
    for (size_t i = 0; i < c->n_rows; i++) {
        const struct option *row = &c->table[i];
        if (!row->env || !row_takes(row, c->command) || c->values[i].source == SOURCE_ARGS)
            continue;
        struct str rest = str_of(row->env), word;
        while (row_word(&rest, &word)) {
            char *name = mem_strndup(word.p, word.n);
            const char *value = getenv(name);
            bool given = value && *value;
            struct origin from = { SOURCE_ENV, name };
            enum status st = given ? store(c, i, from, value, false, err) : OK;
            mem_free(name);
            if (st != OK) return st;
            if (given) break;
        }
    }
    return OK;
}

/* ---- the command line ---- */

static bool name_eq(struct str a, struct str b)
{
    if (a.n != b.n) return false;
    for (size_t i = 0; i < a.n; i++)
        if ((a.p[i] == '_' ? '-' : a.p[i]) != (b.p[i] == '_' ? '-' : b.p[i])) return false;
    return true;
}

static bool row_is_called(const struct option *row, struct str name, bool aliases_only)
{
    if (!aliases_only && name_eq(str_of(row->name), name)) return true;
    struct str rest = str_of(row->aliases), word;
    while (row_word(&rest, &word))
        if (name_eq(word, name)) return true;
    return false;
}

/* Row of the flag `name`, SIZE_MAX when there is none. Rows of other commands only with
 * `any_command`. */
static size_t find_flag(const struct config *c, struct str name, bool aliases_only,
                        bool any_command)
{
    for (size_t i = 0; i < c->n_rows; i++)
        if ((any_command || row_takes(&c->table[i], c->command)) &&
            row_is_called(&c->table[i], name, aliases_only))
            return i;
    return SIZE_MAX;
}

/* The name nearest to a mistyped flag, or NULL when none is near. */
static const char *nearest_name(const struct config *c, struct str name)
{
    /* A third of the characters may be wrong: further away it is a guess, not a correction. */
    size_t best = name.n / 3 + 2;
    const char *nearest = NULL;
    for (size_t i = 0; i < c->n_rows; i++) {
        if (!row_takes(&c->table[i], c->command)) continue;
        struct str rest = str_of(c->table[i].aliases), word = str_of(c->table[i].name);
        do {
            size_t d = word.n > 2 || name.n <= 2 ? str_distance(name, word, best) : best;
            if (d < best) {
                best = d;
                nearest = c->table[i].name;
            }
        } while (row_word(&rest, &word));
    }
    return nearest;
}

static enum status unknown_flag(const struct config *c, struct str word, struct str name,
                                struct err *err)
{
    size_t other = find_flag(c, name, false, true);
    if (other != SIZE_MAX && !row_takes(&c->table[other], c->command))
        return err_set(err, ERR_CONFIG, "--%s is not an option of \"%s\"; these take it: %s",
                       c->table[other].name, c->command, c->table[other].commands);
    const char *nearest = nearest_name(c, name);
    if (nearest)
        return err_set(err, ERR_CONFIG, "there is no option %.*s; did you mean --%s?",
                       STR_ARG(str_sub(word, 0, 80)), nearest);
    return err_set(err, ERR_CONFIG, "there is no option %.*s; --help shows all",
                   STR_ARG(str_sub(word, 0, 80)));
}

/* Is this word a flag rather than a value? "-", "-1" and "-.5" are values. */
static bool looks_like_flag(const char *word)
{
    return word[0] == '-' && word[1] && !isdigit((unsigned char)word[1]) && word[1] != '.';
}

struct args {
    int argc, i; /* i: the next word */
    char **argv;
};

static enum status take_list(struct config *c, size_t i_row, struct origin from, struct args *a,
                             struct err *err)
{
    bool any = false;
    for (; a->i < a->argc && a->argv[a->i][0] != '-'; a->i++, any = true)
        TRY(store(c, i_row, from, a->argv[a->i], true, err));
    if (any) return OK;
    return err_field(err, ERR_CONFIG, c->table[i_row].name, "%s needs a value", from.given_as);
}

/* Store the value of the flag just read; `value` is NULL unless it was written with '='. */
static enum status take_value(struct config *c, size_t i_row, const char *flag, const char *value,
                              struct args *a, struct err *err)
{
    const struct option *row = &c->table[i_row];
    struct origin from = { SOURCE_ARGS, flag };
    if (value) return store(c, i_row, from, value, true, err);
    bool flag_word; /* "--kv-checksum off": a word that says yes or no is the flag's, no model is
                     * called so */
    if (row->type == OPT_BOOL && a->i < a->argc && parse_bool(str_of(a->argv[a->i]), &flag_word))
        return store(c, i_row, from, a->argv[a->i++], false, err);
    if (row->type == OPT_BOOL) return store(c, i_row, from, "true", false, err);
    if (row->type == OPT_LIST) return take_list(c, i_row, from, a, err);
    if (a->i == a->argc || looks_like_flag(a->argv[a->i]))
        return err_field(err, ERR_CONFIG, row->name, "%s needs a value", flag);
    return store(c, i_row, from, a->argv[a->i++], false, err);
}

static enum status take_flag(struct config *c, const char *word, struct args *a, struct err *err)
{
    bool one_dash = word[1] != '-';
    size_t n_dashes = one_dash ? 1 : 2, n = strcspn(word, "=");
    const char *value = word[n] ? word + n + 1 : NULL;
    struct str name = { word + n_dashes, n > n_dashes ? n - n_dashes : 0 };
    size_t i_row = find_flag(c, name, one_dash, false);
    bool negated = false;
    if (i_row == SIZE_MAX && !one_dash && (str_starts(name, "no-") || str_starts(name, "no_"))) {
        i_row = find_flag(c, str_sub(name, 3, SIZE_MAX), false, false);
        negated = i_row != SIZE_MAX && c->table[i_row].type == OPT_BOOL;
        if (!negated) i_row = SIZE_MAX;
    }
    if (i_row == SIZE_MAX) return unknown_flag(c, (struct str){ word, n }, name, err);
    char *flag = mem_strndup(word, n);
    enum status st;
    if (negated && value)
        st = err_field(err, ERR_CONFIG, c->table[i_row].name, "%s takes no value", flag);
    else st = take_value(c, i_row, flag, negated ? "false" : value, a, err);
    mem_free(flag);
    return st;
}

enum status config_load_args(struct config *c, int argc, char **argv, const char **positional,
                             int *n, struct err *err)
{
    struct args a = { argc, 0, argv };
    int n_found = 0, limit = n ? *n : 0;
    bool flags_end = false;
    while (a.i < argc) {
        const char *word = argv[a.i++];
        if (!flags_end && strcmp(word, "--") == 0) {
            flags_end = true;
        } else if (!flags_end && looks_like_flag(word)) {
            TRY(take_flag(c, word, &a, err));
        } else {
            if (n_found == limit)
                return err_set(err, ERR_CONFIG, "unexpected word \"%.80s\"", word);
            positional[n_found++] = word;
        }
    }
    if (n) *n = n_found;
    return OK;
}

/* ---- reading ---- */

static size_t row_index(const struct config *c, const char *name)
{
    size_t found = SIZE_MAX;
    /* A name may have one row per command; another command's row gives its default. */
    for (size_t i = 0; i < c->n_rows; i++) {
        if (strcmp(c->table[i].name, name) != 0) continue;
        if (row_takes(&c->table[i], c->command)) return i;
        if (found == SIZE_MAX) found = i;
    }
    ASSERT(found != SIZE_MAX);
    return found;
}

enum status config_set(struct config *c, const char *name, const char *value, struct err *err)
{
    struct buf flag = { 0 };
    buf_printf(&flag, "--%s", name);
    struct origin from = { SOURCE_ARGS, flag.data };
    enum status st = store(c, row_index(c, name), from, value, false, err);
    buf_release(&flag);
    return st;
}

bool config_is_set(const struct config *c, const char *name)
{
    return config_source(c, name) != SOURCE_DEFAULT;
}

enum option_source config_source(const struct config *c, const char *name)
{
    return c->values[row_index(c, name)].source;
}

const char *config_source_text(const struct config *c, const char *name)
{
    const char *given_as = c->values[row_index(c, name)].given_as;
    return given_as ? given_as : "default";
}

static const char *text_of(const struct config *c, const char *name, enum option_type type)
{
    size_t i = row_index(c, name);
    ASSERT(c->table[i].type == type);
    return c->values[i].text;
}

bool config_bool(const struct config *c, const char *name)
{
    const char *text = text_of(c, name, OPT_BOOL);
    bool v = false;
    if (text) ASSERT(parse_bool(str_of(text), &v));
    return v;
}

int64_t config_int(const struct config *c, const char *name)
{
    const char *text = text_of(c, name, OPT_INT);
    int64_t v = 0;
    if (text) ASSERT(str_to_i64(str_of(text), &v) == OK);
    return v;
}

double config_float(const struct config *c, const char *name)
{
    const char *text = text_of(c, name, OPT_FLOAT);
    double v = 0;
    if (text) ASSERT(str_to_f64(str_of(text), &v) == OK);
    return v;
}

const char *config_string(const struct config *c, const char *name)
{
    size_t i = row_index(c, name);
    enum option_type type = c->table[i].type;
    ASSERT(type == OPT_STRING || type == OPT_ENUM || type == OPT_JSON);
    return c->values[i].text;
}

const char *config_list(const struct config *c, const char *name, size_t i, size_t *n)
{
    size_t i_row = row_index(c, name);
    ASSERT(c->table[i_row].type == OPT_LIST);
    const struct value *v = &c->values[i_row];
    if (n) *n = v->n_items;
    return i < v->n_items ? v->items[i] : NULL;
}

void config_notes(const struct config *c, void (*say)(void *arg, const char *sentence), void *arg)
{
    struct buf b = { 0 };
    for (size_t i = 0; i < c->n_rows; i++) {
        const struct option *row = &c->table[i];
        if (row->effect != EFFECT_ACCEPTED || c->values[i].source == SOURCE_DEFAULT) continue;
        buf_clear(&b);
        buf_printf(&b, "%s: %s", c->values[i].given_as,
                   row->note ? row->note : "accepted, has no effect here");
        say(arg, b.data);
    }
    buf_release(&b);
}
