/* options.h - the one table of every option (shared/base/config.h says what a row holds). Thread: any (constant). */
#ifndef BATON_DEPLOY_CLI_OPTIONS_H
#define BATON_DEPLOY_CLI_OPTIONS_H

#include "shared/base/config.h"

extern const struct option OPTIONS[]; /* NULL name ends it */

#endif
