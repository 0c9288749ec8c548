/* test_request.c - the state machine of a request at its entry node: every loss in every state,
 * cancels, deadlines, late and missing tokens. The test plays the prefill and decode nodes; links
 * and directory are real. */
#include "tests/unit/scheduler/scheduler_rig.h"

#include "scheduler/retry.h"
#include "scheduler/scheduler_internal.h"
#include "shared/base/rng.h"

static const struct ask TEN = { .max_tokens = 10 };

TEST(request_split_goes_the_whole_way)
{
    struct world w;
    struct client c;
    world_open(&w, "pd", 1000);
    CHECK_OK(client_submit(&w, &c, TEN));
    struct attempt a = play_split(&w, &c, AT_DECODE, 3);
    CHECK_EQ_INT(a.number, 1);
    Baton__PrefillReport rep = BATON__PREFILL_REPORT__INIT;
    rep.prefill_ns = 5;
    rep.kv_bytes = 4096;
    rep.kv_ns = 7;
    rep.kv_busy_ns = 4;
    rep.kv_link_speed = 12500000000;
    rep.transport = "tcp";
    reply(a.prefill, &a, FRAME_PREFILL_REPORT, &rep.base);
    rig_turn_ms(&w.rig, 30);
    play_rest(&w, &c, &a, 10);
    CHECK_EQ_STR(c.end.trace.prefill_node, "prefill-0");
    CHECK_EQ_STR(c.end.trace.decode_node, "decode-1");
    CHECK_EQ_STR(c.end.trace.transport, "tcp");
    CHECK_EQ_INT(c.end.trace.kv_bytes, 4096);
    CHECK_EQ_INT(c.end.trace.kv_ns, 7);
    CHECK_EQ_INT(c.end.trace.kv_busy_ns, 4);
    CHECK_EQ_INT(c.end.trace.kv_link_speed, 12500000000);
    CHECK_EQ_INT(c.end.trace.n_decode_cached, 16);
    CHECK_EQ_INT(c.end.trace.n_moves, 0);
    CHECK(c.end.trace.first_token_ns > 0 && c.end.trace.total_ns >= c.end.trace.first_token_ns);
    CHECK_EQ_INT(received_count(a.prefill, FRAME_CANCEL) + received_count(a.decode, FRAME_CANCEL),
                 0);
    world_check_idle(&w);
    world_close(&w);
}

/* Publishes node i as one of `n` ranks more. */
static void publish_followers(struct world *w, size_t i, uint32_t n)
{
    struct node_record r = record_of(w, i);
    for (uint32_t k = 0; k < n; k++) {
        r.followers[k] = (struct node_rank){ .process = 100 * (i + 1) + k,
                                             .port = (uint16_t)(7000 + k) };
        snprintf(r.followers[k].host, sizeof r.followers[k].host, "127.0.0.2");
    }
    r.n_followers = n;
    directory_publish(w->directory, &r);
    rig_turn_ms(&w->rig, 1500); /* the next snapshot */
}

static void check_ranks(const struct peer_node *leader, Baton__NodeAddress *const *ranks, size_t n,
                        size_t i, uint32_t n_followers)
{
    CHECK_EQ_INT(n, 1 + n_followers);
    CHECK(ranks[0]->node == leader->id && ranks[0]->port == cluster_port(leader->c));
    for (uint32_t k = 0; k < n_followers; k++) {
        CHECK_EQ_INT(ranks[1 + k]->node, 100 * (i + 1) + k);
        CHECK_EQ_INT(ranks[1 + k]->port, 7000 + k);
        CHECK_EQ_STR(ranks[1 + k]->host, "127.0.0.2");
    }
}

/* The decode node is told who will send, and the prefill node who will receive. */
TEST(request_names_the_ranks_of_both_nodes)
{
    struct world w;
    struct client c;
    struct peer_node *at;
    Baton__KvPart parts[2] = { BATON__KV_PART__INIT, BATON__KV_PART__INIT },
                  *list[] = { &parts[0], &parts[1] };
    Baton__Grant grant = BATON__GRANT__INIT;
    world_open(&w, "pd", 1000);
    publish_followers(&w, 0, 3);
    publish_followers(&w, 1, 1);
    CHECK_OK(client_submit(&w, &c, TEN));
    struct attempt a = play_split(&w, &c, AT_CREDIT, 0);
    Baton__Credit credit = BATON__CREDIT__INIT;
    reply(a.prefill, &a, FRAME_CREDIT, &credit.base);
    struct received_message *h = world_expect(&w, FRAME_RESERVE, &a.decode);
    Baton__Reserve *r = baton__reserve__unpack(NULL, h->body.len, (const uint8_t *)h->body.data);
    check_ranks(a.prefill, r->prefill, r->n_prefill, 0, 3);
    baton__reserve__free_unpacked(r, NULL);
    parts[1].from = 3;
    parts[1].to = 1;
    for (int i = 0; i < 2; i++) parts[i].kvt_grant = (ProtobufCBinaryData){ 5, (uint8_t *)"grant" };
    grant.parts = list;
    grant.n_parts = 2;
    reply(a.decode, &a, FRAME_GRANT, &grant.base);
    h = world_expect(&w, FRAME_PREFILL, &at);
    Baton__Prefill *p = baton__prefill__unpack(NULL, h->body.len, (const uint8_t *)h->body.data);
    check_ranks(a.decode, p->decode, p->n_decode, 1, 1);
    CHECK(p->n_parts == 2 && p->parts[1]->from == 3 && p->parts[1]->to == 1);
    CHECK_EQ_INT(p->parts[1]->kvt_grant.len, 5);
    baton__prefill__free_unpacked(p, NULL);
    play_rest(&w, &c, &a, 10);
    world_check_idle(&w);
    world_close(&w);
}

/* The node's record has other ranks now than when it was chosen. */
TEST(request_moves_when_the_ranks_are_not_known_any_more)
{
    struct world w;
    struct client c;
    world_open(&w, "pd", 1000);
    publish_followers(&w, 0, 3);
    CHECK_OK(client_submit(&w, &c, TEN));
    struct attempt a = play_split(&w, &c, AT_CREDIT, 0);
    publish_followers(&w, 0, 1);
    Baton__Credit credit = BATON__CREDIT__INIT;
    reply(a.prefill, &a, FRAME_CREDIT, &credit.base);
    struct attempt b = play_run(&w, &c); /* without the node that failed it */
    CHECK(b.number > a.number);
    play_rest(&w, &c, &b, 10);
    world_check_idle(&w);
    world_close(&w);
}

TEST(request_runs_on_one_node)
{
    static const char *const roles[] = { "d", "m", "mm" };
    for (size_t i = 0; i < COUNT_OF(roles); i++) {
        struct world w;
        struct client c;
        world_open(&w, roles[i], 1000);
        CHECK_OK(client_submit(&w, &c, TEN));
        struct attempt a = play_run(&w, &c);
        play_rest(&w, &c, &a, 10);
        CHECK_EQ_STR(c.end.trace.prefill_node, c.end.trace.decode_node);
        world_check_idle(&w);
        world_close(&w);
    }
}

TEST(request_with_nothing_to_decode_runs_on_one_node)
{
    struct world w;
    struct client c;
    world_open(&w, "pd", 1000);
    CHECK_OK(client_submit(&w, &c, (struct ask){ .max_tokens = 0, .prompt_logprobs = true }));
    struct attempt a = play_run(&w, &c);
    reply_finished(a.decode, &a, 0);
    RIG_WAIT(&w.rig, c.n_ended == 1);
    CHECK_OK(c.end.status);
    world_check_idle(&w);
    world_close(&w);
}

TEST(request_waits_for_a_busy_node_and_asks_again)
{
    static const enum stage stages[] = { AT_CREDIT, AT_RESERVE, AT_PREFILL };
    struct world w;
    world_open(&w, "pd", 1000);
    for (size_t i = 0; i < COUNT_OF(stages); i++) {
        struct client c;
        CHECK_OK(client_submit(&w, &c, TEN));
        for (uint32_t n = 1; n <= 12; n++) { /* more often than a request may move */
            struct attempt a = play_split(&w, &c, stages[i], 0);
            CHECK_EQ_INT(a.number, n);
            reply_failed(stages[i] == AT_RESERVE ? a.decode : a.prefill, &a,
                         n % 2 ? ERR_BUSY : ERR_FULL);
        }
        struct attempt a = play_split(&w, &c, AT_DECODE, 1);
        play_rest(&w, &c, &a, 10);
        CHECK_EQ_INT(c.end.trace.n_moves, 0);
    }
    /* Both nodes of every abandoned attempt got CANCEL. */
    RIG_WAIT(&w.rig, received_count(w.nodes[0], FRAME_CANCEL) == 36);
    CHECK_EQ_INT(received_count(w.nodes[1], FRAME_CANCEL), 36);
    world_check_idle(&w);
    world_close(&w);
}

/* Of ten requests to a node that holds two, the next starts as soon as one ends, without waiting
 * for a snapshot. */
TEST(request_takes_room_as_soon_as_another_leaves_it)
{
    enum { CLIENTS = 10, ROOM = 2 };
    struct world w;
    struct client c[CLIENTS];
    struct attempt a[CLIENTS];
    world_open(&w, "m", 1000);
    struct node_record r = record_of(&w, 0);
    r.max_seqs = ROOM;
    directory_publish(w.directory, &r);
    RIG_WAIT(&w.rig, w.s->entry.view.n_nodes == 1 && w.s->entry.view.nodes[0].max_seqs == ROOM);
    RIG_WAIT(&w.rig, !w.s->entry.view.asking);
    w.s->entry.view.asking = true; /* no more snapshots from here on */
    for (size_t i = 0; i < CLIENTS; i++) CHECK_OK(client_submit(&w, &c[i], TEN));
    for (size_t i = 0; i < ROOM; i++) a[i] = play_run(&w, &c[i]);
    rig_turn_ms(&w.rig, 150);
    CHECK_EQ_INT(received_count(w.nodes[0], FRAME_RUN), 0);
    for (size_t i = 0; i < CLIENTS; i++) {
        if (i % 3) play_rest(&w, &c[i], &a[i], 10);
        else w.be.cancel(w.be.self, c[i].id);
        RIG_WAIT(&w.rig, c[i].n_ended == 1);
        if (i + ROOM < CLIENTS) a[i + ROOM] = play_run(&w, &c[i + ROOM]);
        rig_turn_ms(&w.rig, 30);
        CHECK_EQ_INT(received_count(w.nodes[0], FRAME_RUN), 0); /* and no other */
    }
    CHECK_EQ_INT(w.s->entry.view.nodes[0].placed_seqs, 0);
    CHECK_EQ_INT(w.s->entry.view.nodes[0].placed_blocks, 0);
    CHECK_EQ_INT(w.s->entry.view.nodes[0].placed_tokens, 0);
    w.s->entry.view.asking = false;
    world_check_idle(&w);
    world_close(&w);
}

TEST(request_moves_when_the_decode_node_is_lost)
{
    for (enum stage stage = AT_CREDIT; stage <= AT_DECODE; stage++) {
        struct world w;
        struct client c;
        world_open(&w, "pd", 5000);
        CHECK_OK(client_submit(&w, &c, TEN));
        struct attempt a = play_split(&w, &c, stage, 4);
        struct peer_node *dead = w.nodes[1];
        world_add(&w, ROLE_DECODE);
        rig_turn_ms(&w.rig, 1300); /* the entry node sees the other one */
        world_kill(&w, dead);
        if (stage == AT_CREDIT) { /* noticed when it is asked for blocks */
            Baton__Credit credit = BATON__CREDIT__INIT;
            reply(a.prefill, &a, FRAME_CREDIT, &credit.base);
        }
        struct attempt b = play_split(&w, &c, AT_DECODE, 2);
        CHECK_EQ_INT(b.number, 2);
        CHECK(b.decode == w.nodes[2]);
        CHECK_EQ_INT(c.n_tokens, stage == AT_DECODE ? 6 : 2);
        RIG_WAIT(&w.rig, received_count(a.prefill, FRAME_CANCEL) == 1);
        play_rest(&w, &c, &b, 10);
        CHECK_EQ_INT(c.end.trace.n_moves, 1);
        CHECK_EQ_STR(c.end.trace.decode_node, "decode-2");
        world_check_idle(&w);
        world_close(&w);
    }
}

TEST(request_moves_when_the_prefill_node_is_lost)
{
    for (enum stage stage = AT_CREDIT; stage <= AT_PREFILL; stage++) {
        struct world w;
        struct client c;
        world_open(&w, "pd", 5000);
        CHECK_OK(client_submit(&w, &c, TEN));
        struct attempt a = play_split(&w, &c, stage, 0);
        struct peer_node *dead = w.nodes[0];
        world_add(&w, ROLE_PREFILL);
        rig_turn_ms(&w.rig, 1300);
        world_kill(&w, dead);
        struct attempt b = play_split(&w, &c, AT_DECODE, 2);
        CHECK_EQ_INT(b.number, 2);
        CHECK(b.prefill == w.nodes[2]);
        if (a.decode) RIG_WAIT(&w.rig, received_count(a.decode, FRAME_CANCEL) == 1);
        play_rest(&w, &c, &b, 10);
        world_check_idle(&w);
        world_close(&w);
    }
}

TEST(request_does_not_mind_a_lost_prefill_node_while_tokens_flow)
{
    struct world w;
    struct client c;
    world_open(&w, "pd", 1000);
    CHECK_OK(client_submit(&w, &c, TEN));
    struct attempt a = play_split(&w, &c, AT_DECODE, 2);
    reply_failed(a.prefill, &a, ERR_IO); /* a late failure does not matter either */
    rig_turn_ms(&w.rig, 30);
    world_kill(&w, a.prefill);
    RIG_WAIT(&w.rig, w.entry->n_lost == 1);
    play_rest(&w, &c, &a, 10);
    CHECK_EQ_INT(c.end.trace.n_moves, 0);
    world_check_idle(&w);
    world_close(&w);
}

TEST(request_tries_suspects_when_there_is_nobody_else)
{
    struct world w;
    struct client c;
    world_open(&w, "pd", 4000);
    CHECK_OK(client_submit(&w, &c, TEN));
    struct attempt a = play_split(&w, &c, AT_DECODE, 2);
    uint64_t t_ms = clock_ms();
    /* both nodes are still alive */
    cluster_disconnect(w.entry->c, a.prefill->id, "as after a stop of this node");
    cluster_disconnect(w.entry->c, a.decode->id, "as after a stop of this node");
    struct attempt b = play_split(&w, &c, AT_DECODE, 2);
    CHECK(clock_ms() - t_ms < 3000); /* one request probes them when their links are up */
    play_rest(&w, &c, &b, 10);
    CHECK_EQ_INT(c.end.trace.n_moves, 1);
    world_check_idle(&w);
    world_close(&w);
}

/* Many nodes are listed that nobody reaches, beside one that serves: more than breakers are kept,
 * and longer than these are open. */
TEST(request_avoids_all_suspects_however_many)
{
    enum { GHOSTS = BREAKER_MAX + 20, CLIENTS = 8 };
    struct world w;
    struct client c;
    world_open(&w, "d", 5000);
    struct view *v = &w.s->entry.view;
    for (uint64_t i = 0; i < GHOSTS; i++) {
        struct node_record ghost = record_of(&w, 0);
        ghost.node = 200 + i;
        ghost.cluster_port = 1; /* nobody listens there */
        snprintf(ghost.name, sizeof ghost.name, "ghost-%d", (int)i);
        directory_publish(w.directory, &ghost);
    }
    RIG_WAIT_MS(&w.rig, v->n_nodes == GHOSTS + 1, 5000);
    for (uint64_t i = 0; i < GHOSTS; i++) view_suspect(v, 200 + i, "it died");
    rig_turn_ms(&w.rig, 1500); /* a snapshot comes, and each is dialed again, in vain */
    CHECK_EQ_INT(v->n_suspects, GHOSTS);
    for (int i = 0; i < CLIENTS; i++) {
        CHECK_OK(client_submit(&w, &c, TEN));
        struct attempt a = play_run(&w, &c);
        CHECK_EQ_INT(a.number, 1);
        play_rest(&w, &c, &a, 10);
        CHECK_EQ_INT(c.end.trace.n_moves, 0);
    }
    world_check_idle(&w);
    world_close(&w);
}

/* What another model's node or an unreachable one holds does not help. */
TEST(request_too_large_is_told_what_the_nodes_that_could_serve_it_hold)
{
    struct world w;
    struct client c;
    world_open(&w, "dd", 300);
    RIG_WAIT(&w.rig, w.s->entry.view.n_nodes == 2);
    struct node_record small = record_of(&w, 0), other = record_of(&w, 1);
    w.s->entry.view.model = small.model;
    small.max_model_len = 48; /* the prompt alone has 40 */
    other.model = 8;
    other.max_model_len = 100000;
    other.n_blocks = 100000;
    directory_publish(w.directory, &small);
    directory_publish(w.directory, &other);
    RIG_WAIT(&w.rig, view_find(&w.s->entry.view, small.node)->max_model_len == 48 &&
                         view_find(&w.s->entry.view, other.node)->model == 8);
    CHECK_OK(client_submit(&w, &c, TEN));
    RIG_WAIT_MS(&w.rig, c.n_ended == 1, 3000);
    CHECK_STATUS(c.end.status, ERR_UNAVAILABLE);
    CHECK(strstr(c.end.text, "this request of 50 tokens"));
    CHECK(strstr(c.end.text, "the largest holds 48"));
    world_check_idle(&w);
    world_close(&w);
}

/* From the report on the decode node alone owes something, and tells if it cannot give it
 * (test_decode: decode_first_token_that_is_lost_fails_in_seconds): there is no limit of time. */
TEST(request_goes_on_when_the_decode_node_says_that_the_first_token_is_lost)
{
    struct world w;
    struct client c;
    world_open(&w, "ppdd", 5000);
    CHECK_OK(client_submit(&w, &c, TEN));
    struct attempt a = play_split(&w, &c, AT_PREFILL, 0);
    struct request *r = map_get(&w.s->entry.by_id, map_key_u64(&a.request));
    CHECK_EQ_INT(r->wait_until_ms, 0); /* computing has no time limit */
    Baton__PrefillReport report = BATON__PREFILL_REPORT__INIT;
    report.transport = "tcp";
    reply(a.prefill, &a, FRAME_PREFILL_REPORT, &report.base);
    rig_turn_ms(&w.rig, 60);
    CHECK_EQ_INT(r->wait_until_ms, 0);
    reply_blame(a.decode, &a, ERR_TIMEOUT, BLAME_PAIR);
    struct attempt b = play_split(&w, &c, AT_PREFILL, 0);
    CHECK_EQ_INT(b.number, 2);
    CHECK(a.prefill != b.prefill || a.decode != b.decode);
    reply(b.prefill, &b, FRAME_PREFILL_REPORT, &report.base);
    reply_tokens(b.decode, &b, 0, 3, FINISH_NONE);
    RIG_WAIT(&w.rig, c.n_tokens == 3);
    CHECK_EQ_INT(r->wait_until_ms, 0); /* nor has decoding */
    play_rest(&w, &c, &b, 10);
    CHECK_EQ_INT(c.end.trace.n_moves, 1);
    world_check_idle(&w);
    world_close(&w);
}

TEST(request_goes_on_alone_when_all_prefill_nodes_are_gone)
{
    struct world w;
    struct client c;
    world_open(&w, "pd", 10000);
    CHECK_OK(client_submit(&w, &c, TEN));
    struct attempt a = play_split(&w, &c, AT_PREFILL, 0);
    world_kill(&w, a.prefill);
    directory_leave(w.directory, 1);
    struct attempt b = play_run(&w, &c); /* slower, but served: the decode node does both */
    play_rest(&w, &c, &b, 10);
    CHECK_EQ_INT(c.end.trace.n_moves, 1);
    world_check_idle(&w);
    world_close(&w);
}

TEST(request_ignores_messages_of_an_earlier_attempt_and_of_strangers)
{
    struct world w;
    struct client c;
    world_open(&w, "pddp", 1000);
    CHECK_OK(client_submit(&w, &c, TEN));
    struct attempt a = play_split(&w, &c, AT_DECODE, 2);
    reply_failed(a.decode, &a, ERR_IO);
    struct attempt b = play_split(&w, &c, AT_DECODE, 1);
    CHECK_EQ_INT(b.number, 2);
    CHECK(b.decode != a.decode);                   /* the culprit is avoided */
    reply_tokens(a.decode, &a, 0, 9, FINISH_NONE); /* late */
    reply_finished(a.decode, &a, 9);
    reply_failed(a.decode, &a, ERR_INVALID);
    reply_failed(a.prefill, &a, ERR_INVALID);
    struct attempt wrong = b;
    wrong.number = 3;
    reply_tokens(b.decode, &wrong, 3, 5, FINISH_NONE); /* of no attempt */
    struct peer_node *other = a.decode;
    reply_tokens(other, &b, 3, 5, FINISH_NONE); /* right attempt, wrong node */
    reply_finished(other, &b, 5);
    reply_failed(other, &b, ERR_INVALID);
    wrong = b;
    wrong.request ^= 1;
    reply_tokens(b.decode, &wrong, 3, 5, FINISH_NONE);
    reply_tokens(b.decode, &b, 0, 3, FINISH_NONE); /* tokens that were delivered already */
    Baton__Credit credit = BATON__CREDIT__INIT;
    reply(b.prefill, &b, FRAME_CREDIT, &credit.base); /* in the wrong state */
    Baton__Grant grant = BATON__GRANT__INIT;
    reply(b.decode, &b, FRAME_GRANT, &grant.base);
    rig_turn_ms(&w.rig, 60);
    CHECK_EQ_INT(c.n_tokens, 3);
    CHECK_EQ_INT(c.n_ended, 0);
    play_rest(&w, &c, &b, 10);
    CHECK_EQ_INT(c.end.trace.n_moves, 1);
    reply_tokens(b.decode, &b, 10, 11, FINISH_NONE); /* after its end */
    reply_finished(b.decode, &b, 1);
    rig_turn_ms(&w.rig, 60);
    world_check_idle(&w);
    world_close(&w);
}

TEST(request_moves_when_a_token_is_missing)
{
    struct world w;
    struct client c;
    world_open(&w, "pd", 1000);
    CHECK_OK(client_submit(&w, &c, TEN));
    struct attempt a = play_split(&w, &c, AT_DECODE, 2);
    reply_tokens(a.decode, &a, 3, 6, FINISH_NONE);
    struct attempt b = play_split(&w, &c, AT_DECODE, 3); /* avoided, but the only one */
    CHECK_EQ_INT(b.number, 2);
    CHECK_EQ_INT(c.n_tokens, 5);
    RIG_WAIT(&w.rig, received_count(a.decode, FRAME_CANCEL) == 1);
    play_rest(&w, &c, &b, 10);
    world_check_idle(&w);
    world_close(&w);
}

/* The last tokens were lost, but FINISHED was not: a cut answer must not look complete. */
TEST(request_moves_when_the_last_tokens_are_missing)
{
    struct world w;
    struct client c;
    world_open(&w, "pd", 1000);
    CHECK_OK(client_submit(&w, &c, TEN));
    struct attempt a = play_split(&w, &c, AT_DECODE, 6);
    reply_finished(a.decode, &a, 10);
    struct attempt b = play_split(&w, &c, AT_DECODE, 1);
    CHECK_EQ_INT(b.number, 2);
    play_rest(&w, &c, &b, 10);
    CHECK_EQ_INT(c.end.trace.n_moves, 1);
    world_check_idle(&w);
    world_close(&w);
}

TEST(request_is_over_with_its_last_token_whatever_is_lost_then)
{
    struct world w;
    struct client c;
    world_open(&w, "pd", 1000);
    CHECK_OK(client_submit(&w, &c, TEN));
    struct attempt a = play_split(&w, &c, AT_DECODE, 2);
    reply_tokens(a.decode, &a, 2, 5, FINISH_STOP);
    RIG_WAIT(&w.rig, c.n_tokens == 5);
    world_kill(&w, a.decode);
    RIG_WAIT(&w.rig, c.n_ended == 1);
    CHECK_OK(c.end.status);
    CHECK_EQ_INT(c.end.finish, FINISH_STOP);
    CHECK_EQ_INT(c.end.stop_token, 1004);
    world_check_idle(&w);
    world_close(&w);
}

TEST(request_cancel_in_every_state_tells_the_nodes)
{
    for (enum stage stage = AT_CREDIT; stage <= AT_DECODE; stage++) {
        struct world w;
        struct client c;
        world_open(&w, "pd", 1000);
        CHECK_OK(client_submit(&w, &c, TEN));
        struct attempt a = play_split(&w, &c, stage, 2);
        w.be.cancel(w.be.self, c.id);
        CHECK_EQ_INT(c.n_ended, 0); /* not from inside cancel */
        RIG_WAIT(&w.rig, c.n_ended == 1);
        CHECK_STATUS(c.end.status, ERR_CANCELED);
        RIG_WAIT(&w.rig, received_count(a.prefill, FRAME_CANCEL) == 1);
        if (a.decode) RIG_WAIT(&w.rig, received_count(a.decode, FRAME_CANCEL) == 1);
        w.be.cancel(w.be.self, c.id); /* an unknown id by now */
        world_check_idle(&w);
        world_close(&w);
    }
}

TEST(request_cancel_before_and_while_it_is_placed)
{
    struct world w;
    struct client c[3];
    world_open(&w, "", 60000);
    CHECK_OK(client_submit(&w, &c[0], TEN)); /* no node yet: it waits */
    rig_turn_ms(&w.rig, 200);
    CHECK_EQ_INT(c[0].n_ended, 0);
    w.be.cancel(w.be.self, c[0].id);
    RIG_WAIT(&w.rig, c[0].n_ended == 1);
    world_add(&w, ROLE_DECODE);
    rig_turn_ms(&w.rig, 1300);
    CHECK_OK(client_submit(&w, &c[1], TEN)); /* in the same turn */
    w.be.cancel(w.be.self, c[1].id);
    CHECK_OK(client_submit(&w, &c[2], TEN));
    /* about when the directory is asked */
    for (int i = 0; i < 2; i++) uv_run(loop_uv(w.rig.loop), UV_RUN_NOWAIT);
    w.be.cancel(w.be.self, c[2].id);
    RIG_WAIT(&w.rig, c[1].n_ended == 1 && c[2].n_ended == 1);
    for (int i = 0; i < 3; i++) CHECK_STATUS(c[i].end.status, ERR_CANCELED);
    world_check_idle(&w);
    world_close(&w);
}

TEST(request_cancel_from_the_token_callback)
{
    struct world w;
    struct client c;
    world_open(&w, "d", 1000);
    CHECK_OK(client_submit(&w, &c, TEN));
    struct attempt a = play_run(&w, &c);
    c.cancel_on_token = true;
    reply_tokens(a.decode, &a, 0, 5, FINISH_NONE);
    RIG_WAIT(&w.rig, c.n_ended == 1);
    CHECK_EQ_INT(c.n_tokens, 1); /* nothing after it */
    CHECK_STATUS(c.end.status, ERR_CANCELED);
    world_check_idle(&w);
    world_close(&w);
}

TEST(request_deadline_ends_it_in_every_state)
{
    struct world w;
    struct client c[5], lonely;
    world_open(&w, "pd", 60000);
    for (int i = 0; i < 4; i++) {
        CHECK_OK(client_submit(&w, &c[i],
                               (struct ask){ .max_tokens = 10, .deadline_ms = clock_ms() + 1500 }));
        play_split(&w, &c[i], (enum stage)i, 2);
    }
    RIG_WAIT(&w.rig, c[0].n_ended && c[1].n_ended && c[2].n_ended && c[3].n_ended);
    for (int i = 0; i < 4; i++) CHECK_STATUS(c[i].end.status, ERR_TIMEOUT);
    RIG_WAIT(&w.rig, received_count(w.nodes[0], FRAME_CANCEL) == 4 &&
                         received_count(w.nodes[1], FRAME_CANCEL) == 4);
    world_check_idle(&w);
    world_close(&w);
    world_open(&w, "", 60000);
    CHECK_OK(client_submit(&w, &lonely,
                           (struct ask){ .max_tokens = 10, .deadline_ms = clock_ms() + 300 }));
    RIG_WAIT(&w.rig, lonely.n_ended == 1);
    CHECK_STATUS(lonely.end.status, ERR_TIMEOUT);
    world_close(&w);
}

TEST(request_without_nodes_is_told_what_is_missing)
{
    struct world w;
    struct client c;
    struct serve_backend_stats st;
    world_open(&w, "p", 300);
    CHECK_OK(client_submit(&w, &c, TEN));
    RIG_WAIT_MS(&w.rig, c.n_ended == 1, 3000);
    CHECK_STATUS(c.end.status, ERR_UNAVAILABLE);
    CHECK(strstr(c.end.text, "1 prefill") != NULL);
    CHECK(c.end.retry_after_s > 0);
    w.be.stats(w.be.self, &st);
    CHECK(!st.ready && st.why[0]);
    world_add(&w, ROLE_DECODE);
    rig_turn_ms(&w.rig, 1300);
    w.be.stats(w.be.self, &st);
    CHECK(st.ready);
    world_check_idle(&w);
    world_close(&w);
}

TEST(request_moves_are_limited)
{
    struct world w;
    struct client c;
    world_open(&w, "d", 1000);
    CHECK_OK(client_submit(&w, &c, TEN));
    for (int i = 0; i <= REQUEST_MOVES_MAX; i++) {
        struct attempt a = play_run(&w, &c);
        CHECK_EQ_INT(a.number, i + 1);
        reply_failed(a.decode, &a, ERR_IO);
    }
    RIG_WAIT(&w.rig, c.n_ended == 1);
    CHECK_STATUS(c.end.status, ERR_UNAVAILABLE); /* 503: it is not the request's fault */
    CHECK(strstr(c.end.text, "as the test wanted") && strstr(c.end.text, "decode-0"));
    CHECK_EQ_INT(c.end.trace.n_moves, REQUEST_MOVES_MAX);
    world_check_idle(&w);
    world_close(&w);
}

/* When transfers between two nodes keep failing, the decode node does both. */
TEST(request_whose_transfers_keep_failing_is_not_split)
{
    struct world w;
    struct client c;
    world_open(&w, "pd", 1000);
    CHECK_OK(client_submit(&w, &c, TEN));
    for (int i = 0; i < REQUEST_SPLITS_MAX; i++) {
        struct attempt a = play_split(&w, &c, AT_RESERVE, 0);
        CHECK_EQ_INT(a.number, i + 1);
        reply_failed(a.decode, &a, ERR_CHECKSUM);
    }
    struct attempt a = play_run(&w, &c);
    CHECK_EQ_INT(a.number, REQUEST_SPLITS_MAX + 1);
    CHECK(a.decode == w.nodes[1]);
    reply_failed(a.decode, &a, ERR_INVALID);
    RIG_WAIT(&w.rig, c.n_ended == 1);
    RIG_WAIT(&w.rig, received_count(w.nodes[0], FRAME_CANCEL) == REQUEST_SPLITS_MAX);
    world_check_idle(&w);
    world_close(&w);
}

TEST(request_at_fault_fails_at_once)
{
    static const enum status faults[] = { ERR_TOO_LONG, ERR_INVALID };
    struct world w;
    world_open(&w, "pd", 1000);
    for (size_t i = 0; i < COUNT_OF(faults); i++) {
        struct client c;
        CHECK_OK(client_submit(&w, &c, TEN));
        struct attempt a = play_split(&w, &c, AT_RESERVE, 0);
        reply_failed(a.decode, &a, faults[i]);
        RIG_WAIT(&w.rig, c.n_ended == 1);
        CHECK_STATUS(c.end.status, faults[i]);
        /* the credit comes back */
        RIG_WAIT(&w.rig, received_count(w.nodes[0], FRAME_CANCEL) == i + 1);
    }
    world_check_idle(&w);
    world_close(&w);
}

TEST(request_malformed_answers_are_a_nodes_fault)
{
    struct world w;
    struct client c;
    world_open(&w, "d", 1000);
    CHECK_OK(client_submit(&w, &c, TEN));
    struct attempt a = play_run(&w, &c);
    CHECK_OK(cluster_send(a.decode->c, ENTRY_ID, FRAME_TOKENS, 0, 0, STR("\xff\xff\xff")));
    CHECK_OK(cluster_send(a.decode->c, ENTRY_ID, FRAME_FINISHED, a.request, a.number,
                          STR("\xff\xff\xff")));
    a = play_run(&w, &c);
    CHECK_OK(cluster_send(a.decode->c, ENTRY_ID, FRAME_FAILED, a.request, a.number,
                          STR("\xff\xff\xff")));
    a = play_run(&w, &c);
    reply_failed(a.decode, &a, (enum status) - 1000); /* a status this version does not know */
    a = play_run(&w, &c);
    reply_failed(a.decode, &a, OK);
    a = play_run(&w, &c);
    CHECK_EQ_INT(a.number, 5);
    play_rest(&w, &c, &a, 10);
    world_check_idle(&w);
    world_close(&w);
}

TEST(request_prompt_logprobs_come_before_the_tokens)
{
    struct world w;
    struct client c;
    world_open(&w, "pd", 1000);
    CHECK_OK(client_submit(&w, &c, (struct ask){ .max_tokens = 10, .prompt_logprobs = true }));
    struct attempt a = { 0 };
    RIG_WAIT(&w.rig,
             received_count(w.nodes[0], FRAME_ASK_CREDIT) + received_count(w.nodes[1], FRAME_RUN) >
                 0);
    bool split = received_count(w.nodes[0], FRAME_ASK_CREDIT) > 0;
    a = split ? play_split(&w, &c, AT_PREFILL, 0) : play_run(&w, &c);
    /* on another link than the logprobs, so it may come earlier */
    if (split) reply_tokens(a.decode, &a, 0, 2, FINISH_NONE);
    rig_turn_ms(&w.rig, 50);
    CHECK_EQ_INT(c.n_tokens, 0);
    Baton__PromptLogprobs m = BATON__PROMPT_LOGPROBS__INIT;
    struct buf b = { 0 };
    for (int i = 1; i < PROMPT_LEN; i++)
        token_record_add(&b, a.request, a.number, (uint32_t)i,
                         &(struct token_logprobs){ .id = 10 + i });
    m.records = (ProtobufCBinaryData){ b.len, (uint8_t *)b.data };
    reply(split ? a.prefill : a.decode, &a, FRAME_PROMPT_LOGPROBS, &m.base);
    RIG_WAIT(&w.rig, c.n_lp == PROMPT_LEN - 1);
    if (split) RIG_WAIT(&w.rig, c.n_tokens == 2);
    buf_release(&b);
    play_rest(&w, &c, &a, 10);
    world_check_idle(&w);
    world_close(&w);
}

TEST(request_limits_at_the_door)
{
    struct world w;
    struct client *c = MEM_ARRAY(struct client, 302);
    world_open(&w, "", 60000);
    for (int i = 0; i < 300; i++) CHECK_OK(client_submit(&w, &c[i], TEN));
    CHECK_STATUS(client_submit(&w, &c[300], TEN), ERR_FULL);
    for (int i = 0; i < 2; i++) w.be.cancel(w.be.self, c[i].id); /* a place is kept for c[300] */
    RIG_WAIT(&w.rig, c[0].n_ended == 1 && c[1].n_ended == 1);
    CHECK_OK(client_submit(&w, &c[301], TEN));
    scheduler_stop(w.s);
    for (int i = 2; i < 300; i++) CHECK_STATUS(c[i].end.status, ERR_CANCELED);
    CHECK_EQ_INT(c[300].n_ended, 0);
    CHECK_STATUS(client_submit(&w, &c[300], TEN), ERR_UNAVAILABLE);
    world_close(&w);
    mem_free(c);
}

TEST(request_stop_in_every_state_frees_everything)
{
    struct world w;
    struct client c[6];
    world_open(&w, "pd", 60000);
    for (int i = 0; i < 4; i++) {
        CHECK_OK(client_submit(&w, &c[i], TEN));
        play_split(&w, &c[i], (enum stage)i, 2);
    }
    CHECK_OK(client_submit(&w, &c[4], TEN));
    uv_run(loop_uv(w.rig.loop), UV_RUN_NOWAIT); /* being placed */
    CHECK_OK(client_submit(&w, &c[5], TEN));
    world_close(&w);
    for (int i = 0; i < 6; i++) {
        CHECK_EQ_INT(c[i].n_ended, 1);
        CHECK_STATUS(c[i].end.status, ERR_CANCELED);
    }
}

/* ---- many requests, nodes that answer, fail and lie at random ---- */

struct monkey {
    struct world *w;
    struct peer_node *n;
    uint64_t seed, draws;
    struct monkey *all; /* [NODES_MAX] */
};

static double draw(struct monkey *k) { return rng_uniform(k->seed, 1, k->draws++); }

static void monkey_tokens(struct monkey *k, const struct attempt *a, const Baton__Generation *g)
{
    uint32_t begin = (uint32_t)(g->tokens.len / 4) - g->n_prompt, at = begin,
             end = g->sampling->max_tokens;
    while (at < end) {
        double x = draw(k);
        if (x < 0.03) {
            reply_failed(k->n, a, x < 0.01 ? ERR_IO : x < 0.02 ? ERR_BUSY : ERR_CHECKSUM);
            return;
        }
        if (x < 0.05) at++;               /* skip one */
        if (x > 0.95 && at > begin) at--; /* repeat one */
        if (at >= end) break;
        reply_tokens(k->n, a, at, at + 1, at + 1 == end ? FINISH_LENGTH : FINISH_NONE);
        at++;
    }
    if (draw(k) > 0.02) reply_finished(k->n, a, end - begin);
    else reply_failed(k->n, a, ERR_IO);
}

static bool on_monkey(void *arg, const struct cluster_message *m)
{
    struct monkey *k = arg;
    struct attempt a = { .request = m->request, .number = m->attempt };
    static const enum status trouble[] = { ERR_BUSY,    ERR_IO,   ERR_STALE,
                                           ERR_TIMEOUT, ERR_FULL, ERR_NOMEM };
    if (m->type != FRAME_CANCEL && draw(k) < 0.08) {
        reply_failed(k->n, &a, trouble[(int)(draw(k) * 6)]);
        return true;
    }
    if (m->type == FRAME_ASK_CREDIT) {
        Baton__Credit c = BATON__CREDIT__INIT;
        reply(k->n, &a, FRAME_CREDIT, &c.base);
    } else if (m->type == FRAME_RESERVE) {
        Baton__Grant g = BATON__GRANT__INIT;
        reply(k->n, &a, FRAME_GRANT, &g.base);
    } else if (m->type ==
               FRAME_PREFILL) { /* its decode node sends tokens once the prompt is computed */
        Baton__Prefill *p = baton__prefill__unpack(NULL, m->body.n, (const uint8_t *)m->body.p);
        struct monkey *decode = &k->all[p->decode[0]->node - 1];
        monkey_tokens(decode, &a, p->generation);
        baton__prefill__free_unpacked(p, NULL);
    } else if (m->type == FRAME_RUN) {
        Baton__Run *p = baton__run__unpack(NULL, m->body.n, (const uint8_t *)m->body.p);
        monkey_tokens(k, &a, p->generation);
        baton__run__free_unpacked(p, NULL);
    }
    return true;
}

TEST(request_many_end_once_whatever_the_nodes_do)
{
    enum { N = 250 };
    struct world w;
    struct monkey k[NODES_MAX];
    struct client *c = MEM_ARRAY(struct client, N);
    size_t n_ok = 0, n_canceled = 0;
    world_open(&w, "ppdd", 5000);
    for (size_t i = 0; i < NODES_MAX; i++) {
        k[i] = (struct monkey){ .w = &w, .n = w.nodes[i], .seed = 42 + i, .all = k };
        w.nodes[i]->hook = on_monkey;
        w.nodes[i]->arg = &k[i];
    }
    for (size_t i = 0; i < N; i++) {
        CHECK_OK(client_submit(&w, &c[i], TEN));
        if (i % 10 == 3) c[i].cancel_on_token = true;
        if (i % 10 == 7) w.be.cancel(w.be.self, c[i / 2].id);
        if (i % 5 == 0) uv_run(loop_uv(w.rig.loop), UV_RUN_NOWAIT);
    }
    RIG_WAIT_MS(&w.rig, scheduler_n_live(w.s) == 0, 40000);
    for (size_t i = 0; i < N; i++) {
        CHECK_EQ_INT(c[i].n_ended, 1);
        n_ok += c[i].end.status == OK;
        n_canceled += c[i].end.status == ERR_CANCELED;
        if (c[i].end.status == OK) CHECK_EQ_INT(c[i].n_tokens, 10);
        for (uint32_t t = 0; t < c[i].n_tokens; t++) CHECK_EQ_INT(c[i].tokens[t], 1000 + t);
    }
    CHECK(n_ok > N / 2);
    CHECK(n_canceled > 0);
    world_check_idle(&w);
    world_close(&w);
    mem_free(c);
}

TEST_MAIN(CASE(request_split_goes_the_whole_way), CASE(request_names_the_ranks_of_both_nodes),
          CASE(request_moves_when_the_ranks_are_not_known_any_more), CASE(request_runs_on_one_node),
          CASE(request_with_nothing_to_decode_runs_on_one_node),
          CASE(request_waits_for_a_busy_node_and_asks_again),
          CASE(request_takes_room_as_soon_as_another_leaves_it),
          CASE(request_moves_when_the_decode_node_is_lost),
          CASE(request_moves_when_the_prefill_node_is_lost),
          CASE(request_does_not_mind_a_lost_prefill_node_while_tokens_flow),
          CASE(request_tries_suspects_when_there_is_nobody_else),
          CASE(request_avoids_all_suspects_however_many),
          CASE(request_too_large_is_told_what_the_nodes_that_could_serve_it_hold),
          CASE(request_goes_on_when_the_decode_node_says_that_the_first_token_is_lost),
          CASE(request_goes_on_alone_when_all_prefill_nodes_are_gone),
          CASE(request_ignores_messages_of_an_earlier_attempt_and_of_strangers),
          CASE(request_moves_when_a_token_is_missing),
          CASE(request_moves_when_the_last_tokens_are_missing),
          CASE(request_is_over_with_its_last_token_whatever_is_lost_then),
          CASE(request_cancel_in_every_state_tells_the_nodes),
          CASE(request_cancel_before_and_while_it_is_placed),
          CASE(request_cancel_from_the_token_callback),
          CASE(request_deadline_ends_it_in_every_state),
          CASE(request_without_nodes_is_told_what_is_missing), CASE(request_moves_are_limited),
          CASE(request_whose_transfers_keep_failing_is_not_split),
          CASE(request_at_fault_fails_at_once), CASE(request_malformed_answers_are_a_nodes_fault),
          CASE(request_prompt_logprobs_come_before_the_tokens), CASE(request_limits_at_the_door),
          CASE(request_stop_in_every_state_frees_everything),
          CASE(request_many_end_once_whatever_the_nodes_do))
