/* hub.c - see hub.h. Thread: loop. */
#include "deploy/router/hub.h"

#include <stdio.h>
#include <string.h>

#include "deploy/router/instances.h"
#include "deploy/router/listed.h"
#include "deploy/router/metrics_merge.h"
#include "scheduler/directory/handler.h"
#include "scheduler/directory/local.h"
#include "scheduler/directory/wire.h"
#include "shared/base/mem.h"
#include "shared/net/http/http_client.h"

enum {
    METRICS_MAX = 4 << 20, /* of one process */
    METRICS_MS = 2000,     /* a process that does not answer is left out */
    STOP_GRACE_MS = 300
};

struct hub {
    struct hub_options o;
    struct metrics *metrics;
    struct directory *local; /* NULL: the view is elsewhere */
    struct directory_handler *view;
    struct listed *listed;
    struct http_client *client;
    struct http_server *http, *admin;
    int n_servers; /* that have not stopped */
    void (*done)(void *arg);
    void *done_arg;
};

/* ---- metrics of all processes ---- */

/* Answers are awaited of all processes, which may end after the client. */
struct gathering {
    struct hub *hub;
    struct http_exchange *x; /* NULL: the client has left */
    size_t n_awaited;
    struct buf *texts; /* [n_workers] */
};

struct gathering_part {
    struct gathering *all;
    size_t i;
};

static void reply_all(struct gathering *g)
{
    const size_t n = g->hub->o.n_workers;
    struct metrics_page *pages = MEM_ARRAY(struct metrics_page, n + 1);
    char(*names)[24] = mem_calloc(n, sizeof *names);
    struct buf own = { 0 }, page = { 0 };
    metrics_write(g->hub->metrics, &own);
    for (size_t i = 0; i < n; i++) {
        snprintf(names[i], sizeof names[i], "%zu", i);
        pages[i] = (struct metrics_page){ names[i], buf_str(&g->texts[i]) };
    }
    pages[n] = (struct metrics_page){ "view", buf_str(&own) };
    metrics_merge(pages, n + 1, &page);
    http_reply(g->x, 200, "text/plain; version=0.0.4; charset=utf-8", NULL, buf_str(&page));
    buf_release(&own);
    buf_release(&page);
    mem_free(names);
    mem_free(pages);
}

static void end_part(struct gathering *g)
{
    if (--g->n_awaited > 0) return;
    if (g->x) {
        http_on_end(g->x, NULL, NULL);
        reply_all(g);
    }
    for (size_t i = 0; i < g->hub->o.n_workers; i++) buf_release(&g->texts[i]);
    mem_free(g->texts);
    mem_free(g);
}

static void on_metrics(void *arg, enum status st, int http_status, struct str body)
{
    struct gathering_part *p = arg;
    if (st == OK && http_status == 200) buf_add_str(&p->all->texts[p->i], body);
    end_part(p->all);
    mem_free(p);
}

static void on_gathering_end(void *arg, bool gone)
{
    struct gathering *g = arg;
    (void)gone;
    g->x = NULL;
}

static void ask_worker(struct gathering *g, size_t i, const char *headers)
{
    struct hub *h = g->hub;
    struct gathering_part *p = MEM_NEW(struct gathering_part);
    *p = (struct gathering_part){ g, i };
    g->n_awaited++;
    if (http_client_request(h->client, "GET", "127.0.0.1", h->o.ports[i], "/metrics", headers,
                            STR(""), METRICS_MS, on_metrics, p) == OK)
        return;
    g->n_awaited--;
    mem_free(p);
}

static void gather_metrics(struct hub *h, struct http_exchange *x)
{
    struct gathering *g = MEM_NEW(struct gathering);
    struct buf headers = { 0 };
    if (h->o.key) buf_printf(&headers, "Authorization: Bearer %s\r\n", h->o.key);
    *g = (struct gathering){ .hub = h, .x = x, .n_awaited = 1 };
    g->texts = MEM_ARRAY(struct buf, h->o.n_workers);
    http_on_end(x, on_gathering_end, g);
    for (size_t i = 0; i < h->o.n_workers; i++) ask_worker(g, i, headers.data);
    end_part(g);
    buf_release(&headers);
}

/* ---- HTTP ---- */

static void count_nodes(void *arg, uint32_t out[3])
{
    struct hub *h = arg;
    char topics[512];
    size_t n = 0;
    struct node_record *nodes = h->local ? directory_local_view(h->local, h->o.o->topic, &n, topics)
                                         : NULL;
    for (size_t i = 0; i < n; i++) out[nodes[i].role]++;
    mem_free(nodes);
}

static void on_request(void *arg, struct http_exchange *x)
{
    struct hub *h = arg;
    const struct instances_options i = {
        .listed = h->listed,
        .tenants = &h->o.o->tenants,
        .count = count_nodes,
        .arg = h,
    };
    if (h->view && str_starts(http_path(x), DIRECTORY_PATH)) {
        directory_handler_serve(h->view, x);
    } else if (str_eq_c(http_path(x), "/metrics")) {
        if (instances_has_key(&i, x)) gather_metrics(h, x);
        else
            http_reply_error(x, 401, NULL, "error",
                             "a valid API key is needed: send Authorization: Bearer KEY");
    } else if (!instances_serve(&i, x)) {
        http_reply_error(x, 404, NULL, "error",
                         "this process answers the other processes of its router");
    }
}

/* At --metrics-port no key is asked for, as at a node's. */
static void on_admin(void *arg, struct http_exchange *x)
{
    struct hub *h = arg;
    if (str_eq_c(http_path(x), "/metrics")) gather_metrics(h, x);
    else if (str_eq_c(http_path(x), "/live") || str_eq_c(http_path(x), "/livez"))
        http_reply(x, 200, "application/json", NULL, STR("{\"status\":\"ok\"}"));
    else
        http_reply_error(x, 404, NULL, "error",
                         "here are /metrics and /live; the API's port has the other paths");
}

/* ---- life ---- */

static enum status open_view(struct hub *h, struct err *err)
{
    const struct node_options *o = h->o.o;
    const struct directory_options d = { .loop = h->o.loop,
                                         .topic = o->topic,
                                         .metrics = h->metrics };
    const struct listed_options l = {
        .loop = h->o.loop, .secret = o->secret, .topic = o->topic, .metrics = h->metrics
    };
    if (strcmp(o->directory, "local") != 0) return OK;
    TRY(directory_open("local", &d, &h->local, err));
    h->view = directory_handler_create(h->local, o->secret);
    struct listed_options with = l;
    with.directory = h->local;
    h->listed = listed_create(&with);
    for (size_t i = 0; i < o->listed.n; i++) TRY(listed_add(h->listed, &o->listed.nodes[i], err));
    return OK;
}

static enum status listen_on(struct hub *h, const char *host, uint16_t port,
                             void (*handler)(void *arg, struct http_exchange *x),
                             struct http_server **out, struct err *err)
{
    struct http_server_options s = {
        .loop = h->o.loop,
        .host = host,
        .port = port,
        .option = "--metrics-port",
        .limits = HTTP_LIMITS_DEFAULT,
        .handler = handler,
        .arg = h,
    };
    s.limits.body_bytes = INSTANCES_BODY_MAX;
    s.limits.small_body_paths = DIRECTORY_PATH;
    s.limits.small_body_bytes = DIRECTORY_BODY_MAX;
    s.limits.write_queue_bytes = 2 * DIRECTORY_ANSWER_MAX;
    TRY(http_server_start(&s, out, err));
    h->n_servers++;
    return OK;
}

static void free_hub(struct hub *h)
{
    listed_free(h->listed);
    directory_handler_free(h->view);
    directory_close(h->local);
    http_client_free(h->client);
    metrics_free(h->metrics);
    mem_free(h);
}

static void end(struct hub *h)
{
    void (*done)(void *arg) = h->done;
    void *done_arg = h->done_arg;
    free_hub(h);
    done(done_arg);
}

static void on_stopped(void *arg)
{
    struct hub *h = arg;
    if (--h->n_servers == 0) end(h);
}

struct hub *hub_create(const struct hub_options *o)
{
    struct hub *h = MEM_NEW(struct hub);
    const struct http_client_options c = { .loop = o->loop,
                                           .body_max = METRICS_MAX,
                                           .n_idle = (uint32_t)o->n_workers };
    h->o = *o;
    h->metrics = metrics_create();
    h->client = http_client_create(&c);
    return h;
}

/* The port of the API has the metrics already: it is the processes', whichever option names it. */
enum status hub_start(struct hub *h, struct err *err)
{
    const struct node_options *o = h->o.o;
    TRY(open_view(h, err));
    TRY(listen_on(h, "127.0.0.1", 0, on_request, &h->http, err));
    if (o->metrics_port == 0 || o->metrics_port == o->port) return OK;
    return listen_on(h, o->host, o->metrics_port, on_admin, &h->admin, err);
}

uint16_t hub_port(const struct hub *h) { return http_server_port(h->http); }

void hub_stop(struct hub *h, void (*done)(void *arg), void *arg)
{
    h->done = done;
    h->done_arg = arg;
    if (h->view) directory_handler_close(h->view);
    if (h->n_servers == 0) {
        end(h);
        return;
    }
    if (h->http) http_server_stop(h->http, STOP_GRACE_MS, on_stopped, h);
    if (h->admin) http_server_stop(h->admin, 0, on_stopped, h);
}
