/* test_group_halves.c - groups whose ranks were cut off from each other: each half goes on, two leaders
 * meet, both become one again, also when a rank cannot join, and ranks by hand who tell their leader
 * what cannot be. */
#include "shared/cluster/proto/node.pb-c.h"
#include "tests/unit/cluster/group_rig.h"

/* A rank is cut off from the others for a moment: each half may go on, and both become one. */
TEST(two_halves_become_one_again)
{
    struct scene s;
    open_scene(&s, RANKS);
    start_all(&s);
    for (uint32_t cut = 0; cut < 2; cut++) {
        RIG_WAIT(&s.rig, together(&s, 1 + cut));
        const uint64_t epoch = s.ranks[0].epoch;
        for (uint32_t r = 0; r < RANKS; r++) {
            if (r == cut) continue;
            cluster_disconnect(s.ranks[r].node->c, s.ranks[cut].node->id, "it is cut off");
            cluster_disconnect(s.ranks[cut].node->c, s.ranks[r].node->id, "it is cut off");
        }
        RIG_WAIT(&s.rig, together(&s, epoch + 1));
    }
    close_scene(&s);
}

/* Cuts the first two ranks off from the others. True: each half steps as a group. */
static bool are_apart(struct scene *s)
{
    bool apart = true;
    for (uint32_t r = 0; r < RANKS; r++) {
        const uint32_t n = r < 2 ? 2 : RANKS - 2;
        apart = apart && s->ranks[r].epoch && s->ranks[r].n_together == n;
        for (uint32_t other = 0; other < RANKS; other++)
            if ((r < 2) != (other < 2))
                cluster_disconnect(s->ranks[r].node->c, s->ranks[other].node->id, "it is cut off");
    }
    return apart;
}

/* The larger half leads when both meet again, and a rank cannot prepare the group of all: the other
 * half, which came, is left out for a while, and steps on as a whole meanwhile. */
static void half_steps_on(uint32_t failing)
{
    struct scene s;
    open_scene(&s, RANKS);
    start_all(&s);
    RIG_WAIT(&s.rig, together(&s, 1));
    s.ranks[failing].fails_from = 4;
    RIG_WAIT(&s.rig, are_apart(&s));
    const uint64_t epochs[] = { s.ranks[0].epoch, s.ranks[4].epoch };
    const uint32_t before = s.ranks[2].n_losses;
    RIG_WAIT(&s.rig, s.ranks[2].n_losses >= before + 3);
    const uint64_t until = clock_ms() + 300;
    while (clock_ms() < until) {
        rig_turn_ms(&s.rig, 5);
        for (uint32_t r = 0; r < RANKS; r++) CHECK_EQ_INT(s.ranks[r].epoch, epochs[r >= 2]);
    }
    s.ranks[failing].fails_from = 0;
    RIG_WAIT(&s.rig, together(&s, epochs[1] + 1));
    close_scene(&s);
}

TEST(a_half_steps_on_when_the_other_cannot_prepare) { half_steps_on(4); }
TEST(a_half_steps_on_when_one_of_it_cannot_prepare) { half_steps_on(1); }

/* A rank by hand: what its leader told it last. */
struct hand {
    struct peer_node *node;
    uint16_t port;
    uint64_t lost, proposed, epoch;
    bool refused;
};

static bool hand_on_message(void *arg, const struct cluster_message *m)
{
    struct hand *h = arg;
    const uint8_t *body = (const uint8_t *)m->body.p;
    if (m->type == FRAME_GROUP_LOST) {
        Baton__GroupLost *lost = baton__group_lost__unpack(NULL, m->body.n, body);
        h->lost = lost->epoch;
        baton__group_lost__free_unpacked(lost, NULL);
    } else if (m->type == FRAME_GROUP_REFUSED) {
        h->refused = true;
    } else if (m->type == FRAME_GROUP_PROPOSE) {
        Baton__GroupPropose *next = baton__group_propose__unpack(NULL, m->body.n, body);
        h->proposed = next->epoch;
        baton__group_propose__free_unpacked(next, NULL);
    }
    return true;
}

/* Rank 2 of 4, which steps in `running`, says so to node 100. */
static void hand_hello(struct hand *h, uint64_t running)
{
    char name[32];
    Baton__GroupHello m = BATON__GROUP_HELLO__INIT;
    snprintf(name, sizeof name, "127.0.0.1:%u", h->port);
    m.rank = 2;
    m.size = 4;
    m.name = name;
    m.terms = (char *)"tiny, f32";
    m.epoch = m.joined = h->epoch;
    m.running = running;
    m.is_free = true;
    m.host = (char *)"127.0.0.1";
    m.port = cluster_port(h->node->c);
    CHECK_OK(cluster_send_proto(h->node->c, 100, FRAME_GROUP_HELLO, 0, GROUP_OF_EXPERTS, &m.base));
}

/* The other half's leader comes, and the rank that stepped with it does not: the next group would
 * wait for one that waits for that rank. */
TEST(a_rank_of_another_group_leaves_it_when_not_all_of_it_come)
{
    struct scene s;
    struct hand h = { .epoch = 9 };
    open_scene(&s, 4);
    start_all(&s);
    RIG_WAIT(&s.rig, together(&s, 1));
    close_rank(&s.ranks[2]);
    close_rank(&s.ranks[3]);
    RIG_WAIT(&s.rig, together(&s, 2));
    const uint64_t epoch = s.ranks[0].epoch;
    h.port = s.port;
    h.node = peer_open(&s.rig, 302, (struct peer_options){ 0 });
    h.node->hook = hand_on_message;
    h.node->arg = &h;
    cluster_learn(h.node->c, 100, "127.0.0.1", s.port);
    hand_hello(&h, 9);
    RIG_WAIT(&s.rig, h.lost == 9);
    CHECK_EQ_INT(h.proposed, 0);
    CHECK_EQ_INT(s.ranks[1].epoch, epoch); /* the others step on */
    hand_hello(&h, 0);
    RIG_WAIT(&s.rig, h.proposed > 9);
    h.node->hook = NULL;
    peer_close(h.node);
    RIG_WAIT(&s.rig, !s.ranks[0].preparing && !s.ranks[1].preparing);
    CHECK(s.ranks[0].epoch == epoch && together(&s, epoch));
    close_scene(&s);
}

/* An epoch so far ahead that none could follow it. */
TEST(an_epoch_that_cannot_have_been_is_refused)
{
    struct scene s;
    struct hand h = { .epoch = UINT64_MAX / 2 };
    open_scene(&s, 4);
    start_all(&s);
    RIG_WAIT(&s.rig, together(&s, 1));
    close_rank(&s.ranks[2]);
    RIG_WAIT(&s.rig, together(&s, 2));
    h.port = s.port;
    h.node = peer_open(&s.rig, 302, (struct peer_options){ 0 });
    h.node->hook = hand_on_message;
    h.node->arg = &h;
    cluster_learn(h.node->c, 100, "127.0.0.1", s.port);
    hand_hello(&h, 0);
    RIG_WAIT(&s.rig, h.refused);
    h.epoch = 9;
    hand_hello(&h, 0);
    RIG_WAIT(&s.rig, h.proposed > 9);
    CHECK(h.proposed < 100);
    h.node->hook = NULL;
    peer_close(h.node);
    RIG_WAIT(&s.rig, !s.ranks[0].preparing && !s.ranks[1].preparing && !s.ranks[3].preparing);
    close_scene(&s);
}

TEST_MAIN(CASE_T(two_halves_become_one_again, 60),
          CASE_T(a_half_steps_on_when_the_other_cannot_prepare, 60),
          CASE_T(a_half_steps_on_when_one_of_it_cannot_prepare, 60),
          CASE_T(a_rank_of_another_group_leaves_it_when_not_all_of_it_come, 60),
          CASE_T(an_epoch_that_cannot_have_been_is_refused, 60))
