/* test_passer.c - which node a request is passed to, and what happens when that node refuses or
 * freezes. Other nodes are HTTP servers on the same loop, in a local directory. */
#include "scheduler/passer.h"

#include <stdatomic.h>
#include <stdio.h>

#include "scheduler/view.h"
#include "shared/base/list.h"
#include "shared/base/mem.h"
#include "tests/unit/net/net_fixture.h"

enum { NODES_MAX = 4, MODEL = 7 };

struct rig;

struct other {
    struct rig *rig;
    struct http_server *server;
    struct node_record record;
    int status;          /* of its answers; 0: it never answers a request */
    bool frozen;         /* nor /live */
    const char *headers; /* of its answers; NULL: none */
    atomic_int n_asked;
};

struct rig {
    struct loop *loop;
    pthread_t thread;
    struct metrics *metrics;
    struct directory *directory;
    struct passer *passer;
    struct http_server *front;
    struct other others[NODES_MAX];
    size_t n_others;
    enum pass_reason reason;
    bool as_serve;                    /* asks through passer_when_full */
    struct directory front_directory; /* the passer's: `directory`, until `away` */
    bool away;
    atomic_int n_unanswered; /* snapshots asked for while it was away */
    uint16_t port;
    uint32_t snapshot_ms; /* 0: one that lasts for the test */
    uint32_t wait_ms;
};

static void other_handle(void *arg, struct http_exchange *x)
{
    struct other *o = arg;
    if (str_eq_c(http_path(x), "/live")) {
        if (!o->frozen) http_reply(x, 200, "text/plain", NULL, STR(""));
        return;
    }
    atomic_fetch_add(&o->n_asked, 1);
    CHECK(str_eq_c(http_header(x, "x-baton-passed"), "me:1"));
    CHECK(str_eq_c(http_header(x, "x-baton-passed-name"), "a-name"));
    if (o->status) http_reply(x, o->status, "text/plain", o->headers, str_of(o->record.name));
}

/* A request at the front. */
struct asked {
    struct rig *rig;
    struct http_exchange *x;
    void *pass;
};

static void answer_here(struct asked *a) { http_reply(a->x, 503, "text/plain", NULL, STR("own")); }

static void front_on_done(void *arg, bool taken, int status)
{
    struct asked *a = arg;
    a->pass = NULL;
    CHECK_EQ_INT(status != 0, taken);
    if (!taken) answer_here(a);
}

static void front_on_end(void *arg, bool gone)
{
    struct asked *a = arg;
    (void)gone;
    if (a->pass) passer_cancel(a->rig->passer, a->pass);
    mem_free(a);
}

static void front_handle(void *arg, struct http_exchange *x)
{
    struct rig *g = arg;
    struct asked *a = MEM_NEW(struct asked);
    *a = (struct asked){ .rig = g, .x = x };
    http_on_end(x, front_on_end, a);
    struct serve_passer s = passer_when_full(g->passer);
    struct serve_pass r = {
        .x = x, .path = "/v1/completions", .name = "a-name", .done = front_on_done, .arg = a
    };
    a->pass = g->as_serve ? s.start(s.self, &r) : passer_start(g->passer, g->reason, &r);
    if (!a->pass) answer_here(a);
}

static void start_server(struct rig *g, void (*fn)(void *arg, struct http_exchange *x), void *arg,
                         struct http_server **out)
{
    struct http_server_options o = { .loop = g->loop, .host = "127.0.0.1" };
    o.handler = fn;
    o.arg = arg;
    CHECK_OK(http_server_start(&o, out, NULL));
}

static enum status front_snapshot(struct directory *d, directory_snapshot_fn *cb, void *arg)
{
    struct rig *g = LIST_ENTRY(d, struct rig, front_directory);
    g->n_unanswered += g->away;
    return g->away ? ERR_UNAVAILABLE : directory_snapshot(g->directory, cb, arg);
}

static const struct directory_ops FRONT_OPS = { .name = "front", .snapshot = front_snapshot };

static void rig_make(void *arg)
{
    struct rig *g = arg;
    struct directory_options d = { .loop = g->loop, .topic = "t", .lease_ms = 60000 };
    g->metrics = metrics_create();
    CHECK_OK(directory_open("local", &d, &g->directory, NULL));
    struct passer_options p = {
        .loop = g->loop,
        .directory = &g->front_directory,
        .metrics = g->metrics,
        .name = "me:1",
        .ttl_s = 20,
        .silent_ms = 100,
        .live_ms = 200,
        .snapshot_ms = 60000,
        .wait_ms = g->wait_ms,
        .wait_first_ms = g->wait_ms,
    };
    if (g->snapshot_ms) p.snapshot_ms = g->snapshot_ms;
    g->front_directory.ops = &FRONT_OPS;
    g->passer = passer_create(&p);
    start_server(g, front_handle, g, &g->front);
    g->port = http_server_port(g->front);
    for (size_t i = 0; i < g->n_others; i++) {
        struct other *o = &g->others[i];
        struct node_record *r = &o->record;
        o->rig = g;
        start_server(g, other_handle, o, &o->server);
        r->node = 100 + i;
        if (!r->name[0]) snprintf(r->name, sizeof r->name, "node%zu", i);
        snprintf(r->topic, sizeof r->topic, "t");
        snprintf(r->host, sizeof r->host, "127.0.0.1");
        if (!r->model) r->model = MODEL;
        if (!r->http_port) r->http_port = http_server_port(o->server);
        else r->http_port = 0; /* for a node without HTTP */
        directory_publish(g->directory, r);
    }
}

static void rig_unmake(void *arg)
{
    struct rig *g = arg;
    http_server_stop(g->front, 0, NULL, NULL);
    for (size_t i = 0; i < g->n_others; i++) http_server_stop(g->others[i].server, 0, NULL, NULL);
}

static void rig_free_rest(void *arg)
{
    struct rig *g = arg;
    directory_close(g->directory);
    passer_free(g->passer);
}

static void rig_open(struct rig *g)
{
    while (g->others[g->n_others].status || g->others[g->n_others].frozen) g->n_others++;
    g->thread = fixture_start(&g->loop);
    fixture_on_loop(g->loop, rig_make, g);
}

static void rig_close(struct rig *g)
{
    fixture_on_loop(g->loop, rig_unmake, g);
    usleep(50000);
    fixture_on_loop(g->loop, rig_free_rest, g);
    fixture_stop(g->loop, g->thread);
    metrics_free(g->metrics);
}

static uint64_t count(struct rig *g, const char *labels)
{
    return counter_value(metrics_counter(g->metrics, "baton_requests_passed_total", labels, ""));
}

static int begin_with(struct rig *g, const char *method, const char *headers, struct str body)
{
    struct buf b = { 0 };
    int fd = fixture_dial(g->port);
    buf_printf(&b, "%s /v1/completions HTTP/1.1\r\nHost: h\r\nConnection: close\r\n%s", method,
               headers);
    buf_printf(&b, "Content-Length: %zu\r\n\r\n", body.n);
    buf_add_str(&b, body);
    CHECK(fixture_send(fd, b.data, b.len));
    buf_release(&b);
    return fd;
}

static int begin(struct rig *g, const char *method, const char *headers)
{
    return begin_with(g, method, headers, STR("{}"));
}

/* Checks that the answer's body is `want`. */
static void check_end(int fd, const char *want)
{
    struct buf b = { 0 };
    CHECK(fixture_read(fd, &b, SIZE_MAX, 10000));
    const char *body = strstr(b.data, "\r\n\r\n");
    CHECK(body != NULL);
    CHECK_EQ_STR(body + 4, want);
    close(fd);
    buf_release(&b);
}

/* Asks the front once. */
static void check_answer(struct rig *g, const char *method, const char *headers, const char *want)
{
    check_end(begin(g, method, headers), want);
}

static void check_body(struct rig *g, const char *body, const char *want)
{
    check_end(begin_with(g, "POST", "", str_of(body)), want);
}

static void check_post(struct rig *g, const char *want) { check_answer(g, "POST", "", want); }

static void set_model(void *arg) { passer_set_model(((struct rig *)arg)->passer, MODEL); }

/* From now on the front asks as serve does. */
static void set_draining(void *arg)
{
    struct rig *g = arg;
    g->as_serve = true;
    passer_set_model(g->passer, MODEL);
    passer_set_draining(g->passer);
}

static void set_serving(void *arg) { ((struct rig *)arg)->others[0].status = 200; }

/* They answer /live only. */
static void set_computing(void *arg)
{
    struct rig *g = arg;
    for (size_t i = 0; i < g->n_others; i++) g->others[i].status = 0;
}

static void set_away(void *arg) { ((struct rig *)arg)->away = true; }
static void leave(void *arg) { directory_leave(((struct rig *)arg)->directory, 100); }

static void come_back(void *arg)
{
    struct rig *g = arg;
    directory_publish(g->directory, &g->others[0].record);
}

static void set_back(void *arg) { ((struct rig *)arg)->away = false; }

static int n_asked(const struct rig *g)
{
    int n = 0;
    for (size_t i = 0; i < g->n_others; i++) n += atomic_load(&g->others[i].n_asked);
    return n;
}

TEST(passer_takes_the_least_loaded_node)
{
    struct rig g = { .others = {
                         { .status = 200, .record = { .n_requests = 5 } },
                         { .status = 200, .record = { .n_requests = 1 } },
                         { .status = 200, .record = { .n_requests = 3, .max_requests = 4 } },
                     } };
    int fds[7];
    rig_open(&g);
    check_post(&g, "node1");
    check_post(&g, "node1"); /* what has been answered does not count */
    fixture_on_loop(g.loop, set_computing, &g);
    for (int i = 0; i < 7; i++) { /* what is passed, and not answered yet, does */
        fds[i] = begin(&g, "POST", "");
        for (int ms = 0; ms < 5000 && n_asked(&g) < 3 + i; ms++) usleep(1000);
    }
    CHECK_EQ_INT(atomic_load(&g.others[0].n_asked), 1);
    CHECK_EQ_INT(atomic_load(&g.others[1].n_asked), 2 + 5);
    CHECK_EQ_INT(atomic_load(&g.others[2].n_asked), 1); /* then it is full */
    for (int i = 0; i < 7; i++) close(fds[i]);
    for (int ms = 0; ms < 5000 && count(&g, "reason=\"loading\",outcome=\"gone\"") < 7; ms++)
        usleep(1000);
    rig_close(&g);
}

/* Snapshots end with the directory. */
TEST(passer_forgets_what_was_full_while_the_directory_is_away)
{
    struct rig g = { .reason = PASS_WHEN_FULL,
                     .snapshot_ms = 10,
                     .others = { { .status = 429, .record = { .max_requests = 2 } } } };
    rig_open(&g);
    fixture_on_loop(g.loop, set_model, &g);
    check_post(&g, "own");
    fixture_on_loop(g.loop, set_away, &g);
    fixture_on_loop(g.loop, set_serving, &g);
    usleep(20000);         /* a snapshot is due */
    check_post(&g, "own"); /* it said that it is full just now */
    CHECK_EQ_INT(atomic_load(&g.others[0].n_asked), 1);
    usleep(1100000);
    for (int i = 0; i < 5; i++) check_post(&g, "node0"); /* two at once, not two for ever */
    CHECK(g.n_unanswered > 0);
    rig_close(&g);
}

TEST(passer_asks_only_nodes_that_take_requests)
{
    static const struct node_record bad[] = {
        { .draining = true },
        { .n_requests = 8, .max_requests = 8 },
        { .http_port = 1 /* becomes 0 */ },
        { .name = "me:1" }, /* what this node was before its restart */
        { .role = ROLE_PREFILL },
    };
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        struct rig g = { .others = { { .status = 200, .record = bad[i] } } };
        rig_open(&g);
        for (int k = 0; k < 2; k++) check_post(&g, "own"); /* without and with a snapshot */
        CHECK_EQ_INT(atomic_load(&g.others[0].n_asked), 0);
        rig_close(&g);
    }
    struct rig pair = { .others = { { .status = 200, .record = { .role = ROLE_PREFILL } },
                                    { .status = 200,
                                      .record = { .role = ROLE_DECODE, .n_requests = 1 } } } };
    rig_open(&pair);
    check_post(&pair, "node0");
    rig_close(&pair);
}

TEST(passer_never_mixes_models)
{
    struct rig g = { .others = { { .status = 200, .record = { .model = 8 } },
                                 { .status = 200, .record = { .n_requests = 9 } } } };
    rig_open(&g);
    check_post(&g, "own"); /* its own is not known, and the others differ */
    fixture_on_loop(g.loop, set_model, &g);
    check_post(&g, "node1");
    rig_close(&g);
    struct rig other = { .others = { { .status = 200, .record = { .model = 8 } } } };
    rig_open(&other);
    fixture_on_loop(other.loop, set_model, &other);
    check_post(&other, "own");
    rig_close(&other);
}

TEST(passer_takes_a_node_that_serves_the_model_named)
{
    static const char *const a[] = { "small", "s", "both" }, *const b[] = { "large", "both" },
                             *const c[] = { "p" };
    struct rig g = { .others = {
                         { .status = 200, .record = { .model = 8 } },
                         { .status = 200, .record = { .n_requests = 9 } },
                         { .status = 200, .record = { .role = ROLE_PREFILL, .model = 9 } },
                     } };
    node_record_set_served(&g.others[0].record, a, COUNT_OF(a));
    node_record_set_served(&g.others[1].record, b, COUNT_OF(b));
    node_record_set_served(&g.others[2].record, c, COUNT_OF(c));
    rig_open(&g);
    check_body(&g, "{\"model\":\"large\",\"prompt\":[1,2]}", "node1"); /* without a snapshot */
    check_body(&g, "{\"prompt\":\"x\",\"model\":\"large\"}", "node1"); /* with one */
    check_body(&g, "{\"model\":\"s\"}", "node0");
    static const char *const own[] = { "{}", "{\"model\":\"other\"}", "{\"model\":7}",
                                       "{\"model\":", "{\"model\":\"\"}", "[]",
                                       /* no node decodes for it */
                                       "{\"model\":\"p\"}",
                                       /* two models have the name */
                                       "{\"model\":\"both\"}" };
    for (size_t i = 0; i < COUNT_OF(own); i++) check_body(&g, own[i], "own");
    struct buf body = { 0 };
    buf_printf(&body, "{\"model\":\"large\",\"prompt\":\"%60000s\"}", "");
    check_body(&g, body.data, "node1");
    buf_clear(&body);
    buf_printf(&body, "{\"model\":\"large\",\"prompt\":\"%70000s\"}", "");
    check_body(&g, body.data, "own"); /* too long to look into on the loop */
    buf_release(&body);
    fixture_on_loop(g.loop, set_model, &g); /* loaded: its own model counts, whatever the name */
    check_body(&g, "{\"model\":\"s\"}", "node1");
    rig_close(&g);
}

static struct view view;

/* The view has the second node alone. */
static void use_view(void *arg)
{
    struct rig *g = arg;
    view = (struct view){ .nodes = &g->others[1].record, .n_nodes = 1, .n_snapshots = 1 };
    passer_use_view(g->passer, &view);
}

static void view_loses_it(void *arg)
{
    (void)arg;
    view.n_nodes = 0;
    view.n_snapshots++;
}

/* The view's records have been checked; the directory's would have to be. */
TEST(passer_takes_the_nodes_of_the_view_once_there_is_one)
{
    struct rig g = { .others = { { .status = 200 }, { .status = 200 } }, .snapshot_ms = 10 };
    rig_open(&g);
    check_post(&g, "node0");
    fixture_on_loop(g.loop, set_away, &g);
    fixture_on_loop(g.loop, use_view, &g);
    for (int i = 0; i < 3; i++, usleep(15000)) check_post(&g, "node1");
    fixture_on_loop(g.loop, view_loses_it, &g);
    check_post(&g, "own");
    CHECK_EQ_INT(g.n_unanswered, 0); /* the directory was not asked any more */
    rig_close(&g);
}

TEST(passer_counts_what_it_passes_while_draining)
{
    struct rig g = { .others = { { .status = 200 } } };
    rig_open(&g);
    fixture_on_loop(g.loop, set_draining, &g);
    check_post(&g, "node0");
    CHECK_EQ_INT(count(&g, "reason=\"draining\",outcome=\"answered\""), 1);
    rig_close(&g);
}

TEST(passer_passes_nothing_twice_and_only_posts)
{
    struct rig g = { .others = { { .status = 200 } } };
    rig_open(&g);
    check_answer(&g, "POST", "x-baton-passed: somebody:1\r\n", "own");
    check_answer(&g, "POST", "X-Baton-Passed:\r\n", "own");
    check_answer(&g, "PUT", "", "own");
    CHECK_EQ_INT(atomic_load(&g.others[0].n_asked), 0);
    check_post(&g, "node0");
    rig_close(&g);
}

TEST(passer_tries_one_more_node_and_remembers_who_was_full)
{
    struct rig g = { .reason = PASS_WHEN_FULL,
                     .others = { { .status = 429 },
                                 { .status = 503, .record = { .n_requests = 1 } },
                                 { .status = 200, .record = { .n_requests = 2 } } } };
    rig_open(&g);
    fixture_on_loop(g.loop, set_model, &g);
    check_post(&g, "own"); /* two have refused */
    CHECK_EQ_INT(count(&g, "reason=\"full\",outcome=\"refused\""), 1);
    check_post(&g, "node2"); /* the third is the first choice now */
    CHECK_EQ_INT(count(&g, "reason=\"full\",outcome=\"answered\""), 1);
    CHECK_EQ_INT(atomic_load(&g.others[0].n_asked), 1);
    CHECK_EQ_INT(atomic_load(&g.others[1].n_asked), 1);
    rig_close(&g);
}

/* So that a tenant over its limits does not close the node to the others. */
TEST(passer_asks_again_a_node_that_refused_one_request_only)
{
    struct rig g = { .reason = PASS_WHEN_FULL,
                     .others = { { .status = 429, .headers = "x-baton-has-room: 1\r\n" } } };
    rig_open(&g);
    fixture_on_loop(g.loop, set_model, &g);
    check_post(&g, "own");
    fixture_on_loop(g.loop, set_serving, &g);
    check_post(&g, "node0");
    rig_close(&g);
}

/* A wrong model name is one client's; a key that this node took is nobody's fault there. */
TEST(passer_passes_back_that_no_node_knows_the_model_but_no_word_of_a_key)
{
    static const struct {
        int status;
        const char *two, *one; /* who answers when two nodes say so, and when the only one does */
    } cases[] = { { 404, "node1", "node0" }, { 401, "own", "own" } };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const int status = cases[i].status;
        struct rig g = { .others = { { .status = status },
                                     { .status = status, .record = { .n_requests = 1 } } } };
        rig_open(&g);
        check_post(&g, cases[i].two); /* both were asked */
        CHECK_EQ_INT(atomic_load(&g.others[0].n_asked), 1);
        CHECK_EQ_INT(atomic_load(&g.others[1].n_asked), 1);
        CHECK_EQ_INT(count(&g, "reason=\"loading\",outcome=\"answered\""), status == 404);
        CHECK_EQ_INT(count(&g, "reason=\"loading\",outcome=\"refused\""), status == 401);
        fixture_on_loop(g.loop, set_serving, &g);
        check_post(&g, "node0"); /* the next client's request is served there */
        rig_close(&g);
        struct rig one = { .others = { { .status = status } } };
        rig_open(&one);
        check_post(&one, cases[i].one);
        rig_close(&one);
        /* One that is full says nothing of the model: this node answers. */
        struct rig full = { .others = { { .status = status },
                                        { .status = 429, .record = { .n_requests = 1 } } } };
        rig_open(&full);
        check_post(&full, "own");
        rig_close(&full);
    }
}

TEST(passer_passes_other_answers_back_as_they_are)
{
    struct rig g = { .others = { { .status = 400 }, { .status = 200 } } };
    rig_open(&g);
    check_post(&g, "node0");
    rig_close(&g);
}

TEST(passer_notices_a_frozen_node_and_waits_for_a_busy_one)
{
    struct rig g = { .others = { { .frozen = true },
                                 { .status = 200, .record = { .n_requests = 1 } } } };
    uint64_t t = clock_ms();
    rig_open(&g);
    check_post(&g, "node1");
    CHECK(clock_ms() - t < 20000); /* 0.1 s silent, 0.25 s to the next look, 0.2 s to answer */
    CHECK_EQ_INT(atomic_load(&g.others[0].n_asked), 1);
    check_post(&g, "node1"); /* it is suspected now */
    CHECK_EQ_INT(atomic_load(&g.others[0].n_asked), 1);
    rig_close(&g);

    struct rig busy = { .others = { { .status = 1 } } };
    rig_open(&busy);
    fixture_on_loop(busy.loop, set_computing, &busy);
    struct buf b = { 0 };
    int fd = begin(&busy, "POST", "");
    CHECK(!fixture_read(fd, &b, 1, 1500)); /* still waits */
    CHECK_EQ_INT(atomic_load(&busy.others[0].n_asked), 1);
    close(fd);
    for (int i = 0; i < 5000 && !count(&busy, "reason=\"loading\",outcome=\"gone\""); i++)
        usleep(1000);
    CHECK_EQ_INT(count(&busy, "reason=\"loading\",outcome=\"gone\""), 1);
    buf_release(&b);
    rig_close(&busy);
}

TEST(passer_waits_for_the_first_node)
{
    struct rig g = { .wait_ms = 5000, .snapshot_ms = 10, .others = { { .status = 200 } } };
    struct buf b = { 0 };
    rig_open(&g);
    fixture_on_loop(g.loop, set_away, &g);
    int fd = begin(&g, "POST", ""); /* the directory has not answered yet */
    CHECK(!fixture_read(fd, &b, 1, 700));
    CHECK(g.n_unanswered > 1);
    fixture_on_loop(g.loop, set_back, &g);
    check_end(fd, "node0");
    fixture_on_loop(g.loop, leave, &g);
    usleep(20000);
    fd = begin(&g, "POST", ""); /* it was emptied */
    CHECK(!fixture_read(fd, &b, 1, 700));
    fixture_on_loop(g.loop, come_back, &g);
    check_end(fd, "node0");
    rig_close(&g);

    struct rig alone = { .wait_ms = 300 };
    rig_open(&alone);
    check_post(&alone, "own"); /* after 0.3 s */
    rig_close(&alone);
    buf_release(&b);
}

TEST_MAIN(CASE(passer_waits_for_the_first_node), CASE(passer_takes_the_least_loaded_node),
          CASE(passer_forgets_what_was_full_while_the_directory_is_away),
          CASE(passer_asks_only_nodes_that_take_requests), CASE(passer_never_mixes_models),
          CASE(passer_takes_a_node_that_serves_the_model_named),
          CASE(passer_takes_the_nodes_of_the_view_once_there_is_one),
          CASE(passer_counts_what_it_passes_while_draining),
          CASE(passer_passes_nothing_twice_and_only_posts),
          CASE(passer_tries_one_more_node_and_remembers_who_was_full),
          CASE(passer_asks_again_a_node_that_refused_one_request_only),
          CASE(passer_passes_back_that_no_node_knows_the_model_but_no_word_of_a_key),
          CASE(passer_passes_other_answers_back_as_they_are),
          CASE(passer_notices_a_frozen_node_and_waits_for_a_busy_one))
