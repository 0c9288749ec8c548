/* test_prefill.c - the prefill worker with a real engine and real transfers: credits are bounded
 * and returned; whatever is cancelled, lost, late or refused returns every block and tells the
 * entry node. */
#include "tests/unit/decode/worker_rig.h"

#include "prefill/kv_route.h"
#include "shared/cluster/answer.h"

enum { STEP = 64 };

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
    RIG_WAIT(&t->rig, worker_is_idle(t->p) && (!t->d || worker_is_idle(t->d)));
    entry_close(&t->e);
    worker_close(t->p);
    if (t->d) worker_close(t->d);
    cluster_rig_close(&t->rig);
}

static uint32_t n_credits(struct gen *const *g, size_t n)
{
    uint32_t count = 0;
    for (size_t i = 0; i < n; i++) count += g[i]->credit;
    return count;
}

/* The entry node would wait for it: the link goes down, so that it knows. */
TEST(prefill_credit_that_does_not_fit_takes_the_link_down)
{
    struct pair t;
    Baton__AskCredit ask = BATON__ASK_CREDIT__INIT;
    uint8_t bytes[64];
    pair_open(&t, (struct worker_options){ .queue_bytes = 100000 }, (struct worker_options){ 0 });
    struct gen *g = entry_add(&t.e, 1, 40, 7, 5);
    entry_ask(&t.e, g, t.p);
    RIG_WAIT(&t.rig, g->credit);
    ask.n_tokens = 40;
    const struct cluster_message m = {
        .from = ENTRY_ID,
        .from_name = "entry",
        .type = FRAME_ASK_CREDIT,
        .request = 2,
        .attempt = 1,
        .body = { (const char *)bytes, baton__ask_credit__pack(&ask, bytes) },
    };
    worker_fill_queue(t.p, ENTRY_ID);
    CHECK(prefill_on_message(t.p->prefill, &m));
    RIG_WAIT_MS(&t.rig, t.e.peer->n_lost == 1 && prefill_n_live(t.p->prefill) == 0, 3000);
    pair_close(&t);
}

TEST(prefill_credits_are_bounded_and_come_back)
{
    struct pair t;
    struct gen *g[8];
    pair_open(&t, (struct worker_options){ .step_tokens = STEP }, (struct worker_options){ 0 });
    for (uint64_t i = 0; i < 8; i++) {
        /* Two steps are 128 tokens; prompt 4 is longer. */
        g[i] = entry_add(&t.e, i + 1, i == 4 ? 500 : 40, i, 5);
        entry_ask(&t.e, g[i], t.p);
    }
    RIG_WAIT(&t.rig, n_credits(g, 8) >= 3);
    rig_turn_ms(&t.rig, 60);
    CHECK_EQ_INT(n_credits(g, 8), 3); /* and no more */
    CHECK(g[0]->credit && g[1]->credit && g[2]->credit);
    entry_cancel(&t.e, g[1], t.p); /* a returned credit goes to the next prompt */
    RIG_WAIT(&t.rig, g[3]->credit);
    entry_cancel(&t.e, g[0], t.p);
    entry_cancel(&t.e, g[5], t.p); /* one that waits leaves the queue */
    rig_turn_ms(&t.rig, 30);
    CHECK_EQ_INT(n_credits(g, 8), 4); /* the long one waits and is not overtaken */
    entry_generate(&t.e, g[2], t.d, FRAME_RESERVE);
    RIG_WAIT(&t.rig, g[2]->granted);
    /* Computing it returns the credit too. */
    entry_prefill(&t.e, g[2], t.p, 2, cluster_port(t.d->peer->c));
    entry_cancel(&t.e, g[3], t.p);
    RIG_WAIT(&t.rig, g[4]->credit);
    CHECK(!g[6]->credit);
    entry_generate(&t.e, g[4], t.d, FRAME_RESERVE);
    RIG_WAIT(&t.rig, g[4]->granted);
    entry_prefill(&t.e, g[4], t.p, 2, cluster_port(t.d->peer->c));
    RIG_WAIT(&t.rig, g[6]->credit && g[7]->credit);
    RIG_WAIT(&t.rig, g[2]->finished && g[4]->finished);
    entry_cancel(&t.e, g[6], t.p);
    entry_cancel(&t.e, g[7], t.p);
    CHECK(!g[5]->credit);
    pair_close(&t);
}

TEST(prefill_credits_go_first_to_those_who_go_first)
{
    struct pair t;
    struct gen *g[6];
    pair_open(&t, (struct worker_options){ .step_tokens = STEP }, (struct worker_options){ 0 });
    for (uint64_t i = 0; i < 6; i++) { /* the first three fill two steps */
        g[i] = entry_add(&t.e, i + 1, 40, i, 5);
        g[i]->goes_first = i == 4 || i == 5;
        entry_ask(&t.e, g[i], t.p);
    }
    RIG_WAIT(&t.rig, n_credits(g, 6) >= 3);
    entry_cancel(&t.e, g[0], t.p);
    RIG_WAIT(&t.rig, g[4]->credit);
    CHECK(!g[3]->credit && !g[5]->credit); /* among themselves they keep their order */
    entry_cancel(&t.e, g[1], t.p);
    RIG_WAIT(&t.rig, g[5]->credit);
    CHECK(!g[3]->credit);
    entry_cancel(&t.e, g[2], t.p);
    RIG_WAIT(&t.rig, g[3]->credit);
    for (int i = 3; i < 6; i++) entry_cancel(&t.e, g[i], t.p);
    pair_close(&t);
}

TEST(prefill_unused_credit_expires)
{
    struct pair t;
    pair_open(&t, (struct worker_options){ .step_tokens = STEP }, (struct worker_options){ 0 });
    struct gen *a = entry_add(&t.e, 1, 500, 1, 5), *b = entry_add(&t.e, 2, 40, 2, 5);
    entry_ask(&t.e, a, t.p);
    entry_ask(&t.e, b, t.p);
    RIG_WAIT(&t.rig, a->credit);
    uint64_t start = clock_ms();
    RIG_WAIT_MS(&t.rig, a->failed, 17000);
    CHECK_STATUS(a->status, ERR_TIMEOUT);
    CHECK(clock_ms() - start > 10000);
    RIG_WAIT(&t.rig, b->credit); /* other prompts are served */
    buf_add_c(&a->grant, "late");
    a->failed = false;
    entry_prefill(&t.e, a, t.p, 2, cluster_port(t.d->peer->c));
    RIG_WAIT(&t.rig, a->failed);
    CHECK_STATUS(a->status, ERR_STALE);
    entry_cancel(&t.e, b, t.p);
    pair_close(&t);
}

TEST(prefill_refuses_more_than_it_may_hold)
{
    struct pair t;
    struct gen *g[4];
    pair_open(&t, (struct worker_options){ .max_prompts = 3 }, (struct worker_options){ 0 });
    for (uint64_t i = 0; i < 4; i++) {
        g[i] = entry_add(&t.e, i + 1, 100, i, 5);
        entry_ask(&t.e, g[i], t.p);
    }
    RIG_WAIT(&t.rig, g[3]->failed);
    CHECK_STATUS(g[3]->status, ERR_BUSY);
    CHECK_EQ_INT(g[3]->blame, BLAME_NOBODY);
    entry_ask(&t.e, g[0], t.p); /* asked twice: one credit (the entry node's log checks that) */
    rig_turn_ms(&t.rig, 30);
    for (int i = 0; i < 3; i++) entry_cancel(&t.e, g[i], t.p);
    pair_close(&t);
}

TEST(prefill_without_a_credit_is_stale)
{
    struct pair t;
    pair_open(&t, (struct worker_options){ 0 }, (struct worker_options){ 0 });
    struct gen *g = entry_add(&t.e, 1, 100, 1, 5);
    entry_generate(&t.e, g, t.d, FRAME_RESERVE);
    RIG_WAIT(&t.rig, g->granted);
    peer_meet(t.e.peer, t.p->peer);
    entry_prefill(&t.e, g, t.p, 2, cluster_port(t.d->peer->c));
    RIG_WAIT(&t.rig, g->failed);
    CHECK_STATUS(g->status, ERR_STALE);
    CHECK_EQ_INT(g->blame, BLAME_NOBODY);
    entry_cancel(&t.e, g, t.d);
    pair_close(&t);
}

TEST(prefill_bad_messages_give_the_credit_back)
{
    struct pair t;
    pair_open(&t, (struct worker_options){ .step_tokens = STEP }, (struct worker_options){ 0 });
    for (int i = 0; i < 5; i++) {
        struct gen *g = entry_add(&t.e, 1 + (uint64_t)i, 500, 1, 5);
        entry_ask(&t.e, g, t.p);
        RIG_WAIT(&t.rig, g->credit); /* every time, since the one before returned it */
        uint16_t port = cluster_port(t.d->peer->c);
        if (i == 0)
            CHECK_OK(cluster_send(t.e.peer->c, 1, FRAME_PREFILL, g->request, 1, STR("\xff\xff")));
        if (i == 1) entry_prefill(&t.e, g, t.p, 2, port); /* no grant */
        if (i > 1) buf_add_c(&g->grant, "not a grant");
        if (i == 2) entry_prefill(&t.e, g, t.p, 2, 0);
        if (i == 3) {
            g->sampling.temperature = -1;
            entry_prefill(&t.e, g, t.p, 2, port);
        }
        if (i == 4) entry_prefill(&t.e, g, t.p, 2, port);
        RIG_WAIT(&t.rig, g->failed);
        /* A grant is the decode node's: whatever is wrong with it, the request is not at fault. */
        if (i == 1 || i == 4) CHECK(status_class_of(g->status) == CLASS_PEER);
        RIG_WAIT(&t.rig, worker_is_idle(t.p));
    }
    pair_close(&t);
}

TEST(prefill_cancel_in_every_state_gives_all_back)
{
    struct pair t;
    pair_open(&t, (struct worker_options){ .step_tokens = 16 }, (struct worker_options){ 0 });
    /* 0: asked, 1: credited, 2: in the same turn as PREFILL (no connection yet), 3 and more: after
     * some ms of computing, at last after its end */
    for (int stage = 0; stage < 12; stage++) {
        struct gen *g = entry_add(&t.e, 1 + (uint64_t)stage, 600, 20 + (uint64_t)stage, 5);
        if (stage < 2) {
            entry_ask(&t.e, g, t.p);
            if (stage == 1) RIG_WAIT(&t.rig, g->credit);
        } else {
            entry_split(&t.e, g, t.p, t.d);
            rig_turn_ms(&t.rig, (uint64_t)(stage - 2) * 8);
        }
        entry_cancel(&t.e, g, t.p);
        rig_turn_ms(&t.rig, 20);
        RIG_WAIT_MS(&t.rig, worker_is_idle(t.p), 5000);
        if (stage >= 2) entry_cancel(&t.e, g, t.d);
        rig_turn_ms(&t.rig, 10);
        RIG_WAIT_MS(&t.rig, worker_is_idle(t.d), 5000);
    }
    pair_close(&t);
}

/* The decode node is lost at different moments: the entry node is told, nothing stays. */
TEST(prefill_lost_decode_node_fails_the_prompt)
{
    struct pair t;
    pair_open(&t, (struct worker_options){ .step_tokens = 16 }, (struct worker_options){ 0 });
    for (int i = 0; i < 6; i++) {
        struct gen *g = entry_add(&t.e, 1 + (uint64_t)i, 700, 30 + (uint64_t)i, 5);
        entry_split(&t.e, g, t.p, t.d);
        rig_turn_ms(&t.rig, (uint64_t)i * 12);
        worker_close(t.d);
        t.d = NULL;
        RIG_WAIT_MS(&t.rig, worker_is_idle(t.p), 5000);
        RIG_WAIT(&t.rig, g->failed || g->reported);
        if (g->failed) CHECK(status_class_of(g->status) == CLASS_PEER);
        if (g->failed) CHECK_EQ_INT(g->blame, BLAME_PAIR);
        t.d = worker_open(&t.rig, 10 + (uint64_t)i, (struct worker_options){ 0 });
    }
    struct gen *g = entry_add(&t.e, 100, 700, 30, 5);
    entry_split(&t.e, g, t.p, t.d);
    RIG_WAIT(&t.rig, g->finished);
    pair_close(&t);
}

TEST(prefill_lost_entry_gives_all_back)
{
    struct pair t;
    struct gen *g[4];
    pair_open(&t, (struct worker_options){ .step_tokens = 512 }, (struct worker_options){ 0 });
    for (uint64_t i = 0; i < 4; i++) g[i] = entry_add(&t.e, i + 1, 400, i, 5);
    entry_ask(&t.e, g[0], t.p);
    RIG_WAIT(&t.rig, g[0]->credit);
    entry_split(&t.e, g[1], t.p, t.d);
    entry_ask(&t.e, g[2], t.p);
    entry_ask(&t.e, g[3], t.p);
    rig_turn_ms(&t.rig, 5);
    peer_close(t.e.peer);
    t.e.peer = NULL;
    RIG_WAIT_MS(&t.rig, t.p->peer->n_lost == 1 && worker_is_idle(t.p) && worker_is_idle(t.d), 5000);
    entry_forget(&t.e);
    entry_open(
        &t.e, &t.rig); /* its next incarnation gets credits (with the same id, to keep it simple) */
    struct gen *again = entry_add(&t.e, 10, 900, 1, 5);
    entry_split(&t.e, again, t.p, t.d);
    RIG_WAIT(&t.rig, again->finished);
    pair_close(&t);
}

TEST(prefill_unreachable_decode_node)
{
    struct pair t;
    pair_open(&t, (struct worker_options){ 0 }, (struct worker_options){ 0 });
    struct gen *g = entry_add(&t.e, 1, 100, 1, 5);
    entry_ask(&t.e, g, t.p);
    RIG_WAIT(&t.rig, g->credit);
    buf_add_c(&g->grant, "whatever");
    entry_prefill(&t.e, g, t.p, 77, 1); /* nothing listens there */
    RIG_WAIT_MS(&t.rig, g->failed, 6000);
    CHECK_STATUS(g->status, ERR_PEER_LOST);
    CHECK_EQ_INT(g->blame, BLAME_PAIR);
    pair_close(&t);
}

/* What waits for a credit, has one, or is being computed is given back; what is new, too. */
TEST(prefill_hands_back_what_is_not_computed)
{
    struct pair t;
    struct gen *g[4];
    pair_open(&t, (struct worker_options){ .step_tokens = 4 }, (struct worker_options){ 0 });
    for (uint64_t i = 0; i < 4; i++) g[i] = entry_add(&t.e, i + 1, 900, i, 5);
    entry_split(&t.e, g[0], t.p, t.d);
    RIG_WAIT(&t.rig, worker_computes(t.p));
    entry_ask(&t.e, g[1], t.p);
    entry_ask(&t.e, g[2], t.p);
    RIG_WAIT(&t.rig, prefill_n_live(t.p->prefill) == 3);
    prefill_hand_back(t.p->prefill);
    entry_ask(&t.e, g[3], t.p);
    for (int i = 0; i < 4; i++) {
        RIG_WAIT(&t.rig, g[i]->failed);
        if (i == 0 && g[i]->blame == BLAME_PAIR) continue; /* the decode node may tell first */
        CHECK_STATUS(g[i]->status, ERR_BUSY);
        CHECK_EQ_INT(g[i]->blame, BLAME_HANDED_BACK);
    }
    entry_cancel(&t.e, g[0], t.d);
    RIG_WAIT(&t.rig, worker_is_idle(t.p));
    pair_close(&t);
}

TEST(prefill_node_that_leaves_takes_nothing_new)
{
    struct pair t;
    struct gen *g[3], *before;
    pair_open(&t, (struct worker_options){ .step_tokens = 4 }, (struct worker_options){ 0 });
    before = entry_add(&t.e, 10, 20, 7, 1); /* its connection is there for the others */
    entry_split(&t.e, before, t.p, t.d);
    RIG_WAIT(&t.rig, before->finished);
    for (uint64_t i = 0; i < 3; i++) g[i] = entry_add(&t.e, i + 1, 300, i, 5);
    entry_split(&t.e, g[0], t.p, t.d);
    entry_ask(&t.e, g[1], t.p);
    RIG_WAIT(&t.rig, prefill_n_live(t.p->prefill) == 2);
    prefill_set_leaving(t.p->prefill, true);
    entry_ask(&t.e, g[2], t.p);
    for (int i = 1; i < 3; i++) {
        RIG_WAIT(&t.rig, g[i]->failed);
        CHECK_EQ_INT(g[i]->blame, BLAME_HANDED_BACK);
    }
    RIG_WAIT(&t.rig, g[0]->finished);
    CHECK_EQ_INT(g[0]->n_out, 5);
    RIG_WAIT(&t.rig, worker_is_idle(t.p));
    pair_close(&t);
}

/* What has a credit goes on; what waits for one, and what was meant for the role before, is given
 * back. */
TEST(prefill_node_changes_its_role)
{
    enum { PREFILLS = 2, DECODES = 3 };
    struct pair t;
    struct gen *g[5];
    pair_open(&t, (struct worker_options){ .step_tokens = 4 }, (struct worker_options){ 0 });
    prefill_set_role(t.p->prefill, PREFILLS, false);
    for (uint64_t i = 0; i < 5; i++) {
        g[i] = entry_add(&t.e, i + 1, 300, i, 5);
        g[i]->role = i < 3 ? PREFILLS : DECODES;
    }
    entry_ask(&t.e, g[0], t.p);
    RIG_WAIT(&t.rig, g[0]->credit);
    entry_ask(&t.e, g[1], t.p);
    RIG_WAIT(&t.rig, prefill_n_live(t.p->prefill) == 2);
    CHECK_EQ_INT(prefill_n_old_credits(t.p->prefill), 0);
    prefill_set_role(t.p->prefill, DECODES, true);
    CHECK_EQ_INT(prefill_n_old_credits(t.p->prefill), 1);
    for (int i = 2; i < 4; i++) entry_ask(&t.e, g[i], t.p);
    for (int i = 1; i < 4; i++) {
        RIG_WAIT(&t.rig, g[i]->failed);
        CHECK_STATUS(g[i]->status, ERR_BUSY);
        CHECK_EQ_INT(g[i]->blame, BLAME_HANDED_BACK);
    }
    entry_generate(&t.e, g[0], t.d, FRAME_RESERVE);
    RIG_WAIT(&t.rig, g[0]->granted);
    entry_prefill(&t.e, g[0], t.p, t.d->peer->id, cluster_port(t.d->peer->c));
    RIG_WAIT(&t.rig, g[0]->finished);
    CHECK_EQ_INT(g[0]->n_out, 5);
    CHECK_EQ_INT(prefill_n_old_credits(t.p->prefill), 0);
    prefill_set_role(t.p->prefill, DECODES, false);
    entry_ask(&t.e, g[4], t.p);
    RIG_WAIT(&t.rig, g[4]->credit);
    CHECK_EQ_INT(prefill_n_old_credits(t.p->prefill), 0); /* of the role now */
    entry_cancel(&t.e, g[4], t.p);
    RIG_WAIT(&t.rig, worker_is_idle(t.p));
    pair_close(&t);
}

TEST(prefill_incompatible_decode_node_is_said_so)
{
    struct pair t;
    pair_open(&t, (struct worker_options){ .protocols = "tcp" },
              (struct worker_options){ .protocols = "mem" });
    struct gen *g = entry_add(&t.e, 1, 100, 1, 5);
    entry_split(&t.e, g, t.p, t.d);
    RIG_WAIT_MS(&t.rig, g->failed, 6000); /* no protocol in common */
    CHECK(status_class_of(g->status) == CLASS_PEER);
    entry_cancel(&t.e, g, t.d);
    RIG_WAIT(&t.rig, worker_is_idle(t.d));
    worker_close(t.d);
    t.d = worker_open(&t.rig, 3, (struct worker_options){ .block_tokens = 32 });
    g = entry_add(&t.e, 2, 100, 1, 5);
    entry_split(&t.e, g, t.p, t.d);
    RIG_WAIT_MS(&t.rig, g->failed || g->finished,
                6000); /* another block size: converted or refused */
    if (g->failed)
        CHECK(status_class_of(g->status) == CLASS_PEER && strstr(g->text, "block") != NULL);
    entry_cancel(&t.e, g, t.d);
    pair_close(&t);
}

TEST(prefill_node_without_protocols_refuses)
{
    struct pair t;
    pair_open(&t, (struct worker_options){ .protocols = "" }, (struct worker_options){ 0 });
    struct gen *g = entry_add(&t.e, 1, 100, 1, 5);
    entry_split(&t.e, g, t.p, t.d);
    RIG_WAIT(&t.rig, g->failed);
    CHECK(status_class_of(g->status) == CLASS_PEER); /* another pair may serve it */
    entry_cancel(&t.e, g, t.d);
    pair_close(&t);
}

/* A decode node that has no place for another connection now. */
static bool answer_full(void *arg, const struct cluster_message *m)
{
    struct peer_node *n = arg;
    Baton__KvtAnswer a = BATON__KVT_ANSWER__INIT;
    if (m->type != FRAME_KVT_HELLO) return false;
    a.status = ERR_FULL;
    a.text = "256 KV connections are being made, the limit";
    CHECK_OK(cluster_send_proto(n->c, m->from, FRAME_KVT_ANSWER, 0, 0, &a.base));
    return true;
}

TEST(prefill_says_busy_when_the_decode_node_has_no_place_for_a_connection)
{
    struct pair t;
    pair_open(&t, (struct worker_options){ 0 }, (struct worker_options){ 0 });
    struct peer_node *full = peer_open(&t.rig, 3, (struct peer_options){ 0 });
    full->hook = answer_full;
    full->arg = full;
    struct gen *g = entry_add(&t.e, 1, 100, 1, 5);
    entry_ask(&t.e, g, t.p);
    RIG_WAIT(&t.rig, g->credit);
    buf_add_c(&g->grant, "whatever");
    entry_prefill(&t.e, g, t.p, 3, cluster_port(full->c));
    RIG_WAIT(&t.rig, g->failed);
    CHECK_STATUS(g->status, ERR_FULL); /* not that the two do not match, nor ERR_BUSY */
    CHECK_EQ_INT(g->blame, BLAME_PAIR);
    CHECK(strstr(g->text, "the limit"));
    peer_close(full);
    pair_close(&t);
}

/* A node that says nothing when it is asked for a connection. Its first prompt waits, without
 * keeping others from starting; the others are given back, as if the pair was full. */
TEST(prefill_sends_only_one_prompt_where_no_connection_comes_up)
{
    struct pair t;
    struct gen *g[4];
    pair_open(&t, (struct worker_options){ .step_tokens = STEP }, (struct worker_options){ 0 });
    struct peer_node *mute = peer_open(&t.rig, 3, (struct peer_options){ 0 });
    for (uint64_t i = 0; i < 4; i++) {
        g[i] = entry_add(&t.e, i + 1, 2 * STEP, i, 5);
        entry_ask(&t.e, g[i], t.p);
        RIG_WAIT(&t.rig, g[i]->credit); /* each takes all that there is */
        buf_add_c(&g[i]->grant, "whatever");
        entry_prefill(&t.e, g[i], t.p, 3, cluster_port(mute->c));
        if (i == 2) RIG_WAIT(&t.rig, g[1]->failed && g[2]->failed);
    }
    RIG_WAIT(&t.rig, g[3]->failed);
    for (uint64_t i = 1; i < 4; i++) {
        CHECK_STATUS(g[i]->status, ERR_BUSY);
        CHECK_EQ_INT(g[i]->blame, BLAME_PAIR);
    }
    CHECK(!g[0]->failed);
    RIG_WAIT_MS(&t.rig, g[0]->failed, 2 * KV_ROUTE_CONNECT_MS);
    CHECK_STATUS(g[0]->status, ERR_PEER_REFUSED);
    CHECK_EQ_INT(g[0]->blame, BLAME_PAIR);
    peer_close(mute);
    pair_close(&t);
}

/* The decode node answers in time; this node reads it late, since it was stopped. */
TEST(prefill_stopped_while_a_connection_is_made_goes_on_with_it)
{
    struct pair t;
    pair_open(&t, (struct worker_options){ 0 }, (struct worker_options){ 0 });
    struct peer_node *other = peer_open(&t.rig, 3, (struct peer_options){ 0 });
    struct gen *g = entry_add(&t.e, 1, 100, 1, 5);
    entry_ask(&t.e, g, t.p);
    RIG_WAIT(&t.rig, g->credit);
    buf_add_c(&g->grant, "whatever");
    entry_prefill(&t.e, g, t.p, 3, cluster_port(other->c));
    RIG_WAIT(&t.rig, received_count(other, FRAME_KVT_HELLO) == 1);
    usleep((KV_ROUTE_CONNECT_MS + 600) * 1000); /* no turn of the loop */
    rig_turn_ms(&t.rig, 30);
    CHECK(!g->failed);
    answer_full(other, &(struct cluster_message){ .from = 1, .type = FRAME_KVT_HELLO });
    RIG_WAIT(&t.rig, g->failed);
    CHECK_STATUS(g->status, ERR_FULL);
    peer_close(other);
    pair_close(&t);
}

TEST_MAIN(CASE(prefill_credits_are_bounded_and_come_back),
          CASE(prefill_credits_go_first_to_those_who_go_first), CASE(prefill_unused_credit_expires),
          CASE(prefill_credit_that_does_not_fit_takes_the_link_down),
          CASE(prefill_refuses_more_than_it_may_hold), CASE(prefill_without_a_credit_is_stale),
          CASE(prefill_bad_messages_give_the_credit_back),
          CASE(prefill_cancel_in_every_state_gives_all_back),
          CASE(prefill_lost_decode_node_fails_the_prompt), CASE(prefill_lost_entry_gives_all_back),
          CASE(prefill_unreachable_decode_node), CASE(prefill_node_changes_its_role),
          CASE(prefill_node_that_leaves_takes_nothing_new),
          CASE(prefill_hands_back_what_is_not_computed),
          CASE(prefill_incompatible_decode_node_is_said_so),
          CASE(prefill_node_without_protocols_refuses),
          CASE(prefill_says_busy_when_the_decode_node_has_no_place_for_a_connection),
          CASE(prefill_sends_only_one_prompt_where_no_connection_comes_up),
          CASE(prefill_stopped_while_a_connection_is_made_goes_on_with_it))
