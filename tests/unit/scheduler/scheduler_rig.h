/* scheduler_rig.h - an entry node with a real scheduler and real links; the test sends the answers
 * of the other nodes. Included by one test program each. Thread: the test's, which turns the
 * loop. */
#ifndef BATON_TESTS_UNIT_SCHEDULER_SCHEDULER_RIG_H
#define BATON_TESTS_UNIT_SCHEDULER_SCHEDULER_RIG_H

#include "scheduler/directory/local.h"
#include "scheduler/scheduler.h"
#include "shared/cluster/answer.h"
#include "shared/cluster/generation_wire.h"
#include "tests/unit/cluster/cluster_rig.h"

enum { NODES_MAX = 4, CLIENT_TOKENS_MAX = 64, ENTRY_ID = 100, PROMPT_LEN = 40, BLOCK_TOKENS = 16 };

struct world {
    struct cluster_rig rig;
    struct peer_node *entry;
    struct peer_node *nodes[NODES_MAX]; /* NULL: killed */
    enum node_role roles[NODES_MAX];
    size_t n_nodes;
    struct directory *directory;
    struct scheduler *s;
    struct serve_backend be;
    bool in_submit;
};

struct client {
    struct world *w;
    uint64_t id;
    uint32_t n_tokens, n_lp, n_ended;
    int32_t tokens[CLIENT_TOKENS_MAX];
    struct gen_end end;
    uint64_t node, model_bits; /* as told before the last token */
    bool cancel_on_token;
    struct gen_refusal why; /* of a submit that failed */
};

static bool entry_message(void *arg, const struct cluster_message *m)
{
    struct world *w = arg;
    return scheduler_on_message(w->s, m);
}

static void entry_lost(void *arg, uint64_t node, const char *why)
{
    struct world *w = arg;
    scheduler_on_lost(w->s, node, why);
}

/* What the nodes' records say from now on. */
static struct {
    uint32_t resume_ms;
    bool not_deterministic, prefix_cache;
    uint64_t model; /* 0: the usual one */
    const char *kv_type;
    uint32_t n_followers;
} world_nodes;

/* The entry node's options from the next world_open on; 0: the usual ones. */
static struct {
    const struct tenants *tenants;
    uint32_t max_requests, max_queue_ms;
    uint64_t text; /* that of a router */
} world_entry;

static struct node_record record_of(const struct world *w, size_t i)
{
    struct node_record r = {
        .node = w->nodes[i]->id,
        .role = w->roles[i],
        .cluster_port = cluster_port(w->nodes[i]->c),
        .model = world_nodes.model ? world_nodes.model : 7,
        .max_seqs = 64,
        .n_blocks = 1000,
        .block_tokens = BLOCK_TOKENS,
        .max_model_len = 4096,
        .prefix_cache = world_nodes.prefix_cache,
        .n_followers = world_nodes.n_followers,
        .resume_ms = world_nodes.resume_ms,
        .deterministic = !world_nodes.not_deterministic,
    };
    snprintf(r.name, sizeof r.name, "%s-%zu", node_role_name(w->roles[i]), i);
    snprintf(r.topic, sizeof r.topic, "default");
    if (world_nodes.kv_type) snprintf(r.kv_type, sizeof r.kv_type, "%s", world_nodes.kv_type);
    snprintf(r.host, sizeof r.host, "127.0.0.1");
    for (uint32_t k = 0; k < r.n_followers; k++) {
        r.followers[k] = (struct node_rank){ .process = 100 * (i + 1) + k, .port = 1 };
        snprintf(r.followers[k].host, sizeof r.followers[k].host, "127.0.0.1");
    }
    return r;
}

/* Adds a node to the directory and returns its index in w->nodes. */
static size_t world_add(struct world *w, enum node_role role)
{
    size_t i = w->n_nodes++;
    CHECK(i < NODES_MAX);
    w->nodes[i] = peer_open(&w->rig, 1 + i, (struct peer_options){ 0 });
    w->roles[i] = role;
    struct node_record r = record_of(w, i);
    directory_publish(w->directory, &r);
    return i;
}

/* `roles`: one letter per node, p, d or m. */
static void world_open(struct world *w, const char *roles, uint32_t grace_ms)
{
    struct err err = { 0 };
    *w = (struct world){ 0 };
    cluster_rig_open(&w->rig);
    struct directory_options o = {
        .loop = w->rig.loop, .topic = "default", .lease_ms = 600000, .metrics = w->rig.metrics
    };
    if (directory_open("local", &o, &w->directory, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s", err.text);
    for (; *roles; roles++)
        world_add(w, *roles == 'p' ? ROLE_PREFILL : *roles == 'd' ? ROLE_DECODE : ROLE_MIXED);
    w->entry = peer_open(&w->rig, ENTRY_ID, (struct peer_options){ 0 });
    struct scheduler_options so = {
        .loop = w->rig.loop,
        .cluster = w->entry->c,
        .directory = w->directory,
        .metrics = w->rig.metrics,
        .tenants = world_entry.tenants,
        .max_requests = world_entry.max_requests ? world_entry.max_requests : 300,
        .ttl_s = 60,
        .grace_ms = grace_ms,
        .max_queue_ms = world_entry.max_queue_ms ? world_entry.max_queue_ms : 60000,
        .text = world_entry.text,
    };
    w->s = scheduler_create(&so);
    w->be = scheduler_backend(w->s);
    w->entry->hook = entry_message;
    w->entry->lost_hook = entry_lost;
    w->entry->arg = w;
}

/* Checks that nothing is placed and nothing is live. */
static void world_check_idle(struct world *w)
{
    size_t n;
    char topics[512];
    CHECK_EQ_INT(scheduler_n_live(w->s), 0);
    rig_turn_ms(&w->rig, 20); /* answers for requests that ended while they were being placed */
    struct node_record *nodes = directory_local_view(w->directory, "default", &n, topics);
    for (size_t i = 0; i < n; i++) {
        CHECK_EQ_INT(nodes[i].placed_seqs, 0);
        CHECK_EQ_INT(nodes[i].placed_blocks, 0);
        CHECK_EQ_INT(nodes[i].placed_tokens, 0);
    }
    mem_free(nodes);
}

static void world_close(struct world *w)
{
    scheduler_stop(w->s);
    CHECK_EQ_INT(scheduler_n_live(w->s), 0);
    directory_close(w->directory);
    scheduler_free(w->s);
    peer_close(w->entry);
    for (size_t i = 0; i < w->n_nodes; i++)
        if (w->nodes[i]) peer_close(w->nodes[i]);
    cluster_rig_close(&w->rig);
}

__attribute__((unused)) static void world_kill(struct world *w, struct peer_node *n)
{
    for (size_t i = 0; i < w->n_nodes; i++) {
        if (w->nodes[i] != n) continue;
        w->nodes[i] = NULL;
        peer_close(n);
    }
}

/* ---- clients ---- */

static void client_token(void *arg, uint32_t index, const struct token_logprobs *t)
{
    struct client *c = arg;
    CHECK(!c->w->in_submit);
    CHECK_EQ_INT(c->n_ended, 0);
    CHECK_EQ_INT(index, c->n_tokens); /* each token once, in order */
    CHECK(c->n_tokens < CLIENT_TOKENS_MAX);
    c->tokens[c->n_tokens++] = t->id;
    if (c->cancel_on_token) c->w->be.cancel(c->w->be.self, c->id);
}

static void client_prompt_logprob(void *arg, uint32_t position, const struct token_logprobs *t)
{
    struct client *c = arg;
    CHECK_EQ_INT(c->n_ended, 0);
    CHECK_EQ_INT(c->n_tokens, 0); /* before the first token */
    CHECK_EQ_INT(position, ++c->n_lp);
    CHECK_EQ_INT(t->id, (int32_t)position + 10);
}

static void client_node(void *arg, uint64_t node, uint64_t model_bits)
{
    struct client *c = arg;
    CHECK_EQ_INT(c->n_ended, 0);
    c->node = node;
    c->model_bits = model_bits;
}

static void client_end(void *arg, const struct gen_end *end)
{
    struct client *c = arg;
    CHECK(!c->w->in_submit);
    CHECK_EQ_INT(++c->n_ended, 1);
    CHECK_EQ_INT(end->n_output, c->n_tokens);
    c->end = *end;
}

struct ask {
    uint32_t max_tokens;
    uint64_t deadline_ms;
    bool prompt_logprobs;
    struct gen_resume resume;
    struct gen_admission admission;
};

/* The prompt is 10, 11, 12 ... */
static enum status client_submit(struct world *w, struct client *c, struct ask a)
{
    int32_t tokens[PROMPT_LEN];
    for (int i = 0; i < PROMPT_LEN; i++) tokens[i] = 10 + i;
    *c = (struct client){ .w = w };
    struct gen_request g = { .name = "test",
                             .tokens = tokens,
                             .n_tokens = PROMPT_LEN,
                             .deadline_ms = a.deadline_ms,
                             .prompt_logprobs = a.prompt_logprobs,
                             .resume = a.resume,
                             .admission = a.admission,
                             .sampling = { .top_p = 1,
                                           .repetition_penalty = 1,
                                           .max_tokens = a.max_tokens,
                                           .n_logprobs = a.prompt_logprobs ? 0 : -1, }, };
    struct gen_sink sink = { client_token, client_prompt_logprob, client_end, client_node, c };
    w->in_submit = true;
    enum status st = w->be.submit(w->be.self, &g, &sink, &c->id, &c->why);
    w->in_submit = false;
    if (st != OK) CHECK(c->why.err.text[0] != 0);
    return st;
}

/* ---- the other nodes ---- */

/* One attempt at a request, as the nodes see it. */
struct attempt {
    uint64_t request;
    uint32_t number;
    struct peer_node *prefill, *decode;
    uint64_t kept_node;    /* of RUN: the node that is said to have KV of it; 0: none is */
    uint32_t n_kept_ranks; /* of that node */
};

/* Waits for the next message of `type` at any node. */
static struct received_message *world_expect(struct world *w, enum frame_type type,
                                             struct peer_node **who)
{
    struct received_message *h = NULL;
    for (uint64_t end = clock_ms() + RIG_LONG_MS; !h;) {
        for (size_t i = 0; i < w->n_nodes && !h; i++) {
            if (!w->nodes[i] || !(h = received_take(w->nodes[i], type))) continue;
            *who = w->nodes[i];
        }
        if (h) break;
        if (clock_ms() > end)
            test_fail(__FILE__, __LINE__, "no %s message came", frame_type_name(type));
        uv_run(loop_uv(w->rig.loop), UV_RUN_ONCE);
    }
    CHECK_EQ_INT(h->from, ENTRY_ID);
    return h;
}

static void reply(struct peer_node *n, const struct attempt *a, enum frame_type type,
                  const ProtobufCMessage *body)
{
    CHECK_OK(cluster_send_proto(n->c, ENTRY_ID, type, a->request, a->number, body));
}

static void reply_blame(struct peer_node *n, const struct attempt *a, enum status st,
                        uint32_t blame)
{
    Baton__Failed f = BATON__FAILED__INIT;
    f.status = st;
    f.text = "as the test wanted";
    f.blame = blame;
    reply(n, a, FRAME_FAILED, &f.base);
}

/* As a node of a release that blames nobody. */
__attribute__((unused)) static void reply_failed(struct peer_node *n, const struct attempt *a,
                                                 enum status st)
{
    reply_blame(n, a, st, BLAME_UNSAID);
}

/* How often a cell of the recovery table was taken. */
__attribute__((unused)) static uint64_t cells(const struct world *w, const char *state,
                                              const char *loss, const char *action)
{
    char labels[128];
    snprintf(labels, sizeof labels, "state=\"%s\",loss=\"%s\",action=\"%s\"", state, loss, action);
    return counter_value(metrics_counter(w->rig.metrics, "baton_request_losses_total", labels, ""));
}

/* How often a breaker of this scope came into this state. */
__attribute__((unused)) static uint64_t breakers(const struct world *w, const char *scope,
                                                 const char *to)
{
    char labels[128];
    snprintf(labels, sizeof labels, "scope=\"%s\",to=\"%s\"", scope, to);
    return counter_value(
        metrics_counter(w->rig.metrics, "baton_breaker_transitions_total", labels, ""));
}

/* Token number i has id 1000 + i on every node. */
static void reply_tokens(struct peer_node *n, const struct attempt *a, uint32_t begin, uint32_t end,
                         enum finish_reason ends)
{
    struct buf b = { 0 };
    for (uint32_t i = begin; i < end; i++) {
        struct token_logprobs t = {
            .id = 1000 + (int32_t)i,
            .ends = i + 1 == end ? ends : FINISH_NONE,
        };
        token_record_add(&b, a->request, a->number, i, &t);
    }
    CHECK_OK(cluster_send(n->c, ENTRY_ID, FRAME_TOKENS, 0, 0, buf_str(&b)));
    buf_release(&b);
}

static void reply_finished(struct peer_node *n, const struct attempt *a, uint32_t n_tokens)
{
    Baton__Finished f = BATON__FINISHED__INIT;
    f.finish = FINISH_LENGTH;
    f.stop_token = -1;
    f.n_tokens = n_tokens;
    f.kv_bytes = 4096;
    f.transport = "tcp";
    reply(n, a, FRAME_FINISHED, &f.base);
}

/* Checks that a RESERVE, RUN or PREFILL has the prompt and the `n_out` tokens already delivered. */
static void check_generation(const struct received_message *h, uint32_t n_out)
{
    struct arena arena;
    struct generation_wire g;
    struct err err = { 0 };
    const uint8_t *body = (const uint8_t *)h->body.data;
    Baton__Reserve *reserve = NULL;
    Baton__Prefill *prefill = NULL;
    Baton__Run *run = NULL;
    arena_init(&arena);
    if (h->type == FRAME_PREFILL) prefill = baton__prefill__unpack(NULL, h->body.len, body);
    else if (h->type == FRAME_RUN) run = baton__run__unpack(NULL, h->body.len, body);
    else reserve = baton__reserve__unpack(NULL, h->body.len, body);
    CHECK(reserve || prefill || run);
    CHECK_OK(generation_wire_decode(reserve   ? reserve->generation
                                    : prefill ? prefill->generation
                                              : run->generation,
                                    &arena, &g, &err));
    CHECK_EQ_INT(g.n_prompt, PROMPT_LEN);
    CHECK_EQ_INT(g.n_tokens, PROMPT_LEN + n_out);
    for (uint32_t i = 0; i < g.n_tokens; i++)
        CHECK_EQ_INT(g.tokens[i], i < PROMPT_LEN ? 10 + i : 1000 + i - PROMPT_LEN);
    if (reserve) baton__reserve__free_unpacked(reserve, NULL);
    if (prefill) baton__prefill__free_unpacked(prefill, NULL);
    if (run) baton__run__free_unpacked(run, NULL);
    arena_release(&arena);
}

/* The next attempt that one node is to do whole. */
__attribute__((unused)) static struct attempt expect_run(struct world *w)
{
    struct attempt a = { 0 };
    struct received_message *h = world_expect(w, FRAME_RUN, &a.decode);
    Baton__Run *m = baton__run__unpack(NULL, h->body.len, (const uint8_t *)h->body.data);
    CHECK(m != NULL);
    a.request = h->request;
    a.number = h->attempt;
    if (m->kept) a.n_kept_ranks = m->kept->n_ranks, a.kept_node = m->kept->node->node;
    baton__run__free_unpacked(m, NULL);
    return a;
}

/* Likewise, of this client, with the tokens that it has. */
__attribute__((unused)) static struct attempt play_run(struct world *w, struct client *c)
{
    struct attempt a = { 0 };
    struct received_message *h = world_expect(w, FRAME_RUN, &a.decode);
    a.request = h->request;
    a.number = h->attempt;
    check_generation(h, c->n_tokens);
    return a;
}

enum stage { AT_CREDIT, AT_RESERVE, AT_PREFILL, AT_DECODE };

/* Plays a new attempt of a split request up to `stage`. AT_DECODE: sends `n_new` tokens. */
__attribute__((unused)) static struct attempt play_split(struct world *w, struct client *c,
                                                         enum stage stage, uint32_t n_new)
{
    struct attempt a = { 0 };
    struct received_message *h = world_expect(w, FRAME_ASK_CREDIT, &a.prefill);
    a.request = h->request;
    a.number = h->attempt;
    if (stage == AT_CREDIT) return a;
    Baton__Credit credit = BATON__CREDIT__INIT;
    reply(a.prefill, &a, FRAME_CREDIT, &credit.base);
    h = world_expect(w, FRAME_RESERVE, &a.decode);
    CHECK(h->request == a.request && h->attempt == a.number);
    check_generation(h, c->n_tokens);
    if (stage == AT_RESERVE) return a;
    Baton__Grant grant = BATON__GRANT__INIT;
    Baton__KvPart part = BATON__KV_PART__INIT, *parts[] = { &part };
    part.kvt_grant = (ProtobufCBinaryData){ 5, (uint8_t *)"grant" };
    grant.n_parts = 1;
    grant.parts = parts;
    grant.n_cached = 16;
    reply(a.decode, &a, FRAME_GRANT, &grant.base);
    struct peer_node *again;
    h = world_expect(w, FRAME_PREFILL, &again);
    CHECK(again == a.prefill && h->request == a.request && h->attempt == a.number);
    check_generation(h, c->n_tokens);
    Baton__Prefill *p = baton__prefill__unpack(NULL, h->body.len, (const uint8_t *)h->body.data);
    CHECK_EQ_INT(p->n_parts, 1);
    CHECK_EQ_INT(p->parts[0]->kvt_grant.len, 5);
    CHECK_EQ_INT(p->decode[0]->node, a.decode->id);
    CHECK_EQ_INT(p->decode[0]->port, cluster_port(a.decode->c));
    baton__prefill__free_unpacked(p, NULL);
    if (stage == AT_PREFILL) return a;
    uint32_t begin = c->n_tokens;
    reply_tokens(a.decode, &a, begin, begin + n_new, FINISH_NONE);
    RIG_WAIT(&w->rig, c->n_tokens == begin + n_new);
    return a;
}

/* Plays an attempt from any stage to its end, with `total` tokens in all. */
__attribute__((unused)) static void play_rest(struct world *w, struct client *c,
                                              const struct attempt *a, uint32_t total)
{
    uint32_t begin = c->n_tokens;
    reply_tokens(a->decode, a, begin, total, FINISH_LENGTH);
    reply_finished(a->decode, a, total - begin);
    RIG_WAIT(&w->rig, c->n_ended == 1);
    CHECK_OK(c->end.status);
    CHECK_EQ_INT(c->end.finish, FINISH_LENGTH);
    CHECK_EQ_INT(c->n_tokens, total);
    for (uint32_t i = 0; i < total; i++) CHECK_EQ_INT(c->tokens[i], 1000 + i);
}

#endif
