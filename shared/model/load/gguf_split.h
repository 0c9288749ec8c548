/* gguf_split.h - models in several GGUF files, "NAME-00001-of-00003.gguf" and its kin: the first
 * has the metadata, tensors lie in all. Thread: that of gguf_open. */
#ifndef BATON_MODEL_LOAD_GGUF_SPLIT_H
#define BATON_MODEL_LOAD_GGUF_SPLIT_H

#include "shared/model/load/gguf.h"

/* The number of files that the name says the model has when `path` names the first of several;
 * otherwise 0. */
uint32_t gguf_split_count(struct str path);
/* Open the files behind `first`, which is the one at `path`, and list their tensors there. A model
 * in one file is left as it is. A fault leaves what was opened to gguf_close of `first`. */
enum status gguf_split_join(struct gguf *first, const char *path, struct err *err) MUST_CHECK;

#endif
