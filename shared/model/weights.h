/* weights.h - the tensors of a model under one set of names, whatever the file format.
 *
 * Names are those of Hugging Face checkpoints ("model.layers.3.self_attn.q_proj.weight"); for a GGUF file they are translated,
 * for exports that drop or add a leading part ("language_model.model.") the prefix is found once. Every request states the
 * shape it expects; a fault names the tensor. Tensors that nobody asked for are reported by weights_check_all_used: a file with
 * more in it than the architecture knows is another model.
 * Life cycle: open, take matrices (borrowed) and vectors (copies) while binding, check, close. Thread: one. */
#ifndef BATON_MODEL_WEIGHTS_H
#define BATON_MODEL_WEIGHTS_H

#include "kernels/kernels.h"
#include "shared/base/map.h"
#include "shared/model/gguf.h"
#include "shared/model/safetensors.h"

enum { WEIGHTS_DIMS_MAX = 8 };

struct weights_tensor {
    struct str     name;      /* as the file spells it */
    const char    *type_name;
    int            dtype;     /* enum dtype, -1: no arithmetic for it */
    uint32_t       n_dims;
    uint64_t       shape[WEIGHTS_DIMS_MAX]; /* outermost first; the last is contiguous */
    const uint8_t *data;
    size_t         bytes;
    bool           used;
};

struct weights {
    struct weights_tensor *tensors; /* sorted by name */
    size_t                 n_tensors;
    size_t                 total_bytes, used_bytes; /* of tensor data: all, and taken so far */
    struct gguf           *gguf;                    /* NULL for a folder */
    struct safetensors_set set;
    struct map             by_name;
    const char            *prefix; /* put before Hugging Face names */
    bool                   drop_model; /* the leading "model." is missing in the file */
    void (*progress)(void *arg, double done); /* may be NULL; called as tensors are taken */
    void                  *progress_arg;
};

/* `path` is a folder with safetensors or a .gguf file. */
enum status weights_open(const char *path, struct weights **out, struct err *err) MUST_CHECK;
void        weights_close(struct weights *w);

bool        weights_has(const struct weights *w, const char *name);
/* The tensor, or NULL; marks it used. */
const struct weights_tensor *weights_take(struct weights *w, const char *name);
/* [n_out, n_in] in a type the kernels know. Data is borrowed until weights_close. */
enum status weights_matrix(struct weights *w, const char *name, size_t n_out, size_t n_in, struct weight_src *out, struct err *err) MUST_CHECK;
/* [n] converted to f32; *out is freed with mem_free. */
enum status weights_vector(struct weights *w, const char *name, size_t n, float **out, struct err *err) MUST_CHECK;
/* ERR_UNSUPPORTED naming the first tensor nobody took; tables that can be recomputed are passed over. */
enum status weights_check_all_used(const struct weights *w, struct err *err) MUST_CHECK;
/* Hash of every tensor's name, type, shape and a sample of its bytes. Two models that differ in a few values only in the
 * middle of large tensors can collide; a node is told its model by an operator, not by an attacker. */
uint64_t    weights_fingerprint(const struct weights *w, uint64_t seed);

#endif
