/* fuzz_redis_reply.c - arbitrary bytes as what a server says where Redis or a sentinel should be.
 *
 * The first byte chooses the size of the pieces. The other bytes are read once whole and once in
 * pieces, with the same replies; each reply is taken as an answer to ROLE and as an answer of a
 * sentinel, whose hosts hold printable characters only and whose ports are no zero. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "shared/base/hash/hash.h"
#include "shared/base/str.h"
#include "shared/net/redis/redis_answers.h"
#include "shared/net/redis/redis_reader.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct reading {
    enum status st;
    size_t n_replies;
    uint64_t hash;
};

static void check_address(const struct redis_address *a)
{
    size_t n = strnlen(a->host, sizeof a->host);
    if (n == 0 || n == sizeof a->host || a->port == 0) abort();
    for (size_t i = 0; i < n; i++)
        if (a->host[i] <= ' ' || a->host[i] > '~') abort();
}

static void check_reply(const redisReply *reply)
{
    enum redis_role role;
    struct redis_address a;
    struct err err;
    enum status st = redis_read_role(reply, &role, &a, &err);
    if (st == OK && role > REDIS_ROLE_SENTINEL) abort();
    if (st == OK && a.port) check_address(&a);
    if (st == OK && a.port && role != REDIS_ROLE_REPLICA) abort();
    if (redis_read_master(reply, &a, &err) == OK) check_address(&a);
}

/* Replies are at most as deep as hiredis reads them: 7 arrays in each other. */
static uint64_t hash_reply(const redisReply *r, uint64_t seed)
{
    const int64_t head[3] = { r->type, r->type == REDIS_REPLY_INTEGER ? r->integer : 0,
                              r->type == REDIS_REPLY_ARRAY ? (int64_t)r->elements : 0 };
    uint64_t h = hash_64(head, sizeof head, seed);
    if (r->str) h = hash_64(r->str, (size_t)r->len, h);
    for (size_t i = 0; r->type == REDIS_REPLY_ARRAY && i < r->elements; i++)
        h = hash_reply(r->element[i], h);
    return h;
}

static struct reading read_all(const uint8_t *data, size_t size, size_t piece)
{
    struct reading out = { 0 };
    struct redis_reader r;
    struct err err;
    if (redis_reader_init(&r, &err) != OK) abort();
    for (size_t at = 0; at < size && out.st == OK; at += piece) {
        redisReply *reply = NULL;
        out.st = redis_reader_feed(&r, (const char *)data + at,
                                   size - at < piece ? size - at : piece, &err);
        while (out.st == OK && (out.st = redis_reader_next(&r, &reply, &err)) == OK && reply) {
            check_reply(reply);
            out.hash = hash_reply(reply, out.hash);
            out.n_replies++;
            freeReplyObject(reply);
        }
    }
    redis_reader_release(&r);
    return out;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 1) return 0;
    struct reading whole = read_all(data + 1, size - 1, size),
                   pieces = read_all(data + 1, size - 1, 1u + data[0] % 64);
    if (whole.st != pieces.st || whole.n_replies != pieces.n_replies || whole.hash != pieces.hash)
        abort();
    return 0;
}
