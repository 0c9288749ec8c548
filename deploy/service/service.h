/* service.h - what `start_server` starts: a `baton serve` that reads the variables of PaddleNLP's
 * service, as docs/start_server.md lists them.
 *
 * Those that are an option under another name stand in the option table (service_env, service_def);
 * here are those that several options, or the model, must be known for:
 *     BLOCK_BS             KV blocks, in sequences of --max-model-len
 *     MAX_CACHED_TASK_NUM  requests that wait, beside those that run
 *     MODEL_DIR model_name where the model is (service_model.h)
 *     POD_IPS ...          several hosts (service_hosts.h)
 * What is derived counts as given, so that the processes which this one starts get it as flags.
 * Thread: main, at start. */
#ifndef BATON_DEPLOY_SERVICE_SERVICE_H
#define BATON_DEPLOY_SERVICE_SERVICE_H

#include "deploy/options/config.h"

/* Set by start_server: SERVICE_NAMED when its argument named the model (in model_name). */
#define SERVICE_VARIABLE "BATON_START_SERVER"
#define SERVICE_NAMED    "named"

/* Did start_server start this process? */
bool service_is_on(void);
/* Completes what `serve` or `launch` was given, before it is used. Does nothing in a process that
 * another one of Baton has started with all of its options. ERR_CONFIG names the variable, its
 * value and what would be right; ERR_NOT_FOUND: so far all is well, but the model that was named is
 * not on this host. */
enum status service_complete(struct config *c, struct err *err) MUST_CHECK;

#endif
