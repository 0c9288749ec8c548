/* request_attach.c - see request_attach.h. */
#include "scheduler/request_attach.h"

#include <stdio.h>
#include <string.h>

#include "scheduler/request_messages.h"
#include "scheduler/trouble.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/cluster/generation_wire.h"

bool request_attach_is_wanted(const struct gen_resume *g)
{
    return g->wanted && (g->returns || g->asks_all);
}

/* Nobody is to blame: the next attempt avoids no node. */
static void give_up(struct entry *e, struct request *r, enum request_loss loss, const char *why)
{
    request_on_loss(e, r, loss, loss == LOSS_STUCK ? ERR_TIMEOUT : ERR_NOT_FOUND, 0, why);
}

/* ---- whom to ask ---- */

static void add_asked(struct request *r, uint64_t node)
{
    if (!r->asked) r->asked = MEM_ARRAY(uint64_t, ATTACH_ASKED_MAX);
    r->asked[r->n_asked++] = node;
}

/* A node that is not in the view, since it is shutting down, may still have a link; or it is there
 * and this entry node has just begun, so that it will be seen, or linked again. Returns whether it
 * is worth waiting for. */
static bool find_named(struct entry *e, struct request *r)
{
    const uint64_t node = r->resume.node;
    const struct node_record *n = view_find(&e->view, node);
    if (n && (!n->resume_ms || !view_shares_text(&e->view, n))) return false;
    if (n ? !view_why_unreachable(&e->view, node) : cluster_is_linked(e->cluster, node))
        add_asked(r, node);
    return true;
}

static void find_all(struct entry *e, struct request *r)
{
    const struct view *v = &e->view;
    for (size_t i = 0; i < v->n_nodes; i++) {
        if (!v->nodes[i].resume_ms || !trouble_can_decode(v, &v->nodes[i])) continue;
        if (r->n_asked == ATTACH_ASKED_MAX) {
            r->n_asked = 0;
            return;
        }
        add_asked(r, v->nodes[i].node);
    }
}

static bool ask(struct entry *e, struct request *r, uint64_t node)
{
    const struct node_record *n = view_find(&e->view, node);
    Baton__Attach m = BATON__ATTACH__INIT;
    m.resume_key = generation_wire_key_bytes(&r->resume.key);
    m.hears_preempted = true;
    m.want_from = r->sampling.n_logprobs < 0 ? UINT32_MAX : r->resume.n_delivered;
    if (n) cluster_learn(e->cluster, node, n->host, n->cluster_port);
    return cluster_send_proto(e->cluster, node, FRAME_ATTACH, r->id, r->attempt, &m.base) == OK;
}

static void ask_them(struct entry *e, struct request *r)
{
    r->attempt++;
    for (uint32_t i = 0; i < r->n_asked;) {
        if (ask(e, r, r->asked[i])) i++;
        else r->asked[i] = r->asked[--r->n_asked];
    }
}

/* Where the answer cannot be computed again, or that is not known, there is nothing else to do. */
static bool has_waited(const struct entry *e, const struct request *r)
{
    return clock_ms() >= r->wait_until_ms + (request_may_compute(e, r) ? 0 : ATTACH_ONLY_MS);
}

/* The logprobs of the prompt went to the entry node that is gone. */
static void begin(struct entry *e, struct request *r)
{
    const uint64_t now = clock_ms();
    bool may_come = false;
    if (!r->wait_until_ms) r->wait_until_ms = now + (r->resume.node ? ATTACH_MS : ATTACH_ASK_MS);
    if (!e->view.known && now < r->wait_until_ms) return;
    if (r->resume.node && !r->prompt_logprobs) may_come = find_named(e, r);
    else if (!r->prompt_logprobs) find_all(e, r);
    if (r->n_asked) ask_them(e, r);
    if (r->n_asked || (may_come && !has_waited(e, r))) return;
    give_up(e, r, LOSS_DECODE_NODE, "no node may have kept the answer");
}

void request_attach_advance(struct entry *e, struct request *r)
{
    if (!r->n_asked) begin(e, r);
    else if (has_waited(e, r))
        give_up(e, r, LOSS_STUCK, "the node that may have kept the answer does not say so");
}

/* ---- what they answer ---- */

static bool remove_asked(struct request *r, uint64_t node)
{
    for (uint32_t i = 0; i < r->n_asked; i++) {
        if (r->asked[i] != node) continue;
        r->asked[i] = r->asked[--r->n_asked];
        return true;
    }
    return false;
}

static void send_cancel(struct entry *e, const struct request *r, uint64_t node)
{
    Baton__Cancel m = BATON__CANCEL__INIT;
    if (cluster_knows(e->cluster, node) &&
        cluster_send_proto(e->cluster, node, FRAME_CANCEL, r->id, r->attempt, &m.base) != OK)
        log_debug("cancel not sent", "request=%016llx", (unsigned long long)r->id);
}

void request_attach_abandon(struct entry *e, struct request *r)
{
    for (uint32_t i = 0; i < r->n_asked && !e->leaves; i++) send_cancel(e, r, r->asked[i]);
    r->n_asked = 0;
}

void request_attach_on_lost(struct entry *e, struct request *r, uint64_t node)
{
    if (remove_asked(r, node) && !r->n_asked)
        give_up(e, r, LOSS_DECODE_NODE, "no node has kept the answer");
}

/* The tokens of earlier attempts, of which the node has the ids only. */
static void take_given(struct entry *e, struct request *r, const Baton__Attached *m)
{
    for (uint32_t i = 0; i < m->first; i++) {
        struct token_logprobs t = { 0 };
        memcpy(&t.id, m->given.data + i * sizeof t.id, sizeof t.id);
        request_deliver_token(e, r, i, &t);
    }
}

static bool is_good(const struct request *r, const Baton__Attached *m)
{
    if (!m || m->first > r->sampling.max_tokens) return false;
    if (m->given.len != m->first * sizeof(int32_t)) return false;
    for (uint32_t i = 0; i < m->first; i++) {
        int32_t id;
        memcpy(&id, m->given.data + i * sizeof id, sizeof id);
        if (id < 0) return false;
    }
    return true;
}

static void set_decode_node(struct entry *e, struct request *r, const struct cluster_message *m)
{
    const struct node_record *n = view_find(&e->view, m->from);
    const uint64_t bits = n ? view_model_bits(n) : r->resume.model_bits;
    r->decode = (struct request_node){ .node = m->from, .keeps = true, .model_bits = bits };
    r->decode.model = n ? n->model : 0; /* bind_model */
    snprintf(r->decode.name, sizeof r->decode.name, "%s", n ? n->name : m->from_name);
    snprintf(r->trace.decode_node, sizeof r->trace.decode_node, "%s", r->decode.name);
}

static void on_attached(struct entry *e, struct request *r, const struct cluster_message *m)
{
    if (!remove_asked(r, m->from)) return;
    Baton__Attached *body = baton__attached__unpack(NULL, m->body.n, (const uint8_t *)m->body.p);
    if (is_good(r, body)) {
        request_attach_abandon(e, r);
        r->attached = true;
        admission_adopt(e, r);
        counter_add(e->metrics.resumes_attached, 1);
        set_decode_node(e, r, m);
        r->trace.place_ns = clock_ns() - r->t_accept;
        r->n_before = body->first;
        r->wait_until_ms = REQUEST_NEVER_MS;
        request_set_state(r, REQUEST_DECODE);
        take_given(e, r, body);
    } else {
        log_warn("malformed answer", "peer=%s type=attached", m->from_name);
        send_cancel(e, r, m->from);
        if (!r->n_asked) give_up(e, r, LOSS_DECODE_NODE, "the kept answer is malformed");
    }
    if (body) baton__attached__free_unpacked(body, NULL);
}

void request_attach_on_message(struct entry *e, struct request *r, const struct cluster_message *m)
{
    if (m->type == FRAME_ATTACHED) on_attached(e, r, m);
    else if (m->type == FRAME_FAILED) request_attach_on_lost(e, r, m->from);
}
