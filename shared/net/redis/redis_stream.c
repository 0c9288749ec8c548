/* redis_stream.c - see redis_stream.h.
 *
 *     RESOLVING ─address─▶ CONNECTING ─▶ (TLS) ─▶ OPEN        each ─error, end─▶ LOST
 *                                                             each ─the owner's close─▶ CLOSED
 *
 * The memory is freed when libuv has closed the socket and a name is no longer being resolved, so
 * callbacks may close the stream and the code after them still reads its state. Bytes that are
 * written while a write is in flight are sent together by the next one. Thread: loop. */
#include "shared/net/redis/redis_stream.h"

#include <string.h>

#include "shared/base/address/host_port.h"
#include "shared/base/mem.h"
#include "shared/base/thread.h"
#include "shared/net/redis/redis_reader.h"

enum { STREAM_READ_BYTES = 65536 };
enum stream_state {
    STREAM_RESOLVING,
    STREAM_CONNECTING,
    STREAM_TLS,
    STREAM_OPEN,
    STREAM_LOST, /* reported; no callback is called from here on */
    STREAM_CLOSED
};

struct redis_stream {
    struct redis_stream_options o;
    char host[HOST_TEXT_MAX];
    enum stream_state state;
    uv_tcp_t tcp;
    uv_connect_t connect;
    uv_getaddrinfo_t resolve;
    uv_write_t write;
    struct loop_timer *fail; /* reports `why` in the next turn; NULL: nothing failed */
    enum status fail_st;
    char why[ERR_TEXT_MAX];
    uint32_t n_refs; /* the tcp handle; a name being resolved */
    bool writing;
    struct buf out, sending, plain; /* to be sent; libuv reads it; decrypted */
    struct tls_session *tls;        /* NULL: plain, or not connected */
    struct redis_reader reader;
    char in[STREAM_READ_BYTES];
};

static void stream_unref(struct redis_stream *s)
{
    if (--s->n_refs > 0) return;
    tls_session_free(s->tls);
    redis_reader_release(&s->reader);
    buf_release(&s->out);
    buf_release(&s->sending);
    buf_release(&s->plain);
    mem_free(s);
}

static void stream_on_closed(uv_handle_t *h) { stream_unref(h->data); }

void redis_stream_close(struct redis_stream *s)
{
    if (!s || s->state == STREAM_CLOSED) return;
    ASSERT_THREAD(THREAD_LOOP);
    if (s->state == STREAM_RESOLVING) uv_cancel((uv_req_t *)&s->resolve);
    s->state = STREAM_CLOSED;
    loop_timer_free(s->fail);
    s->fail = NULL;
    uv_close((uv_handle_t *)&s->tcp, stream_on_closed);
}

/* Reports a loss; the caller returns at once, since the owner may have closed the stream. */
static void stream_lose(struct redis_stream *s, enum status st, const char *why)
{
    if (s->state >= STREAM_LOST) return;
    uv_read_stop((uv_stream_t *)&s->tcp);
    s->state = STREAM_LOST;
    s->o.on_lost(s->o.arg, st, why);
}

static void stream_on_fail(void *arg)
{
    struct redis_stream *s = arg;
    loop_timer_free(s->fail);
    s->fail = NULL;
    stream_lose(s, s->fail_st, s->why);
}

/* Reports a loss in the next turn: whoever writes is not called back from inside. */
static void stream_fail(struct redis_stream *s, enum status st, const char *why)
{
    if (s->fail || s->state >= STREAM_LOST) return;
    s->fail_st = st;
    snprintf(s->why, sizeof s->why, "%s", why);
    s->fail = loop_timer_start(s->o.loop, 0, 0, stream_on_fail, s);
}

static void stream_flush(struct redis_stream *s);

static void stream_on_written(uv_write_t *w, int rc)
{
    struct redis_stream *s = w->handle->data;
    s->writing = false;
    if (s->state >= STREAM_LOST) return;
    if (rc != 0) stream_fail(s, ERR_PEER_LOST, uv_strerror(rc));
    else stream_flush(s);
}

static void stream_flush(struct redis_stream *s)
{
    if (s->writing || s->out.len == 0) return;
    struct buf done = s->sending;
    s->sending = s->out;
    s->out = done;
    buf_clear(&s->out);
    uv_buf_t b = { .base = s->sending.data, .len = s->sending.len };
    int rc = uv_write(&s->write, (uv_stream_t *)&s->tcp, &b, 1, stream_on_written);
    s->writing = rc == 0;
    if (rc != 0) stream_fail(s, ERR_PEER_LOST, uv_strerror(rc));
}

void redis_stream_write(struct redis_stream *s, const char *bytes, size_t n)
{
    struct err err = { 0 };
    ASSERT(s->state == STREAM_OPEN);
    if (!s->tls) {
        buf_add(&s->out, bytes, n);
    } else {
        enum status st = tls_session_send(s->tls, bytes, n, &err);
        tls_session_take_output(s->tls, &s->out);
        if (st != OK) stream_fail(s, st, err.text);
    }
    stream_flush(s);
}

/* Delivers the complete replies of n plain bytes. */
static void stream_take(struct redis_stream *s, const char *bytes, size_t n)
{
    struct err err = { 0 };
    redisReply *reply = NULL;
    enum status st = redis_reader_feed(&s->reader, bytes, n, &err);
    while (st == OK) {
        st = redis_reader_next(&s->reader, &reply, &err);
        if (st != OK || !reply) break;
        s->o.on_reply(s->o.arg, reply);
        freeReplyObject(reply);
        if (s->state >= STREAM_LOST) return;
    }
    if (st != OK) stream_lose(s, st, err.text);
}

static void stream_opened(struct redis_stream *s)
{
    s->state = STREAM_OPEN;
    s->o.on_open(s->o.arg);
}

static void stream_take_encrypted(struct redis_stream *s, const char *bytes, size_t n)
{
    struct err err = { 0 };
    buf_clear(&s->plain);
    enum status st = tls_session_receive(s->tls, bytes, n, &s->plain, &err);
    tls_session_take_output(s->tls, &s->out);
    stream_flush(s);
    if (s->state == STREAM_TLS && tls_session_is_up(s->tls)) stream_opened(s);
    if (s->state == STREAM_OPEN && s->plain.len) stream_take(s, s->plain.data, s->plain.len);
    if (st != OK) stream_lose(s, st, err.text);
}

static void stream_on_alloc(uv_handle_t *h, size_t suggested, uv_buf_t *out)
{
    struct redis_stream *s = h->data;
    (void)suggested;
    *out = uv_buf_init(s->in, sizeof s->in);
}

static void stream_on_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *b)
{
    struct redis_stream *s = stream->data;
    if (n == 0 || s->state >= STREAM_LOST) return;
    if (n == UV_EOF) stream_lose(s, ERR_PEER_LOST, "the server closed the connection");
    else if (n < 0) stream_lose(s, ERR_PEER_LOST, uv_strerror((int)n));
    else if (s->tls) stream_take_encrypted(s, b->base, (size_t)n);
    else stream_take(s, b->base, (size_t)n);
}

static void stream_on_connect(uv_connect_t *req, int rc)
{
    struct redis_stream *s = req->handle->data;
    struct err err = { 0 };
    if (s->state >= STREAM_LOST) return;
    uv_tcp_nodelay(&s->tcp, 1);
    if (rc == 0) rc = uv_read_start((uv_stream_t *)&s->tcp, stream_on_alloc, stream_on_read);
    if (rc != 0) {
        stream_lose(s, ERR_PEER_LOST, uv_strerror(rc));
    } else if (!s->o.tls) {
        stream_opened(s);
    } else if (tls_session_create(s->o.tls, s->host, &s->tls, &err) != OK) {
        stream_lose(s, ERR_PEER_REFUSED, err.text);
    } else {
        s->state = STREAM_TLS;
        tls_session_take_output(s->tls, &s->out);
        stream_flush(s);
    }
}

/* Returns libuv's code. */
static int stream_connect(struct redis_stream *s, const struct sockaddr *a)
{
    s->state = STREAM_CONNECTING;
    return uv_tcp_connect(&s->connect, &s->tcp, a, stream_on_connect);
}

static void stream_on_resolved(uv_getaddrinfo_t *req, int rc, struct addrinfo *list)
{
    struct redis_stream *s = req->data;
    if (s->state != STREAM_CLOSED) {
        if (rc == 0) rc = stream_connect(s, list->ai_addr);
        if (rc != 0) stream_lose(s, ERR_PEER_LOST, uv_strerror(rc));
    }
    if (list) uv_freeaddrinfo(list);
    stream_unref(s);
}

static int stream_resolve(struct redis_stream *s)
{
    struct addrinfo hints = {
        .ai_family = AF_UNSPEC,
        .ai_socktype = SOCK_STREAM,
        .ai_flags = AI_NUMERICSERV,
    };
    char service[8];
    snprintf(service, sizeof service, "%u", s->o.port);
    s->resolve.data = s;
    int rc = uv_getaddrinfo(loop_uv(s->o.loop), &s->resolve, stream_on_resolved, s->host, service,
                            &hints);
    if (rc == 0) s->n_refs++;
    return rc;
}

enum status redis_stream_open(const struct redis_stream_options *o, struct redis_stream **out,
                              struct err *err)
{
    struct sockaddr_storage a;
    ASSERT_THREAD(THREAD_LOOP);
    struct redis_stream *s = mem_try_calloc(1, sizeof *s);
    if (!s) return err_set(err, ERR_NOMEM, "no memory for a connection");
    s->o = *o;
    enum status st = host_copy(o->host, s->host)
                         ? redis_reader_init(&s->reader, err)
                         : err_set(err, ERR_INVALID, "the name is too long");
    if (st != OK) {
        mem_free(s);
        return st;
    }
    uv_tcp_init(loop_uv(o->loop), &s->tcp);
    s->tcp.data = s;
    s->n_refs = 1;
    int rc;
    if (uv_ip4_addr(s->host, o->port, (struct sockaddr_in *)&a) == 0 ||
        uv_ip6_addr(s->host, o->port, (struct sockaddr_in6 *)&a) == 0)
        rc = stream_connect(s, (const struct sockaddr *)&a);
    else rc = stream_resolve(s);
    if (rc == 0) {
        *out = s;
        return OK;
    }
    s->state = STREAM_CONNECTING; /* nothing is being resolved */
    redis_stream_close(s);
    return err_set(err, ERR_PEER_LOST, "%s", uv_strerror(rc));
}

bool redis_stream_in_handshake(const struct redis_stream *s) { return s->state == STREAM_TLS; }

const char *redis_stream_tls_version(const struct redis_stream *s)
{
    return s->state == STREAM_OPEN && s->tls ? tls_session_version(s->tls) : NULL;
}

void redis_encode_word(struct buf *out, const char *p, size_t n)
{
    buf_printf(out, "$%zu\r\n", n);
    buf_add(out, p, n);
    buf_add_c(out, "\r\n");
}

void redis_encode(struct buf *out, int argc, const char *const *argv, const size_t *argv_len)
{
    buf_printf(out, "*%d\r\n", argc);
    for (int i = 0; i < argc; i++)
        redis_encode_word(out, argv[i], argv_len ? argv_len[i] : strlen(argv[i]));
}
