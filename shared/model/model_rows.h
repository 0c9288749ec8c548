/* model_rows.h - the registry of architectures: which row serves a name. Thread: any (constants). */
#ifndef BATON_MODEL_MODEL_ROWS_H
#define BATON_MODEL_MODEL_ROWS_H

#include "shared/model/model.h"

extern const struct model_ops model_llama_ops;

/* The row that lists `arch`; otherwise NULL, and *err (required) lists every name there is. */
const struct model_ops *model_row_find(const char *arch, struct err *err);

#endif
