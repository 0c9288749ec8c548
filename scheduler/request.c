/* request.c - see request.h. The state is changed by set_state only; every loss goes through
 * request_on_loss. */
#include "scheduler/request.h"

#include <stdio.h>
#include <string.h>

#include "scheduler/place.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/cluster/generation_wire.h"

enum {
    PAUSE_BUSY_MS = 50, /* before a refused request is placed again */
    PAUSE_MOVE_MS = 0,
    RESERVE_STUCK_MS = 5000,  /* a grant is one round trip and one engine step */
    SUSPECTS_TRIED_MS = 1000, /* without any other node for this long: the directory still lists
                               * them, they may well live */
    FIRST_STUCK_MS = 60000,   /* KV complete, first token sent: the rest is one step of the decode
                               * engine, long on a slow CPU */
    /* Computing and decoding have no limit of their own: dead and frozen nodes are noticed by their
     * links. */
    NEVER_MS = 0
};

/* ---- records ---- */

static void *copy(const void *p, size_t bytes) { return bytes ? mem_dup(p, bytes) : NULL; }

struct request *request_create(struct entry *e, uint64_t id, const struct gen_request *g,
                               const struct gen_sink *sink)
{
    struct request *r = MEM_NEW(struct request);
    uint32_t block_tokens = e->block_tokens;
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
    r->sampling.allowed = NULL; /* token masks come with structured output, which the face
                                 * refuses */
    r->cache_salt = g->cache_salt;
    r->prompt_logprobs = g->prompt_logprobs;
    r->deadline_ms = g->deadline_ms;
    if (g->n_tokens >= block_tokens && block_tokens)
        r->first_block = hash_block((struct hash128){ g->cache_salt, 0 }, g->tokens, block_tokens);
    r->t_accept = clock_ns();
    r->unplaced_since_ms = clock_ms();
    list_init(&r->link);
    return r;
}

void request_free(struct request *r)
{
    if (!r) return;
    mem_free(r->tokens);
    mem_free((void *)r->sampling.bias);
    buf_release(&r->held);
    buf_release(&r->held_end);
    mem_free(r);
}

static uint32_t n_out(const struct request *r) { return r->n_tokens - r->n_prompt; }

static void set_state(struct request *r, enum request_state next)
{
    log_debug("request", "req=%s from=%s to=%s attempt=%u", r->name, request_state_name(r->state),
              request_state_name(next), r->attempt);
    r->state = next;
}

/* ---- messages out ---- */

/* Send for the current attempt; a failure is the loss of that node. Returns whether it was sent. */
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
        .prompt_logprobs = r->prompt_logprobs && n_out(r) == 0,
    };
}

static bool send_run(struct entry *e, struct request *r)
{
    struct arena arena;
    struct generation_wire g = wire_of(r);
    Baton__Run m = BATON__RUN__INIT;
    arena_init(&arena);
    m.generation = generation_wire_encode(&g, &arena);
    bool sent = send_to(e, r, &r->decode, LOSS_DECODE_NODE, FRAME_RUN, &m.base);
    arena_release(&arena);
    return sent;
}

static bool send_reserve(struct entry *e, struct request *r)
{
    struct arena arena;
    struct generation_wire g = wire_of(r);
    Baton__Reserve m = BATON__RESERVE__INIT;
    arena_init(&arena);
    m.generation = generation_wire_encode(&g, &arena);
    bool sent = send_to(e, r, &r->decode, LOSS_DECODE_NODE, FRAME_RESERVE, &m.base);
    arena_release(&arena);
    return sent;
}

static bool send_prefill(struct entry *e, struct request *r, const Baton__Grant *grant)
{
    struct arena arena;
    struct generation_wire g = wire_of(r);
    Baton__Prefill m = BATON__PREFILL__INIT;
    Baton__NodeAddress address = BATON__NODE_ADDRESS__INIT;
    arena_init(&arena);
    address.node = r->decode.node;
    address.host = r->decode.host;
    address.port = r->decode.port;
    m.generation = generation_wire_encode(&g, &arena);
    m.decode = &address;
    m.kvt_grant = grant->kvt_grant;
    bool sent = send_to(e, r, &r->prefill, LOSS_PREFILL_NODE, FRAME_PREFILL, &m.base);
    arena_release(&arena);
    return sent;
}

/* The placement ends: at the directory, and in the view of this entry, which otherwise would show
 * its own requests as running until the next snapshot while others wait for their room. */
static void release_place(struct entry *e, struct request *r)
{
    if (r->placed) directory_release(e->directory, r->id);
    r->placed = false;
    if (r->accounted.request && !r->placing) view_remove_load(&e->view, &r->accounted);
    if (!r->placing) r->accounted = (struct placement){ 0 };
}

/* The nodes of this attempt are told that nobody wants it any more; a lost node needs no
 * telling. */
static void abandon_attempt(struct entry *e, struct request *r)
{
    Baton__Cancel m = BATON__CANCEL__INIT;
    const struct request_node *nodes[] = { &r->prefill, &r->decode };
    for (size_t i = 0; i < COUNT_OF(nodes); i++) {
        if (!nodes[i]->node || (i == 1 && nodes[1]->node == nodes[0]->node)) continue;
        if (cluster_knows(e->cluster, nodes[i]->node) &&
            cluster_send_proto(e->cluster, nodes[i]->node, FRAME_CANCEL, r->id, r->attempt,
                               &m.base) != OK)
            log_debug("cancel not sent", "req=%s", r->name);
    }
    release_place(e, r);
    r->prefill = r->decode = (struct request_node){ 0 };
}

/* ---- the end ---- */

void request_end(struct entry *e, struct request *r, enum status st, enum finish_reason finish,
                 int32_t stop_token, const char *text)
{
    struct gen_end end = {
        .status = st, .finish = finish, .stop_token = stop_token, .n_output = n_out(r)
    };
    if (st != OK) abandon_attempt(e, r);
    else release_place(e, r);
    set_state(r, REQUEST_ENDED);
    r->trace.total_ns = clock_ns() - r->t_accept;
    r->trace.first_token_ns = r->t_first ? r->t_first - r->t_accept : 0;
    r->trace.decode_ns = r->t_first ? r->t_last - r->t_first : 0;
    r->trace.n_moves = r->n_moves;
    end.trace = r->trace;
    if (status_class_of(st) == CLASS_BUSY) end.retry_after_s = 1;
    snprintf(end.text, sizeof end.text, "%s", text ? text : "");
    list_remove(&r->link);
    e->n_live--;
    map_del(&e->by_id, map_key_u64(&r->id));
    scheduler_metrics_observe(&e->metrics, r->name, r->n_prompt, &end);
    r->sink.on_end(r->sink.arg, &end);
    if (r->placing) list_push(&e->orphans, &r->link);
    else request_free(r);
}

/* ---- losses ---- */

static void avoid_node(struct request *r, uint64_t node)
{
    if (!node) return;
    r->avoid[r->n_avoid % REQUEST_AVOID_MAX] = node;
    r->n_avoid++;
}

static void place_again(struct entry *e, struct request *r, uint64_t pause_ms)
{
    abandon_attempt(e, r);
    buf_clear(&r->held);
    buf_clear(&r->held_end);
    if (r->state != REQUEST_PLACING) r->unplaced_since_ms = clock_ms();
    set_state(r, REQUEST_PLACING);
    r->wait_until_ms = clock_ms() + pause_ms;
    view_refresh(&e->view);
}

void request_on_loss(struct entry *e, struct request *r, enum request_loss loss, enum status st,
                     uint64_t culprit, const char *text)
{
    enum request_action action = retry_action(r->state, loss);
    if (action == ACTION_IGNORE) return;
    if (r->ends != FINISH_NONE) { /* only the word that it is over got lost */
        request_end(e, r, OK, r->ends, r->ends == FINISH_STOP ? r->tokens[r->n_tokens - 1] : -1,
                    "");
        return;
    }
    log_info("request loss", "req=%s state=%s st=%s attempt=%u action=%s why=\"%s\"", r->name,
             request_state_name(r->state), status_name(st), r->attempt, retry_action_name(action),
             text);
    if (action == ACTION_MOVE && r->n_moves >= REQUEST_MOVES_MAX) action = ACTION_FAIL;
    switch (action) {
    case ACTION_REQUEUE:
        counter_add(e->metrics.requeues, 1);
        place_again(e, r, PAUSE_BUSY_MS);
        break;
    case ACTION_MOVE:
        r->n_moves++;
        counter_add(e->metrics.moves, 1);
        avoid_node(r, culprit);
        place_again(e, r, PAUSE_MOVE_MS);
        request_advance(e, r);
        break;
    case ACTION_FAIL: request_end(e, r, st, FINISH_ERROR, -1, text); break;
    case ACTION_IGNORE: break;
    }
}

/* ---- placing ---- */

static struct request_node node_of(const struct node_record *n)
{
    struct request_node out = { 0 };
    if (!n) return out;
    out.node = n->node;
    out.port = n->cluster_port;
    snprintf(out.name, sizeof out.name, "%s", n->name);
    snprintf(out.host, sizeof out.host, "%s", n->host);
    return out;
}

static void start_attempt(struct entry *e, struct request *r)
{
    uint64_t now = clock_ms();
    r->attempt++;
    r->n_before = n_out(r);
    cluster_learn(e->cluster, r->decode.node, r->decode.host, r->decode.port);
    snprintf(r->trace.decode_node, sizeof r->trace.decode_node, "%s", r->decode.name);
    if (!r->prefill.node) {
        snprintf(r->trace.prefill_node, sizeof r->trace.prefill_node, "%s", r->decode.name);
        r->trace.place_ns = clock_ns() - r->t_accept;
        r->wait_until_ms = NEVER_MS;
        set_state(r, REQUEST_RUN);
        if (send_run(e, r)) counter_add(e->metrics.local, 1);
        return;
    }
    snprintf(r->trace.prefill_node, sizeof r->trace.prefill_node, "%s", r->prefill.name);
    cluster_learn(e->cluster, r->prefill.node, r->prefill.host, r->prefill.port);
    r->wait_until_ms = r->deadline_ms ? r->deadline_ms : now + (uint64_t)e->ttl_s * 1000;
    set_state(r, REQUEST_CREDIT);
    Baton__AskCredit ask = BATON__ASK_CREDIT__INIT;
    ask.n_tokens = r->n_tokens;
    if (send_to(e, r, &r->prefill, LOSS_PREFILL_NODE, FRAME_ASK_CREDIT, &ask.base))
        counter_add(e->metrics.split, 1);
}

/* The directory has counted the placement, or not. When it cannot be reached the request goes ahead
 * uncounted: what it holds is soft state. */
static void on_reserved(void *arg, enum status st, uint64_t fence)
{
    struct request *r = arg;
    struct entry *e = r->entry;
    (void)fence; /* nodes fence by attempt and by kvtransfer's generations */
    r->placing = false;
    if (r->state == REQUEST_ENDED) { /* canceled meanwhile */
        r->placed = st == OK;
        release_place(e, r);
        list_remove(&r->link);
        request_free(r);
    } else if (st == OK || st == ERR_UNAVAILABLE || st == ERR_TIMEOUT || st == ERR_IO ||
               st == ERR_PEER_LOST) {
        r->placed = st == OK;
        r->prefill = r->next_prefill;
        r->decode = r->next_decode;
        start_attempt(e, r);
    } else { /* it knows better than the view, which goes on counting this one until it is fresh */
        r->accounted = (struct placement){ 0 };
        r->wait_until_ms = clock_ms() + PAUSE_BUSY_MS;
        view_refresh(&e->view);
    }
}

/* No node can take it: wait a little, for a node may be starting or a lease about to end; then say
 * what is missing. */
static void no_node(struct entry *e, struct request *r, enum status st)
{
    uint64_t now = clock_ms();
    char text[ERR_TEXT_MAX];
    view_refresh(&e->view);
    r->wait_until_ms = now + PAUSE_BUSY_MS;
    r->waits_for_capacity = st == ERR_BUSY;
    if (st == ERR_BUSY || now - r->unplaced_since_ms < e->grace_ms) return;
    size_t others = view_n_other_model(&e->view);
    snprintf(text, sizeof text,
             "no pair of nodes can serve this request; topics and roles seen: %.360s",
             e->view.topics[0] ? e->view.topics : "none");
    if (others > 0) {
        size_t n = strlen(text);
        snprintf(text + n, sizeof text - n,
                 "; nodes of this topic that have loaded another model (or the same at another "
                 "precision): %zu",
                 others);
    }
    request_end(e, r, ERR_UNAVAILABLE, FINISH_ERROR, -1, text);
}

/* Collects the nodes that must not be chosen now: suspects, and nodes that failed this request. */
static size_t nodes_to_avoid(const struct entry *e, const struct request *r, uint64_t *out,
                             size_t cap)
{
    size_t n = view_suspects(&e->view, out, cap);
    uint32_t n_own = r->n_avoid < REQUEST_AVOID_MAX ? r->n_avoid : REQUEST_AVOID_MAX;
    for (uint32_t i = 0; i < n_own && n < cap; i++) out[n++] = r->avoid[i];
    return n;
}

static enum status place(struct entry *e, struct request *r)
{
    uint64_t avoid[PLACE_AVOID_MAX], random;
    struct place_result chosen;
    random_bytes(&random, sizeof random);
    struct place_request q = {
        .n_tokens = r->n_tokens,
        .n_total = r->n_prompt + r->sampling.max_tokens,
        .model = e->view.model,
        .first_block = r->first_block,
        .avoid = avoid,
        .n_avoid = nodes_to_avoid(e, r, avoid, PLACE_AVOID_MAX),
        .random = random,
    };
    enum status st = place_choose(e->view.nodes, e->view.n_nodes, &q, &chosen);
    if (st == ERR_UNAVAILABLE && r->n_avoid) { /* better a node that failed once than none */
        r->n_avoid = 0;
        q.n_avoid = nodes_to_avoid(e, r, avoid, PLACE_AVOID_MAX);
        st = place_choose(e->view.nodes, e->view.n_nodes, &q, &chosen);
    }
    /* All are suspects when it was this node that was stopped or cut off. */
    if (st == ERR_UNAVAILABLE && q.n_avoid &&
        clock_ms() - r->unplaced_since_ms >= SUSPECTS_TRIED_MS) {
        q.n_avoid = 0;
        st = place_choose(e->view.nodes, e->view.n_nodes, &q, &chosen);
    }
    r->waits_for_capacity = false;
    if (st != OK) {
        no_node(e, r, st);
        return st;
    }
    /* An echo has nothing to decode, so nothing to transfer; and one whose attempts keep failing
     * goes without a transfer too. */
    bool split = r->sampling.max_tokens > 0 && r->n_moves < REQUEST_SPLITS_MAX;
    r->next_prefill = split ? node_of(chosen.prefill) : (struct request_node){ 0 };
    r->next_decode = node_of(chosen.decode);
    struct placement placement = {
        .request = r->id,
        .prefill = r->next_prefill.node,
        .decode = r->next_decode.node,
        .tokens = r->n_tokens,
        .blocks = chosen.blocks,
        .ttl_ms = e->ttl_s * 1000,
    };
    r->accounted = placement;
    view_add_load(&e->view, &placement);
    r->placing = true;
    st = directory_reserve(e->directory, &placement, on_reserved, r);
    if (st != OK) on_reserved(r, ERR_UNAVAILABLE, 0);
    return OK;
}

bool request_place_if_waiting(struct entry *e, struct request *r)
{
    if (r->state != REQUEST_PLACING || r->placing || r->canceled || !r->waits_for_capacity)
        return true;
    return place(e, r) != ERR_BUSY;
}

void request_advance(struct entry *e, struct request *r)
{
    uint64_t now = clock_ms();
    if (r->canceled) {
        request_end(e, r, ERR_CANCELED, FINISH_NONE, -1, "the client is gone or has enough");
        return;
    }
    if (r->deadline_ms && now >= r->deadline_ms) {
        request_end(e, r, ERR_TIMEOUT, FINISH_ERROR, -1, "the request's time limit passed");
        return;
    }
    switch (r->state) {
    case REQUEST_PLACING:
        /* Room that came free in this very tick belongs to the longest waiting:
         * place_waiting_requests hands it out with the next turn. */
        if (!r->placing && now >= r->wait_until_ms && !e->capacity_freed) (void)place(e, r);
        break;
    case REQUEST_CREDIT:
    case REQUEST_RESERVE:
    case REQUEST_PREFILL:
    case REQUEST_DECODE:
    case REQUEST_RUN:
        if (r->wait_until_ms && now >= r->wait_until_ms)
            request_on_loss(e, r, LOSS_STUCK, ERR_TIMEOUT, r->decode.node,
                            "the attempt made no progress");
        break;
    case REQUEST_ENDED:
    case REQUEST_N_STATES: break;
    }
}

/* ---- messages in ---- */

static void on_credit(struct entry *e, struct request *r)
{
    if (r->state != REQUEST_CREDIT) return;
    r->t_credit = clock_ns();
    r->trace.place_ns = r->t_credit - r->t_accept;
    r->wait_until_ms = clock_ms() + RESERVE_STUCK_MS;
    set_state(r, REQUEST_RESERVE);
    send_reserve(e, r);
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
    r->wait_until_ms = NEVER_MS;
    set_state(r, REQUEST_PREFILL);
    send_prefill(e, r, grant);
    baton__grant__free_unpacked(grant, NULL);
}

static void on_report(struct request *r, const struct cluster_message *m)
{
    Baton__PrefillReport *p = baton__prefill_report__unpack(NULL, m->body.n,
                                                            (const uint8_t *)m->body.p);
    if (!p) return; /* a trace only */
    r->trace.queue_ns = p->queue_ns;
    r->trace.prefill_ns = p->prefill_ns;
    r->trace.kv_bytes = p->kv_bytes;
    r->trace.kv_ns = p->kv_ns;
    r->trace.kv_busy_ns = p->kv_busy_ns;
    r->trace.kv_tail_ns = p->kv_tail_ns;
    r->trace.kv_link_speed = p->kv_link_speed;
    r->trace.n_cached = p->n_cached;
    snprintf(r->trace.transport, sizeof r->trace.transport, "%s", p->transport);
    /* The prefill node has forgotten the request: should its first token have been lost on the way,
     * nobody else would notice. */
    if (r->state == REQUEST_PREFILL) r->wait_until_ms = clock_ms() + FIRST_STUCK_MS;
    baton__prefill_report__free_unpacked(p, NULL);
}

/* The prefill node's logprobs of the prompt go to the client first, but travel another link than
 * the decode node's tokens. */
static bool awaits_prompt_logprobs(const struct request *r)
{
    return r->state == REQUEST_PREFILL && r->prompt_logprobs && n_out(r) == 0 &&
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
    } else if (f->n_tokens != n_out(r) - r->n_before) { /* a cut answer must not pass for a whole
                                                         * one */
        request_on_loss(e, r, LOSS_PEER, ERR_FORMAT, m->from, "the last tokens are missing");
    } else {
        enum finish_reason finish = (enum finish_reason)f->finish;
        int32_t stop = f->stop_token;
        r->trace.n_recomputed = f->n_recomputed;
        if (!r->prefill.node) {
            r->trace.n_cached = f->n_cached;
            r->trace.queue_ns = f->queue_ns;
            r->trace.prefill_ns = f->prefill_ns;
        } else if (f->transport[0]) { /* the report may come later than the last token of a short
                                       * answer */
            r->trace.kv_bytes = f->kv_bytes;
            if (!r->trace.kv_ns) r->trace.kv_ns = f->kv_ns;
            if (!r->trace.kv_link_speed) r->trace.kv_link_speed = f->kv_link_speed;
            snprintf(r->trace.transport, sizeof r->trace.transport, "%s", f->transport);
        }
        request_end(e, r, OK, finish, stop, "");
    }
    if (f) baton__finished__free_unpacked(f, NULL);
}

static void on_failed(struct entry *e, struct request *r, const struct cluster_message *m)
{
    Baton__Failed *f = baton__failed__unpack(NULL, m->body.n, (const uint8_t *)m->body.p);
    /* nonsense is the node's fault, not the request's */
    enum status st = f ? (enum status)f->status : ERR_INTERNAL;
    char text[ERR_TEXT_MAX];
    if (st >= OK || st < ERR_INTERNAL) st = ERR_INTERNAL;
    snprintf(text, sizeof text, "%s", f && f->text[0] ? f->text : status_text(st));
    if (f) baton__failed__free_unpacked(f, NULL);
    request_on_loss(e, r, retry_loss_of(st), st, m->from, text);
}

/* The logprobs are complete: what overtook them is taken now. Any of it may end the request. */
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
        /* a moved request repeats the early ones */
        if (index != r->n_prompt_lp + 1 || index >= r->n_prompt) continue;
        r->n_prompt_lp = index;
        if (r->sink.on_prompt_logprob) r->sink.on_prompt_logprob(r->sink.arg, index, &t);
    }
    if (p) baton__prompt_logprobs__free_unpacked(p, NULL);
    if (!awaits_prompt_logprobs(r)) replay_held(e, r);
}

void request_on_message(struct entry *e, struct request *r, const struct cluster_message *m)
{
    bool of_prefill = m->from == r->prefill.node, of_decode = m->from == r->decode.node;
    if (r->canceled || m->attempt != r->attempt || (!of_prefill && !of_decode)) return;
    switch (m->type) {
    case FRAME_CREDIT:
        if (of_prefill) on_credit(e, r);
        break;
    case FRAME_GRANT:
        if (of_decode) on_grant(e, r, m);
        break;
    case FRAME_PREFILL_REPORT: on_report(r, m); break;
    case FRAME_PROMPT_LOGPROBS: on_prompt_logprobs(e, r, m); break;
    case FRAME_FINISHED:
        if (of_decode) on_finished(e, r, m);
        break;
    case FRAME_FAILED:
        /* Once tokens flow the prefill node's opinion does not matter. */
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

void request_on_token(struct entry *e, struct request *r, uint64_t from, uint32_t attempt,
                      uint32_t index, const struct token_logprobs *t)
{
    if (r->canceled || attempt != r->attempt || from != r->decode.node) return;
    if (awaits_prompt_logprobs(r)) {
        token_record_add(&r->held, r->id, attempt, index, t);
        return;
    }
    if (r->state == REQUEST_PREFILL) {
        r->wait_until_ms = NEVER_MS;
        set_state(r, REQUEST_DECODE);
    }
    if (r->state != REQUEST_DECODE && r->state != REQUEST_RUN) return;
    if (index < n_out(r)) return;
    if (index > n_out(r)) {
        request_on_loss(e, r, LOSS_PEER, ERR_FORMAT, from, "a token is missing");
        return;
    }
    r->t_last = clock_ns();
    if (!r->t_first) r->t_first = r->t_last;
    append_token(r, t->id);
    r->ends = t->ends;
    r->sink.on_token(r->sink.arg, index, t);
}
