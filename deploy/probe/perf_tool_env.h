/* perf_tool_env.h - the environment in which ucx_perftest measures what the ucx row measures: the
 * same transports, devices, GID.
 *
 * The row gives these to UCX in code (kvtransfer/ucx/setup.c); a program takes them from UCX_*
 * variables. The operator's own variables stay, but for UCX_TLS, whose names the row translates.
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

/* None in a build without UCX. Released by perf_tool_env_release. */
void perf_tool_env_make(struct perf_tool_env *s, const struct kvt_tuning *tuning);
void perf_tool_env_release(struct perf_tool_env *s);
/* This process's environment with the settings in it, NULL-terminated. The array is the caller's
 * (mem_free); its strings are `s`'s and ours. */
char **perf_tool_env_array(const struct perf_tool_env *s);

#endif
