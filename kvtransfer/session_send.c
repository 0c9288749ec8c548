/* session_send.c - the sender's side of a transfer: turns ready layers into batches of puts and
 * notes. Diagram and invariants: session.h.
 *
 * A session keeps for each layer how many tokens are ready and which position is next; layers with
 * something to put wait in a FIFO queue. Each pump puts one batch, so that sessions and connections
 * share the thread and the link. For a peer of another layout a batch is converted in staging
 * memory; it stays there until the transport accepts it and is released with its PUT_DONE. For a
 * pool in GPU memory the GPU converts, copies batches to host memory for transports that read it,
 * and computes the checksums. */
#include "kvtransfer/session.h"

#include <stdio.h>
#include <string.h>

#include "kvtransfer/convert.h"
#include "shared/base/clock.h"
#include "shared/base/hash/hash.h"
#include "shared/base/mem.h"

/* ---- life ---- */

void kvt_send_free(struct kvt_core *c, struct kvt_send *s)
{
    if (!s) return;
    atomic_fetch_sub_explicit(&c->n_sends, 1, memory_order_relaxed);
    mem_free(s->dst_blocks);
    mem_free(s->tokens);
    mem_free(s->queued);
    mem_free(s->events);
    mem_free(s);
}

static enum status allocate(struct kvt_send *s, uint32_t n_layers)
{
    s->dst_blocks = mem_try_calloc((size_t)s->n_used + s->n_src + 1, sizeof *s->dst_blocks);
    s->tokens = mem_try_calloc(3 * (size_t)n_layers, sizeof *s->tokens);
    s->queued = mem_try_calloc(n_layers, sizeof *s->queued);
    s->events = mem_try_calloc(n_layers, sizeof *s->events);
    if (!s->dst_blocks || !s->tokens || !s->queued || !s->events) return ERR_NOMEM;
    s->src_blocks = s->dst_blocks + s->n_used;
    s->cursor = s->tokens + n_layers;
    s->queue = s->cursor + n_layers;
    return OK;
}

static void read_grant(struct kvt_send *s, const struct kvt_grant_msg *g,
                       const struct kv_layout *mine)
{
    for (uint32_t i = 0; i < s->n_used; i++) s->dst_blocks[i] = kvt_grant_block(g, i);
    for (uint32_t i = 0; i < s->n_src; i++) s->src_blocks[i] = -1;
    uint64_t skipped = (uint64_t)s->n_first * g->block_tokens;
    for (uint32_t i = 0; i < mine->n_layers; i++) {
        s->tokens[i] = skipped < s->n_tokens ? (uint32_t)skipped : s->n_tokens;
        s->cursor[i] = s->n_first;
    }
}

static enum status check_grant(const struct kvt_core *c, const struct kvt_grant_msg *g,
                               struct err *err)
{
    uint32_t n_used = (uint32_t)(((uint64_t)g->n_tokens + g->block_tokens - 1) / g->block_tokens);
    if (n_used > g->n_blocks)
        return err_set(err, ERR_FORMAT, "a KV grant of %u blocks cannot hold %u tokens",
                       g->n_blocks, g->n_tokens);
    if (kvt_plan_n_blocks(&c->layout, g->n_tokens) > KVT_GRANT_BLOCKS_MAX)
        return err_set(err, ERR_FORMAT, "a KV grant of %u tokens needs more than %d blocks here",
                       g->n_tokens, KVT_GRANT_BLOCKS_MAX);
    struct kvt_head_slice slice;
    if (kvt_head_slice_of(&c->layout, g->first_head, g->n_heads, &slice) != OK) {
        uint32_t mine = c->layout.first_head;
        return err_set(err, ERR_PEER_MISMATCH,
                       "the grant names KV heads %u to %llu of the model, this rank holds %u to "
                       "%u: the receiver grants each sender its own part",
                       g->first_head, (unsigned long long)g->first_head + g->n_heads - 1, mine,
                       mine + c->layout.n_kv_heads - 1);
    }
    return OK;
}

enum status kvt_send_create(struct kvt_core *c, uint64_t id, uint64_t of, uint64_t peer,
                            struct str grant, struct kvt_send **out, struct err *err)
{
    struct kvt_grant_msg g;
    TRY(kvt_grant_decode(grant, &g, err));
    TRY(check_grant(c, &g, err));
    if (atomic_fetch_add_explicit(&c->n_sends, 1, memory_order_relaxed) >= c->n_transfers) {
        atomic_fetch_sub_explicit(&c->n_sends, 1, memory_order_relaxed);
        return err_set(err, ERR_FULL, "%u KV transfers are being sent, the limit", c->n_transfers);
    }
    struct kvt_send *s = mem_try_calloc(1, sizeof *s);
    if (!s) {
        atomic_fetch_sub_explicit(&c->n_sends, 1, memory_order_relaxed);
        return err_set(err, ERR_NOMEM, "no memory for a KV transfer");
    }
    list_init(&s->link);
    s->id = id;
    s->of = of;
    s->peer_handle = peer;
    /* unique; order does not matter */
    s->serial = atomic_fetch_add_explicit(&c->next_serial, 1, memory_order_relaxed);
    s->session = g.session;
    s->generation = g.generation;
    s->first_head = g.first_head;
    s->n_heads = g.n_heads;
    s->block_tokens = g.block_tokens;
    s->n_tokens = g.n_tokens;
    s->n_used = (uint32_t)(((uint64_t)g.n_tokens + g.block_tokens - 1) / g.block_tokens);
    s->n_src = kvt_plan_n_blocks(&c->layout, g.n_tokens);
    s->n_first = g.n_skip < s->n_used ? g.n_skip : s->n_used;
    s->deadline_ms = clock_ms() + c->deadline_ms;
    if (allocate(s, c->layout.n_layers) != OK) {
        uint32_t n_used = s->n_used;
        kvt_send_free(c, s);
        return err_set(err, ERR_NOMEM, "no memory for a KV transfer of %u blocks", n_used);
    }
    read_grant(s, &g, &c->layout);
    *out = s;
    return OK;
}

/* ---- ends ---- */

static struct kvt_send *first_of(const struct kvt_core *c, uint64_t of)
{
    return map_get(&c->sends, map_key_u64(&of));
}

static void unlink_of(struct kvt_core *c, struct kvt_send *s)
{
    struct kvt_send *first = first_of(c, s->of), **at = &first;
    while (*at != s) at = &(*at)->next_of;
    *at = s->next_of;
    if (first) map_put(&c->sends, map_key_u64(&first->of), first);
    else map_del(&c->sends, map_key_u64(&s->of));
}

static void end(struct kvt_core *c, struct kvt_send *s, struct kvt_event ev)
{
    ev.id = s->id;
    ev.transport = s->peer ? s->peer->ops->name : "";
    if (s->peer && s->peer->conn) ev.link_speed = s->peer->ops->link_speed(s->peer->conn);
    if (ev.kind == KVT_SENT)
        kvt_stats_done(c->stats, ev.transport, KVT_DIRECTION_SEND, ev.bytes, ev.ns, ev.busy_ns);
    else kvt_stats_failed(c->stats, KVT_DIRECTION_SEND, kvt_failure_of(ev.status));
    list_remove(&s->link);
    unlink_of(c, s);
    kvt_send_free(c, s);
    kvt_core_event(c, ev);
}

static void release_stage(struct kvt_core *c, struct kvt_send *s, struct kvt_batch *b)
{
    if (b->stage.n) kvt_staging_release(c->staging, &s->peer->staging_chunks, &b->stage);
}

/* Drops the prepared batch. A job that still writes its stage keeps the stage until it is done. */
static void drop_prepared(struct kvt_core *c, struct kvt_send *s)
{
    struct kvt_batch *b = &s->prepared;
    if (b->job && b->stage.n) {
        b->job->stage = b->stage;
        s->peer->staging_chunks -= b->stage.n;
        *kvt_gpu_jobs_held(c->send_jobs) += b->stage.n;
        b->stage.n = 0;
    }
    kvt_gpu_job_release(b->job);
    release_stage(c, s, b);
    *b = (struct kvt_batch){ .stage = { 0, 0 } };
}

/* Ends a session in STOPPING after its last PUT_DONE: it will read and write nothing any more. */
static void end_stopped(struct kvt_core *c, struct kvt_send *s)
{
    struct kvt_event ev = { .kind = KVT_SEND_FAILED, .status = s->status, .bytes = s->bytes };
    snprintf(ev.text, sizeof ev.text, "%s", s->text);
    if (s->peer) kvt_peer_send(s->peer, KVT_MSG_STOPPED, s->session, s->generation, 0, s->status);
    end(c, s, ev);
}

/* Drops the oldest note that is due. A job whose put still runs stays until it is done. */
static void drop_note(struct kvt_send *s)
{
    kvt_gpu_job_release(s->notes[s->first_note].job);
    s->first_note = (s->first_note + 1) % KVT_SEND_PUTS;
    s->n_notes--;
}

/* The put reads and writes nothing any more. */
static void end_put(struct kvt_core *c, struct kvt_send *s, struct kvt_batch *b)
{
    if (b->job) kvt_gpu_job_end_put(b->job);
    b->job = NULL;
    release_stage(c, s, b);
}

void kvt_send_fail(struct kvt_core *c, struct kvt_send *s, enum status st, const char *text)
{
    if (s->state == KVT_SEND_STOPPING) return;
    s->state = KVT_SEND_STOPPING;
    s->status = st;
    if (st != ERR_TIMEOUT) /* now its puts have stall_ms to end; after a stall they have had it */
        s->t_moved_ms = clock_ms();
    snprintf(s->text, sizeof s->text, "%s", text);
    while (s->n_notes) drop_note(s);
    drop_prepared(c, s);
    if (s->unfinished) s->peer->ops->abandon(s->peer->conn, s->session, s->generation);
    else end_stopped(c, s);
}

void kvt_send_peer_lost(struct kvt_core *c, struct kvt_peer *p, enum status st, const char *text)
{
    LIST_FOREACH (s, &p->sends, struct kvt_send, link) {
        for (uint32_t i = 0; i < KVT_SEND_PUTS; i++) end_put(c, s, &s->puts[i]);
        s->unfinished = 0; /* the transport reads nothing for a lost connection */
        if (s->state == KVT_SEND_STOPPING) end_stopped(c, s);
        else kvt_send_fail(c, s, st, text);
    }
}

/* ---- what the caller says ---- */

/* Why a session cannot begin, or NULL. The receiver is not told: it knows no such session, or it is
 * another sender's. */
static const char *refusal(const struct kvt_core *c, struct kvt_send *s, const struct kvt_peer *p,
                           enum status *st)
{
    *st = ERR_PEER_LOST;
    if (!p || !p->up || p->lost) return "there is no connection to the decode node";
    *st = ERR_FORMAT;
    if (s->block_tokens != p->layout.block_tokens)
        return "the grant's block size differs from the receiver's layout";
    if (kvt_head_slice_of(&p->layout, s->first_head, s->n_heads, &s->dst) != OK ||
        kvt_head_slice_of(&c->layout, s->first_head, s->n_heads, &s->src) != OK)
        return "the grant names KV heads that the receiver does not have";
    for (uint32_t i = s->n_first; i < s->n_used; i++)
        if (s->dst_blocks[i] < 0 || (uint32_t)s->dst_blocks[i] >= p->layout.n_blocks)
            return "the grant names blocks outside the receiver's pool";
    *st = ERR_STALE;
    LIST_FOREACH (it, &p->sends, struct kvt_send, link)
        if (it->session == s->session && it->generation == s->generation)
            return "another transfer of this node has that grant";
    return NULL;
}

void kvt_send_begin(struct kvt_core *c, struct kvt_send *s, struct kvt_peer *p)
{
    struct kvt_send *others = first_of(c, s->of), *same = others;
    while (same && same->id != s->id) same = same->next_of;
    if (same) {
        struct kvt_event ev = {
            .kind = KVT_SEND_FAILED, .id = s->id, .status = ERR_INVALID, .transport = ""
        };
        snprintf(ev.text, sizeof ev.text, "a KV transfer of this id is being sent already");
        kvt_send_free(c, s);
        kvt_core_event(c, ev);
        return;
    }
    s->next_of = others;
    map_put(&c->sends, map_key_u64(&s->of), s);
    s->t_moved_ms = clock_ms();
    enum status st;
    const char *why = refusal(c, s, p, &st);
    if (why) {
        kvt_send_fail(c, s, st, why);
        return;
    }
    s->peer = p;
    s->direct = kvt_plan_direct(&c->layout, &p->layout);
    s->sums = p->checksum && c->checksum;
    s->n_layers = kv_layout_common_layers(&c->layout, &p->layout);
    s->n_left = (uint64_t)(s->n_used - s->n_first) * s->n_layers;
    list_push(&p->sends, &s->link);
    const uint32_t bits = (s->sums ? KVT_OPEN_SUMS : 0) |
                          (s->n_layers < p->layout.n_layers ? KVT_OPEN_NO_DRAFT : 0);
    kvt_peer_send(p, KVT_MSG_OPEN, s->session, s->generation, bits, OK);
}

static void enqueue(struct kvt_core *c, struct kvt_send *s, uint32_t layer)
{
    if (s->queued[layer]) return;
    s->queued[layer] = 1;
    s->queue[(s->q_head + s->q_len++) % c->layout.n_layers] = layer;
}

static void add_range(struct kvt_core *c, struct kvt_send *s, const struct kvt_token_range *range,
                      const int32_t *blocks)
{
    uint32_t layer = range->layer, end_token = range->end;
    bool over = s->finish && !s->awaits_rest;
    if (s->state == KVT_SEND_STOPPING) return; /* its end was or will be reported */
    if (layer >= s->n_layers) return;          /* the receiver has no draft layer */
    if (over || range->begin > s->tokens[layer]) {
        kvt_send_fail(c, s, ERR_INVALID,
                      over ? "tokens were added after the end of the transfer"
                           : "tokens are missing between two ranges of a layer");
        return;
    }
    if (end_token > s->n_tokens) end_token = s->n_tokens;
    uint32_t n = kvt_plan_n_blocks(&c->layout, end_token);
    for (uint32_t i = (uint32_t)((uint64_t)s->n_first * s->block_tokens / c->layout.block_tokens);
         i < n; i++) {
        if (blocks[i] < 0 || (uint32_t)blocks[i] >= c->layout.n_blocks) {
            kvt_send_fail(c, s, ERR_INVALID, "a source block is outside the pool");
            return;
        }
        s->src_blocks[i] = blocks[i];
    }
    if (end_token <= s->tokens[layer]) return;
    s->tokens[layer] = end_token;
    if (range->event) s->events[layer] = range->event;
    if (kvt_plan_complete(s->dst.layout, s->n_tokens, end_token) > s->cursor[layer]) {
        if (s->q_len == 0)
            s->t_moved_ms = clock_ms(); /* it was idle: the stall deadline begins here */
        enqueue(c, s, layer);
    }
}

void kvt_send_add(struct kvt_core *c, uint64_t of, const struct kvt_token_range *range,
                  const int32_t *blocks)
{
    for (struct kvt_send *s = first_of(c, of), *next; s; s = next) {
        next = s->next_of; /* a failure frees s */
        add_range(c, s, range, blocks);
    }
}

static void send_finish(struct kvt_send *s)
{
    s->state = KVT_SEND_FINISHING;
    s->t_moved_ms = clock_ms();
    kvt_peer_send(s->peer, KVT_MSG_FINISH, s->session, s->generation, s->bytes, OK);
}

/* FINISH waits for the last PUT_DONE. After an abandoned put a FINISH would tell the receiver that
 * a transfer is complete whose bytes never came. */
static void finish_if_complete(struct kvt_core *c, struct kvt_send *s)
{
    if (!s->finish || s->state != KVT_SEND_ACTIVE || s->q_len || s->n_notes) return;
    if (s->n_left && s->awaits_rest) return;
    if (s->n_left)
        kvt_send_fail(c, s, ERR_INVALID,
                      "the transfer was finished before every token of every layer was there");
    else if (!s->unfinished) send_finish(s);
}

void kvt_send_end(struct kvt_core *c, uint64_t of, uint64_t now_ns, bool awaits_rest)
{
    for (struct kvt_send *s = first_of(c, of), *next; s; s = next) {
        next = s->next_of;
        if (s->finish || s->state == KVT_SEND_STOPPING) continue;
        s->finish = true;
        s->awaits_rest = awaits_rest;
        s->t_finish_ns = now_ns;
        s->t_moved_ms = clock_ms();
        finish_if_complete(c, s);
    }
}

void kvt_send_cancel_of(struct kvt_core *c, uint64_t of)
{
    for (struct kvt_send *s = first_of(c, of), *next; s; s = next) {
        next = s->next_of;
        kvt_send_fail(c, s, ERR_CANCELED, "cancelled by this node");
    }
}

/* ---- moving ---- */

/* Sends the oldest note that is due. False: its checksums are not computed, or the connection is
 * full. */
static bool send_note(struct kvt_send *s)
{
    const struct kvt_due_note *due = &s->notes[s->first_note];
    struct kvt_message *m = &s->note;
    if (due->job && !kvt_gpu_job_is_done(due->job)) return false;
    m->kind = KVT_MSG_NOTE;
    m->session = s->session;
    m->generation = s->generation;
    m->layer = due->range.layer;
    m->more_layers = due->range.more_layers;
    m->first = due->range.first;
    m->n = due->range.n;
    m->bytes = s->sums ? sizeof m->sums[0] * kvt_message_pieces(m) : 0;
    if (due->job) memcpy(m->sums, due->job->sums, m->bytes);
    if (s->peer->ops->notify(s->peer->conn, m) != OK) return false;
    drop_note(s);
    s->t_moved_ms = clock_ms();
    return true;
}

/* Sends what is due; true if another put may follow. Puts between GPUs do not wait for the NOTEs of
 * those before; the CPU's checksums are in `note` until it is sent. */
static bool flush_notes(const struct kvt_core *c, struct kvt_send *s)
{
    while (s->n_notes && send_note(s)) {}
    return c->send_jobs ? s->n_notes < KVT_SEND_PUTS : s->n_notes == 0;
}

/* The checksums of a put's pieces: the transport knows those that it computed while it copied.
 * `made`: converted pieces, or NULL. */
static void sum_pieces(struct kvt_core *c, const struct kvt_send *s, struct kvt_block_range range,
                       const char *made, uint64_t *sums)
{
    const struct kvt_sums *from_put = c->put_sums;
    if (!made && !memchr(from_put->known, true, range.n)) {
        kvt_plan_checksums(&s->src, c->pool, s->src_blocks, s->n_tokens, range, c->scratch, sums);
        return;
    }
    for (uint32_t i = 0; i < range.n; i++) {
        uint32_t i_block = range.first + i,
                 n_valid = kvt_plan_tokens(s->dst.layout, s->n_tokens, i_block);
        uint64_t bytes = kvt_head_slice_bytes(&s->dst, n_valid);
        if (from_put->known[i]) sums[i] = from_put->values[i];
        else if (made) sums[i] = hash_64(made, bytes, 0);
        else
            sums[i] = kvt_plan_checksum(&s->src, c->pool, range.layer, s->src_blocks[i_block],
                                        n_valid, c->scratch);
        if (made) made += bytes;
    }
}

/* Makes a note of a put that the transport has accepted. Now the CPU computes the checksums of the
 * bytes in the receiver's layout: the source is still in cache, and a refused put costs nothing. */
static void make_note(struct kvt_core *c, struct kvt_send *s, const struct kvt_batch *b,
                      uint64_t bytes)
{
    s->notes[(s->first_note + s->n_notes++) % KVT_SEND_PUTS] = (struct kvt_due_note){
        .range = { b->range.layer, b->more_layers, b->range.first, b->range.n },
        .job = b->job,
    };
    if (!s->sums) return;
    if (!b->job)
        sum_pieces(c, s, b->range, b->stage.n ? kvt_staging_at(c->staging, b->stage) : NULL,
                   s->note.sums);
    kvt_stats_hashed(c->stats, KVT_DIRECTION_SEND, bytes);
}

/* Acquires staging memory for the pieces of a range, or for the first of them (*range shrinks).
 * False: none is free. */
static bool acquire_stage(struct kvt_core *c, struct kvt_send *s, struct kvt_block_range *range)
{
    uint64_t bytes = kvt_plan_range_bytes(&s->dst, s->n_tokens, *range);
    if (kvt_staging_acquire(c->staging, bytes, range->n == 1, &s->peer->staging_chunks,
                            &s->prepared.stage))
        return true;
    if (range->n == 1) return false;
    range->n = 1; /* fragmented, or others hold most of it: one piece always makes progress */
    bytes = kvt_plan_range_bytes(&s->dst, s->n_tokens, *range);
    return kvt_staging_acquire(c->staging, bytes, true, &s->peer->staging_chunks,
                               &s->prepared.stage);
}

/* Converts the pieces of a range in staging memory. False: none is free. */
static bool convert_batch(struct kvt_core *c, struct kvt_send *s, struct kvt_block_range range)
{
    if (s->prepared.range.n) return true; /* prepared for an earlier try */
    if (!acquire_stage(c, s, &range)) return false;
    uint64_t bytes = kvt_plan_range_bytes(&s->dst, s->n_tokens, range);
    s->prepared.range = range;
    char *out = kvt_staging_at(c->staging, s->prepared.stage);
    for (uint32_t i = range.first; i < range.first + range.n; i++) {
        kvt_convert_piece(&s->src, c->pool, s->src_blocks, &s->dst, s->n_tokens, range.layer, i,
                          out);
        out += kvt_head_slice_bytes(&s->dst, kvt_plan_tokens(s->dst.layout, s->n_tokens, i));
    }
    kvt_stats_converted(c->stats, bytes);
    return true;
}

/* Whether the bytes must be copied to host memory before they are put. */
static bool must_fetch(const struct kvt_core *c, const struct kvt_send *s)
{
    return c->send_jobs && !(s->peer->ops->caps & KVT_CAP_DEVICE_MEM);
}

/* Whether a batch is put from a stage that the GPU fills, in host or device memory. */
static bool must_stage(const struct kvt_core *c, const struct kvt_send *s)
{
    return c->send_jobs && (!s->direct || must_fetch(c, s));
}

/* Begins a GPU job that converts a range, copies it to host memory, computes its checksums, or
 * several of these. False: no job or stage is free, or (device_failed) it is impossible. */
static bool begin_gpu_job(struct kvt_core *c, struct kvt_send *s, struct kvt_block_range range)
{
    struct kvt_gpu_job *job = kvt_gpu_jobs_acquire(c->send_jobs);
    if (!job) return false;
    if (must_stage(c, s) && !acquire_stage(c, s, &range)) {
        kvt_gpu_job_release(job);
        return false;
    }
    s->prepared.range = range;
    s->prepared.job = job;
    job->stage = s->prepared.stage;
    struct kvt_gpu_job_params params = {
        .slice = &s->src,
        .blocks = s->src_blocks,
        .n_tokens = s->n_tokens,
        .range = range,
        .event = s->events[range.layer],
        .sums = s->sums,
        .copy = must_fetch(c, s) ? KVT_GPU_COPY_D2H : KVT_GPU_COPY_NONE,
        .convert_to = s->direct ? NULL : &s->dst,
    };
    enum status st = kvt_gpu_job_begin(job, &params);
    job->stage.n = 0; /* the batch's, until it is dropped */
    s->device_failed = st != OK;
    if (st == OK && !s->direct)
        kvt_stats_converted(c->stats, kvt_plan_range_bytes(&s->dst, s->n_tokens, range));
    return st == OK;
}

/* True when the batch in `prepared` may be put: it is converted and copied. */
static bool prepare(struct kvt_core *c, struct kvt_send *s, struct kvt_block_range range)
{
    if (!s->prepared.range.n && !begin_gpu_job(c, s, range)) return false;
    if (!must_stage(c, s)) return true; /* the transport waits for the event, NOTE for the sums */
    if (s->prepared.job && !kvt_gpu_job_is_done(s->prepared.job)) return false;
    if (!s->sums) {
        kvt_gpu_job_release(s->prepared.job);
        s->prepared.job = NULL;
    }
    return true;
}

/* Whether puts go from pool to pool by a GPU, and no CPU touches the bytes. */
static bool by_gpu(const struct kvt_core *c, const struct kvt_send *s)
{
    return c->send_jobs && !must_stage(c, s);
}

/* Each put costs a message and wakes both sides. If the CPU does not touch the bytes, a put is as
 * large as the transport prefers. */
static uint64_t put_bytes(const struct kvt_core *c, const struct kvt_send *s)
{
    if (by_gpu(c, s)) return s->t_first_ns ? KVT_DEVICE_PUT_BYTES : KVT_DEVICE_FIRST_PUT_BYTES;
    if (c->send_jobs) return KVT_PUT_BYTES;
    return s->peer->ops->put_bytes && s->direct && !s->sums ? s->peer->ops->put_bytes
                                                            : KVT_PUT_BYTES;
}

/* How many positions of a layer are ready to be put. */
static uint32_t n_ready(const struct kvt_send *s, uint32_t layer)
{
    return kvt_plan_complete(s->dst.layout, s->n_tokens, s->tokens[layer]) - s->cursor[layer];
}

/* How many queued layers after that of `range`, whose last ready position it has, a put by the GPU
 * may take as well: the next layers, the same positions, the same event. */
static uint32_t more_layers(const struct kvt_core *c, const struct kvt_send *s,
                            struct kvt_block_range range)
{
    const uint64_t bytes = kvt_plan_range_bytes(&s->dst, s->n_tokens, range);
    const uint32_t copies = 2 * range.n + kv_layout_n_segments(s->dst.layout),
                   most = kvt_plan_max_copies(&c->layout);
    uint32_t n = 1;
    if (range.n < n_ready(s, range.layer)) return 0;
    for (; n < s->q_len; n++) {
        const uint32_t layer = s->queue[(s->q_head + n) % c->layout.n_layers];
        if (layer != range.layer + n || s->cursor[layer] != range.first ||
            n_ready(s, layer) != range.n || s->events[layer] != s->events[range.layer])
            break;
        if ((n + 1) * range.n > KVT_PUT_PIECES || (n + 1) * copies > most ||
            (n + 1) * bytes > put_bytes(c, s))
            break;
    }
    return n - 1;
}

/* Prepares a put whose checksums the GPU computes while it copies. False: no job is free. */
static bool plan_summed_put(struct kvt_core *c, struct kvt_send *s, const struct kvt_batch *b)
{
    if (s->prepared.range.n) return true; /* for an earlier try */
    struct kvt_gpu_job *job = kvt_gpu_jobs_acquire(c->send_jobs);
    if (!job) return false;
    s->prepared = *b;
    s->prepared.job = job;
    s->prepared.on_device = kvt_gpu_job_plan_put(job,
                                                 &(struct kvt_gpu_job_params){
                                                     .slice = &s->src,
                                                     .blocks = s->src_blocks,
                                                     .n_tokens = s->n_tokens,
                                                     .range = b->range,
                                                     .more_layers = b->more_layers,
                                                 },
                                                 &s->dst, s->dst_blocks);
    return true;
}

/* Prepares the next batch of the first queued layer. False: no staging memory or job is free. */
static bool next_batch(struct kvt_core *c, struct kvt_send *s, struct kvt_batch *out)
{
    const uint32_t layer = s->queue[s->q_head],
                   most = by_gpu(c, s) ? KVT_PUT_PIECES : KVT_BATCH_PIECES;
    struct kvt_block_range range = {
        layer, s->cursor[layer], kvt_plan_batch(&s->dst, n_ready(s, layer), put_bytes(c, s), most)
    };
    *out = (struct kvt_batch){ .range = range };
    if (by_gpu(c, s)) {
        out->more_layers = more_layers(c, s, range);
        if (!s->sums) return true;
        if (!plan_summed_put(c, s, out)) return false;
    } else {
        if (s->direct && !c->send_jobs) return true;
        if (c->send_jobs ? !prepare(c, s, range) : !convert_batch(c, s, range)) return false;
    }
    *out = s->prepared;
    return true;
}

/* Counts what was put: `bytes` of the first queued layer, and of more_layers after it. A layer with
 * more to put stays in the queue. */
static void account(struct kvt_core *c, struct kvt_send *s, const struct kvt_batch *b,
                    uint64_t bytes)
{
    s->t_moved_ms = clock_ms();
    for (uint32_t i = 0; i <= b->more_layers; i++) {
        const uint32_t layer = b->range.layer + i;
        s->cursor[layer] += b->range.n;
        s->n_left -= b->range.n;
        s->bytes += bytes;
        kvt_stats_bytes(c->stats, s->peer->ops->name, KVT_DIRECTION_SEND, bytes);
        if (b->more_layers == 0 && n_ready(s, layer)) return;
        s->queued[layer] = 0;
        s->q_head = (s->q_head + 1) % c->layout.n_layers;
        s->q_len--;
        if (n_ready(s, layer)) enqueue(c, s, layer); /* tokens came since it was planned */
    }
}

/* Fills c->copies with the copies of a batch and returns how many. */
static uint32_t plan_copies(struct kvt_core *c, const struct kvt_send *s, const struct kvt_batch *b)
{
    uint32_t n = 0;
    if (b->on_device.n) return 0;
    if (b->stage.n)
        return kvt_plan_copies_from(KVT_STAGING + kvt_staging_offset(b->stage), &s->dst,
                                    s->dst_blocks, s->n_tokens, b->range, c->copies);
    for (uint32_t i = 0; i <= b->more_layers; i++) {
        const struct kvt_block_range range = { b->range.layer + i, b->range.first, b->range.n };
        n += kvt_plan_copies(&s->src, s->src_blocks, &s->dst, s->dst_blocks, s->n_tokens, range,
                             c->copies + n);
    }
    return n;
}

/* Offers a batch to the transport as put `slot`. */
static enum status offer_batch(struct kvt_core *c, struct kvt_send *s, const struct kvt_batch *b,
                               uint32_t slot, uint64_t layer_bytes)
{
    const struct kvt_put put = {
        .copies = c->copies,
        .n_copies = plan_copies(c, s, b),
        .tag = s->serial * KVT_SEND_PUTS + slot,
        .event = b->stage.n ? 0 : s->events[b->range.layer],
        .sums = s->sums && !b->job ? c->put_sums : NULL,
        .piece_bytes = kvt_head_slice_bytes(&s->dst, s->dst.layout->block_tokens),
        .on_device = b->on_device,
        .head = {
            .kind = KVT_MSG_DATA,
            .session = s->session,
            .generation = s->generation,
            .layer = b->range.layer,
            .more_layers = b->more_layers,
            .first = b->range.first,
            .n = b->range.n,
            .bytes = layer_bytes * (b->more_layers + 1),
        },
    };
    memset(c->put_sums->known, 0, sizeof c->put_sums->known);
    return s->peer->ops->put(s->peer->conn, &put);
}

/* Puts the next batch of the first queued layer; true if the transport accepted it. */
static bool put_batch(struct kvt_core *c, struct kvt_send *s)
{
    const uint32_t slot = (uint32_t)__builtin_ctzll(~(uint64_t)s->unfinished);
    struct kvt_batch b;
    if (slot >= KVT_SEND_PUTS || !next_batch(c, s, &b)) return false;
    const uint64_t now = clock_ns(), bytes = kvt_plan_range_bytes(&s->dst, s->n_tokens, b.range);
    if (offer_batch(c, s, &b, slot, bytes) != OK) return false;
    if (!s->t_first_ns) s->t_first_ns = now;
    s->puts[slot] = b;
    if (!s->unfinished) s->t_busy_ns = now;
    s->unfinished |= 1u << slot;
    s->prepared = (struct kvt_batch){ .stage = { 0, 0 } }; /* the put's now */
    account(c, s, &b, bytes);
    make_note(c, s, &b, bytes * (b.more_layers + 1));
    if (b.on_device.n) kvt_gpu_job_attach(b.job);
    else s->puts[slot].job = NULL; /* the note's alone */
    return true;
}

bool kvt_send_pump(struct kvt_core *c, struct kvt_peer *p)
{
    bool more = false;
    if (!p->up || p->lost) return false;
    LIST_FOREACH (s, &p->sends, struct kvt_send, link) {
        if (s->state != KVT_SEND_ACTIVE || !flush_notes(c, s)) continue;
        if (s->q_len && put_batch(c, s)) {
            flush_notes(c, s);
            more = true;
        }
        if (s->device_failed)
            kvt_send_fail(c, s, ERR_NODEV, "the GPU that holds the KV has failed");
        else finish_if_complete(c, s);
    }
    /* The next pump begins with another session. */
    if (!list_empty(&p->sends)) {
        struct list *first = p->sends.next;
        list_remove(first);
        list_push(&p->sends, first);
    }
    return more;
}

/* Whether the session waits only for the receiver's answer. */
static bool awaits_answer(const struct kvt_send *s)
{
    return s->state == KVT_SEND_OPENING || s->state == KVT_SEND_FINISHING;
}

/* Whether the transport has bytes of the session to move, or a NOTE that it does not take. */
static bool is_moving(const struct kvt_send *s)
{
    return s->unfinished || (s->n_notes && !s->notes[s->first_note].job);
}

/* When something last showed that the session goes on. Bytes of other sessions count while it waits
 * for the connection: they share it. A put may have begun long after the last one was over. */
static uint64_t moved_ms(const struct kvt_peer *p, const struct kvt_send *s)
{
    uint64_t moved = s->t_moved_ms, began = s->t_busy_ns / 1000000;
    if (awaits_answer(s) || !is_moving(s)) return moved;
    if (s->state != KVT_SEND_STOPPING && s->unfinished && began > moved) moved = began;
    return p->t_moved_ms > moved ? p->t_moved_ms : moved;
}

/* The peer has needed so long for a sign of it. */
static void slower(struct kvt_peer *p, uint64_t took_ms)
{
    if (took_ms > p->slow_ms)
        p->slow_ms = took_ms < KVT_QUIET_MAX_MS ? (uint32_t)took_ms : KVT_QUIET_MAX_MS;
}

static void on_answer(struct kvt_peer *p, uint64_t took_ms)
{
    if (p->t_heard_ms >= p->t_slow_ms + KVT_SLOW_FORGET_MS) {
        p->slow_ms -= p->slow_ms / 8;
        p->t_slow_ms = p->t_heard_ms;
    }
    slower(p, took_ms);
}

void kvt_send_put_done(struct kvt_core *c, struct kvt_peer *p, uint64_t tag)
{
    struct kvt_send *s = NULL;
    LIST_FOREACH (it, &p->sends, struct kvt_send, link)
        if (it->serial == tag / KVT_SEND_PUTS) s = it;
    uint32_t bit = 1u << tag % KVT_SEND_PUTS;
    const uint64_t now_ms = clock_ms();
    const bool is_awaited = s && s->unfinished & bit;
    if (is_awaited) slower(p, now_ms - moved_ms(p, s));
    p->t_moved_ms = p->t_heard_ms = now_ms;
    if (!is_awaited) return;
    s->unfinished &= ~bit;
    if (!s->unfinished) s->busy_ns += clock_ns() - s->t_busy_ns;
    end_put(c, s, &s->puts[tag % KVT_SEND_PUTS]);
    s->t_moved_ms = now_ms;
    if (s->state == KVT_SEND_STOPPING && !s->unfinished) end_stopped(c, s);
    else finish_if_complete(c, s);
}

/* ---- what the receiver says ---- */

static void on_done(struct kvt_core *c, struct kvt_send *s)
{
    if (s->state == KVT_SEND_STOPPING) return;
    if (s->state != KVT_SEND_FINISHING || s->unfinished) {
        kvt_send_fail(c, s, ERR_FORMAT, "the receiver acknowledged a transfer that had not ended");
        return;
    }
    uint64_t now = clock_ns();
    end(c, s,
        (struct kvt_event){
            .kind = KVT_SENT,
            .bytes = s->bytes,
            .ns = s->t_first_ns ? now - s->t_first_ns : now - s->t_finish_ns,
            .busy_ns = s->busy_ns,
            .tail_ns = now - s->t_finish_ns,
        });
}

static void on_stop(struct kvt_core *c, struct kvt_send *s, enum status st)
{
    char text[160];
    snprintf(text, sizeof text, "the receiver ended the transfer: %s", status_text(st));
    kvt_send_fail(c, s, st == OK ? ERR_PEER_REFUSED : st, text);
}

void kvt_send_message(struct kvt_core *c, struct kvt_peer *p, const struct kvt_message *m)
{
    struct kvt_send *s = NULL;
    LIST_FOREACH (it, &p->sends, struct kvt_send, link)
        if (it->session == m->session && it->generation == m->generation) s = it;
    p->t_heard_ms = clock_ms();
    if (!s) { /* it ended already */
        if (m->kind == KVT_MSG_STOP)
            kvt_peer_send(p, KVT_MSG_STOPPED, m->session, m->generation, 0, OK);
        else kvt_stats_dropped(c->stats, false);
        return;
    }
    if (awaits_answer(s)) on_answer(p, p->t_heard_ms - moved_ms(p, s));
    /* Only progress moves the deadline: a receiver that repeats itself must not keep the transfer
     * alive. */
    if (m->kind == KVT_MSG_STOP) on_stop(c, s, m->status);
    else if (m->kind == KVT_MSG_DONE) on_done(c, s);
    else if (m->kind == KVT_MSG_OPENED && s->state == KVT_SEND_OPENING) {
        s->state = KVT_SEND_ACTIVE;
        s->t_moved_ms = clock_ms();
        finish_if_complete(c, s);
    }
}

static uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }

static uint32_t patience_of(const struct kvt_core *c, const struct kvt_send *s)
{
    if (awaits_answer(s)) return least(c->stall_ms, KVT_ANSWER_MS);
    return is_moving(s) ? least(c->stall_ms, KVT_MOVE_MS) : c->stall_ms;
}

void kvt_send_wait_again(struct kvt_peer *p, uint64_t now_ms)
{
    LIST_FOREACH (s, &p->sends, struct kvt_send, link) s->t_moved_ms = now_ms;
}

static uint32_t quiet_ms(const struct kvt_core *c, const struct kvt_peer *p)
{
    uint32_t ms = p->ops->caps & KVT_CAP_HEALS ? KVT_QUIET_MAX_MS : 4 * p->slow_ms;
    if (ms < KVT_QUIET_MIN_MS) ms = KVT_QUIET_MIN_MS;
    return least(least(ms, KVT_QUIET_MAX_MS), c->stall_ms / 4);
}

/* Something is awaited of the peer, and nothing has come. */
static bool is_quiet(const struct kvt_core *c, const struct kvt_peer *p, uint64_t now_ms)
{
    const uint32_t quiet = quiet_ms(c, p);
    if (now_ms <= p->t_heard_ms + quiet) return false;
    LIST_FOREACH (s, &p->sends, struct kvt_send, link)
        if ((awaits_answer(s) || is_moving(s)) && now_ms > moved_ms(p, s) + quiet) return true;
    return false;
}

/* It is not this transfer's answer alone that got lost: no other would fare better. */
static bool is_silent(const struct kvt_peer *p, const struct kvt_send *s, uint64_t now_ms)
{
    return now_ms > moved_ms(p, s) + KVT_MOVE_MS && now_ms > p->t_heard_ms + KVT_MOVE_MS;
}

static void tell_quiet(struct kvt_core *c, struct kvt_peer *p, uint64_t now_ms)
{
    bool quiet = p->up && is_quiet(c, p, now_ms);
    if (quiet == p->quiet) return;
    p->quiet = quiet;
    kvt_core_event(c, (struct kvt_event){ .kind = quiet ? KVT_PEER_QUIET : KVT_PEER_HEARD,
                                          .peer = p->handle,
                                          .transport = p->ops->name });
}

void kvt_send_tick(struct kvt_core *c, struct kvt_peer *p, uint64_t now_ms)
{
    tell_quiet(c, p, now_ms);
    LIST_FOREACH (s, &p->sends, struct kvt_send, link) {
        bool answer = awaits_answer(s);
        uint32_t patience = patience_of(c, s);
        /* Waiting for the caller's next layer is not a stall of the transfer. */
        bool waits = s->state != KVT_SEND_ACTIVE || s->q_len || s->n_notes || s->unfinished ||
                     s->finish;
        bool stalls = waits && now_ms > moved_ms(p, s) + patience, late = now_ms > s->deadline_ms;
        if (s->state == KVT_SEND_STOPPING) {
            p->must_close |= stalls; /* only closing the connection ends a stuck abandoned put */
            continue;
        }
        char text[128];
        if (late)
            snprintf(text, sizeof text, "the KV transfer was not complete after %llu ms",
                     (unsigned long long)c->deadline_ms);
        else if (answer)
            snprintf(text, sizeof text, "the receiver did not answer %s within %u ms",
                     s->state == KVT_SEND_OPENING ? "OPEN" : "FINISH", patience);
        else snprintf(text, sizeof text, "no KV left for %u ms", patience);
        p->must_close |= stalls && answer && is_silent(p, s, now_ms);
        if (stalls || late) kvt_send_fail(c, s, ERR_TIMEOUT, text);
    }
}
