/* infer_parameters.c - see infer_parameters.h. Thread: any. */
#include "shared/serve/grpc/infer_parameters.h"

#include <math.h>
#include <string.h>

#include "shared/base/json/json.h"
#include "shared/base/mem.h"

#define CHOICE(name) INFERENCE__INFER_PARAMETER__PARAMETER_CHOICE_##name

enum parameter_kind { KIND_NUMBER, KIND_BOOL, KIND_STRING };

/* Of a completion. Their ranges are checked where those of HTTP are. */
static const struct known {
    const char *name;
    enum parameter_kind kind;
} KNOWN[] = {
    { "max_tokens", KIND_NUMBER },
    { "min_tokens", KIND_NUMBER },
    { "temperature", KIND_NUMBER },
    { "top_p", KIND_NUMBER },
    { "top_k", KIND_NUMBER },
    { "min_p", KIND_NUMBER },
    { "seed", KIND_NUMBER },
    { "presence_penalty", KIND_NUMBER },
    { "frequency_penalty", KIND_NUMBER },
    { "repetition_penalty", KIND_NUMBER },
    { "ignore_eos", KIND_BOOL },
    { "skip_special_tokens", KIND_BOOL },
    { "stop", KIND_STRING },
};

static const char *const RESERVED[] = { "sequence_id", "sequence_start",     "sequence_end",
                                        "priority",    "binary_data_output", "headers" };

static bool is_reserved(const char *key)
{
    for (size_t i = 0; i < COUNT_OF(RESERVED); i++)
        if (strcmp(key, RESERVED[i]) == 0) return true;
    return strncmp(key, "triton_", 7) == 0 || strcmp(key, "timeout") == 0;
}

/* ---- those of Triton ---- */

static enum status read_timeout(const Inference__InferParameter *v, uint32_t *ms, struct err *err)
{
    uint64_t us = 0;
    if (v && v->parameter_choice_case == CHOICE(UINT64_PARAM)) us = v->uint64_param;
    else if (v && v->parameter_choice_case == CHOICE(INT64_PARAM) && v->int64_param >= 0)
        us = (uint64_t)v->int64_param;
    else
        return err_field(err, ERR_INVALID, "timeout",
                         "parameter timeout must be a whole number of microseconds, 0 or more");
    const uint64_t up = us / 1000 + (us % 1000 != 0);
    *ms = up > UINT32_MAX ? UINT32_MAX : (uint32_t)up;
    return OK;
}

enum status infer_parameters_read(Inference__Parameter *const *p, size_t n, bool *empty_final,
                                  uint32_t *timeout_ms, struct err *err)
{
    for (size_t i = 0; i < n; i++) {
        const Inference__InferParameter *v = p[i]->value;
        if (strcmp(p[i]->key, "timeout") == 0) TRY(read_timeout(v, timeout_ms, err));
        if (strcmp(p[i]->key, "triton_enable_empty_final_response") != 0) continue;
        if (!v || v->parameter_choice_case != CHOICE(BOOL_PARAM))
            return err_field(err, ERR_INVALID, "triton_enable_empty_final_response",
                             "parameter triton_enable_empty_final_response must be a bool_param");
        *empty_final = v->bool_param != 0;
    }
    return OK;
}

/* ---- those of a completion ---- */

static enum status unknown(const char *key, struct err *err)
{
    struct buf names = { 0 };
    for (size_t i = 0; i < COUNT_OF(KNOWN); i++)
        buf_printf(&names, "%s%s", i ? ", " : "", KNOWN[i].name);
    const enum status st = err_field(err, ERR_INVALID, "parameters",
                                     "there is no parameter '%.80s'; %s are known", key,
                                     names.data);
    buf_release(&names);
    return st;
}

static bool add_number(const Inference__InferParameter *v, struct buf *out)
{
    switch (v->parameter_choice_case) {
    case CHOICE(INT64_PARAM): buf_printf(out, "%lld", (long long)v->int64_param); return true;
    case CHOICE(UINT64_PARAM):
        buf_printf(out, "%llu", (unsigned long long)v->uint64_param);
        return true;
    case CHOICE(DOUBLE_PARAM): json_add_f64(out, v->double_param); return isfinite(v->double_param);
    default: return false;
    }
}

static bool add_value(const Inference__InferParameter *v, enum parameter_kind kind, struct buf *out)
{
    if (!v) return false;
    if (kind == KIND_NUMBER) return add_number(v, out);
    if (kind == KIND_BOOL && v->parameter_choice_case == CHOICE(BOOL_PARAM)) {
        buf_add_c(out, v->bool_param ? "true" : "false");
        return true;
    }
    if (kind != KIND_STRING || v->parameter_choice_case != CHOICE(STRING_PARAM)) return false;
    json_add_string(out, str_of(v->string_param));
    return true;
}

/* *seen: a bit for each of KNOWN. */
static enum status add_one(const Inference__Parameter *p, uint32_t *seen, struct buf *out,
                           struct err *err)
{
    static const char *const needed[] = { "an int64_param, a uint64_param or a finite double_param",
                                          "a bool_param", "a string_param" };
    for (size_t i = 0; i < COUNT_OF(KNOWN); i++) {
        if (strcmp(p->key, KNOWN[i].name) != 0) continue;
        if (*seen & UINT32_C(1) << i)
            return err_field(err, ERR_INVALID, KNOWN[i].name, "parameter %s is there twice",
                             KNOWN[i].name);
        *seen |= UINT32_C(1) << i;
        buf_printf(out, ",\"%s\":", KNOWN[i].name);
        if (add_value(p->value, KNOWN[i].kind, out)) return OK;
        return err_field(err, ERR_INVALID, KNOWN[i].name, "parameter %s must be %s", KNOWN[i].name,
                         needed[KNOWN[i].kind]);
    }
    return unknown(p->key, err);
}

enum status infer_parameters_add(Inference__Parameter *const *p, size_t n, struct buf *out,
                                 struct err *err)
{
    uint32_t seen = 0;
    for (size_t i = 0; i < n; i++)
        if (!is_reserved(p[i]->key)) TRY(add_one(p[i], &seen, out, err));
    return OK;
}
