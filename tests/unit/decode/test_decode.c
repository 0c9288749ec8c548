/* test_decode.c - the decode worker with a real engine and real transfers: answers of two nodes
 * equal those of one; whatever is cancelled, lost or refused returns every block. */
#include "shared/cluster/answer.h"
#include "tests/unit/decode/worker_rig.h"

struct pair {
    struct cluster_rig rig;
    struct worker_node *p, *d;
    struct entry e;
};

static void pair_open(struct pair *t, struct worker_options prefill, struct worker_options decode)
{
    cluster_rig_open(&t->rig);
    t->p = worker_open(&t->rig, 1, prefill);
    t->d = worker_open(&t->rig, 2, decode);
    entry_open(&t->e, &t->rig);
}

static void pair_close(struct pair *t)
{
    RIG_WAIT(&t->rig, worker_is_idle(t->p) && worker_is_idle(t->d));
    entry_close(&t->e);
    worker_close(t->p);
    worker_close(t->d);
    cluster_rig_close(&t->rig);
}

static void check_split_equals_run(const char *protocols)
{
    static const uint32_t lengths[] = { 1, 15, 16, 17, 40, 100, 300, 101, 16, 300 };
    struct pair t;
    struct gen *split[COUNT_OF(lengths)], *run[COUNT_OF(lengths)];
    uint64_t id = 1;
    pair_open(&t, (struct worker_options){ .protocols = protocols },
              (struct worker_options){ .protocols = protocols });
    for (size_t i = 0; i < COUNT_OF(lengths); i++) {
        /* The last two again: prefix hits on both nodes. */
        split[i] = entry_add(&t.e, id++, lengths[i], 1000 + i % 8, 20);
        if (i == 5) split[i]->prompt_logprobs = true;
        entry_split(&t.e, split[i], t.p, t.d);
    }
    for (size_t i = 0; i < COUNT_OF(lengths); i++) {
        RIG_WAIT(&t.rig, (split[i]->finished && split[i]->reported) || split[i]->failed);
        if (split[i]->failed) test_fail(__FILE__, __LINE__, "%s", split[i]->text);
        CHECK_EQ_INT(split[i]->n_out, 20);
        CHECK_EQ_INT(split[i]->n_tokens, 20);
        CHECK_EQ_INT(split[i]->n_recomputed, 0);
        CHECK(split[i]->out[19].ends == FINISH_LENGTH);
        CHECK_EQ_STR(split[i]->transport, protocols);
        CHECK(split[i]->kv_bytes > 0 || split[i]->n_cached >= lengths[i]);
    }
    CHECK_EQ_INT(split[5]->n_lp, lengths[5] - 1);
    for (size_t i = 0; i < COUNT_OF(lengths); i++) {
        run[i] = entry_add(&t.e, id++, lengths[i], 1000 + i % 8, 20);
        entry_generate(&t.e, run[i], i % 2 ? t.p : t.d, FRAME_RUN);
    }
    for (size_t i = 0; i < COUNT_OF(lengths); i++) {
        RIG_WAIT(&t.rig, run[i]->finished);
        check_same_answer(split[i], run[i]);
    }
    pair_close(&t);
}

TEST(decode_split_equals_run_over_mem) { check_split_equals_run("mem"); }
TEST(decode_split_equals_run_over_tcp) { check_split_equals_run("tcp"); }

/* A request whose first tokens were delivered by an earlier attempt. */
TEST(decode_goes_on_from_given_tokens)
{
    struct pair t;
    pair_open(&t, (struct worker_options){ 0 }, (struct worker_options){ 0 });
    struct gen *whole = entry_add(&t.e, 1, 50, 7, 20), *rest = entry_add(&t.e, 2, 50, 7, 20);
    entry_generate(&t.e, whole, t.d, FRAME_RUN);
    RIG_WAIT(&t.rig, whole->finished);
    for (int i = 0; i < 8; i++) rest->prompt[rest->n_prompt++] = whole->out[i].id;
    rest->n_given = 8;
    entry_split(&t.e, rest, t.p, t.d);
    RIG_WAIT(&t.rig, rest->finished);
    CHECK_EQ_INT(rest->n_out, 12);
    CHECK_EQ_INT(rest->n_tokens, 12);
    for (int i = 0; i < 12; i++) CHECK_EQ_INT(rest->out[i].id, whole->out[8 + i].id);
    pair_close(&t);
}

TEST(decode_cancel_in_every_state_gives_all_back)
{
    struct pair t;
    uint64_t id = 1;
    pair_open(&t, (struct worker_options){ 0 }, (struct worker_options){ 0 });
    for (int stage = 0; stage < 6; stage++) {
        struct gen *g = entry_add(&t.e, id++, 200, 50 + (uint64_t)stage, 100);
        if (stage == 0) { /* in the same turn as RUN, then as RESERVE */
            entry_generate(&t.e, g, t.d, FRAME_RUN);
        } else if (stage == 1) {
            entry_generate(&t.e, g, t.d, FRAME_RESERVE);
        } else if (stage == 2) {
            entry_generate(&t.e, g, t.d, FRAME_RESERVE);
            RIG_WAIT(&t.rig, g->granted);
        } else if (stage == 3) {
            entry_split(&t.e, g, t.p, t.d);
        } else if (stage == 4) {
            entry_split(&t.e, g, t.p, t.d);
            RIG_WAIT(&t.rig, g->n_out > 0);
        } else {
            entry_generate(&t.e, g, t.d, FRAME_RUN);
            RIG_WAIT(&t.rig, g->finished);
        }
        entry_cancel(&t.e, g, t.d);
        if (stage == 3 || stage == 4) entry_cancel(&t.e, g, t.p);
        rig_turn_ms(&t.rig, 20); /* the cancel arrives */
        RIG_WAIT_MS(&t.rig, worker_is_idle(t.p) && worker_is_idle(t.d), 3000);
        CHECK(!g->failed);
        if (stage < 3) CHECK(!g->finished); /* later ones may finish before the cancel */
    }
    pair_close(&t);
}

/* Only the decode node gets CANCEL: the prefill node must notice by its transfer. */
TEST(decode_cancel_stops_the_prefill_node_too)
{
    struct pair t;
    pair_open(&t, (struct worker_options){ .step_tokens = 1 }, (struct worker_options){ 0 });
    struct gen *g = entry_add(&t.e, 1, 900, 5, 10);
    entry_split(&t.e, g, t.p, t.d);
    RIG_WAIT(&t.rig, worker_computes(t.p));
    entry_cancel(&t.e, g, t.d);
    rig_turn_ms(&t.rig, 20);
    RIG_WAIT_MS(&t.rig, worker_is_idle(t.p) && worker_is_idle(t.d), 5000);
    pair_close(&t);
}

TEST(decode_lost_entry_gives_all_back)
{
    struct pair t;
    /* Credits for both prompts at once. */
    pair_open(&t, (struct worker_options){ .step_tokens = 256 }, (struct worker_options){ 0 });
    struct gen *g[5];
    for (uint64_t i = 0; i < 5; i++) g[i] = entry_add(&t.e, i + 1, 200, 60 + i, 120);
    entry_generate(&t.e, g[0], t.d, FRAME_RUN);
    RIG_WAIT(&t.rig, g[0]->n_out > 0);
    entry_generate(&t.e, g[1], t.d, FRAME_RESERVE);
    RIG_WAIT(&t.rig, g[1]->granted);
    entry_ask(&t.e, g[3], t.p);
    entry_split(&t.e, g[2], t.p, t.d);
    entry_generate(&t.e, g[4], t.d, FRAME_RESERVE);
    rig_turn_ms(&t.rig, 5);
    peer_close(t.e.peer);
    t.e.peer = NULL;
    RIG_WAIT_MS(&t.rig, t.p->peer->n_lost == 1 && t.d->peer->n_lost == 1, 3000);
    RIG_WAIT_MS(&t.rig, worker_is_idle(t.p) && worker_is_idle(t.d), 3000);
    pair_close(&t);
}

TEST(decode_lost_prefill_node_fails_the_transfer)
{
    struct pair t;
    /* 900 steps, so that it is still running below. */
    pair_open(&t, (struct worker_options){ .step_tokens = 1 }, (struct worker_options){ 0 });
    struct gen *g = entry_add(&t.e, 1, 900, 5, 10);
    entry_split(&t.e, g, t.p, t.d);
    RIG_WAIT(&t.rig, worker_computes(t.p));
    worker_close(t.p);
    RIG_WAIT(&t.rig, g->failed);
    CHECK_EQ_INT(g->blame, BLAME_PAIR);
    RIG_WAIT_MS(&t.rig, worker_is_idle(t.d), 5000);
    t.p = worker_open(&t.rig, 3, (struct worker_options){ 0 }); /* the next request is served */
    g = entry_add(&t.e, 2, 300, 5, 10);
    entry_split(&t.e, g, t.p, t.d);
    RIG_WAIT(&t.rig, g->finished);
    pair_close(&t);
}

/* A decode node that never gets PREFILL_DONE. */
static bool without_first_token(void *arg, const struct cluster_message *m)
{
    return m->type == FRAME_PREFILL_DONE || worker_on_message(arg, m);
}

/* The KV comes, over its own connection; the first token is lost with the link. Neither node tells
 * of a loss, and the prefill node has forgotten the prompt. */
TEST(decode_first_token_that_is_lost_fails_in_seconds)
{
    struct pair t;
    pair_open(&t, (struct worker_options){ 0 }, (struct worker_options){ 0 });
    t.d->peer->hook = without_first_token;
    struct gen *g = entry_add(&t.e, 1, 100, 5, 10);
    entry_split(&t.e, g, t.p, t.d);
    RIG_WAIT(&t.rig, g->reported);
    uint64_t since_ms = clock_ms();
    RIG_WAIT_MS(&t.rig, g->failed, DECODE_FIRST_TOKEN_MS + 3000);
    CHECK(clock_ms() - since_ms >= DECODE_FIRST_TOKEN_MS - 600);
    CHECK_STATUS(g->status, ERR_TIMEOUT);
    CHECK_EQ_INT(g->blame, BLAME_PAIR);
    CHECK(strstr(g->text, "first token"));
    RIG_WAIT(&t.rig, worker_is_idle(t.d)); /* its blocks are free */
    t.d->peer->hook = worker_on_message;
    g = entry_add(&t.e, 2, 100, 5, 10);
    entry_split(&t.e, g, t.p, t.d);
    RIG_WAIT(&t.rig, g->finished);
    pair_close(&t);
}

/* Granted, running and new: all are given back. */
TEST(decode_hands_back_all_that_it_has)
{
    struct pair t;
    struct gen *g[4];
    /* 900 steps, so that it is still running below. */
    pair_open(&t, (struct worker_options){ 0 }, (struct worker_options){ .step_tokens = 1 });
    for (uint64_t i = 0; i < 4; i++) g[i] = entry_add(&t.e, i + 1, i ? 100 : 900, 60 + i, 20);
    for (int i = 1; i < 3; i++) {
        entry_generate(&t.e, g[i], t.d, FRAME_RESERVE);
        RIG_WAIT(&t.rig, g[i]->granted);
    }
    entry_generate(&t.e, g[0], t.d, FRAME_RUN);
    RIG_WAIT(&t.rig, worker_computes(t.d));
    decode_hand_back(t.d->decode);
    entry_generate(&t.e, g[3], t.d, FRAME_RUN);
    for (int i = 0; i < 4; i++) {
        RIG_WAIT(&t.rig, g[i]->failed);
        CHECK_STATUS(g[i]->status, ERR_BUSY);
        CHECK_EQ_INT(g[i]->blame, BLAME_HANDED_BACK);
    }
    RIG_WAIT(&t.rig, worker_is_idle(t.d));
    pair_close(&t);
}

/* The entry node allows a short rest to be computed: a node that has evicted the prompt computes
 * nothing, and says how much it has. */
TEST(decode_hands_back_what_it_has_evicted)
{
    enum { N = 200, BLOCK = 16, MOST = 64 };
    struct pair t;
    struct gen *g[4];
    pair_open(&t, (struct worker_options){ 0 }, (struct worker_options){ .n_blocks = 16 });
    for (uint64_t i = 0; i < 4; i++) g[i] = entry_add(&t.e, i + 1, N, i == 2 ? 70 : 60, 20);
    g[1]->most_computed = g[3]->most_computed = MOST;
    entry_generate(&t.e, g[0], t.d, FRAME_RUN);
    RIG_WAIT(&t.rig, g[0]->finished);
    entry_generate(&t.e, g[1], t.d, FRAME_RUN);
    RIG_WAIT(&t.rig, g[1]->finished);
    CHECK_EQ_INT(g[1]->n_cached, (N - 1) / BLOCK * BLOCK);
    check_same_answer(g[0], g[1]);
    entry_generate(&t.e, g[2], t.d, FRAME_RUN); /* takes the blocks */
    RIG_WAIT(&t.rig, g[2]->finished);
    const struct counter *computed = metrics_counter(t.d->metrics,
                                                     "baton_engine_prompt_tokens_total", "", "");
    const uint64_t n_computed = counter_value(computed);
    entry_generate(&t.e, g[3], t.d, FRAME_RUN);
    RIG_WAIT(&t.rig, g[3]->failed);
    CHECK_STATUS(g[3]->status, ERR_BUSY);
    CHECK_EQ_INT(g[3]->blame, BLAME_HANDED_BACK);
    CHECK(g[3]->lacks_prompt && g[3]->n_cached + MOST < N);
    CHECK_EQ_INT(counter_value(computed), n_computed);
    RIG_WAIT(&t.rig, worker_is_idle(t.d));
    pair_close(&t);
}

/* Sequences that outgrow the pool: entry nodes that know the message are told when one loses its
 * blocks, and all answers are complete whether they act or not. */
TEST(decode_tells_who_loses_its_blocks)
{
    enum { N = 4 };
    struct pair t;
    struct gen *g[N];
    uint32_t n_told = 0;
    pair_open(&t, (struct worker_options){ 0 }, (struct worker_options){ .n_blocks = 14 });
    for (uint64_t i = 0; i < N; i++) {
        g[i] = entry_add(&t.e, i + 1, 40, 60 + i, 60);
        g[i]->hears_preempted = i % 2;
        entry_generate(&t.e, g[i], t.d, FRAME_RUN);
    }
    for (int i = 0; i < N; i++) {
        RIG_WAIT(&t.rig, g[i]->finished);
        CHECK_EQ_INT(g[i]->n_out, 60);
        n_told += g[i]->n_preempted;
    }
    CHECK(n_told > 0);
    RIG_WAIT(&t.rig, worker_is_idle(t.d));
    pair_close(&t);
}

/* The entry node knows no other. */
TEST(decode_keeps_what_can_go_nowhere_else)
{
    struct pair t;
    struct gen *g[2];
    pair_open(&t, (struct worker_options){ 0 }, (struct worker_options){ .step_tokens = 1 });
    for (uint64_t i = 0; i < 2; i++) g[i] = entry_add(&t.e, i + 1, i ? 100 : 900, 60 + i, 20);
    entry_generate(&t.e, g[0], t.d, FRAME_RUN);
    RIG_WAIT(&t.rig, worker_computes(t.d));
    decode_set_leaving(t.d->decode, true, ENTRY_ID);
    decode_hand_back(t.d->decode);
    entry_generate(&t.e, g[1], t.d, FRAME_RUN);
    RIG_WAIT(&t.rig, g[0]->finished && g[1]->finished);
    CHECK(g[0]->n_out == 20 && g[1]->n_out == 20);
    RIG_WAIT(&t.rig, worker_is_idle(t.d));
    pair_close(&t);
}

/* A node that shuts down takes nothing new, and gives back what waits; what runs goes on. */
TEST(decode_node_that_leaves_takes_nothing_new)
{
    struct pair t;
    struct gen *g[3];
    pair_open(&t, (struct worker_options){ 0 }, (struct worker_options){ .step_tokens = 1 });
    for (uint64_t i = 0; i < 3; i++) g[i] = entry_add(&t.e, i + 1, i ? 100 : 900, 60 + i, 20);
    entry_generate(&t.e, g[0], t.d, FRAME_RUN);
    RIG_WAIT(&t.rig, worker_computes(t.d));
    decode_set_leaving(t.d->decode, true, 0);
    entry_generate(&t.e, g[1], t.d, FRAME_RESERVE);
    entry_generate(&t.e, g[2], t.d, FRAME_RUN);
    for (int i = 1; i < 3; i++) {
        RIG_WAIT(&t.rig, g[i]->failed);
        CHECK_EQ_INT(g[i]->blame, BLAME_HANDED_BACK);
    }
    decode_set_leaving(t.d->decode, false, 0); /* nobody else is left */
    g[1]->attempt++;
    g[1]->failed = false;
    entry_generate(&t.e, g[1], t.d, FRAME_RUN);
    RIG_WAIT(&t.rig, g[0]->finished && g[1]->finished);
    CHECK(g[0]->n_out == 20 && g[1]->n_out == 20);
    RIG_WAIT(&t.rig, worker_is_idle(t.d));
    pair_close(&t);
}

/* What is granted and what runs goes on; RESERVE meant for another role, or while the role settles,
 * is given back; RUN never is. */
TEST(decode_node_changes_its_role)
{
    enum { DECODES = 3, PREFILLS = 2 };
    struct pair t;
    struct gen *g[6];
    pair_open(&t, (struct worker_options){ 0 }, (struct worker_options){ 0 });
    decode_set_role(t.d->decode, DECODES, false);
    for (uint64_t i = 0; i < 6; i++) {
        g[i] = entry_add(&t.e, i + 1, 100, 60 + i, 20);
        g[i]->role = DECODES;
    }
    entry_ask(&t.e, g[0], t.p);
    entry_generate(&t.e, g[0], t.d, FRAME_RESERVE);
    RIG_WAIT(&t.rig, g[0]->granted && g[0]->credit);
    CHECK_EQ_INT(decode_n_old_grants(t.d->decode), 0);
    decode_set_role(t.d->decode, PREFILLS, true);
    CHECK_EQ_INT(decode_n_old_grants(t.d->decode), 1);
    g[1]->role = PREFILLS; /* placed by the new role already */
    for (int i = 1; i < 3; i++) {
        entry_generate(&t.e, g[i], t.d, FRAME_RESERVE);
        RIG_WAIT(&t.rig, g[i]->failed);
        CHECK_EQ_INT(g[i]->blame, BLAME_HANDED_BACK);
        CHECK(strstr(g[i]->text, "role"));
    }
    entry_generate(&t.e, g[3], t.d, FRAME_RUN);
    entry_prefill(&t.e, g[0], t.p, t.d->peer->id, cluster_port(t.d->peer->c));
    RIG_WAIT(&t.rig, g[0]->finished && g[3]->finished);
    CHECK(g[0]->n_out == 20 && g[3]->n_out == 20);
    CHECK_EQ_INT(decode_n_old_grants(t.d->decode), 0);
    decode_set_role(t.d->decode, PREFILLS, false);
    entry_generate(&t.e, g[4], t.d, FRAME_RESERVE); /* by an old view */
    RIG_WAIT(&t.rig, g[4]->failed);
    CHECK_EQ_INT(g[4]->blame, BLAME_HANDED_BACK);
    g[5]->role = 0; /* of an entry node that does not tell */
    entry_generate(&t.e, g[5], t.d, FRAME_RESERVE);
    RIG_WAIT(&t.rig, g[5]->granted);
    CHECK_EQ_INT(decode_n_old_grants(t.d->decode), 0); /* this one is of the role now */
    entry_cancel(&t.e, g[5], t.d);
    RIG_WAIT(&t.rig, worker_is_idle(t.d) && worker_is_idle(t.p));
    pair_close(&t);
}

static void check_refused(struct pair *t, struct gen *g, enum status want, uint32_t blame)
{
    RIG_WAIT(&t->rig, g->failed);
    CHECK_STATUS(g->status, want);
    CHECK_EQ_INT(g->blame, blame);
}

TEST(decode_refuses_what_does_not_fit)
{
    struct pair t;
    struct gen *g[6];
    pair_open(&t, (struct worker_options){ .protocols = "" },
              (struct worker_options){ .n_blocks = 10, .max_decode_seqs = 3 });
    for (uint64_t i = 0; i < 6; i++) g[i] = entry_add(&t.e, i + 1, 100, 60 + i, 20);
    entry_generate(&t.e, g[0], t.d, FRAME_RESERVE); /* 7 of 10 blocks */
    RIG_WAIT(&t.rig, g[0]->granted);
    entry_generate(&t.e, g[1], t.d, FRAME_RESERVE);
    check_refused(&t, g[1], ERR_FULL, BLAME_HANDED_BACK); /* no blocks */
    g[2]->n_prompt = 400;
    for (uint32_t i = 100; i < 400; i++) g[2]->prompt[i] = 5;
    entry_generate(&t.e, g[2], t.d, FRAME_RESERVE); /* would never fit */
    check_refused(&t, g[2], ERR_TOO_LONG, BLAME_NOBODY);
    g[3]->prompt[0] = VOCAB + 1000;
    entry_generate(&t.e, g[3], t.d, FRAME_RUN);
    check_refused(&t, g[3], ERR_INVALID, BLAME_NOBODY);
    RIG_WAIT(&t.rig, decode_n_live(t.d->decode) == 1);
    for (uint64_t i = 10; i < 12; i++) {
        struct gen *small = entry_add(&t.e, i, 16, i, 20);
        entry_generate(&t.e, small, t.d, FRAME_RESERVE);
        RIG_WAIT(&t.rig, small->granted);
    }
    entry_generate(&t.e, g[4], t.d, FRAME_RUN); /* the fourth sequence */
    check_refused(&t, g[4], ERR_BUSY, BLAME_NOBODY);
    entry_generate(&t.e, g[0], t.d, FRAME_RESERVE); /* again: ignored */
    entry_generate(&t.e, g[5], t.p, FRAME_RESERVE); /* a node that receives nothing */
    check_refused(&t, g[5], ERR_PEER_REFUSED, BLAME_PAIR);
    rig_turn_ms(&t.rig, 50);
    CHECK_EQ_INT(decode_n_live(t.d->decode), 3);
    LIST_FOREACH (any, &t.e.gens, struct gen, link) entry_cancel(&t.e, any, t.d);
    pair_close(&t);
}

TEST(decode_malformed_messages_hold_nothing)
{
    static const enum frame_type types[] = { FRAME_RESERVE,   FRAME_RUN,       FRAME_PREFILL_DONE,
                                             FRAME_KVT_HELLO, FRAME_CANCEL,    FRAME_KVT_ANSWER,
                                             FRAME_PREFILL,   FRAME_ASK_CREDIT };
    struct pair t;
    pair_open(&t, (struct worker_options){ 0 }, (struct worker_options){ 0 });
    peer_meet(t.e.peer, t.d->peer);
    for (size_t i = 0; i < COUNT_OF(types); i++) {
        struct gen *a = entry_add(&t.e, 10 + i, 10, 1, 1), *b = entry_add(&t.e, 50 + i, 10, 1, 1);
        CHECK_OK(cluster_send(t.e.peer->c, 2, types[i], a->request, 1, STR("\xff\xff\xff\xff")));
        if (types[i] == FRAME_ASK_CREDIT) continue; /* may be empty */
        CHECK_OK(cluster_send(t.e.peer->c, 2, types[i], b->request, 1, STR("")));
        if (types[i] == FRAME_RESERVE || types[i] == FRAME_RUN || types[i] == FRAME_PREFILL)
            RIG_WAIT(&t.rig, a->failed && b->failed);
    }
    rig_turn_ms(&t.rig, 50);
    /* A first token out of range: the sequence that waits for it fails and returns its blocks. */
    struct gen *g = entry_add(&t.e, 1, 40, 3, 10);
    entry_generate(&t.e, g, t.d, FRAME_RESERVE);
    RIG_WAIT(&t.rig, g->granted);
    Baton__PrefillDone done = BATON__PREFILL_DONE__INIT;
    CHECK_OK(cluster_send_proto(t.e.peer->c, 2, FRAME_PREFILL_DONE, 1, 1, &done.base));
    rig_turn_ms(&t.rig, 30);
    CHECK(!g->failed && !g->finished);
    entry_cancel(&t.e, g, t.d);
    pair_close(&t);
}

/* Many at once, cancelled at random moments, some first on one node only. */
TEST(decode_many_cancels_give_all_back)
{
    enum { N = 80 };
    struct pair t;
    struct gen *g[N];
    uint64_t draws = 0;
    pair_open(&t, (struct worker_options){ 0 }, (struct worker_options){ 0 });
    for (uint64_t i = 0; i < N; i++) {
        g[i] = entry_add(&t.e, i + 1, 20 + (uint32_t)(i * 13 % 200), i, 30);
        if (i % 4 == 3) {
            entry_generate(&t.e, g[i], t.d, FRAME_RUN);
        } else {
            entry_ask(&t.e, g[i], t.p);
            RIG_WAIT(&t.rig, g[i]->credit || g[i]->failed);
            entry_generate(&t.e, g[i], t.d, FRAME_RESERVE);
            if (rng_uniform(9, 9, draws++) < 0.2) entry_cancel(&t.e, g[i], t.d);
            for (uint64_t end = clock_ms() + 40;
                 clock_ms() < end && !g[i]->granted && !g[i]->failed;)
                uv_run(loop_uv(t.rig.loop), UV_RUN_ONCE);
            if (g[i]->granted) entry_prefill(&t.e, g[i], t.p, 2, cluster_port(t.d->peer->c));
            else entry_cancel(&t.e, g[i], t.p);
        }
        rig_turn_ms(&t.rig, (uint64_t)(rng_uniform(9, 9, draws++) * 12));
        uint64_t k = (uint64_t)(rng_uniform(9, 9, draws++) * (double)(i + 1));
        if (rng_uniform(9, 9, draws++) < 0.7) entry_cancel(&t.e, g[k], t.d);
        if (rng_uniform(9, 9, draws++) < 0.7) entry_cancel(&t.e, g[k], t.p);
    }
    RIG_WAIT(&t.rig, worker_is_idle(t.p) && worker_is_idle(t.d));
    struct gen *last = entry_add(&t.e, 1000, 100, 3, 10);
    entry_split(&t.e, last, t.p, t.d);
    RIG_WAIT(&t.rig, last->finished);
    pair_close(&t);
}

/* Freed while everything runs: ASan and the engine's check of its pool tell whether anything is
 * left. */
TEST(decode_free_with_everything_pending)
{
    struct pair t;
    pair_open(&t, (struct worker_options){ .step_tokens = 16 }, (struct worker_options){ 0 });
    struct gen *g[4];
    for (uint64_t i = 0; i < 4; i++) g[i] = entry_add(&t.e, i + 1, 500, 60 + i, 100);
    entry_generate(&t.e, g[0], t.d, FRAME_RUN);
    entry_split(&t.e, g[1], t.p, t.d);
    entry_ask(&t.e, g[2], t.p);
    entry_generate(&t.e, g[3], t.d, FRAME_RESERVE);
    rig_turn_ms(&t.rig, 20);
    worker_close(t.d);
    worker_close(t.p);
    entry_close(&t.e);
    cluster_rig_close(&t.rig);
}

/* The entry node would wait for it: the link goes down, so that it knows. */
TEST(decode_grant_that_does_not_fit_takes_the_link_down)
{
    struct pair t;
    struct worker_options small = { .queue_bytes = 100000 };
    pair_open(&t, (struct worker_options){ 0 }, small);
    struct gen *first = entry_add(&t.e, 1, 40, 7, 5), *g = entry_add(&t.e, 2, 40, 7, 5);
    entry_generate(&t.e, first, t.d, FRAME_RESERVE);
    RIG_WAIT(&t.rig, first->granted);
    loop_timer_free(t.d->poll); /* what the engine answers waits here */
    t.d->poll = NULL;
    entry_generate(&t.e, g, t.d, FRAME_RESERVE);
    RIG_WAIT(&t.rig, decode_n_live(t.d->decode) == 2);
    usleep(100000); /* the engine has answered */
    worker_fill_queue(t.d, ENTRY_ID);
    worker_poll(t.d);
    t.d->poll = loop_timer_start(t.rig.loop, POLL_MS, POLL_MS, worker_poll, t.d);
    RIG_WAIT_MS(&t.rig, t.e.peer->n_lost == 1 && decode_n_live(t.d->decode) == 0, 3000);
    CHECK(!g->granted);
    pair_close(&t);
}

TEST_MAIN(CASE(decode_split_equals_run_over_mem), CASE(decode_split_equals_run_over_tcp),
          CASE(decode_grant_that_does_not_fit_takes_the_link_down),
          CASE(decode_goes_on_from_given_tokens), CASE(decode_cancel_in_every_state_gives_all_back),
          CASE(decode_cancel_stops_the_prefill_node_too), CASE(decode_lost_entry_gives_all_back),
          CASE(decode_lost_prefill_node_fails_the_transfer),
          CASE(decode_first_token_that_is_lost_fails_in_seconds),
          CASE(decode_hands_back_all_that_it_has), CASE(decode_node_changes_its_role),
          CASE(decode_hands_back_what_it_has_evicted), CASE(decode_tells_who_loses_its_blocks),
          CASE(decode_node_that_leaves_takes_nothing_new),
          CASE(decode_keeps_what_can_go_nowhere_else), CASE(decode_refuses_what_does_not_fit),
          CASE(decode_malformed_messages_hold_nothing), CASE(decode_many_cancels_give_all_back),
          CASE(decode_free_with_everything_pending))
