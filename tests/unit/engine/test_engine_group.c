/* test_engine_group.c - engines that share experts: every request has the tokens and the bits of one
 * engine that has the whole model, whatever the other ranks do meanwhile. Ranks are engines of one
 * process, each with its thread; their rows travel through shared memory. */
#include <stdatomic.h>

#include "shared/base/clock.h"
#include "shared/engine/engine_state.h"
#include "shared/model/expert_rows.h"
#include "tests/fixtures/rank_meeting.h"
#include "tests/unit/engine/draft_book.h"
#include "tests/unit/engine/engine_rig.h"

enum { RANKS = 4, N_REQUESTS = TEST_IS_SANITIZED ? 6 : 12, N_OUT = 24 };

/* ---- a group ---- */

struct rank {
    struct rig rig; /* first: the callbacks' arg */
    struct group *group;
    struct rank_seat seat;
    struct model_share share;
    struct ep *made; /* by make_ep */
    pthread_t thread;
    atomic_int n_joined, n_left, n_lost, n_bells, lost_by; /* lost_by: the last status */
};

struct group {
    uint32_t size;
    uint64_t epoch;
    struct rank_meeting meeting;
    struct rank ranks[RANKS];
};

/* What the owner of a rank does: it passes bells on. */
static void on_group(void *arg, const struct engine_group_event *ev)
{
    struct rank *r = arg;
    switch (ev->kind) {
    case ENGINE_GROUP_JOINED: atomic_fetch_add(&r->n_joined, 1); break;
    case ENGINE_GROUP_LEFT: atomic_fetch_add(&r->n_left, 1); break;
    case ENGINE_GROUP_LOST:
        CHECK(ev->why->code != OK);
        atomic_store(&r->lost_by, ev->why->code);
        atomic_fetch_add(&r->n_lost, 1);
        break;
    case ENGINE_GROUP_BELL:
        atomic_fetch_add(&r->n_bells, 1);
        for (uint32_t i = 0; i < r->group->size; i++)
            if (&r->group->ranks[i] != r)
                engine_bell(r->group->ranks[i].rig.engine, ev->epoch, ev->step);
    }
}

static void *make_ep(void *arg)
{
    struct rank *r = arg;
    r->made = rank_experts(&r->seat, r->rig.model, 0);
    return NULL;
}

/* Gives every rank a group of the next epoch. */
static void join_all(struct group *g)
{
    g->epoch++;
    for (uint32_t i = 0; i < g->size; i++)
        CHECK(pthread_create(&g->ranks[i].thread, NULL, make_ep, &g->ranks[i]) == 0);
    for (uint32_t i = 0; i < g->size; i++) CHECK(pthread_join(g->ranks[i].thread, NULL) == 0);
    for (uint32_t i = 0; i < g->size; i++)
        CHECK_OK(engine_join_group(g->ranks[i].rig.engine, g->ranks[i].made, NULL, g->epoch));
}

static struct rig_options rank_options(const char *model)
{
    return (struct rig_options){ .model = model, .on_group = on_group, .max_batched_tokens = 48 };
}

static void open_group(struct group *g, uint32_t size, struct rig_options o, uint32_t n_experts)
{
    memset(g, 0, sizeof *g);
    g->size = size;
    rank_meeting_init(&g->meeting, size);
    for (uint32_t i = 0; i < size; i++) {
        struct rank *r = &g->ranks[i];
        r->group = g;
        r->seat = (struct rank_seat){ &g->meeting, i };
        r->share = rank_share(i, size, 1, n_experts);
        o.share = &r->share;
        rig_open(&r->rig, o);
    }
    join_all(g);
}

static void close_group(struct group *g)
{
    for (uint32_t i = 0; i < g->size; i++) rig_close(&g->ranks[i].rig);
    rank_meeting_release(&g->meeting);
}

static void await(atomic_int *n, int want)
{
    for (int ms = 0; atomic_load(n) < want; ms++) {
        if (ms == RIG_WAIT_MS) test_fail(__FILE__, __LINE__, "%d of %d", atomic_load(n), want);
        usleep(1000);
    }
}

/* ---- requests ---- */

/* Of several lengths; odd ones are sampled. */
static void make_requests(struct engine_request *reqs)
{
    static const uint32_t lengths[] = { 33, 1, 100, 16, 2, 65, 48, 17, 31, 64, 15, 90 };
    for (uint32_t i = 0; i < N_REQUESTS; i++) {
        reqs[i] = rig_request(1 + i, lengths[i], 500 + i, N_OUT);
        if (i % 2 == 0) continue;
        reqs[i].sampling.temperature = 0.9f;
        reqs[i].sampling.top_p = 0.95f;
        reqs[i].sampling.repetition_penalty = 1.1f;
    }
}

static struct answer *answers_alone(const char *model, enum activations a,
                                    const struct engine_request *reqs, uint32_t *n_experts)
{
    struct rig r;
    rig_open(&r, (struct rig_options){ .model = model, .activations = a });
    struct answer *want = rig_run(&r, reqs, N_REQUESTS);
    *n_experts = r.model->config.moe.n_experts;
    rig_close(&r);
    return want;
}

/* Most requests are the first rank's, and with three or more ranks one has none. */
static uint32_t rank_of(const struct group *g, uint32_t i)
{
    return g->size > 1 && i % 3 == 2 ? 1 : g->size > 3 && i % 6 == 4 ? 3 : 0;
}

static void submit_all(struct group *g, const struct engine_request *reqs, struct answer *got)
{
    for (uint32_t i = 0; i < N_REQUESTS; i++) {
        got[i].id = reqs[i].id;
        CHECK_OK(engine_submit(g->ranks[rank_of(g, i)].rig.engine, &reqs[i]));
    }
}

/* Gathers what rank `rank` was asked. */
static void gather_of(struct group *g, uint32_t rank, struct answer *got)
{
    uint32_t n = 0;
    struct answer *mine = MEM_ARRAY(struct answer, N_REQUESTS);
    for (uint32_t i = 0; i < N_REQUESTS; i++)
        if (rank_of(g, i) == rank) mine[n++] = got[i];
    rig_gather(&g->ranks[rank].rig, mine, n);
    for (uint32_t i = N_REQUESTS; i-- > 0;)
        if (rank_of(g, i) == rank) got[i] = mine[--n];
    mem_free(mine);
}

static void check_answers(struct group *g, struct answer *got, const struct answer *want)
{
    for (uint32_t r = 0; r < g->size; r++) gather_of(g, r, got);
    for (uint32_t i = 0; i < N_REQUESTS; i++) {
        CHECK_OK(got[i].end.status);
        check_same(&got[i], &want[i]);
    }
}

/* ---- tests ---- */

/* Ranks with drafts have rows that the others do not count on. */
static void check_model(const char *model, enum activations a, uint32_t n_blocks,
                        enum draft_source drafts)
{
    struct engine_request reqs[N_REQUESTS];
    uint32_t n_experts;
    struct group *g = MEM_NEW(struct group);
    struct draft_book book;
    make_requests(reqs);
    struct answer *want = answers_alone(model, a, reqs, &n_experts);
    draft_book_init(&book, DRAFTS_MIXED, 5, reqs, want, N_REQUESTS);
    for (uint32_t size = 1; size <= RANKS; size++) {
        struct answer *got = MEM_ARRAY(struct answer, N_REQUESTS);
        struct rig_options o = rank_options(model);
        o.activations = a;
        o.n_blocks = n_blocks;
        draft_source_set(&o, drafts, &book);
        open_group(g, size, o, n_experts);
        submit_all(g, reqs, got);
        check_answers(g, got, want);
        close_group(g);
        mem_free(got);
    }
    mem_free(want);
    mem_free(g);
}

TEST(ranks_answer_as_one) { check_model("ernie_moe", ACTIVATIONS_F32, 0, NO_DRAFTS); }
TEST(ranks_that_compute_fast_answer_as_one)
{
    check_model("qwen3_moe", ACTIVATIONS_FAST, 0, NO_DRAFTS);
}
TEST(ranks_that_preempt_answer_as_one)
{
    check_model("deepseek_v3", ACTIVATIONS_F32, 14, NO_DRAFTS);
}
TEST(ranks_with_drafts_answer_as_one)
{
    check_model("ernie_moe", ACTIVATIONS_FAST, 0, DRAFTS_OF_BOOK);
    check_model("deepseek_v3", ACTIVATIONS_F32, 14, DRAFTS_OF_BOOK);
}

/* The layer's experts are shared like the others: ranks make its passes together. */
TEST(ranks_with_a_draft_layer_answer_as_one)
{
    check_model("ernie_moe", ACTIVATIONS_F32, 0, DRAFTS_OF_LAYER);
    check_model("deepseek_v3", ACTIVATIONS_FAST, 0, DRAFTS_OF_LAYER);
    check_model("deepseek_v3", ACTIVATIONS_F32, 14, DRAFTS_OF_LAYER);
}

/* What most cases run on. */
struct scene {
    struct group g;
    struct engine_request reqs[N_REQUESTS];
    struct answer *want, *got;
};

static struct scene *open_scene_with(uint32_t size, enum draft_source drafts)
{
    struct scene *s = MEM_NEW(struct scene);
    struct rig_options o = rank_options("ernie_moe");
    uint32_t n_experts;
    draft_source_set(&o, drafts, NULL);
    make_requests(s->reqs);
    s->want = answers_alone("ernie_moe", ACTIVATIONS_F32, s->reqs, &n_experts);
    s->got = MEM_ARRAY(struct answer, N_REQUESTS);
    open_group(&s->g, size, o, n_experts);
    return s;
}

static struct scene *open_scene(uint32_t size) { return open_scene_with(size, NO_DRAFTS); }

static void close_scene(struct scene *s)
{
    close_group(&s->g);
    mem_free(s->want);
    mem_free(s->got);
    mem_free(s);
}

/* Asks rank `rank` one request and checks the answer. */
static void ask_one(struct scene *s, uint32_t rank, uint32_t i, uint64_t id)
{
    struct engine_request r = s->reqs[i];
    r.id = id;
    struct answer *a = rig_run(&s->g.ranks[rank].rig, &r, 1);
    check_same(a, &s->want[i]);
    mem_free(a);
}

static bool has_work(const struct engine *e)
{
    struct engine_stats st;
    engine_get_stats(e, &st);
    return st.has_work;
}

/* All at one moment: a rank that is looked at later may wake one that slept before. */
static void await_sleep(struct group *g)
{
    for (uint32_t asleep = 0, ms = 0; asleep < 2 * g->size; ms++) {
        for (asleep = 0; asleep < 2 * g->size; asleep++)
            if (has_work(g->ranks[asleep % g->size].rig.engine)) break;
        CHECK(ms < RIG_WAIT_MS);
        usleep(1000);
    }
}

static double cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* A group without work uses no CPU and says that it has none; any rank wakes it, once. */
TEST(a_group_without_rows_sleeps_until_one_has_some)
{
    struct scene *s = open_scene(3);
    for (uint32_t round = 0; round < 6; round++) {
        await_sleep(&s->g);
        const int bells = atomic_load(&s->g.ranks[round % 3].n_bells);
        ask_one(s, round % 3, round % N_REQUESTS, 100 + round);
        CHECK_EQ_INT(atomic_load(&s->g.ranks[round % 3].n_bells), bells + 1);
    }
    await_sleep(&s->g);
    const double before = cpu_seconds();
    usleep(500000);
    CHECK(cpu_seconds() - before < 0.25);
    close_scene(s);
}

/* Another group takes over again and again while answers are made. */
static void check_following(enum draft_source drafts)
{
    struct scene *s = open_scene_with(3, drafts);
    submit_all(&s->g, s->reqs, s->got);
    for (int i = 0; i < 12; i++) {
        join_all(&s->g);
        for (uint32_t r = 0; r < 3; r++) await(&s->g.ranks[r].n_joined, i + 2);
    }
    check_answers(&s->g, s->got, s->want);
    for (uint32_t r = 0; r < 3; r++) CHECK_EQ_INT(atomic_load(&s->g.ranks[r].n_lost), 0);
    close_scene(s);
}

TEST(groups_follow_each_other_between_steps)
{
    check_following(NO_DRAFTS);
    check_following(DRAFTS_OF_LAYER);
}

/* One that only some ranks were given waits for the others. */
TEST(a_group_begins_when_all_ranks_have_it)
{
    struct scene *s = open_scene(2);
    struct rank *r = s->g.ranks;
    for (int i = 0; i < 2; i++) await(&r[i].n_joined, 1);
    for (int i = 0; i < 2; i++) CHECK(pthread_create(&r[i].thread, NULL, make_ep, &r[i]) == 0);
    for (int i = 0; i < 2; i++) CHECK(pthread_join(r[i].thread, NULL) == 0);
    CHECK_OK(engine_join_group(r[0].rig.engine, r[0].made, NULL, 2));
    ask_one(s, 1, 0, 100);
    CHECK_EQ_INT(atomic_load(&r[0].n_joined), 1);
    CHECK_OK(engine_join_group(r[1].rig.engine, r[1].made, NULL, 2));
    for (int i = 0; i < 2; i++) await(&r[i].n_joined, 2); /* though nobody has rows */
    ask_one(s, 1, 1, 101);
    close_scene(s);
}

/* Every rank waits as the curve says of its own rows, those without rows for what is fixed. */
TEST(ranks_of_a_paced_group_wait_alike)
{
    struct scene *s = MEM_NEW(struct scene);
    const struct pace_curve c = { .fixed_us = 20000 };
    struct rig_options o = rank_options("ernie_moe");
    uint32_t n_experts;
    o.pace = &c;
    make_requests(s->reqs);
    s->want = answers_alone("ernie_moe", ACTIVATIONS_F32, s->reqs, &n_experts);
    open_group(&s->g, 2, o, n_experts);
    const uint64_t begin = clock_ns();
    ask_one(s, 0, 3, 100); /* 16 tokens fit into a step, and N_OUT come out */
    CHECK(clock_ns() - begin >= N_OUT * UINT64_C(20000000) - 2000000);
    await_sleep(&s->g);
    for (uint32_t r = 0; r < 2; r++) {
        CHECK_EQ_INT(s->g.ranks[r].rig.engine->n_paced, N_OUT);
        CHECK_EQ_INT(rig_count(&s->g.ranks[r].rig, "baton_engine_steps_total"), N_OUT);
    }
    close_group(&s->g);
    mem_free(s->want);
    mem_free(s);
}

/* The first rank's steps would take 20 ms, but the second, with three sequences, takes 60: so long
 * its sequence waits for each token, and so the rank says. */
TEST(a_rank_is_as_fast_as_the_slowest)
{
    const struct pace_curve c = { .decode.row_us = 20000 };
    struct scene *s = MEM_NEW(struct scene);
    struct rig_options o = rank_options("ernie_moe");
    uint32_t n_experts;
    make_requests(s->reqs);
    s->want = answers_alone("ernie_moe", ACTIVATIONS_F32, s->reqs, &n_experts);
    s->got = MEM_ARRAY(struct answer, 4);
    o.pace = &c;
    open_group(&s->g, 2, o, n_experts);
    const uint64_t begin = clock_ns();
    for (uint32_t i = 0; i < 4; i++) {
        struct engine_request q = rig_request(1 + i, 16, 700 + i, N_OUT);
        s->got[i].id = q.id;
        CHECK_OK(engine_submit(s->g.ranks[i > 0].rig.engine, &q));
    }
    rig_gather(&s->g.ranks[0].rig, s->got, 1);
    rig_gather(&s->g.ranks[1].rig, s->got + 1, 3);
    const double wall_us = (double)(clock_ns() - begin) * 1e-3 / (N_OUT - 1);
    for (uint32_t r = 0; r < 2; r++) {
        struct engine_stats st;
        engine_get_stats(s->g.ranks[r].rig.engine, &st);
        if (st.step_us < 54000 || st.step_us > 1.5 * wall_us)
            test_fail(__FILE__, __LINE__, "rank %u says %u us, not %g", r, st.step_us, wall_us);
    }
    close_scene(s);
}

/* A next group that is given up before all have it leaves the one that steps alone. */
TEST(a_next_group_that_is_given_up_costs_nothing)
{
    struct scene *s = open_scene(2);
    struct rank *r = s->g.ranks;
    submit_all(&s->g, s->reqs, s->got);
    for (int round = 1; round <= 5; round++) {
        const uint64_t epoch = s->g.epoch + 1;
        for (int i = 0; i < 2; i++) CHECK(pthread_create(&r[i].thread, NULL, make_ep, &r[i]) == 0);
        for (int i = 0; i < 2; i++) CHECK(pthread_join(r[i].thread, NULL) == 0);
        CHECK_OK(engine_join_group(r[0].rig.engine, r[0].made, NULL, epoch));
        engine_abort_group(r[0].rig.engine, epoch);
        await(&r[0].n_lost, 2 * round - 1);
        engine_abort_group(r[1].rig.engine, epoch);
        CHECK_OK(
            engine_join_group(r[1].rig.engine, r[1].made, NULL, epoch)); /* told before it has it */
        await(&r[1].n_lost, round);
        CHECK_OK(engine_join_group(r[0].rig.engine, NULL, NULL, epoch + 1)); /* likewise to leave */
        engine_abort_group(r[0].rig.engine, epoch + 1);
        await(&r[0].n_lost, 2 * round);
        s->g.epoch = epoch + 1;
        join_all(&s->g);
        for (int i = 0; i < 2; i++) await(&r[i].n_joined, 1 + round);
    }
    check_answers(&s->g, s->got, s->want);
    CHECK_EQ_INT(atomic_load(&r[0].n_left), 0);
    close_scene(s);
}

TEST(ranks_leave_together_and_come_back)
{
    struct scene *s = open_scene(2);
    ask_one(s, 0, 0, 100);
    for (int i = 0; i < 2; i++)
        CHECK_OK(engine_join_group(s->g.ranks[i].rig.engine, NULL, NULL, 5));
    for (int i = 0; i < 2; i++) await(&s->g.ranks[i].n_left, 1);
    struct answer a = { .id = 101 };
    struct engine_request r = s->reqs[1];
    r.id = a.id;
    CHECK_OK(engine_submit(s->g.ranks[1].rig.engine, &r));
    s->g.epoch = 5;
    join_all(&s->g);
    rig_gather(&s->g.ranks[1].rig, &a, 1);
    check_same(&a, &s->want[1]);
    close_scene(s);
}

/* A rank is given up in the middle of steps, at other moments each time; the next group goes on
 * where the steps ended, with no token lost, wrong or repeated. */
static void check_lost(enum draft_source drafts)
{
    struct scene *s = open_scene_with(3, drafts);
    submit_all(&s->g, s->reqs, s->got);
    for (int round = 1; round <= 8; round++) {
        usleep(700 * (useconds_t)round);
        engine_abort_group(s->g.ranks[round % 3].rig.engine, s->g.epoch);
        for (uint32_t r = 0; r < 3; r++) await(&s->g.ranks[r].n_lost, round);
        join_all(&s->g);
    }
    check_answers(&s->g, s->got, s->want);
    for (uint32_t r = 0; r < 3; r++) rig_await_free_blocks(&s->g.ranks[r].rig, RIG_BLOCKS_MAX);
    close_scene(s);
}

TEST(a_lost_group_is_replaced_without_a_trace)
{
    check_lost(NO_DRAFTS);
    check_lost(DRAFTS_OF_LAYER);
}

/* A group that sleeps is given up, too: the rank that was told says so at once, the others when they
 * meet it again. */
TEST(a_sleeping_group_can_be_lost)
{
    struct scene *s = open_scene(2);
    await_sleep(&s->g);
    engine_abort_group(s->g.ranks[0].rig.engine, 0); /* of another epoch */
    ask_one(s, 0, 0, 100);
    await_sleep(&s->g);
    for (uint32_t r = 0; r < 2; r++) engine_abort_group(s->g.ranks[r].rig.engine, 1);
    for (uint32_t r = 0; r < 2; r++) await(&s->g.ranks[r].n_lost, 1);
    join_all(&s->g);
    ask_one(s, 1, 1, 101);
    close_scene(s);
}

/* What a rank says sets how many exchanges the others make: nonsense is not believed. */
TEST(a_rank_with_impossible_rows_or_passes_is_refused)
{
    static const struct {
        uint64_t rows, passes;
    } nonsense[] = { { 49, 0 }, { 1 << 30, 0 }, { UINT64_MAX, 0 }, { 1, 1 }, { 1, UINT64_MAX } };
    struct scene *s = open_scene(2);
    struct rank *r = s->g.ranks;
    engine_stop(r[1].rig.engine);
    engine_abort_group(r[0].rig.engine, 1); /* asleep, it would not learn of it by itself */
    await(&r[0].n_lost, 1);
    for (int i = 0; i < (int)COUNT_OF(nonsense); i++) {
        struct engine_group_words all[2], mine = { .epoch = 2 + (uint64_t)i, .rank = 1 };
        mine.n_rows = nonsense[i].rows;
        mine.n_passes = nonsense[i].passes; /* where no rank has a draft layer */
        mine.next_epoch = mine.epoch;
        for (int k = 0; k < 2; k++) CHECK(pthread_create(&r[k].thread, NULL, make_ep, &r[k]) == 0);
        for (int k = 0; k < 2; k++) CHECK(pthread_join(r[k].thread, NULL) == 0);
        CHECK_OK(engine_join_group(r[0].rig.engine, r[0].made, NULL, mine.epoch));
        CHECK_OK(ep_gather_words(r[1].made, all, &mine, sizeof mine, NULL));
        await(&r[0].n_lost, 2 + i);
        CHECK_EQ_INT(atomic_load(&r[0].lost_by), ERR_PEER_MISMATCH);
        ep_free(r[1].made);
    }
    close_scene(s);
}

/* While an engine waits for another rank, bells take no room of the commands that come meanwhile:
 * workers count on it that a cancel finds some. */
TEST(bells_leave_room_for_commands)
{
    struct scene *s = open_scene(2);
    struct rank *r = s->g.ranks;
    engine_stop(r[1].rig.engine);
    engine_abort_group(r[0].rig.engine, 1); /* asleep, it would not learn of it by itself */
    await(&r[0].n_lost, 1);
    for (int k = 0; k < 2; k++) CHECK(pthread_create(&r[k].thread, NULL, make_ep, &r[k]) == 0);
    for (int k = 0; k < 2; k++) CHECK(pthread_join(r[k].thread, NULL) == 0);
    CHECK_OK(engine_join_group(r[0].rig.engine, r[0].made, NULL, 2));
    for (uint64_t i = 0; i < 20000; i++) engine_bell(r[0].rig.engine, 2, i);
    CHECK_OK(engine_cancel(r[0].rig.engine, 77, true));
    ep_discard(r[1].made);
    await(&r[0].n_lost, 2);
    close_scene(s);
}

/* An engine that stops takes nobody with it. */
TEST(the_others_learn_that_an_engine_stops)
{
    struct scene *s = open_scene(3);
    submit_all(&s->g, s->reqs, s->got);
    engine_stop(s->g.ranks[2].rig.engine);
    for (uint32_t r = 0; r < 2; r++) await(&s->g.ranks[r].n_lost, 1);
    close_scene(s);
}

/* The first has all requests, so the others wait for what only it computes. */
TEST(ranks_hear_what_the_others_do_and_whom_they_wait_for)
{
    enum { SIZE = 3 };
    struct scene *s = open_scene(SIZE);
    struct engine_rank all[SIZE][SIZE];
    struct engine_stats stats[SIZE];
    uint64_t sent = 0, received = 0;
    for (uint32_t i = 0; i < N_REQUESTS; i++) {
        s->got[i].id = s->reqs[i].id;
        CHECK_OK(engine_submit(s->g.ranks[0].rig.engine, &s->reqs[i]));
    }
    rig_gather(&s->g.ranks[0].rig, s->got, N_REQUESTS);
    /* The last step is told of before all sleep. */
    for (int ms = 0; ms < RIG_WAIT_MS; ms++) {
        bool same = true;
        for (uint32_t r = 0; r < SIZE; r++) {
            engine_get_ranks(s->g.ranks[r].rig.engine, SIZE, all[r]);
            for (uint32_t of = 0; of < SIZE; of++)
                same &= all[r][of].rows == model_computed_rows(s->g.ranks[of].rig.model) &&
                        all[r][of].wait_us == all[0][of].wait_us;
        }
        if (same) break;
        usleep(1000);
    }
    for (uint32_t r = 0; r < SIZE; r++) {
        engine_get_stats(s->g.ranks[r].rig.engine, &stats[r]);
        sent += stats[r].sent;
        received += stats[r].received;
        for (uint32_t of = 0; of < SIZE; of++) {
            CHECK_EQ_INT(all[r][of].rows, model_computed_rows(s->g.ranks[of].rig.model));
            CHECK_EQ_INT(all[r][of].wait_us, all[0][of].wait_us);
        }
        CHECK(all[r][r].rows > 0);
    }
    CHECK(sent > 0 && sent == received);
    CHECK(all[0][0].wait_us < all[0][1].wait_us && all[0][0].wait_us < all[0][2].wait_us);
    for (uint32_t r = 1; r < SIZE; r++) {
        CHECK(all[r][0].late_us > all[r][3 - r].late_us);
        CHECK(all[r][r].late_us == 0);
    }
    close_scene(s);
}

TEST_MAIN(CASE_T(bells_leave_room_for_commands, 60),
          CASE_T(a_rank_with_impossible_rows_or_passes_is_refused, 60),
          CASE_T(ranks_answer_as_one, 120), CASE_T(ranks_that_compute_fast_answer_as_one, 120),
          CASE_T(ranks_that_preempt_answer_as_one, 120),
          CASE_T(ranks_with_drafts_answer_as_one, 120),
          CASE_T(ranks_with_a_draft_layer_answer_as_one, 240),
          CASE_T(a_group_without_rows_sleeps_until_one_has_some, 60),
          CASE_T(groups_follow_each_other_between_steps, 60),
          CASE_T(a_group_begins_when_all_ranks_have_it, 60),
          CASE_T(ranks_of_a_paced_group_wait_alike, 60),
          CASE_T(a_rank_is_as_fast_as_the_slowest, 60),
          CASE_T(a_next_group_that_is_given_up_costs_nothing, 60),
          CASE_T(ranks_leave_together_and_come_back, 60),
          CASE_T(a_lost_group_is_replaced_without_a_trace, 60),
          CASE_T(a_sleeping_group_can_be_lost, 60),
          CASE_T(ranks_hear_what_the_others_do_and_whom_they_wait_for, 60),
          CASE_T(the_others_learn_that_an_engine_stops, 60))
