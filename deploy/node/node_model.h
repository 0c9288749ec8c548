/* node_model.h - a node's model: tokenizer, chat template and weights, loaded on a worker thread.
 *
 * Owner: the node, until the engine takes `weights` and sets the member to NULL.
 * Thread: any during the load; read-only afterwards. */
#ifndef BATON_DEPLOY_NODE_NODE_MODEL_H
#define BATON_DEPLOY_NODE_NODE_MODEL_H

#include <stdatomic.h>

#include "deploy/node/node_options.h"
#include "shared/model/model.h"
#include "shared/text/chat.h"
#include "shared/text/output/reasoning.h"
#include "shared/text/output/tool_parser.h"
#include "shared/text/tokenizer/tokenizer.h"

struct node_model {
    struct tokenizer *tokenizer;
    struct chat *chat;                        /* NULL: no template */
    const struct reasoning_format *reasoning; /* NULL: no reasoning output */
    const struct tool_format *tools;          /* NULL: no tool calls, or an unknown format */
    struct kernel_ctx *kernels;
    struct model *weights;
    struct model *draft; /* of --speculative-config, method draft; stays here; NULL: none */
    struct kernel_ctx *draft_kernels; /* its own, on a GPU; NULL: it has none */
    struct model_generation generation;
    uint32_t n_vocab;
    uint64_t text;         /* a hash of the vocabulary: node_record.text */
    uint32_t max_position; /* of node_model_load_text: the longest context */
};

struct model_text;
/* Builds the tokenizer from the vocabulary that was found. Sets t->bos_text and t->eos_text, which
 * templates see, when the model's files name no such tokens but the tokenizer knows them. */
enum status node_model_tokenizer(struct model_text *t, struct tokenizer **out,
                                 struct err *err) MUST_CHECK;
/* Reads the model's configuration alone. */
enum status node_model_config(const char *path, struct model_config *out,
                              struct model_generation *generation, struct err *err) MUST_CHECK;
/* As node_model_load, without kernels and weights. */
enum status node_model_load_text(struct node_model *m, const struct node_options *o,
                                 struct err *err) MUST_CHECK;
/* ERR_CANCELED: *stop became true. */
enum status node_model_load(struct node_model *m, const struct node_options *o,
                            const atomic_bool *stop, struct err *err) MUST_CHECK;
/* Checks that the weights are complete and would fit in memory; reads only their headers. */
enum status node_model_check(const struct node_options *o, struct err *err) MUST_CHECK;
void node_model_release(struct node_model *m);
/* Allocates all that steps need except the KV pool and the CUDA graphs (these need the pool), so
 * that the memory left over can go to the pool. ERR_NOMEM. */
enum status node_model_prepare(struct model *m, const struct node_options *o,
                               struct err *err) MUST_CHECK;
/* Number of KV blocks before they are held against the memory: n_blocks (--num-gpu-blocks-override)
 * and kv_bytes (--kv-cache-memory) as given, 0: not; else what fits into `room` bytes, up to
 * `most`. */
uint64_t node_model_kv_blocks(uint64_t n_blocks, uint64_t kv_bytes, uint64_t room,
                              uint64_t block_bytes, uint64_t most);
/* Number of KV blocks, of the model and of one that drafts (or NULL): --num-gpu-blocks-override, or
 * what kv_bytes holds, or on a GPU what is left of its memory share.
 * At least one full context; on the CPU at most max_seqs full contexts. Call after
 * node_model_prepare. ERR_CONFIG when the model's own limits cannot be met. */
enum status node_model_blocks(const struct model *m, const struct model *draft,
                              const struct node_options *o, uint32_t *n_blocks,
                              struct err *err) MUST_CHECK;

#endif
