/* redis_reader.c - see redis_reader.h. Thread: the owner's. */
#include "shared/net/redis/redis_reader.h"

static void *create_array(const redisReadTask *task, int n)
{
    struct redis_reader *r = task->privdata;
    r->too_many = n > REDIS_ELEMENTS_MAX;
    return r->too_many ? NULL : r->array_fn(task, n);
}

enum status redis_reader_init(struct redis_reader *r, struct err *err)
{
    *r = (struct redis_reader){ .hiredis = redisReaderCreate() };
    if (!r->hiredis) return err_set(err, ERR_NOMEM, "no memory to read the replies of Redis");
    r->fn = *r->hiredis->fn;
    r->array_fn = r->fn.createArray;
    r->fn.createArray = create_array;
    r->hiredis->fn = &r->fn;
    r->hiredis->privdata = r;
    return OK;
}

void redis_reader_release(struct redis_reader *r)
{
    if (r->hiredis) redisReaderFree(r->hiredis);
    r->hiredis = NULL;
}

static enum status reader_refuse(const struct redis_reader *r, struct err *err)
{
    if (r->too_many)
        return err_set(err, ERR_TOO_LONG, "an array of a reply has more than %d elements",
                       REDIS_ELEMENTS_MAX);
    return err_set(err, ERR_FORMAT, "what the server sends is not Redis' protocol: %s",
                   r->hiredis->errstr);
}

enum status redis_reader_feed(struct redis_reader *r, const char *bytes, size_t n, struct err *err)
{
    r->n_unparsed += n;
    if (redisReaderFeed(r->hiredis, bytes, n) == REDIS_OK) return OK;
    return reader_refuse(r, err);
}

enum status redis_reader_next(struct redis_reader *r, redisReply **out, struct err *err)
{
    void *reply = NULL;
    if (redisReaderGetReply(r->hiredis, &reply) != REDIS_OK) return reader_refuse(r, err);
    if (reply) r->n_unparsed = r->hiredis->len - r->hiredis->pos;
    else if (r->n_unparsed > REDIS_REPLY_MAX)
        return err_set(err, ERR_TOO_LONG, "a reply is longer than %d MiB", REDIS_REPLY_MAX >> 20);
    *out = reply;
    return OK;
}
