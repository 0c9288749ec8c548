/* session.c - see session.h. */
#include "deploy/probe/session.h"

#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "kvtransfer/transport.h"
#include "shared/base/mem.h"

void probe_session_init(struct probe_session *s, const struct kvt_tuning *tuning,
                        bool loopback_only, const char *host)
{
    *s = (struct probe_session){ .tuning = tuning, .loopback_only = loopback_only, .sink.fd = -1 };
    snprintf(s->host, sizeof s->host, "%s", host);
}

static void close_endpoint(struct probe_session *s)
{
    probe_endpoint_close(s->endpoint);
    s->endpoint = NULL;
}

void probe_session_release(struct probe_session *s)
{
    close_endpoint(s);
    probe_sink_close(&s->sink);
    probe_tool_server_stop(&s->tool_server);
    probe_copy_release(&s->copy);
}

/* CPU time of this process so far, user plus system. */
static uint64_t cpu_ns(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (uint64_t)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) * 1000000000u +
           (uint64_t)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1000u;
}

static void do_who(struct probe_reply *reply)
{
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (gethostname(reply->host, sizeof reply->host - 1) != 0) reply->host[0] = 0;
    if (f && fscanf(f, "%39s", reply->boot_id) != 1) reply->boot_id[0] = 0;
    if (f) fclose(f);
    snprintf(reply->version, sizeof reply->version, "%s", BATON_VERSION);
    for (size_t i = 0; kvt_transports[i]; i++)
        buf_printf(&reply->data, "%s%s", i ? "," : "", kvt_transports[i]->name);
}

/* Chooses the address to listen on: the client's, as far as it is allowed. */
static enum status choose_host(const struct probe_session *s, const struct probe_request *r,
                               const char **host, struct err *err)
{
    *host = r->address[0] ? r->address : s->host;
    bool loopback = strncmp(*host, "127.", 4) == 0 || str_eq_c(str_of(*host), "::1");
    if (!s->loopback_only || loopback) return OK;
    return err_set(
        err, ERR_UNAUTHORIZED,
        "this probe server has no cluster secret, so it listens on loopback only, not on %s: "
        "set the same BATON_CLUSTER_SECRET everywhere",
        *host);
}

static enum status do_open(struct probe_session *s, const struct probe_request *r,
                           struct probe_reply *reply, struct err *err)
{
    const char *host;
    close_endpoint(s);
    TRY(choose_host(s, r, &host, err));
    TRY(probe_endpoint_open(r, host, s->tuning, &s->endpoint, err));
    probe_endpoint_hello(s->endpoint, &reply->data);
    return OK;
}

static enum status do_connect(struct probe_session *s, const struct probe_request *r,
                              struct probe_reply *reply, struct err *err)
{
    const char *transport = "";
    TRY(probe_endpoint_connect(s->endpoint, buf_str(&r->data), &transport, &reply->link_speed,
                               err));
    snprintf(reply->transport, sizeof reply->transport, "%s", transport);
    return OK;
}

static enum status do_send(struct probe_session *s, const struct probe_request *r,
                           struct probe_reply *reply, struct err *err)
{
    uint64_t before = cpu_ns();
    TRY(probe_endpoint_send(s->endpoint, r->n_transfers, r->n_blocks, buf_str(&r->data), reply->ns,
                            err));
    reply->cpu_ns = cpu_ns() - before;
    reply->n_ns = r->n_transfers;
    reply->n_bytes = probe_endpoint_bytes(s->endpoint, r->n_blocks) * r->n_transfers;
    return OK;
}

static enum status do_take(struct probe_session *s, const struct probe_request *r,
                           struct probe_reply *reply, struct err *err)
{
    enum status st = probe_endpoint_take(s->endpoint, r->n_transfers, err);
    reply->cpu_ns = cpu_ns() - s->cpu_start_ns;
    return st;
}

static enum status do_listen(struct probe_session *s, const struct probe_request *r,
                             struct probe_reply *reply, struct err *err)
{
    const char *host;
    TRY(choose_host(s, r, &host, err));
    TRY(probe_sink_open(&s->sink, host, &reply->port, err));
    buf_add(&reply->data, s->sink.ticket, sizeof s->sink.ticket);
    return OK;
}

static enum status do_tool_serve(struct probe_session *s, const struct probe_request *r,
                                 struct probe_reply *reply, struct err *err)
{
    const char *host;
    TRY(choose_host(s, r, &host, err));
    return probe_tool_server_start(&s->tool_server, r, host, s->tuning, &reply->port, err);
}

static enum status do_step(struct probe_session *s, const struct probe_request *r,
                           struct probe_reply *reply, struct err *err)
{
    bool needs_endpoint = r->step >= PROBE_ANSWER && r->step <= PROBE_TAKE;
    if (needs_endpoint && !s->endpoint)
        return err_set(err, ERR_INVALID, "the step %s needs OPEN before it",
                       probe_step_name(r->step));
    switch (r->step) {
    case PROBE_WHO: do_who(reply); return OK;
    case PROBE_OPEN: return do_open(s, r, reply, err);
    case PROBE_ANSWER:
        return probe_endpoint_answer(s->endpoint, buf_str(&r->data), &reply->data, err);
    case PROBE_CONNECT: return do_connect(s, r, reply, err);
    case PROBE_EXPECT:
        s->cpu_start_ns = cpu_ns();
        return probe_endpoint_expect(s->endpoint, r->n_transfers, r->n_blocks, &reply->data, err);
    case PROBE_SEND: return do_send(s, r, reply, err);
    case PROBE_TAKE: return do_take(s, r, reply, err);
    case PROBE_CLOSE:
        close_endpoint(s);
        probe_tool_server_stop(&s->tool_server);
        return OK;
    case PROBE_LISTEN: return do_listen(s, r, reply, err);
    case PROBE_STREAM:
        return probe_stream(r->address, r->port, buf_str(&r->data), r->connections, r->n_bytes,
                            err);
    case PROBE_DRAIN:
        reply->n_ns = 1;
        return probe_sink_drain(&s->sink, r->connections, r->n_bytes, &reply->ns[0], err);
    case PROBE_COPY:
        reply->n_ns = 1;
        return probe_copy_run(&s->copy, r->n_bytes, r->copiers, &reply->ns[0], err);
    case PROBE_TOOL_SERVE: return do_tool_serve(s, r, reply, err);
    case PROBE_TOOL_RUN: return probe_tool_run(r, s->tuning, reply, err);
    case PROBE_STEP_END: break;
    }
    return err_set(err, ERR_INVALID, "there is no such step");
}

void probe_session_do(struct probe_session *s, const struct probe_request *r,
                      struct probe_reply *reply)
{
    struct err err = { 0 };
    reply->status = do_step(s, r, reply, &err);
    if (reply->status != OK)
        snprintf(reply->text, sizeof reply->text, "%.*s", PROBE_TEXT_MAX - 1,
                 err.text[0] ? err.text : status_text(reply->status));
}
