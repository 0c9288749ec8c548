/* perf_tool_env.h - the environment that makes ucx_perftest measure what the ucx transport uses:
 * the same UCX transports, devices and GID.
 *
 * The ucx transport gives these to UCX in code (kvtransfer/ucx/setup.c); a program takes them from
 * UCX_* variables. The operator's own variables stay, except UCX_TLS, whose names the transport
 * translates.
 * Thread: any. */
#ifndef BATON_DEPLOY_PROBE_PERF_TOOL_ENV_H
#define BATON_DEPLOY_PROBE_PERF_TOOL_ENV_H

#include "kvtransfer/tuning.h"

#include "shared/base/buf.h"

enum { PERF_TOOL_ENV_MAX = 4 };

struct perf_tool_env {
    struct buf text[PERF_TOOL_ENV_MAX]; /* NAME=value */
    int n;
};

/* Empty in a build without UCX. Released by perf_tool_env_release. */
void perf_tool_env_make(struct perf_tool_env *s, const struct kvt_tuning *tuning);
void perf_tool_env_release(struct perf_tool_env *s);
/* This process's environment plus the settings of `s`, NULL-terminated. The caller frees the array
 * (mem_free); its strings belong to `s` and to the environment. */
char **perf_tool_env_array(const struct perf_tool_env *s);

#endif
