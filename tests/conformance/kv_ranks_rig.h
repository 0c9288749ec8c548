/* kv_ranks_rig.h - nodes of several ranks with real workers, followers, kvt objects and cluster
 * links, on one loop. The test plays the entry node.
 *
 * The engine is a double (this file defines the functions of engine.h that the workers call): it has
 * blocks, writes generated KV into the pools of all ranks of a prefill node, followers later than
 * the leader, and compares every bit in the pools of all ranks of a decode node, or of a node that
 * fetches blocks. A free block is full of FREE_BYTE on every rank, so that a late write shows, and
 * one that is read too long: what a node keeps for peers is given up with the end of its last lend
 * after rig_forget. Included by one test program each. */
#ifndef BATON_TESTS_CONFORMANCE_KV_RANKS_RIG_H
#define BATON_TESTS_CONFORMANCE_KV_RANKS_RIG_H

#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "decode/decode.h"
#include "decode/decode_follow.h"
#include "prefill/prefill.h"
#include "prefill/prefill_follow.h"
#include "shared/cluster/generation_wire.h"
#include "shared/kv/kv_parts.h"
#include "tests/fixtures/kvt_bytes.h"
#include "tests/unit/cluster/cluster_rig.h"

enum {
    RANKS = 4,
    BLOCK_TOKENS = 16,
    N_BLOCKS = 64,
    LAYERS = 3,
    BLOCKS_MAX = 16, /* of a sequence */
    SEQS_MAX = 32,
    EVENTS_MAX = 4096,
    PLANS_MAX = 64,
    FREE_BYTE = 0xfe,
    CHUNK = 40, /* prompt tokens computed at a time */
    LAG = 3     /* turns that a follower's engine is behind */
};
#define DECODE_IDS  (UINT64_C(1) << 56)
#define PREFILL_IDS (UINT64_C(2) << 56)

/* ---- shapes: KV heads and head sizes of the models in tests/data/goldens ---- */

static struct kv_layout shape(uint32_t n_heads, uint32_t head_dim, bool latent)
{
    return (struct kv_layout){
        .model_fingerprint = 5,
        .dtype = DTYPE_F32,
        .block_tokens = BLOCK_TOKENS,
        .n_layers = LAYERS,
        .n_kv_heads = n_heads,
        .model_kv_heads = n_heads,
        .head_dim = head_dim,
        .tp_size = 1,
        .n_blocks = N_BLOCKS,
        .latent = latent,
    };
}

static struct kv_layout llama(void) { return shape(1, 16, false); }
static struct kv_layout deepseek_v3(void) { return shape(1, 40, true); }

/* ---- the model's KV: bits of f32 ---- */

static uint32_t kv_bits(uint64_t request, uint32_t layer, uint32_t head, uint32_t part,
                        uint32_t token, uint32_t i)
{
    uint64_t x = request * 0x9e3779b97f4a7c15u +
                 ((((layer * 64ull + head) * 2 + part) * 4096 + token) * 1024 + i);
    x ^= x >> 29;
    x *= 0xbf58476d1ce4e5b9u;
    return (uint32_t)(x >> 32);
}

struct proc {
    struct tp_node *node;
    uint32_t rank;
    uint64_t id; /* incarnation */
    uint16_t port;
    pid_t child; /* 0: it lives in this process; else only its memory is seen here */
    struct peer_node *peer;
    struct device *device;
    struct dev_mem mem;
    struct kv_layout layout;
    struct kvt *kvt;
    pthread_mutex_t lock; /* of the events below */
    struct kvt_event events[EVENTS_MAX];
    size_t n_events;
    uint64_t ended[EVENTS_MAX]; /* ids of SENT and SEND_FAILED */
    size_t n_ended;
    struct decode_worker *decode; /* the leader's */
    struct prefill_worker *prefill;
    struct decode_follower *decode_follow; /* a follower's */
    struct prefill_follower *prefill_follow;
};

/* Runs over one token's values of a rank: writes the model's, or compares with them. */
static bool token_kv(const struct proc *p, uint64_t request, uint32_t layer, int32_t block,
                     uint32_t token, bool write)
{
    const struct kv_layout *l = &p->layout;
    char *piece = (char *)p->mem.ptr + kv_layout_offset(l, layer, (uint32_t)block);
    bool same = true;
    for (uint32_t h = 0; h < l->n_kv_heads; h++)
        for (uint32_t part = 0; part < kv_layout_n_parts(l); part++) {
            size_t row = ((size_t)h * kv_layout_n_parts(l) + part) * BLOCK_TOKENS +
                         token % BLOCK_TOKENS;
            uint32_t *values = (uint32_t *)piece + row * l->head_dim;
            for (uint32_t i = 0; i < l->head_dim; i++) {
                uint32_t want = kv_bits(request, layer, l->first_head + h, part, token, i);
                if (write) values[i] = want;
                else same &= values[i] == want;
            }
        }
    return same;
}

static void tokens_write(const struct proc *p, uint64_t request, uint32_t layer,
                         const int32_t *blocks, uint32_t begin, uint32_t end)
{
    for (uint32_t t = begin; t < end; t++)
        token_kv(p, request, layer, blocks[t / BLOCK_TOKENS], t, true);
}

/* ---- the engine ---- */

enum fake_kind {
    FAKE_NONE,
    FAKE_RESERVED,
    FAKE_QUARANTINED,
    FAKE_PREFILL,
    FAKE_COMPUTED,
    FAKE_KEPT,   /* blocks of which peers may have some */
    FAKE_LENT,   /* a hold on those of a kept one, for one peer */
    FAKE_FETCHES /* blocks that a peer fills */
};

struct fake_seq {
    enum fake_kind kind;
    uint64_t id, request;
    uint32_t n_tokens, n_blocks, n_cached;
    int32_t blocks[BLOCKS_MAX];
    uint32_t done[RANKS]; /* (chunk, layer) pairs that each rank has computed */
    uint32_t n_holds;     /* KEPT: lends of it */
    bool forgotten;       /* KEPT: it goes with the last of them */
    struct fake_seq *of;  /* LENT */
    struct fetched *out;  /* FETCHES */
};

/* What came of a fetch. */
struct fetched {
    uint64_t id;
    bool over, hangs;
    uint32_t n_good;
};

struct engine {
    struct tp_node *node;
    struct fake_seq seqs[SEQS_MAX];
    bool taken[N_BLOCKS];
    uint32_t n_free;
    struct engine_event events[EVENTS_MAX];
    int32_t event_blocks[EVENTS_MAX][BLOCKS_MAX];
    struct hash128 event_keys[EVENTS_MAX][BLOCKS_MAX];
    size_t n_events;
    uint32_t n_verified;
};

struct tp_node {
    struct cluster_rig *rig;
    uint32_t n;
    struct proc *procs[RANKS]; /* NULL: dead */
    struct engine engine;
    struct metrics *metrics;
    struct loop_timer *poll;
    uint32_t cached; /* prompt tokens that every reservation finds in the cache */
    /* of a prefill node, by request: who sends each part */
    struct {
        uint32_t n, from[KV_PARTS_MAX];
    } plans[PLANS_MAX];
};

const struct kv_layout *engine_kv_layout(const struct engine *e)
{
    return &e->node->procs[0]->layout;
}

static void block_fill(const struct tp_node *n, int32_t block)
{
    for (uint32_t r = 0; r < n->n; r++)
        for (uint32_t layer = 0; n->procs[r] && layer < n->procs[r]->layout.n_layers; layer++)
            memset((char *)n->procs[r]->mem.ptr +
                       kv_layout_offset(&n->procs[r]->layout, layer, (uint32_t)block),
                   FREE_BYTE, kv_layout_piece_bytes(&n->procs[r]->layout));
}

/* Nothing has been written into a block since it was given back. */
static void block_is_untouched(const struct tp_node *n, int32_t block)
{
    for (uint32_t r = 0; r < n->n; r++) {
        const struct proc *p = n->procs[r];
        for (uint32_t layer = 0; p && layer < p->layout.n_layers; layer++) {
            const uint8_t *b = (const uint8_t *)p->mem.ptr +
                               kv_layout_offset(&p->layout, layer, (uint32_t)block);
            for (size_t i = 0; i < kv_layout_piece_bytes(&p->layout); i++)
                if (b[i] != FREE_BYTE)
                    test_fail(__FILE__, __LINE__, "rank %u: block %d was written to after its end",
                              r, block);
        }
    }
}

static void free_blocks_are_untouched(const struct tp_node *n)
{
    for (int32_t b = 0; b < N_BLOCKS; b++)
        if (!n->engine.taken[b]) block_is_untouched(n, b);
}

static struct fake_seq *fake_find(struct engine *e, uint64_t id)
{
    for (int i = 0; i < SEQS_MAX; i++)
        if (e->seqs[i].kind != FAKE_NONE && e->seqs[i].id == id) return &e->seqs[i];
    return NULL;
}

static struct fake_seq *fake_add(struct engine *e, const struct engine_request *r,
                                 enum fake_kind kind)
{
    struct fake_seq *s = NULL;
    uint32_t n = (r->n_tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS, given = 0;
    for (int i = 0; i < SEQS_MAX && !s; i++)
        if (e->seqs[i].kind == FAKE_NONE) s = &e->seqs[i];
    CHECK(s && n <= BLOCKS_MAX && n <= e->n_free);
    *s = (struct fake_seq){
        .kind = kind, .id = r->id, .request = r->request, .n_tokens = r->n_tokens, .n_blocks = n
    };
    for (int32_t b = N_BLOCKS - 1; given < n; b--) { /* the leader's tables run backwards */
        if (e->taken[b]) continue;
        block_is_untouched(e->node, b);
        e->taken[b] = true;
        s->blocks[given++] = b;
    }
    e->n_free -= n;
    return s;
}

static void fake_free(struct engine *e, struct fake_seq *s)
{
    for (uint32_t i = 0; i < s->n_blocks; i++) {
        block_fill(e->node, s->blocks[i]);
        e->taken[s->blocks[i]] = false;
    }
    e->n_free += s->n_blocks;
    s->kind = FAKE_NONE;
}

static struct engine_event *fake_event(struct engine *e, enum engine_event_kind kind, uint64_t id)
{
    CHECK(e->n_events < EVENTS_MAX);
    struct engine_event *ev = &e->events[e->n_events++];
    *ev = (struct engine_event){ .kind = kind, .id = id, .stop_token = -1 };
    return ev;
}

enum status engine_reserve(struct engine *e, const struct engine_request *r)
{
    struct fake_seq *s = fake_add(e, r, FAKE_RESERVED);
    const struct tp_node *n = e->node;
    s->n_cached = n->cached < r->n_tokens ? n->cached : 0;
    for (uint32_t k = 0; k < n->n; k++)
        for (uint32_t layer = 0; n->procs[k] && layer < n->procs[k]->layout.n_layers; layer++)
            tokens_write(n->procs[k], s->request, layer, s->blocks, 0, s->n_cached);
    size_t at = e->n_events;
    struct engine_event *ev = fake_event(e, ENGINE_RESERVED, r->id);
    memcpy(e->event_blocks[at], s->blocks, sizeof s->blocks);
    ev->blocks = e->event_blocks[at];
    ev->n_blocks = s->n_blocks;
    ev->n_cached = s->n_cached;
    return OK;
}

/* The sequence would decode: its KV must be here, on all ranks, bit for bit. */
enum status engine_activate(struct engine *e, uint64_t id, const struct token_logprobs *first,
                            const float *hidden, uint32_t n_hidden)
{
    (void)hidden, (void)n_hidden;
    struct fake_seq *s = fake_find(e, id);
    CHECK(s && s->kind == FAKE_RESERVED && first->id == (int32_t)(s->request & 0xff));
    for (uint32_t r = 0; r < e->node->n; r++) {
        const struct proc *p = e->node->procs[r];
        for (uint32_t layer = 0; p && layer < p->layout.n_layers; layer++)
            for (uint32_t t = 0; t < s->n_tokens; t++)
                if (!token_kv(p, s->request, layer, s->blocks[t / BLOCK_TOKENS], t, false))
                    test_fail(__FILE__, __LINE__, "request %llu rank %u layer %u token %u differs",
                              (unsigned long long)s->request, r, layer, t);
    }
    e->n_verified++;
    fake_free(e, s);
    fake_event(e, ENGINE_FINISHED, id)->finish = FINISH_LENGTH;
    return OK;
}

enum status engine_submit(struct engine *e, const struct engine_request *r)
{
    CHECK(r->prefill_only);
    fake_add(e, r, FAKE_PREFILL);
    return OK;
}

enum status engine_cancel(struct engine *e, uint64_t id, bool fenced)
{
    struct fake_seq *s = fake_find(e, id);
    if (!s) return OK;
    CHECK(s->kind == FAKE_RESERVED || s->kind == FAKE_PREFILL || s->kind == FAKE_COMPUTED);
    if (fenced) fake_free(e, s);
    else s->kind = FAKE_QUARANTINED;
    fake_event(e, ENGINE_CANCELED, id);
    return OK;
}

/* No sequence is preempted here, so nobody looks at its times. */
void engine_get_stats(const struct engine *e, struct engine_stats *out)
{
    (void)e;
    *out = (struct engine_stats){ 0 };
}

enum status engine_free_quarantined(struct engine *e, uint64_t id)
{
    struct fake_seq *s = fake_find(e, id);
    CHECK(!s || s->kind == FAKE_QUARANTINED);
    if (s) fake_free(e, s);
    return OK;
}

/* ---- blocks that peers have, and that come from them ---- */

static struct hash128 fake_key(uint64_t request, uint32_t i)
{
    return (struct hash128){ .lo = request, .hi = i + 1 };
}

/* The node has the first n_blocks of the request's KV, on all ranks. */
__attribute__((unused)) static struct fake_seq *rig_keep(struct tp_node *n, uint64_t request,
                                                         uint32_t n_blocks)
{
    const struct engine_request r = { .request = request, .n_tokens = n_blocks * BLOCK_TOKENS };
    struct fake_seq *s = fake_add(&n->engine, &r, FAKE_KEPT);
    for (uint32_t k = 0; k < n->n; k++)
        for (uint32_t layer = 0; n->procs[k] && layer < n->procs[k]->layout.n_layers; layer++)
            tokens_write(n->procs[k], request, layer, s->blocks, 0, s->n_tokens);
    return s;
}

static void drop_kept(struct engine *e, struct fake_seq *s)
{
    if (s->forgotten && s->n_holds == 0) fake_free(e, s);
}

__attribute__((unused)) static void rig_forget(struct tp_node *n, struct fake_seq *kept)
{
    kept->forgotten = true;
    drop_kept(&n->engine, kept);
}

/* A sequence of the node needs n_blocks of the request's KV, which `peer` of n_ranks should have. */
__attribute__((unused)) static void rig_fetch(struct tp_node *n, uint64_t request,
                                              uint32_t n_blocks, uint64_t peer, uint32_t n_ranks,
                                              uint32_t patience_ms, struct fetched *out)
{
    struct engine *e = &n->engine;
    static uint64_t ids;
    *out = (struct fetched){ .id = DECODE_IDS / 2 + ++ids };
    const struct engine_request r = { .id = out->id,
                                      .request = request,
                                      .n_tokens = n_blocks * BLOCK_TOKENS };
    struct fake_seq *s = fake_add(e, &r, FAKE_FETCHES);
    s->out = out;
    const size_t at = e->n_events;
    struct engine_event *ev = fake_event(e, ENGINE_FETCH, r.id);
    memcpy(e->event_blocks[at], s->blocks, sizeof s->blocks);
    for (uint32_t i = 0; i < n_blocks; i++) e->event_keys[at][i] = fake_key(request, i);
    ev->n_blocks = n_blocks;
    ev->peer = peer;
    ev->n_peer_ranks = n_ranks;
    ev->patience_ms = patience_ms;
}

__attribute__((unused)) static void rig_fetch_off(struct tp_node *n, const struct fetched *f)
{
    if (!f->over) fake_event(&n->engine, ENGINE_FETCH_OFF, f->id);
}

/* What came is on all ranks, bit for bit; nothing writes to the blocks any more. */
enum status engine_fetched(struct engine *e, uint64_t id, uint32_t n_good)
{
    struct fake_seq *s = fake_find(e, id);
    CHECK(s && s->kind == FAKE_FETCHES && !s->out->over && n_good <= s->n_blocks);
    for (uint32_t r = 0; r < e->node->n; r++) {
        const struct proc *p = e->node->procs[r];
        for (uint32_t layer = 0; p && layer < p->layout.n_layers; layer++)
            for (uint32_t t = 0; t < n_good * BLOCK_TOKENS; t++)
                if (!token_kv(p, s->request, layer, s->blocks[t / BLOCK_TOKENS], t, false))
                    test_fail(__FILE__, __LINE__, "fetch of %llu rank %u layer %u token %u differs",
                              (unsigned long long)s->request, r, layer, t);
    }
    s->out->over = true;
    s->out->n_good = n_good;
    fake_free(e, s);
    return OK;
}

enum status engine_fetch_hangs(struct engine *e, uint64_t id)
{
    struct fake_seq *s = fake_find(e, id);
    CHECK(s && s->kind == FAKE_FETCHES && !s->out->over);
    s->out->hangs = true;
    return OK;
}

enum status engine_lend(struct engine *e, uint64_t id, const struct hash128 *keys, uint32_t n)
{
    struct fake_seq *kept = NULL, *s = NULL;
    for (int i = 0; i < SEQS_MAX; i++) {
        struct fake_seq *one = &e->seqs[i];
        if (one->kind == FAKE_KEPT && !one->forgotten && one->request == keys[0].lo) kept = one;
        if (one->kind == FAKE_NONE && !s) s = one;
    }
    CHECK(s && !fake_find(e, id));
    *s = (struct fake_seq){ .kind = FAKE_LENT, .id = id, .of = kept };
    const size_t at = e->n_events;
    struct engine_event *ev = fake_event(e, ENGINE_LENT, id);
    if (!kept) return OK;
    kept->n_holds++;
    for (; ev->n_blocks < n && ev->n_blocks < kept->n_blocks; ev->n_blocks++) {
        const struct hash128 want = fake_key(kept->request, ev->n_blocks);
        CHECK(memcmp(&keys[ev->n_blocks], &want, sizeof want) == 0);
    }
    memcpy(e->event_blocks[at], kept->blocks, sizeof kept->blocks);
    return OK;
}

static void end_lend(struct engine *e, struct fake_seq *s)
{
    s->kind = FAKE_NONE;
    if (!s->of) return;
    CHECK(s->of->n_holds-- > 0);
    drop_kept(e, s->of);
}

/* ---- the end of a prompt's blocks ---- */

static bool has_ended(struct proc *p, uint64_t id)
{
    bool found = false;
    pthread_mutex_lock(&p->lock);
    for (size_t i = 0; i < p->n_ended && !found; i++) found = p->ended[i] == id;
    pthread_mutex_unlock(&p->lock);
    return found;
}

/* No rank may read the blocks any more. */
enum status engine_release(struct engine *e, uint64_t id)
{
    struct fake_seq *s = fake_find(e, id);
    if (s && s->kind == FAKE_LENT) {
        end_lend(e, s);
        return OK;
    }
    CHECK(s && s->kind == FAKE_COMPUTED && s->request < PLANS_MAX);
    for (uint32_t i = 0; i < e->node->plans[s->request].n; i++) {
        struct proc *p = e->node->procs[e->node->plans[s->request].from[i]];
        if (p && !has_ended(p, id + i))
            test_fail(__FILE__, __LINE__, "released while rank %u sends part %u", p->rank, i);
    }
    fake_free(e, s);
    return OK;
}

/* One rank computes its next (chunk, layer). False: it has all. */
static bool fake_step(struct proc *p, struct fake_seq *s)
{
    uint32_t n_layers = p->layout.n_layers, step = s->done[p->rank];
    uint32_t begin = step / n_layers * CHUNK, layer = step % n_layers;
    if (begin >= s->n_tokens) return false;
    uint32_t end = begin + CHUNK < s->n_tokens ? begin + CHUNK : s->n_tokens;
    tokens_write(p, s->request, layer, s->blocks, begin, end);
    prefill_on_kv_ready(p->kvt, s->id, layer, begin, end, s->blocks, 0);
    s->done[p->rank]++;
    return true;
}

/* The leader is done as soon as it has its own share: followers announce their last layers later. */
static void fake_compute(struct tp_node *n, struct fake_seq *s)
{
    bool leads = s->kind == FAKE_PREFILL && fake_step(n->procs[0], s);
    for (uint32_t r = 1; r < n->n; r++)
        if (n->procs[r] && s->done[r] + (s->kind == FAKE_PREFILL && leads ? LAG : 0) < s->done[0])
            fake_step(n->procs[r], s);
    if (leads || s->kind != FAKE_PREFILL) return;
    s->kind = FAKE_COMPUTED;
    struct engine_event *ev = fake_event(&n->engine, ENGINE_TOKEN, s->id);
    ev->lp.id = (int32_t)(s->request & 0xff);
    fake_event(&n->engine, ENGINE_FINISHED, s->id);
}

static void fake_turn(struct tp_node *n)
{
    struct engine *e = &n->engine;
    static struct engine_event events[EVENTS_MAX];
    for (int i = 0; i < SEQS_MAX; i++)
        if (e->seqs[i].kind == FAKE_PREFILL || e->seqs[i].kind == FAKE_COMPUTED)
            fake_compute(n, &e->seqs[i]);
    size_t n_events = e->n_events;
    memcpy(events, e->events, n_events * sizeof *events);
    e->n_events = 0;
    for (size_t i = 0; i < n_events; i++) {
        int32_t blocks[BLOCKS_MAX];
        struct hash128 keys[BLOCKS_MAX];
        memcpy(blocks, e->event_blocks[i], sizeof blocks);
        memcpy(keys, e->event_keys[i], sizeof keys);
        events[i].blocks = blocks;
        events[i].keys = keys;
        const bool fetches = events[i].kind == ENGINE_FETCH || events[i].kind == ENGINE_FETCH_OFF;
        if (fetches || events[i].id & DECODE_IDS) decode_on_engine(n->procs[0]->decode, &events[i]);
        else prefill_on_engine(n->procs[0]->prefill, &events[i]);
    }
}

/* ---- processes ---- */

static void proc_on_kvt(void *arg, const struct kvt_event *ev)
{
    struct proc *p = arg;
    pthread_mutex_lock(&p->lock);
    CHECK(p->n_events < EVENTS_MAX);
    p->events[p->n_events++] = *ev;
    if (ev->kind == KVT_SENT || ev->kind == KVT_SEND_FAILED) p->ended[p->n_ended++] = ev->id;
    CHECK(p->n_ended < EVENTS_MAX);
    pthread_mutex_unlock(&p->lock);
}

static void proc_poll(struct proc *p)
{
    static struct kvt_event events[EVENTS_MAX];
    pthread_mutex_lock(&p->lock);
    size_t n = p->n_events;
    memcpy(events, p->events, n * sizeof *events);
    p->n_events = 0;
    pthread_mutex_unlock(&p->lock);
    for (size_t i = 0; i < n; i++) {
        const struct kvt_event *ev = &events[i];
        bool of_peer = kvt_event_is_of_peer(ev->kind);
        bool of_decode = !of_peer && ev->id & DECODE_IDS;
        if (p->rank == 0 && of_decode) decode_on_kvt(p->decode, ev);
        else if (p->rank == 0) prefill_on_kvt(p->prefill, ev);
        else if (of_decode) decode_follow_on_kvt(p->decode_follow, ev);
        else prefill_follow_on_kvt(p->prefill_follow, ev);
    }
}

static bool proc_on_message(void *arg, const struct cluster_message *m)
{
    struct proc *p = arg;
    if (p->rank == 0)
        return prefill_on_message(p->prefill, m) || decode_on_message(p->decode, m) ||
               m->type == FRAME_CANCEL;
    return prefill_follow_on_message(p->prefill_follow, m) ||
           decode_follow_on_message(p->decode_follow, m);
}

static void proc_on_lost(void *arg, uint64_t node, const char *why)
{
    struct proc *p = arg;
    (void)why;
    if (p->rank == 0) {
        prefill_on_lost(p->prefill, node);
        decode_on_lost(p->decode, node);
    } else {
        prefill_follow_on_lost(p->prefill_follow, node);
        decode_follow_on_lost(p->decode_follow, node);
    }
}

struct tp_options {
    uint64_t first_id; /* of the processes */
    uint32_t n, cached;
    struct kv_layout model; /* as one rank holds it */
    const char *protocols;
    const char *faults[RANKS]; /* plan of each rank; NULL: none */
    uint32_t apart;            /* a follower that is a real process and receives; 0: none */
};

static struct proc *proc_alloc(struct tp_node *n, const struct tp_options *o, uint32_t rank)
{
    struct proc *p = MEM_NEW(struct proc);
    struct err err = { 0 };
    pthread_mutex_init(&p->lock, NULL);
    p->node = n;
    p->rank = rank;
    p->id = o->first_id + rank;
    p->layout = kv_layout_of_rank(&o->model, rank, o->n);
    CHECK_OK(device_open("cpu", &p->device, &err));
    CHECK_OK(device_mem_alloc(p->device, kv_layout_pool_bytes(&p->layout), DEVICE_MEM_SHARED,
                              &p->mem, &err));
    return p;
}

static void proc_start(struct proc *p, struct cluster_rig *rig, const struct tp_options *o)
{
    struct err err = { 0 };
    struct kvt_options ko = {
        .layout = p->layout,
        .mem = &p->mem,
        .device = p->device,
        .protocols = o->protocols,
        .listen_host = "127.0.0.1",
        .checksum = true,
        .n_transfers = 64,
        .tuning = { .fault = o->faults[p->rank] },
        .on_event = proc_on_kvt,
        .arg = p,
    };
    if (kvt_create(&ko, &p->kvt, &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
    p->peer = peer_open(rig, p->id, (struct peer_options){ 0 });
    p->port = cluster_port(p->peer->c);
    p->peer->hook = proc_on_message;
    p->peer->lost_hook = proc_on_lost;
    p->peer->arg = p;
}

static void child_poll(void *arg) { proc_poll(arg); }

/* The process of a decode node's follower: its pool is memory that the test has mapped, too. */
static _Noreturn void child_main(struct proc *p, const struct tp_options *o, int fd)
{
    struct cluster_rig rig;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    cluster_rig_open(&rig);
    proc_start(p, &rig, o);
    p->decode_follow = decode_follow_create(&(struct decode_follow_options){
        .kvt = p->kvt, .layout = p->layout, .cluster = p->peer->c, .leader = o->first_id });
    p->prefill_follow = prefill_follow_create(
        &(struct prefill_follow_options){ .loop = rig.loop,
                                          .kvt = p->kvt,
                                          .layout = p->layout,
                                          .cluster = p->peer->c,
                                          .leader = o->first_id });
    loop_timer_start(rig.loop, 1, 1, child_poll, p);
    if (write(fd, &p->port, sizeof p->port) != sizeof p->port) _exit(2);
    for (;;) uv_run(loop_uv(rig.loop), UV_RUN_ONCE);
}

/* Before this process has threads. */
static void child_start(struct proc *p, const struct tp_options *o)
{
    int fds[2];
    CHECK(pipe(fds) == 0);
    p->child = fork();
    CHECK(p->child >= 0);
    if (p->child == 0) child_main(p, o, fds[1]);
    CHECK(read(fds[0], &p->port, sizeof p->port) == sizeof p->port);
    close(fds[0]);
    close(fds[1]);
}

static void leader_open(struct tp_node *n)
{
    struct proc *p = n->procs[0];
    uint64_t followers[RANKS];
    struct group_member ranks[RANKS] = { { .node = p->id, .host = "127.0.0.1", .port = p->port } };
    for (uint32_t r = 1; r < n->n; r++) {
        followers[r - 1] = n->procs[r]->id;
        ranks[r] = (struct group_member){
            .rank = r, .node = n->procs[r]->id, .host = "127.0.0.1", .port = n->procs[r]->port
        };
        cluster_learn(p->peer->c, n->procs[r]->id, "127.0.0.1", n->procs[r]->port);
    }
    p->decode = decode_create(&(struct decode_options){
        .loop = n->rig->loop,
        .engine = &n->engine,
        .kvt = p->kvt,
        .cluster = p->peer->c,
        .metrics = n->metrics,
        .max_decode_seqs = SEQS_MAX,
        .id_base = DECODE_IDS,
        .ranks = ranks,
        .n_ranks = n->n,
    });
    p->prefill = prefill_create(&(struct prefill_options){
        .loop = n->rig->loop,
        .engine = &n->engine,
        .kvt = p->kvt,
        .cluster = p->peer->c,
        .metrics = n->metrics,
        .step_tokens = 4096,
        .max_prompts = SEQS_MAX,
        .id_base = PREFILL_IDS,
        .followers = followers,
        .n_followers = n->n - 1,
    });
}

static void follower_open(struct proc *p)
{
    uint64_t leader = p->node->procs[0]->peer->id;
    p->decode_follow = decode_follow_create(&(struct decode_follow_options){
        .kvt = p->kvt, .layout = p->layout, .cluster = p->peer->c, .leader = leader });
    p->prefill_follow = prefill_follow_create(
        &(struct prefill_follow_options){ .loop = p->node->rig->loop,
                                          .kvt = p->kvt,
                                          .layout = p->layout,
                                          .cluster = p->peer->c,
                                          .leader = leader });
}

static void node_poll(void *arg)
{
    struct tp_node *n = arg;
    for (uint32_t r = 0; r < n->n; r++)
        if (n->procs[r]) proc_poll(n->procs[r]);
    if (n->procs[0]) fake_turn(n);
}

static struct tp_node *tp_open(struct cluster_rig *rig, struct tp_options o)
{
    struct tp_node *n = MEM_NEW(struct tp_node);
    n->rig = rig;
    n->n = o.n;
    n->cached = o.cached;
    n->metrics = metrics_create();
    n->engine.node = n;
    n->engine.n_free = N_BLOCKS;
    for (uint32_t r = 0; r < o.n; r++) n->procs[r] = proc_alloc(n, &o, r);
    if (o.apart) child_start(n->procs[o.apart], &o);
    for (uint32_t r = 0; r < o.n; r++)
        if (!n->procs[r]->child) proc_start(n->procs[r], rig, &o);
    for (int32_t b = 0; b < N_BLOCKS; b++) block_fill(n, b);
    leader_open(n);
    for (uint32_t r = 1; r < o.n; r++)
        if (!n->procs[r]->child) follower_open(n->procs[r]);
    n->poll = loop_timer_start(rig->loop, 1, 1, node_poll, n);
    return n;
}

/* The process ends: its links and connections close, its memory is gone. */
static void proc_kill(struct proc *p)
{
    p->node->procs[p->rank] = NULL;
    if (p->child) {
        CHECK(kill(p->child, SIGKILL) == 0 && waitpid(p->child, NULL, 0) == p->child);
    } else {
        peer_close(p->peer);
        kvt_free(p->kvt);
    }
    decode_free(p->decode);
    prefill_free(p->prefill);
    decode_follow_free(p->decode_follow);
    prefill_follow_free(p->prefill_follow);
    device_mem_free(p->device, &p->mem);
    device_close(p->device);
    mem_free(p);
}

static void tp_close(struct tp_node *n)
{
    loop_timer_free(n->poll);
    for (uint32_t r = 0; r < n->n; r++)
        if (n->procs[r]) proc_kill(n->procs[r]);
    metrics_free(n->metrics);
    mem_free(n);
}

/* Nothing of any request is left on any rank. */
static bool tp_is_idle(const struct tp_node *n)
{
    bool idle = true;
    for (uint32_t r = 0; r < n->n; r++) {
        const struct proc *p = n->procs[r];
        if (p && r == 0) idle &= !decode_n_live(p->decode) && !prefill_n_live(p->prefill);
        else if (p && !p->child)
            idle &= !decode_follow_n_live(p->decode_follow) &&
                    !prefill_follow_n_live(p->prefill_follow);
    }
    return idle && (!n->procs[0] || n->engine.n_free == N_BLOCKS);
}

#endif
