/* test_kserve.c - KServe's protocol over real sockets before an API server whose backend is a test
 * double: what the server is, requests of both calls, keys, and clients that leave. */
#include "shared/serve/grpc/kserve.h"

#include "tests/unit/net/h2_client.h"
#include "tests/unit/serve/infer_message.h"
#include "tests/unit/serve/serve_rig.h"

#define SERVICE "/inference.GRPCInferenceService/"

struct port {
    struct rig rig;
    struct kserve *k;
    struct h2_client c;
    struct tenants tenants;
    bool has_no_api;
    int n_stopped;
};

static struct serve *port_api(void *arg, struct buf *why)
{
    struct port *p = arg;
    if (!p->has_no_api) return p->rig.serve;
    buf_add_c(why, "the model is being loaded");
    return NULL;
}

static void port_start(struct port *p, struct grpc_limits limits)
{
    struct err err = { 0 };
    rig_start(&p->rig);
    const struct kserve_options o = {
        .loop = p->rig.loop,
        .host = "127.0.0.1",
        .limits = limits,
        .tenants = p->tenants.n_keys ? &p->tenants : NULL,
        .metrics = p->rig.metrics,
        .version = "9.9",
        .serve = port_api,
        .arg = p,
    };
    CHECK_OK(kserve_start(&o, &p->k, &err));
    h2_dial(&p->c, p->rig.loop, kserve_port(p->k), true, 1);
}

static void port_open(struct port *p)
{
    *p = (struct port){ .n_stopped = 0 };
    rig_open(&p->rig);
    port_start(p, (struct grpc_limits){ .n_calls = 0 });
}

static void on_stopped(void *arg) { ++*(int *)arg; }

static void port_close(struct port *p)
{
    h2_close(&p->c);
    if (!p->n_stopped && !kserve_is_stopping(p->k)) /* else it is gone, or going */
        kserve_stop(p->k, 0, on_stopped, &p->n_stopped);
    for (int i = 0; i < 20000 && !p->n_stopped; i++) rig_turn(&p->rig);
    CHECK_EQ_INT(p->n_stopped, 1);
    rig_close(&p->rig);
    tenants_release(&p->tenants);
}

/* Messages of a call's answer. */
static struct str next_message(const struct h2_call *call, size_t *at)
{
    const uint8_t *p = (const uint8_t *)call->data.data + *at;
    if (*at + 5 > call->data.len) return (struct str){ NULL, 0 };
    const size_t n = (size_t)p[1] << 24 | (size_t)p[2] << 16 | (size_t)p[3] << 8 | p[4];
    CHECK(*at + 5 + n <= call->data.len);
    *at += 5 + n;
    return (struct str){ (const char *)p + 5, n };
}

static struct h2_call *ask(struct port *p, const char *method, const ProtobufCMessage *m,
                           const struct h2_head *head)
{
    struct buf path = { 0 }, bytes = { 0 };
    struct h2_source from = { .n_sent = 0 };
    buf_printf(&path, "%s%s", method[0] == '/' ? "" : SERVICE, method);
    buf_reserve(&bytes, protobuf_c_message_get_packed_size(m));
    bytes.len = protobuf_c_message_pack(m, (uint8_t *)bytes.data);
    h2_add_bytes(&from, bytes.data, bytes.len);
    struct h2_call *call = h2_begin(&p->c, path.data, head, &from);
    H2_UNTIL(&p->c, call->closed || p->c.closed);
    buf_release(&from.bytes);
    buf_release(&bytes);
    buf_release(&path);
    return call;
}

static struct str only_message(const struct h2_call *call)
{
    size_t at = 0;
    CHECK_EQ_INT(call->status, GRPC_OK);
    return next_message(call, &at);
}

/* ---- what the server is ---- */

static bool says_ready(struct port *p)
{
    const Inference__ServerReadyRequest m = INFERENCE__SERVER_READY_REQUEST__INIT;
    const struct str s = only_message(ask(p, "ServerReady", &m.base, NULL));
    return s.n == 2 && s.p[1] == 1;
}

static bool says_model_ready(struct port *p, const char *name)
{
    Inference__ModelReadyRequest m = INFERENCE__MODEL_READY_REQUEST__INIT;
    m.name = message_text(name);
    const struct str s = only_message(ask(p, "ModelReady", &m.base, NULL));
    return s.n == 2 && s.p[1] == 1;
}

static int health(struct port *p, const char *service)
{
    Inference__HealthCheckRequest m = INFERENCE__HEALTH_CHECK_REQUEST__INIT;
    m.service = message_text(service);
    const struct h2_call *call = ask(p, "/grpc.health.v1.Health/Check", &m.base, NULL);
    if (call->status != GRPC_OK) return -call->status;
    return only_message(call).p[1];
}

TEST(probes_say_whether_requests_are_taken)
{
    struct port p;
    const Inference__ServerLiveRequest live = INFERENCE__SERVER_LIVE_REQUEST__INIT;
    port_open(&p);
    p.has_no_api = true;
    CHECK_EQ_INT(only_message(ask(&p, "ServerLive", &live.base, NULL)).n, 2);
    CHECK(!says_ready(&p));
    CHECK(!says_model_ready(&p, "model"));
    CHECK_EQ_INT(health(&p, ""), 2);
    p.has_no_api = false;
    CHECK(says_ready(&p));
    CHECK(says_model_ready(&p, "model") && says_model_ready(&p, "org/tiny"));
    CHECK(!says_model_ready(&p, "other"));
    CHECK_EQ_INT(health(&p, "inference.GRPCInferenceService"), 1);
    CHECK_EQ_INT(health(&p, "other.Service"), -GRPC_NOT_FOUND);
    p.rig.fake.not_ready = true;
    CHECK(!says_ready(&p));
    CHECK_EQ_INT(health(&p, ""), 2);
    port_close(&p);
}

TEST(the_server_and_its_models_are_described)
{
    struct port p;
    const Inference__ServerMetadataRequest asked = INFERENCE__SERVER_METADATA_REQUEST__INIT;
    Inference__ModelMetadataRequest model = INFERENCE__MODEL_METADATA_REQUEST__INIT;
    Inference__ModelConfigRequest config = INFERENCE__MODEL_CONFIG_REQUEST__INIT;
    port_open(&p);
    struct str s = only_message(ask(&p, "ServerMetadata", &asked.base, NULL));
    Inference__ServerMetadataResponse *server = inference__server_metadata_response__unpack(
        NULL, s.n, (const uint8_t *)s.p);
    CHECK_EQ_STR(server->name, "baton");
    CHECK_EQ_STR(server->version, "9.9");
    inference__server_metadata_response__free_unpacked(server, NULL);
    for (int i = 0; i < 2; i++) {
        config.name = model.name = message_text(i ? "tiny" : "model");
        s = only_message(ask(&p, "ModelMetadata", &model.base, NULL));
        Inference__ModelMetadataResponse *m = inference__model_metadata_response__unpack(
            NULL, s.n, (const uint8_t *)s.p);
        CHECK_EQ_STR(m->name, model.name);
        CHECK_EQ_INT(m->n_inputs, i ? 2 : 1);
        CHECK_EQ_STR(m->inputs[0]->name, i ? "text_input" : "IN");
        CHECK_EQ_STR(m->outputs[0]->name, i ? "text_output" : "OUT");
        CHECK_EQ_STR(m->outputs[0]->datatype, "BYTES");
        inference__model_metadata_response__free_unpacked(m, NULL);
        s = only_message(ask(&p, "ModelConfig", &config.base, NULL));
        Inference__ModelConfigResponse *c = inference__model_config_response__unpack(
            NULL, s.n, (const uint8_t *)s.p);
        CHECK(c->config->model_transaction_policy->decoupled);
        CHECK_EQ_STR(c->config->input[0]->name, i ? "text_input" : "IN");
        inference__model_config_response__free_unpacked(c, NULL);
    }
    model.name = message_text("other");
    CHECK_EQ_INT(ask(&p, "ModelMetadata", &model.base, NULL)->status, GRPC_NOT_FOUND);
    CHECK_EQ_INT(h2_call(&p.c, SERVICE "ModelMetadata", NULL, "\x7f")->status,
                 GRPC_INVALID_ARGUMENT);
    port_close(&p);
}

/* ---- requests ---- */

#define TEXT_INPUT(text_)                                                                          \
    {                                                                                              \
        .name = "text_input", .datatype = "BYTES", .text = text_                                   \
    }
#define STREAMING                                                                                  \
    {                                                                                              \
        .name = "streaming", .datatype = "BOOL", .flag = 2                                         \
    }

/* Begins a call with these messages; *from lives until the call has ended. */
static struct h2_call *begin_infer(struct port *p, const char *method, const struct h2_head *head,
                                   const struct message_of *m, size_t n, struct h2_source *from)
{
    struct buf path = { 0 };
    buf_printf(&path, "%s%s", SERVICE, method);
    for (size_t i = 0; i < n; i++) {
        struct buf bytes = message_write(&m[i]);
        h2_add_bytes(from, bytes.data, bytes.len);
        buf_release(&bytes);
    }
    struct h2_call *call = h2_begin(&p->c, path.data, head, from);
    buf_release(&path);
    return call;
}

static struct h2_call *infer(struct port *p, const char *method, const struct h2_head *head,
                             const struct message_of *m, size_t n)
{
    struct h2_source from = { .n_sent = 0 };
    struct h2_call *call = begin_infer(p, method, head, m, n, &from);
    H2_UNTIL(&p->c, call->closed || p->c.closed);
    buf_release(&from.bytes);
    return call;
}

TEST(a_completion_by_model_infer)
{
    struct port p;
    const struct message_of m = { .model = "tiny", .id = "r-1", .inputs = { TEXT_INPUT("hi") } };
    port_open(&p);
    const struct h2_call *call = infer(&p, "ModelInfer", NULL, &m, 1);
    struct message_answer a = message_read(only_message(call), false);
    CHECK_EQ_STR(a.text[0].data, "Hello there, world");
    CHECK_EQ_STR(a.text[1].data, "stop");
    CHECK_EQ_STR(a.model.data, "tiny");
    CHECK_EQ_STR(a.id.data, "r-1");
    CHECK_EQ_INT(a.final, -1);
    CHECK_EQ_STR(p.rig.fake.last_name, "r-1"); /* in logs and traces */
    message_answer_release(&a);
    port_close(&p);
}

/* The text of a stream's responses for one id; checks that the last one is final, and counts. */
static void check_stream(const struct h2_call *call, const char *id, const char *text, int n_empty)
{
    struct buf all = { 0 };
    struct str s;
    int n_final = 0, n_none = 0;
    for (size_t at = 0; (s = next_message(call, &at)).p;) {
        struct message_answer a = message_read(s, true);
        if (strcmp(a.id.len ? a.id.data : "", id) == 0) {
            CHECK(!a.error.len);
            CHECK(n_final == 0); /* nothing comes after the final one */
            if (a.n_outputs) buf_add_str(&all, buf_str(&a.text[0]));
            n_none += a.n_outputs == 0;
            n_final += a.final == 1;
        }
        message_answer_release(&a);
    }
    CHECK_EQ_INT(n_final, 1);
    CHECK_EQ_INT(n_none, n_empty);
    CHECK_EQ_STR(all.data, text);
    buf_release(&all);
}

TEST(several_completions_of_one_stream)
{
    struct port p;
    const struct message_of m[] = {
        { .id = "a", .inputs = { TEXT_INPUT("one"), STREAMING } },
        { .id = "b",
          .inputs = { TEXT_INPUT("two"), STREAMING },
          .parameters = { { .key = "triton_enable_empty_final_response", .flag = 2 } } },
        { .id = "c", .inputs = { TEXT_INPUT("three") } },
    };
    port_open(&p);
    const struct h2_call *call = infer(&p, "ModelStreamInfer", NULL, m, 3);
    CHECK_EQ_INT(call->status, GRPC_OK);
    check_stream(call, "a", "Hello there, world", 0);
    check_stream(call, "b", "Hello there, world", 1);
    check_stream(call, "c", "Hello there, world", 0);
    CHECK_EQ_INT(p.rig.fake.n_submitted, 3);
    port_close(&p);
}

#define NATIVE(text_)                                                                              \
    {                                                                                              \
        .name = "IN", .datatype = "BYTES", .text = text_                                           \
    }

/* The item in OUT, which a list of one holds where it is no error; the caller deletes the list. */
static cJSON *out_item(const struct message_answer *a, cJSON **list)
{
    struct err err = { 0 };
    CHECK_EQ_INT(a->n_outputs, 1);
    CHECK_EQ_STR(a->names[0], "OUT");
    CHECK_OK(json_parse(buf_str(&a->text[0]), true, list, &err));
    if (!cJSON_IsArray(*list)) return *list;
    CHECK_EQ_INT(cJSON_GetArraySize(*list), 1);
    return cJSON_GetArrayItem(*list, 0);
}

TEST(native_requests_have_items)
{
    struct port p;
    const struct message_of m = { .id = "n-1",
                                  .inputs = { NATIVE("[{\"text\":\"hi\",\"temperature\":0}]") } };
    struct str s;
    struct buf all = { 0 };
    int n_final = 0;
    port_open(&p);
    const struct h2_call *call = infer(&p, "ModelStreamInfer", NULL, &m, 1);
    CHECK_EQ_INT(call->status, GRPC_OK);
    for (size_t at = 0; (s = next_message(call, &at)).p;) {
        struct message_answer a = message_read(s, true);
        cJSON *list, *item = out_item(&a, &list);
        CHECK_EQ_STR(cJSON_GetStringValue(cJSON_GetObjectItem(item, "req_id")), "n-1");
        CHECK(!cJSON_HasObjectItem(item, "error_msg")); /* which its clients take for an error */
        buf_add_c(&all, cJSON_GetStringValue(cJSON_GetObjectItem(item, "token")));
        CHECK_EQ_INT(a.final, cJSON_GetObjectItem(item, "is_end")->valueint);
        n_final += a.final;
        if (a.final)
            CHECK_EQ_STR(cJSON_GetStringValue(cJSON_GetObjectItem(item, "tokens_all")), all.data);
        cJSON_Delete(list);
        message_answer_release(&a);
    }
    CHECK_EQ_STR(all.data, "Hello there, world");
    CHECK_EQ_INT(n_final, 1);
    call = infer(&p, "ModelInfer", NULL, &m, 1);
    struct message_answer a = message_read(only_message(call), false);
    cJSON *list, *item = out_item(&a, &list);
    CHECK_EQ_STR(cJSON_GetStringValue(cJSON_GetObjectItem(item, "tokens_all")), all.data);
    cJSON_Delete(list);
    message_answer_release(&a);
    buf_release(&all);
    port_close(&p);
}

TEST(native_errors_are_in_out)
{
    static const char *const bad[] = { "[{\"text\":\"hi\",\"max_dec_len\":0}]", "[]", "[5]" };
    struct port p;
    port_open(&p);
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        const struct message_of m = { .id = "n-1", .inputs = { NATIVE(bad[i]) } };
        const struct h2_call *call = infer(&p, "ModelStreamInfer", NULL, &m, 1);
        struct message_answer a = message_read(only_message(call), true);
        cJSON *list, *item = out_item(&a, &list);
        CHECK(item == list && !a.error.len);
        CHECK_EQ_INT(cJSON_GetObjectItem(item, "error_code")->valueint, 400);
        CHECK_EQ_STR(cJSON_GetStringValue(cJSON_GetObjectItem(item, "req_id")), "n-1");
        CHECK_EQ_INT(a.final, 1);
        cJSON_Delete(list);
        message_answer_release(&a);
        call = infer(&p, "ModelInfer", NULL, &m, 1);
        CHECK_EQ_INT(call->status, GRPC_INVALID_ARGUMENT);
        CHECK(call->text[0]);
    }
    port_close(&p);
}

/* One that fails says so under its id, and the others go on. */
TEST(a_request_that_fails_leaves_its_stream_alone)
{
    struct port p;
    const struct message_of m[] = {
        { .id = "bad", .model = "other", .inputs = { TEXT_INPUT("one") } },
        { .id = "good", .inputs = { TEXT_INPUT("two"), STREAMING } },
        { .id = "range",
          .inputs = { TEXT_INPUT("three") },
          .parameters = { { .key = "temperature", .number = 50 } } },
    };
    port_open(&p);
    const struct h2_call *call = infer(&p, "ModelStreamInfer", NULL, m, 3);
    struct str s;
    int n_bad = 0, n_range = 0;
    CHECK_EQ_INT(call->status, GRPC_OK);
    for (size_t at = 0; (s = next_message(call, &at)).p;) {
        struct message_answer a = message_read(s, true);
        if (strcmp(a.id.data, "bad") == 0) {
            CHECK_EQ_STR(a.error.data, "there is no model 'other' here");
            CHECK_EQ_INT(a.final, 1);
            n_bad++;
        } else if (strcmp(a.id.data, "range") == 0) {
            CHECK(strstr(a.error.data, "temperature") != NULL);
            n_range++;
        } else {
            CHECK(!a.error.len);
        }
        message_answer_release(&a);
    }
    CHECK_EQ_INT(n_bad, 1);
    CHECK_EQ_INT(n_range, 1);
    port_close(&p);
}

TEST(errors_of_model_infer_are_statuses)
{
    const struct message_of good = { .inputs = { TEXT_INPUT("x") } },
                            other = { .model = "other", .inputs = { TEXT_INPUT("x") } },
                            range = { .inputs = { TEXT_INPUT("x") },
                                      .parameters = { { .key = "top_p", .real = 7.5 } } };
    struct port p;
    port_open(&p);
    CHECK_EQ_INT(infer(&p, "ModelInfer", NULL, &other, 1)->status, GRPC_NOT_FOUND);
    const struct h2_call *call = infer(&p, "ModelInfer", NULL, &range, 1);
    CHECK_EQ_INT(call->status, GRPC_INVALID_ARGUMENT);
    CHECK(strstr(call->text, "top_p") != NULL);
    CHECK_EQ_INT(h2_call(&p.c, SERVICE "ModelInfer", NULL, "\x7f")->status, GRPC_INVALID_ARGUMENT);
    p.rig.fake.refuse = ERR_FULL;
    CHECK_EQ_INT(infer(&p, "ModelInfer", NULL, &good, 1)->status, GRPC_RESOURCE_EXHAUSTED);
    p.rig.fake.refuse = ERR_UNAVAILABLE;
    CHECK_EQ_INT(infer(&p, "ModelInfer", NULL, &good, 1)->status, GRPC_UNAVAILABLE);
    p.rig.fake.refuse = OK;
    p.rig.fake.fail = ERR_PEER_LOST;
    p.rig.fake.fail_after = 1;
    CHECK_EQ_INT(infer(&p, "ModelInfer", NULL, &good, 1)->status, GRPC_UNAVAILABLE);
    p.has_no_api = true;
    call = infer(&p, "ModelInfer", NULL, &good, 1);
    CHECK_EQ_INT(call->status, GRPC_UNAVAILABLE);
    CHECK_EQ_STR(call->text, "the model is being loaded");
    CHECK_EQ_INT(infer(&p, "ModelStreamInfer", NULL, &good, 1)->status, GRPC_UNAVAILABLE);
    port_close(&p);
}

TEST(a_large_request_is_read_by_a_worker)
{
    enum { N = 600000 };
    struct port p;
    char *text = mem_calloc(N + 1, 1);
    memset(text, 'x', N);
    const struct message_of m[] = {
        { .id = "large", .inputs = { TEXT_INPUT(text) } },
        { .id = "small", .inputs = { TEXT_INPUT("x"), STREAMING } },
    };
    struct str s;
    int n_errors = 0;
    port_open(&p);
    const struct h2_call *call = infer(&p, "ModelStreamInfer", NULL, m, 2);
    CHECK_EQ_INT(call->status, GRPC_OK);
    for (size_t at = 0; (s = next_message(call, &at)).p;) {
        struct message_answer a = message_read(s, true);
        if (strcmp(a.id.data, "large") == 0) n_errors += a.error.len > 0; /* beyond the context */
        message_answer_release(&a);
    }
    CHECK_EQ_INT(n_errors, 1);
    check_stream(call, "small", "Hello there, world", 0);
    mem_free(text);
    port_close(&p);
}

TEST(a_call_that_ends_while_a_worker_reads_it)
{
    enum { N = 300000 };
    struct port p;
    char *text = mem_calloc(N + 1, 1);
    memset(text, 'x', N);
    const struct message_of m = { .inputs = { TEXT_INPUT(text) } };
    port_open(&p);
    for (int turns = 0; turns < 30; turns++) {
        struct h2_source from = { .n_sent = 0 };
        struct h2_call *call = begin_infer(&p, "ModelStreamInfer", NULL, &m, 1, &from);
        for (int i = 0; i < turns; i++) h2_turn(&p.c);
        CHECK_OK(nghttp2_submit_rst_stream(p.c.session, 0, call->stream, NGHTTP2_CANCEL));
        H2_UNTIL(&p.c, call->closed);
        buf_release(&from.bytes);
    }
    mem_free(text);
    port_close(&p);
}

/* ---- who asks, and who leaves ---- */

TEST(keys_are_those_of_http)
{
    struct port p = { .n_stopped = 0 };
    struct err err = { 0 };
    const struct message_of m = { .inputs = { TEXT_INPUT("x") } };
    const struct h2_head good = { .more = "authorization", .more_value = "Bearer secret" },
                         bad = { .more = "authorization", .more_value = "Bearer other" };
    Inference__ModelMetadataRequest asked = INFERENCE__MODEL_METADATA_REQUEST__INIT;
    asked.name = message_text("model");
    tenants_init(&p.tenants);
    CHECK_OK(tenants_add_key(&p.tenants, "secret", &err));
    rig_open(&p.rig);
    p.rig.o.tenants = &p.tenants;
    port_start(&p, (struct grpc_limits){ .n_calls = 0 });
    CHECK_EQ_INT(infer(&p, "ModelInfer", NULL, &m, 1)->status, GRPC_UNAUTHENTICATED);
    CHECK_EQ_INT(infer(&p, "ModelInfer", &bad, &m, 1)->status, GRPC_UNAUTHENTICATED);
    CHECK_EQ_INT(infer(&p, "ModelStreamInfer", &bad, &m, 1)->status, GRPC_UNAUTHENTICATED);
    CHECK_EQ_INT(ask(&p, "ModelMetadata", &asked.base, NULL)->status, GRPC_UNAUTHENTICATED);
    CHECK_EQ_INT(ask(&p, "ModelMetadata", &asked.base, &good)->status, GRPC_OK);
    CHECK_EQ_INT(infer(&p, "ModelInfer", &good, &m, 1)->status, GRPC_OK);
    CHECK_EQ_INT(p.rig.fake.n_submitted, 1);
    CHECK(says_ready(&p)); /* probes have none */
    port_close(&p);
}

TEST(a_cancelled_stream_stops_its_work_at_once)
{
    struct port p;
    const struct message_of m[] = {
        { .id = "a", .inputs = { TEXT_INPUT("one"), STREAMING } },
        { .id = "b", .inputs = { TEXT_INPUT("two"), STREAMING } },
    };
    struct h2_source from = { .stays_open = true }, again = { .stays_open = true };
    port_open(&p);
    p.rig.fake.hold = true;
    struct h2_call *call = begin_infer(&p, "ModelStreamInfer", NULL, m, 2, &from);
    H2_UNTIL(&p.c, p.rig.fake.n_live == 2);
    CHECK_OK(nghttp2_submit_rst_stream(p.c.session, 0, call->stream, NGHTTP2_CANCEL));
    H2_UNTIL(&p.c, p.rig.fake.n_live == 0);
    CHECK_EQ_INT(p.rig.fake.n_canceled, 2);
    begin_infer(&p, "ModelStreamInfer", NULL, m, 2, &again);
    H2_UNTIL(&p.c, p.rig.fake.n_live == 2);
    close(p.c.fd); /* the connection is lost */
    p.c.fd = -1;
    for (int i = 0; i < 20000 && p.rig.fake.n_live; i++) rig_turn(&p.rig);
    CHECK_EQ_INT(p.rig.fake.n_canceled, 4);
    buf_release(&from.bytes);
    buf_release(&again.bytes);
    port_close(&p);
}

TEST(the_clients_time_stops_the_work)
{
    struct port p;
    const struct message_of m = { .inputs = { TEXT_INPUT("one") } },
                            timed = { .inputs = { TEXT_INPUT("one") },
                                      .parameters = { { .key = "timeout", .number = 30000 } } };
    const struct h2_head soon = { .timeout = "50m" };
    port_open(&p);
    p.rig.fake.hold = true;
    CHECK_EQ_INT(infer(&p, "ModelInfer", &soon, &m, 1)->status, GRPC_DEADLINE_EXCEEDED);
    H2_UNTIL(&p.c, p.rig.fake.n_live == 0);
    CHECK_EQ_INT(p.rig.fake.last.admission.deadline_by, GEN_DEADLINE_GRPC);
    struct h2_source from = { .n_sent = 0 };
    begin_infer(&p, "ModelInfer", NULL, &timed, 1, &from);
    H2_UNTIL(&p.c, p.rig.fake.n_live == 1);
    CHECK(p.rig.fake.last.deadline_ms > 0); /* which the scheduler keeps, and names so */
    CHECK_EQ_INT(p.rig.fake.last.admission.deadline_by, GEN_DEADLINE_PARAMETER);
    p.rig.fake.hold = false;
    buf_release(&from.bytes);
    port_close(&p);
}

TEST(too_many_requests_of_a_client_are_refused_one_by_one)
{
    struct port p = { .n_stopped = 0 };
    struct message_of m[4] = { { .id = NULL } };
    struct h2_source from = { .n_sent = 0 };
    struct str s;
    int n_refused = 0, n_good = 0;
    for (int i = 0; i < 4; i++) m[i] = (struct message_of){ .inputs = { TEXT_INPUT("one") } };
    rig_open(&p.rig);
    port_start(&p, (struct grpc_limits){ .n_client_requests = 2 });
    p.rig.fake.hold = true;
    struct h2_call *call = begin_infer(&p, "ModelStreamInfer", NULL, m, 4, &from);
    H2_UNTIL(&p.c, p.rig.fake.n_live == 2);
    p.rig.fake.hold = false;
    H2_UNTIL(&p.c, call->closed);
    for (size_t at = 0; (s = next_message(call, &at)).p;) {
        struct message_answer a = message_read(s, true);
        n_refused += a.error.len && strstr(a.error.data, "as many running requests") != NULL;
        n_good += a.final == 1 && !a.error.len;
        message_answer_release(&a);
    }
    CHECK_EQ_INT(n_good, 2);
    CHECK_EQ_INT(n_refused, 2);
    buf_release(&from.bytes);
    port_close(&p);
}

/* The work is told to stop when its client does not read. */
TEST(a_client_that_reads_nothing_stops_its_work)
{
    struct port p = { .n_stopped = 0 };
    const struct message_of m = {
        .inputs = { TEXT_INPUT("one"), STREAMING },
        .parameters = { { .key = "ignore_eos", .flag = 2 },
                        { .key = "max_tokens", .number = 200 } },
    };
    enum { N = 60 };
    struct message_of all[N];
    struct h2_source from = { .stays_open = true };
    for (int i = 0; i < N; i++) all[i] = m;
    rig_open(&p.rig);
    port_start(&p, (struct grpc_limits){ .call_queue_bytes = 100000 });
    h2_close(&p.c);
    h2_dial(&p.c, p.rig.loop, kserve_port(p.k), false, 1);
    struct h2_call *call = begin_infer(&p, "ModelStreamInfer", NULL, all, N, &from);
    H2_UNTIL(&p.c, call->closed);
    CHECK_EQ_INT(call->error, NGHTTP2_ENHANCE_YOUR_CALM);
    H2_UNTIL(&p.c, p.rig.fake.n_live == 0);
    CHECK(p.rig.fake.n_canceled > 0);
    buf_release(&from.bytes);
    port_close(&p);
}

TEST(a_stop_ends_requests_as_the_api_server_does)
{
    struct port p;
    const struct message_of m = { .inputs = { TEXT_INPUT("one") } };
    struct h2_source from = { .n_sent = 0 }, stream = { .stays_open = true };
    port_open(&p);
    p.rig.fake.hold = true;
    struct h2_call *call = begin_infer(&p, "ModelInfer", NULL, &m, 1, &from),
                   *open = begin_infer(&p, "ModelStreamInfer", NULL, &m, 1, &stream);
    H2_UNTIL(&p.c, p.rig.fake.n_live == 2);
    serve_shut_down(p.rig.serve);
    kserve_stop(p.k, 10000, on_stopped, &p.n_stopped);
    H2_UNTIL(&p.c, call->closed && open->closed);
    CHECK_EQ_INT(call->status, GRPC_UNAVAILABLE);
    CHECK_EQ_INT(open->status, GRPC_UNAVAILABLE);
    H2_UNTIL(&p.c, p.n_stopped == 1);
    buf_release(&from.bytes);
    buf_release(&stream.bytes);
    port_close(&p);
}

TEST_MAIN(CASE(probes_say_whether_requests_are_taken),
          CASE(the_server_and_its_models_are_described), CASE(a_completion_by_model_infer),
          CASE(several_completions_of_one_stream), CASE(native_requests_have_items),
          CASE(native_errors_are_in_out), CASE(a_request_that_fails_leaves_its_stream_alone),
          CASE(errors_of_model_infer_are_statuses), CASE(a_large_request_is_read_by_a_worker),
          CASE(a_call_that_ends_while_a_worker_reads_it), CASE(keys_are_those_of_http),
          CASE(a_cancelled_stream_stops_its_work_at_once), CASE(the_clients_time_stops_the_work),
          CASE(too_many_requests_of_a_client_are_refused_one_by_one),
          CASE(a_client_that_reads_nothing_stops_its_work),
          CASE(a_stop_ends_requests_as_the_api_server_does))
