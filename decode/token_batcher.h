/* token_batcher.h - collects token records per entry node and sends one TOKENS frame per node and
 * step. Thread: loop. */
#ifndef BATON_DECODE_TOKEN_BATCHER_H
#define BATON_DECODE_TOKEN_BATCHER_H

#include "shared/cluster/cluster.h"

enum { TOKEN_BATCH_BYTES = 1 << 20 }; /* a frame is sent early when it reaches this */

struct token_batcher {
    struct cluster *cluster; /* borrowed */
    struct token_batch {
        uint64_t node;
        struct buf records;
    } * batches; /* [n]; kept between steps so that a steady load allocates nothing */
    size_t n, cap;
};

void token_batcher_init(struct token_batcher *e, struct cluster *cluster);
void token_batcher_release(struct token_batcher *e);
void token_batcher_add(struct token_batcher *e, uint64_t node, uint64_t request, uint32_t attempt,
                       uint32_t index, const struct token_logprobs *t);
/* Sends what was collected for `node` (before a message that must come after the tokens), or for
 * all nodes. */
void token_batcher_flush_node(struct token_batcher *e, uint64_t node);
void token_batcher_flush(struct token_batcher *e);
/* Drops the records of a lost node. */
void token_batcher_drop_node(struct token_batcher *e, uint64_t node);

#endif
