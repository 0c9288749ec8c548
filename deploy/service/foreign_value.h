/* foreign_value.h - variables of PaddleNLP's service whose values are written otherwise than those
 * of the options that they stand for: MP_NUM counts the ranks of all hosts, USE_CACHE_KV_INT8 is a
 * switch, the SPECULATE_* are members of one JSON object.
 * For config.c only. Thread: main. */
#ifndef BATON_DEPLOY_SERVICE_FOREIGN_VALUE_H
#define BATON_DEPLOY_SERVICE_FOREIGN_VALUE_H

#include "shared/base/buf.h"
#include "shared/base/err.h"

/* Appends what `value` of a variable means for its option: as it is for any other variable, and
 * nothing where it asks for nothing. May read further variables of the same family. ERR_CONFIG
 * names the variable, its value and what would be right. */
enum status foreign_value(const char *name, const char *value, struct buf *out,
                          struct err *err) MUST_CHECK;

#endif
