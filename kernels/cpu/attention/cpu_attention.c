/* cpu_attention.c - the two ops on the KV pool: what appending stores, and how attention is split.
 *
 * A work item is one sequence, one KV head (one query head in naive MLA) and a run of (query row,
 * head) pairs; attention_tile_loop.c takes it through the tiles of a segment. Every segment of
 * CPU_ATTN_SEGMENT positions is an online softmax with result (m, l, o); a pair's result merges its
 * segments in ascending order (merge, below). So it depends only on the pair's own keys, and
 * segments may be computed by any thread in any order. Whole items (the usual case) merge their
 * segments as they go. If there are too few items for the threads, items are single segments: their
 * results wait in cpu_ctx.attn, as many segments at a time as fit, and are merged in a second pass,
 * with the same result. Thread: engine, compute pool. */
#include <math.h>
#include <string.h>

#include "kernels/cpu/attention/attention.h"
#include "kernels/exp.h"
#include "kernels/kv_rows.h"
#include "shared/base/arith.h"
#include "shared/base/assert.h"

enum {
    SEQS_PER_CALL = 2048,       /* sequences whose first items are in the work table at a time */
    ITEMS_PER_THREAD = 4,       /* enough items that a late thread costs little */
    PAIRS_MIN = 8,              /* fewer would load a tile for too little work */
    PARTIAL_HEADER_FLOATS = 16, /* floats before a part's sums: m, l */
    PAIRS_PER_MERGE = 16,
    MERGE_ALONE_FLOATS = 1 << 14, /* less is not worth waking a thread */
    APPEND_ALONE_FLOATS = 1 << 14,
    APPEND_PREFETCH_ROWS = 2, /* rows of a sequence that are prefetched; a prompt's further
                               * rows follow in memory */
    SPLIT_PAIRS = ITEMS_PER_THREAD * ATTN_NAIVE_ROWS, /* per thread, in a call that is split */
    PARTIALS_FLOATS = SPLIT_PAIRS * (KERNEL_HEAD_DIM_MAX + PARTIAL_HEADER_FLOATS)
};
_Static_assert((KERNEL_LATENT_MAX + PARTIAL_HEADER_FLOATS) * ATTN_LATENT_PAIRS <=
                   (KERNEL_HEAD_DIM_MAX + PARTIAL_HEADER_FLOATS) * ATTN_NAIVE_ROWS,
               "one segment of a split call fits whatever the path");

/* cpu_ctx.attn */
struct attn_workspace {
    int32_t item_begin[SEQS_PER_CALL + 1]; /* of one run of heads, before each sequence */
    int32_t pair_begin[SEQS_PER_CALL + 1]; /* of all heads */
    float floats[];                        /* split calls: [pairs][2] M and L so far, then the
                                            * parts */
};

size_t attention_workspace_bytes(int n_threads)
{
    return sizeof(struct attn_workspace) +
           ((size_t)PARTIALS_FLOATS + 2 * (size_t)SPLIT_PAIRS) * (size_t)n_threads * sizeof(float);
}

/* The i with begin[i] <= at < begin[i + 1]. */
static int32_t find_in(const int32_t *begin, int32_t n, int32_t at)
{
    int32_t low = 0, high = n;
    while (high - low > 1) {
        int32_t mid = low + (high - low) / 2;
        if (begin[mid] <= at) low = mid;
        else high = mid;
    }
    return low;
}

/* ---- appending ---- */

/* The first head of a row of the batch in the pool, and its scale; heads are `stride` rows apart,
 * values `part` rows after keys. */
struct kv_slot {
    char *at, *scale;
    size_t stride, part;
    struct kv_block_offsets bytes;
};

static struct kv_slot kv_slot_of(const struct kv_layer *kv, const struct attn_seq *seq, int32_t pos)
{
    struct kv_slot p = {
        .part = (size_t)kv->block_tokens,
        .bytes = attention_kv_block_offsets(kv),
    };
    size_t slot = (size_t)(pos % kv->block_tokens);
    char *block = (char *)kv->data +
                  (size_t)seq->block_table[pos / kv->block_tokens] * p.bytes.block;
    p.stride = kv->latent ? p.part : 2 * p.part;
    p.at = block + slot * p.bytes.row;
    p.scale = block + p.bytes.scales + slot * p.bytes.scale;
    return p;
}

/* Appends the row `i` rows after the slot. */
static void append_row(const struct kv_layer *kv, const struct kv_slot *p, size_t i,
                       const float *src)
{
    kv_row_store(kv->dtype, src, p->at + i * p->bytes.row, p->scale + i * p->bytes.scale,
                 (size_t)kv->head_dim);
}

/* Prefetches the lines of a sequence's first rows: otherwise each store waits for its line. */
static void prefetch_rows(const struct kv_append_args *a, const struct attn_seq *seq)
{
    for (int32_t i = 0; i < seq->n_q && i < APPEND_PREFETCH_ROWS; i++) {
        struct kv_slot p = kv_slot_of(&a->kv, seq, seq->pos_begin + i);
        for (int32_t h = 0; h < a->kv.n_heads; h++, p.at += p.stride * p.bytes.row)
            for (size_t line = 0; line < p.bytes.row; line += CACHE_LINE) {
                __builtin_prefetch(p.at + line, 1);
                if (!a->kv.latent) __builtin_prefetch(p.at + p.part * p.bytes.row + line, 1);
            }
    }
}

static void append_seq(void *arg, int index, int thread)
{
    (void)thread;
    const struct kv_append_args *a = arg;
    const struct attn_seq *seq = &a->on.seqs[index];
    size_t dim = (size_t)a->kv.head_dim;
    for (int32_t i = 0; i < seq->n_q; i++) {
        struct kv_slot p = kv_slot_of(&a->kv, seq, seq->pos_begin + i);
        size_t at = (size_t)(seq->q_begin + i) * (size_t)a->kv.n_heads * dim;
        for (int32_t h = 0; h < a->kv.n_heads; h++, at += dim) {
            append_row(&a->kv, &p, (size_t)h * p.stride, a->k + at);
            if (!a->kv.latent) append_row(&a->kv, &p, (size_t)h * p.stride + p.part, a->v + at);
        }
    }
}

void cpu_kv_append(struct kernel_ctx *c, const struct kv_append_args *a)
{
    struct kv_append_args args = *a;
    int64_t n = 0;
    if (a->rope) cpu_rope(c, a->rope);
    for (int32_t s = 0; s < a->on.n_seqs; s++) n += a->on.seqs[s].n_q;
    if (n * a->kv.n_heads * a->kv.head_dim >= APPEND_ALONE_FLOATS) {
        compute_pool_run(c->pool, a->on.n_seqs, append_seq, &args);
        return;
    }
    for (int32_t s = 0; s < a->on.n_seqs; s++) prefetch_rows(&args, &a->on.seqs[s]);
    for (int32_t s = 0; s < a->on.n_seqs; s++) append_seq(&args, s, 0);
}

/* ---- attention ---- */

struct attn_job {
    struct kernel_ctx *c;
    const struct attn_args *a;
    const struct attn_seq *seqs; /* of this pass */
    struct attn_workspace *workspace;
    int32_t n_seqs, n_heads, group, pairs_per_item, heads_per_item, n_head_runs, n_items;
    bool use_bf16_scores;
    /* Split calls: */
    bool split;
    int32_t segment, n_segments, segments_per_item; /* that this wave computes */
    size_t partial_stride;
    float *state, *partials; /* [pairs][2];
                              * [pairs][n_segments][partial_stride] */
};

static size_t out_offset(const struct attn_args *a, int32_t row, int32_t head)
{
    return ((size_t)row * (size_t)a->n_heads + (size_t)head) * (size_t)a->v_dim;
}

/* Merges one more segment (m, l, o) into (M, L, O); the first one sets it:
 *     T = max(M, m); a = exp(M - T); b = exp(m - T); L = fmaf(l, b, L * a); O = fmaf(o, b, O * a);
 *     M = T, and at the end O * (1 / L). */
static void merge(const struct cpu_microkernels *kernels, bool first, float *o_all, float *m_all,
                  float *l_all, const float *o, float m, float l, size_t n)
{
    if (first) {
        memcpy(o_all, o, n * sizeof *o);
        *m_all = m;
        *l_all = l;
        return;
    }
    float top = m > *m_all ? m : *m_all, a = exp_ref(*m_all - top), b = exp_ref(m - top);
    *l_all = fmaf(l, b, *l_all * a);
    if (a != 1) kernels->elementwise->scale(o_all, a, n); /* times 1 changes nothing */
    kernels->elementwise->axpy(o_all, o, b, n);
    *m_all = top;
}

struct attn_item {
    struct attn_tile_loop loops[ATTN_HEADS_PER_ITEM];
    int32_t n_heads, seq, segment; /* split: its first segment of this wave */
};

/* Items are numbered by sequence, run, segments, heads. */
static void init_item(const struct attn_job *job, int index, int thread, struct attn_item *it)
{
    const struct attn_workspace *t = job->workspace;
    int32_t unit = index / job->n_head_runs, head = index % job->n_head_runs * job->heads_per_item;
    int32_t per_run = job->split
                          ? (job->n_segments + job->segments_per_item - 1) / job->segments_per_item
                          : 1;
    void *scratch = cpu_scratch(job->c, thread);
    it->seq = find_in(t->item_begin, job->n_seqs, unit);
    unit -= t->item_begin[it->seq];
    it->segment = job->split ? unit % per_run * job->segments_per_item : 0;
    it->n_heads = min_i32(job->heads_per_item, job->n_heads - head);
    for (int32_t h = 0; h < it->n_heads; h++) {
        struct attn_tile_loop *w = &it->loops[h];
        *w = (struct attn_tile_loop){
            .kernels = cpu_microkernels_of(job->c),
            .a = job->a,
            .seq = &job->seqs[it->seq],
            .head = head + h,
            .group = job->group,
            .use_bf16_scores = job->use_bf16_scores,
            .upconverted = h > 0 ? it->loops[0].upconverted : NULL,
        };
        w->pair_begin = unit / per_run * job->pairs_per_item;
        w->n_pairs = min_i32(job->pairs_per_item, w->seq->n_q * job->group - w->pair_begin);
        scratch = attention_tile_loop_init(w, scratch);
    }
}

/* M and L of an item's pairs, all heads. */
enum { ITEM_PAIRS = ATTN_NAIVE_ROWS };
_Static_assert(ATTN_HEADS_PER_ITEM *ATTN_SKINNY_PAIRS <= (int)ITEM_PAIRS &&
                   (int)ATTN_PAIRS <= (int)ITEM_PAIRS,
               "of every path");

static void whole_item(void *arg, int index, int thread)
{
    const struct attn_job *job = arg;
    struct attn_item it;
    float m[ITEM_PAIRS], l[ITEM_PAIRS];
    size_t n = (size_t)job->a->v_dim;
    init_item(job, job->n_items - 1 - index, thread, &it); /* late rows of a prompt first, which
                                                            * attend to most */
    int32_t n_pairs = it.loops[0].n_pairs, last = (it.loops[0].n_keys - 1) / CPU_ATTN_SEGMENT;
    for (int32_t segment = 0; segment <= last; segment++) {
        int32_t first = attention_tile_loop_segment(it.loops, it.n_heads, segment);
        for (int32_t h = 0; h < it.n_heads; h++)
            for (int32_t i = first; i < n_pairs; i++) {
                const struct attn_tile_loop *w = &it.loops[h];
                int32_t at = h * n_pairs + i;
                float *out = job->a->out +
                             out_offset(job->a, w->seq->q_begin + (w->pair_begin + i) / w->group,
                                        attention_query_head(w, i));
                merge(w->kernels, segment == 0, out, &m[at], &l[at], w->o + (size_t)i * w->v_stride,
                      w->max[i], w->sum[i], n);
                if (attention_pair_pos(w, i) / CPU_ATTN_SEGMENT == segment)
                    w->kernels->elementwise->scale(out, 1 / l[at], n);
            }
    }
}

static float *partial_of(const struct attn_job *job, int32_t pair, int32_t segment)
{
    return job->partials +
           ((size_t)pair * (size_t)job->n_segments + (size_t)segment) * job->partial_stride;
}

/* Stores the results of one segment for merge_pair. */
static void store_partial(const struct attn_job *job, const struct attn_tile_loop *w, int32_t seq,
                          int32_t segment, int32_t first)
{
    int32_t pair = job->workspace->pair_begin[seq] + w->head * w->seq->n_q * w->group +
                   w->pair_begin;
    for (int32_t i = first; i < w->n_pairs; i++) {
        float *partial = partial_of(job, pair + i, segment);
        partial[0] = w->max[i];
        partial[1] = w->sum[i];
        memcpy(partial + PARTIAL_HEADER_FLOATS, w->o + (size_t)i * w->v_stride,
               (size_t)job->a->v_dim * sizeof *partial);
    }
}

static void split_item(void *arg, int index, int thread)
{
    const struct attn_job *job = arg;
    struct attn_item it;
    init_item(job, index, thread, &it);
    int32_t end = min_i32(job->n_segments, it.segment + job->segments_per_item);
    for (int32_t segment = it.segment; segment < end; segment++) {
        int32_t first = attention_tile_loop_segment(it.loops, it.n_heads, job->segment + segment);
        for (int32_t h = 0; h < it.n_heads; h++)
            store_partial(job, &it.loops[h], it.seq, segment, first);
    }
}

static void merge_pair(const struct attn_job *job, int32_t pair)
{
    const struct cpu_microkernels *kernels = cpu_microkernels_of(job->c);
    int32_t s = find_in(job->workspace->pair_begin, job->n_seqs, pair),
            at = pair - job->workspace->pair_begin[s];
    const struct attn_seq *seq = &job->seqs[s];
    int32_t per_head = seq->n_q * job->group, row = at % per_head / job->group,
            head = at / per_head * job->group + at % job->group;
    int32_t last = (seq->pos_begin + row) / CPU_ATTN_SEGMENT - job->segment;
    float *out = job->a->out + out_offset(job->a, seq->q_begin + row, head),
          *state = job->state + 2 * (size_t)pair;
    size_t n = (size_t)job->a->v_dim;
    for (int32_t i = 0; i < job->n_segments && i <= last; i++) {
        const float *partial = partial_of(job, pair, i);
        merge(kernels, job->segment + i == 0, out, &state[0], &state[1],
              partial + PARTIAL_HEADER_FLOATS, partial[0], partial[1], n);
    }
    if (last >= 0 && last < job->n_segments) kernels->elementwise->scale(out, 1 / state[1], n);
}

static void merge_item(void *arg, int index, int thread)
{
    (void)thread;
    const struct attn_job *job = arg;
    int32_t begin = index * PAIRS_PER_MERGE,
            end = min_i32(begin + PAIRS_PER_MERGE, job->workspace->pair_begin[job->n_seqs]);
    for (int32_t pair = begin; pair < end; pair++) merge_pair(job, pair);
}

/* ---- how a call is split ---- */

static int64_t count_pairs(const struct attn_job *job)
{
    int64_t n = 0;
    for (int32_t s = 0; s < job->n_seqs; s++) n += (int64_t)job->seqs[s].n_q * job->group;
    return n;
}

static int32_t count_segments(const struct attn_job *job)
{
    int32_t most = 0;
    for (int32_t s = 0; s < job->n_seqs; s++) {
        int32_t n = (job->seqs[s].pos_begin + job->seqs[s].n_q + CPU_ATTN_SEGMENT - 1) /
                    CPU_ATTN_SEGMENT;
        if (job->seqs[s].n_q > 0 && n > most) most = n;
    }
    return most;
}

/* Fills the work table; `per_run` items for every run of some heads. */
static void list_items(struct attn_job *job, int32_t per_run)
{
    struct attn_workspace *t = job->workspace;
    t->item_begin[0] = t->pair_begin[0] = 0;
    for (int32_t s = 0; s < job->n_seqs; s++) {
        int32_t pairs = job->seqs[s].n_q * job->group;
        t->item_begin[s + 1] = t->item_begin[s] +
                               (pairs + job->pairs_per_item - 1) / job->pairs_per_item * per_run;
        if (job->split) t->pair_begin[s + 1] = t->pair_begin[s] + pairs * job->n_heads;
    }
    job->n_items = t->item_begin[job->n_seqs] * job->n_head_runs;
}

static void run_split(struct attn_job *job, int32_t n_segments, int64_t n_pairs, int32_t wanted)
{
    struct kernel_ctx *c = job->c;
    size_t capacity = (size_t)PARTIALS_FLOATS * (size_t)compute_pool_threads(c->pool);
    job->split = true;
    job->partial_stride = ((size_t)job->a->v_dim + PANEL - 1) / PANEL * PANEL +
                          PARTIAL_HEADER_FLOATS;
    job->state = job->workspace->floats;
    job->partials = job->state + 2 * n_pairs;
    int32_t per_wave = (int32_t)(capacity / ((size_t)n_pairs * job->partial_stride)),
            runs = job->n_items;
    for (; job->segment < n_segments; job->segment += job->n_segments) {
        job->n_segments = min_i32(per_wave, n_segments - job->segment);
        int32_t even = (int32_t)((int64_t)runs * job->n_segments / wanted);
        job->segments_per_item = even < 1 ? 1 : even;
        list_items(job, (job->n_segments + job->segments_per_item - 1) / job->segments_per_item);
        compute_pool_run(c->pool, job->n_items, split_item, job);
        int32_t n_merges = (int32_t)((n_pairs + PAIRS_PER_MERGE - 1) / PAIRS_PER_MERGE);
        if ((size_t)n_pairs * (size_t)job->n_segments * job->partial_stride >= MERGE_ALONE_FLOATS)
            compute_pool_run(c->pool, n_merges, merge_item, job);
        else
            for (int32_t i = 0; i < n_merges; i++) merge_item(job, i, 0);
    }
}

static void run_whole(struct attn_job *job, int64_t n_pairs, int32_t wanted)
{
    int64_t even = n_pairs * job->n_heads / wanted;
    if (job->heads_per_item == 1 && even < job->pairs_per_item) {
        job->pairs_per_item = even < PAIRS_MIN ? PAIRS_MIN : (int32_t)even;
        list_items(job, 1);
    }
    compute_pool_run(job->c->pool, job->n_items, whole_item, job);
}

/* Heads that go together: several where each has few pairs, as long as there is an item for every
 * thread. */
static void choose_heads(struct attn_job *job, int32_t n_segments, int32_t n_threads)
{
    int32_t most = 0;
    for (int32_t s = 0; s < job->n_seqs; s++)
        most = job->seqs[s].n_q > most ? job->seqs[s].n_q : most;
    bool skinny = (int64_t)most * job->group <= ATTN_SKINNY_PAIRS && !job->a->kv.latent;
    job->heads_per_item = skinny ? min_i32(ATTN_HEADS_PER_ITEM, job->n_heads) : 1;
    for (;; job->heads_per_item = (job->heads_per_item + 1) / 2) {
        job->n_head_runs = (job->n_heads + job->heads_per_item - 1) / job->heads_per_item;
        list_items(job, 1);
        if (job->heads_per_item == 1 || (int64_t)job->n_items * n_segments >= 2 * n_threads) return;
    }
}

/* Whether scores are products of bf16. Keys that are expanded from latents are f32. */
static bool can_use_bf16_scores(const struct kernel_ctx *c, const struct attn_args *a)
{
    return c->options.activations == ACTIVATIONS_FAST && a->kv.dtype == DTYPE_BF16 && !a->k_up &&
           cpu_has_bf16_products(c);
}

static void attend_seqs(struct kernel_ctx *c, const struct attn_args *a,
                        const struct attn_seq *seqs, int32_t n_seqs)
{
    bool naive = a->k_up != NULL;
    struct attn_job job = {
        .c = c,
        .a = a,
        .seqs = seqs,
        .n_seqs = n_seqs,
        .workspace = cpu_ctx_of(c)->attn,
        .n_heads = naive ? a->n_heads : a->kv.n_heads,
    };
    job.group = a->n_heads / job.n_heads;
    job.use_bf16_scores = can_use_bf16_scores(c, a);
    job.pairs_per_item = attention_pairs_max(a);
    int64_t n_pairs = count_pairs(&job);
    int32_t n_segments = count_segments(&job), n_threads = compute_pool_threads(c->pool);
    int32_t wanted = n_threads == 1 ? 1 : n_threads * ITEMS_PER_THREAD;
    choose_heads(&job, n_segments, n_threads == 1 ? 0 : n_threads);
    if (n_segments > 1 && job.n_items < wanted)
        run_split(&job, n_segments, n_pairs * job.n_heads, wanted);
    else run_whole(&job, n_pairs, wanted);
}

void cpu_attention(struct kernel_ctx *c, const struct attn_args *a)
{
    const bool naive = a->k_up != NULL;
    /* config_check.c refuses what is larger */
    ASSERT(a->kv.head_dim <= (a->kv.latent ? KERNEL_LATENT_MAX : KERNEL_HEAD_DIM_MAX));
    ASSERT(!naive ||
           a->k_up->n_out + (size_t)a->kv.head_dim - a->k_up->n_in <= KERNEL_HEAD_DIM_MAX);
    ASSERT(a->v_dim <= (naive ? KERNEL_HEAD_DIM_MAX : a->kv.head_dim));
    if (a->append) cpu_kv_append(c, a->append);
    for (int32_t done = 0; done < a->on.n_seqs; done += SEQS_PER_CALL)
        attend_seqs(c, a, a->on.seqs + done, min_i32(SEQS_PER_CALL, a->on.n_seqs - done));
}
