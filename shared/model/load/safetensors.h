/* safetensors.h - reader of safetensors files: one file, or shards with
 * model.safetensors.index.json.
 *
 * Files are untrusted. A file is accepted only when its header is a JSON object without duplicate
 * names, every tensor's byte range equals its shape times its type, and the ranges tile the buffer
 * without hole or overlap. Tensor data is borrowed from the mapping until close; it may be
 * unaligned.
 *
 * Thread: any for open; read-only afterwards. */
#ifndef BATON_MODEL_LOAD_SAFETENSORS_H
#define BATON_MODEL_LOAD_SAFETENSORS_H

#include "kernels/dtype.h"
#include "shared/base/map.h"
#include "shared/base/mem.h"
#include "shared/model/load/file_map.h"

enum { SAFETENSORS_DIMS_MAX = 8 };

struct safetensors_tensor {
    const char *name;
    const char *type_name; /* as the file spells it: "BF16" */
    int dtype;             /* enum dtype; -1: not supported */
    uint32_t n_dims;       /* 0: a scalar */
    uint64_t shape[SAFETENSORS_DIMS_MAX];
    const uint8_t *data;
    size_t bytes;
};

/* One file. */
struct safetensors {
    struct safetensors_tensor *tensors;
    size_t n_tensors;
    struct map by_name;
    struct arena arena; /* private, as below: names and table */
    struct file_map file;
};

/* Parses `bytes`, which are borrowed until safetensors_close. */
enum status safetensors_parse(struct str bytes, struct safetensors **out,
                              struct err *err) MUST_CHECK;
void safetensors_close(struct safetensors *s);

/* All tensors of a folder. */
struct safetensors_set {
    struct safetensors **files;
    size_t n_files;
    const struct safetensors_tensor **tensors; /* of the index, or of the single file */
    size_t n_tensors;
};

enum status safetensors_set_open(const char *folder, struct safetensors_set *out,
                                 struct err *err) MUST_CHECK;
void safetensors_set_close(struct safetensors_set *s);

#endif
