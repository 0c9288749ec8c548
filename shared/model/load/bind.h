/* bind.h - binding: from tensors in files to packed weights and buffers, in two passes over the
 * same code.
 *
 * The first pass checks that every tensor is there with the right shape and type and adds up what
 * all of it will take; nothing is packed. So a fault, or too little memory, is known in
 * milliseconds, before minutes of packing. The second pass packs. Blocks are bound by calling the
 * functions below in both passes alike; where to, is left alone in the first. Thread: the loading
 * one. */
#ifndef BATON_MODEL_LOAD_BIND_H
#define BATON_MODEL_LOAD_BIND_H

#include "shared/model/load/read_ahead.h"
#include "shared/model/load/weight_cache.h"
#include "shared/model/load/weights.h"
#include "shared/model/model.h"

enum bind_as {
    BIND_AS_STORED,
    BIND_QUANTIZED, /* as --quantization asks, where the stored type is a plain one */
    BIND_EXPERT,    /* the same for routed experts, which some families quantise further */
    BIND_F32        /* converted: routers */
};

/* Memory that is handed out piece by piece: the first pass adds up, the second gives from `at`. */
struct bind_arena {
    char *at;
    size_t bytes; /* so far */
};

struct binder {
    struct model *m;
    struct err *err;
    bool packing;        /* second pass */
    bool converting;     /* ... which looks at the files' elements: not where a packed copy
                          * has them all */
    struct weight *plan; /* first pass: [n_plan] what each weight will be, in the order of
                          * packing; the caller's (mem_free) */
    size_t n_plan;
    struct read_ahead_range *sources; /* first pass: [n_sources] where files hold the matrices, in
                                       * the order in which they are taken; the caller's */
    size_t n_sources;                 /* of this pass, so far */
    size_t source_bytes;
    struct read_ahead *ahead;           /* second pass: who reads them; may be NULL */
    uint64_t pack_ns;                   /* second pass: in weight_pack */
    struct weight_cache *cache;         /* second pass: the copy on disk; NULL: none */
    struct weight_arena *weight_arena;  /* second pass: memory for the weights; may be empty */
    size_t weight_bytes;                /* packed sizes this pass came by */
    size_t weight_total;                /* second pass: what the first came by */
    struct bind_arena vectors, buffers; /* norms and biases; activations of a step: both in the
                                         * device's memory */
    struct bind_arena host;             /* what the host alone reads and writes */
    size_t rounded_rows, rounded_in;    /* the largest input of a matmul call
                                         * (kernel_ctx_reserve): rows times width */
    void (*progress)(void *arg, double done); /* may be NULL */
    void *progress_arg;
};

/* The matrix as files have it (weights_matrix); in the second pass it has been read. */
enum status bind_lookup(struct binder *b, const struct matrix_spec *spec,
                        struct weight_src *out) MUST_CHECK;
enum status bind_matrix(struct binder *b, const struct matrix_spec *spec, enum bind_as as,
                        struct weight *to) MUST_CHECK;
/* Gate and up, for MATMUL_SILU_MUL. */
enum status bind_pair(struct binder *b, const struct matrix_spec *gate,
                      const struct matrix_spec *up, enum bind_as as, struct weight *to) MUST_CHECK;
/* A matrix that the caller took itself (bind_lookup) and perhaps cut into pieces. */
enum status bind_source(struct binder *b, const struct weight_src *src, const char *what,
                        struct weight *to) MUST_CHECK;
/* "<prefix><name>", [n] f32, in the device's memory, which the decoder owns. */
enum status bind_vector(struct binder *b, const char *prefix, const char *name, size_t n,
                        float **to) MUST_CHECK;
/* Two of them, side by side: [2 n]. */
enum status bind_vector_pair(struct binder *b, const char *prefix, const char *first,
                             const char *second, size_t n, float **to) MUST_CHECK;
/* Left alone (NULL) when the file has none. */
enum status bind_vector_if_present(struct binder *b, const char *prefix, const char *name, size_t n,
                                   float **to) MUST_CHECK;
/* Room for n rows of `width` elements in the device's memory, aligned to a cache line; zeroed; the
 * decoder's. */
void bind_floats(struct binder *b, size_t n_rows, size_t width, float **to);
void bind_ints(struct binder *b, size_t n_rows, size_t width, int32_t **to);
/* Room for n elements in the host's; likewise. */
void *bind_host(struct binder *b, size_t n, size_t element);
/* A matmul call of the step will have this much input: kernel_ctx_reserve's arguments. */
void bind_reserve(struct binder *b, size_t n_rows, size_t n_in);

/* A copy of `src` in a plain type (f32 or bf16), [n_out, n_in] in order; freed with mem_free. NULL:
 * no memory. */
void *bind_plain_copy(struct kernel_ctx *k, const struct weight_src *src, enum dtype type);

#endif
