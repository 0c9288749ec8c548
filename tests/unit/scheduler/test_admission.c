/* test_admission.c - requests in the line of an entry node: their order, who gives way, and what
 * becomes of those that wait too long. The test plays a node with room for few. */
#include "tests/unit/scheduler/scheduler_rig.h"

#include <string.h>

#include "scheduler/scheduler_internal.h"

enum { LOW = 1, NORMAL, HIGH };

struct line {
    struct world w;
    struct tenants tenants;
    struct client first; /* has the only place */
    struct attempt running;
    uint32_t per_s; /* prompt tokens per second, as the node says from the next publish on */
};

static struct ask ask_of(uint32_t tenant, int32_t priority)
{
    return (struct ask){ .max_tokens = 3, .admission = { .tenant = tenant, .priority = priority } };
}

/* A mixed node with room for one, which a first request has. */
static void open_line(struct line *l, uint32_t max_requests, uint32_t max_queue_ms)
{
    l->per_s = 0;
    tenants_init(&l->tenants);
    CHECK_OK(tenants_parse(&l->tenants, STR("low k class=low\nnormal l\nhigh m class=high\n"),
                           "keys", NULL));
    world_entry.tenants = &l->tenants;
    world_entry.max_requests = max_requests;
    world_entry.max_queue_ms = max_queue_ms;
    world_open(&l->w, "m", 1000);
    struct node_record r = record_of(&l->w, 0);
    r.max_seqs = 1;
    directory_publish(l->w.directory, &r);
    const struct view *v = &l->w.s->entry.view;
    RIG_WAIT(&l->w.rig, v->n_nodes == 1 && v->nodes[0].max_seqs == 1);
    CHECK_OK(client_submit(&l->w, &l->first, ask_of(NORMAL, 0)));
    l->running = expect_run(&l->w);
}

static void close_line(struct line *l)
{
    world_close(&l->w);
    tenants_release(&l->tenants);
}

static void end_running(struct line *l, struct client *c) { play_rest(&l->w, c, &l->running, 3); }

/* Ends what runs, and checks that this one is next. */
static void is_next(struct line *l, struct client *running, struct client *next)
{
    end_running(l, running);
    l->running = expect_run(&l->w);
    CHECK_EQ_INT(l->running.request, next->id);
}

TEST(the_line_has_its_order)
{
    struct line l;
    struct client low, late, usual, high, soon;
    open_line(&l, 0, 0);
    CHECK_OK(client_submit(&l.w, &low, ask_of(LOW, 0)));
    CHECK_OK(client_submit(&l.w, &late, ask_of(NORMAL, 7)));
    CHECK_OK(client_submit(&l.w, &usual, ask_of(NORMAL, 0)));
    CHECK_OK(client_submit(&l.w, &high, ask_of(HIGH, 9)));
    CHECK_OK(client_submit(&l.w, &soon, ask_of(NORMAL, -1)));
    rig_turn_ms(&l.w.rig, 60);
    CHECK_EQ_INT(received_count(l.w.nodes[0], FRAME_RUN), 0); /* nobody else is sent */
    is_next(&l, &l.first, &high);
    is_next(&l, &high, &soon);
    is_next(&l, &soon, &usual);
    is_next(&l, &usual, &late);
    is_next(&l, &late, &low);
    end_running(&l, &low);
    world_check_idle(&l.w);
    close_line(&l);
}

TEST(who_leaves_the_line_is_passed_over)
{
    struct line l;
    struct client a, b;
    open_line(&l, 0, 0);
    CHECK_OK(client_submit(&l.w, &a, ask_of(NORMAL, 0)));
    CHECK_OK(client_submit(&l.w, &b, ask_of(NORMAL, 0)));
    rig_turn_ms(&l.w.rig, 30);
    l.w.be.cancel(l.w.be.self, a.id);
    RIG_WAIT(&l.w.rig, a.n_ended == 1);
    CHECK_STATUS(a.end.status, ERR_CANCELED);
    is_next(&l, &l.first, &b);
    end_running(&l, &b);
    world_check_idle(&l.w);
    close_line(&l);
}

/* The node refuses a request, and another one takes the place while it pauses; then it goes before
 * all that are in line. */
TEST(who_had_its_turn_does_not_wait_in_line_again)
{
    struct line l;
    struct client high, high2;
    open_line(&l, 0, 0);
    CHECK_OK(client_submit(&l.w, &high, ask_of(HIGH, 0)));
    reply_failed(l.running.decode, &l.running, ERR_BUSY);
    l.running = expect_run(&l.w);
    CHECK_EQ_INT(l.running.request, high.id);
    CHECK_OK(client_submit(&l.w, &high2, ask_of(HIGH, 0)));
    rig_turn_ms(&l.w.rig, 2 * REQUEST_PAUSE_BUSY_MS);
    is_next(&l, &high, &l.first);
    is_next(&l, &l.first, &high2);
    end_running(&l, &high2);
    world_check_idle(&l.w);
    close_line(&l);
}

TEST(the_lowest_class_gives_way_when_the_node_is_full)
{
    struct line l;
    struct client low, low2, normal, high, high2;
    open_line(&l, 4, 0);
    CHECK_OK(client_submit(&l.w, &low, ask_of(LOW, 0)));
    CHECK_OK(client_submit(&l.w, &low2, ask_of(LOW, 0)));
    CHECK_OK(client_submit(&l.w, &normal, ask_of(NORMAL, 0)));
    CHECK_STATUS(client_submit(&l.w, &high2, ask_of(LOW, 0)), ERR_FULL);
    CHECK(high2.why.retry_after_s >= 1 && strstr(high2.why.err.text, "--max-concurrency"));
    CHECK_OK(client_submit(&l.w, &high, ask_of(HIGH, 0)));
    RIG_WAIT(&l.w.rig, low2.n_ended == 1); /* the newest of the lowest class */
    CHECK_STATUS(low2.end.status, ERR_FULL);
    CHECK(low2.end.retry_after_s >= 1 && low2.end.retry[0] && strstr(low2.end.text, "gave way"));
    CHECK_OK(client_submit(&l.w, &high2, ask_of(HIGH, 0)));
    RIG_WAIT(&l.w.rig, low.n_ended == 1);
    is_next(&l, &l.first, &high);
    is_next(&l, &high, &high2);
    is_next(&l, &high2, &normal);
    end_running(&l, &normal);
    world_check_idle(&l.w);
    close_line(&l);
}

TEST(who_waits_too_long_is_refused_after_all)
{
    struct line l;
    struct client a, b;
    struct ask ttft = ask_of(NORMAL, 0);
    open_line(&l, 0, 400);
    ttft.admission.ttft_ms = 150;
    CHECK_OK(client_submit(&l.w, &a, ttft));
    CHECK_OK(client_submit(&l.w, &b, ask_of(NORMAL, 0)));
    RIG_WAIT(&l.w.rig, a.n_ended == 1);
    CHECK_STATUS(a.end.status, ERR_BUSY);
    CHECK(a.end.retry_after_s >= 1 && strstr(a.end.text, "x-baton-ttft-ms is 150"));
    CHECK(a.end.takes_others);
    CHECK_EQ_INT(b.n_ended, 0);
    RIG_WAIT(&l.w.rig, b.n_ended == 1);
    CHECK_STATUS(b.end.status, ERR_BUSY);
    CHECK(b.end.retry_after_s >= 1 && strstr(b.end.text, "has been full for"));
    CHECK(!b.end.takes_others);
    end_running(&l, &l.first);
    world_check_idle(&l.w);
    close_line(&l);
}

static void publish(struct line *l, bool draining, uint32_t n_blocks)
{
    struct node_record r = record_of(&l->w, 0);
    r.max_seqs = 1;
    r.draining = draining;
    r.n_blocks = n_blocks;
    r.prefill_tokens_per_s = l->per_s;
    directory_publish(l->w.directory, &r);
    const struct view *v = &l->w.s->entry.view;
    RIG_WAIT(&l->w.rig, v->nodes[0].draining == draining && v->nodes[0].n_blocks == n_blocks &&
                            v->nodes[0].prefill_tokens_per_s == l->per_s);
}

/* They have waited for longer than a missing node is waited for. */
TEST(a_moment_without_nodes_leaves_the_line_as_it_is)
{
    struct line l;
    struct client a, b;
    open_line(&l, 0, 0);
    CHECK_OK(client_submit(&l.w, &a, ask_of(NORMAL, 0)));
    CHECK_OK(client_submit(&l.w, &b, ask_of(NORMAL, 0)));
    rig_turn_ms(&l.w.rig, 1100);
    publish(&l, true, 1000);
    rig_turn_ms(&l.w.rig, 300);
    CHECK_EQ_INT(a.n_ended + b.n_ended, 0);
    CHECK_EQ_INT(admit_n_waiting(l.w.s->entry.admission.admit), 2);
    publish(&l, false, 1000);
    is_next(&l, &l.first, &a);
    is_next(&l, &a, &b);
    end_running(&l, &b);
    world_check_idle(&l.w);
    close_line(&l);
}

/* The line behind a request of a higher class that has just come, too. */
TEST(a_line_without_nodes_ends_together)
{
    struct line l;
    struct client a[3], late;
    open_line(&l, 0, 0);
    for (int i = 0; i < 3; i++) CHECK_OK(client_submit(&l.w, &a[i], ask_of(i ? NORMAL : LOW, 0)));
    publish(&l, true, 1000);
    uint64_t t0 = clock_ms();
    rig_turn_ms(&l.w.rig, 500);
    CHECK_OK(client_submit(&l.w, &late, ask_of(HIGH, 0)));
    RIG_WAIT(&l.w.rig, a[0].n_ended && a[1].n_ended && a[2].n_ended);
    CHECK(clock_ms() - t0 >= 900 && clock_ms() - t0 < 1450);
    for (int i = 0; i < 3; i++) CHECK_STATUS(a[i].end.status, ERR_UNAVAILABLE);
    CHECK_EQ_INT(late.n_ended, 0); /* it has its own time */
    RIG_WAIT(&l.w.rig, late.n_ended);
    CHECK_STATUS(late.end.status, ERR_UNAVAILABLE);
    end_running(&l, &l.first);
    world_check_idle(&l.w);
    close_line(&l);
}

/* However short the time is that a request may wait for its turn. */
TEST(no_node_is_not_a_full_one)
{
    struct line l;
    struct client a[3];
    open_line(&l, 0, 1);
    publish(&l, true, 1000);
    uint64_t t0 = clock_ms();
    for (int i = 0; i < 3; i++) CHECK_OK(client_submit(&l.w, &a[i], ask_of(LOW + i, 0)));
    rig_turn_ms(&l.w.rig, 500);
    CHECK_EQ_INT(a[0].n_ended + a[1].n_ended + a[2].n_ended, 0);
    RIG_WAIT(&l.w.rig, a[0].n_ended && a[1].n_ended && a[2].n_ended);
    CHECK(clock_ms() - t0 >= 1000 && clock_ms() - t0 < 1450);
    for (int i = 0; i < 3; i++) CHECK_STATUS(a[i].end.status, ERR_UNAVAILABLE);
    end_running(&l, &l.first);
    world_check_idle(&l.w);
    close_line(&l);
}

/* A time at which it would be taken cannot be told. */
TEST(without_nodes_a_late_first_token_has_no_promise)
{
    struct line l;
    struct client a, b;
    struct ask ttft = ask_of(NORMAL, 0);
    open_line(&l, 0, 0);
    publish(&l, true, 1000);
    ttft.admission.ttft_ms = 200;
    CHECK_OK(client_submit(&l.w, &a, ask_of(HIGH, 0)));
    CHECK_OK(client_submit(&l.w, &b, ttft));
    RIG_WAIT(&l.w.rig, b.n_ended);
    CHECK_STATUS(b.end.status, ERR_UNAVAILABLE);
    CHECK(!b.end.retry[0] && a.n_ended == 0);
    publish(&l, false, 1000);
    is_next(&l, &l.first, &a);
    end_running(&l, &a);
    world_check_idle(&l.w);
    close_line(&l);
}

TEST(a_line_is_no_slower_after_an_outage)
{
    struct line l;
    struct client a;
    struct admit_numbers before, after;
    open_line(&l, 0, 0);
    struct entry *e = &l.w.s->entry;
    e->grace_ms = 60000;
    l.per_s = 100;
    publish(&l, false, 1000);
    CHECK_OK(client_submit(&l.w, &a, ask_of(NORMAL, 0)));
    rig_turn_ms(&l.w.rig, 50);
    admit_numbers(e->admission.admit, NORMAL, clock_ms(), &before);
    publish(&l, true, 1000);
    rig_turn_ms(&l.w.rig, 1300);
    publish(&l, false, 1000);
    rig_turn_ms(&l.w.rig, 50);
    admit_numbers(e->admission.admit, NORMAL, clock_ms(), &after);
    CHECK(before.wait_ms > 0 && after.wait_ms < 1.01 * before.wait_ms);
    is_next(&l, &l.first, &a);
    end_running(&l, &a);
    world_check_idle(&l.w);
    close_line(&l);
}

TEST(who_is_too_large_for_the_nodes_that_live_stops_nobody)
{
    struct line l;
    struct client large, a;
    struct ask q = ask_of(NORMAL, 0);
    open_line(&l, 0, 0);
    q.max_tokens = 900;
    CHECK_OK(client_submit(&l.w, &large, q));
    CHECK_OK(client_submit(&l.w, &a, ask_of(NORMAL, 0)));
    rig_turn_ms(&l.w.rig, 50);
    publish(&l, false, 4);
    is_next(&l, &l.first, &a);
    CHECK_EQ_INT(large.n_ended, 0);
    RIG_WAIT(&l.w.rig, large.n_ended);
    CHECK_STATUS(large.end.status, ERR_UNAVAILABLE);
    CHECK(strstr(large.end.text, "the largest holds 64") != NULL);
    end_running(&l, &a);
    world_check_idle(&l.w);
    close_line(&l);
}

TEST(a_deadline_ends_a_request_wherever_it_is)
{
    struct line l;
    struct client a;
    struct ask q = ask_of(NORMAL, 0);
    open_line(&l, 0, 0);
    q.admission.deadline_ms = 120;
    q.deadline_ms = clock_ms() + 120;
    CHECK_OK(client_submit(&l.w, &a, q));
    RIG_WAIT(&l.w.rig, a.n_ended == 1); /* in line */
    CHECK_STATUS(a.end.status, ERR_TIMEOUT);
    CHECK(strstr(a.end.text, "x-baton-deadline-ms is 120") && strstr(a.end.text, "0 tokens"));
    q.deadline_ms = clock_ms();
    CHECK_STATUS(client_submit(&l.w, &a, q), ERR_TIMEOUT); /* it took too long to get here */
    CHECK_EQ_STR(a.why.err.field, "x-baton-deadline-ms");
    end_running(&l, &l.first);
    q.deadline_ms = clock_ms() + 120;
    CHECK_OK(client_submit(&l.w, &a, q));
    l.running = expect_run(&l.w);
    reply_tokens(l.running.decode, &l.running, 0, 2, FINISH_NONE);
    RIG_WAIT(&l.w.rig, a.n_ended == 1); /* while it runs */
    CHECK_STATUS(a.end.status, ERR_TIMEOUT);
    CHECK(strstr(a.end.text, "it has 2 tokens"));
    RIG_WAIT(&l.w.rig, received_count(l.w.nodes[0], FRAME_CANCEL) == 1);
    world_check_idle(&l.w);
    close_line(&l);
}

TEST(people_see_the_tenants)
{
    struct line l;
    struct client low;
    struct buf json = { 0 };
    open_line(&l, 0, 0);
    CHECK_OK(client_submit(&l.w, &low, ask_of(LOW, 0)));
    rig_turn_ms(&l.w.rig, 1100);
    scheduler_describe(l.w.s, &json);
    CHECK(strstr(json.data, "{\"name\":\"low\",\"class\":\"low\",\"weight\":1,\"waiting\":1,"
                            "\"running\":0,\"prompt_tokens\":0,"));
    CHECK(strstr(json.data, "{\"name\":\"normal\",\"class\":\"normal\",\"weight\":1,\"waiting\":0,"
                            "\"running\":1,\"prompt_tokens\":40,"));
    buf_clear(&json);
    metrics_write(l.w.rig.metrics, &json);
    CHECK(strstr(json.data, "baton_tenant_waiting{tenant=\"low\"} 1\n"));
    CHECK(strstr(json.data, "baton_tenant_running{tenant=\"normal\"} 1\n"));
    CHECK(strstr(json.data, "baton_tenant_tokens_total{tenant=\"normal\",kind=\"prompt\"} 40\n"));
    CHECK(strstr(json.data, "baton_tenant_requests_total{tenant=\"low\",taken=\"yes\"} 1\n"));
    buf_release(&json);
    end_running(&l, &l.first);
    l.running = expect_run(&l.w);
    end_running(&l, &low);
    close_line(&l);
}

/* What one entry node admits counts at the other, through the directory. */
TEST(limits_are_of_all_entry_nodes)
{
    struct world w;
    struct tenants tenants;
    struct client c[3];
    tenants_init(&tenants);
    CHECK_OK(tenants_parse(&tenants, STR("a k requests_per_minute=2\n"), "keys", NULL));
    world_entry.tenants = &tenants;
    world_entry.max_requests = world_entry.max_queue_ms = 0;
    world_open(&w, "m", 1000);
    struct peer_node *entry2 = peer_open(&w.rig, ENTRY_ID + 1, (struct peer_options){ 0 });
    struct scheduler_options o = w.s->o;
    o.cluster = entry2->c;
    struct scheduler *other = scheduler_create(&o);
    struct serve_backend first = w.be, second = scheduler_backend(other);
    RIG_WAIT(&w.rig, other->entry.view.n_nodes == 1);
    CHECK_OK(client_submit(&w, &c[0], ask_of(1, 0)));
    rig_turn_ms(&w.rig, 100);
    w.be = second;
    CHECK_OK(client_submit(&w, &c[1], ask_of(1, 0)));
    rig_turn_ms(&w.rig, 100); /* each knows what the other has admitted */
    CHECK_STATUS(client_submit(&w, &c[2], ask_of(1, 0)), ERR_FULL);
    CHECK(strstr(c[2].why.err.text, "requests_per_minute is 2, and it has 2"));
    w.be = first;
    rig_turn_ms(&w.rig, 1100);
    CHECK_STATUS(client_submit(&w, &c[2], ask_of(1, 0)), ERR_FULL);
    scheduler_stop(other);
    scheduler_stop(w.s);
    directory_close(w.directory);
    scheduler_free(other);
    scheduler_free(w.s);
    peer_close(entry2);
    peer_close(w.entry);
    peer_close(w.nodes[0]);
    cluster_rig_close(&w.rig);
    tenants_release(&tenants);
}

TEST_MAIN(CASE(the_line_has_its_order), CASE(who_leaves_the_line_is_passed_over),
          CASE(who_had_its_turn_does_not_wait_in_line_again),
          CASE(the_lowest_class_gives_way_when_the_node_is_full),
          CASE(who_waits_too_long_is_refused_after_all),
          CASE(a_moment_without_nodes_leaves_the_line_as_it_is),
          CASE(a_line_without_nodes_ends_together), CASE(no_node_is_not_a_full_one),
          CASE(without_nodes_a_late_first_token_has_no_promise),
          CASE(a_line_is_no_slower_after_an_outage),
          CASE(who_is_too_large_for_the_nodes_that_live_stops_nobody),
          CASE(a_deadline_ends_a_request_wherever_it_is), CASE(people_see_the_tenants),
          CASE(limits_are_of_all_entry_nodes))
