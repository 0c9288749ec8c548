/* test_request_prefix.c - requests whose prompts begin alike: on which nodes they are placed, what
 * counts as load there, and what is made of nodes that had less than they should have had. */
#include <stdio.h>
#include <string.h>

#include "scheduler/scheduler_internal.h"
#include "tests/harness/test.h"
#include "tests/unit/scheduler/scheduler_rig.h"

enum { KEPT = 32 /* whole blocks before the prompt's last token */ };

static void open_caching(struct world *w, const char *roles)
{
    world_nodes.prefix_cache = true;
    world_open(w, roles, 5000);
}

static uint64_t counter(struct world *w, const char *name, const char *labels)
{
    return counter_value(metrics_counter(w->rig.metrics, name, labels, ""));
}

static void reply_report(const struct attempt *a, uint32_t n_cached)
{
    Baton__PrefillReport p = BATON__PREFILL_REPORT__INIT;
    p.n_cached = n_cached;
    p.transport = "tcp";
    reply(a->prefill, a, FRAME_PREFILL_REPORT, &p.base);
}

static uint64_t placed_tokens(struct world *w)
{
    size_t n;
    char topics[512];
    uint64_t sum = 0;
    struct node_record *nodes = directory_local_view(w->directory, "default", &n, topics);
    for (size_t i = 0; i < n; i++) sum += nodes[i].placed_tokens;
    mem_free(nodes);
    return sum;
}

/* A request from its beginning to its end, of which the prefill node had so many tokens. */
static struct attempt play_whole(struct world *w, struct client *c, uint32_t n_cached)
{
    CHECK_OK(client_submit(w, c, (struct ask){ .max_tokens = 2 }));
    struct attempt a = play_split(w, c, AT_PREFILL, 0);
    reply_report(&a, n_cached);
    rig_turn_ms(&w->rig, 5);
    play_rest(w, c, &a, 2);
    return a;
}

TEST(prefix_equal_prompts_go_to_the_node_that_has_it)
{
    struct world w;
    struct client c;
    open_caching(&w, "pppd");
    struct attempt first = play_whole(&w, &c, 0);
    CHECK_EQ_INT(c.end.trace.n_expected, 0);
    for (int i = 0; i < 10; i++) {
        struct attempt a = play_whole(&w, &c, KEPT);
        CHECK(a.prefill == first.prefill);
        CHECK_EQ_INT(c.end.trace.n_expected, KEPT);
        CHECK_EQ_INT(c.end.trace.n_decode_expected, KEPT);
        CHECK_EQ_INT(c.end.trace.n_cached, KEPT);
    }
    CHECK_EQ_INT(counter(&w, "baton_prefix_asked_tokens_total", ""), 11 * PROMPT_LEN);
    CHECK_EQ_INT(counter(&w, "baton_prefix_expected_tokens_total", ""), 10 * KEPT);
    CHECK_EQ_INT(counter(&w, "baton_prefix_cached_tokens_total", ""), 10 * KEPT);
    CHECK(counter(&w, "baton_prefix_placements_total", "by=\"prefix\"") > 0);
    CHECK_EQ_INT(counter(&w, "baton_prefix_missed_total", ""), 10); /* grants of 16 tokens */
    world_check_idle(&w);
    world_close(&w);
}

TEST(prefix_tokens_count_as_load_until_they_are_computed)
{
    struct world w;
    struct client c[2];
    open_caching(&w, "pd");
    CHECK_OK(client_submit(&w, &c[0], (struct ask){ .max_tokens = 9 }));
    struct attempt a = play_split(&w, &c[0], AT_PREFILL, 0);
    CHECK_EQ_INT(placed_tokens(&w), PROMPT_LEN);
    CHECK_EQ_INT(view_find(&w.s->entry.view, a.prefill->id)->placed_tokens, PROMPT_LEN);
    reply_tokens(a.decode, &a, 0, 1, FINISH_NONE);
    RIG_WAIT(&w.rig, c[0].n_tokens == 1);
    CHECK_EQ_INT(placed_tokens(&w), 0);
    CHECK_EQ_INT(view_find(&w.s->entry.view, a.prefill->id)->placed_tokens, 0);
    CHECK_OK(client_submit(&w, &c[1], (struct ask){ .max_tokens = 9 }));
    struct attempt b = play_split(&w, &c[1], AT_PREFILL, 0);
    CHECK_EQ_INT(placed_tokens(&w), PROMPT_LEN - KEPT);
    CHECK_EQ_INT(view_find(&w.s->entry.view, b.prefill->id)->placed_tokens, PROMPT_LEN - KEPT);
    play_rest(&w, &c[0], &a, 9);
    play_rest(&w, &c[1], &b, 9);
    world_check_idle(&w);
    world_close(&w);
}

/* Its decode node has nothing else to do, and only 8 tokens are left to compute. */
TEST(prefix_a_busy_prefill_node_gives_way_to_the_decode_node)
{
    struct world w;
    struct client c;
    struct directory_placed placed;
    open_caching(&w, "pd");
    struct attempt first = play_whole(&w, &c, 0);
    const struct prefix_query q = {
        .n_tokens = 5000, .compute = first.prefill->id, .decode = first.decode->id, .ns = 1000000
    };
    const struct placement p = { .request = 77,
                                 .prefill = first.prefill->id,
                                 .decode = first.decode->id,
                                 .tokens = 5000,
                                 .blocks = 1,
                                 .ttl_ms = 60000,
                                 .prefix = &q };
    CHECK_OK(directory_local_reserve(w.directory, &p, 0, &placed));
    CHECK_OK(client_submit(&w, &c, (struct ask){ .max_tokens = 2 }));
    struct attempt a = expect_run(&w);
    CHECK(a.decode == first.decode);
    reply_tokens(a.decode, &a, 0, 2, FINISH_LENGTH);
    reply_finished(a.decode, &a, 2);
    RIG_WAIT(&w.rig, c.n_ended == 1);
    CHECK_OK(c.end.status);
    CHECK_EQ_INT(c.end.trace.n_expected, KEPT);
    CHECK_EQ_STR(c.end.trace.prefill_node, c.end.trace.decode_node);
    directory_local_release(w.directory, 77);
    world_check_idle(&w);
    world_close(&w);
}

/* A moved request is not taken for a prompt that its decode node has. */
TEST(prefix_a_moved_request_is_split_again)
{
    struct world w;
    struct client c;
    open_caching(&w, "ppd");
    CHECK_OK(client_submit(&w, &c, (struct ask){ .max_tokens = 3 }));
    struct attempt a = play_split(&w, &c, AT_PREFILL, 0);
    world_kill(&w, a.prefill);
    struct attempt b = play_split(&w, &c, AT_PREFILL, 0);
    CHECK(b.prefill != a.prefill && b.decode == a.decode);
    play_rest(&w, &c, &b, 3);
    CHECK_EQ_INT(c.end.trace.n_moves, 1);
    world_check_idle(&w);
    world_close(&w);
}

/* Cached positions have no logprobs: nobody is asked for, and nothing is expected. */
TEST(prefix_prompt_logprobs_ask_for_nobody)
{
    struct world w;
    struct client c;
    open_caching(&w, "pd");
    CHECK_OK(client_submit(&w, &c, (struct ask){ .max_tokens = 1, .prompt_logprobs = true }));
    struct attempt a = play_split(&w, &c, AT_PREFILL, 0);
    reply_report(&a, 0);
    CHECK_EQ_INT(placed_tokens(&w), PROMPT_LEN);
    w.be.cancel(w.be.self, c.id);
    RIG_WAIT(&w.rig, c.n_ended == 1);
    CHECK_EQ_INT(counter(&w, "baton_prefix_asked_tokens_total", ""), 0);
    world_check_idle(&w);
    world_close(&w);
}

static struct attempt play_whole_run(struct world *w, struct client *c)
{
    CHECK_OK(client_submit(w, c, (struct ask){ .max_tokens = 2 }));
    struct attempt a = expect_run(w);
    reply_tokens(a.decode, &a, 0, 2, FINISH_LENGTH);
    reply_finished(a.decode, &a, 2);
    RIG_WAIT(&w->rig, c->n_ended == 1);
    CHECK_OK(c->end.status);
    return a;
}

/* So much waits there that another node computes the prompt sooner; it could fetch it, too. */
TEST(prefix_the_keeper_that_was_too_busy_is_named)
{
    struct world w;
    struct client c;
    struct directory_placed placed;
    world_nodes.n_followers = 3;
    open_caching(&w, "mm");
    struct attempt first = play_whole_run(&w, &c);
    CHECK_EQ_STR(c.end.trace.kept_node, "");
    CHECK_EQ_INT(first.n_kept_ranks, 0);
    const struct prefix_query q = { .n_tokens = 5000, .compute = first.decode->id, .ns = 1000000 };
    const struct placement p = { .request = 77,
                                 .decode = first.decode->id,
                                 .tokens = 5000,
                                 .blocks = 1,
                                 .ttl_ms = 60000,
                                 .prefix = &q };
    CHECK_OK(directory_local_reserve(w.directory, &p, 0, &placed));
    view_refresh(&w.s->entry.view);
    RIG_WAIT(&w.rig, view_find(&w.s->entry.view, first.decode->id)->placed_tokens >= 5000);
    struct attempt second = play_whole_run(&w, &c);
    CHECK(second.decode != first.decode);
    CHECK_EQ_INT(second.n_kept_ranks, 4);
    CHECK_EQ_INT(c.end.trace.n_expected, 0);
    CHECK_EQ_INT(c.end.trace.n_kept, KEPT);
    CHECK_EQ_STR(c.end.trace.kept_node, first.decode->id == 1 ? "mixed-0" : "mixed-1");
    struct attempt third = play_whole_run(&w, &c);
    CHECK(third.decode == second.decode);
    CHECK_EQ_INT(c.end.trace.n_expected, KEPT);
    CHECK_EQ_INT(c.end.trace.n_kept, 0);
    directory_local_release(w.directory, 77);
    world_check_idle(&w);
    world_close(&w);
}

/* Tells how many placements there were before it, and is over. */
static uint64_t fence_now(struct world *w, uint64_t node)
{
    struct directory_placed placed;
    const struct placement p = {
        .request = 77, .decode = node, .tokens = 1, .blocks = 1, .ttl_ms = 60000
    };
    CHECK_OK(directory_local_reserve(w->directory, &p, 0, &placed));
    directory_local_release(w->directory, 77);
    return placed.fence;
}

/* As this node sees it the keeper has another model now, whatever the directory was told of it: the
 * request is placed again when the view is new. The view may become so before, and half of the
 * requests choose the keeper themselves. */
TEST(prefix_a_keeper_of_another_model_is_refused)
{
    struct world w;
    struct client c;
    uint64_t n_placed = 0;
    open_caching(&w, "mm");
    const uint64_t keeper = play_whole_run(&w, &c).decode->id;
    for (int i = 0; i < 40 && n_placed != 2; i++) {
        const uint64_t before = fence_now(&w, keeper);
        for (size_t k = 0; k < w.s->entry.view.n_nodes; k++)
            if (w.s->entry.view.nodes[k].node == keeper) w.s->entry.view.nodes[k].model++;
        CHECK(play_whole_run(&w, &c).decode->id == keeper);
        n_placed = fence_now(&w, keeper) - before - 1;
    }
    CHECK_EQ_INT(n_placed, 2);
    world_check_idle(&w);
    world_close(&w);
}

TEST(prefix_nodes_without_a_cache_are_chosen_by_load)
{
    struct world w;
    struct client c;
    world_nodes.prefix_cache = false;
    world_open(&w, "ppd", 5000);
    for (int i = 0; i < 3; i++) play_whole(&w, &c, 0);
    CHECK_EQ_INT(c.end.trace.n_expected, 0);
    CHECK_EQ_INT(counter(&w, "baton_prefix_asked_tokens_total", ""), 0);
    world_check_idle(&w);
    world_close(&w);
}

TEST_MAIN(CASE(prefix_equal_prompts_go_to_the_node_that_has_it),
          CASE(prefix_tokens_count_as_load_until_they_are_computed),
          CASE(prefix_a_busy_prefill_node_gives_way_to_the_decode_node),
          CASE(prefix_a_moved_request_is_split_again), CASE(prefix_prompt_logprobs_ask_for_nobody),
          CASE(prefix_the_keeper_that_was_too_busy_is_named),
          CASE(prefix_a_keeper_of_another_model_is_refused),
          CASE(prefix_nodes_without_a_cache_are_chosen_by_load))
