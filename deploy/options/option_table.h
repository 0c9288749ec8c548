/* option_table.h - every option of every command; config.h describes an entry. Thread: any
 * (constant). */
#ifndef BATON_DEPLOY_OPTIONS_OPTION_TABLE_H
#define BATON_DEPLOY_OPTIONS_OPTION_TABLE_H

#include "deploy/options/config.h"

extern const struct option *const OPTIONS[]; /* as config_create takes it */

#endif
