/* batch.c - builds the batch of a step by the rules of batch.h. The first pass over the running
 * list chooses sequences (and may preempt), the second writes rows, so no sequence loses blocks
 * after its rows are written.
 *
 * Thread: engine. */
#include "shared/engine/batch.h"

#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/engine/engine_state.h"

/* How long a prompt that goes first leads one to expect the next. */
static const uint64_t SHORT_STEPS_NS = 10000000000;

void batch_init(struct batch *b, uint32_t max_rows, uint32_t max_seqs)
{
    *b = (struct batch){ .max_rows = max_rows, .max_chunks = max_seqs };
    b->max_logits = engine_max_logits(max_seqs);
    b->ids = MEM_ARRAY(int32_t, max_rows);
    b->pos = MEM_ARRAY(int32_t, max_rows);
    b->seqs = MEM_ARRAY(struct attn_seq, 2 * (size_t)max_seqs);
    b->chunks = MEM_ARRAY(struct batch_chunk, max_seqs);
    b->moves = MEM_ARRAY(struct kernel_move, max_seqs);
    b->logit_rows = MEM_ARRAY(int32_t, b->max_logits);
    b->logits = MEM_ARRAY(struct batch_logit, b->max_logits);
    b->holders = MEM_ARRAY(struct block_holder, max_seqs);
}

void batch_release(struct batch *b)
{
    mem_free(b->ids);
    mem_free(b->pos);
    mem_free(b->seqs);
    mem_free(b->chunks);
    mem_free(b->moves);
    mem_free(b->logit_rows);
    mem_free(b->logits);
    mem_free(b->holders);
}

/* ---- preemption ---- */

/* The newest sequence that computes or loads, but for those whose blocks peers read or write. */
static struct seq *newest_victim(struct engine *e)
{
    struct seq *newest = NULL;
    LIST_FOREACH (s, &e->loading, struct seq, node) {
        if (s->fetch.runs || s->lends) continue;
        if (!newest || s->order > newest->order) newest = s;
    }
    LIST_FOREACH (s, &e->running, struct seq, node)
        if (!s->prefill_only && (!newest || s->order > newest->order)) newest = s;
    return newest;
}

static void preempt(struct engine *e, struct seq *s)
{
    ASSERT(s->n_future == 0); /* may_launch_ahead: false when blocks may run out */
    log_debug("sequence preempted", "request=%016llx tokens=%u blocks=%u",
              (unsigned long long)s->request, s->n_tokens, s->n_blocks);
    if (s->state == SEQ_RUNNING && !s->load) engine_swap_out(e, s);
    engine_unlist(e, s);
    engine_stop_load(e, s);
    seq_drop_blocks(s, e->pool);
    s->state = SEQ_WAITING;
    s->preempted = true;
    s->lacks_draft_kv = false; /* all of it is computed here from now on */
    if (s->in_step) engine_batch(e)->n_decodes--;
    s->in_step = false;
    list_push_front(&e->waiting, &s->node);
    atomic_fetch_add_explicit(&e->load.n_waiting, 1, memory_order_relaxed);
    engine_set_remaining(e, s, s->n_tokens);
    counter_add(e->metrics.preemptions, 1);
    engine_batch(e)->preempted = true;
}

/* Blocks for all known tokens and, if tokens are generated here, for the next one: a sequence that
 * starts can then make progress. */
static uint32_t blocks_to_start(const struct engine *e, const struct seq *s)
{
    uint32_t n = s->n_tokens;
    if (!s->prefill_only && seq_wants_token(s)) n++;
    return seq_blocks_for(n, e->opt.block_tokens);
}

static size_t add_holders(struct batch *b, const struct list *of, size_t n)
{
    LIST_FOREACH (s, of, struct seq, node) {
        if (n == b->max_chunks) break;
        b->holders[n++] = (struct block_holder){ s->n_blocks, s->prefill_only
                                                                  ? 1
                                                                  : s->n_tokens_max - s->n_tokens };
    }
    return n;
}

/* The sequences that will give blocks back by themselves; of more than one step holds, some. A
 * prompt's are sent to another node soon. */
static size_t list_holders(const struct engine *e, struct batch *b)
{
    return add_holders(b, &e->loading, add_holders(b, &e->running, 0));
}

/* Those that were preempted wait at the front, the oldest first, so each waits for the blocks of
 * those before it as well. */
static void tell_preempted(struct engine *e)
{
    struct batch *b = engine_batch(e);
    struct kv_pool_stats k;
    uint32_t need = 0;
    kv_pool_get_stats(e->pool, &k);
    const size_t n = list_holders(e, b);
    LIST_FOREACH (s, &e->waiting, struct seq, node) {
        if (!s->preempted) break;
        s->preempted = false;
        need += blocks_to_start(e, s);
        struct engine_event ev = {
            .kind = ENGINE_PREEMPTED, .id = s->id, .stop_token = -1, .n_tokens = s->n_tokens
        };
        ev.wait_steps = block_wait_steps(b->holders, n, k.n_free + k.n_cached, need,
                                         e->opt.block_tokens);
        engine_emit(e, &ev);
    }
}

/* Takes a block for the next position if needed. False: `s` itself was preempted. */
static bool ensure_block(struct engine *e, struct seq *s)
{
    while (s->n_blocks <= (s->n_computed + s->n_maybe) / e->opt.block_tokens) {
        if (seq_grow(s, e->pool) == OK || engine_settle_copies(e)) continue;
        struct seq *victim = newest_victim(e);
        ASSERT(victim != NULL); /* s is one: prefill_only sequences never grow */
        preempt(e, victim);
        if (victim == s) return false;
    }
    return true;
}

/* ---- choosing decodes ---- */

static bool is_decode(const struct seq *s) { return seq_n_pending(s) == 1 && seq_has_work(s); }

/* Marks the decodes of this step. A block for one may preempt others, before or after it in the
 * list. The walk goes on from `s`, which is still in the list, or starts again when `s` itself was
 * preempted (rare). */
static void choose_decodes(struct engine *e)
{
    struct batch *b = engine_batch(e);
    uint32_t max = b->max_rows < b->max_chunks ? b->max_rows : b->max_chunks;
    b->n_decodes = 0;
    for (struct list *l = e->running.next; l != &e->running && b->n_decodes < max;) {
        struct seq *s = LIST_ENTRY(l, struct seq, node);
        if (is_decode(s) && !s->in_step) {
            if (!ensure_block(e, s)) {
                l = e->running.next;
                continue;
            }
            s->in_step = true;
            b->n_decodes++;
        }
        l = s->node.next;
    }
}

/* ---- writing rows ---- */

/* Does the row at `pos` need logits, and for what? A row has at most one use. */
static bool logit_use(const struct seq *s, uint32_t pos, bool *sample)
{
    *sample = pos + 1 >= s->n_tokens + s->n_future && seq_wants_token(s);
    return *sample || (pos + 1 >= s->lp_next && pos + 1 < s->n_prompt);
}

/* Adds positions [begin, end) of s, with rows from `row` on, as attention sequences. The token
 * (prompt or generated) decides a row's attention path: a moved or preempted request computes its
 * generated tokens again as they were generated. */
static void add_seqs(struct batch *b, const struct seq *s, uint32_t begin, uint32_t end,
                     uint32_t row)
{
    for (uint32_t n; begin < end; begin += n, row += n) {
        bool generated = begin >= s->n_prompt;
        n = !generated && end > s->n_prompt ? s->n_prompt - begin : end - begin;
        b->seqs[b->n_seqs++] = (struct attn_seq){
            .q_begin = (int32_t)row,
            .n_q = (int32_t)n,
            .pos_begin = (int32_t)begin,
            .block_table = s->blocks,
            .is_decode = generated,
        };
    }
}

/* The id of the row at `pos`. With a step in flight, its token, then drafts that the device has. */
static int32_t id_of(const struct seq *s, uint32_t pos)
{
    if (s->n_future == 0 || pos < s->n_tokens) return s->tokens[pos];
    return pos == s->n_tokens ? -1 - (int32_t)s->future_row : s->draft_ids[pos - s->n_tokens - 1];
}

/* Adds up to `n` pending tokens of s, fewer when the logits rows run out. Returns how many. */
static uint32_t add_chunk(struct batch *b, struct seq *s, uint32_t n)
{
    uint32_t begin = s->n_computed, end = begin, first_row = b->n_rows;
    for (; end < begin + n; end++) {
        bool sample;
        if (logit_use(s, end, &sample)) {
            if (b->n_logits == b->max_logits) break;
            b->logit_rows[b->n_logits] = (int32_t)b->n_rows;
            b->logits[b->n_logits++] = (struct batch_logit){ s, end, sample };
        }
        b->ids[b->n_rows] = id_of(s, end);
        b->pos[b->n_rows] = (int32_t)end;
        b->n_rows++;
    }
    if (end == begin) return 0;
    add_seqs(b, s, begin, end, first_row);
    b->chunks[b->n_chunks++] = (struct batch_chunk){ .seq = s, .begin = begin, .end = end };
    b->streams |= s->stream.runs;
    return end - begin;
}

static bool has_space(const struct batch *b)
{
    return b->n_rows < b->max_rows && b->n_chunks < b->max_chunks;
}

/* ---- prompts ---- */

/* Prompt rows that fill the step: then what it takes without them, its decodes included, is a small
 * part of it. UINT32_MAX: it is not known. */
static uint32_t fill_of(const struct engine *e, const struct batch *b)
{
    const uint32_t fill = engine_speed_fill_rows(&e->speed);
    return fill ? fill + ENGINE_SPEED_FILL_TIMES * b->n_decodes : UINT32_MAX;
}

/* The next prompt had better have a step of its own: this one's first token comes sooner, and the
 * next one's no later. */
static bool is_filled(const struct engine *e, const struct batch *b)
{
    return b->n_rows >= (uint64_t)b->n_decodes + fill_of(e, b);
}

static void add_pending(struct batch *b, struct seq *s, uint32_t max)
{
    uint32_t space = b->max_rows - b->n_rows, pending = seq_has_work(s) ? seq_n_pending(s) : 0;
    if (space > max) space = max;
    add_chunk(b, s, pending < space ? pending : space);
}

/* The rows of a prompt that a step takes. While prompts come that go first, those of others are
 * cut into equal parts that just fill a step: what goes first waits for no more than that. */
static uint32_t part_of(const struct engine *e, const struct batch *b, const struct seq *s)
{
    const uint64_t pending = seq_n_pending(s), fill = fill_of(e, b);
    if (s->goes_first || !e->t_overtook_ns) return UINT32_MAX;
    if (clock_ns() - e->t_overtook_ns > SHORT_STEPS_NS) return UINT32_MAX;
    const uint64_t n_parts = (pending + fill / 2) / fill;
    return n_parts ? (uint32_t)((pending + n_parts - 1) / n_parts) : UINT32_MAX;
}

static void add_prompts(struct engine *e, bool that_go_first)
{
    struct batch *b = engine_batch(e);
    LIST_FOREACH (s, &e->running, struct seq, node) {
        if (!has_space(b) || is_filled(e, b)) break;
        if (!is_decode(s) && s->goes_first == that_go_first) add_pending(b, s, part_of(e, b, s));
    }
}

/* The chunk that was added last begins behind drafts that the step in flight verifies. */
static void move_chunk(const struct engine *e, struct batch *b, const struct seq *s)
{
    struct batch_chunk *c = &b->chunks[b->n_chunks - 1];
    struct attn_seq *of = &b->seqs[b->n_seqs - 1];
    c->n_most = s->n_maybe;
    c->move = model_number_right(e->opt.model, e->parity ^ 1, s->future_row);
    b->moves[b->n_moves++] = (struct kernel_move){
        .row = of->q_begin, .n_rows = of->n_q, .by = { c->move }, .id = c->move
    };
    of->move = b->n_moves;
    of->n_most = (int32_t)s->n_maybe;
}

/* engine_draft_propose has left room for all rows. */
static void add_decode(const struct engine *e, struct batch *b, struct seq *s)
{
    const uint32_t n_added = add_chunk(b, s, 1 + s->n_draft);
    ASSERT(n_added == 1 + s->n_draft);
    if (s->n_maybe > 0) move_chunk(e, b, s);
    b->chunks[b->n_chunks - 1].n_draft = s->n_draft;
    b->n_drafts += s->n_draft;
    s->n_draft = 0;
}

/* Round robin: sequences served in this step move to the end of the list. */
static void add_decodes(struct engine *e)
{
    struct list served;
    list_init(&served);
    LIST_FOREACH (s, &e->running, struct seq, node) {
        if (!s->in_step) continue;
        s->in_step = false;
        add_decode(e, engine_batch(e), s);
        list_remove(&s->node);
        list_push(&served, &s->node);
    }
    LIST_FOREACH (s, &served, struct seq, node) {
        list_remove(&s->node);
        list_push(&e->running, &s->node);
    }
}

/* ---- admission ---- */

static void announce_start(struct engine *e, struct seq *s)
{
    s->t_computes_ns = clock_ns();
    s->n_taken = s->n_computed;
    if (s->started) return;
    s->started = true;
    s->t_start_ns = s->t_computes_ns;
    s->n_cached = s->n_computed;
    counter_add(e->metrics.prompt_tokens, s->n_prompt);
    engine_emit(e, &(struct engine_event){ .kind = ENGINE_STARTED,
                                           .id = s->id,
                                           .stop_token = -1,
                                           .n_cached = s->n_cached,
                                           .cache = s->cache });
    if (!s->prefill_only || !s->n_computed || !e->opt.on_kv_ready) return;
    /* The receiver may lack the cached blocks. Their KV is complete: no event. */
    for (uint32_t layer = 0; layer < e->layout.n_layers; layer++)
        e->opt.on_kv_ready(e->opt.arg, s->id, layer, 0, s->n_computed, s->blocks, 0);
}

static bool has_place(const struct engine *e)
{
    return e->n_running + e->n_loading < e->opt.max_seqs;
}

/* A sequence that has its blocks and, from caches, the KV of its first tokens. False: that is too
 * little, and it has ended. */
static bool run(struct engine *e, struct seq *s)
{
    if (!s->started && engine_end_lacking(e, s, 0)) return false;
    engine_unlist(e, s);
    s->state = SEQ_RUNNING;
    list_push(&e->running, &s->node);
    e->n_running++;
    engine_set_remaining(e, s, seq_n_pending(s));
    announce_start(e, s);
    return true;
}

static bool is_loaded(const struct seq *s) { return !s->load && !s->fetch.runs; }

static void start_loaded(struct engine *e, struct seq *s)
{
    if (s->lends) {
        engine_lent(e, s);
        return;
    }
    engine_use_fetched(e, s);
    (void)run(e, s);
}

bool batch_next_needs_completion(struct engine *e)
{
    LIST_FOREACH (s, &e->loading, struct seq, node)
        if (is_loaded(s) && s->prefill_only) return true;
    if (list_empty(&e->waiting) || !has_place(e)) return false;
    struct seq *s = LIST_FIRST(&e->waiting, struct seq, node);
    return s->prefill_only && seq_fits(s, e->pool, e->opt.block_tokens, blocks_to_start(e, s));
}

uint32_t batch_next_blocks(struct engine *e)
{
    if (list_empty(&e->waiting) || !has_place(e) || engine_batch(e)->preempted) return 0;
    struct seq *s = LIST_FIRST(&e->waiting, struct seq, node);
    const uint32_t n = blocks_to_start(e, s);
    return seq_fits(s, e->pool, e->opt.block_tokens, n) ? n : 0;
}

/* Blocks that sequences have for drafts alone, also if all drafts in flight are right. They are
 * given back when no step in flight may write there. */
static uint32_t n_blocks_of_drafts(const struct engine *e)
{
    uint32_t n = 0;
    LIST_FOREACH (s, &e->running, struct seq, node) {
        const uint32_t need = (s->n_computed + s->n_maybe) / e->opt.block_tokens + 1;
        if (!s->prefill_only && seq_n_pending(s) <= 1 && s->n_blocks > need)
            n += s->n_blocks - need;
    }
    return n;
}

bool batch_next_waits_for_drafts(struct engine *e)
{
    if (list_empty(&e->waiting) || !has_place(e)) return false;
    struct seq *s = LIST_FIRST(&e->waiting, struct seq, node);
    const uint32_t n = seq_n_lacking(s, e->pool, e->opt.block_tokens, blocks_to_start(e, s));
    return n > 0 && n <= n_blocks_of_drafts(e);
}

/* Sequences whose load is over, or soon. */
static void run_loaded(struct engine *e)
{
    LIST_FOREACH (s, &e->loading, struct seq, node)
        if (engine_stream(e, s)) (void)run(e, s);
        else if (is_loaded(s) && !(s->prefill_only && engine_has_inflight(e))) start_loaded(e, s);
}

static void wait_for_load(struct engine *e, struct seq *s)
{
    engine_unlist(e, s);
    s->state = SEQ_LOADING;
    list_push(&e->loading, &s->node);
    e->n_loading++;
}

/* Will the blocks that it has and those that a tier brings be too few? What a peer may write to
 * stays until that is over. */
static bool ends_before_load(struct engine *e, struct seq *s)
{
    const uint32_t n_coming = s->load ? s->load->n * e->opt.block_tokens : 0;
    return !s->started && !s->fetch.runs && engine_end_lacking(e, s, n_coming);
}

/* Moves the head of the waiting queue to running, or to loading; *out NULL: it has ended. False:
 * the queue is empty, or there is no room for its head, which no other sequence overtakes. */
static bool admit(struct engine *e, struct seq **out)
{
    if (list_empty(&e->waiting) || !has_place(e)) return false;
    struct seq *s = *out = LIST_FIRST(&e->waiting, struct seq, node);
    /* its cached blocks are sent to a peer at once: they must be complete */
    if (s->prefill_only && engine_has_inflight(e)) return false;
    if (engine_tiers_are_bringing(e, s)) return false;
    if (seq_take_blocks(s, e->pool, e->opt.block_tokens, blocks_to_start(e, s)) != OK) return false;
    const bool loads = engine_load(e, s);
    if (ends_before_load(e, s)) *out = NULL;
    else if (loads && !engine_stream(e, s)) wait_for_load(e, s);
    else if (!run(e, s)) *out = NULL;
    return true;
}

/* After a preemption nothing starts: it would take the blocks that the preempted sequence needs. */
static void start_prompts(struct engine *e, bool that_go_first)
{
    struct batch *b = engine_batch(e);
    while (!b->preempted && has_space(b) && !is_filled(e, b) && !list_empty(&e->waiting)) {
        if (that_go_first && !LIST_FIRST(&e->waiting, struct seq, node)->goes_first) break;
        struct seq *s;
        if (!admit(e, &s)) break;
        if (s && s->state == SEQ_RUNNING) add_pending(b, s, part_of(e, b, s));
    }
}

void batch_build(struct engine *e)
{
    struct batch *b = engine_batch(e);
    b->n_rows = b->n_chunks = b->n_seqs = b->n_logits = b->n_drafts = b->n_moves = 0;
    b->preempted = b->streams = false;
    run_loaded(e);
    choose_decodes(e);
    engine_draft_propose(e);
    add_decodes(e);
    add_prompts(e, true);
    start_prompts(e, true);
    add_prompts(e, false);
    start_prompts(e, false);
    b->is_filled = b->n_rows == b->max_rows || is_filled(e, b);
    if (b->preempted) tell_preempted(e);
}
