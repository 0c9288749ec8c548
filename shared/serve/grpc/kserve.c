/* kserve.c - see kserve.h: its life, and the table of methods. Thread: loop. */
#include "shared/serve/grpc/kserve.h"

#include <string.h>

#include "shared/base/mem.h"
#include "shared/base/thread.h"
#include "shared/serve/auth.h"
#include "shared/serve/grpc/kserve_internal.h"

#define SERVICE "/inference.GRPCInferenceService/"

static void check_key(void *arg, struct grpc_call *c) { (void)kserve_knows(arg, c, NULL); }

static const struct grpc_method METHODS[] = {
    { .path = SERVICE "ServerLive", .message = kserve_server_live },
    { .path = SERVICE "ServerReady", .message = kserve_server_ready },
    { .path = SERVICE "ServerMetadata", .message = kserve_server_metadata },
    { .path = SERVICE "ModelReady", .message = kserve_model_ready },
    { .path = SERVICE "ModelMetadata", .begin = check_key, .message = kserve_model_metadata },
    { .path = SERVICE "ModelConfig", .begin = check_key, .message = kserve_model_config },
    { .path = SERVICE "ModelInfer", .begin = kserve_begin_infer, .message = kserve_infer },
    { .path = SERVICE "ModelStreamInfer",
      .streams = true,
      .begin = kserve_begin_stream,
      .message = kserve_infer,
      .half_close = kserve_half_close },
    { .path = "/grpc.health.v1.Health/Check", .message = kserve_health },
    { .path = NULL },
};

/* ---- what the methods ask ---- */

struct serve *kserve_api(const struct kserve *k, struct buf *why)
{
    struct buf dropped = { 0 };
    struct serve *s = k->o.serve(k->o.arg, why ? why : &dropped);
    buf_release(&dropped);
    return s;
}

void kserve_finish_unavailable(struct grpc_call *c, struct buf *why)
{
    grpc_finish(c, GRPC_UNAVAILABLE, why->len ? why->data : NULL);
    buf_release(why);
}

bool kserve_is_ready(const struct kserve *k)
{
    struct serve_backend_stats stats = { 0 };
    const struct serve *s = kserve_api(k, NULL);
    if (!s || s->closed) return false;
    s->o.backend.stats(s->o.backend.self, &stats);
    return stats.ready;
}

bool kserve_has_model(const struct serve *s, const char *name)
{
    return strcmp(name, "model") == 0 || serve_has_model(s, name);
}

bool kserve_knows(struct kserve *k, struct grpc_call *c, uint32_t *tenant)
{
    const struct tenants *t = k->o.tenants ? k->o.tenants : &k->open;
    if (auth_tenant(t, grpc_header(c, "authorization"), tenant)) return true;
    grpc_finish(c, GRPC_UNAUTHENTICATED,
                "a valid API key is needed: send the metadata authorization: Bearer KEY");
    return false;
}

void kserve_answer(struct grpc_call *c, const ProtobufCMessage *m)
{
    struct buf out = { 0 };
    const size_t n = protobuf_c_message_get_packed_size(m);
    out.len = protobuf_c_message_pack(m, (uint8_t *)buf_reserve(&out, n));
    if (grpc_send(c, buf_str(&out)) == OK) grpc_finish(c, GRPC_OK, NULL);
    buf_release(&out);
}

void kserve_refuse_message(struct grpc_call *c, const char *type)
{
    struct buf text = { 0 };
    buf_printf(&text, "the message is not a %s", type);
    grpc_finish(c, GRPC_INVALID_ARGUMENT, text.data);
    buf_release(&text);
}

/* ---- life ---- */

static void maybe_free(struct kserve *k)
{
    if (k->server || k->n_on_worker) return;
    void (*done)(void *arg) = k->done;
    void *arg = k->done_arg;
    tenants_release(&k->open);
    mem_free(k);
    if (done) done(arg);
}

void kserve_leave(struct kserve *k)
{
    k->n_on_worker--;
    maybe_free(k);
}

static void on_stopped(void *arg)
{
    struct kserve *k = arg;
    k->server = NULL;
    maybe_free(k);
}

enum status kserve_start(const struct kserve_options *o, struct kserve **out, struct err *err)
{
    ASSERT_THREAD(THREAD_LOOP);
    struct kserve *k = MEM_NEW(struct kserve);
    k->o = *o;
    tenants_init(&k->open);
    const struct grpc_server_options s = {
        .loop = o->loop,
        .host = o->host,
        .port = o->port,
        .option = o->option,
        .share_port = o->share_port,
        .limits = o->limits,
        .methods = METHODS,
        .arg = k,
        .metrics = o->metrics,
    };
    const enum status st = grpc_server_start(&s, &k->server, err);
    if (st != OK) maybe_free(k);
    else *out = k;
    return st;
}

uint16_t kserve_port(const struct kserve *k) { return grpc_server_port(k->server); }

void kserve_drain(struct kserve *k) { grpc_server_drain(k->server); }

void kserve_stop(struct kserve *k, uint32_t grace_ms, void (*done)(void *arg), void *arg)
{
    k->is_stopping = true;
    k->done = done;
    k->done_arg = arg;
    grpc_server_stop(k->server, grace_ms, on_stopped, k);
}

void kserve_hurry(struct kserve *k, uint32_t grace_ms)
{
    if (k->server) grpc_server_hurry(k->server, grace_ms);
}

bool kserve_is_stopping(const struct kserve *k) { return k->is_stopping; }
