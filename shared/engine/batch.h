/* batch.h - the rows of one step: which sequences take part, with which tokens.
 *
 * First every running sequence with one pending token (decode), each with a block for it; when
 * there is none the newest running sequence is preempted. Then prompts in chunks (chunked prefill)
 * until max_batched_tokens rows are full: those begun first, then new ones from the head of the
 * waiting queue, which need all their blocks at once, so that a prefill never stops half way for
 * want of blocks. A row that yields a token or a prompt logprob takes a logits row, of which there
 * is a fixed number. More decodes than one step can hold take turns. Owner: engine thread. All
 * arrays are sized at batch_init. */
#ifndef BATON_ENGINE_BATCH_H
#define BATON_ENGINE_BATCH_H

#include "shared/engine/seq.h"

struct engine;

/* Tokens [begin, end) of a sequence. */
struct batch_chunk {
    struct seq *seq;
    uint32_t begin, end;
};

/* What a row of logits is for: the token after position `pos`, to be sampled or (a known prompt
 * token) only scored. */
struct batch_logit {
    struct seq *seq;
    uint32_t pos;
    bool sample;
};

struct batch {
    uint32_t max_rows, max_chunks, max_logits;
    uint32_t n_rows, n_chunks, n_seqs, n_logits;
    int32_t *ids, *pos;         /* [max_rows] */
    struct attn_seq *seqs;      /* [2 * max_chunks]: a part's prompt tokens, then its generated
                                 * ones */
    struct batch_chunk *chunks; /* [max_chunks] */
    int32_t *logit_rows;        /* [max_logits] */
    struct batch_logit *logits; /* [max_logits] */
    uint32_t n_decodes;         /* decodes marked so far by this build */
    bool preempted;             /* by this build */
};

void batch_init(struct batch *b, uint32_t max_rows, uint32_t max_seqs);
void batch_release(struct batch *b);
/* The head of the waiting queue could start now, but not while a step is under way: a prefill_only
 * one, whose cached blocks go to a peer at once. */
bool batch_next_needs_completion(struct engine *e);
/* Fill engine_batch(e). It may come out empty. */
void batch_build(struct engine *e);

#endif
