/* batch.h - the batch of one step: which sequences take part, with which tokens.
 *
 * 1. Decode: every running sequence with one pending token gets a row and a block for it. When the
 *    pool has no block left, the newest running sequence is preempted. Sequences take turns when
 *    there are more than one step can hold.
 *    Drafts (draft/draft.h) follow some of them, as long as there are rows; nobody is preempted for
 *    a draft.
 * 2. Chunked prefill fills the remaining rows up to max_batched_tokens, or as many as fill a step
 *    (engine_speed.h): prompts in progress first, then the head of the waiting queue, those that
 *    go first before others. A new prompt is admitted only with all its blocks, so a prefill never
 *    stops half way for want of blocks.
 * A row that yields a token or a prompt logprob uses one of a fixed number of logits rows.
 * Thread: engine. All arrays are sized by batch_init. */
#ifndef BATON_ENGINE_BATCH_H
#define BATON_ENGINE_BATCH_H

#include "shared/engine/block_wait.h"
#include "shared/engine/seq.h"

struct engine;

/* Tokens [begin, end) of a sequence. */
struct batch_chunk {
    struct seq *seq;
    uint32_t begin, end;
    uint32_t n_draft;     /* the last of them are drafts */
    uint32_t n_wanted;    /* drafts to be made behind the step, of a drafter that observes */
    uint32_t n_remaining; /* of the sequence, before the step */
    /* It begins up to n_most positions later than `begin`: by the number `move` of drafts that the
     * step in flight verifies (kernel_move). The host is told when that is complete. 0: it does
     * not. */
    uint32_t move, n_most;
};

/* The purpose of one row of logits: the token after position `pos` is sampled or, for a known
 * prompt token, only scored. Rows of a sequence's drafts follow that of its last token. */
struct batch_logit {
    struct seq *seq;
    uint32_t pos;
    bool sample;
};

struct batch {
    uint32_t max_rows, max_chunks, max_logits;
    uint32_t n_rows, n_chunks, n_seqs, n_logits;
    int32_t *ids, *pos;         /* [max_rows] */
    struct attn_seq *seqs;      /* [2 * max_chunks]: per chunk its prompt, then generated tokens */
    struct batch_chunk *chunks; /* [max_chunks] */
    struct kernel_move *moves;  /* [max_chunks] */
    uint32_t n_moves;
    int32_t *logit_rows;          /* [max_logits] */
    struct batch_logit *logits;   /* [max_logits] */
    struct block_holder *holders; /* [max_chunks] */
    uint32_t n_decodes;           /* decodes chosen so far by this build */
    uint32_t n_drafts;            /* rows of drafts */
    bool streams;                 /* KV of a sequence still comes, layer by layer */
    bool preempted;               /* this build preempted a sequence */
    bool is_filled;               /* of rows: a further prompt would not have come into it */
};

void batch_init(struct batch *b, uint32_t max_rows, uint32_t max_seqs);
void batch_release(struct batch *b);
/* Does the head of the waiting queue have to wait for the step in flight to complete? True for a
 * prefill_only sequence that could start now: its cached blocks go to a peer at once. */
bool batch_next_needs_completion(struct engine *e);
/* Could it start with blocks that running sequences have for drafts alone, whatever comes of the
 * drafts in flight? They give those back when the step in flight is complete. */
bool batch_next_waits_for_drafts(struct engine *e);
/* Blocks that the head of the waiting queue takes at most if it starts now; 0: it cannot. */
uint32_t batch_next_blocks(struct engine *e);
/* Fills engine_batch(e), which may stay empty. */
void batch_build(struct engine *e);

#endif
