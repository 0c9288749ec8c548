/* decode.c - see decode.h: each message, engine event or transfer event moves one sequence. */
#include "decode/decode.h"

#include <string.h>

#include "decode/decode_internal.h"
#include "decode/kv_answer.h"
#include "kvtransfer/event_wire.h"
#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/mem.h"
#include "shared/cluster/answer.h"

enum {
    SWEEP_MS = 500,
    FIRST_TOKEN_SWEEPS = DECODE_FIRST_TOKEN_MS / SWEEP_MS, /* not by the clock: a process that was
                                                           * stopped goes on where it was */
    HIDDEN_MAX = 1 << 16                                   /* elements of a hidden state */
};

static void sweep(void *arg);

struct decode_worker *decode_create(const struct decode_options *o)
{
    struct decode_worker *w = MEM_NEW(struct decode_worker);
    w->o = *o;
    w->ranks = (struct decode_ranks){ .kvt = o->kvt, .cluster = o->cluster };
    w->ranks.layout = *engine_kv_layout(o->engine);
    ASSERT(o->n_ranks > 0 && o->n_ranks <= KV_RANKS_MAX);
    ASSERT(w->ranks.layout.tp_size == o->n_ranks);
    memcpy(w->ranks.all, o->ranks, o->n_ranks * sizeof *o->ranks);
    w->ranks.n = o->n_ranks;
    list_init(&w->live);
    token_batcher_init(&w->batcher, o->cluster);
    w->sweep = loop_timer_start(o->loop, SWEEP_MS, SWEEP_MS, sweep, w);
    w->received = metrics_counter(o->metrics, "baton_decode_received_total", "",
                                  "Sequences whose KV arrived and was verified.");
    w->received_bytes = metrics_counter(o->metrics, "baton_decode_received_bytes_total", "",
                                        "KV bytes received for sequences.");
    w->failed = metrics_counter(o->metrics, "baton_decode_failed_total", "",
                                "Sequences that ended with an error on this node.");
    w->canceled = metrics_counter(o->metrics, "baton_decode_canceled_total", "",
                                  "Sequences that were cancelled.");
    decode_parking_init(w, DECODE_PARKED_MAX, DECODE_RECORDS_MAX);
    w->fetches = (struct kv_fetches){
        .ranks = &w->ranks, .engine = o->engine, .id_base = o->id_base, .next_id = &w->next_id
    };
    kv_fetches_init(&w->fetches, o->metrics);
    return w;
}

void decode_free(struct decode_worker *w)
{
    if (!w) return;
    loop_timer_free(w->sweep);
    LIST_FOREACH (seq, &w->live, struct decode_seq, link) {
        decode_parking_end(w, seq);
        decode_parts_release(&seq->parts);
        mem_free(seq->hidden);
        mem_free(seq);
    }
    decode_parking_release(w);
    kv_fetches_release(&w->fetches);
    map_release(&w->by_id);
    request_table_release(&w->by_request);
    token_batcher_release(&w->batcher);
    mem_free(w);
}

uint32_t decode_n_live(const struct decode_worker *w) { return w->n_live + w->fetches.n_live; }

uint32_t decode_n_parked(const struct decode_worker *w)
{
    return w->parking.n_parked + w->parking.n_sent;
}

uint32_t decode_n_old_grants(const struct decode_worker *w)
{
    uint32_t n = 0;
    LIST_FOREACH (seq, &w->live, struct decode_seq, link)
        n += seq->of_old_role && seq->state < DECODE_SEQ_RUNNING;
    return n;
}

void decode_set_role(struct decode_worker *w, uint32_t role, bool settles)
{
    LIST_FOREACH (seq, &w->live, struct decode_seq, link) seq->of_old_role |= w->role != role;
    w->role = role;
    w->settles = settles;
}

/* ---- records ---- */

static struct decode_seq *add_seq(struct decode_worker *w, const struct cluster_message *m,
                                  enum decode_seq_state state)
{
    struct decode_seq *seq = MEM_NEW(struct decode_seq);
    seq->id = w->o.id_base + kv_parts_id(++w->next_id);
    seq->request = m->request;
    seq->attempt = m->attempt;
    seq->entry = m->from;
    seq->state = state;
    decode_parts_init(&seq->parts);
    list_push(&w->live, &seq->link);
    w->n_live++;
    map_put(&w->by_id, map_key_u64(&seq->id), seq);
    request_table_add(&w->by_request, decode_key_of(seq), seq);
    log_debug("sequence begin", "request=%016llx sequence=%016llx attempt=%u entry=%s",
              (unsigned long long)seq->request, (unsigned long long)seq->id, seq->attempt,
              m->from_name);
    return seq;
}

void decode_drop_if_over(struct decode_worker *w, struct decode_seq *seq)
{
    if (seq->in_engine || seq->parts.open) return;
    decode_parking_end(w, seq);
    log_debug("sequence end", "request=%016llx sequence=%016llx attempt=%u tokens=%u",
              (unsigned long long)seq->request, (unsigned long long)seq->id, seq->attempt,
              seq->n_sent);
    request_table_remove(&w->by_request, decode_key_of(seq), seq);
    map_del(&w->by_id, map_key_u64(&seq->id));
    list_remove(&seq->link);
    w->n_live--;
    decode_parts_release(&seq->parts);
    mem_free(seq->hidden);
    mem_free(seq);
}

/* ---- answers ---- */

/* Sends the collected tokens, then the failure: the entry node needs them in this order. */
static void fail_attempt(struct decode_worker *w, struct request_key of, const struct failure *f)
{
    token_batcher_flush_node(&w->batcher, of.entry);
    answer_send_failed(w->o.cluster, of.entry, of.request, (uint32_t)of.attempt, f);
}

/* Answers a message that becomes no sequence. */
static void refuse(struct decode_worker *w, const struct cluster_message *m, enum status st,
                   enum failed_blame blame, const char *text)
{
    fail_attempt(w, request_key_of(m), &(struct failure){ st, blame, text });
}

void decode_close(struct decode_worker *w, struct decode_seq *seq)
{
    if (seq->state == DECODE_SEQ_CLOSING) return;
    decode_parking_end(w, seq);
    seq->state = DECODE_SEQ_CLOSING;
    request_table_remove(&w->by_request, decode_key_of(seq), seq);
    decode_parts_cancel(&seq->parts, &w->ranks, seq->id);
    if (seq->in_engine) {
        enum status st = engine_cancel(w->o.engine, seq->id, !seq->parts.open);
        ASSERT(st == OK || st == ERR_CANCELED); /* CANCELED: the engine is shutting down */
        if (st != OK) seq->in_engine = false;
    }
    decode_drop_if_over(w, seq);
}

/* While a node is full, each waiting request is refused many times a second. */
static void log_failure(struct decode_worker *w, const struct decode_seq *seq, enum status st,
                        const char *text)
{
    bool busy = status_class_of(st) == CLASS_BUSY;
    uint32_t n_unlogged = 0;
    enum log_level level = LOG_WARN;
    if (busy) level = log_repeats_level(&w->refusals, text, clock_ms(), LOG_INFO, &n_unlogged);
    log_line(level, busy ? "sequence refused" : "sequence failed",
             "request=%016llx sequence=%016llx attempt=%u st=%s why=\"%s\" repeats=%u",
             (unsigned long long)seq->request, (unsigned long long)seq->id, seq->attempt,
             status_name(st), text, n_unlogged);
}

static void fail_seq(struct decode_worker *w, struct decode_seq *seq, enum status st,
                     enum failed_blame blame, const char *text)
{
    counter_add(w->failed, 1);
    log_failure(w, seq, st, text);
    fail_attempt(w, decode_key_of(seq), &(struct failure){ st, blame, text });
    decode_close(w, seq);
}

/* ---- messages ---- */

/* Decodes a Generation into `arena`; answers FAILED when it is malformed. */
static enum status unpack(struct decode_worker *w, const struct cluster_message *m,
                          const Baton__Generation *pb, struct arena *arena,
                          struct generation_wire *out)
{
    struct err err = { 0 };
    enum status st = pb ? generation_wire_decode(pb, arena, out, &err)
                        : err_set(&err, ERR_FORMAT, "the generation is missing");
    if (st != OK) refuse(w, m, st, BLAME_NOBODY, err.text);
    return st;
}

static struct engine_request engine_request_of(const struct generation_wire *wire, uint64_t id,
                                               uint64_t request)
{
    return (struct engine_request){
        .id = id,
        .request = request,
        .tokens = wire->tokens,
        .n_tokens = wire->n_tokens,
        .n_prompt = wire->n_prompt,
        .sampling = wire->sampling,
        .cache_salt = wire->cache_salt,
        .want_prompt_logprobs = wire->prompt_logprobs,
    };
}

static const char LEAVES[] = "the decode node shuts down and gives the request back";

static bool has_capacity(struct decode_worker *w, const struct cluster_message *m)
{
    if (w->broken) {
        refuse(w, m, ERR_PEER_LOST, BLAME_NODE, "a rank of the decode node was lost");
        return false;
    }
    if (w->leaves && m->from != w->stays) {
        refuse(w, m, ERR_BUSY, BLAME_HANDED_BACK, LEAVES);
        return false;
    }
    if (w->n_live - w->parking.n_ended < w->o.max_decode_seqs) return true;
    refuse(w, m, ERR_BUSY, BLAME_NOBODY,
           "the decode node already has as many sequences as it takes");
    return false;
}

/* The entry node's view is older than the role of this node. */
static bool is_of_role(struct decode_worker *w, const struct cluster_message *m,
                       const Baton__Reserve *body)
{
    if (!w->settles && (!w->role || !body || !body->role || body->role == w->role)) return true;
    refuse(w, m, ERR_BUSY, BLAME_HANDED_BACK,
           "the role of the decode node has just changed, and it gives the request back");
    return false;
}

static void on_reserve(struct decode_worker *w, const struct cluster_message *m)
{
    if (request_table_find(&w->by_request, request_key_of(m)) || !has_capacity(w, m)) return;
    if (!w->o.kvt) {
        refuse(w, m, ERR_PEER_REFUSED, BLAME_PAIR,
               "this node receives no KV: no cache transfer protocol is enabled");
        return;
    }
    Baton__Reserve *body = baton__reserve__unpack(NULL, m->body.n, (const uint8_t *)m->body.p);
    struct arena arena;
    struct generation_wire wire;
    arena_init(&arena);
    if (is_of_role(w, m, body) &&
        unpack(w, m, body ? body->generation : NULL, &arena, &wire) == OK) {
        struct decode_seq *seq = add_seq(w, m, DECODE_SEQ_RESERVING);
        struct engine_request r = engine_request_of(&wire, seq->id, seq->request);
        r.want_prompt_logprobs = false; /* the prefill node computes them */
        seq->hears_preempted = wire.hears_preempted;
        seq->n_tokens = wire.n_tokens;
        seq->n_senders = body->n_prefill ? (uint32_t)body->n_prefill : 1;
        decode_parking_begin(w, seq, &wire);
        enum status st = engine_reserve(w->o.engine, &r);
        seq->in_engine = st == OK;
        if (st != OK)
            fail_seq(w, seq, st, failed_blame_of_engine(st),
                     "the decode engine does not take the reservation");
    }
    arena_release(&arena);
    if (body) baton__reserve__free_unpacked(body, NULL);
}

static const char *why_not_taken(enum status st)
{
    if (st == ERR_TOO_LONG) return "the request does not fit in this node's KV cache";
    return st == ERR_FULL || st == ERR_BUSY ? "the engine's queue is full" : status_text(st);
}

static void on_run(struct decode_worker *w, const struct cluster_message *m)
{
    if (request_table_find(&w->by_request, request_key_of(m)) || !has_capacity(w, m)) return;
    Baton__Run *body = baton__run__unpack(NULL, m->body.n, (const uint8_t *)m->body.p);
    struct arena arena;
    struct generation_wire wire;
    arena_init(&arena);
    if (unpack(w, m, body ? body->generation : NULL, &arena, &wire) == OK) {
        struct decode_seq *seq = add_seq(w, m, DECODE_SEQ_RUNNING);
        seq->hears_preempted = wire.hears_preempted;
        decode_parking_begin(w, seq, &wire);
        struct engine_request r = engine_request_of(&wire, seq->id, seq->request);
        const struct kv_kept kept = kv_kept_learn(w->o.cluster, body->kept);
        r.peer = kept.node;
        r.n_peer_tokens = kept.n_tokens;
        r.n_peer_ranks = kept.n_ranks;
        r.most_computed = body->most_computed;
        enum status st = engine_submit(w->o.engine, &r);
        seq->in_engine = st == OK;
        if (st != OK) fail_seq(w, seq, st, failed_blame_of_engine(st), why_not_taken(st));
    }
    arena_release(&arena);
    if (body) baton__run__free_unpacked(body, NULL);
}

/* Starts to decode when the KV and the first token are both here. */
static void start_if_complete(struct decode_worker *w, struct decode_seq *seq)
{
    if (seq->state != DECODE_SEQ_GRANTED || !seq->has_first ||
        !decode_parts_are_received(&seq->parts))
        return;
    seq->state = DECODE_SEQ_RUNNING;
    enum status st = engine_activate(w->o.engine, seq->id, &seq->first, seq->hidden, seq->n_hidden);
    mem_free(seq->hidden);
    seq->hidden = NULL;
    if (st != OK)
        fail_seq(w, seq, st, failed_blame_of_engine(st),
                 "the decode engine does not take the sequence");
}

static void take_hidden(struct decode_seq *seq, const Baton__PrefillDone *body)
{
    const size_t n = body->hidden.len / sizeof *seq->hidden;
    if (n == 0 || n > HIDDEN_MAX) return;
    seq->hidden = mem_dup(body->hidden.data, n * sizeof *seq->hidden);
    seq->n_hidden = (uint32_t)n;
}

/* A prefill node does not know the entry node, so there is no key; the search is over the live
 * sequences. */
static void on_prefill_done(struct decode_worker *w, const struct cluster_message *m)
{
    Baton__PrefillDone *body = baton__prefill_done__unpack(NULL, m->body.n,
                                                           (const uint8_t *)m->body.p);
    struct str records = body ? (struct str){ (const char *)body->first.data, body->first.len }
                              : (struct str){ 0 };
    struct token_logprobs first;
    uint64_t request;
    uint32_t attempt, index;
    if (body && token_record_next(&records, &request, &attempt, &index, &first) == OK) {
        LIST_FOREACH (seq, &w->live, struct decode_seq, link) {
            if (seq->request != m->request || seq->attempt != m->attempt ||
                seq->state != DECODE_SEQ_GRANTED || seq->has_first)
                continue;
            seq->first = first;
            seq->has_first = true;
            take_hidden(seq, body);
            start_if_complete(w, seq);
            break;
        }
    }
    if (body) baton__prefill_done__free_unpacked(body, NULL);
}

/* Sends the grants once those of all ranks are here. */
static void grant_if_complete(struct decode_worker *w, struct decode_seq *seq)
{
    Baton__Grant grant = BATON__GRANT__INIT;
    if (!decode_parts_are_granted(&seq->parts)) return;
    seq->state = DECODE_SEQ_GRANTED;
    grant.n_cached = seq->n_cached;
    grant.n_parts = seq->parts.plan.n;
    grant.parts = decode_parts_write(&seq->parts);
    answer_send(w->o.cluster, seq->entry, FRAME_GRANT, seq->request, seq->attempt, &grant.base);
    arena_release(&seq->parts.arena);
}

static void on_grants(struct decode_worker *w, const struct cluster_message *m)
{
    struct decode_seq *seq = map_get(&w->by_id, map_key_u64(&m->request));
    if (!seq) kv_fetches_on_grants(&w->fetches, m);
    if (!seq || seq->state != DECODE_SEQ_GRANTING) return;
    if (decode_parts_take_grants(&seq->parts, &w->ranks, m) != OK)
        fail_seq(w, seq, ERR_PEER_MISMATCH, BLAME_NODE,
                 "a rank of the decode node sent other grants than asked");
    else grant_if_complete(w, seq);
}

/* A follower tells of one of its parts. */
static bool on_follower_event(struct decode_worker *w, const struct cluster_message *m)
{
    struct kvt_event ev;
    uint32_t rank = decode_ranks_find(&w->ranks, m->from);
    if (!rank || kvt_event_decode(m->body, &ev) != OK) return false;
    uint64_t id = kv_part_owner(ev.id);
    struct decode_seq *seq = map_get(&w->by_id, map_key_u64(&id));
    const struct decode_parts *parts = seq ? &seq->parts : kv_fetches_parts(&w->fetches, id);
    if (!parts) return false; /* of the prefill worker, or of what has ended */
    if (decode_parts_of_rank(parts, rank) & 1u << kv_part_index(ev.id)) decode_on_kvt(w, &ev);
    return true;
}

static void on_cancel(struct decode_worker *w, const struct cluster_message *m)
{
    struct decode_seq *seq = request_table_find(&w->by_request, request_key_of(m));
    if (!seq) return;
    counter_add(w->canceled, 1);
    decode_close(w, seq);
}

bool decode_on_message(struct decode_worker *w, const struct cluster_message *m)
{
    switch (m->type) {
    case FRAME_RESERVE: on_reserve(w, m); return true;
    case FRAME_RUN: on_run(w, m); return true;
    case FRAME_ATTACH: decode_parking_on_attach(w, m); return true;
    case FRAME_PREFILL_DONE: on_prefill_done(w, m); return true;
    case FRAME_KVT_HELLO: kv_answer_send(w->o.cluster, w->o.kvt, m); return true;
    case FRAME_KV_GRANTS: on_grants(w, m); return true;
    case FRAME_FETCH_REFUSED: kv_fetches_on_refused(&w->fetches, m); return true;
    case FRAME_KV_EVENT: return on_follower_event(w, m);
    case FRAME_CANCEL:
        on_cancel(w, m);
        return false; /* the prefill worker may have the same request */
    default: return false;
    }
}

static void free_if_fenced(struct decode_worker *w, struct decode_seq *seq);

/* The node is lost as a whole with any of its ranks: its engine will end, and it takes no new
 * sequence. So the blocks of the follower's pool are not written to for another sequence. */
static void on_follower_lost(struct decode_worker *w, uint32_t rank)
{
    w->broken = true;
    LIST_FOREACH (seq, &w->live, struct decode_seq, link) {
        if (!decode_parts_on_lost(&seq->parts, rank)) continue;
        if (seq->state == DECODE_SEQ_CLOSING) free_if_fenced(w, seq);
        else fail_seq(w, seq, ERR_PEER_LOST, BLAME_NODE, "a rank of the decode node was lost");
    }
}

void decode_on_lost(struct decode_worker *w, uint64_t node)
{
    uint32_t rank = decode_ranks_find(&w->ranks, node);
    if (rank) on_follower_lost(w, rank);
    kv_fetches_on_lost(&w->fetches, node);
    LIST_FOREACH (seq, &w->live, struct decode_seq, link)
        if (seq->entry == node && seq->state != DECODE_SEQ_PARKED && !decode_parking_park(w, seq))
            decode_close(w, seq);
    token_batcher_drop_node(&w->batcher, node);
}

/* ---- engine ---- */

static void on_reserved(struct decode_worker *w, struct decode_seq *seq,
                        const struct engine_event *ev)
{
    if (ev->status != OK) {
        seq->in_engine = false;
        if (seq->state == DECODE_SEQ_CLOSING) decode_drop_if_over(w, seq);
        else if (ev->status == ERR_BUSY)
            fail_seq(w, seq, ERR_FULL, BLAME_HANDED_BACK, "no free KV blocks on the decode node");
        else
            fail_seq(w, seq, ev->status, failed_blame_of_engine(ev->status),
                     "the request does not fit in the decode node's KV cache");
        return;
    }
    if (seq->state == DECODE_SEQ_CLOSING) return; /* the cancel is on its way to the engine */
    struct err err = { 0 };
    seq->n_cached = ev->n_cached;
    seq->state = DECODE_SEQ_GRANTING;
    const struct decode_room room = { .blocks = ev->blocks,
                                      .n_blocks = ev->n_blocks,
                                      .n_skip = ev->n_cached / w->ranks.layout.block_tokens,
                                      .n_tokens = seq->n_tokens };
    enum status st = decode_parts_expect(&seq->parts, &w->ranks, seq->id, seq->request,
                                         seq->n_senders, &room, &err);
    if (st == OK) grant_if_complete(w, seq);
    else /* a rank of this node is gone, the other node's do not fit, or it is full */
        fail_seq(w, seq, st,
                 st == ERR_PEER_LOST                 ? BLAME_NODE
                 : status_class_of(st) == CLASS_PEER ? BLAME_PAIR
                                                     : BLAME_NOBODY,
                 err.text);
}

static void write_cache_use(Baton__CacheUse *out, const struct engine_cache_use *c)
{
    out->host_tokens = c->n_from[KV_TIER_HOST];
    out->disk_tokens = c->n_from[KV_TIER_DISK];
    out->peer_tokens = c->n_from[KV_TIER_PEER];
    out->load_ns = c->load_ns;
    out->load_us = c->load_us;
    out->compute_us = c->compute_us;
}

/* It was chosen for KV of the prompt that it has evicted. */
static void hand_back_lacking(struct decode_worker *w, struct decode_seq *seq, uint32_t n_cached)
{
    static const char why[] = "the decode node has evicted what it had of the prompt";
    counter_add(w->failed, 1);
    log_failure(w, seq, ERR_BUSY, why);
    answer_send_lacking(w->o.cluster, seq->entry, seq->request, seq->attempt, n_cached, why);
    decode_close(w, seq);
}

static void on_finished(struct decode_worker *w, struct decode_seq *seq,
                        const struct engine_event *ev)
{
    seq->in_engine = false;
    if (seq->state != DECODE_SEQ_CLOSING) {
        if (ev->status == ERR_NOT_FOUND) {
            hand_back_lacking(w, seq, ev->n_cached);
            return;
        }
        if (ev->status != OK) {
            fail_seq(w, seq, ev->status, failed_blame_of_engine(ev->status),
                     "the engine ended the sequence");
            return;
        }
        Baton__Finished f = BATON__FINISHED__INIT;
        Baton__CacheUse cache = BATON__CACHE_USE__INIT;
        f.finish = ev->finish;
        f.stop_token = ev->stop_token;
        f.n_cached = seq->parts.transport ? seq->n_cached : ev->n_cached;
        write_cache_use(&cache, &ev->cache);
        f.cache = &cache;
        f.n_recomputed = ev->n_recomputed;
        f.n_verified = ev->n_verified;
        f.n_drafted = ev->n_drafted;
        f.n_accepted = ev->n_accepted;
        f.queue_ns = ev->queue_ns;
        f.prefill_ns = ev->prefill_ns;
        f.decode_ns = ev->decode_ns;
        f.kv_bytes = seq->parts.bytes;
        f.kv_ns = seq->parts.ns;
        f.kv_link_speed = seq->parts.link_speed;
        f.transport = (char *)(seq->parts.transport ? seq->parts.transport : "");
        f.n_tokens = seq->n_sent;
        if (decode_parking_keep_end(w, seq, &f)) return;
        token_batcher_flush_node(&w->batcher, seq->entry);
        answer_send(w->o.cluster, seq->entry, FRAME_FINISHED, seq->request, seq->attempt, &f.base);
        if (decode_parking_stay(w, seq)) return;
    }
    decode_drop_if_over(w, seq);
}

/* What is parked has nobody to give it back to. One that an entry node has just attached to would
 * take tokens along that its client has, and that entry node does not. Both stay to the end. */
static bool can_hand_back(const struct decode_seq *seq)
{
    return seq->state < DECODE_SEQ_PARKED && !(seq->kept && seq->kept->behind);
}

/* The entry node may take it elsewhere. Until then, and if it does not, the engine starts it again
 * when there are blocks. A sequence that can_hand_back does not allow stays. */
static void on_preempted(struct decode_worker *w, struct decode_seq *seq,
                         const struct engine_event *ev)
{
    Baton__Preempted m = BATON__PREEMPTED__INIT;
    struct engine_stats st;
    if (!seq->hears_preempted || !can_hand_back(seq)) return;
    engine_get_stats(w->o.engine, &st);
    m.wait_us = (uint64_t)ev->wait_steps * st.step_us;
    if (st.prefill_tokens_per_s)
        m.compute_us = (uint64_t)ev->n_tokens * 1000000 / st.prefill_tokens_per_s;
    token_batcher_flush_node(&w->batcher, seq->entry); /* so that they need not be computed again */
    answer_send(w->o.cluster, seq->entry, FRAME_PREEMPTED, seq->request, seq->attempt, &m.base);
}

void decode_on_engine(struct decode_worker *w, const struct engine_event *ev)
{
    struct decode_seq *seq = map_get(&w->by_id, map_key_u64(&ev->id));
    if (ev->kind == ENGINE_FETCH || ev->kind == ENGINE_FETCH_OFF)
        kv_fetches_on_engine(&w->fetches, ev);
    if (!seq) return;
    switch (ev->kind) {
    case ENGINE_RESERVED: on_reserved(w, seq, ev); break;
    case ENGINE_FINISHED: on_finished(w, seq, ev); break;
    case ENGINE_CANCELED:
        seq->in_engine = false;
        decode_drop_if_over(w, seq);
        break;
    case ENGINE_TOKEN:
        if (seq->state == DECODE_SEQ_CLOSING) break;
        seq->n_sent++;
        if (decode_parking_add(w, seq, ev->index, &ev->lp))
            token_batcher_add(&w->batcher, seq->entry, seq->request, seq->attempt, ev->index,
                              &ev->lp);
        break;
    case ENGINE_PROMPT_LOGPROB: {
        if (seq->state != DECODE_SEQ_RUNNING) break;
        struct buf one = { 0 };
        Baton__PromptLogprobs p = BATON__PROMPT_LOGPROBS__INIT;
        token_record_add(&one, seq->request, seq->attempt, ev->index, &ev->lp);
        p.records.data = (uint8_t *)one.data;
        p.records.len = one.len;
        answer_send(w->o.cluster, seq->entry, FRAME_PROMPT_LOGPROBS, seq->request, seq->attempt,
                    &p.base);
        buf_release(&one);
        break;
    }
    case ENGINE_PREEMPTED: on_preempted(w, seq, ev); break;
    case ENGINE_FETCH:
    case ENGINE_FETCH_OFF:
    case ENGINE_LENT:
    case ENGINE_STARTED: break;
    }
}

/* ---- transfer ---- */

/* Gives the blocks of an ended sequence back once no part of it can be written to. */
static void free_if_fenced(struct decode_worker *w, struct decode_seq *seq)
{
    if (seq->state != DECODE_SEQ_CLOSING || seq->parts.open) return;
    enum status st = engine_free_quarantined(w->o.engine, seq->id);
    if (st != OK)
        log_error("fence not taken by the engine", "request=%016llx st=%s",
                  (unsigned long long)seq->request, status_name(st));
    decode_drop_if_over(w, seq);
}

void decode_on_kvt(struct decode_worker *w, const struct kvt_event *ev)
{
    uint64_t id = kv_part_owner(ev->id);
    struct decode_seq *seq = map_get(&w->by_id, map_key_u64(&id));
    if (!seq) kv_fetches_on_kvt(&w->fetches, ev);
    if (!seq || !decode_parts_on_kvt(&seq->parts, ev)) return;
    if (ev->kind == KVT_RECEIVE_FAILED) {
        struct failure f = failure_of_transfer(ev->status, ev->text);
        if (seq->state != DECODE_SEQ_CLOSING) fail_seq(w, seq, f.st, f.blame, f.text);
    } else if (seq->state == DECODE_SEQ_CLOSING) {
        free_if_fenced(w, seq);
    } else if (decode_parts_are_received(&seq->parts)) {
        counter_add(w->received, 1);
        counter_add(w->received_bytes, seq->parts.bytes);
        start_if_complete(w, seq);
    }
}

/* ---- time ---- */

/* The first token comes over another link than the KV, and may be lost with it. */
static void sweep(void *arg)
{
    struct decode_worker *w = arg;
    kv_fetches_sweep(&w->fetches, clock_ms());
    LIST_FOREACH (seq, &w->live, struct decode_seq, link) {
        if (seq->state != DECODE_SEQ_GRANTED || seq->has_first ||
            !decode_parts_are_received(&seq->parts) || ++seq->n_sweeps <= FIRST_TOKEN_SWEEPS)
            continue;
        fail_seq(w, seq, ERR_TIMEOUT, BLAME_PAIR,
                 "the prompt's KV has come, but its first token has not for 3 s");
    }
}

void decode_set_leaving(struct decode_worker *w, bool leaves, uint64_t stays)
{
    w->leaves = leaves;
    w->stays = stays;
}

void decode_hand_back(struct decode_worker *w)
{
    w->leaves = true;
    LIST_FOREACH (seq, &w->live, struct decode_seq, link)
        if (seq->entry != w->stays && can_hand_back(seq))
            fail_seq(w, seq, ERR_BUSY, BLAME_HANDED_BACK, LEAVES);
}

void decode_flush(struct decode_worker *w) { token_batcher_flush(&w->batcher); }
