/* bench_fetch.c - KV of a prompt that a node fetches from a peer, next to a transfer of the same
 * blocks that nobody has to ask for.
 *
 *     bench_fetch [ipc|tcp, default tcp] [tokens of a prompt, default 1984] [rounds, default 7]
 *
 * Both nodes run in this process, with the model of BATON_TEST_GGUF. The peer computes three
 * prompts, which the node then fetches in turn into a pool that holds one and a half. A fetch lasts
 * from the engine's event to the blocks that it may use: message, the peer's engine, the transfer,
 * checksums. The limit is kvtransfer alone with the same pieces, from the grant to the last byte
 * verified, measured in turn with it. */
#define WORKER_PROMPT_MAX 8192
#include <stdlib.h>

#include "shared/base/log.h"
#include "tests/unit/decode/worker_rig.h"

enum { BLOCK = 64, PROMPTS = 3, PATIENCE_MS = 120000 };

static const struct kv_store_options ALWAYS = { .always = true };

/* ---- kvtransfer alone ---- */

struct side {
    struct kvt *kvt;
    struct dev_mem mem;
    int32_t *blocks;
    _Atomic int connected, sent, received;
};

struct plain {
    struct kv_layout layout;
    struct device *device;
    struct side from, to;
    uint64_t peer, next_id;
    uint32_t n_blocks;
};

static void on_event(void *arg, const struct kvt_event *ev)
{
    struct side *s = arg;
    if (ev->kind == KVT_CONNECTED) s->connected++;
    else if (ev->kind == KVT_SENT) s->sent++;
    else if (ev->kind == KVT_RECEIVED) s->received++;
    else if (ev->kind == KVT_SEND_FAILED || ev->kind == KVT_RECEIVE_FAILED)
        test_fail(__FILE__, __LINE__, "%s", ev->text);
}

static void await_count(const _Atomic int *counter, int value)
{
    while (*counter < value) nanosleep(&(struct timespec){ .tv_nsec = 20000 }, NULL);
}

static int32_t *shuffled(uint32_t n, uint64_t seed)
{
    int32_t *t = MEM_ARRAY(int32_t, n);
    for (uint32_t i = 0; i < n; i++) t[i] = (int32_t)i;
    for (uint32_t i = n; i > 1; i--) {
        const uint32_t j = (uint32_t)(rng_uniform(seed, 1, i) * i);
        const int32_t swap = t[i - 1];
        t[i - 1] = t[j];
        t[j] = swap;
    }
    return t;
}

static void side_open(struct plain *p, struct side *s, const char *protocol, uint64_t seed)
{
    struct err err = { 0 };
    const size_t bytes = kv_layout_pool_bytes(&p->layout);
    CHECK_OK(device_mem_alloc(p->device, bytes, DEVICE_MEM_SHARED, &s->mem, &err));
    memset(s->mem.ptr, 1, bytes); /* no page faults are measured */
    s->blocks = shuffled(p->layout.n_blocks, seed);
    const struct kvt_options o = {
        .layout = p->layout,
        .mem = &s->mem,
        .protocols = protocol,
        .listen_host = "127.0.0.1",
        .checksum = true,
        .n_transfers = 4,
        .on_event = on_event,
        .arg = s,
    };
    if (kvt_create(&o, &s->kvt, &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
}

static void plain_open(struct plain *p, const struct kv_layout *layout, const char *protocol,
                       uint32_t n_blocks)
{
    struct err err = { 0 };
    struct buf hello = { 0 }, answer = { 0 };
    *p = (struct plain){ .layout = *layout, .n_blocks = n_blocks };
    CHECK_OK(device_open("cpu", &p->device, &err));
    side_open(p, &p->from, protocol, 1);
    side_open(p, &p->to, protocol, 2);
    kvt_hello(p->from.kvt, &hello);
    CHECK_OK(kvt_answer(p->to.kvt, buf_str(&hello), &answer, &err));
    CHECK_OK(kvt_connect(p->from.kvt, buf_str(&answer), &p->peer, &err));
    await_count(&p->from.connected, 1);
    buf_release(&hello);
    buf_release(&answer);
}

/* Seconds of one transfer. */
static double plain_run(struct plain *p)
{
    struct buf grant = { 0 };
    struct err err = { 0 };
    const uint32_t n_tokens = p->n_blocks * p->layout.block_tokens;
    const uint64_t id = ++p->next_id, begin = clock_ns();
    const int was = p->to.received;
    CHECK_OK(kvt_expect(p->to.kvt, id, p->to.blocks, p->n_blocks, 0, n_tokens, &grant));
    CHECK_OK(kvt_send_open(p->from.kvt, id, p->peer, buf_str(&grant), &err));
    for (uint32_t layer = 0; layer < p->layout.n_layers; layer++)
        CHECK_OK(kvt_send_ready(p->from.kvt, id, layer, 0, n_tokens, p->from.blocks));
    kvt_send_finish(p->from.kvt, id);
    await_count(&p->to.received, was + 1);
    const double s = (double)(clock_ns() - begin) * 1e-9;
    buf_release(&grant);
    return s;
}

static void plain_close(struct plain *p)
{
    struct side *const sides[] = { &p->from, &p->to };
    for (int i = 0; i < 2; i++) {
        kvt_free(sides[i]->kvt);
        device_mem_free(p->device, &sides[i]->mem);
        mem_free(sides[i]->blocks);
    }
    device_close(p->device);
}

/* ---- from a peer ---- */

struct pair {
    struct cluster_rig rig;
    struct worker_node *has, *wants;
    struct entry e;
    uint64_t next_request;
    uint32_t n_tokens;
};

static struct gen *run(struct pair *t, struct worker_node *on, uint64_t seed, bool fetches)
{
    struct gen *g = entry_add(&t->e, t->next_request++, t->n_tokens, seed, 1);
    if (fetches) {
        g->kept_by = t->has->peer->id;
        g->kept_port = cluster_port(t->has->peer->c);
        g->n_kept = t->n_tokens;
    }
    entry_generate(&t->e, g, on, FRAME_RUN);
    RIG_WAIT_MS(&t->rig, g->finished || g->failed, PATIENCE_MS);
    if (g->failed) test_fail(__FILE__, __LINE__, "%s", g->text);
    return g;
}

static void pair_open(struct pair *t, const char *protocol, uint32_t n_tokens)
{
    const uint32_t n = n_tokens / BLOCK + 2;
    struct worker_options o = {
        .model = getenv("BATON_TEST_GGUF"),
        .threads = (uint32_t)sysconf(_SC_NPROCESSORS_ONLN),
        .protocols = protocol,
        .step_tokens = 512,
        .block_tokens = BLOCK,
        .n_blocks = PROMPTS * n,
        .tiers = &ALWAYS,
        .wakes = true,
    };
    if (!o.model) test_fail(__FILE__, __LINE__, "BATON_TEST_GGUF is not set");
    *t = (struct pair){ .n_tokens = n_tokens, .next_request = 1 };
    cluster_rig_open(&t->rig);
    t->has = worker_open(&t->rig, 1, o);
    o.n_blocks = n + n / 2;
    t->wants = worker_open(&t->rig, 2, o);
    entry_open(&t->e, &t->rig);
}

static void pair_close(struct pair *t)
{
    RIG_WAIT(&t->rig, worker_is_idle(t->has) && worker_is_idle(t->wants));
    entry_close(&t->e);
    worker_close(t->has);
    worker_close(t->wants);
    cluster_rig_close(&t->rig);
}

/* ---- rounds ---- */

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *v, int n)
{
    qsort(v, (size_t)n, sizeof *v, by_value);
    return v[n / 2];
}

static void measure(struct pair *t, struct plain *p, const char *protocol, int rounds)
{
    double *fetch = MEM_ARRAY(double, rounds), *alone = MEM_ARRAY(double, rounds),
           *ratio = MEM_ARRAY(double, rounds);
    const double gb = (double)kv_layout_block_bytes(&p->layout) * p->n_blocks * 1e-9;
    for (int i = -1; i < rounds; i++) { /* the first connects and is not counted */
        struct gen *g = run(t, t->wants, 10 + (uint64_t)(i + 1) % PROMPTS, true);
        CHECK_EQ_INT(g->n_peer, p->n_blocks * BLOCK);
        const double alone_s = plain_run(p);
        if (i < 0) continue;
        fetch[i] = gb / ((double)g->load_ns * 1e-9);
        alone[i] = gb / alone_s;
        ratio[i] = fetch[i] / alone[i];
    }
    const double fetch_median = median(fetch, rounds), alone_median = median(alone, rounds);
    printf("%s, %u tokens, %.1f MB, %d rounds: fetched at %.2f GB/s   limit %.2f (kvtransfer "
           "alone)   ratio of the medians %.3f, median ratio %.3f (at least 0.85 is wanted)\n",
           protocol, t->n_tokens, gb * 1e3, rounds, fetch_median, alone_median,
           fetch_median / alone_median, median(ratio, rounds));
    mem_free(fetch);
    mem_free(alone);
    mem_free(ratio);
}

int main(int argc, char **argv)
{
    const char *protocol = argc > 1 ? argv[1] : "tcp";
    const uint32_t n_tokens = argc > 2 ? (uint32_t)atoi(argv[2]) : 1984;
    const int rounds = argc > 3 ? atoi(argv[3]) : 7;
    struct pair t;
    struct plain p;
    log_set_level(LOG_WARN);
    pair_open(&t, protocol, n_tokens);
    for (uint64_t seed = 0; seed < PROMPTS; seed++) (void)run(&t, t.has, 10 + seed, false);
    struct kv_layout l = *engine_kv_layout(t.has->engine);
    plain_open(&p, &l, protocol, (n_tokens - 1) / BLOCK);
    measure(&t, &p, protocol, rounds);
    plain_close(&p);
    pair_close(&t);
    return 0;
}
