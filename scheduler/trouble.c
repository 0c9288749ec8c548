/* trouble.c - see trouble.h. The causes are looked for in the order in which they must be removed:
 * without a directory nothing else is known for sure. */
#include "scheduler/trouble.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "shared/base/address/host_port.h"
#include "shared/base/hash/hash.h"
#include "shared/base/json/json.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

enum {
    PARTNERS_MAX = 64,      /* nodes of the other role that a node is compared with */
    COMPARISONS_MAX = 4096, /* in one look: a fraction of a millisecond */
    LINES_A_MINUTE = 6,     /* of the log; beyond them only what lasts */
    LASTING_MS = 5000
};

const char *trouble_name(enum trouble_cause c)
{
    static const char *const names[TROUBLE_N_CAUSES] = { "none",           "directory",
                                                         "launcher",       "private-view",
                                                         "peer",           "other-model",
                                                         "no-decode-node", "kv-exchange" };
    return names[c];
}

__attribute__((format(printf, 4, 5))) static void set(struct trouble *t, enum trouble_cause cause,
                                                      bool blocks, const char *fmt, ...)
{
    va_list args;
    t->cause = cause;
    t->blocks = blocks;
    va_start(args, fmt);
    vsnprintf(t->text, sizeof t->text, fmt, args);
    va_end(args);
}

/* Keeps the nodes that the sentence names; `b` may be NULL. */
static void set_about(struct trouble *t, const struct node_record *a, const struct node_record *b)
{
    const struct node_record *nodes[COUNT_OF(t->about)] = { a, b };
    for (size_t i = 0; i < COUNT_OF(t->about); i++) {
        t->about[i].node = nodes[i] ? nodes[i]->node : 0;
        snprintf(t->about[i].name, sizeof t->about[i].name, "%s", nodes[i] ? nodes[i]->name : "");
    }
}

static const char *address_of(const struct node_record *n, char at[HOST_PORT_TEXT_MAX])
{
    return host_port_text(n->host, n->cluster_port, at);
}

static const char *or_unknown(const char *text) { return text[0] ? text : "unknown"; }

/* ---- what the nodes of the topic are ---- */

/* A record that this node left behind when it was started before: it goes with its lease. */
static bool is_former_me(const struct view *v, const struct node_record *n)
{
    return n->node != v->me.node && v->me.name[0] && strcmp(n->name, v->me.name) == 0;
}

/* A record that a process left behind which was started again: another of that name is reached. */
static bool is_replaced(const struct view *v, const struct node_record *n)
{
    if (!n->name[0] || !view_why_unreachable(v, n->node)) return false;
    for (size_t i = 0; i < v->n_nodes; i++) {
        const struct node_record *o = &v->nodes[i];
        if (o->node != n->node && strcmp(o->name, n->name) == 0 &&
            !view_why_unreachable(v, o->node))
            return true;
    }
    return false;
}

/* Does the role leave it work that ends in an answer? */
static bool may_decode(const struct view *v, const struct node_record *n)
{
    return v->unsplit || n->role != ROLE_PREFILL;
}

bool trouble_can_decode(const struct view *v, const struct node_record *n)
{
    return may_decode(v, n) && !is_former_me(v, n) && !n->draining &&
           (!v->model || n->model == v->model) && !view_why_unreachable(v, n->node);
}

/* Of two nodes the one of the lower number; NULL: none. Snapshots have nodes in any order, and the
 * sentence must not change with it. */
static const struct node_record *lower(const struct node_record *a, const struct node_record *b)
{
    return !a || b->node < a->node ? b : a;
}

/* How many of the nodes that can decode are usable, and one of those that are not. */
struct decode_nodes {
    size_t n_usable, n_suspect, n_other_model, n_draining;
    const struct node_record *suspect, *other_model;
};

static void count_decode_nodes(const struct view *v, struct decode_nodes *out)
{
    *out = (struct decode_nodes){ 0 };
    for (size_t i = 0; i < v->n_nodes; i++) {
        const struct node_record *n = &v->nodes[i];
        if (!may_decode(v, n) || is_former_me(v, n) || is_replaced(v, n)) continue;
        if (trouble_can_decode(v, n)) {
            out->n_usable++;
        } else if (n->draining) {
            out->n_draining++;
        } else if (v->model && n->model != v->model) {
            out->n_other_model++;
            out->other_model = lower(out->other_model, n);
        } else {
            out->n_suspect++;
            out->suspect = lower(out->suspect, n);
        }
    }
    if (v->unproven.node && may_decode(v, &v->unproven) && !out->n_suspect++)
        out->suspect = &v->unproven;
}

/* Any node of the topic, prefill nodes included, that this one cannot work with. */
static const struct node_record *find_other_model(const struct view *v)
{
    const struct node_record *found = NULL;
    for (size_t i = 0; i < v->n_nodes; i++)
        if (v->model && v->nodes[i].model != v->model && !v->nodes[i].draining)
            found = lower(found, &v->nodes[i]);
    return found;
}

static const struct node_record *find_suspect(const struct view *v)
{
    const struct node_record *found = NULL;
    for (size_t i = 0; i < v->n_nodes; i++)
        if (view_why_unreachable(v, v->nodes[i].node) && !is_former_me(v, &v->nodes[i]) &&
            !is_replaced(v, &v->nodes[i]))
            found = lower(found, &v->nodes[i]);
    return found || !v->unproven.node ? found : &v->unproven;
}

/* ---- sentences ---- */

static void say_peer(const struct trouble_facts *f, const struct node_record *n, bool blocks,
                     struct trouble *out)
{
    char at[HOST_PORT_TEXT_MAX];
    set_about(out, n, NULL);
    set(out, TROUBLE_PEER, blocks,
        "%s node %.63s cannot be connected: %.200s; if its process has ended, start it again (it "
        "leaves the list within seconds); if it runs, check with: baton doctor --peers %.80s",
        node_role_name(n->role), n->name, view_why_unreachable(f->view, n->node),
        address_of(n, at));
}

static const char KEEP_APART[] = "give each model its own --scheduler-topic and router",
                  START_ANEW[] = "start the router with the --model of its nodes, or without one";

/* A router has the tokenizer and the template of a model, and no weights. While it has nodes of its
 * model, the other one needs a router of its own. */
static void say_other_text(const struct trouble_facts *f, const struct node_record *n, bool blocks,
                           struct trouble *out)
{
    const char *mine = or_unknown(f->view->me.model_name);
    if (n->text && n->text != f->view->text)
        set(out, TROUBLE_OTHER_MODEL, blocks,
            "%s%s node %.63s of topic %.63s has the model %.63s, whose vocabulary is not that of "
            "%.63s, which this router has; %s",
            blocks ? "no node has this router's model: " : "", node_role_name(n->role), n->name,
            f->topic, or_unknown(n->model_name), mine, blocks ? START_ANEW : KEEP_APART);
    else
        set(out, TROUBLE_OTHER_MODEL, blocks,
            "%s node %.63s of topic %.63s has another model than the nodes that this router uses: "
            "%.63s (%.63s); %s",
            node_role_name(n->role), n->name, f->topic, or_unknown(n->model_name),
            or_unknown(n->precision), KEEP_APART);
}

static void say_other_model(const struct trouble_facts *f, const struct node_record *n, bool blocks,
                            struct trouble *out)
{
    const struct node_record *me = &f->view->me;
    const char *none = blocks ? "no living node decodes for this model: " : "";
    set_about(out, n, NULL);
    if (f->view->text) {
        say_other_text(f, n, blocks, out);
        return;
    }
    if (strcmp(n->model_name, me->model_name) == 0 && strcmp(n->precision, me->precision) == 0) {
        set(out, TROUBLE_OTHER_MODEL, blocks,
            "%s%s node %.63s of topic %.63s has another model under the same name: both are called "
            "%.63s (%.63s), but their weights or arithmetic differ; give all the same --model, "
            "--quantization and --activations, or another --scheduler-topic",
            none, node_role_name(n->role), n->name, f->topic, or_unknown(me->model_name),
            or_unknown(me->precision));
        return;
    }
    set(out, TROUBLE_OTHER_MODEL, blocks,
        "%s%s node %.63s of topic %.63s has another model or precision: %.63s (%.63s), while this "
        "node has %.63s (%.63s); give all the same --model, --quantization and --activations, or "
        "another --scheduler-topic",
        none, node_role_name(n->role), n->name, f->topic, or_unknown(n->model_name),
        or_unknown(n->precision), or_unknown(me->model_name), or_unknown(me->precision));
}

/* Adds the command that starts a decode node: all of it, since it is copied, or none. */
static void add_command(struct trouble *t, const char *join)
{
    static const char start[] = "; start one with: baton serve --splitwise-role decode";
    size_t n = strlen(t->text), more = sizeof start + (join ? 1 + strlen(join) : 0);
    if (n + more <= sizeof t->text)
        snprintf(t->text + n, sizeof t->text - n, "%s%s%s", start, join ? " " : "",
                 join ? join : "");
    else
        snprintf(t->text + n, sizeof t->text - n,
                 "; start one with the options of this node that name the model and the "
                 "directory, and --splitwise-role decode");
}

/* It was started to be listed, so whoever looks at it alone misses what the router sees. */
static void say_listed(const struct trouble_facts *f, struct trouble *out)
{
    if (f->listed == TROUBLE_LISTED_WITH_OTHERS)
        set(out, TROUBLE_NO_DECODE, true,
            "this %s node sees no node that decodes, so it answers no request by itself; the "
            "router that lists it sees one and uses both: send requests there, and ask its /ready",
            node_role_name(f->view->me.role));
    else
        set(out, TROUBLE_NO_DECODE, true,
            "neither this %s node nor the router that lists it sees a node that decodes; start one "
            "and list it there, with --decoder-hosts or POST /instances/add",
            node_role_name(f->view->me.role));
}

static void say_no_decode(const struct trouble_facts *f, const struct decode_nodes *d,
                          struct trouble *out)
{
    if (f->listed && !d->n_draining) {
        say_listed(f, out);
        return;
    }
    if (d->n_draining)
        set(out, TROUBLE_NO_DECODE, true,
            "every node of topic %.63s that can decode is shutting down (%zu)", f->topic,
            d->n_draining);
    else if (f->join && !f->join[0])
        set(out, TROUBLE_NO_DECODE, true,
            "no node that can decode is in topic %.63s; topics and roles seen: %.140s; the "
            "launcher restarts those that it has started, and their lines say why they end",
            f->topic, f->view->topics[0] ? f->view->topics : "none");
    else
        set(out, TROUBLE_NO_DECODE, true,
            "no node that can decode is in topic %.63s; topics and roles seen: %.140s", f->topic,
            f->view->topics[0] ? f->view->topics : "none");
    bool can_join = !f->join || f->join[0];
    if (!d->n_draining && can_join) add_command(out, f->join);
}

static void say_private(const struct trouble_facts *f, struct trouble *out)
{
    set(out, TROUBLE_PRIVATE_VIEW, true,
        "this node has the role %s and knows no other node: no directory was named, so none can "
        "find it; give --router HOST:PORT (a router, or the control port of a prefill node) or "
        "--scheduler-name splitwise with Redis, list it at a router (--decoder-hosts), or give "
        "--splitwise-role mixed; check with: baton doctor",
        node_role_name(f->view->me.role));
}

/* ---- KV exchange ---- */

static const char *transports_of(const struct node_record *n, char text[KV_BY_MAX + 8])
{
    snprintf(text, KV_BY_MAX + 8, "%s%s%s", n->kv_host ? "ipc" : "",
             n->kv_host && n->kv_by[0] ? "," : "", n->kv_by);
    return text;
}

static void say_kv(const struct view *v, const struct node_record *prefill,
                   const struct node_record *decode, struct trouble *out)
{
    const char *why = view_why_apart(v, prefill->node, decode->node);
    char text[320], at[HOST_PORT_TEXT_MAX], sender[KV_BY_MAX + 8], receiver[KV_BY_MAX + 8];
    if (place_exchange(prefill, decode) == EXCHANGE_TYPES_DIFFER)
        snprintf(text, sizeof text,
                 "%s at the sender does not fit into %s at the receiver without loss; give both "
                 "the same --kv-cache-dtype, or allow answers to differ with BATON_KV_LOSSY=1 on "
                 "either node",
                 prefill->kv_type, decode->kv_type);
    else if (place_exchange(prefill, decode) == EXCHANGE_NO_TRANSPORT)
        snprintf(text, sizeof text,
                 "they have no transport in common (%s at the sender, %s at the receiver%s); name "
                 "one in --cache-transfer-protocol",
                 transports_of(prefill, sender), transports_of(decode, receiver),
                 prefill->kv_host && decode->kv_host ? ", on different hosts" : "");
    else
        snprintf(text, sizeof text, "%.200s; check with: baton doctor --peers %.80s",
                 why ? why : "unknown", address_of(decode, at));
    set_about(out, prefill, decode);
    set(out, TROUBLE_KV, false,
        "prompts are not split over prefill node %.63s and decode node %.63s, whose KV cannot be "
        "exchanged: %s",
        prefill->name, decode->name, text);
}

static bool works_with(const struct view *v, const struct node_record *n)
{
    return !n->draining && (!v->model || n->model == v->model);
}

/* The nodes of one role that work with this one; above PARTNERS_MAX only the first are kept. */
struct partners {
    const struct node_record *node[PARTNERS_MAX];
    size_t n;
};

/* Can the node exchange KV with some of the other role? *left: comparisons that may still be
 * made. */
static bool has_partner(const struct view *v, const struct node_record *n,
                        const struct partners *others, size_t *left)
{
    size_t n_kept = others->n < PARTNERS_MAX ? others->n : PARTNERS_MAX;
    for (size_t i = 0; i<n_kept && * left> 0; i++, --*left) {
        const struct node_record *p = n->role == ROLE_PREFILL ? n : others->node[i],
                                 *d = n->role == ROLE_PREFILL ? others->node[i] : n;
        if (place_exchange(p, d) == EXCHANGE_OK && !view_why_apart(v, p->node, d->node))
            return true;
    }
    return others->n > PARTNERS_MAX || *left == 0; /* not known: nothing is claimed */
}

/* Finds a prefill or decode node that can exchange KV with none of the other role. */
static void find_kv_trouble(const struct view *v, struct trouble *out)
{
    struct partners of[ROLE_DECODE + 1];
    size_t left = COMPARISONS_MAX;
    for (size_t i = 0; i < COUNT_OF(of); i++) of[i].n = 0;
    for (size_t i = 0; i < v->n_nodes; i++) {
        const struct node_record *n = &v->nodes[i];
        if (!works_with(v, n)) continue;
        if (of[n->role].n < PARTNERS_MAX) of[n->role].node[of[n->role].n] = n;
        of[n->role].n++;
    }
    for (size_t i = 0; i < v->n_nodes; i++) {
        const struct node_record *n = &v->nodes[i];
        const struct partners *others = &of[n->role == ROLE_PREFILL ? ROLE_DECODE : ROLE_PREFILL];
        if (n->role == ROLE_MIXED || !works_with(v, n) || !others->n) continue;
        if (has_partner(v, n, others, &left)) continue;
        bool sends = n->role == ROLE_PREFILL;
        say_kv(v, sends ? n : others->node[0], sends ? others->node[0] : n, out);
        return;
    }
}

/* ---- the cause ---- */

/* A directory server that is away because the launcher was it comes back with a launcher. */
static bool launcher_comes_first(const struct trouble_facts *f)
{
    return f->launcher_gone && (f->launcher_held_view || !f->directory_down);
}

static void find_blocking(const struct trouble_facts *f, const struct decode_nodes *d,
                          struct trouble *out)
{
    if (f->directory_down && launcher_comes_first(f))
        set(out, TROUBLE_LAUNCHER, true, "%s", f->launcher_gone);
    else if (f->directory_down) set(out, TROUBLE_DIRECTORY, true, "%s", f->directory_down);
    else if (d->suspect) say_peer(f, d->suspect, true, out);
    else if (d->other_model) say_other_model(f, d->other_model, true, out);
    else if (f->missing) set(out, TROUBLE_PEER, true, "%s", f->missing);
    else say_no_decode(f, d, out);
}

/* Requests are served, but not by all nodes that the operator has started. */
static void find_degrading(const struct trouble_facts *f, struct trouble *out)
{
    const struct view *v = f->view;
    const struct node_record *n = find_suspect(v);
    if (launcher_comes_first(f)) set(out, TROUBLE_LAUNCHER, false, "%s", f->launcher_gone);
    else if (f->directory_down)
        set(out, TROUBLE_DIRECTORY, false, "%.440s; until then %s", f->directory_down,
            v->n_nodes > 1 ? "the nodes seen last serve" : "this node serves alone");
    else if (!f->join && !f->listed && v->me.node && v->me.role != ROLE_MIXED) say_private(f, out);
    else if (n) say_peer(f, n, false, out);
    else if ((n = find_other_model(v)) != NULL) say_other_model(f, n, false, out);
    else if (f->missing) set(out, TROUBLE_PEER, false, "%s", f->missing);
    else if (!v->unsplit) find_kv_trouble(v, out);
    out->blocks = false;
}

void trouble_find(const struct trouble_facts *f, struct trouble *out)
{
    struct decode_nodes d;
    out->cause = TROUBLE_NONE;
    out->blocks = false;
    out->text[0] = 0;
    set_about(out, NULL, NULL);
    count_decode_nodes(f->view, &d);
    if (d.n_usable == 0) find_blocking(f, &d, out);
    else find_degrading(f, out);
}

/* ---- keeping it ---- */

static uint64_t state_of(const struct trouble *t)
{
    return t->cause == TROUBLE_NONE ? 0 : hash_64(t->text, strlen(t->text), t->blocks) | 1;
}

/* Returns the first of the nodes of the logged trouble that is not listed any more, nor another
 * process of its name. NULL: none. */
static const struct trouble_node *find_removed(const struct trouble *t, const struct view *v)
{
    for (size_t i = 0; i < COUNT_OF(t->logged.about); i++) {
        const struct trouble_node *about = &t->logged.about[i];
        bool listed = about->node == v->unproven.node;
        for (size_t k = 0; k < v->n_nodes && !listed; k++)
            listed = v->nodes[k].node == about->node ||
                     (about->name[0] && strcmp(v->nodes[k].name, about->name) == 0);
        if (about->node && !listed) return about;
    }
    return NULL;
}

/* That a node was forgotten is no repair. */
static void log_end(const struct trouble *t, const struct view *v, uint64_t now_ms)
{
    const struct trouble_node *removed = find_removed(t, v);
    double after_s = (double)(now_ms - t->logged.since_ms) * 1e-3;
    if (removed)
        log_warn("node removed from the list",
                 "node=%s cause=%s after_s=%.1f requests_failed=%u repeats=%u why=\"its record has "
                 "ended or it has left, so it is not expected any more; start it again if it is "
                 "missing\"",
                 removed->name, trouble_name(t->logged.cause), after_s, t->logged.n_requests,
                 t->logged.n_unlogged);
    else
        log_info("trouble is over", "cause=%s after_s=%.1f requests_failed=%u repeats=%u",
                 trouble_name(t->logged.cause), after_s, t->logged.n_requests,
                 t->logged.n_unlogged);
}

static void log_state(struct trouble *t, const struct view *v, uint64_t now_ms)
{
    if (t->cause == TROUBLE_NONE) log_end(t, v, now_ms);
    else
        log_warn(t->blocks ? "not ready" : "degraded", "cause=%s repeats=%u why=\"%s\"",
                 trouble_name(t->cause), t->logged.n_unlogged, t->text);
    t->logged.state = state_of(t);
    t->logged.cause = t->cause;
    memcpy(t->logged.about, t->about, sizeof t->about);
    t->logged.since_ms = now_ms;
    t->logged.n_requests = t->logged.n_unlogged = 0;
}

/* Each change is a line. When they are many within a minute, a state is logged once it has lasted
 * for a while: so the last line always says how things are. */
static void log_if_due(struct trouble *t, const struct view *v, uint64_t now_ms)
{
    if (state_of(t) == t->logged.state) return;
    if (now_ms - t->logged.t_minute_ms >= 60000) {
        t->logged.t_minute_ms = now_ms;
        t->logged.n_lines = 0;
    }
    if (t->logged.n_lines >= LINES_A_MINUTE && now_ms - t->since_ms < LASTING_MS) return;
    t->logged.n_lines++;
    log_state(t, v, now_ms);
}

void trouble_update(struct trouble *t, const struct trouble_facts *f, uint64_t now_ms)
{
    const struct trouble before = *t;
    trouble_find(f, t);
    bool same = t->cause == before.cause && t->blocks == before.blocks &&
                strcmp(t->text, before.text) == 0;
    if (!same) {
        t->logged.n_requests += t->n_requests;
        t->logged.n_unlogged += state_of(&before) != t->logged.state;
        t->since_ms = now_ms;
        t->n_requests = 0;
    }
    log_if_due(t, f->view, now_ms);
}

void trouble_write(const struct trouble *t, uint64_t now_ms, struct buf *out)
{
    if (t->cause == TROUBLE_NONE) {
        buf_add_c(out, "null");
        return;
    }
    buf_printf(out, "{\"cause\":\"%s\",\"blocks\":%s,\"since_s\":%llu,\"requests\":%u,\"text\":",
               trouble_name(t->cause), t->blocks ? "true" : "false",
               (unsigned long long)(now_ms - t->since_ms) / 1000, t->n_requests);
    json_add_string(out, str_of(t->text));
    buf_add_char(out, '}');
}
