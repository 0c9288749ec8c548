/* kserve.h - KServe's inference protocol (version 2) over gRPC before the API server of a node: the
 * service inference.GRPCInferenceService, as Triton's clients use it, and grpc.health.v1.Health.
 *
 * It listens before there is an API server, and says unavailable until then. A request is one
 * ModelInfer, or one message of a ModelStreamInfer; several of a stream run at once, and their
 * responses say which they belong to. Its answer is the same as over HTTP, since it is the API
 * server's (serve_submit). When a stream is cancelled or its connection is lost, the work for it
 * stops at once. Tenants prove themselves by `authorization: Bearer KEY` in the metadata. Life
 * cycle: start, drain, stop; the API server and the tenants live until `done`. Thread: loop. */
#ifndef BATON_SERVE_GRPC_KSERVE_H
#define BATON_SERVE_GRPC_KSERVE_H

#include "shared/net/grpc/grpc_server.h"
#include "shared/serve/serve.h"

struct kserve;

struct kserve_options {
    struct loop *loop;
    const char *host;
    uint16_t port;      /* 0: any free one */
    const char *option; /* that chose the port, for the error */
    bool share_port;    /* with other processes that ask for the same */
    struct grpc_limits limits;
    const struct tenants *tenants; /* borrowed; without keys all is open */
    struct metrics *metrics;
    const char *version;
    /* The API server; NULL: there is none, and a sentence was appended that says why not. */
    struct serve *(*serve)(void *arg, struct buf *why);
    void *arg;
};

/* As grpc_server_start, likewise the others. */
enum status kserve_start(const struct kserve_options *o, struct kserve **out,
                         struct err *err) MUST_CHECK;
uint16_t kserve_port(const struct kserve *k);
void kserve_drain(struct kserve *k);
void kserve_stop(struct kserve *k, uint32_t grace_ms, void (*done)(void *arg), void *arg);
void kserve_hurry(struct kserve *k, uint32_t grace_ms);
/* Has kserve_stop been called? */
bool kserve_is_stopping(const struct kserve *k);

#endif
