/* gpu_jobs.h - what a GPU does for transfers of a pool in its memory: checksums of pieces, copies
 * between pool and staging memory, conversion to another layout.
 *
 *   acquire ─▶ begin (after an event, on one copy stream) ─▶ done ─▶ release
 *                └─▶ released early: kept with its stage until it is done
 *   acquire ─▶ plan ─▶ attach (a put computes its checksums) ─▶ end_put: done ─▶ release
 *   acquire ─▶ add_note .. add_note ─▶ begin_check (checksums of all of them) ─▶ done ─▶ release
 *
 * A kvt has two of them: one for what leaves (its stream waits for events of layers that are being
 * computed) and one for what arrives (which never waits for those). Jobs complete in the order in
 * which they began. A pool in host memory has none: sessions read it themselves. A job whose
 * transfer has failed may read blocks of their next owner; its result is dropped. Invariants: a
 * stage is not reused while a job reads or writes it; there are at most KVT_GPU_JOBS_MAX jobs, and
 * sessions wait for a free one.
 * Thread: transfer; create and free: the owner's; `on_done` runs on a thread of the driver. */
#ifndef BATON_KVTRANSFER_GPU_JOBS_H
#define BATON_KVTRANSFER_GPU_JOBS_H

#include <stdatomic.h>

#include "kernels/copy_stream.h"
#include "kvtransfer/plan.h"
#include "kvtransfer/staging.h"
#include "shared/base/list.h"

enum { KVT_GPU_JOBS_MAX = 64, KVT_GPU_NOTES_MAX = 64 /* of one job */ };

struct kvt_gpu_jobs;

struct kvt_gpu_job {
    struct kvt_gpu_jobs *jobs;
    struct list link; /* in jobs->begun, from begin to release */
    /* Released by the driver's thread when sums and bytes are complete, acquired by
     * kvt_gpu_job_is_done. */
    _Atomic bool done;
    bool acquired, released;
    struct kvt_stage stage; /* of jobs->staging, held until the job is done and released */
    struct copy_stream_checksum_range *pieces; /* KVT_PUT_PIECES; the device reads them */
    uint64_t *sums;                            /* likewise; the device writes them */
    /* Set by the receiver for what arrives. */
    uint32_t session;
    uint64_t generation;
    /* NOTEs to verify, and their checksums, one after the other; n_notes 0: the job copies a frame
     * into the pool. */
    struct kvt_note_range notes[KVT_GPU_NOTES_MAX];
    uint64_t expected[KVT_PUT_PIECES];
    uint32_t n_notes, n_pieces;
};

/* The work of a job: checksums of the pieces of a block range, copies of it, or both. Only the call
 * that takes it reads it. */
struct kvt_gpu_job_params {
    const struct kvt_head_slice *slice;
    const int32_t *blocks; /* by position, in blocks of `slice` */
    uint32_t n_tokens;
    struct kvt_block_range range; /* in blocks of `slice`, or of `convert_to` */
    uint32_t more_layers;         /* checksums only: of the same positions, layer by layer */
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
    struct kvt_staging *staging; /* of the stages; NULL: jobs copy nothing */
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
/* Adds the pieces of a NOTE, with their checksums (NULL: the transfer has none, the job is done
 * after what began before it). False: the job has no room for them, and must begin. */
bool kvt_gpu_job_add_note(struct kvt_gpu_job *k, const struct kvt_gpu_job_params *t,
                          const uint64_t *expected);
/* As kvt_gpu_job_begin, for the NOTEs that were added. */
enum status kvt_gpu_job_begin_check(struct kvt_gpu_job *k) MUST_CHECK;
/* Writes the job's pieces for a put from `slice` to the receiver's slice `to`, of as many heads and
 * with the same blocks' size and type (kvt_plan_direct); returns what the put needs. */
struct kvt_put_sums kvt_gpu_job_plan_put(struct kvt_gpu_job *k, const struct kvt_gpu_job_params *t,
                                         const struct kvt_head_slice *to, const int32_t *to_blocks);
/* The transport has accepted the put; it will not use the job's memory any more. */
void kvt_gpu_job_attach(struct kvt_gpu_job *k);
void kvt_gpu_job_end_put(struct kvt_gpu_job *k);
bool kvt_gpu_job_is_done(const struct kvt_gpu_job *k);
void kvt_gpu_job_release(struct kvt_gpu_job *k); /* NULL is fine */
/* Frees jobs that were released early and are done now. */
void kvt_gpu_jobs_collect(struct kvt_gpu_jobs *w);
/* The oldest job that has begun and is not released, or NULL. */
struct kvt_gpu_job *kvt_gpu_jobs_oldest(struct kvt_gpu_jobs *w);
/* Waits for every job that has begun. This is short: copies of a few MiB, and received data waits
 * for no events. */
enum status kvt_gpu_jobs_synchronize(struct kvt_gpu_jobs *w) MUST_CHECK;
/* Chunks of staging memory that jobs hold. */
uint32_t *kvt_gpu_jobs_held(struct kvt_gpu_jobs *w);

#endif
