/* redis.c - checks the Redis of --scheduler-name splitwise with the client that a node has: every
 * sentinel, TLS, the user, a master that runs the directory's scripts, is fast enough and evicts
 * nothing. Thread: main, which runs a loop of its own. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "deploy/doctor/doctor.h"
#include "deploy/node/node_options.h"
#include "deploy/options/config_redis.h"
#include "scheduler/directory/redis/redis_advice.h"
#include "shared/base/clock.h"
#include "shared/net/redis/sentinel.h"

enum { TIMEOUT_MS = 2000, N_PINGS = 20, VERSION_MIN = 6, SLOW_US = 5000 };

struct redis_check {
    struct doctor *d;
    struct arena arena;
    struct redis_server server;
    char at[REDIS_SERVER_TEXT_MAX];
    struct loop *loop;
    struct redis *redis;
    bool up, down, answered, out_of_time;
    char why[ERR_TEXT_MAX];
    /* of the last command */
    enum status st;
    int type;
    struct buf text;
    /* of the last sentinel, and of the first that named a master */
    struct sentinel_answer said, first;
    size_t n_nodes;
};

/* ---- the loop, until something has happened ---- */

static void on_time(void *arg) { ((struct redis_check *)arg)->out_of_time = true; }

static bool wait_for(struct redis_check *p, const bool *done, uint64_t ms)
{
    struct loop_timer *t = loop_timer_start(p->loop, ms, 0, on_time, p);
    p->out_of_time = false;
    while (!*done && !p->out_of_time) uv_run(loop_uv(p->loop), UV_RUN_ONCE);
    loop_timer_free(t);
    return *done;
}

static void on_up(void *arg) { ((struct redis_check *)arg)->up = true; }

/* With sentinels the next attempt may find the master. */
static void on_down(void *arg, const char *why)
{
    struct redis_check *p = arg;
    p->up = false;
    p->down = p->server.n_sentinels == 0;
    snprintf(p->why, sizeof p->why, "%s", why);
}

static void on_reply(void *arg, enum status st, const redisReply *reply)
{
    struct redis_check *p = arg;
    p->answered = true;
    p->st = st;
    p->type = reply ? reply->type : REDIS_REPLY_NIL;
    buf_clear(&p->text);
    if (reply && reply->str) buf_add(&p->text, reply->str, (size_t)reply->len);
    else buf_add_c(&p->text, st == OK ? "" : status_text(st));
}

/* Runs one command; p->text is the answer or the reason. Returns whether it succeeded. */
static bool run(struct redis_check *p, int argc, const char **argv)
{
    p->answered = false;
    p->st = redis_command(p->redis, on_reply, p, argc, argv, NULL);
    if (p->st != OK) {
        buf_clear(&p->text);
        buf_add_c(&p->text, p->why[0] ? p->why : status_text(p->st));
        return false;
    }
    return wait_for(p, &p->answered, TIMEOUT_MS + 500) && p->st == OK;
}

/* ---- sentinels ---- */

static void on_sentinel(void *arg, enum status st, const struct sentinel_answer *a, const char *why)
{
    struct redis_check *p = arg;
    p->answered = true;
    p->st = st;
    if (a) p->said = *a;
    else snprintf(p->why, sizeof p->why, "%s", why);
}

static void report_sentinel(struct redis_check *p, const char *at)
{
    char is_at[HOST_PORT_TEXT_MAX];
    if (p->st != OK) {
        doctor_fix(doctor_add(p->d, "Redis sentinel", DOCTOR_WARN, "%s", p->why), "%s",
                   directory_redis_advice(p->st == ERR_UNAUTHORIZED ? REDIS_CAUSE_SENTINEL_PASSWORD
                                                                    : REDIS_CAUSE_SENTINEL));
        return;
    }
    struct doctor_line *line = doctor_add(
        p->d, "Redis sentinel", DOCTOR_OK, "%s: the master %s is %s", at, p->server.master,
        host_port_text(p->said.master.host, p->said.master.port, is_at));
    if (!p->first.master.port) p->first = p->said;
    if (p->first.master.port == p->said.master.port &&
        strcmp(p->first.master.host, p->said.master.host) == 0)
        return;
    line->result = DOCTOR_WARN;
    doctor_fix(line, "another sentinel names another master: a failover is going on, or they do "
                     "not reach each other");
}

/* One that does not answer is a warning: the others are asked. */
static void check_sentinels(struct redis_check *p, struct tls_client *tls)
{
    char at[HOST_PORT_TEXT_MAX];
    for (size_t i = 0; i < p->server.n_sentinels; i++) {
        struct redis_server one = p->server;
        one.sentinels = &p->server.sentinels[i];
        one.n_sentinels = 1;
        const struct sentinel_options o = {
            .loop = p->loop, .server = &one, .tls = tls, .timeout_ms = TIMEOUT_MS
        };
        struct sentinel *s = sentinel_create(&o);
        p->answered = false;
        sentinel_ask(s, on_sentinel, p);
        (void)wait_for(p, &p->answered, TIMEOUT_MS + 500);
        sentinel_free(s);
        report_sentinel(p, host_port_text(one.sentinels->host, one.sentinels->port, at));
    }
    p->why[0] = 0;
}

/* ---- the server ---- */

/* Finds the value of "name:value" in the text of INFO. */
static void info_field(const char *info, const char *name, char *out, size_t cap)
{
    char key[64];
    snprintf(key, sizeof key, "\n%s:", name);
    const char *at = strstr(info, key);
    if (!at) return;
    at += strlen(key);
    snprintf(out, cap, "%.*s", (int)strcspn(at, "\r\n"), at);
}

static void check_memory(struct redis_check *p)
{
    char policy[64] = "?", max[32] = "0";
    info_field(p->text.data, "maxmemory_policy", policy, sizeof policy);
    info_field(p->text.data, "maxmemory", max, sizeof max);
    bool evicts = strcmp(policy, "noeviction") != 0 && strcmp(max, "0") != 0;
    struct doctor_line *line = doctor_add(p->d, "Redis memory", evicts ? DOCTOR_WARN : DOCTOR_OK,
                                          "maxmemory %s, policy %s", max, policy);
    if (evicts)
        doctor_fix(line, "nodes may be evicted from the view until they renew it: CONFIG SET "
                         "maxmemory-policy noeviction");
}

/* The role was verified by the client. A user without INFO does for a node. */
static void check_info(struct redis_check *p)
{
    char version[32] = "?", at[HOST_PORT_TEXT_MAX];
    const struct redis_address *where = redis_where(p->redis);
    const bool known = run(p, 1, (const char *[]){ "INFO" }) && p->text.len;
    if (known) info_field(p->text.data, "redis_version", version, sizeof version);
    struct doctor_line *line = doctor_add(
        p->d, "Redis", DOCTOR_OK, "%s: version %s, master, user %s",
        host_port_text(where->host, where->port, at), version,
        p->server.username && *p->server.username ? p->server.username : "default");
    if (!known) {
        line->result = DOCTOR_WARN;
        doctor_fix(line,
                   "its version and memory policy are not known, since the user may not use "
                   "INFO (%.200s)",
                   p->text.data);
        return;
    }
    if (atoi(version) < VERSION_MIN) {
        line->result = DOCTOR_WARN;
        doctor_fix(line, "tested with Redis 7; use %d or newer", VERSION_MIN);
    }
    check_memory(p);
}

static void check_tls(struct redis_check *p)
{
    const char *version = redis_tls_version(p->redis), *ca = p->server.tls_ca;
    const struct redis_address *where = redis_where(p->redis);
    if (version) {
        doctor_add(p->d, "Redis TLS", DOCTOR_OK, "%s; the certificate is for %s, by %s", version,
                   where->host, ca && *ca ? ca : "a CA that this host trusts");
        return;
    }
    if (host_is_loopback(where->host) || strcmp(where->host, "localhost") == 0) return;
    doctor_fix(doctor_add(p->d, "Redis TLS", DOCTOR_WARN,
                          "off: passwords and records cross the network in the clear"),
               "give Redis a certificate (tls-port) and the nodes --scheduler-tls");
}

static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* Returns whether scripts run at all. */
static bool check_latency(struct redis_check *p)
{
    uint64_t took_ns[N_PINGS];
    const char *eval[] = { "EVAL", "return 1", "0" };
    for (int i = 0; i < N_PINGS; i++) {
        uint64_t t0 = clock_ns();
        const bool ok = run(p, 3, eval) && p->type == REDIS_REPLY_INTEGER;
        took_ns[i] = clock_ns() - t0;
        if (ok) continue;
        doctor_fix(doctor_add(p->d, "Redis", DOCTOR_FAIL, "%s: EVAL: %s", p->at, p->text.data),
                   "placing requests needs scripts: %s",
                   directory_redis_advice(REDIS_CAUSE_PERMISSION));
        return false;
    }
    qsort(took_ns, N_PINGS, sizeof took_ns[0], by_value);
    double median_us = (double)took_ns[N_PINGS / 2] / 1000,
           worst_us = (double)took_ns[N_PINGS - 1] / 1000;
    struct doctor_line *line = doctor_add(
        p->d, "Redis latency", median_us > SLOW_US ? DOCTOR_WARN : DOCTOR_OK,
        "a script takes %.0f us (median), %.0f us at worst", median_us, worst_us);
    if (median_us > SLOW_US)
        doctor_fix(line, "each request waits for one script; put Redis nearer to the nodes");
    return true;
}

/* ---- the directory ---- */

static void on_snapshot(void *arg, enum status st, const struct directory_snapshot *s)
{
    struct redis_check *p = arg;
    p->answered = true;
    p->st = st;
    if (st == OK) p->n_nodes = s->n;
}

static enum status ask_directory(struct redis_check *p, struct directory **dir, struct err *err)
{
    const struct directory_options o = {
        .loop = p->loop,
        .topic = config_string(p->d->c, "scheduler-topic"),
        .redis = p->server,
        .on_up = on_up,
        .on_down = on_down,
        .arg = p,
    };
    TRY(directory_open("redis", &o, dir, err));
    p->up = p->down = p->answered = false;
    if (wait_for(p, &p->up, TIMEOUT_MS) && directory_snapshot(*dir, on_snapshot, p) == OK)
        (void)wait_for(p, &p->answered, TIMEOUT_MS);
    const char *why = directory_why_down(*dir);
    if (p->answered && p->st == OK) return OK;
    return err_set(err, ERR_UNAVAILABLE, "%s", why ? why : "it does not answer in time");
}

/* Asks for the nodes of the topic as a node would: with the real script and on the real keys. */
static void check_directory(struct redis_check *p)
{
    struct directory *dir = NULL;
    struct err err = { 0 };
    const char *topic = config_string(p->d->c, "scheduler-topic");
    if (ask_directory(p, &dir, &err) == OK)
        doctor_add(p->d, "cluster view", DOCTOR_OK, "in Redis; topic %s has %zu nodes now", topic,
                   p->n_nodes);
    else
        doctor_fix(doctor_add(p->d, "cluster view", DOCTOR_FAIL, "%s", err.text), "%s",
                   directory_redis_advice(REDIS_CAUSE_PERMISSION));
    directory_close(dir);
}

/* ---- all of it ---- */

static void report_down(struct redis_check *p)
{
    const enum redis_cause cause = redis_why_down(p->redis);
    const char *advice = directory_redis_advice(cause);
    doctor_fix(doctor_add(p->d, "Redis", DOCTOR_FAIL, "%s: %s", p->at,
                          p->why[0] ? p->why : "no answer in time"),
               "%s",
               advice[0]               ? advice
               : p->server.n_sentinels ? "start redis-server, and see what the sentinels say of it"
                                       : "start redis-server, or check --scheduler-host and "
                                         "--scheduler-port");
}

static void check_server(struct redis_check *p)
{
    const struct redis_options o = {
        .loop = p->loop,
        .server = p->server,
        .timeout_ms = TIMEOUT_MS,
        .on_up = on_up,
        .on_down = on_down,
        .arg = p,
    };
    struct err err = { 0 };
    if (redis_create(&o, &p->redis, &err) != OK) {
        doctor_add(p->d, "Redis", DOCTOR_FAIL, "%s", err.text);
        return;
    }
    for (uint64_t end = clock_ms() + 2 * TIMEOUT_MS; !p->up && !p->down && clock_ms() < end;)
        (void)wait_for(p, &p->up, 20);
    if (p->up) {
        check_info(p);
        check_tls(p);
        if (check_latency(p)) check_directory(p);
    } else {
        report_down(p);
    }
    redis_free(p->redis);
}

static void check_all(struct redis_check *p)
{
    struct tls_client *tls = NULL;
    struct err err = { 0 };
    const struct tls_client_options t = { .ca_file = p->server.tls_ca,
                                          .cert_file = p->server.tls_cert,
                                          .key_file = p->server.tls_key };
    redis_server_text(&p->server, p->at);
    if (p->server.tls && tls_client_create(&t, &tls, &err) != OK) {
        doctor_fix(doctor_add(p->d, "Redis TLS", DOCTOR_FAIL, "%s", err.text),
                   "check --scheduler-tls-%s", err.field);
        return;
    }
    check_sentinels(p, tls);
    check_server(p);
    tls_client_free(tls);
}

void doctor_check_redis(struct doctor *d)
{
    struct redis_check p = { .d = d };
    struct err err = { 0 };
    if (!node_options_in_redis(d->c)) return;
    arena_init(&p.arena);
    if (config_redis(d->c, &p.arena, &p.server, &err) != OK || loop_create(&p.loop, &err) != OK)
        doctor_add(d, "Redis", DOCTOR_FAIL, "%s", err.text);
    else check_all(&p);
    loop_free(p.loop);
    buf_release(&p.text);
    arena_release(&p.arena);
}
