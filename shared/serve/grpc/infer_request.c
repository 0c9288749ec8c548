/* infer_request.c - see infer_request.h. Thread: any. */
#include "shared/serve/grpc/infer_request.h"

#include <protobuf-c/protobuf-c.h>
#include <stdio.h>
#include <string.h>

#include "shared/base/json/json.h"
#include "shared/base/mem.h"
#include "shared/serve/grpc/infer_parameters.h"
#include "shared/serve/grpc/json_scan.h"
#include "shared/serve/grpc/proto/kserve.pb-c.h"

enum {
    SHOWN_MAX = 80,          /* of a client's text, in an error */
    LENGTH_BYTES = 4,        /* before an element of a BYTES tensor */
    UNPACK_EXTRA = 256 << 10 /* bytes for fields, beside what the message itself has */
};

/* ---- unpacking in bounded memory: an empty field is two bytes on the wire, a struct here ---- */

struct unpacking {
    struct arena arena;
    size_t n_left;
};

static void *unpack_alloc(void *arg, size_t n)
{
    struct unpacking *u = arg;
    if (n > u->n_left) return NULL;
    u->n_left -= n;
    return arena_alloc(&u->arena, n);
}

static void unpack_free(void *arg, void *p)
{
    (void)arg;
    (void)p; /* all of it goes with the arena */
}

/* ---- tensors ---- */

static const char *shown(const char *text, char out[SHOWN_MAX + 4])
{
    const size_t n = strlen(text);
    int k = n > SHOWN_MAX ? SHOWN_MAX : (int)n;
    while (n > SHOWN_MAX && k > 0 && ((unsigned char)text[k] & 0xC0) == 0x80) k--;
    snprintf(out, SHOWN_MAX + 4, "%.*s%s", k, text, n > SHOWN_MAX ? "..." : "");
    return out;
}

static enum status check_tensor(const Inference__InferInputTensor *t, const char *datatype,
                                struct err *err)
{
    char name[SHOWN_MAX + 4], type[SHOWN_MAX + 4];
    if (strcmp(t->datatype, datatype) != 0)
        return err_field(err, ERR_INVALID, "datatype",
                         "input '%s' has the datatype '%s', but must have %s", shown(t->name, name),
                         shown(t->datatype, type), datatype);
    for (size_t i = 0; i < t->n_shape; i++)
        if (t->shape[i] != 1)
            return err_field(err, ERR_INVALID, "shape",
                             "input '%s' has %lld as a dimension of its shape, but its shape must "
                             "be [1]: it has one element",
                             shown(t->name, name), (long long)t->shape[i]);
    if (t->n_shape == 0)
        return err_field(err, ERR_INVALID, "shape", "input '%s' has no shape, but must have [1]",
                         shown(t->name, name));
    return OK;
}

/* Raw contents, or typed ones: not some of each, as KServe says. */
static enum status check_contents(const Inference__ModelInferRequest *m, struct err *err)
{
    for (size_t i = 0; i < m->n_inputs && m->n_raw_input_contents; i++)
        if (m->inputs[i]->contents)
            return err_field(err, ERR_INVALID, "raw_input_contents",
                             "the request has raw_input_contents and an input with contents, but "
                             "only one of them may be used");
    if (m->n_raw_input_contents && m->n_raw_input_contents != m->n_inputs)
        return err_field(err, ERR_INVALID, "raw_input_contents",
                         "the request has %zu raw_input_contents, but %zu inputs; each input needs "
                         "one",
                         m->n_raw_input_contents, m->n_inputs);
    return OK;
}

static enum status raw_bytes(const Inference__InferInputTensor *t, const ProtobufCBinaryData *raw,
                             struct str *out, struct err *err)
{
    char name[SHOWN_MAX + 4];
    const uint8_t *p = raw->data;
    if (raw->len >= LENGTH_BYTES) {
        const uint32_t n = (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 |
                           (uint32_t)p[3] << 24;
        *out = (struct str){ (const char *)p + LENGTH_BYTES, n };
        if (n == raw->len - LENGTH_BYTES) return OK;
    }
    return err_field(
        err, ERR_INVALID, "raw_input_contents",
        "the raw contents of input '%s' have %zu bytes, but must have one element: its "
        "length in 4 bytes, little endian, and that many bytes",
        shown(t->name, name), raw->len);
}

static enum status bytes_of(const Inference__ModelInferRequest *m, size_t i, struct str *out,
                            struct err *err)
{
    const Inference__InferInputTensor *t = m->inputs[i];
    char name[SHOWN_MAX + 4];
    TRY(check_tensor(t, "BYTES", err));
    if (m->n_raw_input_contents) return raw_bytes(t, &m->raw_input_contents[i], out, err);
    if (!t->contents || t->contents->n_bytes_contents != 1)
        return err_field(err, ERR_INVALID, "contents",
                         "input '%s' has %zu bytes_contents, but must have one, or its element in "
                         "raw_input_contents",
                         shown(t->name, name), t->contents ? t->contents->n_bytes_contents : 0);
    const ProtobufCBinaryData *b = &t->contents->bytes_contents[0];
    *out = (struct str){ b->len ? (const char *)b->data : "", b->len }; /* NULL: of no bytes */
    return OK;
}

static enum status bool_of(const Inference__ModelInferRequest *m, size_t i, bool *out,
                           struct err *err)
{
    const Inference__InferInputTensor *t = m->inputs[i];
    char name[SHOWN_MAX + 4];
    TRY(check_tensor(t, "BOOL", err));
    const ProtobufCBinaryData *raw = m->n_raw_input_contents ? &m->raw_input_contents[i] : NULL;
    if (raw && raw->len == 1) {
        *out = raw->data[0] != 0;
        return OK;
    }
    if (!raw && t->contents && t->contents->n_bool_contents == 1) {
        *out = t->contents->bool_contents[0] != 0;
        return OK;
    }
    return err_field(err, ERR_INVALID, "contents", "input '%s' must have one element, of one byte",
                     shown(t->name, name));
}

/* ---- the native form ---- */

/* Puts members that the object lacks at its front. */
static void add_object(struct buf *out, struct str object, struct str members)
{
    struct str rest = str_trim(str_sub(object, 1, SIZE_MAX));
    buf_add_char(out, '{');
    buf_add_str(out, members);
    if (members.n && !str_eq_c(rest, "}")) buf_add_char(out, ',');
    buf_add_str(out, rest);
}

static enum status read_native(const struct infer_reading *r, const Inference__ModelInferRequest *m,
                               struct infer_request *out, struct err *err)
{
    struct str text, object;
    struct buf members = { 0 };
    size_t n;
    TRY(bytes_of(m, 0, &text, err));
    if (json_scan_list(text, &object, &n, err) != OK)
        return err_field(err, ERR_INVALID, "IN",
                         "input 'IN' must be a JSON list of one request object, but is no list");
    if (n != 1)
        return err_field(err, ERR_INVALID, "IN",
                         "request data should not be empty and query num %zu should be 1", n);
    if (object.n == 0 || object.p[0] != '{')
        return err_field(err, ERR_INVALID, "IN",
                         "the list in input 'IN' must hold an object, the request");
    if (out->id.len && !json_scan_find(object, "req_id").p) {
        buf_add_c(&members, "\"req_id\":");
        json_add_string(&members, buf_str(&out->id));
    }
    if (!r->is_stream && !json_scan_find(object, "return_all_tokens").p)
        buf_add_c(&members,
                  members.len ? ",\"return_all_tokens\":true" : "\"return_all_tokens\":true");
    add_object(&out->body, object, buf_str(&members));
    buf_release(&members);
    return OK;
}

/* ---- completions ---- */

static enum status unknown_input(const char *name, struct err *err)
{
    char text[SHOWN_MAX + 4];
    return err_field(err, ERR_INVALID, "inputs",
                     "there is no input '%s'; IN, or text_input and streaming, are known",
                     shown(name, text));
}

static enum status read_text(const struct infer_reading *r, const Inference__ModelInferRequest *m,
                             struct infer_request *out, struct err *err)
{
    struct str text = { NULL, 0 };
    if (m->n_inputs > 2 ||
        (m->n_inputs == 2 && strcmp(m->inputs[0]->name, m->inputs[1]->name) == 0))
        return err_field(err, ERR_INVALID, "inputs",
                         "the request has %zu inputs; text_input and streaming, each once, are "
                         "known",
                         m->n_inputs);
    for (size_t i = 0; i < m->n_inputs; i++) {
        const char *name = m->inputs[i]->name;
        if (strcmp(name, "text_input") == 0) TRY(bytes_of(m, i, &text, err));
        else if (strcmp(name, "streaming") == 0 || strcmp(name, "stream") == 0)
            TRY(bool_of(m, i, &out->streams, err));
        else return unknown_input(name, err);
    }
    if (!text.p) return err_field(err, ERR_INVALID, "inputs", "there is no input text_input");
    if (memchr(text.p, 0, text.n))
        return err_field(err, ERR_INVALID, "text_input",
                         "input 'text_input' has a zero byte, which no text may have");
    if (out->streams && !r->is_stream)
        return err_field(err, ERR_INVALID, "streaming",
                         "streaming is true, which needs ModelStreamInfer; ModelInfer has one "
                         "response");
    buf_printf(&out->body, "{\"stream\":%s,\"prompt\":", out->streams ? "true" : "false");
    json_add_string(&out->body, text);
    TRY(infer_parameters_add(m->parameters, m->n_parameters, &out->body, err));
    buf_add_char(&out->body, '}');
    return OK;
}

/* ---- the request ---- */

static enum status read_outputs(const Inference__ModelInferRequest *m, struct infer_request *out,
                                struct err *err)
{
    char text[SHOWN_MAX + 4];
    out->outputs = m->n_outputs ? 0 : INFER_TEXT_OUTPUT | INFER_FINISH_REASON;
    for (size_t i = 0; i < m->n_outputs; i++) {
        const char *name = m->outputs[i]->name;
        if (out->form == INFER_NATIVE && strcmp(name, "OUT") == 0) continue;
        if (out->form == INFER_TEXT && strcmp(name, "text_output") == 0)
            out->outputs |= INFER_TEXT_OUTPUT;
        else if (out->form == INFER_TEXT && strcmp(name, "finish_reason") == 0)
            out->outputs |= INFER_FINISH_REASON;
        else
            return err_field(err, ERR_INVALID, "outputs", "there is no output '%s'; %s",
                             shown(name, text),
                             out->form == INFER_NATIVE
                                 ? "with input IN there is OUT"
                                 : "with text_input there are text_output and finish_reason");
    }
    return OK;
}

static enum status check_model(const struct infer_reading *r, const Inference__ModelInferRequest *m,
                               struct err *err)
{
    char text[SHOWN_MAX + 4];
    const char *version = m->model_version;
    if (!r->has_model(r->arg, m->model_name))
        return err_field(err, ERR_NOT_FOUND, "model_name", "there is no model '%s' here",
                         shown(m->model_name, text));
    if (version[0] && strcmp(version, "1") != 0)
        return err_field(err, ERR_NOT_FOUND, "model_version",
                         "there is no version '%s' of the model; it has version 1",
                         shown(version, text));
    return OK;
}

static enum status read_message(const struct infer_reading *r,
                                const Inference__ModelInferRequest *m, struct infer_request *out,
                                struct err *err)
{
    buf_add_c(&out->model, m->model_name);
    buf_add_c(&out->id, m->id);
    TRY(infer_parameters_read(m->parameters, m->n_parameters, &out->empty_final, &out->timeout_ms,
                              err));
    TRY(check_model(r, m, err));
    TRY(check_contents(m, err));
    if (m->n_inputs == 0)
        return err_field(err, ERR_INVALID, "inputs",
                         "the request has no input; IN, or text_input and streaming, are known");
    const bool is_native = strcmp(m->inputs[0]->name, "IN") == 0;
    if (is_native && m->n_inputs > 1) return unknown_input(m->inputs[1]->name, err);
    out->form = is_native ? INFER_NATIVE : INFER_TEXT;
    TRY(read_outputs(m, out, err));
    return is_native ? read_native(r, m, out, err) : read_text(r, m, out, err);
}

enum status infer_request_read(const struct infer_reading *r, struct infer_request *out,
                               struct err *err)
{
    struct unpacking u = { .n_left = 2 * r->message.n + UNPACK_EXTRA };
    ProtobufCAllocator in_arena = { unpack_alloc, unpack_free, &u };
    enum status st;
    *out = (struct infer_request){ .form = INFER_NO_FORM };
    arena_init(&u.arena);
    Inference__ModelInferRequest *m = inference__model_infer_request__unpack(
        &in_arena, r->message.n, (const uint8_t *)r->message.p);
    if (m) st = read_message(r, m, out, err);
    else
        st = err_set(err, ERR_FORMAT,
                     "the message is not a ModelInferRequest, or has too many fields");
    arena_release(&u.arena);
    return st;
}

void infer_request_release(struct infer_request *r)
{
    buf_release(&r->model);
    buf_release(&r->id);
    buf_release(&r->body);
}
