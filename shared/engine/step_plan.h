/* step_plan.h - the plan of a step, or of a pass of the draft layer, which the leader of a
 * tensor-parallel node sends to the ranks that follow it: 32-bit words, laid out as
 *
 *     head | prompts whose layers are announced | attention sequences | hidden states of a pass |
 *     ids | logit rows | blocks
 *
 * Positions are not sent: they follow from the sequences, whose rows lie one after another. All
 * ranks are the same build on one kind of host, so the words are structs as they lie in memory.
 * Thread: engine. */
#ifndef BATON_ENGINE_STEP_PLAN_H
#define BATON_ENGINE_STEP_PLAN_H

#include "shared/engine/batch.h"

/* The limits of a node's steps, the same on all its ranks: with other ones, plans are refused. */
struct step_plan_limits {
    uint64_t model_fingerprint;
    uint32_t max_rows, max_seqs, max_logits, max_len; /* max_len: tokens of a sequence */
    uint32_t block_tokens, n_blocks;
    uint32_t max_draft_rows; /* of a pass; 0: there is no draft layer */
};

struct step_plan_head {
    uint64_t step;  /* number of the plan, from 0 */
    uint64_t epoch; /* of the group that takes the step, too; without a step: of the one that the
                     * leader has lost. 0: none */
    struct step_plan_limits limits;
    uint32_t n_words;    /* of the plan */
    uint32_t next_words; /* that the next plan sends at first */
    uint32_t is_step;    /* 0: there is none, all sleep */
    uint32_t is_first;   /* the group's first step: not every rank may be in it yet */
    uint32_t is_pass;    /* enum step_plan_pass: it follows a step, and all ranks take it */
    uint32_t n_announced, n_seqs, n_hidden, n_rows, n_logits, n_blocks;
};

enum step_plan_pass { STEP_PLAN_NO_PASS, STEP_PLAN_FIRST_PASS, STEP_PLAN_CHAINED_PASS };

/* Tokens [begin, end) of a prompt whose layers are announced one by one
 * (engine_options.on_kv_ready); those of [told, begin) are in the pool already. */
struct step_plan_announced {
    uint64_t id;
    uint32_t told, begin, end;
    uint32_t table; /* where its blocks begin */
};

/* As struct model_hidden_rows. */
struct step_plan_hidden {
    uint32_t first, n;
};

/* Positions [pos_begin, pos_begin + n_q) of a sequence. */
struct step_plan_seq {
    uint32_t pos_begin, n_q;
    uint32_t table; /* where its blocks begin */
    uint32_t is_decode;
};

/* Where the parts of a plan are. */
struct step_plan {
    struct step_plan_head *head;
    struct step_plan_announced *announced;
    struct step_plan_seq *seqs;
    struct step_plan_hidden *hidden;
    int32_t *ids, *logit_rows, *blocks;
};

enum { STEP_PLAN_HEAD_WORDS = sizeof(struct step_plan_head) / sizeof(uint32_t) };

/* Words of the largest plan within the limits. */
size_t step_plan_max_words(const struct step_plan_limits *l);
/* Writes a head for b's rows; b NULL: for none. The caller sets its other members. */
void step_plan_write(uint64_t *words, const struct step_plan_limits *l, const struct batch *b);
/* The same for a pass, whose batch says all but what is announced [n_announced]: there `table` is
 * the number of an attention sequence of the prompt. */
void step_plan_write_pass(uint64_t *words, const struct step_plan_limits *l,
                          const struct model_draft *pass,
                          const struct step_plan_announced *announced, uint32_t n_announced);
/* The parts of a plan whose head has been checked or written. */
struct step_plan step_plan_at(uint64_t *words);
/* May the head be believed? ERR_PEER_MISMATCH: the leader has other limits; ERR_INTERNAL: its
 * counts are beyond them. */
enum status step_plan_check_head(const struct step_plan_head *h, const struct step_plan_limits *l,
                                 struct err *err) MUST_CHECK;
/* Do the sequences have as many rows and blocks as the head says, of a model with n_vocab tokens?
 * ERR_INTERNAL. */
enum status step_plan_check(const struct step_plan *p, uint32_t n_vocab,
                            struct err *err) MUST_CHECK;

#endif
