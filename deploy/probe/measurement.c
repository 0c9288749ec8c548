/* measurement.c - see measurement.h. */
#include "deploy/probe/measurement.h"

#include <stdio.h>
#include <string.h>

#include "deploy/probe/hardware_limits.h"
#include "kvtransfer/transport.h"
#include "shared/base/mem.h"

/* ---- the transfer ---- */

static struct probe_request base_request(const struct measurement *p, enum probe_step step)
{
    struct probe_request r = {
        .step = step,
        .piece_bytes = p->piece_bytes,
        .n_layers = p->n_layers,
        .n_blocks = p->n_blocks,
        .checksum = p->checksum,
        .contiguous = p->contiguous,
        .copiers = p->copiers,
        .connections = p->connections,
    };
    snprintf(r.transport, sizeof r.transport, "%s", p->transport);
    return r;
}

/* Asks one side. `data` goes out with the step; the data of the reply comes back in *data. */
static enum status exchange(struct measurement *p, bool sender, struct probe_request *r,
                            struct buf *data, struct probe_reply *reply, struct err *err)
{
    r->data = *data;
    enum status st = probe_ask(sender ? p->sender : p->receiver, r, reply, err);
    p->at_sender = sender;
    p->step = r->step;
    buf_release(data);
    *data = reply->data;
    reply->data = (struct buf){ 0 };
    return st;
}

static enum status open_side(struct measurement *p, bool sender, struct buf *hello,
                             struct probe_reply *reply, struct err *err)
{
    struct probe_request r = base_request(p, PROBE_OPEN);
    const char *address = sender ? p->sender_address : p->receiver_address;
    snprintf(r.address, sizeof r.address, "%s", address ? address : "");
    return exchange(p, sender, &r, hello, reply, err);
}

static enum status connect_sides(struct measurement *p, struct probe_reply *reply, struct err *err)
{
    struct buf data = { 0 };
    struct probe_request answer = base_request(p, PROBE_ANSWER),
                         connect = base_request(p, PROBE_CONNECT);
    enum status st = open_side(p, false, &data, reply, err);
    buf_clear(&data);
    if (st == OK) st = open_side(p, true, &data, reply, err);
    if (st == OK) st = exchange(p, false, &answer, &data, reply, err);
    if (st == OK) st = exchange(p, true, &connect, &data, reply, err);
    if (st == OK) p->link_speed = reply->link_speed;
    buf_release(&data);
    return st;
}

enum status measurement_begin(struct measurement *p, struct err *err)
{
    struct probe_reply *reply = MEM_NEW(struct probe_reply);
    enum status st = connect_sides(p, reply, err);
    probe_reply_release(reply);
    mem_free(reply);
    bool at_sender = p->at_sender;
    enum probe_step step = p->step;
    if (st != OK) measurement_end(p);
    p->at_sender = at_sender;
    p->step = step;
    return st;
}

void measurement_end(struct measurement *p)
{
    struct probe_reply *reply = MEM_NEW(struct probe_reply);
    struct buf none = { 0 };
    for (int sender = 1; sender >= 0; sender--) {
        struct probe_request r = base_request(p, PROBE_CLOSE);
        /* A lost server has nothing left to close. */
        enum status st = exchange(p, sender, &r, &none, reply, NULL);
        (void)st;
        buf_release(&none);
    }
    mem_free(reply);
}

enum status measurement_run(struct measurement *p, uint32_t n, uint32_t n_blocks,
                            struct measurement_round *out, struct err *err)
{
    struct probe_reply *reply = MEM_NEW(struct probe_reply);
    struct probe_request expect = base_request(p, PROBE_EXPECT), send = base_request(p, PROBE_SEND),
                         take = base_request(p, PROBE_TAKE);
    struct buf data = { 0 };
    expect.n_transfers = send.n_transfers = take.n_transfers = n;
    expect.n_blocks = send.n_blocks = n_blocks;
    *out = (struct measurement_round){ .n = n };
    enum status st = exchange(p, false, &expect, &data, reply, err);
    if (st == OK) st = exchange(p, true, &send, &data, reply, err);
    if (st == OK) {
        memcpy(out->ns, reply->ns, sizeof out->ns);
        for (uint32_t i = 0; i < n; i++) out->total_ns += reply->ns[i];
        out->n_bytes = reply->n_bytes;
        out->cpu_ns = reply->cpu_ns;
        st = exchange(p, false, &take, &data, reply, err);
    }
    bool one_process = probe_peer(p->sender)->process == probe_peer(p->receiver)->process;
    if (st == OK && one_process) out->cpu_ns = reply->cpu_ns;
    else if (st == OK) out->cpu_ns += reply->cpu_ns;
    buf_release(&data);
    mem_free(reply);
    return st;
}

/* ---- the limit ---- */

static enum status limit_copy(struct measurement *p, uint64_t n_bytes, double *rate,
                              struct probe_reply *reply, struct err *err)
{
    struct probe_request r = base_request(p, PROBE_COPY);
    r.n_bytes = n_bytes < PROBE_POOL_MAX / 2 ? n_bytes : PROBE_POOL_MAX / 2;
    TRY(probe_ask(p->sender, &r, reply, err)); /* the warm-up */
    probe_reply_release(reply);
    TRY(probe_ask(p->sender, &r, reply, err));
    *rate = reply->ns[0] ? (double)r.n_bytes * 1e9 / (double)reply->ns[0] : 0;
    return OK;
}

static const char *receiver_address(const struct measurement *p)
{
    return p->receiver_address && p->receiver_address[0] ? p->receiver_address
                                                         : probe_peer(p->receiver)->address;
}

/* The built-in stream: the sender writes while the receiver reads. */
static enum status limit_stream(struct measurement *p, uint64_t n_bytes, double *rate,
                                struct probe_reply *reply, struct err *err)
{
    struct probe_request listen = base_request(p, PROBE_LISTEN),
                         stream = base_request(p, PROBE_STREAM),
                         drain = base_request(p, PROBE_DRAIN);
    struct buf ticket = { 0 };
    struct err second = { 0 };
    snprintf(listen.address, sizeof listen.address, "%s", receiver_address(p));
    snprintf(stream.address, sizeof stream.address, "%s", receiver_address(p));
    stream.n_bytes = drain.n_bytes = n_bytes;
    TRY(exchange(p, false, &listen, &ticket, reply, err));
    stream.port = reply->port;
    stream.data = ticket;
    enum status st = probe_ask_begin(p->sender, &stream, err);
    buf_release(&ticket);
    if (st != OK) return st;
    st = probe_ask(p->receiver, &drain, reply, err);
    uint64_t ns = reply->ns[0];
    probe_reply_release(reply);
    enum status sent = probe_ask_finish(p->sender, reply, &second);
    if (sent != OK) return err_set(err, sent, "%s", second.text);
    TRY(st);
    *rate = ns ? (double)n_bytes * 1e9 / (double)ns : 0;
    return OK;
}

static enum status run_tool(struct measurement *p, enum probe_tool tool, uint64_t n_bytes,
                            struct probe_reply *reply, struct err *err)
{
    struct probe_request serve = base_request(p, PROBE_TOOL_SERVE),
                         run = base_request(p, PROBE_TOOL_RUN);
    serve.tool = run.tool = tool;
    serve.n_bytes = run.n_bytes = n_bytes;
    snprintf(serve.address, sizeof serve.address, "%s", receiver_address(p));
    snprintf(run.address, sizeof run.address, "%s", receiver_address(p));
    TRY(probe_ask(p->receiver, &serve, reply, err));
    run.port = reply->port;
    probe_reply_release(reply);
    return probe_ask(p->sender, &run, reply, err);
}

static enum status limit_of(struct measurement *p, uint64_t n_bytes, double *rate,
                            const char **what, struct probe_reply *reply, struct err *err)
{
    struct str transport = str_of(p->transport);
    if (kvt_transport_caps(transport) & KVT_CAP_SAME_HOST) {
        *what = "memcpy";
        return limit_copy(p, n_bytes, rate, reply, err);
    }
    enum probe_tool tool = str_eq_c(transport, "tcp")    ? PROBE_IPERF3
                           : str_eq_c(transport, "rdma") ? PROBE_IB_WRITE_BW
                           : str_eq_c(transport, "ucx")  ? PROBE_UCX_PUT_BW
                                                         : PROBE_TOOL_END;
    if (tool == PROBE_TOOL_END)
        return err_set(err, ERR_UNSUPPORTED, "no tool is known for %s", p->transport);
    enum status st = run_tool(p, tool, n_bytes, reply, err);
    *what = probe_tool_name(tool);
    *rate = (double)reply->n_bytes;
    if (tool != PROBE_IPERF3 || st != ERR_UNSUPPORTED) return st;
    probe_reply_release(reply);
    *what = "socket stream";
    return limit_stream(p, n_bytes, rate, reply, err);
}

enum status measurement_limit(struct measurement *p, uint64_t n_bytes, double *rate,
                              const char **what, struct err *err)
{
    struct probe_reply *reply = MEM_NEW(struct probe_reply);
    enum status st = limit_of(p, n_bytes, rate, what, reply, err);
    probe_reply_release(reply);
    mem_free(reply);
    return st;
}

enum status measurement_limit_latency(struct measurement *p, uint64_t ns[3], const char **what,
                                      struct err *err)
{
    struct str transport = str_of(p->transport);
    enum probe_tool tool = str_eq_c(transport, "rdma")  ? PROBE_IB_WRITE_LAT
                           : str_eq_c(transport, "ucx") ? PROBE_UCX_PUT_LAT
                                                        : PROBE_TOOL_END;
    if (tool == PROBE_TOOL_END)
        return err_set(err, ERR_UNSUPPORTED, "no latency tool is known for %s", p->transport);
    struct probe_reply *reply = MEM_NEW(struct probe_reply);
    enum status st = run_tool(p, tool, (uint64_t)p->piece_bytes * 1000, reply, err);
    *what = probe_tool_name(tool);
    memcpy(ns, reply->ns, 3 * sizeof *ns);
    probe_reply_release(reply);
    mem_free(reply);
    return st;
}
