/* gguf_split.h - models in several GGUF files, "NAME-00001-of-00003.gguf" and so on: the first file
 * has the metadata, all have tensors.
 *
 * Thread: the one that calls gguf_open. */
#ifndef BATON_MODEL_LOAD_GGUF_SPLIT_H
#define BATON_MODEL_LOAD_GGUF_SPLIT_H

#include "shared/model/load/gguf.h"

/* The number of files of the model, if `path` names the first of several; else 0. */
uint32_t gguf_split_count(struct str path);
/* Opens the files after `first`, which is the file at `path`, and adds their tensors to it. Does
 * nothing for a model in one file. After an error gguf_close(first) closes what was opened. */
enum status gguf_split_join(struct gguf *first, const char *path, struct err *err) MUST_CHECK;

#endif
