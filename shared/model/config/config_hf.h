/* config_hf.h - the configuration from Hugging Face's config.json and generation_config.json.
 *
 * Versions of transformers spell the same thing differently; all known spellings are read. A member
 * that would change the result and is not understood is refused by name.
 *
 * Thread: any. */
#ifndef BATON_MODEL_CONFIG_CONFIG_HF_H
#define BATON_MODEL_CONFIG_CONFIG_HF_H

#include "shared/base/json/json.h"
#include "shared/model/model_registry.h"

/* Parses the texts of the two files; `generation` may be empty. Writes outputs only on success. */
enum status config_hf_parse(struct str config, struct str generation, struct model_config *out,
                            struct model_generation *out_gen, struct err *err) MUST_CHECK;
/* Reads and parses both files of a folder. */
enum status config_hf_load(const char *folder, struct model_config *out,
                           struct model_generation *out_gen, struct err *err) MUST_CHECK;

/* ---- for families/ ---- */

/* An absent member leaves *out alone; in config_hf_need_u32 it is ERR_INVALID. */
enum status config_hf_u32(const cJSON *o, const char *name, uint32_t min, uint32_t max,
                          uint32_t *out, struct err *err) MUST_CHECK;
enum status config_hf_need_u32(const cJSON *o, const char *name, uint32_t max, uint32_t *out,
                               struct err *err) MUST_CHECK;
/* Reads a number, or the first element of a list (the text model's). Absent: *out is unchanged. */
enum status config_hf_first_i64(const cJSON *o, const char *name, int64_t min, int64_t max,
                                int64_t *out, struct err *err) MUST_CHECK;
/* Accepts softmax scores of experts, the default, only. ERR_UNSUPPORTED: the file asks for another
 * score. */
enum status config_hf_softmax_scores(const cJSON *o, struct err *err) MUST_CHECK;
/* Reads a string and sets *out to its index in `choices` (NULL-ended). Absent: *out is unchanged.
 * ERR_UNSUPPORTED lists the choices. */
enum status config_hf_choice(const cJSON *o, const char *name, const char *const *choices, int *out,
                             struct err *err) MUST_CHECK;

/* ---- for config_hf.c ---- */

/* Refuses members that `family`, or no family, understands (config_refuse.c). */
enum status config_hf_refuse(const cJSON *o, const struct model_ops *family,
                             struct err *err) MUST_CHECK;
/* Reads sliding windows into c->window. */
enum status config_hf_window(const cJSON *o, const struct model_ops *family, struct model_config *c,
                             struct err *err) MUST_CHECK;
/* Reads theta and scaling of RoPE (config_rope.c). */
enum status config_hf_rope(const cJSON *o, const struct model_ops *family, struct model_config *c,
                           struct err *err) MUST_CHECK;

#endif
