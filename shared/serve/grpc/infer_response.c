/* infer_response.c - see infer_response.h. Thread: any. */
#include "shared/serve/grpc/infer_response.h"

#include "shared/base/assert.h"
#include "shared/base/mem.h"
#include "shared/serve/grpc/proto/kserve.pb-c.h"

/* protobuf-c writes structs with fields that are not const. */
static char *text_field(const char *text) { return (char *)(uintptr_t)text; }

/* What a response is made of: protobuf-c wants pointers to all of it. */
struct parts {
    Inference__InferParameter final;
    Inference__Parameter parameter, *parameters[1];
    Inference__InferOutputTensor tensors[INFER_OUTPUTS_MAX], *outputs[INFER_OUTPUTS_MAX];
    ProtobufCBinaryData raw[INFER_OUTPUTS_MAX];
    int64_t shape[1];
    struct buf bytes;
};

static void add_final(struct parts *p, enum infer_final final, Inference__ModelInferResponse *m)
{
    if (final == INFER_ONLY) return;
    inference__infer_parameter__init(&p->final);
    inference__parameter__init(&p->parameter);
    p->final.parameter_choice_case = INFERENCE__INFER_PARAMETER__PARAMETER_CHOICE_BOOL_PARAM;
    p->final.bool_param = final == INFER_FINAL;
    p->parameter.key = text_field("triton_final_response");
    p->parameter.value = &p->final;
    p->parameters[0] = &p->parameter;
    m->parameters = p->parameters;
    m->n_parameters = 1;
}

static void add_outputs(struct parts *p, const struct infer_output *outputs, size_t n,
                        Inference__ModelInferResponse *m)
{
    size_t at = 0;
    ASSERT(n <= INFER_OUTPUTS_MAX);
    p->shape[0] = 1;
    for (size_t i = 0; i < n; i++) {
        buf_add_u32le(&p->bytes, (uint32_t)outputs[i].bytes.n);
        buf_add_str(&p->bytes, outputs[i].bytes);
    }
    for (size_t i = 0; i < n; i++) {
        Inference__InferOutputTensor *t = &p->tensors[i];
        inference__infer_output_tensor__init(t);
        t->name = text_field(outputs[i].name);
        t->datatype = text_field("BYTES");
        t->shape = p->shape;
        t->n_shape = 1;
        p->outputs[i] = t;
        p->raw[i].data = (uint8_t *)p->bytes.data + at;
        p->raw[i].len = sizeof(uint32_t) + outputs[i].bytes.n;
        at += p->raw[i].len;
    }
    m->outputs = p->outputs;
    m->raw_output_contents = p->raw;
    m->n_outputs = m->n_raw_output_contents = n;
}

static void pack(const ProtobufCMessage *m, struct buf *out)
{
    const size_t n = protobuf_c_message_get_packed_size(m);
    out->len += protobuf_c_message_pack(m, (uint8_t *)buf_reserve(out, n));
    out->data[out->len] = 0;
}

static void pack_in_stream(Inference__ModelInferResponse *m, const char *why, struct buf *out)
{
    Inference__ModelStreamInferResponse s;
    inference__model_stream_infer_response__init(&s);
    if (why) s.error_message = text_field(why);
    s.infer_response = m;
    pack(&s.base, out);
}

static void begin(const struct infer_reply *r, Inference__ModelInferResponse *m)
{
    inference__model_infer_response__init(m);
    m->model_name = text_field(r->model);
    m->model_version = text_field("1");
    m->id = text_field(r->id);
}

void infer_response_write(const struct infer_reply *r, const struct infer_output *outputs, size_t n,
                          struct buf *out)
{
    struct parts p = { .shape = { 0 } };
    Inference__ModelInferResponse m;
    begin(r, &m);
    add_final(&p, r->final, &m);
    add_outputs(&p, outputs, n, &m);
    if (r->final == INFER_ONLY) pack(&m.base, out);
    else pack_in_stream(&m, NULL, out);
    buf_release(&p.bytes);
}

void infer_response_write_error(const struct infer_reply *r, const char *why, struct buf *out)
{
    struct parts p = { .shape = { 0 } };
    Inference__ModelInferResponse m;
    begin(r, &m);
    add_final(&p, r->final, &m);
    pack_in_stream(&m, why, out);
}
