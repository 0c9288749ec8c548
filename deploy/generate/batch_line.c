/* batch_line.c - see batch_line.h. */
#include "deploy/generate/batch_line.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "shared/base/json/json.h"
#include "shared/base/mem.h"

static const char *const URLS[] = { "/v1/chat/completions", "/v1/completions" };

static enum status parse_object(struct str text, cJSON **out, struct err *err)
{
    static const char right[] = "each line must be one whole JSON object";
    struct err cause = { 0 };
    enum status st = json_parse(text, false, out, &cause);
    if (st == OK && cJSON_IsObject(*out)) return OK;
    if (st == OK) cJSON_Delete(*out);
    return st == OK ? err_set(err, ERR_INVALID, "%s", right)
                    : err_set(err, st, "%s; %s", cause.text, right);
}

static enum status take_url(const cJSON *doc, struct batch_line *l, struct err *err)
{
    const char *method = "POST", *url = NULL;
    TRY(json_get_str(doc, "method", &method, err));
    TRY(json_get_str(doc, "url", &url, err));
    if (strcmp(method, "POST") != 0)
        return err_field(err, ERR_INVALID, "method", "method is '%.40s', but must be POST", method);
    for (size_t i = 0; url && i < COUNT_OF(URLS); i++)
        if (strcmp(url, URLS[i]) == 0) l->url = URLS[i];
    if (l->url) return OK;
    if (!url)
        return err_field(err, ERR_INVALID, "url", "url is missing; it must be %s or %s", URLS[0],
                         URLS[1]);
    return err_field(err, ERR_INVALID, "url", "url is '%.80s', but must be %s or %s", url, URLS[0],
                     URLS[1]);
}

static enum status take_body(const cJSON *doc, bool ignore_model, struct batch_line *l,
                             struct err *err)
{
    cJSON *body = cJSON_GetObjectItemCaseSensitive(doc, "body");
    bool stream = false;
    if (!cJSON_IsObject(body)) return err_field(err, ERR_INVALID, "body", "body must be an object");
    TRY(json_get_bool(body, "stream", &stream, err));
    if (stream)
        return err_field(err, ERR_INVALID, "stream", "a request of a batch cannot be streamed");
    if (ignore_model) cJSON_DeleteItemFromObjectCaseSensitive(body, "model");
    char *text = cJSON_PrintUnformatted(body);
    if (!text) return err_set(err, ERR_NOMEM, "not enough memory for the request");
    buf_add_c(&l->body, text);
    cJSON_free(text);
    return OK;
}

void batch_line_from_prompt(struct str prompt, uint64_t number, bool raw, struct batch_line *l)
{
    char id[24];
    snprintf(id, sizeof id, "%" PRIu64, number);
    *l = (struct batch_line){ .custom_id = mem_strdup(id), .url = URLS[raw ? 1 : 0] };
    buf_add_c(&l->body, raw ? "{\"prompt\":" : "{\"messages\":[{\"role\":\"user\",\"content\":");
    json_add_string(&l->body, prompt);
    buf_add_c(&l->body, raw ? "" : "}]");
}

enum status batch_line_parse(struct str text, bool ignore_model, struct batch_line *l,
                             struct err *err)
{
    cJSON *doc = NULL;
    const char *id = NULL;
    *l = (struct batch_line){ 0 };
    TRY(parse_object(text, &doc, err));
    enum status st = json_get_str(doc, "custom_id", &id, err);
    if (id) l->custom_id = mem_strdup(id);
    if (st == OK && !id) st = err_field(err, ERR_INVALID, "custom_id", "custom_id is missing");
    if (st == OK) st = take_url(doc, l, err);
    if (st == OK) st = take_body(doc, ignore_model, l, err);
    cJSON_Delete(doc);
    return st;
}

void batch_line_release(struct batch_line *l)
{
    mem_free(l->custom_id);
    l->custom_id = NULL;
    buf_release(&l->body);
}

static void add_head(struct buf *out, const char *id, const char *custom_id)
{
    buf_printf(out, "{\"id\":\"%s\",\"custom_id\":", id);
    if (custom_id) json_add_string(out, str_of(custom_id));
    else buf_add_c(out, "null");
}

static void add_error(struct buf *out, const char *code, struct str message)
{
    buf_printf(out, "{\"code\":\"%s\",\"message\":", code);
    json_add_string(out, message);
    buf_add_char(out, '}');
}

void batch_line_message(int status, struct str body, struct buf *out)
{
    cJSON *doc = cJSON_ParseWithLength(body.p, body.n);
    const cJSON *message = json_member(json_member(doc, "error"), "message");
    buf_add_c(out, cJSON_IsString(message) ? message->valuestring : "no message");
    if (status == 404) buf_add_c(out, "; --ignore-model answers such lines too");
    cJSON_Delete(doc);
}

void batch_line_answer(struct buf *out, const char *id, const char *custom_id, int status,
                       struct str body)
{
    struct buf message = { 0 };
    if (status != 200) batch_line_message(status, body, &message);
    add_head(out, id, custom_id);
    buf_printf(out, ",\"response\":{\"status_code\":%d,\"request_id\":\"%s\",\"body\":", status,
               id);
    buf_add_str(out, body);
    buf_add_c(out, "},\"error\":");
    if (status == 200) buf_add_c(out, "null");
    else add_error(out, "request_failed", buf_str(&message));
    buf_add_c(out, "}\n");
    buf_release(&message);
}

void batch_line_error(struct buf *out, const char *id, const char *custom_id, const char *message)
{
    add_head(out, id, custom_id);
    buf_add_c(out, ",\"response\":null,\"error\":");
    add_error(out, "invalid_line", str_of(message));
    buf_add_c(out, "}\n");
}
