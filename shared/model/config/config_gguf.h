/* config_gguf.h - the configuration from GGUF metadata. Keys that would change the result and are
 * not understood are refused by name.
 *
 * Thread: any. */
#ifndef BATON_MODEL_CONFIG_CONFIG_GGUF_H
#define BATON_MODEL_CONFIG_CONFIG_GGUF_H

#include "shared/model/load/gguf.h"
#include "shared/model/model.h"

enum status config_gguf_parse(const struct gguf *g, struct model_config *out,
                              struct model_generation *out_gen, struct err *err) MUST_CHECK;

#endif
