/* redis_state.h - the structs of a `redis` directory, for the files of this folder only.
 * Thread: loop. */
#ifndef BATON_SCHEDULER_DIRECTORY_REDIS_STATE_H
#define BATON_SCHEDULER_DIRECTORY_REDIS_STATE_H

#include <inttypes.h>
#include <stdio.h>

#include "scheduler/directory/redis/redis_advice.h"
#include "scheduler/directory/remote.h"
#include "scheduler/directory/wire.h"
#include "shared/net/redis/redis.h"

enum { DIRECTORY_REDIS_ID_TEXT = 17, DIRECTORY_REDIS_NUMBER_TEXT = 24 };

struct directory_redis {
    struct directory base;
    struct directory_remote remote;
    char topic[NODE_NAME_MAX];
    char owner[DIRECTORY_REDIS_ID_TEXT], lease[DIRECTORY_REDIS_NUMBER_TEXT];
    struct redis_address was;                   /* the server that was up last; port 0: none */
    char at[REDIS_SERVER_TEXT_MAX];             /* the server */
    char check[DIRECTORY_REDIS_FLAGS_MAX + 48]; /* the command that looks further */
    struct redis *redis;
    uint64_t answered_ms; /* when the latest call was sent that this connection answered; 0: none */
    uint32_t n_holds;     /* callbacks running */
    struct log_repeats refused_reports;
    bool closed;
};

struct directory_redis_call {
    struct directory_redis *d;
    enum directory_op op;
    directory_snapshot_fn *snapshot;
    directory_reserve_fn *reserve;
    directory_meter_fn *meter;
    void *arg;
    uint64_t request, id, sent_ms;
    struct prefix_placed chosen; /* reserve: the nodes without a query */
    struct meter_sum *room;      /* [n_room] of the sums that meter asked for */
    uint32_t n_room;
};

/* Sends one call. Keys: the topic's prefix and key2 (may be NULL). Arguments: the owner, the lease,
 * the time since the last call that was answered, and args. */
enum status directory_redis_call_script(struct directory_redis *d, struct directory_redis_call call,
                                        const char *script, const char *topic, const char *key2,
                                        int n_args, const char *const *args) MUST_CHECK;
struct directory_redis_args {
    int n;
    const char *const *args;
    const size_t *lengths;
};
/* The same with arguments that are no strings. */
enum status directory_redis_call_binary(struct directory_redis *d, struct directory_redis_call call,
                                        const char *script, const char *topic, const char *key2,
                                        const struct directory_redis_args *args) MUST_CHECK;
enum status directory_redis_reserve(struct directory *base, const struct placement *p,
                                    directory_reserve_fn *cb, void *arg) MUST_CHECK;
/* What Redis answered to a placement. */
enum status directory_redis_read_placed(const struct directory_redis_call *c, enum status st,
                                        const redisReply *reply,
                                        struct directory_placed *out) MUST_CHECK;
enum status directory_redis_meter(struct directory *base, const struct meter_report *r,
                                  directory_meter_fn *cb, void *arg) MUST_CHECK;
/* Calls the asker of a report with what Redis answered. */
void directory_redis_deliver_sums(const struct directory_redis_call *c, enum status st,
                                  const redisReply *reply);

static inline void directory_redis_id_text(char out[DIRECTORY_REDIS_ID_TEXT], uint64_t id)
{
    snprintf(out, DIRECTORY_REDIS_ID_TEXT, DIRECTORY_ID, id);
}

static inline void directory_redis_number_text(char out[DIRECTORY_REDIS_NUMBER_TEXT], uint64_t v)
{
    snprintf(out, DIRECTORY_REDIS_NUMBER_TEXT, "%" PRIu64, v);
}

/* Returns the text of element i, or an empty one. */
static inline struct str directory_redis_text_at(const redisReply *list, size_t i)
{
    const redisReply *e = i < list->elements ? list->element[i] : NULL;
    if (!e || e->type != REDIS_REPLY_STRING) return STR("");
    return (struct str){ e->str, (size_t)e->len };
}

#endif
