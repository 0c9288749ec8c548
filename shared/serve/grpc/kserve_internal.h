/* kserve_internal.h - what the files of kserve share. Thread: loop. */
#ifndef BATON_SERVE_GRPC_KSERVE_INTERNAL_H
#define BATON_SERVE_GRPC_KSERVE_INTERNAL_H

#include <protobuf-c/protobuf-c.h>

#include "shared/base/list.h"
#include "shared/serve/grpc/kserve.h"
#include "shared/serve/serve_state.h"

struct kserve {
    struct kserve_options o;
    struct grpc_server *server; /* NULL: it has stopped */
    struct tenants open;        /* without o.tenants */
    uint32_t n_on_worker;       /* requests that a worker reads; the last one frees */
    bool is_stopping;
    void (*done)(void *arg);
    void *done_arg;
};

/* ---- kserve.c ---- */

/* NULL: there is none, and `why` (which may be NULL) has a sentence that says why not. */
struct serve *kserve_api(const struct kserve *k, struct buf *why);
/* Ends a call for want of an API server. */
void kserve_finish_unavailable(struct grpc_call *c, struct buf *why);
/* Would a request be taken now? */
bool kserve_is_ready(const struct kserve *k);
/* "model", as clients of document 004's service call it, or a served name. */
bool kserve_has_model(const struct serve *s, const char *name);
/* Finds the tenant of a call that begins; false: it was refused. tenant may be NULL. */
bool kserve_knows(struct kserve *k, struct grpc_call *c, uint32_t *tenant);
/* Answers a call with one message. */
void kserve_answer(struct grpc_call *c, const ProtobufCMessage *m);
/* Says that a message is not what the method takes. */
void kserve_refuse_message(struct grpc_call *c, const char *type);
/* A worker has done with a request; frees what has stopped. */
void kserve_leave(struct kserve *k);

/* ---- kserve_status.c: whether and what the server is ---- */

void kserve_server_live(void *arg, struct grpc_call *c, struct str message);
void kserve_server_ready(void *arg, struct grpc_call *c, struct str message);
void kserve_server_metadata(void *arg, struct grpc_call *c, struct str message);
void kserve_model_ready(void *arg, struct grpc_call *c, struct str message);
void kserve_model_metadata(void *arg, struct grpc_call *c, struct str message);
void kserve_model_config(void *arg, struct grpc_call *c, struct str message);
void kserve_health(void *arg, struct grpc_call *c, struct str message);

/* ---- kserve_infer.c: requests ---- */

void kserve_begin_infer(void *arg, struct grpc_call *c);
void kserve_begin_stream(void *arg, struct grpc_call *c);
void kserve_infer(void *arg, struct grpc_call *c, struct str message);
void kserve_half_close(void *arg, struct grpc_call *c);

#endif
