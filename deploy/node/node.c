/* node.c - see node.h. */
#include "deploy/node/node.h"

#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "decode/decode.h"
#include "deploy/node/end_by_force.h"
#include "deploy/node/launcher_watch.h"
#include "deploy/node/node_model.h"
#include "deploy/node/not_ready.h"
#include "deploy/probe/probe_wire.h"
#include "prefill/prefill.h"
#include "scheduler/directory/server.h"
#include "scheduler/passer.h"
#include "scheduler/scheduler.h"
#include "shared/base/address/host_port.h"
#include "shared/base/address/port.h"
#include "shared/base/clock.h"
#include "shared/base/hash/hash.h"
#include "shared/base/log.h"
#include "shared/base/mailbox.h"
#include "shared/base/thread.h"

enum {
    EXIT_DEVICE = 70,            /* the GPU failed */
    EVENTS = 16384,              /* events waiting for the loop; when full their thread waits */
    EVENTS_PER_ITERATION = 1024, /* keeps one turn of the loop short */
    MAX_TRANSFERS = 1024,
    DRAIN_POLL_MS = 50,
    END_MS = 900,   /* for an orderly end after a signal, */
    GRACE_MS = 300, /* beside what HTTP connections get to take their last answers */
    /* a transfer may wait for a long chunk on a slow CPU; links detect dead and frozen peers */
    STALL_MS = 60000
};
#define DECODE_IDS  (UINT64_C(1) << 56)
#define PREFILL_IDS (UINT64_C(2) << 56)

enum node_state { NODE_LOADING, NODE_READY, NODE_DRAINING, NODE_STOPPING };

/* One event on its way from the engine or transfer thread to the loop. */
struct node_event {
    enum { FROM_ENGINE, FROM_KVT } from;
    union {
        struct engine_event engine;
        struct kvt_event kvt;
    } u;
    int32_t *blocks; /* owned copy of engine.blocks */
};

struct node {
    struct node_options o;
    enum node_state state;
    uint64_t id;
    char name[NODE_NAME_MAX];
    struct loop *loop;
    struct metrics *metrics;
    struct http_server *http, *admin;
    struct node_model model; /* its weights move into the engine */
    struct err load_err;
    enum status load_st;
    atomic_bool stop_loading;
    int kv_port_fd, rdma_port_fd; /* ports held until the transports listen; -1: none */
    struct engine *engine;
    struct mailbox *events;
    struct kvt *kvt;
    char precision[NODE_NAME_MAX], kv_by[KV_BY_MAX]; /* of its record */
    uint64_t kv_host;
    char join[HOST_PORT_TEXT_MAX + 256]; /* trouble.h; "": nobody can */
    struct cluster *cluster;
    struct directory *directory;
    struct directory_server *directory_server;
    struct decode_worker *decode;
    struct prefill_worker *prefill;
    struct scheduler *scheduler;
    struct passer *passer; /* NULL: with --no-pass-requests, and without HTTP */
    struct serve *serve;
    struct loop_timer *drain, *stopper;
    struct launcher_watch *launcher; /* NULL: none started this node */
    uint64_t t_start_ms, t_drain_ms;
    int exit_status, n_signals;
    void (*on_ready)(void *arg);
    void *on_ready_arg;
    void (*on_signal)(void *arg);
    void *on_signal_arg;
    struct gauge *loop_delay, *ready_gauge;
};

/* ---- events to the loop ---- */

static void drain_events(void *arg);

static void wake_loop(void *arg)
{
    struct node *n = arg;
    if (loop_post(n->loop, drain_events, n) != OK)
        log_error("loop does not take events", "node=%s", n->name);
}

/* Posts an event; waits while the mailbox is full. The loop waits for the posting threads only when
 * it stops, after closing the mailbox, so this cannot deadlock. Thread: engine or transfer. */
static void post_event(struct node *n, const struct node_event *ev)
{
    enum status st;
    while ((st = mailbox_post(n->events, ev)) == ERR_FULL) {
        struct timespec pause = { 0, 200 * 1000 };
        nanosleep(&pause, NULL);
    }
    if (st != OK) mem_free(ev->blocks); /* closed: the node is stopping */
}

static void on_engine_event(void *arg, const struct engine_event *e)
{
    struct node_event ev = { .from = FROM_ENGINE };
    ev.u.engine = *e;
    if (e->kind == ENGINE_RESERVED && e->n_blocks)
        ev.blocks = mem_dup(e->blocks, e->n_blocks * sizeof *e->blocks);
    post_event(arg, &ev);
}

static void on_kvt_event(void *arg, const struct kvt_event *e)
{
    struct node_event ev = { .from = FROM_KVT };
    ev.u.kvt = *e;
    post_event(arg, &ev);
}

static void on_kv_ready(void *arg, uint64_t id, uint32_t layer, uint32_t begin, uint32_t end,
                        const int32_t *blocks, uint64_t event)
{
    struct node *n = arg;
    if ((id & PREFILL_IDS) && n->kvt)
        prefill_on_kv_ready(n->kvt, id, layer, begin, end, blocks, event);
}

static void dispatch(struct node *n, struct node_event *ev)
{
    if (ev->from == FROM_ENGINE) {
        ev->u.engine.blocks = ev->blocks;
        if (ev->u.engine.id & DECODE_IDS) decode_on_engine(n->decode, &ev->u.engine);
        else prefill_on_engine(n->prefill, &ev->u.engine);
        return;
    }
    bool of_peer = ev->u.kvt.kind == KVT_CONNECTED || ev->u.kvt.kind == KVT_PEER_LOST;
    if (!of_peer && (ev->u.kvt.id & DECODE_IDS)) decode_on_kvt(n->decode, &ev->u.kvt);
    else prefill_on_kvt(n->prefill, &ev->u.kvt);
}

static void drain_events(void *arg)
{
    struct node *n = arg;
    struct node_event ev;
    int i = 0;
    while (i < EVENTS_PER_ITERATION && mailbox_take(n->events, &ev)) {
        if (n->decode && n->prefill) dispatch(n, &ev);
        mem_free(ev.blocks);
        i++;
    }
    if (n->decode) decode_flush(n->decode);
    /* Continue in the next turn: a post into a mailbox that is not empty does not wake the loop. */
    if (i == EVENTS_PER_ITERATION) wake_loop(n);
}

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

static void on_message(void *arg, const struct cluster_message *m)
{
    struct node *n = arg;
    if (n->state == NODE_STOPPING) return;
    if (m->type == FRAME_PROBE) {
        refuse_probe(n, m);
        return;
    }
    if (n->state == NODE_LOADING) return; /* nobody has been told that this node takes work */
    if (scheduler_on_message(n->scheduler, m)) return;
    /* CANCEL concerns both workers, so each returns false for it. */
    if (prefill_on_message(n->prefill, m)) return;
    if (decode_on_message(n->decode, m)) return;
}

static void on_lost(void *arg, uint64_t node, const char *why)
{
    struct node *n = arg;
    if (n->state == NODE_STOPPING || n->state == NODE_LOADING) return;
    scheduler_on_lost(n->scheduler, node, why);
    prefill_on_lost(n->prefill, node);
    decode_on_lost(n->decode, node);
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

static void describe(void *arg, struct node_record *me)
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
        .kv_lossy = n->o.tuning.lossy,
        .kv_host = n->kv_host,
        .max_seqs = n->o.max_seqs,
        .n_blocks = l->n_blocks,
        .block_tokens = l->block_tokens,
        .max_model_len = n->o.max_model_len,
        .draining = n->state != NODE_READY,
        .n_running = st.n_running + st.n_reserved,
        .n_waiting = st.n_waiting,
        .n_blocks_free = st.n_blocks_free,
        .n_requests = n->scheduler ? scheduler_n_live(n->scheduler) : 0,
        .max_requests = n->o.max_requests == UINT32_MAX ? 0 : n->o.max_requests,
        .waiting_tokens = st.waiting_tokens,
        .progress = st.progress,
        .has_work = st.has_work,
    };
    snprintf(me->name, sizeof me->name, "%s", n->name);
    snprintf(me->topic, sizeof me->topic, "%s", n->o.topic);
    snprintf(me->model_name, sizeof me->model_name, "%s", n->o.names[0]);
    node_record_set_served(me, n->o.names, n->o.n_names);
    snprintf(me->precision, sizeof me->precision, "%s", n->precision);
    snprintf(me->kv_type, sizeof me->kv_type, "%s", kv_dtype_name(l->dtype));
    snprintf(me->kv_by, sizeof me->kv_by, "%s", n->kv_by);
    snprintf(me->host, sizeof me->host, "%s", n->o.advertise_host);
    node_record_prove(me, n->o.secret);
    gauge_set(n->loop_delay, loop_take_max_delay_ms(n->loop) * 1e-3);
}

/* ---- HTTP before and after ready ---- */

static void on_http_unpassed(void *arg, struct http_exchange *x)
{
    struct node *n = arg;
    if (n->serve) serve_http(n->serve, x);
    else not_ready_reply(x, n->state == NODE_LOADING);
}

static void on_http(void *arg, struct http_exchange *x)
{
    struct node *n = arg;
    struct not_ready_pass o = { .passer = n->passer,
                                .keys = n->o.api_keys,
                                .n_keys = n->o.n_api_keys,
                                .otherwise = on_http_unpassed,
                                .arg = n };
    if (n->serve || n->state != NODE_LOADING || !not_ready_pass(&o, x)) on_http_unpassed(n, x);
}

static void on_admin(void *arg, struct http_exchange *x)
{
    struct node *n = arg;
    if (n->serve) serve_http_admin(n->serve, x);
    else not_ready_reply(x, n->state == NODE_LOADING);
}

static enum status start_http(struct node *n, struct err *err)
{
    struct http_server_options o = {
        .loop = n->loop,
        .host = n->o.host,
        .port = n->o.port,
        .option = "--port",
        .limits = n->o.http_limits,
        .handler = on_http,
        .arg = n,
        .metrics = n->metrics,
    };
    if (!n->o.http) return OK;
    TRY(http_server_start(&o, &n->http, err));
    if (n->o.metrics_port == 0 || n->o.metrics_port == n->o.port) return OK;
    o.port = n->o.metrics_port;
    o.option = "--metrics-port";
    o.handler = on_admin;
    return http_server_start(&o, &n->admin, err);
}

/* ---- ready ---- */

/* The GPU failed, and nothing that this process holds there is usable, so it ends at once. Its
 * connections close; peers and entry nodes notice within milliseconds and use other nodes, and the
 * supervisor starts a new process. Thread: engine. */
static void on_fault(void *arg, const struct err *err)
{
    (void)arg;
    log_error("node ends", "why=\"%s\"", err->text);
    _exit(EXIT_DEVICE);
}

static enum status start_engine(struct node *n, struct err *err)
{
    struct node_options *o = &n->o;
    if (o->max_model_len > n->model.weights->max_len) o->max_model_len = n->model.weights->max_len;
    TRY(node_model_prepare(n->model.weights, o, err));
    TRY(node_model_blocks(n->model.weights, o, &o->n_blocks, err));
    struct engine_options e = {
        .model = n->model.weights,
        .block_tokens = o->block_tokens,
        .n_blocks = o->n_blocks,
        .max_seqs = o->max_seqs,
        .max_batched_tokens = o->max_batched_tokens,
        .max_waiting = o->max_waiting,
        .prefix_cache = o->prefix_cache,
        .eager = o->eager,
        .metrics = n->metrics,
        .on_event = on_engine_event,
        .on_kv_ready = on_kv_ready,
        .on_fault = on_fault,
        .arg = n,
    };
    snprintf(n->precision, sizeof n->precision, "%s", n->model.weights->precision);
    TRY(engine_create(&e, &n->engine, err));
    n->model.weights = NULL; /* now the engine's */
    return OK;
}

static void release_port(int *fd)
{
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

static enum status start_kvt(struct node *n, struct err *err)
{
    release_port(&n->kv_port_fd);
    release_port(&n->rdma_port_fd);
    struct kvt_options k = {
        .layout = *engine_kv_layout(n->engine),
        .mem = engine_kv_memory(n->engine),
        .device = engine_device(n->engine),
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
        .on_event = on_kvt_event,
        .arg = n,
    };
    TRY(kvt_create(&k, &n->kvt, err));
    struct buf by = { 0 };
    n->kv_host = kvt_reach(n->kvt, &by);
    snprintf(n->kv_by, sizeof n->kv_by, "%s", by.len ? by.data : "");
    buf_release(&by);
    return OK;
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
    if (n->state == NODE_READY)
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
        .redis_host = n->o.redis_host,
        .redis_port = n->o.redis_port,
        .redis_db = n->o.redis_db,
        .redis_password = n->o.redis_password,
        .on_up = on_directory_up,
        .on_down = on_directory_down,
        .arg = n,
    };
    TRY(directory_open(n->o.directory, &d, &n->directory, err));
    if (!n->o.serves_directory) return OK;
    return directory_server_start(n->loop, n->directory, n->o.cluster_host, n->o.control_port,
                                  n->o.secret, &n->directory_server, err);
}

/* Writes the options by which other nodes join this one's topic (trouble.h). */
static void print_join(struct node *n)
{
    const struct node_options *o = &n->o;
    char at[HOST_PORT_TEXT_MAX];
    if (strcmp(o->directory, "redis") == 0)
        snprintf(n->join, sizeof n->join,
                 "--scheduler-name splitwise --scheduler-host %s --scheduler-port %u "
                 "--scheduler-topic %s",
                 o->redis_host, o->redis_port, o->topic);
    else if (strcmp(o->directory, "http") == 0)
        snprintf(n->join, sizeof n->join, "--router %s",
                 host_port_text(o->directory_host, o->directory_port, at));
    else if (n->directory_server)
        snprintf(n->join, sizeof n->join, "--router %s",
                 host_port_text(o->advertise_host, directory_server_port(n->directory_server), at));
}

static void start_passer(struct node *n)
{
    struct passer_options o = {
        .loop = n->loop,
        .directory = n->directory,
        .metrics = n->metrics,
        .name = n->name,
        .secret = n->o.secret,
        .ttl_s = n->o.ttl_s,
        .log_requests = n->o.log_requests,
    };
    if (n->http && n->o.pass_requests) n->passer = passer_create(&o);
}

static struct scheduler *start_scheduler(struct node *n)
{
    struct scheduler_options s = {
        .loop = n->loop,
        .cluster = n->cluster,
        .directory = n->directory,
        .metrics = n->metrics,
        .max_requests = n->o.max_requests,
        .ttl_s = n->o.ttl_s,
        .grace_ms = n->o.grace_ms,
        .block_tokens = n->o.block_tokens,
        .topic = n->o.topic,
        .secret = n->o.secret,
        .join = n->join[0] ? n->join : NULL,
        .log_requests = n->o.log_requests,
        .describe = describe,
        .arg = n,
    };
    return scheduler_create(&s);
}

static void start_workers(struct node *n)
{
    struct decode_options d = {
        .engine = n->engine,
        .kvt = n->kvt,
        .cluster = n->cluster,
        .metrics = n->metrics,
        .max_decode_seqs = n->o.max_waiting + n->o.max_seqs,
        .id_base = DECODE_IDS,
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
    };
    n->decode = decode_create(&d);
    n->prefill = prefill_create(&p);
    n->scheduler = start_scheduler(n);
    if (n->passer) passer_set_model(n->passer, engine_kv_layout(n->engine)->model_fingerprint);
}

static void describe_json(void *arg, bool cluster, struct buf *out)
{
    struct node *n = arg;
    char id[32];
    snprintf(id, sizeof id, "%016llx", (unsigned long long)n->id);
    buf_printf(out, "\"node\":\"%s\",\"name\":", id);
    json_add_string(out, str_of(n->name));
    buf_printf(out, ",\"role\":\"%s\",\"topic\":", node_role_name(n->o.role));
    json_add_string(out, str_of(n->o.topic));
    buf_printf(out,
               ",\"cluster_port\":%u,\"kv_port\":%u,\"live_prefill\":%u,\"live_decode\":%u,\"kv_"
               "transports\":\"",
               cluster_port(n->cluster), n->kvt ? kvt_port(n->kvt) : 0, prefill_n_live(n->prefill),
               decode_n_live(n->decode));
    if (n->kvt) kvt_available(n->kvt, out);
    buf_add_char(out, '"');
    if (!cluster) return;
    buf_printf(out, ",\"version\":\"%s\",\"uptime_s\":%llu,\"model\":", BATON_VERSION,
               (unsigned long long)(clock_ms() - n->t_start_ms) / 1000);
    json_add_string(out, str_of(n->o.names[0]));
    buf_add_char(out, ',');
    scheduler_describe(n->scheduler, out);
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
        .any_temperature = n->o.any_temperature,
        .n_api_keys = n->o.n_api_keys,
        .version = BATON_VERSION,
        .describe = describe_json,
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
    for (size_t i = 0; i < n->o.n_api_keys; i++) s.api_keys[i] = n->o.api_keys[i];
    return serve_create(&s, &n->serve, err);
}

static void log_ready(struct node *n)
{
    const struct kv_layout *l = engine_kv_layout(n->engine);
    double gib = (double)kv_layout_pool_bytes(l) / (1 << 30);
    uint64_t tokens = (uint64_t)l->n_blocks * l->block_tokens;
    struct buf kv_by = { 0 };
    if (n->kvt) kvt_available(n->kvt, &kv_by);
    log_info("node ready",
             "name=%s role=%s topic=%s model=%s after_s=%.1f kv_type=%s kv_blocks=%u "
             "kv_tokens=%llu kv_gib=%.2f full_context_requests=%.1f http=%s:%u "
             "cluster=%s:%u kv_port=%u kv_by=%s directory=%s",
             n->name, node_role_name(n->o.role), n->o.topic, n->o.names[0],
             (double)(clock_ms() - n->t_start_ms) * 1e-3, kv_dtype_name(l->dtype), l->n_blocks,
             (unsigned long long)tokens, gib, (double)tokens / n->o.max_model_len, n->o.host,
             n->http ? http_server_port(n->http) : 0, n->o.cluster_host, cluster_port(n->cluster),
             n->kvt ? kvt_port(n->kvt) : 0, n->kvt ? kv_by.data : "", n->o.directory);
    buf_release(&kv_by);
}

static enum status make_ready(struct node *n, struct err *err)
{
    TRY(start_engine(n, err));
    TRY(start_kvt(n, err));
    n->state = NODE_READY;
    print_join(n);
    start_workers(n);
    if (launcher_watch_is_gone(n->launcher)) on_launcher_gone(n);
    return start_serve(n, err);
}

static void load_model(void *arg)
{
    struct node *n = arg;
    n->load_st = node_model_load(&n->model, &n->o, &n->stop_loading, &n->load_err);
}

static void on_loaded(void *arg)
{
    struct node *n = arg;
    if (n->state == NODE_STOPPING) return;
    enum status st = n->load_st;
    if (st == OK) st = make_ready(n, &n->load_err);
    if (st != OK) {
        log_fatal("baton", n->load_err.text);
        node_stop(n, 1);
        return;
    }
    gauge_set(n->ready_gauge, 1);
    log_ready(n);
    if (n->on_ready) n->on_ready(n->on_ready_arg);
}

/* ---- stop ---- */

static void finish_rest(void *arg)
{
    struct node *n = arg;
    directory_close(n->directory);
    n->directory = NULL;
    passer_free(n->passer);
    n->passer = NULL;
    scheduler_free(n->scheduler);
    n->scheduler = NULL;
    launcher_watch_free(n->launcher);
    n->launcher = NULL;
    cluster_free(n->cluster);
    n->cluster = NULL;
    loop_stop(n->loop);
}

static void finish_stop(struct node *n)
{
    struct directory_server *directory_server = n->directory_server;
    if (n->http || n->admin) return; /* the other server has not stopped yet */
    n->directory_server = NULL;
    if (n->scheduler) scheduler_stop(n->scheduler);
    serve_free(n->serve);
    n->serve = NULL;
    mailbox_close(n->events); /* a thread that waits for room in it continues */
    /* Stop in the order of the work: the engine feeds kvtransfer, which reads the engine's pool. */
    if (n->engine) engine_stop(n->engine);
    kvt_free(n->kvt);
    n->kvt = NULL;
    engine_free(n->engine);
    n->engine = NULL;
    decode_free(n->decode);
    n->decode = NULL;
    prefill_free(n->prefill);
    n->prefill = NULL;
    if (directory_server) directory_server_stop(directory_server, finish_rest, n);
    else finish_rest(n);
}

static void http_stopped(void *arg)
{
    struct node *n = arg;
    n->http = NULL;
    finish_stop(n);
}

static void admin_stopped(void *arg)
{
    struct node *n = arg;
    n->admin = NULL;
    finish_stop(n);
}

static void begin_stop(void *arg)
{
    struct node *n = arg;
    struct http_server *http = n->http, *admin = n->admin;
    loop_timer_free(n->stopper);
    loop_timer_free(n->drain); /* it uses parts that are freed below */
    n->stopper = n->drain = NULL;
    if (http && n->serve) serve_shut_down(n->serve);
    if (n->passer) passer_stop(n->passer);
    if (!http && !admin) finish_stop(n);
    if (http) http_server_stop(http, GRACE_MS, http_stopped, n);
    if (admin) http_server_stop(admin, 0, admin_stopped, n);
}

/* The caller may run inside a part that is about to be freed, so the stop starts with the next turn
 * of the loop. */
void node_stop(struct node *n, int exit_status)
{
    if (n->state == NODE_STOPPING) return;
    n->state = NODE_STOPPING;
    n->exit_status = exit_status;
    atomic_store(&n->stop_loading, true);
    n->stopper = loop_timer_start(n->loop, 0, 0, begin_stop, n);
}

static void stop_after_signal(struct node *n, int exit_status)
{
    end_by_force_after(GRACE_MS + END_MS, exit_status);
    node_stop(n, exit_status);
}

/* Stops when no request is left or the time is up. */
static void on_drain_poll(void *arg)
{
    struct node *n = arg;
    uint32_t live = scheduler_n_live(n->scheduler) + decode_n_live(n->decode) +
                    prefill_n_live(n->prefill) + (n->passer ? passer_n_live(n->passer) : 0);
    if (live && clock_ms() - n->t_drain_ms < (uint64_t)n->o.shutdown_s * 1000) return;
    if (live) log_warn("stopping with work left", "live=%u", live);
    stop_after_signal(n, 0);
}

static void on_signal(void *arg, int signum)
{
    struct node *n = arg;
    n->n_signals++;
    log_info("signal", "signal=%s", signum == SIGINT ? "SIGINT" : "SIGTERM");
    if (n->state != NODE_READY || n->n_signals > 1) {
        bool was_ready = n->state == NODE_READY || n->state == NODE_DRAINING;
        stop_after_signal(n, n->http && was_ready ? 0 : 130);
        return;
    }
    if (n->on_signal) {
        n->on_signal(n->on_signal_arg);
        return;
    }
    n->state = NODE_DRAINING;
    n->t_drain_ms = clock_ms();
    gauge_set(n->ready_gauge, 0);
    scheduler_drain(n->scheduler);
    if (n->passer) passer_set_draining(n->passer);
    if (n->http) http_server_drain(n->http);
    n->drain = loop_timer_start(n->loop, 0, DRAIN_POLL_MS, on_drain_poll, n);
}

/* ---- life ---- */

static bool has_rdma_device(void)
{
    DIR *d = opendir("/sys/class/infiniband");
    bool found = false;
    for (struct dirent *e; d && !found && (e = readdir(d)) != NULL;) found = e->d_name[0] != '.';
    if (d) closedir(d);
    return found;
}

/* Every port is bound before the model is loaded, so that a conflict shows at once. */
static enum status open_ports(struct node *n, struct err *err)
{
    const struct node_options *o = &n->o;
    TRY(start_http(n, err));
    uint16_t port = n->http ? http_server_port(n->http) : 0;
    char at[HOST_PORT_TEXT_MAX];
    snprintf(n->name, sizeof n->name, "%.*s", (int)sizeof n->name - 1,
             host_port_text(o->advertise_host, port, at));
    log_set_name(n->name);
    n->launcher = launcher_watch_start(n->loop, on_launcher_gone, n);
    TRY(start_cluster(n, err));
    TRY(start_directory(n, err));
    start_passer(n);
    TRY(port_hold(o->cluster_host, o->kv_port, "--cache-queue-port", &n->kv_port_fd, err));
    /* Without a device nobody listens there, so that nodes of such a host may share the port. */
    if (!strstr(o->protocols, "rdma") || !has_rdma_device()) return OK;
    return port_hold(o->cluster_host, o->tuning.rdma.port, "--rdma-comm-ports", &n->rdma_port_fd,
                     err);
}

enum status node_create(const struct node_options *o, struct node **out, struct err *err)
{
    struct node *n = MEM_NEW(struct node);
    n->o = *o;
    n->t_start_ms = clock_ms();
    n->kv_port_fd = n->rdma_port_fd = -1;
    while (n->id == 0) random_bytes(&n->id, sizeof n->id);
    n->metrics = metrics_create();
    n->events = mailbox_create(sizeof(struct node_event), EVENTS, wake_loop, n);
    n->ready_gauge = metrics_gauge(n->metrics, "baton_ready", "",
                                   "1 when this node takes requests.");
    n->loop_delay = metrics_gauge(n->metrics, "baton_loop_delay_seconds", "",
                                  "Longest turn of the loop thread since the last renewal.");
    enum status st = loop_create(&n->loop, err);
    if (st == OK) st = open_ports(n, err);
    if (st != OK) {
        node_free(n);
        return st;
    }
    *out = n;
    return OK;
}

static void begin_loading(void *arg)
{
    struct node *n = arg;
    if (loop_work(n->loop, load_model, on_loaded, n) != OK) node_stop(n, 1);
}

int node_run(struct node *n)
{
    loop_on_signal(n->loop, on_signal, n);
    enum status st = loop_post(n->loop, begin_loading, n);
    ASSERT(st == OK); /* the queue of a new loop is empty */
    loop_run(n->loop);
    return n->exit_status;
}

void node_free(struct node *n)
{
    struct node_event ev;
    if (!n) return;
    if (n->http || n->admin || n->cluster) { /* the loop never ran: run it to close the ports */
        node_stop(n, 1);
        loop_run(n->loop);
    }
    release_port(&n->kv_port_fd);
    release_port(&n->rdma_port_fd);
    mailbox_close(n->events);
    while (mailbox_take(n->events, &ev)) mem_free(ev.blocks);
    mailbox_free(n->events);
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
