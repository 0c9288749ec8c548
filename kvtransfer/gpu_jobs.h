/* gpu_jobs.h - what a card does for transfers of a pool in its memory: checksums of pieces, copies
 * between pool and staging memory, pieces of another layout.
 *
 *   take ──▶ begin (behind a mark, on the one lane) ──▶ landed, seen by kvt_gpu_job_is_done after `on_done` ──▶ give
 *                                                   └─▶ given before it landed: kept, with its stage, until it has
 *
 * Two of them for a kvt: what leaves (its lane waits for marks of layers that are being computed)
 * and what arrives (it never waits for those). Works of one are over in the order in which they
 * began. For pools in the processor's memory there are none: sessions read those themselves. A work
 * that reads blocks whose transfer has failed reads what the blocks' next owner writes: its result
 * is thrown away. Invariants
 *  1 A stage whose bytes a work still reads or writes is not free.
 *  2 There are at most KVT_GPU_JOBS_MAX works; sessions wait for one.
 * Thread: transfer; create and free: the owner's; `on_done` is called on a thread of the driver. */
#ifndef BATON_KVTRANSFER_GPU_JOBS_H
#define BATON_KVTRANSFER_GPU_JOBS_H

#include <stdatomic.h>

#include "kernels/copy_stream.h"
#include "kvtransfer/plan.h"
#include "kvtransfer/staging.h"
#include "shared/base/list.h"

enum { KVT_GPU_JOBS_MAX = 64 };

struct kvt_gpu_jobs;

struct kvt_gpu_job {
    struct kvt_gpu_jobs *jobs;
    struct list link;  /* in jobs->begun, from begin to give */
    _Atomic bool done; /* release by the driver's thread: the sums and bytes are there;
                        * acquire by kvt_gpu_job_is_done */
    bool acquired, released;
    struct kvt_stage stage; /* of jobs->staging, held until it has landed and was given */
    struct copy_stream_checksum_range *pieces; /* KVT_BATCH_PIECES; the device reads them */
    uint64_t *sums;                            /* likewise; the device writes them */
    /* The asker's: what arrives. */
    uint32_t session;
    uint64_t generation;
    struct kvt_message note; /* a NOTE to be verified; kind DATA: a frame on its way into the
                              * pool */
};

/* What a work is to do: sums of the pieces of a span, copies of it, or both. Read by
 * kvt_gpu_job_begin alone. */
struct kvt_gpu_job_params {
    const struct kvt_head_slice *slice;
    const int32_t *blocks; /* by position in view's blocks */
    uint32_t n_tokens;
    struct kvt_block_range range; /* in view's blocks, or in those of `convert_to` */
    uint64_t event;
    bool sums;
    /* pool to job->stage, or back */
    enum { KVT_GPU_COPY_NONE, KVT_GPU_COPY_D2H, KVT_GPU_COPY_H2D } copy;
    /* The peer's layout: pieces are converted to it on the GPU (device half of job->stage) before
     * checksum and fetch. NULL: no conversion. */
    const struct kvt_head_slice *convert_to;
};

struct kvt_gpu_jobs_options {
    struct device *device; /* the pool's */
    char *pool;
    struct kvt_staging *staging; /* of the stages; NULL: nothing is moved */
    uint32_t max_copies;
    void (*on_done)(void *arg); /* jobs have completed: collect them */
    void *arg;
};

enum status kvt_gpu_jobs_create(const struct kvt_gpu_jobs_options *o, struct kvt_gpu_jobs **out,
                                struct err *err) MUST_CHECK;
void kvt_gpu_jobs_free(struct kvt_gpu_jobs *w); /* waits */
/* A free job, or NULL: all are in flight, and `on_done` will be called. */
struct kvt_gpu_job *kvt_gpu_jobs_acquire(struct kvt_gpu_jobs *w);
/* ERR_NODEV: the device has failed; the caller releases the job. */
enum status kvt_gpu_job_begin(struct kvt_gpu_job *k, const struct kvt_gpu_job_params *t) MUST_CHECK;
bool kvt_gpu_job_is_done(const struct kvt_gpu_job *k);
void kvt_gpu_job_release(struct kvt_gpu_job *k); /* NULL is fine */
/* Free what was given before it landed and has landed now. */
void kvt_gpu_jobs_collect(struct kvt_gpu_jobs *w);
/* The oldest work that has begun and was not given, or NULL. */
struct kvt_gpu_job *kvt_gpu_jobs_oldest(struct kvt_gpu_jobs *w);
/* Wait for everything that has begun. Short: copies of a few MiB, and no marks among what
 * arrives. */
enum status kvt_gpu_jobs_synchronize(struct kvt_gpu_jobs *w) MUST_CHECK;
/* Stages that works hold. */
uint32_t *kvt_gpu_jobs_held(struct kvt_gpu_jobs *w);

#endif
