/* redis.c - see redis.h: the connection. Commands are in redis_command.c.
 *
 *     DOWN ─timer─▶ RESOLVING ─address─▶ CONNECTING ─▶ HANDSHAKE ─AUTH, SELECT, PING answered─▶ UP
 *       ▲                                                                                        │
 *       └──── redis_drop: error, deadline, refused handshake (back-off 50 ms doubling to 2 s) ◀──┘
 *
 * hiredis would block to resolve a name, so libuv resolves it first. When a connection fails,
 * hiredis frees its context and runs the callbacks of its commands. So ac->data is cleared before
 * the context is given up, and a command that was already answered (cb NULL) only frees itself.
 * Thread: loop. */
#include "shared/net/redis/redis_conn.h"

#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/base/rng.h"
#include "shared/base/thread.h"

enum {
    REDIS_BACKOFF_MIN_MS = 50,
    REDIS_BACKOFF_MAX_MS = 2000,
    REDIS_REPLY_MAX = 8 << 20,
    REDIS_READ_BYTES = 16384,
    REDIS_ELEMENTS_MAX = 1 << 20
};

/* Polls the socket of one context. hiredis' own libuv adapter ignores a failed poll, so that a
 * refused connection is never reported; this one lets hiredis find the error by reading or
 * writing. */
struct redis_poll {
    uv_poll_t uv;          /* first: the close callback frees through it */
    redisAsyncContext *ac; /* NULL once hiredis has given up the context */
    int events;
};

struct redis_resolve {
    uv_getaddrinfo_t uv; /* first */
    struct redis *r;     /* NULL: given up */
};

static void redis_connect(struct redis *r);

static void poll_on_event(uv_poll_t *uv, int status, int events)
{
    struct redis_poll *p = (struct redis_poll *)uv;
    if (status != 0) events = p->events;
    struct redis *r = p->ac ? p->ac->data : NULL;
    if (p->ac && (events & (UV_READABLE | UV_DISCONNECT))) {
        int n = 0;
        if (r && ioctl(p->ac->c.fd, FIONREAD, &n) == 0 && n > 0)
            r->n_unparsed += (size_t)(n < REDIS_READ_BYTES ? n : REDIS_READ_BYTES);
        if (r && r->n_unparsed > REDIS_REPLY_MAX) {
            redis_drop(r, "a reply is longer than 8 MiB");
            return;
        }
        redisAsyncHandleRead(p->ac);
    }
    if (p->ac && (events & UV_WRITABLE)) redisAsyncHandleWrite(p->ac);
    /* libuv stops a poll that failed. Normally hiredis has given up the context by now. */
    r = p->ac ? p->ac->data : NULL;
    if (status != 0 && r) redis_drop(r, uv_strerror(status));
}

static void poll_set(struct redis_poll *p, int events)
{
    p->events = events;
    if (events) uv_poll_start(&p->uv, events, poll_on_event);
    else uv_poll_stop(&p->uv);
}

static void poll_add_read(void *arg)
{
    poll_set(arg, ((struct redis_poll *)arg)->events | UV_READABLE);
}
static void poll_del_read(void *arg)
{
    poll_set(arg, ((struct redis_poll *)arg)->events & ~UV_READABLE);
}
static void poll_add_write(void *arg)
{
    poll_set(arg, ((struct redis_poll *)arg)->events | UV_WRITABLE);
}
static void poll_del_write(void *arg)
{
    poll_set(arg, ((struct redis_poll *)arg)->events & ~UV_WRITABLE);
}

static void poll_on_closed(uv_handle_t *h) { mem_free(h); }

static void poll_cleanup(void *arg)
{
    struct redis_poll *p = arg;
    p->ac = NULL;
    uv_close((uv_handle_t *)&p->uv, poll_on_closed);
}

static bool poll_attach(struct redis *r, redisAsyncContext *ac)
{
    struct redis_poll *p = MEM_NEW(struct redis_poll);
    if (uv_poll_init(loop_uv(r->o.loop), &p->uv, ac->c.fd) != 0) {
        mem_free(p);
        return false;
    }
    p->ac = ac;
    ac->ev.data = p;
    ac->ev.addRead = poll_add_read;
    ac->ev.delRead = poll_del_read;
    ac->ev.addWrite = poll_add_write;
    ac->ev.delWrite = poll_del_write;
    ac->ev.cleanup = poll_cleanup;
    return true;
}

/* Limits arrays: an element count of a few bytes could cause a large allocation. */
static void *redis_create_array(const redisReadTask *t, int n)
{
    const struct redis *r = t->privdata;
    if (n > REDIS_ELEMENTS_MAX) return NULL;
    return r->array_fn(t, n);
}

static void redis_bound_replies(struct redis *r, redisReader *reader)
{
    r->reader_fn_own = reader->fn;
    r->reader_fn = *reader->fn;
    r->array_fn = r->reader_fn.createArray;
    r->reader_fn.createArray = redis_create_array;
    reader->fn = &r->reader_fn;
    reader->privdata = r;
}

/* hiredis uses its context and reader for a moment longer, when r may be gone. */
static void redis_detach(struct redis *r, redisAsyncContext *ac)
{
    ac->data = NULL;
    ac->c.reader->fn = r->reader_fn_own;
    ac->c.reader->privdata = NULL;
}

static void redis_on_retry(void *arg)
{
    struct redis *r = arg;
    loop_timer_free(r->retry);
    r->retry = NULL;
    redis_connect(r);
}

void redis_unhold(struct redis *r)
{
    if (--r->n_holds > 0 || !r->freed) return;
    redis_scripts_release(r);
    mem_free(r->host);
    mem_free(r->password);
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

/* Gives up the connection. Safe inside hiredis' callbacks, where the context is freed a little
 * later. */
static void redis_disconnect(struct redis *r, enum status st)
{
    redisAsyncContext *ac = r->ac;
    r->ac = NULL;
    r->state = REDIS_DOWN;
    loop_timer_free(r->connect_deadline);
    r->connect_deadline = NULL;
    if (r->resolve) {
        r->resolve->r = NULL;
        uv_cancel((uv_req_t *)&r->resolve->uv);
        r->resolve = NULL;
    }
    redis_fail_commands(r, st);
    if (!ac) return;
    redis_detach(r, ac);
    redisAsyncFree(ac);
}

void redis_drop(struct redis *r, const char *why)
{
    char reason[sizeof r->reported];
    snprintf(reason, sizeof reason, "%s", why); /* `why` may be part of the context */
    r->n_holds++;
    bool was_up = r->state == REDIS_UP;
    redis_disconnect(r, ERR_PEER_LOST);
    if (!r->freed && (was_up || strcmp(r->reported, reason) != 0)) {
        snprintf(r->reported, sizeof r->reported, "%s", reason);
        log_debug("redis down", "host=%s port=%u why=\"%s\"", r->host, r->o.port, reason);
        if (r->o.on_down) r->o.on_down(r->o.arg, reason);
    }
    if (!r->freed) redis_retry_later(r);
    redis_unhold(r);
}

static void redis_on_connect_deadline(void *arg)
{
    redis_drop(arg, "no answer within the connect timeout");
}

/* hiredis frees the context after the callback that calls this. */
static void redis_lost(struct redis *r, const char *why)
{
    redisAsyncContext *ac = r->ac;
    r->ac = NULL;
    redis_detach(r, ac);
    redis_drop(r, ac->errstr && ac->errstr[0] ? ac->errstr : why);
}

static void redis_on_disconnect(const redisAsyncContext *ac, int status)
{
    struct redis *r = ac->data;
    (void)status;
    if (r && r->ac == ac) redis_lost(r, "the server closed the connection");
}

/* Called for the answers to AUTH, SELECT and PING; after the last one the connection is up. */
static void redis_on_handshake(redisAsyncContext *ac, void *reply, void *arg)
{
    struct redis *r = ac->data;
    const redisReply *a = reply;
    (void)arg;
    if (!r || r->ac != ac || !a) return; /* redis_on_disconnect reports a loss */
    r->n_unparsed = 0;
    if (a->type == REDIS_REPLY_ERROR) {
        redis_drop(r, a->str);
        return;
    }
    if (--r->n_handshakes > 0) return;
    loop_timer_free(r->connect_deadline);
    r->connect_deadline = NULL;
    r->state = REDIS_UP;
    r->reported[0] = 0;
    r->backoff_ms = REDIS_BACKOFF_MIN_MS;
    log_debug("redis up", "host=%s port=%u db=%d", r->host, r->o.port, r->o.db);
    if (r->o.on_up) r->o.on_up(r->o.arg);
}

static bool redis_handshake(struct redis *r, int argc, const char **argv)
{
    r->n_handshakes++;
    return redisAsyncCommandArgv(r->ac, redis_on_handshake, NULL, argc, argv, NULL) == REDIS_OK;
}

static void redis_on_connect(const redisAsyncContext *ac, int status)
{
    struct redis *r = ac->data;
    if (!r || r->ac != ac) return;
    if (status != REDIS_OK) {
        redis_lost(r, "cannot connect");
        return;
    }
    char db[16];
    snprintf(db, sizeof db, "%d", r->o.db);
    r->state = REDIS_HANDSHAKE;
    r->n_handshakes = 0;
    bool ok = true;
    if (r->password[0]) ok = redis_handshake(r, 2, (const char *[]){ "AUTH", r->password });
    if (r->o.db != 0) ok = ok && redis_handshake(r, 2, (const char *[]){ "SELECT", db });
    /* PING fails while the server still loads its data. */
    ok = ok && redis_handshake(r, 1, (const char *[]){ "PING" });
    /* hiredis does not allow its context to be freed here; the connect deadline does it. */
    if (!ok) log_warn("redis handshake not sent", "host=%s port=%u", r->host, r->o.port);
}

static void redis_connect_to(struct redis *r, const char *ip)
{
    redisAsyncContext *ac = redisAsyncConnect(ip, r->o.port);
    if (!ac || ac->err || !poll_attach(r, ac)) {
        char why[160];
        snprintf(why, sizeof why, "%s", ac && ac->err ? ac->errstr : "no memory for a connection");
        if (ac) redisAsyncFree(ac);
        redis_drop(r, why);
        return;
    }
    ac->data = r;
    r->ac = ac;
    r->state = REDIS_CONNECTING;
    r->n_unparsed = 0;
    redis_bound_replies(r, ac->c.reader);
    redisAsyncSetDisconnectCallback(ac, redis_on_disconnect);
    redisAsyncSetConnectCallback(ac, redis_on_connect); /* starts to poll */
}

static void redis_on_resolved(uv_getaddrinfo_t *uv, int rc, struct addrinfo *list)
{
    struct redis_resolve *q = (struct redis_resolve *)uv;
    struct redis *r = q->r;
    char ip[64] = "";
    if (rc == 0 && list->ai_family == AF_INET)
        uv_ip4_name((const struct sockaddr_in *)list->ai_addr, ip, sizeof ip);
    else if (rc == 0) uv_ip6_name((const struct sockaddr_in6 *)list->ai_addr, ip, sizeof ip);
    if (list) uv_freeaddrinfo(list);
    mem_free(q);
    if (!r) return;
    r->resolve = NULL;
    if (rc != 0) redis_drop(r, uv_strerror(rc));
    else redis_connect_to(r, ip);
}

static void redis_connect(struct redis *r)
{
    unsigned char scratch[16];
    r->connect_deadline = loop_timer_start(r->o.loop, r->o.timeout_ms, 0, redis_on_connect_deadline,
                                           r);
    if (uv_inet_pton(AF_INET, r->host, scratch) == 0 ||
        uv_inet_pton(AF_INET6, r->host, scratch) == 0) {
        redis_connect_to(r, r->host);
        return;
    }
    struct addrinfo hints = { .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM };
    struct redis_resolve *q = MEM_NEW(struct redis_resolve);
    q->r = r;
    r->state = REDIS_RESOLVING;
    r->resolve = q;
    int rc = uv_getaddrinfo(loop_uv(r->o.loop), &q->uv, redis_on_resolved, r->host, NULL, &hints);
    if (rc == 0) return;
    r->resolve = NULL;
    mem_free(q);
    redis_drop(r, uv_strerror(rc));
}

enum status redis_create(const struct redis_options *o, struct redis **out, struct err *err)
{
    ASSERT_THREAD(THREAD_LOOP);
    if (!o->host || !o->host[0])
        return err_field(err, ERR_CONFIG, "host",
                         "the address of the Redis server is empty; give host and port");
    if (o->port == 0)
        return err_field(err, ERR_CONFIG, "port",
                         "the port of the Redis server is 0; 6379 is the usual one");
    if (o->db < 0)
        return err_field(err, ERR_CONFIG, "db", "the Redis database number is %d; it is 0 or more",
                         o->db);
    struct redis *r = MEM_NEW(struct redis);
    r->o = *o;
    r->host = mem_strdup(o->host);
    r->password = mem_strdup(o->password ? o->password : "");
    if (r->o.timeout_ms == 0) r->o.timeout_ms = 2000;
    r->backoff_ms = REDIS_BACKOFF_MIN_MS;
    r->n_holds = 1;
    list_init(&r->commands);
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
