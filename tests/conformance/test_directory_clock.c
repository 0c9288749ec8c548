/* test_directory_clock.c - the wall clock of Redis' host jumps by an hour, either way, under a real
 * redis-server (libfaketime): living nodes stay or are back within one renewal, what is placed
 * stays counted, and what is dead ends after its lease as if nothing had happened; so does what
 * tenants use. */
#include "scheduler/directory/directory.h"
#include "tests/fixtures/loop_turns.h"
#include "tests/fixtures/redis_process.h"

enum { HOUR = 3600, RENEW_MS = 100, LEASE_MS = 800, WAIT_MS = 10000, NODES = 8, CASE_S = 60 };

struct rig {
    struct redis_process redis;
    struct loop *loop;
    struct directory *a, *b;
    struct loop_timer *renew;
    bool renews[NODES]; /* node i is published each RENEW_MS, by a */
    int n_up, n_down;
};

struct answer {
    int n_calls;
    enum status st;
    size_t n;
    struct node_record nodes[NODES];
    char topics[512];
    uint64_t fence;
};

static void turn(struct rig *r) { loop_turn(r->loop); }

static void run_for(struct rig *r, uint64_t ms) { loop_turn_for(r->loop, ms); }

static struct node_record record(uint64_t node, const char *topic)
{
    struct node_record n = {
        .node = node,
        .role = ROLE_MIXED,
        .host = "10.0.0.7",
        .cluster_port = 7001,
        .model = 1,
        .max_seqs = 4,
        .n_blocks = 100,
        .block_tokens = 64,
    };
    snprintf(n.name, sizeof n.name, "node-%u", (unsigned)node);
    snprintf(n.topic, sizeof n.topic, "%s", topic);
    return n;
}

static void on_renew(void *arg)
{
    struct rig *r = arg;
    for (uint64_t i = 1; i < NODES; i++) {
        struct node_record n = record(i, "default");
        if (r->renews[i]) directory_publish(r->a, &n);
    }
}

static void on_up(void *arg) { ((struct rig *)arg)->n_up++; }

static void on_down(void *arg, const char *why)
{
    (void)why;
    ((struct rig *)arg)->n_down++;
}

static struct directory *open_entry(struct rig *r, const char *topic)
{
    struct directory *d = NULL;
    struct err err = { 0 };
    const struct directory_options o = {
        .loop = r->loop,
        .topic = topic,
        .renew_ms = RENEW_MS,
        .lease_ms = LEASE_MS,
        .redis = { .host = "127.0.0.1", .port = r->redis.port },
        .on_up = on_up,
        .on_down = on_down,
        .arg = r,
    };
    const int n_up = r->n_up;
    if (directory_open("redis", &o, &d, &err) != OK)
        test_fail(__FILE__, __LINE__, "open: %s", err.text);
    for (uint64_t end = clock_ms() + WAIT_MS; r->n_up == n_up && clock_ms() < end;) turn(r);
    CHECK_EQ_INT(r->n_up, n_up + 1);
    return d;
}

static void rig_open(struct rig *r)
{
    *r = (struct rig){ 0 };
    redis_process_words(&r->redis);
    redis_process_own_clock(&r->redis);
    redis_process_start(&r->redis);
    redis_process_wait(&r->redis, "PING", "PONG");
    CHECK_OK(loop_create(&r->loop, NULL));
    r->a = open_entry(r, "default");
    r->b = open_entry(r, "default");
    r->renew = loop_timer_start(r->loop, 0, RENEW_MS, on_renew, r);
}

static void rig_close(struct rig *r)
{
    CHECK_EQ_INT(r->n_down, 0);
    loop_timer_free(r->renew);
    directory_close(r->a);
    directory_close(r->b);
    redis_process_kill(&r->redis);
    loop_free(r->loop);
}

/* ---- calls ---- */

static void on_snapshot(void *arg, enum status st, const struct directory_snapshot *s)
{
    struct answer *a = arg;
    a->n_calls++;
    a->st = st;
    if (st != OK) return;
    CHECK(s->n <= NODES);
    a->n = s->n;
    if (s->n) memcpy(a->nodes, s->nodes, s->n * sizeof *s->nodes);
    snprintf(a->topics, sizeof a->topics, "%s", s->topics);
}

static void look(struct rig *r, struct directory *d, struct answer *a)
{
    *a = (struct answer){ 0 };
    CHECK_OK(directory_snapshot(d, on_snapshot, a));
    for (uint64_t end = clock_ms() + WAIT_MS; a->n_calls == 0 && clock_ms() < end;) turn(r);
    CHECK_EQ_INT(a->n_calls, 1);
    CHECK_OK(a->st);
}

static const struct node_record *find(const struct answer *a, uint64_t node)
{
    for (size_t i = 0; i < a->n; i++)
        if (a->nodes[i].node == node) return &a->nodes[i];
    return NULL;
}

/* Returns after how many ms the view has exactly n nodes. */
static uint64_t look_for(struct rig *r, struct answer *a, size_t n)
{
    uint64_t t0 = clock_ms();
    for (; clock_ms() < t0 + WAIT_MS; run_for(r, 20)) {
        look(r, r->b, a);
        if (a->n == n) return clock_ms() - t0;
    }
    test_fail(__FILE__, __LINE__, "the view has %zu nodes, not %zu", a->n, n);
}

static uint64_t look_for_seqs(struct rig *r, uint64_t node, uint32_t seqs)
{
    struct answer a;
    uint64_t t0 = clock_ms();
    for (; clock_ms() < t0 + WAIT_MS; run_for(r, 20)) {
        look(r, r->b, &a);
        if (find(&a, node) && find(&a, node)->placed_seqs == seqs) return clock_ms() - t0;
    }
    test_fail(__FILE__, __LINE__, "node %u has %u sequences, not %u", (unsigned)node,
              find(&a, node) ? find(&a, node)->placed_seqs : 9999, seqs);
}

static void on_reserve(void *arg, enum status st, const struct directory_placed *placed)
{
    struct answer *a = arg;
    a->n_calls++;
    a->st = st;
    a->fence = placed ? placed->fence : 0;
}

static enum status reserve(struct rig *r, struct directory *d, uint64_t request, uint64_t node,
                           uint32_t ttl_ms)
{
    struct answer a = { 0 };
    const struct placement p = {
        .request = request, .decode = node, .tokens = 1000, .blocks = 16, .ttl_ms = ttl_ms
    };
    CHECK_OK(directory_reserve(d, &p, on_reserve, &a));
    for (uint64_t end = clock_ms() + WAIT_MS; a.n_calls == 0 && clock_ms() < end;) turn(r);
    CHECK_EQ_INT(a.n_calls, 1);
    return a.st;
}

/* ---- cases ---- */

/* Two nodes, each with a sequence of another entry node. */
static void place_two(struct rig *r)
{
    struct answer a;
    r->renews[1] = r->renews[2] = true;
    look_for(r, &a, 2);
    CHECK_OK(reserve(r, r->a, 10, 1, 900000));
    CHECK_OK(reserve(r, r->b, 11, 2, 900000));
    look_for_seqs(r, 1, 1);
    look_for_seqs(r, 2, 1);
}

static void check_living_stay(struct rig *r, int to_s)
{
    struct answer a;
    redis_clock_set(r->redis.clock, to_s);
    uint64_t ms = look_for(r, &a, 2);
    CHECK(ms < 5 * RENEW_MS);
    for (int i = 0; i < 3 * LEASE_MS / RENEW_MS; i++) { /* and stay, with what is placed on them */
        run_for(r, RENEW_MS);
        look(r, r->b, &a);
        CHECK_EQ_INT(a.n, 2);
        CHECK_EQ_INT(find(&a, 1)->placed_seqs, 1);
        CHECK_EQ_INT(find(&a, 2)->placed_seqs, 1);
        CHECK_EQ_INT(find(&a, 2)->placed_tokens, 1000);
        CHECK_EQ_STR(a.topics, "default (2 mixed)");
    }
    CHECK_OK(reserve(r, r->a, 12, 1, 900000)); /* the scheduler goes on */
    look_for_seqs(r, 1, 2);
    directory_release(r->a, 10);
    directory_release(r->a, 12);
    directory_release(r->b, 11);
    look_for_seqs(r, 1, 0);
    look_for_seqs(r, 2, 0);
}

static void check_dead_end(struct rig *r, int to_s)
{
    struct answer a;
    struct directory *dead = open_entry(r, "default"), *other = open_entry(r, "other");
    struct node_record elsewhere = record(7, "other");
    r->renews[1] = r->renews[2] = r->renews[3] = true;
    directory_publish(other, &elsewhere);
    look(r, other, &a);
    look_for(r, &a, 3);
    CHECK_EQ_STR(a.topics, "default (3 mixed), other (1 mixed)");
    CHECK_OK(reserve(r, dead, 20, 1, 900000));
    CHECK_OK(reserve(r, r->a, 21, 2, 2000));
    r->renews[3] = false;
    directory_close(dead);
    directory_close(other);
    redis_clock_set(r->redis.clock, to_s);
    uint64_t t0 = clock_ms();
    look_for(r, &a, 2);     /* node 3 is gone, */
    look_for_seqs(r, 1, 0); /* and what the dead entry node had placed, */
    CHECK(clock_ms() - t0 < 3 * LEASE_MS);
    look_for_seqs(r, 2, 0); /* and what outlived its ttl, */
    CHECK(clock_ms() - t0 < 2000 + 3 * LEASE_MS);
    look(r, r->b, &a);
    CHECK_EQ_STR(a.topics, "default (2 mixed)"); /* and the topic without nodes */
}

TEST(living_nodes_stay_when_the_clock_goes_on_an_hour)
{
    struct rig r;
    rig_open(&r);
    place_two(&r);
    check_living_stay(&r, HOUR);
    rig_close(&r);
}

TEST(living_nodes_stay_when_the_clock_goes_back_an_hour)
{
    struct rig r;
    rig_open(&r);
    place_two(&r);
    check_living_stay(&r, -HOUR);
    rig_close(&r);
}

TEST(what_is_dead_ends_when_the_clock_goes_on_an_hour)
{
    struct rig r;
    rig_open(&r);
    check_dead_end(&r, HOUR);
    rig_close(&r);
}

TEST(what_is_dead_ends_when_the_clock_goes_back_an_hour)
{
    struct rig r;
    rig_open(&r);
    check_dead_end(&r, -HOUR);
    rig_close(&r);
}

/* A clock that a broken time service throws to and fro. */
TEST(a_clock_that_jumps_again_and_again_loses_nothing)
{
    struct rig r;
    struct answer a;
    rig_open(&r);
    place_two(&r);
    for (int i = 0; i < 8; i++) {
        redis_clock_set(r.redis.clock, (i % 2 ? -1 : 1) * HOUR * (i + 1));
        run_for(&r, 2 * RENEW_MS);
        look(&r, r.b, &a);
        CHECK_EQ_INT(a.n, 2);
        CHECK_EQ_INT(find(&a, 1)->placed_seqs, 1);
        CHECK_EQ_INT(find(&a, 2)->placed_seqs, 1);
    }
    r.renews[2] = false;
    look_for(&r, &a, 1);
    rig_close(&r);
}

/* ---- what tenants use (meter.h) ---- */

struct sums {
    int n_calls;
    struct meter_sum sum;
    uint32_t n_entries;
};

static void on_sums(void *arg, enum status st, const struct meter_sums *s)
{
    struct sums *a = arg;
    CHECK_OK(st);
    a->n_calls++;
    a->sum = s->sums[0];
    a->n_entries = s->n_entries;
}

/* Entry node `entry` has 2 requests of tenant 1 running, and tells of 10 tokens. */
static struct sums tell(struct rig *r, struct directory *d, uint64_t entry, uint64_t number)
{
    struct sums a = { 0 };
    const struct meter_use u = { .tenant = 1, .requests = 1, .tokens = 10, .n_running = 2 };
    const struct meter_report report = {
        .entry = entry, .number = number, .uses = &u, .n_uses = 1
    };
    CHECK_OK(directory_meter(d, &report, on_sums, &a));
    for (uint64_t end = clock_ms() + WAIT_MS; a.n_calls == 0 && clock_ms() < end;) turn(r);
    CHECK_EQ_INT(a.n_calls, 1);
    return a;
}

/* A living entry's requests stay counted, a dead one's end with its lease, and the minute passes as
 * if nothing had happened. */
static void check_meter(int to_s)
{
    struct rig r;
    rig_open(&r);
    uint64_t n = 1, dead = 0;
    tell(&r, r.b, 20, 1);
    CHECK_EQ_INT(tell(&r, r.a, 10, n).sum.n_running, 4);
    const uint64_t t0 = clock_ms();
    redis_clock_set(r.redis.clock, to_s);
    while (clock_ms() < t0 + 2 * METER_LEASE_MS) {
        const struct sums a = tell(&r, r.a, 10, ++n);
        CHECK_EQ_INT(a.sum.tokens, 10 * (n + 1));
        CHECK_EQ_INT(a.n_entries, a.sum.n_running / 2);
        if (a.n_entries == 1 && !dead) dead = clock_ms() - t0;
        CHECK_EQ_INT(a.n_entries, dead ? 1 : 2);
        run_for(&r, RENEW_MS);
    }
    CHECK(dead > METER_LEASE_MS / 2);
    rig_close(&r);
}

TEST(tenants_stay_counted_when_the_clock_goes_on_an_hour) { check_meter(HOUR); }

TEST(tenants_stay_counted_when_the_clock_goes_back_an_hour) { check_meter(-HOUR); }

/* Redis stands still for longer than every lease (its host is paused, or swaps): when it goes on,
 * nobody has died of that. */
TEST(a_pause_of_redis_ends_no_lease)
{
    struct rig r;
    struct answer a;
    rig_open(&r);
    place_two(&r);
    kill(r.redis.pid, SIGSTOP);
    run_for(&r, 4 * LEASE_MS);
    kill(r.redis.pid, SIGCONT);
    for (uint64_t end = clock_ms() + WAIT_MS; r.n_up < 3 && clock_ms() < end;) turn(&r);
    for (int i = 0; i < 10; i++) {
        look(&r, r.b, &a);
        CHECK_EQ_INT(a.n, 2);
        CHECK_EQ_INT(find(&a, 1)->placed_seqs, 1);
        CHECK_EQ_INT(find(&a, 2)->placed_seqs, 1);
        run_for(&r, RENEW_MS / 2);
    }
    CHECK(r.n_down > 0); /* the one that called meanwhile has said that it was away */
    r.n_down = 0;
    rig_close(&r);
}

TEST_MAIN(CASE_T(living_nodes_stay_when_the_clock_goes_on_an_hour, CASE_S),
          CASE_T(living_nodes_stay_when_the_clock_goes_back_an_hour, CASE_S),
          CASE_T(what_is_dead_ends_when_the_clock_goes_on_an_hour, CASE_S),
          CASE_T(what_is_dead_ends_when_the_clock_goes_back_an_hour, CASE_S),
          CASE_T(a_clock_that_jumps_again_and_again_loses_nothing, CASE_S),
          CASE_T(a_pause_of_redis_ends_no_lease, CASE_S),
          CASE_T(tenants_stay_counted_when_the_clock_goes_on_an_hour, CASE_S),
          CASE_T(tenants_stay_counted_when_the_clock_goes_back_an_hour, CASE_S))
