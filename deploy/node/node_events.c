/* node_events.c - events of the engine and of KV transfer on their way to the loop.
 *
 * Both threads post into one bounded mailbox; the loop hands each event to the worker whose id it
 * has. Thread: engine and transfer post, the loop takes. */
#include <time.h>

#include "deploy/node/node_internal.h"
#include "shared/base/log.h"

enum {
    EVENTS = 16384,             /* events waiting for the loop; when full their thread waits */
    EVENTS_PER_ITERATION = 1024 /* keeps one turn of the loop short */
};

/* One event on its way from the engine or transfer thread to the loop. */
struct node_event {
    enum { FROM_ENGINE, FROM_KVT } from;
    union {
        struct engine_event engine;
        struct kvt_event kvt;
    } u;
    int32_t *blocks; /* owned copies of engine.blocks, engine.keys and engine.hidden */
    struct hash128 *keys;
    float *hidden;
};

static void drain_events(void *arg);

static void wake_loop(void *arg)
{
    struct node *n = arg;
    if (loop_post(n->loop, drain_events, n) != OK)
        log_error("loop does not take events", "node=%s", n->name);
}

static void free_copies(const struct node_event *ev)
{
    mem_free(ev->blocks);
    mem_free(ev->keys);
    mem_free(ev->hidden);
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
    if (st != OK) free_copies(ev); /* closed: the node is stopping */
}

void node_events_of_engine(void *arg, const struct engine_event *e)
{
    struct node_event ev = { .from = FROM_ENGINE };
    ev.u.engine = *e;
    if (e->blocks && e->n_blocks) ev.blocks = mem_dup(e->blocks, e->n_blocks * sizeof *e->blocks);
    if (e->keys && e->n_blocks) ev.keys = mem_dup(e->keys, e->n_blocks * sizeof *e->keys);
    if (e->hidden) ev.hidden = mem_dup(e->hidden, e->n_hidden * sizeof *e->hidden);
    post_event(arg, &ev);
}

void node_events_of_kvt(void *arg, const struct kvt_event *e)
{
    struct node_event ev = { .from = FROM_KVT };
    ev.u.kvt = *e;
    post_event(arg, &ev);
}

void node_events_kv_ready(void *arg, uint64_t id, uint32_t layer, uint32_t begin, uint32_t end,
                          const int32_t *blocks, uint64_t event)
{
    struct node *n = arg;
    if ((id & PREFILL_IDS) && n->kvt)
        prefill_on_kv_ready(n->kvt, id, layer, begin, end, blocks, event);
}

/* The leader's sequences: of this rank's engine no other events come. */
static void dispatch_to_followers(struct node *n, const struct node_event *ev)
{
    const struct kvt_event *kv = &ev->u.kvt;
    if (ev->from != FROM_KVT) return;
    const bool of_peer = kvt_event_is_of_peer(kv->kind);
    if (!of_peer && (kv->id & DECODE_IDS)) decode_follow_on_kvt(n->ranks.decode, kv);
    else prefill_follow_on_kvt(n->ranks.prefill, kv);
}

static void dispatch(struct node *n, struct node_event *ev)
{
    if (ev->from == FROM_ENGINE) {
        const bool fetches = ev->u.engine.kind == ENGINE_FETCH ||
                             ev->u.engine.kind == ENGINE_FETCH_OFF;
        ev->u.engine.blocks = ev->blocks;
        ev->u.engine.keys = ev->keys;
        ev->u.engine.hidden = ev->hidden;
        if (fetches || (ev->u.engine.id & DECODE_IDS)) decode_on_engine(n->decode, &ev->u.engine);
        else prefill_on_engine(n->prefill, &ev->u.engine);
        return;
    }
    bool of_peer = kvt_event_is_of_peer(ev->u.kvt.kind);
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
        else if (n->ranks.decode) dispatch_to_followers(n, &ev);
        free_copies(&ev);
        i++;
    }
    if (n->decode) decode_flush(n->decode);
    /* Continue in the next turn: a post into a mailbox that is not empty does not wake the loop. */
    if (i == EVENTS_PER_ITERATION) wake_loop(n);
}

void node_events_create(struct node *n)
{
    n->events = mailbox_create(sizeof(struct node_event), EVENTS, wake_loop, n);
}

void node_events_free(struct node *n)
{
    struct node_event ev;
    mailbox_close(n->events);
    while (mailbox_take(n->events, &ev)) free_copies(&ev);
    mailbox_free(n->events);
}
