/* config_redis.c - see config_redis.h. Thread: loop, at start. */
#include "deploy/options/config_redis.h"

#include <string.h>

static enum status read_host(const struct config *c, struct arena *arena, const char **out,
                             struct err *err)
{
    char host[HOST_TEXT_MAX];
    const char *text = config_string(c, "scheduler-host"), *colon = strrchr(text, ':');
    const size_t n_host = colon ? (size_t)(colon - text) : 0;
    /* An IPv6 address has colons of its own, and a port only after a bracket. */
    const bool has_port = n_host && colon[1] && !colon[1 + strspn(colon + 1, "0123456789")] &&
                          (strchr(text, ':') == colon || text[n_host - 1] == ']');
    if (!host_copy(text, host))
        return err_field(err, ERR_CONFIG, "scheduler-host",
                         "--scheduler-host is longer than %d characters", HOST_TEXT_MAX - 1);
    if (has_port)
        return err_field(err, ERR_CONFIG, "scheduler-host",
                         "--scheduler-host %s has a port, which goes in --scheduler-port: "
                         "--scheduler-host %.*s --scheduler-port %s",
                         text, (int)n_host, text, colon + 1);
    *out = arena_strndup(arena, host, strlen(host));
    return OK;
}

static enum status read_sentinels(const struct config *c, struct arena *arena,
                                  struct redis_server *out, struct err *err)
{
    size_t n = 0;
    config_list(c, "scheduler-sentinels", 0, &n);
    if (n > REDIS_SENTINELS_MAX)
        return err_field(err, ERR_CONFIG, "scheduler-sentinels",
                         "--scheduler-sentinels has %zu addresses, at most %d", n,
                         REDIS_SENTINELS_MAX);
    struct redis_address *list = ARENA_ARRAY(arena, struct redis_address, n + 1);
    for (size_t i = 0; i < n; i++) {
        const char *item = config_list(c, "scheduler-sentinels", i, NULL);
        if (!host_port_parse(item, list[i].host, &list[i].port) || !list[i].host[0] ||
            list[i].port == 0)
            return err_field(err, ERR_CONFIG, "scheduler-sentinels",
                             "--scheduler-sentinels: %.200s is not host:port (26379 is the usual "
                             "port; an IPv6 address stands in brackets)",
                             item);
    }
    out->sentinels = list;
    out->n_sentinels = n;
    out->master = config_string(c, "scheduler-master");
    if (n == 0 || out->master[0]) return OK;
    return err_field(err, ERR_CONFIG, "scheduler-master",
                     "--scheduler-master is empty; sentinels know a master by its name, usually "
                     "mymaster");
}

/* A name without what proves it. */
static enum status check_pair(const struct config *c, const char *name, const char *needs,
                              struct err *err)
{
    const char *given = config_string(c, name), *other = config_string(c, needs);
    if (!given || !*given || (other && *other)) return OK;
    return err_field(err, ERR_CONFIG, name, "--%s %.100s needs --%s", name, given, needs);
}

enum status config_redis(const struct config *c, struct arena *arena, struct redis_server *out,
                         struct err *err)
{
    *out = (struct redis_server){ 0 };
    TRY(read_host(c, arena, &out->host, err));
    TRY(read_sentinels(c, arena, out, err));
    TRY(check_pair(c, "scheduler-username", "scheduler-password", err));
    TRY(check_pair(c, "scheduler-sentinel-username", "scheduler-sentinel-password", err));
    TRY(check_pair(c, "scheduler-tls-cert", "scheduler-tls-key", err));
    TRY(check_pair(c, "scheduler-tls-key", "scheduler-tls-cert", err));
    out->port = (uint16_t)config_int(c, "scheduler-port");
    out->db = (int)config_int(c, "scheduler-db");
    out->username = config_string(c, "scheduler-username");
    out->password = config_string(c, "scheduler-password");
    out->sentinel_username = config_string(c, "scheduler-sentinel-username");
    out->sentinel_password = config_string(c, "scheduler-sentinel-password");
    out->tls = config_bool(c, "scheduler-tls");
    out->tls_ca = config_string(c, "scheduler-tls-ca");
    out->tls_cert = config_string(c, "scheduler-tls-cert");
    out->tls_key = config_string(c, "scheduler-tls-key");
    return OK;
}
