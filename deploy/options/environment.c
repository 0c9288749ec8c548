/* environment.c - see environment.h. Thread: main. */
#include "deploy/options/environment.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "deploy/options/config_internal.h"
#include "deploy/options/config_spelling.h"
#include "deploy/options/near_name.h"
#include "deploy/options/option_table.h"
#include "kvtransfer/tuning.h"
#include "shared/base/mem.h"

extern char **environ;

#define OURS "BATON_"

/* What an operator may set that no option and no tuning of transfers reads. */
static const char SETTINGS[] =
    "BATON_CACHE BATON_CLUSTER_SECRET BATON_CUBLASLT BATON_CUDA_MULTICAST BATON_CUDA_OVERLAP "
    "BATON_ENGINE_FAULT "
    "BATON_MODELS BATON_NCCL_LIBRARY BATON_RUN_DIR";
/* Set by the launcher, or read by this project's scripts and tests; a name that ends in '_' stands
 * for all that begin so. */
static const char OTHERS[] =
    "BATON_SUPERVISED BATON_START_SERVER BATON_READY_FD BATON_BENCH_EP BATON_BIN BATON_BUILD "
    "BATON_CHAT_TEMPLATES "
    "BATON_CUBLAS "
    "BATON_CUBLASLT_H "
    "BATON_FAULT_TRANSFERS BATON_GRPC_PYTHON BATON_JINJA_PYTHON BATON_OPENAI_PYTHON "
    "BATON_RDMA_SOFTWARE BATON_SIMT_ BATON_TEST_ BATON_TORCH_PYTHON BATON_VM_";

/* Secrets, and what a node would be without them. */
static const struct {
    const char *name, *option, *lost;
} SECRETS[] = {
    { "BATON_API_KEY", "api-key", "without the key anybody could use the API" },
    { "BATON_CLUSTER_SECRET", "cluster-secret-file",
      "without the secret this node and its peers would not trust each other" },
    { "BATON_CLUSTER_SECRET_FILE", "cluster-secret-file",
      "without the secret this node and its peers would not trust each other" },
};

/* ---- which names are known ---- */

static bool in_list(const char *list, struct str name)
{
    struct str rest = str_of(list), word;
    while (option_next_word(&rest, &word))
        if (str_eq(word, name) ||
            (str_ends(word, "_") && name.n > word.n && memcmp(name.p, word.p, word.n) == 0))
            return true;
    return false;
}

static bool is_read(struct str name)
{
    const struct option *o;
    for (size_t i = 0; (o = option_at(OPTIONS, i)); i++)
        if (in_list(o->env, name)) return true;
    for (const struct kvt_tuning_name *n = kvt_tuning_names; n->name; n++)
        if (str_eq_c(name, n->name)) return true;
    return in_list(SETTINGS, name) || in_list(OTHERS, name);
}

static bool is_ours(struct str name)
{
    return str_starts(name, OURS) || str_starts(name, "KVCACHE_") || str_starts(name, "KV_CACHE_");
}

static bool is_lost(struct str name, struct str value)
{
    return value.n && is_ours(name) && !is_read(name) && !spelling_is_of_service(name, value);
}

/* ---- which name was meant ---- */

struct meant {
    struct str variable;         /* n 0: none */
    const struct option *option; /* without a variable: the option whose name was used; or NULL */
};

/* Names of one family are compared without the prefix that they share. */
static size_t n_prefix(struct str name) { return str_starts(name, OURS) ? strlen(OURS) : 0; }

static void offer(struct near_search *s, size_t prefix, const char *names, size_t i)
{
    struct str rest = str_of(names), word;
    while (option_next_word(&rest, &word))
        if (is_ours(word) && n_prefix(word) == prefix)
            near_offer(s, str_sub(word, prefix, SIZE_MAX), i);
}

/* Commands may have an entry each of one option: it is one thing all the same. */
static size_t first_entry(size_t i)
{
    const char *name = option_at(OPTIONS, i)->name;
    for (size_t k = 0; k < i; k++)
        if (strcmp(option_at(OPTIONS, k)->name, name) == 0) return k;
    return i;
}

/* "BATON_" and the option's own name, where its variable has another one. */
static struct meant by_option_name(struct str name)
{
    struct meant m = { 0 };
    const struct option *o;
    if (!str_starts(name, OURS)) return m;
    struct near_search s;
    near_begin(&s, str_sub(name, strlen(OURS), SIZE_MAX));
    for (size_t i = 0; (o = option_at(OPTIONS, i)); i++) {
        if (o->effect != EFFECT_WORKS) continue;
        near_offer(&s, str_of(o->name), first_entry(i));
        struct str rest = str_of(o->aliases), word;
        while (option_next_word(&rest, &word)) near_offer(&s, word, first_entry(i));
    }
    if (!near_found(&s).n) return m;
    o = option_at(OPTIONS, s.i_found);
    struct str rest = str_of(o->env);
    if (!option_next_word(&rest, &m.variable)) m.option = o;
    return m;
}

static struct meant meant_by(struct str name)
{
    size_t prefix = n_prefix(name), i = 0;
    struct near_search s;
    const struct option *o;
    near_begin(&s, str_sub(name, prefix, SIZE_MAX));
    for (; (o = option_at(OPTIONS, i)); i++) offer(&s, prefix, o->env, first_entry(i));
    for (const struct kvt_tuning_name *n = kvt_tuning_names; n->name; n++)
        offer(&s, prefix, n->name, ++i);
    struct str rest = str_of(SETTINGS), word, found;
    while (option_next_word(&rest, &word)) near_offer(&s, str_sub(word, prefix, SIZE_MAX), ++i);
    found = near_found(&s);
    if (found.n) return (struct meant){ .variable = { found.p - prefix, found.n + prefix } };
    return by_option_name(name);
}

/* ---- what is said ---- */

static void warning_of(struct str name, struct buf *out)
{
    struct meant m = meant_by(name);
    buf_printf(out, "%.*s: no variable of that name is read; ", STR_ARG(name));
    if (m.variable.n) buf_printf(out, "did you mean %.*s?", STR_ARG(m.variable));
    else if (m.option) buf_printf(out, "--%s is for the command line only", m.option->name);
    else buf_add_c(out, "docs/configuration.md lists those that are");
}

/* Takes the next variable that nothing reads; false at the end. */
static bool next_lost(char ***at, struct str *name)
{
    for (; *at && **at; ++*at) {
        size_t n = strcspn(**at, "=");
        *name = (struct str){ **at, n };
        if (!(**at)[n] || !is_lost(*name, str_of(**at + n + 1))) continue;
        ++*at;
        return true;
    }
    return false;
}

void environment_warnings(void (*emit)(void *arg, const char *sentence), void *arg)
{
    struct buf b = { 0 };
    struct str name;
    for (char **at = environ; next_lost(&at, &name);) {
        buf_clear(&b);
        warning_of(name, &b);
        emit(arg, b.data);
    }
    buf_release(&b);
}

/* Does the configuration have the secret from elsewhere? */
static bool is_given(const struct config *c, size_t i_secret)
{
    const char *option = SECRETS[i_secret].option, *cluster = getenv("BATON_CLUSTER_SECRET");
    return config_is_set(c, option) ||
           (strcmp(option, "cluster-secret-file") == 0 && cluster && *cluster);
}

enum status environment_check(const struct config *c, struct err *err)
{
    struct str name;
    for (char **at = environ; next_lost(&at, &name);) {
        struct str meant = meant_by(name).variable;
        for (size_t i = 0; i < COUNT_OF(SECRETS); i++)
            if (str_eq_c(meant, SECRETS[i].name) && !is_given(c, i))
                return err_set(err, ERR_CONFIG,
                               "%.*s: no variable of that name is read; did you mean %s? Rename "
                               "or unset it: %s",
                               STR_ARG(str_sub(name, 0, 80)), SECRETS[i].name, SECRETS[i].lost);
    }
    return OK;
}
