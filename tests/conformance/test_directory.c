/* test_directory.c - every backend of the directory passes the same cases; then what only a server
  * elsewhere can do: vanish, come back empty, refuse. Backend http talks to a directory server in
  * this process, or mounted on an API's port, redis to a Redis server on a free port. */
#include <fcntl.h>
#include <hiredis/hiredis.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "tests/fixtures/free_port.h"
#include "tests/fixtures/loop_turns.h"
#include "tests/fixtures/served_view.h"
#include "tests/harness/test.h"

enum { NODES = 32, LEASE_LONG_MS = 20000, LEASE_SHORT_MS = 400, WAIT_MS = 8000, CASE_S = 60 };

struct rig {
    const char *backend;
    struct loop *loop;
    struct directory *a, *b;   /* two entries; the same one for local */
    struct served_view served; /* http */
    bool is_mounted;           /* it has no port of its own */
    uint16_t port;
    pid_t redis;
    uint32_t lease_ms;
    int n_up, n_down; /* of a */
    bool is_up;
    char why[ERR_TEXT_MAX];
};

struct answer {
    int n_calls;
    bool inside; /* set during the asking call, in which no callback may come */
    enum status st;
    uint64_t fence;
    struct prefix_placed on;
    size_t n;
    struct node_record nodes[NODES];
    char topics[512];
};

/* ---- the loop ---- */

static void turn(struct rig *r) { loop_turn(r->loop); }

static void run_for(struct rig *r, uint64_t ms) { loop_turn_for(r->loop, ms); }

#define WAIT_FOR(r, cond) LOOP_WAIT((r)->loop, cond, WAIT_MS)

/* ---- redis ---- */

static redisContext *redis_dial(const struct rig *r)
{
    for (uint64_t end = clock_ms() + WAIT_MS; clock_ms() < end; usleep(20000)) {
        redisContext *c = redisConnect("127.0.0.1", r->port);
        redisReply *pong = c && !c->err ? redisCommand(c, "PING") : NULL;
        bool up = pong && pong->type == REDIS_REPLY_STATUS;
        if (pong) freeReplyObject(pong);
        if (up) return c;
        if (c) redisFree(c);
    }
    test_fail(__FILE__, __LINE__, "redis-server did not come up");
}

static void redis_run(struct rig *r)
{
    char port[8];
    const char *dir = test_tmpdir();
    snprintf(port, sizeof port, "%u", r->port);
    r->redis = fork();
    CHECK(r->redis >= 0);
    if (r->redis == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        int null = open("/dev/null", O_WRONLY);
        dup2(null, STDOUT_FILENO);
        execlp("redis-server", "redis-server", "--port", port, "--bind", "127.0.0.1", "--save", "",
               "--appendonly", "no", "--dir", dir, NULL);
        _exit(127);
    }
    redisFree(redis_dial(r));
}

static void redis_kill(struct rig *r)
{
    if (r->redis <= 0) return;
    kill(r->redis, SIGKILL);
    waitpid(r->redis, NULL, 0);
    r->redis = 0;
}

static bool has_redis(void)
{
    const char *path = getenv("PATH");
    struct str rest = str_of(path), dir;
    while (path && str_split(&rest, ':', &dir)) {
        char file[4096];
        snprintf(file, sizeof file, "%.*s/redis-server", STR_ARG(dir));
        if (access(file, X_OK) == 0) return true;
    }
    return false;
}

/* ---- the rig ---- */

static void on_up(void *arg)
{
    struct rig *r = arg;
    r->n_up++;
    r->is_up = true;
    r->why[0] = 0;
}

static void on_down(void *arg, const char *why)
{
    struct rig *r = arg;
    CHECK(why && strcmp(why, r->why) != 0); /* the same reason is told once */
    snprintf(r->why, sizeof r->why, "%s", why);
    if (r->is_up || r->n_down == 0) r->n_down++; /* else another reason of the same loss */
    r->is_up = false;
}

static struct directory *open_entry(struct rig *r, const char *topic, const char *secret,
                                    bool counted)
{
    struct directory *d = NULL;
    struct err err = { 0 };
    struct directory_options o = {
        .loop = r->loop,
        .topic = topic,
        .renew_ms = 100,
        .lease_ms = r->lease_ms,
        .http_host = "127.0.0.1",
        .http_port = r->port,
        .secret = str_of(secret),
        .redis = { .host = "127.0.0.1", .port = r->port },
        .arg = r,
    };
    if (counted) {
        o.on_up = on_up;
        o.on_down = on_down;
    }
    if (directory_open(r->backend, &o, &d, &err) != OK)
        test_fail(__FILE__, __LINE__, "open: %s", err.text);
    return d;
}

static void server_start(struct rig *r, uint16_t port)
{
    struct err err = { 0 };
    if (served_view_start(&r->served, r->loop, r->is_mounted, r->lease_ms, port, STR("s3cret"),
                          &err) != OK)
        test_fail(__FILE__, __LINE__, "serve: %s", err.text);
    r->port = r->served.port;
}

static void on_stopped(void *arg) { *(bool *)arg = true; }

static void server_stop(struct rig *r)
{
    bool stopped = false;
    if (!r->served.local) return;
    served_view_stop(&r->served, on_stopped, &stopped);
    WAIT_FOR(r, stopped);
    served_view_free(&r->served);
}

static void rig_open(struct rig *r, const char *backend, uint32_t lease_ms)
{
    *r = (struct rig){ .backend = backend, .lease_ms = lease_ms };
    r->is_mounted = strcmp(backend, "mounted") == 0;
    if (r->is_mounted) backend = r->backend = "http";
    bool is_redis = strcmp(backend, "redis") == 0, is_local = strcmp(backend, "local") == 0;
    if (is_redis && !has_redis())
        SKIP("redis-server is not installed; the redis directory is NOT tested");
    CHECK_OK(loop_create(&r->loop, NULL));
    if (is_redis) {
        r->port = free_port();
        redis_run(r);
    } else if (!is_local) {
        server_start(r, 0);
    }
    r->a = open_entry(r, "default", "s3cret", true);
    r->b = is_local ? r->a : open_entry(r, "default", "s3cret", false);
    WAIT_FOR(r, r->n_up == 1);
    run_for(r, 50); /* b as well */
}

static void rig_close(struct rig *r)
{
    if (r->b != r->a) directory_close(r->b);
    directory_close(r->a);
    server_stop(r);
    redis_kill(r);
    loop_free(r->loop);
}

/* ---- calls ---- */

static struct node_record record(uint64_t node, enum node_role role)
{
    struct node_record n = {
        .node = node,
        .role = role,
        .topic = "default",
        .host = "10.0.0.7",
        .cluster_port = 7001,
        .http_port = 8000,
        .model = 0xfedcba9876543210u,
        .max_seqs = 4,
        .n_blocks = 100,
        .block_tokens = 64,
        .max_model_len = 32768,
        .n_running = 3,
        .n_waiting = 2,
        .n_blocks_free = 90,
        .waiting_tokens = 1234,
        .progress = 77,
        .has_work = true,
    };
    snprintf(n.name, sizeof n.name, "%s-\"%u\"", node_role_name(role), (unsigned)(node & 0xff));
    return n;
}

static void publish(struct directory *d, uint64_t node, enum node_role role)
{
    struct node_record n = record(node, role);
    directory_publish(d, &n);
}

static void on_snapshot(void *arg, enum status st, const struct directory_snapshot *s)
{
    struct answer *a = arg;
    CHECK(!a->inside);
    a->n_calls++;
    a->st = st;
    if (st != OK) return;
    CHECK(s->n <= NODES);
    a->n = s->n;
    if (s->n) memcpy(a->nodes, s->nodes, s->n * sizeof *s->nodes);
    snprintf(a->topics, sizeof a->topics, "%s", s->topics);
}

static enum status look(struct rig *r, struct directory *d, struct answer *a)
{
    *a = (struct answer){ .inside = true };
    enum status st = directory_snapshot(d, on_snapshot, a);
    a->inside = false;
    if (st != OK) return st;
    WAIT_FOR(r, a->n_calls == 1);
    return a->st;
}

static const struct node_record *find(const struct answer *a, uint64_t node)
{
    for (size_t i = 0; i < a->n; i++)
        if (a->nodes[i].node == node) return &a->nodes[i];
    return NULL;
}

/* Looks until the view has n nodes: renewals over several connections may arrive after a snapshot
 * asked later. */
static void look_for(struct rig *r, struct directory *d, struct answer *a, size_t n)
{
    for (uint64_t end = clock_ms() + WAIT_MS; clock_ms() < end; turn(r))
        if (look(r, d, a) == OK && a->n == n) return;
    test_fail(__FILE__, __LINE__, "the view has %zu nodes, not %zu", a->n, n);
}

static void look_for_seqs(struct rig *r, uint64_t node, uint32_t seqs)
{
    struct answer a = { 0 };
    for (uint64_t end = clock_ms() + WAIT_MS; clock_ms() < end; turn(r))
        if (look(r, r->a, &a) == OK && find(&a, node) && find(&a, node)->placed_seqs == seqs)
            return;
    test_fail(__FILE__, __LINE__, "%u sequences are placed, not %u",
              find(&a, node) ? find(&a, node)->placed_seqs : 9999, seqs);
}

static void on_reserve(void *arg, enum status st, const struct directory_placed *placed)
{
    struct answer *a = arg;
    CHECK(!a->inside);
    CHECK((st == OK) == (placed != NULL));
    a->n_calls++;
    a->st = st;
    if (!placed) return;
    a->fence = placed->fence;
    a->on = placed->on;
}

static struct placement placement(uint64_t request, uint64_t prefill, uint64_t decode)
{
    return (struct placement){
        .request = request,
        .prefill = prefill,
        .decode = decode,
        .tokens = 1000,
        .blocks = 16,
        .ttl_ms = 60000,
    };
}

static enum status reserve(struct rig *r, struct directory *d, struct placement p, struct answer *a)
{
    *a = (struct answer){ .inside = true };
    enum status st = directory_reserve(d, &p, on_reserve, a);
    a->inside = false;
    if (st != OK) return st;
    WAIT_FOR(r, a->n_calls == 1);
    return a->st;
}

/* ---- cases for every row ---- */

static void case_published_nodes_are_seen(struct rig *r)
{
    struct answer a;
    struct node_record want = record(0xffffffffffffff01u, ROLE_PREFILL);
    publish(r->a, want.node, ROLE_PREFILL);
    publish(r->b, 2, ROLE_DECODE);
    look_for(r, r->a, &a, 2);
    const struct node_record *got = find(&a, want.node);
    CHECK(got);
    CHECK_EQ_STR(got->name, want.name);
    CHECK_EQ_STR(got->host, want.host);
    CHECK(got->model == want.model);
    CHECK_EQ_INT(got->role, ROLE_PREFILL);
    CHECK_EQ_INT(got->cluster_port, 7001);
    CHECK_EQ_INT(got->waiting_tokens, 1234);
    CHECK(got->has_work);
    CHECK_EQ_INT(got->placed_seqs, 0);
    CHECK_EQ_STR(a.topics, "default (1 prefill, 1 decode)");
    want.n_running = 9;
    want.role = ROLE_DECODE; /* as `baton role` changes it */
    directory_publish(r->a, &want);
    run_for(r, 100);
    look_for(r, r->b, &a, 2);
    CHECK_EQ_INT(find(&a, want.node)->n_running, 9);
    CHECK_EQ_INT(find(&a, want.node)->role, ROLE_DECODE);
    CHECK_EQ_STR(a.topics, "default (0 prefill, 2 decode)");
}

static void case_topics_are_apart(struct rig *r)
{
    struct answer a, b;
    struct directory *other = strcmp(r->backend, "local") == 0
                                  ? r->a
                                  : open_entry(r, "test", "s3cret", false);
    struct node_record n = record(3, ROLE_PREFILL);
    run_for(r, 100);
    snprintf(n.topic, sizeof n.topic, "test");
    publish(r->a, 1, ROLE_MIXED);
    directory_publish(other, &n);
    if (other != r->a) look_for(r, other, &b, 1);
    run_for(r, 100);
    look_for(r, r->a, &a, 1);
    CHECK_EQ_INT(a.nodes[0].node, 1);
    CHECK_EQ_STR(a.topics, "default (1 mixed), test (1 prefill, 0 decode)");
    if (other == r->a) return;
    CHECK_EQ_INT(b.nodes[0].node, 3);
    directory_close(other);
}

static void case_leases_end(struct rig *r)
{
    struct answer a;
    publish(r->a, 1, ROLE_MIXED);
    publish(r->b, 2, ROLE_MIXED);
    look_for(r, r->a, &a, 2);
    for (int i = 0; i < 8; i++) { /* one goes on renewing */
        publish(r->a, 1, ROLE_MIXED);
        run_for(r, LEASE_SHORT_MS / 4);
    }
    CHECK_OK(look(r, r->a, &a));
    CHECK_EQ_INT(a.n, 1);
    CHECK_EQ_INT(a.nodes[0].node, 1);
    struct answer b;
    CHECK_STATUS(reserve(r, r->a, placement(7, 0, 2), &b), ERR_NOT_FOUND);
    run_for(r, LEASE_SHORT_MS + 100);
    CHECK_OK(look(r, r->a, &a));
    CHECK_EQ_INT(a.n, 0);
}

static void case_leave_removes_at_once(struct rig *r)
{
    struct answer a;
    publish(r->a, 1, ROLE_PREFILL);
    publish(r->b, 2, ROLE_DECODE);
    look_for(r, r->a, &a, 2);
    publish(r->a, 1, ROLE_PREFILL); /* a renewal on its way must not bring it back */
    directory_leave(r->a, 1);
    directory_leave(r->a, 99);
    look_for(r, r->a, &a, 1);
    run_for(r, 100);
    look_for(r, r->a, &a, 1);
    CHECK_EQ_INT(a.nodes[0].node, 2);
    CHECK_STATUS(reserve(r, r->b, placement(5, 1, 2), &a), ERR_NOT_FOUND);
}

static void case_reserve_counts_both_nodes(struct rig *r)
{
    struct answer a;
    publish(r->a, 1, ROLE_PREFILL);
    publish(r->a, 2, ROLE_DECODE);
    look_for(r, r->a, &a, 2);
    CHECK_OK(reserve(r, r->a, placement(10, 1, 2), &a));
    uint64_t first = a.fence;
    CHECK(first > 0);
    CHECK_OK(reserve(r, r->b, placement(11, 0, 2), &a));
    CHECK(a.fence > first);
    CHECK_OK(look(r, r->b, &a));
    CHECK_EQ_INT(find(&a, 1)->placed_tokens, 1000);
    CHECK_EQ_INT(find(&a, 1)->placed_seqs, 0);
    CHECK_EQ_INT(find(&a, 2)->placed_tokens, 1000); /* of the one without a prefill node */
    CHECK_EQ_INT(find(&a, 2)->placed_seqs, 2);
    CHECK_EQ_INT(find(&a, 2)->placed_blocks, 32);
    publish(r->a, 2, ROLE_DECODE); /* a renewal leaves the placed load alone */
    run_for(r, 100);
    CHECK_OK(look(r, r->a, &a));
    CHECK_EQ_INT(find(&a, 2)->placed_seqs, 2);
}

static void case_full_nodes_are_refused(struct rig *r)
{
    struct answer a;
    publish(r->a, 1, ROLE_PREFILL);
    publish(r->a, 2, ROLE_DECODE);
    look_for(r, r->a, &a, 2);
    struct placement large = placement(20, 1, 2);
    large.blocks = 101;
    CHECK_STATUS(reserve(r, r->a, large, &a), ERR_BUSY);
    large.blocks = 100;
    CHECK_OK(reserve(r, r->a, large, &a));
    CHECK_STATUS(reserve(r, r->b, placement(21, 1, 2), &a), ERR_BUSY);
    directory_release(r->a, 20);
    look_for_seqs(r, 2, 0);
    for (uint64_t i = 0; i < 4; i++)
        CHECK_OK(reserve(r, i & 1 ? r->b : r->a, placement(30 + i, 1, 2), &a));
    CHECK_STATUS(reserve(r, r->b, placement(40, 1, 2), &a), ERR_BUSY);
    CHECK_STATUS(reserve(r, r->b, placement(41, 77, 2), &a), ERR_NOT_FOUND);
    CHECK_STATUS(reserve(r, r->b, placement(42, 1, 77), &a), ERR_NOT_FOUND);
    CHECK_OK(look(r, r->a, &a));
    CHECK_EQ_INT(find(&a, 1)->placed_tokens, 4000); /* a refusal counts on neither node */
    CHECK_EQ_INT(find(&a, 2)->placed_seqs, 4);
}

static void case_last_place_is_given_once(struct rig *r)
{
    enum { TRIES = 40, PLACES = 10 };
    static struct answer answers[TRIES];
    struct answer a;
    struct node_record n = record(2, ROLE_DECODE);
    n.max_seqs = PLACES;
    n.n_blocks = 1000;
    directory_publish(r->a, &n);
    publish(r->a, 1, ROLE_PREFILL);
    look_for(r, r->a, &a, 2);
    for (uint64_t i = 0; i < TRIES; i++) {
        struct placement p = placement(100 + i, 1, 2);
        CHECK_OK(directory_reserve(i & 1 ? r->b : r->a, &p, on_reserve, &answers[i]));
    }
    int n_ok = 0, n_busy = 0;
    for (int i = 0; i < TRIES; i++) {
        WAIT_FOR(r, answers[i].n_calls == 1);
        n_ok += answers[i].st == OK;
        n_busy += answers[i].st == ERR_BUSY;
        for (int k = 0; k < i; k++)
            CHECK(answers[i].st != OK || answers[k].fence != answers[i].fence);
    }
    CHECK_EQ_INT(n_ok, PLACES);
    CHECK_EQ_INT(n_busy, TRIES - PLACES);
    look_for_seqs(r, 2, PLACES);
}

static void case_release_may_come_twice(struct rig *r)
{
    struct answer a;
    publish(r->a, 1, ROLE_PREFILL);
    publish(r->a, 2, ROLE_DECODE);
    look_for(r, r->a, &a, 2);
    CHECK_OK(reserve(r, r->a, placement(10, 1, 2), &a));
    CHECK_OK(reserve(r, r->a, placement(11, 1, 2), &a));
    directory_release(r->a, 10);
    directory_release(r->a, 10);
    directory_release(r->a, 12345);
    look_for_seqs(r, 2, 1);
    run_for(r, 100);
    CHECK_OK(look(r, r->a, &a));
    CHECK_EQ_INT(find(&a, 2)->placed_seqs, 1);
    CHECK_EQ_INT(find(&a, 2)->placed_blocks, 16);
    CHECK_EQ_INT(find(&a, 1)->placed_tokens, 1000);
    directory_release(r->a, 11);
    look_for_seqs(r, 2, 0);
    CHECK_OK(look(r, r->a, &a));
    CHECK_EQ_INT(find(&a, 1)->placed_tokens, 0);
}

/* A request that moves releases and reserves again in the same turn of the loop; the two must not
 * get crossed. */
static void case_moving_requests_count_once(struct rig *r)
{
    struct answer a;
    publish(r->a, 1, ROLE_PREFILL);
    publish(r->a, 2, ROLE_DECODE);
    look_for(r, r->a, &a, 2);
    CHECK_OK(reserve(r, r->a, placement(10, 1, 2), &a));
    for (int i = 0; i < 50; i++) {
        directory_release(r->a, 10);
        CHECK_OK(reserve(r, r->a, placement(10, 1, 2), &a));
    }
    look_for_seqs(r, 2, 1);
    run_for(r, 100);
    look_for_seqs(r, 2, 1);
    directory_release(r->a, 10);
    look_for_seqs(r, 2, 0);
}

static void case_reservations_end_by_ttl(struct rig *r)
{
    struct answer a;
    publish(r->a, 1, ROLE_PREFILL);
    publish(r->a, 2, ROLE_DECODE);
    look_for(r, r->a, &a, 2);
    struct placement p = placement(10, 1, 2);
    p.ttl_ms = 300;
    CHECK_OK(reserve(r, r->a, p, &a));
    CHECK_OK(reserve(r, r->a, placement(11, 1, 2), &a));
    look_for_seqs(r, 2, 2);
    run_for(r, 400);
    CHECK_OK(look(r, r->a, &a));
    CHECK_EQ_INT(find(&a, 2)->placed_seqs, 1);
    CHECK_EQ_INT(find(&a, 1)->placed_tokens, 1000);
    directory_release(r->a, 10);
    run_for(r, 50);
    look_for_seqs(r, 2, 1);
}

static void case_close_ends_all_callbacks(struct rig *r)
{
    struct answer a = { 0 }, b = { 0 };
    struct directory *d = open_entry(r, "default", "s3cret", false);
    run_for(r, 100);
    struct placement p = placement(10, 1, 2);
    CHECK_OK(directory_snapshot(d, on_snapshot, &a));
    CHECK_OK(directory_reserve(d, &p, on_reserve, &b));
    publish(d, 1, ROLE_MIXED);
    directory_close(d);
    run_for(r, 200);
    CHECK_EQ_INT(a.n_calls, 0);
    CHECK_EQ_INT(b.n_calls, 0);
    directory_close(open_entry(r, "default", "s3cret", false)); /* before it was reached */
    run_for(r, 50);
}

static void close_inside(void *arg, enum status st, const struct directory_snapshot *s)
{
    struct directory **d = arg;
    CHECK_OK(st);
    CHECK_EQ_STR(s->topics, "default (1 mixed)");
    directory_close(*d);
    *d = NULL;
}

static void case_close_inside_a_callback(struct rig *r)
{
    struct answer a = { 0 };
    publish(r->a, 1, ROLE_MIXED);
    look_for(r, r->a, &a, 1);
    struct directory *d = r->a == r->b ? r->a : open_entry(r, "default", "s3cret", false);
    run_for(r, 100);
    CHECK_OK(directory_snapshot(d, close_inside, &d));
    struct answer late = { 0 };
    CHECK_OK(directory_snapshot(d, on_snapshot, &late));
    WAIT_FOR(r, d == NULL);
    run_for(r, 100);
    if (r->a == r->b) r->a = r->b = NULL;
    CHECK_EQ_INT(late.n_calls, 0);
}

/* ---- cases for backends whose server is elsewhere ---- */

static void case_a_dead_entry_holds_nothing(struct rig *r)
{
    struct answer a;
    struct directory *dead = open_entry(r, "default", "s3cret", false);
    publish(r->a, 2, ROLE_DECODE);
    look_for(r, r->a, &a, 1);
    CHECK_OK(reserve(r, dead, placement(10, 0, 2), &a));
    CHECK_OK(reserve(r, r->a, placement(11, 0, 2), &a));
    look_for_seqs(r, 2, 2);
    directory_close(dead); /* as a crash: nothing is released */
    for (int i = 0; i < 8; i++) {
        publish(r->a, 2, ROLE_DECODE);
        run_for(r, LEASE_SHORT_MS / 4);
    }
    CHECK_OK(look(r, r->a, &a));
    CHECK_EQ_INT(find(&a, 2)->placed_seqs, 1);
    CHECK_EQ_INT(find(&a, 2)->placed_tokens, 1000);
}

static void lose_and_find(struct rig *r, void (*lose)(struct rig *),
                          void (*find_again)(struct rig *))
{
    struct answer a;
    publish(r->a, 2, ROLE_DECODE);
    look_for(r, r->a, &a, 1);
    CHECK_OK(reserve(r, r->a, placement(10, 0, 2), &a));
    uint64_t fence = a.fence;
    CHECK_EQ_INT(r->n_down, 0);
    lose(r);
    for (int i = 0; i < 3; i++) {
        publish(r->a, 2, ROLE_DECODE);
        CHECK_STATUS(look(r, r->a, &a), ERR_UNAVAILABLE);
        CHECK_STATUS(reserve(r, r->a, placement(11, 0, 2), &a), ERR_UNAVAILABLE);
    }
    WAIT_FOR(r, r->n_down == 1);
    directory_release(r->a, 10); /* owed from now on */
    run_for(r, 300);
    CHECK_EQ_INT(r->n_down, 1);
    CHECK_EQ_INT(r->n_up, 1);
    char port[8];
    snprintf(port, sizeof port, ":%u", r->port);
    CHECK_EQ_STR(directory_why_down(r->a), r->why);
    CHECK(strstr(r->why, port) != NULL);
    find_again(r);
    WAIT_FOR(r, r->n_up == 2);
    CHECK(!directory_why_down(r->a));
    CHECK_EQ_INT(r->n_down, 1);
    publish(r->a, 2, ROLE_DECODE);
    look_for(r, r->a, &a, 1);
    look_for_seqs(r, 2, 0);
    CHECK_OK(reserve(r, r->a, placement(12, 0, 2), &a));
    CHECK(a.fence > fence);
}

static void redis_lose(struct rig *r)
{
    redis_kill(r);
    WAIT_FOR(r, r->n_down == 1);
}

TEST(killed_redis_comes_back)
{
    struct rig r;
    rig_open(&r, "redis", LEASE_LONG_MS);
    lose_and_find(&r, redis_lose, redis_run);
    rig_close(&r);
}

static void server_again(struct rig *r) { server_start(r, r->port); }

TEST(restarted_server_is_filled_again)
{
    struct rig r;
    rig_open(&r, "http", LEASE_LONG_MS);
    lose_and_find(&r, server_stop, server_again);
    rig_close(&r);
}

TEST(flushed_redis_is_filled_again)
{
    struct rig r;
    struct answer a;
    rig_open(&r, "redis", LEASE_LONG_MS);
    publish(r.a, 2, ROLE_DECODE);
    look_for(&r, r.a, &a, 1);
    for (uint64_t i = 0; i < 3; i++) CHECK_OK(reserve(&r, r.a, placement(10 + i, 0, 2), &a));
    uint64_t fence = a.fence;
    redisContext *c = redis_dial(&r);
    freeReplyObject(redisCommand(c, "FLUSHALL"));
    freeReplyObject(redisCommand(c, "SCRIPT FLUSH"));
    redisFree(c);
    CHECK_OK(look(&r, r.b, &a));
    CHECK_EQ_INT(a.n, 0);
    CHECK_EQ_STR(a.topics, "");
    publish(r.a, 2, ROLE_DECODE);
    look_for(&r, r.a, &a, 1);
    CHECK_EQ_INT(a.nodes[0].placed_seqs, 0);
    directory_release(r.a, 10); /* of before the flush: takes nothing from anybody */
    CHECK_OK(reserve(&r, r.b, placement(20, 0, 2), &a));
    CHECK(a.fence > fence); /* b has not seen the old fence; a's renewal brought it */
    look_for_seqs(&r, 2, 1);
    CHECK_EQ_INT(r.n_down, 0);
    rig_close(&r);
}

TEST(paused_redis_gets_the_releases_later)
{
    struct rig r;
    struct answer a;
    rig_open(&r, "redis", LEASE_LONG_MS);
    publish(r.a, 2, ROLE_DECODE);
    look_for(&r, r.a, &a, 1);
    CHECK_OK(reserve(&r, r.a, placement(10, 0, 2), &a));
    kill(r.redis, SIGSTOP);
    directory_release(r.a, 10);
    /* counted or not: it is taken back as well */
    CHECK_STATUS(reserve(&r, r.a, placement(11, 0, 2), &a), ERR_UNAVAILABLE);
    WAIT_FOR(&r, r.n_down == 1);
    kill(r.redis, SIGCONT);
    WAIT_FOR(&r, r.n_up == 2);
    look_for_seqs(&r, 2, 0);
    rig_close(&r);
}

TEST(every_key_of_redis_is_bounded_in_time)
{
    struct rig r;
    struct answer a;
    rig_open(&r, "redis", LEASE_SHORT_MS);
    publish(r.a, 1, ROLE_PREFILL);
    publish(r.a, 2, ROLE_DECODE);
    look_for(&r, r.a, &a, 2);
    CHECK_OK(reserve(&r, r.a, placement(10, 1, 2), &a));
    CHECK_OK(look(&r, r.a, &a));
    redisContext *c = redis_dial(&r);
    redisReply *keys = redisCommand(c, "KEYS *");
    CHECK_EQ_INT(keys->elements, 13); /* alive, 2 node:, 2 load:, bids, res, res_end, owners,
                                       * owned:, fence, clock, baton:topics */
    for (size_t i = 0; i < keys->elements; i++) {
        const char *key = keys->element[i]->str;
        redisReply *ttl = redisCommand(c, "PTTL %s", key);
        CHECK(strncmp(key, "baton:{default}:", 16) == 0 || strcmp(key, "baton:topics") == 0);
        if ((ttl->integer < 0) != (strcmp(key, "baton:{default}:fence") == 0))
            test_fail(__FILE__, __LINE__, "%s has a PTTL of %lld", key, ttl->integer);
        freeReplyObject(ttl);
    }
    freeReplyObject(keys);
    redisFree(c);
    rig_close(&r);
}

/* Looks at the view again and again; returns the longest turn of the loop in ms. */
static uint64_t look_often(struct rig *r, size_t n)
{
    uint64_t longest = 0;
    for (int i = 0; i < 20; i++) {
        struct answer a = { .inside = true };
        CHECK_OK(directory_snapshot(r->a, on_snapshot, &a));
        a.inside = false;
        for (uint64_t end = clock_ms() + WAIT_MS; a.n_calls == 0 && clock_ms() < end;) {
            uint64_t t = clock_ms();
            turn(r);
            if (clock_ms() - t > longest) longest = clock_ms() - t;
        }
        CHECK_EQ_INT(a.n_calls, 1);
        CHECK_OK(a.st);
        CHECK_EQ_INT(a.n, n);
        CHECK_EQ_STR(a.topics, "default (1 mixed)");
    }
    return longest;
}

/* A stranger writes to Redis while node 1 is there; `log` is the folder of the file "log". */
static void redis_forge(struct rig *r, const char *script, struct log_file_options *log)
{
    struct answer a;
    *log = (struct log_file_options){ .dir = test_tmpdir(), .name = "log" };
    rig_open(r, "redis", LEASE_LONG_MS);
    CHECK_OK(log_set_file(log));
    publish(r->a, 1, ROLE_MIXED);
    look_for(r, r->a, &a, 1);
    redisContext *c = redis_dial(r);
    redisReply *made = redisCommand(c, "EVAL %s 0", script);
    CHECK(made && made->type != REDIS_REPLY_ERROR);
    freeReplyObject(made);
    redisFree(c);
}

static const char *logged(const struct log_file_options *log)
{
    static char path[4200], text[16384];
    snprintf(path, sizeof path, "%s/%s", log->dir, log->name);
    FILE *f = fopen(path, "r");
    CHECK(f && (text[fread(text, 1, sizeof text - 1, f)] = 0) == 0);
    fclose(f);
    return text;
}

/* Whoever can write to Redis must not be able to have every node read hundreds of megabytes each
 * second, or to take the directory away. */
TEST(forged_records_of_100_mb_stay_in_redis)
{
    static const char forge[] =
        "local big, alive = string.rep('x', 104857600), 'baton:{default}:alive' "
        "redis.call('ZADD', alive, 9e15, '00000000000000ff', 9e15, '00000000000000fe') "
        "redis.call('HSET', 'baton:{default}:node:00000000000000ff', 'record', big) "
        "redis.call('HSET', 'baton:{default}:node:00000000000000fe', 'record', '{}', 'role', big) "
        "redis.call('HSET', 'baton:{default}:load:0000000000000001', 'tokens', big) "
        "redis.call('HSET', 'baton:topics', 'forged', '99999999999999 ' .. big)";
    struct log_file_options log;
    struct rig r;
    redis_forge(&r, forge, &log);
    CHECK(look_often(&r, 1) < 200); /* some of it is Redis's, which shares the CPU */
    CHECK_EQ_INT(r.n_down, 0);
    const char *line = strstr(logged(&log), "node record refused node=00000000000000ff");
    CHECK(line && strstr(line, "it has 104857616 bytes; a node record has at most 4096"));
    CHECK(!strstr(line + 1, "node record refused node=00000000000000ff")); /* then counted */
    rig_close(&r);
}

/* A proven record stands for one node of one topic; those of an earlier version are named once. */
TEST(copied_and_earlier_records_in_redis_are_refused)
{
    static const char copy[] =
        "local n, one = 'baton:{default}:node', 'baton:{default}:node:0000000000000001' "
        "redis.call('ZADD', 'baton:{default}:alive', 9e15, '00000000000000ff', 9e15, "
        "'00000000000000fe') "
        "redis.call('COPY', one, n .. ':00000000000000ff') "
        "redis.call('HSET', n .. ':00000000000000fe', 'record', "
        "'{\"node\":\"00000000000000fe\",\"topic\":\"default\",\"role\":\"mixed\"}', 'role', "
        "'mixed') "
        "redis.call('ZADD', 'baton:{test}:alive', 9e15, '0000000000000001') "
        "redis.call('COPY', one, 'baton:{test}:node:0000000000000001')";
    static const char *const lines[] = {
        "00000000000000ff why=\"it is the record of node 0000000000000001 of topic default\"",
        "0000000000000001 why=\"it is the record of node 0000000000000001 of topic default\"",
        "00000000000000fe why=\"it has the form of an earlier version",
    };
    struct rig r;
    struct answer a;
    struct log_file_options log;
    redis_forge(&r, copy, &log);
    for (int i = 0; i < 5; i++) look_for(&r, r.a, &a, 1);
    struct directory *other = open_entry(&r, "test", "s3cret", false);
    look_for(&r, other, &a, 0);
    directory_close(other);
    for (size_t i = 0; i < COUNT_OF(lines); i++) {
        const char *line = strstr(logged(&log), lines[i]);
        CHECK(line && !strstr(line + 1, lines[i]));
    }
    rig_close(&r);
}

/* Answers the first call it gets with `head` and then `fill` again and again, in another process. */
static pid_t false_server(uint16_t *port, const char *head, const char *fill)
{
    static char block[1 << 16];
    char request[4096];
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr = { htonl(INADDR_LOOPBACK) } };
    socklen_t n = sizeof a;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(bind(fd, (struct sockaddr *)&a, sizeof a) == 0 && listen(fd, 8) == 0);
    CHECK(getsockname(fd, (struct sockaddr *)&a, &n) == 0);
    *port = ntohs(a.sin_port);
    for (size_t i = 0; i < sizeof block; i++) block[i] = fill[i % strlen(fill)];
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (;;) {
            int in = accept(fd, NULL, NULL);
            bool goes_on = recv(in, request, sizeof request, 0) > 0 &&
                           send(in, head, strlen(head), MSG_NOSIGNAL) > 0;
            for (int i = 0; goes_on && i < 1600; i++)
                goes_on = send(in, block, sizeof block, MSG_NOSIGNAL) > 0;
            close(in);
        }
    }
    close(fd);
    return pid;
}

static void check_false_server(const char *head, const char *fill, const char *want)
{
    struct rig r = { .backend = "http", .lease_ms = LEASE_LONG_MS };
    pid_t pid = false_server(&r.port, head, fill);
    CHECK_OK(loop_create(&r.loop, NULL));
    r.a = r.b = open_entry(&r, "default", "s3cret", true);
    WAIT_FOR(&r, r.n_down == 1);
    /* A busy machine may take longer to send so much than a call lasts. */
    for (int i = 0; i < 20 && (i == 0 || strstr(r.why, "no answer within")); i++)
        CHECK_STATUS(look(&r, r.a, &(struct answer){ 0 }), ERR_UNAVAILABLE);
    if (!strstr(r.why, want)) test_fail(__FILE__, __LINE__, "why: %s", r.why);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    rig_close(&r);
}

TEST(long_answers_of_a_directory_server_are_not_read)
{
    static const char want[] = "more than 8 MiB or 262144 JSON values";
    check_false_server("HTTP/1.1 200 OK\r\nContent-Length: 104857600\r\n\r\n", " ", want);
    /* 7 MiB, of which every value would take 64 bytes */
    check_false_server("HTTP/1.1 200 OK\r\nContent-Length: 7340032\r\n\r\n[", "1,", want);
}

/* The port of another API, or nobody's. */
TEST(a_port_that_is_no_directory_servers_is_named)
{
    struct rig r = { .backend = "http", .port = 1, .lease_ms = LEASE_LONG_MS };
    check_false_server("HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n", "{}",
                       "is no directory server (it answered 404): --router names the port of a "
                       "router, or the control port of a launcher or prefill node");
    CHECK_OK(loop_create(&r.loop, NULL));
    r.a = r.b = open_entry(&r, "default", "s3cret", true);
    WAIT_FOR(&r, r.n_down == 1);
    CHECK(
        strstr(r.why, "is it running, and is that its port (--router names the port of a router"));
    rig_close(&r);
}

TEST(strangers_are_refused)
{
    struct rig r;
    struct answer a;
    rig_open(&r, "http", LEASE_LONG_MS);
    struct directory *stranger = open_entry(&r, "default", "guessed", true),
                     *nobody = open_entry(&r, "default", "", false);
    WAIT_FOR(&r, r.n_down == 1);
    CHECK(strstr(r.why, "another cluster secret") && strstr(r.why, "BATON_CLUSTER_SECRET"));
    WAIT_FOR(&r, directory_why_down(nobody) != NULL);
    CHECK(strstr(directory_why_down(nobody), "asks for a cluster secret, and this node has none"));
    publish(stranger, 1, ROLE_MIXED);
    publish(nobody, 2, ROLE_MIXED);
    CHECK_STATUS(look(&r, stranger, &a), ERR_UNAVAILABLE);
    CHECK_STATUS(look(&r, nobody, &a), ERR_UNAVAILABLE);
    CHECK_OK(look(&r, r.a, &a));
    CHECK_EQ_INT(a.n, 0);
    CHECK_EQ_INT(r.n_up, 1);
    directory_close(stranger);
    directory_close(nobody);
    rig_close(&r);
}

TEST(open_says_what_is_wrong)
{
    struct loop *l;
    struct directory *d = NULL;
    struct err err = { 0 };
    CHECK_OK(loop_create(&l, NULL));
    struct directory_options o = { .loop = l, .topic = "default" };
    CHECK_STATUS(directory_open("zookeeper", &o, &d, &err), ERR_CONFIG);
    CHECK(strstr(err.text, "local, http or redis"));
    CHECK_STATUS(directory_open("http", &o, &d, &err), ERR_CONFIG);
    CHECK_STATUS(directory_open("redis", &o, &d, &err), ERR_CONFIG);
    o.topic = "a}b";
    CHECK_STATUS(directory_open("local", &o, &d, &err), ERR_CONFIG);
    o.topic = NULL;
    CHECK_STATUS(directory_open("local", &o, &d, &err), ERR_CONFIG);
    CHECK(d == NULL);
    directory_close(NULL);
    loop_free(l);
}

static void run(const char *backend, uint32_t lease_ms, void (*fn)(struct rig *))
{
    struct rig r;
    rig_open(&r, backend, lease_ms);
    fn(&r);
    rig_close(&r);
}

#define REMOTE_BACKENDS(name, lease)                                                               \
    TEST(name##_http) { run("http", lease, case_##name); }                                         \
    TEST(name##_mounted) { run("mounted", lease, case_##name); }                                   \
    TEST(name##_redis) { run("redis", lease, case_##name); }
#define ALL_BACKENDS(name, lease)                                                                  \
    TEST(name##_local) { run("local", lease, case_##name); }                                       \
    REMOTE_BACKENDS(name, lease)
#define REMOTE_CASES(name)                                                                         \
    CASE_T(name##_http, CASE_S), CASE_T(name##_mounted, CASE_S), CASE_T(name##_redis, CASE_S)
#define ALL_CASES(name) CASE_T(name##_local, CASE_S), REMOTE_CASES(name)

ALL_BACKENDS(published_nodes_are_seen, LEASE_LONG_MS)
ALL_BACKENDS(topics_are_apart, LEASE_LONG_MS)
ALL_BACKENDS(leases_end, LEASE_SHORT_MS)
ALL_BACKENDS(leave_removes_at_once, LEASE_LONG_MS)
ALL_BACKENDS(reserve_counts_both_nodes, LEASE_LONG_MS)
ALL_BACKENDS(full_nodes_are_refused, LEASE_LONG_MS)
ALL_BACKENDS(last_place_is_given_once, LEASE_LONG_MS)
ALL_BACKENDS(release_may_come_twice, LEASE_LONG_MS)
ALL_BACKENDS(moving_requests_count_once, LEASE_LONG_MS)
ALL_BACKENDS(reservations_end_by_ttl, LEASE_LONG_MS)
ALL_BACKENDS(close_ends_all_callbacks, LEASE_LONG_MS)
ALL_BACKENDS(close_inside_a_callback, LEASE_LONG_MS)
REMOTE_BACKENDS(a_dead_entry_holds_nothing, LEASE_SHORT_MS)

TEST_MAIN(ALL_CASES(published_nodes_are_seen), ALL_CASES(topics_are_apart), ALL_CASES(leases_end),
          ALL_CASES(leave_removes_at_once), ALL_CASES(reserve_counts_both_nodes),
          ALL_CASES(full_nodes_are_refused), ALL_CASES(last_place_is_given_once),
          ALL_CASES(release_may_come_twice), ALL_CASES(moving_requests_count_once),
          ALL_CASES(reservations_end_by_ttl), ALL_CASES(close_ends_all_callbacks),
          ALL_CASES(close_inside_a_callback), REMOTE_CASES(a_dead_entry_holds_nothing),
          CASE_T(killed_redis_comes_back, CASE_S), CASE_T(restarted_server_is_filled_again, CASE_S),
          CASE_T(flushed_redis_is_filled_again, CASE_S),
          CASE_T(paused_redis_gets_the_releases_later, CASE_S),
          CASE_T(every_key_of_redis_is_bounded_in_time, CASE_S), CASE(strangers_are_refused),
          CASE_T(forged_records_of_100_mb_stay_in_redis, CASE_S),
          CASE_T(copied_and_earlier_records_in_redis_are_refused, CASE_S),
          CASE_T(long_answers_of_a_directory_server_are_not_read, CASE_S),
          CASE(a_port_that_is_no_directory_servers_is_named), CASE(open_says_what_is_wrong))
