/* test_request_model.c - a router whose nodes get another model while requests run: an answer is of
 * one model. The test plays the nodes. */
#include "scheduler/scheduler_internal.h"
#include "tests/unit/scheduler/scheduler_rig.h"

enum { TEXT = 5, OLD = 7, NEW = 8 };

static const struct ask TEN = { .max_tokens = 10 };

static void router_open(struct world *w)
{
    world_entry.text = TEXT;
    world_nodes.model = OLD;
    world_open(w, "d", 300);
    RIG_WAIT(&w->rig, w->s->entry.view.model == OLD);
}

/* The last node of the old model ends; one of the new is there. */
static void change_model(struct world *w)
{
    const uint64_t old = w->nodes[0]->id;
    world_nodes.model = NEW;
    world_add(w, ROLE_DECODE);
    RIG_WAIT(&w->rig, w->s->entry.view.n_nodes == 2);
    CHECK_EQ_INT(w->s->entry.view.model, OLD);
    directory_leave(w->directory, old);
    world_kill(w, w->nodes[0]);
    RIG_WAIT(&w->rig, w->s->entry.view.model == NEW);
}

TEST(model_answer_is_not_continued_by_another)
{
    struct world w;
    struct client c;
    router_open(&w);
    CHECK_OK(client_submit(&w, &c, TEN));
    struct attempt a = expect_run(&w);
    reply_tokens(a.decode, &a, 0, 3, FINISH_NONE);
    RIG_WAIT(&w.rig, c.n_tokens == 3);
    change_model(&w);
    RIG_WAIT(&w.rig, c.n_ended == 1);
    CHECK_STATUS(c.end.status, ERR_UNAVAILABLE);
    CHECK(strstr(c.end.text, "no node is left with the model that began this answer (fingerprint "
                             "0000000000000007)"));
    CHECK_EQ_INT(received_count(w.nodes[1], FRAME_RUN), 0);
    world_check_idle(&w);
    world_close(&w);
}

TEST(model_of_the_next_answer_is_the_new_one)
{
    struct world w;
    struct client c;
    router_open(&w);
    CHECK_OK(client_submit(&w, &c, TEN)); /* it has no token yet */
    struct attempt a = expect_run(&w);
    change_model(&w);
    a = expect_run(&w);
    CHECK(a.decode == w.nodes[1]);
    play_rest(&w, &c, &a, 10);
    CHECK_EQ_INT(c.end.trace.n_moves, 1);
    world_close(&w);
}

/* The prompt's logprobs are part of the answer. */
TEST(model_of_the_prompts_logprobs_stays)
{
    struct world w;
    struct client c;
    struct ask ask = TEN;
    struct buf b = { 0 };
    const struct token_logprobs t = { .id = 11 };
    Baton__PromptLogprobs m = BATON__PROMPT_LOGPROBS__INIT;
    ask.prompt_logprobs = true;
    router_open(&w);
    CHECK_OK(client_submit(&w, &c, ask));
    struct attempt a = expect_run(&w);
    token_record_add(&b, a.request, a.number, 1, &t);
    m.records = (ProtobufCBinaryData){ b.len, (uint8_t *)b.data };
    reply(a.decode, &a, FRAME_PROMPT_LOGPROBS, &m.base);
    RIG_WAIT(&w.rig, c.n_lp == 1);
    change_model(&w);
    RIG_WAIT(&w.rig, c.n_ended == 1);
    CHECK_STATUS(c.end.status, ERR_UNAVAILABLE);
    CHECK_EQ_INT(received_count(w.nodes[1], FRAME_RUN), 0);
    buf_release(&b);
    world_close(&w);
}

/* It was out of sight for a moment: the answer goes on, and new ones are of the new model. */
TEST(model_that_comes_back_goes_on)
{
    struct world w;
    struct client c, next;
    router_open(&w);
    CHECK_OK(client_submit(&w, &c, TEN));
    struct attempt a = expect_run(&w);
    reply_tokens(a.decode, &a, 0, 3, FINISH_NONE);
    RIG_WAIT(&w.rig, c.n_tokens == 3);
    w.s->entry.grace_ms = 60000;
    change_model(&w);
    world_nodes.model = OLD;
    world_add(&w, ROLE_DECODE);
    a = expect_run(&w);
    CHECK(a.decode == w.nodes[2]);
    CHECK_OK(client_submit(&w, &next, TEN));
    struct attempt b = expect_run(&w);
    CHECK(b.decode == w.nodes[1]);
    play_rest(&w, &c, &a, 10);
    play_rest(&w, &next, &b, 10);
    world_close(&w);
}

TEST_MAIN(CASE(model_answer_is_not_continued_by_another),
          CASE(model_of_the_next_answer_is_the_new_one), CASE(model_of_the_prompts_logprobs_stays),
          CASE(model_that_comes_back_goes_on))
