/* prefill_follow.c - see prefill_follow.h. */
#include "prefill/prefill_follow.h"

#include <stdio.h>
#include <string.h>

#include "kvtransfer/event_wire.h"
#include "prefill/kv_sender.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/map.h"
#include "shared/cluster/answer.h"

enum {
    SWEEP_MS = KV_ROUTE_DOUBT_AGAIN_MS,
    STOPPED_MS = 1500 /* a sweep that comes so late shows that this process was stopped */
};

/* What this rank sends of one prompt of the leader, or of blocks that it lends. Thread: loop.
 * Owner: prefill_follower. */
struct prefill_follow_prompt {
    struct kv_sends sends;
    uint32_t left;         /* bit i: part i has not ended */
    const int32_t *blocks; /* [n_blocks] lent: all layers are there; none: a prompt */
    uint32_t n_blocks;
    struct arena arena; /* holds the grants and blocks until the transfers are open */
    struct list link;
};

struct prefill_follower {
    struct prefill_follow_options o;
    struct kv_sender sender;
    struct map by_id;
    struct list live;
    uint32_t n_live;
    bool leader_lost;
    struct loop_timer *sweep;
    uint64_t t_sweep_ms;
};

static void on_open(void *arg, struct kv_sends *s);
static void on_failed(void *arg, struct kv_sends *s, enum status st, const char *text);

static void sweep(void *arg)
{
    struct prefill_follower *f = arg;
    uint64_t now = clock_ms(), since = now - f->t_sweep_ms;
    f->t_sweep_ms = now;
    if (since >= STOPPED_MS) kv_routes_wait_longer(&f->sender.routes, since, now);
    kv_sender_sweep(&f->sender, now);
}

struct prefill_follower *prefill_follow_create(const struct prefill_follow_options *o)
{
    struct prefill_follower *f = MEM_NEW(struct prefill_follower);
    f->o = *o;
    f->sender = (struct kv_sender){
        .kvt = o->kvt,
        .cluster = o->cluster,
        .on_open = on_open,
        .on_failed = on_failed,
        .arg = f,
    };
    kv_sender_init(&f->sender);
    list_init(&f->live);
    f->t_sweep_ms = clock_ms();
    f->sweep = loop_timer_start(o->loop, SWEEP_MS, SWEEP_MS, sweep, f);
    return f;
}

void prefill_follow_free(struct prefill_follower *f)
{
    if (!f) return;
    loop_timer_free(f->sweep);
    LIST_FOREACH (p, &f->live, struct prefill_follow_prompt, link) {
        arena_release(&p->arena);
        mem_free(p);
    }
    kv_sender_release(&f->sender);
    map_release(&f->by_id);
    mem_free(f);
}

uint32_t prefill_follow_n_live(const struct prefill_follower *f) { return f->n_live; }

static struct prefill_follow_prompt *find(const struct prefill_follower *f, uint64_t id)
{
    return map_get(&f->by_id, map_key_u64(&id));
}

static void tell(struct prefill_follower *f, const struct kvt_event *ev)
{
    struct buf b = { 0 };
    kvt_event_encode(ev, &b);
    /* A lost event would keep the leader's blocks for ever: then rather lose the link. */
    if (!f->leader_lost && cluster_send(f->o.cluster, f->o.leader, FRAME_KV_EVENT,
                                        kv_part_owner(ev->id), 0, buf_str(&b)) == ERR_FULL)
        cluster_disconnect(f->o.cluster, f->o.leader, "its queue of events is full");
    buf_release(&b);
}

static void drop_if_over(struct prefill_follower *f, struct prefill_follow_prompt *p)
{
    if (p->left) return;
    map_del(&f->by_id, map_key_u64(&p->sends.id));
    list_remove(&p->link);
    f->n_live--;
    arena_release(&p->arena);
    mem_free(p);
}

/* Ends the prompt here: parts that were not opened at once, the others with kvtransfer's event. */
static void give_up(struct prefill_follower *f, struct prefill_follow_prompt *p, enum status st,
                    const char *text)
{
    kv_sender_cancel(&f->sender, &p->sends);
    for (uint32_t i = 0; i < KV_PARTS_MAX; i++) {
        if (!(p->left & ~p->sends.open & 1u << i)) continue;
        struct kvt_event ev = { .kind = KVT_SEND_FAILED, .id = p->sends.id + i, .status = st };
        snprintf(ev.text, sizeof ev.text, "%s", text);
        p->left &= ~(1u << i);
        tell(f, &ev);
    }
    drop_if_over(f, p);
}

static void on_open(void *arg, struct kv_sends *s)
{
    struct prefill_follower *f = arg;
    struct prefill_follow_prompt *p = find(f, s->id);
    Baton__KvOpened m = BATON__KV_OPENED__INIT;
    if (p->n_blocks > 0) kv_sender_write(&f->sender, &f->o.layout, s->id, p->blocks, p->n_blocks);
    else answer_send(f->o.cluster, f->o.leader, FRAME_KV_OPENED, s->id, 0, &m.base);
    arena_release(&p->arena); /* kvtransfer has what was in it */
}

static void on_failed(void *arg, struct kv_sends *s, enum status st, const char *text)
{
    struct prefill_follower *f = arg;
    log_warn("kv parts not sent", "sequence=%016llx st=%s why=\"%s\"", (unsigned long long)s->id,
             status_name(st), text);
    give_up(f, find(f, s->id), st, text);
}

/* ---- messages ---- */

static enum status take_parts(struct prefill_follower *f, struct prefill_follow_prompt *p,
                              const Baton__KvSend *m, struct err *err)
{
    if (!m || m->n_parts == 0 || m->n_parts > KV_PARTS_MAX || m->n_to != m->n_parts ||
        m->n_kvt_grants != m->n_parts || m->n_blocks > f->o.layout.n_blocks)
        return err_set(err, ERR_FORMAT, "it asks to send malformed KV parts");
    if (m->n_blocks > 0) {
        int32_t *blocks = ARENA_ARRAY(&p->arena, int32_t, m->n_blocks);
        memcpy(blocks, m->blocks, m->n_blocks * sizeof *blocks);
        p->blocks = blocks;
        p->n_blocks = (uint32_t)m->n_blocks;
    }
    for (size_t i = 0; i < m->n_parts; i++) {
        if (m->parts[i] >= KV_PARTS_MAX || kv_sends_all(&p->sends) & 1u << m->parts[i])
            return err_set(err, ERR_FORMAT, "it asks to send KV part %u", m->parts[i]);
        TRY(kv_sender_learn(&f->sender, m->to[i], err));
        kv_sends_add(&p->sends, m->parts[i], m->to[i]->node, m->kvt_grants[i], &p->arena);
    }
    return OK;
}

static void on_send(struct prefill_follower *f, const struct cluster_message *m)
{
    if (m->from != f->o.leader || f->leader_lost || find(f, m->request)) {
        log_warn("kv parts not taken", "from=%s sequence=%016llx", m->from_name,
                 (unsigned long long)m->request);
        return;
    }
    Baton__KvSend *body = baton__kv_send__unpack(NULL, m->body.n, (const uint8_t *)m->body.p);
    struct prefill_follow_prompt *p = MEM_NEW(struct prefill_follow_prompt);
    struct err err = { 0 };
    arena_init(&p->arena);
    kv_sends_init(&p->sends, m->request);
    list_push(&f->live, &p->link);
    map_put(&f->by_id, map_key_u64(&p->sends.id), p);
    f->n_live++;
    if (take_parts(f, p, body, &err) != OK) { /* the leader is of another release, or broken */
        drop_if_over(f, p);
        cluster_disconnect(f->o.cluster, m->from, err.text);
    } else {
        p->left = kv_sends_all(&p->sends);
        (void)kv_sender_start(&f->sender, &p->sends);
    }
    if (body) baton__kv_send__free_unpacked(body, NULL);
}

static bool on_command(struct prefill_follower *f, const struct cluster_message *m)
{
    struct prefill_follow_prompt *p = find(f, m->request);
    if (!p || m->from != f->o.leader) return false; /* all was sent, or it is a sequence */
    /* This rank's engine may still be announcing the last layers. */
    if (m->type == FRAME_KV_FINISH) kvt_send_finish_when_complete(f->o.kvt, p->sends.id);
    else give_up(f, p, ERR_CANCELED, "cancelled by this node");
    return true;
}

bool prefill_follow_on_message(struct prefill_follower *f, const struct cluster_message *m)
{
    switch (m->type) {
    case FRAME_KVT_ANSWER: kv_sender_on_answer(&f->sender, m); return true;
    case FRAME_KV_SEND: on_send(f, m); return true;
    case FRAME_KV_FINISH:
    case FRAME_KV_CANCEL: return on_command(f, m);
    default: return false;
    }
}

void prefill_follow_on_kvt(struct prefill_follower *f, const struct kvt_event *ev)
{
    if (kv_sender_on_kvt(&f->sender, ev)) return;
    struct prefill_follow_prompt *p = find(f, kv_part_owner(ev->id));
    uint32_t bit = 1u << kv_part_index(ev->id);
    if (!p || !(p->left & bit) || (ev->kind != KVT_SENT && ev->kind != KVT_SEND_FAILED)) return;
    p->left &= ~bit;
    tell(f, ev);
    drop_if_over(f, p);
}

void prefill_follow_on_lost(struct prefill_follower *f, uint64_t node)
{
    kv_sender_on_lost(&f->sender, node);
    if (node != f->o.leader) return;
    f->leader_lost = true;
    LIST_FOREACH (p, &f->live, struct prefill_follow_prompt, link)
        give_up(f, p, ERR_PEER_LOST, "the leader of this rank is gone");
}
