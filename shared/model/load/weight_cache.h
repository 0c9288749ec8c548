/* weight_cache.h - a copy of a model's packed weights on disk, which a later start maps.
 *
 * One file per model, quantization and packed layout, in a folder that the operator names. Whoever
 * can write there decides what the model says, as with the model's own files. Host byte order:
 *     struct weight_cache_header
 *     struct weight_cache_entry [n_weights]  shape, place and hash of each weight, in packing order
 *     the weights, each beginning on a page
 * States: see weight_cache_open. A fault of the folder is one warning, and weights are packed as if
 * there were no folder. A lock file makes one process at a time write; another that wants the same
 * copy waits for it, as long as it grows. LIMIT: a copy that another program shortens while it is
 * mapped ends this process with SIGBUS, as a model file would; copies are replaced, not rewritten.
 * Copies of models that are no longer used are not removed.
 * Life cycle: open after the plan, take or put every weight in order, finish, close.
 * Thread: the loading one. */
#ifndef BATON_MODEL_LOAD_WEIGHT_CACHE_H
#define BATON_MODEL_LOAD_WEIGHT_CACHE_H

#include "kernels/backend.h"

/*   weight_cache_open ──▶ READY   a copy of these weights is there and every byte agrees with its
 *       │                         hash. It is mapped read-only and shared, so that all nodes of a
 *       │                         host hold the weights once. weight_cache_take hands them out.
 *       └──────▶ MAKING           there is no copy yet, or it is refused (a warning says why).
 *                                 weight_cache_put writes each weight as it is packed;
 *                                 weight_cache_finish puts the copy in its place (synced, then
 *                                 renamed) and the weights on its pages. */

/* Raised when the packed bytes of an unchanged model change: another order of weights, another
 * meaning of a layout. tests/conformance/test_weight_cache.c knows the bytes of this version. */
enum { WEIGHT_CACHE_VERSION = 1 };

struct weight_cache_key {
    uint64_t weights; /* which weights, quantization and layout; part of the file's name */
    uint64_t files;   /* sizes and times of the checkpoint's files: edited ones are packed anew */
};

struct weight_cache_header {
    char magic[8];
    uint32_t version, n_weights;
    struct weight_cache_key key;
    uint64_t bytes; /* of the file */
    uint64_t hash;  /* of head, with 0 here, and table */
};

struct weight_cache_entry {
    uint64_t n_out, n_in, at, bytes, hash;
    int32_t layout;
    uint32_t paired;
};

/* Is the beginning of this file, `size` bytes long, a copy of the planned weights? ERR_FORMAT: of
 * nothing, or damaged; ERR_STALE: of other weights or another version. The weights' own hashes are
 * not looked at. */
enum status weight_cache_check(const void *file, size_t size, const struct weight_cache_key *key,
                               const struct weight *plan, size_t n, struct err *err) MUST_CHECK;
/* Head and table for planned weights, hashes of the weights 0 until weight_cache_seal; returns the
 * bytes of head and table in whole pages. */
size_t weight_cache_lay_out(struct weight_cache_header *head, struct weight_cache_entry *table,
                            const struct weight_cache_key *key, const struct weight *plan,
                            size_t n);
void weight_cache_seal(struct weight_cache_header *head, const struct weight_cache_entry *table);

struct weight_cache_options {
    const char *folder; /* made when it is not there */
    const char *name;   /* of the model, for people: part of the file's name */
    struct weight_cache_key key;
    const struct weight *plan; /* [n], as weight_plan gives them; kept until
                                * weight_cache_close */
    size_t n;
    struct compute_pool *pool;
    void (*progress)(void *arg, double done); /* while a copy is read; may be NULL */
    void *progress_arg;
};

struct weight_cache;

/* NULL: there will be no copy, a warning has said why. */
struct weight_cache *weight_cache_open(const struct weight_cache_options *o);
bool weight_cache_is_ready(const struct weight_cache *p);
/* READY: the next weight, the caller's from now on (weight_release). */
void weight_cache_take(struct weight_cache *p, struct weight *out);
/* MAKING: the next weight has been packed. `w` is kept until weight_cache_finish. */
void weight_cache_put(struct weight_cache *p, struct weight *w);
/* MAKING: all were put. The weights' data moves: nobody may hold pointers to it. */
void weight_cache_finish(struct weight_cache *p);
/* Weights that were taken stay; an unfinished copy is removed. */
void weight_cache_close(struct weight_cache *p);

#endif
