/* node_model.h - a node's model: text side (tokenizer, chat template) and weights, loaded on a
 * worker thread. Owner: the node, until the engine takes `weights` (and sets it to NULL there).
 * Thread: load on any, then read-only. */
#ifndef BATON_DEPLOY_NODE_NODE_MODEL_H
#define BATON_DEPLOY_NODE_NODE_MODEL_H

#include "deploy/node/node_options.h"
#include "shared/model/model.h"
#include "shared/text/chat.h"
#include "shared/text/output/reasoning.h"
#include "shared/text/output/tool_parser.h"
#include "shared/text/tokenizer/tokenizer.h"

struct node_model {
    struct tokenizer *tokenizer;
    struct chat *chat;                        /* NULL: no template */
    const struct reasoning_format *reasoning; /* NULL: the model does not think aloud */
    const struct tool_format *tools;          /* NULL: it calls no tools, or in no known form */
    struct kernel_ctx *kernels;
    struct model *weights;
    struct model_generation generation;
    uint32_t n_vocab;
};

struct model_text;
/* The tokenizer of whatever vocabulary was found. A begin or end token that only it knows (files
 * that are nothing but a vocabulary name none) becomes the one that templates see: t->bos_text,
 * t->eos_text. */
enum status node_model_tokenizer(struct model_text *t, struct tokenizer **out,
                                 struct err *err) MUST_CHECK;
enum status node_model_load(struct node_model *m, const struct node_options *o,
                            struct err *err) MUST_CHECK;
/* Would its weights be found whole, and would they fit? Reads their headers alone. */
enum status node_model_check(const struct node_options *o, struct err *err) MUST_CHECK;
void node_model_release(struct node_model *m);
/* Takes all that steps will need beside the pool but their recordings, which need it; so that what
 * is left is the pool's. ERR_NOMEM. */
enum status node_model_prepare(struct model *m, const struct node_options *o,
                               struct err *err) MUST_CHECK;
/* How many KV blocks: --num-gpu-blocks-override, or what kv_bytes hold, or on a card what is left
 * of its share; at least one full context and, on the processor, at most what max_seqs full
 * contexts need. After node_model_prepare. ERR_CONFIG when the model's own limits cannot be met. */
enum status node_model_blocks(const struct model *m, const struct node_options *o,
                              uint32_t *n_blocks, struct err *err) MUST_CHECK;

#endif
