/* supervisor.c - see supervisor.h. */
#include "deploy/launch/supervisor.h"

#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "deploy/launch/launch_key.h"
#include "deploy/launch/launcher_watch.h"
#include "kernels/device.h"
#include "shared/base/clock.h"
#include "shared/base/json/json.h"
#include "shared/base/log.h"
#include "shared/base/log/log_repeats.h"
#include "shared/net/http/http_client.h"

enum {
    PAUSE_MIN_MS = 500,
    PAUSE_MAX_MS = 10000,
    HEALTHY_MS = 30000,
    POLL_MS = 200,
    ANSWER_MAX = 1 << 20, /* of a node, which says of itself alone */
    SAY_MS = 5000,        /* since its start, before words about a process that is not ready */
    KILL_AFTER_MS = 5000
};

struct child {
    struct supervisor *s;
    const struct launch_node *plan;
    uv_process_t process;
    bool running, ready, polling;
    bool has_served; /* since the start, in this process or an earlier one */
    uint64_t t_start_ms;
    uint32_t pause_ms;
    struct loop_timer *restart;
};

struct supervisor {
    struct supervisor_options o;
    int n_gpus;      /* that the processes share, with --device cuda */
    char *gpus;      /* CUDA_VISIBLE_DEVICES of the parent; "": none */
    const char *key; /* launch_key */
    struct http_client *client;
    struct child *children;
    struct loop_timer *poll, *kill, *end;
    uv_signal_t hangup; /* data NULL: not open */
    uint64_t model;
    bool stopping, announced;
    struct log_repeats waits;
    int exit_status;
    const struct child *culprit; /* the process whose end stopped the others; NULL: none */
};

static void start_child(struct child *ch);

/* The first process of its node, which has the port. */
static struct child *first_of(const struct child *ch) { return &ch->s->children[ch->plan->first]; }

/* As the process names itself: its number in the group of all nodes that share experts, or, where
 * each node is on its own, in its node. */
static size_t rank_of(const struct child *ch)
{
    const struct ranks *r = &ch->s->o.plan->ranks;
    return r->experts ? (size_t)r->rank * r->tp.size + (size_t)(ch - ch->s->children)
                      : (size_t)(ch - first_of(ch));
}

size_t supervisor_n_running(const struct supervisor *s)
{
    size_t n = 0;
    for (size_t i = 0; i < s->o.plan->n; i++) n += s->children[i].running;
    return n;
}

/* ---- stop ---- */

static void on_end(void *arg)
{
    struct supervisor *s = arg;
    loop_timer_free(s->end);
    s->end = NULL;
    s->o.on_ended(s->o.arg);
}

/* Tells it in the next turn of the loop, since the caller may be inside a callback of a process. */
static void finish(struct supervisor *s)
{
    for (size_t i = 0; i < s->o.plan->n; i++) {
        loop_timer_free(s->children[i].restart);
        s->children[i].restart = NULL;
    }
    loop_timer_free(s->poll);
    loop_timer_free(s->kill);
    s->poll = s->kill = NULL;
    if (s->hangup.data) uv_close((uv_handle_t *)&s->hangup, NULL);
    s->hangup.data = NULL;
    http_client_free(s->client);
    s->client = NULL;
    if (!s->end) s->end = loop_timer_start(s->o.loop, 0, 0, on_end, s);
}

static void signal_all(struct supervisor *s, int signum)
{
    for (size_t i = 0; i < s->o.plan->n; i++)
        if (s->children[i].running) uv_process_kill(&s->children[i].process, signum);
}

static void kill_all(void *arg) { signal_all(arg, SIGKILL); }

void supervisor_stop(struct supervisor *s, int exit_status)
{
    if (s->stopping) {
        /* A second signal ends them at once. Another one: two of a number are one to a process that
         * has not looked yet. */
        signal_all(s, SIGINT);
        return;
    }
    s->stopping = true;
    s->exit_status = exit_status;
    if (supervisor_n_running(s) == 0) {
        finish(s);
        return;
    }
    signal_all(s, SIGTERM);
    uint64_t wait_ms = (uint64_t)config_int(s->o.c, "drain-timeout") * 1000 + KILL_AFTER_MS;
    s->kill = loop_timer_start(s->o.loop, wait_ms, 0, kill_all, s);
}

/* Without a log file it comes from a terminal that closes, and nodes must not be left behind. */
static void on_hangup(uv_signal_t *signal, int signum)
{
    struct supervisor *s = signal->data;
    if (!config_string(s->o.c, "log-dir")) {
        s->o.on_hangup(s->o.arg);
        return;
    }
    log_reopen();
    signal_all(s, signum);
}

/* Under nohup SIGHUP stays ignored, unless it has a log file to open. */
static void listen_for_hangup(struct supervisor *s)
{
    struct sigaction now;
    bool ignored = sigaction(SIGHUP, NULL, &now) == 0 && now.sa_handler == SIG_IGN;
    if (ignored && !config_string(s->o.c, "log-dir")) return;
    uv_signal_init(loop_uv(s->o.loop), &s->hangup);
    s->hangup.data = s;
    uv_signal_start(&s->hangup, on_hangup, SIGHUP);
    uv_unref((uv_handle_t *)&s->hangup);
}

bool supervisor_is_stopping(const struct supervisor *s) { return s->stopping; }

int supervisor_exit_status(const struct supervisor *s) { return s->exit_status; }

/* ---- processes ---- */

static void on_restart(void *arg)
{
    struct child *ch = arg;
    loop_timer_free(ch->restart);
    ch->restart = NULL;
    if (ch->s->stopping) return;
    log_info("node started again", "port=%u rank=%zu role=%s after_ms=%u", first_of(ch)->plan->port,
             rank_of(ch), node_role_name(ch->plan->role), ch->pause_ms);
    start_child(ch);
}

static void plan_restart(struct child *ch)
{
    bool healthy = clock_ms() - ch->t_start_ms >= HEALTHY_MS;
    ch->pause_ms = healthy || ch->pause_ms == 0      ? PAUSE_MIN_MS
                   : ch->pause_ms * 2 > PAUSE_MAX_MS ? PAUSE_MAX_MS
                                                     : ch->pause_ms * 2;
    if (!ch->restart)
        ch->restart = loop_timer_start(ch->s->o.loop, ch->pause_ms, 0, on_restart, ch);
}

static void on_process_closed(uv_handle_t *h)
{
    struct child *ch = h->data;
    struct supervisor *s = ch->s;
    ch->running = false;
    if (!s->stopping) plan_restart(ch);
    else if (supervisor_n_running(s) == 0) finish(s);
}

static void on_exit_of_child(uv_process_t *process, int64_t exit_status, int signum)
{
    struct child *ch = process->data;
    struct supervisor *s = ch->s;
    ch->ready = false;
    if (!s->stopping)
        log_warn("node ended", "port=%u rank=%zu role=%s status=%lld signal=%d",
                 first_of(ch)->plan->port, rank_of(ch), node_role_name(ch->plan->role),
                 (long long)exit_status, signum);
    uv_close((uv_handle_t *)process, on_process_closed);
    /* What has served may serve again: a folder or a port comes back. */
    const bool failed = exit_status != 0 && exit_status != LAUNCHER_START_AGAIN,
               hopeless = (failed && !first_of(ch)->has_served) || !config_bool(s->o.c, "restart");
    if (s->stopping || !hopeless) return;
    s->culprit = ch;
    supervisor_stop(s, exit_status ? (int)exit_status : 1);
    if (s->o.on_hopeless) s->o.on_hopeless(s->o.arg);
}

/* Assigns GPUs to processes round robin, from CUDA_VISIBLE_DEVICES or from all. With fewer than two
 * GPUs nothing is set. */
static void choose_gpu(const struct supervisor *s, size_t i)
{
    char one[64];
    const int n = s->n_gpus;
    struct str all = str_of(s->gpus), item = { 0 };
    if (n < 2) return;
    snprintf(one, sizeof one, "%zu", i % (size_t)n);
    for (size_t k = 0; all.n > 0 && k <= i % (size_t)n; k++) (void)str_split(&all, ',', &item);
    if (item.n > 0) snprintf(one, sizeof one, "%.*s", STR_ARG(str_trim(item)));
    /* for the child to inherit; the parent itself uses no GPU */
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
    choose_gpu(ch->s, (size_t)(ch - ch->s->children));
    uv_stdio_container_t stdio[3] = {
        { .flags = UV_IGNORE },
        { .flags = UV_INHERIT_FD, .data.fd = STDOUT_FILENO },
        { .flags = UV_INHERIT_FD, .data.fd = STDERR_FILENO },
    };
    uv_process_options_t o = {
        .exit_cb = on_exit_of_child,
        .file = own_file(file),
        .args = (char **)ch->plan->argv,
        .flags = UV_PROCESS_DETACHED,
        .stdio_count = 3,
        .stdio = stdio,
    };
    ch->t_start_ms = clock_ms();
    ch->process.data = ch;
    int st = uv_spawn(loop_uv(ch->s->o.loop), &ch->process, &o);
    ch->running = true; /* the handle is open even when the spawn failed */
    if (st == 0) return;
    log_error("node not started", "port=%u why=\"%s\"", first_of(ch)->plan->port, uv_strerror(st));
    uv_close((uv_handle_t *)&ch->process, on_process_closed);
}

/* ---- readiness ---- */

/* A node is ready when it sees as many nodes as are in this plan: only then are its requests split.
 * It says too which model it has. */
static bool sees_all(struct supervisor *s, struct str said)
{
    cJSON *doc = cJSON_ParseWithLength(said.p, said.n);
    const cJSON *n = cJSON_GetObjectItemCaseSensitive(doc, "n_nodes"),
                *model = cJSON_GetObjectItemCaseSensitive(doc, "model_id");
    const bool all = cJSON_IsNumber(n) &&
                     n->valuedouble >= (double)(s->o.plan->n / s->o.plan->ranks.tp.size);
    if (cJSON_IsString(model)) s->model = strtoull(model->valuestring, NULL, 16);
    cJSON_Delete(doc);
    return all;
}

uint64_t supervisor_model(const struct supervisor *s) { return s->model; }

static void log_why_not(struct child *ch, const char *why)
{
    uint32_t n_unlogged;
    char text[512];
    snprintf(text, sizeof text, "port=%u why=\"%.480s\"", ch->plan->port, why);
    if (log_repeats_due(&ch->s->waits, text, clock_ms(), &n_unlogged))
        log_info("node not ready yet", "%s repeats=%u", text, n_unlogged);
}

/* A rank that waits for one of another host says so, which is not seen otherwise. */
static void say_why_not(struct child *ch, struct str body)
{
    cJSON *doc = cJSON_ParseWithLength(body.p, body.n);
    const cJSON *said = cJSON_GetObjectItemCaseSensitive(
        cJSON_GetObjectItemCaseSensitive(doc, "error"), "message");
    const struct supervisor_options *o = &ch->s->o;
    if (cJSON_IsString(said) && o->on_waiting)
        o->on_waiting(o->arg, ch->plan->port, said->valuestring);
    if (cJSON_IsString(said) && clock_ms() - ch->t_start_ms >= SAY_MS)
        log_why_not(ch, said->valuestring);
    cJSON_Delete(doc);
}

static void on_self_answer(void *arg, enum status st, int http_status, struct str body)
{
    struct child *ch = arg;
    struct supervisor *s = ch->s;
    ch->polling = false;
    if (st != OK || !ch->running || s->stopping) return;
    if (http_status != 200) {
        say_why_not(ch, body);
        return;
    }
    ch->has_served = true;
    if (s->o.on_waiting) s->o.on_waiting(s->o.arg, ch->plan->port, "");
    if (!sees_all(s, body) && !s->o.apart) return;
    ch->ready = true;
    bool all = true;
    for (size_t i = 0; i < s->o.plan->n; i++) all &= first_of(&s->children[i])->ready;
    if (!all || s->announced) return;
    s->announced = true;
    s->o.on_ready(s->o.arg);
}

/* The answer is as short in a topic of thousands of nodes. */
static void on_poll(void *arg)
{
    struct supervisor *s = arg;
    struct buf headers = { 0 };
    if (s->key) buf_printf(&headers, "Authorization: Bearer %s\r\n", s->key);
    for (size_t i = 0; i < s->o.plan->n; i++) {
        struct child *ch = &s->children[i];
        if (!ch->running || ch->ready || ch->polling || first_of(ch) != ch) continue;
        ch->polling = http_client_request(s->client, "GET", s->o.address, ch->plan->port,
                                          "/cluster/self", headers.data, (struct str){ 0 }, 2000,
                                          on_self_answer, ch) == OK;
    }
    buf_release(&headers);
}

/* ---- life ---- */

struct supervisor *supervisor_start(const struct supervisor_options *o)
{
    struct supervisor *s = MEM_NEW(struct supervisor);
    const struct http_client_options h = { .loop = o->loop,
                                           .body_max = ANSWER_MAX,
                                           .n_idle = LAUNCH_NODES_MAX };
    *s = (struct supervisor){ .o = *o };
    if (strcmp(config_string(o->c, "device"), "cuda") == 0) {
        const char *visible = getenv("CUDA_VISIBLE_DEVICES");
        s->n_gpus = device_count("cuda");
        s->gpus = mem_strdup(visible ? visible : "");
    }
    s->key = launch_key(o->c);
    s->client = http_client_create(&h);
    s->children = MEM_ARRAY(struct child, o->plan->n);
    for (size_t i = 0; i < o->plan->n; i++) {
        s->children[i].s = s;
        s->children[i].plan = &o->plan->nodes[i];
        start_child(&s->children[i]);
    }
    s->poll = loop_timer_start(o->loop, POLL_MS, POLL_MS, on_poll, s);
    listen_for_hangup(s);
    return s;
}

/* The node printed its own sentence before. */
void supervisor_say_culprit(const struct supervisor *s, const char *who)
{
    char text[160];
    if (!s->culprit) return;
    snprintf(text, sizeof text,
             "stopped, because the %s node of port %u ended with status %d; its own lines say why",
             node_role_name(s->culprit->plan->role), first_of(s->culprit)->plan->port,
             s->exit_status);
    log_fatal(who, text);
}

void supervisor_free(struct supervisor *s)
{
    if (!s) return;
    loop_timer_free(s->end);
    mem_free(s->children);
    mem_free(s->gpus);
    mem_free(s);
}
