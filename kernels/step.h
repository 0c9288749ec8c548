/* step.h - one step of the engine as a backend sees it: its rows and sequences, the submission of
 * its work, CUDA graphs, and the tokens that the device samples.
 *
 * The calls of a step, in order:
 *   upload      the step's rows and sequences go to the device; a captured graph may be chosen
 *   (compute)   the ops of kernels.h, unless a graph contains them (kernel_step.graph_launched)
 *   submit      launches the graph, if there is one
 *   sample      if kernel_step.sampled: the device chooses the tokens
 *   fetch       waits for the chosen tokens; the next step may have been submitted meanwhile
 * A backend that computes in place (the CPU's) has finished when an op returns: it captures and
 * samples nothing.
 * Thread: engine. No call allocates once `prepare` has returned. */
#ifndef BATON_KERNELS_STEP_H
#define BATON_KERNELS_STEP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shared/base/err.h"
#include "shared/base/sampling.h"

struct kernel_ctx;

/* Query rows of one sequence in a step. */
struct attn_seq {
    int32_t q_begin; /* its first row in q and out */
    int32_t n_q;     /* its rows; row i has position pos_begin + i and sees keys 0..pos_begin + i */
    int32_t pos_begin;
    const int32_t *block_table; /* physical KV blocks, enough for pos_begin + n_most + n_q tokens;
                                 * host */
    bool is_decode;             /* chooses the decode kernels of a GPU, and MLA's absorbed path */
    uint32_t move;  /* 1 + i: it begins later by the i-th move of the step; 0: it does not */
    int32_t n_most; /* by as many positions at most */
};

/* Sequences that one call of kv_append or attention works on; their rows are contiguous in q and
 * out. */
struct attn_list {
    const struct attn_seq *seqs; /* [n_seqs], host memory */
    int32_t n_seqs;
    const void *uploaded; /* the backend's own copy, made by `upload` */
};

/* What a step computes: each is captured for itself. */
enum kernel_program {
    KERNEL_STEP,         /* the model */
    KERNEL_PASS,         /* its draft layer, behind a step */
    KERNEL_CHAINED_PASS, /* the layer again, behind a pass: one row of a sequence at most */
    KERNEL_PROGRAMS
};

/* What is not known when a step or a pass is submitted behind a step that verifies drafts: how many
 * of these are right. The device counts them when it has chosen that step's tokens, keeps the
 * numbers of the last step of each parity by its rows of logits (kernel_step.parity, a sequence's
 * first one), and moves the rows of a sequence by them. Numbers are named 1 + (parity * max_logits
 * + row of logits); 0: none, nothing moves. */
struct kernel_move {
    int32_t row, n_rows; /* of the sequence */
    uint32_t by[2];      /* its positions begin as many later as both numbers together */
    uint32_t id;         /* the first row's kept token is as many later */
    uint32_t from;       /* the first row begins with the hidden state of as many rows later */
    uint32_t logit_by;   /* the row of its row of logits `logit` is as many later; 0: `logit` means
                          * nothing */
    int32_t logit;
};

/* Tokens that only the device knows, behind those that the host does. */
struct sample_future {
    uint32_t n_chosen; /* kept tokens from first_chosen on, */
    uint32_t after;    /* and as many more as drafts were right: as in kernel_move */
    int32_t first_chosen;
    uint32_t n_drafts; /* then kept tokens from first_draft on, draft_stride apart */
    int32_t first_draft, draft_stride;
};

enum { SAMPLE_FUTURE_MAX = 32 }; /* of these, in all */

/* How the token that follows a row is chosen, or which token is scored there. These are the inputs
 * of the rules in shared/engine/sampler.h. */
struct sample_request {
    const struct sampling_params *params;
    const int32_t *tokens; /* [n_tokens] prompt, then the output that the host knows */
    uint32_t n_tokens, n_prompt;
    uint32_t n_out; /* output tokens before this one, those only the device knows included, but not
                     * drafts that are not known to be right */
    struct sample_future future;
    const int32_t *eos; /* [n_eos] the model's end tokens */
    uint32_t n_eos;
    int32_t score;     /* return the logprobs of this token; -1: choose one */
    int32_t kept_at;   /* the chosen token is kept there (kernel_step) */
    uint32_t n_verify; /* the next so many rows of logits are of drafts behind this row: the device
                        * counts how many are right */
};

/* The rows of a step, or of a pass behind it, which is submitted and sampled as one. The device
 * keeps the tokens that were chosen last, for the inputs of what follows: kernel_limits.max_logits
 * of the last step's, and as many of the i-th pass, i = 1 .. kernel_limits.n_passes. `upload`
 * redirects the pointers to the backend's memory and may pad the counts to the size of a captured
 * graph. Padding rows reach neither the KV pool nor the results. */
struct kernel_step {
    enum kernel_program program;
    int32_t n_rows, n_logits, n_lists;
    const int32_t *ids;        /* [n_rows]; -1 - i: the i-th kept token (below) */
    const int32_t *pos;        /* [n_rows] */
    const int32_t *logit_rows; /* [n_logits] */
    const int32_t
        *from_rows;          /* [n_rows] a pass: the rows whose hidden states its rows begin with */
    struct attn_list *lists; /* [n_lists] */
    int32_t block_tokens;    /* of the KV pool that the block tables refer to */
    const struct sample_request *sample_requests; /* [n_logits] for sampling on the device; NULL:
                                                   * the caller downloads the logits */
    int parity; /* 0 or 1: which of two result buffers; its last results were fetched. A
                          * pass: of the step before it */
    int32_t first_kept, n_kept;      /* a pass: where tokens that it chooses are kept */
    const struct kernel_move *moves; /* [n_moves], host memory */
    int32_t n_moves;
    int32_t least_rows;  /* of a graph that may be used: what its ops exchange with other ranks is
                          * sized by its rows, and theirs may be more. 0: any */
    bool eager;          /* the caller acts between layers: use no graph */
    bool sampled;        /* out: the device samples: call `sample` after `submit`, `fetch` later */
    bool graph_launched; /* out: a graph contains the whole step: call no op but `submit` */
    const int32_t *n_real; /* out, in the device's memory: of a graph, how many of n_rows the
                            * replayed step has; NULL: all */
};

/* Upper bounds of all steps; memory is sized by them. */
struct kernel_limits {
    uint32_t max_rows, max_logits, max_len, n_vocab, block_tokens;
    uint32_t max_seqs;       /* sequences in a step */
    uint32_t n_lists;        /* lists of a step that may be captured */
    uint32_t max_lists;      /* lists of any step */
    uint32_t n_heads, v_dim; /* of attention's output */
    bool latent;
    uint32_t n_kv_heads, head_dim; /* of the KV pool */
    uint32_t n_passes;             /* behind a step, at most */
    /* Rows of the largest captured step, and pass; 0: capture none. */
    uint32_t max_graph_rows, max_pass_graph_rows;
};

struct step_ops {
    /* Allocates for all steps within the limits. Before the first step; may be called again with
     * other limits. ERR_NOMEM. */
    enum status (*prepare)(struct kernel_ctx *c, const struct kernel_limits *l, struct err *err);
    /* Uploads the step: fills in `s` as described there. Its sequences and their block tables stay
     * borrowed until the step has completed. Valid until the next call. */
    void (*upload)(struct kernel_ctx *c, struct kernel_step *s);
    /* Begins to capture the i-th graph: fills in `s` as upload does. The caller then calls all ops
     * of the program and `submit`. False: there is no i-th graph. */
    bool (*begin_capture)(struct kernel_ctx *c, int32_t i, struct kernel_step *s);
    /* Drops all graphs, once the device's work is done. From now on steps of up to max_rows and
     * passes of up to max_pass_rows are captured, by begin_capture from 0 on; 0: none. */
    void (*drop_graphs)(struct kernel_ctx *c, uint32_t max_rows, uint32_t max_pass_rows);
    /* All ops of the step have been called, or of the capture, which ends here. */
    void (*submit)(struct kernel_ctx *c);
    /* Chooses the tokens of the submitted step from its logits [n_logits, n_vocab] on the device.
     * Only after an upload that set `sampled`. */
    void (*sample)(struct kernel_ctx *c, const float *logits, size_t n_vocab);
    /* Has the device come to the end of the sampled step of that parity and of all passes that were
     * submitted behind it, or failed? */
    bool (*is_sampled)(struct kernel_ctx *c, int parity);
    /* Waits for the sampled step of that parity and copies its n results. */
    void (*fetch)(struct kernel_ctx *c, int parity, struct token_logprobs *out, size_t n);
    /* Waits for the sampled passes behind the step of that parity. Returns the tokens that they
     * chose, in the order in which they are kept, and as long; valid until the next pass of that
     * parity is sampled. */
    const int32_t *(*fetch_passes)(struct kernel_ctx *c, int parity);
};

#endif
