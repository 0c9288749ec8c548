/* test_group.c - ranks of a group over real sockets: meeting in any order, exchanges of the threads
 * that prepare, losses at every stage, ranks that come back, and ranks that do not belong. */
#include <pthread.h>
#include <stdatomic.h>

#include "shared/cluster/group.h"
#include "shared/cluster/proto/node.pb-c.h"
#include "tests/unit/cluster/cluster_rig.h"
#include "tests/unit/cluster/silence.h"

enum { RANKS = 5, ROUNDS = 4, LOST_MS = 1200, RETRY_MS = 20, GRACE_MS = 300 };

/* A rank, whose thread exchanges a few rounds instead of making an ep object. Its engine meets the
 * others as soon as it is given one, and gives one up when it is told. */
struct rank {
    struct cluster_rig *rig;
    struct peer_node *node;
    struct group *group;
    uint32_t rank, size;
    pthread_t thread;
    uint64_t preparing; /* the thread's epoch; 0: it does not run */
    uint32_t me, n;     /* of its group */
    uint32_t members[RANKS];
    enum status prepared;
    struct err err;
    bool fails;
    atomic_bool hangs;   /* the thread waits before its last round */
    uint64_t epoch;      /* together since; 0: not */
    uint32_t n_together; /* ranks of that group */
    uint64_t lost;       /* the last epoch that was lost */
    uint64_t to_report;  /* lost by the engine, reported in the next turn */
    char why[256];
    uint64_t n_bells, bell_epoch, bell_step;
    uint64_t leaving; /* in this epoch */
    struct loop_timer *leaver;
    uint32_t n_losses, n_left;
};

static void on_thread_done(void *arg)
{
    struct rank *r = arg;
    const uint64_t epoch = r->preparing;
    pthread_join(r->thread, NULL);
    r->preparing = 0;
    group_prepared(r->group, epoch, r->prepared, r->err.text);
    if (r->prepared != OK) return;
    if (r->lost == epoch) {
        group_report_lost(r->group, epoch, "as its engine says");
        return;
    }
    r->epoch = epoch;
    r->n_together = r->n;
    group_joined(r->group, epoch);
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
        for (uint32_t i = 0; i < r->n; i++)
            for (size_t b = 0; b < bytes; b++)
                CHECK_EQ_INT(all[i * bytes + b], 16 * round + r->members[i] + 1);
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

/* The placement says who is in the group, and who was in the one before. */
static void place(void *arg, struct group_roster *next, const struct group_roster *before)
{
    (void)arg;
    for (uint32_t i = 0; i < next->n; i++)
        buf_printf(&next->placement, "%u", next->members[i].rank);
    buf_printf(&next->placement, "<%u", before->n);
}

static void on_prepare(void *arg, const struct group_roster *next, uint32_t me)
{
    struct rank *r = arg;
    CHECK(!r->preparing && next->epoch && next->members[me].rank == r->rank);
    r->preparing = next->epoch;
    r->me = me;
    r->n = next->n;
    for (uint32_t i = 0; i < next->n; i++) {
        r->members[i] = next->members[i].rank;
        CHECK_EQ_INT(next->placement.data[i] - '0', r->members[i]);
    }
    CHECK(pthread_create(&r->thread, NULL, prepare, r) == 0);
}

static void engine_has_left(void *arg)
{
    struct rank *r = arg;
    loop_timer_free(r->leaver);
    r->leaver = NULL;
    r->epoch = 0;
    group_has_left(r->group, r->leaving);
}

/* Its engine leaves when the others have the next group. */
static void on_leave(void *arg, uint64_t epoch)
{
    struct rank *r = arg;
    r->leaving = epoch;
    r->leaver = loop_timer_start(r->rig->loop, 30, 0, engine_has_left, r);
}

static void on_left(void *arg) { ((struct rank *)arg)->n_left++; }

/* The engine gave its object up. */
static void engine_has_lost(void *arg)
{
    struct rank *r = arg;
    if (r->node) group_report_lost(r->group, r->to_report, "as its engine says");
}

static void on_lost_epoch(void *arg, uint64_t epoch, const char *why)
{
    struct rank *r = arg;
    const bool had = r->epoch == epoch;
    r->lost = epoch;
    r->n_losses++;
    snprintf(r->why, sizeof r->why, "%s", why);
    if (!had) return;
    r->epoch = 0;
    r->to_report = epoch;
    CHECK_OK(loop_post(r->rig->loop, engine_has_lost, r));
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
static void on_met(void *arg, uint32_t kind, uint64_t node)
{
    CHECK_EQ_INT(kind, GROUP_OF_EXPERTS);
    group_on_met(((struct rank *)arg)->group, node);
}

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

/* id: of the process, another one after each start. port: where ranks meet; 0: its own. */
static void open_rank(struct cluster_rig *rig, struct rank *r, uint32_t rank, uint32_t size,
                      uint32_t node_size, uint64_t id, uint16_t port, const char *host)
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
        .node_size = node_size,
        .host = host ? host : "127.0.0.1",
        .meet_host = "127.0.0.1",
        .meet_port = port ? port : cluster_port(r->node->c),
        .retry_ms = RETRY_MS,
        .grace_ms = GRACE_MS,
        .place = place,
        .on_prepare = on_prepare,
        .on_leave = on_leave,
        .on_left = on_left,
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
    if (r->preparing) RIG_WAIT(r->rig, !r->preparing);
    group_free(r->group);
    r->node->hook = NULL;
    r->node->lost_hook = NULL;
    r->node->met_hook = NULL;
    peer_close(r->node);
    r->node = NULL;
}

struct scene {
    struct cluster_rig rig;
    const char *host; /* at which the next rank says it is reached; NULL: the right one */
    struct rank ranks[RANKS];
    uint32_t size, node_size;
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
    open_rank(&s->rig, &s->ranks[rank], rank, s->size, s->node_size, id, s->port, s->host);
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

/* Do the ranks that are there step in one group of all of them, of at least this epoch? */
static bool together(const struct scene *s, uint64_t epoch)
{
    uint32_t n = 0;
    uint64_t now = 0;
    for (uint32_t r = 0; r < s->size; r++) n += s->ranks[r].node != NULL;
    for (uint32_t r = 0; r < s->size; r++) {
        const struct rank *k = &s->ranks[r];
        if (!k->node) continue;
        if (!now) now = k->epoch;
        if (k->epoch < epoch || k->epoch != now || k->n_together != n) return false;
        const struct group_roster *roster = group_now(k->group);
        CHECK(roster->epoch == now && roster->n == n);
    }
    return now != 0;
}

/* Why do the ranks that are there step in the group of now? */
static void check_reason(const struct scene *s, enum group_reason want)
{
    for (uint32_t r = 0; r < s->size; r++)
        if (s->ranks[r].node)
            CHECK_EQ_STR(group_reason_name(group_now(s->ranks[r].group)->reason),
                         group_reason_name(want));
}

/* Groups joined for this reason, by all ranks together. */
static uint64_t n_joined(const struct scene *s, enum group_reason reason)
{
    char labels[64];
    snprintf(labels, sizeof labels, "of=\"experts\",reason=\"%s\"", group_reason_name(reason));
    return counter_value(metrics_counter(s->rig.metrics, "baton_group_epochs_total", labels, ""));
}

static const char *why_of(struct rank *r)
{
    static char why[GROUP_WHY_MAX];
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
            RIG_WAIT(&s.rig, s.ranks[r].n_bells > before[r] && s.ranks[r].bell_step == 40 + from);
            CHECK_EQ_INT(s.ranks[r].bell_epoch, 1);
        }
    }
    close_scene(&s);
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
        if (r != rank) CHECK(strstr(s->ranks[r].why, "was lost: "));
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

static uint64_t reach_ms(struct rank *r, uint64_t epoch, const char *other, uint16_t port)
{
    struct group_member members[] = { { .rank = 0, .host = "127.0.0.1", .port = port },
                                      { .rank = 1, .port = port } };
    const struct group_roster roster = { .epoch = epoch, .n = 2, .members = members };
    snprintf(members[1].host, sizeof members[1].host, "%s", other);
    const uint64_t t = clock_ms();
    group_reach(r->group, &roster, 0);
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
    const uint16_t port = meeting_port();
    CHECK(reach_ms(&s.ranks[0], epoch, "127.0.0.2", port) < 500); /* which refuses */
    be_silent(&silent, port);
    CHECK(reach_ms(&s.ranks[0], epoch, "127.0.0.1", port) < 500); /* is this host */
    CHECK(reach_ms(&s.ranks[0], epoch + 1, "127.0.0.2", port) < 500);
    CHECK(reach_ms(&s.ranks[0], epoch, "127.0.0.2", port) >= 2000);
    be_heard(&silent);
    CHECK(reach_ms(&s.ranks[0], epoch, "127.0.0.2", port) < 500);
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

/* A rank by hand: what its leader told it last. */
struct hand {
    struct peer_node *node;
    uint16_t port;
    uint64_t lost, proposed;
};

static bool hand_on_message(void *arg, const struct cluster_message *m)
{
    struct hand *h = arg;
    const uint8_t *body = (const uint8_t *)m->body.p;
    if (m->type == FRAME_GROUP_LOST) {
        Baton__GroupLost *lost = baton__group_lost__unpack(NULL, m->body.n, body);
        h->lost = lost->epoch;
        baton__group_lost__free_unpacked(lost, NULL);
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
    m.epoch = m.joined = 9;
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
    struct hand h = { 0 };
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
          CASE_T(ranks_that_are_lost_together, 60), CASE_T(two_halves_become_one_again, 60),
          CASE_T(ranks_that_cannot_be_reached_are_tried_at_the_same_time, 60),
          CASE_T(other_hosts_are_asked_whether_they_answer, 60),
          CASE_T(a_node_of_several_ranks_is_lost_whole, 60),
          CASE_T(a_rank_of_another_group_leaves_it_when_not_all_of_it_come, 60),
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
