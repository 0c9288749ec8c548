/* cmd_version.c - `baton version`: the version, what was built in, what this CPU offers. */
#include <hiredis/hiredis.h>
#include <stdio.h>
#include <uv.h>

#include "deploy/cli/commands.h"
#include "kernels/kernels.h"

static const char INTRO[] = "usage: baton version [--json]\n";

static void add_rows(struct buf *out, const char *quote)
{
    for (size_t i = 0; KERNEL_ROWS[i]; i++) buf_printf(out, "%s%s%s%s", i ? ", " : "", quote, KERNEL_ROWS[i]->name, quote);
}

int cmd_version(int argc, char **argv)
{
    bool done;
    struct buf out = { 0 };
    char features[128];
    struct config *c = command_config("version", INTRO, argc, argv, NULL, NULL, &done);
    if (!c) return done ? 0 : 2;
    kernel_cpu_features(features, sizeof features);
    if (config_bool(c, "json")) {
        buf_printf(&out, "{\"version\":\"%s\",\"kernels\":[", BATON_VERSION);
        add_rows(&out, "\"");
        buf_printf(&out, "],\"cpu\":\"%s\",\"transports\":[\"ipc\",\"tcp\"],\"rdma\":false,\"ucx\":false,\"cuda\":false,\"nccl\":false}\n", features);
    } else {
        buf_printf(&out, "baton %s\n  kernels     ", BATON_VERSION);
        add_rows(&out, "");
        buf_printf(&out, "\n  this CPU    %s\n  transports  ipc, tcp (rdma, ucx: not built in)\n  devices     cpu (cuda: not built in)\n", features);
        buf_printf(&out, "  libraries   libuv %s, hiredis %d.%d.%d\n", uv_version_string(), HIREDIS_MAJOR, HIREDIS_MINOR, HIREDIS_PATCH);
    }
    fwrite(out.data, 1, out.len, stdout);
    buf_release(&out);
    config_free(c);
    return 0;
}
