/* token_batcher.h - token records gathered per entry node, sent as one TOKENS frame per node and step.
 * Thread: loop. */
#ifndef BATON_DECODE_TOKEN_BATCHER_H
#define BATON_DECODE_TOKEN_BATCHER_H

#include "shared/cluster/cluster.h"

enum { EMIT_FRAME_BYTES = 1 << 20 }; /* a frame is sent early when it reaches this */

struct emit {
    struct cluster *cluster; /* borrowed */
    struct emit_target {
        uint64_t node;
        struct buf records;
    } * targets; /* [n]; kept between steps so that a steady load allocates nothing */
    size_t n, cap;
};

void emit_init(struct emit *e, struct cluster *cluster);
void emit_release(struct emit *e);
void emit_token(struct emit *e, uint64_t node, uint64_t request, uint32_t attempt, uint32_t index,
                const struct token_logprobs *t);
/* Send everything gathered for `node` (before a FINISHED that must come after the tokens), or for
 * all. */
void emit_flush_node(struct emit *e, uint64_t node);
void emit_flush(struct emit *e);
/* Forget a lost node. */
void emit_drop(struct emit *e, uint64_t node);

#endif
