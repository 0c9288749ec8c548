/* redis_answers.h - what a server says of itself (ROLE), and what a sentinel says of a master
 * (SENTINEL get-master-addr-by-name), with every bound checked. Thread: any. */
#ifndef BATON_NET_REDIS_REDIS_ANSWERS_H
#define BATON_NET_REDIS_REDIS_ANSWERS_H

#include <hiredis/hiredis.h>

#include "shared/base/err.h"
#include "shared/net/redis/redis_server.h"

enum redis_role { REDIS_ROLE_MASTER, REDIS_ROLE_REPLICA, REDIS_ROLE_SENTINEL };

/* *master is set for a replica: where its master is; port 0: it does not say. ERR_FORMAT: not an
 * answer to ROLE. */
enum status redis_read_role(const redisReply *reply, enum redis_role *out,
                            struct redis_address *master, struct err *err) MUST_CHECK;
/* ERR_NOT_FOUND: the sentinel does not know the master. ERR_FORMAT: it is no such answer. */
enum status redis_read_master(const redisReply *reply, struct redis_address *out,
                              struct err *err) MUST_CHECK;

#endif
