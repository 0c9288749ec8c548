/* infer_answer.c - see infer_answer.h. Thread: loop. */
#include "shared/serve/grpc/infer_answer.h"

#include "shared/base/json/json.h"
#include "shared/serve/grpc/infer_response.h"
#include "shared/serve/grpc/json_scan.h"
#include "shared/serve/serve.h"

enum { HTTP_INTERNAL = 500 };

void infer_answer_begin(struct infer_answer *a, const struct infer_request *r, bool is_stream)
{
    *a = (struct infer_answer){ .request = r, .is_stream = is_stream };
}

void infer_answer_release(struct infer_answer *a)
{
    buf_release(&a->response);
    buf_release(&a->last);
    buf_release(&a->why);
}

/* ---- responses ---- */

static struct infer_reply reply_of(const struct infer_answer *a, enum infer_final final)
{
    const struct infer_request *r = a->request;
    return (struct infer_reply){ .model = r->model.len ? r->model.data : "",
                                 .id = r->id.len ? r->id.data : "",
                                 .final = final };
}

/* Of a response that holds the end of the answer, or does not. */
static enum infer_final final_of(struct infer_answer *a, bool is_last)
{
    if (!a->is_stream) return INFER_ONLY;
    if (!is_last || a->request->empty_final) return INFER_MORE;
    a->is_final_sent = true;
    return INFER_FINAL;
}

static void write_response(struct infer_answer *a, const struct infer_output *outputs, size_t n,
                           bool is_last)
{
    const struct infer_reply r = reply_of(a, final_of(a, is_last));
    infer_response_write(&r, outputs, n, &a->response);
}

static void write_message(struct infer_answer *a, const char *why)
{
    const struct infer_reply r = reply_of(a, INFER_FINAL);
    infer_response_write_error(&r, why, &a->response);
    a->is_final_sent = true;
}

/* Of a request that failed in the API server. */
static void set_failed(struct infer_answer *a, int http, const char *why)
{
    a->failed = true;
    a->code = grpc_status_of_http(http);
    buf_clear(&a->why);
    buf_add_c(&a->why, why);
}

/* ---- the native form: an item is the text of OUT, in a list ---- */

static void write_native(struct infer_answer *a, struct str item, bool is_last)
{
    struct buf list = { 0 };
    buf_add_char(&list, '[');
    buf_add_str(&list, item);
    buf_add_char(&list, ']');
    const struct infer_output out = { "OUT", buf_str(&list) };
    write_response(a, &out, 1, is_last);
    buf_release(&list);
}

/* An error is not in a list, as in FastDeploy's server. */
static void write_native_error(struct infer_answer *a, struct str object)
{
    const struct infer_output out = { "OUT", object };
    write_response(a, &out, 1, true);
}

static void fail_native(struct infer_answer *a, struct str object)
{
    cJSON *doc = NULL;
    struct err err = { 0 };
    int64_t code = HTTP_INTERNAL;
    const char *why = "the request failed";
    enum status st = json_parse(object, false, &doc, &err);
    if (st == OK && json_get_i64(doc, "error_code", 400, 599, &code, &err) != OK)
        code = HTTP_INTERNAL;
    if (st == OK) st = json_get_str(doc, "error_msg", &why, &err);
    set_failed(a, (int)code, st == OK ? why : err.text);
    cJSON_Delete(doc);
    if (a->is_stream) write_native_error(a, object);
}

static void add_native(struct infer_answer *a, struct str item)
{
    const struct str is_end = json_scan_find(item, "is_end");
    if (json_scan_find(item, "error_msg").p) {
        fail_native(a, item);
    } else if (a->is_stream) {
        write_native(a, item, str_eq_c(is_end, "1"));
    } else {
        buf_clear(&a->last);
        buf_add_str(&a->last, item);
    }
}

void infer_answer_add_error(struct infer_answer *a, enum status st, const char *why)
{
    struct buf object = { 0 };
    const struct infer_request *r = a->request;
    if (r->form != INFER_NATIVE) {
        write_message(a, why);
        return;
    }
    serve_native_error_json(&object, st, why, buf_str(&r->body), r->id.len ? r->id.data : "");
    write_native_error(a, buf_str(&object));
    buf_release(&object);
}

/* ---- completions ---- */

static void write_text(struct infer_answer *a, const char *text, const char *reason)
{
    struct infer_output out[INFER_OUTPUTS_MAX];
    size_t n = 0;
    if (a->request->outputs & INFER_TEXT_OUTPUT)
        out[n++] = (struct infer_output){ "text_output", str_of(text) };
    if (a->request->outputs & INFER_FINISH_REASON)
        out[n++] = (struct infer_output){ "finish_reason", str_of(reason) };
    write_response(a, out, n, reason != NULL);
}

static void fail_text(struct infer_answer *a, int http, const cJSON *error)
{
    struct err err = { 0 };
    const char *why = "the request failed";
    if (json_get_str(error, "message", &why, &err) != OK) why = err.text;
    set_failed(a, http, why);
    if (a->is_stream) write_message(a, why);
}

/* A chunk, or a whole answer: both have the text of their only choice in it. */
static void add_text(struct infer_answer *a, int http, struct str json)
{
    cJSON *doc = NULL;
    struct err err = { 0 };
    const char *text = "", *reason = NULL;
    enum status st = json_parse(json, false, &doc, &err);
    const cJSON *error = json_member(doc, "error"),
                *choice = cJSON_GetArrayItem(json_member(doc, "choices"), 0);
    if (st == OK && !error) st = json_get_str(choice, "text", &text, &err);
    if (st == OK && !error) st = json_get_str(choice, "finish_reason", &reason, &err);
    if (st != OK) set_failed(a, HTTP_INTERNAL, err.text);
    else if (error) fail_text(a, http, error);
    else if (choice) write_text(a, text, reason);
    cJSON_Delete(doc);
}

/* ---- both ---- */

void infer_answer_add(struct infer_answer *a, struct str json)
{
    if (a->request->form == INFER_NATIVE) add_native(a, json);
    else if (!str_eq_c(json, "[DONE]")) add_text(a, HTTP_INTERNAL, json);
}

void infer_answer_add_whole(struct infer_answer *a, int http, struct str json)
{
    if (a->request->form == INFER_NATIVE) add_native(a, json);
    else add_text(a, http, json);
}

void infer_answer_end(struct infer_answer *a)
{
    if (!a->is_stream) {
        if (!a->failed && a->request->form == INFER_NATIVE)
            write_native(a, buf_str(&a->last), true);
        return;
    }
    if (a->is_final_sent || !a->request->empty_final) return;
    const struct infer_reply r = reply_of(a, INFER_FINAL);
    infer_response_write(&r, NULL, 0, &a->response);
}
