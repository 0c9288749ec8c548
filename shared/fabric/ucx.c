/* ucx.c - UCP workers, endpoints and active messages; see ucx.h. Thread: as ucx.h. */
#include "shared/fabric/ucx.h"

#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucp/api/ucp.h>
#include <ucs/config/global_opts.h>
#include <ucs/debug/debug.h>

#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/mem.h"

enum {
    AM_MESSAGE = 0,
    PROGRESS_CALLS = 64,
    CLOSE_MS = 50 /* time for forced closes to complete; destroying the worker does the rest */
};

static const char DEFAULT_TLS[] = "tcp";

/* A send that is not complete. */
struct departure {
    struct fabric_peer *peer;
    bool runs;
    unsigned char header[FABRIC_HEADER_MAX];
    struct fabric_part parts[FABRIC_PARTS_MAX];
    size_t n_parts, n; /* n: bytes of all */
};

struct fabric_peer {
    struct fabric *f;
    ucp_ep_h ep; /* NULL: not connected */
    bool lost;
    uint32_t n_sending;
    struct departure *sends; /* [FABRIC_WINDOW] */
};

struct fabric {
    struct fabric_events events;
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_datatype_t gathered; /* a departure's parts */
    int fd;                  /* of the worker, which owns it */
    ucp_address_t *address;
    size_t address_bytes;
    struct fabric_peer *peers;
    uint32_t n_peers;
};

/* ---- what UCX does to a process ---- */

/* Restores, before main, the signal handlers that loading libucs replaces (backtraces, and HUP for
 * a debugger), unless the operator asked UCX for them. What nohup made ignored stays so. */
__attribute__((constructor)) static void keep_signals(void)
{
    static const int signals[] = { SIGILL, SIGSEGV, SIGBUS, SIGFPE, SIGHUP };
    if (getenv("UCX_HANDLE_ERRORS") || getenv("UCX_ERROR_SIGNALS") || getenv("UCX_DEBUG_SIGNO"))
        return;
    for (size_t i = 0; i < COUNT_OF(signals); i++) ucs_debug_disable_signal(signals[i]);
}

void fabric_keep_ucx_quiet(void)
{
    if (!getenv("UCX_LOG_LEVEL")) (void)ucs_global_opts_set_value("LOG_LEVEL", "fatal");
}

/* ---- loss ---- */

static void lose(struct fabric_peer *p, ucs_status_t st)
{
    struct fabric *f = p->f;
    if (p->lost) return;
    p->lost = true;
    f->events.lost(f->events.arg, (uint32_t)(p - f->peers), ucs_status_string(st));
}

static void on_endpoint_error(void *arg, ucp_ep_h ep, ucs_status_t st)
{
    (void)ep;
    lose(arg, st);
}

/* ---- sending ---- */

static void end_departure(struct departure *d)
{
    struct fabric_peer *p = d->peer;
    d->runs = false;
    p->n_sending--;
}

static void on_sent(void *request, ucs_status_t st, void *arg)
{
    struct departure *d = arg;
    end_departure(d);
    if (st != UCS_OK) lose(d->peer, st);
    ucp_request_free(request);
}

static struct departure *free_departure(struct fabric_peer *p)
{
    for (size_t i = 0; i < FABRIC_WINDOW; i++)
        if (!p->sends[i].runs) return &p->sends[i];
    return NULL;
}

/* Copies header and list. */
static void fill(struct departure *d, const void *header, size_t header_bytes,
                 const struct fabric_part *parts, size_t n_parts)
{
    memcpy(d->header, header, header_bytes);
    d->n = 0;
    d->n_parts = n_parts;
    for (size_t i = 0; i < n_parts; i++) {
        d->parts[i] = parts[i];
        d->n += parts[i].n;
    }
}

/* What UCX asks of a datatype: a departure is its own state. Bytes go into the transport's buffer,
 * as many at a time as it has room for. */
static void *gather_begin(void *context, const void *departure, size_t count)
{
    (void)context;
    (void)count;
    return (void *)departure;
}

static size_t gather_bytes(void *departure)
{
    const struct departure *d = departure;
    return d->n;
}

static size_t gather(void *departure, size_t at, void *to, size_t room)
{
    const struct departure *d = departure;
    const struct fabric_events *e = &d->peer->f->events;
    size_t done = 0;
    for (size_t i = 0; i < d->n_parts && done < room; i++) {
        const struct fabric_part *p = &d->parts[i];
        if (at < p->n) {
            const size_t n = p->n - at < room - done ? p->n - at : room - done;
            char *here = (char *)to + done;
            if (p->converts) e->convert(e->arg, here, p->data, p->at + at, n);
            else memcpy(here, (const char *)p->data + p->at + at, n);
            done += n;
        }
        at -= at < p->n ? at : p->n;
    }
    return done;
}

static void gather_end(void *departure) { (void)departure; }

static ucs_status_t make_datatype(struct fabric *f)
{
    static const ucp_generic_dt_ops_t ops = { .start_pack = gather_begin,
                                              .packed_size = gather_bytes,
                                              .pack = gather,
                                              .finish = gather_end };
    return ucp_dt_create_generic(&ops, NULL, &f->gathered);
}

/* What lies together here can be sent without a copy into UCX's buffer. */
static ucs_status_ptr_t start(struct departure *d, size_t header_bytes)
{
    const struct fabric_part *first = d->parts;
    const bool is_plain = d->n_parts == 0 || (d->n_parts == 1 && !first->converts);
    const void *data = d;
    if (is_plain) data = d->n ? (const char *)first->data + first->at : NULL;
    const ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                        UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_DATATYPE,
        .flags = UCP_AM_SEND_FLAG_EAGER, /* rendezvous over tcp is zero-copy (open_context) */
        .datatype = is_plain ? ucp_dt_make_contig(1) : d->peer->f->gathered,
        .cb.send = on_sent,
        .user_data = d,
    };
    return ucp_am_send_nbx(d->peer->ep, AM_MESSAGE, d->header, header_bytes, data,
                           is_plain ? d->n : 1, &param);
}

enum status fabric_send(struct fabric *f, uint32_t peer, const void *header, size_t header_bytes,
                        const struct fabric_part *parts, size_t n_parts)
{
    struct fabric_peer *p = &f->peers[peer];
    ASSERT(p->ep || p->lost);
    ASSERT(header_bytes <= FABRIC_HEADER_MAX);
    ASSERT(n_parts <= FABRIC_PARTS_MAX);
    struct departure *d = free_departure(p);
    if (p->lost) return ERR_PEER_LOST;
    if (!d) return ERR_BUSY;
    fill(d, header, header_bytes, parts, n_parts);
    ASSERT(d->n <= FABRIC_PIECE_MAX);
    d->runs = true;
    p->n_sending++;
    const ucs_status_ptr_t r = start(d, header_bytes);
    if (UCS_PTR_IS_PTR(r)) return OK;
    end_departure(d);
    if (!UCS_PTR_IS_ERR(r)) return OK;
    lose(p, UCS_PTR_STATUS(r));
    return ERR_PEER_LOST;
}

size_t fabric_n_sending(const struct fabric *f, uint32_t peer)
{
    const struct fabric_peer *p = &f->peers[peer];
    return p->lost ? 0 : p->n_sending;
}

/* ---- receiving ---- */

static ucs_status_t on_message(void *arg, const void *header, size_t header_bytes, void *data,
                               size_t n, const ucp_am_recv_param_t *param)
{
    struct fabric *f = arg;
    const struct fabric_events *e = &f->events;
    if (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) return UCS_OK; /* nobody sends it */
    void *place = e->place(e->arg, header, header_bytes, n);
    if (!place) return UCS_OK;
    if (n) memcpy(place, data, n);
    e->received(e->arg, header, header_bytes, n);
    return UCS_OK;
}

bool fabric_progress(struct fabric *f)
{
    int i = 0;
    while (i < PROGRESS_CALLS && ucp_worker_progress(f->worker)) i++;
    return i > 0;
}

bool fabric_arm(struct fabric *f)
{
    /* InfiniBand may complete between the last poll and the request for an event without one, and
     * UCX does not poll again (kvtransfer/ucx/conn.c). */
    return ucp_worker_arm(f->worker) == UCS_OK && ucp_worker_progress(f->worker) == 0;
}

int fabric_fd(const struct fabric *f) { return f->fd; }

/* ---- life ---- */

/* Sets what the operator's variable does not; UCX names a transport's own values without its
 * prefix. A name that this build of UCX does not have changes nothing. */
static void set(ucp_config_t *config, const char *variable, const char *name, const char *value)
{
    if (!getenv(variable)) (void)ucp_config_modify(config, name, value);
}

static enum status open_context(struct fabric *f, const char *tls, struct err *err)
{
    ucp_config_t *config;
    if (!tls) tls = getenv("UCX_TLS");
    if (!tls) tls = DEFAULT_TLS;
    fabric_keep_ucx_quiet();
    ucs_status_t st = ucp_config_read(NULL, NULL, &config);
    if (st != UCS_OK)
        return err_set(err, ERR_CONFIG, "ucx: the UCX_* variables cannot be read: %s",
                       ucs_status_string(st));
    (void)ucp_config_modify(config, "TLS", tls);
    /* Without zero-copy sends: UCX 1.13 to 1.20 completes one twice if its connection ends in the
     * middle, and a build with assertions (Debian's) then ends the process. A copy into a buffer
     * that stays in the cache costs nothing that can be measured; it has to hold a whole piece. */
    (void)ucp_config_modify(config, "ZCOPY_THRESH", "inf");
    set(config, "UCX_TCP_TX_SEG_SIZE", "TX_SEG_SIZE", "64k");
    /* A host that drops packets must not hold the caller until the kernel gives up (minutes). */
    set(config, "UCX_TCP_CONN_NB", "CONN_NB", "y");
    /* As in kvtransfer/ucx/setup.c: owners have deadlines of their own. */
    set(config, "UCX_KEEPALIVE_INTERVAL", "KEEPALIVE_INTERVAL", "inf");
    set(config, "UCX_ADAPTIVE_PROGRESS", "ADAPTIVE_PROGRESS", "n");
    const ucp_params_t p = {
        .field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME |
                      UCP_PARAM_FIELD_ESTIMATED_NUM_EPS,
        .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP,
        .name = "baton",
        .estimated_num_eps = f->n_peers,
    };
    st = ucp_init(&p, config, &f->context);
    ucp_config_release(config);
    if (st == UCS_OK) return OK;
    f->context = NULL;
    return err_set(err, ERR_NODEV,
                   "ucx: no device of this host can be used with the UCX transports %s: %s", tls,
                   ucs_status_string(st));
}

static enum status open_worker(struct fabric *f, struct err *err)
{
    const ucp_worker_params_t p = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE | UCP_WORKER_PARAM_FIELD_FLAGS,
        .thread_mode = UCS_THREAD_MODE_SERIALIZED,
        .flags = UCP_WORKER_FLAG_IGNORE_REQUEST_LEAK,
    };
    const ucp_am_handler_param_t am = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                      UCP_AM_HANDLER_PARAM_FIELD_ARG | UCP_AM_HANDLER_PARAM_FIELD_FLAGS,
        .id = AM_MESSAGE,
        .flags = UCP_AM_FLAG_WHOLE_MSG,
        .cb = on_message,
        .arg = f,
    };
    ucs_status_t st = ucp_worker_create(f->context, &p, &f->worker);
    if (st != UCS_OK) f->worker = NULL;
    if (st == UCS_OK) st = ucp_worker_set_am_recv_handler(f->worker, &am);
    if (st == UCS_OK) st = ucp_worker_get_efd(f->worker, &f->fd);
    if (st == UCS_OK) st = ucp_worker_get_address(f->worker, &f->address, &f->address_bytes);
    if (st == UCS_OK) st = make_datatype(f);
    if (st != UCS_OK) return err_set(err, ERR_IO, "no UCX worker: %s", ucs_status_string(st));
    if (f->address_bytes > FABRIC_ADDRESS_MAX)
        return err_set(
            err, ERR_CONFIG,
            "the UCX address has %zu bytes, more than %d: UCX_NET_DEVICES can name fewer "
            "devices",
            f->address_bytes, FABRIC_ADDRESS_MAX);
    return OK;
}

enum status fabric_open(const char *tls, uint32_t n_peers, const struct fabric_events *events,
                        struct fabric **out, struct err *err)
{
    ASSERT(n_peers <= FABRIC_PEERS_MAX);
    struct fabric *f = MEM_NEW(struct fabric);
    f->events = *events;
    f->n_peers = n_peers;
    f->peers = MEM_ARRAY(struct fabric_peer, n_peers);
    enum status st = open_context(f, tls, err);
    if (st == OK) st = open_worker(f, err);
    if (st == OK) *out = f;
    else fabric_close(f, 0);
    return st;
}

const void *fabric_address(const struct fabric *f, size_t *bytes)
{
    *bytes = f->address_bytes;
    return f->address;
}

enum status fabric_connect(struct fabric *f, uint32_t peer, const void *address, struct err *err)
{
    struct fabric_peer *p = &f->peers[peer];
    ASSERT(peer < f->n_peers);
    ASSERT(!p->ep);
    *p = (struct fabric_peer){ .f = f, .sends = MEM_ARRAY(struct departure, FABRIC_WINDOW) };
    for (size_t i = 0; i < FABRIC_WINDOW; i++) p->sends[i].peer = p;
    const ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER,
        .address = address,
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler = { .cb = on_endpoint_error, .arg = p },
    };
    const ucs_status_t st = ucp_ep_create(f->worker, &params, &p->ep);
    if (st == UCS_OK) return OK;
    p->ep = NULL;
    return err_set(err, ERR_IO, "the allowed UCX transports do not reach the peer: %s",
                   ucs_status_string(st));
}

/* Waits up to `ms` for a request of the worker. */
static void wait_for(struct fabric *f, ucs_status_ptr_t r, uint64_t end_ms)
{
    if (!UCS_PTR_IS_PTR(r)) return;
    while (ucp_request_check_status(r) == UCS_INPROGRESS && clock_ms() < end_ms) {
        struct pollfd p = { .fd = f->fd, .events = POLLIN };
        if (!fabric_progress(f) && fabric_arm(f)) (void)poll(&p, 1, 1);
    }
    ucp_request_free(r);
}

/* Closes an endpoint by force. */
static void close_endpoint(struct fabric_peer *p, uint64_t end_ms)
{
    const ucp_request_param_t force = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
        .flags = UCP_EP_CLOSE_FLAG_FORCE,
    };
    if (p->ep) wait_for(p->f, ucp_ep_close_nbx(p->ep, &force), end_ms);
    p->ep = NULL;
}

void fabric_drop(struct fabric *f, uint32_t peer)
{
    f->peers[peer].lost = true;
    close_endpoint(&f->peers[peer], clock_ms() + CLOSE_MS);
}

/* All at the same time: one that takes nothing keeps nobody else from what was sent to it. */
static void flush_all(struct fabric *f, uint64_t end_ms)
{
    static const ucp_request_param_t plain;
    ucs_status_ptr_t *flushes = MEM_ARRAY(ucs_status_ptr_t, f->n_peers);
    for (uint32_t i = 0; i < f->n_peers; i++)
        if (f->peers[i].ep && !f->peers[i].lost)
            flushes[i] = ucp_ep_flush_nbx(f->peers[i].ep, &plain);
    for (uint32_t i = 0; i < f->n_peers; i++) wait_for(f, flushes[i], end_ms);
    mem_free(flushes);
}

/* LIMIT: UCX 1.13 ends the process if a peer closes while this one still answers its first message
 * (an assertion, "got REP message"). Flushes give peers time to take the answer. */
void fabric_close(struct fabric *f, uint64_t flush_ms)
{
    if (!f) return;
    if (flush_ms) flush_all(f, clock_ms() + flush_ms);
    const uint64_t close_end = clock_ms() + CLOSE_MS;
    for (uint32_t i = 0; i < f->n_peers; i++) close_endpoint(&f->peers[i], close_end);
    if (f->address) ucp_worker_release_address(f->worker, f->address);
    if (f->worker) ucp_worker_destroy(f->worker);
    if (f->gathered) ucp_dt_destroy(f->gathered);
    if (f->context) ucp_cleanup(f->context);
    for (uint32_t i = 0; i < f->n_peers; i++) mem_free(f->peers[i].sends);
    mem_free(f->peers);
    mem_free(f);
}
