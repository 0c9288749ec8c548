/* liar.c - a node that is alive, proven, and answers what it likes: cluster.py starts it so that
 * entry nodes meet every failure that another node can report, in every state of a request.
 *
 *     liar HOST SENTINEL,.. MASTER prefill|decode|mixed STATE:WHAT,..
 *
 * Its record is that of a real node of the topic with another role, name and address. The lies are
 * told one after the other, to one request each, and then from the first again. STATE is the
 * request's state when it hears the lie: credit, reserve, prefill, decode (of requests with one
 * logit bias, whose tokens are known) or run. WHAT is a loss as of scheduler/retry.h, or: silent,
 * no answer; vanish, the link is cut. A request that cannot be lied to in the state wanted hears
 * that the node is full. Each lie is a line on stdout. The cluster secret is in
 * BATON_CLUSTER_SECRET. Thread: loop. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#include "scheduler/directory/directory.h"
#include "shared/base/address/host_port.h"
#include "shared/base/hash/hash.h"
#include "shared/base/mem.h"
#include "shared/cluster/answer.h"
#include "shared/cluster/generation_wire.h"

enum { RENEW_MS = 700, LIES_MAX = 64, SENTINELS_MAX = 8, TOKENS_BEFORE_A_LIE = 3 };

struct lie {
    struct str state, what;
};

struct liar {
    struct loop *loop;
    struct cluster *cluster;
    struct directory *directory;
    struct node_record me; /* node 0: no real node was seen yet */
    enum node_role role;
    const char *host;
    uint64_t id;
    struct lie lies[LIES_MAX];
    size_t n_lies, next;
    bool asking;
    struct redis_address at[SENTINELS_MAX];
};

/* What a loss looks like in FAILED. */
static const struct {
    const char *what;
    enum status st;
    enum failed_blame blame;
} LOSSES[] = {
    { "busy", ERR_BUSY, BLAME_NOBODY },       { "peer", ERR_IO, BLAME_NOBODY },
    { "request", ERR_INVALID, BLAME_NOBODY }, { "node", ERR_INTERNAL, BLAME_NODE },
    { "pair", ERR_PEER_LOST, BLAME_PAIR },    { "handed_back", ERR_BUSY, BLAME_HANDED_BACK },
};

static void fail(struct liar *l, const struct cluster_message *m, enum status st,
                 enum failed_blame blame)
{
    const struct failure f = { st, blame, "told by the adversary" };
    answer_send_failed(l->cluster, m->from, m->request, m->attempt, &f);
}

static const struct lie *next_lie(const struct liar *l) { return &l->lies[l->next % l->n_lies]; }

static bool is_next(const struct liar *l, const char *state)
{
    return str_eq_c(next_lie(l)->state, state);
}

/* Tells the next lie about this request. */
static void tell(struct liar *l, const struct cluster_message *m)
{
    const struct lie *lie = next_lie(l);
    l->next++;
    printf("%.*s:%.*s\n", STR_ARG(lie->state), STR_ARG(lie->what));
    fflush(stdout);
    if (str_eq_c(lie->what, "vanish"))
        cluster_disconnect(l->cluster, m->from, "as the script says");
    for (size_t i = 0; i < COUNT_OF(LOSSES); i++)
        if (str_eq_c(lie->what, LOSSES[i].what)) fail(l, m, LOSSES[i].st, LOSSES[i].blame);
}

static void answer(struct liar *l, const struct cluster_message *m, enum frame_type type,
                   const ProtobufCMessage *body)
{
    answer_send(l->cluster, m->from, type, m->request, m->attempt, body);
}

/* ---- as a prefill node ---- */

static void on_ask(struct liar *l, const struct cluster_message *m)
{
    Baton__Credit credit = BATON__CREDIT__INIT;
    if (is_next(l, "credit")) {
        tell(l, m);
    } else {
        answer(l, m, FRAME_CREDIT, &credit.base);
        if (is_next(l, "reserve")) tell(l, m);
    }
}

static void on_prefill(struct liar *l, const struct cluster_message *m)
{
    if (is_next(l, "prefill")) tell(l, m);
    else fail(l, m, ERR_BUSY, BLAME_NOBODY);
}

/* ---- as a decode node ---- */

/* Sends some of the answer's next tokens. False: they are not known, or would be its last. */
static bool send_tokens(struct liar *l, const struct cluster_message *m,
                        const struct generation_wire *g)
{
    const uint32_t n_out = g->n_tokens - g->n_prompt;
    struct buf records = { 0 };
    if (g->sampling.n_bias != 1 || n_out + TOKENS_BEFORE_A_LIE >= g->sampling.max_tokens)
        return false;
    for (uint32_t i = 0; i < TOKENS_BEFORE_A_LIE; i++) {
        const struct token_logprobs t = { .id = g->sampling.bias->id, .rank = 1 };
        token_record_add(&records, m->request, m->attempt, n_out + i, &t);
    }
    enum status st = cluster_send(l->cluster, m->from, FRAME_TOKENS, 0, 0, buf_str(&records));
    buf_release(&records);
    return st == OK;
}

/* A grant, so that the request is in PREFILL; then tokens, if it is to be in DECODE. */
static void lie_later(struct liar *l, const struct cluster_message *m,
                      const struct generation_wire *g)
{
    Baton__Grant grant = BATON__GRANT__INIT;
    if (is_next(l, "decode") && g->sampling.n_bias != 1) {
        fail(l, m, ERR_BUSY, BLAME_NOBODY);
        return;
    }
    answer(l, m, FRAME_GRANT, &grant.base);
    if (is_next(l, "decode") && !send_tokens(l, m, g)) fail(l, m, ERR_BUSY, BLAME_NOBODY);
    else tell(l, m);
}

static void on_generation(struct liar *l, const struct cluster_message *m,
                          const Baton__Generation *pb, bool reserves)
{
    struct arena arena;
    struct generation_wire g;
    struct err err;
    arena_init(&arena);
    if (!pb || generation_wire_decode(pb, &arena, &g, &err) != OK)
        fail(l, m, ERR_FORMAT, BLAME_NOBODY);
    else if (is_next(l, reserves ? "reserve" : "run")) tell(l, m);
    else if (reserves && (is_next(l, "prefill") || is_next(l, "decode"))) lie_later(l, m, &g);
    else fail(l, m, ERR_BUSY, BLAME_NOBODY);
    arena_release(&arena);
}

static void on_reserve(struct liar *l, const struct cluster_message *m)
{
    Baton__Reserve *body = baton__reserve__unpack(NULL, m->body.n, (const uint8_t *)m->body.p);
    on_generation(l, m, body ? body->generation : NULL, true);
    if (body) baton__reserve__free_unpacked(body, NULL);
}

static void on_run(struct liar *l, const struct cluster_message *m)
{
    Baton__Run *body = baton__run__unpack(NULL, m->body.n, (const uint8_t *)m->body.p);
    on_generation(l, m, body ? body->generation : NULL, false);
    if (body) baton__run__free_unpacked(body, NULL);
}

/* ---- as a node of the cluster ---- */

static void on_message(void *arg, const struct cluster_message *m)
{
    struct liar *l = arg;
    switch (m->type) {
    case FRAME_ASK_CREDIT: on_ask(l, m); break;
    case FRAME_PREFILL: on_prefill(l, m); break;
    case FRAME_RESERVE: on_reserve(l, m); break;
    case FRAME_RUN: on_run(l, m); break;
    default: break;
    }
}

static void on_lost(void *arg, uint64_t node, const char *why)
{
    (void)arg;
    (void)node;
    (void)why;
}

/* Becomes like the first real node of the topic, which has room for all. */
static void on_snapshot(void *arg, enum status st, const struct directory_snapshot *s)
{
    struct liar *l = arg;
    l->asking = false;
    if (st != OK || !s->n || l->me.node) return;
    l->me = s->nodes[0];
    l->me.identity = (struct str){ 0 };
    l->me.node = l->id;
    l->me.role = l->role;
    l->me.cluster_port = cluster_port(l->cluster);
    l->me.http_port = 0;
    l->me.resume_ms = 0;
    l->me.max_seqs = l->me.n_blocks = 4096;
    l->me.max_requests = l->me.n_requests = 1; /* nobody passes a request to it */
    l->me.n_running = l->me.n_waiting = l->me.n_blocks_free = 0;
    l->me.waiting_tokens = 0;
    snprintf(l->me.name, sizeof l->me.name, "liar-%s", node_role_name(l->role));
    snprintf(l->me.host, sizeof l->me.host, "%s", l->host);
    node_record_prove(&l->me, str_of(getenv("BATON_CLUSTER_SECRET")));
}

static void on_renew(void *arg)
{
    struct liar *l = arg;
    if (l->me.node) directory_publish(l->directory, &l->me);
    else if (!l->asking) l->asking = directory_snapshot(l->directory, on_snapshot, l) == OK;
}

static void on_signal(void *arg, int signum)
{
    struct liar *l = arg;
    (void)signum;
    loop_stop(l->loop);
}

static void die(const char *what, const struct err *err)
{
    fprintf(stderr, "liar: %s: %s\n", what, err->text);
    exit(2);
}

static void read_lies(struct liar *l, const char *text)
{
    struct str rest = str_of(text), one;
    while (str_split(&rest, ',', &one) && l->n_lies < LIES_MAX) {
        struct lie *lie = &l->lies[l->n_lies++];
        lie->what = one;
        str_split(&lie->what, ':', &lie->state);
    }
}

static void open_directory(struct liar *l, char **argv)
{
    struct directory_options o = { .loop = l->loop, .topic = "default" };
    struct str rest = str_of(argv[2]), one;
    struct err err;
    while (str_split(&rest, ',', &one) && o.redis.n_sentinels < SENTINELS_MAX) {
        char text[HOST_PORT_TEXT_MAX];
        struct redis_address *a = &l->at[o.redis.n_sentinels];
        snprintf(text, sizeof text, "%.*s", STR_ARG(one));
        o.redis.n_sentinels += host_port_parse(text, a->host, &a->port);
    }
    o.redis.sentinels = l->at;
    o.redis.master = argv[3];
    if (directory_open("redis", &o, &l->directory, &err) != OK) die("directory", &err);
}

int main(int argc, char **argv)
{
    static struct liar l;
    struct err err;
    if (argc != 6 || !getenv("BATON_CLUSTER_SECRET")) {
        fprintf(stderr, "usage: liar HOST SENTINEL,.. MASTER ROLE STATE:WHAT,..\n");
        return 2;
    }
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    l.host = argv[1];
    while (l.role < ROLE_DECODE && strcmp(node_role_name(l.role), argv[4]) != 0) l.role++;
    read_lies(&l, argv[5]);
    random_bytes(&l.id, sizeof l.id);
    if (loop_create(&l.loop, &err) != OK) die("loop", &err);
    const struct cluster_options c = {
        .loop = l.loop,
        .listen_host = argv[1],
        .name = "liar",
        .node = l.id,
        .secret = str_of(getenv("BATON_CLUSTER_SECRET")),
        .metrics = metrics_create(),
        .on_message = on_message,
        .on_lost = on_lost,
        .arg = &l,
    };
    if (cluster_create(&c, &l.cluster, &err) != OK) die("cluster", &err);
    open_directory(&l, argv);
    struct loop_timer *renew = loop_timer_start(l.loop, 1, RENEW_MS, on_renew, &l);
    loop_on_signal(l.loop, on_signal, &l);
    loop_run(l.loop);
    loop_timer_free(renew);
    return 0;
}
