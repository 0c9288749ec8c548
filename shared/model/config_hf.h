/* config_hf.h - config.json and generation_config.json as Hugging Face writes them → the plain structs of model.h.
 *
 * Different versions of transformers spell the same thing differently; all spellings known are read (facts about each at the
 * code). A member that would change the result and is not understood is refused by name. Thread: any. */
#ifndef BATON_MODEL_CONFIG_HF_H
#define BATON_MODEL_CONFIG_HF_H

#include "shared/model/model.h"

/* Texts of the two files; `generation` may be empty. Outputs only on success. */
enum status config_hf_parse(struct str config, struct str generation, struct model_config *out, struct model_generation *out_gen,
                            struct err *err) MUST_CHECK;
/* Read both files of a folder and parse them. */
enum status config_hf_load(const char *folder, struct model_config *out, struct model_generation *out_gen, struct err *err) MUST_CHECK;

#endif
