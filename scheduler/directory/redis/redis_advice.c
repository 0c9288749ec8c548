/* redis_advice.c - see redis_advice.h. Thread: any. */
#include "scheduler/directory/redis/redis_advice.h"

#include <stdio.h>

#include "shared/base/assert.h"

const char *directory_redis_advice(enum redis_cause cause)
{
    switch (cause) {
    case REDIS_CAUSE_NONE:
    case REDIS_CAUSE_CONNECTION: return "";
    case REDIS_CAUSE_TLS:
        return "check --scheduler-tls-ca, and that its certificate is for the name or address "
               "under which it is called";
    case REDIS_CAUSE_PROTOCOL:
        return "check host and port; a Redis that speaks TLS wants --scheduler-tls";
    case REDIS_CAUSE_PASSWORD:
        return "give the right one with --scheduler-password or BATON_REDIS_PASSWORD, and the user "
               "with --scheduler-username";
    case REDIS_CAUSE_PERMISSION:
        return "give the user of --scheduler-username the rights that docs/security.md lists";
    case REDIS_CAUSE_ROLE:
        return "name the master with --scheduler-host and --scheduler-port, or the sentinels that "
               "know it with --scheduler-sentinels";
    case REDIS_CAUSE_SENTINEL: return "check --scheduler-sentinels and --scheduler-master";
    case REDIS_CAUSE_SENTINEL_PASSWORD:
        return "give the sentinels' own password with --scheduler-sentinel-password or "
               "BATON_SENTINEL_PASSWORD";
    }
    ASSERT(false); /* every cause is above */
    return "";
}

/* Appends the sentinels as the option takes them, as many as there is room for. */
static size_t add_sentinels(const struct redis_server *s, char *out, size_t cap)
{
    char at[HOST_PORT_TEXT_MAX];
    size_t n = (size_t)snprintf(out, cap, "--scheduler-sentinels ");
    for (size_t i = 0; i < s->n_sentinels; i++) {
        host_port_text(s->sentinels[i].host, s->sentinels[i].port, at);
        const int more = snprintf(out + n, cap - n, "%s%s", i ? "," : "", at);
        if ((size_t)more >= cap - n) {
            out[n] = 0; /* this one does not fit; the others are enough */
            break;
        }
        n += (size_t)more;
    }
    return n;
}

const char *directory_redis_flags(const struct redis_server *s, char out[DIRECTORY_REDIS_FLAGS_MAX])
{
    enum { MASTER_ROOM = 64 };
    const size_t cap = DIRECTORY_REDIS_FLAGS_MAX;
    size_t n;
    if (s->n_sentinels) {
        n = add_sentinels(s, out, cap - MASTER_ROOM);
        n += (size_t)snprintf(out + n, cap - n, " --scheduler-master %.20s", s->master);
    } else {
        n = (size_t)snprintf(out, cap, "--scheduler-host %.64s --scheduler-port %u", s->host,
                             s->port);
    }
    if (s->tls && n < cap) n += (size_t)snprintf(out + n, cap - n, " --scheduler-tls");
    if (s->username && *s->username && n < cap)
        snprintf(out + n, cap - n, " --scheduler-username %.40s", s->username);
    return out;
}
