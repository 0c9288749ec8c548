/* environment.h - environment variables that nothing reads although their name says that they are
 * ours: BATON_* and the KVCACHE_* that tune transfers.
 *
 * A misspelt variable must not be lost in silence. It is named in a warning, with the name that was
 * most likely meant. Of a secret it stops a node instead: who sets one relies on it, and a node
 * without its key would serve everybody, without the cluster's secret not find its peers.
 * Variables that tests and scripts of this project read are known, and so are those that Kubernetes
 * sets for a Service named baton or baton-*.
 * Thread: main, before other threads may change the environment. */
#ifndef BATON_DEPLOY_OPTIONS_ENVIRONMENT_H
#define BATON_DEPLOY_OPTIONS_ENVIRONMENT_H

#include "deploy/options/config.h"

/* ERR_CONFIG: a variable is most likely a misspelt secret, and the configuration has no such secret
 * from elsewhere. */
enum status environment_check(const struct config *c, struct err *err) MUST_CHECK;
/* Emits a sentence per variable that is set and read by nothing. */
void environment_warnings(void (*emit)(void *arg, const char *sentence), void *arg);

#endif
