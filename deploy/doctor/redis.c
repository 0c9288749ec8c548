/* redis.c - checks the Redis of --scheduler-name splitwise: reachable, fast enough, a master that
 * runs scripts and evicts nothing. Thread: main. */
#include <hiredis/hiredis.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "deploy/doctor/doctor.h"
#include "deploy/node/node_options.h"
#include "shared/base/clock.h"

enum { TIMEOUT_MS = 2000, N_PINGS = 20, VERSION_MIN = 6, SLOW_US = 5000 };

struct redis_check {
    struct doctor *d;
    redisContext *redis;
    char at[300]; /* host:port */
};

static struct doctor_line *add_failure(struct redis_check *p, const char *doing,
                                       const redisReply *r)
{
    const char *why = r && r->type == REDIS_REPLY_ERROR ? r->str
                      : p->redis->err                   ? p->redis->errstr
                                                        : "an answer that is not understood";
    return doctor_add(p->d, "Redis", DOCTOR_FAIL, "%s: %s: %s", p->at, doing, why);
}

static bool is_text(const redisReply *r)
{
    return r && (r->type == REDIS_REPLY_STRING || r->type == REDIS_REPLY_STATUS);
}

static bool log_in(struct redis_check *p)
{
    const char *password = config_string(p->d->c, "scheduler-password");
    int64_t db = config_int(p->d->c, "scheduler-db");
    redisReply *r = NULL;
    bool ok = true;
    if (password && *password) {
        r = redisCommand(p->redis, "AUTH %s", password);
        ok = is_text(r);
        if (!ok)
            doctor_fix(add_failure(p, "AUTH", r),
                       "check --scheduler-password (BATON_REDIS_PASSWORD)");
        freeReplyObject(r);
    }
    if (!ok) return false;
    r = redisCommand(p->redis, "SELECT %lld", (long long)db);
    ok = is_text(r);
    if (!ok) {
        bool password_wanted = r && r->type == REDIS_REPLY_ERROR &&
                               strncmp(r->str, "NOAUTH", 6) == 0;
        doctor_fix(add_failure(p, "SELECT", r),
                   password_wanted ? "give --scheduler-password (BATON_REDIS_PASSWORD)"
                                   : "choose another --scheduler-db");
    }
    freeReplyObject(r);
    return ok;
}

/* Finds the value of "name:value" in the text of INFO. */
static bool info_field(const char *info, const char *name, char *out, size_t cap)
{
    char key[64];
    snprintf(key, sizeof key, "\n%s:", name);
    const char *at = strstr(info, key);
    if (!at) return false;
    at += strlen(key);
    snprintf(out, cap, "%.*s", (int)strcspn(at, "\r\n"), at);
    return true;
}

static void check_info(struct redis_check *p)
{
    char version[32] = "?", role[32] = "?", policy[64] = "?", max[32] = "0";
    redisReply *r = redisCommand(p->redis, "INFO");
    if (!is_text(r)) {
        doctor_fix(add_failure(p, "INFO", r), "allow the user INFO, EVAL and EVALSHA");
        freeReplyObject(r);
        return;
    }
    info_field(r->str, "redis_version", version, sizeof version);
    info_field(r->str, "role", role, sizeof role);
    info_field(r->str, "maxmemory_policy", policy, sizeof policy);
    info_field(r->str, "maxmemory", max, sizeof max);
    freeReplyObject(r);
    struct doctor_line *line = doctor_add(p->d, "Redis", DOCTOR_OK, "%s: version %s, %s", p->at,
                                          version, role);
    if (strcmp(role, "master") != 0) {
        line->result = DOCTOR_FAIL;
        doctor_fix(
            line,
            "a replica refuses writes; give --scheduler-host and --scheduler-port of the master");
    } else if (atoi(version) < VERSION_MIN) {
        line->result = DOCTOR_WARN;
        doctor_fix(line, "tested with Redis 7; use %d or newer", VERSION_MIN);
    }
    bool evicts = strcmp(policy, "noeviction") != 0 && strcmp(max, "0") != 0;
    line = doctor_add(p->d, "Redis memory", evicts ? DOCTOR_WARN : DOCTOR_OK,
                      "maxmemory %s, policy %s", max, policy);
    if (evicts)
        doctor_fix(line, "nodes may be evicted from the view until they renew it: CONFIG SET "
                         "maxmemory-policy noeviction");
}

static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void check_latency(struct redis_check *p)
{
    uint64_t took_ns[N_PINGS];
    for (int i = 0; i < N_PINGS; i++) {
        uint64_t t0 = clock_ns();
        redisReply *r = redisCommand(p->redis, "EVAL %s 0", "return 1");
        took_ns[i] = clock_ns() - t0;
        bool ok = r && r->type == REDIS_REPLY_INTEGER && r->integer == 1;
        if (!ok)
            doctor_fix(add_failure(p, "EVAL", r),
                       "placing requests needs scripts: allow the user EVAL and EVALSHA");
        freeReplyObject(r);
        if (!ok) return;
    }
    qsort(took_ns, N_PINGS, sizeof took_ns[0], by_value);
    double median_us = (double)took_ns[N_PINGS / 2] / 1000,
           worst_us = (double)took_ns[N_PINGS - 1] / 1000;
    struct doctor_line *line = doctor_add(
        p->d, "Redis latency", median_us > SLOW_US ? DOCTOR_WARN : DOCTOR_OK,
        "a script takes %.0f us (median), %.0f us at worst", median_us, worst_us);
    if (median_us > SLOW_US)
        doctor_fix(line, "each request waits for one script; put Redis nearer to the nodes");
}

void doctor_check_redis(struct doctor *d)
{
    const char *host = config_string(d->c, "scheduler-host");
    if (!node_options_in_redis(d->c)) return;
    struct redis_check p = { .d = d };
    int port = (int)config_int(d->c, "scheduler-port");
    snprintf(p.at, sizeof p.at, "%s:%d", host, port);
    p.redis = redisConnectWithTimeout(host, port, (struct timeval){ .tv_sec = TIMEOUT_MS / 1000 });
    if (!p.redis || p.redis->err) {
        doctor_fix(doctor_add(d, "Redis", DOCTOR_FAIL, "%s: %s", p.at,
                              p.redis ? p.redis->errstr : "no memory"),
                   "start redis-server, or check --scheduler-host and --scheduler-port");
    } else {
        redisSetTimeout(p.redis, (struct timeval){ .tv_sec = TIMEOUT_MS / 1000 });
        if (log_in(&p)) {
            check_info(&p);
            check_latency(&p);
        }
    }
    if (p.redis) redisFree(p.redis);
}
