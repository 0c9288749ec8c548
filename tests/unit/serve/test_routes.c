/* test_routes.c - the API server over real sockets: paths, keys, methods, types, probes, streams,
 * clients that leave. */
#include "shared/base/clock.h"
#include "tests/unit/serve/serve_rig.h"

#define MESSAGES "\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]"

static void expect(struct rig *r, const char *method, const char *path, const char *headers,
                   const char *body, int status)
{
    struct answer a = rig_request(r, method, path, headers, body);
    if (a.status != status)
        test_fail(__FILE__, __LINE__, "%s %s: %d, not %d: %s", method, path, a.status, status,
                  a.body.data);
    CHECK(answer_has_header(&a, "x-request-id: "));
    answer_free(&a);
}

TEST(chat_over_http)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    struct answer a = rig_request(&r, "POST", "/v1/chat/completions",
                                  "X-Request-Id: abc.1\r\nX-Baton-Trace: 1\r\n", "{" MESSAGES "}");
    CHECK_EQ_INT(a.status, 200);
    CHECK_EQ_STR(string_at(a.json, "choices.0.message.content"), "Hello there, world");
    CHECK_EQ_STR(string_at(a.json, "id"), "chatcmpl-abc.1");
    CHECK_EQ_STR(string_at(a.json, "baton.prefill_node"), "p0");
    CHECK(answer_has_header(&a, "x-request-id: abc.1\r\n") &&
          answer_has_header(&a, "content-type: application/json"));
    answer_free(&a);
    a = rig_request(&r, "POST", "/v1/chat/completions", "X-Request-Id: no good\r\n",
                    "{" MESSAGES ",\"request_id\":\"from-body\"}");
    CHECK(answer_has_header(&a, "x-request-id: from-body\r\n"));
    answer_free(&a);
    a = rig_request(&r, "POST", "/v1/chat/completions", NULL, "{" MESSAGES ",\"stream\":true}");
    CHECK_EQ_INT(a.status, 200);
    CHECK(answer_has_header(&a, "content-type: text/event-stream") &&
          answer_has_header(&a, "cache-control: no-cache"));
    CHECK(answer_has_header(&a, "x-request-id: ") && str_ends(buf_str(&a.body), "\n[DONE]\n"));
    answer_free(&a);
    a = rig_request(&r, "POST", "/v1/chat/completions", NULL, "{" MESSAGES ",\"top_p\":7}");
    CHECK_EQ_INT(a.status, 400);
    CHECK_EQ_STR(string_at(a.json, "error.param"), "top_p");
    answer_free(&a);
    rig_close(&r);
}

TEST(paths_and_aliases)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    expect(&r, "POST", "/v1/chat/completions/completions", NULL, "{\"prompt\":\"x\"}", 200);
    expect(&r, "POST", "/v1/chat/completions/chat/completions", NULL, "{" MESSAGES "}", 200);
    expect(&r, "POST", "/v1/completions/", NULL, "{\"prompt\":\"x\"}", 200);
    expect(&r, "GET", "/nothing", NULL, NULL, 404);
    expect(&r, "POST", "/", NULL, "{}", 405);
    expect(&r, "GET", "/v1/completions", NULL, NULL, 405);
    expect(&r, "DELETE", "/v1/models", NULL, NULL, 405);
    expect(&r, "POST", "/v1/models", NULL, "{}", 405);
    struct answer a = rig_request(&r, "PUT", "/ping", NULL, NULL);
    CHECK(answer_has_header(&a, "allow: GET, HEAD, POST\r\n"));
    answer_free(&a);
    static const char *const fine[] = {
        "/health",         "/ready",           "/readyz", "/ping",    "/live", "/livez",
        "/v2/health/live", "/v2/health/ready", "/load",   "/version", "/"
    };
    for (size_t i = 0; i < COUNT_OF(fine); i++) expect(&r, "GET", fine[i], NULL, NULL, 200);
    r.fake.not_ready = true;
    a = rig_request(&r, "GET", "/health", NULL, NULL);
    CHECK_EQ_INT(a.status, 503);
    CHECK_EQ_STR(string_at(a.json, "error.message"), "no decode node in topic 'default'");
    CHECK(answer_has_header(&a, "retry-after: 1"));
    answer_free(&a);
    expect(&r, "GET", "/live", NULL, NULL, 200);
    /* One slash at the end is forgiven; a path of slashes costs no more than another. */
    expect(&r, "GET", "/live/", NULL, NULL, 200);
    expect(&r, "GET", "/live//", NULL, NULL, 404);
    char slashes[4001];
    memset(slashes, '/', sizeof slashes - 1);
    slashes[sizeof slashes - 1] = 0;
    expect(&r, "GET", slashes, NULL, NULL, 404);
    rig_close(&r);
}

/* Errors of a path say what would be right. */
TEST(wrong_paths_and_methods)
{
    static const struct {
        const char *method, *path;
        int status;
        const char *text;
    } rows[] = {
        { "POST", "/chat/completions", 404,
          "there is no /chat/completions here; the API is under /v1: is /v1 missing from "
          "base_url?" },
        { "GET", "/models", 404,
          "there is no /models here; the API is under /v1: is /v1 missing from base_url?" },
        { "POST", "/v1/v1/completions", 404,
          "there is no /v1/v1/completions here; did you mean /v1/completions?" },
        { "GET", "/v1/health", 404, "there is no /v1/health here; did you mean /health?" },
        { "POST", "/generate", 404,
          "there is no /generate here; POST /v1/chat/completions and /v1/completions generate, "
          "GET / lists the other paths" },
        { "GET", "/v1/chat/completions", 405, "/v1/chat/completions takes POST, not GET" },
        { "POST", "/v1/models", 405, "/v1/models takes GET, HEAD, not POST" },
        { "GET", "/v1/models/foo", 404,
          "The model `foo` does not exist; this node serves `tiny`, `org/tiny`" },
    };
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        bool post = strcmp(rows[i].method, "POST") == 0;
        struct answer a = rig_request(&r, rows[i].method, rows[i].path, NULL, post ? "{}" : NULL);
        CHECK_EQ_INT(a.status, rows[i].status);
        CHECK_EQ_STR(string_at(a.json, "error.message"), rows[i].text);
        answer_free(&a);
    }
    struct answer a = rig_submit(&r, "/chat/completions", "{}");
    CHECK_EQ_INT(a.status, 404);
    CHECK(strstr(a.body.data, "there is no API path /chat/completions; /v1/chat/completions and"));
    answer_free(&a);
    int fd = rig_connect(r.admin);
    rig_send(fd, "GET", "/v1/models", NULL, NULL);
    a = rig_recv(&r, fd);
    CHECK_EQ_INT(a.status, 404);
    CHECK_EQ_STR(string_at(a.json, "error.message"),
                 "there is no /v1/models at the metrics port; the API has the port of --port");
    answer_free(&a);
    rig_close(&r);
}

TEST(side_documents)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    struct answer a = rig_request(&r, "GET", "/v1/models", NULL, NULL);
    CHECK_EQ_STR(string_at(a.json, "object"), "list");
    CHECK_EQ_STR(string_at(a.json, "data.0.id"), "tiny");
    CHECK_EQ_INT(number_at(a.json, "data.1.max_model_len"), 256);
    answer_free(&a);
    a = rig_request(&r, "GET", "/v1/models/org%2Ftiny", NULL, NULL);
    CHECK_EQ_STR(string_at(a.json, "id"), "org/tiny");
    answer_free(&a);
    a = rig_request(&r, "GET", "/v1/models/other", NULL, NULL);
    CHECK_EQ_INT(a.status, 404);
    CHECK_EQ_STR(string_at(a.json, "error.code"), "model_not_found");
    answer_free(&a);
    a = rig_request(&r, "GET", "/version", NULL, NULL);
    CHECK_EQ_STR(string_at(a.json, "version"), "9.9");
    CHECK_EQ_STR(string_at(a.json, "role"), "mixed");
    answer_free(&a);
    a = rig_request(&r, "GET", "/cluster", NULL, NULL);
    CHECK_EQ_STR(string_at(a.json, "nodes.0.name"), "p0");
    CHECK_EQ_STR(string_at(a.json, "role"), "mixed");
    answer_free(&a);
    a = rig_request(&r, "GET", "/cluster/self", NULL, NULL);
    CHECK_EQ_STR(string_at(a.json, "role"), "mixed");
    CHECK(strstr(a.body.data, "nodes") == NULL);
    answer_free(&a);
    a = rig_request(&r, "GET", "/metrics", NULL, NULL);
    CHECK(strstr(a.body.data, "baton_http_responses_total{path=\"/v1/models\",code=\"2xx\"} 2"));
    CHECK(answer_has_header(&a, "text/plain; version=0.0.4"));
    answer_free(&a);
    int fd = rig_connect(r.admin);
    rig_send(fd, "GET", "/metrics", NULL, NULL);
    a = rig_recv(&r, fd);
    CHECK_EQ_INT(a.status, 200);
    answer_free(&a);
    fd = rig_connect(r.admin);
    rig_send(fd, "POST", "/v1/completions", NULL, "{\"prompt\":\"x\"}");
    a = rig_recv(&r, fd);
    CHECK_EQ_INT(a.status, 404);
    answer_free(&a);
    rig_close(&r);
}

TEST(keys)
{
    struct rig r;
    rig_open(&r);
    struct tenants keys;
    tenants_init(&keys);
    CHECK_OK(tenants_add_key(&keys, "sk-one", NULL));
    CHECK_OK(tenants_add_key(&keys, "sk-two", NULL));
    r.o.tenants = &keys;
    rig_start(&r);
    struct answer a = rig_request(&r, "GET", "/v1/models", NULL, NULL);
    CHECK_EQ_INT(a.status, 401);
    CHECK_EQ_STR(string_at(a.json, "error.code"), "invalid_api_key");
    CHECK(answer_has_header(&a, "www-authenticate: Bearer\r\n"));
    answer_free(&a);
    static const char *const closed[] = { "/v1/models",      "/metrics",      "/load",
                                          "/cluster",        "/cluster/self", "/nothing",
                                          "/v1/completions", "/tokenize" };
    for (size_t i = 0; i < COUNT_OF(closed); i++) expect(&r, "GET", closed[i], NULL, NULL, 401);
    static const char *const open_to_all[] = { "/health",          "/live",   "/ready",
                                               "/livez",           "/readyz", "/v2/health/live",
                                               "/v2/health/ready", "/ping",   "/version" };
    for (size_t i = 0; i < COUNT_OF(open_to_all); i++)
        expect(&r, "GET", open_to_all[i], NULL, NULL, 200);
    expect(&r, "GET", "/v1/models", "Authorization: Bearer sk-one\r\n", NULL, 200);
    expect(&r, "GET", "/v1/models", "Authorization: bEARER sk-two\r\n", NULL, 200);
    expect(&r, "GET", "/v1/models", "Authorization: Bearer sk-on\r\n", NULL, 401);
    expect(&r, "GET", "/v1/models", "Authorization: Bearer sk-one2\r\n", NULL, 401);
    expect(&r, "GET", "/v1/models", "Authorization: Bearer\r\n", NULL, 401);
    expect(&r, "GET", "/v1/models", "Authorization: Basic sk-one\r\n", NULL, 401);
    expect(&r, "GET", "/v1/models", "Authorization: sk-one\r\n", NULL, 401);
    rig_close(&r);
    tenants_release(&keys);
}

TEST(content_types)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    int fd = rig_connect(r.http);
    rig_send(fd, "POST", "/v1/completions",
             "Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 2\r\n", NULL);
    CHECK_EQ_INT(send(fd, "{}", 2, 0), 2);
    struct answer a = rig_recv(&r, fd);
    CHECK_EQ_INT(a.status, 415);
    answer_free(&a);
    expect(&r, "POST", "/v1/completions", "Content-Encoding: gzip\r\n", "{\"prompt\":\"x\"}", 415);
    rig_close(&r);
}

TEST(client_that_leaves_cancels_its_work)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    for (int streamed = 0; streamed < 2; streamed++) {
        uint32_t before = r.fake.n_canceled;
        int fd = rig_connect(r.http);
        rig_send(fd, "POST", "/v1/completions", NULL,
                 streamed ? "{\"prompt\":[\"a\",\"b\"],\"stream\":true,\"ignore_eos\":true,\"max_"
                            "tokens\":200}"
                          : "{\"prompt\":[\"a\",\"b\"],\"ignore_eos\":true,\"max_tokens\":200}");
        for (int i = 0; i < 20000 && r.fake.n_live < 2; i++) rig_turn(&r);
        CHECK_EQ_INT(r.fake.n_live, 2);
        r.fake.hold = !streamed;
        for (int i = 0; i < 20; i++) rig_turn(&r);
        close(fd);
        for (int i = 0; i < 20000 && r.fake.n_live; i++) rig_turn(&r);
        CHECK_EQ_INT(r.fake.n_live, 0);
        CHECK_EQ_INT(r.fake.n_canceled, before + 2);
        CHECK_EQ_INT(r.serve->requests.len, 0);
        r.fake.hold = false;
    }
    struct answer a = rig_request(&r, "GET", "/metrics", NULL, NULL);
    CHECK(strstr(a.body.data, "baton_http_client_disconnects_total 2"));
    answer_free(&a);
    rig_close(&r);
}

/* A passer that answers in the next turn of the loop, or says that nobody took the request, or
 * never says anything. */
struct fake_passer {
    struct loop *loop;
    struct loop_timer *timer;
    struct http_exchange *x;
    void (*done)(void *arg, bool taken, int status);
    void *arg;
    enum { TAKES, TAKES_NOT, KNOWS_NOBODY, HANGS } does;
    int n_started, n_canceled;
    char path[64], name[160];
};

static void passer_on_timer(void *arg)
{
    struct fake_passer *p = arg;
    loop_timer_free(p->timer);
    p->timer = NULL;
    if (p->does == TAKES) http_reply(p->x, 200, "text/plain", "x-request-id: t\r\n", STR("there"));
    p->done(p->arg, p->does == TAKES, p->does == TAKES ? 200 : 0);
}

static void *passer_begin(void *self, const struct serve_pass *r)
{
    struct fake_passer *p = self;
    if (p->does == KNOWS_NOBODY) return NULL;
    p->n_started++;
    p->x = r->x;
    p->done = r->done;
    p->arg = r->arg;
    snprintf(p->path, sizeof p->path, "%s", r->path);
    snprintf(p->name, sizeof p->name, "%s", r->name);
    if (p->does != HANGS) p->timer = loop_timer_start(p->loop, 0, 0, passer_on_timer, p);
    return p;
}

static void passer_end(void *self, void *pass)
{
    struct fake_passer *p = self;
    CHECK(pass == p);
    p->n_canceled++;
}

TEST(a_full_node_passes_what_generates)
{
    static const char doubled[] = "/v1/chat/completions/chat/completions";
    struct rig r;
    rig_open(&r);
    struct fake_passer p = { .loop = r.loop, .does = TAKES };
    r.o.passer = (struct serve_passer){ passer_begin, passer_end, &p };
    rig_start(&r);
    expect(&r, "POST", "/v1/chat/completions", NULL, "{" MESSAGES "}", 200);
    CHECK_EQ_INT(p.n_started, 0); /* not full */
    r.fake.refuse = ERR_FULL;
    struct answer a = rig_request(&r, "POST", doubled, NULL, "{" MESSAGES "}");
    CHECK_EQ_STR(a.body.data, "there");
    CHECK_EQ_STR(p.path, "/v1/chat/completions");
    answer_free(&a);
    expect(&r, "POST", "/tokenize", NULL, "{\"prompt\":\"x\"}", 200);
    expect(&r, "GET", "/v1/models", NULL, NULL, 200);
    CHECK_EQ_INT(p.n_started, 1);
    p.does = TAKES_NOT; /* the request, body and all, is handled here */
    a = rig_request(&r, "POST", "/v1/completions", NULL, "{\"prompt\":\"x\"}");
    CHECK_EQ_INT(a.status, 429);
    CHECK_EQ_STR(string_at(a.json, "error.message"), "the fake refuses on purpose");
    CHECK_EQ_INT(p.n_started, 2);
    answer_free(&a);
    p.does = KNOWS_NOBODY;
    expect(&r, "POST", "/v1/completions", NULL, "{\"prompt\":\"x\"}", 429);
    p.does = HANGS;
    int fd = rig_connect(r.http);
    rig_send(fd, "POST", "/v1/completions", NULL, "{\"prompt\":\"x\"}");
    for (int i = 0; i < 20000 && p.n_started < 3; i++) rig_turn(&r);
    close(fd);
    for (int i = 0; i < 20000 && !p.n_canceled; i++) rig_turn(&r);
    CHECK_EQ_INT(p.n_canceled, 1);
    rig_close(&r);
}

/* Both nodes log a request under one name. */
TEST(a_passed_request_keeps_its_name)
{
    static const struct {
        const char *headers;
        bool is_hers; /* the name is "hers"; else a random one */
    } rows[] = {
        { NULL, false },
        { "x-request-id: hers\r\n", true },
        { "x-request-id: a\tto=evil status=200\r\n", false },
        { "x-baton-passed: n:1\r\nx-baton-passed-name: hers\r\n", true },
        { "x-baton-passed: n:1\r\nx-baton-passed-name: a b\r\n", false },
        { "x-request-id: hers\r\nx-baton-passed: n:1\r\nx-baton-passed-name: no\r\n", true },
        { "x-baton-passed-name: not-passed\r\n", false },
    };
    struct rig r;
    rig_open(&r);
    struct fake_passer p = { .loop = r.loop, .does = TAKES };
    r.o.passer = (struct serve_passer){ passer_begin, passer_end, &p };
    rig_start(&r);
    r.fake.refuse = ERR_FULL;
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        struct answer a = rig_request(&r, "POST", "/v1/completions", rows[i].headers,
                                      "{\"prompt\":\"x\"}");
        if (rows[i].is_hers) CHECK_EQ_STR(p.name, "hers");
        else CHECK_EQ_INT(strspn(p.name, "0123456789abcdef"), 24);
        CHECK_EQ_INT(strlen(p.name), rows[i].is_hers ? 4 : 24);
        answer_free(&a);
    }
    rig_close(&r);
}

/* Requests that are being prepared count: the backend will have them in a moment. */
TEST(a_burst_is_passed_before_its_requests_are_prepared)
{
    enum { BURST = 8, ROOM = 3 };
    struct rig r;
    int fd[BURST];
    rig_open(&r);
    struct fake_passer p = { .loop = r.loop, .does = HANGS };
    r.o.passer = (struct serve_passer){ passer_begin, passer_end, &p };
    r.fake.max_live = ROOM;
    r.fake.hold = true;
    rig_start(&r);
    for (int i = 0; i < BURST; i++) {
        fd[i] = rig_connect(r.http);
        rig_send(fd[i], "POST", "/v1/completions", NULL,
                 "{\"prompt\":\"x\",\"ignore_eos\":true,\"max_tokens\":200}");
    }
    for (int i = 0; i < 20000 && r.fake.n_live + (uint32_t)p.n_started < BURST; i++) rig_turn(&r);
    CHECK_EQ_INT(p.n_started, BURST - ROOM);
    CHECK_EQ_INT(r.fake.n_live, ROOM);
    CHECK_EQ_INT(r.serve->n_preparing, 0);
    for (int i = 0; i < BURST; i++) close(fd[i]);
    for (int i = 0; i < 20000 && (r.fake.n_live || p.n_canceled < BURST - ROOM); i++) rig_turn(&r);
    CHECK_EQ_INT(p.n_canceled, BURST - ROOM);
    rig_close(&r);
}

/* ---- large bodies ---- */

enum { LARGE_BODIES = TEST_IS_SANITIZED ? 24 : 64, LARGE_WAIT_MS = 60000 };

static void make_large_body(struct buf *out)
{
    buf_add_c(out, "{\"model\":\"tiny\",\"max_tokens\":2,\"prompt\":\"hello\",\"unknown\":[0");
    while (out->len < 300 << 10) buf_add_c(out, ",0");
    buf_add_c(out, "]}");
}

static int count_done(const struct answer *answers, int n)
{
    int n_done = 0;
    for (int i = 0; i < n; i++) n_done += answers[i].done;
    return n_done;
}

/* Large bodies are read at low priority; a small one that comes after them does not wait for all
 * of them. Every large one is answered too. */
TEST(a_small_request_does_not_wait_for_large_bodies)
{
    static struct answer large[LARGE_BODIES];
    struct rig r;
    struct buf body = { 0 };
    rig_open(&r);
    rig_start(&r);
    make_large_body(&body);
    for (int i = 0; i < LARGE_BODIES; i++) {
        CHECK(rig_begin(&r, "/v1/completions", buf_str(&body), NULL, &large[i]) != 0);
    }
    struct answer a = rig_submit(&r, "/v1/completions",
                                 "{\"model\":\"tiny\",\"max_tokens\":2,\"prompt\":\"hello\"}");
    CHECK_EQ_INT(a.status, 200);
    CHECK(count_done(large, LARGE_BODIES) < LARGE_BODIES / 2);
    for (uint64_t end = clock_ms() + LARGE_WAIT_MS;
         clock_ms() < end && count_done(large, LARGE_BODIES) < LARGE_BODIES;)
        rig_turn(&r);
    for (int i = 0; i < LARGE_BODIES; i++) {
        CHECK_EQ_INT(large[i].status, 200);
        answer_free(&large[i]);
    }
    CHECK_EQ_INT(r.serve->n_preparing + r.serve->n_preparing_low, 0);
    answer_free(&a);
    buf_release(&body);
    rig_close(&r);
}

/* Large bodies that wait to be read go at once when their clients leave, and are answered when the
 * node stops. */
TEST(large_bodies_that_wait_can_be_cancelled_and_refused)
{
    static struct answer large[LARGE_BODIES];
    uint64_t ids[LARGE_BODIES];
    struct rig r;
    struct buf body = { 0 };
    rig_open(&r);
    rig_start(&r);
    make_large_body(&body);
    for (int i = 0; i < LARGE_BODIES; i++) {
        ids[i] = rig_begin(&r, "/v1/completions", buf_str(&body), NULL, &large[i]);
    }
    for (int i = LARGE_BODIES / 2; i < LARGE_BODIES; i++) serve_cancel(r.serve, ids[i]);
    CHECK_EQ_INT(r.serve->n_preparing, LARGE_BODIES / 2);
    serve_shut_down(r.serve);
    CHECK_EQ_INT(r.serve->n_preparing, r.serve->n_preparing_low);
    for (int i = 0; i < LARGE_BODIES; i++) {
        CHECK_EQ_INT(large[i].status, i < LARGE_BODIES / 2 ? 503 : 0);
        answer_free(&large[i]);
    }
    for (int i = 0; i < 20000 && r.serve->n_preparing; i++) rig_turn(&r);
    CHECK_EQ_INT(r.serve->n_preparing + r.serve->n_preparing_low, 0);
    buf_release(&body);
    rig_close(&r);
}

static uint64_t resident_bytes(void)
{
    unsigned long long pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    CHECK(f && fscanf(f, "%*u %llu", &pages) == 1);
    fclose(f);
    return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* What remains of a prompt that the backend has is the backend's copy, 4 bytes for each token, and
 * the request: not the body, its tree or its token ids once more. */
TEST(a_long_prompt_that_runs_keeps_little)
{
    enum { WARM = 16, N = 64, TOKENS = 60000, REQUEST_BYTES = 96 << 10 };
    static struct answer answers[WARM + N];
    uint64_t ids[WARM + N], before = 0;
    struct rig r;
    struct buf body = { 0 };
    if (TEST_IS_SANITIZED) SKIP("sanitizers keep freed memory");
    rig_open(&r);
    r.o.max_model_len = TOKENS + 100;
    r.fake.hold = true;
    rig_start(&r);
    buf_add_c(&body, "{\"model\":\"tiny\",\"max_tokens\":2,\"prompt\":[5");
    for (int i = 1; i < TOKENS; i++) buf_add_c(&body, ",17");
    buf_add_c(&body, "]}");
    for (uint32_t i = 0; i < WARM + N; i++) { /* the first ones fill the allocator's caches */
        if (i == WARM) before = resident_bytes();
        ids[i] = rig_begin(&r, "/v1/completions", buf_str(&body), NULL, &answers[i]);
        for (int k = 0; k < 20000 && r.fake.n_live <= i; k++) rig_turn(&r);
        CHECK_EQ_INT(r.fake.n_live, i + 1);
    }
    uint64_t after = resident_bytes(), each = (after - before) / N;
    printf("each of %d prompts of %d tokens keeps %llu bytes\n", N, TOKENS,
           (unsigned long long)each);
    CHECK(after > before && each < 4 * TOKENS + REQUEST_BYTES);
    for (int i = 0; i < WARM + N; i++) serve_cancel(r.serve, ids[i]);
    buf_release(&body);
    rig_close(&r);
}

TEST_MAIN(CASE(chat_over_http), CASE(paths_and_aliases), CASE(wrong_paths_and_methods),
          CASE(side_documents), CASE(keys), CASE(content_types),
          CASE(client_that_leaves_cancels_its_work), CASE(a_full_node_passes_what_generates),
          CASE(a_passed_request_keeps_its_name),
          CASE(a_burst_is_passed_before_its_requests_are_prepared),
          CASE(a_small_request_does_not_wait_for_large_bodies),
          CASE(large_bodies_that_wait_can_be_cancelled_and_refused),
          CASE(a_long_prompt_that_runs_keeps_little))
