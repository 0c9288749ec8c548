/* ep_ucx_phase.c - phases of backend `ucx`: what is sent, where what comes is written, how a rank
 * waits, and what happens when a rank is lost.
 *
 * The fabric serves one thread at a time. A call takes it with `busy`, and so does ep_abort if no
 * call has it, to tell the others at once, which may be all that the loop has time for: the next
 * call, or ep_free, does the rest. Otherwise the call finds `aborted` while it waits, or when it
 * ends. Both write their word and then look at the other's, sequentially consistent: one of them
 * tells.
 *
 * A fault is told to all ranks, also by those that only heard of it: a rank that leaves because of
 * another must not be taken for the one that failed. But a phase of which all has come succeeds.
 * Thread: as ep_ucx.h. */
#include <poll.h>
#include <sched.h>
#include <string.h>
#include <unistd.h>

#include "kernels/ep/ucx/ep_ucx.h"
#include "shared/base/assert.h"
#include "shared/base/clock.h"

enum {
    SPIN_NS = 400000,
    SLICE_MS = 50,
    TELL_MS = 20, /* how long a rank tries to tell of a fault those that do not read */
    NS_PER_MS = 1000000
};

/* ---- faults ---- */

static enum status describe(const struct ep_ucx *u, uint32_t word, struct err *err)
{
    const struct ep_config *c = &u->base.config;
    const int32_t r = (int32_t)(word & 0xffff) - 1, n = c->size;
    switch (word >> 16) {
    case 0: return OK;
    case EP_UCX_ABORTED:
        return err_set(err, r == c->rank ? ERR_CANCELED : ERR_PEER_LOST,
                       "ep: rank %d of %d was aborted", r, n);
    case EP_UCX_LEFT: return err_set(err, ERR_PEER_LOST, "ep: rank %d of %d has left", r, n);
    case EP_UCX_ENDED:
        if (r == c->rank)
            return err_set(err, ERR_PEER_LOST,
                           "ep: the others gave up rank %d of %d: a connection to it has ended", r,
                           n);
        return err_set(err, ERR_PEER_LOST,
                       "ep: rank %d of %d has ended, or its host cannot be reached", r, n);
    case EP_UCX_SILENT:
        if (r == c->rank)
            return err_set(err, ERR_PEER_LOST,
                           "ep: the others gave up rank %d of %d: it gave no sign for %d ms", r, n,
                           u->wait_ms);
        return err_set(err, ERR_PEER_LOST, "ep: rank %d of %d gave no sign for %d ms", r, n,
                       u->wait_ms);
    case EP_UCX_EXPERT:
        return err_set(err, ERR_INVALID, "ep: a row of rank %d chose an expert that there is not",
                       r);
    default: return err_set(err, ERR_INTERNAL, "ep: rank %d of %d sent impossible numbers", r, n);
    }
}

static uint32_t word_of(enum ep_ucx_fault fault, int32_t rank)
{
    return (uint32_t)fault << 16 | (uint32_t)(rank + 1);
}

/* Tells those that have not been told. True: nobody is left. */
static bool tell(struct ep_ucx *u)
{
    const struct ep_config *c = &u->base.config;
    const struct ep_ucx_head h = {
        .key = u->key, .kind = EP_UCX_FAULT, .rank = (uint16_t)c->rank, .at = u->fault
    };
    bool all = true;
    for (int32_t r = 0; r < c->size; r++) {
        if (r == c->rank || u->told[r]) continue;
        u->told[r] = fabric_send(u->fabric, (uint32_t)r, &h, sizeof h, NULL, 0) != ERR_BUSY;
        all = all && u->told[r];
    }
    return all;
}

static bool is_sending(const struct ep_ucx *u)
{
    const struct ep_config *c = &u->base.config;
    for (int32_t r = 0; r < c->size; r++)
        if (r != c->rank && fabric_n_sending(u->fabric, (uint32_t)r)) return true;
    return false;
}

/* The caller's memory is its own again, so what ranks have not taken of it is not sent any more. */
static void settle(struct ep_ucx *u)
{
    const struct ep_config *c = &u->base.config;
    if (u->is_settled || c->size == 1) return;
    u->is_settled = true;
    const uint64_t end = clock_ms() + TELL_MS;
    while ((!tell(u) || is_sending(u)) && clock_ms() < end) (void)fabric_progress(u->fabric);
    for (int32_t r = 0; r < c->size && u->fault >> 16 != EP_UCX_LEFT; r++)
        if (r != c->rank && fabric_n_sending(u->fabric, (uint32_t)r))
            fabric_drop(u->fabric, (uint32_t)r);
}

static enum status raise_word(struct ep_ucx *u, uint32_t word, struct err *err)
{
    if (!u->fault) u->fault = word;
    settle(u);
    return describe(u, u->fault, err);
}

enum status ep_ucx_raise(struct ep_ucx *u, enum ep_ucx_fault fault, int32_t rank, struct err *err)
{
    return raise_word(u, word_of(fault, rank), err);
}

enum status ep_ucx_fault_of(const struct ep_ucx *u, struct err *err)
{
    return describe(u, u->fault, err);
}

/* What a rank has sent as a word: one that says nothing would end the waiting for it only by the
 * deadline. */
static uint32_t word_from(const struct ep_ucx *u, int32_t from, uint64_t at)
{
    const uint64_t fault = at >> 16, of = at & 0xffff;
    const bool is_one = fault >= EP_UCX_ABORTED && fault <= EP_UCX_CORRUPT && of >= 1 &&
                        of <= (uint64_t)u->base.config.size;
    return is_one ? (uint32_t)at : word_of(EP_UCX_CORRUPT, from);
}

/* Nothing more comes from rank `from`; the first word is the reason for all. */
static void hear(struct ep_ucx *u, int32_t from, uint32_t word)
{
    u->gone[from] = true;
    if (!u->heard) u->heard = word;
}

static void on_lost(void *arg, uint32_t peer, const char *why)
{
    (void)why;
    hear(arg, (int32_t)peer, word_of(EP_UCX_ENDED, (int32_t)peer));
}

/* ---- what comes ---- */

/* Where a kind of the rank's messages begins, and the bytes that there is room for. */
static char *place_of(const struct ep_ucx *u, enum ep_ucx_kind kind, size_t turn, int32_t rank,
                      size_t *room)
{
    const struct ep_config *c = &u->base.config;
    const size_t r = (size_t)rank, in_turn = turn * (size_t)c->size + r;
    switch (kind) {
    case EP_UCX_HELLO: *room = 0; return u->memory;
    case EP_UCX_PLAN: *room = u->plan_bytes; return u->plans + in_turn * u->plan_bytes;
    case EP_UCX_ORDER: *room = u->order_bytes; return u->orders + r * u->order_bytes;
    case EP_UCX_ROWS:
        if (!u->tails || u->tails[rank]) return NULL;
        *room = (size_t)c->max_rows * u->row_bytes;
        return u->rows + r * u->window.rows_bytes;
    case EP_UCX_RESULTS:
        if (!u->tails || u->tails[rank]) return NULL;
        *room = ep_ucx_n_for(u, rank) * u->back_bytes;
        return u->results + (size_t)u->begin[ep_ucx_first(u, rank)] * u->back_bytes;
    case EP_UCX_PART: *room = u->part_bytes; return u->parts + in_turn * u->part_bytes;
    default: return NULL;
    }
}

/* The header if it is of this object. */
static const struct ep_ucx_head *read_head(const struct ep_ucx *u, const void *header,
                                           size_t header_bytes, struct ep_ucx_head *h)
{
    if (header_bytes != sizeof *h) return NULL;
    memcpy(h, header, sizeof *h);
    if (h->key != u->key || h->rank >= u->base.config.size || h->rank == u->base.config.rank)
        return NULL;
    return h;
}

static void *on_place(void *arg, const void *header, size_t header_bytes, size_t n)
{
    struct ep_ucx *u = arg;
    struct ep_ucx_head h;
    size_t room = 0;
    if (!read_head(u, header, header_bytes, &h)) return NULL;
    if (h.kind == EP_UCX_FAULT) {
        hear(u, h.rank, word_from(u, h.rank, h.at));
        return NULL;
    }
    const int32_t ahead = (int32_t)(h.phase - u->phase);
    if (ahead < 0) return NULL;
    const size_t turn = h.phase % EP_UCX_TURNS;
    const struct ep_ucx_in *in = &u->in[turn][h.rank];
    char *place = ahead > 1 ? NULL : place_of(u, h.kind, turn, h.rank, &room);
    if (place && h.at <= room && n <= room - h.at && in->got + n <= h.total && !in->whole &&
        (!in->here || in->total == h.total))
        return place + h.at;
    hear(u, h.rank, word_of(EP_UCX_CORRUPT, h.rank));
    return NULL;
}

static void on_received(void *arg, const void *header, size_t header_bytes, size_t n)
{
    struct ep_ucx *u = arg;
    struct ep_ucx_head h;
    if (!read_head(u, header, header_bytes, &h)) return;
    const size_t turn = h.phase % EP_UCX_TURNS;
    struct ep_ucx_in *in = &u->in[turn][h.rank];
    in->here = true;
    in->total = h.total;
    in->got += n;
    in->whole = in->got == in->total;
    u->n_whole[turn] += in->whole;
    u->n_messages++;
}

/* Results are rounded on their way into the transport's buffer, which they are copied to anyway. */
static bool is_rounded(const struct ep_ucx *u, enum ep_ucx_kind kind)
{
    return kind == EP_UCX_RESULTS && u->base.config.back == DTYPE_BF16;
}

static void on_convert(void *arg, void *to, const void *data, size_t at, size_t n)
{
    const struct ep_ucx *u = arg;
    ep_host_rows_send_part(u->rows_loop, data, at, n, to);
}

struct fabric_events ep_ucx_events(struct ep_ucx *u)
{
    return (struct fabric_events){ on_place, on_received, on_lost, on_convert, u };
}

/* ---- what goes ---- */

/* The next message for a rank: parts that lie apart here, of one kind. Returns its bytes, 0 only if
 * nothing goes to the rank. */
static size_t gather(struct ep_ucx *u, int32_t to, const struct ep_ucx_out *from,
                     struct ep_ucx_out *after, struct fabric_part *parts, size_t *n_parts)
{
    size_t n = 0;
    *after = *from;
    *n_parts = 0;
    while (n < FABRIC_PIECE_MAX && from->n + n < from->total && *n_parts < FABRIC_PARTS_MAX) {
        if (after->in_run == after->run.n) {
            struct ep_ucx_run run;
            size_t cursor = after->cursor;
            const bool some = u->next(u, to, &cursor, &run);
            ASSERT(some);
            if (run.kind != after->run.kind) {
                if (n) break;
                after->at = 0;
            }
            after->cursor = cursor;
            after->run = run;
            after->in_run = 0;
        }
        const size_t left = after->run.n - after->in_run, room = FABRIC_PIECE_MAX - n,
                     take = left < room ? left : room;
        parts[(*n_parts)++] = (struct fabric_part){ after->run.data, after->in_run, take,
                                                    is_rounded(u, after->run.kind) };
        after->in_run += take;
        n += take;
    }
    return n;
}

/* Sends to a rank as much as it takes now. */
static void send_to(struct ep_ucx *u, int32_t to)
{
    struct ep_ucx_out *o = &u->out[to], after;
    struct fabric_part parts[FABRIC_PARTS_MAX];
    while (!o->done) {
        size_t n_parts;
        const size_t n = gather(u, to, o, &after, parts, &n_parts);
        const struct ep_ucx_head h = { .key = u->key,
                                       .phase = u->phase,
                                       .kind = (uint16_t)after.run.kind,
                                       .rank = (uint16_t)u->base.config.rank,
                                       .at = after.at,
                                       .total = o->total };
        const enum status st = fabric_send(u->fabric, (uint32_t)to, &h, sizeof h, parts, n_parts);
        if (st == ERR_BUSY) return;
        after.at += n;
        after.n += n;
        after.done = after.n == o->total || st != OK; /* of lost ranks on_lost tells */
        *o = after;
    }
}

static void send_all(struct ep_ucx *u)
{
    const struct ep_config *c = &u->base.config;
    for (int32_t i = 1; i < c->size; i++) send_to(u, (c->rank + i) % c->size);
}

void ep_ucx_begin(struct ep_ucx *u,
                  bool (*next)(struct ep_ucx *, int32_t, size_t *, struct ep_ucx_run *))
{
    const struct ep_config *c = &u->base.config;
    u->phase++;
    const size_t later = (u->phase + 1) % EP_UCX_TURNS;
    memset(u->in[later], 0, (size_t)c->size * sizeof *u->in[later]);
    u->n_whole[later] = 0;
    u->next = next;
    for (int32_t r = 0; r < c->size; r++) {
        u->base.traffic.sent += r == c->rank ? 0 : u->out[r].total;
        u->out[r] = (struct ep_ucx_out){ .total = u->out[r].total };
    }
    if (c->size > 1) {
        send_all(u);
        (void)fabric_progress(u->fabric);
    }
}

/* ---- waiting ---- */

/* The first rank of which something is missing, or which has not taken everything; -1: none. */
static int32_t missing(const struct ep_ucx *u)
{
    const struct ep_config *c = &u->base.config;
    int32_t late = -1;
    for (int32_t r = 0; r < c->size; r++) {
        if (r == c->rank) continue;
        const bool waits = !ep_ucx_in(u, r)->whole || !u->out[r].done ||
                           fabric_n_sending(u->fabric, (uint32_t)r);
        if (waits && u->gone[r]) return r;
        if (waits && late < 0) late = r;
    }
    return late;
}

/* The fault that this rank has reported, was aborted with, or heard of. */
static enum status check(struct ep_ucx *u, struct err *err)
{
    if (u->fault) return raise_word(u, u->fault, err);
    if (ep_is_aborted(&u->base)) return ep_ucx_raise(u, EP_UCX_ABORTED, u->base.config.rank, err);
    return u->heard ? raise_word(u, u->heard, err) : OK;
}

/* A rank that has left may have sent everything before, and then others come too. */
static enum status check_waiting(struct ep_ucx *u, int32_t rank, struct err *err)
{
    return ep_is_aborted(&u->base) || u->gone[rank] ? check(u, err) : OK;
}

static bool is_busy(struct ep_ucx *u, uint64_t now)
{
    if (run_delay_is_long(&u->delay, now)) u->busy_until_ns = now + RUN_DELAY_BUSY_NS;
    return now < u->busy_until_ns;
}

/* Sleeps until something comes, ep_abort, or the end of a slice. */
static void sleep_a_while(struct ep_ucx *u, int limit_ms)
{
    struct pollfd p[2] = { { .fd = fabric_fd(u->fabric), .events = POLLIN },
                           { .fd = u->wake_fd, .events = POLLIN } };
    if (!fabric_arm(u->fabric)) return;
    (void)poll(p, 2, limit_ms < SLICE_MS ? limit_ms : SLICE_MS);
}

/* The time since *last_ns that counts: if this rank itself was stopped, the others get the time
 * that they need to come. */
static uint64_t counted_ns(uint64_t *last_ns)
{
    const uint64_t now = clock_ns(), most = (uint64_t)2 * SLICE_MS * NS_PER_MS;
    const uint64_t passed = now - *last_ns;
    *last_ns = now;
    return passed < most ? passed : most;
}

/* Says every EP_PROGRESS_MS, whether the rank sleeps or UCX has something to do, that who waits is
 * not stuck, and asks whether an object that is being made is still wanted. */
static bool goes_on_waiting(struct ep_ucx *u, uint64_t *told_ns)
{
    const struct ep_config *c = &u->base.config;
    const uint64_t now = clock_ns();
    if (now - *told_ns < (uint64_t)EP_PROGRESS_MS * NS_PER_MS) return true;
    *told_ns = now;
    if (c->progress) __atomic_fetch_add(c->progress, 1, __ATOMIC_RELAXED);
    return !c->is_wanted || c->is_wanted(c->is_wanted_arg);
}

static enum status wait_for_all(struct ep_ucx *u, struct err *err)
{
    const uint64_t limit = (uint64_t)u->wait_ms * NS_PER_MS;
    uint64_t waited = 0, seen = u->n_messages, moved_ns = clock_ns(), last_ns = moved_ns,
             told_ns = moved_ns;
    for (;;) {
        send_all(u);
        const bool moved = fabric_progress(u->fabric);
        const int32_t rank = missing(u);
        if (rank < 0) return OK;
        TRY(check_waiting(u, rank, err));
        /* Also when UCX has something to do: a connection that fails again and again is no sign. */
        waited += counted_ns(&last_ns);
        if (seen != u->n_messages) waited = 0;
        seen = u->n_messages;
        if (waited >= limit) return ep_ucx_raise(u, EP_UCX_SILENT, rank, err);
        if (!goes_on_waiting(u, &told_ns))
            return ep_ucx_raise(u, EP_UCX_ABORTED, u->base.config.rank, err);
        if (moved || u->may_spin) {
            const uint64_t now = clock_ns();
            if (moved) moved_ns = now;
            if (moved || (now - moved_ns < SPIN_NS && !is_busy(u, now))) continue;
        }
        sleep_a_while(u, (int)((limit - waited) / NS_PER_MS) + 1);
    }
}

enum status ep_ucx_wait(struct ep_ucx *u, struct err *err)
{
    const struct ep_config *c = &u->base.config;
    if (c->size == 1) return OK;
    const uint64_t begin = clock_ns();
    const enum status st = wait_for_all(u, err);
    u->base.traffic.waited_ns += clock_ns() - begin;
    for (int32_t r = 0; r < c->size; r++)
        u->base.traffic.received += r == c->rank ? 0 : ep_ucx_in(u, r)->got;
    return st;
}

/* ---- who uses the fabric ---- */

static bool take(struct ep_ucx *u)
{
    int free = 0;
    return atomic_compare_exchange_strong(&u->busy, &free, 1);
}

static void give(struct ep_ucx *u)
{
    atomic_store(&u->busy, 0);
    if (!ep_is_aborted(&u->base) || !take(u)) return;
    const enum status st = ep_ucx_raise(u, EP_UCX_ABORTED, u->base.config.rank, NULL);
    (void)st; /* this fault, or an earlier one: either ends the calls */
    atomic_store(&u->busy, 0);
}

void ep_ucx_resume(struct ep_ucx *u)
{
    while (!take(u)) sched_yield(); /* ep_abort has it for a moment */
}

enum status ep_ucx_enter(struct ep_ucx *u, struct err *err)
{
    ep_ucx_resume(u);
    while (u->fabric && fabric_progress(u->fabric)) {}
    const enum status st = check(u, err);
    if (st != OK) give(u);
    return st;
}

enum status ep_ucx_leave(struct ep_ucx *u, enum status st)
{
    give(u);
    return st;
}

void ep_ucx_abort(struct ep *e)
{
    struct ep_ucx *u = ep_ucx_of(e);
    const uint64_t one = 1;
    const ssize_t n = write(u->wake_fd, &one, sizeof one);
    ASSERT(n == sizeof one);
    if (!take(u)) return; /* the call that has it will tell */
    if (!u->fault) {
        u->fault = word_of(EP_UCX_ABORTED, e->config.rank);
        if (e->config.size > 1 && !tell(u)) (void)fabric_progress(u->fabric);
    }
    atomic_store(&u->busy, 0);
}

void ep_ucx_init_phases(struct ep_ucx *u)
{
    cpu_set_t set;
    const int n_cpus = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    u->may_spin = u->base.config.size <= n_cpus;
}
