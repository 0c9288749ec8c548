/* health_port.h - the port of --health-port: whether this node takes requests, as PaddleNLP's
 * service says it. Probes that know nothing of Baton ask there.
 *
 *     GET /v2/health/live, /v2/health/ready    200 with an empty body, or
 *                                              500 {"error_code":N,"error_msg":"..."}
 *         1  server is not ready     the model loads, the node drains, no request would be taken
 *         2  infer engine is down    the processes behind this one do not serve
 *         3  infer engine hangs      it has work, and has made no progress for hang_ms
 *
 * Both paths say the same, as they do there. No key is asked for. A timer of its own looks at the
 * engine's progress, since nobody may have asked for long. Life cycle: start, stop, freed by the
 * end of the server. Owner: the node. Thread: loop. */
#ifndef BATON_DEPLOY_SERVICE_HEALTH_PORT_H
#define BATON_DEPLOY_SERVICE_HEALTH_PORT_H

#include "shared/net/http/http_server.h"

struct health_port;

enum health_state { HEALTH_OK, HEALTH_NOT_READY, HEALTH_ENGINE_DOWN, HEALTH_ENGINE_HANGS };

/* What is known of the node when somebody asks. */
struct health_facts {
    bool ready;        /* it has loaded, and does not end */
    bool takes;        /* a request would be taken now */
    bool behind;       /* others compute: this process has no engine */
    bool has_work;     /* its engine has; else `progress` says nothing */
    uint64_t progress; /* a counter that moves while the engine computes */
};

struct health_port_options {
    struct loop *loop;
    struct http_server_options like; /* of the API; its port, handler and metrics are replaced */
    uint16_t port;
    const char *option; /* that gave it */
    uint32_t hang_ms;
    void (*look)(void *arg, struct health_facts *out);
    void *arg;
};

enum status health_port_start(const struct health_port_options *o, struct health_port **out,
                              struct err *err) MUST_CHECK;
/* Frees it, then calls done. */
void health_port_stop(struct health_port *h, void (*done)(void *arg), void *arg);

/* Since when an engine has made no progress; for health_port.c and its test. */
struct health_watch {
    uint64_t progress;
    uint64_t t_ms; /* of the last change; 0: not looked at yet */
};
/* Looks at `f` at the time now_ms. Returns what to answer. */
enum health_state health_watch_look(struct health_watch *w, const struct health_facts *f,
                                    uint64_t now_ms, uint32_t hang_ms);
/* The sentence of a state; "" for HEALTH_OK. */
const char *health_text(enum health_state s);

#endif
