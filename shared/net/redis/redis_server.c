/* redis_server.c - see redis_server.h. Thread: any. */
#include "shared/net/redis/redis_server.h"

#include <stdio.h>
#include <string.h>

const char *redis_server_text(const struct redis_server *s, char out[REDIS_SERVER_TEXT_MAX])
{
    char at[HOST_PORT_TEXT_MAX];
    if (s->n_sentinels == 0) {
        snprintf(out, REDIS_SERVER_TEXT_MAX, "%.200s", host_port_text(s->host, s->port, at));
        return out;
    }
    size_t n = (size_t)snprintf(out, REDIS_SERVER_TEXT_MAX, "the master %.60s of the sentinels ",
                                s->master);
    for (size_t i = 0; i < s->n_sentinels; i++) {
        host_port_text(s->sentinels[i].host, s->sentinels[i].port, at);
        if (n + strlen(at) + sizeof ",..." > REDIS_SERVER_TEXT_MAX) {
            snprintf(out + n, REDIS_SERVER_TEXT_MAX - n, "...");
            break;
        }
        n += (size_t)snprintf(out + n, REDIS_SERVER_TEXT_MAX - n, "%s%s", at,
                              i + 1 < s->n_sentinels ? "," : "");
    }
    return out;
}
