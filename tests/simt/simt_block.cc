/* simt_block.cc - the threads of a cluster's blocks, usually one, as fibers, from one collective to
 * the next.
 *
 * A pass resumes every thread that can go on, in an order that changes with the pass: ascending,
 * descending, scattered. A thread runs until it must wait. The block's barrier opens at the end of
 * a pass if all threads that have not returned wait at it; a warp collective when the last of its
 * lanes arrives; a numbered barrier when its count is reached. A pass in which no thread could run
 * is a deadlock, and is reported. One block of a cluster, another each time, is ahead of the others
 * as far as it can be: these run when it waits for them. Thread: simt_block.h. */
#include "tests/simt/simt_block.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/simt/include/cuda_runtime.h"
#include "tests/simt/simt_cluster.h"
#include "tests/simt/simt_fiber.h"
#include "tests/simt/simt_overlap.h"
#include "tests/simt/simt_shared.h"
#include "tests/simt/simt_sm90.h"
#include "tests/simt/simt_tsan.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

enum {
    MAX_THREADS = 1024,
    MAX_WARPS = MAX_THREADS / 32,
    N_BARRIERS = 16,
    N_SYNCS = 64,
    SPINS_MAX = 200000,
    CLUSTER_SPINS_MAX = 5000 /* clusters wait for no other process */
};
enum thread_state { READY, AT_BARRIER, AT_NUMBERED, AT_WARP, AT_CLUSTER, AT_DEPENDENCY, RETURNED };

struct block_thread {
    simt_fiber fiber;
    thread_state state;
    bool is_early;   /* has not waited for the kernel before, in a block of which that is checked */
    unsigned linear; /* in the cluster */
    unsigned rank;   /* of its block there */
    int barrier;     /* AT_NUMBERED */
    uint3 index;
    simt_copies copies;
};

/* Lanes that wait for the others of a mask. */
struct meeting {
    unsigned mask, arrived;
    simt_warp_call *lanes[32];
    char *sync; /* for the thread sanitizer: one of the warp's objects, used in turn, because
                 * some lanes are one collective ahead of others */
};

struct warp {
    unsigned gone; /* lanes that returned or never were */
    int n_meetings;
    meeting meetings[32];
    unsigned turn;
    char syncs[N_SYNCS];
};

/* What each block of a cluster has. */
struct block_barriers {
    uint3 index; /* blockIdx */
    unsigned n_live, n_waiting;
    simt_barrier kind; /* of the barrier at which n_waiting stand */
    int count, all, any, result_count, result_all, result_any;
    struct {
        int expected, arrived;
        unsigned turn;
        char sync[2];
    } numbered[N_BARRIERS];
    unsigned turn; /* of the block's barrier */
    char sync[2];
};

static struct {
    block_thread *threads[MAX_THREADS]; /* created at first use */
    block_thread *current;              /* NULL outside a kernel */
    warp warps[MAX_WARPS];
    unsigned n, n_blocks, n_of_block, n_live, n_yielded;
    unsigned ahead; /* a block of the cluster */
    block_barriers of[SIMT_CLUSTER_MAX];
    bool checks; /* that early threads do nothing wrong */
    unsigned n_early, n_waiting_early;
    unsigned n_at_cluster, cluster_turn; /* of the cluster's barrier */
    char cluster_sync[2], sync_ends;
    const std::function<void()> *body;
} block;

void simt_die(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    fflush(stdout);
    fputs("simt: ", stderr);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    if (block.current)
        fprintf(stderr, " [block (%u, %u, %u) of (%u, %u, %u), thread (%u, %u, %u)]", blockIdx.x,
                blockIdx.y, blockIdx.z, gridDim.x, gridDim.y, gridDim.z, block.current->index.x,
                block.current->index.y, block.current->index.z);
    fputc('\n', stderr);
    abort();
}

bool simt_in_kernel(void) { return block.current != nullptr; }

static block_thread *current(const char *what)
{
    if (!block.current) simt_die("%s outside a kernel", what);
    return block.current;
}

int simt_lane(void) { return (int)(current("a lane's number")->linear % 32); }
unsigned simt_thread_number(void) { return current("a thread's number")->linear; }
unsigned simt_block_rank(void) { return current("a block's rank")->rank; }
unsigned simt_cluster_rank(void) { return simt_block_rank(); }
unsigned simt_n_blocks(void) { return block.n_blocks; }
bool simt_block_has_ended(unsigned rank) { return block.of[rank].n_live == 0; }
static block_barriers *of_block(const block_thread *t) { return &block.of[t->rank]; }
simt_copies &simt_thread_copies(void) { return current("cp.async")->copies; }

static void wait_as(block_thread *t, thread_state state)
{
    t->state = state;
    simt_fiber_suspend(&t->fiber);
}

/* Threads. */

static void leave(block_thread *t)
{
    warp *w = &block.warps[t->linear / 32];
    if (!t->copies.queue.empty())
        simt_die("a thread returned and had not waited for %zu of its cp.async",
                 t->copies.queue.size());
    simt_wgmma_leave();
    t->copies.groups.clear();
    block.n_early -= t->is_early;
    t->is_early = false;
    w->gone |= 1u << t->linear % 32;
    for (int i = 0; i < w->n_meetings; i++)
        if (w->meetings[i].mask & w->gone)
            simt_die("lane %u returned and others of its warp wait for it at %s, mask %08x",
                     t->linear % 32,
                     w->meetings[i].lanes[__builtin_ctz(w->meetings[i].arrived)]->what,
                     w->meetings[i].mask);
    of_block(t)->n_live--;
    block.n_live--;
}

static void run_thread(void *arg)
{
    block_thread *t = (block_thread *)arg;
    for (;;) { /* one round per block that the fiber is used in */
        simt_tsan_acquire(&block.sync_ends);
        (*block.body)();
        leave(t);
        simt_tsan_release(&block.sync_ends);
        wait_as(t, RETURNED);
    }
}

static void prepare_thread(unsigned i, bool checks)
{
    if (!block.threads[i]) {
        block.threads[i] = new block_thread();
        simt_fiber_init(&block.threads[i]->fiber, run_thread, block.threads[i]);
    }
    block_thread *t = block.threads[i];
    const unsigned in_block = i % block.n_of_block;
    t->state = READY;
    t->is_early = checks;
    t->linear = i;
    t->rank = i / block.n_of_block;
    t->index = { in_block % blockDim.x, in_block / blockDim.x % blockDim.y,
                 in_block / blockDim.x / blockDim.y };
}

static void prepare_threads(bool checks)
{
    const unsigned n = block.n;
    for (unsigned i = 0; i < n; i++) prepare_thread(i, checks);
    for (unsigned i = 0; i * 32 < n; i++) {
        block.warps[i].gone = n - i * 32 >= 32 ? 0 : ~0u << (n - i * 32);
        block.warps[i].n_meetings = 0;
    }
    for (unsigned i = 0; i < block.n_blocks; i++) {
        block.of[i].n_live = block.n_of_block;
        block.of[i].n_waiting = 0;
        memset(block.of[i].numbered, 0, sizeof block.of[i].numbered);
    }
    block.n_live = n;
    block.n_at_cluster = block.n_waiting_early = 0;
    block.n_early = checks ? n : 0;
    block.checks = checks;
}

/* Passes. */

static unsigned resume_one(unsigned i)
{
    block_thread *t = block.threads[i];
    if (t->state != READY) return 0;
    block.current = t;
    threadIdx = t->index;
    if (block.n_blocks > 1) blockIdx = of_block(t)->index;
    if (block.checks) simt_overlap_set_early(t->is_early);
    simt_fiber_resume(&t->fiber);
    block.current = nullptr;
    return 1;
}

/* Of n threads from `first` on. Returns how many ran. */
static unsigned resume_some(unsigned pass, unsigned first, unsigned n)
{
    unsigned ran = 0;
    switch (pass % 3) {
    case 0:
        for (unsigned i = 0; i < n; i++) ran += resume_one(first + i);
        break;
    case 1:
        for (unsigned i = n; i-- > 0;) ran += resume_one(first + i);
        break;
    default: { /* a prime above every n: steps through all of them */
        unsigned step = 1031 % n ? 1031 % n : 1;
        for (unsigned i = 0, at = pass % n; i < n;
             i++, at = at + step >= n ? at + step - n : at + step)
            ran += resume_one(first + at);
    }
    }
    return ran;
}

/* The block that is ahead, and the others once none of its threads does more than wait for them. */
static unsigned run_pass(unsigned pass)
{
    block.n_yielded = 0;
    if (block.n_blocks == 1) return resume_some(pass, 0, block.n);
    unsigned ran = resume_some(pass, block.ahead * block.n_of_block, block.n_of_block);
    if (ran > block.n_yielded) return ran;
    for (unsigned i = 1; i < block.n_blocks; i++)
        ran += resume_some(pass, (block.ahead + i) % block.n_blocks * block.n_of_block,
                           block.n_of_block);
    return ran;
}

static bool open_barriers(void)
{
    bool opens = false;
    for (unsigned rank = 0; rank < block.n_blocks; rank++) {
        block_barriers *b = &block.of[rank];
        if (!b->n_live || b->n_waiting != b->n_live) continue;
        for (unsigned i = rank * block.n_of_block; i < (rank + 1) * block.n_of_block; i++)
            if (block.threads[i]->state == AT_BARRIER) block.threads[i]->state = READY;
        b->result_count = b->count;
        b->result_all = b->all;
        b->result_any = b->any;
        b->n_waiting = 0;
        b->turn++;
        opens = true;
    }
    return opens;
}

/* The barrier of the cluster opens when all threads that have not returned wait there. */
static bool open_cluster(void)
{
    if (!block.n_at_cluster || block.n_at_cluster != block.n_live) return false;
    for (unsigned i = 0; i < block.n; i++)
        if (block.threads[i]->state == AT_CLUSTER) block.threads[i]->state = READY;
    block.n_at_cluster = 0;
    block.cluster_turn++;
    return true;
}

/* Threads that wait for the kernel before go on when all do, or when none of the others can. */
static bool open_dependency(unsigned ran)
{
    if (!block.n_waiting_early || (ran && block.n_waiting_early < block.n_early)) return false;
    for (unsigned i = 0; i < block.n; i++) {
        block_thread *t = block.threads[i];
        if (t->state == AT_DEPENDENCY) t->state = READY, t->is_early = false;
    }
    block.n_early -= block.n_waiting_early;
    block.n_waiting_early = 0;
    simt_overlap_waited();
    return true;
}

static void end_checks(void)
{
    if (!block.checks || block.n_early) return;
    simt_overlap_set_early(false);
    block.checks = false;
}

[[noreturn]] static void tell_deadlock(void)
{
    unsigned n_in[RETURNED + 1] = { 0 };
    for (unsigned i = 0; i < block.n; i++) n_in[block.threads[i]->state]++;
    const char *what = "";
    unsigned mask = 0, arrived = 0, where = 0;
    for (unsigned i = 0; i * 32 < block.n; i++)
        if (block.warps[i].n_meetings) {
            const meeting *m = &block.warps[i].meetings[0];
            what = m->lanes[__builtin_ctz(m->arrived)]->what, mask = m->mask, arrived = m->arrived,
            where = i;
        }
    char text[160] = "";
    if (mask)
        snprintf(text, sizeof text, " (in warp %u %s, mask %08x, came %08x)", where, what, mask,
                 arrived);
    simt_die("block (%u, %u, %u) of (%u, %u, %u) with %u threads cannot go on: %u wait at the "
             "block's barrier, %u at a numbered barrier, "
             "%u at a warp collective%s, %u at the cluster's barrier, %u returned",
             blockIdx.x, blockIdx.y, blockIdx.z, gridDim.x, gridDim.y, gridDim.z, block.n,
             n_in[AT_BARRIER], n_in[AT_NUMBERED], n_in[AT_WARP], text, n_in[AT_CLUSTER],
             n_in[RETURNED]);
}

static void run_passes(unsigned first_pass)
{
    unsigned n_spins = 0;
    for (unsigned pass = first_pass; block.n_live; pass++) {
        const unsigned ran = run_pass(pass);
        bool opens = open_barriers();
        opens = open_cluster() || opens;
        if (!opens && open_dependency(ran)) opens = true;
        else if (!opens && block.n_live && !ran) tell_deadlock();
        end_checks();
        n_spins = ran == block.n_yielded && !opens ? n_spins + 1 : 0;
        if (n_spins > (block.n_blocks > 1 ? CLUSTER_SPINS_MAX : SPINS_MAX))
            simt_die("all threads of block (%u, %u, %u) sleep and nobody comes to wake them",
                     blockIdx.x, blockIdx.y, blockIdx.z);
    }
}

/* Runs the blocks of a cluster. */
static void run_block(size_t dynamic_shared, unsigned first_pass, bool checks)
{
    prepare_threads(checks);
    simt_shared_begin(dynamic_shared, block.n_blocks);
    simt_mbarrier_begin(), simt_proxy_begin(), simt_wgmma_begin();
    simt_registers_begin();
    simt_tsan_release(&block.sync_ends);
    run_passes(first_pass);
    simt_tsan_acquire(&block.sync_ends);
    simt_wgmma_end(), simt_async_end(), simt_bulk_end(), simt_registers_end();
    simt_shared_end();
}

static void set_shape(const simt_launch_shape &shape)
{
    blockDim = shape.block;
    gridDim = shape.grid;
    block.n_blocks = shape.cluster;
    block.n_of_block = blockDim.x * blockDim.y * blockDim.z;
    block.n = block.n_blocks * block.n_of_block;
}

/* Clusters run in ascending order and, in every other launch, in descending order: code must not
 * rely on either. */
void simt_run_grid(const simt_launch_shape &shape, const std::function<void()> &body)
{
    static bool descends;
    set_shape(shape);
    block.body = &body;
    const uint64_t n = (uint64_t)gridDim.x * gridDim.y * gridDim.z / block.n_blocks;
    for (uint64_t i = 0; i < n; i++) {
        for (unsigned rank = 0; rank < block.n_blocks; rank++) {
            const uint64_t at = (descends ? n - 1 - i : i) * block.n_blocks + rank;
            block.of[rank].index = { (unsigned)(at % gridDim.x),
                                     (unsigned)(at / gridDim.x % gridDim.y),
                                     (unsigned)(at / gridDim.x / gridDim.y) };
        }
        blockIdx = block.of[0].index;
        block.ahead = (unsigned)(i + descends) % block.n_blocks;
        run_block(shape.dynamic_shared, (unsigned)i, simt_overlap_checks(i, n));
    }
    descends = !descends;
    block.body = nullptr;
}

/* Describes where a fault happened. */
bool simt_describe_thread(char *text, size_t text_bytes)
{
    if (!block.current) return false;
    snprintf(text, text_bytes, "thread (%u, %u, %u) of block (%u, %u, %u)", block.current->index.x,
             block.current->index.y, block.current->index.z, blockIdx.x, blockIdx.y, blockIdx.z);
    return true;
}

/* Barriers of the block. */

int simt_syncthreads(simt_barrier kind, int predicate)
{
    block_thread *t = current("__syncthreads");
    block_barriers *b = of_block(t);
    if (!b->n_waiting++) {
        b->kind = kind;
        b->count = 0, b->all = 1, b->any = 0;
    }
    if (b->kind != kind)
        simt_die("threads of a block meet at barriers of different kinds (__syncthreads, _count, "
                 "_and, _or)");
    b->count += predicate != 0;
    b->all &= predicate != 0;
    b->any |= predicate != 0;
    char *sync = &b->sync[b->turn % 2];
    simt_tsan_release(sync);
    wait_as(t, AT_BARRIER);
    simt_tsan_acquire(sync);
    return kind == SIMT_BARRIER_COUNT ? b->result_count
           : kind == SIMT_BARRIER_AND ? b->result_all
                                      : b->result_any;
}

/* Returns true to the last thread that arrives. */
static bool arrive_numbered(block_thread *t, int id, int n_threads)
{
    const unsigned n = block.n_of_block, first = t->rank * n;
    if (id < 1 || id >= N_BARRIERS)
        simt_die("a numbered barrier is 1 to 15 (0 is __syncthreads), not %d", id);
    if (n_threads <= 0 || n_threads % 32 || (unsigned)n_threads > (n + 31) / 32 * 32)
        simt_die("barrier %d for %d threads: not a multiple of 32 within the block's %u", id,
                 n_threads, n);
    auto &b = of_block(t)->numbered[id];
    if (b.arrived && b.expected != n_threads)
        simt_die("barrier %d is called for %d threads and for %d", id, b.expected, n_threads);
    b.expected = n_threads;
    simt_tsan_release(&b.sync[b.turn % 2]);
    if (++b.arrived < n_threads) return false;
    b.arrived = 0;
    b.turn++;
    for (unsigned i = first; i < first + n; i++)
        if (block.threads[i]->state == AT_NUMBERED && block.threads[i]->barrier == id)
            block.threads[i]->state = READY;
    return true;
}

void simt_barrier_sync(int id, int n_threads)
{
    block_thread *t = current("a numbered barrier");
    t->barrier = id;
    auto *numbered = of_block(t)->numbered;
    unsigned turn = id > 0 && id < N_BARRIERS ? numbered[id].turn : 0;
    if (!arrive_numbered(t, id, n_threads)) wait_as(t, AT_NUMBERED);
    simt_tsan_acquire(&numbered[id].sync[turn % 2]);
}

void simt_barrier_arrive(int id, int n_threads)
{
    arrive_numbered(current("a numbered barrier"), id, n_threads);
}

void simt_cluster_sync(void)
{
    block_thread *t = current("barrier.cluster");
    char *sync = &block.cluster_sync[block.cluster_turn % 2];
    block.n_at_cluster++;
    simt_tsan_release(sync);
    wait_as(t, AT_CLUSTER);
    simt_tsan_acquire(sync);
}

void simt_yield(void)
{
    block_thread *t = current("__nanosleep");
    block.n_yielded++;
    wait_as(t, READY);
}

void simt_trap(void) { simt_die("__trap"); }

void simt_grid_dependency_sync(void)
{
    block_thread *t = current("griddepcontrol.wait");
    if (!t->is_early) return;
    block.n_waiting_early++;
    wait_as(t, AT_DEPENDENCY);
}

/* Warps. */

unsigned simt_active_lane(void) { return 1u << simt_lane(); }

static meeting *meeting_of(warp *w, unsigned mask)
{
    for (int i = 0; i < w->n_meetings; i++)
        if (w->meetings[i].mask == mask) return &w->meetings[i];
    meeting *m = &w->meetings[w->n_meetings++]; /* at most 32: every lane waits in one */
    m->mask = mask;
    m->arrived = 0;
    m->sync = &w->syncs[w->turn++ % N_SYNCS];
    return m;
}

/* The last lane has arrived. */
static void finish(unsigned i_warp, meeting *m)
{
    warp *w = &block.warps[i_warp];
    m->lanes[__builtin_ctz(m->mask)]->perform(m->lanes, m->mask);
    for (unsigned left = m->mask; left; left &= left - 1)
        block.threads[i_warp * 32 + (unsigned)__builtin_ctz(left)]->state = READY;
    meeting *last = &w->meetings[--w->n_meetings];
    if (m != last) *m = *last;
}

void simt_warp_collect(simt_warp_call *call)
{
    block_thread *t = current(call->what);
    warp *w = &block.warps[t->linear / 32];
    unsigned bit = 1u << t->linear % 32;
    if (!(call->mask & bit))
        simt_die("%s: lane %u is not in its own mask %08x", call->what, t->linear % 32, call->mask);
    if (call->mask & w->gone)
        simt_die("%s: the mask %08x names lanes that returned or do not exist (%08x)", call->what,
                 call->mask, call->mask & w->gone);
    meeting *m = meeting_of(w, call->mask);
    if (m->arrived) {
        const simt_warp_call *other = m->lanes[__builtin_ctz(m->arrived)];
        if (other->perform != call->perform || other->variant != call->variant ||
            (other->what != call->what && strcmp(other->what, call->what) != 0))
            simt_die("lanes of one warp meet at %s and at %s (or with other widths), mask %08x",
                     other->what, call->what, call->mask);
    }
    char *sync = m->sync;
    if (call->orders_memory) simt_tsan_release(sync);
    m->lanes[t->linear % 32] = call;
    m->arrived |= bit;
    if (m->arrived == m->mask) finish(t->linear / 32, m);
    else wait_as(t, AT_WARP);
    if (call->orders_memory) simt_tsan_acquire(sync);
}
