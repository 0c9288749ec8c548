/* redis_answers.c - see redis_answers.h. Thread: any. */
#include "shared/net/redis/redis_answers.h"

#include <string.h>

#include "shared/base/str.h"

static bool is_text(const redisReply *r)
{
    return r->type == REDIS_REPLY_STRING || r->type == REDIS_REPLY_STATUS;
}

/* A port comes as a number from ROLE, as text from a sentinel. */
static bool read_port(const redisReply *r, uint16_t *out)
{
    int64_t port = 0;
    if (r->type == REDIS_REPLY_INTEGER) port = r->integer;
    else if (!is_text(r) || str_to_i64((struct str){ r->str, (size_t)r->len }, &port) != OK)
        return false;
    if (port < 1 || port > UINT16_MAX) return false;
    *out = (uint16_t)port;
    return true;
}

/* A host may be a name, since Redis can be told to announce one. */
static bool read_address(const redisReply *host, const redisReply *port, struct redis_address *out)
{
    struct redis_address a = { 0 };
    if (!is_text(host) || host->len < 1 || (size_t)host->len >= sizeof a.host) return false;
    for (size_t i = 0; i < (size_t)host->len; i++)
        if ((unsigned char)host->str[i] <= ' ' || (unsigned char)host->str[i] > '~') return false;
    memcpy(a.host, host->str, (size_t)host->len);
    if (!read_port(port, &a.port)) return false;
    *out = a;
    return true;
}

enum status redis_read_role(const redisReply *reply, enum redis_role *out,
                            struct redis_address *master, struct err *err)
{
    static const struct {
        const char *name;
        enum redis_role role;
    } names[] = { { "master", REDIS_ROLE_MASTER },
                  { "slave", REDIS_ROLE_REPLICA },
                  { "replica", REDIS_ROLE_REPLICA },
                  { "sentinel", REDIS_ROLE_SENTINEL } };
    *master = (struct redis_address){ 0 };
    const bool has_name = reply->type == REDIS_REPLY_ARRAY && reply->elements > 0 &&
                          is_text(reply->element[0]);
    for (size_t i = 0; has_name && i < sizeof names / sizeof names[0]; i++) {
        if (strcmp(reply->element[0]->str, names[i].name) != 0) continue;
        *out = names[i].role;
        if (*out == REDIS_ROLE_REPLICA && reply->elements > 2)
            (void)read_address(reply->element[1], reply->element[2], master);
        return OK;
    }
    return err_set(err, ERR_FORMAT, "its answer to ROLE is not understood%s%.60s",
                   has_name ? ": " : "", has_name ? reply->element[0]->str : "");
}

enum status redis_read_master(const redisReply *reply, struct redis_address *out, struct err *err)
{
    if (reply->type == REDIS_REPLY_ERROR) return err_set(err, ERR_FORMAT, "%.100s", reply->str);
    if (reply->type == REDIS_REPLY_NIL)
        return err_set(err, ERR_NOT_FOUND, "it knows no master of that name");
    if (reply->type == REDIS_REPLY_ARRAY && reply->elements == 2 &&
        read_address(reply->element[0], reply->element[1], out))
        return OK;
    return err_set(err, ERR_FORMAT, "it answers with no address");
}
