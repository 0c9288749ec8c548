/* config_redis.h - the Redis that the options name (--scheduler-host, --scheduler-sentinels, their
 * user and their TLS), for a node, the launcher and `baton doctor`. Thread: loop, at start. */
#ifndef BATON_DEPLOY_OPTIONS_CONFIG_REDIS_H
#define BATON_DEPLOY_OPTIONS_CONFIG_REDIS_H

#include "deploy/options/config.h"
#include "shared/base/mem.h"
#include "shared/net/redis/redis_server.h"

/* What it points to lives in `arena` and in `c`. ERR_CONFIG: a value that cannot be right. The
 * files of TLS are read when the client is created. */
enum status config_redis(const struct config *c, struct arena *arena, struct redis_server *out,
                         struct err *err) MUST_CHECK;

#endif
