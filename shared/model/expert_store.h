/* expert_store.h - a model's routed experts, by sparse layer and expert, and the sets that have
 * them; only shared/model and its tests include this.
 *
 * The store owns the weights. An expert is in it as long as a set has it; the set of the share that
 * was loaded is the first. Sets do not change once they are made, so the engine reads its own
 * without a lock.
 * Thread: loading; then the lock's owner, and for `taking` one model_experts_take at a time. */
#ifndef BATON_MODEL_EXPERT_STORE_H
#define BATON_MODEL_EXPERT_STORE_H

#include <pthread.h>

#include "shared/model/experts.h"
#include "shared/model/load/bind.h"
#include "shared/model/load/expert_cache.h"
#include "shared/model/model.h"

/* An expert of a sparse layer. */
struct expert {
    uint32_t i_layer;             /* of all layers */
    uint32_t i_sparse, i_expert;  /* its place in the store */
    uint32_t n_refs;              /* slots of sets that have it */
    struct expert_weights w;      /* no data: not packed so far */
    struct expert_weights plan;   /* as it will be packed */
    bool is_mapped;               /* from the expert cache */
    struct kernel_ctx *packed_by; /* frees it, too */
};

struct model_experts {
    int32_t n_local;
    uint32_t n_sparse;
    struct expert **slots;         /* [n_sparse, n_local]; NULL while it is made */
    struct weight *gate_up, *down; /* [n_sparse, n_local] the slots', as kernels want them */
    struct matmul_args *jobs;      /* [n_local] scratch of a step */
};

struct expert_store {
    uint32_t n_sparse, n_experts;
    uint32_t *layers; /* [n_sparse] their places among all layers */
    bool own_is_whole;
    struct kernel_ctx *kernels; /* what packs while the engine computes; NULL: not needed so far */
    struct expert_cache *cache; /* NULL: none. Of who loads, or has `taking` */
    pthread_mutex_t taking;     /* held through a take: only that adds experts */
    pthread_mutex_t lock;       /* of all below */
    struct expert **at;         /* [n_sparse, n_experts]; NULL: not held */
    struct model_experts *own;  /* of the loaded share; NULL: not made, or let go */
    struct model_experts *kept; /* the last that was dropped while there was no other; or NULL */
    const struct model_experts *in_use; /* of the next steps; not read by them */
    uint32_t n_sets;                    /* that were taken */
    size_t n_held;                      /* experts, each layer's counted */
};

/* The store of a model whose share and configuration are known, with the share's own set, whose
 * experts are for the caller to pack. */
struct expert_store *expert_store_create(const struct model *m);
/* Frees all experts; weights in an arena are the arena's. */
void expert_store_free(struct expert_store *s);
/* Finds the expert for one more slot of a set, or adds a new one, for the caller to pack. */
struct expert *expert_store_ref(struct expert_store *s, uint32_t i_sparse, uint32_t i_expert,
                                bool *is_new);
/* An empty set: its slots are for the caller to fill. */
struct model_experts *expert_set_create(const struct expert_store *s, int32_t n_local);
/* Once the experts of all its slots are packed. */
void expert_set_finish(struct model_experts *x);
/* Gives up the slots and frees the experts that no other set has. */
void expert_set_free(struct expert_store *s, struct model_experts *x);
/* The set to step with: x, or NULL for the share's own, which without `ep` has to be whole. NULL:
 * there is none. Engine. */
const struct model_experts *expert_store_use(struct expert_store *s, const struct model_experts *x,
                                             bool with_ep);

/* ---- expert_pack.c: plan, then run; release in any case ---- */

struct expert_pack {
    struct model *m;
    struct kernel_ctx *kernels;
    struct weight_arena *arena; /* NULL: each weight gets memory of its own */
    struct expert **experts;    /* [n], none packed so far */
    size_t n;
    bool (*progress)(void *arg, double done); /* of model_options; may be NULL */
    void *progress_arg;
    size_t bytes_done, bytes_total; /* of the progress: this work is a part of a larger one */
    /* By expert_pack_plan: */
    struct read_ahead_range *sources;
    size_t source_bytes, bytes; /* in the files; packed, of those that are not mapped */
    /* By expert_pack_run: */
    size_t bytes_mapped;
    struct bind_times times;
};

/* Looks all experts up in the checkpoint, and maps those that the expert cache has. */
enum status expert_pack_plan(struct expert_pack *p, struct err *err) MUST_CHECK;
/* Packs the others. After an error experts may be packed or not. */
enum status expert_pack_run(struct expert_pack *p, struct err *err) MUST_CHECK;
void expert_pack_release(struct expert_pack *p);

#endif
