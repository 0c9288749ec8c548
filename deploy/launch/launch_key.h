/* launch_key.h - the API key by which a launcher asks the processes that it starts.
 * Thread: main. */
#ifndef BATON_DEPLOY_LAUNCH_LAUNCH_KEY_H
#define BATON_DEPLOY_LAUNCH_LAUNCH_KEY_H

#include "deploy/options/config.h"

/* The first of --api-key. A file of keys may have none in clear: with --api-keys-file alone one
 * more is made, which processes that are started from now on know by BATON_API_KEY, and nobody
 * else. NULL: they need none. Valid until the process ends. */
const char *launch_key(const struct config *c);

#endif
