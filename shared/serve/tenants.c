/* tenants.c - see tenants.h. */
#include "shared/serve/tenants.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "shared/base/hash/hash.h"
#include "shared/base/mem.h"

#define HASHED "sha256:"

enum { SHOWN_MAX = 60 /* of a value, in an error */ };

const char *tenant_class_name(enum tenant_class c)
{
    static const char *const names[] = { "low", "normal", "high" };
    return c < TENANT_N_CLASSES ? names[c] : "?";
}

static uint32_t add_tenant(struct tenants *t, struct str name)
{
    struct tenant *one;
    t->list = mem_realloc(t->list, t->n + 1, sizeof *t->list);
    one = &t->list[t->n];
    *one = (struct tenant){ .class_ = TENANT_NORMAL, .weight = 1 };
    memcpy(one->name, name.p, name.n);
    one->id = hash_64(name.p, name.n, 0);
    if (one->id == 0) one->id = 1;
    return t->n++;
}

void tenants_init(struct tenants *t)
{
    *t = (struct tenants){ 0 };
    (void)add_tenant(t, STR("default"));
}

void tenants_release(struct tenants *t)
{
    mem_free(t->list);
    mem_free(t->keys);
    *t = (struct tenants){ 0 };
}

bool tenants_find(const struct tenants *t, const uint8_t hash[KEY_HASH_BYTES], uint32_t *tenant)
{
    bool found = false;
    for (uint32_t i = 0; i < t->n_keys; i++)
        if (equal_constant_time(hash, t->keys[i].hash, KEY_HASH_BYTES)) {
            *tenant = t->keys[i].tenant;
            found = true;
        }
    return found;
}

static void add_hash(struct tenants *t, uint32_t tenant, const uint8_t hash[KEY_HASH_BYTES])
{
    t->keys = mem_realloc(t->keys, t->n_keys + 1, sizeof *t->keys);
    memcpy(t->keys[t->n_keys].hash, hash, KEY_HASH_BYTES);
    t->keys[t->n_keys++].tenant = tenant;
}

enum status tenants_add_key(struct tenants *t, const char *key, struct err *err)
{
    uint8_t hash[KEY_HASH_BYTES];
    uint32_t tenant;
    if (!key || !key[0]) return err_field(err, ERR_CONFIG, "api-key", "an API key is empty");
    if (t->n_keys == TENANT_KEYS_MAX)
        return err_field(err, ERR_CONFIG, "api-key", "there are more than %d API keys",
                         TENANT_KEYS_MAX);
    sha256(key, strlen(key), hash);
    if (tenants_find(t, hash, &tenant)) return OK; /* the same key twice says the same */
    add_hash(t, 0, hash);
    return OK;
}

/* ---- key files ---- */

/* Where the parser is. */
struct place {
    const char *file;
    uint32_t line;
    struct err *err;
};

static enum status fault(const struct place *at, const char *field, struct str value,
                         const char *right)
{
    return err_field(at->err, ERR_CONFIG, "api-keys-file",
                     "%.200s, line %u: %s is '%.*s'%s, but must be %s", at->file, at->line, field,
                     (int)(value.n < SHOWN_MAX ? value.n : SHOWN_MAX), value.p,
                     value.n > SHOWN_MAX ? "..." : "", right);
}

/* A key is a secret, so a wrong one is not shown. */
static enum status fault_of_key(const struct place *at, const char *what)
{
    return err_field(at->err, ERR_CONFIG, "api-keys-file", "%.200s, line %u: the key %s", at->file,
                     at->line, what);
}

/* Takes the next word off *rest; false: there is none. */
static bool next_word(struct str *rest, struct str *word)
{
    size_t from = 0, n = 0;
    while (from < rest->n && (rest->p[from] == ' ' || rest->p[from] == '\t')) from++;
    while (from + n < rest->n && rest->p[from + n] != ' ' && rest->p[from + n] != '\t') n++;
    *word = str_sub(*rest, from, n);
    *rest = str_sub(*rest, from + n, SIZE_MAX);
    return n > 0 && word->p[0] != '#';
}

static bool is_name(struct str s)
{
    for (size_t i = 0; i < s.n; i++) {
        char c = s.p[i];
        bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
        if (!letter && c != '.' && c != '_' && c != '-') return false;
    }
    return s.n > 0 && s.n < TENANT_NAME_MAX;
}

static int digit_of(char c)
{
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

static bool read_hash(struct str hex, uint8_t out[KEY_HASH_BYTES])
{
    if (hex.n != 2 * KEY_HASH_BYTES) return false;
    for (size_t i = 0; i < KEY_HASH_BYTES; i++) {
        int high = digit_of(hex.p[2 * i]), low = digit_of(hex.p[2 * i + 1]);
        if (high < 0 || low < 0) return false;
        out[i] = (uint8_t)(high << 4 | low);
    }
    return true;
}

static enum status parse_key(struct tenants *t, const struct place *at, uint32_t tenant,
                             struct str key)
{
    uint8_t hash[KEY_HASH_BYTES];
    uint32_t other;
    if (key.n > TENANT_KEY_BYTES_MAX) return fault_of_key(at, "has more than 512 bytes");
    if (!str_starts(key, HASHED)) sha256(key.p, key.n, hash);
    else if (!read_hash(str_sub(key, strlen(HASHED), SIZE_MAX), hash))
        return fault_of_key(at, "begins with " HASHED ", but 64 hexadecimal digits must follow");
    if (tenants_find(t, hash, &other)) {
        char text[128];
        snprintf(text, sizeof text, "is already one of the tenant %s; each key must be there once",
                 t->list[other].name);
        return fault_of_key(at, text);
    }
    if (t->n_keys == TENANT_KEYS_MAX)
        return fault_of_key(at, "is one too many: 1,024 are possible");
    add_hash(t, tenant, hash);
    return OK;
}

static enum status parse_number(const struct place *at, const char *field, struct str value,
                                int64_t max, int64_t *out)
{
    char right[64];
    int64_t v;
    snprintf(right, sizeof right, "a whole number from 1 to %lld", (long long)max);
    if (str_to_i64(value, &v) != OK || v < 1 || v > max) return fault(at, field, value, right);
    *out = v;
    return OK;
}

static enum status parse_class(const struct place *at, struct str value, enum tenant_class *out)
{
    for (int c = 0; c < TENANT_N_CLASSES; c++)
        if (str_eq_c(value, tenant_class_name((enum tenant_class)c))) {
            *out = (enum tenant_class)c;
            return OK;
        }
    return fault(at, "class", value, "low, normal or high");
}

static enum status parse_field(const struct place *at, struct str word, struct tenant *one)
{
    struct str value = word, field;
    int64_t v = 0;
    (void)str_split(&value, '=', &field);
    if (!value.p) return fault(at, "a field", word, "FIELD=VALUE, as in weight=2");
    if (str_eq_c(field, "class")) return parse_class(at, value, &one->class_);
    if (str_eq_c(field, "weight")) {
        TRY(parse_number(at, "weight", value, TENANT_WEIGHT_MAX, &v));
        one->weight = (uint32_t)v;
    } else if (str_eq_c(field, "requests_per_minute")) {
        TRY(parse_number(at, "requests_per_minute", value, 100000000, &v));
        one->requests_per_minute = (uint32_t)v;
    } else if (str_eq_c(field, "tokens_per_minute")) {
        TRY(parse_number(at, "tokens_per_minute", value, INT64_C(1000000000000), &v));
        one->tokens_per_minute = (uint64_t)v;
    } else if (str_eq_c(field, "concurrent")) {
        TRY(parse_number(at, "concurrent", value, 1000000, &v));
        one->concurrent = (uint32_t)v;
    } else {
        return fault(at, "a field", field,
                     "weight, class, requests_per_minute, tokens_per_minute or concurrent");
    }
    return OK;
}

static uint32_t find_name(const struct tenants *t, struct str name)
{
    uint32_t i = 0;
    while (i < t->n && !str_eq_c(name, t->list[i].name)) i++;
    return i;
}

/* described: tenants that have had their first line. */
static enum status parse_line(struct tenants *t, const struct place *at, struct str line,
                              bool described[TENANTS_MAX])
{
    struct str name, key, word;
    if (!next_word(&line, &name)) return OK; /* empty, or a comment */
    if (!is_name(name))
        return fault(at, "a tenant's name", name,
                     "of letters, digits, '.', '_' and '-', 63 at most");
    if (!next_word(&line, &key))
        return fault_of_key(at, "is missing: a line is NAME KEY, then fields");
    uint32_t i = find_name(t, name);
    if (i == TENANTS_MAX)
        return fault(at, "a tenant's name", name, "one of at most 256 different ones");
    if (i == t->n) (void)add_tenant(t, name);
    TRY(parse_key(t, at, i, key));
    while (next_word(&line, &word)) {
        if (described[i])
            return fault(at, "a field", word,
                         "in the first line of its tenant; further lines add keys only");
        TRY(parse_field(at, word, &t->list[i]));
    }
    described[i] = true;
    return OK;
}

enum status tenants_parse(struct tenants *t, struct str text, const char *name, struct err *err)
{
    bool described[TENANTS_MAX] = { 0 };
    struct place at = { .file = name, .err = err };
    struct str line;
    while (str_split(&text, '\n', &line)) {
        at.line++;
        if (line.n && line.p[line.n - 1] == '\r') line.n--;
        TRY(parse_line(t, &at, line, described));
    }
    if (t->n_keys == 0)
        return err_field(err, ERR_CONFIG, "api-keys-file",
                         "%.200s has no key: a line is NAME KEY, then fields", name);
    return OK;
}

enum status tenants_read(struct tenants *t, const char *path, struct err *err)
{
    FILE *f = fopen(path, "rbe");
    if (!f)
        return err_field(err, ERR_CONFIG, "api-keys-file", "%.200s cannot be read: %s", path,
                         strerror(errno));
    char *text = mem_calloc(TENANT_FILE_MAX + 1, 1);
    size_t n = fread(text, 1, TENANT_FILE_MAX + 1, f);
    enum status st = OK;
    if (ferror(f))
        st = err_field(err, ERR_CONFIG, "api-keys-file", "%.200s cannot be read: %s", path,
                       strerror(errno));
    else if (n > TENANT_FILE_MAX)
        st = err_field(err, ERR_CONFIG, "api-keys-file",
                       "%.200s has more than %d bytes, which is no key file", path,
                       TENANT_FILE_MAX);
    if (st == OK) st = tenants_parse(t, (struct str){ text, n }, path, err);
    mem_free(text);
    fclose(f);
    return st;
}
