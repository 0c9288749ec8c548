/* test_group.c - ranks of a group over real sockets: meeting in any order, exchanges of the threads
 * that prepare, losses at every stage, ranks that come back, and ranks that do not belong. */
#include "shared/cluster/proto/node.pb-c.h"
#include "tests/unit/cluster/group_rig.h"
#include "tests/unit/cluster/silence.h"

TEST(ranks_that_come_in_any_order_are_together)
{
    struct scene s;
    open_scene(&s, RANKS);
    start(&s, 3, 103);
    group_ready(s.ranks[3].group, "tiny, f32"); /* before rank 0 listens */
    rig_turn_ms(&s.rig, 60);
    CHECK(strstr(why_of(&s.ranks[3]), "rank 0 of the group is not reached at 127.0.0.1:"));
    start(&s, 0, 100);
    start(&s, 1, 101);
    start(&s, 2, 102);
    group_ready(s.ranks[2].group, "tiny, f32"); /* before rank 0 is ready */
    rig_turn_ms(&s.rig, 60);
    group_ready(s.ranks[0].group, "tiny, f32");
    group_ready(s.ranks[1].group, "tiny, f32");
    rig_turn_ms(&s.rig, 60);
    CHECK_EQ_STR(why_of(&s.ranks[0]), "rank 4 of 5 is not there");
    start(&s, 4, 104);
    group_ready(s.ranks[4].group, "tiny, f32");
    RIG_WAIT(&s.rig, together(&s, 1));
    close_scene(&s);
}

TEST(a_group_of_one_needs_nobody)
{
    struct scene s;
    open_scene(&s, 1);
    start_all(&s);
    RIG_WAIT(&s.rig, together(&s, 1));
    close_scene(&s);
}

TEST(bells_reach_all_others)
{
    struct scene s;
    open_scene(&s, RANKS);
    start_all(&s);
    RIG_WAIT(&s.rig, together(&s, 1));
    for (uint32_t from = 0; from < RANKS; from += 2) {
        uint64_t before[RANKS];
        for (uint32_t r = 0; r < RANKS; r++) before[r] = s.ranks[r].n_bells;
        group_ring(s.ranks[from].group, 1, 40 + from);
        for (uint32_t r = 0; r < RANKS; r++) {
            if (r == from) continue;
            RIG_WAIT(&s.rig, s.ranks[r].n_bells > before[r] && s.ranks[r].bell_step == 40 + from);
            CHECK_EQ_INT(s.ranks[r].bell_epoch, 1);
        }
    }
    close_scene(&s);
}

/* A rank may hear of a loss from the new leader first, or see it begin an epoch too early for a rank
 * that has not heard of it yet. */
static bool says_of_the_loss(const char *why)
{
    return strstr(why, "was lost: ") || strstr(why, "did not come to the new leader") ||
           strstr(why, "is not done with the epoch before");
}

/* Rank `rank` ends; the others go on without it, and with it once it is back. Returns the epoch of
 * all. */
static uint64_t lose(struct scene *s, uint32_t rank, uint64_t epoch, uint64_t id)
{
    char want[64];
    const uint32_t other = rank == 1 ? 2 : 1;
    close_rank(&s->ranks[rank]);
    RIG_WAIT_MS(&s->rig, together(s, epoch + 1), 2000);
    for (uint32_t r = 0; r < s->size; r++)
        if (r != rank) CHECK(says_of_the_loss(s->ranks[r].why));
    snprintf(want, sizeof want, "rank %u of %u is not there, others have its experts", rank,
             s->size);
    CHECK_EQ_STR(why_of(&s->ranks[other]), want);
    CHECK(!group_is_whole(s->ranks[other].group));
    check_reason(s, GROUP_LOSS);
    epoch = s->ranks[other].epoch;
    start(s, rank, id);
    group_ready(s->ranks[rank].group, "tiny, f32");
    RIG_WAIT(&s->rig, together(s, epoch + 1));
    CHECK_EQ_STR(why_of(&s->ranks[other]), "");
    CHECK(group_is_whole(s->ranks[other].group));
    check_reason(s, GROUP_RETURN);
    return s->ranks[other].epoch;
}

TEST(the_others_go_on_without_a_lost_rank_and_take_it_back)
{
    struct scene s;
    open_scene(&s, RANKS);
    start_all(&s);
    RIG_WAIT(&s.rig, together(&s, 1));
    uint64_t epoch = lose(&s, 3, 1, 203);
    epoch = lose(&s, 1, epoch, 201);
    epoch = lose(&s, 0, epoch, 200); /* who leads: rank 1 takes over */
    epoch = lose(&s, 4, epoch, 204);
    epoch = lose(&s, 1, epoch, 301); /* who leads since: rank 0 takes over */
    lose(&s, 2, epoch, 302);
    close_scene(&s);
}

/* Who leads is lost again and again, until one is left; then all come back. */
TEST(a_group_shrinks_to_one_rank_and_grows_again)
{
    struct scene s;
    open_scene(&s, RANKS);
    start_all(&s);
    RIG_WAIT(&s.rig, together(&s, 1));
    for (uint32_t r = 0; r < RANKS - 1; r++) {
        close_rank(&s.ranks[r]);
        RIG_WAIT_MS(&s.rig, together(&s, r + 2), 3000);
    }
    CHECK(group_leads(s.ranks[RANKS - 1].group));
    start(&s, 2, 202); /* rank 0, where it asks, is not there yet */
    group_ready(s.ranks[2].group, "tiny, f32");
    rig_turn_ms(&s.rig, 100);
    for (uint32_t r = 0; r < RANKS - 1; r++) {
        if (r == 2) continue;
        start(&s, r, 200 + r);
        group_ready(s.ranks[r].group, "tiny, f32");
    }
    RIG_WAIT(&s.rig, together(&s, RANKS + 1));
    close_scene(&s);
}

/* Rank 0 is started again before the others have gone on without it, and loads for long: nobody
 * waits for it. */
TEST(a_rank_that_still_loads_does_not_lead)
{
    struct scene s;
    open_scene(&s, 3);
    start_all(&s);
    RIG_WAIT(&s.rig, together(&s, 1));
    atomic_store(&s.ranks[1].hangs, true);
    close_rank(&s.ranks[0]);
    RIG_WAIT(&s.rig, s.ranks[1].preparing && s.ranks[2].preparing);
    start(&s, 0, 200);
    rig_turn_ms(&s.rig, 300);
    CHECK(group_leads(s.ranks[1].group) && s.ranks[1].preparing == 2);
    atomic_store(&s.ranks[1].hangs, false);
    RIG_WAIT_MS(&s.rig, s.ranks[1].epoch == 2 && s.ranks[2].epoch == 2, 2000);
    group_ready(s.ranks[0].group, "tiny, f32");
    RIG_WAIT(&s.rig, together(&s, 3));
    close_scene(&s);
}

/* Several at once, before anybody could go on without the first. */
TEST(ranks_that_are_lost_together)
{
    struct scene s;
    open_scene(&s, RANKS);
    start_all(&s);
    RIG_WAIT(&s.rig, together(&s, 1));
    close_rank(&s.ranks[0]);
    close_rank(&s.ranks[1]);
    close_rank(&s.ranks[3]);
    RIG_WAIT_MS(&s.rig, together(&s, 2), 3000);
    close_scene(&s);
}

/* All that would lead before it are cut off: it does not wait for one after the other. */
TEST(ranks_that_cannot_be_reached_are_tried_at_the_same_time)
{
    struct scene s;
    struct silence silent[RANKS - 1];
    open_scene(&s, RANKS);
    start_all(&s);
    RIG_WAIT(&s.rig, together(&s, 1));
    for (uint32_t r = 0; r < RANKS - 1; r++) {
        const uint16_t port = cluster_port(s.ranks[r].node->c);
        close_rank(&s.ranks[r]);
        be_silent(&silent[r], port);
    }
    const uint64_t t = clock_ms();
    RIG_WAIT(&s.rig, together(&s, 2));
    const uint64_t took = clock_ms() - t;
    CHECK(took > 900 && took < 2500); /* one after the other they take 3,000 and more */
    for (uint32_t r = 0; r < RANKS - 1; r++) be_heard(&silent[r]);
    close_scene(&s);
}

static uint64_t reach_ms(struct rank *r, uint64_t epoch, const char *other, uint16_t port,
                         enum status want)
{
    struct group_member members[] = { { .rank = 0, .host = "127.0.0.1", .port = port },
                                      { .rank = 1, .port = port } };
    const struct group_roster roster = { .epoch = epoch, .n = 2, .members = members };
    snprintf(members[1].host, sizeof members[1].host, "%s", other);
    const uint64_t t = clock_ms();
    struct err err = { 0 };
    CHECK_EQ_INT(group_reach(r->group, &roster, 0, &err), want);
    CHECK((want == OK) == !strstr(err.text, "rank 1 does not answer at 127.0.0.2"));
    return clock_ms() - t;
}

/* What a rank does before it makes its ep object; 127.0.0.2 is another host here. */
TEST(other_hosts_are_asked_whether_they_answer)
{
    struct scene s;
    struct silence silent;
    open_scene(&s, 2);
    for (uint32_t r = 0; r < 2; r++) start(&s, r, 100 + r);
    atomic_store(&s.ranks[1].hangs, true);
    for (uint32_t r = 0; r < 2; r++) group_ready(s.ranks[r].group, "tiny, f32");
    RIG_WAIT(&s.rig, s.ranks[0].preparing && s.ranks[1].preparing);
    const uint64_t epoch = s.ranks[0].preparing;
    const uint16_t port = free_port();
    CHECK(reach_ms(&s.ranks[0], epoch, "127.0.0.2", port, OK) < 500); /* which refuses */
    be_silent(&silent, port);
    CHECK(reach_ms(&s.ranks[0], epoch, "127.0.0.1", port, OK) < 500); /* is this host */
    CHECK(reach_ms(&s.ranks[0], epoch + 1, "127.0.0.2", port, OK) < 500);
    CHECK(reach_ms(&s.ranks[0], epoch, "127.0.0.2", port, ERR_PEER_LOST) >= 2000);
    be_heard(&silent);
    CHECK(reach_ms(&s.ranks[0], epoch, "127.0.0.2", port, OK) < 500);
    atomic_store(&s.ranks[1].hangs, false);
    RIG_WAIT(&s.rig, together(&s, 1));
    close_scene(&s);
}

/* The rank that leads a node was the first of the group: the rest of its node, which may be what it
 * was lost for, is not asked to lead, nor waited for. */
TEST(a_node_of_several_ranks_is_lost_whole)
{
    struct scene s;
    open_scene(&s, 4);
    s.node_size = 2;
    start_all(&s);
    RIG_WAIT(&s.rig, together(&s, 1));
    close_rank(&s.ranks[0]);
    RIG_WAIT_MS(&s.rig, s.ranks[2].epoch == 2 && s.ranks[3].epoch == 2, 2000);
    CHECK(group_leads(s.ranks[2].group) && s.ranks[2].n_together == 2);
    CHECK_EQ_INT(s.ranks[1].epoch, 0);
    close_rank(&s.ranks[1]);
    for (uint32_t r = 0; r < 2; r++) start(&s, r, 200 + r);
    for (uint32_t r = 0; r < 2; r++) group_ready(s.ranks[r].group, "tiny, f32");
    RIG_WAIT(&s.rig, together(&s, 3));
    close_scene(&s);
}

/* ---- leaving ---- */

/* A rank whose requests are done leaves between two steps: no group is lost. */
TEST(a_rank_leaves_and_the_others_go_on)
{
    struct scene s;
    open_scene(&s, RANKS);
    start_all(&s);
    RIG_WAIT(&s.rig, together(&s, 1));
    for (uint32_t r = 0; r < RANKS - 1; r++) { /* the one that leads, each time */
        group_drain(s.ranks[r].group);
        rig_turn_ms(&s.rig, 50);
        CHECK_EQ_INT(s.ranks[r].n_left, 0);
        group_leave(s.ranks[r].group);
        RIG_WAIT(&s.rig, s.ranks[r].n_left == 1);
        CHECK_EQ_INT(s.ranks[r].n_losses, 0);
        close_rank(&s.ranks[r]);
        RIG_WAIT(&s.rig, together(&s, r + 2));
        check_reason(&s, GROUP_DRAIN);
        rig_turn_ms(&s.rig, 100);
        CHECK_EQ_INT(s.ranks[RANKS - 1].n_losses, 0);
    }
    start(&s, 1, 201);
    group_ready(s.ranks[1].group, "tiny, f32");
    start(&s, 0, 200);
    group_ready(s.ranks[0].group, "tiny, f32");
    RIG_WAIT(&s.rig, together(&s, RANKS + 1));
    close_scene(&s);
}

/* All are told to end. Those without requests wait for the one that has some, whose experts they
 * have; then all go. */
TEST(all_ranks_leave_when_none_has_requests)
{
    struct scene s;
    open_scene(&s, RANKS);
    start_all(&s);
    RIG_WAIT(&s.rig, together(&s, 1));
    for (uint32_t r = 0; r < RANKS; r++) group_drain(s.ranks[r].group);
    for (uint32_t r = 0; r < RANKS; r++)
        if (r != 3) group_leave(s.ranks[r].group);
    rig_turn_ms(&s.rig, 200);
    for (uint32_t r = 0; r < RANKS; r++)
        CHECK(s.ranks[r].n_left == 0 && s.ranks[r].epoch == 1 && s.ranks[r].n_losses == 0);
    group_leave(s.ranks[3].group);
    for (uint32_t r = 0; r < RANKS; r++) RIG_WAIT(&s.rig, s.ranks[r].n_left == 1);
    close_scene(&s);
}

/* One of them is lost meanwhile: the one with requests goes on without those that have none. */
TEST(a_rank_with_requests_goes_on_when_those_that_wait_for_it_are_lost)
{
    struct scene s;
    open_scene(&s, 3);
    start_all(&s);
    RIG_WAIT(&s.rig, together(&s, 1));
    for (uint32_t r = 0; r < 3; r++) group_drain(s.ranks[r].group);
    group_leave(s.ranks[0].group);
    group_leave(s.ranks[1].group);
    rig_turn_ms(&s.rig, 50);
    close_rank(&s.ranks[0]);
    RIG_WAIT(&s.rig, s.ranks[1].n_left == 1);
    close_rank(&s.ranks[1]);
    RIG_WAIT(&s.rig, together(&s, 2));
    group_leave(s.ranks[2].group);
    RIG_WAIT(&s.rig, s.ranks[2].n_left == 1);
    close_scene(&s);
}

TEST(a_rank_that_is_in_no_group_leaves_at_once)
{
    struct scene s;
    open_scene(&s, 2);
    start(&s, 1, 101);
    group_leave(s.ranks[1].group);
    CHECK_EQ_INT(s.ranks[1].n_left, 1);
    close_scene(&s);
}

TEST(a_group_is_renewed_while_it_steps)
{
    struct scene s;
    open_scene(&s, 3);
    start_all(&s);
    RIG_WAIT(&s.rig, together(&s, 1));
    for (uint32_t i = 2; i < 12; i++) {
        group_renew(s.ranks[1].group); /* it does not lead */
        group_renew(s.ranks[0].group);
        RIG_WAIT(&s.rig, together(&s, i));
        CHECK_EQ_INT(s.ranks[2].epoch, i);
        check_reason(&s, GROUP_REBALANCE);
    }
    CHECK_EQ_INT(n_joined(&s, GROUP_START), 3);
    CHECK_EQ_INT(n_joined(&s, GROUP_REBALANCE), 3 * 10);
    CHECK_EQ_INT(n_joined(&s, GROUP_LOSS) + n_joined(&s, GROUP_RETURN), 0);
    for (uint32_t r = 0; r < 3; r++) CHECK_EQ_INT(s.ranks[r].n_losses, 0);
    close_scene(&s);
}

/* ---- what fails ---- */

/* While the ranks' threads exchange, one ends: the exchange of the others fails at once. */
TEST(a_rank_that_is_lost_while_ranks_prepare)
{
    struct scene s;
    open_scene(&s, RANKS);
    for (uint32_t r = 0; r < RANKS; r++) start(&s, r, 100 + r);
    atomic_store(&s.ranks[2].hangs, true);
    for (uint32_t r = 0; r < RANKS; r++) group_ready(s.ranks[r].group, "tiny, f32");
    RIG_WAIT(&s.rig, s.ranks[2].preparing && s.ranks[4].preparing);
    rig_turn_ms(&s.rig, 30);
    close_rank(&s.ranks[4]);
    RIG_WAIT_MS(&s.rig, s.ranks[0].lost == 1 && s.ranks[1].lost == 1 && s.ranks[3].lost == 1, 2000);
    RIG_WAIT_MS(&s.rig, !s.ranks[0].preparing && !s.ranks[1].preparing, 2000);
    CHECK_STATUS(s.ranks[1].prepared, ERR_PEER_LOST);
    start(&s, 4, 204);
    group_ready(s.ranks[4].group, "tiny, f32");
    rig_turn_ms(&s.rig, 60);
    CHECK(!together(&s, 2)); /* rank 2's thread is still busy with the first */
    atomic_store(&s.ranks[2].hangs, false);
    RIG_WAIT(&s.rig, together(&s, 2));
    close_scene(&s);
}

/* One that comes back is lost again before it is in: the others' group goes on. */
TEST(a_rank_that_is_lost_while_it_joins_takes_nobody_with_it)
{
    struct scene s;
    open_scene(&s, 3);
    start_all(&s);
    RIG_WAIT(&s.rig, together(&s, 1));
    close_rank(&s.ranks[2]);
    RIG_WAIT(&s.rig, together(&s, 2));
    const uint64_t epoch = s.ranks[0].epoch;
    start(&s, 2, 202);
    atomic_store(&s.ranks[2].hangs, true);
    group_ready(s.ranks[2].group, "tiny, f32");
    RIG_WAIT(&s.rig, s.ranks[0].preparing && s.ranks[1].preparing && s.ranks[2].preparing);
    close_rank(&s.ranks[2]);
    RIG_WAIT(&s.rig, !s.ranks[0].preparing && !s.ranks[1].preparing);
    rig_turn_ms(&s.rig, 50);
    CHECK(s.ranks[0].epoch == epoch && s.ranks[1].epoch == epoch);
    start(&s, 2, 302);
    group_ready(s.ranks[2].group, "tiny, f32");
    RIG_WAIT(&s.rig, together(&s, epoch + 1));
    close_scene(&s);
}

/* One that cannot prepare says so to all, and tries again. */
TEST(a_rank_that_cannot_prepare)
{
    struct scene s;
    open_scene(&s, 3);
    for (uint32_t r = 0; r < 3; r++) start(&s, r, 100 + r);
    s.ranks[1].fails = true;
    for (uint32_t r = 0; r < 3; r++) group_ready(s.ranks[r].group, "tiny, f32");
    RIG_WAIT(&s.rig, s.ranks[2].lost >= 2);
    CHECK_EQ_STR(s.ranks[2].why, "rank 1 has no memory");
    s.ranks[1].fails = false;
    RIG_WAIT(&s.rig, together(&s, 3));
    close_scene(&s);
}

/* One that comes back and cannot prepare keeps nobody else out, and is tried again later. */
TEST(a_returned_rank_that_cannot_prepare_holds_up_nobody)
{
    struct scene s;
    open_scene(&s, 4);
    start_all(&s);
    RIG_WAIT(&s.rig, together(&s, 1));
    close_rank(&s.ranks[1]);
    close_rank(&s.ranks[2]);
    RIG_WAIT(&s.rig, together(&s, 2));
    start(&s, 1, 301);
    start(&s, 2, 302);
    s.ranks[1].fails = true;
    group_ready(s.ranks[1].group, "tiny, f32");
    group_ready(s.ranks[2].group, "tiny, f32");
    RIG_WAIT(&s.rig, s.ranks[0].n_together == 3 && s.ranks[2].n_together == 3 && s.ranks[2].epoch);
    CHECK(strstr(why_of(&s.ranks[0]), "rank 1 of 4 could not join")); /* it is there */
    const uint64_t epoch = s.ranks[2].epoch;
    s.ranks[1].fails = false;
    RIG_WAIT(&s.rig, together(&s, epoch + 1));
    close_scene(&s);
}

/* An engine's exchange failed: all give the epoch up and go on in the next. */
TEST(an_exchange_that_failed_ends_the_epoch_everywhere)
{
    struct scene s;
    open_scene(&s, 3);
    start_all(&s);
    RIG_WAIT(&s.rig, together(&s, 1));
    group_report_lost(s.ranks[2].group, 1, "rank 1 did not come for 30000 ms");
    group_report_lost(s.ranks[1].group, 1, "rank 2 gave up"); /* both engines say so */
    group_report_lost(s.ranks[1].group, 1, "again");
    RIG_WAIT(&s.rig, together(&s, 2));
    CHECK(strstr(s.ranks[0].why, "rank 1 did not come") || strstr(s.ranks[0].why, "gave up"));
    group_report_lost(s.ranks[0].group, 1, "late"); /* of an epoch that is over */
    rig_turn_ms(&s.rig, 50);
    CHECK(together(&s, 2));
    close_scene(&s);
}

/* ---- who does not belong ---- */

TEST(ranks_of_other_terms_are_refused_until_they_are_right)
{
    struct scene s;
    struct rank other;
    open_scene(&s, 2);
    start(&s, 0, 100);
    start(&s, 1, 101);
    group_ready(s.ranks[0].group, "tiny, f32");
    group_ready(s.ranks[1].group, "huge, bf16");
    RIG_WAIT(&s.rig,
             strstr(why_of(&s.ranks[1]), "rank 1 has huge, bf16, and rank 0 has tiny, f32"));
    CHECK(strstr(why_of(&s.ranks[0]), "rank 1 of 2 is not there; rank 1 has huge, bf16"));
    close_rank(&s.ranks[1]);
    open_rank(&s.rig, &other, 1, 3, 1, 301, s.port, NULL); /* of three */
    group_ready(other.group, "tiny, f32");
    RIG_WAIT(&s.rig, strstr(why_of(&other), "this is a rank of 3, and rank 0 has 2 ranks"));
    start(&s, 1, 201);
    group_ready(s.ranks[1].group, "tiny, f32");
    RIG_WAIT(&s.rig, together(&s, 1));
    close_rank(&other);
    rig_turn_ms(&s.rig, 50);
    CHECK(together(&s, 1)); /* it was none of them */
    close_scene(&s);
}

/* Terms that are as long as can be are told whole. */
TEST(what_is_refused_is_said_whole)
{
    struct scene s;
    char mine[GROUP_TERMS_MAX], other[GROUP_TERMS_MAX];
    memset(mine, 'm', sizeof mine - 1);
    memset(other, 'o', sizeof other - 1);
    mine[sizeof mine - 1] = other[sizeof other - 1] = 0;
    memcpy(mine + sizeof mine - 4, "end", 3);
    open_scene(&s, 2);
    start(&s, 0, 100);
    start(&s, 1, 101);
    group_ready(s.ranks[0].group, mine);
    group_ready(s.ranks[1].group, other);
    RIG_WAIT(&s.rig, strstr(why_of(&s.ranks[1]), "mmmend"));
    CHECK(strstr(why_of(&s.ranks[0]), "mmmend"));
    close_scene(&s);
}

TEST(two_ranks_of_one_number)
{
    struct scene s;
    struct rank twin;
    open_scene(&s, 2);
    start_all(&s);
    RIG_WAIT(&s.rig, together(&s, 1));
    open_rank(&s.rig, &twin, 1, 2, 1, 301, s.port, NULL);
    group_ready(twin.group, "tiny, f32");
    RIG_WAIT(&s.rig, strstr(why_of(&twin), "there is a rank 1 already"));
    close_rank(&s.ranks[1]);                                    /* it takes the place */
    RIG_WAIT(&s.rig, twin.epoch == 3 && s.ranks[0].epoch == 3); /* it was alone in between */
    close_rank(&twin);
    close_scene(&s);
}

/* Rank 0 listens there, whatever address it believes to have. */
TEST(rank_0_is_looked_for_where_ranks_meet)
{
    struct scene s;
    open_scene(&s, 2);
    s.host = "127.9.9.9"; /* where nobody listens */
    start(&s, 0, 100);
    s.host = NULL;
    start(&s, 1, 101);
    for (uint32_t r = 0; r < 2; r++) group_ready(s.ranks[r].group, "tiny, f32");
    RIG_WAIT(&s.rig, together(&s, 1));
    close_rank(&s.ranks[0]);
    RIG_WAIT(&s.rig, together(&s, 2));
    start(&s, 0, 200); /* it knows of nobody */
    group_ready(s.ranks[0].group, "tiny, f32");
    RIG_WAIT(&s.rig, together(&s, 3));
    close_scene(&s);
}

/* The address of the meeting is that of a rank above 0 by mistake: it does not follow itself. */
TEST(a_rank_does_not_meet_itself)
{
    struct scene s;
    struct rank lone;
    open_scene(&s, 2);
    open_rank(&s.rig, &lone, 1, 2, 1, 301, 0, NULL);
    group_ready(lone.group, "tiny, f32");
    rig_turn_ms(&s.rig, 200);
    CHECK(!group_leads(lone.group));
    CHECK(strstr(why_of(&lone), "rank 0 of the group is not reached at 127.0.0.1:"));
    close_rank(&lone);
    close_scene(&s);
}

/* One of a rank that is not in a group: others that are in none can still be proposed to. */
TEST(a_loss_of_no_epoch_does_nothing)
{
    struct scene s;
    Baton__GroupLost m = BATON__GROUP_LOST__INIT;
    open_scene(&s, 2);
    for (uint32_t r = 0; r < 2; r++) start(&s, r, 100 + r);
    group_ready(s.ranks[0].group, "tiny, f32");
    rig_turn_ms(&s.rig, 50); /* the leader knows of itself */
    CHECK_OK(cluster_send_proto(s.ranks[0].node->c, 100, FRAME_GROUP_LOST, 0, 0, &m.base));
    rig_turn_ms(&s.rig, 50);
    group_ready(s.ranks[1].group, "tiny, f32");
    RIG_WAIT_MS(&s.rig, together(&s, 1), 5000);
    close_scene(&s);
}

TEST(messages_of_others_and_garbage_do_nothing)
{
    struct scene s;
    open_scene(&s, 2);
    start_all(&s);
    RIG_WAIT(&s.rig, together(&s, 1));
    struct peer_node *stranger = peer_open(&s.rig, 900, (struct peer_options){ 0 });
    for (uint32_t r = 0; r < 2; r++) {
        cluster_learn(stranger->c, 100 + r, "127.0.0.1", cluster_port(s.ranks[r].node->c));
        for (unsigned type = FRAME_GROUP_HELLO; type <= FRAME_GROUP_LOAD; type++)
            for (uint64_t way = 0; way < 2; way++)
                CHECK_OK(cluster_send(stranger->c, 100 + r, (enum frame_type)type, way, 0,
                                      (struct str){ "", 0 }));
    }
    rig_turn_ms(&s.rig, 100);
    CHECK(together(&s, 1));
    CHECK_EQ_INT(s.ranks[0].n_bells + s.ranks[1].n_bells, 0);
    CHECK_OK(
        cluster_send(stranger->c, 100, FRAME_GROUP_HELLO, 0, 0, (struct str){ "\xff\xff", 2 }));
    RIG_WAIT(&s.rig, stranger->n_lost == 1); /* its link ends */
    CHECK(together(&s, 1));
    peer_close(stranger);
    close_scene(&s);
}

TEST_MAIN(CASE_T(a_rank_that_still_loads_does_not_lead, 60),
          CASE_T(ranks_that_come_in_any_order_are_together, 60),
          CASE_T(a_group_of_one_needs_nobody, 60), CASE_T(bells_reach_all_others, 60),
          CASE_T(the_others_go_on_without_a_lost_rank_and_take_it_back, 60),
          CASE_T(a_group_shrinks_to_one_rank_and_grows_again, 60),
          CASE_T(ranks_that_are_lost_together, 60),
          CASE_T(ranks_that_cannot_be_reached_are_tried_at_the_same_time, 60),
          CASE_T(other_hosts_are_asked_whether_they_answer, 60),
          CASE_T(a_node_of_several_ranks_is_lost_whole, 60),
          CASE_T(a_rank_leaves_and_the_others_go_on, 60),
          CASE_T(all_ranks_leave_when_none_has_requests, 60),
          CASE_T(a_rank_with_requests_goes_on_when_those_that_wait_for_it_are_lost, 60),
          CASE_T(a_rank_that_is_in_no_group_leaves_at_once, 60),
          CASE_T(a_group_is_renewed_while_it_steps, 60),
          CASE_T(a_rank_that_is_lost_while_ranks_prepare, 60),
          CASE_T(a_rank_that_is_lost_while_it_joins_takes_nobody_with_it, 60),
          CASE_T(a_rank_that_cannot_prepare, 60),
          CASE_T(a_returned_rank_that_cannot_prepare_holds_up_nobody, 60),
          CASE_T(an_exchange_that_failed_ends_the_epoch_everywhere, 60),
          CASE_T(ranks_of_other_terms_are_refused_until_they_are_right, 60),
          CASE_T(what_is_refused_is_said_whole, 60), CASE_T(two_ranks_of_one_number, 60),
          CASE_T(rank_0_is_looked_for_where_ranks_meet, 60),
          CASE_T(a_rank_does_not_meet_itself, 60), CASE_T(a_loss_of_no_epoch_does_nothing, 60),
          CASE_T(messages_of_others_and_garbage_do_nothing, 60))
