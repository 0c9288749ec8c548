/* draft_options.h - the options of speculative decoding: --speculative-config, or the flags by
 * which SGLang and llama.cpp say the same. Thread: main, at start. */
#ifndef BATON_DEPLOY_DRAFT_DRAFT_OPTIONS_H
#define BATON_DEPLOY_DRAFT_DRAFT_OPTIONS_H

#include "deploy/options/config.h"
#include "shared/engine/draft/draft_config.h"

/* Appends lines to `notes` about what has no effect. Without the options `out` drafts nothing. */
enum status draft_options_read(const struct config *c, struct draft_config *out, struct buf *notes,
                               struct err *err) MUST_CHECK;

/* That model drafts from now on, in a configuration that draft_options_read took. */
enum status draft_options_set_model(struct config *c, const char *path, struct err *err) MUST_CHECK;

/* The option that says it, for people. */
const char *draft_options_source(const struct config *c);

#endif
