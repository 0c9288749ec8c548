/* test_redis.c - the client against a real redis-server on a free loopback port: commands, scripts,
 * loss and reconnection, deadlines. */
#include "shared/net/redis/redis.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "shared/base/mem.h"
#include "tests/unit/net/net_fixture.h"

struct rig {
    struct loop *loop;
    pthread_t thread;
    struct redis *redis;
    pid_t server;
    uint16_t port;
    const char *host, *password;
    int db;
    uint32_t timeout_ms;
    atomic_int n_up, n_down;
    bool is_up;
    char why[200];
};

struct ask {
    struct rig *rig;
    const char *script;
    int n_keys, argc;
    const char *argv[8];
    size_t len[8];
    enum status begun, st;
    int type, n_calls;
    long long integer;
    struct buf text;
    sem_t done;
};

static void need_redis(void)
{
    if (access("/usr/bin/redis-server", X_OK) != 0 &&
        system("command -v redis-server >/dev/null 2>&1") != 0)
        SKIP("redis-server is not installed: nothing of shared/net/redis was tested");
}

static void server_start(struct rig *g)
{
    char port[8];
    if (g->port == 0) close(fixture_listen(&g->port));
    snprintf(port, sizeof port, "%u", g->port);
    g->server = fork();
    CHECK(g->server >= 0);
    if (g->server > 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (!freopen("/dev/null", "w", stdout)) _exit(126);
    execlp("redis-server", "redis-server", "--port", port, "--bind", "127.0.0.1", "--save", "",
           "--appendonly", "no", "--dir", "/tmp", "--requirepass", g->password ? g->password : "",
           (char *)NULL);
    _exit(127);
}

static void server_kill(struct rig *g)
{
    kill(g->server, SIGKILL);
    waitpid(g->server, NULL, 0);
}

static void on_up(void *arg)
{
    struct rig *g = arg;
    CHECK(redis_is_up(g->redis));
    g->is_up = true;
    atomic_fetch_add(&g->n_up, 1);
}

static void on_down(void *arg, const char *why)
{
    struct rig *g = arg;
    CHECK(strcmp(g->why, why) != 0 || g->is_up); /* only what is new */
    snprintf(g->why, sizeof g->why, "%s", why);
    bool first = g->is_up || atomic_load(&g->n_down) == 0;
    g->is_up = false;
    if (first) atomic_fetch_add(&g->n_down, 1);
}

static void rig_make(void *arg)
{
    struct rig *g = arg;
    struct redis_options o = {
        .loop = g->loop,
        .server = {
            .host = g->host ? g->host : "127.0.0.1",
            .port = g->port,
            .db = g->db,
            .password = g->password,
        },
        .timeout_ms = g->timeout_ms ? g->timeout_ms : 1000,
        .on_up = on_up,
        .on_down = on_down,
        .arg = g,
    };
    CHECK_OK(redis_create(&o, &g->redis, NULL));
    CHECK(!redis_is_up(g->redis));
}

static void rig_unmake(void *arg)
{
    struct rig *g = arg;
    redis_free(g->redis);
    g->redis = NULL;
}

static void wait_for(atomic_int *n, int at_least)
{
    for (int i = 0; i < 10000 && atomic_load(n) < at_least; i++) usleep(1000);
    if (atomic_load(n) < at_least) test_fail(__FILE__, __LINE__, "waited in vain for %d", at_least);
}

static void rig_open(struct rig *g)
{
    need_redis();
    server_start(g);
    g->thread = fixture_start(&g->loop);
    fixture_on_loop(g->loop, rig_make, g);
}

static void rig_close(struct rig *g)
{
    if (g->redis) fixture_on_loop(g->loop, rig_unmake, g);
    fixture_stop(g->loop, g->thread);
    if (g->server > 0) server_kill(g);
}

static void on_reply(void *arg, enum status st, const redisReply *r)
{
    struct ask *a = arg;
    a->st = st;
    a->n_calls++;
    CHECK((st == OK || st == ERR_IO) == (r != NULL));
    if (r) {
        a->type = r->type;
        a->integer = r->integer;
        buf_clear(&a->text);
        if (r->str) buf_add(&a->text, r->str, r->len);
    }
    sem_post(&a->done);
}

static void ask_begin(void *arg)
{
    struct ask *a = arg;
    for (int i = 0; i < a->argc; i++)
        if (a->len[i] == 0) a->len[i] = strlen(a->argv[i]);
    struct redis *r = a->rig->redis;
    if (a->script)
        a->begun = redis_script(r, a->script, on_reply, a, a->n_keys, a->argc, a->argv, a->len);
    else a->begun = redis_command(r, on_reply, a, a->argc, a->argv, a->len);
}

static void ask_start(struct rig *g, struct ask *a)
{
    a->rig = g;
    a->n_calls = 0;
    sem_init(&a->done, 0, 0);
    fixture_on_loop(g->loop, ask_begin, a);
}

static void ask_wait(struct rig *g, struct ask *a)
{
    ask_start(g, a);
    CHECK_OK(a->begun);
    while (sem_wait(&a->done) != 0) {}
    CHECK_EQ_INT(a->n_calls, 1);
}

TEST(redis_runs_commands)
{
    struct rig g = { .db = 3 };
    rig_open(&g);
    wait_for(&g.n_up, 1);
    struct ask set = { .argc = 3, .argv = { "SET", "k", "a\0b\r\n" }, .len = { 0, 0, 5 } },
               get = { .argc = 2, .argv = { "GET", "k" } };
    struct ask bad = { .argc = 2, .argv = { "LPUSH", "k" } },
               empty = { .argc = 2, .argv = { "GET", "none" } };
    ask_wait(&g, &set);
    CHECK_OK(set.st);
    ask_wait(&g, &get);
    CHECK_OK(get.st);
    CHECK_EQ_INT(get.text.len, 5);
    CHECK(memcmp(get.text.data, "a\0b\r\n", 5) == 0);
    ask_wait(&g, &bad);
    CHECK_STATUS(bad.st, ERR_IO);
    CHECK(strstr(bad.text.data, "wrong number of arguments") != NULL);
    buf_release(&bad.text);
    ask_wait(&g, &empty);
    CHECK_OK(empty.st);
    CHECK_EQ_INT(empty.type, REDIS_REPLY_NIL);
    struct ask one = { .argc = 2, .argv = { "SELECT", "0" } };
    ask_wait(&g, &one);
    ask_wait(&g, &get);
    CHECK_EQ_INT(get.type, REDIS_REPLY_NIL); /* it was in database 3 */
    buf_release(&set.text);
    buf_release(&one.text);
    buf_release(&get.text);
    rig_close(&g);
}

TEST(redis_scripts_survive_a_flush)
{
    static const char script[] =
        "redis.call('SET', KEYS[1], ARGV[1]) return redis.call('INCRBY', KEYS[1], ARGV[2])";
    static const char broken[] = "return redis.call('NOSUCH')";
    struct rig g = { 0 };
    rig_open(&g);
    wait_for(&g.n_up, 1);
    struct ask s = { .script = script, .n_keys = 1, .argc = 3, .argv = { "n", "40", "2" } };
    struct ask flush = { .argc = 2, .argv = { "SCRIPT", "FLUSH" } }, b = { .script = broken };
    struct ask calls = { .argc = 2, .argv = { "INFO", "commandstats" } };
    for (int i = 0; i < 3; i++) {
        ask_wait(&g, &s);
        CHECK_OK(s.st);
        CHECK_EQ_INT(s.integer, 42);
        ask_wait(&g, &s);
        CHECK_EQ_INT(s.integer, 42);
        ask_wait(&g, &flush);
    }
    ask_wait(&g, &b);
    CHECK_STATUS(b.st, ERR_IO);
    buf_release(&b.text);
    ask_wait(&g, &calls);
    /* The text is sent only when the server does not know it. */
    CHECK(strstr(calls.text.data, "cmdstat_eval:calls=4,") != NULL);
    buf_release(&calls.text);
    buf_release(&flush.text);
    rig_close(&g);
}

TEST(redis_comes_back_after_the_server_was_killed)
{
    struct rig g = { 0 };
    rig_open(&g);
    wait_for(&g.n_up, 1);
    for (int round = 1; round <= 2; round++) {
        int downs = atomic_load(&g.n_down);
        struct ask pop = { .argc = 3, .argv = { "BLPOP", "never", "0" } },
                   late = { .argc = 1, .argv = { "PING" } };
        ask_start(&g, &pop);
        CHECK_OK(pop.begun);
        server_kill(&g);
        while (sem_wait(&pop.done) != 0) {}
        CHECK_STATUS(pop.st, ERR_PEER_LOST);
        wait_for(&g.n_down, downs + 1);
        ask_start(&g, &late);
        CHECK_STATUS(late.begun, ERR_UNAVAILABLE);
        CHECK_EQ_INT(late.n_calls, 0);
        usleep(300000); /* some attempts fail meanwhile, and are not reported again */
        CHECK_EQ_INT(atomic_load(&g.n_down), downs + 1);
        server_start(&g);
        wait_for(&g.n_up, round + 1);
        ask_wait(&g, &late);
        CHECK_OK(late.st);
        buf_release(&late.text);
    }
    rig_close(&g);
}

TEST(redis_rebuilds_the_connection_after_a_deadline)
{
    struct rig g = { .timeout_ms = 200 };
    rig_open(&g);
    wait_for(&g.n_up, 1);
    int downs = atomic_load(&g.n_down);
    kill(g.server, SIGSTOP);
    uint64_t t = clock_ms();
    struct ask a = { .argc = 1, .argv = { "PING" } };
    ask_wait(&g, &a);
    CHECK_STATUS(a.st, ERR_TIMEOUT);
    CHECK(clock_ms() - t >= 195);
    wait_for(&g.n_down, downs + 1);
    usleep(500000); /* the kernel accepts connections meanwhile; no handshake is answered */
    kill(g.server, SIGCONT);
    wait_for(&g.n_up, 2);
    ask_wait(&g, &a);
    CHECK_OK(a.st);
    buf_release(&a.text);
    rig_close(&g);
}

TEST(redis_says_why_it_is_down)
{
    struct rig g = { .host = "localhost" };
    need_redis();
    close(fixture_listen(&g.port));
    g.thread = fixture_start(&g.loop);
    fixture_on_loop(g.loop, rig_make, &g);
    wait_for(&g.n_down, 1);
    CHECK(strstr(g.why, "refused") != NULL);
    rig_close(&g);
    /* A wrong password, and the right one. */
    struct rig h = { .password = "secret" };
    rig_open(&h);
    wait_for(&h.n_up, 1);
    rig_close(&h);
    struct rig k = { .password = "secret" };
    need_redis();
    server_start(&k);
    k.password = "wrong";
    k.thread = fixture_start(&k.loop);
    usleep(300000);
    fixture_on_loop(k.loop, rig_make, &k);
    wait_for(&k.n_down, 1);
    /* The server may not listen yet: that reason comes first, and then the other one. */
    for (int i = 0; i < 100 && !strstr(k.why, "WRONGPASS"); i++) usleep(50000);
    CHECK(strstr(k.why, "WRONGPASS") != NULL);
    CHECK_EQ_INT(atomic_load(&k.n_up), 0);
    rig_close(&k);
}

TEST(redis_cancels_what_is_pending_when_freed)
{
    struct rig g = { 0 };
    rig_open(&g);
    wait_for(&g.n_up, 1);
    struct ask a[3];
    for (int i = 0; i < 3; i++) {
        a[i] = (struct ask){ .argc = 3, .argv = { "BLPOP", "never", "0" } };
        ask_start(&g, &a[i]);
        CHECK_OK(a[i].begun);
    }
    fixture_on_loop(g.loop, rig_unmake, &g);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ_INT(a[i].n_calls, 1);
        CHECK_STATUS(a[i].st, ERR_CANCELED);
    }
    rig_close(&g);
}

static void free_on_reply(void *arg, enum status st, const redisReply *r)
{
    struct ask *a = arg;
    (void)r;
    a->st = st;
    redis_free(a->rig->redis);
    a->rig->redis = NULL;
    sem_post(&a->done);
}

static void ask_two(void *arg)
{
    struct ask *a = arg;
    const char *ping[] = { "PING" };
    CHECK_OK(redis_command(a[0].rig->redis, free_on_reply, &a[0], 1, ping, NULL));
    CHECK_OK(redis_command(a[0].rig->redis, on_reply, &a[1], 1, ping, NULL));
}

TEST(redis_may_be_freed_inside_a_reply)
{
    struct rig g = { 0 };
    rig_open(&g);
    wait_for(&g.n_up, 1);
    struct ask a[2] = { { .rig = &g }, { .rig = &g } };
    sem_init(&a[0].done, 0, 0);
    sem_init(&a[1].done, 0, 0);
    fixture_on_loop(g.loop, ask_two, a);
    while (sem_wait(&a[1].done) != 0) {}
    while (sem_wait(&a[0].done) != 0) {}
    CHECK_OK(a[0].st);
    CHECK_STATUS(a[1].st, ERR_CANCELED);
    CHECK_EQ_INT(a[1].n_calls, 1);
    rig_close(&g);
}

TEST(redis_bounds_replies)
{
    struct rig g = { .timeout_ms = 5000 };
    rig_open(&g);
    wait_for(&g.n_up, 1);
    /* 20 MiB of zeros, then a list of 1.2 million elements. */
    struct ask fill = { .argc = 4, .argv = { "SETRANGE", "big", "20971519", "x" } },
               get = { .argc = 2, .argv = { "GET", "big" } };
    static const char many[] = "local t = {} for i = 1, 1200000 do t[i] = 1 end return t";
    struct ask list = { .script = many };
    ask_wait(&g, &fill);
    CHECK_OK(fill.st);
    int downs = atomic_load(&g.n_down);
    ask_wait(&g, &get);
    CHECK_STATUS(get.st, ERR_PEER_LOST);
    wait_for(&g.n_down, downs + 1);
    CHECK(strstr(g.why, "8 MiB") != NULL);
    wait_for(&g.n_up, 2);
    ask_wait(&g, &list);
    CHECK_STATUS(list.st, ERR_PEER_LOST);
    wait_for(&g.n_up, 3);
    rig_close(&g);
}

TEST_MAIN(CASE(redis_runs_commands), CASE(redis_scripts_survive_a_flush),
          CASE(redis_comes_back_after_the_server_was_killed),
          CASE(redis_rebuilds_the_connection_after_a_deadline), CASE(redis_says_why_it_is_down),
          CASE(redis_cancels_what_is_pending_when_freed), CASE(redis_may_be_freed_inside_a_reply),
          CASE(redis_bounds_replies))
