/* gpu_jobs.h - what a card does for transfers of a pool in its memory: checksums of pieces, copies
 * between pool and staging memory, pieces of another layout.
 *
 *   take ──▶ begin (behind a mark, on the one lane) ──▶ landed, seen by kvt_work_landed after `notice` ──▶ give
 *                                                   └─▶ given before it landed: kept, with its stage, until it has
 *
 * Two of them for a kvt: what leaves (its lane waits for marks of layers that are being computed)
 * and what arrives (it never waits for those). Works of one are over in the order in which they
 * began. For pools in the processor's memory there are none: sessions read those themselves. A work
 * that reads blocks whose transfer has failed reads what the blocks' next owner writes: its result
 * is thrown away. Invariants
 *  1 A stage whose bytes a work still reads or writes is not free.
 *  2 There are at most KVT_WORKS_MAX works; sessions wait for one.
 * Thread: transfer; create and free: the owner's; `notice` is called on a thread of the driver. */
#ifndef BATON_KVTRANSFER_GPU_JOBS_H
#define BATON_KVTRANSFER_GPU_JOBS_H

#include <stdatomic.h>

#include "kernels/copy_stream.h"
#include "kvtransfer/plan.h"
#include "kvtransfer/staging.h"
#include "shared/base/list.h"

enum { KVT_WORKS_MAX = 64 };

struct kvt_works;

struct kvt_work {
    struct kvt_works *works;
    struct list link;    /* in works->begun, from begin to give */
    _Atomic bool landed; /* release by the driver's thread: the sums and bytes are there;
                          * acquire by kvt_work_landed */
    bool taken, given;
    struct kvt_stage stage; /* of works->staging, held until it has landed and was given */
    struct copy_stream_checksum_range *pieces; /* KVT_BATCH_PIECES; the device reads them */
    uint64_t *sums;                            /* likewise; the device writes them */
    /* The asker's: what arrives. */
    uint32_t session;
    uint64_t generation;
    struct kvt_message note; /* a NOTE to be verified; kind DATA: a frame on its way into the
                              * pool */
};

/* What a work is to do: sums of the pieces of a span, copies of it, or both. Read by kvt_work_begin
 * alone. */
struct kvt_task {
    const struct kvt_view *view;
    const int32_t *blocks; /* by position in view's blocks */
    uint32_t n_tokens;
    struct kvt_span span; /* in view's blocks, or in those of `as` */
    uint64_t mark;
    bool sums;
    enum { KVT_TASK_STAYS, KVT_TASK_FETCH, KVT_TASK_STORE } move; /* pool to work->stage, or back */
    const struct kvt_view *as; /* another pool's: its pieces of the span are made of view's, on the
                                * card's side of work->stage, and are what is summed and fetched.
                                * NULL: as they are */
};

struct kvt_works_options {
    struct device *device; /* the pool's */
    char *pool;
    struct kvt_staging *staging; /* of the stages; NULL: nothing is moved */
    uint32_t max_copies;
    void (*notice)(void *arg); /* works have landed: collect */
    void *arg;
};

enum status kvt_works_create(const struct kvt_works_options *o, struct kvt_works **out,
                             struct err *err) MUST_CHECK;
void kvt_works_free(struct kvt_works *w); /* waits */
/* A free work, or NULL: all are under way; `notice` will come. */
struct kvt_work *kvt_works_take(struct kvt_works *w);
/* ERR_NODEV: the device has failed; the work is to be given back. */
enum status kvt_work_begin(struct kvt_work *k, const struct kvt_task *t) MUST_CHECK;
bool kvt_work_landed(const struct kvt_work *k);
void kvt_work_give(struct kvt_work *k); /* NULL is fine */
/* Free what was given before it landed and has landed now. */
void kvt_works_collect(struct kvt_works *w);
/* The oldest work that has begun and was not given, or NULL. */
struct kvt_work *kvt_works_oldest(struct kvt_works *w);
/* Wait for everything that has begun. Short: copies of a few MiB, and no marks among what
 * arrives. */
enum status kvt_works_settle(struct kvt_works *w) MUST_CHECK;
/* Stages that works hold. */
uint32_t *kvt_works_held(struct kvt_works *w);

#endif
