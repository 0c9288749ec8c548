/* grpc_session.c - see grpc_conn.h: what nghttp2 is told, and what it tells.
 *
 * nghttp2 refuses by itself what is not HTTP/2: it queues a GOAWAY, and the session wants to read
 * no more. Frames that are correct but only cost are counted here. Thread: loop. */
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/net/grpc/grpc_conn.h"

enum {
    CONN_WINDOW = 1024 * 1024, /* of what its calls may have on their way together */
    CONTINUATIONS_MAX = 8,
    ACKS_MAX = 1000,         /* of pings and settings that the client does not read */
    RATE_ONE = 1000,         /* in a rate's unit */
    NGHTTP2_BURST = 1u << 20 /* resets are counted here, since nghttp2 knows seconds only */
};

static bool rate_take(struct grpc_rate *r, uint64_t now_ms, uint32_t burst, uint32_t per_s)
{
    const uint64_t most = (uint64_t)burst * RATE_ONE, more = (now_ms - r->t_ms) * per_s;
    r->n_milli = more >= most - r->n_milli ? most : r->n_milli + more;
    r->t_ms = now_ms;
    if (r->n_milli < RATE_ONE) return false;
    r->n_milli -= RATE_ONE;
    return true;
}

/* What a callback of nghttp2 returns: after a flood nothing more is read. */
static int count_cost(struct grpc_conn *c, struct grpc_rate *r, uint32_t burst, uint32_t per_s)
{
    if (c->flooded) return NGHTTP2_ERR_CALLBACK_FAILURE;
    if (rate_take(r, grpc_conn_now(c), burst, per_s)) return 0;
    log_debug("grpc client floods", "peer=%s", c->peer);
    if (c->server->m_flood) counter_add(c->server->m_flood, 1);
    c->flooded = true;
    grpc_conn_terminate(c, NGHTTP2_ENHANCE_YOUR_CALM);
    return NGHTTP2_ERR_CALLBACK_FAILURE;
}

static int count_control(struct grpc_conn *c)
{
    const struct grpc_limits *l = &c->server->o.limits;
    return count_cost(c, &c->control, l->control_burst, l->control_per_s);
}

/* Libraries of clients measure the network with a ping for each answer. */
static void allow_control(struct grpc_conn *c)
{
    const uint64_t most = (uint64_t)c->server->o.limits.control_burst * RATE_ONE;
    c->control.n_milli += RATE_ONE;
    if (c->control.n_milli > most) c->control.n_milli = most;
}

static struct grpc_call *call_of(nghttp2_session *session, int32_t stream)
{
    return nghttp2_session_get_stream_user_data(session, stream);
}

/* ---- frames that come ---- */

static int on_begin_frame(nghttp2_session *session, const nghttp2_frame_hd *hd, void *arg)
{
    struct grpc_conn *c = arg;
    (void)session;
    switch (hd->type) {
    case NGHTTP2_PING:
    case NGHTTP2_SETTINGS: return hd->flags & NGHTTP2_FLAG_ACK ? 0 : count_control(c);
    case NGHTTP2_DATA: /* see on_frame */
    case NGHTTP2_HEADERS:
    case NGHTTP2_WINDOW_UPDATE: /* as many as the client likes: they say how fast it reads */
    case NGHTTP2_RST_STREAM: /* see on_stream_close */ break;
    default: count_control(c); break;
    }
    return 0;
}

static int on_begin_headers(nghttp2_session *session, const nghttp2_frame *f, void *arg)
{
    struct grpc_conn *c = arg;
    if (f->hd.type != NGHTTP2_HEADERS || f->headers.cat != NGHTTP2_HCAT_REQUEST) return 0;
    nghttp2_session_set_stream_user_data(session, f->hd.stream_id,
                                         grpc_call_create(c, f->hd.stream_id));
    return 0;
}

static int on_header(nghttp2_session *session, const nghttp2_frame *f, const uint8_t *name,
                     size_t n_name, const uint8_t *value, size_t n_value, uint8_t flags, void *arg)
{
    const struct grpc_conn *c = arg;
    const struct grpc_limits *l = &c->server->o.limits;
    struct grpc_call *call = call_of(session, f->hd.stream_id);
    (void)flags;
    /* Trailers of clients say nothing that gRPC knows. */
    if (!call || f->hd.type != NGHTTP2_HEADERS || f->headers.cat != NGHTTP2_HCAT_REQUEST) return 0;
    if (!grpc_fields_add(&call->fields, (struct str){ (const char *)name, n_name },
                         (struct str){ (const char *)value, n_value }, l->n_headers,
                         l->header_bytes))
        call->fields_too_large = true;
    return 0;
}

static int on_frame(nghttp2_session *session, const nghttp2_frame *f, void *arg)
{
    struct grpc_conn *c = arg;
    if (f->hd.type == NGHTTP2_SETTINGS) c->settled = true;
    if (f->hd.type != NGHTTP2_HEADERS && f->hd.type != NGHTTP2_DATA) return 0;
    struct grpc_call *call = call_of(session, f->hd.stream_id);
    if (!call) return 0;
    if (f->hd.type == NGHTTP2_HEADERS && f->headers.cat == NGHTTP2_HCAT_REQUEST)
        grpc_call_begin(call);
    if (f->hd.flags & NGHTTP2_FLAG_END_STREAM) grpc_call_half_close(call);
    else if (f->hd.type == NGHTTP2_DATA && f->hd.length == f->data.padlen) return count_control(c);
    return 0;
}

static int on_data(nghttp2_session *session, uint8_t flags, int32_t stream, const uint8_t *data,
                   size_t n, void *arg)
{
    struct grpc_call *call = call_of(session, stream);
    (void)flags;
    struct grpc_conn *c = arg;
    if (nghttp2_session_consume_connection(session, n) != 0) c->broken = true;
    if (call) grpc_call_receive(call, (struct str){ (const char *)data, n });
    else if (nghttp2_session_consume_stream(session, stream, n) != 0) c->broken = true;
    return 0;
}

/* Streams that end without an answer cost as much as those with one. */
static int on_stream_close(nghttp2_session *session, int32_t stream, uint32_t error, void *arg)
{
    struct grpc_conn *c = arg;
    const struct grpc_limits *l = &c->server->o.limits;
    struct grpc_call *call = call_of(session, stream);
    if (!call) return 0;
    const bool gone = error != NGHTTP2_NO_ERROR || call->state != GRPC_CALL_FINISHED;
    nghttp2_session_set_stream_user_data(session, stream, NULL);
    grpc_call_free(call, gone);
    if (!gone) return 0;
    const int rc = count_cost(c, &c->resets, l->reset_burst, l->reset_per_s);
    return c->sending ? 0 : rc; /* its own sends go on to the GOAWAY */
}

/* ---- frames that go ---- */

/* Streams beyond the limit, which nghttp2 refuses before there is a call, cost a head each. */
static void count_refused(struct grpc_conn *c, const nghttp2_frame *f)
{
    const struct grpc_limits *l = &c->server->o.limits;
    if (f->hd.type == NGHTTP2_RST_STREAM && f->rst_stream.error_code == NGHTTP2_REFUSED_STREAM)
        (void)count_cost(c, &c->resets, l->reset_burst, l->reset_per_s); /* as on_stream_close */
}

/* The client may send on after the answer's end, which nobody reads. */
static int on_sent(nghttp2_session *session, const nghttp2_frame *f, void *arg)
{
    struct grpc_conn *c = arg;
    const int32_t stream = f->hd.stream_id;
    count_refused(c, f);
    if (f->hd.type != NGHTTP2_HEADERS && f->hd.type != NGHTTP2_DATA) return 0;
    allow_control(c);
    if ((f->hd.flags & NGHTTP2_FLAG_END_STREAM) &&
        nghttp2_session_get_stream_remote_close(session, stream) == 0 &&
        nghttp2_submit_rst_stream(session, NGHTTP2_FLAG_NONE, stream, NGHTTP2_NO_ERROR) != 0)
        c->broken = true;
    return 0;
}

/* ---- making a session ---- */

enum status grpc_session_setup(struct grpc_server *s)
{
    if (nghttp2_session_callbacks_new(&s->callbacks) != 0 || nghttp2_option_new(&s->option) != 0)
        return ERR_NOMEM;
    nghttp2_session_callbacks *k = s->callbacks;
    nghttp2_session_callbacks_set_on_begin_frame_callback(k, on_begin_frame);
    nghttp2_session_callbacks_set_on_begin_headers_callback(k, on_begin_headers);
    nghttp2_session_callbacks_set_on_header_callback(k, on_header);
    nghttp2_session_callbacks_set_on_frame_recv_callback(k, on_frame);
    nghttp2_session_callbacks_set_on_data_chunk_recv_callback(k, on_data);
    nghttp2_session_callbacks_set_on_stream_close_callback(k, on_stream_close);
    nghttp2_session_callbacks_set_on_frame_send_callback(k, on_sent);
    nghttp2_option_set_no_auto_window_update(s->option, 1);
    nghttp2_option_set_no_closed_streams(s->option, 1);
    nghttp2_option_set_max_outbound_ack(s->option, ACKS_MAX);
    nghttp2_option_set_max_continuations(s->option, CONTINUATIONS_MAX);
    nghttp2_option_set_stream_reset_rate_limit(s->option, NGHTTP2_BURST, NGHTTP2_BURST);
    return OK;
}

enum status grpc_session_create(struct grpc_conn *c)
{
    const struct grpc_server *s = c->server;
    const nghttp2_settings_entry settings[] = {
        { NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS, s->o.limits.n_calls },
        { NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE, (uint32_t)s->o.limits.header_bytes },
        { NGHTTP2_SETTINGS_ENABLE_PUSH, 0 },
        { NGHTTP2_SETTINGS_NO_RFC7540_PRIORITIES, 1 },
    };
    const uint64_t now = grpc_conn_now(c);
    c->control = (struct grpc_rate){ (uint64_t)s->o.limits.control_burst * RATE_ONE, now };
    c->resets = (struct grpc_rate){ (uint64_t)s->o.limits.reset_burst * RATE_ONE, now };
    if (nghttp2_session_server_new2(&c->session, s->callbacks, c, s->option) != 0) return ERR_NOMEM;
    if (nghttp2_submit_settings(c->session, NGHTTP2_FLAG_NONE, settings, COUNT_OF(settings)) != 0 ||
        nghttp2_session_set_local_window_size(c->session, NGHTTP2_FLAG_NONE, 0, CONN_WINDOW) != 0)
        return ERR_NOMEM;
    return OK;
}
