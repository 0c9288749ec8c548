/* config_value.c - checks one value against its entry of the option table. Thread: any. */
#include <string.h>
#include <strings.h>

#include "deploy/options/config_internal.h"
#include "shared/base/json/json.h"
#include "shared/base/mem.h"

bool option_has_range(const struct option *option)
{
    return (option->type == OPT_INT || option->type == OPT_FLOAT) &&
           (option->min != 0 || option->max != 0);
}

bool option_parse_bool(struct str s, bool *out)
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

bool option_takes_word(const struct option *option, const char *word)
{
    bool flag;
    int64_t n;
    if (option->type != OPT_BOOL) return false;
    return option_parse_bool(str_of(word), &flag) ||
           ((option->effect == EFFECT_ACCEPTED || option->works_with) &&
            (strcmp(word, "auto") == 0 || str_to_i64(str_of(word), &n) == OK));
}

static bool in_choices(const char *choices, struct str value)
{
    struct str rest = str_of(choices), word;
    while (str_split(&rest, '|', &word))
        if (str_eq(word, value)) return true;
    return false;
}

static enum status check_number(const struct option *option, const char *given_as,
                                const char *value, struct err *err)
{
    const char *kind = option->type == OPT_INT ? "a whole number" : "a number";
    int64_t i = 0;
    double v = 0;
    enum status st = option->type == OPT_INT ? str_to_i64(str_of(value), &i)
                                             : str_to_f64(str_of(value), &v);
    if (option->type == OPT_INT) v = (double)i;
    if (st == OK && (!option_has_range(option) || (v >= option->min && v <= option->max)))
        return OK;
    if (option_has_range(option))
        return err_field(err, ERR_CONFIG, option->name,
                         "%s is \"%.80s\", but must be %s from %.15g to %.15g", given_as, value,
                         kind, option->min, option->max);
    return err_field(err, ERR_CONFIG, option->name, "%s is \"%.80s\", but must be %s", given_as,
                     value, kind);
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

static enum status check_enum(const struct option *option, const char *given_as, const char *value,
                              struct err *err)
{
    if (in_choices(option->choices, str_of(value))) return OK;
    struct buf choices = { 0 };
    add_choices(&choices, option->choices);
    enum status st = err_field(err, ERR_CONFIG, option->name, "%s is \"%.80s\", but must be %s",
                               given_as, value, buf_str(&choices).p);
    buf_release(&choices);
    return st;
}

static enum status check_json(const struct option *option, const char *given_as, const char *value,
                              struct err *err)
{
    cJSON *doc = NULL;
    struct err cause = { 0 };
    if (json_parse(str_of(value), false, &doc, &cause) != OK)
        return err_field(err, ERR_CONFIG, option->name, "%s is \"%.80s\", but must be JSON: %s",
                         given_as, value, cause.text);
    cJSON_Delete(doc);
    return OK;
}

enum status option_check_value(const struct option *option, const char *given_as, const char *value,
                               struct err *err)
{
    bool flag;
    switch (option->type) {
    case OPT_BOOL:
        if (option_parse_bool(str_of(value), &flag)) return OK;
        return err_field(err, ERR_CONFIG, option->name,
                         "%s is \"%.80s\", but must be true or false", given_as, value);
    case OPT_INT:
    case OPT_FLOAT: return check_number(option, given_as, value, err);
    case OPT_ENUM: return check_enum(option, given_as, value, err);
    case OPT_JSON: return check_json(option, given_as, value, err);
    case OPT_LIST:
        /* An empty value is not "absent": an unset shell variable would open a server that should
         * ask for a key. */
        if (value[strspn(value, ", \t")]) return OK;
        return err_field(err, ERR_CONFIG, option->name, "%s is \"%.80s\", which names nothing",
                         given_as, value);
    case OPT_STRING: break;
    }
    return OK;
}

enum status option_refuse_value(const struct option *option, const char *given_as,
                                const char *value, struct err *err)
{
    const char *why = option->note ? option->note : "not supported";
    struct buf choices = { 0 };
    if (!option->neutral) return err_field(err, ERR_CONFIG, option->name, "%s: %s", given_as, why);
    add_choices(&choices, option->neutral);
    const enum status st = err_field(err, ERR_CONFIG, option->name,
                                     "%s is \"%.80s\", but must be %s: %s", given_as, value,
                                     buf_str(&choices).p, why);
    buf_release(&choices);
    return st;
}

bool option_is_neutral(const struct option *option, const char *value)
{
    if (!option->neutral) return false;
    struct str rest = str_of(option->neutral), neutral;
    bool flag, neutral_flag;
    double v, neutral_v;
    while (str_split(&rest, '|', &neutral)) {
        if (str_eq_c(neutral, value)) return true;
        if (option->type == OPT_BOOL && option_parse_bool(str_of(value), &flag) &&
            option_parse_bool(neutral, &neutral_flag) && flag == neutral_flag)
            return true;
        if ((option->type == OPT_INT || option->type == OPT_FLOAT) &&
            str_to_f64(str_of(value), &v) == OK && str_to_f64(neutral, &neutral_v) == OK &&
            v == neutral_v)
            return true;
    }
    return false;
}
