/* draft.h - guesses of the tokens that a sequence will choose: the ops table of the drafters.
 *
 * A step verifies drafts: it computes them behind the sequence's last token, chooses a token after
 * each of them as if it were the only one, and keeps the choices as long as the drafts before them
 * were right. So a drafter decides how many tokens a step yields, and never which.
 *
 *     ngram    draft_ngram.c    what followed the last tokens where they came up last
 *     suffix   draft_suffix.c   what most often followed the longest run of last tokens
 *     mtp      draft_mtp.c      the model's own draft layer
 *     draft    draft_model.c    a small model
 *     given    draft_given.c    what its caller says, for tests
 *
 * Life cycle: create; per sequence begin, observe, propose .., end; free. Thread: engine. */
#ifndef BATON_ENGINE_DRAFT_DRAFT_H
#define BATON_ENGINE_DRAFT_DRAFT_H

#include <stdbool.h>
#include <stdint.h>

#include "shared/base/err.h"

enum {
    DRAFT_TOKENS_MAX = 8,
    DRAFT_LOOKUP_MAX = 32,  /* tokens that are compared at most */
    DRAFT_MODEL_MAX = 1024, /* bytes of a path, the zero included */
    DRAFT_LEVELS = 5,       /* how sure a drafter can be */
    DRAFT_LEVEL_EDIT = 4    /* that the text goes on behind a token that was replaced */
};

struct batch;
struct drafter_ops;
struct engine;
struct sample_request;
struct model;
struct seq;
struct token_logprobs;

struct draft_config {
    const struct drafter_ops *ops; /* NULL: no drafts */
    uint32_t n_tokens; /* drafts of a sequence in a step, at most; 1..DRAFT_TOKENS_MAX */
    uint32_t lookup_min, lookup_max; /* ngram, suffix: last tokens that must, and that may, agree */
    char model[DRAFT_MODEL_MAX];     /* as given; "": none */
    struct model *draft_model;       /* draft: loaded from there; borrowed until `free` */
    bool verify_all;                 /* drafts that are not worth while too */
    /* given: writes up to n_max drafts behind tokens [n_tokens]; returns how many. */
    uint32_t (*given)(void *arg, const int32_t *tokens, uint32_t n_tokens, uint32_t n_max,
                      int32_t *drafts);
    void *given_arg;
};

/* First member of every drafter's own struct. */
struct drafter {
    struct draft_config config;
};

/* First member of what a drafter keeps of a sequence. */
struct draft_seq {
    uint32_t n_tokens_max; /* that it can become long */
};

/* A sequence that may get drafts in the next step. */
struct draft_request {
    struct draft_seq *seq;
    struct seq *of; /* the engine's */
    const int32_t
        *tokens; /* [n_tokens] prompt and answer; at each call those before and more. A step
                            * in flight chooses more if of->n_future is not 0 */
    uint32_t n_tokens;
    uint32_t n_max;  /* drafts wanted at most; not 0 */
    int32_t *drafts; /* [n_max] out */
    uint32_t n;      /* out: how many there are; 0: no idea */
    uint32_t level;  /* out: how sure, below DRAFT_LEVELS; each has its own rate of acceptance */
};

struct drafter_ops {
    const char *name;
    /* It learns from every step of the engine; steps are only submitted early behind one that it
     * was submitted behind. */
    bool observes;
    /* Its drafts cost time: it makes only those that are worth while (engine_draft_want), and all
     * of them are verified. */
    bool chooses;
    /* Copies the config. `e` is the engine whose sequences it drafts, not started yet; drafters
     * that do not observe make nothing of it. ERR_CONFIG names the member at fault. */
    enum status (*create)(const struct draft_config *c, struct engine *e, struct drafter **out,
                          struct err *err);
    void (*free)(struct drafter *d);
    /* A sequence decodes that can become n_tokens_max tokens long. NULL: no memory; it gets no
     * drafts. */
    struct draft_seq *(*begin)(struct drafter *d, uint32_t n_tokens_max);
    /* The step of `b` is complete and has chosen b's tokens; the sequences do not have them yet.
     * Not called of one that does not observe. */
    void (*observe)(struct drafter *d, const struct batch *b, const struct token_logprobs *chosen);
    /* The step of `b` was submitted, and the device chooses its tokens: submits what makes drafts
     * behind them. False: it cannot; `observe` is called once the step is complete. Otherwise
     * `collect` is called instead, and the drafts that `propose` finds before that for sequences in
     * the step are ids of kept tokens (kernel_step). */
    bool (*submit)(struct drafter *d, const struct batch *b);
    /* Behind `submit`: the step of `b` is complete, as for `observe`. Waits for its drafts: the
     * device has left the sequences' blocks then, but for a step that is ahead. */
    void (*collect)(struct drafter *d, const struct batch *b, const struct token_logprobs *chosen);
    /* Fills in n requests, of different sequences. Takes microseconds for each. */
    void (*propose)(struct drafter *d, struct draft_request *requests, uint32_t n);
    void (*end)(struct drafter *d, struct draft_seq *s);
};

/* The level of drafts behind tokens that came up before, by how many of them agree. */
static inline uint32_t draft_level_of(uint32_t n_agreed)
{
    return n_agreed < 4 ? 0 : n_agreed < 8 ? 1 : n_agreed < 16 ? 2 : 3;
}

extern const struct drafter_ops drafter_given_ops, drafter_ngram_ops, drafter_suffix_ops,
    drafter_mtp_ops, drafter_model_ops;
/* For the table: one that is its config and no more, and one that does not observe. */
enum status drafter_create_plain(const struct draft_config *c, struct engine *e,
                                 struct drafter **out, struct err *err);
void drafter_free_plain(struct drafter *d);
/* Asks for the likeliest token behind `tokens`, which stay the caller's; a device keeps it at
 * kept_at. */
struct sample_request drafter_greedy(const int32_t *tokens, uint32_t kept_at);
/* What these requests choose from logits [n, n_vocab] of m, where no device does; 0 where no logit
 * is a number. chosen [n]: only the ids are set. */
void drafter_choose_on_host(const struct model *m, const float *logits, uint32_t n,
                            struct token_logprobs *chosen);
void drafter_observe_nothing(struct drafter *d, const struct batch *b,
                             const struct token_logprobs *chosen);
bool drafter_submit_nothing(struct drafter *d, const struct batch *b);

#endif
