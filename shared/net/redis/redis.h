/* redis.h - client of one Redis on the loop, over TLS where it is asked for: finds the master,
 * reconnects with back-off, deadlines, scripts.
 *
 * The server is named (host and port) or asked of sentinels. After every connect it must say that
 * it is a master (ROLE); a replica would refuse the first write, or with a lost tail answer from
 * the past. Without a connection commands fail at once with ERR_UNAVAILABLE; callers try again. A
 * command without an answer by its deadline gets ERR_TIMEOUT, and the client reconnects. `on_up` is
 * called after every connection, so that the owner can publish its state again. Scripts are sent by
 * EVALSHA with EVAL as fallback. A reply has at most 8 MiB. Thread: loop. */
#ifndef BATON_NET_REDIS_REDIS_H
#define BATON_NET_REDIS_REDIS_H

#include <hiredis/hiredis.h>

#include "shared/base/buf.h"
#include "shared/net/loop.h"
#include "shared/net/redis/redis_server.h"

struct redis;

/* What kind of thing keeps the client from being up: each has another remedy. */
enum redis_cause {
    REDIS_CAUSE_NONE,
    REDIS_CAUSE_CONNECTION, /* refused, lost, too slow */
    REDIS_CAUSE_TLS,        /* a certificate, or a server without TLS */
    REDIS_CAUSE_PROTOCOL,   /* what answers is no Redis, or one with TLS that is asked without */
    REDIS_CAUSE_PASSWORD,   /* or the user */
    REDIS_CAUSE_PERMISSION, /* the user may not do what is needed */
    REDIS_CAUSE_ROLE,       /* it is no master */
    REDIS_CAUSE_SENTINEL,   /* no sentinel names a master */
    REDIS_CAUSE_SENTINEL_PASSWORD
};

struct redis_options {
    struct loop *loop;
    struct redis_server server; /* copied */
    uint32_t timeout_ms;        /* of connecting, of asking one sentinel, and of each command */
    void (*on_up)(void *arg);
    void (*on_down)(void *arg, const char *why); /* and again when the reason changes */
    void *arg;
};

/* Starts to connect. An unreachable server is no error: on_down is called, and the client tries
 * again after 50 ms doubling to 2 s. ERR_CONFIG: err->field is the member of redis_server that
 * cannot be used. */
enum status redis_create(const struct redis_options *o, struct redis **out,
                         struct err *err) MUST_CHECK;
/* Pending commands get ERR_CANCELED. */
void redis_free(struct redis *r);
bool redis_is_up(const struct redis *r);
/* Of the reason that on_down was told last; REDIS_CAUSE_NONE while the client is up. */
enum redis_cause redis_why_down(const struct redis *r);
/* Where the client is connected, or tried to last; NULL: no server has been found yet. */
const struct redis_address *redis_where(const struct redis *r);
/* "TLSv1.3", or NULL when the connection is plain or down. */
const char *redis_tls_version(const struct redis *r);

/* Does the error of a reply say that the user may not do this? */
bool redis_is_no_permission(const redisReply *reply);

/* reply is NULL unless st is OK, or ERR_IO: the server's error, which is logged when it is new. */
typedef void redis_fn(void *arg, enum status st, const redisReply *reply);

enum status redis_command(struct redis *r, redis_fn *cb, void *arg, int argc, const char **argv,
                          const size_t *argv_len) MUST_CHECK;
/* Runs `script` (Lua source, a static string) with the first n_keys of the n arguments as keys. */
enum status redis_script(struct redis *r, const char *script, redis_fn *cb, void *arg, int n_keys,
                         int n, const char **argv, const size_t *argv_len) MUST_CHECK;

#endif
