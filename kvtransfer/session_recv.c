/* session_recv.c - the receiver's side of a transfer: grants, arrivals, verification, fences.
 * Diagram and invariants: session.h.
 *
 * A slot holds one transfer. Any thread may claim a free slot (kvt_recv_claim); from then on the
 * transfer thread owns it and frees it after RECEIVED or FENCED. */
#include "kvtransfer/session.h"

#include <stdio.h>
#include <string.h>

#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

static uint32_t state_of(const struct kvt_recv *r)
{
    return atomic_load_explicit(&r->state, memory_order_acquire);
}
static void set_state(struct kvt_recv *r, enum kvt_recv_state s)
{
    atomic_store_explicit(&r->state, s, memory_order_release);
}
static const char *transport_of(const struct kvt_recv *r)
{
    return r->peer ? r->peer->ops->name : "";
}

/* ---- claiming: any thread ---- */

static struct kvt_recv *claim_slot(struct kvt_core *c)
{
    if (atomic_fetch_add_explicit(&c->n_recvs, 1, memory_order_relaxed) < c->n_transfers) {
        for (uint32_t i = 0; i < c->n_slots; i++) {
            uint32_t expected = KVT_RECV_FREE;
            if (atomic_compare_exchange_strong_explicit(&c->slots[i].state, &expected,
                                                        KVT_RECV_CLAIMED, memory_order_acquire,
                                                        memory_order_relaxed))
                return &c->slots[i];
        }
    }
    atomic_fetch_sub_explicit(&c->n_recvs, 1, memory_order_relaxed);
    return NULL;
}

static enum status check(const struct kv_layout *l, const struct kvt_expectation *e)
{
    if (e->n_heads == 0 || e->first_head >= l->n_kv_heads ||
        e->n_heads > l->n_kv_heads - e->first_head)
        return ERR_INVALID;
    if (e->n_blocks > KVT_GRANT_BLOCKS_MAX || e->n_skip > e->n_blocks ||
        kvt_plan_n_blocks(l, e->n_tokens) > e->n_blocks)
        return ERR_INVALID;
    for (uint32_t i = 0; i < e->n_blocks; i++)
        if (e->blocks[i] < 0 || (uint32_t)e->blocks[i] >= l->n_blocks) return ERR_INVALID;
    return OK;
}

static void write_grant(const struct kvt_core *c, const struct kvt_recv *r,
                        const struct kvt_expectation *e, struct buf *grant)
{
    struct kvt_grant_msg m = {
        .session = r->session,
        .generation = r->generation,
        .n_blocks = e->n_blocks,
        .n_skip = e->n_skip,
        .n_tokens = e->n_tokens,
        .first_head = c->layout.first_head + e->first_head,
        .n_heads = e->n_heads,
        .block_tokens = c->layout.block_tokens,
    };
    kvt_grant_encode(&m, e->blocks, grant);
}

enum status kvt_recv_claim(struct kvt_core *c, const struct kvt_expectation *e, struct buf *grant)
{
    TRY(check(&c->layout, e));
    uint32_t n_layers = c->layout.n_layers, n_used = kvt_plan_n_blocks(&c->layout, e->n_tokens);
    int32_t *copy = mem_try_calloc(e->n_blocks ? e->n_blocks : 1, sizeof *copy);
    uint32_t *cursors = mem_try_calloc(2 * (size_t)n_layers, sizeof *cursors);
    struct kvt_recv *r = copy && cursors ? claim_slot(c) : NULL;
    if (!r) {
        enum status st = copy && cursors ? ERR_FULL : ERR_NOMEM;
        mem_free(copy);
        mem_free(cursors);
        return st;
    }
    if (e->n_blocks) memcpy(copy, e->blocks, sizeof *copy * e->n_blocks);
    r->id = e->id;
    /* unique; order does not matter */
    r->generation = atomic_fetch_add_explicit(&c->next_generation, 1, memory_order_relaxed);
    r->slice = (struct kvt_head_slice){ &c->layout, e->first_head, e->n_heads };
    r->blocks = copy;
    r->n_used = n_used;
    r->n_first = e->n_skip < n_used ? e->n_skip : n_used;
    r->n_tokens = e->n_tokens;
    r->arrived = cursors;
    r->verified = cursors + n_layers;
    for (uint32_t i = 0; i < 2 * n_layers; i++) cursors[i] = r->n_first;
    r->n_layers = n_layers;
    r->peer = NULL;
    r->bytes = 0;
    r->t_begin_ns = clock_ns();
    r->t_moved_ms = clock_ms();
    r->deadline_ms = r->t_moved_ms + c->deadline_ms;
    r->moved = r->sums = false;
    r->t_wrong_sum_ms = 0;
    r->n_stores = r->n_checks = 0;
    r->check = NULL;
    r->finishes = false;
    write_grant(c, r, e, grant);
    set_state(r, KVT_RECV_OPEN);
    return OK;
}

/* ---- ends ---- */

static void free_slot(struct kvt_core *c, struct kvt_recv *r)
{
    if (state_of(r) != KVT_RECV_FENCING)
        atomic_fetch_sub_explicit(&c->n_recvs, 1, memory_order_relaxed);
    list_remove(&r->link);
    mem_free(r->blocks);
    mem_free(r->arrived);
    r->blocks = NULL;
    r->arrived = r->verified = NULL;
    r->peer = NULL;
    set_state(r, KVT_RECV_FREE);
}

static void fenced(struct kvt_core *c, struct kvt_recv *r)
{
    struct kvt_event ev = { .kind = KVT_FENCED, .id = r->id, .transport = transport_of(r) };
    free_slot(c, r);
    kvt_core_event(c, ev);
}

/* The transport no longer writes this transfer's blocks; waits for the GPU to stop too. False: the
 * GPU has failed, so nobody knows. */
static bool stores_over(struct kvt_core *c, const struct kvt_recv *r)
{
    return r->n_stores == 0 || kvt_gpu_jobs_synchronize(c->recv_jobs) == OK;
}

/* Drops NOTEs whose verification has not begun. */
static void drop_check(struct kvt_recv *r)
{
    if (!r->check) return;
    kvt_gpu_job_release(r->check);
    r->check = NULL;
    r->n_checks--;
}

/* Ends a transfer that cannot complete. `stopped`: the writer has said that it stopped. */
static void fail_as(struct kvt_core *c, struct kvt_recv *r, enum status st, enum kvt_failure why,
                    bool stopped, const char *text)
{
    struct kvt_event ev = {
        .kind = KVT_RECEIVE_FAILED, .id = r->id, .status = st, .transport = transport_of(r)
    };
    snprintf(ev.text, sizeof ev.text, "%s", text);
    drop_check(r);
    kvt_stats_failed(c->stats, KVT_DIRECTION_RECEIVE, why);
    if (r->t_wrong_sum_ms && st != ERR_CHECKSUM)
        log_info("kv transfer ended with an unconfirmed checksum error",
                 "sequence=%016llx transport=%s layer=%u block=%u why=\"%s\"",
                 (unsigned long long)r->id, ev.transport, r->wrong_sum_layer, r->wrong_sum_block,
                 text);
    if (st == ERR_CHECKSUM)
        log_error("kv checksum mismatch", "sequence=%016llx transport=%s why=\"%s\"",
                  (unsigned long long)r->id, ev.transport, text);
    kvt_core_event(c, ev);
    if (!r->peer || (stopped && stores_over(c, r))) {
        fenced(c, r);
        return;
    }
    kvt_peer_send(r->peer, KVT_MSG_STOP, r->session, r->generation, 0, st);
    if ((r->peer->ops->caps & KVT_CAP_RECEIVER_SCATTERS) && stores_over(c, r)) {
        fenced(c, r); /* from here on kvt_recv_scatter finds no such session */
        return;
    }
    /* quarantined ones do not count against the limit */
    atomic_fetch_sub_explicit(&c->n_recvs, 1, memory_order_relaxed);
    r->t_fence_ms = clock_ms();
    r->n_stops = 1;
    set_state(r, KVT_RECV_FENCING);
    kvt_stats_fence_wait(c->stats);
}

static void fail(struct kvt_core *c, struct kvt_recv *r, enum status st, bool stopped,
                 const char *text)
{
    fail_as(c, r, st, kvt_failure_of(st), stopped, text);
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
    struct kvt_event ev = {
        .kind = KVT_RECEIVED,
        .id = r->id,
        .transport = transport_of(r),
        .bytes = r->bytes,
        .ns = clock_ns() - r->t_begin_ns,
        .link_speed = r->peer->ops->link_speed(r->peer->conn),
    };
    kvt_peer_send(r->peer, KVT_MSG_DONE, r->session, r->generation, 0, OK);
    kvt_stats_done(c->stats, ev.transport, KVT_DIRECTION_RECEIVE, ev.bytes, ev.ns, ev.ns);
    free_slot(c, r);
    /* the caller used that id before */
    for (uint64_t *old; (old = find_fenced(c, ev.id)) != NULL;) *old = UINT64_MAX;
    kvt_core_event(c, ev);
}

void kvt_recv_cancel(struct kvt_core *c, uint64_t id)
{
    for (uint32_t i = 0; i < c->n_slots; i++) {
        struct kvt_recv *r = &c->slots[i];
        uint32_t s = state_of(r);
        if (s < KVT_RECV_OPEN || r->id != id) continue;
        if (s != KVT_RECV_FENCING)
            fail(c, r, ERR_CANCELED, false, "the receiver cancelled the transfer");
        return;
    }
    /* RECEIVED crossed the caller's cancel: nothing is written any more, and the caller waits for
     * FENCED. */
    if (!find_fenced(c, id))
        kvt_core_event(c, (struct kvt_event){ .kind = KVT_FENCED, .id = id, .transport = "" });
}

/* ---- arrivals ---- */

/* The live session that this connection may write, or NULL. */
static struct kvt_recv *bound(struct kvt_core *c, const struct kvt_peer *p,
                              const struct kvt_message *m)
{
    if (m->session >= c->n_slots) return NULL;
    struct kvt_recv *r = &c->slots[m->session];
    return state_of(r) >= KVT_RECV_BOUND && r->generation == m->generation && r->peer == p ? r
                                                                                           : NULL;
}

/* Counts a message without a session: its generation is over, or another connection's. */
static void dropped(struct kvt_core *c, const struct kvt_message *m)
{
    struct kvt_recv *r = m->session < c->n_slots ? &c->slots[m->session] : NULL;
    kvt_stats_dropped(c->stats,
                      r && state_of(r) >= KVT_RECV_OPEN && r->generation == m->generation);
}

static void on_open(struct kvt_core *c, struct kvt_peer *p, const struct kvt_message *m)
{
    struct kvt_recv *r = m->session < c->n_slots ? &c->slots[m->session] : NULL;
    if (!r || state_of(r) != KVT_RECV_OPEN || r->generation != m->generation) {
        dropped(c, m);
        kvt_peer_send(p, KVT_MSG_STOP, m->session, m->generation, 0, ERR_STALE);
        return;
    }
    r->peer = p;
    r->sums = c->checksum && (m->bytes & KVT_OPEN_SUMS);
    if (m->bytes & KVT_OPEN_NO_DRAFT) r->n_layers -= c->layout.n_draft_layers;
    r->n_left = (uint64_t)(r->n_used - r->n_first) * r->n_layers;
    r->t_moved_ms = clock_ms();
    list_push(&p->recvs, &r->link);
    set_state(r, KVT_RECV_BOUND);
    kvt_peer_send(p, KVT_MSG_OPENED, m->session, m->generation, 0, OK);
}

static void note_movement(struct kvt_recv *r)
{
    if (!r->moved) r->t_begin_ns = clock_ns();
    r->moved = true;
    r->t_moved_ms = clock_ms();
}

/* Fails the transfer for a wrong checksum: the sender did not give up, which would explain it. */
static void fail_wrong_checksum(struct kvt_core *c, struct kvt_recv *r)
{
    char text[128];
    snprintf(text, sizeof text, "checksum mismatch in layer %u, block %u of the prompt, over %s",
             r->wrong_sum_layer, r->wrong_sum_block, transport_of(r));
    kvt_stats_checksum_failed(c->stats);
    fail(c, r, ERR_CHECKSUM, false, text);
}

/* Moves the cursor past a NOTE's pieces. */
static void advance(uint32_t *cursor, const struct kvt_message *m)
{
    for (uint32_t i = 0; i <= m->more_layers; i++) cursor[m->layer + i] += m->n;
}

static struct kvt_note_range range_of(const struct kvt_message *m)
{
    return (struct kvt_note_range){ m->layer, m->more_layers, m->first, m->n };
}

static uint64_t bytes_of(const struct kvt_recv *r, const struct kvt_note_range *v)
{
    const struct kvt_block_range range = { v->layer, v->first, v->n };
    return kvt_plan_range_bytes(&r->slice, r->n_tokens, range) * (v->more_layers + 1);
}

/* Computes the checksums of pieces in host memory. */
static void compute_checksums(struct kvt_core *c, const struct kvt_recv *r,
                              const struct kvt_note_range *v, uint64_t *sums)
{
    for (uint32_t i = 0; i <= v->more_layers; i++)
        for (uint32_t done = 0, n; done < v->n; done += n, sums += n) {
            n = v->n - done < KVT_BATCH_PIECES ? v->n - done : KVT_BATCH_PIECES;
            const struct kvt_block_range range = { v->layer + i, v->first + done, n };
            kvt_plan_checksums(&r->slice, c->pool, r->blocks, r->n_tokens, range, c->scratch, sums);
        }
}

/* Compares the checksums of a NOTE's pieces. False: one is wrong; its place and the time are
 * kept. */
static bool checksums_agree(struct kvt_core *c, struct kvt_recv *r, const struct kvt_note_range *v,
                            const uint64_t *computed, const uint64_t *expected)
{
    const uint32_t n = kvt_note_pieces(v);
    uint32_t i = 0;
    kvt_stats_hashed(c->stats, KVT_DIRECTION_RECEIVE, bytes_of(r, v));
    while (i < n && computed[i] == expected[i]) i++;
    if (i == n) return true;
    r->t_wrong_sum_ms = clock_ms();
    r->wrong_sum_layer = v->layer + i / v->n;
    r->wrong_sum_block = v->first + i % v->n;
    return false;
}

/* Counts pieces that are in place, with right checksums if there are any. */
static void accept_pieces(struct kvt_core *c, struct kvt_recv *r, const struct kvt_note_range *v)
{
    const uint64_t bytes = bytes_of(r, v);
    r->n_left -= kvt_note_pieces(v);
    r->bytes += bytes;
    kvt_stats_bytes(c->stats, r->peer->ops->name, KVT_DIRECTION_RECEIVE, bytes);
}

/* Verifies a NOTE's pieces in host memory. */
static void check_now(struct kvt_core *c, struct kvt_recv *r, const struct kvt_message *m)
{
    const struct kvt_note_range range = range_of(m);
    uint64_t computed[KVT_PUT_PIECES];
    if (r->sums) {
        compute_checksums(c, r, &range, computed);
        if (!checksums_agree(c, r, &range, computed, m->sums)) return;
    }
    advance(r->verified, m);
    accept_pieces(c, r, &range);
}

/* Whether pieces [m->first, + m->n) begin at `cursor`, the next expected one, in all layers. Fails
 * the transfer if they do not. */
static bool follows(struct kvt_core *c, struct kvt_recv *r, const struct kvt_message *m,
                    const uint32_t *cursor)
{
    const uint64_t end_layer = (uint64_t)m->layer + m->more_layers + 1;
    if (end_layer > r->n_layers || m->n == 0 || m->first > r->n_used ||
        m->n > r->n_used - m->first) {
        fail(c, r, ERR_FORMAT, false, "the sender announced pieces outside the grant");
        return false;
    }
    for (uint32_t layer = m->layer; layer < end_layer; layer++) {
        if (m->first == cursor[layer]) continue;
        const bool again = m->first < cursor[layer];
        fail_as(c, r, ERR_FORMAT, again ? KVT_FAILED_DUPLICATE : KVT_FAILED_REORDERED, false,
                again ? "the sender announced pieces a second time"
                      : "the sender announced pieces out of order");
        return false;
    }
    return true;
}

/* Whether all of a NOTE's pieces came in frames. */
static bool have_arrived(const struct kvt_recv *r, const struct kvt_message *m)
{
    for (uint32_t i = 0; i <= m->more_layers; i++)
        if (m->first + m->n > r->arrived[m->layer + i]) return false;
    return true;
}

/* Begins to verify the NOTEs that were collected. False: the transfer has ended because the GPU has
 * failed. */
static bool begin_check(struct kvt_core *c, struct kvt_recv *r)
{
    struct kvt_gpu_job *k = r->check;
    if (!k) return true;
    r->check = NULL;
    if (kvt_gpu_job_begin_check(k) == OK) return true;
    kvt_gpu_job_release(k);
    r->n_checks--;
    fail(c, r, ERR_NODEV, false, "the GPU that holds the KV has failed");
    return false;
}

/* A receive job. If there is none it begins all checks and waits for the jobs in flight: they are
 * copies and checksums of a few MiB. May end any transfer. */
static struct kvt_gpu_job *acquire_job(struct kvt_core *c)
{
    struct kvt_gpu_job *k = kvt_gpu_jobs_acquire(c->recv_jobs);
    if (k) return k;
    for (uint32_t i = 0; i < c->n_slots; i++)
        if (state_of(&c->slots[i]) == KVT_RECV_BOUND) (void)begin_check(c, &c->slots[i]);
    if (kvt_gpu_jobs_synchronize(c->recv_jobs) != OK) return NULL;
    kvt_recv_collect(c);
    return kvt_gpu_jobs_acquire(c->recv_jobs);
}

static struct kvt_gpu_job_params params_of(const struct kvt_recv *r, const struct kvt_message *m)
{
    return (struct kvt_gpu_job_params){
        .slice = &r->slice,
        .blocks = r->blocks,
        .n_tokens = r->n_tokens,
        .range = { m->layer, m->first, m->n },
        .more_layers = m->more_layers,
    };
}

/* A job for this transfer's next NOTEs in r->check. False: the transfer has ended, or jobs that
 * completed meanwhile cast doubt on it. */
static bool new_check(struct kvt_core *c, struct kvt_recv *r, const struct kvt_message *m)
{
    struct kvt_peer *p = r->peer;
    if (!begin_check(c, r)) return false;
    struct kvt_gpu_job *k = acquire_job(c);
    if (bound(c, p, m) != r || state_of(r) != KVT_RECV_BOUND || r->t_wrong_sum_ms) {
        kvt_gpu_job_release(k);
        return false;
    }
    if (!k) {
        fail(c, r, ERR_NODEV, false, "the GPU that holds the KV has failed");
        return false;
    }
    k->session = r->session;
    k->generation = r->generation;
    r->check = k;
    r->check_bytes = 0;
    r->n_checks++;
    return true;
}

/* Lets the GPU verify the pieces of a NOTE, after the frames that brought them, with others of this
 * transfer. */
static void check_by_gpu(struct kvt_core *c, struct kvt_recv *r, const struct kvt_message *m)
{
    const struct kvt_gpu_job_params params = params_of(r, m);
    const struct kvt_note_range range = range_of(m);
    const uint64_t *sums = r->sums ? m->sums : NULL;
    if (!r->check || !kvt_gpu_job_add_note(r->check, &params, sums)) {
        if (!new_check(c, r, m)) return;
        (void)kvt_gpu_job_add_note(r->check, &params, sums); /* it has room for any NOTE */
    }
    advance(r->verified, m);
    r->check_bytes += bytes_of(r, &range);
    if (r->check_bytes >= KVT_CHECK_BYTES) (void)begin_check(c, r);
}

static void on_note(struct kvt_core *c, struct kvt_recv *r, const struct kvt_message *m)
{
    const struct kvt_transport_ops *ops = r->peer->ops;
    if (r->t_wrong_sum_ms) return;
    if (!follows(c, r, m, r->verified)) return;
    if ((ops->caps & KVT_CAP_RECEIVER_SCATTERS) && !have_arrived(r, m)) {
        fail_as(c, r, ERR_FORMAT, KVT_FAILED_TRUNCATED, false,
                "the sender announced pieces that did not arrive");
        return;
    }
    if (m->n > KVT_BATCH_PIECES && (ops->caps & KVT_CAP_RECEIVER_SCATTERS)) {
        fail(c, r, ERR_FORMAT, false, "the sender announced more pieces than frames have");
        return;
    }
    if (r->sums && m->bytes != sizeof m->sums[0] * kvt_message_pieces(m)) {
        fail(c, r, ERR_FORMAT, false,
             "the sender announced pieces without the checksums it had promised");
        return;
    }
    enum status st = ops->flush(r->peer->conn->t);
    if (st != OK) {
        fail(c, r, st, false, "arrived bytes cannot be made visible");
        return;
    }
    note_movement(r);
    if (c->recv_jobs && (r->sums || (ops->caps & KVT_CAP_RECEIVER_SCATTERS))) {
        check_by_gpu(c, r, m);
        return;
    }
    check_now(c, r, m);
}

static void conclude(struct kvt_core *c, struct kvt_recv *r, uint64_t bytes)
{
    if (r->t_wrong_sum_ms) {
        fail_wrong_checksum(c, r);
        return;
    }
    if (r->n_left == 0 && bytes == r->bytes) {
        received(c, r);
        return;
    }
    char text[128];
    snprintf(text, sizeof text, "the sender finished with %llu pieces missing",
             (unsigned long long)r->n_left);
    fail_as(c, r, ERR_FORMAT, r->n_left ? KVT_FAILED_TRUNCATED : KVT_FAILED_FORMAT, false,
            r->n_left ? text : "the sender's byte count differs from the received bytes");
}

static void on_finish(struct kvt_core *c, struct kvt_recv *r, const struct kvt_message *m)
{
    r->finishes = true;
    r->finish_bytes = m->bytes;
    if (!begin_check(c, r)) return;
    if (r->n_checks == 0) conclude(c, r, m->bytes); /* otherwise the last check does */
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
        LIST_FOREACH (r, &p->recvs, struct kvt_recv, link) on_stopped(c, r, ERR_PEER_LOST);
        return;
    }
    struct kvt_recv *r = bound(c, p, m);
    if (!r) { /* of an earlier generation, whose end was reported */
        if (m->kind != KVT_MSG_STOPPED) dropped(c, m); /* that one answers every STOP */
        return;
    }
    if (m->kind == KVT_MSG_STOPPED) on_stopped(c, r, m->status);
    else if (state_of(r) == KVT_RECV_BOUND && m->kind == KVT_MSG_NOTE) on_note(c, r, m);
    else if (state_of(r) == KVT_RECV_BOUND && m->kind == KVT_MSG_FINISH) on_finish(c, r, m);
}

/* ---- frames for a pool in GPU memory ---- */

/* Releases the stage of the frame that a connection was reading, which is complete or given up. */
static void drop_frame(struct kvt_core *c, struct kvt_peer *p)
{
    if (p && p->frame.n) kvt_staging_release(c->recv_staging, &p->recv_chunks, &p->frame);
}

/* Gives the frame a stage to be read into. If recv_staging is full it waits for the copies out of
 * it; what is left then belongs to frames that other peers have begun. */
static int scatter_to_staging(struct kvt_core *c, struct kvt_peer *p,
                              const struct kvt_message *head, uint64_t offset, struct iovec *iov)
{
    if (!p->frame.n &&
        !kvt_staging_acquire(c->recv_staging, head->bytes, true, &p->recv_chunks, &p->frame)) {
        if (kvt_gpu_jobs_synchronize(c->recv_jobs) == OK) kvt_recv_collect(c);
        struct kvt_recv *r = bound(c, p, head);
        if (!r || state_of(r) != KVT_RECV_BOUND) return 0;
        if (!kvt_staging_acquire(c->recv_staging, head->bytes, true, &p->recv_chunks, &p->frame)) {
            fail(c, r, ERR_FULL, false,
                 "no memory to receive KV for the GPU: too many senders at once");
            return 0;
        }
    }
    iov[0] = (struct iovec){ (char *)kvt_staging_at(c->recv_staging, p->frame) + offset,
                             head->bytes - offset };
    return 1;
}

/* Copies a complete frame into the pool. */
static void store_frame(struct kvt_core *c, struct kvt_peer *p, struct kvt_recv *r,
                        const struct kvt_message *head)
{
    struct kvt_gpu_job *k = acquire_job(c);
    if (bound(c, p, head) != r || state_of(r) != KVT_RECV_BOUND) {
        kvt_gpu_job_release(k);
        drop_frame(c, p);
        return;
    }
    if (k) { /* the job owns the stage now */
        k->stage = p->frame;
        *kvt_gpu_jobs_held(c->recv_jobs) += p->frame.n;
        p->recv_chunks -= p->frame.n;
        p->frame.n = 0;
    }
    struct kvt_gpu_job_params params = params_of(r, head);
    params.copy = KVT_GPU_COPY_H2D;
    if (k) {
        k->session = r->session;
        k->generation = r->generation;
        if (kvt_gpu_job_begin(k, &params) == OK) {
            r->n_stores++;
            return;
        }
        kvt_gpu_job_release(k);
    }
    fail(c, r, ERR_NODEV, false, "the GPU that holds the KV has failed");
}

/* Handles the GPU's checksums of NOTEs' pieces. */
static void on_checked(struct kvt_core *c, struct kvt_recv *r, const struct kvt_gpu_job *k)
{
    r->n_checks--;
    if (state_of(r) != KVT_RECV_BOUND) return;
    for (uint32_t i = 0, at = 0; i < k->n_notes && !r->t_wrong_sum_ms; i++) {
        const struct kvt_note_range *v = &k->notes[i];
        if (!r->sums || checksums_agree(c, r, v, k->sums + at, k->expected + at))
            accept_pieces(c, r, v);
        at += kvt_note_pieces(v);
    }
    if (r->finishes && r->n_checks == 0) conclude(c, r, r->finish_bytes);
}

void kvt_recv_collect(struct kvt_core *c)
{
    for (struct kvt_gpu_job *k;
         (k = kvt_gpu_jobs_oldest(c->recv_jobs)) != NULL && kvt_gpu_job_is_done(k);) {
        struct kvt_recv *r = &c->slots[k->session];
        bool live = state_of(r) >= KVT_RECV_BOUND && r->generation == k->generation;
        kvt_gpu_job_release(k); /* its fields stay until the next acquire */
        if (live && k->n_notes == 0) r->n_stores--;
        else if (live) on_checked(c, r, k);
    }
}

int kvt_recv_scatter(struct kvt_core *c, struct kvt_peer *p, const struct kvt_message *head,
                     uint64_t offset, struct iovec *iov, int cap)
{
    struct kvt_recv *r = p ? bound(c, p, head) : NULL;
    if (!r && offset == 0) dropped(c, head);
    if (!r || state_of(r) != KVT_RECV_BOUND || !follows(c, r, head, r->arrived)) {
        drop_frame(c, p);
        return 0;
    }
    struct kvt_block_range range = { head->layer, head->first, head->n };
    uint64_t bytes = kvt_plan_range_bytes(&r->slice, r->n_tokens, range);
    if (head->bytes != bytes || offset >= head->bytes) {
        fail_as(c, r, ERR_FORMAT, head->bytes < bytes ? KVT_FAILED_TRUNCATED : KVT_FAILED_FORMAT,
                false, "the sender pushed a frame of another size than its pieces");
        drop_frame(c, p);
        return 0;
    }
    if (c->recv_jobs) return scatter_to_staging(c, p, head, offset, iov);
    return kvt_plan_iov(&r->slice, c->pool, r->blocks, r->n_tokens, range, offset, iov, cap);
}

void kvt_recv_scattered(struct kvt_core *c, struct kvt_peer *p, const struct kvt_message *head,
                        uint64_t bytes)
{
    struct kvt_recv *r = p ? bound(c, p, head) : NULL;
    if (!r || state_of(r) != KVT_RECV_BOUND) {
        drop_frame(c, p);
        return;
    }
    note_movement(r);
    if (bytes < head->bytes) return;
    r->arrived[head->layer] += head->n;
    if (c->recv_jobs) store_frame(c, p, r, head);
}

/* ---- losses and deadlines ---- */

void kvt_recv_peer_lost(struct kvt_core *c, struct kvt_peer *p, enum status st, const char *text)
{
    bool scatters = p->ops->caps & KVT_CAP_RECEIVER_SCATTERS;
    drop_frame(c, p);
    LIST_FOREACH (r, &p->recvs, struct kvt_recv, link)
        if (state_of(r) == KVT_RECV_BOUND) fail(c, r, st, scatters, text);
}

void kvt_recv_peer_fenced(struct kvt_core *c, struct kvt_peer *p)
{
    LIST_FOREACH (r, &p->recvs, struct kvt_recv, link) {
        if (state_of(r) == KVT_RECV_BOUND)
            fail(c, r, ERR_PEER_LOST, true, "the connection to the sender was torn down");
        else fenced(c, r);
    }
}

/* Repeats STOP to a writer that has not answered: the message or its answer may have been lost. The
 * pauses double, so that a writer that is stopped for long does not get too many. */
static void stop_again(struct kvt_recv *r, uint64_t now_ms)
{
    enum { DOUBLINGS = 32 }; /* longer than any process lives */
    uint32_t n = r->n_stops < DOUBLINGS ? r->n_stops : DOUBLINGS;
    if (now_ms - r->t_fence_ms < (uint64_t)KVT_STOP_AGAIN_MS << (n - 1)) return;
    r->n_stops++;
    kvt_peer_send(r->peer, KVT_MSG_STOP, r->session, r->generation, 0, ERR_CANCELED);
}

void kvt_recv_tick(struct kvt_core *c, uint64_t now_ms)
{
    uint32_t n_quarantined = 0;
    for (uint32_t i = 0; i < c->n_slots; i++) {
        struct kvt_recv *r = &c->slots[i];
        uint32_t s = state_of(r);
        if (s == KVT_RECV_FENCING) {
            n_quarantined++;
            stop_again(r, now_ms);
            if ((r->peer->ops->caps & KVT_CAP_FENCE_TEARDOWN) &&
                now_ms > r->t_fence_ms + KVT_FENCE_TEARDOWN_MS)
                r->peer->must_close = true;
        } else if (s == KVT_RECV_BOUND && r->t_wrong_sum_ms &&
                   now_ms > r->t_wrong_sum_ms +
                                (KVT_DOUBT_MS < c->stall_ms ? KVT_DOUBT_MS : c->stall_ms)) {
            fail_wrong_checksum(c, r);
        } else if (s >= KVT_RECV_OPEN &&
                   (now_ms > r->t_moved_ms + c->stall_ms || now_ms > r->deadline_ms)) {
            char text[128];
            if (now_ms > r->deadline_ms)
                snprintf(text, sizeof text, "the KV transfer was not complete after %llu ms",
                         (unsigned long long)c->deadline_ms);
            else snprintf(text, sizeof text, "no KV arrived for %u ms", c->stall_ms);
            fail(c, r, ERR_TIMEOUT, false, text);
        }
    }
    kvt_stats_gauges(c->stats, atomic_load_explicit(&c->n_sends, memory_order_relaxed),
                     atomic_load_explicit(&c->n_recvs, memory_order_relaxed), n_quarantined);
}
