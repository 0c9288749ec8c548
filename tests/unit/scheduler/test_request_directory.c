/* test_request_directory.c - requests whose entry node cannot reach the directory: they are placed
 * without it, and load that only it could count does not keep them waiting. */
#include "scheduler/scheduler_internal.h"
#include "tests/unit/scheduler/scheduler_rig.h"

static const struct ask TEN = { .max_tokens = 10 };

/* A directory whose snapshots are real and whose reservations are answered as the test wants. */
struct troubled {
    struct directory base;
    struct world *w;
    enum status now, later; /* `now` from the call itself; OK: `later` by callback */
    directory_reserve_fn *cb;
    void *arg;
    struct prefix_placed chosen;
    struct loop_timer *timer;
    uint32_t n_reserves, n_releases;
};

static void troubled_answer(void *arg)
{
    struct troubled *t = arg;
    loop_timer_free(t->timer);
    t->timer = NULL;
    const struct directory_placed placed = { 1, t->chosen };
    t->cb(t->arg, t->later, t->later == OK ? &placed : NULL);
}

static enum status troubled_snapshot(struct directory *d, directory_snapshot_fn *cb, void *arg)
{
    return directory_snapshot(((struct troubled *)d)->w->directory, cb, arg);
}

static enum status troubled_reserve(struct directory *d, const struct placement *p,
                                    directory_reserve_fn *cb, void *arg)
{
    struct troubled *t = (struct troubled *)d;
    t->chosen = (struct prefix_placed){ p->prefill, p->decode, p->tokens, { 0 } };
    t->n_reserves++;
    if (t->now != OK) return t->now;
    t->cb = cb;
    t->arg = arg;
    t->timer = loop_timer_start(t->w->rig.loop, 5, 0, troubled_answer, t);
    return OK;
}

static void troubled_computed(struct directory *d, uint64_t request)
{
    (void)d;
    (void)request;
}

static void troubled_release(struct directory *d, uint64_t request)
{
    (void)request;
    ((struct troubled *)d)->n_releases++;
}

static const char *troubled_why(const struct directory *d)
{
    (void)d;
    return NULL;
}

TEST(request_goes_ahead_when_the_directory_cannot_be_reached)
{
    static const struct directory_ops ops = {
        .name = "troubled",
        .why_down = troubled_why,
        .snapshot = troubled_snapshot,
        .reserve = troubled_reserve,
        .computed = troubled_computed,
        .release = troubled_release,
    };
    static const struct {
        enum status now, later;
        bool goes_ahead;
        uint32_t n_releases;
    } rows[] = {
        { OK, OK, true, 1 },
        { OK, ERR_UNAVAILABLE, true, 0 },
        { OK, ERR_TIMEOUT, true, 0 },
        { ERR_FULL, OK, true, 0 },
        { ERR_NOMEM, OK, true, 0 },
        { OK, ERR_BUSY, false, 0 },
        { OK, ERR_NOT_FOUND, false, 0 },
    };
    struct world w;
    world_open(&w, "pd", 5000);
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        struct troubled t = {
            .base = { &ops }, .w = &w, .now = rows[i].now, .later = rows[i].later
        };
        struct client c;
        w.s->entry.directory = &t.base;
        CHECK_OK(client_submit(&w, &c, TEN));
        if (!rows[i].goes_ahead) {
            RIG_WAIT(&w.rig, t.n_reserves >= 3); /* tried again, with a pause */
            CHECK_EQ_INT(c.n_ended, 0);
            t.later = OK;
        }
        struct attempt a = play_split(&w, &c, AT_DECODE, 1);
        CHECK_EQ_INT(a.number, 1); /* a refused placement is not an attempt */
        play_rest(&w, &c, &a, 10);
        CHECK_EQ_INT(t.n_releases, rows[i].goes_ahead ? rows[i].n_releases : 1);
        CHECK(t.timer == NULL);
        w.s->entry.directory = w.directory;
    }
    CHECK_EQ_INT(cells(&w, "placing", "directory", "ignore"), 4);
    world_check_idle(&w);
    world_close(&w);
}

static void others_reserved(void *arg, enum status st, const struct directory_placed *placed)
{
    CHECK_OK(st);
    CHECK(placed != NULL);
    ++*(uint32_t *)arg;
}

/* Two of another entry node fill the only node, and the directory goes. Nobody will say that they
 * are over: what is placed from here on is counted, and nothing else. */
TEST(request_does_not_wait_for_load_that_nobody_counts_any_more)
{
    enum { ROOM = 2 };
    struct world w;
    struct client c[ROOM + 1];
    struct attempt a[ROOM + 1];
    uint32_t n_reserved = 0;
    world_open(&w, "m", 1000);
    struct node_record r = record_of(&w, 0);
    r.max_seqs = ROOM;
    r.n_running = ROOM;
    directory_publish(w.directory, &r);
    for (uint64_t i = 1; i <= ROOM; i++) {
        const struct placement p = {
            .request = i, .decode = r.node, .tokens = 100, .blocks = 7, .ttl_ms = 600000
        };
        CHECK_OK(directory_reserve(w.directory, &p, others_reserved, &n_reserved));
    }
    struct view *v = &w.s->entry.view;
    RIG_WAIT(&w.rig, n_reserved == ROOM && v->n_nodes == 1 && v->nodes[0].placed_seqs == ROOM);
    RIG_WAIT(&w.rig, !v->asking);
    v->asking = true; /* no more snapshots from here on */
    CHECK_OK(client_submit(&w, &c[0], TEN));
    rig_turn_ms(&w.rig, 150);
    CHECK_EQ_INT(received_count(w.nodes[0], FRAME_RUN), 0);
    v->t_known_ms -= VIEW_KNOWN_MS;
    for (size_t i = 1; i <= ROOM; i++) CHECK_OK(client_submit(&w, &c[i], TEN));
    directory_release(w.directory, 1); /* it is not shown any more; it counts for a reservation */
    directory_release(w.directory, 2);
    for (size_t i = 0; i < ROOM; i++) a[i] = play_run(&w, &c[i]);
    rig_turn_ms(&w.rig, 150);
    CHECK_EQ_INT(received_count(w.nodes[0], FRAME_RUN), 0);
    CHECK_EQ_INT(v->nodes[0].placed_seqs, ROOM);
    CHECK_EQ_INT(v->nodes[0].n_running, 0);
    play_rest(&w, &c[0], &a[0], 10);
    a[ROOM] = play_run(&w, &c[ROOM]);
    for (size_t i = 1; i <= ROOM; i++) play_rest(&w, &c[i], &a[i], 10);
    CHECK_EQ_INT(v->n_own, 0);
    v->asking = false; /* the directory is back: what it says counts */
    RIG_WAIT(&w.rig, !v->counts_own && v->nodes[0].n_running == ROOM);
    world_check_idle(&w);
    world_close(&w);
}

TEST_MAIN(CASE(request_goes_ahead_when_the_directory_cannot_be_reached),
          CASE(request_does_not_wait_for_load_that_nobody_counts_any_more))
