/* option_table.h - the one table of every option (deploy/options/config.h says what a row holds).
 * Thread: any (constant). */
#ifndef BATON_DEPLOY_OPTIONS_OPTION_TABLE_H
#define BATON_DEPLOY_OPTIONS_OPTION_TABLE_H

#include "deploy/options/config.h"

extern const struct option OPTIONS[]; /* NULL name ends it */

#endif
