/* test_redis_sentinel.c - the client finds the master through real sentinels: at the start, after a
 * failover, over TLS, with the sentinels' own password; and says what is wrong when it cannot. */
#include "tests/fixtures/tls_files.h"
#include "tests/unit/net/redis_client.h"

enum { SENTINELS = 3, CASE_S = 240 };

/* A master, its replica, and sentinels that watch them. */
struct group {
    struct redis_process master, replica, sentinel[SENTINELS];
    size_t n_sentinels;
    const char *dir; /* of certificates; NULL: without TLS */
    struct redis_address at[SENTINELS + 1];
};

static void group_server(struct group *g, struct redis_process *p)
{
    size_t n = redis_process_words(p);
    p->words[n++] = "--repl-diskless-sync-delay"; /* 5 s by default */
    p->words[n++] = "0";
    p->words[n] = NULL;
    if (g->dir) tls_words(p, n, g->dir, "server", "no");
}

static void group_start_servers(struct group *g)
{
    size_t n = 0;
    group_server(g, &g->master);
    group_server(g, &g->replica);
    while (g->replica.words[n]) n++;
    g->replica.words[n++] = "--replicaof";
    g->replica.words[n++] = "127.0.0.1";
    g->replica.words[n++] = redis_text("%u", g->master.port);
    g->replica.words[n] = NULL;
    redis_process_start(&g->master);
    redis_process_start(&g->replica);
}

/* A sentinel writes to its file. The first failover is begun without waiting for one that failed
 * (failover-timeout counts double before a second one). */
static void sentinel_start(struct group *g, struct redis_process *p, uint16_t watched,
                           const char *more)
{
    if (p->port == 0) p->port = free_port();
    const char *dir = redis_text("%s", test_tmpdir()), *file = redis_text("%s/sentinel.conf", dir);
    FILE *f = fopen(file, "w");
    CHECK(f != NULL);
    fprintf(f, "dir %s\nbind 127.0.0.1\n", dir);
    if (g->dir)
        fprintf(f,
                "port 0\ntls-port %u\ntls-cert-file %s/server.pem\ntls-key-file %s/server.key\n"
                "tls-ca-cert-file %s/ca.pem\ntls-auth-clients no\ntls-replication yes\n",
                p->port, g->dir, g->dir, g->dir);
    else fprintf(f, "port %u\n", p->port);
    fprintf(f,
            "sentinel monitor mymaster 127.0.0.1 %u %d\n"
            "sentinel down-after-milliseconds mymaster 700\n"
            "sentinel failover-timeout mymaster 4000\n%s",
            watched, g->n_sentinels > 1 ? 2 : 1, more);
    CHECK(fclose(f) == 0);
    p->words[0] = "redis-server";
    p->words[1] = file;
    p->words[2] = "--sentinel";
    p->words[3] = NULL;
    redis_process_start(p);
}

static void group_open(struct group *g, size_t n_sentinels, const char *dir)
{
    *g = (struct group){ .n_sentinels = n_sentinels, .dir = dir };
    group_start_servers(g);
    if (!dir) { /* a sentinel learns of the replica with its first look at the master */
        redis_process_wait(&g->master, "ROLE", "master");
        redis_process_wait(&g->replica, "INFO replication", "master_link_status:up");
    }
    for (size_t i = 0; i < n_sentinels; i++) {
        sentinel_start(g, &g->sentinel[i], g->master.port, "");
        snprintf(g->at[i].host, sizeof g->at[i].host, "127.0.0.1");
        g->at[i].port = g->sentinel[i].port;
    }
}

static void group_close(struct group *g)
{
    for (size_t i = 0; i < g->n_sentinels; i++) redis_process_kill(&g->sentinel[i]);
    redis_process_kill(&g->replica);
    redis_process_kill(&g->master);
}

static struct redis_server through(const struct group *g, size_t n)
{
    return (struct redis_server){ .sentinels = g->at, .n_sentinels = n, .master = "mymaster" };
}

/* Waits until every sentinel knows the replica and the other sentinels. They look at the servers
 * each 0.5 s instead of each 10 s, and correct one that came back after 0.8 s instead of 8 s, if
 * they can be told so (Redis 7). */
static void group_wait_known(const struct group *g)
{
    char others[16];
    snprintf(others, sizeof others, ",sentinels=%zu", g->n_sentinels);
    for (size_t i = 0; i < g->n_sentinels; i++) {
        redis_process_wait(&g->sentinel[i], "PING", "PONG");
        freeReplyObject(redis_process_ask(&g->sentinel[i],
                                          "SENTINEL DEBUG INFO-PERIOD 500 PUBLISH-PERIOD 200"));
        redis_process_wait(&g->sentinel[i], "INFO sentinel", ",slaves=1");
        redis_process_wait(&g->sentinel[i], "INFO sentinel", others);
    }
}

TEST(sentinel_names_the_master_though_another_one_is_dead)
{
    struct group g;
    struct redis_client c;
    group_open(&g, 1, NULL);
    g.at[1] = g.at[0];
    g.at[0].port = free_port(); /* nobody listens */
    client_open(&c, through(&g, 2));
    client_wait_up(&c, 1);
    CHECK_EQ_INT(client_look(&c).where.port, g.master.port);
    CHECK_EQ_STR(client_look(&c).where.host, "127.0.0.1");
    CHECK_OK(client_ask(&c, "SET", "k", "v"));
    client_close(&c);
    group_close(&g);
}

static void check_failover(size_t n_sentinels)
{
    struct group g;
    struct redis_client c;
    group_open(&g, n_sentinels, NULL);
    client_open(&c, through(&g, n_sentinels));
    client_wait_up(&c, 1);
    CHECK_EQ_INT(client_look(&c).where.port, g.master.port);
    group_wait_known(&g);
    CHECK_OK(client_ask(&c, "SET", "k", "v"));
    uint64_t t0 = clock_ms();
    redis_process_kill(&g.master);
    client_wait_up(&c, 2);
    printf("  at the new master %u ms after the old one was killed\n", (unsigned)(clock_ms() - t0));
    CHECK_EQ_INT(client_look(&c).where.port, g.replica.port);
    CHECK_OK(client_ask(&c, "SET", "k2", "v"));
    /* The old one is back, a master until a sentinel tells it; the client stays with the new one. */
    redis_process_start(&g.master);
    redis_process_wait(&g.master, "ROLE", "slave");
    CHECK_OK(client_ask(&c, "SET", "k3", "v"));
    CHECK_EQ_INT(client_look(&c).where.port, g.replica.port);
    client_close(&c);
    group_close(&g);
}

TEST(sentinel_leads_to_the_new_master_after_a_failover) { check_failover(1); }

TEST(sentinels_that_vote_lead_to_the_new_master) { check_failover(3); }

/* An operator's failover: the old master lives on as a replica. */
TEST(sentinel_moves_the_client_off_a_master_that_became_a_replica)
{
    struct group g;
    struct redis_client c;
    group_open(&g, 1, NULL);
    client_open(&c, through(&g, 1));
    client_wait_up(&c, 1);
    group_wait_known(&g);
    redis_process_wait(&g.sentinel[0], "SENTINEL FAILOVER mymaster", "OK");
    redis_process_wait(&g.master, "ROLE", "slave");
    for (int i = 0; i < 1200 && client_look(&c).where.port != g.replica.port; i++) {
        (void)client_ask(&c, "SET", "k", "v"); /* READONLY, where its connection was left alone */
        usleep(50000);
    }
    client_wait_up(&c, 2);
    CHECK_EQ_INT(client_look(&c).where.port, g.replica.port);
    CHECK_OK(client_ask(&c, "SET", "k", "v"));
    client_close(&c);
    group_close(&g);
}

/* A sentinel that was told of the replica as its master names that; the next one is asked. */
TEST(sentinel_that_names_a_replica_is_passed_over)
{
    struct group g;
    struct redis_process wrong = { 0 };
    struct redis_client c;
    group_open(&g, 1, NULL);
    sentinel_start(&g, &wrong, g.replica.port, "");
    redis_process_wait(&wrong, "PING", "PONG");
    g.at[1] = g.at[0];
    g.at[0].port = wrong.port;
    client_open(&c, through(&g, 1)); /* alone it leads nowhere */
    client_wait_down(&c, REDIS_CAUSE_ROLE,
                     WORDS(redis_text("127.0.0.1:%u, which the sentinel 127.0.0.1:%u names",
                                      g.replica.port, wrong.port),
                           "it is a replica",
                           redis_text("its master is 127.0.0.1:%u", g.master.port)));
    CHECK_EQ_INT(atomic_load(&c.n_up), 0);
    client_close(&c);
    client_open(&c, through(&g, 2));
    client_wait_up(&c, 1);
    CHECK_EQ_INT(client_look(&c).where.port, g.master.port);
    client_close(&c);
    redis_process_kill(&wrong);
    group_close(&g);
}

TEST(sentinels_that_do_not_help_are_named_one_by_one)
{
    struct group g;
    struct redis_client c;
    group_open(&g, 1, NULL);
    redis_process_wait(&g.sentinel[0], "PING", "PONG");
    const uint16_t dead = free_port();
    g.at[1] = g.at[0];
    g.at[1].port = dead;
    g.at[2] = g.at[0];
    g.at[2].port = g.master.port; /* no sentinel at all */
    struct redis_server s = through(&g, 3);
    s.master = "other";
    client_open(&c, s);
    client_wait_down(
        &c, REDIS_CAUSE_SENTINEL,
        WORDS("no sentinel names the master other",
              redis_text("127.0.0.1:%u: it knows no master of that name", g.sentinel[0].port),
              redis_text("127.0.0.1:%u: connection refused", dead),
              redis_text("127.0.0.1:%u: ERR unknown command", g.master.port)));
    usleep(500000); /* further rounds begin elsewhere, and say the same: nothing new is told */
    CHECK(atomic_load(&c.n_down) <= 2);
    client_close(&c);
    group_close(&g);
}

TEST(sentinels_have_their_own_password)
{
    struct group g = { .n_sentinels = 1 };
    struct redis_client c;
    group_start_servers(&g);
    redis_process_wait(&g.master, "ROLE", "master");
    sentinel_start(&g, &g.sentinel[0], g.master.port,
                   "requirepass guarded\nuser baton on >own ~* &* +@all\n");
    g.sentinel[0].password = "guarded";
    redis_process_wait(&g.sentinel[0], "PING", "PONG");
    snprintf(g.at[0].host, sizeof g.at[0].host, "127.0.0.1");
    g.at[0].port = g.sentinel[0].port;
    const struct {
        const char *user, *password, *says;
    } tries[] = { { NULL, NULL, "NOAUTH" },
                  { NULL, "wrong", "WRONGPASS" },
                  { "baton", "guarded", "WRONGPASS" },
                  { NULL, "guarded", NULL },
                  { "baton", "own", NULL } };
    for (size_t i = 0; i < sizeof tries / sizeof tries[0]; i++) {
        struct redis_server s = through(&g, 1);
        s.sentinel_username = tries[i].user;
        s.sentinel_password = tries[i].password;
        client_open(&c, s);
        if (tries[i].says)
            client_wait_down(&c, REDIS_CAUSE_SENTINEL_PASSWORD, WORDS(tries[i].says));
        else client_wait_up(&c, 1);
        CHECK_EQ_INT(atomic_load(&c.n_up), !tries[i].says);
        client_close(&c);
    }
    group_close(&g);
}

TEST(sentinels_and_master_are_reached_over_tls)
{
    struct group g;
    struct redis_client c;
    if (!redis_has_program("redis-server"))
        SKIP("redis-server is not installed: sentinels over TLS were NOT tested");
    const char *dir = tls_files_make();
    group_open(&g, 1, dir);
    struct redis_server s = through(&g, 1);
    client_open(&c, s);
    client_wait_down(&c, REDIS_CAUSE_SENTINEL, WORDS("no sentinel names the master mymaster"));
    client_close(&c);
    s.tls = true;
    s.tls_ca = redis_text("%s/ca.pem", dir);
    client_open(&c, s);
    client_wait_up(&c, 1);
    CHECK_EQ_STR(c.tls, "TLSv1.3");
    CHECK_OK(client_ask(&c, "SET", "k", "v"));
    client_close(&c);
    s.tls_ca = redis_text("%s/other_ca.pem", dir);
    client_open(&c, s);
    client_wait_down(&c, REDIS_CAUSE_SENTINEL, WORDS("certificate", "is refused"));
    client_close(&c);
    group_close(&g);
}

/* Without sentinels too: only a master is used. */
TEST(a_replica_or_a_sentinel_that_is_named_is_refused)
{
    struct group g;
    struct redis_client c;
    group_open(&g, 1, NULL);
    redis_process_wait(&g.sentinel[0], "PING", "PONG");
    client_open(&c, (struct redis_server){ .host = "127.0.0.1", .port = g.replica.port });
    client_wait_down(&c, REDIS_CAUSE_ROLE,
                     WORDS("it is a replica, which takes no writes",
                           redis_text("its master is 127.0.0.1:%u", g.master.port)));
    client_close(&c);
    client_open(&c, (struct redis_server){ .host = "localhost", .port = g.sentinel[0].port });
    client_wait_down(&c, REDIS_CAUSE_ROLE, WORDS("it is a sentinel"));
    client_close(&c);
    group_close(&g);
}

TEST_MAIN(CASE(sentinel_names_the_master_though_another_one_is_dead),
          CASE_T(sentinel_leads_to_the_new_master_after_a_failover, CASE_S),
          CASE_T(sentinels_that_vote_lead_to_the_new_master, CASE_S),
          CASE_T(sentinel_moves_the_client_off_a_master_that_became_a_replica, CASE_S),
          CASE(sentinel_that_names_a_replica_is_passed_over),
          CASE(sentinels_that_do_not_help_are_named_one_by_one),
          CASE(sentinels_have_their_own_password), CASE(sentinels_and_master_are_reached_over_tls),
          CASE(a_replica_or_a_sentinel_that_is_named_is_refused))
