/* node.c - see node.h. */
#include "deploy/node/node.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "deploy/node/node_internal.h"
#include "deploy/node/not_ready.h"
#include "deploy/probe/probe_wire.h"
#include "kernels/host/host_memory.h"
#include "scheduler/directory/wire.h"
#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/hash/hash.h"
#include "shared/base/log.h"
#include "shared/net/open_files.h"

enum {
    EXIT_DEVICE = 70,     /* the GPU failed */
    MAX_TRANSFERS = 4096, /* parts: nodes of several ranks send several of one prompt */
    /* How long a transfer may wait for its sender to compute, a long chunk on a slow CPU. Nothing
     * that is broken waits for it: bytes that do not move end a transfer within KVT_MOVE_MS, an
     * OPEN or FINISH without an answer within KVT_ANSWER_MS, dead and frozen peers end with their
     * links, and an engine without progress with those of its node. */
    STALL_MS = 60000,
    HOST_TIER_SPARE = 8, /* one part of so many of the free memory is left to others */
    EMPTIED_MS = 1000 /* within which nodes are back in a directory that was flushed: a renewal */
};

static const double GIB = 1 << 30;

/* ---- cluster ---- */

/* `baton doctor --peers` reached a node: measuring would disturb its traffic, so it only answers
 * who it is. */
static void refuse_probe(struct node *n, const struct cluster_message *m)
{
    struct buf body = { 0 };
    probe_refusal_encode(n->name, node_role_name(n->o.role), &body);
    enum status st = cluster_send(n->cluster, m->from, FRAME_PROBE_REPLY, m->request, m->attempt,
                                  buf_str(&body));
    (void)st; /* the asking peer is gone already */
    buf_release(&body);
}

/* A process may be a rank of two groups. */
static bool on_group_message(struct node *n, const struct cluster_message *m)
{
    return (n->ranks.group && group_on_message(n->ranks.group, m)) ||
           (n->group && group_on_message(n->group, m)) || group_refuse(n->cluster, m);
}

static void on_message(void *arg, const struct cluster_message *m)
{
    struct node *n = arg;
    if (n->state == NODE_STOPPING) return;
    if (m->type == FRAME_PROBE) {
        refuse_probe(n, m);
        return;
    }
    if (on_group_message(n, m)) return;
    if (n->ranks.tiers && node_tiers_on_message(n->ranks.tiers, m)) return;
    if (n->ranks.decode) {
        if (decode_follow_on_message(n->ranks.decode, m)) return;
        prefill_follow_on_message(n->ranks.prefill, m);
        return;
    }
    if (n->state == NODE_LOADING) return; /* nobody has been told that this node takes work */
    if (scheduler_on_message(n->scheduler, m) || n->o.no_engine) return;
    /* CANCEL concerns both workers, so each returns false for it. */
    if (prefill_on_message(n->prefill, m)) return;
    if (decode_on_message(n->decode, m)) return;
}

static void on_lost(void *arg, uint64_t node, const char *why)
{
    struct node *n = arg;
    if (n->state == NODE_STOPPING) return;
    if (n->group) group_on_lost(n->group, node, why);
    if (n->ranks.group) group_on_lost(n->ranks.group, node, why);
    if (n->ranks.decode) {
        decode_follow_on_lost(n->ranks.decode, node);
        prefill_follow_on_lost(n->ranks.prefill, node);
    }
    if (!n->scheduler) return;
    scheduler_on_lost(n->scheduler, node, why);
    if (n->o.no_engine) return;
    prefill_on_lost(n->prefill, node);
    decode_on_lost(n->decode, node);
}

static void on_met(void *arg, uint32_t kind, uint64_t node)
{
    struct node *n = arg;
    struct group *g = kind == GROUP_OF_NODE ? n->ranks.group : n->group;
    if (g) group_on_met(g, node);
}

static void report_progress(void *arg, uint64_t *counter, bool *has_work)
{
    struct node *n = arg;
    struct engine_stats st = { 0 };
    /* No engine during the stop, while links are still up. */
    if (n->engine) engine_get_stats(n->engine, &st);
    *counter = st.progress;
    *has_work = st.has_work;
}

/* ---- HTTP before and after ready ---- */

void node_say_why(struct node *n, struct buf *out)
{
    char why[ERR_TEXT_MAX + GROUP_WHY_MAX] = "the model is being loaded";
    if (n->state != NODE_LOADING) snprintf(why, sizeof why, "the node is shutting down");
    else if (n->router) snprintf(why, sizeof why, "%s", node_router_why(n));
    else if (n->front.loaded) snprintf(why, sizeof why, "its ranks are starting%s", n->front.why);
    else if (n->ranks.is_loaded && !n->ranks.is_one)
        (void)group_describe(n->ranks.group, why, sizeof why);
    else if (n->group && n->engine) (void)group_describe(n->group, why, sizeof why);
    buf_add_c(out, why);
}

static void say_not_ready(struct node *n, struct http_exchange *x)
{
    struct buf why = { 0 };
    node_say_why(n, &why);
    const bool is_asked = n->state == NODE_LOADING && !n->router &&
                          not_ready_asks_cluster(x, &n->o.tenants);
    if (is_asked) node_describe_loading(n, why.data, x);
    else not_ready_reply(x, why.data);
    buf_release(&why);
}

void node_serve_or_say_why(void *node, struct http_exchange *x)
{
    struct node *n = node;
    if (str_eq_c(http_path(x), "/metrics")) node_probes_scrape(n);
    if (n->serve) serve_http(n->serve, x);
    else say_not_ready(n, x);
}

static void on_http(void *arg, struct http_exchange *x)
{
    struct node *n = arg;
    if (node_mount_http(n, x) || node_router_http(n, x)) return;
    struct not_ready_pass o = {
        .passer = n->passer,
        .tenants = &n->o.tenants,
        .otherwise = node_serve_or_say_why,
        .arg = n,
    };
    if (n->serve || n->state != NODE_LOADING || !not_ready_pass(&o, x)) node_serve_or_say_why(n, x);
}

static void on_admin(void *arg, struct http_exchange *x)
{
    struct node *n = arg;
    if (str_eq_c(http_path(x), "/metrics")) node_probes_scrape(n);
    if (n->serve) serve_http_admin(n->serve, x);
    else say_not_ready(n, x);
}

/* Of one of several processes: what they share is not asked for here. */
static void on_worker_http(void *arg, struct http_exchange *x) { node_serve_or_say_why(arg, x); }

static enum status start_worker_port(struct node *n, const struct http_server_options *like,
                                     struct err *err)
{
    struct http_server_options o = *like;
    o.host = "127.0.0.1";
    o.port = n->o.worker.port;
    o.option = "--worker-port";
    o.share_port = false;
    o.handler = on_worker_http;
    o.metrics = NULL;
    return http_server_start(&o, &n->admin, err);
}

/* A conflict names the option that can be given: a launcher's user has the plural ones. */
static enum status start_http(struct node *n, struct err *err)
{
    bool launched = launcher_watch_has_launcher();
    struct http_server_options o = {
        .loop = n->loop,
        .host = n->o.host,
        .port = n->o.port,
        .option = launched ? "--ports" : "--port",
        .share_port = n->o.worker.port != 0,
        .limits = n->o.http_limits,
        .handler = on_http,
        .arg = n,
        .metrics = n->metrics,
    };
    if (!n->o.http) return OK;
    o.limits.small_body_paths = DIRECTORY_PATH;
    o.limits.small_body_bytes = DIRECTORY_BODY_MAX;
    if (n->o.api) TRY(http_server_start(&o, &n->http, err));
    if (n->o.worker.port) return start_worker_port(n, &o, err);
    TRY(node_probes_start(n, &o, err));
    if (n->o.metrics_port == 0 || n->o.metrics_port == n->o.port) return OK;
    o.port = n->o.metrics_port;
    o.option = launched ? "--metrics-ports" : "--metrics-port";
    o.handler = on_admin;
    return http_server_start(&o, &n->admin, err);
}

/* ---- ready ---- */

/* The GPU failed, and nothing that this process holds there is usable, or the node has lost one of
 * its ranks: it ends at once. Its connections close; peers and entry nodes notice within
 * milliseconds and use other nodes, and the supervisor starts a new process. Thread: engine. */
static void on_fault(void *arg, const struct err *err)
{
    struct node *n = arg;
    if (atomic_load(&n->ends)) return;
    if (atomic_load(&n->ranks.is_lost))
        log_error("node ends", "why=\"of this node, %s\"", n->ranks.lost_why);
    else log_error("node ends", "why=\"%s\"", err->text);
    _exit(node_is_several(n) ? LAUNCHER_START_AGAIN : EXIT_DEVICE);
}

/* How long sequences may be and how many KV blocks there are. Thread: a worker. */
static enum status choose_sizes(struct node *n, struct err *err)
{
    struct node_options *o = &n->o;
    if (o->max_model_len > n->model.weights->max_len) {
        log_info("context limited by the model", "asked=%u positions=%u", o->max_model_len,
                 n->model.weights->max_len);
        o->max_model_len = n->model.weights->max_len;
    }
    snprintf(n->precision, sizeof n->precision, "%s", n->model.weights->precision);
    TRY(node_model_prepare(n->model.weights, o, err));
    if (n->model.draft_kernels) TRY(node_model_prepare(n->model.draft, o, err));
    return node_model_blocks(n->model.weights, n->model.draft, o, &o->n_blocks, err);
}

/* Nobody must take the times of such a node for measured ones. */
static void warn_of_pace(const struct node_options *o)
{
    if (o->pace_file)
        log_warn("steps are paced",
                 "file=%s of=\"%s\" why=\"--pace: they last as long as those of another machine, "
                 "and no time that this node tells was measured on this one\"",
                 o->pace_file, o->pace.about);
    if (o->fault_text)
        log_warn("faults are injected into the engine", "plan=\"%s\"", o->fault_text);
}

/* --swap-space, or what this host's ranks can have of it: its pages are taken when they are used,
 * and by then it would be too late to say that there are none. */
void node_limit_host_tier(struct node *n)
{
    struct node_options *o = &n->o;
    struct kv_layout l;
    model_kv_layout(n->model.weights, o->block_tokens, o->n_blocks, &l);
    const uint64_t pool = n->model.weights->kernels->device->is_host ? kv_layout_pool_bytes(&l) : 0,
                   available = host_memory_available() / (o->n_host_ranks ? o->n_host_ranks : 1),
                   left = available > pool ? available - pool : 0,
                   most = left - left / HOST_TIER_SPARE;
    if (o->tiers.host_bytes <= most) return;
    log_warn("less swap space than asked for",
             "asked_gib=%.1f gib=%.1f why=\"the host has %.1f GiB "
             "free for this rank, and the KV cache takes %.1f\"",
             (double)o->tiers.host_bytes / GIB, (double)most / GIB, (double)available / GIB,
             (double)pool / GIB);
    o->tiers.host_bytes = most < kv_layout_block_bytes(&l) ? 0 : most;
}

/* NULL: no memories behind the KV pool. The ranks of a node have agreed on theirs. */
static const struct kv_store_options *tiers_of(struct node *n)
{
    struct node_options *o = &n->o;
    if (!o->tiers.host_bytes && !o->tiers.disk.folder) return NULL;
    if (n->ranks.tiers) o->tiers.ranks = node_tiers_ranks(n->ranks.tiers);
    else node_limit_host_tier(n);
    return o->tiers.host_bytes || o->tiers.disk.folder ? &o->tiers : NULL;
}

static enum status start_engine(struct node *n, struct err *err)
{
    const struct node_options *o = &n->o;
    struct engine_options e = {
        .model = n->model.weights,
        .block_tokens = o->block_tokens,
        .n_blocks = o->n_blocks,
        .max_seqs = o->max_seqs,
        .max_batched_tokens = o->max_batched_tokens,
        .max_waiting = o->max_waiting,
        .prefix_cache = o->prefix_cache,
        .tiers = tiers_of(n),
        .eager = o->eager,
        .pace = o->pace_file ? &o->pace : NULL,
        .fault = o->fault_text ? &o->fault : NULL,
        .draft = &o->draft,
        .metrics = n->metrics,
        .on_event = node_events_of_engine,
        .on_kv_ready = node_events_kv_ready,
        .on_fault = on_fault,
        .follows = node_follows(n),
        .arg = n,
    };
    if (n->ranks.group) e.on_node_bell = node_ranks_of_engine;
    if (n->group && n->model.weights->config.moe.n_experts > 0) {
        TRY(node_balance_check_copies(n->model.weights->config.moe.n_experts,
                                      (uint32_t)o->balance.n_redundant, err));
        e.on_group = node_group_of_engine;
        model_count_rows_on(n->model.weights, n->metrics);
    }
    warn_of_pace(o);
    n->o.draft.draft_model = n->model.draft;
    TRY(engine_create(&e, &n->loaded.engine, err));
    n->model.weights = NULL; /* now the engine's */
    return OK;
}

static enum status start_kvt(struct node *n, struct err *err)
{
    const struct engine *engine = n->loaded.engine;
    node_ports_release(&n->ports);
    struct kvt_options k = {
        .layout = *engine_kv_layout(engine),
        .mem = engine_kv_memory(engine),
        .device = engine_device(engine),
        .protocols = n->o.protocols,
        .named = n->o.protocols_named,
        .listen_host = n->o.cluster_host,
        .port = n->o.kv_port,
        .advertise_host = n->o.advertise_host,
        .checksum = n->o.kv_checksum,
        .n_transfers = MAX_TRANSFERS,
        .stall_ms = STALL_MS,
        .tuning = n->o.tuning,
        .metrics = n->metrics,
        .on_event = node_events_of_kvt,
        .arg = n,
    };
    TRY(kvt_create(&k, &n->loaded.kvt, err));
    struct buf by = { 0 };
    n->kv_host = kvt_reach(n->loaded.kvt, &by);
    snprintf(n->kv_by, sizeof n->kv_by, "%s", by.len ? by.data : "");
    buf_release(&by);
    return OK;
}

enum status node_start_engine(struct node *n, struct err *err)
{
    TRY(start_engine(n, err));
    return start_kvt(n, err);
}

static enum status start_cluster(struct node *n, struct err *err)
{
    struct cluster_options c = {
        .loop = n->loop,
        .listen_host = n->o.cluster_host,
        .port = n->o.cluster_port,
        .name = n->name,
        .node = n->id,
        .secret = n->o.secret,
        .metrics = n->metrics,
        .on_message = on_message,
        .on_lost = on_lost,
        .on_met = on_met,
        .progress = report_progress,
        .arg = n,
    };
    return cluster_create(&c, &n->cluster, err);
}

static void on_directory_up(void *arg)
{
    struct node *n = arg;
    log_debug("directory reached", "backend=%s", n->o.directory);
    if (n->scheduler) scheduler_publish(n->scheduler);
}

static void on_launcher_gone(void *arg)
{
    struct node *n = arg;
    uint16_t port;
    if (launcher_watch_is_behind(&port)) {
        log_warn("node ends", "why=\"the process with its port is gone\"");
        if (n->state == NODE_LOADING || n->state == NODE_READY) node_stop_on_signal(n, SIGTERM);
        return;
    }
    if (n->state == NODE_READY && n->scheduler)
        scheduler_launcher_gone(n->scheduler, launcher_watch_text(n->launcher),
                                launcher_watch_held_view(n->launcher));
}

static void on_directory_down(void *arg, const char *why)
{
    struct node *n = arg;
    launcher_watch_look(n->launcher); /* it may have been the directory server */
    if (n->scheduler) return;         /* it looks for trouble itself */
    log_warn("directory not reachable", "why=\"%s\"", why);
}

static enum status start_directory(struct node *n, struct err *err)
{
    struct directory_options d = {
        .loop = n->loop,
        .topic = n->o.topic,
        .metrics = n->metrics,
        .http_host = n->o.directory_host,
        .http_port = n->o.directory_port,
        .secret = n->o.secret,
        .redis = n->o.redis,
        .on_up = on_directory_up,
        .on_down = on_directory_down,
        .arg = n,
    };
    TRY(directory_open(n->o.directory, &d, &n->directory, err));
    TRY(node_router_start(n, err));
    if (!n->o.serves_directory) return OK;
    return directory_server_start(n->loop, n->directory, n->o.cluster_host, n->o.control_port,
                                  n->o.secret, &n->directory_server, err);
}

static void start_passer(struct node *n)
{
    struct passer_options o = {
        .loop = n->loop,
        .directory = n->directory,
        .metrics = n->metrics,
        .name = n->name,
        .host = n->o.advertise_host,
        .secret = n->o.secret,
        .ttl_s = n->o.ttl_s,
        .unsplit = n->o.unsplit,
        .log_requests = n->o.log_requests,
    };
    if (strcmp(n->o.directory, "local") != 0) { /* else it would know of every node */
        o.wait_first_ms = n->o.grace_ms;
        o.wait_ms = EMPTIED_MS;
    }
    if (n->http && n->o.pass_requests) n->passer = passer_create(&o);
}

static struct scheduler *start_scheduler(struct node *n)
{
    struct scheduler_options s = {
        .loop = n->loop,
        .cluster = n->cluster,
        .directory = n->directory,
        .metrics = n->metrics,
        .tenants = &n->o.tenants,
        .max_requests = n->o.max_requests,
        .ttl_s = n->o.ttl_s,
        .grace_ms = n->o.grace_ms,
        .max_queue_ms = n->o.max_queue_ms,
        .unsplit = n->o.unsplit,
        .topic = n->o.topic,
        .secret = n->o.secret,
        .join = n->can_be_joined ? n->join : NULL,
        .log_requests = n->o.log_requests,
        .model = n->front.model,
        .text = n->router ? n->model.text : 0,
        .model_name = n->router ? n->o.names[0] : NULL,
        .describe = n->o.no_engine ? NULL : node_describe_record,
        .listed = n->o.no_engine ? NULL : node_listed,
        .arg = n,
    };
    return scheduler_create(&s);
}

/* Where peers reach this process. */
static void note_self(struct node *n)
{
    struct group_member *me = &n->ranks.all[0];
    me->node = n->id;
    me->port = cluster_port(n->cluster);
    snprintf(me->host, sizeof me->host, "%s", n->o.advertise_host);
}

static void start_engine_workers(struct node *n)
{
    const uint32_t n_ranks = n->ranks.group ? n->o.tp.size : 1;
    uint64_t followers[KV_RANKS_MAX];
    note_self(n);
    for (uint32_t r = 1; r < n_ranks; r++) followers[r - 1] = n->ranks.all[r].node;
    struct decode_options d = {
        .loop = n->loop,
        .engine = n->engine,
        .kvt = n->kvt,
        .cluster = n->cluster,
        .metrics = n->metrics,
        .max_decode_seqs = n->o.max_waiting + n->o.max_seqs,
        .resume_window_ms = n->o.resume_ms,
        .id_base = DECODE_IDS,
        .ranks = n->ranks.all,
        .n_ranks = n_ranks,
    };
    struct prefill_options p = {
        .loop = n->loop,
        .engine = n->engine,
        .kvt = n->kvt,
        .cluster = n->cluster,
        .metrics = n->metrics,
        .step_tokens = n->o.max_batched_tokens,
        .max_prompts = n->o.max_waiting,
        .id_base = PREFILL_IDS,
        .followers = followers,
        .n_followers = n_ranks - 1,
    };
    n->decode = decode_create(&d);
    n->prefill = prefill_create(&p);
    node_role_start(n);
}

static void start_workers(struct node *n)
{
    if (!n->o.no_engine) start_engine_workers(n);
    n->scheduler = start_scheduler(n);
    if (!n->passer) return;
    passer_set_model(n->passer, n->o.no_engine ? n->front.model
                                               : engine_kv_layout(n->engine)->model_fingerprint);
    passer_use_view(n->passer, scheduler_view(n->scheduler));
}

static enum status start_serve(struct node *n, struct err *err)
{
    struct serve_options s = {
        .loop = n->loop,
        .backend = scheduler_backend(n->scheduler),
        .tokenizer = n->model.tokenizer,
        .chat = n->model.chat,
        .reasoning = n->model.reasoning,
        .tools = n->model.tools,
        .metrics = n->metrics,
        .n_names = n->o.n_names,
        .max_model_len = n->o.max_model_len,
        .n_vocab = n->model.n_vocab,
        .max_dec_len = n->o.max_dec_len,
        .any_temperature = n->o.any_temperature,
        .last_item_alone = n->o.last_item_alone,
        .tenants = &n->o.tenants,
        .version = BATON_VERSION,
        .describe = node_describe_json,
        .describe_arg = n,
        .defaults = {
            .temperature = n->model.generation.temperature,
            .top_p = n->model.generation.top_p,
            .min_p = n->model.generation.min_p,
            .repetition_penalty = n->model.generation.repetition_penalty,
            .top_k = n->model.generation.top_k,
        },
    };
    if (n->passer) s.passer = passer_when_full(n->passer);
    for (size_t i = 0; i < n->o.n_names; i++) s.names[i] = n->o.names[i];
    return serve_create(&s, &n->serve, err);
}

static enum status make_ready(struct node *n, struct err *err)
{
    n->state = NODE_READY;
    if (node_follows(n)) return OK;
    node_describe_join(n);
    start_workers(n);
    if (launcher_watch_is_gone(n->launcher)) on_launcher_gone(n);
    return start_serve(n, err);
}

/* All that may take seconds: the weights, a KV pool that the kernel fills with zeros, CUDA graphs,
 * memory that an RDMA device pins. The loop sees signals meanwhile. Thread: a worker. */
static void load(void *arg)
{
    struct node *n = arg;
    if (n->o.no_engine) {
        node_front_load(n);
        return;
    }
    enum status st = node_model_load(&n->model, &n->o, &n->stop_loading, &n->load_err);
    if (st == OK && atomic_load(&n->stop_loading)) st = ERR_CANCELED;
    if (st == OK) st = choose_sizes(n, &n->load_err);
    if (st == OK && !n->ranks.group) st = node_start_engine(n, &n->load_err);
    n->load_st = st;
}

void node_fail_start(struct node *n)
{
    log_fatal("baton", n->load_err.text);
    if (n->front.on_failed) n->front.on_failed(n->front.failed_arg); /* its ranks end first */
    else node_stop(n, 1);
}

void node_become_ready(struct node *n)
{
    if (make_ready(n, &n->load_err) != OK) {
        node_fail_start(n);
        return;
    }
    gauge_set(n->ready_gauge, 1);
    node_describe_ready(n);
    if (n->on_ready) n->on_ready(n->on_ready_arg);
}

static void on_loaded(void *arg)
{
    struct node *n = arg;
    n->engine = n->loaded.engine;
    n->kvt = n->loaded.kvt;
    if (n->state == NODE_STOPPING)
        return; /* node_free frees them, if this is the loop's last turn */
    if (n->load_st != OK && node_router_failed(n)) return;
    if (n->load_st != OK) node_fail_start(n);
    else if (n->router) node_router_loaded(n);
    else if (n->o.no_engine) node_front_loaded(n);
    else if (n->ranks.group) node_ranks_loaded(n);
    else if (!node_group_awaits(n)) node_become_ready(n);
}

/* ---- life ---- */

enum { CONNECTIONS_MIN = 16 };

/* Connections that the process has no descriptor for would wait without a word: there are so many
 * fewer that a further one is told 503. */
static void raise_limits(struct node_options *o)
{
    uint32_t *most = &o->http_limits.n_connections;
    const uint64_t n_ports = o->http ? 1 + (o->grpc_port != 0) : 0, allowed = open_files_raise(),
                   wanted = open_files_wanted(n_ports * *most),
                   missing = allowed < wanted ? wanted - allowed : 0;
    if (!missing) return;
    log_warn("too few open files",
             "allowed=%llu wanted=%llu why=\"--max-connections %u promises more connections "
             "than this process may have open; raise the hard limit (ulimit -Hn %llu, "
             "LimitNOFILE= of systemd) or lower it\"",
             (unsigned long long)allowed, (unsigned long long)wanted, *most,
             (unsigned long long)wanted);
    const uint64_t fewer = n_ports ? (missing + n_ports - 1) / n_ports : 0; /* at each port */
    if (*most) *most = *most > fewer + CONNECTIONS_MIN ? *most - (uint32_t)fewer : CONNECTIONS_MIN;
}

/* Every port is bound before the model is loaded, so that a conflict shows at once. */
static enum status open_ports(struct node *n, struct err *err)
{
    const struct node_options *o = &n->o;
    TRY(start_http(n, err));
    TRY(node_grpc_start(n, err));
    uint16_t port = n->http ? http_server_port(n->http) : o->http ? o->grpc_port : 0;
    char at[HOST_PORT_TEXT_MAX];
    if (node_follows(n)) /* it has no port of the API: rank 1 of the node whose ranks meet there */
        snprintf(n->name, sizeof n->name, "%.*s/%u", (int)sizeof n->name - 8,
                 host_port_text(o->advertise_host, o->tp.port, at), o->tp.rank);
    else
        snprintf(n->name, sizeof n->name, "%.*s", (int)sizeof n->name - 1,
                 host_port_text(o->advertise_host, port, at));
    log_set_name(n->name);
    n->launcher = launcher_watch_start(n->loop, on_launcher_gone, n);
    TRY(start_cluster(n, err));
    node_ranks_start(n);
    node_group_start(n);
    TRY(start_directory(n, err));
    start_passer(n);
    return o->no_engine ? OK : node_ports_hold(o, &n->ports, err);
}

enum status node_create(const struct node_options *o, struct node **out, struct err *err)
{
    struct node *n = MEM_NEW(struct node);
    n->o = *o;
    n->t_start_ms = clock_ms();
    n->ports = NODE_PORTS_NONE;
    while (n->id == 0) random_bytes(&n->id, sizeof n->id);
    n->metrics = metrics_create();
    node_events_create(n);
    n->ready_gauge = metrics_gauge(n->metrics, "baton_ready", "",
                                   "1 when this node takes requests.");
    n->loop_delay = metrics_gauge(n->metrics, "baton_loop_delay_seconds", "",
                                  "Longest turn of the loop thread since the last renewal.");
    raise_limits(&n->o);
    enum status st = loop_create(&n->loop, err);
    n->text_server.loop = n->loop;
    if (st == OK) st = open_ports(n, err);
    if (st != OK) {
        node_free(n);
        return st;
    }
    *out = n;
    return OK;
}

void node_begin_loading(void *node)
{
    struct node *n = node;
    if (loop_work(n->loop, load, on_loaded, n) != OK) node_stop(n, 1);
}

static void begin(void *arg)
{
    struct node *n = arg;
    if (n->router) node_router_begin(n);
    else node_begin_loading(n);
}

int node_run(struct node *n)
{
    loop_on_signal(n->loop, node_stop_on_signal, n);
    enum status st = loop_post(n->loop, begin, n);
    ASSERT(st == OK); /* the queue of a new loop is empty */
    loop_run(n->loop);
    return n->exit_status;
}

void node_free(struct node *n)
{
    if (!n) return;
    /* The loop never ran: run it to close the ports. */
    if (n->http || n->admin || n->health || n->grpc || n->cluster) {
        node_stop(n, 1);
        loop_run(n->loop);
    }
    node_router_free(n);
    node_ports_release(&n->ports);
    mailbox_close(n->events);
    kvt_free(n->kvt); /* these two: when the load ended after the stop */
    engine_free(n->engine);
    node_events_free(n);
    node_model_release(&n->model);
    loop_free(n->loop);
    metrics_free(n->metrics);
    mem_free(n);
}

void node_on_ready(struct node *n, void (*fn)(void *arg), void *arg)
{
    n->on_ready = fn;
    n->on_ready_arg = arg;
}

void node_on_signal(struct node *n, void (*fn)(void *arg), void *arg)
{
    n->on_signal = fn;
    n->on_signal_arg = arg;
}

struct serve *node_serve(struct node *n) { return n->serve; }

struct loop *node_loop(struct node *n) { return n->loop; }

uint16_t node_http_port(const struct node *n) { return n->http ? http_server_port(n->http) : 0; }

uint16_t node_directory_port(const struct node *n)
{
    return n->directory_server ? directory_server_port(n->directory_server) : 0;
}
