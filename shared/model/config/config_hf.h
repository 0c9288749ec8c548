/* config_hf.h - config.json and generation_config.json as Hugging Face writes them → the plain
 * structs of model.h.
 *
 * Different versions of transformers spell the same thing differently; all spellings known are read
 * (facts about each at the code). A member that would change the result and is not understood is
 * refused by name. Thread: any. */
#ifndef BATON_MODEL_CONFIG_CONFIG_HF_H
#define BATON_MODEL_CONFIG_CONFIG_HF_H

#include "shared/base/json/json.h"
#include "shared/model/model_registry.h"

/* Texts of the two files; `generation` may be empty. Outputs only on success. */
enum status config_hf_parse(struct str config, struct str generation, struct model_config *out,
                            struct model_generation *out_gen, struct err *err) MUST_CHECK;
/* Read both files of a folder and parse them. */
enum status config_hf_load(const char *folder, struct model_config *out,
                           struct model_generation *out_gen, struct err *err) MUST_CHECK;

/* ---- for the readers of the families ---- */

/* An absent member leaves *out alone; the second form is ERR_INVALID then. */
enum status config_hf_u32(const cJSON *o, const char *name, uint32_t min, uint32_t max,
                          uint32_t *out, struct err *err) MUST_CHECK;
enum status config_hf_need_u32(const cJSON *o, const char *name, uint32_t max, uint32_t *out,
                               struct err *err) MUST_CHECK;
/* Read a number, or the first element of a list (the text model's). Absent: *out is unchanged. */
enum status config_hf_first_i64(const cJSON *o, const char *name, int64_t min, int64_t max,
                                int64_t *out, struct err *err) MUST_CHECK;
/* Experts are scored by softmax in families that do not say how; ERR_UNSUPPORTED: the file asks for
 * another score. */
enum status config_hf_softmax_scores(const cJSON *o, struct err *err) MUST_CHECK;
/* One of `choices` (NULL-ended): its index; absent: *out is left alone. ERR_UNSUPPORTED lists
 * them. */
enum status config_hf_choice(const cJSON *o, const char *name, const char *const *choices, int *out,
                             struct err *err) MUST_CHECK;

/* ---- parts of the reader ---- */

/* Refuse what `family` does not understand and what no family does (config_refuse.c). */
enum status config_hf_refuse(const cJSON *o, const struct model_ops *family,
                             struct err *err) MUST_CHECK;
/* Sliding windows → c->window. */
enum status config_hf_window(const cJSON *o, const struct model_ops *family, struct model_config *c,
                             struct err *err) MUST_CHECK;
/* Theta and scaling of rotary positions (config_rope.c). */
enum status config_hf_rope(const cJSON *o, const struct model_ops *family, struct model_config *c,
                           struct err *err) MUST_CHECK;

#endif
