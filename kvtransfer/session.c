/* session.c - what both sides of a transfer share: create and release the core, post events, send
 * messages. States and invariants: session.h. Thread: transfer. */
#include "kvtransfer/session.h"

#include <string.h>

#include "shared/base/hash/hash.h"
#include "shared/base/mem.h"

enum { STALL_MS_DEFAULT = 10000, DEADLINE_MS_DEFAULT = 600000 };

void kvt_core_init(struct kvt_core *c, const struct kvt_options *o)
{
    memset(c, 0, sizeof *c);
    c->layout = o->layout;
    c->pool = o->mem->ptr;
    c->checksum = o->checksum;
    c->lossy = o->tuning.lossy;
    c->stall_ms = o->stall_ms ? o->stall_ms : STALL_MS_DEFAULT;
    c->deadline_ms = o->deadline_ms ? o->deadline_ms : DEADLINE_MS_DEFAULT;
    c->n_transfers = o->n_transfers;
    c->n_slots = 2 * o->n_transfers;
    c->slots = MEM_ARRAY(struct kvt_recv, c->n_slots);
    for (uint32_t i = 0; i < c->n_slots; i++) {
        c->slots[i].session = i;
        list_init(&c->slots[i].link);
    }
    uint64_t first;
    random_bytes(&first, sizeof first);
    atomic_init(&c->next_generation, first);
    c->fenced = MEM_ARRAY(uint64_t, KVT_FENCED_RING);
    c->copies = MEM_ARRAY(struct kvt_copy, kvt_plan_max_copies(&c->layout));
    c->put_sums = MEM_NEW(struct kvt_sums);
    c->scratch = mem_calloc(1, kv_layout_piece_bytes(&c->layout));
    c->stats = kvt_stats_create(o->metrics);
    c->on_event = o->on_event;
    c->arg = o->arg;
}

void kvt_core_release(struct kvt_core *c)
{
    size_t pos = 0;
    struct str key;
    void *send;
    while (map_next(&c->sends, &pos, &key, &send))
        for (struct kvt_send *s = send, *next; s; s = next) {
            next = s->next_of;
            list_remove(&s->link);
            kvt_send_free(c, s);
        }
    map_release(&c->sends);
    for (uint32_t i = 0; i < c->n_slots; i++) {
        mem_free(c->slots[i].blocks);
        mem_free(c->slots[i].arrived);
    }
    /* Transports, whose puts write the checksums of jobs, are closed. */
    kvt_gpu_jobs_free(c->send_jobs);
    kvt_gpu_jobs_free(c->recv_jobs);
    kvt_staging_free(c->staging);
    kvt_staging_free(c->recv_staging);
    mem_free(c->slots);
    mem_free(c->fenced);
    mem_free(c->copies);
    mem_free(c->put_sums);
    mem_free(c->scratch);
    kvt_stats_free(c->stats);
}

void kvt_core_event(struct kvt_core *c, struct kvt_event ev)
{
    if (ev.kind == KVT_FENCED) c->fenced[c->n_fenced++ % KVT_FENCED_RING] = ev.id;
    if (c->on_event) c->on_event(c->arg, &ev);
}

void kvt_peer_init(struct kvt_peer *p)
{
    memset(p, 0, sizeof *p);
    list_init(&p->link);
    list_init(&p->sends);
    list_init(&p->recvs);
    p->slow_ms = KVT_QUIET_MAX_MS / 4;
}

void kvt_peer_send(struct kvt_peer *p, enum kvt_message_kind kind, uint32_t session,
                   uint64_t generation, uint64_t bytes, enum status st)
{
    if (!p->up || p->lost) return;
    struct kvt_message m = {
        .kind = kind, .session = session, .generation = generation, .bytes = bytes, .status = st
    };
    enum status sent = p->ops->notify(p->conn, &m);
    /* the peer does not read its messages */
    if (sent != OK && sent != ERR_PEER_LOST) p->must_close = true;
}
