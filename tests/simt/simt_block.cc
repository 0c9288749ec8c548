/* simt_block.cc - the threads of a block as fibers, from one collective to the next.
 *
 * A pass resumes every thread that can go on, in an order that changes with the pass: ascending,
 * descending, scattered. A thread runs until it must wait. The block's barrier opens at the end of
 * a pass if all threads that have not returned wait at it; a warp collective when the last of its
 * lanes arrives; a numbered barrier when its count is reached. A pass in which no thread could run
 * is a deadlock, and is reported. Thread: simt_block.h. */
#include "tests/simt/simt_block.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/simt/include/cuda_runtime.h"
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
    SPINS_MAX = 200000
};
enum thread_state { READY, AT_BARRIER, AT_NUMBERED, AT_WARP, AT_DEPENDENCY, RETURNED };

struct block_thread {
    simt_fiber fiber;
    thread_state state;
    bool is_early; /* has not waited for the kernel before, in a block of which that is checked */
    unsigned linear;
    int barrier; /* AT_NUMBERED */
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

static struct {
    block_thread *threads[MAX_THREADS]; /* created at first use */
    block_thread *current;              /* NULL outside a kernel */
    warp warps[MAX_WARPS];
    unsigned n, n_live, n_waiting, n_yielded;
    bool checks; /* that early threads do nothing wrong */
    unsigned n_early, n_waiting_early;
    simt_barrier kind; /* of the barrier at which n_waiting stand */
    int count, all, any, result_count, result_all, result_any;
    struct {
        int expected, arrived;
        unsigned turn;
        char sync[2];
    } numbered[N_BARRIERS];
    unsigned turn; /* of the block's barrier */
    char sync[2], sync_ends;
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

static void prepare_threads(unsigned n, bool checks)
{
    for (unsigned i = 0; i < n; i++) {
        if (!block.threads[i]) {
            block.threads[i] = new block_thread();
            simt_fiber_init(&block.threads[i]->fiber, run_thread, block.threads[i]);
        }
        block_thread *t = block.threads[i];
        t->state = READY;
        t->is_early = checks;
        t->linear = i;
        t->index = { i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y };
    }
    for (unsigned i = 0; i * 32 < n; i++) {
        block.warps[i].gone = n - i * 32 >= 32 ? 0 : ~0u << (n - i * 32);
        block.warps[i].n_meetings = 0;
    }
    block.n = block.n_live = n;
    block.n_waiting = block.n_waiting_early = 0;
    block.n_early = checks ? n : 0;
    block.checks = checks;
    memset(block.numbered, 0, sizeof block.numbered);
}

/* Passes. */

static unsigned resume_one(unsigned i)
{
    block_thread *t = block.threads[i];
    if (t->state != READY) return 0;
    block.current = t;
    threadIdx = t->index;
    if (block.checks) simt_overlap_set_early(t->is_early);
    simt_fiber_resume(&t->fiber);
    block.current = nullptr;
    return 1;
}

/* Returns how many threads ran. */
static unsigned run_pass(unsigned pass)
{
    unsigned n = block.n, ran = 0;
    block.n_yielded = 0;
    switch (pass % 3) {
    case 0:
        for (unsigned i = 0; i < n; i++) ran += resume_one(i);
        break;
    case 1:
        for (unsigned i = n; i-- > 0;) ran += resume_one(i);
        break;
    default: { /* a prime above every n: steps through all of them */
        unsigned step = 1031 % n ? 1031 % n : 1;
        for (unsigned i = 0, at = pass % n; i < n;
             i++, at = at + step >= n ? at + step - n : at + step)
            ran += resume_one(at);
    }
    }
    return ran;
}

static void open_barrier(void)
{
    for (unsigned i = 0; i < block.n; i++)
        if (block.threads[i]->state == AT_BARRIER) block.threads[i]->state = READY;
    block.result_count = block.count;
    block.result_all = block.all;
    block.result_any = block.any;
    block.n_waiting = 0;
    block.turn++;
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
             "%u at a warp collective%s, %u returned",
             blockIdx.x, blockIdx.y, blockIdx.z, gridDim.x, gridDim.y, gridDim.z, block.n,
             n_in[AT_BARRIER], n_in[AT_NUMBERED], n_in[AT_WARP], text, n_in[RETURNED]);
}

static void run_block(size_t dynamic_shared, unsigned first_pass, bool checks)
{
    prepare_threads(blockDim.x * blockDim.y * blockDim.z, checks);
    simt_shared_begin(dynamic_shared);
    simt_mbarrier_begin(), simt_proxy_begin(), simt_wgmma_begin();
    simt_registers_begin();
    unsigned n_spins = 0;
    simt_tsan_release(&block.sync_ends);
    for (unsigned pass = first_pass; block.n_live; pass++) {
        unsigned ran = run_pass(pass);
        bool opens = block.n_live && block.n_waiting == block.n_live;
        if (opens) open_barrier();
        else if (open_dependency(ran)) opens = true;
        else if (block.n_live && !ran) tell_deadlock();
        end_checks();
        n_spins = ran == block.n_yielded && !opens ? n_spins + 1 : 0;
        if (n_spins > SPINS_MAX)
            simt_die("all threads of block (%u, %u, %u) sleep and nobody comes to wake them",
                     blockIdx.x, blockIdx.y, blockIdx.z);
    }
    simt_tsan_acquire(&block.sync_ends);
    simt_wgmma_end(), simt_async_end(), simt_registers_end();
    simt_shared_end();
}

/* Blocks run in ascending order and, in every other launch, in descending order: code must not rely
 * on either. */
void simt_run_grid(const simt_launch_shape &shape, const std::function<void()> &body)
{
    static bool descends;
    blockDim = shape.block;
    gridDim = shape.grid;
    block.body = &body;
    uint64_t n = (uint64_t)gridDim.x * gridDim.y * gridDim.z;
    for (uint64_t i = 0; i < n; i++) {
        uint64_t at = descends ? n - 1 - i : i;
        blockIdx = { (unsigned)(at % gridDim.x), (unsigned)(at / gridDim.x % gridDim.y),
                     (unsigned)(at / gridDim.x / gridDim.y) };
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
    if (!block.n_waiting++) {
        block.kind = kind;
        block.count = 0, block.all = 1, block.any = 0;
    }
    if (block.kind != kind)
        simt_die("threads of a block meet at barriers of different kinds (__syncthreads, _count, "
                 "_and, _or)");
    block.count += predicate != 0;
    block.all &= predicate != 0;
    block.any |= predicate != 0;
    char *sync = &block.sync[block.turn % 2];
    simt_tsan_release(sync);
    wait_as(t, AT_BARRIER);
    simt_tsan_acquire(sync);
    return kind == SIMT_BARRIER_COUNT ? block.result_count
           : kind == SIMT_BARRIER_AND ? block.result_all
                                      : block.result_any;
}

/* Returns true to the last thread that arrives. */
static bool arrive_numbered(int id, int n_threads)
{
    if (id < 1 || id >= N_BARRIERS)
        simt_die("a numbered barrier is 1 to 15 (0 is __syncthreads), not %d", id);
    if (n_threads <= 0 || n_threads % 32 || (unsigned)n_threads > (block.n + 31) / 32 * 32)
        simt_die("barrier %d for %d threads: not a multiple of 32 within the block's %u", id,
                 n_threads, block.n);
    auto &b = block.numbered[id];
    if (b.arrived && b.expected != n_threads)
        simt_die("barrier %d is called for %d threads and for %d", id, b.expected, n_threads);
    b.expected = n_threads;
    simt_tsan_release(&b.sync[b.turn % 2]);
    if (++b.arrived < n_threads) return false;
    b.arrived = 0;
    b.turn++;
    for (unsigned i = 0; i < block.n; i++)
        if (block.threads[i]->state == AT_NUMBERED && block.threads[i]->barrier == id)
            block.threads[i]->state = READY;
    return true;
}

void simt_barrier_sync(int id, int n_threads)
{
    block_thread *t = current("a numbered barrier");
    t->barrier = id;
    unsigned turn = id > 0 && id < N_BARRIERS ? block.numbered[id].turn : 0;
    if (!arrive_numbered(id, n_threads)) wait_as(t, AT_NUMBERED);
    simt_tsan_acquire(&block.numbered[id].sync[turn % 2]);
}

void simt_barrier_arrive(int id, int n_threads)
{
    current("a numbered barrier");
    arrive_numbered(id, n_threads);
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
