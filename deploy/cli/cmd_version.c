/* cmd_version.c - `baton version`: the version, what was built in, what this CPU offers.
 * Thread: main. */
#include <hiredis/hiredis.h>
#include <stdio.h>
#include <uv.h>

#include "deploy/cli/commands.h"
#include "kernels/backend.h"
#include "kernels/device.h"
#include "kernels/ep/ep.h"
#include "kvtransfer/transport.h"

static const char INTRO[] = "usage: baton version [--json]\n";

static void add_backends(struct buf *out, const char *quote)
{
    for (size_t i = 0; KERNEL_BACKENDS[i]; i++)
        buf_printf(out, "%s%s%s%s", i ? ", " : "", quote, KERNEL_BACKENDS[i]->name, quote);
}

/* Transports between processes; mem is for tests only and carries no KV between nodes. */
static void add_transports(struct buf *out, const char *quote)
{
    bool first = true;
    for (size_t i = 0; kvt_transports[i]; i++) {
        if (kvt_transports[i]->caps & KVT_CAP_SAME_PROCESS) continue;
        buf_printf(out, "%s%s%s%s", first ? "" : ", ", quote, kvt_transports[i]->name, quote);
        first = false;
    }
}

static bool has_transport(const char *name)
{
    const struct kvt_transport_ops *ops;
    return kvt_transport_find(str_of(name), &ops, NULL) == OK;
}

/* Part of this build, whether or not this host has one. */
static bool has_device(const char *name)
{
    struct device *d = NULL;
    enum status st = device_open(name, &d, NULL);
    if (st == OK) device_close(d);
    return st != ERR_UNSUPPORTED;
}

static const char *truth(bool v) { return v ? "true" : "false"; }

static void print_json(const char *features, struct buf *out)
{
    buf_printf(out, "{\"version\":\"%s\",\"kernels\":[", BATON_VERSION);
    add_backends(out, "\"");
    buf_printf(out, "],\"cpu\":\"%s\",\"transports\":[", features);
    add_transports(out, "\"");
    buf_printf(out, "],\"rdma\":%s,\"ucx\":%s,\"cuda\":%s,\"nccl\":%s}\n",
               truth(has_transport("rdma")), truth(has_transport("ucx")), truth(has_device("cuda")),
               truth(ep_nccl_version() >= 0));
}

/* NCCL is loaded at run time, so both the build and this host matter. */
static void add_nccl(struct buf *out)
{
    const int v = ep_nccl_version();
    if (v < 0) buf_printf(out, ", NCCL (not built in)");
    else if (v == 0) buf_printf(out, ", NCCL (built in; not on this host)");
    else buf_printf(out, ", NCCL %d.%d.%d", v / 10000, v / 100 % 100, v % 100);
}

static void print_text(const char *features, struct buf *out)
{
    bool rdma = has_transport("rdma"), ucx = has_transport("ucx");
    buf_printf(out, "baton %s\n  kernels     ", BATON_VERSION);
    add_backends(out, "");
    buf_printf(out, "\n  this CPU    %s\n  transports  ", features);
    add_transports(out, "");
    if (!rdma || !ucx)
        buf_printf(out, " (%s%s%s: not built in)", rdma ? "" : "rdma", rdma || ucx ? "" : ", ",
                   ucx ? "" : "ucx");
    buf_printf(out, "\n  devices     cpu%s\n",
               has_device("cuda") ? ", cuda" : " (cuda: not built in)");
    buf_printf(out, "  libraries   libuv %s, hiredis %d.%d.%d", uv_version_string(), HIREDIS_MAJOR,
               HIREDIS_MINOR, HIREDIS_PATCH);
    add_nccl(out);
    buf_add_char(out, '\n');
}

int cmd_version(int argc, char **argv)
{
    bool done;
    struct buf out = { 0 };
    char features[128];
    struct config *c = command_config("version", INTRO, argc, argv, NULL, NULL, &done);
    if (!c) return done ? 0 : 2;
    kernel_cpu_features(features, sizeof features);
    if (config_bool(c, "json")) print_json(features, &out);
    else print_text(features, &out);
    fwrite(out.data, 1, out.len, stdout);
    buf_release(&out);
    config_free(c);
    return 0;
}
