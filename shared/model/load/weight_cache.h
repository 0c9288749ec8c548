/* weight_cache.h - a file with a model's packed weights, which later starts map. Routed experts are
 * in another (expert_cache.h).
 *
 * One file per model, quantization and packed layout, in a folder that the operator names. Whoever
 * can write there decides what the model says, as with the model's own files. Host byte order:
 *     struct weight_cache_header
 *     struct weight_cache_entry [n_weights]  shape, place and hash of each weight, in packing order
 *     the weights, each beginning on a page
 * An error of the folder is one warning, and weights are packed without the cache. With a lock
 * file, one process at a time writes; others that need the same file wait while it grows. LIMIT:
 * another program that shortens a mapped file ends this process with SIGBUS. Files of unused models
 * stay.
 * Life cycle: open after the plan, take or put every weight in order, finish, close.
 * Thread: the loading one. */
#ifndef BATON_MODEL_LOAD_WEIGHT_CACHE_H
#define BATON_MODEL_LOAD_WEIGHT_CACHE_H

#include "kernels/backend.h"

/*   weight_cache_open ──▶ READY   There is a file of these weights and all hashes are right. It is
 *       │                         mapped read-only and shared, so that all nodes of a host hold the
 *       │                         weights once. weight_cache_take returns them.
 *       └──────▶ MAKING           There is no file, or it was refused (a warning says why).
 *                                 weight_cache_put writes each weight as it is packed;
 *                                 weight_cache_finish syncs and renames the file, maps it and moves
 *                                 the weights to its pages. */

/* Raise it when the packed bytes of an unchanged model change: the order of weights, the meaning of
 * a layout. tests/conformance/test_weight_cache.c has the bytes of this version. */
enum { WEIGHT_CACHE_VERSION = 2 };

struct weight_cache_key {
    uint64_t weights; /* which weights, quantization and layout; part of the file's name */
    uint64_t
        files; /* sizes and times of the checkpoint's files: after a change they are packed again */
};

struct weight_cache_header {
    char magic[8];
    uint32_t version, n_weights;
    struct weight_cache_key key;
    uint64_t bytes; /* of the file */
    uint64_t hash;  /* of the header, with 0 here, and the table */
};

struct weight_cache_entry {
    uint64_t n_out, n_in, at, bytes, hash;
    int32_t layout;
    uint32_t paired;
};

/* Checks header and table of a file of `size` bytes against the planned weights, but no hashes
 * of weights. ERR_FORMAT: not a cache file, or damaged; ERR_STALE: other weights or another
 * version. */
enum status weight_cache_check(const void *file, size_t size, const struct weight_cache_key *key,
                               const struct weight *plan, size_t n, struct err *err) MUST_CHECK;
/* Fills in header and table for planned weights; hashes are 0 until weight_cache_seal. Returns the
 * size of header and table in whole pages. */
size_t weight_cache_lay_out(struct weight_cache_header *head, struct weight_cache_entry *table,
                            const struct weight_cache_key *key, const struct weight *plan,
                            size_t n);
void weight_cache_seal(struct weight_cache_header *head, const struct weight_cache_entry *table);

struct weight_cache_options {
    const char *folder; /* created if needed */
    const char *name;   /* of the model, part of the file's name */
    struct weight_cache_key key;
    const struct weight *plan; /* [n] of weight_ops.plan; borrowed until weight_cache_close */
    size_t n;
    struct compute_pool *pool;
    /* While a file is read, or waited for; false: give up (weight_cache_open then returns NULL).
     * May be NULL. */
    bool (*progress)(void *arg, double done);
    void *progress_arg;
};

struct weight_cache;

/* NULL: no cache, after a warning. */
struct weight_cache *weight_cache_open(const struct weight_cache_options *o);
bool weight_cache_is_ready(const struct weight_cache *p);
/* READY: returns the next weight. The caller owns it (weight_release). */
void weight_cache_take(struct weight_cache *p, struct weight *out);
/* MAKING: writes the next weight. `w` is borrowed until weight_cache_finish. */
void weight_cache_put(struct weight_cache *p, struct weight *w);
/* MAKING: call after the last put. The weights' data moves: nobody may have pointers to it. */
void weight_cache_finish(struct weight_cache *p);
/* Weights that were taken stay valid; an unfinished file is removed. */
void weight_cache_close(struct weight_cache *p);

#endif
