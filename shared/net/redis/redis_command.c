/* redis_command.c - see redis_conn.h: commands, their deadlines, scripts.
 *
 * A script is called by its SHA-1 (EVALSHA). When the server does not know it (restart, flush,
 * failover) the call is sent again as EVAL, with the deadline of the first attempt. Thread:
 * loop. */
#include <openssl/evp.h>
#include <string.h>

#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/thread.h"
#include "shared/net/redis/redis_conn.h"

enum { REDIS_COMMANDS_MAX = 4096, REDIS_BYTES_MAX = 64 << 20 };

struct redis_cmd {
    struct list link; /* redis.commands, by deadline */
    struct list sent; /* redis.sent, in the order of the answers */
    redis_fn *cb;
    void *arg;
    uint64_t deadline_ms;
    size_t n_bytes;
    const char *script; /* NULL: a plain command, or EVAL was already tried */
    struct buf tail;    /* of a script: number of keys, and arguments, encoded */
    int n_words;
};

static void command_free(struct redis_cmd *c)
{
    buf_release(&c->tail);
    mem_free(c);
}

static void command_unlink(struct redis *r, struct redis_cmd *c)
{
    list_remove(&c->link);
    list_remove(&c->sent);
    r->n_commands--;
    r->n_bytes -= c->n_bytes;
}

/* Answers a command and frees it. The callback may free r: hold it. */
static void command_end(struct redis *r, struct redis_cmd *c, enum status st,
                        const redisReply *reply)
{
    redis_fn *cb = c->cb;
    void *arg = c->arg;
    command_unlink(r, c);
    command_free(c);
    cb(arg, st, reply);
}

void redis_fail_commands(struct redis *r, enum status st)
{
    r->n_holds++;
    while (!list_empty(&r->commands))
        command_end(r, LIST_FIRST(&r->commands, struct redis_cmd, link), st, NULL);
    redis_unhold(r);
}

static void command_set_deadline(struct redis *r);

static void command_on_deadline(void *arg)
{
    struct redis *r = arg;
    uint64_t now = clock_ms();
    loop_timer_free(r->command_deadline);
    r->command_deadline = NULL;
    r->n_holds++;
    bool late = false;
    while (!list_empty(&r->commands) &&
           LIST_FIRST(&r->commands, struct redis_cmd, link)->deadline_ms <= now) {
        late = true;
        command_end(r, LIST_FIRST(&r->commands, struct redis_cmd, link), ERR_TIMEOUT, NULL);
    }
    /* Answers come in order, so a late one delays all the others: reconnect. */
    if (late && !r->freed && r->stream)
        redis_drop(r, REDIS_CAUSE_CONNECTION, "a command was not answered in time");
    else if (!r->freed) command_set_deadline(r);
    redis_unhold(r);
}

static void command_set_deadline(struct redis *r)
{
    if (r->command_deadline || list_empty(&r->commands)) return;
    uint64_t now = clock_ms(), at = LIST_FIRST(&r->commands, struct redis_cmd, link)->deadline_ms;
    r->command_deadline = loop_timer_start(r->o.loop, at > now ? at - now : 0, 0,
                                           command_on_deadline, r);
}

static void command_link(struct redis *r, struct redis_cmd *c)
{
    struct list *at = r->commands.prev;
    while (at != &r->commands &&
           LIST_ENTRY(at, struct redis_cmd, link)->deadline_ms > c->deadline_ms)
        at = at->prev;
    list_insert_after(at, &c->link);
    list_push(&r->sent, &c->sent);
    r->n_commands++;
    r->n_bytes += c->n_bytes;
    command_set_deadline(r);
}

static void command_send(struct redis *r, struct redis_cmd *c, const struct buf *bytes)
{
    redis_stream_write(r->stream, bytes->data, bytes->len);
    c->n_bytes = bytes->len;
    command_link(r, c);
}

static void command_send_script(struct redis *r, struct redis_cmd *c, const char *verb,
                                const char *what)
{
    struct buf b = { 0 };
    buf_printf(&b, "*%d\r\n", c->n_words);
    redis_encode_word(&b, verb, strlen(verb));
    redis_encode_word(&b, what, strlen(what));
    buf_add_str(&b, buf_str(&c->tail));
    command_send(r, c, &b);
    buf_release(&b);
}

/* The server does not know the script: sends its text. */
static void command_retry_as_eval(struct redis *r, struct redis_cmd *c)
{
    const char *script = c->script;
    command_unlink(r, c);
    c->script = NULL;
    command_send_script(r, c, "EVAL", script);
}

static void command_finish(struct redis *r, struct redis_cmd *c, const redisReply *reply)
{
    enum status st = OK;
    bool read_only = false;
    if (reply->type == REDIS_REPLY_ERROR) {
        st = ERR_IO;
        /* A failover has made this server a replica. */
        read_only = strncmp(reply->str, "READONLY", 8) == 0;
        uint32_t n_unlogged;
        if (log_repeats_due(&r->refusals, reply->str, clock_ms(), &n_unlogged))
            log_warn("redis refused a command", "why=\"%s\" repeats=%u", reply->str, n_unlogged);
    }
    r->n_holds++;
    command_end(r, c, st, reply);
    if (read_only && !r->freed && r->stream)
        redis_drop(r, REDIS_CAUSE_ROLE, "it has become a replica, which takes no writes");
    redis_unhold(r);
}

void redis_take_reply(struct redis *r, const redisReply *reply)
{
    if (list_empty(&r->sent)) {
        redis_drop(r, REDIS_CAUSE_PROTOCOL, "it sends a reply that nobody asked for");
        return;
    }
    struct redis_cmd *c = LIST_FIRST(&r->sent, struct redis_cmd, sent);
    if (c->script && reply->type == REDIS_REPLY_ERROR && strncmp(reply->str, "NOSCRIPT", 8) == 0)
        command_retry_as_eval(r, c);
    else command_finish(r, c, reply);
}

static enum status command_admit(const struct redis *r, size_t n_bytes)
{
    if (r->state != REDIS_UP) return ERR_UNAVAILABLE;
    if (r->n_commands >= REDIS_COMMANDS_MAX || r->n_bytes + n_bytes > REDIS_BYTES_MAX)
        return ERR_FULL;
    return OK;
}

static struct redis_cmd *command_create(struct redis *r, redis_fn *cb, void *arg)
{
    struct redis_cmd *c = mem_try_calloc(1, sizeof *c);
    if (!c) return NULL;
    c->cb = cb;
    c->arg = arg;
    c->deadline_ms = clock_ms() + r->o.timeout_ms;
    list_init(&c->link);
    list_init(&c->sent);
    return c;
}

static size_t command_len(const char *const *argv, const size_t *argv_len, int i)
{
    return argv_len ? argv_len[i] : strlen(argv[i]);
}

enum status redis_command(struct redis *r, redis_fn *cb, void *arg, int argc, const char **argv,
                          const size_t *argv_len)
{
    ASSERT_THREAD(THREAD_LOOP);
    size_t total = 0;
    for (int i = 0; i < argc; i++) total += command_len(argv, argv_len, i);
    TRY(command_admit(r, total));
    struct redis_cmd *c = command_create(r, cb, arg);
    if (!c) return ERR_NOMEM;
    struct buf b = { 0 };
    redis_encode(&b, argc, argv, argv_len);
    command_send(r, c, &b);
    buf_release(&b);
    return OK;
}

/* Redis identifies scripts by SHA-1; security does not depend on it. NULL: OpenSSL refuses
 * SHA-1. */
static const char *script_sha(struct redis *r, const char *script)
{
    uint64_t key = (uintptr_t)script;
    char *hex = map_get(&r->scripts, map_key_u64(&key));
    if (hex) return hex;
    unsigned char md[EVP_MAX_MD_SIZE];
    unsigned n = 0;
    if (EVP_Digest(script, strlen(script), md, &n, EVP_sha1(), NULL) != 1) return NULL;
    hex = mem_calloc(2 * n + 1, 1);
    for (unsigned i = 0; i < n; i++) snprintf(hex + 2 * i, 3, "%02x", md[i]);
    map_put(&r->scripts, map_key_u64(&key), hex);
    return hex;
}

void redis_scripts_release(struct redis *r)
{
    size_t pos = 0;
    struct str key;
    void *hex;
    while (map_next(&r->scripts, &pos, &key, &hex)) mem_free(hex);
    map_release(&r->scripts);
}

enum status redis_script(struct redis *r, const char *script, redis_fn *cb, void *arg, int n_keys,
                         int n, const char **argv, const size_t *argv_len)
{
    ASSERT_THREAD(THREAD_LOOP);
    ASSERT(n_keys >= 0);
    ASSERT(n_keys <= n);
    size_t total = strlen(script);
    for (int i = 0; i < n; i++) total += command_len(argv, argv_len, i);
    TRY(command_admit(r, total));
    struct redis_cmd *c = command_create(r, cb, arg);
    if (!c) return ERR_NOMEM;
    char count[16];
    int n_count = snprintf(count, sizeof count, "%d", n_keys);
    redis_encode_word(&c->tail, count, (size_t)n_count);
    for (int i = 0; i < n; i++)
        redis_encode_word(&c->tail, argv[i], command_len(argv, argv_len, i));
    c->n_words = n + 3;
    const char *sha = script_sha(r, script);
    if (sha) c->script = script;
    command_send_script(r, c, sha ? "EVALSHA" : "EVAL", sha ? sha : script);
    return OK;
}
