/* test_hedge.c - a second attempt beside a slow first one, where the client asks for it: which of
 * the two goes on, and that nothing is left of the other. The test plays the nodes. */
#include "scheduler/scheduler_internal.h"
#include "tests/unit/scheduler/scheduler_rig.h"

enum { HEDGE_MS = 30, N_TOKENS = 10 };

static const struct ask HEDGED = { .max_tokens = N_TOKENS, .admission = { .hedge_ms = HEDGE_MS } };

/* A request that has two attempts, both with KV on its way. */
struct race {
    struct world w;
    struct client c;
    struct attempt first, second;
};

static bool shares_a_node(const struct attempt *a, const struct attempt *b)
{
    return a->prefill == b->prefill || a->prefill == b->decode || a->decode == b->prefill ||
           a->decode == b->decode;
}

static void start_race(struct race *x, const char *roles, struct ask ask)
{
    world_open(&x->w, roles, 1000);
    uint64_t begin = clock_ms();
    CHECK_OK(client_submit(&x->w, &x->c, ask));
    x->first = play_split(&x->w, &x->c, AT_PREFILL, 0);
    x->second = play_split(&x->w, &x->c, AT_PREFILL, 0);
    CHECK(clock_ms() - begin >= HEDGE_MS);
    CHECK(x->first.request == x->c.id && x->second.request != x->c.id);
    CHECK(!shares_a_node(&x->first, &x->second));
}

static uint64_t outcome(const struct world *w, const char *name)
{
    char labels[48];
    snprintf(labels, sizeof labels, "outcome=\"%s\"", name);
    return counter_value(metrics_counter(w->rig.metrics, "baton_hedges_total", labels, ""));
}

static uint64_t counted(const struct world *w, const char *name)
{
    return counter_value(metrics_counter(w->rig.metrics, name, "", ""));
}

static void check_canceled_at(struct world *w, struct peer_node *n, const struct attempt *a)
{
    if (!n) return;
    RIG_WAIT(&w->rig, received_count(n, FRAME_CANCEL) == 1);
    const struct received_message *h = received_take(n, FRAME_CANCEL);
    CHECK(h->request == a->request && h->attempt == a->number);
}

static void check_canceled(struct world *w, const struct attempt *a)
{
    check_canceled_at(w, a->prefill, a);
    check_canceled_at(w, a->decode, a);
}

/* No node is told to stop anything more, and nothing is left. */
static void end_world(struct world *w)
{
    world_check_idle(w);
    for (size_t i = 0; i < w->n_nodes; i++)
        if (w->nodes[i]) CHECK_EQ_INT(received_count(w->nodes[i], FRAME_CANCEL), 0);
    CHECK_EQ_INT(w->s->entry.hedges.len, 0);
    CHECK_EQ_INT(w->s->entry.n_seconds, 0);
    CHECK(list_empty(&w->s->entry.orphans));
    world_close(w);
}

/* The winner's first token, and what it does to the other. */
static void win(struct race *x, const struct attempt *winner, const struct attempt *loser)
{
    reply_tokens(winner->decode, winner, 0, 1, FINISH_NONE);
    RIG_WAIT(&x->w.rig, x->c.n_tokens == 1);
    check_canceled(&x->w, loser);
    CHECK_EQ_INT(scheduler_n_live(x->w.s), 1);
    reply_tokens(loser->decode, loser, 0, 3, FINISH_NONE); /* it was on its way */
    play_rest(&x->w, &x->c, winner, N_TOKENS);
}

static void end_race(struct race *x, const char *name)
{
    CHECK_EQ_INT(x->c.n_ended, 1);
    CHECK_EQ_INT(outcome(&x->w, name), 1);
    CHECK_EQ_INT(outcome(&x->w, "first") + outcome(&x->w, "second") + outcome(&x->w, "none"), 1);
    CHECK_EQ_INT(counted(&x->w, "baton_requests_total"), 1);
    CHECK_EQ_INT(counted(&x->w, "baton_entry_prompt_tokens_total"), PROMPT_LEN);
    CHECK_EQ_INT(counted(&x->w, "baton_entry_output_tokens_total"), x->c.n_tokens);
    end_world(&x->w);
}

/* ---- who goes on ---- */

TEST(the_second_goes_on_when_it_has_the_first_token)
{
    struct race x;
    world_nodes.resume_ms = 10000;
    start_race(&x, "ppdd", HEDGED);
    win(&x, &x.second, &x.first);
    CHECK_EQ_INT(x.c.end.trace.hedged, GEN_HEDGED_SECOND);
    CHECK_EQ_INT(x.c.end.trace.n_moves, 0);
    CHECK(x.c.node == x.second.decode->id);
    CHECK(x.c.end.trace.first_token_ns >= HEDGE_MS * 1000000ull); /* since the client came */
    CHECK_EQ_INT(counted(&x.w, "baton_request_canceled_total"), 0);
    end_race(&x, "second");
}

TEST(the_first_goes_on_when_it_has_the_first_token)
{
    struct race x;
    world_nodes.resume_ms = 10000;
    start_race(&x, "ppdd", HEDGED);
    win(&x, &x.first, &x.second);
    CHECK_EQ_INT(x.c.end.trace.hedged, GEN_HEDGED_FIRST);
    CHECK(x.c.node == x.first.decode->id);
    end_race(&x, "first");
}

TEST(a_first_in_time_has_no_second)
{
    struct world w;
    struct client c;
    world_open(&w, "ppdd", 1000);
    CHECK_OK(client_submit(&w, &c, HEDGED));
    struct attempt a = play_split(&w, &c, AT_DECODE, 1);
    rig_turn_ms(&w.rig, 3 * HEDGE_MS);
    for (size_t i = 0; i < w.n_nodes; i++)
        CHECK_EQ_INT(received_count(w.nodes[i], FRAME_ASK_CREDIT), 0);
    play_rest(&w, &c, &a, N_TOKENS);
    CHECK_EQ_INT(c.end.trace.hedged, GEN_NOT_HEDGED);
    CHECK_EQ_INT(outcome(&w, "first") + outcome(&w, "second") + outcome(&w, "none"), 0);
    end_world(&w);
}

/* Nobody asks for it: nothing is sent. */
TEST(without_the_header_a_slow_first_stays_alone)
{
    struct world w;
    struct client c;
    world_open(&w, "ppdd", 1000);
    CHECK_OK(client_submit(&w, &c, (struct ask){ .max_tokens = N_TOKENS }));
    struct attempt a = play_split(&w, &c, AT_PREFILL, 0);
    rig_turn_ms(&w.rig, 200);
    for (size_t i = 0; i < w.n_nodes; i++)
        CHECK_EQ_INT(received_count(w.nodes[i], FRAME_ASK_CREDIT), 0);
    play_rest(&w, &c, &a, N_TOKENS);
    end_world(&w);
}

/* Each of the two sends the prompt's logprobs; the client gets them once, whoever is ahead. */
TEST(prompt_logprobs_come_once_from_both)
{
    struct race x;
    struct ask ask = HEDGED;
    ask.prompt_logprobs = true;
    start_race(&x, "ppdd", ask);
    const struct attempt *order[] = { &x.first, &x.second };
    for (int k = 0; k < 2; k++) {
        Baton__PromptLogprobs m = BATON__PROMPT_LOGPROBS__INIT;
        struct buf b = { 0 };
        for (uint32_t i = 1; i < (k ? PROMPT_LEN : PROMPT_LEN / 2); i++)
            token_record_add(&b, order[k]->request, order[k]->number, i,
                             &(struct token_logprobs){ .id = 10 + (int32_t)i });
        m.records = (ProtobufCBinaryData){ b.len, (uint8_t *)b.data };
        reply(order[k]->prefill, order[k], FRAME_PROMPT_LOGPROBS, &m.base);
        RIG_WAIT(&x.w.rig, x.c.n_lp == (k ? PROMPT_LEN : PROMPT_LEN / 2) - 1);
        buf_release(&b);
    }
    win(&x, &x.second, &x.first);
    CHECK_EQ_INT(x.c.n_lp, PROMPT_LEN - 1);
    end_race(&x, "second");
}

/* ---- losses ---- */

TEST(a_first_that_fails_leaves_it_to_the_second)
{
    struct race x;
    start_race(&x, "ppdd", HEDGED);
    reply_failed(x.first.decode, &x.first, ERR_INTERNAL);
    check_canceled(&x.w, &x.first);
    reply_tokens(x.second.decode, &x.second, 0, 1, FINISH_NONE);
    RIG_WAIT(&x.w.rig, x.c.n_tokens == 1);
    play_rest(&x.w, &x.c, &x.second, N_TOKENS);
    CHECK_EQ_INT(counted(&x.w, "baton_request_moves_total"), 0);
    end_race(&x, "second");
}

TEST(a_first_whose_node_is_lost_leaves_it_to_the_second)
{
    struct race x;
    start_race(&x, "ppdd", HEDGED);
    world_kill(&x.w, x.first.prefill);
    check_canceled_at(&x.w, x.first.decode, &x.first);
    play_rest(&x.w, &x.c, &x.second, N_TOKENS);
    end_race(&x, "second");
}

TEST(a_second_that_fails_leaves_it_to_the_first)
{
    static const enum status failures[] = { ERR_INTERNAL, ERR_BUSY, ERR_INVALID };
    for (size_t i = 0; i < COUNT_OF(failures); i++) {
        struct race x;
        start_race(&x, "ppdd", HEDGED);
        reply_failed(x.second.prefill, &x.second, failures[i]);
        check_canceled(&x.w, &x.second);
        rig_turn_ms(&x.w.rig, 150); /* no third */
        CHECK_EQ_INT(scheduler_n_live(x.w.s), 1);
        play_rest(&x.w, &x.c, &x.first, N_TOKENS);
        CHECK_EQ_INT(x.c.end.trace.n_moves, 0);
        CHECK_EQ_INT(counted(&x.w, "baton_request_failed_total"), 0);
        end_race(&x, "first");
    }
}

/* Both fail, in either order: who is left is moved as any request. */
TEST(when_both_fail_the_last_one_moves)
{
    for (int order = 0; order < 2; order++) {
        struct race x;
        start_race(&x, "ppdd", HEDGED);
        const struct attempt *lost = order ? &x.second : &x.first,
                             *left = order ? &x.first : &x.second;
        reply_failed(lost->decode, lost, ERR_INTERNAL);
        check_canceled(&x.w, lost);
        reply_failed(left->decode, left, ERR_INTERNAL);
        check_canceled(&x.w, left);
        struct attempt third = play_split(&x.w, &x.c, AT_DECODE, 2);
        CHECK(third.request == left->request && third.number == left->number + 1);
        play_rest(&x.w, &x.c, &third, N_TOKENS);
        CHECK_EQ_INT(x.c.end.trace.n_moves, 1);
        CHECK_EQ_INT(cells(&x.w, "prefill", "node", "move"), 1);
        end_race(&x, order ? "first" : "second");
    }
}

/* What has won is moved in mid-answer as well. */
TEST(a_second_that_goes_on_is_moved_like_any)
{
    struct race x;
    start_race(&x, "ppdd", HEDGED);
    reply_tokens(x.second.decode, &x.second, 0, 4, FINISH_NONE);
    RIG_WAIT(&x.w.rig, x.c.n_tokens == 4);
    check_canceled(&x.w, &x.first);
    world_kill(&x.w, x.second.decode);
    struct attempt b = play_split(&x.w, &x.c, AT_DECODE, 1);
    CHECK(b.request == x.second.request);
    play_rest(&x.w, &x.c, &b, N_TOKENS);
    CHECK_EQ_INT(x.c.end.trace.n_moves, 1);
    CHECK_EQ_INT(outcome(&x.w, "second"), 1);
    world_check_idle(&x.w);
    world_close(&x.w);
}

/* No other node would do better with what is wrong with the request. */
TEST(a_request_at_fault_ends_both)
{
    struct race x;
    start_race(&x, "ppdd", HEDGED);
    reply_failed(x.first.prefill, &x.first, ERR_INVALID);
    RIG_WAIT(&x.w.rig, x.c.n_ended == 1);
    CHECK_EQ_INT(x.c.end.status, ERR_INVALID);
    check_canceled(&x.w, &x.first);
    check_canceled(&x.w, &x.second);
    end_race(&x, "none");
}

/* ---- the client ---- */

TEST(a_client_that_leaves_ends_both)
{
    struct race x;
    start_race(&x, "ppdd", HEDGED);
    x.w.be.cancel(x.w.be.self, x.c.id);
    RIG_WAIT(&x.w.rig, x.c.n_ended == 1);
    CHECK_EQ_INT(x.c.end.status, ERR_CANCELED);
    check_canceled(&x.w, &x.first);
    check_canceled(&x.w, &x.second);
    CHECK_EQ_INT(counted(&x.w, "baton_request_canceled_total"), 1);
    end_race(&x, "none");
}

TEST(a_client_that_leaves_before_the_second_has_none)
{
    struct world w;
    struct client c;
    world_open(&w, "ppdd", 1000);
    CHECK_OK(client_submit(&w, &c, HEDGED));
    struct attempt a = play_split(&w, &c, AT_RESERVE, 0);
    w.be.cancel(w.be.self, c.id);
    RIG_WAIT(&w.rig, c.n_ended == 1);
    check_canceled(&w, &a);
    rig_turn_ms(&w.rig, 3 * HEDGE_MS);
    end_world(&w);
}

/* The client knows the number of the first. */
TEST(a_client_that_leaves_ends_the_second_that_went_on)
{
    struct race x;
    start_race(&x, "ppdd", HEDGED);
    reply_tokens(x.second.decode, &x.second, 0, 4, FINISH_NONE);
    RIG_WAIT(&x.w.rig, x.c.n_tokens == 4);
    check_canceled(&x.w, &x.first);
    x.w.be.cancel(x.w.be.self, x.c.id);
    RIG_WAIT(&x.w.rig, x.c.n_ended == 1);
    CHECK_EQ_INT(x.c.end.status, ERR_CANCELED);
    check_canceled(&x.w, &x.second);
    end_race(&x, "second");
}

TEST(a_deadline_ends_both)
{
    struct race x;
    struct ask ask = HEDGED;
    ask.deadline_ms = clock_ms() + 500;
    start_race(&x, "ppdd", ask);
    RIG_WAIT(&x.w.rig, x.c.n_ended == 1);
    CHECK_EQ_INT(x.c.end.status, ERR_TIMEOUT);
    check_canceled(&x.w, &x.first);
    check_canceled(&x.w, &x.second);
    end_race(&x, "none");
}

TEST(a_node_that_stops_ends_both)
{
    struct race x;
    start_race(&x, "ppdd", HEDGED);
    scheduler_stop(x.w.s);
    CHECK_EQ_INT(x.c.n_ended, 1);
    CHECK_EQ_INT(x.c.end.status, ERR_CANCELED);
    check_canceled(&x.w, &x.first);
    check_canceled(&x.w, &x.second);
    end_race(&x, "none");
}

/* ---- room ---- */

TEST(without_other_nodes_the_first_stays_alone)
{
    struct world w;
    struct client c;
    world_open(&w, "pd", 1000);
    CHECK_OK(client_submit(&w, &c, HEDGED));
    struct attempt a = play_split(&w, &c, AT_PREFILL, 0);
    rig_turn_ms(&w.rig, 200);
    CHECK_EQ_INT(received_count(w.nodes[0], FRAME_ASK_CREDIT), 0);
    CHECK_EQ_INT(received_count(w.nodes[1], FRAME_RUN), 0);
    play_rest(&w, &c, &a, N_TOKENS);
    CHECK_EQ_INT(outcome(&w, "none"), 1);
    end_world(&w);
}

static void set_max_seqs(struct world *w, uint32_t max_seqs)
{
    const struct view *v = &w->s->entry.view;
    for (size_t i = 0; i < w->n_nodes; i++) {
        struct node_record r = record_of(w, i);
        r.max_seqs = max_seqs;
        directory_publish(w->directory, &r);
    }
    RIG_WAIT(&w->rig, v->n_nodes == w->n_nodes && v->nodes[0].max_seqs == max_seqs);
}

/* Both nodes are full, and time in line is no node's fault: what waits there is neither hedged nor
 * overtaken. When a place is free the line has it. */
TEST(a_second_takes_nobodys_place)
{
    struct world w;
    struct client slow, other, waits;
    world_open(&w, "mm", 1000);
    set_max_seqs(&w, 1);
    CHECK_OK(client_submit(&w, &other, (struct ask){ .max_tokens = N_TOKENS }));
    struct attempt b = expect_run(&w);
    CHECK_OK(client_submit(&w, &slow, HEDGED));
    struct attempt a = expect_run(&w);
    CHECK_OK(client_submit(&w, &waits, HEDGED));
    rig_turn_ms(&w.rig, 200);
    for (size_t i = 0; i < w.n_nodes; i++) CHECK_EQ_INT(received_count(w.nodes[i], FRAME_RUN), 0);
    play_rest(&w, &other, &b, N_TOKENS);
    struct attempt c = expect_run(&w);
    CHECK(c.request == waits.id && c.decode == b.decode);
    play_rest(&w, &waits, &c, N_TOKENS);
    struct attempt second = expect_run(&w); /* now there is room for it */
    CHECK(second.request != slow.id && second.decode == b.decode);
    play_rest(&w, &slow, &second, N_TOKENS);
    check_canceled(&w, &a);
    end_world(&w);
}

static void on_taken(void *arg, enum status st, const struct directory_placed *placed)
{
    (void)placed;
    CHECK_OK(st);
    *(bool *)arg = true;
}

/* Another entry node was faster: the directory says so, and the second is not placed anywhere
 * else. */
TEST(a_second_whose_place_is_taken_is_given_up)
{
    struct world w;
    struct client c;
    bool taken = false;
    world_open(&w, "mm", 1000);
    set_max_seqs(&w, 1);
    CHECK_OK(client_submit(&w, &c, HEDGED));
    struct attempt a = expect_run(&w);
    const struct peer_node *other = w.nodes[a.decode == w.nodes[0]];
    const struct placement p = { .request = 1, .decode = other->id, .ttl_ms = 60000 };
    CHECK_OK(directory_reserve(w.directory, &p, on_taken, &taken));
    RIG_WAIT(&w.rig, taken);
    rig_turn_ms(&w.rig, 200);
    for (size_t i = 0; i < w.n_nodes; i++) CHECK_EQ_INT(received_count(w.nodes[i], FRAME_RUN), 0);
    CHECK_EQ_INT(scheduler_n_live(w.s), 1);
    directory_release(w.directory, p.request);
    play_rest(&w, &c, &a, N_TOKENS);
    CHECK_EQ_INT(outcome(&w, "first"), 0);
    CHECK_EQ_INT(outcome(&w, "none"), 1);
    CHECK_EQ_INT(c.end.trace.hedged, GEN_NOT_HEDGED);
    struct admit_numbers n;
    admit_numbers(w.s->entry.admission.admit, 0, clock_ms(), &n);
    CHECK_EQ_INT(n.n_prompt_tokens, PROMPT_LEN); /* what was not computed costs nothing */
    end_world(&w);
}

/* Whom the first has left is no better for the second, and there is nobody else. */
TEST(a_second_keeps_off_nodes_that_failed_the_first)
{
    for (int handed_back = 0; handed_back < 2; handed_back++) {
        struct world w;
        struct client c;
        struct ask ask = HEDGED;
        ask.admission.hedge_ms = 150;
        world_open(&w, "mm", 1000);
        CHECK_OK(client_submit(&w, &c, ask));
        struct attempt a = expect_run(&w);
        reply_blame(a.decode, &a, handed_back ? ERR_BUSY : ERR_IO,
                    handed_back ? BLAME_HANDED_BACK : BLAME_NODE);
        struct attempt b = expect_run(&w);
        CHECK(b.request == c.id && b.decode != a.decode);
        check_canceled(&w, &a);
        rig_turn_ms(&w.rig, 400);
        CHECK_EQ_INT(received_count(a.decode, FRAME_RUN), 0);
        CHECK_EQ_INT(scheduler_n_live(w.s), 1);
        play_rest(&w, &c, &b, N_TOKENS);
        CHECK_EQ_INT(outcome(&w, "none"), 1);
        end_world(&w);
    }
}

/* Without an output token the end tells who was first. */
TEST(an_answer_without_tokens_comes_from_one)
{
    struct world w;
    struct client c;
    struct ask ask = HEDGED;
    ask.max_tokens = 0;
    world_open(&w, "mm", 1000);
    CHECK_OK(client_submit(&w, &c, ask));
    struct attempt a = expect_run(&w), b = expect_run(&w);
    reply_finished(b.decode, &b, 0);
    RIG_WAIT(&w.rig, c.n_ended == 1);
    CHECK_OK(c.end.status);
    check_canceled(&w, &a);
    end_world(&w);
}

/* ---- what it costs ---- */

/* The tenant pays for the second prompt, and for nothing else. The node takes as many requests as
 * if there were no second. */
TEST(a_second_is_no_request_of_its_tenant)
{
    struct race x;
    struct client next;
    struct tenants tenants;
    struct gen_limits l;
    struct ask ask = HEDGED;
    tenants_init(&tenants);
    CHECK_OK(tenants_parse(&tenants,
                           STR("t k requests_per_minute=9 tokens_per_minute=200 concurrent=2\n"),
                           "keys", NULL));
    world_entry.tenants = &tenants;
    world_entry.max_requests = 2;
    ask.admission.tenant = tenants.n - 1;
    start_race(&x, "ppdd", ask);
    x.w.be.limits(x.w.be.self, tenants.n - 1, &l);
    CHECK_EQ_INT(l.requests_left, 8);
    CHECK_EQ_INT(l.tokens_left, 200 - 2 * PROMPT_LEN);
    struct serve_backend_stats stats;
    x.w.be.stats(x.w.be.self, &stats);
    CHECK(stats.n_running == 1 && stats.n_waiting == 0);
    ask.admission.hedge_ms = 0;
    CHECK_OK(client_submit(&x.w, &next, ask)); /* its second sequence, and the node's */
    struct attempt a = play_split(&x.w, &next, AT_DECODE, 1);
    play_rest(&x.w, &next, &a, N_TOKENS);
    win(&x, &x.second, &x.first);
    struct admit_numbers n;
    admit_numbers(x.w.s->entry.admission.admit, tenants.n - 1, clock_ms(), &n);
    CHECK(n.n_running == 0 && n.n_waiting == 0);
    CHECK_EQ_INT(n.n_output_tokens, 2 * N_TOKENS);
    CHECK_EQ_INT(n.n_prompt_tokens, 3 * PROMPT_LEN);
    end_world(&x.w);
    tenants_release(&tenants);
}

TEST(a_tenant_without_tokens_for_it_has_no_second)
{
    struct world w;
    struct client c;
    struct tenants tenants;
    struct ask ask = HEDGED;
    tenants_init(&tenants);
    CHECK_OK(tenants_parse(&tenants, STR("t k tokens_per_minute=60\n"), "keys", NULL));
    world_entry.tenants = &tenants;
    ask.admission.tenant = tenants.n - 1;
    world_open(&w, "ppdd", 1000);
    CHECK_OK(client_submit(&w, &c, ask));
    struct attempt a = play_split(&w, &c, AT_PREFILL, 0);
    rig_turn_ms(&w.rig, 200);
    CHECK_EQ_INT(scheduler_n_live(w.s), 1);
    play_rest(&w, &c, &a, N_TOKENS);
    CHECK_EQ_INT(outcome(&w, "none"), 1);
    end_world(&w);
    tenants_release(&tenants);
}

TEST_MAIN(CASE(the_second_goes_on_when_it_has_the_first_token),
          CASE(the_first_goes_on_when_it_has_the_first_token), CASE(a_first_in_time_has_no_second),
          CASE(without_the_header_a_slow_first_stays_alone),
          CASE(prompt_logprobs_come_once_from_both),
          CASE(a_first_that_fails_leaves_it_to_the_second),
          CASE(a_first_whose_node_is_lost_leaves_it_to_the_second),
          CASE(a_second_that_fails_leaves_it_to_the_first), CASE(when_both_fail_the_last_one_moves),
          CASE(a_second_that_goes_on_is_moved_like_any), CASE(a_request_at_fault_ends_both),
          CASE(a_client_that_leaves_ends_both),
          CASE(a_client_that_leaves_before_the_second_has_none),
          CASE(a_client_that_leaves_ends_the_second_that_went_on), CASE(a_deadline_ends_both),
          CASE(a_node_that_stops_ends_both), CASE(without_other_nodes_the_first_stays_alone),
          CASE(a_second_takes_nobodys_place), CASE(a_second_whose_place_is_taken_is_given_up),
          CASE(a_second_keeps_off_nodes_that_failed_the_first),
          CASE(an_answer_without_tokens_comes_from_one), CASE(a_second_is_no_request_of_its_tenant),
          CASE(a_tenant_without_tokens_for_it_has_no_second))
