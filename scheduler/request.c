/* request.c - see request.h. Only request_set_state changes the state; every loss goes through
 * request_on_loss. */
#include "scheduler/request.h"

#include <stdio.h>
#include <string.h>

#include "scheduler/request_attach.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/cluster/generation_wire.h"

void entry_update_trouble(struct entry *e)
{
    if (!e->view.known) return;
    e->t_trouble_ms = clock_ms();
    const struct trouble_facts f = {
        .view = &e->view,
        .topic = e->topic,
        .join = e->join,
        .directory_down = directory_why_down(e->directory),
        .launcher_gone = e->launcher_gone,
        .launcher_held_view = e->launcher_held_view,
        .missing = e->missing,
        .listed = e->listed,
    };
    trouble_update(&e->trouble, &f, clock_ms());
}

/* ---- records ---- */

static void *copy(const void *p, size_t bytes) { return bytes ? mem_dup(p, bytes) : NULL; }

struct request *request_create(struct entry *e, uint64_t id, const struct gen_request *g,
                               const struct gen_sink *sink)
{
    struct request *r = MEM_NEW(struct request);
    r->entry = e;
    r->id = id;
    r->sink = *sink;
    snprintf(r->name, sizeof r->name, "%s", g->name ? g->name : "");
    r->n_prompt = r->n_tokens = g->n_tokens;
    r->cap_tokens = g->n_tokens + 64;
    r->tokens = mem_calloc(r->cap_tokens, sizeof *r->tokens);
    memcpy(r->tokens, g->tokens, g->n_tokens * sizeof *r->tokens);
    r->sampling = g->sampling;
    r->sampling.bias = copy(g->sampling.bias, g->sampling.n_bias * sizeof *g->sampling.bias);
    r->sampling.allowed = NULL; /* for structured output, which the API server refuses */
    r->cache_salt = g->cache_salt;
    r->prompt_logprobs = g->prompt_logprobs;
    r->deadline_ms = g->deadline_ms;
    r->wanted = g->admission;
    r->admit.tenant = g->admission.tenant;
    r->resume = g->resume;
    r->state = request_attach_is_wanted(&g->resume) ? REQUEST_ATTACH : REQUEST_PLACING;
    r->t_accept = clock_ns();
    list_init(&r->link);
    list_init(&r->admit.link);
    return r;
}

uint64_t request_fresh_id(const struct entry *e)
{
    uint64_t id;
    do random_bytes(&id, sizeof id);
    while (id == 0 || map_get(&e->by_id, map_key_u64(&id)) ||
           map_get(&e->hedges, map_key_u64(&id)));
    return id;
}

void request_enter(struct entry *e, struct request *r)
{
    list_push(&e->live, &r->link);
    e->n_live++;
    map_put(&e->by_id, map_key_u64(&r->id), r);
}

void request_free(struct request *r)
{
    if (!r) return;
    mem_free(r->tokens);
    mem_free((void *)r->sampling.bias);
    mem_free(r->asked);
    prefix_request_release(&r->prefix);
    buf_release(&r->held);
    buf_release(&r->held_end);
    mem_free(r);
}

void request_set_state(struct request *r, enum request_state next)
{
    log_debug("request", "request=%016llx api_request=%s from=%s to=%s attempt=%u",
              (unsigned long long)r->id, r->name, request_state_name(r->state),
              request_state_name(next), r->attempt);
    r->state = next;
}

/* ---- messages out ---- */

/* Sends a message of the current attempt. A failure is handled as the loss of that node. Returns
 * whether it was sent. */
static bool send_to(struct entry *e, struct request *r, const struct request_node *node,
                    enum request_loss loss, enum frame_type type, const ProtobufCMessage *body)
{
    enum status st = cluster_send_proto(e->cluster, node->node, type, r->id, r->attempt, body);
    if (st == OK) return true;
    request_on_loss(e, r, st == ERR_FULL ? LOSS_PEER : loss, st, node->node,
                    "the node cannot be reached");
    return false;
}

static struct generation_wire wire_of(const struct request *r)
{
    return (struct generation_wire){
        .tokens = r->tokens,
        .n_tokens = r->n_tokens,
        .n_prompt = r->n_prompt,
        .sampling = r->sampling,
        .cache_salt = r->cache_salt,
        .prompt_logprobs = r->prompt_logprobs && request_n_out(r) == 0,
        .has_resume_key = r->resume.wanted,
        .resume_key = r->resume.key,
        .hears_preempted = true,
    };
}

bool request_send_ask(struct entry *e, struct request *r)
{
    Baton__AskCredit ask = BATON__ASK_CREDIT__INIT;
    ask.n_tokens = r->n_tokens;
    ask.role = request_role_number(r->prefill.role);
    ask.goes_first = r->goes_first;
    return send_to(e, r, &r->prefill, LOSS_PREFILL_NODE, FRAME_ASK_CREDIT, &ask.base);
}

static Baton__NodeAddress *address_of(uint64_t process, const char *host, uint16_t port,
                                      struct arena *arena)
{
    Baton__NodeAddress *a = arena_alloc(arena, sizeof *a);
    baton__node_address__init(a);
    a->node = process;
    a->host = arena_strndup(arena, host, strlen(host));
    a->port = port;
    return a;
}

static Baton__KvKept *kept_by(uint64_t node, const char *host, uint16_t port, uint32_t n_followers,
                              uint32_t n_tokens, struct arena *arena)
{
    Baton__KvKept *k = arena_alloc(arena, sizeof *k);
    baton__kv_kept__init(k);
    k->node = address_of(node, host, port, arena);
    k->n_tokens = n_tokens;
    k->n_ranks = 1 + n_followers;
    return k;
}

/* NULL: nobody else is known to have KV of its tokens that `node` could fetch. The node that handed
 * it back has that of all of them, if it had begun; else one may have the prompt's beginning. */
static Baton__KvKept *kept_for(const struct entry *e, const struct request *r, uint64_t node,
                               struct arena *arena)
{
    const struct request_node *gave = &r->gave_kv;
    const struct node_record *by;
    uint32_t n_tokens = r->n_tokens;
    if (request_n_out(r) > 0 && gave->node && gave->host[0]) {
        by = view_find(&e->view, gave->node);
        if (gave->node == node || (by && by->is_lost)) return NULL;
        return kept_by(gave->node, gave->host, gave->port, gave->n_followers, n_tokens, arena);
    }
    by = prefix_request_keeper(e, r, &n_tokens);
    if (!by || by->is_lost || by->node == node) return NULL;
    return kept_by(by->node, by->host, by->cluster_port, by->n_followers, n_tokens, arena);
}

bool request_send_run(struct entry *e, struct request *r)
{
    struct arena arena;
    struct generation_wire g = wire_of(r);
    Baton__Run m = BATON__RUN__INIT;
    arena_init(&arena);
    m.generation = generation_wire_encode(&g, &arena);
    m.kept = kept_for(e, r, r->decode.node, &arena);
    m.most_computed = r->prefix.most_computed;
    bool sent = send_to(e, r, &r->decode, LOSS_DECODE_NODE, FRAME_RUN, &m.base);
    arena_release(&arena);
    return sent;
}

/* Where the ranks of a node are reached, by rank. NULL: its record has gone, so they are not known
 * any more; the attempt has ended. */
static Baton__NodeAddress **ranks_of(struct entry *e, struct request *r,
                                     const struct request_node *node, enum request_loss loss,
                                     struct arena *arena)
{
    Baton__NodeAddress **out = arena_alloc(arena, (1 + (size_t)node->n_followers) * sizeof *out);
    const struct node_record *record = node->n_followers ? view_find(&e->view, node->node) : NULL;
    if (node->n_followers && (!record || record->n_followers != node->n_followers)) {
        request_on_loss(e, r, loss, ERR_PEER_LOST, node->node, "the node's ranks are not known");
        return NULL;
    }
    out[0] = address_of(node->node, node->host, node->port, arena);
    for (uint32_t i = 0; i < node->n_followers; i++) {
        const struct node_rank *f = &record->followers[i];
        out[1 + i] = address_of(f->process, f->host, f->port, arena);
    }
    return out;
}

bool request_send_reserve(struct entry *e, struct request *r)
{
    struct arena arena;
    struct generation_wire g = wire_of(r);
    Baton__Reserve m = BATON__RESERVE__INIT;
    arena_init(&arena);
    m.prefill = ranks_of(e, r, &r->prefill, LOSS_PREFILL_NODE, &arena);
    if (!m.prefill) {
        arena_release(&arena);
        return false;
    }
    m.n_prefill = 1 + (size_t)r->prefill.n_followers;
    m.role = request_role_number(r->decode.role);
    m.generation = generation_wire_encode(&g, &arena);
    bool sent = send_to(e, r, &r->decode, LOSS_DECODE_NODE, FRAME_RESERVE, &m.base);
    arena_release(&arena);
    return sent;
}

bool request_send_prefill(struct entry *e, struct request *r, const Baton__Grant *grant)
{
    struct arena arena;
    struct generation_wire g = wire_of(r);
    Baton__Prefill m = BATON__PREFILL__INIT;
    arena_init(&arena);
    m.decode = ranks_of(e, r, &r->decode, LOSS_DECODE_NODE, &arena);
    if (!m.decode) {
        arena_release(&arena);
        return false;
    }
    m.n_decode = 1 + (size_t)r->decode.n_followers;
    m.generation = generation_wire_encode(&g, &arena);
    m.n_parts = grant->n_parts;
    m.parts = grant->parts;
    m.kept = kept_for(e, r, r->prefill.node, &arena);
    bool sent = send_to(e, r, &r->prefill, LOSS_PREFILL_NODE, FRAME_PREFILL, &m.base);
    arena_release(&arena);
    return sent;
}

/* Ends the placement at the directory and in the view. Without the latter, requests that wait for
 * capacity would see this one as running until the next snapshot. */
void request_release_place(struct entry *e, struct request *r)
{
    admission_unfill(e, r, false);
    if (r->placed) directory_release(e->directory, r->id);
    r->placed = false;
    if (r->accounted.request && !r->placing) view_remove_load(&e->view, &r->accounted);
    if (!r->placing) r->accounted = (struct placement){ 0 };
}

/* Sends CANCEL to the nodes of this attempt, except to lost ones, and ends the placement. */
static void abandon_attempt(struct entry *e, struct request *r)
{
    Baton__Cancel m = BATON__CANCEL__INIT;
    const struct request_node *nodes[] = { &r->prefill, &r->decode };
    bool parks = e->leaves && r->resume.wanted; /* its decode node will, when this link ends */
    for (size_t i = 0; i < COUNT_OF(nodes) && !parks; i++) {
        if (!nodes[i]->node || (i == 1 && nodes[1]->node == nodes[0]->node)) continue;
        if (cluster_knows(e->cluster, nodes[i]->node) &&
            cluster_send_proto(e->cluster, nodes[i]->node, FRAME_CANCEL, r->id, r->attempt,
                               &m.base) != OK)
            log_debug("cancel not sent", "request=%016llx", (unsigned long long)r->id);
    }
    request_attach_abandon(e, r);
    request_release_place(e, r);
    request_note(e, r, BREAKER_GIVEN_UP);
    r->prefill = r->decode = (struct request_node){ 0 };
    r->pressed_until_ns = 0;
    r->prefix.most_computed = 0;
}

/* ---- the end ---- */

void request_end(struct entry *e, struct request *r, enum status st, enum finish_reason finish,
                 int32_t stop_token, const char *text)
{
    struct gen_end end = {
        .status = st, .finish = finish, .stop_token = stop_token, .n_output = request_n_out(r)
    };
    if (st == OK) {
        request_release_place(e, r);
        /* What its first token showed is old by now, and was noted then. */
        request_note(e, r, request_n_out(r) == r->n_before ? BREAKER_WORKED : BREAKER_GIVEN_UP);
    } else abandon_attempt(e, r);
    request_set_state(r, REQUEST_ENDED);
    r->trace.total_ns = clock_ns() - r->t_accept;
    r->trace.first_token_ns = r->t_first ? r->t_first - r->t_accept : 0;
    r->trace.decode_ns = r->t_first ? r->t_last - r->t_first : 0;
    r->trace.n_moves = r->n_moves;
    end.trace = r->trace;
    if (status_class_of(st) == CLASS_BUSY)
        end.retry_after_s = r->retry_after_s ? r->retry_after_s : 1;
    snprintf(end.retry, sizeof end.retry, "%s", r->retry);
    end.takes_others = r->takes_others;
    admission_leave(e, r);
    snprintf(end.text, sizeof end.text, "%s", text ? text : "");
    list_remove(&r->link);
    e->n_live--;
    map_del(&e->by_id, map_key_u64(&r->id));
    if (!hedge_hides_end(r, st)) {
        scheduler_metrics_end(&e->metrics, r, &end);
        if (st != OK && st != ERR_CANCELED)
            recent_add_failure(&e->recent, clock_ms(), st, end.text);
    }
    r->sink.on_end(r->sink.arg, &end);
    if (r->placing) list_push(&e->orphans, &r->link);
    else request_free(r);
}

/* ---- losses ---- */

void request_keep_apart(struct request *r)
{
    const struct place_pair pair = { r->prefill.node, r->decode.node };
    r->apart[r->n_apart++ % REQUEST_AVOID_MAX] = pair;
}

void request_avoid(struct request *r, uint64_t node)
{
    if (node) r->avoid[r->n_avoid++ % REQUEST_AVOID_MAX] = node;
}

/* The next attempts avoid what failed this one: a node, or the pair but neither node. */
static void avoid(struct request *r, enum request_loss loss, uint64_t culprit)
{
    request_avoid(r, culprit);
    if (loss == LOSS_PAIR) request_keep_apart(r);
}

static void place_again(struct entry *e, struct request *r, uint64_t pause_ms)
{
    abandon_attempt(e, r);
    buf_clear(&r->held);
    buf_clear(&r->held_end);
    if (r->state != REQUEST_PLACING) r->unplaced_since_ms = 0;
    request_set_state(r, REQUEST_PLACING);
    r->wait_until_ms = clock_ms() + pause_ms;
    view_refresh(&e->view);
}

/* What another node refuses, or lost, is no fault of the request: the client may try again. */
static void fail(struct entry *e, struct request *r, enum request_loss loss, enum status st,
                 uint64_t culprit, const char *text)
{
    enum status_class c = status_class_of(st);
    char all[ERR_TEXT_MAX];
    bool of_others = loss == LOSS_PAIR || (culprit && culprit != e->view.me.node);
    if ((c != CLASS_PEER && c != CLASS_FATAL && st != ERR_TIMEOUT) || !of_others) {
        request_end(e, r, st, FINISH_ERROR, -1, text);
        return;
    }
    const struct node_record *n = view_find(&e->view, culprit);
    if (loss == LOSS_PAIR)
        snprintf(all, sizeof all,
                 "no node could serve this request in %u attempts; last, from %.63s to %.63s: "
                 "%.300s",
                 r->attempt, r->prefill.name, r->decode.name, text);
    else
        snprintf(all, sizeof all,
                 "no node could serve this request in %u attempts; last, %s: %.380s", r->attempt,
                 n ? n->name : "a node that is gone", text);
    request_end(e, r, ERR_UNAVAILABLE, FINISH_ERROR, -1, all);
}

/* A busy node is no event: every request that waits for its turn would tell it many times a
 * second. */
static void log_loss(struct entry *e, const struct request *r, enum request_action action,
                     enum status st, uint64_t culprit, const char *text)
{
    enum log_level level = LOG_INFO;
    uint32_t n_unlogged = 0;
    if (action == ACTION_COMPUTE && !r->resume.returns) level = LOG_DEBUG; /* it was a new one */
    if (action == ACTION_REQUEUE) {
        char what[ERR_TEXT_MAX];
        snprintf(what, sizeof what, "%016llx %s", (unsigned long long)culprit, text);
        level = log_repeats_level(&e->requeues, what, clock_ms(), LOG_INFO, &n_unlogged);
    }
    log_line(level, "request loss",
             "request=%016llx api_request=%s state=%s st=%s attempt=%u action=%s prefill=%s "
             "decode=%s repeats=%u why=\"%s\"",
             (unsigned long long)r->id, r->name, request_state_name(r->state), status_name(st),
             r->attempt, retry_action_name(action), r->prefill.name, r->decode.name, n_unlogged,
             text);
}

/* A node that gives a request back for want of blocks (answer.h) is full; but others may have some,
 * so the first time ends no request. One that leaves, or has another role now, is not full. */
static bool counts_as_full(const struct request *r, enum request_loss loss, enum status st)
{
    return loss != LOSS_HANDED_BACK || (st == ERR_FULL && r->full_since_ms);
}

/* What happens in truth: the table knows neither that all moves are used up, nor for how long all
 * nodes have been full. */
static enum request_action action_of(struct entry *e, struct request *r, enum request_loss loss,
                                     enum status st)
{
    enum request_action action = retry_action(r->state, loss);
    if (r->ends != FINISH_NONE && action != ACTION_IGNORE) return ACTION_END;
    if (action == ACTION_MOVE && r->n_moves >= REQUEST_MOVES_MAX) return ACTION_FAIL;
    if (action == ACTION_REQUEUE && counts_as_full(r, loss, st) &&
        request_is_full_for_too_long(e, r))
        return ACTION_FAIL;
    return action;
}

static void note_handed_back(struct request *r, uint64_t node, enum status st)
{
    r->gave_back = node;
    if (node == r->decode.node) r->gave_kv = r->decode;
    if (st != ERR_FULL) r->full_since_ms = 0; /* it had its nodes */
    else if (!r->full_since_ms) r->full_since_ms = clock_ms();
}

/* One that came back for want of its prompt's KV (prefix_request_lacked) has a place in line as
 * before, and nothing to wait for: it is placed once without asking for that. */
static void requeue(struct entry *e, struct request *r, enum request_loss loss, enum status st,
                    uint64_t culprit)
{
    const bool at_once = r->prefix.was_lacking;
    counter_add(e->metrics.requeues, 1);
    r->prefix.was_lacking = false;
    if (loss == LOSS_HANDED_BACK && !at_once) note_handed_back(r, culprit, st);
    place_again(e, r, at_once ? 0 : REQUEST_PAUSE_BUSY_MS);
    if (at_once) request_advance(e, r);
}

void request_on_loss(struct entry *e, struct request *r, enum request_loss loss, enum status st,
                     uint64_t culprit, const char *text)
{
    enum request_action action = action_of(e, r, loss, st);
    if (action != ACTION_IGNORE && hedge_on_loss(e, r, loss, text)) return;
    scheduler_metrics_loss(&e->metrics, r->state, loss, action);
    if (action == ACTION_IGNORE) return;
    if (action != ACTION_END) log_loss(e, r, action, st, culprit, text);
    switch (action) {
    case ACTION_REQUEUE: requeue(e, r, loss, st, culprit); break;
    case ACTION_MOVE:
        r->n_moves++;
        counter_add(e->metrics.moves, 1);
        avoid(r, loss, culprit);
        r->full_since_ms = 0;
        place_again(e, r, 0);
        request_advance(e, r);
        break;
    case ACTION_COMPUTE:
        if (request_ends_uncomputed(e, r) || admission_refuses_to_compute(e, r)) break;
        if (r->resume.returns) counter_add(e->metrics.resumes_computed, 1);
        place_again(e, r, 0);
        request_advance(e, r);
        break;
    case ACTION_FAIL:
        if (retry_action(r->state, loss) == ACTION_REQUEUE) request_end_full(e, r);
        else fail(e, r, loss, st, culprit, text);
        break;
    case ACTION_END: /* only FINISHED got lost */
        request_end(e, r, OK, r->ends, r->ends == FINISH_STOP ? r->tokens[r->n_tokens - 1] : -1,
                    "");
        break;
    case ACTION_IGNORE:
    case ACTION_N: break;
    }
}

/* Only the decode node is waited for with a limit, in RESERVE. */
static void on_stuck(struct entry *e, struct request *r)
{
    static const char why[] = "the decode node did not answer the reservation";
    const struct view_attempt a = { r->id, r->prefill.node, r->decode.node };
    view_note_failure(&e->view, &a, r->decode.node, ERR_TIMEOUT, why);
    request_on_loss(e, r, LOSS_STUCK, ERR_TIMEOUT, r->decode.node, why);
}

/* Its client's time limit passed, or --scheduler-ttl. */
static void end_in_time(struct entry *e, struct request *r)
{
    char text[ERR_TEXT_MAX] = "the request's time limit passed", said[ADMIT_DEADLINE_MAX];
    const char *field;
    if (r->ends_by_client)
        snprintf(text, sizeof text, "%s, and the answer was not complete by then: it has %u tokens",
                 admit_deadline_text(&r->wanted, &field, said), request_n_out(r));
    request_end(e, r, ERR_TIMEOUT, FINISH_ERROR, -1, text);
}

void request_advance(struct entry *e, struct request *r)
{
    uint64_t now = clock_ms();
    if (r->canceled) {
        request_end(e, r, ERR_CANCELED, FINISH_NONE, -1, "the client left or needs no more tokens");
        return;
    }
    if (r->deadline_ms && now >= r->deadline_ms) {
        end_in_time(e, r);
        return;
    }
    if (admission_ends(e, r) || hedge_advance(e, r)) return;
    switch (r->state) {
    case REQUEST_PLACING:
        /* Capacity that became free in this tick goes to the request that waits longest
         * (place_waiting_requests, next turn). */
        admission_push(e, r);
        if (admission_is_waiting(r)) break; /* admission_place_line */
        if (!r->placing && now >= r->wait_until_ms && !e->capacity_freed) (void)request_place(e, r);
        break;
    case REQUEST_ATTACH: request_attach_advance(e, r); break;
    case REQUEST_CREDIT:
    case REQUEST_RESERVE:
    case REQUEST_PREFILL:
    case REQUEST_DECODE:
    case REQUEST_RUN:
        if (r->wait_until_ms && now >= r->wait_until_ms) on_stuck(e, r);
        break;
    case REQUEST_ENDED:
    case REQUEST_N_STATES: break;
    }
}
