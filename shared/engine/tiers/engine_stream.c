/* engine_stream.c - a prompt's first step computes its first layers while host memory still brings
 * the KV of the last ones.
 *
 * A load by layers (kv_store.h) need not be over when its sequence starts: the sequence runs once
 * the rest is expected to come while its step computes. Its blocks count as computed, and before
 * the attention of a layer the step waits for what it reads of that layer. If that does not come,
 * the sequence's rows mean nothing, and those of others are as they were: its chunk is taken out of
 * the batch before anything of it counts, and it computes what it lacks. So a load lasts no longer
 * than the first step of its sequence.
 * Thread: engine. */
#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/engine/engine_state.h"

enum {
    STEP_WAIT_MS = 100, /* for a sequence's layers, all together: what was expected was wrong */
    END_WAIT_MS = 10,   /* for the report, once all layers are there */
    NS_PER_MS = 1000000,
};

/* Prompts whose layers go to a peer at once wait for all of them, and so do those that get blocks
 * from elsewhere, too, or a block that is not full: the step writes to that. So does one that is
 * not to be computed here if they do not come. A drafter's layer is computed without on_layer. */
bool engine_may_stream(const struct engine *e, const struct seq *s)
{
    return !engine_is_node(e) && !e->draft.drafter && !s->prefill_only && !s->fetch.peer &&
           s->swap.n_tokens == 0 && (s->started || s->most_computed == 0);
}

/* Will what is left have come by the time that the step's layers need it? */
static bool is_soon_enough(const struct engine *e, const struct seq *s)
{
    const struct kv_load *l = s->load;
    const uint32_t n_layers = e->layout.n_layers,
                   left = s->n_tokens - s->n_computed - l->n * e->opt.block_tokens,
                   rows = left < e->opt.max_batched_tokens ? left : e->opt.max_batched_tokens;
    const double compute_s = engine_block_seconds(e) / e->opt.block_tokens * rows;
    return l->expected_s * (n_layers - kv_load_n_layers(l)) <= compute_s * n_layers;
}

bool engine_stream(struct engine *e, struct seq *s)
{
    if (!s->load || !s->load->by_layers) return false;
    if (!is_soon_enough(e, s) && !e->tiers.always) return false;
    s->stream = (struct seq_stream){ .runs = true,
                                     .is_first = !s->started,
                                     .from = s->n_computed,
                                     .before_ns = clock_ns() - s->load->begin_ns };
    s->n_computed += s->load->n * e->opt.block_tokens;
    return true;
}

/* The sequence goes on with what it had before. */
static void give_up(struct engine *e, struct seq *s)
{
    const struct seq_stream was = s->stream;
    engine_stop_load(e, s);
    s->stream = (struct seq_stream){ 0 };
    s->n_computed = s->n_taken = was.from;
    if (was.is_first) s->n_cached = was.from;
    engine_set_remaining(e, s, seq_n_pending(s));
}

void engine_end_stream_load(struct engine *e, struct seq *s)
{
    /* One that was late when all layers had come, and maybe been used, has come all the same. */
    const bool is_good = s->load->n_good == s->load->n ||
                         kv_load_n_layers(s->load) == e->layout.n_layers;
    s->load = NULL;
    if (is_good) s->stream = (struct seq_stream){ 0 };
    else give_up(e, s);
}

/* ---- in a step ---- */

static void await_layer_of(struct engine *e, struct seq *s, uint32_t layer)
{
    if (kv_load_n_layers(s->load) > layer) return;
    const uint64_t begin = clock_ns(), waited_ms = s->stream.step_ns / NS_PER_MS;
    const enum status st = kv_store_await_layer(
        e->store, s->load, layer,
        waited_ms < STEP_WAIT_MS ? STEP_WAIT_MS - (uint32_t)waited_ms : 0);
    s->stream.step_ns += clock_ns() - begin;
    if (st == OK) return;
    s->stream.failed = true;
    log_warn("kv layer did not come", "request=%016llx layer=%u blocks=%u waited_ms=%.1f st=%s",
             (unsigned long long)s->request, layer, s->load->n,
             (double)s->stream.step_ns / NS_PER_MS, status_name(st));
}

void engine_await_layer(struct engine *e, uint32_t layer)
{
    const struct batch *b = engine_batch(e);
    for (uint32_t i = 0; i < b->n_chunks; i++) {
        struct seq *s = b->chunks[i].seq;
        if (s->stream.runs && !s->stream.failed) await_layer_of(e, s, layer);
    }
}

/* All layers came: the load ends now, since its sequence may, with this step. */
static void end_load(struct engine *e, struct seq *s)
{
    if (!kv_store_await_end(e->store, s->load, END_WAIT_MS)) return; /* it will be reported */
    if (s->stream.is_first) engine_note_load(e, s, s->load);
    engine_stop_load(e, s);
}

static void take_out(struct batch *b, uint32_t chunk)
{
    const struct seq *s = b->chunks[chunk].seq;
    for (uint32_t i = 0; i < b->n_logits; i++)
        if (b->logits[i].seq == s) b->logits[i].seq = NULL;
    b->chunks[chunk] = b->chunks[--b->n_chunks];
}

void engine_end_streams(struct engine *e)
{
    struct batch *b = engine_batch(e);
    for (uint32_t i = 0; i < b->n_chunks;) {
        struct seq *s = b->chunks[i].seq;
        if (s->stream.failed) {
            take_out(b, i);
            give_up(e, s);
        } else {
            if (s->stream.runs) end_load(e, s);
            i++;
        }
    }
}
