/* node_describe.c - what a node says of itself: its record in the directory, members of /version
 * and /cluster, its ready line, how others join it, its health and load. Thread: loop. */
#include <stdio.h>
#include <string.h>

#include "deploy/node/node_internal.h"
#include "deploy/node/node_placement.h"
#include "deploy/node/node_traffic.h"
#include "kernels/backend.h"
#include "scheduler/directory/redis/redis_advice.h"
#include "scheduler/view.h"
#include "shared/base/clock.h"
#include "shared/base/json/json.h"
#include "shared/base/log.h"

enum { APART_MS = 3000 };

/* A rank whose group lost another one for longer than a restart takes gets no more requests. */
static bool is_apart(const struct node *n)
{
    return n->group && group_apart_ms(n->group) > APART_MS;
}

static void describe_followers(const struct node *n, struct node_record *me)
{
    const struct group_roster *r = group_now(n->ranks.group);
    for (uint32_t i = 1; i < r->n; i++) {
        struct node_rank *f = &me->followers[me->n_followers++];
        f->process = r->members[i].node;
        f->port = r->members[i].port;
        snprintf(f->host, sizeof f->host, "%s", r->members[i].host);
    }
}

/* Groups of two hosts may each meet at the loopback address. */
static void describe_membership(const struct node *n, struct node_group *g)
{
    char at[HOST_PORT_TEXT_MAX];
    const char *meets = n->o.group.host;
    if (host_is_loopback(meets)) meets = n->o.advertise_host;
    snprintf(g->name, sizeof g->name, "%.*s", (int)sizeof g->name - 1,
             host_port_text(meets, n->o.group.port, at));
    g->rank = n->o.group.rank;
    g->size = n->o.group.size;
    g->epoch = group_now(n->group)->epoch;
    g->is_whole = group_is_whole(n->group);
}

/* Of this node's group, and of the node itself; and what clients that come back find on it. */
static void describe_whole(const struct node *n, struct node_record *me)
{
    me->resume_ms = n->o.resume_ms;
    me->deterministic = kernel_is_deterministic(engine_model(n->engine)->kernels);
    if (n->group) describe_membership(n, &me->group);
    if (n->ranks.group) describe_followers(n, me);
}

static void describe_names(const struct node *n, const struct kv_layout *l, struct node_record *me)
{
    snprintf(me->name, sizeof me->name, "%s", n->name);
    snprintf(me->topic, sizeof me->topic, "%s", n->o.topic);
    snprintf(me->model_name, sizeof me->model_name, "%s", n->o.names[0]);
    node_record_set_served(me, n->o.names, n->o.n_names);
    snprintf(me->precision, sizeof me->precision, "%s", n->precision);
    snprintf(me->kv_type, sizeof me->kv_type, "%s", kv_dtype_name(l->dtype));
    snprintf(me->kv_by, sizeof me->kv_by, "%s", n->kv_by);
    snprintf(me->host, sizeof me->host, "%s", n->o.advertise_host);
}

void node_describe_record(void *arg, struct node_record *me)
{
    struct node *n = arg;
    struct engine_stats st;
    const struct kv_layout *l = engine_kv_layout(n->engine);
    engine_get_stats(n->engine, &st);
    *me = (struct node_record){
        .node = n->id,
        .role = n->o.role,
        .cluster_port = cluster_port(n->cluster),
        .http_port = n->http ? http_server_port(n->http) : 0,
        .model = l->model_fingerprint,
        .text = n->model.text,
        .kv_lossy = n->o.tuning.lossy,
        .kv_host = n->kv_host,
        .max_seqs = n->o.max_seqs,
        .n_blocks = l->n_blocks,
        .block_tokens = l->block_tokens,
        .max_model_len = n->o.max_model_len,
        .prefix_cache = n->o.prefix_cache,
        .draining = n->state != NODE_READY || is_apart(n),
        .n_running = st.n_running + st.n_reserved,
        .n_waiting = st.n_waiting,
        .n_blocks_free = st.n_blocks_free,
        .n_requests = n->scheduler ? scheduler_n_requests(n->scheduler) : 0,
        .max_requests = n->o.max_requests == UINT32_MAX ? 0 : n->o.max_requests,
        .waiting_tokens = st.waiting_tokens,
        .prefill_tokens_per_s = st.prefill_tokens_per_s,
        .step_us = st.step_us,
        .progress = st.progress,
        .has_work = st.has_work,
    };
    describe_whole(n, me);
    describe_names(n, l, me);
    node_record_prove(me, n->o.secret);
    gauge_set(n->loop_delay, loop_take_max_delay_ms(n->loop) * 1e-3);
}

/* As a shell reads it as one word. */
static void add_shell_word(struct buf *out, const char *word)
{
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                "_./:@%+=,-";
    if (word[0] && !word[strspn(word, plain)]) {
        buf_add_c(out, word);
        return;
    }
    buf_add_char(out, '\'');
    for (; *word; word++) {
        if (*word == '\'') buf_add_c(out, "'\\''");
        else buf_add_char(out, *word);
    }
    buf_add_char(out, '\'');
}

/* Adds what the command of another node needs beside the directory: the model, and where all nodes
 * are of one host, a port, since this one may have the default. Without room for all it adds
 * nothing. */
static void add_needs(struct node *n)
{
    const struct node_options *o = &n->o;
    struct buf more = { 0 };
    const size_t used = strlen(n->join);
    if (o->model) {
        buf_add_c(&more, " --model ");
        add_shell_word(&more, o->model);
    } else if (n->router) { /* which takes that of its nodes, and knows no path of it */
        buf_add_c(&more, " --model MODEL");
    }
    if (host_is_loopback(o->advertise_host)) buf_add_c(&more, " --port 0");
    if (used && more.len && used + more.len < sizeof n->join)
        memcpy(n->join + used, more.data, more.len + 1);
    buf_release(&more);
}

static void describe_directory(struct node *n)
{
    const struct node_options *o = &n->o;
    char at[HOST_PORT_TEXT_MAX], flags[DIRECTORY_REDIS_FLAGS_MAX];
    if (strcmp(o->directory, "redis") == 0)
        snprintf(n->join, sizeof n->join, "--scheduler-name splitwise %s --scheduler-topic %s",
                 directory_redis_flags(&o->redis, flags), o->topic);
    else if (strcmp(o->directory, "http") == 0)
        snprintf(n->join, sizeof n->join, "--router %s",
                 host_port_text(o->directory_host, o->directory_port, at));
    else if (n->router)
        snprintf(n->join, sizeof n->join, "--router %s",
                 host_port_text(o->advertise_host, http_server_port(n->http), at));
    else if (n->directory_server)
        snprintf(n->join, sizeof n->join, "--router %s",
                 host_port_text(o->advertise_host, directory_server_port(n->directory_server), at));
}

void node_describe_join(struct node *n)
{
    const char *directory = n->o.directory;
    n->can_be_joined = strcmp(directory, "local") != 0 || n->directory_server || n->router;
    if (launcher_watch_own_secret(n->launcher) || n->o.own_secret) return;
    describe_directory(n);
    add_needs(n);
}

/* How many experts this rank has in the group of a roster. */
static int32_t experts_of(const struct node *n, const struct group_roster *now)
{
    struct balance_out p;
    struct err err;
    const int32_t me = group_roster_find(now, n->o.group.rank);
    if (me < 0) return 0; /* also while there is no engine yet */
    const int32_t n_experts = (int32_t)engine_model(n->engine)->config.moe.n_experts;
    if (node_placement_read(now, n_experts, &p, &err) != OK) return 0;
    const int32_t mine = p.first[me + 1] - p.first[me];
    balance_release(&p);
    return mine;
}

/* As in the node's log: which curve its steps last by. */
static void describe_pace(const struct node *n, struct buf *out)
{
    if (!n->o.pace_file) return;
    buf_add_c(out, ",\"pace\":{\"file\":");
    json_add_string(out, str_of(n->o.pace_file));
    buf_add_c(out, ",\"about\":");
    json_add_string(out, str_of(n->o.pace.about));
    buf_add_char(out, '}');
}

static void describe_group(const struct node *n, struct buf *out)
{
    char why[GROUP_WHY_MAX], at[HOST_PORT_TEXT_MAX];
    if (!n->group) return;
    const struct group_roster *now = group_now(n->group);
    const bool together = group_describe(n->group, why, sizeof why) == GROUP_TOGETHER;
    buf_add_c(out, ",\"group\":{\"at\":");
    json_add_string(out, str_of(host_port_text(n->o.group.host, n->o.group.port, at)));
    buf_printf(out,
               ",\"rank\":%u,\"size\":%u,\"epoch\":%llu,\"together\":%s,\"leads\":%s,"
               "\"whole\":%s,\"reason\":\"%s\",\"experts\":%d",
               n->o.group.rank, n->o.group.size, (unsigned long long)now->epoch,
               together ? "true" : "false", group_leads(n->group) ? "true" : "false",
               group_is_whole(n->group) ? "true" : "false", group_reason_name(now->reason),
               experts_of(n, now));
    buf_add_c(out, ",\"members\":[");
    for (uint32_t i = 0; together && i < now->n; i++)
        buf_printf(out, "%s%u", i ? "," : "", now->members[i].rank);
    buf_add_c(out, "],\"why\":");
    json_add_string(out, str_of(why));
    if (n->traffic && n->engine) node_traffic_describe(n->traffic, out);
    buf_add_char(out, '}');
}

static const char *role_name(const struct node *n)
{
    return n->o.is_router ? "router" : node_role_name(n->o.role);
}

void node_describe_json(void *arg, bool cluster, struct buf *out)
{
    struct node *n = arg;
    char id[32];
    snprintf(id, sizeof id, "%016llx", (unsigned long long)n->id);
    buf_printf(out, "\"node\":\"%s\",\"name\":", id);
    json_add_string(out, str_of(n->name));
    buf_printf(out, ",\"role\":\"%s\",\"topic\":", role_name(n));
    json_add_string(out, str_of(n->o.topic));
    buf_printf(out,
               ",\"cluster_port\":%u,\"kv_port\":%u,\"live_prefill\":%u,\"live_decode\":%u,\"kv_"
               "transports\":\"",
               cluster_port(n->cluster), n->kvt ? kvt_port(n->kvt) : 0,
               n->prefill ? prefill_n_live(n->prefill) : 0,
               n->decode ? decode_n_live(n->decode) : 0);
    if (n->kvt) kvt_available(n->kvt, out);
    buf_add_char(out, '"');
    if (!cluster) return;
    const uint64_t model = n->router        ? scheduler_view(n->scheduler)->model
                           : n->o.no_engine ? n->front.model
                                            : engine_kv_layout(n->engine)->model_fingerprint;
    buf_printf(out, ",\"model_id\":\"%016llx\",\"n_nodes\":%zu", (unsigned long long)model,
               scheduler_view(n->scheduler)->n_nodes);
    describe_group(n, out);
    describe_pace(n, out);
    node_router_describe(n, out);
    node_stop_describe(n, out);
    buf_printf(out, ",\"version\":\"%s\",\"uptime_s\":%llu,\"model\":", BATON_VERSION,
               (unsigned long long)(clock_ms() - n->t_start_ms) / 1000);
    json_add_string(out, str_of(n->o.names[0]));
    buf_printf(out, ",\"passed_requests\":%llu,",
               n->passer ? (unsigned long long)passer_n_taken(n->passer) : 0);
    scheduler_describe(n->scheduler, out);
}

void node_describe_loading(struct node *n, const char *why, struct http_exchange *x)
{
    struct buf out = { 0 };
    buf_printf(&out, "{\"version\":\"%s\",\"node\":\"%016llx\",\"name\":", BATON_VERSION,
               (unsigned long long)n->id);
    json_add_string(&out, str_of(n->name));
    buf_printf(&out, ",\"role\":\"%s\",\"topic\":", role_name(n));
    json_add_string(&out, str_of(n->o.topic));
    buf_add_c(&out, ",\"model\":");
    json_add_string(&out, str_of(n->o.names[0]));
    buf_printf(&out, ",\"cluster_port\":%u,\"uptime_s\":%llu,\"loading\":true,\"why\":",
               cluster_port(n->cluster), (unsigned long long)(clock_ms() - n->t_start_ms) / 1000);
    json_add_string(&out, str_of(why));
    describe_group(n, &out);
    buf_add_c(&out, ",\"n_nodes\":0,\"failures\":[],\"trouble\":null,\"nodes\":[]}");
    http_reply(x, 200, "application/json", NULL, buf_str(&out));
    buf_release(&out);
}

static void front_ready(const struct node *n)
{
    log_info("node ready",
             "name=%s role=%s topic=%s model=%s after_s=%.1f http=%s:%u directory=%s "
             "grpc_port=%u",
             n->name, role_name(n), n->o.topic, n->o.names[0],
             (double)(clock_ms() - n->t_start_ms) * 1e-3, n->o.host, node_http_port(n),
             n->o.directory, n->grpc ? kserve_port(n->grpc) : 0);
}

void node_describe_ready(struct node *n)
{
    if (n->o.no_engine) {
        front_ready(n);
        return;
    }
    const struct kv_layout *l = engine_kv_layout(n->engine);
    double gib = (double)kv_layout_pool_bytes(l) / (1 << 30);
    uint64_t tokens = (uint64_t)l->n_blocks * l->block_tokens;
    struct buf kv_by = { 0 };
    if (n->kvt) kvt_available(n->kvt, &kv_by);
    log_info("node ready",
             "name=%s role=%s topic=%s model=%s after_s=%.1f kv_type=%s kv_blocks=%u "
             "kv_tokens=%llu kv_gib=%.2f full_context_requests=%.1f http=%s:%u "
             "cluster=%s:%u kv_port=%u kv_by=%s directory=%s "
             "grpc_port=%u",
             n->name, node_role_name(n->o.role), n->o.topic, n->o.names[0],
             (double)(clock_ms() - n->t_start_ms) * 1e-3, kv_dtype_name(l->dtype), l->n_blocks,
             (unsigned long long)tokens, gib, (double)tokens / n->o.max_model_len, n->o.host,
             n->http ? http_server_port(n->http) : 0, n->o.cluster_host, cluster_port(n->cluster),
             n->kvt ? kvt_port(n->kvt) : 0, n->kvt ? kv_by.data : "", n->o.directory,
             n->grpc ? kserve_port(n->grpc) : 0);
    buf_release(&kv_by);
}

/* ---- the ports beside the API's, in PaddleNLP's words; of a node without an engine they are about
 * those behind it ---- */

static void look(void *arg, struct health_facts *out)
{
    const struct node *n = arg;
    const struct serve_backend backend = scheduler_backend(n->scheduler);
    struct serve_backend_stats stats = { 0 };
    struct engine_stats engine = { 0 };
    *out = (struct health_facts){ .ready = n->state == NODE_READY && n->serve,
                                  .behind = n->o.no_engine };
    if (n->engine) engine_get_stats(n->engine, &engine);
    out->progress = engine.progress;
    out->has_work = engine.has_work;
    if (!out->ready) return;
    backend.stats(backend.self, &stats);
    out->takes = stats.ready;
}

static void on_stopped(void *arg)
{
    struct node *n = arg;
    n->health = NULL;
    node_stop_goes_on(n);
}

enum status node_probes_start(struct node *n, const struct http_server_options *like,
                              struct err *err)
{
    const struct health_port_options o = {
        .loop = n->loop,
        .like = *like,
        .port = n->o.health_port,
        .option = "--health-port",
        .hang_ms = n->o.hang_ms,
        .look = look,
        .arg = n,
    };
    if (n->o.metrics_port && !n->o.is_router) service_gauges_register(&n->gauges, n->metrics);
    return o.port ? health_port_start(&o, &n->health, err) : OK;
}

void node_probes_stop(struct node *n)
{
    if (n->health) health_port_stop(n->health, on_stopped, n);
}

static void add_node(struct service_load *l, const struct node_record *r)
{
    l->n_running += r->n_running;
    l->max_seqs += r->max_seqs;
    l->n_blocks_free += r->n_blocks_free;
    l->n_blocks += r->n_blocks;
}

void node_probes_scrape(struct node *n)
{
    struct service_load l = { 0 };
    struct node_record me;
    if (!n->gauges.of[0] || !n->serve) return;
    if (!n->o.no_engine) {
        node_describe_record(n, &me);
        add_node(&l, &me);
    } else {
        const struct view *v = scheduler_view(n->scheduler);
        for (size_t i = 0; i < v->n_nodes; i++) add_node(&l, &v->nodes[i]);
    }
    service_gauges_set(&n->gauges, &l);
}
