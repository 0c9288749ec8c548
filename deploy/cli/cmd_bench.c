/* cmd_bench.c - `baton bench kv`: how fast KV moves compared with what the machine can do, measured
 * in the same run; and the probe server for the other host. Thread: main. */
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "deploy/bench/bench_kv.h"
#include "deploy/cli/commands.h"
#include "deploy/node/node_options.h"
#include "deploy/probe/server.h"
#include "kvtransfer/transport.h"
#include "shared/base/address/host_port.h"
#include "shared/base/hash/hash.h"
#include "shared/base/log.h"

enum { CELLS_MAX = 1024, OWN_SECRET = 32 };

static const char INTRO[] =
    "usage: baton bench kv [--transport ipc,tcp,rdma,ucx,mem] [--piece 4k..4m] [--blocks N] "
    "[--rounds R] [--peers host:port] [--json]\n"
    "       baton bench kv --listen host:port\n\n"
    "Move KV blocks between two processes over each transport and print rate, latency and CPU "
    "next to the limit measured in the same rounds:\n"
    "memcpy for ipc and mem, iperf3 (or a plain socket stream) for tcp, ib_write_bw for rdma, "
    "ucx_perftest for ucx. Without --peers both\n"
    "processes are on this host; with it the receivers are the probe servers that `baton bench kv "
    "--listen` or `baton doctor --listen` started there.\n"
    "Exit status 0: measured; 1: a transport that was asked for could not be.\n";

struct bench {
    struct config *c;
    struct arena arena;
    struct bench_kv kv;
    bool transports_given;
    struct kvt_tuning tuning;
    struct str secret;
    struct bench_cell *cells;
    size_t n_cells, n_failed;
    bool json;
};

/* ---- options ---- */

static enum status add_transport(struct bench *b, struct str name, struct err *err)
{
    const struct kvt_transport_ops *ops;
    /* A transport that exists but is not in this build becomes a line that says so. */
    if (!kvt_transport_is_known(name) && kvt_transport_find(name, &ops, NULL) != OK)
        return err_field(err, ERR_CONFIG, "transport",
                         "--transport: '%.*s' is not one of " KVT_TRANSPORT_NAMES ", mem",
                         STR_ARG(str_sub(name, 0, 40)));
    if (b->kv.n_transports == BENCH_TRANSPORTS_MAX)
        return err_field(err, ERR_CONFIG, "transport", "--transport names more than %d",
                         BENCH_TRANSPORTS_MAX);
    snprintf(b->kv.transports[b->kv.n_transports++], PROBE_NAME_MAX, "%.*s", STR_ARG(name));
    return OK;
}

static enum status read_transports(struct bench *b, struct err *err)
{
    b->transports_given = config_is_set(b->c, "transport");
    const char *item;
    for (size_t i = 0; (item = config_list(b->c, "transport", i, NULL)); i++)
        TRY(add_transport(b, str_of(item), err));
    for (size_t i = 0; !b->transports_given && kvt_transports[i]; i++) {
        bool reaches = !config_is_set(b->c, "peers") ||
                       !(kvt_transports[i]->caps & KVT_CAP_SAME_PROCESS);
        if (reaches) TRY(add_transport(b, str_of(kvt_transports[i]->name), err));
    }
    return OK;
}

static enum status read_options(struct bench *b, struct err *err)
{
    const struct config *c = b->c;
    const char *item;
    TRY(read_transports(b, err));
    for (size_t i = 0; (item = config_list(c, "piece", i, NULL)); i++)
        if (bench_sizes_add(&b->kv.sizes, str_of(item), err) != OK)
            return err_prefix(err, "--piece: ");
    b->kv.n_blocks = (uint32_t)config_int(c, "blocks");
    b->kv.rounds = (uint32_t)config_int(c, "rounds");
    b->kv.samples = (uint32_t)config_int(c, "samples");
    b->kv.copiers = (uint32_t)config_int(c, "copiers");
    b->kv.connections = (uint32_t)config_int(c, "connections");
    b->kv.checksum = str_eq_c(str_of(config_string(c, "checksum")), "on") ||
                     str_eq_c(str_of(config_string(c, "checksum")), "true");
    b->kv.contiguous = config_bool(c, "contiguous");
    b->json = config_bool(c, "json");
    for (size_t i = 0; i < b->kv.sizes.n; i++)
        if (b->kv.n_blocks && (uint64_t)b->kv.sizes.v[i] * b->kv.n_blocks > PROBE_POOL_MAX)
            return err_field(
                err, ERR_CONFIG, "blocks",
                "--blocks %u of %u bytes are more than the 1 GiB that a test pool may have",
                b->kv.n_blocks, b->kv.sizes.v[i]);
    size_t n_peers = 0;
    config_list(c, "peers", 0, &n_peers);
    size_t n = (n_peers ? n_peers : 1) * b->kv.n_transports * b->kv.sizes.n;
    if (n > CELLS_MAX)
        return err_field(err, ERR_CONFIG, "peers",
                         "%zu transports of %zu sizes to %zu peers are %zu measurements, at most "
                         "%d can be made at once; name fewer",
                         b->kv.n_transports, b->kv.sizes.n, n_peers, n, CELLS_MAX);
    return OK;
}

/* ---- the probe server ---- */

/* Parses "host:port"; the host is numeric or a name of this host, empty: every address. */
static enum status read_listen(const char *text, char *host, size_t cap, uint16_t *port,
                               struct err *err)
{
    char name[HOST_TEXT_MAX];
    struct addrinfo hints = { .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE }, *ai = NULL;
    if (!host_port_parse(text, name, port))
        return err_field(err, ERR_CONFIG, "listen", "--listen %.100s is not host:port", text);
    int rc = getaddrinfo(*name ? name : "0.0.0.0", NULL, &hints, &ai);
    if (rc == 0)
        rc = getnameinfo(ai->ai_addr, ai->ai_addrlen, host, (socklen_t)cap, NULL, 0,
                         NI_NUMERICHOST);
    if (ai) freeaddrinfo(ai);
    if (rc != 0)
        return err_field(err, ERR_CONFIG, "listen", "--listen %.100s: %s", text, gai_strerror(rc));
    return OK;
}

static enum status listen_with(const struct config *c, struct arena *arena, struct err *err)
{
    struct probe_server_options o = { 0 };
    char host[PROBE_ADDRESS_MAX];
    struct probe_server *a;
    TRY(node_options_tuning(&o.tuning, err));
    TRY(node_options_secret(c, arena, &o.secret, err));
    TRY(read_listen(config_string(c, "listen"), host, sizeof host, &o.port, err));
    bool everywhere = str_eq_c(str_of(host), "0.0.0.0") || str_eq_c(str_of(host), "::");
    if (o.secret.n == 0 && everywhere) {
        fprintf(stderr, "note: no cluster secret (BATON_CLUSTER_SECRET): listening on 127.0.0.1 "
                        "only, so other hosts cannot measure this one\n");
        snprintf(host, sizeof host, "127.0.0.1");
    }
    o.host = host;
    TRY(probe_server_create(&o, &a, err));
    printf("probe server on %s:%u, for `baton doctor --peers` and `baton bench kv --peers`; %s; "
           "ends with "
           "SIGINT or SIGTERM\n",
           host, probe_server_port(a),
           o.secret.n ? "peers must have the same cluster secret"
                      : "no cluster secret, this host only");
    fflush(stdout);
    probe_server_run(a);
    probe_server_free(a);
    return OK;
}

int command_listen(const struct config *c, const char *command)
{
    struct err err = { 0 };
    struct arena arena;
    arena_init(&arena);
    log_set_level(LOG_WARN);
    enum status st = listen_with(c, &arena, &err);
    arena_release(&arena);
    if (st == OK) return 0;
    fprintf(stderr, "baton %s: %s\n", command, err.text);
    return 2;
}

/* ---- measuring ---- */

static void print(const struct buf *out)
{
    fwrite(out->data, 1, out->len, stdout);
    fflush(stdout);
}

/* Measures every cell from `sender` to one receiver. `same`: a second link to the sender's own
 * process, for transports that reach no other; NULL: the receiver is on another host. */
static void measure(struct bench *b, const char *to, struct probe_client *sender,
                    struct probe_client *receiver, struct probe_client *same)
{
    for (size_t t = 0; t < b->kv.n_transports; t++)
        for (size_t s = 0; s < b->kv.sizes.n; s++) {
            const char *transport = b->kv.transports[t];
            bool in_process = kvt_transport_caps(str_of(transport)) & KVT_CAP_SAME_PROCESS;
            struct bench_cell *cell = &b->cells[b->n_cells++];
            struct buf row = { 0 };
            snprintf(cell->to, sizeof cell->to, "%s", to);
            bench_kv_cell(&b->kv, sender, in_process && same ? same : receiver, transport,
                          b->kv.sizes.v[s], cell);
            b->n_failed += cell->error[0] != 0;
            bench_kv_row(cell, &row);
            if (!b->json) print(&row);
            buf_release(&row);
            /* A transport that failed at one size would fail at every size. */
            if (cell->error[0] && cell->n_rounds == 0) break;
        }
}

static enum status measure_here(struct bench *b, struct probe_dialer *h,
                                struct probe_client *sender, const char *sender_at,
                                const char *receiver_at, struct err *err)
{
    struct probe_client *receiver = NULL, *same = NULL;
    enum status st = probe_dial(h, receiver_at, &receiver, err);
    if (st == OK) st = probe_dial(h, sender_at, &same, err);
    if (st == OK) measure(b, "", sender, receiver, same);
    probe_hang_up(receiver);
    probe_hang_up(same);
    return st;
}

static enum status measure_peers(struct bench *b, struct probe_dialer *h,
                                 struct probe_client *sender, struct err *err)
{
    const char *where;
    for (size_t i = 0; (where = config_list(b->c, "peers", i, NULL)); i++) {
        struct probe_client *receiver = NULL;
        if (probe_dial(h, where, &receiver, err) != OK) return err_prefix(err, "--peers: ");
        if (!b->json) printf("%sto %s (%s)\n", i ? "\n" : "", where, probe_peer(receiver)->host);
        measure(b, where, sender, receiver, NULL);
        probe_hang_up(receiver);
    }
    return OK;
}

static enum status run_with(struct bench *b, const char *sender_at, const char *receiver_at,
                            struct err *err)
{
    struct probe_dialer *h = NULL;
    struct probe_client *sender = NULL;
    struct buf out = { 0 };
    TRY(probe_dialer_create(b->secret, &h, err));
    bench_kv_head(&b->kv, &out);
    if (!b->json) print(&out);
    buf_clear(&out);
    enum status st = probe_dial(h, sender_at, &sender, err);
    if (st == OK)
        st = config_is_set(b->c, "peers") ? measure_peers(b, h, sender, err)
                                          : measure_here(b, h, sender, sender_at, receiver_at, err);
    probe_hang_up(sender);
    probe_dialer_free(h);
    bench_kv_json(&b->kv, b->cells, b->n_cells, &out);
    if (b->json && st == OK) print(&out);
    buf_release(&out);
    return st;
}

/* Forks the probe servers before this process starts any thread. */
static enum status run(struct bench *b, struct err *err)
{
    uint8_t own[OWN_SECRET];
    struct probe_server_options o = { .host = "127.0.0.1", .tuning = b->tuning };
    int sender = 0, receiver = 0;
    uint16_t port = 0;
    char sender_at[32] = "", receiver_at[32] = "";
    bool here = !config_is_set(b->c, "peers");
    TRY(node_options_secret(b->c, &b->arena, &b->secret, err));
    if (here) { /* keeps others from using our two processes */
        random_bytes(own, sizeof own);
        b->secret = (struct str){ (const char *)own, sizeof own };
    }
    o.secret = b->secret;
    TRY(probe_server_fork(&o, &sender, &port, err));
    snprintf(sender_at, sizeof sender_at, "127.0.0.1:%u", port);
    enum status st = here ? probe_server_fork(&o, &receiver, &port, err) : OK;
    snprintf(receiver_at, sizeof receiver_at, "127.0.0.1:%u", port);
    if (st == OK) st = run_with(b, sender_at, receiver_at, err);
    probe_server_child_stop(sender);
    probe_server_child_stop(receiver);
    return st;
}

static int fail(const struct err *err, int exit_status)
{
    fprintf(stderr, "baton bench: %s\n", err->text);
    return exit_status;
}

static int bench_kv(struct config *c)
{
    struct err err = { 0 };
    struct bench b = { .c = c };
    arena_init(&b.arena);
    log_set_level(LOG_ERROR);
    b.cells = MEM_ARRAY(struct bench_cell, CELLS_MAX);
    enum status st = read_options(&b, &err);
    if (st == OK) st = node_options_tuning(&b.tuning, &err);
    int exit_status = 0;
    if (st != OK) exit_status = fail(&err, 2);
    else if (run(&b, &err) != OK) exit_status = fail(&err, 1);
    /* Without --transports it is enough that some transport could be measured. */
    else if (b.n_failed && (b.transports_given || b.n_failed == b.n_cells)) exit_status = 1;
    mem_free(b.cells);
    arena_release(&b.arena);
    return exit_status;
}

int cmd_bench(int argc, char **argv)
{
    bool done;
    const char *words[1];
    int n_words = 1;
    struct config *c = command_config("bench", INTRO, argc, argv, words, &n_words, &done);
    if (!c) return done ? 0 : 2;
    int exit_status = 2;
    if (n_words != 1 || !str_eq_c(str_of(words[0]), "kv"))
        fprintf(stderr, "baton bench: say what to measure: `baton bench kv` (--help shows all)\n");
    else exit_status = config_is_set(c, "listen") ? command_listen(c, "bench") : bench_kv(c);
    config_free(c);
    return exit_status;
}
