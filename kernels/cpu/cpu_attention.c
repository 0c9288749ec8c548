/* cpu_attention.c - the two slots that touch the KV pool: where keys and values lie, and how attention is split.
 *
 * A work item is one sequence, one kv head and a run of (query row, head) pairs of that head's group. It walks the KV blocks
 * in order; each block's keys and values are used by all its pairs while they are in the first-level cache. A pair sees
 * the tiles 0 .. its own position, one after another, whichever item it is in: chunking and batching change nothing.
 * Thread: engine, pool. */
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu_row.h"

enum { SEQS_PER_CALL = 2048 }; /* first item of each sequence, kept in scratch */
_Static_assert((SEQS_PER_CALL + 1) * sizeof(int32_t) <= SCRATCH_FLOATS * sizeof(float), "the table fits the scratch");

/* K of (block, kv_head); V follows block_tokens * head_dim floats later. */
static float *kv_head_at(void *kv, int32_t block, int32_t head, int32_t n_kv_heads, size_t half)
{
    return (float *)kv + ((size_t)block * (size_t)n_kv_heads + (size_t)head) * 2 * half;
}

void cpu_kv_append(struct kernel_ctx *c, const struct kv_append_args *a)
{
    (void)c;
    size_t dim = (size_t)a->head_dim, half = (size_t)a->block_tokens * dim, n_heads = (size_t)a->n_kv_heads;
    for (int32_t s = 0; s < a->n_seqs; s++) {
        const struct attn_seq *seq = &a->seqs[s];
        for (int32_t i = 0; i < seq->n_q; i++) {
            int32_t pos = seq->pos_begin + i, block = seq->block_table[pos / a->block_tokens];
            size_t  row = (size_t)(seq->q_begin + i) * n_heads * dim, slot = (size_t)(pos % a->block_tokens) * dim;
            for (int32_t h = 0; h < a->n_kv_heads; h++) {
                float *k = kv_head_at(a->kv, block, h, a->n_kv_heads, half) + slot;
                memcpy(k, a->k + row + (size_t)h * dim, dim * sizeof *k);
                memcpy(k + half, a->v + row + (size_t)h * dim, dim * sizeof *k);
            }
        }
    }
}

struct attn_job {
    const struct cpu_loops *loops;
    const struct attn_args *a;
    const struct attn_seq  *seqs;       /* of this call */
    int32_t                 n_seqs;
    const int32_t          *item_begin; /* [n_seqs + 1], in units of one kv head's items */
    int32_t                 group, pairs_per_item;
};

/* The sequence whose items include `unit`. */
static int32_t find_seq(const struct attn_job *job, int32_t unit)
{
    int32_t low = 0, high = job->n_seqs;
    while (high - low > 1) {
        int32_t mid = low + (high - low) / 2;
        if (job->item_begin[mid] <= unit) low = mid;
        else high = mid;
    }
    return low;
}

struct attn_run {
    const struct attn_seq *seq;
    int32_t                kv_head, pair_begin, n_pairs;
    struct attn_state      state[ATTN_ITEMS];
};

static size_t pair_offset(const struct attn_job *job, const struct attn_run *r, int32_t i)
{
    int32_t pair = r->pair_begin + i, row = r->seq->q_begin + pair / job->group;
    int32_t head = r->kv_head * job->group + pair % job->group;
    return ((size_t)row * (size_t)job->a->n_heads + (size_t)head) * (size_t)job->a->head_dim;
}

/* Position of the pair's query: the last key it sees. */
static int32_t pair_pos(const struct attn_job *job, const struct attn_run *r, int32_t i)
{
    return r->seq->pos_begin + (r->pair_begin + i) / job->group;
}

static void attend_run(const struct attn_job *job, struct attn_run *r)
{
    const struct attn_args *a = job->a;
    size_t  dim = (size_t)a->head_dim, half = (size_t)a->block_tokens * dim;
    int32_t last_pos = pair_pos(job, r, r->n_pairs - 1);
    for (int32_t i = 0; i < r->n_pairs; i++) {
        r->state[i] = (struct attn_state){ .max = -INFINITY };
        memset(a->out + pair_offset(job, r, i), 0, dim * sizeof(float));
    }
    for (int32_t begin = 0; begin <= last_pos; begin += a->block_tokens) {
        /* The pool is only read here; kv_head_at serves appending too, hence the cast. */
        const float *k = kv_head_at((void *)(uintptr_t)a->kv, r->seq->block_table[begin / a->block_tokens], r->kv_head,
                                    a->n_kv_heads, half);
        struct attn_tile tile = { .k = k, .v = k + half, .head_dim = dim, .scale = a->scale };
        for (int32_t i = 0; i < r->n_pairs; i++) {
            int32_t n_keys = pair_pos(job, r, i) + 1 - begin;
            if (n_keys <= 0) continue;
            tile.n_keys = (size_t)(n_keys < a->block_tokens ? n_keys : a->block_tokens);
            size_t at = pair_offset(job, r, i);
            job->loops->attend(a->out + at, &r->state[i], a->q + at, &tile);
        }
    }
    for (int32_t i = 0; i < r->n_pairs; i++)
        job->loops->scale(a->out + pair_offset(job, r, i), 1.0f / r->state[i].sum, dim);
}

static void attention_item(void *arg, int index, int thread)
{
    (void)thread;
    const struct attn_job *job = arg;
    int32_t unit = index / job->a->n_kv_heads, s = find_seq(job, unit);
    struct attn_run r = { .seq = &job->seqs[s], .kv_head = index % job->a->n_kv_heads };
    r.pair_begin = (unit - job->item_begin[s]) * job->pairs_per_item;
    int32_t left = r.seq->n_q * job->group - r.pair_begin;
    r.n_pairs = left < job->pairs_per_item ? left : job->pairs_per_item;
    attend_run(job, &r);
}

/* Pairs per item: all of ATTN_ITEMS, unless the call is too small to give every thread something. */
static int32_t pairs_per_item(const struct kernel_ctx *c, const struct attn_args *a, int32_t group)
{
    int64_t pairs = 0;
    for (int32_t s = 0; s < a->n_seqs; s++) pairs += (int64_t)a->seqs[s].n_q * group;
    int64_t even = pairs * a->n_kv_heads / (compute_pool_threads(c->pool) * 4);
    return even < 1 ? 1 : even > ATTN_ITEMS ? ATTN_ITEMS : (int32_t)even;
}

void cpu_attention(struct kernel_ctx *c, const struct attn_args *a)
{
    int32_t *item_begin = c->scratch; /* no other kernel runs now; attention items use no scratch of their own */
    struct attn_job job = { .loops = cpu_loops_of(c), .a = a, .item_begin = item_begin, .group = a->n_heads / a->n_kv_heads };
    job.pairs_per_item = pairs_per_item(c, a, job.group);
    for (int32_t done = 0; done < a->n_seqs; done += job.n_seqs) {
        job.seqs = a->seqs + done;
        job.n_seqs = a->n_seqs - done < SEQS_PER_CALL ? a->n_seqs - done : SEQS_PER_CALL;
        item_begin[0] = 0;
        for (int32_t s = 0; s < job.n_seqs; s++) {
            int32_t pairs = job.seqs[s].n_q * job.group;
            item_begin[s + 1] = item_begin[s] + (pairs + job.pairs_per_item - 1) / job.pairs_per_item;
        }
        compute_pool_run(c->pool, item_begin[job.n_seqs] * a->n_kv_heads, attention_item, &job);
    }
}
