/* sentinel.h - asks Redis' sentinels where the master is.
 *
 * One question goes to the sentinels in turn, each with its own deadline, until one names a master.
 * A question begins at the sentinel that named the last one; when that master was none, the owner
 * says so (sentinel_reject) and the next question begins at the next sentinel. So a sentinel that
 * is cut off from the others, and holds on to an old master, does not keep the client there.
 * Thread: loop. */
#ifndef BATON_NET_REDIS_SENTINEL_H
#define BATON_NET_REDIS_SENTINEL_H

#include "shared/net/loop.h"
#include "shared/net/redis/redis_server.h"
#include "shared/net/tls.h"

struct sentinel;

struct sentinel_options {
    struct loop *loop;
    const struct redis_server *server; /* its sentinels; outlives the sentinel */
    struct tls_client *tls;            /* NULL: plain; outlives the sentinel */
    uint32_t timeout_ms;               /* of each: to connect and to answer */
};

struct sentinel_answer {
    struct redis_address master;
    struct redis_address said_by; /* the sentinel */
};

/* OK: `a` is the answer. Else `a` is NULL, and `why` a sentence on what each of them said:
 * ERR_UNAUTHORIZED when one wants a password, or another one; ERR_NOT_FOUND when one does not know
 * the master's name; ERR_UNAVAILABLE otherwise. The callback may ask again and free. */
typedef void sentinel_fn(void *arg, enum status st, const struct sentinel_answer *a,
                         const char *why);

struct sentinel *sentinel_create(const struct sentinel_options *o);
/* An open question is not answered any more. */
void sentinel_free(struct sentinel *s);
/* Asks; while no other question is open. The answer comes in a later turn. */
void sentinel_ask(struct sentinel *s, sentinel_fn *cb, void *arg);
/* Withdraws the open question, if there is one. */
void sentinel_cancel(struct sentinel *s);
/* The server that was named last is not the master, or cannot be reached. */
void sentinel_reject(struct sentinel *s);

#endif
