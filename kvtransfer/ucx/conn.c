/* conn.c - UCX workers, endpoints, puts and markers; see conn.h. Thread: transfer. */
#include "kvtransfer/ucx/conn.h"

#include <string.h>

#include "shared/base/clock.h"
#include "shared/base/mem.h"

/* time for a forced close to complete; destroying the worker does the rest */
enum { CLOSE_MS = 50 };

/* ---- callbacks: they only note; ucx_conn_progress acts ---- */

static void fail(struct ucx_conn *c, ucs_status_t st)
{
    if (st != UCS_OK && c->failed == UCS_OK) c->failed = st;
}

static ucs_status_t on_put_seq(void *arg, const void *header, size_t header_bytes, void *data,
                               size_t bytes, const ucp_am_recv_param_t *param)
{
    struct ucx_conn *c = arg;
    uint64_t seq;
    (void)data;
    (void)param;
    if (header_bytes != sizeof seq || bytes != 0) return UCS_OK;
    memcpy(&seq, header, sizeof seq);
    if (seq > c->seq_received) c->seq_received = seq;
    c->moved = true;
    return UCS_OK;
}

static void on_error(void *arg, ucp_ep_h ep, ucs_status_t st)
{
    (void)ep;
    fail(arg, st);
}

/* A copy or a flush is complete. */
static void on_done(void *request, ucs_status_t st, void *arg)
{
    struct ucx_put *p = arg;
    p->n_pending--;
    p->c->moved = true;
    fail(p->c, st);
    ucp_request_free(request);
}

static void on_put_seq_sent(void *request, ucs_status_t st, void *arg)
{
    struct ucx_conn *c = arg;
    c->seq_pending = false;
    c->moved = true;
    fail(c, st);
    ucp_request_free(request);
}

/* Counts the result of a call: complete (NULL), failed, or a request whose callback will come. */
static uint32_t pending(struct ucx_conn *c, ucs_status_ptr_t r)
{
    if (UCS_PTR_IS_ERR(r)) fail(c, UCS_PTR_STATUS(r));
    return UCS_PTR_IS_PTR(r);
}

/* ---- setting up ---- */

enum status ucx_conn_worker(struct ucx_conn *c, struct err *err)
{
    ucp_worker_params_t p = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE | UCP_WORKER_PARAM_FIELD_FLAGS,
        .thread_mode = UCS_THREAD_MODE_SINGLE,
        .flags = UCP_WORKER_FLAG_IGNORE_REQUEST_LEAK,
    };
    ucp_am_handler_param_t am = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                      UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = UCX_AM_PUT_SEQ,
        .cb = on_put_seq,
        .arg = c,
    };
    ucs_status_t st = ucp_worker_create(c->rail->context, &p, &c->worker);
    if (st == UCS_OK) st = ucp_worker_set_am_recv_handler(c->worker, &am);
    else c->worker = NULL;
    if (st == UCS_OK) st = ucp_worker_get_efd(c->worker, &c->event_fd);
    return st == UCS_OK ? OK : err_set(err, ERR_IO, "no UCX worker: %s", ucs_status_string(st));
}

static enum status send_address(struct ucx_conn *c, const char *address, size_t n)
{
    for (size_t at = 0; at < n; at += CONTROL_BODY_MAX) {
        size_t part = n - at < CONTROL_BODY_MAX ? n - at : CONTROL_BODY_MAX;
        TRY(control_send(c->control, UCX_FRAME_ADDRESS, 0, address + at, part));
    }
    return OK;
}

enum status ucx_conn_send_address(struct ucx_conn *c, const struct dev_mem *pool, struct err *err)
{
    ucp_address_t *address;
    size_t n = 0;
    ucs_status_t got = ucp_worker_get_address(c->worker, &address, &n);
    if (got != UCS_OK) return err_set(err, ERR_IO, "no UCX address: %s", ucs_status_string(got));
    struct ucx_region r = {
        .base = (uint64_t)(uintptr_t)pool->ptr,
        .bytes = pool->bytes,
        .address_bytes = (uint32_t)n,
        .key = { c->rail->key, c->rail->key_bytes },
    };
    struct buf region = { 0 };
    ucx_region_encode(&r, &region);
    enum status st = n <= UCX_ADDRESS_MAX ? send_address(c, (const char *)address, n)
                                          : ERR_TOO_LONG;
    if (st == OK) st = control_send(c->control, UCX_FRAME_REGION, 0, region.data, region.len);
    ucp_worker_release_address(c->worker, address);
    buf_release(&region);
    return st == OK ? OK
                    : err_set(err, st, "the UCX address (%zu bytes) cannot be told: %s", n,
                              status_text(st));
}

static enum status make_endpoint(struct ucx_conn *c, struct err *err)
{
    ucp_ep_params_t p = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER,
        .address = (const ucp_address_t *)c->address.data,
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler = { .cb = on_error, .arg = c },
    };
    ucs_status_t st = ucp_ep_create(c->worker, &p, &c->ep);
    if (st == UCS_OK) return OK;
    c->ep = NULL;
    return err_set(err, ERR_IO, "the allowed UCX transports do not reach the peer: %s",
                   ucs_status_string(st));
}

static void send_put_seq(struct ucx_conn *c, uint64_t seq)
{
    ucp_request_param_t p = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                        UCP_OP_ATTR_FIELD_FLAGS,
        .flags = UCP_AM_SEND_FLAG_EAGER,
        .cb.send = on_put_seq_sent,
        .user_data = c,
    };
    c->seq_sent = c->seq_buf = seq;
    c->seq_pending = pending(
        c, ucp_am_send_nbx(c->ep, UCX_AM_PUT_SEQ, &c->seq_buf, sizeof c->seq_buf, NULL, 0, &p));
}

/* Flushes everything that the endpoint was given so far, as the last request of slot p. */
static void flush(struct ucx_conn *c, struct ucx_put *p)
{
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .cb.send = on_done,
        .user_data = p,
    };
    p->n_pending += pending(c, ucp_ep_flush_nbx(c->ep, &param));
}

enum status ucx_conn_wireup(struct ucx_conn *c, const struct ucx_region *r, struct err *err)
{
    if (r->address_bytes != c->address.len) return err_set(err, ERR_FORMAT, "malformed set-up");
    if (r->bytes < c->need_bytes)
        return err_set(err, ERR_PEER_MISMATCH,
                       "the peer's pool has %llu bytes, its layout needs %llu",
                       (unsigned long long)r->bytes, (unsigned long long)c->need_bytes);
    TRY(make_endpoint(c, err));
    ucs_status_t st = ucp_ep_rkey_unpack(c->ep, r->key.p, &c->key);
    if (st != UCS_OK)
        return err_set(err, ERR_IO, "the key of the peer's pool is of no use here: %s",
                       ucs_status_string(st));
    c->remote_base = r->base;
    c->n_put = 1;
    struct ucx_put *p = &c->puts[1];
    *p = (struct ucx_put){ .c = c };
    send_put_seq(c, 1);
    flush(c, p);
    return OK;
}

/* ---- moving ---- */

void ucx_conn_put(struct ucx_conn *c, const struct kvt_env *env, const struct kvt_put *put)
{
    if (c->n_put == c->n_flushed) c->progress_ms = clock_ms(); /* nothing was in flight */
    struct ucx_put *p = &c->puts[++c->n_put % UCX_PUTS_MAX];
    *p = (struct ucx_put){ .c = c, .tag = put->tag, .bytes = put->head.bytes };
    c->in_flight += p->bytes;
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                        UCP_OP_ATTR_FIELD_MEMORY_TYPE | UCP_OP_ATTR_FIELD_MEMH |
                        UCP_OP_ATTR_FLAG_MULTI_SEND,
        .cb.send = on_done,
        .user_data = p,
        .memory_type = UCS_MEMORY_TYPE_HOST,
    };
    for (uint32_t i = 0; i < put->n_copies; i++) {
        const struct kvt_copy *k = &put->copies[i];
        param.memh = k->local < KVT_STAGING ? c->rail->pool : c->rail->staging;
        for (uint64_t at = 0; at < k->bytes && c->failed == UCS_OK; at += UCX_COPY_BYTES) {
            uint64_t bytes = k->bytes - at < UCX_COPY_BYTES ? k->bytes - at : UCX_COPY_BYTES;
            p->n_pending += pending(c,
                                    ucp_put_nbx(c->ep, kvt_source(env, k->local) + at, bytes,
                                                c->remote_base + k->remote + at, c->key, &param));
        }
    }
    if (c->failed == UCS_OK) flush(c, p);
}

size_t ucx_conn_progress(struct ucx_conn *c, uint64_t done[UCX_PUTS_MAX])
{
    size_t n = 0;
    for (int i = 0; i < UCX_PROGRESS_CALLS && ucp_worker_progress(c->worker); i++) {}
    if (c->failed != UCS_OK) return 0;
    while (c->n_flushed < c->n_put && c->puts[(c->n_flushed + 1) % UCX_PUTS_MAX].n_pending == 0) {
        const struct ucx_put *p = &c->puts[++c->n_flushed % UCX_PUTS_MAX];
        c->in_flight -= p->bytes;
        if (c->n_flushed > 1) done[n++] = p->tag;
    }
    if (c->n_flushed > c->seq_sent && !c->seq_pending) send_put_seq(c, c->n_flushed);
    return n;
}

bool ucx_conn_is_stalled(struct ucx_conn *c, uint64_t now_ms)
{
    bool waits = c->base.incoming ? c->n_held > 0 : c->n_put != c->n_flushed || c->seq_pending;
    if (c->moved || !waits) c->progress_ms = now_ms;
    c->moved = false;
    uint64_t rest = now_ms > c->progress_ms ? now_ms - c->progress_ms : 0;
    if (rest > (c->base.incoming ? 2 * UCX_STALL_MS : UCX_STALL_MS)) return true;
    return rest > UCX_PORT_DOWN_MS && !ucx_device_active(c->rail->device);
}

bool ucx_conn_arm(struct ucx_conn *c)
{
    if (c->armed) return true;
    if (ucp_worker_arm(c->worker) != UCS_OK) return false;
    /* A completion between the last poll of the queue and the request for an event causes no event
     * (ibv_req_notify_cq(3); NICs that compare indices cause one anyway, Soft-RoCE does not). UCX
     * does not poll again, so this code does. */
    c->armed = ucp_worker_progress(c->worker) == 0 && c->failed == UCS_OK;
    return c->armed;
}

void ucx_conn_tear_down(struct ucx_conn *c)
{
    if (c->key) ucp_rkey_destroy(c->key);
    c->key = NULL;
    /* Destroying the worker also ends an endpoint that is still wiring up. Closing that by force
     * trips an assertion in UCX 1.13 (a request for connection in the UD endpoint's queue); nothing
     * reads or writes memory over it yet. */
    if (c->ep && c->n_flushed) {
        ucp_request_param_t p = {
            .op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
            .flags = UCP_EP_CLOSE_FLAG_FORCE,
        };
        ucs_status_ptr_t r = ucp_ep_close_nbx(c->ep, &p);
        for (uint64_t end = clock_ms() + CLOSE_MS; UCS_PTR_IS_PTR(r) &&
                                                   ucp_request_check_status(r) == UCS_INPROGRESS &&
                                                   clock_ms() < end;)
            (void)ucp_worker_progress(c->worker);
        if (UCS_PTR_IS_PTR(r)) ucp_request_free(r);
    }
    c->ep = NULL;
    if (c->worker) ucp_worker_destroy(c->worker);
    c->worker = NULL;
    c->event_fd = -1;
    buf_release(&c->address);
    mem_free(c->held);
    c->held = NULL;
    c->n_held = 0;
}
