/* routes.c - see routes.h: the table of paths, and the dispatch of HTTP exchanges.
 *
 * Checked in this order: key (401), path (404), method (405), content type and encoding (415). When
 * keys are set every path needs one, except the OPEN ones: probes and the version. A path may have
 * one slash at its end. An api_exchange lives from serve_http to http_on_end. Thread: loop. */
#include "shared/serve/routes.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/base/thread.h"
#include "shared/net/sse.h"
#include "shared/serve/admission_headers.h"
#include "shared/serve/auth.h"
#include "shared/serve/completion_request.h"
#include "shared/serve/native/native.h"

enum { GET = 1, POST = 2, OPEN = 4 /* no key */, ADMIN = 8 /* on the operator's port too */ };
enum { CODE_CLASSES = 4 /* 2xx, 4xx, 5xx, gone */ };

struct api_exchange {
    struct serve *serve;
    struct http_exchange *x;
    const struct api_route *route; /* NULL: unknown path */
    uint64_t completion_id;        /* 0: none */
    bool has_lines;                /* its answer streams, in the native form */
    uint32_t tenant;
    void *pass; /* to another node; NULL: none */
    uint64_t t_start_ns;
    int status; /* of the answer; 0: none yet */
    char name[REQUEST_NAME_MAX + 1];
};

struct api_route {
    const char *path;
    unsigned flags;
    void (*handle)(struct api_exchange *e);
    const struct endpoint *endpoint; /* instead of handle */
    const char *label;               /* in metrics; NULL: path */
};

struct route_metrics {
    struct counter *codes[CODE_CLASSES];
    struct histogram *seconds;
};

/* ---- answers ---- */

static void answer(struct api_exchange *e, int status, const char *type, const char *headers,
                   struct str body)
{
    char all[REQUEST_NAME_MAX + 256];
    snprintf(all, sizeof all, "x-request-id: %s\r\n%s", e->name, headers ? headers : "");
    e->status = http_reply(e->x, status, type, all, body);
}

static void answer_json(struct api_exchange *e, const struct buf *body)
{
    answer(e, 200, "application/json", NULL, buf_str(body));
}

/* The form of an error before the body is read. */
static const struct endpoint *form_of(const struct api_exchange *e, struct str *req_id)
{
    const struct endpoint *own = e->route ? e->route->endpoint : NULL;
    const bool is_native = own && own->native && native_seems(http_body(e->x), req_id);
    if (req_id->n == 0) *req_id = str_of(e->name);
    return is_native ? own->native : &OPENAI_CHAT;
}

static void answer_error(struct api_exchange *e, int status, const char *code, const char *headers,
                         const char *message)
{
    struct api_error error = { .http = status, .code = code, .message = message };
    const struct endpoint *form = form_of(e, &error.req_id);
    struct buf body = { 0 };
    form->write_error(&error, &body);
    answer(e, status, "application/json", headers, buf_str(&body));
    buf_release(&body);
}

/* ---- the operator's paths ---- */

static void get_live(struct api_exchange *e) { answer(e, 200, "application/json", NULL, STR("")); }

static void get_ready(struct api_exchange *e)
{
    const struct serve_backend *b = &e->serve->o.backend;
    struct serve_backend_stats stats = { 0 };
    b->stats(b->self, &stats);
    if (stats.ready && !e->serve->closed) answer(e, 200, "application/json", NULL, STR(""));
    else
        answer_error(e, 503, "unavailable", "Retry-After: 1\r\n",
                     stats.why[0] ? stats.why : "the node is not ready");
}

/* Counts the requests that came to this node, as vLLM's /load does. The load of all nodes, which
 * placement compares, is in /cluster. */
static void get_load(struct api_exchange *e)
{
    const struct serve_backend *b = &e->serve->o.backend;
    struct serve_backend_stats stats = { 0 };
    struct buf body = { 0 };
    b->stats(b->self, &stats);
    buf_printf(&body, "{\"server_load\":%u,\"running\":%u,\"waiting\":%u}",
               stats.n_running + stats.n_waiting, stats.n_running, stats.n_waiting);
    answer_json(e, &body);
    buf_release(&body);
}

static void add_description(const struct serve *s, bool cluster, struct buf *out)
{
    size_t before = out->len;
    if (!s->o.describe) return;
    buf_add_char(out, ',');
    s->o.describe(s->o.describe_arg, cluster, out);
    if (out->len == before + 1) out->data[--out->len] = 0; /* no members: remove the comma */
}

static void get_version(struct api_exchange *e)
{
    struct buf body = { 0 };
    buf_add_c(&body, "{\"version\":");
    json_add_string(&body, str_of(e->serve->o.version));
    add_description(e->serve, false, &body);
    buf_add_char(&body, '}');
    answer_json(e, &body);
    buf_release(&body);
}

static void get_cluster(struct api_exchange *e)
{
    const struct serve_backend *b = &e->serve->o.backend;
    struct buf body = { 0 };
    buf_add_c(&body, "{\"nodes\":");
    b->nodes(b->self, &body);
    add_description(e->serve, true, &body);
    buf_add_char(&body, '}');
    answer_json(e, &body);
    buf_release(&body);
}

/* The same without the nodes: as short in a large topic as in a small one. */
static void get_cluster_self(struct api_exchange *e)
{
    const struct serve_options *o = &e->serve->o;
    struct buf body = { 0 };
    buf_add_char(&body, '{');
    if (o->describe) o->describe(o->describe_arg, true, &body);
    buf_add_char(&body, '}');
    answer_json(e, &body);
    buf_release(&body);
}

static void get_metrics(struct api_exchange *e)
{
    struct buf body = { 0 };
    metrics_write(e->serve->o.metrics, &body);
    answer(e, 200, "text/plain; version=0.0.4; charset=utf-8", NULL, buf_str(&body));
    buf_release(&body);
}

static void get_models(struct api_exchange *e)
{
    struct buf body = { 0 };
    openai_write_models(e->serve, &body);
    answer_json(e, &body);
    buf_release(&body);
}

/* The name is the rest of the path and may contain slashes. */
static void get_model(struct api_exchange *e)
{
    struct buf body = { 0 }, name = { 0 };
    buf_add_str(&name, str_sub(http_path(e->x), strlen(e->route->path), SIZE_MAX));
    if (openai_write_model(e->serve, name.data ? name.data : "", &body)) {
        answer_json(e, &body);
    } else {
        buf_printf(&body, "The model `%.200s` does not exist; this node serves",
                   name.data ? name.data : "");
        for (size_t i = 0; i < e->serve->o.n_names; i++)
            buf_printf(&body, "%s `%.200s`", i ? "," : "", e->serve->names[i]);
        answer_error(e, 404, "model_not_found", NULL, body.data);
    }
    buf_release(&body);
    buf_release(&name);
}

/* For a person who opens the port in a browser. */
static void get_home(struct api_exchange *e)
{
    static const char page[] =
        "<!DOCTYPE html><title>Baton</title><h1>Baton</h1><p>This is the API of a node that serves "
        "a language model.<ul>"
        "<li>POST /v1/chat/completions, /v1/completions: OpenAI's API"
        "<li><a href=/v1/models>/v1/models</a>: the model"
        "<li><a href=/ready>/ready</a>: whether requests are taken, else why not"
        "<li><a href=/cluster>/cluster</a>: the nodes and their load"
        "<li><a href=/metrics>/metrics</a>: for Prometheus"
        "<li><a href=/version>/version</a></ul>\n";
    answer(e, 200, "text/html; charset=utf-8", NULL, str_of(page));
}

/* ---- the table ---- */

/* A path that ends in a slash matches all paths below it. OpenAI's clients use the doubled ones
 * when their base URL was given as ".../v1/chat/completions". */
static const struct api_route ROUTES[] = {
    { "/v1/chat/completions", POST, .endpoint = &OPENAI_CHAT },
    { "/v1/completions", POST, .endpoint = &OPENAI_COMPLETIONS },
    { "/v1/chat/completions/chat/completions", POST, .endpoint = &OPENAI_CHAT,
      .label = "/v1/chat/completions" },
    { "/v1/chat/completions/completions", POST, .endpoint = &OPENAI_COMPLETIONS,
      .label = "/v1/completions" },
    { "/tokenize", POST, .endpoint = &OPENAI_TOKENIZE },
    { "/detokenize", POST, .endpoint = &OPENAI_DETOKENIZE },
    { "/v1/tokenize", POST, .endpoint = &OPENAI_TOKENIZE, .label = "/tokenize" },
    { "/v1/detokenize", POST, .endpoint = &OPENAI_DETOKENIZE, .label = "/detokenize" },
    { "/v1/models", GET, get_models, .endpoint = NULL },
    { "/v1/models/", GET, get_model, .label = "/v1/models" },
    { "/v1/chat/completions/models", GET, get_models, .label = "/v1/models" },
    { "/", GET | OPEN, get_home, .endpoint = NULL },
    { "/health", GET | OPEN | ADMIN, get_ready, .endpoint = NULL },
    { "/ready", GET | OPEN | ADMIN, get_ready, .label = "/health" },
    { "/readyz", GET | OPEN | ADMIN, get_ready, .label = "/health" },
    { "/ping", GET | POST | OPEN | ADMIN, get_ready, .label = "/health" },
    { "/v2/health/ready", GET | OPEN | ADMIN, get_ready, .label = "/health" },
    { "/live", GET | OPEN | ADMIN, get_live, .endpoint = NULL },
    { "/livez", GET | OPEN | ADMIN, get_live, .label = "/live" },
    { "/v2/health/live", GET | OPEN | ADMIN, get_live, .label = "/live" },
    { "/version", GET | OPEN | ADMIN, get_version, .endpoint = NULL },
    { "/metrics", GET | ADMIN, get_metrics, .endpoint = NULL },
    { "/load", GET, get_load, .endpoint = NULL },
    { "/cluster", GET, get_cluster, .endpoint = NULL },
    { "/cluster/self", GET, get_cluster_self, .endpoint = NULL },
};

enum { N_ROUTES = sizeof ROUTES / sizeof *ROUTES };

/* A path may have one slash at its end, no more: clients without a key choose its length. */
static const struct api_route *find_route(struct str path)
{
    if (path.n > 1 && path.p[path.n - 1] == '/') path.n--;
    for (size_t i = 0; i < N_ROUTES; i++)
        if (str_eq_c(path, ROUTES[i].path))
            return ROUTES[i].handle == get_model ? find_route(STR("/v1/models")) : &ROUTES[i];
    for (size_t i = 0; i < N_ROUTES; i++)
        if (ROUTES[i].path[1] && str_ends(str_of(ROUTES[i].path), "/") &&
            str_starts(path, ROUTES[i].path))
            return &ROUTES[i];
    return NULL;
}

const char *serve_generating_path(struct str path)
{
    const struct api_route *r = find_route(path);
    if (!r || !r->endpoint || !r->endpoint->answers) return NULL;
    return r->label ? r->label : r->path;
}

const struct endpoint *routes_endpoint(const char *path)
{
    if (strcmp(path, SERVE_NATIVE_PATH) == 0) return &NATIVE_ITEMS;
    const struct api_route *r = find_route(str_of(path));
    return r ? r->endpoint : NULL;
}

/* There is one more set of metrics than routes: the last is for unknown paths. */
void routes_register(struct serve *s)
{
    static const char *const classes[CODE_CLASSES] = { "2xx", "4xx", "5xx", "gone" };
    struct metrics *m = s->o.metrics;
    char labels[128];
    s->route_metrics = MEM_ARRAY(struct route_metrics, N_ROUTES + 1);
    for (size_t i = 0; i <= N_ROUTES; i++) {
        const char *path = i == N_ROUTES     ? "other"
                           : ROUTES[i].label ? ROUTES[i].label
                                             : ROUTES[i].path;
        for (size_t k = 0; k < CODE_CLASSES; k++) {
            snprintf(labels, sizeof labels, "path=\"%s\",code=\"%s\"", path, classes[k]);
            s->route_metrics[i].codes[k] = metrics_counter(
                m, "baton_http_responses_total", labels,
                "Answers by path and class of status; gone: the client left first.");
        }
        snprintf(labels, sizeof labels, "path=\"%s\"", path);
        s->route_metrics[i].seconds = metrics_histogram(m, "baton_http_response_seconds", labels,
                                                        "Request read to answer written.",
                                                        METRICS_SECONDS, METRICS_SECONDS_N);
    }
    s->m_in_flight = metrics_gauge(m, "baton_http_in_flight", "", "HTTP requests being answered.");
    s->m_gone = metrics_counter(m, "baton_http_client_disconnects_total", "",
                                "API requests whose client left before their end.");
}

/* ---- API calls ---- */

static void on_reply(void *arg, int status, const char *headers, struct str body)
{
    struct api_exchange *e = arg;
    e->status = http_reply(e->x, status, "application/json", headers, body);
}

static void on_begin(void *arg, const char *headers)
{
    struct api_exchange *e = arg;
    e->status = 200;
    e->has_lines = completion_has_lines(e->serve, e->completion_id);
    if (e->has_lines) json_lines_begin(e->x, headers);
    else sse_begin(e->x, headers);
}

static enum status on_chunk(void *arg, struct str id, struct str json)
{
    struct api_exchange *e = arg;
    return e->has_lines ? json_lines_write(e->x, json) : sse_event_with_id(e->x, id, json);
}

static void on_stream_end(void *arg)
{
    struct api_exchange *e = arg;
    http_stream_end(e->x);
}

static bool is_json(struct str type)
{
    struct str rest = type, media;
    if (!str_split(&rest, ';', &media)) return true; /* absent */
    media = str_trim(media);
    if (media.n == 0) return true;
    bool plain = media.n == 16 && strncasecmp(media.p, "application/json", 16) == 0;
    return plain || (media.n > 5 && strncasecmp(media.p + media.n - 5, "+json", 5) == 0);
}

/* Reads the headers that resume an answer, and those that say when it is wanted. */
static enum status read_headers(struct api_exchange *e, struct resume_headers *resume,
                                struct gen_admission *admission, struct err *err)
{
    *resume = (struct resume_headers){ 0 };
    *admission = (struct gen_admission){ 0 };
    if (!e->route->endpoint->answers) return OK;
    TRY(resume_read_headers(e->x, resume, err));
    return admission_read_headers(e->x, admission, err);
}

static void start_here(struct api_exchange *e)
{
    struct resume_headers resume;
    struct gen_admission admission;
    struct err err = { 0 };
    const bool is_good = read_headers(e, &resume, &admission, &err) == OK;
    admission.tenant = e->tenant;
    struct completion_options o = {
        .endpoint = e->route->endpoint,
        .name = serve_name_is_good(http_header(e->x, "x-request-id")) ? e->name : NULL,
        .fallback_name = e->name,
        .trace = str_eq_c(http_header(e->x, "x-baton-trace"), "1"),
        .bad_header = is_good ? NULL : &err,
        .t_start_ns = e->t_start_ns,
        .resume = is_good ? &resume : NULL,
        .admission = admission,
        .deadline_ms = admission.deadline_ms ? e->t_start_ns / 1000000 + admission.deadline_ms : 0,
        .reply = { .reply = on_reply,
                   .begin = on_begin,
                   .chunk = on_chunk,
                   .end = on_stream_end,
                   .arg = e, },
    };
    http_take_body(e->x, &o.body);
    e->completion_id = completion_start(e->serve, &o);
}

/* A request that no other node took gets its answer, or its 429, here. */
static void on_passed(void *arg, bool taken, int status)
{
    struct api_exchange *e = arg;
    e->pass = NULL;
    e->status = status;
    if (!taken) start_here(e);
}

static bool pass_if_full(struct api_exchange *e)
{
    const struct serve_options *o = &e->serve->o;
    const char *path = serve_generating_path(http_path(e->x));
    if (!path || !o->passer.start || !o->backend.is_full || e->serve->closed) return false;
    if (!o->backend.is_full(o->backend.self, e->serve->n_preparing)) return false;
    struct serve_pass r = { .x = e->x, .path = path, .name = e->name, .done = on_passed, .arg = e };
    e->pass = o->passer.start(o->passer.self, &r);
    return e->pass != NULL;
}

static void start_completion(struct api_exchange *e)
{
    struct str encoding = http_header(e->x, "content-encoding");
    if (!is_json(http_header(e->x, "content-type"))) {
        answer_error(e, 415, "unsupported_media_type", NULL,
                     "the request body must be JSON: send Content-Type: application/json");
        return;
    }
    if (encoding.n && !(encoding.n == 8 && strncasecmp(encoding.p, "identity", 8) == 0)) {
        answer_error(e, 415, "unsupported_media_type", NULL,
                     "compressed request bodies are not supported");
        return;
    }
    if (!pass_if_full(e)) start_here(e);
}

/* ---- an exchange ---- */

static void on_end(void *arg, bool gone)
{
    struct api_exchange *e = arg;
    struct serve *s = e->serve;
    struct route_metrics *m =
        &s->route_metrics[e->route ? (size_t)(e->route - ROUTES) : (size_t)N_ROUTES];
    uint64_t ns = clock_ns() - e->t_start_ns;
    size_t class_ = gone ? 3 : e->status >= 500 ? 2 : e->status >= 400 ? 1 : 0;
    if (gone && (e->completion_id || e->pass)) counter_add(s->m_gone, 1);
    if (e->pass) s->o.passer.cancel(s->o.passer.self, e->pass);
    if (gone && e->completion_id) serve_cancel(s, e->completion_id);
    counter_add(m->codes[class_], 1);
    histogram_observe(m->seconds, (double)ns * 1e-9);
    s->n_exchanges--;
    gauge_set(s->m_in_flight, s->n_exchanges);
    log_debug("http request", "api_request=%s peer=%s path=%s status=%d ms=%.1f", e->name,
              http_peer(e->x), e->route ? e->route->path : "?", gone ? 499 : e->status,
              (double)ns * 1e-6);
    mem_free(e);
    serve_unref(s);
}

static bool allows_method(const struct api_route *r, const char *method)
{
    if (strcmp(method, "GET") == 0 || strcmp(method, "HEAD") == 0) return r->flags & GET;
    return strcmp(method, "POST") == 0 && (r->flags & POST);
}

/* The usual cause is a client's base URL without /v1, or with a part of the path too many. */
static void answer_unknown(struct api_exchange *e, bool admin)
{
    enum { SHOWN_MAX = 100 };
    struct str path = http_path(e->x);
    struct buf text = { 0 }, below = { 0 };
    buf_printf(&text, "there is no %.*s%s %s", (int)(path.n < SHOWN_MAX ? path.n : SHOWN_MAX),
               path.p, path.n > SHOWN_MAX ? "..." : "", admin ? "at the metrics port" : "here");
    if (path.n <= SHOWN_MAX) buf_printf(&below, "/v1%.*s", STR_ARG(path));
    const struct api_route *without = str_starts(path, "/v1")
                                          ? find_route(str_sub(path, strlen("/v1"), SIZE_MAX))
                                          : NULL;
    if (admin) buf_add_c(&text, "; the API has the port of --port");
    else if (below.len && find_route(buf_str(&below)))
        buf_add_c(&text, "; the API is under /v1: is /v1 missing from base_url?");
    else if (without) buf_printf(&text, "; did you mean %s?", without->path);
    else
        buf_printf(&text, "; POST %s and %s generate, GET / lists the other paths", ROUTES[0].path,
                   ROUTES[1].path);
    answer_error(e, 404, "not_found", NULL, text.data);
    buf_release(&text);
    buf_release(&below);
}

static void answer_other_method(struct api_exchange *e)
{
    const struct api_route *r = e->route;
    const char *methods = !(r->flags & POST) ? "GET, HEAD"
                          : r->flags & GET   ? "GET, HEAD, POST"
                                             : "POST";
    char allow[64], text[128];
    snprintf(allow, sizeof allow, "Allow: %s\r\n", methods);
    snprintf(text, sizeof text, "%s takes %s, not %.16s", r->path, methods, http_method(e->x));
    answer_error(e, 405, "method_not_allowed", allow, text);
}

static void dispatch(struct api_exchange *e, bool admin)
{
    struct serve *s = e->serve;
    const struct api_route *r = e->route;
    /* Unknown paths need a key too, so that strangers do not learn which paths exist. */
    if (!admin && !(r && (r->flags & OPEN)) &&
        !auth_tenant(s->tenants, http_header(e->x, "authorization"), &e->tenant)) {
        answer_error(e, 401, "invalid_api_key", "WWW-Authenticate: Bearer\r\n",
                     "a valid API key is needed: send Authorization: Bearer KEY");
        return;
    }
    if (!r) {
        answer_unknown(e, admin);
        return;
    }
    if (!allows_method(r, http_method(e->x))) {
        answer_other_method(e);
        return;
    }
    if (r->endpoint) start_completion(e);
    else r->handle(e);
}

static void open_exchange(struct serve *s, struct http_exchange *x, bool admin)
{
    ASSERT_THREAD(THREAD_LOOP);
    struct api_exchange *e = MEM_NEW(struct api_exchange);
    e->serve = s;
    e->x = x;
    e->t_start_ns = clock_ns();
    e->route = find_route(http_path(x));
    if (admin && e->route && !(e->route->flags & ADMIN)) e->route = NULL;
    serve_choose_name(x, e->name);
    serve_ref(s);
    s->n_exchanges++;
    gauge_set(s->m_in_flight, s->n_exchanges);
    http_on_end(x, on_end, e);
    dispatch(e, admin);
}

void serve_http(struct serve *s, struct http_exchange *x) { open_exchange(s, x, false); }

void serve_http_admin(struct serve *s, struct http_exchange *x) { open_exchange(s, x, true); }
