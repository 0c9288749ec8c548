/* kserve_infer.c - see kserve.h: the requests of ModelInfer and ModelStreamInfer.
 *
 *     READING ──▶ RUNNING ──reply, or last item──▶ ENDED
 *     (a worker   in the API server                (a call that ends leads here from any state)
 *      if large)
 *
 * A request is freed when it has ended and no worker has it. A stream ends when its client has sent
 * all and its last request has ended. Thread: loop, except read_*_work (a worker). */
#include <string.h>

#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/serve/grpc/infer_answer.h"
#include "shared/serve/grpc/infer_request.h"
#include "shared/serve/grpc/kserve_internal.h"

enum { READ_INLINE_MAX = 64 * 1024 /* bytes of a message that the loop reads itself */ };

/* Of one gRPC call. */
struct infer_call {
    struct kserve *k;
    struct grpc_call *call;
    bool is_stream;
    bool half_closed;
    uint32_t tenant;
    struct list requests;
};

struct infer {
    struct list link;      /* of the call's requests */
    struct infer_call *of; /* NULL: the call is gone */
    struct kserve *k;
    struct serve *serve;
    struct infer_request request;
    struct infer_answer answer;
    struct http_taken_body body; /* the message, then the JSON */
    uint64_t completion;         /* of serve_cancel; 0: none yet */
    bool is_admitted, on_worker, in_submit, ended;
    enum status st; /* of reading */
    struct err err;
};

/* ---- the end ---- */

static void infer_free(struct infer *r)
{
    http_taken_body_release(&r->body);
    infer_request_release(&r->request);
    infer_answer_release(&r->answer);
    mem_free(r);
}

/* Takes it out of its call; nothing is answered after this. */
static void leave_call(struct infer *r)
{
    if (r->is_admitted) grpc_done(r->of->call);
    list_remove(&r->link);
    r->of = NULL;
}

static void maybe_finish(struct infer_call *of)
{
    if (of->is_stream && of->half_closed && list_empty(&of->requests))
        grpc_finish(of->call, GRPC_OK, NULL);
}

static void set_ended(struct infer *r)
{
    r->ended = true;
    if (!r->in_submit) infer_free(r);
}

/* It is answered. */
static void end_in_stream(struct infer *r)
{
    struct infer_call *of = r->of;
    leave_call(r);
    maybe_finish(of);
    set_ended(r);
}

/* With it the call of ModelInfer ends. */
static void end_infer(struct infer *r, enum grpc_status st, const char *text)
{
    struct grpc_call *call = r->of->call;
    leave_call(r);
    grpc_finish(call, st, text);
    set_ended(r);
}

/* The call ends, or is about to: what runs for it stops. */
static void drop_requests(struct infer_call *of)
{
    LIST_FOREACH (r, &of->requests, struct infer, link) {
        list_remove(&r->link);
        r->of = NULL;
        if (r->on_worker) continue; /* on_read frees it */
        if (r->completion) serve_cancel(r->serve, r->completion);
        infer_free(r);
    }
}

static void on_call_end(void *arg, bool gone)
{
    struct infer_call *of = arg;
    (void)gone;
    drop_requests(of);
    mem_free(of);
}

/* ---- answers ---- */

/* Sends the response that has been made, if any. When the client does not read it is cut, and
 * on_call_end follows. */
static enum status send_response(struct infer *r)
{
    struct buf *response = &r->answer.response;
    if (response->len == 0) return OK;
    const enum status st = grpc_send(r->of->call, buf_str(response));
    buf_release(response);
    return st;
}

/* Ends it with an error: in a stream as a response, since the stream goes on. */
static void fail(struct infer *r, enum status st, const char *text)
{
    log_debug("grpc request failed", "peer=%s st=%s why=\"%s\"", grpc_peer(r->of->call),
              status_name(st), text);
    if (!r->of->is_stream) {
        end_infer(r, grpc_status_of_http(status_http(st)), text);
        return;
    }
    infer_answer_add_error(&r->answer, st, text);
    enum status sent = send_response(r);
    infer_answer_end(&r->answer);
    if (sent == OK) sent = send_response(r);
    (void)sent;
    end_in_stream(r);
}

static void on_begin(void *arg, const char *headers)
{
    (void)arg;
    (void)headers;
}

static enum status on_chunk(void *arg, struct str id, struct str json)
{
    struct infer *r = arg;
    (void)id;
    infer_answer_add(&r->answer, json);
    return r->of->is_stream ? send_response(r) : OK;
}

static void on_end(void *arg)
{
    struct infer *r = arg;
    infer_answer_end(&r->answer);
    if (!r->of->is_stream && r->answer.failed) {
        end_infer(r, r->answer.code, r->answer.why.data);
        return;
    }
    const enum status st = send_response(r);
    if (r->of->is_stream) end_in_stream(r);
    else if (st == OK) end_infer(r, GRPC_OK, NULL);
}

static void on_reply(void *arg, int status, const char *headers, struct str body)
{
    struct infer *r = arg;
    (void)headers;
    infer_answer_add_whole(&r->answer, status, body);
    const enum status sent = r->of->is_stream ? send_response(r) : OK;
    (void)sent;
    on_end(r);
}

/* ---- the request ---- */

/* Milliseconds until its client's time is over; 0: any will do. *by: what says so. */
static uint32_t time_left(const struct infer *r, enum gen_deadline *by)
{
    const uint64_t at = grpc_deadline_ms(r->of->call), now = clock_ms();
    const uint32_t own = r->request.timeout_ms;
    uint32_t left = 0;
    if (at) left = at <= now ? 1 : at - now > UINT32_MAX ? UINT32_MAX : (uint32_t)(at - now);
    const bool is_own = own && (!left || own < left);
    *by = is_own ? GEN_DEADLINE_PARAMETER : GEN_DEADLINE_GRPC;
    return is_own ? own : left;
}

static void submit(struct infer *r)
{
    enum gen_deadline by;
    const uint32_t left_ms = time_left(r, &by);
    const struct serve_call call = {
        .path = r->request.form == INFER_NATIVE ? SERVE_NATIVE_PATH : "/v1/completions",
        .taken = &r->body,
        .request_id = r->request.id.len ? r->request.id.data : NULL,
        .tenant = r->of->tenant,
        .deadline_ms = left_ms,
        .deadline_by = by,
        .reply = { .reply = on_reply,
                   .begin = on_begin,
                   .chunk = on_chunk,
                   .end = on_end,
                   .arg = r, },
    };
    buf_release(&r->body.bytes);
    r->body.bytes = r->request.body; /* which counts for as much as the message did */
    r->request.body = (struct buf){ 0 };
    r->in_submit = true;
    const uint64_t id = serve_submit(r->serve, &call);
    r->in_submit = false;
    if (r->ended) infer_free(r);
    else r->completion = id;
}

/* Is there a server for it, now that it is read? */
static bool check_api(struct infer *r)
{
    struct buf why = { 0 };
    r->serve = kserve_api(r->k, &why);
    if (r->serve) return true;
    struct infer_call *of = r->of;
    drop_requests(of); /* also this one */
    kserve_finish_unavailable(of->call, &why);
    return false;
}

static void start(struct infer *r)
{
    if (!check_api(r)) return;
    if (r->st != OK) fail(r, r->st, r->err.text);
    else if (!r->is_admitted)
        fail(r, ERR_FULL,
             "this address has as many running requests as the server accepts; try again");
    else submit(r);
}

static bool has_model(const void *arg, const char *name) { return kserve_has_model(arg, name); }

/* The names of the API server do not change while it is there, but it may go meanwhile. */
static void read_request(struct infer *r, bool is_stream)
{
    const struct infer_reading reading = {
        .message = buf_str(&r->body.bytes),
        .is_stream = is_stream,
        .has_model = has_model,
        .arg = r->serve,
    };
    r->st = infer_request_read(&reading, &r->request, &r->err);
}

static void read_stream_work(void *arg) { read_request(arg, true); }

static void read_infer_work(void *arg) { read_request(arg, false); }

static void on_read(void *arg)
{
    struct infer *r = arg;
    struct kserve *k = r->k;
    r->on_worker = false;
    serve_unref(r->serve);
    if (r->of) start(r);
    else infer_free(r);
    kserve_leave(k);
}

/* A worker reads a large message; the API server's memory stays until it has. */
static void read_on_worker(struct infer *r)
{
    if (loop_work(r->k->o.loop, r->of->is_stream ? read_stream_work : read_infer_work, on_read,
                  r) != OK) {
        fail(r, ERR_BUSY, "too many requests are waiting to be read; try again");
        return;
    }
    serve_ref(r->serve);
    r->on_worker = true;
    r->k->n_on_worker++;
}

void kserve_infer(void *arg, struct grpc_call *c, struct str message)
{
    struct infer_call *of = grpc_on_end_arg(c);
    struct infer *r = MEM_NEW(struct infer);
    r->k = arg;
    r->of = of;
    list_push(&of->requests, &r->link);
    infer_answer_begin(&r->answer, &r->request, of->is_stream);
    if (!check_api(r)) return;
    r->is_admitted = grpc_admit(c);
    grpc_take_message(c, &r->body);
    if (message.n > READ_INLINE_MAX) {
        read_on_worker(r);
        return;
    }
    read_request(r, of->is_stream);
    start(r);
}

/* ---- calls ---- */

static void begin_call(struct kserve *k, struct grpc_call *c, bool is_stream)
{
    uint32_t tenant = 0;
    if (!kserve_knows(k, c, &tenant)) return;
    struct infer_call *of = MEM_NEW(struct infer_call);
    of->k = k;
    of->call = c;
    of->is_stream = is_stream;
    of->tenant = tenant;
    list_init(&of->requests);
    grpc_on_end(c, on_call_end, of);
}

void kserve_begin_infer(void *arg, struct grpc_call *c) { begin_call(arg, c, false); }

void kserve_begin_stream(void *arg, struct grpc_call *c) { begin_call(arg, c, true); }

void kserve_half_close(void *arg, struct grpc_call *c)
{
    struct infer_call *of = grpc_on_end_arg(c);
    (void)arg;
    of->half_closed = true;
    maybe_finish(of);
}
