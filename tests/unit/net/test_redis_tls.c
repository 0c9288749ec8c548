/* test_redis_tls.c - the client against real redis-servers over TLS, with certificates made here,
 * and as an ACL user: what is let in, and what is refused with which sentence. */
#include "shared/net/tls.h"
#include "tests/fixtures/tls_files.h"
#include "tests/unit/net/redis_client.h"

struct site {
    const char *dir;
    struct redis_process redis;
    char ca[REDIS_PATH_MAX];
};

static void site_open(struct site *s, const char *certificate, const char *auth_clients)
{
    *s = (struct site){ 0 };
    size_t n = redis_process_words(&s->redis);
    s->dir = tls_files_make();
    tls_words(&s->redis, n, s->dir, certificate, auth_clients);
    snprintf(s->ca, sizeof s->ca, "%s/ca.pem", s->dir);
    redis_process_start(&s->redis);
}

static void site_close(struct site *s) { redis_process_kill(&s->redis); }

static struct redis_server over_tls(const struct site *s, const char *host)
{
    return (
        struct redis_server){ .host = host, .port = s->redis.port, .tls = true, .tls_ca = s->ca };
}

static void check_refused(struct redis_server server, enum redis_cause cause,
                          const char *const *words)
{
    struct redis_client c;
    client_open(&c, server);
    client_wait_down(&c, cause, words);
    CHECK_EQ_INT(atomic_load(&c.n_up), 0);
    client_close(&c);
}

TEST(tls_carries_commands_by_address_and_by_name)
{
    struct site s;
    site_open(&s, "server", "no");
    static char large[1 << 20];
    memset(large, 'x', sizeof large - 1);
    const char *const hosts[] = { "127.0.0.1", "localhost" };
    for (size_t i = 0; i < 2; i++) {
        struct redis_client c;
        client_open(&c, over_tls(&s, hosts[i]));
        client_wait_up(&c, 1);
        CHECK_EQ_STR(c.tls, "TLSv1.3");
        CHECK_OK(client_ask(&c, "SET", "k", large));
        CHECK_OK(client_ask(&c, "GET", "k", NULL));
        CHECK_EQ_INT(c.text.len, sizeof large - 1);
        CHECK(memcmp(c.text.data, large, sizeof large - 1) == 0);
        for (int k = 0; k < 200; k++) CHECK_OK(client_ask(&c, "INCR", "n", NULL));
        client_close(&c);
    }
    site_close(&s);
}

TEST(tls_comes_back_after_the_server_was_killed)
{
    struct site s;
    struct redis_client c;
    site_open(&s, "server", "no");
    client_open(&c, over_tls(&s, "127.0.0.1"));
    client_wait_up(&c, 1);
    redis_process_kill(&s.redis);
    client_wait_down(&c, REDIS_CAUSE_CONNECTION, WORDS("refused"));
    redis_process_start(&s.redis);
    client_wait_up(&c, 2);
    CHECK_OK(client_ask(&c, "PING", NULL, NULL));
    client_close(&c);
    site_close(&s);
}

TEST(tls_refuses_a_certificate_of_an_unknown_ca)
{
    struct site s;
    site_open(&s, "server", "no");
    snprintf(s.ca, sizeof s.ca, "%s/other_ca.pem", s.dir);
    check_refused(over_tls(&s, "127.0.0.1"), REDIS_CAUSE_TLS,
                  WORDS("the certificate of the server 127.0.0.1 is refused", "self-signed"));
    s.ca[0] = 0; /* the CAs of this host do not know it either */
    check_refused(over_tls(&s, "127.0.0.1"), REDIS_CAUSE_TLS, WORDS("is refused", "certificate"));
    site_close(&s);
}

TEST(tls_refuses_a_certificate_for_another_server)
{
    struct site s;
    site_open(&s, "stranger", "no");
    check_refused(over_tls(&s, "127.0.0.1"), REDIS_CAUSE_TLS,
                  WORDS("is refused", "IP address mismatch"));
    check_refused(over_tls(&s, "localhost"), REDIS_CAUSE_TLS,
                  WORDS("server localhost is refused", "hostname mismatch"));
    site_close(&s);
}

TEST(tls_refuses_a_certificate_of_the_past)
{
    struct site s;
    site_open(&s, "expired", "no");
    check_refused(over_tls(&s, "127.0.0.1"), REDIS_CAUSE_TLS,
                  WORDS("is refused", "certificate has expired"));
    site_close(&s);
}

TEST(tls_shows_its_own_certificate_where_one_is_asked_for)
{
    struct site s;
    struct redis_client c;
    site_open(&s, "server", "yes");
    check_refused(over_tls(&s, "127.0.0.1"), REDIS_CAUSE_TLS,
                  WORDS("the server refuses the TLS connection", "certificate required"));
    struct redis_server server = over_tls(&s, "127.0.0.1");
    server.tls_cert = redis_text("%s/client.pem", s.dir);
    server.tls_key = redis_text("%s/client.key", s.dir);
    client_open(&c, server);
    client_wait_up(&c, 1);
    CHECK_OK(client_ask(&c, "PING", NULL, NULL));
    client_close(&c);
    server.tls_cert = redis_text("%s/other.pem", s.dir);
    server.tls_key = redis_text("%s/other.key", s.dir);
    check_refused(server, REDIS_CAUSE_TLS,
                  WORDS("the server refuses the TLS connection", "unknown ca"));
    site_close(&s);
}

/* One side speaks TLS, the other does not. */
TEST(tls_on_one_side_only_is_named)
{
    struct site s;
    struct redis_process plain = { 0 };
    site_open(&s, "server", "no");
    struct redis_server server = { .host = "127.0.0.1", .port = s.redis.port };
    check_refused(server, REDIS_CAUSE_PROTOCOL, WORDS("before any answer"));
    redis_process_words(&plain);
    redis_process_start(&plain);
    redis_process_wait(&plain, "PING", "PONG");
    server = over_tls(&s, "127.0.0.1");
    server.port = plain.port;
    check_refused(server, REDIS_CAUSE_TLS, WORDS("speak TLS at this port"));
    redis_process_kill(&plain);
    site_close(&s);
}

static void check_files(const char *ca, const char *cert, const char *key, const char *field,
                        const char *word)
{
    struct tls_client *t = NULL;
    struct err err = { 0 };
    const struct tls_client_options o = { .ca_file = ca, .cert_file = cert, .key_file = key };
    CHECK_STATUS(tls_client_create(&o, &t, &err), ERR_CONFIG);
    CHECK_EQ_STR(err.field, field);
    if (!strstr(err.text, word)) test_fail(__FILE__, __LINE__, "%s", err.text);
    CHECK(t == NULL);
}

TEST(tls_files_that_cannot_be_used_are_named)
{
    const char *dir = tls_files_make(), *ca = redis_text("%s/ca.pem", dir),
               *cert = redis_text("%s/client.pem", dir), *key = redis_text("%s/client.key", dir),
               *locked = redis_text("%s/locked.key", dir);
    struct tls_client *t;
    tls_run(dir, "openssl ec -in client.key -aes128 -passout pass:secret -out locked.key");
    check_files("/nowhere/ca.pem", NULL, NULL, "ca", "/nowhere/ca.pem");
    check_files("/nowhere/ca.pem", NULL, NULL, "ca", "No such file");
    check_files(key, NULL, NULL, "ca", "as a file of CAs in PEM form");
    check_files(ca, cert, NULL, "key", "without its key");
    check_files(ca, NULL, key, "cert", "without its certificate");
    check_files(ca, "/nowhere/cert.pem", key, "cert", "No such file");
    check_files(ca, cert, redis_text("%s/server.key", dir), "key", "does not belong");
    tls_run(dir, "openssl genrsa -out rsa.key 2048");
    check_files(ca, cert, redis_text("%s/rsa.key", dir), "key", "does not belong");
    check_files(ca, cert, locked, "key", "without a pass phrase"); /* and asks nobody for it */
    const struct tls_client_options good = { .ca_file = ca, .cert_file = cert, .key_file = key };
    CHECK_OK(tls_client_create(&good, &t, NULL));
    tls_client_free(t);
}

/* Adds a user to the words of a server that does not run yet. */
static size_t with_user(struct redis_process *p, size_t n, const char *const *rights)
{
    p->words[n++] = "--user";
    while (*rights) p->words[n++] = *rights++;
    p->words[n] = NULL;
    return n;
}

TEST(acl_user_is_let_in_and_refused_by_name)
{
    struct redis_process p = { 0 };
    struct redis_client c;
    size_t n = redis_process_words(&p);
    n = with_user(&p, n, WORDS("default", "off"));
    n = with_user(&p, n, WORDS("baton", "on", ">secret", "~baton:*", "+@all"));
    n = with_user(&p, n, WORDS("blind", "on", ">secret", "~*", "+@all", "-role"));
    with_user(&p, n, WORDS("narrow", "on", ">secret", "~baton:*", "+ping", "+role", "+get"));
    redis_process_start(&p);
    struct redis_server s = { .host = "127.0.0.1", .port = p.port };
    check_refused(s, REDIS_CAUSE_PASSWORD, WORDS("NOAUTH"));
    s.username = "baton";
    s.password = "wrong";
    check_refused(s, REDIS_CAUSE_PASSWORD, WORDS("WRONGPASS"));
    s.username = NULL; /* the default user is switched off */
    s.password = "secret";
    check_refused(s, REDIS_CAUSE_PASSWORD, WORDS("WRONGPASS"));
    s.username = "blind";
    check_refused(s, REDIS_CAUSE_PERMISSION, WORDS("NOPERM", "role"));
    s.username = "baton";
    client_open(&c, s);
    client_wait_up(&c, 1);
    CHECK_OK(client_ask(&c, "SET", "baton:x", "1"));
    CHECK_STATUS(client_ask(&c, "SET", "others", "1"), ERR_IO);
    CHECK(strstr(c.text.data, "NOPERM"));
    client_close(&c);
    s.username = "narrow";
    client_open(&c, s);
    client_wait_up(&c, 1);
    CHECK_OK(client_ask(&c, "GET", "baton:x", NULL));
    CHECK_STATUS(client_ask(&c, "SET", "baton:x", "1"), ERR_IO);
    client_close(&c);
    redis_process_kill(&p);
}

TEST(servers_that_cannot_be_are_refused)
{
    struct loop *l;
    struct redis *r = NULL;
    struct err err = { 0 };
    const struct redis_address many[REDIS_SENTINELS_MAX + 1] = { { "a", 1 } };
    const struct {
        struct redis_server server;
        const char *field;
    } bad[] = {
        { { .port = 1 }, "host" },
        { { .host = "a" }, "port" },
        { { .host = "a", .port = 1, .db = -1 }, "db" },
        { { .host = "a", .port = 1, .username = "u" }, "username" },
        { { .sentinels = many, .n_sentinels = 1 }, "master" },
        { { .sentinels = many, .n_sentinels = REDIS_SENTINELS_MAX + 1, .master = "m" },
          "sentinels" },
        { { .host = "a", .port = 1, .tls = true, .tls_ca = "/nowhere" }, "ca" },
    };
    CHECK_OK(loop_create(&l, NULL));
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        const struct redis_options o = { .loop = l, .server = bad[i].server };
        CHECK_STATUS(redis_create(&o, &r, &err), ERR_CONFIG);
        CHECK_EQ_STR(err.field, bad[i].field);
    }
    CHECK(r == NULL);
    loop_free(l);
}

TEST_MAIN(CASE(tls_carries_commands_by_address_and_by_name),
          CASE(tls_comes_back_after_the_server_was_killed),
          CASE(tls_refuses_a_certificate_of_an_unknown_ca),
          CASE(tls_refuses_a_certificate_for_another_server),
          CASE(tls_refuses_a_certificate_of_the_past),
          CASE(tls_shows_its_own_certificate_where_one_is_asked_for),
          CASE(tls_on_one_side_only_is_named), CASE(tls_files_that_cannot_be_used_are_named),
          CASE(acl_user_is_let_in_and_refused_by_name), CASE(servers_that_cannot_be_are_refused))
