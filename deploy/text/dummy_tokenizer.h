/* dummy_tokenizer.h - a vocabulary for models with dummy weights whose folder has no tokenizer.
 * Thread: any. */
#ifndef BATON_DEPLOY_TEXT_DUMMY_TOKENIZER_H
#define BATON_DEPLOY_TEXT_DUMMY_TOKENIZER_H

#include "shared/text/tokenizer/tokenizer.h"

/* The vocabulary has as many tokens as config.json in `folder` says. The first 256 are bytes, and
 * all text is split into those; every other id N is spelled "<N>". */
enum status dummy_tokenizer_create(const char *folder, struct tokenizer **out,
                                   struct err *err) MUST_CHECK;

#endif
