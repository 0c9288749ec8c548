/* simt_stream.cc - queues of operations, who drains them, and the thread that does if nobody else
 * will.
 *
 * Nothing runs before somebody waits for it: synchronisation, a query, a blocking copy, cudaFree.
 * The thread is started by the first cudaLaunchHostFunc, whose callers may wait for the callback
 * only, and when another process's memory is opened, where kernels of this one may be awaited; it
 * drains everything once nothing has moved for 2 ms. The legacy stream and blocking
 * streams wait for each other by operations that are queued for this. Thread: simt_stream.h. */
#include "tests/simt/simt_stream.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>

#include "tests/simt/include/simt_vectors.h"
#include "tests/simt/simt_block.h"
#include "tests/simt/simt_launches.h"
#include "tests/simt/simt_memory.h"
#include "tests/simt/simt_overlap.h"
#include "tests/simt/simt_shared.h"

struct streams {
    std::shared_ptr<simt_stream> legacy = std::make_shared<simt_stream>(),
                                 per_thread = std::make_shared<simt_stream>();
    simt_handles<cudaStream_t, simt_stream> handles;
    std::condition_variable work;
    bool has_daemon = false;
    std::atomic<bool> runs_by_itself{ false };
    bool turns = false; /* which stream simt_drain_all begins with */
    std::atomic<size_t> n_pending{ 0 }, n_ran{ 0 }, n_kernels{ 0 };
    streams() { legacy->is_legacy = true; }
};

static streams &the(void)
{
    static streams *s = new streams;
    return *s;
}

size_t simt_n_pending(void) { return the().n_pending; }
size_t simt_n_kernels(void) { return the().n_kernels; }

std::shared_ptr<simt_stream> simt_find_stream(cudaStream_t h)
{
    if (!h || h == cudaStreamLegacy) return the().legacy;
    if (h == cudaStreamPerThread) return the().per_thread;
    return the().handles.find(h);
}

bool simt_is_reached(const simt_stream_point &point) { return point.stream->n_done >= point.seq; }

static std::vector<std::shared_ptr<simt_stream>> all_streams(void)
{
    std::vector<std::shared_ptr<simt_stream>> all = { the().legacy, the().per_thread };
    for (auto &i : the().handles.all()) all.push_back(i.second);
    return all;
}

/* Queueing, with the state lock held. */

static void push(const std::shared_ptr<simt_stream> &s, simt_op op)
{
    s->n_queued++;
    if (op.kind != SIMT_WAIT) the().n_pending++;
    s->queue.push_back(std::move(op));
}

static void push_wait(const std::shared_ptr<simt_stream> &s,
                      const std::shared_ptr<simt_stream> &for_)
{
    if (for_->n_done == for_->n_queued) return;
    simt_op op;
    op.kind = SIMT_WAIT;
    op.until = std::make_shared<simt_stream_point>();
    op.until->stream = for_;
    op.until->seq = for_->n_queued;
    push(s, std::move(op));
}

static void push_implicit_waits(const std::shared_ptr<simt_stream> &s)
{
    if (!s->is_blocking) return;
    if (!s->is_legacy) return push_wait(s, the().legacy);
    for (auto &other : all_streams())
        if (other != s && other->is_blocking) push_wait(s, other);
}

static bool breaks_by_legacy(const simt_stream &s)
{
    bool broke = false;
    if (s.is_legacy)
        for (auto &other : all_streams())
            if (other->capture && other->is_blocking) broke = other->capture->is_broken = true;
    return broke;
}

cudaError_t simt_submit(cudaStream_t h, simt_op op, std::shared_ptr<simt_stream_point> *point)
{
    SIMT_STATE;
    std::shared_ptr<simt_stream> s = simt_find_stream(h);
    if (!s) return cudaErrorInvalidResourceHandle;
    if (breaks_by_legacy(*s)) return cudaErrorStreamCaptureImplicit;
    op.stream = s.get();
    if (s->capture) {
        if (s->capture->is_broken) return cudaErrorStreamCaptureInvalidated;
        s->capture->ops.push_back({ std::move(op), s.get(), s->clock });
        s->clock[s.get()] = ++s->capture->n_ops[s.get()];
        return cudaSuccess;
    }
    push_implicit_waits(s);
    push(s, std::move(op));
    if (point) {
        if (!*point) *point = std::make_shared<simt_stream_point>();
        (*point)->stream = s;
        (*point)->seq = s->n_queued;
    }
    if (the().has_daemon) the().work.notify_one();
    return cudaSuccess;
}

/* Running. */

void simt_run_op(const simt_op &op)
{
    simt_overlap_op(op.stream, op.is_kernel);
    if (op.kind == SIMT_CALLBACK) {
        simt_memory_close(); /* the callback is ordinary code */
        simt_set_role(SIMT_HOST_FUNCTION);
        op.run();
        simt_set_role(SIMT_NOTHING);
        return;
    }
    simt_memory_open();
    if (op.run) op.run();
}

/* Removes the first operation of the stream, if it is not beyond seq. */
static bool take_front(simt_stream &s, uint64_t seq, simt_op *op)
{
    SIMT_STATE;
    if (s.n_done >= seq || s.queue.empty()) return false;
    *op = std::move(s.queue.front());
    s.queue.pop_front();
    return true;
}

static void finish_front(simt_stream &s, const simt_op &op)
{
    SIMT_STATE;
    s.n_done++;
    the().n_ran++;
    if (op.kind != SIMT_WAIT) the().n_pending--;
}

void simt_drain(simt_execution &execution, const simt_stream_point &point)
{
    simt_op op;
    while (take_front(*point.stream, point.seq, &op)) {
        /* After a sticky error nothing runs any more. */
        if (simt_sticky() == cudaSuccess) {
            if (op.kind != SIMT_WAIT) simt_run_op(op);
            else {
                simt_drain(execution, *op.until);
                simt_overlap_op(point.stream.get(), false);
            }
        }
        finish_front(*point.stream, op);
    }
}

static simt_stream_point end_of(const std::shared_ptr<simt_stream> &s)
{
    SIMT_STATE;
    simt_stream_point point;
    point.stream = s;
    point.seq = s->n_queued;
    return point;
}

/* Streams that do not wait for each other may run in any order, so it changes from call to call. */
void simt_drain_all(simt_execution &execution)
{
    std::vector<std::shared_ptr<simt_stream>> all;
    {
        SIMT_STATE;
        all = all_streams();
        if ((the().turns = !the().turns)) std::reverse(all.begin(), all.end());
    }
    for (auto &s : all) simt_drain(execution, end_of(s));
}

cudaError_t simt_wait(const std::shared_ptr<simt_stream_point> &point)
{
    simt_execution execution;
    simt_drain(execution, *point);
    return simt_sticky();
}

/* If the operation waits for another stream, that stream runs first. A kernel that waits for other
 * processes may take long: then the thread runs it, and who asks learns that it runs. */
void simt_step(const std::shared_ptr<simt_stream_point> &first)
{
    if (the().runs_by_itself) return;
    simt_execution execution(std::try_to_lock);
    if (!execution.is_held()) return;
    std::shared_ptr<simt_stream_point> point = first;
    {
        SIMT_STATE;
        while (!point->stream->queue.empty() && point->stream->queue.front().kind == SIMT_WAIT &&
               !simt_is_reached(*point->stream->queue.front().until))
            point = point->stream->queue.front().until;
    }
    simt_stream_point one;
    one.stream = point->stream;
    {
        SIMT_STATE;
        one.seq = one.stream->n_done + 1;
    }
    simt_drain(execution, one);
}

/* The thread. */

static void run_daemon(void)
{
    for (;;) {
        {
            std::unique_lock<std::mutex> lock(simt_state_mutex());
            the().work.wait(lock, [] { return the().n_pending.load() != 0; });
        }
        size_t ran = the().n_ran;
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        if (the().n_ran != ran || !the().n_pending) continue;
        simt_execution execution;
        simt_drain_all(execution);
    }
}

void simt_start_daemon(void)
{
    if (the().has_daemon) return;
    the().has_daemon = true;
    std::thread(run_daemon).detach();
}

void simt_run_by_itself(void)
{
    simt_start_daemon();
    the().runs_by_itself = true;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void *user_data)
{
    SIMT_ENTER();
    if (!fn) return simt_leave(cudaErrorInvalidValue);
    simt_op op;
    op.kind = SIMT_CALLBACK;
    op.run = [fn, user_data] { fn(user_data); };
    cudaError_t e = simt_submit(stream, std::move(op));
    if (e != cudaSuccess) return simt_leave(e);
    SIMT_STATE;
    simt_start_daemon();
    return cudaSuccess;
}

/* Launches. */

static cudaError_t check_shape(const simt_launch_shape &l)
{
    const dim3 &b = l.block, &g = l.grid;
    if (!b.x || !b.y || !b.z || b.x > 1024 || b.y > 1024 || b.z > 64 ||
        (uint64_t)b.x * b.y * b.z > 1024)
        return cudaErrorInvalidConfiguration;
    if (!g.x || !g.y || !g.z || g.x > 0x7fffffff || g.y > 65535 || g.z > 65535)
        return cudaErrorInvalidConfiguration;
    if (!l.cluster || l.cluster > SIMT_CLUSTER_MAX || g.x % l.cluster)
        return cudaErrorInvalidConfiguration;
    const unsigned n_threads = b.x * b.y * b.z;
    if (l.cluster > 1 && (n_threads % 128 || n_threads * l.cluster > SIMT_CLUSTER_THREADS))
        simt_die("a cluster of %u blocks of %u threads: the emulator runs whole warpgroups, %d "
                 "threads at most",
                 l.cluster, n_threads, SIMT_CLUSTER_THREADS);
    return l.dynamic_shared > SIMT_SHARED_MAX ? cudaErrorInvalidValue : cudaSuccess;
}

static void run_kernel(const simt_launch_shape &shape, const std::function<void()> &body)
{
    cudaError_t e = simt_due_failure("kernel");
    if (e != cudaSuccess) return simt_set_sticky(e);
    the().n_kernels++;
    if (simt_launch_is_noted(shape)) return;
    simt_set_role(SIMT_KERNEL);
    simt_overlap_begin(shape);
    simt_run_grid(shape, body);
    simt_overlap_end();
    simt_set_role(SIMT_NOTHING);
}

cudaError_t simt_launch_body(cudaStream_t stream, const simt_launch_shape &shape,
                             std::function<void()> body)
{
    cudaError_t e = simt_enter("launch");
    if (e == cudaSuccess) e = body ? check_shape(shape) : cudaErrorInvalidDeviceFunction;
    if (e != cudaSuccess) return simt_leave(e);
    simt_op op;
    op.is_kernel = true;
    op.run = [shape, body = std::move(body)] { run_kernel(shape, body); };
    return simt_leave(simt_submit(stream, std::move(op)));
}

/* CUDA's functions. */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority)
{
    SIMT_ENTER();
    if (!stream || flags > cudaStreamNonBlocking) return simt_leave(cudaErrorInvalidValue);
    (void)priority;
    auto s = std::make_shared<simt_stream>();
    s->is_blocking = flags != cudaStreamNonBlocking;
    SIMT_STATE;
    *stream = the().handles.add(s);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    SIMT_ENTER();
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
    SIMT_ENTER();
    return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0);
}

static std::shared_ptr<simt_stream_point> end_of_handle(cudaStream_t h)
{
    SIMT_STATE;
    std::shared_ptr<simt_stream> s = simt_find_stream(h);
    if (!s) return nullptr;
    auto point = std::make_shared<simt_stream_point>();
    point->stream = s;
    point->seq = s->n_queued;
    if (s->is_legacy) /* waiting for it means waiting for all blocking streams */
        for (auto &other : all_streams())
            if (other != s && other->is_blocking) push_wait(s, other), point->seq = s->n_queued;
    return point;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    SIMT_ENTER();
    if (!stream || stream == cudaStreamLegacy || stream == cudaStreamPerThread)
        return simt_leave(cudaErrorInvalidResourceHandle);
    cudaError_t e = simt_break_capture(stream, cudaErrorStreamCaptureUnsupported);
    if (e != cudaSuccess) return simt_leave(e);
    auto point = end_of_handle(stream);
    if (!point) return simt_leave(cudaErrorInvalidResourceHandle);
    e = simt_wait(point);
    SIMT_STATE;
    the().handles.remove(stream);
    return simt_leave(e);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    SIMT_ENTER();
    cudaError_t e = simt_break_capture(stream, cudaErrorStreamCaptureUnsupported);
    if (e == cudaSuccess) e = simt_unsafe_in_capture();
    if (e != cudaSuccess) return simt_leave(e);
    auto point = end_of_handle(stream);
    return simt_leave(point ? simt_wait(point) : cudaErrorInvalidResourceHandle);
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    SIMT_ENTER();
    cudaError_t e = simt_break_capture(stream, cudaErrorStreamCaptureUnsupported);
    if (e == cudaSuccess) e = simt_unsafe_in_capture();
    if (e != cudaSuccess) return simt_leave(e);
    auto point = end_of_handle(stream);
    if (!point) return simt_leave(cudaErrorInvalidResourceHandle);
    {
        SIMT_STATE;
        if (simt_is_reached(*point)) return cudaSuccess;
    }
    simt_step(point);
    return simt_leave(simt_sticky() != cudaSuccess ? simt_sticky() : cudaErrorNotReady);
}

cudaError_t cudaDeviceSynchronize(void)
{
    SIMT_ENTER();
    cudaError_t e = simt_unsafe_in_capture();
    if (e != cudaSuccess) return simt_leave(e);
    simt_execution execution;
    simt_drain_all(execution);
    return simt_leave(simt_sticky());
}

void simt_streams_reset(void)
{
    SIMT_STATE;
    for (auto &s : all_streams()) {
        s->queue.clear();
        s->n_done = s->n_queued;
        s->capture = nullptr;
    }
    the().handles.clear();
    the().n_pending = 0;
    simt_events_reset();
    simt_graphs_reset();
}

/* Captures. */

cudaError_t simt_unsafe_in_capture(void)
{
    SIMT_STATE;
    cudaError_t e = cudaSuccess;
    for (auto &s : all_streams()) {
        simt_capture *c = s->capture.get();
        if (!c || c->mode == cudaStreamCaptureModeRelaxed) continue;
        if (c->mode == cudaStreamCaptureModeThreadLocal && c->thread != std::this_thread::get_id())
            continue;
        c->is_broken = true;
        e = cudaErrorStreamCaptureUnsupported;
    }
    return e;
}

cudaError_t simt_break_capture(cudaStream_t h, cudaError_t e)
{
    SIMT_STATE;
    std::shared_ptr<simt_stream> s = simt_find_stream(h);
    if (!s || !s->capture) return cudaSuccess;
    s->capture->is_broken = true;
    return e;
}
