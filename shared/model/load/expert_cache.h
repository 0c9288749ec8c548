/* expert_cache.h - a file with the packed routed experts of a model, beside the weight cache's
 * (weight_cache.h), which processes of a host fill together.
 *
 * One file per model, quantization and packed layout, whatever the share: every process maps the
 * experts that it needs, and adds those that are not there. Host byte order:
 *     struct expert_cache_header
 *     struct expert_cache_entry [n]   by sparse layer and expert
 *     the experts, each beginning on a page, in the order in which they were added
 * An entry counts once its check is right; it is written after the bytes. Nothing that an entry
 * names is written to again, so a process that dies leaves at most unused bytes behind. Whoever
 * packs an expert has a lock on its entry, which ends with the process; others wait for it. An
 * error of the folder is one warning. LIMIT: as of the weight cache.
 * Thread: one at a time; expert_cache_map several, of different experts. */
#ifndef BATON_MODEL_LOAD_EXPERT_CACHE_H
#define BATON_MODEL_LOAD_EXPERT_CACHE_H

#include "shared/model/load/weight_cache.h"

struct expert_weights {
    struct weight gate_up, down;
};

struct expert_cache_header {
    char magic[8];
    uint32_t version, n; /* WEIGHT_CACHE_VERSION; entries */
    struct weight_cache_key key;
    uint64_t hash; /* of all before it */
    uint64_t end;  /* of the bytes that processes have taken for experts so far */
};

struct expert_cache_shape {
    uint64_t n_out, n_in, bytes;
    int32_t layout;
    uint32_t paired;
};

struct expert_cache_entry {
    struct expert_cache_shape gate_up, down; /* down's bytes follow those of gate and up */
    uint64_t at, hash;                       /* of the bytes of both */
    uint64_t check; /* hash of all before it, with the entry's number; 0: not there */
};

struct expert_cache_options {
    const char *folder, *name; /* as of the weight cache */
    struct weight_cache_key key;
    uint32_t n;
};

struct expert_cache;

/* NULL: no cache, after a warning. A folder that cannot be written to is only read. */
struct expert_cache *expert_cache_open(const struct expert_cache_options *o);
/* Experts that were mapped stay valid. NULL is accepted. */
void expert_cache_close(struct expert_cache *c);
/* Maps expert i if it is there with the planned shapes and its bytes agree with their hash. The
 * caller owns *out. */
bool expert_cache_map(struct expert_cache *c, uint32_t i, const struct expert_weights *plan,
                      struct expert_weights *out);
/* Before packing expert i. True: another process has packed it meanwhile, and it is mapped. False:
 * the caller packs it and calls expert_cache_put, or gives up and calls expert_cache_unclaim.
 * `go_on` is called while this waits, and ends the waiting with false; may be NULL. */
bool expert_cache_claim(struct expert_cache *c, uint32_t i, const struct expert_weights *plan,
                        struct expert_weights *out, bool (*go_on)(void *arg), void *arg);
void expert_cache_unclaim(struct expert_cache *c);
/* Adds the claimed expert and moves its weights to the file's pages: true. False: `w` stays as it
 * is. */
bool expert_cache_put(struct expert_cache *c, struct expert_weights *w);

#endif
