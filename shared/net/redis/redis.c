/* redis.c - see redis.h: the connection. Commands are in redis_command.c.
 *
 *     DOWN ─timer─▶ LOOKING ─a sentinel names the master─▶ CONNECTING ─▶ HANDSHAKE ─▶ UP
 *       ▲  └─────────── no sentinels ───────────────────────▲                          │
 *       └──── redis_drop: error, deadline, refused handshake, a replica ◀──────────────┘
 *
 * The handshake is AUTH and SELECT where they are needed, ROLE, which must say master, and PING,
 * which fails while the server still loads its data. All of it is sent at once. The back-off is
 * 50 ms doubling to 2 s. Thread: loop. */
#include <string.h>
#include <unistd.h>

#include "shared/base/log.h"
#include "shared/base/rng.h"
#include "shared/base/thread.h"
#include "shared/net/redis/redis_answers.h"
#include "shared/net/redis/redis_conn.h"

enum { REDIS_BACKOFF_MIN_MS = 50, REDIS_BACKOFF_MAX_MS = 2000 };

static void redis_look(struct redis *r);

static void redis_on_retry(void *arg)
{
    struct redis *r = arg;
    loop_timer_free(r->retry);
    r->retry = NULL;
    redis_look(r);
}

void redis_unhold(struct redis *r)
{
    if (--r->n_holds > 0 || !r->freed) return;
    redis_scripts_release(r);
    sentinel_free(r->sentinel);
    tls_client_free(r->tls);
    arena_release(&r->arena);
    mem_free(r);
}

static void redis_retry_later(struct redis *r)
{
    uint32_t wait = r->backoff_ms;
    r->backoff_ms = wait * 2 < REDIS_BACKOFF_MAX_MS ? wait * 2 : REDIS_BACKOFF_MAX_MS;
    /* Up to a quarter less, so that many nodes do not reconnect at the same time. */
    wait -= (uint32_t)(rng_uniform((uintptr_t)r ^ (uint64_t)getpid(), 0, ++r->n_attempts) * wait /
                       4);
    if (!r->retry) r->retry = loop_timer_start(r->o.loop, wait, 0, redis_on_retry, r);
}

static void redis_disconnect(struct redis *r, enum status st)
{
    r->state = REDIS_DOWN;
    loop_timer_free(r->connect_deadline);
    r->connect_deadline = NULL;
    if (r->sentinel) sentinel_cancel(r->sentinel);
    redis_stream_close(r->stream);
    r->stream = NULL;
    redis_fail_commands(r, st);
}

/* Puts the server's address before the reason where only a sentinel knows it. */
static void redis_explain(const struct redis *r, const char *why, char out[ERR_TEXT_MAX])
{
    char at[HOST_PORT_TEXT_MAX], by[HOST_PORT_TEXT_MAX];
    if (!r->said_by.port) {
        snprintf(out, ERR_TEXT_MAX, "%s", why);
        return;
    }
    snprintf(out, ERR_TEXT_MAX, "%.72s, which the sentinel %.72s names as the master: %.300s",
             host_port_text(r->where.host, r->where.port, at),
             host_port_text(r->said_by.host, r->said_by.port, by), why);
}

/* Remembers the reason; returns whether it is new. Which sentinel named the server does not make
 * it one, since they take turns. */
static bool redis_note_reason(struct redis *r, const char *why)
{
    char key[sizeof r->reported];
    snprintf(key, sizeof key, "%u %.200s %u %s", r->said_by.port > 0, r->where.host, r->where.port,
             why);
    if (strcmp(r->reported, key) == 0) return false;
    memcpy(r->reported, key, sizeof key);
    return true;
}

void redis_drop(struct redis *r, enum redis_cause cause, const char *why)
{
    char reason[ERR_TEXT_MAX];
    redis_explain(r, why, reason); /* `why` may be part of the stream */
    r->n_holds++;
    bool is_new = redis_note_reason(r, why) || r->state == REDIS_UP;
    if (r->said_by.port) sentinel_reject(r->sentinel);
    r->said_by.port = 0;
    redis_disconnect(r, ERR_PEER_LOST);
    if (!r->freed && is_new) {
        r->cause = cause;
        log_debug("redis down", "why=\"%s\"", reason);
        if (r->o.on_down) r->o.on_down(r->o.arg, reason);
    }
    if (!r->freed) redis_retry_later(r);
    redis_unhold(r);
}

static void redis_on_connect_deadline(void *arg)
{
    struct redis *r = arg;
    if (redis_stream_in_handshake(r->stream))
        redis_drop(r, REDIS_CAUSE_TLS,
                   "no answer to the TLS handshake within the connect timeout; the server may not "
                   "speak TLS at this port");
    else redis_drop(r, REDIS_CAUSE_CONNECTION, "no answer within the connect timeout");
}

static enum redis_cause cause_of(enum status st)
{
    return st == ERR_PEER_REFUSED ? REDIS_CAUSE_TLS
           : st == ERR_FORMAT     ? REDIS_CAUSE_PROTOCOL
                                  : REDIS_CAUSE_CONNECTION;
}

/* A server with TLS hangs up on a client without. */
static void redis_on_lost(void *arg, enum status st, const char *why)
{
    struct redis *r = arg;
    char text[ERR_TEXT_MAX];
    if (r->state != REDIS_HANDSHAKE || r->i_step > 0 || r->tls || st != ERR_PEER_LOST) {
        redis_drop(r, cause_of(st), why);
        return;
    }
    snprintf(text, sizeof text, "%.200s, before any answer", why);
    redis_drop(r, REDIS_CAUSE_PROTOCOL, text);
}

/* ---- handshake ---- */

bool redis_is_no_permission(const redisReply *reply)
{
    return reply && reply->type == REDIS_REPLY_ERROR && strncmp(reply->str, "NOPERM", 6) == 0;
}

static enum redis_cause refusal_of(const redisReply *error, enum redis_step step)
{
    if (redis_is_no_permission(error)) return REDIS_CAUSE_PERMISSION;
    if (step == REDIS_STEP_AUTH || strncmp(error->str, "NOAUTH", 6) == 0)
        return REDIS_CAUSE_PASSWORD;
    return step == REDIS_STEP_ROLE ? REDIS_CAUSE_PERMISSION : REDIS_CAUSE_CONNECTION;
}

/* Returns whether it is a master; drops the connection otherwise. */
static bool redis_verify_role(struct redis *r, const redisReply *reply)
{
    enum redis_role role = REDIS_ROLE_MASTER;
    struct redis_address master;
    struct err err = { 0 };
    char text[ERR_TEXT_MAX], at[HOST_PORT_TEXT_MAX];
    if (redis_read_role(reply, &role, &master, &err) != OK) {
        redis_drop(r, REDIS_CAUSE_PROTOCOL, err.text);
        return false;
    }
    if (role == REDIS_ROLE_MASTER) return true;
    if (role == REDIS_ROLE_SENTINEL)
        snprintf(text, sizeof text, "it is a sentinel, not a Redis that holds data");
    else if (master.port)
        snprintf(text, sizeof text, "it is a replica, which takes no writes; its master is %.100s",
                 host_port_text(master.host, master.port, at));
    else snprintf(text, sizeof text, "it is a replica, which takes no writes, and names no master");
    redis_drop(r, REDIS_CAUSE_ROLE, text);
    return false;
}

static void redis_on_handshake(struct redis *r, const redisReply *reply)
{
    const enum redis_step step = r->steps[r->i_step];
    if (reply->type == REDIS_REPLY_ERROR) {
        redis_drop(r, refusal_of(reply, step), reply->str);
        return;
    }
    if (step == REDIS_STEP_ROLE && !redis_verify_role(r, reply)) return;
    if (++r->i_step < r->n_steps) return;
    loop_timer_free(r->connect_deadline);
    r->connect_deadline = NULL;
    r->state = REDIS_UP;
    r->cause = REDIS_CAUSE_NONE;
    r->reported[0] = 0;
    r->backoff_ms = REDIS_BACKOFF_MIN_MS;
    const char *tls = redis_tls_version(r);
    log_debug("redis up", "host=%s port=%u db=%d tls=%s", r->where.host, r->where.port,
              r->o.server.db, tls ? tls : "no");
    if (r->o.on_up) r->o.on_up(r->o.arg);
}

static void redis_on_reply(void *arg, const redisReply *reply)
{
    struct redis *r = arg;
    if (r->state == REDIS_HANDSHAKE) redis_on_handshake(r, reply);
    else redis_take_reply(r, reply);
}

static void redis_add_step(struct redis *r, struct buf *b, enum redis_step step, int argc,
                           const char *const *argv)
{
    r->steps[r->n_steps++] = step;
    redis_encode(b, argc, argv, NULL);
}

static void redis_on_open(void *arg)
{
    struct redis *r = arg;
    const struct redis_server *s = &r->o.server;
    struct buf b = { 0 };
    char db[16];
    snprintf(db, sizeof db, "%d", s->db);
    r->state = REDIS_HANDSHAKE;
    r->n_steps = r->i_step = 0;
    if (s->password && *s->password) {
        const bool named = s->username && *s->username;
        const char *const words[] = { "AUTH", named ? s->username : s->password, s->password };
        redis_add_step(r, &b, REDIS_STEP_AUTH, named ? 3 : 2, words);
    }
    if (s->db != 0) redis_add_step(r, &b, REDIS_STEP_SELECT, 2, (const char *[]){ "SELECT", db });
    redis_add_step(r, &b, REDIS_STEP_ROLE, 1, (const char *[]){ "ROLE" });
    redis_add_step(r, &b, REDIS_STEP_PING, 1, (const char *[]){ "PING" });
    redis_stream_write(r->stream, b.data, b.len);
    buf_release(&b);
}

/* ---- finding the server ---- */

static void redis_connect(struct redis *r)
{
    struct err err = { 0 };
    const struct redis_stream_options o = {
        .loop = r->o.loop,
        .host = r->where.host,
        .port = r->where.port,
        .tls = r->tls,
        .on_open = redis_on_open,
        .on_reply = redis_on_reply,
        .on_lost = redis_on_lost,
        .arg = r,
    };
    enum status st = redis_stream_open(&o, &r->stream, &err);
    if (st != OK) {
        redis_drop(r, cause_of(st), err.text);
        return;
    }
    r->state = REDIS_CONNECTING;
    r->connect_deadline = loop_timer_start(r->o.loop, r->o.timeout_ms, 0, redis_on_connect_deadline,
                                           r);
}

static void redis_on_sentinel(void *arg, enum status st, const struct sentinel_answer *a,
                              const char *why)
{
    struct redis *r = arg;
    if (st != OK) {
        redis_drop(r, st == ERR_UNAUTHORIZED ? REDIS_CAUSE_SENTINEL_PASSWORD : REDIS_CAUSE_SENTINEL,
                   why);
        return;
    }
    r->where = a->master;
    r->said_by = a->said_by;
    redis_connect(r);
}

static void redis_look(struct redis *r)
{
    if (!r->sentinel) {
        redis_connect(r);
        return;
    }
    r->state = REDIS_LOOKING;
    sentinel_ask(r->sentinel, redis_on_sentinel, r);
}

/* ---- life ---- */

static const char *redis_keep(struct redis *r, const char *text)
{
    return text ? arena_strndup(&r->arena, text, strlen(text)) : NULL;
}

static enum status check_server(const struct redis_server *s, struct err *err)
{
    const bool named = s->n_sentinels == 0;
    if (named && (!s->host || !s->host[0]))
        return err_field(err, ERR_CONFIG, "host",
                         "the address of the Redis server is empty; give host and port");
    if (named && strlen(s->host) >= HOST_TEXT_MAX)
        return err_field(err, ERR_CONFIG, "host", "the name of the Redis server is too long");
    if (named && s->port == 0)
        return err_field(err, ERR_CONFIG, "port",
                         "the port of the Redis server is 0; 6379 is the usual one");
    if (!named && (!s->master || !s->master[0]))
        return err_field(err, ERR_CONFIG, "master",
                         "the name of the master is empty; sentinels know it by its name, usually "
                         "mymaster");
    if (s->n_sentinels > REDIS_SENTINELS_MAX)
        return err_field(err, ERR_CONFIG, "sentinels", "%zu sentinels were given, at most %d",
                         s->n_sentinels, REDIS_SENTINELS_MAX);
    if (s->db < 0)
        return err_field(err, ERR_CONFIG, "db", "the Redis database number is %d; it is 0 or more",
                         s->db);
    if (s->username && s->username[0] && !(s->password && s->password[0]))
        return err_field(err, ERR_CONFIG, "username",
                         "the Redis user %.60s was given without a password", s->username);
    return OK;
}

/* Everything that the caller lent, copied. */
static void redis_copy_server(struct redis *r, const struct redis_server *s)
{
    struct redis_address *a = ARENA_ARRAY(&r->arena, struct redis_address, s->n_sentinels + 1);
    if (s->n_sentinels) memcpy(a, s->sentinels, s->n_sentinels * sizeof *a);
    r->o.server = *s;
    r->o.server.sentinels = a;
    r->o.server.host = redis_keep(r, s->host);
    r->o.server.master = redis_keep(r, s->master);
    r->o.server.username = redis_keep(r, s->username);
    r->o.server.password = redis_keep(r, s->password);
    r->o.server.sentinel_username = redis_keep(r, s->sentinel_username);
    r->o.server.sentinel_password = redis_keep(r, s->sentinel_password);
    r->o.server.tls_ca = r->o.server.tls_cert = r->o.server.tls_key = NULL; /* read by now */
    if (s->n_sentinels) return;
    snprintf(r->where.host, sizeof r->where.host, "%s", s->host);
    r->where.port = s->port;
}

static struct redis *redis_make(const struct redis_options *o, struct tls_client *tls)
{
    struct redis *r = MEM_NEW(struct redis);
    arena_init(&r->arena);
    r->o = *o;
    r->tls = tls;
    redis_copy_server(r, &o->server);
    if (r->o.timeout_ms == 0) r->o.timeout_ms = 2000;
    r->backoff_ms = REDIS_BACKOFF_MIN_MS;
    r->n_holds = 1;
    list_init(&r->commands);
    list_init(&r->sent);
    if (r->o.server.n_sentinels == 0) return r;
    const struct sentinel_options s = {
        .loop = o->loop,
        .server = &r->o.server,
        .tls = tls,
        .timeout_ms = r->o.timeout_ms,
    };
    r->sentinel = sentinel_create(&s);
    return r;
}

enum status redis_create(const struct redis_options *o, struct redis **out, struct err *err)
{
    struct tls_client *tls = NULL;
    ASSERT_THREAD(THREAD_LOOP);
    TRY(check_server(&o->server, err));
    const struct tls_client_options t = {
        .ca_file = o->server.tls_ca,
        .cert_file = o->server.tls_cert,
        .key_file = o->server.tls_key,
    };
    if (o->server.tls) TRY(tls_client_create(&t, &tls, err));
    struct redis *r = redis_make(o, tls);
    /* In the next turn, so that on_down is not called before the caller has its pointer. */
    r->retry = loop_timer_start(o->loop, 0, 0, redis_on_retry, r);
    *out = r;
    return OK;
}

void redis_free(struct redis *r)
{
    if (!r) return;
    ASSERT_THREAD(THREAD_LOOP);
    r->freed = true;
    loop_timer_free(r->retry);
    r->retry = NULL;
    redis_disconnect(r, ERR_CANCELED);
    loop_timer_free(r->command_deadline);
    r->command_deadline = NULL;
    redis_unhold(r);
}

bool redis_is_up(const struct redis *r) { return r->state == REDIS_UP; }

enum redis_cause redis_why_down(const struct redis *r) { return r->cause; }

const struct redis_address *redis_where(const struct redis *r)
{
    return r->where.port ? &r->where : NULL;
}

const char *redis_tls_version(const struct redis *r)
{
    return r->stream ? redis_stream_tls_version(r->stream) : NULL;
}
