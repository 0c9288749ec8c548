/* simt_stream.h - streams: queues of operations that run when somebody needs their results.
 *
 * Thread: any. Functions with a simt_execution run operations on the calling thread, which holds
 * that lock.
 */
#ifndef BATON_TESTS_SIMT_SIMT_STREAM_H
#define BATON_TESTS_SIMT_SIMT_STREAM_H

#ifdef __cplusplus
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "tests/simt/simt_machine.h"

struct simt_stream;

/* A place in a stream: reached when n_done is seq. */
struct simt_stream_point {
    std::shared_ptr<simt_stream> stream;
    uint64_t seq = 0;
    int64_t time_ns = 0; /* when an event's record ran */
};

enum simt_kind { SIMT_WAIT, SIMT_WORK, SIMT_CALLBACK };
struct simt_op {
    simt_kind kind = SIMT_WORK;
    bool is_kernel = false;
    const simt_stream *stream = nullptr; /* in which it was queued or captured */
    std::function<void()> run;
    std::shared_ptr<simt_stream_point> until; /* SIMT_WAIT */
};

/* For each stream, how many of its captured operations precede a point of a capture. */
typedef std::map<const simt_stream *, size_t> simt_clock_of;

struct simt_captured {
    simt_op op;
    const simt_stream *stream;
    simt_clock_of after; /* what must have run before, its own stream's operations too */
};

struct simt_capture {
    std::vector<simt_captured> ops; /* in order of the calls, which the dependencies allow */
    simt_clock_of n_ops;
    std::vector<std::shared_ptr<simt_stream>> members; /* the first is where it began */
    cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
    std::thread::id thread;
    bool is_broken = false, is_over = false;
};

struct simt_stream {
    bool is_legacy = false, is_blocking = true;
    uint64_t n_queued = 0, n_done = 0;
    std::deque<simt_op> queue; /* n_queued - n_done, less the one that runs */
    std::shared_ptr<simt_capture> capture;
    simt_clock_of clock;
};

struct simt_event {
    unsigned flags = 0;
    std::shared_ptr<simt_stream_point> point; /* NULL: never recorded, or recorded in a capture */
    std::shared_ptr<simt_capture> capture;    /* recorded in it */
    simt_clock_of clock;
};

/* Queues op, or adds it to the capture that the stream is in. *point becomes the point of its end,
 * NULL in a capture. */
cudaError_t simt_submit(cudaStream_t stream, simt_op op,
                        std::shared_ptr<simt_stream_point> *point = nullptr);
/* Waits until the point is reached. Returns the sticky error, if there is one. */
cudaError_t simt_wait(const std::shared_ptr<simt_stream_point> &point);
/* Runs everything up to the point, and what must run before it. */
void simt_drain(simt_execution &execution, const simt_stream_point &point);
void simt_drain_all(simt_execution &execution);
/* Runs one operation on the way to the point, if no thread executes. */
void simt_step(const std::shared_ptr<simt_stream_point> &point);
void simt_run_op(const simt_op &op);
void simt_streams_reset(void);

/* Breaks the captures that forbid this call. Returns cudaErrorStreamCaptureUnsupported if there are
 * any, else cudaSuccess. */
cudaError_t simt_unsafe_in_capture(void);
/* If the stream captures, breaks the capture and returns e. */
cudaError_t simt_break_capture(cudaStream_t stream, cudaError_t e);

/* State lock. */
void simt_start_daemon(void);
/* The thread alone does what queries would run: kernels of this process wait for another one's. */
void simt_run_by_itself(void);
std::shared_ptr<simt_stream> simt_find_stream(cudaStream_t stream);
bool simt_is_reached(const simt_stream_point &point);
void simt_events_reset(void);
void simt_graphs_reset(void);
#endif
#endif
