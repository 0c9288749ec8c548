/* engine_end.c - ends sequences: gives their blocks back and emits their end.
 *
 * A sequence can end or be canceled while a step in flight has a row of it: the host learns that it
 * ended only from its last token, after the next step was submitted. The row's result is discarded,
 * but the step still writes to the sequence's blocks. They stay held until that step completes,
 * because a free block may be granted to a peer, which writes at any time.
 * Thread: engine. */
#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/mem.h"
#include "shared/engine/engine_state.h"

void engine_emit(struct engine *e, const struct engine_event *ev)
{
    e->opt.on_event(e->opt.arg, ev);
}

void engine_unlist(struct engine *e, struct seq *s)
{
    list_remove(&s->node);
    if (s->state == SEQ_WAITING)
        atomic_fetch_sub_explicit(&e->load.n_waiting, 1, memory_order_relaxed);
    if (s->state == SEQ_LOADING && !s->lends) e->n_loading--;
    if (s->state == SEQ_RUNNING) e->n_running--;
    if (s->state == SEQ_RESERVED) e->n_reserved--;
}

/* ---- blocks ---- */

/* Takes the sequence out of a step in flight. False: the step does not include it. */
static bool leave_step(struct batch *b, const struct seq *s)
{
    bool found = false;
    for (uint32_t i = 0; i < b->n_chunks; i++) {
        if (b->chunks[i].seq != s) continue;
        b->chunks[i].seq = NULL;
        found = true;
    }
    for (uint32_t i = 0; i < b->n_logits; i++)
        if (b->logits[i].seq == s) b->logits[i].seq = NULL;
    return found;
}

static void defer_free(struct engine *e, struct seq *s)
{
    ASSERT(e->n_deferred_free < e->opt.max_seqs); /* those of one step */
    e->deferred_free[e->n_deferred_free++] = (struct deferred_blocks){
        .blocks = s->blocks,
        .n = s->n_blocks,
    };
    s->blocks = NULL;
    s->n_blocks = 0;
}

void engine_free_deferred(struct engine *e)
{
    while (e->n_deferred_free > 0) {
        struct deferred_blocks *k = &e->deferred_free[--e->n_deferred_free];
        /* last first, as seq_drop_blocks */
        while (k->n > 0) kv_pool_unref(e->pool, k->blocks[--k->n]);
        mem_free(k->blocks);
    }
}

static void release_blocks(struct engine *e, struct seq *s)
{
    for (int i = 0; i < 2; i++)
        if (e->inflight[i].active && leave_step(&e->batches[i], s)) {
            defer_free(e, s);
            return;
        }
    seq_drop_blocks(s, e->pool);
}

/* ---- leaving ---- */

void engine_forget(struct engine *e, struct seq *s)
{
    engine_unlist(e, s);
    engine_stop_load(e, s);
    engine_drop_swap(e, s);
    engine_set_remaining(e, s, 0);
    release_blocks(e, s);
    void *was = map_del(&e->seqs, map_key_u64(&s->id));
    ASSERT(was == s);
    engine_draft_end(e, s);
    seq_free(s);
}

/* Fills in the time in each stage: 0 for a stage that never began and for those after it. */
static void fill_times(const struct seq *s, struct engine_event *ev)
{
    uint64_t now = clock_ns();
    uint64_t start = s->t_start_ns ? s->t_start_ns : now;
    uint64_t first = s->t_first_ns ? s->t_first_ns : now;
    ev->queue_ns = start - s->t_submit_ns;
    ev->prefill_ns = first - start;
    ev->decode_ns = now - first;
}

void engine_finish(struct engine *e, struct seq *s, enum status status, enum finish_reason why,
                   int32_t stop_token)
{
    struct engine_event ev = {
        .kind = ENGINE_FINISHED,
        .id = s->id,
        .status = status,
        .finish = why,
        .stop_token = stop_token,
        .n_cached = s->n_cached,
        .cache = s->cache,
        .n_recomputed = s->n_recomputed,
        .n_verified = s->n_verified,
        .n_drafted = s->n_drafted,
        .n_accepted = s->n_accepted,
    };
    fill_times(s, &ev);
    if (s->prefill_only) {
        engine_unlist(e, s);
        engine_set_remaining(e, s, 0);
        s->state = SEQ_AWAITING_RELEASE;
    } else {
        engine_forget(e, s);
    }
    engine_emit(e, &ev);
}

bool engine_end_lacking(struct engine *e, struct seq *s, uint32_t n_coming)
{
    if (!seq_lacks_prompt(s, n_coming)) return false;
    s->n_cached = s->n_computed;
    engine_finish(e, s, ERR_NOT_FOUND, FINISH_ERROR, -1);
    return true;
}
