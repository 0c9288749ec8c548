/* request_place.c - how a request gets its nodes: chosen from the view, counted at the directory,
 * and what it is told when there are none (request.h). */
#include <stdio.h>

#include "scheduler/admission/admission_metrics.h"
#include "scheduler/place/place.h"
#include "scheduler/request.h"
#include "shared/base/clock.h"

enum {
    PAUSE_BUSY_MS = REQUEST_PAUSE_BUSY_MS,
    TROUBLE_FRESH_MS = 25, /* all requests that end in one turn of the loop have one look */
    OPEN_TRIED_MS = 1000,  /* after this long without any other node, those whose breaker is open
                            * are tried: they have a link, so they may serve */
    AVOID_MAX = BREAKER_MAX + REQUEST_AVOID_MAX + 2, /* gave_back, and the present node */
    APART_MAX = BREAKER_MAX + REQUEST_AVOID_MAX,
    FILLED_MAX = 256 /* nodes; above that, some are given more than they need */
};

static struct request_node node_of(const struct node_record *n)
{
    struct request_node out = { 0 };
    if (!n) return out;
    out.node = n->node;
    out.port = n->cluster_port;
    out.model = n->model;
    out.model_bits = view_model_bits(n);
    out.role = n->role;
    out.n_followers = n->n_followers;
    out.keeps = n->resume_ms > 0;
    snprintf(out.name, sizeof out.name, "%s", n->name);
    snprintf(out.host, sizeof out.host, "%s", n->host);
    return out;
}

/* The metrics count each attempt; the request itself counts once, by its first. */
static void count_attempt(struct entry *e, struct request *r, bool split)
{
    counter_add(split ? e->metrics.split : e->metrics.local, 1);
    if (!r->is_counted) *(split ? &e->metrics.n_split : &e->metrics.n_one_node) += 1;
    r->is_counted = true;
}

static void start_attempt(struct entry *e, struct request *r)
{
    r->attempt++;
    r->n_before = request_n_out(r);
    r->t_placed_ms = clock_ms();
    cluster_learn(e->cluster, r->decode.node, r->decode.host, r->decode.port);
    snprintf(r->trace.decode_node, sizeof r->trace.decode_node, "%s", r->decode.name);
    if (!r->prefill.node) {
        snprintf(r->trace.prefill_node, sizeof r->trace.prefill_node, "%s", r->decode.name);
        r->trace.place_ns = clock_ns() - r->t_accept;
        r->wait_until_ms = REQUEST_NEVER_MS;
        request_set_state(r, REQUEST_RUN);
        if (request_send_run(e, r)) count_attempt(e, r, false);
        return;
    }
    snprintf(r->trace.prefill_node, sizeof r->trace.prefill_node, "%s", r->prefill.name);
    cluster_learn(e->cluster, r->prefill.node, r->prefill.host, r->prefill.port);
    r->wait_until_ms = REQUEST_NEVER_MS;
    request_set_state(r, REQUEST_CREDIT);
    if (request_send_ask(e, r)) count_attempt(e, r, true);
}

/* This node has not got into the directory (yet), or lost its place there: it serves all the
 * same. */
static bool is_unlisted_me(const struct entry *e, const struct request *r, enum status st)
{
    return st == ERR_NOT_FOUND && !r->next_prefill.node && r->next_decode.node == e->view.me.node;
}

/* The reservation was refused, or its request has ended: nothing was learned of the nodes. */
static void give_up_chosen(struct entry *e, const struct request *r)
{
    const struct view_attempt a = { r->id, r->next_prefill.node, r->next_decode.node };
    view_note(&e->view, &a, BREAKER_GIVEN_UP);
}

/* What the view and the line count for it. */
static void account(struct entry *e, struct request *r, const struct place_result *on,
                    uint32_t tokens)
{
    struct placement p = r->accounted;
    p.prefill = r->next_prefill.node;
    p.decode = r->next_decode.node;
    p.tokens = tokens;
    view_change_load(&e->view, &r->accounted, &p);
    r->accounted = p;
    admission_fill(e, r, p.prefill ? on->prefill : on->decode, tokens, on->decode->step_us);
}

/* Records are proven; of which kind the directory takes a node for is not, and one of another model
 * would answer with other tokens. */
static bool may_replace(const struct request *r, const struct node_record *n)
{
    return n && n->model == r->next_decode.model;
}

/* The nodes on which the directory has placed it, which may be others than were chosen, or compute
 * fewer tokens. False: one has gone from the view meanwhile, or has another model. */
static bool adopt_nodes(struct entry *e, struct request *r, const struct prefix_placed *on)
{
    const bool is_choice = on->prefill == r->next_prefill.node && on->decode == r->next_decode.node;
    const struct place_result nodes = { .prefill = view_find(&e->view, on->prefill),
                                        .decode = view_find(&e->view, on->decode) };
    if (!is_choice && !may_replace(r, nodes.decode)) return false;
    if (!is_choice && on->prefill && !may_replace(r, nodes.prefill)) return false;
    prefix_request_answered(e, r, on, is_choice);
    if (!is_choice) {
        give_up_chosen(e, r);
        r->next_prefill = node_of(nodes.prefill);
        r->next_decode = node_of(nodes.decode);
        const struct view_attempt a = { r->id, on->prefill, on->decode };
        view_note(&e->view, &a, BREAKER_TAKEN);
    }
    const bool are_seen = nodes.decode && (!on->prefill || nodes.prefill);
    if (are_seen && (!is_choice || on->tokens != r->accounted.tokens))
        account(e, r, &nodes, on->tokens);
    return true;
}

/* Refused, or placed on a node that has gone; the view is out of date, and counts this placement
 * until the next snapshot. */
static void place_later(struct entry *e, struct request *r)
{
    give_up_chosen(e, r);
    admission_unfill(e, r, false);
    view_disown_load(&e->view, &r->accounted);
    r->accounted = (struct placement){ 0 };
    r->wait_until_ms = clock_ms() + PAUSE_BUSY_MS;
    view_refresh(&e->view);
}

/* The directory's answer to the reservation. When the directory cannot be reached the request goes
 * ahead uncounted, since reservations are soft state. */
static void on_reserved(void *arg, enum status st, const struct directory_placed *placed)
{
    struct request *r = arg;
    struct entry *e = r->entry;
    bool away = st == ERR_UNAVAILABLE || st == ERR_TIMEOUT || st == ERR_IO || st == ERR_PEER_LOST;
    r->placing = false;
    if (r->state == REQUEST_ENDED) { /* canceled meanwhile */
        r->placed = st == OK;
        request_release_place(e, r);
        give_up_chosen(e, r);
        list_remove(&r->link);
        request_free(r);
    } else if (st == OK && !adopt_nodes(e, r, &placed->on)) {
        directory_release(e->directory, r->id);
        place_later(e, r);
    } else if (st == OK || away || is_unlisted_me(e, r, st)) {
        if (away) request_on_loss(e, r, LOSS_DIRECTORY, st, 0, "the directory cannot be reached");
        r->placed = st == OK;
        r->prefill = r->next_prefill;
        r->decode = r->next_decode;
        hedge_on_placed(e, r);
        start_attempt(e, r);
    } else {
        place_later(e, r);
    }
}

/* There are nodes that can decode for this model, and each is too small. */
static void say_too_large(const struct entry *e, const struct request *r, char text[ERR_TEXT_MAX])
{
    uint64_t largest = 0;
    for (size_t i = 0; i < e->view.n_nodes; i++) {
        const struct node_record *n = &e->view.nodes[i];
        uint64_t holds = (uint64_t)n->n_blocks * n->block_tokens;
        if (holds > n->max_model_len) holds = n->max_model_len;
        if (trouble_can_decode(&e->view, n) && holds > largest) largest = holds;
    }
    snprintf(text, ERR_TEXT_MAX,
             "no node that can decode holds this request of %u tokens (prompt and answer); the "
             "largest holds %llu",
             r->n_prompt + r->sampling.max_tokens, (unsigned long long)largest);
}

bool request_is_full_for_too_long(const struct entry *e, struct request *r)
{
    uint64_t now = clock_ms();
    if (!r->full_since_ms) r->full_since_ms = now;
    return request_n_out(r) == 0 && now - r->full_since_ms >= e->max_queue_ms;
}

void request_end_full(struct entry *e, struct request *r)
{
    char text[ERR_TEXT_MAX];
    admission_set_retry(e, r);
    admission_metrics_late(&e->admission.metrics, ADMIT_WAIT, r->wanted.tenant);
    snprintf(text, sizeof text,
             "every node that could serve this request has been full for %.1f s; try again in %u s",
             (double)(clock_ms() - r->full_since_ms) * 1e-3, r->retry_after_s);
    request_end(e, r, ERR_BUSY, FINISH_ERROR, -1, text);
}

/* The mark first: that it is among the lost ones takes a search. */
static bool can_decode(const struct entry *e, const struct node_record *n)
{
    return !n->is_lost && trouble_can_decode(&e->view, n);
}

static bool some_node_can_decode(const struct entry *e)
{
    for (size_t i = 0; i < e->view.n_nodes; i++)
        if (can_decode(e, &e->view.nodes[i])) return true;
    return false;
}

/* Likewise, and its breaker lets it. */
static bool some_node_lives(const struct entry *e)
{
    uint64_t out[BREAKER_MAX];
    size_t n_out = view_excluded_nodes(&e->view, out);
    for (size_t i = 0; i < e->view.n_nodes; i++) {
        const struct node_record *n = &e->view.nodes[i];
        if (can_decode(e, n) && !nodes_have(out, n_out, n->node)) return true;
    }
    return false;
}

static void note_outage(struct entry *e, bool is_outage)
{
    uint64_t now = clock_ms();
    if (is_outage == (e->no_node_since_ms != 0)) return;
    e->no_node_since_ms = is_outage ? now : 0;
    admit_set_outage(e->admission.admit, is_outage, now);
}

/* Of one in line. */
static uint64_t without_nodes_since(const struct entry *e, const struct request *r)
{
    uint64_t since = r->admit.t_pushed_ms;
    return since > e->no_node_since_ms ? since : e->no_node_since_ms;
}

/* No node could take it, now or later. Where none lives all that are in line wait for the same, and
 * only the first of them is tried. Where some do, it is too large for those: it leaves the line, so
 * that others need not wait for it. */
static void note_unplaced(struct entry *e, struct request *r)
{
    const bool lives = some_node_lives(e);
    note_outage(e, !lives);
    if (lives) admission_take(e, r);
    if (!r->unplaced_since_ms)
        r->unplaced_since_ms = admission_is_waiting(r) ? without_nodes_since(e, r) : clock_ms();
}

/* A router's nodes have got another model: its tokens would be no answer with those delivered. */
static bool has_lost_its_model(const struct entry *e, const struct request *r)
{
    return r->model && e->view.model && r->model != e->view.model;
}

static void end_without_its_model(struct entry *e, struct request *r)
{
    char text[ERR_TEXT_MAX];
    snprintf(text, sizeof text,
             "no node is left with the model that began this answer (fingerprint %016llx), and the "
             "nodes' other model (%016llx) cannot go on with it; send the request again for a new "
             "answer",
             (unsigned long long)r->model, (unsigned long long)e->view.model);
    request_end(e, r, ERR_UNAVAILABLE, FINISH_ERROR, -1, text);
}

static void end_unplaced(struct entry *e, struct request *r)
{
    char text[ERR_TEXT_MAX];
    if (has_lost_its_model(e, r)) {
        end_without_its_model(e, r);
        return;
    }
    if (clock_ms() - e->t_trouble_ms >= TROUBLE_FRESH_MS) entry_update_trouble(e);
    e->trouble.n_requests += e->trouble.blocks;
    if (e->trouble.blocks) snprintf(text, sizeof text, "%s", e->trouble.text);
    else say_too_large(e, r, text);
    request_end(e, r, ERR_UNAVAILABLE, FINISH_ERROR, -1, text);
}

bool request_waits_for_nodes(const struct entry *e, const struct request *r)
{
    return e->no_node_since_ms && admission_is_waiting(r) &&
           clock_ms() - without_nodes_since(e, r) < e->grace_ms;
}

/* While there are nodes whose breakers are open, the first in line tries them. */
bool request_ends_without_nodes(struct entry *e, struct request *r)
{
    if (!e->no_node_since_ms || !admission_is_waiting(r)) return false;
    if (!e->view.known || some_node_can_decode(e)) return false;
    end_unplaced(e, r);
    return true;
}

/* No node can take the request. When all are full it waits at most max_queue_ms. When there is none
 * it waits grace_ms, since a node may be starting or a lease about to end; then it fails with what
 * is missing. */
static void no_node(struct entry *e, struct request *r, enum status st)
{
    uint64_t now = clock_ms();
    view_refresh(&e->view);
    r->wait_until_ms = now + PAUSE_BUSY_MS;
    r->waits_for_capacity = st == ERR_BUSY;
    if (st == ERR_BUSY) {
        if (request_is_full_for_too_long(e, r)) request_end_full(e, r);
        return;
    }
    if (e->view.known && now - r->unplaced_since_ms >= e->grace_ms) end_unplaced(e, r);
}

/* Collects the nodes that must not be chosen now, beside those that are lost: those that the view
 * excludes, and those that failed this request. */
static size_t nodes_to_avoid(const struct entry *e, const struct request *r,
                             uint64_t out[AVOID_MAX])
{
    size_t n = view_excluded_nodes(&e->view, out);
    uint32_t n_own = r->n_avoid < REQUEST_AVOID_MAX ? r->n_avoid : REQUEST_AVOID_MAX;
    for (uint32_t i = 0; i < n_own; i++) out[n++] = r->avoid[i];
    if (r->gave_back) out[n++] = r->gave_back;
    return n;
}

/* The same for pairs. */
static size_t pairs_to_avoid(const struct entry *e, const struct request *r,
                             struct place_pair out[APART_MAX])
{
    size_t n = view_excluded_pairs(&e->view, out);
    uint32_t n_own = r->n_apart < REQUEST_AVOID_MAX ? r->n_apart : REQUEST_AVOID_MAX;
    for (uint32_t i = 0; i < n_own; i++) out[n++] = r->apart[i];
    return n;
}

/* What its client has is of the model of the first token; of an answer from before whose node was
 * never listed it is that of the handle. */
static uint64_t model_of(const struct entry *e, const struct request *r)
{
    if (r->model) return r->model;
    if (request_n_out(r) && r->resume.model_bits)
        return view_model_of_bits(&e->view, r->resume.model_bits);
    return e->view.model;
}

static struct place_request query_of(const struct entry *e, const struct request *r,
                                     uint64_t avoid[AVOID_MAX], struct place_pair apart[APART_MAX])
{
    uint64_t random;
    random_bytes(&random, sizeof random);
    return (struct place_request){
        .n_tokens = r->n_tokens,
        .n_total = r->n_prompt + r->sampling.max_tokens,
        .model = model_of(e, r),
        .avoid = avoid,
        .n_avoid = nodes_to_avoid(e, r, avoid),
        .apart = apart,
        .n_apart = pairs_to_avoid(e, r, apart),
        .unsplit = e->view.unsplit,
        .is_again = r->attempt > 0,
        .random = random,
    };
}

/* One that goes first overtakes what a node has, but for others that do: it had better go where
 * there are none. */
static size_t nodes_filled(const struct entry *e, const struct request *r,
                           uint64_t filled[FILLED_MAX])
{
    const struct fill *f = &e->admission.fill;
    if (r->goes_first) return fill_first(f, filled, FILLED_MAX);
    return fill_enough(f, clock_ms(), filled, FILLED_MAX);
}

/* Nodes for a request, and what was asked to get them. */
struct chosen_nodes {
    uint64_t avoid[AVOID_MAX], filled[FILLED_MAX];
    struct place_pair apart[APART_MAX];
    struct place_request query;
    struct place_result nodes;
};

static enum status choose(const struct entry *e, struct chosen_nodes *c)
{
    return place_choose(e->view.nodes, e->view.n_nodes, &c->query, &c->nodes);
}

/* Chooses nodes; when none is left, first those that failed this request before are tried again,
 * then those whose breaker is open. A lost one never is: it has no link. A node that handed it back
 * is no worse than waiting for the others. */
static enum status choose_nodes(struct entry *e, struct request *r, struct chosen_nodes *c)
{
    struct place_request *q = &c->query;
    *q = query_of(e, r, c->avoid, c->apart);
    q->filled = c->filled;
    r->goes_first = admission_goes_first(e, r);
    if (admission_is_waiting(r)) { /* one that has had its turn goes before those in line */
        q->n_filled = nodes_filled(e, r, c->filled);
        q->saved = e->saved_node;
    }
    enum status st = choose(e, c);
    if (st == ERR_BUSY && r->goes_first && q->n_filled) {
        q->n_filled = 0;
        st = choose(e, c);
    }
    if (st != OK && r->gave_back) {
        r->gave_back = 0;
        q->n_avoid = nodes_to_avoid(e, r, c->avoid);
        st = choose(e, c);
    }
    if (st == ERR_UNAVAILABLE && r->n_avoid) { /* better a node that failed once than none */
        r->n_avoid = 0;
        q->n_avoid = nodes_to_avoid(e, r, c->avoid);
        st = choose(e, c);
    }
    if (st != ERR_UNAVAILABLE) {
        r->unplaced_since_ms = 0;
        note_outage(e, false);
        return st;
    }
    note_unplaced(e, r);
    /* All are open when it was this node that was stopped or cut off. */
    if (q->n_avoid == 0 || clock_ms() - r->unplaced_since_ms < OPEN_TRIED_MS) return st;
    q->n_avoid = 0;
    return choose(e, c);
}

/* A request without output tokens has nothing to decode, so nothing to transfer; and one whose
 * attempts keep failing goes without a transfer too. */
static bool is_to_split(const struct request *r)
{
    return r->sampling.max_tokens > 0 && r->n_moves < REQUEST_SPLITS_MAX;
}

bool request_find_room(const struct entry *e, const struct request *r, struct place_result *out)
{
    uint64_t avoid[AVOID_MAX];
    struct place_pair apart[APART_MAX];
    struct place_request q = query_of(e, r, avoid, apart);
    avoid[q.n_avoid++] = r->decode.node;
    q.needs_all = true;
    return place_choose(e->view.nodes, e->view.n_nodes, &q, out) == OK;
}

/* By the rules for requests in line: nodes that have prompts enough are full, too. */
bool request_find_beside(const struct entry *e, const struct request *r, struct place_result *out)
{
    uint64_t avoid[AVOID_MAX], filled[FILLED_MAX];
    struct place_pair apart[APART_MAX];
    struct place_request q = query_of(e, r, avoid, apart);
    q.filled = filled;
    q.n_filled = fill_enough(&e->admission.fill, clock_ms(), filled, FILLED_MAX);
    if (place_choose(e->view.nodes, e->view.n_nodes, &q, out) != OK) return false;
    if (!is_to_split(r)) out->prefill = NULL;
    return true;
}

void request_reserve(struct entry *e, struct request *r, const struct place_result *chosen,
                     const struct prefix_query *prefix)
{
    r->next_prefill = node_of(chosen->prefill);
    r->next_decode = node_of(chosen->decode);
    const struct view_attempt attempt = { r->id, r->next_prefill.node, r->next_decode.node };
    view_note(&e->view, &attempt, BREAKER_TAKEN);
    struct placement placement = {
        .request = r->id,
        .prefill = r->next_prefill.node,
        .decode = r->next_decode.node,
        .tokens = r->n_tokens,
        .blocks = chosen->blocks,
        .ttl_ms = e->ttl_s * 1000,
    };
    r->accounted = placement;
    view_add_load(&e->view, &placement);
    admission_fill(e, r, chosen->prefill ? chosen->prefill : chosen->decode, r->n_tokens,
                   chosen->decode->step_us);
    r->placing = true;
    placement.prefix = prefix;
    if (directory_reserve(e->directory, &placement, on_reserved, r) != OK)
        on_reserved(r, ERR_UNAVAILABLE, NULL);
}

void request_note_computed(struct entry *e, struct request *r)
{
    if (r->placed) directory_computed(e->directory, r->id);
    view_remove_tokens(&e->view, &r->accounted);
    r->accounted.tokens = 0;
}

bool request_may_compute(const struct entry *e, const struct request *r)
{
    return request_n_out(r) >= r->resume.n_delivered ||
           view_again(&e->view, r->resume.model_bits) == VIEW_AGAIN_EQUAL;
}

static void say_other_model(const struct request *r, char text[ERR_TEXT_MAX])
{
    char model[32] = "no one model";
    const uint64_t bits = r->resume.model_bits;
    if (bits) snprintf(model, sizeof model, "the model m%016llx", (unsigned long long)bits);
    snprintf(text, ERR_TEXT_MAX,
             "no node has kept the rest of this answer, and Last-Event-ID names %s, while nodes "
             "have another model or KV type now and compute other tokens; send the request without "
             "Last-Event-ID for a new answer",
             model);
}

/* While no node is seen that could compute it, it waits for one like any other. */
bool request_ends_uncomputed(struct entry *e, struct request *r)
{
    char text[ERR_TEXT_MAX] =
        "no node has kept the rest of this answer, and GPUs without --deterministic do not compute "
        "the same tokens again; send the request without Last-Event-ID for a new answer";
    if (request_n_out(r) >= r->resume.n_delivered) return false;
    const enum view_again again = view_again(&e->view, r->resume.model_bits);
    if (again == VIEW_AGAIN_EQUAL || again == VIEW_AGAIN_UNSEEN) return false;
    if (again == VIEW_AGAIN_OTHER) say_other_model(r, text);
    counter_add(e->metrics.resumes_refused, 1);
    request_end(e, r, ERR_CONFLICT, FINISH_ERROR, -1, text);
    return true;
}

static void reserve_choice(struct entry *e, struct request *r, struct chosen_nodes *c)
{
    struct prefix_room room;
    if (!is_to_split(r)) c->nodes.prefill = NULL;
    place_uses(e->view.nodes, e->view.n_nodes, &c->query, &c->nodes, &room.uses);
    request_reserve(e, r, &c->nodes, prefix_request_ask(e, r, &c->nodes, &room));
}

enum status request_place(struct entry *e, struct request *r)
{
    struct chosen_nodes chosen;
    if (request_ends_uncomputed(e, r)) return ERR_CONFLICT;
    enum status st = choose_nodes(e, r, &chosen);
    r->waits_for_capacity = false;
    if (st == OK) {
        admission_take(e, r);
        reserve_choice(e, r, &chosen);
    } else {
        no_node(e, r, st);
    }
    return st;
}

static bool waits_for_room(const struct request *r)
{
    return r->state == REQUEST_PLACING && !r->placing && !r->canceled && r->waits_for_capacity &&
           !admission_is_waiting(r);
}

/* Two thirds of the time: where there is no other node nobody in line is late only for this. */
static bool is_to_save(const struct entry *e, const struct request *r)
{
    const uint64_t ms = e->max_queue_ms ? e->max_queue_ms : 1;
    return r->full_since_ms && (clock_ms() - r->full_since_ms) % ms < ms * 2 / 3;
}

void request_place_waiting(struct entry *e, bool freed)
{
    uint64_t avoid[AVOID_MAX];
    struct place_pair apart[APART_MAX];
    e->saved_node = 0;
    LIST_FOREACH (r, &e->live, struct request, link) {
        if (!waits_for_room(r)) continue;
        const struct place_request q = query_of(e, r, avoid, apart); /* before r may end */
        const bool saves = is_to_save(e, r);
        if (freed && request_place(e, r) != ERR_BUSY) continue;
        if (saves) e->saved_node = place_roomiest(e->view.nodes, e->view.n_nodes, &q);
        return;
    }
}
