/* directory.c - checks that the directory server of --router or --innode-prefill-ports is one: it
 * is asked for the nodes of the topic, as a node would, with the secret of this host. Any other
 * program that listens there does not pass. Nodes may start in any order, so a server that is not
 * there yet is a warning. Thread: main. */
#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "deploy/doctor/doctor.h"
#include "deploy/node/node_options.h"
#include "scheduler/directory/wire.h"
#include "shared/base/address/host_port.h"
#include "shared/base/hash/hash.h"
#include "shared/net/http/http_client.h"

enum { CONNECT_MS = 2000, ANSWER_MS = 5000 };

struct directory_answer {
    struct loop *loop;
    enum status st;
    int http_status;
    cJSON *doc; /* NULL: not JSON */
};

/* Connects within CONNECT_MS; 0 or the errno. */
static int try_connect(const char *host, const char *port)
{
    struct addrinfo hints = { .ai_socktype = SOCK_STREAM }, *ai = NULL;
    int error = 0;
    socklen_t len = sizeof error;
    if (getaddrinfo(host, port, &hints, &ai) != 0) return EHOSTUNREACH;
    int fd = socket(ai->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) error = errno;
    else if (connect(fd, ai->ai_addr, ai->ai_addrlen) != 0 && errno != EINPROGRESS) error = errno;
    else if (poll(&(struct pollfd){ .fd = fd, .events = POLLOUT }, 1, CONNECT_MS) != 1)
        error = ETIMEDOUT;
    else if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &len) != 0) error = errno;
    if (fd >= 0) close(fd);
    freeaddrinfo(ai);
    return error;
}

static void on_answer(void *arg, enum status st, int http_status, struct str body)
{
    struct directory_answer *a = arg;
    a->st = st;
    a->http_status = http_status;
    if (st == OK) a->doc = cJSON_ParseWithLength(body.p, body.n);
    loop_stop(a->loop);
}

/* Asks for the nodes of the topic. The caller deletes a->doc. */
static enum status ask(const struct doctor *d, const char *host, uint16_t port, struct str secret,
                       struct directory_answer *a, struct err *err)
{
    static const char path[] = DIRECTORY_PATH "snapshot";
    struct buf body = { 0 };
    char proof[DIRECTORY_PROOF_MAX], headers[DIRECTORY_PROOF_MAX + 80];
    uint64_t self = 0;
    TRY(loop_create(&a->loop, err));
    struct http_client_options o = { .loop = a->loop, .body_max = DIRECTORY_ANSWER_MAX };
    struct http_client *client = http_client_create(&o);
    random_bytes(&self, sizeof self);
    buf_add_char(&body, '{');
    directory_add_id(&body, "owner", self);
    buf_add_c(&body, ",\"topic\":");
    json_add_string(&body, str_of(config_string(d->c, "scheduler-topic")));
    buf_add_char(&body, '}');
    directory_prove(secret, "POST", str_of(path), buf_str(&body), proof);
    snprintf(headers, sizeof headers, "Content-Type: application/json\r\nAuthorization: %s\r\n",
             proof);
    a->st = http_client_request(client, "POST", host, port, path, headers, buf_str(&body),
                                ANSWER_MS, on_answer, a);
    if (a->st == OK) loop_run(a->loop);
    http_client_free(client);
    loop_stop(a->loop);
    loop_run(a->loop); /* one more turn, so that the connection can close */
    loop_free(a->loop);
    buf_release(&body);
    return OK;
}

static const char *text_of(const cJSON *doc, const char *name)
{
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(doc, name));
    return text ? text : "";
}

static void report(struct doctor *d, const char *where, const struct directory_answer *a)
{
    const cJSON *nodes = cJSON_GetObjectItemCaseSensitive(a->doc, "nodes");
    const char *topic = config_string(d->c, "scheduler-topic"), *said = text_of(a->doc, "error");
    char what[160];
    if (a->st == OK && a->http_status == 200 && cJSON_IsArray(nodes) &&
        cJSON_GetObjectItemCaseSensitive(a->doc, "topics")) {
        doctor_add(d, "cluster view", DOCTOR_OK,
                   "%s is a directory server and takes this host's secret; topic %s has %d nodes "
                   "now",
                   where, topic, cJSON_GetArraySize(nodes));
        return;
    }
    if (a->st == OK && a->http_status == 401 && strstr(said, "cluster secret")) {
        doctor_fix(doctor_add(d, "cluster view", DOCTOR_FAIL,
                              "%s is a directory server with another cluster secret than this host",
                              where),
                   "set the BATON_CLUSTER_SECRET (or --cluster-secret-file) of the nodes there; a "
                   "`baton launch` that was given none has one that nobody else knows: start it "
                   "anew with one");
        return;
    }
    if (a->st == OK && a->http_status == 503 && strstr(said, "directory")) {
        doctor_fix(doctor_add(d, "cluster view", DOCTOR_WARN, "%s: %s", where, said),
                   "start it again; this node registers as soon as it is there");
        return;
    }
    if (a->st == OK) snprintf(what, sizeof what, "it answers HTTP status %d", a->http_status);
    else snprintf(what, sizeof what, "it does not answer in HTTP (%s)", status_text(a->st));
    doctor_fix(
        doctor_add(d, "cluster view", DOCTOR_FAIL, "%s is no directory server: %s", where, what),
        "name the address that `baton launch` prints after \"held by this launcher\", the port "
        "of a `baton router`, or the --engine-worker-queue-port of a prefill node; not the API "
        "port of a node");
}

static void check_answer(struct doctor *d, const char *where, const char *host, const char *port)
{
    struct arena arena;
    struct str secret = { 0 };
    struct err err = { 0 };
    struct directory_answer a = { 0 };
    arena_init(&arena);
    enum status st = node_options_secret(d->c, &arena, &secret, &err);
    if (st == OK) st = ask(d, host, (uint16_t)strtoul(port, NULL, 10), secret, &a, &err);
    if (st == OK) report(d, where, &a);
    else doctor_add(d, "cluster view", DOCTOR_FAIL, "%s: %s", where, err.text);
    cJSON_Delete(a.doc);
    arena_release(&arena);
}

void doctor_check_directory_server(struct doctor *d, const char *option, const char *host,
                                   const char *port)
{
    char where[HOST_PORT_TEXT_MAX + 64];
    int error = try_connect(host, port);
    snprintf(where, sizeof where, "%s:%s (--%s)", host, port, option);
    if (error == 0) check_answer(d, where, host, port);
    else
        doctor_fix(doctor_add(d, "cluster view", DOCTOR_WARN, "%s: %s", where, strerror(error)),
                   "start the directory server; this node registers as soon as it is there");
}
