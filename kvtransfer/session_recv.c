/* session_recv.c - the receiver's side of a transfer: grants, arrivals, verification, fences. Diagram and invariants: session.h.
 *
 * A slot holds one transfer. Any thread may claim a free one (kvt_recv_claim); from then on it belongs to the transfer thread, which
 * frees it after RECEIVED, or after FENCED. */
#include "kvtransfer/session.h"

#include <stdio.h>
#include <string.h>

#include "kvtransfer/stats.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

static uint32_t state_of(const struct kvt_recv *r) { return atomic_load_explicit(&r->state, memory_order_acquire); }
static void set_state(struct kvt_recv *r, enum kvt_recv_state s) { atomic_store_explicit(&r->state, s, memory_order_release); }
static const char *transport_of(const struct kvt_recv *r) { return r->peer ? r->peer->ops->name : ""; }

/* ---- claiming: any thread ---- */

static struct kvt_recv *claim_slot(struct kvt_core *c)
{
    if (atomic_fetch_add_explicit(&c->n_recvs, 1, memory_order_relaxed) < c->n_transfers) {
        for (uint32_t i = 0; i < c->n_slots; i++) {
            uint32_t expected = KVT_RECV_FREE;
            if (atomic_compare_exchange_strong_explicit(&c->slots[i].state, &expected, KVT_RECV_CLAIMED, memory_order_acquire,
                                                        memory_order_relaxed))
                return &c->slots[i];
        }
    }
    atomic_fetch_sub_explicit(&c->n_recvs, 1, memory_order_relaxed);
    return NULL;
}

static enum status check_blocks(const struct kvt_core *c, const int32_t *blocks, uint32_t n_blocks, uint32_t n_skip, uint32_t n_tokens)
{
    if (n_blocks > KVT_GRANT_BLOCKS_MAX || n_skip > n_blocks || kvt_plan_n_blocks(&c->layout, n_tokens) > n_blocks) return ERR_INVALID;
    for (uint32_t i = 0; i < n_blocks; i++)
        if (blocks[i] < 0 || (uint32_t)blocks[i] >= c->layout.n_blocks) return ERR_INVALID;
    return OK;
}

enum status kvt_recv_claim(struct kvt_core *c, uint64_t id, const int32_t *blocks, uint32_t n_blocks, uint32_t n_skip, uint32_t n_tokens,
                           struct buf *grant)
{
    TRY(check_blocks(c, blocks, n_blocks, n_skip, n_tokens));
    uint32_t n_layers = c->layout.n_layers, n_used = kvt_plan_n_blocks(&c->layout, n_tokens);
    int32_t *copy = mem_try_calloc(n_blocks ? n_blocks : 1, sizeof *copy);
    uint32_t *cursors = mem_try_calloc(2 * (size_t)n_layers, sizeof *cursors);
    struct kvt_recv *r = copy && cursors ? claim_slot(c) : NULL;
    if (!r) {
        enum status st = copy && cursors ? ERR_FULL : ERR_NOMEM;
        mem_free(copy);
        mem_free(cursors);
        return st;
    }
    if (n_blocks) memcpy(copy, blocks, sizeof *copy * n_blocks);
    r->id = id;
    r->generation = atomic_fetch_add_explicit(&c->next_generation, 1, memory_order_relaxed); /* unique; order does not matter */
    r->blocks = copy;
    r->n_used = n_used;
    r->n_first = n_skip < n_used ? n_skip : n_used;
    r->n_tokens = n_tokens;
    r->landed = cursors;
    r->verified = cursors + n_layers;
    for (uint32_t i = 0; i < 2 * n_layers; i++) cursors[i] = r->n_first;
    r->n_left = (uint64_t)(n_used - r->n_first) * n_layers;
    r->peer = NULL;
    r->bytes = 0;
    r->t_begin_ns = clock_ns();
    r->t_moved_ms = clock_ms();
    r->moved = false;
    struct kvt_grant_msg m = { .session = r->session, .generation = r->generation, .n_blocks = n_blocks, .n_skip = n_skip, .n_tokens = n_tokens };
    kvt_grant_encode(&m, blocks, grant);
    set_state(r, KVT_RECV_OPEN);
    return OK;
}

/* ---- ends ---- */

static void free_slot(struct kvt_core *c, struct kvt_recv *r)
{
    if (state_of(r) != KVT_RECV_FENCING) atomic_fetch_sub_explicit(&c->n_recvs, 1, memory_order_relaxed);
    list_remove(&r->link);
    mem_free(r->blocks);
    mem_free(r->landed);
    r->blocks = NULL;
    r->landed = r->verified = NULL;
    r->peer = NULL;
    set_state(r, KVT_RECV_FREE);
}

static void fenced(struct kvt_core *c, struct kvt_recv *r)
{
    struct kvt_event ev = { .kind = KVT_FENCED, .id = r->id, .transport = transport_of(r) };
    free_slot(c, r);
    kvt_core_event(c, ev);
}

/* End a transfer that cannot be completed. `stopped`: the writer itself said that it has stopped. */
static void fail(struct kvt_core *c, struct kvt_recv *r, enum status st, bool stopped, const char *text)
{
    struct kvt_event ev = { .kind = KVT_RECEIVE_FAILED, .id = r->id, .status = st, .transport = transport_of(r) };
    snprintf(ev.text, sizeof ev.text, "%s", text);
    kvt_stats_failed(c->stats, KVT_TAKEN_IN, st);
    if (st == ERR_CHECKSUM) log_error("kv checksum mismatch", "id=%016llx transport=%s why=\"%s\"", (unsigned long long)r->id, ev.transport, text);
    kvt_core_event(c, ev);
    if (!r->peer || stopped) {
        fenced(c, r);
        return;
    }
    kvt_peer_tell(r->peer, KVT_MSG_STOP, r->session, r->generation, 0, st);
    if (r->peer->ops->caps & KVT_CAP_RECEIVER_PLACES) {
        fenced(c, r); /* from here on place() finds no such session */
        return;
    }
    atomic_fetch_sub_explicit(&c->n_recvs, 1, memory_order_relaxed); /* quarantined ones do not count against the limit */
    r->t_fence_ms = clock_ms();
    set_state(r, KVT_RECV_FENCING);
    kvt_stats_fence_wait(c->stats);
}

static uint64_t *find_fenced(struct kvt_core *c, uint64_t id)
{
    size_t n = c->n_fenced < KVT_FENCED_RING ? c->n_fenced : KVT_FENCED_RING;
    for (size_t i = 0; i < n; i++)
        if (c->fenced[i] == id) return &c->fenced[i];
    return NULL;
}

static void received(struct kvt_core *c, struct kvt_recv *r)
{
    struct kvt_event ev = { .kind = KVT_RECEIVED, .id = r->id, .transport = transport_of(r), .bytes = r->bytes,
                            .ns = clock_ns() - r->t_begin_ns };
    kvt_peer_tell(r->peer, KVT_MSG_DONE, r->session, r->generation, 0, OK);
    kvt_stats_done(c->stats, ev.transport, KVT_TAKEN_IN, ev.ns);
    free_slot(c, r);
    for (uint64_t *old; (old = find_fenced(c, ev.id)) != NULL;) *old = UINT64_MAX; /* the caller used that id before */
    kvt_core_event(c, ev);
}

void kvt_recv_cancel(struct kvt_core *c, uint64_t id)
{
    for (uint32_t i = 0; i < c->n_slots; i++) {
        struct kvt_recv *r = &c->slots[i];
        uint32_t s = state_of(r);
        if (s < KVT_RECV_OPEN || r->id != id) continue;
        if (s != KVT_RECV_FENCING) fail(c, r, ERR_CANCELED, false, "the receiver cancelled the transfer");
        return;
    }
    /* RECEIVED was on its way to a caller that had stopped wanting it: nothing is written any more, and it waits for FENCED. */
    if (!find_fenced(c, id)) kvt_core_event(c, (struct kvt_event){ .kind = KVT_FENCED, .id = id, .transport = "" });
}

/* ---- arrivals ---- */

/* The live session that this connection may write, or NULL. */
static struct kvt_recv *bound(struct kvt_core *c, const struct kvt_peer *p, const struct kvt_message *m)
{
    if (m->session >= c->n_slots) return NULL;
    struct kvt_recv *r = &c->slots[m->session];
    return state_of(r) >= KVT_RECV_BOUND && r->generation == m->generation && r->peer == p ? r : NULL;
}

static void on_open(struct kvt_core *c, struct kvt_peer *p, const struct kvt_message *m)
{
    struct kvt_recv *r = m->session < c->n_slots ? &c->slots[m->session] : NULL;
    if (!r || state_of(r) != KVT_RECV_OPEN || r->generation != m->generation) {
        kvt_peer_tell(p, KVT_MSG_STOP, m->session, m->generation, 0, ERR_STALE);
        return;
    }
    r->peer = p;
    r->t_moved_ms = clock_ms();
    list_push(&p->recvs, &r->link);
    set_state(r, KVT_RECV_BOUND);
    kvt_peer_tell(p, KVT_MSG_OPENED, m->session, m->generation, 0, OK);
}

static void note_movement(struct kvt_recv *r)
{
    if (!r->moved) r->t_begin_ns = clock_ns();
    r->moved = true;
    r->t_moved_ms = clock_ms();
}

/* Compare the checksums of the pieces of a NOTE; false after failing the transfer. */
static bool verify(struct kvt_core *c, struct kvt_recv *r, const struct kvt_message *m)
{
    for (uint32_t i = 0; c->checksum && i < m->n; i++) {
        uint32_t position = m->first + i;
        uint32_t n_valid = kvt_plan_tokens(&c->layout, r->n_tokens, position);
        if (kvt_plan_checksum(&c->layout, c->pool, m->layer, r->blocks[position], n_valid, c->scratch) == m->sums[i]) continue;
        char text[128];
        snprintf(text, sizeof text, "checksum mismatch in layer %u, block %u of the prompt, over %s", m->layer, position, transport_of(r));
        kvt_stats_checksum_failed(c->stats);
        fail(c, r, ERR_CHECKSUM, false, text);
        return false;
    }
    return true;
}

static void on_note(struct kvt_core *c, struct kvt_recv *r, const struct kvt_message *m)
{
    const struct kvt_transport_ops *ops = r->peer->ops;
    bool ordered = m->layer < c->layout.n_layers && m->first == r->verified[m->layer] && m->n <= r->n_used - m->first;
    bool landed = ordered && (!(ops->caps & KVT_CAP_RECEIVER_PLACES) || m->first + m->n <= r->landed[m->layer]);
    if (!landed) {
        fail(c, r, ERR_FORMAT, false, "the sender announced pieces out of order or that did not arrive");
        return;
    }
    enum status st = ops->flush(r->peer->conn->t);
    if (st != OK) {
        fail(c, r, st, false, "arrived bytes cannot be made visible");
        return;
    }
    note_movement(r);
    if (!verify(c, r, m)) return;
    uint64_t bytes = kvt_plan_span_bytes(&c->layout, r->n_tokens, (struct kvt_span){ m->layer, m->first, m->n });
    r->verified[m->layer] += m->n;
    r->n_left -= m->n;
    r->bytes += bytes;
    kvt_stats_bytes(c->stats, ops->name, KVT_TAKEN_IN, bytes);
}

static void on_finish(struct kvt_core *c, struct kvt_recv *r, const struct kvt_message *m)
{
    if (r->n_left == 0 && m->bytes == r->bytes) {
        received(c, r);
        return;
    }
    char text[128];
    snprintf(text, sizeof text, "the sender finished with %llu pieces missing", (unsigned long long)r->n_left);
    fail(c, r, ERR_FORMAT, false, text);
}

static void on_stopped(struct kvt_core *c, struct kvt_recv *r, enum status st)
{
    if (state_of(r) == KVT_RECV_FENCING) fenced(c, r);
    else fail(c, r, st == OK ? ERR_CANCELED : st, true, "the sender gave the transfer up");
}

void kvt_recv_message(struct kvt_core *c, struct kvt_peer *p, const struct kvt_message *m)
{
    if (m->kind == KVT_MSG_OPEN) {
        on_open(c, p, m);
        return;
    }
    if (m->kind == KVT_MSG_BYE) {
        LIST_FOREACH(r, &p->recvs, struct kvt_recv, link) on_stopped(c, r, ERR_PEER_LOST);
        return;
    }
    struct kvt_recv *r = bound(c, p, m);
    if (!r) return; /* of an earlier generation: its end has been told */
    if (m->kind == KVT_MSG_STOPPED) on_stopped(c, r, m->status);
    else if (state_of(r) == KVT_RECV_BOUND && m->kind == KVT_MSG_NOTE) on_note(c, r, m);
    else if (state_of(r) == KVT_RECV_BOUND && m->kind == KVT_MSG_FINISH) on_finish(c, r, m);
}

int kvt_recv_place(struct kvt_core *c, struct kvt_peer *p, const struct kvt_message *head, uint64_t offset, struct iovec *iov, int cap)
{
    struct kvt_recv *r = p ? bound(c, p, head) : NULL;
    if (!r || state_of(r) != KVT_RECV_BOUND) return 0;
    struct kvt_span span = { head->layer, head->first, head->n };
    bool fits = head->layer < c->layout.n_layers && head->first == r->landed[head->layer] && head->n <= r->n_used - head->first &&
                head->bytes == kvt_plan_span_bytes(&c->layout, r->n_tokens, span) && offset < head->bytes;
    if (!fits) {
        fail(c, r, ERR_FORMAT, false, "the sender pushed pieces out of order");
        return 0;
    }
    return kvt_plan_iov(&c->layout, c->pool, r->blocks, r->n_tokens, span, offset, iov, cap);
}

void kvt_recv_placed(struct kvt_core *c, struct kvt_peer *p, const struct kvt_message *head, uint64_t bytes)
{
    struct kvt_recv *r = p ? bound(c, p, head) : NULL;
    if (!r || state_of(r) != KVT_RECV_BOUND) return;
    note_movement(r);
    if (bytes == head->bytes) r->landed[head->layer] += head->n;
}

/* ---- losses and deadlines ---- */

void kvt_recv_peer_lost(struct kvt_core *c, struct kvt_peer *p, enum status st, const char *text)
{
    bool places = p->ops->caps & KVT_CAP_RECEIVER_PLACES;
    LIST_FOREACH(r, &p->recvs, struct kvt_recv, link)
        if (state_of(r) == KVT_RECV_BOUND) fail(c, r, st, places, text);
}

void kvt_recv_peer_fenced(struct kvt_core *c, struct kvt_peer *p)
{
    LIST_FOREACH(r, &p->recvs, struct kvt_recv, link) {
        if (state_of(r) == KVT_RECV_BOUND) fail(c, r, ERR_PEER_LOST, true, "the connection to the sender was torn down");
        else fenced(c, r);
    }
}

void kvt_recv_tick(struct kvt_core *c, uint64_t now_ms)
{
    uint32_t n_quarantined = 0;
    for (uint32_t i = 0; i < c->n_slots; i++) {
        struct kvt_recv *r = &c->slots[i];
        uint32_t s = state_of(r);
        if (s == KVT_RECV_FENCING) {
            n_quarantined++;
            if ((r->peer->ops->caps & KVT_CAP_FENCE_TEARDOWN) && now_ms - r->t_fence_ms > KVT_FENCE_TEARDOWN_MS)
                r->peer->condemned = true;
        } else if (s >= KVT_RECV_OPEN && now_ms > r->t_moved_ms + c->stall_ms) {
            char text[128];
            snprintf(text, sizeof text, "no KV arrived for %u ms", c->stall_ms);
            fail(c, r, ERR_TIMEOUT, false, text);
        }
    }
    kvt_stats_gauges(c->stats, atomic_load_explicit(&c->n_sends, memory_order_relaxed),
                     atomic_load_explicit(&c->n_recvs, memory_order_relaxed), n_quarantined);
}
