/* router_options.c - see router_options.h. Thread: main, at start. */
#include "deploy/router/router_options.h"

#include <string.h>

/* Names are read with the model where there is one. */
static enum status read_names(const struct config *c, struct node_options *o, struct err *err)
{
    size_t n = 0;
    config_list(c, "served-model-name", 0, &n);
    if (n > NODE_NAMES_MAX)
        return err_field(err, ERR_CONFIG, "served-model-name",
                         "%zu served model names were given, at most %d", n, NODE_NAMES_MAX);
    for (size_t i = 0; o->n_names == 0 && i < n; i++)
        o->names[i] = config_list(c, "served-model-name", i, NULL);
    if (o->n_names == 0) o->n_names = n;
    o->chat_template = config_string(c, "chat-template");
    return OK;
}

/* One of several processes: their supervisor has the list, the view where it is the router's own,
 * and --metrics-port. */
static enum status read_worker(const struct config *c, struct node_options *o, struct err *err)
{
    const char *of = config_string(c, "worker-of");
    char host[HOST_TEXT_MAX];
    if (!of) return OK;
    o->worker.port = (uint16_t)config_int(c, "worker-port");
    if (!host_port_parse(of, host, &o->worker.hub) || !host_is_loopback(host) || !o->worker.hub ||
        !o->worker.port)
        return err_field(err, ERR_CONFIG, "worker-of",
                         "--worker-of %s with --worker-port %u: --workers gives its processes both",
                         of, o->worker.port);
    addresses_release(&o->listed);
    o->metrics_port = 0;
    if (strcmp(o->directory, "local") != 0) return OK;
    o->directory = "http";
    o->directory_host = host_loopback(host);
    o->directory_port = o->worker.hub;
    return OK;
}

static enum status read_listed(const struct config *c, struct node_options *o, struct err *err)
{
    TRY(addresses_read(c, &o->listed, err));
    if (o->listed.n == 0 || strcmp(o->directory, "local") == 0) return OK;
    const char *by = config_string(c, "router") ? "router" : "scheduler-name";
    return err_field(err, ERR_CONFIG, "prefiller-hosts",
                     "--prefiller-hosts and --decoder-hosts list nodes of this router's own view, "
                     "which %s %s puts elsewhere: nodes are in that view when they are started "
                     "with the same option",
                     config_source_text(c, by), config_string(c, by));
}

enum status router_options_read(const struct config *c, struct node_options *out, struct err *err)
{
    TRY(node_options_check_read(c, out, err));
    TRY(read_names(c, out, err));
    TRY(read_listed(c, out, err));
    TRY(read_worker(c, out, err));
    out->no_engine = out->is_router = true;
    out->pass_requests = false; /* what it passed would go round its tenants' limits and its line */
    out->serves_directory = false; /* the API's port does */
    return OK;
}

/* ---- the start page ---- */

static void line(struct buf *out, const char *what, const char *value, const char *source)
{
    buf_printf(out, "  %-12s %s%s%s%s\n", what, value, source ? "   (" : "", source ? source : "",
               source ? ")" : "");
}

static void print_view(const struct node_options *o, const struct config *c, struct buf *out)
{
    char at[HOST_PORT_TEXT_MAX], server[REDIS_SERVER_TEXT_MAX];
    struct buf text = { 0 };
    if (strcmp(o->directory, "redis") == 0)
        buf_printf(&text, "in Redis at %s db %d%s", redis_server_text(&o->redis, server),
                   o->redis.db, o->redis.tls ? " over TLS" : "");
    else if (strcmp(o->directory, "http") == 0)
        buf_printf(&text, "held by %s", host_port_text(o->directory_host, o->directory_port, at));
    else buf_printf(&text, "held by this router: nodes register with --router HOST:%u", o->port);
    line(out, "cluster view", text.data, config_source_text(c, "scheduler-name"));
    buf_release(&text);
}

static void print_listed(const struct node_options *o, struct buf *out)
{
    char at[HOST_PORT_TEXT_MAX];
    enum { SHOWN_MAX = 8 };
    for (enum node_role r = ROLE_PREFILL; r <= ROLE_DECODE; r++) {
        size_t n = 0;
        for (size_t i = 0; i < o->listed.n; i++) {
            if (o->listed.nodes[i].role != r || n++ >= SHOWN_MAX) continue;
            if (n == 1) buf_printf(out, "  %-12s", r == ROLE_PREFILL ? "prefill" : "decode");
            buf_printf(out, " %s",
                       host_port_text(o->listed.nodes[i].host, o->listed.nodes[i].port, at));
        }
        if (n > SHOWN_MAX) buf_printf(out, " and %zu more", n - SHOWN_MAX);
        if (n) buf_add_char(out, '\n');
    }
}

void router_options_print(const struct node_options *o, const struct config *c, struct buf *out)
{
    char at[HOST_PORT_TEXT_MAX];
    buf_printf(out, "baton %s router\n", BATON_VERSION);
    line(out, "model", o->model_path ? o->model_path : "that of the first node",
         config_source_text(c, "model"));
    line(out, "topic", o->topic, config_source_text(c, "scheduler-topic"));
    line(out, "API", host_port_text(o->host, o->port, at), config_source_text(c, "port"));
    if (o->grpc_port)
        line(out, "gRPC", host_port_text(o->host, o->grpc_port, at),
             config_source_text(c, "grpc-port"));
    print_view(o, c, out);
    print_listed(o, out);
    line(out, "API keys",
         o->tenants.n_keys ? "required" : "none: anyone who reaches the port may use it",
         config_source_text(c, config_is_set(c, "api-keys-file") ? "api-keys-file" : "api-key"));
    node_options_print_secret(o->secret, out);
}
