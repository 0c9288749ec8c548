/* test_request_lacking.c - requests that a decode node was to compute alone, for it should have had
 * nearly all of the prompt, and that it hands back, since it has evicted it. */
#include <string.h>

#include "scheduler/scheduler_internal.h"
#include "tests/harness/test.h"
#include "tests/unit/scheduler/scheduler_rig.h"

enum { KEPT = 32 /* whole blocks before the prompt's last token */, AGE_S = 60 };

static uint64_t counter(struct world *w, const char *name)
{
    return counter_value(metrics_counter(w->rig.metrics, name, "", ""));
}

/* So much waits at the prefill node that the decode node would compute a short rest sooner. */
static void open_busy(struct world *w, struct client *c)
{
    world_nodes.prefix_cache = true;
    world_open(w, "pd", 5000);
    CHECK_OK(client_submit(w, c, (struct ask){ .max_tokens = 2 }));
    struct attempt a = play_split(w, c, AT_PREFILL, 0);
    play_rest(w, c, &a, 2);
    struct node_record r = record_of(w, 0);
    r.waiting_tokens = 1000000;
    directory_publish(w->directory, &r);
    view_refresh(&w->s->entry.view);
    RIG_WAIT(&w->rig, view_find(&w->s->entry.view, w->nodes[0]->id)->unplaced_tokens > 0);
}

static uint32_t most_computed_of(const struct received_message *h)
{
    Baton__Run *run = baton__run__unpack(NULL, h->body.len, (const uint8_t *)h->body.data);
    CHECK(run != NULL);
    const uint32_t n = run->most_computed;
    baton__run__free_unpacked(run, NULL);
    return n;
}

static struct attempt expect_limited_run(struct world *w)
{
    struct attempt a = { 0 };
    struct received_message *h = world_expect(w, FRAME_RUN, &a.decode);
    CHECK_EQ_INT(most_computed_of(h), PREFIX_REST_MAX);
    a.request = h->request;
    a.number = h->attempt;
    return a;
}

static void reply_lacking(const struct attempt *a, uint32_t n_cached)
{
    Baton__Failed f = BATON__FAILED__INIT;
    f.status = ERR_BUSY;
    f.text = "as the test wanted";
    f.blame = BLAME_HANDED_BACK;
    f.lacks_prompt = true;
    f.n_cached = n_cached;
    reply(a->decode, a, FRAME_FAILED, &f.base);
}

TEST(lacking_goes_to_a_prefill_node_at_once)
{
    struct world w;
    struct client c;
    open_busy(&w, &c);
    CHECK_OK(client_submit(&w, &c, (struct ask){ .max_tokens = 2 }));
    struct attempt a = expect_limited_run(&w);
    reply_lacking(&a, 0);
    struct attempt b = play_split(&w, &c, AT_PREFILL, 0);
    CHECK(b.decode == a.decode); /* it is well, and no other node decodes */
    play_rest(&w, &c, &b, 2);
    CHECK_EQ_INT(c.end.trace.n_moves, 0);
    CHECK_EQ_INT(cells(&w, "run", "handed_back", "requeue"), 1);
    CHECK_EQ_INT(counter(&w, "baton_prefix_handed_back_total"), 1);
    CHECK(counter(&w, "baton_prefix_missed_total") >= 1);
    world_check_idle(&w);
    world_close(&w);
}

/* The node had been chosen long ago, so it has evicted what it had: the directory is told. */
TEST(lacking_is_told_to_the_directory)
{
    struct world w;
    struct client c;
    open_busy(&w, &c);
    CHECK_OK(client_submit(&w, &c, (struct ask){ .max_tokens = 2 }));
    struct attempt a = expect_limited_run(&w);
    struct request *r = LIST_FIRST(&w.s->entry.live, struct request, link);
    CHECK_EQ_INT(r->prefix.expected.compute.tokens, KEPT);
    r->prefix.expected.compute.at_s = AGE_S; /* as if not just now */
    const struct prefix_entry *p = &w.s->entry.prefix;
    CHECK_EQ_INT(p->drops[0].node, 0);
    reply_lacking(&a, 16);
    struct attempt b = play_split(&w, &c, AT_CREDIT, 0);
    CHECK_EQ_INT(p->n_drops, 0); /* the next placement has taken it along: */
    CHECK_EQ_INT(p->drops[0].node, a.decode->id);
    CHECK_EQ_INT(p->drops[0].at_s, AGE_S);
    w.be.cancel(w.be.self, c.id);
    RIG_WAIT(&w.rig, c.n_ended == 1);
    CHECK(b.request == a.request);
    world_check_idle(&w);
    world_close(&w);
}

/* A node that was told of no limit, or lies about it, bounces nothing to and fro. */
TEST(lacking_without_a_limit_is_a_request_handed_back)
{
    struct world w;
    struct client c;
    world_nodes.prefix_cache = true;
    world_open(&w, "m", 5000);
    CHECK_OK(client_submit(&w, &c, (struct ask){ .max_tokens = 2 }));
    for (uint64_t i = 1; i <= 3; i++) {
        struct attempt a = { 0 };
        struct received_message *h = world_expect(&w, FRAME_RUN, &a.decode);
        CHECK_EQ_INT(most_computed_of(h), 0);
        a.request = h->request;
        a.number = h->attempt;
        reply_lacking(&a, 0);
        RIG_WAIT(&w.rig, cells(&w, "run", "handed_back", "requeue") == i);
        struct request *r = LIST_FIRST(&w.s->entry.live, struct request, link);
        CHECK(r->wait_until_ms >= clock_ms()); /* after a pause, elsewhere if there were others */
        CHECK_EQ_INT(r->gave_back, a.decode->id);
    }
    struct attempt a = expect_run(&w);
    reply_tokens(a.decode, &a, 0, 2, FINISH_LENGTH);
    reply_finished(a.decode, &a, 2);
    RIG_WAIT(&w.rig, c.n_ended == 1);
    CHECK_OK(c.end.status);
    CHECK_EQ_INT(counter(&w, "baton_prefix_handed_back_total"), 0);
    world_check_idle(&w);
    world_close(&w);
}

/* A decode node of an earlier version computes it all the same. */
TEST(lacking_is_not_known_to_every_node)
{
    struct world w;
    struct client c;
    open_busy(&w, &c);
    CHECK_OK(client_submit(&w, &c, (struct ask){ .max_tokens = 2 }));
    struct attempt a = expect_limited_run(&w);
    reply_tokens(a.decode, &a, 0, 2, FINISH_LENGTH);
    reply_finished(a.decode, &a, 2); /* n_cached 0 */
    RIG_WAIT(&w.rig, c.n_ended == 1);
    CHECK_OK(c.end.status);
    CHECK_EQ_INT(counter(&w, "baton_prefix_handed_back_total"), 0);
    CHECK(counter(&w, "baton_prefix_missed_total") >= 1);
    world_check_idle(&w);
    world_close(&w);
}

TEST_MAIN(CASE(lacking_goes_to_a_prefill_node_at_once), CASE(lacking_is_told_to_the_directory),
          CASE(lacking_without_a_limit_is_a_request_handed_back),
          CASE(lacking_is_not_known_to_every_node))
