/* infer_message.h - for tests: writes ModelInferRequest, reads responses of KServe's protocol. */
#ifndef BATON_TESTS_UNIT_SERVE_INFER_MESSAGE_H
#define BATON_TESTS_UNIT_SERVE_INFER_MESSAGE_H

#include <stdio.h>
#include <string.h>

#include "shared/base/buf.h"
#include "shared/base/mem.h"
#include "shared/serve/grpc/proto/kserve.pb-c.h"
#include "tests/harness/test.h"

/* An input: what is NULL or 0 is left out. */
struct message_input {
    const char *name, *datatype;
    const char *text; /* of BYTES */
    int flag;         /* of BOOL: 1 false, 2 true */
    bool typed;       /* in its contents, else raw */
    int64_t shape;    /* 0: 1 */
};

enum { MESSAGE_INPUTS_MAX = 3, MESSAGE_PARAMETERS_MAX = 4 };

struct message_parameter {
    const char *key, *text;
    int flag;       /* 1 false, 2 true */
    int64_t number; /* when not 0 */
    double real;    /* likewise */
    bool is_zero;   /* the number 0 */
};

struct message_of {
    const char *model, *version, *id;
    struct message_input inputs[MESSAGE_INPUTS_MAX];
    struct message_parameter parameters[MESSAGE_PARAMETERS_MAX];
    const char *outputs[2];
};

#define MESSAGE_CHOICE(name) INFERENCE__INFER_PARAMETER__PARAMETER_CHOICE_##name

static inline char *message_text(const char *s) { return (char *)(uintptr_t)(s ? s : ""); }

static inline void message_value(const struct message_parameter *p, Inference__InferParameter *v)
{
    inference__infer_parameter__init(v);
    if (p->text) {
        v->parameter_choice_case = MESSAGE_CHOICE(STRING_PARAM);
        v->string_param = message_text(p->text);
    } else if (p->flag) {
        v->parameter_choice_case = MESSAGE_CHOICE(BOOL_PARAM);
        v->bool_param = p->flag == 2;
    } else if (p->number || p->is_zero) {
        v->parameter_choice_case = MESSAGE_CHOICE(INT64_PARAM);
        v->int64_param = p->number;
    } else if (p->real != 0) {
        v->parameter_choice_case = MESSAGE_CHOICE(DOUBLE_PARAM);
        v->double_param = p->real;
    }
}

static inline void message_input(const struct message_input *i, Inference__InferInputTensor *t,
                                 Inference__InferTensorContents *contents, int64_t *shape,
                                 ProtobufCBinaryData *raw, struct buf *bytes)
{
    static protobuf_c_boolean flags[2] = { 0, 1 };
    inference__infer_input_tensor__init(t);
    t->name = message_text(i->name);
    t->datatype = message_text(i->datatype);
    *shape = i->shape ? i->shape : 1;
    t->shape = shape;
    t->n_shape = 1;
    if (i->typed) {
        inference__infer_tensor_contents__init(contents);
        t->contents = contents;
        if (i->flag) {
            contents->bool_contents = &flags[i->flag - 1];
            contents->n_bool_contents = 1;
        } else if (i->text) {
            raw->data = (uint8_t *)message_text(i->text);
            raw->len = strlen(i->text);
            contents->bytes_contents = raw;
            contents->n_bytes_contents = 1;
        }
        return;
    }
    if (i->flag) buf_add_char(bytes, (char)(i->flag - 1));
    else {
        buf_add_u32le(bytes, (uint32_t)strlen(i->text));
        buf_add_c(bytes, i->text);
    }
    raw->data = (uint8_t *)bytes->data;
    raw->len = bytes->len;
}

/* The message's bytes; the caller releases them. */
static inline struct buf message_write(const struct message_of *from)
{
    Inference__ModelInferRequest m = INFERENCE__MODEL_INFER_REQUEST__INIT;
    Inference__InferInputTensor tensors[MESSAGE_INPUTS_MAX], *inputs[MESSAGE_INPUTS_MAX];
    Inference__InferTensorContents contents[MESSAGE_INPUTS_MAX];
    Inference__Parameter parameters[MESSAGE_PARAMETERS_MAX], *list[MESSAGE_PARAMETERS_MAX];
    Inference__InferParameter values[MESSAGE_PARAMETERS_MAX];
    Inference__InferRequestedOutputTensor wanted[2], *outputs[2];
    ProtobufCBinaryData raw[MESSAGE_INPUTS_MAX], raw_list[MESSAGE_INPUTS_MAX];
    struct buf bytes[MESSAGE_INPUTS_MAX] = { { 0 } }, out = { 0 };
    int64_t shapes[MESSAGE_INPUTS_MAX];
    m.model_name = message_text(from->model ? from->model : "model");
    m.model_version = message_text(from->version);
    m.id = message_text(from->id);
    for (int i = 0; i < MESSAGE_INPUTS_MAX && from->inputs[i].name; i++) {
        message_input(&from->inputs[i], &tensors[i], &contents[i], &shapes[i], &raw[i], &bytes[i]);
        inputs[m.n_inputs++] = &tensors[i];
        if (!from->inputs[i].typed) raw_list[m.n_raw_input_contents++] = raw[i];
    }
    for (int i = 0; i < MESSAGE_PARAMETERS_MAX && from->parameters[i].key; i++) {
        inference__parameter__init(&parameters[i]);
        message_value(&from->parameters[i], &values[i]);
        parameters[i].key = message_text(from->parameters[i].key);
        parameters[i].value = &values[i];
        list[m.n_parameters++] = &parameters[i];
    }
    for (int i = 0; i < 2 && from->outputs[i]; i++) {
        inference__infer_requested_output_tensor__init(&wanted[i]);
        wanted[i].name = message_text(from->outputs[i]);
        outputs[m.n_outputs++] = &wanted[i];
    }
    m.inputs = inputs;
    m.parameters = list;
    m.outputs = outputs;
    m.raw_input_contents = raw_list;
    buf_reserve(&out, inference__model_infer_request__get_packed_size(&m));
    out.len = inference__model_infer_request__pack(&m, (uint8_t *)out.data);
    for (int i = 0; i < MESSAGE_INPUTS_MAX; i++) buf_release(&bytes[i]);
    return out;
}

/* A response, of a stream or not. */
struct message_answer {
    struct buf error, model, id;
    struct buf text[2]; /* of its outputs */
    char names[2][32];
    int n_outputs;
    int final; /* triton_final_response: -1 not there, 0, 1 */
};

static inline void message_take(const Inference__ModelInferResponse *m, struct message_answer *a)
{
    buf_add_c(&a->model, m->model_name);
    buf_add_c(&a->id, m->id);
    CHECK_EQ_STR(m->model_version, "1");
    CHECK_EQ_INT(m->n_outputs, m->n_raw_output_contents);
    a->n_outputs = (int)m->n_outputs;
    for (size_t i = 0; i < m->n_outputs; i++) {
        const ProtobufCBinaryData *raw = &m->raw_output_contents[i];
        CHECK_EQ_STR(m->outputs[i]->datatype, "BYTES");
        CHECK(m->outputs[i]->n_shape == 1 && m->outputs[i]->shape[0] == 1);
        CHECK(raw->len >= 4);
        CHECK_EQ_INT(raw->data[0] | raw->data[1] << 8 | raw->data[2] << 16, raw->len - 4);
        buf_add(&a->text[i], raw->data + 4, raw->len - 4);
        snprintf(a->names[i], sizeof a->names[i], "%s", m->outputs[i]->name);
    }
    for (size_t i = 0; i < m->n_parameters; i++) {
        CHECK_EQ_STR(m->parameters[i]->key, "triton_final_response");
        a->final = m->parameters[i]->value->bool_param;
    }
}

static inline struct message_answer message_read(struct str bytes, bool is_stream)
{
    struct message_answer a = { .final = -1 };
    if (is_stream) {
        Inference__ModelStreamInferResponse *m = inference__model_stream_infer_response__unpack(
            NULL, bytes.n, (const uint8_t *)bytes.p);
        CHECK(m && m->infer_response);
        buf_add_c(&a.error, m->error_message);
        message_take(m->infer_response, &a);
        inference__model_stream_infer_response__free_unpacked(m, NULL);
    } else {
        Inference__ModelInferResponse *m = inference__model_infer_response__unpack(
            NULL, bytes.n, (const uint8_t *)bytes.p);
        CHECK(m);
        message_take(m, &a);
        inference__model_infer_response__free_unpacked(m, NULL);
    }
    return a;
}

static inline void message_answer_release(struct message_answer *a)
{
    buf_release(&a->error);
    buf_release(&a->model);
    buf_release(&a->id);
    for (int i = 0; i < 2; i++) buf_release(&a->text[i]);
}

#endif
