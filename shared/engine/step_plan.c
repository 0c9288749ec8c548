/* step_plan.c - writes plans on the leader and checks them on the ranks that follow.
 *
 * Thread: engine. */
#include "shared/engine/step_plan.h"

#include <string.h>

#include "shared/base/arith.h"
#include "shared/base/assert.h"

#define WORDS_OF(type) (sizeof(type) / sizeof(uint32_t))

static size_t blocks_for(const struct step_plan_limits *l, size_t n_tokens)
{
    return div_up(n_tokens, l->block_tokens);
}

static size_t words_of(const struct step_plan_head *h)
{
    return STEP_PLAN_HEAD_WORDS + h->n_announced * WORDS_OF(struct step_plan_announced) +
           h->n_seqs * WORDS_OF(struct step_plan_seq) +
           h->n_hidden * WORDS_OF(struct step_plan_hidden) + h->n_rows + h->n_logits + h->n_blocks;
}

/* The counts that no plan exceeds: a sequence has a chunk of at most two attention sequences. */
static struct step_plan_head largest(const struct step_plan_limits *l)
{
    return (struct step_plan_head){
        .n_announced = l->max_seqs,
        .n_seqs = 2 * l->max_seqs,
        .n_hidden = l->max_seqs,
        .n_rows = l->max_rows,
        .n_logits = l->max_logits,
        .n_blocks = (uint32_t)(l->max_seqs * blocks_for(l, l->max_len)),
    };
}

size_t step_plan_max_words(const struct step_plan_limits *l)
{
    const struct step_plan_head h = largest(l);
    return words_of(&h);
}

struct step_plan step_plan_at(uint64_t *words)
{
    struct step_plan p = { .head = (struct step_plan_head *)words };
    p.announced = (struct step_plan_announced *)(p.head + 1);
    p.seqs = (struct step_plan_seq *)(p.announced + p.head->n_announced);
    p.hidden = (struct step_plan_hidden *)(p.seqs + p.head->n_seqs);
    p.ids = (int32_t *)(p.hidden + p.head->n_hidden);
    p.logit_rows = p.ids + p.head->n_rows;
    p.blocks = p.logit_rows + p.head->n_logits;
    return p;
}

/* ---- leader ---- */

static struct step_plan_head head_of(const struct step_plan_limits *l, const struct batch *b)
{
    struct step_plan_head h = { .limits = *l };
    if (b) {
        h.n_seqs = b->n_seqs;
        h.n_rows = b->n_rows;
        h.n_logits = b->n_logits;
        for (uint32_t i = 0; i < b->n_chunks; i++) {
            h.n_announced += b->chunks[i].seq->prefill_only;
            h.n_blocks += (uint32_t)blocks_for(l, b->chunks[i].end);
        }
    }
    h.n_words = (uint32_t)words_of(&h);
    return h;
}

/* Writes the attention sequences of a chunk, which are the next of the batch; returns how many. */
static uint32_t write_seqs(const struct attn_seq *from, const struct batch_chunk *c, uint32_t table,
                           struct step_plan_seq *to)
{
    uint32_t n = 0;
    for (uint32_t pos = c->begin; pos < c->end; pos += (uint32_t)from[n++].n_q) {
        ASSERT((uint32_t)from[n].pos_begin == pos);
        to[n] = (struct step_plan_seq){ .pos_begin = pos,
                                        .n_q = (uint32_t)from[n].n_q,
                                        .table = table,
                                        .is_decode = from[n].is_decode };
    }
    return n;
}

void step_plan_write(uint64_t *words, const struct step_plan_limits *l, const struct batch *b)
{
    uint32_t at = 0, n_seqs = 0, n_announced = 0;
    *(struct step_plan_head *)words = head_of(l, b);
    const struct step_plan p = step_plan_at(words);
    if (!b) return;
    memcpy(p.ids, b->ids, b->n_rows * sizeof *p.ids);
    memcpy(p.logit_rows, b->logit_rows, b->n_logits * sizeof *p.logit_rows);
    for (uint32_t i = 0; i < b->n_chunks; i++) {
        const struct batch_chunk *c = &b->chunks[i];
        const uint32_t n = (uint32_t)blocks_for(l, c->end);
        n_seqs += write_seqs(b->seqs + n_seqs, c, at, p.seqs + n_seqs);
        if (c->seq->prefill_only)
            p.announced[n_announced++] = (struct step_plan_announced){
                .id = c->seq->id,
                .told = c->begin == c->seq->n_taken ? 0 : c->begin, /* 0: what was cached, too */
                .begin = c->begin,
                .end = c->end,
                .table = at,
            };
        memcpy(p.blocks + at, c->seq->blocks, n * sizeof *p.blocks);
        at += n;
    }
    ASSERT(n_seqs == b->n_seqs);
}

/* ---- leader: passes ---- */

/* Blocks of an attention sequence's positions. */
static uint32_t n_blocks_of(const struct step_plan_limits *l, const struct attn_seq *s)
{
    return (uint32_t)blocks_for(l, (size_t)s->pos_begin + (size_t)s->n_q);
}

/* Prompt and generated tokens of a sequence follow each other, and have one table. */
static bool has_table_of(const struct attn_seq *s, const struct attn_seq *before)
{
    return s->block_table == before->block_table && s->pos_begin == before->pos_begin + before->n_q;
}

static struct step_plan_head head_of_pass(const struct step_plan_limits *l,
                                          const struct model_draft *d, uint32_t n_announced)
{
    const struct model_batch *b = &d->batch;
    struct step_plan_head h = {
        .limits = *l,
        .is_pass = d->chained ? STEP_PLAN_CHAINED_PASS : STEP_PLAN_FIRST_PASS,
        .n_announced = n_announced,
        .n_seqs = (uint32_t)b->n_seqs,
        .n_hidden = d->n_hidden,
        .n_rows = (uint32_t)b->n_rows,
        .n_logits = (uint32_t)b->n_logits,
    };
    for (int32_t i = 0; i < b->n_seqs; i++) {
        const bool again = i > 0 && has_table_of(&b->seqs[i], &b->seqs[i - 1]);
        h.n_blocks += n_blocks_of(l, &b->seqs[i]) - (again ? n_blocks_of(l, &b->seqs[i - 1]) : 0);
    }
    h.n_words = (uint32_t)words_of(&h);
    return h;
}

/* Writes the attention sequences and their tables. */
static void write_tables(const struct step_plan *p, const struct step_plan_limits *l,
                         const struct model_batch *b)
{
    uint32_t at = 0, table = 0;
    for (int32_t i = 0; i < b->n_seqs; i++) {
        const struct attn_seq *s = &b->seqs[i];
        if (i == 0 || !has_table_of(s, &b->seqs[i - 1])) table = at;
        const uint32_t n = n_blocks_of(l, s);
        memcpy(p->blocks + table, s->block_table, n * sizeof *p->blocks);
        at = table + n;
        p->seqs[i] = (struct step_plan_seq){ .pos_begin = (uint32_t)s->pos_begin,
                                             .n_q = (uint32_t)s->n_q,
                                             .table = table,
                                             .is_decode = s->is_decode };
    }
    ASSERT(at == p->head->n_blocks);
}

void step_plan_write_pass(uint64_t *words, const struct step_plan_limits *l,
                          const struct model_draft *pass,
                          const struct step_plan_announced *announced, uint32_t n_announced)
{
    const struct model_batch *b = &pass->batch;
    *(struct step_plan_head *)words = head_of_pass(l, pass, n_announced);
    const struct step_plan p = step_plan_at(words);
    for (uint32_t i = 0; i < pass->n_hidden; i++) {
        ASSERT(!pass->hidden[i].host); /* the others do not have it */
        p.hidden[i] = (struct step_plan_hidden){ pass->hidden[i].first, pass->hidden[i].n };
    }
    if (b->n_rows > 0) memcpy(p.ids, b->ids, (size_t)b->n_rows * sizeof *p.ids);
    if (b->n_logits > 0)
        memcpy(p.logit_rows, b->logit_rows, (size_t)b->n_logits * sizeof *p.logit_rows);
    write_tables(&p, l, b);
    for (uint32_t i = 0; i < n_announced; i++) {
        p.announced[i] = announced[i];
        p.announced[i].table = p.seqs[announced[i].table].table;
    }
}

/* ---- the ranks that follow ---- */

static enum status check_limits(const struct step_plan_limits *a, const struct step_plan_limits *b,
                                struct err *err)
{
    const struct {
        const char *what;
        uint64_t leader, here;
    } terms[] = {
        { "model fingerprint", a->model_fingerprint, b->model_fingerprint },
        { "rows of a step", a->max_rows, b->max_rows },
        { "sequences of a step", a->max_seqs, b->max_seqs },
        { "logits of a step", a->max_logits, b->max_logits },
        { "tokens of a sequence", a->max_len, b->max_len },
        { "tokens of a KV block", a->block_tokens, b->block_tokens },
        { "KV blocks", a->n_blocks, b->n_blocks },
        { "rows of a pass of the draft layer", a->max_draft_rows, b->max_draft_rows },
    };
    for (size_t i = 0; i < sizeof terms / sizeof *terms; i++)
        if (terms[i].leader != terms[i].here)
            return err_set(err, ERR_PEER_MISMATCH,
                           "%s: %llu on the node's first rank, %llu on this one; all ranks of a "
                           "node need the same",
                           terms[i].what, (unsigned long long)terms[i].leader,
                           (unsigned long long)terms[i].here);
    return OK;
}

enum status step_plan_check_head(const struct step_plan_head *h, const struct step_plan_limits *l,
                                 struct err *err)
{
    const struct step_plan_head most = largest(l);
    TRY(check_limits(&h->limits, l, err));
    if (h->n_announced <= most.n_announced && h->n_seqs <= most.n_seqs &&
        h->n_rows <= (h->is_pass ? l->max_draft_rows : most.n_rows) &&
        h->n_hidden <= most.n_hidden && h->is_pass <= STEP_PLAN_CHAINED_PASS &&
        h->n_logits <= most.n_logits && h->n_blocks <= most.n_blocks && h->n_words == words_of(h))
        return OK;
    return err_set(
        err, ERR_INTERNAL,
        "a plan of %u words with %u rows, %u sequences, %u logits and %u blocks is beyond "
        "the limits of a step",
        h->n_words, h->n_rows, h->n_seqs, h->n_logits, h->n_blocks);
}

/* Are there blocks for positions below `end`? */
static bool has_blocks(const struct step_plan_head *h, uint32_t table, uint64_t end)
{
    return end <= h->limits.max_len && table + blocks_for(&h->limits, end) <= h->n_blocks;
}

/* Do the attention sequences have all rows of the step, and blocks for them? */
static bool are_seqs(const struct step_plan *p)
{
    const struct step_plan_head *h = p->head;
    uint64_t n_rows = 0;
    for (uint32_t i = 0; i < h->n_seqs; i++) {
        const struct step_plan_seq *s = &p->seqs[i];
        n_rows += s->n_q;
        if (n_rows > h->n_rows || !has_blocks(h, s->table, (uint64_t)s->pos_begin + s->n_q))
            return false;
    }
    return n_rows == h->n_rows;
}

static bool are_announced(const struct step_plan *p)
{
    for (uint32_t i = 0; i < p->head->n_announced; i++) {
        const struct step_plan_announced *a = &p->announced[i];
        if (a->told > a->begin || a->begin > a->end || !has_blocks(p->head, a->table, a->end))
            return false;
    }
    return true;
}

/* Do the hidden states of a pass have as many rows, of those that a step can have? */
static bool are_hidden(const struct step_plan *p)
{
    const struct step_plan_head *h = p->head;
    uint64_t n_rows = 0;
    for (uint32_t i = 0; i < h->n_hidden; i++) {
        n_rows += p->hidden[i].n;
        if ((uint64_t)p->hidden[i].first + p->hidden[i].n > h->limits.max_rows) return false;
    }
    return h->is_pass ? n_rows == h->n_rows : h->n_hidden == 0;
}

/* Are all numbers in [0, limit)? */
static bool are_below(const int32_t *numbers, uint32_t n, uint32_t limit)
{
    for (uint32_t i = 0; i < n; i++)
        if (numbers[i] < 0 || (uint32_t)numbers[i] >= limit) return false;
    return true;
}

enum status step_plan_check(const struct step_plan *p, uint32_t n_vocab, struct err *err)
{
    const struct step_plan_head *h = p->head;
    if (are_seqs(p) && are_announced(p) && are_hidden(p) && h->n_logits <= h->n_rows &&
        are_below(p->ids, h->n_rows, n_vocab) && are_below(p->logit_rows, h->n_logits, h->n_rows) &&
        are_below(p->blocks, h->n_blocks, h->limits.n_blocks))
        return OK;
    return err_set(err, ERR_INTERNAL,
                   "a plan of %u rows names rows, tokens or blocks that there are not", h->n_rows);
}
