/* kserve_status.c - see kserve.h: what the server is, and whether it would take a request. Probes
 * need no key, as over HTTP; the models do. Thread: loop. */
#include <string.h>

#include "shared/base/mem.h"
#include "shared/serve/grpc/kserve_internal.h"
#include "shared/serve/grpc/proto/kserve.pb-c.h"

/* protobuf-c's structs point to what is not const, even where it only reads. */
static char *text_field(const char *text) { return (char *)(uintptr_t)text; }

/* Messages are small and have few fields: nobody means more than this. */
enum { ASKED_BYTES_MAX = 4096 };

#define UNPACK(type, message)                                                                      \
    ((message).n > ASKED_BYTES_MAX                                                                 \
         ? NULL                                                                                    \
         : inference__##type##__unpack(NULL, (message).n, (const uint8_t *)(message).p))

/* ---- the server ---- */

void kserve_server_live(void *arg, struct grpc_call *c, struct str message)
{
    Inference__ServerLiveResponse m = INFERENCE__SERVER_LIVE_RESPONSE__INIT;
    (void)arg;
    (void)message;
    m.live = true;
    kserve_answer(c, &m.base);
}

void kserve_server_ready(void *arg, struct grpc_call *c, struct str message)
{
    Inference__ServerReadyResponse m = INFERENCE__SERVER_READY_RESPONSE__INIT;
    (void)message;
    m.ready = kserve_is_ready(arg);
    kserve_answer(c, &m.base);
}

void kserve_server_metadata(void *arg, struct grpc_call *c, struct str message)
{
    const struct kserve *k = arg;
    Inference__ServerMetadataResponse m = INFERENCE__SERVER_METADATA_RESPONSE__INIT;
    char *extensions[] = { text_field("model_configuration"), text_field("parameters") };
    (void)message;
    m.name = text_field("baton");
    m.version = text_field(k->o.version);
    m.extensions = extensions;
    m.n_extensions = COUNT_OF(extensions);
    kserve_answer(c, &m.base);
}

void kserve_health(void *arg, struct grpc_call *c, struct str message)
{
    static const char *const services[] = { "", "inference.GRPCInferenceService",
                                            "grpc.health.v1.Health" };
    Inference__HealthCheckResponse m = INFERENCE__HEALTH_CHECK_RESPONSE__INIT;
    Inference__HealthCheckRequest *asked = UNPACK(health_check_request, message);
    if (!asked) {
        kserve_refuse_message(c, "HealthCheckRequest");
        return;
    }
    bool is_known = false;
    for (size_t i = 0; i < COUNT_OF(services); i++)
        is_known = is_known || strcmp(asked->service, services[i]) == 0;
    inference__health_check_request__free_unpacked(asked, NULL);
    m.status = kserve_is_ready(arg) ? INFERENCE__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING
                                    : INFERENCE__HEALTH_CHECK_RESPONSE__SERVING_STATUS__NOT_SERVING;
    if (is_known) kserve_answer(c, &m.base);
    else grpc_finish(c, GRPC_NOT_FOUND, "there is no service of that name here");
}

/* ---- a model ---- */

/* Has the model this name? Else the client was told. */
static bool check_model(const struct kserve *k, struct grpc_call *c, const char *name)
{
    struct buf text = { 0 };
    const struct serve *s = kserve_api(k, &text);
    if (!s) {
        kserve_finish_unavailable(c, &text);
        return false;
    }
    if (kserve_has_model(s, name)) return true;
    buf_printf(&text, "there is no model '%.80s' here", name);
    grpc_finish(c, GRPC_NOT_FOUND, text.data);
    buf_release(&text);
    return false;
}

void kserve_model_ready(void *arg, struct grpc_call *c, struct str message)
{
    const struct kserve *k = arg;
    const struct serve *s = kserve_api(k, NULL);
    Inference__ModelReadyResponse m = INFERENCE__MODEL_READY_RESPONSE__INIT;
    Inference__ModelReadyRequest *asked = UNPACK(model_ready_request, message);
    if (!asked) {
        kserve_refuse_message(c, "ModelReadyRequest");
        return;
    }
    m.ready = s && kserve_has_model(s, asked->name) && kserve_is_ready(k);
    inference__model_ready_request__free_unpacked(asked, NULL);
    kserve_answer(c, &m.base);
}

/* The tensors of both forms of requests: the first set is told of "model", the name in document
 * 004's clients, the other one of all other names. */
struct tensor {
    const char *name, *datatype;
    Inference__DataType type;
    bool is_optional;
};

static const struct {
    struct tensor inputs[2], outputs[2];
    size_t n_inputs, n_outputs;
} FORMS[] = {
    { .inputs = { { "IN", "BYTES", INFERENCE__DATA_TYPE__TYPE_STRING, false } },
      .outputs = { { "OUT", "BYTES", INFERENCE__DATA_TYPE__TYPE_STRING, false } },
      .n_inputs = 1,
      .n_outputs = 1 },
    { .inputs = { { "text_input", "BYTES", INFERENCE__DATA_TYPE__TYPE_STRING, false },
                  { "streaming", "BOOL", INFERENCE__DATA_TYPE__TYPE_BOOL, true } },
      .outputs = { { "text_output", "BYTES", INFERENCE__DATA_TYPE__TYPE_STRING, false },
                   { "finish_reason", "BYTES", INFERENCE__DATA_TYPE__TYPE_STRING, false } },
      .n_inputs = 2,
      .n_outputs = 2 },
};

static size_t form_of(const char *name) { return strcmp(name, "model") == 0 ? 0 : 1; }

static const int64_t ONE_ELEMENT[] = { 1 };

static int64_t *one_element(void) { return (int64_t *)(uintptr_t)ONE_ELEMENT; }

static void fill_tensors(const struct tensor *from, size_t n, Inference__TensorMetadata *to,
                         Inference__TensorMetadata **list)
{
    for (size_t i = 0; i < n; i++) {
        inference__tensor_metadata__init(&to[i]);
        to[i].name = text_field(from[i].name);
        to[i].datatype = text_field(from[i].datatype);
        to[i].shape = one_element();
        to[i].n_shape = 1;
        list[i] = &to[i];
    }
}

static void answer_metadata(struct grpc_call *c, const char *name)
{
    Inference__ModelMetadataResponse m = INFERENCE__MODEL_METADATA_RESPONSE__INIT;
    Inference__TensorMetadata inputs[2], outputs[2], *in[2], *out[2];
    char *versions[] = { text_field("1") };
    const size_t f = form_of(name);
    fill_tensors(FORMS[f].inputs, FORMS[f].n_inputs, inputs, in);
    fill_tensors(FORMS[f].outputs, FORMS[f].n_outputs, outputs, out);
    m.name = text_field(name);
    m.versions = versions;
    m.n_versions = COUNT_OF(versions);
    m.platform = text_field("baton");
    m.inputs = in;
    m.outputs = out;
    m.n_inputs = FORMS[f].n_inputs;
    m.n_outputs = FORMS[f].n_outputs;
    kserve_answer(c, &m.base);
}

void kserve_model_metadata(void *arg, struct grpc_call *c, struct str message)
{
    const struct kserve *k = arg;
    Inference__ModelMetadataRequest *asked = UNPACK(model_metadata_request, message);
    if (!asked) {
        kserve_refuse_message(c, "ModelMetadataRequest");
        return;
    }
    if (check_model(k, c, asked->name)) answer_metadata(c, asked->name);
    inference__model_metadata_request__free_unpacked(asked, NULL);
}

/* Triton's clients ask whether a request may have any number of responses ("decoupled"). */
static void answer_config(struct grpc_call *c, const char *name)
{
    Inference__ModelConfigResponse m = INFERENCE__MODEL_CONFIG_RESPONSE__INIT;
    Inference__ModelConfig config = INFERENCE__MODEL_CONFIG__INIT;
    Inference__ModelTransactionPolicy policy = INFERENCE__MODEL_TRANSACTION_POLICY__INIT;
    Inference__ModelInput inputs[2], *in[2];
    Inference__ModelOutput outputs[2], *out[2];
    const size_t f = form_of(name);
    for (size_t i = 0; i < FORMS[f].n_inputs; i++) {
        inference__model_input__init(in[i] = &inputs[i]);
        inputs[i].name = text_field(FORMS[f].inputs[i].name);
        inputs[i].data_type = FORMS[f].inputs[i].type;
        inputs[i].optional = FORMS[f].inputs[i].is_optional;
        inputs[i].dims = one_element();
        inputs[i].n_dims = 1;
    }
    for (size_t i = 0; i < FORMS[f].n_outputs; i++) {
        inference__model_output__init(out[i] = &outputs[i]);
        outputs[i].name = text_field(FORMS[f].outputs[i].name);
        outputs[i].data_type = FORMS[f].outputs[i].type;
        outputs[i].dims = one_element();
        outputs[i].n_dims = 1;
    }
    policy.decoupled = true;
    config.name = text_field(name);
    config.platform = config.backend = text_field("baton");
    config.input = in;
    config.output = out;
    config.n_input = FORMS[f].n_inputs;
    config.n_output = FORMS[f].n_outputs;
    config.model_transaction_policy = &policy;
    m.config = &config;
    kserve_answer(c, &m.base);
}

void kserve_model_config(void *arg, struct grpc_call *c, struct str message)
{
    const struct kserve *k = arg;
    Inference__ModelConfigRequest *asked = UNPACK(model_config_request, message);
    if (!asked) {
        kserve_refuse_message(c, "ModelConfigRequest");
        return;
    }
    if (check_model(k, c, asked->name)) answer_config(c, asked->name);
    inference__model_config_request__free_unpacked(asked, NULL);
}
