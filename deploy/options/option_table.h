/* option_table.h - the table of every option; config.h describes an entry. Thread: any
 * (constant). */
#ifndef BATON_DEPLOY_OPTIONS_OPTION_TABLE_H
#define BATON_DEPLOY_OPTIONS_OPTION_TABLE_H

#include "deploy/options/config.h"

extern const struct option OPTIONS[]; /* NULL name ends it */

#endif
