/* cmd_launch.c - `baton launch`: starts the nodes of this host, serves their directory, restarts
 * nodes that die, stops them all.
 *
 * A node that dies is restarted at the same port after a pause: 0.5 s, doubling to 10 s, back to
 * 0.5 s for a node that lived 30 s. A node that ends with an error before it has ever served means
 * wrong options: everything stops. Nodes run in sessions of their own, so Ctrl-C and a terminal
 * that closes reach only the launcher. When it is killed they go on serving and say so
 * (deploy/node/launcher_watch.h). Thread: main. */
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "deploy/cli/commands.h"
#include "deploy/node/launch_plan.h"
#include "deploy/node/launcher_watch.h"
#include "deploy/node/node_options.h"
#include "kernels/device.h"
#include "scheduler/directory/server.h"
#include "shared/base/address/host_port.h"
#include "shared/base/clock.h"
#include "shared/base/hash/hash.h"
#include "shared/base/json/json.h"
#include "shared/base/log.h"
#include "shared/net/http/http_client.h"

static const char INTRO[] =
    "usage: baton launch --model MODEL --prefill N --decode M [options]\n"
    "       baton launch --model MODEL --num-servers N [options]      (mixed nodes)\n\n"
    "Start and supervise nodes on this host. Options of `baton serve` are handed on to every "
    "node.\n";

enum {
    PAUSE_MIN_MS = 500,
    PAUSE_MAX_MS = 10000,
    HEALTHY_MS = 30000,
    POLL_MS = 200,
    KILL_AFTER_MS = 5000,
    SECRET_BYTES = 24
};

struct child {
    struct launcher *l;
    struct launch_node *plan;
    uv_process_t process;
    bool running, ready, polling;
    bool has_served; /* since the launch began, in this process or an earlier one */
    uint64_t t_start_ms;
    uint32_t pause_ms;
    struct loop_timer *restart;
};

struct launcher {
    const char *loopback; /* this host, in the family of --host */
    int n_gpus;           /* GPUs that the ranks share, with --device cuda */
    char *gpus;           /* CUDA_VISIBLE_DEVICES of the launcher; "": none */
    struct loop *loop;
    const struct config *c;
    struct metrics *metrics;
    struct directory *directory;
    struct directory_server *directory_server;
    struct http_client *client;
    struct launch_plan plan;
    struct child *children;
    struct loop_timer *poll, *kill;
    uv_signal_t hangup;
    bool stopping, announced;
    int exit_status;
    const struct child *culprit; /* the child whose end stopped the launch; NULL: none */
};

static void start_child(struct child *ch);

static size_t n_running(const struct launcher *l)
{
    size_t n = 0;
    for (size_t i = 0; i < l->plan.n; i++) n += l->children[i].running;
    return n;
}

/* ---- stop ---- */

static void finish_rest(void *arg)
{
    struct launcher *l = arg;
    directory_close(l->directory);
    l->directory = NULL;
    loop_stop(l->loop);
}

static void finish(struct launcher *l)
{
    struct directory_server *directory_server = l->directory_server;
    for (size_t i = 0; l->children && i < l->plan.n; i++) {
        loop_timer_free(l->children[i].restart);
        l->children[i].restart = NULL;
    }
    loop_timer_free(l->poll);
    loop_timer_free(l->kill);
    l->poll = l->kill = NULL;
    if (l->hangup.data) uv_close((uv_handle_t *)&l->hangup, NULL);
    l->hangup.data = NULL;
    http_client_free(l->client);
    l->client = NULL;
    l->directory_server = NULL;
    if (directory_server) directory_server_stop(directory_server, finish_rest, l);
    else finish_rest(l);
}

static void signal_all(struct launcher *l, int signum)
{
    for (size_t i = 0; i < l->plan.n; i++)
        if (l->children[i].running) uv_process_kill(&l->children[i].process, signum);
}

static void kill_all(void *arg) { signal_all(arg, SIGKILL); }

static void stop_all(struct launcher *l, int exit_status)
{
    if (l->stopping) {
        signal_all(l, SIGTERM); /* a second signal stops the nodes at once */
        return;
    }
    l->stopping = true;
    l->exit_status = exit_status;
    if (n_running(l) == 0) {
        finish(l);
        return;
    }
    signal_all(l, SIGTERM);
    uint64_t wait_ms = (uint64_t)config_int(l->c, "shutdown-timeout") * 1000 + KILL_AFTER_MS;
    l->kill = loop_timer_start(l->loop, wait_ms, 0, kill_all, l);
}

/* A stop that waits for requests looks like one that hangs. */
static void on_signal(void *arg, int signum)
{
    struct launcher *l = arg;
    (void)signum;
    if (!l->stopping && n_running(l) > 0 && log_level() >= LOG_INFO)
        fprintf(stderr,
                "stopping: nodes finish their requests, at most %lld s; Ctrl-C again ends them\n",
                (long long)config_int(l->c, "shutdown-timeout"));
    stop_all(l, 0);
}

/* With --log-dir the launcher and its nodes have a log file each, which SIGHUP opens again. Without
 * one it comes from a terminal that closes, and nodes must not be left behind. */
static void on_hangup(uv_signal_t *s, int signum)
{
    struct launcher *l = s->data;
    if (!config_string(l->c, "log-dir")) {
        stop_all(l, 0);
        return;
    }
    log_reopen();
    signal_all(l, signum);
}

/* Under nohup SIGHUP stays ignored, unless it has a log file to open. */
static void listen_for_hangup(struct launcher *l)
{
    struct sigaction now;
    bool ignored = sigaction(SIGHUP, NULL, &now) == 0 && now.sa_handler == SIG_IGN;
    if (ignored && !config_string(l->c, "log-dir")) return;
    uv_signal_init(loop_uv(l->loop), &l->hangup);
    l->hangup.data = l;
    uv_signal_start(&l->hangup, on_hangup, SIGHUP);
    uv_unref((uv_handle_t *)&l->hangup);
}

/* ---- children ---- */

static void on_restart(void *arg)
{
    struct child *ch = arg;
    loop_timer_free(ch->restart);
    ch->restart = NULL;
    if (!ch->l->stopping) start_child(ch);
}

static void plan_restart(struct child *ch)
{
    bool healthy = clock_ms() - ch->t_start_ms >= HEALTHY_MS;
    ch->pause_ms = healthy || ch->pause_ms == 0      ? PAUSE_MIN_MS
                   : ch->pause_ms * 2 > PAUSE_MAX_MS ? PAUSE_MAX_MS
                                                     : ch->pause_ms * 2;
    if (!ch->restart) ch->restart = loop_timer_start(ch->l->loop, ch->pause_ms, 0, on_restart, ch);
}

static void on_process_closed(uv_handle_t *h)
{
    struct child *ch = h->data;
    struct launcher *l = ch->l;
    ch->running = false;
    if (l->stopping) {
        if (n_running(l) == 0) finish(l);
    } else {
        plan_restart(ch);
    }
}

static void on_exit_of_child(uv_process_t *process, int64_t exit_status, int signum)
{
    struct child *ch = process->data;
    struct launcher *l = ch->l;
    ch->ready = false;
    if (!l->stopping)
        log_warn("node ended", "port=%u role=%s status=%lld signal=%d", ch->plan->port,
                 node_role_name(ch->plan->role), (long long)exit_status, signum);
    uv_close((uv_handle_t *)process, on_process_closed);
    /* What has served may serve again: a folder or a port comes back. */
    bool hopeless = (exit_status != 0 && !ch->has_served) || !config_bool(l->c, "restart");
    if (l->stopping || !hopeless) return;
    l->culprit = ch;
    stop_all(l, exit_status ? (int)exit_status : 1);
}

/* Assigns GPUs to ranks round robin, from CUDA_VISIBLE_DEVICES or from all. With fewer than two
 * GPUs nothing is set. */
static void choose_gpu(const struct launcher *l, size_t i)
{
    char one[64];
    const int n = l->n_gpus;
    struct str all = str_of(l->gpus), item = { 0 };
    if (n < 2) return;
    snprintf(one, sizeof one, "%zu", i % (size_t)n);
    for (size_t k = 0; all.n > 0 && k <= i % (size_t)n; k++) (void)str_split(&all, ',', &item);
    if (item.n > 0) snprintf(one, sizeof one, "%.*s", STR_ARG(str_trim(item)));
    /* for the child to inherit; the launcher itself uses no GPU */
    setenv("CUDA_VISIBLE_DEVICES", one, 1);
}

/* The program's own file, so that ps and top show its name for the nodes; when it was replaced
 * meanwhile, the running one. */
static const char *own_file(char out[PATH_MAX])
{
    ssize_t n = readlink("/proc/self/exe", out, PATH_MAX - 1);
    if (n > 0) out[n] = 0;
    return n > 0 && access(out, X_OK) == 0 ? out : "/proc/self/exe";
}

static void start_child(struct child *ch)
{
    char file[PATH_MAX];
    choose_gpu(ch->l, (size_t)(ch - ch->l->children));
    uv_stdio_container_t stdio[3] = {
        { .flags = UV_IGNORE },
        { .flags = UV_INHERIT_FD, .data.fd = STDOUT_FILENO },
        { .flags = UV_INHERIT_FD, .data.fd = STDERR_FILENO },
    };
    uv_process_options_t o = {
        .exit_cb = on_exit_of_child,
        .file = own_file(file),
        .args = ch->plan->argv,
        .flags = UV_PROCESS_DETACHED,
        .stdio_count = 3,
        .stdio = stdio,
    };
    ch->t_start_ms = clock_ms();
    ch->process.data = ch;
    int st = uv_spawn(loop_uv(ch->l->loop), &ch->process, &o);
    ch->running = true; /* the handle is open even when the spawn failed */
    if (st == 0) return;
    log_error("node not started", "port=%u why=\"%s\"", ch->plan->port, uv_strerror(st));
    uv_close((uv_handle_t *)&ch->process, on_process_closed);
}

/* ---- readiness ---- */

static void announce(struct launcher *l)
{
    char at[HOST_PORT_TEXT_MAX];
    l->announced = true;
    for (size_t i = 0; i < l->plan.n; i++)
        fprintf(stderr, "ready: %-7s http://%s/v1\n", node_role_name(l->plan.nodes[i].role),
                host_port_text(l->loopback, l->plan.nodes[i].port, at));
    fprintf(stderr, "ready: all %zu nodes; send requests to any of them\n", l->plan.n);
}

/* A node is ready when it sees all nodes of this launch: only then are its requests split. */
static bool sees_all(const struct launcher *l, struct str cluster_json)
{
    cJSON *doc = cJSON_ParseWithLength(cluster_json.p, cluster_json.n);
    int n = cJSON_GetArraySize(cJSON_GetObjectItemCaseSensitive(doc, "nodes"));
    cJSON_Delete(doc);
    return n >= 0 && (size_t)n >= l->plan.n;
}

static void on_cluster_answer(void *arg, enum status st, int http_status, struct str body)
{
    struct child *ch = arg;
    ch->polling = false;
    if (st != OK || http_status != 200 || !ch->running || ch->l->stopping) return;
    ch->has_served = true;
    if (!sees_all(ch->l, body)) return;
    ch->ready = true;
    bool all = true;
    for (size_t i = 0; i < ch->l->plan.n; i++) all &= ch->l->children[i].ready;
    if (all && !ch->l->announced) announce(ch->l);
}

static void on_poll(void *arg)
{
    struct launcher *l = arg;
    const char *key = config_list(l->c, "api-key", 0, NULL);
    struct buf headers = { 0 };
    if (key) buf_printf(&headers, "Authorization: Bearer %s\r\n", key);
    for (size_t i = 0; i < l->plan.n; i++) {
        struct child *ch = &l->children[i];
        if (!ch->running || ch->ready || ch->polling) continue;
        ch->polling = http_client_request(l->client, "GET", l->loopback, ch->plan->port, "/cluster",
                                          headers.data, (struct str){ 0 }, 2000, on_cluster_answer,
                                          ch) == OK;
    }
    buf_release(&headers);
}

/* ---- start ---- */

/* The nodes find each other in Redis, or at the directory server that --router names. */
static bool view_is_elsewhere(const struct config *c)
{
    return node_options_in_redis(c) || config_string(c, "router");
}

/* Nodes that only this launch brings together get a common secret of their own, through the
 * environment, when the user gave none. Those that meet others elsewhere cannot: nobody could join
 * them. Returns whether the secret is the launcher's. */
static bool make_secret(const struct config *c, const char *loopback)
{
    uint8_t bytes[SECRET_BYTES];
    char text[2 * SECRET_BYTES + 1];
    if (getenv("BATON_CLUSTER_SECRET") || config_is_set(c, "cluster-secret-file") ||
        view_is_elsewhere(c))
        return false;
    random_bytes(bytes, sizeof bytes);
    for (size_t i = 0; i < sizeof bytes; i++) snprintf(text + 2 * i, 3, "%02x", bytes[i]);
    setenv("BATON_CLUSTER_SECRET", text, 1);
    setenv("BATON_ADVERTISE_HOST", loopback, 0); /* only for this launch: nobody else can join */
    return true;
}

/* Other hosts can join where they have the user's secret. */
static enum status serve_directory(struct launcher *l, bool for_others,
                                   char address[HOST_PORT_TEXT_MAX], struct err *err)
{
    int64_t port;
    struct arena arena;
    struct str secret;
    struct directory_options d = {
        .loop = l->loop,
        .topic = config_string(l->c, "scheduler-topic"),
        .metrics = l->metrics,
    };
    address[0] = 0;
    if (view_is_elsewhere(l->c)) return OK;
    TRY(launch_listed_port(l->c, "engine-worker-queue-port", 0, &port, err));
    TRY(directory_open("local", &d, &l->directory, err));
    arena_init(&arena);
    /* in the order in which nodes read it: the file before the environment */
    enum status st = node_options_secret(l->c, &arena, &secret, err);
    if (st == OK)
        st = directory_server_start(
            l->loop, l->directory, for_others ? host_wildcard(l->loopback) : l->loopback,
            port > 0 ? (uint16_t)port : 0, secret, &l->directory_server, err);
    arena_release(&arena);
    if (st == OK) host_port_text(l->loopback, directory_server_port(l->directory_server), address);
    return st;
}

/* The secret is read again, which serve_directory did only if it serves the view. */
static enum status print_secret(const struct launcher *l, struct err *err)
{
    struct buf text = { 0 };
    struct arena arena;
    struct str secret;
    if (log_level() < LOG_INFO) return OK;
    arena_init(&arena);
    enum status st = node_options_secret(l->c, &arena, &secret, err);
    if (st == OK) node_options_print_secret(secret, &text);
    if (text.len) fwrite(text.data, 1, text.len, stderr);
    buf_release(&text);
    arena_release(&arena);
    return st;
}

/* One page for the whole launch: what it starts, and where the nodes find each other. */
static void print_start(const struct launcher *l, const char *directory_address)
{
    size_t n[3] = { 0 };
    node_options_warn_alone(l->c, true);
    command_print_notes(l->c);
    if (log_level() < LOG_INFO) return;
    for (size_t i = 0; i < l->plan.n; i++) n[l->plan.nodes[i].role]++;
    fprintf(stderr, "baton %s launch\n  model        %s\n  nodes       ", BATON_VERSION,
            config_string(l->c, "model"));
    for (int r = ROLE_MIXED; r <= ROLE_DECODE; r++)
        if (n[r]) fprintf(stderr, " %zu %s", n[r], node_role_name((enum node_role)r));
    fprintf(stderr, ", %s each on port",
            strcmp(config_string(l->c, "device"), "cuda") == 0 ? "a GPU or a share of one"
                                                               : "a share of the CPU");
    for (size_t i = 0; i < l->plan.n; i++)
        fprintf(stderr, "%s%u", i ? ", " : " ", l->plan.nodes[i].port);
    fprintf(stderr, "\n  cluster view %s%s\n",
            directory_address[0]            ? "held by this launcher, "
            : config_string(l->c, "router") ? "held by "
                                            : "in Redis at ",
            directory_address[0]            ? directory_address
            : config_string(l->c, "router") ? config_string(l->c, "router")
                                            : config_string(l->c, "scheduler-host"));
}

static enum status start(struct launcher *l, struct err *err)
{
    char directory_address[HOST_PORT_TEXT_MAX];
    struct http_client_options h = { .body_max = 1 << 16, .n_idle = LAUNCH_NODES_MAX };
    if (!config_string(l->c, "model"))
        return err_field(err, ERR_CONFIG, "model",
                         "no model was given; use --model FOLDER, FILE.gguf or org/name");
    l->loopback = host_loopback(config_string(l->c, "host"));
    bool own_secret = make_secret(l->c, l->loopback);
    if (strcmp(config_string(l->c, "device"), "cuda") == 0) {
        const char *visible = getenv("CUDA_VISIBLE_DEVICES");
        l->n_gpus = device_count("cuda");
        l->gpus = mem_strdup(visible ? visible : "");
    }
    l->metrics = metrics_create();
    TRY(loop_create(&l->loop, err));
    TRY(serve_directory(l, !own_secret, directory_address, err));
    TRY(launch_plan_make(l->c, "baton", directory_address[0] ? directory_address : NULL, &l->plan,
                         err));
    print_start(l, directory_address);
    TRY(print_secret(l, err));
    h.loop = l->loop;
    l->client = http_client_create(&h);
    l->children = MEM_ARRAY(struct child, l->plan.n);
    launcher_watch_announce(directory_address[0] != 0, own_secret);
    if (directory_address[0]) unsetenv("BATON_CONTROL_PORT"); /* the launcher's */
    for (size_t i = 0; i < l->plan.n; i++) {
        l->children[i].l = l;
        l->children[i].plan = &l->plan.nodes[i];
        start_child(&l->children[i]);
    }
    l->poll = loop_timer_start(l->loop, POLL_MS, POLL_MS, on_poll, l);
    loop_on_signal(l->loop, on_signal, l);
    listen_for_hangup(l);
    return OK;
}

/* The node printed its own sentence before. */
static void say_culprit(const struct launcher *l)
{
    char text[160];
    snprintf(text, sizeof text,
             "stopped, because the %s node of port %u ended with status %d; its own lines say why",
             node_role_name(l->culprit->plan->role), l->culprit->plan->port, l->exit_status);
    log_fatal("baton launch", text);
}

int cmd_launch(int argc, char **argv)
{
    bool done;
    struct err err = { 0 };
    struct config *c = command_config("launch", INTRO, argc, argv, NULL, NULL, &done);
    if (!c) return done ? 0 : 2;
    struct launcher l = { .c = c, .exit_status = 2 };
    log_set_name("launch");
    enum status st = node_options_log(c, "baton-launch.log", &err);
    if (st == OK) st = start(&l, &err);
    if (st == OK) {
        loop_run(l.loop);
    } else {
        log_fatal("baton launch", err.text);
        if (l.loop) {
            finish(&l);
            loop_run(l.loop);
        }
    }
    if (l.culprit) say_culprit(&l);
    loop_free(l.loop);
    launch_plan_release(&l.plan);
    mem_free(l.children);
    mem_free(l.gpus);
    metrics_free(l.metrics);
    config_free(c);
    return l.exit_status;
}
