/* test_group.c - ranks of a group over real sockets: meeting in any order, exchanges of the threads
 * that prepare, losses at every stage, ranks that come back, and ranks that do not belong. */
#include <pthread.h>
#include <stdatomic.h>

#include "shared/cluster/group.h"
#include "tests/unit/cluster/cluster_rig.h"

enum { RANKS = 5, ROUNDS = 4, LOST_MS = 600, RETRY_MS = 20 };

/* A rank, whose thread exchanges a few rounds instead of making an ep object. */
struct rank {
    struct cluster_rig *rig;
    struct peer_node *node;
    struct group *group;
    uint32_t rank, size;
    pthread_t thread;
    uint64_t preparing; /* the thread's epoch */
    enum status prepared;
    struct err err;
    bool fails, has_thread;
    atomic_bool hangs; /* the thread waits before its last round */
    uint64_t epoch;    /* together since; 0: not */
    uint64_t lost;     /* the last epoch that was lost */
    char why[256];
    uint64_t n_bells, bell_epoch, bell_step;
};

static void on_thread_done(void *arg)
{
    struct rank *r = arg;
    pthread_join(r->thread, NULL);
    r->has_thread = false;
    if (r->prepared == OK && group_epoch(r->group) == r->preparing) r->epoch = r->preparing;
    group_prepared(r->group, r->preparing, r->prepared, r->err.text);
    if (r->prepared != OK) return;
    if (r->lost == r->preparing) group_report_lost(r->group, r->preparing, "as its engine says");
    else group_joined(r->group, r->preparing);
}

/* Every round has another size, and says whose it is. */
static enum status exchange_rounds(struct rank *r, struct err *err)
{
    for (uint32_t round = 0; round < ROUNDS; round++) {
        const size_t bytes = 8 + 40 * (size_t)round;
        uint8_t mine[200], all[RANKS * 200];
        memset(mine, (int)(16 * round + r->rank + 1), bytes);
        while (round == ROUNDS - 1 && atomic_load(&r->hangs)) usleep(1000);
        if (r->fails) return err_set(err, ERR_NOMEM, "rank %u has no memory", r->rank);
        TRY(group_exchange(r->group, mine, bytes, all, err));
        for (uint32_t other = 0; other < r->size; other++)
            for (size_t i = 0; i < bytes; i++)
                CHECK_EQ_INT(all[other * bytes + i], 16 * round + other + 1);
    }
    return OK;
}

static void *prepare(void *arg)
{
    struct rank *r = arg;
    r->prepared = exchange_rounds(r, &r->err);
    CHECK_OK(loop_post(r->rig->loop, on_thread_done, r));
    return NULL;
}

static void on_prepare(void *arg, uint64_t epoch)
{
    struct rank *r = arg;
    CHECK(!r->has_thread);
    r->has_thread = true;
    r->preparing = epoch;
    CHECK(pthread_create(&r->thread, NULL, prepare, r) == 0);
}

/* The engine gave its object up. */
static void engine_has_lost(void *arg)
{
    struct rank *r = arg;
    if (r->node) group_report_lost(r->group, r->lost, "as its engine says");
}

static void on_lost_epoch(void *arg, uint64_t epoch, const char *why)
{
    struct rank *r = arg;
    const bool had = r->epoch == epoch;
    r->lost = epoch;
    r->epoch = 0;
    snprintf(r->why, sizeof r->why, "%s", why);
    if (had) CHECK_OK(loop_post(r->rig->loop, engine_has_lost, r));
}

static void on_bell(void *arg, uint64_t epoch, uint64_t step)
{
    struct rank *r = arg;
    r->n_bells++;
    r->bell_epoch = epoch;
    r->bell_step = step;
}

static bool on_message(void *arg, const struct cluster_message *m)
{
    return group_on_message(((struct rank *)arg)->group, m);
}
static void on_lost(void *arg, uint64_t node, const char *why)
{
    group_on_lost(((struct rank *)arg)->group, node, why);
}
static void on_met(void *arg, uint64_t node) { group_on_met(((struct rank *)arg)->group, node); }

static uint16_t meeting_port(void)
{
    struct cluster_rig r;
    cluster_rig_open(&r);
    struct peer_node *n = peer_open(&r, 1, (struct peer_options){ 0 });
    const uint16_t port = cluster_port(n->c);
    peer_close(n);
    cluster_rig_close(&r);
    return port;
}

/* id: of the process, another one after each start. */
static void open_rank(struct cluster_rig *rig, struct rank *r, uint32_t rank, uint32_t size,
                      uint64_t id, uint16_t port)
{
    *r = (struct rank){ .rig = rig, .rank = rank, .size = size };
    r->node = peer_open(rig, id,
                        (struct peer_options){ .lost_ms = LOST_MS, .port = rank == 0 ? port : 0 });
    r->node->hook = on_message;
    r->node->lost_hook = on_lost;
    r->node->met_hook = on_met;
    r->node->arg = r;
    const struct group_options o = {
        .loop = rig->loop,
        .cluster = r->node->c,
        .metrics = rig->metrics,
        .node = id,
        .rank = rank,
        .size = size,
        .meet_host = "127.0.0.1",
        .meet_port = port,
        .retry_ms = RETRY_MS,
        .on_prepare = on_prepare,
        .on_lost = on_lost_epoch,
        .on_bell = on_bell,
        .arg = r,
    };
    r->group = group_create(&o);
}

/* The process ends. */
static void close_rank(struct rank *r)
{
    atomic_store(&r->hangs, false);
    group_stop(r->group);
    if (r->has_thread) RIG_WAIT(r->rig, !r->has_thread);
    group_free(r->group);
    r->node->hook = NULL;
    r->node->lost_hook = NULL;
    r->node->met_hook = NULL;
    peer_close(r->node);
    r->node = NULL;
}

struct scene {
    struct cluster_rig rig;
    struct rank ranks[RANKS];
    uint32_t size;
    uint16_t port;
};

static void open_scene(struct scene *s, uint32_t size)
{
    memset(s, 0, sizeof *s);
    s->size = size;
    s->port = meeting_port();
    cluster_rig_open(&s->rig);
}

static void start(struct scene *s, uint32_t rank, uint64_t id)
{
    open_rank(&s->rig, &s->ranks[rank], rank, s->size, id, s->port);
}

static void start_all(struct scene *s)
{
    for (uint32_t r = 0; r < s->size; r++) start(s, r, 100 + r);
    for (uint32_t r = 0; r < s->size; r++) group_ready(s->ranks[r].group, "tiny, f32");
}

static void close_scene(struct scene *s)
{
    for (uint32_t r = 0; r < s->size; r++)
        if (s->ranks[r].node) close_rank(&s->ranks[r]);
    cluster_rig_close(&s->rig);
}

static bool together(const struct scene *s, uint64_t epoch)
{
    char why[256];
    for (uint32_t r = 0; r < s->size; r++) {
        if (s->ranks[r].epoch != epoch) return false;
        CHECK_EQ_INT(group_describe(s->ranks[r].group, why, sizeof why), GROUP_TOGETHER);
        CHECK_EQ_STR(why, "");
    }
    return true;
}

static const char *why_of(struct rank *r)
{
    static char why[256];
    (void)group_describe(r->group, why, sizeof why);
    return why;
}

/* ---- tests ---- */

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
            RIG_WAIT(&s.rig, s.ranks[r].n_bells == before[r] + 1);
            CHECK_EQ_INT(s.ranks[r].bell_epoch, 1);
            CHECK_EQ_INT(s.ranks[r].bell_step, 40 + from);
        }
        rig_turn_ms(&s.rig, 20);
        CHECK_EQ_INT(s.ranks[from].n_bells, before[from]);
    }
    close_scene(&s);
}

/* Rank `rank` ends; the others learn it, and are together again once it is back. */
static void lose(struct scene *s, uint32_t rank, uint64_t epoch, uint64_t id)
{
    char want[64];
    close_rank(&s->ranks[rank]);
    snprintf(want, sizeof want, "rank %u was lost: ", rank);
    for (uint32_t r = 0; r < s->size; r++) {
        if (r == rank) continue;
        RIG_WAIT(&s->rig, s->ranks[r].lost == epoch);
        CHECK(strstr(s->ranks[r].why, want));
    }
    rig_turn_ms(&s->rig, 60);
    CHECK(strstr(why_of(&s->ranks[rank == 1 ? 2 : 1]),
                 rank == 0 ? "rank 0 of the group is not reached" : want));
    start(s, rank, id);
    group_ready(s->ranks[rank].group, "tiny, f32");
    RIG_WAIT(&s->rig, together(s, epoch + 1));
}

TEST(a_lost_rank_comes_back_into_the_next_epoch)
{
    struct scene s;
    open_scene(&s, RANKS);
    start_all(&s);
    RIG_WAIT(&s.rig, together(&s, 1));
    lose(&s, 3, 1, 203);
    lose(&s, 1, 2, 201);
    lose(&s, 0, 3, 200); /* who leads; the others tell it which epoch was the last */
    lose(&s, 4, 4, 204);
    close_scene(&s);
}

/* While the ranks' threads exchange, one ends: the exchange of the others fails at once. */
TEST(a_rank_that_is_lost_while_ranks_prepare)
{
    struct scene s;
    open_scene(&s, RANKS);
    for (uint32_t r = 0; r < RANKS; r++) start(&s, r, 100 + r);
    atomic_store(&s.ranks[2].hangs, true);
    for (uint32_t r = 0; r < RANKS; r++) group_ready(s.ranks[r].group, "tiny, f32");
    RIG_WAIT(&s.rig, s.ranks[2].has_thread && s.ranks[4].has_thread);
    rig_turn_ms(&s.rig, 30);
    close_rank(&s.ranks[4]);
    RIG_WAIT_MS(&s.rig, s.ranks[0].lost == 1 && s.ranks[1].lost == 1 && s.ranks[3].lost == 1, 2000);
    RIG_WAIT_MS(&s.rig, !s.ranks[0].has_thread && !s.ranks[1].has_thread, 2000);
    CHECK_STATUS(s.ranks[1].prepared, ERR_PEER_LOST);
    start(&s, 4, 204);
    group_ready(s.ranks[4].group, "tiny, f32");
    rig_turn_ms(&s.rig, 60);
    CHECK(!together(&s, 2)); /* rank 2's thread is still busy with the first */
    atomic_store(&s.ranks[2].hangs, false);
    RIG_WAIT(&s.rig, together(&s, 2));
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
    RIG_WAIT(&s.rig, s.ranks[0].epoch > 2 && together(&s, s.ranks[0].epoch));
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
    CHECK_EQ_STR(s.ranks[0].why, "rank 1 did not come for 30000 ms");
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
    close_rank(&s.ranks[1]);
    open_rank(&s.rig, &other, 1, 3, 301, s.port); /* of three */
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

TEST(two_ranks_of_one_number)
{
    struct scene s;
    struct rank twin;
    open_scene(&s, 2);
    start_all(&s);
    RIG_WAIT(&s.rig, together(&s, 1));
    open_rank(&s.rig, &twin, 1, 2, 301, s.port);
    group_ready(twin.group, "tiny, f32");
    RIG_WAIT(&s.rig, strstr(why_of(&twin), "there is a rank 1 already"));
    close_rank(&s.ranks[1]); /* it takes the place */
    RIG_WAIT(&s.rig, twin.epoch == 2 && s.ranks[0].epoch == 2);
    close_rank(&twin);
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
        for (unsigned type = FRAME_GROUP_HELLO; type <= FRAME_GROUP_BELL; type++)
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

TEST_MAIN(CASE_T(ranks_that_come_in_any_order_are_together, 60),
          CASE_T(a_group_of_one_needs_nobody, 60), CASE_T(bells_reach_all_others, 60),
          CASE_T(a_lost_rank_comes_back_into_the_next_epoch, 60),
          CASE_T(a_rank_that_is_lost_while_ranks_prepare, 60),
          CASE_T(a_rank_that_cannot_prepare, 60),
          CASE_T(an_exchange_that_failed_ends_the_epoch_everywhere, 60),
          CASE_T(ranks_of_other_terms_are_refused_until_they_are_right, 60),
          CASE_T(two_ranks_of_one_number, 60),
          CASE_T(messages_of_others_and_garbage_do_nothing, 60))
