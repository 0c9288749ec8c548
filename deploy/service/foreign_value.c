/* foreign_value.c - see foreign_value.h. */
#include "deploy/service/foreign_value.h"

#include <stdlib.h>
#include <string.h>

#include "deploy/options/config_internal.h"
#include "shared/base/json/json.h"
#include "shared/base/mem.h"
#include "shared/engine/draft/draft.h"
#include "shared/kv/kv_parts.h"

enum { RANKS_MAX = 4096, HOSTS_MAX = 256 };

/* A variable beside the one that is read; NULL: not set. */
static const char *beside(const char *name)
{
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

static enum status read_number(const char *name, const char *value, int64_t most, int64_t *out,
                               struct err *err)
{
    if (str_to_i64(str_trim(str_of(value)), out) == OK && *out >= 1 && *out <= most) return OK;
    return err_set(err, ERR_CONFIG, "%s is \"%.80s\", but must be a whole number from 1 to %lld",
                   name, value, (long long)most);
}

/* ---- MP_NUM ---- */

/* Who lists the hosts need not count them. */
static enum status read_hosts(const char **by, int64_t *out, struct err *err)
{
    const char *n = beside("MP_NNODE"), *ips = beside("POD_IPS");
    struct str rest = str_of(ips ? ips : ""), ip;
    *by = n ? "MP_NNODE" : "POD_IPS";
    *out = 0;
    if (n) return read_number("MP_NNODE", n, HOSTS_MAX, out, err);
    while (str_split(&rest, ',', &ip)) *out += str_trim(ip).n > 0;
    if (*out < 1) *out = 1;
    return OK;
}

/* A host has its part of the ranks. */
static enum status ranks_of_host(const char *name, const char *value, struct buf *out,
                                 struct err *err)
{
    const char *by;
    int64_t n, n_hosts;
    TRY(read_number(name, value, RANKS_MAX, &n, err));
    TRY(read_hosts(&by, &n_hosts, err));
    const int64_t fewer = n / n_hosts * n_hosts;
    if (n % n_hosts && fewer)
        return err_set(err, ERR_CONFIG,
                       "%s %lld cannot be divided evenly among the %lld hosts of %s; give %lld or "
                       "%lld",
                       name, (long long)n, (long long)n_hosts, by, (long long)fewer,
                       (long long)(fewer + n_hosts));
    if (!fewer)
        return err_set(err, ERR_CONFIG,
                       "%s %lld is fewer than one rank for each of the %lld hosts of %s; give %lld "
                       "or a multiple of it",
                       name, (long long)n, (long long)n_hosts, by, (long long)n_hosts);
    if (n / n_hosts > KV_RANKS_MAX)
        return err_set(err, ERR_CONFIG,
                       "%s %lld is %lld ranks for each host, and a node has at most %d; give %lld "
                       "or fewer",
                       name, (long long)n, (long long)(n / n_hosts), KV_RANKS_MAX,
                       (long long)(KV_RANKS_MAX * n_hosts));
    buf_printf(out, "%lld", (long long)(n / n_hosts));
    return OK;
}

/* ---- USE_CACHE_KV_INT8, USE_CACHE_KV_INT4 ---- */

static enum status read_switch(const char *name, const char *value, bool *on, struct err *err)
{
    if (option_parse_bool(str_of(value), on)) return OK;
    return err_set(err, ERR_CONFIG, "%s is \"%.80s\", but must be 0 or 1", name, value);
}

static enum status kv_int8(const char *name, const char *value, struct buf *out, struct err *err)
{
    bool on;
    TRY(read_switch(name, value, &on, err));
    if (on) buf_add_c(out, "int8");
    return OK;
}

static enum status kv_int4(const char *name, const char *value, struct buf *out, struct err *err)
{
    bool on;
    (void)out;
    TRY(read_switch(name, value, &on, err));
    if (!on) return OK;
    return err_set(err, ERR_CONFIG,
                   "%s is \"%.80s\": a KV cache of 4 bits is not built; give 0, and for one of 8 "
                   "bits USE_CACHE_KV_INT8=1",
                   name, value);
}

/* ---- SPECULATE_* ---- */

static const struct {
    const char *theirs, *ours;
} METHODS[] = {
    { "mtp", "mtp" },
    { "inference_with_reference", "ngram" },
    { "draft_model", "draft" },
};

static const char *method_of(const char *value)
{
    for (size_t i = 0; i < COUNT_OF(METHODS); i++)
        if (strcmp(value, METHODS[i].theirs) == 0) return METHODS[i].ours;
    return NULL;
}

static enum status add_count(const char *name, const char *member, int64_t most, struct buf *out,
                             struct err *err)
{
    int64_t n;
    if (!beside(name)) return OK;
    TRY(read_number(name, beside(name), most, &n, err));
    buf_printf(out, ",\"%s\":%lld", member, (long long)n);
    return OK;
}

static enum status speculation(const char *name, const char *value, struct buf *out,
                               struct err *err)
{
    const char *method = method_of(value), *model = beside("SPECULATE_MODEL_PATH");
    if (strcmp(value, "None") == 0) return OK;
    if (!method)
        return err_set(err, ERR_CONFIG,
                       "%s is \"%.80s\", but must be mtp, inference_with_reference, draft_model or "
                       "None",
                       name, value);
    if (!model && strcmp(method, "draft") == 0)
        return err_set(
            err, ERR_CONFIG,
            "%s is draft_model, which needs SPECULATE_MODEL_PATH: a small model with the "
            "same vocabulary",
            name);
    buf_printf(out, "{\"method\":\"%s\"", method);
    enum status st = add_count("SPECULATE_MAX_DRAFT_TOKEN_NUM", "num_speculative_tokens",
                               DRAFT_TOKENS_MAX, out, err);
    if (st == OK && strcmp(method, "ngram") == 0)
        st = add_count("SPECULATE_MAX_NGRAM_SIZE", "prompt_lookup_max", DRAFT_LOOKUP_MAX, out, err);
    if (model && strcmp(method, "draft") == 0) {
        buf_add_c(out, ",\"model\":");
        json_add_string(out, str_of(model));
    }
    buf_add_char(out, '}');
    return st;
}

/* ---- the whole ---- */

static const struct {
    const char *name;
    enum status (*mean)(const char *name, const char *value, struct buf *out, struct err *err);
} VARIABLES[] = {
    { "MP_NUM", ranks_of_host },
    { "USE_CACHE_KV_INT8", kv_int8 },
    { "USE_CACHE_KV_INT4", kv_int4 },
    { "SPECULATE_METHOD", speculation },
};

enum status foreign_value(const char *name, const char *value, struct buf *out, struct err *err)
{
    for (size_t i = 0; i < COUNT_OF(VARIABLES); i++)
        if (strcmp(name, VARIABLES[i].name) == 0) return VARIABLES[i].mean(name, value, out, err);
    buf_add_c(out, value);
    return OK;
}
