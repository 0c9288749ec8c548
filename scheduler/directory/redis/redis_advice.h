/* redis_advice.h - what to do about a Redis that cannot be used, in the words of the options, and
 * the options that name a Redis. For the `redis` backend, `baton doctor` and the start page.
 * Thread: any. */
#ifndef BATON_SCHEDULER_DIRECTORY_REDIS_ADVICE_H
#define BATON_SCHEDULER_DIRECTORY_REDIS_ADVICE_H

#include "shared/net/redis/redis.h"

enum { DIRECTORY_REDIS_FLAGS_MAX = 256 };

/* A half-sentence that says the next step: "give the right one with ..."; "" when the reason alone
 * says all. */
const char *directory_redis_advice(enum redis_cause cause);
/* Writes "--scheduler-host 10.0.0.1 --scheduler-port 6379", or the sentinels and the master, with
 * TLS and the user where they are given; never a password. Returns `out`. */
const char *directory_redis_flags(const struct redis_server *s,
                                  char out[DIRECTORY_REDIS_FLAGS_MAX]);

#endif
