/* request_messages.c - see request_messages.h. */
#include "scheduler/request_messages.h"

#include <stdio.h>

#include "scheduler/pressure/request_pressed.h"
#include "scheduler/request_attach.h"
#include "shared/base/clock.h"
#include "shared/base/mem.h"
#include "shared/cluster/generation_wire.h"

enum { RESERVE_STUCK_MS = 5000 /* a grant is one round trip and one engine step */ };

static void on_credit(struct entry *e, struct request *r)
{
    if (r->state != REQUEST_CREDIT) return;
    r->t_credit = clock_ns();
    r->trace.place_ns = r->t_credit - r->t_accept;
    r->wait_until_ms = clock_ms() + RESERVE_STUCK_MS;
    request_set_state(r, REQUEST_RESERVE);
    request_send_reserve(e, r);
}

static void on_grant(struct entry *e, struct request *r, const struct cluster_message *m)
{
    if (r->state != REQUEST_RESERVE) return;
    Baton__Grant *grant = baton__grant__unpack(NULL, m->body.n, (const uint8_t *)m->body.p);
    if (!grant) {
        request_on_loss(e, r, LOSS_PEER, ERR_FORMAT, m->from,
                        "the decode node's grant is malformed");
        return;
    }
    r->trace.n_decode_cached = grant->n_cached;
    prefix_request_granted(e, r, grant->n_cached);
    r->wait_until_ms = REQUEST_NEVER_MS;
    request_set_state(r, REQUEST_PREFILL);
    request_send_prefill(e, r, grant);
    baton__grant__free_unpacked(grant, NULL);
}

static struct gen_cache_use cache_use_of(const Baton__CacheUse *c)
{
    if (!c) return (struct gen_cache_use){ 0 };
    return (struct gen_cache_use){ .n_host = c->host_tokens,
                                   .n_disk = c->disk_tokens,
                                   .n_peer = c->peer_tokens,
                                   .load_ns = c->load_ns,
                                   .load_us = c->load_us,
                                   .compute_us = c->compute_us };
}

static void on_report(struct entry *e, struct request *r, const struct cluster_message *m)
{
    Baton__PrefillReport *p = baton__prefill_report__unpack(NULL, m->body.n,
                                                            (const uint8_t *)m->body.p);
    if (!p) return; /* it only fills the trace */
    r->trace.queue_ns = p->queue_ns;
    r->trace.prefill_ns = p->prefill_ns;
    r->trace.kv_bytes = p->kv_bytes;
    r->trace.kv_ns = p->kv_ns;
    r->trace.kv_busy_ns = p->kv_busy_ns;
    r->trace.kv_tail_ns = p->kv_tail_ns;
    r->trace.kv_link_speed = p->kv_link_speed;
    r->trace.n_cached = p->n_cached;
    r->trace.cache = cache_use_of(p->cache);
    prefix_request_computed(e, r, p->n_cached);
    snprintf(r->trace.transport, sizeof r->trace.transport, "%s", p->transport);
    /* The prefill node has forgotten the request, so only the decode node owes something now, and
     * it cannot keep silent: if the first token got lost on its way there, it fails the sequence
     * within DECODE_FIRST_TOKEN_MS; its engine's steps are watched by their progress, as is its
     * loop by the link. So there is no limit here, which a slow step could pass. */
    baton__prefill_report__free_unpacked(p, NULL);
}

/* The prompt's logprobs go to the client before any token, but come over another link (from the
 * prefill node) than the tokens. */
static bool awaits_prompt_logprobs(const struct request *r)
{
    return r->state == REQUEST_PREFILL && r->prompt_logprobs && request_n_out(r) == 0 &&
           r->n_prompt_lp + 1 < r->n_prompt;
}

static void on_finished(struct entry *e, struct request *r, const struct cluster_message *m)
{
    if (r->state != REQUEST_DECODE && r->state != REQUEST_RUN && r->state != REQUEST_PREFILL)
        return;
    if (awaits_prompt_logprobs(r)) {
        buf_clear(&r->held_end);
        buf_add_str(&r->held_end, m->body);
        return;
    }
    Baton__Finished *f = baton__finished__unpack(NULL, m->body.n, (const uint8_t *)m->body.p);
    bool known = f && (f->finish == FINISH_STOP || f->finish == FINISH_LENGTH);
    if (!known) {
        request_on_loss(e, r, LOSS_PEER, ERR_FORMAT, m->from,
                        "the decode node's last message is malformed");
    } else if (f->n_tokens != request_n_out(r) - r->n_before) { /* never deliver a cut answer */
        request_on_loss(e, r, LOSS_PEER, ERR_FORMAT, m->from, "the last tokens are missing");
    } else {
        enum finish_reason finish = (enum finish_reason)f->finish;
        int32_t stop = f->stop_token;
        r->trace.n_recomputed = f->n_recomputed;
        r->trace.n_verified = f->n_verified;
        r->trace.n_drafted = f->n_drafted;
        r->trace.n_accepted = f->n_accepted;
        if (!r->prefill.node) {
            r->trace.n_cached = f->n_cached;
            r->trace.cache = cache_use_of(f->cache);
            prefix_request_computed(e, r, f->n_cached);
            r->trace.queue_ns = f->queue_ns;
            r->trace.prefill_ns = f->prefill_ns;
        } else if (f->transport[0]) { /* a short answer may end before the report comes */
            r->trace.kv_bytes = f->kv_bytes;
            if (!r->trace.kv_ns) r->trace.kv_ns = f->kv_ns;
            if (!r->trace.kv_link_speed) r->trace.kv_link_speed = f->kv_link_speed;
            snprintf(r->trace.transport, sizeof r->trace.transport, "%s", f->transport);
        }
        request_end(e, r, OK, finish, stop, "");
    }
    if (f) baton__finished__free_unpacked(f, NULL);
}

/* Whom the message blames. A peer that does not tell means itself, except that KV which the prefill
 * node is not allowed to send is the pair's trouble. */
static uint32_t blame_of(const struct request *r, const struct cluster_message *m, enum status st,
                         const Baton__Failed *f)
{
    uint32_t blame = f ? f->blame : BLAME_UNSAID;
    bool refused = st == ERR_PEER_MISMATCH || st == ERR_PEER_REFUSED;
    if (blame == BLAME_UNSAID && refused && r->state == REQUEST_PREFILL &&
        m->from == r->prefill.node)
        blame = BLAME_PAIR;
    return blame == BLAME_PAIR && !r->prefill.node ? BLAME_NODE : blame;
}

static void on_failed(struct entry *e, struct request *r, const struct cluster_message *m)
{
    Baton__Failed *f = baton__failed__unpack(NULL, m->body.n, (const uint8_t *)m->body.p);
    /* A malformed message is the node's fault, not the request's. */
    enum status st = f ? (enum status)f->status : ERR_INTERNAL;
    char text[ERR_TEXT_MAX];
    if (st >= OK || st < ERR_INTERNAL) st = ERR_INTERNAL;
    snprintf(text, sizeof text, "%s", f && f->text[0] ? f->text : status_text(st));
    uint32_t blame = blame_of(r, m, st, f);
    if (f && f->lacks_prompt && retry_loss_of(st, blame) == LOSS_HANDED_BACK)
        prefix_request_lacked(e, r, f->n_cached);
    if (f) baton__failed__free_unpacked(f, NULL);
    enum request_loss loss = retry_loss_of(st, blame);
    const struct view_attempt a = { r->id, r->prefill.node, r->decode.node };
    /* Who has no place for another transfer is not to blame, but others have. */
    bool pair_waits = loss == LOSS_BUSY && blame == BLAME_PAIR;
    if (loss == LOSS_PAIR || (pair_waits && st == ERR_BUSY))
        view_note_failure(&e->view, &a, 0, st, text);
    else if (blame == BLAME_NODE && loss != LOSS_BUSY && loss != LOSS_REQUEST)
        view_note_failure(&e->view, &a, m->from, st, text);
    if (pair_waits) request_keep_apart(r);
    bool is_nodes = blame != BLAME_PAIR && blame != BLAME_NOBODY;
    request_on_loss(e, r, loss, st, is_nodes ? m->from : 0, text);
}

/* The prompt's logprobs are complete: handle the messages that overtook them. Any of these may end
 * the request. */
static void replay_held(struct entry *e, struct request *r)
{
    struct buf held = r->held, held_end = r->held_end;
    struct str rest = buf_str(&held);
    struct token_logprobs t;
    uint64_t id, request = r->id, from = r->decode.node;
    uint32_t attempt, index, now = r->attempt;
    r->held = r->held_end = (struct buf){ 0 };
    while (r && r->attempt == now && token_record_next(&rest, &id, &attempt, &index, &t) == OK) {
        request_on_token(e, r, from, attempt, index, &t);
        r = map_get(&e->by_id, map_key_u64(&request));
    }
    struct cluster_message m = {
        .from = from,
        .type = FRAME_FINISHED,
        .request = request,
        .attempt = now,
        .body = buf_str(&held_end),
    };
    if (r && held_end.len) request_on_message(e, r, &m);
    buf_release(&held);
    buf_release(&held_end);
}

/* What was delivered is of the decode node's model. A node that kept an answer may have been asked
 * while the directory did not list it: its model is known when it does. */
static void bind_model(const struct entry *e, struct request *r)
{
    const struct node_record *n = r->decode.model ? NULL : view_find(&e->view, r->decode.node);
    if (n) r->decode.model = n->model;
    r->model = r->decode.model;
}

static void on_prompt_logprobs(struct entry *e, struct request *r, const struct cluster_message *m)
{
    Baton__PromptLogprobs *p = baton__prompt_logprobs__unpack(NULL, m->body.n,
                                                              (const uint8_t *)m->body.p);
    struct str rest = p ? (struct str){ (const char *)p->records.data, p->records.len }
                        : (struct str){ 0 };
    struct token_logprobs t;
    uint64_t request;
    uint32_t attempt, index;
    while (p && token_record_next(&rest, &request, &attempt, &index, &t) == OK) {
        /* A moved request repeats the early ones. */
        if (index != r->n_prompt_lp + 1 || index >= r->n_prompt) continue;
        r->n_prompt_lp = index;
        bind_model(e, r);
        if (r->sink.on_prompt_logprob) r->sink.on_prompt_logprob(r->sink.arg, index, &t);
    }
    if (p) baton__prompt_logprobs__free_unpacked(p, NULL);
    if (!awaits_prompt_logprobs(r)) replay_held(e, r);
}

void request_on_message(struct entry *e, struct request *r, const struct cluster_message *m)
{
    bool of_prefill = m->from == r->prefill.node, of_decode = m->from == r->decode.node;
    if (r->canceled || m->attempt != r->attempt) return;
    if (r->state == REQUEST_ATTACH) {
        request_attach_on_message(e, r, m);
        return;
    }
    if (!of_prefill && !of_decode) return;
    switch (m->type) {
    case FRAME_CREDIT:
        if (of_prefill) on_credit(e, r);
        break;
    case FRAME_GRANT:
        if (of_decode) on_grant(e, r, m);
        break;
    case FRAME_PREFILL_REPORT: on_report(e, r, m); break;
    case FRAME_PROMPT_LOGPROBS: on_prompt_logprobs(e, r, m); break;
    case FRAME_FINISHED:
        if (of_decode) on_finished(e, r, m);
        break;
    case FRAME_PREEMPTED:
        if (of_decode) request_on_preempted(e, r, m);
        break;
    case FRAME_DETACHED:
        if (of_decode)
            request_end(e, r, ERR_CONFLICT, FINISH_ERROR, -1,
                        "its client came back: another connection goes on with this answer");
        break;
    case FRAME_FAILED:
        /* Once tokens flow the prefill node is not needed. */
        if (r->state != REQUEST_DECODE || m->from == r->decode.node) on_failed(e, r, m);
        break;
    default: break;
    }
}

static void append_token(struct request *r, int32_t id)
{
    if (r->n_tokens == r->cap_tokens) {
        r->cap_tokens *= 2;
        r->tokens = mem_realloc(r->tokens, r->cap_tokens, sizeof *r->tokens);
    }
    r->tokens[r->n_tokens++] = id;
}

static void tell_node(struct request *r)
{
    const uint64_t node = r->decode.keeps ? r->decode.node : 0, bits = r->decode.model_bits;
    if (!r->sink.on_node || (r->has_told && r->told_node == node && r->told_bits == bits)) return;
    r->has_told = true;
    r->told_node = node;
    r->told_bits = bits;
    r->sink.on_node(r->sink.arg, node, bits);
}

void request_deliver_token(struct entry *e, struct request *r, uint32_t index,
                           const struct token_logprobs *t)
{
    hedge_on_token(e, r);
    r->t_last = clock_ns();
    if (!r->t_first) r->t_first = r->t_last;
    r->pressed_until_ns = 0;
    append_token(r, t->id);
    bind_model(e, r);
    admission_on_token(e, r, index);
    recent_add_token(&e->recent, r->t_last / 1000000);
    r->ends = t->ends;
    tell_node(r);
    r->sink.on_token(r->sink.arg, index, t);
}

void request_on_token(struct entry *e, struct request *r, uint64_t from, uint32_t attempt,
                      uint32_t index, const struct token_logprobs *t)
{
    if (r->canceled || attempt != r->attempt || from != r->decode.node) return;
    if (awaits_prompt_logprobs(r)) {
        token_record_add(&r->held, r->id, attempt, index, t);
        return;
    }
    if (r->state == REQUEST_PREFILL) request_set_state(r, REQUEST_DECODE); /* its KV has arrived */
    if (r->state != REQUEST_DECODE && r->state != REQUEST_RUN) return;
    if (index < request_n_out(r)) return;
    if (index > request_n_out(r)) {
        request_on_loss(e, r, LOSS_PEER, ERR_FORMAT, from, "a token is missing");
        return;
    }
    if (index == r->n_before) { /* the attempt's first: both nodes and their pair work */
        request_note(e, r, BREAKER_WORKED);
        r->full_since_ms = 0;
        admission_unfill(e, r, true);
        request_note_computed(e, r);
    }
    request_deliver_token(e, r, index, t);
}
