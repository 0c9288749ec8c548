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

enum { TOOL_SETTINGS_MAX = 4 };

struct tool_settings {
    struct buf text[TOOL_SETTINGS_MAX]; /* NAME=value */
    int n;
};

/* None in a build without UCX. Released by tool_settings_release. */
void tool_settings_make(struct tool_settings *s, const struct kvt_tuning *tuning);
void tool_settings_release(struct tool_settings *s);
/* This process's environment with the settings in it, NULL-terminated. The array is the caller's
 * (mem_free); its strings are `s`'s and ours. */
char **tool_settings_environment(const struct tool_settings *s);

#endif
