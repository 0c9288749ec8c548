/* redis.h - client of one Redis server on the loop (hiredis async): reconnects with back-off,
 * deadlines, scripts.
 *
 * Without a connection commands fail at once with ERR_UNAVAILABLE; callers try again. A command
 * without an answer by its deadline gets ERR_TIMEOUT, and the client reconnects. `on_up` is called
 * after every connection, so that the owner can publish its state again. Scripts are sent by
 * EVALSHA with EVAL as fallback. A reply has at most 8 MiB. Thread: loop. */
#ifndef BATON_NET_REDIS_REDIS_H
#define BATON_NET_REDIS_REDIS_H

#include <hiredis/hiredis.h>

#include "shared/base/buf.h"
#include "shared/net/loop.h"

struct redis;

struct redis_options {
    struct loop *loop;
    const char *host;
    uint16_t port;
    int db;
    const char *password; /* NULL or "": none */
    uint32_t timeout_ms;  /* of connecting and of each command */
    void (*on_up)(void *arg);
    void (*on_down)(void *arg, const char *why); /* and again when the reason changes */
    void *arg;
};

/* Starts to connect. An unreachable server is no error: on_down is called, and the client tries
 * again after 50 ms doubling to 2 s. */
enum status redis_create(const struct redis_options *o, struct redis **out,
                         struct err *err) MUST_CHECK;
/* Pending commands get ERR_CANCELED. */
void redis_free(struct redis *r);
bool redis_is_up(const struct redis *r);

/* reply is NULL unless st is OK, or ERR_IO: the server's error, which is logged when it is new. */
typedef void redis_fn(void *arg, enum status st, const redisReply *reply);

enum status redis_command(struct redis *r, redis_fn *cb, void *arg, int argc, const char **argv,
                          const size_t *argv_len) MUST_CHECK;
/* Runs `script` (Lua source, a static string) with the first n_keys of the n arguments as keys. */
enum status redis_script(struct redis *r, const char *script, redis_fn *cb, void *arg, int n_keys,
                         int n, const char **argv, const size_t *argv_len) MUST_CHECK;

#endif
