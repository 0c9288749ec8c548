/* sentinel.c - see sentinel.h.
 *
 *     IDLE ─sentinel_ask─▶ ASKING the i-th ─it names a master─▶ IDLE, answered
 *                            ▲   └─refused, error, deadline─▶ the next one; after the last: IDLE
 *                            └──────────────────────────────────┘
 * Thread: loop. */
#include "shared/net/redis/sentinel.h"

#include <string.h>

#include "shared/base/assert.h"
#include "shared/base/mem.h"
#include "shared/net/redis/redis_answers.h"
#include "shared/net/redis/redis_stream.h"

enum { WHY_MAX = 120 };

struct sentinel {
    struct sentinel_options o;
    sentinel_fn *cb; /* NULL: no question is open */
    void *arg;
    size_t next;      /* where the next question begins */
    size_t n_asked;   /* of the open question, with the one that is being asked */
    size_t n_awaited; /* replies of the one that is being asked */
    struct redis_stream *stream;
    struct loop_timer *timer;               /* the deadline; or the next step, in the next turn */
    char why[REDIS_SENTINELS_MAX][WHY_MAX]; /* by sentinel: what it said last; "": not asked */
    bool wants_password, knows_no_name;
};

static void sentinel_ask_next(struct sentinel *s);

static size_t sentinel_index(const struct sentinel *s)
{
    return (s->next + s->n_asked - 1) % s->o.server->n_sentinels;
}

static void sentinel_hang_up(struct sentinel *s)
{
    redis_stream_close(s->stream);
    s->stream = NULL;
    loop_timer_free(s->timer);
    s->timer = NULL;
}

/* What each of them said, in the order in which they were given, so that the sentence changes only
 * when an answer does. */
static void sentinel_report(struct sentinel *s, char out[ERR_TEXT_MAX])
{
    char at[HOST_PORT_TEXT_MAX];
    size_t n = (size_t)snprintf(out, ERR_TEXT_MAX, "no sentinel names the master %.60s",
                                s->o.server->master);
    for (size_t i = 0; i < s->o.server->n_sentinels && n < ERR_TEXT_MAX - 1; i++) {
        const struct redis_address *a = &s->o.server->sentinels[i];
        n += (size_t)snprintf(out + n, ERR_TEXT_MAX - n, "%s%.72s: %s", i ? "; " : ": ",
                              host_port_text(a->host, a->port, at), s->why[i]);
    }
}

static void sentinel_end(struct sentinel *s, enum status st, const struct sentinel_answer *a,
                         const char *why)
{
    sentinel_fn *cb = s->cb;
    s->cb = NULL;
    cb(s->arg, st, a, why);
}

static void sentinel_on_step(void *arg)
{
    struct sentinel *s = arg;
    loop_timer_free(s->timer);
    s->timer = NULL;
    if (s->n_asked < s->o.server->n_sentinels) {
        sentinel_ask_next(s);
        return;
    }
    char why[ERR_TEXT_MAX];
    sentinel_report(s, why);
    s->next = (s->next + 1) % s->o.server->n_sentinels;
    sentinel_end(s,
                 s->wants_password  ? ERR_UNAUTHORIZED
                 : s->knows_no_name ? ERR_NOT_FOUND
                                    : ERR_UNAVAILABLE,
                 NULL, why);
}

/* This one is of no help: the next one is asked in the next turn. */
static void sentinel_pass(struct sentinel *s, const char *why)
{
    snprintf(s->why[sentinel_index(s)], WHY_MAX, "%s", why); /* `why` may be the stream's */
    sentinel_hang_up(s);
    s->timer = loop_timer_start(s->o.loop, 0, 0, sentinel_on_step, s);
}

static void sentinel_on_deadline(void *arg)
{
    struct sentinel *s = arg;
    sentinel_pass(s, s->stream && redis_stream_in_handshake(s->stream)
                         ? "it does not answer the TLS handshake in time; does it speak TLS?"
                         : "it does not answer in time");
}

static void sentinel_on_lost(void *arg, enum status st, const char *why)
{
    (void)st;
    sentinel_pass(arg, why);
}

/* Sends the user and the password, if there are any, and the question. */
static void sentinel_on_open(void *arg)
{
    struct sentinel *s = arg;
    const struct redis_server *to = s->o.server;
    const char *name = to->sentinel_username, *password = to->sentinel_password;
    struct buf b = { 0 };
    s->n_awaited = 1;
    if (password && *password) {
        if (name && *name) redis_encode(&b, 3, (const char *[]){ "AUTH", name, password }, NULL);
        else redis_encode(&b, 2, (const char *[]){ "AUTH", password }, NULL);
        s->n_awaited++;
    }
    redis_encode(&b, 3, (const char *[]){ "SENTINEL", "get-master-addr-by-name", to->master },
                 NULL);
    redis_stream_write(s->stream, b.data, b.len);
    buf_release(&b);
}

static bool is_refused_password(const redisReply *r)
{
    return r->type == REDIS_REPLY_ERROR &&
           (strncmp(r->str, "NOAUTH", 6) == 0 || strncmp(r->str, "WRONGPASS", 9) == 0 ||
            strncmp(r->str, "NOPERM", 6) == 0 || strncmp(r->str, "ERR AUTH", 8) == 0);
}

static void sentinel_on_reply(void *arg, const redisReply *reply)
{
    struct sentinel *s = arg;
    struct sentinel_answer a = { .said_by = s->o.server->sentinels[sentinel_index(s)] };
    struct err err = { 0 };
    if (s->n_awaited == 0) return;
    s->n_awaited--;
    if (is_refused_password(reply)) {
        s->wants_password = true;
        sentinel_pass(s, reply->str);
        return;
    }
    if (s->n_awaited > 0) { /* of AUTH */
        if (reply->type == REDIS_REPLY_ERROR) sentinel_pass(s, reply->str);
        return;
    }
    enum status st = redis_read_master(reply, &a.master, &err);
    if (st != OK) {
        s->knows_no_name |= st == ERR_NOT_FOUND;
        sentinel_pass(s, err.text);
        return;
    }
    s->next = sentinel_index(s);
    sentinel_hang_up(s);
    sentinel_end(s, OK, &a, NULL);
}

static void sentinel_ask_next(struct sentinel *s)
{
    struct err err = { 0 };
    s->n_asked++;
    const struct redis_address *at = &s->o.server->sentinels[sentinel_index(s)];
    const struct redis_stream_options o = {
        .loop = s->o.loop,
        .host = at->host,
        .port = at->port,
        .tls = s->o.tls,
        .on_open = sentinel_on_open,
        .on_reply = sentinel_on_reply,
        .on_lost = sentinel_on_lost,
        .arg = s,
    };
    s->n_awaited = 0;
    if (redis_stream_open(&o, &s->stream, &err) != OK) sentinel_pass(s, err.text);
    else s->timer = loop_timer_start(s->o.loop, s->o.timeout_ms, 0, sentinel_on_deadline, s);
}

struct sentinel *sentinel_create(const struct sentinel_options *o)
{
    ASSERT(o->server->n_sentinels > 0);
    ASSERT(o->server->n_sentinels <= REDIS_SENTINELS_MAX);
    struct sentinel *s = MEM_NEW(struct sentinel);
    s->o = *o;
    return s;
}

void sentinel_free(struct sentinel *s)
{
    if (!s) return;
    sentinel_cancel(s);
    mem_free(s);
}

void sentinel_ask(struct sentinel *s, sentinel_fn *cb, void *arg)
{
    ASSERT(!s->cb);
    s->cb = cb;
    s->arg = arg;
    s->n_asked = 0;
    s->wants_password = s->knows_no_name = false;
    memset(s->why, 0, sizeof s->why);
    s->timer = loop_timer_start(s->o.loop, 0, 0, sentinel_on_step, s);
}

void sentinel_cancel(struct sentinel *s)
{
    sentinel_hang_up(s);
    s->cb = NULL;
}

void sentinel_reject(struct sentinel *s) { s->next = (s->next + 1) % s->o.server->n_sentinels; }
