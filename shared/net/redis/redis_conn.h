/* redis_conn.h - private header of redis.c (connection) and redis_command.c (commands and scripts).
 *
 * A command is in `commands` until its callback was called. hiredis has a pointer to it until it
 * delivers the reply or gives up the connection; only then it is freed. Thread: loop. */
#ifndef BATON_NET_REDIS_REDIS_CONN_H
#define BATON_NET_REDIS_REDIS_CONN_H

#include <hiredis/async.h>

#include "shared/base/list.h"
#include "shared/base/log/log_repeats.h"
#include "shared/base/map.h"
#include "shared/net/redis/redis.h"

enum redis_state { REDIS_DOWN, REDIS_RESOLVING, REDIS_CONNECTING, REDIS_HANDSHAKE, REDIS_UP };

struct redis {
    struct redis_options o;
    char *host, *password;
    enum redis_state state;
    redisAsyncContext *ac;         /* NULL: none */
    struct redis_resolve *resolve; /* NULL: no name is being resolved */
    struct loop_timer *retry, *connect_deadline, *command_deadline;
    uint32_t backoff_ms, n_handshakes, n_holds;
    uint64_t n_attempts;
    size_t n_unparsed;    /* bytes received since the last complete reply */
    struct list commands; /* earliest deadline first */
    size_t n_commands, n_bytes;
    struct map scripts;                                  /* address of the text -> SHA-1 in hex */
    redisReplyObjectFunctions reader_fn, *reader_fn_own; /* ours, with bounded arrays; hiredis's */
    void *(*array_fn)(const redisReadTask *t, int n);
    bool freed;
    char reported[160]; /* why it is down, as reported; "": it is not */
    struct log_repeats refusals;
};

/* Gives up the connection and reconnects later. */
void redis_drop(struct redis *r, const char *why);
/* Ends a hold; n_holds keeps the struct alive while callbacks run. */
void redis_unhold(struct redis *r);
void redis_fail_commands(struct redis *r, enum status st); /* answers all that wait */
void redis_scripts_release(struct redis *r);

#endif
