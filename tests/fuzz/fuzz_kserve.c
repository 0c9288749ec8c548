/* fuzz_kserve.c - arbitrary bytes as a ModelInferRequest of KServe's protocol, by both calls, and
 * as the JSON in one. What is accepted is JSON for the API server; what is refused has a sentence. The
 * scanner of JSON agrees with the parser on what is a list, and of how many items. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "shared/base/json/json.h"
#include "shared/serve/grpc/infer_answer.h"
#include "shared/serve/grpc/infer_request.h"
#include "shared/serve/grpc/json_scan.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static bool has_model(const void *arg, const char *name)
{
    (void)arg;
    return strcmp(name, "model") == 0;
}

static void check_accepted(const struct infer_request *r)
{
    cJSON *doc = NULL;
    struct err err;
    const struct str body = buf_str(&r->body);
    if (body.n < 2 || body.p[0] != '{' || body.p[body.n - 1] != '}') abort();
    /* A completion is written here; a native request is its client's own text. */
    if (r->form == INFER_TEXT && json_parse(body, true, &doc, &err) != OK) abort();
    cJSON_Delete(doc);
}

static void check_request(struct str bytes, bool is_stream)
{
    const struct infer_reading reading = { .message = bytes,
                                           .is_stream = is_stream,
                                           .has_model = has_model };
    struct infer_request r;
    struct err err = { 0 };
    if (infer_request_read(&reading, &r, &err) == OK) check_accepted(&r);
    else if (!err.text[0]) abort();
    infer_request_release(&r);
}

static void check_scan(struct str text)
{
    cJSON *doc = NULL;
    struct err err;
    struct str first, key, value;
    size_t n = 0;
    const bool is_list = json_scan_list(text, &first, &n, &err) == OK;
    for (size_t at = 0; json_scan_member(text, &at, &key, &value);)
        if (value.n == 0 || at > text.n) abort();
    if (json_parse(text, false, &doc, &err) != OK) return;
    if (cJSON_IsArray(doc) && (!is_list || n != (size_t)cJSON_GetArraySize(doc))) abort();
    if (!cJSON_IsArray(doc) && is_list) abort();
    int n_members = 0;
    for (size_t at = 0; json_scan_member(text, &at, &key, &value);) n_members++;
    if (n_members != (cJSON_IsObject(doc) ? cJSON_GetArraySize(doc) : 0)) abort();
    cJSON_Delete(doc);
}

/* As an item of an answer, which other code writes: it may be anything as well. */
static void check_answer(struct str item, enum infer_form form, bool is_stream)
{
    const struct infer_request r = { .form = form, .outputs = INFER_TEXT_OUTPUT };
    struct infer_answer a;
    infer_answer_begin(&a, &r, is_stream);
    infer_answer_add(&a, item);
    buf_release(&a.response);
    infer_answer_add_whole(&a, 400, item);
    infer_answer_end(&a);
    infer_answer_release(&a);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const struct str bytes = { (const char *)data, size };
    check_request(bytes, true);
    check_request(bytes, false);
    check_scan(bytes);
    for (int i = 0; i < 4; i++) check_answer(bytes, i & 1 ? INFER_NATIVE : INFER_TEXT, i & 2);
    return 0;
}
