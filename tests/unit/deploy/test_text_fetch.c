/* test_text_fetch.c - a model's text fetched from the product's server: every outcome is told once
 * and as it was, and what is canceled at any moment leaves nothing behind. */
#include "deploy/text/text_fetch.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>

#include "deploy/text/text_server.h"
#include "shared/base/mem.h"
#include "shared/net/http/http_server.h"
#include "tests/unit/net/net_fixture.h"

enum { N_TRIES = 200 };

#define SECRET STR("a secret of sixteen bytes or more")

static const char *const NAMES[] = { "m", "other/name" };

struct rig {
    struct loop *loop;
    pthread_t thread;
    struct http_server *server;
    struct text_server text;
    struct text_source source;
    char folder[4096]; /* in which texts are unpacked */
    /* One fetch. */
    struct text_fetch_options ask;
    struct text_fetch *fetch;
    enum status st;
    struct err err;
    struct text_fetched got;
    int n_told;
    sem_t told;
};

static void handle(void *arg, struct http_exchange *x)
{
    struct rig *g = arg;
    text_server_answer(&g->text, &g->source, SECRET, x);
}

static void rig_make(void *arg)
{
    struct rig *g = arg;
    const struct http_server_options o = {
        .loop = g->loop, .host = "127.0.0.1", .handler = handle, .arg = g
    };
    g->text.loop = g->loop;
    CHECK_OK(http_server_start(&o, &g->server, NULL));
    g->ask.port = http_server_port(g->server);
}

static void rig_unmake(void *arg)
{
    struct rig *g = arg;
    http_server_stop(g->server, 0, NULL, NULL);
}

static void on_told(void *arg, enum status st, const struct err *err, struct text_fetched *got)
{
    struct rig *g = arg;
    g->st = st;
    g->err = *err;
    g->got = *got;
    g->n_told++;
    g->fetch = NULL;
    sem_post(&g->told);
}

static struct rig *rig_open(void)
{
    struct rig *g = MEM_NEW(struct rig);
    snprintf(g->folder, sizeof g->folder, "%s", test_tmpdir());
    setenv("TMPDIR", g->folder, 1);
    sem_init(&g->told, 0, 0);
    g->thread = fixture_start(&g->loop);
    g->source = (struct text_source){
        .model_path = mem_strdup(test_data("goldens/llama/model")),
        .model = 7,
        .max_model_len = 777,
        .reasoning_parser = "think",
        .tool_parser = "hermes",
        .names = NAMES,
        .n_names = 2,
    };
    g->ask = (struct text_fetch_options){
        .loop = g->loop, .host = "127.0.0.1", .secret = SECRET, .done = on_told, .arg = g
    };
    fixture_on_loop(g->loop, rig_make, g);
    return g;
}

static void nothing(void *arg) { (void)arg; }

static void rig_close(struct rig *g)
{
    fixture_on_loop(g->loop, rig_unmake, g);
    usleep(50000);
    fixture_on_loop(g->loop, nothing, g);
    fixture_stop(g->loop, g->thread);
    mem_free((char *)g->source.model_path);
    mem_free(g);
}

static void begin(void *arg)
{
    struct rig *g = arg;
    g->fetch = text_fetch_start(&g->ask);
}

static void cancel(void *arg)
{
    struct rig *g = arg;
    text_fetch_cancel(g->fetch);
    g->fetch = NULL;
}

static enum status fetch(struct rig *g)
{
    g->n_told = 0;
    fixture_on_loop(g->loop, begin, g);
    while (sem_wait(&g->told) != 0) {}
    CHECK_EQ_INT(g->n_told, 1);
    return g->st;
}

static size_t n_entries(const char *folder)
{
    DIR *d = opendir(folder);
    size_t n = 0;
    while (d && readdir(d)) n++;
    if (d) closedir(d);
    return n;
}

TEST(a_text_comes_with_what_its_node_said)
{
    struct rig *g = rig_open();
    CHECK_OK(fetch(g));
    CHECK(g->got.model == 7 && g->got.max_model_len == 777 && g->got.n_names == 2);
    CHECK_EQ_STR(g->got.names[1], "other/name");
    CHECK_EQ_STR(g->got.reasoning_parser, "think");
    CHECK_EQ_STR(g->got.tool_parser, "hermes");
    CHECK(access(g->got.model_path.data, R_OK) == 0);
    text_fetched_release(&g->got);
    CHECK_EQ_INT(n_entries(g->folder), 2); /* . and .. */
    rig_close(g);
}

/* The worker may have failed before the loop's thread goes on from giving it the work. */
TEST(a_failure_on_the_worker_is_never_taken_for_a_text)
{
    struct rig *g = rig_open();
    setenv("TMPDIR", "/nonexistent", 1);
    for (int i = 0; i < N_TRIES; i++) {
        CHECK_EQ_INT(fetch(g), ERR_IO);
        CHECK(strstr(g->err.text, "no folder can be made at /nonexistent") != NULL);
        text_fetched_release(&g->got);
    }
    rig_close(g);
}

TEST(what_others_signed_and_nobody_sent_is_said)
{
    struct rig *g = rig_open();
    g->ask.secret = STR("another secret of sixteen bytes");
    CHECK_EQ_INT(fetch(g), ERR_UNAUTHORIZED);
    text_fetched_release(&g->got);
    int fd = fixture_listen(&g->ask.port);
    close(fd); /* nobody listens there now */
    CHECK(fetch(g) != OK);
    CHECK(strstr(g->err.text, "does not answer") != NULL);
    text_fetched_release(&g->got);
    rig_close(g);
}

TEST(canceled_at_any_moment_it_leaves_nothing)
{
    struct rig *g = rig_open();
    for (int i = 0; i < N_TRIES; i++) {
        fixture_on_loop(g->loop, begin, g);
        usleep((useconds_t)(i * 50));
        fixture_on_loop(g->loop, cancel, g);
        if (sem_trywait(&g->told) == 0) text_fetched_release(&g->got); /* it had come */
    }
    usleep(200000); /* a worker that had it ends */
    fixture_on_loop(g->loop, nothing, g);
    CHECK(sem_trywait(&g->told) != 0);
    CHECK_EQ_INT(n_entries(g->folder), 2);
    rig_close(g);
}

TEST_MAIN(CASE(a_text_comes_with_what_its_node_said),
          CASE(a_failure_on_the_worker_is_never_taken_for_a_text),
          CASE(what_others_signed_and_nobody_sent_is_said),
          CASE(canceled_at_any_moment_it_leaves_nothing))
