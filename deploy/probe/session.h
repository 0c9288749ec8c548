/* session.h - what one client of a probe server holds there: an endpoint, a sink, a tool's server,
 * copy areas; and the steps that use them.
 *
 * Life cycle: init, any number of steps, release.
 * Thread: probe_session_do runs on a worker, one at a time, for up to PROBE_TOOL_MS. */
#ifndef BATON_DEPLOY_PROBE_SESSION_H
#define BATON_DEPLOY_PROBE_SESSION_H

#include "deploy/probe/endpoint.h"
#include "deploy/probe/hardware_limits.h"

struct probe_session {
    const struct kvt_tuning *tuning;
    bool loopback_only;           /* no secret: listen on loopback only */
    char host[PROBE_ADDRESS_MAX]; /* this host as the client reaches it; default address */
    struct probe_endpoint *endpoint;
    struct probe_sink sink;
    struct probe_tool_server tool_server;
    struct probe_copy copy;
    uint64_t cpu_start_ns; /* CPU time of the process at EXPECT */
};

void probe_session_init(struct probe_session *s, const struct kvt_tuning *tuning,
                        bool loopback_only, const char *host);
void probe_session_release(struct probe_session *s);
/* Does one step. *reply is filled in any case (on failure: status and text); the caller frees it.
 * */
void probe_session_do(struct probe_session *s, const struct probe_request *r,
                      struct probe_reply *reply);

#endif
