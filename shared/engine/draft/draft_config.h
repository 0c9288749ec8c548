/* draft_config.h - reads how to draft, from the JSON of --speculative-config.
 *
 * The members are those of vLLM, some also under FastDeploy's names; all but `method` have a
 * default (docs/speculation.md). Thread: any. */
#ifndef BATON_ENGINE_DRAFT_DRAFT_CONFIG_H
#define BATON_ENGINE_DRAFT_DRAFT_CONFIG_H

#include "shared/base/buf.h"
#include "shared/engine/draft/draft.h"

/* Parses a configuration; *out is written only on success. Appends a sentence with a newline to
 * `notes` for each member that has no effect. ERR_FORMAT: it is no JSON. Other errors name the
 * member at fault, its value, and what would be right. */
enum status draft_config_parse(struct str text, struct draft_config *out, struct buf *notes,
                               struct err *err) MUST_CHECK;

/* The i-th drafter that a configuration can name; NULL: no more. */
const struct drafter_ops *drafter_at(uint32_t i);

#endif
