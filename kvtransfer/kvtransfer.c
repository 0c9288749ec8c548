/* kvtransfer.c - the public functions: create a kvt, make the opaque byte strings, and post
 * commands to the transfer thread.
 *
 * Nothing here waits for that thread. Grants and tickets are complete when their call returns,
 * because the caller's thread claims their slots (session.h, tickets.h); everything else is a
 * command.
 * Thread: any; create and free: the owner's. */
#include "kvtransfer/kvtransfer.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "kvtransfer/fault/fault.h"
#include "kvtransfer/progress.h"
#include "shared/base/clock.h"
#include "shared/base/hash/hash.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

enum { TRANSFERS_MAX = 65536 };

/* ---- life ---- */

static enum status check_device(const struct kvt_options *o, struct err *err)
{
    if (o->mem->kind == DEV_MEM_HOST) return OK;
    if (!o->device)
        return err_set(err, ERR_INVALID, "the KV pool is in GPU memory, and no device was given");
    if (kv_layout_piece_bytes(&o->layout) <= UINT32_MAX) return OK;
    return err_field(err, ERR_UNSUPPORTED, "block_tokens",
                     "a KV piece of %zu bytes (%u tokens of a layer) cannot be moved from GPU "
                     "memory: less than 4 GiB can; give a smaller --block-size",
                     kv_layout_piece_bytes(&o->layout), o->layout.block_tokens);
}

static enum status check_options(const struct kvt_options *o, struct err *err)
{
    TRY(kv_layout_check(&o->layout, err));
    if (o->mem->bytes < kv_layout_pool_bytes(&o->layout))
        return err_set(err, ERR_INVALID, "the KV pool has %zu bytes, its layout needs %zu",
                       o->mem->bytes, kv_layout_pool_bytes(&o->layout));
    TRY(check_device(o, err));
    if (o->n_transfers < 1 || o->n_transfers > TRANSFERS_MAX)
        return err_set(err, ERR_INVALID, "%u KV transfers at once: 1 to %d are possible",
                       o->n_transfers, TRANSFERS_MAX);
    return OK;
}

/* Whether the transport can move this pool. One whose receiver scatters can, through staging
 * memory; others must support GPU memory, or find out at open whether they can. */
static enum status fits_pool(const struct kvt *k, const struct kvt_transport_ops *ops, bool faults,
                             struct err *err)
{
    if (!k->env.device || (ops->caps & (KVT_CAP_RECEIVER_SCATTERS | KVT_CAP_GPUDIRECT))) return OK;
    if (!(ops->caps & KVT_CAP_DEVICE_MEM))
        return err_set(err, ERR_NODEV,
                       "%s moves KV in CPU memory only, and this node's is in GPU memory: ipc "
                       "and tcp move that",
                       ops->name);
    return faults ? err_set(err, ERR_UNSUPPORTED,
                            "a fault plan needs to read the KV that %s pushes from GPU memory",
                            ops->name)
                  : OK;
}

/* ERR_NODEV is not an error yet, because another allowed transport may work. `why` collects such
 * sentences. */
static enum status open_transport(struct kvt *k, const struct kvt_transport_ops *ops,
                                  const struct kvt_options *o, struct buf *why, struct err *err)
{
    struct kvt_open_transport transport = { .ops = ops };
    if (k->n_transports == KVT_TRANSPORTS_MAX)
        return err_set(err, ERR_UNSUPPORTED, "more than %d KV transfer protocols",
                       KVT_TRANSPORTS_MAX);
    const char *fault = k->env.tuning.fault;
    struct err reason = { 0 };
    enum status st = fits_pool(k, ops, fault && *fault, &reason);
    if (st == OK)
        st = fault && *fault
                 ? kvt_fault_open(ops, &k->env, fault, o->metrics, &transport.t, &reason)
                 : ops->open(&k->env, &transport.t, &reason);
    if (st == ERR_NODEV) {
        buf_printf(why, "%s%s", why->len ? "; " : ": ", reason.text);
        log_line(o->named ? LOG_WARN : LOG_INFO, "kv transport not available",
                 "transport=%s why=\"%s\"", ops->name, reason.text);
        return OK;
    }
    if (st != OK && err) *err = reason;
    TRY(st);
    transport.ops = transport.t->ops; /* not `ops` when faults are injected */
    transport.ops->export_address(transport.t, &transport.address);
    k->transports[k->n_transports++] = transport;
    return OK;
}

static bool names_transport(const char *protocols, const struct kvt_transport_ops *ops)
{
    struct str rest = str_of(protocols), item;
    while (str_split(&rest, ',', &item))
        if (str_eq_c(str_trim(item), ops->name)) return true;
    return false;
}

/* Opens the named transports in the order of kvt_transports: the best one does not depend on the
 * order of the list. */
static enum status open_transports(struct kvt *k, const struct kvt_options *o, struct err *err)
{
    struct str rest = str_of(o->protocols), item;
    struct buf why = { 0 };
    const struct kvt_transport_ops *ops;
    while (str_split(&rest, ',', &item))
        if (str_trim(item).n) TRY(kvt_transport_find(str_trim(item), &ops, err));
    enum status st = OK;
    for (size_t i = 0; kvt_transports[i] && st == OK; i++)
        if (names_transport(o->protocols, kvt_transports[i]))
            st = open_transport(k, kvt_transports[i], o, &why, err);
    if (st == OK && k->n_transports == 0)
        st = err_set(err, ERR_CONFIG,
                     "no KV transfer protocol of '%s' is available on this host (ipc and tcp need "
                     "no device)%s",
                     o->protocols ? o->protocols : "", why.len ? why.data : "");
    buf_release(&why);
    return st;
}

static uint64_t at_least(uint64_t bytes, uint64_t least) { return bytes > least ? bytes : least; }

static bool is_allowed(const struct kvt_options *o, unsigned cap)
{
    for (size_t i = 0; kvt_transports[i]; i++)
        if ((kvt_transports[i]->caps & cap) && names_transport(o->protocols, kvt_transports[i]))
            return true;
    return false;
}

/* Creates staging memory for several pieces of any peer's size, before the transports open and
 * register it. For a pool in GPU memory, transports that send host memory and peers of another
 * layout need it, and transports that scatter need a second one to receive into. */
static enum status make_staging(struct kvt *k, const struct kvt_options *o, struct err *err)
{
    uint64_t bytes = 8 * (uint64_t)kv_layout_piece_bytes(&k->core.layout);
    if (o->mem->kind == DEV_MEM_HOST)
        return kvt_staging_create(NULL, at_least(bytes, KVT_STAGING_BYTES), &k->core.staging, err);
    TRY(kvt_staging_create(o->device, at_least(bytes, KVT_STAGING_BYTES), &k->core.staging, err));
    TRY(kvt_staging_add_device(k->core.staging, err));
    if (!is_allowed(o, KVT_CAP_RECEIVER_SCATTERS)) return OK;
    return kvt_staging_create(o->device, at_least(bytes, KVT_RECV_STAGING_BYTES),
                              &k->core.recv_staging, err);
}

/* Creates the GPU jobs of a pool in GPU memory. */
static enum status make_gpu_jobs(struct kvt *k, const struct kvt_options *o, struct err *err)
{
    if (o->mem->kind == DEV_MEM_HOST) return OK;
    struct kvt_gpu_jobs_options w = {
        .device = o->device,
        .pool = o->mem->ptr,
        .staging = k->core.staging,
        .max_copies = kvt_plan_max_copies(&o->layout),
        .on_done = kvt_progress_wake,
        .arg = k,
    };
    TRY(kvt_gpu_jobs_create(&w, &k->core.send_jobs, err));
    w.staging = k->core.recv_staging;
    return kvt_gpu_jobs_create(&w, &k->core.recv_jobs, err);
}

enum status kvt_create(const struct kvt_options *o, struct kvt **out, struct err *err)
{
    TRY(check_options(o, err));
    struct kvt *k = MEM_NEW(struct kvt);
    k->wake_fd = k->epoll_fd = -1;
    list_init(&k->peers);
    kvt_core_init(&k->core, o);
    enum status st = make_staging(k, o, err);
    if (st == OK) st = make_gpu_jobs(k, o, err);
    k->listen_host = o->listen_host ? mem_strdup(o->listen_host) : NULL;
    k->advertise_host = o->advertise_host ? mem_strdup(o->advertise_host) : NULL;
    random_bytes(k->node, sizeof k->node);
    k->env = (struct kvt_env){
        .layout = o->layout,
        .mem = o->mem,
        .device = o->mem->kind == DEV_MEM_HOST ? NULL : o->device,
        .tuning = o->tuning,
        .listen_host = k->listen_host,
        .advertise_host = k->advertise_host,
        .port = o->port,
        .max_copies = kvt_plan_max_copies(&o->layout),
        .max_peers = KVT_PEERS_MAX,
        .arg = k,
        .staging = k->core.staging ? kvt_staging_mem(k->core.staging) : NULL,
        .staging_device = k->core.staging ? kvt_staging_device_mem(k->core.staging) : NULL,
        .admit = kvt_progress_admit,
        .scatter = kvt_progress_scatter,
        .scattered = kvt_progress_scattered,
    };
    if (st == OK) st = open_transports(k, o, err);
    if (st == OK) st = kvt_progress_start(k, err);
    if (st != OK) {
        kvt_free(k);
        return st;
    }
    *out = k;
    return OK;
}

void kvt_free(struct kvt *k)
{
    if (!k) return;
    kvt_progress_stop(k);
    for (uint32_t i = 0; i < k->n_transports; i++) {
        k->transports[i].ops->close(k->transports[i].t);
        buf_release(&k->transports[i].address);
    }
    kvt_core_release(&k->core);
    mem_free(k->listen_host);
    mem_free(k->advertise_host);
    mem_free(k);
}

uint16_t kvt_port(const struct kvt *k)
{
    uint16_t port = 0;
    for (uint32_t i = 0; i < k->n_transports; i++) {
        bool tcp = strcmp(k->transports[i].ops->name, "tcp") == 0;
        if (tcp || !port) port = k->transports[i].ops->port(k->transports[i].t);
        if (tcp) break;
    }
    return port;
}

void kvt_available(const struct kvt *k, struct buf *out)
{
    for (uint32_t i = 0; i < k->n_transports; i++)
        buf_printf(out, "%s%s", i ? "," : "", k->transports[i].ops->name);
}

/* Abstract sockets, over which ipc connects, are seen within one network namespace of one running
 * kernel. */
static uint64_t local_host(void)
{
    char boot[64] = "", net[64] = "";
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (!f) return 0;
    bool is_read = fgets(boot, sizeof boot, f) != NULL;
    fclose(f);
    ssize_t n = readlink("/proc/self/ns/net", net, sizeof net);
    if (!is_read || n <= 0) return 0;
    return hash_64(net, (size_t)n, hash_64(boot, strlen(boot), 0)) | 1;
}

uint64_t kvt_reach(const struct kvt *k, struct buf *between_hosts)
{
    bool is_local = false;
    size_t before = between_hosts->len;
    for (uint32_t i = 0; i < k->n_transports; i++) {
        const struct kvt_transport_ops *ops = k->transports[i].ops;
        if (ops->caps & KVT_CAP_SAME_HOST) is_local = true;
        else buf_printf(between_hosts, "%s%s", between_hosts->len > before ? "," : "", ops->name);
    }
    return is_local ? local_host() : 0;
}

/* ---- posting ---- */

/* Posts new work, which is refused if the thread is far behind. */
static enum status post(struct kvt *k, struct kvt_command cmd)
{
    if (mailbox_len(k->mailbox) >= KVT_COMMANDS_SOFT) return ERR_FULL;
    return mailbox_post(k->mailbox, &cmd);
}

/* Posts an end or cancel, which cannot be refused. If the mailbox is full it goes onto a list that
 * the thread takes as a whole. The thread runs the list after everything that was in the mailbox at
 * that time, so after everything that the caller had posted before. */
static void post_always(struct kvt *k, struct kvt_command cmd)
{
    if (mailbox_post(k->mailbox, &cmd) != ERR_FULL)
        return; /* accepted, or the mailbox is closed and everything ends */
    struct kvt_overflow *overflow = MEM_NEW(struct kvt_overflow);
    overflow->cmd = cmd;
    overflow->next = atomic_load_explicit(&k->overflow, memory_order_relaxed);
    /* release: the thread's exchange sees the command, and a mailbox length that includes what this
     * caller posted before */
    while (!atomic_compare_exchange_weak_explicit(&k->overflow, &overflow->next, overflow,
                                                  memory_order_release, memory_order_relaxed)) {}
}

/* ---- connecting ---- */

void kvt_hello(const struct kvt *k, struct buf *out)
{
    struct kvt_hello_msg m = {
        .layout = k->core.layout,
        .checksum = k->core.checksum,
        .lossy = k->core.lossy,
    };
    memcpy(m.node, k->node, sizeof m.node);
    kvt_hello_encode(&m, out);
}

enum status kvt_answer(struct kvt *k, struct str hello, struct buf *out, struct err *err)
{
    struct kvt_hello_msg theirs;
    TRY(kvt_hello_decode(hello, &theirs, err));
    bool lossy = theirs.lossy || k->core.lossy;
    /* The sender checks its own staging memory. */
    TRY(kvt_plan_check(&k->core.layout, &theirs.layout, false, lossy, UINT64_MAX, err));
    struct kvt_answer_msg m = {
        .layout = k->core.layout,
        .checksum = theirs.checksum && k->core.checksum,
        .lossy = lossy,
        .n_transports = k->n_transports,
    };
    memcpy(m.node, theirs.node, sizeof m.node);
    if (kvt_tickets_make(&k->tickets, clock_ms(), m.ticket) != OK)
        return err_set(err, ERR_FULL, "%d KV connections are being made, the limit",
                       KVT_TICKETS_MAX);
    for (uint32_t i = 0; i < k->n_transports; i++) {
        snprintf(m.transports[i].name, sizeof m.transports[i].name, "%s",
                 k->transports[i].ops->name);
        m.transports[i].address = buf_str(&k->transports[i].address);
    }
    kvt_answer_encode(&m, out);
    return OK;
}

/* Our transports that the answer offers too, in our order. */
static struct kvt_route *make_route(struct kvt *k, const struct kvt_answer_msg *a)
{
    struct kvt_route *r = MEM_NEW(struct kvt_route);
    memcpy(r->ticket, a->ticket, sizeof r->ticket);
    for (uint32_t i = 0; i < k->n_transports; i++)
        for (uint32_t j = 0; j < a->n_transports; j++)
            if (r->n < KVT_TRANSPORTS_MAX &&
                str_eq_c(str_of(a->transports[j].name), k->transports[i].ops->name)) {
                buf_add_str(&r->addresses[r->n], a->transports[j].address);
                r->transports[r->n++] = &k->transports[i];
                break;
            }
    return r;
}

static enum status no_common(const struct kvt *k, const struct kvt_answer_msg *a, struct err *err)
{
    struct buf mine = { 0 }, theirs = { 0 };
    for (uint32_t i = 0; i < k->n_transports; i++)
        buf_printf(&mine, "%s%s", i ? "," : "", k->transports[i].ops->name);
    for (uint32_t i = 0; i < a->n_transports; i++)
        buf_printf(&theirs, "%s%s", i ? "," : "", a->transports[i].name);
    enum status st = err_set(
        err, ERR_UNSUPPORTED,
        "no KV transfer protocol in common: this node allows %s, the decode node %s", mine.data,
        theirs.data);
    buf_release(&mine);
    buf_release(&theirs);
    return st;
}

/* A free handle, or 0. */
static uint64_t claim_handle(struct kvt *k)
{
    uint64_t serial = atomic_fetch_add_explicit(&k->next_handle, 1, memory_order_relaxed) + 1;
    for (uint64_t i = 0; i < KVT_PEERS_MAX; i++) {
        uint64_t index = (serial + i) % KVT_PEERS_MAX, expected = 0,
                 handle = serial * KVT_PEERS_MAX + index;
        if (atomic_compare_exchange_strong_explicit(&k->handles[index], &expected, handle,
                                                    memory_order_acquire, memory_order_relaxed))
            return handle;
    }
    return 0;
}

enum status kvt_connect(struct kvt *k, struct str answer, uint64_t *peer, struct err *err)
{
    struct kvt_answer_msg a;
    TRY(kvt_answer_decode(answer, &a, err));
    if (memcmp(a.node, k->node, sizeof a.node) != 0)
        return err_set(err, ERR_PEER_MISMATCH,
                       "that KV transfer answer was made for another node, or for this one before "
                       "it restarted");
    TRY(kvt_plan_check(&k->core.layout, &a.layout, true, a.lossy || k->core.lossy,
                       kvt_staging_piece_max(k->core.staging), err));
    if (!kvt_plan_direct(&k->core.layout, &a.layout))
        log_info("kv is converted for this peer",
                 "from=%s block_tokens=%u to=%s to_block_tokens=%u",
                 kv_dtype_name(k->core.layout.dtype), k->core.layout.block_tokens,
                 kv_dtype_name(a.layout.dtype), a.layout.block_tokens);
    struct kvt_peer *p = MEM_NEW(struct kvt_peer);
    kvt_peer_init(p);
    p->layout = a.layout;
    p->checksum = a.checksum;
    p->route = make_route(k, &a);
    uint32_t n_routes = p->route->n;
    uint64_t handle = p->handle = n_routes ? claim_handle(k) : 0;
    enum status st = handle ? post(k, (struct kvt_command){ .kind = KVT_DO_CONNECT, .p = p })
                            : ERR_FULL;
    if (st == OK) {
        *peer = handle;
        return OK;
    }
    if (handle) atomic_store_explicit(&k->handles[handle % KVT_PEERS_MAX], 0, memory_order_release);
    kvt_route_free(p->route);
    mem_free(p);
    return n_routes ? err_set(err, st, "too many KV connections") : no_common(k, &a, err);
}

void kvt_disconnect(struct kvt *k, uint64_t peer)
{
    if (peer) post_always(k, (struct kvt_command){ .kind = KVT_DO_DISCONNECT, .id = peer });
}

/* ---- transfers ---- */

enum status kvt_expect(struct kvt *k, uint64_t id, const int32_t *blocks, uint32_t n_blocks,
                       uint32_t n_skip, uint32_t n_tokens, struct buf *out)
{
    return kvt_expect_heads(k, id, 0, k->core.layout.n_kv_heads, blocks, n_blocks, n_skip, n_tokens,
                            out);
}

enum status kvt_expect_heads(struct kvt *k, uint64_t id, uint32_t first_head, uint32_t n_heads,
                             const int32_t *blocks, uint32_t n_blocks, uint32_t n_skip,
                             uint32_t n_tokens, struct buf *out)
{
    struct kvt_expectation e = {
        .id = id,
        .first_head = first_head,
        .n_heads = n_heads,
        .blocks = blocks,
        .n_blocks = n_blocks,
        .n_skip = n_skip,
        .n_tokens = n_tokens,
    };
    return kvt_recv_claim(&k->core, &e, out);
}

void kvt_expect_cancel(struct kvt *k, uint64_t id)
{
    post_always(k, (struct kvt_command){ .kind = KVT_DO_EXPECT_CANCEL, .id = id });
}

enum status kvt_send_open(struct kvt *k, uint64_t id, uint64_t peer, struct str grant,
                          struct err *err)
{
    return kvt_send_open_of(k, id, id, peer, grant, err);
}

enum status kvt_send_open_of(struct kvt *k, uint64_t id, uint64_t of, uint64_t peer,
                             struct str grant, struct err *err)
{
    struct kvt_send *s = NULL;
    TRY(kvt_send_create(&k->core, id, of, peer, grant, &s, err));
    enum status st = post(k, (struct kvt_command){ .kind = KVT_DO_OPEN, .p = s });
    if (st == OK) return OK;
    kvt_send_free(&k->core, s);
    return err_set(err, st, "the transfer thread is too far behind");
}

enum status kvt_send_ready(struct kvt *k, uint64_t id, uint32_t layer, uint32_t begin, uint32_t end,
                           const int32_t *blocks)
{
    return kvt_send_ready_after(k, id, layer, begin, end, blocks, 0);
}

enum status kvt_send_ready_after(struct kvt *k, uint64_t id, uint32_t layer, uint32_t begin,
                                 uint32_t end, const int32_t *blocks, uint64_t event)
{
    if (layer >= k->core.layout.n_layers || begin > end) return ERR_INVALID;
    uint32_t n = kvt_plan_n_blocks(&k->core.layout, end);
    if (n > KVT_GRANT_BLOCKS_MAX) return ERR_INVALID;
    struct kvt_ready *r = mem_try_calloc(1, sizeof *r + sizeof r->blocks[0] * n);
    if (!r) return ERR_NOMEM;
    r->id = id;
    r->layer = layer;
    r->begin = begin;
    r->end = end;
    r->event = event;
    if (n) memcpy(r->blocks, blocks, sizeof *blocks * n);
    enum status st = post(k, (struct kvt_command){ .kind = KVT_DO_READY, .p = r });
    if (st != OK) mem_free(r);
    return st;
}

void kvt_send_finish(struct kvt *k, uint64_t id)
{
    post_always(k, (struct kvt_command){ .kind = KVT_DO_FINISH, .id = id, .stamp = clock_ns() });
}

void kvt_send_finish_when_complete(struct kvt *k, uint64_t id)
{
    post_always(k, (struct kvt_command){
                       .kind = KVT_DO_FINISH,
                       .id = id,
                       .stamp = clock_ns(),
                       .awaits_rest = true,
                   });
}

void kvt_send_cancel(struct kvt *k, uint64_t id)
{
    post_always(k, (struct kvt_command){ .kind = KVT_DO_SEND_CANCEL, .id = id });
}
