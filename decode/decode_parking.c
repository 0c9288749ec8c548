/* decode_parking.c - see decode_parking.h. */
#include "decode/decode_parking.h"

#include "decode/decode_internal.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/cluster/answer.h"

enum {
    TURN_MS = 1,        /* while an entry node does not have all records yet */
    TURN_RECORDS = 128, /* of one sequence: its entry node makes text of them at once */
    IDLE_TURN_MS = 200, /* while sequences are only parked */
    GIVEN_BYTES = sizeof(int32_t)
};

static struct str key_bytes(const struct hash128 *key)
{
    return (struct str){ (const char *)key, sizeof *key };
}

void decode_parking_init(struct decode_worker *w, uint32_t parked_max, size_t records_max)
{
    struct metrics *m = w->o.metrics;
    struct decode_parking *p = &w->parking;
    *p = (struct decode_parking){
        .window_ms = w->o.resume_window_ms,
        .sent_ms = DECODE_SENT_MS,
        .parked_max = parked_max,
        .records_max = records_max,
    };
    p->m_parked = metrics_gauge(m, "baton_decode_parked", "",
                                "Sequences whose entry node was lost, kept for --resume-window.");
    p->m_bytes = metrics_gauge(m, "baton_decode_parking_bytes", "",
                               "Bytes of token records kept for clients that may come back.");
    p->m_attached = metrics_counter(m, "baton_decode_attached_total", "",
                                    "Sequences that went on for another entry node.");
    p->m_expired = metrics_counter(m, "baton_decode_parked_expired_total", "",
                                   "Parked sequences that nobody came back for.");
    p->m_refused = metrics_counter(m, "baton_decode_parking_refused_total", "",
                                   "Sequences not kept: too many, or too many bytes of tokens.");
}

void decode_parking_release(struct decode_worker *w)
{
    loop_timer_free(w->parking.timer);
    map_release(&w->parking.by_key);
    w->parking = (struct decode_parking){ 0 };
}

/* ---- what is kept ---- */

static void forget(struct decode_worker *w, struct decode_seq *seq)
{
    struct decode_parking *p = &w->parking;
    struct decode_kept *k = seq->kept;
    if (map_get(&p->by_key, key_bytes(&k->key)) == seq) map_del(&p->by_key, key_bytes(&k->key));
    p->n_bytes -= k->records.len + k->n_given * GIVEN_BYTES;
    p->n_behind -= k->behind;
    p->n_ended -= k->end.len > 0;
    gauge_set(p->m_bytes, (double)p->n_bytes);
    mem_free(k->given);
    buf_release(&k->records);
    buf_release(&k->end);
    mem_free(k);
    seq->kept = NULL;
}

/* It is not parked any more, nor only waited for. */
static void leave(struct decode_worker *w, const struct decode_seq *seq)
{
    if (seq->state == DECODE_SEQ_PARKED) gauge_set(w->parking.m_parked, --w->parking.n_parked);
    w->parking.n_sent -= seq->state == DECODE_SEQ_SENT;
}

static bool has_no_entry(const struct decode_seq *seq)
{
    return seq->state == DECODE_SEQ_PARKED || seq->state == DECODE_SEQ_SENT;
}

void decode_parking_end(struct decode_worker *w, struct decode_seq *seq)
{
    leave(w, seq);
    if (seq->kept) forget(w, seq);
}

/* A key comes again when its request was moved, or when it was sent twice. The later sequence is
 * found by it; the earlier one, if nobody has it any more, would only waste its steps. */
void decode_parking_begin(struct decode_worker *w, struct decode_seq *seq,
                          const struct generation_wire *g)
{
    struct decode_parking *p = &w->parking;
    if (!g->has_resume_key || !p->window_ms) return;
    struct decode_kept *k = MEM_NEW(struct decode_kept);
    k->key = g->resume_key;
    k->n_given = g->n_tokens - g->n_prompt;
    if (k->n_given) k->given = mem_dup(g->tokens + g->n_prompt, k->n_given * GIVEN_BYTES);
    p->n_bytes += k->n_given * GIVEN_BYTES;
    seq->kept = k;
    struct decode_seq *earlier = map_put(&p->by_key, key_bytes(&k->key), seq);
    if (earlier && has_no_entry(earlier)) decode_close(w, earlier);
}

/* What was sent is needed least. */
static void close_sent(struct decode_worker *w)
{
    LIST_FOREACH (seq, &w->live, struct decode_seq, link)
        if (seq->state == DECODE_SEQ_SENT && w->parking.n_bytes > w->parking.records_max)
            decode_close(w, seq);
}

bool decode_parking_add(struct decode_worker *w, struct decode_seq *seq, uint32_t index,
                        const struct token_logprobs *t)
{
    struct decode_parking *p = &w->parking;
    struct decode_kept *k = seq->kept;
    if (!k) return true;
    size_t before = k->records.len;
    token_record_add(&k->records, 0, 0, index, t);
    p->n_bytes += k->records.len - before;
    if (p->n_bytes > p->records_max && p->n_sent) close_sent(w);
    gauge_set(p->m_bytes, (double)p->n_bytes);
    if (seq->state == DECODE_SEQ_PARKED || k->behind) return false;
    if (p->n_bytes <= p->records_max) return true;
    counter_add(p->m_refused, 1); /* it goes on for the entry node that it has */
    forget(w, seq);
    return true;
}

bool decode_parking_keep_end(struct decode_worker *w, struct decode_seq *seq,
                             const Baton__Finished *m)
{
    struct decode_kept *k = seq->kept;
    if (!k) return false;
    char *room = buf_reserve(&k->end, baton__finished__get_packed_size(m));
    k->end.len = baton__finished__pack(m, (uint8_t *)room);
    w->parking.n_ended++;
    return seq->state == DECODE_SEQ_PARKED || k->behind;
}

/* ---- turns ---- */

static void on_turn(void *arg);

static void set_timer(struct decode_worker *w, uint64_t ms)
{
    loop_timer_free(w->parking.timer);
    w->parking.timer = loop_timer_start(w->o.loop, ms, ms, on_turn, w);
}

/* Sends some of the records that the entry node does not have yet; then the end, if it came. */
static void send_more(struct decode_worker *w, struct decode_seq *seq)
{
    struct decode_kept *k = seq->kept;
    struct str rest = str_sub(buf_str(&k->records), k->n_sent, SIZE_MAX);
    struct token_logprobs t;
    uint64_t request;
    uint32_t attempt, index;
    for (int i = 0; i < TURN_RECORDS; i++) {
        if (token_record_next(&rest, &request, &attempt, &index, &t) != OK) break;
        token_batcher_add(&w->batcher, seq->entry, seq->request, seq->attempt, index, &t);
    }
    k->n_sent = k->records.len - rest.n;
    if (rest.n) return;
    k->behind = false;
    w->parking.n_behind--;
    if (!k->end.len) return;
    token_batcher_flush_node(&w->batcher, seq->entry);
    enum status st = cluster_send(w->o.cluster, seq->entry, FRAME_FINISHED, seq->request,
                                  seq->attempt, buf_str(&k->end));
    if (st == ERR_FULL)
        cluster_disconnect(w->o.cluster, seq->entry, "its queue of answers is full");
    if (st != OK) return; /* it is parked again: its entry node is lost */
    if (!decode_parking_stay(w, seq)) decode_drop_if_over(w, seq);
}

/* Closes a sequence without an entry node when its time is over; when the records are too many, the
 * oldest ones before their time. */
static void close_if_due(struct decode_worker *w, struct decode_seq *seq)
{
    struct decode_parking *p = &w->parking;
    bool is_sent = seq->state == DECODE_SEQ_SENT;
    uint32_t window_ms = is_sent && p->sent_ms < p->window_ms ? p->sent_ms : p->window_ms;
    bool expired = clock_ms() - seq->kept->t_parked_ms >= window_ms;
    if (!expired && p->n_bytes <= p->records_max) return;
    if (!is_sent) counter_add(expired ? p->m_expired : p->m_refused, 1);
    decode_close(w, seq);
}

static void on_turn(void *arg)
{
    struct decode_worker *w = arg;
    struct decode_parking *p = &w->parking;
    LIST_FOREACH (seq, &w->live, struct decode_seq, link) {
        if (seq->kept && seq->kept->behind) send_more(w, seq);
        else if (has_no_entry(seq)) close_if_due(w, seq);
    }
    token_batcher_flush(&w->batcher);
    if (p->n_behind) return;
    if (p->n_parked || p->n_sent) {
        set_timer(w, IDLE_TURN_MS);
        return;
    }
    loop_timer_free(p->timer);
    p->timer = NULL;
}

/* ---- parking and attaching ---- */

bool decode_parking_stay(struct decode_worker *w, struct decode_seq *seq)
{
    struct decode_parking *p = &w->parking;
    if (!seq->kept || p->n_sent >= p->parked_max) return false;
    seq->kept->t_parked_ms = clock_ms();
    seq->state = DECODE_SEQ_SENT;
    p->n_sent++;
    if (!p->timer) set_timer(w, IDLE_TURN_MS);
    return true;
}

bool decode_parking_park(struct decode_worker *w, struct decode_seq *seq)
{
    struct decode_parking *p = &w->parking;
    struct decode_kept *k = seq->kept;
    if ((seq->state != DECODE_SEQ_RUNNING && seq->state != DECODE_SEQ_SENT) || !k) return false;
    if (p->n_parked >= p->parked_max) {
        counter_add(p->m_refused, 1);
        return false;
    }
    p->n_behind -= k->behind;
    k->behind = false;
    k->t_parked_ms = clock_ms();
    leave(w, seq);
    seq->state = DECODE_SEQ_PARKED;
    gauge_set(p->m_parked, ++p->n_parked);
    if (!p->timer) set_timer(w, IDLE_TURN_MS);
    log_info("sequence parked", "request=%016llx sequence=%016llx tokens=%u window_ms=%u",
             (unsigned long long)seq->request, (unsigned long long)seq->id, seq->n_sent,
             p->window_ms);
    return true;
}

/* The entry node that has the sequence still lives: its request ends. */
static void detach(struct decode_worker *w, const struct decode_seq *seq)
{
    Baton__Detached m = BATON__DETACHED__INIT;
    token_batcher_flush_node(&w->batcher, seq->entry);
    answer_send(w->o.cluster, seq->entry, FRAME_DETACHED, seq->request, seq->attempt, &m.base);
}

static void attach(struct decode_worker *w, struct decode_seq *seq, const struct cluster_message *m,
                   bool hears_preempted)
{
    struct decode_parking *p = &w->parking;
    struct decode_kept *k = seq->kept;
    Baton__Attached answer = BATON__ATTACHED__INIT;
    log_info("sequence attached", "request=%016llx was=%016llx sequence=%016llx entry=%s parked=%d",
             (unsigned long long)m->request, (unsigned long long)seq->request,
             (unsigned long long)seq->id, m->from_name, (int)(seq->state == DECODE_SEQ_PARKED));
    if (!has_no_entry(seq)) detach(w, seq);
    leave(w, seq);
    request_table_remove(&w->by_request, decode_key_of(seq), seq);
    seq->request = m->request;
    seq->attempt = m->attempt;
    seq->entry = m->from;
    seq->hears_preempted = hears_preempted;
    seq->state = DECODE_SEQ_RUNNING;
    request_table_add(&w->by_request, decode_key_of(seq), seq);
    k->n_sent = 0;
    p->n_behind += !k->behind;
    k->behind = true;
    counter_add(p->m_attached, 1);
    answer.first = k->n_given;
    answer.given = (ProtobufCBinaryData){ k->n_given * GIVEN_BYTES, (uint8_t *)k->given };
    answer_send(w->o.cluster, m->from, FRAME_ATTACHED, m->request, m->attempt, &answer.base);
    set_timer(w, TURN_MS);
}

static bool can_attach(const struct decode_seq *seq, uint32_t want_from)
{
    return seq && (seq->state == DECODE_SEQ_RUNNING || has_no_entry(seq)) &&
           want_from >= seq->kept->n_given;
}

static void refuse(struct decode_worker *w, const struct cluster_message *m, enum status st,
                   const char *text)
{
    answer_send_failed(w->o.cluster, m->from, m->request, m->attempt,
                       &(struct failure){ st, BLAME_NOBODY, text });
}

void decode_parking_on_attach(struct decode_worker *w, const struct cluster_message *m)
{
    if (request_table_find(&w->by_request, request_key_of(m))) return; /* it came twice */
    Baton__Attach *body = baton__attach__unpack(NULL, m->body.n, (const uint8_t *)m->body.p);
    struct hash128 key;
    if (!body || !generation_wire_read_key(body->resume_key, &key)) {
        refuse(w, m, ERR_FORMAT, "the resume key is malformed");
    } else {
        struct decode_seq *seq = map_get(&w->parking.by_key, key_bytes(&key));
        if (can_attach(seq, body->want_from)) attach(w, seq, m, body->hears_preempted);
        else refuse(w, m, ERR_NOT_FOUND, "this node does not have the sequence any more");
    }
    if (body) baton__attach__free_unpacked(body, NULL);
}
