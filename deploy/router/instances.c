/* instances.c - see instances.h. Thread: loop. */
#include "deploy/router/instances.h"

#include <stdio.h>
#include <string.h>

#include "deploy/node/node_options.h"
#include "shared/base/address/host_port.h"
#include "shared/base/hash/hash.h"
#include "shared/base/json/json_packed.h"
#include "shared/base/mem.h"
#include "shared/serve/auth.h"
#include "shared/serve/serve_state.h"

enum { VALUES_MAX = 4 * INSTANCES_MAX /* JSON values of a body */ };

/* ---- bodies ---- */

static enum status parse(struct str body, cJSON **doc, struct err *err)
{
    if (body.n > INSTANCES_BODY_MAX)
        return err_set(err, ERR_TOO_LONG, "the body has %zu bytes, and at most %d are read here",
                       body.n, INSTANCES_BODY_MAX);
    return json_parse_bounded(body, VALUES_MAX, doc, err);
}

static enum status read_role(const cJSON *o, const char *name, bool mixed, enum node_role *out,
                             struct err *err)
{
    const char *text = NULL;
    TRY(json_get_str(o, name, &text, err));
    for (enum node_role r = mixed ? ROLE_MIXED : ROLE_PREFILL; text && r <= ROLE_DECODE; r++) {
        if (strcasecmp(text, node_role_name(r)) != 0) continue;
        *out = r;
        return OK;
    }
    return err_field(err, ERR_INVALID, name, "%s is '%.40s', but must be %sprefill or decode", name,
                     text ? text : "", mixed ? "mixed, " : "");
}

static enum status add_instance(const cJSON *one, enum node_role role, struct instances_change *out,
                                struct err *err)
{
    if (!cJSON_IsString(one))
        return err_field(err, ERR_INVALID, "instances", "every instance must be \"host:port\"");
    return address_parse(one->valuestring, role, &out->nodes[out->n++], err);
}

static enum status read_instances(const cJSON *doc, struct instances_change *out, struct err *err)
{
    enum node_role role;
    const cJSON *list = json_member(doc, "instances"), *one;
    TRY(read_role(doc, "type", false, &role, err));
    if (cJSON_IsString(list)) return add_instance(list, role, out, err);
    if (!cJSON_IsArray(list) || !list->child || cJSON_GetArraySize(list) > INSTANCES_MAX)
        return err_field(err, ERR_INVALID, "instances",
                         "instances must be \"host:port\", or an array of 1 to %d of these",
                         INSTANCES_MAX);
    cJSON_ArrayForEach (one, list) TRY(add_instance(one, role, out, err));
    return OK;
}

enum status instances_read_change(struct str body, struct instances_change *out, struct err *err)
{
    cJSON *doc = NULL;
    out->n = 0;
    TRY(parse(body, &doc, err));
    const enum status st = cJSON_IsObject(doc)
                               ? read_instances(doc, out, err)
                               : err_set(err, ERR_INVALID, "the body must be a JSON object");
    cJSON_Delete(doc);
    return st;
}

/* FastDeploy's servers give it as a number or as text. */
static enum status read_port(const cJSON *doc, int64_t *out, struct err *err)
{
    const cJSON *port = json_member(doc, "port");
    *out = 0;
    if (!cJSON_IsString(port)) TRY(json_get_i64(doc, "port", 1, UINT16_MAX, out, err));
    else if (str_to_i64(str_of(port->valuestring), out) != OK) *out = 0;
    if (*out >= 1 && *out <= UINT16_MAX) return OK;
    return err_field(err, ERR_INVALID, "port", "port must be from 1 to %d", UINT16_MAX);
}

static enum status read_registration(const cJSON *doc, struct node_at *out, struct err *err)
{
    const char *host = NULL;
    char at[HOST_PORT_TEXT_MAX];
    enum node_role role;
    int64_t port;
    TRY(read_role(doc, "role", true, &role, err));
    TRY(json_get_str(doc, "host_ip", &host, err));
    TRY(read_port(doc, &port, err));
    if (!host || !*host || strlen(host) >= HOST_TEXT_MAX)
        return err_field(err, ERR_INVALID, "host_ip", "host_ip must be the node's address");
    return address_parse(host_port_text(host, (uint16_t)port, at), role, out, err);
}

enum status instances_read_register(struct str body, struct node_at *out, struct err *err)
{
    cJSON *doc = NULL;
    TRY(parse(body, &doc, err));
    const enum status st = cJSON_IsObject(doc)
                               ? read_registration(doc, out, err)
                               : err_set(err, ERR_INVALID, "the body must be a JSON object");
    cJSON_Delete(doc);
    return st;
}

/* ---- answers ---- */

/* `member`: what the other router's clients look at. */
static void reply_error(struct http_exchange *x, int status, const char *member, const char *why)
{
    http_reply_error(x, status, status == 401 ? "WWW-Authenticate: Bearer\r\n" : NULL, member, why);
}

static const char NOT_LISTED[] =
    "this router's view of the nodes is not its own (--scheduler-name, --router), so nodes cannot "
    "be listed here: start them with the same options, and they are in the view";

static void reply_lists(const struct instances_options *o, struct http_exchange *x,
                        const char *message)
{
    struct buf body = { 0 };
    buf_add_c(&body, "{\"message\":");
    json_add_string(&body, str_of(message));
    buf_add_c(&body, ",\"current_prefill_instances\":");
    listed_write_names(o->listed, ROLE_PREFILL, &body);
    buf_add_c(&body, ",\"current_decode_instances\":");
    listed_write_names(o->listed, ROLE_DECODE, &body);
    buf_add_char(&body, '}');
    http_reply(x, 200, "application/json", NULL, buf_str(&body));
    buf_release(&body);
}

static enum node_role other_role(enum node_role r)
{
    return r == ROLE_PREFILL ? ROLE_DECODE : ROLE_PREFILL;
}

/* It is listed, but with the other type. */
static enum status refuse_other_type(const struct instances_options *o, const struct node_at *node,
                                     struct err *err)
{
    struct node_at other = *node;
    char at[HOST_PORT_TEXT_MAX];
    other.role = other_role(node->role);
    if (listed_has(o->listed, node) || !listed_has(o->listed, &other)) return OK;
    return err_field(err, ERR_INVALID, "type", "%s is listed with type %s, not %s",
                     host_port_text(node->host, node->port, at), node_role_name(other.role),
                     node_role_name(node->role));
}

static void change(const struct instances_options *o, struct http_exchange *x, bool add)
{
    struct instances_change *c = MEM_NEW(struct instances_change);
    struct err err = { 0 };
    char message[160];
    size_t n = 0;
    enum status st = instances_read_change(http_body(x), c, &err);
    for (size_t i = 0; !add && st == OK && i < c->n; i++)
        st = refuse_other_type(o, &c->nodes[i], &err);
    for (size_t i = 0; st == OK && i < c->n; i++) {
        if (add) st = listed_add(o->listed, &c->nodes[i], &err);
        n += add ? st == OK : listed_remove(o->listed, &c->nodes[i]);
    }
    if (st == OK) {
        snprintf(message, sizeof message, "%zu instance%s %s", n, n == 1 ? " is" : "s are",
                 add ? "listed; each is used once it answers"
                     : "removed; what runs there goes on to its end");
        reply_lists(o, x, message);
    } else {
        reply_error(x, status_http(st), "error", err.text);
    }
    mem_free(c);
}

static void add(const struct instances_options *o, struct http_exchange *x) { change(o, x, true); }

static void take_away(const struct instances_options *o, struct http_exchange *x)
{
    change(o, x, false);
}

/* A registration waits for the node's answer. */
struct registration {
    struct listed *listed;
    struct http_exchange *x; /* NULL: answered */
    struct node_at at;
    bool is_new; /* it was not listed before, and is not when it cannot be used */
};

static void on_asked(void *arg, const char *why)
{
    struct registration *r = arg;
    struct http_exchange *x = r->x;
    char text[ERR_TEXT_MAX], at[HOST_PORT_TEXT_MAX];
    r->x = NULL; /* on_end frees it */
    snprintf(text, sizeof text, "the node at %s cannot be used: %.300s",
             host_port_text(r->at.host, r->at.port, at), why ? why : "");
    if (why && r->is_new) (void)listed_remove(r->listed, &r->at);
    if (why) reply_error(x, 400, "detail", text);
    else http_reply(x, 200, "application/json", NULL, STR("{\"status\":\"success\"}"));
}

static void on_end(void *arg, bool gone)
{
    struct registration *r = arg;
    (void)gone;
    if (r->x) listed_forget(r->listed, r);
    mem_free(r);
}

static void register_node(const struct instances_options *o, struct http_exchange *x)
{
    struct node_at at;
    struct err err = { 0 };
    enum status st = instances_read_register(http_body(x), &at, &err);
    const bool is_new = st == OK && !listed_has(o->listed, &at);
    if (st == OK) st = listed_add(o->listed, &at, &err);
    if (st != OK) {
        reply_error(x, 400, "detail", err.text);
        return;
    }
    struct registration *r = MEM_NEW(struct registration);
    *r = (struct registration){ o->listed, x, at, is_new };
    http_on_end(x, on_end, r);
    listed_when_asked(o->listed, &at, on_asked, r);
}

static void count_registered(const struct instances_options *o, struct http_exchange *x)
{
    char body[96];
    uint32_t n[3] = { 0 };
    o->count(o->arg, n);
    snprintf(body, sizeof body, "{\"mixed\":%u,\"prefill\":%u,\"decode\":%u}", n[ROLE_MIXED],
             n[ROLE_PREFILL], n[ROLE_DECODE]);
    http_reply(x, 200, "application/json", NULL, str_of(body));
}

static void check_health(const struct instances_options *o, struct http_exchange *x)
{
    char body[96];
    uint32_t n[3] = { 0 };
    o->count(o->arg, n);
    snprintf(body, sizeof body,
             "{\"status\":\"ok\",\"prefill_instances\":%u,\"decode_instances\":%u}",
             n[ROLE_PREFILL] + n[ROLE_MIXED], n[ROLE_DECODE] + n[ROLE_MIXED]);
    http_reply(x, 200, "application/json", NULL, str_of(body));
}

/* ---- the table ---- */

static const struct {
    const char *path, *method;
    void (*fn)(const struct instances_options *o, struct http_exchange *x);
    const char *error; /* the member of a failure */
    bool lists;        /* it needs the list */
} PATHS[] = {
    { "/instances/add", "POST", add, "error", true },
    { "/instances/remove", "POST", take_away, "error", true },
    { "/register", "POST", register_node, "detail", true },
    { "/registered_number", "GET", count_registered, "detail", false },
    { "/healthcheck", "GET", check_health, "error", false },
};

bool instances_has_key(const struct instances_options *o, const struct http_exchange *x)
{
    return auth_tenant(o->tenants, http_header(x, "authorization"), NULL);
}

bool instances_serve(const struct instances_options *o, struct http_exchange *x)
{
    size_t i = 0;
    while (i < COUNT_OF(PATHS) && !str_eq_c(http_path(x), PATHS[i].path)) i++;
    if (i == COUNT_OF(PATHS)) return false;
    if (!instances_has_key(o, x))
        reply_error(x, 401, PATHS[i].error,
                    "a valid API key is needed: send Authorization: Bearer KEY");
    else if (strcmp(http_method(x), PATHS[i].method) != 0)
        reply_error(x, 405, PATHS[i].error,
                    strcmp(PATHS[i].method, "POST") == 0 ? "this path takes POST"
                                                         : "this path takes GET");
    else if (PATHS[i].lists && !o->listed) reply_error(x, 400, PATHS[i].error, NOT_LISTED);
    else PATHS[i].fn(o, x);
    return true;
}
