/* simt_event.cc - events: places in streams to wait for. Thread: any. */
#include "tests/simt/simt_stream.h"

static simt_handles<cudaEvent_t, simt_event> &events(void)
{
    static auto *e = new simt_handles<cudaEvent_t, simt_event>;
    return *e;
}

void simt_events_reset(void) { events().clear(); }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
    SIMT_ENTER();
    bool shared = flags & cudaEventInterprocess;
    if (!event || flags > 7 || (shared && !(flags & cudaEventDisableTiming)))
        return simt_leave(cudaErrorInvalidValue);
    if (shared) return simt_leave(cudaErrorNotSupported);
    auto e = std::make_shared<simt_event>();
    e->flags = flags;
    SIMT_STATE;
    *event = events().add(e);
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event)
{
    SIMT_ENTER();
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    SIMT_ENTER();
    SIMT_STATE;
    return simt_leave(events().remove(event) ? cudaSuccess : cudaErrorInvalidResourceHandle);
}

/* Returns true if the record belongs to a capture, in which case nothing else is to be done. State
 * lock. */
static bool record_captured(simt_event *e, const simt_stream &s)
{
    e->point = nullptr;
    e->capture = s.capture;
    e->clock = s.clock;
    return s.capture != nullptr;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    SIMT_ENTER();
    std::shared_ptr<simt_event> e;
    {
        SIMT_STATE;
        e = events().find(event);
        auto s = simt_find_stream(stream);
        if (!e || !s) return simt_leave(cudaErrorInvalidResourceHandle);
        if (s->capture && s->capture->is_broken)
            return simt_leave(cudaErrorStreamCaptureInvalidated);
        if (record_captured(e.get(), *s)) return cudaSuccess;
    }
    auto point = std::make_shared<simt_stream_point>();
    simt_op op;
    op.run = [weak = std::weak_ptr<simt_stream_point>(point)] {
        SIMT_STATE;
        if (auto m = weak.lock()) m->time_ns = simt_now_ns();
    };
    cudaError_t error = simt_submit(stream, std::move(op), &point);
    if (error != cudaSuccess) return simt_leave(error);
    SIMT_STATE;
    e->point = point;
    return cudaSuccess;
}

static void take_later(simt_clock_of *clock, const simt_clock_of &other)
{
    for (auto &i : other) {
        size_t &n = (*clock)[i.first];
        if (n < i.second) n = i.second;
    }
}

/* The stream joins the event's capture or, if it is in it, waits for more of it. State lock. */
static cudaError_t wait_captured(const std::shared_ptr<simt_stream> &s, const simt_event &e)
{
    if (e.capture->is_over) return cudaErrorCapturedEvent;
    if (e.capture->is_broken) return cudaErrorStreamCaptureInvalidated;
    if (s->is_legacy) {
        e.capture->is_broken = true;
        return cudaErrorStreamCaptureImplicit;
    }
    if (s->capture && s->capture != e.capture) {
        s->capture->is_broken = e.capture->is_broken = true;
        return cudaErrorStreamCaptureMerge;
    }
    if (!s->capture) {
        s->capture = e.capture;
        s->clock.clear();
        e.capture->members.push_back(s);
    }
    take_later(&s->clock, e.clock);
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    SIMT_ENTER();
    simt_op op;
    {
        SIMT_STATE;
        auto e = events().find(event);
        auto s = simt_find_stream(stream);
        if (!e || !s) return simt_leave(cudaErrorInvalidResourceHandle);
        if (flags) return simt_leave(cudaErrorInvalidValue);
        if (e->capture) return simt_leave(wait_captured(s, *e));
        if (!e->point) return cudaSuccess; /* never recorded */
        if (s->capture) {
            s->capture->is_broken = true;
            return simt_leave(cudaErrorStreamCaptureIsolation);
        }
        op.kind = SIMT_WAIT;
        op.until = e->point;
    }
    return simt_leave(simt_submit(stream, std::move(op)));
}

/* *point is NULL if there is nothing to wait for. */
static cudaError_t find_point(cudaEvent_t event, std::shared_ptr<simt_stream_point> *point)
{
    {
        SIMT_STATE;
        auto e = events().find(event);
        if (!e) return cudaErrorInvalidResourceHandle;
        if (e->capture) {
            e->capture->is_broken = true;
            return cudaErrorCapturedEvent;
        }
        if (e->point && !simt_is_reached(*e->point)) *point = e->point;
    }
    return simt_unsafe_in_capture();
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    SIMT_ENTER();
    std::shared_ptr<simt_stream_point> point;
    cudaError_t e = find_point(event, &point);
    return simt_leave(e == cudaSuccess && point ? simt_wait(point) : e);
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    SIMT_ENTER();
    std::shared_ptr<simt_stream_point> point;
    cudaError_t e = find_point(event, &point);
    if (e != cudaSuccess || !point) return simt_leave(e);
    simt_step(point);
    return simt_leave(simt_sticky() != cudaSuccess ? simt_sticky() : cudaErrorNotReady);
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end)
{
    SIMT_ENTER();
    SIMT_STATE;
    auto a = events().find(begin), b = events().find(end);
    if (!a || !b || !a->point || !b->point || (a->flags | b->flags) & cudaEventDisableTiming)
        return simt_leave(cudaErrorInvalidResourceHandle);
    if (!simt_is_reached(*a->point) || !simt_is_reached(*b->point))
        return simt_leave(cudaErrorNotReady);
    *ms = (float)(b->point->time_ns - a->point->time_ns) * 1e-6f;
    return cudaSuccess;
}
