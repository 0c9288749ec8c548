/* config_check.h - what both configuration readers share: limits that hold for every architecture.
 *
 * Thread: any. */
#ifndef BATON_MODEL_CONFIG_CONFIG_CHECK_H
#define BATON_MODEL_CONFIG_CONFIG_CHECK_H

#include "shared/model/model.h"

/* Upper bounds far above any released model; they keep products of sizes within 64 bits. */
enum {
    CONFIG_LAYERS_MAX = MODEL_LAYERS_MAX,
    CONFIG_HEADS_MAX = 4096,
    CONFIG_WIDTH_MAX = 1 << 20,
    CONFIG_VOCAB_MAX = 1 << 24,
    CONFIG_POSITIONS_MAX = 1 << 26
};

/* Checks that heads divide, the head size fits the kernels and ids are in the vocabulary.
 * err->field has the config.json spelling. */
enum status config_check(const struct model_config *c, struct err *err) MUST_CHECK;
/* Adds an end-of-sequence id unless it is there. ERR_INVALID: the table is full or the id
 * negative. */
enum status config_add_eos(struct model_config *c, int64_t id, struct err *err) MUST_CHECK;
/* Extends max_position to factor times the original positions: files that were given YaRN later
 * keep the old "max_position_embeddings". */
void config_extend_positions(struct model_config *c);
/* Marks a layer as one with experts. */
void config_set_sparse(struct model_config *c, uint32_t i_layer);
/* All values "not given". */
struct model_generation config_no_generation(void);

#endif
