/* weights.h - the tensors of a model under one set of names (tensor_names.h), whatever the file
 * format.
 *
 * A prefix that an export adds to names or drops ("language_model.model.") is found once. Every
 * request states the shape it expects; an error names the tensor. Tensors that nobody requested are
 * an error of weights_check_all_used: a file with more tensors than the architecture has is another
 * model. What other ranks hold is requested as an empty part. With dummy weights (--load-format
 * dummy) exactly the requested tensors exist.
 * Life cycle: open, set the family, take matrices (borrowed) and vectors (copies), check, close.
 * Thread: one. */
#ifndef BATON_MODEL_LOAD_WEIGHTS_H
#define BATON_MODEL_LOAD_WEIGHTS_H

#include "kernels/backend.h"
#include "shared/base/map.h"
#include "shared/model/load/gguf.h"
#include "shared/model/load/safetensors.h"
#include "shared/model/load/tensor_names.h"
#include "shared/model/share.h"

enum { WEIGHTS_DIMS_MAX = 8 };

struct weights_tensor {
    struct str name; /* as the file spells it */
    const char *type_name;
    int dtype; /* enum dtype; -1: not supported */
    uint32_t n_dims;
    uint64_t shape[WEIGHTS_DIMS_MAX]; /* outermost first; the last is contiguous */
    const uint8_t *data;
    size_t bytes;
    bool used; /* this rank or another has it: nothing is unknown about it */
};

struct weights {
    struct weights_tensor *tensors; /* sorted by name */
    size_t n_tensors;
    struct gguf *gguf; /* NULL for a folder */
    struct safetensors_set set;
    struct map by_name;
    struct tensor_names names;
    bool dummy;        /* no files and no `tensors` */
    uint32_t n_layers; /* of dummy weights: set before matrices are taken */
};

/* A matrix, by the places where files may have it:
 *   <prefix><leaf>.weight                       a tensor of its own
 *   <prefix><whole>.weight                      rows [first, first + n_out) of a tensor of `total`
 *                                               rows
 * and where n_experts > 0, for expert i
 *   <prefix><i>.<leaf>.weight, <prefix><i>.<whole>.weight
 *   <prefix><leaf>, <prefix><whole>             matrix i of a stack of n_experts
 * Shapes are those of the whole matrix; `part` says which of its outputs are wanted. An empty part
 * makes the matrix known: it is looked for and checked, and none of its data is touched. */
struct matrix_spec {
    const char *prefix, *leaf;
    const char *whole; /* NULL: never part of a larger tensor */
    size_t n_out, n_in;
    size_t first, total; /* with `whole` */
    uint32_t i_expert, n_experts;
    bool is_table;                 /* an embedding, which no file transposes */
    const struct share_part *part; /* of the n_out outputs; NULL: all */
};

static inline struct share_part matrix_part(const struct matrix_spec *spec)
{
    return spec->part ? *spec->part : (struct share_part){ 0, spec->n_out };
}

/* `path` is a folder with safetensors or a .gguf file. */
enum status weights_open(const char *path, struct weights **out, struct err *err) MUST_CHECK;
/* Dummy weights: fixed pseudo-random numbers, the same on every node and device. */
void weights_create_dummy(struct weights **out);
void weights_close(struct weights *w);
/* Takes the pages that were read out of this process's memory; they stay readable. */
void weights_unload_pages(const struct weights *w);

/* Returns the tensor or NULL. weights_take also marks it used. */
const struct weights_tensor *weights_find(const struct weights *w, const char *name);
const struct weights_tensor *weights_take(struct weights *w, const char *name);
/* Is the matrix in the file, at any of its places? */
bool weights_has_matrix(const struct weights *w, const struct matrix_spec *spec);
/* The type of the matrix's elements in the file; -1: there is no such matrix, or its type is not
 * supported. */
int weights_matrix_dtype(const struct weights *w, const struct matrix_spec *spec);
/* Finds a matrix, or the part of it that is asked for. Its data is borrowed until weights_close;
 * the caller frees out->scales (f8 only, else NULL) with mem_free. A part of an f8 matrix begins
 * and ends between blocks of F8_BLOCK rows. */
enum status weights_matrix(struct weights *w, const struct matrix_spec *spec,
                           struct weight_src *out, struct err *err) MUST_CHECK;
/* Copies a vector [n] (or [1, n]) as f32; the caller frees *out with mem_free. */
enum status weights_vector(struct weights *w, const char *name, size_t n, float **out,
                           struct err *err) MUST_CHECK;
/* ERR_UNSUPPORTED names the first tensor that nobody took. Tables that can be recomputed and draft
 * models do not count. */
enum status weights_check_all_used(const struct weights *w, const struct model_ops *ops,
                                   const struct model_config *c, struct err *err) MUST_CHECK;
/* Hash of every tensor's name, type, shape and a sample of its bytes. Models that differ only in a
 * few values in the middle of large tensors can collide; a node gets its model from an operator,
 * not from an attacker. Of dummy weights: the letters "DUMM", then 32 bits of a hash. */
uint64_t weights_fingerprint(const struct weights *w, uint64_t seed);
/* Hash of the files' sizes and modification times: changes when any file is written to. */
uint64_t weights_files_state(const struct weights *w);

/* ---- weights_dummy.c: the same for dummy weights ---- */

void weights_dummy_matrix(const struct weights *w, const struct matrix_spec *spec,
                          struct weight_src *out);
void weights_dummy_vector(const char *name, size_t n, float **out);
uint64_t weights_dummy_fingerprint(uint64_t seed);

#endif
