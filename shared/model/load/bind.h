/* bind.h - binding: makes packed weights and buffers from the tensors in files, in two passes over
 * the same code.
 *
 * The first pass checks that every tensor exists with the right shape and type and adds up the
 * memory; it packs nothing. So an error, or too little memory, is known in milliseconds, before
 * minutes of packing. The second pass packs. Both passes call the functions below in the same
 * order; the first never writes to `to`.
 *
 * Thread: the loading one. */
#ifndef BATON_MODEL_LOAD_BIND_H
#define BATON_MODEL_LOAD_BIND_H

#include "shared/model/load/read_ahead.h"
#include "shared/model/load/weight_cache.h"
#include "shared/model/load/weights.h"
#include "shared/model/model.h"

enum bind_as {
    BIND_AS_STORED,
    BIND_QUANTIZED, /* as --quantization asks, if the stored type is a float */
    BIND_EXPERT,    /* likewise, for routed experts, which some families quantise further */
    BIND_F32        /* converted to f32: routers */
};

/* Memory that is handed out in order: the first pass adds up, the second takes from `at`. */
struct bind_arena {
    char *at;
    size_t bytes; /* so far */
};

/* Of the time that packing took. */
struct bind_times {
    uint64_t pack_ns, read_wait_ns, copy_wait_ns;
    uint64_t end_ns; /* in weight_ops.finish */
};

struct binder {
    struct model *m;
    struct kernel_ctx *kernels; /* what packs */
    struct err *err;
    bool packing;    /* second pass */
    bool converting; /* second pass: reads the files' elements; not when the weight cache is
                          * ready */
    /* First pass: each weight as it will be packed, in packing order. The caller frees it. */
    struct weight *plan; /* [n_plan] */
    size_t n_plan;
    /* First pass: where the matrices are in the files, in packing order. The caller frees it. */
    struct read_ahead_range *sources; /* [n_sources] */
    size_t n_sources;                 /* of this pass, so far */
    size_t source_bytes;
    struct read_ahead *ahead;   /* second pass; may be NULL */
    uint64_t pack_ns;           /* second pass: time in weight_ops.pack */
    struct weight_cache *cache; /* second pass; NULL: none */
    bool is_expert;          /* now binding a routed expert, which is not in `plan` and `cache` */
    struct weight last_plan; /* of the last weight */
    struct weight_arena *weight_arena;  /* second pass: memory for the weights; may be empty */
    size_t weight_bytes;                /* packed, of this pass so far */
    size_t weight_total;                /* second pass: weight_bytes of the whole first pass */
    struct bind_arena vectors, buffers; /* device memory: norms and biases; activations */
    struct bind_arena host;             /* host memory */
    size_t rounded_rows, rounded_in;    /* rows and width of the largest matmul input
                                         * (kernel_ctx_reserve) */
    bool (*progress)(void *arg, double done); /* of model_options; may be NULL */
    void *progress_arg;
};

/* Ends a second pass whose status is `st`: waits for its copies and its reading, and adds what it
 * took to `t`. Returns `st`, or why the end failed. */
enum status bind_end(struct binder *b, enum status st, struct bind_times *t) MUST_CHECK;
/* Sets the error of a load that its caller stopped; returns ERR_CANCELED. */
enum status bind_stopped(struct err *err);
/* Outputs that no cut of the matrix, packed as `as`, may separate: SHARE_UNIT, or F8_BLOCK where
 * blocks of them share scales. */
size_t bind_unit(const struct binder *b, const struct matrix_spec *spec, enum bind_as as);
/* Finds a matrix in the files, or its part (weights_matrix). In the second pass it waits until it
 * has been read. */
enum status bind_lookup(struct binder *b, const struct matrix_spec *spec,
                        struct weight_src *out) MUST_CHECK;
/* Finds and packs a matrix, or its part. *to stays as it is when the part is empty. */
enum status bind_matrix(struct binder *b, const struct matrix_spec *spec, enum bind_as as,
                        struct weight *to) MUST_CHECK;
/* Packs gate and up as one matrix, for MATMUL_SILU_MUL. Both have equal parts. */
enum status bind_pair(struct binder *b, const struct matrix_spec *gate,
                      const struct matrix_spec *up, enum bind_as as, struct weight *to) MUST_CHECK;
/* Packs a matrix, or a part of one, that the caller found with bind_lookup. */
enum status bind_source(struct binder *b, const struct weight_src *src, const char *what,
                        struct weight *to) MUST_CHECK;
/* Copies the vector "<prefix><name>" as [n] f32 to device memory, which the decoder owns. */
enum status bind_vector(struct binder *b, const char *prefix, const char *name, size_t n,
                        float **to) MUST_CHECK;
/* Of a vector of n elements copies the part: [part.n]. */
enum status bind_vector_part(struct binder *b, const char *prefix, const char *name, size_t n,
                             struct share_part part, float **to) MUST_CHECK;
/* Copies the parts of two vectors one after the other: [2 part.n]. */
enum status bind_vector_pair(struct binder *b, const char *prefix, const char *first,
                             const char *second, size_t n, struct share_part part,
                             float **to) MUST_CHECK;
/* As bind_vector_part, but leaves *to alone (NULL) when the file has no such vector. */
enum status bind_vector_if_present(struct binder *b, const char *prefix, const char *name, size_t n,
                                   struct share_part part, float **to) MUST_CHECK;
/* Takes n_rows rows of `width` elements of device memory, zeroed and aligned to a cache line. The
 * decoder owns it. */
void bind_floats(struct binder *b, size_t n_rows, size_t width, float **to);
void bind_ints(struct binder *b, size_t n_rows, size_t width, int32_t **to);
/* Likewise n elements of host memory. */
void *bind_host(struct binder *b, size_t n, size_t element);
/* Announces a matmul call with an input of [n_rows, n_in], for kernel_ctx_reserve. */
void bind_reserve(struct binder *b, size_t n_rows, size_t n_in);

/* Returns a copy of `src` as f32 or bf16 [n_out, n_in], for mem_free. NULL: no memory. */
void *bind_plain_copy(struct kernel_ctx *k, const struct weight_src *src, enum dtype type);

#endif
