/* openai_errors.c - errors in OpenAI's format. Clients choose their exception class by the HTTP
 * status and show type, param and code. Thread: any. */
#include "shared/serve/openai/openai.h"

#include <string.h>

static const struct {
    enum status st;
    const char *code;
} CODES[] = {
    { ERR_BUSY, "rate_limit_exceeded" },
    { ERR_FULL, "rate_limit_exceeded" },
    { ERR_UNAVAILABLE, "unavailable" },
    { ERR_INVALID, "invalid_value" },
    { ERR_TOO_LONG, "context_length_exceeded" },
    { ERR_NOT_FOUND, "not_found" },
    { ERR_UNSUPPORTED, "unsupported_value" },
    { ERR_FORMAT, "invalid_json" },
    { ERR_UNAUTHORIZED, "invalid_api_key" },
    { ERR_TIMEOUT, "timeout" },
    { ERR_CANCELED, "unavailable" },
    { ERR_NOMEM, "unavailable" },
    { ERR_CONFLICT, "conflict" },
};

static const char *error_type(int http)
{
    if (http == 429) return "rate_limit_error";
    if (http == 503) return "service_unavailable_error";
    if (http == 504) return "timeout_error";
    return http < 500 ? "invalid_request_error" : "server_error";
}

static void add_or_null(struct buf *out, const char *text)
{
    if (text) json_add_string(out, str_of(text));
    else buf_add_c(out, "null");
}

void openai_write_error(const struct api_error *e, struct buf *out)
{
    buf_add_c(out, "{\"error\":{\"message\":");
    json_add_string(out, str_of(e->message));
    buf_printf(out, ",\"type\":\"%s\",\"param\":", error_type(e->http));
    add_or_null(out, e->param);
    buf_add_c(out, ",\"code\":");
    add_or_null(out, e->code);
    buf_add_c(out, "}}");
}

struct api_error openai_error_of(enum status st, const char *message, const char *param)
{
    const char *code = "internal_error";
    for (size_t i = 0; i < sizeof CODES / sizeof *CODES; i++)
        if (CODES[i].st == st) code = CODES[i].code;
    if (st == ERR_NOT_FOUND && param && strcmp(param, "model") == 0) code = "model_not_found";
    return (struct api_error){
        .http = st == ERR_CANCELED ? 503 : status_http(st),
        .code = code,
        .message = message,
        .param = param,
    };
}

void serve_error_json(struct buf *out, enum status st, const char *message, const char *param)
{
    const struct api_error e = openai_error_of(st, message, param);
    openai_write_error(&e, out);
}
