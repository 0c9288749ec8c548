/* redis_conn.h - private header of redis.c (connection) and redis_command.c (commands and scripts).
 *
 * A command is in `commands` and in `sent` until its callback was called; then it is freed. The
 * server answers in the order of `sent`. Thread: loop. */
#ifndef BATON_NET_REDIS_REDIS_CONN_H
#define BATON_NET_REDIS_REDIS_CONN_H

#include "shared/base/list.h"
#include "shared/base/log/log_repeats.h"
#include "shared/base/map.h"
#include "shared/base/mem.h"
#include "shared/net/redis/redis.h"
#include "shared/net/redis/redis_stream.h"
#include "shared/net/redis/sentinel.h"

enum redis_state { REDIS_DOWN, REDIS_LOOKING, REDIS_CONNECTING, REDIS_HANDSHAKE, REDIS_UP };
/* What is sent before anything else, in this order, as far as it is needed. */
enum redis_step { REDIS_STEP_AUTH, REDIS_STEP_SELECT, REDIS_STEP_ROLE, REDIS_STEP_PING };

struct redis {
    struct redis_options o; /* o.server: its strings and sentinels are in `arena` */
    struct arena arena;
    enum redis_state state;
    struct tls_client *tls;      /* NULL: plain */
    struct sentinel *sentinel;   /* NULL: the server is named */
    struct redis_stream *stream; /* NULL: none */
    struct redis_address where,
        said_by; /* the server, and the sentinel that named it; port 0: none */
    struct loop_timer *retry, *connect_deadline, *command_deadline;
    enum redis_step steps[4]; /* of the handshake */
    uint32_t n_steps, i_step;
    uint32_t backoff_ms, n_holds;
    uint64_t n_attempts;
    struct list commands, sent; /* by deadline; in the order in which they are answered */
    size_t n_commands, n_bytes;
    struct map scripts; /* address of the text -> SHA-1 in hex */
    bool freed;
    enum redis_cause cause;
    char reported[ERR_TEXT_MAX]; /* which server, and why it is down, as reported; "": it is not */
    struct log_repeats refusals;
};

/* Gives up the connection and reconnects later. */
void redis_drop(struct redis *r, enum redis_cause cause, const char *why);
/* Ends a hold; n_holds keeps the struct alive while callbacks run. */
void redis_unhold(struct redis *r);
void redis_take_reply(struct redis *r, const redisReply *reply); /* to the oldest of `sent` */
void redis_fail_commands(struct redis *r, enum status st);       /* answers all that wait */
void redis_scripts_release(struct redis *r);

#endif
