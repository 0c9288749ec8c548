/* simt_graph.cc - captures and graphs. The launch of a graph is one operation of a stream.
 *
 * A graph's operations run in the order of the calls and, at every other launch, in an order that
 * delays the earlier calls as long as the dependencies allow, so that a forgotten event between
 * streams is found. Thread: any; a capture ends on the thread that began it, unless it is relaxed.
 */
#include "tests/simt/simt_overlap.h"
#include "tests/simt/simt_stream.h"

#include <atomic>

struct operations {
    std::vector<simt_op> as_called, put_off;
};

struct graphs {
    simt_handles<cudaGraph_t, const operations> graphs;
    simt_handles<cudaGraphExec_t, const operations> execs;
    std::atomic<unsigned> n_launched{ 0 };
};

static graphs &the(void)
{
    static graphs *g = new graphs;
    return *g;
}

void simt_graphs_reset(void)
{
    the().graphs.clear();
    the().execs.clear();
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    SIMT_ENTER();
    SIMT_STATE;
    auto s = simt_find_stream(stream);
    if (!s) return simt_leave(cudaErrorInvalidResourceHandle);
    if (s->is_legacy) return simt_leave(cudaErrorStreamCaptureUnsupported);
    if (s->capture) return simt_leave(cudaErrorIllegalState);
    auto c = std::make_shared<simt_capture>();
    c->mode = mode;
    c->thread = std::this_thread::get_id();
    c->members.push_back(s);
    s->capture = c;
    s->clock.clear();
    return cudaSuccess;
}

/* Has the capture's first stream waited for all operations of the others? */
static bool is_joined(const simt_capture &c, const simt_stream &first)
{
    for (auto &i : c.n_ops) {
        auto known = first.clock.find(i.first);
        if (known == first.clock.end() || known->second < i.second) return false;
    }
    return true;
}

static bool may_run(const simt_captured &op, const simt_clock_of &done)
{
    for (auto &i : op.after) {
        auto d = done.find(i.first);
        if (i.second && (d == done.end() || d->second < i.second)) return false;
    }
    return true;
}

/* Repeatedly chooses the latest operation that may run, among the first remaining one of every
 * stream. */
static std::vector<simt_op> put_off(const std::vector<simt_captured> &ops)
{
    std::vector<simt_op> order;
    std::map<const simt_stream *, std::deque<size_t>> left;
    simt_clock_of done;
    for (size_t i = 0; i < ops.size(); i++) left[ops[i].stream].push_back(i);
    while (order.size() < ops.size()) {
        const size_t none = ops.size();
        size_t latest = none;
        for (auto &i : left)
            if (!i.second.empty() && may_run(ops[i.second.front()], done) &&
                (latest == none || i.second.front() > latest))
                latest = i.second.front();
        left[ops[latest].stream].pop_front();
        done[ops[latest].stream]++;
        order.push_back(ops[latest].op);
    }
    return order;
}

static cudaError_t end_capture(simt_stream *s, std::shared_ptr<operations> *ops)
{
    std::shared_ptr<simt_capture> c = s->capture;
    if (!c) return cudaErrorIllegalState;
    if (c->members[0].get() != s) return cudaErrorStreamCaptureUnmatched;
    if (c->mode != cudaStreamCaptureModeRelaxed && c->thread != std::this_thread::get_id())
        return cudaErrorStreamCaptureWrongThread;
    bool joined = is_joined(*c, *s);
    c->is_over = true;
    for (auto &member : c->members) {
        member->capture = nullptr;
        member->clock.clear();
    }
    c->members.clear();
    if (c->is_broken) return cudaErrorStreamCaptureInvalidated;
    if (!joined) return cudaErrorStreamCaptureUnjoined;
    *ops = std::make_shared<operations>();
    for (auto &op : c->ops) (*ops)->as_called.push_back(op.op);
    (*ops)->put_off = put_off(c->ops);
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    SIMT_ENTER();
    SIMT_STATE;
    auto s = simt_find_stream(stream);
    if (!s || !graph) return simt_leave(s ? cudaErrorInvalidValue : cudaErrorInvalidResourceHandle);
    *graph = nullptr;
    std::shared_ptr<operations> ops;
    cudaError_t e = end_capture(s.get(), &ops);
    if (e == cudaSuccess) *graph = the().graphs.add(ops);
    return simt_leave(e);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    SIMT_ENTER();
    SIMT_STATE;
    auto s = simt_find_stream(stream);
    if (!s || !status)
        return simt_leave(s ? cudaErrorInvalidValue : cudaErrorInvalidResourceHandle);
    *status = !s->capture             ? cudaStreamCaptureStatusNone
              : s->capture->is_broken ? cudaStreamCaptureStatusInvalidated
                                      : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags)
{
    SIMT_ENTER();
    SIMT_STATE;
    auto ops = the().graphs.find(graph);
    if (!exec || !ops || flags) return simt_leave(cudaErrorInvalidValue);
    *exec = the().execs.add(ops);
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    SIMT_ENTER();
    std::shared_ptr<const operations> ops;
    {
        SIMT_STATE;
        ops = the().execs.find(exec);
    }
    if (!ops) return simt_leave(cudaErrorInvalidValue);
    simt_op op;
    op.run = [ops] {
        simt_overlap_forget();
        for (auto &o : the().n_launched++ % 2 ? ops->put_off : ops->as_called)
            if (simt_sticky() == cudaSuccess) simt_run_op(o);
        simt_overlap_forget();
    };
    return simt_leave(simt_submit(stream, std::move(op)));
}

cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t stream)
{
    SIMT_ENTER();
    SIMT_STATE;
    return simt_leave(the().execs.find(exec) && simt_find_stream(stream) ? cudaSuccess
                                                                         : cudaErrorInvalidValue);
}

/* Only counts: the nodes themselves have no names here. */
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *n_nodes)
{
    SIMT_ENTER();
    SIMT_STATE;
    auto ops = the().graphs.find(graph);
    if (!ops || !n_nodes || nodes) return simt_leave(cudaErrorInvalidValue);
    *n_nodes = ops->as_called.size();
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    SIMT_ENTER();
    SIMT_STATE;
    return simt_leave(the().graphs.remove(graph) ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    SIMT_ENTER();
    SIMT_STATE;
    return simt_leave(the().execs.remove(exec) ? cudaSuccess : cudaErrorInvalidValue);
}
