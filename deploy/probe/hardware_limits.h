/* hardware_limits.h - what the machine can do without Baton: memcpy, a plain TCP stream, and
 * trusted tools.
 *
 * A stream is k plain TCP connections from one probe server to another. Each presents a random
 * ticket first and is read into one reused buffer. A tool is a program of the table in
 * perf_tools.c, run only with arguments made from checked numbers.
 * Life cycle: a sink lives between open and close, a tool's server between start and stop.
 * Thread: a worker of the probe server; every call is bounded in time. */
#ifndef BATON_DEPLOY_PROBE_HARDWARE_LIMITS_H
#define BATON_DEPLOY_PROBE_HARDWARE_LIMITS_H

#include <sys/types.h>

#include "deploy/probe/probe_wire.h"
#include "kernels/device.h"
#include "kvtransfer/tuning.h"

enum { PROBE_STREAM_TICKET = 16, PROBE_TOOL_MS = 30000 };

/* Two areas, allocated as KV pools are. */
struct probe_copy {
    struct device *device;
    struct dev_mem from, to;
};

/* memcpy n_bytes (at most PROBE_POOL_MAX) in calls of 1 MiB on `n_threads`. The first call
 * allocates the areas. */
enum status probe_copy_run(struct probe_copy *c, uint64_t n_bytes, uint32_t n_threads, uint64_t *ns,
                           struct err *err) MUST_CHECK;
void probe_copy_release(struct probe_copy *c);

struct probe_sink {
    int fd; /* -1: closed */
    uint8_t ticket[PROBE_STREAM_TICKET];
};

enum status probe_sink_open(struct probe_sink *s, const char *host, uint16_t *port,
                            struct err *err) MUST_CHECK;
/* Accepts n connections and reads n_bytes in all; *ns is the time from the first byte to the last.
 * */
enum status probe_sink_drain(struct probe_sink *s, uint32_t n, uint64_t n_bytes, uint64_t *ns,
                             struct err *err) MUST_CHECK;
void probe_sink_close(struct probe_sink *s);
enum status probe_stream(const char *address, uint16_t port, struct str ticket, uint32_t n,
                         uint64_t n_bytes, struct err *err) MUST_CHECK;

struct probe_tool_server {
    pid_t pid; /* 0: none */
    int fd;    /* its output */
};

const char *probe_tool_name(enum probe_tool tool);
/* Starts the tool's server side on a port that was free when it was chosen. ERR_UNSUPPORTED: not
 * installed; ERR_NODEV: no device for it. */
enum status probe_tool_server_start(struct probe_tool_server *s, const struct probe_request *r,
                                    const char *host, const struct kvt_tuning *tuning,
                                    uint16_t *port, struct err *err) MUST_CHECK;
void probe_tool_server_stop(struct probe_tool_server *s);
/* Runs the client side. A rate goes to reply->n_bytes (bytes per second), latencies go to reply->ns
 * (p50, p99, p99.9; 0: the tool does not report it). */
enum status probe_tool_run(const struct probe_request *r, const struct kvt_tuning *tuning,
                           struct probe_reply *reply, struct err *err) MUST_CHECK;
/* Parses the output of the client side; public for tests. ERR_FORMAT. */
enum status probe_tool_parse(enum probe_tool tool, uint32_t piece_bytes, const char *output,
                             struct probe_reply *reply, struct err *err) MUST_CHECK;

#endif
