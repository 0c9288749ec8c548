/* test_simt_runtime.cc - the CUDA runtime of tests/simt: memory, lazy streams, events, graphs,
 * errors, and two processes on one memory. */
#include <poll.h>
#include <pthread.h>

#include <atomic>

#include "tests/unit/simt/simt_case.h"

__global__ void set_to(int *p, int n, int value)
{
    for (int i = (int)threadIdx.x; i < n; i += (int)blockDim.x) p[i] = value;
}
__global__ void add_to(int *p, const int *more) { *p += *more; }
__global__ void take_from(int *to, const int *from) { *to = *from; }

static void set(cudaStream_t s, int *p, int value)
{
    GOOD(simt_launch(s, set_to, dim3(1), dim3(32), 0, p, 1, value));
}

static cudaStream_t new_stream(void)
{
    cudaStream_t s;
    GOOD(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    return s;
}

static cudaEvent_t new_event(void)
{
    cudaEvent_t e;
    GOOD(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    return e;
}

static int *pinned(size_t n)
{
    int *p;
    GOOD(cudaMallocHost(&p, n * sizeof *p));
    return p;
}

static int read_int(const int *device)
{
    int x = 0;
    to_host(&x, device, 1);
    return x;
}

/* Streams. */

TEST(simt_runs_nothing_before_somebody_waits)
{
    cudaStream_t s = new_stream();
    int *d = on_device<int>(1), *h = pinned(1);
    *h = 5;
    set(s, d, 7);
    GOOD(cudaMemcpyAsync(h, d, sizeof *h, cudaMemcpyDeviceToHost, s));
    CHECK_EQ_INT(*h, 5);
    CHECK_EQ_INT(simt_n_pending(), 2);
    CHECK_EQ_INT(read_int(d), -1); /* another stream does not wait for this one: what new memory
                                    * holds */
    GOOD(cudaStreamSynchronize(s));
    CHECK_EQ_INT(*h, 7);
    CHECK_EQ_INT(simt_n_pending(), 0);
    GOOD(cudaStreamDestroy(s));
    GOOD(cudaFree(d));
    GOOD(cudaFreeHost(h));
}

TEST(simt_reads_pinned_sources_late_and_others_at_once)
{
    cudaStream_t s = new_stream();
    int *d = on_device<int>(2), *h = pinned(1), here = 1, out[2];
    *h = 1;
    GOOD(cudaMemcpyAsync(d, h, sizeof *h, cudaMemcpyHostToDevice, s));
    GOOD(cudaMemcpyAsync(d + 1, &here, sizeof here, cudaMemcpyHostToDevice, s));
    *h = here = 2; /* too early for the first */
    GOOD(cudaMemcpyAsync(out, d, sizeof out, cudaMemcpyDeviceToHost, s)); /* pageable: waits */
    CHECK_EQ_INT(out[0], 2);
    CHECK_EQ_INT(out[1], 1);
    GOOD(cudaFreeHost(h));
    GOOD(cudaFree(d));
    GOOD(cudaStreamDestroy(s));
}

TEST(simt_orders_streams_by_events_alone)
{
    cudaStream_t a = new_stream(), b = new_stream();
    cudaEvent_t e = new_event();
    int *d = on_device<int>(2);
    for (int with_event = 0; with_event < 2; with_event++) {
        set(nullptr, d, 0);
        GOOD(cudaDeviceSynchronize());
        set(a, d, 3);
        GOOD(cudaEventRecord(e, a));
        set(a, d, 4); /* behind the event */
        if (with_event) GOOD(cudaStreamWaitEvent(b, e));
        GOOD(simt_launch(b, take_from, dim3(1), dim3(1), 0, d + 1, (const int *)d));
        GOOD(cudaStreamSynchronize(b));
        CHECK_EQ_INT(read_int(d + 1), with_event ? 3 : 0);
        GOOD(cudaDeviceSynchronize());
        CHECK_EQ_INT(read_int(d), 4);
    }
    GOOD(cudaEventDestroy(e));
    CHECK_STATUS(cudaEventRecord(e, a), cudaErrorInvalidResourceHandle);
    GOOD(cudaStreamDestroy(a));
    CHECK_STATUS(cudaStreamSynchronize(a), cudaErrorInvalidResourceHandle);
    GOOD(cudaStreamDestroy(b));
    GOOD(cudaFree(d));
}

TEST(simt_orders_blocking_streams_and_the_legacy_stream)
{
    cudaStream_t s;
    GOOD(cudaStreamCreate(&s));
    int *d = on_device<int>(1), *more = on_device<int>(1);
    for (cudaStream_t waited : { s, (cudaStream_t) nullptr }) {
        set(nullptr, d, 0);
        set(nullptr, more, 1);
        for (int i = 0; i < 3; i++) {
            GOOD(simt_launch(nullptr, add_to, dim3(1), dim3(1), 0, more, (const int *)more));
            GOOD(simt_launch(s, add_to, dim3(1), dim3(1), 0, d, (const int *)more));
        }
        GOOD(cudaStreamSynchronize(waited));
        CHECK_EQ_INT(read_int(d), 2 + 4 + 8);
        CHECK_EQ_INT(read_int(more), 8);
    }
    GOOD(cudaStreamDestroy(s));
    GOOD(cudaFree(d));
    GOOD(cudaFree(more));
}

TEST(simt_ends_polling)
{
    cudaStream_t a = new_stream(), b = new_stream();
    cudaEvent_t e = new_event(), f = new_event();
    int *d = on_device<int>(1);
    GOOD(cudaEventQuery(e)); /* never recorded */
    for (int i = 0; i < 3; i++) set(a, d, i);
    GOOD(cudaEventRecord(e, a));
    GOOD(cudaStreamWaitEvent(b, e));
    set(b, d, 9);
    GOOD(cudaEventRecord(f, b));
    int n_polls = 0;
    for (cudaError_t r; (r = cudaEventQuery(f)) != cudaSuccess; n_polls++)
        CHECK_STATUS(r, cudaErrorNotReady);
    CHECK_EQ_INT(n_polls, 7); /* three kernels, the record, the wait, a kernel, a record */
    CHECK_STATUS(cudaGetLastError(), cudaErrorNotReady);
    GOOD(cudaStreamQuery(a));
    CHECK_EQ_INT(read_int(d), 9);
    set(a, d, 1);
    CHECK_STATUS(cudaStreamQuery(a), cudaErrorNotReady);
    GOOD(cudaStreamQuery(a));
    GOOD(cudaFree(d));
}

TEST(simt_tells_the_time_between_events)
{
    cudaEvent_t a, b;
    GOOD(cudaEventCreate(&a));
    GOOD(cudaEventCreate(&b));
    int *d = on_device<int>(1000);
    float ms = -1;
    CHECK_STATUS(cudaEventElapsedTime(&ms, a, b), cudaErrorInvalidResourceHandle);
    GOOD(cudaEventRecord(a));
    GOOD(simt_launch(nullptr, set_to, dim3(50), dim3(256), 0, d, 1000, 1));
    GOOD(cudaEventRecord(b));
    CHECK_STATUS(cudaEventElapsedTime(&ms, a, b), cudaErrorNotReady);
    GOOD(cudaEventSynchronize(b));
    GOOD(cudaEventElapsedTime(&ms, a, b));
    CHECK(ms > 0);
    GOOD(cudaFree(d));
}

/* Callbacks. */

static std::atomic<int> n_called;
static cudaError_t told_in_callback;

static void on_call(void *arg)
{
    told_in_callback = cudaFree(arg);
    n_called++;
}

TEST(simt_calls_back_though_nobody_synchronises)
{
    int *d = on_device<int>(1);
    cudaStream_t s = new_stream();
    set(s, d, 4);
    GOOD(cudaLaunchHostFunc(s, on_call, d));
    for (int i = 0; i < 5000 && n_called == 0; i++) poll(nullptr, 0, 1);
    CHECK_EQ_INT(n_called, 1);
    CHECK_STATUS(told_in_callback, cudaErrorNotPermitted);
    CHECK_EQ_INT(read_int(d), 4);
    GOOD(cudaLaunchHostFunc(s, on_call, d));
    GOOD(cudaStreamSynchronize(s));
    CHECK_EQ_INT(n_called, 2);
    GOOD(cudaFree(d));
    GOOD(cudaStreamDestroy(s));
}

static void *work_on_a_stream(void *arg)
{
    int *d = (int *)arg;
    cudaStream_t s = new_stream();
    int one = 1;
    int *more = on_device(&one, 1);
    GOOD(cudaStreamSynchronize(nullptr)); /* the copy is behind the legacy stream alone */
    for (int i = 0; i < 20; i++) {
        GOOD(simt_launch(s, add_to, dim3(1), dim3(1), 0, d, (const int *)more));
        if (i % 5 == 0) GOOD(cudaLaunchHostFunc(s, on_call, nullptr));
        if (i % 7 == 0) GOOD(cudaStreamSynchronize(s));
    }
    GOOD(cudaStreamSynchronize(s));
    GOOD(cudaFree(more));
    GOOD(cudaStreamDestroy(s));
    return nullptr;
}

TEST(simt_serves_several_threads)
{
    enum { N_THREADS = 4 };
    int *d = on_device<int>(N_THREADS);
    GOOD(cudaMemset(d, 0, N_THREADS * sizeof *d));
    GOOD(cudaDeviceSynchronize());
    pthread_t threads[N_THREADS];
    for (int i = 0; i < N_THREADS; i++)
        CHECK(pthread_create(&threads[i], nullptr, work_on_a_stream, d + i) == 0);
    for (pthread_t t : threads) pthread_join(t, nullptr);
    for (int i = 0; i < N_THREADS; i++) CHECK_EQ_INT(read_int(d + i), 20);
    CHECK_EQ_INT(n_called, 4 * N_THREADS);
    GOOD(cudaFree(d));
}

/* Graphs. */

TEST(simt_replays_graphs_on_what_memory_holds_then)
{
    cudaStream_t s = new_stream(), t = new_stream();
    cudaEvent_t fork = new_event(), join = new_event();
    int *d = on_device<int>(3), *h = pinned(1);
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    GOOD(cudaMemset(d, 0, 3 * sizeof *d));
    GOOD(cudaDeviceSynchronize());
    GOOD(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    GOOD(cudaMemcpyAsync(d + 1, h, sizeof *h, cudaMemcpyHostToDevice, s));
    GOOD(cudaEventRecord(fork, s));
    GOOD(cudaStreamWaitEvent(t, fork));
    GOOD(simt_launch(t, add_to, dim3(1), dim3(1), 0, d, (const int *)(d + 1)));
    GOOD(cudaEventRecord(join, t));
    GOOD(cudaStreamWaitEvent(s, join));
    GOOD(simt_launch(s, take_from, dim3(1), dim3(1), 0, d + 2, (const int *)d));
    cudaStreamCaptureStatus status;
    GOOD(cudaStreamIsCapturing(t, &status));
    CHECK_EQ_INT(status, cudaStreamCaptureStatusActive);
    GOOD(cudaStreamEndCapture(s, &graph));
    size_t n = 0;
    GOOD(cudaGraphGetNodes(graph, nullptr, &n));
    CHECK_EQ_INT(n, 3);
    GOOD(cudaGraphInstantiate(&exec, graph));
    GOOD(cudaGraphDestroy(graph));
    CHECK_EQ_INT(read_int(d), 0); /* captured, not run */
    for (int i = 1; i <= 3; i++) {
        *h = 10 * i;
        GOOD(cudaGraphLaunch(exec, s));
        CHECK_EQ_INT(simt_n_pending(), 1);
        GOOD(cudaStreamSynchronize(s));
    }
    CHECK_EQ_INT(read_int(d + 2), 60);
    GOOD(cudaGraphExecDestroy(exec));
    CHECK_STATUS(cudaGraphLaunch(exec, s), cudaErrorInvalidValue);
    GOOD(cudaFree(d));
    GOOD(cudaFreeHost(h));
}

TEST(simt_shows_an_event_that_a_graph_lacks)
{
    cudaStream_t s = new_stream(), t = new_stream();
    cudaEvent_t fork = new_event(), join = new_event(), made = new_event();
    int *d = on_device<int>(2);
    for (int with_event = 0; with_event < 2; with_event++) {
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        GOOD(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
        GOOD(cudaEventRecord(fork, s));
        GOOD(cudaStreamWaitEvent(t, fork));
        set(s, d, 5);
        GOOD(cudaEventRecord(made, s));
        if (with_event) GOOD(cudaStreamWaitEvent(t, made));
        GOOD(simt_launch(t, take_from, dim3(1), dim3(1), 0, d + 1, (const int *)d));
        GOOD(cudaEventRecord(join, t));
        GOOD(cudaStreamWaitEvent(s, join));
        GOOD(cudaStreamEndCapture(s, &graph));
        GOOD(cudaGraphInstantiate(&exec, graph));
        int n_right = 0;
        for (int i = 0; i < 4; i++) {
            set(s, d, 0);
            GOOD(cudaGraphLaunch(exec, s));
            GOOD(cudaStreamSynchronize(s));
            n_right += read_int(d + 1) == 5;
        }
        CHECK_EQ_INT(n_right, with_event ? 4 : 2);
        GOOD(cudaGraphExecDestroy(exec));
        GOOD(cudaGraphDestroy(graph));
    }
    GOOD(cudaFree(d));
}

TEST(simt_breaks_captures_by_what_cannot_be_captured)
{
    cudaStream_t s = new_stream(), t = new_stream();
    cudaEvent_t e = new_event();
    cudaGraph_t graph;
    void *p;
    int *d = on_device<int>(1), here = 0;
    GOOD(cudaDeviceSynchronize());
    GOOD(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    CHECK_STATUS(cudaMalloc(&p, 100), cudaErrorStreamCaptureUnsupported);
    CHECK_STATUS(simt_launch(s, set_to, dim3(1), dim3(1), 0, d, 1, 1),
                 cudaErrorStreamCaptureInvalidated);
    CHECK_STATUS(cudaStreamEndCapture(s, &graph), cudaErrorStreamCaptureInvalidated);
    CHECK(graph == nullptr);
    GOOD(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    GOOD(cudaMalloc(&p, 100)); /* relaxed */
    CHECK_STATUS(cudaStreamSynchronize(s), cudaErrorStreamCaptureUnsupported);
    CHECK_STATUS(cudaStreamEndCapture(s, &graph), cudaErrorStreamCaptureInvalidated);
    GOOD(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    CHECK_STATUS(cudaMemcpyAsync(d, &here, sizeof here, cudaMemcpyHostToDevice, s),
                 cudaErrorStreamCaptureUnsupported);
    CHECK_STATUS(cudaStreamEndCapture(s, &graph), cudaErrorStreamCaptureInvalidated);
    /* a fork that does not come back */
    GOOD(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    GOOD(cudaEventRecord(e, s));
    GOOD(cudaStreamWaitEvent(t, e));
    set(t, d, 1);
    CHECK_STATUS(cudaEventQuery(e), cudaErrorCapturedEvent);
    CHECK_STATUS(cudaStreamEndCapture(s, &graph), cudaErrorStreamCaptureInvalidated);
    GOOD(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    GOOD(cudaEventRecord(e, s));
    GOOD(cudaStreamWaitEvent(t, e));
    set(t, d, 1);
    CHECK_STATUS(cudaStreamEndCapture(t, &graph), cudaErrorStreamCaptureUnmatched);
    CHECK_STATUS(cudaStreamEndCapture(s, &graph), cudaErrorStreamCaptureUnjoined);
    CHECK_STATUS(cudaStreamEndCapture(s, &graph), cudaErrorIllegalState);
    /* one that came back and then went on */
    GOOD(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    GOOD(cudaEventRecord(e, s));
    GOOD(cudaStreamWaitEvent(t, e));
    set(t, d, 1);
    GOOD(cudaEventRecord(e, t));
    GOOD(cudaStreamWaitEvent(s, e));
    set(t, d, 2);
    CHECK_STATUS(cudaStreamEndCapture(s, &graph), cudaErrorStreamCaptureUnjoined);
    GOOD(cudaEventRecord(e, t));
    GOOD(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    CHECK_STATUS(cudaStreamWaitEvent(s, e), cudaErrorStreamCaptureIsolation);
    CHECK_STATUS(cudaStreamEndCapture(s, &graph), cudaErrorStreamCaptureInvalidated);
    GOOD(cudaFree(p));
    GOOD(cudaFree(d));
}

/* Memory. */

TEST(simt_has_as_much_memory_as_it_says)
{
    setenv("BATON_SIMT_MEMORY", "1048576", 1);
    size_t free_bytes, total;
    void *a, *b;
    GOOD(cudaMalloc(&a, 1 << 19));
    GOOD(cudaMemGetInfo(&free_bytes, &total));
    CHECK(total == 1 << 20 && free_bytes == 1 << 19);
    CHECK_STATUS(cudaMalloc(&b, (1 << 19) + 1), cudaErrorMemoryAllocation);
    CHECK_STATUS(cudaPeekAtLastError(), cudaErrorMemoryAllocation);
    CHECK_STATUS(cudaGetLastError(), cudaErrorMemoryAllocation);
    GOOD(cudaGetLastError());
    GOOD(cudaMalloc(&b, 1 << 19));
    GOOD(cudaFree(a));
    CHECK_STATUS(cudaFree(a), cudaErrorInvalidValue);
    GOOD(cudaFree(b));
    GOOD(cudaFree(nullptr));
    cudaDeviceProp prop;
    GOOD(cudaGetDeviceProperties(&prop, 0));
    CHECK(prop.totalGlobalMem == 1 << 20 && prop.warpSize == 32 && prop.name[0]);
    int value;
    GOOD(cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMajor, 0));
    CHECK_EQ_INT(value, prop.major);
}

TEST(simt_is_a_machine_without_a_gpu)
{
    setenv("BATON_SIMT_DEVICES", "0", 1);
    int n = 7;
    CHECK_STATUS(cudaGetDeviceCount(&n), cudaErrorNoDevice);
    CHECK_EQ_INT(n, 0);
    CHECK_STATUS(cudaSetDevice(0), cudaErrorNoDevice);
}

TEST(simt_knows_pointers)
{
    int *d = on_device<int>(10), *h = pinned(10), here = 0;
    cudaPointerAttributes a;
    GOOD(cudaPointerGetAttributes(&a, d + 9));
    CHECK(a.type == cudaMemoryTypeDevice && a.devicePointer == d + 9);
    GOOD(cudaPointerGetAttributes(&a, h + 3));
    CHECK(a.type == cudaMemoryTypeHost && a.hostPointer == h + 3);
    GOOD(cudaPointerGetAttributes(&a, &here));
    CHECK(a.type == cudaMemoryTypeUnregistered);
    /* ends behind the memory */
    CHECK_STATUS(cudaMemcpy(d + 1, h, 40, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
    CHECK_STATUS(cudaMemcpy(h, d, 40, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
    CHECK_STATUS(cudaMemset(&here, 0, 4), cudaErrorInvalidValue);
    GOOD(cudaHostRegister(&here, sizeof here, cudaHostRegisterDefault));
    GOOD(cudaPointerGetAttributes(&a, &here));
    CHECK(a.type == cudaMemoryTypeHost);
    GOOD(cudaHostUnregister(&here));
    GOOD(cudaFree(d));
    GOOD(cudaFreeHost(h));
}

TEST(simt_copies_rows)
{
    static char from[5 * 10], to[5 * 7];
    for (int i = 0; i < 50; i++) from[i] = (char)i;
    char *d = on_device<char>(5 * 16);
    GOOD(cudaMemcpy2DAsync(d, 16, from, 10, 7, 5, cudaMemcpyHostToDevice, nullptr));
    GOOD(cudaMemcpy2DAsync(to, 7, d, 16, 7, 5, cudaMemcpyDeviceToHost, nullptr));
    for (int i = 0; i < 35; i++) CHECK_EQ_INT(to[i], i / 7 * 10 + i % 7);
    CHECK_STATUS(cudaMemcpy2DAsync(d, 6, from, 10, 7, 5, cudaMemcpyHostToDevice, nullptr),
                 cudaErrorInvalidPitchValue);
    CHECK_STATUS(cudaMemcpy2DAsync(d, 18, from, 10, 10, 5, cudaMemcpyHostToDevice, nullptr),
                 cudaErrorInvalidValue);
    GOOD(cudaFree(d));
}

static int *victim;
static void touch_on_the_host(void)
{
    victim = on_device<int>(4);
    GOOD(cudaDeviceSynchronize());
    *(volatile int *)victim = 1;
}
static void free_after_overrun(void)
{
    char *p = on_device<char>(100);
    GOOD(cudaMemset(p, 0, 100));
    /* bytes 100 to 103 */
    GOOD(simt_launch(nullptr, set_to, dim3(1), dim3(32), 0, (int *)p, 26, 0));
    GOOD(cudaFree(p));
}
TEST(simt_keeps_the_host_from_device_memory)
{
    must_die(touch_on_the_host, FAULTS_ARE_TOLD ? "ordinary code touched device memory" : nullptr);
}
TEST(simt_finds_small_overruns_at_the_latest_when_freed) { must_die(free_after_overrun, nullptr); }

/* Errors. */

TEST(simt_refuses_launches_that_a_gpu_refuses)
{
    int *d = on_device<int>(1);
    CHECK_STATUS(simt_launch(nullptr, set_to, dim3(1), dim3(1025), 0, d, 1, 1),
                 cudaErrorInvalidConfiguration);
    CHECK_STATUS(simt_launch(nullptr, set_to, dim3(0), dim3(1), 0, d, 1, 1),
                 cudaErrorInvalidConfiguration);
    CHECK_STATUS(simt_launch(nullptr, set_to, dim3(1, 65536), dim3(1), 0, d, 1, 1),
                 cudaErrorInvalidConfiguration);
    CHECK_STATUS(simt_launch(nullptr, set_to, dim3(1), dim3(1), 228 << 10, d, 1, 1),
                 cudaErrorInvalidValue);
    CHECK_STATUS(simt_launch((cudaStream_t)0x9990, set_to, dim3(1), dim3(1), 0, d, 1, 1),
                 cudaErrorInvalidResourceHandle);
    CHECK_STATUS(cudaGetLastError(), cudaErrorInvalidResourceHandle);
    CHECK_EQ_INT(simt_n_pending(), 0);
    GOOD(cudaFree(d));
    CHECK(strcmp(cudaGetErrorName(cudaErrorNotReady), "cudaErrorNotReady") == 0);
    CHECK(strcmp(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory") == 0);
}

TEST(simt_fails_by_order)
{
    void *p, *q;
    simt_fail_next(cudaErrorMemoryAllocation, "cudaMalloc", 1);
    GOOD(cudaMalloc(&p, 10));
    CHECK_STATUS(cudaMalloc(&q, 10), cudaErrorMemoryAllocation);
    GOOD(cudaMalloc(&q, 10));
    simt_fail_next(cudaErrorLaunchOutOfResources, "launch", 0);
    CHECK_STATUS(simt_launch(nullptr, set_to, dim3(1), dim3(1), 0, (int *)p, 1, 1),
                 cudaErrorLaunchOutOfResources);
    simt_fail_next(cudaErrorIllegalAddress, "kernel", 1);
    set(nullptr, (int *)p, 1);
    set(nullptr, (int *)p, 2);
    set(nullptr, (int *)p, 3);
    CHECK_STATUS(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
    CHECK_EQ_INT(simt_n_kernels(), 1);
    CHECK_STATUS(cudaGetLastError(), cudaErrorIllegalAddress);
    CHECK_STATUS(cudaMalloc(&q, 10), cudaErrorIllegalAddress); /* it lasts */
    CHECK_STATUS(cudaGetLastError(), cudaErrorIllegalAddress);
    GOOD(cudaDeviceReset());
    GOOD(cudaMalloc(&q, 10));
    GOOD(cudaFree(q));
    CHECK_STATUS(cudaFree(p), cudaErrorInvalidValue); /* went with the context */
}

/* Processes. */

static int in_child(int (*f)(int in, int out), int *in, int *out)
{
    int down[2], up[2];
    CHECK(pipe(down) == 0 && pipe(up) == 0);
    fflush(NULL);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        close(down[1]);
        close(up[0]);
        _exit(f(down[0], up[1]));
    }
    close(down[0]);
    close(up[1]);
    *in = up[0];
    *out = down[1];
    return child;
}

static int exit_of(int child)
{
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

/* Gives its handle away, frees the second memory, and looks at the first when told to. */
static int exporter(int in, int out)
{
    int *d = on_device<int>(100), *gone = on_device<int>(100);
    cudaIpcMemHandle_t handles[2];
    GOOD(cudaMemset(d, 0, 100 * sizeof *d));
    GOOD(cudaIpcGetMemHandle(&handles[0], d));
    GOOD(cudaIpcGetMemHandle(&handles[1], gone));
    GOOD(cudaFree(gone));
    void *again;
    CHECK_STATUS(cudaIpcOpenMemHandle(&again, handles[0], cudaIpcMemLazyEnablePeerAccess),
                 cudaErrorDeviceUninitialized);
    CHECK(write(out, handles, sizeof handles) == sizeof handles);
    char word;
    CHECK(read(in, &word, 1) == 1);
    CHECK_EQ_INT(read_int(d), 0x77777777);
    CHECK_EQ_INT(read_int(d + 99), 5);
    GOOD(cudaFree(d));
    return 0;
}

TEST(simt_shares_memory_between_processes)
{
    int in, out, child = in_child(exporter, &in, &out);
    cudaIpcMemHandle_t handles[2];
    CHECK(read(in, handles, sizeof handles) == sizeof handles);
    void *p, *q;
    GOOD(cudaIpcOpenMemHandle(&p, handles[0], cudaIpcMemLazyEnablePeerAccess));
    GOOD(cudaIpcOpenMemHandle(&q, handles[0], cudaIpcMemLazyEnablePeerAccess));
    CHECK(p == q);
    CHECK_STATUS(cudaIpcOpenMemHandle(&q, handles[1], cudaIpcMemLazyEnablePeerAccess),
                 cudaErrorInvalidValue);
    int *d = (int *)p;
    CHECK_EQ_INT(read_int(d + 99), 0);
    cudaStream_t s = new_stream();
    GOOD(cudaMemsetAsync(d, 0x77, 40, s));
    set(s, d + 99, 5);
    CHECK_STATUS(cudaFree(p), cudaErrorInvalidValue);
    CHECK_STATUS(cudaMemsetAsync(d, 0, 401, s), cudaErrorInvalidValue);
    GOOD(cudaStreamSynchronize(s));
    GOOD(cudaIpcCloseMemHandle(p));
    GOOD(cudaIpcCloseMemHandle(p));
    CHECK_STATUS(cudaIpcCloseMemHandle(p), cudaErrorInvalidValue);
    CHECK(write(out, "x", 1) == 1);
    CHECK_EQ_INT(exit_of(child), 0);
    /* of a dead process */
    CHECK_STATUS(cudaIpcOpenMemHandle(&p, handles[0], cudaIpcMemLazyEnablePeerAccess),
                 cudaErrorInvalidValue);
}

static int use_after_fork(int, int)
{
    int n;
    return cudaGetDeviceCount(&n) == cudaErrorInitializationError ? 0 : 1;
}

TEST(simt_does_not_outlive_a_fork)
{
    int *d = on_device<int>(1);
    int in, out, child = in_child(use_after_fork, &in, &out);
    CHECK_EQ_INT(exit_of(child), 0);
    GOOD(cudaFree(d));
}

TEST_MAIN(CASE(simt_runs_nothing_before_somebody_waits),
          CASE(simt_reads_pinned_sources_late_and_others_at_once),
          CASE(simt_orders_streams_by_events_alone),
          CASE(simt_orders_blocking_streams_and_the_legacy_stream), CASE(simt_ends_polling),
          CASE(simt_tells_the_time_between_events),
          CASE(simt_calls_back_though_nobody_synchronises), CASE(simt_serves_several_threads),
          CASE(simt_replays_graphs_on_what_memory_holds_then),
          CASE(simt_shows_an_event_that_a_graph_lacks),
          CASE(simt_breaks_captures_by_what_cannot_be_captured),
          CASE(simt_has_as_much_memory_as_it_says), CASE(simt_is_a_machine_without_a_gpu),
          CASE(simt_knows_pointers), CASE(simt_copies_rows),
          CASE(simt_keeps_the_host_from_device_memory),
          CASE(simt_finds_small_overruns_at_the_latest_when_freed),
          CASE(simt_refuses_launches_that_a_gpu_refuses), CASE(simt_fails_by_order),
          CASE(simt_shares_memory_between_processes), CASE(simt_does_not_outlive_a_fork))
