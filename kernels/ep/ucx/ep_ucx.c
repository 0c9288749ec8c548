/* ep_ucx.c - backend `ucx`: sizes, and how ranks meet and part. ep_ucx.h describes the rest.
 *
 * Ranks tell each other a random number and their address, which may take several exchanges. The
 * hash of all numbers is the object's key. Then all connect, and have heard from all others before
 * any may leave ep_create, also with an error.
 * Thread: loading. */
#include "kernels/ep/ucx/ep_ucx.h"

#include <assert.h>
#include <errno.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "kernels/host/pages.h"
#include "shared/base/arith.h"
#include "shared/base/hash/hash.h"
#include "shared/base/mem.h"

enum {
    ALIGN = 128,
    ADDRESS_PART = 240,  /* bytes of an address in one exchange */
    CONNECT_MS = 10000,  /* or config.connect_ms; or timeout_ms, if that is less */
    PART_MS = 2000,      /* how long a rank that leaves gives the others to take what it sent */
    PART_FAULTY_MS = 100 /* after a fault */
};

/* What a rank tells the others first. */
struct offer {
    struct ep_ucx_window_offer window;
    uint64_t nonce;
    uint32_t address_bytes;
};
static_assert(sizeof(struct offer) <= EP_PAYLOAD_BYTES, "the offer's room");

/* ---- sizes ---- */

static void lay_out_rows(struct ep_ucx *u)
{
    const struct ep_config *c = &u->base.config;
    u->row_bytes = ep_row_bytes(c, &u->scales_at);
    u->back_bytes = (size_t)c->hidden * dtype_block_bytes(c->back);
    u->plan_bytes = sizeof(int32_t) * (size_t)(c->size + u->base.n_local);
    u->order_bytes = sizeof(int32_t) * ((size_t)u->base.n_local + ep_pair_slots(c));
}

static char *place(size_t *at, size_t n, size_t bytes)
{
    char *here = (char *)*at;
    *at = round_up(*at + n * bytes, ALIGN);
    return here;
}

/* Sets the places as offsets, and memory_bytes. */
static void lay_out(struct ep_ucx *u)
{
    const struct ep_config *c = &u->base.config;
    const size_t size = (size_t)c->size, turns = EP_UCX_TURNS * size;
    size_t at = 0;
    u->part_bytes = round_up(c->collective_bytes, ALIGN);
    if (c->placement.n_logical > 0) {
        lay_out_rows(u);
        ep_ucx_lay_out_window(u);
        u->results = place(&at, ep_pair_slots(c), u->back_bytes);
        u->plans = place(&at, turns, u->plan_bytes);
        u->orders = place(&at, size, u->order_bytes);
    }
    u->parts = place(&at, turns, u->part_bytes);
    u->memory_bytes = pages_round(at ? at : 1);
}

static enum status make_memory(struct ep_ucx *u, struct err *err)
{
    char **const places[] = { &u->results, &u->plans, &u->orders, &u->parts };
    lay_out(u);
    u->memory = pages_map(u->memory_bytes);
    if (!u->memory)
        return err_set(err, ERR_NOMEM, "ep: no %zu MiB of memory for rows of %d ranks",
                       u->memory_bytes >> 20, u->base.config.size);
    for (size_t i = 0; i < COUNT_OF(places); i++) *places[i] = u->memory + (size_t)*places[i];
    return OK;
}

static void make_arrays(struct ep_ucx *u)
{
    const struct ep_config *c = &u->base.config;
    const struct ep_placement *p = &c->placement;
    const size_t size = (size_t)c->size, n_local = (size_t)u->base.n_local;
    for (size_t t = 0; t < EP_UCX_TURNS; t++) u->in[t] = MEM_ARRAY(struct ep_ucx_in, size);
    u->out = MEM_ARRAY(struct ep_ucx_out, size);
    u->told = MEM_ARRAY(bool, size);
    u->gone = MEM_ARRAY(bool, size);
    if (p->n_logical == 0) return;
    u->chosen = MEM_ARRAY(int32_t, ep_pair_slots(c));
    u->index = MEM_ARRAY(int32_t, ep_pair_slots(c));
    u->begin = MEM_ARRAY(int32_t, (size_t)p->n_physical + 1);
    u->owner = MEM_ARRAY(int32_t, (size_t)p->n_physical);
    u->to_ranks = MEM_ARRAY(int32_t, size);
    u->order = MEM_ARRAY(int32_t, (size_t)p->n_physical + ep_pair_slots(c));
    u->sent = MEM_ARRAY(int32_t, size * (size_t)c->max_rows);
    u->n_sent = MEM_ARRAY(int32_t, size);
    u->last_sent = MEM_ARRAY(int32_t, size);
    u->tails = MEM_ARRAY(char *, size);
    u->reads_mine = MEM_ARRAY(bool, size);
    u->cursors = MEM_ARRAY(size_t, size);
    u->by_expert = MEM_ARRAY(int32_t, n_local + 1);
    u->slot_begin = MEM_ARRAY(int32_t, n_local + 1);
    u->x_rows = MEM_ARRAY(int32_t, ep_max_slots(c));
    for (int32_t r = 0; r < c->size; r++)
        for (int32_t x = p->first[r]; x < p->first[r + 1]; x++) u->owner[x] = r;
}

static void release_arrays(struct ep_ucx *u)
{
    void *const arrays[] = { u->in[0],   u->in[1],     u->out,        u->told,      u->gone,
                             u->chosen,  u->index,     u->begin,      u->owner,     u->to_ranks,
                             u->order,   u->sent,      u->n_sent,     u->last_sent, u->reads_mine,
                             u->cursors, u->by_expert, u->slot_begin, u->x_rows };
    for (size_t i = 0; i < COUNT_OF(arrays); i++) mem_free(arrays[i]);
}

/* ---- life ---- */

static void release(struct ep_ucx *u, uint64_t part_ms)
{
    fabric_close(u->fabric, part_ms);
    ep_ucx_close_windows(u);
    if (u->memory) pages_unmap(u->memory, u->memory_bytes);
    if (u->wake_fd >= 0) close(u->wake_fd);
    run_delay_release(&u->delay);
    release_arrays(u);
    ep_release(&u->base);
    mem_free(u);
}

static enum status open_own(struct ep_ucx *u, struct err *err)
{
    const struct fabric_events events = ep_ucx_events(u);
    TRY(make_memory(u, err));
    make_arrays(u);
    random_bytes(&u->nonce, sizeof u->nonce);
    u->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (u->wake_fd < 0) return err_set(err, ERR_IO, "ep: no eventfd: %s", strerror(errno));
    if (u->base.config.placement.n_logical > 0) TRY(ep_ucx_open_window(u, err));
    if (u->base.config.size == 1) return OK;
    return fabric_open(NULL, (uint32_t)u->base.config.size, &events, &u->fabric, err);
}

/* The addresses of all ranks, `stride` bytes apart. */
static enum status exchange_addresses(struct ep_ucx *u, char *all, size_t stride, struct err *err)
{
    const struct ep_config *c = &u->base.config;
    const size_t size = (size_t)c->size;
    char *parts = MEM_ARRAY(char, size *ADDRESS_PART);
    size_t n;
    const char *mine = fabric_address(u->fabric, &n);
    enum status st = OK;
    for (size_t at = 0; at < stride && st == OK; at += ADDRESS_PART) {
        char part[ADDRESS_PART] = { 0 };
        if (at < n) memcpy(part, mine + at, min_size(n - at, ADDRESS_PART));
        st = c->exchange(c->exchange_arg, part, ADDRESS_PART, parts, err);
        for (size_t r = 0; r < size && st == OK; r++)
            memcpy(all + r * stride + at, parts + r * ADDRESS_PART, ADDRESS_PART);
    }
    mem_free(parts);
    return st;
}

static bool next_nothing(struct ep_ucx *u, int32_t to, size_t *cursor, struct ep_ucx_run *run)
{
    (void)u, (void)to, (void)cursor, (void)run;
    return false;
}

static enum status connect_all(struct ep_ucx *u, const char *addresses, size_t stride,
                               struct err *err)
{
    const struct ep_config *c = &u->base.config;
    for (int32_t r = 0; r < c->size; r++)
        if (r != c->rank)
            TRY(fabric_connect(u->fabric, (uint32_t)r, addresses + (size_t)r * stride, err));
    u->wait_ms = min_i32(c->timeout_ms, c->connect_ms ? c->connect_ms : CONNECT_MS);
    ep_ucx_begin(u, next_nothing);
    const enum status st = ep_ucx_wait(u, err);
    u->wait_ms = c->timeout_ms;
    return st;
}

/* What the ranks offered first. Sets the key. */
static size_t read_offers(struct ep_ucx *u, const struct ep_hello *hellos,
                          struct ep_ucx_window_offer *windows)
{
    uint64_t nonces[EP_RANKS_MAX];
    const int32_t size = u->base.config.size;
    size_t longest = 0;
    for (int32_t r = 0; r < size; r++) {
        struct offer o;
        memcpy(&o, hellos[r].payload, sizeof o);
        nonces[r] = o.nonce;
        windows[r] = o.window;
        longest = max_size(longest, o.address_bytes);
    }
    u->key = hash_64(nonces, (size_t)size * sizeof *nonces, 0) | 1;
    return longest;
}

/* All map what they read, and tell each other whose that is, or that they could not. */
static enum status open_windows(struct ep_ucx *u, const struct ep_ucx_window_offer *windows,
                                struct ep_hello *hellos, struct err *err)
{
    const struct ep_config *c = &u->base.config;
    struct ep_ucx_readers mine = { 0 }, theirs;
    if (c->placement.n_logical == 0) return OK;
    TRY(ep_handshake(&u->base, ep_ucx_open_others(u, windows, &mine, err), &mine, sizeof mine,
                     hellos, err));
    for (int32_t r = 0; r < c->size; r++) {
        memcpy(&theirs, hellos[r].payload, sizeof theirs);
        ep_ucx_note_reader(u, r, &theirs);
    }
    return OK;
}

/* All connect, and tell each other how it went. */
static enum status open_all(struct ep_ucx *u, const struct ep_ucx_window_offer *windows,
                            size_t longest, struct ep_hello *hellos, struct err *err)
{
    const size_t stride = round_up(longest, ADDRESS_PART);
    char *addresses = MEM_ARRAY(char, (size_t)u->base.config.size *stride);
    enum status st = exchange_addresses(u, addresses, stride, err);
    if (st == OK) st = open_windows(u, windows, hellos, err);
    if (st == OK)
        st = ep_handshake(&u->base, connect_all(u, addresses, stride, err), NULL, 0, hellos, err);
    mem_free(addresses);
    return st;
}

static enum status meet(struct ep_ucx *u, struct ep_hello *hellos, struct err *err)
{
    struct ep_ucx_window_offer *windows = MEM_ARRAY(struct ep_ucx_window_offer,
                                                    (size_t)u->base.config.size);
    const size_t longest = read_offers(u, hellos, windows);
    const enum status st = longest > FABRIC_ADDRESS_MAX
                               ? err_set(err, ERR_PEER_MISMATCH,
                                         "ep: an address of %zu bytes, at most %d", longest,
                                         FABRIC_ADDRESS_MAX)
                               : open_all(u, windows, longest, hellos, err);
    mem_free(windows);
    ep_ucx_close_fd(u);
    return st;
}

static struct offer make_offer(const struct ep_ucx *u)
{
    size_t n;
    (void)fabric_address(u->fabric, &n);
    return (struct offer){ .window = ep_ucx_offer_window(u),
                           .nonce = u->nonce,
                           .address_bytes = (uint32_t)n };
}

static enum status ucx_create(const struct ep_config *c, struct ep **out, struct err *err)
{
    struct ep_ucx *u = MEM_NEW(struct ep_ucx);
    struct offer mine = { 0 };
    ep_init(&u->base, &ep_ucx_ops, c);
    u->wake_fd = u->window.fd = -1;
    u->wait_ms = c->timeout_ms;
    u->rows_loop = ep_host_rows_choose();
    ep_ucx_init_phases(u);
    enum status st = open_own(u, err);
    if (c->size > 1) {
        struct ep_hello *hellos = MEM_ARRAY(struct ep_hello, (size_t)c->size);
        if (st == OK) mine = make_offer(u);
        st = ep_handshake(&u->base, st, &mine, sizeof mine, hellos, err);
        if (st == OK) st = meet(u, hellos, err);
        mem_free(hellos);
    }
    u->base.config.is_wanted = NULL;
    if (st == OK) *out = &u->base;
    else release(u, PART_FAULTY_MS);
    return st;
}

/* What this rank sent last may still be on its way to ranks that need it. */
static void ucx_free(struct ep *e)
{
    struct ep_ucx *u = ep_ucx_of(e);
    ep_ucx_resume(u);
    const bool is_well = ep_ucx_fault_of(u, NULL) == OK && !ep_is_aborted(e);
    const enum status st = ep_ucx_raise(u, EP_UCX_LEFT, e->config.rank, NULL);
    (void)st; /* for those that wait for this rank */
    release(u, is_well ? (uint64_t)min_i32(e->config.timeout_ms, PART_MS) : PART_FAULTY_MS);
}

static enum status ucx_wait(struct ep *e, struct err *err)
{
    return ep_ucx_fault_of(ep_ucx_of(e), err);
}

const struct ep_ops ep_ucx_ops = {
    .name = "ucx",
    .on_host = true,
    .create = ucx_create,
    .free = ucx_free,
    .plan = ep_ucx_plan_rows,
    .dispatch_begin = ep_ucx_dispatch_begin,
    .dispatch_end = ep_ucx_dispatch_end,
    .combine_begin = ep_return_nothing,
    .combine_end = ep_ucx_combine,
    .all_reduce = ep_ucx_all_reduce,
    .all_gather = ep_ucx_all_gather,
    .gather_columns = ep_ucx_gather_columns,
    .wait = ucx_wait,
    .found = ep_found_nothing,
    .abort = ep_ucx_abort,
    .places = ep_ucx_places,
};
