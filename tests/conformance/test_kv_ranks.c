/* test_kv_ranks.c - nodes of different tensor-parallel sizes: the pools of every rank of the decode
 * node hold exactly the model's KV of its heads, whatever the sizes. A part that fails, a rank that
 * dies and a transfer that is cancelled end the whole transfer: no block is written to after it was
 * given back, and nothing stays. */
#include "tests/conformance/kv_ranks_rig.h"

#include "shared/base/rng.h"

enum { ENTRY_ID = 1000, PREFILL_NODE = 1, DECODE_NODE = 101, GENS_MAX = PLANS_MAX - 1 };

static struct kv_layout qwen3_moe(void) { return shape(2, 32, false); }

/* ---- the entry node, played by the test ---- */

struct gen {
    uint64_t request;
    uint32_t n_tokens;
    bool credit, granted, finished, failed, reported;
    enum status status;
    char text[256], transport[16];
    uint64_t kv_bytes, reported_bytes;
    uint32_t n_parts;
};

struct world {
    struct cluster_rig rig;
    struct tp_node *p, *d;
    struct peer_node *entry;
    struct gen gens[GENS_MAX];
    uint32_t n_gens;
};

static Baton__NodeAddress **addresses(const struct tp_node *n, struct arena *arena)
{
    Baton__NodeAddress **out = ARENA_ARRAY(arena, Baton__NodeAddress *, n->n);
    for (uint32_t r = 0; r < n->n; r++) {
        out[r] = ARENA_NEW(arena, Baton__NodeAddress);
        baton__node_address__init(out[r]);
        out[r]->host = "127.0.0.1";
        out[r]->port = 1;
        if (!n->procs[r]) continue; /* it died: nobody answers there */
        out[r]->node = n->procs[r]->id;
        out[r]->port = n->procs[r]->port;
    }
    return out;
}

static Baton__Generation *generation(const struct gen *g, struct arena *arena)
{
    int32_t *tokens = ARENA_ARRAY(arena, int32_t, g->n_tokens);
    for (uint32_t i = 0; i < g->n_tokens; i++) tokens[i] = (int32_t)i;
    struct generation_wire w = {
        .tokens = tokens,
        .n_tokens = g->n_tokens,
        .n_prompt = g->n_tokens,
        .sampling = { .top_p = 1, .repetition_penalty = 1, .max_tokens = 1 },
    };
    return generation_wire_encode(&w, arena);
}

static void entry_send(struct world *w, const struct gen *g, uint64_t node, enum frame_type type,
                       const ProtobufCMessage *m)
{
    enum status st = cluster_send_proto(w->entry->c, node, type, g->request, 1, m);
    CHECK(st == OK || st == ERR_PEER_LOST);
}

static void send_reserve(struct world *w, const struct gen *g)
{
    struct arena arena;
    Baton__Reserve m = BATON__RESERVE__INIT;
    arena_init(&arena);
    m.generation = generation(g, &arena);
    m.n_prefill = w->p->n;
    m.prefill = addresses(w->p, &arena);
    entry_send(w, g, DECODE_NODE, FRAME_RESERVE, &m.base);
    arena_release(&arena);
}

static void send_prefill(struct world *w, struct gen *g, const Baton__Grant *grant)
{
    struct arena arena;
    Baton__Prefill m = BATON__PREFILL__INIT;
    arena_init(&arena);
    m.generation = generation(g, &arena);
    m.n_decode = w->d->n;
    m.decode = addresses(w->d, &arena);
    m.n_parts = g->n_parts = (uint32_t)grant->n_parts;
    m.parts = grant->parts;
    w->p->plans[g->request].n = g->n_parts;
    for (uint32_t i = 0; i < g->n_parts; i++)
        w->p->plans[g->request].from[i] = grant->parts[i]->from;
    entry_send(w, g, PREFILL_NODE, FRAME_PREFILL, &m.base);
    arena_release(&arena);
}

static void on_finished(struct gen *g, struct str body)
{
    Baton__Finished *f = baton__finished__unpack(NULL, body.n, (const uint8_t *)body.p);
    CHECK(f && !g->finished && !g->failed);
    g->finished = true;
    g->kv_bytes = f->kv_bytes;
    snprintf(g->transport, sizeof g->transport, "%s", f->transport);
    baton__finished__free_unpacked(f, NULL);
}

static void on_failed(struct gen *g, struct str body)
{
    Baton__Failed *f = baton__failed__unpack(NULL, body.n, (const uint8_t *)body.p);
    CHECK(f && f->text[0]);
    if (!g->failed) { /* both nodes may say it */
        g->status = (enum status)f->status;
        snprintf(g->text, sizeof g->text, "%s", f->text);
    }
    g->failed = true;
    baton__failed__free_unpacked(f, NULL);
}

static bool entry_on_message(void *arg, const struct cluster_message *m)
{
    struct world *w = arg;
    if (m->request == 0 || m->request > w->n_gens) return true;
    struct gen *g = &w->gens[m->request - 1];
    const uint8_t *p = (const uint8_t *)m->body.p;
    if (m->type == FRAME_CREDIT) {
        g->credit = true;
        send_reserve(w, g);
    } else if (m->type == FRAME_GRANT) {
        Baton__Grant *grant = baton__grant__unpack(NULL, m->body.n, p);
        CHECK(grant && !g->granted);
        g->granted = true;
        send_prefill(w, g, grant);
        baton__grant__free_unpacked(grant, NULL);
    } else if (m->type == FRAME_PREFILL_REPORT) {
        Baton__PrefillReport *r = baton__prefill_report__unpack(NULL, m->body.n, p);
        g->reported = true;
        g->reported_bytes = r->kv_bytes;
        baton__prefill_report__free_unpacked(r, NULL);
    } else if (m->type == FRAME_FINISHED) {
        on_finished(g, m->body);
    } else if (m->type == FRAME_FAILED) {
        on_failed(g, m->body);
    }
    return true;
}

static struct gen *ask(struct world *w, uint32_t n_tokens)
{
    Baton__AskCredit m = BATON__ASK_CREDIT__INIT;
    CHECK(w->n_gens < GENS_MAX);
    struct gen *g = &w->gens[w->n_gens++];
    *g = (struct gen){ .request = w->n_gens, .n_tokens = n_tokens };
    m.n_tokens = n_tokens;
    entry_send(w, g, PREFILL_NODE, FRAME_ASK_CREDIT, &m.base);
    return g;
}

static void cancel(struct world *w, const struct gen *g, bool at_prefill, bool at_decode)
{
    Baton__Cancel m = BATON__CANCEL__INIT;
    if (at_prefill) entry_send(w, g, PREFILL_NODE, FRAME_CANCEL, &m.base);
    if (at_decode) entry_send(w, g, DECODE_NODE, FRAME_CANCEL, &m.base);
}

/* ---- worlds ---- */

struct setting {
    struct kv_layout model;
    const char *protocols;
    uint32_t p, d, cached;
    const char *prefill_faults[RANKS], *decode_faults[RANKS];
    uint32_t apart; /* rank of the decode node that is a process of its own */
};

static void world_open(struct world *w, const struct setting *s)
{
    *w = (struct world){ .n_gens = 0 };
    cluster_rig_open(&w->rig);
    struct tp_options p = { PREFILL_NODE, s->p, 0, s->model, s->protocols, { NULL }, 0 }, d = {
        DECODE_NODE, s->d, s->cached, s->model, s->protocols, { NULL }, s->apart
    };
    memcpy(p.faults, s->prefill_faults, sizeof p.faults);
    memcpy(d.faults, s->decode_faults, sizeof d.faults);
    w->d = tp_open(&w->rig, d); /* first: it may fork */
    w->p = tp_open(&w->rig, p);
    w->entry = peer_open(&w->rig, ENTRY_ID, (struct peer_options){ 0 });
    w->entry->hook = entry_on_message;
    w->entry->arg = w;
    peer_meet(w->entry, w->p->procs[0]->peer);
    peer_meet(w->entry, w->d->procs[0]->peer);
}

static bool is_idle(const struct world *w) { return tp_is_idle(w->p) && tp_is_idle(w->d); }

/* Everything has been given back; late writes would show a moment later. */
static void settle(struct world *w)
{
    RIG_WAIT_MS(&w->rig, is_idle(w), 8000);
    rig_turn_ms(&w->rig, 30);
    free_blocks_are_untouched(w->p);
    free_blocks_are_untouched(w->d);
}

static void world_close(struct world *w)
{
    settle(w);
    peer_close(w->entry);
    tp_close(w->p);
    tp_close(w->d);
    cluster_rig_close(&w->rig);
}

static uint64_t bytes_of(const struct tp_node *n, uint32_t n_tokens, uint32_t n_cached)
{
    uint64_t bytes = 0;
    for (uint32_t r = 0; r < n->n; r++)
        bytes += layout_total_bytes(&n->procs[r]->layout, n_tokens, n_cached / BLOCK_TOKENS);
    return bytes;
}

static void check_moved(struct world *w, struct gen *g, const char *transport)
{
    RIG_WAIT(&w->rig, g->failed || (g->finished && g->reported));
    if (g->failed) test_fail(__FILE__, __LINE__, "p %u d %u: %s", w->p->n, w->d->n, g->text);
    uint64_t want = bytes_of(w->d, g->n_tokens, w->d->cached < g->n_tokens ? w->d->cached : 0);
    CHECK_EQ_INT(g->kv_bytes, want);
    CHECK_EQ_INT(g->reported_bytes, want);
    CHECK_EQ_STR(g->transport, transport);
}

/* ---- what moves ---- */

static void every_pair(struct kv_layout model, const char *protocols)
{
    static const uint32_t sizes[] = { 1, 2, 4 }, lengths[] = { 1, 16, 100, 200, 33 };
    static struct world w;
    for (size_t p = 0; p < COUNT_OF(sizes); p++)
        for (size_t d = 0; d < COUNT_OF(sizes); d++) {
            struct gen *g[COUNT_OF(lengths)];
            struct setting s = { .model = model,
                                 .protocols = protocols,
                                 .p = sizes[p],
                                 .d = sizes[d],
                                 .cached = p == d ? 32 : 0 };
            world_open(&w, &s);
            for (size_t i = 0; i < COUNT_OF(lengths); i++) g[i] = ask(&w, lengths[i]);
            for (size_t i = 0; i < COUNT_OF(lengths); i++) check_moved(&w, g[i], protocols);
            CHECK_EQ_INT(w.d->engine.n_verified, COUNT_OF(lengths));
            world_close(&w);
        }
}

TEST(pairs_one_head_ipc) { every_pair(llama(), "ipc"); }
TEST(pairs_one_head_tcp) { every_pair(llama(), "tcp"); }
TEST(pairs_two_heads_ipc) { every_pair(qwen3_moe(), "ipc"); }
TEST(pairs_two_heads_tcp) { every_pair(qwen3_moe(), "tcp"); }
TEST(pairs_latent_ipc) { every_pair(deepseek_v3(), "ipc"); }
TEST(pairs_latent_tcp) { every_pair(deepseek_v3(), "tcp"); }

/* As many parts as there are pairs of ranks that share heads; a latent leaves by one rank. */
TEST(parts_are_as_planned)
{
    static struct world w;
    const struct {
        struct kv_layout model;
        uint32_t p, d, n_parts;
    } rows[] = {
        { shape(4, 16, false), 4, 1, 4 },
        { shape(4, 16, false), 1, 4, 4 },
        { shape(4, 16, false), 2, 4, 4 },
        { llama(), 4, 1, 1 },
        { llama(), 2, 4, 4 },
        { deepseek_v3(), 4, 2, 2 },
    };
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        struct setting s = {
            .model = rows[i].model, .protocols = "tcp", .p = rows[i].p, .d = rows[i].d
        };
        world_open(&w, &s);
        struct gen *g = ask(&w, 60);
        check_moved(&w, g, "tcp");
        CHECK_EQ_INT(g->n_parts, rows[i].n_parts);
        world_close(&w);
    }
}

/* ---- what fails ---- */

/* One part of several fails: the transfer does, and the next one over the same ranks succeeds. */
static void part_fails(const char *protocols, const char *plan, bool at_sender, uint32_t rank)
{
    static struct world w;
    struct setting s = { .model = shape(4, 32, false), .protocols = protocols, .p = 4, .d = 2 };
    if (at_sender) s.prefill_faults[rank] = plan;
    else s.decode_faults[rank] = plan;
    world_open(&w, &s);
    struct gen *g = ask(&w, 200);
    RIG_WAIT(&w.rig, g->failed);
    CHECK(status_class_of(g->status) == CLASS_PEER || g->status == ERR_CHECKSUM);
    CHECK(!g->finished);
    cancel(&w, g, true, true); /* as an entry node does */
    settle(&w);
    struct gen *again = ask(&w, 200);
    check_moved(&w, again, protocols);
    world_close(&w);
}

TEST(a_lost_connection_of_one_part_tcp) { part_fails("tcp", "at=put:2:disconnect", true, 1); }
TEST(a_lost_connection_of_one_part_ipc) { part_fails("ipc", "at=put:2:disconnect", true, 3); }
TEST(a_wrong_byte_in_one_part) { part_fails("tcp", "at=put:2:flip", true, 2); }
TEST(a_follower_that_receives_loses_a_connection)
{
    part_fails("tcp", "at=note:2:disconnect", false, 1);
}
TEST(a_leader_that_sends_loses_a_connection)
{
    part_fails("ipc", "at=finish:1:disconnect", true, 0);
}

/* Cancelled at random moments, by one side or both. Puts are late, so that some are still to come
 * when their transfer is given up. */
static void cancelled(const char *protocols, uint32_t p, uint32_t d)
{
    enum { ROUNDS = 16 };
    static struct world w;
    struct setting s = { .model = shape(4, 32, false), .protocols = protocols, .p = p, .d = d };
    for (uint32_t r = 0; r < p; r++) s.prefill_faults[r] = "seed=5,delay=0.3:15";
    world_open(&w, &s);
    for (uint64_t i = 0; i < ROUNDS; i++) {
        struct gen *g = ask(&w, 220), *other = ask(&w, 90);
        rig_turn_ms(&w.rig, (uint64_t)(rng_uniform(i, 3, p + d) * 40));
        cancel(&w, g, i % 3 != 1, i % 3 != 2);
        check_moved(&w, other, protocols);
        rig_turn_ms(&w.rig, 5);
        if (!g->finished) cancel(&w, g, true, true);
        settle(&w);
    }
    world_close(&w);
}

TEST(cancelled_4_to_2_tcp) { cancelled("tcp", 4, 2); }
TEST(cancelled_2_to_4_ipc) { cancelled("ipc", 2, 4); }
TEST(cancelled_1_to_4_tcp) { cancelled("tcp", 1, 4); }

/* A rank dies after some milliseconds of a transfer: its node takes nothing any more, the request is
 * told, the other node is free for others. */
static void rank_dies(bool of_prefill, const char *protocols)
{
    static struct world w;
    for (uint64_t i = 0; i < 6; i++) {
        struct setting s = { .model = shape(4, 32, false), .protocols = protocols, .p = 4, .d = 2 };
        world_open(&w, &s);
        struct gen *g = ask(&w, 240);
        RIG_WAIT(&w.rig, g->credit);
        rig_turn_ms(&w.rig, i * 4);
        proc_kill(of_prefill ? w.p->procs[3] : w.d->procs[1]);
        RIG_WAIT(&w.rig, g->failed || g->finished);
        if (g->failed) CHECK(status_class_of(g->status) == CLASS_PEER);
        cancel(&w, g, true, true);
        settle(&w);
        struct gen *late = ask(&w, 50);
        RIG_WAIT(&w.rig, late->failed);
        CHECK(strstr(late->text, "a rank of the") != NULL);
        CHECK(status_class_of(late->status) == CLASS_PEER);
        cancel(&w, late, true, true);
        world_close(&w);
    }
}

TEST(a_sending_follower_dies_tcp) { rank_dies(true, "tcp"); }
TEST(a_sending_follower_dies_ipc) { rank_dies(true, "ipc"); }
TEST(a_receiving_follower_dies_tcp) { rank_dies(false, "tcp"); }
TEST(a_receiving_follower_dies_ipc) { rank_dies(false, "ipc"); }

/* A leader dies: its followers give up all they have, and the other node does. */
static void leader_dies(bool of_prefill, const char *protocols)
{
    static struct world w;
    for (uint64_t i = 0; i < 6; i++) {
        struct setting s = { .model = shape(4, 32, false), .protocols = protocols, .p = 2, .d = 4 };
        world_open(&w, &s);
        struct gen *g = ask(&w, 240);
        RIG_WAIT(&w.rig, g->credit);
        rig_turn_ms(&w.rig, i * 4);
        struct tp_node *n = of_prefill ? w.p : w.d;
        proc_kill(n->procs[0]);
        cancel(&w, g, true, true);
        RIG_WAIT_MS(&w.rig, is_idle(&w), 8000);
        peer_close(w.entry);
        tp_close(w.p);
        tp_close(w.d);
        cluster_rig_close(&w.rig);
    }
}

TEST(a_sending_leader_dies) { leader_dies(true, "tcp"); }
TEST(a_receiving_leader_dies) { leader_dies(false, "ipc"); }

/* A rank that is a real process is killed or stopped in the middle of a transfer: its leader notices
 * within seconds, fails the request, and takes nothing new for this node. */
static void process_ends(int sig, const char *protocols)
{
    static struct world w;
    struct setting s = {
        .model = shape(4, 32, false), .protocols = protocols, .p = 4, .d = 2, .apart = 1
    };
    for (uint32_t r = 0; r < s.p; r++) s.prefill_faults[r] = "seed=5,delay=0.3:15";
    world_open(&w, &s);
    check_moved(&w, ask(&w, 150), protocols); /* its pool too holds what it must */
    struct gen *g = ask(&w, 240);
    RIG_WAIT(&w.rig, g->granted);
    rig_turn_ms(&w.rig, 8);
    CHECK(kill(w.d->procs[1]->child, sig) == 0);
    RIG_WAIT(&w.rig, g->failed);
    CHECK(status_class_of(g->status) == CLASS_PEER || g->status == ERR_TIMEOUT);
    cancel(&w, g, true, true);
    RIG_WAIT_MS(&w.rig, is_idle(&w), 8000);
    struct gen *late = ask(&w, 50);
    RIG_WAIT(&w.rig, late->failed);
    CHECK(strstr(late->text, "a rank of the decode node was lost") != NULL);
    cancel(&w, late, true, true);
    proc_kill(w.d->procs[1]);
    world_close(&w);
}

TEST(a_receiving_process_is_killed_ipc) { process_ends(SIGKILL, "ipc"); }
TEST(a_receiving_process_is_killed_tcp) { process_ends(SIGKILL, "tcp"); }
TEST(a_receiving_process_is_stopped_ipc) { process_ends(SIGSTOP, "ipc"); }
TEST(a_receiving_process_is_stopped_tcp) { process_ends(SIGSTOP, "tcp"); }

TEST_MAIN(CASE_T(pairs_one_head_ipc, 120), CASE_T(pairs_one_head_tcp, 120),
          CASE_T(pairs_two_heads_ipc, 120), CASE_T(pairs_two_heads_tcp, 120),
          CASE_T(pairs_latent_ipc, 120), CASE_T(pairs_latent_tcp, 120), CASE(parts_are_as_planned),
          CASE(a_lost_connection_of_one_part_tcp), CASE(a_lost_connection_of_one_part_ipc),
          CASE(a_wrong_byte_in_one_part), CASE(a_follower_that_receives_loses_a_connection),
          CASE(a_leader_that_sends_loses_a_connection), CASE_T(cancelled_4_to_2_tcp, 120),
          CASE_T(cancelled_2_to_4_ipc, 120), CASE_T(cancelled_1_to_4_tcp, 120),
          CASE_T(a_sending_follower_dies_tcp, 120), CASE_T(a_sending_follower_dies_ipc, 120),
          CASE_T(a_receiving_follower_dies_tcp, 120), CASE_T(a_receiving_follower_dies_ipc, 120),
          CASE_T(a_sending_leader_dies, 120), CASE_T(a_receiving_leader_dies, 120),
          CASE_T(a_receiving_process_is_killed_ipc, 120),
          CASE_T(a_receiving_process_is_killed_tcp, 120),
          CASE_T(a_receiving_process_is_stopped_ipc, 120),
          CASE_T(a_receiving_process_is_stopped_tcp, 120))
