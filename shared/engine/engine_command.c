/* engine_command.c - runs the commands, between the building of two steps.
 *
 * A step may be in flight: a canceled sequence leaves it, and its blocks stay held until the step
 * completes (engine_end.c). A command for an id that is not live (it has just finished) does
 * nothing.
 *
 * Thread: engine. */
#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/engine/engine_state.h"
#include "shared/model/experts.h"

void engine_command_drop(struct engine *e, struct engine_command *c)
{
    seq_free(c->seq);
    mem_free(c->first);
    mem_free(c->hidden);
    ep_discard(c->ep);
    model_experts_drop(e->opt.model, c->experts);
    c->seq = NULL;
    c->first = NULL;
    c->hidden = NULL;
    c->ep = NULL;
    c->experts = NULL;
}

static struct seq *find(const struct engine *e, uint64_t id)
{
    return map_get(&e->seqs, map_key_u64(&id));
}

/* Makes the sequence live. Refuses a second live sequence with the same id: events could not tell
 * them apart. */
static bool enter(struct engine *e, struct seq *s)
{
    if (find(e, s->id)) {
        log_error("sequence id in use", "request=%016llx sequence=%016llx",
                  (unsigned long long)s->request, (unsigned long long)s->id);
        return false;
    }
    s->order = ++e->last_order;
    void *was = map_put(&e->seqs, map_key_u64(&s->id), s);
    ASSERT(was == NULL);
    return true;
}

/* From the front, where few are: those that were preempted, and those that go first. */
static void wait_in_line(struct engine *e, struct seq *s)
{
    struct list *at = &e->waiting;
    while (s->goes_first && at->next != &e->waiting) {
        const struct seq *next = LIST_ENTRY(at->next, struct seq, node);
        if (!next->goes_first && !next->started) break;
        at = at->next;
    }
    list_insert_after(s->goes_first ? at : e->waiting.prev, &s->node);
}

static void do_submit(struct engine *e, struct seq *s)
{
    s->state = SEQ_WAITING; /* counted in n_waiting and waiting_tokens by engine_submit */
    if (!enter(e, s)) {
        uint64_t id = s->id;
        engine_unlist(e, s);
        engine_set_remaining(e, s, 0);
        seq_free(s);
        engine_emit(e, &(struct engine_event){
                           .kind = ENGINE_FINISHED,
                           .id = id,
                           .status = ERR_INVALID,
                           .finish = FINISH_ERROR,
                           .stop_token = -1,
                       });
        return;
    }
    wait_in_line(e, s);
    if (s->goes_first) e->t_overtook_ns = clock_ns();
    /* A moved request may have all its tokens already. */
    if (!seq_wants_token(s) && s->lp_next >= s->n_prompt)
        engine_finish(e, s, OK, FINISH_LENGTH, -1);
}

static enum status try_reserve(struct engine *e, struct seq *s)
{
    if (!enter(e, s)) return ERR_INVALID;
    s->state = SEQ_RESERVED;
    e->n_reserved++;
    s->lp_next = s->n_prompt; /* scored where the prompt is computed */
    s->prefill_only = false;
    enum status st = seq_take_blocks(s, e->pool, e->opt.block_tokens,
                                     seq_blocks_for(s->n_tokens, e->opt.block_tokens));
    s->n_cached = s->n_computed;
    return st;
}

static void do_reserve(struct engine *e, struct seq *s)
{
    struct engine_event ev = { .kind = ENGINE_RESERVED, .id = s->id, .stop_token = -1 };
    ev.status = try_reserve(e, s);
    if (ev.status == OK) {
        ev.n_cached = s->n_cached;
        ev.n_blocks = s->n_blocks;
        ev.blocks = s->blocks;
    } else if (ev.status == ERR_BUSY) {
        engine_forget(e, s);
    } else {
        seq_free(s);
    }
    engine_emit(e, &ev);
}

/* Takes `hidden`. */
static void do_activate(struct engine *e, uint64_t id, const struct token_logprobs *first,
                        float *hidden)
{
    struct seq *s = find(e, id);
    if (!s || s->state != SEQ_RESERVED) {
        mem_free(hidden);
        return;
    }
    engine_unlist(e, s);
    s->hidden = hidden;
    s->hidden_at = s->n_tokens - 1;
    s->lacks_draft_kv = hidden == NULL;
    if (!hidden) engine_draft_tell_lack(e);
    s->state = SEQ_RUNNING;
    s->order = ++e->last_order;
    list_push(&e->running, &s->node);
    e->n_running++;
    s->started = true;
    s->t_start_ns = clock_ns();
    s->xfer_begin = s->n_computed;
    s->xfer_end = s->n_computed = s->n_tokens;
    engine_publish(e, s, s->n_computed);
    (void)engine_take_token(e, s, first);
}

static void do_cancel(struct engine *e, uint64_t id, bool fenced)
{
    struct seq *s = find(e, id);
    if (!s || s->state == SEQ_QUARANTINED) return;
    if (s->fetch.runs) {
        engine_leave_fetch(e, s);
    } else if (s->state == SEQ_RESERVED && !fenced) {
        engine_unlist(e, s);
        seq_quarantine_blocks(s, e->pool);
        s->state = SEQ_QUARANTINED;
    } else {
        engine_forget(e, s);
    }
    engine_emit(e,
                &(struct engine_event){
                    .kind = ENGINE_CANCELED, .id = id, .status = ERR_CANCELED, .stop_token = -1 });
}

static void do_fence(struct engine *e, uint64_t id)
{
    struct seq *s = find(e, id);
    if (!s || s->state != SEQ_QUARANTINED || s->fetch.runs) return;
    seq_free_quarantined_blocks(s, e->pool);
    engine_forget(e, s);
}

static void do_lend(struct engine *e, struct seq *s)
{
    const uint64_t id = s->id;
    if (enter(e, s)) {
        s->state = SEQ_AWAITING_RELEASE;
        engine_begin_lend(e, s);
        return;
    }
    seq_free(s);
    engine_emit(e, &(struct engine_event){
                       .kind = ENGINE_LENT, .id = id, .status = ERR_INVALID, .stop_token = -1 });
}

static void do_release(struct engine *e, uint64_t id)
{
    struct seq *s = find(e, id);
    if (s && s->state == SEQ_AWAITING_RELEASE) engine_forget(e, s);
}

void engine_command_run(struct engine *e, const struct engine_command *c)
{
    switch (c->kind) {
    case ENGINE_COMMAND_SUBMIT: do_submit(e, c->seq); break;
    case ENGINE_COMMAND_RESERVE: do_reserve(e, c->seq); break;
    case ENGINE_COMMAND_ACTIVATE: do_activate(e, c->id, c->first, c->hidden); break;
    case ENGINE_COMMAND_CANCEL: do_cancel(e, c->id, c->fenced); break;
    case ENGINE_COMMAND_FENCE: do_fence(e, c->id); break;
    case ENGINE_COMMAND_RELEASE: do_release(e, c->id); break;
    case ENGINE_COMMAND_FETCHED: engine_end_fetch(e, c->id, c->n_good); break;
    case ENGINE_COMMAND_FETCH_HANGS: engine_go_on_without_fetch(e, c->id); break;
    case ENGINE_COMMAND_LEND: do_lend(e, c->seq); break;
    case ENGINE_COMMAND_JOIN:
    case ENGINE_COMMAND_WAKE: engine_group_command(e, c); break;
    case ENGINE_COMMAND_NODE: engine_node_command(e, c); break;
    }
    mem_free(c->first);
}
