/* test_kv_lend_ranks.c - a node fetches blocks of a prompt from a peer's memory, whatever the
 * numbers of ranks on both sides: every rank then holds exactly the model's KV of its heads. A part
 * that fails, a rank that dies and a fetch that is not needed any more end the whole fetch: the
 * engine is answered once, no block is written to after that, none is read after the lender gave it
 * back, and nothing stays. */
#include "tests/conformance/kv_ranks_rig.h"

#include "shared/base/rng.h"

enum { LENDER = 1, FETCHER = 101, KEPT = 12, PATIENCE_MS = 20000 };

static struct kv_layout gqa(void) { return shape(4, 32, false); }

/* ---- worlds ---- */

struct setting {
    struct kv_layout model;
    const char *protocols;
    uint32_t from, to; /* ranks */
    const char *from_faults[RANKS], *to_faults[RANKS];
    uint32_t apart;   /* a rank that is a process of its own: of the fetching node, ... */
    bool apart_lends; /* ... or of the lending one */
    uint64_t other_model;
};

struct world {
    struct cluster_rig rig;
    struct tp_node *has, *wants;
    struct fake_seq *kept;
    uint32_t n_ranks; /* that the lender is said to have */
};

static void world_open(struct world *w, const struct setting *s)
{
    *w = (struct world){ .n_ranks = s->from };
    cluster_rig_open(&w->rig);
    struct tp_options from = { LENDER, s->from, 0, s->model, s->protocols, { NULL }, 0 },
                      to = { FETCHER, s->to, 0, s->model, s->protocols, { NULL }, 0 };
    *(s->apart_lends ? &from.apart : &to.apart) = s->apart;
    from.model.model_fingerprint += s->other_model;
    memcpy(from.faults, s->from_faults, sizeof from.faults);
    memcpy(to.faults, s->to_faults, sizeof to.faults);
    if (s->apart_lends) w->has = tp_open(&w->rig, from); /* who forks is the first */
    w->wants = tp_open(&w->rig, to);
    if (!w->has) w->has = tp_open(&w->rig, from);
    cluster_learn(w->wants->procs[0]->peer->c, LENDER, "127.0.0.1", w->has->procs[0]->port);
    w->kept = rig_keep(w->has, 7, KEPT);
}

static bool is_idle(const struct world *w) { return tp_is_idle(w->has) && tp_is_idle(w->wants); }

/* Everything has been given back; late writes would show a moment later. */
static void settle(struct world *w)
{
    if (w->kept) rig_forget(w->has, w->kept);
    w->kept = NULL;
    RIG_WAIT_MS(&w->rig, is_idle(w), 8000);
    rig_turn_ms(&w->rig, 30);
    free_blocks_are_untouched(w->has);
    free_blocks_are_untouched(w->wants);
}

static void world_leave(struct world *w)
{
    tp_close(w->has);
    tp_close(w->wants);
    cluster_rig_close(&w->rig);
}

static void world_close(struct world *w)
{
    settle(w);
    world_leave(w);
}

static void fetch(struct world *w, uint32_t n, struct fetched *f)
{
    rig_fetch(w->wants, 7, n, LENDER, w->n_ranks, PATIENCE_MS, f);
}

/* Fetches n blocks, of which n_good come. */
static void fetch_all(struct world *w, uint32_t n, uint32_t n_good)
{
    struct fetched f;
    fetch(w, n, &f);
    RIG_WAIT(&w->rig, f.over);
    if (f.n_good != n_good)
        test_fail(__FILE__, __LINE__, "%u to %u ranks: %u blocks came, not %u", w->has->n,
                  w->wants->n, f.n_good, n_good);
}

static uint64_t count(const struct tp_node *n, const char *name)
{
    return counter_value(metrics_counter(n->metrics, name, "", ""));
}

/* ---- what comes ---- */

static void every_pair(struct kv_layout model, const char *protocols)
{
    static const uint32_t pairs[][2] = { { 1, 1 }, { 1, 2 }, { 2, 1 }, { 2, 2 },
                                         { 2, 4 }, { 4, 1 }, { 4, 4 } },
                          lengths[] = { 1, KEPT, 5, 2 };
    static struct world w;
    for (size_t i = 0; i < COUNT_OF(pairs); i++) {
        struct fetched f[COUNT_OF(lengths)];
        uint32_t n_blocks = 0;
        uint64_t bytes = 0;
        world_open(&w, &(struct setting){ .model = model,
                                          .protocols = protocols,
                                          .from = pairs[i][0],
                                          .to = pairs[i][1] });
        for (size_t k = 0; k < COUNT_OF(lengths); k++) fetch(&w, lengths[k], &f[k]);
        for (size_t k = 0; k < COUNT_OF(lengths); k++) {
            RIG_WAIT(&w.rig, f[k].over);
            CHECK_EQ_INT(f[k].n_good, lengths[k]);
            n_blocks += lengths[k];
            for (uint32_t r = 0; r < w.wants->n; r++)
                bytes += layout_total_bytes(&w.wants->procs[r]->layout, lengths[k] * BLOCK_TOKENS,
                                            0);
        }
        settle(&w);
        CHECK_EQ_INT(count(w.wants, "baton_kv_fetched_blocks_total"), n_blocks);
        CHECK_EQ_INT(count(w.wants, "baton_kv_fetched_bytes_total"), bytes);
        CHECK_EQ_INT(count(w.has, "baton_kv_lent_blocks_total"), n_blocks);
        CHECK_EQ_INT(count(w.wants, "baton_kv_fetch_failed_total"), 0);
        CHECK_EQ_INT(count(w.has, "baton_kv_lend_refused_total"), 0);
        world_close(&w);
    }
}

TEST(one_head_ipc) { every_pair(llama(), "ipc"); }
TEST(one_head_tcp) { every_pair(llama(), "tcp"); }
TEST(four_heads_ipc) { every_pair(gqa(), "ipc"); }
TEST(four_heads_tcp) { every_pair(gqa(), "tcp"); }
TEST(latent_ipc) { every_pair(deepseek_v3(), "ipc"); }
TEST(latent_tcp) { every_pair(deepseek_v3(), "tcp"); }

/* The lender has less than was said: that much is asked for, once more, or nothing. */
TEST(fewer_blocks_than_named)
{
    static struct world w;
    for (uint32_t to = 1; to <= 4; to *= 2) {
        world_open(&w,
                   &(struct setting){ .model = gqa(), .protocols = "tcp", .from = 2, .to = to });
        fetch_all(&w, KEPT + 3, KEPT);
        struct fetched f;
        rig_fetch(w.wants, 8, 4, LENDER, 2, PATIENCE_MS, &f); /* it has none of these */
        RIG_WAIT(&w.rig, f.over);
        CHECK_EQ_INT(f.n_good, 0);
        CHECK_EQ_INT(count(w.wants, "baton_kv_fetch_failed_total"), 1);
        CHECK_EQ_INT(count(w.has, "baton_kv_lend_refused_total"), 2);
        world_close(&w);
    }
}

/* One rank sends for longer than the others, and the lender has no other use for the blocks: they
 * stay until it has sent them. */
static void held_until_sent(const char *protocols, uint32_t from, uint32_t slow)
{
    static struct world w;
    struct setting s = { .model = gqa(), .protocols = protocols, .from = from, .to = 2 };
    struct fetched f;
    s.from_faults[slow] = "seed=5,delay=1:40";
    world_open(&w, &s);
    fetch(&w, KEPT, &f);
    RIG_WAIT(&w.rig, w.kept->n_holds > 0);
    rig_forget(w.has, w.kept);
    w.kept = NULL;
    CHECK(w.has->engine.n_free == N_BLOCKS - KEPT);
    RIG_WAIT(&w.rig, f.over);
    CHECK_EQ_INT(f.n_good, KEPT);
    world_close(&w);
}

TEST(held_until_a_follower_has_sent_tcp) { held_until_sent("tcp", 2, 1); }
TEST(held_until_a_follower_has_sent_ipc) { held_until_sent("ipc", 4, 3); }
TEST(held_until_the_leader_has_sent) { held_until_sent("tcp", 4, 0); }

/* ---- refusals ---- */

TEST(another_model_is_refused)
{
    static struct world w;
    world_open(&w, &(struct setting){
                       .model = gqa(), .protocols = "tcp", .from = 2, .to = 2, .other_model = 1 });
    fetch_all(&w, 4, 0);
    CHECK_EQ_INT(count(w.has, "baton_kv_lend_refused_total"), 1);
    world_close(&w);
}

/* An entry node of a release before says nothing of ranks, so they are taken for one. */
TEST(another_number_of_ranks_is_refused)
{
    static struct world w;
    for (uint32_t from = 1; from <= 2; from++)
        for (uint32_t to = 1; to <= 2; to++) {
            world_open(&w, &(struct setting){
                               .model = gqa(), .protocols = "tcp", .from = from, .to = to });
            w.n_ranks = 3 - from;
            fetch_all(&w, 4, 0);
            w.n_ranks = UINT32_MAX; /* no node has so many: it is not even asked */
            fetch_all(&w, 4, 0);
            w.n_ranks = from;
            fetch_all(&w, 4, 4);
            CHECK_EQ_INT(count(w.has, "baton_kv_lend_refused_total"), 1);
            world_close(&w);
        }
}

/* ---- a stranger, played by the test ---- */

struct stranger {
    uint64_t request;
    bool refused;
    char text[256];
};

static bool stranger_on_message(void *arg, const struct cluster_message *m)
{
    struct stranger *s = arg;
    if (m->type != FRAME_FETCH_REFUSED || m->request != s->request) return true;
    Baton__FetchRefused *r = baton__fetch_refused__unpack(NULL, m->body.n,
                                                          (const uint8_t *)m->body.p);
    CHECK(r && !s->refused);
    s->refused = true;
    snprintf(s->text, sizeof s->text, "%s", r->text);
    baton__fetch_refused__free_unpacked(r, NULL);
    return true;
}

static void is_refused(struct world *w, struct peer_node *by, struct stranger *s, Baton__Fetch *m,
                       const char *why)
{
    struct hash128 keys[2] = { fake_key(7, 0), fake_key(7, 1) };
    m->keys.data = (uint8_t *)keys;
    m->keys.len = sizeof keys;
    m->layout = kv_layout_hash_of_model(&w->has->procs[0]->layout);
    *s = (struct stranger){ .request = s->request + 1 };
    CHECK_OK(cluster_send_proto(by->c, LENDER, FRAME_FETCH, s->request, 0, &m->base));
    RIG_WAIT(&w->rig, s->refused);
    if (!strstr(s->text, why))
        test_fail(__FILE__, __LINE__, "it says \"%s\", not \"%s\"", s->text, why);
}

/* What a peer of a release before sends, and what none should: an answer, and no block is held. */
TEST(malformed_requests_are_refused)
{
    static struct world w;
    char bytes[] = "no grant at all";
    const ProtobufCBinaryData grant = { sizeof bytes, (uint8_t *)bytes };
    Baton__NodeAddress me = BATON__NODE_ADDRESS__INIT, *to[] = { &me };
    for (uint32_t from = 1; from <= 2; from++) {
        Baton__KvPart part = BATON__KV_PART__INIT, *parts[] = { &part };
        struct stranger s = { 0 };
        world_open(&w,
                   &(struct setting){ .model = gqa(), .protocols = "tcp", .from = from, .to = 1 });
        struct peer_node *by = peer_open(&w.rig, 50, (struct peer_options){ 0 });
        by->hook = stranger_on_message;
        by->arg = &s;
        cluster_learn(by->c, LENDER, "127.0.0.1", w.has->procs[0]->port);
        Baton__Fetch m = BATON__FETCH__INIT;
        m.kvt_grant = grant; /* one rank to one: the old form */
        is_refused(&w, by, &s, &m, from == 1 ? "no KV connection" : "another number of ranks");
        baton__fetch__init(&m);
        m.to = to, m.parts = parts, m.n_to = m.n_parts = 1, m.n_from = from;
        me.node = 50, me.host = "127.0.0.1", me.port = cluster_port(by->c);
        is_refused(&w, by, &s, &m, "a KV part goes from rank 0 to rank 0");
        part.kvt_grant = grant;
        part.from = from;
        is_refused(&w, by, &s, &m, "a KV part goes from rank");
        part.from = 0, part.to = 1;
        is_refused(&w, by, &s, &m, "a KV part goes from rank 0 to rank 1");
        part.to = 0, me.node = 51;
        is_refused(&w, by, &s, &m, "the first rank is not the peer that asks");
        me.node = 50, me.port = 0;
        is_refused(&w, by, &s, &m, "port");
        m.n_to = 0;
        is_refused(&w, by, &s, &m, "goes to 0 ranks");
        fetch_all(&w, KEPT, KEPT);
        settle(&w);
        peer_close(by);
        world_leave(&w);
    }
}

/* ---- what fails ---- */

/* One part of several fails: the fetch brings nothing, and the next one over the same ranks all. */
static void part_fails(const char *protocols, uint32_t from, uint32_t to, const char *plan,
                       bool at_sender, uint32_t rank)
{
    static struct world w;
    struct setting s = { .model = gqa(), .protocols = protocols, .from = from, .to = to };
    if (at_sender) s.from_faults[rank] = plan;
    else s.to_faults[rank] = plan;
    world_open(&w, &s);
    fetch_all(&w, KEPT, 0);
    CHECK_EQ_INT(count(w.wants, "baton_kv_fetch_failed_total"), 1);
    RIG_WAIT(&w.rig, !prefill_n_live(w.has->procs[0]->prefill));
    CHECK_EQ_INT(count(w.has, "baton_kv_lent_blocks_total"), 0);
    fetch_all(&w, KEPT, KEPT);
    world_close(&w);
}

TEST(a_lost_connection_of_a_follower_tcp)
{
    part_fails("tcp", 4, 2, "at=put:2:disconnect", true, 3);
}
TEST(a_lost_connection_of_a_follower_ipc)
{
    part_fails("ipc", 2, 4, "at=put:2:disconnect", true, 1);
}
TEST(a_wrong_byte_of_a_follower) { part_fails("tcp", 2, 1, "at=put:2:flip", true, 1); }
TEST(a_follower_that_receives_loses_a_connection)
{
    part_fails("tcp", 1, 2, "at=note:2:disconnect", false, 1);
}
TEST(a_leader_that_lends_loses_a_connection)
{
    part_fails("ipc", 2, 2, "at=finish:1:disconnect", true, 0);
}

/* Not needed any more at random moments, beside one that is. Puts are late, so that some are still
 * to come then. */
static void called_off(const char *protocols, uint32_t from, uint32_t to)
{
    enum { ROUNDS = 20 };
    static struct world w;
    uint32_t n_came = 0;
    struct setting s = { .model = gqa(), .protocols = protocols, .from = from, .to = to };
    for (uint32_t r = 0; r < from; r++) s.from_faults[r] = "seed=5,delay=0.3:15";
    world_open(&w, &s);
    for (uint64_t i = 0; i < ROUNDS; i++) {
        struct fetched f, other;
        fetch(&w, KEPT, &f);
        fetch(&w, 3, &other);
        if (i > 0) rig_turn_ms(&w.rig, (uint64_t)(rng_uniform(i, 3, from + to) * 40));
        rig_fetch_off(w.wants, &f);
        RIG_WAIT(&w.rig, f.over && other.over);
        CHECK_EQ_INT(other.n_good, 3);
        CHECK(f.n_good == 0 || f.n_good == KEPT);
        n_came += f.n_good == KEPT;
        RIG_WAIT(&w.rig, !prefill_n_live(w.has->procs[0]->prefill));
        rig_turn_ms(&w.rig, 5);
        free_blocks_are_untouched(w.wants);
    }
    CHECK(n_came < ROUNDS);
    world_close(&w);
}

TEST(called_off_4_to_1_tcp) { called_off("tcp", 4, 1); }
TEST(called_off_2_to_4_ipc) { called_off("ipc", 2, 4); }
TEST(called_off_1_to_2_tcp) { called_off("tcp", 1, 2); }

/* ---- who dies ---- */

enum victim { LENDING_LEADER, LENDING_FOLLOWER, FETCHING_LEADER, FETCHING_FOLLOWER };

/* The fetch is answered if its leader lives, with none of the blocks if the loss came first; what
 * is left of both nodes has nothing of it. */
static void check_end(struct world *w, enum victim v, struct fetched *f)
{
    if (v != FETCHING_LEADER) {
        RIG_WAIT(&w->rig, f->over);
        CHECK(f->n_good == 0 || f->n_good == KEPT);
    }
    if (v == LENDING_LEADER) w->kept = NULL; /* its engine is gone */
    settle(w);
    if (v == FETCHING_LEADER || v == LENDING_LEADER) return;
    struct fetched late; /* a node that has lost a rank neither fetches nor lends */
    if (v == LENDING_FOLLOWER) w->kept = rig_keep(w->has, 7, KEPT);
    fetch(w, 2, &late);
    RIG_WAIT(&w->rig, late.over);
    CHECK_EQ_INT(late.n_good, 0);
    settle(w);
}

static struct proc *victim_of(const struct world *w, enum victim v)
{
    const struct tp_node *n = v <= LENDING_FOLLOWER ? w->has : w->wants;
    return n->procs[v == LENDING_LEADER || v == FETCHING_LEADER ? 0 : n->n - 1];
}

/* After some milliseconds, in turns, and before anything was sent: so in every state. */
static void dies(enum victim v, const char *protocols, uint32_t from, uint32_t to)
{
    static struct world w;
    for (uint64_t i = 0; i < 10; i++) {
        struct setting s = { .model = gqa(), .protocols = protocols, .from = from, .to = to };
        struct fetched f;
        for (uint32_t r = 0; r < from; r++) s.from_faults[r] = "seed=5,delay=0.3:15";
        world_open(&w, &s);
        if (i % 2) fetch_all(&w, 1, 1); /* the connections are up */
        fetch(&w, KEPT, &f);
        if (i > 0) rig_turn_ms(&w.rig, i * 3);
        proc_kill(victim_of(&w, v));
        check_end(&w, v, &f);
        world_leave(&w);
    }
}

TEST(a_lending_leader_dies) { dies(LENDING_LEADER, "tcp", 2, 4); }
TEST(a_lending_follower_dies_tcp) { dies(LENDING_FOLLOWER, "tcp", 4, 1); }
TEST(a_lending_follower_dies_ipc) { dies(LENDING_FOLLOWER, "ipc", 2, 2); }
TEST(a_fetching_leader_dies) { dies(FETCHING_LEADER, "ipc", 2, 2); }
TEST(a_fetching_follower_dies_tcp) { dies(FETCHING_FOLLOWER, "tcp", 1, 2); }
TEST(a_fetching_follower_dies_ipc) { dies(FETCHING_FOLLOWER, "ipc", 2, 4); }

/* A rank that is a real process is killed or stopped while it receives. */
static void process_ends(int sig, const char *protocols, bool before)
{
    static struct world w;
    struct setting s = { .model = gqa(), .protocols = protocols, .from = 2, .to = 2, .apart = 1 };
    struct fetched f;
    for (uint32_t r = 0; r < s.from; r++) s.from_faults[r] = "seed=5,delay=0.3:15";
    world_open(&w, &s);
    fetch_all(&w, 5, 5); /* its pool, too, holds what it must */
    if (before) CHECK(kill(w.wants->procs[1]->child, sig) == 0); /* it grants nothing any more */
    fetch(&w, KEPT, &f);
    rig_turn_ms(&w.rig, 8);
    if (!before) CHECK(kill(w.wants->procs[1]->child, sig) == 0);
    else rig_fetch_off(w.wants, &f);
    RIG_WAIT_MS(&w.rig, f.over, 8000);
    CHECK(f.n_good == 0 || (!before && f.n_good == KEPT));
    rig_forget(w.has, w.kept);
    w.kept = NULL;
    RIG_WAIT_MS(&w.rig, is_idle(&w), 8000);
    proc_kill(w.wants->procs[1]);
    world_close(&w);
}

/* Likewise while it sends. Who is stopped in shared memory may write to it when it goes on: then the
 * blocks stay as they are until it has ended. */
static void lending_process_ends(int sig, const char *protocols)
{
    static struct world w;
    const bool may_write = sig == SIGSTOP && strcmp(protocols, "ipc") == 0;
    struct setting s = {
        .model = gqa(), .protocols = protocols, .from = 2, .to = 2, .apart = 1, .apart_lends = true
    };
    struct fetched f;
    s.from_faults[1] = "seed=5,delay=1:60";
    world_open(&w, &s);
    fetch_all(&w, 5, 5);
    fetch(&w, KEPT, &f);
    rig_turn_ms(&w.rig, 150); /* it has begun to write */
    CHECK(!f.over);
    CHECK(kill(w.has->procs[1]->child, sig) == 0);
    if (may_write) {
        RIG_WAIT_MS(&w.rig, f.hangs, 8000); /* its sequence goes on */
        CHECK(!f.over && prefill_n_live(w.has->procs[0]->prefill) == 0);
        CHECK(kill(w.has->procs[1]->child, SIGKILL) == 0);
    }
    RIG_WAIT_MS(&w.rig, f.over, 8000);
    CHECK(f.n_good == 0 && f.hangs == may_write);
    proc_kill(w.has->procs[1]);
    world_close(&w);
}

TEST(a_lending_process_is_killed_ipc) { lending_process_ends(SIGKILL, "ipc"); }
TEST(a_lending_process_is_killed_tcp) { lending_process_ends(SIGKILL, "tcp"); }
TEST(a_lending_process_is_stopped_ipc) { lending_process_ends(SIGSTOP, "ipc"); }
TEST(a_lending_process_is_stopped_tcp) { lending_process_ends(SIGSTOP, "tcp"); }

TEST(a_fetching_process_is_killed_ipc) { process_ends(SIGKILL, "ipc", false); }
TEST(a_fetching_process_is_killed_tcp) { process_ends(SIGKILL, "tcp", false); }
TEST(a_fetching_process_is_stopped_ipc) { process_ends(SIGSTOP, "ipc", false); }
TEST(a_fetching_process_is_stopped_tcp) { process_ends(SIGSTOP, "tcp", false); }
TEST(a_stopped_process_grants_nothing) { process_ends(SIGSTOP, "tcp", true); }

/* ---- who is late ---- */

static bool swallow(void *arg, const struct cluster_message *m)
{
    (void)arg;
    return m->type == FRAME_FETCH;
}

/* A peer that takes the request and never answers: given up in time, on all ranks. */
TEST(a_silent_peer_is_given_up)
{
    static struct world w;
    struct fetched f;
    world_open(&w, &(struct setting){ .model = gqa(), .protocols = "tcp", .from = 1, .to = 4 });
    struct peer_node *silent = peer_open(&w.rig, 60, (struct peer_options){ 0 });
    silent->hook = swallow;
    cluster_learn(w.wants->procs[0]->peer->c, 60, "127.0.0.1", cluster_port(silent->c));
    rig_fetch(w.wants, 7, KEPT, 60, 2, 300, &f);
    const uint64_t begin = clock_ms();
    RIG_WAIT(&w.rig, f.over);
    CHECK(f.n_good == 0 && clock_ms() - begin >= 300);
    settle(&w);
    peer_close(silent);
    world_leave(&w);
}

TEST_MAIN(
    CASE_T(one_head_ipc, 120), CASE_T(one_head_tcp, 120), CASE_T(four_heads_ipc, 120),
    CASE_T(four_heads_tcp, 120), CASE_T(latent_ipc, 120), CASE_T(latent_tcp, 120),
    CASE(held_until_a_follower_has_sent_tcp), CASE(held_until_a_follower_has_sent_ipc),
    CASE(held_until_the_leader_has_sent), CASE(fewer_blocks_than_named),
    CASE(another_model_is_refused), CASE(another_number_of_ranks_is_refused),
    CASE(malformed_requests_are_refused), CASE(a_lost_connection_of_a_follower_tcp),
    CASE(a_lost_connection_of_a_follower_ipc), CASE(a_wrong_byte_of_a_follower),
    CASE(a_follower_that_receives_loses_a_connection), CASE(a_leader_that_lends_loses_a_connection),
    CASE_T(called_off_4_to_1_tcp, 120), CASE_T(called_off_2_to_4_ipc, 120),
    CASE_T(called_off_1_to_2_tcp, 120), CASE_T(a_lending_leader_dies, 120),
    CASE_T(a_lending_follower_dies_tcp, 120), CASE_T(a_lending_follower_dies_ipc, 120),
    CASE_T(a_fetching_leader_dies, 120), CASE_T(a_fetching_follower_dies_tcp, 120),
    CASE_T(a_fetching_follower_dies_ipc, 120), CASE_T(a_fetching_process_is_killed_ipc, 120),
    CASE_T(a_fetching_process_is_killed_tcp, 120), CASE_T(a_fetching_process_is_stopped_ipc, 120),
    CASE_T(a_fetching_process_is_stopped_tcp, 120), CASE_T(a_stopped_process_grants_nothing, 120),
    CASE_T(a_lending_process_is_killed_ipc, 120), CASE_T(a_lending_process_is_killed_tcp, 120),
    CASE_T(a_lending_process_is_stopped_ipc, 120), CASE_T(a_lending_process_is_stopped_tcp, 120),
    CASE(a_silent_peer_is_given_up))
