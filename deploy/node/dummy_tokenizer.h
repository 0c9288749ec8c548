/* dummy_tokenizer.h - a vocabulary for models of made-up weights whose folder has none. Thread:
 * any. */
#ifndef BATON_DEPLOY_NODE_DUMMY_TOKENIZER_H
#define BATON_DEPLOY_NODE_DUMMY_TOKENIZER_H

#include "shared/text/tokenizer/tokenizer.h"

/* Of as many tokens as config.json in `folder` says: the first 256 are bytes, which is what text is
 * cut into, and id N of the others is spelled "<N>". */
enum status dummy_tokenizer_create(const char *folder, struct tokenizer **out,
                                   struct err *err) MUST_CHECK;

#endif
