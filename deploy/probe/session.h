/* session.h - what one visitor of an agent has: an end, a sink, a tool's server; and the steps that
 * use them.
 *
 * Life cycle: init, any number of steps, release. Thread: probe_session_do runs on a worker and may
 * take up to PROBE_TOOL_MS; one at a time. */
#ifndef BATON_DEPLOY_PROBE_SESSION_H
#define BATON_DEPLOY_PROBE_SESSION_H

#include "deploy/probe/endpoint.h"
#include "deploy/probe/hardware_limits.h"

struct probe_session {
    const struct kvt_tuning *tuning;
    bool loopback_only;           /* no secret: nothing but loopback may be listened on */
    char host[PROBE_ADDRESS_MAX]; /* this host as the visitor reaches it:
                                   * default of OPEN and LISTEN */
    struct probe_endpoint *endpoint;
    struct probe_sink sink;
    struct probe_tool_server tool_server;
    struct probe_copy copy;
    uint64_t cpu_start_ns; /* of the process at EXPECT */
};

void probe_session_init(struct probe_session *s, const struct kvt_tuning *tuning,
                        bool loopback_only, const char *host);
void probe_session_release(struct probe_session *s);
/* Do one step; *reply is filled in either case (status and text when it failed) and is released by
 * the caller. */
void probe_session_do(struct probe_session *s, const struct probe_request *r,
                      struct probe_reply *reply);

#endif
